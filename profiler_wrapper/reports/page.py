"""The page of a run: every view in one HTML file that opens from disk and loads nothing.

The data stand in the page as JSON, which scripts read; no name of the run ever becomes markup.
"""

from __future__ import annotations

import json
import re
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profiler_wrapper.analysis.model import Analysis
from profiler_wrapper.reports.page_data import page_data
from profiler_wrapper.reports.text import clean, shorten

if TYPE_CHECKING:
    from jinja2 import Template

# What the views build on, in the order that it needs itself.
_FIRST = (
    "format.js", "elements.js", "data.js", "theme.js", "page.js",
    "table_rows.js", "table_cells.js", "table.js", "chart.js",
)  # fmt: skip
_LONGEST_TITLE = 120
# Inside a script element these would end it, or begin a comment; JSON reads the escapes as the letters themselves.
_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
_UNSAFE = re.compile("[" + "".join(_ESCAPES) + "]")


def write_page(analysis: Analysis, path: Path, *, title: str = "", trace_href: str | None = None) -> None:
    """Writes the page of `analysis`, whole or not at all for the caller to see to.

    `title`: what the page is called, else the model and the machine. `trace_href`: where the Chrome trace
    lies, relative to the page.

    Raises:
        OSError: the file cannot be written.
    """
    path.write_text(page_html(analysis, title=title, trace_href=trace_href), encoding="utf-8")


def page_html(analysis: Analysis, *, title: str = "", trace_href: str | None = None) -> str:
    """The page as text."""
    from markupsafe import Markup  # with jinja2, which a command without a page need not wait for

    data = page_data(analysis, title=title, trace_href=trace_href)
    return _template().render(
        title=shorten(clean(data["page"]["title"], unicode=True), _LONGEST_TITLE, ellipsis="…"),
        style=Markup(_source("style.css")),
        data=Markup(script_json(data)),
        plotly=Markup(_plotly()),
        scripts=[(name, Markup(_inside_script(_source(name)))) for name in _script_names()],
    )


def script_json(value: Any) -> str:
    """JSON that stays JSON inside a script element, whatever the names in it hold."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return _UNSAFE.sub(lambda found: _ESCAPES[found.group()], text)


@cache
def _template() -> Template:
    from jinja2 import Environment

    return Environment(autoescape=True, keep_trailing_newline=True).from_string(_source("template.html"))


@cache
def _source(name: str) -> str:
    return files(__package__).joinpath("page").joinpath(name).read_text(encoding="utf-8")


@cache
def _script_names() -> tuple[str, ...]:
    """All scripts of the page, what others build on first."""
    names = {file.name for file in files(__package__).joinpath("page").iterdir() if file.name.endswith(".js")}
    return (*_FIRST, *sorted(names - set(_FIRST)))


@cache
def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    return _inside_script(get_plotlyjs())


def _inside_script(source: str) -> str:
    """JavaScript with nothing in its texts that would end a script element."""
    return re.sub("<(?=/script|!--)", r"\\x3c", source, flags=re.IGNORECASE)
