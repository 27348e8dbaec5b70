"""What an operation's name says of its place in the dependencies."""

from __future__ import annotations

import pytest

from profiler_wrapper.ranks.operations import role_of


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("forward-send", [("send", "forward")]),
        ("backward_recv", [("receive", "backward")]),
        ("send_forward", [("send", "forward")]),
        ("fwd irecv", [("receive", "forward")]),
        ("forward-send-backward-recv", [("send", "forward"), ("receive", "backward")]),
        ("send_backward_recv_forward", [("send", "backward"), ("receive", "forward")]),
        ("nccl:send", [("send", "")]),
    ],
)
def test_transfers(name: str, parts: list[tuple[str, str]]) -> None:
    role = role_of(name, "communication")
    assert role.what == "transfer"
    assert list(role.parts) == parts
    assert role.meets


@pytest.mark.parametrize(
    ("name", "scope"),
    [
        ("grads-reduce-scatter", "replicas"),
        ("params_all_gather", "replicas"),
        ("separate-grads-all-reduce", "replicas"),
        ("nccl:all_reduce", "replicas"),
        ("embedding-grads-all-reduce", "ends"),
        ("optimizer-clip-main-grad", "all"),
        ("grad norm all reduce", "all"),
        ("layernorm-grads-all-reduce", "tensor"),
    ],
)
def test_collectives(name: str, scope: str) -> None:
    role = role_of(name, "communication")
    assert (role.what, role.scope) == ("collective", scope)


def test_which_collectives_may_run_beside_compute() -> None:
    assert role_of("params-all-gather", "communication").gathers
    assert role_of("grads-reduce-scatter", "communication").reduces
    assert not role_of("separate-grads-all-reduce", "communication").reduces
    assert not role_of("params-all-gather", "communication").reduces


def test_the_rest() -> None:
    assert role_of("forward-compute", "forward").direction == "forward"
    assert role_of("anything", "backward").what == "compute"
    assert role_of("backward-weight", "backward").what == "local"  # nobody waits for it
    assert role_of("recompute", "recompute").what == "local"
    assert role_of("optimizer-clip-main-grad", "optimizer").what == "collective"  # Megatron's, with its all-reduce
    assert role_of("clip_grad_norm", "optimizer").what == "local"
    assert role_of("gc", "gc").what == "local"
    assert not role_of("optimizer", "optimizer").meets
