"""Advice on launching: a device that waits for launches, and kernels too small to be worth one each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from profiler_wrapper.analysis import classes
from profiler_wrapper.analysis.advice.facts import Facts, Rule
from profiler_wrapper.analysis.advice.wording import count, duration, share, where
from profiler_wrapper.analysis.view_model import Finding
from profiler_wrapper.recording.recording import Category, Int64

LAUNCH_SHARE = 0.1  # of the step, that the device waits for launches
SMALL_NS = 10_000
MANY = 200  # kernels a step
SMALL_SHARE = 0.05  # of the step, in small kernels that could be fused and the waits for them
_FUSABLE = ("elementwise", "norm", "softmax", "reduction", "copy")
_MOST_PLACES = 3


def launch_bound(facts: Facts) -> Iterator[Finding]:
    """The device waits for launches: for short gaps that end with an event launched within them."""
    gaps = facts.gaps
    if gaps is None or not len(gaps.step):
        return
    waits = facts.wall_per_step_ns(int(gaps.launching_ns.sum()))
    if waits <= LAUNCH_SHARE * facts.step_ns:
        return
    events = int((gaps.launching_ns > 0).sum()) / facts.steps
    places = _launching_by_block(facts, gaps.launching_ns, gaps.ender)
    in_layers = {layer: time_ns for layer, time_ns in places.items() if layer}
    graphs = bool(facts.found.charges.graph.any())
    total = sum(places.values())
    mostly = [layer for layer in in_layers if layer in facts.blocks]
    in_blocks = sum(in_layers[layer] for layer in mostly)
    named = where(mostly) if mostly and 2 * in_blocks > total else None
    parts = [
        f"{where([layer])}: {duration(facts.wall_per_step_ns(waited))}"
        for layer, waited in Counter(places).most_common(_MOST_PLACES)
    ]
    yield Finding(
        id="launch-bound",
        title=f"the device waits {duration(waits)} of {facts.step_text} for the CPU to launch kernels",
        layer=named,
        phase=None,
        share=facts.share_of_step(waits),
        saves_at_most_us=facts.saves_us(waits),
        saves_at_most_bytes=None,
        evidence=(
            f"{count(round(events), 'gap')} a step of under 1 ms end with an event launched within them: "
            f"{share(facts.share_of_step(waits))} of the step (wall time)",
            *(["most in " + "; ".join(parts)] if in_layers else []),
            f"the device itself is busy for {duration(max(0.0, facts.step_ns - (facts.idle_ns or 0)))} of a step",
            "at most: launches that cost nothing",
        ),
        confidence="high" if facts.has_steps else "medium",
        fix=(
            "put more of the step into CUDA graphs"
            if graphs
            else "torch.compile(model, mode='reduce-overhead') (CUDA graphs), or a larger batch per launch"
        ),
        layers=tuple(mostly) if named else (),
        details={"waiting_us": waits / 1000, "gaps": events},
    )


def many_small_kernels(facts: Facts) -> Iterator[Finding]:
    """Most kernels are too short to be worth a launch, and many of them could be one."""
    found = facts.found
    charges, spans = found.charges, found.recording.spans
    if not facts.on_device:
        return
    within = (spans.category[charges.span] == Category.KERNEL) & facts.launched_in_steps
    times = charges.time_ns[within]
    number = len(times) / facts.steps
    if number < MANY or float(np.median(times)) >= SMALL_NS:
        return
    fusable = np.isin(charges.work, [classes.CLASSES.index(name) for name in _FUSABLE]) & ~charges.graph
    small = np.flatnonzero(within & fusable & (charges.time_ns < SMALL_NS))
    spent = float(charges.time_ns[small].sum()) / facts.steps
    waited = 0.0
    if facts.gaps is not None:
        before_them = np.isin(facts.gaps.ender, small)
        waited = facts.wall_per_step_ns(int(facts.gaps.launching_ns[before_them].sum()))
    if spent + waited <= SMALL_SHARE * facts.step_ns:
        return
    layers = Counter[str]()
    for layer, time_ns in _by_layer(facts, small, charges.time_ns[small]).items():
        layers[layer] += time_ns
    top = [layer for layer, _ in layers.most_common()]
    blocks = [layer for layer in top if layer in facts.blocks]
    names = Counter[str]()
    np_names = spans.name[charges.span[small]]
    for name, members in zip(*np.unique(np_names, return_counts=True), strict=True):
        names[found.recording.names[int(name)]] += int(members)
    often = ", ".join(f"{name[:50]} ({round(calls / facts.steps)})" for name, calls in names.most_common(2))
    yield Finding(
        id="many-small-kernels",
        title=f"{len(small) / facts.steps:.0f} of {number:.0f} kernels a step are small (under 10 µs) and could be "
        f"fused: {duration(spent)} of device time",
        layer=where(blocks) if blocks else None,
        phase=None,
        share=facts.share_of_step(spent + waited),
        saves_at_most_us=facts.saves_us(spent + waited),
        saves_at_most_bytes=None,
        evidence=(
            f"the median kernel takes {duration(float(np.median(times)))}",
            f"elementwise, norm, softmax, reduction and copy kernels under 10 µs: {duration(spent)} of device time a "
            f"step, and the device waits {duration(waited)} for their launches (wall time)",
            f"most often {often}",
            "at most: both of them gone",
        ),
        confidence="medium",
        fix="torch.compile(model) fuses them; or fused ops: F.rms_norm, F.layer_norm, a fused or foreach optimizer",
        layers=tuple(blocks),
        details={"small_kernels": len(small) / facts.steps, "kernels": number, "device_us": spent / 1000},
    )


def _launching_by_block(facts: Facts, launching_ns: Int64, ender: Int64) -> dict[str, int]:
    """Waits by block of the event that ended them, or its layer where it is in none."""
    ended = ender >= 0
    return _by_layer(facts, ender[ended], launching_ns[ended])


def _by_layer(facts: Facts, charge: Int64, time_ns: Int64) -> dict[str, int]:
    """Sums by block, or by layer for what is in none; "" for what has no layer."""
    places, layers = facts.found.attribution.places, facts.found.tree.layers
    sums = np.zeros(len(places), dtype=np.int64)
    np.add.at(sums, facts.found.charges.place[charge], time_ns)
    by_layer = Counter[str]()
    for place, spent in zip(places, sums.tolist(), strict=True):
        if spent:
            block = layers[place.layer].block if place.layer >= 0 else -1
            layer = layers[block].name if block >= 0 else layers[place.layer].name if place.layer >= 0 else ""
            by_layer[layer] += spent
    return dict(by_layer)


RULES: tuple[Rule, ...] = (launch_bound, many_small_kernels)
