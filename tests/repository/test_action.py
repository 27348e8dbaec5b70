"""The action for GitHub: its script, as the runner would run it, on a run that is worse and on one that is not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from guarded_runs import record
from profiler_wrapper.__main__ import main
from profiler_wrapper.comparison.baseline import make_baseline, write_baseline

ROOT = Path(__file__).parents[2]
ACTION: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text())

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A baseline and two runs, in a directory with a space."""
    folder = tmp_path_factory.mktemp("with a space")
    base = record(folder, "base", memory=True, layers=2, steps=1)
    write_baseline(make_baseline([base]), folder / "baseline.json")
    record(folder, "same", memory=True, layers=2, steps=1)
    record(folder, "worse", memory=True, layers=2, steps=1, plant="extra op")
    return folder


def act(summary: Path, **given: str) -> subprocess.CompletedProcess[str]:
    """Run the steps of the action as a GitHub runner does: expressions become values, bash gets a script."""
    inputs = {name: str(one.get("default", "")) for name, one in ACTION["inputs"].items()} | given
    (step,) = ACTION["runs"]["steps"]
    assert (ACTION["runs"]["using"], step["shell"]) == ("composite", "bash")
    values: dict[str, str] = step["env"]
    for name, value in inputs.items():
        values = {key: text.replace(f"${{{{ inputs.{name} }}}}", value) for key, text in values.items()}
    assert "${{" not in step["run"]  # an input in the script itself could be a command
    script = summary.with_suffix(".sh")
    script.write_text(step["run"])
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(script)],
        env={**os.environ, **values, "GITHUB_STEP_SUMMARY": str(summary), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_the_inputs_that_are_promised() -> None:
    required = {name: one.get("required", False) for name, one in ACTION["inputs"].items()}
    assert required == {"baseline": True, "run": True, "python": False}
    assert ACTION["inputs"]["python"]["default"] == "python"


@pytest.mark.full
@pytest.mark.parametrize(("run", "code"), [("same", 0), ("worse", 3), ("worse\n{}/same\n", 0), ("not there", 1)])
def test_exit_code_and_summary(runs: Path, tmp_path: Path, run: str, code: int) -> None:
    summary = tmp_path / "summary.md"
    summary.write_text("what was there before\n")
    given = f"{runs}/{run.format(runs)}"
    done = act(summary, baseline=str(runs / "baseline.json"), run=given, python=sys.executable)
    assert done.returncode == code, done.stderr
    before, _, text = summary.read_text().partition("\n")
    assert before == "what was there before"
    if code == 1:
        assert "error:" in done.stderr
        return
    assert done.stdout == text
    assert text.startswith("### regression: " if code else "### no regression")
    assert ("model.layers.1.mlp" in text) == bool(code)


@pytest.mark.full
def test_markdown_of_the_command(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["guard", str(runs / "baseline.json"), str(runs / "worse")]
    assert main([*command, "--format", "markdown"]) == 3
    text = capsys.readouterr().out
    assert "|" in text
    assert main([*command, "-o", str(tmp_path / "report.md")]) == 3
    assert (tmp_path / "report.md").read_text() == text
    assert main([*command, "--format", "markdown", "-o", f"{tmp_path}/"]) == 3
    assert (tmp_path / "guard.md").read_text() == text
