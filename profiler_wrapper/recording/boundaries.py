"""Where JSON values begin and end: by counting brackets, and by what the decoder's errors tell."""

from __future__ import annotations

import re

import msgspec

_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{},]|"', re.DOTALL)
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_SCALAR = re.compile(rb"[^\s,\]}\[{\"]+")
# What decoding raises for data that are not JSON. (Only from 0.21 on is msgspec's own a ValueError.)
DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
BYTE = re.compile(r"\(byte (\d+)\)")


def error_offset(error: Exception) -> int:
    match = BYTE.search(str(error))
    return int(match[1]) if match else 0


def is_cut_inside(error: Exception, cut: int) -> bool:
    """Whether decoding failed because the cut lies inside an event, and not for what is in it."""
    match = BYTE.search(str(error))
    if match is None:
        return "truncated" in str(error)
    return int(match[1]) >= cut  # the byte after the cut is the bracket that we put there


def array_end(buffer: bytes, error: Exception) -> int | None:
    """The offset of the bracket that closes the array, if that is what the error tells."""
    if "trailing characters" not in str(error):
        return None
    for end in (error_offset(error) - 2, error_offset(error) - 1):
        stripped = buffer[: max(end, 0)].rstrip()
        if stripped.endswith(b"]"):
            return len(stripped) - 1
    return None


def end_of_value(data: bytes) -> int | None:
    """Where the JSON value that `data` starts with ends, or None."""
    if data[:1] == b'"':
        match = _STRING.match(data)
        return match.end() if match else None
    if data[:1] not in (b"{", b"["):
        match = _SCALAR.match(data)
        return match.end() if match else None
    depth = 0
    for token in _TOKEN.finditer(data):
        byte = token[0]
        if byte in (b"{", b"["):
            depth += 1
        elif byte in (b"}", b"]"):
            depth -= 1
            if depth == 0:
                return token.end()
        elif byte == b'"':
            return None
    return None


def last_boundary(data: bytes) -> tuple[int, bool]:
    """The last comma between two events (0 if none), or the bracket that closes them and True."""
    depth = 0
    last = 0
    for token in _TOKEN.finditer(data):
        byte = token[0]
        if byte in (b"{", b"["):
            depth += 1
        elif byte in (b"}", b"]"):
            if depth == 0:
                return token.start(), True
            depth -= 1
        elif byte == b"," and depth == 0:
            last = token.start()
        elif byte == b'"':
            break
    return last, False


def whole_value(data: bytes) -> bytes:
    """`data` if it is one whole value with nothing but white space around it, else nothing."""
    stripped = data.strip(b" \t\r\n\0")
    return stripped if stripped and end_of_value(stripped) == len(stripped) else b""
