"""One small Transformer in the ways that a job divides it among its ranks, each as it is trained without us."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

LAYERS, WIDTH, ROWS = 4, 16, 8


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class Block(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer_idx = number  # as Transformers' attentions have it
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


class Net(nn.Module):
    """Blocks between two linear layers; a stage of a pipeline has those of `blocks`, and perhaps an end."""

    def __init__(self, blocks: range = range(LAYERS), *, begins: bool = True, ends: bool = True) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH) if begins else None
        self.layers = nn.ModuleList(Block(number) for number in blocks)
        self.head = nn.Linear(WIDTH, WIDTH) if ends else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x) if self.embed is not None else x
        for block in self.layers:
            x = block(x)
        return self.head(x) if self.head is not None else x


@dataclass(frozen=True)
class Job:
    """What a rank trains: `profiled` is what is given to the wrapper."""

    profiled: Any
    module: nn.Module
    step: Callable[[int], None]


def _rows(seed: int, share: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * share + seed)
    return torch.randn(ROWS, WIDTH, generator=generator)


def _steps_of(model: nn.Module, share: int) -> Callable[[int], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(seed: int) -> None:
        model(_rows(seed, share)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ddp() -> Job:
    model = nn.parallel.DistributedDataParallel(Net())
    return Job(model, model, _steps_of(model, dist.get_rank()))


def fsdp2() -> Job:
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    model = Net()
    for block in model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return Job(model, model, _steps_of(model, dist.get_rank()))


def tensor_parallel() -> Job:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = Net()
    plan = {}
    for number in range(LAYERS):
        plan |= {f"layers.{number}.mlp.up": ColwiseParallel(), f"layers.{number}.mlp.down": RowwiseParallel()}
    parallelize_module(model, mesh, plan)
    return Job(model, model, _steps_of(model, 0))


def pipeline_parallel() -> Job:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    rank, stages = dist.get_rank(), dist.get_world_size()
    mine = range(rank * LAYERS // stages, (rank + 1) * LAYERS // stages)
    module = Net(mine, begins=rank == 0, ends=rank == stages - 1)
    stage = PipelineStage(module, rank, stages, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=lambda output, target: (output - target).square().mean())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def step(seed: int) -> None:
        target = {"target": _rows(seed)} if rank == stages - 1 else {}
        schedule.step(*([_rows(seed)] if rank == 0 else []), **target)
        optimizer.step()
        optimizer.zero_grad()

    return Job(schedule, module, step)


KINDS: dict[str, Callable[[], Job]] = {
    "ddp": ddp,
    "fsdp2": fsdp2,
    "tensor parallel": tensor_parallel,
    "pipeline parallel": pipeline_parallel,
}


def build(kind: str) -> Job:
    """The same weights each time."""
    torch.manual_seed(0)
    return KINDS[kind]()


def hash_of(model: torch.nn.Module) -> str:
    """Of all parameters, as this rank has them."""
    told = hashlib.sha256()
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter  # type: ignore[operator]
        told.update(name.encode() + local.detach().numpy().tobytes())
    return told.hexdigest()


def mesh(**places: tuple[int, int]) -> SimpleNamespace:
    """What stands for a device mesh: of dimensions given as name=(place, size)."""
    return SimpleNamespace(
        mesh_dim_names=tuple(places),
        shape=tuple(size for _, size in places.values()),
        get_coordinate=lambda: [place for place, _ in places.values()],
        get_rank=lambda: 5,
    )
