"""The device that a run was on, as far as the trace and the run tell."""

from __future__ import annotations

from dataclasses import dataclass

from profiler_wrapper.analysis.advice.facts import Facts
from profiler_wrapper.analysis.device_properties import FIRST_WITH_TF32, busiest_device_properties

_FIRST_WITH_TENSOR_CORES = (7, 0)  # Volta


@dataclass(frozen=True, slots=True)
class Device:
    """An accelerator of which device events were recorded."""

    name: str  # "" where nobody tells
    is_nvidia: bool
    capability: tuple[int, int] | None  # of NVIDIA's only
    memory_bytes: int | None

    @property
    def has_tensor_cores(self) -> bool:
        return self.capability is not None and self.capability >= _FIRST_WITH_TENSOR_CORES

    @property
    def has_tf32(self) -> bool:
        return self.capability is not None and self.capability >= FIRST_WITH_TF32


def device_of(facts: Facts) -> Device | None:
    """None for a CPU-only trace."""
    if not facts.on_device:
        return None
    run, metadata = facts.analysis.run, facts.found.recording.metadata
    properties = busiest_device_properties(facts.found.recording)
    name = str(run.get("device") or properties.name or "")
    is_amd = any(key.startswith("hip_") for key in metadata) or "hip" in run.get("versions", {}) or "AMD" in name
    told = _pair(run.get("compute_capability")) or properties.compute_capability
    is_nvidia = not is_amd and told is not None
    memory = run.get("device_memory_bytes") or properties.memory_bytes or facts.device_memory_bytes
    return Device(
        name=name,
        is_nvidia=is_nvidia,
        capability=told if is_nvidia else None,
        memory_bytes=memory if isinstance(memory, int) and memory > 0 else None,
    )


def _pair(told: object) -> tuple[int, int] | None:
    if not isinstance(told, (list, tuple)) or len(told) != 2 or not all(isinstance(one, int) for one in told):
        return None
    return (told[0], told[1])
