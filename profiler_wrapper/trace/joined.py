"""One trace of several that were recorded one after the other: what torch held at once would not fit into memory."""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from pathlib import Path

import numpy as np

from profiler_wrapper.trace.events import EVENTS_BEGIN

# As torch's exporter writes them; `tid` is a text where it is no thread and no stream, as of the profiler's own span.
_TIMED = re.compile(rb'"tid": -?\d+,\s*"ts": (\d+)\.(\d{3}),\s*"dur": (\d+)\.(\d{3})')
_TIME = re.compile(rb'"ts": (\d+)\.(?=\d{3})')
_ID = tuple(re.compile(rb'"%b": (\d+)' % key) for key in (b"correlation", b"id"))
_EVENTS_END = re.compile(rb'\s*\],\s*"traceName":.*\Z', re.DOTALL)
_TAIL_BYTES = 1 << 16
_ZERO = ord("0")
_IDS = 1 << 33  # more than a piece has: a correlation, or the number of a flow, joins events of one piece only


class JoinedTrace:
    """A trace that grows by a piece at a time. Each begins where the one before ended: the pause between is left out.

    Times of later pieces are moved back for that, so only the first keeps those of the machine's clock.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.pieces = 0
        self._resumed_ns: list[int] = []  # of each piece but the first: when it began, since 1970
        self._moved_back_ns: list[int] = []  # of each piece but the first
        self._end_ns = 0  # of the last event
        self._events_end_byte = 0  # in the file

    def place_ns(self, time_ns: int) -> int:
        """Where a moment, in nanoseconds since 1970, lies in this trace."""
        later = bisect_right(self._resumed_ns, time_ns)
        return time_ns - self._moved_back_ns[later - 1] if later else time_ns

    def add(self, piece: Path, *, resumed_ns: int = 0) -> None:
        """Append a trace that torch exported, and remove its file.

        `resumed_ns`: when its recording began, in nanoseconds since 1970.

        Raises:
            ValueError: it is not as torch's own exporter writes it.
            OSError: it cannot be read or written; the file is as it was.
        """
        data = piece.read_bytes()
        head = EVENTS_BEGIN.match(data)
        tail = _EVENTS_END.search(data, max(0, len(data) - _TAIL_BYTES))
        timed = [(int(a + b), int(c + d)) for a, b, c, d in _TIMED.findall(data)]
        if head is None or tail is None or not timed:
            raise ValueError("it is not as torch.profiler's exporter writes it")
        end_ns = max(start + length for start, length in timed)
        if self.pieces:
            back_ns = min(timed)[0] - self._end_ns
            events = _moved_back(data[head.end() : tail.start()], back_ns)
            for key in _ID:
                events = key.sub(self._renumbered, events)
            self._append(events, tail[0])
            piece.unlink()
            self._resumed_ns.append(resumed_ns)
            self._moved_back_ns.append(back_ns)
            self._end_ns = end_ns - back_ns
        else:
            os.replace(piece, self.path)
            self._end_ns, self._events_end_byte = end_ns, tail.start()
        self.pieces += 1

    def _renumbered(self, found: re.Match[bytes]) -> bytes:
        return found[0][: found.start(1) - found.start()] + b"%d" % (int(found[1]) + self.pieces * _IDS)

    def _append(self, events: bytes, tail: bytes) -> None:
        try:
            with self.path.open("r+b") as file:
                file.seek(self._events_end_byte)
                file.write(b"," + events)
                end_byte = file.tell()
                file.write(tail)
        except BaseException:  # Ctrl-C too
            os.truncate(self.path, self._events_end_byte)
            with self.path.open("ab") as file:
                file.write(tail)
            raise
        self._events_end_byte = end_byte


def _moved_back(events: bytes, back_ns: int) -> bytes:
    """The same events with other times, each as long as it was written before."""
    text = np.frombuffer(bytearray(events), np.uint8)
    found = np.array([(time.start(1), time.end(1)) for time in _TIME.finditer(events)], dtype=np.int64)
    for digits in np.unique(found[:, 1] - found[:, 0]).tolist():
        begin = found[found[:, 1] - found[:, 0] == digits, 0]
        places = np.delete(np.arange(digits + 4), digits) + begin[:, None]  # but the point
        values = 10 ** np.arange(digits + 2, -1, -1)
        time_ns = (text[places] - _ZERO) @ values - back_ns
        if (time_ns < values[0]).any():
            raise ValueError("its times would be of fewer digits")
        text[places] = time_ns[:, None] // values % 10 + _ZERO
    return text.tobytes()
