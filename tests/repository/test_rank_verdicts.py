"""`benchmarks/rank_verdicts.py`: when a verdict counts as the cause that was planted."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rank_causes import KINDS, Job, make_job

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from rank_verdicts import Named, is_named, named


def job_with(kind: str) -> Job:
    return make_job(3, kind=kind, causes=1, ranks=32)


def right(job: Job) -> Named:
    """A verdict that says all of the first cause."""
    cause = job.truth.causes[0]
    about = {name: getattr(cause, name) for name in ("host", "stage", "layer", "phase", "group")}
    return Named(kind=cause.kind, ranks=frozenset(cause.ranks), gain_ms=cause.gain_ms, **about)


@pytest.mark.parametrize("kind", KINDS)
def test_the_planted_cause_is_right_and_nothing_is_not(kind: str) -> None:
    job = job_with(kind)
    (cause,) = job.truth.causes
    assert is_named(cause, right(job), job, has_tokens=True)
    assert not is_named(cause, Named(kind="nothing"), job, has_tokens=True)


@pytest.mark.parametrize("kind", KINDS)
def test_no_other_cause_is_right(kind: str) -> None:
    job = job_with(kind)
    (cause,) = job.truth.causes
    other = next(rank for rank in range(job.shape.ranks) if rank not in cause.ranks)
    wrong = [
        Named(kind="phase", ranks=frozenset({other}), phase="forward"),
        Named(kind="gc" if kind != "gc" else "save"),
    ]
    said = right(job)
    if kind in ("phase", "rank", "tied", "stage", "layer of a rank", "data of a rank"):
        wrong.append(replace(said, ranks=frozenset({*cause.ranks, other})))
        wrong.append(replace(said, ranks=frozenset({other})))
    if kind in ("layer", "layer of a rank"):
        wrong.append(replace(said, layer="model.layers.99"))
    if kind == "phase":
        wrong.append(replace(said, phase="data"))
    if kind in ("rank", "tied", "half"):
        wrong.append(replace(said, phase="optimizer"))
    if kind in ("link", "group"):
        wrong.append(replace(said, ranks=frozenset({other}), group="another"))
    assert not any(is_named(cause, each, job, has_tokens=True) for each in wrong)


def test_a_host_or_a_stage_is_all_its_ranks() -> None:
    job = job_with("host")
    (cause,) = job.truth.causes
    assert is_named(cause, Named(kind="host", host=cause.host), job, has_tokens=True)
    assert not is_named(cause, Named(kind="rank", ranks=frozenset(cause.ranks[:1])), job, has_tokens=True)
    job = job_with("stage")
    (cause,) = job.truth.causes
    assert is_named(cause, Named(kind="stage", stage=cause.stage), job, has_tokens=True)


def test_who_always_has_more_to_do_may_be_called_slow_where_that_is_not_known() -> None:
    job = next(one for seed in range(30) if (one := make_job(seed, kind="uneven work", causes=1)).truth.causes[0].ranks)
    (cause,) = job.truth.causes
    said = Named(kind="rank", ranks=frozenset(cause.ranks))
    assert is_named(cause, said, job, has_tokens=False)
    assert not is_named(cause, said, job, has_tokens=True)


def test_a_report_is_read_by_its_keys() -> None:
    report = {
        "verdict": "rank",
        "cause": "backward",
        "rank": 3,
        "stage": 0,
        "layer": None,
        "lost_ms_per_step": 2.5,
        "confidence": "high",
        "sentence": "Rank 3 is the straggler.",
    }
    said = named(report)
    assert (said.kind, said.ranks, said.phase, said.gain_ms, said.unsure) == ("phase", {3}, "backward", 2.5, False)
    assert named({**report, "confidence": "low"}).unsure
    assert named({**report, "cause": "compute"}).phase is None
    assert named({**report, "verdict": "none", "cause": "none", "rank": None}).kind == "nothing"
