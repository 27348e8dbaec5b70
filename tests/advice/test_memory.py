"""Device memory that is nearly full, or reserved without use."""

from __future__ import annotations

from typing import Any

import pytest

from advice_facts import facts_of, facts_of_gpu
from profiler_wrapper.advice.facts import Facts
from profiler_wrapper.advice.memory import fragmentation, memory_nearly_full
from recordings import Trace

GIB = 1 << 30


def device(allocated: float, reserved: float, *, total: float = 80, run: dict[str, Any] | None = None) -> Facts:
    """A step whose peak is so many GiB, all of them in one allocation, on a device with `total` GiB."""
    size = int(allocated * GIB)
    trace = Trace().annotation("ProfilerStep#0", 0, 100).mark("layer", 0, 100)
    trace.op("aten::mm", 10, 20).kernel("gemm", 20, 30, launched=12)
    trace.memory(15, size, address=1, device=0, reserved=int(reserved * GIB))
    trace.memory(60, -size, address=1, device=0, reserved=int(reserved * GIB))
    metadata = {"deviceProperties": [{"id": 0, "name": "NVIDIA H100", "totalGlobalMem": int(total * GIB)}]}
    return facts_of(trace.recording(metadata=metadata), run=run)


def test_a_nearly_full_device_is_told_with_what_fills_it() -> None:
    (found,) = memory_nearly_full(device(70, 76))
    assert found.share == pytest.approx(0.95)
    assert found.details == {"allocated_bytes": 70 * GIB, "reserved_bytes": 76 * GIB, "device_bytes": 80 * GIB}
    assert found.saves_at_most_bytes is None  # nobody knows what checkpointing will save


def test_room_enough_and_numbers_that_cannot_be_are_silent() -> None:
    assert list(memory_nearly_full(device(60, 71.9))) == []
    assert list(memory_nearly_full(device(60, 90))) == []  # more than there is: told of another device
    assert len(list(memory_nearly_full(device(60, 70, run={"device_memory_bytes": 72 * GIB})))) == 1


def test_memory_that_is_reserved_and_never_needed_is_fragmentation() -> None:
    (found,) = fragmentation(device(30, 50))
    assert found.saves_at_most_bytes == 20 * GIB
    assert "expandable_segments" in found.fix


@pytest.mark.parametrize(
    "facts",
    [
        {"allocated": 45, "reserved": 50},
        {"allocated": 0.5, "reserved": 1},  # a trifle of 80 GiB
        {"allocated": 30, "reserved": 50, "run": {"allocator_settings": "expandable_segments:True"}},
    ],
    ids=["used", "little", "expandable"],
)
def test_what_is_used_little_or_expandable_is_no_fragmentation(facts: dict[str, Any]) -> None:
    assert list(fragmentation(device(**facts))) == []


@pytest.mark.full
def test_a_real_gpu_reserved_twice_what_it_needed() -> None:
    """By hand from the `[memory]` events: 6,629,508,096 bytes allocated at most, 12,782,141,440 reserved."""
    facts = facts_of_gpu("ddp_training_with_memory.pt.trace")
    (found,) = fragmentation(facts)
    assert found.saves_at_most_bytes == 12_782_141_440 - 6_629_508_096
    assert list(memory_nearly_full(facts)) == []  # of 32 GiB


def test_a_real_gpu_with_little_reserved_is_silent() -> None:
    facts = facts_of_gpu("h100_qwen1.5_0.5b_inference")
    assert list(memory_nearly_full(facts)) == []
    assert list(fragmentation(facts)) == []


def test_a_cpu_has_no_such_memory() -> None:
    trace = Trace().annotation("ProfilerStep#0", 0, 100).op("aten::mm", 10, 20).memory(15, GIB, address=1)
    facts = facts_of(trace.recording())
    assert list(memory_nearly_full(facts)) == list(fragmentation(facts)) == []
