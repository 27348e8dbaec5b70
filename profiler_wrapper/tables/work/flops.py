"""FLOPs of every op that ran: which ops count, where they belong, how many a step, and of which nothing is known.

Of ops around one another that have a formula only the innermost counts: `linear` holds `addmm`. What a
compiler runs to find out about a model (fake tensors) is no work. Steps recorded whole count; without
any the whole trace is one.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from operator import add
from typing import NamedTuple, TypeVar

import numpy as np

from profiler_wrapper.place import classes
from profiler_wrapper.place.classes import FIRST_WITH_TF32, busiest_device_properties
from profiler_wrapper.place.compiled import graph_key
from profiler_wrapper.place.names import PHASES, Phase
from profiler_wrapper.place.phases import Attribution, Place
from profiler_wrapper.place.placed import Placed
from profiler_wrapper.place.roles import OPS_OF_SAVING, Role, role_of
from profiler_wrapper.place.timed_events import TimedEvents, optimizer_work
from profiler_wrapper.tables.model import FlopRow, UncountedRow
from profiler_wrapper.tables.work.bytes import moves_nothing
from profiler_wrapper.tables.work.formulas import (
    OpFlops,
    class_of_work,
    flops_of,
    has_formula,
    has_work,
    is_of_library,
    is_op,
    is_without_flops,
)
from profiler_wrapper.trace.arrays import grouped, marked, sum_by_key
from profiler_wrapper.trace.nesting import nearest, nearest_above
from profiler_wrapper.trace.recording import Bool, Category, Int32, Int64, Recording, Shapes

# --------------------------------------------------------------------------------------------------
# Ops of a trace that have an event and computed nothing, so that neither their FLOPs nor their bytes count.
#
# *Handed to Python.* torch hands an op to a mode or to a subclass of Tensor (`__torch_dispatch__`), which calls other
# ops or none. The event of the op holds one of the handler, and that what the handler called. So the op computed what
# it holds, and nothing where it holds nothing: selective checkpointing answers a recomputed op with what it saved. An
# answer that is computed without torch looks the same. A mode inside the handler of a subclass is one that the handler
# entered. These are fake: `DTensor` runs every op on tensors without data, of the whole shape, before the local one.
#
# *Stopped.* Checkpointing (not the reentrant one) ends a recompute by an exception, as soon as all that backward needs
# is there again. It is raised where the last op saves its inputs, which is before that op computes anything: the trace
# has its event, with nothing but `detach` in it.

_SUBCLASS, _MODE = "PythonSubclass", "PythonDispatchMode"  # as torch names the events
# An answer that was kept elsewhere is copied back.
_FETCHING = frozenset(("aten::copy_", "aten::_to_copy", "aten::clone"))


def python_dispatch(recording: Recording, parent: Int32, charges: TimedEvents) -> tuple[Bool, Bool]:
    """(handlers, idle), per span: events of Python that ops were handed to, but for fake ones; what computed nothing.

    Idle are ops that were answered without, or ran on tensors without data, and their handlers.
    """
    is_op: Bool = recording.spans.category == Category.CPU_OP

    def named(chosen: Callable[[str], bool]) -> Bool:
        return is_op & recording.named(chosen)

    subclasses, modes = named(_SUBCLASS.__eq__), named(_MODE.__eq__)
    handlers: Bool = subclasses | modes
    if not handlers.any():
        return handlers, np.zeros_like(handlers)
    launching = marked(len(parent), charges.cpu_span if charges.basis == "device" else charges.cpu_span[:0])
    fake = modes & (nearest_above(parent, nearest(parent, subclasses)) >= 0) & ~ancestors_of(parent, launching)
    faked: Bool = nearest(parent, fake) >= 0
    works = is_op & ~named(lambda name: moves_nothing(name) or name in _FETCHING)
    works &= ~faked & ~handlers & ~ancestors_of(parent, handlers)
    works |= launching
    handlers &= ~faked
    unused = (handlers | fake) & ~ancestors_of(parent, works)
    idle = marked(len(parent), parent[unused]) & is_op & ~named(moves_nothing)
    # Ops such as `linear` that called idle ones; what else they called is counted by itself.
    idle |= ancestors_of(parent, idle, among=named(lambda name: name.startswith("aten::")))
    return handlers, idle | faked | unused


def ancestors_of(parent: Int32, chosen: Bool, *, among: Bool | None = None) -> Bool:
    """What lies around a chosen span; `among`: up to the first that is none of these."""
    around = np.zeros_like(chosen)
    above = np.unique(parent[chosen])
    while len(above := above[above >= 0]):
        above = above[~around[above] if among is None else among[above] & ~around[above]]
        around[above] = True
        above = np.unique(parent[above])
    return around


def stopped_ops(recording: Recording, parent: Int32, attribution: Attribution, charges: TimedEvents) -> Bool:
    """Per span: whether it is an op that was stopped, or was called for nothing but one.

    That is the last op recomputed in an autograd node (views save nothing), if it called no op but those of saving,
    launched nothing and allocated nothing. One that saves what it computed, as fused attention, ran.
    """
    spans = recording.spans
    stopped = np.zeros(len(spans), dtype=np.bool_)
    recomputed = (spans.category == Category.CPU_OP) & (attribution.place_of >= 0) & (attribution.node_of >= 0)
    recomputed &= attribution.in_phases("recompute")[attribution.place_of]
    if not recomputed.any():
        return stopped
    saving = recording.named(OPS_OF_SAVING.__contains__)
    calling = marked(len(spans), parent[(spans.category == Category.CPU_OP) & ~saving])
    idle = recording.named(moves_nothing)
    reentrant = recording.named(lambda name: role_of(name) == Role.CHECKPOINT_BACKWARD)
    ops = np.flatnonzero(recomputed & ~idle & (nearest(parent, reentrant) < 0))
    ops = ops[np.lexsort((-spans.duration_ns[ops], spans.start_ns[ops], attribution.node_of[ops]))]
    node = attribution.node_of[ops]
    last = ops[np.append(node[1:] != node[:-1], True)] if len(ops) else ops
    launched = charges.cpu_span[charges.cpu_span >= 0] if charges.basis == "device" else charges.cpu_span[:0]
    launchers = set(nearest(parent, marked(len(spans), last))[launched].tolist())
    for span in last.tolist():
        if calling[span] or span in launchers or _allocates(recording, span):
            continue
        node_span, above = int(attribution.node_of[span]), span
        while above >= 0 and above != node_span:  # the composite ops around it too, such as `linear`
            stopped[above] = True
            above = int(parent[above])
    return stopped


def _allocates(recording: Recording, span: int) -> bool:
    memory, spans = recording.memory, recording.spans
    first, last = np.searchsorted(memory.time_ns, [spans.start_ns[span], spans.end_ns[span]])
    here = slice(int(first), int(last))
    return bool(((memory.lane[here] == spans.lane[span]) & (memory.size_bytes[here] > 0)).any())


NEVER_CALLED = "(no call in the steps with shapes)"
Key = TypeVar("Key")
_COMPILING = "(dynamo_timed)"
_SPARSE = re.compile(r"aten::(\w*sparse|_?(indices|values|nnz|coalesced?_?)$|c?(crow|col|row)_indices)")
# Triton names a kernel as the function it was; C++ adds its arguments.
_TRITON_KERNEL = re.compile(r"\w+")
# Kernels that multiply float32 as tfloat32: by cuBLAS, cuDNN and CUTLASS.
_TF32_KERNEL = re.compile(r"tf32|tensorop_s1688gemm|tensorop_s1688fprop|tensorop_s1688[dw]grad")


# --- which ops count ----------------------------------------------------------------------------


# The layer and what called it, up to the root (("",): none by nature, (): not known), the phase, why none is known.
WorkPlace = tuple[tuple[str, ...], Phase, str]


class FlopKey(NamedTuple):
    """What FLOPs are summed by."""

    place: Place
    work: int  # index into classes.CLASSES
    dtype: str


class FlopOps:
    """The ops of a recording that have FLOPs."""

    def __init__(self, found: Placed, shapes: Shapes) -> None:
        self._found, self._shapes = found, shapes
        self._parent = found.nesting.parent
        self.handlers, idle = python_dispatch(found.recording, self._parent, found.charges)
        self.ran = self._really_ran() & ~idle
        working = self._named(has_work) & self.ran
        self.of_other_layout = working & self._on_other_layouts()
        self._flops = self._evaluate(np.flatnonzero(working & self._named(has_formula) & ~self.of_other_layout))
        known = marked(len(self._parent), self._flops)
        around = nearest_above(self._parent, nearest(self._parent, known))
        self.is_counted = known.copy()
        self.is_counted[around[known & (around >= 0)]] = False
        self._as_tf32 = self._in_tf32()
        self._is_unknown = self._unknown(working | self._opaque_calls()) | self._library_ops()

    def _named(self, chosen: Callable[[str], bool]) -> Bool:
        """True for ops whose name is chosen."""
        is_op: Bool = self._found.recording.spans.category == Category.CPU_OP
        return is_op & self._found.recording.named(chosen)

    def _really_ran(self) -> Bool:
        """Not what a compiler traces or a recompute stopped at, and only in a step that was recorded whole."""
        found = self._found
        spans = found.recording.spans
        compiling = found.recording.named(lambda name: name.endswith(_COMPILING)) & (spans.category < Category.RUNTIME)
        ran: Bool = ~stopped_ops(found.recording, self._parent, found.attribution, found.charges)
        if compiling.any():
            ran &= nearest(found.enclosing, compiling) < 0
        if len(found.steps):
            ran &= found.steps.place_of(spans.start_ns) >= 0
        return ran

    def _on_other_layouts(self) -> Bool:
        """What multiplies sparse tensors, of which a trace has the shape and not the layout: their ops lie in it.

        Those of CSR look at no indices in a trace; what a dense product never does is to call itself for its output.
        """
        names, name, parent = self._found.recording.names, self._found.recording.spans.name, self._parent
        sparse = self._named(lambda name: _SPARSE.match(name) is not None)
        products = np.flatnonzero(self._named(has_formula) & (parent >= 0))
        plain = np.unique([name.rstrip("_") for name in names], return_inverse=True)[1]
        for span in products[plain[name[products]] == plain[name[parent[products]]]].tolist():
            holder = int(parent[span])
            if span in self._shapes and holder in self._shapes:
                sparse[span] |= len(self._shapes[span].dims) > len(self._shapes[holder].dims)
        return (nearest(parent, sparse) >= 0) | ancestors_of(parent, sparse)

    def _opaque_calls(self) -> Bool:
        """On a CPU, where generated kernels are no events, calls of compiled graphs of which no kernel is known."""
        found = self._found
        if found.charges.basis != "cpu":
            return np.zeros_like(self.ran)
        calls = found.recording.named(lambda name: graph_key(name) is not None) & self.ran
        kernels = found.recording.named(lambda name: name.startswith("cpp_"))
        calls &= (found.recording.spans.category < Category.MODULE) & ~self._in_optimizer
        return calls & ~marked(len(calls), self._parent[kernels])

    def _library_ops(self) -> Bool:
        """Ops that are none of torch's and work themselves, so that no op inside tells what they compute.

        On a device they launch kernels whose names do not tell either. On a CPU most of their time is their own, and
        they call no product: one that does is taken to leave it all to that.
        """
        found = self._found
        if found.charges.basis == "cpu":
            works = (2 * found.cpu_ns > found.recording.spans.duration_ns) & ~self._holds_counted
        else:
            op = self._innermost_op[found.charges.cpu_span[self._unknown_kernels]]
            works = marked(len(self._parent), op)
        of_library = self._named(lambda name: is_of_library(name) and not has_work(name))
        return works & of_library & self.ran & ~self._inside_counted & ~self._in_optimizer

    @cached_property
    def _holds_counted(self) -> Bool:
        return ancestors_of(self._parent, self.is_counted)

    @cached_property
    def _inside_counted(self) -> Bool:
        """Ops that count are inside themselves."""
        return nearest(self._parent, self.is_counted) >= 0

    @cached_property
    def _innermost_op(self) -> Int32:
        return nearest(self._parent, self._named(is_op))

    @cached_property
    def _unknown_kernels(self) -> Bool:
        """Of the charges the launched kernels whose names do not say what they do."""
        charges, spans, names = self._found.charges, self._found.recording.spans, self._found.recording.names
        used = np.unique(spans.name[charges.span]).tolist()
        unknown = [i for i in used if not is_without_flops(names[i]) and not _class_of_kernel(names[i])]
        is_kernel = spans.category[charges.span] == Category.KERNEL
        chosen: Bool = is_kernel & np.isin(spans.name[charges.span], unknown) & (charges.cpu_span >= 0)
        return chosen

    @cached_property
    def _in_optimizer(self) -> Bool:
        """What an optimizer runs: it multiplies nothing but by a library."""
        return self._found.attribution.in_phases("optimizer")[self._found.attribution.place_of]

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
            if (counted := known[key]) is not None:
                flops[span] = counted
        return flops

    def _unknown(self, working: Bool) -> Bool:
        """Ops with work of which none is counted, inside them or around; of nested ones the innermost."""
        unknown: Bool = working & ~self._holds_counted & ~self._inside_counted
        outer = nearest_above(self._parent, nearest(self._parent, working))[unknown]
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
        found, charges = self._found, self._found.charges
        if charges.basis != "device":
            return np.zeros_like(self.ran)
        launched = charges.cpu_span[found.recording.named(_TF32_KERNEL.search)[charges.span] & (charges.cpu_span >= 0)]
        as_tf32 = marked(len(self._parent), nearest(self._parent, self.is_counted)[launched])
        capability = busiest_device_properties(found.recording).compute_capability
        if found.fast_float32 and (capability is None or capability >= FIRST_WITH_TF32):
            as_tf32 |= self._named(lambda name: class_of_work(name) == "gemm" and "conv" not in name)
        return as_tf32

    def uncounted(self) -> list[UnknownCall]:
        """Ops with work that nothing is known of, then kernels without an op that says what they do."""
        found, spans, charges = self._found, self._found.recording.spans, self._found.charges
        bare = self._bare_kernels() if charges.basis == "device" else []
        time_ns = spans.duration_ns
        if charges.basis == "device":
            launched = charges.cpu_span >= 0
            launched[bare] = False  # which are listed apart
            op = nearest(self._parent, self._is_unknown)[charges.cpu_span[launched]]
            time_ns = sum_by_key(op[op >= 0], charges.time_ns[launched][op >= 0], len(spans))
        calls, place_of = [], found.attribution.place_of
        for span in np.flatnonzero(self._is_unknown).tolist():
            name = found.recording.name_of(span)
            calls.append(UnknownCall(name, class_of_work(name), int(place_of[span]), int(time_ns[span])))
        for i in bare:
            name = found.recording.name_of(charges.span[i])
            calls.append(
                UnknownCall(name, _class_of_kernel(name) or "other", int(charges.place[i]), int(charges.time_ns[i]))
            )
        return calls

    def _bare_kernels(self) -> list[int]:
        """Charges of kernels that no op tells of: such as name work, and those that Triton made."""
        recording, charges = self._found.recording, self._found.charges
        launched = charges.cpu_span >= 0
        covered = nearest(self._parent, self._named(has_work))
        naming_work = recording.named(lambda name: bool(_class_of_kernel(name)))[charges.span] & launched
        naming_work &= covered[charges.cpu_span] < 0
        triton = recording.named(_TRITON_KERNEL.fullmatch)[charges.span] & self._unknown_kernels
        triton &= (self._innermost_op[charges.cpu_span] < 0) & ~self._in_optimizer[charges.cpu_span]
        chosen: list[int] = np.flatnonzero((naming_work | triton) & self.ran[charges.cpu_span]).tolist()
        return chosen


def _class_of_kernel(name: str) -> str:
    if classes.is_communication(name):  # same: its class is none of a product
        return ""
    if classes.attention_backend_of_kernel(name):
        return "attention"
    return "gemm" if classes.class_of_kernel(name) == "gemm" else ""


class UnknownCall(NamedTuple):
    """A call of an op (or kernel) of which something is not known."""

    op: str
    class_name: str
    place: int  # in the attribution's places
    time_ns: int


def unknown_rows(found: Placed, calls: Iterable[UnknownCall], steps: int) -> tuple[UncountedRow, ...]:
    """A row for each op, class and phase; the longest first; times are per step."""
    places = found.attribution.places
    groups = grouped(((call.op, call.class_name, places[call.place].phase), call) for call in calls)
    rows = []
    for (op, class_name, phase), group in groups.items():
        layers = (found.layer_name(places[call.place]) for call in group)
        rows.append(
            UncountedRow(
                op=op,
                class_name=class_name,
                phase=phase,
                layers=tuple(dict.fromkeys(layer for layer in layers if layer is not None)),
                count=len(group),
                time_per_step_ns=sum(call.time_ns for call in group) // steps,
            )
        )
    return tuple(sorted(rows, key=lambda row: (-row.time_per_step_ns, row.op, row.phase)))


# --- how many -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopCount:
    """What the shapes of a trace tell."""

    steps: int  # how many were counted
    rows: tuple[FlopRow, ...]
    uncounted: tuple[UncountedRow, ...]
    of_places: Mapping[WorkPlace, tuple[int, int]] = field(default_factory=dict)  # FLOPs and causal ones per step
    unknown_in: tuple[WorkPlace, ...] = ()  # where those of some op are not known


def count_of_ops(found: Placed, ops: FlopOps, timed: Placed | None = None) -> FlopCount:
    """FLOPs of the ops that count. `timed`: the trace whose steps it is for, if another, see `calls_ratio`."""
    steps = max(1, len(found.steps))
    ratio = calls_ratio(found, timed)
    sums: list[dict[FlopKey, int | Fraction]] = [defaultdict(int) for _ in range(4)]
    for key, flops in ops.counted():
        numbers = (flops.flops, flops.causal_flops, flops.repeated_flops, flops.causal_repeated_flops)
        calls = ratio(key.place)
        for total, number in zip(sums, numbers, strict=True) if calls else ():
            total[key] += number * calls
    means = [per_step(total, steps) for total in sums]
    rows: dict[FlopKey, list[int]] = defaultdict(lambda: [0] * len(means))
    of_places: dict[WorkPlace, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for key in sorted(sums[0], key=lambda key: (key.place.layer < 0, key.place.layer, PHASES.index(key.place.phase),
                                                key.work, key.dtype, key.place.reason)):  # fmt: skip
        place, again = key.place, key.place.phase == "recompute"
        whole, causal, repeated, causal_repeated = (mean[key] for mean in means)
        numbers = (whole, causal, whole if again else repeated, causal if again else causal_repeated)
        of_layer = rows[key._replace(place=place._replace(chain=()))]  # whoever called it
        of_layer[:] = map(add, of_layer, numbers)
        at = (found.names_of(place), place.phase, place.reason)
        of_places[at] = (of_places[at][0] + whole, of_places[at][1] + causal)
    unknown, never = ops.uncounted(), tuple(_never_called(found, timed))
    unknown_in = [found.attribution.places[i] for i in dict.fromkeys(call.place for call in unknown)]
    return FlopCount(
        steps=steps,
        rows=tuple(
            FlopRow(
                layer=found.layer_name(key.place),
                phase=key.place.phase,
                class_name=classes.CLASSES[key.work],
                dtype=key.dtype,
                flops_per_step=whole,
                causal_flops_per_step=causal,
                repeated_flops_per_step=repeated,
                causal_repeated_flops_per_step=causal_repeated,
                reason=key.place.reason,
            )
            for key, (whole, causal, repeated, causal_repeated) in rows.items()
        ),
        uncounted=(*unknown_rows(found, unknown, steps), *never),
        of_places=dict(of_places),
        unknown_in=(
            *((found.names_of(place), place.phase, place.reason) for place in unknown_in),
            *(((layer,), row.phase, "") for row in never for layer in row.layers),
        ),
    )


# --- for the steps of another trace --------------------------------------------------------------


def calls_ratio(found: Placed, timed: Placed | None) -> Callable[[Place], int | Fraction]:
    """By place: how often its model is called in a step of the timed trace, over how often in a step of this one.

    A model of several (a UNet after a text encoder) may not run in every step; the calls of one are taken to be alike.
    """
    if timed is None:
        return lambda place: 1
    here, there = _calls_of_roots(found), _calls_of_roots(timed)
    layers = found.tree.layers
    ratios = {name: there[name] / calls for name, calls in here.items() if calls}
    whole = {name: int(ratio) if ratio.denominator == 1 else ratio for name, ratio in ratios.items()}  # far quicker
    return lambda place: whole.get(layers[place.chain[-1]].name, 1) if place.chain else 1


def _calls_of_roots(found: Placed) -> defaultdict[str, Fraction]:
    """How often the outermost layers are called in a step; nothing of a trace without marks of layers."""
    calls, layers, steps = found.calls, found.tree.layers, found.steps
    inside = steps.place_of(found.recording.spans.start_ns[calls.span]) >= 0
    names = [layers[i].name for i in calls.layer[inside | (not len(steps))].tolist() if layers[i].parent < 0]
    per_step = {name: Fraction(count, max(1, len(steps))) for name, count in Counter(names).items()}
    return defaultdict(Fraction, per_step)


def _never_called(found: Placed, timed: Placed | None) -> Iterable[UncountedRow]:
    """The layers of the timed trace whose model is not called in this one."""
    if timed is None:
        return
    here, layers = _calls_of_roots(found), timed.tree.layers
    missing = {name for name, calls in _calls_of_roots(timed).items() if calls and not here[name]}
    unknown: dict[Phase, dict[str, None]] = defaultdict(dict)
    for place in timed.attribution.places:
        if place.chain and layers[place.chain[-1]].name in missing:
            unknown[place.phase].update(dict.fromkeys(timed.names_of(place)))
    for phase, names in unknown.items():
        yield UncountedRow(
            op=NEVER_CALLED, class_name="other", phase=phase, layers=tuple(names), count=0, time_per_step_ns=0
        )


def per_step(sums: Mapping[Key, int | Fraction], steps: int) -> dict[Key, int]:
    """Means as whole numbers that add up to the mean of the sum, rounded down."""
    means = {key: int(total // steps) for key, total in sums.items()}
    missing = int(sum(sums.values()) // steps) - sum(means.values())
    for key in sorted(sums, key=lambda key: -(sums[key] % steps))[:missing]:
        means[key] += 1
    return means


def shapes_of(found: Placed) -> Shapes | str:
    """The shapes of an attributed recording, or why there are none."""
    if found.shapes is None or not found.shapes.recorded:
        return "the shapes of ops were not recorded (record_shapes=True)"
    return found.shapes


def flops_of_recording(found: Placed) -> FlopCount | str:
    """What the shapes of an attributed recording tell, or why there are none."""
    shapes = shapes_of(found)
    return shapes if isinstance(shapes, str) else count_of_ops(found, FlopOps(found, shapes))
