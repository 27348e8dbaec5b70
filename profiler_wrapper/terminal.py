"""The terminal that is printed to: how wide it is, whether it shows every character, and colours."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable
from typing import Literal, NamedTuple, TypeAlias

WIDTH_OF_FILES = 100  # columns, where the output is no terminal
Stream: TypeAlias = Literal["stdout", "stderr"]


def terminal_width(on: Stream = "stdout") -> int:
    """Columns of the terminal that is written to, or COLUMNS in the environment; elsewhere 100."""
    if not (_is_terminal(on) or os.environ.get("COLUMNS")):
        return WIDTH_OF_FILES
    try:
        columns = os.get_terminal_size(getattr(sys, on).fileno()).columns
    except (AttributeError, ValueError, OSError):
        columns = 0
    return shutil.get_terminal_size((columns or WIDTH_OF_FILES, 24)).columns


def unicode_output() -> bool:
    """Whether what is written to can hold every character."""
    return (getattr(sys.stdout, "encoding", None) or "").lower().replace("-", "") == "utf8"


def unicode_terminal() -> bool:
    """Whether a terminal is written to, and can hold every character."""
    return _is_terminal() and unicode_output()


def styled_terminal(on: Stream = "stdout") -> bool:
    """Whether a terminal is written to, and shows colours; NO_COLOR and FORCE_COLOR say so for all, if not empty."""
    if os.environ.get("NO_COLOR") or os.environ.get("FORCE_COLOR"):
        return not os.environ.get("NO_COLOR")
    return _is_terminal(on) and os.environ.get("TERM") != "dumb"


def _is_terminal(on: Stream = "stdout") -> bool:
    try:
        terminal: bool = getattr(sys, on).isatty()
    except (AttributeError, ValueError):  # there is none, or it is closed
        return False
    return terminal


# --- Lines made of pieces that have a style, which is drawn where a terminal shows it ---

Style: TypeAlias = Literal["", "bold", "accent", "warning"]
_CODES = {"bold": 1, "accent": 36, "warning": 33}  # of ANSI terminals: bold, cyan, yellow
_EIGHTHS = " ▏▎▍▌▋▊▉"


class Cell(NamedTuple):
    """A piece of a line, and how a terminal shows it."""

    text: str
    style: Style = ""


def in_a_row(row: Iterable[Cell], styled: bool) -> str:
    """The cells of one line; their styles as codes of a terminal, if `styled`, which take no columns."""
    return "".join(_painted(cell) if styled and cell.style else cell.text for cell in row).rstrip()


def _painted(cell: Cell) -> str:
    seen = cell.text.rstrip()
    return f"\x1b[{_CODES[cell.style]}m{seen}\x1b[0m{cell.text[len(seen) :]}" if seen else cell.text


def bar(share: float, width: int, *, unicode: bool = False) -> str:
    """`share` of `width` columns: `"####"`, or blocks to the eighth of a column."""
    if not unicode:
        return "#" * round(width * min(share, 1))
    whole, eighths = divmod(round(8 * width * min(share, 1)), 8)
    return ("█" * whole + _EIGHTHS[eighths]).rstrip()
