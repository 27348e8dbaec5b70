"""Rank, mesh, growth: what is found out about the process."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from parallel_models import mesh
from profiler_wrapper.capture import growth
from profiler_wrapper.capture.growth import MANY_CALLS, MOST_GROWTH_BYTES, GrowthBound, free_bytes, resident_bytes
from profiler_wrapper.capture.records import RunInfo
from profiler_wrapper.capture.runinfo import mesh_coordinates, run_info


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_how_float32_is_multiplied_is_told(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: precision)
    assert run_info(environment={}).to_dict()["float32_matmul_precision"] == precision


def test_how_float32_is_multiplied_is_told_where_torch_refuses_the_old_question(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse() -> str:
        raise RuntimeError("mix of the legacy and new APIs")

    monkeypatch.setattr(torch, "get_float32_matmul_precision", refuse)
    for told, precision in (("tf32", "high"), ("ieee", "highest"), (None, None)):
        monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(fp32_precision=told))
        assert run_info(environment={}).float32_matmul_precision == precision


def test_alone() -> None:
    info = run_info(environment={}, version="1.2")
    assert (info.rank, info.world_size, info.directory_name) == (0, 1, "rank0")
    assert info.versions["profiler_wrapper"] == "1.2"
    assert info.writes_everything
    assert info.warnings == ()


@pytest.mark.parametrize(
    ("options", "environment", "rank"),
    [
        ({"rank": 3, "device_mesh": mesh(dp=(0, 8))}, {"RANK": "1"}, 3),
        ({"device_mesh": mesh(dp=(0, 8))}, {"RANK": "1"}, 5),
        ({}, {"RANK": "1", "SLURM_PROCID": "2"}, 1),
        ({}, {"SLURM_PROCID": "2", "SLURM_NTASKS": "4"}, 2),
    ],
)
def test_the_rank_is_told_by_the_first_that_knows(
    options: dict[str, object], environment: dict[str, str], rank: int
) -> None:
    assert run_info(environment=environment, **options).rank == rank  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "abc", "-1", "1.5"])
def test_a_rank_that_is_none_is_ignored_and_said(text: str) -> None:
    info = run_info(environment={"RANK": text})
    assert info.rank == 0
    assert f"RANK={text!r}" in info.warnings[0]


def test_a_rank_beyond_the_world_is_said() -> None:
    info = run_info(environment={"RANK": "9", "WORLD_SIZE": "4"})
    assert info.rank == 9
    assert "beyond the world of 4" in info.warnings[0]


def test_coordinates_are_read_by_name_and_like_ones_counted_through() -> None:
    found = mesh_coordinates(mesh(pp=(1, 2), dp_replicate=(1, 2), dp_shard=(2, 4), tp=(0, 2)))
    assert found == {"dp": 6, "tp": 0, "pp": 1}
    assert mesh_coordinates(mesh(dp=(1, 2), cp=(1, 2))) == {"dp": 1, "tp": 0, "pp": 0, "cp": 1}
    assert mesh_coordinates(SimpleNamespace(mesh_dim_names=None)) == {}
    assert mesh_coordinates(None) == {}


def test_one_rank_of_each_pipeline_stage_writes_everything_in_a_large_world() -> None:
    def info(rank: int, **coordinates: int) -> RunInfo:
        return RunInfo(rank=rank, world_size=16, coordinates=coordinates)

    assert info(8, dp=0, tp=0, pp=1).writes_everything
    assert not info(9, dp=0, tp=1, pp=1).writes_everything
    assert info(0).writes_everything
    assert not info(1).writes_everything
    assert RunInfo(rank=7, world_size=8).writes_everything
    assert info(9, dp=0, tp=1, pp=1).directory_name == "rank9_dp0_tp1_pp1"


class Process:
    """Memory and time that a test moves."""

    def __init__(self, free: int | None = 100 << 30) -> None:
        self.resident: int | None = 1 << 30
        self.now_s = 0.0
        self.looks = self.calls = 0
        self.bound = GrowthBound(
            calls=lambda: self.calls, resident=self._resident, free=lambda: free, clock=lambda: self.now_s
        )
        self.bound.restart()

    def _resident(self) -> int | None:
        self.looks += 1
        return self.resident

    def grow(self, size: int, *, after_s: float = 1.0) -> str | None:
        assert self.resident is not None
        self.resident += size
        self.now_s += after_s
        return self.bound.exceeded()


def test_growth_beyond_4_gib_ends_recording() -> None:
    process = Process()
    assert process.grow(MOST_GROWTH_BYTES) is None
    reason = process.grow(1 << 20)
    assert reason is not None
    assert "the process grew by 4.0 GiB" in reason


def test_growth_beyond_a_quarter_of_what_is_free_ends_recording() -> None:
    process = Process(free=4 << 30)
    assert process.grow(1 << 30) is None
    assert process.grow(1) is not None


def test_growth_beyond_an_eighth_of_it_ends_a_recording_of_many_calls() -> None:
    """It is then of events, and torch takes far more when it stops."""
    process = Process()
    process.calls = MANY_CALLS
    assert process.grow(1 << 30) is None
    process.calls += 1
    reason = process.grow(0)
    assert reason is not None
    assert "the bound is 512.0 MiB: torch takes 8 times as much when it stops" in reason
    process.bound.restart()
    assert process.grow(1 << 30) is None


def test_growth_is_looked_at_every_fifth_of_a_second() -> None:
    process = Process()
    for _ in range(100):
        process.grow(0, after_s=0.01)
    assert process.looks <= 6


def test_where_the_system_does_not_tell_nothing_is_ended() -> None:
    process = Process(free=None)
    process.resident = None
    process.bound.restart()
    process.now_s += 1
    assert process.bound.exceeded() is None


def test_this_machine_tells() -> None:
    assert (resident_bytes() or 1) > 0
    assert (free_bytes() or 1) > 0


@pytest.mark.parametrize(
    ("own", "files", "free"),
    [
        ("0::/job/step\n", {"job/step": (2, "1000", 900, 300)}, 400),
        ("0::/job/step\n", {"job/step": (2, "max", 900, 0), "job": (2, "1000", 950, 0)}, 50),
        ("0::/job/step\n", {"job/step": (2, "max", 900, 0)}, None),
        ("0::/docker/abc\n", {"": (2, "1000", 1200, 0)}, 0),  # a container knows its own group as the root
        ("4:cpu,memory:/a\n1:name=systemd:/a\n0::/a\n", {"memory/a": (1, "1000", 600, 100)}, 500),
        ("4:memory:/a\n", {"memory/a": (1, str((1 << 63) - 4096), 600, 100)}, None),
        ("1:cpu:/a\n", {"memory/a": (1, "1000", 600, 100)}, None),
        (None, {}, None),
    ],
)
def test_what_a_control_group_leaves(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    own: str | None,
    files: dict[str, tuple[int, str, int, int]],
    free: int | None,
) -> None:
    if own is not None:
        (tmp_path / "own").write_text(own)
    for group, (version, limit, used, cached) in files.items():
        limit_file, used_file, prefix = growth._GROUP_FILES[version]
        place = tmp_path / "groups" / group
        place.mkdir(parents=True, exist_ok=True)
        (place / limit_file).write_text(f"{limit}\n")
        (place / used_file).write_text(f"{used}\n")
        (place / "memory.stat").write_text(f"anon 5\n{prefix}inactive_file {cached}\n{prefix}active_file 0\n")
    monkeypatch.setattr(growth, "_OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(growth, "_GROUPS", tmp_path / "groups")
    assert growth.control_group_free_bytes() == free
