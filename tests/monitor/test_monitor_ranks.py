"""Two gloo processes, monitored: totals are the job's, one of them writes, and neither waits for the other."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from processes import run_in_processes
from profiler_wrapper.monitor.monitor import TrainingMonitor

pytestmark = pytest.mark.full
STEPS = 4
ROWS, WIDTH = 32, 64
FORWARD = 2 * ROWS * WIDTH * WIDTH
ALONE = FORWARD + FORWARD  # and the gradient of the weight; nobody asks for that of the input
GIVEN = {"flops_profile_freq": 0, "flops_per_step": ALONE, "dtype": "float32"}
CASES: Mapping[str, dict[str, Any]] = {
    "given": GIVEN,
    "measured": {"flops_profile_freq": 2},
    "tensor parallel": {**GIVEN, "tensor_parallel": 2},
    "last rank": {**GIVEN, "log_rank": -1},
    "late": {"flops_profile_freq": 2},
}


def all_cases(folder: str) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    return {name: train(Path(folder) / name, late=name == "late", **options) for name, options in CASES.items()}


def train(folder: Path, *, late: bool, **options: Any) -> dict[str, Any]:
    """Each rank by itself, so that only the monitor could make one wait. With `late` the second waits for the first."""
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    first_has_ended, let_go = folder / "the first has ended", False
    records = []
    with TrainingMonitor(folder, model=model, peaks=1.0, **options) as monitor:
        for step in range(STEPS):
            if late and step == 1 and torch.distributed.get_rank() == 1:
                let_go = comes(first_has_ended)
            with monitor.step(samples=2, tokens=ROWS):
                model(torch.ones(ROWS, WIDTH)).sum().backward()
            assert monitor.last is not None
            records.append(monitor.last)
    if late and torch.distributed.get_rank() == 0:
        first_has_ended.touch()
    last = records[-1]
    return {
        "let_go": let_go,
        "counts": (last.world_size, last.samples, last.tokens),
        "flops": (last.flops_source, last.model_flops),
        "time_at_peak_s": last.model_time_at_peak_s,
        "ratio": (last.tflops_total or 0) / (last.tflops_per_gpu or 1),
        "steps": [record.step for record in records],
    }


def comes(path: Path) -> bool:
    """Whether there is such a file, after a while."""
    end = time.monotonic() + 120
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.02)
    return path.exists()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return run_in_processes(all_cases, str(folder))


@pytest.mark.parametrize("source", ["given", "measured"])
def test_totals_are_those_of_both_ranks(ranks: list[dict[str, Any]], source: str) -> None:
    for rank in ranks:
        told = rank[source]
        assert told["counts"] == (2, 4, 2 * ROWS)
        assert told["flops"] == (source, 2 * ALONE)
        assert told["ratio"] == 2
        assert told["time_at_peak_s"] == ALONE / 1e12


def test_tensor_parallel_ranks_share_a_batch(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        told = rank["tensor parallel"]
        assert told["counts"] == (2, 2, ROWS)
        assert told["flops"] == ("given", ALONE)
        assert told["time_at_peak_s"] == ALONE / 2 / 1e12


def test_one_rank_writes_the_log_of_the_job(ranks: list[dict[str, Any]], folder: Path) -> None:
    for name, rank in (("given", 0), ("measured", 0), ("last rank", 1)):
        (log,) = (folder / name).rglob("perf_steps_*.jsonl")
        head, *lines = [json.loads(line) for line in log.read_text().splitlines()]
        assert (head["session"]["rank"], head["session"]["world_size"]) == (rank, 2)
        assert [line["iteration"] for line in lines] == list(range(STEPS))
        assert {line["tokens"] for line in lines} == {2 * ROWS if name != "tensor parallel" else ROWS}


def test_nobody_waits_for_a_rank_that_is_late(ranks: list[dict[str, Any]]) -> None:
    """Nor for its measuring, which ranks do by themselves."""
    quick, late = ranks[0]["late"], ranks[1]["late"]
    assert quick["steps"] == late["steps"] == list(range(STEPS))
    assert late["let_go"], "the first did not end while the second was in its second step"
