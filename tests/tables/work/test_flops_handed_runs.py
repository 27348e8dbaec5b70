"""FLOPs and bytes where ops are not run as they are called: DTensor, selective checkpointing, optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from profiler_wrapper.place.placed import Placed, place_events
from profiler_wrapper.tables.work.bytes import has_rule
from profiler_wrapper.tables.work.flops import FlopOps
from profiler_wrapper.tables.work.roofline import StepWork
from profiler_wrapper.tables.work.traffic import Traffic
from profiler_wrapper.trace.reader import read_with_shapes
from shaped_trace import work_of
from torch_versions import since_torch
from variants import process_group

BATCH, WIDTH, INNER = 4, 8, 16
FORWARD = 2 * (2 * BATCH * WIDTH * INNER)
TRAINING = 3 * FORWARD  # the input needs a gradient


@pytest.fixture
def group() -> Iterator[None]:
    with process_group():
        yield


def recorded(step: Callable[[], object], path: Path) -> Placed:
    """The first call is recorded: what happens once counts as well."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as prof:
        step()
    prof.export_chrome_trace(str(path))
    recording, shapes = read_with_shapes(path, has_rule)
    return place_events(recording, shapes=shapes)


def work(step: Callable[[], object], path: Path) -> StepWork:
    found = work_of(recorded(step, path))
    assert found.uncounted == ()
    return found


def products_of(found: Placed) -> list[int]:
    """Bytes that each product moves."""
    assert found.shapes is not None
    traffic = Traffic(found, found.shapes, FlopOps(found, found.shapes))
    names = [found.recording.name_of(unit) for unit in traffic.units.tolist()]
    moved = zip(names, traffic.bytes_moved.tolist(), strict=True)
    return [bytes_moved for name, bytes_moved in moved if name in ("aten::mm", "aten::addmm", "aten::linear")]


def untold(found: Placed) -> set[str]:
    """Ops of which nothing tells the bytes."""
    assert found.shapes is not None
    return {row.op for row in Traffic(found, found.shapes, FlopOps(found, found.shapes)).unknown(1)}


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, INNER, bias=False), nn.GELU(), nn.Linear(INNER, WIDTH, bias=False))


def batch() -> torch.Tensor:
    return torch.randn(BATCH, WIDTH, requires_grad=True)


def train(model: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model(batch()).pow(2).mean().backward()


# --- distributed tensors ------------------------------------------------------------------------


@pytest.mark.usefixtures("group")
def test_products_of_distributed_tensors_count_once_also_when_they_are_new(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (1,))
    model = parallelize_module(perceptron(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    plain = recorded(partial(train, perceptron()), tmp_path / "plain.json")
    expected = products_of(plain)
    for name in ("first", "second"):
        found = recorded(partial(train, model), tmp_path / f"{name}.json")
        assert work_of(found).hardware_flops == work_of(found).model_flops == TRAINING
        assert sorted(products_of(found)) == sorted(expected)
        assert untold(found) == set()


@pytest.mark.usefixtures("group")
def test_what_fsdp_shards_counts_once_also_when_it_is_new(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = perceptron()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    assert work(partial(train, model), tmp_path / "trace.json").hardware_flops == TRAINING


class Wrapped(torch.Tensor):
    """A tensor that holds another, and runs on that."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        tensor: Wrapped = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        tensor.inner = inner
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def unwrap(value: Any) -> Any:
            return value.inner if isinstance(value, Wrapped) else value

        given = torch.utils._pytree.tree_map(unwrap, (args, kwargs or {}))
        return torch.utils._pytree.tree_map_only(torch.Tensor, Wrapped, func(*given[0], **given[1]))


def test_products_of_a_tensor_that_wraps_another_count_once(tmp_path: Path) -> None:
    model = perceptron()
    for layer in (model[0], model[2]):
        layer.weight = nn.Parameter(Wrapped(layer.weight.detach()))  # type: ignore[assignment,operator]
    assert work(partial(train, model), tmp_path / "trace.json").hardware_flops == TRAINING


# --- selective checkpointing --------------------------------------------------------------------

_ATEN = torch.ops.aten
_GEMM = (_ATEN.mm.default, _ATEN.addmm.default)


def keeping(*ops: Any) -> Callable[..., CheckpointPolicy]:
    def policy(context: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in ops else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


@since_torch(2, 11, "what holds the saved inputs of a checkpoint is an op")
@pytest.mark.parametrize(
    ("kept", "again"),
    [(_GEMM, 0), ((_ATEN.gelu.default,), 1)],  # the last product is where the recompute stops
    ids=["products", "activations"],
)
def test_what_selective_checkpointing_saved_is_not_computed_again(kept: Any, again: int, tmp_path: Path) -> None:
    model = nn.Sequential(*perceptron(), nn.GELU())  # backward needs what the last product gave

    def step() -> None:
        contexts = partial(create_selective_checkpoint_contexts, keeping(*kept))
        train(lambda x: checkpoint(model, x, use_reentrant=False, context_fn=contexts))

    found = recorded(step, tmp_path / "trace.json")
    assert work_of(found).hardware_flops == TRAINING + again * FORWARD
    assert untold(found) == set()


# --- optimizers ---------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this version of torch has no Muon")
def test_what_muon_multiplies_is_no_work_of_the_model(tmp_path: Path) -> None:
    model = perceptron()
    optimizer = torch.optim.Muon(model.parameters(), lr=1e-3)

    def step() -> None:
        train(model)
        optimizer.step()

    found = work(step, tmp_path / "trace.json")
    # Five rounds of the iteration for each weight: X X', A A, B X.
    of_muon = 2 * 5 * 2 * (WIDTH * INNER * WIDTH + WIDTH**3 + WIDTH * WIDTH * INNER)
    assert (found.model_flops, found.hardware_flops) == (TRAINING, TRAINING + of_muon)


def test_what_lbfgs_lets_its_closure_compute_is_work_of_the_model(tmp_path: Path) -> None:
    model, x, mix = perceptron(), torch.randn(BATCH, WIDTH), torch.randn(WIDTH, 3)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    calls = []

    def closure() -> torch.Tensor:
        calls.append(1)
        optimizer.zero_grad()
        loss = (model(x) @ mix).pow(2).mean()
        loss.backward()
        return loss  # type: ignore[no-any-return]

    found = work(lambda: optimizer.step(closure), tmp_path / "trace.json")
    linear, loss = 2 * BATCH * WIDTH * INNER, 2 * BATCH * WIDTH * 3
    assert found.model_flops == len(calls) * (2 * linear + 3 * linear + 2 * loss)
    assert found.hardware_flops >= found.model_flops
