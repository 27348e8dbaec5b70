"""Time intervals with their layer, phase, class and launch: per device event, or per op of a CPU-only trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from profiler_wrapper.place import classes
from profiler_wrapper.place.attention_ops import FAST_PATH, FAST_PATH_PARTS
from profiler_wrapper.place.launches import GRAPH_LAUNCH
from profiler_wrapper.place.layers import LayerTree
from profiler_wrapper.place.names import GRAPH_REPLAY, LAUNCHED_BEFORE, NO_LAUNCH, NO_LAYERS
from profiler_wrapper.place.phases import NO_LAYER, UNKNOWN, Attribution, Place
from profiler_wrapper.place.roles import Role, role_of
from profiler_wrapper.trace.arrays import at, in_order, marked
from profiler_wrapper.trace.nesting import Nesting, nearest, outermost, self_time
from profiler_wrapper.trace.recording import Bool, Category, Int8, Int32, Int64, Recording

TimeBasis = Literal["device", "cpu"]
_ATTENTION, _COMMUNICATION, _COPY, _OPTIMIZER, _OTHER = (
    classes.CLASSES.index(name) for name in ("attention", "communication", "copy", "optimizer", "other")
)
_LONGEST_WAY_NS = 1_000_000  # from a launch to the kernel on an idle device: 17 us at most in recorded traces


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TimedEvents:
    """The attributed time: one entry per device event; on a CPU-only trace per op with self time."""

    basis: TimeBasis
    span: Int64  # the event
    cpu_span: Int64  # the launch on the CPU, -1 for none; on a CPU-only trace the op itself
    time_ns: Int64
    launch_ns: Int64  # when it was launched; without a launch, when it started
    place: Int32  # index into Attribution.places
    work: Int8  # index into classes.CLASSES
    backend: Int8  # index into classes.BACKENDS, -1 for what is no attention
    graph: Bool  # of a replayed graph

    def __len__(self) -> int:
        return len(self.span)

    def only(self, kept: Bool) -> TimedEvents:
        """Those of them that count."""
        return replace(self, **{name: getattr(self, name)[kept] for name in self.__slots__ if name != "basis"})


def cpu_time(recording: Recording, nesting: Nesting, tree: LayerTree) -> Int64:
    """Per span the CPU time of an op or a mark without what lies in it, 0 for others.

    Time is as ops tell it: marks give names to it, never time.
    """
    spans = recording.spans
    is_op = spans.category == Category.CPU_OP
    counts = is_op.copy()
    if tree.source == "marks":
        counts[list(tree.layer_of_span)] = False
    return self_time(nesting, spans.lane, spans.start_ns, spans.duration_ns, counts=counts, takes=is_op)


def device_charges(recording: Recording, attribution: Attribution, launch: Int64, work_of: WorkOfOps) -> TimedEvents:
    """Every kernel, copy and set, where its launch is; of a graph replayed outside all layers, nobody knows where."""
    spans = recording.spans
    device = in_order(np.flatnonzero(recording.device_mask), spans.start_ns)
    cpu_span = launch[device]
    launched = cpu_span >= 0
    place = attribution.place_of[cpu_span]
    before = attribution.index_of(Place(UNKNOWN, "other", LAUNCHED_BEFORE))
    nowhere = attribution.index_of(Place(UNKNOWN, "other", NO_LAUNCH))
    place[~launched] = np.where(_launched_before(recording, device, launched)[~launched], before, nowhere)
    launch_ns = np.where(launched, spans.start_ns[cpu_span], spans.start_ns[device])
    graph = spans.graph[device] | (launched & recording.named(GRAPH_LAUNCH.match)[cpu_span])
    place[graph] = _replayed(attribution, place[graph])
    work, backend = _work_of_events(recording, device, np.where(graph, -1, cpu_span), work_of)
    # A collective launched where gradients are accumulated (DDP's buckets) belongs to no one layer.
    accumulates = recording.named(lambda name: role_of(name) == Role.ACCUMULATE)
    in_bucket = at(accumulates, at(attribution.node_of, cpu_span, -1), False)
    place[(work == _COMMUNICATION) & in_bucket] = attribution.index_of(Place(NO_LAYER, "backward"))
    return TimedEvents(
        basis="device",
        span=device,
        cpu_span=cpu_span,
        time_ns=spans.duration_ns[device],
        launch_ns=launch_ns,
        place=place,
        work=optimizer_work(attribution, place, work),
        backend=backend,
        graph=graph,
    )


def _replayed(attribution: Attribution, place: Int32) -> Int32:
    """Places of kernels of a replayed graph, whose launch tells their layer only where it lies in one."""
    for index in np.unique(place).tolist():
        launched_in = attribution.places[index]
        outside = launched_in.layer == NO_LAYER and launched_in.phase != "optimizer"
        if outside or launched_in.reason == NO_LAYERS:
            unknown = attribution.index_of(Place(UNKNOWN, launched_in.phase, GRAPH_REPLAY))
            place = np.where(place == index, np.int32(unknown), place)
    return place


def unseen_until_ns(recording: Recording, charges: TimedEvents) -> int | None:
    """Till when a device did work from before the trace that is not in it; None where it shows no such work.

    The first event of a stream tells: it began long after its launch, with nothing of the trace at work before it.
    """
    if charges.basis != "device":
        return None
    spans = recording.spans
    start_ns, end_ns = spans.start_ns[charges.span], spans.end_ns[charges.span]
    found = None
    for first in np.unique(spans.lane[charges.span], return_index=True)[1].tolist():  # charges come in order of start
        call = int(charges.cpu_span[first])
        if call < 0:
            continue
        here = spans.device[charges.span[:first]] == spans.device[charges.span[first]]
        free_ns = int(end_ns[:first][here].max(initial=spans.end_ns[call]))
        if start_ns[first] - free_ns > _LONGEST_WAY_NS:
            found = max(found or 0, int(start_ns[first]))  # same (0 -> -1): a kernel begins after its launch
    return found


def _launched_before(recording: Recording, device: Int64, launched: Bool) -> Bool:
    """Without a launch, and ahead in its stream of all that have one, or of a lower correlation.

    A stream runs in order, and correlations are given out in the order of launches.
    """
    spans = recording.spans
    before = np.zeros(len(device), dtype=np.bool_)
    runtime = (spans.category == Category.RUNTIME) & (spans.correlation >= 0)
    lowest = int(spans.correlation[runtime].min()) if runtime.any() else 0
    lane = spans.lane[device]
    for stream in np.unique(lane).tolist():
        members = np.flatnonzero(lane == stream)
        known = np.flatnonzero(launched[members])
        before[members[: known[0]] if len(known) else members[:0]] = True
    before |= (spans.correlation[device] >= 0) & (spans.correlation[device] < lowest)
    return before & ~launched


def cpu_charges(recording: Recording, attribution: Attribution, cpu_ns: Int64, work_of: WorkOfOps) -> TimedEvents:
    """Every op's self time on the CPU, for a trace without device events."""
    span = np.flatnonzero(cpu_ns)
    place = attribution.place_of[span]
    work, backend = work_of.ops(span)
    return TimedEvents(
        basis="cpu",
        span=span,
        cpu_span=span,
        time_ns=cpu_ns[span],
        launch_ns=recording.spans.start_ns[span],
        place=place,
        work=optimizer_work(attribution, place, work),
        backend=backend,
        graph=np.zeros(len(span), dtype=np.bool_),
    )


def optimizer_work(attribution: Attribution, place: Int32, work: Int8) -> Int8:
    """The class of work, which inside an optimizer is its own, but for communication."""
    in_optimizer = attribution.in_phases("optimizer")
    return np.where(in_optimizer[place] & (work != _COMMUNICATION), _OPTIMIZER, work).astype(np.int8)


class WorkOfOps(NamedTuple):
    """The class and the attention backend of CPU events, per span; -1 where no name tells."""

    backend_of: Int8  # by its own name
    work: Int8  # that of the op around where its own name says nothing
    backend: Int8  # that of the attention around it, in backward of the one whose node runs it

    def ops(self, span: Int64 | Int32) -> tuple[Int8, Int8]:
        """(class, backend) per op."""
        return _settled(self.work[span], self.backend[span]), self.backend[span]


def work_of_ops(recording: Recording, parent: Int32, tree: LayerTree, attribution: Attribution) -> WorkOfOps:
    """What the names of ops tell of the work of each CPU event."""
    name = recording.spans.name
    work_of = _codes(recording.names, classes.class_of_op, classes.CLASSES)[name]
    work_of[work_of == _OTHER] = -1
    backend_of = _codes(recording.names, classes.attention_backend_of_op, classes.BACKENDS)[name]
    # What attends in the fast path of nn.MultiheadAttention.
    in_fast_path = at(recording.named(FAST_PATH.__eq__), parent, False) & recording.named(FAST_PATH_PARTS.__contains__)
    backend_of[in_fast_path & (recording.spans.category == Category.CPU_OP)] = classes.BACKENDS.index("math")
    on_cpu = recording.spans.category <= Category.RUNTIME
    is_mark = marked(len(name), tree.layer_of_span)  # nothing is inherited from beyond a layer's own mark
    work = at(work_of, nearest(parent, on_cpu & ((work_of >= 0) | is_mark)), -1)
    attention = outermost(parent, nearest(parent, on_cpu & ((backend_of >= 0) | is_mark)), is_mark)
    backend = at(backend_of, attention, -1)
    of_node = at(at(backend, attribution.forward_op, -1), attribution.node_of, -1)
    in_backward = at(attribution.in_phases("backward"), attribution.place_of, False)
    return WorkOfOps(backend_of, work, np.where((backend < 0) & in_backward, of_node, backend))


def _work_of_events(recording: Recording, device: Int64, cpu_span: Int64, work_of: WorkOfOps) -> tuple[Int8, Int8]:
    """(class, backend) per device event, by its op first, by its own name second."""
    used, name = np.unique(recording.spans.name[device], return_inverse=True)
    names = [recording.names[i] for i in used.tolist()]
    by_kernel = _codes(names, classes.class_of_kernel, classes.CLASSES)[name]
    backend_by_kernel = _codes(names, classes.attention_backend_of_kernel, classes.BACKENDS)[name]
    communicates = by_kernel == _COMMUNICATION
    moves = np.array([classes.LAYOUT_CHANGE.search(text) is not None for text in names], dtype=np.bool_)[name]
    op_work, op_backend = at(work_of.work, cpu_span, -1), at(work_of.backend, cpu_span, -1)
    # A collective's op launches plain copies and fills too: its kernel's name decides.
    tells_work = (op_work >= 0) & ((op_work != _COMMUNICATION) | communicates)
    is_copy = (recording.spans.category[device] != Category.KERNEL) | moves
    work = np.where(communicates, _COMMUNICATION, np.where(is_copy, _COPY, np.where(tells_work, op_work, by_kernel)))
    backend = np.where(communicates, -1, np.where(op_backend >= 0, op_backend, backend_by_kernel)).astype(np.int8)
    return _settled(work, backend), backend


def _settled(work: npt.NDArray[Any], backend: Int8) -> Int8:
    return np.where(backend >= 0, _ATTENTION, np.where(work >= 0, work, _OTHER)).astype(np.int8)


def _codes(names: Sequence[str], kind_of: Callable[[str], str], kinds: Sequence[str]) -> Int8:
    """Per name the index of its kind; -1 for none."""
    codes = {kind: i for i, kind in enumerate(kinds)}
    return np.array([codes.get(kind_of(name), -1) for name in names], dtype=np.int8)
