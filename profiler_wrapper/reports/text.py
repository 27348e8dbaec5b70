"""Text that fits: names cleaned, shortened in the middle, and set in columns."""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Sequence

_SPELLED = str.maketrans({"µ": "u", "±": "+-"})  # without Unicode
_LONGEST_NAME = 4000  # what is longer is cut before it is cleaned, so a name of a megabyte costs nothing


def clean(text: str, *, unicode: bool = False) -> str:
    """`text` on one printable line: control characters, surrogates and invisible marks are escaped.

    Without `unicode` everything beyond ASCII is escaped too; the signs of units and errors are spelled out.
    """
    if len(text) > _LONGEST_NAME:
        text = text[: _LONGEST_NAME // 2] + text[-_LONGEST_NAME // 2 :]
    if text.isascii() and text.isprintable():
        return text
    text = text if unicode else text.translate(_SPELLED)
    return "".join(char if _is_harmless(char, unicode) else _escape(char) for char in text)


def _is_harmless(char: str, unicode: bool) -> bool:
    return char.isprintable() and (unicode or char.isascii())


def _escape(char: str) -> str:
    return char.encode("unicode_escape", "backslashreplace").decode("ascii")


def cells(text: str) -> int:
    """Columns of a terminal that `text` takes: 2 for a wide character, 0 for a combining one."""
    return len(text) if text.isascii() else sum(map(_char_cells, text))


def _char_cells(char: str) -> int:
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def shorten(text: str, width: int, *, ellipsis: str = "...") -> str:
    """`text` in at most `width` columns, cut in the middle: `model.lay...self_attn`."""
    if cells(text) <= width:
        return text
    room = width - cells(ellipsis)
    if room < 2:
        return _head(text, width)
    tail = _head(text[::-1], (room + 1) // 2)[::-1]
    return _head(text, room - cells(tail)) + ellipsis + tail


def _head(text: str, width: int) -> str:
    """The longest start of `text` within `width` columns."""
    if text.isascii():
        return text[:width]
    used, kept = 0, []
    for char in text:
        used += _char_cells(char)
        if used > width:
            break
        kept.append(char)
    return "".join(kept)


def left(text: str, width: int) -> str:
    """`text` padded on its right."""
    return text + " " * (width - cells(text))


def wrap(text: str, width: int, lines: int, *, ellipsis: str = "...") -> list[str]:
    """`text` in at most `lines` lines of at most `width` columns; what is left out leaves an ellipsis."""
    if cells(text) != len(text):
        return [shorten(text, width, ellipsis=ellipsis)]
    wrapped = textwrap.wrap(text, width, subsequent_indent="  ") or [""]
    if len(wrapped) > lines:
        wrapped = wrapped[:lines]
        wrapped[-1] = _head(wrapped[-1], width - cells(ellipsis)) + ellipsis
    return wrapped


def grid(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, left_columns: int = 1, left_last: bool = False
) -> str:
    """A plain table: the first `left_columns` columns to the left, numbers to the right, two spaces between.

    Columns without any text are left out. With `left_last` the last column is to the left too.
    """
    used = [i for i in range(len(header)) if any(row[i] for row in rows)]
    lines = [[header[i] for i in used], *([row[i] for i in used] for row in rows)]
    widths = [max(cells(line[k]) for line in lines) for k in range(len(used))]
    lines.insert(1, ["-" * width for width in widths])

    def draw(line: Sequence[str]) -> str:
        drawn = (
            left(text, width)
            if used[k] < left_columns or (left_last and used[k] == len(header) - 1)
            else " " * (width - cells(text)) + text
            for k, (text, width) in enumerate(zip(line, widths, strict=True))
        )
        return "  ".join(drawn).rstrip()

    return "\n".join(map(draw, lines))
