"""A guard for continuous integration: a run against a baseline, with limits. What is exact first, then time.

Exact counts (FLOPs, kernels, waits, graph breaks, memory, attention's backend) may not leave the baseline's range.
A layer's time may change, beside the other layers, by the larger of 10 % and three times its spread, if that is noise
(see `times`) at all.
"""

from __future__ import annotations

import math
import os
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from tabulate import tabulate

from profiler_wrapper.analysis.attention_ops import SLOWER_BACKENDS
from profiler_wrapper.analysis.model import Analysis, Phase
from profiler_wrapper.analysis.statistics import Float
from profiler_wrapper.comparison.baseline import (
    COUNTS,
    NOTHING,
    Amount,
    Baseline,
    TimeKey,
    What,
    make_baseline,
    read_baseline,
)
from profiler_wrapper.comparison.compare import Source, name_of
from profiler_wrapper.comparison.match import OF_MACHINE, differences, siblings_together, what_differs
from profiler_wrapper.comparison.model import Difference
from profiler_wrapper.comparison.times import (
    MOST_NOISE,
    common_factors,
    layer_shifts,
    limit,
    series_change,
    step_spread,
)
from profiler_wrapper.errors import first_few
from profiler_wrapper.reports.text import clean
from profiler_wrapper.units import MIB

Status = Literal["ok", "regression", "improved", "not judged"]

FLOPS_SLACK = 0.001  # relative: means over steps of uneven length
UNEVEN_SLACK = 0.1  # relative: events of a layer whose number differs from step to step
MEMORY_SLACK = 0.01  # relative, of the peak
MEMORY_SLACK_BYTES = 64 << 10
LEAST_CHANGE = 0.10  # of a time
SPREADS = 3.0
_AUTOTUNED = frozenset({"gemm", "conv", "attention", "copy"})  # libraries choose kernels of these by trying
_WAITS = frozenset({"aten::item", "aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero"})
_MOST_OPS = 4
_OF_TIMES = OF_MACHINE | {"allocations in the timed steps"}  # recording those takes a few percent of a step
_OF_COUNTS = OF_MACHINE - {"CPU", "Python"}  # what the numbers of kernels, waits and bytes depend on
_MOST_FINDINGS = 8  # of one check, in the text
_MARKDOWN = re.compile(r"[\\`*_\[\]<>|&~]")  # what would be markup


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
    reason: str = ""  # why it was not judged, what was let pass, or what it may be

    def lines(self) -> Iterator[str]:
        """What was found, a line each, the first ones of each kind."""
        for findings, word in (
            (self.regressions, "worse"),
            (self.improvements, "better"),
            (self.consequences, "follows"),
        ):
            yield from (f"{word}: {finding.text}" for finding in findings[:_MOST_FINDINGS])
            if (more := len(findings) - _MOST_FINDINGS) > 0:
                yield f"{word}: {more} more"


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardReport:
    """What a guard says. `print(report)` says it in words."""

    baseline: str
    run: str
    baseline_runs: int
    checks: tuple[GuardCheck, ...]
    differences: tuple[tuple[str, str, str], ...] = ()  # what, in the baseline, in the run

    @property
    def regressed(self) -> bool:
        """Whether anything is worse."""
        return any(check.status == "regression" for check in self.checks)

    @property
    def judged(self) -> bool:
        """Whether anything could be judged."""
        return any(check.status != "not judged" for check in self.checks)

    @property
    def verdict(self) -> str:
        """One line."""
        worse = [finding for check in self.checks for finding in check.regressions]
        if worse:
            return f"regression: {first_few([finding.text for finding in worse], 1)}"
        if not self.judged:
            return "nothing could be judged"
        better = [finding for check in self.checks for finding in check.improvements]
        return f"improved: {better[0].text}" if better else "no regression"

    def __str__(self) -> str:
        return self.table()

    def table(self, *, width: int = 100, unicode: bool = False) -> str:
        """The verdict, then each check with what it found."""
        lines = [self.verdict, *self._sides()]
        for check in self.checks:
            status = "REGRESSION" if check.status == "regression" else check.status
            lines.append(f"{status:10s}  {check.name}" + (f" ({check.reason})" if check.reason else ""))
            lines += [f"    {line}" for line in check.lines()]
        wrapped = (textwrap.wrap(clean(line, unicode=unicode), width, subsequent_indent="      ") for line in lines)
        return "\n".join(part for parts in wrapped for part in parts)

    def markdown(self) -> str:
        """The same for the summary of a job on a code host: the verdict as a heading, and a table of the checks."""

        def plain(text: str) -> str:
            return _MARKDOWN.sub(r"\\\g<0>", clean(text, unicode=True))

        rows = []
        for check in self.checks:
            status = "**regression**" if check.status == "regression" else check.status
            rows.append((check.name, status, "<br>".join(map(plain, (*check.lines(), *filter(None, [check.reason]))))))
        sides = "\n".join(f"- {plain(line)}" for line in self._sides())
        return f"### {plain(self.verdict)}\n\n{sides}\n\n{tabulate(rows, ('check', 'result', 'what'), 'github')}"

    def _sides(self) -> list[str]:
        """What is compared with what, and what is not alike."""
        runs = f"{self.baseline_runs} run{'s' if self.baseline_runs > 1 else ''}"
        return [f"baseline {self.baseline} ({runs}), run {self.run}", *what_differs(self.differences)]

    def to_dict(self) -> dict[str, Any]:
        """Plain data: {verdict, regressed, judged, baseline, run, baseline_runs, differences[], checks[{name, status,
        reason, regressions[{layer, phase, what, before, after, limit, text}], improvements[...],
        consequences[...]}]}."""
        names = ("verdict", "regressed", "judged", "baseline", "run", "baseline_runs")
        return {
            **{name: getattr(self, name) for name in names},
            "differences": [{"what": what, "baseline": a, "run": b} for what, a, b in self.differences],
            "checks": [asdict(check) for check in self.checks],
        }


def guard(
    baseline: Source | Baseline,
    runs: Source | Baseline | Sequence[Source],
    *,
    baseline_name: str = "",
    run_name: str = "",
) -> GuardReport:
    """Whether `runs` are worse than `baseline`, as the command `guard` says it.

    FLOPs, kernels, waits, graph breaks, memory and attention, then time. What is not comparable is not judged, and
    says why.

    Args:
        baseline: the file that `guard --update` wrote, else a result, a trace or the directory of a run.
        runs: a result, a trace or a directory of a run; several are judged together: a regression is in all of them.
        baseline_name: what the baseline is called; else its path.
        run_name: what the runs are called; else their paths.

    Raises:
        WrongUse: they are of different models, or the file is no baseline.
        BrokenTrace, EmptyRecording, OSError: as `load`.
    """
    base = baseline if isinstance(baseline, Baseline) else read_baseline(baseline)
    if isinstance(runs, (Analysis, str, os.PathLike)):
        runs = [runs]
    run = (runs if isinstance(runs, Baseline) else make_baseline(runs)).renamed_like(base)
    found = differences(base.traits, run.traits)
    return GuardReport(
        baseline=baseline_name or _name_of(baseline),
        run=run_name or (_name_of(runs) if isinstance(runs, Baseline) else ", ".join(map(_name_of, runs))),
        baseline_runs=base.runs,
        checks=_checks(base, run, found),
        differences=tuple((one.what, one.a, one.b) for one in found),
    )


def _name_of(source: Source | Baseline) -> str:
    return ", ".join(source.sources) or "given" if isinstance(source, Baseline) else name_of(source, "given")


def _checks(base: Baseline, run: Baseline, found: Sequence[Difference]) -> tuple[GuardCheck, ...]:
    reason = "".join(f"the baseline is of {one.a}, the run of {one.b}" for one in found if one.what == "model")
    if bool(base.traits.get("steps")) != bool(run.traits.get("steps")):
        who = "the run" if base.traits.get("steps") else "the baseline"
        reason = reason or f"{who} marks no steps, so that nothing of it is per step"
    if reason:
        return tuple(_undecided(name, reason) for name in ("FLOPs", *_EXACT, "time"))
    if other_machine := _in_words(found, _OF_COUNTS):
        exact = tuple(_undecided(name, other_machine) for name in _EXACT)
    else:
        causes = _better_attention(base, run)
        exact = (
            _check_events(base, run, causes),
            _check_synchronisations(base, run),
            _check_breaks(base, run),
            _check_memory(base, run, causes),
            _check_backends(base, run),
        )
    why = _in_words(found, _OF_TIMES) or _no_times(base, run)
    return (_check_flops(base, run), *exact, _undecided("time", why) if why else _check_time(base, run))


_EXACT = ("kernels or ops", "synchronisations", "graph breaks", "memory", "attention")


def _undecided(name: str, reason: str) -> GuardCheck:
    return GuardCheck(name=name, status="not judged", reason=reason)


def _in_words(found: Iterable[Difference], of: frozenset[str]) -> str:
    return "; ".join(f"{one.what} was {one.a}, is {one.b}" for one in found if one.what in of)


# -- rows beyond their limits ---------------------------------------------------------------------


class _Row(NamedTuple):
    """A finding, and whether it is for the worse."""

    finding: GuardFinding
    worse: bool
    layers: int = 1  # that it stands for
    follows: bool = False  # from something that is for the better, so that it is no regression

    @property
    def size(self) -> float:
        """How much more there is, of all its layers together."""
        return ((self.finding.after or 0.0) - (self.finding.before or 0.0)) * self.layers


def _of_step(what: str, text: str, change: tuple[float, float, float], *, layer: str = "") -> _Row:
    """The row of something that is no layer's own."""
    before, after, most = change
    finding = GuardFinding(layer=layer, what=what, before=before, after=after, limit=most, text=text)
    return _Row(finding, after > before)


def _changed(what: What, base: Baseline, run: Baseline) -> dict[Amount, tuple[float, float, float]]:
    """Where all of the run is beyond what is fine: before and now, the nearer ends, and the most that would be fine."""
    changed = {}
    for amount in dict.fromkeys((*run.ranges, *base.ranges)):
        before, now = (side.ranges.get(amount, NOTHING) for side in (base, run))
        if amount.what != what or before is None or now is None:
            continue
        # Counts are exact where every step had as many; else what a step had on average may differ.
        uneven = what in COUNTS and not all(value.is_integer() for value in before)
        slack = FLOPS_SLACK if what == "flops" else UNEVEN_SLACK if uneven else 0.0
        least, most = before[0] * (1 - slack), before[1] * (1 + slack)
        if now[0] > most:
            changed[amount] = before[1], now[0], most
        elif now[1] < least:
            changed[amount] = before[0], now[1], most
    return changed


def _layer_rows(base: Baseline, run: Baseline, amount: What, what: str, causes: Mapping[str, str]) -> list[_Row]:
    """The layers whose `amount` left the baseline's range; like layers that changed alike together.

    `causes`: of layers, what is for the better there and explains more of the amount.
    """
    found = [
        (key.name, (key.phase, *change, causes.get(key.name, "") if change[1] > change[0] else ""))
        for key, change in _changed(amount, base, run).items()
        if key.phase is not None
    ]
    rows = []
    for name, layers, (phase, one, other, most, cause) in siblings_together(found, {**run.blocks, **base.blocks}):
        text = f"{name or 'outside of layers'} ({phase}): {what} {_change_text(amount, one, other)}"
        text += f", with {cause}" if cause else ""
        finding = GuardFinding(layer=name, phase=phase, what=what, before=one, after=other, limit=most, text=text)
        rows.append(_Row(finding, other > one, len(layers), follows=bool(cause)))
    return rows


def _check_of(name: str, rows: Iterable[_Row], reason: str = "") -> GuardCheck:
    """The check that found `rows`, the largest change first; what is of the whole step before all."""
    rows = sorted(
        rows, key=lambda row: -math.inf if row.finding.phase is None and not row.finding.layer else -abs(row.size)
    )
    worse = tuple(row.finding for row in rows if row.worse and not row.follows)
    better = tuple(row.finding for row in rows if not row.worse)
    return GuardCheck(
        name=name,
        status="regression" if worse else "improved" if better else "ok",
        regressions=worse,
        improvements=better,
        consequences=tuple(row.finding for row in rows if row.worse and row.follows),
        reason=reason,
    )


def _change_text(amount: What, before: float, after: float) -> str:
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
    `recompute` all FLOPs count.
    """
    if silent := _silent(base, run, "flops"):
        return _undecided("FLOPs", f"{silent} recorded no shapes (record_shapes='auto' is enough)")
    check = _check_of("FLOPs", _layer_rows(base, run, "flops", "FLOPs", {}))
    if _unknown_flops(base, run) and not check.regressions:
        return replace(check, reason="where both sides know them: some layers have an op without a FLOP formula")
    return check


def _silent(base: Baseline, run: Baseline, what: What) -> str:
    """Which side does not know `what` of a step; "" where both do."""
    if base.of_step(what) is None:
        return "the baseline"
    return "the run" if run.of_step(what) is None else ""


def _unknown_flops(base: Baseline, run: Baseline) -> bool:
    """Whether some layer's are not known."""
    return any(
        amount.what == "flops" and amount.of_layer and known is None
        for side in (base, run)
        for amount, known in side.ranges.items()
    )


def _check_events(base: Baseline, run: Baseline, causes: Mapping[str, str]) -> GuardCheck:
    """Kernels of each layer, on a CPU ops; with the ops of a step that are called more often. `causes`: see below."""
    what = "kernels" if run.on_device else "ops"
    check = _check_of(what, _layer_rows(base, run, "events", what, causes))
    if check.status != "regression":
        return check
    more = {amount: now - before for amount, (before, now, _) in _changed("op", base, run).items() if now > before}
    if not more and _only_autotuned(base, run):
        reason = "other kernels were chosen for the same products: as many of all other classes, and the same FLOPs"
        return GuardCheck(name=what, status="ok", reason=reason)
    order = sorted(more, key=lambda amount: (amount.name not in _WAITS, -more[amount], amount.name))
    named = [f"{more[amount]:+g} {amount.name} ({amount.phase})" for amount in order]
    return replace(check, reason=f"more calls a step: {first_few(named, _MOST_OPS)}" if named else "")


def _only_autotuned(base: Baseline, run: Baseline) -> bool:
    """On a device: the same FLOPs, and other numbers of events only in classes whose kernels libraries choose."""
    if not run.on_device or _silent(base, run, "flops") or _unknown_flops(base, run):
        return False
    changed = {amount.name for amount in _changed("class", base, run)}
    return bool(changed) and changed <= _AUTOTUNED and Amount("flops") not in _changed("flops", base, run)


def _check_memory(base: Baseline, run: Baseline, causes: Mapping[str, str]) -> GuardCheck:
    """The peak, and what layers keep for backward where that is of weight at the peak.

    `causes`: see `_better_attention`; they excuse no higher peak.
    """
    if silent := _silent(base, run, "peak_bytes"):
        return _undecided("memory", f"{silent} recorded no allocations (profile_memory=True does)")
    before, after = (side.of_step("peak_bytes") or NOTHING for side in (base, run))
    slack = max(MEMORY_SLACK * before[1], MEMORY_SLACK_BYTES, before[1] - before[0])
    rows = _layer_rows(base, run, "retained_bytes", "retained", causes)
    rows = [row for row in rows if abs(row.size) > slack]
    change = (before[1], after[0]) if after[0] > before[1] else (before[0], after[1])
    if after[0] > before[1] + slack or after[1] < before[0] - slack:
        text = f"peak memory {_change_text('peak_bytes', *change)}"
        if rows and change[1] > change[0]:
            text += f", with {max(rows, key=lambda row: row.size).finding.text}"
        rows.append(_of_step("peak memory", text, (*change, before[1] + slack)))
    return _check_of("memory", rows)


def _check_backends(base: Baseline, run: Baseline) -> GuardCheck:
    """Which implementation attention runs."""
    if not base.backends:
        return GuardCheck(name="attention", status="ok", reason="the baseline has no attention")
    rows = []
    for name, _, (phase, one, other) in siblings_together(_changed_backends(base, run), base.blocks):
        text = f"attention of {name} ({phase}): {one} -> {other}"
        finding = GuardFinding(layer=name, phase=phase, what="attention", text=text)
        rows.append(_Row(finding, _is_worse(one, other)))
    return _check_of("attention", rows)


def _better_attention(base: Baseline, run: Baseline) -> dict[str, str]:
    """Layers whose attention has a better backend in some phase and a worse one in none, with both backends.

    Another implementation has other ops and keeps other tensors: that follows from it, and is no regression there.
    """
    changed = _changed_backends(base, run)
    worse = {layer for layer, (_, one, other) in changed if _is_worse(one, other)}
    return {layer: f"attention {one} -> {other}" for layer, (_, one, other) in changed if layer not in worse}


def _changed_backends(base: Baseline, run: Baseline) -> list[tuple[str, tuple[Phase, str, str]]]:
    """Layer; phase, backends before and now; "none" for what has no attention any more."""
    changed: list[tuple[str, tuple[Phase, str, str]]] = []
    ran = {(amount.name, amount.phase) for amount in run.ranges if amount.what == "events"}
    for (layer, phase), before in base.backends.items():
        now = run.backends.get((layer, phase), ())
        if phase == "recompute" or (layer, phase) not in ran:
            continue  # recompute does again what forward does; and a phase that is gone is no other backend
        if not now or not set(now) <= set(before):
            changed.append((layer, (phase, " + ".join(before), " + ".join(now) or "none")))
    return changed


def _is_worse(before: str, after: str) -> bool:
    # same (0 -> -1): slow ones are above both
    one, other = (max(SLOWER_BACKENDS.get(name, 0) for name in side.split(" + ")) for side in (before, after))
    return other >= one


def _check_synchronisations(base: Baseline, run: Baseline) -> GuardCheck:
    """Waits of the CPU for the device."""
    name = "synchronisations"
    if not base.on_device or not run.on_device:
        return _undecided(name, "there is no device to wait for; on a CPU an .item() shows among the ops")
    rows = []
    for wait, change in _changed("wait", base, run).items():
        text = f"waits for the device, {wait.name}: {change[0]:g} -> {change[1]:g} a step"
        rows.append(_of_step(name, text, change, layer=wait.name.partition(" in ")[2].rpartition(", ")[0]))
    return _check_of(name, rows)


def _check_breaks(base: Baseline, run: Baseline) -> GuardCheck:
    """Places where torch.compile could not go on."""
    name = "graph breaks"
    if _silent(base, run, "graph_breaks"):
        return _undecided(name, "the run does not tell of them")
    fresh = [f", {place}" for place in run.breaks if place not in base.breaks][:1]
    return _check_of(
        name,
        [
            _of_step(name, f"graph breaks: {change[0]:g} -> {change[1]:g}{''.join(fresh)}", change)
            for change in _changed("graph_breaks", base, run).values()
        ],
    )


# -- time -----------------------------------------------------------------------------------------


def _no_times(base: Baseline, run: Baseline) -> str:
    """Why times cannot be compared; "" where they can."""
    for who, side in (("the baseline", base), ("the run", run)):
        if side.no_times:
            return f"{who}: {side.no_times}"
    return "" if base.times.keys() & run.times.keys() else "no layer of both has a time in every step"


def _check_time(base: Baseline, run: Baseline) -> GuardCheck:
    """Each layer beside the others, and the step as a whole; on a CPU the step alone says too little."""
    keys = [key for key in base.times if key in run.times]
    before, after = (np.array([side.times[key].steps_ns for key in keys]) for side in (base, run))
    step_before, step_after = (np.array(side.steps_ns) for side in (base, run))
    own = np.array([base.times[key].own for key in keys])
    weight = np.sqrt(before.mean(axis=1) * own)
    shifts = layer_shifts(before, after, weight)
    between = [_between(one, side.lengths, weight) for one, side in ((before, base), (after, run))]
    spreads = np.maximum.reduce([shifts.spread, *between])
    limits = np.maximum(_limit(spreads), limit(shifts.error))
    rows = []
    for i in np.flatnonzero(shifts.beyond_noise(on_cpu=not run.on_device)).tolist():
        shift = float(shifts.excess[i])
        if abs(shift) > limits[i]:
            rows.append(_time_row(keys[i], float(np.median(before[i])), shift, limits[i], spreads[i]))
    unsteady, moved = int((~shifts.steady).sum()), math.expm1(shifts.common)
    reason = f"{unsteady} of {len(keys)} vary too much from step to step to be judged" if unsteady else ""
    if run.on_device:
        steps = ((step_before[None, :], base.lengths), (step_after[None, :], run.lengths))
        between = [_between(one, lengths) for one, lengths in steps]
        spread = float(max(step_spread(*(np.log(one) for one, _ in steps)), *between)[0])
        whole = series_change(step_before, step_after)
        if whole.beyond_noise and abs(whole.shift) > _limit(spread):
            rows.append(_time_row(("", None), float(np.median(step_before)), whole.shift, _limit(spread), spread))
    elif abs(moved) > MOST_NOISE and not any(row.worse for row in rows):
        return _undecided("time", f"all layers alike changed by {100 * moved:+.0f} %, as on a busy machine: try again")
    elif unsteady == len(keys):
        return _undecided("time", f"{reason}, as on a busy machine: try again")
    return _check_of("time", rows, reason)


def _between(times: Float, lengths: Sequence[int], weight: Float | None = None) -> Float:
    """How far apart the runs are in each row: what their steps, taken together, do not show. 0 of one run.

    With `weight` beside what all rows of a step have in common.
    """
    logs = np.log(times)
    own = logs if weight is None else logs - common_factors(logs, weight)
    levels = [np.median(run, axis=1) for run in np.split(own, np.cumsum(lengths[:-1], dtype=int), axis=1)]
    return np.std(levels, axis=0, ddof=1) if len(levels) > 1 else np.zeros(len(own))


def _limit(spread: Any) -> Any:
    """How much a time, as a logarithm, may change."""
    return np.maximum(math.log1p(LEAST_CHANGE), SPREADS * spread)


def _time_row(key: TimeKey, before_ns: float, shift: float, limit_: float, spread: float) -> _Row:
    layer, phase = key
    before, after = before_ns / 1000, before_ns / 1000 * math.exp(shift)
    where = layer or (f"outside of layers ({phase})" if phase else "the whole step")
    text = (
        f"{where}: time {before / 1000:.4g} -> {after / 1000:.4g} ms a step ({100 * math.expm1(shift):+.1f} %; "
        f"spread {100 * spread:.1f} %, limit {100 * math.expm1(limit_):+.1f} %)"
    )
    most = before * math.exp(limit_)
    finding = GuardFinding(layer=layer, phase=phase, what="time", before=before, after=after, limit=most, text=text)
    return _Row(finding, shift > 0)
