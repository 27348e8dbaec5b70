"""The ranks of one launch meet in one directory, those of another one beside it; nobody asks anybody."""

from __future__ import annotations

import json
import os
import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from profiler_wrapper.trace import run_directory
from profiler_wrapper.trace.launch import LAUNCH_FILE, Launch, attempt_number, claim, find_launch, launch_name
from profiler_wrapper.trace.rank_files import find_result
from profiler_wrapper.trace.run_directory import open_run

HERE = Launch(meeting="a:1", host="h", started_s=1000.0)
TORCHRUN = Launch(meeting="a:1", host="h", launcher="/tmp/x1", started_s=1000.0)


@pytest.mark.parametrize(
    ("one", "changes", "other"),
    [
        (HERE, {}, False),
        (HERE, {"started_s": 1010.0}, False),  # behind a wrapper of its own
        (HERE, {"started_s": 1031.0}, True),
        (HERE, {"started_s": None}, False),
        (HERE, {"meeting": "a:2"}, True),
        (HERE, {"host": "g", "started_s": 5000.0}, False),  # clocks and parents of another machine tell nothing
        (HERE, {"job": "7"}, True),
        (replace(HERE, job="7", exact=True), {"meeting": "b:9", "host": "g"}, False),
        (replace(TORCHRUN, job="7"), {"launcher": "/tmp/x2"}, True),  # torchrun with an id that its user chose, again
        (replace(HERE, job="7"), {"started_s": 9999.0}, True),
        (TORCHRUN, {"launcher": "/tmp/x2"}, True),
        (TORCHRUN, {"started_s": 9999.0}, False),
        (TORCHRUN, {"host": "g", "launcher": "/tmp/x2"}, False),
        (replace(TORCHRUN, world_size=2), {"world_size": 4}, True),  # nodes have come
        (replace(TORCHRUN, world_size=2), {"world_size": 4, "host": "g", "launcher": "/tmp/x2"}, True),
        (replace(TORCHRUN, world_size=2), {"world_size": None}, False),
    ],
)
def test_which_launches_are_one(one: Launch, changes: dict[str, Any], other: bool) -> None:
    assert replace(one, **changes).is_other_than(one) is other
    assert one.is_other_than(replace(one, **changes)) is other


def test_ranks_that_start_again_may_meet_elsewhere() -> None:
    moved = replace(HERE, meeting="b:9")
    assert moved.is_other_than(HERE) and not moved.is_other_than(HERE, restarted=True)


def test_ranks_of_a_larger_world_do_not_join_those_before_it(tmp_path: Path) -> None:
    """torchrun counts no restart where nodes come or go."""
    before, after = replace(TORCHRUN, world_size=2), replace(TORCHRUN, world_size=4)
    assert [opened(tmp_path, rank, before, ranks=2) for rank in (0, 1)] == ["job/rank0", "job/rank1"]
    assert [opened(tmp_path, rank, after) for rank in (3, 0, 2, 1)] == [f"job-2/rank{rank}" for rank in (3, 0, 2, 1)]
    # A restart that is counted has a directory of its own, in the first run of the launch.
    assert opened(tmp_path, 0, replace(after, world_size=3), attempt=1) == "job/attempt1/rank0"


def test_what_torchrun_tells() -> None:
    environment = {
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_ERROR_FILE": "/tmp/torchelastic_a/none_b/attempt_1/3/error.json",
        "MASTER_ADDR": "host",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RESTART_COUNT": "1",
        "WORLD_SIZE": "4",
    }
    found = find_launch(environment)
    assert (found.job, found.meeting, found.launcher) == ("", "host:29500", "/tmp/torchelastic_a/none_b")
    assert found.world_size == 4 and find_launch({"WORLD_SIZE": "4"}).world_size is None
    assert attempt_number(environment) == 1
    assert find_launch({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}).exact
    assert not find_launch({"SLURM_JOB_ID": "7"}).exact


def test_runs_of_one_node_get_names_that_sort(tmp_path: Path) -> None:
    """By when torchrun began, alike on all of its ranks and starts; of several nodes the id alone is the same."""
    names = []
    for number, job in enumerate(("f00", "a11", "none")):
        attempts = [tmp_path / job / f"attempt_{attempt}" for attempt in (0, 1)]
        for attempt in attempts:
            (attempt / "3").mkdir(parents=True)
        os.utime(attempts[0], (1e9 + number, 1e9 + number))
        environment = {"TORCHELASTIC_RUN_ID": job, "GROUP_WORLD_SIZE": "1", "MASTER_PORT": "29500"}
        told = [{**environment, "TORCHELASTIC_ERROR_FILE": str(one / "3" / "error.json")} for one in attempts]
        name, *others = (launch_name(find_launch(one), one) for one in told)
        assert others == [name] and launch_name(find_launch(environment), environment)
        if job != "none":
            several = told[0] | {"GROUP_WORLD_SIZE": "2"}
            assert launch_name(find_launch(several), several) == job
            assert name.endswith(f"-{job}") and re.match(r"200109\d\d-\d{6}-", name)
        names.append(name)
    assert names == sorted(names)


def opened(folder: Path, rank: int, launch: Launch, *, attempt: int = 0, name: str = "job", ranks: int = 4) -> str:
    """Where a rank of this launch writes, as seen from `folder`."""
    environment = {"TORCHELASTIC_RESTART_COUNT": str(attempt)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_directory, "find_launch", lambda _: launch)
        run = open_run(folder, prefix="p", rank=rank, world_size=ranks, run_name=name, environment=environment)
    return str(run.directory.relative_to(folder))


def test_a_second_launch_of_a_name_overwrites_nothing(tmp_path: Path) -> None:
    again = replace(TORCHRUN, launcher="/tmp/x2")
    assert [opened(tmp_path, rank, TORCHRUN) for rank in (0, 1)] == ["job/rank0", "job/rank1"]
    # Rank 2 never came the first time, and yet goes where its own launch is.
    assert [opened(tmp_path, rank, again) for rank in (2, 0, 1)] == ["job-2/rank2", "job-2/rank0", "job-2/rank1"]
    assert opened(tmp_path, 3, TORCHRUN) == "job/rank3"


def test_a_rank_that_is_there_is_never_written_again(tmp_path: Path) -> None:
    assert [opened(tmp_path, 0, HERE) for _ in range(3)] == ["job/rank0", "job-2/rank0", "job-3/rank0"]


def test_attempts_lie_apart_in_the_run_they_are_of(tmp_path: Path) -> None:
    other = replace(TORCHRUN, launcher="/tmp/x2")
    opened(tmp_path, 0, other)
    opened(tmp_path, 0, TORCHRUN)
    moved = replace(TORCHRUN, meeting="a:2")
    assert opened(tmp_path, 1, moved, attempt=1) == "job-2/attempt1/rank1"
    assert opened(tmp_path, 0, moved, attempt=1) == "job-2/attempt1/rank0"
    assert opened(tmp_path, 0, other, attempt=3) == "job/attempt3/rank0"


def test_what_a_single_process_wrote_is_not_joined_and_not_overwritten_by_ranks(tmp_path: Path) -> None:
    alone = open_run(tmp_path, prefix="p", run_name="job", environment={})
    (alone.directory / "kept").write_text("x")
    assert opened(tmp_path, 0, HERE) == "job-2/rank0"
    assert (alone.directory / "kept").exists()
    assert open_run(tmp_path, prefix="p", run_name="job-2", environment={}).root.name == "job-2-2"


def test_of_many_ranks_that_come_at_once_one_leaves_the_file(tmp_path: Path) -> None:
    barrier, found = threading.Barrier(8), []

    def come() -> None:
        barrier.wait()
        found.append(claim(tmp_path / "job", HERE))

    threads = [threading.Thread(target=come) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 8
    assert os.listdir(tmp_path / "job") == [LAUNCH_FILE]
    assert json.loads((tmp_path / "job" / LAUNCH_FILE).read_text())["host"] == "h"


@pytest.mark.parametrize("links", [True, False])
def test_a_launch_that_comes_while_another_leaves_its_file_does_not_join_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    encode, joined = msgspec.json.encode, list[bool]()

    def come(launch: Launch) -> bytes:
        monkeypatch.setattr(msgspec.json, "encode", encode)
        joined.append(claim(tmp_path, replace(HERE, meeting="a:2")))
        return encode(launch)

    monkeypatch.setattr(msgspec.json, "encode", come)
    if not links:
        monkeypatch.setattr(os, "link", lambda *_: os.stat("/nothing"))
    assert [claim(tmp_path, HERE), *joined] == [False, True]
    assert os.listdir(tmp_path) == [LAUNCH_FILE]


def test_where_no_directory_can_be_made_no_name_is_looked_for(tmp_path: Path) -> None:
    (tmp_path / "outputs").symlink_to(tmp_path / "gone")
    with pytest.raises(OSError, match="outputs"):
        open_run(tmp_path / "outputs", prefix="p", environment={})


def test_a_torn_file_is_nobodys(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / LAUNCH_FILE).write_text("{")
    assert claim(tmp_path / "job", HERE)


def test_the_last_attempt_is_what_a_reader_finds(tmp_path: Path) -> None:
    for attempt in (0, 2, 10):
        place = opened(tmp_path, 0, TORCHRUN, attempt=attempt)
        (tmp_path / place / "result.json").write_text("{}")
    assert find_result(tmp_path / "job") == tmp_path / "job/attempt10/rank0/result.json"
