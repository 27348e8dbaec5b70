"""Memory over time: sums, the peak, moments, owners; and what the result says of them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memory_recordings import BASE_NS, assert_adds_up, category_at, held, use_of
from profiler_wrapper.reports.result_json import from_dict, to_dict
from profiler_wrapper.tables.model import CATEGORIES
from profiler_wrapper.trace.recording import FailedAllocation
from recordings import AUTOGRAD, Trace, analyse

OPTIMIZER = "Optimizer.step#AdamW.step"


def training(steps: int = 3) -> Trace:
    """Steps of 1000: forward keeps 100 in a and 50 in b, backward makes a gradient of 30, the optimizer 20 for itself.

    The gradient of a step is freed at the end of the step; activation in backward.
    """
    trace = Trace()
    for step in range(steps):
        t = 1000 * step
        trace.annotation(f"ProfilerStep#{step}", t, t + 1000)
        trace.mark(".", t + 10, t + 200).mark("a", t + 20, t + 90).mark("b", t + 100, t + 190)
        trace.op("aten::mm", t + 30, t + 40, sequence=2 * step, forward_thread=0)
        trace.op("aten::mul", t + 110, t + 120, sequence=2 * step + 1, forward_thread=0)
        trace.memory(t + 35, 100, address=1).memory(t + 115, 50, address=200)
        trace.node("MulBackward0", t + 300, t + 340, number=2 * step + 1)
        trace.memory(t + 330, -50, address=200, thread=AUTOGRAD)
        trace.node("MmBackward0", t + 350, t + 400, number=2 * step)
        trace.op("aten::mm", t + 360, t + 370, thread=AUTOGRAD)
        trace.memory(t + 365, 30, address=300, thread=AUTOGRAD).memory(t + 390, -100, address=1, thread=AUTOGRAD)
        trace.annotation(OPTIMIZER, t + 500, t + 600).op("aten::sqrt", t + 510, t + 520)
        trace.memory(t + 515, 20, address=400).memory(t + 530, -20, address=400).memory(t + 700, -30, address=300)
    return trace


def test_moments_of_steps() -> None:
    use = use_of(training())
    found = [(m.label, m.step, {k: v for k, v in m.categories.items() if v}) for m in use.moments]
    step = [
        ("after forward", {"activation": 150}),
        ("after backward", {"grads": 30}),
        ("after optimizer", {"grads": 30}),
    ]
    assert found == [(label, number, held) for number in range(3) for label, held in step]
    assert [m.time_ns for m in use.moments[:3]] == [299, 400, 600]
    assert {m.reserved_bytes for m in use.moments} == {None}


def test_the_peak_and_its_owners() -> None:
    use = use_of(training())
    assert (use.peak.total_bytes, use.peak.step, use.peak.time_ns) == (150, 0, 115)  # the first of equals
    rows = [(o.category, o.layer, o.name, o.op, o.phase, o.size_bytes, o.count) for o in use.peak_owners]
    assert rows == [
        ("activation", "a", "", "aten::mm", "forward", 100, 1),
        ("activation", "b", "", "aten::mul", "forward", 50, 1),
    ]
    assert (use.last.step, use.last.time_ns, use.last.total_bytes) == (2, 2515, 50)
    assert {(o.category, o.layer) for o in use.last_owners} == {("grads", "a"), ("workspace", "")}


def test_phases_begin() -> None:
    assert use_of(training(2)).timeline.phase_starts == (
        (10, "forward"),
        (300, "backward"),
        (500, "optimizer"),
        (600, "other"),
        (1010, "forward"),
        (1300, "backward"),
        (1500, "optimizer"),
        (1600, "other"),
    )


def test_forward_and_backward_in_a_closure_are_themselves_inside_the_optimizers_step() -> None:
    trace = Trace().annotation(OPTIMIZER, 0, 1000)
    trace.mark(".", 10, 200).op("aten::mm", 30, 40, sequence=0, forward_thread=0)
    trace.memory(35, 100, address=1)
    trace.node("MmBackward0", 300, 400, number=0).memory(390, -100, address=1, thread=AUTOGRAD)
    trace.op("aten::sqrt", 510, 520).memory(515, 20, address=400).memory(530, -20, address=400)
    use = use_of(trace)
    phases = ((0, "optimizer"), (10, "forward"), (300, "backward"), (400, "optimizer"), (1000, "other"))
    assert use.timeline.phase_starts == phases
    assert {name: size for name, size in use.peak.categories.items() if size} == {"activation": 100}


@given(st.lists(st.tuples(st.sampled_from(["call", "node", "optimizer"]), st.integers(0, 60), st.integers(0, 9))))
def test_moments_are_those_of_a_search_through_everything(spans: list[tuple[str, int, int]]) -> None:
    trace = Trace().memory(0, 8, address=1)
    for step in range(3):
        trace.annotation(f"ProfilerStep#{step}", 20 * step, 20 * step + 20)
    for i, (kind, start, length) in enumerate(spans):  # each on its own thread
        if kind == "call":
            trace.mark("a", start, start + length, thread=10 + i)
        elif kind == "node":
            trace.node("MmBackward0", start, start + length, thread=10 + i)
        else:
            trace.annotation(OPTIMIZER, start, start + length, thread=10 + i)
    expected: list[tuple[str, int | None, int]] = []
    for step in range(3):
        begun = [(kind, start, start + n) for kind, start, n in spans if 20 * step <= start < 20 * step + 20]
        ends = {kind: max(end for one, _, end in begun if one == kind) for kind, _, _ in begun}
        if "node" in ends:
            expected.append(("after forward", step, min(start for kind, start, _ in begun if kind == "node") - 1))
            expected.append(("after backward", step, ends["node"]))
        elif "call" in ends:
            expected.append(("after forward", step, ends["call"]))
        if "optimizer" in ends:
            expected.append(("after optimizer", step, ends["optimizer"]))
    found = [(moment.label, moment.step, moment.time_ns) for moment in use_of(trace).moments]
    assert sorted(found, key=str) == sorted(expected, key=str)


def test_inference_has_a_moment_after_forward() -> None:
    trace = Trace().mark(".", 10, 100).mark("a", 20, 90).memory(30, 8, address=1)
    (moment,) = use_of(trace).moments
    assert (moment.label, moment.step, moment.time_ns, moment.total_bytes) == ("after forward", 0, 100, 8)


def test_a_moment_before_the_first_event_has_what_was_there() -> None:
    trace = Trace().mark(".", 10, 100).mark("a", 20, 90).memory(300, 8, address=1)
    (moment,) = use_of(trace, (5, [(1000, 64, "params", "a.weight")])).moments
    assert (moment.total_bytes, moment.categories["params"]) == (64, 64)


@pytest.mark.parametrize(("device_type", "device", "last_ns"), [(0, -1, 10), (1, 0, 20)])
def test_the_last_moment_is_before_the_allocation_that_failed_on_the_same_device(
    device_type: int, device: int, last_ns: int
) -> None:
    trace = Trace().mark("a", 0, 100).memory(10, 8, address=1).memory(20, 8, address=512).memory(30, -8, address=512)
    failed = (FailedAllocation(15, 0, 1 << 40, device_type, device),)
    use = analyse(trace.op("aten::mm", 1, 2).recording(failed_allocations=failed)).memory_use
    assert use is not None and use.last.time_ns == last_ns


def test_moments_that_the_loop_asks_for() -> None:
    trace = (
        training(1).annotation("memory point: after the loss", 250, 251).annotation("memory point: late", 5000, 5001)
    )
    found = [(m.label, m.step, m.time_ns, m.total_bytes) for m in use_of(trace).moments]
    assert found[:2] == [("after the loss", 0, 250, 150), ("after forward", 0, 299, 150)]
    assert found[-1] == ("late", None, 5000, 0)


def test_owners_with_the_same_key_are_one() -> None:
    trace = Trace().mark("a", 0, 100).op("aten::mm", 10, 20).op("aten::mm", 30, 40)
    (owner,) = use_of(trace.memory(15, 3, address=1).memory(35, 4, address=10)).peak_owners
    assert (owner.size_bytes, owner.count) == (7, 2)


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("a.x.weight", "a.x"),
        ("exp_avg of a.x.weight", "a.x"),
        ("master of a.weight", "a"),
        ("a.x.deeper.than.rows.weight", "a.x"),
        ("scale", "Net"),  # a parameter of the root
        ("gone.weight", "Net"),
    ],
)
def test_a_tensor_belongs_to_the_deepest_layer_of_its_name(name: str, layer: str) -> None:
    trace = Trace().mark(".", 0, 100).mark("a", 10, 90).mark("a.x", 20, 80).memory(30, 8, address=1)
    owners = use_of(trace, (5, [(1000, 64, "params", name)])).peak_owners
    assert [owner.layer for owner in owners if owner.name] == [layer]


def test_nothing_is_known_where_no_allocation_was_recorded() -> None:
    result = analyse(Trace().op("aten::mm", 0, 10).recording())
    assert result.memory_use is None
    assert result.memory["categories"] is None


def test_the_result_says_it_in_numbers_and_survives_a_file() -> None:
    recording = training(6).recording(metadata={"baseTimeNanoseconds": BASE_NS})
    result = analyse(recording, run={"held": held((5, [(1000, 64, "params", "a.weight")]))})
    data = json.loads(json.dumps(to_dict(result)))
    memory = data["memory"]
    assert sum(memory["categories"].values()) == memory["peak"]["allocated_bytes"] == 214
    assert set(memory["categories"]) == set(CATEGORIES)
    assert sum(owner["bytes"] for owner in memory["peak"]["owners"]) == 214
    assert (memory["peak"]["step"], memory["peak"]["phase"], memory["peak"]["reserved"]) == (0, "forward", None)
    assert [moment["allocated_bytes"] for moment in memory["moments"][:3]] == [214, 94, 94]
    assert memory["slope"] == {"bytes_per_step": 0.0, "error_bytes_per_step": 0.0, "steps": 5}
    assert memory["known_owners"] is True
    assert "memory_use" not in data
    assert to_dict(from_dict({**data, "memory_use": "of a later version"})) == data


def test_at_most_fifty_owners_are_written() -> None:
    trace = Trace()
    for i in range(60):
        trace.mark(f"l{i}", 10 * i, 10 * i + 9).memory(10 * i + 5, i + 1, address=100 * i)
    recording = trace.op("aten::mm", 1, 2).recording()
    result = analyse(recording)
    assert result.memory_use is not None
    assert len(result.memory_use.peak_owners) == 60
    sizes = [owner["bytes"] for owner in result.memory["peak"]["owners"]]
    assert sizes == list(range(60, 10, -1))


ACTIONS = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 99), st.sampled_from([1, AUTOGRAD, 9])), min_size=1)


def scattered(actions: list[tuple[int, int, int]], **where: int) -> tuple[Trace, list[int]]:
    """Allocations among layers, nodes and steps, and the running sum of their bytes."""
    trace, alive, sums = Trace(), {}, [0]
    for start in (0, 300, 600):
        trace.mark("a", start, start + 90).op("aten::mm", start + 10, start + 40, sequence=start, forward_thread=0)
        trace.node("MmBackward0", start + 100, start + 200, number=start).annotation(
            OPTIMIZER, start + 210, start + 290
        )
    for i, (slot, size, thread) in enumerate(actions):
        size = -alive.pop(slot) if slot in alive else alive.setdefault(slot, size)
        trace.memory(7 * i, size, address=1000 * slot, thread=thread, **where)
        sums.append(sums[-1] + size)
    return trace, sums[1:]


@settings(max_examples=30, deadline=None)
@given(ACTIONS, st.lists(st.tuples(st.integers(0, 20), st.sampled_from(CATEGORIES))))
def test_the_total_is_the_running_sum_on_a_cpu(
    actions: list[tuple[int, int, int]], told: list[tuple[int, str]]
) -> None:
    trace, sums = scattered(actions)
    kept = (10**6, 4096, "params", "a.weight")  # there from beginning to end
    made = [(7 * i + 1, actions[i][0], category) for i, category in sorted(told) if i < len(actions)]
    seen = [(time, [(1000 * slot, 1, category, f"t{slot}")]) for time, slot, category in made]
    use = use_of(trace, (-1, [kept]), *seen, (2000, [kept]))
    assert use.timeline.total_bytes.tolist() == [4096 + total for total in sums]


@settings(max_examples=30, deadline=None)
@given(ACTIONS, st.integers(0, 10**6), st.lists(st.integers(-50, 50), max_size=20))
def test_the_total_is_what_an_accelerator_says_even_if_it_jumps(
    actions: list[tuple[int, int, int]], start: int, jumps: list[int]
) -> None:
    trace, sums = scattered(actions, device=0)
    jumped = [max(0, start + total + sum(jumps[: i + 1])) for i, total in enumerate(sums)]
    for event, total in zip(trace._memory, jumped, strict=True):
        event["total_allocated_bytes"] = total
    use = use_of(trace, (-1, [(1 << 20, 100, "params", "a.weight")]), device="cuda:0")
    assert use.timeline.total_bytes.tolist() == jumped
    assert_adds_up(use)
    if start >= 100 and not jumps:
        assert category_at(use, 0)["params"] == 100
