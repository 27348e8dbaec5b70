"""Trainings that run out of memory: the answer names who holds it, and what it proposes lets the run pass."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from profiler_wrapper import load
from programs import run_program

SCRIPT = Path(__file__).parents[1] / "exhausting_training.py"

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the address space of a process"),
    pytest.mark.timeout(600),  # half a minute where nobody else computes
]


@dataclass(frozen=True)
class Training:
    """A training that ended."""

    directory: Path

    @property
    def status(self) -> int:
        return int((self.directory / "ended").read_text())

    @property
    def stderr(self) -> str:
        return (self.directory / "stderr").read_text()


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Training]:
    """The trainings of all tests, each in a process of its own."""
    directory = tmp_path_factory.mktemp("exhausting")
    names = ("logits", "logits.half", "blocks", "blocks.checkpoint", "later")
    done = run_program(SCRIPT, directory, *names, environment={"PYTHONPATH": str(SCRIPT.parents[1])}, timeout_s=550)
    assert done.returncode == 0, done.stderr
    return {name: Training(directory / name) for name in names}


def answer(done: Training) -> list[str]:
    """The lines that we wrote on stderr."""
    lines = done.stderr.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("profiler_wrapper: out of memory"))
    last = next(i for i in range(first + 1, len(lines)) if not lines[i].startswith("  "))
    assert last - first <= 12 and all(len(line) <= 100 for line in lines[first:last])
    return lines[first:last]


def test_logits_of_a_large_vocabulary(trainings: dict[str, Training]) -> None:
    done = trainings["logits"]
    assert done.status == 1 and "DefaultCPUAllocator: can't allocate memory" in done.stderr.splitlines()[-1]
    said = answer(done)
    logits_mib = 4 * 256 * 100_000 * 4 / 2**20
    assert f"requested {logits_mib:.1f} MiB" in said[0]
    assert "log_softmax" in said[1]
    assert "held by: activation" in said[2]
    assert f"{logits_mib:.1f} MiB, aten::_log_softmax of LlamaForCausalLM" in "\n".join(said)
    assert any("try: compute head and loss in 8 chunks" in line for line in said)
    assert any("try: halve the batch" in line for line in said)
    assert trainings["logits.half"].status == 0


def test_activations_of_many_blocks(trainings: dict[str, Training]) -> None:
    """Hardly any memory is left here, so that a child has to analyse what was recorded."""
    done = trainings["blocks"]
    assert done.status == 1 and "DefaultCPUAllocator: can't allocate memory" in done.stderr.splitlines()[-1]
    said = answer(done)
    assert "model.layers." in said[1] and "(forward" in said[1]
    assert "activation of model.layers.{0.." in said[3]
    assert any("try: checkpoint the" in line for line in said)
    result = load(done.directory / "run")
    assert not result.complete and any("left by RuntimeError" in warning for warning in result.warnings)
    assert sum(row.self_time_ns for row in result.layers) + result.time.unattributed_ns == result.time.total_ns
    checkpointed = trainings["blocks.checkpoint"]
    assert checkpointed.status == 0, checkpointed.stderr


def test_who_holds_memory_is_said_of_what_was_recorded_before_it(trainings: dict[str, Training]) -> None:
    """The failure comes when the recording is over: the answer says so, and tells the recording's own peak."""
    done = trainings["later"]
    assert done.status == 1
    said = answer(done)
    assert any("after the recording ended" in line for line in said)
    assert any("held by: " in line and "params" in line for line in said)
