"""Listens where every run of the autograd engine passes: what `backward` and `grad` of `torch.autograd` call.

However many listen, and in whatever order they stop, one function of ours stands in the place of torch's, and none when
nobody does.
"""

from __future__ import annotations

import functools
import threading
from typing import Any, Protocol

import torch

from profiler_wrapper.capture.calls import keep_dynamo_off
from profiler_wrapper.capture.signals import is_compiling

# What `backward` and `grad` call, so that those who imported these earlier are seen too.
_NAMES = ("_engine_run_backward",) if hasattr(torch.autograd, "_engine_run_backward") else ("backward", "grad")


class Listener(Protocol):
    """Is told of runs on the thread that begins them. Its methods must not raise."""

    def open_run(self) -> bool:
        """The engine is about to run. Whether `close_run` is to be called."""

    def close_run(self) -> None:
        """That run is over, or has raised."""


_listeners: tuple[Listener, ...] = ()
_in_place: dict[str, tuple[Any, Any]] = {}  # name -> what was there, ours
_lock = threading.RLock()


def listen(listener: Listener) -> None:
    """Tell `listener` of every run from now on, in all threads."""
    global _listeners
    with _lock:
        _listeners = (*_listeners, listener)
        for name in _NAMES:
            there = getattr(torch.autograd, name)
            if name in _in_place and there is not _in_place[name][0]:  # else somebody has put the original back
                continue
            _in_place[name] = there, _telling(there)
            setattr(torch.autograd, name, _in_place[name][1])


def stop_listening(listener: Listener) -> None:
    """Tell it of no further run. What somebody has put over ours since stays, and ours below it passes runs on."""
    global _listeners
    with _lock:
        _listeners = tuple(one for one in _listeners if one is not listener)
        if _listeners:
            return
        for name, (original, ours) in list(_in_place.items()):
            if getattr(torch.autograd, name) is ours:
                setattr(torch.autograd, name, original)
                del _in_place[name]


def _telling(original: Any) -> Any:
    @functools.wraps(original)
    def telling(*args: Any, **kwargs: Any) -> Any:
        if is_compiling() or not _listeners:
            return original(*args, **kwargs)
        opened = _open()
        try:
            return original(*args, **kwargs)
        finally:
            _close(opened)

    keep_dynamo_off(telling, and_below=False)
    return telling


def _open() -> list[Listener]:
    return [one for one in _listeners if one.open_run()]


def _close(opened: list[Listener]) -> None:
    for listener in reversed(opened):
        listener.close_run()


for _ours in (_open, _close):  # a compiled function may call backward
    keep_dynamo_off(_ours, and_below=True)
