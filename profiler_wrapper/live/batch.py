"""How many samples and tokens a step had, in all ranks, and the shapes of this rank's micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from profiler_wrapper.live.batch_sizes import BatchSize
from profiler_wrapper.live.deferred import Intake, Number, shapes_of, shapes_of_masks
from profiler_wrapper.live.job import Told
from profiler_wrapper.live.parallelism import Parallelism
from profiler_wrapper.live.pending import Count
from profiler_wrapper.live.step_work import Shapes, in_words
from profiler_wrapper.notices import Notices


@dataclass(frozen=True, slots=True)
class Batch:
    """A step's batch; `None` for what is not known.

    Attributes:
        samples, tokens: with how many ranks have as many.
        shapes: of this rank's micro-batches, as computed: with padding; empty: not known.
    """

    samples: Count = None
    tokens: Count = None
    shapes: Shapes = ()

    @property
    def numbers(self) -> tuple[Number, ...]:
        """All that may have to be copied from the device first."""
        return (*(self.samples[0] if self.samples else ()), *(self.tokens[0] if self.tokens else ()))


class Batches:
    """Finds out about batches from what is given for each step, else from what was told at first."""

    def __init__(self, told: Told, sizes: Parallelism, intake: Intake, notices: Notices) -> None:
        self._told, self._intake, self._notices = told, intake, notices
        self._ranks = sizes.data_parallel
        self._share_batches = sizes.data_parallel * sizes.pipeline_parallel != sizes.world_size
        self._ranks_of_given = 1 if told.counts == "job" else sizes.data_parallel
        self._usual = self._of({}, None, None)

    def of(self, samples: Any, tokens: Any, attention_mask: Any, shapes: Any) -> Batch:
        """The batch of a step."""
        if samples is None and tokens is None and attention_mask is None and shapes is None:
            return self._usual
        given = {"samples": self._intake.count("samples", samples), "tokens": self._intake.count("tokens", tokens)}
        of_masks = None if attention_mask is None else shapes_of_masks(attention_mask)
        if attention_mask is not None and of_masks is None:
            self._notices.once(
                "shape of mask", "the monitor leaves out attention_mask: it is not of shape (sequences, places)"
            )
        told = None if shapes is None else shapes_of(shapes)
        if shapes is not None and told is None:
            self._notices.once("shapes", "the monitor leaves out shapes: they are no pairs (sequences, places)")
        counts = {name: count for name, count in given.items() if count is not None}
        return self._of(counts, None if of_masks is None else attention_mask, told or of_masks)

    def compare(self, step: int, taken: Shapes, seen: Sequence[BatchSize]) -> None:
        """Say so where `batch_size` and `seq_length` are not what the model was called with in a step.

        Args:
            taken: the shapes that the step was taken to have.
            seen: those of the model's calls in it.
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
            sizes = {"batch_size": self._told.batch_size, "seq_length": self._told.seq_length}
            given = ", ".join(f"{name}={size}" for name, size in sizes.items() if size is not None)
            calls = in_words([(size.samples, size.length) for size in seen])
            self._notices.once(
                "batch seen",
                f"{given} contradicts step {step}, where the model was called with {calls}: samples, tokens and FLOPs "
                f"are told of {in_words(taken)}. Give those of one step on this rank, all micro-batches together, or "
                "shapes= with each step",
            )

    def _of(self, given: Mapping[str, Number], mask: Any, shapes: Shapes | None) -> Batch:
        told = self._told
        samples: Count = None
        if "samples" in given:
            samples = (given["samples"],), self._ranks_of_given
        elif shapes is not None:
            rows = sum(sequences for sequences, _ in shapes)
            samples = (rows,), self._ranks
            self._compare(rows)
        elif told.batch_size is not None:
            samples = (told.batch_size,), self._ranks_of_given
        tokens: Count = None
        if "tokens" in given:
            tokens = (given["tokens"],), self._ranks_of_given
        elif mask is not None:
            tokens = tuple(self._intake.real_tokens(mask)), self._ranks
        elif shapes is not None:
            tokens = (sum(sequences * (length or 0) for sequences, length in shapes),), self._ranks
        elif told.seq_length is not None and samples is not None and isinstance(samples[0][0], (int, float)):
            tokens = (samples[0][0] * told.seq_length,), samples[1]
        return Batch(samples, tokens, self._computed(samples, tokens, shapes))

    def _computed(self, samples: Count, tokens: Count, shapes: Shapes | None) -> Shapes:
        sequences = self._here(samples)
        if shapes is not None and sequences in (None, sum(rows for rows, _ in shapes)):
            return shapes
        if not sequences:
            return ()
        length = self._told.seq_length
        if shapes is not None:  # they are of a part of the batch
            lengths = {length for _, length in shapes}
            return ((sequences, lengths.pop()),) if len(lengths) == 1 else ()
        if length is None and (tokens_here := self._here(tokens)) and tokens_here % sequences == 0:
            length = tokens_here // sequences
        return ((sequences, length),)

    def _here(self, count: Count) -> int | None:
        """On this rank, where it is a whole number that is known already."""
        if count is None:
            return None
        number = count[0][0]
        if not isinstance(number, (int, float)) or len(count[0]) > 1:
            return None
        here = number * count[1] / self._ranks
        return int(here) if here == int(here) else None

    def _compare(self, rows: int) -> None:
        size = self._told.batch_size
        if size is not None and rows < size and size % rows == 0:
            self._notices.once(
                "rows of mask",
                f"attention_mask or shapes have {rows} rows where batch_size={size}: samples and tokens are theirs. "
                "With several micro-batches in a step give a list of their masks, or samples= and tokens=",
            )
