"""A file of whole lines that a training writes for weeks: what is in it stays, however process or disk end."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

if sys.platform != "win32":  # there nothing is known to be written
    import fcntl


class LineFile:
    """Append whole lines to a file. Nothing is buffered in the process, so a fork repeats none and a kill loses none.

    Every method raises OSError where the file cannot be written or read; then nothing of what was to be written is in
    it.

    Args:
        marked: `is_written` tells while it is open. A file system that is slow to lock makes this wait.
    """

    def __init__(self, path: Path, *, marked: bool = False) -> None:
        self.path = path
        self._end = open(path, "ab", buffering=0)  # noqa: SIM115 - closed in close
        self._inside = open(path, "r+b", buffering=0)  # noqa: SIM115
        self._write = self._end.write
        if marked and sys.platform != "win32":
            with contextlib.suppress(OSError):  # some file systems have no locks
                fcntl.flock(self._end.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)

    def append(self, lines: bytes) -> None:
        """Write lines at the end: one system call, or several where the disk is full."""
        written = self._write(lines)
        if written != len(lines):
            begin = self._end.tell() - written
            try:
                while written < len(lines):
                    written += self._write(lines[written:])
            except OSError:
                self._end.truncate(begin)
                raise

    def tell(self) -> int:
        """Return where the last line ends."""
        return self._end.tell()

    def replace(self, place: int, old: bytes, new: bytes) -> None:
        """Put bytes in the place of as many that must be there; where they are not, nothing."""
        if hasattr(os, "pread"):  # a signal's handler that replaces, too, must not move the place between two calls
            descriptor = self._inside.fileno()
            if os.pread(descriptor, len(old), place) == old:
                os.pwrite(descriptor, new, place)
        elif self.read(place)[: len(old)] == old:
            self._inside.seek(place)
            self._inside.write(new)

    def replace_end(self, place: int, new: bytes) -> None:
        """Put bytes in the place of all that there is from `place` on; where that fails, what was there stays."""
        old = self.read(place)
        try:
            self._write_end(place, new)
        except OSError:  # the disk is full: where the old end was, there is room for it
            with contextlib.suppress(OSError):
                self._write_end(place, old)
            raise

    def _write_end(self, place: int, unwritten: bytes) -> None:
        self._inside.seek(place)
        while unwritten:
            unwritten = unwritten[self._inside.write(unwritten) :]
        self._inside.truncate()

    def read(self, place: int = 0) -> bytes:
        """Return all that there is from `place` on."""
        self._inside.seek(place)
        return self._inside.readall()

    def check(self) -> None:
        """Raise OSError, too, where the file was removed: nobody would ever see what is written."""
        if os.fstat(self._end.fileno()).st_nlink == 0:
            raise FileNotFoundError(f"{self.path} was removed, or another timer or another monitor writes it now")

    def close(self) -> None:
        """Write no more."""
        self._end.close()
        self._inside.close()


def is_written(path: Path) -> bool:
    """Return whether a process has it open as a marked `LineFile`; of one that died, and on Windows, False."""
    if sys.platform == "win32":
        return False  # same: on Windows
    try:
        with path.open("rb") as file:
            fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
