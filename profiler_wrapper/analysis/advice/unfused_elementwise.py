"""Advice on memory-bound kernels in a row that could be one: elementwise work, copies, norms and reductions.

Each such kernel reads and writes memory for little arithmetic. A row of them, with nothing else between, can be one
kernel that reads what goes into the row and writes what comes out of it, and keeps what is between in registers.
What counts as memory-bound is the kind of a kernel: none of these has arithmetic that could bound it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from profiler_wrapper.analysis import classes
from profiler_wrapper.analysis.advice.facts import Facts
from profiler_wrapper.analysis.advice.wording import duration, share, where
from profiler_wrapper.analysis.view_model import Finding
from profiler_wrapper.recording.recording import Bool, Category, Int64

UNFUSED_SHARE = 0.3  # of the device time of a step, in such kernels
SAVED_SHARE = 0.15  # of it, that rows of them take beyond one kernel each
_MEMORY_BOUND = ("elementwise", "copy", "norm", "reduction")
_PHASES = ("forward", "prefill", "decode", "backward", "recompute")  # an optimizer has advice of its own
_COMPILED = "triton_"  # how Inductor begins the names of its kernels: these are fused already
_ON_DEVICE = "Memcpy DtoD"  # how copies within the device begin; others cannot be fused
_MOST_LAYERS = 3


def unfused_elementwise(facts: Facts) -> Iterator[Finding]:
    """Memory-bound kernels take much of the device time of layers, in rows that could be one kernel each."""
    if not facts.on_device:
        return
    charges = facts.found.charges
    chosen = _memory_bound(facts)
    spent = facts.per_step_ns(int(charges.time_ns[chosen].sum()))
    if spent <= UNFUSED_SHARE * facts.work_ns:
        return
    rows, beyond = _rows(facts, chosen)
    saved = facts.per_step_ns(beyond)
    if saved <= SAVED_SHARE * facts.work_ns:
        return
    by_class = [
        (name, int(charges.time_ns[chosen & (charges.work == classes.CLASSES.index(name))].sum()))
        for name in _MEMORY_BOUND
    ]
    parts = [
        f"{name} {duration(facts.per_step_ns(ns))}" for name, ns in sorted(by_class, key=lambda part: -part[1]) if ns
    ]
    layers = _by_layer(facts, chosen)
    top = [layer for layer, _ in layers.most_common() if layer]
    number = int(chosen.sum()) / facts.steps
    yield Finding(
        id="unfused-elementwise",
        title=f"{share(facts.share_of_work(spent))} of the device time that a step launched ({duration(spent)}) is "
        "elementwise work, copies and norms in kernels that could be fused",
        layer=where(top) if top else None,
        phase=None,
        share=facts.share_of_work(spent),
        saves_at_most_us=facts.saves_us(saved),
        saves_at_most_bytes=None,
        evidence=(
            f"{number:.0f} kernels a step: {', '.join(parts)} (device time)",
            f"{rows / facts.steps:.0f} times a step two or more of them follow one another on a stream",
            *_most_in(facts, layers),
            "at most (device time): each row of them as one kernel, as quick as the quickest in it, or as its norms",
        ),
        confidence="medium",
        fix="torch.compile(model) fuses them; or fused versions of what they make up: F.rms_norm, F.layer_norm, "
        "fused rotary embedding and activation (Liger-Kernel)",
        layers=tuple(top),
        details={"kernels": number, "device_us": spent / 1000, "rows": rows / facts.steps},
    )


def _memory_bound(facts: Facts) -> Bool:
    """Per charge whether it is such work of some layer, launched in a step as a kernel of its own, and not compiled."""
    found = facts.found
    charges, spans, places = found.charges, found.recording.spans, found.attribution.places
    works = np.array([place.layer >= 0 and place.phase in _PHASES for place in places], dtype=np.bool_)
    names = found.recording.names
    compiled = np.array([name.startswith(_COMPILED) for name in names], dtype=np.bool_)[spans.name[charges.span]]
    within = np.array([name.startswith(_ON_DEVICE) for name in names], dtype=np.bool_)[spans.name[charges.span]]
    kinds = np.isin(charges.work, [classes.CLASSES.index(name) for name in _MEMORY_BOUND])
    one_by_one = facts.launched_in_steps & ~charges.graph & ~compiled
    moves = (spans.category[charges.span] == Category.KERNEL) | within
    chosen: Bool = kinds & one_by_one & moves & works[charges.place]
    return chosen


def _rows(facts: Facts, chosen: Bool) -> tuple[int, int]:
    """How many rows of two or more there are, on one stream and of one step; their time but for what must stay.

    Of a row its quickest kernel stays, or its norms if they take longer: a norm that is one kernel is fused already,
    and needs all of its input before it gives anything.
    """
    charges, spans = facts.found.charges, facts.found.recording.spans
    lane: Int64 = spans.lane[charges.span].astype(np.int64)
    step = facts.found.steps.place_of(charges.launch_ns)
    order = np.lexsort((spans.start_ns[charges.span], lane))
    kept, lane, step = chosen[order], lane[order], step[order]
    apart = (lane[1:] != lane[:-1]) | (step[1:] != step[:-1])
    begins = kept & np.concatenate(([True], ~kept[:-1] | apart))
    if not begins.any():
        return 0, 0
    row = np.cumsum(begins)[kept] - 1
    time_ns = charges.time_ns[order][kept]
    stays = np.full(int(row.max()) + 1, np.iinfo(np.int64).max, dtype=np.int64)
    np.minimum.at(stays, row, time_ns)
    norms = np.zeros_like(stays)
    np.add.at(norms, row, np.where(charges.work[order][kept] == classes.CLASSES.index("norm"), time_ns, 0))
    return int((np.bincount(row) > 1).sum()), int(time_ns.sum() - np.maximum(stays, norms).sum())


def _by_layer(facts: Facts, chosen: Bool) -> Counter[str]:
    """Time by innermost layer."""
    charges, found = facts.found.charges, facts.found
    sums = np.zeros(len(found.attribution.places), dtype=np.int64)
    np.add.at(sums, charges.place[chosen], charges.time_ns[chosen])
    by_layer = Counter[str]()
    for place, spent in zip(found.attribution.places, sums.tolist(), strict=True):
        if spent:
            by_layer[found.tree.layers[place.layer].name] += spent
    return by_layer


def _most_in(facts: Facts, layers: Counter[str]) -> list[str]:
    """Where most of it is, by kind of layer: layers with one class are one."""
    class_of = {layer.name: layer.class_name for layer in facts.found.tree.layers}
    by_class = Counter[str]()
    for layer, spent in layers.items():
        by_class[class_of.get(layer) or layer] += spent
    told = [f"{name}: {duration(facts.per_step_ns(spent))}" for name, spent in by_class.most_common(_MOST_LAYERS)]
    return [f"most in {'; '.join(told)}"] if told else []
