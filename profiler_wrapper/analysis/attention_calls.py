"""Calls of scaled-dot-product attention: what they were given, and which backend ran.

`aten::scaled_dot_product_attention` was given what the user gave; where a trace has the shapes of the backend's own
op only, that one tells. A backward belongs to the forward call that made its autograd nodes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from profiler_wrapper.analysis import classes
from profiler_wrapper.analysis.attention_ops import ATTENTIONS
from profiler_wrapper.analysis.flops import FlopOps
from profiler_wrapper.analysis.formulas import dtype_of
from profiler_wrapper.analysis.phase import Phase
from profiler_wrapper.analysis.view_model import AttentionCallRow
from profiler_wrapper.recording.nesting import nearest, nearest_above
from profiler_wrapper.recording.recording import Bool, Category, Int32
from profiler_wrapper.recording.shapes import OpShapes, Shapes

if TYPE_CHECKING:
    from profiler_wrapper.analysis.attributed import Attributed


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Where an op has its inputs; -1: it has none of the kind, None: it does not tell."""

    query: int = 0
    mask: int | None = None
    dropout: int | None = None
    causal: int | None = None
    heads_first: bool = True


ENTRY = "aten::scaled_dot_product_attention"
# As torch 2.13 declares them.
_KNOWN = {
    ENTRY: _Inputs(mask=3, dropout=4, causal=5),
    "aten::_scaled_dot_product_attention_math": _Inputs(mask=3, dropout=4, causal=5),
    "aten::_scaled_dot_product_attention_math_for_mps": _Inputs(mask=3, dropout=4, causal=5),
    "aten::_scaled_dot_product_flash_attention": _Inputs(mask=-1, dropout=3, causal=4),
    "aten::_scaled_dot_product_flash_attention_for_cpu": _Inputs(mask=5, dropout=3, causal=4),
    "aten::_scaled_dot_product_efficient_attention": _Inputs(mask=3, dropout=5, causal=6),
    "aten::_scaled_dot_product_cudnn_attention": _Inputs(mask=3, dropout=5, causal=6),
    "aten::_scaled_dot_product_fused_attention_overrideable": _Inputs(mask=3, dropout=4, causal=5),
}


def describes_attention(op: str) -> bool:
    """Whether the inputs of ops of this name are needed here, beside those that tell FLOPs."""
    return op in _KNOWN


class _Call(NamedTuple):
    """What a call was given."""

    dtype: str
    query_shape: tuple[int, ...]
    key_shape: tuple[int, ...]
    value_shape: tuple[int, ...]
    mask: bool | None
    mask_shape: tuple[int, ...]
    causal: bool | None
    dropout: float | None
    strided: bool  # the last dimension of an input is not dense


class _Key(NamedTuple):
    layer: str
    phase: Phase
    backend: str
    call: _Call


class AttentionMade(NamedTuple):
    """Which events are calls of attention, and which work for one."""

    entry_of: Int32  # per span the call that it works for, -1 for none
    backend_of: dict[int, str]  # of each call that has time


def attention_made(found: Attributed, *, ran: Bool | None = None) -> AttentionMade:
    """The calls of an attributed recording. `ran`: those that count; all where not given."""
    entries = _entries(found) if ran is None else _entries(found) & ran
    entry_of = _entry_of(found, entries)
    return AttentionMade(entry_of, _backends(found, entry_of))


def attention_call_rows(found: Attributed, shapes: Shapes, ops: FlopOps, *, most: int) -> tuple[AttentionCallRow, ...]:
    """A row for equal calls in each layer and phase, the `most` expensive of them, dearest first.

    Time is that of the events that are attention in every other table too: where all calls are described, the rows
    of a layer, phase and backend add up to its `AttentionRow`.
    """
    entry_of = attention_made(found, ran=ops.ran).entry_of
    described: dict[tuple[int, int], _Call | None] = {}
    names, name_of = found.recording.names, found.recording.spans.name
    charges, places = found.charges, found.attribution.places
    calls: dict[_Key, set[int]] = defaultdict(set)
    times: dict[_Key, int] = defaultdict(int)
    launched = charges.cpu_span >= 0
    owner = np.where(launched, entry_of[np.where(launched, charges.cpu_span, 0)], -1)
    members = np.flatnonzero((owner >= 0) & (charges.backend >= 0))
    columns = (owner, charges.place, charges.backend, charges.time_ns)
    for entry, at, backend, time_ns in zip(*(column[members].tolist() for column in columns), strict=True):
        if entry not in shapes:
            continue
        told = (int(name_of[entry]), shapes.number(entry))
        if told not in described:
            described[told] = _described(names[told[0]], shapes[entry])
        call = described[told]
        if call is not None:
            place = places[at]
            key = _Key(found.layer_name(place) or "", place.phase, classes.BACKENDS[backend], call)
            calls[key].add(entry)
            times[key] += time_ns
    steps = max(1, len(found.steps))
    dearest = sorted(calls, key=lambda key: -times[key])[:most]
    return tuple(_row(key, len(calls[key]) / steps, round(times[key] / steps)) for key in dearest)


def _row(key: _Key, calls_per_step: float, time_ns: int) -> AttentionCallRow:
    call = key.call
    return AttentionCallRow(
        layer=key.layer,
        phase=key.phase,
        backend=key.backend,
        dtype=call.dtype,
        query_shape=call.query_shape,
        key_shape=call.key_shape,
        value_shape=call.value_shape,
        mask=call.mask,
        mask_shape=call.mask_shape,
        causal=call.causal,
        dropout=call.dropout,
        grouped=len(call.query_shape) == len(call.key_shape) == 4 and call.key_shape[1] < call.query_shape[1],
        strided=call.strided,
        calls_per_step=calls_per_step,
        time_per_step_ns=time_ns,
    )


# --- which ops ----------------------------------------------------------------------------------


def _entries(found: Attributed) -> Bool:
    """The outermost ops that are attention."""
    spans, names = found.recording.spans, found.recording.names
    entered = np.isin(spans.name, [i for i, name in enumerate(names) if name == ENTRY])
    is_attention: Bool = entered | (found.work_of.backend_of >= 0)
    is_attention &= spans.category == Category.CPU_OP
    parent = found.nesting.parent
    entries: Bool = is_attention & (nearest_above(parent, nearest(parent, is_attention)) < 0)
    return entries


def _entry_of(found: Attributed, entries: Bool) -> Int32:
    """Per span the call it works for: the one around it; in backward that of the forward op that made its node.

    A backward op with a name of its own is an entry itself only where nothing links it to a forward.
    """
    around = nearest(found.nesting.parent, entries)
    links = [link for link in found.attribution.links if link.forward_op >= 0]
    if not links:
        return around
    by_node = np.full(len(around) + 1, -1, dtype=np.int32)  # the last one is for "no node"
    by_node[[link.node for link in links]] = around[[link.forward_op for link in links]]
    in_backward = np.array([place.phase == "backward" for place in found.attribution.places], dtype=np.bool_)
    backward = np.flatnonzero(in_backward[found.attribution.place_of] & (found.attribution.place_of >= 0))
    forward = by_node[found.attribution.node_of[backward]]
    around[backward] = np.where(forward >= 0, forward, around[backward])
    return around


def _backends(found: Attributed, entry_of: Int32) -> dict[int, str]:
    """The backend of each call, as the ops in it name it."""
    charges = found.charges
    chosen = (charges.backend >= 0) & (charges.cpu_span >= 0)
    backends: dict[int, str] = {}
    for entry, backend in zip(
        entry_of[charges.cpu_span[chosen]].tolist(), charges.backend[chosen].tolist(), strict=True
    ):
        backends.setdefault(entry, classes.BACKENDS[backend])
    return backends


# --- what they were given -----------------------------------------------------------------------


def _described(name: str, shapes: OpShapes) -> _Call | None:
    """None where the inputs are not those of attention."""
    inputs = _KNOWN.get(name)
    if inputs is None:
        attention = ATTENTIONS.get(name)
        if attention is None:
            return None
        inputs = _Inputs(query=attention.query, causal=attention.causal, heads_first=attention.heads_first)
    tensors = [shapes.dims[inputs.query + i] if inputs.query + i < len(shapes.dims) else () for i in range(3)]
    if not all(tensor and all(isinstance(size, int) for size in tensor) for tensor in tensors):
        return None
    given = _is_given(shapes, inputs.mask)
    query, key, value = (_sizes(tensor, heads_first=inputs.heads_first) for tensor in tensors)
    return _Call(
        dtype=dtype_of(shapes, inputs.query),
        query_shape=query,
        key_shape=key,
        value_shape=value,
        mask=given,
        mask_shape=tuple(shapes.dims[inputs.mask]) if given and inputs.mask is not None else (),
        causal=_flag(shapes, inputs.causal),
        dropout=_number(shapes, inputs.dropout),
        strided=any(_is_strided(shapes, inputs.query + i) for i in range(3)),
    )


def _sizes(tensor: Sequence[int], *, heads_first: bool) -> tuple[int, ...]:
    """(batch, heads, tokens, head_dim), where it has four; sequences laid end to end are a batch of one."""
    if heads_first:
        return tuple(tensor)
    if len(tensor) == 3:
        tensor = [1, *tensor]
    return (tensor[0], tensor[2], tensor[1], *tensor[3:]) if len(tensor) == 4 else tuple(tensor)


def _is_given(shapes: OpShapes, place: int | None) -> bool | None:
    if place is None:
        return None
    return 0 <= place < len(shapes.types) and shapes.types[place] not in ("", "Scalar", "None")


def _flag(shapes: OpShapes, place: int | None) -> bool | None:
    told = shapes.concrete[place] if place is not None and place < len(shapes.concrete) else ""
    return {"True": True, "1": True, "2": True, "False": False, "0": False}.get(told)


def _number(shapes: OpShapes, place: int | None) -> float | None:
    try:
        return float(shapes.concrete[place]) if place is not None else None
    except (IndexError, ValueError):
        return None


def _is_strided(shapes: OpShapes, place: int) -> bool:
    strides: Sequence[int] = shapes.strides[place] if place < len(shapes.strides) else []
    return len(strides) > 0 and strides[-1] != 1 and shapes.dims[place][-1] > 1
