"""List the tensors that model and optimizers hold, without running an op, waiting for a device or keeping one alive.

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
from typing import Any

import torch
from torch import nn

from profiler_wrapper.capture.layers import Root, all_modules, module_paths
from profiler_wrapper.capture.torch_state import in_backward
from profiler_wrapper.errors import WrongUse, in_a_line
from profiler_wrapper.trace.marks import ROOT_PATH
from profiler_wrapper.trace.run_file import HeldTensor, Holding

_PLAIN = frozenset((torch.Tensor, nn.Parameter))
_MOST_NESTED = 4  # tensors or optimizers that wrap one another, containers in containers


class Listing:
    """Storages at one moment, each once: the first name and category given to it stay.

    Kept as numbers and texts: an object for each would make Python's garbage collector run in the user's loop.
    """

    def __init__(self) -> None:
        self.time_ns = time.time_ns()
        self.labels: dict[torch.device, dict[int, str]] = {}  # "bytes category name", by address

    def __len__(self) -> int:
        return sum(map(len, self.labels.values()))

    def add(self, tensor: torch.Tensor, category: str, name: str) -> None:
        """List what a tensor's memory is; nothing for one that has none."""
        for part in (tensor,) if type(tensor) in _PLAIN else plain_parts(tensor):
            address, size_bytes = storage_of(part)
            if address and size_bytes:  # else on no device, or emptied by FSDP or DeepSpeed
                labels = self.labels.setdefault(part.device, {})
                if address not in labels:
                    labels[address] = f"{size_bytes} {category} {name}"

    def name_of(self, tensor: torch.Tensor) -> str | None:
        """The name under which a tensor's memory is listed; None if it is not."""
        for part in plain_parts(tensor):
            if (label := self.labels.get(part.device, {}).get(storage_of(part)[0])) is not None:
                return label.split(" ", 2)[2]
        return None

    def without(self, known: dict[int, str]) -> Listing:
        """What is not in `known`, which has labels by address."""
        left = Listing()
        left.time_ns = self.time_ns
        for device, labels in self.labels.items():
            if new := {address: label for address, label in labels.items() if known.get(address) != label}:
                left.labels[device] = new
        return left

    def holding(self) -> Holding:
        """What was listed, in order."""
        tensors = {}
        for device, labels in self.labels.items():
            rows = ((address, label.split(" ", 2)) for address, label in labels.items())
            tensors[str(device)] = tuple(
                HeldTensor(address, int(size), category, name) for address, (size, category, name) in rows
            )
        return Holding(self.time_ns, tensors)


def storage_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Where the storage of a tensor that wraps no others begins, and its bytes; (0, 0) for none, or copy-on-write."""
    try:
        if torch._C._is_cow_tensor(tensor):  # type: ignore[attr-defined]
            return 0, 0
        storage = tensor.untyped_storage()
        return storage.data_ptr(), storage.nbytes()
    except (RuntimeError, NotImplementedError):  # sparse, or of a kind without memory of its own
        return 0, 0


def dtype_name(tensor: torch.Tensor) -> str:
    """`"bfloat16"`."""
    return str(tensor.dtype).removeprefix("torch.")


def plain_parts(tensor: torch.Tensor, depth: int = _MOST_NESTED) -> Iterator[torch.Tensor]:
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
        if isinstance(part := getattr(tensor, name, None), torch.Tensor):
            yield from plain_parts(part, depth - 1)


def tensors_in(value: Any, name: str = "", depth: int = _MOST_NESTED) -> Iterator[tuple[torch.Tensor, str]]:
    """Every tensor in nested dicts and lists, with the keys that lead to it: `exp_avg`, `old_dirs.3`."""
    if isinstance(value, torch.Tensor):
        yield value, name
    elif isinstance(value, (dict, list, tuple)):
        for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
            path = f"{name}.{key}" if name else str(key)
            if isinstance(entry, torch.Tensor):  # without a call: this runs at each step of an optimizer
                yield entry, path
            elif depth:
                yield from tensors_in(entry, path, depth - 1)


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
    """The parameters and buffers of models, and those of optimizers that no model has. Holds tensors weakly."""

    def __init__(self, roots: Callable[[], Sequence[Root]]) -> None:
        self._roots = roots
        self._named: list[int] = []  # ids of the models' tensors when they were named
        self._known: dict[int, Known] = {}
        self._parameters: list[Known] = []
        self._buffers: list[Known] = []
        self._unnamed = 0

    def tensors(self) -> Iterator[tuple[torch.Tensor, str]]:
        """What the models hold: parameters, then buffers; with shared tensors once."""
        for tensor, name in _alive((*self._parameters, *self._buffers)):
            yield tensor, name
            shard = getattr(tensor, "ds_tensor", None)  # DeepSpeed leaves the parameter itself empty
            if isinstance(shard, torch.Tensor):
                yield shard, name

    def parameters(self) -> Iterator[tuple[torch.Tensor, str]]:
        """Those of the models that can have a gradient."""
        return _alive(self._parameters)

    def get(self, tensor: torch.Tensor) -> Known | None:
        """What is known of a tensor."""
        known = self._known.get(id(tensor))
        return known if known is not None and known.reference() is tensor else None

    def refresh(self) -> None:
        """See what the models are made of now."""
        roots = self._roots()
        modules = [module for root in roots for module in all_modules(root.module)]
        ids = [id(one) for module in modules for one in (*module._parameters.values(), *module._buffers.values())]
        if ids == self._named and all(known.reference() is not None for known in self._parameters):
            return
        self._named = ids
        self._known = {key: known for key, known in self._known.items() if known.category is not None}
        self._parameters, self._buffers = [], []
        for root in roots:
            paths = module_paths(root)
            for module in all_modules(root.module):
                path = paths.get(id(module), ROOT_PATH)
                if path == ROOT_PATH:
                    path = root.label if root.named else ""
                for held, listed in ((module._parameters, self._parameters), (module._buffers, self._buffers)):
                    for name, tensor in held.items():
                        if tensor is not None and self.get(tensor) is None:
                            listed.append(self._add(tensor, f"{path}.{name}" if path else name))

    def learn(self, optimizer: Any) -> bool:
        """Name what an optimizer updates, be it not in a model; whether something of it had no name yet."""
        if all(self.get(tensor) is not None for tensor in parameters_of(optimizer)):
            return False
        self.refresh()
        if unknown := [tensor for tensor in parameters_of(optimizer) if self.get(tensor) is None]:
            self._name_unknown(unknown, type(optimizer).__name__)
        return True

    def _add(self, tensor: torch.Tensor, name: str, title: str = "", category: str | None = None) -> Known:
        known = self._known[id(tensor)] = Known(weakref.ref(tensor), name, title or name, category)
        return known

    def _name_unknown(self, tensors: Sequence[torch.Tensor], optimizer: str) -> None:
        listed = Listing()
        for tensor, name in self.tensors():
            listed.add(tensor, "params", name)
        learning = [(tensor, name) for tensor, name in self.parameters() if tensor.requires_grad]
        dtypes = {tensor.dtype for tensor, _ in learning}
        copies, others = [], []
        for tensor in tensors:
            if (same_memory := listed.name_of(tensor)) is not None:
                self._add(tensor, same_memory)
            # What no module has, or a parameter of a type that the model has none of: one of the model's own type may
            # as well belong to a module that is not known here.
            elif learning and (not isinstance(tensor, nn.Parameter) or tensor.dtype not in dtypes):
                copies.append(tensor)
            else:
                others.append(tensor)
        names = _names_by_shape(copies, learning)
        for tensor in copies:
            original = names.get(id(tensor))
            title = f"master of {original}" if original is not None else f"master {self._next()}"
            self._add(tensor, original or title, title, "os_params")
        for tensor in others:
            self._add(tensor, f"parameter {self._next()} of {optimizer}", category="params")

    def _next(self) -> int:
        self._unnamed += 1
        return self._unnamed - 1


def _alive(listed: Iterable[Known]) -> Iterator[tuple[torch.Tensor, str]]:
    for known in listed:
        if (tensor := known.reference()) is not None:
            yield tensor, known.name


def parameters_of(optimizer: Any) -> Iterator[torch.Tensor]:
    """What an optimizer updates, in its order."""
    groups = (group for group in optimizer.param_groups if isinstance(group, Mapping))
    return (tensor for group in groups for tensor in group.get("params", ()) if isinstance(tensor, torch.Tensor))


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


# --- What an optimizer holds: gradients of its parameters, its own copies of parameters, its state ---

_INNER = ("optimizer", "optim", "_optimizer", "base_optimizer")  # where wrappers keep what they wrap
_ENDS = 16  # tensors of a state, first and last, that are asked where they lie


def find_optimizers(given: object) -> tuple[Any, ...]:
    """What a user gave as optimizers: what has `param_groups`, inside of wrappers. Raises WrongUse: one has none."""
    if given is None:
        return ()
    several = given.values() if isinstance(given, Mapping) else given if isinstance(given, (list, tuple)) else (given,)
    return tuple(_innermost(one) for one in several)


def may_come(parameters: Iterable[torch.Tensor], optimizer: object = None) -> bool:
    """Whether this optimizer, or any alive one, may step: it holds one of `parameters`, or nothing that any module has.

    The latter are copies of parameters (mixed precision, partitions) or not known; of those alive, which need not have
    stepped, parameters are what a model has left that is no more. Asks the garbage collector for all objects, unless
    this optimizer holds one: 0.1 s where there are 400,000.
    """
    theirs = {id(tensor) for tensor in parameters}
    if optimizer is not None and any(id(tensor) in theirs for tensor in parameters_of(optimizer)):
        return True
    found = [one for one in gc.get_objects() if issubclass(type(one), (torch.optim.Optimizer, nn.Module))]
    alive = [one for one in found if issubclass(type(one), torch.optim.Optimizer)]
    if not alive:
        return False
    modules = (one.__dict__.get("_parameters") for one in found if issubclass(type(one), nn.Module))
    of_modules = {id(tensor) for held in modules if isinstance(held, dict) for tensor in held.values()}
    for one in alive if optimizer is None else [optimizer]:
        is_whole = isinstance(_attribute(one, "param_groups"), (list, tuple))  # else it was never made to its end
        tensors = list(parameters_of(one)) if is_whole else []
        held = {id(tensor) for tensor in tensors}
        is_left = optimizer is None and any(isinstance(tensor, nn.Parameter) for tensor in tensors)
        if not held.isdisjoint(theirs) or (held.isdisjoint(of_modules) and not is_left):
            return True
    return False


def _innermost(optimizer: object) -> object:
    found, inner = None, optimizer
    for _ in range(_MOST_NESTED):
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


def _add_gradients(listing: Listing, parameters: Iterable[torch.Tensor], names: ParameterNames) -> None:
    for parameter in parameters:
        gradient = parameter.grad if parameter.is_leaf or parameter.retains_grad else None  # else torch would warn
        if gradient is not None:
            known = names.get(parameter)
            listing.add(gradient, "grads", known.title if known is not None else "")


def _add_copies_and_state(listing: Listing, optimizer: Any, names: ParameterNames) -> None:
    for tensor in parameters_of(optimizer):
        known = names.get(tensor)
        if known is not None and known.category is not None:
            listing.add(tensor, known.category, known.title)
    for owner, key, tensor in _state_of(optimizer):
        # State may be kept under a key of its own, or for what is no longer updated.
        known = names.get(owner) if isinstance(owner, torch.Tensor) else None
        unknown = "an unknown parameter" if isinstance(owner, torch.Tensor) else str(owner)
        name = known.name if known is not None else unknown
        if "master" in key.lower():
            listing.add(tensor, "os_params", f"master of {name}")
        else:
            listing.add(tensor, "os_state", f"{key} of {name}")


def _fingerprint(optimizer: Any) -> _Fingerprint:
    """Which tensors its state is, and where the first and last of them lie: what offloads a state moves all of it."""
    tensors = [tensor for _, _, tensor in _state_of(optimizer)]
    ends = (*tensors[:_ENDS], *tensors[_ENDS:][-_ENDS:])
    return [id(tensor) for tensor in tensors], [storage_of(part) for tensor in ends for part in plain_parts(tensor)]


def _state_of(optimizer: Any) -> Iterator[tuple[object, str, torch.Tensor]]:
    """Whose state, which, and the tensor."""
    state = getattr(optimizer, "state", None)
    for owner, entries in state.items() if isinstance(state, Mapping) else ():
        for tensor, name in tensors_in(entries):
            yield owner, name or "state", tensor


# --------------------------------------------------------------------------------------------------
# Lists which memory the model and its optimizers hold, while a session records.
#
# Everything is listed when a session begins and when it ends; before each step of an optimizer the gradients of
# its parameters; after it its state, if that has changed hands. What else an optimizer holds is listed when it
# makes its first step in a session, for nobody knew it before. Of an optimizer that is none of torch's both
# are listed at the end of each step of the loop: of gradients only those that are still there.
#
# What runs at each step delays it, so of a state it is only seen whether it is other tensors now, or whether the
# first and last of them lie elsewhere.
#
# A loop may run for long, so there is a bound. After `MOST_TENSORS` entries a moment lists only what was not listed
# there before, after as many again nothing; the last moment before the end and the end itself are always listed in
# full.

MOST_TENSORS = 100_000

Reference = Callable[[], Any]  # a weak reference to an optimizer
_Fingerprint = tuple[list[int], list[tuple[int, int]]]


class OwnedTensors:
    """What the model and its optimizers hold. Tensors and optimizers are held weakly.

    Only a given optimizer to which there are no weak references (it has `__slots__`) lives as long as this.

    No method raises: what fails is in `problem`, and listing ends.

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
        self._safely(lambda session: session.keep(self._everything(session)))

    def end(self) -> tuple[Holding, ...]:
        """The session is about to end: all that was listed in it, in order of time; nothing if there is a problem.

        For the last moment has to list everything: what is missing there is taken for gone.
        """
        self._safely(lambda session: session.end(self._everything(session)))
        session, self._session = self._session, None
        if session is None or self.problem is not None:
            return ()
        return tuple(moment.holding() for moment in session.moments)

    def optimizers(self) -> list[Any]:
        """Those that were given, or have made a step in a session, and are still there."""
        alive = {key: optimizer for key, one in self._optimizers.items() if (optimizer := one()) is not None}
        self._optimizers = {key: self._optimizers[key] for key in alive}
        return list(alive.values())

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
        """A step of the loop is about to end: list what optimizers hold whose steps torch does not report."""
        self._safely(self._others_stepped)

    def _safely(self, action: Callable[[_Session], None]) -> None:
        session = self._session  # another thread may end it meanwhile
        if session is None or self.problem is not None:
            return
        try:
            with torch._C.DisableTorchFunction():  # what a mode or a subclass makes of reading an attribute is not ours
                action(session)
        except Exception as error:
            what = "what the model and its optimizers hold is not known, because listing it failed"
            self.problem = f"{what}: {in_a_line(error)}"

    def _everything(self, session: _Session) -> Listing:
        listing, names = Listing(), self._names
        names.refresh()
        for tensor, name in names.tensors():
            listing.add(tensor, "params", name)
        _add_gradients(listing, (tensor for tensor, _ in names.parameters()), names)
        for optimizer in self.optimizers():
            names.learn(optimizer)
            self._add_all(listing, optimizer, session)
        return listing

    def _add_all(self, listing: Listing, optimizer: Any, session: _Session) -> None:
        _add_copies_and_state(listing, optimizer, self._names)
        _add_gradients(listing, parameters_of(optimizer), self._names)
        session.states[id(optimizer)] = _fingerprint(optimizer)

    def _before_step(self, session: _Session, reference: Reference) -> None:
        optimizer = reference()
        known = self._optimizers.get(id(optimizer))
        if known is None or known() is not optimizer:  # it may have the id of one that is no more
            self._optimizers[id(optimizer)] = reference
            session.states.pop(id(optimizer), None)
        listing = Listing()
        if self._names.learn(optimizer) or id(optimizer) not in session.states:
            self._add_all(listing, optimizer, session)
        else:
            _add_gradients(listing, parameters_of(optimizer), self._names)
        session.add(listing)

    def _after_step(self, session: _Session, optimizer: Any) -> None:
        if id(optimizer) not in session.states:
            return  # the session began within its step
        state = _fingerprint(optimizer)
        if state != session.states[id(optimizer)]:
            session.states[id(optimizer)] = state
            listing = Listing()
            _add_copies_and_state(listing, optimizer, self._names)
            session.add(listing)

    def _others_stepped(self, session: _Session) -> None:
        for optimizer in self.optimizers():
            if not isinstance(optimizer, torch.optim.Optimizer):
                self._before_step(session, _reference(optimizer))
                self._after_step(session, optimizer)


def _reference(optimizer: object) -> Reference:
    try:
        return weakref.ref(optimizer)
    except TypeError:
        return lambda: optimizer


class _Session:
    """What was listed in one session."""

    def __init__(self) -> None:
        self.moments: list[Listing] = []
        self.states: dict[int, _Fingerprint] = {}  # of optimizers when their state was listed, by their id
        self._known: dict[int, str] = {}  # labels by address, of all moments
        self._count = 0
        self._last: Listing | None = None  # of which not everything was kept
        self._thread = threading.get_ident()

    def is_elsewhere(self) -> bool:
        """On a thread that is neither the session's nor one of autograd's engine.

        torch writes a gradient without Python's lock: whoever reads it meanwhile crashes.
        """
        return threading.get_ident() != self._thread and not in_backward()

    def add(self, listing: Listing) -> None:
        """Keep a moment, or where there are many what is new in it; nothing of an empty one."""
        if not len(listing):  # same (early return dropped): a moment without tensors tells nothing
            return
        self._last = listing if self._count >= MOST_TENSORS else None
        if self._last is None:
            self.keep(listing)
        elif self._count < 2 * MOST_TENSORS and len(new := listing.without(self._known)):
            self.keep(new)

    def keep(self, listing: Listing) -> None:
        """Keep a moment in full."""
        self.moments.append(listing)
        self._count += len(listing)
        for labels in listing.labels.values():
            self._known.update(labels)

    def end(self, listing: Listing) -> None:
        """Keep the last moment before the end in full, and the end."""
        if self._last is not None:
            self.moments.append(self._last)
        self.moments.append(listing)
