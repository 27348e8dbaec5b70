"""What the job would take if some of its operations were as quick as their like.

"Understanding Stragglers in Large Model Training Using What-if Analysis" (OSDI 2025): the dependencies of a step are
replayed with each operation's self time, then with some of these times replaced by the typical one of their kind.
S = T / T_ideal (its equation 1); M_W is the share of T - T_ideal that goes away with the slowest 3 % of workers typical
(5), M_S the same with the last stage typical (section 5.2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from profiler_wrapper.ranks import operations as ops
from profiler_wrapper.ranks.database import Database
from profiler_wrapper.ranks.model import Bool, Float, Int, Replay
from profiler_wrapper.ranks.operations import (
    COORDINATES,
    SLACK_NS,
    Align,
    Cells,
    NotReplayable,
    Operation,
    Role,
    StageOrder,
    Transfers,
    match_transfers,
)

# --------------------------------------------------------------------------------------------------
# What waits for what in a step: the operations of all stages with their dependencies, sorted so that none comes early.
#
# The model of "Understanding Stragglers in Large Model Training Using What-if Analysis" (OSDI 2025), section 3: on each
# rank one stream of computing, one of sends and one of receives for each direction, one of collectives over replicas;
# what is received comes before what computes with it, what computes before what is sent; and those who take part in a
# transfer or a collective begin it together, when the last of them is there. Here orders are read from the table.


@dataclass(frozen=True, slots=True, eq=False)
class SyncPoint:
    """Operations that begin together: those of equal labels, over operations and pipelines."""

    members: tuple[int, ...]  # operations
    labels: Int  # (operations, P)
    how: str  # "alone", "operations": of each pipeline by itself, "all", "some"

    def last(self, starts: Float) -> Float:
        """When the last one is there; starts (operations, P, ...), the answer of a shape that spreads to it."""
        if self.how == "alone":
            return starts
        if self.how == "operations":
            return np.asarray(starts.max(axis=0, keepdims=True))
        if self.how == "all":
            return np.asarray(starts.max(axis=(0, 1), keepdims=True))
        flat = starts.reshape(self.labels.size, -1)
        order = np.argsort(self.labels.reshape(-1), kind="stable")
        ordered = self.labels.reshape(-1)[order]
        begins = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
        highest = np.maximum.reduceat(flat[order], begins, axis=0)
        place = np.empty(len(order), dtype=np.int64)
        place[order] = np.cumsum(np.concatenate([[False], ordered[1:] != ordered[:-1]]))
        return np.asarray(highest[place].reshape(starts.shape))


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """N operations over all stages; each sync comes after all that its operations wait for."""

    operations: tuple[Operation, ...]  # (N,)
    waits_for: tuple[tuple[int, ...], ...]  # (N,)
    syncs: tuple[SyncPoint, ...]  # sorted
    ends: tuple[int, ...]  # operations that nothing waits for
    chunks: int = 1

    @property
    def stages(self) -> Int:
        """Index of each operation's stage."""
        return np.array([each.stage for each in self.operations], dtype=np.int64)


def build_graph(orders: list[StageOrder], coordinates: Int, groups: Callable[[Operation], Int | None]) -> Graph:
    """The dependencies of one step.

    `groups` gives for a collective the label of the group that each pipeline's rank is in, or None where the table has
    no groups: then the names tell.

    Raises:
        NotReplayable: transfers do not fit the computes, or what waits for what is a circle.
    """
    first = [0, *np.cumsum([len(order.operations) for order in orders]).tolist()]
    operations = [each for order in orders for each in order.operations]
    if not operations:
        raise NotReplayable("no operation of a step is in all of its ranks")
    transfers = match_transfers(orders, first)
    waits: list[set[int]] = [set() for _ in operations]
    for stage, order in enumerate(orders):
        _within_rank(order, first[stage], transfers, waits)
    joined: dict[int, int] = {}
    for sender, receiver in transfers.crossings:
        source, target = sender.transfer, receiver.transfer
        if source is not None and target is not None:
            joined[_root(joined, source)] = _root(joined, target)
        else:  # what is not recorded takes no time
            waits[receiver.compute if target is None else target].add(sender.compute if source is None else source)
    syncs = _syncs(operations, joined, coordinates, groups)
    needed = {other for each in waits for other in each}
    return Graph(
        tuple(operations),
        tuple(tuple(sorted(each)) for each in waits),
        tuple(_sorted(syncs, waits, operations)),
        tuple(number for number in range(len(operations)) if number not in needed),
        transfers.chunks,
    )


def _within_rank(order: StageOrder, first: int, transfers: Transfers, waits: list[set[int]]) -> None:
    operations = order.operations
    computes = [index for index, each in enumerate(operations) if each.role.what == "compute"]
    beside = _beside_compute(order, computes)
    line = [
        first + index for index, each in enumerate(operations) if each.role.what != "transfer" and index not in beside
    ]
    _chain(line, waits)
    streams: dict[tuple[str, str], list[int]] = {}
    for index, each in enumerate(operations):
        for part in each.role.parts:
            streams.setdefault(part, []).append(first + index)
    for stream in streams.values():
        _chain(stream, waits)
    here = range(first, first + len(operations))
    for compute, transfer in transfers.sends:
        if transfer is not None and compute in here:
            waits[transfer].add(compute)
    before: dict[int, int] = {}  # the compute before it in its direction: a receive is posted when this is done
    for direction in ("forward", "backward"):
        # same (== -> !=): each direction has its turn
        same = [first + index for index in computes if operations[index].role.direction == direction]
        before.update(zip(same[1:], same[:-1], strict=True))
    backward = [place for place, index in enumerate(computes) if operations[index].role.direction == "backward"]
    for compute, transfer in transfers.receives:
        if transfer is not None and compute in here:
            waits[compute].add(transfer)
            if compute in before:
                waits[transfer].add(before[compute])
            elif backward and compute == first + computes[backward[0]] and backward[0] >= 2:
                waits[transfer].add(first + computes[backward[0] - 2])  # with the warm-up's last send but one
    if beside:
        _collectives_beside(order, first, sorted(beside), computes, transfers, waits)


def _chain(numbers: list[int], waits: list[set[int]]) -> None:
    for one, other in pairwise(numbers):
        waits[other].add(one)


def _beside_compute(order: StageOrder, computes: list[int]) -> set[int]:
    """Collectives over replicas that run while the rank computes: gathers before their use, reduces of what is done."""
    if not computes:
        return set()
    last = max(computes, key=lambda index: order.ends_after(index, computes[0]))
    return {
        index
        for index, each in enumerate(order.operations)
        if (each.role.gathers or each.role.reduces) and order.begins_after_end(index, last) < -SLACK_NS
    }


def _collectives_beside(
    order: StageOrder, first: int, beside: list[int], computes: list[int], transfers: Transfers, waits: list[set[int]]
) -> None:
    """Gathers come before the first forward of their part of the model, reduces after its last backward."""
    operations = order.operations
    _chain([first + index for index in beside], waits)

    def of_part(index: int, direction: str) -> list[int]:
        """Computes of a collective's part of the model; where that is not known, those that it may be of."""
        part = operations[index].chunk if transfers.chunks > 1 else 0
        chosen = [each for each in computes if operations[each].role.direction == direction]
        if part >= 0:
            return [each for each in chosen if transfers.chunk_of.get(first + each, 0) == part]
        if direction == "forward":
            return [each for each in chosen if order.begins_after_end(each, index) >= -SLACK_NS]
        return [each for each in chosen if order.ends_after(index, each) >= -SLACK_NS]

    used: dict[int, int] = {}
    made: dict[int, int] = {}
    for index in beside:
        role = operations[index].role
        if role.gathers and (users := of_part(index, "forward")):
            used[users[0]] = index  # the last gather of a part has all of it
        if role.reduces and (makers := of_part(index, "backward")):
            made.setdefault(makers[-1], index)
    for user, index in used.items():
        waits[first + user].add(first + index)
    for maker, index in made.items():
        waits[first + index].add(first + maker)
    rest = [
        index
        for index, each in enumerate(operations)
        if index > computes[-1] and each.role.what != "transfer" and index not in beside
    ]
    reduces = [index for index in beside if operations[index].role.reduces]
    if rest and reduces:
        waits[first + rest[0]].add(first + reduces[-1])


def _root(joined: dict[int, int], number: int) -> int:
    while number in joined and joined[number] != number:
        number = joined[number]
    return number


def _syncs(
    operations: list[Operation], joined: dict[int, int], coordinates: Int, groups: Callable[[Operation], Int | None]
) -> list[SyncPoint]:
    pipelines = len(coordinates)
    each_alone = np.arange(pipelines)
    together: dict[object, list[int]] = {}
    labels: dict[int, Int] = {}
    labels_of: dict[int, list[list[int]]] = {}
    last_stage = max(each.stage for each in operations)
    for number, operation in enumerate(operations):
        role, key = operation.role, object()
        labels[number] = each_alone
        if role.what == "transfer":
            key = ("transfer", _root(joined, number))
        elif role.what == "collective":
            known = groups(operation)
            if known is not None:
                labels[number] = known
                key = ("known", _with_shared(labels_of.setdefault(operation.slot, []), number, labels))
            elif role.scope == "all" or (role.scope == "ends" and operation.stage in (0, last_stage)):
                key = (role.scope, operation.slot)
                labels[number] = np.zeros_like(each_alone) if role.scope == "all" else each_alone
            elif role.scope in ("tensor", "replicas"):
                labels[number] = _neighbours(coordinates, across_tensors=role.scope == "tensor")
        together.setdefault(key, []).append(number)
    return [_sync(members, np.stack([labels[number] for number in members])) for members in together.values()]


def _with_shared(lists: list[list[int]], number: int, labels: dict[int, Int]) -> int:
    """The first of those operations that share a group with this one; stages whose groups are apart stay apart."""
    for members in lists:
        if any(np.isin(labels[number], labels[other]).any() for other in members):
            members.append(number)
            return members[0]
    lists.append([number])
    return number


def _neighbours(coordinates: Int, *, across_tensors: bool) -> Int:
    """Label of each pipeline: those that differ only in the tensors' share, or only in the rest, have the same."""
    tensors = COORDINATES.index("tp")
    kept = np.delete(coordinates, tensors, axis=1) if across_tensors else coordinates[:, tensors : tensors + 1]
    if across_tensors and (coordinates[:, tensors] < 0).any():
        return np.arange(len(coordinates))
    return np.unique(kept, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)


def _sync(members: list[int], labels: Int) -> SyncPoint:
    counts = np.unique(labels, return_counts=True)[1]
    if (counts == 1).all():
        how = "alone"
    elif len(counts) == 1:
        how = "all"
    elif (labels == labels[0]).all() and len(counts) == labels.shape[1]:
        how = "operations"
    else:
        how = "some"
    return SyncPoint(tuple(members), labels, how)


def _sorted(syncs: list[SyncPoint], waits: list[set[int]], operations: list[Operation]) -> list[SyncPoint]:
    of_operation = {number: index for index, each in enumerate(syncs) for number in each.members}
    waits_for = {
        index: {of_operation[other] for number in each.members for other in waits[number]}
        for index, each in enumerate(syncs)
    }
    try:
        return [syncs[index] for index in TopologicalSorter(waits_for).static_order()]
    except CycleError as error:
        stage = min(operations[number].stage for number in syncs[error.args[1][0]].members)
        raise NotReplayable(f"what waits for what is a circle, among operations of stage {stage}") from error


# --------------------------------------------------------------------------------------------------
# When each operation of a graph would end, given how long each takes: many steps and pipelines at once.

NUMBERS_AT_ONCE: Final = 2_000_000  # 16 MB
Length = Float | npt.NDArray[np.float32] | float  # of one operation: (P, B), or the same for all
Lengths = Callable[[int, int], Sequence[Length]]  # (first, end) of a batch -> of each operation


def ends_of(graph: Graph, lengths: Sequence[Length], shape: tuple[int, int], *, pairs: bool = False) -> Float:
    """End of each operation, from the begin of the step at 0; (N, P, B), where `shape` is (P, B).

    With `pairs` there are two pipelines: one to look at, and one that stands for all others.
    """
    ends = np.empty((len(lengths), *shape))
    starts = np.empty((max(len(each.members) for each in graph.syncs), *shape))
    for sync in graph.syncs:
        first = sync.members[0]
        if sync.how == "alone" and len(graph.waits_for[first]) == 1:  # most are so
            np.add(ends[graph.waits_for[first][0]], lengths[first], out=ends[first])
            continue
        own = starts[: len(sync.members)]
        for place, number in enumerate(sync.members):
            waits_for = graph.waits_for[number]
            own[place] = ends[waits_for[0]] if waits_for else 0.0
            for other in waits_for[1:]:
                np.maximum(own[place], ends[other], out=own[place])
        begin = _begin(sync, own, pairs=pairs)
        for place, number in enumerate(sync.members):
            np.add(begin[place if len(begin) > 1 else 0], lengths[number], out=ends[number])
    return ends


def _begin(sync: SyncPoint, starts: Float, *, pairs: bool) -> Float:
    if not pairs:
        return sync.last(starts)
    if sync.how in ("all", "some") and sync.labels.shape[1] > 1:
        return np.asarray(starts.max(axis=(0, 1), keepdims=True))
    return starts if sync.how == "alone" else np.asarray(starts.max(axis=0, keepdims=True))


def step_times(graph: Graph, lengths: Lengths, pipelines: int, count: int, *, pairs: bool = False) -> Float:
    """Time of each of `count` steps, from its first start to its last end."""
    batch = max(1, NUMBERS_AT_ONCE // (len(graph.operations) * pipelines))
    found = np.empty(count)
    last = list(graph.ends)
    for first in range(0, count, batch):
        end = min(count, first + batch)
        ends = ends_of(graph, lengths(first, end), (pipelines, end - first), pairs=pairs)
        found[first:end] = ends[last].max(axis=(0, 1))
    return found


# --------------------------------------------------------------------------------------------------
# How long each operation takes by itself, without waiting for others, in every step and on every rank.

Float32 = npt.NDArray[np.float32]
CLOCK_ERROR_NS: Final = 10e6  # a transfer that ends this long before the other end began was wrongly recorded: 0
MOST_WRONG: Final = 0.4  # of transfers and collectives recorded so, beyond which the clocks or the groups are wrong
MOST_LOST: Final = 0.2  # of the operations, beyond which a replay says little


@dataclass(frozen=True, slots=True, eq=False)
class StepClass:
    """Steps of one graph, with what each operation took. Axes: N operations, P pipelines, S steps."""

    graph: Graph
    steps: Int  # (S,) index
    self_ns: Float32  # (N, P, S) of a transfer or collective: from when the last one was there
    recorded_ns: Float  # (S,) from first start to last end
    unknown: Bool  # (N, P, S) not in the table, or its other end is not
    lost: int  # operations that are not in the table, though others of the pipeline are
    absent: Bool  # (N, P, S) the pipeline had no such operation in the step: takes no time

    def times(self, typical_ns: Float, as_recorded: Bool) -> Float:
        """Time of each step (S,) where the chosen operations (N, P) take what they took, the others what is typical."""

        def lengths(first: int, end: int) -> list[Length]:
            part = slice(first, end)
            return [self._length(number, part, typical_ns, as_recorded[number]) for number in range(len(typical_ns))]

        return step_times(self.graph, lengths, self.self_ns.shape[1], len(self.steps))

    def _length(self, number: int, part: slice, typical_ns: Float, as_recorded: Bool) -> Length:
        if as_recorded.all():
            return self.self_ns[number, :, part]
        found: Length = typical_ns[number]
        if as_recorded.any():
            found = np.where(as_recorded[:, None], self.self_ns[number, :, part], typical_ns[number])
        gone = self.absent[number, :, part]
        return np.where(gone, 0.0, found) if gone.any() else found

    def times_with_one(self, typical_ns: Float) -> Float:
        """As `times`, where one pipeline takes what it took: (P, S), for each pipeline.

        All other pipelines are equal then, so one stands for them, and all P answers come at once.
        """
        pipelines, steps = self.self_ns.shape[1:]
        own = self.self_ns.reshape(len(typical_ns), -1)

        def lengths(first: int, end: int) -> list[Length]:
            others = np.broadcast_to(typical_ns[:, None], (len(typical_ns), end - first))
            return list(np.stack([own[:, first:end], others], axis=1))

        found = step_times(self.graph, lengths, 2, pipelines * steps, pairs=True)
        return found.reshape(pipelines, steps)


def self_lengths(cells: Cells, graph: Graph, steps: Int) -> StepClass:
    """What each operation took in the steps given; nan in `self_ns` where it is not in the table.

    Raises:
        NotReplayable: operations that belong together did not run together.
    """
    shape = (len(graph.operations), cells.grid.shape[1], len(steps))
    own = np.full(shape, np.nan, dtype=np.float32)
    wrong = moves = 0
    first, last = np.full(len(steps), np.inf), np.full(len(steps), -np.inf)
    for sync in graph.syncs:
        found = [_recorded(cells, graph, number, steps) for number in sync.members]
        for starts, lengths in found:
            first = np.fmin(first, np.fmin.reduce(starts, axis=0))
            last = np.fmax(last, np.fmax.reduce(starts + lengths, axis=0))
        if sync.how == "alone" or not graph.operations[sync.members[0]].role.meets:
            for number, (_, lengths) in zip(sync.members, found, strict=True):
                own[number] = lengths
            continue
        begun = sync.last(np.stack([np.where(np.isnan(starts), -np.inf, starts) for starts, _ in found]))
        for place, (number, (starts, lengths)) in enumerate(zip(sync.members, found, strict=True)):
            alone = starts + lengths - begun[place if len(begun) > 1 else 0]
            before = alone <= -CLOCK_ERROR_NS
            alone[before] = 0.0
            wrong, moves = wrong + int(before.sum()), moves + before.size
            own[number] = alone
    if wrong > MOST_WRONG * moves:
        raise NotReplayable(
            f"{100 * wrong / moves:.0f} % of transfers and collectives end before others begin them: "
            "clocks differ, or their groups are others"
        )
    there = ~np.isnan(own)
    for sync in graph.syncs:  # where the other end is lost, how long this one waited for it is not known
        if sync.how == "operations" and graph.operations[sync.members[0]].role.what == "transfer":
            own[list(sync.members)] += np.where(there[list(sync.members)].all(axis=0), 0, np.nan)
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
    """Operations that a pipeline did not have in a step, as far as can be known from those it had."""
    ordinary = there.mean(axis=(1, 2)) >= 0.5
    absent = ~there & ~ordinary[:, None, None]  # pauses come and go
    slots: dict[int, list[int]] = {}
    for number, operation in enumerate(graph.operations):
        slots.setdefault(operation.slot, []).append(number)
    for same in slots.values():
        absent[same] |= ~there[same].any(axis=0)  # no stage of the pipeline has it
    return np.asarray(absent)


def typical_lengths(classes: Sequence[StepClass]) -> dict[int, float]:
    """The typical time of each name: the mean of what computes, the median of what moves data, over all there is."""
    found: dict[int, list[Float32]] = {}
    meets = {}
    for each in classes:
        for number, operation in enumerate(each.graph.operations):
            values = each.self_ns[number]
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
    if each.lost > MOST_LOST * each.self_ns.size:
        raise NotReplayable(
            f"{100 * each.lost / each.self_ns.size:.0f} % of the operations of a step are not in the table"
        )
    np.copyto(each.self_ns, typical_ns[:, None, None].astype(np.float32), where=each.unknown)
    np.copyto(each.self_ns, np.float32(0), where=np.isnan(each.self_ns))


# --------------------------------------------------------------------------------------------------
# The what-if questions: the job's time with some operations as they were and the others typical.

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
            float(each.times(self.typical_of(each), np.broadcast_to(as_recorded(each), each.self_ns.shape[:2])).sum())
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

    def without(self, ranks: Int) -> float:
        """With all but these ranks (indices) as recorded."""
        gone = np.isin(self.cells.grid, ranks)  # (G, P)
        return self.total(lambda each: ~gone[each.graph.stages])

    def with_one_pipeline(self) -> Float:
        """With only one pipeline as recorded, for each pipeline (P,)."""
        if self.cells.grid.shape[1] == 1:
            return np.array([self.recorded()])
        return np.asarray(sum(each.times_with_one(self.typical_of(each)).sum(axis=1) for each in self.classes))

    def typical_of(self, each: StepClass) -> Float:
        """Typical time of each operation (N,)."""
        return np.array([self.typical.get(operation.name, 0.0) for operation in each.graph.operations])


def by_slowness(cells: Cells, of_pipeline: Float, of_stage: Float) -> Int:
    """Indices of ranks, the slowest first: a rank is as slow as the lesser of its pipeline and stage."""
    score = np.minimum(of_pipeline[None, :], of_stage[:, None])
    known = cells.grid >= 0
    index, score = cells.grid[known], score[known]
    return np.asarray(index[np.lexsort((cells.ranks[index], -score))])


MOST_ROWS: Final = 2_000_000  # operations replayed; beyond it steps are left out evenly
MOST_CLASSES: Final = 24  # of steps with different numbers of microbatches
LEAST_LOST: Final = 1e-6  # of T, below which there is nothing to share out
MOST_WAITING: Final = 0.05  # of forwards and backwards
LONGEST: Final = 1.2  # times the recorded time: what takes longer when replayed runs by other dependencies
GAPS: Final = 0.1  # of the recorded time, from which on they are said


def what_if(database: Database, *, align: Align | None = None, most_rows: int = MOST_ROWS) -> Replay | str:
    """The replay of the job in the tables `spans` and `ranks`, or why there is none.

    `align` gives times by a common clock; without it the ranks' clocks are taken as they are.
    """
    try:
        cells = ops.read_cells(database, most_rows=most_rows, align=align)
        roles = [ops.role_of(name, kind) for name, kind in cells.names]
        _check(cells, roles)
        classes = ops.classes_of_steps(cells, roles)
        replayed = [_class(cells, roles, steps) for steps in classes[:MOST_CLASSES]]
        scenarios = Scenarios(cells, tuple(replayed), typical_lengths(replayed))
        for each in replayed:
            fill_unknown(each, scenarios.typical_of(each))
        return _answers(scenarios, _notes(cells, classes, replayed))
    except NotReplayable as reason:
        return str(reason)


def _check(cells: Cells, roles: list[Role]) -> None:
    if cells.waiting_share > MOST_WAITING:
        raise NotReplayable(
            f"{100 * cells.waiting_share:.0f} % of forwards and backwards is communication within them, "
            "which has no place"
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
    found = [ops.stage_order(cells, roles, stage, steps) for stage in range(len(cells.stages))]
    return self_lengths(cells, build_graph(found, cells.coordinates, partial(_groups, cells, steps)), steps)


def _groups(cells: Cells, steps: Int, operation: Operation) -> Int | None:
    """The group of each pipeline's rank (P,) as the table tells; None where it does not, or where they cannot be so."""
    ranks = cells.grid[operation.stage]
    known = np.where(ranks >= 0, cells.group[operation.slot][ranks], -1).astype(np.int64)
    if (known < 0).all():
        return None
    for group in np.unique(known[known >= 0]):
        members = np.flatnonzero(cells.group[operation.slot] == group)
        starts = cells.start_ns[operation.slot][members][:, steps]
        ends = starts + cells.length_ns[operation.slot][members][:, steps]
        late = np.fmax.reduce(starts) - np.fmin.reduce(ends)  # of one collective nobody begins when others are done
        if len(members) > 1 and (late > CLOCK_ERROR_NS).mean() > 0.5:
            return None
    unknown = -2 - operation.stage * len(ranks) - np.arange(len(ranks))
    return np.where(known >= 0, known, unknown)


def _answers(scenarios: Scenarios, notes: list[str]) -> Replay:
    cells = scenarios.cells
    recorded = sum(float(each.recorded_ns.sum()) for each in scenarios.classes)
    total = scenarios.recorded()
    notes += _gaps(total, recorded)
    ideal = scenarios.ideal()
    if not ideal > 0:
        raise NotReplayable("its operations take no time")
    lost = total - ideal if total - ideal > LEAST_LOST * total else float("nan")
    stages = range(len(cells.stages))
    slowdown_of_stage = np.array([scenarios.of_stage(stage, kept=True) for stage in stages]) / ideal
    ranks = by_slowness(cells, scenarios.with_one_pipeline() / ideal, slowdown_of_stage)
    slowest = ranks[: -(-len(ranks) * round(100 * SLOWEST) // 100)]
    share_of_rank = np.full(len(cells.ranks), np.nan)
    asked = ranks[: max(1, int(NUMBERS_FOR_RANKS // sum(each.self_ns.size for each in scenarios.classes)))]
    for index in asked:
        share_of_rank[index] = (total - scenarios.without(np.array([index]))) / lost
    if len(asked) < len(cells.ranks):
        notes.append(f"shares of the lost time are of the {len(asked)} slowest ranks of {len(cells.ranks)}")
    share_of_stage = np.array([(total - scenarios.of_stage(stage, kept=False)) / lost for stage in stages])
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
        share_of_rank=share_of_rank,
        share_of_stage=share_of_stage,
        slowdown_of_stage=slowdown_of_stage,
        steps=sum(len(each.steps) for each in scenarios.classes),
        notes=tuple(notes),
    )


def _gaps(replayed: float, recorded: float) -> list[str]:
    """What lies between operations and is not replayed. NotReplayable: the replay takes much longer than the job."""
    if replayed > LONGEST * recorded:
        raise NotReplayable(
            f"replayed, the job takes {replayed / recorded:.2f} times as long as recorded: it waits for something else"
        )
    if replayed < (1 - GAPS) * recorded:
        return [
            f"{100 * (1 - replayed / recorded):.0f} % of the recorded time lies between operations and is not replayed"
        ]
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
