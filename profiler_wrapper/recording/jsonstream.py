"""A trace file in slices: any size, plain or gzipped, cut where one event ends and the next begins.

No whitespace and no order of keys is assumed. A likely cut is tried by decoding up to it, which
succeeds at a true boundary only; where no likely cut holds, brackets are counted.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from profiler_wrapper.errors import BrokenTrace
from profiler_wrapper.recording.boundaries import (
    BYTE,
    DECODE_ERRORS,
    array_end,
    end_of_value,
    error_offset,
    is_cut_inside,
    last_boundary,
    whole_value,
)
from profiler_wrapper.recording.bytesource import Progress, Window

CHUNK_BYTES = 4 << 20  # small enough to stay in the cache, large enough to hide the cost of a slice
TOP_LEVEL_BYTES = 64 << 10  # read at a time between the keys of the top level
_LIKELY_CUTS = 3  # tried before brackets are counted

_USUAL_FIRST_KEYS = (b'"ph"', b'"name"', b'"cat"')
_FIRST_KEY = re.compile(rb'[ \t\r\n]*\{[ \t\r\n]*("[^"\\]*")')


Event = TypeVar("Event")
Decode = Callable[[bytes], "list[Event]"]


class TraceWalker(Generic[Event]):
    """Walks through a trace file once: `batches` gives its events, `metadata` then has the rest.

    Attributes:
        metadata: top-level keys but `traceEvents`, as far as the walk has come.
        complete: False once a tear was met.
        warnings: what was odd and how it was dealt with.
    """

    def __init__(self, path: str | os.PathLike[str], decode: Decode[Event], progress: Progress | None = None) -> None:
        self.path = Path(path)
        self.metadata: dict[str, Any] = {}
        self.complete = True
        self.warnings: list[str] = []
        self.events_end: int | None = None  # offset of the `]` that closes traceEvents
        self._decode = decode
        self._window = Window(self.path, progress)
        self._first_key = b""

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
        offset = self._window.base + len(self._window.data)
        cause = self._window.tear or cause
        self.warnings.append(f"the file is torn at byte {offset}: {cause}; what lies before it was read")

    # --- the top level ---

    def _walk(self) -> Iterator[list[Event]]:
        if self._window.more(TOP_LEVEL_BYTES) and self._window.data.startswith(b"\xef\xbb\xbf"):
            self._window.drop(3)
        first = self._window.peek(TOP_LEVEL_BYTES)
        if first == b"[":
            self._window.drop(1)
            yield from self._array()
        elif first == b"{":
            self._window.drop(1)
            yield from self._object()
        elif not first:
            raise self._window.broken(0, f"the file is empty{': ' + self._window.tear if self._window.tear else ''}")
        else:
            raise self._window.broken(
                0, f"not JSON: starts with {self._window.data[:12]!r}. Give the exported Chrome trace."
            )
        if self.complete and self._window.peek(TOP_LEVEL_BYTES):
            raise self._window.broken(0, f"something follows the end of the JSON: {self._window.data[:20]!r}")
        if self.complete and self._window.tear:
            self._torn(self._window.tear)

    def _object(self) -> Iterator[list[Event]]:
        found_events = False
        while (first := self._window.peek(TOP_LEVEL_BYTES)) and first != b"}":
            key = self._key()
            if key is None:
                break
            if key == "traceEvents":
                if self._window.peek(TOP_LEVEL_BYTES) != b"[":
                    if not self._window.data:
                        break
                    raise self._window.broken(0, "traceEvents is not a list")
                self._window.drop(1)
                found_events = True
                yield from self._array()
                if not self.complete:
                    return
            elif not self._metadata_value(key):
                break
            if not self._comma():
                break
        else:
            if first and found_events:
                self._window.drop(1)
                return
        self._object_ended(found_events)

    def _object_ended(self, found_events: bool) -> None:
        if found_events:
            self._torn("it ends before the closing brace")
            return
        keys = ", ".join(map(repr, list(self.metadata)[:8])) or "none"
        cause = "ends before any traceEvents" if not self._window.data.startswith(b"}") else "has no traceEvents"
        raise self._window.broken(0, f"the JSON {cause}; keys found: {keys}. It is no Chrome trace, or a torn one.")

    def _key(self) -> str | None:
        """Reads `"key":`; None if the file ends in it."""
        if not self._window.data.startswith(b'"'):
            raise self._window.broken(0, f"malformed JSON: expected a key in quotes, found {self._window.data[:12]!r}")
        end = self._value_end()
        if end is None:
            return None
        key = self._decoded(end, str)
        first = self._window.peek(TOP_LEVEL_BYTES)
        if first not in (b":", b""):
            raise self._window.broken(0, f"malformed JSON: expected ':' after the key {key!r}")
        self._window.drop(1)
        return str(key) if first else None

    def _comma(self) -> bool:
        """Steps over the comma between two keys; False if the file ends here."""
        following = self._window.peek(TOP_LEVEL_BYTES)
        if following == b",":
            self._window.drop(1)
            if self._window.peek(TOP_LEVEL_BYTES) == b"}":
                raise self._window.broken(0, "malformed JSON: a comma before the closing brace")
        elif following not in (b"}", b""):
            raise self._window.broken(0, f"malformed JSON: expected ',' or '}}', found {self._window.data[:12]!r}")
        return bool(self._window.data)

    def _metadata_value(self, key: str) -> bool:
        self._window.peek(TOP_LEVEL_BYTES)
        end = self._value_end()
        if end is None:
            return False
        self.metadata[key] = self._decoded(end, Any)
        return True

    def _decoded(self, end: int, kind: Any) -> Any:
        """The JSON value that ends at `end`, taken off the buffer."""
        data = self._window.data[:end]
        try:
            try:
                value = msgspec.json.decode(data, type=kind)
            except DECODE_ERRORS:
                data = self._window.repaired(data)
                value = msgspec.json.decode(data, type=kind)
        except DECODE_ERRORS as error:
            raise self._window.broken(error_offset(error), f"malformed JSON: {_told(error)}") from error
        self._window.drop(end)
        return value

    def _value_end(self) -> int | None:
        """Where the JSON value at the start of the buffer ends; None if the file ends before it does."""
        while True:
            end = end_of_value(self._window.data)
            if end is not None and (end < len(self._window.data) or self._window.data[:1] in b'"[{'):
                return end
            if not self._window.more(max(TOP_LEVEL_BYTES, len(self._window.data))):
                return None

    # --- the events ---

    def _array(self) -> Iterator[list[Event]]:
        """Events up to the closing bracket, which is stepped over."""
        if self._window.peek(TOP_LEVEL_BYTES) == b"]":
            self.events_end = self._window.base
            self._window.drop(1)
            return
        start = _FIRST_KEY.match(self._window.data)
        self._first_key = start[1] if start else b""
        while self.complete:
            events, ended = self._slice()
            if events:
                yield events
            del events  # before the next are decoded, so that those take their place
            if ended:
                return

    def _slice(self) -> tuple[list[Event], bool]:
        """The next events off the buffer, and whether the array ended with them."""
        if len(self._window.data) < CHUNK_BYTES:
            self._window.more(CHUNK_BYTES)
        damage: Exception | None = None  # inside an event, wherever the cut
        for repaired in (False, True):
            damage = None
            for cut in [] if self._window.ended else self._likely_cuts():
                try:
                    return self._taken(cut), False
                except DECODE_ERRORS as error:
                    if (end := array_end(self._window.data, error)) is not None:
                        return self._last_slice(end)
                    if not is_cut_inside(error, cut):
                        damage = error
                        break
            if damage is None or repaired or not self._repair():
                break
        return self._careful_slice(damage)

    def _repair(self) -> bool:
        """Mends what can be mended in the buffer; whether there was anything."""
        whole = self._window.data.rfind(b"}") + 1  # never inside a character of several bytes
        before = self._window.data[:whole]
        after = self._window.repaired(before)
        if after == before:
            return False
        self._window.data = after + self._window.data[whole:]
        return True

    def _likely_cuts(self) -> list[int]:
        """Offsets of commas that probably part two events, best first."""
        keys = b"|".join({re.escape(self._first_key), *_USUAL_FIRST_KEYS})
        data = self._window.data
        for following in (b"(?:%b)" % keys, b""):
            pattern = re.compile(rb"\}[ \t\r\n]*(,)[ \t\r\n]*\{[ \t\r\n]*" + following)
            for tail in (1 << 16, 1 << 20):
                cuts = [match.start(1) for match in pattern.finditer(data, max(0, len(data) - tail))]
                if cuts:
                    return cuts[: -_LIKELY_CUTS - 1 : -1]
        return []

    def _taken(self, cut: int) -> list[Event]:
        """Decodes up to the comma at `cut` and takes it off the buffer."""
        events = self._decode(b"".join((b"[", memoryview(self._window.data)[:cut], b"]")))
        self._window.drop(cut + 1)
        return events

    def _last_slice(self, end: int) -> tuple[list[Event], bool]:
        """Decodes up to the closing bracket at `end` and takes it off the buffer."""
        events = self._decode(b"".join((b"[", memoryview(self._window.data)[:end], b"]")))
        if self._window.data[end : end + 1] != b"]":
            raise self._window.broken(end, "malformed JSON: traceEvents is closed by '}'")
        self.events_end = self._window.base + end
        self._window.drop(end + 1)
        return events, True

    def _careful_slice(self, damage: Exception | None) -> tuple[list[Event], bool]:
        """Counts brackets to find the last boundary in the buffer.

        Args:
            damage: what is known to be wrong in the buffer and cannot be repaired.
        """
        for repaired in (damage is not None, True):
            try:
                return self._slice_at_boundary(damage)
            except DECODE_ERRORS as error:
                if repaired or not self._repair():
                    raise self._malformed(error) from error
        raise AssertionError("the second round returns or raises")

    def _malformed(self, error: Exception) -> BrokenTrace:
        if isinstance(error, RecursionError):
            return self._window.broken(0, "an event is nested too deeply to be one of a trace")
        return self._window.broken(
            max(0, error_offset(error) - 1),
            f"malformed JSON: {_told(error)}. A quote inside a name does this; record again.",
        )

    def _slice_at_boundary(self, damage: Exception | None) -> tuple[list[Event], bool]:
        cut, ended = last_boundary(self._window.data)
        try:
            if ended:
                return self._last_slice(cut)
            if cut:
                return self._taken(cut), False
            if damage is not None:
                raise damage
            return self._incomplete_event(), False
        except msgspec.DecodeError as error:
            end = array_end(self._window.data, error)
            if end is None:
                raise
            return self._last_slice(end)

    def _incomplete_event(self) -> list[Event]:
        """No boundary in the buffer: reads on, or at the end of the file keeps what is whole."""
        if self._window.more(max(CHUNK_BYTES, len(self._window.data))):
            return []
        data = b"[" + self._window.data
        try:
            self._decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            # A tear shows at the very end of the data; anything earlier is damage.
            if BYTE.search(str(error)) and error_offset(error) < len(data) - 6:
                raise
        whole = whole_value(self._window.data)
        events = self._decode(b"[%b]" % whole) if whole else []
        self._torn("it ends inside traceEvents")
        return events


def _told(error: Exception) -> str:
    """What the decoder says, without its offset, which counts from the start of a slice."""
    return BYTE.sub("", str(error)).replace("JSON is malformed:", "").strip()
