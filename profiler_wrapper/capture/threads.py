"""Which threads of Python may call a model: known before they start, from what they were given to run.

torch's profiler records the thread that started it, and only that thread can stop it, so it has to be known before.
`profile_all_threads` is of no use: on torch 2.13 it records no allocation, and a stop while any other thread is in
an op, be it one that copies batches to pinned memory, is a write to freed memory (16 of 16 processes crashed).
"""

from __future__ import annotations

import gc
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

_GIVEN = ("_target", "_args", "_kwargs")  # what a thread runs, in its own attributes
_MOST_OBJECTS = 20_000  # looked at for one thread, some 10 ms; a manager holds its model within the first hundred
_NO_WAY = (type, ModuleType, Tensor, threading.Thread)  # what these refer to is not the thread's


_MOST_WAIT_S = 1.0  # for a call or a step on another thread
_LOOK_EVERY_S = 0.01


def other_threads() -> list[threading.Thread]:
    """Those that run beside this one."""
    return [thread for thread in threading.enumerate() if thread is not threading.current_thread()]


def wait_until(done: Callable[[], bool]) -> None:
    """For a moment: another thread does it with its next call or step."""
    end_s = time.monotonic() + _MOST_WAIT_S
    while not done() and time.monotonic() < end_s:
        time.sleep(_LOOK_EVERY_S)


def may_call(thread: threading.Thread, models: Iterable[nn.Module]) -> bool:
    """Whether what the thread runs leads to one of these modules; of none, to any module.

    By arguments, attributes, closures and the globals that functions name.
    """
    wanted = {id(model) for model in models}
    given = vars(thread).copy()  # a running one may change it
    found: deque[Any] = deque(value for name, value in given.items() if name in _GIVEN or not name.startswith("_"))
    seen = set[int]()
    while found and len(seen) < _MOST_OBJECTS:
        thing = found.popleft()
        kind = type(thing)  # what isinstance() asks may be somebody's property
        if id(thing) in seen or issubclass(kind, _NO_WAY):
            continue
        seen.add(id(thing))
        if issubclass(kind, nn.Module) and (not wanted or id(thing) in wanted):
            return True
        if issubclass(kind, FunctionType):
            found.extend((thing.__closure__, thing.__defaults__, thing.__kwdefaults__, vars(thing)))
            found.extend(_globals_of(thing))
        elif gc.is_tracked(thing):
            found.extend(gc.get_referents(thing))
    return False


def _globals_of(function: FunctionType) -> Iterator[Any]:
    """The global things that a function names, and those defined in it."""
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        yield from (function.__globals__[name] for name in code.co_names if name in function.__globals__)
        codes.extend(one for one in code.co_consts if isinstance(one, CodeType))


class ThreadStarts:
    """Tells of the threads that start, until `remove()`, and of the ends of some.

    Args:
        before: called with each thread that is about to start, on the thread that starts it; whether to tell its end.
        at_end: called on a thread when what it ran has ended.

    Neither must raise.
    """

    def __init__(self, *, before: Callable[[threading.Thread], bool], at_end: Callable[[], None]) -> None:
        self._before, self._at_end = before, at_end
        self._original: Any = None
        self._installed: Any = None

    def install(self) -> None:
        """Begin to tell. Again: nothing more."""
        if self._installed is None:
            self._original = threading.Thread.start
            self._installed = threading.Thread.start = self._start(self._original)  # type: ignore[method-assign]

    def remove(self) -> None:
        """Tell of no further thread. Where somebody has replaced the method since, ours stays below it, silent."""
        installed, self._installed = self._installed, None
        if installed is not None and vars(threading.Thread)["start"] is installed:
            threading.Thread.start = self._original  # type: ignore[method-assign]

    def _start(self, original: Any) -> Any:
        @wraps(original)
        def start(thread: threading.Thread) -> None:
            # A second start raises.
            if self._installed is start and thread.ident is None and self._before(thread):
                thread.run = self._run(thread, thread.run)  # type: ignore[method-assign]
            original(thread)

        return start

    def _run(self, thread: threading.Thread, original: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            vars(thread).pop("run", None)
            try:
                original()
            finally:
                self._at_end()

        return run
