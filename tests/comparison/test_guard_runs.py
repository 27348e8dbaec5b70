"""`guard` and `compare` on real runs on the CPU: the same training twice, and with one thing worse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import profiler_wrapper as pw
from guarded_runs import record
from profiler_wrapper.__main__ import main
from profiler_wrapper.comparison.baseline import make_baseline, write_baseline
from profiler_wrapper.comparison.compare import compare
from profiler_wrapper.comparison.guard import GuardCheck, guard
from ticks import by_ticks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("guard")


@pytest.fixture(scope="module")
def base(folder: Path) -> pw.ProfileResult:
    """A run with allocations, and its baseline beside it."""
    result = record(folder, "base", memory=True, steps=3)
    write_baseline(make_baseline([result]), folder / "baseline.json")
    return result


def regressions(base: pw.ProfileResult, run: pw.ProfileResult) -> dict[str, GuardCheck]:
    return {check.name: check for check in guard(base, run).checks if check.status == "regression"}


def test_the_same_training_again_is_no_regression(
    base: pw.ProfileResult, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(folder, "again", memory=True, steps=3, seed=50)
    before, again = (by_ticks(folder / name / "rank0", folder / f"ticked {name}") for name in ("base", "again"))
    report = guard(before, again)
    assert not report.regressed
    assert {check.name for check in report.checks if check.status == "ok"} >= {"FLOPs", "ops", "memory", "attention"}
    write_baseline(make_baseline([before]), folder / "ticked.json")
    assert main(["guard", str(folder / "ticked.json"), str(again.source)]) == 0
    assert "no regression" in capsys.readouterr().out


@pytest.mark.full
@pytest.mark.parametrize(
    ("plant", "check", "where"),
    [
        ("extra op", "ops", "model.layers.1.mlp (forward)"),
        ("synchronisation", "ops", "aten::_local_scalar_dense"),
        ("larger tensor", "memory", "model.layers.1.mlp (forward): retained"),
        ("eager attention", "attention", "model.layers.{0..2}.self_attn (forward): flash -> "),
    ],
)
def test_what_is_worse_is_caught_and_named(
    base: pw.ProfileResult, folder: Path, plant: str, check: str, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name = plant.replace(" ", "_")
    record(folder, name, plant=plant, memory=True, steps=3)
    assert main(["guard", str(folder / "baseline.json"), str(folder / name)]) == 3
    assert "REGRESSION" in capsys.readouterr().out
    found = regressions(base, pw.load(folder / name))[check]
    assert any(where in text for text in (found.reason, *(finding.text for finding in found.regressions)))


@pytest.mark.full
def test_a_fused_backward_of_attention_is_an_improvement(base: pw.ProfileResult, folder: Path) -> None:
    eager = record(folder, "eager", plant="eager attention", memory=True, steps=3)
    assert sum(row.repeated_flops_per_step for row in base.flops) > 0
    report = guard(eager, base)
    statuses = {check.name: check.status for check in report.checks}
    assert (report.regressed, statuses["FLOPs"], statuses["ops"]) == (False, "ok", "improved")
    assert {check.name: check.status for check in guard(base, eager).checks}["FLOPs"] == "ok"


@pytest.mark.full
def test_a_graph_break_is_caught_with_its_line(folder: Path) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    whole = record(folder, "compiled", compiled=True, steps=2, layers=2)
    torch._dynamo.reset()
    broken = record(folder, "broken", compiled=True, steps=2, layers=2, plant="graph break")
    (finding,) = regressions(whole, broken)["graph breaks"].regressions
    assert "guarded_runs.py" in finding.text
    torch._dynamo.reset()


def test_a_layer_that_takes_longer_in_every_step_is_caught(base: pw.ProfileResult, folder: Path) -> None:
    run = folder / "base" / "rank0"
    before = by_ticks(run, folder / "ticked")
    slower = by_ticks(run, folder / "slower", slower="model.layers.1.mlp")
    check = guard(before, slower).checks[-1]
    slow = {finding.layer for finding in check.regressions}
    assert (check.name, check.status) == ("time", "regression") and "model.layers.1.mlp" in slow
    assert not [layer for layer in slow if layer.startswith(("model.layers.0", "model.layers.2"))]


def test_a_run_in_a_wrapper_has_the_same_layers(base: pw.ProfileResult, folder: Path) -> None:
    class DistributedDataParallel(nn.Module):
        """By its name what torch's is, without a process group."""

        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, *args: object, **named: object) -> object:
            return self.module(*args, **named)

    for name, wrap in (("ddp", DistributedDataParallel), ("compiled_prefix", _with_compiled_prefix)):
        wrapped = record(folder, name, memory=True, steps=3, wrap=wrap)
        found = compare(base, wrapped)
        matched = {row.layer for row in found.rows if row.a is not None and row.b is not None}
        assert {f"model.layers.{i}.mlp" for i in range(3)} <= {
            layer.removeprefix("module.").removeprefix("_orig_mod.") for layer in matched
        }
        alone = {row.layer for row in found.rows if row.a is None or row.b is None}
        assert not any("layers" in layer for layer in alone)
        for side, total in (("a", base.time.total_ns), ("b", wrapped.time.total_ns)):
            own = sum(getattr(row, side).self_time_ns for row in found.rows if getattr(row, side) is not None)
            rest = sum(getattr(row, f"time_{side}_ns") for row in found.unattributed)
            assert own + rest == total


def _with_compiled_prefix(model: nn.Module) -> nn.Module:
    """Names as `torch.compile(model)` makes them."""

    class OptimizedModule(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self._orig_mod = module

        def forward(self, *args: object, **named: object) -> object:
            return self._orig_mod(*args, **named)

    return OptimizedModule(model)


def test_wrong_uses_are_told(base: pw.ProfileResult, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    baseline = str(folder / "baseline.json")
    assert main(["guard", baseline, str(folder / "base"), "--update", "-o", "x"]) == 2
    assert main(["guard", "--update", str(folder), str(folder / "base")]) == 2
    other = folder / "something.json"
    other.write_text("{}")
    assert main(["guard", "--update", str(other), str(folder / "base")]) == 1
    assert "will not overwrite without --force" in capsys.readouterr().err


def test_a_baseline_is_overwritten_only_with_force(
    base: pw.ProfileResult, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "kept.json"
    update = ["guard", "--update", str(path), str(folder / "base")]
    assert main(update) == 0
    path.write_text(before := path.read_text() + "\n")
    assert main(update) == 1
    assert "will not overwrite without --force" in capsys.readouterr().err
    assert path.read_text() == before
    capsys.readouterr()
    assert main([*update, "--force", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"baseline": str(path)}
    assert path.read_text() != before
