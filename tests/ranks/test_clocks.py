"""Clocks fitted to common events against clocks whose errors are known."""

from __future__ import annotations

import numpy as np
import pytest

from profiler_wrapper.ranks.clocks import align, fit, write_table
from profiler_wrapper.ranks.model import Clocks
from profiler_wrapper.ranks.times import prepare
from simulated_clocks import BEGIN_NS, Float, WrongClocks, clock_tables, random_clocks

pytest.importorskip("duckdb")
pytest.importorskip("pyarrow")

US, MS, S = 1e3, 1e6, 1e9


def worst_ns(clocks: Clocks, truth: WrongClocks, *, until: float = 100 * S, ranks: list[int] | None = None) -> float:
    """The farthest that two ranks' aligned clocks are apart at any of some true times."""
    times = np.linspace(0.01 * until, 0.99 * until, 57)
    aligned = np.stack([_aligned(clocks, truth, rank, times) for rank in ranks or clocks.ranks.tolist()])
    return float(np.ptp(aligned, axis=0).max())


def _aligned(clocks: Clocks, truth: WrongClocks, rank: int, times: Float) -> Float:
    own = BEGIN_NS + np.rint(truth.shown(rank, times)).astype(np.int64)
    return (align(clocks, np.full(len(own), rank), own) - BEGIN_NS).astype(np.float64)


@pytest.mark.parametrize("offset_ns", [1 * MS, 30 * MS, 5 * S])
def test_offsets_and_drifts(offset_ns: float) -> None:
    """50 ppm over 100 s are 5 ms; what is left is of the size of the jitter."""
    truth = random_clocks(8, seed=1, offset_ns=offset_ns)
    clocks = fit(clock_tables(truth, [("all", range(8))]))
    assert clocks.source == "collectives"
    assert clocks.events == 100
    assert worst_ns(clocks, truth) < 20 * US
    told = truth.offsets - truth.offsets[0]
    assert np.abs(clocks.offset_ns - told).max() < 40 * US + 1e-4 * np.abs(told).max()
    assert np.abs(clocks.drift - (truth.drifts - truth.drifts[0])).max() < 1e-6
    assert clocks.offset_ns[0] == pytest.approx(0, abs=1)
    assert clocks.drift[0] == 0
    assert (clocks.residual_ns < 30 * US).all()


def test_residual_is_the_jitter() -> None:
    """Ten times the jitter leaves ten times the residual; both are reported."""
    truth = random_clocks(6, seed=2)
    small, large = (fit(clock_tables(truth, [("all", range(6))], jitter_ns=each)) for each in (10 * US, 100 * US))
    assert np.median(large.residual_ns) / np.median(small.residual_ns) == pytest.approx(10, rel=0.1)
    assert 2 * US < np.median(small.residual_ns) < 6 * US  # |normal| is typically 0.4 sigma from its median


def test_ranks_through_chains_of_groups() -> None:
    """No group has all ranks: 0-1, 1-2 ... as stages of a pipeline, beside replicas of two."""
    truth = random_clocks(12, seed=3)
    groups = [(f"{rank}-{rank + 1}", (rank, rank + 1)) for rank in range(5)]
    groups += [(f"stage {rank}", (rank, rank + 6)) for rank in range(6)]
    clocks = fit(clock_tables(truth, groups))
    assert clocks.source == "collectives"
    assert worst_ns(clocks, truth) < 100 * US


def test_a_straggler_is_not_taken_for_a_wrong_clock() -> None:
    """A rank 400 ms late in each step comes last, and leaves with the others."""
    truth = random_clocks(8, seed=4)
    assert worst_ns(fit(clock_tables(truth, [("all", range(8))], late={5: 400 * MS})), truth) < 20 * US


def test_launches_are_no_common_events() -> None:
    """What does not block ends when its rank is done with it; steps say less, and that is said."""
    truth = random_clocks(4, seed=5, offset_ns=3 * S)
    clocks = fit(clock_tables(truth, [("all", range(4))], blocking=False, late={2: 400 * MS}))
    assert clocks.source == "steps"
    assert worst_ns(clocks, truth) < 600 * MS
    assert (clocks.residual_ns[1:] > 1 * MS).all()


def test_a_clock_that_is_set_leaves_the_others_as_right_as_ever() -> None:
    """An NTP step: its residual is large."""
    truth = random_clocks(6, seed=6, jumps={2: (40 * S, 30 * MS), 4: (71 * S, -2 * S)})
    clocks = fit(clock_tables(truth, [("all", range(6))]))
    assert worst_ns(clocks, truth, ranks=[0, 1, 3, 5]) < 25 * US
    assert clocks.residual_ns[[2, 4]].min() > 1 * MS > clocks.residual_ns[[0, 1, 3, 5]].max()


def test_short_runs_say_nothing_of_drift() -> None:
    """Ten steps of 20 ms: jitter of 20 us is 100 ppm of it. Offsets are found all the same."""
    truth = random_clocks(4, seed=8, offset_ns=10 * MS)
    clocks = fit(clock_tables(truth, [("all", range(4))], steps=10, step_ns=20 * MS))
    assert worst_ns(clocks, truth, until=0.2 * S) < 30 * US
    one = fit(clock_tables(truth, [("all", range(4))], steps=1))
    assert worst_ns(one, truth, until=1 * S) < 1 * MS  # one reading, and it may be a late one
    assert not one.drift.any()


def test_hosts_share_a_clock() -> None:
    """Ranks of one host have one line; with one host there is nothing to align."""
    wrong = random_clocks(2, seed=9)
    of_host = WrongClocks(offsets=wrong.offsets[[0, 0, 1, 1]], drifts=wrong.drifts[[0, 0, 1, 1]])
    hosts = {0: "a", 1: "a", 2: "b", 3: "b"}
    clocks = fit(clock_tables(of_host, [("all", range(4))], hosts=hosts))
    assert clocks.offset_ns[0] == clocks.offset_ns[1]
    assert clocks.offset_ns[2] == clocks.offset_ns[3]
    assert worst_ns(clocks, of_host) < 30 * US
    same = WrongClocks(offsets=np.zeros(4), drifts=np.zeros(4))
    alone = fit(clock_tables(same, [("all", range(4))], hosts=dict.fromkeys(range(4), "a")))
    assert alone.source == "none" and not alone.offset_ns.any()
    assert any("one host" in note for note in alone.notes)


def test_machines_of_one_name_have_a_clock_for_each_rank() -> None:
    """As containers have that are all called alike; another host keeps its one clock."""
    far = np.array([0.0, 3600.0, 7200.0, -5.0, -5.0]) * S
    truth = WrongClocks(offsets=far, drifts=np.zeros(5))
    hosts = {0: "trainer", 1: "trainer", 2: "trainer", 3: "b", 4: "b"}
    clocks = fit(clock_tables(truth, [("all", range(5))], hosts=hosts))
    assert worst_ns(clocks, truth) < 25 * US
    assert clocks.offset_ns[3] == clocks.offset_ns[4]
    assert clocks.notes == ("ranks of host trainer do not share a clock: each has its own",)
    alike = fit(clock_tables(truth, [("all", range(5))], hosts=dict.fromkeys(range(5), "trainer")))
    assert worst_ns(alike, truth) < 25 * US


def test_nothing_in_common_is_said() -> None:
    truth = random_clocks(3, seed=10)
    connection = clock_tables(truth, [("all", range(3))])
    connection.execute("UPDATE spans SET step = step + 1000 * rank, start_ns = start_ns + 5000000000000 * rank")
    prepare(connection)
    clocks = fit(connection)
    assert clocks.source == "none"
    assert np.isnan(clocks.residual_ns).all()
    assert "in common" in clocks.notes[0]
    connection.execute("DELETE FROM spans WHERE rank > 0")
    assert "one clock" in fit(connection).notes[0]


def test_ranks_without_collectives_go_by_steps() -> None:
    """Ranks 4 and 5 are in no group with the others."""
    truth = random_clocks(6, seed=11)
    clocks = fit(clock_tables(truth, [("a", range(4)), ("b", (4, 5))]))
    assert clocks.source == "collectives"
    assert worst_ns(clocks, truth, ranks=[0, 1, 2, 3]) < 25 * US
    assert worst_ns(clocks, truth, ranks=[4, 5]) < 25 * US  # by their own
    assert worst_ns(clocks, truth) < 100 * MS  # what their steps differ by
    assert any("2 ranks share no collective" in note for note in clocks.notes)


def test_table_for_queries() -> None:
    """What SQL makes of table `clocks` is what `align` says."""
    truth = random_clocks(4, seed=12)
    connection = clock_tables(truth, [("all", range(4))])
    clocks = fit(connection)
    write_table(connection, clocks)
    rows = connection.execute(
        """SELECT s.rank, start_ns, start_ns - (offset_ns + drift * (start_ns - reference_ns))::BIGINT AS aligned
        FROM spans s JOIN clocks c ON c.rank = s.rank"""
    ).fetchnumpy()
    assert len(rows["rank"]) == 800
    assert np.abs(rows["aligned"] - align(clocks, rows["rank"], rows["start_ns"])).max() <= 1000  # 2**60 / 2**52


def test_thousands_of_ranks() -> None:
    """How long it takes is told by benchmarks/ranks_scale.py."""
    truth = random_clocks(2048, seed=13)
    groups = [(f"stage {stage}", range(stage, 2048, 4)) for stage in range(4)]
    groups += [(f"pipeline {first}", range(first, first + 4)) for first in range(0, 64, 4)]
    connection = clock_tables(truth, groups, steps=40)
    clocks = fit(connection)
    assert worst_ns(clocks, truth, until=40 * S, ranks=list(range(0, 2048, 37))) < 100 * US
