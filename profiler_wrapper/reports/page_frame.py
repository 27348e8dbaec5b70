"""What every page is made in: one HTML file with its style, its data and its scripts, which loads nothing.

The data stand in the page as JSON, which scripts read; no name of a run ever becomes markup.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from profiler_wrapper.reports.text import clean, shorten

if TYPE_CHECKING:
    from jinja2 import Template

FRAME_FOLDER = "page"
# What views build on, in the order that it needs itself.
FRAME_SCRIPTS = (
    "format.js", "elements.js", "data.js", "theme.js", "page.js",
    "table_rows.js", "table_keys.js", "table_cells.js", "table_fit.js", "table.js", "chart.js",
)  # fmt: skip
_LONGEST_TITLE = 120
# Inside a script element these would end it, or begin a comment, and a lone surrogate is no UTF-8; JSON reads their
# escapes as the letters themselves.
_UNSAFE = re.compile("[<>&\u2028\u2029\ud800-\udfff]")


def page_text(data: Mapping[str, Any], views: Iterable[tuple[str, str]]) -> str:
    """The page of `data`, JSON types only, with its title as `data["page"]["title"]`.

    `views`: name and source of the scripts that make the views; what they build on comes before them.
    """
    from markupsafe import Markup  # with jinja2, which a command without a page need not wait for

    scripts = [*((name, packaged_source(FRAME_FOLDER, name)) for name in FRAME_SCRIPTS), *views]
    return _template().render(
        title=shorten(clean(data["page"]["title"], unicode=True), _LONGEST_TITLE, ellipsis="…"),
        style=Markup(packaged_source(FRAME_FOLDER, "style.css")),
        data=Markup(script_json(data)),
        plotly=Markup(_plotly()),
        scripts=[(name, Markup(_inside_script(source))) for name, source in scripts],
    )


def script_json(value: Any) -> str:
    """JSON that stays JSON inside a script element, whatever the names in it hold."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return _UNSAFE.sub(lambda found: f"\\u{ord(found.group()):04x}", text)


@cache
def packaged_source(folder: str, name: str) -> str:
    """A file of a folder beside this module, which the package ships."""
    return files(__package__).joinpath(folder).joinpath(name).read_text(encoding="utf-8")


@cache
def _template() -> Template:
    from jinja2 import Environment

    return Environment(autoescape=True, keep_trailing_newline=True).from_string(
        packaged_source(FRAME_FOLDER, "template.html")
    )


@cache
def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    return _inside_script(get_plotlyjs())


def _inside_script(source: str) -> str:
    """JavaScript with nothing in its texts that would end a script element."""
    return re.sub("<(?=/script|!--)", r"\\x3c", source, flags=re.IGNORECASE)
