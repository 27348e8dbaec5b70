"""What the ranks of a run wrote: whose it is, where it lies, and whose is missing."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from profiler_wrapper.errors import BrokenTrace, WrongUse, first_few
from profiler_wrapper.trace.run_directory import RUN_FILE, rank_number
from profiler_wrapper.trace.run_file import read_json
from profiler_wrapper.trace.spans import DIRECTORY as TIMERS
from profiler_wrapper.trace.spans import RANK_COLUMNS, Gap, place_number

Use = Literal["timers", "traces"]
LONGEST_HEADER = 1 << 16
REDUCED_FILE = "spans.parquet"

_TIMER_LOG = re.compile(r"timer_rank(\d+)\.jsonl$")
_TRACE_ENDINGS = (".json", ".json.gz")
_OWN_JSON = re.compile(r"(run|result|ranks|baseline)\.json|.*_(categories|timeline_trace)\.json|perf_.*")
_RANK_IN_NAME = re.compile(r"(?i)(?:^|[^a-z])rank[_\-.]?(\d{1,9})(?!\d)")


class Source(NamedTuple):
    """A timer's log, or a trace."""

    rank: int | None  # of a trace by directory and name; None: the trace may say
    path: Path  # without a trace, what it was reduced to
    reduced: Path  # where a trace's spans are, or go

    @property
    def has_trace(self) -> bool:
        return self.path != self.reduced


@dataclass(slots=True)
class SpanSources:
    """What there is of a run."""

    root: Path
    logs: list[Source] = field(default_factory=list)
    traces: list[Source] = field(default_factory=list)
    ranks: dict[int, dict[str, Any]] = field(default_factory=dict)  # RANK_COLUMNS, as far as they are known
    missing: list[Gap] = field(default_factory=list)

    def miss(self, what: str, reason: object, rank: int | None = None) -> None:
        """Say that something is not there."""
        self.missing.append(Gap(what, str(reason), rank))

    def know(self, rank: int, place: Mapping[str, Any]) -> None:
        """Add to what is known of a rank."""
        self.ranks.setdefault(rank, {}).update(place, rank=rank)

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
        return _of_files(SpanSources(path.parent), [path])
    found, attempt = _last_attempt(path)
    root = found.root
    files = (root / TIMERS if (root / TIMERS).is_dir() else root).glob("*.jsonl")
    found.logs = sorted(Source(int(match[1]), file, file) for file in files if (match := _TIMER_LOG.match(file.name)))
    directories = _rank_directories(root)
    if not found.logs and not directories:
        places = sorted(place for place in root.iterdir() if place.is_dir())
        inner = [place for place in places if any(map(_holds_ranks, (place, *place.glob("attempt*"))))]
        if len(inner) == 1:
            return find_sources(inner[0])
        if inner:
            names = first_few([run.name for run in inner], 8)
            raise BrokenTrace(f"{path}: {len(inner)} runs are in it; name one: {names}")
        traces = [file for file in sorted(root.iterdir()) if _may_be_trace(file)]
        if not traces:
            raise BrokenTrace(f"{path}: no rank's files in it: no timers/, no rank<k>/ and no trace")
        return _of_files(found, traces)
    for log in found.logs:
        found.know(log.rank or 0, {**_place(_header_of(log.path, found)), "attempt": attempt})
    for rank, directory in directories:
        found.know(rank, {"attempt": attempt})
        _add_traces(found, rank, directory)
    return found


def _of_files(found: SpanSources, files: Iterable[Path]) -> SpanSources:
    """With files side by side: each rank's is known by its name, or by what is in it."""
    for file in files:
        rank = rank_in_name(file.name)
        if file.name.endswith(".jsonl"):
            header = _header_of(file, found)
            in_header = place_number(header.get("rank"))
            rank = in_header if in_header is not None else rank or 0
            found.logs.append(Source(rank, file, file))
            found.know(rank, _place(header))
        elif file.name.endswith(_TRACE_ENDINGS):
            stem = file.name.removesuffix(".gz").removesuffix(".json")
            rank = rank_of_directory(file.parent) if rank is None else rank
            found.traces.append(Source(rank, file, file.parent / f"{stem}_{REDUCED_FILE}"))
        elif file.name.endswith(".parquet"):
            found.traces.append(Source(rank, file, file))
        else:
            raise WrongUse(
                f"{file}: neither a trace (.json, .json.gz), nor a timer's log (.jsonl), nor a run's directory"
            )
    return found


def _last_attempt(path: Path) -> tuple[SpanSources, int]:
    """Where the files of the last attempt are, and its number."""
    attempts = {digits_in(place.name): place for place in path.glob("attempt*") if _holds_ranks(place)}
    if not attempts:
        return SpanSources(path), digits_in(path.name) if path.name.startswith("attempt") else 0
    if _holds_ranks(path):
        attempts.setdefault(0, path)
    *before, last = sorted(attempts)
    found = SpanSources(attempts[last])
    if before:
        found.miss(f"attempt {', '.join(map(str, before))}", f"only the last attempt, {last}, is in this report")
    return found, last


def _holds_ranks(path: Path) -> bool:
    return path.is_dir() and ((path / TIMERS).is_dir() or bool(_rank_directories(path)))


def _rank_directories(path: Path) -> list[tuple[int, Path]]:
    ranks = ((rank_of_directory(place), place) for place in path.iterdir() if place.is_dir())
    return sorted((rank, place) for rank, place in ranks if rank is not None)


def _add_traces(found: SpanSources, rank: int, directory: Path) -> None:
    """Those of a rank's directory, of its later windows too."""
    windows = sorted((p for p in directory.glob("steps_*") if p.is_dir()), key=lambda p: digits_in(p.name))
    for place in (directory, *windows):
        run: Mapping[str, Any] = {}
        try:
            next(place.iterdir(), None)
        except OSError as error:
            found.miss(f"files of rank {rank}", f"{place}: {error.strerror or error}", rank)
            continue
        try:
            run = read_json(place / RUN_FILE)
        except FileNotFoundError:
            pass
        except (BrokenTrace, OSError) as error:
            found.miss(f"description of rank {rank}", error, rank)
        found.know(rank, _place(run))
        if run.get("complete") is False:
            found.miss(f"end of rank {rank}", f"{place / RUN_FILE} says that it is not complete", rank)
        trace, reduced = _trace_in(place, run.get("trace")), place / REDUCED_FILE
        if trace is not None or reduced.is_file():
            found.traces.append(Source(rank, trace or reduced, reduced))
        elif place == directory and run.get("trace"):
            found.miss(f"trace of rank {rank}", f"{place / str(run['trace'])} is gone", rank)


def _trace_in(place: Path, named: object) -> Path | None:
    """The timed trace: as run.json names it, zipped or not, else by its ending."""
    if isinstance(named, str) and named:
        stem = place / Path(named).name.removesuffix(".gz")
        found = [file for file in (stem, stem.with_name(f"{stem.name}.gz")) if file.is_file()]
    else:
        found = [file for file in place.iterdir() if _may_be_trace(file) and "trace" in file.name]
        found.sort(key=lambda file: ("_full_trace" in file.name, file))
    return found[0] if found else None


def _may_be_trace(file: Path) -> bool:
    hidden = file.name.startswith(".")
    return file.is_file() and file.name.endswith(_TRACE_ENDINGS) and not hidden and not _OWN_JSON.fullmatch(file.name)


def _header_of(path: Path, found: SpanSources) -> Mapping[str, Any]:
    """What the first line of a timer's log says of its rank; nothing of a log that is empty, or cannot be read."""
    try:
        with path.open("rb") as lines:
            line = lines.readline(LONGEST_HEADER)
        header = json.loads(line)["header"] if line else {}
        if isinstance(header, dict):
            return header
    except OSError:  # said where its spans are read
        return {}
    except (ValueError, LookupError, TypeError, RecursionError):
        pass
    found.miss(f"header of {path.name}", "its first line is not what a timer writes")
    return {}


def _place(run: Mapping[str, Any]) -> dict[str, Any]:
    """What run.json or a header says of a rank's place, as columns of RANK_COLUMNS."""
    coordinates = run.get("coordinates")
    known = {**coordinates} if isinstance(coordinates, Mapping) else {}
    known |= {"stage": run.get("stage", known.get("pp")), **{key: run.get(key) for key in ("world_size", "attempt")}}
    place = {key: number for key in RANK_COLUMNS if (number := place_number(known.get(key))) is not None}
    host = run.get("host")
    return place | ({"host": host} if isinstance(host, str) and host else {})


def rank_in_name(name: str) -> int | None:
    """`"trace.rank-3.json"` -> 3."""
    return int(match[1]) if (match := _RANK_IN_NAME.search(name)) else None


def rank_of_directory(path: Path) -> int | None:
    """`rank3_dp1/` -> 3; None: it is none of a rank."""
    return place_number(rank_number(path.name))


def digits_in(name: str) -> int:
    """`"attempt10"` -> 10; 0 without a number."""
    return int(match[0]) if (match := re.search(r"\d+", name)) else 0
