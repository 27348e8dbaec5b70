"""A guard for continuous integration: a run against a baseline, with limits. What is exact first, then time.

Exact counts (FLOPs, kernels, waits, graph breaks, memory, attention's backend) may not leave the baseline's range.
A layer's time, apart from what all layers share, may change by noise (see `times`), and by the larger of 10 % and three
times its spread.
"""

from __future__ import annotations

import math
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from tabulate import tabulate

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
from profiler_wrapper.comparison.model import LEAST_BYTES, SAME, Difference
from profiler_wrapper.comparison.times import (
    common_factors,
    layer_shifts,
    limit,
    other_load,
    series_change,
    step_spread,
)
from profiler_wrapper.errors import first_few
from profiler_wrapper.place.attention_ops import SLOWER_BACKENDS
from profiler_wrapper.place.names import Phase
from profiler_wrapper.reports.text import clean
from profiler_wrapper.tables.model import Analysis
from profiler_wrapper.tables.statistics import Float
from profiler_wrapper.units import MIB

Status = Literal["ok", "regression", "improved", "not judged"]

FLOPS_SLACK = 0.001  # relative: means over steps of uneven length
UNEVEN_SLACK = 0.1  # relative: events of a layer whose number differs from step to step
LEAST_SLOWDOWN = 0.10  # relative: a time may change by so much
SPREADS = 3.0  # standard deviations of a step, or of runs: a time may change by so many
_AUTOTUNED = frozenset({"gemm", "conv", "attention", "copy"})  # classes whose kernels libraries choose by trying
_WAITS = frozenset({"aten::item", "aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero"})
_MOST_OPS = 4  # named in a reason
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
    """Return whether `runs` are worse than `baseline`, as the command `guard` does.

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
    incomparable = "".join(f"the baseline is of {one.a}, the run of {one.b}" for one in found if one.what == "model")
    if not incomparable and bool(base.traits.get("steps")) != bool(run.traits.get("steps")):
        who = "the run" if base.traits.get("steps") else "the baseline"
        incomparable = f"{who} marks no steps, so that nothing of it is per step"
    checks = []
    for kind in _KINDS:
        others = "; ".join(f"{one.what} was {one.a}, is {one.b}" for one in found if one.what in kind.same_traits)
        why = incomparable or others or _not_recorded(base, run, kind)
        checks.append(_undecided(kind.name, why) if why else kind.check(base, run))
    return tuple(checks)


def _undecided(name: str, reason: str) -> GuardCheck:
    return GuardCheck(name=name, status="not judged", reason=reason)


def _not_recorded(base: Baseline, run: Baseline, kind: _Kind) -> str:
    """Return which side does not know of a step what a check needs; "" where both do."""
    silent = [name for name, side in (("the baseline", base), ("the run", run)) if not _knows(side, kind.needs)]
    return f"{silent[0]} {kind.without}" if silent else ""


def _knows(side: Baseline, what: What | None) -> bool:
    return what is None or side.of_step(what) is not None


# What is beyond its limits.


class _Row(NamedTuple):
    """A finding, and how much more there is than before, of all its layers: more is worse."""

    finding: GuardFinding
    size: float
    follows: bool = False  # from something that is better, so that it is no regression


def _row(
    what: str,
    text: str,
    change: tuple[float, float, float],
    *,
    layer: str = "",
    phase: Phase | None = None,
    layers: int = 1,
    follows: bool = False,
) -> _Row:
    """Return the row of a change (before, now, the most that would be fine); what is of a whole step is the largest."""
    before, after, most = change
    size = (after - before) * (layers if layer or phase else math.inf)
    finding = GuardFinding(layer=layer, phase=phase, what=what, before=before, after=after, limit=most, text=text)
    return _Row(finding, size, follows)


def _changed(what: What, base: Baseline, run: Baseline) -> dict[Amount, tuple[float, float, float]]:
    """Return where all of the run is beyond what is fine: before and now (the nearer ends), the most that is fine."""
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
    """Return the layers whose `amount` left the baseline's range; sibling layers that changed alike together.

    `causes`: of layers, what is better there and explains more of the amount.
    """
    found = [
        (key.name, (key.phase, change, causes.get(key.name, "") if change[1] > change[0] else ""))
        for key, change in _changed(amount, base, run).items()
        if key.phase is not None
    ]
    rows = []
    for name, layers, (phase, change, cause) in siblings_together(found, {**run.blocks, **base.blocks}):
        text = f"{name or 'outside of layers'} ({phase}): {what} {_change_text(amount, *change[:2])}"
        text += f", with {cause}" if cause else ""
        rows.append(_row(what, text, change, layer=name, phase=phase, layers=len(layers), follows=bool(cause)))
    return rows


def _check_of(name: str, rows: Iterable[_Row], reason: str = "") -> GuardCheck:
    """Return the check that found `rows`, the largest change first."""
    rows = sorted(rows, key=lambda row: -abs(row.size))
    worse = tuple(row.finding for row in rows if row.size > 0 and not row.follows)
    better = tuple(row.finding for row in rows if row.size < 0)
    return GuardCheck(
        name=name,
        status="regression" if worse else "improved" if better else "ok",
        regressions=worse,
        improvements=better,
        consequences=tuple(row.finding for row in rows if row.size > 0 and row.follows),
        reason=reason,
    )


def _change_text(amount: What, before: float, after: float) -> str:
    """Return `5 -> 7 (+40 %)`; `new` where there was none."""
    per, unit = (1e9, " GFLOP") if amount == "flops" else (MIB, " MiB") if amount.endswith("_bytes") else (1, "")
    # Counts may be large: their six digits are all shown.
    one, other = (f"{value / per:.4g}{unit}" if unit else f"{value:g}" for value in (before, after))
    return f"{one} -> {other} ({f'{100 * (after / before - 1):+.3g} %' if before else 'new'})"


# What is exact.


def _check_flops(base: Baseline, run: Baseline) -> GuardCheck:
    """Compare FLOPs of each layer's own ops, exactly.

    Those of the model: the scores that a fused attention's backward makes again are its way to save memory, and no
    more work of the model. What checkpointing computes again is work that it need not do without: of the phase
    `recompute` all FLOPs count.
    """
    check = _check_of("FLOPs", _layer_rows(base, run, "flops", "FLOPs", {}))
    if _all_flops_known(base, run) or check.regressions:
        return check
    return replace(check, reason="where both sides know them: some layers have an op without a FLOP formula")


def _all_flops_known(*sides: Baseline) -> bool:
    """Whether both sides know the FLOPs of every layer and of a step."""
    return all(known is not None for side in sides for amount, known in side.ranges.items() if amount.what == "flops")


def _check_events(base: Baseline, run: Baseline) -> GuardCheck:
    """Compare kernels of each layer, on a CPU ops; with the ops of a step that are called more often."""
    what = "kernels" if run.on_device else "ops"
    check = _check_of(what, _layer_rows(base, run, "events", what, _better_attention(base, run)))
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
    """Whether the FLOPs are the same, and only numbers of kernels that libraries choose by trying are not."""
    changed = {amount.name for amount in _changed("class", base, run)}
    same_flops = _all_flops_known(base, run) and Amount("flops") not in _changed("flops", base, run)
    return run.on_device and same_flops and bool(changed) and changed <= _AUTOTUNED


def _check_memory(base: Baseline, run: Baseline) -> GuardCheck:
    """Compare the peak, and what layers keep for backward where that is of weight at the peak.

    A better backend of attention excuses no higher peak.
    """
    before, after = (side.of_step("peak_bytes") or NOTHING for side in (base, run))
    slack = max(SAME * before[1], LEAST_BYTES, before[1] - before[0])
    rows = _layer_rows(base, run, "retained_bytes", "retained", _better_attention(base, run))
    rows = [row for row in rows if abs(row.size) > slack]
    change = (before[1], after[0]) if after[0] > before[1] else (before[0], after[1])
    if after[0] > before[1] + slack or after[1] < before[0] - slack:
        text = f"peak memory {_change_text('peak_bytes', *change)}"
        if rows and change[1] > change[0]:
            text += f", with {max(rows, key=lambda row: row.size).finding.text}"
        rows.append(_row("peak memory", text, (*change, before[1] + slack)))
    return _check_of("memory", rows)


def _check_backends(base: Baseline, run: Baseline) -> GuardCheck:
    """Compare which implementation attention runs."""
    if not base.backends:
        return GuardCheck(name="attention", status="ok", reason="the baseline has no attention")
    rows = []
    for name, _, (phase, one, other) in siblings_together(_changed_backends(base, run), base.blocks):
        text = f"attention of {name} ({phase}): {one} -> {other}"
        finding = GuardFinding(layer=name, phase=phase, what="attention", text=text)
        rows.append(_Row(finding, 1 if _is_worse(one, other) else -1))
    return _check_of("attention", rows)


def _better_attention(base: Baseline, run: Baseline) -> dict[str, str]:
    """Return layers whose attention has a better backend in some phase and a worse one in none, with both backends.

    Another implementation has other ops and keeps other tensors: that follows from it, and is no regression there.
    """
    changed = _changed_backends(base, run)
    worse = {layer for layer, (_, one, other) in changed if _is_worse(one, other)}
    return {layer: f"attention {one} -> {other}" for layer, (_, one, other) in changed if layer not in worse}


def _changed_backends(base: Baseline, run: Baseline) -> list[tuple[str, tuple[Phase, str, str]]]:
    """Return layers with phase, backends before and now; "none" for what has no attention now."""
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
    """Compare waits of the CPU for the device."""
    name = "synchronisations"
    if not base.on_device or not run.on_device:
        return _undecided(name, "there is no device to wait for; on a CPU an .item() shows among the ops")
    rows = []
    for wait, change in _changed("wait", base, run).items():
        text = f"waits for the device, {wait.name}: {change[0]:g} -> {change[1]:g} a step"
        rows.append(_row(name, text, change, layer=wait.name.partition(" in ")[2].rpartition(", ")[0]))
    return _check_of(name, rows)


def _check_breaks(base: Baseline, run: Baseline) -> GuardCheck:
    """Compare places where torch.compile could not go on."""
    name = "graph breaks"
    fresh = "".join([f", {place}" for place in run.breaks if place not in base.breaks][:1])
    changes = _changed("graph_breaks", base, run).values()
    return _check_of(name, [_row(name, f"{name}: {one[0]:g} -> {one[1]:g}{fresh}", one) for one in changes])


# Time.


def _check_time(base: Baseline, run: Baseline) -> GuardCheck:
    """Compare each layer beside the others, and the step as a whole; on a CPU the step alone says too little."""
    keys = [key for key in base.times if key in run.times]
    why = [f"{who}: {side.no_times}" for who, side in (("the baseline", base), ("the run", run)) if side.no_times]
    if why or not keys:
        return _undecided("time", why[0] if why else "no layer of both has a time in every step")
    before, after = (np.array([side.times[key].steps_ns for key in keys]) for side in (base, run))
    weight = np.sqrt(before.mean(axis=1) * np.array([base.times[key].own for key in keys]))
    steps = np.array(base.steps_ns), np.array(run.steps_ns)
    shifts = layer_shifts(before, after, weight, cpu_steps=None if run.on_device else steps)
    spreads = np.maximum(shifts.spread, _between_runs(before, base, weight), _between_runs(after, run, weight))
    limits = np.maximum(_limit(spreads), limit(shifts.error))
    rows = [
        _time_row(keys[i], float(np.median(before[i])), float(shifts.excess[i]), limits[i], spreads[i])
        for i in np.flatnonzero(shifts.beyond_noise() & (np.abs(shifts.excess) > limits))
    ]
    unsteady = int((~shifts.steady).sum())
    reason = f"{unsteady} of {len(keys)} vary too much from step to step to be judged" if unsteady else ""
    if run.on_device:
        between = [_between_runs(one[None, :], side) for one, side in zip(steps, (base, run), strict=True)]
        spread = float(max(step_spread(*(np.log(one)[None, :] for one in steps)), *between)[0])
        whole = series_change(*steps)
        if whole.beyond_noise and abs(whole.shift) > _limit(spread):
            rows.append(_time_row(("", None), float(np.median(steps[0])), whole.shift, _limit(spread), spread))
    elif other_load(shifts.common) and not any(row.size > 0 for row in rows):
        moved = f"{100 * math.expm1(shifts.common):+.0f} %"
        return _undecided("time", f"all layers alike changed by {moved}, as on a busy machine: try again")
    elif unsteady == len(keys):
        return _undecided("time", f"{reason}, as on a busy machine: try again")
    return _check_of("time", rows, reason)


def _between_runs(times: Float, side: Baseline, weight: Float | None = None) -> Float:
    """Return how far apart the runs of a side are in each row of times of its steps; 0 of one run.

    Steps taken together do not show it. With `weight` beside what all rows of a step share.
    """
    logs = np.log(times)
    own = logs if weight is None else logs - common_factors(logs, weight)
    levels = [np.median(run, axis=1) for run in np.split(own, np.cumsum(side.lengths[:-1], dtype=int), axis=1)]
    return np.std(levels, axis=0, ddof=1) if len(levels) > 1 else np.zeros(len(own))


def _limit(spread: Any) -> Any:
    """Return how much a time, as a logarithm, may change."""
    return np.maximum(math.log1p(LEAST_SLOWDOWN), SPREADS * spread)


def _time_row(key: TimeKey, before_ns: float, shift: float, limit_: float, spread: float) -> _Row:
    layer, phase = key
    before, after, most = (before_ns / 1000 * math.exp(one) for one in (0.0, shift, limit_))
    where = layer or (f"outside of layers ({phase})" if phase else "the whole step")
    text = (
        f"{where}: time {before / 1000:.4g} -> {after / 1000:.4g} ms a step ({100 * math.expm1(shift):+.1f} %; "
        f"spread {100 * spread:.1f} %, limit {100 * math.expm1(limit_):+.1f} %)"
    )
    return _row("time", text, (before, after, most), layer=layer, phase=phase)


# All checks, in the order in which they are shown.


class _Kind(NamedTuple):
    """A check, and what it needs of both sides."""

    name: str  # where it is not judged
    check: Callable[[Baseline, Baseline], GuardCheck]
    same_traits: frozenset[str] = OF_MACHINE - {"CPU", "Python"}  # on what numbers of kernels, waits and bytes depend
    needs: What | None = None  # that is known of a step
    without: str = ""  # what a side did that does not know it


_KINDS = (
    _Kind("FLOPs", _check_flops, frozenset(), "flops", "recorded no shapes (record_shapes='auto' is enough)"),
    _Kind("kernels or ops", _check_events),
    _Kind("synchronisations", _check_synchronisations),
    _Kind("graph breaks", _check_breaks, needs="graph_breaks", without="does not tell of them"),
    _Kind("memory", _check_memory, needs="peak_bytes", without="recorded no allocations (profile_memory=True does)"),
    _Kind("attention", _check_backends),
    # Recording allocations takes a few percent of a step.
    _Kind("time", _check_time, OF_MACHINE | {"allocations in the timed steps"}),
)
