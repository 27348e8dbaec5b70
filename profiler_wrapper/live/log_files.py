"""The files that one run of the monitor makes in its log directory."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from threading import Lock

from profiler_wrapper.live.session import Session
from profiler_wrapper.recording.monitor_files import LogKind, LogSession, lock, log_file, log_sessions


class LineFile:
    """Appends whole lines. Nothing is buffered in the process, so a fork repeats none and a kill loses none."""

    def __init__(self, path: Path, *, new: bool = False) -> None:
        """Raises OSError: it cannot be opened, or is there although it should be new."""
        self.path = path
        self._file = open(path, "ab", buffering=0, opener=_create if new else None)  # noqa: SIM115 - closed in close
        lock(self._file.fileno())

    def write(self, lines: bytes) -> None:
        """Raises OSError: not all of it could be written."""
        while lines:
            lines = lines[self._file.write(lines) :]

    def restart(self, lines: bytes) -> None:
        """Put `lines` in the place of all that is there."""
        self._file.truncate(0)
        self.write(lines)

    def check(self) -> None:
        """Raises OSError: the file has been removed, so nobody would ever see what is written."""
        if os.fstat(self._file.fileno()).st_nlink == 0:
            raise FileNotFoundError(f"{self.path} was removed, or another monitor writes it now")

    def close(self) -> None:
        self._file.close()


def _create(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)


class LogFiles:
    """Names the files of a run alike, lets no two runs share one, and removes the oldest."""

    def __init__(self, kinds: Collection[LogKind], *, max_files: int) -> None:
        """
        Args:
            kinds: what this run writes.
            max_files: of each kind, the newest so many stay, this run's among them; 0: all.
        """
        self._kinds = tuple(kind for kind in kinds if kind != "summary")
        self._all_kinds = tuple(kinds)
        self._max_files = max_files
        self._lock = Lock()
        self._opened: dict[LogKind, LineFile] = {}
        self.stamp = ""

    def open(self, session: Session, kind: LogKind) -> LineFile:
        """The new file of this kind; the first call makes those of all kinds.

        Raises:
            OSError: they cannot be made.
        """
        if session.log_dir is None:
            raise FileNotFoundError("there is no log directory")
        with self._lock:
            if not self._opened:
                session.log_dir.mkdir(parents=True, exist_ok=True)
                self._make(session.log_dir, session.stamp)
                self._remove_oldest(session.log_dir)
        return self._opened[kind]

    def _make(self, directory: Path, stamp: str) -> None:
        for number in itertools.count(1):
            self.stamp = stamp if number == 1 else f"{stamp}_{number}"
            if any(log_file(directory, kind, self.stamp).exists() for kind in self._all_kinds):
                continue
            made: dict[LogKind, LineFile] = {}
            try:
                for kind in self._kinds:
                    made[kind] = LineFile(log_file(directory, kind, self.stamp), new=True)
            except FileExistsError:  # another process was quicker
                for file in made.values():
                    file.close()
                    file.path.unlink(missing_ok=True)
                continue
            self._opened = made
            return

    def _remove_oldest(self, directory: Path) -> None:
        if not self._max_files:
            return
        sessions = [session for session in log_sessions(directory) if session.stamp != self.stamp]
        running = {session.stamp for session in sessions if session.is_running}
        for kind in self._all_kinds:
            for path in _beyond(sessions, kind, self._max_files - 1, running):
                with contextlib.suppress(OSError):
                    path.unlink()


def _beyond(sessions: Sequence[LogSession], kind: LogKind, keep: int, running: Collection[str]) -> list[Path]:
    """The files of that kind but the newest `keep`, and but those of runs that still write."""
    having = [session for session in sessions if kind in session.files]
    return [session.files[kind] for session in having[: len(having) - keep] if session.stamp not in running]
