"""The dependencies of a job as one graph, and what the job would take if some of its work were quicker.

Nodes are moments at which ranks depend on one another: a sync begins with its last arrival, a wait ends when what is
waited for has ended. An edge says that a node comes at least so long after another: the transfer of the sync that
the rank comes from, and what the rank did itself in between. A node's time is the greatest over its edges; the first
point of each rank comes from the begin of the job, and the end of the job follows each rank's last point.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from profiler_wrapper.ranks.account import ENDS, LAUNCHES, MEETS, WAITS, Account
from profiler_wrapper.ranks.model import Bool, Float, Int

_NUMBERS_AT_ONCE: Final = 8_000_000  # 64 MB: times of nodes, over scenarios
BEGIN: Final = 0  # the node before all others


class NoGraph(Exception):
    """The order in which things depend on one another is not to be had; the message says why."""


class Change(NamedTuple):
    """Work and transfers that take another time: what each loses."""

    rows: Int  # of `Account.work`
    less_ns: Float  # of each of these
    edges: Int = np.empty(0, dtype=np.int64)  # whose transfer is shorter
    edges_less_ns: Float = np.empty(0)


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """N nodes, E edges by the level of their targets."""

    source: Int  # (E,)
    target: Int  # (E,)
    weight_ns: Float  # (E,) as recorded
    transfer_ns: Float  # (E,) of it, of the sync it comes from
    instance: Int  # (E,) of that sync; -1: it comes from none
    rank: Int  # (E,) index
    levels: Int  # (L + 1,) edges of level l are levels[l]:levels[l + 1]
    edge_of_work: Int  # (W,)
    nodes: int
    end: int  # the last node

    def times(self, changes: Sequence[Change]) -> Float:
        """When each node comes, (N, B), for each of B changes."""
        times = np.zeros((self.nodes, len(changes)))
        weights = np.stack([self._weights(change) for change in changes], axis=1)
        for first, last in zip(self.levels[:-1].tolist(), self.levels[1:].tolist(), strict=True):
            target = self.target[first:last]
            begins = np.flatnonzero(np.diff(target, prepend=-1))
            arrivals = times[self.source[first:last]] + weights[first:last]
            times[target[begins]] = np.maximum.reduceat(arrivals, begins, axis=0)
        return times

    def _weights(self, change: Change) -> Float:
        weights: Float = self.weight_ns.copy()
        np.subtract.at(weights, self.edge_of_work[change.rows], change.less_ns)
        weights[change.edges] -= change.edges_less_ns
        return weights

    def ends(self, changes: Sequence[Change]) -> Float:
        """When the job ends, (B,) nanoseconds from its begin, for each of B changes."""
        batch = max(1, _NUMBERS_AT_ONCE // max(self.nodes, len(self.source)))
        parts = [self.times(changes[at : at + batch])[self.end] for at in range(0, len(changes), batch)]
        return np.concatenate(parts) if parts else np.empty(0)

    def path(self, change: Change, times: Float) -> Int:
        """The edges of the critical path, the first one first; times (N,): when each node comes with that change."""
        reached = times[self.source] + self._weights(change)
        order = np.lexsort((reached, self.target))
        last = np.append(np.diff(self.target[order]) != 0, True)
        best = np.full(self.nodes, -1)
        best[self.target[order[last]]] = order[last]
        found, node = [], self.end
        while node != BEGIN:
            found.append(int(best[node]))
            node = int(self.source[found[-1]])
        return np.array(found[::-1], dtype=np.int64)


NOTHING: Final = Change(np.empty(0, dtype=np.int64), np.empty(0))


def build(account: Account) -> Graph:
    """The graph of an account.

    Raises:
        NoGraph: what waits for what is a circle.
    """
    syncs, points = account.syncs, account.points
    count, total = len(syncs.label), len(points.rank)
    is_end, is_sync = points.kind == ENDS, points.kind == MEETS
    # Nodes: the begin, syncs, points that are none, the end.
    node = 1 + count + np.arange(total)
    node[is_sync] = 1 + syncs.of[points.instance[is_sync]]
    end = 1 + count + total
    node[is_end] = end
    first = np.flatnonzero(np.diff(points.rank, prepend=-1))
    source, instance = np.append(0, node[:-1]), np.append(-1, points.instance[:-1])
    source[first], instance[first] = BEGIN, -1
    before = np.append(-1, points.kind[:-1])
    before[first] = -1
    on_main = syncs.on_main
    passes = (before == MEETS) | ((before == LAUNCHES) & (on_main[instance] if len(on_main) else False))
    own = np.bincount(account.work.point, weights=account.work.ns, minlength=total)
    own[first] += account.begins_ns[points.rank[first]] - account.begins_ns.min()
    parts: list[tuple[npt.NDArray[Any], ...]] = [(source, node, own, np.where(passes, instance, -1), points.rank)]
    chain = len(source)
    launches = np.flatnonzero(points.kind == LAUNCHES)
    one = points.instance[launches]
    free = launches[syncs.launch_ns[one] >= 0]  # else it is held by the order of its stream alone
    one = points.instance[free]
    parts.append((node[free], 1 + syncs.of[one], np.zeros(len(one)), np.full(len(one), -1), syncs.rank[one]))
    later = np.flatnonzero(syncs.behind >= 0)
    behind = syncs.behind[later]
    parts.append((1 + syncs.of[behind], 1 + syncs.of[later], np.zeros(len(later)), behind, syncs.rank[later]))
    waits = np.flatnonzero(points.kind == WAITS)
    one = points.instance[waits]
    parts.append((1 + syncs.of[one], node[waits], np.zeros(len(one)), one, points.rank[waits]))
    source, target, weight, instance, rank = (np.concatenate(column) for column in zip(*parts, strict=True))
    transfer = np.where(instance >= 0, syncs.transfer_ns[instance] if len(on_main) else 0.0, 0.0)
    level = _levels(source, target, end + 1)
    order = np.lexsort((target, level[target]))
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    edge_levels = level[target[order]]
    bounds = np.flatnonzero(np.diff(edge_levels, prepend=-1, append=-1))
    return Graph(
        source=source[order],
        target=target[order],
        weight_ns=(weight + transfer)[order],
        transfer_ns=transfer[order],
        instance=instance[order],
        rank=rank[order],
        levels=bounds,
        edge_of_work=place[:chain][account.work.point],
        nodes=end + 1,
        end=end,
    )


def _levels(source: Int, target: Int, nodes: int) -> Int:
    """How many edges the longest way to each node has; raises NoGraph where there is none."""
    level = np.zeros(nodes, dtype=np.int64)
    left = np.bincount(target, minlength=nodes)
    order = np.argsort(source, kind="stable")
    out = target[order]
    first = np.searchsorted(source[order], np.arange(nodes + 1))
    ready = np.flatnonzero(left == 0)
    seen = 0
    depth = 0
    while len(ready):
        level[ready] = depth
        seen += len(ready)
        counts = first[ready + 1] - first[ready]
        edges = np.repeat(first[ready] - np.append(0, np.cumsum(counts)[:-1]), counts) + np.arange(counts.sum())
        reached = out[edges]
        np.subtract.at(left, reached, 1)
        candidates = np.unique(reached)
        ready = candidates[left[candidates] == 0]
        depth += 1
    if seen < nodes:
        raise NoGraph(f"{nodes - seen} of {nodes} communications and waits depend on one another in a circle")
    return level


def change_of(less: Float, chosen: Bool | bool = True, part: Float | float = 1.0) -> Change:
    """What rows of work (W,) lose, those that lose something; of the chosen ones a part."""
    rows = np.flatnonzero(chosen & (less > 0))
    return Change(rows, less[rows] * (part[rows] if isinstance(part, np.ndarray) else part))


def together(changes: Sequence[Change]) -> Change:
    """All of them; what several shorten is shortened by the greatest."""
    if len(changes) == 1:
        return changes[0]
    pairs = []
    for at in (0, 2):
        index = np.concatenate([change[at] for change in changes])
        less = np.concatenate([change[at + 1] for change in changes])
        order = np.lexsort((less, index))
        last = np.append(np.diff(index[order]) != 0, True)[: len(index)]
        pairs += [index[order][last], less[order][last]]
    return Change(*pairs)
