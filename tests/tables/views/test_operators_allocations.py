"""The largest allocations and what each op allocates, on recordings made by hand and against the trace file itself."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_traces import events, result
from memory_recordings import BASE_NS, held
from profiler_wrapper.place.placed import place_events
from profiler_wrapper.tables.memory.blocks import owned_memory
from profiler_wrapper.tables.memory.events import device_memory
from profiler_wrapper.tables.model import OpMemoryRow
from profiler_wrapper.tables.views.operators import allocation_rows, op_memory_rows
from recordings import Trace, analyse
from shared_traces import needs_traces

DDP = "ddp_training_with_memory.pt.trace.json.gz"


def one_layer() -> Trace:
    """In `a`: 100 that stay, and of what the `aten::empty` of an `aten::zeros` made 60 go after it and 8 within it."""
    trace = Trace().mark(".", 1000, 2000).mark("a", 1010, 1900)
    trace.op("aten::mm", 1020, 1040).memory(1030, 100, address=1)
    trace.op("aten::zeros", 1100, 1200).op("aten::empty", 1110, 1120).memory(1115, 60, address=200)
    trace.memory(1118, 8, address=300).memory(1160, -8, address=300).memory(1500, -60, address=200)
    return trace.memory(1950, 7, address=400)  # in the root, by no op


def test_allocations_by_hand() -> None:
    rows = analyse(one_layer().recording()).allocations
    found = [(r.size_bytes, r.allocated_ns, r.released_ns, r.layer, r.op, r.phase, r.category) for r in rows]
    assert found == [
        (100, 30, None, "a", "aten::mm", "forward", "activation"),
        (60, 115, 500, "a", "aten::zeros", "forward", "activation"),
        (8, 118, 160, "a", "aten::zeros", "forward", "workspace"),
        (7, 950, None, "Net", "", "forward", "activation"),
    ]


def test_ops_by_hand() -> None:
    assert analyse(one_layer().recording()).op_memory == (
        OpMemoryRow(op="aten::mm", allocations=1, allocated_bytes=100, kept_bytes=100, largest_bytes=100),
        OpMemoryRow(op="aten::zeros", allocations=2, allocated_bytes=68, kept_bytes=60, largest_bytes=60),
        OpMemoryRow(op="", allocations=1, allocated_bytes=7, kept_bytes=None, largest_bytes=7),
    )


def test_of_equal_allocations_the_earliest_come_first_and_at_most_500() -> None:
    trace = Trace().mark(".", 0, 10_000).op("aten::mm", 1, 9_999)
    for i in range(600):
        trace.memory(10 + i, 64 if i % 2 else 32, address=1000 * i)
    rows = analyse(trace.recording()).allocations
    assert [row.size_bytes for row in rows] == [64] * 300 + [32] * 200
    assert [row.allocated_ns for row in rows] == [*range(11, 610, 2), *range(10, 410, 2)]


def test_what_was_there_before_is_no_allocation() -> None:
    trace = Trace().mark(".", 0, 100).op("aten::mm", 10, 20).memory(15, 24, address=1).memory(50, -64, address=77)
    run = {"held": held((5, [(77, 64, "params", "weight")]))}
    analysis = analyse(trace.recording(metadata={"baseTimeNanoseconds": BASE_NS}), run=run)
    assert [(row.size_bytes, row.released_ns) for row in analysis.allocations] == [(24, None)]
    assert [(row.op, row.allocated_bytes) for row in analysis.op_memory] == [("aten::mm", 24)]
    assert analysis.memory["peak"]["allocated_bytes"] == 88


def test_without_memory_events_there_are_none() -> None:
    analysis = analyse(Trace().mark(".", 0, 100).op("aten::mm", 10, 20).recording())
    assert (analysis.allocations, analysis.op_memory) == ((), ())


@given(st.lists(st.tuples(st.integers(1, 500), st.integers(1, 1 << 40), st.integers(0, 3), st.booleans()), max_size=60))
def test_ops_add_up_to_all_allocations(events: list[tuple[int, int, int, bool]]) -> None:
    """`events`: (time, size, address, in an op). A block goes when its address is given out again, or is freed."""
    trace = Trace().mark(".", 0, 1000)
    for i in range(5):
        trace.op(f"aten::op{i}", 100 * i + 10, 100 * i + 90).op("aten::empty", 100 * i + 20, 100 * i + 60)
    taken: set[int] = set()
    sizes = []
    for i, (time, size, address, free) in enumerate(sorted(events)):
        if free and address in taken:
            trace.memory(time, -size, address=address, device=0)
            taken.discard(address)
        else:
            trace.memory(time, size, address=address, device=0)
            taken.add(address)
            sizes.append(size)
        assert i < 60
    recording = trace.recording()
    memory = device_memory(recording)
    found = place_events(recording)
    owned = None if memory is None else owned_memory(found, memory)
    rows = op_memory_rows(found, owned)
    assert sum(row.allocated_bytes for row in rows) == sum(sizes)
    assert sum(row.allocations for row in rows) == len(sizes)
    assert max((row.largest_bytes for row in rows), default=0) == max(sizes, default=0)
    assert all(0 <= (row.kept_bytes or 0) <= row.allocated_bytes for row in rows)
    largest = allocation_rows(found, owned)
    assert sorted((row.size_bytes for row in largest), reverse=True) == sorted(sizes, reverse=True)


@pytest.mark.full
@needs_traces
def test_rows_are_those_of_a_plain_reading_of_the_trace() -> None:
    """A dictionary of addresses and the file's own JSON give the same allocations."""
    analysis = result(DDP)
    device = int(analysis.memory["device"].removeprefix("cuda:"))
    told = [e for e in events(DDP) if e.get("name") == "[memory]"]
    told = [e for e in told if (e["args"]["Device Type"], e["args"]["Device Id"]) == (1, device)]
    told.sort(key=lambda event: event["ts"])
    alive: dict[int, int] = {}
    made: list[list[int | None]] = []
    begin_us = analysis.memory["curve"]["start_ns"] / 1000
    for event in told:
        address, size, time = event["args"]["Addr"], event["args"]["Bytes"], round((event["ts"] - begin_us) * 1000)
        if address in alive:
            made[alive.pop(address)][2] = time
        if size > 0:
            alive[address] = len(made)
            made.append([size, time, None])
    assert len(told) > 20_000
    expected = sorted(made, key=lambda row: -int(row[0] or 0))[:500]
    rows = analysis.allocations
    assert [row.size_bytes for row in rows] == [size for size, _, _ in expected]
    found_times = Counter((row.size_bytes, row.allocated_ns, row.released_ns) for row in rows)
    smallest = rows[-1].size_bytes
    assert {key for key in found_times if key[0] > smallest} == {
        (size, time, end) for size, time, end in made if size is not None and size > smallest
    }
    assert sum(row.allocated_bytes for row in analysis.op_memory) == sum(int(row[0] or 0) for row in made)
    assert sum(row.allocations for row in analysis.op_memory) == len(made)
