"""A timeline as a page holds it: what its numbers mean as JSON, and the numbers as packed columns.

The columns come one after another, each number as a LEB128 varint, packed by raw deflate, as base64. A plain column
holds its numbers, any other the zigzag of what each differs by from the one before, the first from 0.
"""

from __future__ import annotations

import base64
import zlib
from typing import Any

import numpy as np

from profiler_wrapper.errors import in_a_line
from profiler_wrapper.place.classes import CLASSES
from profiler_wrapper.place.names import PHASES
from profiler_wrapper.tables.timeline_columns import CAUSES, FAILED, Columns, Timeline
from profiler_wrapper.trace.recording import Int64

_PLAIN = frozenset({"duration_ns", "depth", "device", "time_ns", "count", "events.name"})


def packed_timeline(timeline: Timeline | str) -> tuple[dict[str, Any], str]:
    """Return (what its numbers mean, its numbers); where there is no timeline, or packing fails, ({why}, "")."""
    if isinstance(timeline, str):
        return {"why": timeline}, ""
    tables: dict[str, Columns] = {"events": timeline.events, "gaps": timeline.gaps, "sums": timeline.sums}
    try:
        columns = (varints(coded(name, key, table[key])) for name, table in tables.items() for key in table)
        packer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
        packed = packer.compress(b"".join(columns)) + packer.flush()
    except Exception as error:  # the page is worth more
        return {"why": f"{FAILED}: {in_a_line(error)}"}, ""
    head = {
        "why": None,
        "note": timeline.note,
        "device": timeline.device,
        "origin_ns": str(timeline.origin_ns),
        "length_ns": timeline.length_ns,
        "steps": [step._asdict() for step in timeline.steps],
        "lanes": [lane._asdict() for lane in timeline.lanes],
        "names": [*timeline.names],
        "layers": [*timeline.layers],
        "phases": [*PHASES],
        "classes": [*CLASSES],
        "causes": [*CAUSES],
        "tables": [{"name": name, "count": len(one["step"]), "columns": [*one]} for name, one in tables.items()],
    }
    return head, base64.b64encode(packed).decode("ascii")


def coded(table: str, name: str, column: Int64) -> Int64:
    """Return the numbers that are written for a column."""
    if name in _PLAIN or f"{table}.{name}" in _PLAIN:
        return column
    differences = np.diff(column, prepend=0)
    return np.where(differences < 0, -2 * differences - 1, 2 * differences)


def varints(numbers: Int64) -> bytes:
    """Code numbers from 0, seven bits a byte, the lowest first; all bytes of one but its last have the highest bit."""
    length = np.ones(len(numbers), dtype=np.int64)
    for bits in range(7, 63, 7):
        length += numbers >> bits > 0
    first = np.cumsum(length) - length
    packed = np.empty(int(length.sum()), dtype=np.uint8)
    for byte in range(int(length.max(initial=0))):
        longer = np.flatnonzero(length > byte)
        goes_on = length[longer] > byte + 1
        packed[first[longer] + byte] = (numbers[longer] >> 7 * byte & 127) | np.where(goes_on, 128, 0)
    return packed.tobytes()
