"""What an exception says about memory, and the answer to it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from profiler_wrapper.capture.records import OutOfMemory, out_of_memory
from profiler_wrapper.run.out_of_memory import out_of_memory_text
from profiler_wrapper.tables.model import CATEGORIES, Change, MemoryMoment, MemoryTimeline, MemoryUse, Owner

GIB = 1 << 30
ON_CUDA = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 3 has a total capacity of 79.10 GiB of which 3.50 GiB is "
    "free. Process 1234 has 75.50 GiB memory in use. Of the allocated memory 70.25 GiB is allocated by PyTorch, and "
    "1.25 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
ON_CPU = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "34359738368 bytes. Error code 12 (Cannot allocate memory)"
)


def test_cuda_says_everything() -> None:
    assert out_of_memory(torch.OutOfMemoryError(ON_CUDA)) == OutOfMemory(
        "cuda:3", 20 * GIB, int(70.25 * GIB), int(71.5 * GIB), int(3.5 * GIB)
    )


def test_rocm_devices_are_called_cuda() -> None:
    failure = out_of_memory(torch.OutOfMemoryError(ON_CUDA.replace("CUDA", "HIP", 1)))
    assert failure is not None and failure.device == "cuda:3"


def test_a_cpu_says_what_was_asked_for() -> None:
    failure = out_of_memory(RuntimeError(ON_CPU))
    assert failure is not None
    assert (failure.device, failure.requested_bytes, failure.allocated_bytes) == ("cpu", 32 * GIB, None)
    assert failure.free_bytes is None


def test_a_real_failure_is_known() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    failure = out_of_memory(caught.value)
    assert failure is not None and failure.requested_bytes == 1 << 60


def test_what_was_raised_from_it_is_it() -> None:
    cause = RuntimeError(ON_CPU)
    wrapped = ValueError("the batch failed")
    wrapped.__cause__ = cause
    assert out_of_memory(wrapped) == out_of_memory(cause)


@pytest.mark.parametrize(
    "error",
    [
        None,
        ValueError("out of memory of my own"),
        RuntimeError("shapes differ"),
        RuntimeError("my file is out of memory-card range"),
    ],
)
def test_other_errors_are_about_something_else(error: BaseException | None) -> None:
    assert out_of_memory(error) is None


@pytest.mark.parametrize(
    ("message", "device"),
    [
        ("Triton Error [CUDA]: out of memory", "cuda"),
        ("Caught OutOfMemoryError in replica 0 on device 0.\nOriginal Traceback:\n" + ON_CUDA, "cuda:3"),
        ("NCCL error: Cuda failure 2 'out of memory'", "cuda"),
    ],
)
def test_devices_are_known_wherever_they_are_named(message: str, device: str) -> None:
    failure = out_of_memory(RuntimeError(message))
    assert failure is not None and failure.device == device


def test_numpy_says_what_it_wanted() -> None:
    failure = out_of_memory(MemoryError("Unable to allocate 900. MiB for an array with shape (117964800,)"))
    assert failure is not None and (failure.device, failure.requested_bytes) == ("cpu", 900 << 20)


def test_torch_without_a_device_is_some_accelerator() -> None:
    failure = out_of_memory(torch.OutOfMemoryError("Allocation failed"))
    assert failure is not None and failure.device == "an accelerator"


def test_a_value_error_is_none() -> None:
    assert out_of_memory(ValueError("not enough memory credits")) is None


def test_a_ring_of_causes_ends() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert out_of_memory(first) is None


# -- the answer ---------------------------------------------------------------------------------------


def owner(category: str, layer: str, size: int, **more: Any) -> Owner:
    values = {"name": "", "op": "aten::mm", "phase": "forward", "count": 1, **more}
    return Owner(category=category, layer=layer, size_bytes=size, **values)  # type: ignore[arg-type]


def use_of(device: str, *owners: Owner) -> MemoryUse:
    """What a recording says that ended with these owners."""
    total = sum(one.size_bytes for one in owners)
    moment = MemoryMoment(
        label="last allocation", step=0, time_ns=1, total_bytes=total, reserved_bytes=None, categories={}
    )
    none = np.empty(0, dtype=np.int64)
    return MemoryUse(
        device=device,
        known_owners=True,
        timeline=MemoryTimeline(time_ns=none, bytes_by_category=none, total_bytes=none, reserved_bytes=None),
        peak=moment,
        peak_owners=owners,
        reserved_peak=None,
        moments=(),
        last=moment,
        last_owners=owners,
        slope=None,
        begin_ns=0,
        end_ns=1,
        changes=(
            Change(kind="smaller_batch", text="halve the batch", layers=(), saves_bytes=300 << 20, costs_ns=None),
        ),
    )


def answered(use: MemoryUse | None, *, device: str = "cpu", in_recording: bool = True) -> list[str]:
    text = out_of_memory_text(
        OutOfMemory(device, 1 << 30, None, None, None),
        where="aten::mm of layers.3.mlp (forward)",
        use=use,
        shape_of=lambda op, layer: "[4, 8] x [8, 16]" if op == "aten::mm" else "",
        failed_in_recording=in_recording,
        files="outputs/run/rank0",
    )
    lines = text.splitlines()
    assert len(lines) <= 12 and all(len(line) <= 100 for line in lines)
    return lines


def test_like_layers_are_one_line() -> None:
    owners = [owner("activation", f"layers.{i}.mlp", 8 << 20, count=2) for i in range(4)]
    owners.append(owner("params", "head", 4 << 20, name="head.weight", op="before profiling"))
    lines = answered(use_of("cpu", *owners))
    assert lines == [
        "profiler_wrapper: out of memory on cpu: requested 1.0 GiB, allocated 36.0 MiB",
        "  in aten::mm of layers.3.mlp (forward)",
        "  held by: activation 32.0 MiB (88.9 %), params 4.0 MiB (11.1 %)",
        "    32.0 MiB activation of layers.{0..3}.mlp",
        "    4.0 MiB params of head",
        "    largest: 8 x 4.0 MiB, aten::mm [4, 8] x [8, 16] of layers.{0..3}.mlp",
        "    largest: 4.0 MiB, params head.weight",
        "  try: halve the batch: -300.0 MiB",
        "  files: outputs/run/rank0",
    ]


def test_names_of_any_length_stay_within_the_lines() -> None:
    owners = [owner(name, f"{'block.' * 60}{i}", 1 << (30 - i)) for i, name in enumerate(CATEGORIES)]
    answered(use_of("cpu", *owners))


def test_of_many_categories_the_smallest_are_left_out() -> None:
    owners = [owner(name, "head", (40 - i) * GIB + GIB // 2) for i, name in enumerate(CATEGORIES)]
    (held,) = (line for line in answered(use_of("cpu", *owners)) if "held by" in line)
    assert held.startswith(f"  held by: {CATEGORIES[0]} 40.5 GiB (") and held.endswith(" %)")
    assert "..." not in held and f", {CATEGORIES[1]} 39.5 GiB" in held


def test_without_a_recording_nothing_is_guessed() -> None:
    assert "who holds it is not known" in "\n".join(answered(None))


def test_what_saves_too_little_is_not_proposed() -> None:
    small = Change(kind="smaller_batch", text="halve the batch", layers=(), saves_bytes=1 << 20, costs_ns=None)
    use = dataclasses.replace(use_of("cpu", owner("params", "head", 1 << 20)), changes=(small,))
    lines = answered(use)
    assert not any("halve" in line for line in lines)
    assert any("try: a smaller request" in line for line in lines)


def test_a_failure_after_the_recording_tells_its_peak() -> None:
    lines = answered(use_of("cpu", owner("params", "head", 1 << 20)), in_recording=False)
    assert any("at the recording's own peak" in line for line in lines)
    assert "allocated" not in lines[0]
