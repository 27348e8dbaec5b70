"""Whether memory grows from step to step, and whose allocations stay."""

from __future__ import annotations

import math

import numpy as np

from profiler_wrapper.analysis.memory_model import CATEGORIES, Leak, Slope
from profiler_wrapper.analysis.memory_owned import OwnedMemory
from profiler_wrapper.analysis.steps import Steps
from profiler_wrapper.recording.recording import Int64

_FEWEST_STEPS = 3  # without the first
_FEW_STEPS = 5  # with fewer, the first step counts too, and a leak has to be in every one
_MOST_RARE = 0.4  # of the steps: a leak may come in every second one
_SMALLEST_LEAK_BYTES = 1024  # a step: a list of losses is none

# Two-sided 95 % quantiles of Student's t for 1 to 10 degrees of freedom (any table of it).
_STUDENT = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)
_NORMAL = 1.959964


def student_quantile(degrees_of_freedom: int) -> float:
    """The two-sided 95 % quantile of Student's t, to 0.1 %.

    Beyond ten degrees of freedom by the expansion of Cornish and Fisher (Abramowitz and Stegun 26.7.5).
    """
    n, z = degrees_of_freedom, _NORMAL
    if n <= len(_STUDENT):
        return _STUDENT[n - 1]
    return z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)


def slope_of(owned: OwnedMemory, steps: Steps) -> Slope | None:
    """The least-squares line through what is allocated at the ends of the steps; None for fewer than two.

    Of more than three the first is left out: it makes what is kept on purpose.
    """
    ends = steps.end_ns[1:] if len(steps) > _FEWEST_STEPS else steps.end_ns
    count = len(ends)
    if count < 2:
        return None
    event = np.searchsorted(owned.memory.time_ns, ends, side="right") - 1
    start = owned.memory.allocated_at_start
    y = np.where(event >= 0, owned.timeline.total_bytes[np.maximum(event, 0)], start).astype(np.float64)
    x = np.arange(count) - (count - 1) / 2
    spread = float(x @ x)
    slope = float(x @ (y - y.mean())) / spread
    error = None
    if count > 2:
        residual = y - y.mean() - slope * x
        deviation = math.sqrt(float(residual @ residual) / (count - 2) / spread)
        error = student_quantile(count - 2) * deviation
    return Slope(bytes_per_step=slope, error_bytes_per_step=error, steps=count)


def find_leaks(owned: OwnedMemory, steps: Steps) -> tuple[tuple[Leak, Int64], ...]:
    """Allocations that stay, step after step, each with its blocks; those that take most first.

    What counts is alive when the recording ends and was made in several steps before the last, whose own may
    yet be freed. The first of five or more does not count: what is made once is kept on purpose. What the model
    or an optimizer still holds when the recording ends is none either, though it may grow (the history of L-BFGS).
    """
    first = 1 if len(steps) >= _FEW_STEPS else 0
    count = len(steps) - 1 - first
    if count < 2:
        return ()
    blocks = owned.blocks
    staying = np.flatnonzero((blocks.freed == blocks.events) & ~blocks.before & ~owned.held_at_end)
    step = steps.place_of(owned.memory.time_ns[blocks.made[staying]]) - first
    inside = (step >= 0) & (step < count)
    staying, step = staying[inside], step[inside]
    if not len(staying):
        return ()
    keys = np.column_stack(
        [owned.layer[staying], blocks.op[staying], blocks.place[staying], owned.categories.category[staying]]
    )
    _, group, sizes = np.unique(keys, axis=0, return_inverse=True, return_counts=True)
    group = group.reshape(-1)
    leaks: list[tuple[Leak, Int64]] = []
    for members in np.split(np.argsort(group, kind="stable"), np.cumsum(sizes)[:-1]):
        size = int(blocks.size_bytes[staying[members]].sum())
        if not _goes_on(np.unique(step[members]), count) or size < _SMALLEST_LEAK_BYTES * count:
            continue
        one = int(staying[members[0]])
        phase = owned.phases[int(blocks.place[one])]
        leak = Leak(
            layer=owned.layers[int(owned.layer[one])],
            op=blocks.ops[int(blocks.op[one])],
            phase=phase or "other",
            category=CATEGORIES[int(owned.categories.category[one])],
            bytes_per_step=size / count,
            count_per_step=len(members) / count,
            steps=count,
        )
        leaks.append((leak, staying[members]))
    return tuple(sorted(leaks, key=lambda found: -found[0].bytes_per_step))


def _goes_on(seen: Int64, count: int) -> bool:
    """Whether what stays of these steps, ascending and out of `count`, is one of every step or so, to the end."""
    if count < _FEW_STEPS - 2:
        return len(seen) == count
    return len(seen) >= max(2, _MOST_RARE * count) and bool(seen[-1] >= count - 2)
