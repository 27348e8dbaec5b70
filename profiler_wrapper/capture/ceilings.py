"""What this machine's own matmuls and copies reach: a roof for devices without a table, and a check of one with."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from typing import Any

import torch
from torch.utils.benchmark import Timer

from profiler_wrapper.capture.growth import free_bytes
from profiler_wrapper.capture.runinfo import run_info
from profiler_wrapper.errors import WrongUse, shown
from profiler_wrapper.trace.measured_peaks import FILE_VERSION, Ceiling, MeasuredPeaks

DEFAULT_SECONDS = 15.0
_CPU_SIZES = (256, 512, 1024, 2048, 4096)
_DEVICE_SIZES = (1024, 2048, 4096, 8192, 16384)
_CPU_COPY_BYTES = 512 << 20  # beyond the last cache of a server
_DEVICE_COPY_BYTES = 1 << 30
_TYPES = ("float64", "float32", "tfloat32", "float16", "bfloat16", "float8", "int8")


_Work = Callable[[], object]
_Sample = tuple[float, float]  # seconds of one call: the fastest sample and the median one


def check_seconds(seconds: float) -> None:
    """Raises WrongUse for what is no time to measure in."""
    if not math.isfinite(seconds) or seconds <= 0:
        raise WrongUse(f"seconds={shown(seconds)}: a time above 0 is needed to measure anything.")


def measure_ceilings(
    device: torch.device | str | None = None,
    *,
    seconds: float = DEFAULT_SECONDS,
    sizes: tuple[int, ...] | None = None,
    copy_bytes: int | None = None,
) -> MeasuredPeaks:
    """Best matmul rate per type and best copy rate of a device, in about `seconds`.

    Square matmuls of growing size, as torch runs them, on normally distributed numbers; FLOPs are 2 n^3. A copy of n
    bytes counts 2 n: read once, written once. On a CPU with the threads that torch's ops use. Types that the device
    does not support, or torch not on it, are in `left_out`.

    torch's settings and random numbers are as before afterwards. The device is waited for: not for use beside training.

    Args:
        device: `"cpu"`, `"cuda:1"`; by default the current accelerator, else the CPU.
        seconds: shared by the types and the copy. One call of the smallest size of each is made in any case.
        sizes: of the matmuls, rising; powers of two by default.
        copy_bytes: of each of the two buffers.

    Raises:
        WrongUse: a device that is not there, or no time.
    """
    check_seconds(seconds)
    where = find_device(device)
    on_cpu = where.type == "cpu"
    end = time.perf_counter() + seconds
    flops: dict[str, Ceiling] = {}
    left_out: dict[str, str] = {}
    with _plain_matmuls(where):
        for i, kind in enumerate(_TYPES):
            reason = _unsupported(kind, where)
            if reason is None:
                share = (end - time.perf_counter()) / (len(_TYPES) - i + 1)
                try:
                    flops[kind] = _best_matmul(kind, where, sizes or (_CPU_SIZES if on_cpu else _DEVICE_SIZES), share)
                except (RuntimeError, TypeError, NotImplementedError) as error:
                    reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
            if reason is not None:
                left_out[kind] = reason
        copy = _best_copy(where, copy_bytes or _copy_bytes(where), end - time.perf_counter())
    if copy is None:
        left_out["copy"] = "there was no memory for its buffers"
    return MeasuredPeaks(
        measured_peaks_version=FILE_VERSION,
        device=device_name(where),
        threads=torch.get_num_threads() if on_cpu else None,
        torch=str(torch.__version__),
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        flops=flops,
        copy=copy,
        left_out=left_out,
    )


def device_name(device: torch.device) -> str:
    """The name that tables and traces have: `"NVIDIA H100 80GB HBM3"`; of a CPU with its threads."""
    if device.type == "cpu":
        return run_info().cpu_name
    module: Any = getattr(torch, device.type, None)
    named = getattr(module, "get_device_name", None)
    return str(named(device)) if named is not None else device.type


def find_device(device: torch.device | str | None) -> torch.device:
    """The device that is meant; None: torch's accelerator here, else the CPU. Raises WrongUse: it is not there."""
    if device is None:
        current = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        if current is None:
            return torch.device("cpu")
        return torch.device(current.type, torch.accelerator.current_device_index())
    try:
        there = torch.ones(1, device=device)
        there.item()  # which a device without memory of its own (meta) refuses
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise WrongUse(f"device {shown(str(device))} cannot be used: {str(error).splitlines()[0]}") from error
    return there.device


# --- types ------------------------------------------------------------------------------------------


def _unsupported(kind: str, device: torch.device) -> str | None:
    """Why a type is not measured; None: it can be tried."""
    cuda = device.type == "cuda"
    if kind == "tfloat32" and (not cuda or torch.version.hip or torch.cuda.get_device_capability(device) < (8, 0)):
        return "no such type on this device"
    if kind == "float8" and not cuda:
        return "not measured off accelerators"
    if kind == "bfloat16" and cuda and not torch.version.hip and torch.cuda.get_device_capability(device) < (8, 0):
        return "no such type on this device; torch computes it in float32"
    return None


def _matmul(kind: str, size: int, device: torch.device) -> _Work:
    """A call that multiplies two (size, size) matrices."""
    left, right = _matrix(size, device, 0), _matrix(size, device, 1)
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
    """MI300 multiplies the variant without negative zero."""
    architecture = getattr(torch.cuda.get_device_properties(device), "gcnArchName", "") if torch.version.hip else ""
    return torch.float8_e4m3fnuz if architecture.startswith("gfx94") else torch.float8_e4m3fn


def _matrix(size: int, device: torch.device, seed: int) -> torch.Tensor:
    """Normal numbers: zeros would let a device clock higher than it can with real ones."""
    generator = torch.Generator(device=device).manual_seed(seed)
    return torch.randn((size, size), generator=generator, device=device, dtype=torch.float32)


@contextlib.contextmanager
def _plain_matmuls(device: torch.device) -> Iterator[None]:
    """No autograd, no autocast, float32 as it is, on this device; afterwards all is as it was."""
    matmul: Any = torch.backends.cuda.matmul
    mkldnn: Any = torch.backends.mkldnn
    settings: list[tuple[Any, str, Any]] = [
        (mkldnn.matmul, "fp32_precision", "ieee"),
        (matmul, "fp32_precision", "ieee"),
        (matmul, "allow_fp16_accumulation", False),
    ]
    before = [(holder, name, getattr(holder, name)) for holder, name, _ in settings]
    there = contextlib.nullcontext() if device.type == "cpu" else torch.accelerator.device_index(device.index)
    try:
        with torch.no_grad(), torch.autocast(device.type, enabled=False), there:
            for holder, name, value in settings:
                setattr(holder, name, value)
            yield
    finally:
        for holder, name, value in before:
            setattr(holder, name, value)


# --- work ------------------------------------------------------------------------------------------


def _best_matmul(kind: str, device: torch.device, sizes: tuple[int, ...], seconds: float) -> Ceiling:
    """The size with the highest rate, of those that there is time and memory for."""
    end = time.perf_counter() + seconds
    matmul: Any = torch.backends.cuda.matmul
    matmul.fp32_precision = "tf32" if kind == "tfloat32" else "ieee"
    found: list[Ceiling] = []
    call_s, before = 0.0, sizes[0]
    for i, size in enumerate(sizes):
        left_s = end - time.perf_counter()
        if found and 3 * call_s * (size / before) ** 3 > left_s:  # a first call, and at least two that count
            break
        try:
            sample = _time(_matmul(kind, size, device), left_s / (len(sizes) - i))
        except RuntimeError:  # no memory, most likely
            if not found:
                raise
            break
        call_s, before = sample[0], size
        found.append(_ceiling(2 * size**3, sample, f"{size} x {size} x {size}"))
    return max(found, key=lambda ceiling: ceiling.per_s)


def _copy_bytes(device: torch.device) -> int:
    """Of each buffer: at most an eighth of the memory that is free."""
    if device.type == "cpu":
        free = free_bytes()
        return _CPU_COPY_BYTES if free is None else min(_CPU_COPY_BYTES, max(free // 8, 1 << 20))
    if device.type == "cuda":
        return min(_DEVICE_COPY_BYTES, max(torch.cuda.mem_get_info(device)[0] // 8, 1 << 20))
    return _DEVICE_COPY_BYTES // 4


def _best_copy(device: torch.device, size_bytes: int, seconds: float) -> Ceiling | None:
    try:
        source = torch.ones(size_bytes, dtype=torch.uint8, device=device)
        target = torch.zeros_like(source)
    except (RuntimeError, MemoryError):
        return None
    sample = _time(lambda: target.copy_(source), seconds)
    return _ceiling(2 * size_bytes, sample, f"{size_bytes / (1 << 20):g} MiB")


def _ceiling(amount: int, sample: _Sample, size: str) -> Ceiling:
    best_s, median_s = sample
    return Ceiling(per_s=amount / best_s, median_per_s=amount / median_s, size=size)


def _time(work: _Work, seconds: float) -> _Sample:
    """In blocks of calls, between which the device is waited for: neither launches nor waiting count."""
    measured = Timer("work()", globals={"work": work}, num_threads=torch.get_num_threads()).blocked_autorange(
        min_run_time=max(seconds, 0.0)
    )
    return max(min(measured.times), 1e-9), max(measured.median, 1e-9)
