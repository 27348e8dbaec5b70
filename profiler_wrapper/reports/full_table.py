"""All that was measured as text, in model order, without a limit of rows or columns: for the log file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from profiler_wrapper.analysis.model import PHASES, Analysis, LayerRow, UncountedRow
from profiler_wrapper.reports.describe import (
    followed,
    outside_label,
    per_step,
    scaled,
    step_count,
    title_parts,
    use_line,
    work_scale,
)
from profiler_wrapper.reports.memory import memory_use_sections, why_no_memory_use
from profiler_wrapper.reports.text import AT_LEAST, clean, grid, shorten
from profiler_wrapper.units import mebibytes, milliseconds, percent

Cell = Callable[[LayerRow], str]

_LONGEST_KERNELS = 60
_LONGEST_LINE = 400


def full_table(analysis: Analysis) -> str:
    """Every layer and phase, then attention, classes, steps, what is followed by name, memory and warnings.

    Times are ms per step (sums over the timed trace divided by its steps), but in the table of the
    steps; sizes MiB.
    """
    sections = [
        ", ".join(title_parts(analysis)),
        _section(f"Layers, in model order: ms {per_step(analysis)}, MiB", layer_section(analysis)),
        _section(f"Attention: ms {per_step(analysis)}", attention_section(analysis)),
        _section(f"Classes: ms {per_step(analysis)}", class_section(analysis)),
        _section("Share of the peak", use_line(analysis, _LONGEST_LINE)),
        _section(f"Work of which no FLOPs are known: ms {per_step(analysis)}", uncounted_section(analysis.uncounted)),
        _section("Work of which no bytes are known: ms a step", uncounted_section(analysis.untold_bytes)),
        _section("Steps: ms", step_section(analysis)),
        _section("Followed by name: ms in each step or entry; of a function what it gave", series_section(analysis)),
        *(_section(title, text) for title, text in memory_sections(analysis)),
        _section("Warnings", "\n".join(clean(warning) for warning in analysis.warnings)),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _section(title: str, text: str) -> str:
    return f"{title}\n\n{text}" if text else ""


def layer_section(analysis: Analysis) -> str:
    """One row per layer and phase, then what has no layer, `(unattributed)` by reason, and the total."""
    columns = _layer_columns(analysis)
    rows = sorted(analysis.layers, key=lambda row: (not row.layer, row.order, row.layer, PHASES.index(row.phase)))
    drawn = [[cell(row) for _, cell in columns] for row in rows]
    steps, total_ns = step_count(analysis), analysis.time.total_ns
    titles = [title for title, _ in columns]

    def closing(name: str, time_ns: int, calls: str = "") -> list[str]:
        values = {
            "layer": name,
            "calls": calls,
            "self": _per_step_ms(time_ns, steps),
            "time": _per_step_ms(time_ns, steps),
            "share %": percent(time_ns, total_ns),
        }
        return [values.get(title, "") for title in titles]

    drawn += [closing(f"(unattributed) {clean(row.reason)}", row.time_ns) for row in analysis.unattributed]
    drawn.append(closing("TOTAL", total_ns))
    return grid(titles, drawn, left_columns=4)


def _layer_columns(analysis: Analysis) -> list[tuple[str, Cell]]:
    steps, total_ns, scale = step_count(analysis), analysis.time.total_ns, work_scale(analysis)
    # CPU time of calls holds neither what other threads do for them nor the waiting.
    communication = "communication" if analysis.time_basis == "device" else "communication calls"

    def time(name: str) -> Cell:
        return lambda row: _per_step_ms(getattr(row, name), steps)

    def rate(row: LayerRow, per_step: int | None, *, less: int = 0) -> float | None:
        """Of a step's work, per nanosecond of its time: FLOPs give GFLOP/s, bytes GB/s, times a share."""
        work = scaled(per_step, scale)
        return work * steps / (row.time_ns - less) if work and row.time_ns > less else None

    def size(name: str) -> Cell:
        return lambda row: _known(getattr(row, name), mebibytes)

    return [
        ("layer", lambda row: clean(row.layer or f"({outside_label(row)})")),
        ("class", lambda row: clean(row.class_name)),
        ("kind", lambda row: row.kind if row.layer else ""),
        ("phase", lambda row: row.phase),
        ("calls", lambda row: _known(row.calls, lambda calls: f"{calls / steps:.4g}")),
        ("self", time("self_time_ns")),
        ("time", time("time_ns")),
        ("share %", lambda row: percent(row.time_ns, total_ns)),
        ("fused", lambda row: _per_step_ms(row.fused_ns or None, steps)),
        *([] if analysis.time_basis == "cpu" else [("CPU", time("cpu_time_ns"))]),
        ("attention", lambda row: _per_step_ms(row.attention_ns or None, steps)),
        (communication, lambda row: _per_step_ms(row.communication_ns or None, steps)),
        ("exposed", lambda row: _per_step_ms(row.exposed_communication_ns or None, steps)),
        ("idle", lambda row: _per_step_ms(row.idle_ns or None, steps)),
        ("GFLOP", _gigas),
        ("self GFLOP", lambda row: _known(row.self_flops_per_step, _giga)),
        ("causal GFLOP", lambda row: _known(_causal(row), _giga)),
        ("GFLOP/s", lambda row: _known(rate(row, row.flops_per_step), lambda value: f"{value:.1f}")),
        ("% of peak", lambda row: _known(rate(row, row.peak_time_per_step_ns), _percent)),
        ("moved", lambda row: _known(row.bytes_moved_per_step, mebibytes)),
        ("GB/s", lambda row: _known(rate(row, row.bytes_moved_per_step), lambda value: f"{value:.1f}")),
        ("FLOP/B", lambda row: _known(_intensity(row), lambda value: f"{value:.4g}")),
        ("at roof", lambda row: _known(row.roof_time_per_step_ns, lambda time_ns: f"{time_ns / 1e6:.3f}")),
        ("% of roof", lambda row: _known(rate(row, row.roof_time_per_step_ns, less=row.communication_ns), _percent)),
        ("bound", lambda row: row.bound or ""),
        ("at entry", size("entry_allocated_bytes")),
        ("at exit", size("allocated_bytes")),
        ("reserved", size("reserved_bytes")),
        ("peak", size("peak_bytes")),
        ("retained", size("retained_bytes")),
        ("self retained", size("self_retained_bytes")),
        ("flags", lambda row: " ".join(name for name in ("compiled", "shared", "graph") if getattr(row, name))),
    ]


def _known(value: Any, text: Callable[[Any], str]) -> str:
    return "" if value is None else text(value)


def _per_step_ms(time_ns: int | None, steps: int) -> str:
    return "" if time_ns is None else f"{time_ns / steps / 1e6:.3f}"


def _gigas(row: LayerRow) -> str:
    """FLOPs; at least so many where an op inside tells none."""
    if row.flops_per_step is None and row.known_flops_per_step is not None:
        return clean(AT_LEAST) + _giga(row.known_flops_per_step)
    return _known(row.flops_per_step, _giga)


def _causal(row: LayerRow) -> int | None:
    """FLOPs in the causal convention, where they are others."""
    return None if row.causal_flops_per_step == row.flops_per_step else row.causal_flops_per_step


def _intensity(row: LayerRow) -> float | None:
    """FLOPs per byte moved."""
    return row.flops_per_step / row.bytes_moved_per_step if row.flops_per_step and row.bytes_moved_per_step else None


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _giga(flops: int) -> str:
    return f"{flops / 1e9:.3f}"


def attention_section(analysis: Analysis) -> str:
    """Attention by layer, phase and backend, with the kernels' names."""
    steps = step_count(analysis)
    order = {row.layer: row.order for row in analysis.layers}
    rows = sorted(analysis.attention, key=lambda row: (order.get(row.layer, -1), PHASES.index(row.phase), row.backend))
    drawn = [
        [
            clean(row.layer),
            row.phase,
            clean(row.backend),
            _per_step_ms(row.time_ns, steps),
            shorten(clean(", ".join(row.kernels)), _LONGEST_KERNELS),
        ]
        for row in rows
    ]
    return (
        grid(("layer", "phase", "backend", "time", "kernels"), drawn, left_columns=3, left_last=True) if drawn else ""
    )


def class_section(analysis: Analysis) -> str:
    """Time by class of event and phase."""
    steps, total_ns = step_count(analysis), analysis.time.total_ns
    rows = sorted(analysis.classes, key=lambda row: -row.time_ns)
    drawn = [
        [
            clean(row.class_name),
            row.phase,
            _per_step_ms(row.time_ns, steps),
            percent(row.time_ns, total_ns),
            f"{row.count / steps:.6g}",
            _known(row.flops_per_step or None, _giga),
        ]
        for row in rows
    ]
    return grid(("class", "phase", "time", "share %", "events", "GFLOP"), drawn, left_columns=2) if drawn else ""


def uncounted_section(rows: Sequence[UncountedRow]) -> str:
    """Ops that work, and tell not how much; times with shapes being recorded."""
    drawn = [
        [
            shorten(clean(row.op), _LONGEST_KERNELS),
            row.class_name,
            row.phase,
            str(row.count),
            milliseconds(row.time_per_step_ns),
        ]
        for row in rows
    ]
    return grid(("op", "class", "phase", "calls in all", "time"), drawn, left_columns=3) if drawn else ""


def step_section(analysis: Analysis) -> str:
    """One row per step; `-` is what belongs to no step.

    `step takes`: until both the CPU and the devices are done with it; `CPU span`: from its begin to its end on the CPU.
    """
    splits = analysis.overview.steps if analysis.overview is not None else ()
    took = {split.step: milliseconds(split.span_ns) for split in splits if split.step is not None}
    phases = [phase for phase in PHASES if any(row.phases_ns.get(phase) for row in analysis.steps)]
    drawn = [
        [
            "-" if row.step is None else str(row.step),
            milliseconds(row.time_ns),
            *([took.get(row.step, "") if row.step is not None else ""] if took else []),
            _known(row.span_ns, milliseconds),
            *(_known(row.phases_ns.get(phase), milliseconds) for phase in phases),
            _known(row.attention_ns or None, milliseconds),
            _known(row.peak_bytes, lambda size: f"{mebibytes(size)} MiB"),
        ]
        for row in analysis.steps
    ]
    heads = ("step", "time", *(("step takes",) if took else ()), "CPU span", *phases, "attention", "peak")
    return grid(heads, drawn) if drawn else ""


def series_section(analysis: Analysis) -> str:
    """What is followed by name, one line each."""
    rows = (
        (one.name, ["-" if value is None else one.text(value) for value in one.values]) for one in followed(analysis)
    )
    return "\n".join(f"{clean(name)}: {' '.join(values)}" for name, values in rows)


def memory_sections(analysis: Analysis) -> list[tuple[str, str]]:
    """Titles and texts of what is known of the whole device's memory: all of it, or what `result.json` holds."""
    if analysis.memory_use is not None:
        return memory_use_sections(analysis.memory_use)
    found = analysis.memory
    peak: Mapping[str, Any] = found.get("peak") or {}
    sizes = {
        "allocated at the end": found.get("allocated_bytes"),
        "reserved at the end": found.get("reserved_bytes"),
        "highest allocated": peak.get("allocated_bytes"),
        "highest reserved": peak.get("reserved_bytes"),
        **{f"of it {clean(name)}": size for name, size in (found.get("categories") or {}).items()},
    }
    lines = [f"{name}: {mebibytes(size)} MiB" for name, size in sizes.items() if size is not None]
    if not found.get("categories"):
        lines.append(f"by category: not available, because {clean(why_no_memory_use(analysis))}")
    return [("Memory: MiB", "\n".join(lines))]
