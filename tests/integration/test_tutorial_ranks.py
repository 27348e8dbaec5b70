"""The two jobs of docs/tutorials/several-ranks.md, as a reader starts them: torchrun, then `ranks`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "tutorials" / "several-ranks.md"


def program(beginning: str) -> str:
    """The block of the page that begins with this."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    (found,) = (str(block) for block in blocks if block.startswith(beginning))
    return found


def verdict_of(source: str, run: str, folder: Path) -> dict[str, Any]:
    """What `ranks` says of the program on four processes."""
    (folder / "job.py").write_text(source)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PROFILER_WRAPPER_RUN": run}
    environment["PROFILER_WRAPPER"] = "files=result,trace"  # no plots, which take longer than the job
    for arguments in (
        ["torch.distributed.run", "--nproc-per-node", "4", "job.py"],
        ["profiler_wrapper", "ranks", f"outputs/{run}", "-o", "ranks.json"],
    ):
        done = subprocess.run(
            [sys.executable, "-m", *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads((folder / "ranks.json").read_text())
    return answer


@pytest.mark.parametrize(
    ("beginning", "run", "said"),
    [
        pytest.param('"""A small training on several processes.', "job", ("rank", 2, "layers.1"), id="profiled"),
        pytest.param('"""The same training with timers', "timed", ("data", 1, None), id="timed"),
    ],
)
def test_the_tutorials_slow_rank_is_found(
    beginning: str, run: str, said: tuple[str, int, str | None], tmp_path: Path
) -> None:
    source = program(beginning)
    assert source.count("0.05") == 1
    answer = verdict_of(source.replace("0.05", "0.25"), run, tmp_path)  # whatever else runs on the machine
    assert (answer["verdict"], answer["rank"], answer["layer"]) == said
