"""Adds lanes of our own to a Chrome trace: when which layer ran, above the lanes of the profiler."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, cast

from profiler_wrapper.errors import BrokenTrace, WrongUse, shown
from profiler_wrapper.trace.atomic import replacing
from profiler_wrapper.trace.events import EVENTS_BEGIN
from profiler_wrapper.trace.recording import OUR_CATEGORY

_FIRST_ID = 1_000_000_000  # beyond the process numbers of Linux (2^22) and of Kineto's own lanes
_FIRST_SORT_INDEX = -1000  # Kineto's start at 0: ours lie above
_PIECE_BYTES = 1 << 20
# Viewers hold times as floating point and round start and length each by itself: a bar that ends just
# where the next begins, or the one around it ends, would cross it by a nanosecond and be dropped.
_ROUNDING_NS = 2


@dataclass(frozen=True, slots=True)
class LaneSpan:
    """One bar: `name` ran on `device` (None: the CPU) from `start_ns` on the trace's clock.

    Bars of one lane and device nest, or lie apart.
    """

    lane: str
    name: str
    start_ns: int
    duration_ns: int
    device: int | None = None
    args: Mapping[str, int | str] = field(default_factory=dict)


def splice_lanes(path: str | os.PathLike[str], spans: Sequence[LaneSpan], target: str | os.PathLike[str]) -> None:
    """Writes the trace at `path` to `target` with `spans` as complete events that viewers show on top.

    They come before its own events, which are not looked at. A bar that reaches beyond the end of one it began in is
    cut there, and its args say by how much: viewers cannot draw bars that cross. Each is drawn a few nanoseconds short,
    for they round. Either may be gzipped; `target`, by its name. It is written whole or not at all, and may be `path`.

    Raises:
        WrongUse: a span has a negative duration.
        BrokenTrace: the file is no trace.
        OSError: it could not be read or written.
    """
    path, target = Path(path), Path(target)
    lines = ("\n" + ",\n".join(_events(spans))).encode() if spans else b""
    with replacing(target) as beside, _opened(path) as source, _written(beside) as written:
        head = b""
        while (begin := EVENTS_BEGIN.match(head)) is None or not head[begin.end() :].strip():
            if not (piece := source.read(_PIECE_BYTES)):
                raise BrokenTrace(f"{path}: no lanes were added: no list of events begins in it")
            head += piece
        events = head[begin.end() :]
        comma = b"," if lines and not events.lstrip().startswith(b"]") else b""
        written.write(begin[0] + lines + comma + events)
        shutil.copyfileobj(source, written, _PIECE_BYTES)


# --- the file ---


def _opened(path: Path) -> IO[bytes]:
    with path.open("rb") as file:
        is_zipped = file.read(2) == b"\x1f\x8b"
    return cast("IO[bytes]", gzip.open(path)) if is_zipped else path.open("rb")


def _written(path: Path) -> IO[bytes]:
    """A file to write to, gzipped (fast: level 1) if its name says so."""
    return cast("IO[bytes]", gzip.open(path, "wb", compresslevel=1)) if path.suffix == ".gz" else path.open("wb")


# --- the events ---


def _events(spans: Sequence[LaneSpan]) -> Iterator[str]:
    """Names and order of the lanes, then their bars."""
    by_device: dict[int | None, dict[str, list[LaneSpan]]] = {}
    for span in spans:
        if span.duration_ns < 0:
            lane, name = shown(span.lane), shown(span.name)
            raise WrongUse(f"lane {lane}: {name} has a negative duration ({span.duration_ns} ns)")
        by_device.setdefault(span.device, {}).setdefault(span.lane, []).append(span)
    first_ns = min(span.start_ns for span in spans)
    numbers = itertools.count(_FIRST_ID)
    devices = sorted(by_device, key=lambda device: -1 if device is None else device)
    for place, device in enumerate(devices):
        pid = next(numbers)
        name = "layers on the CPU" if device is None else f"layers on GPU {device}"
        yield _label("process_name", pid, 0, first_ns, name=name)
        yield _label("process_sort_index", pid, 0, first_ns, sort_index=_FIRST_SORT_INDEX + place)
        for row, (lane, bars) in enumerate(by_device[device].items()):
            tid = next(numbers)
            yield _label("thread_name", pid, tid, first_ns, name=_readable(lane))
            yield _label("thread_sort_index", pid, tid, first_ns, sort_index=row)
            for bar in _nested(bars):
                yield _bar(bar, pid, tid)


def _nested(bars: Iterable[LaneSpan]) -> Iterator[LaneSpan]:
    """The bars by time, each cut where the one around it ends."""
    ends: list[int] = []
    for bar in sorted(bars, key=lambda bar: (bar.start_ns, -bar.duration_ns)):
        while ends and ends[-1] <= bar.start_ns:
            ends.pop()
        end = bar.start_ns + bar.duration_ns
        if ends and end > ends[-1]:
            cut_ns = end - ends[-1]
            bar = replace(bar, duration_ns=bar.duration_ns - cut_ns, args={**bar.args, "cut at its end (ns)": cut_ns})
        shorter_ns = _ROUNDING_NS * (len(ends) + 1)
        ends.append(bar.start_ns + bar.duration_ns)
        yield replace(bar, duration_ns=max(bar.duration_ns - shorter_ns, 0))


def _bar(bar: LaneSpan, pid: int, tid: int) -> str:
    args = {_readable(key): _readable(value) if isinstance(value, str) else value for key, value in bar.args.items()}
    return (
        f'{{"ph": "X", "cat": "{OUR_CATEGORY}", "name": {json.dumps(_readable(bar.name))}, "pid": {pid}, "tid": {tid}, '
        f'"ts": {_microseconds(bar.start_ns)}, "dur": {_microseconds(bar.duration_ns)}, "args": {json.dumps(args)}}}'
    )


def _label(kind: str, pid: int, tid: int, ts_ns: int, **args: int | str) -> str:
    return (
        f'{{"ph": "M", "name": "{kind}", "pid": {pid}, "tid": {tid}, "ts": {_microseconds(ts_ns)}, '
        f'"args": {json.dumps(args)}}}'
    )


def _readable(text: str) -> str:
    """Without lone surrogates, at which strict parsers stop."""
    return text.encode("utf-8", "replace").decode()


def _microseconds(time_ns: int) -> str:
    """All three decimals, exactly; a float would round a late time."""
    whole, thousandths = divmod(abs(int(time_ns)), 1000)
    return f"{'-' if time_ns < 0 else ''}{whole}.{thousandths:03d}"
