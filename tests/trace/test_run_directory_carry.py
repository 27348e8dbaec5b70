"""Files of a node's own disk reach the run whole, or stay where they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from profiler_wrapper.trace import run_directory as carrying
from profiler_wrapper.trace.run_directory import Carried, carry, remove_empty
from profiling import files_below


@pytest.fixture
def local(tmp_path: Path) -> Path:
    for name, text in (("rank0/a.json", "{}"), ("rank0/memory/b.txt", "b"), ("report.html", "<html></html>")):
        path = tmp_path / "local" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "local"


def carry_all(local: Path, run: Path) -> Carried:
    return carry(sorted(path for path in local.rglob("*") if path.is_file()), local, run)


def test_everything_goes_and_nothing_stays(local: Path, tmp_path: Path) -> None:
    carried = carry_all(local, tmp_path / "run")
    remove_empty(local)
    assert (carried.left, carried.problem) == ((), "")
    assert files_below(tmp_path / "run") == ["rank0/a.json", "rank0/memory/b.txt", "report.html"]
    assert not local.exists()


def test_what_another_window_writes_stays(local: Path, tmp_path: Path) -> None:
    theirs = local / "rank0" / "steps_3-3" / "result.json"
    theirs.parent.mkdir()
    theirs.write_text("{")
    assert carry([local / "report.html"], local, tmp_path / "run").there == (tmp_path / "run" / "report.html",)
    remove_empty(local)
    assert files_below(local) == ["rank0/a.json", "rank0/memory/b.txt", "rank0/steps_3-3/result.json"]


def test_a_copy_that_is_cut_is_none(local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(source: Path, target: Path) -> None:
        target.write_bytes(b"" if source.name == "b.txt" else source.read_bytes())

    monkeypatch.setattr(carrying.shutil, "copyfile", cut)
    carried = carry_all(local, tmp_path / "run")
    assert [path.name for path in carried.left] == ["b.txt"] and "0 of 1 bytes" in carried.problem
    assert files_below(tmp_path / "run") == ["rank0/a.json", "report.html"]
    assert files_below(local) == ["rank0/memory/b.txt"]


def test_a_target_that_cannot_be_made_takes_nothing(local: Path, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file in the way")
    carried = carry_all(local, tmp_path / "run")
    assert len(carried.left) == 3 and carried.there == ()
    assert len(files_below(local)) == 3
