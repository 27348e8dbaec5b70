"""One account of a job: what each rank did itself, by kind, between the points where it depends on others.

Each moment of a rank's main thread is one kind's: that of the spans that run, by priority, or "other" where none does.
A communication that several ranks have is a sync: a rank waits in it from its own arrival to the last arrival, and
the rest is the transfer, as long as its shortest span. So waiting is measured, and by each rank's own clock.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from profiler_wrapper.ranks.clocks import align
from profiler_wrapper.ranks.database import Database, to_arrays
from profiler_wrapper.ranks.model import BETWEEN, COMPUTE, SELF_KINDS, Basis, Bool, Clocks, Float, Int, SelfTimes
from profiler_wrapper.ranks.syncs import (
    NEARLY_ALL,
    RECEIVES,
    MainSpans,
    Syncs,
    distinct,
    find_launches,
    find_syncs,
    number_spans,
)
from profiler_wrapper.ranks.times import ON_MAIN, label_key
from profiler_wrapper.trace.spans import SPAN_KINDS

KINDS: Final = (*SELF_KINDS, BETWEEN)
_PLACE: Final = {kind: place for place, kind in enumerate(KINDS)}
_EXCLUSIVE: Final = tuple(kind.name for kind in SPAN_KINDS if kind.within)
_BY_PRIORITY: Final = tuple(k for k in sorted(SPAN_KINDS, key=lambda k: k.priority) if k.name != "step")
# What runs at a moment: kinds on the main thread, a sync there, then kinds beside it.
_SYNC: Final = len(KINDS)
_BESIDE: Final = _SYNC + 1
_WITHIN: Final = _BESIDE + len(KINDS)  # a layer within a phase: where none runs, the phase may wait
_SOON_NS: Final = 200_000  # after what it waited for has ended a thread goes on
_JUMP_NS: Final = 1e6  # and
_JUMP: Final = 20  # times as far as the clock of a rank is from that of others otherwise: a jump
_ENOUGH: Final = 20_000  # waits that are looked at, to tell before what a collective is waited for
LAUNCHES, MEETS, WAITS, ENDS = range(4)  # kinds of points


@dataclass(frozen=True, slots=True, eq=False)
class Points:
    """Points of main threads where a rank depends on others, or others on it; by rank, in order. P of them."""

    rank: Int  # (P,) index
    at_ns: Int  # (P,) by the rank's own clock
    kind: Int  # (P,) LAUNCHES, MEETS, WAITS; the last one of each rank ENDS
    instance: Int  # (P,) of `Syncs`; -1 at the end


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """What ranks did themselves before each point: W rows."""

    point: Int  # (W,)
    step: Int  # (W,) index
    kind: Int  # (W,) index of KINDS
    ns: Float  # (W,)
    number: Int  # (W,) of the operation, among those of its kind in its step


@dataclass(frozen=True, slots=True, eq=False)
class Account:
    """Axes: S steps, R ranks, K kinds."""

    ranks: Int
    steps: Int
    own_ns: Float  # (S, R, K) nan where a rank has no such step. A transfer is "communication"
    waiting_ns: Float  # (S, R)
    wall_ns: Float  # (S, R)
    syncs: Syncs
    points: Points
    work: Work
    begins_ns: Int  # (R,) of its first step, by the common clock
    jumped: Int  # ranks whose clock jumps in some steps; their times of these are moved back
    tokens: Float  # (S, R) nan: not known
    beside: Bool  # (S, R) work that nobody waits for ran beside the main thread, as a save in the background

    def self_times(self, stages: Int, *, basis: Basis = "cpu") -> SelfTimes:
        """The same by step, rank and kind, without what lies between steps; stages: (R,)."""
        waiting_known = bool(len(self.syncs.label) or np.nansum(self.waiting_ns)) or len(self.ranks) < 2
        return SelfTimes(
            ranks=self.ranks,
            stages=stages,
            steps=self.steps,
            self_ns=self.own_ns[:, :, : len(SELF_KINDS)],
            waiting_ns=self.waiting_ns,
            wall_ns=self.wall_ns,
            basis=basis,
            waiting_known=waiting_known,
        )


def read_account(database: Database, clocks: Clocks | None, *, on_device: bool = False) -> Account:
    """The account of a database that is prepared (see `times.prepare`).

    `on_device`: what timers measured between events on the device counts in the place of what the CPU took to launch
    it. Nothing tells when that ran, so it is laid end to end.
    """
    rows = _read(database)
    ranks, rank = np.unique(rows["rank"], return_inverse=True)
    steps, step = np.unique(rows["step"], return_inverse=True)
    shape = len(ranks), len(steps)
    begin, end = _windows(rows, rank, step, shape)
    wall = np.where(begin < 0, np.nan, end - begin).T
    beside = _beside(rows, rank, begin, end)
    tokens = np.full((len(steps), len(ranks)), np.nan)
    counted = rows["tokens"] >= 0
    tokens[step[counted], rank[counted]] = rows["tokens"][counted]
    jumped = np.empty(0, dtype=np.int64)
    if on_device:
        _lay_end_to_end(rows, rank, step)
        begin, end = _windows(rows, rank, step, shape)
        clocks = None
    elif jumps := _jumps(rows, rank, step, begin, end, ranks, clocks):
        for of, at, ahead_ns in jumps:
            mine = (rank == of) & (step == at)
            rows["start_ns"][mine] -= ahead_ns
            rows["end_ns"][mine] -= ahead_ns
        jumped = np.unique([ranks[of] for of, *_ in jumps])
        begin, end = _windows(rows, rank, step, shape)
        end[:, :-1] = np.where(begin[:, 1:] >= 0, np.minimum(end[:, :-1], begin[:, 1:]), end[:, :-1])
        wall = np.where(begin < 0, np.nan, end - begin).T
    syncs, instance = find_syncs(rows, rank, step, ranks, clocks, one_clock=not on_device)
    main = number_spans(rows, rank, step, len(steps))
    syncs = replace(syncs, launch_ns=find_launches(rows, main, len(steps), syncs))
    rows["start_ns"] = np.maximum(rows["start_ns"], begin[rank, step])
    rows["end_ns"] = np.minimum(rows["end_ns"], end[rank, step])
    code = _codes(rows, instance, syncs)
    spans = [code, rank, step, rows["start_ns"], rows["end_ns"]]
    if len(ranks) > 1:
        estimated = _split_unmatched(rows, rank, step)
        spans = [np.concatenate(pair) for pair in zip(spans, estimated, strict=True)]
    has_layers = np.zeros(shape, dtype=bool)
    has_layers[rank[code == _WITHIN], step[code == _WITHIN]] = True
    earlier = (syncs.launch_ns >= 0) & (syncs.launch_ns < syncs.start_ns)
    launches = syncs.rank[earlier], syncs.launch_ns[earlier]
    moments = _sweep(spans[0], spans[1], spans[3], spans[4], begin, end, launches, has_layers, steps)
    alone = (rows["matched"] == 0) & (rows["label"] >= 0) & (rows["on_main"] == 0)
    seen = _waits(syncs, moments, rank[alone], rows["end_ns"][alone])
    hidden = _hidden_waits(rows, main, shape, instance, syncs, seen)
    points = _points(syncs, moments, seen, hidden, len(ranks))
    work, own, waiting = _work(syncs, points, moments, shape)
    own[begin.T < 0] = waiting[begin.T < 0] = np.nan
    first = np.where(begin < 0, np.iinfo(np.int64).max, begin).min(axis=1, initial=np.iinfo(np.int64).max)
    first = np.zeros_like(first) if on_device else first if clocks is None else align(clocks, ranks, first)
    return Account(ranks, steps, own, waiting, wall, syncs, points, work, first, jumped, tokens, beside)


def _read(database: Database) -> dict[str, Int]:
    """The spans that count, by rank and start."""
    kinds = " ".join(f"WHEN '{kind}' THEN {place}" for kind, place in _PLACE.items())
    found = to_arrays(
        database,
        f"""SELECT s.rank, s.step, CASE s.kind {kinds} ELSE -1 END AS kind, s.start_ns,
            s.start_ns + CASE WHEN s.kind = 'communication' THEN coalesce(s.device_ns, s.duration_ns)
                ELSE s.duration_ns END AS end_ns, coalesce({ON_MAIN}, true) AS on_main,
            coalesce(s.device_ns, s.duration_ns) AS device_ns, s.device_ns IS NOT NULL AS by_device, s.depth,
            s.depth > 0 AND s.kind IN {COMPUTE} AND s.kind NOT IN {_EXCLUSIVE} AS within,
            coalesce(s.thread, -1) AS thread, coalesce(l.label, -1) AS label, coalesce(s.sequence, -1) AS sequence,
            coalesce(l.role, 0) AS role, coalesce(l.forward, false) AS forward,
            coalesce(l.common, -1) AS common, g.size IS NOT NULL AS matched,
            coalesce(g.shortest_ns, 0) AS shortest_ns, coalesce(s.tokens, -1) AS tokens
        FROM spans s LEFT JOIN main_threads m ON m.rank = s.rank
        LEFT JOIN labels_of_names l ON s.kind = 'communication' AND l.key = {label_key("s")}
        LEFT JOIN matched g ON g.label = l.label AND g.step = s.step AND g.sequence = s.sequence
        WHERE s.step IS NOT NULL AND (s.depth = 0 OR s.kind IN {_EXCLUSIVE} OR s.kind = 'step'
            OR s.depth = 1 AND s.layer IS NOT NULL AND s.kind IN {COMPUTE} AND coalesce(s.thread, 0) >= 0)
        ORDER BY s.rank, s.start_ns, s.duration_ns, s.kind, s.name, s.thread, s.sequence""",  # always the same
    )
    return {name: np.asarray(values).astype(np.int64) for name, values in found.items()}


def _lay_end_to_end(rows: dict[str, Int], rank: Int, step: Int) -> None:
    """Begin each span of a main thread where the one before it ends, and take what the device took.

    What lies within another is cut out of that, and comes after it; not what the CPU did meanwhile.
    """
    kept = (rows["kind"] >= 0) & (rows["on_main"] > 0) & (rows["within"] == 0)
    rows["kind"][~kept] = -2
    length = np.where(kept, rows["device_ns"], 0)
    order = np.lexsort((rows["depth"], rows["start_ns"], step, rank))
    outer = kept[order] & (rows["depth"][order] == 0)
    around = order[np.maximum.accumulate(np.where(outer, np.arange(len(order)), 0))]
    within = kept[order] & ~outer & (rank[around] == rank[order])
    cut = within & (rows["by_device"][order] >= rows["by_device"][around])
    np.subtract.at(length, around[cut], length[order[cut]])
    end = np.cumsum(np.maximum(length[order], 0))
    rows["start_ns"][order] = np.append(0, end[:-1])
    rows["end_ns"][order] = end


def _split_unmatched(rows: dict[str, Int], rank: Int, step: Int) -> tuple[Int, Int, Int, Int, Int]:
    """Code, rank, step, start and end of what is estimated to be waiting, in calls of which nobody else tells.

    What one takes beyond the quickest of its rank and name, or the typical transfer of its name; spans are cut to that.
    """
    chosen = np.flatnonzero((rows["matched"] == 0) & (rows["label"] >= 0) & (rows["kind"] >= 0) & (rows["on_main"] > 0))
    of = distinct(rank[chosen], rows["label"][chosen])[1]
    length = rows["end_ns"][chosen] - rows["start_ns"][chosen]
    least = np.full(int(of.max(initial=-1)) + 1, np.iinfo(np.int64).max)
    np.minimum.at(least, of, length)
    for common in np.unique(rows["common"][chosen]).tolist():  # the same, of a group that is recorded
        same_name = (rows["matched"] > 0) & (rows["common"] == common)
        if same_name.any():
            of_name = of[rows["common"][chosen] == common]
            least[of_name] = np.minimum(least[of_name], int(np.median(rows["shortest_ns"][same_name])))
    start = rows["start_ns"][chosen].copy()
    rows["start_ns"][chosen] = rows["end_ns"][chosen] - least[of]
    return np.full(len(chosen), _SYNC), rank[chosen], step[chosen], start, rows["start_ns"][chosen]


def _windows(rows: dict[str, Int], rank: Int, step: Int, shape: tuple[int, int]) -> tuple[Int, Int]:
    """Begin and end of each step of each rank, (R, S): of its span, else of what is in it; -1 where there is none."""
    most = np.iinfo(np.int64).max
    found = []
    counts = (rows["on_main"] > 0) | (rows["kind"] == _PLACE["communication"])
    for chosen in (rows["kind"] == -1, (rows["kind"] >= 0) & counts):
        begin, end = np.full(shape, most), np.full(shape, -1)
        np.minimum.at(begin, (rank[chosen], step[chosen]), rows["start_ns"][chosen])
        np.maximum.at(end, (rank[chosen], step[chosen]), rows["end_ns"][chosen])
        found.append((begin, end))
    (begin, end), (first, last) = found
    begin, end = np.where(begin == most, first, begin), np.where(begin == most, last, end)
    return np.where(begin == most, -1, begin), end


def _beside(rows: dict[str, Int], rank: Int, begin: Int, end: Int) -> Bool:
    """(S, R) whether something that is no communication runs beside the main thread in most of a step."""
    found = np.zeros(begin.T.shape, dtype=bool)
    others = (_PLACE["communication"], _PLACE["data"], _PLACE["gc"])
    chosen = np.flatnonzero((rows["on_main"] == 0) & (rows["kind"] >= 0) & ~np.isin(rows["kind"], others))
    for at in chosen.tolist():
        of = int(rank[at])
        runs = np.minimum(end[of], rows["end_ns"][at]) - np.maximum(begin[of], rows["start_ns"][at])
        found[(begin[of] >= 0) & (2 * runs > end[of] - begin[of]), of] = True
    return found


def _jumps(
    rows: dict[str, Int], rank: Int, step: Int, begin: Int, end_of: Int, ranks: Int, clocks: Clocks | None
) -> list[tuple[int, int, int]]:
    """(rank, step, how far it is ahead) where the clock of a rank jumps for single steps.

    The ends of communications of three or more ranks are shared: in those steps the rank sees all of them later, or
    sooner, than it does in others, by much more than they differ within a step. A thread that a busy machine lets go on
    late sees so too; but moved back, its step would not follow the one before and precede the next as steps do.
    """
    chosen = np.flatnonzero((rows["matched"] > 0) & (rows["role"] == 0))
    of = distinct(step[chosen], rows["label"][chosen], rows["sequence"][chosen])[1]
    kept = np.bincount(of)[of] > 2
    chosen, of = chosen[kept], of[kept]
    if not len(chosen):
        return []
    end = rows["end_ns"][chosen] if clocks is None else align(clocks, ranks[rank[chosen]], rows["end_ns"][chosen])
    middle = _middle(of, end)[of]
    apart, one, at = end - middle, rank[chosen], step[chosen]
    of_step = np.unique(one * begin.shape[1] + at, return_inverse=True)[1]
    by_step = _middle(of_step, apart)
    usual = _middle(one, np.abs(apart - by_step[of_step]))  # by rank
    first = np.unique(of_step, return_index=True)[1]
    of, at = one[first], at[first]
    by_step = by_step - _middle(of, by_step)[of]
    far = (np.abs(by_step) > np.maximum(_JUMP_NS, _JUMP * usual[of])) & (np.bincount(one)[of] > 2)
    found = []
    for one_rank in np.unique(of[far]).tolist():
        jump = np.zeros(begin.shape[1])
        mine = far & (of == one_rank)
        jump[at[mine]] = by_step[mine]
        known = np.flatnonzero(begin[one_rank] >= 0)
        gap = (begin[one_rank] - jump)[known[1:]] - (end_of[one_rank] - jump)[known[:-1]]
        apart = np.abs(gap - np.median(gap)) if len(gap) else gap
        most = np.maximum(np.append(0.0, apart), np.append(apart, 0.0))
        moved = known[(jump[known] != 0) & (most <= (1 - NEARLY_ALL) * np.abs(jump[known]))]
        if np.isin(moved, known[1:-1]).any():  # the first and the last step have one neighbour, which tells little
            found += [(one_rank, place, int(jump[place])) for place in moved.tolist()]
    return found if len({of_rank for of_rank, *_ in found}) <= len(ranks) / 4 else []


def _middle(of: Int, values: Int) -> Int:
    """The lower median of the values of each number from 0 on; 0 of those without any."""
    order = np.lexsort((values, of))
    count = np.bincount(of)
    first = np.cumsum(count) - count
    middle = np.minimum(first + (count - 1) // 2, max(0, len(order) - 1))
    return np.where(count > 0, values[order][middle], 0)


def _codes(rows: dict[str, Int], instance: Int, syncs: Syncs) -> Int:
    """What each span is of, for `_sweep`; -1: it does not count."""
    on_main, kind = rows["on_main"] > 0, rows["kind"]
    beside = np.full(len(KINDS) + 1, -1)
    beside[[_PLACE[one.name] for one in SPAN_KINDS if one.beside]] = [
        _BESIDE + _PLACE[one.name] for one in SPAN_KINDS if one.beside
    ]
    code = np.where(on_main, kind, beside[kind])
    meets = on_main & (instance >= 0)
    code[meets] = _SYNC
    code[rows["within"] > 0] = np.where(on_main, _WITHIN, -1)[rows["within"] > 0]
    return code


@dataclass(frozen=True, slots=True, eq=False)
class _Moments:
    """Stretches of main threads in which the same runs, by rank and time."""

    rank: Int
    start_ns: Int
    end_ns: Int
    kind: Int  # of KINDS, or _SYNC, or _BESIDE + a kind
    step: Int  # that in which, or after which, it is
    number: Int  # of the span, among those of its kind
    exposed: Bool  # a communication runs beside the main thread, on which nothing does, or a phase outside its layers


def _sweep(
    code: Int,
    rank: Int,
    start: Int,
    end: Int,
    begin_of: Int,
    end_of: Int,
    launches: tuple[Int, Int],
    has_layers: Bool,
    numbers: Int,
) -> _Moments:
    """Each moment of each rank, from the begin of its first step on, is of one kind: by priority, of those that run."""
    kept = (code >= 0) & (end > start)
    code, rank, start, end = code[kept], rank[kept], start[kept], end[kept]
    there = np.argwhere(begin_of >= 0)
    # Of steps, across which nothing runs, and where something is launched.
    edges = np.concatenate([begin_of[begin_of >= 0], end_of[begin_of >= 0], launches[1]])
    of_edges = np.concatenate([there[:, 0], there[:, 0], launches[0]])
    at = np.concatenate([start, end, edges])
    of = np.concatenate([rank, rank, of_edges])
    what = np.concatenate([code, code, np.full(len(edges), -1)])
    sign = np.concatenate([np.ones(len(code)), -np.ones(len(code)), np.zeros(len(edges))]).astype(np.int32)
    order = np.lexsort((at, of))
    at, of, what, sign = at[order], of[order], what[order], sign[order]
    owner, number = np.full(len(at), _PLACE["other"]), np.zeros(len(at), dtype=np.int64)
    taken = np.zeros(len(at), dtype=bool)
    call = _PLACE["communication"]
    beside = _BESIDE + call
    running_beside = np.cumsum(np.where(what == beside, sign, 0)) > 0
    for one in _priority():
        running = np.cumsum(np.where(what == one, sign, 0)) > 0
        if one == call:
            running &= ~running_beside
        running &= ~taken
        owner[running] = one
        number[running] = np.cumsum((what == one) & (sign > 0))[running]
        taken |= running
    computes = np.isin(owner, [_PLACE[kind] for kind in COMPUTE])
    number += np.cumsum((what == _WITHIN) & (sign > 0)) * computes  # each layer is an operation
    length = np.diff(at, append=at[-1:]) if len(at) else at
    lasting = np.append(of[1:] == of[:-1], False) & (length > 0) if len(at) else np.zeros(0, dtype=bool)
    in_layer = np.cumsum(np.where(what == _WITHIN, sign, 0)) > 0
    hollow = running_beside & ~in_layer & computes
    until = at + length
    at, of, owner, until, number = (each[lasting] for each in (at, of, owner, until, number))
    hollow = hollow[lasting]
    step, ends_window = np.empty(len(at), dtype=np.int64), np.zeros(len(at), dtype=bool)
    edges_of = np.searchsorted(of, np.arange(len(begin_of) + 1))
    for one in range(len(begin_of)):
        mine = slice(edges_of[one], edges_of[one + 1])
        steps = np.flatnonzero(begin_of[one] >= 0)
        steps = steps[np.argsort(begin_of[one, steps], kind="stable")]
        place = np.maximum(np.searchsorted(begin_of[one, steps], at[mine], side="right") - 1, 0)
        step[mine] = steps[place]
        ends_window[mine] = (np.diff(numbers[steps], append=-1) != 1)[place]
    outside = (at >= end_of[of, step]) & (owner == _PLACE["other"])
    owner[outside] = _PLACE[BETWEEN]
    kept = ~(outside & ends_window)  # nothing tells what is between two windows of recorded steps
    of, at, until, owner, step, number = (each[kept] for each in (of, at, until, owner, step, number))
    hollow = hollow[kept]
    exposed = (owner == beside) | (hollow & has_layers[of, step])
    kind = np.where(owner == beside, _PLACE["other"], np.where(owner >= _BESIDE, owner - _BESIDE, owner))
    return _Moments(of, at, until, kind, step, number, exposed)


def _priority() -> list[int]:
    found = []
    for one in _BY_PRIORITY:
        if one.name == "communication":
            found.append(_SYNC)
        if one.name != "other":
            found.append(_PLACE[one.name])
    found += [_BESIDE + _PLACE[one.name] for one in _BY_PRIORITY if one.beside]
    return [*found, _PLACE["other"]]


def _points(syncs: Syncs, moments: _Moments, seen: tuple[Int, Int], hidden: tuple[Int, Int], ranks: int) -> Points:
    """Syncs on the main thread, launches of those beside it, waits for these, and the end of each rank."""
    count = len(syncs.rank)
    kind = np.where(syncs.on_main & syncs.waits, MEETS, LAUNCHES)
    ends = np.full(ranks, -1)
    np.maximum.at(ends, moments.rank, moments.end_ns)
    at = np.where(syncs.launch_ns < 0, syncs.start_ns, syncs.launch_ns)
    parts = [(syncs.rank, at, kind, np.arange(count), kind)]
    # At one moment a thread has waited, launches, then waits for what has ended before.
    for (instance, at), place in ((seen, -1), (hidden, LAUNCHES)):
        of_kind = np.full(len(instance), WAITS)
        parts.append((syncs.rank[instance], at, of_kind, instance, np.full(len(instance), place)))
    at_end = np.full(ranks, ENDS)
    parts.append((np.arange(ranks), ends, at_end, np.full(ranks, -1), at_end))
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    rank, at, kind, instance, turn = columns
    order = np.lexsort((turn, at, rank))
    return Points(rank[order], at[order], kind[order], instance[order])


def _waits(syncs: Syncs, moments: _Moments, alone: Int, alone_end_ns: Int) -> tuple[Int, Int]:
    """Instances beside the main thread that it waits for, and the times at which it goes on.

    It idles beside a communication, and goes on when one ends. Else it idles for a reason of its own: that is "other".
    `alone`: the ranks of communications of which nobody else tells; to idle for these is communication.
    """
    goes_on = np.append(~(moments.exposed[1:] & (moments.rank[1:] == moments.rank[:-1])), True)
    goes_on[: len(moments.rank)] |= _hands_over(syncs, moments)
    stops = np.flatnonzero(moments.exposed & goes_on[: len(moments.exposed)])
    stretch = np.cumsum(np.append(0, goes_on[: len(goes_on) - 1])) if len(moments.rank) else np.empty(0, dtype=np.int64)
    idle = np.bincount(stretch, weights=(moments.end_ns - moments.start_ns) * moments.exposed)[stretch[stops]]
    soon = np.maximum(_SOON_NS, (1 - NEARLY_ALL) * idle)  # a busy machine may tell of the end later
    beside = np.flatnonzero(~syncs.on_main & syncs.waits)
    beside = beside[np.lexsort((syncs.end_ns[beside], syncs.rank[beside]))]
    first = np.searchsorted(syncs.rank[beside], np.arange(int(moments.rank.max(initial=0)) + 2))
    found = np.full(len(stops), -1)
    bounds = np.searchsorted(moments.rank[stops], np.arange(len(first)))
    for rank in range(len(first) - 1):
        mine, at = beside[first[rank] : first[rank + 1]], slice(bounds[rank], bounds[rank + 1])
        if len(mine):
            ends, stop = syncs.end_ns[mine], moments.end_ns[stops[at]]
            place = np.searchsorted(ends, stop)
            before, after = np.maximum(place - 1, 0), np.minimum(place, len(mine) - 1)
            nearest = np.where(np.abs(ends[before] - stop) <= np.abs(ends[after] - stop), before, after)
            found[at] = np.where(np.abs(ends[nearest] - stop) <= soon[at], mine[nearest], -1)
    for_one = np.zeros(len(stops), dtype=bool)
    for at in np.flatnonzero(found < 0).tolist():
        ends = alone_end_ns[alone == moments.rank[stops[at]]]
        for_one[at] = (np.abs(ends - moments.end_ns[stops[at]]) <= soon[at]).any()
    moves = moments.exposed & np.isin(stretch, stretch[stops[for_one]])
    moments.kind[moves & (moments.kind == _PLACE["other"])] = _PLACE["communication"]
    moments.exposed[np.isin(stretch, stretch[stops[found < 0]])] = False
    return found[found >= 0], moments.end_ns[stops[found >= 0]]


def _hands_over(syncs: Syncs, moments: _Moments) -> Bool:
    """Of each moment whether at its end a communication ends, and one in another thread begins: it waits between."""
    beside = np.flatnonzero(~syncs.on_main & syncs.waits)
    if not len(beside) or not len(moments.rank):
        return np.zeros(len(moments.rank), dtype=bool)
    first = min(syncs.start_ns[beside].min(), moments.end_ns.min())
    longest = max(syncs.end_ns[beside].max(), moments.end_ns.max()) - first + 1
    beside = beside[np.lexsort((syncs.end_ns[beside], syncs.rank[beside]))]
    ends, begins = (syncs.rank[beside] * longest + at[beside] - first for at in (syncs.end_ns, syncs.start_ns))
    place = np.minimum(np.searchsorted(ends, begins), len(ends) - 1)
    follows = (ends[place] == begins) & (syncs.thread[beside[place]] != syncs.thread[beside])
    return np.isin(moments.rank * longest + moments.end_ns - first, begins[follows])


def _hidden_waits(
    rows: dict[str, Int], main: MainSpans, shape: tuple[int, int], instance: Int, syncs: Syncs, seen: tuple[Int, Int]
) -> tuple[Int, Int]:
    """The waits that took no time, since what is waited for had ended before.

    What is received is there before what is computed next in its direction. Of a collective the main thread waits
    before that span before which it was seen to wait for the same one, in other steps or on other ranks.
    """
    found, at_ns = seen
    row_of = np.flatnonzero(instance >= 0)  # by instance
    left = np.setdiff1d(np.flatnonzero(~syncs.on_main & syncs.waits), found)
    if not len(left) or not len(main.row):
        return found[:0], at_ns[:0]
    kinds, start = len(SELF_KINDS), rows["start_ns"][main.row]
    received = left[rows["role"][row_of[left]] == RECEIVES]
    more, more_at = [], []
    for phase in ("forward", "backward"):
        of_kind = np.flatnonzero(main.of % kinds == _PLACE[phase])
        whose = main.of[of_kind] // (kinds * shape[1])
        bounds = np.searchsorted(whose, np.arange(shape[0] + 1))
        going = received[rows["forward"][row_of[received]] == (phase == "forward")]
        for one in np.unique(syncs.rank[going]).tolist():
            mine = going[syncs.rank[going] == one]
            own = np.sort(start[of_kind[bounds[one] : bounds[one + 1]]])
            place = np.searchsorted(own, syncs.end_ns[mine] - _SOON_NS)
            more.append(mine[place < len(own)])
            more_at.append(own[place[place < len(own)]])
    # Before which span each collective was waited for, by its name and number.
    at_step = (syncs.rank * shape[1] + syncs.step[syncs.of]) * kinds
    before: dict[int, dict[tuple[int, int], int]] = {}
    for one, at in zip(found[:: _every(found)].tolist(), at_ns[:: _every(found)].tolist(), strict=True):
        for kind in range(kinds):
            first, last = np.searchsorted(main.of, (at_step[one] + kind, at_step[one] + kind + 1))
            place = int(np.searchsorted(start[first:last], at - _SOON_NS))
            if place < last - first and start[first + place] <= at + _SOON_NS:
                times = before.setdefault(int(syncs.same[one]), {})
                times[kind, place] = times.get((kind, place), 0) + 1
    for same, times in before.items():
        kind, place = max(times, key=lambda each: times[each])
        mine = left[(syncs.same[left] == same) & (rows["role"][row_of[left]] != RECEIVES)]
        where, known = main.find(at_step[mine] + kind, place)
        known &= start[where] >= syncs.end_ns[mine] - _SOON_NS
        more.append(mine[known])
        more_at.append(start[where[known]])
    return np.concatenate([found[:0], *more]), np.concatenate([at_ns[:0], *more_at])


def _every(found: Int) -> int:
    return max(1, len(found) // _ENOUGH)


def _work(syncs: Syncs, points: Points, moments: _Moments, shape: tuple[int, int]) -> tuple[Work, Float, Float]:
    ranks, steps = shape
    counted = (moments.kind != _SYNC) & ~moments.exposed
    length = (moments.end_ns - moments.start_ns).astype(np.float64)
    own = np.zeros((steps, ranks, len(KINDS)))
    np.add.at(own, (moments.step[counted], moments.rank[counted], moments.kind[counted]), length[counted])
    step = syncs.step[syncs.of]
    on_main = syncs.on_main
    met = np.zeros((steps, ranks))
    meets = moments.kind == _SYNC
    np.add.at(met, (moments.step[meets], moments.rank[meets]), length[meets])
    exposed = np.zeros((steps, ranks))
    np.add.at(exposed, (moments.step[moments.exposed], moments.rank[moments.exposed]), length[moments.exposed])
    moved, moved_beside = np.zeros((2, steps, ranks))
    np.add.at(moved, (step[on_main], syncs.rank[on_main]), syncs.transfer_ns[on_main])
    np.add.at(moved_beside, (step[~on_main], syncs.rank[~on_main]), syncs.transfer_ns[~on_main])
    transfer = np.rint(np.minimum(met, moved) + np.minimum(exposed, moved_beside))  # so that kinds add up to the step
    own[:, :, _PLACE["communication"]] += transfer
    waiting = met + exposed - transfer
    # Points and moments are both by rank and time, so a moment's next point is found by merging them.
    time = np.concatenate([points.at_ns, moments.start_ns[counted]])
    rank = np.concatenate([points.rank, moments.rank[counted]])
    is_moment = np.concatenate([np.zeros(len(points.rank), dtype=bool), np.ones(int(counted.sum()), dtype=bool)])
    ends = np.concatenate([points.kind == ENDS, np.zeros(int(counted.sum()), dtype=bool)])
    order = np.lexsort((is_moment, time, ends, rank))
    before = np.cumsum(~is_moment[order])
    point = np.empty(len(order), dtype=np.int64)
    point[order] = before
    point = point[len(points.rank) :]  # points at or before its start: the next one has this number
    kind = moments.kind[counted]
    key = (moments.rank[counted] * steps + moments.step[counted]) * len(KINDS) + kind
    passed = np.append(0, np.cumsum(points.kind == MEETS))[point]
    number = _numbers(key, moments.number[counted], passed)
    (point, step, kind, number), place = distinct(point, moments.step[counted], kind, number)
    ns = np.bincount(place, weights=length[counted]).astype(np.float64)
    return Work(point, step, kind, ns, number), own, waiting


def _numbers(key: Int, span: Int, met: Int) -> Int:
    """Of operations in time, among those of one key: another one begins with a span, or after a sync within it."""
    order = np.argsort(key, kind="stable")
    new_key = np.diff(key[order], prepend=-1) != 0
    begins = (np.diff(span[order], prepend=-1) != 0) | (np.diff(met[order], prepend=-1) != 0) | new_key
    count = np.cumsum(begins)
    number = np.empty(len(key), dtype=np.int64)
    number[order] = count - count[np.maximum.accumulate(np.where(new_key, np.arange(len(key)), 0))]
    return number


def sync_each_step(account: Account, own_ns: Float) -> Account:
    """An account in which nobody is seen to meet: all ranks do at the end of each step, after what each did itself.

    What one communicates for longer than the quickest is waiting then.
    """
    own_ns, call = own_ns.copy(), _PLACE["communication"]
    least = np.nan_to_num(
        np.where(np.isnan(own_ns[:, :, call]), np.inf, own_ns[:, :, call]).min(axis=1, initial=np.inf)
    )
    own_ns[:, :, call] = np.minimum(own_ns[:, :, call], least[:, None])
    taken = own_ns.sum(axis=2)
    known = np.isfinite(taken).T  # (R, S)
    ends = np.cumsum(np.nan_to_num(taken).max(axis=1, initial=0.0)).astype(np.int64)
    rank, step = np.nonzero(known)
    count = len(rank)
    arrives = np.append(0, ends)[step] + taken[step, rank].astype(np.int64)
    syncs = Syncs(
        label=np.zeros(len(account.steps), dtype=np.int64),
        step=np.arange(len(account.steps)),
        of=step,
        rank=rank,
        start_ns=arrives,
        end_ns=ends[step],
        common_ns=arrives,
        launch_ns=arrives,
        same=step,
        behind=np.full(count, -1),
        on_main=np.ones(count, dtype=bool),
        thread=np.zeros(count, dtype=np.int64),
        waits=np.ones(count, dtype=bool),
        transfer_ns=np.zeros(count),
    )
    ranks = np.arange(len(account.ranks))
    of = np.concatenate([rank, ranks])
    at = np.concatenate([step, np.full(len(ranks), len(account.steps))])
    order = np.lexsort((at, of))
    kind = np.concatenate([np.full(count, MEETS), np.full(len(ranks), ENDS)])
    instance = np.concatenate([np.arange(count), np.full(len(ranks), -1)])
    points = Points(of[order], at[order], kind[order], instance[order])
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    own = own_ns.transpose(1, 0, 2)[rank, step]  # (I, K)
    row, of_kind = np.nonzero(own > 0)
    work = Work(place[row], step[row], of_kind, own[row, of_kind], np.zeros_like(row))
    return replace(account, own_ns=own_ns, syncs=syncs, points=points, work=work, begins_ns=np.zeros_like(ranks))
