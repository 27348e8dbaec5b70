"""The what-if replay against answers derived by hand and against schedules played another way."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import pytest

from pipeline_jobs import Job, Length, Op, connect, job_tables, makespan, span_rows
from profiler_wrapper.ranks.model import Replay
from profiler_wrapper.ranks.replay import what_if
from shared_traces import TRACES
from straggler_tables import SMALL_JOB, read_job

pytest.importorskip("duckdb")
pytest.importorskip("pandas")

MS = 1_000_000


def found(connection: object, **options: int) -> Replay:
    answer = what_if(connection, **options)  # type: ignore[arg-type]
    assert isinstance(answer, Replay), answer
    return answer


def table(**ms: float) -> Length:
    """Lengths by name ("forward_compute", or with the stage at its end), in ms; 0 where not given."""

    def length(op: Op) -> float:
        name = op.name.replace("-", "_")
        return ms.get(f"{name}_{op.stage}", ms.get(name, 0.0))

    return length


# ---- by hand

SLOW_LAST_STAGE = table(forward_compute_0=10, forward_compute_1=20, backward_compute_0=20, backward_compute_1=40)


def test_slow_stage_by_hand() -> None:
    """Two stages, two microbatches, the second stage takes twice as long.

    Recorded: stage 1 F 10-30, B 30-70, F 70-90, B 90-130; stage 0 ends with B 130-150.
    Typical F 15, B 30: stage 1 F 15-30, B 30-60, F 60-75, B 75-105; stage 0 ends with B 105-135.
    Stage 1 typical: its B ends at 100, stage 0 ends at 120. Only stage 1 slow: its B ends at 135, stage 0 at 165.
    """
    answer = found(job_tables(Job(), [SLOW_LAST_STAGE]))
    assert (answer.recorded_ns, answer.total_ns, answer.ideal_ns) == (150 * MS, 150 * MS, 135 * MS)
    assert answer.slowdown == 150 / 135
    assert answer.ms == (150 - 120) / (150 - 135)
    assert list(answer.share_of_stage) == [(150 - 165) / 15, 2.0]  # stage 0 is quicker than typical
    assert list(answer.slowdown_of_stage) == pytest.approx([120 / 135, 165 / 135])


def test_one_slow_worker_of_four_by_hand() -> None:
    """No pipeline: forward 10 ms, of one rank 40, backward 20, gradients 5, clip 2, optimizer 3.

    Recorded 40 + 30. Typical forward 17.5: 47.5. Only that rank slow: 70; only another one: it waits for 17.5.
    """

    def length(op: Op) -> float:
        slow = 40 if op.replica == 2 else 10
        return {
            "forward-compute": slow,
            "backward-compute": 20,
            "grads-reduce-scatter": 5,
            "optimizer-clip-main-grad": 2,
            "optimizer": 3,
        }[op.name]

    answer = found(job_tables(Job(stages=1, microbatches=1, replicas=4), [length] * 3))
    assert answer.steps == 3
    assert (answer.total_ns, answer.ideal_ns) == (3 * 70 * MS, 3 * 47.5 * MS)
    assert answer.mw == 1.0
    assert answer.slowest_ranks == (2,)
    assert answer.share_of_rank[2] == 1.0
    assert max(answer.share_of_rank[[0, 1, 3]]) == 0
    assert any("one stage" in note for note in answer.notes)


def test_send_and_receive_in_one_span_by_hand() -> None:
    """The pipeline with the slow stage as Megatron's functions batch its transfers: the same answers."""
    stages = [
        [("forward", 0, 10), ("send_forward", 10, 10), ("forward", 10, 20), ("send_forward_recv_backward", 20, 70)],
        [("recv_forward", 0, 10), ("forward", 10, 30), ("backward", 30, 70), ("send_backward_recv_forward", 70, 70)],
    ]
    stages[0] += [("backward", 70, 90), ("recv_backward", 90, 130), ("backward", 130, 150)]
    stages[1] += [("forward", 70, 90), ("backward", 90, 130), ("send_backward", 130, 130)]
    rows = [
        (stage, 0, name, name if "_" not in name else "communication", begin * MS, (end - begin) * MS, 0) + (None,) * 4
        for stage, spans in enumerate(stages)
        for name, begin, end in spans
    ]
    answer = found(connect(rows, [(0, 0, 0), (1, 1, 0)]))
    assert (answer.recorded_ns, answer.total_ns, answer.ideal_ns) == (150 * MS, 150 * MS, 135 * MS)
    assert list(answer.share_of_stage) == [(150 - 165) / 15, 2.0]


def test_slow_send_by_hand() -> None:
    """Every transfer takes 1 ms, but that of the first microbatch's activations 31: all that follows is 30 late.

    Forward 10, backward 20. Stage 1: F0 41-51, B0 51-71, F1 71-81, B1 81-101; stage 0: B0 72-92, F2 92-102; stage 1:
    F2 103-113, B2 113-133; stage 0: B2 134-154. Typical (the median of three transfers): all of it 30 earlier.
    """

    def length(op: Op) -> float:
        if op.name.endswith(("send", "recv")):
            return 31 if op.name.startswith("forward") and op.microbatch == 0 else 1
        return {"forward-compute": 10, "backward-compute": 20}.get(op.name, 0)

    answer = found(job_tables(Job(microbatches=3), [length]))
    assert (answer.total_ns, answer.ideal_ns) == (154 * MS, 124 * MS)
    assert answer.ms == 1.0  # the last stage has the receives


# ---- against schedules played another way

JOBS = {
    "two stages": Job(replicas=2),
    "1F1B": Job(stages=4, microbatches=8, replicas=3),
    "fewer microbatches than stages": Job(stages=4, microbatches=2, replicas=2),
    "interleaved": Job(stages=4, chunks=2, microbatches=8, replicas=2),
    "interleaved, idle transfers recorded": Job(stages=3, chunks=3, microbatches=6, replicas=2, idle_transfers=True),
    "slow network": Job(stages=4, microbatches=6, replicas=2),
    "no pipeline": Job(stages=1, microbatches=3, replicas=5),
}
BASE = {"forward-compute": 10.0, "backward-compute": 20.0, "grads-reduce-scatter": 4.0, "optimizer": 6.0}


def random_lengths(job: Job, seed: int, steps: int, transfer: float = 0.5) -> list[Length]:
    """Every operation its own time, the last stage and rank 0 longer."""
    draw = random.Random(seed)

    def of_step() -> Length:
        drawn: dict[Op, float] = {}

        def length(op: Op) -> float:
            if op not in drawn:
                slow = 1.5 if op.stage == job.stages - 1 and "compute" in op.name else 1.0
                drawn[op] = round(BASE.get(op.name, transfer) * (1 + draw.random()) * slow, 6)
            return drawn[op]

        return length

    return [of_step() for _ in range(steps)]


def typical(job: Job, lengths: list[Length]) -> dict[str, float]:
    """Mean of what computes, median of what moves data, from the lengths themselves."""
    import statistics

    from pipeline_jobs import play

    values: dict[str, list[float]] = {}
    for length in lengths:
        for op in play(job, length):
            values.setdefault(op.name, []).append(length(op))
    moves = ("send", "recv", "scatter", "grad")
    return {
        name: (statistics.median if name.endswith(moves) else statistics.fmean)(each) for name, each in values.items()
    }


SAID = [(name, "all") for name in JOBS]
SAID += [("interleaved", "no chunks"), ("1F1B", "no microbatches"), ("interleaved", "no microbatches")]


@pytest.mark.parametrize(("name", "told"), SAID)
def test_any_schedule(name: str, told: str) -> None:
    """T, T ideal and T without a stage, a rank or a kind are those of the job played with these lengths."""
    job = JOBS[name]
    lengths = random_lengths(job, seed=len(name), steps=2, transfer=40.0 if name == "slow network" else 0.5)
    usual = typical(job, lengths)

    def time(keep: Callable[[Op], bool]) -> float:
        return sum(
            makespan(job, lambda op, length=length: length(op) if keep(op) else usual[op.name])  # type: ignore[misc]
            for length in lengths
        )

    answer = found(job_tables(job, lengths, chunks=told != "no chunks", microbatches=told != "no microbatches"))
    total, ideal = time(lambda op: True), time(lambda op: False)
    lost = total - ideal
    close = pytest.approx
    assert answer.recorded_ns == close(total * MS, rel=1e-6)
    assert answer.total_ns == close(total * MS, rel=1e-6)
    assert answer.ideal_ns == close(ideal * MS, rel=1e-6)
    stages = [(total - time(lambda op, at=at: op.stage != at)) / lost for at in range(job.stages)]  # type: ignore[misc]
    assert list(answer.share_of_stage) == close(stages, abs=1e-4)
    for rank in (0, job.stages * job.replicas - 1):
        where = divmod(rank, job.stages)
        assert answer.share_of_rank[rank] == close(
            (total - time(lambda op, where=where: op[1:3] != where)) / lost,  # type: ignore[misc]
            abs=1e-4,
        )
    ordered = sorted(((min(a, b), -rank) for rank, a, b in scores(job, time)), reverse=True)
    assert answer.slowest_ranks == (-ordered[0][1],)


def scores(job: Job, time: Callable[[Callable[[Op], bool]], float]) -> list[tuple[int, float, float]]:
    """Rank, time with only its pipeline slow, time with only its stage slow."""
    return [
        (
            rank,
            time(lambda op, r=rank: op.replica == r // job.stages),
            time(lambda op, r=rank: op.stage == r % job.stages),
        )  # type: ignore[misc]
        for rank in range(job.stages * job.replicas)
    ]


def test_what_is_typical_already_stays_as_it_is() -> None:
    """Where each kind always takes the same, T is T ideal and nothing is lost."""
    job = JOBS["interleaved"]
    answer = found(
        job_tables(job, [table(forward_compute=10, backward_compute=20, forward_send=1, forward_recv=1)] * 2)
    )
    assert answer.total_ns == answer.ideal_ns == answer.recorded_ns
    assert answer.slowdown == 1.0
    assert list(answer.slowdown_of_stage) == [1.0] * 4


def test_steps_of_different_length_are_replayed_apart() -> None:
    """Steps with 2, 3 and 5 microbatches: each by its own graph, typical times over all."""
    rows, total = [], 0.0
    for step, count in enumerate((2, 3, 5, 3)):
        job = Job(stages=2, microbatches=count, replicas=2)
        length = random_lengths(job, seed=step, steps=1)[0]
        total += makespan(job, length)
        rows += [(row[0], step, *row[2:]) for row in span_rows(job, [length])]
    answer = found(connect(rows, [(rank, rank % 2, rank // 2) for rank in range(4)]))
    assert answer.steps == 4
    assert answer.total_ns == pytest.approx(total * MS, rel=1e-6)


# ---- tables with gaps


def test_lost_operations_are_typical_and_counted() -> None:
    job = JOBS["1F1B"]
    rows = span_rows(job, random_lengths(job, seed=1, steps=4))
    places = [(rank, rank % 4, rank // 4) for rank in range(12)]
    whole = found(connect(rows, places))
    lost = {index for index, row in enumerate(rows) if row[0] == 5 and row[1] == 2 and "forward" in row[2]}
    answer = found(connect([row for index, row in enumerate(rows) if index not in lost], places))
    assert answer.total_ns == pytest.approx(whole.total_ns, rel=0.02)
    assert answer.ms == pytest.approx(whole.ms, abs=0.1)
    assert any(note.startswith(f"{len(lost)} operations that are not in the table") for note in answer.notes)


def test_rank_without_a_file() -> None:
    """A rank of which nothing is there is as quick as its like; the others' answers hold."""
    job = JOBS["1F1B"]
    rows = [row for row in span_rows(job, random_lengths(job, seed=2, steps=3)) if row[0] != 6]
    answer = found(connect(rows, [(rank, rank % 4, rank // 4) for rank in range(12)]))
    assert 6 not in answer.ranks
    assert len(answer.ranks) == len(answer.share_of_rank) == 11
    assert answer.total_ns == pytest.approx(answer.recorded_ns, rel=0.05)
    assert answer.ms > 0.3


def test_pauses_come_and_go() -> None:
    """One step has a garbage collection on stage 0, from the end of its first backward at 90 ms on, for 50 ms.

    Its last backward begins at 140 and not at 130: this step takes 160. Nothing is typical but the pause itself.
    """
    rows = [
        (*row[:4], row[4] + 10 * MS, *row[5:]) if row[:3] == (0, 3, "backward-compute") and row[8] == 1 else row
        for row in span_rows(Job(), [SLOW_LAST_STAGE] * 5)
    ]
    begin = min(row[4] for row in rows if row[1] == 3)
    rows.append((0, 3, "gc", "gc", begin + 90 * MS, 50 * MS, 0, None, 0, None, None))
    answer = found(connect(rows, [(0, 0, 0), (1, 1, 0)]))
    assert answer.total_ns == (5 * 150 + 10) * MS
    assert answer.steps == 5


def test_numbers_that_repeat_are_not_trusted() -> None:
    """Where two operations of a rank have one number, their order in time counts."""
    job = JOBS["1F1B"]
    rows = span_rows(job, random_lengths(job, seed=3, steps=2))
    places = [(rank, rank % 4, rank // 4) for rank in range(12)]
    mixed = [(*row[:8], row[8] // 2, *row[9:]) for row in rows]
    none = [(*row[:8], None, *row[9:]) for row in rows]
    first = found(connect(rows, places))
    for other in (found(connect(mixed, places)), found(connect(none, places))):
        assert (other.total_ns, other.ms, other.mw) == (first.total_ns, first.ms, first.mw)


def test_many_rows_are_bounded_by_leaving_out_steps() -> None:
    job = Job(stages=2, microbatches=2, replicas=2)
    answer = found(job_tables(job, [SLOW_LAST_STAGE] * 40), most_rows=500)
    assert 5 < answer.steps < 20
    assert answer.ms == 2.0
    assert any(f"{answer.steps} of 40 steps" in note for note in answer.notes)


# ---- where dependencies are not known


def reason(connection: object) -> str:
    answer = what_if(connection)  # type: ignore[arg-type]
    assert isinstance(answer, str)
    return answer


def test_reasons() -> None:
    rows = span_rows(Job(stages=1, replicas=2), [table(forward_compute=10)])
    two = [(0, 0, 0), (1, 0, 1)]
    assert "waits for no other" in reason(connect([row for row in rows if row[0] == 0], two))
    computing = [row for row in rows if row[3] != "communication"]
    assert "no collective" in reason(connect([row for row in computing if "clip" not in row[2]], two))
    assert "no forward or backward" in reason(connect([row for row in rows if "compute" not in row[2]], two))
    assert "no operation has a step" in reason(connect([(*row[:1], None, *row[2:]) for row in rows], two))
    assert "places of the ranks" in reason(connect(rows, []))
    piped = span_rows(Job(stages=2, microbatches=4), [table(forward_compute=10)])
    torn = [row for row in piped if not (row[0] == 1 and row[2] == "forward-recv" and row[8] in (1, 2))]
    assert "2 of forward receive" in reason(connect(torn, [(0, 0, 0), (1, 1, 0)]))


# ---- groups, gaps, and what does not fit


def grouped(rows: list[tuple], group_of: Callable[[tuple], str | None]) -> list[tuple]:
    return [(*row[:9], group_of(row) if row[3] == "communication" else None, row[10]) for row in rows]


def test_groups_of_the_table_tell_who_meets() -> None:
    """Two pairs of ranks that meet only within the pair: a slow rank holds up one other, not three."""
    rows = []
    for rank, forward in enumerate((10, 40, 10, 10)):
        begin = 40 if rank < 2 else 10
        rows += [
            (rank, 0, "forward", "forward", 0, forward * MS, 0, None, 0, None, None),
            (rank, 0, "all_reduce", "communication", forward * MS, (begin - forward + 5) * MS, 0, None, 0, None, None),
            (rank, 0, "backward", "backward", (begin + 5) * MS, 20 * MS, 0, None, 0, None, None),
        ]
    places = [(rank, 0, rank) for rank in range(4)]
    pairs = found(connect(grouped(rows, lambda row: f"pair {row[0] // 2}"), places))
    assert pairs.total_ns == 65 * MS
    assert pairs.ideal_ns == 42.5 * MS
    assert list(pairs.share_of_rank) == [0, 1, 0, 0]
    # without groups all four would have to meet, and two are done when the slow one comes
    assert "their groups are others" in reason(connect(rows, places))
    # of one collective nobody begins when others are done: these are no groups, or the clocks are wrong
    late = [(*row[:4], row[4] + 100 * MS * row[0], *row[5:]) for row in rows]
    assert "clocks differ" in reason(connect(grouped(late, lambda row: "dp"), places))
    assert "clocks differ" in reason(connect(late, places))


def test_pipeline_with_groups_told() -> None:
    job = JOBS["1F1B"]
    rows = span_rows(job, random_lengths(job, seed=9, steps=2))
    places = [(rank, rank % 4, rank // 4) for rank in range(12)]

    def group_of(row: tuple) -> str:
        return "all" if "clip" in row[2] else f"stage {row[0] % 4}"

    plain, told = found(connect(rows, places)), found(connect(grouped(rows, group_of), places))
    assert (told.total_ns, told.ideal_ns, told.ms, told.mw) == (plain.total_ns, plain.ideal_ns, plain.ms, plain.mw)


def test_communication_within_computes_is_not_replayed() -> None:
    connection = connect(span_rows(JOBS["no pipeline"], [table(forward_compute=10, backward_compute=20)]), FIVE)
    connection.execute("UPDATE spans SET waiting_ns = duration_ns // 100 WHERE kind = 'backward'")
    assert isinstance(what_if(connection), Replay)
    connection.execute("UPDATE spans SET waiting_ns = duration_ns // 2 WHERE kind = 'backward'")
    assert "33 % of forwards and backwards is communication within them" in reason(connection)


FIVE = [(rank, 0, rank) for rank in range(5)]


def test_what_takes_longer_than_recorded_is_no_replay() -> None:
    """Computes that ran beside one another cannot have waited for one another."""
    connection = connect(span_rows(JOBS["no pipeline"], [table(forward_compute=10, backward_compute=20)]), FIVE)
    connection.execute("UPDATE spans SET start_ns = 17 * 10**17")
    assert "times as long as recorded" in reason(connection)


def test_gaps_are_told() -> None:
    """40 ms in which no operation runs, of 130: they are no part of T."""
    rows = span_rows(JOBS["no pipeline"], [table(forward_compute=10, backward_compute=20)])
    answer = found(connect([(*row[:4], row[4] + 40 * MS * (row[3] == "backward"), *row[5:]) for row in rows], FIVE))
    assert answer.total_ns == 90 * MS
    assert answer.recorded_ns == 130 * MS
    assert "31 % of the recorded time lies between operations and is not replayed" in answer.notes


# ---- jobs as their authors publish them


def test_small_job_by_hand() -> None:
    """Two replicas of two stages, the second twice as slow; transfers 1 ms, embedding 3, gradients 4, clip 2, end 6.

    Recorded: stage 1 F 11-31, B 31-71, F 71-91, B 91-131; stage 0 B 132-152, then 3 + 4 + 2 + 6 ms: 167.
    Typical, F 15 and B 30: stage 1 F 16-31, B 31-61, F 61-76, B 76-106, stage 0 B 107-137: 152.
    Last stage typical: stage 1 F 11-26, B 26-56, F 56-71, B 71-101, stage 0 B 102-122: 137. Only it slow: 182.
    No single worker is to blame: the other replica's last stage is as slow.
    """
    answer = found(read_job(SMALL_JOB))
    assert (answer.recorded_ns, answer.total_ns, answer.ideal_ns) == (2 * 167 * MS, 2 * 167 * MS, 2 * 152 * MS)
    assert answer.ms == (167 - 137) / (167 - 152)
    assert (answer.mw, answer.slowest_ranks) == (0.0, (1,))
    assert list(answer.slowdown_of_stage) == [137 / 152, 182 / 152]
    assert answer.steps == 2
    assert answer.notes == ()


PUBLISHED = TRACES.parent / "stragglers"


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason=f"no published straggler job at {PUBLISHED}")
def test_published_job() -> None:
    """Ms, Mw and the times behind them as the paper's authors published them for this job."""
    answer = found(read_job(PUBLISHED / "trace-ST.parquet"))
    stage, worker = (json.loads((PUBLISHED / f"{name}-ST.json").read_text()) for name in ("ms", "mw"))
    seconds = answer.steps * 1e9
    lost = answer.total_ns - answer.ideal_ns
    assert answer.steps == 32
    assert answer.total_ns / seconds == pytest.approx(stage["tori"], abs=1e-5)
    assert answer.ideal_ns / seconds == pytest.approx(stage["tideal"], abs=1e-5)
    assert answer.ms == pytest.approx(stage["Ms"], abs=1e-4)
    assert answer.mw == pytest.approx(worker["Mw"], abs=1e-4)
    assert (answer.total_ns - answer.ms * lost) / seconds == pytest.approx(stage["trem"], abs=1e-5)
    assert answer.slowdown_of_stage[-1] * answer.ideal_ns / seconds == pytest.approx(stage["tadd"], abs=1e-5)
    assert answer.recorded_ns / seconds == pytest.approx(answer.total_ns / seconds, rel=0.05)  # gaps
    assert answer.share_of_stage.argmax() == 3
