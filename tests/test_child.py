"""Scripts without `if __name__ == "__main__":` run once, whatever processes we start for them."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("duckdb")
pytest.importorskip("pyarrow")

from programs import TESTS, run_program
from rank_traces import write_trace

TRAINS = """
    import os, sys
    with open(os.environ["COUNTED"], "a") as file:
        file.write("the script runs\\n")
    """
ASKS = """
    import profiler_wrapper as pw
    report = pw.load_ranks(os.environ["TRACES"])
    print(report.own.ranks.tolist(), len(report.missing))
    """
RECORDS = """
    import torch
    import profiler_wrapper as pw
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    with pw.ProfilerWrapper(model, output_dir=os.environ["TRACES"], background=True, steps="1-2") as prof:
        for _ in range(4):
            model(torch.ones(2, 4)).sum().backward()
            prof.step()
    print(prof.result is not None, prof.result.run["timed_steps"])
    """


def run(how: str, body: str, folder: Path) -> tuple[str, int]:
    """What a script prints, and how often it ran."""
    text = "".join(textwrap.dedent(part) for part in (TRAINS, body))
    path = folder / "training.py"
    path.write_text(text, encoding="utf-8")
    counted = folder / "counted.txt"
    arguments = {"script": [str(path)], "-c": ["-c", text], "stdin": ["-"], "-m": ["-m", "training"]}[how]
    environment = {
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), os.environ.get("PYTHONPATH", "")]),
        "COUNTED": str(counted),
        "TRACES": str(folder / "traces"),
        "PROFILER_WRAPPER_WORKERS": "2",
    }
    done: Any
    if "import torch" in body:
        done = run_program(*arguments, cwd=folder, environment=environment)
    else:
        command, given = [sys.executable, *arguments], text if how == "stdin" else ""
        environment = {**os.environ, **environment}
        done = subprocess.run(command, input=given, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().split("\n")[-1], len(counted.read_text(encoding="utf-8").splitlines())


@pytest.mark.full
@pytest.mark.parametrize("how", ["script", "-c", "stdin", "-m"])
def test_traces_are_reduced_and_nothing_trains_again(how: str, tmp_path: Path) -> None:
    (tmp_path / "traces").mkdir()
    for rank in range(3):
        write_trace(tmp_path / "traces" / f"trace_rank{rank}.json", rank, world_size=3)
    assert run(how, ASKS, tmp_path) == ("[0, 1, 2] 0", 1)
    assert len(list((tmp_path / "traces").glob("*_spans.parquet"))) == 3


@pytest.mark.full
def test_a_daemonic_process_may_ask(tmp_path: Path) -> None:
    """Such a process may have no children of multiprocessing."""
    (tmp_path / "traces").mkdir()
    for rank in range(2):
        write_trace(tmp_path / "traces" / f"trace_rank{rank}.json", rank)
    body = """
        import multiprocessing
        def ask():
            import profiler_wrapper as pw
            report = pw.load_ranks(os.environ["TRACES"])
            print(report.own.ranks.tolist(), flush=True)
        process = multiprocessing.get_context("fork").Process(target=ask, daemon=True)
        process.start()
        process.join()
        """
    assert run("script", body, tmp_path) == ("[0, 1]", 1)


@pytest.mark.full
def test_a_window_is_finished_by_a_child_and_nothing_trains_again(tmp_path: Path) -> None:
    assert run("script", RECORDS, tmp_path) == ("True [1, 2]", 1)
