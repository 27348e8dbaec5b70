"""The tables that everything about many ranks is asked of, made once from the spans.

A database has the tables (or views) `spans` and `ranks`, as recording/span_table.py describes them. `prepare` adds:

- `main_threads`: rank, thread: the one whose time is the step's.
- `labels`: label, name, "group": a number for each communication in each group. A send and its receive are one.
- `labels_of_names`: key, label: of each name in each group as spans have it.
- `label_bytes`: label, bytes: moved in all.
- `communications`: rank, step, label, sequence, start_ns, duration_ns, on_main.

Rows are added up in the database, so that an answer has the size of ranks times steps, never that of the spans.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from profiler_wrapper.analysis.ranks.arrays import Database
from profiler_wrapper.recording.span_database import insert

_SENDS = re.compile(r"(?i)(^|[^a-z])(i?)(send|recv|receive)(?![a-z])")


def prepare(database: Database) -> None:
    """Adds the tables that the answers are made from."""
    found = database.execute(
        f"""SELECT rank, thread, CASE WHEN kind = 'communication' THEN {label_key("spans")} END AS key,
            count(*) FILTER (kind = 'step') AS steps, any_value(name), any_value("group"),
            coalesce(sum(duration_ns) FILTER (kind <> 'step' AND depth = 0), 0)::BIGINT AS busy_ns,
            TRY_CAST(sum(bytes) AS BIGINT) AS bytes
        FROM spans WHERE step IS NOT NULL GROUP BY ALL"""
    ).fetchall()
    _main_threads(database, [(rank, thread, key, steps, busy) for rank, thread, key, steps, _, _, busy, _ in found])
    label_of = _labels(database, {key: (name, group) for _, _, key, _, name, group, _, _ in found if key is not None})
    moved: dict[int, int] = {}
    for _, _, key, _, _, _, _, size in found:
        if key is not None and size is not None:
            moved[label_of[key]] = moved.get(label_of[key], 0) + size
    database.execute("CREATE OR REPLACE TABLE label_bytes (label INTEGER, bytes BIGINT)")
    insert(database, "label_bytes", list(moved.items()))
    database.execute(
        f"""CREATE OR REPLACE TABLE communications AS
        SELECT s.rank, s.step, l.label, s.sequence, s.start_ns, s.duration_ns,
            (m.thread IS NULL OR s.thread IS NULL OR s.thread = m.thread) AS on_main
        FROM spans s JOIN labels_of_names l ON l.key = {label_key("s")} LEFT JOIN main_threads m ON m.rank = s.rank
        WHERE s.kind = 'communication' AND s.step IS NOT NULL"""
    )


def _main_threads(database: Database, found: Sequence[tuple[int, int | None, int | None, int, int]]) -> None:
    """Of each rank: the thread of its steps; where there are none, that with the most time in spans."""
    marks: dict[int, dict[int, tuple[int, int]]] = {}
    for rank, thread, key, steps, busy_ns in found:
        if thread is not None:
            before = marks.setdefault(rank, {}).get(thread, (0, 0))
            marks[rank][thread] = (before[0] + steps, before[1] + (busy_ns if key is None else 0))
    database.execute("CREATE OR REPLACE TABLE main_threads (rank INTEGER, thread BIGINT)")
    rows = [(rank, max(threads, key=lambda thread: threads[thread])) for rank, threads in marks.items()]
    insert(database, "main_threads", rows)


def _labels(database: Database, named: Mapping[int, tuple[str, str | None]]) -> dict[int, int]:
    """By key of a name in a group, its label."""
    numbers: dict[tuple[str, str], int] = {}
    of_names = [
        (key, numbers.setdefault((common_name(name), group or ""), len(numbers)))
        for key, (name, group) in named.items()
    ]
    database.execute('CREATE OR REPLACE TABLE labels (label INTEGER, name VARCHAR, "group" VARCHAR)')
    database.execute("CREATE OR REPLACE TABLE labels_of_names (key UBIGINT, label INTEGER)")
    insert(database, "labels_of_names", of_names)
    insert(database, "labels", [(label, *both) for both, label in numbers.items()])
    return dict(of_names)


def label_key(table: str) -> str:
    """The expression of the key in `labels_of_names` of a span's name in its group."""
    return f"""hash({table}.name, coalesce({table}."group", ''))"""


def common_name(name: str) -> str:
    """What a send and the receive that it goes to have in common: `"forward-send"` -> `"forward-send/recv"`."""
    return _SENDS.sub(r"\1\2send/recv", name)
