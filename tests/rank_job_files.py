"""The files that the ranks of a simulated job leave: by their own clocks, some of them cut or missing."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from rank_causes import TOKENS, Job, host_name
from rank_jobs import MAIN, Float, Int

START_NS = 1_767_225_600_000_000_000  # 2026-01-01
MS = 1_000_000
# A table of spans; logs of a timer that is on the CPU, has events on a device, or tells launches alone.
WAYS = ("csv", "parquet", "jsonl", "timers", "events", "launches")
TIMERS = ("timers", "events", "launches")
ON_DEVICE = ("forward", "backward", "optimizer", "communication")
_LAUNCH_SHARE, _LAUNCH_MS = 0.15, 0.1  # of what a device that is not slow takes; of a collective
_TEXTS = ("name", "kind", "layer", "parent", "group")
_OF_RANK = ("host", "stage", "dp", "tp", "world_size")


@dataclass(frozen=True, kw_only=True, eq=False)
class Recording:
    """What of a job is recorded, and how."""

    way: str
    offset_ns: Float  # (R,) what a rank's clock is ahead
    drift: Float  # (R,)
    jump_ns: Float  # (S, R) what it is ahead in single steps
    missing: frozenset[int]  # ranks without a file
    steps: Int  # (R,) that are recorded of each
    torn: int | None  # the rank whose last line is cut
    has_tokens: bool


def plain_recording(job: Job, way: str = "csv") -> Recording:
    """All of it, by one clock."""
    ranks = job.program.ranks
    return Recording(
        way=way,
        offset_ns=np.zeros(ranks),
        drift=np.zeros(ranks),
        jump_ns=np.zeros((job.steps, ranks)),
        missing=frozenset(job.unrecorded),
        steps=np.full(ranks, job.steps),
        torn=None,
        has_tokens=True,
    )


def make_recording(job: Job, seed: int, way: str | None = None) -> Recording:
    """As the seed says: how each host's clock goes, and what is missing; never a rank that a cause is of."""
    random = np.random.default_rng([seed, 1])
    ranks, steps = job.program.ranks, job.steps
    launched = job.shape.layout in ("data", "hosts", "tensor")  # all on one stream
    drawn = WAYS[random.choice(len(WAYS), p=[0.25, 0.15, 0.15, 0.25, 0.15, 0.05])]
    drawn = "timers" if drawn in TIMERS and not launched else drawn
    named = {rank for cause in job.causes for rank in cause.planted.ranks}
    some = {rank for cause in job.causes if cause.planted.steps for rank in cause.planted.ranks}
    offset_ns, drift, jump_ns = np.zeros(ranks), np.zeros(ranks), np.zeros((steps, ranks))
    if random.random() < 0.6:
        host = np.arange(ranks) // job.shape.ranks_of_host  # whose ranks have one clock
        offset_ns, drift = random.normal(0, 20 * MS, ranks)[host], random.normal(0, 5e-6, ranks)[host]
    if random.random() < 0.1:
        jump_ns[:: random.integers(2, 6), random.integers(ranks)] = random.uniform(20, 80) * MS
    others = [rank for rank in range(ranks) if rank not in named]
    missing = set(job.unrecorded)
    if random.random() < 0.1 and len(others) > 3:
        missing |= set(random.permutation(others)[: random.integers(1, 3)].tolist())
    recorded = np.full(ranks, steps)
    uncut = [rank for rank in range(ranks) if rank not in some]
    if random.random() < 0.1 and uncut:
        recorded[uncut[random.integers(len(uncut))]] = int(steps * random.uniform(0.4, 0.9))
    return Recording(
        way="parquet" if ranks > 64 and way is None else way or drawn,
        offset_ns=offset_ns,
        drift=drift,
        jump_ns=jump_ns,
        missing=frozenset(missing),
        steps=recorded,
        torn=int(random.integers(ranks)) if random.random() < 0.1 else None,
        has_tokens=bool(random.random() < 0.5),
    )


# --- spans ---


def spans(job: Job, recording: Recording) -> pa.Table:
    """All that is recorded, a row a span, in the order in which spans end on each rank."""
    program, parts = job.program, []
    begin, end = job.played.begin, job.played.end
    device = begin, end
    if recording.way in ("events", "launches"):
        begin, end = _launched(job)
    threads: dict[str, int] = {MAIN: 1}
    tokens = np.ones((job.steps, program.ranks))
    for cause in (cause for cause in job.causes if cause.tokens is not None):
        tokens = tokens * cause.tokens
    phases: dict[tuple[int, str], list[int]] = defaultdict(list)

    def add(ranks: Int, start: Float, stop: Float, took: Float | None, *, only_some: bool = False, **more: Any) -> None:
        parts.append(_rows(job, recording, ranks, start, stop, took, only_some=only_some, **more))

    for number, operation in enumerate(program.operations):
        if not operation.recorded:
            continue
        ranks, meets = program.roles[operation.role], number in program.meeting_of
        if operation.parent:
            phases[operation.role, operation.parent].append(number)
        groups, counted = program.groups_of(number), program.sequences[number]
        on_device = recording.way == "events" and operation.kind in ON_DEVICE
        add(
            ranks,
            begin[number],
            end[number],
            device[1][number] - device[0][number] if on_device else None,
            only_some=not meets and operation.base_ms == 0,
            name=operation.name,
            kind=operation.kind,
            layer=operation.layer or None,
            parent=operation.parent or None,
            depth=1 if operation.parent else 0,
            thread=threads.setdefault(operation.line, len(threads) + 1),
            microbatch=operation.microbatch if operation.microbatch >= 0 else None,
            chunk=operation.chunk if operation.chunk >= 0 else None,
            bytes=operation.bytes if meets else None,
            group=[groups[rank] for rank in ranks.tolist()] if meets else None,
            sequence=[counted[rank] for rank in ranks.tolist()] if meets else None,
        )
    for (role, phase), numbers in phases.items():
        waits = [number for number in numbers if number in program.meeting_of]
        took = device[1][numbers[-1]] - device[0][numbers[0]] if recording.way == "events" else None
        waiting = sum((end[number] - begin[number] for number in waits), np.zeros_like(begin[numbers[0]]))
        where = program.roles[role], begin[numbers[0]], end[numbers[-1]], took
        add(*where, name=phase, kind=phase, depth=0, thread=1, waiting=waiting)
    ends = job.played.step_end
    starts = np.vstack([np.zeros((1, program.ranks)), ends[:-1]])
    share = np.round(tokens * TOKENS) if recording.has_tokens else None
    add(np.arange(program.ranks), starts, ends, None, name="step", kind="step", depth=0, thread=1, tokens=share)
    table = pa.concat_tables(parts)
    rank, start, length = (table[name].to_numpy() for name in ("rank", "start_ns", "duration_ns"))
    return table.take(np.lexsort((-length, start + length, rank)))


def _launched(job: Job) -> tuple[list[Float], list[Float]]:
    """When the main thread launches what the device does later; it waits for the device in the optimizer."""
    program, played = job.program, job.played
    begin, end = [each.copy() for each in played.begin], [each.copy() for each in played.end]
    at: Float | None = None
    for number, operation in enumerate(program.operations):
        if operation.line != MAIN:
            continue
        at = played.begin[number] if at is None else at
        if operation.kind == "communication":
            length = np.full_like(at, _LAUNCH_MS)
        elif operation.kind in ON_DEVICE:  # however long the device takes for it
            length = job.lengths[number] * _LAUNCH_SHARE
        else:
            length = played.end[number] - played.begin[number]
        begin[number] = at
        at = end[number] = played.end[number] if operation.kind == "optimizer" else at + length
    return begin, end


def _rows(
    job: Job,
    recording: Recording,
    ranks: Int,
    start: Float,
    stop: Float,
    took: Float | None,
    *,
    only_some: bool,
    waiting: Float | None = None,
    tokens: Float | None = None,
    group: list[str] | None = None,
    sequence: list[int] | None = None,
    **more: Any,
) -> pa.Table:
    """The rows of one operation: of each rank in each step that is recorded."""
    steps = len(start)
    kept = (np.arange(steps)[:, None] < recording.steps[ranks]) & ~np.isin(ranks, list(recording.missing))
    if only_some:
        kept &= stop > start
    step, place = np.nonzero(kept)
    rank = ranks[place]

    def clock(milliseconds: Float) -> Int:
        own = milliseconds[kept] * MS * (1 + recording.drift[rank]) + recording.offset_ns[rank]
        return START_NS + np.rint(own + recording.jump_ns[step, rank]).astype(np.int64)

    def integers(values: Float | None, unit: float = 1.0) -> pa.Array:
        if values is None:
            return pa.nulls(len(rank), pa.int64())
        return pa.array(np.rint(values[kept] * unit).astype(np.int64))

    def same(value: Any, kind: pa.DataType) -> pa.Array:
        return pa.nulls(len(rank), kind) if value is None else pa.repeat(pa.scalar(value, kind), len(rank))

    def of_ranks(values: list[Any] | None, kind: pa.DataType) -> pa.Array:
        return same(None, kind) if values is None else pa.array(values, kind).take(pa.array(place))

    begins = clock(start)
    shape = job.shape
    places = [shape.place(one) for one in ranks.tolist()]
    return pa.table(
        {
            "rank": pa.array(rank),
            "step": pa.array(step),
            **{name: same(more.get(name), pa.string()) for name in ("name", "kind", "layer")},
            "start_ns": pa.array(begins),
            "duration_ns": pa.array(clock(stop) - begins),
            "device_ns": integers(took, MS),
            "waiting_ns": integers(waiting, MS),
            "depth": same(more.get("depth"), pa.int64()),
            "parent": same(more.get("parent"), pa.string()),
            "thread": same(more.get("thread"), pa.int64()),
            "microbatch": same(more.get("microbatch"), pa.int64()),
            "chunk": same(more.get("chunk"), pa.int64()),
            "group": of_ranks(group, pa.string()),
            "sequence": of_ranks(sequence, pa.int64()),
            "bytes": same(more.get("bytes"), pa.int64()),
            "tokens": integers(tokens),
            "host": of_ranks([host_name(shape.host(one)) for one in ranks.tolist()], pa.string()),
            **{name: of_ranks([each[name] for each in places], pa.int64()) for name in ("stage", "dp", "tp")},
            "world_size": same(shape.ranks, pa.int64()),
        }
    )


# --- files ---


def write(job: Job, recording: Recording, place: Path) -> tuple[Path, bool]:
    """The files of a job in a directory; what to give to `ranks`, and whether as `--spans`."""
    table = spans(job, recording)
    place.mkdir(parents=True, exist_ok=True)
    if recording.way in TIMERS:
        _write_timers(job, recording, table, place / "run")
        return place / "run", False
    path = place / f"spans.{recording.way}"
    if not recording.has_tokens:
        table = table.drop_columns(["tokens"])
    if recording.way == "csv":
        pa.csv.write_csv(table.drop_columns(["device_ns", "waiting_ns"]), path)
    elif recording.way == "parquet":
        pa.parquet.write_table(table, path)
    else:
        with duckdb.connect() as database:
            database.execute("SET threads = 1")
            database.register("spans", table.drop_columns(["device_ns", "waiting_ns"]))
            database.execute(f"COPY spans TO '{path}' (FORMAT json)")
    return path, True


def _write_timers(job: Job, recording: Recording, table: pa.Table, run: Path) -> None:
    """A log of each rank, with its header before and behind."""
    place = run / "timers"
    place.mkdir(parents=True, exist_ok=True)
    shape, device = job.shape, "cpu" if recording.way == "timers" else "cuda"
    table = table.drop_columns(["host", "stage", "world_size"])
    with duckdb.connect() as database:
        database.execute("SET threads = 1")
        database.register("spans", table)
        for rank in sorted(set(range(shape.ranks)) - recording.missing):
            path = place / f"timer_rank{rank}.jsonl"
            database.execute(f"COPY (SELECT * FROM spans WHERE rank = {rank}) TO '{path}' (FORMAT json)")
            where = shape.place(rank)
            coordinates = {"dp": where["dp"], "tp": where["tp"], "pp": where["stage"]}
            about = {"schema_version": 1, "rank": rank, "world_size": shape.ranks, "coordinates": coordinates}
            about |= {"host": host_name(shape.host(rank)), "device": device, "closing_line": True}
            header = json.dumps({"header": about}, separators=(",", ":")) + "\n"
            text = header + path.read_text()
            whole = recording.steps[rank] == job.steps and rank != recording.torn
            path.write_text(text + header if whole else text[:-9] if rank == recording.torn else text)
