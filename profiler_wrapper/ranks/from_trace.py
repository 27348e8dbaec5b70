"""Steps, phases and layers of one trace as rows of the span table.

On a CPU-only trace phases are what the training threads do: ops one after another with the same phase are one span. On
a trace of a device they are what its compute streams do, and data loading is the CPU's, beside it. A long gap in which
a collective runs is none of a phase: it is that collective's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from profiler_wrapper.analysis.attributed import Attributed
from profiler_wrapper.analysis.attribution import Role, role_of
from profiler_wrapper.analysis.calls import called_by_same_key
from profiler_wrapper.analysis.charges import Union, union
from profiler_wrapper.analysis.classes import COMMUNICATION
from profiler_wrapper.analysis.layer_tree import is_named_block
from profiler_wrapper.analysis.model import FORWARD_PHASES
from profiler_wrapper.analysis.statistics import at, in_order, marked, sum_by_key
from profiler_wrapper.analysis.steps import Steps as CpuSteps
from profiler_wrapper.analysis.steps import StepWindows, step_windows
from profiler_wrapper.analysis.views.collectives import is_collective_call
from profiler_wrapper.trace.marks import GARBAGE, is_server_step
from profiler_wrapper.trace.nesting import nearest, nearest_above
from profiler_wrapper.trace.recording import Bool, Category, Int64
from profiler_wrapper.trace.spans import SPAN_KINDS, kind_of_span

Texts = npt.NDArray[Any]
COMPUTE_THREAD = -1  # stands for the compute streams of a device
_LASTING = ("forward", "backward", "recompute")  # go on between their ops
LASTING_ON_DEVICE = (*_LASTING, "optimizer")  # a device waits between kernels for the CPU
_WAITING = (*LASTING_ON_DEVICE, "other")
# The kind of what runs in a phase of attribution; in others it has none.
_KINDS = {phase: phase for phase in LASTING_ON_DEVICE} | dict.fromkeys(FORWARD_PHASES, "forward")
_KINDS["accumulate_grad"] = "backward"


class Row(NamedTuple):
    """A row without its rank; times by the trace's own clock until `reduce` makes them nanoseconds since 1970."""

    step: int | None
    name: str
    kind: str
    start_ns: int
    duration_ns: int
    layer: str | None = None
    device_ns: int | None = None
    waiting_ns: int | None = None
    depth: int = 0
    parent: str | None = None
    thread: int | None = None
    microbatch: int | None = None
    chunk: int | None = None
    sequence: int | None = None
    group: str | None = None
    bytes: int | None = None
    overlapped_ns: int | None = None
    tokens: int | None = None


def bounds(rows: Sequence[Row]) -> tuple[Int64, Int64]:
    """When each begins and ends."""
    starts = np.array([row.start_ns for row in rows], dtype=np.int64)
    return starts, starts + np.array([row.duration_ns for row in rows], dtype=np.int64)


# --------------------------------------------------------------------------------------------------
# Events chosen by their names, their threads and what is around them.


def collective_calls(found: Attributed) -> Bool:
    """Per event whether it is a call that communicates."""
    return found.recording.named(is_collective_call) & (found.recording.spans.category <= Category.ANNOTATION)


def outermost_of(found: Attributed, chosen: Bool) -> Bool:
    """Those of the chosen events that are within no other."""
    parent = found.nesting.parent
    return chosen & (nearest_above(parent, nearest(parent, chosen)) < 0)


def on_training_threads(found: Attributed) -> Bool:
    """Per event whether it is on the main thread or on one on which backward runs."""
    lane = found.recording.spans.lane
    return np.isin(lane, [_main_lane(found), *np.unique(lane[found.attribution.is_node])])


def _main_lane(found: Attributed) -> int:
    """Where steps are, else where the first layer is entered, else where most ops are."""
    spans = found.recording.spans
    is_step = found.recording.named(_is_step) & (spans.category <= Category.ANNOTATION)
    enters = marked(len(spans), found.tree.layer_of_span) & (found.attribution.node_of < 0)
    for chosen in (is_step, enters):
        if chosen.any():
            return int(spans.lane[in_order(np.flatnonzero(chosen), spans.start_ns)[0]])
    return int(np.bincount(spans.lane[spans.category == Category.CPU_OP], minlength=1).argmax())


def _is_step(name: str) -> bool:
    return name.startswith("ProfilerStep#")


def main_thread(found: Attributed) -> int:
    """The thread that trains."""
    return thread_of(found, _main_lane(found))


def thread_of(found: Attributed, lane: int) -> int:
    """The number of a thread, as the trace has it."""
    tid = found.recording.lanes[lane].tid
    return tid if isinstance(tid, int) else lane


# --------------------------------------------------------------------------------------------------
# Steps.


class Steps(NamedTuple):
    """The steps of a trace. One without whole steps is a single step, 0."""

    windows: StepWindows
    on_cpu: CpuSteps  # what the CPU does for a step
    thread: int

    def numbers(self, places: Int64) -> list[int | None]:
        """Per place of a step its number; None for -1."""
        return [self.on_cpu.number[place] if place >= 0 else None for place in places.tolist()]

    def rows(self) -> list[Row]:
        """A span per step."""
        columns = (self.on_cpu.number, self.windows.start_ns.tolist(), self.windows.end_ns.tolist())
        return [
            Row(number, "step", "step", start, end - start, thread=self.thread)
            for number, start, end in zip(*columns, strict=True)
        ]


def steps_of(found: Attributed) -> Steps:
    """The steps of an attributed recording, as every report has them."""
    windows = step_windows(found)
    numbers = tuple(0 if number is None else number for number in windows.number)
    begin_of: dict[int | None, int] = dict(zip(found.steps.number, found.steps.start_ns.tolist(), strict=True))
    begins = [begin_of.get(n, start) for n, start in zip(windows.number, windows.start_ns.tolist(), strict=True)]
    on_cpu = CpuSteps(numbers, np.minimum(np.array(begins, dtype=np.int64), windows.start_ns), windows.end_ns)
    return Steps(windows, on_cpu, COMPUTE_THREAD if found.charges.basis == "device" else main_thread(found))


def with_steps(found: Attributed, steps: Steps, chosen: Bool) -> list[tuple[int, int | None]]:
    """The chosen events in order of start, each with its step."""
    start_ns = found.recording.spans.start_ns
    members = in_order(np.flatnonzero(chosen), start_ns)
    return list(zip(members.tolist(), steps.numbers(steps.on_cpu.place_of(start_ns[members])), strict=True))


# --------------------------------------------------------------------------------------------------
# Layers: each call forward and recomputed, and what backward took for each in a step.


def layer_rows(found: Attributed, steps: Steps, waits: Union) -> list[Row]:
    """Rows of the layers that are kept: all but those more than one level inside a block.

    `duration_ns` is the CPU's, what is below a layer included; `device_ns` that of its kernels, collectives left out;
    `waits` are those of the training threads for other ranks, where no event shows them.
    """
    layers = found.tree.layers  # what is in a block has a parent
    kept = [layer.block in (-1, i) or layers[layer.parent].kind == "block" for i, layer in enumerate(layers)]
    return _call_rows(found, steps, kept, waits) + _backward_rows(found, steps, kept, waits)


def _call_rows(found: Attributed, steps: Steps, kept: list[bool], waits: Union) -> list[Row]:
    calls, charges, spans, layers = found.calls, found.charges, found.recording.spans, found.tree.layers
    starts, ends = spans.start_ns[calls.span], spans.end_ns[calls.span]
    # Of the collectives that were called in it, on its thread, and of its waits for others.
    inside = np.flatnonzero(outermost_of(found, collective_calls(found)) & (calls.call_of_span >= 0))
    waiting = calls.with_below(sum_by_key(calls.call_of_span[inside], spans.duration_ns[inside], len(calls)))
    waiting += waits.overlap(starts, ends)
    launched_in = at(calls.call_of_span, charges.cpu_span, -1)
    launched = np.flatnonzero((launched_in >= 0) & (charges.work != COMMUNICATION))
    device = calls.with_below(sum_by_key(launched_in[launched], charges.time_ns[launched], len(calls)))
    again = called_by_same_key(calls.parent, calls.layer)  # the row of the call around it has its time already
    numbers = steps.numbers(steps.on_cpu.place_of(starts))
    columns = (calls.span, calls.layer, calls.parent, again, starts, ends - starts, device, waiting)
    each = zip(numbers, *(column.tolist() for column in columns), strict=True)
    depths: list[int] = []
    rows = []
    for step, span, layer, above, is_again, start, length, device_ns, waiting_ns in each:
        kind = _KINDS.get(found.attribution.place(span).phase, "")
        depths.append(depths[above] + 1 if above >= 0 else (1 if kind == "forward" else 2))
        if kind not in ("forward", "recompute") or not kept[layer] or is_again:
            continue
        rows.append(
            Row(
                step=step,
                name=layers[layer].name,
                kind=kind,
                start_ns=start,
                duration_ns=length,
                layer=layers[layer].name,
                device_ns=device_ns if charges.basis == "device" else None,
                waiting_ns=waiting_ns,
                depth=depths[-1],
                parent=layers[int(calls.layer[above])].name if above >= 0 else kind,
                thread=thread_of(found, int(spans.lane[span])),
            )
        )
    return rows


def _backward_rows(found: Attributed, steps: Steps, kept: list[bool], waits: Union) -> list[Row]:
    """One row per layer and step: from its first node on, as long as its nodes took together."""
    spans, charges, layers, places = found.recording.spans, found.charges, found.tree.layers, found.attribution.places
    on_device = charges.basis == "device"
    outermost = outermost_of(found, found.attribution.is_node)
    nodes = in_order(np.flatnonzero(outermost), spans.start_ns)
    starts, (time, waiting) = spans.start_ns[nodes], _node_times(found, outermost, waits)
    work = np.flatnonzero(charges.work != COMMUNICATION) if on_device else np.empty(0, np.int64)
    step = np.concatenate([steps.on_cpu.place_of(starts), steps.windows.launched_in[work]])
    place = np.concatenate([found.attribution.place_of[nodes], charges.place[work]])
    start = np.concatenate([starts, charges.launch_ns[work]])
    amounts = np.zeros((3, len(step)), dtype=np.int64)
    amounts[:2, : len(nodes)], amounts[2, len(nodes) :] = (time[nodes], waiting[nodes]), charges.time_ns[work]
    # Each counts for all layers whose backward it is.
    chains = [one.chain if _KINDS.get(one.phase) == "backward" else () for one in places]
    part = np.repeat(np.arange(len(place)), np.array([len(chain) for chain in chains], dtype=np.int64)[place])
    layer = np.fromiter((layer for at_place in place.tolist() for layer in chains[at_place]), np.int64)
    _, first, of = np.unique(step[part] * len(layers) + layer, return_index=True, return_inverse=True)
    sums = [sum_by_key(of, amount[part], len(first)).tolist() for amount in amounts]
    columns = (steps.numbers(step[part[first]]), layer[first].tolist(), start[part[first]].tolist(), *sums)
    return [
        Row(
            step=number,
            name=layers[one].name,
            kind="backward",
            start_ns=start_ns,
            duration_ns=length,
            layer=layers[one].name,
            device_ns=device_ns if on_device else None,
            waiting_ns=waiting_ns,
            depth=len(layers[one].ancestors),
            parent=layers[layers[one].parent].name if layers[one].parent >= 0 else "backward",
            thread=COMPUTE_THREAD if on_device else None,
        )
        for number, one, start_ns, length, waiting_ns, device_ns in zip(*columns, strict=True)
        if kept[one]
    ]


def _node_times(found: Attributed, outermost: Bool, waits: Union) -> tuple[Int64, Int64]:
    """Per outermost autograd node: its time without what it recomputes, and of that what are collectives and waits."""
    spans, calls, attribution = found.recording.spans, found.calls, found.attribution
    top = nearest(found.nesting.parent, outermost)
    lasts, waited = spans.duration_ns, waits.overlap(spans.start_ns, spans.end_ns)
    node_time, node_wait = np.where(outermost, lasts, 0), np.where(outermost, waited, 0)
    recomputed = attribution.in_phases("recompute")[attribution.place_of[calls.span]]
    # What is computed again has its time, and the waits in it.
    again = calls.span[recomputed & ~at(recomputed, calls.parent, False) & (top[calls.span] >= 0)]
    np.subtract.at(node_time, top[again], lasts[again])
    np.subtract.at(node_wait, top[again], waited[again])
    communicates = found.recording.named(lambda name: role_of(name) == Role.COLLECTIVE or is_collective_call(name))
    collective = outermost_of(found, communicates & (spans.category <= Category.ANNOTATION) & (top >= 0))
    np.add.at(node_wait, top[collective], lasts[collective])
    return node_time, node_wait


# --------------------------------------------------------------------------------------------------
# What runs on a training thread, or on the compute streams of a device, as phases of a step.

LONG_GAP_NS = 100_000  # less belongs to what is before and after it
OF_CPU = tuple(kind.name for kind in SPAN_KINDS if kind.of_cpu)
_APART = (*OF_CPU, "communication")  # never joined: each is a span as it is


class Pieces(NamedTuple):
    """Things that run, in order of start."""

    start_ns: Int64
    end_ns: Int64
    kind: Texts  # "": not known
    step: Int64  # its place among the steps; -1: in none
    name: Texts


def phases(
    pieces: Pieces, steps: Steps, collectives: Union, *, thread: int, lasting: tuple[str, ...] = _LASTING
) -> list[Row]:
    """Pieces of one kind after another as one span.

    What nothing names belongs to the phase on both sides of it, else to the one that it follows at once, else to none.
    A long gap within a phase that lasts is the phase's own, but for the collectives that run in it: the thread waits
    for them. Any other long gap belongs to nobody: what runs there shows in no event.
    """
    if not len(pieces.kind):
        return []
    start, end, step = pieces.start_ns, pieces.end_ns, pieces.step
    reached = np.minimum(np.append(start[:1], np.maximum.accumulate(end)[:-1]), start)
    gap_ns, waited_ns = start - reached, collectives.overlap(reached, start)
    kind = _with_kinds(pieces, gap_ns - waited_ns > LONG_GAP_NS)
    lasts, apart = np.isin(kind, lasting), np.isin(kind, _APART)
    goes_on = np.append(False, (kind[1:] == kind[:-1]) & (step[1:] == step[:-1])) & ~apart
    waits = goes_on & lasts & (gap_ns > LONG_GAP_NS) & (waited_ns > LONG_GAP_NS)
    first = np.flatnonzero(~goes_on | waits | ((gap_ns > LONG_GAP_NS) & ~lasts))
    begins, ends = start[first], np.maximum.reduceat(end, first)
    after = np.flatnonzero(waits[first])  # a wait is from the first to the last instant at which a collective runs
    wait_ns = collectives.start_ns[np.searchsorted(collectives.end_ns, ends[after - 1], side="right")]
    waited_till_ns = collectives.end_ns[np.searchsorted(collectives.start_ns, begins[after], side="left") - 1]
    ends[after - 1] = np.maximum(ends[after - 1], wait_ns)
    begins[after] = np.minimum(begins[after], waited_till_ns)
    names = np.where(apart, pieces.name, kind)
    columns = (column.tolist() for column in (names[first], kind[first], begins, ends))
    return [
        Row(number, name, kind_of, begin, end_ns - begin, thread=thread)
        for number, name, kind_of, begin, end_ns in zip(steps.numbers(step[first]), *columns, strict=True)
        if end_ns > begin
    ]


def _with_kinds(pieces: Pieces, is_apart: Bool) -> Texts:
    """A kind for each; `is_apart`: whether it begins long after what is before it."""
    kind, step, named = pieces.kind, pieces.step, pieces.kind != ""
    begins = np.append(True, (named[1:] != named[:-1]) | (step[1:] != step[:-1]))
    first, run = np.flatnonzero(begins), np.cumsum(begins) - 1
    behind = first[1:]  # of each run the piece behind it
    in_step = step[behind] == step[behind - 1]
    before = np.append("", np.where(in_step, kind[behind - 1], ""))
    before[~np.isin(before, _LASTING)] = ""
    within = before == np.append(np.where(in_step, kind[behind], ""), "")
    times_apart = np.cumsum(is_apart)
    goes_on: Bool = times_apart == (times_apart - is_apart)[first][run]
    found = np.where(named, kind, np.where(within[run] | goes_on, before[run], ""))
    return np.where(found == "", "other", found)


# --------------------------------------------------------------------------------------------------
# What the training threads of a trace do, piece by piece, and what each piece is.

_AROUND = ("forward", "backward", "recompute", "optimizer")  # of such a block: what nothing else names


@lru_cache(maxsize=4096)
def _kind_of_block(name: str) -> str:
    """The kind that the name of an annotation means, as for `Timer`; "" where it means none."""
    kind = kind_of_span(name) if is_named_block(name) else ""
    return kind if kind in (*OF_CPU, *_AROUND) else ""


def cpu_pieces(found: Attributed, steps: Steps) -> Pieces:
    """The outermost events of the training threads, in order of start, and the ends of blocks that somebody named.

    What the trace knows of an op comes before the name of a block around it. That block's two ends are pieces without
    length, so that it lasts from one to the other.
    """
    recording, spans, parent = found.recording, found.recording.spans, found.nesting.parent
    training = on_training_threads(found)
    roles = np.array([role_of(name) for name in recording.names], dtype=np.int8)[spans.name]
    blocks = np.array([_kind_of_block(name) for name in recording.names])[spans.name]
    blocks[(spans.category != Category.ANNOTATION) | ~training] = ""
    around = outermost_of(found, np.isin(blocks, _AROUND))
    is_layer = marked(len(spans), found.tree.layer_of_span) & np.isin(blocks, ("", "forward"))
    is_step = recording.named(lambda name: _is_step(name) or is_server_step(name))
    counts = (spans.category == Category.CPU_OP) | is_layer | np.isin(blocks, OF_CPU) | (roles != Role.PLAIN)
    outermost = outermost_of(found, counts & (spans.category <= Category.MODULE) & ~is_step & training)
    makes_node = np.flatnonzero(marked(len(spans), found.attribution.forward_op))
    runs_forward = is_layer | marked(len(spans), nearest(parent, outermost)[makes_node])
    in_phase = np.array([_KINDS.get(place.phase, "") for place in found.attribution.places])[found.attribution.place_of]
    of_reducer = recording.named(lambda name: name.startswith("torch.distributed.ddp.reducer"))
    kinds: list[tuple[Bool, Any]] = [  # the first that is
        (np.isin(blocks, OF_CPU), blocks),
        (roles == Role.DATA_LOADING, "data"),
        ((roles == Role.OPTIMIZER) | (in_phase == "optimizer"), "optimizer"),
        ((roles == Role.COLLECTIVE) | recording.named(is_collective_call), "communication"),
        ((in_phase == "backward") | of_reducer, "backward"),
        (runs_forward, "forward"),
        (in_phase != "", in_phase),
        (nearest(parent, around) >= 0, blocks[nearest(parent, around)]),
    ]
    kind_of = np.select([chosen for chosen, _ in kinds], [kind for _, kind in kinds], "")
    events, ends = np.flatnonzero(outermost), np.flatnonzero(around)
    span = np.concatenate([events, ends, ends])
    start = np.concatenate([spans.start_ns[events], spans.start_ns[ends], spans.end_ns[ends]])
    end = np.concatenate([spans.end_ns[events], spans.start_ns[ends], spans.end_ns[ends]])
    kind = np.concatenate([kind_of[events], blocks[ends], blocks[ends]])
    order = np.lexsort((end, start))
    step = steps.on_cpu.place_of(spans.start_ns[span])
    names = np.array(recording.names, dtype=object)[spans.name[span]]
    return Pieces(*(column[order] for column in (start, end, kind, step, names)))


def garbage_rows(found: Attributed, steps: Steps) -> list[Row]:
    """The collections of garbage on the training threads, in whatever phase each lies."""
    spans = found.recording.spans
    collects = found.recording.named(
        lambda name: name == GARBAGE or (is_named_block(name) and kind_of_span(name) == "gc")
    )
    chosen = outermost_of(found, collects & (spans.category == Category.ANNOTATION) & on_training_threads(found))
    depth, thread = 0 if found.charges.basis == "device" else 1, main_thread(found)
    return [
        Row(step, "gc", "gc", int(spans.start_ns[span]), int(spans.duration_ns[span]), depth=depth, thread=thread)
        for span, step in with_steps(found, steps, chosen)
    ]


# --------------------------------------------------------------------------------------------------
# What the compute streams of a device do, piece by piece, and how much of a time they are busy.

_LEAST_OF_COMPUTE = 0.1  # of the busiest stream's time: a stream with less does not make the phases


def device_pieces(found: Attributed, steps: Steps) -> Pieces:
    """What runs on the compute streams of the busiest device."""
    spans, charges = found.recording.spans, found.charges
    chosen = _computes(found)
    span, launch = charges.span[chosen], charges.cpu_span[chosen]
    kind = np.array([_KINDS.get(place.phase, "") for place in found.attribution.places])[charges.place[chosen]]
    makes_node = nearest(found.nesting.parent, marked(len(spans), found.attribution.forward_op))
    kind = np.where((kind == "") & (at(makes_node, launch, -1) >= 0), "forward", kind)
    return Pieces(spans.start_ns[span], spans.end_ns[span], kind, steps.windows.launched_in[chosen], kind)


def with_device_time(found: Attributed, rows: list[Row]) -> list[Row]:
    """The same, each with the time of the compute streams' work that begins within it."""
    chosen = _computes(found)
    starts = found.recording.spans.start_ns[found.charges.span[chosen]]
    before = np.concatenate([[0], np.cumsum(found.charges.time_ns[chosen])])
    begins, ends = bounds(rows)
    busy = before[np.searchsorted(starts, ends)] - before[np.searchsorted(starts, begins)]
    return [row._replace(device_ns=time_ns) for row, time_ns in zip(rows, busy.tolist(), strict=True)]


def _computes(found: Attributed) -> Int64:
    """The charges of streams that compute, in order of start; collectives left out."""
    spans, charges = found.recording.spans, found.charges
    candidates: Int64 = np.flatnonzero(charges.work != COMMUNICATION)
    if not len(candidates):
        return candidates
    lane = spans.lane[charges.span[candidates]]
    kernel = spans.category[charges.span[candidates]] == Category.KERNEL
    busy = np.bincount(lane, weights=np.where(kernel, charges.time_ns[candidates], 0))
    device = np.zeros(len(busy), dtype=np.int64)
    device[lane] = spans.device[charges.span[candidates]]
    most = int(np.argmax(busy))
    computing = (busy >= _LEAST_OF_COMPUTE * busy[most]) & (device == device[most])
    return np.asarray(candidates[computing[lane]])


# --------------------------------------------------------------------------------------------------
# Where a training thread waits for a collective within a layer or a node, which show in the trace as one event.
#
# The thread goes on when the collective ends. So where one ends while the thread is in no op, only in a layer's mark,
# in the engine's part of a node or around a call that communicates, it waited since the last op, or since the
# collective began. A thread that goes on before waited for nothing.

_ENGINE = "autograd::engine::evaluate_function: "  # hooks run in it, beside the node itself


def waits_within_events(found: Attributed) -> Union:
    """The waits of the training threads within events, where the backend's threads show collectives."""
    spans, parent = found.recording.spans, found.nesting.parent
    calls = outermost_of(found, collective_calls(found))
    training = on_training_threads(found)
    collectives = np.flatnonzero(calls & ~training)
    if found.charges.basis == "device" or not len(collectives):
        return union(np.empty(0, np.int64), np.empty(0, np.int64))
    may_wait = marked(len(spans), found.tree.layer_of_span)
    may_wait |= found.recording.named(lambda name: name.startswith(_ENGINE))
    around = parent[np.flatnonzero(calls & training)]
    while len(around := np.unique(around[around >= 0])):
        may_wait[around] = True
        around = parent[around]
    ops = training & (spans.category == Category.CPU_OP)
    runs = union(spans.start_ns[ops & ~may_wait], spans.end_ns[ops & ~may_wait])
    within = union(spans.start_ns[training & may_wait], spans.end_ns[training & may_wait])
    end = spans.end_ns[collectives]
    begin = np.maximum(spans.start_ns[collectives], _last(within.start_ns, within.start_ns, end))
    begin = np.maximum(begin, _last(runs.start_ns, runs.end_ns, end))  # after the end where an op runs on
    chosen = (end - begin > LONG_GAP_NS) & (within.overlap(end - 1, end) > 0)
    return union(begin[chosen], end[chosen])


def without_waits(rows: Iterable[Row], waits: Union) -> list[Row]:
    """Phases of a step, cut where their thread waits."""
    kept = []
    for row in rows:
        begin, end = row.start_ns, row.start_ns + row.duration_ns
        first = int(np.searchsorted(waits.end_ns, begin, side="right"))
        last = int(np.searchsorted(waits.start_ns, end, side="left")) if row.kind in _WAITING else first
        starts, ends = waits.start_ns[first:last].tolist(), waits.end_ns[first:last].tolist()
        for start_ns, end_ns in zip([begin, *ends], [*starts, end], strict=True):
            if end_ns > start_ns:
                kept.append(row._replace(start_ns=start_ns, duration_ns=end_ns - start_ns))
    return kept


def _last(starts: Int64, values: Int64, at_ns: Int64) -> Int64:
    """Per instant the value of the interval that began last before it; the lowest of all where none did."""
    return at(values, np.searchsorted(starts, at_ns, side="left") - 1, np.iinfo(np.int64).min)
