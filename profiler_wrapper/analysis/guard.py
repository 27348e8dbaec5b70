"""A guard for continuous integration: a run against a baseline, with limits. What is exact first, then time.

Exact counts (FLOPs, kernels, waits, graph breaks, memory, attention's backend) may not leave the baseline's range.
A layer's time may change, beside the other layers, by the larger of 10 % and three times its spread (see `noise`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np

from profiler_wrapper.analysis.compare_differences import OF_MACHINE, differences
from profiler_wrapper.analysis.compare_model import Difference
from profiler_wrapper.analysis.guard_baseline import Baseline, Range, TimeKey
from profiler_wrapper.analysis.noise import BUSY, UNSTEADY, weighted_deviation, weighted_median
from profiler_wrapper.analysis.numbered_names import fill_numbers
from profiler_wrapper.analysis.phase import Phase

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
_RANK_OF_BACKEND = {"flash": 0, "cudnn": 0, "flex": 0, "external": 0, "mem_efficient": 1, "math": 2, "none": 2}
_WAITS = frozenset({"aten::item", "aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero"})
_MOST_OPS = 3
_NAMES = ("FLOPs", "ops", "synchronisations", "graph breaks", "memory", "attention", "time")
_OF_TIMES = OF_MACHINE | {"allocations in the timed steps"}  # recording those takes a few percent of a step
_OF_COUNTS = OF_MACHINE - {"CPU", "Python"}  # what the numbers of kernels, waits and bytes depend on
_NO_CAUSES: Mapping[str, str] = {}
_Calls = tuple[float, float]  # in the baseline, in the run


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardFinding:
    """One thing that is otherwise than in the baseline."""

    layer: str  # folded where like layers changed alike; "" for all of a step
    phase: Phase | None
    what: str  # "FLOPs", "kernels", "time" ...
    before: float | None  # the nearer end of the baseline's range; None: it has none
    after: float | None
    limit: float | None  # what would still have been fine
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
        reason = f"the baseline is of {model.a}, the run of {model.b}"
        return tuple(GuardCheck(name=name, status="not judged", reason=reason) for name in _NAMES)
    one, other = (bool(side.traits.get("steps")) for side in (base, run))
    if one != other:
        reason = f"{'the run' if one else 'the baseline'} marks no steps, so that nothing of it is per step"
        return tuple(GuardCheck(name=name, status="not judged", reason=reason) for name in _NAMES)
    other_machine = _in_words([one for one in found if one.what in _OF_COUNTS])
    if other_machine:
        names = ("kernels or ops", "synchronisations", "graph breaks", "memory", "attention")
        exact = tuple(GuardCheck(name=name, status="not judged", reason=other_machine) for name in names)
    else:
        causes = _better_attention(base, run)
        exact = (
            _check_events(base, run, causes=causes),
            _check_synchronisations(base, run),
            _check_breaks(base, run),
            _check_memory(base, run, causes=causes),
            _check_backends(base, run),
        )
    differs = _in_words([one for one in found if one.what in _OF_TIMES])
    return (_check_flops(base, run), *exact, _check_time(base, run, differs=differs))


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
    def members(self) -> int:
        """How many layers it stands for."""
        return len(self.layers)


def _compare_rows(
    base: Baseline,
    run: Baseline,
    what: str,
    amount: str,
    limit_of: Callable[[Range], Range],
    words: Callable[[float], str],
    causes: Mapping[str, str] = _NO_CAUSES,
) -> list[_Row]:
    """The rows whose `amount` (a field of `Exact`) left the baseline's range; like layers that changed alike together.

    `causes`: of layers, what is for the better there and explains more of the amount.
    """
    groups: dict[tuple[str, Phase, float, float, float, str], list[str]] = defaultdict(list)
    nothing: Range = (0.0, 0.0)  # of a row that is not there
    for key in dict.fromkeys((*base.exact, *run.exact)):
        before: Range | None = getattr(base.exact[key], amount) if key in base.exact else nothing
        after: Range | None = getattr(run.exact[key], amount) if key in run.exact else nothing
        if before is None or after is None:
            continue
        layer, phase = key
        found = _outside(limit_of(before), after, before)
        if found is not None:
            cause = causes.get(layer, "") if found[1] > found[0] else ""
            pattern, _ = _like_name(layer, base, run)
            groups[pattern, phase, found[0], found[1], limit_of(before)[1], cause].append(layer)
    rows = []
    for (_, phase, one, other, most, cause), layers in groups.items():
        name = _folded(layers, base, run)
        text = f"{name or 'outside of layers'} ({phase}): {what} {words(one)} -> {words(other)} ({_change(one, other)})"
        text += f", with {cause}" if cause else ""
        finding = GuardFinding(layer=name, phase=phase, what=what, before=one, after=other, limit=most, text=text)
        rows.append(_Row(finding, other > one, tuple(layers), follows=bool(cause)))
    return rows


def _like_name(layer: str, base: Baseline, run: Baseline) -> tuple[str, int | None]:
    return base.alike.get(layer) or run.alike.get(layer) or (layer, None)


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


def _same(before: Range) -> Range:
    return before


def _nearly(before: Range, slack: float = FLOPS_SLACK) -> Range:
    return before[0] * (1 - slack), before[1] * (1 + slack)


def _events_limit(before: Range) -> Range:
    """Exact where every step had as many; else what a step had on average may differ."""
    return before if all(float(value).is_integer() for value in before) else _nearly(before, UNEVEN_SLACK)


def _check_of(name: str, rows: Iterable[_Row]) -> GuardCheck:
    """The check that found `rows`, the largest change first."""
    rows = sorted(rows, key=_weight)
    worse = tuple(row.finding for row in rows if row.worse and not row.follows)
    better = tuple(row.finding for row in rows if not row.worse)
    follows = tuple(row.finding for row in rows if row.worse and row.follows)
    status: Status = "regression" if worse else "improved" if better else "ok"
    return GuardCheck(name=name, status=status, regressions=worse, improvements=better, consequences=follows)


def _weight(row: _Row) -> float:
    """The largest change first; what is of the whole step before all."""
    finding = row.finding
    if not finding.layer and finding.phase is None:
        return float("-inf")
    return -abs((finding.after or 0.0) - (finding.before or 0.0)) * row.members


def _count_text(value: float) -> str:
    """`12`, `2.5`."""
    return f"{value:g}"


def _flops_text(value: float) -> str:
    """`1.25 GFLOP`."""
    return f"{value / 1e9:.4g} GFLOP"


def _mib_text(value: float) -> str:
    """`32 MiB`."""
    return f"{value / (1 << 20):.4g} MiB"


def _change(before: float, after: float) -> str:
    """`+6.9 %`; `new` where there was none."""
    return f"{100 * (after / before - 1):+.3g} %" if before else "new"


# -- what is exact --------------------------------------------------------------------------------


def _check_flops(base: Baseline, run: Baseline) -> GuardCheck:
    """FLOPs of each layer's own ops, exactly.

    Those of the model: the scores that a fused attention's backward makes again are its way to save memory, and no
    more work of the model. What checkpointing computes again is work that it need not do without: of the phase
    `recompute` all FLOPs count, as a fact of their own.
    """
    if base.flops is None or run.flops is None:
        who = "the baseline" if base.flops is None else "the run"
        return GuardCheck(
            name="FLOPs", status="not judged", reason=f"{who} recorded no shapes (record_shapes='auto' is enough)"
        )
    rows = _compare_rows(base, run, "FLOPs", "flops", _nearly, _flops_text)
    check = _check_of("FLOPs", rows)
    unknown = _unknown_flops(base, run)
    if unknown and not check.regressions:
        return replace(check, reason="where both sides know them: some layers have an op without a FLOP formula")
    as_many = _outside(_nearly(base.flops), run.flops, base.flops) is None
    if rows and not unknown and as_many and _other_rows(base, run):
        reason = "as many in all; other layers have rows than in the baseline, so that theirs cannot be compared"
        return GuardCheck(name="FLOPs", status="ok", reason=reason)
    if check.regressions and all(finding.phase == "recompute" for finding in check.regressions):
        return replace(check, reason="the model's own are no more; these are computed again by checkpointing")
    return check


def _unknown_flops(base: Baseline, run: Baseline) -> bool:
    """Whether FLOPs were counted, and some layer's are not known."""
    return any(row.flops is None for side in (base, run) for row in side.exact.values())


def _other_rows(base: Baseline, run: Baseline) -> bool:
    """Whether one side has layers that the other does not have."""
    before, after = ({layer for layer, _ in side.exact} for side in (base, run))
    return before != after


def _check_events(base: Baseline, run: Baseline, *, causes: Mapping[str, str] = _NO_CAUSES) -> GuardCheck:
    """Kernels of each layer, on a CPU ops. `causes`: see `_better_attention`."""
    what = _event_word(run)
    rows = _compare_rows(base, run, what, "events", _events_limit, _count_text, causes)
    check = _check_of(what, _with_ops(rows, base, run))
    if check.status == "regression" and _only_autotuned(base, run):
        reason = "other kernels were chosen for the same products: as many of all other classes, and the same FLOPs"
        return GuardCheck(name=what, status="ok", reason=reason)
    return check


def _check_memory(base: Baseline, run: Baseline, *, causes: Mapping[str, str] = _NO_CAUSES) -> GuardCheck:
    """The peak, and what layers keep for backward where that is of weight at the peak.

    `causes`: see `_better_attention`; they excuse no higher peak.
    """
    if base.peak_bytes is None or run.peak_bytes is None:
        who = "the baseline" if base.peak_bytes is None else "the run"
        reason = f"{who} recorded no allocations (profile_memory=True does)"
        return GuardCheck(name="memory", status="not judged", reason=reason)
    slack = max(MEMORY_SLACK * base.peak_bytes[1], MEMORY_SLACK_BYTES, base.peak_bytes[1] - base.peak_bytes[0])
    limit = (base.peak_bytes[0] - slack, base.peak_bytes[1] + slack)
    rows = [
        row
        for row in _compare_rows(base, run, "retained", "retained_bytes", _same, _mib_text, causes)
        if abs((row.finding.after or 0.0) - (row.finding.before or 0.0)) * row.members > slack
    ]
    found = _outside(limit, run.peak_bytes, base.peak_bytes)
    if found is not None:
        before, after = found
        text = f"peak memory {_mib_text(before)} -> {_mib_text(after)} ({_change(before, after)})"
        if rows and after > before:
            grown = max(rows, key=lambda row: ((row.finding.after or 0) - (row.finding.before or 0)) * row.members)
            text += f", with {grown.finding.text}"
        rows = [
            _Row(
                GuardFinding(
                    layer="", phase=None, what="peak memory", before=before, after=after, limit=limit[1], text=text
                ),
                after > before,
            ),
            *rows,
        ]
    return _check_of("memory", rows)


def _check_backends(base: Baseline, run: Baseline) -> GuardCheck:
    """Which implementation attention runs."""
    if not any(row.backends for row in base.exact.values()):
        return GuardCheck(name="attention", status="ok", reason="the baseline has no attention")
    changed: dict[tuple[str, Phase, str, str], list[str]] = defaultdict(list)
    for layer, phase, one, other in _changed_backends(base, run):
        changed[_like_name(layer, base, run)[0], phase, one, other].append(layer)
    rows = []
    for (_, phase, one, other), layers in changed.items():
        name = _folded(layers, base, run)
        worse = _is_worse(one, other)
        text = f"attention of {name} ({phase}): {one} -> {other}"
        rows.append(
            _Row(
                GuardFinding(layer=name, phase=phase, what="attention", before=None, after=None, limit=None, text=text),
                worse,
                tuple(layers),
            )
        )
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
    for (layer, phase), row in base.exact.items():
        now = run.exact[layer, phase].backends if (layer, phase) in run.exact else ()
        if row.backends and (not now or not set(now) <= set(row.backends)):
            changed.append((layer, phase, " + ".join(row.backends), " + ".join(now) or "none"))
    return changed


def _check_synchronisations(base: Baseline, run: Baseline) -> GuardCheck:
    """Waits of the CPU for the device."""
    name = "synchronisations"
    if base.synchronisations is None or run.synchronisations is None:
        reason = "there is no device to wait for; on a CPU an .item() shows among the ops"
        return GuardCheck(name=name, status="not judged", reason=reason)
    rows = []
    for kind in dict.fromkeys((*run.synchronisations, *base.synchronisations)):
        before, after = base.synchronisations.get(kind, (0.0, 0.0)), run.synchronisations.get(kind, (0.0, 0.0))
        found = _outside(_events_limit(before), after, before)
        if found is not None:
            text = f"waits for the device, {kind}: {_count_text(found[0])} -> {_count_text(found[1])} a step"
            layer = kind.partition(" in ")[2].rpartition(", ")[0]
            finding = GuardFinding(
                layer=layer,
                phase=None,
                what=name,
                before=found[0],
                after=found[1],
                limit=_events_limit(before)[1],
                text=text,
            )
            rows.append(_Row(finding, found[1] > found[0]))
    return _check_of(name, rows)


def _check_breaks(base: Baseline, run: Baseline) -> GuardCheck:
    """Places where torch.compile could not go on."""
    name = "graph breaks"
    if base.graph_breaks is None or run.graph_breaks is None:
        return GuardCheck(name=name, status="not judged", reason="the run does not tell of them")
    found = _outside(base.graph_breaks, run.graph_breaks, base.graph_breaks)
    if found is None:
        return GuardCheck(name=name, status="ok")
    fresh = [place for place in run.break_places if place not in base.break_places]
    text = f"graph breaks: {_count_text(found[0])} -> {_count_text(found[1])}" + (f", {fresh[0]}" if fresh else "")
    finding = GuardFinding(
        layer="", phase=None, what=name, before=found[0], after=found[1], limit=base.graph_breaks[1], text=text
    )
    return _check_of(name, [_Row(finding, found[1] > found[0])])


def _event_word(run: Baseline) -> str:
    return "kernels" if run.traits.get("time_basis") == "device" else "ops"


def _only_autotuned(base: Baseline, run: Baseline) -> bool:
    """On a device: the same FLOPs, and other numbers of events only in classes whose kernels libraries choose."""
    if run.traits.get("time_basis") != "device" or base.flops is None or run.flops is None:
        return False
    if _unknown_flops(base, run) or _outside(_nearly(base.flops), run.flops, base.flops) is not None:
        return False
    changed = set()
    for name in {*base.classes, *run.classes}:
        before, after = base.classes.get(name, (0.0, 0.0)), run.classes.get(name, (0.0, 0.0))
        if _outside(_events_limit(before), after, before) is not None:
            changed.add(name)
    return bool(changed) and changed <= _AUTOTUNED and not _grown_ops(base, run)


def _is_worse(before: str, after: str) -> bool:
    return _worst(after) >= _worst(before)


def _worst(backends: str) -> int:
    return max(_RANK_OF_BACKEND.get(backend, 1) for backend in backends.split(" + "))


def _grown_ops(base: Baseline, run: Baseline) -> dict[Phase, dict[str, _Calls]]:
    """Per phase the ops of a step that are called more often."""
    grown: dict[Phase, dict[str, _Calls]] = {}
    for phase, ops in run.ops.items():
        for op, now in ops.items():
            before = base.ops.get(phase, {}).get(op, (0.0, 0.0))
            found = _outside(_events_limit(before), now, before)
            if found is not None and found[1] > found[0]:
                grown.setdefault(phase, {})[op] = found
    return grown


def _with_ops(rows: Sequence[_Row], base: Baseline, run: Baseline) -> list[_Row]:
    """The rows; those with more events name the ops, as `+2 aten::item`, for each of their layers."""
    grown = _grown_ops(base, run)
    told = []
    for row in rows:
        phase = row.finding.phase
        text = ""
        if row.worse and phase is not None:
            same_phase = [one for one in rows if one.worse and one.finding.phase == phase]
            text = _ops_text(_own(row, same_phase, grown.get(phase, {}), run.op_layers.get(phase, {})))
        told.append(replace(row, finding=replace(row.finding, text=f"{row.finding.text}: {text}")) if text else row)
    return told


def _own(
    row: _Row,
    rows: Iterable[_Row],
    grown: Mapping[str, _Calls],
    layers_of: Mapping[str, Sequence[str]],
) -> dict[str, _Calls]:
    """The ops that ran in this row and in no other, with the calls of the whole phase per layer of the row."""
    own: dict[str, _Calls] = {}
    for op, (before, after) in grown.items():
        layers = None if op not in layers_of else set(layers_of[op])
        possible = [one for one in rows if layers is None or not layers.isdisjoint(one.layers)]
        if possible == [row] and (layers is None or layers.issuperset(row.layers)):
            own[op] = before / row.members, after / row.members
    return own


def _ops_text(grown: Mapping[str, _Calls]) -> str:
    """What waits first, then what grew by the largest factor."""
    order = sorted(grown, key=lambda op: (op not in _WAITS, -_factor(*grown[op]), op))
    more = f" and {len(order) - _MOST_OPS} more" if len(order) > _MOST_OPS else ""
    return ", ".join(f"+{_count_text(grown[op][1] - grown[op][0])} {op}" for op in order[:_MOST_OPS]) + more


def _factor(before: float, after: float) -> float:
    return after / before if before else float("inf")


# -- time -----------------------------------------------------------------------------------------


def _check_time(base: Baseline, run: Baseline, *, differs: str = "") -> GuardCheck:
    """Each layer beside the others, and the step as a whole; on a CPU the step alone says too little."""
    if differs:
        return _not_judged(differs)
    for side, who in ((base, "the baseline"), (run, "the run")):
        if side.no_times:
            return _not_judged(f"{who}: {side.no_times}")
    if base.step is None or run.step is None:
        return _not_judged("no step has a time")
    before, after = base.times, run.times
    keys = [key for key in before if key in after]
    shift = np.array([math.log(after[key].level_us / before[key].level_us) for key in keys])
    weight = np.array([math.sqrt(before[key].level_us * before[key].own) for key in keys])
    common = weighted_median(shift, weight)
    on_cpu = run.traits.get("time_basis") == "cpu"
    across = weighted_deviation(shift, weight)
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
            rest = _rest_shift(before[key].level_us, after[key].level_us, base.step.level_us, run.step.level_us)
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
        spread = max(base.step.spread, run.step.spread)
        limit = max(math.log1p(LEAST_CHANGE), SPREADS * spread)
        whole = math.log(run.step.level_us / base.step.level_us)
        if abs(whole) > limit:
            (worse if whole > 0 else better).append(_finding(("", None), base.step.level_us, whole, limit, spread))
    if on_cpu and abs(math.expm1(common)) > BUSY and not worse:
        amount = f"{100 * math.expm1(common):+.0f} %"
        return _not_judged(f"all layers alike changed by {amount}, as on a busy machine or at another clock: try again")
    if unsteady + held_up and unsteady + held_up == len(keys) and on_cpu:
        return _not_judged("every layer varies too much from step to step, as on a busy machine: try again")
    worse.sort(key=_amount)
    return GuardCheck(
        name="time",
        status="regression" if worse else "improved" if better else "ok",
        regressions=tuple(worse),
        improvements=tuple(sorted(better, key=_amount)),
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


def _amount(finding: GuardFinding) -> float:
    return -abs((finding.after or 0.0) - (finding.before or 0.0))
