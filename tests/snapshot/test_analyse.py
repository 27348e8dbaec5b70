"""The numbers of a snapshot: by hand, against the allocator's own books, and against torch's own functions."""

from __future__ import annotations

import copy
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.cuda import _memory_viz

from profiler_wrapper.snapshot.analyse import (
    BEFORE_HISTORY,
    NO_LINE,
    DeviceMemory,
    MemoryHistory,
    Place,
    file_kind,
    lifetimes,
    place,
)
from profiler_wrapper.snapshot.read import Frame, Stack
from snapshots import (
    ADAM_STACK,
    ATTENTION_STACK,
    BACKWARD,
    INIT_STACK,
    LINEAR,
    MAIN,
    MIB,
    MLP_STACK,
    MODULE_CALL,
    TORCH,
    FakeAllocator,
    frame,
    read,
    report_of,
    snapshot,
    training,
)


def history_of(one: DeviceMemory) -> MemoryHistory:
    assert one.history is not None
    return one.history


# -- by hand --------------------------------------------------------------------------------------


@pytest.fixture
def by_hand() -> dict[str, Any]:
    """A segment of 4096: 1024 for 1000 asked, 512 awaiting its free, 512 for 100, the rest free; another of 2048, free.

    The history: (before) 1000 and 700 there; 300 allocated; 700 freed; 400 allocated, freed as far as was asked;
    100 allocated; 9000 in vain; 300 freed.
    """
    blocks = [
        {"address": 0, "size": 1024, "requested_size": 1000, "state": "active_allocated", "frames": INIT_STACK},
        {"address": 1024, "size": 512, "requested_size": 400, "state": "active_pending_free", "frames": MLP_STACK},
        {"address": 1536, "size": 512, "requested_size": 100, "state": "active_allocated", "frames": MLP_STACK},
        {"address": 2048, "size": 2048, "requested_size": 0, "state": "inactive", "frames": []},
    ]
    free = [{"address": 8192, "size": 2048, "requested_size": 0, "state": "inactive", "frames": []}]
    segment = {"device": 0, "stream": 0, "segment_type": "small", "segment_pool_id": (0, 0), "is_expandable": False}
    entries = [
        {"action": "alloc", "addr": 2048, "size": 300, "frames": ATTENTION_STACK},
        {"action": "free_requested", "addr": 3072, "size": 700},
        {"action": "free_completed", "addr": 3072, "size": 700},
        {"action": "segment_alloc", "addr": 8192, "size": 2048},
        {"action": "alloc", "addr": 1024, "size": 400, "frames": MLP_STACK},
        {"action": "free_requested", "addr": 1024, "size": 400},
        {"action": "alloc", "addr": 1536, "size": 100, "frames": MLP_STACK, "user_metadata": "mlp"},
        {"action": "oom", "size": 9000, "device_free": 50, "frames": ATTENTION_STACK},
        {"action": "free_requested", "addr": 2048, "size": 300},
        {"action": "free_completed", "addr": 2048, "size": 300},
        {"action": "snapshot", "addr": 0, "size": 0},
    ]
    return {
        "segments": [
            {**segment, "address": 0, "total_size": 4096, "blocks": blocks},
            {**segment, "address": 8192, "total_size": 2048, "blocks": free},
        ],
        "device_traces": [[{**entry, "stream": 0, "time_us": 1000 + i} for i, entry in enumerate(entries)]],
    }


def test_the_state_at_the_end(by_hand: dict[str, Any]) -> None:
    (one,) = report_of(by_hand).devices
    assert one.reserved_bytes == 6144
    assert one.allocated_bytes == 1536
    assert one.awaiting_free_bytes == 512
    assert one.free_bytes == 4096
    assert one.largest_free_bytes == 2048
    assert one.rounding_bytes == 24 + 412
    assert one.blocks == 2
    assert [(owner.size_bytes, owner.place.line, owner.place.metadata) for owner in one.owners] == [
        (1024, "run/model.py:5 __init__", ""),
        (512, "run/model.py:12 forward", "mlp"),
    ]
    assert [(row["layer"], row["origin"], row["size_bytes"]) for row in one.layers] == [
        ("", "other", 1024),
        ("run/model.py:12 forward", "forward", 512),
    ]


def test_the_course_and_its_peak(by_hand: dict[str, Any]) -> None:
    (one,) = report_of(by_hand).devices
    history = history_of(one)
    assert history.curve.allocated_bytes.tolist() == [
        1700,
        2000,
        2000,
        1300,
        1300,
        1700,
        1700,
        1800,
        1800,
        1800,
        1500,
        1500,
    ]
    assert history.curve.reserved_bytes is not None
    assert history.curve.reserved_bytes.tolist() == [4096] * 4 + [6144] * 8
    assert (history.before_bytes, history.before_unknown_bytes) == (1700, 700)
    assert (history.peak.state, history.peak.time_us, history.peak.allocated_bytes) == (1, 1000, 2000)
    assert [(owner.size_bytes, owner.place.line) for owner in history.peak.owners] == [
        (1000, "run/model.py:5 __init__"),
        (700, BEFORE_HISTORY),
        (300, "run/model.py:31 forward"),
    ]
    assert history.inconsistent == 0


def test_what_could_not_be_had(by_hand: dict[str, Any]) -> None:
    (one,) = report_of(by_hand).devices
    failure = one.failure
    assert failure is not None
    assert (failure.requested_bytes, failure.device_free_bytes) == (9000, 50)
    assert failure.line == "run/model.py:31 forward"
    assert failure.moment.allocated_bytes == 1800
    by_key = {(owner.place.line, owner.place.metadata): owner.size_bytes for owner in failure.moment.owners}
    assert by_key == {
        ("run/model.py:5 __init__", ""): 1000,
        ("run/model.py:12 forward", ""): 400,
        ("run/model.py:31 forward", ""): 300,
        ("run/model.py:12 forward", "mlp"): 100,
    }
    assert failure.moment.unallocated_bytes == 6144 - 1800
    assert not failure.fragmented


def test_free_memory_in_pieces_is_called_fragmentation() -> None:
    (one,) = report_of(snapshot(training(total_mib=48))).devices
    assert one.failure is not None
    assert one.failure.requested_bytes == 4 * MIB
    assert one.largest_free_bytes < 4 * MIB < one.free_bytes
    assert one.failure.fragmented


# -- against the allocator's books ----------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"total_mib": 48}, {"leak": False}, {"layers": 1, "steps": 1}])
def test_courses_are_what_the_allocator_noted_after_each_entry(options: dict[str, Any]) -> None:
    gpu = training(**options)
    (one,) = report_of(snapshot(gpu)).devices
    history = history_of(one)
    assert list(zip(history.curve.allocated_bytes[1:], history.curve.reserved_bytes[1:], strict=True)) == gpu.books  # type: ignore[index]
    assert (history.before_bytes, history.before_unknown_bytes) == (0, 0)


@pytest.mark.parametrize("kept", [1, 7, 60, 150])
def test_a_bounded_history_ends_and_goes_as_the_whole_one_does(kept: int) -> None:
    gpu = training(steps=4)
    report = report_of(snapshot(gpu, max_entries=kept))
    history = history_of(report.devices[0])
    assert history.entries == kept
    assert list(zip(history.curve.allocated_bytes, history.curve.reserved_bytes, strict=True)) == gpu.books[-kept - 1 :]  # type: ignore[arg-type]
    assert history.before_bytes == gpu.books[-kept - 1][0]
    assert any("before the first of the" in note for note in report.notes)


ACTS = st.lists(st.tuples(st.sampled_from(["malloc", "free", "free later", "empty_cache"]), st.integers(1, 5 * MIB)))


@given(ACTS, st.booleans(), st.integers(1, 50))
def test_any_course_of_events_is_followed_exactly(acts: list[tuple[str, int]], expandable: bool, kept: int) -> None:
    gpu = FakeAllocator(expandable=expandable, total_bytes=40 * MIB)
    pending: set[int] = set()
    gpu.malloc(1, INIT_STACK)
    for act, number in acts:
        freeable = [address for address in gpu.live if address not in pending]
        if act == "malloc":
            gpu.malloc(number, MLP_STACK if number % 2 else ADAM_STACK, stream=number % 3, pool=(0, number % 2))
        elif act == "empty_cache":
            gpu.empty_cache()
        elif freeable:
            address = freeable[number % len(freeable)]
            gpu.free(address, complete=act == "free")
            pending |= {address} if act == "free later" else set()
    value = snapshot(gpu, max_entries=kept)
    (one,) = report_of(value).devices
    history = history_of(one)
    books = gpu.books[-kept:]
    assert history.curve.reserved_bytes is not None
    assert history.curve.reserved_bytes[1:].tolist() == [reserved for _, reserved in books]
    if (value["device_traces"][0] and not pending) or any(
        e["action"] == "free_completed" for e in value["device_traces"][0]
    ):
        assert history.curve.allocated_bytes[1:].tolist() == [allocated for allocated, _ in books]
    assert one.reserved_bytes == one.allocated_bytes + one.awaiting_free_bytes + one.free_bytes == gpu.reserved
    for moment in (history.peak, *(failure.moment for failure in history.failures)):
        assert sum(owner.size_bytes for owner in moment.owners) == moment.allocated_bytes
    assert sum(owner.size_bytes for owner in one.owners) == one.allocated_bytes
    assert sum(row["size_bytes"] for row in one.layers) == one.allocated_bytes
    for name in ("reserved_bytes", "allocated_bytes", "awaiting_free_bytes", "free_bytes"):
        assert sum(getattr(pool, name) for pool in one.pools) == getattr(one, name)


# -- against torch's own --------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"total_mib": 48}, {"layers": 7}])
def test_sums_are_those_of_torchs_segsum(options: dict[str, Any]) -> None:
    value = snapshot(training(**options))
    (one,) = report_of(value).devices
    said = dict(re.findall(r"^(segments|total_\w+): (.*)$", _memory_viz.segsum(value), re.MULTILINE))
    lost = one.free_bytes + one.awaiting_free_bytes
    assert said == {
        "segments": str(sum(pool.segments for pool in one.pools)),
        "total_reserved": repr(_memory_viz.Bytes(one.reserved_bytes)),
        "total_allocated": repr(_memory_viz.Bytes(one.allocated_bytes - one.rounding_bytes)),
        "total_free": _memory_viz._report_free(lost, one.rounding_bytes),
    }


def test_blocks_by_stack_are_those_of_torchs_flamegraph() -> None:
    value = snapshot(training())
    (one,) = report_of(value).devices
    torchs: Counter[str] = Counter()
    for line in _memory_viz.memory(value, format_flamegraph=lambda lines: lines).splitlines():
        stack, _, size = line.rpartition(" ")
        _, state, frames = stack.split(";", 2)
        if state == "active_allocated" and frames != "<gaps>":
            torchs[frames] += int(size)
    ours: Counter[str] = Counter()
    for segment in read(value).segments:
        for block in segment.blocks:
            if block.state == "allocated":
                frames = read(value).stacks[block.stack].frames
                names = [f"{Path(one.file).name}:{one.line}:{one.name}" for one in reversed(frames)]
                ours[";".join(names) or "<non-python>"] += block.requested_bytes
    assert ours == torchs
    assert sum(torchs.values()) == one.allocated_bytes - one.rounding_bytes


def test_what_was_never_freed_is_what_torchs_filter_leaves() -> None:
    value = snapshot(training(steps=4), max_entries=200)
    left = _memory_viz.filter_alloc_free_pairs(copy.deepcopy(value))["device_traces"][0]
    found = read(value)
    lives = lifetimes(found.events[0], [block for segment in found.segments for block in segment.blocks])
    alive = (lives.died == len(found.events[0]) + 1) & (lives.born > 0)
    assert sorted(lives.size_bytes[alive].tolist()) == sorted(e["size"] for e in left if e["action"] == "alloc")


def test_torchs_trace_reads_our_stand_in_as_its_own() -> None:
    """So the stand-in has the structure that torch's own reader wants."""
    value = snapshot(training(total_mib=48))
    said = _memory_viz.trace(value)
    assert f"{len(value['device_traces'][0])} entries" in said
    assert "raise OutOfMemoryError # 4.0MiB requested, 2.0MiB free in CUDA" in said


def test_what_torch_makes_of_a_profile_is_read_like_any_snapshot() -> None:
    """torch writes snapshots without a GPU in one way: from a profile."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
    with torch.profiler.profile(profile_memory=True, record_shapes=True, with_stack=True) as profile:
        model(torch.ones(32, 64)).sum().backward()
    value = _memory_viz._profile_to_snapshot(profile)
    (one,) = report_of(value).devices
    said = _memory_viz.segsum(value)
    assert f"total_reserved: {_memory_viz.Bytes(one.reserved_bytes)!r}\n" in said
    assert f"total_allocated: {_memory_viz.Bytes(one.allocated_bytes)!r}\n" in said
    assert one.allocated_bytes >= sum(p.nbytes + p.grad.nbytes for p in model.parameters() if p.grad is not None)
    assert history_of(one).entries == len(value["device_traces"][one.device])
    assert history_of(one).curve.allocated_bytes[-1] == one.allocated_bytes


# -- devices, versions, odd histories -------------------------------------------------------------


def test_devices_are_kept_apart_and_the_fullest_comes_first() -> None:
    report = report_of(snapshot(training(layers=1, steps=1), second := training_on(2)))
    assert [one.device for one in report.devices] == [2, 0]
    assert report.devices[0].reserved_bytes == second.reserved
    assert history_of(report.devices[0]).curve.allocated_bytes[-1] == second.books[-1][0]


def training_on(device: int) -> FakeAllocator:
    gpu = training()
    gpu.device = device
    for segment in gpu.segments:
        segment["device"] = device
    return gpu


def test_without_a_history_there_is_no_peak_and_that_is_said() -> None:
    value = snapshot(training())
    report = report_of({"segments": value["segments"]})
    assert report.devices[0].history is None
    assert report.devices[0].failure is None
    assert "no history" in report.notes[0]


def test_a_history_without_times_has_no_times() -> None:
    value = snapshot(training())
    for entry in value["device_traces"][0]:
        del entry["time_us"]
    history = history_of(report_of(value).devices[0])
    assert history.curve.time_us is None
    assert history.peak.time_us is None


def test_a_history_without_completed_frees_counts_requested_ones() -> None:
    """`skip_actions=["free_completed"]`."""
    gpu = training()
    value = snapshot(gpu)
    kept = [(e, b) for e, b in zip(gpu.trace, gpu.books, strict=True) if e["action"] != "free_completed"]
    value["device_traces"][0] = [entry for entry, _ in kept]
    history = history_of(report_of(value).devices[0])
    assert history.curve.allocated_bytes[-1] == gpu.books[-1][0]
    assert history.inconsistent == 0


def test_a_history_that_ended_long_before_the_snapshot_is_said_to() -> None:
    gpu = training(steps=1, layers=2)
    stale = copy.deepcopy(gpu.trace[:20])
    value = snapshot(gpu)
    value["device_traces"][0] = stale
    report = report_of(value)
    assert history_of(report.devices[0]).inconsistent > 0
    assert any("do not fit" in note for note in report.notes)


def test_a_history_of_other_segments_has_no_course_of_reserved() -> None:
    value = snapshot(training())
    value["segments"] = value["segments"][:1]
    report = report_of(value)
    assert history_of(report.devices[0]).curve.reserved_bytes is None
    assert any("reserved memory over time is not available" in note for note in report.notes)


def test_many_failures_are_counted_and_the_last_are_kept() -> None:
    gpu = FakeAllocator(total_bytes=4 * MIB)
    for i in range(30):
        gpu.malloc((10 + i) * MIB, MLP_STACK)
    history = history_of(report_of(snapshot(gpu)).devices[0])
    assert history.failed == 30
    assert [one.requested_bytes // MIB for one in history.failures] == list(range(32, 40))


def test_metadata_of_the_history_is_known_of_blocks_alive() -> None:
    (one,) = report_of(snapshot(training())).devices
    assert {owner.place.metadata: owner.blocks for owner in one.owners if owner.place.metadata} == {"params": 4}


def test_an_empty_snapshot_has_no_devices() -> None:
    assert report_of({"segments": [], "device_traces": [[]]}).devices == ()


def test_a_long_history_of_one_place() -> None:
    gpu = FakeAllocator()
    for _ in range(3000):
        gpu.free(gpu.malloc(1000, MLP_STACK))
    value = snapshot(gpu)
    history = history_of(report_of(value).devices[0])
    assert history.entries == 9001
    assert history.curve.state[[0, -1]].tolist() == [0, 9001]
    assert history.curve.allocated_bytes.max() == 1000
    whole = lifetimes(read(value).events[0], []).allocated(9002)
    assert np.count_nonzero(whole == 1000) == 6000


# -- which line of a stack ------------------------------------------------------------------------


def frames(*values: dict[str, Any]) -> tuple[Frame, ...]:
    return tuple(Frame(value["filename"], value["line"], value["name"]) for value in values)


HF = frame("/opt/venv/lib/python3.11/site-packages/transformers/models/llama/modeling_llama.py", 180, "forward")
CPP = frame("??", 0, "c10::cuda::CUDACachingAllocator::malloc")
CPP2 = frame("/pytorch/c10/core/StorageImpl.h", 12, "make_storage")


@pytest.mark.parametrize(
    ("stack", "expected"),
    [
        ([], Place(NO_LINE, "", "", "", "no stack")),
        ([CPP, CPP2], Place(NO_LINE, "", "", "", "no stack")),
        (
            MLP_STACK,
            Place(
                "run/model.py:12 forward",
                "torch/nn/modules/linear.py:134 forward",
                "run/model.py:12 forward",
                "",
                "forward",
            ),
        ),
        ([CPP, *ADAM_STACK], Place("run/train.py:44 main", "torch/optim/adam.py:166 _init_group", "", "", "optimizer")),
        (
            [LINEAR, MODULE_CALL, HF, MODULE_CALL, MAIN],
            Place(
                "transformers/models/llama/modeling_llama.py:180 forward",
                "torch/nn/modules/linear.py:134 forward",
                "transformers/models/llama/modeling_llama.py:180 forward",
                "run/train.py:40 main",
                "forward",
            ),
        ),
        (
            [BACKWARD, MAIN],
            Place("run/train.py:40 main", "torch/autograd/__init__.py:354 backward", "", "", "backward"),
        ),
        (
            [LINEAR, MODULE_CALL, MAIN],
            Place(
                "run/train.py:40 main",
                "torch/nn/modules/linear.py:134 forward",
                "torch/nn/modules/linear.py:134 forward",
                "",
                "forward",
            ),
        ),
        (
            [LINEAR, MODULE_CALL],
            Place(
                "torch/nn/modules/linear.py:134 forward", "", "torch/nn/modules/linear.py:134 forward", "", "forward"
            ),
        ),
        (
            [frame("/usr/lib/python3.11/contextlib.py", 81, "inner"), frame(f"{TORCH}_ops.py", 1, "__call__"), MAIN],
            Place("run/train.py:40 main", "", "", "", "other"),
        ),
        (
            [
                frame("/tmp/torchinductor_me/c4/c4x.py", 120, "call"),
                frame(f"{TORCH}_dynamo/eval_frame.py", 9, "f"),
                MAIN,
            ],
            Place("run/train.py:40 main", "compiled code, c4/c4x.py:120 call", "", "", "other"),
        ),
        (
            [frame("<ipython-input-3-abc>", 2, "<module>")],
            Place("<ipython-input-3-abc>:2 <module>", "", "", "", "other"),
        ),
        ([frame("<frozen runpy>", 88, "_run_code"), MAIN], Place("run/train.py:40 main", "", "", "", "other")),
        (
            [frame("C:\\me\\run\\train.py", 3, "main")],
            Place("run/train.py:3 main", "", "", "", "other"),
        ),
    ],
)
def test_the_line_that_matters_of_a_stack(stack: list[dict[str, Any]], expected: Place) -> None:
    assert place(Stack(frames(*stack))) == expected


def test_generated_code_is_named_by_the_line_of_the_model() -> None:
    stack = Stack((Frame("<eval_with_key>.1", 4, "forward", "/home/me/run/model.py:9 forward"), *frames(MAIN)))
    assert place(stack).line == "run/model.py:9 forward"
    assert place(stack).caller == "run/train.py:40 main"


@pytest.mark.parametrize(
    ("file", "short"),
    [
        ("/a/site-packages/torch/nn/x.py", "torch/nn/x.py"),
        ("/a/dist-packages/peft/x.py", "peft/x.py"),
        ("/home/me/a/b/c.py", "b/c.py"),
        ("c.py", "c.py"),
        ("/home/me/torch/c.py", "torch/c.py"),
    ],
)
def test_files_are_shortened_to_what_tells_them_apart(file: str, short: str) -> None:
    assert file_kind(file)[1] == short
