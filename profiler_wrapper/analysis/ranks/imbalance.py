"""A different rank is slow in each step: by its data, by one kind of work, or by chance."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from profiler_wrapper.analysis.ranks.medians import Float, median
from profiler_wrapper.analysis.ranks.model import COMPUTE, Bool, Int
from profiler_wrapper.analysis.ranks.persistence import binomial_tail
from profiler_wrapper.analysis.ranks.what_if import Frame

_TOGETHER = 0.5  # correlation of forward and backward
_TOGETHER_FAR = 0.35  # where the slowest rank is far from the others
_LEAST, _FAR = 0.15, 0.5  # of its ideal compute
_LITTLE, _NEARLY_NONE = 0.5, 0.2  # of that by which compute is slower
_PART_OF_EACH = 0.15  # of the excess, at least, in each of the two
_REST = ("data", "optimizer", "other")  # what long input leaves as it is
_CHANCE = 0.01
_SAME = 0.4  # of the steps have one rank longest in both
_FEWEST = 5  # steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Movement:
    """How forward and backward of a rank go together within a step, over the steps with a loss."""

    steps: int
    correlation: float  # of what ranks take beyond the typical, each rank's own level left out; nan: too little
    same_rank: int  # steps whose longest forward and longest backward are of one rank
    forward_part: float  # of the excess of the slowest rank, in these steps
    inflation: float  # by how much the slowest rank's compute is beyond its ideal, relative to that
    other_inflation: float  # the same of the rest of its work, relative to that of compute
    ranks: int

    @property
    def together(self) -> bool:
        """Long input: forward and backward move together, the rest of the step does not."""
        return (
            self.steps >= _FEWEST
            and self.inflation >= _LEAST
            and (
                (self.correlation >= _TOGETHER and self.other_inflation < _LITTLE)
                or (
                    self.correlation >= _TOGETHER_FAR and self.inflation >= _FAR and self.other_inflation < _NEARLY_NONE
                )
            )
            and _PART_OF_EACH <= self.forward_part <= 1 - _PART_OF_EACH
            and self.same_rank >= _SAME * self.steps
            and binomial_tail(self.same_rank, self.steps, 1 / max(2, self.ranks)) <= _CHANCE
        )

    @property
    def whole_rank(self) -> bool:
        """Everything of the slowest rank is slower: its machine is, for a while."""
        return self.other_inflation >= _LITTLE


def movement(frame: Frame, lossy: Bool) -> Movement:
    """Of the steps marked in `lossy`, (S,)."""
    forward = frame.excess("forward")[lossy]
    backward = frame.excess("recompute", "backward")[lossy]
    ranks = forward.shape[1]
    if not len(forward) or ranks < 2:
        return Movement(
            steps=0,
            correlation=np.nan,
            same_rank=0,
            forward_part=np.nan,
            inflation=0.0,
            other_inflation=0.0,
            ranks=ranks,
        )
    steps = np.arange(len(forward))
    slowest = (forward + backward).argmax(axis=1)
    ahead, behind = np.maximum(forward, 0)[steps, slowest], np.maximum(backward, 0)[steps, slowest]
    total = ahead + behind
    inflation = _inflation(frame, lossy, slowest, *COMPUTE)
    rest = _inflation(frame, lossy, slowest, *_REST)
    return Movement(
        steps=len(forward),
        correlation=_correlation(forward - median(forward, axis=0), backward - median(backward, axis=0)),
        same_rank=int((forward.argmax(axis=1) == backward.argmax(axis=1)).sum()),
        forward_part=float(np.median(np.divide(ahead, total, out=np.full_like(total, 0.5), where=total > 0))),
        inflation=inflation,
        other_inflation=max(0.0, rest) / inflation if inflation > 0 else 0.0,
        ranks=ranks,
    )


def stands_out(frame: Frame, lossy: Bool, kind: tuple[str, ...]) -> float:
    """How many times as far from the typical rank as the next the slowest is, in two thirds of the steps or more.

    nan under four ranks.
    """
    excess = np.maximum(frame.excess(*kind)[lossy], 0.0)
    if excess.shape[1] < 4 or not len(excess):
        return float("nan")
    highest = np.partition(excess, -2, axis=1)[:, -2:]
    floor = np.maximum(0.002 * frame.step_ns[lossy], 1.0)
    return float(np.quantile(highest[:, 1] / np.maximum(highest[:, 0], floor), 0.35))


def _inflation(frame: Frame, lossy: Bool, slowest: Int, *kinds: str) -> float:
    """own / ideal - 1 of the slowest rank, the median over steps; 0 where it has none of these kinds."""
    steps = np.arange(int(lossy.sum()))
    chosen = [frame.own.kinds.index(kind) for kind in kinds if kind in frame.own.kinds]
    base = np.nan_to_num(frame.base[lossy][:, :, chosen].sum(axis=2))[steps, slowest]
    excess = frame.excess(*kinds)[lossy][steps, slowest]
    return float(np.median(np.divide(excess, base, out=np.zeros_like(base), where=base > 0)))


def _correlation(a: Float, b: Float) -> float:
    """Pearson's over the ranks of a step, the mean over steps: one odd step counts no more than another."""
    a, b = a - a.mean(axis=1, keepdims=True), b - b.mean(axis=1, keepdims=True)
    size = np.sqrt((a * a).sum(axis=1) * (b * b).sum(axis=1))
    products = (a * b).sum(axis=1)
    return float(np.divide(products, size, out=np.zeros_like(size), where=size > 0).mean())
