"""Times against a baseline: only beyond max(10 %, three times the spread), and never for what a busy machine does."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from profiler_wrapper.analysis.compare_names import match_names
from profiler_wrapper.analysis.guard_model import Baseline, GuardCheck, GuardFinding, TimeRow
from profiler_wrapper.analysis.noise import BUSY, UNSTEADY, weighted_median
from profiler_wrapper.analysis.phase import Phase

LEAST_CHANGE = 0.10
SPREADS = 3.0
BESIDE_LOAD = 2.0  # times what a busy machine's other layers changed by: beyond that it is the layer
LEAST_REST = 0.1  # of a step: with less beside a layer, a CPU's load cannot be told from the layer
_MAD_TO_SIGMA = 1.4826
_Key = tuple[str, Phase | None]


def check_time(base: Baseline, run: Baseline, *, differs: str = "") -> GuardCheck:
    """Each layer beside the others, and the step as a whole; on a CPU the step alone says too little."""
    if differs:
        return _not_judged(differs)
    for side, who in ((base, "the baseline"), (run, "the run")):
        if side.no_times:
            return _not_judged(f"{who}: {side.no_times}")
    if base.step_us is None or run.step_us is None or base.step_spread is None or run.step_spread is None:
        return _not_judged("no step has a time")
    before, after = _expanded(base), _renamed(_expanded(run), base)
    keys = [key for key in before if key in after]
    shift = np.array([math.log(after[key].level_us / before[key].level_us) for key in keys])
    weight = np.array([math.sqrt(before[key].level_us * before[key].own) for key in keys])
    common = weighted_median(shift, weight)
    on_cpu = run.traits.get("time_basis") == "cpu"
    across = _MAD_TO_SIGMA * weighted_median(np.abs(shift - common), weight)
    worse: list[GuardFinding] = []
    better: list[GuardFinding] = []
    unsteady = held_up = 0
    for key, own in zip(keys, shift.tolist(), strict=True):
        spread = max(before[key].spread, after[key].spread, across)
        if spread > UNSTEADY:
            unsteady += 1
            continue
        limit = max(math.log1p(LEAST_CHANGE), SPREADS * spread)
        excess = own - common
        if on_cpu and abs(excess) > limit:
            rest = _rest_shift(before[key].level_us, after[key].level_us, base.step_us, run.step_us)
            if rest is None:
                held_up += 1
                continue
            excess = min(excess, own - rest, key=abs) if (own - rest > 0) == (excess > 0) else 0.0
            load = max(abs(common), abs(rest))
            if load > math.log1p(BUSY) and abs(excess) > limit:
                held_up += abs(excess) <= BESIDE_LOAD * load
                limit = max(limit, BESIDE_LOAD * load)
        if abs(excess) > limit:
            (worse if excess > 0 else better).append(_finding(key, before[key].level_us, excess, limit, spread))
    if not on_cpu:
        spread = max(base.step_spread, run.step_spread)
        limit = max(math.log1p(LEAST_CHANGE), SPREADS * spread)
        whole = math.log(run.step_us / base.step_us)
        if abs(whole) > limit:
            (worse if whole > 0 else better).append(_finding(("", None), base.step_us, whole, limit, spread))
    if on_cpu and abs(math.expm1(common)) > BUSY and not worse:
        amount = f"{100 * math.expm1(common):+.0f} %"
        return _not_judged(f"all layers alike changed by {amount}, as on a busy machine or at another clock: try again")
    if unsteady + held_up and unsteady + held_up == len(keys) and on_cpu:
        return _not_judged("every layer varies too much from step to step, as on a busy machine: try again")
    worse.sort(key=_weight)
    return GuardCheck(
        name="time",
        status="regression" if worse else "improved" if better else "ok",
        regressions=tuple(worse),
        improvements=tuple(sorted(better, key=_weight)),
        reason="; ".join(_reserves(unsteady, held_up, len(keys), on_cpu=on_cpu)),
    )


def _rest_shift(before_us: float, after_us: float, step_before_us: float, step_after_us: float) -> float | None:
    """How the rest of the step changed; None where there is little of it, and so nothing to tell load by.

    Load takes more from what is long than from what is typical, so that on a CPU the typical layer does not show it.
    """
    rest_before, rest_after = step_before_us - before_us, step_after_us - after_us
    if rest_before < LEAST_REST * step_before_us or rest_after < LEAST_REST * step_after_us:
        return None
    return math.log(rest_after / rest_before)


def _reserves(unsteady: int, held_up: int, layers: int, *, on_cpu: bool) -> Iterator[str]:
    """What was not judged."""
    if on_cpu:
        yield "of layers beside one another: of the whole, a CPU's load says as much"
    if unsteady:
        yield f"{unsteady} of {layers} vary too much from step to step to be judged"
    if held_up:
        yield f"{held_up} of {layers} changed with the rest of the step or are nearly all of it, as under other load"


def _not_judged(reason: str) -> GuardCheck:
    return GuardCheck(name="time", status="not judged", reason=reason)


class _Time(NamedTuple):
    level_us: float
    spread: float
    own: float


def _expanded(side: Baseline) -> dict[_Key, _Time]:
    """The time of each layer."""

    def of_row(row: TimeRow) -> Mapping[_Key, _Time]:
        values = zip(row.names.layers(), row.levels_us, row.spreads, strict=False)
        return {(layer, row.phase): _Time(level, spread, row.own) for layer, level, spread in values if level > 0}

    return {key: value for row in side.times for key, value in of_row(row).items()}


def _renamed(after: Mapping[_Key, _Time], base: Baseline) -> dict[_Key, _Time]:
    names = [layer for row in base.times for layer in row.names.layers() if layer]
    name_of = match_names(dict.fromkeys(layer for layer, _ in after if layer), dict.fromkeys(names))
    return {(name_of.get(layer, layer), phase): value for (layer, phase), value in after.items()}


def _finding(key: _Key, before_us: float, shift: float, limit: float, spread: float) -> GuardFinding:
    layer, phase = key
    after_us = before_us * math.exp(shift)
    where = layer or (f"outside of layers ({phase})" if phase else "the whole step")
    text = (
        f"{where}: time {before_us / 1000:.4g} -> {after_us / 1000:.4g} ms a step ({100 * math.expm1(shift):+.1f} %; "
        f"spread {100 * spread:.1f} %, limit {100 * math.expm1(limit):+.1f} %)"
    )
    return GuardFinding(
        layer=layer,
        phase=phase,
        what="time",
        before=before_us,
        after=after_us,
        limit=before_us * math.exp(limit),
        text=text,
    )


def _weight(finding: GuardFinding) -> float:
    return -abs((finding.after or 0.0) - (finding.before or 0.0))
