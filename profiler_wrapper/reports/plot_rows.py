"""What the plots show, as numbers: bars and lines in ms per step and MiB. No drawing."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from profiler_wrapper.analysis.model import FORWARD_PHASES, PHASES, Analysis, Phase
from profiler_wrapper.analysis.statistics import split_number
from profiler_wrapper.reports.describe import attention_backends, step_count
from profiler_wrapper.reports.folding import LayerTotal, layer_totals
from profiler_wrapper.units import MIB

NS_PER_MS = 1e6


@dataclass(frozen=True, kw_only=True)
class LayerBar:
    """One layer of the plots; times in ms per step."""

    layer: str
    block: bool  # one of the repeated blocks
    times_ms: Mapping[Phase, float]
    attention_ms: Mapping[str, float]  # by backend
    entry_mib: float | None
    exit_mib: float | None
    reserved_mib: float | None
    peak_mib: float | None
    retained_mib: float | None

    @property
    def time_ms(self) -> float:
        return sum(self.times_ms.values())


@dataclass(frozen=True)
class Averages:
    """What stands under the time plot, in ms per layer and step."""

    layers: int  # how many the averages are over
    what: str  # "block", "block of layers.*" where there are others, or "layer"
    average_ms: float
    attention_ms: float  # of FlashAttention where there is any, else of all attention
    flash: tuple[str, ...]  # backends that are FlashAttention
    others: tuple[str, ...]  # the other backends of attention

    @property
    def ratio(self) -> float:
        return self.attention_ms / self.average_ms if self.average_ms else 0.0


@dataclass(frozen=True, kw_only=True)
class StepLines:
    """Time per step: one line a phase, one for attention."""

    steps: tuple[int, ...]
    total_ms: tuple[float, ...]
    phases_ms: Mapping[Phase, tuple[float, ...]]
    attention_ms: tuple[float, ...]


def shown_layers(totals: Sequence[LayerTotal]) -> list[LayerTotal]:
    """Layers beside one another that together hold all below the roots, in model order.

    The outermost blocks and what stands beside them or beside what holds them (embedding, norm,
    head); without blocks the layers below the first one that has several.
    """
    below: dict[str | None, list[LayerTotal]] = defaultdict(list)
    for total in totals:
        below[total.parent].append(total)
    holders = _holders(totals)
    shown: list[LayerTotal] = []
    open_ones = deque(below[None])
    while open_ones:
        total = open_ones.popleft()
        if total.kind != "block" and total.layer in holders:
            open_ones += below[total.layer]
        else:
            shown.append(total)
    if not holders:
        while len(shown) == 1 and below.get(shown[0].layer):
            shown = list(below[shown[0].layer])
    return sorted(shown, key=lambda total: total.order)


def _holders(totals: Sequence[LayerTotal]) -> set[str]:
    """The layers that have a block somewhere below them."""
    parents = {total.layer: total.parent for total in totals}
    holders: set[str] = set()
    for total in totals:
        above = total.parent if total.kind == "block" else None
        while above is not None and above not in holders:
            holders.add(above)
            above = parents[above]
    return holders


def layer_bars(analysis: Analysis) -> list[LayerBar]:
    """One bar per layer of `shown_layers`."""
    totals = layer_totals(analysis)
    shown = shown_layers(totals)
    steps = step_count(analysis)
    attention = _attention_by_layer(analysis, totals, {total.layer for total in shown})
    sizes = _sizes(analysis)
    return [
        LayerBar(
            layer=total.layer,
            block=total.kind == "block",
            times_ms={phase: time_ns / steps / NS_PER_MS for phase, time_ns in total.phases_ns.items()},
            attention_ms={backend: ns / steps / NS_PER_MS for backend, ns in attention[total.layer].items()},
            retained_mib=mib(total.retained_bytes),
            **sizes.get(total.layer, _NO_SIZES),
        )
        for total in shown
    ]


def rest_bars(analysis: Analysis, bars: Sequence[LayerBar]) -> dict[str, float]:
    """What is in none of `bars`, in ms per step: `optimizer`, and the `rest`, with which the bars are the total."""
    steps = step_count(analysis)
    optimizer_ns = sum(row.time_ns for row in analysis.layers if not row.layer and row.phase == "optimizer")
    optimizer = optimizer_ns / steps / NS_PER_MS
    rest = analysis.time.total_ns / steps / NS_PER_MS - optimizer - sum(bar.time_ms for bar in bars)
    return {name: time_ms for name, time_ms in (("optimizer", optimizer), ("rest", rest)) if time_ms >= _LEAST_REST}


_LEAST_REST = 0.0005  # ms: what is less is 0.000
_NO_SIZES: dict[str, float | None] = {"entry_mib": None, "exit_mib": None, "reserved_mib": None, "peak_mib": None}


def _sizes(analysis: Analysis) -> dict[str, dict[str, float | None]]:
    """Allocated and reserved by layer, from the first forward phase that knows them."""
    sizes: dict[str, dict[str, float | None]] = {}
    for row in analysis.layers:
        if row.layer not in sizes and row.phase in FORWARD_PHASES and row.allocated_bytes is not None:
            sizes[row.layer] = {
                "entry_mib": mib(row.entry_allocated_bytes),
                "exit_mib": mib(row.allocated_bytes),
                "reserved_mib": mib(row.reserved_bytes or None),
                "peak_mib": mib(row.peak_bytes),
            }
    return sizes


def mib(size_bytes: float | None) -> float | None:
    """Bytes as MiB; None stays None."""
    return None if size_bytes is None else size_bytes / MIB


def _attention_by_layer(
    analysis: Analysis, totals: Sequence[LayerTotal], shown: set[str]
) -> defaultdict[str, dict[str, int]]:
    """Attention time by shown layer and backend, in nanoseconds."""
    parents = {total.layer: total.parent for total in totals}
    times: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for row in analysis.attention:
        layer: str | None = row.layer
        while layer is not None and layer not in shown:
            layer = parents.get(layer)
        if layer is not None:
            times[layer][row.backend] = times[layer].get(row.backend, 0) + row.time_ns
    return times


def averages(analysis: Analysis, bars: Sequence[LayerBar]) -> Averages | None:
    """The seed's three numbers over the sibling blocks that take most, or over all layers where there are no blocks."""
    groups: dict[str, list[LayerBar]] = defaultdict(list)
    for bar in bars:
        if bar.block:
            groups[split_number(bar.layer, left_open="*")[0]].append(bar)
    if not bars:
        return None
    costliest = max(groups, key=lambda name: sum(bar.time_ms for bar in groups[name]), default=None)
    over = list(bars) if costliest is None else groups[costliest]
    backends = list(attention_backends(analysis))
    flash = tuple(backend for backend in backends if _is_flash(analysis, backend))
    counted = flash or backends
    return Averages(
        layers=len(over),
        what="layer" if costliest is None else f"block of {costliest}" if len(groups) > 1 else "block",
        average_ms=sum(bar.time_ms for bar in over) / len(over),
        attention_ms=sum(bar.attention_ms.get(backend, 0.0) for bar in over for backend in counted) / len(over),
        flash=flash,
        others=tuple(backend for backend in backends if backend not in flash),
    )


def _is_flash(analysis: Analysis, backend: str) -> bool:
    """By its name, or, of an external library's, by the names of all its kernels."""
    if "flash" in backend.lower():
        return True
    kernels = [kernel for row in analysis.attention if row.backend == backend for kernel in row.kernels]
    return backend == "external" and bool(kernels) and all("flash" in kernel.lower() for kernel in kernels)


def step_lines(analysis: Analysis) -> StepLines:
    """The steps that have a number, in order."""
    rows = sorted((row for row in analysis.steps if row.step is not None), key=lambda row: row.step or 0)
    phases = [phase for phase in PHASES if any(row.phases_ns.get(phase) for row in rows)]
    return StepLines(
        steps=tuple(row.step for row in rows if row.step is not None),
        total_ms=tuple(row.time_ns / NS_PER_MS for row in rows),
        phases_ms={phase: tuple(row.phases_ns.get(phase, 0) / NS_PER_MS for row in rows) for phase in phases},
        attention_ms=tuple(row.attention_ns / NS_PER_MS for row in rows),
    )


def layer_numbers(layers: Sequence[str]) -> list[int | None]:
    """The number of each layer that differs only in it from the layer before; None for the others.

    `["embed", "layers.0", "layers.1", "norm"]` gives `[None, None, 1, None]`.
    """
    numbers: list[int | None] = []
    before = None
    for layer in layers:
        pattern, number = split_number(layer)
        numbers.append(number if pattern == before else None)
        before = pattern
    return numbers


def short_names(layers: Sequence[str]) -> list[str]:
    """The last part of each name, with the part before it if that is a number's; whole where short ones are equal."""
    short = [_last_parts(layer) for layer in layers]
    counts = Counter(zip(short, layers, strict=True))
    seen = Counter(name for name, _ in counts)
    return [name if seen[name] == 1 else layer for name, layer in zip(short, layers, strict=True)]


def _last_parts(layer: str) -> str:
    before, _, last = layer.rpartition(".")
    return ".".join([*before.rpartition(".")[2:], last]) if last.isdigit() and before else last
