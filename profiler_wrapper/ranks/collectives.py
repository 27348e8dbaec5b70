"""Collectives, sends and receives: as a trace shows them, and matched across ranks."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from profiler_wrapper.analysis.attributed import Attributed
from profiler_wrapper.analysis.charges import union
from profiler_wrapper.analysis.time_rows import exposed_communication
from profiler_wrapper.analysis.views.collectives import collective_of, element_bytes
from profiler_wrapper.ranks.database import Database, Grid, column, has_table, insert, to_arrays
from profiler_wrapper.ranks.from_trace import (
    COMMUNICATION,
    Row,
    Steps,
    collective_calls,
    main_thread,
    on_training_threads,
    outermost_of,
    thread_of,
    with_steps,
)
from profiler_wrapper.ranks.model import Arrivals, CommunicationRow, Float, Int
from profiler_wrapper.trace.nesting import nearest
from profiler_wrapper.trace.recording import DEVICE_CATEGORIES, Category, CollectiveDetails
from profiler_wrapper.trace.spans import rank_list_text

# --------------------------------------------------------------------------------------------------
# Collectives of a trace as rows of the span table: those that a device runs, or a thread of the backend.

_MOVE_THEIR_INPUT = ("all_reduce", "broadcast", "reduce", "send", "recv")


def cpu_collectives(found: Attributed, steps: Steps) -> list[Row]:
    """Collectives as the backend's own threads show them, else as calls; calls beside the former have no number."""
    outermost = outermost_of(found, collective_calls(found))
    training = on_training_threads(found)
    details = {one.span: one for one in found.recording.collectives}
    for span, one in list(details.items()):  # events around them are the same collective
        above = int(found.nesting.parent[span])
        while above >= 0 and above not in details:
            details[above] = one
            above = int(found.nesting.parent[above])
    by_backend = _with_sequence(
        [
            _collective_row(found, span, step, details.get(span), thread=thread_of(found, span), depth=0)
            for span, step in with_steps(found, steps, outermost & ~training)
        ]
    )
    thread = main_thread(found)
    by_call = _with_sequence(
        [
            _collective_row(found, span, step, details.get(span), thread=thread, depth=1)
            for span, step in with_steps(found, steps, outermost & training)
        ]
    )
    if by_backend:
        by_call = [row._replace(sequence=None, group=None) for row in by_call]
        by_backend = _with_overlap(found, by_backend)
    return by_backend + by_call


def _with_overlap(found: Attributed, rows: list[Row]) -> list[Row]:
    """With how long the training threads ran ops beside each, calls that communicate left out."""
    spans = found.recording.spans
    is_op = (spans.category == Category.CPU_OP) & on_training_threads(found)
    is_op[list(found.tree.layer_of_span)] = False
    chosen = is_op & (nearest(found.nesting.parent, collective_calls(found)) < 0)
    computing = union(spans.start_ns[chosen], spans.end_ns[chosen])
    starts = np.array([row.start_ns for row in rows], dtype=np.int64)
    ends = starts + np.array([row.duration_ns for row in rows], dtype=np.int64)
    beside = computing.overlap(starts, ends).tolist()
    return [row._replace(overlapped_ns=overlapped) for row, overlapped in zip(rows, beside, strict=True)]


def device_collectives(found: Attributed, steps: Steps) -> list[Row]:
    """Kernels that communicate, each in its stream; of the step that launched it."""
    spans, charges = found.recording.spans, found.charges
    chosen = np.flatnonzero(charges.work == COMMUNICATION)
    if not len(chosen):
        return []
    exposed, _ = exposed_communication(found.recording, charges)
    details = {one.span: one for one in found.recording.collectives}
    rows = []
    columns = (charges.span[chosen].tolist(), charges.cpu_span[chosen].tolist(), exposed[chosen].tolist())
    for span, around, exposed_ns, step in zip(*columns, steps.numbers_of_charges(chosen), strict=True):
        if span not in details:
            while around >= 0 and around not in details:  # the innermost event around the launch that knows it
                around = int(found.nesting.parent[around])
        known = details.get(span) or details.get(around)
        row = _collective_row(found, span, step, known, thread=int(spans.stream[span]), depth=0)
        rows.append(row._replace(overlapped_ns=row.duration_ns - int(exposed_ns)))
    return _with_sequence(rows)


def _collective_row(
    found: Attributed, span: int, step: int | None, details: CollectiveDetails | None, *, thread: int, depth: int
) -> Row:
    spans, name = found.recording.spans, found.recording.name_of(span)
    on_device = int(spans.category[span]) in DEVICE_CATEGORIES
    plain = (details.name if details is not None else "") or name
    return Row(
        step=step,
        name=collective_of(plain) or collective_of(name) or name,
        kind="communication",
        start_ns=int(spans.start_ns[span]),
        duration_ns=int(spans.duration_ns[span]),
        device_ns=int(spans.duration_ns[span]) if on_device else None,
        thread=thread,
        depth=depth,
        sequence=None if details is None else details.sequence,
        group=_group(found, details),
        bytes=_bytes(details) if details is not None else _bytes_of_inputs(found, span),
    )


def _with_sequence(rows: list[Row]) -> list[Row]:
    """Numbered in each step where the trace does not number them: by name and group, in order of start."""
    seen: dict[tuple[int | None, str, str | None], int] = {}
    numbered = []
    for row in sorted(rows, key=lambda row: row.start_ns):
        key = (row.step, row.name, row.group)
        count = seen[key] = seen.get(key, -1) + 1
        numbered.append(row if row.sequence is not None else row._replace(sequence=count))
    return numbered


def _group(found: Attributed, details: CollectiveDetails | None) -> str | None:
    """The ranks of the group, else its name; where neither is known, of a job with one group that one."""
    if details is not None and details.ranks:
        return rank_list_text(details.ranks)
    if details is not None and details.group_name:
        return details.group_name
    info = found.recording.metadata.get("distributedInfo")
    groups = info.get("pg_config") if isinstance(info, Mapping) else None
    if isinstance(groups, list) and len(groups) == 1 and isinstance(groups[0], Mapping):
        ranks = groups[0].get("ranks")
        return rank_list_text(ranks) if isinstance(ranks, list) and ranks else str(groups[0].get("pg_desc") or "all")
    return None


def _bytes(details: CollectiveDetails) -> int | None:
    size = element_bytes(details.dtype or "")
    elements = [count for count in (details.in_elements, details.out_elements) if count is not None]
    return None if size is None or not elements else max(elements) * size


def _bytes_of_inputs(found: Attributed, span: int) -> int | None:
    """Of a collective that moves its inputs, by their shapes, where they were recorded."""
    shapes = found.shapes.get(span) if found.shapes is not None else None
    if shapes is None or collective_of(found.recording.name_of(span)) not in _MOVE_THEIR_INPUT:
        return None
    inputs = [
        (math.prod(dims), element_bytes(kind)) for dims, kind in zip(shapes.dims, shapes.types, strict=False) if dims
    ]
    if not inputs or any(size is None for _, size in inputs):
        return None
    return int(sum(elements * (size or 0) for elements, size in inputs))


# --------------------------------------------------------------------------------------------------
# Collectives, sends and receives of all ranks: who came last to each, who waited, what each name costs in all.
#
# A database has the tables (or views) `spans` and `ranks`, as trace/spans.py describes them. `prepare` adds:
#
# - `main_threads`: rank, thread: the one whose time is the step's.
# - `labels`: label, name, "group": a number for each communication in each group. A send and its receive are one.
# - `labels_of_names`: key, label: of each name in each group as spans have it.
# - `communications`: rank, step, label, sequence, start_ns, duration_ns, bytes, overlapped_ns, on_main.
#
# `match_collectives` adds `matched`: a row for each collective, send or receive that two ranks or more have.
#
# Rows are added up in the database, so that an answer has the size of ranks times steps, never that of the spans.

_SENDS = re.compile(r"(?i)(^|[^a-z])(i?)(send|recv|receive)(?![a-z])")


def prepare(database: Database) -> None:
    """Adds the tables that the answers are made from."""
    # The thread of a rank's steps; where there are none, that with the most time in spans.
    database.execute(
        """CREATE OR REPLACE TABLE main_threads AS
        SELECT rank, arg_max(thread, (steps, busy_ns, thread)) AS thread FROM (
            SELECT rank, thread, count(*) FILTER (kind = 'step') AS steps,
                coalesce(sum(duration_ns) FILTER (kind NOT IN ('step', 'communication') AND depth = 0), 0) AS busy_ns
            FROM spans WHERE step IS NOT NULL AND thread IS NOT NULL GROUP BY rank, thread) GROUP BY rank"""
    )
    names = database.execute(
        f"""SELECT {label_key("spans")} AS key, any_value(name), any_value("group") FROM spans
        WHERE kind = 'communication' AND step IS NOT NULL GROUP BY key"""
    ).fetchall()
    labels: dict[tuple[str, str], int] = {}
    of_names = [(key, labels.setdefault((common_name(name), group or ""), len(labels))) for key, name, group in names]
    database.execute('CREATE OR REPLACE TABLE labels (label INTEGER, name VARCHAR, "group" VARCHAR)')
    database.execute("CREATE OR REPLACE TABLE labels_of_names (key UBIGINT, label INTEGER)")
    insert(database, "labels_of_names", of_names)
    insert(database, "labels", [(label, *both) for both, label in labels.items()])
    database.execute(
        f"""CREATE OR REPLACE TABLE communications AS
        SELECT s.rank, s.step, l.label, s.sequence, s.start_ns, s.duration_ns, s.bytes, s.overlapped_ns,
            (m.thread IS NULL OR s.thread IS NULL OR s.thread = m.thread) AS on_main
        FROM spans s JOIN labels_of_names l ON l.key = {label_key("s")} LEFT JOIN main_threads m ON m.rank = s.rank
        WHERE s.kind = 'communication' AND s.step IS NOT NULL"""
    )


def label_key(table: str) -> str:
    """The expression of the key in `labels_of_names` of a span's name in its group."""
    return f"""hash({table}.name, coalesce({table}."group", ''))"""


def common_name(name: str) -> str:
    """What a send and the receive that it goes to have in common: `"forward-send"` -> `"forward-send/recv"`."""
    return _SENDS.sub(r"\1\2send/recv", name)


# --- collectives matched across ranks ---


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MatchedCollectives:
    """Collectives that two ranks or more have, and what their transfers take of each rank's step.

    The shortest duration over the ranks of a collective is its transfer: who came last did not wait.
    """

    arrivals: Arrivals | None  # None: there are none
    ranks: Int  # (R,)
    steps: Int  # (S,)
    transfer_on_main_ns: Float  # (S, R) shortest durations of what a rank had part in, on its main thread
    transfer_beside_ns: Float  # (S, R) the same, beside it


def match_collectives(database: Database) -> MatchedCollectives:
    """All of a database that is prepared, matched across ranks by name, group, step and number."""
    # Starts by aligned clocks, where the database has `clocks`; since the first one, so that medians are exact.
    start, join = "c.start_ns", ""
    if has_table(database, "clocks"):
        start = "c.start_ns - coalesce(k.offset_ns + k.drift * (c.start_ns - k.reference_ns), 0)::BIGINT"
        join = "LEFT JOIN clocks k ON k.rank = c.rank"
    database.execute(
        f"""CREATE OR REPLACE TABLE matched AS
        SELECT label, step, sequence, count(*) AS size, min(duration_ns) AS shortest_ns,
            median(duration_ns) AS median_ns, sum(duration_ns)::BIGINT AS total_ns,
            arg_min(rank, (duration_ns, rank)) AS shortest_rank,
            arg_min(rank, (begin_ns, duration_ns, rank)) AS first_rank,
            arg_max(rank, (begin_ns, duration_ns, rank)) AS last_rank, max(begin_ns) - median(begin_ns) AS lateness_ns
        FROM (SELECT c.*, (({start})::HUGEINT - (SELECT min(start_ns) FROM communications))::DOUBLE AS begin_ns
            FROM communications c {join})
        WHERE sequence IS NOT NULL GROUP BY label, step, sequence HAVING count(*) > 1"""
    )
    grid = Grid(
        column(database, "SELECT DISTINCT rank FROM communications ORDER BY rank"),
        column(database, "SELECT DISTINCT step FROM communications ORDER BY step"),
    )
    sums = to_arrays(
        database,
        """SELECT c.rank, c.step, coalesce(sum(m.shortest_ns) FILTER (c.on_main), 0)::BIGINT AS on_main,
            coalesce(sum(m.shortest_ns) FILTER (NOT c.on_main), 0)::BIGINT AS beside,
            sum(c.duration_ns - m.shortest_ns)::BIGINT AS waiting
        FROM communications c JOIN matched m USING (label, step, sequence) GROUP BY c.rank, c.step""",
    )
    on_main, beside, waiting = (np.nan_to_num(grid.filled(sums, name)) for name in ("on_main", "beside", "waiting"))
    return MatchedCollectives(
        arrivals=_arrivals(database, grid.ranks, waiting.sum(axis=0)) if len(sums["rank"]) else None,
        ranks=grid.ranks,
        steps=grid.steps,
        transfer_on_main_ns=on_main,
        transfer_beside_ns=beside,
    )


def _arrivals(database: Database, ranks: Int, waiting_ns: Float) -> Arrivals:
    rows = to_arrays(database, "SELECT * FROM matched JOIN labels USING (label) ORDER BY step, label, sequence")
    whole = {
        name: rows[name].astype(np.int64)
        for name in ("step", "sequence", "size", "first_rank", "last_rank", "shortest_rank")
    }
    shortest, total = rows["shortest_ns"].astype(np.float64), rows["total_ns"].astype(np.float64)
    shorter_by = rows["median_ns"] - shortest
    last = np.searchsorted(ranks, whole["shortest_rank"])
    alone = shorter_by > 0  # of ranks that came together, none came last
    return Arrivals(
        **whole,
        group=tuple(rows["group"].tolist()),
        name=tuple(rows["name"].tolist()),
        lateness_ns=rows["lateness_ns"],
        shorter_by_ns=shorter_by,
        transfer_ns=shortest,
        waiting_ns=total - shortest * whole["size"],
        ranks=ranks,
        times_last=np.bincount(last[alone], minlength=len(ranks)),
        late_ns=np.asarray(np.bincount(last, weights=shorter_by, minlength=len(ranks)), dtype=np.float64),
        rank_waiting_ns=waiting_ns,
    )


# --- what each costs ---


_NO_OVERLAP = "overlap: nothing tells what its rank computes beside it, or not of all of them"
_NO_BYTES = "bandwidth: nothing tells how many bytes were moved (traces of a CPU do with record_shapes alone)"
_NO_TRANSFER = "bandwidth: no two ranks tell of one of these, so its transfer cannot be told from waiting"


def communication(database: Database) -> tuple[CommunicationRow, ...]:
    """Each collective, send and receive in each group, over all ranks and steps; what takes longest first.

    Of a database in which collectives are matched.
    """
    rows = database.execute(
        """SELECT l.name, l."group", c.ranks, coalesce(m.instances, c.instances), c.bytes, c.time_ns, m.transfer_ns,
            c.overlapped_ns
        FROM (SELECT label, count(DISTINCT rank) AS ranks, count(*) // count(DISTINCT rank) AS instances,
                TRY_CAST(sum(bytes) AS BIGINT) AS bytes, sum(duration_ns)::BIGINT AS time_ns,
                CASE WHEN count(*) = count(overlapped_ns) THEN sum(overlapped_ns)::BIGINT END AS overlapped_ns
            FROM communications GROUP BY label) c
        JOIN labels l USING (label)
        LEFT JOIN (SELECT label, count(*) AS instances, sum(shortest_ns * size)::BIGINT AS transfer_ns
            FROM matched GROUP BY label) m USING (label)
        ORDER BY c.time_ns DESC, l.name, l."group" """
    ).fetchall()
    found = []
    for name, group, ranks, instances, moved, time_ns, transfer_ns, overlapped_ns in rows:
        bandwidth = moved * 1e9 / transfer_ns if moved and transfer_ns else None
        reasons = [_NO_OVERLAP] if overlapped_ns is None else []
        if bandwidth is None:
            reasons.append(_NO_BYTES if moved is None else _NO_TRANSFER)
        found.append(
            CommunicationRow(
                name=name,
                group=group,
                size=ranks,
                instances=instances,
                bytes=None if moved is None else moved // ranks,
                time_ns=time_ns,
                transfer_ns=transfer_ns,
                waiting_ns=None if transfer_ns is None else time_ns - transfer_ns,
                overlapped_ns=overlapped_ns,
                bandwidth_bytes_per_s=bandwidth,
                unknown="; ".join(reasons),
            )
        )
    return tuple(found)


def is_call(row: CommunicationRow, rows: Sequence[CommunicationRow]) -> bool:
    """Whether a row is what the calling thread takes to start collectives that another row has, of the backend's."""
    return not row.group and any(other.group and other.name == row.name for other in rows)
