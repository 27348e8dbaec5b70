"""`rank_jobs` and what is made of it: jobs whose times are known by hand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import duckdb
import numpy as np
import pytest

import pipeline_jobs
from rank_causes import KINDS, Cause, Change, Job, Planted, make_job
from rank_job_files import make_recording, plain_recording, spans, write
from rank_jobs import MAIN, Noise, Operation, Program, draw, play
from rank_layouts import LAYOUTS, Shape, build

QUIET = Noise(of_an_operation=0.0, of_a_rank=0.0, of_a_step=0.0)


def job_of(shape: Shape, *, steps: int = 2, lengths: Mapping[str, float] = {}, transfers: float = 1.0) -> Job:
    """A job without noise in which operations of those names or kinds take so long, and all others nothing."""
    program = build(shape)
    drawn, met = draw(program, steps, QUIET, np.random.default_rng(0))
    for number, operation in enumerate(program.operations):
        drawn[number][:] = lengths.get(operation.name, lengths.get(operation.kind, 0.0))
    for values in met:
        values[:] = transfers
    return Job(shape=shape, program=program, steps=steps, lengths=drawn, transfers=met)


def times(job: Job, name: str, rank: int = 0, *, microbatch: int = -1, step: int = 0) -> list[tuple[float, float]]:
    """(begin, end) of all operations of that name or kind in a step of a rank."""
    found = []
    for number, operation in enumerate(job.program.operations):
        ranks = job.program.roles[operation.role].tolist()
        if name in (operation.name, operation.kind) and operation.microbatch == microbatch and rank in ranks:
            place = step, ranks.index(rank)
            found.append((float(job.played.begin[number][place]), float(job.played.end[number][place])))
    return found


def slower(kind: str, ranks: list[int], milliseconds: float, job: Job) -> Cause:
    """Milliseconds more in each operation of that kind."""
    amount = np.zeros((job.steps, job.shape.ranks))
    amount[:, ranks] = 1

    def touches(operation: Operation) -> bool:
        return operation.kind == kind

    return Cause(
        planted=Planted(kind="phase", ranks=tuple(ranks)), changes=(Change(touches, amount, 0.0, milliseconds),)
    )


# --- the engine ---


def test_two_ranks_meet_when_the_last_one_has_come() -> None:
    program = Program([np.arange(2)])
    program.add(0, "forward", "forward")
    program.collective([0], "all_reduce", {"world": [0, 1]}, 5.0)
    played = play(program, [np.array([[[10.0, 30.0], [20.0, 10.0]]]), np.zeros((1, 2, 2))], [np.full((1, 2, 1), 5.0)])
    assert played.begin[1].tolist() == [[10, 30], [55, 45]]
    assert played.end[1].tolist() == [[35, 35], [60, 60]]
    assert played.step_ms.tolist() == [30]


def test_groups_of_one_meeting_do_not_wait_for_one_another() -> None:
    program = Program([np.arange(4)])
    program.add(0, "forward", "forward")
    program.collective([0], "all_reduce", {"even": [0, 2], "odd": [1, 3]}, 5.0)
    lengths = [np.array([[[10.0, 20.0, 30.0, 40.0]]]), np.zeros((1, 1, 4))]
    assert play(program, lengths, [np.array([[[5.0, 7.0]]])]).end[1].tolist() == [[35, 47, 35, 47]]


def test_a_schedule_that_waits_for_itself_is_an_error() -> None:
    program = Program([np.arange(1), np.arange(1, 2)])
    first = [program.add(role, name, "communication") for role, name in ((0, "one"), (0, "other"))]
    second = [program.add(role, name, "communication") for role, name in ((1, "other"), (1, "one"))]
    for members in zip(first, reversed(second), strict=True):
        program.meet(members, {"both": [0, 1]}, 1.0, "send and receive")
    with pytest.raises(ValueError, match="deadlock"):
        program.order  # noqa: B018


def test_one_forward_one_backward_by_hand() -> None:
    """Two stages, two microbatches: forward 10, backward 20, a transfer 1, the norm of gradients 1, optimizer 5."""
    shape = Shape(layout="pipeline", replicas=1, stages=2, microbatches=2)
    job = job_of(shape, lengths={"forward-compute": 10, "backward-compute": 20, "optimizer": 5})
    assert [times(job, "forward-compute", 0, microbatch=each) for each in (0, 1)] == [[(0, 10)], [(10, 20)]]
    assert [times(job, "forward-compute", 1, microbatch=each) for each in (0, 1)] == [[(11, 21)], [(41, 51)]]
    assert [times(job, "backward-compute", 1, microbatch=each) for each in (0, 1)] == [[(21, 41)], [(51, 71)]]
    assert [times(job, "backward-compute", 0, microbatch=each) for each in (0, 1)] == [[(42, 62)], [(72, 92)]]
    # The receive is posted when the one before it was computed with, and its transfer begins then.
    assert times(job, "forward-send", 0, microbatch=1) == [(20, 22)]
    assert times(job, "forward-recv", 1, microbatch=1) == [(21, 22)]
    assert times(job, "optimizer-clip-main-grad", 1) == [(71, 93)]
    assert job.truth.step_ms == 98


@pytest.mark.parametrize(("stages", "chunks", "microbatches"), [(4, 1, 8), (2, 2, 4), (4, 2, 8)])
def test_pipelines_are_as_recursion_has_them(stages: int, chunks: int, microbatches: int) -> None:
    """Forward 10, backward 20, a transfer 1; `pipeline_jobs` finds the times of each by recursion."""
    plan = pipeline_jobs.Job(stages=stages, chunks=chunks, microbatches=microbatches)
    lengths = {"forward-compute": 10.0, "backward-compute": 20.0}
    played = pipeline_jobs.play(plan, lambda op: lengths.get(op.name, 1.0 if op.name[-4:] in ("send", "recv") else 0.0))
    shape = Shape(layout="pipeline", replicas=1, stages=stages, chunks=chunks, microbatches=microbatches)
    job = job_of(shape, lengths=lengths)
    for number, operation in enumerate(job.program.operations):
        if operation.microbatch >= 0:
            chunk = operation.chunk if chunks > 1 else 0
            op = pipeline_jobs.Op(operation.name, 0, operation.role, operation.microbatch, chunk)
            assert played[op] == (job.played.begin[number][0, 0], job.played.end[number][0, 0])


@pytest.mark.parametrize(("transfer", "step_ms"), [(15, 80), (25, 95)])
def test_a_bucket_is_hidden_as_far_as_the_backward_beside_it_lasts(transfer: float, step_ms: float) -> None:
    """Two layers: forward 10 each, backward 20 each, optimizer 5. The last bucket has nothing beside it."""
    job = job_of(
        Shape(layout="ddp", replicas=2, layers=2),
        lengths={"forward": 10, "backward": 20, "optimizer": 5},
        transfers=transfer,
    )
    assert times(job, "all_reduce")[0] == (40, 40 + transfer)
    assert times(job, "backward")[-1] == (40, 60)  # which waits for no bucket
    assert job.truth.step_ms == step_ms


def test_gathers_run_ahead_as_far_as_they_may() -> None:
    """Four layers of 10, gathers of 2: the third one waits until the first layer is computed."""
    shape = Shape(layout="fsdp", replicas=2, layers=4, prefetch=2)
    job = job_of(shape, lengths={"forward": 10}, transfers=2)
    assert times(job, "all_gather")[:4] == [(0, 2), (2, 4), (12, 14), (22, 24)]
    assert times(job, "forward") == [(2, 12), (12, 22), (22, 32), (32, 42)]


# --- causes ---


def test_of_two_ranks_that_are_slow_at_one_meeting_the_slower_one_alone_costs() -> None:
    job = job_of(Shape(layout="data", replicas=4, layers=1), lengths={"forward": 20, "backward": 40}, steps=5)
    job.causes = slower("forward", [1], 30, job), slower("backward", [2], 45, job)
    assert [cause.gain_ms for cause in job.truth.causes] == [0, 15]
    assert job.truth.largest == job.truth.causes[1]


def test_a_slow_rank_costs_what_it_is_slower_than_the_second_slowest() -> None:
    shape = Shape(layout="data", replicas=8, layers=2)
    program = build(shape)
    lengths, transfers = draw(program, 40, Noise(of_an_operation=0.05), np.random.default_rng(3))
    job = Job(shape=shape, program=program, steps=40, lengths=lengths, transfers=transfers)
    job.causes = (slower("forward", [5], 12.5, job),)
    met = next(iter(program.meeting_of))
    before, behind = np.sum(lengths[:met], axis=0), np.sum(lengths[met + 1 :], axis=0)

    def mean_ms(extra: float) -> float:
        now = np.zeros(8)
        for step in range(40):
            own = before[step] + 2 * extra * (np.arange(8) == 5)
            now = (now + own).max() + transfers[0][step] + behind[step]
        return float(now.max()) / 40

    assert job.truth.causes[0].gain_ms == pytest.approx(mean_ms(12.5) - mean_ms(0))


def test_without_its_causes_a_job_is_the_one_that_was_drawn() -> None:
    job = make_job(5, kind="rank", layout="fsdp", causes=1)
    plain = play(job.program, [each[None] for each in job.lengths], [each[None] for each in job.transfers])
    assert job.played.step_ms[1] == plain.step_ms[0]


def test_what_one_phase_has_of_a_slow_rank_is_known() -> None:
    """A rank that is slower by a half: forward 20, backward 40, optimizer 5."""
    lengths = {"forward": 20, "backward": 40, "optimizer": 5}
    job = job_of(Shape(layout="data", replicas=4, layers=1), lengths=lengths, steps=5)
    drawn = make_job(0, kind="rank", layout="data", causes=1).causes[0].changes[0]
    amount = np.tile(np.arange(4) == 2, (5, 1)).astype(float)
    job.causes = (Cause(planted=Planted(kind="rank", ranks=(2,)), changes=(drawn._replace(amount=amount, more=0.5),)),)
    (cause,) = job.truth.causes
    assert cause.gain_ms == 32.5 and cause.phases_ms == {"forward": 10, "backward": 20, "optimizer": 2.5}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_cause_costs_time(kind: str) -> None:
    found = [make_job(seed, kind=kind, causes=1, ranks=8).truth for seed in range(6)]
    assert {truth.causes[0].kind for truth in found} == {kind}
    assert max(truth.causes[0].gain_ms / truth.step_ms for truth in found) > 0.02
    assert min(truth.causes[0].gain_ms for truth in found) > -0.01


# --- what is recorded ---


@pytest.mark.parametrize("layout", LAYOUTS)
def test_spans_of_a_line_follow_one_another_and_make_up_the_step(layout: str) -> None:
    job = make_job(7, layout=layout, ranks=8, causes=2)
    table = spans(job, plain_recording(job))
    with duckdb.connect() as database:
        database.register("spans", table)
        overlapping = database.execute(
            """SELECT count(*) FILTER (start_ns < before_ns), count(*) FROM (
                SELECT start_ns, lag(start_ns + duration_ns) OVER (PARTITION BY rank, thread, kind = 'step', depth
                    ORDER BY start_ns, duration_ns) AS before_ns FROM spans)"""
        ).fetchone()
        steps = database.execute(
            """SELECT max(end_ns) - min(start_ns) - sum(duration_ns), min(least_ns), max(outside) FROM (
                SELECT rank, start_ns, start_ns + duration_ns AS end_ns, duration_ns, duration_ns - (
                    SELECT sum(duration_ns) FROM spans i WHERE i.rank = o.rank AND i.step = o.step
                    AND i.thread = 1 AND i.depth = 0 AND i.kind <> 'step') AS least_ns, (
                    SELECT count(*) FROM spans i WHERE i.rank = o.rank AND i.step = o.step AND i.thread = 1
                    AND (i.start_ns < o.start_ns OR i.start_ns + i.duration_ns > o.start_ns + o.duration_ns)) AS outside
                FROM spans o WHERE kind = 'step') GROUP BY rank"""
        ).fetchall()
    assert overlapping is not None and overlapping[0] == 0 and overlapping[1] == len(table)
    assert all(gap == 0 and least >= 0 and outside == 0 for gap, least, outside in steps)


def test_all_writers_tell_the_same_times(tmp_path: Path) -> None:
    job = make_job(3, layout="tensor", ranks=8, causes=1, kind="phase")
    sums = {}
    for way, files in (
        ("csv", "spans.csv"),
        ("parquet", "spans.parquet"),
        ("jsonl", "spans.jsonl"),
        ("timers", "run/timers/*.jsonl"),
    ):
        write(job, plain_recording(job, way), tmp_path / way)
        sums[way] = duckdb.sql(
            f"""SELECT rank, kind, "group", count(*), sum(duration_ns)::BIGINT, min(start_ns), max(sequence)
            FROM '{tmp_path / way / files}' WHERE rank IS NOT NULL GROUP BY ALL ORDER BY ALL"""
        ).fetchall()
    assert len(sums["csv"]) > 8 * 4
    assert all(each == sums["csv"] for each in sums.values())


def test_on_a_device_the_main_thread_is_ahead_and_waits_in_the_optimizer() -> None:
    job = job_of(Shape(layout="data", replicas=2, layers=1), lengths={"forward": 20, "backward": 40, "optimizer": 5})
    job.causes = (slower("backward", [1], 30, job),)
    with duckdb.connect() as database:
        database.register("spans", spans(job, plain_recording(job, "events")))
        rows = database.execute(
            """SELECT rank, kind, duration_ns / 1e6, device_ns / 1e6 FROM spans
            WHERE step = 0 AND depth = 0 ORDER BY rank, start_ns, duration_ns"""
        ).fetchall()
    of_rank = {rank: {kind: (cpu, device) for at, kind, cpu, device in rows if at == rank} for rank in (0, 1)}
    assert of_rank[0]["forward"] == of_rank[1]["forward"] == (3, 20)
    assert [of_rank[rank]["backward"] for rank in (0, 1)] == [(6, 40), (6, 70)]
    assert [of_rank[rank]["communication"][1] for rank in (0, 1)] == [31, 1]
    assert all(of_rank[rank]["optimizer"][1] == 5 for rank in (0, 1))
    assert all(sum(cpu for cpu, _ in of_rank[rank].values()) == pytest.approx(2 * 96) for rank in (0, 1))


def test_files_lack_what_was_not_recorded(tmp_path: Path) -> None:
    job = make_job(1, layout="data", ranks=8, causes=1, kind="unrecorded rank")
    (missing,) = job.unrecorded
    recording = make_recording(job, 1, "timers")
    recording.steps[(missing + 1) % 8] = 6
    write(job, recording, tmp_path)
    logs = {path.name: path.read_text() for path in (tmp_path / "run" / "timers").iterdir()}
    assert f"timer_rank{missing}.jsonl" not in logs
    cut = logs[f"timer_rank{(missing + 1) % 8}.jsonl"]
    assert cut.count('"header"') == 1 and '"step":5,' in cut and '"step":6,' not in cut


def test_each_clock_goes_its_own_way() -> None:
    job = job_of(Shape(layout="data", replicas=2, layers=1), lengths={"forward": 20}, steps=4)
    recording = plain_recording(job)
    recording.offset_ns[1], recording.jump_ns[2, 1] = 5e6, 40e6
    with duckdb.connect() as database:
        database.register("spans", spans(job, recording))
        rows = database.execute(
            """SELECT (b.start_ns - a.start_ns) / 1e6, b.duration_ns = a.duration_ns FROM spans a JOIN spans b
            USING (step, name) WHERE a.rank = 0 AND b.rank = 1 AND a.kind = 'forward' AND a.depth = 0 ORDER BY step"""
        ).fetchall()
    assert rows == [(5, True), (5, True), (45, True), (5, True)]


def test_a_seed_makes_one_job() -> None:
    one, other = (make_job(11) for _ in range(2))
    assert one.truth == other.truth and one.shape == other.shape
    assert spans(one, make_recording(one, 11)) == spans(other, make_recording(other, 11))


def test_a_line_in_the_background_holds_nobody() -> None:
    job = make_job(2, kind="background save", layout="data", causes=1)
    lines = {each.line for each in job.program.operations if each.name == "save_in_background"}
    assert lines == {"background"} != {MAIN}
    alone = job.causes[0].changes[0]
    job.causes = (Cause(planted=job.causes[0].planted, changes=(alone,)),)
    assert job.truth.causes[0].gain_ms == 0
