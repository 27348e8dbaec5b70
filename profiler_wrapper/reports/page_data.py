"""What the page knows of a run: all of result.json in a compact form, and what its views need beside it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from profiler_wrapper.analysis.model import Analysis
from profiler_wrapper.analysis.phase import PHASES
from profiler_wrapper.reports.class_colors import CLASS_COLORS, SPLIT_COLORS
from profiler_wrapper.reports.describe import (
    coverage_percent,
    full_steps_in_words,
    has_like_steps,
    machine,
    per_step,
    rank_in_words,
    root_names,
    step_count,
    step_numbers,
    steps_in_words,
    use_line,
    work_scale,
)
from profiler_wrapper.reports.figures import PHASE_COLORS
from profiler_wrapper.reports.kind_colors import KIND_COLORS, OTHER_KIND
from profiler_wrapper.reports.memory_colors import CATEGORY_COLORS
from profiler_wrapper.reports.page_groups import layer_groups, parents_of_layers
from profiler_wrapper.reports.page_views import view_data
from profiler_wrapper.reports.result_json import LISTS, to_dict

_Made = TypeVar("_Made")
_WIDE = 10_000  # columns: a use line in one piece


def page_data(analysis: Analysis, *, title: str = "", trace_href: str | None = None) -> dict[str, Any]:
    """JSON types only. Lists of rows become columns (see `columns_of`), the rest is as in result.json.

    Beside it stand `texts`, `page` (the title, colours, which layers are alike, and words that all reports share)
    and `views` (what single views need).
    """
    data = to_dict(analysis)
    texts = Texts()
    for name in LISTS:
        data[name] = columns_of(data[name], texts)
    data["run"] = {name: _as_columns(value, texts) for name, value in data["run"].items()}
    page, views = _page(analysis, title, trace_href), view_data(analysis)
    return {**data, "texts": texts.all, "page": _as_text(page), "views": _as_text(views)}


def _page(analysis: Analysis, title: str, trace_href: str | None) -> dict[str, Any]:
    parents, no_parents = _contained(parents_of_layers, analysis)
    groups, no_groups = _contained(layer_groups, analysis)
    return {
        "title": title or default_title(analysis),
        "machine": machine(analysis),
        "rank": rank_in_words(analysis),
        "steps_in_words": steps_in_words(analysis),
        "steps": step_count(analysis),
        "step_numbers": step_numbers(analysis),
        "like_steps": has_like_steps(analysis),
        "per": per_step(analysis) if has_like_steps(analysis) else "over the whole trace",
        "full_steps": full_steps_in_words(analysis),
        "attributed": f"{coverage_percent(analysis)} %",
        "work_scale": work_scale(analysis),
        "use": use_line(analysis, _WIDE),
        "trace_href": _harmless(trace_href),
        "phases": list(PHASES),
        "colors": {
            "phase": dict(PHASE_COLORS),
            "class": dict(CLASS_COLORS),
            "category": dict(CATEGORY_COLORS),
            "split": dict(SPLIT_COLORS),
            "kind": {**KIND_COLORS, "other": OTHER_KIND},
        },
        "parents": parents,
        "groups": groups or [],
        "failed": {"parents": no_parents, "groups": no_groups},
    }


def _contained(make: Callable[[Analysis], _Made], analysis: Analysis) -> tuple[_Made | None, str | None]:
    """What `make` makes, and why it could not: one view is not worth the page."""
    try:
        return make(analysis), None
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def _as_text(value: Any) -> Any:
    """`value` with every text as result.json has it: a lone surrogate is its escape."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, dict):
        return {_as_text(name): _as_text(item) for name, item in value.items()}
    return [_as_text(item) for item in value] if isinstance(value, list) else value


def default_title(analysis: Analysis) -> str:
    """`"LlamaForCausalLM on NVIDIA H200"`."""
    model, where = root_names(analysis), machine(analysis)
    return f"{model} on {where}" if model else where


def _harmless(href: str | None) -> str | None:
    """A link that leads to a file or a page: nothing that a browser would run."""
    if not href:
        return None
    scheme = re.match(r"([a-z][a-z0-9+.-]*):", re.sub(r"[\x00-\x20]", "", href).lower())  # which browsers leave out too
    return href if scheme is None or scheme[1] in ("file", "http", "https") else None


class Texts:
    """Every text once; where it is used stands its number."""

    def __init__(self) -> None:
        self.all: list[str] = []
        self._numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        """The number of `text`, a new one if it is new."""
        number = self._numbers.setdefault(text, len(self.all))
        if number == len(self.all):
            self.all.append(text)
        return number


def _as_columns(value: Any, texts: Texts) -> Any:
    """`value` in columns where it is a list of rows with the same keys, else as it is."""
    is_rows = isinstance(value, list) and value and all(isinstance(row, dict) and row for row in value)
    return columns_of(value, texts) if is_rows and len({tuple(row) for row in value}) == 1 else value


def columns_of(rows: Sequence[Mapping[str, Any]], texts: Texts) -> dict[str, Any]:
    """`rows`, all with the same keys, as columns: `{"count": 2, "columns": {name: column}}`.

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
        return {"text": [None if value is None else texts.number(value) for value in values]}
    if all(isinstance(value, list) and all(isinstance(item, str) for item in value) for value in values):
        return {"texts": [[texts.number(item) for item in value] for value in values]}
    return {"values": values}
