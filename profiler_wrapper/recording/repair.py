"""What profilers write that JSON does not allow, made readable. Every repair keeps the length."""

from __future__ import annotations

import re

_STRING_OR_NUMBER = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|(?<![\w"])-?(?:nan|NaN|inf|Infinity)(?![\w"])', re.DOTALL)
_CONTROL = re.compile(rb"[\x00-\x1f]")
_NOT_UTF8 = re.compile("[\udc80-\udcff]")
_ESCAPE = re.compile(  # a pair of surrogates, or a lone one as group 1
    rb"(?:\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})"
)

NOT_UTF8 = "bytes that are not UTF-8 were read as '?'"
CONTROL = "control characters inside names were read as spaces"
SURROGATE = "lone surrogates in names were replaced"
NOT_A_NUMBER = "numbers that are not finite were left out"


def repair(data: bytes) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """`data` with what breaks a JSON parser replaced, and what was done: {text: (count, first offset)}."""
    notes: dict[str, tuple[int, int]] = {}

    def note(what: str, count: int, offset: int) -> None:
        before, first = notes.get(what, (0, offset))
        notes[what] = (before + count, first)

    def repair_token(match: re.Match[bytes]) -> bytes:
        token, offset = match[0], match.start()
        if not token.startswith(b'"'):
            note(NOT_A_NUMBER, 1, offset)
            return b'""'.ljust(len(token))
        token, count = _CONTROL.subn(b" ", token)
        if count:
            note(CONTROL, count, offset)
        if b"\\ud" in token or b"\\uD" in token:
            lone = sum(1 for escape in _ESCAPE.finditer(token) if escape[1])
            if lone:
                note(SURROGATE, lone, offset)
                token = _ESCAPE.sub(lambda escape: rb"\ufffd" if escape[1] else escape[0], token)
        return token

    text = data.decode("utf-8", "surrogateescape")
    strays = len(_NOT_UTF8.findall(text))
    if strays:
        try:
            data.decode("utf-8")
        except UnicodeDecodeError as error:
            note(NOT_UTF8, strays, error.start)
        data = _NOT_UTF8.sub("?", text).encode("utf-8")
    return _STRING_OR_NUMBER.sub(repair_token, data), notes
