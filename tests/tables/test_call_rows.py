"""Memory per call of a layer, from hand-written allocations."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profiler_wrapper.tables.call_rows import LayerCall
from profiler_wrapper.tables.model import Analysis
from recordings import AUTOGRAD, Trace, analyse


def call(result: Analysis, layer: str, index: int = 0) -> LayerCall:
    return [c for c in result.calls if c.layer == layer][index]


def result_of(trace: Trace) -> Analysis:
    return analyse(trace.op("aten::mm", 1, 2).recording())


def two_layers(**where: Any) -> Trace:
    """a keeps 100 of 150 bytes, its child 40 of them; b frees what a allocated and keeps nothing."""
    return (
        Trace()
        .memory(5, 1000, address=1, **where)  # before the model
        .mark(".", 10, 200)
        .mark("a", 20, 100)
        .memory(30, 60, address=2, **where)
        .mark("a.x", 40, 80)
        .memory(50, 40, address=3, **where)
        .memory(60, 25, address=4, **where)
        .memory(70, -25, address=4, **where)
        .memory(90, 25, address=4, **where)
        .mark("b", 110, 190)
        .memory(120, -25, address=4, **where)
        .memory(130, 500, address=5, **where)
        .memory(150, -500, address=5, **where)
        .memory(300, -60, address=2, **where)  # backward frees
    )


def test_what_a_layer_finds_leaves_needs_and_keeps() -> None:
    result = result_of(two_layers())
    a, x, b, root = (call(result, name) for name in ("a", "a.x", "b", "Net"))
    assert (a.entry_allocated_bytes, a.exit_allocated_bytes, a.peak_bytes) == (1000, 1125, 1125)
    assert (x.entry_allocated_bytes, x.exit_allocated_bytes, x.peak_bytes) == (1060, 1100, 1125)
    assert (b.entry_allocated_bytes, b.exit_allocated_bytes, b.peak_bytes) == (1125, 1100, 1600)
    assert (root.entry_allocated_bytes, root.exit_allocated_bytes, root.peak_bytes) == (1000, 1100, 1600)
    assert [c.retained_bytes for c in (x, a, b, root)] == [40, 100, 0, 100]
    rows = {row.layer: row for row in result.layers}
    assert [rows[name].self_retained_bytes for name in ("a.x", "a", "b", "Net")] == [40, 60, 0, 0]
    assert result.memory["peak"]["allocated_bytes"] == 1600


def test_an_accelerator_says_what_it_has_reserved_and_a_cpu_does_not() -> None:
    on_cpu, on_device = result_of(two_layers()), result_of(two_layers(device=0, reserved=4096))
    assert (on_cpu.memory["device"], on_device.memory["device"]) == ("cpu", "cuda:0")
    assert call(on_cpu, "a").entry_reserved_bytes is None
    assert call(on_device, "a").entry_reserved_bytes == 4096
    assert call(on_device, "a").peak_bytes == call(on_cpu, "a").peak_bytes


def test_the_accelerator_with_the_highest_peak_is_analysed_and_the_others_are_named() -> None:
    trace = Trace().mark("a", 0, 100).memory(5, 1 << 40, address=1)  # a CPU's
    trace._allocated = 0
    for i in range(3):
        trace.memory(10 + i, 1024, address=2 + i, device=0)
    trace._allocated = 0
    trace.memory(20, 1 << 30, address=9, device=1)
    result = result_of(trace)
    assert result.memory["device"] == "cuda:1"
    assert result.memory["peak"]["allocated_bytes"] == 1 << 30
    assert "memory is that of cuda:1; cuda:0 (3.0 KiB at most) is not analysed" in result.warnings
    alone = result_of(Trace().mark("a", 0, 100).memory(5, 8, address=1).memory(6, 8, address=1, device=0))
    assert not [warning for warning in alone.warnings if "not analysed" in warning]


def test_a_layer_without_allocations_has_what_it_found_as_its_peak() -> None:
    result = result_of(Trace().memory(5, 70, address=1).mark("quiet", 10, 20).memory(30, 5, address=2))
    quiet = call(result, "quiet")
    assert (quiet.entry_allocated_bytes, quiet.exit_allocated_bytes, quiet.peak_bytes) == (70, 70, 70)


def test_a_layer_before_the_first_and_after_the_last_event() -> None:
    trace = Trace().mark("first", 0, 4).memory(5, 70, address=1).memory(6, -70, address=1).mark("last", 10, 20)
    result = result_of(trace)
    assert [call(result, name).peak_bytes for name in ("first", "last")] == [0, 0]


def test_frees_of_what_was_there_before_never_make_a_total_negative() -> None:
    trace = Trace().memory(5, 10, address=1).memory(6, -300, address=9).memory(7, -10, address=1).mark("a", 10, 20)
    result = result_of(trace.memory(15, 20, address=9).memory(30, -20, address=9))
    a = call(result, "a")
    assert (a.entry_allocated_bytes, a.exit_allocated_bytes) == (0, 20)
    assert result.memory["peak"]["allocated_bytes"] == 310  # what was freed at 6 was there at 5


def test_backward_frees_do_not_count_before_they_happen() -> None:
    # Kept until backward begins, though the last output is dropped right after forward.
    trace = Trace().mark(".", 0, 100).op("aten::mul", 10, 20, sequence=1, forward_thread=0)
    trace.memory(30, 50, address=1).memory(40, 8, address=2).memory(110, -8, address=2)
    trace.node("MulBackward0", 200, 300, number=1).memory(250, -50, address=1, thread=AUTOGRAD)
    result = result_of(trace)
    assert call(result, "Net").exit_allocated_bytes == 58
    assert call(result, "Net").retained_bytes == 50


@pytest.mark.parametrize(("freed", "retained"), [(199, 50), (200, 50), (201, 58)])
@pytest.mark.parametrize("follows", ["backward", "forward"])
def test_what_is_gone_when_backward_or_the_next_forward_begins_was_not_kept(
    freed: int, retained: int, follows: str
) -> None:
    trace = Trace().mark(".", 0, 100).op("aten::mul", 10, 20, sequence=1, forward_thread=0)
    trace.memory(30, 50, address=1).memory(40, 8, address=2).memory(freed, -8, address=2)
    if follows == "forward":
        trace.mark(".", 200, 300).op("aten::mul", 210, 220, sequence=2, forward_thread=0)
        trace.memory(350, -50, address=1)  # kept for the loss alone
    result = result_of(trace.node("MulBackward0", 200 if follows == "backward" else 400, 500, number=1))
    assert call(result, "Net").retained_bytes == retained


def test_an_allocation_belongs_to_the_layer_that_begins_where_another_ends() -> None:
    trace = Trace().mark(".", 0, 300).mark("a", 0, 50).mark("b", 50, 100).mark("b.x", 60, 100).mark("c", 150, 200)
    for i, time in enumerate((50, 80, 100, 120, 200)):
        trace.memory(time, 1 << i, address=i + 1)
    rows = {row.layer: row.self_retained_bytes for row in result_of(trace).layers}
    assert rows == {"a": 0, "b": 1, "b.x": 2, "c": 0, "Net": 4 + 8 + 16}


def test_an_allocation_belongs_to_the_layer_of_its_own_thread() -> None:
    trace = Trace().mark("a", 0, 100).mark("b", 0, 100, thread=9)
    result = result_of(
        trace.memory(10, 30, address=1).memory(20, 7, address=2, thread=9).memory(30, 1, address=3, thread=5)
    )
    assert (call(result, "a").retained_bytes, call(result, "b").retained_bytes) == (30, 7)


def test_an_address_used_again_is_another_allocation() -> None:
    trace = Trace().mark("a", 0, 50).memory(10, 30, address=1).memory(20, -30, address=1).memory(40, 11, address=1)
    assert call(result_of(trace), "a").retained_bytes == 11


def test_steps_have_peaks() -> None:
    trace = Trace().annotation("ProfilerStep#0", 0, 100).annotation("ProfilerStep#1", 100, 200)
    trace.memory(10, 50, address=1).memory(90, -30, address=2).memory(150, 5, address=3)
    assert [step.peak_bytes for step in result_of(trace).steps] == [80, 55]


def test_memory_not_recorded_is_not_known() -> None:
    result = result_of(Trace().mark("a", 0, 100))
    (row,) = result.rows("a")
    assert (row.allocated_bytes, row.peak_bytes, row.retained_bytes) == (None, None, None)
    assert result.memory["device"] is None
    assert any("memory is not available" in warning for warning in result.warnings)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 99), st.integers(0, 4)), max_size=20),
    st.lists(st.tuples(st.integers(0, 90), st.integers(1, 9)), min_size=1, max_size=5),
)
def test_peaks_are_those_of_every_instant(events: list[tuple[int, int]], calls: list[tuple[int, int]]) -> None:
    """An event at a time allocates at its address, or frees what is there; memory begins empty."""
    trace, held, total = Trace(), {}, [0]
    levels: list[tuple[int, int]] = []  # (time, allocated from then on)
    for time, address in sorted(set(events)):
        size = -held.pop(address) if address in held else held.setdefault(address, 8 + address)
        total.append(total[-1] + size)
        levels.append((time, total[-1]))
        trace.memory(time, size, address=address)
    for i, (start, length) in enumerate(calls):
        trace.mark(f"l{i}", start, start + length)
    result = result_of(trace)
    for i, (start, length) in enumerate(calls):
        found = call(result, f"l{i}")
        before = [level for time, level in levels if time < start]
        entry = before[-1] if before else 0
        inside = [level for time, level in levels if start <= time <= start + length]
        if levels:
            assert found.entry_allocated_bytes == entry
            assert found.peak_bytes == max([entry, *inside])
            assert found.exit_allocated_bytes == [entry, *inside][-1]
        else:
            assert found.peak_bytes is None


def test_means_over_calls() -> None:
    trace = Trace().mark("a", 0, 10).memory(5, 10, address=1).mark("a", 20, 30).memory(25, 30, address=2)
    (row,) = result_of(trace).rows("a")
    assert (row.allocated_bytes, row.entry_allocated_bytes, row.peak_bytes) == (25.0, 5.0, 40)
    assert row.retained_bytes == pytest.approx(20.0)
