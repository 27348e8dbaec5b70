"""A result as HTML: the page of a run, every view in one file that loads nothing; and what a notebook shows."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profiler_wrapper.advice.time_parts import time_parts
from profiler_wrapper.errors import in_a_line
from profiler_wrapper.place.names import PHASES
from profiler_wrapper.reports import describe, figures, folding
from profiler_wrapper.reports.columns import COLUMNS, Column, Scale, Values, scale_of, summed
from profiler_wrapper.reports.folding import Fold, LayerTotal
from profiler_wrapper.reports.memory import category_name
from profiler_wrapper.reports.result_json import LISTS, NS_PER_US, plain, to_dict, to_plain
from profiler_wrapper.reports.roofline import HOW_TO_GET_PEAKS, not_shown, roofline
from profiler_wrapper.reports.table import ALONE, TableRow, console_table, outside_rows, total_row, unattributed_rows
from profiler_wrapper.reports.text import clean, shorten
from profiler_wrapper.reports.timeline_bytes import packed_timeline
from profiler_wrapper.tables.model import CATEGORIES, Analysis
from profiler_wrapper.units import MIB, TIME_NAMES

if TYPE_CHECKING:
    from jinja2 import Template


# --- What single views of the page need beside the rows of result.json, as plain data ---


def roofline_data(analysis: Analysis) -> dict[str, Any]:
    """Return points as the roofline picture has them, times in microseconds, and the roofs above them."""
    what = roofline(analysis)
    return {
        "points": [to_plain(point) for point in what.points],
        "total_us": analysis.time.total_ns / describe.step_count(analysis) / NS_PER_US,
        "flops_per_s": what.flops_per_s,
        "bytes_per_s": what.bytes_per_s,
        "source": what.source,
        "not_shown": not_shown(what, analysis),
        "how": "" if what.flops_per_s else HOW_TO_GET_PEAKS,
        "colors": dict(figures.KIND_COLORS),
        "other": figures.OTHER_KIND,
    }


def time_shares(analysis: Analysis) -> dict[str, Any]:
    """Return all time of the timed trace: by part of the model, as the headline has it, and what has no layer."""
    rows = [(part.name, part.time_ns, part.layers) for part in time_parts(analysis) if part.time_ns]
    rows += [(f"No layer is known: {row.reason}", row.time_ns, ()) for row in analysis.unattributed]
    total_ns = analysis.time.total_ns
    return {
        "rows": [
            {
                "name": name,
                "time_us": time_ns / NS_PER_US,
                "share": _short(time_ns / total_ns),
                "layer": next(iter(layers), None),
                "layers": len(layers),
            }
            for name, time_ns, layers in sorted(rows, key=lambda row: -row[1])
            if time_ns
        ]
    }


# --- The layer table of the page: all its numbers, which scripts draw ---

_PAGE_KINDS = {"time": "us", "rate": "flop_rate"}
_PAGE_KEYS = ("known_flops", "lost_launches", "roof", *(column.key for column in COLUMNS if column.page))
_TIMES = {column.key for column in COLUMNS if column.kind == "time"}
_OUTSIDE, _UNATTRIBUTED = "\0outside", "\0unattributed"  # rows that hold others; no layer is called so


def layer_view(analysis: Analysis) -> dict[str, Any]:
    """Return columns, rows of layers with all below them (`total`) and of each alone (`self`), the whole, the folds.

    `sum_ns`: what the outermost of `total`, and all of `self`, add up to.
    """
    scale, totals, alone = scale_of(analysis), folding.layer_totals(analysis), folding.layer_totals(analysis, own=True)
    folds = folding.sibling_folds(totals)
    whole = total_row(analysis, totals, scale)
    without_layer = sum(row.time_ns for row in analysis.layers if not row.layer)
    without_layer += sum(row.time_ns for row in analysis.unattributed)
    return {
        "columns": _layer_columns(analysis, totals),
        "total": _tree_rows(analysis, totals, folds, scale),
        "self": _flat_rows(analysis, alone, scale),
        "whole": _page_row("\0total", "Total", whole.values, row="total"),
        "groups": [_group(parent, fold) for parent, fold in folds],
        "sum_ns": {
            "total": without_layer + sum(total.time_ns for total in totals if total.parent is None),
            "self": without_layer + sum(total.time_ns for total in alone),
        },
    }


def _layer_columns(analysis: Analysis, totals: Sequence[LayerTotal]) -> list[dict[str, Any]]:
    """Return what a script needs to draw each column; those of phases come after the shares."""
    phases = [
        Column(
            key=phase,
            kind="time",
            page=phase.capitalize(),
            help=f"Time in the phase {phase}",
            spare=7 if phase in ("accumulate_grad", *ALONE) else 0,
            sets="main time" if phase not in ALONE or any(total.values.get(phase) for total in totals) else "time",
        )
        for phase in PHASES
    ]
    backends = list(describe.attention_backends(analysis))
    columns = {column.key: column for column in COLUMNS if column.page}
    attention = columns["attention"]
    columns["attention"] = replace(attention, help=f"{attention.help}: {', '.join(backends)}")
    if len(backends) == 1:
        name = shorten(clean(backends[0], unicode=True), 14, ellipsis="…")
        columns["attention"] = replace(columns["attention"], page=f"{attention.page} ({name})")
        columns["backend"] = replace(columns["backend"], sets="time")
    time, share, *others = columns.values()
    return [
        {"key": column.key, "title": column.page, "kind": _PAGE_KINDS.get(column.kind, column.kind)}
        | {name: getattr(column, name) for name in ("help", "sets", "spare", "needs", "why")}
        for column in (time, share, *phases, *others)
    ]


def _tree_rows(
    analysis: Analysis,
    totals: Sequence[LayerTotal],
    folds: Sequence[tuple[str | None, Fold]],
    scale: Scale,
) -> list[dict[str, Any]]:
    """Return layers in model order, each below the one that holds it, like siblings below a row of all of them."""
    attention = folding.attention_by_layer(analysis, {total.layer: total.parent for total in totals})
    fold_of = {member.layer: i for i, (_, fold) in enumerate(folds) for member in fold.members}
    placed: set[int] = set()
    rows = []
    for total in totals:
        i = fold_of.get(total.layer)
        if i is not None and i not in placed:
            placed.add(i)
            parent, fold = folds[i]
            backends = dict.fromkeys(name for member in fold.members for name in attention.get(member.layer, ()))
            rows.append(_page_row(f"\0group {i}", fold.label, scale.of(fold.values), backends, parent=parent, fold=i))
        label = folding.relative_name(total.layer, total.parent) if total.parent else total.layer
        row = _layer_row(total, label, scale.of(total.values), attention.get(total.layer, ()))
        rows.append(row | {"parent": total.parent if i is None else f"\0group {i}", "above": total.parent})
    outside, unattributed = outside_rows(analysis, scale), unattributed_rows(analysis, scale)
    rows += _below(_OUTSIDE, "(optimizer / other code between calls)", outside, scale)
    return rows + _below(_UNATTRIBUTED, "(unattributed)", unattributed, scale)


def _below(top: str, label: str, rows: Sequence[TableRow], scale: Scale) -> list[dict[str, Any]]:
    """Put `rows` below one that sums them up; a single one stands for itself."""
    if len(rows) < 2:
        return [
            _page_row(top, row.before + row.label if row.before else f"({row.label})", row.values, row=row.kind)
            for row in rows
        ]
    below = [_page_row(f"{top} {i}", row.label, row.values, row=row.kind, parent=top) for i, row in enumerate(rows)]
    sums = scale.completed(summed([row.values for row in rows]))
    return [_page_row(top, label, sums, row=rows[0].kind), *below]


def _flat_rows(analysis: Analysis, alone: Sequence[LayerTotal], scale: Scale) -> list[dict[str, Any]]:
    """Return what is each layer's own, then what has no layer: all rows add up."""
    attention = folding.attention_by_layer(analysis, {})
    communication = folding.own_communication(analysis)
    rows = []
    for total in alone:
        backends = attention[total.layer]
        own = {
            "attention": sum(backends.values()),
            "communication": sum(communication[total.layer, phase] for phase in PHASES),
        }
        rows.append(_layer_row(total, total.layer, scale.of({**total.values, **own}), backends))
    for row in (*outside_rows(analysis, scale), *unattributed_rows(analysis, scale)):
        rows.append(_page_row(f"\0{len(rows)}", row.before + row.label, row.values, row=row.kind))
    return rows


def _layer_row(total: LayerTotal, label: str, values: Values, backends: Iterable[str]) -> dict[str, Any]:
    row = _page_row(total.layer, label, values, backends)
    named = {"layer": total.layer, "class_name": total.class_name, "kind": total.kind, "flags": list(total.flags)}
    return row | named


def _page_row(key: str, label: str, values: Values, backends: Iterable[str] = (), **more: Any) -> dict[str, Any]:
    """Return a row; times in microseconds."""
    return {
        "id": key, "label": label, "parent": None, "above": None, "layer": "", "class_name": "", "kind": "",
        "flags": [], "fold": None, "row": "", **more,
        **{phase: _microseconds(values.get(phase) or None) for phase in PHASES},
        **{name: _microseconds(values[name]) if name in _TIMES else _short(values[name]) for name in _PAGE_KEYS},
        "backend": " + ".join(backends),
    }  # fmt: skip


def _microseconds(time_ns: float | None) -> float | None:
    return None if time_ns is None else round(time_ns / NS_PER_US, 3)


def _short(value: Any) -> Any:
    """Round a number to more digits than are shown."""
    if not isinstance(value, float):
        return value
    return round(value) if abs(value) > 1e5 else float(f"{value:.6g}")


def _group(parent: str | None, fold: Fold) -> dict[str, Any]:
    layers = [member.layer for member in fold.members]
    inside = parent is not None and layers[0].startswith(f"{parent}.") and not fold.label.startswith(parent)
    return {
        "label": fold.label,
        "full": f"{parent}.{fold.label}" if inside else fold.label,
        "parent": parent,
        "layers": layers,
        "outliers": [
            {"layer": one.layer.layer, "what": one.what, "excess": one.excess} for one in folding.outlying_layers(fold)
        ],
    }


# --------------------------------------------------------------------------------------------------
# What the page knows of a run: all of result.json in a compact form, and what its views need beside it.

_WIDE = 10_000  # columns: a use line in one piece


def page_data(analysis: Analysis, *, title: str = "", trace_href: str | None = None) -> dict[str, Any]:
    """Return what the page knows, in JSON types. Lists of rows become columns (see `columns_of`), the rest is as in
    result.json.

    Beside it stand `texts`, `page` (the title, colours, which layers are alike, and words that all reports share)
    and `views` (what single views need).
    """
    data = to_dict(analysis)
    texts: Texts = {}
    for name in LISTS:
        data[name] = columns_of(data[name], texts)
    data["run"] = {name: _as_columns(value, texts) for name, value in data["run"].items()}
    makers = {"layers": layer_view, "roofline": roofline_data, "shares": time_shares}
    views = plain({name: _contained(make, analysis) for name, make in makers.items()})
    views["layers"] = {name: _as_columns(value, texts) for name, value in views["layers"].items()}
    return {**data, "texts": list(texts), "page": plain(_page(analysis, title, trace_href)), "views": views}


def _page(analysis: Analysis, title: str, trace_href: str | None) -> dict[str, Any]:
    model, where = describe.root_names(analysis), describe.machine(analysis)
    return {
        "kind": "run",
        "title": title or (f"{model} on {where}" if model else where),
        "machine": where,
        "rank": describe.rank_in_words(analysis),
        "steps_in_words": describe.steps_in_words(analysis),
        "steps": describe.step_count(analysis),
        "step_numbers": describe.step_numbers(analysis),
        "like_steps": describe.has_like_steps(analysis),
        "per": describe.per_step(analysis) if describe.has_like_steps(analysis) else "over the whole trace",
        "full_steps": describe.full_steps_in_words(analysis),
        "attributed": f"{describe.coverage_percent(analysis)} %",
        "work_scale": describe.work_scale(analysis),
        "use": describe.use_line(analysis, _WIDE),
        "time_name": TIME_NAMES[analysis.time_basis],
        "split_names": {part: names[analysis.time_basis == "cpu"] for part, names in figures.SPLIT_NAMES.items()},
        "category_names": {category: category_name(category) for category in CATEGORIES},
        "trace_href": _safe_link(trace_href),
        "phases": list(PHASES),
        "colors": {
            "phase": dict(figures.PHASE_COLORS),
            "class": dict(figures.CLASS_COLORS),
            "category": dict(figures.CATEGORY_COLORS),
            "split": dict(figures.SPLIT_COLORS),
            "kind": {**figures.KIND_COLORS, "other": figures.OTHER_KIND},
        },
    }


def _contained(make: Callable[[Analysis], dict[str, Any]], analysis: Analysis) -> dict[str, Any]:
    """Return what `make` makes, or why it failed: one view is not worth the page."""
    try:
        return make(analysis)
    except Exception as error:
        return {"failed": in_a_line(error)}


def _safe_link(href: str | None) -> str | None:
    """Return a link if it leads to a file or a page: nothing that a browser would run."""
    if not href:
        return None
    scheme = re.match(r"([a-z][a-z0-9+.-]*):", re.sub(r"[\x00-\x20]", "", href).lower())  # which browsers leave out too
    return href if scheme is None or scheme[1] in ("file", "http", "https") else None


Texts = dict[str, int]  # every text once; where it is used stands its number


def _as_columns(value: Any, texts: Texts) -> Any:
    """Return `value` in columns where it is a list of rows with the same keys, else as it is."""
    is_rows = isinstance(value, list) and value and all(isinstance(row, dict) and row for row in value)
    return columns_of(value, texts) if is_rows and len({tuple(row) for row in value}) == 1 else value


def columns_of(rows: Sequence[Mapping[str, Any]], texts: Texts) -> dict[str, Any]:
    """Return `rows`, all with the same keys, as columns: `{"count": 2, "columns": {name: column}}`.

    A column is `{"all": value}` where all rows agree, `{"text": [number or null]}` and `{"texts": [[number]]}`
    into `texts`, else `{"values": [value]}`.
    """
    names = list(rows[0]) if rows else []
    return {"count": len(rows), "columns": {name: _column([row[name] for row in rows], texts) for name in names}}


def _column(values: list[Any], texts: Texts) -> dict[str, Any]:
    first = values[0]
    if (not isinstance(first, (str, list, dict)) or first == []) and all(
        type(value) is type(first) and value == first for value in values
    ):
        return {"all": first}
    if all(value is None or isinstance(value, str) for value in values):
        return {"text": [None if value is None else texts.setdefault(value, len(texts)) for value in values]}
    if all(isinstance(value, list) and all(isinstance(item, str) for item in value) for value in values):
        return {"texts": [[texts.setdefault(item, len(texts)) for item in value] for value in values]}
    return {"values": values}


# --------------------------------------------------------------------------------------------------
# What every page is made in: one HTML file with its style, its data and its script, which loads nothing.
#
# The data stand in the page as JSON, which the script reads; no name of a run ever becomes markup. Style and script are
# built from the folder `page` of the repository.

_FOLDER = "page"
_LONGEST_TITLE = 120
# Inside a script element these would end it, or begin a comment, and a lone surrogate is no UTF-8; JSON reads their
# escapes as the letters themselves.
_UNSAFE = re.compile("[<>&\u2028\u2029\ud800-\udfff]")


def page_text(data: Mapping[str, Any], timeline: str = "") -> str:
    """Return the page of `data`, JSON types only: what `data["page"]["kind"]` says, titled `data["page"]["title"]`.

    `timeline`: the columns of its events, packed.
    """
    from markupsafe import Markup  # with jinja2, which a command without a page need not wait for

    return page_template("template.html").render(
        headline=clean((data.get("summary", {}).get("headline") or {}).get("text", ""), unicode=True),
        title=shorten(clean(data["page"]["title"], unicode=True), _LONGEST_TITLE, ellipsis="…"),
        style=Markup(_packaged_source("page.css")),
        data=Markup(script_json(data)),
        timeline=timeline,
        first=Markup(_packaged_source("first.js")),
        program=Markup(_packaged_source("page.js")),
    )


def script_json(value: Any) -> str:
    """Return JSON that stays JSON inside a script element, whatever the names in it hold."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return _UNSAFE.sub(lambda found: f"\\u{ord(found.group()):04x}", text)


@cache
def page_template(name: str) -> Template:
    """Return one of the HTML files that the package ships; what is put in is escaped."""
    from jinja2 import Environment

    environment = Environment(autoescape=True, keep_trailing_newline=True)
    return environment.from_string(_packaged_source(name))


@cache
def _packaged_source(name: str) -> str:
    return files(__package__).joinpath(_FOLDER).joinpath(name).read_text(encoding="utf-8")


def write_page(analysis: Analysis, path: Path, *, title: str = "", trace_href: str | None = None) -> None:
    """Write the page of `analysis`, whole or not at all for the caller to see to.

    `title`: what the page is called, else the model and the machine. `trace_href`: where the Chrome trace
    lies, relative to the page.

    Raises:
        OSError: the file cannot be written.
    """
    path.write_text(page_html(analysis, title=title, trace_href=trace_href), encoding="utf-8")


def page_html(analysis: Analysis, *, title: str = "", trace_href: str | None = None) -> str:
    """Return the page as text."""
    data = page_data(analysis, title=title, trace_href=trace_href)
    data["views"]["timeline"], events = packed_timeline(analysis.timeline)
    return page_text(data, events)


# --------------------------------------------------------------------------------------------------
# A result as a notebook shows it: a fragment that loads nothing, runs nothing and takes the notebook's colours.
#
# Every text of the run is escaped; marks that cannot be seen are shown as escapes, and long texts are cut.

_ROWS, _COLUMNS = 30, 130
_FINDINGS = 3
_TEXT_WIDTH = 300
_LEAST_SHARE = 0.0005  # of a step: what takes less is nothing, with a decimal


def result_html(analysis: Analysis) -> str:
    """Return the verdict, where a step went, the first findings, then the tree of layers as it is printed."""
    summary = analysis.summary
    headline, findings = summary.get("headline"), summary.get("findings") or ()
    return page_template("notebook.html").render(
        verdict=_shown(headline["text"] if headline else summary.get("verdict") or ""),
        split=_split(analysis),
        findings=[
            {name: _shown(one.get(name, "")) for name in ("title", "fix")} | {"saves": _saving(one)}
            for one in findings[:_FINDINGS]
        ],
        more_findings=len(findings) - _FINDINGS,
        table=console_table(analysis, rows=_ROWS, width=_COLUMNS, unicode=True),
    )


def _split(analysis: Analysis) -> dict[str, Any] | None:
    """Return the parts of the wall time of a step, which add up to it: the mean of all steps."""
    steps = analysis.overview.steps if analysis.overview is not None else ()
    span_ns = sum(step.span_ns for step in steps)
    if not span_ns:
        return None
    times_ns = {part: sum(getattr(step, f"{part}_ns") for step in steps) for part in figures.SPLIT_NAMES}
    return {
        "of": "the trace" if steps[0].step is None else "a step",
        "time": describe.time_text(span_ns / len(steps)),
        "parts": [
            {
                "name": figures.SPLIT_NAMES[part][analysis.time_basis == "cpu"],
                "color": figures.SPLIT_COLORS[part],
                "time": describe.time_text(time_ns / len(steps)),
                "share": time_ns / span_ns,
            }
            for part, time_ns in times_ns.items()
            if time_ns >= _LEAST_SHARE * span_ns
        ],
    }


def _shown(text: object) -> str:
    """Return any text on one line of letters that can be seen, cut where it is long."""
    return shorten(clean(str(text), unicode=True), _TEXT_WIDTH, ellipsis="…")


def _saving(finding: Mapping[str, Any]) -> str:
    saved = []
    if isinstance(time_us := finding.get("saves_at_most_us"), (int, float)):
        saved.append(f"{time_us / 1e3:.3g} ms a step")
    if isinstance(size := finding.get("saves_at_most_bytes"), (int, float)):
        saved.append(f"{size / MIB:.3g} MiB")
    return " and ".join(saved)
