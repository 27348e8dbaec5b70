"""A slow layer of one rank is in its layer's time, in jobs that wait within their layers.

How often it is the verdict too depends on what else the machine does: benchmarks/injected_delays.py counts it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from once import Once
from processes import run_in_processes
from profiler_wrapper.ranks.load import load_ranks
from profiler_wrapper.ranks.report import RanksReport
from rank_traces import reduced_here
from slow_layer_jobs import JOBS, SLOW, WORLD, SlowLayer, is_pipeline, record

pytestmark = pytest.mark.full
STEPS, DELAY_S = 5, 0.02
PLANS = [SlowLayer(*job, DELAY_S) for job in JOBS]


@pytest.fixture(scope="module")
def reports(once: Once) -> dict[SlowLayer, RanksReport]:
    def recorded(folder: Path) -> dict[SlowLayer, RanksReport]:
        run_in_processes(record, PLANS, str(folder), STEPS, world_size=WORLD)
        with reduced_here():
            return {plan: load_ranks(folder / str(plan)) for plan in PLANS}

    found: dict[SlowLayer, RanksReport] = once("slow layers", recorded)
    return found


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_steps_of_all_ranks_are_whole(reports: dict[SlowLayer, RanksReport], plan: SlowLayer) -> None:
    own = reports[plan].own
    assert own.ranks.tolist() == list(range(WORLD))
    assert own.stages.tolist() == (list(range(WORLD)) if is_pipeline(plan) else [0] * WORLD)
    assert own.steps.tolist() == list(range(2 if plan.recorded_by == "profiler" else 0, STEPS))
    assert np.array_equal(own.self_ns.sum(axis=2) + own.waiting_ns, own.wall_ns)
    assert own.waiting_known and (own.waiting_ns > 0).any()
    assert (own.of("forward") > 0).all() and (own.of("backward") > 0).all()


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_the_slow_layers_time_has_what_was_planted(reports: dict[SlowLayer, RanksReport], plan: SlowLayer) -> None:
    """A busy machine can only add."""
    report = reports[plan]
    assert report.layers is not None
    names = report.layers.layers
    blocks = [f"model.layers.{block}" for block in range(WORLD)]
    assert set(blocks) <= set(names)
    times = report.layers.self_ns[:, :, report.layers.kinds.index("forward")]
    of_blocks = times[:, [names.index(block) for block in blocks]]
    if is_pipeline(plan):  # each rank has one
        assert (np.isfinite(of_blocks) == np.eye(WORLD, dtype=bool)).all()
    else:
        assert np.isfinite(of_blocks).all()
    assert of_blocks[SLOW, SLOW] >= DELAY_S * 1e9
    if plan[:2] != ("1f1b", "profiler"):  # of it what a receive takes that was posted before
        assert (report.own.of("forward")[:, SLOW] >= DELAY_S * 1e9).all()
