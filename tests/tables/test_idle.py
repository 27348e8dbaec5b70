"""Device time in which nothing ran, charged to where the launching thread was."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from profiler_wrapper.place.placed import Placed, place_events
from profiler_wrapper.tables.idle import idle_per_place
from recordings import AUTOGRAD, Trace, analyse


def idle_of(trace: Trace) -> dict[tuple[str, str], int]:
    """Idle time per place, which is the same in whatever order a file has the events."""
    idle = idle_by_layer(place_events(trace.recording()))
    for other in trace.rotations():
        assert idle_by_layer(place_events(other.recording())) == idle
    return idle


def idle_by_layer(found: Placed) -> dict[tuple[str, str], int]:
    idle = idle_per_place(found)
    assert idle is not None
    return {
        (found.tree.layers[place.layer].name if place.layer >= 0 else place.reason, place.phase): ns
        for place, ns in zip(found.attribution.places, idle.tolist(), strict=True)
        if ns
    }


def test_a_gap_is_shared_by_where_the_cpu_was_in_it() -> None:
    # Nothing runs in [100, 200]; the CPU is in a until 130, between layers until 150, then in b.
    trace = Trace().mark("a", 0, 130).mark("b", 150, 300)
    trace.kernel("x", 50, 100, launched=10).kernel("y", 200, 220, launched=160)
    assert idle_of(trace) == {("a", "forward"): 30, ("", "other"): 20, ("b", "forward"): 50}


def test_a_stream_that_runs_leaves_no_gap() -> None:
    trace = Trace().mark("a", 0, 300).kernel("x", 50, 100, launched=10).kernel("y", 200, 220, launched=160)
    assert idle_of(trace.kernel("z", 90, 210, launched=11, stream=8)) == {}


def test_a_gap_belongs_to_the_thread_that_ended_it() -> None:
    trace = Trace().mark("a", 0, 300).op("aten::mm", 5, 8, sequence=1, forward_thread=0)
    trace.node("MmBackward0", 100, 250, number=1).kernel("x", 50, 100, launched=10)
    assert idle_of(trace.kernel("y", 200, 220, launched=160, thread=AUTOGRAD)) == {("a", "backward"): 100}


def test_a_gap_that_a_kernel_without_a_launch_ends_belongs_to_no_thread() -> None:
    trace = Trace().mark("a", 0, 300).kernel("x", 50, 100, launched=10).kernel("lost", 150, 200)
    assert idle_of(trace.kernel("y", 230, 240, launched=210)) == {("a", "forward"): 30}


def test_devices_are_idle_each_for_itself() -> None:
    trace = Trace().mark("a", 0, 300)
    for device in (0, 1):
        trace.kernel("x", 50, 100, launched=10, device=device)
        trace.kernel("y", 150 + 50 * device, 250, launched=12, device=device)
    assert idle_of(trace) == {("a", "forward"): 50 + 100}


def test_times_before_zero() -> None:
    trace = Trace().kernel("x", -90, -80, launched=-100).kernel("y", -30, -20, launched=-50).mark("a", -60, -40)
    assert idle_of(trace) == {("", "other"): 20 + 10, ("a", "forward"): 20}


def test_a_layers_idle_time_includes_the_layers_below() -> None:
    trace = Trace().mark(".", 0, 300).mark("a", 120, 150).kernel("x", 50, 100, launched=10)
    result = analyse(trace.kernel("y", 200, 220, launched=160).recording())
    assert {row.layer: row.idle_ns for row in result.layers} == {"Net": 100, "a": 30}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 80), st.integers(0, 12), st.integers(0, 1)), min_size=1, max_size=10),
    st.lists(st.tuples(st.integers(0, 80), st.integers(1, 20)), max_size=6),
)
def test_idle_is_span_less_busy(kernels: list[tuple[int, int, int]], marks: list[tuple[int, int]]) -> None:
    trace = Trace()
    for i, (start, length) in enumerate(marks):
        trace.mark(f"layer{i}", start, start + length)
    for i, (start, length, device) in enumerate(kernels):
        trace.kernel("k", start, start + length, launched=3 * i, device=device)
    expected = 0
    for device in (0, 1):
        mine = [(start, start + length) for start, length, on in kernels if on == device]
        if mine:
            busy = {instant for start, end in mine for instant in range(start, end)}
            expected += max(end for _, end in mine) - min(start for start, _ in mine) - len(busy)
    assert sum(idle_by_layer(place_events(trace.recording())).values()) == expected
