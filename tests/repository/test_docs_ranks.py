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
from profiler_wrapper.ranks.load import load_ranks

SLOWER_NS = 0.05e9
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


@pytest.mark.full
def test_the_tutorials_slow_ranks_have_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are slow where the page says; a busy machine can only add."""
    monkeypatch.chdir(tmp_path)
    for run, beginning in BEGINNINGS.items():
        source = program(beginning)
        assert source.count("0.05") == 1
        assert (run == "job") == ('steps="2-11"' in source)
        quick = 'steps="2-11", files=("trace",), background=False'  # no plots
        Path(f"{run}.py").write_text(source.replace('steps="2-11"', quick))
    run_in_processes(train, str(tmp_path), world_size=4)
    reports = {}
    for run in BEGINNINGS:
        assert main(["ranks", f"outputs/{run}", "-o", f"{run}.json"]) == 0
        answer = json.loads(Path(f"{run}.json").read_text())
        reports[run] = load_ranks(Path("outputs", run))
        assert (answer["verdict"], answer["rank"]) == (reports[run].verdict.verdict, reports[run].verdict.rank)
        assert reports[run].own.ranks.tolist() == list(range(4))
    layers = reports["job"].layers
    assert layers is not None
    forward = layers.self_ns[:, layers.layers.index("layers.1"), layers.kinds.index("forward")]
    assert forward[2] >= SLOWER_NS
    assert (reports["timed"].own.of("data")[:, 1] >= SLOWER_NS).all()
