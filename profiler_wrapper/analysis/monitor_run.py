"""What the log of a training monitor says of a run: means, percentiles, and where it was slow or grew."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from profiler_wrapper.recording.monitor_log import PARTS, Column, MonitorLog

PERCENTILES = (5, 50, 95, 99)

_RATES = ("TFLOPS_per_GPU", "TFLOPS_total", "tokens_per_sec", "samples_per_sec", "mfu", "hfu")
_WINDOWS = 50  # that a run is cut into at least, to look for change
_LEAST_WINDOW, _LONGEST_WINDOW = 3, 200  # steps, of those that are slow together
_SLOW = 1.2  # of the median: a stretch that takes so much longer is worth a word
_GROWTH = 0.02  # of the memory at the begin: less is not worth a word
_NET = 0.5  # of all its ups and downs, that the growth must be
_IN_EACH_HALF = 0.25  # of the growth: what is allocated once at the begin is no growth


@dataclass(frozen=True, slots=True)
class Spread:
    """One number over the steps or rows of a run.

    Attributes:
        mean: of a rate the sum of work over the sum of time; else that of the values.
        percentiles: by PERCENTILES.
        count: of how many steps or rows.
    """

    count: int
    mean: float
    least: float
    most: float
    percentiles: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Stretch:
    """`slow` of the `timed` steps or rows from `first` to `last`, both among them, took `factor` times the median.

    Attributes:
        first_row, last_row: their places in the log.
    """

    first: int
    last: int
    factor: float
    slow: int
    timed: int
    first_row: int
    last_row: int


@dataclass(frozen=True, slots=True)
class PartTime:
    """Of one part of a step: its mean, and its share of the time of the steps whose parts are known."""

    mean_ms: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorRun:
    """The numbers of a run.

    Attributes:
        spreads: by the names of columns; those of which nothing is known are left out.
        breakdown: by PARTS, of steps that were not profiled; empty where it was not measured.
        slow: stretches of slow steps, the longest first.
        memory_growth_gb: from begin to end, where it grew throughout; else None.
        profiled: steps under the profiler, which are in no number of time.
        odd_losses: numbers of the steps whose loss was NaN or infinite.
        slowest_step: its number; None: no time is known.
    """

    log: MonitorLog
    first_step: int
    last_step: int
    spreads: Mapping[str, Spread]
    breakdown: Mapping[str, PartTime]
    slow: tuple[Stretch, ...]
    memory_growth_gb: float | None
    profiled: int
    odd_losses: tuple[int, ...]
    slowest_step: int | None

    def to_dict(self) -> dict[str, Any]:
        """For JSON. Times are in ms, memory in GB of 2^30 bytes."""
        return {
            "path": str(self.log.path),
            "kind": self.log.kind,
            "session": dict(self.log.session),
            "first_iteration": self.first_step,
            "last_iteration": self.last_step,
            "entries": len(self.log),
            "profiled_iterations": self.profiled,
            "statistics": {
                name: {
                    "count": spread.count,
                    "mean": spread.mean,
                    "min": spread.least,
                    "max": spread.most,
                    **{f"p{percent}": value for percent, value in spread.percentiles.items()},
                }
                for name, spread in self.spreads.items()
            },
            "breakdown": {
                name: {"mean_ms": part.mean_ms, "share": part.share} for name, part in self.breakdown.items()
            },
            "slow": [
                {"first": one.first, "last": one.last, "factor": one.factor, "slow": one.slow, "timed": one.timed}
                for one in self.slow
            ],
            "memory_growth_gb": self.memory_growth_gb,
            "steps_with_odd_loss": list(self.odd_losses),
            "warnings": list(self.log.warnings),
        }


def monitor_run(log: MonitorLog) -> MonitorRun:
    """The numbers of a log."""
    columns = log.columns
    undisturbed = columns["profiled"] == 0
    times = np.where(undisturbed & (columns["step_time_ms"] > 0), columns["step_time_ms"], np.nan)
    counts = np.nan_to_num(columns["steps"], nan=1.0)
    weights = times * counts
    spreads: dict[str, Spread | None] = {"step_time_ms": _spread(times, counts)}
    for name in _RATES:
        spreads[name] = _spread(np.where(undisturbed, columns[name], np.nan), weights)
    for name in ("memory_GB", "peak_memory_GB", "loss", "grad_norm"):
        spreads[name] = _spread(columns[name], None)
    steps = columns["iteration"]
    return MonitorRun(
        log=log,
        first_step=int(steps[0]),
        last_step=int(steps[-1]),
        spreads={name: spread for name, spread in spreads.items() if spread is not None},
        breakdown=_breakdown(columns, undisturbed, counts),
        slow=_slow_stretches(steps, times),
        memory_growth_gb=_growth(columns["memory_GB"]),
        profiled=int((~undisturbed).sum()),
        odd_losses=tuple(int(step) for step in steps[columns["odd_loss"] == 1]),
        slowest_step=int(steps[np.nanargmax(times)]) if np.isfinite(times).any() else None,
    )


def _spread(values: Column, weights: Column | None) -> Spread | None:
    """Of what is known; None: nothing is."""
    known = np.isfinite(values)
    if not known.any():
        return None
    finite = values[known]
    shares = np.ones_like(finite) if weights is None else np.nan_to_num(weights[known], nan=0.0)
    if not shares.sum():
        shares = np.ones_like(finite)
    return Spread(
        count=len(finite),
        mean=float((finite * shares).sum() / shares.sum()),
        least=float(finite.min()),
        most=float(finite.max()),
        percentiles={percent: float(np.percentile(finite, percent, method="inverted_cdf")) for percent in PERCENTILES},
    )


def _breakdown(
    columns: Mapping[str, Column], undisturbed: npt.NDArray[np.bool_], counts: Column
) -> dict[str, PartTime]:
    """Rows weigh as many steps as they have."""
    parts = {name: columns[name] for name in PARTS}
    known = undisturbed & np.logical_or.reduce([np.isfinite(values) for values in parts.values()])
    sums = {name: float((np.nan_to_num(values) * counts)[known].sum()) for name, values in parts.items()}
    whole = sum(sums.values())
    if not whole:
        return {}
    return {name: PartTime(total / float(counts[known].sum()), total / whole) for name, total in sums.items()}


def _slow_stretches(steps: Column, times: Column) -> tuple[Stretch, ...]:
    """Where one window after another is slow: from the first slow step to the last, cut where times are not known."""
    windows = _windows(len(times), number=max(_WINDOWS, len(times) // _LONGEST_WINDOW))
    medians = _medians(times, windows)
    usual = float(np.nanmedian(times)) if np.isfinite(times).any() else np.nan
    slow = medians > _SLOW * usual
    found: list[Stretch] = []
    for first, end in _runs(slow):
        found += _stretches(steps, times, usual, windows[first], windows[end])
    return tuple(sorted(found, key=lambda stretch: stretch.first - stretch.last))


def _stretches(steps: Column, times: Column, usual: float, first: int, end: int) -> list[Stretch]:
    """In rows `first` to `end`, and in what is slow on both sides of them."""
    slow = times > _SLOW * usual
    while first > 0 and slow[first - 1]:
        first -= 1
    while end < len(slow) and slow[end]:
        end += 1
    found = []
    for begin, stop in _runs(np.isfinite(times[first:end])):
        places = first + begin + np.flatnonzero(slow[first + begin : first + stop])
        if len(places) < _LEAST_WINDOW or 2 * len(places) <= places[-1] - places[0]:
            continue
        found.append(
            Stretch(
                first=int(steps[places[0]]),
                last=int(steps[places[-1]]),
                factor=float(np.median(times[places])) / usual,
                slow=len(places),
                timed=int(places[-1] - places[0]) + 1,
                first_row=int(places[0]),
                last_row=int(places[-1]),
            )
        )
    return found


def _growth(memory: Column) -> float | None:
    medians = _medians(memory, _windows(len(memory), number=_WINDOWS))
    medians = medians[np.isfinite(medians)]
    if len(medians) < _LEAST_WINDOW + 2:
        return None
    growth, middle = float(medians[-1] - medians[0]), medians[len(medians) // 2]
    in_halves = min(middle - medians[0], medians[-1] - middle)
    throughout = growth > _NET * np.abs(np.diff(medians)).sum() and in_halves >= _IN_EACH_HALF * growth
    return growth if throughout and growth > _GROWTH * medians[0] else None


def _windows(length: int, *, number: int) -> list[int]:
    """The bounds of windows of like size."""
    number = max(1, min(number, length // _LEAST_WINDOW))
    return [length * i // number for i in range(number + 1)]


def _medians(values: Column, windows: list[int]) -> Column:
    parts = (values[first:end] for first, end in pairwise(windows))
    return np.array([np.nanmedian(part) if np.isfinite(part).any() else np.nan for part in parts])


def _runs(flags: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """`[F, T, T, F]` -> `[(1, 3)]`."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
    return [(int(first), int(end)) for first, end in zip(edges[::2], edges[1::2], strict=True)]
