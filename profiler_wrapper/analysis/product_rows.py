"""The matrix products of a recording, by their sizes."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from profiler_wrapper.analysis.flops import FlopOps
from profiler_wrapper.analysis.formulas import Product, products_of
from profiler_wrapper.analysis.phase import Phase
from profiler_wrapper.analysis.view_model import ProductRow
from profiler_wrapper.recording.nesting import nearest
from profiler_wrapper.recording.recording import Int64
from profiler_wrapper.recording.shapes import Shapes

if TYPE_CHECKING:
    from profiler_wrapper.analysis.attributed import Attributed


class _Key(NamedTuple):
    op: str
    layer: str
    phase: Phase
    dtype: str
    product: Product


def product_rows(found: Attributed, shapes: Shapes, ops: FlopOps, *, most: int) -> tuple[ProductRow, ...]:
    """A row for each size in each layer and phase, of the ops whose FLOPs count; the `most` expensive, dearest first.

    An op that makes two products (a convolution's backward) divides its time by their FLOPs.
    """
    names, places = found.recording.names, found.attribution.places
    counted = np.flatnonzero(ops.is_counted)
    time_ns = times_inside(found, ops.is_counted)
    known: dict[tuple[int, int], tuple[Product, ...]] = {}
    calls: dict[_Key, int] = defaultdict(int)
    times: dict[_Key, float] = defaultdict(float)
    spans = zip(
        counted.tolist(),
        found.recording.spans.name[counted].tolist(),
        found.attribution.place_of[counted].tolist(),
        time_ns[counted].tolist(),
        strict=True,
    )
    for span, name, at, taken in spans:
        call = (name, shapes.number(span))
        if call not in known:
            known[call] = products_of(names[name], shapes[span])
        place, flops = places[at], sum(product.flops for product in known[call])
        for product in known[call]:
            key = _Key(names[name], found.layer_name(place) or "", place.phase, ops.flops_of(span).dtype, product)
            calls[key] += 1
            times[key] += taken * product.flops / flops if flops else 0.0
    steps = max(1, len(found.steps))
    dearest = sorted(calls, key=lambda key: -times[key])[:most]
    return tuple(_row(key, calls[key] / steps, round(times[key] / steps)) for key in dearest)


def _row(key: _Key, calls_per_step: float, time_ns: int) -> ProductRow:
    return ProductRow(
        op=key.op,
        layer=key.layer,
        phase=key.phase,
        dtype=key.dtype,
        **key.product._asdict(),
        calls_per_step=calls_per_step,
        time_per_step_ns=time_ns,
    )


def times_inside(found: Attributed, chosen: np.typing.NDArray[np.bool_]) -> Int64:
    """Per span that is chosen, the time charged to it and to what it calls, up to the next chosen one."""
    charges = found.charges
    time_ns = np.zeros(len(chosen), dtype=np.int64)
    launched = charges.cpu_span >= 0
    op = nearest(found.nesting.parent, chosen)[charges.cpu_span[launched]]
    np.add.at(time_ns, op[op >= 0], charges.time_ns[launched][op >= 0])
    return time_ns
