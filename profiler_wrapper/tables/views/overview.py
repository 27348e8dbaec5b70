"""How busy the machine is within the steps, how the wall time of a step divides, and its time by parts.

The figures are those of the TensorBoard profiler's overview, by its definitions: torch_tb_profiler 0.4.3,
`event_parser.py` (what counts as what), `overall_parser.py` (the order), `gpu_metrics_parser.py`. Where ours differ:
communication is known by what a kernel is and not by five names, and where there are device events it is kernels
only: what the CPU does to launch them is the CPU's; copies beside it do not hide it; annotations are no CPU time, for
they change with what a user names; nothing is counted between steps.

A part of a step is the prefill or a token of a request, a call of a pipeline's model, or a role of training.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np

from profiler_wrapper.place import classes
from profiler_wrapper.place.classes import busiest_device, device_properties, tensor_core_kernels
from profiler_wrapper.place.intervals import Union, union
from profiler_wrapper.place.names import GENERATING_PHASES, Phase
from profiler_wrapper.place.placed import Placed
from profiler_wrapper.place.step_windows import StepWindows, step_windows
from profiler_wrapper.tables.call_rows import PartRow
from profiler_wrapper.tables.model import Overview, StepSplit
from profiler_wrapper.tables.views.collectives import is_collective_call
from profiler_wrapper.tables.views.kernels import occupancy_of
from profiler_wrapper.trace.arrays import at, in_pieces, marked, sum_by_key
from profiler_wrapper.trace.marks import EVALUATION, REQUEST, parse_mark
from profiler_wrapper.trace.nesting import nearest
from profiler_wrapper.trace.recording import Bool, Category, Float64, Int64, Recording, Spans

_DATALOADER = "enumerate(DataLoader)#", "enumerate(DataPipe)#"
_NS_PER_S = 10**9
_PARTS = 10**9  # a share of a multiprocessor is counted in these, so that sums of shares stay exact


def overview(placed: Placed) -> Overview | None:
    """Return the overview of an attributed recording; None where nothing takes wall time."""
    windows = step_windows(placed)
    if not windows.number:
        return None
    steps = _splits(placed, windows)
    device = busiest_device(placed.recording)
    if device is None:
        nothing: dict[str, Any] = dict.fromkeys(field.name for field in fields(Overview))
        return Overview(**nothing | {"steps": steps, "kernels": 0})
    properties = device_properties(placed.recording, device)
    recording, spans, events = placed.recording, placed.recording.spans, placed.charges.span
    here = spans.device[events] == device
    launched = int((here & (spans.category[events] == Category.KERNEL) & (windows.launched_in >= 0)).sum())
    busy = _covered(_union_of(recording, events[here]), windows)
    cut = placed.unseen_until_ns is not None and len(windows.number) == 1  # the one step is not seen whole
    cut |= len(placed.lost_launches) > 0
    # The kernels, communication included, as far as they lie within the steps.
    kernels = np.flatnonzero((spans.category == Category.KERNEL) & (spans.device == device))
    time_ns = Union(windows.start_ns, windows.end_ns).overlap(spans.start_ns[kernels], spans.end_ns[kernels])
    kernels, time_ns = kernels[time_ns > 0], time_ns[time_ns > 0]
    launches, configuration = recording.details.configurations, recording.details.configuration_of(kernels)
    blocks = at(launches.blocks_per_sm, configuration, np.nan)
    occupancy = at(occupancy_of(launches), configuration, np.nan)
    known, uses_cores = ~np.isnan(occupancy), tensor_core_kernels(recording, kernels)
    in_cores_ns = int(time_ns[uses_cores == 1].sum())
    return Overview(
        device=properties.name,
        device_memory_bytes=properties.memory_bytes,
        compute_capability=properties.capability_text or None,
        multiprocessors=properties.multiprocessors,
        steps=steps,
        utilization=None if cut else _covered(_union_of(recording, kernels), windows) / windows.length_ns,
        sm_efficiency=None if cut else _sm_efficiency(spans, kernels, blocks, windows),
        occupancy=float(np.average(occupancy[known], weights=time_ns[known])) if known.any() else None,
        tensor_core_share=in_cores_ns / int(time_ns.sum()) if (uses_cores >= 0).any() else None,
        kernels=launched,
        launches_per_s=None if cut else launched / (windows.length_ns / _NS_PER_S),
        gaps_ns=None if cut else windows.length_ns - busy,
    )


def _sm_efficiency(spans: Spans, kernels: Int64, blocks_per_sm: Float64, windows: StepWindows) -> float | None:
    """Return the part of the multiprocessors that have a block, over the wall time.

    A kernel with fewer blocks than there are multiprocessors takes that part of them; kernels beside one another
    add up, to all of them at most. None where some kernel does not tell its blocks.
    """
    if not len(kernels) or np.isnan(blocks_per_sm).any():
        return None
    share = np.rint(np.minimum(blocks_per_sm, 1.0) * _PARTS).astype(np.int64)
    times = np.concatenate([spans.start_ns[kernels], spans.end_ns[kernels]])
    order = np.argsort(times, kind="stable")
    taken = np.minimum(np.cumsum(np.concatenate([share, -share])[order]), _PARTS)[:-1]
    lasts = Union(windows.start_ns, windows.end_ns).overlap(times[order][:-1], times[order][1:])
    high, low = np.divmod(taken, 10**4)  # products of whole numbers, exact on any machine, none beyond 64 bits
    return (10**4 * int(high @ lasts) + int(low @ lasts)) / _PARTS / windows.length_ns


# --- the split ----------------------------------------------------------------------------------


def _splits(placed: Placed, windows: StepWindows) -> tuple[StepSplit, ...]:
    """Return per step what each kind adds to the time that the kinds before it cover, over all devices and threads."""
    busy = _union_of(placed.recording, np.empty(0, np.int64))
    spans_ns = windows.end_ns - windows.start_ns
    covered = [np.zeros_like(spans_ns)]
    for kind in kinds_of_wall_time(placed):
        of_kind = _union_of(placed.recording, np.flatnonzero(kind))
        busy = union(*map(np.concatenate, zip(busy, of_kind, strict=True)))
        covered.append(busy.overlap(windows.start_ns, windows.end_ns))
    parts = np.diff([*covered, spans_ns], axis=0).tolist()
    columns = zip(windows.number, spans_ns.tolist(), *parts, strict=True)
    return tuple(StepSplit(number, *lengths) for number, *lengths in columns)


def kinds_of_wall_time(placed: Placed) -> Iterator[Bool]:
    """Mark the spans of each kind: kernel, communication, memcpy, memset, runtime, data loader, CPU.

    Communication is kernels that move data between ranks; without device events, ops and annotations that do.
    """
    recording, charges = placed.recording, placed.charges
    category = recording.spans.category
    on_cpu: Bool = (category == Category.CPU_OP) | (category == Category.ANNOTATION)
    is_mark = recording.named(parse_mark)
    if charges.basis == "device":
        moving = charges.span[charges.work == classes.COMMUNICATION]
        communicates = marked(len(category), moving) & (category == Category.KERNEL)
    else:
        communicates = on_cpu & recording.named(is_collective_call) & ~is_mark
    yield (category == Category.KERNEL) & ~communicates
    yield communicates
    for kind in (Category.MEMCPY, Category.MEMSET, Category.RUNTIME):
        yield category == kind
    yield on_cpu & recording.named(lambda text: text.startswith(_DATALOADER))
    yield (category == Category.CPU_OP) & ~is_mark


def _union_of(recording: Recording, span: Int64) -> Union:
    starts, durations = recording.spans.start_ns, recording.spans.duration_ns
    unions = (union(starts[piece], starts[piece] + durations[piece]) for piece in in_pieces(span))
    start_ns, end_ns = map(np.concatenate, zip(*unions, strict=True))
    return union(start_ns, end_ns)


def _covered(busy: Union, windows: StepWindows) -> int:
    """Return how much of the steps a union covers."""
    return int(busy.overlap(windows.start_ns, windows.end_ns).sum())


# --------------------------------------------------------------------------------------------------
# Parts of a step: the prefill and each token of a request, each call of a pipeline's models, the roles of training.
#
# A device event, or CPU time, belongs to the part in which it was launched. Backward belongs to the training call
# before it. What lies in no part is `OTHER`, so that the parts of a step add up to its time.

OTHER = "other"  # between the calls: sampling, a scheduler's step, what copies
_TOKEN = "token"
_WITH_TRAINING: tuple[Phase, ...] = ("backward", "recompute", "accumulate_grad")
_MOST = 64  # rows of one part of a step; of more, neighbours are one row


class _Part(NamedTuple):
    """A call from outside, or several of one request."""

    step: int  # the place of its step, -1 for none
    name: str
    trains: bool
    begin_ns: int


def part_rows(placed: Placed) -> tuple[PartRow, ...]:
    """Return the parts of each step, in the order in which they began; empty where no layer is called."""
    calls, charges, steps = placed.calls, placed.charges, placed.steps
    if not len(calls.outermost):
        return ()
    # Per call the number of the outermost call around it among `calls.outermost`; -1 within backward.
    outermost = np.full(len(calls), -1, dtype=np.int64)
    outermost[np.isin(calls.span, calls.outermost)] = np.arange(len(calls.outermost))
    outermost = outermost[nearest(calls.parent, calls.parent < 0)]
    parts, part_of_call = _parts(placed, outermost)
    part = at(part_of_call, at(outermost, at(calls.call_of_span, charges.cpu_span, -1), -1), -1)
    step = np.where(charges.cpu_span >= 0, steps.place_of(charges.launch_ns), -1)
    phases, place = placed.attribution, charges.place
    # What a training call leaves to do: it is done before the next.
    later = np.flatnonzero((part < 0) & phases.in_phases(*_WITH_TRAINING)[place])
    trains = np.array([i for i, one in enumerate(parts) if one.trains], dtype=np.int64)
    begin_ns = np.array([parts[i].begin_ns for i in trains.tolist()], dtype=np.int64)
    part[later] = at(trains, np.searchsorted(begin_ns, charges.launch_ns[later], side="right") - 1, -1)
    step_of = np.array([one.step for one in parts], dtype=np.int64)
    part = np.where(at(step_of, part, -1) == step, part, -1)  # a call may go on after its step
    rows: dict[tuple[int, str], list[int]] = defaultdict(list)
    for one, time_ns in zip(parts, sum_by_key(part, charges.time_ns, len(parts) + 1).tolist(), strict=False):
        rows[one.step, one.name].append(time_ns)
    optimizing = phases.in_phases("optimizer")[place]
    for name, chosen in (("optimizer", (part < 0) & optimizing), (OTHER, (part < 0) & ~optimizing)):
        times_ns = sum_by_key(step[chosen], charges.time_ns[chosen], len(steps) + 1)
        for number in np.flatnonzero(times_ns).tolist():
            rows[number if number < len(steps) else -1, name].append(int(times_ns[number]))
    numbers = (*steps.number, None)
    ordered = sorted(rows, key=lambda key: key[0] if key[0] >= 0 else len(steps))  # what is in no step last
    return tuple(row for number, name in ordered for row in _folded(numbers[number], name, rows[number, name]))


def _folded(step: int | None, part: str, times_ns: list[int]) -> Iterator[PartRow]:
    width = -(-len(times_ns) // _MOST)
    for index in range(0, len(times_ns), width):
        piece = times_ns[index : index + width]
        yield PartRow(step=step, part=part, index=index, count=len(piece), time_ns=sum(piece))


def _parts(placed: Placed, outermost: Int64) -> tuple[list[_Part], Int64]:
    """Return the parts in the order in which they began, and per outermost call the number of its part."""
    recording, attribution, calls = placed.recording, placed.attribution, placed.calls
    begin_ns = recording.spans.start_ns[calls.outermost].tolist()
    steps = placed.steps.place_of(recording.spans.start_ns[calls.outermost]).tolist()
    made = np.unique(attribution.forward_op[attribution.forward_op >= 0])
    trained = np.unique(at(outermost, at(calls.call_of_span, made, -1), -1))
    trains = np.isin(np.arange(len(calls.outermost)), trained).tolist()
    training_steps = {step for step, one_trains in zip(steps, trains, strict=True) if one_trains}
    requests = recording.named(lambda name: name.startswith(REQUEST))
    requests &= recording.spans.category == Category.ANNOTATION
    request = nearest(placed.nesting.parent, requests)[calls.outermost].tolist()
    parts: list[_Part] = []
    part_of_call: list[int] = []
    last: tuple[int, str] | None = None  # request and name of the last part, where that is a whole request
    for i, span in enumerate(calls.outermost.tolist()):
        if placed.left_out is not None and placed.left_out[span]:
            part_of_call.append(-1)
            continue
        layer = placed.tree.layers[placed.tree.layer_of_span[span]]
        phase, around = attribution.place(span).phase, request[i]
        name, is_whole = layer.name, False
        if around >= 0 and recording.name_of(around) == EVALUATION:
            name, is_whole = "evaluation", True
        elif steps[i] in training_steps:
            name = _role(recording.name_of(span)) or (
                "train" if trains[i] else "rollout" if around >= 0 else f"score: {layer.class_name}"
            )
            is_whole = around >= 0
        elif phase in GENERATING_PHASES:
            name = " ".join(filter(None, (_role(recording.name_of(span)), _TOKEN if phase == "decode" else phase)))
        if not is_whole or last != (around, name):
            parts.append(_Part(steps[i], name, trains[i], begin_ns[i]))
        last = (around, name) if is_whole else None
        part_of_call.append(len(parts) - 1)
    return parts, np.array(part_of_call, dtype=np.int64)


def _role(mark: str) -> str:
    """Return the name that the user gave the root of this mark; "" for none."""
    parsed = parse_mark(mark)
    return parsed.root if parsed is not None and "#" not in parsed.root else ""
