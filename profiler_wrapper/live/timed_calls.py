"""Blocks and functions that are timed."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from profiler_wrapper.live.open_spans import Frame
    from profiler_wrapper.live.timer import Timer

Function = TypeVar("Function", bound=Callable[..., Any])


class TimedBlock:
    """A span as a block, which may be entered again, also within itself. Before a function: whenever it is called."""

    __slots__ = ("_about", "_frame", "_name", "_outer", "_timer")

    def __init__(self, timer: Timer, name: str, about: Mapping[str, Any]) -> None:
        self._timer, self._name, self._about = timer, name, about
        self._frame: Frame | None = None
        self._outer: list[Frame] | None = None  # where it is entered within itself

    def __enter__(self) -> TimedBlock:
        if self._frame is not None:
            self._outer = [*(self._outer or ()), self._frame]
        timer, name, about = self._timer, self._name, self._about
        self._frame = timer.start(name, True, **about) if about else timer.start(name, True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
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
            frame = timer.start(name, True, **about)
            try:
                return function(*args, **kwargs)
            except BaseException:
                if frame is not None:
                    timer.stop_within(frame)
                raise
            finally:
                if frame is not None:
                    timer.stop(frame)

        return cast(Function, call)
