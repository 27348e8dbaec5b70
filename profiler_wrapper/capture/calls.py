"""Listens where every call of every module passes: `torch.nn.Module.__call__`.

While somebody listens, one function of ours stands in its place. Compared with hooks on the modules
this leaves nothing on them, costs half, lies outside of their own hooks (an all-gather by FSDP2)
and of a forward compiled in place, and closes whatever the exception.

It also stays out of compiled code. Dynamo steps straight into `forward` if `Module.__call__` is the
function that it knows, so it is told that ours is; it skips our frames; and where it must trace
`__call__` it finds an early return. Graphs, guards and cache keys are those without us, for what was
compiled before, during or after.
"""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from typing import Any, Protocol

import torch
import torch.autograd.profiler as autograd_profiler
from torch import nn
from torch._C import _profiler

from profiler_wrapper.capture.others import recorder_is_taken


class Listener(Protocol):
    """Is told of calls of modules. Its methods must not raise, and are run outside of Dynamo.

    One that also has `take_result(opened, result)` is told there what a call that it opened has returned, before
    `close_call`; one that has `end_marks()` ends there what it has open on this thread: a torch profiler is about to
    stop, whoever's it is.
    """

    def open_call(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], marked: set[str] | None = None
    ) -> object | None:
        """A module is about to be called. What this returns is given to `close_call`, unless it is None.

        `marked`: the names that listeners before this one gave that call in the trace; None: there are none.
        """

    def close_call(self, opened: Any) -> None:
        """That call has returned or raised."""


# Code that Dynamo compiled may guard on this global, so it keeps its value when the last listener goes.
_plain_call: Any = nn.Module.__call__
_plain_stop: Any = autograd_profiler.profile.__exit__
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_listener: Listener | None = None  # the only one, or all of them behind one front
_listeners: tuple[Listener, ...] = ()
_in_place = False  # whether ours is `Module.__call__`, or under somebody's who patched it later
_seen_by_tracer = False
_lock = threading.RLock()

# What Dynamo takes for the call of a module that nobody patched.
_KNOWN_TO_DYNAMO = (
    ("torch._dynamo.utils", "unpatched_nn_module_call"),
    ("torch._dynamo.variables.nn_module", "unpatched_nn_module_call"),
)
# Who else keeps the function it found when it was imported.
_KEPT = (*_KNOWN_TO_DYNAMO, ("torch.fx._symbolic_trace", "_orig_module_call"))


# The first parameter is `self` as in the original: torch's stack tracer reads it by name.
def _call(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    if _is_dynamo_compiling():
        return _plain_call(self, *args, **kwargs)
    listener = _listener
    if listener is None:
        return _plain_call(self, *args, **kwargs)
    opened = listener.open_call(self, args, kwargs)
    if opened is None:
        return _plain_call(self, *args, **kwargs)
    try:
        result = _plain_call(self, *args, **kwargs)
        take_result = getattr(listener, "take_result", None)
        if take_result is not None:
            take_result(opened, result)
        return result
    finally:
        listener.close_call(opened)


class _All:
    """Several listeners as one: each inside the one before it."""

    def __init__(self, listeners: tuple[Listener, ...]) -> None:
        self._listeners = listeners

    def open_call(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], marked: set[str] | None = None
    ) -> object | None:
        names = set[str]() if marked is None else marked
        opened = [(one, one.open_call(module, args, kwargs, names)) for one in self._listeners]
        return [pair for pair in reversed(opened) if pair[1] is not None] or None

    def take_result(self, opened: list[tuple[Listener, object]], result: Any) -> None:
        for listener, its in opened:
            take_result = getattr(listener, "take_result", None)
            if take_result is not None:
                take_result(its, result)

    def close_call(self, opened: list[tuple[Listener, object]]) -> None:
        for listener, its in opened:
            listener.close_call(its)


def listen(listener: Listener) -> None:
    """Tell `listener` of every call of a module from now on, in all threads."""
    global _plain_call, _in_place
    with _lock:
        _keep_dynamo_out(type(listener))
        _set_listeners((*_listeners, listener))
        if not _in_place or vars(nn.Module)["__call__"] is _plain_call:  # or somebody has put the original back
            _let_stack_tracer_see_the_original()
            _plain_call = nn.Module.__call__
            _put(_call, instead_of=_plain_call, known_as=_KNOWN_TO_DYNAMO)
            _in_place = True
            _put_stop(_stop, instead_of=_plain_stop)


def stop_listening(listener: Listener) -> None:
    """Tell `listener` of no further call; with the last one, `Module.__call__` is as it was.

    Where somebody else has patched it over ours, ours stays under theirs and only passes calls on.
    """
    global _in_place
    with _lock:
        _set_listeners(tuple(one for one in _listeners if one is not listener))
        if not _listeners and vars(nn.Module)["__call__"] is _call:
            _put(_plain_call, instead_of=_call, known_as=_KEPT)
            _in_place = False
        if not _listeners:
            _put_stop(_plain_stop, instead_of=_stop)


# What is open when a recording ends, torch would end in memory that it has freed (see `session.OpenScopes`).
def _stop(profiler: Any, *error: Any) -> Any:
    if profiler.enabled:
        for listener in _listeners:
            end_marks = getattr(listener, "end_marks", None)
            if end_marks is not None:
                end_marks()
    return _plain_stop(profiler, *error)


def _let_stack_tracer_see_the_original() -> None:
    """Start and stop the tracer behind `with_stack` once, before ours takes the place of the original.

    It knows the call of a module by the code of `Module.__call__`, which it reads at its first start
    and never again: had that been ours, later profiles would have no `nn.Module:` events. About 1 ms.
    """
    global _seen_by_tracer
    if _seen_by_tracer or sys.getprofile() is not None or recorder_is_taken():
        return
    _seen_by_tracer = True
    activities = {_profiler.ProfilerActivity.CPU}
    config = _profiler.ProfilerConfig(
        _profiler.ProfilerState.KINETO, False, False, True, False, False, _profiler._ExperimentalConfig()
    )
    torch._C._autograd._prepare_profiler(config, activities)
    torch._C._autograd._enable_profiler(config, activities)
    with suppress(RuntimeError):  # a name in sys.path that is no UTF-8; nobody has use for what was recorded here
        torch._C._autograd._disable_profiler()


def _set_listeners(listeners: tuple[Listener, ...]) -> None:
    global _listener, _listeners
    _listeners = listeners
    _listener = listeners[0] if len(listeners) == 1 else _All(listeners) if listeners else None


def _put(function: Any, *, instead_of: Any, known_as: tuple[tuple[str, str], ...]) -> None:
    nn.Module.__call__ = function  # type: ignore[method-assign]
    for module_name, attribute in known_as:
        module = sys.modules.get(module_name)
        if module is not None and getattr(module, attribute, None) is instead_of:
            setattr(module, attribute, function)


def _put_stop(function: Any, *, instead_of: Any) -> None:
    if vars(autograd_profiler.profile)["__exit__"] is instead_of:
        autograd_profiler.profile.__exit__ = function  # type: ignore[method-assign]


def _keep_dynamo_out(cls: type[Listener]) -> None:
    """Dynamo runs our frames as they are; below the listener's methods, everything."""
    keep_dynamo_off(_call, and_below=False)
    owners: tuple[type[Listener], ...] = (_All, cls)
    for owner in owners:
        keep_dynamo_off(owner.open_call, and_below=True)
        keep_dynamo_off(owner.close_call, and_below=True)
        take_result = getattr(owner, "take_result", None)
        if take_result is not None:
            keep_dynamo_off(take_result, and_below=True)


def keep_dynamo_off(function: Any, *, and_below: bool) -> None:
    """Dynamo runs the frames of this function as they are, or these and all below them."""
    # In C, so that torch._dynamo, a second to import, need not be there yet.
    dynamo = torch._C._dynamo.eval_frame
    if hasattr(dynamo, "_FrameExecStrategy"):
        action = dynamo._FrameAction
        below = action.SKIP if and_below else action.DEFAULT
        dynamo.set_code_exec_strategy(function.__code__, dynamo._FrameExecStrategy(action.SKIP, below))
    elif hasattr(dynamo, "skip_code"):
        dynamo.skip_code(function.__code__)
