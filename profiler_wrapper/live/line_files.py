"""A file of text and one of JSON lines that any thread may write to, also one that a signal stopped while it wrote."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from typing import Any

from profiler_wrapper.live.kept_lines import KeptLines
from profiler_wrapper.live.span_nodes import ROOM_BYTES

LOCK_S = 2.0  # a signal's handler may ask for what the thread it stopped holds
MOST_LATE = 10_000  # lines of other threads while one writes
_LATE_AT_ONCE = 100  # of them that a thread writes behind its own: it has to go on, however many others add meanwhile
_PAUSE_S = 0.0001


class Unread:
    """A span whose time on the device is not known yet.

    Attributes:
        begin, end: events.
        text: its line of text, which is not written yet.
        file, offset: where that time goes; until its JSON line is written, the place within the line, and no file.
    """

    __slots__ = ("begin", "end", "file", "offset", "text")

    def __init__(self, begin: Any, end: Any, text: bytes, offset: int) -> None:
        self.begin, self.end, self.text, self.offset = begin, end, text, offset
        self.file: KeptLines | None = None


class LineFiles:
    """Writes lines of text and JSON lines; those that cannot be written are counted.

    Attributes:
        text, lines: the files, once there are some.
        lost: lines that could not be written.
    """

    def __init__(self) -> None:
        self._start_over()

    def _start_over(self) -> None:
        """As it is before the first line."""
        self.lost = 0
        self.text: Any = None  # KeptLines
        self.lines: Any = None
        self._late: deque[tuple[bytes, bytes, Unread | None]] = deque()
        self._lock = threading.Lock()
        self._acquire, self._release = self._lock.acquire, self._lock.release

    def write(self, text: bytes, line: bytes, unread: Unread | None = None) -> None:
        """Write a line of text and a JSON line, whatever thread this is, and whatever it was doing."""
        if not self._acquire(False):
            if len(self._late) >= MOST_LATE:
                time.sleep(_PAUSE_S)  # whoever writes needs the interpreter, and is not the next to get it
                self._catch_up()
            if len(self._late) < MOST_LATE:
                self._late.append((text, line, unread))
            else:
                self.lost += 1
            self._catch_up()
            return
        try:
            if unread is not None:
                unread.offset += self.lines.append(line)
                unread.file = self.lines
                return
            file = self.text  # written out for both: a loop takes 0.15 us of the 2 that a span takes
            end = file.position + len(text)
            if end <= file.end:
                file.mapped[file.position : end] = text
                file.position = end
            else:
                file.append(text)
            file = self.lines
            end = file.position + len(line)
            if end <= file.end:
                file.mapped[file.position : end] = line
                file.position = end
            else:
                file.append(line)
        except (OSError, ValueError) as error:
            self._lose(error)
        finally:
            self._release()
            if self._late:
                self._catch_up()

    def write_device_time(self, unread: Unread, device_ns: int | None) -> None:
        """Fill in the time on the device where a span was written without one."""
        if device_ns is None or unread.file is None:
            return
        with contextlib.suppress(OSError, ValueError):  # the file has been moved since, or closed
            unread.file.patch(unread.offset, b"%-*d" % (ROOM_BYTES, device_ns))

    def _trim(self) -> None:
        try:
            self.text.trim()
            self.lines.trim()
        except OSError as error:
            self._lose(error, lines=0)

    @contextlib.contextmanager
    def _locked(self, wait_s: float = LOCK_S) -> Any:
        held = self._acquire(timeout=wait_s)
        try:
            yield held
        finally:
            if held:
                self._release()

    def _catch_up(self, most: int = _LATE_AT_ONCE) -> None:
        """Write so much of what came while another thread wrote. Whoever releases the lock looks here once more."""
        left = most
        while left > 0 and self._late and self._acquire(False):
            try:
                while left > 0 and self._late:
                    left -= 1
                    text, line, unread = self._late.popleft()
                    if self.text is None:
                        continue
                    if text:
                        self.text.append(text)
                    offset = self.lines.append(line)
                    if unread is not None:
                        unread.file, unread.offset = self.lines, unread.offset + offset
            except IndexError:
                pass  # another thread took the last one
            except (OSError, ValueError) as error:
                self._lose(error)
            finally:
                self._release()

    def _lose(self, error: Exception, *, lines: int = 1) -> None:
        self.lost += lines
