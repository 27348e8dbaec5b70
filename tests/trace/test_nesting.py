"""Nesting and own time against brute force: every nanosecond looked at, every pair of events compared."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profiler_wrapper.trace.nesting import crossed, nearest, nearest_above, nest, self_time


class Event(NamedTuple):
    lane: int
    start: int
    end: int


@st.composite
def events(draw: st.DrawFn, *, nested: bool = False, longest: int = 12) -> list[Event]:
    found: list[Event] = []
    for _ in range(draw(st.integers(0, 14))):
        start = draw(st.integers(0, longest))
        event = Event(draw(st.integers(0, 1)), start, draw(st.integers(start, longest)))
        if not (nested and any(_cross(event, other) for other in found)):
            found.append(event)
    return found


def _cross(a: Event, b: Event) -> bool:
    first, second = sorted((a, b), key=lambda e: e.start)
    return a.lane == b.lane and first.start < second.start < first.end < second.end


def columns(found: list[Event]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    table = np.array(found, dtype=np.int64).reshape(-1, 3)
    return table[:, 0].astype(np.int32), table[:, 1], table[:, 2]


def sort_key(found: list[Event], i: int) -> tuple[int, int, int]:
    """An enclosing event before what it encloses; of two alike the first in the file."""
    return found[i].start, -found[i].end, i


def brute_parent(found: list[Event], i: int) -> int:
    """Of the events that enclose this one fully, the latest-starting, shortest, last in the file."""
    enclosing = [
        j
        for j in range(len(found))
        if found[j].lane == found[i].lane and sort_key(found, j) < sort_key(found, i) and found[j].end >= found[i].end
    ]
    return max(enclosing, key=lambda j: sort_key(found, j), default=-1)


@settings(max_examples=150, deadline=None)
@given(events())
def test_parents_are_the_innermost_enclosing_events(found: list[Event]) -> None:
    nesting = nest(*columns(found))
    assert nesting.parent.tolist() == [brute_parent(found, i) for i in range(len(found))]
    place = {i: place for place, i in enumerate(nesting.order.tolist())}
    assert all(place[p] < place[i] for i, p in enumerate(nesting.parent.tolist()) if p >= 0)


@settings(max_examples=150, deadline=None)
@given(events())
def test_crossing_lanes(found: list[Event]) -> None:
    crossing = {
        a.lane
        for i, a in enumerate(found)
        for b in found[:i]
        if a.lane == b.lane and max(a.start, b.start) < min(a.end, b.end) and _overlap_partly(a, b)
    }
    assert set(nest(*columns(found)).crossing_lanes) == crossing


def _overlap_partly(a: Event, b: Event) -> bool:
    return not (a.start <= b.start and b.end <= a.end) and not (b.start <= a.start and a.end <= b.end)


def brute_self_time(found: list[Event], counts: list[bool], takes: list[bool]) -> list[int]:
    """Each nanosecond inside an event that counts goes to the live event that started last."""
    own = [0] * len(found)
    for lane in {event.lane for event in found}:
        for instant in range(max(event.end for event in found)):
            live = [i for i, e in enumerate(found) if e.lane == lane and e.start <= instant < e.end]
            if any(counts[i] for i in live):
                own[max((i for i in live if takes[i]), key=lambda i: sort_key(found, i))] += 1
    return own


@st.composite
def counted_events(draw: st.DrawFn, *, nested: bool) -> tuple[list[Event], list[bool], list[bool]]:
    found = draw(events(nested=nested))
    flags = [draw(st.sampled_from(["counts", "takes", "ignored"])) for _ in found]
    return found, [flag == "counts" for flag in flags], [flag != "ignored" for flag in flags]


@pytest.mark.parametrize("nested", [True, False])
def test_own_time_is_that_of_every_nanosecond(nested: bool) -> None:
    @settings(max_examples=150, deadline=None)
    @given(counted_events(nested=nested))
    def check(case: tuple[list[Event], list[bool], list[bool]]) -> None:
        found, counts, takes = case
        lane, start, end = columns(found)
        own = self_time(
            nest(lane, start, end), lane, start, end - start, counts=np.array(counts, bool), takes=np.array(takes, bool)
        )
        assert own.tolist() == brute_self_time(found, counts, takes)
        union = sum(
            any(counts[i] and e.lane == lane_ and e.start <= t < e.end for i, e in enumerate(found))
            for lane_ in (0, 1)
            for t in range(12)
        )
        assert int(own.sum()) == union

    check()


def test_what_only_takes_has_no_time_outside_of_what_counts() -> None:
    # A mark [0, 100] around an op [10, 40], which has a mark [20, 30] inside it.
    found = [Event(0, 0, 100), Event(0, 10, 40), Event(0, 20, 30)]
    lane, start, end = columns(found)
    counts = np.array([False, True, False])
    own = self_time(nest(lane, start, end), lane, start, end - start, counts=counts, takes=~counts)
    assert own.tolist() == [0, 20, 10]


def test_crossing_events_share_time_in_order_of_start() -> None:
    # [0, 10] and [5, 15] cross: from 5 on, time is the later one's.
    lane, start, end = columns([Event(0, 0, 10), Event(0, 5, 15)])
    nesting = nest(lane, start, end)
    assert nesting.parent.tolist() == [-1, -1]
    assert self_time(nesting, lane, start, end - start, counts=np.array([True, True])).tolist() == [5, 10]


def test_times_of_different_threads_do_not_nest() -> None:
    assert nest(*columns([Event(0, 0, 10), Event(1, 2, 3)])).parent.tolist() == [-1, -1]


def test_a_zero_long_event_belongs_to_the_later_neighbour_at_a_shared_boundary() -> None:
    found = [Event(0, 0, 5), Event(0, 5, 9), Event(0, 5, 5)]
    assert nest(*columns(found)).parent.tolist() == [-1, -1, 1]
    assert nest(*columns(found[:1] + found[2:])).parent.tolist() == [-1, 0]


@settings(max_examples=100, deadline=None)
@given(events(), st.data())
def test_nearest_is_a_walk_upwards(found: list[Event], data: st.DataObject) -> None:
    parent = nest(*columns(found)).parent
    chosen = np.array([data.draw(st.booleans()) for _ in found], dtype=bool)

    def walk(i: int) -> int:
        while i >= 0 and not chosen[i]:
            i = int(parent[i])
        return i

    near = nearest(parent, chosen)
    assert near.tolist() == [walk(i) for i in range(len(found))]
    assert nearest_above(parent, near).tolist() == [walk(int(p)) for p in parent]


def test_nearest_over_a_deep_chain() -> None:
    depth = 5000
    parent = np.arange(-1, depth - 1, dtype=np.int32)
    chosen = np.zeros(depth, dtype=bool)
    assert set(nearest(parent, chosen).tolist()) == {-1}
    chosen[0] = True
    assert set(nearest(parent, chosen).tolist()) == {0}


@settings(max_examples=100, deadline=None)
@given(events(), events())
def test_crossed(found: list[Event], others: list[Event]) -> None:
    _, start, end = columns(found)
    _, other_start, other_end = columns(others)
    expected = [
        any(a.start < b.start < a.end < b.end or b.start < a.start < b.end < a.end for b in others) for a in found
    ]
    assert crossed(start, end, other_start, other_end).tolist() == expected
