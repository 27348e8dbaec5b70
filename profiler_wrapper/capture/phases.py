"""What a call of a model is for, told from its arguments alone; no tensor is ever read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

_CACHES = ("past_key_values", "cache_params", "inference_params", "inference_context", "kv_cache", "past")
_QUERIES = ("decoder_input_ids", "input_ids", "inputs_embeds")


def in_backward() -> bool:
    """Whether the autograd engine is running on this thread: a forward called now is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def generation_phase(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """ "prefill" or "decode" for a call with a cache and without gradients, else "forward".

    One token of query is decoding, more are a prompt.
    """
    if torch.is_grad_enabled() or not _has_cache(kwargs):
        return "forward"
    query = next((kwargs[name] for name in _QUERIES if kwargs.get(name) is not None), args[0] if args else None)
    shape: Sequence[int] = getattr(query, "shape", ())
    return "decode" if len(shape) > 1 and shape[1] == 1 else "prefill"


def _has_cache(kwargs: Mapping[str, Any]) -> bool:
    return kwargs.get("use_cache") is True or any(kwargs.get(name) is not None for name in _CACHES)
