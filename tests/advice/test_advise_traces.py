"""Advice on recorded traces of GPUs: what fires where, and numbers of it worked out from plain JSON."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import pytest

import gpu_traces
from advice_facts import facts_of_gpu
from profiler_wrapper.advice import attention, blocks, products, waiting
from profiler_wrapper.advice.advise import RULES, headline
from profiler_wrapper.advice.facts import Facts, share
from profiler_wrapper.reports.result_json import to_dict
from profiler_wrapper.tables.model import Finding
from shared_traces import TRACE_NAMES, needs_traces

pytestmark = needs_traces
# Those that have traces of their own are left out.
OTHERS = {*attention.RULES, *products.RULES, blocks.slow_optimizer}
DDP = "ddp_training_with_memory.pt.trace.json.gz"
VLLM = "b200_vllm_eager_inference.json.gz"
VIT = "h100_vit_inference.json.gz"
MI300 = "mi300_resnet_checkpointing_training.json.gz"
QWEN = "h100_qwen1.5_0.5b_inference.json.gz"
VIDEO = "h100_timesformer_inference.json.gz"

# Why, for those whose timelines were looked at: launches lag behind in eager inference of small batches (BERT, ViT,
# vLLM); the first trace is a cold start; the video's frames are prepared on the CPU for 218 ms, and the result is
# fetched with .to("cpu"). Of the others the figures were added up from plain JSON (some of it below): communication
# and small kernels of MI300 and DDP, and that nothing of this kind is in the three that wait for nothing. Of Qwen,
# RMSNorm and rotary embedding are dozens of kernels a block; the V100's norms are one kernel each, which stays.
FIRES = {
    "alexnet_forward.pt.trace.json.gz": {"low-utilization"},
    VLLM: {"launch-bound", "low-utilization", "many-small-kernels"},
    DDP: {"communication-bound", "launch-bound", "many-small-kernels"},
    "h100_bert_small_inference.json.gz": {"launch-bound", "low-utilization"},
    QWEN: {"unfused-elementwise"},
    VIDEO: {"low-utilization", "synchronisation"},
    VIT: {"launch-bound", "low-utilization"},
    MI300: {"communication-bound", "many-small-kernels"},
    "mi300_sglang_qwen3_8b_decode_graph_replay.json.gz": set(),  # idle time is not known: the device was not seen whole
    "mi300_sglang_qwen3_8b_graph_capture.json.gz": set(),  # idle by nature
    "mi300_torch_compile.json.gz": set(),
    "v100_ddp_resnet.pt.trace.json.gz": set(),
}


def facts(name: str) -> Facts:
    return facts_of_gpu(name.removesuffix(".json.gz"))


@functools.lru_cache(maxsize=3)
def events(name: str) -> list[dict[str, Any]]:
    return [event for event in gpu_traces.events(name) if event.get("ph") == "X"]


def on_device(event: dict[str, Any]) -> bool:
    return str(event.get("cat")).lower() in ("kernel", "gpu_memcpy", "gpu_memset")


def covered(some: list[dict[str, Any]]) -> float:
    """Microseconds in which at least one of these events runs."""
    total, till = 0.0, float("-inf")
    for event in sorted(some, key=lambda event: event["ts"]):
        total += max(0.0, event["ts"] + event["dur"] - max(till, event["ts"]))
        till = max(till, event["ts"] + event["dur"])
    return total


def told(name: str) -> dict[str, Finding]:
    """What these rules say, if it is worth a hundredth of the step."""
    rules = [rule for rule in RULES if rule not in OTHERS]
    found = [finding for rule in rules for finding in rule(facts(name))]
    return {f.id: f for f in found if (f.saves_at_most_us or 0) * 1000 >= 0.01 * facts(name).step_ns}


@pytest.mark.parametrize("name", gpu_traces.names_of_traces(largest=pytest.mark.full))
def test_what_fires(name: str) -> None:
    assert set(told(name)) == FIRES[name]


@pytest.mark.parametrize("name", gpu_traces.names_of_traces(largest=pytest.mark.full))
def test_the_summary_is_short_and_true_to_itself(name: str) -> None:
    analysis = facts(name).analysis
    assert not [warning for warning in analysis.warnings if "advice" in warning or "verdict" in warning]
    summary = json.loads(json.dumps(to_dict(analysis)))["summary"]
    assert len(json.dumps(summary)) / 3 < 2000
    assert summary["verdict"].endswith(".")
    assert len(summary["findings"]) <= 10
    step_us = summary["comparable"]["step_us"]
    for finding in summary["findings"]:
        # No more than what changes takes, and what the device idles meanwhile.
        told_us = max(us for name, us in {**finding["details"], "": 0.0}.items() if not name or name.endswith("_us"))
        idle_us = max(0.0, step_us - analysis.time.busy_ns / 1000 / facts(name).steps)
        assert (finding["saves_at_most_us"] or 0) <= 1.001 * (max(told_us, finding["share"] * step_us) + idle_us)
    alike = summary["comparable"]
    assert alike["time_basis"] == "device"
    assert alike["device_count"] == 1


@pytest.mark.parametrize("name", [pytest.param(DDP, marks=pytest.mark.full), VLLM, VIT])
def test_waits_for_launches_are_those_of_the_file(name: str) -> None:
    """A sweep over the file's own numbers: gaps of under 1 ms that end with an event launched within them."""
    device = sorted((event for event in events(name) if on_device(event)), key=lambda event: event["ts"])
    called = {
        event["args"]["correlation"]: event["ts"]
        for event in events(name)
        if not on_device(event) and "correlation" in event.get("args", {})
    }
    first = min(event["ts"] for event in events(name) if str(event["name"]).startswith(("ProfilerStep", "execute_")))
    waits, busy_till = 0.0, None
    for event in device:
        launched = called.get(event["args"].get("correlation"))
        if busy_till is not None and event["ts"] > busy_till and launched is not None and launched > busy_till >= first:
            gap = event["ts"] - busy_till
            waits += gap if gap <= 1000 else 0.0
        busy_till = max(busy_till or 0.0, event["ts"] + event["dur"])
    assert told(name)["launch-bound"].details["waiting_us"] == pytest.approx(waits / facts(name).steps, rel=0.05)
    assert (
        next(iter(waiting.launch_bound(facts(name)))).saves_at_most_us
        == told(name)["launch-bound"].details["waiting_us"]
    )


@pytest.mark.full
def test_nothing_hides_the_communication_of_ddp() -> None:
    """Its all-reduces run on one stream with everything else, so all of their time is exposed."""
    steps = facts(DDP).steps
    spent = sum(event["dur"] for event in events(DDP) if on_device(event) and "nccl" in event["name"])
    assert told(DDP)["communication-bound"].saves_at_most_us == pytest.approx(spent / steps, rel=0.001)
    assert "exposed-communication" not in told(DDP)  # which would say the same again


def test_communication_and_small_kernels_of_mi300_are_those_of_the_file() -> None:
    """Its all-reduces run beside some compute; what was launched before the trace is not of its three steps."""
    device = [event for event in events(MI300) if on_device(event)]
    calls = {event["args"].get("correlation") for event in events(MI300) if event["cat"] == "cuda_runtime"}
    launched = [event for event in device if event["args"]["correlation"] in calls]
    computing = [event for event in device if event["cat"] == "kernel" and "nccl" not in event["name"]]
    moving = [event for event in launched if "nccl" in event["name"]]
    exposed = covered(computing + moving) - covered(computing)  # none of them overlaps what was launched before
    assert told(MI300)["communication-bound"].saves_at_most_us == pytest.approx(exposed / 3, rel=0.02)
    times = [event["dur"] for event in launched if event["cat"] == "kernel"]
    assert told(MI300)["many-small-kernels"].details["kernels"] == pytest.approx(len(times) / 3)
    assert told(MI300)["many-small-kernels"].details["small_kernels"] < sum(time < 10 for time in times) / 3


def test_nothing_is_idle_or_communicates_where_nothing_fires() -> None:
    for name in (name for name in TRACE_NAMES if not FIRES[name] - {"unfused-elementwise"}):
        if facts(name).idle_ns is None:
            continue  # not known
        device = [event for event in events(name) if on_device(event)]
        begin, end = min(event["ts"] for event in device), max(event["ts"] + event["dur"] for event in device)
        assert covered(device) > 0.9 * (end - begin)
        assert not any("nccl" in event["name"] for event in device)


def test_the_kernels_of_qwen_that_could_be_one_are_those_of_the_file() -> None:
    """Those that a call within the trace launched, by their names, in runs between all others of the stream."""
    device = sorted((event for event in events(QWEN) if on_device(event)), key=lambda event: event["ts"])
    calls = {event["args"].get("correlation") for event in events(QWEN) if event["cat"] == "cuda_runtime"}
    kinds = ("elementwise_kernel", "reduce_kernel", "CatArrayBatchedCopy")
    spent = saved = 0.0
    run: list[float] = []
    for event in [*device, {"name": "the end", "dur": 0.0, "args": {}}]:
        fusable = event["args"].get("correlation") in calls and any(kind in event["name"] for kind in kinds)
        if fusable:
            run.append(event["dur"])
        elif run:
            spent, saved, run = spent + sum(run), saved + sum(run) - min(run), []
    found = told(QWEN)["unfused-elementwise"]
    assert found.details["device_us"] == pytest.approx(spent, rel=0.02)
    assert found.saves_at_most_us == pytest.approx(saved, rel=0.03)
    in_step = sum(event["dur"] for event in device if event["args"].get("correlation") in calls)
    assert found.share == pytest.approx(spent / in_step, rel=0.02)


def test_the_copy_of_the_video_is_not_pinned() -> None:
    """One copy of 3.46 ms, in a call that stages it meanwhile."""
    (found,) = waiting.unpinned_copies(facts(VIDEO))
    copy = next(event for event in events(VIDEO) if event["name"] == "Memcpy HtoD (Pageable -> Device)")
    call = next(
        event
        for event in events(VIDEO)
        if event["name"] == "cudaMemcpyAsync" and event["args"]["correlation"] == copy["args"]["correlation"]
    )
    taken = max(copy["ts"] + copy["dur"], call["ts"] + call["dur"]) - call["ts"]
    assert found.saves_at_most_us == pytest.approx(taken, abs=0.01)


def test_the_video_waits_for_frames_to_be_prepared() -> None:
    found = told(VIDEO)["low-utilization"]
    assert "the longest gap: 218 ms" in found.evidence


@pytest.mark.parametrize("name", TRACE_NAMES)
def test_a_headline_is_short_and_its_layers_have_its_share(name: str) -> None:
    seen = facts(name)
    said = headline(seen)
    assert len(said["text"].split()) <= 15
    assert (said["about"] == "layers") == bool(said["layers"])
    if said["layers"] and "own code" not in said["text"]:
        layers = {layer for layer in seen.rows_of for folded in said["layers"] if _unfolds(folded, layer)}
        spent = sum(row.time_ns for row in seen.analysis.layers if row.layer in layers)
        assert f" {share(spent / seen.analysis.time.total_ns)} of " in said["text"]


def _unfolds(folded: str, layer: str) -> bool:
    """Whether a folded name with ranges, as `h.{0..3}.mlp`, stands for a layer."""
    parts = [re.escape(part) for part in re.split(r"\{[^}]*\}", folded)]
    return re.fullmatch(r"\d+".join(parts), layer) is not None
