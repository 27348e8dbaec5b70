"""Attention that a faster kernel could have done: fallen back from flash, or made of single ops."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from profiler_wrapper.analysis.advice.attention_backends import Cause, Machine, Reason, why_not_efficient, why_not_flash
from profiler_wrapper.analysis.advice.bounds import saved_at_most_ns, time_of_ns
from profiler_wrapper.analysis.advice.device import device_of
from profiler_wrapper.analysis.advice.facts import NS_PER_US, Facts, Rule
from profiler_wrapper.analysis.advice.unfused_attention import unfused_attention
from profiler_wrapper.analysis.advice.wording import count, duration, share, size, where
from profiler_wrapper.analysis.attention_calls import attention_made
from profiler_wrapper.analysis.attention_ops import FAST_PATH_PARTS
from profiler_wrapper.analysis.view_model import AttentionCallRow, Finding

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
    if device is not None and not device.is_nvidia:
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
        capability=device.capability if device is not None else None,
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
    least_ns = _least_ns(fallen.rows, _peak_of_16_bits(facts)) if facts.on_device else 0.0
    saved_ns = saved_at_most_ns(facts, chosen, stays_ns=least_ns)
    cause: Cause | None = fallen.reasons[0].cause if fallen.reasons else None
    known = bool(fallen.rows)
    why = fallen.reasons[0].text if fallen.reasons else "its inputs meet all conditions" if known else "inputs unknown"
    calls = count(len(members) / facts.steps, "call")
    evidence = [
        f"{calls} a step in {where(fallen.layers)}: {duration(time_ns)} of {facts.time_name} a step",
        *(f"not flash, because {reason.text}" for reason in fallen.reasons[:2]),
        *_sizes(fallen.rows),
        _reckoned(facts, time_ns, least_ns),
    ]
    confidence: Literal["high", "medium"] = "high" if fallen.reasons and fallen.backend == "math" else "medium"
    yield Finding(
        id=ID,
        title=f"attention ran with the {_name(fallen.backend)} backend, not flash: {why}",
        layer=where(fallen.layers),
        phase=None,
        share=facts.share_of_work(time_ns),
        saves_at_most_us=facts.saves_us(saved_ns),
        saves_at_most_bytes=_kept_bytes(facts, fallen.layers) if fallen.backend == "math" else None,
        evidence=tuple(evidence),
        confidence=confidence,
        fix=_FIXES[cause] if cause is not None else _UNKNOWN_FIX,
        layers=tuple(fallen.layers),
        details={
            "backend": fallen.backend,
            "causes": [reason.cause for reason in fallen.reasons],
            "time_us": time_ns / NS_PER_US,
        },
    )


def _name(backend: str) -> str:
    return backend.replace("mem_efficient", "memory-efficient")


def _sizes(rows: Iterable[AttentionCallRow]) -> list[str]:
    row = next(iter(rows), None)
    if row is None:
        return []
    query, key = (" x ".join(map(str, shape)) for shape in (row.query_shape, row.key_shape))
    return [f"{row.dtype}, queries {query}, keys {key}, mask {_told(row.mask)}, dropout {_told(row.dropout)}"]


def _told(value: object) -> str:
    return {True: "given", False: "none", None: "not known"}.get(value, str(value))  # type: ignore[call-overload, no-any-return]


def _peak_of_16_bits(facts: Facts) -> float:
    """FLOP/s; 0 where that is not known."""
    peaks = facts.analysis.utilization.peaks if facts.analysis.utilization is not None else None
    return max((peaks.flops(dtype) or 0.0 for dtype in ("bfloat16", "float16")), default=0.0) if peaks else 0.0


def _least_ns(rows: Iterable[AttentionCallRow], peak: float) -> float:
    """What its products take in a step at the peak of 16-bit numbers: no kernel is faster. 0 where that is not known.

    Forward two products; backward four, the scores again left out. With a mask nobody knows how many can be skipped.
    """
    if not peak:
        return 0.0
    flops = 0.0
    for row in rows:
        if row.mask is False and len(row.query_shape) == len(row.key_shape) == 4:
            batch, heads, queries, width = row.query_shape
            products = 4 if row.phase == "backward" else 2
            pairs = queries * row.key_shape[2] * (0.5 if row.causal is not False else 1.0)
            flops += row.calls_per_step * products * 2 * batch * heads * pairs * width
    return flops / peak * 1e9


def _reckoned(facts: Facts, time_ns: float, least_ns: float) -> str:
    if not facts.on_device:
        return "saves at most: as if attention cost nothing at all"
    left = f", but for the {duration(least_ns)} that its products take at the peak" if least_ns else ""
    return f"saves at most: as if its kernels and their launches vanished{left}"


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
    per_step = unfused.calls / facts.steps
    yield Finding(
        id=ID,
        title=f"attention is made of single ops, a softmax between two products: {share(facts.share_of_work(time_ns))} "
        f"of {facts.time_name}",
        layer=where(unfused.layers) if unfused.layers else None,
        phase=None,
        share=facts.share_of_work(time_ns),
        saves_at_most_us=facts.saves_us(saved_ns),
        saves_at_most_bytes=kept,
        evidence=(
            f"{count(per_step, 'softmax op')} a step between two batched products, in "
            f"{where(unfused.layers) if unfused.layers else 'layers that are not known'}",
            f"all that these layers do themselves but for projections: {duration(time_ns)} of {facts.time_name} a "
            f"step; the softmax {duration(softmax_ns)} of it, the two products {duration(products_ns)}",
            *([f"they keep, and need while they run, {size(kept)}; the scores are a part of it"] if kept else []),
            f"saves at most: as if all that vanished{_around(facts)}"
            + (f", but for the {duration(least_ns)} that half of its products take at the peak" if least_ns else "")
            + "; a fused kernel makes the products too, and never writes the scores to memory",
        ),
        confidence="high" if eager or device is None or device.is_nvidia else "medium",
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


def _around(facts: Facts) -> str:
    return "" if facts.on_device else ", with the Python around these ops (wall time)"


def _least_of_products_ns(facts: Facts, layers: Iterable[str]) -> float:
    """What half of the batched products of these layers take at a device's peak: a causal mask hides the other half."""
    peak = _peak_of_16_bits(facts)
    if not peak or not facts.on_device:
        return 0.0
    names = set(layers)
    rows = (row for row in facts.analysis.products if row.batch > 1 and row.layer in names)
    return sum(row.m * row.n * row.k * row.batch * row.calls_per_step for row in rows) / peak * 1e9


def _source(facts: Facts) -> str | None:
    rows = (row for row in facts.analysis.operators if row.op in ("aten::softmax", "aten::_softmax"))
    return next((row.sources[0] for row in rows if row.sources), None)


RULES: tuple[Rule, ...] = (attention_fallback, attention_unfused)
