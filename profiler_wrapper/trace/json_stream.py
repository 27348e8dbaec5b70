"""The events of a Chrome trace file of any size, plain or gzipped, a slice at a time.

A slice ends at a comma between two events. A likely one is tried by decoding up to it, which succeeds only where an
event ends; otherwise brackets are counted. No white space and no order of keys is assumed.
"""

from __future__ import annotations

import gc
import gzip
import os
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from profiler_wrapper.errors import BrokenTrace

# Called while a file is read: bytes of it that were read, and bytes in all; of a gzipped file, compressed ones.
Progress = Callable[[int, int], None]
Event = TypeVar("Event")
_T = TypeVar("_T")

CHUNK_BYTES = 4 << 20  # small enough to stay in the cache, large enough to hide the cost of a slice
TOP_LEVEL_BYTES = 64 << 10  # read at a time between the keys of the top level
_LONGEST_VALUE_BYTES = 64 << 20  # a larger one is damage, or meant to fill the memory
_GZIP = b"\x1f\x8b"
_NEAR_END_BYTES = 5  # an error so near to the end of the file is that of a value cut short, as `\u12` or `nul` is

# What decoding raises for data that are not JSON. (Only from 0.21 on is msgspec's own a ValueError.)
_DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_ERROR_BYTE = re.compile(r"\(byte (\d+)\)")
_SPACE = re.compile(rb"[ \t\r\n]*")
_BETWEEN_EVENTS = re.compile(rb'\}\s*(,)\s*\{\s*"(?:ph|name|cat|args|bp|dur|pid)"')
_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{},]|"', re.DOTALL)
_DEPTH = {b"{": 1, b"[": 1, b"}": -1, b"]": -1}
_SIMPLE_VALUE = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[^\s,\]}\[{"]+(?=[\s,\]}\[{"])', re.DOTALL)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Much of the time of decoding and analysing would go into looking for cycles among values that all stay."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class TraceWalker(Generic[Event]):
    """Walks through a trace file once: `batches` gives its events, `metadata` then has the rest.

    Attributes:
        metadata: top-level keys but `traceEvents`, as far as the walk has come.
        complete: False once a tear was met.
        warnings: what was odd and how it was dealt with.
        events_end: offset of the bracket that closes traceEvents, once it was met.
    """

    def __init__(
        self, path: str | os.PathLike[str], decode: Callable[[bytes], list[Event]], progress: Progress | None = None
    ) -> None:
        self.metadata: dict[str, Any] = {}
        self.complete = True
        self.warnings: list[str] = []
        self.events_end: int | None = None
        self._decode = decode
        self._window = _Window(Path(path), progress)

    def batches(self) -> Iterator[list[Event]]:
        """The events, decoded, a slice at a time.

        Raises:
            BrokenTrace: the file is not a trace, or is malformed before its end.
        """
        try:
            yield from self._walk()
        finally:
            self._window.close()
            for what, (count, offset) in self._window.repairs.items():
                self.warnings.append(f"{count} {what}, the first at byte {offset}")

    def _torn(self, cause: str) -> None:
        self.complete = False
        offset, cause = self._window.base + len(self._window.data), self._window.tear or cause
        self.warnings.append(f"the file is torn at byte {offset}: {cause}; what lies before it was read")

    def _walk(self) -> Iterator[list[Event]]:
        window = self._window
        if window.more(TOP_LEVEL_BYTES) and window.data.startswith(b"\xef\xbb\xbf"):
            window.drop(3)
        first = window.peek()
        if first == b"[":
            yield from self._array()
        elif first == b"{":
            yield from self._object()
        elif not first:
            raise window.broken(0, f"the file is empty{': ' + window.tear if window.tear else ''}")
        else:
            raise window.broken(0, f"not JSON: starts with {window.data[:12]!r}. Give the exported Chrome trace.")
        if self.complete and window.peek():
            raise window.broken(0, f"something follows the end of the JSON: {window.data[:20]!r}")
        if self.complete and window.tear:
            self._torn(window.tear)

    def _object(self) -> Iterator[list[Event]]:
        window = self._window
        window.drop(1)
        found_events = False
        try:
            while window.expect() != b"}":
                key = self._key()
                if key != "traceEvents":
                    self.metadata[key] = self._value(Any)
                elif window.expect() != b"[":
                    raise window.broken(0, "traceEvents is not a list")
                else:
                    found_events = True
                    yield from self._array()
                    if not self.complete:
                        return
                following = window.expect()
                if following == b",":
                    window.drop(1)
                    if window.expect() == b"}":
                        raise window.broken(0, "malformed JSON: a comma before the closing brace")
                elif following != b"}":
                    raise window.broken(0, f"malformed JSON: expected ',' or '}}', found {window.data[:12]!r}")
            cause = "has no traceEvents"
            if found_events:
                window.drop(1)
                return
        except EOFError:
            cause = "ends before any traceEvents"
            if found_events:
                self._torn("it ends before the closing brace")
                return
        keys = ", ".join(map(repr, list(self.metadata)[:8])) or "none"
        raise window.broken(0, f"the JSON {cause}; keys found: {keys}. It is no Chrome trace, or a torn one.")

    def _key(self) -> str:
        """The next key; it and the colon are taken off the window."""
        window = self._window
        if window.expect() != b'"':
            raise window.broken(0, f"malformed JSON: expected a key in quotes, found {window.data[:12]!r}")
        key: str = self._value(str)
        if window.expect() != b":":
            raise window.broken(0, f"malformed JSON: expected ':' after the key {key!r}")
        window.drop(1)
        return key

    def _value(self, kind: Any) -> Any:
        """The next JSON value, taken off the window."""
        window = self._window
        window.expect()
        while (end := _end_of_value(window.data)) is None:
            if not window.more(max(TOP_LEVEL_BYTES, len(window.data))):
                raise EOFError
        try:
            value = window.decoded(end, lambda data: msgspec.json.decode(data, type=kind))
        except _DECODE_ERRORS as error:
            raise window.broken(_error_byte(error), f"malformed JSON: {_without_byte(error)}") from error
        window.drop(end)
        return value

    def _array(self) -> Iterator[list[Event]]:
        """Events up to the closing bracket, which is taken off the window."""
        self._window.drop(1)
        self.events_end = None
        while self.complete and self.events_end is None:
            events = self._slice()
            if events:
                yield events
            del events  # before the next are decoded, so that those take their place

    def _slice(self) -> list[Event]:
        """The next events, taken off the window; none where more must be read first."""
        window = self._window
        if len(window.data) < CHUNK_BYTES:
            window.more(CHUNK_BYTES)
        damage: Exception | None = None  # in the data, wherever they are cut
        if cut := _likely_cut(window.data):
            try:
                return self._taken(cut)
            except _DECODE_ERRORS as error:
                if _error_byte(error) <= cut and "truncated" not in str(error):
                    damage = error
        boundary = _last_boundary(window.data)
        try:
            if boundary is not None:
                return self._taken(boundary)
            if damage is not None:
                raise damage
            return [] if window.more(max(CHUNK_BYTES, len(window.data))) else self._last_before_tear()
        except _DECODE_ERRORS as error:
            if isinstance(error, RecursionError):
                raise window.broken(0, "an event is nested too deeply to be one of a trace") from error
            raise window.broken(
                max(0, _error_byte(error) - 1),
                f"malformed JSON: {_without_byte(error)}. A quote inside a name does this; record again.",
            ) from error

    def _taken(self, cut: int) -> list[Event]:
        """The events before the comma or the closing bracket at `cut`; that too is taken off the window."""
        window = self._window
        events = window.decoded(cut, self._listed)
        if window.data[cut : cut + 1] != b",":
            if window.data[cut : cut + 1] != b"]":
                raise window.broken(cut, "malformed JSON: traceEvents is closed by '}'")
            self.events_end = window.base + cut
        window.drop(cut + 1)
        return events

    def _last_before_tear(self) -> list[Event]:
        """The event at the end of a file of which only the end is missing."""
        events: list[Event] = []
        repairs = dict(self._window.repairs)
        try:
            events = self._window.decoded(len(self._window.data), self._listed)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if 0 < _error_byte(error) < len(self._window.data) - _NEAR_END_BYTES:
                raise
            self._window.repairs = repairs  # not those of an event that is not read
        self._torn("it ends inside traceEvents")
        return events

    def _listed(self, data: memoryview) -> list[Event]:
        return self._decode(b"".join((b"[", data, b"]")))


class _Window:
    """The part of a file that is being looked at: it grows at its end and is taken off at its start.

    Attributes:
        base: offset of `data` in the (decompressed) file.
        ended: whether all of the file has been read.
        tear: why the file ends too early; known once `ended`.
        repairs: what was repaired -> count, and offset of the first.
    """

    def __init__(self, path: Path, progress: Progress | None) -> None:
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a directory, not a trace file; give the file inside it")
        self.data = b""
        self.base = 0
        self.ended = False
        self.tear = ""
        self.repairs: dict[str, tuple[int, int]] = {}
        self._path = path
        self._progress = progress
        self._file = path.open("rb")
        self._size = os.fstat(self._file.fileno()).st_size
        self._zipped = self._file.peek(2)[:2] == _GZIP
        self._unzipped = gzip.GzipFile(fileobj=self._file)

    def close(self) -> None:
        self._file.close()

    def more(self, at_most: int) -> bool:
        """Appends the next bytes; False at the end of the file."""
        if self.ended:
            return False
        if len(self.data) > _LONGEST_VALUE_BYTES:
            raise self.broken(0, f"one value of more than {_LONGEST_VALUE_BYTES >> 20} MiB; no trace has that")
        chunk = self._decompressed(at_most) if self._zipped else self._file.read(at_most)
        if self._progress is not None:
            self._progress(self._file.tell(), self._size)
        if not chunk:
            self.ended = True
            if self.data.endswith(b"\0"):
                self.data = self.data.rstrip(b"\0")
                self.tear = "the rest is NUL bytes"
            return False
        self.data = self.data + chunk if self.data else chunk
        return True

    def _decompressed(self, at_most: int) -> bytes:
        parts: list[bytes] = []
        size = 0
        try:
            while size < at_most and (part := self._unzipped.read1(at_most - size)):
                parts.append(part)
                size += len(part)
        except EOFError:
            self.tear = "the gzip data stop in the middle"
        except (zlib.error, gzip.BadGzipFile) as error:
            if str(error).startswith("Not a gzipped file"):  # what lies behind whole gzip data is none of the trace
                return b"".join(parts)
            raise BrokenTrace(
                f"{self._path}: damaged gzip data after {self.base + len(self.data) + size} decompressed bytes "
                f"({error}). Copy the file again, or record it again."
            ) from error
        return b"".join(parts)

    def drop(self, size: int) -> None:
        """Takes `size` bytes off the start."""
        self.base += min(size, len(self.data))
        self.data = self.data[size:]

    def peek(self) -> bytes:
        """The next byte that is not white space, now first in the data; empty at the end."""
        while True:
            space = _SPACE.match(self.data)
            self.drop(space.end() if space else 0)
            if self.data or not self.more(TOP_LEVEL_BYTES):
                return self.data[:1]

    def expect(self) -> bytes:
        """As `peek`.

        Raises:
            EOFError: at the end.
        """
        if not (first := self.peek()):
            raise EOFError
        return first

    def decoded(self, end: int, decode: Callable[[memoryview], _T]) -> _T:
        """What `decode` makes of the data up to `end`; where it fails, once they are repaired."""
        try:
            return decode(memoryview(self.data)[:end])
        except _DECODE_ERRORS:
            good, notes = repaired(self.data[:end])
            if not notes:
                raise
        self.data = good + self.data[end:]
        for what, (count, offset) in notes.items():
            before, first = self.repairs.get(what, (0, self.base + offset))
            self.repairs[what] = (before + count, first)
        return decode(memoryview(self.data)[:end])

    def broken(self, local: int, cause: str) -> BrokenTrace:
        """The error for what is wrong at `local` in the data."""
        where = " of the decompressed data" if self._zipped else ""
        return BrokenTrace(f"{self._path}: byte {self.base + local}{where}: {cause}")


def _error_byte(error: Exception) -> int:
    """Where decoding failed, as far as the error says."""
    match = _ERROR_BYTE.search(str(error))
    return int(match[1]) if match else 0


def _without_byte(error: Exception) -> str:
    """What the decoder says, without its offset, which counts from the start of a slice."""
    return _ERROR_BYTE.sub("", str(error)).replace("JSON is malformed:", "").strip()


def _likely_cut(data: bytes) -> int:
    """The last comma that probably parts two events; 0 for none."""
    for tail in (1 << 16, 1 << 20):  # an event is seldom longer than the first
        cuts = [match.start(1) for match in _BETWEEN_EVENTS.finditer(data, max(0, len(data) - tail))]
        if cuts:
            return cuts[-1]
    return 0


def _last_boundary(data: bytes) -> int | None:
    """The bracket that closes the events, else the last comma between two of them, else None."""
    depth = last = 0
    for token in _TOKEN.finditer(data):
        depth += _DEPTH.get(token[0], 0)
        if depth < 0:
            return token.start()
        if depth == 0 and token[0] == b",":
            last = token.start()
        elif token[0] == b'"':  # of a string that does not end
            break
    return last or None


def _end_of_value(data: bytes) -> int | None:
    """Where the JSON value that `data` starts with ends, or None."""
    if data[:1] not in (b"{", b"["):
        match = _SIMPLE_VALUE.match(data)
        return match.end() if match else None
    depth = 0
    for token in _TOKEN.finditer(data):
        depth += _DEPTH.get(token[0], 0)
        if depth == 0:
            return token.end()
        if token[0] == b'"':
            return None
    return None


# --- what profilers write that JSON does not allow ---

_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_CONTROL = re.compile(rb"[\x00-\x1f]")
_NOT_FINITE = re.compile(rb'(":[ \t]*)(-?(?:nan|NaN|inf|Infinity))(?=[ \t\r\n]*[,}])')
_NOT_UTF8 = re.compile("[\udc80-\udcff]")
_SURROGATES = re.compile(  # a pair of them, or a lone one as group 1
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})"
)


def repaired(data: bytes) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """`data`, as long as before, with what breaks a JSON parser replaced; and {what: (count, offset of the first)}.

    Control characters are looked for only where nothing else was found: it takes the longest.
    """
    notes: dict[str, tuple[int, int]] = {}

    def note(what: str, offset: int, count: int = 1) -> None:
        before, first = notes.get(what, (0, offset))
        notes[what] = (before + count, first)

    def finite(match: re.Match[bytes]) -> bytes:
        note("numbers that are not finite were left out", match.start(2))
        return match[1] + b'""'.ljust(len(match[2]))

    def paired(match: re.Match[bytes]) -> bytes:
        if match[1] is None:
            return match[0]
        note("lone surrogates in names were replaced", match.start())
        return rb"\ufffd"

    def printable(match: re.Match[bytes]) -> bytes:
        text, count = _CONTROL.subn(b" ", match[0])
        if count:
            note("control characters inside names were read as spaces", match.start(), count)
        return text

    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        text, count = _NOT_UTF8.subn("?", data.decode("utf-8", "surrogateescape"))
        note("bytes that are not UTF-8 were read as '?'", error.start, count)
        data = text.encode("utf-8")
    data = _SURROGATES.sub(paired, _NOT_FINITE.sub(finite, data))
    return (data if notes else _STRING.sub(printable, data)), notes
