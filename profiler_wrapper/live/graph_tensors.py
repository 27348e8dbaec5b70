"""What of the values that a module takes and returns is part of a graph. Holds no tensor."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import torch

_MOST_VALUES = 64  # of a call, and of a list or mapping in it, that are looked at

Known = list[tuple["weakref.ref[torch.Tensor]", int]]  # tensors that are part of a graph, and their versions


def tensors_in_graph(values: Iterable[Any], depth: int = 3) -> list[tuple[torch.Tensor, Any]]:
    """Tensors with what made them in the graph, also those in tuples, lists and mappings."""
    found: list[tuple[torch.Tensor, Any]] = []
    for value in islice(values, _MOST_VALUES):
        if value is None:
            continue
        if type(value) is torch.Tensor or isinstance(value, torch.Tensor):
            try:
                node = value.grad_fn
            except RuntimeError:  # a view that was written into as autograd forbids: it has no part in any backward
                continue
            if node is not None:
                found.append((value, node))
        elif isinstance(value, (tuple, list)):
            if depth:
                found += tensors_in_graph(value, depth - 1)
        elif isinstance(value, dict) and depth:
            found += tensors_in_graph(value.values(), depth - 1)
    return found


def hook_first(tensor: Any, hook: Callable[[Any], None]) -> None:
    """Before the hooks that it has."""
    tensor._backward_hooks.move_to_end(tensor.register_hook(hook).id, last=False)


def is_among(tensor: torch.Tensor, known: Known) -> bool:
    """The same one, which nothing has been written into since."""
    for reference, version in known:  # noqa: SIM110 - half of what any() takes, and each block asks
        if reference() is tensor and version == tensor._version:
            return True
    return False


def only_accumulates(node: Any) -> bool:
    """Behind a node is nothing but parameters."""
    return all(after is None or after.name() == "torch::autograd::AccumulateGrad" for after, _ in node.next_functions)
