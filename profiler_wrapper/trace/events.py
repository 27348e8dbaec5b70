"""The events of a Chrome trace file of any size, plain or gzipped: a slice at a time, as typed structs.

A slice ends at a comma between two events. A likely one is tried by decoding up to it, which succeeds only where an
event ends; where no such comma is found the slice grows, if need be to the whole file. Nothing else is looked for than
the bracket before the first event, so no white space and no order of keys is assumed.
"""

from __future__ import annotations

import gc
import os
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from decimal import Decimal
from operator import attrgetter
from typing import Any, TypeVar

import msgspec
import numpy as np

from profiler_wrapper.errors import BrokenTrace, listed, shown

# --- One event, and what to do where the types do not fit ---

EXPORT = "Give what `prof.export_chrome_trace(path)` of torch.profiler.profile writes, not that of `prof.events()`."
_LARGE_US = 1 << 43  # from here on a float is too coarse for nanoseconds
_UNTIMED = -(1 << 62)  # where an event has no `ts`
_TIME = attrgetter("ts")

ABSENT = msgspec.Raw()

# What only some events say may be spelled in any way without spoiling the slice for all others.
Scalar = int | float | str | bool | None
Sizes = tuple[int | float | str | bool | None, ...] | int | float | str | bool | None


class Args(msgspec.Struct, frozen=True, gc=False):
    """The `args` of an event, as far as we use them. -1: it does not say."""

    correlation: int = -1
    external_id: int = msgspec.field(default=-1, name="External id")
    sequence: int = msgspec.field(default=-1, name="Sequence number")
    forward_thread: int = msgspec.field(default=-1, name="Fwd thread id")
    device: int = -1
    stream: int = -1
    graph_node: int = msgspec.field(default=0, name="graph node id")
    address: int = msgspec.field(default=0, name="Addr")
    size_bytes: int = msgspec.field(default=0, name="Bytes")
    total_allocated_bytes: int = msgspec.field(default=-1, name="Total Allocated")
    total_reserved_bytes: int = msgspec.field(default=-1, name="Total Reserved")
    device_type: int = msgspec.field(default=-1, name="Device Type")
    device_id: int = msgspec.field(default=-1, name="Device Id")
    # In the order of a kernel's arguments, which is the quickest to decode.
    registers: Scalar = msgspec.field(default=None, name="registers per thread")
    shared_memory: Scalar = msgspec.field(default=None, name="shared memory")
    blocks_per_sm: Scalar = msgspec.field(default=None, name="blocks per SM")
    grid: Sizes = None
    block: Sizes = None
    occupancy_percent: Scalar = msgspec.field(default=None, name="est. achieved occupancy %")
    copied_bytes: Scalar = msgspec.field(default=None, name="bytes")
    collective: Scalar = msgspec.field(default=None, name="Collective name")
    # Of a collective.
    in_elements: Scalar = msgspec.field(default=None, name="In msg nelems")
    out_elements: Scalar = msgspec.field(default=None, name="Out msg nelems")
    group_size: Scalar = msgspec.field(default=None, name="Group size")
    dtype: Scalar = None
    group_name: Scalar = msgspec.field(default=None, name="Process Group Name")
    group_id: Scalar = msgspec.field(default=None, name="Process Group ID")
    ranks: msgspec.Raw = msgspec.field(default=ABSENT, name="Process Group Ranks")
    collective_sequence: Scalar = msgspec.field(default=None, name="Seq")
    # Of an op: undecoded, because most of them repeat.
    dims: msgspec.Raw = msgspec.field(default=ABSENT, name="Input Dims")
    types: msgspec.Raw = msgspec.field(default=ABSENT, name="Input type")
    concrete: msgspec.Raw = msgspec.field(default=ABSENT, name="Concrete Inputs")
    old_dims: msgspec.Raw = msgspec.field(default=ABSENT, name="Input dims")
    strides: msgspec.Raw = msgspec.field(default=ABSENT, name="Input Strides")
    label: Scalar = msgspec.field(default=None, name="name")  # of a process or thread


class Event(msgspec.Struct, gc=False):
    """An event with its times in microseconds, as the file has them."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str = -1
    tid: int | str = -1
    ts: int | float = _UNTIMED
    dur: int | float = -1
    id: int | str = -1
    args: Args = Args()


class ExactEvent(Event, gc=False):
    """Where `ts` is so large that a float would lose its nanoseconds."""

    ts: Decimal = Decimal(_UNTIMED)  # type: ignore[assignment]


_DECODERS = {kind: msgspec.json.Decoder(list[kind]) for kind in (Event, ExactEvent)}  # type: ignore[valid-type]


def _too_coarse(events: list[Event]) -> bool:
    """Whether some time is a float that has lost its nanoseconds."""
    try:
        latest = np.fromiter(map(_TIME, events), np.float64, len(events)).max(initial=0)
    except OverflowError:  # a whole number beyond all floats
        latest = _LARGE_US
    return bool(latest >= _LARGE_US) and float in set(map(type, map(_TIME, events)))


def _salvaged(raw: msgspec.Raw, kind: Any) -> Any:
    """A struct of the fields that fit, where numbers may be spelled as text; None: no object, or its time is none."""
    try:
        return msgspec.json.decode(raw, type=kind, strict=False)
    except msgspec.ValidationError:
        pass
    try:
        given = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError:
        return None
    values = {}
    for field in msgspec.structs.fields(kind):
        if field.encode_name not in given:
            continue
        if field.type is Args:
            values["args"] = _salvaged(given["args"], Args) or Args()
            continue
        try:
            values[field.name] = msgspec.json.decode(given[field.encode_name], type=field.type, strict=False)
        except msgspec.ValidationError:
            if field.name == "ts":
                return None
    return kind(**values)


# --- The file, slice by slice ---

_T = TypeVar("_T")
# Called while a file is read: bytes of it that were read, and bytes in all; of a gzipped file, compressed ones.
Progress = Callable[[int, int], None]

CHUNK_BYTES = 4 << 20  # small enough to stay in the cache, large enough to hide the cost of a slice
_HEAD_BYTES = 64 << 10  # what comes before the first event is seldom longer
_SEARCHED_BYTES = 64 << 10  # an event is seldom longer
_PACKED_BYTES = 64 << 10  # gzip makes at most a thousand times as much of it
_LONGEST_VALUE_BYTES = 64 << 20  # a larger one is damage, or meant to fill the memory
_GZIP = b"\x1f\x8b"
_AS_GZIP = 16 + zlib.MAX_WBITS  # for zlib
_NEAR_END_BYTES = 5  # an error so near to the end of the file is that of a value cut short, as `nul` or `1e` is

# What decoding raises for data that are not JSON. (Only from 0.21 on is msgspec's own a ValueError.)
_DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_ERROR_BYTE = re.compile(r"\(byte (\d+)\)")
_TEXT = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)', re.DOTALL)  # whole, or up to the end of the data
_BETWEEN_EVENTS = re.compile(rb"\}\s*(,)\s*(?:\{|\Z)")
# Up to the bracket before the first event. In a text its quotes would have backslashes before them.
EVENTS_BEGIN = re.compile(rb'(?:\xef\xbb\xbf)?\s*(?:\[|\{.*?"traceEvents"\s*:\s*\[)', re.DOTALL)


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


class TraceEvents:
    """The events of a trace file, to be gone through once.

    Attributes:
        metadata: the top-level keys but `traceEvents`, once all events were read; of a torn file those before them.
        complete: False once a tear was met.
        warnings: what was odd and how it was dealt with.
        misfits: entries of the list of events that were none, and were left out.
    """

    def __init__(self, path: str | os.PathLike[str], progress: Progress | None = None) -> None:
        self.metadata: dict[str, Any] = {}
        self.complete = True
        self.warnings: list[str] = []
        self.misfits = 0
        if os.path.isdir(path):
            raise IsADirectoryError(f"{path} is a directory, not a trace file; give the file inside it")
        self._path, self._progress = path, progress
        self._file = open(path, "rb")  # noqa: SIM115
        self._size = os.fstat(self._file.fileno()).st_size
        self._unzip = zlib.decompressobj(_AS_GZIP) if self._file.peek(2)[:2] == _GZIP else None
        self._tear = ""  # why the file ends too early; known at its end
        self._head = b""  # what lies before the first event
        self._data = b""  # what was read and not yet taken
        self._base = 0  # where in the (decompressed) file it begins
        self._closed = False  # the list of events is: `_data` begins with its bracket
        self._kind: type[Event] = Event
        self._repairs: dict[str, tuple[int, int]] = {}  # what was repaired -> count, and offset of the first

    def slices(self) -> Iterator[list[Event]]:
        """The events, decoded, a slice at a time. Raises BrokenTrace: no trace, or one malformed before its end."""
        try:
            self._read_head()
            while self.complete and not self._closed:
                if events := self._slice():
                    yield events
                del events  # before the next are decoded, so that those take their place
            self._read_metadata()
        finally:
            self._file.close()
            for what, (count, offset) in self._repairs.items():
                self.warnings.append(f"{count} {what}, the first at byte {offset}")

    def _more(self, least: int) -> bool:
        """Appends the next bytes of the file, `least` or as many as there are; False at its end."""
        if len(self._data) > _LONGEST_VALUE_BYTES:
            raise self._broken(0, f"one value of more than {_LONGEST_VALUE_BYTES >> 20} MiB; no trace has that")
        size = max(least, len(self._data))
        piece = self._file.read(size) if self._unzip is None else self._unzipped(size)
        if self._progress is not None:
            self._progress(self._file.tell(), self._size)
        self._data = self._data + piece if self._data else piece
        if not piece and self._data.endswith(b"\0"):
            self._data = self._data.rstrip(b"\0")
            self._tear = "the rest is NUL bytes"
        return bool(piece)

    def _unzipped(self, size: int) -> bytes:
        """The next bytes of a gzipped file, of all its members; what lies behind them is none of the trace."""
        found = b""
        while len(found) < size:
            assert self._unzip is not None
            packed = self._unzip.unused_data or self._file.read(_PACKED_BYTES)
            if self._unzip.eof:  # zeros may lie between members, and a read may end within the two bytes of the next
                while (packed := packed.lstrip(b"\0")) in (b"", _GZIP[:1]) and (more := self._file.read(_PACKED_BYTES)):
                    packed += more
                if not packed.startswith(_GZIP):
                    break
                self._unzip = zlib.decompressobj(_AS_GZIP)
            elif not packed:
                self._tear = "the gzip data stop in the middle"
                break
            try:
                found += self._unzip.decompress(packed)
            except zlib.error as error:
                cause = f"damaged gzip data ({error}). Copy the file again, or record it again."
                raise self._broken(len(self._data) + len(found), cause) from error
        return found

    def _take(self, size: int) -> None:
        self._base += min(size, len(self._data))
        self._data = self._data[size:]

    def _broken(self, at: int, cause: str) -> BrokenTrace:
        """The error for what is wrong at byte `at` of the data."""
        where = " of the decompressed data" if self._unzip is not None else ""
        return BrokenTrace(f"{self._path}: byte {self._base + at}{where}: {cause}")

    def _torn(self, cause: str) -> None:
        self.complete = False
        offset, cause = self._base + len(self._data), self._tear or cause
        self.warnings.append(f"the file is torn at byte {offset}: {cause}; what lies before it was read")

    def _read_head(self) -> None:
        """What lies before the first event is taken off."""
        while (begin := EVENTS_BEGIN.match(self._data)) is None:
            if not self._more(_HEAD_BYTES):
                raise self._broken(*self._why_no_events())
            self._take(len(self._data) - len(self._data.lstrip()))
            if self._data[:1] not in b"{[\xef":
                begins = shown(self._data[:12])
                raise self._broken(0, f"not JSON: starts with {begins}. Give the exported Chrome trace.")
        self._head = begin[0]
        self._take(len(self._head))

    def _why_no_events(self) -> tuple[int, str]:
        """What is wrong with a file that has no list of events, and at which byte."""
        if not self._data:
            return 0, f"the file is empty{': ' + self._tear if self._tear else ''}"
        try:
            keys = list(msgspec.json.decode(self._data))
        except _DECODE_ERRORS as error:
            if not _is_cut_short(error):
                return _error_byte(error), _malformed(error)
            return 0, "the JSON ends before any traceEvents. It is no Chrome trace, or a torn one."
        if "traceEvents" in keys:
            return self._data.index(b'"traceEvents"'), "traceEvents is not a list"
        found = listed(keys) or "none"
        return 0, f"the JSON has no traceEvents; keys found: {found}. It is no Chrome trace. {EXPORT}"

    def _slice(self) -> list[Event]:
        """The next events, taken off the data; none where more had to be read first."""
        if len(self._data) < CHUNK_BYTES:
            self._more(CHUNK_BYTES)
        failed: BrokenTrace | None = None
        for cut in self._cuts():
            try:
                if (events := self._up_to(cut)) is not None:
                    return events
            except BrokenTrace as error:
                if self._closed:
                    raise
                failed = failed or error  # unless another cut does: this one may lie within a name that needs a repair
        if failed is not None:
            raise failed
        if self._more(CHUNK_BYTES):
            return []
        events = self._up_to(len(self._data), at_end=True)
        if not self._closed:
            self._torn("it ends inside traceEvents")
        return events or []

    def _cuts(self) -> Iterator[int]:
        """Commas that may part two events: the last, then others, each time twice as far back; then one that does."""
        start = max(0, len(self._data) - _SEARCHED_BYTES)
        cuts = [match.start(1) for match in _BETWEEN_EVENTS.finditer(self._data, start)]
        yield from (cuts[-(1 << i)] for i in range(len(cuts).bit_length()))
        if (comma := last_comma(self._data)) >= 0:
            yield comma

    def _up_to(self, cut: int, *, at_end: bool = False) -> list[Event] | None:
        """The events before `cut`, or before the end of their list, taken off; None where no event ends at `cut`."""
        try:
            events = self._repairing(memoryview(self._data)[:cut], self._decoded, lambda at: self._base + at)
        except _DECODE_ERRORS as error:
            at = _error_byte(error) - 1  # of the data: a bracket was put before it
            if "trailing characters" in str(error):
                self._closed = True
                return self._up_to(self._data.rindex(b"]", 0, at))
            if isinstance(error, RecursionError):
                raise self._broken(0, "an event is nested too deeply to be one of a trace") from error
            if at >= cut or _is_cut_short(error, cut + 1 if at_end else None):
                return None
            cause = f"{_malformed(error)}. A quote inside a name does this; record again."
            raise self._broken(max(0, at), cause) from error
        self._take(cut if self._closed else cut + 1)
        return events

    def _decoded(self, data: bytes | memoryview) -> list[Event]:
        """The events of a list without its brackets: typed, if that fits, else event by event and field by field."""
        data = b"".join((b"[", data, b"]"))
        misfits = 0
        try:
            events: list[Event] = _DECODERS[self._kind].decode(data)
        except msgspec.ValidationError:
            raws = msgspec.json.decode(data, type=list[msgspec.Raw])
            events = [event for raw in raws if (event := _salvaged(raw, self._kind)) is not None]
            misfits = len(raws) - len(events)
        if self._kind is Event and _too_coarse(events):
            self._kind = ExactEvent
            return self._decoded(data[1:-1])
        self.misfits += misfits
        return events

    def _repairing(
        self, data: bytes | memoryview, decode: Callable[[bytes | memoryview], _T], place: Callable[[int], int]
    ) -> _T:
        """What `decode` makes of data; where it fails, once they are repaired. `place`: of their bytes in the file."""
        try:
            return decode(data)
        except _DECODE_ERRORS:
            good, notes = repaired(bytes(data))
            if not notes:
                raise
        found = decode(good)
        for what, (count, offset) in notes.items():
            before, first = self._repairs.get(what, (0, place(offset)))
            self._repairs[what] = (before + count, first)
        return found

    def _read_metadata(self) -> None:
        """What lies before and behind the events; of a torn file, what lies before."""
        while self.complete and self._more(_HEAD_BYTES):
            pass
        head = self._head.replace(b"\xef\xbb\xbf", b"   ", 1)

        def place(at: int) -> int:
            return at if at < len(head) else self._base + at - len(head)

        behind = self._data if self.complete else b"]}" if b"{" in head else b"]"
        try:
            found = self._repairing(head + behind, msgspec.json.decode, place)
        except _DECODE_ERRORS as error:
            if self.complete and _is_cut_short(error, len(head) + len(behind)):
                self._torn("it ends before the closing brace")
                self._read_metadata()
                return
            raise self._broken(place(_error_byte(error)) - self._base, _malformed(error)) from error
        if self.complete and self._tear:
            self._torn(self._tear)
        if isinstance(found, dict):
            self.metadata = {key: value for key, value in found.items() if key != "traceEvents"}


def last_comma(data: bytes) -> int:
    """Where the last comma is that no brackets and no text are around; -1 without one. Takes longer than decoding."""
    bare = np.frombuffer(_TEXT.sub(lambda match: b" " * len(match[0]), data), np.uint8)
    steps = np.isin(bare, list(b"[{")).astype(np.int8) - np.isin(bare, list(b"]}"))
    outside = np.flatnonzero((np.cumsum(steps, dtype=np.int32) == 0) & (bare == ord(",")))
    return int(outside[-1]) if len(outside) else -1


def _error_byte(error: Exception) -> int:
    """Where decoding failed, as far as the error says."""
    match = _ERROR_BYTE.search(str(error))
    return int(match[1]) if match else 0


def _malformed(error: Exception) -> str:
    """What the decoder says, without its offset, which counts from the start of a slice."""
    return f"malformed JSON: {_ERROR_BYTE.sub('', str(error)).replace('JSON is malformed:', '').strip()}"


def _is_cut_short(error: Exception, size: int | None = None) -> bool:
    """Whether a value was not yet at its end; with the `size` of data that are the last, a word or number as well."""
    near_end = size is not None and _error_byte(error) >= size - _NEAR_END_BYTES
    return "truncated" in str(error) or (near_end and "invalid" in str(error))


# --- What profilers write that JSON does not allow ---

_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_CONTROL = re.compile(rb"[\x00-\x1f]")
_NOT_UTF8 = re.compile("[\udc80-\udcff]")
_HIGH, _LOW = rb"\\u[dD][89abAB][0-9a-fA-F]{2}", rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
# What is wrong, where, and what takes its place: as many bytes.
_REPAIRS: tuple[tuple[str, re.Pattern[bytes], Callable[[re.Match[bytes]], bytes]], ...] = (
    (
        "numbers that are not finite were left out",
        re.compile(rb'(?<=":)[ \t]*(?:-?(?:nan|NaN|inf|Infinity))(?=[ \t\r\n]*[,}])'),
        lambda match: b'""'.ljust(len(match[0])),
    ),
    (
        "lone surrogates in names were replaced",
        re.compile(rb"%b(?!%b)|(?<!%b)%b" % (_HIGH, _LOW, _HIGH, _LOW)),
        lambda match: rb"\ufffd",
    ),
)


def repaired(data: bytes) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """`data`, as long as before, with what breaks a JSON parser replaced; and {what: (count, offset of the first)}.

    Control characters are looked for only where nothing else was found: it takes the longest.
    """
    notes: dict[str, tuple[int, int]] = {}
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        text, count = _NOT_UTF8.subn("?", data.decode("utf-8", "surrogateescape"))
        notes["bytes that are not UTF-8 were read as '?'"] = (count, error.start)
        data = text.encode("utf-8")
    for what, pattern, replacement in _REPAIRS:
        if (first := pattern.search(data)) is not None:
            data, count = pattern.subn(replacement, data)
            notes[what] = (count, first.start())
    if not notes:
        printable = _STRING.sub(lambda match: _CONTROL.sub(b" ", match[0]), data)
        changed = np.flatnonzero(np.frombuffer(data, np.uint8) != np.frombuffer(printable, np.uint8))
        if len(changed):
            notes["control characters inside names were read as spaces"] = (len(changed), int(changed[0]))
        data = printable
    return data, notes
