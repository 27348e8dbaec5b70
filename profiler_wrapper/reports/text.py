"""Text that fits: names cleaned, shortened in the middle, and set in columns."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from functools import cache
from itertools import accumulate

# wcwidth is imported where text is made: `load()` makes none.

AT_LEAST = "≥"
_SPELLED = str.maketrans({"µ": "u", "±": "+-", AT_LEAST: ">="})  # without Unicode
_LONGEST_NAME = 4000  # what is longer is cut before it is cleaned, so a name of a megabyte costs nothing


def clean(text: str, *, unicode: bool = False) -> str:
    """Return `text` on one printable line: control characters, surrogates and invisible marks are escaped.

    Without `unicode` everything beyond ASCII is escaped too; the signs of units and errors are spelled out.
    """
    if len(text) > _LONGEST_NAME:
        text = text[: _LONGEST_NAME // 2] + text[-_LONGEST_NAME // 2 :]
    if text.isascii() and text.isprintable():
        return text
    text = text if unicode else text.translate(_SPELLED)
    return "".join(
        char
        if char.isprintable() and (unicode or char.isascii())
        else char.encode("unicode_escape", "backslashreplace").decode("ascii")
        for char in text
    )


def cells(text: str) -> int:
    """Return how many columns of a terminal `text` takes: 2 for a wide character, 0 for a combining one."""
    return len(text) if text.isascii() else sum(map(_char_cells, text))


@cache
def _char_cells(char: str) -> int:
    from wcwidth import wcwidth

    return max(0, wcwidth(char))  # -1: a control character, which `clean` has escaped


def shorten(text: str, width: int, *, ellipsis: str = "...") -> str:
    """Cut `text` in the middle to at most `width` columns: `model.lay...self_attn`."""
    if cells(text) <= width:
        return text
    room = width - cells(ellipsis)
    if room < 2:
        return _head(text, width)
    tail = _head(text[::-1], (room + 1) // 2)[::-1]
    return _head(text, room - cells(tail)) + ellipsis + tail


def _head(text: str, width: int) -> str:
    """Return the longest start of `text` within `width` columns."""
    if text.isascii():
        return text[:width]
    return text[: sum(used <= width for used in accumulate(map(_char_cells, text)))]


def whole_ones(texts: Sequence[str], width: int, room: int, others: str) -> list[str]:
    """Return the texts that fit whole in `room` lines, and a line that counts the others."""
    lines, hidden = list[str](), len(texts)
    for text in texts:
        if len(lines) + len(wrapped := wrap(text, width, room + 1)) <= room:
            lines, hidden = lines + wrapped, hidden - 1
    return lines + [f"({hidden} of {len(texts)} {others})"] * (hidden > 0)


def wrap(text: str, width: int, lines: int = 99) -> list[str]:
    """Wrap `text` to at most `lines` lines of at most `width` columns; what is left out leaves an ellipsis."""
    doubled = text  # wide characters are two, between which a line may part
    if not text.isascii():
        doubled = "".join(char + "\0" * (_char_cells(char) - 1) for char in text)
    parts = textwrap.wrap(doubled, width - (doubled != text), subsequent_indent="  ")
    wrapped = [part.replace("\0", "") for part in parts] or [""]
    if len(wrapped) > lines:
        wrapped = wrapped[:lines]
        wrapped[-1] = _head(wrapped[-1], width - len("...")) + "..."
    return wrapped


def grid(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, left_columns: int = 1, left_last: bool = False
) -> str:
    """Print a plain table: the first `left_columns` columns to the left, numbers to the right, two spaces between.

    Columns without any text are left out. With `left_last` the last column is to the left too.
    """
    used = [i for i in range(len(header)) if any(row[i] for row in rows)]
    if not used:
        return ""
    aligned = ["left" if i < left_columns or (left_last and i == len(header) - 1) else "right" for i in used]
    return "\n".join(
        aligned_lines([[header[i] for i in used], None, *([row[i] for i in used] for row in rows)], aligned)
    )


def aligned_lines(lines: Sequence[Sequence[str] | None], aligned: Sequence[str], *, gap: int = 2) -> list[str]:
    """Align cells in columns that are `gap` apart, each "left" or "right" `aligned`; None: a rule."""
    widths = [max(cells(line[i]) for line in lines if line is not None) for i in range(len(aligned))]
    rule = ["-" * width for width in widths]
    drawn = ((set_in(*one) for one in zip(line or rule, widths, aligned, strict=True)) for line in lines)
    return [(" " * gap).join(line).rstrip() for line in drawn]


def set_in(text: str, width: int, aligned: str = "right") -> str:
    """Pad `text` to `width` columns."""
    blank = " " * (width - cells(text))
    return text + blank if aligned == "left" else blank + text
