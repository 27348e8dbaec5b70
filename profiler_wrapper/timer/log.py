"""The two files of a rank's spans: lines of text and JSON lines. Whose they are, where they lie, and how they are kept.

A line is one unbuffered write: what a span has written is in the file whatever becomes of the process after that.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import torch

from profiler_wrapper.capture.records import RunInfo
from profiler_wrapper.capture.runinfo import run_info
from profiler_wrapper.errors import Notices, WrongUse, occupy_closed_streams, shown
from profiler_wrapper.timer.line_file import LineFile
from profiler_wrapper.trace.launch import attempt_number
from profiler_wrapper.trace.run_directory import RUN_NAME_VARIABLE, given_directory, run_roots, safe_name
from profiler_wrapper.trace.spans import DIRECTORY

SCHEMA_VERSION = 1
# How a JSON line ends whose time on the device is filled in later; it takes the place of null and the spaces.
PENDING_END: Final = b'"device_ns":null            }\n'
_ROOM_BYTES = len(b"null            ")
_LONGEST_NAME = 512

_LOCK_S = 2.0  # no thread waits longer for another to write: a training never hangs on its timer
_KNOWN_LOOK_NS = 1_000_000_000  # between two looks whether the files are still there
_LOOK_NS = _KNOWN_LOOK_NS // 16  # while the rank may still become known
_CLOCK_NS = 60 * _KNOWN_LOOK_NS  # between two lines that say how the clocks stand
_MOST_NUMBERED_BYTES = 1 << 28  # that are read and written again, as the first step begins


# --- whose spans they are ---


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanPlace:
    """What the user says of it. Raises WrongUse: a value means nothing."""

    output_dir: Path  # made absolute
    run_name: str | None = None
    prefix: str = "profile"
    rank: int | None = None  # None, as of the next two: by the process group, the environment ...
    world_size: int | None = None
    device_mesh: Any = None
    coordinates: Mapping[str, int] | None = None  # in the mesh, where there is no `device_mesh`; None: not known
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)

    def __post_init__(self) -> None:
        for name, least in (("rank", 0), ("world_size", 1)):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise WrongUse(f"{name}={shown(value)}: give a whole number, {least} or more.")
        for name in ("run_name", "prefix"):
            value = getattr(self, name)
            if not (isinstance(value, str) and value) and not (name == "run_name" and value is None):
                raise WrongUse(f"{name}={shown(value)}: give a text, the same on all ranks.")
        object.__setattr__(self, "output_dir", given_directory(self.output_dir, "output_dir").absolute())

    @property
    def key(self) -> tuple[Any, ...]:
        """Places with the same one have the same files."""
        return self.output_dir, self.run_name, self.prefix, self.rank, self.world_size

    def claim(self, owner: Owner) -> TimerFiles:
        """Make and open the two files, where there are none of this rank: nothing is ever written over.

        The run is named as for `open_run`, so that a timer's files lie beside those of the profiles of its job;
        where the run holds this rank's timer already, it is `<run>-2` and so on.

        Raises OSError: they cannot be made.
        """
        info = owner.info
        file = f"worker{os.getpid()}_of_rank{info.rank}" if owner.worker else f"timer_rank{info.rank}"
        for run, root in run_roots(
            self.output_dir,
            prefix=self.prefix,
            world_size=info.world_size,
            run_name=self.run_name,
            environment=self.environment,
        ):
            directory = root / DIRECTORY
            directory.mkdir(parents=True, exist_ok=True)
            text, lines = directory / f"{file}.log", directory / f"{file}.jsonl"
            with contextlib.suppress(FileExistsError):
                lines.touch(exist_ok=False)
                try:
                    text.touch(exist_ok=False)
                except FileExistsError:
                    lines.unlink()
                    raise
                attempt = 0 if root == run else attempt_number(self.environment)
                return TimerFiles(run, attempt, LineFile(text), LineFile(lines))
        raise AssertionError("there is always another one")


@dataclass(frozen=True, slots=True)
class Owner:
    """This process within its job."""

    info: RunInfo
    worker: bool  # it belongs to the rank and is none itself
    known: bool  # nothing that is found out later changes it

    @property
    def heads(self) -> tuple[bytes, bytes]:
        """What each line of the text, and each JSON line, begins with."""
        rank = self.info.rank
        coordinates = "".join(f'"{name}":{place},' for name, place in self.info.coordinates.items())
        return f"[RANK {rank}] ".encode(), f'{{"rank":{rank},{coordinates}'.encode()

    @property
    def files_key(self) -> tuple[int, int, bool]:
        """Owners with the same one have the same files."""
        return self.info.rank, self.info.world_size, self.worker

    def header(self, files: TimerFiles, clock: Mapping[str, int]) -> bytes:
        """The first of the JSON lines. `closing_line`: the last one of a log that is closed is a header, too."""
        info = self.info
        return _header_line(
            schema_version=SCHEMA_VERSION,
            rank=info.rank,
            world_size=info.world_size,
            coordinates=dict(info.coordinates),
            host=socket.gethostname(),
            run=files.root.name,
            attempt=files.attempt,
            pid=os.getpid(),
            worker=self.worker,
            device=info.device,
            closing_line=True,
            versions=dict(info.versions),
            clock=dict(clock),
        )


def find_owner(place: SpanPlace, *, forked: bool = False) -> Owner:
    """By what the user says, the process group, the environment. Asks no other process.

    Args:
        forked: the user said it to the process that this one was forked from.
    """
    info = run_info(
        rank=place.rank,
        device_mesh=place.device_mesh,
        coordinates=place.coordinates,
        environment=place.environment,
        version=str(getattr(sys.modules.get("profiler_wrapper"), "__version__", "")),
    )
    world_size = max(place.world_size or info.world_size, info.rank + 1)
    data = sys.modules.get("torch.utils.data")
    loads_data = data is not None and data.get_worker_info() is not None
    # Forked or started by multiprocessing, with neither a rank of its own nor a group.
    was_started = bool(forks) or multiprocessing.parent_process() is not None
    is_rank = has_process_group() or (place.rank is not None and not forked)
    return Owner(
        replace(info, world_size=world_size),
        worker=loads_data or (was_started and not is_rank),
        known=has_process_group(),
    )


forks = 0  # how often this process, and those that it was forked from, began as a fork since this was imported
_group_of_parent = False  # a process group that the fork brought along


def has_process_group() -> bool:
    """This process, and not the one that it was forked from, has joined a process group."""
    distributed = torch.distributed
    return not _group_of_parent and distributed.is_available() and distributed.is_initialized()


# --- lines ---


def text_name(name: str) -> bytes:
    """As the text log has it: one line, whatever the name holds."""
    clean = name if name.isprintable() else "".join(letter if letter.isprintable() else " " for letter in name)
    return clean[:_LONGEST_NAME].encode("utf-8", "replace") or b"(no name)"


def json_name(name: str) -> bytes:
    """As the JSON lines have it."""
    return msgspec.json.encode(name[:_LONGEST_NAME].encode("utf-8", "replace").decode())


def text_line(name: bytes, start_ns: int, end_ns: int, device_ns: int | None = None) -> bytes:
    """A line of the text log, behind its head. Times are nanoseconds since 1970."""
    start, end, lasted = start_ns // 1000, end_ns // 1000, (end_ns - start_ns) // 1000
    return b"%b, start=%d.%06d, end=%d.%06d, cpu_dur=%d.%06ds, cuda_dur=%b" % (
        name,
        start // 1_000_000,
        start % 1_000_000,
        end // 1_000_000,
        end % 1_000_000,
        lasted // 1_000_000,
        lasted % 1_000_000,
        b"nanms\n" if device_ns is None else b"%.3fms\n" % (device_ns / 1e6),
    )


def _header_line(**fields: Any) -> bytes:
    """A JSON line that is no span."""
    return msgspec.json.encode({"header": fields}) + b"\n"


def _with_head(lines: bytes, old: bytes, new: bytes) -> bytes:
    """Lines that began with another head; the header they had is left out."""
    return b"".join(
        new + line[len(old) :] if line.startswith(old) else line
        for line in lines.splitlines(keepends=True)
        if b'"schema_version"' not in line[:40]
    )


def clock_offset_ns() -> int:
    """What `time.perf_counter_ns` is behind `time.time_ns`, by the closest two of several readings."""
    readings = []
    for _ in range(5):
        before = time.perf_counter_ns()
        wall = time.time_ns()
        after = time.perf_counter_ns()
        readings.append((after - before, wall - (before + after) // 2))
    return min(readings)[1]


def clock_reading(offset_ns: int) -> dict[str, int]:
    """How the clocks stand now.

    Returns:
        time_ns: the wall clock, which may have been set. monotonic_ns: the monotonic one. start_ns: what a span that
        began now says.
    """
    monotonic_ns = time.perf_counter_ns()
    return {"time_ns": time.time_ns(), "monotonic_ns": monotonic_ns, "start_ns": monotonic_ns + offset_ns}


class _HeldTooLong(OSError):
    """Another thread writes, and does not come to an end."""


class _Lock:
    """As `threading.RLock`, for a bounded time: the thread that holds it may hang in a file system that is gone."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        if not self._lock.acquire(timeout=_LOCK_S):
            raise _HeldTooLong(f"another thread has been writing for {_LOCK_S:g} s")

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class TimerFiles(NamedTuple):
    """The two open files of one rank, that nobody else writes."""

    root: Path  # the run's directory
    attempt: int  # of an elastic job, from 0
    text: LineFile  # the lines that people read
    lines: LineFile  # JSON lines

    def close(self) -> None:
        self.text.close()
        self.lines.close()

    def remove(self) -> None:
        """Both, and the directories that are empty then. Raises nothing."""
        with contextlib.suppress(OSError):
            self.close()
            self.text.path.unlink(missing_ok=True)
            self.lines.path.unlink(missing_ok=True)
            place = self.text.path.parent
            while place != self.root.parent:
                place.rmdir()
                place = place.parent


# --- the log ---

_logs: weakref.WeakValueDictionary[tuple[Any, ...], SpanLog] = weakref.WeakValueDictionary()
_living: weakref.WeakSet[SpanLog] = weakref.WeakSet()


def span_log(place: SpanPlace, notices: Notices) -> SpanLog:
    """The log of that place, to be released: all timers of a process with one place share it."""
    log = _logs.get(place.key)
    if log is None or log.closed:
        log = _logs[place.key] = SpanLog(place, notices)
    elif place.coordinates is not None and log.place.coordinates is None and log.place.device_mesh is None:
        log.set_place(replace(log.place, coordinates=place.coordinates))
    log.users += 1
    return log


class SpanLog:
    """The files of one rank: found when the first line is written, moved when the rank becomes known.

    Any thread may write, also in a signal's handler or while garbage is collected. What cannot be written is counted,
    and one warning says so.

    Attributes:
        offset_ns: what the monotonic clock is behind the time since 1970. It does not change when the wall clock is
            set, so that no duration does; lines of the log say how far the two have come apart.
        heads: what a line of text, and a JSON line, begins with.
        look_at: when by the monotonic clock `look` is due.
        owner: None: there are no files yet.
        users: timers that write here, and have not released it.
        recorders: have a method `reset`, which is called in a forked child.
        lost: lines that could not be written.
    """

    def __init__(self, place: SpanPlace, notices: Notices) -> None:
        self.place, self._notices = place, notices
        self.users = 0
        self.recorders: weakref.WeakSet[Any] = weakref.WeakSet()
        _living.add(self)
        self._reset()

    def _reset(self, *, forked: bool = False) -> None:
        """As it is before the first line."""
        self._forked = forked
        self._lock = _Lock()
        self._files: TimerFiles | None = None
        self._opening = False
        self.closed = False
        self.owner: Owner | None = None
        self.offset_ns = clock_offset_ns()
        self.look_at = self._clock_at = 0
        self.heads = (b"", b"")
        self.lost = self._reported_lost = 0

    def set_place(self, place: SpanPlace) -> None:
        """More is known of whose spans they are; the run is the same."""
        self.place = place
        _logs[place.key] = self
        if self.owner is not None:
            self._become(find_owner(place, forked=self._forked))

    def after_fork(self) -> None:
        """In the child: the files are the parent's."""
        files = self._files
        self._reset(forked=True)
        if files is not None:
            files.close()
        for recorder in list(self.recorders):
            recorder.reset()

    def write(
        self, texts: Sequence[bytes], lines: Sequence[bytes], *, pending: bool = False, is_header: bool = False
    ) -> int:
        """Write lines of text and JSON lines, behind their heads. What cannot be written is lost: so where there are no
        files yet, or another thread hangs in writing them.

        Args:
            pending: the device's time is filled in later.
            is_header: these JSON lines have no head.

        Returns: where the JSON lines end in their file, if they are pending; 0: they were not written.
        """
        try:
            with self._lock:
                files = self._files
                if files is None:  # a signal's handler, while this thread opens the files
                    self.lost += 1
                    return 0
                text_head, json_head = self.heads
                if texts:
                    files.text.append(b"".join([text_head + text for text in texts]))
                if lines:
                    files.lines.append(b"".join(lines if is_header else [json_head + line for line in lines]))
                return files.lines.tell() if pending else 0
        except (OSError, ValueError) as error:
            self._lose(error)
            return 0

    def fill_in(self, end: int, line: bytes, device_ns: int) -> None:
        """The device's time of a JSON line that ends there with `line`, itself with `PENDING_END`.

        Not in a line that is elsewhere now: the files were moved, or somebody cut them.
        """
        time_begin = len(line) - _ROOM_BYTES - len(b"}\n")
        filled = line[:time_begin] + b"%-*d}\n" % (_ROOM_BYTES, device_ns)
        with contextlib.suppress(OSError, ValueError), self._lock:
            if self._files is not None and end >= len(line):
                self._files.lines.replace(end - len(line), line, filled)

    def add_header(self, **fields: Any) -> None:
        """A JSON line that is no span, and has the one key that the first line has."""
        self.write((), (_header_line(**fields),), is_header=True)

    def number_lines(self, step: int) -> None:
        """All spans so far that have no step belong to that one."""
        old, new = b'"step":null,"name":', b'"step":%4d,"name":' % step
        files = self._files
        if files is None or len(old) != len(new):
            return
        with contextlib.suppress(OSError), self._lock:
            if files.lines.tell() <= _MOST_NUMBERED_BYTES:
                before = files.lines.read()
                files.lines.replace(0, before, before.replace(old, new))

    def look(self, now: int) -> None:
        """Open the files, the first time; later see whether the rank has become known and the files are still there.

        Raises OSError: the files cannot be made.
        """
        if self._opening:  # by the thread itself, further out
            return
        first = self.owner is None
        # same (and -> or): only slower
        if first or (not self.owner.known and has_process_group()):  # type: ignore[union-attr]
            self._become(find_owner(self.place, forked=self._forked))
        # same (+ -> -): only slower
        self.look_at = now + (_KNOWN_LOOK_NS if self.owner is not None and self.owner.known else _LOOK_NS)
        if first:  # same: only slower
            return
        try:
            if self._files is not None:
                self._files.text.check()
                self._files.lines.check()
        except (OSError, ValueError) as error:
            self._lose(error, lines=0)
        if now >= self._clock_at:
            self._clock_at = now + _CLOCK_NS
            self.add_header(clock=clock_reading(self.offset_ns))

    def flush(self) -> Path | None:
        """Write what is left to say of the whole. The text's path; None: there is none."""
        if self._files is None:
            return None
        self._clock_at = 0
        self.look(time.perf_counter_ns())
        self._warn_renamed()
        if self.lost > self._reported_lost:
            self._reported_lost = self.lost
            self.add_header(lost_lines=self.lost)
        return self._files.text.path

    def release(self) -> None:
        """One of its users is done; the last one flushes, and lets go of the files."""
        self.users -= 1
        if self.users > 0 or self.closed:
            return
        self.flush()
        self.closed = True
        with contextlib.suppress(_HeldTooLong), self._lock:
            if self._files is not None:
                self._files.close()

    def _lose(self, error: Exception, *, lines: int = 1) -> None:
        self.lost += lines
        if self.closed:  # the process is ending
            return
        where = self.place.output_dir if self._files is None else self._files.text.path
        self._notices.warn_once("lost", f"the timer loses spans: {where}: {error}; training goes on")

    def _become(self, owner: Owner) -> None:
        """The owner is known, or better known: its lines go where they belong. Raises OSError: there are no files."""
        try:
            with self._lock:
                before, files = self.owner, self._files
                if before is None or files is None or before.files_key != owner.files_key:
                    self._open(owner)
                elif owner.heads != before.heads:
                    self.heads = owner.heads
                    self._write_owner(owner, files)
                self.owner = owner
        except _HeldTooLong as error:  # the next look tries again
            self._lose(error, lines=0)
        except OSError as error:
            if self._files is None:
                raise
            self.owner = owner
            self._lose(error, lines=0)
        if owner.known:
            self._warn_renamed()

    def _open(self, owner: Owner) -> None:
        """Make the owner's files, with all lines so far. Raises OSError: these stay where they are."""
        self._opening = True
        try:
            occupy_closed_streams()
            files = self.place.claim(owner)
            self._clock_at = time.perf_counter_ns() + _CLOCK_NS
            self._write_owner(owner, files)
            old, old_heads = self._files, self.heads
            self._files, self.heads, self.owner = files, owner.heads, owner
            if old is None:
                return
            try:  # read only now, so that what a signal's handler wrote meanwhile is among it
                files.text.append(_with_head(old.text.read(), old_heads[0], owner.heads[0]))
                files.lines.append(_with_head(old.lines.read(), old_heads[1], owner.heads[1]))
            except OSError:
                self._files, self.heads = old, old_heads
                files.remove()
                raise
            old.remove()
        finally:
            self._opening = False

    def _write_owner(self, owner: Owner, files: TimerFiles) -> None:
        """Write whose the lines are. Where there is no room for that, there is none for the lines, which is said."""
        with contextlib.suppress(OSError):
            files.lines.append(owner.header(files, clock_reading(self.offset_ns)))

    def _warn_renamed(self) -> None:
        """Of a run that goes elsewhere than the user said, as its name is taken. One rank says it, once it is known
        to be that: until there is a process group, each process may take itself for rank 0."""
        place, files, owner = self.place, self._files, self.owner
        named = place.environment.get(RUN_NAME_VARIABLE) or place.run_name
        if not named or files is None or owner is None or owner.info.rank or owner.worker:
            return
        where, taken = files.root, files.root.with_name(safe_name(named, place.prefix))
        if where != taken:
            self._notices.warn_once("renamed", f"the timer writes to {where}: {taken} holds another run of that name")


def _after_fork() -> None:
    global forks, _group_of_parent
    forks += 1
    distributed = torch.distributed
    _group_of_parent = distributed.is_available() and distributed.is_initialized()
    for log in list(_living):
        log.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
