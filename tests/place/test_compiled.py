"""Calls of compiled graphs in hand-made recordings: which event, and which gap, belongs to which layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from invariants import broken
from profiler_wrapper.place import compiled as compiled_graphs
from profiler_wrapper.place import compiled as compiled_places
from profiler_wrapper.place import compiled as compiled_regions
from profiler_wrapper.reports.table import console_table
from profiler_wrapper.tables.model import Analysis
from profiler_wrapper.trace.recording import Recording
from recordings import Trace, analyse

CALL = "## Call CompiledFxGraph key ##"
MODULES = ["layers.0", "layers.0.mlp", "layers.0.mlp.up", "layers.0.norm"]  # of a graph, by number
UP, MLP, NORM, OWN = [2], [1], [3], [0]


def layer(path: str, class_name: str = "Layer", kind: str = "other") -> dict[str, Any]:
    return {"root": "Net#0", "path": path, "raw_name": path, "class_name": class_name, "kind": kind, "shared": False}


LAYERS = [layer(".", "Net"), layer("layers.0", "Block", "block"), layer("layers.0.mlp"), layer("layers.0.norm")]


def run_of(*kernels: list[Any], inside: Any = None) -> dict[str, Any]:
    """What run.json says: kernels as [name, is_extern, phase, modules]."""
    graph = {"kernels": list(kernels), "inside": [["Net#0", "layers.0", MODULES]] if inside is None else inside}
    return {"layers": LAYERS, "compiled": {"key": graph}}


def extern(name: str, modules: list[int], phase: str = "forward") -> list[Any]:
    return [name, True, phase, modules]


def generated(name: str, modules: list[int], phase: str = "forward") -> list[Any]:
    return [name, False, phase, modules]


def compiled_block(*ops: tuple[str, int, int]) -> Trace:
    """A block from 0 to 1000 whose compiled code runs from 100 to 900."""
    trace = Trace().mark("layers.0", 0, 1000, kind="block", class_name="Block", flags=("compiled",))
    trace.op(CALL, 100, 900)
    for name, start, end in ops:
        trace.op(name, start, end)
    return trace


def self_times(analysis: Analysis) -> dict[tuple[str, str], int]:
    times = {(row.layer, row.phase): row.self_time_ns for row in analysis.layers}
    assert sum(times.values()) + analysis.time.unattributed_ns == analysis.time.total_ns
    return times


def said(analysis: Analysis) -> list[str]:
    return [warning for warning in analysis.warnings if "compiled code" in warning]


KERNELS = [
    generated("cpp_fused_norm_0", NORM),
    extern("extern_kernels.mm", UP),
    generated("cpp_fused_add_1", [0, 1]),
    extern("torch.ops.aten.cumsum.default", MLP),
]
OPS = [("aten::mm", 300, 500), ("aten::cumsum", 700, 800)]


def test_events_and_gaps_go_to_the_layers_of_their_kernels() -> None:
    analysis = analyse(compiled_block(*OPS).recording(), run=run_of(*KERNELS))
    assert self_times(analysis) == {
        ("layers.0", "forward"): 200 + 100,  # the kernel of two layers, and what comes after the last kernel
        ("layers.0.norm", "forward"): 200,
        ("layers.0.mlp", "forward"): 200 + 100,  # of the Linear, which is no row, and its own
    }
    assert said(analysis) == [
        "in compiled code a kernel that serves several layers is charged to the layer that holds them all, "
        "as how it divides is not known: fused_us of each of them is the time of such kernels, not in its time_us"
    ]


def test_rows_look_like_layers_that_were_never_entered() -> None:
    analysis = analyse(compiled_block(*OPS).recording(), run=run_of(*KERNELS))
    (row,) = analysis.rows("layers.0.mlp")
    assert (row.calls, row.compiled, row.parent, row.block, row.order) == (None, True, "layers.0", "layers.0", 2)
    assert analysis.rows("layers.0")[0].time_ns == 800
    assert "compiled" not in analysis.run


def fused_times(analysis: Analysis) -> dict[str, int]:
    return {row.layer: row.fused_ns for row in analysis.layers}


def test_layers_say_what_they_share() -> None:
    kernels = [*KERNELS[:2], generated("cpp_fused_add_norm_1", [1, 3]), KERNELS[3]]
    analysis = analyse(compiled_block(*OPS).recording(), run=run_of(*kernels))
    assert fused_times(analysis) == {"layers.0": 0, "layers.0.mlp": 200, "layers.0.norm": 200}
    assert self_times(analysis)["layers.0", "forward"] == 200 + 100
    assert broken(analysis) == []
    rows = [replace(row, fused_ns=901) if row.layer == "layers.0.norm" else row for row in analysis.layers]
    assert len(broken(replace(analysis, layers=tuple(rows)))) == 1


def test_a_layer_without_a_kernel_of_its_own_has_a_row() -> None:
    kernels = [generated("cpp_fused_norm_mlp_0", [3, 2]), extern("extern_kernels.mm", UP), *KERNELS[2:]]
    analysis = analyse(compiled_block(*OPS).recording(), run=run_of(*kernels))
    (row,) = analysis.rows("layers.0.norm")
    assert (row.phase, row.time_ns, row.self_time_ns, row.fused_ns, row.calls) == ("forward", 0, 0, 200, None)
    assert "norm [compiled, fused]" in console_table(analysis)


def test_a_layer_of_which_no_kernel_is_left_has_a_row() -> None:
    kernels = [extern("extern_kernels.mm", UP), extern("torch.ops.aten.cumsum.default", MLP)]
    (row,) = analyse(compiled_block(*OPS).recording(), run=run_of(*kernels)).rows("layers.0.norm")
    assert (row.phase, row.time_ns, row.fused_ns, row.compiled) == ("forward", 0, 0, True)


def test_total_and_attribution_are_those_without_the_graphs() -> None:
    without = analyse(compiled_block(*OPS).recording(), run={"layers": LAYERS})
    with_them = analyse(compiled_block(*OPS).recording(), run=run_of(*KERNELS))
    assert with_them.time == without.time
    assert self_times(without) == {("layers.0", "forward"): 800}
    assert not said(without)


def test_what_only_looks_at_memory_is_no_kernel() -> None:
    ops = [("aten::mm", 300, 500), ("aten::as_strided", 540, 560), ("aten::cumsum", 700, 800)]
    times = self_times(analyse(compiled_block(*ops).recording(), run=run_of(*KERNELS)))
    assert times == {
        ("layers.0", "forward"): 40 + 20 + 140 + 100,
        ("layers.0.norm", "forward"): 200,
        ("layers.0.mlp", "forward"): 300,
    }


def test_several_kernels_in_one_gap_share_it_in_the_layer_above_them() -> None:
    kernels = [extern("extern_kernels.mm", UP), generated("cpp_a", NORM), generated("cpp_b", MLP)]
    times = self_times(analyse(compiled_block(("aten::mm", 100, 300)).recording(), run=run_of(*kernels)))
    assert times == {("layers.0", "forward"): 600, ("layers.0.mlp", "forward"): 200, ("layers.0.norm", "forward"): 0}
    kernels = [extern("extern_kernels.mm", NORM), generated("cpp_a", UP), generated("cpp_b", MLP)]
    times = self_times(analyse(compiled_block(("aten::mm", 100, 300)).recording(), run=run_of(*kernels)))
    assert times[("layers.0.mlp", "forward")] == 600


def test_generated_kernels_that_are_events_leave_the_gaps_alone() -> None:
    ops = [("graph_0_cpp_fused_norm_0", 150, 250), *OPS, ("aten::empty_strided", 820, 830)]
    ops.insert(2, ("cpp_fused_add_1", 550, 650))
    times = self_times(analyse(compiled_block(*sorted(ops, key=lambda op: op[1])).recording(), run=run_of(*KERNELS)))
    assert times[("layers.0.norm", "forward")] == 100
    assert times[("layers.0.mlp", "forward")] == 300
    assert times[("layers.0", "forward")] == 400


@pytest.mark.parametrize(
    "ops",
    [
        [("aten::mm", 300, 500)],
        [("aten::mm", 300, 500), ("aten::cumsum", 600, 700), ("aten::mm", 750, 800)],
        [("aten::cumsum", 300, 500), ("aten::mm", 700, 800)],
        [("aten::mm", 300, 500), ("aten::bmm", 700, 800)],
        [],
    ],
)
def test_other_calls_than_generated_leave_the_block_whole(ops: list[tuple[str, int, int]]) -> None:
    analysis = analyse(compiled_block(*ops).recording(), run=run_of(*KERNELS))
    assert self_times(analysis) == {("layers.0", "forward"): 800}
    assert said(analysis) == [
        f"the layers inside compiled code have no rows in 1 of its calls, because {compiled_regions.OTHER_CALLS}"
    ]


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        ({"layers": LAYERS, "compiled": {}}, compiled_regions.NOT_REMEMBERED),
        ({"layers": LAYERS, "compiled": {"key": "of the weather"}}, "of the weather"),
        ({"layers": LAYERS, "compiled": {"*": "of torch"}}, "of torch"),
        ({"layers": LAYERS, "compiled": {"key": {"kernels": [[1, 2]]}}}, compiled_graphs.DAMAGED),
        (run_of(extern("extern_kernels.mm", [9])), compiled_graphs.DAMAGED),
        (run_of(*KERNELS, inside=[["Net#0", "layers.1", MODULES]]), compiled_places.NO_LAYER_AROUND),
    ],
)
def test_unknown_graphs_leave_the_block_whole_and_say_why(run: dict[str, Any], reason: str) -> None:
    analysis = analyse(compiled_block(*OPS).recording(), run=run)
    assert self_times(analysis) == {("layers.0", "forward"): 800}
    assert said(analysis)[0].endswith(f"in 1 of its calls, because {reason}")


def test_graphs_without_a_key_cannot_be_told_apart() -> None:
    trace = Trace().mark("layers.0", 0, 100, flags=("compiled",)).op("## Call CompiledFxGraph None ##", 0, 100)
    analysis = analyse(trace.recording(), run=run_of(*KERNELS))
    assert said(analysis)[0].endswith(compiled_regions.WITHOUT_KEY)


def training() -> Recording:
    """A compiled block forward, then its backward in one node: a recomputed kernel, then a real one."""
    trace = Trace().mark("layers.0", 0, 100, kind="block", flags=("compiled",))
    trace.op("CompiledFunction", 0, 100, sequence=7, forward_thread=0)
    trace.node("CompiledFunctionBackward", 200, 300, number=7).arrow(0, 200)
    trace.op(CALL, 200, 300, thread=2).op("aten::mm", 210, 240, thread=2).op("aten::mm", 250, 300, thread=2)
    return trace.recording()


def test_backward_belongs_to_the_layers_whose_forward_it_is_of() -> None:
    kernels = [
        generated("cpp_norm", NORM, "recompute"),
        extern("extern_kernels.mm", UP, "recompute"),
        extern("extern_kernels.mm", NORM, "backward"),
    ]
    assert self_times(analyse(training(), run=run_of(*kernels))) == {
        ("layers.0", "forward"): 100,
        ("layers.0", "backward"): 10,  # between the products, where no kernel is known
        ("layers.0", "recompute"): 0,
        ("layers.0.norm", "recompute"): 10,
        ("layers.0.mlp", "recompute"): 30,
        ("layers.0.norm", "backward"): 50,
        ("layers.0.mlp", "backward"): 0,  # it is named, and no kernel of its own backward is left
    }


def on_a_device() -> Recording:
    """The launches of two Triton kernels and a library's, and a fill by the wrapper itself."""
    trace = compiled_block(("triton_norm_0", 200, 220), ("aten::mm", 300, 400), ("triton_add_1", 500, 520))
    trace.kernel("triton_norm_0", 1000, 1100, launched=205).kernel("gemm", 1100, 1500, launched=350)
    trace.kernel("triton_add_1", 1500, 1700, launched=510).kernel("fill", 1700, 1710, launched=700)
    return trace.recording()


def test_kernels_on_a_device_belong_to_the_layer_of_their_launch() -> None:
    kernels = [
        generated("triton_norm_0", NORM),
        extern("extern_kernels.mm", UP),
        generated("triton_add_1", [0, 1]),
    ]
    analysis = analyse(on_a_device(), run=run_of(*kernels))
    assert analysis.time_basis == "device"
    assert self_times(analysis) == {
        ("layers.0", "forward"): 210,
        ("layers.0.norm", "forward"): 100,
        ("layers.0.mlp", "forward"): 400,
    }


def test_missing_launch_on_a_device_leaves_the_block_whole() -> None:
    kernels = [generated("triton_norm_0", NORM), extern("extern_kernels.mm", UP), generated("triton_other_1", OWN)]
    assert self_times(analyse(on_a_device(), run=run_of(*kernels))) == {("layers.0", "forward"): 710}


def test_each_block_has_its_own_layers_though_the_code_is_one() -> None:
    trace = Trace()
    for k in range(2):
        trace.mark(f"layers.{k}", 1000 * k, 1000 * k + 100, kind="block", flags=("compiled",))
        trace.op(CALL, 1000 * k, 1000 * k + 100).op("aten::mm", 1000 * k, 1000 * k + 60 + k)
    layers = [layer(f"layers.{k}{below}") for k in range(2) for below in ("", ".mlp")]
    inside = [["Net#0", f"layers.{k}", [f"layers.{k}.mlp.up"]] for k in range(2)]
    run = {**run_of(extern("extern_kernels.mm", [0]), inside=inside), "layers": layers}
    times = self_times(analyse(trace.recording(), run=run))
    assert (times["layers.0.mlp", "forward"], times["layers.1.mlp", "forward"]) == (60, 61)


def test_calls_inside_a_graph_count_for_the_parent_that_made_them() -> None:
    paths = (".", "first", "first.0", "second")
    layers = [layer(path) | {"shared": path == "first.0"} for path in paths]
    kernels = [extern("extern_kernels.mm", [0]), extern("extern_kernels.mm", [1]), extern("extern_kernels.mm", [0, 1])]
    inside = [["Net#0", ".", ["first.0", "first.0", "first", "second"]]]
    trace = Trace().mark(".", 0, 1000, class_name="Net", flags=("compiled",)).op(CALL, 100, 900)
    trace.op("aten::mm", 200, 300).op("aten::mm", 400, 430).op("aten::mm", 500, 507)
    run = run_of(*kernels, inside=inside) | {"layers": layers}
    found = {}
    for callers in ([[2], [3], [], []], []):  # an older version's run does not tell
        run["compiled"]["key"]["callers"] = callers
        rows = analyse(trace.recording(), run=run).layers
        found[len(callers)] = {row.layer: (row.time_ns, row.fused_ns) for row in rows}
    assert found[4] == {"Net": (800, 0), "first": (100, 7), "first.0": (137, 0), "second": (30, 7)}
    assert found[0] == {"Net": (800, 0), "first.0": (137, 0), "first": (0, 0), "second": (0, 0)}
