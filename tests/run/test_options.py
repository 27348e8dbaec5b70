"""Which ranks record, and what each of them writes."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from parallel_models import mesh
from profiler_wrapper.capture.layers import Stage
from profiler_wrapper.capture.records import RunInfo
from profiler_wrapper.capture.runinfo import megatron_coordinates, run_info
from profiler_wrapper.errors import ProfilerWrapperWarning, WrongUse
from profiler_wrapper.run.options import Options, make_options
from profiler_wrapper.trace.launch import attempt_number


def options(**given: Any) -> Options:
    environment = given.pop("environment", {})
    return make_options(environment=environment, **given)


@pytest.mark.parametrize(
    ("given", "ranks"),
    [
        (None, None),
        (0, {0}),
        ("0", {0}),
        ("0-3,8", {0, 1, 2, 3, 8}),
        (" 2 , 4-5 ", {2, 4, 5}),
        ([0, 8], {0, 8}),
        (range(2, 4), {2, 3}),
        (np.array([1, 5]), {1, 5}),
    ],
)
def test_ranks_are_a_number_a_text_or_a_list(given: Any, ranks: set[int] | None) -> None:
    assert options(ranks=given).ranks == ranks


@pytest.mark.parametrize("given", ["", "a", "3-1", "-1", [], [-1], [True], [1.5], ["0", "x"], 2.0, "0--2"])
def test_what_is_no_rank_is_said(given: Any) -> None:
    with pytest.raises(WrongUse, match="ranks="):
        options(ranks=given)


@pytest.mark.parametrize(
    ("world_size", "ranks", "several"),
    [(1, None, False), (4, None, True), (4, "0", False), (4, "2-3", True), (4, "3-9", False)],
)
def test_whether_other_ranks_record_too(world_size: int, ranks: str | None, several: bool) -> None:
    assert options(ranks=ranks).of_several(RunInfo(rank=0, world_size=world_size)) is several


def test_the_environment_overrides() -> None:
    assert options(ranks="0", environment={"PROFILER_WRAPPER": "ranks=4-5,7"}).ranks == {4, 5, 7}
    assert options(environment={"PROFILER_WRAPPER": "ranks=1, steps = 2 ,ranks=3"}).ranks == {1, 3}
    with pytest.warns(ProfilerWrapperWarning, match="PROFILER_WRAPPER"):
        options(environment={"PROFILER_WRAPPER": "ranks=x"})
    assert str(options(environment={"PROFILER_WRAPPER_LOCAL_DIR": "/scratch"}).local_dir) == "/scratch"
    assert str(options(local_dir="/a", environment={"PROFILER_WRAPPER_LOCAL_DIR": "/b"}).local_dir) == "/a"
    assert options(environment={"PROFILER_WRAPPER_LOCAL_DIR": ""}).local_dir is None


@pytest.mark.parametrize(
    "coordinates", [3, {"x": 1}, {"dp": -1}, {"dp": True}, {"dp": 0.5}, {"tp": 0, "model": 1}], ids=str
)
def test_what_are_no_coordinates_is_said(coordinates: Any) -> None:
    with pytest.raises(WrongUse, match="coordinates="):
        options(coordinates=coordinates)


def test_few_ranks_that_were_asked_for_write_everything() -> None:
    info = RunInfo(rank=5, world_size=64)
    assert not options().writes_everything(info)
    assert options(ranks="5,9").writes_everything(info)
    assert not options(ranks="0-31").writes_everything(info)
    assert options(ranks="5-40").writes_everything(info) and options(ranks="5-40").is_first(info)
    assert not options(ranks="0-31").is_first(info)


# --- where a process lies -----------------------------------------------------------------------


def test_coordinates_are_given_then_the_meshs() -> None:
    found = run_info(environment={}, coordinates={"dp": 1}, device_mesh=mesh(dp=(0, 8)))
    assert (found.coordinates, found.directory_name) == ({"dp": 1}, "rank5_dp1")
    assert options(coordinates={"data": 1, "pipe": 2}).coordinates == {"dp": 1, "tp": 0, "pp": 2}


def stage(number: int, ranks: tuple[int, ...], place: int | None = None) -> Stage:
    return Stage(number, None, number if place is None else place, ranks)  # type: ignore[arg-type]


def test_stages_tell_the_place_in_the_pipeline_where_the_mesh_does_not() -> None:
    environment = {"RANK": "9", "WORLD_SIZE": "16"}
    alone = run_info(environment=environment, stages=(stage(1, (1, 9)),))
    assert (alone.coordinates, alone.stages, alone.directory_name) == ({"pp": 1}, (1,), "rank9_pp1")
    beside = run_info(environment=environment, stages=(stage(3, (1, 9), 1),), device_mesh=mesh(dp=(2, 8)))
    assert (beside.coordinates, beside.stages) == ({"dp": 2, "tp": 0, "pp": 1}, (3,))
    in_mesh = run_info(environment=environment, stages=(stage(1, (1, 9)),), device_mesh=mesh(pp=(0, 2), dp=(2, 8)))
    assert in_mesh.coordinates["pp"] == 0


def test_of_each_stage_the_rank_of_the_first_pipeline_writes_everything() -> None:
    """16 ranks, 8 pipelines of 2 stages; nothing else is known of them."""
    full = [
        rank
        for rank in range(16)
        if run_info(
            environment={"RANK": str(rank), "WORLD_SIZE": "16"}, stages=(stage(rank // 8, (rank % 8, rank % 8 + 8)),)
        ).writes_everything
    ]
    assert full == [0, 8]


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, (3, 8, 1)),
        ({"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "9", "SLURM_LOCALID": "0"}, (2, 4, 0)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}, (1, 2, 1)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, (1, 2, None)),
        ({"RANK": "1", "SLURM_NTASKS": "2"}, (1, 2, None)),
        ({"WORLD_SIZE": "0"}, (0, 1, None)),
    ],
)
def test_launchers(environment: dict[str, str], told: tuple[int, int, int | None]) -> None:
    info = run_info(environment=environment)
    assert (info.rank, info.world_size, info.local_rank) == told


def test_a_record_tells_host_process_and_attempt() -> None:
    environment = {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": "3"}
    told = run_info(environment=environment).to_dict()
    assert (told["attempt"], attempt_number(environment)) == (3, 3)
    assert told["host"] and told["process"]


def test_megatrons_parallel_state(monkeypatch: pytest.MonkeyPatch) -> None:
    places = {"data": (3, 4), "tensor_model": (1, 2), "pipeline_model": (0, 1), "context": (0, 1)}
    state = SimpleNamespace(model_parallel_is_initialized=lambda: True)
    for name, (place, size) in places.items():
        setattr(state, f"get_{name}_parallel_rank", lambda place=place: place)
        setattr(state, f"get_{name}_parallel_world_size", lambda size=size: size)
    assert megatron_coordinates() == {}
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", state)
    assert megatron_coordinates() == {"dp": 3, "tp": 1, "pp": 0}
    monkeypatch.setattr(state, "model_parallel_is_initialized", lambda: False)
    assert megatron_coordinates() == {}
