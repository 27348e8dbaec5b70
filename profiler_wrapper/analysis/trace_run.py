"""What a trace says of the run it is from: rank, device, versions, steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from profiler_wrapper.analysis.device_properties import busiest_device_properties
from profiler_wrapper.recording.recording import Recording

_VERSIONS = {
    "cuda_runtime_version": "cuda",
    "cuda_driver_version": "cuda driver",
    "hip_runtime_version": "hip",
    "hip_driver_version": "hip driver",
    "cupti_version": "cupti",
}


def run_of_trace(recording: Recording, step_numbers: tuple[int, ...]) -> dict[str, Any]:
    """The keys of run.json that the trace itself can fill."""
    metadata = recording.metadata
    info = metadata.get("distributedInfo")
    info = info if isinstance(info, Mapping) else {}
    return {
        "trace": recording.path,
        "rank": recording.rank or 0,
        "world_size": info.get("world_size", 1),
        "device": busiest_device_properties(recording).name,
        "versions": {short: metadata[key] for key, short in _VERSIONS.items() if key in metadata},
        "timed_steps": list(step_numbers),
        "full_steps": [],
    }
