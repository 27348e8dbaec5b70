"""Ranks that are killed, slow, absent, or do not agree: the others go on, and what is on disk is whole."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import profiler_wrapper as pw
from profiler_wrapper.ranks.load import load_ranks
from profiling import read_run
from programs import LONGEST_S, Forked

pytestmark = pytest.mark.full
PROGRAM = Path(__file__).parent / "rank_program.py"
WORLD_SIZE = 5
HOUR_NS = 3600e9
SLOW_S = 0.05

NORMAL, KILLED, SLOW, LEFT_A_CHILD, NEVER_CAME = range(5)
STEPS = {NORMAL: 9, KILLED: 9, SLOW: 4, LEFT_A_CHILD: 9}
KILLED_IN = {KILLED: 3, LEFT_A_CHILD: 5}  # steps 2 to 4 are the window


@pytest.fixture(scope="module", autouse=True)
def _no_job_around() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("TORCHELASTIC", "SLURM"))]:
            patch.delenv(name)
        yield


def environment() -> dict[str, str]:
    own = Path(pw.__file__).parents[1]
    return {
        "RANK": "",
        "WORLD_SIZE": str(WORLD_SIZE),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29511",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{own}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }


class Job(NamedTuple):
    folder: Path
    ranks: dict[int, Forked]

    def run(self, rank: int) -> dict[str, Any]:
        return read_run(self.folder / "job" / f"rank{rank}")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Until the normal rank has ended, the slow one is held in a step, and nobody who makes tables has a turn."""
    folder, places = tmp_path_factory.mktemp("job"), tmp_path_factory.mktemp("temporary")
    quick_has_ended = places / "quick has ended"
    options = {"output_dir": str(folder), "run_name": "job"}
    slow = {"slow_s": SLOW_S, "until_there_is": str(quick_has_ended)}
    ranks = {}
    with (places / f"profiler_wrapper-{os.getuid()}.lock").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        for rank, steps in STEPS.items():
            told = {"steps": steps, "options": options, "killed_in_step": KILLED_IN.get(rank)}
            if rank == SLOW:
                told |= {**slow, "options": {**options, "local_dir": str(folder / "node")}}
            more = {**environment(), "RANK": str(rank), "TMPDIR": str(places)}
            ranks[rank] = Forked(PROGRAM, json.dumps(told), environment=more)
        ranks[NORMAL].wait()
    quick_has_ended.touch()
    for rank in set(STEPS) - {NORMAL}:
        ranks[rank].wait()
    return Job(folder, ranks)


def test_the_others_end(job: Job) -> None:
    """The normal one waited for nobody: neither for the slow one, nor for its own tables while it trained."""
    ended = {rank: one.returncode for rank, one in job.ranks.items()}
    assert ended == {NORMAL: 0, KILLED: -9, SLOW: 0, LEFT_A_CHILD: -9}, [one.stderr for one in job.ranks.values()]


def test_one_rank_prints_its_table_when_it_leaves_the_block(job: Job) -> None:
    printed, other = job.ranks[NORMAL].stdout, job.ranks[SLOW].stdout
    assert "TOTAL" in printed and "TOTAL" not in other
    assert printed.index("TOTAL") < printed.index("left the block")
    assert "left the block" in other


def test_each_record_tells_who_when_and_whether_it_is_whole(job: Job) -> None:
    runs = {rank: job.run(rank) for rank in (NORMAL, KILLED, SLOW)}
    assert {rank: run["complete"] for rank, run in runs.items()} == {NORMAL: True, KILLED: False, SLOW: True}
    assert {run["world_size"] for run in runs.values()} == {WORLD_SIZE}
    assert {run["attempt"] for run in runs.values()} == {0}
    assert len({run["host"] for run in runs.values()}) == 1
    assert len({run["process"] for run in runs.values()}) == 3
    for rank in (NORMAL, SLOW):
        assert 0 < runs[rank]["window_end_ns"] - runs[rank]["window_begin_ns"] < HOUR_NS
    assert abs(runs[NORMAL]["window_begin_ns"] - runs[KILLED]["window_begin_ns"]) < HOUR_NS
    assert runs[KILLED]["window_end_ns"] is None
    assert sorted(place.name for place in (job.folder / "job").glob("rank*")) == ["rank0", "rank1", "rank2", "rank3"]


def test_ranks_that_do_not_agree_on_steps_have_their_own(job: Job) -> None:
    assert [job.run(rank)["timed_steps"] for rank in (NORMAL, SLOW)] == [[2, 3, 4], [2, 3]]


def finished_by_its_child(job: Job) -> Path:
    """The directory of the killed rank that left a child, once that has ended."""
    end = time.monotonic() + LONGEST_S  # at a low priority, with nobody who waits for it
    place = job.folder / "job" / f"rank{LEFT_A_CHILD}"
    # The traces where they were exported to go last: until then somebody else could begin again.
    while (not job.run(LEFT_A_CHILD)["complete"] or list(place.glob(".*"))) and time.monotonic() < end:
        time.sleep(0.1)
    return place


def test_what_a_killed_rank_has_recorded_is_finished_without_it(job: Job) -> None:
    place = finished_by_its_child(job)
    assert pw.load(place).run["timed_steps"] == [2, 3, 4]
    assert not list(place.glob(".*"))


def test_everything_on_disk_is_whole(job: Job) -> None:
    files = list((job.folder / "job").rglob("*.json"))
    assert len(files) >= 2 * 4 + 1
    for path in files:
        json.loads(path.read_bytes())
    for rank in (NORMAL, SLOW):
        result = pw.load(job.folder / "job", rank=rank)
        assert result.complete and result.run["rank"] == rank
        assert not list((job.folder / "job" / f"rank{rank}").glob(".*"))
    assert [path.name for path in (job.folder / "job" / f"rank{KILLED}").iterdir() if path.name[0] != "."] == [
        "run.json"
    ]


def test_the_report_of_all_ranks_names_who_is_missing(job: Job) -> None:
    finished_by_its_child(job)
    report = load_ranks(job.folder / "job")
    reasons = {gap.what: gap.reason for gap in report.missing}
    assert {gap.rank for gap in report.missing} == {KILLED, SLOW, NEVER_CAME}
    assert "only its description" in reasons[f"rank {KILLED}"]
    assert "no file" in reasons[f"rank {NEVER_CAME}"]
    assert [what for what in reasons if what.endswith(f"4 of rank {SLOW}")], "its steps are fewer, and nothing says so"
    own = report.own
    assert own.ranks.tolist() == [NORMAL, SLOW, LEFT_A_CHILD]
    of_slow = own.wall_ns[np.isin(own.steps, [2, 3]), own.ranks == SLOW]
    assert len(of_slow) == 2 and (of_slow >= SLOW_S * 1e9).all()


def test_nothing_stays_on_the_nodes_own_disk(job: Job) -> None:
    assert list((job.folder / "node").iterdir()) == []


# --- torchrun, whose agent starts all ranks again when one is killed ------------------------------


def test_an_elastic_restart_and_a_second_run_of_the_same_name(tmp_path: Path) -> None:
    told = {
        "steps": 6,
        "options": {"output_dir": str(tmp_path), "run_name": "job", "enable_print_summary": False},
        "killed_in_first_attempt": {"1": 3},
    }
    earlier = tmp_path / "job" / "rank0"
    earlier.mkdir(parents=True)
    (earlier / "result.json").write_text('{"of": "somebody else"}')
    launcher = "--nnodes=1 --nproc-per-node=2 --max-restarts=1 --monitor-interval=0.2"
    launcher += " --rdzv-backend=c10d --rdzv-endpoint=localhost:0"
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *launcher.split(), str(PROGRAM), json.dumps(told)],
        env={**os.environ, **environment()},
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (earlier / "result.json").read_text() == '{"of": "somebody else"}'
    assert os.listdir(earlier) == ["result.json"]
    run = tmp_path / "job-2"
    assert read_run(run / "rank1")["complete"] is False  # killed in its window
    runs = [read_run(place) for place in sorted((run / "attempt1").glob("rank*"))]
    assert [(one["attempt"], one["rank"], one["world_size"], one["complete"]) for one in runs] == [
        (1, 0, 2, True),
        (1, 1, 2, True),
    ]
    assert pw.load(run / "attempt1", rank=1).run["timed_steps"] == [2, 3, 4]
    assert pw.load(run).run["attempt"] == 1
    report = load_ranks(run)
    assert [gap.what for gap in report.missing] == ["attempt 0"], "what was left out is not said"
