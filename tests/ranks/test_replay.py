"""What the paper asks of a job, against answers by hand, the published one, and schedules played another way."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest

from pipeline_jobs import Job, Length, Op, makespan, play, span_rows, write_table
from profiler_wrapper.ranks.load import load_ranks
from profiler_wrapper.ranks.model import Replay
from profiler_wrapper.ranks.report import RanksReport
from shared_traces import TRACES

pytest.importorskip("duckdb")
pyarrow = pytest.importorskip("pyarrow")

MS = 1_000_000
SMALL_JOB = Path(__file__).parents[1] / "data" / "slow_last_stage.csv"
PUBLISHED = TRACES.parent / "stragglers"


def replayed(report: RanksReport) -> Replay:
    assert report.replay is not None, report.replay_unknown
    return report.replay


def replay_of(path: Path, job: Job, lengths: list[Length]) -> Replay:
    return replayed(load_ranks(write_table(path / "spans.parquet", job, span_rows(job, lengths))))


def table(**ms: float) -> Length:
    """Lengths by name ("forward_compute", or with the stage at its end), in ms; 0 where not given."""

    def length(op: Op) -> float:
        name = op.name.replace("-", "_")
        return ms.get(f"{name}_{op.stage}", ms.get(name, 0.0))

    return length


def test_slow_stage_by_hand(tmp_path: Path) -> None:
    """Two stages, two microbatches, the second stage takes twice as long.

    Recorded: stage 1 F 10-30, B 30-70, F 70-90, B 90-130; stage 0 ends with B 130-150.
    Typical F 15, B 30: stage 1 F 15-30, B 30-60, F 60-75, B 75-105; stage 0 ends with B 105-135.
    Stage 1 typical: its B ends at 100, stage 0 ends at 120. Only stage 1 slow: its B ends at 135, stage 0 at 165.
    """
    slow = table(forward_compute_0=10, forward_compute_1=20, backward_compute_0=20, backward_compute_1=40)
    found = replay_of(tmp_path, Job(), [slow] * 3)
    assert (found.total_ns, found.ideal_ns, found.steps) == (3 * 150 * MS, 3 * 135 * MS, 3)
    assert found.slowdown == 150 / 135
    assert found.ms == pytest.approx((150 - 120) / (150 - 135))
    assert list(found.share_of_stage) == pytest.approx([(150 - 165) / 15, 2.0])  # stage 0 is quicker than typical


def test_one_slow_worker_of_four_by_hand(tmp_path: Path) -> None:
    """No pipeline: forward 10 ms, of one rank 40, backward 20, gradients 5, clip 2, optimizer 3.

    Recorded 40 + 30. Typical forward 17.5: 47.5. Only that rank slow: 70; only another one: it waits for 17.5.
    """

    def length(op: Op) -> float:
        slow = 40 if op.replica == 2 else 10
        others = {"backward-compute": 20, "grads-reduce-scatter": 5, "optimizer-clip-main-grad": 2, "optimizer": 3}
        return slow if op.name == "forward-compute" else others[op.name]

    found = replay_of(tmp_path, Job(stages=1, microbatches=1, replicas=4), [length] * 3)
    assert (found.total_ns, found.ideal_ns) == (3 * 70 * MS, 3 * 47.5 * MS)
    assert (found.mw, found.slowest_ranks) == (1.0, (2,))
    assert list(found.share_of_rank) == [0, 0, 1, 0]
    assert found.notes == ("with one stage, its share is all by definition",)


def test_slow_send_by_hand(tmp_path: Path) -> None:
    """Every transfer takes 1 ms, but that of the first microbatch's activations 31: all that follows is 30 late.

    Forward 10, backward 20. Stage 1: F0 41-51, B0 51-71, F1 71-81, B1 81-101; stage 0: B0 72-92, F2 92-102; stage 1:
    F2 103-113, B2 113-133; stage 0: B2 134-154. Typical (the median of three transfers): all of it 30 earlier.
    """

    def length(op: Op) -> float:
        if op.name.endswith(("send", "recv")):
            return 31 if op.name.startswith("forward") and op.microbatch == 0 else 1
        return {"forward-compute": 10, "backward-compute": 20}.get(op.name, 0)

    found = replay_of(tmp_path, Job(microbatches=3), [length] * 3)
    assert (found.total_ns, found.ideal_ns) == (3 * 154 * MS, 3 * 124 * MS)
    assert found.ms == pytest.approx(1.0)  # the last stage has the receives


JOBS = {
    "two stages": Job(replicas=2),
    "1F1B": Job(stages=4, microbatches=8, replicas=3),
    "fewer microbatches than stages": Job(stages=4, microbatches=2, replicas=2),
    "interleaved": Job(stages=4, chunks=2, microbatches=8, replicas=2),
    "no pipeline": Job(stages=1, microbatches=3, replicas=5),
}
BASE_MS = {"forward-compute": 10.0, "backward-compute": 20.0, "optimizer": 6.0}
MOVE_MS = {"grads-reduce-scatter": 4.0, "optimizer-clip-main-grad": 0.5}


def drawn(job: Job, seed: int) -> Length:
    """Every operation of a step its own time, the last stage longer; what moves data always takes the same."""
    draw = random.Random(seed)
    times: dict[Op, float] = {}

    def length(op: Op) -> float:
        if op.name not in BASE_MS:
            return MOVE_MS.get(op.name, 0.5)
        if op not in times:
            slow = 1.5 if op.stage == job.stages - 1 and "compute" in op.name else 1.0
            times[op] = round(BASE_MS[op.name] * (1 + draw.random()) * slow, 6)
        return times[op]

    return length


@pytest.mark.parametrize("name", JOBS)
def test_any_schedule(name: str, tmp_path: Path) -> None:
    """T, T ideal and T without a stage or a rank are those of the job played with these lengths.

    To 1 % of T: all ranks are played to begin a step together, which in the table is time between steps.
    """
    job = JOBS[name]
    lengths = [drawn(job, seed) for seed in range(3)]
    usual = {
        one: fmean(length(op) for length in lengths for op in play(job, length) if op.name == one) for one in BASE_MS
    }

    def time(keep: Callable[[Op], bool]) -> float:
        def kept(length: Length) -> Length:
            return lambda op: length(op) if keep(op) or op.name not in BASE_MS else usual[op.name]

        return sum(makespan(job, kept(length)) for length in lengths)

    found = replay_of(tmp_path, job, lengths)
    total, ideal = time(lambda op: True), time(lambda op: False)
    lost = total - ideal
    near = 0.01 * total / lost
    assert found.total_ns == pytest.approx(total * MS, rel=1e-6)
    assert found.ideal_ns == pytest.approx(ideal * MS, rel=0.01)
    stages = [(total - time(lambda op, at=at: op.stage != at)) / lost for at in range(job.stages)]  # type: ignore[misc]
    assert list(found.share_of_stage) == pytest.approx(stages, abs=near)
    ranks = [divmod(rank, job.stages) for rank in range(job.stages * job.replicas)]
    shares = [(total - time(lambda op, at=at: op[1:3] != at)) / lost for at in ranks]  # type: ignore[misc]
    known = np.isfinite(found.share_of_rank)
    assert list(found.share_of_rank[known]) == pytest.approx(np.array(shares)[known], abs=near)
    assert found.mw == pytest.approx(shares[found.slowest_ranks[0]], abs=near)


def test_what_is_typical_already_stays_as_it_is(tmp_path: Path) -> None:
    """Where each kind always takes the same, T is T ideal and nothing is lost."""
    same = table(forward_compute=10, backward_compute=20, forward_send=1, forward_recv=1)
    found = replay_of(tmp_path, JOBS["interleaved"], [same] * 3)
    assert found.total_ns == pytest.approx(found.ideal_ns)
    assert found.slowdown == pytest.approx(1.0)
    assert np.isnan([found.ms, found.mw, *found.share_of_stage]).all()


def test_ranks_beyond_the_slowest_have_no_share(tmp_path: Path) -> None:
    job = Job(stages=1, microbatches=1, replicas=20)
    found = replay_of(tmp_path, job, [lambda op: 40.0 if op[:2] == ("forward-compute", 7) else 10.0] * 3)
    assert (found.slowest_ranks, found.mw) == ((7,), pytest.approx(1.0))
    assert np.isfinite(found.share_of_rank).sum() == 16
    assert "shares of the lost time are of the 16 slowest ranks of 20" in found.notes


def test_why_there_is_none(tmp_path: Path) -> None:
    job = Job(stages=1, replicas=2)
    rows = span_rows(job, [table(forward_compute=10, backward_compute=5)] * 3)

    def reason(*without: str, ranks: int = 2) -> str | None:
        kept = [row for row in rows if row[3] not in without and row[0] < ranks]
        return load_ranks(write_table(tmp_path / "spans.parquet", job, kept)).replay_unknown

    assert reason() is None
    assert reason(ranks=1) == "one rank alone waits for no other"
    assert reason("communication") == (
        "no communication of several ranks is in the table: what ranks wait for is not known"
    )
    assert reason("forward", "backward") == "no forward or backward is in the table"


def test_small_job_by_hand() -> None:
    """Two replicas of two stages, the second twice as slow; transfers 1 ms, embedding 3, gradients 4, clip 2, end 6.

    Recorded: stage 1 F 11-31, B 31-71, F 71-91, B 91-131; stage 0 B 132-152, then 3 + 4 + 2 + 6 ms: 167.
    Typical, F 15 and B 30: stage 1 F 16-31, B 31-61, F 61-76, B 76-106, stage 0 B 107-137: 152.
    Last stage typical: stage 1 F 11-26, B 26-56, F 56-71, B 71-101, stage 0 B 102-122: 137.
    No single worker is to blame: the other replica's last stage is as slow.
    """
    found = replayed(load_ranks(SMALL_JOB))
    assert (found.total_ns, found.ideal_ns) == (2 * 167 * MS, 2 * 152 * MS)
    assert found.ms == pytest.approx((167 - 137) / (167 - 152))
    assert (found.mw, found.slowest_ranks[0] % 2) == (0.0, 1)


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason=f"no published straggler job at {PUBLISHED}")
def test_published_job() -> None:
    """The paper's authors replay by other dependencies, and without what lies between operations: 1 % of a step."""
    report = load_ranks(PUBLISHED / "trace-ST.parquet")
    found = replayed(report)
    stage, worker = (json.loads((PUBLISHED / f"{name}-ST.json").read_text()) for name in ("ms", "mw"))
    assert found.steps == 32
    assert found.ms == pytest.approx(stage["Ms"], abs=0.02)
    assert found.mw == pytest.approx(worker["Mw"], abs=0.002)
    assert found.slowdown == pytest.approx(stage["tori"] / stage["tideal"], rel=0.005)
    assert found.share_of_stage.argmax() == 3
    assert (report.verdict.verdict, report.verdict.stage) == ("stage", 3)
