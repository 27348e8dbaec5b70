"""The page of a run: every view in one HTML file that opens from disk and loads nothing."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from pathlib import Path

from profiler_wrapper.analysis.model import Analysis
from profiler_wrapper.reports.page_data import page_data
from profiler_wrapper.reports.page_frame import FRAME_FOLDER, FRAME_SCRIPTS, packaged_source, page_text


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
    views = ((name, packaged_source(FRAME_FOLDER, name)) for name in _view_names())
    return page_text(page_data(analysis, title=title, trace_href=trace_href), views)


@cache
def _view_names() -> tuple[str, ...]:
    """The scripts of the views, in alphabetical order."""
    names = {file.name for file in files(__package__).joinpath(FRAME_FOLDER).iterdir() if file.name.endswith(".js")}
    return tuple(sorted(names - set(FRAME_SCRIPTS)))
