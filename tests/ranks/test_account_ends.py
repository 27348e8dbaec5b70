"""Whether those that a communication brings together wait for one another: they do where they end it together."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("duckdb")

from profiler_wrapper.ranks.load import load_ranks
from rank_spans import job, write_logs

MS = 1_000_000
STEPS = 12


def late(folder: Path, leaves_ms: Mapping[tuple[int, int], float]) -> list[float]:
    """Milliseconds a step that two ranks wait for the second; `leaves_ms`: by rank and step, how late it goes on."""
    rows = job(ranks=2, steps=STEPS, slow=1)
    for row in rows:
        more = int(leaves_ms.get((row["rank"], row["step"]), 0.0) * MS)
        if row["kind"] == "communication":
            row["duration_ns"] += more
    write_logs(folder, rows, ranks=2)
    report = load_ranks(folder)
    assert report.verdict.rank == 1, report.verdict.sentence
    return (report.own.waiting_ns.sum(axis=0) / MS / STEPS).tolist()


def test_all_wait_for_the_last_one(tmp_path: Path) -> None:
    assert late(tmp_path, {}) == pytest.approx([30, 0])


def test_a_thread_that_goes_on_late_now_and_then_has_waited_all_the_same(tmp_path: Path) -> None:
    """The machine was busy: rank 0 heard of the end of two reductions 9 ms later."""
    assert late(tmp_path, {(0, 3): 9.0, (0, 8): 9.0}) == pytest.approx([30 + 2 * 9 / STEPS, 0])


def test_on_a_busy_machine_threads_go_on_late_in_every_step(tmp_path: Path) -> None:
    """Ends differ by up to 25 ms, starts by 30; but nobody goes on before the slow rank has come."""
    chance = np.random.default_rng(5)
    rows = job(steps=STEPS, slow=2)
    shortest = np.full(STEPS, np.inf)
    for row in rows:
        if row["kind"] == "communication":
            row["duration_ns"] += int(chance.uniform(-15, 10) * MS)
            shortest[row["step"]] = min(shortest[row["step"]], row["duration_ns"])
    write_logs(tmp_path, rows)
    report = load_ranks(tmp_path)
    took = np.array(
        [
            [row["duration_ns"] for row in rows if (row["rank"], row["kind"]) == (rank, "communication")]
            for rank in range(4)
        ]
    )
    assert (took - shortest == report.own.waiting_ns.T).all()
    assert report.verdict.rank == 2 and report.to_dict()["waiting"] == "measured", report.verdict.sentence


@pytest.mark.parametrize(("ends_ms", "waits"), [(0.0, True), (2.0, True), (-2.0, True), (20.0, False)])
def test_the_main_thread_goes_on_when_a_communication_beside_it_ends(
    tmp_path: Path, ends_ms: float, waits: bool
) -> None:
    """Its own thread may be late to tell of the end; who goes on well before that has not waited for it."""
    rows = job(ranks=2, steps=STEPS, slow=1)
    for row in rows:
        row["thread"] = 2 if row["kind"] == "communication" else 1
        if row["kind"] == "communication":
            row["duration_ns"] += int(ends_ms * MS)
    write_logs(tmp_path, rows, ranks=2)
    report = load_ranks(tmp_path)
    assert bool(report.own.waiting_ns.any()) == waits, report.own.waiting_ns / MS
    assert (report.verdict.rank == 1) == waits, report.verdict.sentence


def test_who_does_not_wait_for_the_last_one_ends_before_it(tmp_path: Path) -> None:
    """As in a broadcast: ranks come at other times in each step, and go on as soon as they are done, 2 ms later."""
    chance = np.random.default_rng(3)
    rows = job(steps=STEPS)
    for row in rows:
        if row["kind"] == "communication":
            row["start_ns"] += int(chance.uniform(0, 30) * MS)
            row["duration_ns"] = 2 * MS
    write_logs(tmp_path, rows)
    assert not load_ranks(tmp_path).own.waiting_ns.any()
