"""Advice on communication, on recordings whose answers are derived by hand."""

from __future__ import annotations

from typing import Any

import pytest

from advice_facts import facts_of, findings, the_finding
from profiler_wrapper.advice.communication import data_parallel, exposed_communication, slow_backend
from profiler_wrapper.reports.table import console_table
from profiler_wrapper.tables.model import CollectiveRow
from recordings import Trace

US = 1000
STEP = 1000 * US
RULES = (exposed_communication, slow_backend, data_parallel)


def training(*, moved_us: int = 300, beside_us: int = 100, device: int = 0) -> Trace:
    """Two steps: 500 us of compute, then an all-reduce of which `beside_us` still have compute beside them."""
    made = Trace()
    for step in range(2):
        at = step * STEP
        made.annotation(f"ProfilerStep#{step}", at, at + STEP)
        made.kernel("gemm", at + 10 * US, at + 510 * US, launched=at + US, device=device)
        begin = at + (510 - beside_us) * US
        made.kernel(
            "ncclDevKernel_AllReduce", begin, begin + moved_us * US, launched=at + 2 * US, stream=20, device=device
        )
    return made


def row(**told: Any) -> CollectiveRow:
    base: dict[str, Any] = {
        "collective": "all_gather",
        "group": "fsdp",
        "group_size": 8,
        "dtype": "bfloat16",
        "layer": "model.layers.0",
        "phase": "forward",
        "count": 2,
        "payload_bytes": 2 << 20,
        "time_ns": 60 * US,
        "exposed_ns": 40 * US,
        "overlapped_ns": 20 * US,
        "bandwidth_bytes_per_s": 1e9,
        "bus_bandwidth_bytes_per_s": 0.875e9,
    }
    return CollectiveRow(**(base | told))


def test_communication_with_nothing_beside_it() -> None:
    found = the_finding(exposed_communication, facts_of(training().recording(), collectives=(row(),)))
    assert found.saves_at_most_us == pytest.approx(200)
    assert found.share == pytest.approx(0.2)
    assert found.evidence == (
        "communication runs for 300 µs of a step of 1.00 ms, 200 µs of it alone",
        "most: all_gather (forward) 20.0 µs before model.layers.0",
        "one rank does not tell waiting for a slower one from transfer: profiler-wrapper ranks RUN_DIRECTORY does",
    )
    assert "set_modules_to_forward_prefetch" in found.fix


@pytest.mark.parametrize(
    ("rank", "world", "elements", "whom", "waits_us"),
    [
        (0, 2, 2_500, "rank 1", 120),
        (1, 2, 2_500, "rank 0", 120),
        (3, 8, 2_500, "another rank", 120),
        (0, 2, 8_000, "", 0),
    ],
)
def test_what_no_link_is_slow_enough_for_is_waiting(
    rank: int, world: int, elements: int, whom: str, waits_us: float
) -> None:
    """10,000 bytes take 80 us over 1 Gbit/s: of 300 us the first 220 are waiting, 100 of them beside compute."""
    run = {"rank": rank, "world_size": world, "parameters": {"bytes_by_dtype": {"torch.float32": 4 * elements}}}
    found = the_finding(exposed_communication, facts_of(training().recording(), run=run))
    assert found.details["exposed_us"] == pytest.approx(200)
    assert found.details["waiting_at_least_us"] == pytest.approx(waits_us)
    assert found.title.startswith("20 % of a step (200 µs) is communication with nothing computing beside it")
    assert found.title.endswith(f"mostly waiting for {whom}" if whom else "beside it")
    assert ("compares the ranks" in found.fix) == bool(whom)


@pytest.mark.parametrize("beside_us", [300, 200])
def test_communication_that_is_hidden(beside_us: int) -> None:
    facts = facts_of(training(beside_us=beside_us).recording())
    assert findings(exposed_communication, facts) == []  # exposed for nothing, and for a tenth


@pytest.mark.parametrize(("basis", "told"), [("device", ["high", "medium"]), ("cpu", ["low", "low"])])
def test_communication_on_an_overloaded_cpu_is_less_sure(basis: str, told: list[str]) -> None:
    facts = [
        facts_of(made.recording(), run={"overloaded": True}, time_basis=basis, collectives=(row(exposed_ns=120 * US),))
        for made in (training(), training(beside_us=220))
    ]
    assert [the_finding(exposed_communication, one).confidence for one in facts] == told


def test_what_was_launched_before_the_trace_is_of_no_step() -> None:
    made = training(moved_us=100, beside_us=100)
    made.kernel("ncclDevKernel_AllReduce", 550 * US, 990 * US, stream=30, correlation=10**6)
    assert findings(exposed_communication, facts_of(made.recording())) == []
    before = row(collective="other", layer=None, phase="other", exposed_ns=900 * US, time_ns=900 * US)
    assert findings(exposed_communication, facts_of(made.recording(), collectives=(before,))) == []


def test_exposed_communication_by_layer() -> None:
    rows = [row(layer=f"model.layers.{i}") for i in range(4)]  # 20 us a step each
    rows += [row(layer="model.layers.0", phase="backward", exposed_ns=0)]
    rows += [row(collective="all_reduce", layer="", phase="backward", exposed_ns=30 * US)]  # 15 us a step: too little
    facts = facts_of(training(beside_us=220).recording(), collectives=tuple(rows))  # 80 us are exposed: under a tenth
    found = the_finding(exposed_communication, facts)
    assert found.layer == "model.layers.{0..3}"
    assert len(found.layers) == 4
    assert found.saves_at_most_us == pytest.approx(80)
    assert found.title == ("80.0 µs a step of all_gather (forward) has no compute beside it before model.layers.{0..3}")
    assert "set_modules_to_forward_prefetch" in found.fix


def gloo(backend: str) -> Trace:
    made = Trace()
    for step in range(2):
        at = step * STEP
        made.annotation(f"ProfilerStep#{step}", at, at + STEP)
        made.kernel("gemm", at + 10 * US, at + 510 * US, launched=at + US)
        made.annotation(f"{backend}:all_reduce", at + 500 * US, at + 900 * US, thread=9)
    return made


def test_gloo_between_devices() -> None:
    facts = facts_of(gloo("gloo").recording(), run={"process_group_backend": "gloo"})
    found = the_finding(slow_backend, facts)
    assert found.saves_at_most_us == pytest.approx(400)
    assert "nccl" in found.fix
    by_trace = facts_of(gloo("gloo").recording(metadata={"distributedInfo": {"backend": "gloo"}}))
    assert the_finding(slow_backend, by_trace).confidence == "high"


def test_gloo_beside_nccl_is_for_the_cpu() -> None:
    run = {"process_group_backend": "cpu:gloo,cuda:nccl"}
    assert findings(slow_backend, facts_of(gloo("gloo").recording(), run=run)) == []
    assert findings(slow_backend, facts_of(training().recording(), run={"process_group_backend": "gloo"})) == []


def parallel(*, devices: int, name: str = "DataParallel.forward") -> Trace:
    made = Trace().annotation("ProfilerStep#0", 0, STEP).annotation(name, 10 * US, 400 * US)
    for device in range(devices):
        begin = 50 * US + device * 100 * US
        made.kernel("gemm", begin, begin + 300 * US, launched=begin - US, device=device)
    return made


def test_data_parallel_on_several_devices() -> None:
    found = the_finding(data_parallel, facts_of(parallel(devices=2).recording()))
    assert found.saves_at_most_us == pytest.approx(700)  # each device works 300 us
    assert "2 devices" in found.title
    named = facts_of(parallel(devices=2, name="forward").recording(), run={"wrappers": ["DataParallel"]})
    assert len(findings(data_parallel, named)) == 1


def test_data_parallel_on_one_device_or_another_wrapper() -> None:
    assert findings(data_parallel, facts_of(parallel(devices=1).recording())) == []
    other = parallel(devices=2, name="DistributedDataParallel.forward")
    assert findings(data_parallel, facts_of(other.recording(), run={"wrappers": ["DistributedDataParallel"]})) == []


def test_a_cpu_without_ranks() -> None:
    made = Trace().annotation("ProfilerStep#0", 0, STEP).op("aten::mm", 0, 900 * US)
    facts = facts_of(made.recording())
    assert [findings(rule, facts) for rule in RULES] == [[], [], []]


def test_gloo_on_a_cpu_is_communication_of_the_step() -> None:
    made = Trace()
    for step in range(2):
        at = step * STEP
        made.annotation(f"ProfilerStep#{step}", at, at + STEP).op("aten::mm", at, at + 600 * US)
        made.annotation("gloo:all_reduce", at + 500 * US, at + 900 * US, thread=9)
    facts = facts_of(made.recording(), run={"rank": 1, "world_size": 2, "parameters": {"bytes_by_dtype": {"f": 100}}})
    found = the_finding(exposed_communication, facts)
    assert found.saves_at_most_us == pytest.approx(300)
    assert facts.analysis.time.exposed_communication_ns == 2 * 300 * US  # the number of table and result.json
    assert "exposed communication 0.300 ms per step" in console_table(facts.analysis)
    assert found.title.endswith("mostly waiting for rank 0")
    assert findings(slow_backend, facts) == []
