"""Rows for the layers inside compiled code: Inductor on a CPU, forward and backward."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from once import Once
from profiler_wrapper import load
from profiler_wrapper.place.placed import Placed
from profiler_wrapper.result import ProfileResult, attribute_trace
from programs import run_program
from torch_versions import since_torch

SCRIPT = Path(__file__).parents[1] / "compiled_training.py"
STEPS = 2
PATIENCE_S = 500

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]  # compiling takes half a minute of a core


def train_all(directory: Path) -> None:
    """Three trainings that have Inductor's cache in common."""
    done = run_program(
        SCRIPT,
        directory,
        *("first=us", "second=us", "third=nobody"),
        environment={"PYTHONPATH": str(SCRIPT.parents[1]), "TORCHINDUCTOR_CACHE_DIR": str(directory / "inductor")},
        timeout_s=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def trainings(once: Once) -> Path:
    """Their directories."""

    def train(folder: Path) -> Path:
        train_all(folder)
        return folder

    found: Path = once("compiled", train)
    return found


@pytest.fixture(scope="module")
def trained(trainings: Path) -> Path:
    """Runs whose code was compiled there and then."""
    return trainings / "first"


@pytest.fixture(scope="module")
def trained_again(trainings: Path) -> Path:
    """Runs whose code came from the cache."""
    return trainings / "second"


@pytest.fixture(scope="module")
def trained_without_us(trainings: Path) -> Path:
    """The same, from the cache, in a process that never imports this package."""
    return trainings / "third"


def rank(runs: Path, name: str) -> Path:
    return runs / name / "rank0"


def place_events(runs: Path, name: str) -> Placed:
    run = json.loads((rank(runs, name) / "run.json").read_text())
    return attribute_trace(rank(runs, name) / "profile_trace.json", run=run)


def library_calls(runs: Path, name: str) -> Counter[tuple[str, str]]:
    """Matrix products by layer and phase: those right in compiled code."""
    found = place_events(runs, name)
    spans, counted = found.recording.spans, Counter[tuple[str, str]]()
    for span in range(len(spans)):
        above = found.nesting.parent[span]
        is_product = found.recording.name_of(span) in ("aten::mm", "aten::addmm")
        if is_product and above >= 0 and found.recording.name_of(above).startswith("## Call CompiledFxGraph"):
            place = found.attribution.place(span)
            counted[found.tree.layers[place.layer].name, place.phase] += 1
    return counted


def assert_adds_up(result: ProfileResult) -> None:
    time = result.time
    assert sum(row.self_time_ns for row in result.layers) + time.unattributed_ns == time.total_ns
    assert time.coverage == 1
    assert not [warning for warning in result.warnings if "have no rows" in warning]


@pytest.mark.parametrize(
    ("name", "linears"),
    [
        (
            "by_block_all",
            [
                f"model.layers.{k}.{linear}"
                for k in range(2)
                for linear in (
                    *(f"self_attn.{p}_proj" for p in "qkvo"),
                    *(f"mlp.{p}_proj" for p in ("gate", "up", "down")),
                )
            ],
        ),
        ("whole_all", [*(f"layers.{k}.mlp.{linear}" for k in range(2) for linear in ("up", "down")), "head"]),
    ],
)
def test_every_linear_has_one_product_forward_and_two_backward(trained: Path, name: str, linears: list[str]) -> None:
    expected = {(linear, "forward"): STEPS for linear in linears}
    expected |= {(linear, "backward"): 2 * STEPS for linear in linears}
    assert library_calls(trained, name) == expected


NAMES_OF_GRAPHS = since_torch(2, 11, "without Inductor's cache the graphs of checkpointing have no names")


@NAMES_OF_GRAPHS
def test_what_checkpointing_computes_again_is_recompute(trained: Path, trained_again: Path) -> None:
    """All products of a block; its last one only where the backward needs the result: the head's does."""
    names = [f"layers.{k}.mlp.{linear}" for k in range(2) for linear in ("up", "down")]
    expected = {(name, "forward"): STEPS for name in (*names, "head")}
    expected |= {(name, "backward"): 2 * STEPS for name in (*names, "head")}
    expected |= {(name, "recompute"): STEPS for name in names if name != "layers.0.mlp.down"}
    for runs in (trained, trained_again):
        assert library_calls(runs, "checkpointed_all") == expected


@pytest.mark.parametrize(
    "name",
    [
        "by_block_auto",
        "by_block_all",
        "whole_auto",
        "whole_all",
        pytest.param("checkpointed_all", marks=NAMES_OF_GRAPHS),
    ],
)
def test_times_add_up(trained: Path, name: str) -> None:
    result = load(rank(trained, name) / "profile_trace.json")
    assert_adds_up(result)
    assert_adds_up(load(rank(trained, name)))


def test_rows_are_those_of_the_plain_model(trained: Path) -> None:
    def rows(name: str) -> set[tuple[str, str]]:
        return {(row.layer, row.phase) for row in load(rank(trained, name)).layers if row.phase != "accumulate_grad"}

    assert rows("by_block_auto") == rows("plain_auto")


def test_fused_time_is_in_a_row_above(trained: Path) -> None:
    result = load(rank(trained, "by_block_auto"))
    self_time = {(row.layer, row.phase): row.self_time_ns for row in result.layers}
    norms = [row for row in result.layers if row.layer.endswith("post_attention_layernorm")]
    assert norms and all(
        row.fused_ns for row in norms if row.phase == "forward"
    )  # with the residual addition before it
    for row in result.layers:
        above = 0
        name = row.layer
        while "." in name:
            name = name.rpartition(".")[0]
            above += self_time.get((name, row.phase), 0)
        assert 0 <= row.fused_ns <= above


def test_rows_inside_compiled_code_say_so(trained: Path) -> None:
    result = load(rank(trained, "by_block_auto"))
    inside = {row.layer: row for row in result.layers if row.block and row.layer != row.block}
    assert {name.rpartition(".")[2] for name in inside} >= {"self_attn", "mlp", "input_layernorm"}
    assert all(row.compiled and row.calls is None for row in inside.values())
    assert result.layer("model.layers.0.mlp")[0].kind == "mlp"
    assert "compiled" not in result.run


@NAMES_OF_GRAPHS
def test_code_from_the_cache_brings_its_layers_back(trained: Path, trained_again: Path) -> None:
    counted = json.loads((trained_again / "counters.json").read_text())
    assert counted["inductor"]["fxgraph_cache_hit"] == 6 and "fxgraph_cache_miss" not in counted["inductor"]
    for name in ("by_block_auto", "whole_all"):
        first, again = load(rank(trained, name)), load(rank(trained_again, name))
        assert [(row.layer, row.phase) for row in again.layers] == [(row.layer, row.phase) for row in first.layers]
    assert library_calls(trained_again, "whole_all") == library_calls(trained, "whole_all")


def test_compiler_does_the_same_without_us(trained_again: Path, trained_without_us: Path) -> None:
    """Same graphs, breaks and recompilations; what was compiled with us is found in the cache without us."""
    for name in ("counters.json", "keys.json"):
        assert (trained_without_us / name).read_text() == (trained_again / name).read_text(), name
