"""What a call of a model is for, told from its arguments alone; no tensor is ever read."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import CodeType, FrameType
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.autograd.function import Function

_CACHES = ("past_key_values", "cache_params", "inference_params", "inference_context", "kv_cache", "past")
_QUERIES = ("decoder_input_ids", "input_ids", "inputs_embeds")


def in_backward() -> bool:
    """Whether the autograd engine is running on this thread: a forward called now is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def capturing() -> bool:
    """Whether what runs on this thread is captured into a CUDA graph.

    A profiler that starts or stops waits for the device, and that breaks the capture.
    """
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


# Through these Python enters an op; the frame stays while the op runs, and calls Python back.
_ENTER_AN_OP = {OpOverload.__call__.__code__, OpOverloadPacket.__call__.__code__}
_APPLY = getattr(Function.apply, "__code__", None)  # from torch 2.15 on it is C++, and leaves no frame


def in_op() -> bool:
    """Whether an op that is written in Python is running on this thread: a custom one, an autograd function.

    Reentrant checkpointing is one. Walks the stack: some 20 us where it is 50 frames deep.
    """
    ops = _ENTER_AN_OP | (_forwards() if _APPLY is None else {_APPLY})
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code in ops:
            return True
        frame = frame.f_back
    return False


def _forwards() -> set[CodeType]:
    """The code of the forward of each autograd function that there is."""
    found, waiting = set(), [Function]
    while waiting:
        function = waiting.pop()
        waiting += function.__subclasses__()
        found.add(getattr(function.forward, "__code__", None))
    return {code for code in found if code is not None}


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
