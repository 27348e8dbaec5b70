"""Several ranks: each writes its own directory, and one prints."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import models
import profiler_wrapper as pw
from processes import run_in_processes
from profiling import result_of


def profile_one_rank(output_dir: str) -> tuple[int, str, list[int]]:
    case = models.build("llama")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        with pw.ProfilerWrapper(case.model, output_dir=output_dir, run_name="job", files=("trace", "result")) as prof:
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
