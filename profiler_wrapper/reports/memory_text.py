"""Memory at the exit of each layer as text: one value a line, easy to read back."""

from __future__ import annotations

from collections.abc import Sequence

from profiler_wrapper.analysis.model import Analysis
from profiler_wrapper.reports.describe import machine, rank_in_words, steps_in_words
from profiler_wrapper.reports.memory_rows import why_no_memory
from profiler_wrapper.reports.plot_rows import LayerBar, layer_bars
from profiler_wrapper.reports.text import clean


def average_slope_mib(bars: Sequence[LayerBar]) -> float | None:
    """Mean increase of allocated memory from entry to exit of a layer, in MiB: over the blocks, or over all layers.

    None where no layer's memory is known.
    """
    blocks = [bar for bar in bars if bar.block] or bars
    steps = [bar.exit_mib - bar.entry_mib for bar in blocks if bar.exit_mib is not None and bar.entry_mib is not None]
    return sum(steps) / len(steps) if steps else None


def memory_usage_text(analysis: Analysis) -> str:
    """The device, `average_slope` (MiB per layer), then allocated and reserved at each layer's exit.

    One value a line in MiB, the layer's name behind it; means over the calls of the timed trace.
    """
    bars = layer_bars(analysis)
    slope = average_slope_mib(bars)
    rank = rank_in_words(analysis)
    lines = [f"device: {clean(machine(analysis))}" + (f" ({rank})" if rank else "")]
    if slope is None:
        return "\n".join([*lines, f"average_slope: not available, because {clean(why_no_memory(analysis))}", ""])
    over = "block" if any(bar.block for bar in bars) else "layer"
    lines.append(f"average_slope: {slope:.3f} MiB per {over} (mean increase of allocated memory from entry to exit)")
    if analysis.time_basis == "cpu":
        lines.append(
            "note: on a CPU, of what was there before only what model and optimizers held counts: use the differences"
        )
    lines += _values(f"allocated (MiB, at exit, mean over the calls of {steps_in_words(analysis)})", bars, "exit_mib")
    lines += _values("reserved (MiB, at exit)", bars, "reserved_mib")
    return "\n".join([*lines, ""])


def _values(title: str, bars: Sequence[LayerBar], name: str) -> list[str]:
    values = [(getattr(bar, name), bar.layer) for bar in bars]
    known = [f"{value:.3f}  {clean(layer)}" for value, layer in values if value is not None]
    return ["", f"{title}:", *known] if known else ["", f"{title}: not available on this device"]
