"""Attention that a faster kernel could have done: fallen back from flash, or made of single ops."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

import numpy as np

from profiler_wrapper.advice.facts import Facts, count, duration, where
from profiler_wrapper.place.attention_ops import FAST_PATH_PARTS, SLOWER_BACKENDS
from profiler_wrapper.place.placed import Placed
from profiler_wrapper.tables.model import AttentionCallRow, Finding
from profiler_wrapper.tables.views.products import attention_made
from profiler_wrapper.trace.arrays import at, grouped, in_order, marked
from profiler_wrapper.trace.nesting import nearest
from profiler_wrapper.trace.recording import Bool, Category, Int64

ID = "attention-fallback"

# --- why torch took no faster backend --------------------------------------------------------------
#
# The conditions that it asks for itself, both in pytorch's aten/src/ATen/native/transformers: on CUDA
# `can_use_flash_attention` and `can_use_mem_efficient_attention` in cuda/sdp_utils.cpp, on a CPU
# `use_flash_attention_cpp` in sdp_utils_cpp.cpp (torch 2.11 to 2.13).
# `torch.backends.cuda.can_use_flash_attention(params, debug=True)` says the same as warnings.

_CPU_TYPES = ("float32", "float64", "bfloat16", "float16")
_LOW_PRECISION = ("float16", "bfloat16")
_LARGEST_HEAD = 256
_FIRST_WITH_FLASH = (8, 0)
# Where the backward of flash attention has no kernels for large heads: compute capability, both ends included.
_SMALL_SHARED_MEMORY = (((8, 6), (8, 9)), ((12, 0), (12, 1)))

Cause = Literal[
    "switched off", "dimensions", "mask", "mask shape", "head_dim", "device", "causal", "dtype", "dropout", "strides"
]


class Reason(NamedTuple):
    """One condition that a call does not meet."""

    cause: Cause
    text: str


class Machine(NamedTuple):
    """Where it ran, as far as that is known."""

    is_cuda: bool
    capability: tuple[int, int] | None
    switches: Mapping[str, bool]  # of `torch.backends.cuda`: "flash", "mem_efficient" ...
    trains: bool  # there is a backward


def why_not_flash(call: AttentionCallRow, machine: Machine) -> tuple[Reason, ...]:
    """Return the conditions of flash attention that a call does not meet; empty where all that are known are met."""
    queries, keys, widths = _tokens(call.query_shape), _tokens(call.key_shape), _widths(call)
    unlike: _Condition = ("head_dim", len(set(widths)) > 1, f"head_dims of queries, keys, values differ: {widths}")
    if not machine.is_cuda:
        mask = _times(call.mask_shape)
        return _unmet(
            *_of_any_fused("flash", call, machine),
            ("mask shape", not _mask_fits_on_a_cpu(call), f"a mask of {mask}, not of two or of the scores' dimensions"),
            ("dropout", call.dropout, f"dropout of {call.dropout or 0:g}, which it does not take on a CPU"),
            unlike,
            ("dtype", call.dtype not in ("", *_CPU_TYPES), f"it computes in {call.dtype}"),
        )
    width, capability = min(widths, default=0), machine.capability
    version = ".".join(map(str, capability or ()))
    small = capability is not None and any(first <= capability <= last for first, last in _SMALL_SHARED_MEMORY)
    no_backward = small and machine.trains and (192 < width <= 224 or (224 < width <= 256 and call.dropout))
    too_old = capability is not None and capability < _FIRST_WITH_FLASH
    return _unmet(
        *_of_any_fused("flash", call, machine),
        ("mask", call.mask, "a mask was given as a tensor, which it does not take"),
        unlike,
        ("head_dim", width > _LARGEST_HEAD, f"a head_dim of {width}; it goes up to {_LARGEST_HEAD}"),
        ("head_dim", no_backward, f"training with a head_dim of {width} on compute capability {version}"),
        ("device", too_old, f"it needs compute capability 8.0, this is {version}"),
        ("causal", call.causal and queries != keys, f"is_causal with {queries} queries on {keys} keys"),
        ("dtype", call.dtype not in ("", *_LOW_PRECISION), f"it computes in {call.dtype}, not in 16 bits"),
    )


def why_not_efficient(call: AttentionCallRow, machine: Machine) -> tuple[Reason, ...]:
    """Return the conditions of memory-efficient attention, of CUDA only, that a call does not meet."""
    before_ampere = machine.capability is not None and machine.capability < _FIRST_WITH_FLASH
    types = ("", "float16", "float32") if before_ampere else ("", "float16", "bfloat16", "float32")
    multiple, widths = 8 if call.dtype in _LOW_PRECISION else 4, _widths(call)
    return _unmet(
        *_of_any_fused("mem_efficient", call, machine),
        ("dtype", call.dtype not in types, f"it computes in {call.dtype}"),
        ("head_dim", any(width % multiple for width in widths), f"a head_dim that is no multiple of {multiple}"),
    )


_Condition = tuple[Cause, object, str]  # what it is about, whether a call fails it, in words


def _unmet(*conditions: _Condition) -> tuple[Reason, ...]:
    return tuple(Reason(cause, text) for cause, fails, text in conditions if fails)


def _of_any_fused(backend: str, call: AttentionCallRow, machine: Machine) -> Iterator[_Condition]:
    """Yield the conditions of every fused backend."""
    query, key = call.query_shape, call.key_shape
    four = len(query) == len(key) == 4
    off = f"it is switched off: torch.backends.cuda.enable_{backend}_sdp(False)"
    yield "switched off", not machine.switches.get(backend, True), off
    yield "dimensions", not four, f"the query has {len(query)} dimensions ({_times(query)}), not 4"
    yield "dimensions", four and query[0] != key[0], "batches of queries and keys differ"
    yield "strides", call.strided, "the last dimension of an input is not dense in memory"


def _mask_fits_on_a_cpu(call: AttentionCallRow) -> bool:
    """Return whether the mask is a matrix or has the four dimensions of the scores, each of its size or 1."""
    mask, scores = call.mask_shape, (*call.query_shape[:2], _tokens(call.query_shape), _tokens(call.key_shape))
    if not mask or len(scores) != 4:
        return True
    return len(mask) in (2, 4) and all(size in (1, wish) for size, wish in zip(mask, scores[-len(mask) :], strict=True))


def _times(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _widths(call: AttentionCallRow) -> tuple[int, ...]:
    """Return the head_dims of queries, keys and values; empty where not all are known."""
    shapes = (call.query_shape, call.key_shape, call.value_shape)
    return tuple(shape[-1] for shape in shapes) if all(shapes) else ()


def _tokens(shape: tuple[int, ...]) -> int | None:
    return shape[-2] if len(shape) >= 2 else None


_FIXES: dict[Cause, str] = {
    "switched off": "switch it on: torch.backends.cuda.enable_flash_sdp(True), or leave sdpa_kernel(...) away",
    "dimensions": "queries, keys and values of (batch, heads, tokens, head_dim): x.unsqueeze(0), or expand them",
    "mask": "is_causal=True instead of a causal mask; for padding, packed sequences or flex_attention",
    "mask shape": "a mask of (queries, keys) or (batch, heads, queries, keys), where 1 stands for all",
    "head_dim": "a head_dim of at most 256, the same for queries, keys and values (pad the values)",
    "device": "memory-efficient attention is the fastest that this device has: float16, a head_dim that 8 divides",
    "causal": "as many keys as queries, or a causal bias: torch.nn.attention.bias.causal_lower_right",
    "dtype": "bfloat16: with torch.autocast(device_type, dtype=torch.bfloat16)",
    "dropout": "attention without dropout: dropout_p=0; in configs attention_dropout, attn_pdrop or "
    "attention_probs_dropout_prob",
    "strides": "inputs that are dense in the last dimension: x.contiguous()",
}
_UNKNOWN_FIX = (
    "find out why: torch.backends.cuda.can_use_flash_attention(params, debug=True); is an sdpa_kernel(...) around it?"
)


def attention_fallback(facts: Facts) -> Iterator[Finding]:
    """Find calls of scaled-dot-product attention that ran with a slower backend than the machine has."""
    device, found = facts.device, facts.found
    if device is not None and device.compute_capability is None:
        return  # the conditions are those of CUDA and of CPUs
    if not any(row.backend in SLOWER_BACKENDS for row in facts.analysis.attention):
        return
    entry_of, backend_of = attention_made(found)
    entries = grouped(
        ((found.layer_name(found.attribution.place(entry)) or "", backend), entry)
        for entry, backend in backend_of.items()
        if entry >= 0 and backend in SLOWER_BACKENDS and found.recording.name_of(entry) not in FAST_PATH_PARTS
    )
    # The most expensive call of each tells, of forward if there is one.
    rows = sorted(facts.analysis.attention_calls, key=lambda row: row.phase == "backward")
    calls = {(row.layer, row.backend): row for row in reversed(rows)}
    machine = Machine(
        is_cuda=device is not None,
        capability=device.compute_capability if device is not None else None,
        switches=facts.analysis.run.get("attention_backends") or {},
        trains=any(row.phase == "backward" for row in facts.analysis.layers),
    )
    why = {key: _reasons(key[1], calls.get(key), machine) for key in entries}
    groups = grouped(((key[1], reasons), key) for key, reasons in why.items() if reasons is not None)
    for (backend, reasons), members in groups.items():
        chosen = np.isin(entry_of, [entry for key in members for entry in entries[key]])
        timed = at(chosen, found.charges.cpu_span, False) & (found.charges.backend >= 0)  # as in the table
        if time_ns := facts.per_step_ns(found.charges.time_ns[timed]):
            layers = [layer for layer, _ in members]
            known = any(key in calls for key in members)
            because = reasons[0].text if reasons else "its inputs meet all conditions" if known else "inputs unknown"
            number = sum(len(entries[key]) for key in members) / facts.steps
            name = backend.replace("mem_efficient", "memory-efficient")
            yield facts.finding(
                ID,
                f"attention ran with the {name} backend, not flash: {because}",
                f"{count(number, 'call')} a step in {where(layers)}: {duration(time_ns)} of {facts.time_name}",
                share=facts.of_work(time_ns),
                saves_ns=facts.saved_at_most_ns(chosen) if facts.on_device else time_ns,
                saves_bytes=_kept_bytes(facts, layers) if backend == "math" else None,
                confidence="high" if reasons and backend == "math" else "medium",
                fix=_FIXES[reasons[0].cause] if reasons else _UNKNOWN_FIX,
                layers=layers,
                rows=("attention",),
                details={"backend": backend, "causes": [reason.cause for reason in reasons], "time_ns": time_ns},
            )


def _reasons(backend: str, call: AttentionCallRow | None, machine: Machine) -> tuple[Reason, ...] | None:
    """Return why a call is not faster, as far as its inputs are known; None where the device has nothing faster."""
    reasons = why_not_flash(call, machine) if call is not None else ()
    if call is None or all(reason.cause != "device" for reason in reasons):
        return reasons
    return None if backend == "mem_efficient" else why_not_efficient(call, machine) or None


def _kept_bytes(facts: Facts, layers: Iterable[str]) -> int | None:
    """Return what these layers keep for backward, and the most that one of them needs while it runs."""
    rows = [row for layer in layers for row in facts.rows_of.get(layer, ()) if row.phase != "backward"]
    rows = [row for row in rows if row.self_retained_bytes is not None]
    if not rows:
        return None
    kept = sum(row.self_retained_bytes or 0 for row in rows if row.phase == "forward")
    runs = [(row.peak_bytes, row.entry_allocated_bytes) for row in rows]
    needed = max((peak - entry for peak, entry in runs if peak is not None and entry is not None), default=0)
    return min(round(kept + max(0, needed)), facts.peak_bytes or sys.maxsize)


# --- made of single ops -------------------------------------------------------------------------

_PRODUCTS = frozenset(("aten::bmm", "aten::baddbmm"))
_PROJECTIONS = frozenset(("aten::linear", "aten::mm", "aten::addmm"))
_SOFTMAX = frozenset(("aten::_softmax", "aten::_safe_softmax"))


def attention_unfused(facts: Facts) -> Iterator[Finding]:
    """Find attention made of single ops: a softmax between two batched products.

    A softmax counts whose neighbours, among the products and softmaxes of the same call of a layer, are both
    products. So a router is none (its scores are no batched product), nor is the head of a classifier.
    """
    found, attribution, parent = facts.found, facts.found.attribution, facts.found.nesting.parent
    spans = found.recording.spans
    is_product, is_softmax, is_projection = (
        (spans.category == Category.CPU_OP) & found.recording.named(names.__contains__)
        for names in (_PRODUCTS, _SOFTMAX, _PROJECTIONS)
    )
    if not is_softmax.any() or not is_product.any():
        return
    chosen = (is_product | is_softmax) & ~attribution.in_phases("backward", "optimizer")[attribution.place_of]
    chosen &= attention_made(found)[0] < 0  # torch's own attention has its name
    # The span of the layer's call around; -1 outside of all.
    call_of = nearest(parent, marked(len(parent), found.tree.layer_of_span))
    members = np.flatnonzero(chosen)
    members = members[np.lexsort((spans.start_ns[members], call_of[members], spans.lane[members]))]
    first, middle, last = members[:-2], members[1:-1], members[2:]
    fits = is_product[first] & is_softmax[middle] & is_product[last]
    for other in (first, last):
        fits &= (call_of[other] == call_of[middle]) & (spans.lane[other] == spans.lane[middle])
    if not fits.any():
        return
    first, softmaxes, last = first[fits], middle[fits], last[fits]
    # What its layers do themselves but for projections, and all between its products.
    whole = np.isin(call_of, call_of[softmaxes[call_of[softmaxes] >= 0]]) & (nearest(parent, is_projection) < 0)
    whole = _with_backward(found, whole | _between(found, first, last))
    time_ns = facts.time_of_ns(whole)
    softmax_ns, products_ns = (
        facts.time_of_ns(_with_backward(found, nearest(parent, marked(len(parent), ops)) >= 0))
        for ops in (softmaxes, np.concatenate((first, last)))
    )
    places = [attribution.places[place] for place in attribution.place_of[softmaxes].tolist()]
    layers = list(filter(None, dict.fromkeys(map(found.layer_name, places))))
    eager = facts.analysis.run.get("attention_implementation") == "eager"
    rows = (row for row in facts.analysis.operators if row.op in ("aten::softmax", "aten::_softmax"))
    yield facts.finding(
        ID,
        f"attention is made of single ops, a softmax between two products: {facts.work_text(time_ns)}",
        f"{duration(time_ns)} of {facts.time_name} a step but for projections: the softmax {duration(softmax_ns)}, "
        f"the two products {duration(products_ns)}; a fused kernel never writes the scores to memory",
        share=facts.of_work(time_ns),
        saves_ns=facts.saved_at_most_ns(whole),
        saves_bytes=_kept_bytes(facts, layers),
        confidence="high" if eager or facts.device is None or facts.device.compute_capability else "medium",
        fix='attn_implementation="sdpa" when the model is made'
        if eager
        else 'torch.nn.functional.scaled_dot_product_attention(q, k, v, ...); in Transformers "sdpa"',
        source=next((row.sources[0] for row in rows if row.sources), None),
        layers=layers,
        rows=("layers.layer,layers.phase,layers.calls,layers.self_time_us,layers.time_us", "kind=attention"),
        details={
            "backend": "none",
            "time_ns": time_ns,
            "softmax_ns": softmax_ns,
            "products_ns": products_ns,
            "calls_per_step": len(softmaxes) / facts.steps,
        },
    )


def _between(found: Placed, first: Int64, last: Int64) -> Bool:
    """Mark what runs between a first and a last op on their thread, as a dropout that is a layer of its own."""
    spans = found.recording.spans
    inside = np.zeros(len(spans), dtype=np.bool_)
    for lane in np.unique(spans.lane[first]).tolist():
        here = in_order(np.flatnonzero(spans.lane[first] == lane), spans.start_ns[first])
        starts, ends = spans.start_ns[first[here]], spans.end_ns[last[here]]
        members = np.flatnonzero((spans.lane == lane) & (spans.category <= Category.RUNTIME))
        at = np.searchsorted(starts, spans.start_ns[members], side="right") - 1
        inside[members] = (at >= 0) & (spans.end_ns[members] <= ends[np.maximum(at, 0)])
    return inside


def _with_backward(found: Placed, forward: Bool) -> Bool:
    """Mark the same spans, and the autograd nodes that they made with all that these run."""
    attribution = found.attribution
    of_node = np.append(np.append(forward, False)[attribution.forward_op], False)  # the last one is for "no node"
    return forward | (of_node[attribution.node_of] & attribution.in_phases("backward")[attribution.place_of])


RULES = (attention_fallback, attention_unfused)
