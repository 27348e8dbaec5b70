"""Several ranks: each writes its own directory, and one prints."""

from __future__ import annotations

import contextlib
import io
import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import models
import profiler_wrapper as pw
from processes import RankFailed, run_in_processes
from profiler_wrapper.__main__ import main
from profiler_wrapper.ranks.load import load_ranks
from profiling import result_of
from rank_traces import reduced_here


def profile_one_rank(output_dir: str) -> tuple[int, str, list[int]]:
    case = models.build("llama")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        with pw.ProfilerWrapper(
            case.model, output_dir=output_dir, run_name="job", files=("trace", "result"), background=False
        ) as prof:
            models.train(case, steps=6)
        result = result_of(prof)
    return result.run["rank"], printed.getvalue(), result.run["timed_steps"]


def test_two_ranks_write_beside_one_another_and_one_prints(tmp_path: Path) -> None:
    answers = run_in_processes(profile_one_rank, str(tmp_path))
    assert json.loads((tmp_path / "job" / "rank0" / "run.json").read_text())["versions"]["profiler_wrapper"]
    assert [(rank, bool(printed), steps) for rank, printed, steps in answers] == [
        (0, True, [2, 3, 4]),
        (1, False, [2, 3, 4]),
    ]
    for rank in range(2):
        directory = tmp_path / "job" / f"rank{rank}"
        assert json.loads((directory / "run.json").read_text())["world_size"] == 2
        trace = json.loads((directory / "profile_trace.json").read_text())
        assert trace["distributedInfo"]["rank"] == rank
    with reduced_here():
        report = load_ranks(tmp_path / "job")
    assert (report.own.ranks.tolist(), report.own.steps.tolist(), report.missing) == ([0, 1], [2, 3, 4], ())
    assert np.array_equal(report.own.self_ns.sum(axis=2) + report.own.waiting_ns, report.own.wall_ns)
    assert report.layers is not None and {"model.layers.0", "model.layers.1"} <= set(report.layers.layers)
    assert main(["ranks", str(tmp_path / "job"), "-o", str(tmp_path / "ranks.json")]) == 0
    assert json.loads((tmp_path / "ranks.json").read_text())["verdict"] == report.verdict.verdict


def fail_on_one_rank(folder: str) -> None:
    rank = torch.distributed.get_rank()
    (Path(folder) / f"rank{rank}").touch()
    torch.distributed.barrier()
    if rank == 1:
        raise KeyError("of this rank alone")
    time.sleep(300)


@pytest.mark.full
def test_a_rank_that_fails_ends_the_others_and_says_where(tmp_path: Path) -> None:
    """Of `run_in_processes` itself, which all tests of ranks rely on."""
    with pytest.raises(RankFailed, match=r"(?s)in fail_on_one_rank.*KeyError: 'of this rank alone'"):
        run_in_processes(fail_on_one_rank, str(tmp_path), world_size=3)
    assert len(list(tmp_path.iterdir())) == 3
