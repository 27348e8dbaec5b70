"""Verdicts on simulated jobs whose truth is the same job without the cause: files in, a name and milliseconds out."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("duckdb")
pytest.importorskip("pyarrow")

from rank_causes import KINDS

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from rank_verdicts import LARGE, Judged, in_words, judge

# A job of each kind, of 4 to 16 ranks and 24 to 40 steps, with clocks, cut and missing files as its seed has them.
JOBS = {
    "phase": 8018,
    "rank": 8018,
    "host": 8004,
    "tied": 8032,
    "half": 8011,
    "layer of a rank": 8004,
    "layer": 8004,
    "stage": 8017,
    "data of a rank": 8018,
    "data": 8018,
    "gc": 8027,
    "save": 8004,
    "background save": 8004,
    "link": 8034,
    "group": 8012,
    "uneven work": 8018,
}
WITHOUT_A_CAUSE = (8003, 8004, 8012, 8013, 8014, 8017, 8018)


def told(job: Judged) -> str:
    causes = " + ".join(in_words(each, job.truth.step_ms) for each in job.truth.causes)
    return f"{job.what}: {causes or 'no cause'}; said: {job.said.sentence}"


@pytest.mark.parametrize(("kind", "seed"), JOBS.items(), ids=list(JOBS))
def test_the_cause_is_named_with_what_it_costs(kind: str, seed: int) -> None:
    job = judge(seed, {"kind": kind, "causes": 1, "ranks": 16 if kind == "tied" else 8}, "csv")
    assert job.outcome == "right" and job.gain_is_right, told(job)
    assert job.share > LARGE


def test_each_kind_of_cause_has_a_job() -> None:
    """But for a rank that was not recorded: what it costs is not to be had."""
    assert {*JOBS, "unrecorded rank"} == set(KINDS)


@pytest.mark.parametrize("seed", WITHOUT_A_CAUSE)
def test_without_a_cause_nobody_is_named(seed: int) -> None:
    job = judge(seed, {"causes": 0, "ranks": 8}, "csv")
    assert job.outcome == "nothing", told(job)


# Up to three causes, in jobs that show one of them as another where it is looked at in one way alone.
HARD = {
    14: "two causes of nearly one gain",
    27: "forward and backward of a layer in rows of one name",
    33: "a layer on all, in some steps",
    54: "a layer of a rank, in more than half of the steps",
    55: "a save in the background beside uneven work",
    215: "several ranks in some steps each",
    232: "one group, in more than half of the steps",
    252: "uneven work of two replicas",
    283: "steps of different lengths",
    329: "a link whose other end is cut",
    354: "launches beside small communications",
    402: "a host of several stages",
    430: "ranks as slow by other kinds",
    598: "a layer of a rank where half of all are slow in some steps",
    882: "a rank with more tokens",
    901: "a save in the background that laps over the edges of steps",
}


@pytest.mark.full
@pytest.mark.parametrize("seed", HARD, ids=list(HARD.values()))
def test_hard_jobs(seed: int) -> None:
    job = judge(seed, {}, None)
    assert job.outcome in ("right", "cannot tell") and (job.outcome == "right" or "launches" in job.what), told(job)


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "seed"),
    [("uneven work", 308), ("uneven work", 316), ("uneven work", 345), ("data", 300), ("data", 309)],
)
def test_what_is_another_rank_in_each_step_or_all_ranks_costs(kind: str, seed: int) -> None:
    job = judge(seed, {"kind": kind, "causes": 1}, None)
    assert job.outcome == "right" and job.gain_is_right, told(job)


@pytest.mark.full
@pytest.mark.parametrize("seed", [292, 305])
def test_what_a_slow_stage_and_a_slow_link_of_a_pipeline_cost(seed: int) -> None:
    """What is sent is queued behind what was sent before."""
    job = judge(seed, {}, None)
    assert job.outcome == "right" and job.gain_is_right, told(job)


@pytest.mark.full
@pytest.mark.parametrize("first", [9000, 9050])
def test_of_a_hundred_jobs_nearly_all_are_right(first: int) -> None:
    """Up to three causes of any kind, recorded in any way; in two halves, which run side by side."""
    jobs = [judge(seed, {"ranks": 8}, None) for seed in range(first, first + 50)]
    large = [job for job in jobs if job.share >= LARGE and job.outcome != "cannot tell"]
    wrong = [job for job in large if job.outcome != "right"]
    assert len(large) > 20
    assert len(wrong) <= 0.05 * len(large), "\n".join(map(told, wrong))
    assert [told(job) for job in jobs if not job.truth.causes and job.outcome == "wrong"] == []
