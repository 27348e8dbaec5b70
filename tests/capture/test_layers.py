"""Names, blocks and selection of layers, on models whose answer is written beside them."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from profiler_wrapper.capture.layers import (
    RootLabels,
    Selection,
    all_parameters,
    class_name,
    find_roots,
    find_stages,
    name_layers,
)
from profiler_wrapper.errors import WrongUse
from uncalled_models import Mlp, Net, OtherBlock, Runs, TinyBlock

BLOCK_ROWS = ["", ".norm", ".mlp", ".experts.0", ".experts.1"]


def rows(model: object, select: Selection = "auto") -> list[str]:
    return [layer.mark.path for root in find_roots(model) for layer in name_layers(root, select)]


def blocks(model: nn.Module) -> list[str]:
    (root,) = find_roots(model)
    return [layer.mark.path for layer in name_layers(root) if layer.mark.kind == "block"]


def test_what_only_looks_like_a_stage_of_a_pipeline_is_none() -> None:
    stage = SimpleNamespace(stage_index=1, submod=Mlp(), group_rank=0)
    assert [one.module for one in find_stages(stage)] == [stage.submod]
    assert find_stages(SimpleNamespace(stage_index=1)) == find_stages(SimpleNamespace(submod=Mlp())) == ()


def test_a_layer_that_peft_put_in_the_place_of_another_has_the_class_of_that() -> None:
    adapter = type("BaseTunerLayer", (Runs,), {"__module__": "peft.tuners.tuners_utils"})
    layer = type("Linear4bit", (adapter,), {})()
    layer.base_layer = nn.Linear(2, 2)
    assert [class_name(one) for one in (layer, Mlp())] == ["Linear", "Mlp"]


def test_all_parameters_are_those_of_the_model_each_once() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    assert [id(one) for one in all_parameters(model)] == [id(one) for one in model.parameters()]


def test_like_parts_that_are_in_no_list_are_no_blocks() -> None:
    class Towers(Runs):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = Mlp(), Mlp()

    assert blocks(Towers()) == []


def test_auto_is_all_but_what_is_deeper_than_one_level_in_a_block() -> None:
    expected = [".", "embed", *(f"layers.{k}{row}" for k in (0, 1) for row in BLOCK_ROWS), "head"]
    assert rows(Net(nn.ModuleList([TinyBlock(), TinyBlock()]))) == expected


@pytest.mark.parametrize(
    ("select", "expected"),
    [
        (0, ["."]),
        (1, [".", "embed", "layers.0", "head"]),
        (2, [".", "embed", "layers.0", *(f"layers.0{row}" for row in BLOCK_ROWS[1:]), "head"]),
        ("layers.?", [".", "layers.0"]),
        ("*.mlp", [".", "layers.0.mlp"]),
        (re.compile(r"mlp\.(up|down)"), [".", "layers.0.mlp.up", "layers.0.mlp.down"]),
        (["embed", re.compile("^head$")], [".", "embed", "head"]),
    ],
)
def test_selection(select: Selection, expected: list[str]) -> None:
    assert rows(Net(nn.ModuleList([TinyBlock()])), select) == expected


@pytest.mark.parametrize("select", [-1, True, [], [3], 1.5, None])
def test_a_selection_that_is_none(select: Any) -> None:
    with pytest.raises(WrongUse, match="name patterns"):
        rows(Net(nn.ModuleList()), select)


@pytest.mark.parametrize(
    "container",
    [
        nn.ModuleList([TinyBlock(), TinyBlock()]),
        nn.ModuleList([TinyBlock(), OtherBlock(), TinyBlock(), OtherBlock()]),
        nn.ModuleList([TinyBlock()]),
        nn.ModuleDict({"4": TinyBlock(), "5": TinyBlock()}),  # a pipeline stage keeps the global numbers
        nn.Sequential(TinyBlock(), TinyBlock()),
    ],
    ids=["list", "two kinds in turn", "single", "dict", "sequential"],
)
def test_blocks_by_structure(container: nn.Module) -> None:
    assert blocks(Net(container)) == [f"layers.{name}" for name, _ in container.named_children()]


@pytest.mark.parametrize(
    "container",
    [nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), nn.Sequential(nn.Linear(2, 2), nn.ReLU()), Mlp()],
    ids=["leaves", "sequential of leaves", "no list"],
)
def test_what_is_no_block(container: nn.Module) -> None:
    assert blocks(Net(container)) == []


def test_the_outer_of_nested_blocks_counts() -> None:
    stages = nn.ModuleList(Net(nn.ModuleList([TinyBlock(), TinyBlock()])) for _ in range(2))
    assert blocks(Net(stages)) == ["layers.0", "layers.1"]


class TinyStage(nn.Module):
    """As Swin has them: blocks of one size, and what makes the next size of it."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TinyBlock() for _ in range(blocks))
        self.downsample = nn.Linear(2, 2)


def test_stages_hold_the_blocks() -> None:
    model = Net(nn.ModuleList([TinyStage(2), TinyStage(1)]))
    assert blocks(model) == ["layers.0.blocks.0", "layers.0.blocks.1", "layers.1.blocks.0"]
    assert "layers.0.blocks.0.mlp" in rows(model)


def test_a_shared_instance_goes_by_its_first_name() -> None:
    model = Net(nn.ModuleList())
    model.tail = model.embed
    (root,) = find_roots(model)
    flags = {layer.mark.path: layer.mark.flags for layer in name_layers(root)}
    assert flags == {".": (), "embed": ("shared",), "head": ()}


def test_a_recursive_model_ends() -> None:
    model = Net(nn.ModuleList())
    model.head.add_module("up", model)
    assert rows(model) == [".", "embed", "head"]


def test_parameters_own_and_all() -> None:
    (root,) = find_roots(Mlp())
    assert [(layer.own_parameters, layer.parameters) for layer in name_layers(root)] == [
        (0, 2 * 4 + 4 + 4 * 2 + 2),
        (12, 12),
        (10, 10),
    ]


def test_lazy_parameters_count_nothing_yet() -> None:
    (root,) = find_roots(nn.LazyLinear(3))
    assert [layer.parameters for layer in name_layers(root)] == [0]


# --- roots --------------------------------------------------------------------------------------


class Pipeline:
    def __init__(self) -> None:
        self.components = {"vae": Mlp(), "tokenizer": object(), "transformer": Mlp(), "none": None}


@pytest.mark.parametrize(
    ("model", "labels"),
    [
        (Mlp(), ["Mlp#0"]),
        ([Mlp(), nn.Linear(1, 1), Mlp()], ["Mlp#0", "Linear#0", "Mlp#1"]),
        (nn.ModuleList([Mlp(), Mlp()]), ["Mlp#0", "Mlp#1"]),
        ((module for module in (Mlp(), Mlp())), ["Mlp#0", "Mlp#1"]),
        ({"vae": Mlp(), "dit": Mlp()}, ["vae", "dit"]),
        (nn.ModuleDict({"vae": Mlp()}), ["vae"]),
        (Pipeline(), ["vae", "transformer"]),
    ],
    ids=["module", "list", "ModuleList", "generator", "dict", "ModuleDict", "pipeline"],
)
def test_roots(model: object, labels: list[str]) -> None:
    assert [root.label for root in find_roots(model)] == labels


def test_the_same_module_twice_is_one_root() -> None:
    model = Mlp()
    assert [root.label for root in find_roots([model, model])] == ["Mlp#0"]


def test_a_thousand_modules_inside_each_other() -> None:
    model: nn.Module = nn.Linear(2, 2)
    for _ in range(1200):
        model = nn.Sequential(model)
    assert len(rows(model, 5000)) == 1201


def test_names_below_a_named_root_start_with_its_name() -> None:
    assert rows({"vae": Mlp()}) == [".", "vae.up", "vae.down"]
    assert rows({"vae": Mlp()}, "vae.up") == [".", "vae.up"]


@pytest.mark.parametrize("model", [3, "model", [], {}, [1], object()])
def test_what_holds_no_module(model: object) -> None:
    with pytest.raises(WrongUse, match=r"holds no torch\.nn\.Module"):
        find_roots(model)


def test_a_label_given_back_is_used_again() -> None:
    labels = RootLabels()
    assert [labels.take(Mlp()) for _ in range(3)] == ["Mlp#0", "Mlp#1", "Mlp#2"]
    labels.give_back("Mlp#1")
    assert [labels.take(Mlp()) for _ in range(2)] == ["Mlp#1", "Mlp#3"]


# --- wrappers, as classes of the same module and name -------------------------------------------


def _wrapper(qualified_name: str, attribute: str, inner: nn.Module) -> nn.Module:
    module_name, _, name = qualified_name.rpartition(".")
    wrapper = type(name, (Runs,), {"__module__": module_name})()
    wrapper.add_module(attribute, inner)
    return wrapper


def test_wrappers_known_by_class_leave_no_name() -> None:
    model = Net(nn.ModuleList([TinyBlock(), TinyBlock()]))
    plain = rows(model)
    checkpointed = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper"
    model.layers[0] = _wrapper(checkpointed, "_checkpoint_wrapped_module", model.layers[0])
    wrapped = _wrapper("torch.nn.parallel.distributed.DistributedDataParallel", "module", model)
    assert rows(wrapped) == plain
    (root,) = find_roots(wrapped)
    raw_names = {layer.mark.path: layer.raw_name for layer in name_layers(root)}
    assert root.label == "Net#0"
    assert raw_names["."] == "module"
    assert raw_names["layers.0.mlp"] == "module.layers.0._checkpoint_wrapped_module.mlp"
    assert raw_names["layers.1"] == "module.layers.1"


def test_a_wrapper_by_name_alone_is_none() -> None:
    lookalike = _wrapper("my_package.DistributedDataParallel", "module", Mlp())
    assert rows(lookalike) == [".", "module", "module.up", "module.down"]


def test_classes_made_at_run_time_go_by_the_original() -> None:
    model = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    (root,) = find_roots(model)
    assert root.label == "Linear#0"
