"""All that was measured as text, in model order, without a limit of rows or columns: for the log file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from profiler_wrapper.analysis.model import PHASES, Analysis, Phase, StepRow, UncountedRow
from profiler_wrapper.reports.columns import COLUMNS, Values, phase_values, scale_of
from profiler_wrapper.reports.describe import (
    followed,
    kv_cache_lines,
    left_out_in_words,
    outside_label,
    parts_in_words,
    per_step,
    step_count,
    title_parts,
    use_line,
)
from profiler_wrapper.reports.memory import memory_use_sections, why_no_memory_use
from profiler_wrapper.reports.table import at_least
from profiler_wrapper.reports.text import AT_LEAST, clean, grid, shorten
from profiler_wrapper.units import mebibytes, milliseconds, percent

_LONGEST_KERNELS = 60
_LONGEST_LINE = 400


def full_table(analysis: Analysis) -> str:
    """Every layer and phase, then attention, classes, steps, what is followed by name, memory and warnings.

    Times are ms per step (sums over the timed trace divided by its steps), but in the table of the
    steps; sizes MiB.
    """
    series = [
        f"{clean(one.name)}: {' '.join('-' if value is None else one.text(value) for value in one.values)}"
        for one in followed(analysis)
    ]
    steps = (step_section(analysis), parts_in_words(analysis), left_out_in_words(analysis))
    sections = [
        (f"Layers, in model order: ms {per_step(analysis)}, MiB", layer_section(analysis)),
        (f"Attention: ms {per_step(analysis)}", attention_section(analysis)),
        (f"Classes: ms {per_step(analysis)}", class_section(analysis)),
        (f"Layers of experts: ms {per_step(analysis)}", expert_layer_section(analysis)),
        ("Experts, in the steps with shapes: ms a step", expert_section(analysis)),
        (f"Adapters beside what they adapt: ms {per_step(analysis)}", adapter_section(analysis)),
        ("Share of the peak", use_line(analysis, _LONGEST_LINE)),
        (f"Work of which no FLOPs are known: ms {per_step(analysis)}", uncounted_section(analysis.uncounted)),
        ("Work of which no bytes are known: ms a step", uncounted_section(analysis.untold_bytes)),
        ("Steps: ms", "\n".join(filter(None, steps))),
        ("Followed by name: ms in each step or entry; of a function what it gave", "\n".join(series)),
        *memory_sections(analysis),
        ("KV cache", "\n".join(kv_cache_lines(analysis))),
        ("Warnings", "\n".join(clean(warning) for warning in analysis.warnings)),
    ]
    parts = [", ".join(title_parts(analysis)), *(f"{title}\n\n{text}" for title, text in sections if text)]
    return "\n\n".join(parts) + "\n"


def layer_section(analysis: Analysis) -> str:
    """One row per layer and phase, then what has no layer, `(unattributed)` by reason, and the total."""
    scale = scale_of(analysis)
    # CPU time of calls holds neither what other threads do for them nor the waiting.
    titles = {"communication": "communication calls", "cpu": ""} if analysis.time_basis == "cpu" else {}
    columns = [(column, title) for column in COLUMNS if (title := titles.get(column.key, column.full))]

    def numbers(sums: Values) -> list[str]:
        """Work is that of a step, even where it cannot stand beside the times, and has no rates."""
        values = scale._replace(work=1).of(sums)
        beside_times = scale.of(sums)
        values |= {column.key: beside_times[column.key] for column in COLUMNS if column.kind in ("rate", "share")}
        texts = {column.key: _known(values[column.key], _TEXTS[column.kind]) for column, _ in columns}
        if values["flops"] is None and values["known_flops"]:
            texts["flops"] = clean(AT_LEAST) + _giga(values["known_flops"])
        texts["time"] = at_least(texts["time"], values)
        return list(texts.values())

    drawn = []
    for row in sorted(analysis.layers, key=lambda row: (not row.layer, row.order, row.layer, PHASES.index(row.phase))):
        drawn.append(
            [
                clean(row.layer or f"({outside_label(row)})"),
                clean(row.class_name),
                row.kind if row.layer else "",
                row.phase,
                *numbers(phase_values(row)),
                " ".join(name for name in ("compiled", "shared", "graph") if getattr(row, name)),
            ]
        )
    closing = [(f"(unattributed) {clean(row.reason)}", row.time_ns) for row in analysis.unattributed]
    for name, time_ns in [*closing, ("TOTAL", analysis.time.total_ns)]:
        sums = {"self": time_ns, "time": time_ns, "lost_launches": name == "TOTAL" and analysis.lost_launches}
        drawn.append([name, "", "", "", *numbers(sums), ""])
    return grid(["layer", "class", "kind", "phase", *(title for _, title in columns), "flags"], drawn, left_columns=4)


def _known(value: Any, text: Callable[[Any], str]) -> str:
    return "" if value is None else text(value)


def _per_step_ms(time_ns: int | None, steps: int) -> str:
    return "" if time_ns is None else f"{time_ns / steps / 1e6:.3f}"


def _giga(flops: int) -> str:
    return f"{flops / 1e9:.3f}"


# By the kind of a column.
_TEXTS: Mapping[str, Callable[[Any], str]] = {
    "time": lambda time_ns: f"{time_ns / 1e6:.3f}",
    "share": lambda share: f"{100 * share:.1f}",
    "flops": _giga,
    "rate": lambda per_s: f"{per_s / 1e9:.1f}",
    "bytes": mebibytes,
    "count": lambda count: f"{count:.4g}",
    "number": lambda number: f"{number:.4g}",
    "text": str,
}


_Columns = dict[str, Callable[[Any], str]]  # what stands in each, by its title


def _table(rows: Iterable[Any], columns: _Columns, left: int, *, left_last: bool = False) -> str:
    """The first `left` columns to the left; no text without rows."""
    drawn = [[text(row) for text in columns.values()] for row in rows]
    return grid(list(columns), drawn, left_columns=left, left_last=left_last) if drawn else ""


def attention_section(analysis: Analysis) -> str:
    """Attention by layer, phase and backend, with the kernels' names."""
    steps = step_count(analysis)
    order = {row.layer: row.order for row in analysis.layers}
    rows = sorted(analysis.attention, key=lambda row: (order.get(row.layer, -1), PHASES.index(row.phase), row.backend))
    columns: _Columns = {
        "layer": lambda row: clean(row.layer),
        "phase": lambda row: row.phase,
        "backend": lambda row: clean(row.backend),
        "time": lambda row: _per_step_ms(row.time_ns, steps),
        "kernels": lambda row: shorten(clean(", ".join(row.kernels)), _LONGEST_KERNELS),
    }
    return _table(rows, columns, 3, left_last=True)


def class_section(analysis: Analysis) -> str:
    """Time by class of event and phase."""
    steps, total_ns = step_count(analysis), analysis.time.total_ns
    columns: _Columns = {
        "class": lambda row: clean(row.class_name),
        "phase": lambda row: row.phase,
        "time": lambda row: _per_step_ms(row.time_ns, steps),
        "share %": lambda row: percent(row.time_ns, total_ns),
        "events": lambda row: f"{row.count / steps:.6g}",
        "GFLOP": lambda row: _known(row.flops_per_step or None, _giga),
    }
    return _table(sorted(analysis.classes, key=lambda row: -row.time_ns), columns, 2)


def expert_layer_section(analysis: Analysis) -> str:
    """What computes the experts of each layer, how even their tokens are, and what runs beside them."""
    steps = step_count(analysis)
    columns: _Columns = {
        "layer": lambda row: clean(row.layer or "(not known)"),
        "by": lambda row: row.method,
        "experts": lambda row: _known(row.experts, str),
        "tokens": lambda row: _known(row.tokens_per_step, "{:.6g}".format),
        "busiest/mean": lambda row: _known(row.balance, "{:.2f}".format),
        "router ms": lambda row: _per_step_ms(row.router_time_ns, steps),
        "experts ms": lambda row: _per_step_ms(row.experts_time_ns, steps),
        "shared ms": lambda row: _per_step_ms(row.shared_time_ns, steps),
        "all-to-all ms": lambda row: _per_step_ms(row.all_to_all_time_ns, steps),
        "": lambda row: shorten(clean(row.tokens_unknown or ", ".join(row.kernels)), _LONGEST_KERNELS),
    }
    return _table(analysis.expert_layers, columns, 2, left_last=True)


def expert_section(analysis: Analysis) -> str:
    """One row per expert, in the order of the model."""
    columns: _Columns = {
        "layer": lambda row: clean(row.layer),
        "expert": lambda row: str(row.expert),
        "tokens": lambda row: _known(row.tokens_per_step, "{:.6g}".format),
        "share %": lambda row: _known(row.share, lambda share: f"{100 * share:.1f}"),
        "time": lambda row: _known(row.time_per_step_ns, milliseconds),
        "GFLOP": lambda row: _known(row.flops_per_step, _giga),
        "tokens of each step": lambda row: " ".join(map(str, row.step_tokens)),
    }
    return _table(analysis.experts, columns, 1, left_last=True)


def adapter_section(analysis: Analysis) -> str:
    """One row per layer that has adapters."""
    steps = step_count(analysis)
    columns: _Columns = {
        "layer": lambda row: clean(row.layer),
        "base": lambda row: _per_step_ms(row.base_time_ns, steps),
        "adapters": lambda row: _per_step_ms(row.adapter_time_ns, steps),
        "base GFLOP": lambda row: _known(row.base_flops_per_step, _giga),
        "adapters' GFLOP": lambda row: _known(row.adapter_flops_per_step, _giga),
    }
    return _table(analysis.adapters, columns, 1)


def uncounted_section(rows: Sequence[UncountedRow]) -> str:
    """Ops that work, and tell not how much; times with shapes being recorded."""
    columns: _Columns = {
        "op": lambda row: shorten(clean(row.op), _LONGEST_KERNELS),
        "class": lambda row: row.class_name,
        "phase": lambda row: row.phase,
        "calls in all": lambda row: str(row.count),
        "time": lambda row: milliseconds(row.time_per_step_ns),
    }
    return _table(rows, columns, 3)


def step_section(analysis: Analysis) -> str:
    """One row per step; `-` is what belongs to no step.

    `step takes`: until both the CPU and the devices are done with it; `CPU span`: from its begin to its end on the CPU.
    """
    splits = analysis.overview.steps if analysis.overview is not None else ()
    took = {split.step: milliseconds(split.span_ns) for split in splits if split.step is not None}
    phases = [phase for phase in PHASES if any(row.phases_ns.get(phase) for row in analysis.steps)]
    columns: _Columns = {
        "step": lambda row: "-" if row.step is None else str(row.step),
        "time": lambda row: at_least(milliseconds(row.time_ns), {"lost_launches": row.lost_launches}),
        "step takes": lambda row: took.get(row.step, ""),
        "CPU span": lambda row: _known(row.span_ns, milliseconds),
        **{phase: _in_phase(phase) for phase in phases},
        "attention": lambda row: _known(row.attention_ns or None, milliseconds),
        "peak": lambda row: _known(row.peak_bytes, lambda size: f"{mebibytes(size)} MiB"),
    }
    return _table(analysis.steps, columns, 1)


def _in_phase(phase: Phase) -> Callable[[StepRow], str]:
    return lambda row: _known(row.phases_ns.get(phase), milliseconds)


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
