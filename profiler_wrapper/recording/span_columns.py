"""Span tables of other tools: which of their columns is which of ours, and in which unit."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from profiler_wrapper.errors import WrongUse
from profiler_wrapper.recording.span_table import RANK_COLUMNS, SPAN_COLUMNS

_UNITS: Final = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9}  # in nanoseconds
_TIMES: Final = ("start", "duration", "end", "device", "waiting")
_SUFFIX = re.compile(r"_(ns|us|ms|s)$")

# What is known by its name alone; of several the first that a table has.
_NAMES: Final = {
    "rank": ("rank", "global_rank"),
    "step": ("step", "iteration", "iter"),
    "name": ("name", "optype", "op_type", "op"),
    "kind": ("kind",),
    "layer": ("layer",),
    "depth": ("depth",),
    "parent": ("parent",),
    "thread": ("thread", "tid"),
    "microbatch": ("microbatch", "micro_batch", "mb_id"),
    "chunk": ("chunk", "mc"),
    "sequence": ("sequence", "seq_id"),
    "group": ("group", "group_name"),
    "bytes": ("bytes",),
    "stage": ("stage", "pipeline_stage", "pp_rank", "pp"),
    "dp": ("dp", "dp_rank"),
    "tp": ("tp", "tp_rank"),
    "cp": ("cp", "cp_rank"),
    "ep": ("ep", "ep_rank"),
    "pp": ("pp", "pp_rank", "stage"),
    "host": ("host", "hostname"),
    "world_size": ("world_size",),
    "attempt": ("attempt",),
}
_TIME_NAMES: Final = {  # of other tools, with their unit; beside `start_ms` and the like
    "start": (("start_ts", "s"), ("ts", "us")),
    "duration": (("duration", "s"), ("dur", "us")),
    "end": (("end_ts", "s"),),
}
_TARGETS: Final = (*dict.fromkeys((*_NAMES, *_TIMES)),)
NEEDED: Final = "rank, name (or kind), start and duration (or end), and step"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of theirs that says what one of ours does; a time in units of `unit_ns`."""

    theirs: str
    unit_ns: int = 1


def parse_mapping(texts: Iterable[str]) -> dict[str, str]:
    """`["took=duration_ms,worker=rank"]` -> `{"took": "duration_ms", "worker": "rank"}`.

    Raises:
        WrongUse: a part is no `theirs=ours`, or ours is none.
    """
    found: dict[str, str] = {}
    for part in (part.strip() for text in texts for part in text.split(",")):
        if not part:
            continue
        theirs, equals, ours = (piece.strip() for piece in part.partition("="))
        if not (theirs and equals and ours):
            raise WrongUse(f"--columns {part}: say THEIRS=OURS, as in took=duration_ms,worker=rank")
        _target(ours)
        found[theirs] = ours
    return found


def find_columns(there: Iterable[str], mapping: Mapping[str, str], *, table: str) -> dict[str, Column]:
    """Which column of a table is which of ours.

    Args:
        there: the columns of the table.
        mapping: theirs to ours, before what names tell. A time of ours has its unit at its end: `duration_ms`.
        table: its name, for errors.

    Returns:
        By our name, times as `start`, `duration` or `end`.

    Raises:
        WrongUse: a column that is needed is not there, or one of `mapping` is not, or a time lacks its unit.
    """
    there = list(there)
    found: dict[str, Column] = {}
    for theirs, ours in mapping.items():
        name = _there(theirs, there)
        if name is None:
            raise WrongUse(f"{table}: no column {theirs!r}, which --columns names. There are: {', '.join(there)}")
        target, unit = _target(ours)
        if target in _TIMES:
            told = unit or _unit_of(name) or _known_unit(target, name)
            if told is None:
                raise WrongUse(f"--columns {theirs}={ours}: say the unit, as in {theirs}={target}_ms (ns, us, ms, s)")
            found[target] = Column(name, _UNITS[told])
        else:
            found[target] = Column(name)
    taken = set(mapping)
    for target, names in _NAMES.items():
        name = next((name for one in names if (name := _there(one, there)) and name not in taken), None)
        if target not in found and name is not None:
            found[target] = Column(name)
    for target in _TIMES:
        if target not in found and (time := _time_column(target, there)) is not None:
            found[target] = time
    _check(found, there, table)
    return found


def _check(found: Mapping[str, Column], there: list[str], table: str) -> None:
    lacking = [name for name in ("rank", "step", "start") if name not in found]
    if "name" not in found and "kind" not in found:
        lacking.append("name")
    if "duration" not in found and "end" not in found:
        lacking.append("duration")
    if lacking:
        raise WrongUse(
            f"{table}: cannot be read as a table of spans: no column for {', '.join(lacking)}. "
            f"It has: {', '.join(there) or 'no columns'}. Needed are {NEEDED}: "
            "name them by --columns THEIRS=OURS, as in --columns took=duration_ms,worker=rank"
        )


def _target(ours: str) -> tuple[str, str | None]:
    """`"duration_ms"` -> `("duration", "ms")`.

    Raises:
        WrongUse: there is no such column.
    """
    match = _SUFFIX.search(ours)
    if match is not None and ours[: match.start()] in _TIMES:
        return ours[: match.start()], match[1]
    if ours not in _TARGETS:
        times = ", ".join(f"{time}_ns|us|ms|s" for time in _TIMES)
        raise WrongUse(f"--columns: no column {ours!r} of ours. There are {', '.join(_NAMES)}; {times}")
    return ours, None


def _time_column(target: str, there: list[str]) -> Column | None:
    named = [(f"{target}_{unit}", unit) for unit in _UNITS] + list(_TIME_NAMES.get(target, ()))
    for theirs, unit in named:
        if (name := _there(theirs, there)) is not None:
            return Column(name, _UNITS[unit])
    return None


def _unit_of(theirs: str) -> str | None:
    match = _SUFFIX.search(theirs.lower())
    return match[1] if match is not None else None


def _known_unit(target: str, theirs: str) -> str | None:
    return next((unit for name, unit in _TIME_NAMES.get(target, ()) if name == theirs.lower()), None)


def _there(name: str, there: list[str]) -> str | None:
    """The column of this name, else the one that differs in case alone."""
    if name in there:
        return name
    return next((one for one in there if one.lower() == name.lower()), None)


_OURS_ALONE: Final = {"start_ns", "duration_ns", "device_ns", "waiting_ns", "overlapped_ns"}
assert set(_NAMES) | _OURS_ALONE == SPAN_COLUMNS.keys() | RANK_COLUMNS.keys()
