"""What reports on many ranks draw, as plain numbers: who takes longer than its like, in milliseconds per step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from profiler_wrapper.ranks.model import Float, Int, LayerTimes, RanksReport
from profiler_wrapper.ranks.times import comparable, over_ranks, typical

_MS = 1e6
_LONGER = 1.05  # times the median of a step
_WHOLE = 0.9  # of the time of all others: a layer with so much is the model itself


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerOverRanks:
    """One layer in one phase over the ranks that have it, in milliseconds per step."""

    layer: str
    kind: str
    ranks: int
    median_ms: float
    spread_ms: float  # 1.48 times the median deviation over ranks
    quickest_ms: float
    slowest_ms: float
    slowest_rank: int | None  # None: all take equally long
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
    named: tuple[tuple[int, int], ...] = ()  # (row, column) of the ranks that the verdict names


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
    own = report.told
    times = own.own_ns
    groups = comparable(own)
    if report.verdict.verdict == "stage" or all(len(group) < 2 for group in groups):
        groups = [np.arange(len(own.ranks))]
    beyond = np.full(times.shape, np.nan)
    for group in groups:
        beyond[:, group] = times[:, group] - typical(times[:, group], axis=1)[:, None]
    return mean_over_steps(beyond) / _MS


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
            middle, spread, outliers = over_ranks(values, ranks)
            slowest = int(values.argmax())
            rows.append(
                LayerOverRanks(
                    layer=layer,
                    kind=kind,
                    ranks=int(known.sum()),
                    median_ms=middle,
                    spread_ms=spread,
                    quickest_ms=float(values.min()),
                    slowest_ms=float(values[slowest]),
                    slowest_rank=None if len(values) > 1 and values.min() == values[slowest] else int(ranks[slowest]),
                    outliers=outliers,
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
    work = mean_over_steps(report.told.own_ns.sum(axis=2)) / _MS
    sums, counts = np.zeros((len(rows), len(columns))), np.zeros((len(rows), len(columns)))
    known = np.isfinite(work)
    at = (np.searchsorted(rows, rows_of)[known], np.searchsorted(columns, columns_of)[known])
    np.add.at(sums, at, work[known])
    np.add.at(counts, at, 1)
    grid = np.divide(sums, counts, out=np.full(sums.shape, np.nan), where=counts > 0)
    named = np.isin(own.ranks, sorted(culprits(report)))
    cells = zip(np.searchsorted(rows, rows_of)[named], np.searchsorted(columns, columns_of)[named], strict=True)
    marked = tuple(sorted({(int(row), int(column)) for row, column in cells}))
    return Mesh(across=across, down=down, columns=columns, rows=rows, own_ms=grid, named=marked)


def _places_within(stages: Int) -> Int:
    """The how-many-eth of its stage each rank is."""
    places = np.zeros(len(stages), dtype=np.int64)
    for stage in np.unique(stages).tolist():
        places[stages == stage] = np.arange(int((stages == stage).sum()))
    return places


def column_firsts(count: int, most: int) -> Int:
    """The first of so many rows that each of at most `most` columns holds."""
    return np.arange(0, count, max(1, -(-count // most)))


def binned(values: Float, most: int) -> tuple[Int, Float]:
    """Rows put together to at most `most`: (first row of each, the value in it that is farthest from 0).

    So one that stands out of thousands still shows.
    """
    count = len(values)
    firsts = column_firsts(count, most)
    if count <= most:
        return firsts, values
    each = int(firsts[1])
    sizes = np.where(np.isfinite(values), np.abs(values), -1.0)
    found = np.full((len(firsts), values.shape[1]), np.nan)
    for row, first in enumerate(firsts.tolist()):
        part = values[first : first + each]
        farthest = sizes[first : first + each].argmax(axis=0)
        found[row] = part[farthest, np.arange(values.shape[1])]
    return firsts, found


def chosen_ranks(report: RanksReport, most: int, *, also: Iterable[int] = ()) -> list[int]:
    """Ranks to be drawn one by one: all, or those named or suspected, `also`, one of each stage, others evenly spread.

    A rank that is named has the two beside it in its stage with it, to be compared with.
    """
    own = report.own
    ranks: list[int] = own.ranks.tolist()
    if len(ranks) <= most:
        return ranks
    named = sorted(culprits(report))[: most // 2]
    stage_of = dict(zip(ranks, own.stages.tolist(), strict=True))
    beside = [
        one
        for rank in named[:4]
        for one in (rank - 1, rank + 1)
        if rank in stage_of and stage_of.get(one) == stage_of[rank]
    ]
    suspected = [one.rank for one in report.verdict.suspects[:4] if one.rank is not None]
    of_stages = [int(own.ranks[own.stages == stage][0]) for stage in np.unique(own.stages).tolist()]
    wanted = _first_of([one for one in (*named, *suspected, *also, *beside, *of_stages) if one in stage_of], most)
    rest = [rank for rank in ranks if rank not in set(wanted)]
    spread = np.linspace(0, len(rest) - 1, most - len(wanted)).round().astype(int)
    return sorted([*wanted, *(rest[at] for at in spread.tolist())])


def holders(report: RanksReport, steps: Sequence[int]) -> dict[int, int]:
    """The rank with the most time of its own in each step, where no rank is to blame: another one each time.

    Steps in which it has about as much as the others are left out.
    """
    own, verdict = report.own, report.verdict
    if verdict.verdict not in ("imbalance", "gc", "data") or culprits(report):
        return {}
    places = {step: place for place, step in enumerate(own.steps.tolist())}
    found = {}
    for step in steps:
        times = own.own_ns[places[step]].sum(axis=1) if step in places else np.zeros(0)
        if np.isfinite(times).any() and np.nanmax(times) > _LONGER * np.nanmedian(times):
            found[step] = int(own.ranks[np.nanargmax(times)])
    return found


def _first_of(values: Sequence[int], most: int) -> list[int]:
    return list(dict.fromkeys(values))[:most]
