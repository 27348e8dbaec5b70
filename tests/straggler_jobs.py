"""Training on several gloo processes with a planted delay, every part of it recorded: what a straggler looks like."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from job_clock import PlannedTime, RealTime, Sleeps
from profiler_wrapper import ProfilerWrapper
from profiler_wrapper.ranks.load import load_ranks
from profiler_wrapper.ranks.model import Verdict
from profiler_wrapper.timer.timer import Timer

Row = dict[str, Any]
Span = Callable[..., AbstractContextManager[Any]]  # span(name, kind=..., layer=..., group=..., step=...)

BLOCKS = 4  # of a rank's model, per stage
WIDTH = 32
MICROBATCHES = 4
CAUSES = ("none", "forward", "data", "stage", "layer", "late collective", "imbalance", "gc")


@dataclass(frozen=True, slots=True)
class Plan:
    """One job: what is planted where.

    Attributes:
        cause: one of CAUSES, "backward", "layer everywhere" or "anyone's forward".
        rank, stage, block: where; the block is of the whole model.
        delay_s: added to a step of whom it hits.
        work_s: that a block's forward takes, its backward twice as long.
        stages: of the pipeline; 1: data parallel alone.
        ddp: DistributedDataParallel instead of a recorded all-reduce: nobody records communication.
    """

    cause: str = "none"
    rank: int = 0
    stage: int = 0
    block: int = 0
    delay_s: float = 0.08
    work_s: float = 0.002
    steps: int = 12
    stages: int = 1
    ddp: bool = False
    seed: int = 0


class Rows:
    """Records spans as rows of the span table."""

    def __init__(self, rank: int, *, stages: int = 1, world_size: int = 1) -> None:
        self.rows: list[Row] = []
        self.rank = rank
        self.open: list[Row] = []
        self._counts: dict[tuple[Any, ...], int] = {}
        # One clock for a span's begin and its length: two, read one after the other, are apart where it is held up.
        self._wall_ns = time.time_ns() - time.perf_counter_ns()

    @contextlib.contextmanager
    def span(self, name: str, *, kind: str, step: int | None, **about: Any) -> Iterator[None]:
        row: Row = {"rank": self.rank, "step": step, "name": name, "kind": kind, "layer": None, "group": None, **about}
        row["depth"] = sum(1 for one in self.open if one["kind"] != "step")
        row["parent"] = self.open[-1]["name"] if self.open else None
        if kind == "communication":
            key = (step, name, row["group"])
            row["sequence"] = self._counts[key] = self._counts.get(key, -1) + 1
        self.rows.append(row)
        self.open.append(row)
        begin = time.perf_counter_ns()
        row["start_ns"] = self._wall_ns + begin
        try:
            yield
        finally:
            row["duration_ns"] = time.perf_counter_ns() - begin
            self.open.pop()

    def heard(self, phase: str, info: dict[str, Any]) -> None:
        """For `gc.callbacks`."""
        if phase == "start":
            self._gc = self.span("gc", kind="gc", step=self.open[0]["step"] if self.open else None)
            self._gc.__enter__()
        else:
            self._gc.__exit__(None, None, None)


class Block(nn.Module):
    """A residual MLP that takes `forward_s` and `backward_s` beside its own time."""

    def __init__(self, name: str, clock: RealTime) -> None:
        super().__init__()
        self.name, self.clock, self.span, self.step = name, clock, None, 0
        self.forward_s = self.backward_s = 0.0
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        span = self.span or (lambda *_, **__: contextlib.nullcontext())
        with span(self.name, kind="forward", layer=self.name, step=self.step):
            return values + self.mlp(Sleeps.apply(values, self.forward_s, self.backward_s, self.clock))


class Delays:
    """What each step adds on this rank, in seconds."""

    def __init__(self, plan: Plan, rank: int, world_size: int) -> None:
        self.plan, self.rank = plan, rank
        self.stage = rank * plan.stages // world_size
        anyone = np.random.default_rng(plan.seed).integers(0, world_size, plan.steps)
        self.turns = [int(one) == rank for one in anyone]

    def of(self, part: str, step: int) -> float:
        plan, here = self.plan, self.rank == self.plan.rank
        hit = {
            "forward": {
                "forward": here,
                "stage": self.stage == plan.stage,
                "anyone's forward": self.turns[step],
            }.get(plan.cause, False),
            "backward": plan.cause == "backward" and here,
            "data": plan.cause == "data" and here,
            "late": plan.cause == "late collective" and here,
            "layer": (plan.cause == "layer" and here) or plan.cause == "layer everywhere",
        }[part]
        if plan.cause == "imbalance" and part in ("forward", "backward"):
            return self.turns[step] * plan.delay_s * (1 / 3 if part == "forward" else 2 / 3)
        return plan.delay_s if hit else 0.0


def run_plan(plan: Plan, span: Span, clock: RealTime) -> None:
    """One rank's part of the job. The process group is there."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    delays = Delays(plan, rank, world_size)
    torch.manual_seed(plan.seed)
    first = delays.stage * BLOCKS
    blocks = nn.Sequential(*[Block(f"blocks.{first + at}", clock) for at in range(BLOCKS)])
    job = (_Pipeline if plan.stages > 1 else _DataParallel)(plan, blocks, delays, span, clock)
    with _own_collections():
        dist.barrier()
        clock.meet()
        for step in range(plan.steps):
            for at, block in enumerate(blocks):
                block.span, block.step = span, step
                slow = delays.of("layer", step) if first + at == plan.block else 0.0
                block.forward_s = plan.work_s + slow / job.microbatches
                block.backward_s = 2 * plan.work_s
                block.forward_s += delays.of("forward", step) / BLOCKS / job.microbatches
                block.backward_s += delays.of("backward", step) / BLOCKS / job.microbatches
            with span("step", kind="step", step=step):
                if plan.cause == "gc" and step % 2 == 0 and (step // 2) % 2 == rank % 2:
                    _SlowToGo(plan.delay_s, clock)
                    gc.collect()
                job.step(step)


@contextlib.contextmanager
def _own_collections() -> Iterator[None]:
    """No collection but those that are planted."""
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


class _SlowToGo:
    """Garbage that takes long to collect."""

    def __init__(self, seconds: float, clock: RealTime) -> None:
        self.seconds, self.clock, self.itself = seconds, clock, self

    def __del__(self) -> None:
        self.clock.sleep(self.seconds)


class _Batches(Dataset[torch.Tensor]):
    """Batches that take time to make."""

    def __init__(self, seconds: list[float], clock: RealTime) -> None:
        self.seconds, self.clock = seconds, clock

    def __len__(self) -> int:
        return len(self.seconds)

    def __getitem__(self, at: int) -> torch.Tensor:
        self.clock.sleep(0.001 + self.seconds[at])
        return torch.randn(8, WIDTH)


def _batches(plan: Plan, delays: Delays, clock: RealTime) -> Iterator[torch.Tensor]:
    seconds = [delays.of("data", step) for step in range(plan.steps)]
    return iter(DataLoader(_Batches(seconds, clock), batch_size=None))


class _DataParallel:
    microbatches = 1

    def __init__(self, plan: Plan, blocks: nn.Sequential, delays: Delays, span: Span, clock: RealTime) -> None:
        self.plan, self.delays, self.span, self.clock = plan, delays, span, clock
        self.batches = _batches(plan, delays, clock)
        self.model: nn.Module = DistributedDataParallel(blocks) if plan.ddp else blocks
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def step(self, step: int) -> None:
        with self.span("data", kind="data", step=step):
            batch = next(self.batches)
        with self.span("forward", kind="forward", step=step):
            loss = self.model(batch).square().mean()
        if self.plan.ddp:
            self.clock.sleep(self.delays.of("late", step))
        with self.span("backward", kind="backward", step=step):
            loss.backward()
        if not self.plan.ddp:
            self.clock.sleep(self.delays.of("late", step))
            grads = torch.cat([parameter.grad.flatten() for parameter in self.model.parameters()])
            for part in grads.chunk(2):
                with self.span("all_reduce", kind="communication", group="world", step=step):
                    dist.all_reduce(part)
                    self.clock.meet()
        with self.span("optimizer", kind="optimizer", step=step):
            self.optimizer.step()
            self.optimizer.zero_grad()


class _Pipeline:
    """All forwards, then all backwards (GPipe), over blocking sends and receives; data parallel beside it."""

    microbatches = MICROBATCHES

    def __init__(self, plan: Plan, blocks: nn.Sequential, delays: Delays, span: Span, clock: RealTime) -> None:
        self.plan, self.blocks, self.delays, self.span, self.clock = plan, blocks, delays, span, clock
        self.batches = _batches(plan, delays, clock)
        world_size, rank = dist.get_world_size(), dist.get_rank()
        self.width = world_size // plan.stages  # ranks of a stage
        self.last = delays.stage == plan.stages - 1
        self.before, self.after = rank - self.width, rank + self.width
        self.peers = stage_groups(plan.stages)[delays.stage]
        self.optimizer = torch.optim.SGD(blocks.parameters(), lr=1e-3)

    def step(self, step: int) -> None:
        stage = self.delays.stage
        with self.span("data", kind="data", step=step):
            next(self.batches)
        held = []
        for at in range(MICROBATCHES):
            values = torch.randn(8, WIDTH)
            if stage:
                self._move(dist.recv, "recv_forward", values, self.before, step, at)
            values.requires_grad_()  # also of the first stage, whose backward is as long as that of the others then
            with self.span("forward", kind="forward", microbatch=at, step=step):
                out = self.blocks(values)
            if not self.last:
                self._move(dist.send, "send_forward", out.detach(), self.after, step, at)
            held.append((values, out))
        for at, (values, out) in enumerate(held):
            grad = torch.empty_like(out)
            if not self.last:
                self._move(dist.recv, "recv_backward", grad, self.after, step, at)
            with self.span("backward", kind="backward", microbatch=at, step=step):
                out.square().mean().backward() if self.last else out.backward(grad)
            if stage:
                self._move(dist.send, "send_backward", values.grad, self.before, step, at)
        self.clock.sleep(self.delays.of("late", step))
        grads = torch.cat([parameter.grad.flatten() for parameter in self.blocks.parameters()])
        if self.width > 1:
            with self.span("all_reduce", kind="communication", group=f"stage {stage}", step=step):
                dist.all_reduce(grads, group=self.peers)
                self.clock.meet(self.peers)
        with self.span("norm", kind="communication", group="world", step=step):
            dist.all_reduce(torch.ones(1))
            self.clock.meet()
        with self.span("optimizer", kind="optimizer", step=step):
            self.optimizer.step()
            self.optimizer.zero_grad()

    def _move(self, how: Any, name: str, values: torch.Tensor, other: int, step: int, at: int) -> None:
        rank = dist.get_rank()
        group = f"{min(rank, other)}-{max(rank, other)}"
        with self.span(name, kind="communication", group=group, microbatch=at, step=step):
            how(values, other)
            (self.clock.sent if how is dist.send else self.clock.received)(other)


_GROUPS: dict[int, list[Any]] = {}
_MESHES: dict[int, Any] = {}


def mesh_of(plan: Plan) -> Any:
    """The device mesh that tells a rank its stage, made once; None without stages."""
    if plan.stages > 1 and plan.stages not in _MESHES:
        shape = (plan.stages, dist.get_world_size() // plan.stages)
        _MESHES[plan.stages] = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp"))
    return _MESHES.get(plan.stages)


def stage_groups(stages: int) -> list[Any]:
    """A process group for the ranks of each stage, made once; all ranks ask for them in the same order."""
    if stages not in _GROUPS:
        width = dist.get_world_size() // stages
        _GROUPS[stages] = [dist.new_group(list(range(at * width, (at + 1) * width))) for at in range(stages)]
    return _GROUPS[stages]


def record_rows(plans: list[Plan]) -> list[list[Row]]:
    """For `run_in_processes`: this rank's rows of each plan, one job after the other in the same processes."""
    clock = PlannedTime()
    with clock.shown():
        return [_rows_of(plan, clock) for plan in plans]


def _rows_of(plan: Plan, clock: RealTime) -> list[Row]:
    recorder = Rows(dist.get_rank())
    gc.callbacks.append(recorder.heard)
    try:
        run_plan(plan, recorder.span, clock)
    finally:
        gc.callbacks.remove(recorder.heard)
    return recorder.rows


def before_others() -> None:
    """This process runs before others of the machine, so that these plant no stragglers of their own (Linux, root)."""
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


def record_timers(plans: list[Plan], folder: str, alone: bool = False, planned: bool = False) -> None:
    """For `run_in_processes`: each plan a run of its own in `folder`, `job0`, `job1` ..., recorded by `Timer`.

    Args:
        alone: the ranks run before what else the machine has to do.
        planned: only what is planned takes time.
    """
    if alone:
        before_others()
    clock = PlannedTime() if planned else RealTime()
    with clock.shown():
        for at, plan in enumerate(plans):
            _record_timer(plan, folder, f"job{at}", clock)


def _record_timer(plan: Plan, folder: str, run: str, clock: RealTime) -> None:
    timer = Timer(folder, run_name=run, device="cpu", gc=True, device_mesh=mesh_of(plan))

    def span(name: str, *, kind: str, step: int, **about: Any) -> AbstractContextManager[Any]:
        if kind == "step":
            timer.step(step)
            return contextlib.nullcontext()
        return timer(name, kind=kind, **about)

    run_plan(plan, span, clock)
    timer.close()


def record_traces(plans: list[Plan], folder: str, alone: bool = False, steps: str = "all") -> None:
    """As `record_timers`, by `ProfilerWrapper`: traces, in which nobody names anything."""
    if alone:
        before_others()
    for at, plan in enumerate(plans):
        with ProfilerWrapper(
            output_dir=folder,
            run_name=f"job{at}",
            steps=steps,
            record_shapes=False,
            profile_memory=False,
            files=("trace",),
            background=False,
            enable_print_summary=False,
            device_mesh=mesh_of(plan),
        ) as prof:
            run_plan(plan, _traced(prof), RealTime())


def _traced(prof: ProfilerWrapper) -> Span:
    @contextlib.contextmanager
    def span(name: str, *, kind: str, **about: Any) -> Iterator[None]:
        yield
        if kind == "step":
            prof.step()

    return span


def verdict_of(run: Path) -> Verdict:
    """What is said of a run that `record_timers` or `record_traces` wrote."""
    return load_ranks(run).verdict


def said(plan: Plan, verdict: Verdict, ranks: int) -> bool:
    """Whether the verdict is what was planted: where, and why."""
    alone = ranks == plan.stages  # a rank of a stage of its own cannot be told from the stage
    name = f"blocks.{plan.block}"
    of_rank = (verdict.rank, verdict.layer)
    told = (verdict.verdict, verdict.cause)
    if plan.cause in ("forward", "backward", "late collective"):
        cause = "other" if plan.cause == "late collective" else plan.cause  # no span tells what it did
        return told == ("rank", cause) and of_rank == (plan.rank, None)
    if plan.cause == "data":
        return told == ("data", "data loading") and of_rank == (plan.rank, None)
    if plan.cause == "layer":
        return told == ("rank", "slow layer") and verdict.rank == plan.rank and _is(verdict.layer, name)
    if plan.cause == "layer everywhere":
        return told == ("stage", "slow layer") and _is(verdict.layer, name)
    if plan.cause == "stage":
        place = plan.stage if not alone else verdict.rank
        return told == ("stage", "slow stage") and (verdict.stage, place) == (plan.stage, plan.stage)
    expected = {
        "imbalance": ("imbalance", "data imbalance"),
        "anyone's forward": ("imbalance", "forward"),
        "gc": ("gc", "garbage collection"),
        "none": ("none", "none"),
    }
    return told == expected[plan.cause] and verdict.rank is None


def _is(layer: str | None, name: str) -> bool:
    """Layers are named by the plan; in a trace by their place in the model, which has no name."""
    return layer in (name, name.removeprefix("blocks."))
