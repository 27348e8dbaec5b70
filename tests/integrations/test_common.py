"""How many samples and tokens a batch has, and that every batch a model is trained on is seen once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import models
from profiler_wrapper.integrations.common import counts
from profiler_wrapper.monitor.batches import BatchCounter, size_of

IDS = torch.zeros(3, 5, dtype=torch.long)
MASK = torch.ones(3, 5, dtype=torch.long)


@pytest.mark.parametrize(
    ("batch", "samples", "length"),
    [
        ({"input_ids": IDS}, 3, 5),
        ({"labels": torch.zeros(3), "input_ids": IDS}, 3, 5),
        ({"inputs_embeds": torch.zeros(3, 5, 8)}, 3, 5),
        ({"pixel_values": torch.zeros(3, 3, 16, 16)}, 3, None),
        ((IDS, torch.zeros(3)), 3, 5),
        (IDS, 3, 5),
        (torch.zeros(3, 5), 3, None),
        ([{"x": torch.zeros(4, 2)}], 4, None),
        ({"text": ["a", "b"]}, None, None),
        (None, None, None),
        (torch.tensor(1), None, None),
    ],
)
def test_the_size_of_a_batch(batch: Any, samples: int | None, length: int | None) -> None:
    found = size_of(batch)
    assert (found.samples, found.length) == (samples, length)


def test_a_mask_is_taken_only_if_it_is_one_of_these_tokens() -> None:
    assert size_of({"input_ids": IDS, "attention_mask": MASK}).mask is MASK
    assert size_of({"input_ids": IDS, "attention_mask": MASK[:, None]}).mask is None
    assert size_of({"input_ids": IDS, "attention_mask": {"full": MASK}}).mask is None


def test_the_shapes_of_micro_batches_are_handed_on() -> None:
    one, other = size_of({"input_ids": IDS}), size_of({"input_ids": IDS[:1, :4]})
    assert counts([one, other]) == {"samples": 4, "shapes": [(3, 5), (1, 4)]}
    assert counts([one, other], context_parallel=2) == {"samples": 4, "shapes": [(3, 10), (1, 8)]}
    assert counts([one, size_of(torch.zeros(2, 2))]) == {"samples": 5}
    assert counts([]) == {"samples": None}


def test_masks_are_handed_on_where_all_micro_batches_have_one() -> None:
    masked = [size_of({"input_ids": IDS, "attention_mask": MASK}) for _ in range(2)]
    masked.append(size_of({"input_ids": IDS[:2, :3], "attention_mask": MASK[:2, :3]}))
    assert [mask.shape for mask in counts(masked)["attention_mask"]] == [(3, 5), (3, 5), (2, 3)]
    assert counts([*masked, size_of({"input_ids": IDS})])["shapes"] == [(3, 5), (3, 5), (2, 3), (3, 5)]


def steps_of(counter: BatchCounter, model: nn.Module, batches: int = 2, steps: int = 3) -> list[list[int | None]]:
    found = []
    counter.start()
    for _ in range(steps):
        for _ in range(batches):
            model(input_ids=IDS, labels=IDS).loss.backward()
        with torch.no_grad():
            model(input_ids=IDS)  # an evaluation
        found.append([size.length for size in counter.take()])
    counter.stop()
    return found


def wrapped_later(model: nn.Module, how: str) -> nn.Module:
    if how == "plain":
        return model
    if how == "compiled":
        return torch.compile(model, backend="eager")
    if how == "compiled in place":
        model.compile(backend="eager")
        return model
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    raise ValueError(how)


@pytest.mark.full
@pytest.mark.parametrize("how", ["plain", "ddp", "compiled", "compiled in place"])
def test_every_batch_is_seen_once_whatever_is_around_the_model(process_group: None, how: str) -> None:
    model = models.build("llama", layers=1, hidden=16).model
    counter = BatchCounter(model)
    called = wrapped_later(model, how)
    plain_call = nn.Module.__call__
    assert steps_of(counter, called) == [[5, 5]] * 3
    assert nn.Module.__call__ is plain_call
    assert not model._forward_pre_hooks and not called._forward_pre_hooks


@pytest.mark.full
def test_checkpointing_computes_no_batch_again() -> None:
    model = models.build("llama", hidden=16).model
    model.gradient_checkpointing_enable()
    assert steps_of(BatchCounter(model), model) == [[5, 5]] * 3


@pytest.mark.full
def test_positional_arguments() -> None:
    model = models.build("llama", layers=1, hidden=16).model
    counter = BatchCounter(model)
    counter.start()
    model(IDS, MASK)
    model(IDS, attention_mask=MASK)
    sizes = counter.take()
    counter.stop()
    assert [(size.samples, size.length) for size in sizes] == [(3, 5), (3, 5)]
    assert sizes[1].mask is MASK


@pytest.mark.full
def test_a_loop_that_calls_only_parts_of_the_model_is_not_listened_to_for_ever() -> None:
    model = models.build("llama", layers=1, hidden=16).model
    counter = BatchCounter(model)
    plain_call = nn.Module.__call__
    counter.start()
    for _ in range(3):
        assert nn.Module.__call__ is not plain_call
        model.lm_head(model.model(input_ids=IDS).last_hidden_state).sum().backward()
        assert counter.take() == []
    assert nn.Module.__call__ is plain_call
