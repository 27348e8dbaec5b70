"""Calls of attention, matrix products and convolutions by the sizes of their inputs, and all ops by their shapes.

`aten::scaled_dot_product_attention` was given what the user gave; where a trace has the shapes of the backend's own
op only, that one tells. A backward belongs to the forward call that made its autograd nodes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from profiler_wrapper.place import classes
from profiler_wrapper.place.attention_ops import ATTENTIONS, ENTRY, HOLDING_ATTENTION
from profiler_wrapper.place.names import Phase
from profiler_wrapper.place.placed import Placed
from profiler_wrapper.tables.call_rows import ExpertRow
from profiler_wrapper.tables.model import AttentionCallRow, ProductRow
from profiler_wrapper.tables.statistics import largest_by_key
from profiler_wrapper.tables.views.experts import CHOOSING, expert_rows
from profiler_wrapper.tables.work.flops import FlopOps
from profiler_wrapper.tables.work.formulas import Product, dtype_of, products_of
from profiler_wrapper.trace.arrays import at, sum_by_key
from profiler_wrapper.trace.nesting import nearest, nearest_above
from profiler_wrapper.trace.recording import Bool, Category, Int32, Int64, OpShapes, Shapes


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


def attention_made(placed: Placed, *, ran: Bool | None = None) -> tuple[Int32, dict[int, str]]:
    """Return per span the attention call it works for (-1: none), and the backend of each call that has time.

    Calls are the outermost ops that are attention, in backward those of the forward. A backward op with a name of its
    own is a call itself only where nothing links it to a forward. `ran`: those that count; all where not given.
    """
    recording, parent, attribution = placed.recording, placed.nesting.parent, placed.attribution
    is_attention: Bool = recording.named(lambda name: name == ENTRY) | (placed.work_of.backend_of >= 0)
    is_attention &= recording.spans.category == Category.CPU_OP
    entries = is_attention & (nearest_above(parent, nearest(parent, is_attention)) < 0)
    around = nearest(parent, entries if ran is None else entries & ran)
    forward = at(at(around, attribution.forward_op, -1), attribution.node_of, -1)
    in_backward = at(attribution.in_phases("backward"), attribution.place_of, False)
    entry_of = np.where(in_backward & (forward >= 0), forward, around)
    charges = placed.charges
    chosen = (charges.backend >= 0) & (charges.cpu_span >= 0)
    working = entry_of[charges.cpu_span[chosen]].tolist()
    backends = [classes.BACKENDS[backend] for backend in charges.backend[chosen].tolist()]
    return entry_of, dict(zip(reversed(working), reversed(backends), strict=True))  # as the first op in a call names it


def attention_call_rows(placed: Placed, shapes: Shapes, ops: FlopOps, *, most: int) -> tuple[AttentionCallRow, ...]:
    """Return a row for equal calls in each layer and phase, the `most` expensive of them.

    Time is that of the events that are attention in every other table too: where all calls are described, the rows
    of a layer, phase and backend add up to its `AttentionRow`.
    """
    entry_of, _ = attention_made(placed, ran=ops.ran)
    described: dict[tuple[int, int], _Call | None] = {}
    names, name_of = placed.recording.names, placed.recording.spans.name
    charges, places = placed.charges, placed.attribution.places
    calls: dict[tuple[str, Phase, str, _Call], set[int]] = defaultdict(set)
    times: dict[tuple[str, Phase, str, _Call], int] = defaultdict(int)
    owner = at(entry_of, charges.cpu_span, -1)
    members = np.flatnonzero((owner >= 0) & (charges.backend >= 0))
    columns = (owner, charges.place, charges.backend, charges.time_ns)
    for entry, index, backend, time_ns in zip(*(column[members].tolist() for column in columns), strict=True):
        if entry not in shapes:
            continue
        inputs = (int(name_of[entry]), shapes.number(entry))
        if inputs not in described:
            described[inputs] = _described(names[inputs[0]], shapes[entry])
        if (call := described[inputs]) is not None:
            place = places[index]
            key = (placed.layer_name(place) or "", place.phase, classes.BACKENDS[backend], call)
            calls[key].add(entry)
            times[key] += time_ns
    steps = max(1, len(placed.steps))
    return tuple(
        AttentionCallRow(
            layer=layer,
            phase=phase,
            backend=backend,
            **call._asdict(),
            grouped=len(call.query_shape) == len(call.key_shape) == 4 and call.key_shape[1] < call.query_shape[1],
            calls_per_step=len(calls[layer, phase, backend, call]) / steps,
            time_per_step_ns=round(times[layer, phase, backend, call] / steps),
        )
        for layer, phase, backend, call in sorted(calls, key=lambda key: -times[key])[:most]
    )


# --- what they were given -----------------------------------------------------------------------


def _described(name: str, shapes: OpShapes) -> _Call | None:
    """Return what a call of attention was given; None where the inputs are not those of attention."""
    inputs = ATTENTIONS.get(name) or HOLDING_ATTENTION.get(name)
    if inputs is None:
        return None
    tensors = [shapes.dims[inputs.query + i] if inputs.query + i < len(shapes.dims) else () for i in range(3)]
    if not all(tensor and all(isinstance(size, int) for size in tensor) for tensor in tensors):
        return None
    mask = inputs.mask
    given = None if mask is None else 0 <= mask < len(shapes.types) and shapes.types[mask] not in ("", "Scalar", "None")
    query, key, value = (_sizes(tensor, heads_first=inputs.heads_first) for tensor in tensors)
    return _Call(
        dtype=dtype_of(shapes, inputs.query),
        query_shape=query,
        key_shape=key,
        value_shape=value,
        mask=given,
        mask_shape=tuple(shapes.dims[mask]) if given and mask is not None else (),
        causal=_flag(shapes, inputs.causal),
        dropout=_number(shapes, inputs.dropout),
        strided=any(_is_strided(shapes, inputs.query + i) for i in range(3)),
    )


def _sizes(tensor: Sequence[int], *, heads_first: bool) -> tuple[int, ...]:
    """Return (batch, heads, tokens, head_dim), where it has four; sequences laid end to end are a batch of one."""
    if heads_first:
        return tuple(tensor)
    if len(tensor) == 3:
        tensor = [1, *tensor]
    return (tensor[0], tensor[2], tensor[1], *tensor[3:]) if len(tensor) == 4 else tuple(tensor)


def _flag(shapes: OpShapes, place: int | None) -> bool | None:
    flag = shapes.concrete[place] if place is not None and place < len(shapes.concrete) else ""
    return {"True": True, "1": True, "2": True, "False": False, "0": False}.get(flag)


def _number(shapes: OpShapes, place: int | None) -> float | None:
    try:
        return float(shapes.concrete[place]) if place is not None else None
    except (IndexError, ValueError):
        return None


def _is_strided(shapes: OpShapes, place: int) -> bool:
    strides: Sequence[int] = shapes.strides[place] if place < len(shapes.strides) else []
    return len(strides) > 0 and strides[-1] != 1 and shapes.dims[place][-1] > 1


# --- The matrix products of a recording, by their sizes ---


def product_rows(placed: Placed, shapes: Shapes, ops: FlopOps, *, most: int) -> tuple[ProductRow, ...]:
    """Return a row per size, layer and phase of the ops whose FLOPs count, the `most` expensive first.

    An op that makes two products (a convolution's backward) divides its time by their FLOPs.
    """
    names, places = placed.recording.names, placed.attribution.places
    counted = np.flatnonzero(ops.is_counted)
    time_ns = times_inside(placed, ops.is_counted)
    known: dict[tuple[int, int], tuple[Product, ...]] = {}
    calls: dict[tuple[str, str, Phase, str, Product], int] = defaultdict(int)
    times: dict[tuple[str, str, Phase, str, Product], float] = defaultdict(float)
    columns = (placed.recording.spans.name, placed.attribution.place_of, time_ns)
    for span, name, index, taken in zip(
        counted.tolist(), *(column[counted].tolist() for column in columns), strict=True
    ):
        call = (name, shapes.number(span))
        if call not in known:
            known[call] = products_of(names[name], shapes[span])
        place, flops = places[index], sum(product.flops for product in known[call])
        for product in known[call]:
            key = (names[name], placed.layer_name(place) or "", place.phase, ops.flops_of(span).dtype, product)
            calls[key] += 1
            times[key] += taken * product.flops / flops if flops else 0.0
    steps = max(1, len(placed.steps))
    return tuple(
        ProductRow(
            op=op,
            layer=layer,
            phase=phase,
            dtype=dtype,
            **product._asdict(),
            calls_per_step=calls[op, layer, phase, dtype, product] / steps,
            time_per_step_ns=round(times[op, layer, phase, dtype, product] / steps),
        )
        for op, layer, phase, dtype, product in sorted(calls, key=lambda key: -times[key])[:most]
    )


def times_inside(placed: Placed, chosen: np.typing.NDArray[np.bool_]) -> Int64:
    """Return per chosen span the time charged to it and to what it calls, up to the next chosen one."""
    op = at(nearest(placed.nesting.parent, chosen), placed.charges.cpu_span, -1)
    return sum_by_key(op[op >= 0], placed.charges.time_ns[op >= 0], len(chosen))


# --- What the shapes of a trace say of its products and attention: sizes, types, backends ---

MOST_ROWS = 200  # of products, and of calls of attention
_MOST_SHAPES = 5  # of one op
_LONGEST = 200  # characters of one entry of `shapes_of_op`


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeRows:
    """Empty where no shapes were recorded."""

    products: tuple[ProductRow, ...] = ()
    attention_calls: tuple[AttentionCallRow, ...] = ()
    experts: tuple[ExpertRow, ...] = ()
    notes: tuple[str, ...] = ()  # what could not be worked out
    shapes_of_op: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # of its inputs, the most frequent first


def shape_rows(placed: Placed, shapes: Shapes, ops: FlopOps) -> ShapeRows:
    """Return what the shapes of an attributed recording say; `ops` are those of it."""
    return ShapeRows(
        products=product_rows(placed, shapes, ops, most=MOST_ROWS),
        attention_calls=attention_call_rows(placed, shapes, ops, most=MOST_ROWS),
        experts=expert_rows(placed, shapes, ops),
        shapes_of_op=_shapes_of_op(placed, shapes, ops),
    )


def _shapes_of_op(placed: Placed, shapes: Shapes, ops: FlopOps) -> dict[str, tuple[str, ...]]:
    """Return by the name of an op the most frequent shapes of its inputs as text."""
    spans, numbers = shapes.arrays()
    ran = ops.ran[spans] & ~placed.recording.named(CHOOSING.__eq__)[spans]
    names = placed.recording.spans.name[spans[ran]].astype(np.int64)
    frequent = largest_by_key(names, numbers[ran].astype(np.int64), np.ones(len(names), dtype=np.int64), _MOST_SHAPES)
    texts = {}
    for name, chosen in frequent.items():
        if kept := [text for number in chosen if (text := _text(shapes.numbered(number)))]:
            texts[placed.recording.names[name]] = tuple(dict.fromkeys(kept))
    return texts


def _text(shapes: OpShapes) -> str:
    """Write the tensors among the inputs: `float32[2, 16, 64], float32[64]`; `8 tensors` for a list of them."""
    text = ", ".join(filter(None, (_input(shapes, place, dims) for place, dims in enumerate(shapes.dims))))
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _input(shapes: OpShapes, place: int, dims: Any) -> str:
    if dims and isinstance(dims, list) and isinstance(dims[0], list):
        return f"{len(dims)} tensors"
    return f"{dtype_of(shapes, place)}{dims}" if dims else ""
