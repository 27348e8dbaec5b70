"""Prefill and decode, told from the arguments of a call."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from profiler_wrapper.capture.torch_state import generation_phase, in_backward

PROMPT = torch.ones(2, 5, dtype=torch.long)
TOKEN = torch.ones(2, 1, dtype=torch.long)
CACHE = object()


@pytest.mark.parametrize(
    ("args", "kwargs", "phase"),
    [
        ((PROMPT,), {}, "forward"),
        ((TOKEN,), {"past_key_values": None}, "forward"),
        ((TOKEN,), {"use_cache": False}, "forward"),
        ((PROMPT,), {"use_cache": True}, "prefill"),
        ((TOKEN,), {"past_key_values": CACHE}, "decode"),
        ((), {"input_ids": PROMPT, "past_key_values": CACHE}, "prefill"),
        ((), {"inputs_embeds": torch.ones(2, 1, 8), "past_key_values": CACHE}, "decode"),
        ((), {"input_ids": None, "inputs_embeds": torch.ones(2, 4, 8), "use_cache": True}, "prefill"),
        ((), {"decoder_input_ids": TOKEN, "input_ids": PROMPT, "use_cache": True}, "decode"),
        ((), {"cache_params": CACHE}, "prefill"),
        (("text",), {"use_cache": True}, "prefill"),
    ],
)
def test_phase_without_gradients(args: tuple[Any, ...], kwargs: dict[str, Any], phase: str) -> None:
    with torch.no_grad():
        assert generation_phase(args, kwargs) == phase


def test_with_gradients_a_cache_is_no_generation() -> None:
    assert generation_phase((TOKEN,), {"past_key_values": CACHE}) == "forward"


def test_in_backward() -> None:
    seen = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            seen.append(in_backward())
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            seen.append(in_backward())
            return gradient

    Probe.apply(torch.ones(1, requires_grad=True)).backward()
    assert seen == [False, True]
