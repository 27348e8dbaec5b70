"""What reports on many ranks draw, as plain numbers: who takes longer than its like, in milliseconds per step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from profiler_wrapper.analysis.ranks.groups import comparable
from profiler_wrapper.analysis.ranks.medians import median
from profiler_wrapper.analysis.ranks.model import Float, Int, LayerTimes, RanksReport

_MS = 1e6
_WHOLE = 0.9  # of the time of all others: a layer with so much is the model itself
_OUTLIER_SPREADS = 4.0  # median deviations, as standard deviations, beyond the median
_OUTLIER_SHARE = 0.1  # and at least this much longer than the median


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerOverRanks:
    """One layer in one phase over the ranks that have it, in milliseconds per step."""

    layer: str
    kind: str
    ranks: int
    median_ms: float
    spread_ms: float  # 1.48 times the median deviation over ranks
    slowest_ms: float
    slowest_rank: int
    outliers: tuple[int, ...]  # ranks far beyond the others, the slowest first

    @property
    def beyond_ms(self) -> float:
        """What the slowest rank takes longer than the median."""
        return self.slowest_ms - self.median_ms


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mesh:
    """Work of a step over two coordinates of ranks; the rest of the coordinates are averaged."""

    across: str  # name of the columns' coordinate
    down: str
    columns: Int
    rows: Int
    own_ms: Float  # (rows, columns); nan: no such rank


def judged(report: RanksReport) -> slice:
    """The steps that the verdict is about: without those that it left out as warm-up."""
    count = len(report.own.steps)
    return slice(count - report.verdict.steps if 0 < report.verdict.steps < count else 0, count)


def culprits(report: RanksReport) -> frozenset[int]:
    """The ranks that the verdict names: one, or those of a stage."""
    verdict, own = report.verdict, report.own
    if verdict.verdict == "none":
        return frozenset()
    if verdict.rank is not None:
        return frozenset({verdict.rank})
    if verdict.stage is not None and verdict.verdict == "stage":
        return frozenset(own.ranks[own.stages == verdict.stage].tolist())
    return frozenset()


def beyond_typical(report: RanksReport) -> Float:
    """What each rank takes longer than its like, (R, K) in ms per step: the mean over steps; nan: not known.

    Its like are the ranks of its stage; where one rank is all of it, or the verdict names a stage, all ranks.
    """
    own = report.own
    times = own.own_ns[judged(report)]
    groups = comparable(own)
    if report.verdict.verdict == "stage" or all(len(group) < 2 for group in groups):
        groups = [np.arange(len(own.ranks))]
    beyond = np.full(times.shape, np.nan)
    for group in groups:
        beyond[:, group] = times[:, group] - typical(times[:, group], axis=1)[:, None]
    return mean_over_steps(beyond) / _MS


def typical(values: Float, axis: int) -> Float:
    """The median; of two the quicker, as only one of them can be slow."""
    known = np.isfinite(values).sum(axis=axis)
    least = np.where(np.isfinite(values), values, np.inf).min(axis=axis, initial=np.inf)
    return np.where(known == 2, least, median(values, axis=axis))


def mean_over_steps(values: Float) -> Float:
    """The mean over the first axis of what is known; nan where nothing is."""
    known = np.isfinite(values)
    counts = known.sum(axis=0)
    sums = np.where(known, values, 0.0).sum(axis=0)
    return np.asarray(np.divide(sums, counts, out=np.full(sums.shape, np.nan), where=counts > 0))


def blocks(layers: LayerTimes) -> list[int]:
    """Places of the layers that make up the model without counting anything twice.

    Those are its numbered blocks, and of what is in none of them the layers that hold no other.
    """
    names = layers.layers
    holders = {name[:at] for name in names for at, letter in enumerate(name) if letter == "."}
    numbered = {name for name in names if _is_block(name)}
    if len(numbered) < 2:
        numbered = set()
    inside = {name for name in names if _prefixes(name) & numbered}
    found = [at for at, name in enumerate(names) if name in numbered or name not in holders | inside]
    total = np.where(np.isfinite(layers.own_ns), layers.own_ns, 0.0).sum(axis=(0, 2))
    whole = total[found].sum()
    return [at for at in found if "." in names[at] or len(found) == 1 or total[at] < _WHOLE * (whole - total[at])]


def _is_block(name: str) -> bool:
    """Whether a name ends in its first number: `model.layers.3`."""
    *before, last = name.split(".")
    return bool(before) and last.isdecimal() and not any(part.isdecimal() for part in before)


def _prefixes(name: str) -> set[str]:
    return {name[:at] for at, letter in enumerate(name) if letter == "."}


def layers_beyond(report: RanksReport) -> tuple[list[str], Float]:
    """Names of blocks and what each takes longer on a rank than on the others that have it, (R, L) in ms per step."""
    layers, ranks = report.layers, report.own.ranks
    if layers is None or not len(layers.layers):
        return [], np.zeros((len(ranks), 0))
    places = blocks(layers)
    known = np.isfinite(layers.own_ns[:, places])
    times = np.where(known.any(axis=2), np.where(known, layers.own_ns[:, places], 0.0).sum(axis=2), np.nan)
    beyond = np.full((len(ranks), len(places)), np.nan)
    at = np.searchsorted(ranks, layers.ranks)
    shared = np.isfinite(times).sum(axis=0) > 1
    if shared.any():
        beyond[np.ix_(at, np.flatnonzero(shared))] = times[:, shared] - typical(times[:, shared], axis=0)
    return [layers.layers[place] for place in places], beyond / _MS


def layers_over_ranks(report: RanksReport) -> list[LayerOverRanks]:
    """Each layer and phase over the ranks that have it; where one rank stands out most comes first."""
    layers = report.layers
    rows: list[LayerOverRanks] = []
    for at, layer in enumerate(layers.layers if layers else ()):
        assert layers is not None
        for place, kind in enumerate(layers.kinds):
            times = layers.own_ns[:, at, place] / _MS
            known = np.isfinite(times)
            if not known.any():
                continue
            values, ranks = times[known], layers.ranks[known]
            middle = float(typical(values, axis=0))
            spread = 1.4826 * float(np.median(np.abs(values - middle)))
            far = values > middle + np.maximum(_OUTLIER_SPREADS * spread, _OUTLIER_SHARE * middle)
            order = np.argsort(-values[far], kind="stable")
            slowest = int(values.argmax())
            rows.append(
                LayerOverRanks(
                    layer=layer,
                    kind=kind,
                    ranks=int(known.sum()),
                    median_ms=middle,
                    spread_ms=spread,
                    slowest_ms=float(values[slowest]),
                    slowest_rank=int(ranks[slowest]),
                    outliers=tuple(ranks[far][order].tolist()) if known.sum() > 1 else (),
                )
            )
    return sorted(rows, key=lambda row: -row.beyond_ms)


def mesh(report: RanksReport) -> Mesh | None:
    """Own work over data parallel rank and pipeline stage; None where a job has not both, nor several stages."""
    own = report.own
    stages, dp = np.unique(own.stages), report.coordinates.get("dp")
    if len(stages) < 2 and (dp is None or "tp" not in report.coordinates):
        return None
    across, columns_of = ("stage", own.stages) if len(stages) > 1 else ("tp", report.coordinates["tp"])
    down, rows_of = ("dp", dp) if dp is not None else ("rank in stage", _places_within(own.stages))
    rows, columns = np.unique(rows_of), np.unique(columns_of)
    work = mean_over_steps(own.own_ns[judged(report)].sum(axis=2)) / _MS
    sums, counts = np.zeros((len(rows), len(columns))), np.zeros((len(rows), len(columns)))
    known = np.isfinite(work)
    at = (np.searchsorted(rows, rows_of)[known], np.searchsorted(columns, columns_of)[known])
    np.add.at(sums, at, work[known])
    np.add.at(counts, at, 1)
    grid = np.divide(sums, counts, out=np.full(sums.shape, np.nan), where=counts > 0)
    return Mesh(across=across, down=down, columns=columns, rows=rows, own_ms=grid)


def _places_within(stages: Int) -> Int:
    """The how-many-eth of its stage each rank is."""
    places = np.zeros(len(stages), dtype=np.int64)
    for stage in np.unique(stages).tolist():
        places[stages == stage] = np.arange(int((stages == stage).sum()))
    return places


def binned(values: Float, most: int) -> tuple[Int, Float]:
    """Rows put together to at most `most`: (first row of each, the value in it that is farthest from 0).

    So one that stands out of thousands still shows.
    """
    count = len(values)
    if count <= most:
        return np.arange(count), values
    each = -(-count // most)
    firsts = np.arange(0, count, each)
    sizes = np.where(np.isfinite(values), np.abs(values), -1.0)
    found = np.full((len(firsts), values.shape[1]), np.nan)
    for row, first in enumerate(firsts.tolist()):
        part = values[first : first + each]
        farthest = sizes[first : first + each].argmax(axis=0)
        found[row] = part[farthest, np.arange(values.shape[1])]
    return firsts, found


def chosen_ranks(report: RanksReport, most: int) -> list[int]:
    """Ranks to be drawn one by one: all, or those named or suspected, one of each stage, and evenly spread ones."""
    own = report.own
    ranks: list[int] = own.ranks.tolist()
    if len(ranks) <= most:
        return ranks
    named = [*sorted(culprits(report))[: most // 2]]
    suspected = [one.rank for one in report.verdict.suspects[:4] if one.rank is not None]
    of_stages = [int(own.ranks[own.stages == stage][0]) for stage in np.unique(own.stages).tolist()]
    spread = [ranks[at] for at in np.linspace(0, len(ranks) - 1, most).astype(int).tolist()]
    return sorted(_first_of([*named, *suspected, *of_stages, *spread], most))


def _first_of(values: Sequence[int], most: int) -> list[int]:
    return list(dict.fromkeys(values))[:most]
