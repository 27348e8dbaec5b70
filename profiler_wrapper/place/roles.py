"""Tell by its name what an event means to attribution."""

from __future__ import annotations

import re
from enum import IntEnum

from profiler_wrapper.trace.marks import is_server_step


class Role(IntEnum):
    """What an event means to attribution, by its name."""

    PLAIN = 0
    NODE = 1  # autograd::engine::evaluate_function: X
    ACCUMULATE = 2  # ... AccumulateGrad
    GRAPH_ROOT = 3
    CHECKPOINT_BACKWARD = 4
    FSDP = 5
    OPTIMIZER = 6
    COLLECTIVE = 7
    DATA_LOADING = 8
    SERVER_STEP = 9


OPS_OF_SAVING = frozenset({"aten::detach", "detach", "aten::alias"})  # what autograd calls to keep a tensor


NODES = (Role.NODE, Role.ACCUMULATE, Role.GRAPH_ROOT)


_NODE_PREFIX = "autograd::engine::evaluate_function: "


_COLLECTIVE_NAME = re.compile(
    r"(nccl|gloo|mpi|ucc|xccl|hccl|mccl|c10d|c10d_functional|_c10d_functional):|record_param_comms"
)


def role_of(name: str) -> Role:
    """The role of an event of this name."""
    if name.startswith(_NODE_PREFIX):
        if name.endswith("AccumulateGrad"):
            return Role.ACCUMULATE
        return Role.GRAPH_ROOT if name.endswith("GraphRoot") else Role.NODE
    if name == "CheckpointFunctionBackward":
        return Role.CHECKPOINT_BACKWARD
    if name.startswith("FSDP::"):
        return Role.FSDP
    if name.startswith("Optimizer."):
        return Role.OPTIMIZER
    if name.startswith("enumerate("):
        return Role.DATA_LOADING
    if is_server_step(name):
        return Role.SERVER_STEP
    return Role.COLLECTIVE if _COLLECTIVE_NAME.match(name) else Role.PLAIN
