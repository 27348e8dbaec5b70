"""Advice on what a step waits for: data, values of the device, launches; and on kernels that could be fewer."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

import numpy as np

from profiler_wrapper.advice.facts import LONGEST_LAUNCH_NS, Facts, count, duration, share, where
from profiler_wrapper.place.intervals import Union, uncovered, union
from profiler_wrapper.place.names import FORWARD_PHASES
from profiler_wrapper.tables.model import Finding
from profiler_wrapper.tables.views.overview import kinds_of_wall_time
from profiler_wrapper.trace.arrays import at, grouped, marked, sum_by_key
from profiler_wrapper.trace.nesting import nearest
from profiler_wrapper.trace.recording import Bool, Category, Int64

# Shares of a step's wall time.
DATALOADER_SHARE = 0.05  # as the TensorBoard profiler plugin had it
_UNPINNED_SHARE = 0.005  # pinning is one argument, so little is worth it
# The profiler itself waits once when it starts and once when it ends, by calls of these kinds.
_WAITS_OF_PROFILER = 2
_KINDS_OF_PROFILER = ("stream", "device", "event")

_WAIT_FIXES = {
    "item": "keep the value on the device, and read it (.item(), float(), if tensor:) once in many steps",
    "nonzero": "use torch.where(mask, a, b) or masked_fill in place of indexing by a mask: sizes stay known",
    "blocking copy": "pin the host memory and copy with non_blocking=True; move .cpu() and .numpy() out of the step",
}
_OTHER_WAIT_FIX = "take torch.cuda.synchronize() and its like out of the step; use events where times are wanted"


def dataloader_bound(facts: Facts) -> Iterator[Finding]:
    """Find a loop that waits for its DataLoader for more than a twentieth of the step."""
    spent = facts.within_steps_ns(facts.loads_data)
    if spent <= DATALOADER_SHARE * facts.step_ns:
        return
    workers = not (facts.loads_data & facts.found.recording.named(lambda name: "SingleProcess" in name)).any()
    yield facts.finding(
        "dataloader-bound",
        f"{share(facts.share_of_step(spent))} of a step ({duration(spent)}) waits for the DataLoader",
        f"in {facts.step_text}; the DataLoader has {'' if workers else 'no '}worker processes{facts.part_of_idle}",
        share=facts.of_step(spent),
        saves_ns=spent if facts.idle_ns is None else min(spent, facts.idle_ns),
        confidence=facts.wall_confidence,
        fix="give the DataLoader more workers (num_workers=), or do less per sample in __getitem__ and collate_fn"
        if workers
        else "load in other processes, ahead of the step: DataLoader(..., num_workers=4, persistent_workers=True)",
        rows=("overview",),
        details={"dataloader_ns": spent, "workers": workers},
    )


def synchronisation(facts: Facts) -> Iterator[Finding]:
    """Find where the CPU waits for the device within the step, and so loses its lead over it.

    Saves the wait, and no more than the device idles: a step is no shorter than what the device works.
    """
    idle = facts.idle_ns
    if idle is None:
        return
    groups = grouped(((row.kind, row.op, row.phase), row) for row in facts.analysis.synchronisations)
    for (kind, op, phase), rows in groups.items():
        calls = sum(row.count for row in rows)
        if kind in _KINDS_OF_PROFILER and (calls <= _WAITS_OF_PROFILER or calls < facts.steps):
            continue
        waits = sum(row.wait_ns for row in rows) / facts.steps
        layers = [row.layer for row in rows if row.layer]
        sources = list(dict.fromkeys(source for row in rows for source in row.sources))
        place = f"in {where(layers)}" if layers else "outside of all layers"
        yield facts.finding(
            "synchronisation",
            f"the CPU waits for the device {count(round(calls / facts.steps, 1), 'time')} a step in {op} {place}: "
            f"{duration(waits)}",
            f"waits of kind: {kind}; saves a part of the {duration(idle)} that the device is idle",
            phase=phase,
            share=facts.of_step(waits),
            saves_ns=min(waits, idle),
            fix=_WAIT_FIXES.get(kind, _OTHER_WAIT_FIX),
            source=sources[0] if sources else None,
            layers=layers,
            rows=("synchronisations",),
            details={"waits": calls / facts.steps, "wait_ns": waits, "sources": sources[:3]},
        )


def unpinned_copies(facts: Facts) -> Iterator[Finding]:
    """Find copies to the device from pageable memory: the CPU stages them, and waits meanwhile."""
    charges, recording, spans = facts.found.charges, facts.found.recording, facts.found.recording.spans
    copies = (spans.category == Category.MEMCPY) & recording.named(lambda n: "HtoD" in n and "Pageable" in n)
    chosen = np.flatnonzero(copies[charges.span] & facts.launched_in_steps)
    device = charges.span[chosen]
    call = np.where(charges.cpu_span[chosen] >= 0, charges.cpu_span[chosen], device)
    begin = np.minimum(spans.start_ns[call], spans.start_ns[device])
    taken = union(begin, np.maximum(spans.end_ns[call], spans.end_ns[device])).length_ns / facts.steps
    if not facts.on_device or taken <= _UNPINNED_SHARE * facts.step_ns:
        return
    copied = facts.per_step_ns(charges.time_ns[chosen])
    number = len(chosen) / facts.steps
    yield facts.finding(
        "unpinned-copies",
        f"{share(facts.share_of_step(taken))} of a step ({duration(taken)}) copies to the device from memory that is "
        "not pinned",
        f"{count(number, 'transfer')} a step, {duration(copied)} of device time",
        saves_ns=taken,
        confidence="high",
        fix="DataLoader(..., pin_memory=True) and .to(device, non_blocking=True)",
        rows=("kernels", "class=copy"),
        details={"copies": number, "device_ns": copied},
    )


# --- launches, and kernels too small to be worth one each ----------------------------------------

LOW_UTILIZATION = 0.5  # of the step's wall time, as the TensorBoard profiler plugin had it
LAUNCH_SHARE = 0.1  # of the step's wall time: below it a device is kept well enough ahead
OUTSIDE_SHARE = 0.1  # of the step's wall time, likewise
SMALL_KERNEL_NS = 10_000  # a launch takes the CPU about as long, so shorter kernels cannot hide the next launch
MANY_KERNELS = 200  # a step: fewer are launched in two milliseconds
SMALL_SHARE = 0.05  # of the step's wall time, in small kernels that could be fused and the waits for them
UNFUSED_SHARE = 0.3  # of the device time of a step: some elementwise work is in every model
SAVED_SHARE = 0.15  # of it, that rows of such kernels take beyond one kernel each
_LONG_GAP_NS = 1_000_000  # worth a look at the timeline
_LEAST_CAUSE_SHARE = 0.05  # of idle time: a smaller cause is not listed

_FUSABLE = ("elementwise", "norm", "softmax", "reduction", "copy")
_MEMORY_BOUND = ("elementwise", "copy", "norm", "reduction")
_PHASES = (*FORWARD_PHASES, "backward", "recompute")  # an optimizer has advice of its own
_COMPILED = "triton_"  # how Inductor begins the names of its kernels: these are fused already
_ON_DEVICE = "Memcpy DtoD"  # how copies within the device begin; others cannot be fused
# How torch names what it calls of compiled code.
_REGION = "Torch-Compiled Region"
_GRAPH = "## Call CompiledFxGraph"
_CAUSES_OF_IDLENESS = {  # what happens meanwhile, and what to do
    "launching": (
        "the CPU launches the next kernels",
        "more work per launch: a larger batch, torch.compile(model), or CUDA graphs (mode='reduce-overhead')",
    ),
    "loading": ("data is fetched", "more DataLoader workers, so that a batch is there when the step begins"),
    "waiting": (
        "the CPU is in calls that wait or hand out memory",
        "take waits out of the step, and allocate before it: no .item(), no .cpu(), no first-time set-up in the loop",
    ),
    "other": (
        "the CPU does something else, or the device waits for itself or for others",
        "move what the CPU does in the longest gap (see the timeline) out of the step, or overlap it",
    ),
}


def low_utilization(facts: Facts) -> Iterator[Finding]:
    """Find a device that runs nothing for more than half of the step."""
    gaps, idle = facts.gaps, facts.idle_ns
    if gaps is None or idle is None:
        return
    busy = 1 - facts.share_of_step(idle)  # with copies: the utilization of the overview counts kernels alone
    if busy >= LOW_UTILIZATION:
        return
    parts = [facts.wall_per_step_ns(part) for part in (gaps.launching_ns, gaps.loading_ns, gaps.waiting_ns)]
    causes = dict(zip(_CAUSES_OF_IDLENESS, (*parts, idle - sum(parts)), strict=True))
    evidence = [
        f"{duration(time_ns)} while {_CAUSES_OF_IDLENESS[cause][0]}"
        for cause, time_ns in causes.items()
        if time_ns >= _LEAST_CAUSE_SHARE * idle
    ]
    if (longest_ns := int(gaps.idle.length_ns.max(initial=0))) >= _LONG_GAP_NS:
        evidence.append(f"the longest gap: {duration(longest_ns)}")
    most = max(causes, key=causes.__getitem__)
    yield facts.finding(
        "low-utilization",
        f"the device is busy for {share(busy)} of {facts.step_text}: {duration(idle)} idle, mostly while "
        f"{_CAUSES_OF_IDLENESS[most][0]}",
        *evidence,
        saves_ns=idle,
        confidence=facts.wall_confidence,
        fix=_CAUSES_OF_IDLENESS[most][1],
        rows=("overview",),
        details={"busy": busy, "idle_ns": idle, "mostly": most},
    )


def outside_ops(facts: Facts) -> Iterator[Finding]:
    """Find, on a CPU, what no op covers: Python that loads, logs, waits or calls small ops, and where most of it is."""
    found, windows = facts.found, facts.windows
    if facts.on_device or not windows.number:
        return
    recording, spans, layers = found.recording, found.recording.spans, found.tree.layer_of_span
    busy = facts.union_of(np.logical_or.reduce(list(kinds_of_wall_time(found))))
    free = Union(*uncovered(busy, windows.start_ns, windows.end_ns)[:2])
    spent = facts.wall_per_step_ns(free.length_ns)
    if spent <= OUTSIDE_SHARE * facts.step_ns:
        return
    # From each begin or end of a layer, an annotation or a step (-1) to the next.
    named = (spans.category == Category.ANNOTATION) & ~recording.named(lambda name: name.startswith("ProfilerStep#"))
    marks = np.flatnonzero(named | marked(len(spans), layers))
    times = np.concatenate((spans.start_ns[marks], windows.start_ns, spans.end_ns[marks], windows.end_ns))
    order = np.argsort(times, kind="stable")
    span = np.tile(np.append(marks, np.full(len(windows.number), -1)), 2)[order]
    is_end = np.repeat((False, True), len(order) // 2)[order]
    moment = 2 * at(spans.name, span, -1).astype(np.int64) + is_end + 2
    _, first, pair = np.unique(moment[:-1] * (moment.max() + 1) + moment[1:], return_index=True, return_inverse=True)
    sums = sum_by_key(pair, free.overlap(times[order][:-1], times[order][1:]), len(first))
    longest = int(sums.argmax())
    most, place = facts.wall_per_step_ns(int(sums[longest])), int(first[longest])
    edges = (_edge(facts, *edge) for edge in zip(span[place:][:2].tolist(), is_end[place:][:2].tolist(), strict=True))
    one_wait = sums[longest] >= LONGEST_LAUNCH_NS * np.count_nonzero(pair == longest)
    yield facts.finding(
        "outside-ops",
        f"{share(facts.share_of_step(spent))} of {facts.step_text} runs no op: {duration(spent)}, {duration(most)} of "
        f"it from {' to '.join(edges)}",
        "there Python loads, logs, computes or waits, or calls the next op; the profiler makes this longer",
        saves_ns=spent,
        confidence=facts.wall_confidence if one_wait else "low",
        fix="take what waits there out of the step; batches that are made there: DataLoader(num_workers=4)"
        if one_wait
        else "more work per op: a larger batch, or torch.compile(model)",
        rows=("overview",),
        details={"outside_ns": spent, "longest_ns": most},
    )


def _edge(facts: Facts, span: int, is_end: bool) -> str:
    """Write the begin or end of a layer's call, an annotation or, for -1, a step, in words."""
    tree, name = facts.found.tree, facts.found.recording.name_of(span) if span >= 0 else "the step"
    layer = tree.layer_of_span.get(span)
    said = f"layer {tree.layers[layer].name}" if layer is not None else re.sub(r"^Optimizer\.\w+#", "", name)
    return f"the {'end' if is_end else 'start'} of {said}"


def launch_bound(facts: Facts) -> Iterator[Finding]:
    """Find a device that waits for launches: short gaps that end with an event launched within them."""
    gaps = facts.gaps
    if gaps is None:
        return
    waits = facts.wall_per_step_ns(gaps.launching_ns)
    if waits <= LAUNCH_SHARE * facts.step_ns:
        return
    events = int((gaps.launching_ns > 0).sum()) / facts.steps
    ended = gaps.idle.ender >= 0
    waits_of = _by_layer(facts, gaps.idle.ender[ended], gaps.launching_ns[ended])
    blocks = [layer for layer in waits_of if layer in facts.blocks]
    yield facts.finding(
        "launch-bound",
        f"the device waits {duration(waits)} of {facts.step_text} for the CPU to launch kernels",
        f"{count(round(events), 'gap')} a step, each under 1 ms, end with an event launched within them"
        f"{facts.part_of_idle}",
        saves_ns=waits,
        confidence=facts.wall_confidence,
        fix="put more of the step into CUDA graphs"
        if facts.found.charges.graph.any()
        else "torch.compile(model, mode='reduce-overhead') (CUDA graphs), or a larger batch per launch",
        layers=blocks if 2 * sum(waits_of[block] for block in blocks) > waits_of.total() else (),
        rows=("layers.layer,layers.phase,layers.calls,layers.idle_us,layers.cpu_time_us",),
        details={"waiting_ns": waits, "gaps": events},
    )


def many_small_kernels(facts: Facts) -> Iterator[Finding]:
    """Find many kernels that are too short to be worth a launch, and could be fused."""
    charges, spans = facts.found.charges, facts.found.recording.spans
    within = (spans.category[charges.span] == Category.KERNEL) & facts.launched_in_steps
    times = charges.time_ns[within]
    number = len(times) / facts.steps
    if not facts.on_device or number < MANY_KERNELS or float(np.median(times)) >= SMALL_KERNEL_NS:
        return
    fusable = facts.work_is(*_FUSABLE) & ~charges.graph
    small = np.flatnonzero(within & fusable & (charges.time_ns < SMALL_KERNEL_NS))
    spent = facts.per_step_ns(charges.time_ns[small])
    waited = 0.0
    if facts.gaps is not None:
        before_them = np.isin(facts.gaps.idle.ender, small)
        waited = facts.wall_per_step_ns(facts.gaps.launching_ns[before_them])
    if spent + waited <= SMALL_SHARE * facts.step_ns:
        return
    layers = _by_layer(facts, small, charges.time_ns[small])
    waits = f"the device waits {duration(waited)} a step for their launches{facts.part_of_idle}"
    yield facts.finding(
        "many-small-kernels",
        f"{len(small) / facts.steps:.0f} of {number:.0f} kernels a step are small (under 10 µs) and could be fused: "
        f"{duration(spent)} of device time",
        waits if waited >= 1 else facts.work_text(spent),
        saves_ns=spent + waited,
        fix="fuse small kernels: torch.compile(model), or F.rms_norm, F.layer_norm, a fused or foreach optimizer",
        layers=[layer for layer, _ in layers.most_common() if layer in facts.blocks],
        rows=("kernels", "class=elementwise"),
        details={"small_kernels": len(small) / facts.steps, "kernels": number, "device_ns": spent},
    )


def _by_layer(facts: Facts, charge: Int64, time_ns: Int64, *, blocks: bool = True) -> Counter[str]:
    """Sum times by innermost layer, "" for none; with `blocks` by the block around it, if there is one."""
    places, tree = facts.found.attribution.places, facts.found.tree
    sums = sum_by_key(facts.found.charges.place[charge], time_ns, len(places))
    by_layer = Counter[str]()
    for i in np.flatnonzero(sums).tolist():
        block = tree.block_of(places[i].chain) if blocks else -1
        layer = block if block >= 0 else places[i].layer
        by_layer[tree.layers[layer].name if layer >= 0 else ""] += int(sums[i])
    return by_layer


# --- memory-bound kernels in a row that could be one ----------------------------------------------
#
# Each such kernel reads and writes memory for little arithmetic. A row of them, with nothing else between, can be one
# kernel that reads what goes into the row and writes what comes out of it, and keeps what is between in registers.
# What counts as memory-bound is the kind of a kernel: none of these has arithmetic that could bound it.


def unfused_elementwise(facts: Facts) -> Iterator[Finding]:
    """Find memory-bound kernels with much of the device time of layers, in rows that could be one kernel each."""
    if not facts.on_device:
        return
    charges = facts.found.charges
    chosen = _memory_bound(facts)
    spent = facts.per_step_ns(charges.time_ns[chosen])
    rows, beyond = _rows(facts, chosen)
    saved = facts.per_step_ns(beyond)
    if spent <= UNFUSED_SHARE * facts.work_ns or saved <= SAVED_SHARE * facts.work_ns:
        return
    layers = _by_layer(facts, np.flatnonzero(chosen), charges.time_ns[chosen], blocks=False)
    number = int(chosen.sum()) / facts.steps
    yield facts.finding(
        "unfused-elementwise",
        f"{facts.work_text(spent)} ({duration(spent)}) is elementwise work, copies and norms in kernels that could be "
        "fused",
        f"{number:.0f} kernels a step, in {rows / facts.steps:.0f} rows of two or more on a stream",
        share=facts.of_work(spent),
        saves_ns=saved,
        fix="fuse elementwise work: torch.compile(model), or F.rms_norm, F.layer_norm, fused rotary embedding and "
        "activation (Liger-Kernel)",
        layers=[layer for layer, _ in layers.most_common()],
        rows=("kernels", "class=elementwise"),
        details={"kernels": number, "device_ns": spent, "rows": rows / facts.steps},
    )


def _memory_bound(facts: Facts) -> Bool:
    """Mark the charges that are such work of some layer, launched in a step as a kernel of its own, not compiled."""
    charges, recording, attribution = facts.found.charges, facts.found.recording, facts.found.attribution
    works = attribution.in_phases(*_PHASES) & (attribution.layer_of_place >= 0)
    compiled = recording.named(lambda name: name.startswith(_COMPILED))
    is_kernel = recording.spans.category == Category.KERNEL
    within = recording.named(lambda name: name.startswith(_ON_DEVICE))
    one_by_one = facts.launched_in_steps & ~charges.graph & ((is_kernel | within) & ~compiled)[charges.span]
    chosen: Bool = facts.work_is(*_MEMORY_BOUND) & one_by_one & works[charges.place]
    return chosen


def _rows(facts: Facts, chosen: Bool) -> tuple[int, int]:
    """Count rows of two or more kernels of one stream and step, and sum their time but for what must stay.

    Of a row its quickest kernel stays, or its norms if they take longer: a norm that is one kernel is fused already,
    and needs all of its input before it gives anything.
    """
    charges, spans = facts.found.charges, facts.found.recording.spans
    lane, step = spans.lane[charges.span], facts.found.steps.place_of(charges.launch_ns)
    order = np.lexsort((spans.start_ns[charges.span], lane))
    kept, lane, step = chosen[order], lane[order], step[order]
    apart = (lane[1:] != lane[:-1]) | (step[1:] != step[:-1])
    first = np.flatnonzero((kept & np.concatenate(([True], ~kept[:-1] | apart)))[kept])
    if not len(first):
        return 0, 0
    time_ns = charges.time_ns[order][kept]
    norm_ns = np.where(facts.work_is("norm")[order][kept], time_ns, 0)
    stays_ns = np.maximum(np.minimum.reduceat(time_ns, first), np.add.reduceat(norm_ns, first))
    return int((np.diff(first, append=len(time_ns)) > 1).sum()), int(time_ns.sum() - stays_ns.sum())


# --- torch.compile ---------------------------------------------------------------------------------


def graph_break(facts: Facts) -> Iterator[Finding]:
    """Find several compiled regions in one call of a layer: Dynamo broke the graph between them.

    Saves at most the time between the graphs, and all kernels of these layers that one graph could have fused.
    """
    found, known = facts.found, facts.analysis.run.get("graph_breaks")
    broken = {call: regions for call, regions in _regions_by_call(facts).items() if len(regions) > 1}
    if not broken or (known is not None and not known):  # then what has several regions is compiled in several
        return
    reported = known or ()
    broken_layers = {found.tree.layer_of_span[call] for call in broken}
    layers = [found.tree.layers[i].name for i in sorted(broken_layers, key=lambda i: found.tree.layers[i].order)]
    breaks = sum(len(regions) - 1 for regions in broken.values()) / facts.steps
    between = _between(facts, list(broken.values()))
    is_inside = [not broken_layers.isdisjoint(place.chain) for place in found.attribution.places]
    inside: Bool = np.array(is_inside, dtype=np.bool_)[found.charges.place]
    stays = facts.work_is("gemm", "attention", "communication")
    fusable, all_time = (facts.per_step_ns(found.charges.time_ns[of]) for of in (inside & ~stays, inside))
    because = f": {str(reported[0].get('reason'))[:90]}" if reported else ""
    because += f", and {count(len(reported) - 1, 'other reason')}" if len(reported) > 1 else ""
    yield facts.finding(
        "graph-break",
        f"{count(round(breaks, 1), 'graph break')} a step in {where(layers)}{because}",
        f"{duration(between)} a step between the compiled graphs of one call (wall time), {duration(fusable)} in "
        f"kernels that could be fused ({facts.time_name})",
        phase="forward",
        share=facts.of_work(all_time),
        saves_ns=between + fusable,
        confidence="medium" if reported else "low",
        fix="take what breaks the graph out of the compiled code (torch.compile(..., fullgraph=True) names it)",
        source=next((str(entry["source"]) for entry in reported if entry.get("source")), None),
        layers=layers,
        rows=("operators", "op=Torch-Compiled Region*"),
        details={"breaks": breaks, "between_ns": between},
    )


def _regions_by_call(facts: Facts) -> dict[int, list[int]]:
    """Group the compiled regions in forward by the innermost layer call around them, all as spans."""
    found, spans = facts.found, facts.found.recording.spans
    is_region = found.recording.named(lambda name: name.startswith(_REGION)) & (spans.category <= Category.ANNOTATION)
    regions = np.flatnonzero(is_region & (found.attribution.node_of < 0))
    # What goes on after a break lies in the region before.
    holder = nearest(found.nesting.parent, marked(len(spans), found.tree.layer_of_span))[regions]
    pairs = zip(holder.tolist(), regions.tolist(), strict=True)
    return grouped((call, region) for call, region in pairs if call >= 0)


def _between(facts: Facts, groups: list[list[int]]) -> float:
    """Return wall time of a step from the first region of a call to the end of its last, outside of graphs."""
    recording, spans = facts.found.recording, facts.found.recording.spans
    named = recording.named(lambda name: name.startswith(_GRAPH)) & (spans.category <= Category.ANNOTATION)
    if not named.any():
        named[[region for regions in groups for region in regions]] = True
    start = np.array([spans.start_ns[regions].min() for regions in groups], dtype=np.int64)
    end = np.array([spans.end_ns[regions].max() for regions in groups], dtype=np.int64)
    return facts.per_step_ns(end - start - facts.union_of(named).overlap(start, end))


RULES = (
    dataloader_bound,
    synchronisation,
    unpinned_copies,
    low_utilization,
    outside_ops,
    unfused_elementwise,
    launch_bound,
    many_small_kernels,
    graph_break,
)
