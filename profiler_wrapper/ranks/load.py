"""`load_ranks`: what a job of many ranks says as a whole, from what its ranks wrote or from any table of spans."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from profiler_wrapper.errors import BrokenTrace
from profiler_wrapper.ranks.model import RanksReport
from profiler_wrapper.ranks.report import ranks_report
from profiler_wrapper.ranks.sources import EVERYTHING, Choice, LoadedSpans, Use, find_sources, open_spans


def load_ranks(
    path: str | os.PathLike[str],
    *,
    spans: str | os.PathLike[str] | None = None,
    columns: Mapping[str, str] | None = None,
    scheduler: str | None = None,
    ranks: Sequence[int] | None = None,
    use: Use | None = None,
) -> RanksReport:
    """Who slows a job, who waits for whom, and what it costs: over all ranks of a run.

    Traces are reduced first, each where it lies, to a small `spans.parquet` beside it, by as many processes as there
    are cores. Scripts and notebooks call this as they are: those processes run nothing of theirs.

    Args:
        path: the directory of a run, a directory of traces, a trace, or a table of spans.
        spans: a table of spans of another tool (Parquet, CSV, JSON lines), instead of what the run's ranks wrote.
        columns: which of its columns is which of ours, where names don't tell: `{"took": "duration_ms"}`.
        scheduler: address of a Dask scheduler whose workers reduce the traces; they see the same files.
        ranks: only these.
        use: "timers" or "traces", where a run has both; None: what tells of more ranks.

    Raises:
        BrokenTrace: there is nothing of any rank, or several runs.
        EmptyRecording: no span belongs to a step.
        MissingPackage: DuckDB or pyarrow is not installed: the message says how to install it.
        OSError: the path is not there, or cannot be read.
        WrongUse: the table is none of spans, or there are no such ranks.
    """
    choice = Choice(
        spans=None if spans is None else Path(spans),
        columns=columns or {},
        scheduler=scheduler,
        ranks=ranks,
        use=use,
    )
    with open_ranks(path, choice) as (_, report):
        return report


@contextmanager
def open_ranks(path: str | os.PathLike[str], choice: Choice = EVERYTHING) -> Iterator[tuple[LoadedSpans, RanksReport]]:
    """As `load_ranks`, with the database of the spans still open, for what draws them."""
    with open_spans(Path(path), choice) as loaded:
        yield loaded, ranks_report(loaded)


def run_of(path: Path) -> Path | None:
    """The directory of the run that a path is of, if there are several ranks in it."""
    for place in (path, path.parent, path.parent.parent):
        if not place.is_dir():
            continue
        try:
            sources = find_sources(place)
        except (BrokenTrace, OSError):
            continue
        ranks = {log.rank for log in sources.logs} | {trace.rank for trace in sources.traces}
        if len(ranks) > 1 and sources.root.is_relative_to(place):
            return sources.root
        if path.is_dir() and not path.name.startswith("rank"):
            return None
    return None
