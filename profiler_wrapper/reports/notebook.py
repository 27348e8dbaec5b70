"""A result as a notebook shows it: one HTML fragment that loads nothing, runs nothing and takes the notebook's colours.

Every text of the run is escaped; marks that cannot be seen are shown as escapes, and long names are cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any

from profiler_wrapper.analysis.model import Analysis, Phase
from profiler_wrapper.reports.describe import per_step, title_parts, use_line
from profiler_wrapper.reports.memory import memory_lines
from profiler_wrapper.reports.table_rows import TableRow, phase_columns, table_rows
from profiler_wrapper.reports.text import AT_LEAST, clean, shorten
from profiler_wrapper.units import MIB

_ROWS = 20
_FINDINGS = 3
_WARNINGS = 3
_NAME_WIDTH = 60
_TEXT_WIDTH = 300
# Colours are those of the text around, thinned: legible on light and on dark pages.
_STYLE = """\
.pw-result { font-size: 13px; line-height: 1.45; max-width: 1100px; overflow-x: auto; }
.pw-result p { margin: 0 0 4px; }
.pw-result .pw-verdict { font-size: 15px; font-weight: 600; }
.pw-result .pw-quiet { opacity: 0.7; }
.pw-result ul { margin: 4px 0 8px; padding-left: 20px; }
.pw-result table { border-collapse: collapse; margin: 6px 0; font-variant-numeric: tabular-nums; }
.pw-result th, .pw-result td { padding: 1px 8px; text-align: right; background: transparent; color: inherit; }
.pw-result th { font-weight: 600; border-bottom: 1px solid color-mix(in srgb, currentColor 40%, transparent); }
.pw-result th:first-child, .pw-result td:first-child { text-align: left; white-space: pre; }
.pw-result td:first-child { font-family: ui-monospace, monospace; }
.pw-result tr.pw-total td { font-weight: 600; }
.pw-result tr.pw-total td { border-top: 1px solid color-mix(in srgb, currentColor 40%, transparent); }
"""


def result_html(analysis: Analysis) -> str:
    """The verdict and the first findings, what was measured, the layer table, warnings."""
    parts = [
        _paragraph(analysis.summary.get("verdict"), "pw-verdict"),
        _findings(analysis.summary.get("findings")),
        _paragraph(", ".join(title_parts(analysis, unicode=True)), "pw-quiet"),
        _table(analysis),
        _paragraph(use_line(analysis, _TEXT_WIDTH)),
        *(_paragraph(line) for line in memory_lines(analysis.memory, _TEXT_WIDTH)[:1]),
        *(_paragraph(f"warning: {warning}", "pw-quiet") for warning in analysis.warnings[:_WARNINGS]),
        _paragraph(_more(len(analysis.warnings) - _WARNINGS, "warnings in result.warnings"), "pw-quiet"),
    ]
    return fragment("".join(parts))


def fragment(body: str) -> str:
    """HTML in the style of results."""
    return f'<div class="pw-result"><style>\n{_STYLE}</style>{body}</div>'


def html_table(heading: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]]) -> str:
    """A table of cells that are HTML already; each row with the class it gets, or `""`."""
    head = "".join(f"<th>{cell}</th>" for cell in heading)
    lines = (
        f"<tr{f' class={chr(34)}{kind}{chr(34)}' if kind else ''}>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
        for kind, cells in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def harmless(text: object, width: int = _TEXT_WIDTH) -> str:
    """Any text as HTML that shows it, in at most `width` characters."""
    return escape(shorten(clean(str(text), unicode=True), width, ellipsis="…"))


def _paragraph(text: object, kind: str = "") -> str:
    return f'<p class="{kind}">{harmless(text)}</p>' if text else ""


def _more(count: int, what: str) -> str:
    return f"({count} more {what})" if count > 0 else ""


def _findings(findings: object) -> str:
    """The first findings: what is so, what it saves at most, how."""
    if not isinstance(findings, (list, tuple)):
        return ""
    known = [finding for finding in findings if isinstance(finding, Mapping)]
    items = "".join(
        f"<li>{harmless(finding.get('title', ''))}{_saving(finding)}"
        f'<br><span class="pw-quiet">{harmless(finding.get("fix", ""))}</span></li>'
        for finding in known[:_FINDINGS]
    )
    more = _paragraph(_more(len(known) - _FINDINGS, "in result.summary"), "pw-quiet")
    return f"<ul>{items}</ul>{more}" if items else ""


def _saving(finding: Mapping[str, Any]) -> str:
    saved = []
    if isinstance(time_us := finding.get("saves_at_most_us"), (int, float)):
        saved.append(f"{time_us / 1e3:.3g} ms a step")
    if isinstance(size := finding.get("saves_at_most_bytes"), (int, float)):
        saved.append(f"{size / MIB:.3g} MiB")
    return f" <b>saves at most {escape(' and '.join(saved))}</b>" if saved else ""


def _table(analysis: Analysis) -> str:
    """The rows of the printed table."""
    found = table_rows(analysis, most=_ROWS)
    columns = [column for column in _columns(found.rows) if any(column[1](row) for row in found.rows)]
    rows = [(f"pw-{row.kind}", [_name(row), *(text(row) for _, text in columns)]) for row in found.rows]
    heading = [f"layer ({escape(per_step(analysis))})", *(title for title, _ in columns)]
    hidden = _more(found.hidden_layers, "layers, smaller: result.table() has them all")
    return html_table(heading, rows) + _paragraph(hidden, "pw-quiet")


def _columns(rows: Sequence[TableRow]) -> list[tuple[str, Callable[[TableRow], str]]]:
    total_ns = next((row.total_ns for row in rows if row.kind == "total"), 0)
    return [
        *((f"{title}, ms", _phase(phase)) for phase, title in phase_columns(rows)),
        ("total, ms", lambda row: f"{row.total_ns / 1e6:.3f}"),
        ("share, %", lambda row: f"{100 * row.total_ns / total_ns:.1f}" if total_ns else ""),
        ("attention, ms", lambda row: f"{row.attention_ns / 1e6:.3f}" if row.attention_ns else ""),
        ("GFLOP", _work),
        ("retained, MiB", lambda row: "" if row.retained_bytes is None else f"{row.retained_bytes / MIB:.1f}"),
        ("peak, MiB", lambda row: "" if row.peak_bytes is None else f"{row.peak_bytes / MIB:.1f}"),
    ]


def _work(row: TableRow) -> str:
    if row.flops is None and row.known_flops is not None:
        return f"{AT_LEAST}{row.known_flops / 1e9:.3f}"
    return f"{row.flops / 1e9:.3f}" if row.flops else ""


def _phase(phase: Phase) -> Callable[[TableRow], str]:
    def text(row: TableRow) -> str:
        time_ns = row.times_ns.get(phase)
        return f"{time_ns / 1e6:.3f}" if time_ns else ""

    return text


def _name(row: TableRow) -> str:
    """Indented; what stands before and after it whole, and the full name on pointing at it."""
    after = row.after
    if row.range_ns is not None:
        after = f" ({row.range_ns[0] / 1e6:.3f}-{row.range_ns[1] / 1e6:.3f})"
    label = harmless(row.label, _NAME_WIDTH)
    full = harmless(row.label, 2000)
    named = label if full == label else f'<span title="{full}">{label}</span>'
    return f"{'  ' * row.depth}{harmless(row.before)}{named}{escape(after)}"
