"""Which layer is which, by names alone: wrappers, prefixes, roots, and the classes of a foreign trace."""

from __future__ import annotations

import pytest

from profiler_wrapper.comparison.match import folded_name, like_name, match_layers, match_names
from profiler_wrapper.tables.model import Analysis
from sample_results import Layer, analysis_of

PARTS = {"": "Block", ".self_attn": "Attention", ".mlp": "MLP", ".norm_1": "Norm", ".norm_2": "Norm"}


def named(prefix: str = "layers", *, root: str = "Net", between: tuple[tuple[str, str], ...] = ()) -> Analysis:
    """Three blocks under `prefix`, as a plain model names them."""
    layers = [Layer(root, root, self_us={"forward": 1})]
    layers += [Layer(name, class_name, self_us={"forward": 1}) for name, class_name in between]
    for i in range(3):
        for part, class_name in PARTS.items():
            layers.append(Layer(f"{prefix}.{i}{part}", class_name, self_us={"forward": 1}))
    return analysis_of(layers)


def foreign(root: str = "Net") -> Analysis:
    """The same as a trace of Python events names it: by class and number."""
    layers = [Layer(root, root, self_us={"forward": 1})]
    for i in range(3):
        block = f"{root}.Block_{i}"
        layers.append(Layer(block, "Block", self_us={"forward": 1}))
        for name in ("Attention", "MLP", "Norm_0", "Norm_1"):
            layers.append(Layer(f"{block}.{name}", name.partition("_")[0], self_us={"forward": 1}))
    return analysis_of(layers)


def expected(prefix_a: str, prefix_b: str) -> dict[str, str]:
    return {f"{prefix_a}.{i}{part}": f"{prefix_b}.{i}{part}" for i in range(3) for part in PARTS}


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("layers", "layers"),
        ("module.layers", "layers"),
        ("layers", "_orig_mod.layers"),
        ("module._orig_mod.layers", "layers"),
        ("layers", "model.layers"),
        ("model.layers", "layers"),
        ("base.layers", "other.thing.layers"),
    ],
)
def test_prefixes_do_not_matter(a: str, b: str) -> None:
    matched = match_layers(named(a), named(b, root="Renamed"))
    assert expected(a, b).items() <= matched.items()
    assert len(set(matched.values())) == len(matched)


def test_a_model_in_another_is_the_part_of_it() -> None:
    whole = named("model.layers", root="ForCausalLM", between=(("model", "Model"),))
    matched = match_layers(whole, named("layers", root="Model"))
    assert matched["model"] == "Model"
    assert "ForCausalLM" not in matched


def test_where_names_agree_classes_are_not_asked() -> None:
    """Most names of the smaller side agree, so that two that do not are two layers."""
    more = [(name, "Late") for name in (f"late_{i}" for i in range(20))]
    matched = match_layers(named(between=(("head", "Head"),)), named(between=(("scorer", "Head"), *more)))
    assert "head" not in matched and len(matched) == 16


def test_a_prefix_of_most_names_comes_before_one_of_few() -> None:
    a, b = ["m.a", "m.e", "m.f", "x.a", "x.c", "x.d"], ["m.a", "m.e", "m.f", "m.c", "m.d"]
    assert match_names(a, b) == {"m.a": "m.a", "m.e": "m.e", "m.f": "m.f", "x.c": "m.c", "x.d": "m.d"}


def test_what_data_parallel_wraps_is_the_model() -> None:
    wrapped = named("module.layers", root="DistributedDataParallel", between=(("module", "Net"),))
    assert match_layers(wrapped, named())["module"] == "Net"


def test_a_foreign_trace_goes_by_classes_and_their_order() -> None:
    matched = match_layers(foreign(), named(root="Net"))
    assert matched["Net.Block_2.Attention"] == "layers.2.self_attn"
    assert matched["Net.Block_1.Norm_1"] == "layers.1.norm_2"
    assert matched["Net"] == "Net"
    assert len(matched) == 16


def test_a_foreign_part_of_a_named_model() -> None:
    whole = named("model.layers", root="ForCausalLM", between=(("model", "Net"),))
    matched = match_layers(foreign(), whole)
    assert matched["Net.Block_0.MLP"] == "model.layers.0.mlp"


def test_nothing_in_common_matches_nothing() -> None:
    one = analysis_of([Layer("A", "A", self_us={"forward": 1}), Layer("x", "X", self_us={"forward": 1})])
    other = analysis_of([Layer("B", "B", self_us={"forward": 1}), Layer("y", "Y", self_us={"forward": 1})])
    assert match_layers(one, other) == {"A": "B"}  # the roots


def test_like_layers_have_one_place_in_their_blocks() -> None:
    assert like_name("layers.3.mlp.0", "layers.3")[1] == 3
    assert like_name("layers.3.mlp.0", "layers.3")[0] == like_name("layers.4.mlp.0", "layers.4")[0]
    assert like_name("layers.3.mlp.0", "layers.3")[0] != like_name("layers.3.mlp.1", "layers.3")[0]
    assert folded_name({f"layers.{i}.mlp.0": f"layers.{i}" for i in range(4)}) == "layers.{0..3}.mlp.0"
    assert folded_name({"lm_head": None}) == "lm_head"
