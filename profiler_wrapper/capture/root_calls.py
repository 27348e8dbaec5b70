"""Whether what a block calls is a part of a model: one layer of a loop over layers."""

from __future__ import annotations

import gc
import os
import weakref
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from profiler_wrapper.capture import scopes
from profiler_wrapper.capture.layers import all_parameters
from profiler_wrapper.capture.torch_state import keep_dynamo_off
from profiler_wrapper.trace.marks import GARBAGE

# --------------------------------------------------------------------------------------------------
# Marks Python's collections of garbage in the trace: their pauses belong to nobody's layer, and may hold all ranks up.
#
# torch.profiler shows them only where it records stacks.

_Range = torch._C._profiler._RecordFunctionFast
_YOUNGEST = 0  # such collections are short, and there may be thousands of them a second


class GarbageMarks:
    """Marks each collection of the older generations, on the thread that has it, while installed."""

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
            self._open = _Range(GARBAGE)
            self._open.__enter__()

    def _close(self) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            with suppress(RuntimeError):  # it began on a thread that is not recorded
                opened.__exit__(None, None, None)


keep_dynamo_off(GarbageMarks._heard, and_below=True)


class FirstCall:
    """Remembers the first module called while it listens; then it listens no more."""

    def __init__(self) -> None:
        self._module: weakref.ref[nn.Module] | None = None
        self._gradient: object = None
        self._listening = False

    @property
    def module(self) -> nn.Module | None:
        """The first module that was called; None if none was, or it is no more."""
        return self._module() if self._module is not None else None

    @property
    def had_backward(self) -> bool:
        """Its parameters' gradients have changed since it was called."""
        module = self.module
        return module is not None and _gradient_state(module) != self._gradient

    def listen(self) -> None:
        """Begin."""
        self._listening = True
        scopes.listen(self)

    def stop(self) -> None:
        """End; a second call does nothing."""
        if self._listening:
            self._listening = False
            scopes.stop_listening(self)

    def open_call(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], marked: set[str] | None = None
    ) -> None:
        """A module is about to be called (see `calls.Listener`)."""
        if self._listening:
            self._module = weakref.ref(module)
            self._gradient = _gradient_state(module)
            self.stop()

    def close_call(self, opened: object) -> None:
        """Never called: no call was opened."""


def _gradient_state(module: nn.Module) -> tuple[int, int] | None:
    """Differs after a backward: what the first parameter that learns has as its gradient, and which version of it."""
    for parameter in all_parameters(module):
        # A call by `torch.func.functional_call` may bring tensors that are no leaves: torch warns of their gradients.
        if parameter.requires_grad and parameter.is_leaf:
            gradient = parameter.grad
            return None if gradient is None or gradient.is_inference() else (id(gradient), gradient._version)
    return None


def is_part(module: nn.Module) -> bool:
    """Another module has it as a child, or a list holds it beside others of its class.

    Asks the garbage collector, so it takes some 50 ms in a process with 300,000 objects.
    """
    for holder in gc.get_referrers(module):
        if type(holder) is list and len(holder) > 1 and all(type(item) is type(module) for item in holder):
            return True
        if type(holder) is dict and _are_children(holder):
            return True
    return False


def _are_children(holder: dict[Any, Any]) -> bool:
    """Whether it is the `_modules` of a module: nothing but modules under names, and a module refers to it."""
    for key, value in holder.items():
        if not isinstance(key, str) or not (value is None or isinstance(value, nn.Module)):
            return False
    return any(
        # Python 3.11 and later keep attributes in the object itself.
        isinstance(owner, nn.Module) or (type(owner) is dict and owner.get("_modules") is holder)
        for owner in gc.get_referrers(holder)
    )
