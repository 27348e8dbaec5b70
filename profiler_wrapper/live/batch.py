"""How many samples and tokens a step had, in all ranks, and the shape of this rank's batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from profiler_wrapper.live.deferred import Intake, Number, shape_of_mask
from profiler_wrapper.live.job import Told
from profiler_wrapper.live.parallelism import Parallelism
from profiler_wrapper.live.pending import Count
from profiler_wrapper.notices import Notices


@dataclass(frozen=True, slots=True)
class Batch:
    """A step's batch; `None` for what is not known.

    Attributes:
        samples, tokens: with how many ranks have as many.
        sequences, length: of this rank, as computed: with padding.
    """

    samples: Count = None
    tokens: Count = None
    sequences: int | None = None
    length: int | None = None

    @property
    def numbers(self) -> tuple[Number, ...]:
        """All that may have to be copied from the device first."""
        return (*(self.samples[0] if self.samples else ()), *(self.tokens[0] if self.tokens else ()))


class Batches:
    """Finds out about batches from what is given for each step, else from what was told at first."""

    def __init__(self, told: Told, sizes: Parallelism, intake: Intake, notices: Notices) -> None:
        self._told, self._intake, self._notices = told, intake, notices
        self._ranks = sizes.data_parallel
        self._ranks_of_given = 1 if told.counts == "job" else sizes.data_parallel
        self._usual = self._of({}, None)

    def of(self, samples: Any, tokens: Any, attention_mask: Any) -> Batch:
        """The batch of a step."""
        if samples is None and tokens is None and attention_mask is None:
            return self._usual
        given = {"samples": self._intake.count("samples", samples), "tokens": self._intake.count("tokens", tokens)}
        return self._of({name: count for name, count in given.items() if count is not None}, attention_mask)

    def _of(self, given: dict[str, Number], mask: Any) -> Batch:
        told = self._told
        shape = None if mask is None else shape_of_mask(mask)
        if mask is not None and shape is None:
            self._notices.once(
                "shape of mask", "the monitor leaves out attention_mask: it is not of shape (sequences, places)"
            )
        samples: Count = None
        if "samples" in given:
            samples = (given["samples"],), self._ranks_of_given
        elif shape is not None:
            samples = (shape[0],), self._ranks
            self._compare(shape[0])
        elif told.batch_size is not None:
            samples = (told.batch_size,), self._ranks_of_given
        length = shape[1] if shape is not None else told.seq_length
        tokens: Count = None
        if "tokens" in given:
            tokens = (given["tokens"],), self._ranks_of_given
        elif shape is not None:
            tokens = tuple(self._intake.real_tokens(mask)), self._ranks
        elif samples is not None and length is not None and isinstance(samples[0][0], (int, float)):
            tokens = (samples[0][0] * length,), samples[1]
        sequences = self._here(samples)
        if length is None and sequences and (tokens_here := self._here(tokens)) and tokens_here % sequences == 0:
            length = tokens_here // sequences
        return Batch(samples, tokens, sequences, length)

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
                f"the attention_mask has {rows} rows where batch_size={size}: samples and tokens are the mask's. With "
                "several micro-batches in a step give a list of their masks, or samples= and tokens=",
            )
