"""What texts on many ranks are made of: tables that fit, wrapped lines, numbers with few digits."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

from profiler_wrapper.reports.text import cells, clean, grid, shorten


def table(
    title: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int,
    *,
    left_columns: int = 2,
    notes: Sequence[str] = (),
) -> str:
    """A table below its title, with notes below it; its last columns are left out until it fits."""
    if not rows:
        return ""
    used = [at for at in range(len(header)) if any(row[at] for row in rows)]
    while True:
        text = grid([header[at] for at in used], [[row[at] for at in used] for row in rows], left_columns=left_columns)
        if width_of(text) <= width or len(used) <= 2:
            break
        used.pop()
    lines = [shorten(line, width) for line in text.split("\n")]
    return "\n".join([*wrapped(title, width), *lines, *wrapped("; ".join(notes), width, first="  ")])


def width_of(text: str) -> int:
    """Columns of its longest line."""
    return max(cells(line) for line in text.split("\n"))


def wrapped(text: str, width: int, *, first: str = "") -> list[str]:
    """`text` in lines that fit, all but the first as far in as `first` takes it."""
    if not text:
        return []
    return textwrap.wrap(
        clean(text), width, initial_indent=first, subsequent_indent=" " * len(first), break_on_hyphens=False
    )


def ms(value: float | None) -> str:
    """Milliseconds, with three digits or so."""
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def counted(count: int, what: str) -> str:
    """`1 rank`, `4 ranks`."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def number(value: float | None, decimals: int) -> str:
    """Empty where it is not known."""
    return "" if value is None or not math.isfinite(value) else f"{value:.{decimals}f}"


def percent(share: float) -> str:
    """`0.5` -> `50 %`."""
    return f"{100 * share:.0f} %" if math.isfinite(share) else "-"


def byte_count(value: int) -> str:
    """Bytes in the unit that fits them."""
    for size, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value} B"


def few(ranks: Sequence[int]) -> str:
    """The first three, and how many more there are."""
    return ", ".join(map(str, ranks[:3])) + (f" +{len(ranks) - 3}" if len(ranks) > 3 else "")
