"""The files that the spans of a rank go into: found when the first is written, moved when the rank is known."""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from profiler_wrapper.live.kept_lines import KeptLines
from profiler_wrapper.live.line_files import LOCK_S, MOST_LATE, LineFiles
from profiler_wrapper.live.process_role import has_process_group
from profiler_wrapper.live.span_clock import clock_reading, monotonic_offset_ns
from profiler_wrapper.live.span_place import Owner, SpanPlace, find_owner, header_line, with_head
from profiler_wrapper.notices import Notices
from profiler_wrapper.recording.timer_files import TimerFiles

SECOND_NS = 1_000_000_000
_LOOK_NS = SECOND_NS // 16  # while the rank may still become known
_CLOCK_NS = 60 * SECOND_NS  # between two lines that say how the clocks stand
_MOST_MOVED_BYTES = 1 << 28

_logs: weakref.WeakValueDictionary[tuple[Any, ...], SpanLog] = weakref.WeakValueDictionary()


def span_log(place: SpanPlace, notices: Notices) -> SpanLog:
    """The log of that place: all timers of a process with one place share it, and none of two writes over the other."""
    log = _logs.get(place.key)
    if log is None or log.closed:
        log = _logs[place.key] = SpanLog(place, notices)
    elif place.coordinates is not None and log.place.coordinates is None and log.place.device_mesh is None:
        log.tell(replace(log.place, coordinates=place.coordinates))
    return log


class SpanLog(LineFiles):
    """Writes lines of text and JSON lines. What goes wrong is one warning, and the lines are counted as lost.

    Attributes:
        place: as it was told.
        offset_ns: what the monotonic clock is behind the time since 1970. It does not change when the wall clock is
            set, so that no duration does; lines of the log say how far the two have come apart.
        moved: called when the rank has become known and lines begin with another one.
        lost: lines that could not be written.
    """

    def __init__(self, place: SpanPlace, notices: Notices) -> None:
        self.place, self._notices = place, notices
        self.moved: list[weakref.WeakMethod[Callable[[], None]]] = []
        self.users = 0
        self._forget()

    def _forget(self) -> None:
        """As it is before the first line."""
        self.closed = False
        self._start_over()
        self.owner: Owner | None = None
        self.files: TimerFiles | None = None
        self.offset_ns = monotonic_offset_ns()
        self._look_at = self._clock_at = 0
        self.heads = (b"", b"")
        self._told_lost = 0
        self._forked = False

    def tell(self, place: SpanPlace) -> None:
        """More is known of whose spans they are; the run is the same."""
        self.place = place
        _logs[place.key] = self
        if self.owner is not None:
            self._become(find_owner(place, forked=self._forked), wait_s=LOCK_S)

    def after_fork(self) -> None:
        """In the child: the files are the parent's."""
        text, lines = self.text, self.lines
        self._forget()
        self._forked = True
        for file in (text, lines):
            if file is not None:
                file.abandon()

    def era(self, at_ns: int) -> tuple[int, int, int]:
        """The second since 1970 that a time of the monotonic clock lies in, and from when to when lines can rely on it.

        Opens the files, and looks now and then whether the rank has become known.

        Raises:
            OSError: the files cannot be made.
        """
        now = time.perf_counter_ns()
        if now >= self._look_at:
            self._look(now)
        second = (at_ns + self.offset_ns) // SECOND_NS
        begin = second * SECOND_NS - self.offset_ns
        return second, begin, min(begin + SECOND_NS, self._look_at)

    def add_header(self, **more: Any) -> None:
        """A JSON line that is no span, and has the one key that the first line has."""
        self.write(b"", header_line(more))

    def number_lines(self, step: int) -> None:
        """All spans so far that have no step belong to that one."""
        old, new = b'"step":null,"name":', b'"step":%4d,"name":' % step
        if self.lines is None or len(old) != len(new):
            return
        with self._locked() as held, contextlib.suppress(OSError):
            if held and self.lines.size_bytes <= _MOST_MOVED_BYTES:
                self.lines.patch(0, self.lines.read().replace(old, new))

    def flush(self) -> Path | None:
        """Write what is left, and let the files end where their lines do. The text's path; None: there is none."""
        self._catch_up(MOST_LATE)
        if self.text is None:
            return None
        self._look(time.perf_counter_ns(), wait_s=LOCK_S)
        self._tell_other_name()
        self._tell_clock()
        if self.lost > self._told_lost:
            self._told_lost = self.lost
            self.add_header(lost_lines=self.lost)
        with self._locked() as held:
            if held:
                self._trim()
        return self.files.text if self.files is not None else None

    def close(self) -> None:
        """Flush, and let go of the files."""
        if self.closed:
            return
        self.flush()
        self.closed = True
        with self._locked():
            for file in (self.text, self.lines):
                if file is not None:
                    file.close()

    def _lose(self, error: Exception, *, lines: int = 1) -> None:
        super()._lose(error, lines=lines)
        if self.closed:  # the process is ending
            return
        where = self.place.output_dir if self.files is None else self.files.text
        self._notices.once("lost", f"the timer loses spans: {where}: {error}; training goes on")

    def _look(self, now: int, *, wait_s: float = 0.0) -> None:
        """Find out what may have changed. Without waiting: the thread itself may be writing, further out."""
        first = self.owner is None
        if first:
            with self._locked():
                if self.owner is None:
                    self._open(find_owner(self.place, forked=self._forked))
        elif not self.owner.known and has_process_group():  # type: ignore[union-attr]
            self._become(find_owner(self.place, forked=self._forked), wait_s=wait_s)
        owner = self.owner
        self._look_at = now + (SECOND_NS if owner is not None and owner.known else _LOOK_NS)
        if first:
            return
        with self._locked(wait_s) as held:
            if held:
                try:
                    self.text.check()
                    self.lines.check()
                except OSError as error:
                    self._lose(error, lines=0)
        if now >= self._clock_at:
            self._tell_clock()

    def _open(self, owner: Owner) -> None:
        files = self.place.claim(owner)
        text, lines = KeptLines(files.text), KeptLines(files.lines)
        self.files, self.text, self.lines, self.heads = files, text, lines, owner.heads
        self._clock_at = time.perf_counter_ns() + _CLOCK_NS
        try:
            lines.append(owner.header(files, clock_reading(self.offset_ns)))
        except OSError as error:
            self._lose(error)
        self.owner = owner
        if owner.known:
            self._tell_other_name()

    def _tell_other_name(self) -> None:
        """Of a run that goes elsewhere than it was told to, as its name is taken. One rank says it, once it is known
        to be that: until a process group tells, each process may take itself for rank 0."""
        named, files, owner = self.place.told_name, self.files, self.owner
        if named is None or files is None or owner is None or owner.info.rank or owner.worker:
            return
        if files.root.name != named:
            where, taken = files.root, files.root.with_name(named)
            self._notices.once("renamed", f"the timer writes to {where}: {taken} holds another run of that name")

    def _become(self, owner: Owner, *, wait_s: float) -> None:
        """The rank has become known: its lines go where they belong."""
        before, old_text, old_lines, old_files = self.owner, self.text, self.lines, self.files
        assert before is not None and old_files is not None
        with self._locked(wait_s) as held:
            if not held:
                return  # until the next look
            if before.same_place(owner):
                self.owner = owner
                if owner.heads != before.heads:
                    self.heads = owner.heads
                    with contextlib.suppress(OSError):
                        old_lines.append(owner.header(old_files, clock_reading(self.offset_ns)))
            elif old_text.size_bytes + old_lines.size_bytes > _MOST_MOVED_BYTES:
                self.owner = owner
                self._notices.once(
                    "moved", f"{old_files.text} stays where it is, and says rank {before.info.rank}: it is large"
                )
            else:
                try:
                    texts = with_head(old_text.read(), before.heads[0], owner.heads[0])
                    lines = with_head(old_lines.read(), before.heads[1], owner.heads[1])
                    self._open(owner)
                    self.text.append(texts)
                    self.lines.append(lines)
                except OSError as error:
                    self.owner, self.text, self.lines, self.files = owner, old_text, old_lines, old_files
                    self.heads = before.heads
                    self._lose(error, lines=0)
                else:
                    old_text.close()
                    old_lines.close()
                    old_files.remove()
        for method in self.moved:
            forget = method()
            if forget is not None:
                forget()

    def _tell_clock(self) -> None:
        self._clock_at = time.perf_counter_ns() + _CLOCK_NS
        self.add_header(clock=clock_reading(self.offset_ns))


def _after_fork() -> None:
    for log in list(_logs.values()):
        log.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
