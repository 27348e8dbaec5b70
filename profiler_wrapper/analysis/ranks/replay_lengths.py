"""How long each operation takes by itself, without waiting for others, in every step and on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from profiler_wrapper.analysis.ranks.replay_cells import Cells, Float, Int
from profiler_wrapper.analysis.ranks.replay_graph import Graph
from profiler_wrapper.analysis.ranks.replay_places import NotReplayable
from profiler_wrapper.analysis.ranks.replay_simulate import Length, step_times

Bool = npt.NDArray[np.bool_]
Float32 = npt.NDArray[np.float32]
CLOCK_ERROR_NS: Final = 10e6  # a transfer that ends this long before the other end began was wrongly recorded: 0
MOST_WRONG: Final = 0.4  # of transfers and collectives recorded so, beyond which the clocks or the groups are wrong
MOST_LOST: Final = 0.2  # of the operations, beyond which a replay says little


@dataclass(frozen=True, slots=True, eq=False)
class StepClass:
    """Steps of one graph, with what each operation took. Axes: N operations, P pipelines, S steps."""

    graph: Graph
    steps: Int  # (S,) index
    own_ns: Float32  # (N, P, S) of a transfer or collective: from when the last one was there
    recorded_ns: Float  # (S,) from first start to last end
    unknown: Bool | None  # (N, P, S) not in the table, or its other end is not; None: all is known
    lost: int  # operations that are not in the table, though others of the pipeline are
    absent: Bool | None  # (N, P, S) the pipeline had no such operation in the step: takes no time; None: all had

    def times(self, typical_ns: Float, as_recorded: Bool) -> Float:
        """Time of each step (S,) where the chosen operations (N, P) take what they took, the others what is typical."""

        def lengths(first: int, end: int) -> list[Length]:
            part = slice(first, end)
            return [self._length(number, part, typical_ns, as_recorded[number]) for number in range(len(typical_ns))]

        return step_times(self.graph, lengths, self.own_ns.shape[1], len(self.steps))

    def _length(self, number: int, part: slice, typical_ns: Float, as_recorded: Bool) -> Length:
        if as_recorded.all():
            return self.own_ns[number, :, part]
        found: Length = typical_ns[number]
        if as_recorded.any():
            found = np.where(as_recorded[:, None], self.own_ns[number, :, part], typical_ns[number])
        if self.absent is not None and self.absent[number, :, part].any():
            found = np.where(self.absent[number, :, part], 0.0, found)
        return found

    def times_with_one(self, typical_ns: Float, operations: Bool) -> Float:
        """As `times`, where one pipeline's chosen operations (N,) take what they took: (P, S), for each pipeline.

        All other pipelines are alike then, so one stands for them, and all P answers come at once.
        """
        pipelines, steps = self.own_ns.shape[1:]
        own = self.own_ns.reshape(len(typical_ns), -1)
        none = None if self.absent is None else self.absent.reshape(len(typical_ns), -1)

        def lengths(first: int, end: int) -> list[Length]:
            found: list[Length] = []
            for number, typical in enumerate(typical_ns.tolist()):
                gone = none is not None and none[number, first:end].any()
                if not operations[number] and not gone:
                    found.append(typical)
                    continue
                both = np.full((2, end - first), typical)
                if operations[number]:
                    both[0] = own[number, first:end]
                if none is not None:
                    both[0][none[number, first:end]] = 0.0
                found.append(both)
            return found

        count = pipelines * steps
        return step_times(self.graph, lengths, 2, count, pairs=True).reshape(pipelines, steps)


def own_lengths(cells: Cells, graph: Graph, steps: Int) -> StepClass:
    """What each operation took in the steps given; nan in `own_ns` where it is not in the table.

    Raises:
        NotReplayable: operations that belong together did not run together.
    """
    shape = (len(graph.operations), cells.grid.shape[1], len(steps))
    own = np.full(shape, np.nan, dtype=np.float32)
    wrong = moves = 0
    first, last = np.full(len(steps), np.inf), np.full(len(steps), -np.inf)
    for meeting in graph.meetings:
        found = [_recorded(cells, graph, number, steps) for number in meeting.members]
        for starts, lengths in found:
            first = np.fmin(first, np.fmin.reduce(starts, axis=0))
            last = np.fmax(last, np.fmax.reduce(starts + lengths, axis=0))
        if meeting.how == "alone" or not graph.operations[meeting.members[0]].role.meets:
            for number, (_, lengths) in zip(meeting.members, found, strict=True):
                own[number] = lengths
            continue
        begun = meeting.last(np.stack([np.where(np.isnan(starts), -np.inf, starts) for starts, _ in found]))
        for place, (number, (starts, lengths)) in enumerate(zip(meeting.members, found, strict=True)):
            alone = starts + lengths - begun[place if len(begun) > 1 else 0]
            before = alone <= -CLOCK_ERROR_NS
            alone[before] = 0.0
            wrong, moves = wrong + int(before.sum()), moves + before.size
            own[number] = alone
    if wrong > MOST_WRONG * moves:
        raise NotReplayable(
            f"{wrong / moves:.0%} of transfers and collectives end before others begin them: "
            "clocks differ, or their groups are others"
        )
    there = ~np.isnan(own)
    for meeting in graph.meetings:  # where the other end is lost, how long this one waited for it is not known
        if meeting.how == "operations" and graph.operations[meeting.members[0]].role.what == "transfer":
            own[list(meeting.members)] += np.where(there[list(meeting.members)].all(axis=0), 0, np.nan)
    if there.all():
        return StepClass(graph, steps, own, last - first, None, 0, None)
    absent = _absent(graph, there)
    return StepClass(graph, steps, own, last - first, np.isnan(own) & ~absent, int((~there & ~absent).sum()), absent)


def _recorded(cells: Cells, graph: Graph, number: int, steps: Int) -> tuple[Float, Float]:
    """Starts and durations of one operation, (P, S); nan where it is not in the table."""
    operation = graph.operations[number]
    ranks = cells.grid[operation.stage]
    starts = cells.start_ns[operation.slot][ranks][:, steps]
    lengths = cells.length_ns[operation.slot][ranks][:, steps].astype(np.float64)
    if (ranks < 0).any():
        starts[ranks < 0] = lengths[ranks < 0] = np.nan
    return starts, lengths


def _absent(graph: Graph, there: Bool) -> Bool:
    """Operations that a pipeline did not have in a step, as far as can be told from those it had."""
    ordinary = there.mean(axis=(1, 2)) >= 0.5
    absent = ~there & ~ordinary[:, None, None]  # pauses come and go
    slots: dict[int, list[int]] = {}
    for number, operation in enumerate(graph.operations):
        slots.setdefault(operation.slot, []).append(number)
    for alike in slots.values():
        absent[alike] |= ~there[alike].any(axis=0)  # no stage of the pipeline has it
    return np.asarray(absent)


def typical_lengths(classes: Sequence[StepClass]) -> dict[int, float]:
    """The typical time of each name: the mean of what computes, the median of what moves data, over all there is."""
    found: dict[int, list[Float32]] = {}
    meets = {}
    for each in classes:
        for number, operation in enumerate(each.graph.operations):
            values = each.own_ns[number]
            found.setdefault(operation.name, []).append(values[~np.isnan(values)])
            meets[operation.name] = operation.role.meets
    typical = {}
    for name, parts in found.items():
        values = np.concatenate(parts).astype(np.float64)
        if len(values):
            typical[name] = float(np.median(values) if meets[name] else values.mean())
    return typical


def fill_unknown(each: StepClass, typical_ns: Float) -> None:
    """Give operations of which nothing is known their typical time.

    Raises:
        NotReplayable: so many that the replay would be made up.
    """
    if each.lost > MOST_LOST * each.own_ns.size:
        raise NotReplayable(f"{each.lost / each.own_ns.size:.0%} of the operations of a step are not in the table")
    if each.unknown is not None:
        np.copyto(each.own_ns, typical_ns[:, None, None].astype(np.float32), where=each.unknown)
    np.copyto(each.own_ns, np.float32(0), where=np.isnan(each.own_ns))
