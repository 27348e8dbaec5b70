"""Read what `torch.cuda.memory._dump_snapshot` wrote; nothing in the file is run.

The file is a pickle, which can name functions to call (refused), and which can ask for gigabytes in ten bytes: while it
is read, this process may take no more memory than a snapshot of its size needs.
"""

from __future__ import annotations

import os
import pickle
import re
import stat
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec

from profiler_wrapper.errors import BrokenSnapshot
from profiler_wrapper.reports.text import clean
from profiler_wrapper.trace.events import no_garbage_collection
from profiler_wrapper.units import file_size

# What an entry of a history says was done; of segments, whether the allocator then holds more or less of the device.
SEGMENT_SIGNS = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
ACTIONS = {"alloc", "free_requested", "free_completed", "oom", "snapshot", *SEGMENT_SIGNS}
UNKNOWN = -1  # where a time or an address is not given


class Frame(msgspec.Struct, frozen=True):
    """One call of a stack."""

    file: str = ""
    line: int = 0
    name: str = ""
    source: str = ""  # the line of the model that generated code stands for: "/home/me/model.py:12 forward"


class Stack(msgspec.Struct, frozen=True):
    """What an allocation says of the code that asked for it."""

    frames: tuple[Frame, ...] = ()  # innermost first
    metadata: str = ""  # of `torch.cuda.memory._set_memory_metadata`


_Int = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
_Size = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Block(msgspec.Struct, rename={"size_bytes": "size", "requested_bytes": "requested_size", "stack": "frames"}):
    """A piece of a segment, given out or free."""

    size_bytes: _Size  # given
    address: _Int = UNKNOWN  # behind the block before it, where the file does not say
    requested_bytes: _Int = UNKNOWN  # asked for
    state: str = ""  # "allocated", "awaiting_free" or "free"; in the file as torch writes it
    stack: Any = None  # into MemorySnapshot.stacks; in the file the frames


_NAMES = {"size_bytes": "total_size", "pool": "segment_pool_id", "kind": "segment_type", "expandable": "is_expandable"}


class Segment(msgspec.Struct, rename=_NAMES):
    """Memory that the allocator got from the device in one piece."""

    device: _Int
    address: _Int
    size_bytes: _Size
    stream: _Int
    blocks: list[Block]
    pool: tuple[_Int, _Int] | None = None  # None, (0, 0): the default one; others belong to CUDA graphs and `MemPool`s
    kind: str = "unknown"  # "small", "large"
    expandable: bool | None = None


_OF_EVENT = {"address": "addr", "size_bytes": "size", "device_free_bytes": "device_free", "metadata": "user_metadata"}


class AllocatorEvent(msgspec.Struct, rename={**_OF_EVENT, "stack": "frames"}):
    """An entry of a device's history. Sizes of alloc, free and oom are those asked for."""

    action: str | None = None  # of ACTIONS
    address: _Int = UNKNOWN
    size_bytes: _Size = 0
    device_free_bytes: _Int | None = None  # of an oom
    time_us: _Int = UNKNOWN  # since 1970; not in old files
    stack: Any = None  # as a block's
    metadata: str | None = None


class MemorySnapshot(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One file: the state of the allocator when it was written, and what it did before, where that was recorded."""

    name: str  # of the file
    file_bytes: int
    segments: list[Segment]
    events: Mapping[int, list[AllocatorEvent]]  # by device, those with any; oldest first
    stacks: tuple[Stack, ...]  # the first is empty
    settings: Mapping[str, str]  # of the allocator, as far as the file has them
    notes: tuple[str, ...]  # what was missing or odd


_MAKE_ONE = "make one with torch.cuda.memory._dump_snapshot(path)"
_COPY_AGAIN = "Copy it again whole, or write a new one with torch.cuda.memory._dump_snapshot(path)."
_DO_NOT_OPEN = "Do not open it with pickle.load or torch.load unless you trust who made it."
_OTHER_FILES = {
    b"\x1f\x8b": "it is compressed with gzip; unpack it first (gunzip)",
    b"PK\x03\x04": f"it is a zip archive, perhaps a checkpoint of torch.save; {_MAKE_ONE}",
    b"\x28\xb5\x2f\xfd": "it is compressed with zstd; unpack it first (unzstd)",
    b"{": f"it looks like JSON, so no pickle (`analyze` reads traces); {_MAKE_ONE}",
    b"<": f"it looks like a page of HTML, so no pickle; {_MAKE_ONE}",
}
_LEAST_MEMORY_BYTES, _MEMORY_PER_BYTE = 256 << 20, 40  # beyond what is used. Measured: 10 bytes per byte of the file
_LONGEST_TEXT = 200  # of an error about the file


def read_snapshot(path: str | os.PathLike[str]) -> MemorySnapshot:
    """Read a memory snapshot. Takes time and memory in proportion to the file.

    Raises:
        BrokenSnapshot: it is cut, damaged, no snapshot, or it wants to call something, which is refused.
        OSError: it cannot be opened.
    """
    path = Path(path)
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        what = "a directory" if path.is_dir() else "no plain file"
        raise BrokenSnapshot(f"{path} is {what}; give the file of a memory snapshot (.pickle)")
    with path.open("rb") as file:
        start = file.read(8)
        if not start:
            raise BrokenSnapshot(f"{path} is empty; was the process killed while it wrote? {_MAKE_ONE}")
        for other, what in _OTHER_FILES.items():
            if start.startswith(other):
                raise BrokenSnapshot(f"{path} is no memory snapshot: {what}")
        file.seek(0)
        try:
            with no_garbage_collection(), _limited_memory(status.st_size):
                return snapshot_of(_PlainUnpickler(file).load(), file_bytes=status.st_size, name=path.name)
        except Exception as error:
            said = clean(str(error)[:_LONGEST_TEXT])  # what a file brings must not write to the terminal
            if isinstance(error, MemoryError):
                size = file_size(status.st_size)
                why = f"asks for more memory than a snapshot of {size} should, or than there is. {_COPY_AGAIN}"
            elif isinstance(error, _Refused):
                why = f"is no readable memory snapshot: {said}: refused, none of it was run. {_DO_NOT_OPEN}"
            elif isinstance(error, msgspec.ValidationError | UnicodeEncodeError):  # the latter: a key that is no text
                why = f"is a pickle, but no memory snapshot: {said}; {_MAKE_ONE}"
            else:
                said += f" ({type(error).__name__}); it was cut short or damaged"
                why = f"is no readable memory snapshot: {said}. {_COPY_AGAIN}"
    raise BrokenSnapshot(f"{path} {why}")


class _Refused(pickle.UnpicklingError):
    """The file wants more than plain values."""


class _PlainUnpickler(pickle.Unpickler):
    """Numbers, texts and containers: a pickle can call nothing that it cannot name."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise _Refused(f"it wants to call {module}.{name}"[:_LONGEST_TEXT] + ", and a snapshot calls nothing")

    def persistent_load(self, _: object) -> NoReturn:
        raise _Refused("it holds a persistent id, which no snapshot has")


@contextmanager
def _limited_memory(file_bytes: int) -> Iterator[None]:
    """While it lasts, this process gets a MemoryError for more than a file of this size needs."""
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    except (ImportError, OSError):  # a system without such limits
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = pages * resource.getpagesize() + _LEAST_MEMORY_BYTES + _MEMORY_PER_BYTE * file_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most if soft == resource.RLIM_INFINITY else min(most, soft), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


_STATES = {
    "active_allocated": "allocated",
    "active_pending_free": "awaiting_free",  # as torch writes it
    "active_awaiting_free": "awaiting_free",  # as torch documents it
    "inactive": "free",
}
_MOST_FRAMES = 512  # of one stack: Python itself stops at 1000 calls
_SOURCE = re.compile(r'File "([^"\n]+)", line (\d+), in ([^\n]+)')


class _Frame(msgspec.Struct, frozen=True):
    filename: str | None = None
    line: _Int | None = None
    name: str | None = None
    fx_original_trace: str | None = None


class _Frames(msgspec.Struct):
    frames: list[_Frame]


class _Root(msgspec.Struct):
    segments: list[Segment]
    device_traces: list[list[AllocatorEvent]] = []
    allocator_settings: dict[str, Any] = {}


def snapshot_of(root: Any, *, file_bytes: int, name: str) -> MemorySnapshot:
    """Return the records of what `torch.cuda.memory._snapshot()` returns.

    Raises:
        msgspec.ValidationError: a value has another type than in a snapshot; the message names its path.
    """
    if isinstance(root, list):  # torch.cuda.memory_snapshot(), and what torch wrote before it had histories
        root = {"segments": root}
    read = msgspec.convert(root, _Root)
    segments, traces, settings = read.segments, read.device_traces, read.allocator_settings.items()
    if sum(len(segment.blocks) for segment in segments) + sum(map(len, traces)) > file_bytes:
        # Each takes a byte at least, unless the file holds them once and names them often.
        raise msgspec.ValidationError("it repeats a few values so often that they are more than the file has bytes")
    stacks, notes = _Stacks(), Counter[str]()
    events = {device: [one for one in trace if one.action in ACTIONS] for device, trace in enumerate(traces) if trace}
    allocations = ((device, one) for device, known in events.items() for one in known if one.action == "alloc")
    # torch writes metadata into the history only: the last of an address is that of its block.
    metadata = {(device, one.address): one.metadata or "" for device, one in allocations}
    for segment in segments:
        if sum(block.size_bytes for block in segment.blocks) != segment.size_bytes:
            notes["segments have blocks that do not add up to their size"] += 1
        at = segment.address
        for block in segment.blocks:
            if block.state not in _STATES:
                notes["blocks are in a state that is not known; they count as free"] += 1
            block.state = _STATES.get(block.state, "free")
            block.address = at if block.address == UNKNOWN else block.address
            asked = block.size_bytes if block.requested_bytes == UNKNOWN else block.requested_bytes
            block.requested_bytes = 0 if block.state == "free" else min(asked, block.size_bytes)
            block.stack = stacks.number(block.stack, metadata.get((segment.device, block.address), ""))
            at += block.size_bytes
    for event in (event for known in events.values() for event in known):
        event.stack = stacks.number(event.stack, event.metadata or "")
    if unknown := sum(map(len, traces)) - sum(map(len, events.values())):
        notes["entries of the history are of a kind that is not known; they are left out"] = unknown
    return MemorySnapshot(
        name=name,
        file_bytes=file_bytes,
        segments=segments,
        events=events,
        stacks=tuple(stacks.numbers),
        settings={key: str(value) for key, value in settings if isinstance(value, str | int | float)},
        notes=tuple(f"{count} {what}" for what, count in notes.items()),
    )


class _Stacks:
    """What blocks and entries have in common, each kept once and known by its number."""

    def __init__(self) -> None:
        self.numbers: dict[Stack, int] = {Stack(): 0}
        self._by_ids: dict[tuple[str, tuple[int, ...] | None], int] = {}  # of frames as the file shares them

    def number(self, frames: Any, metadata: str) -> int:
        frames = frames or []
        same = metadata, tuple(map(id, frames[:_MOST_FRAMES])) if isinstance(frames, list | tuple) else None
        if same not in self._by_ids:
            read = msgspec.convert({"frames": frames}, _Frames).frames[:_MOST_FRAMES]
            stack = Stack(tuple(map(_frame, read)), metadata)
            self._by_ids[same] = self.numbers.setdefault(stack, len(self.numbers))
        return self._by_ids[same]


def _frame(read: _Frame) -> Frame:
    """Return the frame; of the stack that torch writes of the model, its source is the innermost line."""
    lines = _SOURCE.findall(read.fx_original_trace or "")
    source = "{}:{} {}".format(*lines[-1]) if lines else ""
    return Frame(read.filename or "", read.line or 0, read.name or "", source)
