"""`Timer` and `global_timer`: how long named parts of a program take, on the CPU and the device, in a file per rank."""

from __future__ import annotations

import functools
import inspect
import os
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, TypeVar, cast

from torch.compiler import is_dynamo_compiling

from profiler_wrapper.capture.steps import is_off
from profiler_wrapper.errors import Notices, WrongUse, first_few, in_a_line, shown
from profiler_wrapper.timer.log import SpanPlace
from profiler_wrapper.timer.spans import About, OpenSpan, SpanRecorder

if TYPE_CHECKING:
    from typing_extensions import Unpack


Function = TypeVar("Function", bound=Callable[..., Any])


def harmless(method: Function) -> Function:
    """Does nothing where its object is not `_active`; what fails inside goes to the object's `_failed`."""

    @functools.wraps(method)
    def guarded(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if not self._active:
            return None
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            self._failed(f"{method.__name__}()", error)
            return None

    return cast(Function, guarded)


class Timer:
    """How long named parts of a program take, written down as they end.

        timer.start("forward"); ...; timer.stop("forward")
        with timer("backward"): ...
        @timer("load")                                   # or @timer.timed("load")
        def load(): ...
        timer.step()                                     # a step ends, and the next begins
        timer.dump()

    Spans nest, also within others of their name, and on every thread by themselves. Where the program uses an
    accelerator each has, beside the CPU's time, the time between two events on the current stream, which is read when
    the device has come to them: nothing here waits for the device but `dump`, for some seconds at most.

    Each span is a line of `<run>/timers/timer_rank<k>.log` and one of `timer_rank<k>.jsonl` as soon as it ends, so a
    process that is killed loses its last one at most; on an accelerator the line of text comes when the device's time
    is known. The rank is that which is given, else
    the device mesh's, the process group's, torchrun's, SLURM's; files that were begun before it was known are moved
    to where they belong. A process that a rank forked or spawned without giving it a rank, as to load data, writes
    `worker<pid>_of_rank<k>` beside them. Timers of one process with the same arguments share their files.

    Words in a name tell the kind of a span, by which `ranks` compares: "load", "data", "get_batch" are data; "forward",
    "fwd", "loss"; "backward", "bwd"; "all_reduce", "broadcast", "barrier" ... communication; "optimizer", "opt",
    "zero_grad"; "recompute", "gc", "checkpoint". `kind=` says it otherwise. Other names are "other", and listed by
    themselves.

    A failure is one warning, and nothing is ever raised but for wrong arguments here. `PROFILER_WRAPPER=off` in the
    environment turns it off. In what `torch.compile` compiles there are no spans, and the graphs are what they are
    without them: time the call of the compiled function.

    Args:
        output_dir: where the run's directory is.
        run_name: its name; by default PROFILER_WRAPPER_RUN, the job's id, or the time.
        prefix: what a name by the job or the time begins with.
        rank: of this process, where the process group and the environment don't tell.
        world_size: ranks of the job, where these don't tell.
        device_mesh: the `DeviceMesh` of the job, where these don't tell.
        device: "cpu": no events; by default the accelerator that torch finds.
        gc: the pauses of the garbage collector from 0.1 ms on are spans, too.

    Raises:
        WrongUse: an argument has a value that means nothing.
    """

    def __init__(
        self,
        output_dir: str | os.PathLike[str] = "outputs",
        *,
        run_name: str | None = None,
        prefix: str = "profile",
        rank: int | None = None,
        world_size: int | None = None,
        device_mesh: Any = None,
        device: Any = None,
        gc: bool = False,
    ) -> None:
        self._arguments: dict[str, Any] = {name: value for name, value in locals().items() if name != "self"}
        if not isinstance(gc, bool):
            raise WrongUse(f"gc={shown(gc)}: give True or False.")
        self._notices = Notices()
        self._off = is_off()
        self._use()

    def _use(self) -> None:
        device, watch_garbage = self._arguments["device"], self._arguments["gc"] and not self._off
        self._recorder = SpanRecorder(
            _place_of(self._arguments), self._notices, device=device, watch_garbage=watch_garbage
        )
        self._finish = weakref.finalize(self, _finish, self._recorder, self._notices)

    @property
    def _active(self) -> bool:
        """It is on, and the code that asks is not being compiled."""
        return not self._off and not is_dynamo_compiling()

    # --- spans ---

    def start(self, name: Any, closes: bool = False, /, **about: Unpack[About]) -> OpenSpan | None:
        """A span begins within the last one that this thread has begun and not ended.

        Args:
            name: what it is called.
            closes: whoever begins it ends it whatever happens, as a block does.
            about: kind=, layer=, microbatch=, group=, bytes=, step=, where the name and `step()` do not tell.

        Returns: what `stop` takes for exactly this span.
        """
        if self._off or is_dynamo_compiling():
            return None
        try:
            return self._recorder.start(name if type(name) is str else str(name), closes, about)
        except Exception as error:
            self._failed("start()", error)
            return None

    def stop(self, span: Any = None) -> None:
        """A span ends: the innermost of that name, wherever it was begun; without a name the innermost.

        Those begun within it and not ended go on. Of one that was not begun there is one warning.
        """
        if self._off or is_dynamo_compiling():
            return
        end_ns = perf_counter_ns()
        try:
            self._recorder.stop(span, end_ns)
        except Exception as error:
            self._failed("stop()", error)

    @harmless
    def stop_within(self, span: OpenSpan) -> None:
        """End all spans that this thread began within one, as an exception that passes it does."""
        self._recorder.stop_within(span)

    def __call__(self, name: str, **about: Unpack[About]) -> TimedBlock:
        """A span as a block or, put before a function, whenever that is called."""
        return TimedBlock(self, name, about)

    def timed(self, name: str, **about: Unpack[About]) -> Callable[[Function], Function]:
        """A span whenever a function is called: `@timer.timed("load")`."""
        return TimedBlock(self, name, about)

    @harmless
    def step(self, number: int | None = None) -> None:
        """Step `number` begins, and the one before ends; without a number it is one more than that.

        Where the first call has no number, what was timed before it is step 0. Where there is no call, each span that
        is named as a step is one; else `ranks` finds steps by the first name that comes again, and says so.
        """
        self._recorder.step(None if number is None else int(number))

    @harmless
    def dump(self) -> Path | None:
        """Write everything there is, and go on. Waits for the device, 10 seconds at most.

        Returns: the file with the lines of text; None: nothing was timed.
        """
        return self._recorder.dump()

    def close(self) -> None:
        """As `dump`, and nothing is timed from now on."""
        self._off = True
        self._finish()

    def configure(self, **arguments: Any) -> None:
        """Other arguments than it was made with, as `global_timer` needs.

        With another `output_dir`, `run_name`, `prefix` or `device`, what was timed before stays where it is.

        Raises:
            WrongUse: an argument has a value that means nothing.
        """
        unknown = sorted(arguments.keys() - self._arguments.keys())
        if unknown:
            raise WrongUse(f"a timer has no {first_few(unknown, 3)}. It takes {', '.join(self._arguments)}.")
        changed = {**self._arguments, **arguments}
        place = _place_of(changed)
        before, self._arguments = self._arguments, changed
        if any(before[name] != changed[name] for name in ("output_dir", "run_name", "prefix", "device")):
            self._finish()
            self._use()
            return
        try:
            self._recorder.log.set_place(place)
            if changed["gc"] and not self._off:
                self._recorder.watch_garbage()
        except Exception as error:
            self._failed("configure()", error)

    def __deepcopy__(self, memo: dict[int, Any]) -> Timer:
        return self  # as a copy of a model that holds it

    def __copy__(self) -> Timer:
        return self

    def __reduce__(self) -> tuple[Callable[..., Timer], tuple[()]]:
        return functools.partial(Timer, **{**self._arguments, "device_mesh": None}), ()

    def after_fork(self) -> None:
        """Begin anew in a forked child, which writes files of its own; every timer does so by itself."""
        self._recorder.reset()

    def _failed(self, what: str, error: Exception) -> None:
        """Something has failed: one warning, and the timer is off."""
        if not self._off and not isinstance(error, RecursionError):  # the program is too deep here, and soon is not
            self._off = True
            self._notices.warn_once(
                "failed", f"the timer is off, because {what} failed: {in_a_line(error)}; training goes on"
            )


class TimedBlock:
    """A span as a block, which may be entered again, also within itself. Before a function: whenever it is called."""

    __slots__ = ("_about", "_frame", "_name", "_outer", "_timer")

    def __init__(self, timer: Timer, name: str, about: Mapping[str, Any]) -> None:
        self._timer, self._name, self._about = timer, name, about
        self._frame: OpenSpan | None = None
        self._outer: list[OpenSpan] | None = None  # where it is entered within itself

    def __enter__(self) -> TimedBlock:
        if self._frame is not None:
            self._outer = [*(self._outer or ()), self._frame]
        timer, name, about = self._timer, self._name, self._about
        self._frame = timer.start(name, True, **about) if about else timer.start(name, True)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        frame = self._frame
        self._frame = self._outer.pop() if self._outer else None
        if frame is not None:
            if error is not None and kind is not GeneratorExit:  # whoever closes a generator has spans of its own
                self._timer.stop_within(frame)
            self._timer.stop(frame)

    def __call__(self, function: Function) -> Function:
        """`function`, timed: a coroutine until it is done, a generator until it is exhausted or closed."""
        timer, name, about = self._timer, self._name, self._about
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def call_and_wait(*args: Any, **kwargs: Any) -> Any:
                with TimedBlock(timer, name, about):
                    return await function(*args, **kwargs)

            return cast(Function, call_and_wait)
        if inspect.isgeneratorfunction(function):

            @functools.wraps(function)
            def exhaust(*args: Any, **kwargs: Any) -> Any:
                with TimedBlock(timer, name, about):
                    return (yield from function(*args, **kwargs))

            return cast(Function, exhaust)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with TimedBlock(timer, name, about):
                return function(*args, **kwargs)

        return cast(Function, call)


def _place_of(arguments: Mapping[str, Any]) -> SpanPlace:
    return SpanPlace(**{name: value for name, value in arguments.items() if name not in ("device", "gc")})


def _finish(recorder: SpanRecorder, notices: Notices) -> None:
    try:
        recorder.finish()
    except Exception as error:
        notices.warn_once("failed", f"the timer could not end its files: {in_a_line(error)}")


global_timer = Timer()
