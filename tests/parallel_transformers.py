"""Hugging Face models from small configs, divided among four ranks in the ways that jobs divide them.

`build("fsdp2", "llama")` is what one rank trains: the same weights each time, and on each rank its own batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import models
import variants
from parallel_models import Job

SIZE = models.Size(layers=4, hidden=32, heads=8, vocabulary=64, batch=4, tokens=8)
LAYERS_WHEN_INTERLEAVED = 8
MICROBATCHES = 4


# --- data parallel ---


def ddp(case: models.Case) -> nn.Module:
    return nn.parallel.DistributedDataParallel(case.model)


def ddp_compiled(case: models.Case) -> nn.Module:
    """Blocks that are compiled, in DDP."""
    variants.compiled_in_place(case, backend="aot_eager")
    return ddp(case)


def fsdp2(case: models.Case) -> nn.Module:
    return _sharded(case, init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",)))


def fsdp2_checkpointed(case: models.Case) -> nn.Module:
    variants.gradient_checkpointing(case)
    return fsdp2(case)


def fsdp2_compiled(case: models.Case) -> nn.Module:
    variants.compiled_in_place(case, backend="aot_eager")
    return fsdp2(case)


def hsdp(case: models.Case) -> nn.Module:
    """Two replicas, each over two ranks."""
    return _sharded(case, init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard")))


def _sharded(case: models.Case, mesh: DeviceMesh) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for block in variants.blocks_of(case):
        fully_shard(block, mesh=mesh)
    fully_shard(case.model, mesh=mesh)
    return case.model


# --- tensor parallel ---


def tensor_parallel(case: models.Case) -> nn.Module:
    return _split(case, init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",)))


def tensor_and_data_parallel(case: models.Case) -> nn.Module:
    """Blocks over two ranks each, and FSDP2 over two such pairs."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    _split(case, mesh["tp"])
    return _sharded(case, mesh["dp_shard"])


def _split(case: models.Case, mesh: DeviceMesh) -> nn.Module:
    """Columns of what goes into attention and MLP, rows of what comes out of them."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    into = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"}
    plan: dict[str, Any] = {name: ColwiseParallel() for name in into}
    plan |= {name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    for block in variants.blocks_of(case):
        parallelize_module(block, mesh, plan)
    return case.model


# --- pipelines ---


class Stage(nn.Module):
    """Some blocks of a Llama, under their names in the model, and perhaps an end of it."""

    def __init__(self, whole: nn.Module, blocks: range, *, begins: bool, ends: bool) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = whole.model.embed_tokens if begins else None  # type: ignore[union-attr,assignment]
        self.model.layers = nn.ModuleList(whole.model.layers[number] for number in blocks)  # type: ignore[union-attr,index]
        self.model.norm = whole.model.norm if ends else None  # type: ignore[union-attr,assignment]
        self.model.rotary_emb = whole.model.rotary_emb  # type: ignore[union-attr,assignment]
        self.lm_head = whole.lm_head if ends else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.model.embed_tokens is not None:
            x = self.model.embed_tokens(x)
        positions = torch.arange(x.shape[1])[None]
        embeddings = self.model.rotary_emb(x, positions)
        for block in self.model.layers:  # type: ignore[union-attr]
            x = block(x, position_embeddings=embeddings, position_ids=positions, attention_mask=None)
        return self.lm_head(self.model.norm(x)) if self.lm_head is not None else x  # type: ignore[operator]


def stages_of(rank: int, per_rank: int) -> list[tuple[int, range]]:
    """(number, blocks) of a rank's stages: with several, each rank has every fourth."""
    world = dist.get_world_size()
    layers = LAYERS_WHEN_INTERLEAVED if per_rank > 1 else SIZE.layers
    share = layers // (world * per_rank)
    numbers = [rank + world * turn for turn in range(per_rank)]
    return [(number, range(number * share, (number + 1) * share)) for number in numbers]


def _pipeline(case: models.Case, schedule: str, per_rank: int = 1) -> Job:
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import get_schedule_class

    rank, world = dist.get_rank(), dist.get_world_size()
    count = world * per_rank
    parts = [
        (number, Stage(case.model, blocks, begins=number == 0, ends=number == count - 1))
        for number, blocks in stages_of(rank, per_rank)
    ]
    stages = [PipelineStage(module, number, count, torch.device("cpu")) for number, module in parts]
    made: Any = get_schedule_class(schedule)
    run = made(stages if per_rank > 1 else stages[0], n_microbatches=MICROBATCHES, loss_fn=_loss)
    module = nn.ModuleList(part for _, part in parts)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def step(seed: int) -> None:
        ids = case.batch(seed)["input_ids"]
        told = {"target": ids} if rank == world - 1 else {}
        run.step(*([ids] if rank == 0 else []), **told)
        optimizer.step()
        optimizer.zero_grad()

    return Job(run, module, step)


def _loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


# --- gradients that are reduced by hand, between backward and optimizer ---


def reduced_in_background(case: models.Case) -> Callable[[], None]:
    """Each gradient is reduced as soon as it is there, and waited for before the optimizer."""
    works: list[dist.Work] = []
    for parameter in case.model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda one: works.append(dist.all_reduce(one.grad, async_op=True))  # type: ignore[arg-type,func-returns-value]
        )

    def reduce() -> None:
        while works:
            works.pop(0).wait()

    return reduce


class Experts(nn.Module):
    """An expert of each rank: tokens go to them and come back, another number from each rank to each."""

    def __init__(self, expert: nn.Module) -> None:
        super().__init__()
        self.expert = expert

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rank, tokens = dist.get_rank(), x.flatten(0, 1)
        shares = [len(tokens) * part // 16 for part in (1, 3, 5, 7)]  # of four ranks
        there = [shares[(rank + other) % 4] for other in range(4)]  # and back: as many to each as from it
        arrived = self._exchange(tokens, there)
        return self._exchange(self.expert(arrived), there).view_as(x)

    def _exchange(self, tokens: torch.Tensor, there: list[int]) -> torch.Tensor:
        from torch.distributed.nn.functional import all_to_all_single

        return all_to_all_single(torch.empty_like(tokens), tokens.contiguous(), there, there)  # type: ignore[no-any-return]


def experts(case: models.Case) -> Callable[[], None]:
    for block in variants.blocks_of(case):
        block.mlp = Experts(block.mlp)  # type: ignore[arg-type]
    shared = [parameter for name, parameter in case.model.named_parameters() if ".expert." not in name]

    def reduce() -> None:
        for parameter in shared:
            dist.all_reduce(parameter.grad)

    return reduce


# --- all of them ---

REDUCED_BY_HAND: dict[str, Callable[[models.Case], Callable[[], None]]] = {
    "async all-reduce": reduced_in_background,
    "experts": experts,
}
PIPELINES: dict[str, Callable[[models.Case], Job]] = {
    "gpipe": lambda case: _pipeline(case, "GPipe"),
    "1f1b": lambda case: _pipeline(case, "1F1B"),
    "interleaved": lambda case: _pipeline(case, "Interleaved1F1B", per_rank=2),
}
OTHERS: dict[str, Callable[[models.Case], nn.Module]] = {
    "ddp": ddp,
    "ddp accumulated": ddp,
    "ddp compiled": ddp_compiled,
    "fsdp2": fsdp2,
    "fsdp2 checkpointed": fsdp2_checkpointed,
    "fsdp2 compiled": fsdp2_compiled,
    "hsdp": hsdp,
    "tp": tensor_parallel,
    "tp and fsdp2": tensor_and_data_parallel,
}
KINDS = (*OTHERS, *PIPELINES)
TENSOR_PARALLEL = {"tp": 4, "tp and fsdp2": 2}


def build(kind: str, name: str = "llama", *, pause: Callable[[nn.ModuleList], None] | None = None) -> Job:
    """What this rank trains.

    Args:
        pause: is given the model's blocks before they are divided, to make one slow.
    """
    layers = LAYERS_WHEN_INTERLEAVED if kind == "interleaved" else SIZE.layers
    case = models.build(name, SIZE, layers=layers, **({"attention": "sdpa"} if name == "llama" else {}))
    if pause is not None:
        pause(variants.blocks_of(case))
    if kind in PIPELINES:
        return PIPELINES[kind](case)
    reduce = REDUCED_BY_HAND[kind](case) if kind in REDUCED_BY_HAND else None
    model = case.model if reduce is not None else OTHERS[kind](case)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    share = _share_of_data(kind)
    accumulates = kind == "ddp accumulated"

    def step(seed: int) -> None:
        for micro in _micros(accumulates):
            last = not accumulates or micro == 1
            with nullcontext() if last else model.no_sync():  # type: ignore[operator]
                case.loss(model, case.batch(1000 * share + 2 * seed + micro)).backward()
        if reduce is not None:
            reduce()
        optimizer.step()
        optimizer.zero_grad()

    return Job(model, model, step)


def _micros(accumulates: bool) -> Iterator[int]:
    yield from range(2 if accumulates else 1)


def _share_of_data(kind: str) -> int:
    """Ranks that divide a layer among them have the same batch."""
    return dist.get_rank() // TENSOR_PARALLEL.get(kind, 1)
