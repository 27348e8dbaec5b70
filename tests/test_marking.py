"""Layer marks and reports where somebody else owns the profiler."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks

import models
import profiler_wrapper as pw
from models import Case
from profiler_wrapper.marking import _held, _RecordedSteps
from profiling import QUICK, profiler, rows_with_time

# --- somebody else's profiler -------------------------------------------------------------------


def test_marks_and_reports_in_a_profiler_of_the_users(case: Case, tmp_path: Path) -> None:
    optimizer = models.optimizer_of(case.model)
    marks = pw.mark(case.model)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        schedule=torch.profiler.schedule(wait=1, warmup=1, active=2),
        on_trace_ready=pw.trace_handler(tmp_path, files=QUICK, print_summary=False),
        profile_memory=True,
    ) as theirs:
        for step in range(11):
            models.train_step(case, case.model, optimizer, seed=step)
            if step < 10:  # the last is broken off
                theirs.step()
    marks.remove()
    paths = sorted(tmp_path.rglob("result.json"), key=lambda path: path.stat().st_mtime_ns)
    found = {path.parent.name: pw.load(path.parent) for path in paths}
    steps = {name: [row.step for row in result.steps if row.step is not None] for name, result in found.items()}
    assert steps == {"rank0": [2, 3], "steps_6-7": [6, 7], "steps_10-10": [10]}
    parameters = sum(parameter.untyped_storage().nbytes() for parameter in set(case.model.parameters()))
    for result in found.values():
        assert (
            rows_with_time(result, "forward")
            == rows_with_time(result, "backward")
            == ["model.layers.0", "model.layers.1"]
        )
        assert result.time.unattributed_ns == 0
        categories = result.memory["categories"]
        assert categories["params"] >= parameters
        assert categories["os_state"] >= 2 * parameters


def test_the_device_mesh_of_a_marked_model_names_the_directory(case: Case, tmp_path: Path, process_group: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    fully_shard(case.model, mesh=init_device_mesh("cpu", (1,), mesh_dim_names=("dp_shard",)))
    with (
        pw.mark(case.model),
        torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU],
            on_trace_ready=pw.trace_handler(tmp_path, files=QUICK, print_summary=False),
        ),
    ):
        models.train_step(case, case.model, models.optimizer_of(case.model))
    (path,) = tmp_path.rglob("result.json")
    assert path.parent.name.startswith("rank0_dp")


def test_marked_chunks_of_megatron_go_by_the_number_in_the_whole_model(monkeypatch: pytest.MonkeyPatch) -> None:
    class TransformerLayer(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.layer_number = number  # from 1, in the whole model
            self.mlp = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.mlp(x)

    class Chunk(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(TransformerLayer(number) for number in (5, 6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    state = types.SimpleNamespace(get_pipeline_model_parallel_world_size=lambda: 4)
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", state)
    chunk = Chunk()
    with pw.mark([chunk]) as marking:
        chunk(torch.ones(1, 2))
        names = {layer["path"] for layer in marking.scopes.describe()}
    assert {"layers.4", "layers.5"} <= names


def test_steps_of_a_schedule() -> None:
    """As torch's profiler calls its handler: after the last step of a cycle, or when it is stopped within one."""
    found: list[object] = []
    for active, steps in ((3, 7), (1, 2), (2, 4)):
        of = _RecordedSteps().of
        theirs = torch.profiler.profile(
            schedule=torch.profiler.schedule(wait=0, warmup=0, active=active),
            activities=[torch.profiler.ProfilerActivity.CPU],
            on_trace_ready=lambda profiler, of=of: found.append(of(profiler)),
        )
        with theirs:
            for _ in range(steps):
                theirs.step()
    assert found == [(0, 1, 2), (3, 4, 5), (6, 7), (0,), (1,), (2,), (0, 1), (2, 3), (4,)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as theirs:
        pass
    assert _RecordedSteps().of(theirs) is None


def test_marks_without_a_handler_tell_nothing_of_memory(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_held, "wanted", False)
    with pw.mark(case.model), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        models.train_step(case, case.model, models.optimizer_of(case.model))
        assert _held._thread is None


def test_a_profiler_that_tells_no_handler_of_ours_leaves_nothing(case: Case, tmp_path: Path) -> None:
    pw.trace_handler(tmp_path)
    hooks = len(_global_optimizer_post_hooks)
    with pw.mark(case.model):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            case.loss(case.model, case.batch(0))
            assert len(_global_optimizer_post_hooks) == hooks + 1
        case.loss(case.model, case.batch(0))
        assert len(_global_optimizer_post_hooks) == hooks
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            case.loss(case.model, case.batch(0))
    assert len(_global_optimizer_post_hooks) == hooks


def test_a_session_of_ours_is_nobody_elses_profiler(case: Case, tmp_path: Path) -> None:
    pw.trace_handler(tmp_path)
    hooks = len(_global_optimizer_post_hooks)
    with pw.mark(case.model):
        with profiler(case, tmp_path, steps="0"):
            case.loss(case.model, case.batch(0))
            assert len(_global_optimizer_post_hooks) == hooks + 1
        assert len(_global_optimizer_post_hooks) == hooks


def test_marks_in_a_with(case: Case) -> None:
    call = nn.Module.__call__
    with pw.mark(case.model):
        assert nn.Module.__call__ is not call
    assert nn.Module.__call__ is call


def test_a_handler_that_fails_warns_and_does_not_raise(tmp_path: Path) -> None:
    class Broken:
        def export_chrome_trace(self, path: str) -> None:
            raise RuntimeError("Trace is already saved")

    handler = pw.trace_handler(tmp_path)
    with pytest.warns(pw.ProfilerWrapperWarning, match="Trace is already saved"):
        handler(Broken())
