"""Which module is running, found without hooks, a profiler or any code of the package."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn

OUTSIDE = ""  # the layer of what happens outside every module


def root_name(model: nn.Module) -> str:
    """The root goes by its class name."""
    return type(model).__name__


def layer_names(model: nn.Module) -> dict[int, str]:
    """`id(module)` -> its first name in the plain model; take them before the model is wrapped."""
    return {id(module): name or root_name(model) for name, module in model.named_modules()}


def nearest(layer: str, rows: Iterable[str], root: str) -> str:
    """The deepest row that is `layer` or above it; the root's where none is; outside stays outside."""
    known = set(rows)
    while layer and layer not in known:
        layer = layer.rpartition(".")[0] or root
        if layer == root:
            break
    return layer


class ModuleStack:
    """Knows which module is the innermost one running, without hooks and without a profiler."""

    def __init__(self, model: nn.Module, names: dict[int, str], changed: Callable[[], None] | None = None) -> None:
        self.entered: list[str] = []
        self._changed = changed or (lambda: None)
        self._undo: list[Callable[[], None]] = []
        for module in model.modules():
            if id(module) in names:
                self._wrap(module, "_call_impl", names[id(module)])
                self._wrap(module, "forward", names[id(module)])
            if "_gradient_checkpointing_func" in vars(module):
                self._follow_checkpoint(module, "_gradient_checkpointing_func")
        self._follow_checkpoint(torch.utils.checkpoint, "checkpoint")

    @property
    def innermost(self) -> str:
        return self.entered[-1] if self.entered else OUTSIDE

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        self._changed()
        self.entered.append(name)
        try:
            yield
        finally:
            self._changed()
            self.entered.pop()

    def close(self) -> None:
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

    def _wrap(self, module: nn.Module, method: str, name: str) -> None:
        original = getattr(module, method)
        had = vars(module).get(method)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with self.inside(name):
                return original(*args, **kwargs)

        object.__setattr__(module, method, wrapped)
        self._undo.append(lambda: self._restore(module, method, had))

    @staticmethod
    def _restore(owner: Any, attribute: str, had: Any) -> None:
        object.__delattr__(owner, attribute)
        if had is not None:
            object.__setattr__(owner, attribute, had)

    def _follow_checkpoint(self, owner: Any, attribute: str) -> None:
        """What is checkpointed runs again in backward, where no module is entered: take the name along."""
        original = getattr(owner, attribute)

        def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            name = self.innermost

            def named(*inputs: Any, **more: Any) -> Any:
                with self.inside(name):
                    return function(*inputs, **more)

            return original(named, *args, **kwargs)

        setattr(owner, attribute, checkpoint)
        self._undo.append(lambda: setattr(owner, attribute, original))
