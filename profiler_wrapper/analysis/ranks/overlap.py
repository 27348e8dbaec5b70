"""How much of its communication a rank computes beside, and why that or a bandwidth is not known."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from profiler_wrapper.analysis.ranks.arrays import Database
from profiler_wrapper.analysis.ranks.model import CommunicationRow
from profiler_wrapper.analysis.ranks.prepared import label_key

_NO_OVERLAP = "overlap: nothing tells what its rank computes beside it, or not of all of them"
_NO_BYTES = "bandwidth: nothing tells how many bytes were moved (traces of a CPU do with record_shapes alone)"
_NO_TRANSFER = "bandwidth: no two ranks tell of one of these, so its transfer cannot be told from waiting"


def overlapped_ns(database: Database) -> dict[int, int]:
    """By label of a prepared database: time with compute of the same rank beside, where all of its spans tell it."""
    if database.execute("SELECT 1 FROM spans WHERE overlapped_ns IS NOT NULL LIMIT 1").fetchone() is None:
        return {}
    found = database.execute(
        f"""SELECT l.label, sum(s.overlapped_ns)::BIGINT FROM spans s JOIN labels_of_names l ON l.key = {label_key("s")}
        WHERE s.kind = 'communication' AND s.step IS NOT NULL
        GROUP BY l.label HAVING count(*) = count(s.overlapped_ns)"""
    ).fetchall()
    return dict(found)


def with_reasons(rows: Iterable[CommunicationRow]) -> tuple[CommunicationRow, ...]:
    """The rows, each with why its overlap or its bandwidth is not known."""
    found = []
    for row in rows:
        reasons = [_NO_OVERLAP] if row.overlapped_ns is None else []
        if row.bandwidth_bytes_per_s is None:
            reasons.append(_NO_BYTES if row.bytes is None else _NO_TRANSFER)
        found.append(replace(row, unknown="; ".join(reasons)))
    return tuple(found)
