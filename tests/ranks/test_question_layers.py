"""One slow layer: of a rank, of all ranks beside its siblings, of all in some steps; and what only looks like one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("duckdb")

from profiler_wrapper.ranks.excess import Job
from profiler_wrapper.ranks.graph import build
from profiler_wrapper.ranks.model import Int, LayerTimes
from profiler_wrapper.ranks.question import ask
from profiler_wrapper.ranks.suspects import Suspect
from rank_accounts import MS, account_of, meet, row

RANKS, STEPS = 4, 8
BLOCKS = [f"h.{at}" for at in range(6)]
Times = dict[str, list[float]]  # layer: milliseconds of its forward on each rank
ALIKE: Times = {name: [10.0] * RANKS for name in BLOCKS}


def job_of(times: Times, *, steps: Sequence[int] = range(STEPS), inner: Sequence[str] = ()) -> Job:
    """A forward that is the sum of these layers but for those that lie in others, and an all-reduce of 5 ms.

    Args:
        steps: in which it is so; in the others each layer takes 10 ms.
    """
    outer = [name for name in times if name not in inner]

    def of(name: str, rank: int, step: int) -> float:
        return times[name][rank] if step in steps else 10.0

    rows, now = [], [0.0] * RANKS
    for step in range(STEPS):
        begin = list(now)
        met = max(now[rank] + sum(of(name, rank, step) for name in outer) for rank in range(RANKS)) + 5
        for rank in range(RANKS):
            end = begin[rank] + sum(of(name, rank, step) for name in outer)
            rows.append(row(rank, step, "step", begin[rank], met))
            rows.append(row(rank, step, "forward", begin[rank], end))
            rows.append(meet(rank, step, end, met))
            now[rank] = met
    account = account_of(rows)
    layers = LayerTimes(
        ranks=account.ranks,
        layers=tuple(times),
        kinds=("forward",),
        self_ns=np.array([times[name] if len(steps) > STEPS / 2 else [10.0] * RANKS for name in times]).T[:, :, None]
        * float(MS),
    )

    def means(ranks: Sequence[int], chosen: Int) -> dict[tuple[int, str, str], float]:
        return {
            (rank, name, "forward"): float(np.mean([of(name, rank, int(step)) for step in chosen])) * MS
            for rank in ranks
            for name in times
        }

    job = Job(account, build(account), np.ones(STEPS, dtype=bool), np.zeros(RANKS, dtype=np.int64), ("",) * RANKS)
    return replace(job, label_names=("all_reduce",), label_groups=("world",), layers=layers, layer_means=means)


def first(job: Job) -> Suspect:
    return ask(job).causes[0]


def test_the_layer_that_is_a_ranks_excess() -> None:
    found = first(job_of(ALIKE | {"h.2": [10, 90, 10, 10]}))
    assert (found.what, found.ranks, found.layer, found.gain_ns) == ("rank", (1,), "h.2", 80 * MS)


def test_a_layer_that_is_a_little_of_it_is_none() -> None:
    times = ALIKE | {"h.2": [10, 60, 10, 10], "h.3": [10, 60, 10, 10]}
    found = first(job_of(times))
    assert (found.ranks, found.layer, found.gain_ns) == ((1,), None, 100 * MS)


def test_the_innermost_is_named_and_what_holds_the_others_never() -> None:
    times = ALIKE | {"h.2": [10, 90, 10, 10], "h.2.mlp": [6, 86, 6, 6], "model": [60, 140, 60, 60]}
    assert first(job_of(times, inner=("h.2.mlp", "model"))).layer == "h.2.mlp"
    evenly = {name: [10.0, 23.0, 10.0, 10.0] for name in BLOCKS} | {"Model": [60.0, 138.0, 60.0, 60.0]}
    found = first(job_of(evenly, inner=("Model",)))
    assert (found.ranks, found.layer) == ((1,), None)


def test_a_layer_of_all_ranks_beside_its_siblings() -> None:
    found = first(job_of(ALIKE | {"h.3": [30, 30, 30, 30]}))
    assert (found.what, found.ranks, found.layer) == ("all", (), "h.3")
    assert (found.gain_ns, found.typical_ns) == (20 * MS, 10 * MS)


def test_a_layer_of_all_ranks_in_some_steps() -> None:
    """Of eight steps three: beside the same layer in the others."""
    found = first(job_of(ALIKE | {"h.3": [30.0] * RANKS}, steps=(2, 3, 4)))
    assert (found.what, found.ranks, found.layer, found.gain_ns) == ("all", (), "h.3", 20 * MS * 3 / STEPS)
    assert np.flatnonzero(found.steps).tolist() == [2, 3, 4]


def test_what_is_no_slow_layer_of_all() -> None:
    def layer_of(times: Times) -> list[str | None]:
        return [one.layer for one in ask(job_of(times)).causes]

    assert layer_of(ALIKE) == []
    assert layer_of(ALIKE | {"head": [90.0] * 4}) == [], "it has no siblings"
    assert layer_of({f"h.{at}": [10.0 + 8 * at] * 4 for at in range(6)}) == [], "each has another length"
    assert layer_of({"h.0": [10.0] * 4, "h.1": [40.0] * 4}) == [], "of two nobody knows which is slow"
