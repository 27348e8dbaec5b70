"""What is exact, checked layer by layer: FLOPs, events, retained and peak bytes, backends, waits, graph breaks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from profiler_wrapper.analysis.compare_names import match_names
from profiler_wrapper.analysis.guard_model import (
    Baseline,
    ExactRow,
    GuardCheck,
    GuardFinding,
    Range,
    Status,
    shown,
)
from profiler_wrapper.analysis.phase import Phase

FLOPS_SLACK = 0.001  # relative: means over steps of uneven length
UNEVEN_SLACK = 0.1  # relative: events of a layer whose number differs from step to step
MEMORY_SLACK = 0.01  # relative, of the peak
MEMORY_SLACK_BYTES = 64 << 10
_AUTOTUNED = frozenset({"gemm", "conv", "attention", "copy"})  # libraries choose kernels of these by trying
_RANK_OF_BACKEND = {"flash": 0, "cudnn": 0, "flex": 0, "external": 0, "mem_efficient": 1, "math": 2, "none": 2}
_WAITS = frozenset({"aten::item", "aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero"})
_MOST_OPS = 3


Words = Callable[[float], str]


class _Limit(NamedTuple):
    """What would still have been fine."""

    most: float
    least: float


Limiter = Callable[[Range], _Limit]


def check_flops(base: Baseline, run: Baseline) -> GuardCheck:
    """FLOPs of each layer's own ops."""
    if base.flops is None or run.flops is None:
        who = "the baseline" if base.flops is None else "the run"
        return GuardCheck(
            name="FLOPs", status="not judged", reason=f"{who} recorded no shapes (record_shapes='auto' is enough)"
        )
    rows = _compare_rows(base, run, "flops", lambda limits: _relative(limits, FLOPS_SLACK), "FLOPs", _flops)
    check = _check("FLOPs", rows)
    if rows and _outside(_relative(base.flops, FLOPS_SLACK), run.flops, base.flops) is None and _other_rows(base, run):
        reason = "as many in all; other layers have rows than in the baseline, so that theirs cannot be compared"
        return GuardCheck(name="FLOPs", status="ok", reason=reason)
    return check


def _other_rows(base: Baseline, run: Baseline) -> bool:
    """Whether one side has layers that the other does not have."""
    renamed = _renamed(base, run)
    names = ({layer for layer, _ in _expanded(side)} for side in (base, run))
    before, after = names
    return before != {renamed.get(layer, layer) for layer in after}


def check_events(base: Baseline, run: Baseline) -> GuardCheck:
    """Kernels of each layer, on a CPU ops."""
    what = _event_word(run)
    rows = _compare_rows(base, run, "events", _events_limit, what, _count)
    check = _check(what, rows)
    if check.status == "regression" and _only_autotuned(base, run):
        reason = "other kernels were chosen for the same products: as many of all other classes, and the same FLOPs"
        return GuardCheck(name=what, status="ok", reason=reason)
    grown = _grown_ops(base, run)
    if grown and check.regressions:
        first = replace(check.regressions[0], text=f"{check.regressions[0].text}: {grown}")
        check = replace(check, regressions=(first, *check.regressions[1:]))
    return check


def check_memory(base: Baseline, run: Baseline) -> GuardCheck:
    """The peak, and what layers keep for backward where that is of weight at the peak."""
    if base.peak_bytes is None or run.peak_bytes is None:
        who = "the baseline" if base.peak_bytes is None else "the run"
        reason = f"{who} recorded no allocations (profile_memory=True does)"
        return GuardCheck(name="memory", status="not judged", reason=reason)
    slack = max(MEMORY_SLACK * base.peak_bytes[1], MEMORY_SLACK_BYTES, base.peak_bytes[1] - base.peak_bytes[0])
    limit = _Limit(base.peak_bytes[1] + slack, base.peak_bytes[0] - slack)
    rows = [
        row
        for row in _compare_rows(base, run, "retained_bytes", lambda limits: _absolute(limits, 0.0), "retained", _mib)
        if abs((row.finding.after or 0.0) - (row.finding.before or 0.0)) * row.members > slack
    ]
    found = _outside(limit, run.peak_bytes, base.peak_bytes)
    if found is not None:
        before, after = found
        text = f"peak memory {_mib(before)} -> {_mib(after)} ({_change(before, after)})"
        if rows and after > before:
            grown = max(rows, key=lambda row: ((row.finding.after or 0) - (row.finding.before or 0)) * row.members)
            text += f", with {grown.finding.text}"
        rows = [
            _Row(
                GuardFinding(
                    layer="", phase=None, what="peak memory", before=before, after=after, limit=limit.most, text=text
                ),
                after > before,
                1,
            ),
            *rows,
        ]
    return _check("memory", rows)


def check_backends(base: Baseline, run: Baseline) -> GuardCheck:
    """Which implementation attention runs."""
    before, after = ({key: row.backends for key, row in _expanded(side).items()} for side in (base, run))
    if not any(before.values()):
        return GuardCheck(name="attention", status="ok", reason="the baseline has no attention")
    renamed = _renamed(base, run)
    after = {(renamed.get(layer, layer), phase): backends for (layer, phase), backends in after.items()}
    changed: dict[tuple[str, Phase, str, str], list[str]] = defaultdict(list)
    alike = _Alike(base, run)
    for (layer, phase), backends in before.items():
        now = after.get((layer, phase), ())
        if backends and (not now or not set(now) <= set(backends)):
            changed[alike.pattern(layer), phase, " + ".join(backends), " + ".join(now) or "none"].append(layer)
    rows = []
    for (_, phase, one, other), layers in changed.items():
        name = alike.folded(layers)
        worse = _worst(other) >= _worst(one)
        text = f"attention of {name} ({phase}): {one} -> {other}"
        rows.append(
            _Row(
                GuardFinding(layer=name, phase=phase, what="attention", before=None, after=None, limit=None, text=text),
                worse,
                len(layers),
            )
        )
    return _check("attention", rows)


def check_synchronisations(base: Baseline, run: Baseline) -> GuardCheck:
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
            text = f"waits for the device, {kind}: {_count(found[0])} -> {_count(found[1])} a step"
            layer = kind.partition(" in ")[2].rpartition(", ")[0]
            finding = GuardFinding(
                layer=layer,
                phase=None,
                what=name,
                before=found[0],
                after=found[1],
                limit=_events_limit(before).most,
                text=text,
            )
            rows.append(_Row(finding, found[1] > found[0], 1))
    return _check(name, rows)


def check_breaks(base: Baseline, run: Baseline) -> GuardCheck:
    """Places where torch.compile could not go on."""
    name = "graph breaks"
    if base.graph_breaks is None or run.graph_breaks is None:
        return GuardCheck(name=name, status="not judged", reason="the run does not tell of them")
    found = _outside(_absolute(base.graph_breaks, 0.0), run.graph_breaks, base.graph_breaks)
    if found is None:
        return GuardCheck(name=name, status="ok")
    fresh = [place for place in run.break_places if place not in base.break_places]
    text = f"graph breaks: {_count(found[0])} -> {_count(found[1])}" + (f", {fresh[0]}" if fresh else "")
    finding = GuardFinding(
        layer="", phase=None, what=name, before=found[0], after=found[1], limit=base.graph_breaks[1], text=text
    )
    return _check(name, [_Row(finding, found[1] > found[0], 1)])


# -- rows -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Row:
    finding: GuardFinding
    worse: bool
    members: int  # layers that it stands for


def _compare_rows(base: Baseline, run: Baseline, field: str, limit_of: Limiter, what: str, words: Words) -> list[_Row]:
    """The rows whose amounts left the baseline's range, like layers that changed alike together."""
    before, after = _expanded(base), _expanded(run)
    renamed = _renamed(base, run)
    after = {(renamed.get(layer, layer), phase): row for (layer, phase), row in after.items()}
    groups: dict[tuple[str, Phase, float, float, float], list[str]] = defaultdict(list)
    alike = _Alike(base, run)
    for layer, phase in dict.fromkeys((*before, *after)):
        one, other = (_amount(rows.get((layer, phase)), field) for rows in (before, after))
        if one is None or other is None:
            continue
        limit = limit_of(one)
        found = _outside(limit, other, one)
        if found is not None:
            groups[alike.pattern(layer), phase, found[0], found[1], limit.most].append(layer)
    rows = []
    for (_, phase, one_value, other_value, most), layers in groups.items():
        name = alike.folded(layers)
        change = _change(one_value, other_value)
        text = f"{name or 'outside of layers'} ({phase}): {what} {words(one_value)} -> {words(other_value)} ({change})"
        finding = GuardFinding(
            layer=name, phase=phase, what=what, before=one_value, after=other_value, limit=most, text=text
        )
        rows.append(_Row(finding, other_value > one_value, len(layers)))
    return rows


def _expanded(side: Baseline) -> dict[tuple[str, Phase], ExactRow]:
    return {(layer, row.phase): row for row in side.rows for layer in row.names.layers()}


def _renamed(base: Baseline, run: Baseline) -> Mapping[str, str]:
    """The run's layers by the baseline's names."""
    names = [dict.fromkeys(layer for row in side.rows for layer in row.names.layers() if layer) for side in (run, base)]
    return match_names(*names)


def _amount(row: ExactRow | None, field: str) -> Range | None:
    """That of a row; 0 of one that is not there."""
    if row is None:
        return 0.0, 0.0
    amount: Range | None = getattr(row, field)
    return amount


class _Alike:
    """Which layers are alike, as the rows of both sides say; layers go by the names of the first."""

    def __init__(self, *sides: Baseline) -> None:
        self._number: dict[str, tuple[str, int | None]] = {}
        for row in (row for side in sides for row in side.rows):
            told = [number for first, last in row.names.numbers for number in range(first, last + 1)]
            numbers: list[int | None] = [*told] or [None]
            for layer, number in zip(row.names.layers(), numbers, strict=True):
                self._number.setdefault(layer, (row.names.pattern, number))

    def pattern(self, layer: str) -> str:
        return self._number.get(layer, (layer, None))[0]

    def folded(self, layers: Sequence[str]) -> str:
        """One name for layers of one pattern."""
        told = [self._number.get(layer, (layer, None))[1] for layer in layers]
        numbers = [number for number in told if number is not None]
        return shown(self.pattern(layers[0]), numbers) if len(numbers) > 1 else layers[0]


def _outside(limit: _Limit, now: Range, before: Range) -> tuple[float, float] | None:
    """(before, now) where all of the run is beyond what is fine: the nearer ends of both; else None."""
    if now[0] > limit.most:
        return before[1], now[0]
    if now[1] < limit.least:
        return before[0], now[1]
    return None


def _relative(before: Range, slack: float) -> _Limit:
    return _Limit(before[1] * (1 + slack), before[0] * (1 - slack))


def _absolute(before: Range, slack: float) -> _Limit:
    return _Limit(before[1] + slack, before[0] - slack)


def _events_limit(before: Range) -> _Limit:
    """Exact where every step had as many; else what a step had on average may differ."""
    even = all(float(value).is_integer() for value in before)
    return _absolute(before, 0.0) if even else _relative(before, UNEVEN_SLACK)


def _check(name: str, rows: Iterable[_Row]) -> GuardCheck:
    rows = sorted(rows, key=_weight)
    worse = tuple(row.finding for row in rows if row.worse)
    better = tuple(row.finding for row in rows if not row.worse)
    status: Status = "regression" if worse else "improved" if better else "ok"
    return GuardCheck(name=name, status=status, regressions=worse, improvements=better)


def _weight(row: _Row) -> float:
    """The largest change first; what is of the whole step before all."""
    finding = row.finding
    if not finding.layer and finding.phase is None:
        return float("-inf")
    return -abs((finding.after or 0.0) - (finding.before or 0.0)) * row.members


# -- events ---------------------------------------------------------------------------------------


def _event_word(run: Baseline) -> str:
    return "kernels" if run.traits.get("time_basis") == "device" else "ops"


def _only_autotuned(base: Baseline, run: Baseline) -> bool:
    """On a device: the same FLOPs, and other numbers of events only in classes whose kernels libraries choose."""
    if run.traits.get("time_basis") != "device" or base.flops is None or run.flops is None:
        return False
    if _outside(_relative(base.flops, FLOPS_SLACK), run.flops, base.flops) is not None:
        return False
    changed = set()
    for name in {*base.classes, *run.classes}:
        before, after = base.classes.get(name, (0.0, 0.0)), run.classes.get(name, (0.0, 0.0))
        if _outside(_events_limit(before), after, before) is not None:
            changed.add(name)
    return bool(changed) and changed <= _AUTOTUNED and _grown_ops(base, run) == ""


def _grown_ops(base: Baseline, run: Baseline) -> str:
    """`aten::add 12 -> 13, ...` of a step, what waits first; "" where no op is called more often."""
    grown = []
    for op, now in run.ops.items():
        before = base.ops.get(op, (0.0, 0.0))
        found = _outside(_events_limit(before), now, before)
        if found is not None and found[1] > found[0]:
            weight = found[1] / found[0] if found[0] else float("inf")
            grown.append((op not in _WAITS, -weight, f"{op} {_count(found[0])} -> {_count(found[1])}"))
    more = f" and {len(grown) - _MOST_OPS} more" if len(grown) > _MOST_OPS else ""
    return ", ".join(text for _, _, text in sorted(grown)[:_MOST_OPS]) + more


def _worst(backends: str) -> int:
    return max(_RANK_OF_BACKEND.get(backend, 1) for backend in backends.split(" + "))


# -- words ----------------------------------------------------------------------------------------


def _count(value: float) -> str:
    return f"{value:g}"


def _flops(value: float) -> str:
    return f"{value / 1e9:.4g} GFLOP"


def _mib(value: float) -> str:
    return f"{value / (1 << 20):.4g} MiB"


def _change(before: float, after: float) -> str:
    return f"{100 * (after / before - 1):+.3g} %" if before else "new"
