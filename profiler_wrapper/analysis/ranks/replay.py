"""What the job would take if some of its operations were as quick as their like.

"Understanding Stragglers in Large Model Training Using What-if Analysis" (OSDI 2025): the dependencies of a step are
replayed with each operation's own time, then with some of these times replaced by the typical one of their kind.
S = T / T_ideal (its equation 1); of a kind of operation, with only this kind as slow as it was (2); of a worker, with
only its operations (4); M_W is the share of T - T_ideal that goes away with the slowest 3 % of workers typical (5), M_S
the same with the last stage typical (section 5.2).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from profiler_wrapper.analysis.ranks.model import Missing, Replay
from profiler_wrapper.analysis.ranks.replay_cells import (
    Align,
    Cells,
    Int,
    read_cells,
)
from profiler_wrapper.analysis.ranks.replay_graph import build_graph
from profiler_wrapper.analysis.ranks.replay_lengths import (
    CLOCK_ERROR_NS,
    StepClass,
    fill_unknown,
    own_lengths,
    typical_lengths,
)
from profiler_wrapper.analysis.ranks.replay_order import Operation, classes_of_steps, stage_order
from profiler_wrapper.analysis.ranks.replay_places import NotReplayable
from profiler_wrapper.analysis.ranks.replay_roles import Role, role_of
from profiler_wrapper.analysis.ranks.replay_scenarios import Scenarios, families, shares_of_ranks, slowest_ranks

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

MOST_ROWS: Final = 2_000_000  # operations replayed; beyond it steps are left out evenly
MOST_ROWS_OF_ONE_STAGE: Final = 400_000
MOST_CLASSES: Final = 24  # of steps with different numbers of microbatches
LEAST_LOST: Final = 1e-6  # of T, below which there is nothing to share out
MOST_WAITING: Final = 0.05  # of forwards and backwards
LONGEST: Final = 1.2  # times the recorded time: what takes longer when replayed runs by other dependencies
GAPS: Final = 0.1  # of the recorded time, from which on they are told


def replay(connection: DuckDBPyConnection, *, align: Align | None = None) -> Replay | None:
    """The replay of a job, or None where its dependencies are not known; `what_if` says why."""
    found = what_if(connection, align=align)
    return found if isinstance(found, Replay) else None


def what_if(
    connection: DuckDBPyConnection, *, align: Align | None = None, most_rows: int = MOST_ROWS
) -> Replay | Missing:
    """The replay of the job in the tables `spans` and `ranks`, or why there is none.

    `align` gives times by a common clock; without it the ranks' clocks are taken as they are.
    """
    try:
        cells = read_cells(
            connection,
            most_rows=most_rows,
            most_rows_of_one_stage=min(most_rows, MOST_ROWS_OF_ONE_STAGE),
            align=align,
        )
        roles = [role_of(name, kind) for name, kind in cells.names]
        _check(cells, roles)
        classes = classes_of_steps(cells, roles)
        replayed = [_class(cells, roles, steps) for steps in classes[:MOST_CLASSES]]
        typical = typical_lengths(replayed)
        scenarios = Scenarios(cells, tuple(replayed), typical)
        for each in replayed:
            fill_unknown(each, scenarios.typical_of(each))
        notes = _notes(cells, classes, replayed)
        notes += _gaps(scenarios.recorded(), sum(float(each.recorded_ns.sum()) for each in replayed))
        return _answers(scenarios, notes)
    except NotReplayable as reason:
        return Missing(what="replay", reason=str(reason))


def _check(cells: Cells, roles: list[Role]) -> None:
    if cells.waiting_share > MOST_WAITING:
        raise NotReplayable(
            f"{cells.waiting_share:.0%} of forwards and backwards is communication within them, which has no place"
        )
    if cells.grid.size == 1:
        raise NotReplayable("one rank alone waits for no other")
    if not any(role.what == "compute" for role in roles):
        raise NotReplayable("no forward or backward is in the table")
    if len(cells.stages) > 1:
        whole = [cells.names[index] for index, role in enumerate(roles) if role.what == "compute"]
        if {kind for _, kind in whole} != {"forward", "backward"}:
            raise NotReplayable("a pipeline's forwards and backwards are not both in the table")
    elif not any(role.what == "collective" for role in roles):
        raise NotReplayable("no collective is in the table: what ranks wait for is not known")


def _class(cells: Cells, roles: list[Role], steps: Int) -> StepClass:
    orders = [stage_order(cells, roles, stage, steps) for stage in range(len(cells.stages))]
    return own_lengths(cells, build_graph(orders, cells.coordinates, partial(_groups, cells, steps)), steps)


def _groups(cells: Cells, steps: Int, operation: Operation) -> Int | None:
    """The group of each pipeline's rank (P,) as the table tells; None where it does not, or where they cannot be so."""
    ranks = cells.grid[operation.stage]
    told = np.where(ranks >= 0, cells.group[operation.slot][ranks], -1).astype(np.int64)
    if (told < 0).all():
        return None
    for group in np.unique(told[told >= 0]):
        members = np.flatnonzero(cells.group[operation.slot] == group)
        starts = cells.start_ns[operation.slot][members][:, steps]
        ends = starts + cells.length_ns[operation.slot][members][:, steps]
        late = np.fmax.reduce(starts) - np.fmin.reduce(ends)  # of one collective nobody begins when others are done
        if len(members) > 1 and (late > CLOCK_ERROR_NS).mean() > 0.5:
            return None
    unknown = -2 - operation.stage * len(ranks) - np.arange(len(ranks))
    return np.where(told >= 0, told, unknown)


def _answers(scenarios: Scenarios, notes: list[str]) -> Replay:
    cells = scenarios.cells
    recorded = sum(float(each.recorded_ns.sum()) for each in scenarios.classes)
    total, ideal = scenarios.recorded(), scenarios.ideal()
    if not ideal > 0:
        raise NotReplayable("its operations take no time")
    lost = total - ideal if total - ideal > LEAST_LOST * total else float("nan")
    kinds = sorted({family for each in scenarios.classes for family in families(each).tolist()})
    stages = range(len(cells.stages))

    def shares(without: Callable[[int], float], count: int) -> np.ndarray:
        return np.array([(total - without(index)) / lost for index in range(count)])

    share_of_stage = shares(lambda stage: scenarios.of_stage(stage, kept=False), len(stages))
    slowdown_of_stage = np.array([scenarios.of_stage(stage, kept=True) for stage in stages]) / ideal
    slowest = slowest_ranks(cells, scenarios.with_one_pipeline() / ideal, slowdown_of_stage)
    slowdown_of_rank = np.full(len(cells.ranks), np.nan)
    for stage, members in zip(stages, cells.grid, strict=True):
        slowdown_of_rank[members[members >= 0]] = (scenarios.with_one_pipeline(stage) / ideal)[members >= 0]
    share_of_rank, asked = shares_of_ranks(scenarios, slowdown_of_rank, total, lost)
    if asked < len(cells.ranks):
        notes.append(f"shares of the lost time are of the {asked} slowest ranks of {len(cells.ranks)}")
    return Replay(
        recorded_ns=recorded,
        total_ns=total,
        ideal_ns=ideal,
        slowdown=total / ideal,
        ms=float(share_of_stage[-1]),
        mw=(total - scenarios.without(slowest)) / lost,
        slowest_ranks=tuple(cells.ranks[slowest].tolist()),
        ranks=cells.ranks,
        stages=cells.stages,
        kinds=tuple(kinds),
        share_of_rank=share_of_rank,
        share_of_stage=share_of_stage,
        share_of_kind=shares(lambda index: scenarios.of_family(kinds[index], kept=False), len(kinds)),
        slowdown_of_rank=slowdown_of_rank,
        slowdown_of_stage=slowdown_of_stage,
        slowdown_of_kind=np.array([scenarios.of_family(kind, kept=True) for kind in kinds]) / ideal,
        steps=sum(len(each.steps) for each in scenarios.classes),
        notes=tuple(notes),
    )


def _gaps(replayed: float, recorded: float) -> list[str]:
    """What lies between operations and is not replayed.

    Raises:
        NotReplayable: the replay takes much longer than the job did.
    """
    if replayed > LONGEST * recorded:
        raise NotReplayable(
            f"replayed, the job takes {replayed / recorded:.2f} times as long as recorded: it waits for something else"
        )
    if replayed < (1 - GAPS) * recorded:
        return [f"{1 - replayed / recorded:.0%} of the recorded time lies between operations and is not replayed"]
    return []


def _notes(cells: Cells, classes: list[Int], replayed: list[StepClass]) -> list[str]:
    notes = []
    lost = sum(each.lost for each in replayed)
    if len(cells.steps) < cells.all_steps:
        notes.append(f"{len(cells.steps)} of {cells.all_steps} steps were replayed, evenly spread")
    if len(replayed) < len(classes):
        left = sum(len(steps) for steps in classes[len(replayed) :])
        notes.append(f"{left} steps with rare numbers of microbatches were left out")
    if lost:
        notes.append(f"{lost} operations that are not in the table were taken as typical")
    if len(cells.stages) == 1:
        notes.append("with one stage, its share is all by definition")
    return notes
