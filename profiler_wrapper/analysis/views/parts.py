"""Parts of a step: the prefill and each token of a request, each call of a pipeline's models, the roles of training.

A device event, or CPU time, belongs to the part in which it was launched. Backward belongs to the training call before
it. What lies in no part is `OTHER`, so that the parts of a step add up to its time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from profiler_wrapper.analysis.call_rows import PartRow
from profiler_wrapper.analysis.model import GENERATING_PHASES, Phase
from profiler_wrapper.analysis.statistics import at, sum_by_key
from profiler_wrapper.trace.marks import EVALUATION, REQUEST, parse_mark
from profiler_wrapper.trace.nesting import nearest
from profiler_wrapper.trace.recording import Category, Int64

if TYPE_CHECKING:
    from profiler_wrapper.analysis.attributed import Attributed

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


def part_rows(attributed: Attributed) -> tuple[PartRow, ...]:
    """The parts of each step, in the order in which they began; empty where no layer is called."""
    calls, charges, steps = attributed.calls, attributed.charges, attributed.steps
    if not len(calls.outermost):
        return ()
    outermost = _outermost_of_calls(attributed)
    parts, part_of_call = _parts(attributed, outermost)
    part = at(part_of_call, at(outermost, at(calls.call_of_span, charges.cpu_span, -1), -1), -1)
    step = np.where(charges.cpu_span >= 0, steps.place_of(charges.launch_ns), -1)
    phases, place = attributed.attribution, charges.place
    # What a training call leaves to do: it is done before the next.
    later = np.flatnonzero((part < 0) & phases.in_phases(*_WITH_TRAINING)[place])
    trains = np.array([i for i, one in enumerate(parts) if one.trains], dtype=np.int64)
    if len(trains):
        begin_ns = np.array([parts[i].begin_ns for i in trains.tolist()])
        before = np.searchsorted(begin_ns, charges.launch_ns[later], side="right") - 1
        found = np.where(before >= 0, trains[np.maximum(before, 0)], -1)
        part[later] = np.where(np.array([one.step for one in parts])[found] == step[later], found, -1)
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


def _outermost_of_calls(attributed: Attributed) -> Int64:
    """Per call the number of the outermost call around it among `calls.outermost`; -1 within backward."""
    calls = attributed.calls
    number = np.full(len(calls), -1, dtype=np.int64)
    number[np.isin(calls.span, calls.outermost)] = np.arange(len(calls.outermost))
    return number[nearest(calls.parent, calls.parent < 0)]


def _parts(attributed: Attributed, outermost: Int64) -> tuple[list[_Part], Int64]:
    """The parts in the order in which they began, and per outermost call the number of its part."""
    recording, attribution, calls = attributed.recording, attributed.attribution, attributed.calls
    begin_ns = recording.spans.start_ns[calls.outermost].tolist()
    steps = attributed.steps.place_of(recording.spans.start_ns[calls.outermost]).tolist()
    made = np.unique(attribution.forward_op[attribution.forward_op >= 0])
    trained = np.unique(at(outermost, at(calls.call_of_span, made, -1), -1))
    trains = np.isin(np.arange(len(calls.outermost)), trained).tolist()
    training_steps = {step for step, one_trains in zip(steps, trains, strict=True) if one_trains}
    requests = recording.named(lambda name: name.startswith(REQUEST)) & (
        recording.spans.category == Category.ANNOTATION
    )
    request = nearest(attributed.nesting.parent, requests)[calls.outermost].tolist()
    parts: list[_Part] = []
    part_of_call: list[int] = []
    last: tuple[int, str] | None = None  # request and name of the last part, where that is a whole request
    for i, span in enumerate(calls.outermost.tolist()):
        if attributed.left_out is not None and attributed.left_out[span]:
            part_of_call.append(-1)
            continue
        layer = attributed.tree.layers[attributed.tree.layer_of_span[span]]
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
    """The name that the user gave the root of this mark; "" for none."""
    parsed = parse_mark(mark)
    return parsed.root if parsed is not None and "#" not in parsed.root else ""
