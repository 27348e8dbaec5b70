"""Sessions of torch.profiler: start, step, stop, export; the window they fill. Nothing here knows of layers."""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import mmap
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from glob import glob
from pathlib import Path
from typing import Any, ClassVar, Literal

import msgspec
import torch
from torch.profiler import profiler as torch_profiler

from profiler_wrapper.capture.owned_tensors import OwnedTensors
from profiler_wrapper.capture.records import RecordedTrace, Window
from profiler_wrapper.capture.steps import Mode
from profiler_wrapper.capture.torch_state import (
    Watch,
    claim_recorder,
    is_alive,
    is_tracing,
    keep_dynamo_off,
    profiler_is_on,
    release_recorder,
)
from profiler_wrapper.errors import in_a_line
from profiler_wrapper.trace.joined import JoinedTrace
from profiler_wrapper.trace.marks import GARBAGE
from profiler_wrapper.trace.run_file import Holding
from profiler_wrapper.trace.spans import ranges

# Most of what is used here has no types.
_KinetoProfile: Any = torch_profiler._KinetoProfile
_ExperimentalConfig: Any = torch._C._profiler._ExperimentalConfig
_autograd: Any = torch.autograd
_record_function: Any = torch.autograd.profiler.record_function
_supported_activities: Any = torch_profiler.supported_activities

_any_json = msgspec.json.Decoder(msgspec.Raw)
_IN_PLACE_OF = str.maketrans('"\\\t\n\r', "'/   ")
_TAIL_BYTES = 4096
_YOUNGEST = 0  # generation of Python's garbage: such collections are short, and there may be thousands a second


class SessionLost(RuntimeError):
    """The recording of a session cannot be had; the message says why."""


def machine_activities() -> tuple[Any, ...]:
    """All that torch.profiler can record on this machine."""
    return tuple(sorted(_supported_activities(), key=lambda activity: str(activity.name)))


def safe_name(name: str) -> str:
    """A name that torch's exporter cannot mangle: what would break the JSON is replaced.

    A `"` in an event's name makes the whole exported file invalid, other control characters turn the
    name into `unknown`, a lone surrogate raises.
    """
    text = str(name).translate(_IN_PLACE_OF)
    text = "".join(char if " " <= char <= "~" else f"<U+{ord(char):04X}>" for char in text)
    return text[:1000] or "(no name)"


class Annotation:
    """A named interval in the trace (`user_annotation`): what `record_function` writes, entered and left by calls.

    Where a session ends in the midst of it, it ends too, and may begin again in the next; each calls `on_begin`.
    """

    def __init__(self, name: str, on_begin: Callable[[str], object] = str) -> None:
        self._name, self._on_begin = name, on_begin
        self.record: Any = None  # what torch knows it by, while it is open

    def begin(self) -> Annotation:
        """Open it; a second call does nothing."""
        if self.record is None and not is_tracing():
            record = _record_function(safe_name(self._name))
            record.__enter__()
            self.record = record
            self._on_begin(self._name)
        return self

    def end(self) -> None:
        """Close it; a second call does nothing."""
        record, self.record = self.record, None
        if record is not None:
            record.__exit__(None, None, None)


class OpenScopes:
    """The scopes of `record_function` that began in a recording and are still open, be they the user's or Lightning's.

    When such a scope ends after its recording has, and another one is on by then, torch writes the time into memory
    that it has freed. So all of them are ended before; that they are left later does nothing then.
    """

    def __init__(self) -> None:
        self.open: dict[int, Any] = {}  # by id, the outermost first
        self._originals = _record_function.__enter__, _record_function.__exit__
        self._methods = self._watched(*self._originals)

    def watch(self) -> None:
        """From now on; scopes that are open already are none of this recording."""
        _record_function.__enter__, _record_function.__exit__ = self._methods

    def end(self) -> None:
        """End those that are open, the innermost first, and watch no longer."""
        self.forget()
        while self.open:
            _, scope = self.open.popitem()
            torch.ops.profiler._record_function_exit._RecordFunction(scope.record)

    def forget(self) -> None:
        """Watch no longer."""
        for name, original, ours in zip(("__enter__", "__exit__"), self._originals, self._methods, strict=True):
            if vars(_record_function)[name] is ours:  # else somebody has put theirs over it, which calls ours
                setattr(_record_function, name, original)

    def _watched(self, enter: Any, leave: Any) -> tuple[Any, Any]:
        @functools.wraps(enter)  # TorchScript compiles what is wrapped
        def __enter__(scope: Any) -> Any:
            entered = enter(scope)
            if profiler_is_on():
                self.open[id(scope)] = scope
            return entered

        @functools.wraps(leave)
        def __exit__(scope: Any, *error: Any) -> Any:
            if scope.run_callbacks_on_exit:  # else it ends with a future
                self.open.pop(id(scope), None)
            return leave(scope, *error)

        keep_dynamo_off(__enter__, and_below=True)
        keep_dynamo_off(__exit__, and_below=True)
        return __enter__, __exit__


class GarbageMarks:
    """Marks Python's collections of garbage, but the youngest, on the thread that has them, while installed.

    Their pauses belong to no layer, and may hold all ranks up; torch.profiler shows them only where it records stacks.
    """

    def __init__(self) -> None:
        self._open: Any = None  # Python collects once at a time
        self._process = os.getpid()

    def install(self) -> None:
        """From now on. Again: nothing more."""
        if self._heard not in gc.callbacks:
            self._process = os.getpid()
            gc.callbacks.append(self._heard)

    def remove(self) -> None:
        """No longer; a second call does nothing."""
        if self._heard in gc.callbacks:
            gc.callbacks.remove(self._heard)
        self._close()

    def _heard(self, phase: str, info: dict[str, int]) -> None:
        """What Python calls; what it raises Python prints and goes on."""
        if phase != "start":
            self._close()
        elif info["generation"] > _YOUNGEST and os.getpid() == self._process:  # not in a fork, which records nothing
            self._open = torch._C._profiler._RecordFunctionFast(GARBAGE)
            self._open.__enter__()

    def _close(self) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            with contextlib.suppress(RuntimeError):  # it began on a thread that is not recorded
                opened.__exit__(None, None, None)


keep_dynamo_off(GarbageMarks._heard, and_below=True)


class Session:
    """One recording with fixed flags.

    `stop()` and `export()` are apart, so that a loop can go on in between. Both have to be called on the thread that
    called `start()`: elsewhere torch stops nothing. `give_way` ends it for a profile that the user asks for.
    """

    with_shapes: ClassVar[Session | None] = None  # the one that runs and records shapes

    def __init__(
        self,
        *,
        activities: Iterable[Any],
        record_shapes: bool = False,
        profile_memory: bool = True,
        with_stack: bool = False,
        give_way: Callable[[], None] | None = None,
    ) -> None:
        self._give_way = give_way
        self.record_shapes = record_shapes
        self.problem: str | None = None
        self._thread = threading.get_ident()
        self.step: Annotation | None = None
        self.scopes = OpenScopes()
        self._garbage = GarbageMarks()
        self._new_profiler = functools.partial(
            _KinetoProfile,
            activities=tuple(activities),
            record_shapes=record_shapes,
            profile_memory=profile_memory,
            with_stack=with_stack,
            experimental_config=_config(with_stack),
        )
        self._profiler = self._new_profiler()
        self.running = False  # started and not stopped by us; another profiler may have ended it meanwhile
        self.when_stopped: list[Callable[[], None]] = []  # each called once, and must not raise

    def is_taken_by(self, profiler: object) -> bool:
        """This session runs, and that `torch.autograd.profiler.profile` is another one."""
        return self.running and self._profiler.profiler is not profiler

    def start(self) -> None:
        """Begin to record. What torch raises leaves the profiler off; RuntimeError: another thread is recorded."""
        self._thread = threading.get_ident()
        claim_recorder(self._give_way)
        try:
            self._begin_trace()
        except BaseException:
            release_recorder()
            raise
        self.running = True
        if self.record_shapes:
            Session.with_shapes = self

    def _begin_trace(self) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch 2.11 says that events are cleared after each cycle
                self._profiler.prepare_trace()
            self._profiler.start_trace()
        except BaseException:
            _switch_off()
            raise
        self.scopes.watch()
        self._garbage.install()

    def write_out(self, write: Callable[[], object]) -> None:
        """End the recording, `write` what it has, which calls `export`, and record on. No scope may be open.

        Raises SessionLost: it cannot be exported, and nothing more is recorded.
        """
        step = self.step
        self._garbage.remove()
        try:
            self._end_trace()
            write()
            self._profiler = self._new_profiler()
            self._begin_trace()
        except BaseException:
            release_recorder()
            self.running = False
            self.close()
            raise
        self.step = step

    def begin_step(self, number: int) -> None:
        """Open the annotation that other tools know a step by."""
        self.end_step()
        self.step = Annotation(f"ProfilerStep#{number}").begin()

    def end_step(self) -> None:
        """Close it."""
        step, self.step = self.step, None
        if step is not None:
            step.end()

    def stop(self) -> None:
        """End the recording; `problem` says if some is missing. Raises SessionLost: nothing of it can be exported."""
        try:
            self._stop()
        finally:
            if Session.with_shapes is self:
                Session.with_shapes = None
            while self.when_stopped:
                self.when_stopped.pop()()

    def _stop(self) -> None:
        self._garbage.remove()
        if not self.running:
            return
        self.running = False
        release_recorder()
        if threading.get_ident() != self._thread:
            self.scopes.forget()
            if is_alive(self._thread):
                raise SessionLost("it was ended on another thread than it began on, which made no further call or step")
            with contextlib.suppress(Exception):  # torch has nothing left to stop; but a process that ends now crashes
                self._profiler.stop_trace()
            raise SessionLost("the thread that it recorded has ended")
        self._end_trace()

    def _end_trace(self) -> None:
        try:
            try:
                self.end_step()
            finally:
                self.scopes.end()
            if not profiler_is_on():
                raise SessionLost("another profiler ended it")
            stopped = getattr(_autograd, "_is_kineto_stopped", None)
            if stopped is not None and stopped():
                self.problem = "the device's recorder stopped early (its buffer was full, or another tool took it)"
            self._profiler.stop_trace()
        except SessionLost:
            raise
        except BaseException as error:  # Ctrl-C too: no profiler may stay on
            _switch_off()
            if not isinstance(error, Exception):
                raise
            raise SessionLost(f"torch.profiler failed to stop: {in_a_line(error)}") from error

    def export(self, path: Path) -> None:
        """Write the trace to `path`; `problem` says if its JSON is not valid. Raises SessionLost: no whole file."""
        results = getattr(self._profiler.profiler, "kineto_results", None)
        # An empty result has no start; exporting it crashes the process.
        if results is None or results.trace_start_ns() == 0:
            raise SessionLost("torch.profiler recorded nothing (another profiler took its place)")
        self._export(path)
        if is_json(path):
            return
        # A `"` in somebody's annotation: the exporter in Python is slower, but right.
        with contextlib.suppress(SessionLost):
            self._export(path, use_python_export=True)
            self.problem = (
                "allocations are missing, since an annotation has a quote in its name: torch's own exporter writes "
                "that as invalid JSON, and the one in Python leaves allocations out. Rename it and record again"
            )
        if not is_json(path):
            self.problem = (
                "an annotation has a quote in its name, and this torch writes that as invalid JSON: "
                "rename it and record again"
            )

    def _export(self, path: Path, **options: bool) -> None:
        try:
            self._profiler.export_chrome_trace(str(path), **options)
        except Exception as error:
            raise SessionLost(f"torch.profiler failed to export: {in_a_line(error)}") from error
        if not ends_whole(path):
            raise SessionLost(f"{path} was not written to its end (is the disk full, the directory writable?)")

    def close(self) -> None:
        """Let go of what was recorded."""
        self._profiler.profiler = None


def ends_whole(path: Path) -> bool:
    """The file is there and its last character closes the JSON object."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            return file.read().rstrip().endswith(b"}")
    except OSError:
        return False


def is_json(path: Path) -> bool:
    """The file is valid JSON; a second for a gigabyte, and no memory."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            _any_json.decode(content)
    except msgspec.DecodeError:
        return False
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        return True  # no address space is left to look, which is no reason to call it broken
    return True


def _config(with_stack: bool) -> Any:
    """Skip the Python objects of every event, which nobody here reads; older torch cannot."""
    if with_stack:
        return None
    try:
        return _ExperimentalConfig(trace_only=True)
    except TypeError:
        return None


def _switch_off() -> None:
    if profiler_is_on():
        _autograd._disable_profiler()
        _autograd.profiler._run_on_profiler_stop()


def core_waits_ns() -> dict[str, int]:
    """Per thread of this process, how long it was ready to run without a core; {} where nobody tells."""
    found = {}
    for path in glob("/proc/self/task/*/schedstat"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # the thread has ended
            found[path] = int(Path(path).read_text().split()[1])
    return found


# --- One session after the other, and the window that they fill ---


Scope = Literal["block", "part"]  # that a session names in the trace: an entry of the block; a request, an evaluation


class SessionSequence:
    """Records one session after the other, into windows.

    Args:
        part_path: where to export a session for now.
        before_another: called just before somebody else's profiler takes the recorder from a session of ours.
        held: lists what is owned when a session begins and ends.
    """

    def __init__(
        self,
        *,
        new_session: Callable[[Mode], Session],
        part_path: Callable[[str], Path],
        before_another: Callable[[], None],
        held: OwnedTensors,
    ) -> None:
        self.window = Window()
        self.mode = Mode.IDLE  # of the running session, or of the last one
        self._new_session, self._part_path, self._held = new_session, part_path, held
        self._watch = Watch(is_another=self._is_another, before_another=before_another)
        self._session: Session | None = None
        self._steps: list[int] = []
        self._scopes: dict[Scope, Annotation] = {}  # that are open
        self._named: list[Annotation] = []  # those that run, outermost first
        self._parts = 0  # same (0 -> -1): the name of a file that is moved
        self._whole: JoinedTrace | None = None  # what the running session has written out
        self._written: tuple[int, ...] = ()  # the steps of `_steps` that are in it
        self._pauses_s: list[float] = []  # for that
        self._resumed_ns = 0  # when the last of them ended
        self._frees_unsure = False
        self._began_ns, self._core_waits_ns = 0, dict[str, int]()

    @property
    def running(self) -> bool:
        """A session is being recorded."""
        return self._session is not None

    def start(self, mode: Mode, step: int | None) -> None:
        """Begin a session with this step, None: before the next begins. Raises what torch raises."""
        session = self._new_session(mode)
        if self.window.full is None:  # else this session follows that one without a gap
            self._frees_unsure = _sessions_ended > 0
        self._held.begin()
        if self.window.begin_ns is None:
            self.window.begin_ns = time.time_ns()
        session.start()
        self.mode, self._session, self._steps = mode, session, []
        self._whole, self._written, self._pauses_s = None, (), []
        self._watch.install()
        self._began_ns, self._core_waits_ns = time.monotonic_ns(), core_waits_ns()
        if step is not None:
            session.begin_step(step)
        for block in self._named:
            block.begin()

    def write_out(self) -> Path | None:
        """Have what the running session has recorded written, and record on: both become one trace without the pause.

        Where it is lost, nothing more is recorded. Returns the trace so far; None where nothing was written, for it is
        lost or a scope of somebody's is open.
        """
        session, begin_s = self._session, time.perf_counter()
        ours = {id(one.record): one for one in (session and session.step, *self._scopes.values(), *self._named) if one}
        if session is None or not session.scopes.open.keys() <= ours.keys():
            return None
        scopes = [ours[scope] for scope in session.scopes.open]
        for scope in reversed(scopes):
            scope.end()
        self._whole = self._whole or JoinedTrace(self._new_path())
        try:
            session.write_out(lambda: self._write(session))
        except Exception as error:
            lost = error if isinstance(error, SessionLost) else SessionLost(in_a_line(error))
            self._let_go()
            session.stop()
            self._lose(session, lost, self._held.end())
            return None
        self._written, self._resumed_ns = tuple(self._steps), time.time_ns()
        for scope in scopes:
            if scope is not self._scopes.get("block"):  # an entry of the block is counted once
                scope.begin()
        self._pauses_s.append(time.perf_counter() - begin_s)
        return self._whole.path

    def begin_step(self, step: int) -> None:
        """The next step of the running session."""
        if self._session is not None:
            self._session.begin_step(step)

    def end_step(self, step: int, *, counts: bool = True) -> None:
        """That step was recorded from begin to end; where it does not count, its events belong to none."""
        self.end_scope("part")
        if self._session is not None:
            self._session.end_step()
            self._steps += [step] if counts else []

    def begin_scope(self, scope: Scope, name: str) -> None:
        """Name what is recorded from now on, until `end_scope` or the session's end."""
        self.end_scope(scope)
        if self._session is not None:
            self._scopes[scope] = Annotation(name).begin()

    def end_scope(self, scope: Scope) -> None:
        """End it; a second call does nothing."""
        if scope in self._scopes:
            self._scopes.pop(scope).end()

    def enter_named(self, block: Annotation) -> None:
        """It begins, recorded or not."""
        self._named.append(block)
        if self._session is not None:
            block.begin()

    def leave_named(self, block: Annotation) -> None:
        """It has ended."""
        if block in self._named:
            self._named.remove(block)

    def stop(self) -> None:
        """End the running session and keep its trace in the window."""
        session = self._let_go()
        if session is None:
            return
        held: tuple[Holding, ...] = ()
        try:
            held = self._held.end()
            self.window.end_ns = time.time_ns()
            waits_ns = (waits - self._core_waits_ns.get(thread, 0) for thread, waits in core_waits_ns().items())
            share = max(waits_ns, default=0) / max(1, time.monotonic_ns() - self._began_ns)
            session.stop()
            self._keep(session, self._write(session), tuple(self._steps), held, share)
        except SessionLost as lost:
            self._lose(session, lost, held)
        finally:
            session.close()

    def _keep(
        self, session: Session, path: Path, steps: tuple[int, ...], held: tuple[Holding, ...], share: float = 0.0
    ) -> None:
        whole, self._whole = self._whole, None
        if whole is not None:
            held = tuple(Holding(whole.place_ns(one.time_ns), one.tensors) for one in held)
        trace = RecordedTrace(path, steps, session.record_shapes, held, self._frees_unsure, share)
        if self._pauses_s:
            self.window.warn(
                f"recording paused for {sum(self._pauses_s):.1f} s in all, to write out what torch held in memory "
                f"({len(self._pauses_s)} x): neither times nor the trace have these pauses"
            )
        if session.problem is not None:
            self.window.warn(session.problem, incomplete=True)
        if self._held.problem is not None:
            self.window.warn(self._held.problem)
        if self.mode is Mode.FULL:
            self.window.full = trace
        else:
            self.window.timed = trace

    def discard(self) -> None:
        """End the running session and forget the window."""
        session = self._let_go()
        self._held.forget()
        if self._whole is not None:
            self._whole.path.unlink(missing_ok=True)
        self._whole = None
        self.take_window().drop_traces()
        if session is not None:
            try:
                session.stop()
            finally:
                session.close()

    def take_window(self) -> Window:
        """The window so far; the next begins."""
        window, self.window = self.window, Window()
        return window

    def _let_go(self) -> Session | None:
        global _sessions_ended
        self._watch.remove()
        session, self._session = self._session, None
        _sessions_ended += session is not None
        self.end_scope("part")
        for block in reversed(self._named):
            block.end()
        self.end_scope("block")
        return session

    def _new_path(self) -> Path:
        self._parts += 1
        return self._part_path(f"{self._parts}_{self.mode.name.lower()}")

    def _write(self, session: Session) -> Path:
        """Export a session, and join that to what it has written out before: where it is."""
        path = self._new_path()
        try:
            session.export(path)
            if self._whole is None:
                return path
            self._whole.add(path, resumed_ns=self._resumed_ns)
        except BaseException as error:
            for torn in (path, path.with_name(f"{path.name}.tmp")):  # torch writes to the second first
                with contextlib.suppress(OSError):
                    torn.unlink(missing_ok=True)
            if isinstance(error, Exception) and not isinstance(error, SessionLost):
                raise SessionLost(f"it could not be joined to what was written before: {in_a_line(error)}") from error
            raise
        return self._whole.path

    def _lose(self, session: Session, lost: SessionLost, held: tuple[Holding, ...]) -> None:
        steps = self._steps[len(self._written) :]
        what = f"steps {ranges(steps)}" if steps else "an unfinished step"
        self.window.warn(f"the recording of {what} is lost: {lost}", incomplete=True)
        if self._whole is not None and self._whole.pieces:
            self._keep(session, self._whole.path, self._written, held)

    def _is_another(self, profiler: object) -> bool:
        return self._session is not None and self._session.is_taken_by(profiler)


_sessions_ended = 0  # in this process
