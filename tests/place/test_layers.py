"""The tree of layers of hand-written recordings: from marks, module events and named blocks."""

from __future__ import annotations

from typing import Any

import pytest

from profiler_wrapper.place.layers import Layer, LayerTree
from profiler_wrapper.place.placed import place_events
from recordings import Trace


def tree_of(trace: Trace, *, described: list[dict[str, Any]] | None = None) -> LayerTree:
    """The tree, which is the same in whatever order a file has the events."""
    trace.op("aten::mm", 1, 2)  # something that takes time
    tree = place_events(trace.recording(), run={"layers": described or ()}).tree
    for other in trace.rotations():
        assert place_events(other.recording(), run={"layers": described or ()}).tree.layers == tree.layers
    return tree


def layers(trace: Trace, **more: Any) -> dict[str, Layer]:
    tree = tree_of(trace, **more)
    found = {layer.name: layer for layer in tree.layers}
    assert len(found) == len(tree.layers), "two layers of one name"
    return found


def parents(trace: Trace) -> dict[str, str | None]:
    tree = tree_of(trace)
    return {layer.name: tree.layers[layer.parent].name if layer.parent >= 0 else None for layer in tree.layers}


# --- marks ---


def test_one_root_lends_its_name_to_no_layer() -> None:
    trace = Trace().mark(".", 0, 100).mark("a", 10, 50).mark("a.b.c", 20, 30)
    assert parents(trace) == {"Net": None, "a": "Net", "a.b.c": "a"}


def test_an_anonymous_root_without_layers_takes_no_prefix_and_gives_none() -> None:
    trace = Trace().mark(".", 0, 100).mark("a", 10, 50).mark(".", 110, 120, root="Loss#0")
    assert parents(trace) == {"Net": None, "a": "Net", "Loss": None}


def test_several_roots_with_layers_prefix_them() -> None:
    trace = (
        Trace().mark(".", 0, 100).mark("a", 10, 50).mark(".", 100, 200, root="Vae#0").mark("a", 110, 150, root="Vae#0")
    )
    assert parents(trace) == {"Net": None, "Net.a": "Net", "Vae": None, "Vae.a": "Vae"}


def test_named_roots_start_their_paths_already() -> None:
    trace = Trace().mark(".", 0, 99, root="vae").mark("vae.a", 10, 50, root="vae")
    trace.mark(".", 100, 200, root="dit#big").mark("dit#big.a", 110, 150, root="dit#big")
    assert parents(trace) == {"vae": None, "vae.a": "vae", "dit#big": None, "dit#big.a": "dit#big"}


def test_a_loop_over_blocks_makes_each_of_them_a_numbered_block() -> None:
    trace = Trace()
    for i in range(42):
        trace.mark(".", 100 * i, 100 * i + 90, root=f"Block#{i}", class_name="Block")
        trace.mark("attn", 100 * i + 10, 100 * i + 40, root=f"Block#{i}", kind="attention")
    found = layers(trace)
    assert len(found) == 84
    assert [found[f"Block_{i}"].kind for i in range(42)] == ["block"] * 42
    assert found["Block_41.attn"].block == found["Block_41.attn"].parent
    assert found["Block_7"].parent == -1


def test_a_loop_over_modules_without_layers_makes_no_blocks() -> None:
    trace = Trace().mark(".", 0, 9, root="Linear#0", kind="linear").mark(".", 10, 19, root="Linear#1", kind="linear")
    assert {name: layer.kind for name, layer in layers(trace).items()} == {"Linear_0": "linear", "Linear_1": "linear"}


def test_raw_names_and_model_order_come_from_the_description() -> None:
    trace = Trace().mark(".", 0, 100).mark("b", 10, 20).mark("a", 30, 40).mark("late", 50, 60)
    described = [
        {"root": "Net#0", "path": ".", "raw_name": "module"},
        {"root": "Net#0", "path": "a", "raw_name": "module.a"},
        {"root": "Net#0", "path": "b", "raw_name": "module.b"},
    ]
    found = layers(trace, described=described)
    assert [layer.name for layer in sorted(found.values(), key=lambda x: x.order)] == ["Net", "a", "b", "late"]
    assert (found["a"].raw_name, found["late"].raw_name) == ("module.a", "late")


def test_layers_that_are_described_and_never_called_are_told_of_roots_that_were() -> None:
    described = [{"root": "Net#0", "path": path} for path in (".", "a", "a.unused", "unused")]
    described.append({"root": "Other#0", "path": "b"})
    tree = tree_of(Trace().mark(".", 0, 100).mark("a", 10, 20), described=described)
    assert [layer.name for layer in tree.layers] == ["Net", "a"]
    assert tree.not_entered == ("a.unused", "unused")


def test_flags_of_marks() -> None:
    trace = Trace().mark("a", 0, 9).mark("a", 10, 19, flags=("compiled",)).mark("b", 20, 29, flags=("shared",))
    found = layers(trace)
    assert found["a"].compiled and not found["b"].compiled  # compiled after its first call
    assert found["b"].shared and not found["a"].shared


def test_blocks_are_the_outermost_on_the_way_down() -> None:
    trace = Trace().mark("h.0", 0, 90, kind="block").mark("h.0.inner", 10, 50, kind="block").mark("h.0.inner.x", 20, 30)
    found = layers(trace)
    assert {found[name].block for name in found} == {0}
    assert [found[name].depth for name in ("h.0", "h.0.inner", "h.0.inner.x")] == [0, 1, 2]


def test_marks_win_over_module_events_and_named_blocks() -> None:
    trace = Trace().module("Net_0", 0, 100).annotation("my block", 5, 90).mark("a", 10, 50)
    tree = tree_of(trace)
    assert (tree.source, [layer.name for layer in tree.layers]) == ("marks", ["a"])


# --- module events ---


def test_modules_are_numbered_among_like_siblings_in_order_of_first_call() -> None:
    trace = (
        Trace()
        .module("Model_0", 0, 1000)
        .module("Block_9", 10, 100)
        .module("Linear_4", 20, 30)
        .module("Linear_3", 40, 50)
        .module("Block_2", 110, 200)
        .module("Linear_8", 120, 130)
        .module("Norm_1", 210, 220)
    )
    assert parents(trace) == {
        "Model": None,
        "Model.Block_0": "Model",
        "Model.Block_0.Linear_0": "Model.Block_0",
        "Model.Block_0.Linear_1": "Model.Block_0",
        "Model.Block_1": "Model",
        "Model.Block_1.Linear": "Model.Block_1",
        "Model.Norm": "Model",
    }


def test_a_shared_module_goes_under_its_first_parent() -> None:
    trace = (
        Trace().module("A_0", 0, 100).module("Shared_0", 10, 20).module("B_0", 200, 300).module("Shared_0", 210, 220)
    )
    tree = tree_of(trace)
    assert [layer.name for layer in tree.layers] == ["A", "A.Shared", "B"]
    assert [tree.layers[layer].name for layer in tree.layer_of_span.values()] == ["A", "A.Shared", "B", "A.Shared"]


@pytest.mark.parametrize("inner_first", [False, True])
def test_a_child_that_starts_with_its_parent(inner_first: bool) -> None:
    written = [("Outer_0", 0, 100), ("Inner_0", 0, 50)]
    trace = Trace()
    for instance, start, end in reversed(written) if inner_first else written:
        trace.module(instance, start, end)
    assert parents(trace) == {"Outer": None, "Outer.Inner": "Outer"}


def siblings_with_layers(class_name: str) -> dict[str, Layer]:
    """Three modules of a class, two alike in each of them, and one in each of those."""
    trace = Trace().module("Model_0", 0, 1000)
    for i in range(3):
        trace.module(f"{class_name}_{i}", 100 * i, 100 * i + 90)
        for j in range(2):
            trace.module(f"Inner_{2 * i + j}", 100 * i + 40 * j + 1, 100 * i + 40 * j + 30)
            trace.module(f"Linear_{2 * i + j}", 100 * i + 40 * j + 2, 100 * i + 40 * j + 20)
    return layers(trace)


def test_like_siblings_with_layers_are_blocks() -> None:
    found = siblings_with_layers("Block")
    blocks = [name for name, layer in found.items() if layer.kind == "block"]
    assert blocks == ["Model.Block_0", "Model.Block_1", "Model.Block_2"]
    assert found["Model.Block_1.Inner_0.Linear"].block == list(found).index("Model.Block_1")
    assert found["Model"].block == -1  # in none


def test_stages_hold_the_blocks() -> None:
    blocks = [name for name, layer in siblings_with_layers("SwinStage").items() if layer.kind == "block"]
    assert blocks == [f"Model.SwinStage_{i}.Inner_{j}" for i in range(3) for j in range(2)]


def test_a_module_that_is_alone_in_its_kind_is_no_block() -> None:
    trace = Trace().module("Model_0", 0, 100).module("Encoder_0", 10, 90).module("Linear_0", 20, 30)
    assert {layer.kind for layer in layers(trace).values()}.isdisjoint({"block"})


@pytest.mark.parametrize(("instance", "name"), [("Conv_2_0", "Conv_2"), ("My_Net", "My_Net"), ("Net", "Net")])
def test_the_number_at_the_end_of_an_instance_is_no_part_of_its_class(instance: str, name: str) -> None:
    found = layers(Trace().module(instance, 0, 10))
    assert list(found) == [name]
    assert (found[name].compiled, found[name].shared) == (False, False)  # nothing in the trace says so


# --- named blocks ---


def test_named_blocks_nest_and_repeat() -> None:
    trace = Trace().annotation("ProfilerStep#1", 0, 1000)
    for start in (0, 500):
        trace.annotation("spatial", start + 10, start + 100).annotation("attn", start + 20, start + 50)
    trace.annotation("attn", 300, 310)
    tree = tree_of(trace)
    assert tree.source == "named blocks"
    assert [layer.name for layer in tree.layers] == ["spatial", "spatial.attn", "attn"]


def test_a_named_block_straight_within_itself_is_one() -> None:
    trace = Trace().annotation("spatial", 0, 100).annotation("spatial", 10, 90).annotation("attn", 20, 50)
    tree = tree_of(trace)
    assert [layer.name for layer in tree.layers] == ["spatial", "spatial.attn"]
    assert list(tree.layer_of_span.values()) == [0, 0, 1]


@pytest.mark.parametrize(
    "name",
    [
        "ProfilerStep#7",
        "Optimizer.step#AdamW.step",
        "Optimizer.zero_grad#AdamW.zero_grad",
        "nccl:all_reduce",
        "FSDP::all_gather (layers.0)",
        "DistributedDataParallel.forward",
        "DataParallel.forward",
        "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__",
        "## Call CompiledFxGraph fabc ##",
        "Torch-Compiled Region: 0/0",
        "FullyShardedDataParallel._pre_forward",
    ],
)
def test_annotations_of_torch_are_no_layers(name: str) -> None:
    tree = tree_of(Trace().annotation(name, 0, 100))
    assert (tree.source, tree.layers) == ("none", [])


@pytest.mark.parametrize("name", ["spatial block", "DDPM.step", "## forward ##", "decode"])
def test_what_a_user_named_is_a_layer(name: str) -> None:
    assert list(layers(Trace().annotation(name, 0, 100))) == [name]


# --- common ancestors ---


def test_common_ancestor() -> None:
    trace = Trace().mark(".", 0, 100).mark("a", 1, 2).mark("a.b", 3, 4).mark("a.c", 5, 6).mark("d", 7, 8)
    trace.mark(".", 200, 300, root="other")
    tree = tree_of(trace)
    at = tree.by_name()
    assert tree.common_ancestor([at["a.b"], at["a.c"]]) == at["a"]
    assert tree.common_ancestor([at["a.b"], at["a"]]) == at["a"]
    assert tree.common_ancestor([at["a.b"], at["d"]]) == at["Net"]
    assert tree.common_ancestor([at["a.b"]]) == at["a.b"]
    assert tree.common_ancestor([at["a.b"], at["other"]]) == -1
    assert tree.common_ancestor([]) == -1
