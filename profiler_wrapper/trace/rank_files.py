"""What lies in a run's directory: whose it is, what is missing, and which file is meant where one is asked for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from profiler_wrapper.errors import BrokenTrace, WrongUse, first_few
from profiler_wrapper.trace.run_directory import RESULT_FILE, RUN_FILE
from profiler_wrapper.trace.run_file import file_named, read_json
from profiler_wrapper.trace.spans import DIRECTORY as TIMERS
from profiler_wrapper.trace.spans import RANK_COLUMNS, Gap, place_number

Use = Literal["timers", "traces"]
LONGEST_HEADER = 1 << 16
REDUCED_FILE = "spans.parquet"

_TIMER_LOG = re.compile(r"timer_rank(\d+)\.jsonl$")
_TRACE_ENDINGS = (".json", ".json.gz")
_OWN_JSON = re.compile(r"(run|result|ranks|baseline)\.json|.*_(categories|timeline_trace)\.json|perf_.*")
_RANK_IN_NAME = re.compile(r"(?i)(?:^|[^a-z])rank[_\-.]?(\d{1,9})(?!\d)")


def rank_in_name(name: str) -> int | None:
    """`"trace.rank-3.json"` -> 3."""
    return int(match[1]) if (match := _RANK_IN_NAME.search(name)) else None


def rank_of_directory(path: Path) -> int | None:
    """`rank3_dp1/` -> 3; None: it is none of a rank."""
    return place_number(int(match[1])) if (match := re.match(r"rank(\d+)(_|\Z)", path.name)) else None


def _number_after(word: str, path: Path) -> int:
    """`attempt10/` -> 10; 0 where the name is not the word and a number."""
    return int(match[1]) if (match := re.match(rf"{word}(\d+)", path.name)) else 0


def _attempts(path: Path, above: Iterable[str], names: Iterable[str] = ("rank*", TIMERS)) -> dict[int, Path]:
    """Return the directories that hold directories of ranks or timers, by their attempts, of one run.

    `above`: patterns of places below `path`. Raises BrokenTrace: they are of several runs, of which `path` is none.
    """
    found = (place for outer in above for name in names for place in path.glob(f"{outer}{name}/"))
    runs: dict[Path, dict[int, Path]] = {}
    for root in sorted({place.parent for place in found if _is_of_ranks(place)}):
        attempt = _number_after("attempt", root)
        runs.setdefault(root.parent if attempt and root != path else root, {})[attempt] = root
    if path not in runs and len(runs) > 1:
        names = first_few([run.relative_to(path).as_posix() for run in runs], 8)
        raise BrokenTrace(f"{path}: {len(runs)} runs are in it; name one: {names}")
    return runs.get(path) or next(iter(runs.values()), {})


def _is_of_ranks(place: Path) -> bool:
    return (place.name == TIMERS or rank_of_directory(place) is not None) and place.is_dir()


def _rank_directories(path: Path) -> list[tuple[int, Path]]:
    ranks = ((rank_of_directory(place), place) for place in path.iterdir() if place.is_dir())
    return sorted((rank, place) for rank, place in ranks if rank is not None)


def _may_be_trace(file: Path) -> bool:
    hidden = file.name.startswith(".")
    return file.is_file() and file.name.endswith(_TRACE_ENDINGS) and not hidden and not _OWN_JSON.fullmatch(file.name)


def _traces_in(place: Path) -> list[Path]:
    """Return the traces of a directory, as their names tell: those with shapes last."""
    found = filter(_may_be_trace, place.glob("*trace*"))
    return sorted(found, key=lambda file: ("_full_trace" in file.name, file.name))


def find_result(path: Path, *, rank: int | None = None, with_trace: bool = False) -> Path:
    """Return the file to read for `path`: itself, or of a directory its result, else its trace, else its first rank's.

    Of a job that was started again the last attempt counts. `rank`: of a run, that rank's. `with_trace`: a trace, if
    there is any.

    Raises:
        BrokenTrace: the directory holds no result and no trace, or several runs.
        WrongUse: it holds nothing of `rank`, `path` is no directory, or `rank` is below 0.
    """
    if rank is not None and rank < 0:
        raise WrongUse(f"rank {rank}: ranks are numbered from 0.")
    if not path.is_dir():
        if rank is not None:
            raise WrongUse(f"{path}: is no directory of a run, so it has no rank {rank}. Give the run's directory.")
        return path
    roots = [root for _, root in sorted(_attempts(path, ["**/"], ["rank*"]).items(), reverse=True)]
    ranks = [(number, place) for root in roots for number, place in _rank_directories(root)]
    places = [path, *(place for _, place in ranks)]
    if rank is not None:
        places = [place for number, place in (*ranks, (rank_of_directory(path.resolve()), path)) if number == rank]
        if not places:
            known = ", ".join(dict.fromkeys(str(number) for number, _ in ranks)) or "none"
            raise WrongUse(f"{path}: nothing of rank {rank} is in it; ranks: {known}")
    for place in places:
        traces = _traces_in(place)
        result = [place / RESULT_FILE] if (place / RESULT_FILE).is_file() else []
        if found := (traces + result if with_trace else result + traces):
            return found[0]
    timers = any(path.glob("**/timer_rank*.jsonl"))
    instead = "; its timers are read by `profiler-wrapper ranks`, or pw.load_ranks(path)" if timers else ""
    raise BrokenTrace(f"{path}: no {RESULT_FILE} and no trace in it{instead}")


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
        """Note that something is not there."""
        self.missing.append(Gap(what, str(reason), rank))

    def know(self, rank: int, place: Mapping[str, Any]) -> None:
        """Add to what is known of a rank."""
        self.ranks.setdefault(rank, {}).update(place, rank=rank)

    @property
    def uses(self) -> Use:
        """Return which there are of more ranks: logs of timers or, where these are of fewer, traces."""
        of_traces = {trace.rank if trace.rank is not None else -1 - i for i, trace in enumerate(self.traces)}
        return "timers" if len({log.rank for log in self.logs}) >= max(1, len(of_traces)) else "traces"


def find_sources(path: Path) -> SpanSources:
    """Return the sources of every rank in a run directory, a directory of traces, or one file.

    Of an elastic job the last attempt counts. Where files lie:
    `timers/timer_rank<k>.jsonl`, `rank<k>*/` with a trace, run.json and spans.parquet, or traces side by side.

    Raises:
        BrokenTrace: there is nothing in it, or several runs.
        OSError: it is not there, or cannot be read.
    """
    if not path.is_dir():
        path.stat()  # raises where there is none
        return _of_files(SpanSources(path.parent), [path])
    attempts = _attempts(path, ["", "attempt*/"]) or _attempts(path, ["*/", "*/attempt*/"])
    if not attempts:
        files = [file for file in sorted(path.iterdir()) if _may_be_trace(file) or _TIMER_LOG.match(file.name)]
        if not files:
            raise BrokenTrace(f"{path}: no rank's files in it: no timers/, no rank<k>/ and no trace")
        return _of_files(SpanSources(path), files)
    *before, last = sorted(attempts)
    root = attempts[last]
    found = SpanSources(root)
    if before:
        found.miss(f"attempt {', '.join(map(str, before))}", f"only the last attempt, {last}, is in this report")
    logs = (root / TIMERS if (root / TIMERS).is_dir() else root).glob("*.jsonl")
    found.logs = sorted(Source(int(match[1]), file, file) for file in logs if (match := _TIMER_LOG.match(file.name)))
    for log in found.logs:
        found.know(log.rank or 0, {**_place(_header_of(log.path, found)), "attempt": last})
    for rank, directory in _rank_directories(root):
        found.know(rank, {"attempt": last})
        _add_traces(found, rank, directory)
    return found


def _of_files(found: SpanSources, files: Iterable[Path]) -> SpanSources:
    """Add files side by side: each rank's is known by its name, or by what is in it."""
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


def _add_traces(found: SpanSources, rank: int, directory: Path) -> None:
    """Add those of a rank's directory, of its later windows too."""
    windows = (place for place in directory.glob("steps_*") if place.is_dir())
    for place in (directory, *sorted(windows, key=lambda place: _number_after("steps_", place))):
        run: Mapping[str, Any] = {}
        try:
            next(place.iterdir(), None)
        except OSError as error:
            found.miss(f"files of rank {rank}", f"{place}: {error.strerror or error}", rank)
            continue
        try:
            run = read_json(place / RUN_FILE) if (place / RUN_FILE).exists() else {}
        except (BrokenTrace, OSError) as error:
            found.miss(f"description of rank {rank}", error, rank)
        found.know(rank, _place(run))
        if run.get("complete") is False:
            found.miss(f"end of rank {rank}", f"{place / RUN_FILE} says that it is not complete", rank)
        named = run["trace"] if isinstance(run.get("trace"), str) else ""
        trace = file_named(place, named) if named else next(iter(_traces_in(place)), None)
        reduced = place / REDUCED_FILE
        if trace is not None or reduced.is_file():
            found.traces.append(Source(rank, trace or reduced, reduced))
        elif place == directory and named:
            found.miss(f"trace of rank {rank}", f"{place / named} is gone", rank)


def _header_of(path: Path, found: SpanSources) -> Mapping[str, Any]:
    """Return what the first line of a timer's log says of its rank; nothing of a log that is empty or unreadable."""
    try:
        with path.open("rb") as lines:
            line = lines.readline(LONGEST_HEADER)
        return {**json.loads(line)["header"]} if line else {}
    except OSError:  # said where its spans are read
        return {}
    except (ValueError, LookupError, TypeError, RecursionError):
        found.miss(f"header of {path.name}", "its first line is not what a timer writes")
        return {}


def _place(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return what run.json or a header says of a rank's place, as columns of RANK_COLUMNS."""
    coordinates = run.get("coordinates")
    known = {**coordinates} if isinstance(coordinates, Mapping) else {}
    known |= {"stage": run.get("stage", known.get("pp")), **{key: run.get(key) for key in ("world_size", "attempt")}}
    place = {key: number for key in RANK_COLUMNS if (number := place_number(known.get(key))) is not None}
    host = run.get("host")
    return place | ({"host": host} if isinstance(host, str) and host else {})
