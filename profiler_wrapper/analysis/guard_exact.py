"""What is exact, checked layer by layer: FLOPs, events, retained and peak bytes, backends, waits, graph breaks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from profiler_wrapper.analysis.guard_model import Baseline, GuardCheck, GuardFinding
from profiler_wrapper.analysis.guard_ops import grown_ops, with_ops
from profiler_wrapper.analysis.guard_rows import (
    NO_CAUSES,
    Alike,
    Limit,
    Row,
    absolute,
    change_text,
    check_of,
    compare_rows,
    count_text,
    events_limit,
    expanded,
    flops_text,
    mib_text,
    outside,
    relative,
    renamed_layers,
)
from profiler_wrapper.analysis.phase import Phase

FLOPS_SLACK = 0.001  # relative: means over steps of uneven length
MEMORY_SLACK = 0.01  # relative, of the peak
MEMORY_SLACK_BYTES = 64 << 10
_AUTOTUNED = frozenset({"gemm", "conv", "attention", "copy"})  # libraries choose kernels of these by trying
_RANK_OF_BACKEND = {"flash": 0, "cudnn": 0, "flex": 0, "external": 0, "mem_efficient": 1, "math": 2, "none": 2}


def check_flops(base: Baseline, run: Baseline) -> GuardCheck:
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
    rows = compare_rows(base, run, "flops", lambda limits: relative(limits, FLOPS_SLACK), "FLOPs", flops_text)
    check = check_of("FLOPs", rows)
    unknown = _unknown_flops(base, run)
    if unknown and not check.regressions:
        return replace(check, reason="where both sides know them: some layers have an op without a FLOP formula")
    as_many = outside(relative(base.flops, FLOPS_SLACK), run.flops, base.flops) is None
    if rows and not unknown and as_many and _other_rows(base, run):
        reason = "as many in all; other layers have rows than in the baseline, so that theirs cannot be compared"
        return GuardCheck(name="FLOPs", status="ok", reason=reason)
    if check.regressions and all(finding.phase == "recompute" for finding in check.regressions):
        return replace(check, reason="the model's own are no more; these are computed again by checkpointing")
    return check


def _unknown_flops(base: Baseline, run: Baseline) -> bool:
    """Whether FLOPs were counted, and some layer's are not known."""
    return any(row.flops is None for side in (base, run) for row in side.rows)


def _other_rows(base: Baseline, run: Baseline) -> bool:
    """Whether one side has layers that the other does not have."""
    renamed = renamed_layers(base, run)
    names = ({layer for layer, _ in expanded(side)} for side in (base, run))
    before, after = names
    return before != {renamed.get(layer, layer) for layer in after}


def check_events(base: Baseline, run: Baseline, *, causes: Mapping[str, str] = NO_CAUSES) -> GuardCheck:
    """Kernels of each layer, on a CPU ops. `causes`: see `better_attention`."""
    what = _event_word(run)
    rows = compare_rows(base, run, "events", events_limit, what, count_text, causes=causes)
    check = check_of(what, with_ops(rows, base, run))
    if check.status == "regression" and _only_autotuned(base, run):
        reason = "other kernels were chosen for the same products: as many of all other classes, and the same FLOPs"
        return GuardCheck(name=what, status="ok", reason=reason)
    return check


def check_memory(base: Baseline, run: Baseline, *, causes: Mapping[str, str] = NO_CAUSES) -> GuardCheck:
    """The peak, and what layers keep for backward where that is of weight at the peak.

    `causes`: see `better_attention`; they excuse no higher peak.
    """
    if base.peak_bytes is None or run.peak_bytes is None:
        who = "the baseline" if base.peak_bytes is None else "the run"
        reason = f"{who} recorded no allocations (profile_memory=True does)"
        return GuardCheck(name="memory", status="not judged", reason=reason)
    slack = max(MEMORY_SLACK * base.peak_bytes[1], MEMORY_SLACK_BYTES, base.peak_bytes[1] - base.peak_bytes[0])
    limit = Limit(base.peak_bytes[1] + slack, base.peak_bytes[0] - slack)
    rows = [
        row
        for row in compare_rows(
            base, run, "retained_bytes", lambda limits: absolute(limits, 0.0), "retained", mib_text, causes=causes
        )
        if abs((row.finding.after or 0.0) - (row.finding.before or 0.0)) * row.members > slack
    ]
    found = outside(limit, run.peak_bytes, base.peak_bytes)
    if found is not None:
        before, after = found
        text = f"peak memory {mib_text(before)} -> {mib_text(after)} ({change_text(before, after)})"
        if rows and after > before:
            grown = max(rows, key=lambda row: ((row.finding.after or 0) - (row.finding.before or 0)) * row.members)
            text += f", with {grown.finding.text}"
        rows = [
            Row(
                GuardFinding(
                    layer="", phase=None, what="peak memory", before=before, after=after, limit=limit.most, text=text
                ),
                after > before,
            ),
            *rows,
        ]
    return check_of("memory", rows)


def check_backends(base: Baseline, run: Baseline) -> GuardCheck:
    """Which implementation attention runs."""
    if not any(row.backends for row in base.rows):
        return GuardCheck(name="attention", status="ok", reason="the baseline has no attention")
    changed: dict[tuple[str, Phase, str, str], list[str]] = defaultdict(list)
    alike = Alike(base, run)
    for layer, phase, one, other in _changed_backends(base, run):
        changed[alike.pattern(layer), phase, one, other].append(layer)
    rows = []
    for (_, phase, one, other), layers in changed.items():
        name = alike.folded(layers)
        worse = _is_worse(one, other)
        text = f"attention of {name} ({phase}): {one} -> {other}"
        rows.append(
            Row(
                GuardFinding(layer=name, phase=phase, what="attention", before=None, after=None, limit=None, text=text),
                worse,
                tuple(layers),
            )
        )
    return check_of("attention", rows)


def better_attention(base: Baseline, run: Baseline) -> dict[str, str]:
    """Layers whose attention has a better backend in some phase and a worse one in none, with both backends.

    Another implementation has other ops and keeps other tensors: that follows from it, and is no regression there.
    """
    changed = _changed_backends(base, run)
    worse = {layer for layer, _, one, other in changed if _is_worse(one, other)}
    return {layer: f"attention {one} -> {other}" for layer, _, one, other in changed if layer not in worse}


def _changed_backends(base: Baseline, run: Baseline) -> list[tuple[str, Phase, str, str]]:
    """Layer, phase, backends before and now; "none" for what has no attention any more."""
    renamed = renamed_layers(base, run)
    after = {(renamed.get(layer, layer), phase): row.backends for (layer, phase), row in expanded(run).items()}
    changed = []
    for (layer, phase), row in expanded(base).items():
        now = after.get((layer, phase), ())
        if row.backends and (not now or not set(now) <= set(row.backends)):
            changed.append((layer, phase, " + ".join(row.backends), " + ".join(now) or "none"))
    return changed


def check_synchronisations(base: Baseline, run: Baseline) -> GuardCheck:
    """Waits of the CPU for the device."""
    name = "synchronisations"
    if base.synchronisations is None or run.synchronisations is None:
        reason = "there is no device to wait for; on a CPU an .item() shows among the ops"
        return GuardCheck(name=name, status="not judged", reason=reason)
    rows = []
    for kind in dict.fromkeys((*run.synchronisations, *base.synchronisations)):
        before, after = base.synchronisations.get(kind, (0.0, 0.0)), run.synchronisations.get(kind, (0.0, 0.0))
        found = outside(events_limit(before), after, before)
        if found is not None:
            text = f"waits for the device, {kind}: {count_text(found[0])} -> {count_text(found[1])} a step"
            layer = kind.partition(" in ")[2].rpartition(", ")[0]
            finding = GuardFinding(
                layer=layer,
                phase=None,
                what=name,
                before=found[0],
                after=found[1],
                limit=events_limit(before).most,
                text=text,
            )
            rows.append(Row(finding, found[1] > found[0]))
    return check_of(name, rows)


def check_breaks(base: Baseline, run: Baseline) -> GuardCheck:
    """Places where torch.compile could not go on."""
    name = "graph breaks"
    if base.graph_breaks is None or run.graph_breaks is None:
        return GuardCheck(name=name, status="not judged", reason="the run does not tell of them")
    found = outside(absolute(base.graph_breaks, 0.0), run.graph_breaks, base.graph_breaks)
    if found is None:
        return GuardCheck(name=name, status="ok")
    fresh = [place for place in run.break_places if place not in base.break_places]
    text = f"graph breaks: {count_text(found[0])} -> {count_text(found[1])}" + (f", {fresh[0]}" if fresh else "")
    finding = GuardFinding(
        layer="", phase=None, what=name, before=found[0], after=found[1], limit=base.graph_breaks[1], text=text
    )
    return check_of(name, [Row(finding, found[1] > found[0])])


# -- events ---------------------------------------------------------------------------------------


def _event_word(run: Baseline) -> str:
    return "kernels" if run.traits.get("time_basis") == "device" else "ops"


def _only_autotuned(base: Baseline, run: Baseline) -> bool:
    """On a device: the same FLOPs, and other numbers of events only in classes whose kernels libraries choose."""
    if run.traits.get("time_basis") != "device" or base.flops is None or run.flops is None:
        return False
    if _unknown_flops(base, run) or outside(relative(base.flops, FLOPS_SLACK), run.flops, base.flops) is not None:
        return False
    changed = set()
    for name in {*base.classes, *run.classes}:
        before, after = base.classes.get(name, (0.0, 0.0)), run.classes.get(name, (0.0, 0.0))
        if outside(events_limit(before), after, before) is not None:
            changed.add(name)
    return bool(changed) and changed <= _AUTOTUNED and not grown_ops(base, run)


def _is_worse(before: str, after: str) -> bool:
    return _worst(after) >= _worst(before)


def _worst(backends: str) -> int:
    return max(_RANK_OF_BACKEND.get(backend, 1) for backend in backends.split(" + "))
