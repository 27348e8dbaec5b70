"""Where the files of a rank's timer lie: with its job, apart from every other run, attempt and process."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from profiler_wrapper.capture.records import RunInfo
from profiler_wrapper.timer.log import Owner, SpanPlace, TimerFiles
from profiler_wrapper.trace.run_directory import open_run


@pytest.fixture(autouse=True)
def _a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "strftime", lambda *_: "20231114-221320")


def claim(
    folder: Path,
    environment: dict[str, str] | None = None,
    *,
    run_name: str | None = None,
    worker: bool = False,
    **of: int,
) -> TimerFiles:
    place = SpanPlace(output_dir=folder, run_name=run_name, environment=environment or {})
    files = place.claim(Owner(RunInfo(**of), worker=worker, known=True))
    files.close()
    return files


def test_ranks_of_a_job_meet_beside_its_profiles(tmp_path: Path) -> None:
    job = {"SLURM_JOB_ID": "7"}
    profile = open_run(tmp_path, prefix="profile", rank=0, world_size=2, environment=job)
    files = [claim(tmp_path, job, rank=rank, world_size=2) for rank in range(2)]
    for rank, one in enumerate(files):
        assert one.root == profile.root
        assert one.text.path == profile.root / "timers" / f"timer_rank{rank}.log"
        assert one.lines.path == one.text.path.with_suffix(".jsonl")
        assert one.text.path.read_bytes() == one.lines.path.read_bytes() == b""
        assert one.attempt == 0


def test_nothing_is_written_over(tmp_path: Path) -> None:
    first = claim(tmp_path, run_name="mine")
    first.text.path.write_text("kept")
    assert [claim(tmp_path, run_name="mine").root.name for _ in range(2)] == ["mine-2", "mine-3"]
    assert claim(tmp_path, run_name="mine", rank=1).root.name == "mine"
    assert first.text.path.read_text() == "kept"


def test_a_file_of_which_only_one_half_is_left_is_kept(tmp_path: Path) -> None:
    first = claim(tmp_path, run_name="mine")
    first.lines.path.unlink()
    second = claim(tmp_path, run_name="mine")
    assert second.root.name == "mine-2"
    assert not first.lines.path.exists()


def test_attempts_are_apart(tmp_path: Path) -> None:
    attempts = [
        claim(tmp_path, {"TORCHELASTIC_RUN_ID": "abc", "TORCHELASTIC_RESTART_COUNT": str(count)}) for count in range(3)
    ]
    places = [str(one.text.path.parent.relative_to(tmp_path)) for one in attempts]
    assert places == ["profile-abc/timers", "profile-abc/attempt1/timers", "profile-abc/attempt2/timers"]
    assert [one.attempt for one in attempts] == [0, 1, 2]


def test_processes_without_a_job_do_not_meet(tmp_path: Path) -> None:
    assert [claim(tmp_path).root.name for _ in range(2)] == ["profile-20231114-221320", "profile-20231114-221320-2"]


def test_several_ranks_without_a_job_meet(tmp_path: Path) -> None:
    roots = {claim(tmp_path, {"MASTER_PORT": "29500"}, rank=rank, world_size=3).root for rank in range(3)}
    assert len(roots) == 1


def test_a_process_that_is_no_rank_has_files_of_its_own(tmp_path: Path) -> None:
    rank = claim(tmp_path, run_name="job", rank=2)
    worker = claim(tmp_path, run_name="job", rank=2, worker=True)
    assert worker.text.path == rank.text.path.parent / f"worker{os.getpid()}_of_rank2.log"


def test_removing_leaves_nothing_empty_and_nothing_else_out(tmp_path: Path) -> None:
    first, second = claim(tmp_path, run_name="job"), claim(tmp_path, run_name="job", rank=1)
    first.remove()
    assert second.text.path.exists() and not first.text.path.exists()
    second.remove()
    assert not any(tmp_path.glob("job/[!.]*"))
    alone = claim(tmp_path)
    alone.remove()
    assert not alone.root.exists()
    second.remove()  # again


def test_where_a_file_stands_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(OSError, match="mine"):
        claim(tmp_path, run_name="mine")
    with pytest.raises(OSError, match="mine"):
        claim(tmp_path / "mine")
