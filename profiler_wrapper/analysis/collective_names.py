"""Collectives by the names that libraries give them: which one, of what type, how its bandwidth is reckoned."""

from __future__ import annotations

import re
from functools import lru_cache

from profiler_wrapper.analysis import classes

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


@lru_cache(maxsize=4096)
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
