"""How many samples and tokens a batch has, from what is given and from shapes: nothing is read from a device."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeGuard

import torch
from torch import nn

from profiler_wrapper.capture import scopes
from profiler_wrapper.capture.layers import holders
from profiler_wrapper.capture.torch_state import is_tracing
from profiler_wrapper.errors import Notices
from profiler_wrapper.monitor.work import BatchKey, Parallelism, Shapes, in_words
from profiler_wrapper.timer.device_events import Accelerator

_TOKENS = ("input_ids", "inputs_embeds", "tokens")
_MASK = "attention_mask"
_DEPTH = 4  # how deep a tensor may lie in a batch
_MOST_STEPS = 3  # that the loop's own call of the model is looked for in


@dataclass(frozen=True, slots=True)
class BatchSize:
    """What a batch holds. None: not told."""

    samples: int | None = None  # length of the first dimension
    length: int | None = None  # places of each sequence, padding included
    # the batch's attention mask (samples, sequence length), which is 0 where a token is padding
    mask: torch.Tensor | None = None
    sizes: tuple[int, ...] = ()  # of the first two dimensions, whichever of them counts the samples
    # See `BatchKey`. Samples come first in ids and images; of other batches only equal ones have the same.
    key: tuple[int, Any] = (1, ())


def size_of(batch: object) -> BatchSize:
    """The size of a batch as data loaders and models have it: a mapping, a sequence, a tensor.

    The length is known where the batch is a mapping with `input_ids` (or another of a few such names), or where its
    first tensor holds integers in two dimensions, as the token ids of a plain language model do.
    """
    length = mask = None
    tensors = list(_tensors_in(batch))
    first = next(iter(tensors), None)
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
    shapes = tuple(tuple(tensor.shape) for tensor in tensors)
    key: tuple[int, Any] = (1, shapes)
    if first is not None and (length is not None or first.dim() > 3) and {shape[:1] for shape in shapes} == {sizes[:1]}:
        rest = tuple(shape[1:] for shape in shapes)
        key = sizes[0], length if {*rest} == {(length,)} else rest
    return BatchSize(sizes[0] if sizes else None, length, mask, sizes, key)


def _tensors_in(batch: object, depth: int = _DEPTH) -> Iterator[torch.Tensor]:
    """All of them, in their order."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, (Mapping, Sequence)) and not isinstance(batch, (str, bytes)) and depth:
        for value in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _tensors_in(value, depth - 1)


def _are_ids(value: object) -> TypeGuard[torch.Tensor]:
    """Whether `value` looks like token ids (samples, sequence length)."""
    return isinstance(value, torch.Tensor) and value.dim() == 2 and value.dtype in (torch.int64, torch.int32)


class BatchCounter(scopes.Listener):
    """Sees every batch that a model is trained on: `sizes` has one entry for each call with gradients.

    During the first step it looks at all calls of modules to find which one the loop makes: that of the model
    itself, or of what was wrapped around it later (DDP, a compiled module). From then on it is a hook on that one,
    unless that was compiled in place.
    """

    def __init__(self, model: nn.Module) -> None:
        self.sizes: list[BatchSize] = []
        self._plain = holders(model)[-1]
        self._handle: Any = None
        self._looking = False
        self._steps_left = _MOST_STEPS
        self._saw_calls = False  # same: looks one step longer
        self._called: nn.Module | None = None  # what the loop calls

    def start(self) -> None:
        """Count from now on."""
        if self._handle is None and not self._looking and self._steps_left:
            self._looking = True
            scopes.listen(self)

    def take(self) -> list[BatchSize]:
        """The batches since the last time: those of one step. The first time, the loop's own call has been found."""
        if self._looking and self._called is not None:
            if self._called._compiled_call_impl is None:  # else a hook would not fire in its code
                self._stop_looking()
                self._handle = self._called.register_forward_pre_hook(_Hook(self), with_kwargs=True, prepend=True)
        elif self._looking and self._saw_calls:
            self._saw_calls = False
            self._steps_left -= 1
            if not self._steps_left:  # it calls only parts of the model
                self._stop_looking()
        sizes, self.sizes = self.sizes, []
        return sizes

    @property
    def counts(self) -> bool:
        """It is a hook on what the loop calls, which costs next to nothing."""
        return self._handle is not None

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
            self.sizes.append(size_of({"input_ids": args[0], **kwargs, "others": args[1:]}))
        else:
            one = len(args) == 1 and not any(tensor.dim() for tensor in _tensors_in(kwargs))
            self.sizes.append(size_of(args[0] if one else [*args, kwargs] if args else kwargs))

    def open_call(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], marked: set[str] | None = None
    ) -> object | None:
        """A module is about to be called; see `scopes.Listener`."""
        self._saw_calls = True
        if self._called is None and holders(module)[-1] is self._plain:
            self._called = module
        if module is self._called:
            self.count(args, kwargs)
        return None

    def _stop_looking(self) -> None:
        if self._looking:
            self._looking = False
            scopes.stop_listening(self)


class _Hook:
    """The hook of a `BatchCounter`. A copy of the model has one that does nothing, and so has an unpickled one."""

    def __init__(self, counter: BatchCounter | None = None) -> None:
        self._counter = counter

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._counter is not None and not is_tracing():
            self._counter.count(args, kwargs)

    def __reduce__(self) -> tuple[type[_Hook], tuple[()]]:
        return _Hook, ()


# --------------------------------------------------------------------------------------------------
# Numbers of a step that may still be on the device: copied without waiting, and read when they are there.


Number: TypeAlias = "float | torch.Tensor | None"  # a tensor is on its way to the host


def value_of(number: Number) -> float | None:
    """The number, once its copy is there."""
    return float(number.item()) if isinstance(number, torch.Tensor) else number


class AsyncScalars:
    """Takes what users give: numbers, and tensors of one number wherever they are."""

    def __init__(self, accelerator: Accelerator | None, notices: Notices) -> None:
        self._accelerator, self._notices = accelerator, notices

    def number(self, name: str, given: Any) -> Number:
        """`None` where it is no number, with one warning."""
        if isinstance(given, (list, tuple)) and len(given) == 1:  # as `get_last_lr()` gives it
            given = given[0]
        if given is None:
            return None
        if isinstance(given, torch.Tensor):
            return self._of_tensor(name, given)
        try:
            return float(given)
        except OverflowError:
            return self._refused(name, "it is too large")
        except (TypeError, ValueError):
            return self._refused(name, f"it is a {type(given).__name__}, no number")

    def whole(self, name: str, given: Any) -> int | None:
        """A number of a step or an epoch, which has to be known at once."""
        number = self.number(name, given)
        if isinstance(number, torch.Tensor):
            self._refused(name, "it is on the device, and reading it would wait: give a number")
            return None
        return None if number is None or not math.isfinite(number) else int(number)

    def count(self, name: str, given: Any) -> Number:
        """A number of things, which is not below 0."""
        number = self.number(name, given)
        if number is None or isinstance(number, torch.Tensor) or 0 <= number < float("inf"):
            return number
        return self._refused(name, f"{number:g} is no number of {name}")

    def _of_tensor(self, name: str, tensor: torch.Tensor) -> Number:
        tensor = tensor.detach()
        placements = getattr(tensor, "placements", None)
        if placements is not None:  # a DTensor
            if any(not placement.is_replicate() for placement in placements):
                return self._refused(name, "it is spread over several ranks: give its .full_tensor()")
            tensor = tensor.to_local()  # type: ignore[attr-defined]
        if tensor.numel() != 1 or tensor.is_meta:
            return self._refused(name, f"it is a tensor of shape {tuple(tensor.shape)}, no number")
        if tensor.is_complex():
            return self._refused(name, "it is complex, no number")
        if tensor.device.type == "cpu":
            return float(tensor.item())
        if self._accelerator is None:
            return self._refused(name, f"it is on {tensor.device}, and the monitor was told of a CPU")
        return self._accelerator.copy(tensor.reshape(()))

    def _refused(self, name: str, why: str) -> Number:
        self._notices.warn_once(f"number {name}", f"the monitor leaves out {name}: {why}")
        return None


# --- How many samples and tokens a step had, in all ranks, and the shapes of this rank's micro-batches ---


Count: TypeAlias = "tuple[Number, int] | None"  # with how many ranks have as many; None: not known


@dataclass(frozen=True, slots=True)
class Batch:
    """A step's batch; `None` for what is not known."""

    samples: Count = None
    tokens: Count = None
    shapes: Shapes = ()  # of this rank's micro-batches, as computed: with padding; empty: not known

    def key(self, seen: Sequence[BatchSize]) -> BatchKey:
        """The shapes; where they have no length, what the model's calls were given, or as many tokens."""
        if self.shapes and all(length is not None for _, length in self.shapes):
            return self.shapes
        tokens = None if self.tokens is None or isinstance(self.tokens[0], torch.Tensor) else self.tokens[0]
        return tuple(size.key for size in seen) or self.shapes or (((1, tokens),) if tokens is not None else ())


class Batches:
    """Finds out about batches from what is given for each step, else from what was told at first."""

    def __init__(
        self,
        sizes: Parallelism,
        scalars: AsyncScalars,
        notices: Notices,
        *,
        batch_size: int | None = None,
        seq_length: int | None = None,
        counts: str = "rank",
    ) -> None:
        self._scalars, self._notices = scalars, notices
        self._batch_size, self._seq_length = batch_size, seq_length
        self._ranks = sizes.data_parallel
        self._share_batches = sizes.data_parallel * sizes.pipeline_parallel != sizes.world_size
        self._ranks_of_given = 1 if counts == "job" else sizes.data_parallel

    def of(self, samples: Any, tokens: Any, attention_mask: Any, shapes: Any) -> Batch:
        """The batch of a step: samples and tokens as given, else of the mask, the shapes, the monitor's arguments."""
        masks = attention_mask if isinstance(attention_mask, (list, tuple)) else [attention_mask]
        masked = None
        if attention_mask is not None:
            masked = self._pairs("attention_mask", [getattr(mask, "shape", ()) for mask in masks])
        found = self._pairs("shapes", shapes) or masked
        of_samples: Count = None
        of_tokens: Count = None
        if (count := self._scalars.count("samples", samples)) is not None:
            of_samples = count, self._ranks_of_given
        elif found is not None:
            rows = sum(sequences for sequences, _ in found)
            of_samples = rows, self._ranks
            self._compare(rows)
        elif self._batch_size is not None:
            of_samples = self._batch_size, self._ranks_of_given
        if (count := self._scalars.count("tokens", tokens)) is not None:
            of_tokens = count, self._ranks_of_given
        elif masked is not None:
            of_tokens = self._scalars.number("attention_mask", self._real_tokens(masks)), self._ranks
        elif found is not None:
            of_tokens = sum(sequences * length for sequences, length in found), self._ranks
        elif self._seq_length is not None and of_samples is not None and isinstance(of_samples[0], (int, float)):
            of_tokens = of_samples[0] * self._seq_length, of_samples[1]
        return Batch(of_samples, of_tokens, self._computed(of_samples, of_tokens, found))

    def _pairs(self, name: str, shapes: Any) -> tuple[tuple[int, int], ...] | None:
        """As plain numbers; None where there are none, or they are no pairs of numbers, which is said."""
        if shapes is None:
            return None
        try:
            found = tuple((int(sequences), int(length)) for sequences, length in shapes)
        except (TypeError, ValueError):
            found = ()
        if not found:
            why = "of each micro-batch there is to be a shape (sequences, places)"
            self._notices.warn_once(name, f"the monitor leaves out {name}: {why}")
        return found or None

    def compare(self, step: int, taken: Shapes, seen: Sequence[BatchSize]) -> None:
        """Say so where a step is taken to be of other shapes than the model was called with in it.

        Args:
            taken: by what the monitor was given.
            seen: by the model's calls.
        """
        if self._share_batches or not taken:  # a rank's model may be called with a part of its batch
            return
        rows = sum(sequences for sequences, _ in taken)
        tokens = sum(sequences * (length or 0) for sequences, length in taken)
        if tokens and all(size.samples and size.length for size in seen):
            fits = tokens == sum((size.samples or 0) * (size.length or 0) for size in seen)
        else:  # samples come first or, as torch's own layers take them, second
            fits = rows in [sum(dimension) for dimension in zip(*(size.sizes for size in seen), strict=False)]
        if not fits:
            self._notices.warn_once(
                "batch seen",
                f"step {step} is taken to have {in_words(taken)}, which contradicts its calls of the model, with "
                f"{in_words([(size.samples, size.length) for size in seen])}: samples, tokens and FLOPs are not right. "
                "Give batch_size= and seq_length= of one step on this rank, all micro-batches together, or shapes= "
                "with each step",
            )

    def _computed(self, samples: Count, tokens: Count, shapes: Shapes | None) -> Shapes:
        sequences = self._here(samples)
        if shapes is not None and sequences in (None, sum(rows for rows, _ in shapes)):
            return shapes
        if not sequences:
            return ()
        length = self._seq_length
        if shapes is not None:  # they are of a part of the batch
            lengths = {length for _, length in shapes}
            return ((sequences, lengths.pop()),) if len(lengths) == 1 else ()
        if length is None and (tokens_here := self._here(tokens)) and tokens_here % sequences == 0:
            length = tokens_here // sequences
        return ((sequences, length),)

    def _real_tokens(self, masks: Sequence[Any]) -> torch.Tensor | int | None:
        """None, which is said, where the masks are on several accelerators: torch does not add across them."""
        counts = [torch.count_nonzero(torch.as_tensor(mask)) for mask in masks]
        if len({count.device for count in counts} - {torch.device("cpu")}) > 1:
            why = "its masks are on several accelerators: give tokens= with each step"
            self._notices.warn_once("masks apart", f"the monitor leaves out tokens of attention_mask: {why}")
            return None
        return sum(counts)

    def _compare(self, rows: int) -> None:
        size = None if self._batch_size is None else self._here((self._batch_size, self._ranks_of_given))
        if size is not None and 0 < rows < size and size % rows == 0:
            self._notices.warn_once(
                "rows of mask",
                f"attention_mask or shapes have {rows} rows where batch_size={size}: samples and tokens are theirs. "
                "With several micro-batches in a step give a list of their masks, or samples= and tokens=",
            )

    def _here(self, count: Count) -> int | None:
        """On this rank, where it is a whole number that is known already."""
        if count is None or not isinstance(count[0], (int, float)):
            return None
        here = count[0] * count[1] / self._ranks
        return int(here) if here == int(here) else None
