"""One trace as rows of the span table: steps, phases, layers and collectives of a rank.

On a CPU-only trace phases are what the training threads do: ops one after another with the same phase are one span. On
a trace of a device they are what its compute streams do, and data loading is the CPU's, beside it. A long gap in which
a collective runs ends a span: it is that collective's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from profiler_wrapper.analysis import classes
from profiler_wrapper.analysis.attributed import Attributed
from profiler_wrapper.analysis.attribution import Role, role_of
from profiler_wrapper.analysis.collective_names import collective_of, element_bytes, is_collective_call
from profiler_wrapper.analysis.phase import FORWARD_PHASES
from profiler_wrapper.analysis.ranks.layer_spans import layer_rows
from profiler_wrapper.analysis.ranks.span_rows import COMPUTE_THREAD, Row, Steps, steps_of
from profiler_wrapper.recording.columns import Bool, Category, Int64
from profiler_wrapper.recording.device_details import CollectiveDetails
from profiler_wrapper.recording.nesting import nearest, nearest_above

_LONG_WAIT_NS = 100_000  # of a collective, in a gap between ops; less belongs to what is before and after it
_COMMUNICATION = classes.CLASSES.index("communication")
_STEP = "ProfilerStep#"
_LASTING = ("forward", "backward", "recompute")  # what nobody names belongs to them, if it comes after them
_GC_NAMES = ("Python GC", "gc.collect")
_LEAST_OF_COMPUTE = 0.1  # of the busiest stream's time: a stream with less does not make the phases


class Piece(NamedTuple):
    """Something that runs, and of which kind it is; "": of that before it."""

    start_ns: int
    end_ns: int
    kind: str
    step: int | None
    name: str


def trace_rows(found: Attributed) -> list[Row]:
    """The rows of an attributed recording, whose times are its own."""
    steps = steps_of(found)
    on_device = found.charges.basis == "device"
    collectives = device_collectives(found, steps) if on_device else cpu_collectives(found, steps)
    beside = _Intervals((row.start_ns, row.start_ns + row.duration_ns) for row in collectives if row.depth == 0)
    on_cpu = _phases(_cpu_pieces(found, steps), beside, thread=main_thread(found))
    if on_device:
        phases = _phases(_device_pieces(found, steps), beside, thread=COMPUTE_THREAD, busy=_DeviceTime(found))
        phases += [row for row in on_cpu if row.kind in ("data", "gc")]
    else:
        phases = [row for row in on_cpu if row.kind != "communication"]
        at_top = {row.start_ns for row in on_cpu if row.kind == "communication"}
        collectives = [row._replace(depth=0, parent=None) if row.start_ns in at_top else row for row in collectives]
    return [*steps.rows(), *collectives, *phases, *layer_rows(found, steps)]


# --- phases ---


def _phases(pieces: Iterable[Piece], beside: _Intervals, *, thread: int, busy: _DeviceTime | None = None) -> list[Row]:
    """Pieces in order of start, those of one kind after another joined."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        kind = piece.kind or "other"
        if not piece.kind and last is not None and last.kind in _LASTING and last.step == piece.step:
            kind = last.kind
        if last is not None and _goes_on(last, piece, kind, beside):
            joined[-1] = last._replace(end_ns=max(last.end_ns, piece.end_ns))
        else:
            joined.append(piece._replace(kind=kind))
    return [
        Row(
            step=piece.step,
            name=piece.name if piece.kind in ("data", "gc", "communication") else piece.kind,
            kind=piece.kind,
            start_ns=piece.start_ns,
            duration_ns=piece.end_ns - piece.start_ns,
            device_ns=None if busy is None else busy.within(piece.start_ns, piece.end_ns),
            thread=thread,
        )
        for piece in joined
    ]


def _goes_on(last: Piece, piece: Piece, kind: str, beside: _Intervals) -> bool:
    if last.kind != kind or last.step != piece.step or kind in ("data", "gc", "communication"):
        return False
    if piece.start_ns - last.end_ns <= _LONG_WAIT_NS:
        return True
    return beside.within(last.end_ns, piece.start_ns) <= _LONG_WAIT_NS


def _cpu_pieces(found: Attributed, steps: Steps) -> list[Piece]:
    """The outermost events of the training threads."""
    recording, spans, parent = found.recording, found.recording.spans, found.nesting.parent
    roles = np.array([role_of(name) for name in recording.names], dtype=np.int8)[spans.name]
    is_layer = np.zeros(len(spans), dtype=np.bool_)
    is_layer[list(found.tree.layer_of_span)] = True
    collecting = np.array([name.startswith(_GC_NAMES) for name in recording.names], dtype=np.bool_)[spans.name]
    is_step = np.array([name.startswith(_STEP) for name in recording.names], dtype=np.bool_)[spans.name]
    counts = (spans.category == Category.CPU_OP) | is_layer | collecting | (roles != Role.PLAIN)
    counts &= (spans.category <= Category.MODULE) & ~is_step & np.isin(spans.lane, training_lanes(found))
    outermost = counts & (nearest_above(parent, nearest(parent, counts)) < 0)
    has_node = np.zeros(len(spans), dtype=np.bool_)
    made_in = nearest(parent, outermost)[_made_nodes(found)]
    has_node[made_in[made_in >= 0]] = True
    members = np.flatnonzero(outermost)
    members = members[np.argsort(spans.start_ns[members], kind="stable")]
    places = steps.numbers(spans.start_ns[members])
    pieces = []
    for span, step in zip(members.tolist(), places, strict=True):
        name = recording.name_of(span)
        runs_forward = bool(has_node[span] or is_layer[span])
        kind = _kind_of(found, span, name, int(roles[span]), runs_forward=runs_forward)
        start = int(spans.start_ns[span])
        pieces.append(Piece(start, start + int(spans.duration_ns[span]), kind, step, name))
    return pieces


def _made_nodes(found: Attributed) -> Int64:
    """The forward ops of the nodes that ran."""
    return np.array([link.forward_op for link in found.attribution.links if link.forward_op >= 0], dtype=np.int64)


def _kind_of(found: Attributed, span: int, name: str, role: int, *, runs_forward: bool) -> str:
    if name.startswith(_GC_NAMES):
        return "gc"
    if role == Role.DATA_LOADING:
        return "data"
    phase = found.attribution.place(span).phase
    if role == Role.OPTIMIZER or phase == "optimizer":
        return "optimizer"
    if role == Role.COLLECTIVE or is_collective_call(name):
        return "communication"
    if phase in ("backward", "accumulate_grad") or name.startswith("torch.distributed.ddp.reducer"):
        return "backward"
    if runs_forward or phase in FORWARD_PHASES:
        return "forward"
    return "recompute" if phase == "recompute" else ""


def _device_pieces(found: Attributed, steps: Steps) -> list[Piece]:
    """What runs on the compute streams of the busiest device."""
    spans, charges = found.recording.spans, found.charges
    chosen = _computes(found)
    kinds = [_kind_of_phase(place.phase) for place in found.attribution.places]
    start, end = spans.start_ns[charges.span[chosen]], spans.end_ns[charges.span[chosen]]
    makes_node = np.zeros(len(spans), dtype=np.bool_)
    makes_node[_made_nodes(found)] = True
    launch = charges.cpu_span[chosen]
    forward = (launch >= 0) & (nearest(found.nesting.parent, makes_node)[launch] >= 0)
    columns = (start, end, charges.place[chosen], forward)
    numbers = steps.numbers_of_charges(chosen)
    return [
        Piece(begin, stop, kinds[place] or ("forward" if in_forward else ""), number, "")
        for (begin, stop, place, in_forward), number in zip(
            zip(*(column.tolist() for column in columns), strict=True), numbers, strict=True
        )
    ]


def _kind_of_phase(phase: str) -> str:
    if phase in FORWARD_PHASES:
        return "forward"
    known = {"backward": "backward", "accumulate_grad": "backward", "recompute": "recompute", "optimizer": "optimizer"}
    return known.get(phase, "")


def _computes(found: Attributed) -> Int64:
    """The charges of streams that compute, in order of start; collectives left out."""
    spans, charges = found.recording.spans, found.charges
    candidates: Int64 = np.flatnonzero(charges.work != _COMMUNICATION)
    if not len(candidates):
        return candidates
    lane = spans.lane[charges.span[candidates]]
    kernel = spans.category[charges.span[candidates]] == Category.KERNEL
    busy = np.bincount(lane, weights=np.where(kernel, charges.time_ns[candidates], 0))
    device = np.zeros(len(busy), dtype=np.int64)
    device[lane] = spans.device[charges.span[candidates]]
    most = int(np.argmax(busy))
    computing = (busy >= _LEAST_OF_COMPUTE * busy[most]) & (device == device[most])
    chosen: Int64 = candidates[computing[lane]]
    return chosen


class _DeviceTime:
    """Time of the compute streams, summed."""

    def __init__(self, found: Attributed) -> None:
        chosen = _computes(found)
        self._start = found.recording.spans.start_ns[found.charges.span[chosen]]
        self._before = np.concatenate([[0], np.cumsum(found.charges.time_ns[chosen])])

    def within(self, start_ns: int, end_ns: int) -> int:
        """Of what begins there."""
        first, last = np.searchsorted(self._start, [start_ns, end_ns])
        return int(self._before[last] - self._before[first])


class _Intervals:
    """A union of intervals."""

    def __init__(self, pairs: Iterable[tuple[int, int]]) -> None:
        ordered = np.array(sorted(pairs), dtype=np.int64).reshape(-1, 2)
        self._starts = ordered[:, 0]
        reached = np.maximum.accumulate(ordered[:, 1]) if len(ordered) else ordered[:, 1]
        self._new_from = np.maximum(self._starts, np.concatenate([self._starts[:1], reached[:-1]]))
        self._ends = np.maximum(reached, self._new_from)
        self._before = np.concatenate([[0], np.cumsum(self._ends - self._new_from)])

    def within(self, start_ns: int, end_ns: int) -> int:
        """How much of that time at least one of them runs."""
        return self._until(end_ns) - self._until(start_ns)

    def _until(self, at_ns: int) -> int:
        place = int(np.searchsorted(self._starts, at_ns, side="right"))
        if place == 0:
            return 0
        last = min(at_ns, int(self._ends[place - 1])) - int(self._new_from[place - 1])
        return int(self._before[place - 1]) + max(0, last)


# --- threads ---


def main_thread(found: Attributed) -> int:
    """The thread that trains: its number, as the trace has it."""
    tid = found.recording.lanes[_main_lane(found)].tid if found.recording.lanes else 0
    return tid if isinstance(tid, int) else _main_lane(found)


def _main_lane(found: Attributed) -> int:
    """Where steps are, else where the first layer is entered, else where most ops are."""
    spans = found.recording.spans
    is_step = np.array([name.startswith(_STEP) for name in found.recording.names], dtype=np.bool_)[spans.name]
    marked = np.flatnonzero(is_step & (spans.category <= Category.ANNOTATION))
    if len(marked):
        return int(spans.lane[marked[np.argmin(spans.start_ns[marked])]])
    outside = [span for span in found.tree.layer_of_span if found.attribution.node_of[span] < 0]
    if outside:
        return int(spans.lane[min(outside, key=lambda span: int(spans.start_ns[span]))])
    ops = np.flatnonzero(spans.category == Category.CPU_OP)
    return int(np.bincount(spans.lane[ops]).argmax()) if len(ops) else 0


def training_lanes(found: Attributed) -> list[int]:
    """The main thread's, and those on which backward runs."""
    nodes = np.flatnonzero(found.attribution.is_node)
    return sorted({_main_lane(found), *np.unique(found.recording.spans.lane[nodes]).tolist()})


# --- collectives ---


def cpu_collectives(found: Attributed, steps: Steps) -> list[Row]:
    """Collectives as the backend's own threads show them, else as calls; calls beside the former have no number."""
    spans, parent = found.recording.spans, found.nesting.parent
    calls = np.array([is_collective_call(name) for name in found.recording.names], dtype=np.bool_)
    is_call: Bool = calls[spans.name] & (spans.category <= Category.ANNOTATION)
    outermost = is_call & (nearest_above(parent, nearest(parent, is_call)) < 0)
    training = np.isin(spans.lane, training_lanes(found))
    own_threads = np.flatnonzero(outermost & ~training)
    told = _told_of(found)
    by_backend = _numbered(found, steps, own_threads, told, thread_of=lambda span: _tid(found, span), depth=0)
    nested = np.flatnonzero(outermost & training)
    thread = main_thread(found)
    by_call = _numbered(found, steps, nested, told, thread_of=lambda _: thread, depth=1)
    if by_backend:
        by_call = [row._replace(sequence=None, group=None) for row in by_call]
    return by_backend + by_call


def device_collectives(found: Attributed, steps: Steps) -> list[Row]:
    """Kernels that communicate, each in its stream; of the step that launched it."""
    spans, charges = found.recording.spans, found.charges
    chosen = np.flatnonzero(charges.work == _COMMUNICATION)
    numbers = steps.numbers_of_charges(chosen)
    told = _details(found)
    rows, kernels = [], charges.span[chosen].tolist()
    for span, cpu_span, number in zip(kernels, charges.cpu_span[chosen].tolist(), numbers, strict=True):
        details = told.get(span) or told.get(_telling(found, cpu_span, told))
        rows.append(_collective_row(found, span, number, details, thread=int(spans.stream[span]), depth=0))
    return _with_sequence(rows)


def _telling(found: Attributed, span: int, told: Mapping[int, CollectiveDetails]) -> int:
    """The innermost event around a launch that tells of its collective; -1 for none."""
    parent = found.nesting.parent
    while span >= 0 and span not in told:
        span = int(parent[span])
    return span


def _numbered(
    found: Attributed,
    steps: Steps,
    members: Int64,
    told: Mapping[int, CollectiveDetails],
    *,
    thread_of: Callable[[int], int],
    depth: int,
) -> list[Row]:
    spans = found.recording.spans
    members = members[np.argsort(spans.start_ns[members], kind="stable")]
    numbers = steps.numbers(spans.start_ns[members])
    rows = [
        _collective_row(found, span, number, told.get(span), thread=thread_of(span), depth=depth)
        for span, number in zip(members.tolist(), numbers, strict=True)
    ]
    return _with_sequence(rows)


def _told_of(found: Attributed) -> dict[int, CollectiveDetails]:
    """Per event that tells of its collective, or that is around one that does, what is told."""
    told = _details(found)
    parent = found.nesting.parent
    for span, details in list(told.items()):
        above = int(parent[span])
        while above >= 0 and above not in told:
            told[above] = details
            above = int(parent[above])
    return told


def _collective_row(
    found: Attributed, span: int, step: int | None, details: CollectiveDetails | None, *, thread: int, depth: int
) -> Row:
    spans, name = found.recording.spans, found.recording.name_of(span)
    on_device = bool(found.recording.device_mask[span])
    plain = (details.name if details is not None else "") or name
    return Row(
        step=step,
        name=collective_of(plain) or collective_of(name) or name,
        kind="communication",
        start_ns=int(spans.start_ns[span]),
        duration_ns=int(spans.duration_ns[span]),
        device_ns=int(spans.duration_ns[span]) if on_device else None,
        thread=thread,
        depth=depth,
        sequence=None if details is None else details.sequence,
        group=_group(found, details),
        bytes=_bytes(details),
    )


def _with_sequence(rows: list[Row]) -> list[Row]:
    """Numbered in each step where the trace does not tell: by name and group, in order of start."""
    seen: dict[tuple[int | None, str, str | None], int] = {}
    numbered = []
    for row in sorted(rows, key=lambda row: row.start_ns):
        key = (row.step, row.name, row.group)
        count = seen[key] = seen.get(key, -1) + 1
        numbered.append(row if row.sequence is not None else row._replace(sequence=count))
    return numbered


def _details(found: Attributed) -> dict[int, CollectiveDetails]:
    return {details.span: details for details in found.recording.collectives}


def _group(found: Attributed, details: CollectiveDetails | None) -> str | None:
    """The ranks of the group, else its name; where nothing is told, of a job with one group that one."""
    if details is not None and details.ranks:
        return ranks_text(details.ranks)
    if details is not None and details.group_name:
        return details.group_name
    info = found.recording.metadata.get("distributedInfo")
    groups = info.get("pg_config") if isinstance(info, Mapping) else None
    if isinstance(groups, list) and len(groups) == 1 and isinstance(groups[0], Mapping):
        ranks = groups[0].get("ranks")
        return ranks_text(ranks) if isinstance(ranks, list) and ranks else str(groups[0].get("pg_desc") or "all")
    return None


def ranks_text(ranks: Iterable[int]) -> str:
    """`(0, 1, 2, 5)` -> `"0-2,5"`."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def _bytes(details: CollectiveDetails | None) -> int | None:
    if details is None:
        return None
    size = element_bytes(details.dtype or "")
    elements = [count for count in (details.in_elements, details.out_elements) if count is not None]
    return None if size is None or not elements else max(elements) * size


def _tid(found: Attributed, span: int) -> int:
    lane = int(found.recording.spans.lane[span])
    tid = found.recording.lanes[lane].tid
    return tid if isinstance(tid, int) else lane
