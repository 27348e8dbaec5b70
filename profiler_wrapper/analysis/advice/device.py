"""The device that a run was on, as far as the trace and the run tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from profiler_wrapper.analysis.advice.facts import Facts

_FIRST_WITH_TENSOR_CORES = (7, 0)  # Volta; tfloat32 came with Ampere, 8.0
_FIRST_WITH_TF32 = (8, 0)


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
        return self.capability is not None and self.capability >= _FIRST_WITH_TF32


def device_of(facts: Facts) -> Device | None:
    """None for a CPU-only trace."""
    if not facts.on_device:
        return None
    run, metadata = facts.analysis.run, facts.found.recording.metadata
    properties = _properties(facts)
    name = str(run.get("device") or properties.get("name") or "")
    is_amd = any(key.startswith("hip_") for key in metadata) or "hip" in run.get("versions", {}) or "AMD" in name
    told = _pair(run.get("compute_capability")) or _pair(
        [properties.get("computeMajor"), properties.get("computeMinor")]
    )
    is_nvidia = not is_amd and told is not None
    memory = run.get("device_memory_bytes") or properties.get("totalGlobalMem") or facts.device_memory_bytes
    return Device(
        name=name,
        is_nvidia=is_nvidia,
        capability=told if is_nvidia else None,
        memory_bytes=memory if isinstance(memory, int) and memory > 0 else None,
    )


def _properties(facts: Facts) -> Mapping[str, Any]:
    """Of the device that most device events ran on, else of the first."""
    recording = facts.found.recording
    told = recording.metadata.get("deviceProperties")
    entries = [entry for entry in told if isinstance(entry, Mapping)] if isinstance(told, list) else []
    used, counts = np.unique(recording.spans.device[recording.device_mask], return_counts=True)
    busiest = int(used[np.argmax(counts)]) if len(used) else None
    return next((entry for entry in entries if entry.get("id") == busiest), entries[0] if entries else {})


def _pair(told: object) -> tuple[int, int] | None:
    if not isinstance(told, (list, tuple)) or len(told) != 2 or not all(isinstance(one, int) for one in told):
        return None
    return (told[0], told[1])
