"""Advice on steps, launches and waits, on recordings whose answers are derived by hand."""

from __future__ import annotations

import pytest

from advice_facts import facts_of, findings, the_finding
from profiler_wrapper.advice.waiting import (
    dataloader_bound,
    launch_bound,
    low_utilization,
    many_small_kernels,
    outside_ops,
    synchronisation,
    unfused_elementwise,
    unpinned_copies,
)
from profiler_wrapper.tables.model import SynchronisationRow
from profiler_wrapper.trace.recording import Category
from recordings import Trace

US = 1000
STEP = 1000 * US
LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


def steps(count: int = 2) -> Trace:
    """Empty steps of 1 ms each."""
    made = Trace()
    for step in range(count):
        made.annotation(f"ProfilerStep#{step}", step * STEP, (step + 1) * STEP)
    return made


def launching(*, launch_after_us: int) -> Trace:
    """Ten kernels of 50 us in each step; each is launched so long after the one before has ended."""
    made = steps()
    for step in range(2):
        at = step * STEP
        made.mark("layers.0", at, at + 990 * US, kind="block", class_name="Block")
        for _ in range(10):
            launch = at + launch_after_us * US
            made.op("aten::mul", launch - US, launch + US).kernel(
                "elementwise", launch + US, launch + 51 * US, launched=launch
            )
            at = launch + 51 * US
    return made


# --- the DataLoader ------------------------------------------------------------------------------


@pytest.mark.parametrize(("spent_us", "told"), [(51, True), (50, False)])
def test_a_dataloader_of_over_a_twentieth_of_the_step(spent_us: int, told: bool) -> None:
    made = steps()
    for step in range(2):
        made.annotation(LOADER, step * STEP, step * STEP + spent_us * US)
        made.op("aten::mm", step * STEP + 500 * US, step * STEP + 600 * US)
    made.annotation(LOADER, 2 * STEP, 9 * STEP)  # in no step
    found = findings(dataloader_bound, facts_of(made.recording()))
    assert bool(found) is told
    if told:
        assert found[0].saves_at_most_us == pytest.approx(51)
        assert found[0].share == pytest.approx(0.051)
        assert "num_workers=4" in found[0].fix


def test_a_dataloader_with_workers_needs_more_of_them() -> None:
    made = steps()
    for step in range(2):
        made.annotation(
            "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", step * STEP, step * STEP + STEP // 2
        )
        made.op("aten::mm", step * STEP + 600 * US, step * STEP + 700 * US)
    assert "more workers" in the_finding(dataloader_bound, facts_of(made.recording())).fix


# --- launches ------------------------------------------------------------------------------------


def test_a_device_that_waits_for_launches() -> None:
    facts = facts_of(launching(launch_after_us=40).recording())
    found = the_finding(launch_bound, facts)
    # Per step ten waits: 40 us till the call, 1 us till the kernel begins.
    assert found.saves_at_most_us == pytest.approx(410)
    assert found.details["waiting_us"] == pytest.approx(410)
    assert found.layer == "layers.0"


def test_a_device_that_is_launched_ahead_of_does_not() -> None:
    made = steps()
    for step in range(2):
        at = step * STEP
        for i in range(10):  # all are launched within the first 20 us; gaps of 30 us lie on the device
            made.kernel("gemm", at + 30 * US + i * 90 * US, at + 90 * US + i * 90 * US, launched=at + (i + 1) * US)
    assert findings(launch_bound, facts_of(made.recording())) == []


def test_a_long_wait_is_no_launch() -> None:
    made = Trace().annotation("ProfilerStep#0", 0, 100 * STEP).op("tokenize", 0, 50 * STEP)
    made.kernel("gemm", 50 * STEP + US, 99 * STEP, launched=50 * STEP)
    facts = facts_of(made.recording())
    assert findings(launch_bound, facts) == []
    found = the_finding(low_utilization, facts)  # 49 of 100 ms busy
    assert "does something else" in found.title
    assert "the longest gap: 50.0 ms" in found.evidence


def test_a_device_that_is_idle_most_of_the_time() -> None:
    facts = facts_of(launching(launch_after_us=40).recording())
    assert facts.idle_ns == 500 * US
    assert findings(low_utilization, facts) == []  # busy for exactly half
    rare = steps()
    for step in range(2):
        begin = step * STEP
        rare.annotation(LOADER, begin, begin + 600 * US)
        rare.kernel("gemm", begin + 700 * US, begin + 1000 * US, launched=begin + 650 * US)
    found = the_finding(low_utilization, facts_of(rare.recording()))
    assert found.saves_at_most_us == pytest.approx(700)
    assert "mostly while data is fetched" in found.title
    assert found.evidence[:2] == ("100 µs while the CPU launches the next kernels", "600 µs while data is fetched")
    assert found.title.startswith("the device is busy for 30 % of a step of 1.00 ms: 700 µs idle")
    assert found.details["mostly"] == "loading"


def test_idle_time_is_told_once_and_what_is_a_part_of_it_says_so() -> None:
    facts = facts_of(launching(launch_after_us=60).recording())
    assert the_finding(low_utilization, facts).saves_at_most_us == pytest.approx(549.5)
    assert the_finding(launch_bound, facts).evidence == (
        "9 gaps a step, each under 1 ms, end with an event launched within them; part of the 550 µs that the device "
        "is idle",
    )


@pytest.mark.parametrize(("slowed", "told"), [("", "high"), ("Python stacks", "low"), ("waits for a CPU core", "low")])
def test_what_times_of_the_cpu_say_is_less_sure_where_something_slowed_it(slowed: str, told: str) -> None:
    run = {"overloaded": slowed == "waits for a CPU core"}
    idle, loads, waits = (
        launching(launch_after_us=60),
        loading(wait_us=900, op_us=50),
        loading(wait_us=7900, op_us=2000),
    )
    loads.annotation(LOADER, 20 * US, 900 * US)
    for made in (idle, loads, waits) if slowed == "Python stacks" else ():
        made.python("train.py(3): step", 0, STEP)
    rules = ((low_utilization, idle), (launch_bound, idle), (dataloader_bound, loads), (outside_ops, waits))
    facts = [(rule, facts_of(made.recording(), run=run)) for rule, made in rules]
    assert [the_finding(*one).confidence for one in facts] == [told] * 4
    assert facts[0][1].slowed_by == slowed
    assert any("Python stacks" in warning for warning in facts[0][1].analysis.warnings) is (slowed == "Python stacks")


# --- a CPU, on which no op runs ------------------------------------------------------------------


def loading(*, wait_us: int, op_us: int) -> Trace:
    """Two steps on a CPU: gradients set to zero in 10 us, a wait, a model of one op."""
    made, step_us = Trace(), 10 + wait_us + op_us + 30
    for step in range(2):
        at = step * step_us * US
        made.annotation(f"ProfilerStep#{step}", at, at + step_us * US)
        made.annotation("Optimizer.zero_grad#SGD.zero_grad", at, at + 10 * US)
        begin = at + (10 + wait_us) * US
        made.mark(".", begin, begin + (op_us + 20) * US, class_name="Net")
        made.op("aten::mm", begin + 10 * US, begin + (10 + op_us) * US)
    return made


def test_a_generator_that_loads_is_found_between_its_marks() -> None:
    facts = facts_of(loading(wait_us=7900, op_us=2000).recording())
    found = the_finding(outside_ops, facts)
    assert found.title == (
        "80 % of a step of 9.94 ms runs no op: 7.94 ms, 7.90 ms of it from the end of SGD.zero_grad to the start of "
        "layer Net"
    )
    assert (found.confidence, found.share_of) == ("high", "the wall time of a step")
    assert "DataLoader" in found.fix
    assert facts.analysis.overview is not None
    assert found.saves_at_most_us == facts.analysis.overview.steps[0].other_ns / US == 7940


def test_short_gaps_between_ops_are_what_calls_them() -> None:
    found = the_finding(outside_ops, facts_of(loading(wait_us=900, op_us=2000).recording()))
    assert (found.confidence, found.fix) == ("low", "more work per op: a larger batch, or torch.compile(model)")


def test_many_short_gaps_at_one_place_are_not_one_wait() -> None:
    """A model that is called ten times a step, as by generate(), with 400 us between two calls: 4 ms a step."""
    made, step_us = Trace(), 10 * 600
    for step in range(2):
        made.annotation(f"ProfilerStep#{step}", step * step_us * US, (step + 1) * step_us * US)
        for call in range(10):
            at = (step * step_us + 100 + call * 600) * US
            made.mark(".", at, at + 200 * US, class_name="Net")
            made.op("aten::mm", at, at + 200 * US)
    found = the_finding(outside_ops, facts_of(made.recording()))
    assert "3.60 ms of it from the end of layer Net to the start of layer Net" in found.title
    assert (found.confidence, found.fix) == ("low", "more work per op: a larger batch, or torch.compile(model)")


def test_a_cpu_that_runs_ops_most_of_the_time_waits_for_nothing() -> None:
    assert findings(outside_ops, facts_of(loading(wait_us=100, op_us=2000).recording())) == []


def test_small_kernels_that_could_be_one() -> None:
    made = steps(1)
    for i in range(220):  # back to back, each launched long before
        made.kernel("vectorized_elementwise_kernel", 5 * US + i * 4 * US, 9 * US + i * 4 * US, launched=10 + i)
    made.kernel("gemm", 900 * US, 990 * US, launched=500)
    found = the_finding(many_small_kernels, facts_of(made.recording()))
    assert found.saves_at_most_us == pytest.approx(885)  # 220 of 4 us, and 5 us till the first one runs
    assert "220 of 221 kernels" in found.title
    assert found.evidence[0].startswith("the device waits 5.00 µs a step for their launches")
    made.kernel("gemm", 0, 5 * US, launched=1)  # till the first of them runs
    waiting_for_none = the_finding(many_small_kernels, facts_of(made.recording()))
    assert waiting_for_none.saves_at_most_us == pytest.approx(880)
    assert "waits" not in waiting_for_none.evidence[0]
    large = steps(1)
    for i in range(220):
        large.kernel("gemm", 5 * US + i * 4 * US, 9 * US + i * 4 * US, launched=10 + i)
    assert findings(many_small_kernels, facts_of(large.recording())) == []  # products are not fused away
    few = steps(1)
    for i in range(100):
        few.kernel("vectorized_elementwise_kernel", 5 * US + i * 4 * US, 9 * US + i * 4 * US, launched=10 + i)
    assert findings(many_small_kernels, facts_of(few.recording())) == []


# --- waits ---------------------------------------------------------------------------------------


def wait(**told: object) -> SynchronisationRow:
    row = {
        "kind": "item",
        "op": "aten::item",
        "layer": "layers.0",
        "phase": "forward",
        "count": 20,
        "wait_ns": 600 * US,
    }
    return SynchronisationRow(**(row | {"sources": ("train.py:12",)} | told))  # type: ignore[arg-type]


def test_waits_in_a_step() -> None:
    recording = launching(launch_after_us=40).recording()
    rows = (wait(), wait(layer="layers.1", wait_ns=100 * US, sources=("train.py:12", "train.py:80")))
    found = the_finding(synchronisation, facts_of(recording, synchronisations=rows))
    assert found.saves_at_most_us == pytest.approx(350)  # 700 us in two steps; the device is idle for 500 us in each
    assert found.source == "train.py:12"
    assert found.layer == "layers.{0,1}"
    assert "20 times a step" in found.title
    longer = facts_of(recording, synchronisations=(wait(wait_ns=1800 * US),))
    assert the_finding(synchronisation, longer).saves_at_most_us == pytest.approx(500)  # no more than it is idle


def test_waits_of_the_profiler_itself_are_not_the_steps() -> None:
    recording = launching(launch_after_us=40).recording()
    rows = (wait(kind="device", op="cudaDeviceSynchronize", count=2, layer=""),)
    assert findings(synchronisation, facts_of(recording, synchronisations=rows)) == []
    assert findings(synchronisation, facts_of(recording, synchronisations=())) == []


def copies(name: str) -> Trace:
    made = steps()
    for step in range(2):
        at = step * STEP
        made.launch(at + 100 * US, at + 220 * US, correlation=1000 + 10 * step)
        made.kernel(name, at + 150 * US, at + 300 * US, correlation=1000 + 10 * step, category=Category.MEMCPY)
        made.kernel("gemm", at + 310 * US, at + 900 * US, launched=at + 230 * US)
    return made


def test_copies_from_memory_that_is_not_pinned() -> None:
    name = "Memcpy HtoD (Pageable -> Device)"
    found = the_finding(unpinned_copies, facts_of(copies(name).recording()))
    assert found.saves_at_most_us == pytest.approx(200)  # from the call to the end of the copy
    assert findings(unpinned_copies, facts_of(copies("Memcpy HtoD (Pinned -> Device)").recording())) == []
    assert findings(unpinned_copies, facts_of(copies("Memcpy DtoH (Device -> Pageable)").recording())) == []


def test_a_cpu_has_no_idle_device() -> None:
    made = steps()
    for step in range(2):
        made.op("aten::mm", step * STEP, step * STEP + 10 * US)
    facts = facts_of(made.recording(), synchronisations=(wait(),))
    for rule in (launch_bound, low_utilization, many_small_kernels, synchronisation, unpinned_copies, dataloader_bound):
        assert findings(rule, facts) == [], rule


# --- kernels that could be one -------------------------------------------------------------------

ELEMENTWISE, NORM, GEMM = "aten::add", "aten::native_layer_norm", "aten::mm"


def rows_of_kernels(*row: tuple[str, int], product_us: int = 100, kernel: str = "") -> Trace:
    """In each of two steps twice: a kernel of each op, of so many us, one after the other; then a product."""
    made = steps()
    for step in range(2):
        at = step * STEP
        made.mark("layers.0", at, at + 990 * US, kind="block", class_name="Block")
        for _ in range(2):
            for op, lasts_us in (*row, (GEMM, product_us)):
                made.op(op, at, at + 2 * US)
                made.kernel(kernel or op, at + 3 * US, at + (3 + lasts_us) * US, launched=at + US)
                at += (5 + lasts_us) * US
    return made


def test_elementwise_kernels_in_a_row_could_be_one() -> None:
    found = the_finding(
        unfused_elementwise,
        facts_of(rows_of_kernels((ELEMENTWISE, 40), (ELEMENTWISE, 30), (ELEMENTWISE, 20)).recording()),
    )
    # Per step two rows of 90 us beside two products of 100 us; of each row its quickest, 20 us, stays.
    assert found.saves_at_most_us == pytest.approx(2 * (90 - 20))
    assert found.share == pytest.approx(180 / 380)
    assert found.details["rows"] == 2
    assert found.layers == ("layers.0",)
    assert "torch.compile" in found.fix


def test_a_kernel_by_itself_cannot_be_fused_with_others() -> None:
    facts = facts_of(rows_of_kernels((ELEMENTWISE, 90)).recording())
    assert not findings(unfused_elementwise, facts)


def test_a_norm_that_is_one_kernel_stays() -> None:
    """Of 60 us of norm and 30 us of what follows it, 30 us can go; of as much elementwise work, 60 us."""
    facts = facts_of(rows_of_kernels((NORM, 60), (ELEMENTWISE, 30), product_us=50).recording())
    assert the_finding(unfused_elementwise, facts).saves_at_most_us == pytest.approx(2 * 30)
    facts = facts_of(rows_of_kernels((ELEMENTWISE, 60), (ELEMENTWISE, 30), product_us=50).recording())
    assert the_finding(unfused_elementwise, facts).saves_at_most_us == pytest.approx(2 * 60)


def test_little_elementwise_work_is_no_finding() -> None:
    row = (ELEMENTWISE, 20), (ELEMENTWISE, 20)
    assert not findings(unfused_elementwise, facts_of(rows_of_kernels(*row, product_us=100).recording()))  # 29 %
    assert findings(unfused_elementwise, facts_of(rows_of_kernels(*row, product_us=80).recording()))  # 33 %


def test_what_is_compiled_is_fused_already() -> None:
    row = (ELEMENTWISE, 40), (ELEMENTWISE, 40)
    assert findings(unfused_elementwise, facts_of(rows_of_kernels(*row).recording()))
    compiled = rows_of_kernels(*row, kernel="triton_poi_fused_add_0")
    assert not findings(unfused_elementwise, facts_of(compiled.recording()))


def test_an_optimizer_has_advice_of_its_own() -> None:
    made = steps()
    for step in range(2):
        at = step * STEP
        made.op("Optimizer.step#SGD.step", at, at + 500 * US)
        for i in range(3):
            made.op("aten::add_", at + i * 50 * US, at + i * 50 * US + 2 * US)
            made.kernel("add", at + (i * 50 + 3) * US, at + (i * 50 + 48) * US, launched=at + (i * 50 + 1) * US)
    assert not findings(unfused_elementwise, facts_of(made.recording()))
