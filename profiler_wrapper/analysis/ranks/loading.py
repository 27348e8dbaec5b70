"""Opens the spans of a run: finds what ranks wrote, reduces traces, gives a database with `spans` and `ranks`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from profiler_wrapper.analysis.ranks.loaded import LoadedSpans, not_there
from profiler_wrapper.analysis.ranks.reduced_spans import load_traces
from profiler_wrapper.analysis.ranks.table_spans import is_table, load_tables
from profiler_wrapper.analysis.ranks.timer_spans import load_logs
from profiler_wrapper.errors import BrokenTrace, WrongUse
from profiler_wrapper.recording.rank_numbers import Gap, absent_ranks, ranges
from profiler_wrapper.recording.rank_places import rank_of_directory
from profiler_wrapper.recording.span_database import Database, import_duckdb, insert, open_database
from profiler_wrapper.recording.span_files import SpanSources, TimerLog, TraceFile, Use, find_sources
from profiler_wrapper.recording.span_table import RANK_COLUMNS
from profiler_wrapper.recording.store import RUN_FILE

Progress = Callable[[str, int, int], None]  # what is done, how many of it, of how many


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What of a run is read, and how.

    Attributes:
        spans: a table of another tool, or a directory of such tables, that takes the place of the run's files.
        columns: its columns, theirs to ours.
        scheduler: of a Dask cluster that reduces the traces.
        ranks: only these.
        use: timers or traces; None: what tells of more ranks.
        output: where reduced traces go if they cannot lie beside the traces.
        progress: is told how far the reduction of traces has come.
    """

    spans: Path | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    scheduler: str | None = None
    ranks: Sequence[int] | None = None
    use: Use | None = None
    output: Path | None = None
    progress: Progress | None = None


EVERYTHING = Choice()


@contextmanager
def open_spans(path: Path, choice: Choice = EVERYTHING) -> Iterator[LoadedSpans]:
    """The spans of a run, of a directory of traces, of a trace or of a table; the database is gone at the end.

    Raises:
        BrokenTrace: nothing in it can be read.
        MissingPackage: DuckDB or pyarrow is not installed.
        OSError: it is not there.
        WrongUse: a table is none of spans; ranks that are not there.
    """
    table = path if choice.spans is None and is_table(path) else choice.spans
    if table is None and choice.columns:
        raise WrongUse("--columns is of a table: name it by --spans FILE")
    with open_database() as database, tempfile.TemporaryDirectory(prefix="profiler_wrapper_ranks_") as folder:
        try:
            if table is not None:
                yield load_tables(database, table, choice.columns, choice.ranks)
            else:
                yield _load_run(database, path, choice, Path(folder))
        except import_duckdb().Error as error:
            why = str(error).strip().split("\n")[0]
            raise BrokenTrace(f"{table or path}: its spans cannot be read: {why}") from error


def _load_run(database: Database, path: Path, choice: Choice, folder: Path) -> LoadedSpans:
    path, choice = _whole_run(path, choice)
    sources = find_sources(path)
    uses = choice.use or sources.uses
    if choice.use is None and not sources.logs and not sources.traces:
        raise BrokenTrace(f"{path}: no trace and no timer's log of any rank in it{_why(sources.missing)}")
    logs, traces = _chosen(sources, uses, choice.ranks)
    if uses == "timers":
        opened = load_logs(database, logs, sources, folder)
    else:
        where = (choice.output or folder) / "reduced"
        told = None if choice.progress is None else partial(choice.progress, "reducing traces")
        opened = load_traces(database, traces, sources, where, scheduler=choice.scheduler, done=told)
    files, gaps, places, notes = opened
    there = (set(places) if uses == "traces" else _ranks_in(database)) if files else set()
    if not there:
        raise BrokenTrace(f"{path}: no spans of any rank in it{_why(gaps)}")
    _write_ranks(database, places)
    world_size = max((place.get("world_size") or 0 for place in places.values()), default=0) or None
    if choice.ranks is None:
        absent = absent_ranks(there, world_size, sources.ranks)
    else:
        absent = not_there(set(choice.ranks), there, path)
    failed = {gap.rank for gap in gaps if gap.rank is not None}
    absent = [gap for gap in absent if gap.rank is None or gap.rank not in failed]
    return LoadedSpans(
        database,
        run=sources.root.name or sources.root.resolve().name,
        root=sources.root,
        missing=(*sources.missing, *gaps, *absent),
        world_size=world_size,
        from_timers=uses == "timers",
        notes=(*notes, *_others(sources, uses)),
    )


def _whole_run(path: Path, choice: Choice) -> tuple[Path, Choice]:
    """The directory of one rank of a run is that rank of the run: its steps are those that the run's report has."""
    rank = rank_of_directory(path.name)
    if rank < 0 or not (path / RUN_FILE).is_file():
        return path, choice
    ranks = (rank,) if choice.ranks is None else choice.ranks
    return path.parent, replace(choice, ranks=ranks, use=choice.use or "traces")


def _why(gaps: Sequence[Gap]) -> str:
    return "".join(f"{'; ' if place else ': '}{gap.what}: {gap.reason}" for place, gap in enumerate(gaps[:4]))


def _ranks_in(database: Database) -> set[int]:
    return {row[0] for row in database.execute("SELECT DISTINCT rank FROM spans").fetchall()}


def _chosen(sources: SpanSources, uses: Use, ranks: Sequence[int] | None) -> tuple[list[TimerLog], list[TraceFile]]:
    if uses == "timers" and not sources.logs:
        raise WrongUse(f"{sources.root}: no log of a timer in it (timers/timer_rank<k>.jsonl)")
    if uses == "traces" and not sources.traces:
        raise WrongUse(f"{sources.root}: no trace in it")
    wanted = None if ranks is None else frozenset(ranks)
    logs = [log for log in sources.logs if wanted is None or log.rank in wanted]
    traces = [trace for trace in sources.traces if wanted is None or trace.rank is None or trace.rank in wanted]
    if not (logs if uses == "timers" else traces):
        there = {log.rank for log in sources.logs} if uses == "timers" else {trace.rank for trace in sources.traces}
        known = ranges(rank for rank in there if rank is not None)
        raise WrongUse(f"{sources.root}: no spans of ranks {ranges(ranks or ())}; there are those of {known or 'none'}")
    return logs, traces


def _others(sources: SpanSources, uses: Use) -> list[str]:
    if uses == "timers" and sources.traces:
        return [f"{len(sources.traces)} traces are there too, and are not in this report (--use traces)"]
    if uses == "traces" and sources.logs:
        return [f"logs of timers of {len(sources.logs)} ranks are there too, and are not in this report (--use timers)"]
    return []


def _write_ranks(database: Database, places: Mapping[int, Mapping[str, Any]]) -> None:
    columns = ", ".join(f"{name} {kind}" for name, (kind, _) in RANK_COLUMNS.items())
    database.execute(f"CREATE OR REPLACE TABLE ranks ({columns})")
    rows = []
    for rank, place in sorted(places.items()):
        stage = place.get("stage", place.get("pp"))
        row = {**place, "rank": rank, "stage": stage if stage is not None else 0}
        rows.append([row.get(name) for name in RANK_COLUMNS])
    insert(database, "ranks", rows)
