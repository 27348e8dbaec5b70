"""What `result.json` says of memory: numbers in bytes, times in nanoseconds on the trace's clock."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from profiler_wrapper.analysis.memory_curve import memory_curve
from profiler_wrapper.analysis.memory_model import MemoryMoment, MemoryUse, Owner

_MOST_OWNERS = 50


def memory_summary(use: MemoryUse | None) -> dict[str, Any]:
    """The `memory` of a result; `categories` are those at the peak. All None where nothing was recorded."""
    if use is None:
        return {"device": None, "allocated_bytes": None, "reserved_bytes": None, "peak": None, "categories": None}
    timeline = use.timeline
    reserved = timeline.reserved_bytes
    return {
        "device": use.device,
        "known_owners": use.known_owners,
        "allocated_bytes": int(timeline.total_bytes[-1]),
        "reserved_bytes": None if reserved is None else int(reserved[-1]),
        "categories": dict(use.peak.categories),
        "peak": {
            "allocated_bytes": use.peak.total_bytes,
            "reserved_bytes": None if reserved is None else int(reserved.max()),
            "time_ns": use.peak.time_ns,
            "step": use.peak.step,
            "phase": timeline.phase_at(use.peak.time_ns),
            "owners": [_owner(owner) for owner in use.peak_owners[:_MOST_OWNERS]],
            "reserved": None if use.reserved_peak is None else _moment(use.reserved_peak),
        },
        "moments": [_moment(moment) for moment in use.moments],
        "slope": None if use.slope is None else asdict(use.slope),
        "leaks": [asdict(leak) for leak in use.leaks],
        "changes": [asdict(change) for change in use.changes],
        "curve": memory_curve(use),
    }


def _moment(moment: MemoryMoment) -> dict[str, Any]:
    return {
        "label": moment.label,
        "step": moment.step,
        "time_ns": moment.time_ns,
        "allocated_bytes": moment.total_bytes,
        "reserved_bytes": moment.reserved_bytes,
        "categories": dict(moment.categories),
    }


def _owner(owner: Owner) -> dict[str, Any]:
    return {
        "category": owner.category,
        "layer": owner.layer,
        "name": owner.name,
        "op": owner.op,
        "phase": owner.phase,
        "bytes": owner.size_bytes,
        "count": owner.count,
    }
