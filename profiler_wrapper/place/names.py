"""Names of phases, and of the reasons why something has no layer."""

from __future__ import annotations

from typing import Literal, get_args

# What a loop is doing while something happens; verify: the model looks at several tokens that an assistant proposed.
Phase = Literal[
    "forward", "prefill", "decode", "verify", "backward", "recompute", "accumulate_grad", "optimizer", "other"
]  # fmt: skip


PHASES: tuple[Phase, ...] = get_args(Phase)


GENERATING_PHASES: tuple[Phase, ...] = ("prefill", "decode", "verify")


FORWARD_PHASES: tuple[Phase, ...] = ("forward", *GENERATING_PHASES)


# Why device time has no layer.
LAUNCHED_BEFORE = "launched before the trace"


NO_LAUNCH = "no launch found"


NO_FORWARD_LINK = "no forward link"


NO_LAYERS = "a trace without layers"


GRAPH_REPLAY = "graph replay"


WITHOUT_OP = (LAUNCHED_BEFORE, NO_LAUNCH, GRAPH_REPLAY)  # so nothing tells their FLOPs and bytes
