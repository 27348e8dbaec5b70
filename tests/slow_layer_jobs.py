"""A layer of one rank that is slow, in jobs that wait within their layers or beside them: FSDP2, pipelines, experts."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import parallel_transformers
import profiler_wrapper as pw
from profiler_wrapper.ranks.model import Verdict

WORLD, SLOW = 4, 2  # the rank, and its block


class SlowLayer(NamedTuple):
    """A job; `planted` is what the block of the rank takes longer."""

    kind: str  # of parallel_transformers
    recorded_by: str  # "layer timer" or "profiler"
    planted_s: float = 0.0
    run: int = 0

    def __str__(self) -> str:
        told = f"{self.kind} {self.recorded_by} {'planted' if self.planted_s else 'quiet'} {self.run}"
        return told.replace(" ", "-")


JOBS = (
    ("fsdp2", "layer timer"),
    ("fsdp2", "profiler"),
    ("tp", "layer timer"),
    ("ddp", "layer timer"),
    ("1f1b", "layer timer"),
    ("1f1b", "profiler"),
    ("async all-reduce", "profiler"),
    ("experts", "layer timer"),
    ("experts", "profiler"),
    ("ddp", "profiler"),
)


def record(plans: Sequence[SlowLayer], folder: str, steps: int) -> None:
    """For `run_in_processes`: each plan a run of its own in `folder`, called as the plan."""
    warnings.simplefilter("ignore")
    for plan in plans:
        torch.manual_seed(0)
        job = parallel_transformers.build(plan.kind, pause=partial(slow_down, plan))
        where: dict[str, Any] = {"output_dir": folder, "run_name": str(plan)}
        if plan.recorded_by == "profiler":
            where |= {"steps": f"2-{steps - 1}", "files": ("trace", "result")}
            recorder: Any = pw.ProfilerWrapper(job.profiled, background=False, enable_print_summary=False, **where)
        else:
            recorder = pw.LayerTimer(job.profiled, **where)
        with recorder:
            for step in range(steps):
                job.step(step)
                recorder.step()
        dist.barrier()


def slow_down(plan: SlowLayer, blocks: nn.ModuleList) -> None:
    """One block on one rank; of a pipeline the one that this rank has, which each microbatch comes to."""
    pause_s = plan.planted_s / (parallel_transformers.MICROBATCHES if is_pipeline(plan) else 1)
    if dist.get_rank() == SLOW and pause_s:
        blocks[SLOW].mlp.register_forward_pre_hook(lambda module, args: time.sleep(pause_s))  # type: ignore[operator,union-attr]


def is_pipeline(plan: SlowLayer) -> bool:
    return plan.kind in parallel_transformers.PIPELINES


def said(plan: SlowLayer, verdict: Verdict) -> bool:
    """Whether the verdict is what was planted."""
    if not plan.planted_s:
        return verdict.verdict == "none"
    if is_pipeline(plan):  # a rank alone in its stage cannot be told from it
        return (verdict.verdict, verdict.stage, verdict.rank) == ("stage", SLOW, SLOW)
    layer = f"model.layers.{SLOW}"
    return (verdict.verdict, verdict.rank) == ("rank", SLOW) and verdict.layer in (
        layer,
        f"{layer}.mlp",
        f"{layer}.mlp.expert",
    )
