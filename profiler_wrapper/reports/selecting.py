"""Parts of what `result.json` holds, for programs that need little of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from profiler_wrapper.errors import WrongUse

# What rows are ranked by: the first of these that they have. Self times add up, so those at the top are the dearest.
_RANKED_BY = ("self_time_us", "time_us", "time_per_step_us", "wait_us", "allocated_bytes", "size_bytes")
_CURVE = "memory.curve"  # a list for each of its columns
_CURVE_ROWS = (f"{_CURVE}.steps", f"{_CURVE}.phases")  # rows of their own beside the points
_IN_TIME_ORDER = "step"  # rows that have it stay in their order


def selected(data: Mapping[str, Any], *, select: Iterable[str] = (), top: int | None = None) -> dict[str, Any]:
    """`data` with the keys of `select` only (`summary`, `layers.time_us`), and at most `top` rows of each list.

    Of rows, those with the highest self time (else time, else bytes) come first; rows of steps stay in their order.
    `memory.curve` keeps as many of its points, the highest, in their order. `rows_left_out` then says how many rows of
    a list, or points, are missing.

    Raises:
        WrongUse: there is no such key, or `top` is none.
    """
    if top is not None and top < 1:
        raise WrongUse(f"top={top}: give the number of rows, from 1.")
    wanted = _wanted(data, select)
    left_out: dict[str, int] = {}
    found: dict[str, Any] = {}
    for key, parts in wanted.items():
        value = data[key] if top is None else _limited(data[key], key, top, left_out)
        found[key] = _parts(value, key, parts) if parts else value
    return found | ({"rows_left_out": left_out} if left_out else {})


def _wanted(data: Mapping[str, Any], names: Iterable[str]) -> dict[str, list[str]]:
    """The parts that are wanted of each key; none: all of it."""
    wanted: dict[str, list[str]] = {}
    for name in names:
        key, dot, part = name.partition(".")
        if key not in data:
            raise WrongUse(f"select={name!r}: a result has no {key!r}. It has: {', '.join(data)}.")
        parts = wanted.setdefault(key, [part] if dot else [])
        if not dot:
            parts.clear()
        elif parts and part not in parts:
            parts.append(part)
    return wanted or {key: [] for key in data}


def _parts(value: Any, key: str, parts: Iterable[str]) -> Any:
    """These keys of a mapping, or of every row of a list."""
    if value is None:
        return None
    if isinstance(value, list) and all(isinstance(row, Mapping) for row in value):
        return [_parts(row, key, parts) for row in value]
    if not isinstance(value, Mapping):
        raise WrongUse(f"select={key}.{next(iter(parts))}: {key} has no parts here. Select {key}.")
    for part in parts:
        if part not in value:
            raise WrongUse(f"select={key}.{part}: {key} has no {part!r}. It has: {', '.join(value)}.")
    return {part: value[part] for part in parts}


def _limited(value: Any, place: str, top: int, left_out: dict[str, int]) -> Any:
    if isinstance(value, Mapping) and place == _CURVE:
        return _highest(value, top, left_out)
    if isinstance(value, Mapping):
        return {key: _limited(inner, f"{place}.{key}", top, left_out) for key, inner in value.items()}
    if not (isinstance(value, list) and value and all(isinstance(row, Mapping) for row in value)):
        return value
    if len(value) > top:
        left_out[place] = len(value) - top
    return ranked(value)[:top]


def _highest(curve: Mapping[str, Any], top: int, left_out: dict[str, int]) -> dict[str, Any]:
    """The curve at its `top` highest points."""
    held = curve["allocated_bytes"]
    if len(held) > top:
        left_out[_CURVE] = len(held) - top
    kept = sorted(sorted(range(len(held)), key=lambda at: -held[at])[:top])

    def thinned(value: Any, name: str) -> Any:
        if isinstance(value, Mapping):
            return {key: thinned(inner, f"{name}.{key}") for key, inner in value.items()}
        if isinstance(value, list) and name not in _CURVE_ROWS:
            return [value[at] for at in kept]
        return _limited(value, name, top, left_out)

    return {key: thinned(value, f"{_CURVE}.{key}") for key, value in curve.items()}


def ranked(rows: list[Any]) -> list[Any]:
    """The rows with the most first; as they are, where nothing ranks them."""
    by = next((name for name in _RANKED_BY if name in rows[0]), None) if rows else None
    if by is None or _IN_TIME_ORDER in rows[0]:
        return rows
    return sorted(rows, key=lambda row: -(row.get(by) or 0))
