"""Collectives: how many, how many bytes, how fast, and how much of them nothing hides.

A row's time is that of its events of the class communication, so all rows together have the time of that class.
Exposed time is per event, as a layer's is: where two collectives overlap each other, the sum over rows is more
than `TimeTotals.exposed_communication_ns`, which counts an instant once.

On a CPU-only trace the time is what calls take on their threads. What gloo does on threads of its own shows as
annotations, which carry no time; the few ops in it are rows of count 0. So there is no bandwidth.
"""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import numpy as np

from profiler_wrapper.place import classes
from profiler_wrapper.place.names import PHASES, Phase
from profiler_wrapper.place.placed import Placed
from profiler_wrapper.tables.model import CollectiveRow
from profiler_wrapper.tables.statistics import sum_if_all_known
from profiler_wrapper.tables.time_rows import exposed_communication
from profiler_wrapper.trace.arrays import at, grouped, marked, sum_by_key
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
    """Return the collective that a name of an op, an annotation, a kernel or a collective stands for; "" for none."""
    lower = name.partition("<")[0].lower()
    return next((collective for collective, pattern in _COLLECTIVES if pattern.search(lower)), "")


def is_collective_call(name: str) -> bool:
    """Return whether a CPU event of this name is a call that communicates."""
    return classes.class_of_op(name) == "communication"


@lru_cache(maxsize=4096)
def type_in_kernel(name: str) -> str:
    """Return the type that a kernel's name tells, as c10 writes it; "" for none."""
    match = _TYPE_IN_KERNEL.search(name) if collective_of(name) in _REDUCTIONS else None
    return _TYPES[match["type"]] if match is not None else ""


def element_bytes(dtype: str) -> int | None:
    """Return the bytes of one element of a type, as c10 names it; None for one that is not known."""
    dtype = dtype.lower().removeprefix("c10::")
    return 1 if dtype.startswith("float8") else _ELEMENT_BYTES.get(dtype)


def bus_factor(collective: str, group_size: int | None) -> float | None:
    """Return bus bandwidth over (payload / time), the payload being the larger side; None where not defined.

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


def collective_rows(placed: Placed) -> tuple[CollectiveRow, ...]:
    """Return the collectives of an attributed recording, the most expensive first."""
    charges, places = placed.charges, placed.attribution.places
    members, calls = _calls(placed)
    if not len(members):
        return ()
    exposed, _ = exposed_communication(placed.recording, charges)
    on_device, seen = charges.basis == "device", set[int]()
    parts: dict[tuple[str, str, int | None, str, str | None, Phase], list[tuple[int, int, _Call | None]]] = {}
    columns = (column[members].tolist() for column in (charges.place, charges.time_ns, exposed))
    for (identity, call), index, time_ns, exposed_ns in zip(calls, *columns, strict=True):
        key = (*call[:4], placed.layer_name(places[index]), places[index].phase)
        parts.setdefault(key, []).append((time_ns, exposed_ns, None if identity in seen else call))
        seen.add(identity)
    rows = []
    for (collective, group, group_size, dtype, layer, phase), of_key in parts.items():
        made = [call for _, _, call in of_key if call is not None]
        time_ns, exposed_ns = sum(part[0] for part in of_key), sum(part[1] for part in of_key)
        count = sum(call.counts for call in made)
        payload = sum_if_all_known(call.payload_bytes for call in made) if count else None
        bandwidth = payload * 1e9 / time_ns if on_device and payload and time_ns else None
        factor = bus_factor(collective, group_size)
        rows.append(
            CollectiveRow(
                collective=collective,
                group=group,
                group_size=group_size,
                dtype=dtype,
                layer=layer,
                phase=phase,
                count=count,
                payload_bytes=payload,
                time_ns=time_ns,
                exposed_ns=exposed_ns if on_device else None,
                overlapped_ns=time_ns - exposed_ns if on_device else None,
                bandwidth_bytes_per_s=bandwidth,
                bus_bandwidth_bytes_per_s=None if bandwidth is None or factor is None else bandwidth * factor,
            )
        )
    rows.sort(
        key=lambda row: (-row.time_ns, row.collective, row.group, row.layer or "", PHASES.index(row.phase), row.dtype)
    )
    return tuple(rows)


def all_to_all_ns(placed: Placed) -> Int64:
    """Sum the time of all-to-all collectives per place."""
    charges, (members, calls) = placed.charges, _calls(placed)
    members = members[np.array([call.collective == "all_to_all" for _, call in calls], dtype=np.bool_)]
    return sum_by_key(charges.place[members], charges.time_ns[members], len(placed.attribution.places))


def _calls(placed: Placed) -> tuple[Int64, list[tuple[int, _Call]]]:
    """Return the charges that communicate, and each one's call: a span that stands for it, and what it moves.

    A kernel that tells of its collective is one by itself. Any other belongs to the event around its launch that
    tells, or else to the outermost call around it; several kernels of one call are one collective. Without device
    events a call is the outermost, and moves what all tell that lie within.
    """
    recording, charges, parent = placed.recording, placed.charges, placed.nesting.parent
    spans, on_device = recording.spans, charges.basis == "device"
    details_of = grouped((details.span, details) for details in recording.collectives)
    is_call: Bool = recording.named(is_collective_call) & (spans.category <= Category.ANNOTATION)
    whole = outermost(parent, nearest(parent, is_call))
    tells = marked(len(spans), details_of) & (spans.category <= Category.RUNTIME)
    within = grouped((int(whole[span]), details_of[span]) for span in np.flatnonzero(tells & (whole >= 0)).tolist())
    members = np.flatnonzero(charges.work == classes.COMMUNICATION)
    borders = (whole, nearest(parent, tells), nearest(parent, is_call & recording.named(collective_of)))
    columns = np.stack([charges.span[members], *(at(near, charges.cpu_span[members], -1) for near in borders)])
    found, known = list[int](), dict[int, _Call]()
    for event, outer, telling, named in columns.T.tolist():
        stated = event if event in details_of else telling
        around = stated if on_device and stated >= 0 else outer
        identity = around if around >= 0 else event
        found.append(identity)
        if identity in known:
            continue
        details = details_of.get(identity, []) if on_device else [*chain(*within.get(identity, ()))]
        kernel, first = recording.name_of(event), details[0] if details else CollectiveDetails(identity, "")
        names = [*(one.name for one in details), kernel, recording.name_of(named) if named >= 0 else ""]
        known[identity] = _Call(
            collective=next(filter(None, map(collective_of, names)), OTHER),
            group=first.group_name or "",
            group_size=first.group_size,
            dtype=first.dtype or type_in_kernel(kernel),
            payload_bytes=sum_if_all_known(map(payload_bytes_of, details)) if details else None,
            counts=bool(on_device or spans.category[identity] == Category.CPU_OP),
        )
    return members, [(identity, known[identity]) for identity in found]


def payload_bytes_of(details: CollectiveDetails) -> int | None:
    """Return the bytes that a collective moves; None where its sizes or its type are not known."""
    size = element_bytes(details.dtype or "")
    elements = [count for count in (details.in_elements, details.out_elements) if count is not None]
    return None if size is None or not elements else max(elements) * size
