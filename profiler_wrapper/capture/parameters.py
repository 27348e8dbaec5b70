"""Which tensor is which parameter: of a model by its full name, and what an optimizer has beside the model's own."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from profiler_wrapper.capture.layers import Root, module_paths
from profiler_wrapper.capture.storages import Listing
from profiler_wrapper.capture.wrappers import all_modules
from profiler_wrapper.recording.marks import ROOT_PATH


@dataclass(frozen=True, slots=True)
class Known:
    """A tensor whose name is known."""

    reference: weakref.ref[torch.Tensor]
    name: str  # of the parameter that it is, or is a copy of
    title: str  # its own: "master of <name>" for a copy
    category: str | None  # params, os_params; None for what a model lists


class ParameterNames:
    """The parameters and buffers of models, and those of optimizers that no model has. Holds tensors weakly.

    Args:
        roots: asks for the models known so far.
    """

    def __init__(self, roots: Callable[[], Sequence[Root]]) -> None:
        self._roots = roots
        self._named: list[int] = []  # ids of the models' tensors when they were named
        self._known: dict[int, Known] = {}
        self._parameters: list[Known] = []
        self._buffers: list[Known] = []
        self._unnamed = 0

    def tensors(self) -> Iterator[tuple[torch.Tensor, str]]:
        """What the models hold: parameters, then buffers; with shared tensors once."""
        for known in (*self._parameters, *self._buffers):
            tensor = known.reference()
            if tensor is not None:
                yield tensor, known.name
                shard = getattr(tensor, "ds_tensor", None)  # DeepSpeed leaves the parameter itself empty
                if isinstance(shard, torch.Tensor):
                    yield shard, known.name

    def parameters(self) -> Iterator[tuple[torch.Tensor, str]]:
        """Those of the models that can have a gradient."""
        for known in self._parameters:
            tensor = known.reference()
            if tensor is not None:
                yield tensor, known.name

    def get(self, tensor: torch.Tensor) -> Known | None:
        """What is known of a tensor."""
        known = self._known.get(id(tensor))
        return known if known is not None and known.reference() is tensor else None

    def refresh(self) -> None:
        """See what the models are made of now."""
        roots = self._roots()
        ids = [id(tensor) for root in roots for module in all_modules(root.module) for tensor in _registered(module)]
        if ids == self._named and all(known.reference() is not None for known in self._parameters):
            return
        self._named = ids
        self._known = {key: known for key, known in self._known.items() if known.category is not None}
        self._parameters, self._buffers = [], []
        for root in roots:
            self._name_model(root)

    def learn(self, optimizer: Any) -> None:
        """Name what an optimizer updates, be it not in a model."""
        tensors = list(parameters_of(optimizer))
        if any(self.get(tensor) is None for tensor in tensors):
            self.refresh()
        unknown = [tensor for tensor in tensors if self.get(tensor) is None]
        if unknown:
            self._name_unknown(unknown, type(optimizer).__name__)

    def _name_model(self, root: Root) -> None:
        paths = module_paths(root)
        for module in all_modules(root.module):
            path = paths.get(id(module), ROOT_PATH)
            if path == ROOT_PATH:
                path = root.label if root.named else ""
            prefix = f"{path}." if path else ""
            for name, parameter in module._parameters.items():
                self._add_of_model(parameter, prefix + name, self._parameters)
            for name, buffer in module._buffers.items():
                self._add_of_model(buffer, prefix + name, self._buffers)

    def _add_of_model(self, tensor: torch.Tensor | None, name: str, where: list[Known]) -> None:
        if tensor is not None and self.get(tensor) is None:
            where.append(self._add(tensor, name, name, None))

    def _add(self, tensor: torch.Tensor, name: str, title: str, category: str | None) -> Known:
        known = self._known[id(tensor)] = Known(weakref.ref(tensor), name, title, category)
        return known

    def _name_unknown(self, tensors: Sequence[torch.Tensor], optimizer: str) -> None:
        listed = Listing()
        for tensor, name in self.tensors():
            listed.add(tensor, "params", name)
        beside = []
        for tensor in tensors:
            same_memory = listed.name_of(tensor)
            if same_memory is None:
                beside.append(tensor)
            else:
                self._add(tensor, same_memory, same_memory, None)
        learning = [(tensor, name) for tensor, name in self.parameters() if tensor.requires_grad]
        dtypes = {tensor.dtype for tensor, _ in learning}
        copies = [tensor for tensor in beside if learning and _is_copy(tensor, dtypes)]
        names = _names_by_shape(copies, learning)
        for tensor in beside:
            if not any(tensor is copy for copy in copies):
                title = f"parameter {self._next()} of {optimizer}"
                self._add(tensor, title, title, "params")
                continue
            original = names.get(id(tensor))
            title = f"master of {original}" if original is not None else f"master {self._next()}"
            self._add(tensor, original or title, title, "os_params")

    def _next(self) -> int:
        self._unnamed += 1
        return self._unnamed - 1


def _registered(module: nn.Module) -> Iterator[torch.Tensor | None]:
    yield from module._parameters.values()
    yield from module._buffers.values()


def parameters_of(optimizer: Any) -> Iterator[torch.Tensor]:
    """What an optimizer updates, in its order."""
    for group in optimizer.param_groups:
        if isinstance(group, Mapping):
            for tensor in group.get("params", ()):
                if isinstance(tensor, torch.Tensor):
                    yield tensor


def gradients_of(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor | None]:
    """Their gradients; of what cannot have one torch would warn."""
    return [tensor.grad if tensor.is_leaf or tensor.retains_grad else None for tensor in tensors]


def _is_copy(tensor: torch.Tensor, dtypes: set[torch.dtype]) -> bool:
    """A tensor that no module has, or a parameter of a type that the model has none of.

    A parameter of the model's own type may as well belong to a module that nobody told us of.
    """
    return not isinstance(tensor, nn.Parameter) or tensor.dtype not in dtypes


def _names_by_shape(copies: Sequence[torch.Tensor], parameters: Sequence[tuple[torch.Tensor, str]]) -> dict[int, str]:
    """Of which parameter each is a copy, by id: the n-th of a shape, where there are as many of it."""
    names, same_shape = defaultdict(list), defaultdict(list)
    for parameter, name in parameters:
        names[parameter.shape].append(name)
    for tensor in copies:
        same_shape[tensor.shape].append(tensor)
    return {
        id(tensor): name
        for shape, tensors in same_shape.items()
        if len(tensors) == len(names[shape])
        for tensor, name in zip(tensors, names[shape], strict=True)
    }
