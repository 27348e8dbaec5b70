"""Where a tensor's memory lies. Nothing here runs an op, waits for a device or keeps a tensor alive.

Copy-on-write tensors are left out: to ask where one lies is to make the copy.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn

from profiler_wrapper.capture.layers import Root, module_paths
from profiler_wrapper.capture.torch_state import in_backward
from profiler_wrapper.capture.wrappers import all_modules
from profiler_wrapper.errors import WrongUse
from profiler_wrapper.trace.marks import ROOT_PATH
from profiler_wrapper.trace.owned import HeldTensor, Holding

Places = list[int]  # of storages: where the first begins, how long it is, where the second begins, ...

_PLAIN = frozenset((torch.Tensor, nn.Parameter))
_DEEPEST = 4  # of what is wrapped in each other, and of containers in containers


class Listing:
    """Storages at one moment, each once: the first name and category told of it stay.

    Kept as columns: an object for each would make Python's garbage collector run in the user's loop.
    """

    def __init__(self) -> None:
        self.time_ns = time.time_ns()
        self._columns: dict[torch.device, _Columns] = {}

    def __len__(self) -> int:
        return sum(len(columns.rows) for columns in self._columns.values())

    def add(self, tensor: torch.Tensor, category: str, name: str) -> None:
        """List what a tensor's memory is; nothing for one that has none."""
        for part in plain_parts(tensor):
            places = places_of((part,))
            if places is not None:
                self._add(part.device, places[0], places[1], category, name)

    def add_all(self, tensors: Sequence[torch.Tensor], categories: Sequence[str], names: Sequence[str]) -> None:
        """The same for many; faster than one by one where all are plain."""
        places = places_of(tensors) if all_plain(tensors) else None
        if places is not None:
            self.add_at(places[::2], places[1::2], tensors, categories, names)
        else:
            for tensor, category, name in zip(tensors, categories, names, strict=True):
                self.add(tensor, category, name)

    def add_at(
        self,
        addresses: Sequence[int],
        sizes: Sequence[int],
        tensors: Sequence[torch.Tensor],
        categories: Sequence[str],
        names: Sequence[str],
    ) -> None:
        """The same for many of which it is known where their storages begin and how long they are."""
        devices = [tensor.device for tensor in tensors]
        rows = dict(zip(addresses, range(len(addresses)), strict=True))
        if self._columns or len(rows) < len(addresses) or 0 in rows or 0 in sizes or len(set(devices)) != 1:
            for one in zip(devices, addresses, sizes, categories, names, strict=True):
                self._add(*one)
        else:
            self._columns[devices[0]] = _Columns(rows, list(sizes), list(categories), list(names))

    def again(self) -> Listing:
        """The same storages at this moment. Neither may be added to from then on."""
        same = Listing()
        same._columns = self._columns
        return same

    def _add(self, device: torch.device, address: int, size_bytes: int, category: str, name: str) -> None:
        if not address or not size_bytes:  # on no device, or emptied by FSDP or DeepSpeed
            return
        columns = self._columns.get(device)
        if columns is None:
            columns = self._columns[device] = _Columns({}, [], [], [])
        rows = columns.rows
        if address not in rows:
            rows[address] = len(rows)
            columns.size_bytes.append(size_bytes)
            columns.category.append(category)
            columns.name.append(name)

    def name_of(self, tensor: torch.Tensor) -> str | None:
        """The name under which a tensor's memory is listed; None if it is not."""
        one = Listing()
        one.add(tensor, "", "")
        for device, columns in one._columns.items():
            if device in self._columns:
                listed = self._columns[device]
                for address in columns.rows:
                    if address in listed.rows:
                        return listed.name[listed.rows[address]]
        return None

    def leave_out(self, places: dict[int, int]) -> Listing:
        """Without what begins where `places` says, and is as long."""
        left = Listing()
        left.time_ns = self.time_ns
        for device, columns in self._columns.items():
            kept = _Columns({}, [], [], [])
            for address, row in columns.rows.items():
                if places.get(address) != columns.size_bytes[row]:
                    kept.rows[address] = len(kept.rows)
                    kept.size_bytes.append(columns.size_bytes[row])
                    kept.category.append(columns.category[row])
                    kept.name.append(columns.name[row])
            if kept.rows:
                left._columns[device] = kept
        return left

    def add_places(self, places: dict[int, int]) -> None:
        """Write into `places` where each storage begins and how long it is."""
        for columns in self._columns.values():
            places.update(zip(columns.rows, columns.size_bytes, strict=True))

    def holding(self) -> Holding:
        """What was listed, in order."""
        return Holding(
            self.time_ns,
            {
                str(device): tuple(map(HeldTensor, columns.rows, columns.size_bytes, columns.category, columns.name))
                for device, columns in self._columns.items()
            },
        )


class _Columns:
    """The storages of one device."""

    __slots__ = ("category", "name", "rows", "size_bytes")

    def __init__(self, rows: dict[int, int], size_bytes: list[int], category: list[str], name: list[str]) -> None:
        self.rows = rows  # by address
        self.size_bytes, self.category, self.name = size_bytes, category, name


class Repeated:
    """Lists the same tensors again and again, as a loop makes them anew.

    How long a storage is only Python's object of it tells, of which each would be one more for the garbage
    collector. So it is not asked where all tensors lie where they lay, nor where each had a storage of its own
    and lies and is as long in that of now as it was.
    """

    def __init__(self) -> None:
        self._last: _Layout | None = None

    def listing(self, tensors: Sequence[torch.Tensor], category: str, names: list[str]) -> Listing:
        """All of them, none of which wraps others."""
        categories = [category] * len(tensors)
        listing, last, found = Listing(), self._last, _addresses_of(tensors)
        self._last = None
        if found is None:
            listing.add_all(tensors, categories, names)
            return listing
        addresses, parts = found
        same_parts = last is not None and last.parts == parts and last.names == names
        if last is not None and same_parts and last.addresses == addresses:
            self._last = last
            return last.listing.again()
        if last is not None and same_parts and last.sizes == parts[1::2]:
            sizes = last.sizes
        else:
            sizes = (places_of(tensors) or [])[1::2]
        listing.add_at(addresses, sizes, tensors, categories, names)
        if 0 not in sizes:
            self._last = _Layout(addresses, parts, sizes, names, listing)
        return listing


@dataclass(frozen=True, slots=True)
class _Layout:
    """Tensors in storages."""

    addresses: list[int]  # where the storage of each begins
    parts: list[int]  # of it: where the first tensor begins, how many bytes it has, where the second begins, ...
    sizes: list[int]  # bytes of the storages
    names: list[str]
    listing: Listing


def _addresses_of(tensors: Sequence[torch.Tensor]) -> tuple[list[int], list[int]] | None:
    """Where their storages begin, and which parts of them they are; None where that cannot be told so."""
    is_copy_on_write = torch._C._is_cow_tensor  # type: ignore[attr-defined]
    addresses: list[int] = []
    parts: list[int] = []
    try:
        for tensor in tensors:
            if is_copy_on_write(tensor) or not tensor.numel():
                return None
            offset_bytes = int(tensor.storage_offset()) * tensor.element_size()
            addresses.append(tensor.data_ptr() - offset_bytes)
            parts.append(offset_bytes)
            parts.append(tensor.numel() * tensor.element_size())
    except (RuntimeError, NotImplementedError):  # sparse, or of a kind without memory of its own
        return None
    return addresses, parts


def places_of(tensors: Iterable[torch.Tensor]) -> Places | None:
    """Where tensors lie that wrap no others; None if one has no storage, or shares it by copy-on-write."""
    is_copy_on_write = torch._C._is_cow_tensor  # type: ignore[attr-defined]
    places: Places = []
    try:
        for tensor in tensors:
            if is_copy_on_write(tensor):
                return None
            storage = tensor.untyped_storage()
            places.append(storage.data_ptr())
            places.append(storage.nbytes())
    except (RuntimeError, NotImplementedError):  # sparse, or of a kind without memory of its own
        return None
    return places


def all_plain(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether none of them is of a subclass."""
    return _PLAIN.issuperset(map(type, tensors))


def plain_parts(tensor: torch.Tensor, depth: int = _DEEPEST) -> Iterator[torch.Tensor]:
    """The plain tensors behind one: the local shard of a DTensor, data and scale of a quantized one."""
    if type(tensor) in _PLAIN:
        yield tensor
        return
    fake = sys.modules.get("torch._subclasses.fake_tensor")
    if depth == 0 or (fake is not None and isinstance(tensor, fake.FakeTensor)):
        return
    if not hasattr(tensor, "__tensor_flatten__"):  # a subclass that adds behaviour only
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        part = getattr(tensor, name, None)
        if isinstance(part, torch.Tensor):
            yield from plain_parts(part, depth - 1)


def tensors_in(value: Any, name: str, depth: int = _DEEPEST) -> Iterator[tuple[torch.Tensor, str]]:
    """Every tensor in nested dicts and lists, with the keys that lead to it: `exp_avg`, `old_dirs.3`."""
    if isinstance(value, torch.Tensor):
        yield value, name
    elif depth and isinstance(value, (dict, list, tuple)):
        for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
            yield from tensors_in(entry, f"{name}.{key}" if name else str(key), depth - 1)


# --------------------------------------------------------------------------------------------------
# Which tensor is which parameter: of a model by its full name, and what an optimizer has beside the model's own.


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


# --------------------------------------------------------------------------------------------------
# What an optimizer holds: gradients of its parameters, its own copies of parameters, its state.

_INNER = ("optimizer", "optim", "_optimizer", "base_optimizer")  # where wrappers keep what they wrap
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


# --------------------------------------------------------------------------------------------------
# Tells which memory the model and its optimizers hold, while a session records.
#
# Everything is told when a session begins and when it ends; before each step of an optimizer the gradients of
# its parameters; after it its state, if that has changed hands. What else an optimizer holds is told when it
# makes its first step in a session, for nobody knew it before. Of an optimizer that is none of torch's both
# are told at the end of each step of the loop: of gradients only those that are still there.
#
# A loop may run for long, so there are bounds. After `FULL_STEPS` steps of an optimizer, or `MOST_TENSORS`
# entries, a moment tells only what lies where nothing was told before, after as many again nothing; the last
# moment before the end and the end itself are always told in full.

FULL_STEPS = 20
MOST_TENSORS = 100_000

Reference = Callable[[], Any]  # a weak reference to an optimizer


class HeldMemory:
    """What the model and its optimizers hold. Tensors and optimizers are held weakly.

    Only a given optimizer to which there are no weak references (it has `__slots__`) lives as long as this.

    No method raises: what fails is in `problem`, and telling ends.

    Args:
        roots: asks for the models known so far.
        optimizers: those that a user gave, see `find_optimizers`; others are found by their steps.
    """

    def __init__(self, roots: Callable[[], Sequence[Root]], optimizers: Iterable[object] = ()) -> None:
        self.problem: str | None = None
        self._names = ParameterNames(roots)
        self._optimizers = {id(one): _reference(one) for one in optimizers}  # in the order they came
        self._session: _Session | None = None

    def begin(self) -> None:
        """A session is about to begin."""
        self.problem = None
        self._session = _Session()
        self._safely(self._tell_everything)

    def end(self) -> tuple[Holding, ...]:
        """The session is about to end: all that was told in it, in order of time; nothing if there is a problem.

        For the last moment has to list everything: what is missing there is taken for gone.
        """
        self._safely(self._tell_last)
        session, self._session = self._session, None
        return session.holdings() if session is not None and self.problem is None else ()

    def optimizers(self) -> list[Any]:
        """Those that were given, or have made a step in a session, and are still there."""
        return self._alive()

    def forget(self) -> None:
        """The session is worth nothing."""
        self._session = None

    def before_step(self, optimizer: Reference) -> None:
        """An optimizer is about to make a step; one of another training, on its own thread, is not ours to read."""
        self._safely(lambda session: None if session.is_elsewhere() else self._before_step(session, optimizer))

    def after_step(self, optimizer: Reference) -> None:
        """It has made it."""
        self._safely(lambda session: None if session.is_elsewhere() else self._after_step(session, optimizer()))

    def step_ended(self) -> None:
        """A step of the loop is about to end: tell of the optimizers whose steps torch does not tell of."""
        self._safely(self._tell_silent)

    def _safely(self, action: Callable[[_Session], None]) -> None:
        session = self._session  # another thread may end it meanwhile
        if session is None or self.problem is not None:
            return
        try:
            with torch._C.DisableTorchFunction():  # what a mode or a subclass makes of reading an attribute is not ours
                action(session)
        except Exception as error:
            self.problem = (
                "what the model and its optimizers hold is not known, because listing it failed: "
                f"{type(error).__name__}: {error}"
            )

    def _tell_everything(self, session: _Session) -> None:
        listing, names = Listing(), self._names
        names.refresh()
        for tensor, name in names.tensors():
            listing.add(tensor, "params", name)
        parameters = list(names.parameters())
        gradients = gradients_of(tensor for tensor, _ in parameters)
        for (_, name), gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                listing.add(gradient, "grads", name)
        for optimizer in self._alive():
            holds = session.holds[id(optimizer)] = OptimizerHolds()
            holds.add_all(listing, optimizer, names)
        session.keep(listing)

    def _tell_last(self, session: _Session) -> None:
        session.keep_what_waits()
        self._tell_everything(session)

    def _before_step(self, session: _Session, reference: Reference) -> None:
        optimizer = reference()
        known = self._optimizers.get(id(optimizer))
        if known is None or known() is not optimizer:  # it may have the id of one that is no more
            self._optimizers[id(optimizer)] = reference
            session.holds.pop(id(optimizer), None)
        holds = session.holds.setdefault(id(optimizer), OptimizerHolds())
        session.tell(holds.before_step(optimizer, self._names), in_full=holds.steps < FULL_STEPS)

    def _after_step(self, session: _Session, optimizer: Any) -> None:
        holds = session.holds.get(id(optimizer))
        if holds is None:  # the session began within its step
            return
        listing = holds.after_step(optimizer)
        if listing is not None:
            session.tell(listing, in_full=holds.steps <= FULL_STEPS)

    def _tell_silent(self, session: _Session) -> None:
        for optimizer in self._alive():
            if not isinstance(optimizer, torch.optim.Optimizer):
                self._before_step(session, _reference(optimizer))
                self._after_step(session, optimizer)

    def _alive(self) -> list[Any]:
        alive = {key: optimizer for key, one in self._optimizers.items() if (optimizer := one()) is not None}
        self._optimizers = {key: self._optimizers[key] for key in alive}
        return list(alive.values())


def _reference(optimizer: object) -> Reference:
    try:
        return weakref.ref(optimizer)
    except TypeError:
        return lambda: optimizer


class _Session:
    """What is told in one session."""

    def __init__(self) -> None:
        self.holds: dict[int, OptimizerHolds] = {}  # by id of the optimizer
        self._moments: list[Listing] = []
        self._places: dict[int, int] = {}  # address: bytes, of the first `_placed` moments
        self._placed = 0
        self._count = 0
        self._waiting: Listing | None = None
        self._thread = threading.get_ident()

    def is_elsewhere(self) -> bool:
        """On a thread that is neither the session's nor one of autograd's engine.

        torch writes a gradient without Python's lock: whoever reads it meanwhile crashes.
        """
        return threading.get_ident() != self._thread and not in_backward()

    def tell(self, listing: Listing, *, in_full: bool) -> None:
        """Keep a moment, or what is new in it."""
        if not len(listing):
            return  # an optimizer without gradients or state
        if in_full and self._count < MOST_TENSORS:
            self.keep(listing)
            return
        self._waiting = listing
        if self._count < 2 * MOST_TENSORS:
            new = listing.leave_out(self._all_places())
            if len(new):
                self._keep(new)

    def keep(self, listing: Listing) -> None:
        """Keep a moment in full."""
        self._waiting = None
        self._keep(listing)

    def keep_what_waits(self) -> None:
        """Nothing comes after the last moment: keep it in full."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            if self._moments and self._moments[-1].time_ns == waiting.time_ns:
                self._moments.pop()
            self._keep(waiting)

    def holdings(self) -> tuple[Holding, ...]:
        """All that was kept, in order of time."""
        return tuple(listing.holding() for listing in self._moments)

    def _keep(self, listing: Listing) -> None:
        self._moments.append(listing)
        self._count += len(listing)

    def _all_places(self) -> dict[int, int]:
        for listing in self._moments[self._placed :]:
            listing.add_places(self._places)
        self._placed = len(self._moments)
        return self._places
