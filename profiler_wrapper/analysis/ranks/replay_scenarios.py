"""The what-if questions: the job's time with some operations as they were and the others typical."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from profiler_wrapper.analysis.ranks.replay_cells import Cells, Float, Int
from profiler_wrapper.analysis.ranks.replay_lengths import StepClass

Bool = npt.NDArray[np.bool_]
SLOWEST: Final = 0.03  # of the workers, in M_W
NUMBERS_FOR_RANKS: Final = 40e6  # replayed to answer "without this rank": each takes a replay of its own


@dataclass(frozen=True, slots=True, eq=False)
class Scenarios:
    """Times in ns, summed over all steps."""

    cells: Cells
    classes: tuple[StepClass, ...]
    typical: dict[int, float]  # by name

    def total(self, as_recorded: Callable[[StepClass], Bool]) -> float:
        """The job's time with the chosen operations (N, P) as recorded and the others typical."""
        return sum(
            float(each.times(self.typical_of(each), np.broadcast_to(as_recorded(each), each.own_ns.shape[:2])).sum())
            for each in self.classes
        )

    def recorded(self) -> float:
        """The job's time where all is as recorded."""
        return self.total(lambda each: np.array([[True]]))

    def ideal(self) -> float:
        """The job's time where all is typical."""
        return self.total(lambda each: np.array([[False]]))

    def of_stage(self, stage: int, *, kept: bool) -> float:
        """With only one stage as recorded, or with all but one."""
        return self.total(lambda each: ((each.graph.stages == stage) == kept)[:, None])

    def of_family(self, family: str, *, kept: bool) -> float:
        """With only one kind of operation as recorded, or with all but one."""
        return self.total(lambda each: (families(each) == family)[:, None] == kept)

    def without(self, ranks: Int) -> float:
        """With all but these ranks (indices) as recorded."""
        gone = np.isin(self.cells.grid, ranks)  # (G, P)
        return self.total(lambda each: ~gone[each.graph.stages])

    def with_one_pipeline(self, stage: int | None = None) -> Float:
        """With only one pipeline as recorded, or only its rank in one stage; for each pipeline (P,)."""
        pipelines = self.cells.grid.shape[1]
        if pipelines == 1:
            whole = self.recorded() if stage is None else self.of_stage(stage, kept=True)
            return np.array([whole])
        found = np.zeros(pipelines)
        for each in self.classes:
            chosen = np.ones(len(each.graph.operations), bool) if stage is None else each.graph.stages == stage
            found += each.times_with_one(self.typical_of(each), chosen).sum(axis=1)
        return found

    def typical_of(self, each: StepClass) -> Float:
        """Typical time of each operation (N,)."""
        return np.array([self.typical.get(operation.name, 0.0) for operation in each.graph.operations])


def families(each: StepClass) -> npt.NDArray[np.str_]:
    """What each operation is reported under (N,)."""
    return np.array([operation.role.family for operation in each.graph.operations])


def slowest_ranks(cells: Cells, of_pipeline: Float, of_stage: Float) -> Int:
    """Indices of the slowest 3 % of ranks, at least one: a rank is as slow as the lesser of its pipeline and stage."""
    score = np.minimum(of_pipeline[None, :], of_stage[:, None])
    known = cells.grid >= 0
    index, score = cells.grid[known], score[known]
    order = np.lexsort((cells.ranks[index], -score))
    return np.asarray(index[order[: -(-len(index) * round(100 * SLOWEST) // 100)]])


def shares_of_ranks(scenarios: Scenarios, slowdown: Float, total: float, lost: float) -> tuple[Float, int]:
    """Share of the lost time that goes away with one rank typical (R,), for the slowest; nan for the rest; how many."""
    cost = sum(each.own_ns.size for each in scenarios.classes)
    shares = np.full(len(slowdown), np.nan)
    asked = np.argsort(-slowdown, kind="stable")[: max(1, int(NUMBERS_FOR_RANKS // cost))]
    for index in asked:
        shares[index] = (total - scenarios.without(np.array([index]))) / lost
    return shares, len(asked)
