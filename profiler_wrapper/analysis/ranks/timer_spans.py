"""Opens the logs of timers as the table `spans` of a database."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from profiler_wrapper.analysis.ranks.loaded import Opened
from profiler_wrapper.analysis.ranks.step_cuts import with_steps
from profiler_wrapper.recording.rank_numbers import Gap, ranges
from profiler_wrapper.recording.span_database import USABLE, Database, file_list, literal, quoted, span_select
from profiler_wrapper.recording.span_files import SpanSources, TimerLog
from profiler_wrapper.recording.span_table import SPAN_COLUMNS

_LONGEST_HEADER_BYTES = 1 << 16


def load_logs(database: Database, logs: Sequence[TimerLog], sources: SpanSources, folder: Path) -> Opened:
    """JSON lines, made into Parquet once: they are asked many times."""
    problems = {log: why for log in logs if (why := _unreadable(log))}
    gaps = [Gap(f"spans of rank {log.rank}", f"{log.path}: {why}", log.rank) for log, why in problems.items()]
    files = [log.path for log in logs if log not in problems]
    if not files:
        return Opened([], gaps, {})
    types = ", ".join(f"{literal(name)}: {literal(kind)}" for name, (kind, _) in SPAN_COLUMNS.items())
    target = folder / "timers.parquet"
    relation = (
        f"read_json({file_list(files)}, format = 'newline_delimited', ignore_errors = true, filename = 'log', "
        f"columns = {{{types}, 'header': 'JSON'}})"
    )
    rows = (
        "SELECT * EXCLUDE (header), header IS NOT NULL AS is_header, "
        f"TRY_CAST(header->>'lost_lines' AS BIGINT) AS lost_lines, header->>'ended_by' AS ended_by FROM {relation}"
    )
    database.execute(f"COPY ({rows}) TO {literal(target)} (FORMAT parquet, ROW_GROUP_SIZE 122880)")
    table = f"read_parquet({literal(target)})"
    expressions = {name: quoted(name) for name in SPAN_COLUMNS} | {"depth": "coalesce(depth, 0)"}
    select = span_select(table, expressions, where=USABLE)
    database.execute(f"CREATE OR REPLACE VIEW spans AS {select}")
    if twice := _same_twice(database, table):
        gaps += [Gap(f"spans in {Path(log).name}", f"the same as in {other}: left out") for log, other in twice.items()]
        where = f"{USABLE} AND log NOT IN ({', '.join(map(literal, twice))})"
        select = span_select(table, expressions, where=where)
        database.execute(f"CREATE OR REPLACE VIEW spans AS {select}")
    notes = _cut(database, select)
    lines = database.execute(
        f"""SELECT log, count(*) FILTER (coalesce({USABLE}, false)), count(*) FILTER (NOT is_header), max(lost_lines),
            max(ended_by) FROM {table} GROUP BY log ORDER BY log"""
    ).fetchall()
    rank_of = {str(log.path): log.rank for log in logs}
    gaps += _unfinished(logs, {rank_of[name]: ended for name, *_, ended in lines if ended and name in rank_of})
    for name, good, told, lost, _ in lines:
        rank = rank_of.get(name)
        if not good:
            gaps.append(Gap(f"spans of rank {rank}", f"{name}: no line of it is a span", rank))
        elif told > good:
            count = "a line" if told == good + 1 else f"{told - good} lines"
            gaps.append(Gap(f"{count} of rank {rank}", f"{name}: torn, or no span", rank))
        if lost:
            gaps.append(Gap(f"{lost} spans of rank {rank}", f"{name}: its timer could not write them", rank))
    of_logs = {log.rank for log in logs}
    return Opened(files, gaps, {rank: place for rank, place in sources.ranks.items() if rank in of_logs}, notes)


def _unfinished(logs: Sequence[TimerLog], errors: Mapping[int, str]) -> list[Gap]:
    """Ranks whose program ended by an error, or did not end: their log is not closed."""
    reasons = {rank: f"its program ended by {error}" for rank, error in errors.items()}
    for log in logs:
        if _is_open(log.path):
            reasons.setdefault(log.rank, "its log is not closed: its process runs, or was killed")
    return [
        Gap(
            f"end of rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)}", reason, ranks[0] if len(ranks) == 1 else None
        )
        for reason in sorted(set(reasons.values()))
        if (ranks := sorted(rank for rank, why in reasons.items() if why == reason))
    ]


def _is_open(path: Path) -> bool:
    """Whether a log lacks the header that its timer closes it with, or, of earlier versions, ends in spaces."""
    try:
        with path.open("rb") as lines:
            header = lines.readline(_LONGEST_HEADER_BYTES)
            size = lines.seek(0, 2)
            lines.seek(max(0, size - _LONGEST_HEADER_BYTES))
            end = lines.read()
    except OSError:
        return False
    last = end[:-1].rpartition(b"\n")[2]
    return end.endswith(b"  ") or (b'"closing_line":true' in header and not last.startswith(b'{"header":'))


def _cut(database: Database, select: str) -> tuple[str, ...]:
    """Steps, where no span tells one: how they were found."""
    if database.execute("SELECT 1 FROM spans WHERE step IS NOT NULL LIMIT 1").fetchone() is not None:
        return ()
    how = with_steps(database, select)
    return () if how is None else (how,)


def _same_twice(database: Database, table: str) -> dict[str, str]:
    """Logs whose spans another one has too, as a copy or a link: which other."""
    rows = database.execute(
        f"""SELECT log, [rank, count(*), min(start_ns), max(start_ns), sum(start_ns % 1000003), sum(duration_ns)]
        FROM {table} WHERE {USABLE} GROUP BY log, rank ORDER BY log, rank"""
    ).fetchall()
    told: dict[str, list[tuple[int, ...]]] = {}
    for log, sums in rows:
        told.setdefault(log, []).append(tuple(sums))
    first: dict[tuple[tuple[int, ...], ...], str] = {}
    found = {}
    for log, sums_of_ranks in told.items():
        other = first.setdefault(tuple(sums_of_ranks), log)
        if other != log:
            found[log] = Path(other).name
    return found


def _unreadable(log: TimerLog) -> str:
    """Why nothing can be read of it; empty if something can."""
    try:
        with log.path.open("rb") as lines:
            return "" if lines.read(1) else "is empty"
    except OSError as error:
        return error.strerror or str(error)
