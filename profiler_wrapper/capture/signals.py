"""What tells of steps in a loop that says nothing: optimizers, and the compiler."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from profiler_wrapper.capture import calls
from profiler_wrapper.capture.wrappers import all_parameters

is_compiling = torch.compiler.is_compiling


Told = Callable[[Callable[[], Any]], None]  # with a weak reference to an optimizer, which is hashable


class OptimizerSteps:
    """Tells of each step of any optimizer, just before and after, until `remove()`.

    Steps that `torch.compile` has compiled are not told: Dynamo finds nothing to trace here, and
    `Updates` sees what they did.
    """

    def __init__(self, *, before: Told, after: Told) -> None:
        def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
            if not is_compiling():
                before(weakref.ref(optimizer))

        def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
            if not is_compiling():
                after(weakref.ref(optimizer))

        calls.keep_dynamo_off(before_step, and_below=True)
        calls.keep_dynamo_off(after_step, and_below=True)
        self._handles = (register_optimizer_step_pre_hook(before_step), register_optimizer_step_post_hook(after_step))

    def remove(self) -> None:
        """Tell nothing more; a second call does nothing."""
        for handle in self._handles:
            handle.remove()


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
