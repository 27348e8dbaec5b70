"""Time intervals with their layer, phase, class and launch: per device event, or per op of a CPU-only trace."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from profiler_wrapper.analysis import classes
from profiler_wrapper.analysis.attention_ops import FAST_PATH, FAST_PATH_PARTS
from profiler_wrapper.analysis.attribution import NO_LAYER, UNKNOWN, Attribution, Place, Role, role_of
from profiler_wrapper.analysis.layer_tree import LayerTree
from profiler_wrapper.analysis.model import GRAPH_REPLAY, LAUNCHED_BEFORE, NO_LAUNCH, NO_LAYERS
from profiler_wrapper.analysis.statistics import at, in_order, marked
from profiler_wrapper.trace.nesting import Nesting, innermost_around, nearest, nearest_above, self_time
from profiler_wrapper.trace.recording import Bool, Category, Int8, Int32, Int64, Recording

if TYPE_CHECKING:
    from profiler_wrapper.analysis.attributed import Attributed


TimeBasis = Literal["device", "cpu"]
_ATTENTION, _COMMUNICATION, _COPY, _OPTIMIZER, _OTHER = (
    classes.CLASSES.index(name) for name in ("attention", "communication", "copy", "optimizer", "other")
)
_LAUNCH = re.compile(r"(cuda|cu|hip)([A-Z]\w*)?Launch(?!HostFunc)")
_LONGEST_WAY_NS = 1_000_000  # from a launch to the kernel on an idle device: 17 us at most in recorded traces
_GRAPH_LAUNCH = re.compile(r"(cuda|cu|hip)GraphLaunch")
_CAPTURE_BEGIN = re.compile(r"(cuda|cu|hip)StreamBeginCapture")
_CAPTURE_END = re.compile(r"(cuda|cu|hip)StreamEndCapture")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Charges:
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

    def only(self, kept: Bool) -> Charges:
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


def launches(recording: Recording) -> Int64:
    """Per span, the CPU event that launched it; -1 for CPU events and where there is none.

    The join is `correlation`. Device events without such an event join by `External id`, but only
    in a file where that agrees wherever both exist.
    """
    spans = recording.spans
    launch = np.full(len(spans), -1, dtype=np.int64)
    device = np.flatnonzero(recording.device_mask)
    # same (>= -> >, 0 -> 1): they begin at 1
    runtime = np.flatnonzero((spans.category == Category.RUNTIME) & (spans.correlation >= 0))
    known = _join(spans.correlation[device], spans.correlation[runtime], runtime)
    launch[device] = known
    if (known < 0).any():
        # same (>= -> >, 0 -> 1): they begin at 1
        ops = np.flatnonzero((spans.category == Category.CPU_OP) & (spans.external_id >= 0))
        by_id = _join(spans.external_id[device], spans.external_id[ops], ops)
        op, call = by_id[(known >= 0) & (by_id >= 0)], known[(known >= 0) & (by_id >= 0)]
        inside = (spans.start_ns[op] <= spans.start_ns[call]) & (spans.start_ns[call] <= spans.end_ns[op])
        if len(op) and (inside & (spans.lane[op] == spans.lane[call])).all():
            launch[device] = np.where(known >= 0, known, by_id)
    return launch


def _join(wanted: Int64 | Int32, keys: Int64 | Int32, values: Int64) -> Int64:
    if len(keys) == 0:
        return np.full(len(wanted), -1, dtype=np.int64)
    order = np.argsort(keys, kind="stable")
    first = order[np.minimum(np.searchsorted(keys[order], wanted), len(keys) - 1)]
    return np.where((keys[first] == wanted) & (wanted >= 0), values[first], -1)


def device_charges(recording: Recording, attribution: Attribution, launch: Int64, work_of: WorkOfOps) -> Charges:
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
    graph = spans.graph[device] | (launched & recording.named(_GRAPH_LAUNCH.match)[cpu_span])
    place[graph] = _replayed(attribution, place[graph])
    work, backend = _work_of_events(recording, device, np.where(graph, -1, cpu_span), work_of)
    # A collective launched where gradients are accumulated (DDP's buckets) belongs to no one layer.
    accumulates = recording.named(lambda name: role_of(name) == Role.ACCUMULATE)
    in_bucket = at(accumulates, at(attribution.node_of, cpu_span, -1), False)
    place[(work == _COMMUNICATION) & in_bucket] = attribution.index_of(Place(NO_LAYER, "backward"))
    return Charges(
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


def unseen_until_ns(recording: Recording, charges: Charges) -> int | None:
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


class MissingKernels(NamedTuple):
    """Calls that launched kernels of which no event is in the trace."""

    captured: Int64  # while a graph was captured: they became part of it, and did not run
    lost: Int64  # the profiler lost the kernels, or stopped before they ran


def missing_kernels(recording: Recording, launch: Int64) -> MissingKernels:
    """Compare launches with device events; without any device event none counts as lost.

    A capture takes what any thread launches. Calls that set or copy memory say nothing: those without an event of
    their own are normal (sets, copies between devices).
    """
    spans = recording.spans
    runtime = spans.category == Category.RUNTIME
    calls, has_kernel = launches_kernels(recording), marked(len(spans), launch)
    begins = np.sort(spans.start_ns[runtime & recording.named(_CAPTURE_BEGIN.match)])
    ends = np.sort(spans.start_ns[runtime & recording.named(_CAPTURE_END.match)])
    open_at_first = len(ends) and (not len(begins) or ends[0] < begins[0])  # a capture that began before the trace
    missing = np.flatnonzero(calls & ~has_kernel)
    begun, ended = (np.searchsorted(times, spans.start_ns[missing], side="right") for times in (begins, ends))
    captured = begun + int(open_at_first) > ended
    if not recording.device_mask.any():
        return MissingKernels(missing[captured], missing[:0])
    lost, plain = missing[~captured], calls & ~recording.named(_GRAPH_LAUNCH.match)
    # Profilers of ROCm may give the kernels of two launches the number of one: enough kernels, so none is lost.
    launched = launch[(spans.category == Category.KERNEL) & (launch >= 0)]
    if int(plain[launched].sum()) >= int((plain & has_kernel).sum()) + int(plain[lost].sum()):
        lost = lost[~plain[lost]]
    return MissingKernels(missing[captured], lost)


def launches_kernels(recording: Recording) -> Bool:
    """Per span whether it is a call that launches kernels."""
    calls: Bool = (recording.spans.category == Category.RUNTIME) & recording.named(_LAUNCH.match)
    return calls


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


def cpu_charges(recording: Recording, attribution: Attribution, cpu_ns: Int64, work_of: WorkOfOps) -> Charges:
    """Every op's self time on the CPU, for a trace without device events."""
    span = np.flatnonzero(cpu_ns)
    place = attribution.place_of[span]
    work, backend = work_of.ops(span)
    return Charges(
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


def outermost(parent: Int32, near: Int32, is_border: Bool | None = None) -> Int32:
    """Per event the outermost of what `nearest` finds around it, up to the next border; -1 for none."""
    above = nearest_above(parent, near)
    found: Int32 = near.copy()
    members = np.flatnonzero(found >= 0)
    while len(members):
        further = above[found[members]]
        moves = further >= 0
        if is_border is not None:
            moves &= ~is_border[found[members]] & ~is_border[further]
        members, further = members[moves], further[moves]
        found[members] = further
    return found


# --- Unions of time intervals ---


class Union(NamedTuple):
    """Disjoint intervals in order."""

    start_ns: Int64
    end_ns: Int64

    @property
    def length_ns(self) -> int:
        """Total length."""
        return int((self.end_ns - self.start_ns).sum())

    def covered_before(self, time_ns: Int64) -> Int64:
        """Per instant: the length of the union that lies before it."""
        if len(self.start_ns) == 0:
            return np.zeros(len(time_ns), dtype=np.int64)
        lengths = self.end_ns - self.start_ns
        before = np.concatenate([[0], np.cumsum(lengths)])
        place = np.searchsorted(self.start_ns, time_ns, side="right")
        last = np.maximum(place - 1, 0)
        partial = np.clip(time_ns - self.start_ns[last], 0, lengths[last])
        return np.where(place > 0, before[last] + partial, 0)

    def overlap(self, start_ns: Int64, end_ns: Int64) -> Int64:
        """Per given interval: how much of it the union covers."""
        return self.covered_before(end_ns) - self.covered_before(start_ns)


def union(start_ns: Int64, end_ns: Int64) -> Union:
    """The union of intervals given in any order."""
    if len(start_ns) == 0:
        return Union(np.empty(0, np.int64), np.empty(0, np.int64))
    order = np.argsort(start_ns, kind="stable")
    starts, reach = start_ns[order], end_ns[order]
    np.maximum.accumulate(reach, out=reach)
    del order
    first = np.flatnonzero(np.concatenate([[True], starts[1:] > reach[:-1]]))
    last = np.append(first[1:] - 1, len(starts) - 1)
    return Union(starts[first], reach[last])


def uncovered(busy: Union, start_ns: Int64, end_ns: Int64) -> tuple[Int64, Int64, Bool]:
    """Begin and end of what `busy` leaves of each interval, and whether it ends where `busy` goes on."""
    pieces = [(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.bool_))]
    for begin, end in zip(start_ns, end_ns, strict=True):
        first = int(np.searchsorted(busy.end_ns, begin, side="right"))
        last = int(np.searchsorted(busy.start_ns, end, side="left"))
        starts = np.maximum(np.append(begin, busy.end_ns[first:last]), begin)
        ends = np.minimum(np.append(busy.start_ns[first:last], end), end)
        real = starts < ends
        pieces.append((starts[real], ends[real], (np.arange(len(ends)) < len(ends) - 1)[real]))
    left, right, goes_on = (np.concatenate(column) for column in zip(*pieces, strict=True))
    return left, right, goes_on


# --- Device time in which nothing ran, charged to where the CPU was ---


def idle_per_place(attributed: Attributed) -> Int64 | None:
    """Per place: nanoseconds between device events in which the launching thread was there.

    A gap belongs to the thread that launched what ended it. None without device events, and where some are not seen.
    """
    spans, charges = attributed.recording.spans, attributed.charges
    if charges.basis != "device" or attributed.unseen_until_ns is not None or len(attributed.lost_launches):
        return None
    idle = np.zeros(len(attributed.attribution.places), dtype=np.int64)
    for device in np.unique(spans.device[charges.span]).tolist():
        here = np.flatnonzero(spans.device[charges.span] == device)
        start = spans.start_ns[charges.span[here]]
        busy = union(start, start + charges.time_ns[here])
        gap_start, gap_end = busy.end_ns[:-1], busy.start_ns[1:]
        ender = here[np.searchsorted(start, gap_end)]  # charges come in order of start
        lane = at(spans.lane, charges.cpu_span[ender], -1)
        for thread in np.unique(lane[lane >= 0]).tolist():
            _add_idle(attributed, thread, gap_start[lane == thread], gap_end[lane == thread], idle)
    return idle


def _add_idle(attributed: Attributed, thread: int, gap_start: Int64, gap_end: Int64, idle: Int64) -> None:
    """Cut the gaps where the place of the thread changes and add the pieces to `idle`."""
    spans, nesting, place_of = attributed.recording.spans, attributed.nesting, attributed.attribution.place_of
    members = nesting.order[spans.lane[nesting.order] == thread]
    around = at(place_of, nesting.parent[members], attributed.attribution.outside)
    members = members[place_of[members] != around]  # the others change nothing
    cuts = np.unique(np.concatenate([gap_start, gap_end, spans.start_ns[members], spans.end_ns[members]]))
    left, right = cuts[:-1], cuts[1:]
    gap = np.searchsorted(gap_start, left, side="right") - 1
    inside = (gap >= 0) & (left < gap_end[np.maximum(gap, 0)])
    left, right = left[inside], right[inside]
    span = innermost_around(nesting, spans, np.full(len(left), thread, dtype=np.int32), left, left + 1)
    np.add.at(idle, at(place_of, span, attributed.attribution.outside), right - left)
