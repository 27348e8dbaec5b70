"""Runs a script that nobody edits as Python does, and profiles it from its first call of a module to its end.

The script is `__main__`, of a fresh module. Nothing that reads environment variables when it is imported (torch, numpy)
is imported before the script does so itself, since it may set them first.
"""

from __future__ import annotations

import atexit
import builtins
import importlib.util
import io
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

from profiler_wrapper.capture.compiled import after_import
from profiler_wrapper.capture.steps import is_off
from profiler_wrapper.child import start_child
from profiler_wrapper.errors import WrongUse, in_a_line, say, shown

if TYPE_CHECKING:
    from torch import nn

    from profiler_wrapper.run.options import Options
    from profiler_wrapper.run.profiling import Profiling

_PACKAGE = str(Path(__file__).parents[1]) + os.sep


def run_script(program: Sequence[str], *, is_module: bool, given: Mapping[str, Any]) -> None:
    """Run a script, or a module as `python -m` does, with its arguments.

    Raises:
        SystemExit: there is no such script, which is said.
        What it raises. Where nobody catches that, the traceback that Python prints begins with the script.
    """
    name, *arguments = program
    sys.argv = ["-m" if is_module else name, *arguments]
    if not getattr(sys.flags, "safe_path", False):  # Python 3.11
        sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.realpath(name))
    main = sys.modules["__main__"] = ModuleType("__main__")
    profile = _Profile(given)
    try:
        code, spec = _find_module(name) if is_module else _find_script(name)
        _fill(main, code, spec)
        if is_module:
            sys.argv[0] = vars(main)["__file__"]
        exec(code, vars(main))
    except _NoScript as problem:
        say(f"error: {problem}\n", on="stderr")
        raise SystemExit(2) from None
    except BaseException as raised:
        _show_without_ours()
        profile.end(None if isinstance(raised, SystemExit) and raised.code in (None, 0) else raised)
        raise
    profile.end(None)


# --- A script as Python runs it ---


class _NoScript(Exception):
    """The message says why."""


def _fill(main: ModuleType, code: CodeType, spec: ModuleSpec | None) -> None:
    path = code.co_filename if spec is None or spec.origin is None else spec.origin
    vars(main).update(
        __builtins__=builtins,
        __cached__=None if spec is None else spec.cached,
        __file__=path,
        __loader__=SourceFileLoader("__main__", path) if spec is None else spec.loader,
        __package__=None if spec is None else spec.parent,
        __spec__=spec,  # None where a script runs: a spawned process imports it by `__file__` then
    )


def _find_script(name: str) -> tuple[CodeType, ModuleSpec | None]:
    """A file with Python's source; of a directory or archive its `__main__`. Raises _NoScript: there is none."""
    path = os.path.abspath(name)
    spec = PathFinder.find_spec("__main__", [path])
    if spec is not None:
        sys.path[0] = path
        return _code_of(spec), spec
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        launcher = "a launcher goes first: torchrun -m profiler_wrapper run SCRIPT"
        advice = f"Name a script, or a module after -m; {launcher}."
        raise _NoScript(f"{name} cannot be run: {error.strerror}. {advice}") from error
    return compile(source, path, "exec", dont_inherit=True), None


def _find_module(name: str) -> tuple[CodeType, ModuleSpec]:
    """The module, of a package what is called `__main__` in it. Raises _NoScript: there is none."""
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # of an import in the package
        spec = None
    except (ImportError, ValueError, AttributeError):  # ".name", "package/name.py"
        spec = None
    if spec is None:
        raise _NoScript(f"-m {name}: there is no such module, or it cannot be run.")
    return _code_of(spec), spec


def _code_of(spec: ModuleSpec) -> CodeType:
    code: CodeType | None = getattr(spec.loader, "get_code", lambda name: None)(spec.name)
    if code is None:
        raise _NoScript(f"{spec.name} cannot be run: it has no code in Python.")
    return code


def _show_without_ours() -> None:
    """What Python prints of what the script raised is what it would print without us."""
    show = sys.excepthook

    def show_the_script(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        for one in _chain(error, set()):
            one.__traceback__ = _without_ours(one.__traceback__)
        show(kind, error, error.__traceback__)

    sys.excepthook = show_the_script


def _chain(error: BaseException | None, seen: set[int]) -> Iterator[BaseException]:
    """That error, those that it came of, and those of a group."""
    if error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        for other in (error.__cause__, error.__context__, *getattr(error, "exceptions", ())):
            yield from _chain(other, seen)


def _without_ours(traceback: TracebackType | None) -> TracebackType | None:
    kept: list[TracebackType] = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if code is run_script.__code__:
            kept.clear()  # with how Python came to us
        elif code.co_filename.startswith(_PACKAGE):
            while kept and kept[-1].tb_frame.f_code.co_filename.startswith("<frozen importlib"):
                kept.pop()  # how the import of torch came to us
        else:
            kept.append(traceback)
        traceback = traceback.tb_next
    for one in reversed(kept):
        traceback = TracebackType(traceback, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return traceback


# --- The profile of it ---


class _Profile:
    """Begins before the first call of a module in this process: a training has been set up by then.

    What a script does until then (a model's weights, data) belongs to no layer, may take as much memory as ends a
    recording, and may choose the devices.
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given, self._process = given, os.getpid()
        self._directory = Path.cwd() if os.path.exists(".") else Path()  # where the script was started
        self._profiling: Profiling | None = None
        self._had_dynamo = False  # before a profiler imported it
        self._stop_waiting: Callable[[], None] = lambda: None
        self._problem = "" if is_off() else "torch was not imported"
        if not is_off():
            after_import("torch", self.wait)

    def wait(self, torch: ModuleType) -> None:
        """torch has been imported just now."""
        try:
            from profiler_wrapper.capture.scopes import BeforeFirstCall, listen, stop_listening
            from profiler_wrapper.capture.torch_state import Watch, records_here

            first_call = BeforeFirstCall(self._begin)
            others = Watch(is_another=lambda profiler: not records_here(), before_another=self._give_way)

            def stop_waiting() -> None:
                stop_listening(first_call)
                others.remove()

            self._stop_waiting = stop_waiting
            listen(first_call)
            others.install()
            self._problem = "no module was called in this process"
        except Exception as error:
            self._problem = in_a_line(error)

    def _begin(self, module: nn.Module) -> None:
        self._stop_waiting()
        if os.getpid() != self._process:  # a worker that was forked
            return
        self._had_dynamo = "torch._dynamo" in sys.modules
        try:
            from profiler_wrapper.run.profiling import Profiling

            options = make_script_options(self._given).with_absolute_paths(self._directory)
            self._profiling = Profiling(None, options)
            self._profiling.enter(module)
        except Exception as error:
            self._problem = in_a_line(error)

    def _give_way(self) -> None:
        self._stop_waiting()
        self._problem = "the script started a torch profiler of its own, and torch runs one at a time"

    def end(self, error: BaseException | None) -> None:
        """The script's main part has ended; where threads run on that Python waits for, one may call the model yet."""
        running = [one for one in threading.enumerate() if one is not threading.current_thread() and not one.daemon]
        if running and (self._profiling is None or self._profiling.is_elsewhere):
            atexit.register(self.finish, error)
        else:
            self.finish(error)

    def finish(self, error: BaseException | None) -> None:
        """The script has ended, by `error` if there is one."""
        self._stop_waiting()
        if os.getpid() != self._process:
            return
        if self._profiling is None:
            if self._problem:
                say(f"profiler_wrapper: nothing was recorded: {self._problem}\n", on="stderr")
            return
        self._profiling.exit(error)
        self._profiling.report()
        # Python ends by SIGINT after Ctrl-C, unless code made of text runs at exit: Dynamo, which torch's profiler
        # imports, imports this then.
        if isinstance(error, KeyboardInterrupt) and not self._had_dynamo:
            importlib.import_module("tabulate")


def make_script_options(given: Mapping[str, Any]) -> Options:
    """Options of `ProfilerWrapper`; `schedule` and `activities` are text. Raises WrongUse: a value means nothing."""
    from profiler_wrapper.run.options import make_options

    readers = {"schedule": _schedule, "activities": _activities}
    values = {name: readers[name](value) if name in readers else value for name, value in given.items()}
    return replace(make_options(**values), from_outside=True)


def _schedule(text: str) -> Any:
    from torch.profiler import schedule

    try:
        parts = (part.partition("=") for part in text.split(","))
        return schedule(**{name.strip(): int(value) for name, _, value in parts})
    except (TypeError, ValueError, AssertionError) as error:
        raise WrongUse(
            f"schedule={shown(text)}: {error}. Give arguments of torch.profiler.schedule, as wait=5,warmup=1,active=3"
        ) from error


def _activities(text: str) -> list[Any]:
    from torch.profiler import ProfilerActivity

    known = {name.lower(): activity for name, activity in ProfilerActivity.__members__.items()}
    names = [name.strip().lower() for name in text.split(",")]
    if unknown := [name for name in names if name not in known]:
        raise WrongUse(f"activities names {shown(unknown[0])}. Give some of: {', '.join(known)}.")
    return [known[name] for name in names]


def check_options(given: Mapping[str, Any]) -> None:
    """Raise WrongUse for what means nothing, before the script begins: in a child, for it imports what reads them."""
    program = (
        f"from {__name__} import make_script_options, WrongUse\n"
        f"try: make_script_options({dict(given)!r})\n"
        "except WrongUse as error: print(error)"
    )
    import subprocess

    with start_child(program, environment={"PYTHONWARNINGS": "ignore"}, stdout=subprocess.PIPE, text=True) as child:
        said = child.communicate()[0]
    if said:
        raise WrongUse(said.strip())
