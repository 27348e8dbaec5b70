"""Reads what `torch.cuda.memory._dump_snapshot` wrote; nothing in the file is run.

The file is a pickle, which can name functions to call (refused), and which can ask for gigabytes in ten bytes. So a
child process reads it, with a limit on its memory and time, checks every type, and sends back plain JSON.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import re
import signal
import stat
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, NoReturn

import msgspec
import numpy as np

from profiler_wrapper.child import start_child
from profiler_wrapper.errors import BrokenSnapshot
from profiler_wrapper.trace.recording import Int64
from profiler_wrapper.units import file_size

# -- what a snapshot holds ------------------------------------------------------------------------

BlockState = Literal["allocated", "awaiting_free", "free"]

# What an entry of a history says, by the number that stands for it in `AllocatorEvents.action`.
ACTIONS = (
    "alloc",
    "free_requested",
    "free_completed",
    "segment_alloc",
    "segment_free",
    "segment_map",
    "segment_unmap",
    "oom",
    "snapshot",
)
UNKNOWN = -1  # where a time, an address or the free memory is not given
NO_TEXT = 0  # the number of the empty metadata


class Frame(msgspec.Struct, frozen=True):
    """One call of a stack. `source` is the place in the model that generated code stands for, "" for other code."""

    file: str
    line: int
    name: str
    source: str = ""


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of a segment, given out or free."""

    address: int  # UNKNOWN in old files without any
    size_bytes: int  # given
    requested_bytes: int  # asked for
    state: BlockState
    stack: int  # for MemorySnapshot.stack
    text: int  # into MemorySnapshot.texts: the metadata it was stamped with


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that the allocator got from the device in one piece."""

    device: int
    address: int
    size_bytes: int
    stream: int
    pool: tuple[int, int]  # (0, 0): the default one; others belong to CUDA graphs and `MemPool`s
    kind: str  # "small", "large"
    expandable: bool
    blocks: tuple[Block, ...]


class AllocatorEvents(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What a device's allocator did, oldest first, as columns of equal length.

    Sizes of alloc and free are those asked for; of an oom too, and its address is UNKNOWN.
    """

    action: Int64  # into ACTIONS
    address: Int64
    size_bytes: Int64
    device_free_bytes: Int64  # of an oom, else UNKNOWN
    time_us: Int64  # since 1970, UNKNOWN in old files
    stack: Int64  # for MemorySnapshot.stack
    text: Int64  # into MemorySnapshot.texts

    def __len__(self) -> int:
        return len(self.action)


class MemorySnapshot(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One file: the state of the allocator when it was written, and what it did before, where that was recorded."""

    name: str  # of the file
    file_bytes: int
    segments: tuple[Segment, ...]
    events: Mapping[int, AllocatorEvents]  # by device, those with any
    frames: tuple[Frame, ...]
    stacks: tuple[tuple[int, ...], ...]  # into `frames`, innermost first; the first stack is the empty one
    texts: tuple[str, ...]  # the first is ""
    settings: Mapping[str, str]  # of the allocator, as far as the file has them
    notes: tuple[str, ...]  # what was missing or odd

    def stack(self, number: int) -> tuple[Frame, ...]:
        """The calls of a stack, innermost first."""
        return tuple(self.frames[frame] for frame in self.stacks[number])


# -- reading a file -------------------------------------------------------------------------------

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
# Limits of the child, beyond what it has used when it begins. Measured: 10 bytes and 0.15 us per byte of the file.
_LEAST_MEMORY_BYTES, _MEMORY_PER_BYTE = 256 << 20, 40
_LEAST_TIME_S, _TIME_S_PER_BYTE = 10, 3e-6  # of the processor
_LONGEST_TEXT = 200  # of an error about the file
_CHILD = f"from {__name__} import read_for_parent; read_for_parent()"
_OUT_OF_TIME = -getattr(signal, "SIGXCPU", 0)


def read_snapshot(path: str | os.PathLike[str]) -> MemorySnapshot:
    """Reads a memory snapshot. Takes time and memory in proportion to the file.

    Raises:
        BrokenSnapshot: it is cut, damaged, no snapshot, or it wants to call something, which is refused.
        OSError: it cannot be opened, or no process can be started.
    """
    path = Path(path)
    if path.is_dir():
        raise BrokenSnapshot(f"{path} is a directory; give the file of a memory snapshot (.pickle)")
    with open(path, "rb", buffering=0, opener=_open_without_waiting) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise BrokenSnapshot(f"{path} is no plain file; give the file of a memory snapshot (.pickle)")
        start = file.read(8)
        if not start:
            raise BrokenSnapshot(f"{path} is empty; was the process killed while it wrote? {_MAKE_ONE}")
        for other, what in _OTHER_FILES.items():
            if start.startswith(other):
                raise BrokenSnapshot(f"{path} is no memory snapshot: {what}")
        file.seek(0)
        with start_child(_CHILD, path.name, stdin=file, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
            output, errors = child.communicate()
    if child.returncode == _OUT_OF_TIME:
        raise BrokenSnapshot(f"{path} takes far longer to read than a snapshot of its size should. {_COPY_AGAIN}")
    if child.returncode:
        said = _plain_text(errors.decode(errors="replace").strip().rpartition("\n")[2])
        raise BrokenSnapshot(f"{path} was not read: the process that reads it ended with {child.returncode} {said}")
    answer = json.loads(output)
    if "error" in answer:
        raise BrokenSnapshot(f"{path} {answer['error']}")
    return msgspec.convert(answer, MemorySnapshot, str_keys=True, dec_hook=lambda _, column: np.array(column, np.int64))


def _open_without_waiting(path: str, flags: int) -> int:
    """A named pipe would wait for its writer for ever."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _plain_text(text: str) -> str:
    """What a file brings into an error must not write to the terminal."""
    return "".join(char if char.isprintable() and char.isascii() else "?" for char in text[:_LONGEST_TEXT])


# -- the child ------------------------------------------------------------------------------------


class _Refused(pickle.UnpicklingError):
    """The file wants more than plain values."""


class _PlainUnpickler(pickle.Unpickler):
    """Numbers, texts and containers: a pickle can call nothing that it cannot name."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise _Refused(f"it wants to call {module}.{name}"[:_LONGEST_TEXT] + ", and a snapshot calls nothing")

    def persistent_load(self, _: object) -> NoReturn:
        raise _Refused("it holds a persistent id, which no snapshot has")


def read_for_parent() -> None:
    """What the child does: a pickle comes in, a snapshot or an error goes out as JSON."""
    file_bytes = os.fstat(0).st_size
    gc.disable()  # nothing of this becomes garbage
    _limit_memory_and_time(file_bytes)
    try:
        answer = json.dumps(_answer(sys.stdin.buffer, file_bytes, name=sys.argv[1]))
    except MemoryError:
        error = (
            f"asks for more memory than a snapshot of {file_size(file_bytes)} should, or than there is. {_COPY_AGAIN}"
        )
        answer = json.dumps({"error": error})
    sys.stdout.write(answer)


def _answer(file: BinaryIO, file_bytes: int, *, name: str) -> Any:
    try:
        root = _PlainUnpickler(file).load()
    except _Refused as error:
        text = f"{_plain_text(str(error))}: refused, none of it was run. {_DO_NOT_OPEN}"
        return {"error": f"is no readable memory snapshot: {text}"}
    except MemoryError:
        raise
    except Exception as error:
        text = f"{_plain_text(str(error))} ({type(error).__name__}); it was cut short or damaged. {_COPY_AGAIN}"
        return {"error": f"is no readable memory snapshot: {text}"}
    try:
        read = snapshot_of(root, file_bytes=file_bytes, name=name)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:  # the latter: a key that is no text
        return {"error": f"is a pickle, but no memory snapshot: {_plain_text(str(error))}; {_MAKE_ONE}"}
    return msgspec.to_builtins(read, str_keys=True, enc_hook=np.ndarray.tolist)


def _limit_memory_and_time(file_bytes: int) -> None:
    with suppress(ImportError, OSError, ValueError):  # a system without such limits
        import resource

        spent_s = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
        _lower_limit(resource.RLIMIT_CPU, int(spent_s + _LEAST_TIME_S + _TIME_S_PER_BYTE * file_bytes) + 1)
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        now_bytes = pages * resource.getpagesize()
        _lower_limit(resource.RLIMIT_AS, now_bytes + _LEAST_MEMORY_BYTES + _MEMORY_PER_BYTE * file_bytes)


def _lower_limit(which: int, most: int) -> None:
    import resource

    soft, hard = resource.getrlimit(which)
    resource.setrlimit(
        which, (min([most, *(limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY)]), hard)
    )


# -- what torch writes, and what becomes of it ----------------------------------------------------

_Int = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
_Size = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_STATES: dict[str | None, BlockState] = {
    "active_allocated": "allocated",
    "active_pending_free": "awaiting_free",  # as torch writes it
    "active_awaiting_free": "awaiting_free",  # as torch documents it
    "inactive": "free",
}
_ACTION_NUMBERS: dict[str | None, int] = {action: number for number, action in enumerate(ACTIONS)}
_MOST_FRAMES = 512  # of one stack: Python itself stops at 1000 calls
_SOURCE = re.compile(r'File "(?P<file>[^"\n]+)", line (?P<line>\d+), in (?P<name>[^\n]+)')
_SOURCE_LETTERS = 4000  # of the end of a trace, which has the innermost line


class _Frame(msgspec.Struct):
    filename: str | None = None
    line: _Int | None = None
    name: str | None = None
    fx_original_trace: str | None = None


class _Stack(msgspec.Struct):
    frames: list[_Frame]


class _Block(msgspec.Struct):
    size: _Size
    address: _Int | None = None
    requested_size: _Int | None = None
    state: str | None = None
    frames: Any = None  # torch shares frames among the stacks: they are looked at once each
    user_metadata: str | None = None


class _Segment(msgspec.Struct):
    device: _Int | None = None
    address: _Int | None = None
    total_size: _Size | None = None
    stream: _Int | None = None
    segment_pool_id: tuple[_Int, _Int] | None = None
    segment_type: str | None = None
    is_expandable: bool | None = None
    blocks: list[_Block] = []


class _Entry(msgspec.Struct):
    action: str | None = None
    addr: _Int | None = None
    size: _Size | None = None
    device_free: _Int | None = None
    time_us: _Int | None = None
    frames: Any = None
    user_metadata: str | None = None


class _Root(msgspec.Struct):
    segments: list[_Segment]
    device_traces: list[list[_Entry]] | None = None
    allocator_settings: dict[str, Any] | None = None


def snapshot_of(root: Any, *, file_bytes: int, name: str) -> MemorySnapshot:
    """The records of what `torch.cuda.memory._snapshot()` returns.

    Raises:
        msgspec.ValidationError: a value has another type than in a snapshot; the message names its path.
    """
    if isinstance(root, list):  # torch.cuda.memory_snapshot(), and what torch wrote before it had histories
        root = {"segments": root}
    read = msgspec.convert(root, _Root)
    traces = read.device_traces or []
    if sum(len(segment.blocks) for segment in read.segments) + sum(map(len, traces)) > file_bytes:
        # Each takes a byte at least, unless the file holds them once and names them often.
        raise msgspec.ValidationError("it repeats a few values so often that they are more than the file has bytes")
    shared = _Shared()
    return MemorySnapshot(
        name=name,
        file_bytes=file_bytes,
        segments=tuple(_segment(segment, shared) for segment in read.segments),
        events={device: _events(trace, shared) for device, trace in enumerate(traces) if trace},
        frames=tuple(shared.frames),
        stacks=tuple(shared.stacks),
        texts=tuple(shared.texts),
        settings=_settings(read.allocator_settings or {}),
        notes=tuple(f"{count} {what}" for what, count in shared.notes.items()),
    )


class _Shared:
    """What blocks and entries have in common, each kept once and known by its number."""

    def __init__(self) -> None:
        self.frames: dict[Frame, int] = {}
        self.stacks: dict[tuple[int, ...], int] = {(): 0}
        self.texts: dict[str, int] = {"": 0}
        self.notes: Counter[str] = Counter()
        self._stacks_by_ids: dict[tuple[int, ...], int] = {}  # of the frames as the file shares them

    def stack(self, frames: Any) -> int:
        if not frames:
            return 0
        same = tuple(map(id, frames[:_MOST_FRAMES])) if isinstance(frames, list | tuple) else ()
        number = self._stacks_by_ids.get(same)
        if number is None:
            read = msgspec.convert({"frames": frames}, _Stack).frames[:_MOST_FRAMES]
            number = self.stacks.setdefault(tuple(map(self._frame, read)), len(self.stacks))
            self._stacks_by_ids[same] = number
        return number

    def _frame(self, read: _Frame) -> int:
        frame = Frame(read.filename or "", read.line or 0, read.name or "", _source(read.fx_original_trace or ""))
        return self.frames.setdefault(frame, len(self.frames))

    def text(self, value: str | None) -> int:
        return self.texts.setdefault(value or "", len(self.texts))

    def given(self, value: int | None, missing: int, note: str) -> int:
        if value is None:
            self.notes[note] += 1
            return missing
        return value


def _source(trace: str) -> str:
    """The innermost line of the model that generated code stands for: `"/home/me/model.py:12 forward"`."""
    found = list(_SOURCE.finditer(trace[-_SOURCE_LETTERS:]))
    return "{file}:{line} {name}".format_map(found[-1].groupdict()) if found else ""


def _segment(segment: _Segment, shared: _Shared) -> Segment:
    address = shared.given(segment.address, UNKNOWN, "segments have no address")
    blocks: list[Block] = []
    at = address
    for read in segment.blocks:
        blocks.append(_block(read, at, shared))
        at += read.size if at != UNKNOWN else 0
    held = sum(block.size_bytes for block in blocks)
    size = shared.given(segment.total_size, held, "segments have no size; that of their blocks is taken")
    if held != size:
        shared.notes["segments have blocks that do not add up to their size"] += 1
    return Segment(
        device=shared.given(segment.device, 0, "segments do not name their device; 0 is taken"),
        address=address,
        size_bytes=size,
        stream=shared.given(segment.stream, 0, "segments do not name their stream; 0 is taken"),
        pool=segment.segment_pool_id or (0, 0),
        kind=segment.segment_type or "unknown",
        expandable=bool(segment.is_expandable),
        blocks=tuple(blocks),
    )


def _block(block: _Block, at: int, shared: _Shared) -> Block:
    state = _STATES.get(block.state)
    if state is None:
        shared.notes["blocks are in a state that is not known; they count as free"] += 1
    requested = block.requested_size
    if requested is None:
        requested = block.size
        if state in ("allocated", "awaiting_free"):
            shared.notes["blocks do not say what was asked for; their size is taken"] += 1
    return Block(
        address=at if block.address is None else block.address,
        size_bytes=block.size,
        requested_bytes=min(requested, block.size) if state != "free" else 0,
        state=state or "free",
        stack=shared.stack(block.frames),
        text=shared.text(block.user_metadata),
    )


def _events(trace: Iterable[_Entry], shared: _Shared) -> AllocatorEvents:
    rows: list[tuple[int, ...]] = []
    for entry in trace:
        action = _ACTION_NUMBERS.get(entry.action)
        if action is None:
            shared.notes["entries of the history are of a kind that is not known; they are left out"] += 1
            continue
        rows.append(
            (
                action,
                UNKNOWN if entry.addr is None else entry.addr,
                shared.given(entry.size, 0, "entries of the history have no size; 0 is taken"),
                UNKNOWN if entry.device_free is None else entry.device_free,
                UNKNOWN if entry.time_us is None else entry.time_us,
                shared.stack(entry.frames),
                shared.text(entry.user_metadata),
            )
        )
    columns = np.array(rows, np.int64).reshape(-1, len(AllocatorEvents.__struct_fields__)).T
    return AllocatorEvents(**dict(zip(AllocatorEvents.__struct_fields__, columns.copy(), strict=True)))


def _settings(settings: Mapping[str, Any]) -> dict[str, str]:
    """Those of the allocator's settings that are one value, as text."""
    plain = {key: value for key, value in settings.items() if type(value) in (bool, str, float, int)}
    return {key: str(value) for key, value in plain.items() if type(value) is not int or abs(value) < 1 << 63}
