"""Waits of the CPU for the device: which calls wait, what asked for it, where, and what does not count."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from profiler_wrapper.place.placed import place_events
from profiler_wrapper.tables.model import SynchronisationRow
from profiler_wrapper.tables.views.waits import synchronisation_rows
from profiler_wrapper.trace.recording import Category, Lane
from recordings import AUTOGRAD, MAIN, Trace


def rows_of(trace: Trace) -> tuple[SynchronisationRow, ...]:
    return synchronisation_rows(place_events(trace.recording()))


def one(trace: Trace) -> SynchronisationRow:
    (row,) = rows_of(trace)
    return row


def said(trace: Trace) -> list[tuple[str, str, str | None, str, int, int]]:
    return [(row.kind, row.op, row.layer, row.phase, row.count, row.wait_ns) for row in rows_of(trace)]


def step() -> Trace:
    """A step with one layer and a kernel."""
    trace = Trace().annotation("ProfilerStep#3", 0, 1000).mark("gate", 100, 500)
    return trace.op("aten::mm", 110, 120).kernel("gemm", 130, 160, launched=115)


def copy(trace: Trace, name: str, begin: int, end: int, *, call: str, called: int, returned: int) -> Trace:
    """A copy on the device, and the call that made it."""
    trace.kernel(name, begin, end, category=Category.MEMCPY, correlation=900 + called)
    return trace.launch(called, returned, correlation=900 + called, name=call)


def test_item_by_hand() -> None:
    trace = step().op("aten::item", 200, 300).op("aten::_local_scalar_dense", 205, 295)
    copy(trace, "Memcpy DtoH (Device -> Pinned)", 240, 245, call="cudaMemcpyAsync", called=210, returned=220)
    trace.launch(230, 280, name="cudaStreamSynchronize")
    assert said(trace) == [("item", "aten::item", "gate", "forward", 1, 50)]


def test_bool_of_a_tensor_is_an_item() -> None:
    trace = step().op("aten::is_nonzero", 200, 300).op("aten::item", 205, 295).op("aten::_local_scalar_dense", 206, 290)
    trace.launch(210, 250, name="hipStreamSynchronize")
    assert said(trace) == [("item", "aten::is_nonzero", "gate", "forward", 1, 40)]


def test_an_index_by_a_mask_is_a_nonzero() -> None:
    trace = step().op("aten::index", 200, 300).op("aten::nonzero", 210, 290)
    trace.launch(220, 230, name="cudaStreamSynchronize").launch(240, 270, name="cudaStreamSynchronize")
    assert said(trace) == [("nonzero", "aten::index", "gate", "forward", 1, 40)]  # one op, two calls


def test_a_tensor_to_the_cpu_is_a_blocking_copy() -> None:
    trace = step().op("aten::to", 200, 400).op("aten::_to_copy", 205, 395).op("aten::copy_", 210, 390)
    copy(trace, "Memcpy DtoH (Device -> Pageable)", 290, 320, call="cudaMemcpyAsync", called=220, returned=330)
    trace.launch(340, 345, name="cudaStreamSynchronize")
    assert said(trace) == [("blocking copy", "aten::to", "gate", "forward", 1, 110 + 5)]


def test_a_pageable_copy_that_has_returned_before_it_began_does_not_wait() -> None:
    trace = step().op("aten::to", 200, 400).op("aten::copy_", 210, 390)
    copy(trace, "Memcpy HtoD (Pageable -> Device)", 290, 320, call="cudaMemcpyAsync", called=220, returned=230)
    assert said(trace) == []


def test_a_pinned_copy_does_not_wait() -> None:
    trace = step().op("aten::to", 200, 400).op("aten::copy_", 210, 390)
    copy(trace, "Memcpy HtoD (Pinned -> Device)", 230, 320, call="cudaMemcpyAsync", called=220, returned=330)
    assert said(trace) == []


def test_copies_that_always_wait() -> None:
    trace = step()
    copy(trace, "Memcpy DtoH (Device -> Host)", 300, 320, call="hipMemcpyWithStream", called=200, returned=330)
    assert said(trace) == [("blocking copy", "hipMemcpyWithStream", "gate", "forward", 1, 130)]
    trace = step()
    copy(trace, "Memcpy DtoD (Device -> Device)", 300, 320, call="cudaMemcpy", called=200, returned=210)
    assert said(trace) == []


def test_synchronisations_outside_of_ops() -> None:
    trace = step().launch(600, 700, name="cudaDeviceSynchronize").launch(710, 715, name="cudaEventSynchronize")
    trace.launch(200, 220, name="cudaStreamSynchronize").launch(230, 240, name="cudaStreamSynchronize")
    trace.launch(300, 310, name="cudaStreamWaitEvent").launch(310, 320, name="cudaEventQuery")  # no waits
    assert said(trace) == [
        ("device", "cudaDeviceSynchronize", "", "other", 1, 100),
        ("stream", "cudaStreamSynchronize", "gate", "forward", 2, 30),
        ("event", "cudaEventSynchronize", "", "other", 1, 5),
    ]


def test_the_op_is_as_torchs_own_callers_have_it() -> None:
    trace = step().op("vllm::moe", 200, 300).op("aten::item", 210, 290).launch(220, 250, name="cudaStreamSynchronize")
    assert one(trace).op == "aten::item"
    trace = step().op("custom::op", 200, 300).launch(220, 250, name="cudaStreamSynchronize")
    assert (one(trace).kind, one(trace).op) == ("stream", "custom::op")


def test_waits_in_backward() -> None:
    trace = step().op("aten::mm", 130, 140, sequence=4, forward_thread=0)
    trace.node("MmBackward0", 600, 700, number=4).op("aten::nonzero", 610, 690, thread=AUTOGRAD)
    trace.launch(620, 660, thread=AUTOGRAD, name="cudaStreamSynchronize")
    assert said(trace) == [("nonzero", "aten::nonzero", "gate", "backward", 1, 40)]


def test_outside_of_the_steps_nothing_counts() -> None:
    trace = step().op("aten::item", 1100, 1200).launch(1110, 1150, name="cudaStreamSynchronize")
    assert said(trace) == []


def test_the_profilers_own_wait_does_not_count() -> None:
    stopped = step().launch(900, 990, name="cudaDeviceSynchronize").python("torch/autograd/profiler.py(3): f", 890, 995)
    assert said(stopped) == []
    assert said(step().launch(900, 990, name="cudaDeviceSynchronize"))[0][0] == "device"  # of the user's


def test_where_nothing_marks_steps_the_last_wait_is_the_profilers() -> None:
    trace = Trace().op("aten::mm", 110, 120).kernel("gemm", 130, 160, launched=115)
    trace.launch(10, 20, name="hipDeviceSynchronize").launch(150, 200, name="hipDeviceSynchronize")
    assert said(trace) == []
    trace.op("aten::mm", 300, 310)
    assert said(trace) == [("device", "hipDeviceSynchronize", None, "other", 1, 50)]


def test_threads_without_ops_hold_up_nothing() -> None:
    trace = step().launch(200, 300, thread=77, name="cudaEventSynchronize")
    assert said(trace) == []


def test_a_wait_that_only_cupti_tells_of_counts() -> None:
    trace = step()
    trace._span(Category.SYNC, "Stream Sync", 200, 250, Lane(0, 7), correlation=41)
    trace._span(Category.SYNC, "Stream Wait Event", 260, 290, Lane(0, 7), correlation=42)
    assert said(trace) == [("stream", "Stream Sync", None, "other", 1, 50)]
    trace.launch(201, 249, correlation=41, name="cudaStreamSynchronize")
    assert said(trace) == [("stream", "cudaStreamSynchronize", "gate", "forward", 1, 48)]


def test_lines_of_waits() -> None:
    trace = step().python("train.py(3): main", 0, 1000)
    for begin, line, length in ((200, 8, 10), (250, 9, 30), (300, 8, 5)):
        trace.python(f"model.py({line}): gate", begin - 5, begin + 45).op("aten::item", begin, begin + 40)
        trace.launch(begin + 2, begin + 2 + length, name="cudaStreamSynchronize")
    row = one(trace)
    assert (row.count, row.wait_ns, row.sources) == (3, 45, ("model.py:9", "model.py:8"))


def test_on_a_cpu_nothing_waits() -> None:
    trace = (
        Trace().annotation("ProfilerStep#1", 0, 100).op("aten::item", 10, 50).op("aten::_local_scalar_dense", 12, 40)
    )
    assert rows_of(trace) == ()


# --- laws ---


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_every_wait_in_a_step_is_in_one_row(data: st.DataObject) -> None:
    trace, small = step(), st.integers(0, 1300)
    for _ in range(data.draw(st.integers(1, 12))):
        start, length, thread = data.draw(small), data.draw(st.integers(1, 200)), data.draw(st.sampled_from([MAIN, 9]))
        match data.draw(st.integers(0, 2)):
            case 0:
                name = data.draw(st.sampled_from(["aten::item", "aten::to", "x::y"]))
                trace.op(name, start, start + length, thread=thread)
            case 1:
                trace.mark(data.draw(st.sampled_from(["a", "b.c"])), start, start + length, thread=thread)
            case _:
                trace.launch(start, start + length, thread=thread, name="cudaStreamSynchronize")
    recording = trace.op("aten::mm", 0, 1, thread=9).op("aten::mm", 1500, 1501, thread=9).recording()
    spans = recording.spans
    waits = [i for i in range(len(spans)) if recording.name_of(i) == "cudaStreamSynchronize"]
    expected = sum(int(spans.duration_ns[i]) for i in waits if spans.start_ns[i] < 1000)
    rows = synchronisation_rows(place_events(recording))
    assert sum(row.wait_ns for row in rows) == expected
    assert sum(row.count for row in rows) <= len(waits)
    assert len({(row.kind, row.op, row.layer, row.phase) for row in rows}) == len(rows)
