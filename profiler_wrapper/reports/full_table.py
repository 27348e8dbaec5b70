"""All that was measured as text, in model order, without a limit of rows or columns: for the log file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from profiler_wrapper.place.names import PHASES
from profiler_wrapper.reports import describe
from profiler_wrapper.reports.columns import COLUMNS, Values, phase_values, scale_of
from profiler_wrapper.reports.memory import memory_sections
from profiler_wrapper.reports.table import Format, at_least, cell_text, formats_for
from profiler_wrapper.reports.text import clean, grid, shorten
from profiler_wrapper.tables.model import Analysis
from profiler_wrapper.units import mebibytes

_LONGEST_LINE = 400
# By the kind of a column, in one unit whatever the values.
_FORMATS: Mapping[str, Format] = {
    **formats_for([]),
    "flops": Format("GFLOP", lambda flops: f"{flops / 1e9:.3f}"),
    "rate": Format("G/s", lambda per_s: f"{per_s / 1e9:.1f}"),
    "bytes": Format("MiB", mebibytes),
    "count": Format("", lambda count: f"{count:.6g}" if count < 1e6 else f"{count:.0f}"),
    "text": Format("", lambda text: clean(str(text))),
    "names": Format("", lambda names: shorten(clean(names if isinstance(names, str) else ", ".join(names)), 60)),
}


def full_table(analysis: Analysis) -> str:
    """Print every layer and phase, then attention, classes, steps, what is followed by name, memory and warnings.

    Times are ms per step (sums over the timed trace divided by its steps), but in the table of the
    steps; sizes MiB.
    """
    series = (
        f"{clean(one.name)}: {' '.join('-' if value is None else one.text(value) for value in one.values)}"
        for one in describe.followed(analysis)
    )
    steps = (step_section(analysis), describe.parts_in_words(analysis), describe.left_out_in_words(analysis))
    sections = [
        (f"Layers, in model order: ms {describe.per_step(analysis)}, MiB", layer_section(analysis)),
        *_other_tables(analysis),
        ("Share of the peak", describe.use_line(analysis, _LONGEST_LINE)),
        ("Steps: ms", "\n".join(filter(None, steps))),
        ("Followed by name: ms in each step or entry; of a function what it gave", "\n".join(series)),
        *memory_sections(analysis),
        ("KV cache", "\n".join(describe.kv_cache_lines(analysis))),
        ("Warnings", "\n".join(map(clean, analysis.warnings))),
    ]
    parts = [", ".join(describe.title_parts(analysis)), *(f"{title}\n\n{text}" for title, text in sections if text)]
    return "\n\n".join(parts) + "\n"


def layer_section(analysis: Analysis) -> str:
    """Return one row per layer and phase, then what has no layer, `(unattributed)` by reason, and the total."""
    scale = scale_of(analysis)
    # CPU time of calls holds neither what other threads do for them nor the waiting.
    titles = {"communication": "communication calls", "cpu": ""} if analysis.time_basis == "cpu" else {}
    columns = [(column, title) for column in COLUMNS if (title := titles.get(column.key, column.full))]

    def numbers(sums: Values) -> list[str]:
        """Write the cells of a row; work is that of a step, even where it has no rates."""
        work, rates = scale._replace(work=1).of(sums), scale.of(sums)
        values = {column.key: (rates if column.kind in ("rate", "share") else work) for column, _ in columns}
        return [cell_text(column, values[column.key], _FORMATS[column.kind]) for column, _ in columns]

    drawn = []
    for row in sorted(analysis.layers, key=lambda row: (not row.layer, row.order, row.layer, PHASES.index(row.phase))):
        name, kind = (row.layer, row.kind) if row.layer else (f"({describe.outside_label(row)})", "")
        flags = " ".join(flag for flag in ("compiled", "shared", "graph") if getattr(row, flag))
        drawn.append([clean(name), clean(row.class_name), kind, row.phase, *numbers(phase_values(row)), flags])
    closing = [(f"(unattributed) {clean(row.reason)}", row.time_ns) for row in analysis.unattributed]
    for name, time_ns in [*closing, ("TOTAL", analysis.time.total_ns)]:
        sums = {"self": time_ns, "time": time_ns, "lost_launches": name == "TOTAL" and analysis.lost_launches}
        drawn.append([name, "", "", "", *numbers(sums), ""])
    return grid(["layer", "class", "kind", "phase", *(title for _, title in columns), "flags"], drawn, left_columns=4)


def step_section(analysis: Analysis) -> str:
    """Return one row per step; `-` is what belongs to no step.

    `step takes`: until both the CPU and the devices are done with it; `CPU span`: from its begin to its end on the CPU.
    """
    splits = analysis.overview.steps if analysis.overview is not None else ()
    took: dict[int | None, int] = {split.step: split.span_ns for split in splits if split.step is not None}
    phases = [phase for phase in PHASES if any(row.phases_ns.get(phase) for row in analysis.steps)]
    drawn = []
    for row in analysis.steps:
        times_ns = (took.get(row.step), row.span_ns, *map(row.phases_ns.get, phases), row.attention_ns or None)
        time = at_least(_FORMATS["time"].text(row.time_ns), {"lost_launches": row.lost_launches})
        step = "-" if row.step is None else str(row.step)
        drawn.append([step, time, *map(_FORMATS["time"].of, times_ns), _FORMATS["bytes"].of(row.peak_bytes)])
    return grid(["step", "time", "step takes", "CPU span", *phases, "attention", "peak, MiB"], drawn)


def _other_tables(analysis: Analysis) -> Iterator[tuple[str, str]]:
    """Yield titles and texts of the tables that are not of layers; a sum over the trace becomes that of a step."""
    per, steps, total_ns = f"ms {describe.per_step(analysis)}", describe.step_count(analysis), analysis.time.total_ns

    def cell(row: Any, kind: str, field: str | Callable[[Any], Any]) -> str:
        value = field(row) if callable(field) else getattr(row, field)
        is_sum = kind == "time" and "_per_step" not in str(field)
        return _FORMATS[kind].of(value / steps if is_sum and value is not None else value)

    def table(rows: Iterable[Any], *columns: tuple[str, str, str | Callable[[Any], Any]]) -> str:
        """Print rows in `columns`: the title, the kind and the field of each."""
        words = [kind in ("text", "names") for _, kind, _ in columns]
        drawn = [[cell(row, kind, field) for _, kind, field in columns] for row in rows]
        return grid([column[0] for column in columns], drawn, left_columns=words.index(False), left_last=words[-1])

    layer, phase = ("layer", "text", "layer"), ("phase", "text", "phase")
    yield f"Attention: {per}", table(
        analysis.attention, layer, phase, ("backend", "text", "backend"), ("time", "time", "time_ns"),
        ("kernels", "names", "kernels"),
    )  # fmt: skip
    yield f"Classes: {per}", table(
        analysis.classes, ("class", "text", "class_name"), phase, ("time", "time", "time_ns"),
        ("share %", "share", lambda row: row.time_ns / total_ns if total_ns else None),
        ("events", "count", lambda row: row.count / steps), ("GFLOP", "flops", lambda row: row.flops_per_step or None),
    )  # fmt: skip
    yield f"Layers of experts: {per}", table(
        analysis.expert_layers, ("layer", "text", lambda row: row.layer or "(not known)"), ("by", "text", "method"),
        ("experts", "count", "experts"), ("tokens", "count", "tokens_per_step"), ("busiest/mean", "number", "balance"),
        ("router ms", "time", "router_time_ns"), ("experts ms", "time", "experts_time_ns"),
        ("shared ms", "time", "shared_time_ns"), ("all-to-all ms", "time", "all_to_all_time_ns"),
        ("", "names", lambda row: row.tokens_unknown or row.kernels),
    )  # fmt: skip
    yield "Experts, in the steps with shapes: ms a step", table(
        analysis.experts, layer, ("expert", "count", "expert"), ("tokens", "count", "tokens_per_step"),
        ("share %", "share", "share"), ("time", "time", "time_per_step_ns"), ("GFLOP", "flops", "flops_per_step"),
        ("tokens of each step", "text", lambda row: " ".join(map(str, row.step_tokens))),
    )  # fmt: skip
    yield f"Adapters beside what they adapt: {per}", table(
        analysis.adapters, layer, ("base", "time", "base_time_ns"), ("adapters", "time", "adapter_time_ns"),
        ("base GFLOP", "flops", "base_flops_per_step"), ("adapters' GFLOP", "flops", "adapter_flops_per_step"),
    )  # fmt: skip
    for what, rows in (("FLOPs", analysis.uncounted), ("bytes", analysis.untold_bytes)):
        yield f"Work of which no {what} are known: ms a step", table(
            rows, ("op", "names", "op"), ("class", "text", "class_name"), phase, ("calls in all", "count", "count"),
            ("time", "time", "time_per_step_ns"),
        )  # fmt: skip
