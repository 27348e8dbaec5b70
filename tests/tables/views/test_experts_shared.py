"""Experts, routers, adapters and bases that several layers call: each has what its own calls of them take."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from invariants import broken
from profiler_wrapper import ProfilerWrapper
from profiler_wrapper.tables.model import Analysis
from profiling import result_of
from recordings import AUTOGRAD, Trace, analyse

SHARED = ("shared",)


def called(trace: Trace, name: str, kind: str, begin: int, time_ns: int, op: str = "aten::mm", **fields: int) -> Trace:
    """A call of a layer that does one op."""
    flags = SHARED if name.startswith("a.") else ()
    trace.mark(name, begin, begin + 90, kind=kind, flags=flags)
    return trace.op(op, begin + 1, begin + 1 + time_ns, **fields)


def mixtures(*of_b: tuple[str, int]) -> Trace:
    """`a` with a router, two experts and one for all tokens; `b` calls what is told."""
    trace = Trace().mark(".", 0, 2000).mark("a", 10, 500).mark("b", 1000, 1900)
    for place, (name, time_ns) in enumerate((("gate", 10), ("experts.0", 40), ("experts.1", 6), ("shared_expert", 7))):
        called(trace, f"a.{name}", "router" if name == "gate" else "expert", 20 + 100 * place, time_ns)
    for place, (name, time_ns) in enumerate(of_b):
        kind = "router" if name.endswith("gate") else "expert"
        called(trace, name, kind, 1010 + 100 * place, time_ns, sequence=place, forward_thread=0)
    return trace


def layers_of_experts(result: Analysis) -> dict[str | None, tuple[object, ...]]:
    return {
        row.layer: (row.router, row.router_time_ns, row.experts, row.experts_time_ns, row.shared_time_ns)
        for row in result.expert_layers
    }


OF_A = ("a.gate", 10, 2, 46, 7)


def test_what_two_layers_share_counts_for_the_one_that_called_it() -> None:
    shared = mixtures(("a.gate", 3), ("b.experts.0", 5), ("b.experts.1", 1), ("a.shared_expert", 8))
    result = analyse(shared.recording())
    assert layers_of_experts(result) == {"a.experts": OF_A, "b.experts": ("a.gate", 3, 2, 6, 8)}
    assert broken(result) == []


def test_a_list_that_two_layers_share_has_a_row_for_each() -> None:
    result = analyse(mixtures(("b.gate", 3), ("a.experts.1", 5), ("a.experts.0", 20)).recording())
    assert layers_of_experts(result) == {"a.experts": OF_A, "b.experts": ("b.gate", 3, 2, 25, None)}


def test_an_expert_that_two_lists_share_counts_in_both_with_its_backward() -> None:
    trace = mixtures(("b.gate", 3), ("b.experts.0", 5), ("a.experts.0", 20))
    trace.node("MmBackward0", 1950, 1959, number=2).arrow(1211, 1950)
    result = analyse(trace.recording())
    assert layers_of_experts(result) == {"a.experts": OF_A, "b.experts": ("b.gate", 3, 2, 5 + 20 + 9, None)}
    assert broken(result) == []


def test_a_mixture_that_two_parents_share_is_one_with_the_sum() -> None:
    trace = mixtures().mark("a", 1010, 1500, flags=SHARED)
    called(trace, "a.gate", "router", 1020, 2)
    called(trace, "a.experts.1", "expert", 1120, 3)
    result = analyse(trace.recording())
    assert layers_of_experts(result) == {"a.experts": ("a.gate", 12, 2, 49, 7)}


def test_a_module_of_all_experts_that_two_layers_share_has_a_row_for_each_with_its_all_to_all() -> None:
    trace = Trace().mark(".", 0, 900)
    for layer, begin, exchange in (("a", 10, 30), ("b", 400, 8)):
        trace.mark(layer, begin, begin + 300)
        called(trace, f"{layer}.gate", "router", begin + 10, 4)
        called(trace, "a.experts", "expert", begin + 110, exchange, op="c10d::alltoall_base_")
    result = analyse(trace.recording())
    times = {row.layer: (row.router, row.experts_time_ns, row.all_to_all_time_ns) for row in result.expert_layers}
    assert times == {"a.experts": ("a.gate", 30, 30), "b.experts": ("b.gate", 8, 8)}


def adapted(*calls: tuple[str, str, int]) -> Trace:
    """`q` and `v` call what is told, and add for 2 ns each."""
    trace = Trace().mark(".", 0, 2000)
    for place, layer in enumerate(("q", "v")):
        begin = 10 + 1000 * place
        trace.mark(layer, begin, begin + 900).op("aten::add", begin + 800, begin + 802)
        for at, (_, name, time_ns) in enumerate([one for one in calls if one[0] == layer]):
            kind = "other" if name.endswith("base_layer") else "adapter"
            start = begin + 10 + 100 * at
            trace.mark(name, start, start + 90, kind=kind, flags=SHARED)
            trace.op("aten::mm", start + 1, start + 1 + time_ns, sequence=10 * place + at, forward_thread=0)
    return trace


def adapters_of(result: Analysis) -> dict[str, tuple[object, ...]]:
    return {row.layer: (row.adapters, row.base_time_ns, row.adapter_time_ns) for row in result.adapters}


def test_an_adapter_that_two_layers_share_counts_for_the_one_that_called_it() -> None:
    trace = adapted(("q", "q.base_layer", 40), ("q", "q.lora_A", 5), ("v", "v.base_layer", 30), ("v", "q.lora_A", 7))
    trace.node("MmBackward0", 1950, 1959, number=11, thread=AUTOGRAD).arrow(1121, 1950)
    assert adapters_of(analyse(trace.recording())) == {
        "q": (("q.lora_A",), 40, 5 + 2), "v": (("q.lora_A",), 30, 7 + 9 + 2),
    }  # fmt: skip


def test_a_base_that_two_layers_share_counts_for_the_one_that_called_it() -> None:
    trace = adapted(("q", "q.base_layer", 40), ("q", "q.lora_A", 5), ("v", "q.base_layer", 30), ("v", "v.lora_A", 7))
    assert adapters_of(analyse(trace.recording())) == {
        "q": (("q.lora_A",), 40, 5 + 2), "v": (("v.lora_A",), 30, 7 + 2),
    }  # fmt: skip


def test_without_a_base_the_layer_itself_is_all_that_is_in_none_of_the_adapters_that_it_calls() -> None:
    assert adapters_of(analyse(adapted(("q", "q.lora_A", 5), ("v", "q.lora_A", 7)).recording())) == {
        "q": (("q.lora_A",), 2, 5), "v": (("q.lora_A",), 2, 7),
    }  # fmt: skip


# --- live: tokens and FLOPs ---

WIDTH, TOKENS = 16, 64


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x)[:, :WIDTH]


class Mixture(nn.Module):
    """Gives the first tokens to its first expert, and so on."""

    def __init__(self, experts: nn.ModuleList, *tokens: int) -> None:
        super().__init__()
        self.gate, self.experts, self.tokens = nn.Linear(WIDTH, len(experts)), experts, tokens

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = zip(self.experts, x.split(self.tokens), strict=True)
        return self.gate(x).sum(-1, keepdim=True) * torch.cat([expert(part) for expert, part in parts if len(part)])


def one_list() -> nn.Module:
    experts = nn.ModuleList([Expert(), Expert(), Expert()])
    return nn.Sequential(Mixture(experts, 48, 16, 0), Mixture(experts, 0, 8, 56))


def one_expert() -> nn.Module:
    shared = Expert()
    lists = nn.ModuleList([shared, Expert()]), nn.ModuleList([Expert(), shared])
    return nn.Sequential(Mixture(lists[0], 48, 16), Mixture(lists[1], 8, 56))


@pytest.mark.parametrize(
    ("build", "wanted"), [(one_list, [(48, 16, 0), (0, 8, 56)]), (one_expert, [(48, 16), (8, 56)])]
)
def test_tokens_are_those_of_the_layer_that_called(
    build: Callable[[], nn.Module], wanted: list[tuple[int, ...]], tmp_path: Path
) -> None:
    model, x = build(), torch.randn(TOKENS, WIDTH, requires_grad=True)
    with ProfilerWrapper(model, layers="*", files=("result",), output_dir=tmp_path) as prof:
        for _ in range(3):
            model(x).sum().backward()
            prof.step()
    result = result_of(prof)
    tokens = {(row.layer, row.expert): row.tokens_per_step for row in result.experts}
    assert tokens == {(f"{i}.experts", at): count for i, own in enumerate(wanted) for at, count in enumerate(own)}
    flops_of_token = 3 * 2 * WIDTH * 2 * WIDTH  # backward multiplies twice
    assert all(row.flops_per_step == flops_of_token * (row.tokens_per_step or 0) for row in result.experts)
    balance = {row.layer: row.balance for row in result.expert_layers}
    assert balance == {f"{i}.experts": max(own) * len(own) / TOKENS for i, own in enumerate(wanted)}
