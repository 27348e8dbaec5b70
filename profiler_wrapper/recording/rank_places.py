"""What files and their names say of a rank: its number, its place in the mesh, its host."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from profiler_wrapper.recording.rank_numbers import Gap
from profiler_wrapper.recording.span_table import RANK_COLUMNS
from profiler_wrapper.recording.store import RUN_FILE

RANK_DIRECTORY = re.compile(r"rank(\d{1,9})(_|$)")
_RANK_IN_NAME = re.compile(r"(?i)(?:^|[^a-z])rank[_\-.]?(\d{1,9})(?!\d)")
_GREATEST = 2**31 - 1  # that a column of RANK_COLUMNS holds
_LONGEST_HEADER = 1 << 20


def add_place(ranks: dict[int, dict[str, Any]], rank: int, told: Mapping[str, Any]) -> None:
    """To what is known of each rank, as columns of `RANK_COLUMNS`: what else is told of one."""
    place = ranks.setdefault(rank, {"rank": rank})
    place.update({key: value for key, value in told.items() if key in RANK_COLUMNS and value is not None})
    place["rank"] = rank


def place_in_header(path: Path, gaps: list[Gap]) -> dict[str, Any]:
    """What the first line of a timer's log says of its rank; nothing of a log that is empty, or cannot be read."""
    try:
        with path.open("rb") as lines:
            line = lines.readline(_LONGEST_HEADER)
    except OSError:  # said where its spans are read
        return {}
    if not line:
        return {}
    try:
        header = json.loads(line)["header"]
        return {"rank": _number(header.get("rank")), **place_in_run(header)}
    except (ValueError, AttributeError, LookupError, TypeError, RecursionError):
        gaps.append(Gap(f"header of {path.name}", "its first line is not what a timer writes"))
        return {}


def place_in_run(run: Mapping[str, Any]) -> dict[str, Any]:
    """What run.json or a header says of a rank's place."""
    coordinates = run.get("coordinates")
    told = {**coordinates} if isinstance(coordinates, Mapping) else {}
    told |= {"stage": run.get("stage", told.get("pp")), **{key: run.get(key) for key in ("world_size", "attempt")}}
    host = run.get("host")
    return {
        **{key: number for key, value in told.items() if (number := _number(value)) is not None},
        "host": host if isinstance(host, str) and host else None,
    }


def _number(value: object) -> int | None:
    """A number as a column of `RANK_COLUMNS` holds it, if it is one."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _GREATEST else None


def run_file_in(place: Path, rank: int, gaps: list[Gap]) -> dict[str, Any] | None:
    """What run.json in a rank's directory says; None where there is none, or none that can be read."""
    path = place / RUN_FILE
    try:
        run = json.loads(path.read_bytes())
        if isinstance(run, dict):
            return run
        raise ValueError("no object")
    except FileNotFoundError:
        return None
    except (ValueError, OSError, RecursionError) as error:
        gaps.append(Gap(f"description of rank {rank}", f"{path}: {error}", rank))
        return None


def coordinates_in_name(name: str) -> dict[str, int]:
    """`"rank3_dp1_tp0_pp2"` -> `{"dp": 1, "tp": 0, "pp": 2, "stage": 2}`."""
    parts = re.findall(r"_(dp|tp|pp|cp|ep)(\d{1,9})(?=_|$)", name)
    found = {key: int(number) for key, number in parts}
    return {**found, **({"stage": found["pp"]} if "pp" in found else {})}


def rank_in_name(name: str) -> int | None:
    """`"trace.rank-3.json"` -> 3."""
    match = _RANK_IN_NAME.search(name)
    return int(match[1]) if match is not None else None


def rank_of_directory(name: str) -> int:
    """`"rank3_dp1"` -> 3; -1: it is none of a rank."""
    match = RANK_DIRECTORY.match(name)
    return int(match[1]) if match is not None else -1


def digits_in(name: str) -> int:
    """`"attempt10"` -> 10; 0 without a number."""
    match = re.search(r"\d+", name)
    return int(match[0]) if match is not None else 0
