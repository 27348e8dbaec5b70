"""Jobs of many ranks as numbers: what each did itself, with noise as machines have it, and a cause planted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from profiler_wrapper.ranks.account import KINDS, Account, Points, Work, sync_each_step
from profiler_wrapper.ranks.excess import Job
from profiler_wrapper.ranks.graph import build
from profiler_wrapper.ranks.model import SELF_KINDS, LayerTimes, SelfTimes, Verdict
from profiler_wrapper.ranks.question import ask
from profiler_wrapper.ranks.report import RanksReport
from profiler_wrapper.ranks.syncs import Syncs
from profiler_wrapper.ranks.times import account, score, steady_steps
from profiler_wrapper.ranks.verdict import verdict_of

MS = 1e6
TYPICAL_MS = {"data": 1.0, "forward": 20.0, "backward": 40.0, "optimizer": 5.0, "communication": 3.0, "other": 1.5}


@dataclass(frozen=True)
class Noise:
    """Relative, but for chances."""

    of_a_phase: float = 0.05
    of_a_step: float = 0.03  # of a rank: all its phases
    of_a_rank: float = 0.01  # in all steps
    of_a_stage: float = 0.02
    tail: float = 0.02  # chance that a phase takes up to many times as long
    burst: float = 0.1  # chance that, for one to three steps, half of the ranks are up to three times slower
    warm_up: float = 4.0  # times, in the first step


QUIET = Noise(0.005, 0.002, 0.002, 0.002, 0.0, 0.0, 1.0)
ROUGH = Noise(of_a_phase=0.15, of_a_step=0.08, of_a_rank=0.02, tail=0.05, burst=0.2)


def simulated(
    cause: str = "none",
    *,
    seed: int,
    ranks: int = 8,
    stages: int = 1,
    steps: int = 20,
    delay_ms: float = 60.0,
    rank: int = 0,
    stage: int = 0,
    noise: Noise = Noise(),
) -> SelfTimes:
    """The self times of a job with `cause` planted at `rank` or `stage`."""
    random = np.random.default_rng(seed)
    shape = (steps, ranks, len(SELF_KINDS))
    own = np.tile(np.array([TYPICAL_MS.get(kind, 0.0) for kind in SELF_KINDS]), (steps, ranks, 1))
    stage_of = np.arange(ranks) * stages // ranks
    own *= random.lognormal(0, noise.of_a_phase, shape)
    own *= random.lognormal(0, noise.of_a_step, (steps, ranks, 1))
    own *= random.lognormal(0, noise.of_a_rank, (1, ranks, 1))
    own *= random.lognormal(0, noise.of_a_stage, stages)[stage_of][None, :, None]
    own *= np.where(random.random(shape) < noise.tail, 1 + random.pareto(2.5, shape), 1)
    for start in np.flatnonzero(random.random(steps) < noise.burst):
        hit = random.random(ranks) < 0.5
        own[start : start + random.integers(1, 4), hit] *= random.uniform(1.2, 3)
    _plant(own, cause, random, stage_of, rank, stage, delay_ms)
    own[0] *= noise.warm_up
    own[:, :, SELF_KINDS.index("communication")] = own[:, :, SELF_KINDS.index("communication")].min(
        axis=1, keepdims=True
    )
    own *= MS
    total = own.sum(axis=2)
    wall = np.broadcast_to(total.max(axis=1, keepdims=True), total.shape).copy()  # everybody waits for the last
    return SelfTimes(
        ranks=np.arange(ranks),
        stages=stage_of,
        steps=np.arange(steps),
        self_ns=own,
        waiting_ns=wall - total,
        wall_ns=wall,
    )


def _plant(
    own: np.ndarray, cause: str, random: np.random.Generator, stage_of: np.ndarray, rank: int, stage: int, delay: float
) -> None:
    steps, ranks, _ = own.shape
    kind = {name: place for place, name in enumerate(SELF_KINDS)}
    each, anyone = np.arange(steps), random.integers(0, ranks, steps)
    if cause in ("forward", "backward", "optimizer", "data", "other"):
        own[:, rank, kind[cause]] += delay
    elif cause == "compute":
        own[:, rank, kind["forward"]] += delay / 3
        own[:, rank, kind["backward"]] += delay * 2 / 3
    elif cause == "sometimes":
        hit = random.random(steps) < 0.5
        own[hit, rank, kind["forward"]] += delay
    elif cause == "two ranks":
        own[:, [rank, (rank + 1) % ranks], kind["forward"]] += delay
    elif cause == "all":
        own[:, :, kind["forward"]] += delay
    elif cause == "stage":
        own[:, stage_of == stage, kind["forward"]] += delay
    elif cause == "imbalance":  # the length of the longest input decides, forward and backward alike
        factor = 1 + random.exponential(delay / 60, (steps, ranks))
        for name in ("forward", "backward"):
            own[:, :, kind[name]] *= factor
    elif cause == "one long input":
        own[each, anyone, kind["forward"]] += delay / 3
        own[each, anyone, kind["backward"]] += delay * 2 / 3
    elif cause == "anyone's forward":
        own[each, anyone, kind["forward"]] += delay
    elif cause == "anyone's data":
        own[each, anyone, kind["data"]] += delay
    elif cause == "gc":
        for one in range(ranks):
            own[random.integers(0, 5) :: 5, one, kind["gc"]] += delay
    elif cause == "gc of one":
        own[1::2, rank, kind["gc"]] += delay
    else:
        assert cause == "none", cause


def layer_times(
    own: SelfTimes,
    *,
    layers: int = 8,
    seed: int = 0,
    slow: int | None = None,
    delay_ms: float = 60.0,
    ranks: tuple[int, ...] | None = None,
) -> LayerTimes:
    """Forward and backward of `own` split up over blocks with a child each; `slow` has the planted delay on `ranks`."""
    random = np.random.default_rng(seed)
    names = [name for at in range(layers) for name in (f"model.layers.{at}", f"model.layers.{at}.mlp")]
    count = len(own.ranks)
    times = np.zeros((count, len(names), 2))
    for place, milliseconds in enumerate((20.0, 40.0)):
        each = milliseconds / layers * random.lognormal(0, 0.05, (count, layers))
        times[:, 0::2, place] = each
        times[:, 1::2, place] = each * 0.6
    if slow is not None:
        chosen = list(ranks) if ranks is not None else list(range(count))
        times[chosen, 2 * slow, 0] += delay_ms
        times[chosen, 2 * slow + 1, 0] += delay_ms
    return LayerTimes(
        ranks=own.ranks,
        layers=tuple(names),
        kinds=("forward", "backward"),
        self_ns=times * MS,
    )


def diagnose(own: SelfTimes, layers: LayerTimes | None = None) -> Verdict:
    """The verdict on a job whose ranks meet at the end of each step."""
    nothing = np.empty(0, dtype=np.int64)
    syncs = Syncs(*[nothing] * 10, nothing > 0, nothing, nothing > 0, nothing.astype(np.float64))
    own_ns = np.concatenate([own.self_ns, np.zeros((*own.self_ns.shape[:2], len(KINDS) - len(SELF_KINDS)))], axis=2)
    empty = Account(
        ranks=own.ranks,
        steps=own.steps,
        own_ns=own_ns,
        waiting_ns=own.waiting_ns,
        wall_ns=own.wall_ns,
        syncs=syncs,
        points=Points(nothing, nothing, nothing, nothing),
        work=Work(nothing, nothing, nothing, nothing.astype(np.float64), nothing),
        begins_ns=np.zeros(len(own.ranks), dtype=np.int64),
        jumped=nothing,
        tokens=np.full(own.wall_ns.shape, np.nan),
        beside=np.zeros(own.wall_ns.shape, dtype=bool),
    )
    meets = sync_each_step(empty, own_ns)
    judged = np.isin(own.steps, steady_steps(own)[0].steps)
    hosts = ("",) * len(own.ranks)
    job = Job(meets, build(meets), judged, own.stages, hosts, ("",), ("",), layers=layers)
    return verdict_of(job, ask(job))


def report_of(own: SelfTimes, **more: Any) -> RanksReport:
    """What is said of such a job."""
    layers = more.pop("layers", None) or layer_times(own)
    return RanksReport(
        run="a run",
        verdict=diagnose(own, layers),
        own=own,
        accounting=account(own),
        scores=score(own),
        layers=layers,
        **more,
    )
