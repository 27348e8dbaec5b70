"""Collectives, sends and receives: as a trace shows them, and matched across ranks."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from profiler_wrapper.analysis.attributed import Attributed
from profiler_wrapper.analysis.charges import union
from profiler_wrapper.analysis.time_rows import exposed_communication
from profiler_wrapper.analysis.views.collectives import collective_of, element_bytes
from profiler_wrapper.ranks.database import Arrays, Database, column, has_table, insert, to_arrays
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
# - `label_bytes`: label, bytes: moved in all.
# - `communications`: rank, step, label, sequence, start_ns, duration_ns, on_main.
#
# Rows are added up in the database, so that an answer has the size of ranks times steps, never that of the spans.

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


# --- collectives matched across ranks ---


_ROWS_AT_ONCE = 1_500_000
_GREATEST = 2**62  # number of an instance


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MatchedCollectives:
    """Collectives that two ranks or more tell of. (C,) arrays by instance; (S, R) and (R,) by step and rank.

    The shortest duration over the ranks of an instance is its transfer: who came last did not wait.
    """

    label: Int  # (C,) as the table `labels` has it
    step: Int  # (C,)
    sequence: Int  # (C,)
    size: Int  # (C,) ranks that tell of it
    shortest_ns: Float  # (C,)
    median_ns: Float  # (C,) of durations
    total_ns: Float  # (C,)
    shortest_rank: Int  # (C,)
    first_rank: Int  # (C,) by starts, aligned where clocks are
    last_rank: Int  # (C,)
    lateness_ns: Float  # (C,) last start - median start
    ranks: Int  # (R,)
    steps: Int  # (S,)
    transfer_on_main_ns: Float  # (S, R) shortest durations of what a rank had part in, on its main thread
    transfer_beside_ns: Float  # (S, R) the same, beside it
    times_last: Int  # (R,) times a rank had the shortest duration
    late_ns: Float  # (R,) median - shortest of these
    waiting_ns: Float  # (R,) durations beyond the shortest


def match_collectives(database: Database) -> MatchedCollectives:
    """All of a database that is prepared, matched across ranks, a few steps at a time."""
    ranks = column(database, "SELECT DISTINCT rank FROM communications ORDER BY rank")
    steps = column(database, "SELECT DISTINCT step FROM communications ORDER BY step")
    shape = (len(steps), len(ranks))
    on_main, beside = np.zeros(shape), np.zeros(shape)
    times_last = np.zeros(len(ranks), dtype=np.int64)
    late, waiting = np.zeros(len(ranks)), np.zeros(len(ranks))
    parts: list[dict[str, npt.NDArray[Any]]] = []
    for rows in _sorted_rows(database):
        first = np.flatnonzero(np.diff(rows["instance"], prepend=-1))
        size = np.diff(first, append=len(rows["instance"]))
        place = np.repeat(np.arange(len(first)), size)
        shared = (size > 1)[place]
        first, size, rows = _without_lone(rows, shared, size)
        if not len(first):
            continue
        place = np.repeat(np.arange(len(first)), size)
        part = _part(rows, first, size, place)
        parts.append(part)
        rank = np.searchsorted(ranks, rows["rank"])
        step = np.searchsorted(steps, rows["step"])
        shortest = part["shortest_ns"][place]
        for target, chosen in ((on_main, rows["on_main"]), (beside, ~rows["on_main"])):
            at = step[chosen] * len(ranks) + rank[chosen]
            target += np.bincount(at, weights=shortest[chosen], minlength=target.size).reshape(shape)
        waiting += np.bincount(rank, weights=rows["duration_ns"] - shortest, minlength=len(ranks))
        last = np.searchsorted(ranks, part["shortest_rank"])
        alone = part["median_ns"] > part["shortest_ns"]  # of ranks that came together, none came last
        times_last += np.bincount(last[alone], minlength=len(ranks))
        late += np.bincount(last, weights=part["median_ns"] - part["shortest_ns"], minlength=len(ranks))
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]} if parts else _nothing()
    return MatchedCollectives(
        **joined,
        ranks=ranks,
        steps=steps,
        transfer_on_main_ns=on_main,
        transfer_beside_ns=beside,
        times_last=times_last,
        late_ns=late,
        waiting_ns=waiting,
    )


def _without_lone(rows: Arrays, shared: npt.NDArray[np.bool_], size: Int) -> tuple[Int, Int, Arrays]:
    """Where several ranks tell: (first row of each instance, its rows, all rows)."""
    size = size[size > 1]
    return np.cumsum(size) - size, size, {name: values[shared] for name, values in rows.items()}


def _part(rows: Arrays, first: Int, size: Int, place: Int) -> dict[str, npt.NDArray[Any]]:
    """Instances of some steps; `rows` are sorted by instance, then by duration."""
    duration, rank = rows["duration_ns"].astype(np.float64), rows["rank"].astype(np.int64)
    by_start = np.lexsort((rows["start_ns"], place))
    start = rows["start_ns"][by_start]
    low, high, last = first + (size - 1) // 2, first + size // 2, first + size - 1
    return {
        "label": rows["label"][first].astype(np.int64),
        "step": rows["step"][first].astype(np.int64),
        "sequence": rows["sequence"][first].astype(np.int64),
        "size": size.astype(np.int64),
        "shortest_ns": duration[first],
        "median_ns": (duration[low] + duration[high]) / 2,
        "total_ns": np.add.reduceat(duration, first),
        "shortest_rank": rank[first],
        "first_rank": rank[by_start[first]],
        "last_rank": rank[by_start[last]],
        "lateness_ns": (start[last] - start[low]) - (start[high] - start[low]) / 2,
    }


def _nothing() -> dict[str, npt.NDArray[Any]]:
    whole = ("label", "step", "sequence", "size", "shortest_rank", "first_rank", "last_rank")
    names = {name: np.empty(0, dtype=np.int64) for name in whole}
    return names | {name: np.empty(0) for name in ("shortest_ns", "median_ns", "total_ns", "lateness_ns")}


def _sorted_rows(database: Database) -> Iterator[Arrays]:
    """Numbered communications of some steps at a time, by instance, then by duration."""
    counts = to_arrays(
        database,
        """SELECT step, count(*) AS rows, max(sequence) AS most, max(label) AS label FROM communications
        WHERE sequence IS NOT NULL GROUP BY step ORDER BY step""",
    )
    if not len(counts["step"]):
        return
    sequences, labels = int(counts["most"].max()) + 1, int(counts["label"].max()) + 1
    part = (np.cumsum(counts["rows"]) - 1) // _ROWS_AT_ONCE
    for number in np.unique(part).tolist():
        steps = counts["step"][part == number]
        first, last = int(steps[0]), int(steps[-1])
        instance = f"c.sequence + {sequences} * (c.step - {first} + {last - first + 1} * c.label::BIGINT)"
        if sequences * (last - first + 1) * labels > _GREATEST:  # steps with such numbers are counted instead
            instance = "dense_rank() OVER (ORDER BY c.label, c.step, c.sequence)"
        start, join = _aligned_start(database)
        yield to_arrays(
            database,
            f"""SELECT {instance} AS instance,
                c.rank, c.step, c.label, c.sequence, {start} AS start_ns, c.duration_ns, c.on_main
            FROM communications c {join} WHERE c.sequence IS NOT NULL AND c.step BETWEEN {first} AND {last}
            ORDER BY instance, c.duration_ns, c.rank""",
        )


def _aligned_start(database: Database) -> tuple[str, str]:
    """(expression, join) of starts by aligned clocks, where the database has `clocks`; else by each rank's own."""
    if not has_table(database, "clocks"):
        return "c.start_ns", ""
    shift = "coalesce(k.offset_ns + k.drift * (c.start_ns - k.reference_ns), 0)::BIGINT"
    return f"c.start_ns - {shift}", "LEFT JOIN clocks k ON k.rank = c.rank"


# --- what each costs ---


def arrivals(database: Database, *, matched: MatchedCollectives | None = None) -> Arrivals | None:
    """Who came last to each collective, and who waited; None where no two ranks tell of one."""
    matched = match_collectives(database) if matched is None else matched
    if not len(matched.step):
        return None
    rows = database.execute('SELECT label, name, "group" FROM labels').fetchall()
    named = {label: (name, group) for label, name, group in rows}
    names = [named[label] for label in matched.label.tolist()]
    order = np.lexsort((matched.sequence, matched.label, matched.step))
    return Arrivals(
        step=matched.step[order],
        group=tuple(names[i][1] for i in order.tolist()),
        name=tuple(names[i][0] for i in order.tolist()),
        sequence=matched.sequence[order],
        size=matched.size[order],
        first_rank=matched.first_rank[order],
        last_rank=matched.last_rank[order],
        lateness_ns=matched.lateness_ns[order],
        shortest_rank=matched.shortest_rank[order],
        shorter_by_ns=(matched.median_ns - matched.shortest_ns)[order],
        transfer_ns=matched.shortest_ns[order],
        waiting_ns=(matched.total_ns - matched.shortest_ns * matched.size)[order],
        ranks=matched.ranks,
        times_last=matched.times_last,
        late_ns=matched.late_ns,
        rank_waiting_ns=matched.waiting_ns,
    )


def communication(database: Database, *, matched: MatchedCollectives | None = None) -> tuple[CommunicationRow, ...]:
    """Each collective, send and receive in each group, over all ranks and steps; what takes longest first."""
    matched = match_collectives(database) if matched is None else matched
    rows = database.execute(
        """SELECT c.label, l.name, l."group", c.ranks, c.instances, c.time_ns, b.bytes FROM (
            SELECT label, count(DISTINCT rank) AS ranks, count(*) // count(DISTINCT rank) AS instances,
                sum(duration_ns)::BIGINT AS time_ns FROM communications GROUP BY label) c
        JOIN labels l USING (label) LEFT JOIN label_bytes b USING (label)
        ORDER BY c.time_ns DESC, l.name, l."group" """
    ).fetchall()
    transfers = np.bincount(matched.label, weights=matched.shortest_ns * matched.size, minlength=1)
    counts = np.bincount(matched.label, minlength=1)
    hidden = overlapped_ns(database)
    found = []
    for label, name, group, ranks, instances, time_ns, moved in rows:
        met = label < len(counts) and counts[label] > 0
        transfer_ns = int(transfers[label]) if met else None
        of_one_rank = None if moved is None else moved // ranks
        bandwidth = moved * 1e9 / transfer_ns if moved and transfer_ns else None
        found.append(
            CommunicationRow(
                name=name,
                group=group,
                size=ranks,
                instances=int(counts[label]) if met else instances,
                bytes=of_one_rank,
                time_ns=time_ns,
                transfer_ns=transfer_ns,
                waiting_ns=None if transfer_ns is None else time_ns - transfer_ns,
                overlapped_ns=hidden.get(label),
                bandwidth_bytes_per_s=bandwidth,
            )
        )
    return tuple(found)


def is_call(row: CommunicationRow, rows: Sequence[CommunicationRow]) -> bool:
    """Whether a row is what the calling thread takes to start collectives that another row has, of the backend's."""
    return not row.group and any(other.group and other.name == row.name for other in rows)


# --- overlap with compute ---


_NO_OVERLAP = "overlap: nothing tells what its rank computes beside it, or not of all of them"
_NO_BYTES = "bandwidth: nothing tells how many bytes were moved (traces of a CPU do with record_shapes alone)"
_NO_TRANSFER = "bandwidth: no two ranks tell of one of these, so its transfer cannot be told from waiting"


def overlapped_ns(database: Database) -> dict[int, int]:
    """By label of a prepared database: time with compute of the same rank beside, where all of its spans tell it."""
    if database.execute("SELECT 1 FROM spans WHERE overlapped_ns IS NOT NULL LIMIT 1").fetchone() is None:
        return {}
    found = database.execute(
        f"""SELECT l.label, sum(s.overlapped_ns)::BIGINT FROM spans s JOIN labels_of_names l ON l.key = {label_key("s")}
        WHERE s.kind = 'communication' AND s.step IS NOT NULL
        GROUP BY l.label HAVING count(*) = count(s.overlapped_ns)"""
    ).fetchall()
    return dict(found)


def with_reasons(rows: Iterable[CommunicationRow]) -> tuple[CommunicationRow, ...]:
    """The rows, each with why its overlap or its bandwidth is not known."""
    found = []
    for row in rows:
        reasons = [_NO_OVERLAP] if row.overlapped_ns is None else []
        if row.bandwidth_bytes_per_s is None:
            reasons.append(_NO_BYTES if row.bytes is None else _NO_TRANSFER)
        found.append(replace(row, unknown="; ".join(reasons)))
    return tuple(found)
