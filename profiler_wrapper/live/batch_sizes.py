"""How many samples and tokens a batch has, from shapes: nothing is read from a device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import nn

from profiler_wrapper.capture import calls
from profiler_wrapper.capture.wrappers import holders

_TOKENS = ("input_ids", "inputs_embeds", "tokens")
_MASK = "attention_mask"
_DEPTH = 4  # how deep a tensor may lie in a batch
_MOST_STEPS = 3  # that the loop's own call of the model is looked for in


@dataclass(frozen=True, slots=True)
class BatchSize:
    """What a batch holds. None: not told.

    Attributes:
        samples: length of the first dimension.
        length: places of each sequence, padding included.
        mask: the batch's attention mask (samples, sequence length), which is 0 where a token is padding.
        sizes: of the first two dimensions, whichever of them counts the samples.
    """

    samples: int | None = None
    length: int | None = None
    mask: torch.Tensor | None = None
    sizes: tuple[int, ...] = ()


def size_of(batch: object) -> BatchSize:
    """The size of a batch as data loaders and models have it: a mapping, a sequence, a tensor.

    The length is known where the batch is a mapping with `input_ids` (or another of a few such names), or where its
    first tensor holds integers in two dimensions, as the token ids of a plain language model do.
    """
    length = mask = None
    first = _first_tensor(batch)
    if isinstance(batch, Mapping):
        for name in _TOKENS:
            ids = batch.get(name)
            if isinstance(ids, torch.Tensor) and ids.dim() >= 2:
                first, length = ids, ids.shape[1]
                break
        mask = batch.get(_MASK)
        if not isinstance(mask, torch.Tensor) or first is None or length is None or mask.shape != first.shape[:2]:
            mask = None
    elif _are_ids(first):
        length = first.shape[1]
    sizes = () if first is None else tuple(first.shape[:2])
    return BatchSize(sizes[0] if sizes else None, length, mask, sizes)


def _are_ids(value: object) -> TypeGuard[torch.Tensor]:
    """Whether `value` looks like token ids (samples, sequence length)."""
    return isinstance(value, torch.Tensor) and value.dim() == 2 and value.dtype in (torch.int64, torch.int32)


def _first_tensor(batch: object, depth: int = _DEPTH) -> torch.Tensor | None:
    if isinstance(batch, torch.Tensor):
        return batch
    inside: Iterable[object]
    if isinstance(batch, Mapping):
        inside = batch.values()
    elif isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)):
        inside = batch
    else:
        return None
    if not depth:
        return None
    found = (_first_tensor(value, depth - 1) for value in inside)
    return next((tensor for tensor in found if tensor is not None), None)


class BatchCounter:
    """Sees every batch that a model is trained on: `sizes` has one entry for each call with gradients.

    During the first step it looks at all calls of modules to find which one the loop makes: that of the model
    itself, or of what was wrapped around it later (DDP, a compiled module). From then on it is a hook on that one.
    """

    def __init__(self, model: nn.Module) -> None:
        self.sizes: list[BatchSize] = []
        self._plain = holders(model)[-1]
        self._handle: Any = None
        self._looking = False
        self._steps_left = _MOST_STEPS
        self._saw_calls = False
        self._called: nn.Module | None = None  # what the loop calls

    def start(self) -> None:
        """Count from now on."""
        if self._handle is None and not self._looking and self._steps_left:
            self._looking = True
            calls.listen(self)

    def take(self) -> list[BatchSize]:
        """The batches since the last time: those of one step. The first time, the loop's own call has been found."""
        if self._looking and self._called is not None:
            self._stop_looking()
            self._handle = _put_before(self._called, self)
        elif self._looking and self._saw_calls:
            self._saw_calls = False
            self._steps_left -= 1
            if not self._steps_left:  # it calls only parts of the model
                self._stop_looking()
        sizes, self.sizes = self.sizes, []
        return sizes

    def stop(self) -> None:
        """Count no more, and leave nothing on the model."""
        self._stop_looking()
        if self._handle is not None:
            self._handle.remove()
        self._handle = self._called = None

    def count(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A call of the model: a batch, unless it is one without gradients."""
        if not torch.is_grad_enabled():
            return
        if args and _are_ids(args[0]):
            self.sizes.append(size_of({"input_ids": args[0], **kwargs}))
        else:
            self.sizes.append(size_of(args[0] if len(args) == 1 else args or kwargs))

    def open_call(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], marked: set[str] | None = None
    ) -> object | None:
        """A module is about to be called; see `calls.Listener`."""
        self._saw_calls = True
        if self._called is None and holders(module)[-1] is self._plain:
            self._called = module
        if module is self._called:
            self.count(args, kwargs)
        return None

    def close_call(self, opened: Any) -> None:
        """Never called, as `open_call` returns None."""

    def _stop_looking(self) -> None:
        if self._looking:
            self._looking = False
            calls.stop_listening(self)


def _put_before(module: nn.Module, counter: BatchCounter) -> Any:
    """Has calls of the module counted until `remove()` of what this returns."""
    if module._compiled_call_impl is not None:
        return _InCompiledCall(module, counter)
    return module.register_forward_pre_hook(_Hook(counter), with_kwargs=True, prepend=True)


class _InCompiledCall:
    """In front of the call of a module that was compiled in place, in whose code a hook would not fire."""

    def __init__(self, module: nn.Module, counter: BatchCounter) -> None:
        self._module: Any = module
        self._original: Any = module._compiled_call_impl

        def counted(*args: Any, **kwargs: Any) -> Any:
            counter.count(args, kwargs)
            return self._original(*args, **kwargs)

        self._ours = counted
        self._module._compiled_call_impl = counted

    def remove(self) -> None:
        if self._module._compiled_call_impl is self._ours:
            self._module._compiled_call_impl = self._original


class _Hook:
    """The hook of a `BatchCounter`. A copy of the model has one that does nothing, and so has an unpickled one."""

    def __init__(self, counter: BatchCounter | None = None) -> None:
        self._counter = counter

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or self._counter is None:
            return
        self._counter.count(args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return _Hook()

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        return _Hook, ()
