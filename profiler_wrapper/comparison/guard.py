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
from statistics import fmean, median, stdev
from typing import Any, Literal, NamedTuple

import numpy as np

from profiler_wrapper.analysis.model import Analysis, LayerRow, OperatorRow, Phase
from profiler_wrapper.analysis.statistics import OPEN, fill_numbers
from profiler_wrapper.comparison.compare import OF_MACHINE, differences, peak_bytes, traits
from profiler_wrapper.comparison.match import Side, like_name, match_layers, match_names, side_of
from profiler_wrapper.comparison.model import Difference
from profiler_wrapper.comparison.noise import BUSY, FEWEST_STEPS, UNSTEADY, levels, weighted_deviation, weighted_median
from profiler_wrapper.errors import WrongUse
from profiler_wrapper.reports.text import clean

# --------------------------------------------------------------------------------------------------
# What a guard compares: of one run or several of the same thing, ranges of what is exact, and levels of times.
#
# A range is (least, most) over the runs. Layers go by the names that the first run has for them.

LEAST_SHARE = 0.004  # of a step: the time of a layer that takes less is not judged by itself
MOST_LAYERS_OF_OP = 5  # that a row of an op names
_MOST_PLACES = 10
_MOST_LAYERS = 1_000_000

Range = tuple[float, float]
Key = tuple[str, Phase]
TimeKey = tuple[str, Phase | None]  # all phases of a layer together; of what has no module each


@dataclass(frozen=True, slots=True)
class Exact:
    """What is exact of one layer's own in one phase, per step. None where not known."""

    flops: Range | None = None  # of the model, in recompute all (see guard.check_flops)
    events: Range | None = None
    retained_bytes: Range | None = None
    backends: tuple[str, ...] = ()  # of its attention


class LayerTime(NamedTuple):
    """Time of a layer in a step."""

    level_us: float
    spread: float  # relative, of one step or between runs
    own: float = 1.0  # share of the time that is in no layer below


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """What a run may cost."""

    runs: int = 1
    sources: tuple[str, ...] = ()
    traits: Mapping[str, Any]
    flops: Range | None  # all of a step, as in the rows
    events: Range
    peak_bytes: Range | None
    graph_breaks: Range | None  # distinct places
    break_places: tuple[str, ...] = ()
    synchronisations: Mapping[str, Range] | None  # "kind of op in layer (phase)" -> per step; None without a device
    classes: Mapping[str, Range]  # class -> events of a step
    ops: Mapping[Phase, Mapping[str, Range]]  # phase -> op -> calls of a step
    exact: Mapping[Key, Exact]
    step: LayerTime | None = None  # all time of a step; None: times cannot be judged
    times: Mapping[TimeKey, LayerTime]
    no_times: str = ""  # why times cannot be judged
    alike: Mapping[str, tuple[str, int | None]]  # layer -> name with a number left open, and that number
    # Phase -> op -> layers it ran in, "" for none; missing: more than are known.
    op_layers: Mapping[Phase, Mapping[str, tuple[str, ...]]] = field(default_factory=dict)
    results: tuple[Analysis, ...] = field(default=(), compare=False, repr=False)  # that it was made from

    def renamed_like(self, other: Baseline) -> Baseline:
        """The same with its layers by the names of `other`, whatever wraps the model."""
        own, others = (dict.fromkeys(layer for layer, _ in side.exact if layer) for side in (self, other))
        name_of = match_names(own, others)

        def name(layer: str) -> str:
            return name_of.get(layer, layer)

        return replace(
            self,
            exact={(name(layer), phase): row for (layer, phase), row in self.exact.items()},
            times={(name(layer), phase): row for (layer, phase), row in self.times.items()},
            op_layers={
                phase: {op: tuple(map(name, layers)) for op, layers in ops.items()}
                for phase, ops in self.op_layers.items()
            },
        )


def baseline_of(analyses: Sequence[Analysis], *, sources: Sequence[str] = ()) -> Baseline:
    """What runs of the same thing have cost, and how much they differ.

    Raises:
        WrongUse: there is none, or they are of different models.
    """
    if not analyses:
        raise WrongUse("a baseline needs a run")
    first = analyses[0]
    sides = [_measured(one, {} if one is first else match_layers(one, first)) for one in analyses]
    models = {str(one.traits.get("model")) for one in sides}
    if len(models) > 1:
        raise WrongUse(f"a baseline is of runs of one thing, but these are of {', '.join(sorted(models))}")
    return replace(_together(sides), sources=tuple(sources), results=tuple(analyses))


# -- one run --------------------------------------------------------------------------------------


def _measured(analysis: Analysis, name_of: Mapping[str, str]) -> Baseline:
    """Of one run; `name_of`: what layers are called, where not by their own names."""
    side, own = side_of(analysis), traits(analysis)
    no_times = _no_times(side, own)
    times, step = ({}, None) if no_times else _times(side, name_of)
    operators: dict[Phase, list[OperatorRow]] = defaultdict(list)
    for row in analysis.operators:  # without autograd's nodes: the ops of a node tell more
        if row.calls and "::" in row.op and not row.op.startswith(("autograd::", "torch::autograd::")):
            operators[row.phase].append(row)
    breaks = _break_places(analysis.run.get("graph_breaks"))
    return Baseline(
        traits=own,
        flops=_once(sum(row.flops_per_step - _not_counted(row) for row in analysis.flops) if analysis.flops else None),
        events=_per_step(sum(row.count for row in analysis.classes), side),
        peak_bytes=_once(peak_bytes(analysis)),
        graph_breaks=_once(None if breaks is None else len(breaks)),
        break_places=breaks or (),
        synchronisations=_synchronisations(side, name_of),
        classes=_sums(((row.class_name, row.count) for row in analysis.classes), side),
        ops={phase: _sums(((row.op, row.calls) for row in rows), side) for phase, rows in operators.items()},
        op_layers={
            phase: {
                row.op: ("", *(name_of.get(layer, layer) for layer in row.layers))
                for row in rows
                if len(row.layers) < MOST_LAYERS_OF_OP
            }
            for phase, rows in operators.items()
        },
        exact=_exact(side, name_of),
        times=times,
        step=step,
        no_times=no_times,
        alike={name_of.get(row.layer, row.layer): like_name(row.layer, row.block) for row in analysis.layers},
    )


def _no_times(side: Side, own: Mapping[str, Any]) -> str:
    """Why the times of a run cannot be judged; "": they can."""
    if own.get("shapes_in_timed_steps"):
        return "shapes were recorded in the timed steps, which takes time; record without record_shapes=True"
    if not side.known_steps or side.steps < FEWEST_STEPS:
        return f"it takes at least {FEWEST_STEPS} timed steps to know the noise; record more: steps='5-14'"
    return ""


def _not_counted(row: Any) -> int:
    """FLOPs that do not count: the scores that a fused backward makes again, but nothing of recompute."""
    return 0 if row.phase == "recompute" else int(row.repeated_flops_per_step)


def _once(value: float | None) -> Range | None:
    return None if value is None else (float(value), float(value))


def _per_step(count: float, side: Side) -> Range:
    return count / side.steps, count / side.steps


def _sums(counts: Iterable[tuple[str, int]], side: Side) -> dict[str, Range]:
    sums: dict[str, int] = defaultdict(int)
    for name, count in counts:
        sums[name] += count
    return {name: _per_step(count, side) for name, count in sums.items()}


def _break_places(listed: object) -> tuple[str, ...] | None:
    """Where torch.compile could not go on, each place once; None where it is not known."""
    if not isinstance(listed, (list, tuple)):
        return None
    places = []
    for one in listed:
        reason, source = (one.get("reason"), one.get("source")) if isinstance(one, Mapping) else (one, None)
        places.append(f"{source}: {reason}" if source else str(reason))
    return tuple(dict.fromkeys(places))


def _synchronisations(side: Side, name_of: Mapping[str, str]) -> dict[str, Range] | None:
    if side.analysis.time_basis != "device":
        return None
    counts = []
    for row in side.analysis.synchronisations:
        layer = row.layer or ""
        where = f" in {name_of.get(layer, layer)}" if layer else ""
        counts.append((f"{row.kind} ({row.op}){where}, {row.phase}", row.count))
    return _sums(counts, side)


def _exact(side: Side, name_of: Mapping[str, str]) -> dict[Key, Exact]:
    """Of all layers but experts, whose work the data divide."""
    analysis = side.analysis
    backends: dict[Key, set[str]] = defaultdict(set)
    for attention in analysis.attention:
        backends[attention.layer, attention.phase].add(attention.backend)
    experts = {row.layer for row in analysis.layers if row.kind == "expert"}
    parent = {row.layer: row.parent for row in analysis.layers}
    again: dict[tuple[str | None, Phase], int] = defaultdict(int)
    for flops in analysis.flops:
        again[flops.layer, flops.phase] += _not_counted(flops)
    found: dict[Key, Exact] = {}
    for row in analysis.layers:
        if not _within(row.layer, experts, parent):
            own = row.self_flops_per_step
            found[name_of.get(row.layer, row.layer), row.phase] = Exact(
                flops=_once(None if own is None else own - again[row.layer, row.phase]),
                events=None if row.self_events is None else _per_step(row.self_events, side),
                retained_bytes=_once(row.self_retained_bytes),
                backends=tuple(sorted(backends.get((row.layer, row.phase), ()))),
            )
    return found


def _within(layer: str, some: set[str], parent: Mapping[str, str | None]) -> bool:
    here: str | None = layer
    seen: set[str] = set()
    while here is not None and here not in seen:
        if here in some:
            return True
        seen.add(here)
        here = parent.get(here)
    return False


def _times(side: Side, name_of: Mapping[str, str]) -> tuple[dict[TimeKey, LayerTime], LayerTime]:
    """Of each layer with all its phases, of each phase of what has no module, and of the step."""
    grouped: dict[TimeKey, list[LayerRow]] = defaultdict(list)
    for row in side.analysis.layers:
        if row.step_times_ns:
            grouped[name_of.get(row.layer, row.layer), None if row.layer else row.phase].append(row)
    tables = {key: side.series(rows) for key, rows in grouped.items()}
    least = LEAST_SHARE * side.total_ns
    keys = [key for key, series in tables.items() if (series > 0).all() and float(series.mean()) >= least]
    level, spread = levels(side.step_totals()[None, :], np.zeros(1))
    step = LayerTime(math.exp(level[0]) / 1000, float(spread[0]))
    if not keys:
        return {}, step
    table = np.array([tables[key] for key in keys])
    own = [
        sum(row.self_time_ns for row in grouped[key]) / max(1, sum(row.time_ns for row in grouped[key])) for key in keys
    ]
    level, spread = levels(table, np.sqrt(table.mean(axis=1) * np.array(own)))
    measured = zip(np.exp(level) / 1000, spread, own, strict=True)
    return {
        key: LayerTime(float(one), float(apart), share) for key, (one, apart, share) in zip(keys, measured, strict=True)
    }, step


# -- several runs ---------------------------------------------------------------------------------


def _together(sides: Sequence[Baseline]) -> Baseline:
    """The ranges over several runs, and what their times vary by."""
    timed = [one for one in sides if not one.no_times]
    timed = [one for one in timed if not one.traits.get("memory_in_timed_steps")] or timed  # never both in one mean
    syncs = [one.synchronisations for one in sides if one.synchronisations is not None]
    return Baseline(
        runs=sum(one.runs for one in sides),
        traits=(timed or sides)[0].traits,
        flops=_span(one.flops for one in sides),
        events=_span(one.events for one in sides) or (0.0, 0.0),
        peak_bytes=_span(one.peak_bytes for one in sides),
        graph_breaks=_span(one.graph_breaks for one in sides),
        break_places=tuple(dict.fromkeys(place for one in sides for place in one.break_places))[:_MOST_PLACES],
        synchronisations=_spans(syncs) if len(syncs) == len(sides) else None,
        classes=_spans([one.classes for one in sides]),
        ops={
            phase: _spans([one.ops.get(phase, {}) for one in sides])
            for phase in dict.fromkeys(phase for one in sides for phase in one.ops)
        },
        op_layers=_op_layers(sides),
        exact={
            key: _exact_of([one.exact.get(key) for one in sides])
            for key in dict.fromkeys(key for one in sides for key in one.exact)
        },
        step=_step(timed),
        times=_times_together(timed),
        no_times="" if timed else sides[0].no_times,
        alike={layer: name for one in reversed(sides) for layer, name in one.alike.items()},
    )


def _span(ranges: Iterable[Range | None]) -> Range | None:
    known = [one for one in ranges if one is not None]
    return (min(one[0] for one in known), max(one[1] for one in known)) if known else None


def _spans(runs: Sequence[Mapping[str, Range]]) -> dict[str, Range]:
    """Of each name; a run without it has 0."""
    names = dict.fromkeys(name for run in runs for name in run)
    return {name: _span(run.get(name, (0.0, 0.0)) for run in runs) or (0.0, 0.0) for name in names}


def _exact_of(runs: Sequence[Exact | None]) -> Exact:
    known = [one for one in runs if one is not None]
    return Exact(
        flops=_span(one.flops for one in known),
        events=_span((0.0, 0.0) if one is None else one.events for one in runs),
        retained_bytes=_span(one.retained_bytes for one in known),
        backends=tuple(sorted({backend for one in known for backend in one.backends})),
    )


def _op_layers(sides: Sequence[Baseline]) -> dict[Phase, dict[str, tuple[str, ...]]]:
    """Where an op ran in any run; nothing of one of which a run does not know all."""
    found: dict[Phase, dict[str, tuple[str, ...]]] = {}
    for phase, op in dict.fromkeys((phase, op) for side in sides for phase, ops in side.ops.items() for op in ops):
        layers = [side.op_layers.get(phase, {}).get(op) for side in sides if op in side.ops.get(phase, {})]
        known = [one for one in layers if one is not None]
        if len(known) == len(layers):
            found.setdefault(phase, {})[op] = tuple(dict.fromkeys(layer for one in known for layer in one))
    return found


def _step(timed: Sequence[Baseline]) -> LayerTime | None:
    steps = [one.step for one in timed if one.step is not None]
    if not steps:
        return None
    between = stdev(math.log(one.level_us) for one in steps) if len(steps) > 1 else 0.0
    return LayerTime(median(one.level_us for one in steps), max(between, *(one.spread for one in steps)))


def _times_together(timed: Sequence[Baseline]) -> dict[TimeKey, LayerTime]:
    """Levels as in the run that is typical in all, so that a busy machine moves none; spread between runs too."""
    if len(timed) < 2:
        return dict(timed[0].times) if timed else {}
    first = timed[0].times
    keys = [key for key in first if all(key in one.times for one in timed)]
    logs = [{key: math.log(one.times[key].level_us) for key in keys} for one in timed]
    weight = np.array([math.sqrt(first[key].level_us * first[key].own) for key in keys])
    factors = [weighted_median(np.array([log[key] - logs[0][key] for key in keys]), weight) for log in logs]
    middle = median(factors)
    found: dict[TimeKey, LayerTime] = {}
    for key in keys:
        own = [log[key] - factor + middle for log, factor in zip(logs, factors, strict=True)]
        spread = max(stdev(own), fmean(one.times[key].spread for one in timed))
        found[key] = LayerTime(math.exp(median(own)), spread, first[key].own)
    return found


# -- files of earlier versions --------------------------------------------------------------------


def baseline_from_dict(data: Mapping[str, Any]) -> Baseline:
    """The baseline of a file of version 2, which held ranges and levels instead of results.

    There a range of one number is that number, and like layers are one row: `*` in a pattern stands for their numbers.

    Raises:
        WrongUse: it is none.
    """
    try:
        return _version_2(data)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise WrongUse(f"not a baseline that guard wrote: {error}") from error


def _version_2(data: Mapping[str, Any]) -> Baseline:
    _check_numbers({key: value for key, value in data.items() if key != "traits"})
    if data["runs"] < 1 or not isinstance(data["traits"].get("coverage", 0.0), (int, float)):
        raise ValueError(f"it is of {data['runs']} runs, with a coverage of {data['traits'].get('coverage')!r}")
    alike: dict[str, tuple[str, int | None]] = {}
    exact: dict[Key, Exact] = {}
    times: dict[TimeKey, LayerTime] = {}
    for row in data["rows"]:
        ranges = {key: _range(row.get(key)) for key in ("flops", "events", "retained_bytes")}
        names = _names(row["names"])
        alike |= names
        exact |= {(layer, row["phase"]): Exact(**ranges, backends=tuple(row.get("backends", ()))) for layer in names}
    for row in data.get("times", ()):
        rows = zip(_names(row["names"]), _list(row["levels_us"]), _list(row["spreads"]), strict=True)
        for layer, level, spread in rows:
            times[layer, row.get("phase")] = LayerTime(level, spread, row["own"])
    syncs = data.get("synchronisations")
    return Baseline(
        runs=data["runs"],
        sources=tuple(data.get("sources", ())),
        traits=data["traits"],
        flops=_range(data.get("flops")),
        events=_range(data["events"]) or (0.0, 0.0),
        peak_bytes=_range(data.get("peak_bytes")),
        graph_breaks=_range(data.get("graph_breaks")),
        break_places=tuple(data.get("break_places", ())),
        synchronisations=None if syncs is None else _named_ranges(syncs),
        classes=_named_ranges(data["classes"]),
        ops={phase: _named_ranges(ops) for phase, ops in data["ops"].items()},
        exact=exact,
        times=times,
        step=LayerTime(data["step_us"], data["step_spread"]) if "step_us" in data else None,
        no_times=data.get("no_times", ""),
        alike=alike,
    )


def _check_numbers(value: Any) -> None:
    """A number that is none would let every run pass."""
    if isinstance(value, float) and not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{value} is no amount")
    for item in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        _check_numbers(item)


def _list(value: Any) -> list[float]:
    """Two equal numbers were written as one, as in a range."""
    return value if isinstance(value, list) else [value, value]


def _range(value: Any) -> Range | None:
    if value is None:
        return None
    least, most = map(float, _list(value))
    if least > most:
        raise ValueError(f"{value} is no range")
    return least, most


def _named_ranges(values: Mapping[str, Any]) -> dict[str, Range]:
    return {name: _range(value) or (0.0, 0.0) for name, value in values.items()}


def _names(names: Mapping[str, Any]) -> dict[str, tuple[str, int | None]]:
    """The layers that a row stands for, each with its pattern and number."""
    pattern, runs = names["pattern"], names.get("numbers", ())
    if not runs:
        return {pattern: (pattern, None)}
    runs = [_range(run) or (0, 0) for run in runs]
    if sum(last - first + 1 for first, last in runs) > _MOST_LAYERS:
        raise ValueError(f"{pattern} stands for more than {_MOST_LAYERS} layers")
    numbers = [number for first, last in runs for number in range(int(first), int(last) + 1)]
    return {pattern.replace("*", str(number), 1): (pattern.replace("*", OPEN, 1), number) for number in numbers}


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


# --------------------------------------------------------------------------------------------------
# What a guard says, as text.

_MOST = 8  # findings of one check
_WORDS = {"ok": "ok", "regression": "REGRESSION", "improved": "improved", "not judged": "not judged"}


def guard_text(report: GuardReport, *, width: int = 100, unicode: bool = False) -> str:
    """The verdict, then each check with what it found."""
    lines = textwrap.wrap(clean(report.verdict, unicode=unicode), width)
    runs = f"{report.baseline_runs} run{'s' if report.baseline_runs > 1 else ''}"
    lines.append(clean(f"baseline {report.baseline} ({runs}), run {report.run}", unicode=unicode))
    lines += [
        line
        for what, before, after in report.differences
        for line in _wrapped(f"differs: {what}: {before} -> {after}", width, unicode)
    ]
    for check in report.checks:
        lines += _check(check, width, unicode)
    return "\n".join(lines)


def _check(check: GuardCheck, width: int, unicode: bool) -> list[str]:
    reason = f" ({check.reason})" if check.reason else ""
    lines = _wrapped(f"{_WORDS[check.status]:10s}  {check.name}{reason}", width, unicode)
    said = ((check.regressions, "worse"), (check.improvements, "better"), (check.consequences, "follows"))
    for findings, word in said:
        for finding in findings[:_MOST]:
            lines += _wrapped(f"    {word}: {finding.text}", width, unicode)
        if len(findings) > _MOST:
            lines.append(f"    {word}: {len(findings) - _MOST} more")
    return lines


def _wrapped(text: str, width: int, unicode: bool) -> list[str]:
    return textwrap.wrap(clean(text, unicode=unicode), width, subsequent_indent="      ") or [""]
