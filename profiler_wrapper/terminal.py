"""The terminal that is printed to: how wide it is, and whether it shows every character."""

from __future__ import annotations

import os
import shutil
import sys

WIDTH_OF_FILES = 100  # columns, where the output is no terminal


def terminal_width() -> int:
    """Columns of the terminal that is written to, or COLUMNS in the environment; elsewhere 100."""
    if _is_terminal() or os.environ.get("COLUMNS"):
        return shutil.get_terminal_size((WIDTH_OF_FILES, 24)).columns
    return WIDTH_OF_FILES


def unicode_output() -> bool:
    """Whether what is written to can hold every character."""
    return (getattr(sys.stdout, "encoding", None) or "").lower().replace("-", "") == "utf8"


def unicode_terminal() -> bool:
    """Whether a terminal is written to, and can hold every character."""
    return _is_terminal() and unicode_output()


def _is_terminal() -> bool:
    try:
        return sys.stdout.isatty()
    except (AttributeError, ValueError):  # there is none, or it is closed
        return False
