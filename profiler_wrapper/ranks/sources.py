"""Finds what a run's ranks wrote: logs of timers, traces, reduced traces; whose they are, and whose is missing."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from profiler_wrapper.errors import BrokenTrace, WrongUse
from profiler_wrapper.trace.run_directory import RUN_FILE
from profiler_wrapper.trace.spans import RANK_COLUMNS, Gap

TIMERS = "timers"
REDUCED_FILE = "spans.parquet"
Use = Literal["timers", "traces"]

_TIMER_LOG = re.compile(r"timer_rank(\d+)\.jsonl$")
_TRACE_ENDINGS = (".json", ".json.gz")
_OWN_JSON = re.compile(r"(run|result|ranks|baseline)\.json|.*_(categories|timeline_trace)\.json|perf_.*")


class TimerLog(NamedTuple):
    """JSON lines of one rank."""

    rank: int
    path: Path


class TraceFile(NamedTuple):
    """A trace, or what it was reduced to where that alone is left."""

    path: Path  # the trace; without one, what it was reduced to
    rank: int | None  # by directory and name; None: the trace may say
    reduced: Path  # where its spans are, or go
    has_trace: bool = True


@dataclass(frozen=True, slots=True)
class SpanSources:
    """What there is of a run."""

    root: Path
    logs: tuple[TimerLog, ...] = ()
    traces: tuple[TraceFile, ...] = ()
    ranks: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)  # RANK_COLUMNS, as far as they are known
    missing: tuple[Gap, ...] = ()

    @property
    def uses(self) -> Use:
        """What there is of more ranks: logs of timers or, where these are of fewer, traces."""
        of_traces = {trace.rank if trace.rank is not None else -1 - i for i, trace in enumerate(self.traces)}
        return "timers" if len({log.rank for log in self.logs}) >= max(1, len(of_traces)) else "traces"


def find_sources(path: Path) -> SpanSources:
    """The sources of every rank in a run directory, a directory of traces, or one file.

    Of an elastic job the last attempt counts. Where files lie:
    `timers/timer_rank<k>.jsonl`, `rank<k>*/` with a trace, run.json and spans.parquet, or traces side by side.

    Raises:
        BrokenTrace: there is nothing in it, or several runs.
        OSError: it is not there, or cannot be read.
    """
    if not path.is_dir():
        path.stat()  # raises where there is none
        return _of_files(path.parent, [path], [])
    gaps: list[Gap] = []
    root, attempt = _last_attempt(path, gaps)
    logs = _logs_in(root)
    directories = sorted(_rank_directories(root), key=lambda place: rank_of_directory(place.name))
    if not logs and not directories:
        inner = _runs_in(root)
        if len(inner) == 1:
            return find_sources(inner[0])
        if inner:
            names = ", ".join(run.name for run in inner[:8])
            raise BrokenTrace(f"{path}: {len(inner)} runs are in it; name one: {names}")
        traces = [file for file in sorted(root.iterdir()) if _may_be_trace(file)]
        if not traces:
            raise BrokenTrace(f"{path}: no rank's files in it: no timers/, no rank<k>/ and no trace")
        return _of_files(root, traces, gaps)
    ranks: dict[int, dict[str, Any]] = {}
    for log in logs:
        add_place(ranks, log.rank, {**place_in_header(log.path, gaps), "attempt": attempt})
    traces_found: list[TraceFile] = []
    for directory in directories:
        traces_found += _of_rank(directory, ranks, gaps, attempt)
    return SpanSources(root, tuple(logs), tuple(traces_found), ranks, tuple(gaps))


def _of_files(root: Path, files: Iterable[Path], gaps: list[Gap]) -> SpanSources:
    """Files side by side: each rank's is known by its name, or by what is in it."""
    logs, traces = [], []
    ranks: dict[int, dict[str, Any]] = {}
    for file in files:
        if file.name.endswith(".jsonl"):
            place = place_in_header(file, gaps)
            rank = place.get("rank")
            rank = rank if rank is not None else rank_in_name(file.name) or 0
            logs.append(TimerLog(rank, file))
            add_place(ranks, rank, place)
        elif file.name.endswith(_TRACE_ENDINGS):
            of_directory = rank_of_directory(file.parent.name)
            rank = rank_in_name(file.name)
            rank = of_directory if rank is None and of_directory >= 0 else rank
            stem = file.name.removesuffix(".gz").removesuffix(".json")
            traces.append(TraceFile(file, rank, file.parent / f"{stem}_{REDUCED_FILE}"))
        elif file.name.endswith(".parquet"):
            traces.append(TraceFile(file, rank_in_name(file.name), file, has_trace=False))
        else:
            raise WrongUse(
                f"{file}: neither a trace (.json, .json.gz), nor a timer's log (.jsonl), nor a run's directory"
            )
    return SpanSources(root, tuple(logs), tuple(traces), ranks, tuple(gaps))


# --- directories ---


def _last_attempt(path: Path, gaps: list[Gap]) -> tuple[Path, int]:
    """Where the files of the last attempt are, and its number."""
    attempts = sorted(
        (p for p in path.glob("attempt*") if p.is_dir() and _holds_ranks(p)), key=lambda p: digits_in(p.name)
    )
    if not attempts:
        return path, digits_in(path.name) if path.name.startswith("attempt") else 0
    last = attempts[-1]
    before = [digits_in(place.name) for place in attempts[:-1]]
    if _holds_ranks(path):
        before.insert(0, 0)
    if before:
        reason = f"only the last attempt, {digits_in(last.name)}, is in this report"
        gaps.append(Gap(f"attempt {', '.join(map(str, before))}", reason))
    return last, digits_in(last.name)


def _holds_ranks(path: Path) -> bool:
    return (path / TIMERS).is_dir() or any(True for _ in _rank_directories(path))


def _runs_in(path: Path) -> list[Path]:
    return sorted(
        place
        for place in path.iterdir()
        if place.is_dir() and (_holds_ranks(place) or any(_holds_ranks(p) for p in place.glob("attempt*")))
    )


def _rank_directories(path: Path) -> Iterator[Path]:
    return (place for place in path.iterdir() if place.is_dir() and RANK_DIRECTORY.match(place.name))


def _logs_in(root: Path) -> list[TimerLog]:
    place = root / TIMERS if (root / TIMERS).is_dir() else root
    found = [TimerLog(int(match[1]), file) for file in place.glob("*.jsonl") if (match := _TIMER_LOG.match(file.name))]
    return sorted(found)


def _of_rank(directory: Path, ranks: dict[int, dict[str, Any]], gaps: list[Gap], attempt: int) -> list[TraceFile]:
    """The traces of a rank's directory, of its later windows too."""
    rank = rank_of_directory(directory.name)
    add_place(ranks, rank, {"attempt": attempt, **coordinates_in_name(directory.name)})
    windows = sorted((p for p in directory.glob("steps_*") if p.is_dir()), key=lambda p: digits_in(p.name))
    found: list[TraceFile] = []
    for place in (directory, *windows):
        try:
            next(place.iterdir(), None)
        except OSError as error:
            gaps.append(Gap(f"files of rank {rank}", f"{place}: {error.strerror or error}", rank))
            continue
        run = run_file_in(place, rank, gaps)
        if run is not None:
            add_place(ranks, rank, place_in_run(run))
            if run.get("complete") is False:
                gaps.append(Gap(f"end of rank {rank}", f"{place / RUN_FILE} says that it is not complete", rank))
        trace = _trace_in(place, run)
        if trace is not None:
            found.append(TraceFile(trace, rank, place / REDUCED_FILE))
        elif (place / REDUCED_FILE).is_file():
            found.append(TraceFile(place / REDUCED_FILE, rank, place / REDUCED_FILE, has_trace=False))
        elif place == directory and run is not None and run.get("trace"):
            gaps.append(Gap(f"trace of rank {rank}", f"{place / str(run['trace'])} is gone", rank))
    return found


def _trace_in(place: Path, run: Mapping[str, Any] | None) -> Path | None:
    """The timed trace: as run.json names it, zipped or not, else by its ending."""
    named = run.get("trace") if run else None
    if isinstance(named, str) and named:
        stem = place / Path(named).name.removesuffix(".gz")
        for file in (stem, stem.with_name(f"{stem.name}.gz")):
            if file.is_file():
                return file
        return None
    traces = [file for file in sorted(place.iterdir()) if _may_be_trace(file) and "trace" in file.name]
    return next((file for file in traces if "_full_trace" not in file.name), traces[0] if traces else None)


def _may_be_trace(file: Path) -> bool:
    hidden = file.name.startswith(".")
    return file.is_file() and file.name.endswith(_TRACE_ENDINGS) and not hidden and not _OWN_JSON.fullmatch(file.name)


# --- what files and their names say of a rank: its number, its place in the mesh, its host ---


RANK_DIRECTORY = re.compile(r"rank(\d{1,9})(_|$)")
_RANK_IN_NAME = re.compile(r"(?i)(?:^|[^a-z])rank[_\-.]?(\d{1,9})(?!\d)")
_GREATEST = 2**31 - 1  # that a column of RANK_COLUMNS holds
_LONGEST_HEADER = 1 << 20


def add_place(ranks: dict[int, dict[str, Any]], rank: int, known: Mapping[str, Any]) -> None:
    """Add to what is known of each rank, as columns of `RANK_COLUMNS`, what else is known of one."""
    place = ranks.setdefault(rank, {"rank": rank})
    place.update({key: value for key, value in known.items() if key in RANK_COLUMNS and value is not None})
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
    known = {**coordinates} if isinstance(coordinates, Mapping) else {}
    known |= {"stage": run.get("stage", known.get("pp")), **{key: run.get(key) for key in ("world_size", "attempt")}}
    host = run.get("host")
    return {
        **{key: number for key, value in known.items() if (number := _number(value)) is not None},
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
