"""`prof.start()` and `prof.stop()`: a block whose ends lie in different cells or calls."""

from __future__ import annotations

import contextlib
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

import models
import profiler_wrapper as pw
from models import Case
from profiler_wrapper.capture.torch_state import profiler_is_on
from profiling import profiler, result_of
from programs import run_script, warned
from unchanged import hooks_of, ours_in_the_way


def train(case: Case, steps: int) -> None:
    optimizer = models.optimizer_of(case.model)
    for step in range(steps):
        models.train_step(case, case.model, optimizer, seed=step)


def work(result: pw.ProfileResult) -> list[object]:
    rows = [(row.layer, row.phase, row.calls, row.flops_per_step) for row in result.layers]
    return [rows, [step.step for step in result.steps], result.complete]


def test_the_same_as_entering_and_leaving(case: Case, tmp_path: Path) -> None:
    before, hooks = ours_in_the_way(), hooks_of(case.model)
    with profiler(case, tmp_path / "block") as block:
        train(case, 7)
    prof = profiler(case, tmp_path / "started")
    assert prof.start() is prof
    train(case, 7)
    prof.stop()
    assert work(result_of(prof)) == work(result_of(block))
    assert (ours_in_the_way(), hooks_of(case.model)) == (before, hooks)


def test_a_second_start_and_a_stop_without_one_change_nothing(case: Case, tmp_path: Path) -> None:
    prof = profiler(case, tmp_path, steps="all")
    assert "was not started" in warned(prof.stop)[0]
    prof.start()
    train(case, 2)
    assert "started already" in warned(prof.start)[0]
    train(case, 2)
    prof.stop()
    assert "was not started" in warned(prof.stop)[0]
    run = result_of(prof).run
    assert (run["full_steps"], run["timed_steps"]) == ([0, 1], [2, 3])


@pytest.mark.full
@pytest.mark.parametrize(("steps", "timed"), [("auto", [2, 3, 4]), ("1-2", [1, 2])])
def test_started_again_it_records_by_the_same_plan(case: Case, tmp_path: Path, steps: str, timed: list[int]) -> None:
    prof = profiler(case, tmp_path, steps=steps)
    for _ in range(2):
        prof.start()
        train(case, 7)
        prof.stop()
    first, second = prof.results
    assert first.run["timed_steps"] == second.run["timed_steps"] == timed
    assert work(first) == work(second)
    assert len(list(tmp_path.rglob("result.json"))) == 2


@pytest.mark.full
def test_stop_ends_what_leaving_would_keep_open(case: Case, tmp_path: Path) -> None:
    """A block in which only a part of a model was called may be one turn of a loop over layers."""
    before = ours_in_the_way()
    prof = profiler(case, tmp_path)
    prof.start()
    case.model.get_submodule("model.layers.0.mlp")(torch.ones(1, 4, case.model.get_input_embeddings().embedding_dim))
    prof.stop()
    assert ours_in_the_way() == before
    assert [row.layer for row in result_of(prof).layers if row.kind == "mlp"] == ["model.layers.0.mlp"]


@pytest.mark.full
def test_inside_of_start_a_block_is_part_of_it(case: Case, tmp_path: Path) -> None:
    prof = profiler(case, tmp_path)
    prof.start()
    with prof:
        train(case, 3)
    train(case, 3)
    prof.stop()
    assert result_of(prof).run["timed_steps"] == [2, 3, 4]


@pytest.mark.full
def test_started_in_one_cell_and_stopped_in_another(tmp_path: Path) -> None:
    """What a cell raises ends nothing."""
    namespace = {"case": models.build("llama"), "folder": tmp_path, "profiler": profiler, "train": train}
    cells = ["prof = profiler(case, folder); prof.start()", "train(case, 3); 1 / 0", "train(case, 3)", "prof.stop()"]
    for cell in cells:
        with contextlib.suppress(ZeroDivisionError):
            exec(cell, namespace)
    prof = namespace["prof"]
    assert isinstance(prof, pw.ProfilerWrapper)
    assert result_of(prof).run["timed_steps"] == [2, 3, 4] and result_of(prof).complete


@pytest.mark.full
def test_stopped_on_another_thread(case: Case, tmp_path: Path) -> None:
    """As of a block that is left on another one: recording ends with the next call on its own thread."""
    prof = profiler(case, tmp_path, steps="all")
    prof.start()
    train(case, 2)
    said: list[str] = []
    stopping = threading.Thread(target=lambda: said.extend(warned(prof.stop)))
    stopping.start()
    stopping.join()
    train(case, 2)
    assert "on another thread" in " ".join(said)
    assert result_of(prof).run["full_steps"][:2] == [0, 1]


@pytest.mark.full
def test_what_is_never_stopped_ends_with_the_process(tmp_path: Path) -> None:
    script = """
        import sys
        import models
        from profiling import profiler
        case = models.build("llama")
        prof = profiler(case, sys.argv[1], enable_print_summary=True)
        prof.start()
        optimizer = models.optimizer_of(case.model)
        for step in range(3):
            models.train_step(case, case.model, optimizer, seed=step)
        print("trained")
        """
    # torch says on stderr what it thinks of memory from before
    silent = "import os; os.dup2(os.open(os.devnull, os.O_WRONLY), 2)\n"
    printed = run_script(silent + textwrap.dedent(script), tmp_path)
    assert printed.index("trained") < printed.index("TOTAL")
    assert len(list(tmp_path.rglob("result.json"))) == 1


# -- ended where torch cannot stop a profiler -----------------------------------------------------------


class _Calls(torch.autograd.Function):
    """Calls `at(place)` in an op's forward and in its backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, at: Any) -> torch.Tensor:
        ctx.at = at
        at("op")
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.at("backward of an op")
        return gradient, None


class _Net(nn.Module):
    def __init__(self, at: Callable[[str], None]) -> None:
        super().__init__()
        self.at, self.linear = at, nn.Linear(4, 4)
        self.linear.weight.register_hook(lambda gradient: at("gradient hook"))
        self.linear.register_forward_hook(lambda *_: at("forward hook"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.at("forward")
        return cast(torch.Tensor, _Calls.apply(self.linear(x), self.at))


def _loop(action: Callable[[], object], where: str) -> list[bool]:
    """Five steps, in the third of which `action` is called at that place; whether a profiler is on after each."""
    called, on = [False], list[bool]()

    def at(place: str) -> None:
        if place == where and len(on) == 2 and not called[0]:
            called[0] = True
            action()

    model = _Net(at)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.register_step_pre_hook(lambda *_: at("pre hook of the optimizer"))
    optimizer.register_step_post_hook(lambda *_: at("post hook of the optimizer"))
    for _ in range(5):
        with torch.profiler.record_function("a scope of the user's"):
            at("record_function")
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        on.append(profiler_is_on())
    assert called[0]
    return on


_PLACES = ("gradient hook", "forward hook", "forward", "op", "backward of an op", "record_function")
_PLACES += ("pre hook of the optimizer", "post hook of the optimizer")


@pytest.mark.parametrize("where", _PLACES)
@pytest.mark.parametrize("action", ["stop", "leave"])
def test_a_recording_ends_in_the_step_in_which_it_is_ended(action: str, where: str, tmp_path: Path) -> None:
    before = ours_in_the_way()
    prof = profiler(None, tmp_path, steps="all").start()
    on = _loop(getattr(prof, action), where)
    assert on == [True, True, False, False, False]
    if action == "leave":
        prof.stop()
    assert result_of(prof).run["timed_steps"][:2] == [0, 1]
    in_step = {"optimizer hooks"} if "of the optimizer" in where else set()  # torch goes through them: they are silent
    assert [name for name, found in ours_in_the_way().items() if found != before[name] and name not in in_step] == []


@pytest.mark.parametrize("where", ["gradient hook", "forward", "op"])
def test_a_result_asked_for_in_the_midst_of_a_step_ends_what_stayed_open(where: str, tmp_path: Path) -> None:
    prof = profiler(None, tmp_path, steps="all")
    for _ in range(2):
        with prof:
            pass
    assert profiler_is_on()  # until leave(), result or results
    assert _loop(lambda: prof.results, where) == [True, True, False, False, False]
    assert result_of(prof)


def test_a_block_that_ends_before_the_next_call_ends_what_was_to_end_in_backward(tmp_path: Path) -> None:
    layer = nn.Linear(2, 2)
    with profiler(None, tmp_path, steps="all") as prof:
        layer.weight.register_hook(lambda gradient: prof.leave())
        layer(torch.ones(1, 2)).sum().backward()
        assert profiler_is_on()
    assert not profiler_is_on()
    assert result_of(prof)


def test_what_was_stopped_in_backward_can_be_started_at_once(case: Case, tmp_path: Path) -> None:
    prof = profiler(case, tmp_path, steps="all")
    handle = next(case.model.parameters()).register_hook(lambda gradient: prof.stop())
    prof.start()
    case.loss(case.model, case.batch(0)).backward()
    handle.remove()
    prof.start()
    train(case, 2)
    prof.stop()
    assert not profiler_is_on()
    assert [len(result.steps) for result in prof.results][-1] == 2


def test_a_block_after_start_and_stop_is_the_first_of_its_recording(case: Case, tmp_path: Path) -> None:
    optimizer = models.optimizer_of(case.model)
    prof = profiler(case, tmp_path, steps="all").start()
    for step in range(2):
        models.train_step(case, case.model, optimizer, seed=step)
    prof.stop()
    with prof:
        for step in range(3):
            models.train_step(case, case.model, optimizer, seed=step)
    assert not profiler_is_on()
    assert len(prof.results) == 2
