"""What an optimizer holds: gradients of its parameters, its own copies of parameters, its state."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from profiler_wrapper.capture.parameters import Known, ParameterNames, gradients_of, parameters_of
from profiler_wrapper.capture.storages import Listing, Places, Repeated, all_plain, places_of, plain_parts, tensors_in
from profiler_wrapper.errors import WrongUse

_INNER = ("optimizer", "optim", "_optimizer", "base_optimizer")  # where wrappers keep what they wrap
_DEEPEST = 4  # wrappers around each other
_ENDS = 16  # tensors of a state, first and last, that are asked where they lie


def find_optimizers(given: object) -> tuple[Any, ...]:
    """What a user calls an optimizer, or several: whatever has `param_groups`, inside of what wraps it.

    Raises:
        WrongUse: something in it has none.
    """
    if given is None:
        return ()
    several = given.values() if isinstance(given, Mapping) else given if isinstance(given, (list, tuple)) else (given,)
    return tuple(_innermost(one) for one in several)


def may_come(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether an optimizer is alive that may step: it holds one of `parameters`, or nothing that any module has.

    The latter are copies of parameters (mixed precision, partitions) or nothing that could be told. Asks the garbage
    collector for all objects: 0.1 s where there are 400,000.
    """
    found = [one for one in gc.get_objects() if issubclass(type(one), (torch.optim.Optimizer, nn.Module))]
    optimizers = [one for one in found if issubclass(type(one), torch.optim.Optimizer)]
    if not optimizers:
        return False
    theirs = {id(tensor) for tensor in parameters}
    modules = (one.__dict__.get("_parameters") for one in found if issubclass(type(one), nn.Module))
    of_modules = {id(tensor) for held in modules if isinstance(held, dict) for tensor in held.values()}
    for optimizer in optimizers:
        told = isinstance(_attribute(optimizer, "param_groups"), (list, tuple))  # else it was never made to its end
        held = {id(tensor) for tensor in parameters_of(optimizer)} if told else set()
        if not held.isdisjoint(theirs) or held.isdisjoint(of_modules):
            return True
    return False


def _innermost(optimizer: object) -> object:
    found, inner = None, optimizer
    for _ in range(_DEEPEST):
        if isinstance(_attribute(inner, "param_groups"), (list, tuple)):
            found = inner
        wrapped = (_attribute(inner, name) for name in _INNER)
        inner = next((one for one in wrapped if one is not None and not callable(one)), None)
        if inner is None:
            break
    if found is None:
        raise WrongUse(
            f"optimizer={type(optimizer).__name__} has no param_groups, and nothing in it has. "
            "Give an optimizer, a list of them, or nothing: those of torch are found by their steps."
        )
    return found


def _attribute(of: object, name: str) -> object:
    """An attribute of something that may be no optimizer at all; None where it has none, or where that raises."""
    try:
        return getattr(of, name, None)
    except Exception:
        return None


class OptimizerHolds:
    """What is known of one optimizer. It is given each time, for nothing here keeps it.

    What runs at each step delays it, so of the state it is only seen whether it is other tensors now, or
    whether the first and last of them lie elsewhere.
    """

    def __init__(self) -> None:
        self.steps = 0  # made since then
        self._parameters: list[weakref.ref[torch.Tensor]] | None = None  # those that have names
        self._known: dict[int, Known | None] = {}
        self._titles: list[str] = []
        self._gradients = Repeated()
        self._state: list[int] = []  # ids of its tensors when they were listed
        self._state_ends: Places | None = None

    def add_all(self, listing: Listing, optimizer: Any, names: ParameterNames) -> None:
        """List all it holds."""
        parameters = list(parameters_of(optimizer))
        self._learn(parameters, optimizer, names)
        self._add_copies(listing, parameters)
        self._add_state(listing, optimizer)
        gradients, titles = self._gradients_of(parameters)
        listing.add_all(gradients, ["grads"] * len(gradients), titles)

    def before_step(self, optimizer: Any, names: ParameterNames) -> Listing:
        """The gradients of what it updates; all it holds, where that is not what was known."""
        parameters = list(parameters_of(optimizer))
        if not self._knows(parameters):
            listing = Listing()
            self.add_all(listing, optimizer, names)
            return listing
        gradients, titles = self._gradients_of(parameters)
        return self._gradients.listing(gradients, "grads", titles)

    def after_step(self, optimizer: Any) -> Listing | None:
        """Its copies and its state, if that is other than when it was last listed."""
        self.steps += 1
        tensors = _state_tensors(optimizer)
        if list(map(id, tensors)) == self._state and _places_of_ends(tensors) == self._state_ends:
            return None
        listing = Listing()
        self._add_copies(listing, list(parameters_of(optimizer)))
        self._add_state(listing, optimizer)
        return listing

    def _learn(self, parameters: Sequence[torch.Tensor], optimizer: Any, names: ParameterNames) -> None:
        names.learn(optimizer)
        self._parameters = [weakref.ref(tensor) for tensor in parameters]
        known = [names.get(tensor) for tensor in parameters]
        self._known = dict(zip(map(id, parameters), known, strict=True))
        self._titles = [one.title if one is not None else "" for one in known]

    def _knows(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether it updates what was named."""
        known = self._parameters
        return (
            known is not None
            and len(known) == len(parameters)
            and all(one() is tensor for one, tensor in zip(known, parameters, strict=True))
        )

    def _gradients_of(self, parameters: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[str]]:
        """Gradients, or the parts of them that wrap no other tensors, and of which parameter each is."""
        gradients, titles = [], []
        for gradient, title in zip(gradients_of(parameters), self._titles, strict=True):
            if gradient is not None:
                gradients.append(gradient)
                titles.append(title)
        if all_plain(gradients):
            return gradients, titles
        parts = [(part, t) for gradient, t in zip(gradients, titles, strict=True) for part in plain_parts(gradient)]
        return [part for part, _ in parts], [title for _, title in parts]

    def _add_copies(self, listing: Listing, parameters: Sequence[torch.Tensor]) -> None:
        for tensor in parameters:
            known = self._known.get(id(tensor))
            if known is not None and known.category is not None:
                listing.add(tensor, known.category, known.title)

    def _add_state(self, listing: Listing, optimizer: Any) -> None:
        tensors, categories, names = [], [], []
        for owner, key, tensor in _state_of(optimizer):
            known = self._known.get(id(owner))
            name = known.name if known is not None else _name_of_owner(owner)
            is_copy = "master" in key.lower()
            tensors.append(tensor)
            categories.append("os_params" if is_copy else "os_state")
            names.append(f"master of {name}" if is_copy else f"{key} of {name}")
        listing.add_all(tensors, categories, names)
        self._state, self._state_ends = [id(tensor) for tensor in tensors], _places_of_ends(tensors)


def _state_tensors(optimizer: Any) -> list[torch.Tensor]:
    """The tensors of its state in the order of `_state_of`; fast for the usual dict of tensors per parameter."""
    state = getattr(optimizer, "state", None)
    entries = list(state.values()) if isinstance(state, Mapping) else []
    if all(issubclass(kind, dict) for kind in set(map(type, entries))):
        values = list(chain.from_iterable(map(dict.values, entries)))
        if all_plain(values):
            return values
    return [tensor for _, _, tensor in _state_of(optimizer)]


def _places_of_ends(tensors: Sequence[torch.Tensor]) -> Places | None:
    """Where its first and last tensors lie: what moves a state, to offload it, moves all of it."""
    ends = (*tensors[:_ENDS], *tensors[_ENDS:][-_ENDS:])
    return places_of(part for tensor in ends for part in plain_parts(tensor))


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
