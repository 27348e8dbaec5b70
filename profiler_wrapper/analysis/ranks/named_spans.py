"""Spans whose names tell no kind, as users call parts of their programs: what each takes on each rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from profiler_wrapper.analysis.ranks.arrays import Database
from profiler_wrapper.analysis.ranks.model import Float, NamedSpan, OwnTimes, Verdict
from profiler_wrapper.analysis.ranks.verdict import LATE, OUTSIDE
from profiler_wrapper.recording.span_database import insert

_MOST_NAMES = 64  # those with the most time
_LEAST = 0.05  # of a step's time beyond the others: less is no evidence
_MOST_LINES = 3
_MOST_OF_IT = 0.6  # of what the job loses by a rank
_LONGEST = 80  # of a name, in a sentence


def named_spans(database: Database, own: OwnTimes) -> tuple[NamedSpan, ...]:
    """Names of kind "other" in the steps of `own`, that which differs most between ranks first.

    A rank without such a span took nothing for it. What lies within another of its name is in that one's time.
    """
    if not len(own.steps) or not len(own.ranks):
        return ()
    database.execute("CREATE OR REPLACE TABLE judged_steps (step BIGINT)")
    insert(database, "judged_steps", [(step,) for step in own.steps.tolist()])
    rows = database.execute(
        """WITH named AS (
            SELECT name, rank, duration_ns, depth FROM spans SEMI JOIN judged_steps USING (step)
            WHERE kind = 'other' AND name <> 'other' AND (parent IS NULL OR parent <> name)),
        most AS (SELECT name FROM named GROUP BY name ORDER BY sum(duration_ns) DESC, name LIMIT ?)
        SELECT name, rank, sum(duration_ns)::DOUBLE, count(*), min(depth) FROM named SEMI JOIN most USING (name)
        GROUP BY name, rank""",
        [_MOST_NAMES],
    ).fetchall()
    place = {rank: at for at, rank in enumerate(own.ranks.tolist())}
    steps = np.isfinite(own.wall_ns).sum(axis=0)  # (R,)
    sums: dict[str, tuple[Float, int, int]] = {}
    for name, rank, duration_ns, count, depth in rows:
        if rank in place:
            times, counted, least = sums.get(name, (np.zeros(len(own.ranks)), 0, depth))
            times[place[rank]] += duration_ns
            sums[name] = (times, counted + count, min(least, depth))
    there = np.flatnonzero(steps > 0)
    found = []
    for name, (times, counted, depth) in sums.items():
        each = times[there] / steps[there]
        slowest = int(each.argmax())
        others = np.delete(each, slowest)
        found.append(
            NamedSpan(
                name=name,
                slowest_rank=int(own.ranks[there[slowest]]),
                slowest_ns=float(each[slowest]),
                others_ns=float(np.median(others)) if len(others) else None,
                per_step=counted / int(steps.sum()),
                nested=depth > 0,
            )
        )
    return tuple(sorted(found, key=lambda one: (-one.beyond_ns, one.name)))


def with_name(verdict: Verdict, spans: Sequence[NamedSpan]) -> Verdict:
    """The verdict on a rank that is late for no known reason, with the name of the span that takes it most of that."""
    if verdict.cause not in ("other", "late collective") or verdict.lost_ns is None:
        return verdict
    mine = [one for one in spans if one.slowest_rank == verdict.rank and not one.nested and one.others_ns is not None]
    most = max(mine, key=lambda one: one.beyond_ns, default=None)
    if most is None or most.beyond_ns < _MOST_OF_IT * verdict.lost_ns:
        return verdict
    why = f"its {most.name[:_LONGEST]} takes longer"
    sentence = verdict.sentence.replace(LATE, f"{why}, and it comes late to the collectives").replace(OUTSIDE, why)
    return replace(verdict, sentence=sentence)


def named_evidence(spans: Sequence[NamedSpan], step_ns: float) -> Iterator[str]:
    """Of names that take one rank longer for much: `load: 32.1 ms a step on rank 1, 0.1 ms on the others`."""
    far = [one for one in spans if one.others_ns is not None and one.beyond_ns >= _LEAST * step_ns]
    for one in far[:_MOST_LINES]:
        assert one.others_ns is not None
        yield (
            f"{one.name[:_LONGEST]}: {one.slowest_ns / 1e6:,.1f} ms a step on rank {one.slowest_rank}, "
            f"{one.others_ns / 1e6:,.1f} ms on the typical other rank; its name tells no kind, so it counts as other"
        )
