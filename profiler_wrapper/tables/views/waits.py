"""Where the CPU waits for the device, within the steps.

A wait is a call into the runtime: one that synchronises a stream, an event or the device, a copy that returns when
it is done, or a copy from or to pageable memory that was still in the call when the device began with it. Waits
of one op count once (a blocking copy of a tensor is a copy and a synchronisation); a wait outside of all ops counts
by itself. What the profiler itself does when it stops is left out, and so are threads that run no op: they hold up
nothing. A trace without device events has no waits.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Literal

import numpy as np

from profiler_wrapper.place.names import PHASES, Phase
from profiler_wrapper.place.placed import Placed
from profiler_wrapper.place.timed_events import TimedEvents
from profiler_wrapper.tables.model import SynchronisationRow
from profiler_wrapper.tables.ops import find_ops
from profiler_wrapper.tables.statistics import summed
from profiler_wrapper.tables.views.operators import PythonSources
from profiler_wrapper.trace.arrays import marked
from profiler_wrapper.trace.nesting import innermost_around, nest_chosen
from profiler_wrapper.trace.recording import Bool, Category, Int32, Int64, Recording

Kind = Literal["item", "nonzero", "blocking copy", "stream", "device", "event", "other"]

# Calls of the CUDA runtime and driver and of HIP; the first that matches counts.
_CALLS: tuple[tuple[Kind, re.Pattern[str]], ...] = (
    ("stream", re.compile(r"(cuda|hip|cu)StreamSynchronize|^Stream Sync")),
    ("device", re.compile(r"(cuda|hip)(Device|Thread)Synchronize|cuCtxSynchronize|hipCtxSynchronize|^Context Sync")),
    ("event", re.compile(r"(cuda|hip|cu)EventSynchronize|^Event Sync")),
    ("blocking copy", re.compile(r"(cuda|hip|cu)Memcpy(?!\w*(Async|Peer|Batch))\w*$")),
    ("other", re.compile(r"(cuda|hip|cu|xpu|musa|acl\w*|aclrt)\w*Synchronize|urQueueFinish|zeCommandQueueSynchronize")),
)
_WITHIN_DEVICE = "DtoD"  # copies of this kind hold up no CPU, whichever call makes them
_PAGEABLE = "Pageable"
# What ops ask for; the first that has one of the ops counts.
_OPS: tuple[tuple[Kind, frozenset[str]], ...] = (
    ("item", frozenset({"aten::item", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal"})),
    ("nonzero", frozenset({
        "aten::nonzero", "aten::nonzero_numpy", "aten::argwhere", "aten::masked_select", "aten::unique",
        "aten::_unique", "aten::_unique2", "aten::unique_consecutive", "aten::unique_dim",
        "aten::repeat_interleave", "aten::bincount", "aten::histc",
    })),
    ("blocking copy", frozenset({
        "aten::copy_", "aten::_copy_from", "aten::_copy_from_and_resize", "aten::_to_copy", "aten::to",
    })),
)  # fmt: skip
_OF_THE_PROFILER = re.compile(r"(^|/)(torch/profiler/|torch/autograd/profiler\.py|profiler_wrapper/)")


def synchronisation_rows(placed: Placed) -> tuple[SynchronisationRow, ...]:
    """Return the waits within the steps of an attributed recording, the longest first."""
    if placed.charges.basis != "device":
        return ()
    recording, attribution = placed.recording, placed.attribution
    tests = [pattern.match for _, pattern in _CALLS]  # per name which of them it is, -1 for none
    kinds = np.array([next((i for i, test in enumerate(tests) if test(name)), -1) for name in recording.names])
    calls = _waiting_calls(recording, kinds, placed.charges)
    if not len(calls):
        return ()
    # Calls into the runtime that launch nothing are not nested, so they are looked up by time.
    spans = recording.spans
    around = innermost_around(placed.nesting, spans, spans.lane[calls], spans.start_ns[calls], spans.end_ns[calls])
    kept = ~_of_the_profiler(placed, calls, around)
    if len(placed.steps):
        kept &= placed.steps.place_of(spans.start_ns[calls]) >= 0
    calls, around = calls[kept], around[kept]
    ops = find_ops(recording, placed.nesting.parent, placed.tree)
    sources = PythonSources(recording, attribution)
    lines = sources.of(calls, around)
    columns = (calls, around, recording.spans.duration_ns[calls], lines.user, lines.library)
    waits: dict[tuple[Kind, str, str | None, Phase], list[tuple[int, int, int, int]]] = defaultdict(list)
    for call, span, wait_ns, user, library in zip(*(c.tolist() for c in columns), strict=True):
        chain = _chain(recording, ops.span, ops.around, int(ops.op_of[span]) if span >= 0 else -1)
        names = [recording.name_of(op) for op in chain]
        asked = next((kind for kind, ops_of_kind in _OPS if not ops_of_kind.isdisjoint(names)), None)
        kind = asked or _CALLS[kinds[recording.spans.name[call]]][0]
        place = attribution.places[attribution.place_of[span] if span >= 0 else attribution.outside]
        layer = placed.layer_name(place) if recording.spans.category[call] != Category.SYNC else None
        key = (kind, names[-1] if names else recording.name_of(call), layer, place.phase)
        waits[key].append((chain[-1] if chain else call, wait_ns, user, library))
    rows = []
    for (kind, op, layer, phase), of_key in waits.items():
        users, libraries = (summed((lines[i], wait_ns) for _, wait_ns, *lines in of_key) for i in (0, 1))
        largest = ([line for line, _ in lines.most_common() if line >= 0] for lines in (users, libraries))
        rows.append(
            SynchronisationRow(
                kind=kind,
                op=op,
                layer=layer,
                phase=phase,
                count=len({span for span, *_ in of_key}),
                wait_ns=users.total(),
                sources=sources.most_expensive(*largest),
            )
        )
    return tuple(sorted(rows, key=lambda row: (-row.wait_ns, row.op, row.layer or "", PHASES.index(row.phase))))


def _waiting_calls(recording: Recording, kinds: Int64, charges: TimedEvents) -> Int64:
    """Find the spans of calls that wait. CUPTI's own account (`cuda_sync`) counts where the call itself is lost."""
    spans = recording.spans
    runtime = np.flatnonzero(spans.category == Category.RUNTIME)
    waits = marked(len(spans), runtime[kinds[spans.name[runtime]] >= 0])
    copies = np.flatnonzero((spans.category[charges.span] == Category.MEMCPY) & (charges.cpu_span >= 0))
    made_by, copy = charges.cpu_span[copies], charges.span[copies]
    within = recording.named(lambda name: _WITHIN_DEVICE in name)[copy]
    waits[made_by[within]] = False
    pageable = recording.named(lambda name: _PAGEABLE in name)[copy]
    pageable &= (spans.category[made_by] == Category.RUNTIME) & (spans.end_ns[made_by] > spans.start_ns[copy])
    waits[made_by[pageable]] = True
    runs_ops = np.bincount(spans.lane[spans.category == Category.CPU_OP], minlength=len(recording.lanes)) > 0
    waits &= runs_ops[spans.lane]
    stated = np.flatnonzero(spans.category == Category.SYNC)
    stated = stated[kinds[spans.name[stated]] >= 0]
    if len(stated):
        lost = (spans.correlation[stated] < 0) | ~np.isin(spans.correlation[stated], spans.correlation[runtime])
        waits[stated[lost]] = True
    return np.flatnonzero(waits)


def _of_the_profiler(placed: Placed, calls: Int64, around: Int32) -> Bool:
    """Mark waits with the profiler's own code around, and, with nothing around, before or after all ops."""
    recording, spans, python = placed.recording, placed.recording.spans, placed.recording.python
    ops = np.flatnonzero(spans.category == Category.CPU_OP)
    begin, end = spans.start_ns[calls], spans.end_ns[calls]
    own: Bool = around < 0
    if len(ops):
        own &= (begin >= spans.end_ns[ops].max()) | (end <= spans.start_ns[ops].min())
    names = [i for i in np.unique(python.name).tolist() if _OF_THE_PROFILER.search(recording.names[i])]
    frames = nest_chosen(python, np.isin(python.name, names))
    own |= innermost_around(frames, python, spans.lane[calls], begin, end) >= 0
    return own


def _chain(recording: Recording, span: Int32, around: Int32, op: int) -> list[int]:
    """Return the op that waits and its callers, as spans, as long as they are torch's own, the innermost first."""
    chain: list[int] = []
    of_torch = True
    while op >= 0 and of_torch:
        of_torch = recording.name_of(int(span[op])).startswith("aten::")
        if of_torch or not chain:
            chain.append(int(span[op]))
        op = int(around[op])
    return chain
