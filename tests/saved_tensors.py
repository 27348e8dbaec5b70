"""What backward keeps per layer, found without a profiler: the tensors themselves, as autograd saves them.

- `SavedTensorTruth`: `saved_tensors_hooks`, one entry per storage, without parameters, buffers and what
  came in from outside; a storage belongs to the calls that were open when an op first returned it. What
  checkpointing keeps beside autograd counts too: the random number generator's state, and what the
  checkpointed function is given by keyword.
- `leaf_output_bytes`: the estimate that others make instead, the sizes of what leaf modules return.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from module_stack import OUTSIDE, ModuleStack, layer_names


class Call(NamedTuple):
    """One entry of one layer."""

    layer: str
    index: int  # from 0


class Kept(NamedTuple):
    """A storage that is kept for backward."""

    size_bytes: int
    calls: tuple[Call, ...]  # open when it was allocated, the outermost first; empty: outside of every module


class SavedTensorTruth:
    """Bytes kept for backward per layer that allocated them, over all forwards while the `with` lasts.

    names: from `layer_names` of the plain model, where `model` is wrapped.

    Weights that autocast casts count as well: the copy is made inside the layer, and saved for backward.
    """

    def __init__(self, model: nn.Module, names: dict[int, str] | None = None) -> None:
        self._model = model
        self._names = layer_names(model) if names is None else names
        self._owner: dict[int, tuple[Any, tuple[Call, ...]]] = {}  # storage -> (kept alive, so no address comes twice)
        self._generator_states: list[tuple[weakref.ref[torch.Tensor], tuple[Call, ...]]] = []
        self.kept: list[Kept] = []
        self.entered: Counter[str] = Counter()

    def __enter__(self) -> SavedTensorTruth:
        held = [*self._model.parameters(), *self._model.buffers()]
        self._given = {tensor.untyped_storage()._cdata: tensor for tensor in held}
        self._saved: dict[int, int] = {}
        self._stack = _CallStack(self._model, self._names, self._keep_all)
        self._get_rng_state = torch.get_rng_state
        torch.get_rng_state = self._note_generator_state
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor)
        self._mode = _Storages(self._seen)
        self._mode.__enter__()
        self._hooks.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._hooks.__exit__(*exception)
        self._mode.__exit__(*exception)
        torch.get_rng_state = self._get_rng_state
        self._stack.close()
        self.entered = self._stack.entries
        self.kept = [Kept(size, self._owner[storage][1]) for storage, size in self._saved.items()]
        states = ((reference(), calls) for reference, calls in self._generator_states)
        self.kept += [Kept(state.nbytes, calls) for state, calls in states if state is not None]
        self._owner.clear()

    def self_bytes(self) -> dict[str, int]:
        """By the innermost layer; `OUTSIDE` has what came in from outside (inputs)."""
        totals: Counter[str] = Counter()
        for size, calls in self.kept:
            totals[calls[-1].layer if calls else OUTSIDE] += size
        return dict(totals)

    def bytes_of_calls(self, layer: str) -> list[int]:
        """What each call of `layer` keeps, with the calls inside it."""
        totals = [0] * self.entered[layer]
        for size, calls in self.kept:
            for index in {call.index for call in calls if call.layer == layer}:
                totals[index] += size
        return totals

    def mean_bytes(self, layer: str) -> float:
        """The mean of that over the calls."""
        of_calls = self.bytes_of_calls(layer)
        return sum(of_calls) / len(of_calls)

    def _seen(self, tensor: torch.Tensor, *, new: bool) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._owner and storage._cdata not in self._given:
            self._owner[storage._cdata] = (storage, self._stack.calls if new else ())

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._given:
            self._seen(tensor, new=False)
            self._saved[storage._cdata] = storage.nbytes()
        return tensor

    def _keep_all(self, values: object) -> None:
        for value in tree_iter(values):
            if isinstance(value, torch.Tensor):
                self._keep(value)

    def _note_generator_state(self) -> torch.Tensor:
        state = self._get_rng_state()
        self._generator_states.append((weakref.ref(state), self._stack.calls))
        return state


class _CallStack(ModuleStack):
    """Tells which calls are open, not only of which modules, and what checkpointed functions are given."""

    def __init__(self, model: nn.Module, names: dict[int, str], given: Callable[[object], None]) -> None:
        self.calls: tuple[Call, ...] = ()
        self.entries: Counter[str] = Counter()
        self._given = given
        super().__init__(model, names)
        for module in model.modules():
            if "checkpoint_fn" in vars(module):
                self._follow_checkpoint(module, "checkpoint_fn")

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        before = self.calls
        if self.innermost != name:  # else it is the same call, now in `forward` or in what wraps the module
            self.calls = (*before, Call(name, self.entries[name]))
            self.entries[name] += 1
        try:
            with super().inside(name):
                yield
        finally:
            self.calls = before

    def _follow_checkpoint(self, owner: Any, attribute: str) -> None:
        super()._follow_checkpoint(owner, attribute)
        followed = getattr(owner, attribute)

        def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled():
                self._given((args, kwargs))
                if isinstance(function, functools.partial):
                    self._given((function.args, function.keywords))
            return followed(function, *args, **kwargs)

        setattr(owner, attribute, checkpoint)


class _Storages(TorchDispatchMode):
    """Tells of every tensor that an op is given, then of every one that it returns."""

    def __init__(self, tell: Callable[..., None]) -> None:
        super().__init__()
        self._tell = tell

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # What `torch.tensor` makes is first seen as the argument of `lift_fresh`, and is new all the same.
        self._tell_all((args, kwargs), new=func is torch.ops.aten.lift_fresh.default)
        result = func(*args, **(kwargs or {}))
        self._tell_all(result, new=True)
        return result

    def _tell_all(self, values: Any, *, new: bool) -> None:
        for value in tree_iter(values):
            if isinstance(value, torch.Tensor):
                self._tell(value, new=new)


@contextmanager
def leaf_output_bytes(model: nn.Module, names: dict[int, str]) -> Iterator[Counter[str]]:
    """The estimate that others make of what each layer keeps: the sizes of what leaf modules in it return.

    Over all calls while the `with` lasts. names: as for `SavedTensorTruth`.
    """
    estimate: Counter[str] = Counter()
    root = next(iter(names.values()))

    def add(module: nn.Module, _args: object, output: object) -> None:
        size = sum(value.nbytes for value in tree_iter(output) if isinstance(value, torch.Tensor))
        estimate[root] += size
        parts = names[id(module)].split(".")
        for depth in range(len(parts)):
            estimate[".".join(parts[: depth + 1])] += size

    leaves = [m for m in model.modules() if id(m) in names and next(m.children(), None) is None]
    handles = [leaf.register_forward_hook(add) for leaf in leaves]
    try:
        yield estimate
    finally:
        for handle in handles:
            handle.remove()
