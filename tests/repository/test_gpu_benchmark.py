"""`benchmarks/gpu/run_all.py`: what it can do without a GPU, and that it says so where a number is wrong."""

from __future__ import annotations

import html
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from programs import run_program

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu" / "run_all.py"
NEED_A_DEVICE = {"memory_peak", "cuda_graph", "device_time_of_others"}


def written(directory: Path) -> tuple[dict[str, Any], str]:
    """The JSON and the page."""
    content = json.loads((directory / "gpu_benchmark.json").read_text(encoding="utf-8"))
    return content, (directory / "gpu_benchmark.html").read_text(encoding="utf-8")


@pytest.mark.full
def test_a_dry_run_is_right_and_skips_what_needs_a_device(tmp_path: Path) -> None:
    run = run_program(SCRIPT, "--dry", "--output-dir", tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    content, page = written(tmp_path)
    checks = {check["name"]: check for check in content["checks"]}
    assert {name for name, check in checks.items() if check["skipped"]} == NEED_A_DEVICE
    assert all("CUDA or ROCm" in checks[name]["skipped"] for name in NEED_A_DEVICE)
    for name, check in checks.items():
        assert not check["failed"]
        assert name in NEED_A_DEVICE or check["rows"]
        assert html.escape(check["title"]) in page
    compared = ("rows_add_up", "planted_time", "attention_backends", "memory_kept", "flops", "compiled")
    assert all(any(row["status"] == "ok" for row in checks[name]["rows"]) for name in compared)
    assert "http" not in page
    assert "src=" not in page


def test_without_a_device_it_says_what_to_do() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    run = run_program(SCRIPT)
    assert run.returncode == 2
    assert "--dry" in run.stderr


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_run_all", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_a_wrong_number_and_a_check_that_raises_end_with_one(script: ModuleType, tmp_path: Path) -> None:
    def wrong(machine: Any) -> list[Any]:
        """A <number> that is off."""
        return [script.row("sum", 11, 10, share=0.05), script.row("near", 10.4, 10, share=0.05)]

    def raises(machine: Any) -> list[Any]:
        """One that raises."""
        raise ValueError("no such kernel")

    def missed(machine: Any) -> list[Any]:
        """A goal."""
        return [script.goal("ratio", 1.2, 1.05)]

    machine = script.Machine(torch.device("cpu"), True, tmp_path)
    assert script.run(machine, [wrong, raises, missed], minutes=1) == 1
    content, page = written(tmp_path)
    assert [[row["status"] for row in check["rows"]] for check in content["checks"]] == [
        ["off", "ok"],
        [],
        ["goal missed"],
    ]
    assert [check["wrong"] for check in content["checks"]] == [True, True, False]
    assert "no such kernel" in page
    assert "A &lt;number&gt; that is off" in page
    assert script.run(machine, [missed], minutes=1) == 0


def test_no_check_begins_when_the_time_is_over(script: ModuleType, tmp_path: Path) -> None:
    begun = []

    def check(machine: Any) -> list[Any]:
        begun.append(machine)
        return []

    assert script.run(script.Machine(torch.device("cpu"), True, tmp_path), [check], minutes=-1) == 0
    assert not begun
    assert "--minutes" in written(tmp_path)[0]["checks"][0]["skipped"]
