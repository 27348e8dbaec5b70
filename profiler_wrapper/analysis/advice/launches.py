"""Advice on launching: a device that waits for launches, and kernels too small to be worth one each."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from profiler_wrapper.analysis.advice.facts import Facts, Rule, count, duration, share, where
from profiler_wrapper.analysis.charges import union
from profiler_wrapper.analysis.model import Finding, Phase, SynchronisationRow
from profiler_wrapper.trace.nesting import nearest
from profiler_wrapper.trace.recording import Bool, Category, Int64

# --------------------------------------------------------------------------------------------------
# Advice on torch.compile: graph breaks that cut compiled code in pieces.

_REGION = "Torch-Compiled Region"
_GRAPH = "## Call CompiledFxGraph"
_NOT_FUSED = ("gemm", "attention", "communication")
_MOST_REASONS = 2


def graph_break(facts: Facts) -> Iterator[Finding]:
    """Several compiled regions in one call of a layer: Dynamo broke the graph between them."""
    known = facts.analysis.run.get("graph_breaks")
    if known is not None and not known:
        return  # what has several regions is then compiled in several
    regions = _regions_by_call(facts)
    reported = [entry for entry in known or () if isinstance(entry, Mapping)]
    broken = {call: members for call, members in regions.items() if len(members) > 1}
    if not broken:
        return
    tree = facts.found.tree
    layer_of = {call: tree.layer_of_span[call] for call in broken}
    layers = tuple(tree.layers[i].name for i in sorted(set(layer_of.values()), key=lambda i: tree.layers[i].order))
    breaks = sum(len(members) - 1 for members in broken.values()) / facts.steps
    between = _between(facts, list(broken.values()))
    fusable, all_time = _work_of(facts, set(layer_of.values()))
    calls = Counter(layer_of.values())
    per_call = max(len(members) for members in broken.values())
    evidence = (
        f"up to {per_call} compiled regions in one call of {where(layers)}, in "
        f"{count(sum(calls.values()) / facts.steps, 'call')} a step",
        f"{duration(between)} a step between the compiled graphs of these calls (wall time), {duration(fusable)} in "
        f"kernels that could be fused ({facts.time_name}); at most: none of both",
        *map(_reason, reported[:_MOST_REASONS]),
    )
    sources = [str(entry["source"]) for entry in reported if entry.get("source")]
    because = f": {str(reported[0].get('reason'))[:90]}" if reported else ""
    because += f", and {count(len(reported) - 1, 'other reason')}" if len(reported) > 1 else ""
    yield facts.finding(
        id="graph-break",
        title=f"{count(round(breaks, 1), 'graph break')} a step in {where(layers)}{because}",
        phase="forward",
        share=facts.share_of_work(all_time),
        saves_ns=between + fusable,
        evidence=evidence,
        confidence="medium" if reported else "low",
        fix="take what breaks the graph out of the compiled code (torch.compile(..., fullgraph=True) names it)",
        source=sources[0] if sources else None,
        layers=layers,
        details={"breaks": breaks, "between_us": between / 1000},
    )


def _reason(entry: Mapping[str, Any]) -> str:
    return str(entry.get("reason"))[:120] + (f" ({str(entry['source'])[-90:]})" if entry.get("source") else "")


def _regions_by_call(facts: Facts) -> dict[int, list[int]]:
    """Spans of the compiled regions in forward, in order, by the span of the innermost layer call around them."""
    found = facts.found
    recording, spans = found.recording, found.recording.spans
    is_region = recording.named(lambda name: name.startswith(_REGION)) & (spans.category <= Category.ANNOTATION)
    if not is_region.any():
        return {}
    is_call = np.zeros(len(spans), dtype=np.bool_)
    is_call[list(found.tree.layer_of_span)] = True
    regions = np.flatnonzero(is_region)
    holder = nearest(found.nesting.parent, is_call)[regions]  # what goes on after a break lies in the region before
    forward = found.attribution.node_of[regions] < 0
    by_call: dict[int, list[int]] = defaultdict(list)
    for region, call in zip(regions[forward].tolist(), holder[forward].tolist(), strict=True):
        if call >= 0:
            by_call[call].append(region)
    return {call: sorted(members, key=lambda i: int(spans.start_ns[i])) for call, members in by_call.items()}


def _between(facts: Facts, groups: Sequence[Sequence[int]]) -> float:
    """Per step, wall time from the begin of the first region of a call to the end of its last, outside of graphs."""
    recording = facts.found.recording
    spans = recording.spans
    named = recording.named(lambda name: name.startswith(_GRAPH))
    named &= spans.category <= Category.ANNOTATION
    if not named.any():
        named[[region for members in groups for region in members]] = True
    graphs = union(spans.start_ns[named], spans.end_ns[named])
    start = np.array([min(int(spans.start_ns[i]) for i in members) for members in groups], dtype=np.int64)
    end = np.array([max(int(spans.end_ns[i]) for i in members) for members in groups], dtype=np.int64)
    return facts.per_step_ns(int((end - start - graphs.overlap(start, end)).sum()))


def _work_of(facts: Facts, layers: set[int]) -> tuple[float, float]:
    """Per step, in these layers and below: (time of what could be fused, all time)."""
    found = facts.found
    holders = [
        found.tree.layers[place.layer].ancestors if place.layer >= 0 else () for place in found.attribution.places
    ]
    inside = np.array([not layers.isdisjoint(chain) for chain in holders], dtype=np.bool_)[found.charges.place]
    kept = facts.work_is(*_NOT_FUSED)
    times = found.charges.time_ns
    return facts.per_step_ns(int(times[inside & ~kept].sum())), facts.per_step_ns(int(times[inside].sum()))


# --------------------------------------------------------------------------------------------------
# A device that waits for launches, and kernels too small to be worth one each.

LAUNCH_SHARE = 0.1  # of the step, that the device waits for launches
SMALL_KERNEL_NS = 10_000
MANY_KERNELS = 200  # kernels a step
SMALL_SHARE = 0.05  # of the step, in small kernels that could be fused and the waits for them
_FUSABLE = ("elementwise", "norm", "softmax", "reduction", "copy")
_MOST_PLACES = 3


def launch_bound(facts: Facts) -> Iterator[Finding]:
    """The device waits for launches: for short gaps that end with an event launched within them."""
    gaps = facts.gaps
    if gaps is None or not len(gaps.step):
        return
    waits = facts.wall_per_step_ns(int(gaps.launching_ns.sum()))
    if waits <= LAUNCH_SHARE * facts.step_ns:
        return
    events = int((gaps.launching_ns > 0).sum()) / facts.steps
    ended = gaps.ender >= 0
    places = _by_layer(facts, gaps.ender[ended], gaps.launching_ns[ended])
    in_layers = {layer: time_ns for layer, time_ns in places.items() if layer}
    graphs = bool(facts.found.charges.graph.any())
    total = sum(places.values())
    mostly = [layer for layer in in_layers if layer in facts.blocks]
    in_blocks = sum(in_layers[layer] for layer in mostly)
    named = where(mostly) if mostly and 2 * in_blocks > total else None
    parts = [
        f"{where([layer])}: {duration(facts.wall_per_step_ns(waited))}"
        for layer, waited in places.most_common(_MOST_PLACES)
    ]
    yield facts.finding(
        id="launch-bound",
        title=f"the device waits {duration(waits)} of {facts.step_text} for the CPU to launch kernels",
        share=facts.share_of_step(waits),
        saves_ns=waits,
        evidence=(
            f"{count(round(events), 'gap')} a step of under 1 ms end with an event launched within them: "
            f"{share(facts.share_of_step(waits))} of the step (wall time)",
            *(["most in " + "; ".join(parts)] if in_layers else []),
            f"the device itself is busy for {duration(max(0.0, facts.step_ns - (facts.idle_ns or 0)))} of a step",
            "at most: launches that cost nothing",
        ),
        confidence="high" if facts.has_steps else "medium",
        fix=(
            "put more of the step into CUDA graphs"
            if graphs
            else "torch.compile(model, mode='reduce-overhead') (CUDA graphs), or a larger batch per launch"
        ),
        layers=tuple(mostly) if named else (),
        details={"waiting_us": waits / 1000, "gaps": events},
    )


def many_small_kernels(facts: Facts) -> Iterator[Finding]:
    """Most kernels are too short to be worth a launch, and many of them could be one."""
    found = facts.found
    charges, spans = found.charges, found.recording.spans
    if not facts.on_device:
        return
    within = (spans.category[charges.span] == Category.KERNEL) & facts.launched_in_steps
    times = charges.time_ns[within]
    number = len(times) / facts.steps
    if number < MANY_KERNELS or float(np.median(times)) >= SMALL_KERNEL_NS:
        return
    fusable = facts.work_is(*_FUSABLE) & ~charges.graph
    small = np.flatnonzero(within & fusable & (charges.time_ns < SMALL_KERNEL_NS))
    spent = float(charges.time_ns[small].sum()) / facts.steps
    waited = 0.0
    if facts.gaps is not None:
        before_them = np.isin(facts.gaps.ender, small)
        waited = facts.wall_per_step_ns(int(facts.gaps.launching_ns[before_them].sum()))
    if spent + waited <= SMALL_SHARE * facts.step_ns:
        return
    layers = _by_layer(facts, small, charges.time_ns[small])
    blocks = [layer for layer, _ in layers.most_common() if layer in facts.blocks]
    names = Counter(spans.name[charges.span[small]].tolist()).most_common(2)
    often = ", ".join(f"{found.recording.names[name][:50]} ({round(calls / facts.steps)})" for name, calls in names)
    yield facts.finding(
        id="many-small-kernels",
        title=f"{len(small) / facts.steps:.0f} of {number:.0f} kernels a step are small (under 10 µs) and could be "
        f"fused: {duration(spent)} of device time",
        share=facts.share_of_step(spent + waited),
        saves_ns=spent + waited,
        evidence=(
            f"the median kernel takes {duration(float(np.median(times)))}",
            f"elementwise, norm, softmax, reduction and copy kernels under 10 µs: {duration(spent)} of device time a "
            f"step, and the device waits {duration(waited)} for their launches (wall time)",
            f"most often {often}",
            "at most: both of them gone",
        ),
        confidence="medium",
        fix="torch.compile(model) fuses them; or fused ops: F.rms_norm, F.layer_norm, a fused or foreach optimizer",
        layers=tuple(blocks),
        details={"small_kernels": len(small) / facts.steps, "kernels": number, "device_us": spent / 1000},
    )


def _by_layer(facts: Facts, charge: Int64, time_ns: Int64, *, blocks: bool = True) -> Counter[str]:
    """Sums by innermost layer, "" for none; `blocks`: by the block around it, if there is one."""
    places, layers = facts.found.attribution.places, facts.found.tree.layers
    sums = np.zeros(len(places), dtype=np.int64)
    np.add.at(sums, facts.found.charges.place[charge], time_ns)
    by_layer = Counter[str]()
    for place, spent in zip(places, sums.tolist(), strict=True):
        if spent:
            layer = layers[place.layer] if place.layer >= 0 else None
            if layer is not None and blocks and layer.block >= 0:
                layer = layers[layer.block]
            by_layer[layer.name if layer is not None else ""] += spent
    return by_layer


# --------------------------------------------------------------------------------------------------
# Advice on memory-bound kernels in a row that could be one: elementwise work, copies, norms and reductions.
#
# Each such kernel reads and writes memory for little arithmetic. A row of them, with nothing else between, can be one
# kernel that reads what goes into the row and writes what comes out of it, and keeps what is between in registers.
# What counts as memory-bound is the kind of a kernel: none of these has arithmetic that could bound it.

UNFUSED_SHARE = 0.3  # of the device time of a step, in such kernels
SAVED_SHARE = 0.15  # of it, that rows of them take beyond one kernel each
_MEMORY_BOUND = ("elementwise", "copy", "norm", "reduction")
_PHASES = ("forward", "prefill", "decode", "backward", "recompute")  # an optimizer has advice of its own
_COMPILED = "triton_"  # how Inductor begins the names of its kernels: these are fused already
_ON_DEVICE = "Memcpy DtoD"  # how copies within the device begin; others cannot be fused


def unfused_elementwise(facts: Facts) -> Iterator[Finding]:
    """Memory-bound kernels take much of the device time of layers, in rows that could be one kernel each."""
    if not facts.on_device:
        return
    charges = facts.found.charges
    chosen = _memory_bound(facts)
    spent = facts.per_step_ns(int(charges.time_ns[chosen].sum()))
    if spent <= UNFUSED_SHARE * facts.work_ns:
        return
    rows, beyond = _rows(facts, chosen)
    saved = facts.per_step_ns(beyond)
    if saved <= SAVED_SHARE * facts.work_ns:
        return
    layers = _by_layer(facts, np.flatnonzero(chosen), charges.time_ns[chosen], blocks=False)
    top = [layer for layer, _ in layers.most_common() if layer]
    number = int(chosen.sum()) / facts.steps
    yield facts.finding(
        id="unfused-elementwise",
        title=f"{share(facts.share_of_work(spent))} of the device time that a step launched ({duration(spent)}) is "
        "elementwise work, copies and norms in kernels that could be fused",
        share=facts.share_of_work(spent),
        saves_ns=saved,
        evidence=(
            f"{number:.0f} kernels a step, {duration(spent)} of device time",
            f"{rows / facts.steps:.0f} times a step two or more of them follow one another on a stream",
            "at most (device time): each row of them as one kernel, as quick as the quickest in it, or as its norms",
        ),
        confidence="medium",
        fix="torch.compile(model) fuses them; or fused versions of what they make up: F.rms_norm, F.layer_norm, "
        "fused rotary embedding and activation (Liger-Kernel)",
        layers=tuple(top),
        details={"kernels": number, "device_us": spent / 1000, "rows": rows / facts.steps},
    )


def _memory_bound(facts: Facts) -> Bool:
    """Per charge whether it is such work of some layer, launched in a step as a kernel of its own, and not compiled."""
    found = facts.found
    charges, spans, places = found.charges, found.recording.spans, found.attribution.places
    works = np.array([place.layer >= 0 and place.phase in _PHASES for place in places], dtype=np.bool_)
    compiled = found.recording.named(lambda name: name.startswith(_COMPILED))[charges.span]
    within = found.recording.named(lambda name: name.startswith(_ON_DEVICE))[charges.span]
    one_by_one = facts.launched_in_steps & ~charges.graph & ~compiled
    moves = (spans.category[charges.span] == Category.KERNEL) | within
    chosen: Bool = facts.work_is(*_MEMORY_BOUND) & one_by_one & moves & works[charges.place]
    return chosen


def _rows(facts: Facts, chosen: Bool) -> tuple[int, int]:
    """How many rows of two or more there are, on one stream and of one step; their time but for what must stay.

    Of a row its quickest kernel stays, or its norms if they take longer: a norm that is one kernel is fused already,
    and needs all of its input before it gives anything.
    """
    charges, spans = facts.found.charges, facts.found.recording.spans
    lane: Int64 = spans.lane[charges.span].astype(np.int64)
    step = facts.found.steps.place_of(charges.launch_ns)
    order = np.lexsort((spans.start_ns[charges.span], lane))
    kept, lane, step = chosen[order], lane[order], step[order]
    apart = (lane[1:] != lane[:-1]) | (step[1:] != step[:-1])
    begins = kept & np.concatenate(([True], ~kept[:-1] | apart))
    if not begins.any():
        return 0, 0
    row = np.cumsum(begins)[kept] - 1
    time_ns = charges.time_ns[order][kept]
    stays = np.full(int(row.max()) + 1, np.iinfo(np.int64).max, dtype=np.int64)
    np.minimum.at(stays, row, time_ns)
    norms = np.zeros_like(stays)
    np.add.at(norms, row, np.where(facts.work_is("norm")[order][kept], time_ns, 0))
    return int((np.bincount(row) > 1).sum()), int(time_ns.sum() - np.maximum(stays, norms).sum())


# --------------------------------------------------------------------------------------------------
# Advice on a step as a whole: it waits for data, leaves the device idle, or moves memory more than it computes.

DATALOADER_SHARE = 0.05  # of the step, as the TensorBoard profiler plugin had it
LOW_UTILIZATION = 0.5  # as the plugin had it
_LONG_GAP_NS = 1_000_000


def dataloader_bound(facts: Facts) -> Iterator[Finding]:
    """The loop waits for its DataLoader for more than a twentieth of the step."""
    recording = facts.found.recording
    spans = recording.spans
    chosen = np.flatnonzero(facts.loads_data)
    if not len(chosen):
        return
    spent = facts.within_steps_ns(spans.start_ns[chosen], spans.end_ns[chosen])
    if spent <= DATALOADER_SHARE * facts.step_ns:
        return
    workers = not any("SingleProcess" in recording.names[name] for name in np.unique(spans.name[chosen]).tolist())
    fix = (
        "give the DataLoader more workers (num_workers=), or do less per sample in __getitem__ and collate_fn"
        if workers
        else "load in other processes, ahead of the step: DataLoader(..., num_workers=4, persistent_workers=True)"
    )
    evidence = [
        f"{duration(spent)} of {facts.step_text} inside DataLoader (wall time, over {count(facts.steps, 'step')})",
        "loads in worker processes" if workers else "loads in this process: it has no workers",
    ]
    if facts.gaps is not None:
        idle = facts.wall_per_step_ns(int(facts.gaps.loading_ns.sum()))
        evidence.append(f"for {duration(idle)} of it the device ran nothing")
    yield facts.finding(
        id="dataloader-bound",
        title=f"{share(facts.share_of_step(spent))} of a step ({duration(spent)}) waits for the DataLoader",
        share=facts.share_of_step(spent),
        saves_ns=spent,
        evidence=(*evidence, "at most: a DataLoader that takes no time"),
        confidence="high",
        fix=fix,
        details={"dataloader_us": spent / 1000, "workers": workers},
    )


def low_utilization(facts: Facts) -> Iterator[Finding]:
    """The device runs nothing for more than half of the step."""
    gaps, idle = facts.gaps, facts.idle_ns
    if gaps is None or idle is None:
        return
    busy = 1 - facts.share_of_step(idle)  # with copies: the utilization of the overview counts kernels alone
    if busy >= LOW_UTILIZATION:
        return
    parts = [facts.wall_per_step_ns(int(part.sum())) for part in (gaps.launching_ns, gaps.loading_ns, gaps.waiting_ns)]
    causes = dict(zip(_CAUSES, (*parts, idle - sum(parts)), strict=True))
    evidence = [f"{duration(ns)} while {_CAUSES[cause][0]}" for cause, ns in causes.items() if ns >= 0.05 * idle]
    most = max(causes, key=causes.__getitem__)
    if (longest_ns := int(gaps.length_ns.max(initial=0))) >= _LONG_GAP_NS:
        evidence.append(f"the longest gap: {duration(longest_ns)}")
    yield facts.finding(
        id="low-utilization",
        title=f"the device is busy for {share(busy)} of {facts.step_text}: {duration(idle)} idle, mostly while "
        f"{_CAUSES[most][0]}",
        share=facts.share_of_step(idle),
        saves_ns=idle,
        evidence=(*evidence, "at most: all idle time within the steps (wall time)"),
        confidence="high" if facts.has_steps else "medium",
        fix=_CAUSES[most][1],
        details={"busy": busy, "idle_us": idle / 1000, "mostly": most},
    )


_CAUSES = {  # what happens meanwhile, and what to do
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
        "look at what the CPU does in the longest gap (the timeline shows it), and move it out of the step or overlap "
        "it",
    ),
}


# --------------------------------------------------------------------------------------------------
# Advice on waits: the CPU waits for the device within a step, or for copies from memory that can be paged.

_OWN = ("stream", "device", "event")  # kinds of which a few belong to the profiler itself
_FEW = 2
_UNPINNED_SHARE = 0.005
_WAIT_FIXES = {
    "item": "keep the value on the device, and read it (.item(), float(), if tensor:) once in many steps",
    "nonzero": "use torch.where(mask, a, b) or masked_fill in place of indexing by a mask: sizes stay known",
    "blocking copy": "pin the host memory and copy with non_blocking=True; move .cpu() and .numpy() out of the step",
}
_OTHER_FIX = "take torch.cuda.synchronize() and its like out of the step; use events where times are wanted"


def synchronisation(facts: Facts) -> Iterator[Finding]:
    """Within the step the CPU waits for the device, and so loses its lead over it."""
    idle = facts.idle_ns
    if idle is None:
        return
    groups: dict[tuple[str, str, Phase], list[SynchronisationRow]] = defaultdict(list)
    for row in facts.analysis.synchronisations:
        groups[row.kind, row.op, row.phase].append(row)
    for (kind, op, phase), rows in groups.items():
        calls = sum(row.count for row in rows)
        if kind in _OWN and (calls <= _FEW or calls < facts.steps):
            continue
        waits = sum(row.wait_ns for row in rows) / facts.steps
        layers = tuple(dict.fromkeys(row.layer for row in rows if row.layer))
        sources = tuple(dict.fromkeys(source for row in rows for source in row.sources))
        saves = min(waits, idle)
        place = f" in {where(layers)}" if layers else " outside of all layers"
        yield facts.finding(
            id="synchronisation",
            title=f"the CPU waits for the device {count(round(calls / facts.steps, 1), 'time')} a step in {op}{place}: "
            f"{duration(waits)}",
            phase=phase,
            share=facts.share_of_step(waits),
            saves_ns=saves,
            evidence=(
                f"{count(calls, 'wait')} ({kind}) in {count(facts.steps, 'step')}: {duration(waits)} of CPU a step",
                f"the device is idle for {duration(idle)} of {facts.step_text}",
                "at most: the smaller of the two, as a step without the wait is no shorter than what the device works",
            ),
            confidence="medium",
            fix=_WAIT_FIXES.get(kind, _OTHER_FIX),
            source=sources[0] if sources else None,
            layers=layers,
            details={"waits": calls / facts.steps, "wait_us": waits / 1000, "sources": list(sources[:3])},
        )


def unpinned_copies(facts: Facts) -> Iterator[Finding]:
    """Copies to the device from memory that can be paged: staged by the CPU, which waits meanwhile."""
    found = facts.found
    charges, recording = found.charges, found.recording
    spans = recording.spans
    copies = (spans.category == Category.MEMCPY) & recording.named(lambda n: "HtoD" in n and "Pageable" in n)
    chosen = np.flatnonzero(copies[charges.span] & facts.launched_in_steps)
    if not facts.on_device or not len(chosen):
        return
    device = charges.span[chosen]
    call = np.where(charges.cpu_span[chosen] >= 0, charges.cpu_span[chosen], device)
    begin = np.minimum(spans.start_ns[call], spans.start_ns[device])
    taken = union(begin, np.maximum(spans.end_ns[call], spans.end_ns[device])).length_ns / facts.steps
    copied = float(charges.time_ns[chosen].sum()) / facts.steps
    if taken <= _UNPINNED_SHARE * facts.step_ns:
        return
    evidence = f"{count(len(chosen) / facts.steps, 'copy', 'copies')} a step, {duration(copied)} of device time"
    yield facts.finding(
        id="unpinned-copies",
        title=f"{share(facts.share_of_step(taken))} of a step ({duration(taken)}) copies to the device from memory "
        "that is not pinned",
        share=facts.share_of_step(taken),
        saves_ns=taken,
        evidence=(
            f"{evidence}; with the calls that start them {duration(taken)} (wall time)",
            "at most: copies that run beside all else",
        ),
        confidence="high",
        fix="DataLoader(..., pin_memory=True) and .to(device, non_blocking=True)",
        details={"copies": len(chosen) / facts.steps, "device_us": copied / 1000},
    )


RULES: tuple[Rule, ...] = (
    dataloader_bound, low_utilization, unfused_elementwise, launch_bound, many_small_kernels, synchronisation,
    unpinned_copies, graph_break,
)  # fmt: skip
