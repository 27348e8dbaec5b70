"""What waits for what in a step, and when each operation would end, given how long each takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from profiler_wrapper.ranks.replay.orders import (
    COORDINATES,
    SLACK_NS,
    Float,
    Int,
    NotReplayable,
    Operation,
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
