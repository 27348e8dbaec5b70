"""A memory snapshot as JSON.

Keys (bytes; times in microseconds since 1970, null where the file does not say):

    {schema_version: 1, name, file_bytes, settings{}, notes[],
     devices[{device, reserved_bytes, allocated_bytes, awaiting_free_bytes, free_bytes, largest_free_bytes,
              rounding_bytes, blocks,
              pools[{pool, stream, kind, expandable, segments, reserved_bytes, allocated_bytes,
                     awaiting_free_bytes, free_bytes, largest_free_bytes}],
              owners[OWNER], layers[{layer, origin, size_bytes, blocks}],
              history: null | {entries, before_bytes, before_unknown_bytes, inconsistent, failed,
                               peak: MOMENT, failures[{requested_bytes, device_free_bytes, fragmented, line,
                                                       moment: MOMENT}],
                               curve{state[], time_us[] | null, allocated_bytes[], reserved_bytes[] | null}}}]}
    OWNER  = {line, inside, layer, caller, origin, metadata, size_bytes, blocks, largest_bytes,
              stack[{file, line, name, source}]}
    MOMENT = {state, time_us, allocated_bytes, reserved_bytes, owners[OWNER]}

`allocated_bytes` of a device and its owners count what was given, those of a history what was asked for. State k is
that after k entries; a curve has the highest state of each of at most 1000 stretches.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from profiler_wrapper.analysis.allocator_model import (
    AllocatorReport,
    DeviceMemory,
    FailedAllocation,
    MemoryHistory,
    MemoryOwner,
    Moment,
    PoolMemory,
)
from profiler_wrapper.recording.recording import Int64

SCHEMA_VERSION = 1
_CURVE_POINTS = 1000
_FRAMES = 40  # of a stack


def to_dict(report: AllocatorReport) -> dict[str, Any]:
    """What the file holds; see the top of this module."""
    return {
        "schema_version": SCHEMA_VERSION,
        "name": report.name,
        "file_bytes": report.file_bytes,
        "settings": dict(report.settings),
        "notes": list(report.notes),
        "devices": [_device(one) for one in report.devices],
    }


def highest_states(allocated_bytes: Int64, points: int) -> Int64:
    """At most `points` states in order, of each stretch the one with the most allocated, and the last."""
    states = len(allocated_bytes)
    if states <= points:
        return np.arange(states)
    edges = np.linspace(0, states, points, dtype=np.int64)
    highest = [int(first + allocated_bytes[first:last].argmax()) for first, last in pairwise(edges)]
    return np.array([*highest, states - 1] if highest[-1] != states - 1 else highest, np.int64)


def _device(one: DeviceMemory) -> dict[str, Any]:
    return {
        "device": one.device,
        "reserved_bytes": one.reserved_bytes,
        "allocated_bytes": one.allocated_bytes,
        "awaiting_free_bytes": one.awaiting_free_bytes,
        "free_bytes": one.free_bytes,
        "largest_free_bytes": one.largest_free_bytes,
        "rounding_bytes": one.rounding_bytes,
        "blocks": one.blocks,
        "pools": [_pool(pool) for pool in one.pools],
        "owners": [_owner(owner) for owner in one.owners],
        "layers": [
            {"layer": row.layer, "origin": row.origin, "size_bytes": row.size_bytes, "blocks": row.blocks}
            for row in one.layers
        ],
        "history": _history(one.history) if one.history is not None else None,
    }


def _pool(pool: PoolMemory) -> dict[str, Any]:
    return {
        "pool": list(pool.pool),
        "stream": pool.stream,
        "kind": pool.kind,
        "expandable": pool.expandable,
        "segments": pool.segments,
        "reserved_bytes": pool.reserved_bytes,
        "allocated_bytes": pool.allocated_bytes,
        "awaiting_free_bytes": pool.awaiting_free_bytes,
        "free_bytes": pool.free_bytes,
        "largest_free_bytes": pool.largest_free_bytes,
    }


def _owner(owner: MemoryOwner) -> dict[str, Any]:
    place = owner.place
    return {
        "line": place.line,
        "inside": place.inside,
        "layer": place.layer,
        "caller": place.caller,
        "origin": place.origin,
        "metadata": owner.metadata,
        "size_bytes": owner.size_bytes,
        "blocks": owner.blocks,
        "largest_bytes": owner.largest_bytes,
        "stack": [
            {"file": frame.file, "line": frame.line, "name": frame.name, "source": frame.source}
            for frame in owner.frames[:_FRAMES]
        ],
    }


def _moment(moment: Moment) -> dict[str, Any]:
    return {
        "state": moment.state,
        "time_us": moment.time_us,
        "allocated_bytes": moment.allocated_bytes,
        "reserved_bytes": moment.reserved_bytes,
        "owners": [_owner(owner) for owner in moment.owners],
    }


def _failure(failure: FailedAllocation) -> dict[str, Any]:
    return {
        "requested_bytes": failure.requested_bytes,
        "device_free_bytes": failure.device_free_bytes,
        "fragmented": failure.fragmented,
        "line": failure.place.line,
        "moment": _moment(failure.moment),
    }


def _history(history: MemoryHistory) -> dict[str, Any]:
    states = highest_states(history.allocated_bytes, _CURVE_POINTS)
    times, reserved_bytes = history.time_us, history.reserved_bytes
    return {
        "entries": history.entries,
        "before_bytes": history.before_bytes,
        "before_unknown_bytes": history.before_unknown_bytes,
        "inconsistent": history.inconsistent,
        "failed": history.failed,
        "peak": _moment(history.peak),
        "failures": [_failure(failure) for failure in history.failures],
        "curve": {
            "state": states.tolist(),
            "time_us": times[np.maximum(states - 1, 0)].tolist() if times is not None else None,
            "allocated_bytes": history.allocated_bytes[states].tolist(),
            "reserved_bytes": reserved_bytes[states].tolist() if reserved_bytes is not None else None,
        },
    }
