"""The two jobs of docs/tutorials/several-ranks.md, on four processes, then `ranks`."""

from __future__ import annotations

import json
import os
import re
import runpy
from pathlib import Path

import pytest
import torch.distributed as dist

from processes import run_in_processes
from profiler_wrapper.__main__ import main

BEGINNINGS = {"job": '"""A small training on several processes.', "timed": '"""The same training with timers'}
PAGE = Path(__file__).parents[2] / "docs" / "tutorials" / "several-ranks.md"


def program(beginning: str) -> str:
    """The block of the page that begins with this."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    (found,) = (str(block) for block in blocks if block.startswith(beginning))
    return found


def train(folder: str) -> None:
    """For `run_in_processes`: both programs of the page, in the group that is there."""
    os.chdir(folder)
    dist.init_process_group = dist.destroy_process_group = lambda *_: None  # type: ignore[assignment]
    for run in BEGINNINGS:
        os.environ["PROFILER_WRAPPER_RUN"] = run
        runpy.run_path(f"{run}.py", run_name="__main__")


def test_the_tutorials_slow_ranks_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for run, beginning in BEGINNINGS.items():
        source = program(beginning)
        assert source.count("0.05") == 1
        source = source.replace("0.05", "0.25")  # whatever else runs on the machine
        Path(f"{run}.py").write_text(source.replace('steps="2-11"', 'steps="2-11", files=("trace",)'))  # no plots
    run_in_processes(train, str(tmp_path), world_size=4)
    said = {}
    for run in BEGINNINGS:
        assert main(["ranks", f"outputs/{run}", "-o", f"{run}.json"]) == 0
        answer = json.loads(Path(f"{run}.json").read_text())
        said[run] = answer["verdict"], answer["rank"], answer["layer"]
    assert said == {"job": ("rank", 2, "layers.1"), "timed": ("data", 1, None)}
