"""What this machine's own matmuls and copies reach: a roof for devices without a table, and a check of one with."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime, timezone
from typing import Any

import torch
from torch.utils.benchmark import Timer

from profiler_wrapper.capture.growth import free_bytes
from profiler_wrapper.capture.runinfo import run_info
from profiler_wrapper.errors import WrongUse, shown
from profiler_wrapper.trace.measured_peaks import FILE_VERSION, Ceiling, MeasuredPeaks

_CPU_SIZES = (256, 512, 1024, 2048, 4096)
_DEVICE_SIZES = (1024, 2048, 4096, 8192, 16384)
_CPU_COPY_BYTES = 512 << 20  # beyond the last cache of a server
_DEVICE_COPY_BYTES = 1 << 30
_TYPES = ("float64", "float32", "tfloat32", "float16", "bfloat16", "float8", "int8")


def measure_ceilings(device: torch.device, *, seconds: float) -> MeasuredPeaks:
    """Measure the best matmul rate per type and the best copy rate of a device, in about `seconds`.

    Square matmuls of growing size, as torch runs them, on normally distributed numbers; FLOPs are 2 n^3. A copy of n
    bytes counts 2 n: read once, written once. On a CPU with the threads that torch's ops use. Types that the device
    does not support, or torch not on it, are in `left_out`.

    torch's settings and random numbers are as before afterwards. The device is waited for: not for use beside training.
    Types and copy share the time, but one call of the smallest size of each is made in any case.
    """
    end = time.perf_counter() + seconds
    flops: dict[str, Ceiling] = {}
    left_out: dict[str, str] = {}
    with _plain_matmuls(device):
        for i, kind in enumerate(_TYPES):
            try:
                flops[kind] = _best_matmul(kind, device, (end - time.perf_counter()) / (len(_TYPES) - i + 1))
            except (RuntimeError, TypeError) as error:
                left_out[kind] = (str(error).splitlines() or [type(error).__name__])[0][:200]
        copy = _best_copy(device, end - time.perf_counter())
    if copy is None:
        left_out["copy"] = "there was no memory for its buffers"
    return MeasuredPeaks(
        measured_peaks_version=FILE_VERSION,
        device=device_name(device),
        threads=torch.get_num_threads() if device.type == "cpu" else None,
        torch=str(torch.__version__),
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        flops=flops,
        copy=copy,
        left_out=left_out,
    )


def device_name(device: torch.device) -> str:
    """Return the name that tables and traces have: `"NVIDIA H100 80GB HBM3"`; of a CPU with its threads."""
    if device.type == "cpu":
        return run_info().cpu_name
    named = getattr(getattr(torch, device.type, None), "get_device_name", None)
    return str(named(device)) if named is not None else device.type


def find_device(device: str | None) -> torch.device:
    """Return the device of that name; None: torch's accelerator, else the CPU. Raises WrongUse: it is not there."""
    if device is None:
        current = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return torch.device(current.type, torch.accelerator.current_device_index()) if current else torch.device("cpu")
    try:
        there = torch.ones(1, device=device)
        there.item()  # which a device without memory of its own (meta) refuses
    except (RuntimeError, AssertionError) as error:
        raise WrongUse(f"device {shown(device)} cannot be used: {str(error).splitlines()[0]}") from error
    return there.device


@contextmanager
def _plain_matmuls(device: torch.device) -> Iterator[None]:
    """Turn off autograd, autocast and smaller types for float32 on this device; restore the settings afterwards."""
    matmul: Any = torch.backends.cuda.matmul
    mkldnn: Any = torch.backends.mkldnn
    settings = [(mkldnn.matmul, "fp32_precision", "ieee"), (matmul, "fp32_precision", "ieee"),
                (matmul, "allow_fp16_accumulation", False)]  # fmt: skip
    there = torch.accelerator.device_index(None if device.type == "cpu" else device.index)
    with torch.no_grad(), torch.autocast(device.type, enabled=False), there, ExitStack() as afterwards:
        for holder, name, value in settings:
            afterwards.callback(setattr, holder, name, getattr(holder, name))
            setattr(holder, name, value)
        yield


def _check_type(kind: str, device: torch.device) -> None:
    """Raise NotImplementedError with the reason why a type is not measured."""
    cuda, hip = device.type == "cuda", torch.version.hip is not None
    old = cuda and not hip and torch.cuda.get_device_capability(device) < (8, 0)
    if kind == "tfloat32" and (not cuda or hip or old):
        raise NotImplementedError("no such type on this device")
    if kind == "float8" and not cuda:
        raise NotImplementedError("not measured off accelerators")
    if kind == "bfloat16" and old:
        raise NotImplementedError("no such type on this device; torch computes it in float32")


def _best_matmul(kind: str, device: torch.device, seconds: float) -> Ceiling:
    """Return the highest rate over the sizes that there is time and memory for."""
    _check_type(kind, device)
    end = time.perf_counter() + seconds
    matmul: Any = torch.backends.cuda.matmul
    matmul.fp32_precision = "tf32" if kind == "tfloat32" else "ieee"
    sizes = _CPU_SIZES if device.type == "cpu" else _DEVICE_SIZES
    found: list[Ceiling] = []
    for i, size in enumerate(sizes):
        amount, left_s = 2 * size**3, end - time.perf_counter()
        if found and 3 * amount / found[-1].per_s > left_s:  # a first call, and at least two that count
            break
        try:
            work = _matmul(kind, size, device)
            found.append(_rate(work, amount, f"{size} x {size} x {size}", left_s / (len(sizes) - i)))
        except RuntimeError:  # no memory, most likely
            if not found:
                raise
            break
    return max(found, key=lambda ceiling: ceiling.per_s)


def _matmul(kind: str, size: int, device: torch.device) -> Callable[[], torch.Tensor]:
    """Return a call that multiplies two (size, size) matrices of random numbers: zeros let a device clock higher."""
    generator = torch.Generator(device=device).manual_seed(0)
    left, right = (torch.randn(size, size, generator=generator, device=device, dtype=torch.float32) for _ in range(2))
    if kind == "int8":
        a, b = (matrix.mul_(40).clamp_(-127, 127).to(torch.int8) for matrix in (left, right))
        columns = b.t().contiguous().t()  # as the device's library wants its second operand
        return lambda: torch._int_mm(a, columns)
    if kind == "float8":
        of_eight = _float8(device)
        a, b = left.to(of_eight), right.to(of_eight).t().contiguous().t()
        one = torch.ones((), device=device)
        return lambda: torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)
    dtype = torch.float32 if kind == "tfloat32" else getattr(torch, kind)
    a, b = left.to(dtype), right.to(dtype)
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def _float8(device: torch.device) -> torch.dtype:
    """Return the device's float8 type: MI300 multiplies the variant without negative zero."""
    architecture = getattr(torch.cuda.get_device_properties(device), "gcnArchName", "") if torch.version.hip else ""
    return torch.float8_e4m3fnuz if architecture.startswith("gfx94") else torch.float8_e4m3fn


def _best_copy(device: torch.device, seconds: float) -> Ceiling | None:
    """Measure copies between two buffers, each at most an eighth of the free memory; None: there is none for them."""
    most, free = _DEVICE_COPY_BYTES // 4, None
    if device.type == "cpu":
        most, free = _CPU_COPY_BYTES, free_bytes()
    elif device.type == "cuda":
        most, free = _DEVICE_COPY_BYTES, torch.cuda.mem_get_info(device)[0]
    size_bytes = most if free is None else min(most, max(free // 8, 1 << 20))
    try:
        source = torch.ones(size_bytes, dtype=torch.uint8, device=device)
        target = torch.zeros_like(source)
    except (RuntimeError, MemoryError):
        return None
    return _rate(lambda: target.copy_(source), 2 * size_bytes, f"{size_bytes / (1 << 20):g} MiB", seconds)


def _rate(work: Callable[[], object], amount: int, size: str, seconds: float) -> Ceiling:
    """Time blocks of calls, between which the device is waited for: neither launches nor waiting count."""
    timer = Timer("work()", globals={"work": work}, num_threads=torch.get_num_threads())
    measured = timer.blocked_autorange(min_run_time=max(seconds, 0.0))
    return Ceiling(per_s=amount / min(measured.times), median_per_s=amount / measured.median, size=size)
