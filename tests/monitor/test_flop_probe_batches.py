"""FLOPs of steps on batches of several sizes, and of loops that evaluate: a measurement holds for steps like it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from monitoring import CountedHere, monitoring
from profiler_wrapper.monitor import flop_probe
from profiler_wrapper.monitor.batches import size_of
from profiler_wrapper.monitor.records import StepRecord

WIDTH, WORDS = 8, 16
PER_TOKEN = 6 * WIDTH * WORDS  # forward, and both gradients, of the one product


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.head(self.embedding(ids))
        return output


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Steps are counted in this process, so that the next one knows; what is not known is told by a warning."""
    monkeypatch.setattr(flop_probe, "Counting", CountedHere)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def train(model: nn.Module, sequences: int, length: int) -> None:
    model(torch.zeros(sequences, length, dtype=torch.int64)).sum().backward()


def evaluate(model: nn.Module) -> None:
    model.eval()
    with torch.no_grad():
        for _ in range(5):
            model(torch.zeros(4, 8, dtype=torch.int64))
    model.train()


def run(directory: Path, *steps: Callable[[nn.Module], object], given: Any = None, **options: Any) -> list[StepRecord]:
    model = Words()
    with monitoring(directory, model=model, **{"flops_profile_freq": 500, **options}) as (monitor, records):
        for number, step in enumerate(steps):
            with monitor.step(**({} if given is None else given[number])):
                step(model)
    return records


def tokens_of(records: list[StepRecord]) -> list[float | None]:
    """The tokens that FLOPs are those of."""
    return [None if one.model_flops is None else one.model_flops / PER_TOKEN for one in records]


def on(*batches: tuple[int, int]) -> Callable[[nn.Module], None]:
    def step(model: nn.Module) -> None:
        for batch in batches:
            train(model, *batch)

    return step


def test_flops_go_by_what_the_model_was_given(tmp_path: Path) -> None:
    batches = [((4, 8),), ((1, 8),), ((4, 8), (4, 8)), ((2, 16),), ((4, 8),)]
    given = [{"tokens": sum(rows * length for rows, length in batch)} for batch in batches]
    records = run(tmp_path, *(on(*batch) for batch in batches), given=given)
    assert tokens_of(records) == [32, 8, 64, None, 32]  # attention is not in proportion to the length


def test_so_they_do_where_nothing_is_given(tmp_path: Path) -> None:
    assert tokens_of(run(tmp_path, on((4, 8)), on((2, 8)), on((2, 4)))) == [32, 16, None]


def test_without_a_model_they_hold_for_as_many_tokens(tmp_path: Path) -> None:
    model = Words()
    with monitoring(tmp_path, flops_profile_freq=500) as (monitor, records):
        for rows in (4, 4, 1):
            with monitor.step(tokens=rows * 8):
                train(model, rows, 8)
    assert tokens_of(records) == [32, 32, None]


def test_an_evaluation_in_the_measured_step_is_left_out(tmp_path: Path) -> None:
    def with_evaluation(model: nn.Module) -> None:
        train(model, 4, 8)
        evaluate(model)

    plain = on((4, 8))
    records = run(tmp_path, plain, plain, with_evaluation, plain, plain, flops_profile_freq=2)
    assert tokens_of(records) == [32] * 5
    assert [record.profiled for record in records] == [True, False, True, True, True]


def test_a_step_that_only_evaluates_is_not_the_measured_one(tmp_path: Path) -> None:
    records = run(tmp_path, evaluate, on((4, 8)), on((4, 8)))
    assert tokens_of(records)[1:] == [32, 32]


def test_a_loop_that_evaluates_in_every_step_is_measured_with_it(tmp_path: Path) -> None:
    def both(model: nn.Module) -> None:
        evaluate(model)
        train(model, 4, 8)

    records = run(tmp_path, *[both] * 5)
    assert tokens_of(records) == [None, None, None, *[pytest.approx(32 + 5 * 32 / 3)] * 2]


def test_a_teacher_without_gradients_counts(tmp_path: Path) -> None:
    class Teacher(Words):
        pass

    teacher = Teacher().eval()

    def distil(model: nn.Module) -> None:
        with torch.no_grad():
            teacher(torch.zeros(4, 8, dtype=torch.int64))
        train(model, 4, 8)

    assert tokens_of(run(tmp_path, distil, distil)) == [pytest.approx(32 + 32 / 3)] * 2


@pytest.mark.parametrize(
    ("batch", "alike"),
    [
        ({"input_ids": torch.zeros(4, 8), "attention_mask": torch.ones(4, 8)}, (4, 8)),
        ({"input_ids": torch.zeros(4, 8), "labels": torch.ones(4, 3)}, (4, ((8,), (3,)))),
        ({"input_ids": torch.zeros(1, 8), "cu_seqlens": torch.ones(5)}, (1, ((1, 8), (5,)))),
        (torch.zeros(4, 3, 16, 16), (4, ((3, 16, 16),))),
        ((torch.zeros(4, 3, 16, 16), torch.zeros(4)), (4, ((3, 16, 16), ()))),
        (torch.zeros(9, 4, 8), (1, ((9, 4, 8),))),  # torch's own layers take the length first
    ],
)
def test_what_a_measurement_holds_for(batch: Any, alike: tuple[int, Any]) -> None:
    assert size_of(batch).key == alike
