"""What holds between the rows of any result: times, FLOPs and bytes add up, in every table. See `invariants.py`."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

import checkout  # noqa: F401
from profiler_wrapper.comparison.compare import compare
from profiler_wrapper.place.names import FORWARD_PHASES
from profiler_wrapper.reports.result_json import LISTS, csv_text, from_dict, to_dict
from profiler_wrapper.tables.model import Analysis, LayerRow

Broken = Iterator[str]
Key = tuple[str, str]  # layer, phase


def _unequal(what: str, found: Any, wanted: Any) -> Broken:
    if found != wanted:
        off = f" ({found - wanted:+})" if isinstance(found, (int, float)) and isinstance(wanted, (int, float)) else ""
        yield f"{what}: {found}, wanted {wanted}{off}"


def above(what: str, found: Any, most: Any) -> Broken:
    """What is known and more than it may be."""
    if found is not None and most is not None and found > most:
        yield f"{what}: {found}, at most {most} ({found - most:+})"


def sums_of(rows: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    sums: dict[Any, Any] = defaultdict(int)
    for key, value in rows:
        sums[key] += value
    return {key: value for key, value in sums.items() if value}


def name_of(row: LayerRow) -> str:
    return f"{row.layer or '(no layer)'} ({row.phase})"


def findings_of(result: Analysis) -> Sequence[Mapping[str, Any]]:
    return result.summary.get("findings") or ()


def unfolded(name: str) -> list[str]:
    """`layers.{0..2}.mlp` is three names; `{0,2..3}` too."""
    match = re.search(r"\{([\d.,]+)\}", name)
    if match is None:
        return [name]
    numbers: list[int] = []
    for part in match[1].split(","):
        first, _, last = part.partition("..")
        numbers += range(int(first), int(last or first) + 1)
    return [one for number in numbers for one in unfolded(f"{name[: match.start()]}{number}{name[match.end() :]}")]


# --- time: each nanosecond is in one row of each table ---------------------------------------------


def layers_make_the_total(result: Analysis) -> Broken:
    """Self times of layers and what has none are all the time."""
    time = result.time
    yield from _unequal("layers", sum(row.self_time_ns for row in result.layers) + time.unattributed_ns, time.total_ns)
    yield from _unequal("attributed", time.attributed_ns, time.total_ns - time.unattributed_ns)


def reasons_make_the_unattributed(result: Analysis) -> Broken:
    """Each nanosecond without a layer has its reason."""
    yield from _unequal("reasons", sum(row.time_ns for row in result.unattributed), result.time.unattributed_ns)


def classes_make_the_total(result: Analysis) -> Broken:
    """Classes of work are all the time."""
    yield from _unequal("classes", sum(row.time_ns for row in result.classes), result.time.total_ns)


def steps_make_the_total(result: Analysis) -> Broken:
    """Steps, and what belongs to none, are all the time, and phases that of their step."""
    yield from _unequal("steps", sum(row.time_ns for row in result.steps), result.time.total_ns)
    for row in result.steps:
        yield from _unequal(f"phases of step {row.step}", sum(row.phases_ns.values()), row.time_ns)
        yield from above(f"attention of step {row.step}", row.attention_ns, row.time_ns)


def phases_are_the_same_in_all_tables(result: Analysis) -> Broken:
    """Classes and steps say the same of a phase; layers no more."""
    of_steps = sums_of((phase, time_ns) for row in result.steps for phase, time_ns in row.phases_ns.items())
    yield from _unequal("phases of classes", sums_of((row.phase, row.time_ns) for row in result.classes), of_steps)
    for phase, time_ns in sums_of((row.phase, row.self_time_ns) for row in result.layers).items():
        yield from above(f"layers in {phase}", time_ns, of_steps.get(phase, 0))


def operators_make_the_total(result: Analysis) -> Broken:
    """Self times of ops are all the time."""
    if result.operators:
        yield from _unequal("operators", sum(row.self_time_ns for row in result.operators), result.time.total_ns)


def kernels_make_the_total(result: Analysis) -> Broken:
    """Kernels, copies and sets are all the time and all events, between their shortest and longest."""
    if result.time_basis == "cpu":
        yield from _unequal("kernels without a device", len(result.kernels), 0)
        return
    yield from _unequal("kernels", sum(row.time_ns for row in result.kernels), result.time.total_ns)
    yield from _unequal("launches", sum(row.count for row in result.kernels), sum(row.count for row in result.classes))
    of_class = sums_of((row.class_name, row.time_ns) for row in result.classes)
    if not any(row.name == "(others)" for row in result.kernels):
        yield from _unequal(
            "kernels by class", sums_of((row.class_name, row.time_ns) for row in result.kernels), of_class
        )
    for row in result.kernels:
        if not row.count * row.min_ns <= row.time_ns <= row.count * row.max_ns:
            yield f"{row.name}: {row.count} from {row.min_ns} to {row.max_ns} ns make no {row.time_ns}"


def events_are_counted_once(result: Analysis) -> Broken:
    """Each event is in one layer, or has one reason for none, and is of one class."""
    events = sum(row.self_events or 0 for row in result.layers) + sum(row.count for row in result.unattributed)
    if any(row.self_events is not None for row in result.layers) or not result.layers:
        yield from _unequal("events", events, sum(row.count for row in result.classes))


def parts_make_their_step(result: Analysis) -> Broken:
    """Parts of a step add up to its time."""
    if result.parts:
        steps = sums_of((row.step, row.time_ns) for row in result.steps)
        yield from _unequal("parts", sums_of((row.step, row.time_ns) for row in result.parts), steps)


def collectives_make_the_communication(result: Analysis) -> Broken:
    """Collectives are the class communication; what of them is exposed and what is hidden is all of them."""
    rows = result.collectives
    moved = sum(row.time_ns for row in result.classes if row.class_name == "communication")
    yield from _unequal("collectives", sum(row.time_ns for row in rows), moved)
    if result.time_basis == "cpu":
        return
    for row in rows:
        parts = None if row.exposed_ns is None or row.overlapped_ns is None else row.exposed_ns + row.overlapped_ns
        yield from _unequal(f"exposed and hidden of {row.collective} in {row.layer}", parts, row.time_ns)
    exposed = sum(row.exposed_ns or 0 for row in rows)
    yield from above("exposed at once", result.time.exposed_communication_ns or 0, exposed)
    of_layers = sum(row.exposed_communication_ns or 0 for row in result.layers if row.parent is None)
    with_layer = sum(row.exposed_ns or 0 for row in rows if row.layer is not None)
    if not any(row.shared for row in result.layers):
        yield from _unequal("exposed in layers", of_layers, with_layer)


def attention_is_that_of_its_layers(result: Analysis) -> Broken:
    """Attention by backend, of a layer and all below it, is the attention in its row."""
    own = sums_of(((row.layer, row.phase), row.time_ns) for row in result.attention)
    shared = any(row.shared for row in result.layers)
    holds = {row.layer: row.parent for row in result.layers}
    inside: dict[Key, int] = defaultdict(int)
    for (layer, phase), time_ns in own.items():
        at: str | None = layer
        while at is not None:
            inside[at, phase] += time_ns
            at = holds.get(at)
    for row in result.layers:
        if not shared:
            yield from _unequal(f"attention of {name_of(row)}", row.attention_ns, inside.get((row.layer, row.phase), 0))
        by_backend = row.attention_by_backend_ns
        yield from _unequal(f"attention by backend of {name_of(row)}", sum(by_backend.values()), row.attention_ns)


# --- the tree: a row holds what is below it ---------------------------------------------------------


def _children(result: Analysis) -> dict[Key, list[LayerRow]]:
    found: dict[Key, list[LayerRow]] = defaultdict(list)
    for row in result.layers:
        if row.parent is not None:
            found[row.parent, row.phase].append(row)
    return found


def rows_are_one_tree(result: Analysis) -> Broken:
    """A layer and phase has one row; its parent has a row, one step up; its block is above it."""
    keys = Counter((row.layer, row.phase) for row in result.layers)
    yield from (f"{layer} ({phase}) has {count} rows" for (layer, phase), count in keys.items() if count > 1)
    depth = {row.layer: row.depth for row in result.layers}
    holds = {row.layer: row.parent for row in result.layers}
    for row in result.layers:
        if row.parent is None:
            yield from _unequal(f"depth of {name_of(row)}", row.depth, 0)
        elif row.parent not in depth:
            yield f"{name_of(row)}: its parent {row.parent} has no row"
        else:
            yield from _unequal(f"depth of {name_of(row)}", row.depth, depth[row.parent] + 1)
        above: str | None = row.layer
        while above is not None and above != row.block:
            above = holds.get(above)
        if row.block is not None and above is None:
            yield f"{name_of(row)}: its block {row.block} is not above it"


# Of a row: what includes the layers below, and what does not.
_ADDITIVE = {
    "time_ns": "self_time_ns",
    "flops_per_step": "self_flops_per_step",
    "causal_flops_per_step": "self_causal_flops_per_step",
    "bytes_moved_per_step": "self_bytes_moved_per_step",
    "roof_time_per_step_ns": "self_roof_time_per_step_ns",
    "memory_roof_time_per_step_ns": "self_memory_roof_time_per_step_ns",
}

_WHOLLY_KNOWN = {"time_ns", "flops_per_step", "causal_flops_per_step"}  # of bytes a trifle may be missing


def parents_hold_children(result: Analysis) -> Broken:
    """Time, FLOPs and bytes of a row are its own and its children's; of a shared one as much as it was called for."""
    children = _children(result)
    shared: dict[str, list[LayerRow]] = defaultdict(list)  # any layer may call them
    for row in result.layers:
        if row.shared:
            shared[row.phase].append(row)
    for row in result.layers:
        if not row.layer:
            continue
        below = children[row.layer, row.phase]
        for field, own in _ADDITIVE.items():
            value, parts = getattr(row, field), [getattr(row, own), *(getattr(one, field) for one in below)]
            known = [part for part in parts if part is not None]
            if value is None:
                continue  # a part is not known
            if len(known) < len(parts) and field in _WHOLLY_KNOWN:
                yield f"{field} of {name_of(row)}: {value}, though a part of it is not known"
            elif len(known) < len(parts):
                yield from above(f"known {field} below {name_of(row)}", sum(known), value)
            elif not shared[row.phase]:
                yield from _unequal(f"{field} of {name_of(row)}", value, sum(parts))
            else:
                least = parts[0] + sum(getattr(one, field) for one in below if not one.shared)
                most = least + sum(getattr(one, field) or 0 for one in shared[row.phase])
                if not least <= value <= most:
                    yield f"{field} of {name_of(row)}: {value}, wanted {least} to {most}"


def roots_hold_everything(result: Analysis) -> Broken:
    """What has no parent is all there is, in each phase: shared modules count once."""
    for field, own in _ADDITIVE.items():
        tops = [(row.phase, getattr(row, field)) for row in result.layers if row.parent is None]
        selves = [(row.phase, getattr(row, own)) for row in result.layers]
        unknown = {phase for phase, value in (*tops, *selves) if value is None}
        by_phase = [sums_of(one for one in pairs if one[0] not in unknown) for pairs in (tops, selves)]
        yield from _unequal(f"{field} of the roots by phase", *by_phase)


def what_is_unknown_below_is_unknown_above(result: Analysis) -> Broken:
    """A row whose parts are all known is known, and one with an unknown part tells at least what is known."""
    children = _children(result)
    for row in result.layers:
        below = children[row.layer, row.phase] if row.layer else []
        for field, own in _ADDITIVE.items():
            parts = [getattr(row, own), *(getattr(one, field) for one in below)]
            if getattr(row, field) is None and None not in parts:
                yield f"{field} of {name_of(row)} is null, though all of its parts are known"
        yield from above(f"known FLOPs of {name_of(row)}", row.known_flops_per_step, row.flops_per_step)


# Of one row: what is a part of what.
_PARTS = (
    ("self_time_ns", "time_ns"),
    ("attention_ns", "time_ns"),
    ("communication_ns", "time_ns"),
    ("exposed_communication_ns", "communication_ns"),
    ("self_flops_per_step", "flops_per_step"),
    ("causal_flops_per_step", "flops_per_step"),
    ("self_causal_flops_per_step", "self_flops_per_step"),
    ("self_bytes_moved_per_step", "bytes_moved_per_step"),
    ("self_roof_time_per_step_ns", "roof_time_per_step_ns"),
    ("memory_roof_time_per_step_ns", "roof_time_per_step_ns"),
    ("self_retained_bytes", "retained_bytes"),
)


def no_part_is_more_than_its_whole(result: Analysis) -> Broken:
    """Of one row each part is from 0 to its whole."""
    for row in result.layers:
        for part, whole in _PARTS:
            value = getattr(row, part)
            if value is not None and value < 0:
                yield f"{part} of {name_of(row)}: {value}"
            yield from above(f"{part} of {name_of(row)}", value, getattr(row, whole))
    charged = {(row.layer, row.phase): row for row in result.layers}
    for row in result.layers:  # kernels for this layer and others are in the time of one above
        time_ns, parent = row.time_ns if row.parent is None else 0, row.parent
        while parent is not None:
            one = charged.get((parent, row.phase))
            time_ns, parent = max(time_ns, one.time_ns if one else 0), one.parent if one else None
        yield from above(f"fused time of {name_of(row)} and the layers above it", row.fused_ns, time_ns)
    time = result.time
    yield from above("exposed communication", time.exposed_communication_ns, time.total_ns)
    yield from above("busy", time.busy_ns, time.total_ns)
    if time.busy_ns is not None and not device_count(result) > 1:
        yield from above("busy", time.busy_ns, time.span_ns)


def device_count(result: Analysis) -> int:
    return result.summary.get("comparable", {}).get("device_count") or 1


# What of a child is a part of what its parent has.
_INSIDE = ("attention_ns", "communication_ns", "exposed_communication_ns", "idle_ns", "cpu_time_ns")


def children_are_parts_of_parents(result: Analysis) -> Broken:
    """Attention, communication, idle and CPU time of a row are at least those of all its children."""
    children = _children(result)
    for row in result.layers:
        below = [one for one in children[row.layer, row.phase] if not one.shared] if row.layer else []
        for field in _INSIDE:
            of_children = sum(getattr(one, field) or 0 for one in below)
            yield from above(f"{field} below {name_of(row)}", of_children, getattr(row, field))


def steps_of_a_row_are_its_time(result: Analysis) -> Broken:
    """The steps of a row make its time, and those of all rows the steps'; what is in no step is left out."""
    numbered = [row for row in result.steps if row.step is not None]
    for row in result.layers:
        if len(row.step_times_ns) != len(numbered):
            yield f"{name_of(row)} has {len(row.step_times_ns)} steps, not {len(numbered)}"
        elif len(numbered) == len(result.steps):
            yield from _unequal(f"steps of {name_of(row)}", sum(row.step_times_ns), row.time_ns)
        else:
            yield from above(f"steps of {name_of(row)}", sum(row.step_times_ns), row.time_ns)
    tops = [row.step_times_ns for row in result.layers if row.parent is None]
    for at, step in enumerate(numbered):
        in_layers = sum(times[at] for times in tops if at < len(times))
        yield from above(f"layers in step {step.step}", in_layers, step.time_ns)
        if not result.unattributed:
            yield from _unequal(f"layers in step {step.step}", in_layers, step.time_ns)


# --- work -------------------------------------------------------------------------------------------


def flops_are_the_same_in_all_tables(result: Analysis) -> Broken:
    """FLOPs of layers, of classes and of the whole are sums of the same rows; model FLOPs leave out repeated ones."""
    by_layer = sums_of(((row.layer, row.phase), row.flops_per_step) for row in result.flops)
    for row in result.layers:
        own = row.self_flops_per_step
        if own is not None:
            yield from _unequal(f"FLOPs of {name_of(row)}", own, by_layer.get((row.layer, row.phase), 0))
    of_classes = sums_of(((row.class_name, row.phase), row.flops_per_step) for row in result.flops)
    for row in result.classes:
        if row.flops_per_step is not None:
            wanted = of_classes.get((row.class_name, row.phase), 0)
            yield from _unequal(f"FLOPs of {row.class_name} ({row.phase})", row.flops_per_step, wanted)
    use, total = result.utilization, sum(row.flops_per_step for row in result.flops)
    if use is not None and use.hardware_flops_per_step is not None:
        repeated = sum(row.repeated_flops_per_step for row in result.flops)
        yield from _unequal("hardware FLOPs", use.hardware_flops_per_step, total)
        yield from _unequal("model FLOPs", use.model_flops_per_step, total - repeated)
    for flops in result.flops:
        yield from above(f"causal FLOPs in {flops.layer}", flops.causal_flops_per_step, flops.flops_per_step)
        yield from above(f"repeated FLOPs in {flops.layer}", flops.repeated_flops_per_step, flops.flops_per_step)


def utilization_is_flops_over_time(result: Analysis) -> Broken:
    """MFU is no more than HFU, causal no more than all; a share over 1 has a warning; its step is the steps' mean."""
    use = result.utilization
    if use is None:
        return
    for part, whole in (("mfu", "hfu"), ("causal_mfu", "mfu"), ("causal_hfu", "hfu")):
        yield from above(part, getattr(use, part), getattr(use, whole))
    if (use.hfu or 0) > 1 and not any("MFU" in warning or "peak" in warning for warning in result.warnings):
        yield f"HFU {use.hfu} without a warning"
    if use.mfu and use.hfu and use.model_flops_per_step and use.hardware_flops_per_step:
        ratio = use.model_flops_per_step / use.hardware_flops_per_step
        if len(result.run.get("dtypes") or ()) < 2 and not math.isclose(use.mfu / use.hfu, ratio, rel_tol=1e-6):
            yield f"MFU {use.mfu} is to HFU {use.hfu} not as their FLOPs, {ratio}"
    spans = step_spans(result)
    if use.step_time_ns is not None and spans and abs(use.step_time_ns - fmean(spans)) > 1:
        yield f"a step of {use.step_time_ns} ns, the mean of the steps is {fmean(spans)}"


def step_spans(result: Analysis) -> list[int]:
    return [step.span_ns for step in result.overview.steps] if result.overview is not None else []


def parts_of_the_wall_time_make_each_step(result: Analysis) -> Broken:
    """What a step's wall time is split into adds up to it, and steps are those of the table of steps."""
    if result.overview is None:
        return
    for step in result.overview.steps:
        names = ("kernel", "communication", "memcpy", "memset", "runtime", "dataloader", "cpu", "other")
        parts = [getattr(step, f"{name}_ns") for name in names]
        yield from _unequal(f"parts of step {step.step}", sum(parts), step.span_ns)
        if min(parts) < 0:
            yield f"a part of step {step.step} is {min(parts)} ns"
    told = {step.step for step in result.overview.steps if step.step is not None}
    yield from above("steps of the overview", len(told - {row.step for row in result.steps}), 0)


def busy_and_idle_are_known_together(result: Analysis) -> Broken:
    """Where it is not known how busy the device was in all, at most of steps that began later it is known."""
    overview = result.overview
    gaps_ns = None if overview is None or len(overview.steps) > 1 else overview.gaps_ns
    if result.time_basis == "device" and result.time.busy_ns is None and gaps_ns is not None:
        yield f"how busy the device was is not known, and that it was idle for {gaps_ns} ns is"


def shares_are_from_0_to_1(result: Analysis) -> Broken:
    """No share is below 0 or above 1."""
    overview, time = result.overview, result.time
    shares: dict[str, Any] = {"coverage": time.coverage}
    if overview is not None:
        names = ("utilization", "sm_efficiency", "occupancy", "tensor_core_share")
        shares |= {name: getattr(overview, name) for name in names}
        yield from above("SM efficiency", overview.sm_efficiency, (overview.utilization or 0) + 1e-12)
    shares |= {f"occupancy of {row.name}": row.occupancy for row in result.kernels}
    shares |= {f"expert {row.expert} of {row.layer}": row.share for row in result.experts}
    shares |= {f"finding {finding['id']}": finding["share"] for finding in findings_of(result)}
    yield from (
        f"share of {name}: {share}" for name, share in shares.items() if share is not None and not 0 <= share <= 1
    )
    for layer, whole in sums_of((row.layer, row.share) for row in result.experts if row.share is not None).items():
        if not math.isclose(whole, 1, rel_tol=1e-6):
            yield f"experts of {layer} get {whole} of the tokens"


# --- memory -----------------------------------------------------------------------------------------


def no_peak_is_below_what_is_held(result: Analysis) -> Broken:
    """A row's peak is at least what is allocated as it is entered and left, and the whole's at least each row's."""
    peak = (result.memory.get("peak") or {}).get("allocated_bytes")
    for row in result.layers:
        for field in ("entry_allocated_bytes", "allocated_bytes"):
            yield from above(f"{field} of {name_of(row)}", getattr(row, field), row.peak_bytes)
        yield from above(f"peak of {name_of(row)}", row.peak_bytes, peak)
    for step in result.steps:
        yield from above(f"peak of step {step.step}", step.peak_bytes, peak)
    for moment in result.memory.get("moments") or ():
        yield from above(f"allocated {moment['label']}", moment["allocated_bytes"], peak)
    yield from above("allocated at the end", result.memory.get("allocated_bytes"), peak)


def no_peak_is_below_one_inside(result: Analysis) -> Broken:
    """A parent's peak is at least that of each child, but for shared ones, which others may call."""
    children = _children(result)
    for row in result.layers:
        for child in children[row.layer, row.phase] if row.layer and row.calls else ():
            if not child.shared:
                yield from above(f"peak of {name_of(child)} in {row.layer}", child.peak_bytes, row.peak_bytes)


def categories_make_what_is_allocated(result: Analysis) -> Broken:
    """At the peak, at each moment and at each point of the curve the categories are all bytes; owners too."""
    memory = result.memory
    peak: Mapping[str, Any] = memory.get("peak") or {}
    if memory.get("categories"):
        held = sum((memory["categories"] or {}).values())
        yield from _unequal("categories at the peak", held, peak.get("allocated_bytes"))
    if peak.get("owners"):
        yield from above("owners at the peak", sum(one["bytes"] for one in peak["owners"]), peak["allocated_bytes"])
    for moment in memory.get("moments") or ():
        yield from _unequal(
            f"categories {moment['label']}", sum(moment["categories"].values()), moment["allocated_bytes"]
        )
    curve: Mapping[str, Any] = memory.get("curve") or {}
    if curve:
        allocated, columns = curve["allocated_bytes"], list(curve["categories"].values())
        yield from _unequal("points of the curve", len(curve["time_us"]), len(allocated))
        yield from _unequal("order of the curve", list(curve["time_us"]), sorted(curve["time_us"]))
        held = [sum(column) for column in zip(*columns, strict=True)] if columns else [0] * len(allocated)
        yield from _unequal("the curve", held, list(allocated))
        yield from _unequal("the top of the curve", max(allocated, default=None), peak.get("allocated_bytes"))
        if curve.get("reserved_bytes") is not None:
            for held, reserved in zip(allocated, curve["reserved_bytes"], strict=True):
                yield from above("allocated", held, reserved)


def what_is_kept_was_allocated(result: Analysis) -> Broken:
    """An op keeps no more than it allocates; its largest allocation is one of them."""
    for row in result.op_memory:
        yield from above(f"kept by {row.op}", row.kept_bytes, row.allocated_bytes)
        yield from above(f"the largest of {row.op}", row.largest_bytes, row.allocated_bytes)
    if result.op_memory:
        made = sum(row.allocations for row in result.op_memory)
        yield from above("allocations listed", len(result.allocations), made)
    sizes = [row.size_bytes for row in result.allocations]
    yield from _unequal("order of allocations", sizes, sorted(sizes, reverse=True))


def what_is_kept_for_backward_is_kept_inside(result: Analysis) -> Broken:
    """Over all calls a row keeps what it keeps itself and what its children keep; of shared ones, as it called them."""

    def kept(row: LayerRow) -> float:
        return (row.retained_bytes or 0) * (row.calls or 0)

    children = _children(result)
    for row in result.layers:
        below = children[row.layer, row.phase] if row.layer else []
        parts = [row.self_retained_bytes, *(one.retained_bytes for one in below)]
        if row.retained_bytes is None or row.calls is None or None in parts:
            continue
        least = (row.self_retained_bytes or 0) * row.calls + sum(kept(one) for one in below if not one.shared)
        most = least + sum(kept(one) for one in result.layers if one.shared and one.phase == row.phase)
        most -= kept(row) if row.shared else 0
        if not least - 0.5 <= kept(row) * (1 + 1e-9) <= most * (1 + 2e-9) + 0.5:
            yield f"kept by {name_of(row)}: {kept(row):.0f} in all, its parts {least:.0f} to {most:.0f}"


def moments_are_in_their_steps(result: Analysis) -> Broken:
    """What is allocated at a moment of a step is no more than the step's peak; a change saves no more than the peak."""
    peaks = {row.step: row.peak_bytes for row in result.steps}
    for moment in result.memory.get("moments") or ():
        name = f"{moment['label']} of step {moment['step']}"
        yield from above(name, moment["allocated_bytes"], peaks.get(moment["step"]))
    peak = (result.memory.get("peak") or {}).get("allocated_bytes")
    for change in result.memory.get("changes") or ():
        yield from above(f"saved by {change['kind']}", change["saves_bytes"], peak)
    for row in result.allocations:
        if row.released_ns is not None and row.released_ns < row.allocated_ns:
            yield f"an allocation of {row.op} is released before it is made"


def names_of_layers_are_rows(result: Analysis) -> Broken:
    """A layer that a list of times or a finding names has a row."""
    known = {row.layer for row in result.layers} | {""}
    for name in LISTS.keys() - {"allocations", "experts", "expert_layers"}:  # what holds is not always called
        for row in getattr(result, name):
            named = getattr(row, "layers", None) or ()
            own = getattr(row, "layer", None)
            for layer in (*named, *([own] if own is not None else [])):
                if layer not in known:
                    yield f"{name} names {layer!r}, which has no row"
    for finding in findings_of(result):
        if finding["id"] != "preferred-expert":
            for folded in finding["layers"]:
                missing = [] if folded.endswith("...") else [one for one in unfolded(folded) if one not in known]
                yield from (f"{finding['id']} names {layer!r}, which has no row" for layer in missing)


def products_have_the_flops_of_their_sizes(result: Analysis) -> Broken:
    """The FLOPs of products by their sizes are those of the class, in each layer and phase in which all are counted."""
    by_size = sums_of(
        ((row.layer, row.phase), round(2 * row.m * row.n * row.k * row.batch * row.calls_per_step * _PRECISE))
        for row in result.products
    )
    counted: dict[str, dict[Any, int]] = {
        name: sums_of(
            ((row.layer, row.phase), row.flops_per_step * _PRECISE) for row in result.flops if row.class_name == name
        )
        for name in ("gemm", "attention")
    }
    plain = [key for key in counted["gemm"] if key not in counted["attention"] and key in by_size]
    # Products are of the steps with shapes, FLOPs of a timed one: with other calls all are others by one factor.
    whole = sum(by_size[key] for key in plain)
    factor = sum(counted["gemm"][key] for key in plain) / whole if whole else 1.0
    for key in by_size.keys() & counted["gemm"].keys():
        least = counted["gemm"][key]
        most = least + counted["attention"].get(key, 0)  # products of scores are attention's
        if not 0.99998 * least <= factor * by_size[key] <= 1.00002 * most:
            yield f"{key[0]} ({key[1]}): {by_size[key] / _PRECISE:.0f} FLOPs by size, {least / _PRECISE:.0f} counted"


_PRECISE = 10**6  # calls per step are no whole numbers


def experts_make_their_layer(result: Analysis) -> Broken:
    """Experts of a layer have all its tokens; adapters and what they adapt have rows with their time."""
    for layer in result.expert_layers:
        rows = [row for row in result.experts if row.layer == layer.layer]
        if rows and layer.tokens_per_step is not None and all(row.tokens_per_step is not None for row in rows):
            tokens = sum(row.tokens_per_step or 0 for row in rows)
            if not math.isclose(tokens, layer.tokens_per_step, rel_tol=1e-9):
                yield f"tokens of {layer.layer}: {tokens} by expert, {layer.tokens_per_step} in all"
        if rows and layer.experts is not None:
            yield from above(f"experts of {layer.layer}", len(rows), layer.experts)
    for row in result.adapters:
        phases = (*FORWARD_PHASES, "recompute", "backward")  # those of the row: gradients are added up apart
        spent = sum(one.time_ns for one in result.layers if one.layer in row.adapters and one.phase in phases)
        if not any(one.shared for one in result.layers):
            yield from above(f"adapters of {row.layer}", spent, row.adapter_time_ns)  # which has the sum of both too


def what_makes_results_comparable_is_so(result: Analysis) -> Broken:
    """What a comparison goes by is what the tables have."""
    told = result.summary.get("comparable") or {}
    wanted = {
        "time_basis": result.time_basis,
        "complete": result.complete,
        "steps": sum(row.step is not None for row in result.steps),
        "layers": len({row.layer for row in result.layers if row.layer}),
        "phases": sorted({row.phase for row in result.layers if row.time_ns}),
        "coverage": round(result.time.coverage, 4),
        "flops_per_step": result.utilization.hardware_flops_per_step if result.utilization else None,
    }
    for key in wanted.keys() & told.keys():
        yield from _unequal(key, told[key], wanted[key])
    steps = [row.step for row in result.steps if row.step is not None]
    yield from _unequal("order of steps", steps, sorted(steps))


def a_result_is_like_itself(result: Analysis) -> Broken:
    """Compared with itself nothing is different."""
    found = compare(result, result)
    yield from (f"{one}" for one in (*found.differences, *found.culprits, *found.work, *found.backend_changes))
    for total in found.totals:
        if total.a != total.b or total.change:
            yield f"{total}"
    for one in found.rows:
        yield from _unequal(f"{one.layer} ({one.phase}) on both sides", one.a == one.b, True)


# --- tables -----------------------------------------------------------------------------------------

# What no two rows of a list have in common.
_KEYS = {
    "attention": ("layer", "phase", "backend"),
    "classes": ("class_name", "phase"),
    "steps": ("step",),
    "flops": ("layer", "phase", "class_name", "dtype", "reason"),
    "operators": ("op", "phase"),
    "collectives": ("collective", "group", "group_size", "dtype", "layer", "phase"),
    "synchronisations": ("kind", "op", "layer", "phase"),
    "experts": ("layer", "expert"),
    "adapters": ("layer",),
    "op_memory": ("op",),
    "unattributed": ("reason",),
}
_RANKED = {"operators": "self_time_ns", "collectives": "time_ns", "op_memory": "allocated_bytes"}


def no_row_is_twice_and_the_most_come_first(result: Analysis) -> Broken:
    """A list has one row of a kind, and those that are ranked fall."""
    for name, fields in _KEYS.items():
        keys = Counter(tuple(getattr(row, field) for field in fields) for row in getattr(result, name))
        yield from (f"{count} rows of {name}: {key}" for key, count in keys.items() if count > 1)
    for name, field in _RANKED.items():
        values = [getattr(row, field) for row in getattr(result, name)]
        if values != sorted(values, reverse=True):
            yield f"{name} are not in order of {field}"


def nothing_is_below_zero(result: Analysis) -> Broken:
    """No count, time or size of any row is negative, or no number."""
    for name in LISTS:
        for row in getattr(result, name):
            for field in row.__dataclass_fields__:
                value = getattr(row, field)
                if isinstance(value, (int, float)) and (value < 0 or not math.isfinite(value)) and field != "order":
                    yield f"{field} of a row of {name}: {value}"


def what_is_not_known_has_a_reason(result: Analysis) -> Broken:
    """Where FLOPs, bytes, memory or a share of the peak are null, a warning says why."""
    said = " ".join(result.warnings).lower()
    rows = [row for row in result.layers if row.layer]
    for field, words in (
        ("flops_per_step", ("flop",)),
        ("bytes_moved_per_step", ("bytes moved",)),
        ("peak_bytes", ("memory", "allocation")),
    ):
        known = [getattr(row, field) is not None for row in rows if field != "peak_bytes" or row.calls]
        if known and not (any(known) if field == "peak_bytes" else all(known)) and not any(w in said for w in words):
            yield f"{field} is null in {known.count(False)} of {len(known)} rows, and no warning says why"
    if result.utilization is None and not any(word in said for word in ("flop", "mfu", "shape")):
        yield "no utilization, and no warning says why"
    if not result.memory.get("peak") and "memory" not in said and "allocation" not in said:
        yield "no peak, and no warning says why"


def json_comes_back(result: Analysis) -> Broken:
    """result.json is strict JSON, and reading it gives the same again."""
    data = to_dict(result)
    back = json.loads(json.dumps(data, allow_nan=False))
    yield from (
        f"{key} is another after reading" for key, value in to_dict(from_dict(back)).items() if back[key] != value
    )


def csv_is_json(result: Analysis) -> Broken:
    """Each list as CSV has the rows, keys and numbers of result.json; what is not known is empty."""
    data = to_dict(result)
    for name in LISTS:
        lines = list(csv.DictReader(io.StringIO(csv_text(result, name), newline="")))
        yield from _unequal(f"rows of {name}", len(lines), len(data[name]))
        for row, cells in zip(data[name], lines, strict=False):
            yield from _unequal(f"columns of {name}", list(cells), list(row))
            for key, value in row.items():
                is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
                if (value is None and cells[key] != "") or (is_number and float(cells[key]) != value):
                    yield f"{key} in {name}: {cells[key]} in CSV, {value} in JSON"
