"""What a training or generating loop is doing while something happens."""

from __future__ import annotations

import re
from typing import Literal

Phase = Literal[
    "forward",
    "prefill",
    "decode",
    "backward",
    "recompute",
    "accumulate_grad",
    "optimizer",
    "other",
]
PHASES: tuple[Phase, ...] = (
    "forward", "prefill", "decode", "backward", "recompute", "accumulate_grad", "optimizer", "other",
)  # fmt: skip
FORWARD_PHASES: tuple[Phase, ...] = ("forward", "prefill", "decode")

# What servers write around a step: vLLM `execute_context_1(888)_generation_0(0)` and `execute_new_1_cached_3`, SGLang
# `step[DECODE bs=32]`, both at once where they are built upon one another.
_SERVER_STEP = re.compile(r"(gpu_)?execute_\w*\d|step\[(?P<mode>\w+)")
_REQUESTS = re.compile(r"context_(?P<context>\d+).*?_generation_(?P<generation>\d+)")
_MODES: dict[str, Phase] = {
    "EXTEND": "prefill", "PREFILL": "prefill", "SPLIT_PREFILL": "prefill",
    "DECODE": "decode", "TARGET_VERIFY": "decode",
}  # fmt: skip


def is_server_step(name: str) -> bool:
    """Whether an annotation of this name is a step of an inference server."""
    return _SERVER_STEP.match(name) is not None


def phase_of_server_step(name: str) -> Phase | None:
    """What a server does in a step; None where it does both at once, or does not tell."""
    requests = _REQUESTS.search(name)
    if requests is not None:
        prefills, decodes = int(requests["context"]) > 0, int(requests["generation"]) > 0
        return None if prefills == decodes else "prefill" if prefills else "decode"
    step = _SERVER_STEP.match(name)
    return _MODES.get(step["mode"] or "") if step is not None else None
