"""Every numbered autograd node lands in the layer that made it, against a truth found without a profiler."""

from __future__ import annotations

import functools
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.profiler import record_function
from torch.utils.checkpoint import checkpoint

import models
import variants
from module_stack import OUTSIDE, layer_names, nearest, root_name
from processes import run_in_processes
from profiler_wrapper.capture.scopes import LayerScopes
from profiler_wrapper.place.placed import place_events
from profiler_wrapper.result import load
from profiler_wrapper.trace.reader import read
from recordings import NODE
from small_models import SMALL_MODELS, Checkpointed, Plain, backward_of
from truths import Node, NodeTruth, next_number


class Ran(NamedTuple):
    """A node that ran in a profiled run, and the layer that our attribution gives it."""

    node: Node
    layer: str
    phase: str


def attributed_nodes(model: nn.Module, run: Callable[[], object], path: Path) -> tuple[list[Ran], set[str]]:
    """What attribution says of every numbered node of a profiled run, and the names of all rows."""
    scopes = LayerScopes(model)
    scopes.attach()
    begin = next_number()
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            run()
    finally:
        scopes.detach()
    profiler.export_chrome_trace(str(path))
    found = place_events(read(path))
    nodes = []
    for node, forward_op in enumerate(found.attribution.forward_op.tolist()):
        if forward_op < 0:
            continue
        number = int(found.recording.spans.sequence[node])
        if number < 0:  # of one with a hook before it, its op has the number
            number = int(found.recording.spans.sequence[forward_op])
        name = found.recording.name_of(node).removeprefix(NODE)
        place = found.attribution.place(node)
        layer = found.tree.layers[place.layer].name if place.layer >= 0 else place.reason
        nodes.append(Ran(Node(number - begin, name), layer, place.phase))
    return nodes, {layer.name for layer in found.tree.layers}


def assert_all_right(truth: NodeTruth, ran: list[Ran], rows: set[str], root: str) -> None:
    """Each node the truth has ran, no other did, and each is in the layer that made it."""
    assert {item.node for item in ran} == set(truth.nodes)
    wrong = {
        item.node: (item.layer, truth.nodes[item.node])
        for item in ran
        if item.layer != nearest(truth.nodes[item.node], rows, root)
    }
    assert wrong == {}
    assert {item.phase for item in ran} == {"backward"}
    assert len({item.layer for item in ran} - {OUTSIDE}) > 1  # the truth told layers apart


def check_small(build: Callable[[], nn.Module], run: Callable[[nn.Module], object], tmp_path: Path) -> None:
    """`run` on two equal models: one gives the truth, the other is profiled."""
    model = build()
    with NodeTruth(model) as truth:
        run(model)
    model = build()
    ran, rows = attributed_nodes(model, lambda: run(model), tmp_path / "trace.json")
    assert_all_right(truth, ran, rows, root_name(model))


@pytest.mark.parametrize("small_model", SMALL_MODELS, ids=lambda model: model.__name__)
def test_shared_called_twice_custom_function_in_place(small_model: type[nn.Module], tmp_path: Path) -> None:
    check_small(small_model, functools.partial(backward_of, steps=2), tmp_path)


@pytest.mark.parametrize("reentrant", [False, True])
def test_both_kinds_of_checkpointing(reentrant: bool, tmp_path: Path) -> None:
    check_small(functools.partial(Checkpointed, reentrant=reentrant), functools.partial(backward_of, steps=2), tmp_path)


class _Writes(nn.Module):
    """Between two layers with parameters, one that writes into views of its result in some way."""

    def __init__(self, way: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.before, self.writes, self.after = nn.Linear(4, 4), nn.Module(), nn.Linear(4, 4)
        self.writes.forward = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.writes(self.before(x)))


def _step_by_step(x: torch.Tensor) -> torch.Tensor:
    written = torch.zeros_like(x)
    for column in range(4):
        written[:, column] = x[:, column] * 2
    return written


def _into_several_views(x: torch.Tensor) -> torch.Tensor:
    base = x * 1
    left, right, corner = base[:, :2], base[:, 2:], base.as_strided((1, 2), (4, 1))
    left.masked_fill_(x[:, :2] > 0, 1.0)
    right.mul_(x[:, 2:])
    base.index_put_((torch.tensor([0]),), x[1:])
    corner += 1
    return torch.cat([left, right], 1) + corner.sum()  # both are views of what has changed since


def _of_a_view(x: torch.Tensor) -> torch.Tensor:
    base = torch.zeros(2, 2, 4)
    base[0].copy_(x)
    base[1].t()[1:3] = x[:, 1:3].t()
    torch._foreach_mul_([base[0], base[1]], 2.0)
    return base.sum(0)


def _while_recomputed(x: torch.Tensor) -> torch.Tensor:
    return checkpoint(_step_by_step, x, use_reentrant=False)


@pytest.mark.parametrize("way", [_step_by_step, _into_several_views, _of_a_view, _while_recomputed])
def test_what_is_written_into_views_in_place(way: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path) -> None:
    check_small(functools.partial(_Writes, way), functools.partial(backward_of, steps=2), tmp_path)


def backward_twice(model: nn.Module) -> None:
    loss = model(torch.linspace(-1, 1, 8).reshape(2, 4).requires_grad_()).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def test_a_graph_run_twice(tmp_path: Path) -> None:
    check_small(Plain, backward_twice, tmp_path)


def test_each_run_of_a_retained_graph_counts(tmp_path: Path) -> None:
    model = Plain()
    ran, _ = attributed_nodes(model, lambda: backward_twice(model), tmp_path / "trace.json")
    tanh = Counter(item.layer for item in ran if item.node.name == "TanhBackward0")
    assert tanh == {"layers.0": 2, "layers.1": 2}


def test_nodes_made_in_backward_belong_to_the_layer_whose_backward_made_them(tmp_path: Path) -> None:
    model = Plain()

    def double_backward() -> None:
        x = torch.linspace(-1, 1, 8).reshape(2, 4).requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        gradient.square().sum().backward()

    ran, _ = attributed_nodes(model, double_backward, tmp_path / "trace.json")
    layers = Counter((item.node.name, item.layer) for item in ran)
    # tanh(linear(x)) twice, then a square: their derivatives, run by the second backward.
    assert layers["TanhBackwardBackward0", "layers.0"] == layers["TanhBackwardBackward0", "layers.1"] == 1
    assert {layer for name, layer in layers if name == "MmBackward0"} == {"layers.0.linear", "layers.1.linear"}
    assert {layer for name, layer in layers if name == "PowBackward0"} == {OUTSIDE}
    assert all(layer in ("", "Plain", *_layers_of(model)) for _, layer in layers)


def _layers_of(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_modules()]


def check_variant(variant: str, folder: str, *, accumulate: int = 1, name: str = "llama") -> int:
    """A model in a variant, trained for two steps; returns how many nodes were compared."""

    def prepare() -> tuple[models.Case, nn.Module, dict[int, str]]:
        case = models.build(name)
        names = layer_names(case.model)
        wrapped = variants.VARIANTS[variant](case)
        if variant == "lora":  # adapters have rows, beside what they adapt
            names = layer_names(case.model)
        return case, wrapped, names

    case, model, names = prepare()
    with NodeTruth(model, names) as truth:
        models.train(case, steps=2, model=model, accumulate=accumulate)
    case, model, names = prepare()
    ran, rows = attributed_nodes(
        model, lambda: models.train(case, steps=2, model=model, accumulate=accumulate), Path(folder) / "trace.json"
    )
    assert_all_right(truth, ran, rows, type(case.model).__name__)
    blocks = {f"{case.blocks}.{i}" for i in range(2)}
    assert blocks <= {item.layer for item in ran}  # residual additions are the blocks' own
    return len(ran)


@pytest.mark.parametrize(
    "variant",
    [
        "plain",
        *(
            pytest.param(variant, marks=pytest.mark.full)
            for variant in ("checkpoint_wrapped", "gradient_checkpointing", "gradient_checkpointing_reentrant", "lora")
        ),
    ],
)
def test_llama(variant: str, tmp_path: Path) -> None:
    assert check_variant(variant, str(tmp_path)) > 200


@pytest.mark.full
def test_gpt2(tmp_path: Path) -> None:
    assert check_variant("plain", str(tmp_path), name="gpt2") > 100


@pytest.mark.full
def test_gradient_accumulation(tmp_path: Path) -> None:
    assert check_variant("plain", str(tmp_path), accumulate=4) > 800


@pytest.mark.full
def test_ddp(process_group: None, tmp_path: Path) -> None:
    assert check_variant("ddp", str(tmp_path)) > 200


def on_this_rank(variant: str) -> int:
    with tempfile.TemporaryDirectory() as folder:
        return check_variant(variant, folder)


@pytest.mark.parametrize("variant", ["fsdp2", "ddp"])
def test_two_processes(variant: str) -> None:
    assert min(run_in_processes(on_this_rank, variant)) > 200


class _NamesItsBackward(torch.autograd.Function):
    """A matrix product that names parts of both its passes, as exchanges between experts do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        with record_function("exchange_forward"):
            return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        with record_function("exchange_backward"):
            gradient_of_x = gradient @ weight.t()
        return gradient_of_x, x.t() @ gradient


@pytest.mark.parametrize("way", ["plain", "create_graph", "checkpointed", "reentrant"])
def test_named_blocks_of_a_backward_are_backward(way: str, tmp_path: Path) -> None:
    weight, x = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)

    def layer(x: torch.Tensor) -> torch.Tensor:
        with record_function("layer"):
            return _NamesItsBackward.apply(x, weight).relu()

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        checkpointed = way in ("checkpointed", "reentrant")
        result = checkpoint(layer, x, use_reentrant=way == "reentrant") if checkpointed else layer(x)
        result.sum().backward(create_graph=way == "create_graph")
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    phases: dict[str, set[str]] = defaultdict(set)
    for row in load(tmp_path / "trace.json").layers:
        if row.calls:
            phases[row.layer].add(row.phase)
    runs = {"forward", "recompute"} if checkpointed else {"forward"}
    assert phases == {"layer": runs, "layer.exchange_forward": runs, "exchange_backward": {"backward"}}
