"""A slow layer of one rank is found in jobs that wait within their layers: FSDP2, tensor parallel, pipelines, DDP."""

from __future__ import annotations

import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

import parallel_transformers
import profiler_wrapper as pw
from processes import run_in_processes
from straggler_jobs import verdict_of

WORLD, SLOW = 4, 2  # the rank, and its block
STEPS, DELAY_S = 10, 0.15
ATTEMPTS = 3  # a busy machine makes stragglers of its own


class Plan(NamedTuple):
    kind: str
    recorded_by: str
    planted: bool = True


PLANS = [
    Plan("fsdp2", "layer timer"),
    Plan("fsdp2", "layer timer", planted=False),
    Plan("fsdp2", "profiler"),
    Plan("tp", "layer timer"),
    Plan("ddp", "layer timer"),
    Plan("1f1b", "layer timer"),
    Plan("1f1b", "profiler"),
]


def record(plans: list[Plan], folder: str) -> None:
    warnings.simplefilter("ignore")
    for plan in plans:
        torch.manual_seed(0)
        job = parallel_transformers.build(plan.kind, pause=partial(slow_down, plan.kind) if plan.planted else None)
        where: dict[str, Any] = {"output_dir": folder, "run_name": name_of(plan)}
        if plan.recorded_by == "profiler":
            where |= {"steps": f"2-{STEPS - 1}", "files": ("trace", "result")}
            recorder: Any = pw.ProfilerWrapper(job.profiled, background=False, enable_print_summary=False, **where)
        else:
            recorder = pw.LayerTimer(job.profiled, **where)
        with recorder:
            for step in range(STEPS):
                job.step(step)
                recorder.step()
        dist.barrier()


def slow_down(kind: str, blocks: nn.ModuleList) -> None:
    """One block on one rank; of a pipeline the one that this rank has, which each microbatch comes to."""
    calls = parallel_transformers.MICROBATCHES if kind in parallel_transformers.PIPELINES else 1
    if dist.get_rank() == SLOW:
        blocks[SLOW].mlp.register_forward_pre_hook(lambda module, args: time.sleep(DELAY_S / calls))  # type: ignore[operator,union-attr]


def name_of(plan: Plan) -> str:
    return "-".join((plan.kind, plan.recorded_by.replace(" ", "-"), "planted" if plan.planted else "quiet"))


def is_found(plan: Plan, run: Path) -> bool:
    verdict = verdict_of(run)
    if not plan.planted:
        return verdict.verdict == "none"
    if plan.kind in parallel_transformers.PIPELINES:  # a rank alone in its stage cannot be told from it
        return (verdict.verdict, verdict.stage, verdict.rank) == ("stage", SLOW, SLOW)
    layer = f"model.layers.{SLOW}"
    return (verdict.verdict, verdict.rank) == ("rank", SLOW) and verdict.layer in (layer, f"{layer}.mlp")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[Plan, Path]:
    """Those whose verdict is wrong are run again."""
    found: dict[Plan, Path] = {}
    for attempt in range(ATTEMPTS):
        left = [plan for plan in PLANS if plan not in found or not is_found(plan, found[plan])]
        folder = tmp_path_factory.mktemp(f"attempt{attempt}")
        if left:
            run_in_processes(record, left, str(folder), world_size=WORLD)
        found |= {plan: folder / name_of(plan) for plan in left}
    return found


@pytest.mark.parametrize("plan", PLANS, ids=name_of)
def test_the_slow_layer_is_found_and_nothing_where_there_is_none(runs: dict[Plan, Path], plan: Plan) -> None:
    verdict = verdict_of(runs[plan])
    assert is_found(plan, runs[plan]), (verdict.sentence, verdict.evidence)
