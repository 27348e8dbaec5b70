"""Device memory that is nearly full, or kept by the allocator without use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from profiler_wrapper.analysis.advice.device import device_of
from profiler_wrapper.analysis.advice.facts import Facts, Rule
from profiler_wrapper.analysis.advice.wording import share, size
from profiler_wrapper.analysis.view_model import Finding

_NEARLY_FULL = 0.9  # of the device's memory
_UNUSED = 0.2  # of what is reserved when most is
_LEAST_UNUSED = 0.02  # of the device's memory; less is no trouble
_NO_ACCELERATOR = "cpu"


def memory_nearly_full(facts: Facts) -> Iterator[Finding]:
    """The allocator holds over nine tenths of the device's memory: a longer batch fails, and it may begin to retry."""
    peak, device = _peak(facts), device_of(facts)
    if peak is None or device is None or device.memory_bytes is None:
        return
    allocated, reserved = peak.get("allocated_bytes") or 0, peak.get("reserved_bytes") or 0
    held = max(allocated, reserved)
    if held <= _NEARLY_FULL * device.memory_bytes:
        return
    if held > device.memory_bytes:  # of another device, or told wrongly
        return
    yield Finding(
        id="memory-nearly-full",
        title=f"{share(held / device.memory_bytes)} of the device's memory is taken at the peak, of "
        f"{size(device.memory_bytes)}",
        layer=None,
        phase=peak.get("phase"),
        share=min(1.0, held / device.memory_bytes),
        saves_at_most_us=None,
        saves_at_most_bytes=None,
        evidence=(
            f"allocated {size(allocated)}, reserved {size(reserved)}, of {size(device.memory_bytes)}",
            *_largest(facts, allocated),
        ),
        confidence="high",
        fix="checkpoint blocks (torch.utils.checkpoint), a smaller batch, or shard what is held (FSDP)",
        details={"allocated_bytes": allocated, "reserved_bytes": reserved, "device_bytes": device.memory_bytes},
    )


def _largest(facts: Facts, allocated: int) -> list[str]:
    """The categories that make up most of the peak."""
    told = facts.analysis.memory.get("categories")
    if not isinstance(told, Mapping) or not allocated:
        return []
    largest = sorted(((bytes_, name) for name, bytes_ in told.items() if bytes_), reverse=True)[:3]
    names = {
        "params": "parameters",
        "grads": "gradients",
        "os_params": "the optimizer's copies",
        "os_state": "its state",
    }
    parts = ", ".join(
        f"{names.get(name, name)} {size(bytes_)} ({share(bytes_ / allocated)})" for bytes_, name in largest
    )
    return [f"at the peak: {parts}"] if parts else []


def fragmentation(facts: Facts) -> Iterator[Finding]:
    """Much more reserved than allocated at the moment when most is reserved."""
    peak, device = _peak(facts), device_of(facts)
    if peak is None or device is None:
        return
    moment = peak.get("reserved")
    moment = moment if isinstance(moment, Mapping) else peak
    reserved, then = moment.get("reserved_bytes"), moment.get("allocated_bytes")
    highest = peak.get("allocated_bytes")
    if not reserved or then is None or highest is None:
        return
    unused = reserved - max(then, highest)  # what was needed at some time is no waste
    if unused < _UNUSED * reserved:
        return
    if device.memory_bytes is not None and unused < _LEAST_UNUSED * device.memory_bytes:
        return
    told = facts.analysis.run.get("allocator_settings")
    if isinstance(told, str) and "expandable_segments:true" in told.replace(" ", "").lower():
        return
    yield Finding(
        id="fragmentation",
        title=f"the allocator reserves {size(unused)} that no recorded step needs, "
        f"{share(unused / reserved)} of all it has",
        layer=None,
        phase=peak.get("phase"),
        share=min(1.0, unused / reserved),
        saves_at_most_us=None,
        saves_at_most_bytes=unused,
        evidence=(
            f"reserved {size(reserved)} at most, allocated {size(highest)} at most",
            f"when most was reserved, {size(then)} was allocated",
            *([f"PYTORCH_CUDA_ALLOC_CONF={told!r} in this run"] if isinstance(told, str) else []),
            "saves at most: all that is reserved beyond the most that was allocated; steps before may have needed it",
        ),
        confidence="medium",
        fix="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment",
        details={"reserved_bytes": reserved, "allocated_bytes": highest, "unused_bytes": unused},
    )


def _peak(facts: Facts) -> Mapping[str, Any] | None:
    """The `peak` of a device's memory; None on a CPU, and where memory was not recorded."""
    peak = facts.analysis.memory.get("peak")
    on_cpu = facts.analysis.memory.get("device") in (None, _NO_ACCELERATOR)
    return None if on_cpu or not isinstance(peak, Mapping) else peak


RULES: tuple[Rule, ...] = (memory_nearly_full, fragmentation)
