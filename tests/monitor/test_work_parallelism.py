"""How many ranks have data of their own: by what the user says, the mesh and the size of the world."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from profiler_wrapper.monitor.config import MonitorConfig
from profiler_wrapper.monitor.steps import MonitorArgs, parallelism
from profiler_wrapper.monitor.work import Parallelism


def given_sizes(**sizes: int) -> MonitorArgs:
    return MonitorArgs(config=MonitorConfig(), output_dir=Path(), log_file=None, **sizes)


def mesh(**sizes: int) -> Any:
    return SimpleNamespace(mesh_dim_names=tuple(sizes), shape=tuple(sizes.values()))


@pytest.mark.parametrize(
    ("given", "world_size", "device_mesh", "data_parallel", "stages"),
    [
        ({}, 8, None, 8, 1),
        ({"tensor_parallel": 2}, 8, None, 4, 1),
        ({"tensor_parallel": 2, "pipeline_parallel": 2}, 8, None, 2, 2),
        ({}, 8, mesh(dp=4, tp=2), 4, 1),
        ({}, 16, mesh(pp=2, dp_replicate=2, dp_shard=2, tp=2), 4, 2),
        ({}, 8, mesh(dp_shard=2, cp=2, tp=2), 2, 1),
        ({}, 8, mesh(ep=4, fsdp=2), 8, 1),  # expert parallel ranks have data of their own
        ({"tensor_parallel": 4}, 8, mesh(dp=4, tp=2), 2, 1),
        ({"data_parallel": 4}, 8, mesh(tp=2), 4, 1),
        ({}, 8, SimpleNamespace(mesh_dim_names=None, shape=(8,)), 8, 1),
    ],
)
def test_ranks_that_share_a_batch_count_once(
    given: dict[str, int], world_size: int, device_mesh: Any, data_parallel: int, stages: int
) -> None:
    found = parallelism(given_sizes(**given), world_size=world_size, device_mesh=device_mesh)
    assert found == Parallelism(world_size=world_size, data_parallel=data_parallel, pipeline_parallel=stages)


def test_sizes_that_make_a_world_nobody_else_tells_of_are_believed() -> None:
    found = parallelism(given_sizes(data_parallel=4, tensor_parallel=2), world_size=1)
    assert (found.world_size, found.data_parallel) == (8, 4)


def test_sizes_that_do_not_fit_the_world_are_said() -> None:
    for given in ({"data_parallel": 3}, {"tensor_parallel": 3}):
        found = parallelism(given_sizes(**given), world_size=8)
        assert found.world_size == 8
        assert found.warning is not None
