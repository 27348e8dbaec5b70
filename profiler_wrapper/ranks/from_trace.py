"""Steps, phases and layers of one trace as rows of the span table.

On a CPU-only trace phases are what the training threads do: ops one after another with the same phase are one span. On
a trace of a device they are what its compute streams do, and data loading is the CPU's, beside it. A long gap in which
a collective runs is none of a phase: it is that collective's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

import numpy as np

from profiler_wrapper.analysis import classes, statistics
from profiler_wrapper.analysis.attributed import Attributed
from profiler_wrapper.analysis.attribution import Place, Role, role_of
from profiler_wrapper.analysis.charges import Union, union
from profiler_wrapper.analysis.layer_tree import is_named_block
from profiler_wrapper.analysis.model import FORWARD_PHASES
from profiler_wrapper.analysis.steps import StepWindows, step_windows
from profiler_wrapper.analysis.views.collectives import is_collective_call
from profiler_wrapper.trace.marks import GARBAGE, is_server_step
from profiler_wrapper.trace.nesting import nearest, nearest_above
from profiler_wrapper.trace.recording import Bool, Category, Int64
from profiler_wrapper.trace.spans import SPAN_KINDS, kind_of_span

COMPUTE_THREAD = -1  # stands for the compute streams of a device
COMMUNICATION = classes.CLASSES.index("communication")
_BACKWARD = ("backward", "accumulate_grad")
_LASTING = ("forward", "backward", "recompute")  # go on between their ops
LASTING_ON_DEVICE = (*_LASTING, "optimizer")  # a device waits between kernels for the CPU


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
    marked = np.flatnonzero(found.recording.named(_is_step) & (spans.category <= Category.ANNOTATION))
    if len(marked):
        return int(spans.lane[marked[np.argmin(spans.start_ns[marked])]])
    outside = [span for span in found.tree.layer_of_span if found.attribution.node_of[span] < 0]
    if outside:
        return int(spans.lane[min(outside, key=lambda span: int(spans.start_ns[span]))])
    ops = np.flatnonzero(spans.category == Category.CPU_OP)
    return int(np.bincount(spans.lane[ops]).argmax()) if len(ops) else 0


def _is_step(name: str) -> bool:
    return name.startswith("ProfilerStep#")


def main_thread(found: Attributed) -> int:
    """The thread that trains: its number, as the trace has it."""
    return _thread_of_lane(found, _main_lane(found)) if found.recording.lanes else 0


def thread_of(found: Attributed, span: int) -> int:
    return _thread_of_lane(found, int(found.recording.spans.lane[span]))


def _thread_of_lane(found: Attributed, lane: int) -> int:
    tid = found.recording.lanes[lane].tid
    return tid if isinstance(tid, int) else lane


# --------------------------------------------------------------------------------------------------
# Steps.


class Steps(NamedTuple):
    """The steps of a trace. One without whole steps is a single step, 0."""

    windows: StepWindows
    cpu_start_ns: Int64  # of what the CPU does for a step
    number: tuple[int, ...]
    thread: int

    def numbers(self, at_ns: Int64) -> list[int | None]:
        """Per instant on the CPU the number of its step; None outside of all."""
        place = np.searchsorted(self.cpu_start_ns, at_ns, side="right") - 1
        inside = (place >= 0) & (at_ns < self.windows.end_ns[place])
        return [self.number[at] if known else None for at, known in zip(place.tolist(), inside.tolist(), strict=True)]

    def numbers_of_charges(self, charges: Int64) -> list[int | None]:
        """Per charge the number of the step that launched it."""
        return [self.number[at] if at >= 0 else None for at in self.windows.launched_in[charges].tolist()]

    def rows(self) -> list[Row]:
        """A span per step."""
        columns = (self.number, self.windows.start_ns.tolist(), self.windows.end_ns.tolist())
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
    thread = COMPUTE_THREAD if found.charges.basis == "device" else main_thread(found)
    return Steps(windows, np.minimum(np.array(begins, dtype=np.int64), windows.start_ns), numbers, thread)


def with_steps(found: Attributed, steps: Steps, chosen: Bool) -> list[tuple[int, int | None]]:
    """The chosen events in order of start, each with its step."""
    start = found.recording.spans.start_ns
    members = np.flatnonzero(chosen)
    members = members[np.argsort(start[members], kind="stable")]
    return list(zip(members.tolist(), steps.numbers(start[members]), strict=True))


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
    calls, spans, tree = found.calls, found.recording.spans, found.tree
    waiting, device = _waiting(found, waits), _device_time(found)
    numbers = steps.numbers(spans.start_ns[calls.span])
    depth = np.zeros(len(calls), dtype=np.int64)
    rows = []
    for i, (span, layer, above) in enumerate(
        zip(calls.span.tolist(), calls.layer.tolist(), calls.parent.tolist(), strict=True)
    ):
        phase = found.attribution.place(span).phase
        kind = "forward" if phase in FORWARD_PHASES else phase
        depth[i] = depth[above] + 1 if above >= 0 else (1 if kind == "forward" else 2)
        if kind not in ("forward", "recompute") or not kept[layer] or _again(found, i):
            continue
        name = tree.layers[layer].name
        rows.append(
            Row(
                step=numbers[i],
                name=name,
                kind=kind,
                start_ns=int(spans.start_ns[span]),
                duration_ns=int(spans.duration_ns[span]),
                layer=name,
                device_ns=None if device is None else int(device[i]),
                waiting_ns=int(waiting[i]),
                depth=int(depth[i]),
                parent=tree.layers[int(calls.layer[above])].name if above >= 0 else kind,
                thread=thread_of(found, span),
            )
        )
    return rows


def _again(found: Attributed, call: int) -> bool:
    """Whether a call lies in another of the same layer, whose row has its time already."""
    layer, above = int(found.calls.layer[call]), int(found.calls.parent[call])
    while above >= 0 and int(found.calls.layer[above]) != layer:
        above = int(found.calls.parent[above])
    return above >= 0


def _waiting(found: Attributed, waits: Union) -> Int64:
    """Per call the time of the collectives that were called in it, on its thread, and of its waits for others."""
    calls, spans = found.calls, found.recording.spans
    outermost = np.flatnonzero(outermost_of(found, collective_calls(found)))
    inside = outermost[calls.call_of_span[outermost] >= 0]
    time = statistics.sum_by_key(calls.call_of_span[inside], spans.duration_ns[inside], len(calls))
    within: Int64 = waits.overlap(spans.start_ns[calls.span], spans.end_ns[calls.span])
    return _with_below(time, calls.parent.tolist()) + within


def _device_time(found: Attributed) -> Int64 | None:
    """Per call the time of the kernels launched in it; None of a trace without a device."""
    calls, charges = found.calls, found.charges
    if charges.basis != "device":
        return None
    launched = np.flatnonzero((charges.cpu_span >= 0) & (charges.work != COMMUNICATION))
    call = calls.call_of_span[charges.cpu_span[launched]]
    time = statistics.sum_by_key(call[call >= 0], charges.time_ns[launched[call >= 0]], len(calls))
    return _with_below(time, calls.parent.tolist())


def _with_below(time: Int64, parent: list[int]) -> Int64:
    for i in range(len(parent) - 1, -1, -1):  # a call begins after the one around it
        if parent[i] >= 0:
            time[parent[i]] += time[i]
    return time


def _backward_rows(found: Attributed, steps: Steps, kept: list[bool], waits: Union) -> list[Row]:
    """One row per layer and step: from its first node on, as long as its nodes took together."""
    spans, layers, places = found.recording.spans, found.tree.layers, found.attribution.places

    def backward_in(place: Place) -> Sequence[int]:
        """The layers whose backward it is."""
        return place.chain if place.phase in _BACKWARD else ()

    first: dict[tuple[int | None, int], int] = {}
    length, waiting, device = (defaultdict[tuple[int | None, int], int](int) for _ in range(3))
    node_time, node_wait = _node_times(found, waits)
    nodes = np.array(sorted(node_time), dtype=np.int64)
    for node, step in zip(nodes.tolist(), steps.numbers(spans.start_ns[nodes]), strict=True):
        start = int(spans.start_ns[node])
        for layer in backward_in(found.attribution.place(node)):
            key = (step, layer)
            first[key] = min(first.get(key, start), start)
            length[key] += node_time[node]
            waiting[key] += node_wait[node]
    on_device = found.charges.basis == "device"
    chosen = np.flatnonzero(found.charges.work != COMMUNICATION) if on_device else np.empty(0, np.int64)
    columns = (chosen.tolist(), steps.numbers_of_charges(chosen), found.charges.place[chosen].tolist())
    for charge, step, at in zip(*columns, strict=True):
        for layer in backward_in(places[at]):
            first.setdefault((step, layer), int(found.charges.launch_ns[charge]))
            device[step, layer] += int(found.charges.time_ns[charge])
    return [
        Row(
            step=step,
            name=layers[layer].name,
            kind="backward",
            start_ns=start,
            duration_ns=length[step, layer],
            layer=layers[layer].name,
            device_ns=device[step, layer] if on_device else None,
            waiting_ns=waiting[step, layer],
            depth=len(layers[layer].ancestors),
            parent=layers[layers[layer].parent].name if layers[layer].parent >= 0 else "backward",
            thread=COMPUTE_THREAD if on_device else None,
        )
        for (step, layer), start in sorted(first.items(), key=lambda item: (item[1], item[0][1]))
        if kept[layer]
    ]


def _node_times(found: Attributed, waits: Union) -> tuple[dict[int, int], dict[int, int]]:
    """Per outermost autograd node: its time without what it recomputes, and of that what are collectives and waits."""
    spans, calls, attribution = found.recording.spans, found.calls, found.attribution
    outermost = outermost_of(found, attribution.is_node)
    nodes = np.flatnonzero(outermost)
    top = nearest(found.nesting.parent, outermost)
    node_time = dict(zip(nodes.tolist(), spans.duration_ns[nodes].tolist(), strict=True))
    within = waits.overlap(spans.start_ns[nodes], spans.end_ns[nodes])
    node_wait = dict(zip(nodes.tolist(), within.tolist(), strict=True))
    recomputed = {i for i, span in enumerate(calls.span.tolist()) if attribution.place(span).phase == "recompute"}
    for call in recomputed:  # its time, and the waits in it, are those of what is computed again
        span = int(calls.span[call])
        node = int(top[span])
        if int(calls.parent[call]) not in recomputed and node in node_time:
            node_time[node] -= int(spans.duration_ns[span])
            node_wait[node] -= int(waits.overlap(spans.start_ns[[span]], spans.end_ns[[span]])[0])
    communicates = found.recording.named(lambda name: role_of(name) == Role.COLLECTIVE or is_collective_call(name))
    collective = communicates & (spans.category <= Category.ANNOTATION) & (top >= 0)
    for span in np.flatnonzero(outermost_of(found, collective)).tolist():
        node_wait[int(top[span])] += int(spans.duration_ns[span])
    return node_time, node_wait


# --------------------------------------------------------------------------------------------------
# What runs on a training thread, or on the compute streams of a device, as phases of a step.

LONG_GAP_NS = 100_000  # less belongs to what is before and after it
OF_CPU = tuple(kind.name for kind in SPAN_KINDS if kind.of_cpu)
_APART = (*OF_CPU, "communication")  # never joined: each is a span as it is
_KINDS = {"backward": "backward", "accumulate_grad": "backward", "recompute": "recompute", "optimizer": "optimizer"}


class _Piece(NamedTuple):
    """Something that runs, and of which kind it is; "": not known."""

    start_ns: int
    end_ns: int
    kind: str
    step: int | None
    name: str


def phases(
    pieces: Sequence[_Piece], collectives: Union, *, thread: int, lasting: tuple[str, ...] = _LASTING
) -> list[Row]:
    """Pieces of one kind after another as one span.

    What nothing names belongs to the phase on both sides of it, else to the one that it follows at once, else to none.
    A long gap within a phase that lasts is the phase's own, but for the collectives that run in it: the thread waits
    for them. Any other long gap belongs to nobody: what runs there shows in no event.
    """
    joined: list[_Piece] = []
    gaps = _gaps(pieces, collectives)
    for (gap_ns, waited_ns), piece in zip(gaps, _with_kinds(pieces, gaps), strict=True):
        last = joined[-1] if joined else None
        if last is None or last.kind != piece.kind or last.step != piece.step or piece.kind in _APART:
            joined.append(piece)
        elif gap_ns <= LONG_GAP_NS or (piece.kind in lasting and waited_ns <= LONG_GAP_NS):
            joined[-1] = last._replace(end_ns=max(last.end_ns, piece.end_ns))
        elif piece.kind in lasting:
            first, end = _ends_of_wait(collectives, last.end_ns, piece.start_ns)
            joined[-1] = last._replace(end_ns=first)
            joined.append(piece._replace(start_ns=end))
        else:
            joined.append(piece)
    return [
        Row(piece.step, piece.name, piece.kind, piece.start_ns, piece.end_ns - piece.start_ns, thread=thread)
        for piece in joined
        if piece.end_ns > piece.start_ns
    ]


def _with_kinds(pieces: Sequence[_Piece], gaps: Sequence[tuple[int, int]]) -> list[_Piece]:
    """The same, with a kind for each, which is the name of what may be joined."""
    found: list[_Piece] = []
    runs = [list(run) for _, run in groupby(pieces, key=lambda piece: (bool(piece.kind), piece.step))]
    for at, run in enumerate(runs):
        before = runs[at - 1][-1] if at else None
        after = runs[at + 1][0] if at + 1 < len(runs) else None
        kind = before.kind if before is not None and before.step == run[0].step and before.kind in _LASTING else ""
        within = after is not None and (after.kind, after.step) == (kind, run[0].step)
        for piece in run:
            gap_ns, waited_ns = gaps[len(found)]
            if not within and gap_ns - waited_ns > LONG_GAP_NS:
                kind = ""
            of = piece.kind or kind or "other"
            found.append(piece._replace(kind=of, name=piece.name if of in _APART else of))
    return found


def _gaps(pieces: Sequence[_Piece], collectives: Union) -> list[tuple[int, int]]:
    """Per piece: how long nothing ran before it, and how much of that a collective did; nothing before the first."""
    start: Int64 = np.array([piece.start_ns for piece in pieces], dtype=np.int64)
    reached = np.maximum.accumulate(np.array([piece.end_ns for piece in pieces], dtype=np.int64))
    before = np.minimum(np.concatenate([start[:1], reached[:-1]]), start)
    return list(zip((start - before).tolist(), collectives.overlap(before, start).tolist(), strict=True))


def _ends_of_wait(collectives: Union, start_ns: int, end_ns: int) -> tuple[int, int]:
    """From the first to the last instant of a gap at which a collective runs."""
    first = int(np.searchsorted(collectives.end_ns, start_ns, side="right"))
    last = int(np.searchsorted(collectives.start_ns, end_ns, side="left")) - 1
    return max(start_ns, int(collectives.start_ns[first])), min(end_ns, int(collectives.end_ns[last]))


# --------------------------------------------------------------------------------------------------
# What the training threads of a trace do, piece by piece, and what each piece is.

_AROUND = ("forward", "backward", "recompute", "optimizer")  # of such a block: what nothing else names


@lru_cache(maxsize=4096)
def _kind_of_block(name: str) -> str:
    """The kind that the name of an annotation means, as for `Timer`; "" where it means none."""
    kind = kind_of_span(name) if is_named_block(name) else ""
    return kind if kind in (*OF_CPU, *_AROUND) else ""


def cpu_pieces(found: Attributed, steps: Steps) -> list[_Piece]:
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
    is_layer = np.zeros(len(spans), dtype=np.bool_)
    is_layer[list(found.tree.layer_of_span)] = True
    is_layer &= (blocks == "") | (blocks == "forward")
    is_step = found.recording.named(lambda name: _is_step(name) or is_server_step(name))
    counts = (spans.category == Category.CPU_OP) | is_layer | np.isin(blocks, OF_CPU) | (roles != Role.PLAIN)
    outermost = outermost_of(found, counts & (spans.category <= Category.MODULE) & ~is_step & training)
    has_node = np.zeros(len(spans), dtype=np.bool_)
    made_in = nearest(parent, outermost)[_forward_ops(found)]
    has_node[made_in[made_in >= 0]] = True
    named_by = nearest(parent, around)
    pieces = []
    for span, step in with_steps(found, steps, outermost):
        kind = str(blocks[span]) if blocks[span] in OF_CPU else ""
        kind = kind or _kind_of(found, span, int(roles[span]), runs_forward=bool(has_node[span] or is_layer[span]))
        kind = kind or (str(blocks[named_by[span]]) if named_by[span] >= 0 else "")
        start = int(spans.start_ns[span])
        pieces.append(_Piece(start, start + int(spans.duration_ns[span]), kind, step, recording.name_of(span)))
    for span, step in with_steps(found, steps, around):
        for end in (int(spans.start_ns[span]), int(spans.end_ns[span])):
            pieces.append(_Piece(end, end, str(blocks[span]), step, recording.name_of(span)))
    return sorted(pieces, key=lambda piece: (piece.start_ns, piece.end_ns))


def _forward_ops(found: Attributed) -> Int64:
    """The forward ops of the autograd nodes that ran."""
    return np.unique(found.attribution.forward_op[found.attribution.forward_op >= 0])


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


def _kind_of(found: Attributed, span: int, role: int, *, runs_forward: bool) -> str:
    name = found.recording.name_of(span)
    if role == Role.DATA_LOADING:
        return "data"
    phase = found.attribution.place(span).phase
    if role == Role.OPTIMIZER or phase == "optimizer":
        return "optimizer"
    if role == Role.COLLECTIVE or is_collective_call(name):
        return "communication"
    if phase in _BACKWARD or name.startswith("torch.distributed.ddp.reducer"):
        return "backward"
    if runs_forward or phase in FORWARD_PHASES:
        return "forward"
    return "recompute" if phase == "recompute" else ""


# --------------------------------------------------------------------------------------------------
# What the compute streams of a device do, piece by piece, and how much of a time they are busy.

_LEAST_OF_COMPUTE = 0.1  # of the busiest stream's time: a stream with less does not make the phases


def device_pieces(found: Attributed, steps: Steps) -> list[_Piece]:
    """What runs on the compute streams of the busiest device."""
    spans, charges = found.recording.spans, found.charges
    chosen = _computes(found)
    in_phases = (place.phase for place in found.attribution.places)
    kinds = ["forward" if phase in FORWARD_PHASES else _KINDS.get(phase, "") for phase in in_phases]  # "": in none
    start, end = spans.start_ns[charges.span[chosen]], spans.end_ns[charges.span[chosen]]
    makes_node = np.zeros(len(spans), dtype=np.bool_)
    makes_node[_forward_ops(found)] = True
    launch = charges.cpu_span[chosen]
    forward = (launch >= 0) & (nearest(found.nesting.parent, makes_node)[launch] >= 0)
    columns = (column.tolist() for column in (start, end, charges.place[chosen], forward))
    return [
        _Piece(begin, stop, kinds[place] or ("forward" if in_forward else ""), number, "")
        for begin, stop, place, in_forward, number in zip(*columns, steps.numbers_of_charges(chosen), strict=True)
    ]


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
_WAITING = ("forward", "backward", "recompute", "optimizer", "other")


def waits_within_events(found: Attributed) -> Union:
    """The waits of the training threads within events, where the backend's threads show collectives."""
    spans, parent = found.recording.spans, found.nesting.parent
    calls = outermost_of(found, collective_calls(found))
    training = on_training_threads(found)
    collectives = np.flatnonzero(calls & ~training)
    if found.charges.basis == "device" or not len(collectives):
        return union(np.empty(0, np.int64), np.empty(0, np.int64))
    may_wait = found.recording.named(lambda name: name.startswith(_ENGINE))
    may_wait[list(found.tree.layer_of_span)] = True
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
        last = int(np.searchsorted(waits.start_ns, end, side="left"))
        for at in range(first, last) if row.kind in _WAITING else ():
            if waits.start_ns[at] > begin:
                kept.append(row._replace(start_ns=begin, duration_ns=int(waits.start_ns[at]) - begin))
            begin = int(waits.end_ns[at])
        if end > begin:
            kept.append(row._replace(start_ns=begin, duration_ns=end - begin))
    return kept


def _last(starts: Int64, values: Int64, at_ns: Int64) -> Int64:
    """Per instant the value of the interval that began last before it; the lowest of all where none did."""
    return statistics.at(values, np.searchsorted(starts, at_ns, side="left") - 1, np.iinfo(np.int64).min)
