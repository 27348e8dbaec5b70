"""What tells of steps in a loop that says nothing: optimizers, and the compiler."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from profiler_wrapper.capture import calls
from profiler_wrapper.capture.wrappers import all_parameters

is_compiling = torch.compiler.is_compiling
_STEP: Any = Optimizer.profile_hook_step(lambda: None).__code__  # around each step, where the hooks are called


Told = Callable[[Callable[[], Any]], None]  # with a weak reference to an optimizer, which is hashable


class OptimizerSteps:
    """Tells of each step of any optimizer, just before and after, until `remove()`.

    Steps that `torch.compile` has compiled are not told: Dynamo finds nothing to trace here, and
    `Updates` sees what they did.
    """

    def __init__(self, *, before: Told, after: Told) -> None:
        self._active = True
        self._telling = False

        def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
            if not is_compiling():
                self._tell(before, optimizer)

        def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
            if not is_compiling():
                self._tell(after, optimizer)

        calls.keep_dynamo_off(before_step, and_below=True)
        calls.keep_dynamo_off(after_step, and_below=True)
        self._handles = (register_optimizer_step_pre_hook(before_step), register_optimizer_step_post_hook(after_step))

    def _tell(self, told: Told, optimizer: Any) -> None:
        if self._active:
            self._telling = True
            try:
                told(weakref.ref(optimizer))
            finally:
                self._telling = False

    def remove(self) -> None:
        """Tell nothing more. What cannot be removed within a step stays, silent, until the next call of this."""
        self._active = False
        in_step = _in_step()
        for handle in self._handles:
            hooks = handle.hooks_dict_ref() or {}
            # torch goes through these: a removal raises in the user's step, but that of the last one, by itself.
            if not in_step or (self._telling and next(reversed(hooks), None) == handle.id):
                handle.remove()


def _in_step() -> bool:
    """Whether an optimizer's step is running, on any thread."""
    for frame in sys._current_frames().values():
        within: FrameType | None = frame
        while within is not None:
            if within.f_code is _STEP:
                return True
            within = within.f_back
    return False


class Updates:
    """Whether a model's parameters have changed since it was last asked: a step of an optimizer that told nobody."""

    def __init__(self) -> None:
        self._seen: tuple[int, int] | None = None

    def since_last(self, module: nn.Module | None) -> bool:
        """By the first parameter that learns; False where another one took its place."""
        before, self._seen = self._seen, None
        for parameter in all_parameters(module) if module is not None else ():
            if isinstance(parameter, UninitializedParameter):  # it can be asked nothing
                continue
            if parameter.requires_grad and not parameter.is_inference():
                self._seen = (id(parameter), parameter._version)
                break
        if before is None or self._seen is None:
            return False
        return before[0] == self._seen[0] and before[1] < self._seen[1]


def compilations() -> int:
    """How much torch.compile has compiled so far; 0 where nobody has used it."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    if not counters:
        return 0
    return int(counters["stats"]["unique_graphs"]) + int(counters["frames"]["total"])
