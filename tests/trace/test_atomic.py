"""A file that is written or moved is whole, or not there."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from profiler_wrapper.trace import atomic
from profiler_wrapper.trace.atomic import json_bytes, move, remove_empty
from profiling import files_below


@pytest.fixture
def local(tmp_path: Path) -> Path:
    for name, text in (("rank0/a.json", "{}"), ("rank0/memory/b.txt", "b"), ("report.html", "<html></html>")):
        path = tmp_path / "local" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "local"


def move_all(local: Path, run: Path) -> dict[str, str]:
    """What could not be moved, and why."""
    left = {}
    for path in sorted(path for path in local.rglob("*") if path.is_file()):
        try:
            move(path, run / path.relative_to(local))
        except OSError as error:
            left[path.name] = str(error)
    return left


def test_everything_goes_and_nothing_stays(local: Path, tmp_path: Path) -> None:
    assert move_all(local, tmp_path / "run") == {}
    remove_empty(local)
    assert files_below(tmp_path / "run") == ["rank0/a.json", "rank0/memory/b.txt", "report.html"]
    assert not local.exists()


def test_what_another_window_writes_stays(local: Path, tmp_path: Path) -> None:
    theirs = local / "rank0" / "steps_3-3" / "result.json"
    theirs.parent.mkdir()
    theirs.write_text("{")
    (local / "rank1" / "memory").mkdir(parents=True)
    (local / "link").symlink_to(tmp_path)
    move(local / "report.html", tmp_path / "run" / "report.html")
    remove_empty(local)
    assert files_below(local) == ["rank0/a.json", "rank0/memory/b.txt", "rank0/steps_3-3/result.json"]
    assert sorted(path.name for path in local.iterdir()) == ["link", "rank0"]


def test_a_copy_that_is_cut_is_none(local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(source: Path, target: Path) -> None:
        target.write_bytes(b"" if source.name == "b.txt" else source.read_bytes())

    monkeypatch.setattr(atomic.shutil, "copyfile", cut)
    left = move_all(local, tmp_path / "run")
    assert list(left) == ["b.txt"] and "0 of 1 bytes" in left["b.txt"]
    assert files_below(tmp_path / "run") == ["rank0/a.json", "report.html"]
    assert files_below(local) == ["rank0/memory/b.txt"]


def test_a_target_that_cannot_be_made_takes_nothing(local: Path, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file in the way")
    assert len(move_all(local, tmp_path / "run")) == 3
    assert len(files_below(local)) == 3


def test_json_that_every_parser_reads() -> None:
    value = {
        "a": float("nan"),
        "b": [float("inf"), 1.5],
        "c": np.float32(2),
        "d": np.arange(2),
        "e": Path("x"),
        "f": {2, 1},
    }
    plain = {"a": None, "b": [None, 1.5], "c": 2.0, "d": [0, 1], "e": "x", "f": [1, 2]}
    assert json.loads(json_bytes(value)) == plain
