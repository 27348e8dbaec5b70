"""Every different op call of the recorded traces: bytes as torch's meta kernels give, FLOPs as torch's flop counter."""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from profiler_wrapper.tables.work.bytes import INDEXING, SHOWS_INDICES, has_rule, moved_by
from profiler_wrapper.tables.work.formulas import flops_of, has_formula
from profiler_wrapper.trace.reader import read_with_shapes
from profiler_wrapper.trace.recording import OpShapes
from shared_traces import TRACE_NAMES, TRACES, needs_traces
from torch_versions import since_torch
from traffic_truth import held, needed

pytestmark = pytest.mark.full
# Why the bytes are others than the meta kernel's.
OTHER_BYTES = {
    "aten::_local_scalar_dense": "a meta tensor has no number",
    "aten::_scaled_dot_product_flash_attention": "the seed and offset of its dropout, 24 bytes, are left out",
    "aten::arange": "without a tensor to fill it calls itself with one",
    "aten::native_batch_norm": "it writes the running statistics, as no schema says; its own are float32 on a device",
}
NO_META_CONVOLUTION = "no convolution runs on the meta device"
_TYPES = {
    "float": torch.float32,
    "double": torch.float64,
    "int": torch.int32,
    "long int": torch.int64,
    "bool": torch.bool,
    "unsigned char": torch.uint8,
    "c10::Half": torch.float16,
    "c10::BFloat16": torch.bfloat16,
}
_TYPE_NUMBERS = {3: torch.int32, 4: torch.int64, 5: torch.float16, 6: torch.float32, 11: torch.bool, 15: torch.bfloat16}


@dataclass(frozen=True)
class Call:
    """One call, with tensors on the meta device."""

    name: str
    shapes: OpShapes
    overload: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]


@cache
def distinct_calls() -> tuple[Call, ...]:
    """Those of torch's ops that have a rule or a formula."""
    found = {}
    for trace in TRACE_NAMES:
        recording, shapes = read_with_shapes(TRACES / trace, lambda name: has_rule(name) or has_formula(name))
        span, number = shapes.arrays()
        for name, i in {*zip(recording.spans.name[span].tolist(), number.tolist(), strict=True)}:
            found[recording.names[name], repr(shapes.numbered(i))] = shapes.numbered(i)
    named = ((name, shapes) for (name, _), shapes in sorted(found.items()) if name.startswith("aten::"))
    return tuple(call for name, shapes in named for call in _on_meta(name, shapes))


def _on_meta(name: str, shapes: OpShapes) -> Iterator[Call]:
    """The call of the first overload that its inputs fit; none where types are not recorded (of tensors in lists)."""
    packet = getattr(torch.ops.aten, name.removeprefix("aten::"))
    for overload in (getattr(packet, one) for one in packet.overloads()):
        declared = overload._schema.arguments
        if len(declared) != len(shapes.types):
            continue
        try:
            given = [_argument(argument, place, shapes) for place, argument in enumerate(declared)]
        except ValueError:
            continue
        pairs = list(zip(declared, given, strict=True))
        args = [value for argument, value in pairs if not argument.kwarg_only]
        yield Call(name, shapes, overload, args, {one.name: value for one, value in pairs if one.kwarg_only})
        return


def _argument(argument: Any, place: int, shapes: OpShapes) -> Any:
    """Raises ValueError for what the trace does not tell, or is not of the declared type."""
    declared, name = str(argument.type), shapes.types[place]
    value = shapes.concrete[place] if place < len(shapes.concrete) else ""
    if "Tensor" in declared:
        if place and not shapes.dims[place] and name in ("double", "long int"):
            return 1.0 if name == "double" else 1  # a Python number
        if name in _TYPES:
            made = torch.empty(shapes.dims[place], dtype=_TYPES[name], device="meta")
            strides = shapes.strides[place] if place < len(shapes.strides) else []
            return made.as_strided(made.shape, strides) if strides else made
        if name or "Optional" not in declared:
            raise ValueError("no tensor")
        return None
    if name in _TYPES:
        raise ValueError("a tensor")
    if argument.name == "dtype" and value:
        return _TYPE_NUMBERS[int(value)]
    if argument.name in ("device", "layout", "memory_format", "pin_memory"):
        return "meta" if argument.name == "device" else None
    return literal_eval(value) if value else argument.default_value  # no trace has texts


def bytes_on_meta(call: Call) -> tuple[int, int]:
    """What the op has to read of its inputs; what it makes, or its schema says it writes."""
    out = call.overload(*call.args, **call.kwargs)
    given = [one for one in tree_leaves((call.args, call.kwargs)) if isinstance(one, torch.Tensor)]
    kept = {one.untyped_storage()._cdata for one in given}
    results = [one for one in tree_leaves(out) if isinstance(one, torch.Tensor)]
    new = [one for one in results if one.untyped_storage()._cdata not in kept]
    declared = call.overload._schema.arguments
    values = [*call.args, *call.kwargs.values()]
    written = [
        value
        for argument, value in zip(declared, values, strict=True)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    kept_kwargs = {name: value for name, value in call.kwargs.items() if not any(value is one for one in written)}
    return needed(call.name, call.args, kept_kwargs, [*new, *written]), sum(map(held, [*new, *written]))


@needs_traces
@since_torch(2, 11, NO_META_CONVOLUTION)
def test_bytes_are_what_meta_kernels_give() -> None:
    left_out = (*OTHER_BYTES, *INDEXING, *SHOWS_INDICES)
    calls = [
        call for call in distinct_calls() if has_rule(call.name) and call.name not in left_out and any(call.shapes.dims)
    ]  # numbers alone may be Python's or the memory's
    differing = [
        (call.name, call.shapes, ours, theirs)
        for call in calls
        if (ours := moved_by(call.name, call.shapes)) != (theirs := bytes_on_meta(call))
    ]
    assert differing == []
    assert len(calls) > 300


@needs_traces
@since_torch(2, 11, NO_META_CONVOLUTION)
def test_flops_are_what_torch_counts() -> None:
    compared = 0
    for call in distinct_calls():
        formula = flop_registry.get(call.overload.overloadpacket)
        if formula is None:
            continue
        ours = flops_of(call.name, call.shapes)
        assert ours is not None
        compared += 1
        out = call.overload(*call.args, **call.kwargs)
        assert ours.flops == formula(*call.args, **call.kwargs, out_val=out), (call.name, call.shapes)
    assert compared > 50
