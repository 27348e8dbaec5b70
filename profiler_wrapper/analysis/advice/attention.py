"""Attention that a faster kernel could have done: fallen back from flash, or made of single ops."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from profiler_wrapper.analysis.advice.facts import (
    NS_PER_US,
    Facts,
    Rule,
    at_peak_ns,
    count,
    device_of,
    duration,
    peak_flops_per_s,
    saved_at_most_ns,
    share,
    size,
    time_of_ns,
    where,
)
from profiler_wrapper.analysis.attention_ops import FAST_PATH_PARTS
from profiler_wrapper.analysis.model import AttentionCallRow, Finding
from profiler_wrapper.analysis.views.products import attention_made
from profiler_wrapper.trace.nesting import nearest
from profiler_wrapper.trace.recording import Bool, Category, Int64

if TYPE_CHECKING:
    from profiler_wrapper.analysis.attributed import Attributed


# --------------------------------------------------------------------------------------------------
# Why torch took no faster backend for a call of attention: the conditions that it asks for itself.
#
# Sources, both in pytorch's aten/src/ATen/native/transformers: on CUDA `can_use_flash_attention` and
# `can_use_mem_efficient_attention` in cuda/sdp_utils.cpp, on a CPU `use_flash_attention_cpp` in sdp_utils_cpp.cpp
# (torch 2.11 to 2.13). `torch.backends.cuda.can_use_flash_attention(params, debug=True)` says the same as warnings.

_CPU_TYPES = ("float32", "float64", "bfloat16", "float16")
_LOW_PRECISION = ("float16", "bfloat16")
_LARGEST_HEAD = 256
_NOT_ON_A_CPU = "which flash attention on a CPU does not take"
_MASK_ON_A_CPU = "not of two or of the scores' four dimensions"
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
    """The conditions of flash attention that the call does not meet; empty where all that are known are met."""
    queries, keys = _tokens(call.query_shape), _tokens(call.key_shape)
    widths = _widths(call)
    unlike = len(set(widths)) > 1
    each = ", ".join(f"{width} of {what}" for width, what in zip(widths, ("queries", "keys", "values"), strict=False))
    unlike_heads: _Condition = ("head_dim", unlike, f"head_dims differ: {each}")
    if not machine.is_cuda:
        return _unmet(
            *_of_any_fused("flash", call, machine),
            ("mask shape", not _mask_fits_on_a_cpu(call), f"a mask of {_times(call.mask_shape)}, {_MASK_ON_A_CPU}"),
            ("dropout", call.dropout, f"dropout of {call.dropout or 0:g}, {_NOT_ON_A_CPU}"),
            unlike_heads,
            ("dtype", call.dtype not in ("", *_CPU_TYPES), f"it computes in {call.dtype}, {_NOT_ON_A_CPU}"),
        )
    width, capability = max(widths, default=0), machine.capability
    version = ".".join(map(str, capability or ()))
    small = capability is not None and any(first <= capability <= last for first, last in _SMALL_SHARED_MEMORY)
    no_backward = small and machine.trains and (192 < width <= 224 or (width > 224 and call.dropout))
    too_old = capability is not None and capability < _FIRST_WITH_FLASH
    in_training = f"training with a head_dim of {width}, which flash attention does not take on compute capability"
    return _unmet(
        *_of_any_fused("flash", call, machine),
        ("mask", call.mask, "a mask was given as a tensor, which flash attention does not take"),
        unlike_heads,
        (
            "head_dim",
            not unlike and width > _LARGEST_HEAD,
            f"a head_dim of {width}; flash attention goes up to {_LARGEST_HEAD}",
        ),
        ("head_dim", not unlike and width <= _LARGEST_HEAD and no_backward, f"{in_training} {version}"),
        ("device", too_old, f"flash attention needs compute capability 8.0, this is {version}"),
        (
            "causal",
            call.causal and queries != keys,
            f"is_causal with {queries} queries on {keys} keys: flash attention wants as many of each",
        ),
        (
            "dtype",
            call.dtype not in ("", *_LOW_PRECISION),
            f"it computes in {call.dtype}; flash attention in bfloat16 and float16 only",
        ),
    )


def why_not_efficient(call: AttentionCallRow, machine: Machine) -> tuple[Reason, ...]:
    """The conditions of memory-efficient attention, of CUDA only, that the call does not meet."""
    before_ampere = machine.capability is not None and machine.capability < _FIRST_WITH_FLASH
    types = ("", "float16", "float32") if before_ampere else ("", "float16", "bfloat16", "float32")
    multiple = 8 if call.dtype in _LOW_PRECISION else 4
    widths = _widths(call)
    return _unmet(
        *_of_any_fused("mem_efficient", call, machine),
        ("dtype", call.dtype not in types, f"it computes in {call.dtype}"),
        (
            "head_dim",
            any(width % multiple for width in widths),
            f"a head_dim of {max(widths[:1], default=0)} is no multiple of {multiple}",
        ),
    )


_Condition = tuple[Cause, object, str]  # what it is about, whether a call fails it, in words


def _unmet(*conditions: _Condition) -> tuple[Reason, ...]:
    return tuple(Reason(cause, text) for cause, fails, text in conditions if fails)


def _of_any_fused(backend: str, call: AttentionCallRow, machine: Machine) -> Iterator[_Condition]:
    """What every fused backend asks for."""
    query, key = call.query_shape, call.key_shape
    off = f"it is switched off: torch.backends.cuda.enable_{backend}_sdp(False)"
    yield "switched off", not machine.switches.get(backend, True), off
    four = len(query) == len(key) == 4
    yield "dimensions", not four, f"the query has {len(query)} dimensions ({_times(query)}), not 4"
    batches = " of queries, ".join(str(shape[0]) for shape in (query, key) if shape)
    yield "dimensions", four and query[0] != key[0], f"batches differ: {batches} of keys"
    yield "strides", call.strided, "the last dimension of an input is not dense in memory"


def _mask_fits_on_a_cpu(call: AttentionCallRow) -> bool:
    """It may be a matrix, or have the four dimensions of the scores; each its size or 1."""
    mask, scores = call.mask_shape, (*call.query_shape[:2], _tokens(call.query_shape), _tokens(call.key_shape))
    if not mask or len(scores) != 4:
        return True
    return len(mask) in (2, 4) and all(size in (1, wish) for size, wish in zip(mask, scores[-len(mask) :], strict=True))


def _times(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _widths(call: AttentionCallRow) -> tuple[int, ...]:
    """Of queries, keys and values; empty where not all are known."""
    shapes = (call.query_shape, call.key_shape, call.value_shape)
    return tuple(shape[-1] for shape in shapes) if all(shapes) else ()


def _tokens(shape: tuple[int, ...]) -> int | None:
    return shape[-2] if len(shape) >= 2 else None


# --------------------------------------------------------------------------------------------------
# Attention made of single ops: a batched product, a softmax, a batched product, in one call of one layer.

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
    places, place_of = found.attribution.places, found.attribution.place_of
    chosen = (is_product | is_softmax) & ~found.attribution.in_phases("backward", "optimizer")[place_of]
    chosen &= attention_made(found).entry_of < 0  # torch's own attention has its name
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
    names = [found.layer_name(places[at]) for at in place_of[softmaxes].tolist()]
    return UnfusedAttention(
        layers=tuple(dict.fromkeys(name for name in names if name)),
        calls=len(softmaxes),
        softmax=_with_backward(found, in_softmax),
        products=_with_backward(found, in_product),
        whole=_with_backward(found, whole),
    )


def _named(found: Attributed, wanted: frozenset[str]) -> Bool:
    is_op: Bool = found.recording.spans.category == Category.CPU_OP
    return is_op & found.recording.named(wanted.__contains__)


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
    attribution = found.attribution
    of_node = np.append(np.append(forward, False)[attribution.forward_op], False)  # the last one is for "no node"
    return forward | (of_node[attribution.node_of] & attribution.in_phases("backward")[attribution.place_of])


ID = "attention-fallback"
_SLOWER = ("math", "mem_efficient")
_ENTERED = ("forward", "recompute", "prefill", "decode", "other")
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


@dataclass
class _Fallen:
    """Calls of one backend that fell back for the same reasons."""

    backend: str
    reasons: tuple[Reason, ...]
    rows: list[AttentionCallRow] = field(default_factory=list)
    layers: dict[str, None] = field(default_factory=dict)


def attention_fallback(facts: Facts) -> Iterator[Finding]:
    """Calls of scaled-dot-product attention that ran with a slower backend than the machine has."""
    device = device_of(facts)
    if device is not None and device.compute_capability is None:
        return  # the conditions are those of CUDA and of CPUs
    if not any(row.backend in _SLOWER for row in facts.analysis.attention):
        return
    made = attention_made(facts.found)
    entries: dict[tuple[str, str], list[int]] = defaultdict(list)
    places, place_of = facts.found.attribution.places, facts.found.attribution.place_of
    recording = facts.found.recording
    for entry, backend in made.backend_of.items():
        if entry >= 0 and backend in _SLOWER and recording.name_of(entry) not in FAST_PATH_PARTS:
            entries[facts.found.layer_name(places[int(place_of[entry])]) or "", backend].append(entry)
    for fallen in _fallen(facts, entries):
        yield from _of_backend(facts, fallen, entries, made.entry_of)


def _fallen(facts: Facts, entries: Iterable[tuple[str, str]]) -> Iterable[_Fallen]:
    """The layers and backends by why they are not faster; what needs no finding is left out."""
    machine, device = _machine(facts), device_of(facts)
    rows: dict[tuple[str, str], list[AttentionCallRow]] = defaultdict(list)
    for row in facts.analysis.attention_calls:
        rows[row.layer, row.backend].append(row)
    groups: dict[tuple[object, ...], _Fallen] = {}
    for layer, backend in entries:
        of_layer = rows.get((layer, backend), [])
        entered = next((row for row in of_layer if row.phase in _ENTERED), of_layer[0] if of_layer else None)
        reasons = why_not_flash(entered, machine) if entered is not None else ()
        if device is not None and any(reason.cause == "device" for reason in reasons):
            if backend == "mem_efficient" or entered is None:
                continue  # the best that there is
            reasons = why_not_efficient(entered, machine)
            if not reasons:
                continue
        fallen = groups.setdefault((backend, reasons), _Fallen(backend, reasons))
        fallen.rows += of_layer
        fallen.layers[layer] = None
    return groups.values()


def _machine(facts: Facts) -> Machine:
    device = device_of(facts)
    switches = facts.analysis.run.get("attention_backends")
    return Machine(
        is_cuda=device is not None,
        capability=device.compute_capability if device is not None else None,
        switches=switches if isinstance(switches, dict) else {},
        trains=any(row.phase == "backward" for row in facts.analysis.layers),
    )


def _of_backend(
    facts: Facts, fallen: _Fallen, entries: dict[tuple[str, str], list[int]], entry_of: np.typing.NDArray[np.int32]
) -> Iterator[Finding]:
    members = [entry for layer in fallen.layers for entry in entries[layer, fallen.backend]]
    chosen = np.isin(entry_of, members)
    time_ns = time_of_ns(facts, chosen)
    if not time_ns:
        return
    least_ns = _least_ns(facts, fallen.rows) if facts.on_device else 0.0
    saved_ns = saved_at_most_ns(facts, chosen, stays_ns=least_ns)
    cause: Cause | None = fallen.reasons[0].cause if fallen.reasons else None
    known = bool(fallen.rows)
    why = fallen.reasons[0].text if fallen.reasons else "its inputs meet all conditions" if known else "inputs unknown"
    calls = count(len(members) / facts.steps, "call")
    name = fallen.backend.replace("mem_efficient", "memory-efficient")
    left = f", but for the {duration(least_ns)} that its products take at the peak" if least_ns else ""
    yield facts.finding(
        id=ID,
        title=f"attention ran with the {name} backend, not flash: {why}",
        share=facts.share_of_work(time_ns),
        saves_ns=saved_ns,
        saves_bytes=_kept_bytes(facts, fallen.layers) if fallen.backend == "math" else None,
        evidence=(
            f"{calls} a step in {where(fallen.layers)}: {duration(time_ns)} of {facts.time_name} a step",
            *(f"not flash, because {reason.text}" for reason in fallen.reasons[:2]),
            *_sizes(fallen.rows),
            f"saves at most: as if {'its kernels and their launches' if facts.on_device else 'attention'} took no time "
            f"at all{left}",
        ),
        confidence="high" if fallen.reasons and fallen.backend == "math" else "medium",
        fix=_FIXES[cause] if cause is not None else _UNKNOWN_FIX,
        layers=tuple(fallen.layers),
        details={
            "backend": fallen.backend,
            "causes": [reason.cause for reason in fallen.reasons],
            "time_us": time_ns / NS_PER_US,
        },
    )


def _sizes(rows: Iterable[AttentionCallRow]) -> list[str]:
    row = next(iter(rows), None)
    if row is None:
        return []
    given = f"mask {_value_text(row.mask)}, dropout {_value_text(row.dropout)}"
    return [f"{row.dtype}, queries {_times(row.query_shape)}, keys {_times(row.key_shape)}, {given}"]


def _value_text(value: object) -> str:
    return {True: "given", False: "none", None: "not known"}.get(value, str(value))  # type: ignore[call-overload, no-any-return]


def _least_ns(facts: Facts, rows: Iterable[AttentionCallRow]) -> float:
    """What its products take in a step at the peak of 16-bit numbers: no kernel is faster. 0 where that is not known.

    Forward two products; backward four, the scores again left out. With a mask nobody knows how many can be skipped.
    """
    peak = peak_flops_per_s(facts, *_LOW_PRECISION)
    flops = 0.0
    for row in rows:
        if row.mask is False and len(row.query_shape) == len(row.key_shape) == 4:
            batch, heads, queries, width = row.query_shape
            products = 4 if row.phase == "backward" else 2
            pairs = queries * row.key_shape[2] * (0.5 if row.causal is not False else 1.0)
            flops += row.calls_per_step * products * 2 * batch * heads * pairs * width
    return flops / peak * 1e9 if peak else 0.0


def _kept_bytes(facts: Facts, layers: Iterable[str]) -> int | None:
    """What these layers keep for backward themselves, and the most that one of them needs while it runs."""
    kept = needed = 0.0
    known = False
    for layer in layers:
        for row in facts.rows_of.get(layer, ()):
            if row.phase not in _ENTERED or row.self_retained_bytes is None:
                continue
            known = True
            kept += row.self_retained_bytes if row.phase == "forward" else 0
            if row.peak_bytes is not None and row.entry_allocated_bytes is not None:
                needed = max(needed, row.peak_bytes - row.entry_allocated_bytes)
    if not known:
        return None
    saved = round(kept + needed)
    return min(saved, facts.peak_bytes) if facts.peak_bytes is not None else saved


# --- made of single ops -------------------------------------------------------------------------


def attention_unfused(facts: Facts) -> Iterator[Finding]:
    """A softmax between two batched products."""
    unfused = unfused_attention(facts.found)
    if unfused is None:
        return
    time_ns, softmax_ns = time_of_ns(facts, unfused.whole), time_of_ns(facts, unfused.softmax)
    products_ns = time_of_ns(facts, unfused.products)
    least_ns = _least_of_products_ns(facts, unfused.layers)
    saved_ns = saved_at_most_ns(facts, unfused.whole, stays_ns=least_ns)
    kept = _kept_bytes(facts, unfused.layers)
    device = device_of(facts)
    eager = facts.analysis.run.get("attention_implementation") == "eager"
    sdpa = "torch.nn.functional.scaled_dot_product_attention(q, k, v, ...)"
    left = f", but for the {duration(least_ns)} that half of its products take at the peak" if least_ns else ""
    per_step = unfused.calls / facts.steps
    yield facts.finding(
        id=ID,
        title=f"attention is made of single ops, a softmax between two products: {share(facts.share_of_work(time_ns))} "
        f"of {facts.time_name}",
        share=facts.share_of_work(time_ns),
        saves_ns=saved_ns,
        saves_bytes=kept,
        evidence=(
            f"{count(per_step, 'softmax op')} a step between two batched products, in "
            f"{where(unfused.layers) if unfused.layers else 'layers that are not known'}",
            f"all that these layers do themselves but for projections: {duration(time_ns)} of {facts.time_name} a "
            f"step; the softmax {duration(softmax_ns)} of it, the two products {duration(products_ns)}",
            *([f"they keep, and need while they run, {size(kept)}; the scores are a part of it"] if kept else []),
            f"saves at most: as if all that took no time, with the Python around it{left}; a fused kernel makes the "
            "products too, and never writes the scores to memory",
        ),
        confidence="high" if eager or device is None or device.compute_capability else "medium",
        fix='attn_implementation="sdpa" when the model is made' if eager else f'{sdpa}; in Transformers "sdpa"',
        source=_source(facts),
        layers=unfused.layers,
        details={
            "backend": "none",
            "time_us": time_ns / NS_PER_US,
            "softmax_us": softmax_ns / NS_PER_US,
            "products_us": products_ns / NS_PER_US,
            "calls_per_step": per_step,
        },
    )


def _least_of_products_ns(facts: Facts, layers: Iterable[str]) -> float:
    """What half of the batched products of these layers take at a device's peak: a causal mask hides the other half."""
    names = set(layers)
    rows = (row for row in facts.analysis.products if row.batch > 1 and row.layer in names)
    return at_peak_ns(facts, rows, *_LOW_PRECISION) / 2 if facts.on_device else 0.0


def _source(facts: Facts) -> str | None:
    rows = (row for row in facts.analysis.operators if row.op in ("aten::softmax", "aten::_softmax"))
    return next((row.sources[0] for row in rows if row.sources), None)


RULES: tuple[Rule, ...] = (attention_fallback, attention_unfused)
