"""Which ops of a recording count, and which have work that nothing tells the FLOPs of."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from profiler_wrapper.analysis import classes
from profiler_wrapper.analysis.attribution import Place
from profiler_wrapper.analysis.charges import optimizer_work
from profiler_wrapper.analysis.compiled_graphs import graph_key
from profiler_wrapper.analysis.device_properties import FIRST_WITH_TF32, busiest_device_properties
from profiler_wrapper.analysis.flop_formulas import OpFlops, class_of_work, flops_of, has_formula, has_work
from profiler_wrapper.analysis.handed_ops import handed_ops
from profiler_wrapper.analysis.model import UncountedRow
from profiler_wrapper.analysis.stopped_ops import stopped_ops
from profiler_wrapper.analysis.unknown_ops import UnknownOps
from profiler_wrapper.recording.columns import Bool, Category, Int64, Recording
from profiler_wrapper.recording.nesting import nearest, nearest_above
from profiler_wrapper.recording.shapes import Shapes

if TYPE_CHECKING:
    from profiler_wrapper.analysis.attributed import Attributed

_COMPILING = "(dynamo_timed)"
# Kernels that multiply float32 as tfloat32: by cuBLAS, cuDNN and CUTLASS.
_TF32_KERNEL = re.compile(r"tf32|tensorop_s1688gemm|tensorop_s1688fprop|tensorop_s1688[dw]grad")


class FlopKey(NamedTuple):
    """What FLOPs are summed by."""

    place: Place
    work: int  # index into classes.CLASSES
    dtype: str


class FlopOps:
    """The ops of a recording that have FLOPs."""

    def __init__(self, found: Attributed, shapes: Shapes) -> None:
        self._found, self._shapes = found, shapes
        self._parent = found.nesting.parent
        names = found.recording.names
        handed = handed_ops(found.recording, self._parent, found.charges)
        self.handlers = handed.handlers  # events of Python that ops were handed to
        self.ran = self._really_ran() & ~handed.idle
        working = self._named([has_work(name) for name in names]) & self.ran
        formula = np.flatnonzero(working & self._named([has_formula(name) for name in names]))
        self._flops = self._evaluate(formula)
        known = self._marked(list(self._flops))
        around = nearest_above(self._parent, nearest(self._parent, known))
        self.is_counted = known.copy()
        self.is_counted[around[known & (around >= 0)]] = False
        self._as_tf32 = self._in_tf32()
        self._is_unknown = self._unknown(working | self._opaque_calls())

    def _named(self, chosen: list[bool]) -> Bool:
        """True for ops whose name is chosen."""
        spans = self._found.recording.spans
        by_name = np.array(chosen, dtype=np.bool_)
        is_op: Bool = spans.category == Category.CPU_OP
        return is_op & by_name[spans.name] if len(by_name) else is_op

    def _marked(self, spans: list[int]) -> Bool:
        marked = np.zeros(len(self._parent), dtype=np.bool_)
        marked[spans] = True
        return marked

    def _really_ran(self) -> Bool:
        """Not what a compiler traces or a recompute stopped at, and only in a step that was recorded whole."""
        found = self._found
        spans, names = found.recording.spans, found.recording.names
        compiling = np.array([name.endswith(_COMPILING) for name in names], dtype=np.bool_)
        ran: Bool = ~stopped_ops(found.recording, self._parent, found.attribution, found.charges)
        if compiling.any():
            ran &= nearest(found.enclosing, compiling[spans.name] & (spans.category < Category.RUNTIME)) < 0
        if len(found.steps):
            ran &= found.steps.place_of(spans.start_ns) >= 0
        return ran

    def _opaque_calls(self) -> Bool:
        """On a CPU, where generated kernels are no events, calls of compiled graphs of which no kernel is known."""
        found = self._found
        spans, names = found.recording.spans, found.recording.names
        calls = np.array([graph_key(name) is not None for name in names], dtype=np.bool_)[spans.name] & self.ran
        calls &= (spans.category < Category.MODULE) & ~self._in_optimizer()
        if found.charges.basis != "cpu" or not calls.any():
            return np.zeros_like(calls)
        generated = np.array([name.startswith("cpp_") for name in names], dtype=np.bool_)[spans.name]
        above = self._parent[generated]
        calls[above[above >= 0]] = False
        return calls

    def _in_optimizer(self) -> Bool:
        """What an optimizer runs: it multiplies nothing but by a library."""
        places = self._found.attribution.places
        by_place = np.array([place.phase == "optimizer" for place in places], dtype=np.bool_)
        return by_place[self._found.attribution.place_of]

    def _evaluate(self, spans: Int64) -> dict[int, OpFlops]:
        """FLOPs of the spans whose shapes tell; each different call is worked out once."""
        recording, shapes = self._found.recording, self._shapes
        known: dict[tuple[int, int], OpFlops | None] = {}
        flops = {}
        for span, name in zip(spans.tolist(), recording.spans.name[spans].tolist(), strict=True):
            if span not in shapes:
                continue
            key = (name, shapes.number(span))
            if key not in known:
                known[key] = flops_of(recording.names[name], shapes[span])
            counted = known[key]
            if counted is not None:
                flops[span] = counted
        return flops

    def _unknown(self, working: Bool) -> Bool:
        """Ops with work of which none is counted, inside them or around; of nested ones the innermost."""
        near = nearest(self._parent, working)
        above = nearest_above(self._parent, near)
        holds_counted = self.is_counted.copy()
        holders = np.unique(above[self.is_counted])
        while len(holders := holders[holders >= 0]):
            holds_counted[holders] = True
            holders = np.unique(above[holders])
        inside_counted = nearest(self._parent, self.is_counted) >= 0
        unknown: Bool = working & ~holds_counted & ~inside_counted
        outer = above[unknown]
        unknown[outer[outer >= 0]] = False
        return unknown

    def counted(self) -> Iterable[tuple[FlopKey, OpFlops]]:
        """The ops that count, each by what it is summed by."""
        found = self._found
        spans = np.flatnonzero(self.is_counted)
        place = found.attribution.place_of[spans]
        work = optimizer_work(found.attribution, place, found.work_of.ops(spans)[0])
        for span, at, of in zip(spans.tolist(), place.tolist(), work.tolist(), strict=True):
            flops = self.flops_of(span)
            yield FlopKey(found.attribution.places[at], of, flops.dtype), flops

    def flops_of(self, span: int) -> OpFlops:
        """FLOPs of an op that counts."""
        flops = self._flops[span]
        is_tf32 = flops.dtype == "float32" and self._as_tf32[span]
        return flops._replace(dtype="tfloat32") if is_tf32 else flops

    def _in_tf32(self) -> Bool:
        """Ops whose float32 the device multiplies as tfloat32: their kernels say so, or torch was told to."""
        found = self._found
        charges, spans, names = found.charges, found.recording.spans, found.recording.names
        told = np.zeros(len(self._parent), dtype=np.bool_)
        if charges.basis != "device":
            return told
        by_name = np.array([_TF32_KERNEL.search(name) is not None for name in names], dtype=np.bool_)
        launched = charges.cpu_span[by_name[spans.name[charges.span]] & (charges.cpu_span >= 0)]
        op = nearest(self._parent, self.is_counted)[launched]
        told[op[op >= 0]] = True
        if found.fast_float32 and _has_tf32(found.recording):
            told |= self._named([class_of_work(name) == "gemm" and "conv" not in name for name in names])
        return told

    def uncounted(self, steps: int) -> tuple[UncountedRow, ...]:
        """Ops with work that nothing is known of, then kernels without an op that says what they do."""
        found = self._found
        recording, places = found.recording, found.attribution.places
        unknown = UnknownOps()
        time_ns = self._times()
        for span in np.flatnonzero(self._is_unknown).tolist():
            name, place = recording.name_of(span), places[found.attribution.place_of[span]]
            unknown.add(name, class_of_work(name), place.phase, found.layer_name(place), int(time_ns[span]))
        if found.charges.basis == "device":
            for i, name, kind in self._bare_kernels():
                place = places[found.charges.place[i]]
                unknown.add(name, kind, place.phase, found.layer_name(place), int(found.charges.time_ns[i]))
        return unknown.rows(steps)

    def _times(self) -> Int64:
        """Per unknown op its device time; on a CPU-only trace its own duration."""
        found = self._found
        spans, charges = found.recording.spans, found.charges
        if charges.basis == "cpu":
            return spans.duration_ns
        time_ns = np.zeros(len(spans), dtype=np.int64)
        launched = charges.cpu_span >= 0
        op = nearest(self._parent, self._is_unknown)[charges.cpu_span[launched]]
        np.add.at(time_ns, op[op >= 0], charges.time_ns[launched][op >= 0])
        return time_ns

    def _bare_kernels(self) -> Iterable[tuple[int, str, str]]:
        """(charge, name, class) of kernels that name such work, launched by no op that does."""
        found = self._found
        recording, charges = found.recording, found.charges
        names = recording.spans.name[charges.span]
        told = {name: _class_of_kernel(recording.names[name]) for name in np.unique(names).tolist()}
        candidates = np.isin(names, [name for name, kind in told.items() if kind])
        candidates &= charges.cpu_span >= 0
        covered = nearest(self._parent, self._named([has_work(name) for name in recording.names]))
        for i in np.flatnonzero(candidates).tolist():
            launch = charges.cpu_span[i]
            if covered[launch] < 0 and self.ran[launch]:
                yield i, recording.names[names[i]], told[int(names[i])]


def _has_tf32(recording: Recording) -> bool:
    """Whether the device is new enough, where the trace tells."""
    capability = busiest_device_properties(recording).compute_capability
    return capability is None or capability >= FIRST_WITH_TF32


def _class_of_kernel(name: str) -> str:
    if classes.is_communication(name):
        return ""
    if classes.attention_backend_of_kernel(name):
        return "attention"
    return "gemm" if classes.class_of_kernel(name) == "gemm" and not name.startswith("triton_poi_") else ""
