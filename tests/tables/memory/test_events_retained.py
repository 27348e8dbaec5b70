"""Retained memory of layers against what autograd saves, as its own hooks tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import models
import profiler_wrapper as pw
import variants
from models import Batch, Case
from module_stack import layer_names
from profiling import profiler, result_of
from retained_cases import CASES, RetainedCase
from saved_tensors import SavedTensorTruth, leaf_output_bytes

LARGEST_DIFFERENCE = 0.02  # of what a layer keeps
SCALARS = 64  # bytes; numbers that a layer makes into tensors live as long as its graph
GENERATOR_STATE = torch.get_rng_state().nbytes


@dataclass(frozen=True)
class Measured:
    """The same forwards run without a profiler and with it."""

    truth: SavedTensorTruth
    result: pw.ProfileResult

    @property
    def rows(self) -> list[pw.LayerRow]:
        return [row for row in self.result.layers if row.phase == "forward" and row.layer]

    @property
    def root(self) -> pw.LayerRow:
        return next(row for row in self.rows if row.depth == 0)

    def row(self, layer: str) -> pw.LayerRow:
        return next(row for row in self.rows if row.layer == layer)

    def retained_of_calls(self, layer: str) -> list[int | None]:
        calls = self.result.calls
        return [call.retained_bytes for call in calls if call.layer == layer and call.phase == "forward"]


def forward(measured: RetainedCase, seed: int) -> torch.Tensor:
    with torch.autocast("cpu", dtype=measured.autocast, enabled=measured.autocast is not None):
        return measured.case.loss(measured.case.model, measured.case.batch(seed))


def truth_of(measured: RetainedCase, seeds: Sequence[int]) -> SavedTensorTruth:
    with SavedTensorTruth(measured.case.model, measured.names) as truth:
        losses = [forward(measured, seed) for seed in seeds]  # held, as backward needs them
    del losses
    return truth


def measure(measured: RetainedCase, output_dir: Path, *, seeds: Sequence[int] = (0,)) -> Measured:
    """A step for each of `seeds`: one forward, one backward."""
    truth = truth_of(measured, seeds)
    with profiler(measured.case, output_dir, steps="all", record_shapes=True) as prof:
        for seed in seeds:
            forward(measured, seed).backward()
            measured.case.model.zero_grad()
            prof.step()
    return Measured(truth, result_of(prof))


def assert_every_row_is_right(measured: Measured) -> None:
    assert len(measured.rows) >= 2
    for row in measured.rows:
        assert row.calls == measured.truth.entered[row.layer], row.layer
        saved = measured.truth.mean_bytes(row.layer)
        assert row.retained_bytes == pytest.approx(saved, rel=LARGEST_DIFFERENCE, abs=SCALARS), row.layer
        assert row.peak_bytes is not None
        assert row.retained_bytes is not None
        assert row.peak_bytes >= row.retained_bytes


def assert_rows_add_up(measured: Measured) -> None:
    """To what the root keeps, and that to all that was saved of what was made inside it."""
    root = measured.root
    assert root.retained_bytes is not None
    own = sum((row.self_retained_bytes or 0) * (row.calls or 0) for row in measured.rows)
    inside = sum(kept.size_bytes for kept in measured.truth.kept if kept.calls)
    assert own == pytest.approx(root.retained_bytes * (root.calls or 0), rel=1e-12)
    assert own == pytest.approx(inside, rel=LARGEST_DIFFERENCE, abs=SCALARS)


DEFAULT = ("llama", "SwiGLU of functions")


@pytest.mark.parametrize(
    "name", [*DEFAULT, *(pytest.param(name, marks=pytest.mark.full) for name in CASES if name not in DEFAULT)]
)
def test_retained_is_what_autograd_saves(name: str, tmp_path: Path) -> None:
    case = CASES[name]()
    measured = measure(case, tmp_path)
    assert_every_row_is_right(measured)
    assert_rows_add_up(measured)
    for layer, size in case.keeps.items():
        assert measured.truth.mean_bytes(layer) == pytest.approx(size, abs=SCALARS)

    root = next(iter(case.names.values()))
    with leaf_output_bytes(case.case.model, case.names) as estimate:
        forward(case, 0)
    of_leaves = estimate[root] / measured.truth.mean_bytes(root)
    assert not 0.95 < of_leaves < 1.05, "what leaf modules return is as much, so that the case shows nothing"


# --- checkpointing --------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_block_keeps_its_output_and_the_state_of_the_generator(reentrant: bool, tmp_path: Path) -> None:
    kept = {}
    for preserve in (False, True):
        case = models.build("llama")
        names = layer_names(case.model)
        model: Any = case.model
        model.gradient_checkpointing_enable({"use_reentrant": reentrant, "preserve_rng_state": preserve})
        if reentrant:
            model.enable_input_require_grads()
        measured = measure(RetainedCase(case, names), tmp_path / str(preserve))
        assert_every_row_is_right(measured)
        kept[preserve] = measured.row("model.layers.0").retained_bytes, measured.root.retained_bytes
    output = 2 * 16 * 64 * 4  # batch, tokens, hidden
    assert kept[False][0] == output
    assert kept[True][0] == output + GENERATOR_STATE
    assert kept[True][1] - kept[False][1] == 2 * GENERATOR_STATE  # of two blocks


# --- autocast -------------------------------------------------------------------------------------


class Product(nn.Module):
    """One Linear, called `calls` times."""

    width = 64

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.linear = nn.Linear(self.width, self.width, bias=False)
        self.calls = calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.calls):
            x = self.linear(x.float())
        return x.float().sum()


def test_a_weight_cast_by_autocast_belongs_to_the_first_call_that_needs_it(tmp_path: Path) -> None:
    """Autocast makes the copy inside that call and keeps it for the next ones; backward needs it all the same."""
    model, rows = Product(calls=2), 8
    case = Case("Product", model, lambda seed: {"x": torch.ones(rows, 64, requires_grad=True)}, call_with_x, "")
    measured = measure(RetainedCase(case, layer_names(model), torch.bfloat16), tmp_path)
    cast_input, cast_weight = rows * 64 * 2, 64 * 64 * 2
    assert measured.truth.bytes_of_calls("linear") == [cast_input + cast_weight, cast_input]
    calls = [
        call.retained_bytes for call in measured.result.calls if call.layer == "linear" and call.phase == "forward"
    ]
    assert calls == [cast_input + cast_weight, cast_input]
    assert measured.row("linear").retained_bytes == cast_input + cast_weight / 2


@pytest.mark.full
@pytest.mark.parametrize("backward_inside", [False, True])
def test_a_cast_that_backward_does_not_need_lasts_as_long_as_autocast(backward_inside: bool, tmp_path: Path) -> None:
    model = Product(calls=1)
    with profiler(None, tmp_path, steps="all") as prof:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.ones(8, 64))  # no gradient of it is asked for, so the weight is not saved
            if backward_inside:
                loss.backward()
        if not backward_inside:
            loss.backward()
        prof.step()
    (row,) = [row for row in result_of(prof).rows("linear") if row.phase == "forward"]
    cast_input, cast_weight = 8 * 64 * 2, 64 * 64 * 2
    assert row.retained_bytes == cast_input + backward_inside * cast_weight


def call_with_x(model: nn.Module, batch: Batch) -> torch.Tensor:
    return model(batch["x"])


# --- several calls --------------------------------------------------------------------------------


def of_growing_length(name: str) -> RetainedCase:
    """16 tokens more for each seed."""
    case = models.build(name, tokens=16 * 8)

    def batch(seed: int) -> Batch:
        return {key: value[:, : 16 * (seed + 1)] for key, value in case.batch(seed).items()}

    return RetainedCase(replace(case, batch=batch), layer_names(case.model))


@pytest.mark.full
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_each_call_keeps_what_its_length_needs_and_rows_are_their_mean(name: str, tmp_path: Path) -> None:
    measured = measure(of_growing_length(name), tmp_path, seeds=range(4))
    assert_every_row_is_right(measured)
    assert_rows_add_up(measured)
    for row in measured.rows:
        saved = measured.truth.bytes_of_calls(row.layer)
        assert measured.retained_of_calls(row.layer) == pytest.approx(saved, rel=LARGEST_DIFFERENCE, abs=SCALARS), (
            row.layer
        )
    block = measured.truth.bytes_of_calls(next(row.layer for row in measured.rows if row.kind == "block"))
    assert block[3] > 3 * block[0]  # a mean over lengths that differ


@pytest.mark.full
def test_by_default_rows_are_means_over_the_timed_steps(tmp_path: Path) -> None:
    case = of_growing_length("llama")
    with profiler(case.case, tmp_path) as prof:
        for seed in range(7):
            forward(case, seed).backward()
            prof.step()
    result = result_of(prof)
    assert len(result.run["timed_steps"]) == 3
    measured = Measured(truth_of(case, result.run["timed_steps"]), result)
    assert_every_row_is_right(measured)
    assert_rows_add_up(measured)


@pytest.mark.full
def test_a_block_under_two_names_has_the_mean_of_its_calls(tmp_path: Path) -> None:
    case = models.build("llama", layers=3)
    blocks = variants.blocks_of(case)
    blocks[2] = blocks[0]
    measured = measure(RetainedCase(case, layer_names(case.model)), tmp_path, seeds=range(2))
    assert (measured.row("model.layers.0").calls, measured.row("model.layers.1").calls) == (4, 2)
    assert measured.row("model.layers.0").retained_bytes == measured.row("model.layers.1").retained_bytes
    assert_rows_add_up(measured)


@pytest.mark.full
def test_outputs_gone_before_backward_are_not_retained_though_the_model_is_called_again(tmp_path: Path) -> None:
    case = models.build("llama")
    twice = replace(case, loss=lambda model, batch: model(**batch).loss + model(**batch).loss)
    optimizer = models.optimizer_of(case.model)  # as long as one is alive, two calls may be one step
    measured = measure(RetainedCase(twice, layer_names(case.model)), tmp_path)
    del optimizer
    assert_every_row_is_right(measured)
    assert measured.row("lm_head").retained_bytes == 0


@pytest.mark.full
def test_an_output_that_the_loop_holds_is_retained_though_backward_does_not_need_it(tmp_path: Path) -> None:
    case = models.build("llama")
    held = []

    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        held.append(model(**batch))
        return held[-1].loss

    measured = measure(RetainedCase(replace(case, loss=loss), layer_names(case.model)), tmp_path)
    logits = held[-1].logits.nbytes
    assert measured.truth.mean_bytes("lm_head") == 0
    assert measured.row("lm_head").retained_bytes == logits
    saved = measured.truth.mean_bytes(measured.root.layer)
    assert measured.root.retained_bytes == pytest.approx(saved + logits, abs=SCALARS)
