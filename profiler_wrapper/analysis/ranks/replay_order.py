"""The order in which the ranks of a stage do their operations, read from what they did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from profiler_wrapper.analysis.ranks.replay_cells import Cells, Float, Int
from profiler_wrapper.analysis.ranks.replay_roles import Role
from profiler_wrapper.analysis.statistics import median

CELLS_READ: Final = 40  # of a stage: the order of a schedule is the same in all of them
CELLS_OF_RARE: Final = 3  # more, for an operation that these do not have


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation of a stage, the same on all its ranks and in all steps of a class."""

    stage: int  # index
    slot: int
    name: int  # index
    role: Role
    microbatch: int  # -1: not known
    chunk: int  # -1: not known


@dataclass(frozen=True, slots=True, eq=False)
class StageOrder:
    """Operations of a stage by their starts. `starts` and `ends`: (cells, operations), nan where a cell has none."""

    operations: tuple[Operation, ...]
    starts: Float
    ends: Float

    def begins_after(self, one: int, other: int) -> float:
        """Typical time from the start of another operation to this one's start, in ns."""
        return float(median(self.starts[:, one] - self.starts[:, other]))

    def ends_after(self, one: int, other: int) -> float:
        """Typical time from the end of another operation to this one's end, in ns."""
        return float(median(self.ends[:, one] - self.ends[:, other]))

    def begins_after_end(self, one: int, other: int) -> float:
        """Typical time from the end of another operation to this one's start, in ns."""
        return float(median(self.starts[:, one] - self.ends[:, other]))


def classes_of_steps(cells: Cells, roles: list[Role]) -> list[Int]:
    """Indices of steps with as many forwards and backwards on each stage as one another, the largest class first."""
    computes = [np.flatnonzero(cells.slot_name == name) for name, role in enumerate(roles) if role.what == "compute"]
    columns = []
    for members in cells.grid:
        known = members[members >= 0]
        columns += [(~np.isnan(cells.length_ns[slots][:, known])).sum(axis=0).max(axis=0) for slots in computes]
    if not columns:
        return [np.arange(len(cells.steps))]
    _, of_step = np.unique(np.stack(columns), axis=1, return_inverse=True)
    of_step = of_step.reshape(-1)
    sizes = np.bincount(of_step)
    return [np.flatnonzero(of_step == label) for label in np.argsort(-sizes, kind="stable")]


def stage_order(cells: Cells, roles: list[Role], stage: int, steps: Int) -> StageOrder:
    """Operations of one stage in the steps given, in the order in which most ranks begin them."""
    members = cells.grid[stage]
    members = members[members >= 0]
    there = np.stack([~np.isnan(plane[np.ix_(members, steps)]).reshape(-1) for plane in cells.length_ns])  # (K, cells)
    slots = np.flatnonzero(there.any(axis=1))
    there = there[slots]
    chosen = _chosen(there)
    rank, step = members[chosen // len(steps)], steps[chosen % len(steps)]
    starts = cells.start_ns[slots[:, None], rank, step].T
    ends = starts + cells.length_ns[slots[:, None], rank, step].T
    regular = there.mean(axis=1) >= 0.5
    before = np.array([_places(row, row[regular]) for row in starts])
    order = np.lexsort((np.arange(len(slots)), median(starts), median(before)))
    microbatch, chunk = (each[slots[:, None], rank, step].T for each in (cells.microbatch, cells.chunk))
    operations = tuple(
        Operation(
            stage=stage,
            slot=int(slots[index]),
            name=int(cells.slot_name[slots[index]]),
            role=roles[cells.slot_name[slots[index]]],
            microbatch=_usual(microbatch[~np.isnan(starts[:, index]), index]),
            chunk=_usual(chunk[~np.isnan(starts[:, index]), index]),
        )
        for index in order
    )
    return StageOrder(operations, starts[:, order], ends[:, order])


def _chosen(there: npt.NDArray[np.bool_]) -> Int:
    """Cells that have most, evenly spread, and some for each operation that only others have."""
    counts = there.sum(axis=0)
    full = np.flatnonzero(counts == counts.max())
    chosen = full[np.unique(np.linspace(0, len(full) - 1, min(CELLS_READ, len(full))).round().astype(int))]
    for slot in np.flatnonzero(~there[:, chosen].any(axis=1)):
        chosen = np.concatenate([chosen, np.flatnonzero(there[slot])[:CELLS_OF_RARE]])
    return np.unique(chosen).astype(np.int64)


def _places(starts: Float, regular: Float) -> Float:
    """How many of the regular operations begin before each; nan where there is none."""
    found = np.searchsorted(np.sort(regular[~np.isnan(regular)]), starts).astype(np.float64)
    found[np.isnan(starts)] = np.nan
    return found


def _usual(values: npt.NDArray[np.int16]) -> int:
    found, counts = np.unique(values, return_counts=True)
    return int(found[counts.argmax()])
