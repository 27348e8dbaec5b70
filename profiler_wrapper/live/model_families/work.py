"""What a batch is, and the FLOPs that a model's products need for it: two for each multiply-add."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from profiler_wrapper.errors import WrongUse

Convention = Literal["full", "causal"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The sequences of a step.

    Attributes:
        sequences: how many: texts, images or videos.
        lengths: tokens of a sequence -> how many have as many; None where only the config tells (images).
        convention: "causal" leaves out the pairs of tokens that a causal mask or a window hides.
    """

    sequences: int
    lengths: Mapping[int, int] | None
    convention: Convention = "full"

    @property
    def tokens(self) -> int:
        """Of all sequences. Raises WrongUse where no length is known."""
        return sum(length * count for length, count in self._known().items())

    def or_of_length(self, tokens: int) -> Batch:
        """The same batch, its sequences of `tokens` tokens unless it was told otherwise."""
        return self if self.lengths is not None else replace(self, lengths={tokens: self.sequences})

    def twice_the_pairs(self, *, causal: bool, window: int | None = None) -> int:
        """Two times the pairs of query and key that count; twice, so that half of an odd number stays whole.

        Of L tokens L², and L²/2 under a causal mask, the diagonal being counted half; of a window of W < L
        tokens in it, LW - W²/2.
        """
        if not causal or self.convention == "full":
            return sum(2 * length**2 * count for length, count in self._known().items())
        pairs = 0
        for length, count in self._known().items():
            seen = length if window is None else min(length, window)
            pairs += (2 * length * seen - seen**2) * count
        return pairs

    def _known(self) -> Mapping[int, int]:
        if self.lengths is None:
            raise WrongUse("the length of the sequences is missing: give seq_length or sequence_lengths")
        return self.lengths


class Work:
    """Collects the products of one forward pass and of its backward, by part of the model."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.forward: Counter[str] = Counter(embedding=0)  # a lookup multiplies nothing, and is listed to say so
        self.backward: Counter[str] = Counter(embedding=0)

    def linear(
        self,
        part: str,
        inputs: int,
        outputs: int,
        *,
        rows: int | None = None,
        times: int = 1,
        input_gradient: bool = True,
    ) -> None:
        """`times` products of (rows, inputs) and (inputs, outputs); by default a row for each token.

        Backward has two products as big, for the gradients of the weight and of the input; one where the
        input comes from the data and autograd leaves its gradient out.
        """
        rows = self.batch.tokens if rows is None else rows
        flops = 2 * rows * inputs * outputs * times
        self.forward[part] += flops
        self.backward[part] += 2 * flops if input_gradient else flops

    def attention(
        self,
        heads: int,
        width: int,
        value_width: int | None = None,
        *,
        causal: bool,
        window: int | None = None,
        times: int = 1,
    ) -> None:
        """Scores of each query and key, `width` wide, and their sums of values, for each of `heads`.

        Backward has four products instead of two. What a fused kernel computes again is not the model's.
        """
        pairs = self.batch.twice_the_pairs(causal=causal, window=window)
        flops = pairs * heads * (width + (width if value_width is None else value_width)) * times
        self.forward["attention_scores"] += flops
        self.backward["attention_scores"] += 2 * flops
