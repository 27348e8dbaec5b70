"""A timeline as rows that a test can read."""

from __future__ import annotations

from typing import Any

from profiler_wrapper.place.classes import CLASSES
from profiler_wrapper.place.names import PHASES
from profiler_wrapper.tables.timeline_columns import CAUSES, Timeline


def rows(found: Timeline, table: str) -> list[dict[str, Any]]:
    """With names in place of numbers; None for -1, "?" for a layer that is not known."""
    texts = {
        "name": found.names,
        "op": found.names,
        "layer": found.layers,
        "phase": PHASES,
        "class": CLASSES,
        "cause": CAUSES,
    }
    columns = getattr(found, table)
    said = []
    for values in zip(*(column.tolist() for column in columns.values()), strict=True):
        row: dict[str, Any] = {}
        for key, value in zip(columns, values, strict=True):
            row[key] = texts[key][value] if key in texts and value >= 0 else {-1: None, -2: "?"}.get(value, value)
        row["lane"] = found.lanes[row["lane"]].name if "lane" in row else None
        said.append(row)
    return said
