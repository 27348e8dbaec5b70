"""Advice on odd blocks, recompute and graph breaks, on results and recordings made by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest

from advice_facts import facts_of, findings, the_finding
from profiler_wrapper.advice.advise import advise, verdict
from profiler_wrapper.advice.blocks import odd_block
from profiler_wrapper.advice.facts import Facts
from profiler_wrapper.advice.memory import allocation_too_large, recompute_not_needed, recompute_would_help
from profiler_wrapper.advice.waiting import graph_break
from profiler_wrapper.tables.model import LayerRow
from profiler_wrapper.trace.recording import FailedAllocation
from recordings import Trace

US = 1000
MIB = 1 << 20


def blocks(times_us: list[list[int]], **told: Any) -> Facts:
    """One row a block, with its time in each step."""
    made = Trace()
    for step in range(len(times_us[0])):
        at = step * 1000 * US
        made.annotation(f"ProfilerStep#{step}", at, at + 1000 * US)
        for i in range(len(times_us)):
            made.mark(f"layers.{i}", at + i * 10 * US, at + i * 10 * US + 9 * US, kind="block", class_name="Block")
            made.op("aten::mm", at + i * 10 * US, at + i * 10 * US + US)
    facts = facts_of(made.recording())
    rows = []
    for i, by_step in enumerate(times_us):
        (row,) = facts.rows_of[f"layers.{i}"]
        times = tuple(us * US for us in by_step)
        rows.append(
            replace(row, time_ns=sum(times), step_times_ns=times, flops_per_step=1000, retained_bytes=100 * MIB)
        )
    rows = [replace(row, **{k: v[i] for k, v in told.items() if i in v}) for i, row in enumerate(rows)]
    return Facts(analysis=replace(facts.analysis, layers=tuple(rows)), found=facts.found)


def test_one_block_that_is_slow_in_every_step() -> None:
    times = [[50 + (i * 7 + s * 3) % 4 for s in range(5)] for i in range(12)]
    times[7] = [75, 74, 77, 73, 76]
    found = the_finding(odd_block, blocks(times))
    assert found.layer == "layers.7"
    assert found.saves_at_most_us == pytest.approx(375 / 5 - 51.5, abs=1.0)  # the likes take 50 to 53 us
    assert found.evidence[1] == "its attention backend is that of the others, its FLOPs are 1.00 times theirs"
    assert "sizes" not in found.fix


@pytest.mark.parametrize(
    ("basis", "overloaded", "told"), [("cpu", False, "high"), ("cpu", True, "low"), ("device", True, "high")]
)
def test_a_slow_block_is_less_sure_where_a_cpu_was_overloaded(
    basis: Literal["cpu", "device"], overloaded: bool, told: str
) -> None:
    facts = blocks([[50] * 3, [50] * 3, [90] * 3, [50] * 3, [50] * 3])
    analysis = replace(facts.analysis, time_basis=basis, run={"overloaded": overloaded})
    assert the_finding(odd_block, replace(facts, analysis=analysis)).confidence == told


def test_noise_is_not_odd() -> None:
    times = [[50 + (i * 7 + s * 3) % 4 for s in range(5)] for i in range(12)]
    times[7] = [50, 51, 300, 52, 50]  # one slow step
    assert findings(odd_block, blocks(times)) == []
    times[7] = [75, 74, 50, 73, 76]  # in one step as quick as its likes
    assert findings(odd_block, blocks(times)) == []
    wild = [[50 + (i * 31 + s * 17) % 40 for s in range(5)] for i in range(12)]
    assert findings(odd_block, blocks(wild)) == []


def test_blocks_that_all_differ_have_no_odd_one() -> None:
    times = [40, 42, 44, 46, 48, 50, 50, 52, 54, 56, 58, 70]  # 5 robust deviations are 37
    assert findings(odd_block, blocks([[us] * 3 for us in times])) == []
    times[-1] = 90
    assert the_finding(odd_block, blocks([[us] * 3 for us in times])).layer == "layers.11"


def test_a_model_of_two_kinds_of_blocks_is_made_so() -> None:
    times = [[100 if i % 3 == 2 else 50] * 3 for i in range(12)]
    assert findings(odd_block, blocks(times)) == []


def test_three_blocks_are_too_few() -> None:
    assert findings(odd_block, blocks([[50] * 3, [50] * 3, [90] * 3])) == []


def test_a_block_with_more_flops_says_so() -> None:
    times = [[50] * 3 for _ in range(6)]
    times[2] = [100] * 3
    found = the_finding(odd_block, blocks(times, flops_per_step={2: 2000}))
    assert found.evidence[1] == "it does 2.00 times the FLOPs of the others"
    assert the_finding(odd_block, blocks(times, compiled={0: True})).evidence[1] == (
        "it is not compiled, the others are"
    )


def test_a_block_without_their_attention_kernel_is_told_so() -> None:
    """Fused attention computes its scores again in backward: the block without it does a little less, in longer."""
    times = [[50] * 3 for _ in range(6)]
    times[2] = [100] * 3
    facts = blocks(times, flops_per_step={2: 940})
    rows = tuple(
        row if row.layer == "layers.2" else replace(row, attention_by_backend_ns={"flash": 9 * US})
        for row in facts.analysis.layers
    )
    found = the_finding(odd_block, replace(facts, analysis=replace(facts.analysis, layers=rows)))
    assert found.evidence[1] == "its attention runs by no attention kernel, that of the others by flash"
    assert found.fix == "give it what the others get (flash)"
    found = the_finding(odd_block, facts)
    assert found.evidence[1].endswith("its FLOPs are 0.94 times theirs") and "sizes" not in found.fix


def test_a_block_that_keeps_more() -> None:
    found = the_finding(odd_block, blocks([[50] * 3] * 6, retained_bytes={4: 150.0 * MIB}))
    assert found.layer == "layers.4"
    assert found.saves_at_most_bytes == 50 * MIB
    assert found.saves_at_most_us is None
    assert findings(odd_block, blocks([[50] * 3] * 6, retained_bytes={4: None})) == []


# --- recompute -----------------------------------------------------------------------------------


def checkpointed(*, recompute_us: int = 200, device_gib: float | None = 80, peak_gib: float = 10) -> Facts:
    """Four blocks of 300 us each; each recomputes a fourth of the time, and grows by 1 GiB while it does."""
    facts = blocks([[300]] * 4)
    rows: list[LayerRow] = []
    for row in facts.analysis.layers:
        rows.append(row)
        if recompute_us:
            rows.append(
                replace(
                    row,
                    phase="recompute",
                    time_ns=recompute_us * US // 4,
                    self_time_ns=recompute_us * US // 4,
                    entry_allocated_bytes=9 * 1024.0 * MIB,
                    peak_bytes=10 * 1024 * MIB,
                )
            )
    total = 1200 * US + recompute_us * US
    time = replace(facts.analysis.time, total_ns=total)
    run = {} if device_gib is None else {"device_memory_bytes": round(device_gib * 1024 * MIB)}
    peak = {"allocated_bytes": round(peak_gib * 1024 * MIB), "reserved_bytes": round(peak_gib * 1024 * MIB)}
    change = {"kind": "checkpoint", "layers": ("layers.0", "layers.1"), "saves_bytes": 7 * MIB, "costs_ns": 9 * US}
    memory = {"peak": peak, "changes": [change]}
    return Facts(
        analysis=replace(facts.analysis, layers=tuple(rows), time=time, run=run, memory=memory), found=facts.found
    )


def test_recompute_where_memory_is_free() -> None:
    found = the_finding(recompute_not_needed, checkpointed())
    assert found.saves_at_most_us == pytest.approx(200)
    assert found.share == pytest.approx(200 / 1400)
    assert found.layer == "layers.{0..3}"
    assert found.details["needs_bytes"] == 3 * 1024 * MIB  # one of the four is there anyway


@pytest.mark.parametrize("on_device", [False, True])
def test_without_recompute_the_node_that_begins_it_waits_for_nothing(on_device: bool) -> None:
    """Of a step of 10 us a node takes 5: for 3 of them a layer runs again, 2 go before and after it.

    On a CPU no table says that these 2 recompute. With a device they may lie before the kernel of 1 that it launches.
    """
    made = Trace().annotation("ProfilerStep#2", 0, 10 * US)
    made.mark(".", 0, 3 * US, class_name="Net").mark("layers.0", 100, 2900, kind="block", class_name="Block")
    made.op("aten::mm", 1000, 2000, sequence=1)
    made.node("MmBackward0", 4 * US, 9 * US, number=1, thread=1, forward_thread=1)
    made.mark("layers.0", 5 * US, 8 * US, kind="block", class_name="Block").op("aten::mm", 6 * US, 7 * US)
    if on_device:
        made.kernel("gemm", 8 * US, 9 * US, launched=6500, thread=1)
    seen = facts_of(made.recording())
    recomputes = US if on_device else 3 * US
    assert [row.time_ns for row in seen.rows_of["layers.0"] if row.phase == "recompute"] == [recomputes]
    memory = {"peak": {"allocated_bytes": MIB, "reserved_bytes": MIB}}
    analysis = replace(seen.analysis, memory=memory, run={"device_memory_bytes": 1024 * MIB})
    found = the_finding(recompute_not_needed, Facts(analysis=analysis, found=seen.found))
    assert found.details["recompute_us"] == pytest.approx(recomputes / US)
    assert found.saves_at_most_us == pytest.approx(5 + 1 if on_device else 3)


def test_recompute_where_only_a_part_would_fit() -> None:
    found = the_finding(recompute_not_needed, checkpointed(device_gib=14.5, peak_gib=10))
    # 14.5 - 10 - 1.45 GiB of room: more than 3.
    assert found.saves_at_most_us == pytest.approx(200)
    tight = the_finding(recompute_not_needed, checkpointed(device_gib=3.75, peak_gib=2.5))
    assert tight.saves_at_most_us == pytest.approx(200 * (3.75 - 2.5 - 0.375) / 3)
    assert "fewer blocks" in tight.fix


@pytest.mark.parametrize(
    "made", [{"peak_gib": 60}, {"recompute_us": 0}, {"device_gib": None}, {"recompute_us": 30}], ids=str
)
def test_recompute_that_is_needed_or_little(made: dict[str, Any]) -> None:
    assert findings(recompute_not_needed, checkpointed(**made)) == []


def test_recompute_where_memory_is_short() -> None:
    found = the_finding(recompute_would_help, checkpointed(recompute_us=0, device_gib=80, peak_gib=75))
    assert found.saves_at_most_bytes == 7 * MIB
    assert found.layer == "layers.{0,1}"
    assert "it costs about 9.00 µs of wall time of ops a step: forward of these blocks again" in found.evidence
    assert the_finding(recompute_would_help, failed_on(64 * MIB)).evidence[0] == "an allocation of 64.0 MiB failed"


def failed_on(size_bytes: int) -> Facts:
    """A run that an allocation of so much ended; at its peak it held 40 GiB, and checkpoints would save 7 MiB."""
    facts = checkpointed(recompute_us=0, device_gib=None)
    failures = (FailedAllocation(0, 0, size_bytes, 1, 0),)
    recording = replace(facts.found.recording, failed_allocations=failures)
    return Facts(analysis=facts.analysis, found=replace(facts.found, recording=recording))


def test_a_request_beyond_all_that_is_held_has_no_cure_in_the_model() -> None:
    facts = failed_on(2**49)
    assert findings(recompute_would_help, facts) == [], "7 MiB less would not help"
    found = the_finding(allocation_too_large, facts)
    assert found.title.startswith("an allocation of 524288.0 GiB failed")
    assert advise(facts, [])[0] == found, "before what would make it quicker"
    said = verdict(facts, [found])
    assert "524288.0 GiB failed" in said and "First fix: a smaller request" in said and "Most to gain" not in said
    assert findings(allocation_too_large, failed_on(64 * MIB)) == []


@pytest.mark.parametrize(
    "made", [{"peak_gib": 70}, {"recompute_us": 200, "peak_gib": 75}, {"device_gib": None}], ids=str
)
def test_memory_that_is_not_short_or_recomputes_already(made: dict[str, Any]) -> None:
    assert findings(recompute_would_help, checkpointed(**({"recompute_us": 0} | made))) == []


# --- graph breaks --------------------------------------------------------------------------------


def compiled(*, regions: int) -> Trace:
    """Two blocks, each with `regions` compiled regions of 100 us, 20 us apart, that multiply for 60 us."""
    made = Trace().annotation("ProfilerStep#0", 0, 1000 * US)
    for block in range(2):
        at = block * 500 * US
        made.mark(f"layers.{block}", at, at + 490 * US, kind="block", class_name="Block", flags=("compiled",))
        for i in range(regions):
            begin = at + i * 120 * US
            made.op(f"Torch-Compiled Region: {i}/0", begin, begin + 100 * US)
            made.annotation("## Call CompiledFxGraph abc ##", begin, begin + 100 * US)
            made.op("aten::mm", begin + 10 * US, begin + 70 * US)
            made.op("graph_0_cpp_fused_relu_0", begin + 70 * US, begin + 100 * US)
    return made


TOLD = [{"reason": "a print", "count": 2, "source": "model.py:12"}, {"reason": "a branch", "count": 1, "source": None}]


def test_graph_breaks_inside_blocks() -> None:
    facts = facts_of(compiled(regions=3).recording(), run={"graph_breaks": TOLD})
    found = the_finding(graph_break, facts)
    assert found.title == "4 graph breaks a step in layers.{0,1}: a print, and 1 other reason"
    assert found.source == "model.py:12"
    assert found.layers == ("layers.0", "layers.1")
    # Between the graphs 4 times 20 us; beside the products 6 times 40 us of CPU time.
    assert found.saves_at_most_us == pytest.approx(80 + 240)


def test_a_foreign_trace_tells_of_breaks_too() -> None:
    found = the_finding(graph_break, facts_of(compiled(regions=2).recording()))
    assert (found.confidence, found.source) == ("low", None)


def test_no_break_no_advice() -> None:
    assert findings(graph_break, facts_of(compiled(regions=1).recording(), run={"graph_breaks": TOLD})) == []
    assert findings(graph_break, facts_of(compiled(regions=3).recording(), run={"graph_breaks": []})) == []
