"""Jobs of a pipeline with data parallelism, played by the rules of their schedule, and the span table they leave.

The times follow from recursion over microbatches and parts of the model; nothing is taken from the code under test.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

MS = 1_000_000


class Op(NamedTuple):
    """What a rank does: name, its microbatch and chunk (-1: none)."""

    name: str
    replica: int
    stage: int
    microbatch: int = -1
    chunk: int = -1


Length = Callable[[Op], float]  # ms, without waiting


@dataclass(frozen=True, kw_only=True)
class Job:
    """1F1B with one chunk per stage, else interleaved as Megatron does it (microbatches in rounds of `stages`)."""

    stages: int = 2
    chunks: int = 1
    microbatches: int = 2
    replicas: int = 1
    idle_transfers: bool = False  # the ends of the model record a receive and a send that move nothing


def schedule(job: Job, stage: int) -> list[tuple[str, int, int]]:
    """(forward or backward, microbatch, chunk) in the order of a stage."""
    total = job.microbatches * job.chunks

    def at(place: int, kind: str) -> tuple[str, int, int]:
        chunk = place // job.stages % job.chunks if job.chunks > 1 else 0
        microbatch = place // (job.stages * job.chunks) * job.stages + place % job.stages if job.chunks > 1 else place
        return kind, microbatch, chunk if kind == "forward" else job.chunks - 1 - chunk

    early = job.stages - stage - 1
    early = min(total, 2 * early + (job.chunks - 1) * job.stages if job.chunks > 1 else early)
    order = [at(place, "forward") for place in range(early)]
    for place in range(total - early):
        order += [at(early + place, "forward"), at(place, "backward")]
    return order + [at(place, "backward") for place in range(total - early, total)]


def no_gap(op: Op) -> float:
    return 0.0


def play(job: Job, length: Length, gap: Length = no_gap) -> dict[Op, tuple[float, float]]:
    """Begin and end of each operation of a step, in ms; `gap`: how long after it could a compute begins."""
    sys.setrecursionlimit(20_000)
    orders = [schedule(job, stage) for stage in range(job.stages)]
    parts = job.stages * job.chunks
    done: dict[Op, tuple[float, float]] = {}

    def compute(replica: int, stage: int, place: int) -> float:
        kind, microbatch, chunk = orders[stage][place]
        op = Op(f"{kind}-compute", replica, stage, microbatch, chunk)
        if op not in done:
            begin = compute(replica, stage, place - 1) if place else 0.0
            received = receive(replica, stage, place)
            begin = max(begin, 0.0 if received is None else received) + gap(op)
            done[op] = begin, begin + length(op)
        return done[op][1]

    def peer(stage: int, place: int, step: int) -> tuple[int, int] | None:
        kind, microbatch, chunk = orders[stage][place]
        part = chunk * job.stages + stage + (step if kind == "forward" else -step)
        if not 0 <= part < parts:
            return None
        return part % job.stages, orders[part % job.stages].index((kind, microbatch, part // job.stages))

    def before(stage: int, place: int, step: int) -> int | None:
        """The operation before it in the stream of sends (step 1) or receives (-1) of its direction."""
        for other in range(place - 1, -1, -1):
            if orders[stage][other][0] == orders[stage][place][0] and (job.idle_transfers or peer(stage, other, step)):
                return other
        return None

    @cache
    def posted(replica: int, stage: int, place: int, verb: str) -> float:
        """When a rank is ready for a send or a receive."""
        step = 1 if verb == "send" else -1
        other = before(stage, place, step)
        ready = [0.0 if other is None else moved(replica, stage, other, verb)]
        if verb == "send":
            return max(*ready, compute(replica, stage, place))
        kinds = [each[0] for each in orders[stage]]
        same = [each for each in range(place) if kinds[each] == kinds[place]]
        if same:
            ready.append(compute(replica, stage, same[-1]))
        elif kinds[place] == "backward" and place >= 2:
            ready.append(compute(replica, stage, place - 2))
        return max(ready)

    @cache
    def moved(replica: int, stage: int, place: int, verb: str) -> float:
        kind, microbatch, chunk = orders[stage][place]
        op = Op(f"{kind}-{'send' if verb == 'send' else 'recv'}", replica, stage, microbatch, chunk)
        own = posted(replica, stage, place, verb)
        other = peer(stage, place, 1 if verb == "send" else -1)
        met = own
        if other is not None:
            met = max(own, posted(replica, *other, "receive" if verb == "send" else "send"))
        done[op] = own, met + length(op)
        return done[op][1]

    def receive(replica: int, stage: int, place: int) -> float | None:
        if peer(stage, place, -1) is None and not job.idle_transfers:
            return None
        return moved(replica, stage, place, "receive")

    for replica in range(job.replicas):
        for stage, order in enumerate(orders):
            for place in range(len(order)):
                compute(replica, stage, place)
                if peer(stage, place, 1) is not None or job.idle_transfers:
                    moved(replica, stage, place, "send")
    everyone = [(replica, stage) for replica in range(job.replicas) for stage in range(job.stages)]
    free = {who: compute(*who, len(orders[who[1]]) - 1) for who in everyone}
    for name, scope in (("grads-reduce-scatter", "stage"), ("optimizer-clip-main-grad", "all"), ("optimizer", "")):
        begun = dict(free)
        for who in everyone:
            together = [other for other in everyone if scope == "all" or other == who or (scope and other[1] == who[1])]
            op = Op(name, *who)
            free[who] = max(begun[other] for other in together) + length(op)
            done[op] = begun[who], free[who]
    return done


def makespan(job: Job, length: Length) -> float:
    """Time of a step in ms."""
    return max(end for _, end in play(job, length).values())


KINDS = {"forward-compute": "forward", "backward-compute": "backward", "optimizer": "optimizer"}


def span_rows(
    job: Job, lengths: Sequence[Length], *, gap: Length = no_gap, chunks: bool = True, microbatches: bool = True
) -> list[tuple]:
    """Rows of the span table, one step for each of `lengths`."""
    rows, begin = [], 1_700_000_000_000 * MS
    for step, length in enumerate(lengths):
        counts: dict[tuple[str, int, int], int] = {}
        played = play(job, length, gap)
        for op, (start, end) in sorted(played.items(), key=lambda item: item[1]):
            number = counts[op[:3]] = counts.get(op[:3], -1) + 1
            own = op.name.endswith("compute")
            rows.append(
                (
                    op.replica * job.stages + op.stage,
                    step,
                    op.name,
                    KINDS.get(op.name, "communication"),
                    begin + round(start * MS),
                    round(end * MS) - round(start * MS),
                    0,
                    op.microbatch if own and microbatches else None,
                    number,
                    None,
                    op.chunk if own and chunks else None,
                )
            )
        begin += round(max(end for _, end in played.values()) * MS)  # all begin the next step together
    return rows


COLUMNS = (
    "rank",
    "step",
    "name",
    "kind",
    "start_ns",
    "duration_ns",
    "depth",
    "microbatch",
    "sequence",
    "group",
    "chunk",
)


def write_table(path: Path, job: Job, rows: Iterable[tuple]) -> Path:
    """A table of rows as of `span_rows`, with the places of the job's ranks; rank = replica * stages + stage."""
    import pyarrow as pa
    import pyarrow.parquet

    named = [dict(zip(COLUMNS, row, strict=True)) for row in rows]
    placed = [{**row, "stage": row["rank"] % job.stages, "dp": row["rank"] // job.stages} for row in named]
    pyarrow.parquet.write_table(pa.Table.from_pylist(placed), path)
    return path
