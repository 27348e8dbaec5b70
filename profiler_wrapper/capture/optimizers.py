"""What an optimizer holds: gradients of its parameters, its own copies of parameters, its state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from profiler_wrapper.capture.parameters import ParameterNames, parameters_of
from profiler_wrapper.capture.storages import Listing, tensors_in
from profiler_wrapper.errors import WrongUse

_INNER = ("optimizer", "optim", "_optimizer", "base_optimizer")  # where wrappers keep what they wrap
_DEEPEST = 4  # wrappers around each other


def find_optimizers(given: object) -> tuple[Any, ...]:
    """What a user calls an optimizer, or several: whatever has `param_groups`, inside of what wraps it.

    Raises:
        WrongUse: something in it has none.
    """
    if given is None:
        return ()
    several = given.values() if isinstance(given, Mapping) else given if isinstance(given, (list, tuple)) else (given,)
    return tuple(_innermost(one) for one in several)


def _innermost(optimizer: object) -> object:
    found, inner = None, optimizer
    for _ in range(_DEEPEST):
        if hasattr(inner, "param_groups"):
            found = inner
        wrapped = (getattr(inner, name, None) for name in _INNER)
        inner = next((one for one in wrapped if one is not None and not callable(one)), None)
        if inner is None:
            break
    if found is None:
        raise WrongUse(
            f"optimizer={type(optimizer).__name__} has no param_groups, and nothing in it has. "
            "Give an optimizer, a list of them, or nothing: those of torch are found by their steps."
        )
    return found


class OptimizerHolds:
    """What is known of one optimizer. It is given each time, for nothing here keeps it."""

    def __init__(self, optimizer: Any, names: ParameterNames) -> None:
        self.steps = 0  # made since then
        self.learn(optimizer, names)

    def learn(self, optimizer: Any, names: ParameterNames) -> None:
        """Name its parameters."""
        names.learn(optimizer)
        self._known = {id(tensor): names.get(tensor) for tensor in parameters_of(optimizer)}
        self._state: list[int] = []

    def has_other_parameters(self, optimizer: Any) -> bool:
        """Than those that were named."""
        return any(id(tensor) not in self._known for tensor in parameters_of(optimizer))

    def has_other_state(self, optimizer: Any) -> bool:
        """Than when it was last added to a listing."""
        return [id(tensor) for _, _, tensor in _state_of(optimizer)] != self._state

    def add_gradients(self, listing: Listing, optimizer: Any) -> None:
        """List the gradients of what it updates."""
        for tensor in parameters_of(optimizer):
            gradient = tensor.grad if tensor.is_leaf else None
            if gradient is not None:
                known = self._known[id(tensor)]
                listing.add(gradient, "grads", known.title if known is not None else "")

    def add_own(self, listing: Listing, optimizer: Any) -> None:
        """List its own copies of parameters, and its state."""
        for tensor in parameters_of(optimizer):
            known = self._known[id(tensor)]
            if known is not None and known.category is not None:
                listing.add(tensor, known.category, known.title)
        self._state = []
        for owner, key, tensor in _state_of(optimizer):
            self._state.append(id(tensor))
            known = self._known.get(id(owner))
            name = known.name if known is not None else _name_of_owner(owner)
            if "master" in key.lower():
                listing.add(tensor, "os_params", f"master of {name}")
            else:
                listing.add(tensor, "os_state", f"{key} of {name}")


def _state_of(optimizer: Any) -> Iterator[tuple[object, str, torch.Tensor]]:
    """Whose state, which, and the tensor."""
    state = getattr(optimizer, "state", None)
    if not isinstance(state, Mapping):
        return
    for owner, entries in state.items():
        if not isinstance(entries, dict):
            for tensor, name in tensors_in(entries, ""):
                yield owner, name or "state", tensor
            continue
        for key, value in entries.items():
            if isinstance(value, torch.Tensor):
                yield owner, str(key), value
            else:
                for tensor, name in tensors_in(value, str(key)):
                    yield owner, name, tensor


def _name_of_owner(owner: object) -> str:
    """Of state that is kept under a key of its own, or for what is no longer updated."""
    return "an unknown parameter" if isinstance(owner, torch.Tensor) else str(owner)
