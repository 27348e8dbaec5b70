"""Communications that several ranks have: who takes part, who waits for whom, and when each was launched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from profiler_wrapper.ranks.clocks import CLOSE_ENDS_NS, ENDS_TO_STARTS, align
from profiler_wrapper.ranks.model import SELF_KINDS, Bool, Clocks, Float, Int

NEARLY_ALL: Final = 0.9  # of a wait, of a jump, of what members of a communication come apart
RECEIVES: Final = 2  # a role of names
_COMMUNICATION: Final = SELF_KINDS.index("communication")


@dataclass(frozen=True, slots=True, eq=False)
class Syncs:
    """Communications that several ranks have: M, and I instances, one for each member."""

    label: Int  # (M,) in the table `labels`
    step: Int  # (M,) index
    of: Int  # (I,) its sync
    rank: Int  # (I,) index
    start_ns: Int  # (I,) by the rank's own clock
    end_ns: Int  # (I,)
    common_ns: Int  # (I,) start by the common clock
    launch_ns: Int  # (I,) start, or earlier, of what was queued behind another in its stream; -1: not known
    same: Int  # (I,) a number for its name, its role and its place in the sequence, whatever the group
    behind: Int  # (I,) that which ended last before it in its stream; -1: none, or on the main thread
    on_main: Bool  # (I,)
    thread: Int  # (I,) -1: not known
    waits: Bool  # (I,) for the last arrival
    transfer_ns: Float  # (I,)

    @property
    def begin_ns(self) -> Float:
        """(M,) the last arrival, by the common clock, as the typical member has it; since the first arrival of all."""
        base = int(self.common_ns.min()) if len(self.common_ns) else 0  # since the first: exact as floats
        begin = (self.common_ns - base) + (self.end_ns - self.start_ns) - self.transfer_ns
        total = np.bincount(self.of, weights=np.where(self.waits, begin, 0.0), minlength=len(self.label))
        return total / np.maximum(1, np.bincount(self.of, weights=self.waits, minlength=len(self.label)))


def distinct(*columns: Int) -> tuple[list[Int], Int]:
    """The distinct rows of columns, in order, and the number of each row among them."""
    key = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        least = column.min(initial=0)
        key = key * (int(column.max(initial=0)) - least + 1) + column - least
    _, first, of = np.unique(key, return_index=True, return_inverse=True)
    return [column[first] for column in columns], of


def find_syncs(
    rows: dict[str, Int], rank: Int, step: Int, ranks: Int, clocks: Clocks | None, *, one_clock: bool
) -> tuple[Syncs, Int]:
    """The syncs, and which instance each row is (-1: none)."""
    chosen = np.flatnonzero(rows["matched"] & (rows["kind"] >= 0))
    instance = np.full(len(rank), -1)
    instance[chosen] = np.arange(len(chosen))
    (step_of, label_of, _), of = distinct(step[chosen], rows["label"][chosen], rows["sequence"][chosen])
    start, end, role = rows["start_ns"][chosen], rows["end_ns"][chosen], rows["role"][chosen]
    common = start if clocks is None else align(clocks, ranks[rank[chosen]], start)
    last = np.full(len(step_of), np.iinfo(np.int64).min)
    np.maximum.at(last, of, common)
    together = not one_clock or _end_together(rows["label"][chosen], rank[chosen], of, start, end)
    # Or nobody leaves before the last one comes, however late a busy machine lets its threads go on.
    first, left = np.full((2, len(step_of)), np.iinfo(np.int64).max)
    np.minimum.at(first, of, common)
    np.minimum.at(left, of, common + (end - start))
    labels = label_of - label_of.min(initial=0)
    early, apart = (np.bincount(labels, weights=each) for each in (np.maximum(last - left, 0), last - first))
    met = early <= (1 - NEARLY_ALL) * apart
    together |= met[labels[of]]
    waits = np.asarray(together | (role == RECEIVES))
    if not waits.any():  # what is recorded is when ranks waited, not when they came: as if they came then
        waits = np.ones_like(waits)
    transfer = rows["shortest_ns"][chosen].astype(np.float64)
    # Where some do not wait, the shortest span is no transfer: that begins with the last arrival.
    free = np.zeros(len(step_of), dtype=bool)
    np.logical_or.at(free, of, ~waits)
    from_last = common + (end - start) - last[of]
    transfer = np.where(free[of], np.where(waits, np.maximum(from_last, 0), end - start), transfer)
    on_main, thread = rows["on_main"][chosen] > 0, rows["thread"][chosen]
    syncs = Syncs(
        label=label_of,
        step=step_of,
        of=of,
        rank=rank[chosen],
        start_ns=start,
        end_ns=end,
        common_ns=common,
        launch_ns=start,
        same=distinct(rows["common"][chosen], role, rows["sequence"][chosen])[1],
        behind=_before_in_stream(rank[chosen], thread, np.flatnonzero(~on_main), start, end),
        on_main=on_main,
        thread=thread,
        waits=waits,
        transfer_ns=transfer,
    )
    return syncs, instance


def _end_together(label: Int, rank: Int, of: Int, start: Int, end: Int) -> Bool:
    """Per instance whether members of such a communication end it together: ends differ less than starts do.

    How far clocks are apart does not matter, only how that changes from one to the next, as typical: a thread that
    comes late once tells nothing.
    """
    order = np.lexsort((of, rank, label))
    same = (np.diff(label[order]) == 0) & (np.diff(rank[order]) == 0)
    of_change = label[order][1:][same]
    labels = np.arange(int(label.max(initial=-1)) + 1)
    first, after = (np.searchsorted(of_change, labels, side) for side in ("left", "right"))
    typical = []
    for times in (start, end):
        apart = (times - times.min(initial=0)).astype(np.float64)
        apart -= (np.bincount(of, weights=apart) / np.maximum(1, np.bincount(of)))[of]
        change = np.abs(np.diff(apart[order]))[same]
        change = np.append(change[np.lexsort((change, of_change))], 0.0)
        typical.append(np.where(after > first, change[(first + after) // 2], 0.0))
    starts, ends = typical
    return np.asarray(((ends < ENDS_TO_STARTS * starts) | (ends < CLOSE_ENDS_NS))[label])


def _before_in_stream(rank: Int, thread: Int, beside: Int, start: Int, end: Int) -> Int:
    """Of each communication beside the main thread that which ended last before it in its stream, -1 of the others."""
    before = np.full(len(rank), -1)
    stream = distinct(rank[beside], thread[beside])[1]
    at = np.concatenate([end[beside], start[beside]])
    of = np.concatenate([stream, stream])
    is_start = np.repeat([False, True], len(beside))
    takes_no_time = np.tile(end[beside] <= start[beside], 2)
    turn = np.where(is_start, 1, np.where(takes_no_time, 2, 0))  # nothing comes behind itself
    order = np.lexsort((turn, at, of))
    last = np.maximum.accumulate(np.where(is_start[order], -1, np.arange(len(order))))
    starts = np.flatnonzero(is_start[order])
    which, behind = order[starts] - len(beside), last[starts]
    known = (behind >= 0) & (of[order[behind]] == of[order[starts]])
    before[beside[which[known]]] = beside[order[behind[known]]]
    return before


@dataclass(frozen=True, slots=True, eq=False)
class MainSpans:
    """Spans of main threads that are no communication, by rank, step and kind, in order. N of them."""

    row: Int  # (N,)
    of: Int  # (N,) (its rank * steps + its step) * kinds + its kind
    number: Int  # (N,) among those of its rank, step and kind
    most: int  # above all numbers

    def find(self, of: Int, number: Int | int) -> tuple[Int, Bool]:
        """The places of spans, and whether they are there."""
        keys, wanted = self.of * self.most + self.number, of * self.most + number
        place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        return place, keys[place] == wanted


def number_spans(rows: dict[str, Int], rank: Int, step: Int, steps: int) -> MainSpans:
    """The spans, each with its number."""
    row = np.flatnonzero((rows["on_main"] > 0) & (rows["kind"] >= 0) & (rows["kind"] != _COMMUNICATION))
    of = (rank[row] * steps + step[row]) * len(SELF_KINDS) + rows["kind"][row]
    order = np.lexsort((rows["start_ns"][row], of))
    row, of = row[order], of[order]
    number = np.arange(len(row)) - np.searchsorted(of, of)
    return MainSpans(row, of, number, int(number.max(initial=0)) + 1)


def find_launches(rows: dict[str, Int], spans: MainSpans, steps: int, syncs: Syncs) -> Int:
    """When each communication was launched: as it starts, or before that where it was queued in its stream.

    That shows where it was not queued, on other ranks or in other steps: in which span of the main thread, how far on.
    """
    queued = syncs.behind >= 0
    queued[queued] = syncs.start_ns[queued] <= syncs.end_ns[syncs.behind[queued]]
    launch = np.where(queued, -1, syncs.start_ns)
    if not queued.any() or not len(spans.row):
        return launch
    start, end = rows["start_ns"][spans.row], rows["end_ns"][spans.row]
    base = min(rows["start_ns"].min(), syncs.start_ns.min())
    longest = max(rows["end_ns"].max(), syncs.end_ns.max()) - base + 1
    begun = spans.of // (len(SELF_KINDS) * steps) * longest + start - base
    in_time = np.lexsort((spans.row, begun))
    launched = syncs.rank * longest + syncs.start_ns - base
    # Where one span begins as another ends: after that.
    place = in_time[np.searchsorted(begun, launched, sorter=in_time) - 1]
    at_step = syncs.rank * steps + syncs.step[syncs.of]
    within = (start[place] < syncs.start_ns) & (spans.of[place] // len(SELF_KINDS) == at_step)
    part = np.clip((syncs.start_ns - start[place]) / np.maximum(1, end[place] - start[place]), 0.0, 1.0)
    which = spans.of[place] % len(SELF_KINDS) * spans.most + spans.number[place]
    for same in np.unique(syncs.same[queued]).tolist():
        seen = np.flatnonzero((syncs.same == same) & ~queued & within & ~syncs.on_main)
        if not len(seen):
            continue
        found, counts = np.unique(which[seen], return_counts=True)
        usual = int(found[counts.argmax()])
        far = float(np.median(part[seen[which[seen] == usual]]))
        mine = np.flatnonzero((syncs.same == same) & queued)
        kind, number = divmod(usual, spans.most)
        there, known = spans.find(at_step[mine] * len(SELF_KINDS) + kind, number)
        at = start[there] + (far * (end[there] - start[there])).astype(np.int64)
        launch[mine[known]] = np.minimum(at, syncs.start_ns[mine])[known]
    return launch
