"""What profilers write that JSON does not allow, made readable. Every repair keeps the length."""

from __future__ import annotations

import re

_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_NOT_FINITE = re.compile(rb'(":[ \t]*)(-?(?:nan|NaN|inf|Infinity))(?=[ \t\r\n]*[,}])')
_CONTROL = re.compile(rb"[\x00-\x1f]")
_NOT_UTF8 = re.compile("[\udc80-\udcff]")
_SURROGATES = re.compile(  # a pair of them, or a lone one as group 1
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})"
)

NOT_UTF8 = "bytes that are not UTF-8 were read as '?'"
CONTROL = "control characters inside names were read as spaces"
SURROGATE = "lone surrogates in names were replaced"
NOT_FINITE = "numbers that are not finite were left out"


def repair(data: bytes) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """`data` with what breaks a JSON parser replaced, and what was done: {text: (count, first offset)}.

    Control characters are looked for only where nothing else was found: it takes the longest.
    """
    notes: dict[str, tuple[int, int]] = {}
    for mend in (_mend_utf8, _mend_numbers, _mend_surrogates):
        data = mend(data, notes)
    return (data if notes else _mend_control(data, notes)), notes


def _note(notes: dict[str, tuple[int, int]], what: str, offset: int, count: int = 1) -> None:
    before, first = notes.get(what, (0, offset))
    notes[what] = (before + count, first)


def _mend_utf8(data: bytes, notes: dict[str, tuple[int, int]]) -> bytes:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        text = data.decode("utf-8", "surrogateescape")
        text, count = _NOT_UTF8.subn("?", text)
        _note(notes, NOT_UTF8, error.start, count)
        return text.encode("utf-8")
    return data


def _mend_numbers(data: bytes, notes: dict[str, tuple[int, int]]) -> bytes:
    def empty(match: re.Match[bytes]) -> bytes:
        _note(notes, NOT_FINITE, match.start(2))
        return match[1] + b'""'.ljust(len(match[2]))

    return _NOT_FINITE.sub(empty, data)


def _mend_surrogates(data: bytes, notes: dict[str, tuple[int, int]]) -> bytes:
    if b"\\u" not in data:
        return data

    def replaced(match: re.Match[bytes]) -> bytes:
        if match[1] is None:
            return match[0]
        _note(notes, SURROGATE, match.start())
        return rb"\ufffd"

    return _SURROGATES.sub(replaced, data)


def _mend_control(data: bytes, notes: dict[str, tuple[int, int]]) -> bytes:
    def spaced(match: re.Match[bytes]) -> bytes:
        text, count = _CONTROL.subn(b" ", match[0])
        if count:
            _note(notes, CONTROL, match.start(), count)
        return text

    return _STRING.sub(spaced, data)
