"""The magic `%%profile_layers`, in a kernel of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from programs import Forked

nbformat = pytest.importorskip("nbformat")
jupyter_client = pytest.importorskip("jupyter_client")
pytest.importorskip("ipykernel")

ROOT = Path(__file__).parents[2]
PAGE = re.findall(r"```python\n(.*?)```", (ROOT / "docs/how-to/jupyter.md").read_text("utf-8"), re.DOTALL)
SET_UP = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import torch
from torch import nn
%load_ext profiler_wrapper

class Slow(nn.Linear):
    def forward(self, x):
        for _ in range(40):
            x = super().forward(x)
        return x

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(96, 96), nn.Linear(96, 96), Slow(96, 96), nn.Linear(96, 96))
optimizer = torch.optim.AdamW(model.parameters())
"""
TRAIN = """
for step in range(4):
    x = torch.randn(64, 96)
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
steps = step + 1
f"did {steps}"
"""
OPTIONS = "--output-dir runs --files result"


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The outputs of each cell, by its name; run in one kernel."""
    sources = {
        "set up": SET_UP,
        "with a model": f"%%profile_layers model --steps 0-2 --optimizer optimizer {OPTIONS}\n{TRAIN}",
        "its names": "parts = [row for row in _profile.layers if row.layer.isdigit()]\n"
        "print(steps, max(parts, key=lambda row: row.self_events).layer, len(_profile.steps))",
        "without a model": f"%%profile_layers --result mine --with-stack {OPTIONS}\n{TRAIN}",
        "its result": "print(type(mine).__name__, mine.layers[0].layer, _profile is not mine)",
        "that raises": f"%%profile_layers model {OPTIONS}\nkept = 1\nmodel(torch.ones(2, 96))\n1 / 0",
        "afterwards": "print(kept, sum(len(m._forward_hooks) for m in model.modules()))",
        "wrong option": "%%profile_layers model --stepz 3\nran = True",
        "wrong value": "%%profile_layers model --steps 3-1\nran = True",
        "wrong name": "%%profile_layers modell\nran = True",
        "not run": "print('ran' in globals())",
        **{f"page {number}": source for number, source in enumerate(PAGE)},
    }
    folder = tmp_path_factory.mktemp("notebook")
    connection = folder / "kernel.json"
    kernel = Forked("-m", "ipykernel_launcher", "-f", connection, cwd=folder)
    try:
        while not (connection.exists() and connection.read_text().rstrip().endswith("}")):
            os.kill(kernel.pid, 0)  # it is still there
            time.sleep(0.05)
        client = jupyter_client.BlockingKernelClient(connection_file=str(connection))
        client.load_connection_file()
        client.start_channels()
        client.wait_for_ready(timeout=200)
        outputs = {name: outputs_of(client, source) for name, source in sources.items()}
        client.stop_channels()
    finally:
        os.kill(kernel.pid, signal.SIGKILL)
        kernel.wait()
    return outputs


def outputs_of(client: Any, source: str) -> list[Any]:
    """What a notebook would keep below the cell."""
    found: list[Any] = []

    def keep(message: dict[str, Any]) -> None:
        if message["msg_type"] in ("stream", "execute_result", "display_data", "error"):
            found.append(nbformat.v4.output_from_msg(message))

    client.execute_interactive(source, output_hook=keep, timeout=200)
    return found


def printed(outputs: Any) -> str:
    return "".join(one.text for one in outputs if one.output_type == "stream" and one.name == "stdout")


def shown(outputs: Any) -> list[dict[str, str]]:
    return [one.data for one in outputs if one.output_type == "execute_result"]


def error(outputs: Any) -> Any:
    return next((one for one in outputs if one.output_type == "error"), None)


def test_a_cell_runs_in_the_users_namespace_and_shows_its_result(cells: dict[str, Any]) -> None:
    assert error(cells["set up"]) is None
    own, result = shown(cells["with a model"])
    assert own["text/plain"] == "'did 4'"
    assert "pw-result" in result["text/html"]
    assert "TOTAL" in result["text/plain"]
    assert "ProfileResult(" not in result["text/plain"]
    assert printed(cells["its names"]).split() == ["4", "2", "3"]  # steps, the layer of many ops, recorded steps


def test_one_output_says_how_long_the_result_takes(cells: dict[str, Any]) -> None:
    """Its text changes while one waits; a notebook that a program runs (papermill, nbclient) keeps it once."""
    said = [one.data["text/plain"] for one in cells["with a model"] if one.output_type == "display_data"]
    assert len(said) == 1 and re.fullmatch(r"making the result: \d+ s \(an interrupt keeps the trace\)", said[0])
    printed = "".join(one.text for one in cells["with a model"] if one.output_type == "stream")
    assert "making the result" not in printed and "Warning" not in printed


def test_without_a_model_the_roots_are_those_called(cells: dict[str, Any]) -> None:
    assert printed(cells["its result"]).split() == ["ProfileResult", "Sequential", "True"]


def test_what_the_cell_raises_passes_unchanged(cells: dict[str, Any]) -> None:
    failure = error(cells["that raises"])
    assert (failure.ename, failure.evalue) == ("ZeroDivisionError", "division by zero")
    traceback = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(failure.traceback))
    assert "----> 3 1 / 0" in traceback
    assert "notebook.py" not in traceback
    assert printed(cells["afterwards"]).split() == ["1", "0"]


@pytest.mark.parametrize(
    ("cell", "named"), [("wrong option", "--stepz"), ("wrong value", "3-1"), ("wrong name", "modell")]
)
def test_a_wrong_line_is_one_sentence_and_runs_nothing(cells: dict[str, Any], cell: str, named: str) -> None:
    failure = error(cells[cell])
    said = "".join(one.text for one in cells[cell] if one.output_type == "stream")
    assert failure is None or failure.ename == "UsageError"
    assert named in said + (failure.evalue if failure else "")
    assert printed(cells["not run"]).strip() == "False"


def test_the_cells_of_the_page_run(cells: dict[str, Any]) -> None:
    results = [shown(cells[f"page {number}"]) for number in range(len(PAGE))]
    assert [error(cells[f"page {number}"]) for number in range(len(PAGE))] == [None] * len(PAGE)
    tables = ["pw-result" in data[-1].get("text/html", "") for data in results if data]
    assert tables == [True, False, True, True]  # the magic, a data frame, the magic with options, no magic


def test_importing_the_package_imports_no_ipython() -> None:
    code = "import sys, profiler_wrapper; print(sorted({'IPython', 'torch', 'tqdm'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=100)
    assert done.stdout.strip() == "[]", done.stderr
