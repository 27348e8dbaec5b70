"""What a training or generating loop is doing while something happens."""

from __future__ import annotations

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
