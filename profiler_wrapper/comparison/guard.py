"""A guard for continuous integration: a run against a baseline, with limits. What is exact first, then time.

Exact counts (FLOPs, kernels, waits, graph breaks, memory, attention's backend) may not leave the baseline's range.
A layer's time may change, beside the other layers, by the larger of 10 % and three times its spread (see `noise`).
"""

from __future__ import annotations

import math
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np

from profiler_wrapper.analysis.attention_ops import SLOWER_BACKENDS
from profiler_wrapper.analysis.model import Phase
from profiler_wrapper.analysis.statistics import fill_numbers
from profiler_wrapper.comparison.baseline import NOTHING, Amount, Baseline, Range, TimeKey, What
from profiler_wrapper.comparison.model import Difference
from profiler_wrapper.comparison.noise import BUSY, UNSTEADY, weighted_deviation, weighted_median
from profiler_wrapper.comparison.verdict import OF_MACHINE, differences
from profiler_wrapper.reports.text import clean
from profiler_wrapper.units import MIB

Status = Literal["ok", "regression", "improved", "not judged"]

FLOPS_SLACK = 0.001  # relative: means over steps of uneven length
UNEVEN_SLACK = 0.1  # relative: events of a layer whose number differs from step to step
MEMORY_SLACK = 0.01  # relative, of the peak
MEMORY_SLACK_BYTES = 64 << 10
LEAST_CHANGE = 0.10  # of a time
SPREADS = 3.0
BESIDE_LOAD = 2.0  # times what a busy machine's other layers changed by: beyond that it is the layer
LEAST_REST = 0.1  # of a step: with less beside a layer, a CPU's load cannot be told from the layer
_AUTOTUNED = frozenset({"gemm", "conv", "attention", "copy"})  # libraries choose kernels of these by trying
_WAITS = frozenset({"aten::item", "aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero"})
_MOST_OPS = 3
_NAMES = ("FLOPs", "ops", "synchronisations", "graph breaks", "memory", "attention", "time")
_OF_TIMES = OF_MACHINE | {"allocations in the timed steps"}  # recording those takes a few percent of a step
_OF_COUNTS = OF_MACHINE - {"CPU", "Python"}  # what the numbers of kernels, waits and bytes depend on
_Calls = tuple[float, float]  # in the baseline, in the run


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardFinding:
    """One thing that is otherwise than in the baseline."""

    layer: str  # folded where like layers changed alike; "" for all of a step
    phase: Phase | None = None
    what: str  # "FLOPs", "kernels", "time" ...
    before: float | None = None  # the nearer end of the baseline's range; None: it has none
    after: float | None = None
    limit: float | None = None  # what would still have been fine
    text: str  # one line


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardCheck:
    """One kind of check."""

    name: str
    status: Status
    regressions: tuple[GuardFinding, ...] = ()
    improvements: tuple[GuardFinding, ...] = ()
    consequences: tuple[GuardFinding, ...] = ()  # of a better backend of attention in these layers: no regressions
    reason: str = ""  # why it was not judged, or what was let pass


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardReport:
    """What a guard says. `print(report)` says it in words."""

    baseline: str
    run: str
    baseline_runs: int
    checks: tuple[GuardCheck, ...]
    differences: tuple[tuple[str, str, str], ...] = field(default=())  # what, in the baseline, in the run

    @property
    def regressed(self) -> bool:
        """Whether anything is worse."""
        return any(check.status == "regression" for check in self.checks)

    @property
    def judged(self) -> bool:
        """Whether anything could be judged."""
        return any(check.status != "not judged" for check in self.checks)

    def __str__(self) -> str:
        return guard_text(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain data: {verdict, regressed, judged, baseline, run, baseline_runs, differences[], checks[{name, status,
        reason, regressions[{layer, phase, what, before, after, limit, text}], improvements[...],
        consequences[...]}]}."""
        return {
            "verdict": self.verdict,
            "regressed": self.regressed,
            "judged": self.judged,
            "baseline": self.baseline,
            "run": self.run,
            "baseline_runs": self.baseline_runs,
            "differences": [{"what": what, "baseline": a, "run": b} for what, a, b in self.differences],
            "checks": [asdict(check) for check in self.checks],
        }

    @property
    def verdict(self) -> str:
        """One line."""
        worse = [finding for check in self.checks for finding in check.regressions]
        if worse:
            more = f", and {len(worse) - 1} more" if len(worse) > 1 else ""
            return f"regression: {worse[0].text}{more}"
        if not self.judged:
            return "nothing could be judged"
        better = [finding for check in self.checks for finding in check.improvements]
        return f"improved: {better[0].text}" if better else "no regression"


def guard(base: Baseline, run: Baseline, *, baseline_name: str = "baseline", run_name: str = "run") -> GuardReport:
    """Whether `run` is worse than `base`: FLOPs, kernels, waits, graph breaks, memory, attention, then time.

    Over several runs a regression is what all of them show. What is not comparable is not judged, and says why.
    """
    found = differences(base.traits, run.traits)
    run = run.renamed_like(base)
    return GuardReport(
        baseline=baseline_name,
        run=run_name,
        baseline_runs=base.runs,
        checks=_checks(base, run, found),
        differences=tuple((one.what, one.a, one.b) for one in found),
    )


def _checks(base: Baseline, run: Baseline, found: Sequence[Difference]) -> tuple[GuardCheck, ...]:
    model = next((one for one in found if one.what == "model"), None)
    if model is not None:
        return _skipped(_NAMES, f"the baseline is of {model.a}, the run of {model.b}")
    one, other = (bool(side.traits.get("steps")) for side in (base, run))
    if one != other:
        who = "the run" if one else "the baseline"
        return _skipped(_NAMES, f"{who} marks no steps, so that nothing of it is per step")
    other_machine = _in_words([one for one in found if one.what in _OF_COUNTS])
    if other_machine:
        names = ("kernels or ops", "synchronisations", "graph breaks", "memory", "attention")
        exact = _skipped(names, other_machine)
    else:
        causes = _better_attention(base, run)
        exact = (
            _check_events(base, run, causes),
            _check_synchronisations(base, run),
            _check_breaks(base, run),
            _check_memory(base, run, causes),
            _check_backends(base, run),
        )
    differs = _in_words([one for one in found if one.what in _OF_TIMES])
    return (_check_flops(base, run), *exact, _check_time(base, run, differs=differs))


def _skipped(names: Iterable[str], reason: str) -> tuple[GuardCheck, ...]:
    return tuple(_undecided(name, reason) for name in names)


def _in_words(found: Sequence[Difference]) -> str:
    return "; ".join(f"{one.what} was {one.a}, is {one.b}" for one in found)


# -- rows beyond their limits ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Row:
    """A finding, whether it is for the worse, and for which layers it stands."""

    finding: GuardFinding
    worse: bool
    layers: tuple[str, ...] = ("",)  # that it stands for, as the baseline calls them
    follows: bool = False  # from something that is for the better, so that it is no regression

    @property
    def size(self) -> float:
        """How much more there is, of all its layers together."""
        return ((self.finding.after or 0.0) - (self.finding.before or 0.0)) * len(self.layers)


def _of_step(what: str, text: str, found: tuple[float, float], most: float, *, layer: str = "") -> _Row:
    """The row of something that is no layer's own."""
    finding = GuardFinding(layer=layer, what=what, before=found[0], after=found[1], limit=most, text=text)
    return _Row(finding, found[1] > found[0])


def _layer_rows(
    base: Baseline,
    run: Baseline,
    amount: Literal["flops", "events", "retained_bytes"],
    what: str,
    limit_of: Callable[[Range], Range],
    causes: Mapping[str, str],
) -> list[_Row]:
    """The layers whose `amount` left the baseline's range; like layers that changed alike together.

    `causes`: of layers, what is for the better there and explains more of the amount.
    """
    groups: dict[tuple[str, Phase, float, float, float, str], list[str]] = defaultdict(list)
    for key in dict.fromkeys((*base.ranges, *run.ranges)):
        _, layer, phase = key
        before, after = (side.ranges.get(key, NOTHING) for side in (base, run))
        if key.what != amount or phase is None or before is None or after is None:
            continue
        found = _outside(limit_of(before), after, before)
        if found is not None:
            cause = causes.get(layer, "") if found[1] > found[0] else ""
            pattern, _ = _like_name(layer, base, run)
            groups[pattern, phase, found[0], found[1], limit_of(before)[1], cause].append(layer)
    rows = []
    for (_, phase, one, other, most, cause), layers in groups.items():
        name = _folded(layers, base, run)
        text = f"{name or 'outside of layers'} ({phase}): {what} {_change_text(amount, one, other)}"
        text += f", with {cause}" if cause else ""
        finding = GuardFinding(layer=name, phase=phase, what=what, before=one, after=other, limit=most, text=text)
        rows.append(_Row(finding, other > one, tuple(layers), follows=bool(cause)))
    return rows


def _like_name(layer: str, base: Baseline, run: Baseline) -> tuple[str, int | None]:
    return base.siblings.get(layer) or run.siblings.get(layer) or (layer, None)


def _folded(layers: Sequence[str], base: Baseline, run: Baseline) -> str:
    """`model.layers.{0..5}.mlp`: one name for like layers."""
    numbers = [number for _, number in (_like_name(layer, base, run) for layer in layers) if number is not None]
    return fill_numbers(_like_name(layers[0], base, run)[0], numbers) if len(numbers) > 1 else layers[0]


def _outside(limit: Range, now: Range, before: Range) -> tuple[float, float] | None:
    """(before, now) where all of the run is beyond what is fine: the nearer ends of both; else None."""
    if now[0] > limit[1]:
        return before[1], now[0]
    if now[1] < limit[0]:
        return before[0], now[1]
    return None


def _nearly(before: Range, slack: float = FLOPS_SLACK) -> Range:
    return before[0] * (1 - slack), before[1] * (1 + slack)


def _events_limit(before: Range) -> Range:
    """Exact where every step had as many; else what a step had on average may differ."""
    return before if all(float(value).is_integer() for value in before) else _nearly(before, UNEVEN_SLACK)


def _changed(amount: Amount, base: Baseline, run: Baseline) -> tuple[float, float] | None:
    """Calls of an op, events of a class or waits, before and now, where they left their limits."""
    before, after = (side.ranges.get(amount) or NOTHING for side in (base, run))
    return _outside(_events_limit(before), after, before)


def _check_of(name: str, rows: Iterable[_Row]) -> GuardCheck:
    """The check that found `rows`, the largest change first; what is of the whole step before all."""
    rows = sorted(
        rows, key=lambda row: -math.inf if row.finding.phase is None and not row.finding.layer else -abs(row.size)
    )
    worse = tuple(row.finding for row in rows if row.worse and not row.follows)
    better = tuple(row.finding for row in rows if not row.worse)
    follows = tuple(row.finding for row in rows if row.worse and row.follows)
    status: Status = "regression" if worse else "improved" if better else "ok"
    return GuardCheck(name=name, status=status, regressions=worse, improvements=better, consequences=follows)


def _change_text(amount: str, before: float, after: float) -> str:
    """`5 -> 7 (+40 %)`; `new` where there was none."""
    per, unit = {"flops": (1e9, " GFLOP"), "retained_bytes": (MIB, " MiB"), "peak_bytes": (MIB, " MiB")}.get(
        amount, (1, "")
    )
    # Counts may be large: their six digits are all shown.
    one, other = (f"{value / per:.4g}{unit}" if unit else f"{value:g}" for value in (before, after))
    return f"{one} -> {other} ({f'{100 * (after / before - 1):+.3g} %' if before else 'new'})"


# -- what is exact --------------------------------------------------------------------------------


def _check_flops(base: Baseline, run: Baseline) -> GuardCheck:
    """FLOPs of each layer's own ops, exactly.

    Those of the model: the scores that a fused attention's backward makes again are its way to save memory, and no
    more work of the model. What checkpointing computes again is work that it need not do without: of the phase
    `recompute` all FLOPs count, as a fact of their own.
    """
    if silent := _silent(base, run, "flops"):
        return _undecided("FLOPs", f"{silent} recorded no shapes (record_shapes='auto' is enough)")
    check = _check_of("FLOPs", _layer_rows(base, run, "flops", "FLOPs", _nearly, {}))
    if _unknown_flops(base, run) and not check.regressions:
        return replace(check, reason="where both sides know them: some layers have an op without a FLOP formula")
    if check.regressions and all(finding.phase == "recompute" for finding in check.regressions):
        return replace(check, reason="the model's own are no more; these are computed again by checkpointing")
    return check


def _silent(base: Baseline, run: Baseline, what: What) -> str:
    """Which side does not know `what` of a step; "" where both do."""
    if base.of_step(what) is None:
        return "the baseline"
    return "the run" if run.of_step(what) is None else ""


def _undecided(name: str, reason: str) -> GuardCheck:
    return GuardCheck(name=name, status="not judged", reason=reason)


def _unknown_flops(base: Baseline, run: Baseline) -> bool:
    """Whether some layer's are not known."""
    return any(
        amount.what == "flops" and amount.of_layer and known is None
        for side in (base, run)
        for amount, known in side.ranges.items()
    )


def _check_events(base: Baseline, run: Baseline, causes: Mapping[str, str]) -> GuardCheck:
    """Kernels of each layer, on a CPU ops. `causes`: see `_better_attention`."""
    what = "kernels" if run.on_device else "ops"
    rows = _layer_rows(base, run, "events", what, _events_limit, causes)
    check = _check_of(what, _with_ops(rows, base, run))
    if check.status == "regression" and _only_autotuned(base, run):
        reason = "other kernels were chosen for the same products: as many of all other classes, and the same FLOPs"
        return GuardCheck(name=what, status="ok", reason=reason)
    return check


def _check_memory(base: Baseline, run: Baseline, causes: Mapping[str, str]) -> GuardCheck:
    """The peak, and what layers keep for backward where that is of weight at the peak.

    `causes`: see `_better_attention`; they excuse no higher peak.
    """
    if silent := _silent(base, run, "peak_bytes"):
        return _undecided("memory", f"{silent} recorded no allocations (profile_memory=True does)")
    before, after = (side.of_step("peak_bytes") or NOTHING for side in (base, run))
    slack = max(MEMORY_SLACK * before[1], MEMORY_SLACK_BYTES, before[1] - before[0])
    limit = (before[0] - slack, before[1] + slack)
    rows = _layer_rows(base, run, "retained_bytes", "retained", lambda range_: range_, causes)
    rows = [row for row in rows if abs(row.size) > slack]
    found = _outside(limit, after, before)
    if found is not None:
        text = f"peak memory {_change_text('peak_bytes', *found)}"
        if rows and found[1] > found[0]:
            text += f", with {max(rows, key=lambda row: row.size).finding.text}"
        rows.insert(0, _of_step("peak memory", text, found, limit[1]))
    return _check_of("memory", rows)


def _check_backends(base: Baseline, run: Baseline) -> GuardCheck:
    """Which implementation attention runs."""
    if not base.backends:
        return GuardCheck(name="attention", status="ok", reason="the baseline has no attention")
    changed: dict[tuple[str, Phase, str, str], list[str]] = defaultdict(list)
    for layer, phase, one, other in _changed_backends(base, run):
        changed[_like_name(layer, base, run)[0], phase, one, other].append(layer)
    rows = []
    for (_, phase, one, other), layers in changed.items():
        name = _folded(layers, base, run)
        text = f"attention of {name} ({phase}): {one} -> {other}"
        finding = GuardFinding(layer=name, phase=phase, what="attention", text=text)
        rows.append(_Row(finding, _is_worse(one, other), tuple(layers)))
    return _check_of("attention", rows)


def _better_attention(base: Baseline, run: Baseline) -> dict[str, str]:
    """Layers whose attention has a better backend in some phase and a worse one in none, with both backends.

    Another implementation has other ops and keeps other tensors: that follows from it, and is no regression there.
    """
    changed = _changed_backends(base, run)
    worse = {layer for layer, _, one, other in changed if _is_worse(one, other)}
    return {layer: f"attention {one} -> {other}" for layer, _, one, other in changed if layer not in worse}


def _changed_backends(base: Baseline, run: Baseline) -> list[tuple[str, Phase, str, str]]:
    """Layer, phase, backends before and now; "none" for what has no attention any more."""
    changed = []
    for (layer, phase), before in base.backends.items():
        now = run.backends.get((layer, phase), ())
        if not now or not set(now) <= set(before):
            changed.append((layer, phase, " + ".join(before), " + ".join(now) or "none"))
    return changed


def _is_worse(before: str, after: str) -> bool:
    one, other = (max(SLOWER_BACKENDS.get(name, 0) for name in side.split(" + ")) for side in (before, after))
    return other >= one


def _check_synchronisations(base: Baseline, run: Baseline) -> GuardCheck:
    """Waits of the CPU for the device."""
    name = "synchronisations"
    if not base.on_device or not run.on_device:
        return _undecided(name, "there is no device to wait for; on a CPU an .item() shows among the ops")
    rows = []
    for wait in dict.fromkeys(amount for amount in (*run.ranges, *base.ranges) if amount.what == "wait"):
        found = _changed(wait, base, run)
        if found is not None:
            text = f"waits for the device, {wait.name}: {found[0]:g} -> {found[1]:g} a step"
            layer = wait.name.partition(" in ")[2].rpartition(", ")[0]
            rows.append(_of_step(name, text, found, _events_limit(base.ranges.get(wait) or NOTHING)[1], layer=layer))
    return _check_of(name, rows)


def _check_breaks(base: Baseline, run: Baseline) -> GuardCheck:
    """Places where torch.compile could not go on."""
    name = "graph breaks"
    before, after = (side.of_step("graph_breaks") for side in (base, run))
    if before is None or after is None:
        return _undecided(name, "the run does not tell of them")
    found = _outside(before, after, before)
    if found is None:
        return GuardCheck(name=name, status="ok")
    fresh = [place for place in run.break_places if place not in base.break_places]
    text = f"graph breaks: {found[0]:g} -> {found[1]:g}" + (f", {fresh[0]}" if fresh else "")
    return _check_of(name, [_of_step(name, text, found, before[1])])


def _only_autotuned(base: Baseline, run: Baseline) -> bool:
    """On a device: the same FLOPs, and other numbers of events only in classes whose kernels libraries choose."""
    before, after = (side.of_step("flops") for side in (base, run))
    if not run.on_device or before is None or after is None or _unknown_flops(base, run):
        return False
    classes = {amount for amount in (*base.ranges, *run.ranges) if amount.what == "class"}
    changed = {one.name for one in classes if _changed(one, base, run) is not None}
    same_flops = _outside(_nearly(before), after, before) is None
    return same_flops and bool(changed) and changed <= _AUTOTUNED and not _grown_ops(base, run)


def _grown_ops(base: Baseline, run: Baseline) -> dict[tuple[Phase, str], _Calls]:
    """The ops of a step that are called more often, by phase and op."""
    grown: dict[tuple[Phase, str], _Calls] = {}
    for amount in run.ranges:
        found = _changed(amount, base, run) if amount.what == "op" else None
        if found is not None and found[1] > found[0] and amount.phase is not None:
            grown[amount.phase, amount.name] = found
    return grown


def _with_ops(rows: Sequence[_Row], base: Baseline, run: Baseline) -> list[_Row]:
    """The rows; those with more events name the ops, as `+2 aten::item`, for each of their layers.

    Named are ops that ran in this row and in no other of its phase, with their calls in the whole phase.
    """
    grown = _grown_ops(base, run)
    named = []
    for row in rows:
        others = [one for one in rows if one.worse and one.finding.phase == row.finding.phase and one is not row]
        own: dict[str, _Calls] = {}
        for (phase, op), (before, after) in grown.items() if row.worse else ():
            layers = set(run.op_layers.get((phase, op), ()))  # empty: not all are known
            alone = (
                not others
                if not layers
                else layers.issuperset(row.layers) and all(layers.isdisjoint(one.layers) for one in others)
            )
            if phase == row.finding.phase and alone:
                own[op] = before / len(row.layers), after / len(row.layers)
        finding = replace(row.finding, text=f"{row.finding.text}: {_ops_text(own)}") if own else row.finding
        named.append(replace(row, finding=finding))
    return named


def _ops_text(grown: Mapping[str, _Calls]) -> str:
    """What waits first, then what grew by the largest factor."""

    def factor(op: str) -> float:
        before, after = grown[op]
        return after / before if before else math.inf

    order = sorted(grown, key=lambda op: (op not in _WAITS, -factor(op), op))
    more = f" and {len(order) - _MOST_OPS} more" if len(order) > _MOST_OPS else ""
    return ", ".join(f"+{grown[op][1] - grown[op][0]:g} {op}" for op in order[:_MOST_OPS]) + more


# -- time -----------------------------------------------------------------------------------------


def _check_time(base: Baseline, run: Baseline, *, differs: str = "") -> GuardCheck:
    """Each layer beside the others, and the step as a whole; on a CPU the step alone says too little.

    Load takes more from what is long than from what is typical: on a CPU a layer has to have changed beside the rest
    of its step too, and by more than a busy machine changed that.
    """
    unknown = [f"{who}: {side.no_times}" for side, who in ((base, "the baseline"), (run, "the run")) if side.no_times]
    if differs or unknown:
        return _undecided("time", differs or unknown[0])
    if base.step is None or run.step is None:
        return _undecided("time", "no step has a time")
    before, after = base.times, run.times
    keys = [key for key in before if key in after]
    shift = np.array([math.log(after[key].level_us / before[key].level_us) for key in keys])
    weight = np.array([math.sqrt(before[key].level_us * before[key].own) for key in keys])
    common, across = weighted_median(shift, weight), weighted_deviation(shift, weight)
    on_cpu = not run.on_device
    findings: list[tuple[float, GuardFinding]] = []
    unsteady = 0
    for key, own in zip(keys, shift.tolist(), strict=True):
        spread = max(before[key].spread, after[key].spread, across)
        if spread > UNSTEADY:
            unsteady += 1
            continue
        excess, least = own - common, 0.0
        if on_cpu:
            rests = [
                max(side.step.level_us - side.times[key].level_us, LEAST_REST * side.step.level_us)
                for side in (base, run)
                if side.step is not None
            ]
            rest = math.log(rests[1] / rests[0])
            excess = min(excess, own - rest, key=abs) if (own - rest > 0) == (excess > 0) else 0.0
            load = max(abs(common), abs(rest))
            least = BESIDE_LOAD * load if load > math.log1p(BUSY) else 0.0
        findings += _beyond(key, before[key].level_us, excess, spread, least)
    if on_cpu and abs(math.expm1(common)) > BUSY and not any(excess > 0 for excess, _ in findings):
        amount = f"{100 * math.expm1(common):+.0f} %"
        return _undecided(
            "time", f"all layers alike changed by {amount}, as on a busy machine or at another clock: try again"
        )
    if on_cpu and unsteady and unsteady == len(keys):
        return _undecided("time", "every layer varies too much from step to step, as on a busy machine: try again")
    if not on_cpu:
        whole = math.log(run.step.level_us / base.step.level_us)
        findings += _beyond(("", None), base.step.level_us, whole, max(base.step.spread, run.step.spread))
    reasons = ["of layers beside the rest of their step: of the whole, a CPU's load says as much"] if on_cpu else []
    reasons += [f"{unsteady} of {len(keys)} vary too much from step to step to be judged"] if unsteady else []
    findings.sort(key=lambda one: -abs((one[1].after or 0.0) - (one[1].before or 0.0)))
    worse = tuple(finding for excess, finding in findings if excess > 0)
    better = tuple(finding for excess, finding in findings if excess < 0)
    return GuardCheck(
        name="time",
        status="regression" if worse else "improved" if better else "ok",
        regressions=worse,
        improvements=better,
        reason="; ".join(reasons),
    )


def _beyond(
    key: TimeKey, before_us: float, shift: float, spread: float, least: float = 0.0
) -> Iterator[tuple[float, GuardFinding]]:
    """The finding where a change, a logarithm, is beyond its limit, which is `least` or more."""
    limit = max(math.log1p(LEAST_CHANGE), SPREADS * spread, least)
    if abs(shift) > limit:
        yield shift, _finding(key, before_us, shift, limit, spread)


def _finding(key: TimeKey, before_us: float, shift: float, limit: float, spread: float) -> GuardFinding:
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


# --------------------------------------------------------------------------------------------------
# What a guard says, as text.

_MOST = 8  # findings of one check


def guard_text(report: GuardReport, *, width: int = 100, unicode: bool = False) -> str:
    """The verdict, then each check with what it found."""
    runs = f"{report.baseline_runs} run{'s' if report.baseline_runs > 1 else ''}"
    lines = [report.verdict, f"baseline {report.baseline} ({runs}), run {report.run}"]
    lines += [f"differs: {what}: {before} -> {after}" for what, before, after in report.differences]
    for check in report.checks:
        status = "REGRESSION" if check.status == "regression" else check.status
        lines.append(f"{status:10s}  {check.name}" + (f" ({check.reason})" if check.reason else ""))
        said = ((check.regressions, "worse"), (check.improvements, "better"), (check.consequences, "follows"))
        for findings, word in said:
            lines += [f"    {word}: {finding.text}" for finding in findings[:_MOST]]
            lines += [f"    {word}: {len(findings) - _MOST} more"] if len(findings) > _MOST else []
    wrapped = (textwrap.wrap(clean(line, unicode=unicode), width, subsequent_indent="      ") for line in lines)
    return "\n".join(part for parts in wrapped for part in parts)
