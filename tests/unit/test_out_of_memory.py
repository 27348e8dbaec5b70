"""What an exception says about memory, and the answer to it."""

from __future__ import annotations

import pytest
import torch

from profiler_wrapper.capture.out_of_memory import OutOfMemory, out_of_memory

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
    assert failure.free_bytes is not None and failure.free_bytes > 0


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


@pytest.mark.parametrize("error", [None, ValueError("out of memory of my own"), RuntimeError("shapes differ")])
def test_other_errors_are_about_something_else(error: BaseException | None) -> None:
    assert out_of_memory(error) is None


def test_a_ring_of_causes_ends() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert out_of_memory(first) is None
