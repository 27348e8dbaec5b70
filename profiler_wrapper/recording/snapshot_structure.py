"""From the dicts and lists of a snapshot's pickle to its records, with every type checked."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import numpy as np

from profiler_wrapper.recording.snapshot_records import (
    ACTIONS,
    UNKNOWN,
    AllocatorEvents,
    Block,
    BlockState,
    Frame,
    MemorySnapshot,
    Segment,
)

_STATES: dict[str, BlockState] = {
    "active_allocated": "allocated",
    "active_pending_free": "awaiting_free",  # as torch writes it
    "active_awaiting_free": "awaiting_free",  # as torch documents it
    "inactive": "free",
}
_ACTION_NUMBERS = {action: number for number, action in enumerate(ACTIONS)}
_MOST_FRAMES = 512  # of one stack: Python itself stops at 1000 calls
_INT64 = 1 << 63
_SOURCE = re.compile(r'File "(?P<file>[^"\n]+)", line (?P<line>\d+), in (?P<name>[^\n]+)')


class WrongStructure(ValueError):
    """A value is not what a snapshot has in its place."""


class Structure:
    """Reads one snapshot; `file_bytes` bounds how often values that the file shares may be walked."""

    def __init__(self, file_bytes: int) -> None:
        self._file_bytes = self._left = file_bytes
        self._frames: dict[Frame, int] = {}
        self._frames_by_id: dict[int, int] = {}
        self._stacks: dict[tuple[int, ...], int] = {(): 0}
        self._stacks_by_id: dict[int, int] = {}
        self._stacks_by_ids: dict[tuple[int, ...], int] = {}  # of the frames
        self._texts: dict[str, int] = {"": 0}
        self._missing: Counter[str] = Counter()

    def snapshot(self, root: Any, *, name: str) -> MemorySnapshot:
        """The records of `root`.

        Raises:
            WrongStructure: it is something else.
        """
        if type(root) is list:  # torch.cuda.memory_snapshot(), and what torch wrote before it had histories
            root = {"segments": root}
        if type(root) is not dict or "segments" not in root:
            raise WrongStructure(f"it holds {_described(root)} where a dict with 'segments' belongs")
        segments = tuple(self._segment(segment) for segment in self._items(root, "segments", "the snapshot"))
        traces = self._items(root, "device_traces", "the snapshot") if root.get("device_traces") is not None else []
        events = {
            device: self._events(self._list(trace, "a device's history"))
            for device, trace in enumerate(traces)
            if trace
        }
        frames = tuple(self._frames)
        return MemorySnapshot(
            name=name,
            file_bytes=self._file_bytes,
            segments=segments,
            events=events,
            stacks=tuple(tuple(frames[number] for number in stack) for stack in self._stacks),
            texts=tuple(self._texts),
            settings=_settings(root.get("allocator_settings")),
            notes=tuple(f"{count} {what}" for what, count in self._missing.items()),
        )

    # -- segments ---------------------------------------------------------------------------------

    def _segment(self, value: Any) -> Segment:
        segment = _dict(value, "a segment")
        address = self._number(segment, "address", UNKNOWN, "segments have no address")
        blocks: list[Block] = []
        at = address
        for item in self._items(segment, "blocks", "a segment"):
            blocks.append(self._block(item, at))
            at += blocks[-1].size_bytes if at != UNKNOWN else 0
        held = sum(block.size_bytes for block in blocks)
        size = self._size(segment, "total_size", held, "segments have no size; that of their blocks is taken")
        if held != size:
            self._missing["segments have blocks that do not add up to their size"] += 1
        return Segment(
            device=self._number(segment, "device", 0, "segments do not name their device; 0 is taken"),
            address=address,
            size_bytes=size,
            stream=self._number(segment, "stream", 0, "segments do not name their stream; 0 is taken"),
            pool=_pool(segment.get("segment_pool_id")),
            kind=_text(segment.get("segment_type")) or "unknown",
            expandable=segment.get("is_expandable") is True,
            blocks=tuple(blocks),
        )

    def _block(self, value: Any, at: int) -> Block:
        block = _dict(value, "a block")
        if "size" not in block:
            raise WrongStructure("a block without 'size'")
        size = self._size(block, "size", 0, "")
        state = _STATES.get(_text(block.get("state")))
        if state is None:
            self._missing["blocks are in a state that is not known; they count as free"] += 1
        frames, requested = block.get("frames"), block.get("requested_size")
        history = block.get("history")
        if type(history) is list and history:  # torch 1.13 and 2.0
            last = _dict(history[0], "a block's history")
            frames = last.get("frames") if frames is None else frames
            requested = last.get("real_size") if requested is None else requested
        if requested is None:
            requested = size
            if state in ("allocated", "awaiting_free"):
                self._missing["blocks do not say what was asked for; their size is taken"] += 1
        return Block(
            address=self._number(block, "address", at, ""),
            size_bytes=size,
            requested_bytes=min(_int(requested, "requested_size"), size) if state != "free" else 0,
            state=state or "free",
            stack=self._stack(frames),
            text=self._text_number(block.get("user_metadata")),
        )

    # -- histories --------------------------------------------------------------------------------

    def _events(self, entries: list[Any]) -> AllocatorEvents:
        rows: list[tuple[int, ...]] = []
        for value in entries:
            entry = _dict(value, "an entry of a history")
            action = _ACTION_NUMBERS.get(_text(entry.get("action")), UNKNOWN)
            if action == UNKNOWN:
                self._missing["entries of the history are of a kind that is not known; they are left out"] += 1
                continue
            rows.append(
                (
                    action,
                    self._number(entry, "addr", UNKNOWN, ""),
                    self._size(entry, "size", 0, "entries of the history have no size; 0 is taken"),
                    self._number(entry, "device_free", UNKNOWN, ""),
                    self._number(entry, "time_us", UNKNOWN, ""),
                    self._stack(entry.get("frames")),
                    self._text_number(entry.get("user_metadata")),
                )
            )
        return _columns(rows)

    # -- stacks -----------------------------------------------------------------------------------

    def _stack(self, frames: Any) -> int:
        """The number of a stack. torch shares stacks between entries, and frames between stacks: each is read once."""
        if not frames:
            return 0
        number = self._stacks_by_id.get(id(frames))
        if number is not None:
            return number
        read = self._list(frames, "a stack")[:_MOST_FRAMES]
        same = tuple(map(id, read))
        number = self._stacks_by_ids.get(same)
        if number is None:
            number = self._stacks.setdefault(tuple(map(self._frame, read)), len(self._stacks))
        self._stacks_by_id[id(frames)] = self._stacks_by_ids[same] = number
        return number

    def _frame(self, value: Any) -> int:
        known = self._frames_by_id.get(id(value))
        if known is not None:
            return known
        frame = _dict(value, "a frame")
        line = frame.get("line")
        read = Frame(
            _text(frame.get("filename")),
            _int(line, "line") if line is not None else 0,
            _text(frame.get("name")),
            _source(frame.get("fx_original_trace")),
        )
        number = self._frames.setdefault(read, len(self._frames))
        self._frames_by_id[id(value)] = number
        return number

    def _text_number(self, value: Any) -> int:
        text = _text(value)
        return self._texts.setdefault(text, len(self._texts))

    # -- values -----------------------------------------------------------------------------------

    def _items(self, holder: dict[str, Any], key: str, what: str) -> list[Any]:
        return self._list(holder.get(key, []), f"{key!r} of {what}")

    def _list(self, value: Any, what: str) -> list[Any]:
        if type(value) not in (list, tuple):
            raise WrongStructure(f"{what} is {_described(value)} where a list belongs")
        self._left -= len(value)
        if self._left < 0:  # each takes a byte at least, unless the file holds them once and names them often
            raise WrongStructure("it repeats a few values so often that they are more than the file has bytes")
        return list(value)

    def _number(self, holder: dict[str, Any], key: str, missing: int, note: str) -> int:
        value = holder.get(key)
        if value is not None:
            return _int(value, key)
        if note:
            self._missing[note] += 1
        return missing

    def _size(self, holder: dict[str, Any], key: str, missing: int, note: str) -> int:
        size = self._number(holder, key, missing, note)
        if size < 0:
            raise WrongStructure(f"{key!r} is negative")
        return size


def _dict(value: Any, what: str) -> dict[str, Any]:
    if type(value) is not dict:
        raise WrongStructure(f"{what} is {_described(value)} where a dict belongs")
    return value


def _int(value: Any, what: str) -> int:
    if type(value) is not int or not -_INT64 <= value < _INT64:
        raise WrongStructure(f"{what!r} is {_described(value)} where a number of 64 bits belongs")
    return value


def _text(value: Any) -> str:
    return value if type(value) is str else ""


def _pool(value: Any) -> tuple[int, int]:
    if type(value) in (tuple, list) and len(value) == 2:
        return _int(value[0], "segment_pool_id"), _int(value[1], "segment_pool_id")
    return (0, 0)


def _source(trace: Any) -> str:
    """The innermost line of the model that generated code stands for: `"/home/me/model.py:12 forward"`."""
    found = list(_SOURCE.finditer(_text(trace)[-4000:]))
    return "{file}:{line} {name}".format_map(found[-1].groupdict()) if found else ""


def _settings(value: Any) -> dict[str, str]:
    """Those of the allocator's settings that are one value, as text."""
    if type(value) is not dict:
        return {}
    plain = {key: item for key, item in value.items() if type(item) in (bool, str, float, int)}
    return {key: str(item) for key, item in plain.items() if type(item) is not int or abs(item) < _INT64}


def _columns(rows: list[tuple[int, ...]]) -> AllocatorEvents:
    """Rows of (action, address, size, device_free, time, stack, text) as columns."""
    table = np.array(rows, np.int64).reshape(-1, 7).T
    action, address, size, device_free, time, stack, text = (np.ascontiguousarray(column) for column in table)
    return AllocatorEvents(
        action=action, address=address, size_bytes=size, device_free_bytes=device_free, time_us=time, stack=stack,
        text=text,
    )  # fmt: skip


def _described(value: Any) -> str:
    if type(value) is dict:
        keys = ", ".join(repr(key[:20]) for key in list(value)[:4])
        return f"a dict with the keys {keys}" if keys else "an empty dict"
    return f"a {type(value).__name__}" if value is not None else "None"
