"""Layers of a pipeline's stage go by their number in the whole model."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from parallel_models import mesh
from profiler_wrapper.capture.layers import find_roots, find_stages, name_layers
from profiler_wrapper.capture.runinfo import is_in_pipeline
from profiler_wrapper.capture.scopes import LayerScopes
from uncalled_models import Net, Runs


class Attention(Runs):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer_idx = number


class Numbered(Runs):
    """As Transformers' decoder layers: the attention says which it is."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.attn = Attention(number)


class Megatron(Runs):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer_number = number + 1
        self.mlp = nn.Linear(2, 2)


class Silent(Runs):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.mlp = nn.Linear(2, 2)


def part(block: type[nn.Module], numbers: range) -> nn.Module:
    return Net(nn.ModuleList(block(number) for number in numbers))


def stage(module: nn.Module, number: int) -> Any:
    return SimpleNamespace(submod=module, stage_index=number, group_rank=number)


def blocks(model: object) -> list[str]:
    return [layer.mark.path for root in find_roots(model) for layer in name_layers(root) if layer.mark.kind == "block"]


@pytest.mark.parametrize("block", [Numbered, Megatron])
def test_blocks_of_a_stage_have_their_number_in_the_whole_model(block: type[nn.Module]) -> None:
    module = part(block, range(4, 7))
    assert blocks(stage(module, 2)) == ["layers.4", "layers.5", "layers.6"]
    (root,) = find_roots(stage(module, 2))
    assert root.label == "Net#0"
    raw = {layer.mark.path: layer.raw_name for layer in name_layers(root)}
    assert raw["layers.4"] == "layers.0"
    assert blocks(module) == ["layers.0", "layers.1", "layers.2"]  # a model that nobody calls a stage is as it is


@pytest.mark.parametrize("numbers", [range(3), [4, 6, 8], [5, 4, 3]])
def test_numbers_that_are_no_places_are_left_alone(numbers: Any) -> None:
    assert blocks(stage(part(Numbered, numbers), 1)) == ["layers.0", "layers.1", "layers.2"]


def test_blocks_that_do_not_say_keep_their_place() -> None:
    assert blocks(stage(part(Silent, range(4, 6)), 1)) == ["layers.0", "layers.1"]


def test_names_that_are_the_whole_models_already_stay() -> None:
    """As torchtitan divides a model: what other stages hold is taken out of a ModuleDict."""
    module = Net(nn.ModuleDict({"4": Numbered(4), "5": Numbered(5)}))
    assert blocks(stage(module, 1)) == ["layers.4", "layers.5"]


def test_several_stages_of_one_rank_are_one_model() -> None:
    """Interleaved: this rank has the second and the sixth."""
    schedule = SimpleNamespace(_stages=[stage(part(Megatron, range(2, 4)), 1), stage(part(Megatron, range(10, 12)), 5)])
    assert [one.number for one in find_stages(schedule)] == [1, 5]
    assert [root.label for root in find_roots(schedule)] == ["Net#stage1", "Net#stage5"]
    assert blocks(schedule) == ["layers.2", "layers.3", "layers.10", "layers.11"]
    scopes = LayerScopes(schedule)
    scopes.attach()
    scopes.detach()
    assert [root.label for root in scopes.roots()] == ["Net#stage1", "Net#stage5"]
    assert all(root.in_pipeline for root in scopes.roots())


def test_a_schedule_of_one_stage() -> None:
    class Sized(SimpleNamespace):
        def __len__(self) -> int:
            return 0

    one = stage(part(Megatron, range(2, 4)), 1)
    for held in (one, Sized(**vars(one))):
        assert blocks(SimpleNamespace(_stage=held)) == ["layers.2", "layers.3"]


def test_a_plain_module_in_a_mesh_with_a_pipeline() -> None:
    module = part(Numbered, range(2, 4))
    assert is_in_pipeline(module, mesh(pp=(1, 2), dp=(0, 2)), None)
    assert is_in_pipeline(module, None, {"dp": 0, "tp": 0, "pp": 1})
    assert not is_in_pipeline(module, mesh(dp=(0, 2)), None)
    assert not is_in_pipeline(module, None, {"dp": 1, "tp": 0, "pp": 0})
    assert not is_in_pipeline(None, None, None)
    scopes = LayerScopes(module, in_pipeline=True)
    scopes.attach()
    scopes.detach()
    assert "layers.3.attn" in {one["path"] for one in scopes.describe()}


def test_what_is_no_stage() -> None:
    for model in (None, nn.Linear(2, 2), [nn.Linear(2, 2)], {"a": nn.Linear(2, 2)}, SimpleNamespace(submod=3), "x"):
        assert find_stages(model) == ()


def test_what_finishes_a_window_imports_no_torch() -> None:
    """A child process is there within a second, and holds no device."""
    code = "import sys, profiler_wrapper.run.window; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
