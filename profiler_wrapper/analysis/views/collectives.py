"""Collectives: how many, how many bytes, how fast, and how much of them nothing hides.

A row's time is that of its events of the class communication, so all rows together have the time of that class.
Exposed time is per event, as a layer's is: where two collectives overlap each other, the sum over rows is more
than `TimeTotals.exposed_communication_ns`, which counts an instant once.

On a CPU-only trace the time is what calls take on their threads. What gloo does on threads of its own shows as
annotations, which carry no time; the few ops in it are rows of count 0. So there is no bandwidth.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from profiler_wrapper.analysis import classes
from profiler_wrapper.analysis.attributed import Attributed
from profiler_wrapper.analysis.model import PHASES, CollectiveRow, Phase
from profiler_wrapper.analysis.statistics import grouped, marked, sum_by_key, sum_if_all_known
from profiler_wrapper.analysis.time_rows import exposed_communication
from profiler_wrapper.trace.nesting import nearest, outermost
from profiler_wrapper.trace.recording import Bool, Category, CollectiveDetails, Int64

# --------------------------------------------------------------------------------------------------
# Collectives by the names that libraries give them: which one, of what type, how its bandwidth is computed.

OTHER = "other"

# The first that matches counts, in lower case: `c10d::_reduce_scatter_base_`, `ncclDevKernel_AllGather_RING_LL` ...
_COLLECTIVES = tuple(
    (name, re.compile(pattern))
    for name, pattern in (
        ("all_reduce", r"all_?reduce|cross_device_reduce"),
        ("all_gather", r"all_?gather"),
        ("reduce_scatter", r"reduce_?scatter"),
        ("all_to_all", r"all_?to_?all"),
        ("broadcast", r"broadcast"),
        ("send_recv", r"send_?recv|isend_irecv"),
        ("barrier", r"barrier"),
        ("gather", r"gather"),
        ("scatter", r"scatter"),
        ("reduce", r"(?:^|[_:])_?reduce(?![a-z])"),
        ("send", r"(?:^|[_:])i?send(?![a-z])"),
        ("recv", r"(?:^|[_:])i?recv(?![a-z])"),
        ("wait", r"(?:^|[_:])wait(?![a-z])"),
    )
)
_REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")  # kernels that only copy have no type, or a made-up one
_TYPE_IN_KERNEL = re.compile(
    r"_(?P<type>f16|f32|f64|bf16|f8e4m3|f8e5m2|i8|u8|i32|u32|i64|u64|half|float|double|__nv_bfloat16|hip_bfloat16|"
    r"rccl_bfloat16|u?int8_t|u?int32_t|u?int64_t)(?=[_(]|$)"
)
_TYPES = {
    "f16": "Half", "half": "Half", "f32": "Float", "float": "Float", "f64": "Double", "double": "Double",
    "bf16": "BFloat16", "__nv_bfloat16": "BFloat16", "hip_bfloat16": "BFloat16", "rccl_bfloat16": "BFloat16",
    "f8e4m3": "Float8_e4m3fn", "f8e5m2": "Float8_e5m2",
    "i8": "Char", "int8_t": "Char", "u8": "Byte", "uint8_t": "Byte", "i32": "Int", "int32_t": "Int",
    "u32": "UInt32", "uint32_t": "UInt32", "i64": "Long", "int64_t": "Long", "u64": "UInt64", "uint64_t": "UInt64",
}  # fmt: skip
# By c10's names of types (c10/core/ScalarType.h of PyTorch), in lower case.
_ELEMENT_BYTES = {
    "byte": 1, "char": 1, "bool": 1, "short": 2, "int": 4, "long": 8, "half": 2, "float": 4, "double": 8,
    "bfloat16": 2, "complexhalf": 4, "complexfloat": 8, "complexdouble": 16, "uint16": 2, "uint32": 4, "uint64": 8,
    "qint8": 1, "quint8": 1, "qint32": 4,
}  # fmt: skip


@lru_cache(maxsize=4096)
def collective_of(name: str) -> str:
    """The collective that an op, an annotation, a kernel or a collective's own name stands for; "" for none."""
    lower = name.partition("<")[0].lower()
    return next((collective for collective, pattern in _COLLECTIVES if pattern.search(lower)), "")


def is_collective_call(name: str) -> bool:
    """Whether a CPU event of this name is a call that communicates."""
    return classes.class_of_op(name) == "communication"


@lru_cache(maxsize=4096)
def type_in_kernel(name: str) -> str:
    """The type that a kernel's name tells, as c10 writes it; "" for none."""
    match = _TYPE_IN_KERNEL.search(name) if collective_of(name) in _REDUCTIONS else None
    return _TYPES[match["type"]] if match is not None else ""


def element_bytes(dtype: str) -> int | None:
    """Bytes of one element of a type, as c10 names it; None for one that is not known."""
    dtype = dtype.lower().removeprefix("c10::")
    return 1 if dtype.startswith("float8") else _ELEMENT_BYTES.get(dtype)


def bus_factor(collective: str, group_size: int | None) -> float | None:
    """Bus bandwidth over payload over time, with the whole of the larger side as payload; None where not defined.

    As nccl-tests reckons it (doc/PERFORMANCE.md, and its *GetBw functions): what every link has to carry.
    """
    if collective in ("broadcast", "reduce", "send", "recv", "send_recv"):
        return 1.0
    if not group_size:
        return None
    if collective == "all_reduce":
        return 2 * (group_size - 1) / group_size
    if collective in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"):
        return (group_size - 1) / group_size
    return None


class _Call(NamedTuple):
    """What an event is part of; the first four are what the calls of a row have in common."""

    collective: str
    group: str
    group_size: int | None
    dtype: str
    payload_bytes: int | None
    counts: bool  # not for what works for a call made elsewhere


@dataclass(slots=True)
class _Sums:
    count: int = 0
    payloads_bytes: list[int | None] = field(default_factory=list)  # of each call
    time_ns: int = 0
    exposed_ns: int = 0


def collective_rows(attributed: Attributed) -> tuple[CollectiveRow, ...]:
    """The collectives of an attributed recording, the most expensive first."""
    charges, places = attributed.charges, attributed.attribution.places
    members = np.flatnonzero(charges.work == classes.COMMUNICATION)
    if not len(members):
        return ()
    exposed, _ = exposed_communication(attributed.recording, charges)
    calls = _Calls(attributed)
    seen: set[int] = set()
    sums: dict[tuple[str, str, int | None, str, str | None, Phase], _Sums] = defaultdict(_Sums)
    columns = (charges.span, charges.cpu_span, charges.place, charges.time_ns, exposed)
    for span, cpu_span, place, time_ns, exposed_ns in zip(*(c[members].tolist() for c in columns), strict=True):
        identity, call = calls.of(span, cpu_span)
        key = (*call[:4], attributed.layer_name(places[place]), places[place].phase)
        gathered = sums[key]
        gathered.time_ns += time_ns
        gathered.exposed_ns += exposed_ns
        if identity not in seen:
            seen.add(identity)
            gathered.count += call.counts
            gathered.payloads_bytes.append(call.payload_bytes)
    on_device = charges.basis == "device"
    rows = []
    for (collective, group, group_size, dtype, layer, phase), one in sums.items():
        payload = sum_if_all_known(one.payloads_bytes) if one.count else None
        bandwidth = payload * 1e9 / one.time_ns if on_device and payload and one.time_ns else None
        factor = bus_factor(collective, group_size)
        rows.append(
            CollectiveRow(
                collective=collective,
                group=group,
                group_size=group_size,
                dtype=dtype,
                layer=layer,
                phase=phase,
                count=one.count,
                payload_bytes=payload,
                time_ns=one.time_ns,
                exposed_ns=one.exposed_ns if on_device else None,
                overlapped_ns=one.time_ns - one.exposed_ns if on_device else None,
                bandwidth_bytes_per_s=bandwidth,
                bus_bandwidth_bytes_per_s=None if bandwidth is None or factor is None else bandwidth * factor,
            )
        )
    rows.sort(
        key=lambda row: (-row.time_ns, row.collective, row.group, row.layer or "", PHASES.index(row.phase), row.dtype)
    )
    return tuple(rows)


def all_to_all_ns(attributed: Attributed) -> Int64:
    """Per place the time of its collectives of this kind."""
    charges, calls = attributed.charges, _Calls(attributed)
    members = np.flatnonzero(charges.work == classes.COMMUNICATION)
    spans = zip(charges.span[members].tolist(), charges.cpu_span[members].tolist(), strict=True)
    members = members[np.array([calls.of(*one)[1].collective == "all_to_all" for one in spans], dtype=np.bool_)]
    return sum_by_key(charges.place[members], charges.time_ns[members], len(attributed.attribution.places))


class _Calls:
    """Finds which call an event is part of, and what that call moves.

    A kernel that tells of its collective is one by itself. Any other belongs to the event around its launch that
    tells, or else to the outermost call around it; several kernels of one call are one collective.
    """

    def __init__(self, attributed: Attributed) -> None:
        self._recording, self._on_device = attributed.recording, attributed.charges.basis == "device"
        spans, parent = attributed.recording.spans, attributed.nesting.parent
        self._details = grouped((details.span, details) for details in attributed.recording.collectives)
        is_call: Bool = attributed.recording.named(is_collective_call) & (spans.category <= Category.ANNOTATION)
        self._outermost = outermost(parent, nearest(parent, is_call))
        tells = marked(len(spans), self._details) & (spans.category <= Category.RUNTIME)
        self._telling = nearest(parent, tells)
        self._named = nearest(parent, is_call & attributed.recording.named(collective_of))
        self._inside: dict[int, list[CollectiveDetails]] = defaultdict(list)  # what is known within a call
        for span in np.flatnonzero(tells).tolist():
            if self._outermost[span] >= 0:
                self._inside[int(self._outermost[span])] += self._details[span]
        self._known: dict[int, _Call] = {}

    def of(self, span: int, cpu_span: int) -> tuple[int, _Call]:
        """(identity, call) of a charge."""
        if self._on_device and span in self._details:
            identity, details = span, self._details[span]
        elif cpu_span >= 0 and self._on_device and self._telling[cpu_span] >= 0:
            identity = int(self._telling[cpu_span])
            details = self._details[identity]
        elif cpu_span >= 0 and self._outermost[cpu_span] >= 0:
            identity = int(self._outermost[cpu_span])
            details = [] if self._on_device else self._inside.get(identity, [])
        else:
            identity, details = span, []
        if identity not in self._known:
            self._known[identity] = self._call(identity, details, span, cpu_span)
        return identity, self._known[identity]

    def _call(self, identity: int, details: list[CollectiveDetails], span: int, cpu_span: int) -> _Call:
        kernel = self._recording.name_of(span)
        named = int(self._named[cpu_span]) if cpu_span >= 0 else -1
        names = [*(one.name for one in details), kernel, self._recording.name_of(named) if named >= 0 else ""]
        first = details[0] if details else CollectiveDetails(identity, "")
        counts = self._on_device or self._recording.spans.category[identity] == Category.CPU_OP
        return _Call(
            collective=next(filter(None, map(collective_of, names)), OTHER),
            group=first.group_name or "",
            group_size=first.group_size,
            dtype=first.dtype or type_in_kernel(kernel),
            payload_bytes=sum_if_all_known(map(payload_bytes_of, details)) if details else None,
            counts=bool(counts),
        )


def payload_bytes_of(details: CollectiveDetails) -> int | None:
    """What a collective moves; None where its sizes or its type are not known."""
    size = element_bytes(details.dtype or "")
    elements = [count for count in (details.in_elements, details.out_elements) if count is not None]
    return None if size is None or not elements else max(elements) * size
