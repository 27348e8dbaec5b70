"""Where a run's files go, and that a file is whole or not there."""

from __future__ import annotations

import errno
import gzip
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from processes import run_in_processes
from profiler_wrapper.trace.atomic import replacing
from profiler_wrapper.trace.run_directory import RunDirectory, open_run, safe_name


@pytest.fixture(autouse=True)
def _a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "strftime", lambda *_: "20231114-221320")


def run_in(folder: Path, environment: dict[str, str] | None = None, **options: Any) -> RunDirectory:
    return open_run(folder, prefix="profile", environment=environment or {}, **options)


def written(run: RunDirectory, name: str, data: bytes) -> Path:
    path = run.path(name)
    with replacing(path) as beside:
        beside.write_bytes(data)
    return path


# --- names ---


@pytest.mark.parametrize(
    ("environment", "run_name", "expected"),
    [
        ({"PROFILER_WRAPPER_RUN": "mine", "SLURM_JOB_ID": "7"}, "other", "mine"),
        ({"SLURM_JOB_ID": "7"}, "other", "other"),
        ({"TORCHELASTIC_RUN_ID": "abc", "SLURM_JOB_ID": "7"}, None, "profile-abc"),
        ({"TORCHELASTIC_RUN_ID": "none", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "2"}, None, "profile-7.2"),
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "batch"}, "", "profile-7"),
        ({"TORCHELASTIC_RUN_ID": "abc", "TORCHELASTIC_RESTART_COUNT": "2"}, None, "profile-abc/attempt2"),
        ({"TORCHELASTIC_RUN_ID": "abc", "TORCHELASTIC_RESTART_COUNT": "0"}, None, "profile-abc"),
        ({"TORCHELASTIC_RUN_ID": "abc", "TORCHELASTIC_RESTART_COUNT": "x"}, None, "profile-abc"),
    ],
)
def test_a_run_is_named_by_its_job(
    tmp_path: Path, environment: dict[str, str], run_name: str | None, expected: str
) -> None:
    run = run_in(tmp_path, environment, run_name=run_name, rank=3, world_size=8)
    assert run.directory == tmp_path / expected / "rank3"
    assert run.directory.is_dir()


def test_without_a_job_the_time_names_the_run_and_nobody_shares_it(tmp_path: Path) -> None:
    first, second, third = run_in(tmp_path), run_in(tmp_path), run_in(tmp_path)
    assert first.root.name == "profile-20231114-221320"
    assert [run.root.name for run in (second, third)] == [f"{first.root.name}-2", f"{first.root.name}-3"]


def test_ranks_of_one_launcher_meet_without_a_job_id(tmp_path: Path) -> None:
    ranks = [run_in(tmp_path, {"MASTER_PORT": "29500"}, rank=rank, world_size=2) for rank in (0, 1)]
    assert ranks[0].root == ranks[1].root
    assert ranks[0].root.name.endswith("-29500")


def _open_in_child(folder: str) -> str:
    return str(open_run(folder, prefix="p", rank=int(os.environ["RANK"]), world_size=2, environment={}).root)


@pytest.mark.full
def test_child_processes_meet_in_one_directory(tmp_path: Path) -> None:
    assert len(set(run_in_processes(_open_in_child, str(tmp_path)))) == 1


def _open_by_time(folder: str) -> list[str]:
    with mock.patch.object(time, "strftime", lambda *_: "20231114-221320"):
        return [str(open_run(folder, prefix="p", environment={}).root) for _ in range(10)]


@pytest.mark.full
def test_processes_at_the_same_time_do_not_share(tmp_path: Path) -> None:
    first, second = run_in_processes(_open_by_time, str(tmp_path))
    assert len({*first, *second}) == 20


@pytest.mark.parametrize("environment", [{}, {"PROFILER_WRAPPER_RUN": "r"}, {"SLURM_JOB_ID": "7"}])
def test_nothing_is_written_into_a_named_run_twice(tmp_path: Path, environment: dict[str, str]) -> None:
    first, second = run_in(tmp_path, environment, run_name="r"), run_in(tmp_path, environment, run_name="r")
    third = run_in(tmp_path, environment, run_name="r")
    assert [run.root.name for run in (first, second, third)] == ["r", "r-2", "r-3"]


def test_a_second_profile_of_the_same_job_lies_beside_the_first(tmp_path: Path) -> None:
    environment = {"SLURM_JOB_ID": "7"}
    names = [run_in(tmp_path, environment, rank=rank).root.name for rank in (0, 0, 1, 0)]
    assert names == ["profile-7", "profile-7-2", "profile-7", "profile-7-3"]


@pytest.mark.parametrize(
    "name",
    ["../../x", "/etc/x", "..", ".", "a" * 300, "nul\0l", "a\nb", "\ud800", "é" * 200, "C:\\x", " ", "~x", "-rf"],
)  # fmt: skip
def test_no_name_leads_out_of_the_output_directory(tmp_path: Path, name: str) -> None:
    run = open_run(tmp_path / "out", prefix=name, run_name=name, rank_name=name, environment={})
    assert run.directory.is_dir()
    assert run.root.parent == tmp_path / "out"
    assert run.directory.parent == run.root
    path = written(run, "<prefix>_trace.txt", b"x")
    assert path.parent == run.directory
    assert os.listdir(tmp_path) == ["out"]


def test_safe_names() -> None:
    assert safe_name("run_1-a.b+c=d@e", "x") == "run_1-a.b+c=d@e"
    assert safe_name("größe", "x") == "größe"
    assert safe_name("", "x") == "x"
    assert safe_name("a/b", "x") != safe_name("a_b", "x") != safe_name("a\\b", "x")
    assert len(safe_name("é" * 300, "x").encode()) <= 120


# --- paths and files ---


def test_paths_and_windows(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path, "rank3_dp1_tp0_pp0", "opensora", 3)
    assert run.path("<prefix>_rank_<r>.log") == tmp_path / "rank3_dp1_tp0_pp0" / "opensora_rank_3.log"
    later = replace(run, window="steps_500-502")
    assert later.path("run.json") == tmp_path / "rank3_dp1_tp0_pp0" / "steps_500-502" / "run.json"


def test_run_json(tmp_path: Path) -> None:
    run = run_in(tmp_path, rank=2, run_name="r")
    run.write_run({"rank": 2}, complete=False)
    assert json.loads(run.path("run.json").read_text()) == {"rank": 2, "complete": False}


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("t.json", b'{"traceEvents": ['), ("t.json", b""), ("t.json.gz", gzip.compress(b"{}", mtime=0)[:-3]),
        ("t.json.gz", gzip.compress(b'{"a"', mtime=0)), ("t.json.gz", b""),
        ("p.png", b"\x89PNG...."), ("m.pickle", b"\x80\x04"),
    ],
)  # fmt: skip
def test_a_file_without_its_end_is_not_moved_into_place(tmp_path: Path, name: str, data: bytes) -> None:
    run = run_in(tmp_path)
    run.path(name).write_bytes(b"before")
    with pytest.raises(OSError, match="is the disk full") as caught:
        written(run, name, data)
    assert (caught.value.filename, caught.value.errno) == (str(run.path(name)), errno.EIO)
    assert run.path(name).read_bytes() == b"before"
    assert os.listdir(run.directory) == [name]


def test_a_writer_that_writes_nothing_or_fails(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    with pytest.raises(OSError, match="could not be written"), replacing(run.path("t.json")):
        pass
    with pytest.raises(KeyboardInterrupt), replacing(run.path("t.json")) as path:
        path.write_bytes(b"part")
        raise KeyboardInterrupt
    assert os.listdir(run.directory) == []


def test_a_directory_that_vanished_is_made_again(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    run.directory.rmdir()
    run.root.rmdir()
    assert written(run, "a.txt", b"x").read_text() == "x"


def test_a_file_in_the_way_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    with pytest.raises(OSError, match="out"):
        run_in(tmp_path / "out", run_name="r")
