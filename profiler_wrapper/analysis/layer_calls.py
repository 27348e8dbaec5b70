"""Every entry of every layer: when it ran, what it cost, what memory it found and left."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from profiler_wrapper.analysis.attribution import Attribution
from profiler_wrapper.analysis.charges import Charges
from profiler_wrapper.analysis.layer_memory import CallMemory
from profiler_wrapper.analysis.layer_tree import LayerTree
from profiler_wrapper.analysis.model import LayerCall
from profiler_wrapper.analysis.steps import Steps
from profiler_wrapper.recording.columns import Int32, Int64, Recording

_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True, eq=False)
class CallTree:
    """Entries of layers in the order they began; `parent` is the entry around one on its thread."""

    span: Int64
    layer: Int32
    parent: Int32  # index of the enclosing call, -1 for none
    call_of_span: Int32  # per span of the recording: the innermost call around it; -1 for none

    def __len__(self) -> int:
        return len(self.span)


def find_calls(recording: Recording, tree: LayerTree, parent: list[int], order: list[int]) -> CallTree:
    """The calls of a recording. What an autograd node runs belongs to calls only inside that node."""
    nodes = {i for i, name in enumerate(recording.names) if name.startswith("autograd::engine::evaluate_function: ")}
    is_node = np.isin(recording.spans.name, list(nodes)).tolist()
    entries = [span for span in order if span in tree.layer_of_span]
    index = {span: i for i, span in enumerate(entries)}
    call_of = [-1] * len(recording.spans)
    above_call = [-1] * len(entries)
    for span in order:
        above = parent[span]
        around = call_of[above] if above >= 0 and not is_node[span] else -1
        own = index.get(span)
        if own is not None:
            above_call[own] = around
        call_of[span] = around if own is None else own
    return CallTree(
        np.array(entries, dtype=np.int64),
        np.array([tree.layer_of_span[s] for s in entries], dtype=np.int32),
        np.array(above_call, dtype=np.int32),
        np.array(call_of, dtype=np.int32),
    )


def layer_calls(
    recording: Recording,
    tree: LayerTree,
    calls: CallTree,
    attribution: Attribution,
    charges: Charges,
    steps: Steps,
    memory: CallMemory | None,
) -> tuple[LayerCall, ...]:
    """One row per call, in the order they began."""
    spans = recording.spans
    time_ns, attention_ns, first, last = _cost(recording, calls, charges)
    step_of = steps.place_of(spans.start_ns[calls.span]).tolist()
    device = int(spans.device[charges.span[0]]) if charges.basis == "device" and len(charges) else None
    seen: Counter[tuple[int, str]] = Counter()
    rows = []
    for i, (span, layer) in enumerate(zip(calls.span.tolist(), calls.layer.tolist(), strict=True)):
        phase = attribution.place(span).phase
        index = seen[layer, phase]
        seen[layer, phase] += 1
        ran_on_device = charges.basis == "device" and first[i] != _NEVER
        rows.append(
            LayerCall(
                layer=tree.layers[layer].name,
                phase=phase,
                step=steps.number[step_of[i]] if step_of[i] >= 0 else None,
                index=index,
                start_ns=int(spans.start_ns[span]),
                end_ns=int(spans.start_ns[span] + spans.duration_ns[span]),
                device_start_ns=int(first[i]) if ran_on_device else None,
                device_end_ns=int(last[i]) if ran_on_device else None,
                device=device if ran_on_device else None,
                time_ns=int(time_ns[i]),
                attention_ns=int(attention_ns[i]),
                entry_allocated_bytes=_at(memory, "entry_allocated", i),
                exit_allocated_bytes=_at(memory, "exit_allocated", i),
                entry_reserved_bytes=_at(memory, "entry_reserved", i),
                exit_reserved_bytes=_at(memory, "exit_reserved", i),
                peak_bytes=_at(memory, "peak", i),
                retained_bytes=_at(memory, "retained", i),
            )
        )
    return tuple(rows)


def _at(memory: CallMemory | None, name: str, call: int) -> int | None:
    values: Int64 | None = None if memory is None else getattr(memory, name)
    return None if values is None else int(values[call])


def _cost(recording: Recording, calls: CallTree, charges: Charges) -> tuple[Int64, Int64, Int64, Int64]:
    """Per call, layers below included: time, attention time, first start and last end of its events."""
    spans = recording.spans
    time_ns, attention_ns = np.zeros(len(calls), np.int64), np.zeros(len(calls), np.int64)
    first, last = np.full(len(calls), _NEVER, np.int64), np.full(len(calls), -_NEVER, np.int64)
    launched = charges.cpu_span >= 0
    call = np.full(len(charges), -1, dtype=np.int64)
    call[launched] = calls.call_of_span[charges.cpu_span[launched]]
    inside = np.flatnonzero(call >= 0)
    np.add.at(time_ns, call[inside], charges.time_ns[inside])
    attention = inside[charges.backend[inside] >= 0]
    np.add.at(attention_ns, call[attention], charges.time_ns[attention])
    start = spans.start_ns[charges.span[inside]]
    np.minimum.at(first, call[inside], start)
    np.maximum.at(last, call[inside], start + spans.duration_ns[charges.span[inside]])
    for i in range(len(calls) - 1, -1, -1):  # a call begins after the one around it
        above = calls.parent[i]
        if above >= 0:
            time_ns[above] += time_ns[i]
            attention_ns[above] += attention_ns[i]
            first[above] = min(first[above], first[i])
            last[above] = max(last[above], last[i])
    return time_ns, attention_ns, first, last
