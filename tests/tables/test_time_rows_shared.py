"""A module that several parents call: each has its own calls below it, the module one row with the sum."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from advice_facts import facts_of
from invariants import broken
from profiler_wrapper import ProfilerWrapper
from profiler_wrapper.advice.waiting import _by_layer as by_layer
from profiler_wrapper.reports.folding import attention_by_layer, layer_bars
from profiler_wrapper.reports.page import layer_view
from profiler_wrapper.reports.roofline import roofline
from profiler_wrapper.reports.table import console_table
from profiler_wrapper.tables.model import Analysis
from profiling import result_of
from recordings import AUTOGRAD, Trace, analyse

SHARED = ("shared",)


def times(result: Analysis, phase: str = "forward") -> dict[str, int]:
    return {row.layer: row.time_ns for row in result.layers if row.phase == phase and row.layer}


def two_parents() -> Trace:
    """`first` calls `first.0` for 100 ns, `second` calls it for 30."""
    trace = Trace().mark(".", 0, 1000).mark("first", 10, 300).mark("first.0", 20, 200, flags=SHARED)
    trace.op("aten::mm", 30, 130, sequence=1, forward_thread=0).mark("second", 400, 700)
    return trace.mark("first.0", 420, 600, flags=SHARED).op("aten::mm", 430, 460, sequence=2, forward_thread=0)


def test_a_call_counts_for_the_parent_that_made_it() -> None:
    result = analyse(two_parents().recording())
    assert times(result) == {"Net": 130, "first": 100, "first.0": 130, "second": 30}
    assert {row.layer for row in result.layers if row.shared} == {"first.0"}
    assert broken(result) == []


def test_backward_counts_for_the_parent_that_made_the_node() -> None:
    trace = two_parents().node("MmBackward0", 1100, 1107, number=2).node("MmBackward0", 1200, 1260, number=1)
    trace.arrow(430, 1100).arrow(30, 1200)
    assert times(analyse(trace.recording()), "backward") == {"Net": 67, "first": 60, "first.0": 67, "second": 7}


def shared_between_blocks() -> Trace:
    """Two blocks call one attention: the first for 50 ns, the second for 20 and 30."""
    trace = Trace().mark(".", 0, 1000)
    for number, begin, lengths in ((0, 10, (50,)), (1, 400, (20, 30))):
        trace.mark(f"layers.{number}", begin, begin + 300, kind="block")
        trace.mark("layers.0.attention", begin + 10, begin + 200, flags=SHARED)
        for at, length in enumerate(lengths):
            start = begin + 20 + 50 * at
            trace.op("aten::mm", start, start + 1).kernel("gemm", 2 * start, 2 * start + length, launched=start)
    return trace


def test_what_is_followed_by_block_is_of_the_block_that_called() -> None:
    series = analyse(shared_between_blocks().recording(), track=[len]).series
    assert {name: count for name, (count,) in series.items()} == {"len[layers.0]": 1, "len[layers.1]": 2}


def test_findings_name_the_block_that_called() -> None:
    facts = facts_of(shared_between_blocks().recording())
    charges = facts.found.charges
    assert by_layer(facts, np.arange(len(charges)), charges.time_ns) == {"layers.0": 50, "layers.1": 50}


@pytest.mark.parametrize("own", ["second.1", "first.0"])
def test_what_a_layer_recomputes_itself_counts_for_it_whatever_it_calls(own: str) -> None:
    """`second` is checkpointed: a layer that it calls, 10 ns of its own, another layer; `first.0` is of `first` too."""
    flags = SHARED if own == "first.0" else ()
    trace = Trace().mark(".", 0, 1000).mark("second", 400, 700).mark(own, 420, 500, flags=flags)
    trace.op("aten::mm", 430, 460, sequence=2, forward_thread=0).op("aten::mul", 510, 520, sequence=3, forward_thread=0)
    trace.mark("second.0", 530, 600).op("aten::mm", 540, 560, sequence=4, forward_thread=0)
    trace.mark("first", 800, 990).mark("first.0", 810, 890, flags=SHARED).op("aten::mm", 820, 850, sequence=9)
    trace.node("MmBackward0", 1100, 1400, number=4).arrow(540, 1100)
    trace.mark(own, 1110, 1160, thread=AUTOGRAD, flags=flags)
    trace.op("aten::mm", 1120, 1140, thread=AUTOGRAD, sequence=5, forward_thread=0)
    trace.op("aten::mul", 1170, 1180, thread=AUTOGRAD, sequence=6, forward_thread=0)
    trace.mark("second.0", 1190, 1250, thread=AUTOGRAD)
    trace.op("aten::mm", 1200, 1220, thread=AUTOGRAD, sequence=7, forward_thread=0)
    rows = {row.layer: row for row in analyse(trace.recording()).layers if row.phase == "recompute"}
    assert {layer: row.time_ns for layer, row in rows.items()} == {"Net": 120, "second": 120, own: 50, "second.0": 60}
    assert rows["second"].self_time_ns == 10


def test_what_is_recomputed_counts_for_the_parent_that_called_it_first() -> None:
    trace = two_parents().node("MmBackward0", 1100, 1200, number=2).arrow(430, 1100)
    trace.mark("first.0", 1110, 1160, thread=AUTOGRAD, flags=SHARED)
    trace.op("aten::mm", 1120, 1140, thread=AUTOGRAD, sequence=3, forward_thread=0)
    trace.op("aten::mm", 1170, 1190, thread=AUTOGRAD)
    result = analyse(trace.recording())
    assert times(result, "recompute") == {"Net": 50, "first.0": 50, "second": 50}  # of the node's time
    assert broken(result) == []


def test_a_layer_below_a_shared_one_counts_for_who_called_that() -> None:
    trace = two_parents().mark("first.0.up", 440, 455).mark("first.0.down", 140, 190).op("aten::mul", 150, 160)
    assert times(analyse(trace.recording())) == {
        "Net": 140, "first": 110, "first.0": 140, "first.0.down": 10, "first.0.up": 15, "second": 30,
    }  # fmt: skip


def test_a_child_that_another_layer_calls_is_shared_whatever_the_names_say() -> None:
    trace = Trace().mark(".", 0, 1000).mark("a", 10, 100).mark("a.child", 20, 90).op("aten::mm", 30, 50)
    trace.mark("b", 200, 300).mark("a.child", 210, 290).op("aten::mm", 220, 280)
    result = analyse(trace.recording())
    assert times(result) == {"Net": 80, "a": 20, "a.child": 80, "b": 60}
    assert {row.layer for row in result.layers if row.shared} == {"a.child"}


def test_module_events_of_another_tool_count_by_call_too() -> None:
    trace = Trace().module("Net_0", 0, 1000).module("A_0", 10, 100).module("Rotary_0", 20, 60).op("aten::mm", 30, 50)
    trace.module("B_0", 200, 300).module("Rotary_0", 210, 260).op("aten::mm", 220, 225)
    result = analyse(trace.recording())
    assert times(result) == {"Net": 25, "Net.A": 20, "Net.A.Rotary": 25, "Net.B": 5}
    assert {row.layer for row in result.layers if row.shared} == {"Net.A.Rotary"}


def test_a_layer_that_calls_itself_counts_once_in_itself() -> None:
    trace = Trace().mark(".", 0, 1000).mark("a", 10, 900).op("aten::mm", 20, 30).mark("a", 100, 800)
    trace.mark("a.b", 110, 700).mark("a", 120, 600).op("aten::mm", 130, 170)
    assert times(analyse(trace.recording())) == {"Net": 50, "a": 50, "a.b": 40}


def test_a_layer_without_a_call_of_its_own_holds_what_its_name_tells() -> None:
    trace = Trace().mark(".", 0, 1000).mark("encoder", 10, 20).mark("encoder.0", 100, 200).op("aten::mm", 110, 150)
    result = analyse(trace.recording())
    assert times(result) == {"Net": 40, "encoder": 40, "encoder.0": 40}
    assert not any(row.shared for row in result.layers)


def test_peaks_are_those_of_a_layers_own_calls() -> None:
    trace = two_parents().memory(40, 1000, address=1).memory(150, -1000, address=1)
    trace.memory(440, 5000, address=2).memory(500, -5000, address=2)
    peaks = {row.layer: row.peak_bytes for row in analyse(trace.recording()).layers if row.phase == "forward"}
    assert peaks == {"Net": 5000, "first": 1000, "first.0": 5000, "second": 5000}


def retained(trace: Trace) -> dict[str, tuple[float | None, float | None]]:
    rows = [row for row in analyse(trace.recording()).layers if row.phase == "forward"]
    return {row.layer: (row.retained_bytes, row.self_retained_bytes) for row in rows}


def test_what_a_call_keeps_counts_for_the_parent_that_made_it() -> None:
    trace = two_parents().memory(40, 1000, address=1).memory(440, 600, address=2).memory(650, 30, address=3)
    assert retained(trace) == {"Net": (1630, 0), "first": (1000, 0), "first.0": (800, 800), "second": (630, 30)}


def test_what_is_kept_outside_of_a_parents_calls_counts_where_its_time_does() -> None:
    trace = Trace().mark(".", 0, 400).mark("a", 10, 300).op("aten::mm", 20, 60).memory(50, 100, address=1)
    trace.mark("a", 500, 600).op("aten::mm", 510, 560).memory(550, 40, address=2)
    assert times(analyse(trace.recording())) == {"Net": 90, "a": 90}
    assert retained(trace) == {"Net": (140, 0), "a": (70, 70)}


def test_a_layer_that_calls_itself_keeps_once_what_it_keeps() -> None:
    trace = Trace().mark(".", 0, 1000).mark("a", 10, 900).op("aten::mm", 20, 30).memory(25, 10, address=1)
    trace.mark("a", 100, 800).memory(200, 40, address=2)
    assert retained(trace) == {"Net": (50, 0), "a": (25, 25)}


def test_the_device_is_idle_in_the_parent_that_called() -> None:
    trace = Trace().mark(".", 0, 1000).mark("first", 10, 300).mark("first.0", 20, 200, flags=SHARED)
    trace.kernel("gemm", 30, 40, launched=25).kernel("gemm", 50, 60, launched=45)
    trace.mark("second", 400, 700).mark("first.0", 420, 600, flags=SHARED)
    trace.kernel("gemm", 500, 510, launched=450).kernel("gemm", 540, 550, launched=530)
    idle = {row.layer: row.idle_ns for row in analyse(trace.recording()).layers}
    assert idle["second"] == (420 - 400) + (500 - 420) + (540 - 510)
    assert idle["first"] == (50 - 40) + (300 - 60)
    assert idle["first.0"] == (50 - 40) + (200 - 60) + (500 - 420) + (540 - 510)


def on_a_device() -> Trace:
    """`first` and `second` run a product each and call `first.0`: a product, flash attention and a collective."""
    trace = Trace().mark(".", 0, 1000)
    calls = (("first", 10, 50, 100, 30, 40), ("second", 500, 60, 10, 7, 20))
    for parent, begin, own, *below in calls:
        trace.mark(parent, begin, begin + 90).kernel("gemm", begin + 20, begin + 20 + own, launched=begin + 5)
        trace.mark("first.0", begin + 10, begin + 80, flags=SHARED)
        at = begin + 100
        for name, time_ns in zip(("gemm", "flash_fwd_kernel", "ncclDevKernel_AllReduce"), below, strict=True):
            trace.kernel(name, at, at + time_ns, launched=begin + 20 + (at - begin) // 10)
            at += time_ns
    return trace


def test_attention_by_backend_is_that_of_a_layers_own_calls() -> None:
    result = analyse(on_a_device().recording())
    by_backend = {row.layer: dict(row.attention_by_backend_ns) for row in result.layers if row.phase == "forward"}
    assert by_backend == {
        "Net": {"external": 37}, "first": {"external": 30}, "first.0": {"external": 37}, "second": {"external": 7},
    }  # fmt: skip
    assert {bar.layer: bar.attention_ms["external"] for bar in layer_bars(result)} == pytest.approx(
        {"first": 30e-6, "second": 7e-6}
    )
    rows = {row["layer"]: (row["backend"], row["attention"]) for row in layer_view(result)["total"] if row["layer"]}
    assert rows["second"] == ("external", 0.007)
    assert broken(result) == []


def test_what_a_parent_moves_itself_is_without_what_it_calls() -> None:
    result = analyse(on_a_device().recording())
    assert {row.layer: row.communication_ns for row in result.layers if row.layer} == {
        "Net": 60, "first": 40, "first.0": 60, "second": 20,
    }  # fmt: skip
    assert {point.name: point.time_ns for point in roofline(result).points} == {
        "first": 50, "second": 60, "0": 100 + 10 + 30 + 7,
    }  # fmt: skip


def test_of_an_older_version_attention_counts_where_names_say() -> None:
    result = analyse(on_a_device().recording())
    older = replace(result, layers=tuple(replace(row, attention_by_backend_ns={}) for row in result.layers))
    parents = {"first.0": "first", "first": "Net"}
    by_name = {layer: dict(times) for layer, times in attention_by_layer(older, parents).items() if times}
    assert by_name == {layer: {"external": 37} for layer in ("first.0", "first", "Net")}
    assert attention_by_layer(result, {}) == {"first.0": {"external": 37}}


def test_the_table_says_what_shared_means() -> None:
    text = console_table(analyse(two_parents().recording()))
    assert "0 [shared]" in text
    assert "[shared]: all calls of the module; a layer above it holds those that it made itself" in text
    assert len(console_table(analyse(two_parents().recording()), rows=12).splitlines()) <= 12


# --- live ---

WIDTH = 16


class Block(nn.Module):
    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.up, self.down, self.inner = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(torch.relu(self.up(x)))
        return x if self.inner is None else self.inner(x)


class Parent(nn.Module):
    def __init__(self, *blocks: nn.Module, reentrant: bool | None = None) -> None:
        super().__init__()
        self.blocks, self.reentrant = nn.ModuleList(blocks), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def shared_block(reentrant: bool | None = None) -> nn.Module:
    shared = Block()
    return nn.Sequential(Parent(shared, Block(), reentrant=reentrant), Parent(Block(), shared, reentrant=reentrant))


def shared_within_shared() -> nn.Module:
    inner = Block()
    shared = Block(inner)
    return nn.Sequential(Parent(shared, Block(inner)), Parent(Block(), shared))


def flops_by_caller(model: nn.Module, x: torch.Tensor) -> dict[str, int]:
    """FLOPs of a forward, of every module on the stack at a product."""
    names: dict[nn.Module, str] = {}
    for name, module in model.named_modules():
        names.setdefault(module, name or type(model).__name__)
    stack: list[nn.Module] = []
    flops: dict[str, int] = defaultdict(int)

    def leave(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        if isinstance(module, nn.Linear):
            for above in set(stack):
                flops[names[above]] += 2 * inputs[0].numel() * module.out_features
        stack.pop()

    handles = [one.register_forward_pre_hook(lambda module, _: stack.append(module)) for one in names]
    handles += [one.register_forward_hook(leave) for one in names]
    with torch.no_grad():
        model(x)
    for handle in handles:
        handle.remove()
    return flops


@pytest.mark.parametrize(
    "build", [shared_block, shared_within_shared, lambda: shared_block(reentrant=True)], ids=["one", "nested", "again"]
)
def test_flops_count_for_who_called(build: Callable[[], nn.Module], tmp_path: Path) -> None:
    model, x = build(), torch.randn(WIDTH, WIDTH, requires_grad=True)
    wanted = flops_by_caller(model, x)
    with ProfilerWrapper(model, layers="*", files=("result",), output_dir=tmp_path) as prof:
        for _ in range(2):
            model(x).sum().backward()
            prof.step()
    for row in result_of(prof).layers:
        if row.layer and row.phase in ("forward", "backward", "recompute"):
            times_more = 2 if row.phase == "backward" else 1
            assert row.flops_per_step == times_more * wanted[row.layer], (row.layer, row.phase)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_flops_inside_one_compiled_graph_count_for_who_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    model, x = shared_block(), torch.randn(WIDTH, WIDTH)
    wanted = flops_by_caller(model, x)
    compiled = torch.compile(model)
    with ProfilerWrapper(compiled, layers="*", files=("result",), output_dir=tmp_path) as prof:
        for _ in range(3):
            compiled(x).sum().backward()
            prof.step()
    found = {row.layer: row.flops_per_step for row in result_of(prof).layers if row.phase == "forward"}
    assert {layer: found.get(layer) for layer in wanted} == wanted
