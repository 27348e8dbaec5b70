"""Attention made of single ops: a batched product, a softmax, a batched product, in one call of one layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from profiler_wrapper.analysis.attention_calls import attention_made
from profiler_wrapper.recording.nesting import nearest
from profiler_wrapper.recording.recording import Bool, Category, Int64

if TYPE_CHECKING:
    from profiler_wrapper.analysis.attributed import Attributed

_PRODUCTS = frozenset(("aten::bmm", "aten::baddbmm"))
_PROJECTIONS = frozenset(("aten::linear", "aten::mm", "aten::addmm"))
_SOFTMAX = frozenset(("aten::_softmax", "aten::_safe_softmax"))


@dataclass(frozen=True, slots=True)
class UnfusedAttention:
    """All of it in a recording."""

    layers: tuple[str, ...]  # innermost, in order of first calls
    calls: int
    softmax: Bool  # per span: the softmax, and what is in it; with its backward
    products: Bool  # per span: the two products, as above
    whole: Bool  # per span: what its layers do themselves but for projections, and all between its products; as above


def unfused_attention(found: Attributed) -> UnfusedAttention | None:
    """None where there is none.

    A softmax counts whose neighbours, among the products and softmaxes of the same call of a layer, are both
    products. So a router is none (its scores are no batched product), nor is the head of a classifier.
    """
    spans, parent = found.recording.spans, found.nesting.parent
    is_product, is_softmax = _named(found, _PRODUCTS), _named(found, _SOFTMAX)
    if not is_softmax.any() or not is_product.any():
        return None
    places = found.attribution.places
    entered = np.array([place.phase not in ("backward", "optimizer") for place in places], dtype=np.bool_)
    chosen = (is_product | is_softmax) & entered[found.attribution.place_of]
    chosen &= attention_made(found).entry_of < 0  # what torch's own attention is made of is told by its name
    call_of = _calls(found)
    members = np.flatnonzero(chosen)
    members = members[np.lexsort((spans.start_ns[members], call_of[members], spans.lane[members]))]
    first, middle, last = members[:-2], members[1:-1], members[2:]
    fits = is_product[first] & is_softmax[middle] & is_product[last]
    for other in (first, last):
        fits &= (call_of[other] == call_of[middle]) & (spans.lane[other] == spans.lane[middle])
    if not fits.any():
        return None
    softmaxes = middle[fits]
    inside = _between(found, first[fits], last[fits])
    in_projection = nearest(parent, _named(found, _PROJECTIONS)) >= 0
    whole = inside | (np.isin(call_of, call_of[softmaxes[call_of[softmaxes] >= 0]]) & ~in_projection)
    is_softmax[:] = False
    is_softmax[softmaxes] = True
    in_softmax = nearest(parent, is_softmax) >= 0
    is_product[:] = False
    is_product[first[fits]] = is_product[last[fits]] = True
    in_product = nearest(parent, is_product) >= 0
    names = [found.layer_name(places[at]) for at in found.attribution.place_of[softmaxes].tolist()]
    return UnfusedAttention(
        layers=tuple(dict.fromkeys(name for name in names if name)),
        calls=len(softmaxes),
        softmax=_with_backward(found, in_softmax),
        products=_with_backward(found, in_product),
        whole=_with_backward(found, whole),
    )


def _named(found: Attributed, wanted: frozenset[str]) -> Bool:
    spans = found.recording.spans
    by_name = np.array([name in wanted for name in found.recording.names], dtype=np.bool_)
    named: Bool = by_name[spans.name] & (spans.category == Category.CPU_OP)
    return named


def _calls(found: Attributed) -> Int64:
    """Per span the call of a layer that it is in, as the span of it; -1 outside of all."""
    is_call = np.zeros(len(found.nesting.parent), dtype=np.bool_)
    is_call[list(found.tree.layer_of_span)] = True
    return nearest(found.nesting.parent, is_call).astype(np.int64)


def _between(found: Attributed, first: Int64, last: Int64) -> Bool:
    """What lies between the begin of the first and the end of the last on their thread: a dropout is a layer."""
    spans = found.recording.spans
    inside = np.zeros(len(spans), dtype=np.bool_)
    for lane in np.unique(spans.lane[first]).tolist():
        here = np.flatnonzero(spans.lane[first] == lane)
        here = here[np.argsort(spans.start_ns[first[here]], kind="stable")]
        starts, ends = spans.start_ns[first[here]], spans.end_ns[last[here]]
        members = np.flatnonzero((spans.lane == lane) & (spans.category <= Category.RUNTIME))
        at = np.searchsorted(starts, spans.start_ns[members], side="right") - 1
        inside[members] = (at >= 0) & (spans.end_ns[members] <= ends[np.maximum(at, 0)])
    return inside


def _with_backward(found: Attributed, forward: Bool) -> Bool:
    """The same, and the autograd nodes that it made with all that they run."""
    nodes = [link.node for link in found.attribution.links if link.forward_op >= 0 and forward[link.forward_op]]
    of_node = np.zeros(len(forward) + 1, dtype=np.bool_)  # the last one is for "no node"
    of_node[nodes] = True
    in_backward = np.array([place.phase == "backward" for place in found.attribution.places], dtype=np.bool_)
    return forward | (of_node[found.attribution.node_of] & in_backward[found.attribution.place_of])
