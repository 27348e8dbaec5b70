"""A file of lines that are kept when the process is killed, for less than what writing each would cost."""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import time
from pathlib import Path

PIECE_BYTES = 1 << 16
_RETRY_NS = 1_000_000_000  # how long nothing is tried after the disk was full
# Here a page that was written once can be written again: no full disk turns an access to it into SIGBUS.
_SAFE_SYSTEMS = frozenset(("ext2", "ext3", "ext4", "xfs", "tmpfs", "overlay"))
_MOUNTS = "/proc/self/mountinfo"
_ALIGNMENT = mmap.ALLOCATIONGRANULARITY


class KeptLines:
    """Appends to a file of its own.

    On a local file system the next piece of the file is written full of spaces, which reserves its place on the disk,
    and mapped: what is stored there is in the file, whatever becomes of the process, and needs no system call. Until
    `trim` the file then ends in spaces. Elsewhere each line is written by itself.

    Not for several threads at once. `mapped`, `position` and `end` are there for a caller who stores lines by itself.

    Attributes:
        mapped: the piece.
        position, end: where in it the next line goes; where it ends, -1 without one.
    """

    def __init__(self, path: Path, *, mapping: bool | None = None) -> None:
        """
        Args:
            path: an empty file.
            mapping: None: where it is safe.

        Raises:
            OSError: it cannot be opened.
        """
        self.path = path
        self._mapping = mapping_is_safe(path.parent) if mapping is None else mapping
        self._file = open(path, "r+b", buffering=0)  # noqa: SIM115 - closed in close
        self._descriptor = self._file.fileno()
        self._retry_ns = 0
        self._base = 0  # place in the file where the piece begins, or the next line goes
        self.mapped: mmap.mmap | None = None
        self._piece: tuple[mmap.mmap | None, int] = (None, 0)  # with where it begins, for those who do not lock
        self.position, self.end = 0, -1

    @property
    def size_bytes(self) -> int:
        """Of the lines."""
        return self._base + self.position

    def append(self, line: bytes) -> int:
        """Add a line; where in the file it lies.

        Raises:
            OSError: there is no place for it, or there was none a moment ago. The file is as it was.
        """
        if self.position + len(line) > self.end:
            self._need(line)
            if self.mapped is None:
                return self._write(line)
        begin = self.position
        assert self.mapped is not None
        self.mapped[begin : begin + len(line)] = line
        self.position = begin + len(line)
        return self._base + begin

    def patch(self, offset: int, data: bytes) -> None:
        """Put `data` in the place of as many bytes. Raises OSError, ValueError."""
        mapped, base = self._piece
        if mapped is not None and offset >= base:
            mapped[offset - base : offset - base + len(data)] = data
        else:
            _write_at(self._descriptor, data, offset)

    def read(self) -> bytes:
        """All lines. Raises OSError."""
        with open(self.path, "rb") as file:
            return file.read(self.size_bytes)

    def check(self) -> None:
        """Whether the file is still there. Raises OSError: it was removed, or somebody made it shorter.

        What is mapped of a file that has become shorter is gone: from then on every line is written by itself.
        """
        status = os.fstat(self._descriptor)
        if self.mapped is not None and status.st_size < self._base + self.end:
            self._unmap()
            self._base, self._mapping = status.st_size, False
            raise OSError("somebody made it shorter")
        if status.st_nlink == 0:
            raise FileNotFoundError("it was removed")

    def trim(self) -> None:
        """The file ends with its last line. Raises OSError."""
        if self.mapped is not None:
            self._unmap()
            os.ftruncate(self._descriptor, self._base)

    def close(self) -> None:
        """Trim it and let go of it."""
        with contextlib.suppress(OSError):
            self.trim()
        self.abandon()

    def abandon(self) -> None:
        """Let go of it as it is, as a forked child does with a file of its parent."""
        if self.mapped is not None:
            self._unmap()
        self._descriptor = -1  # the system may give the number to another file
        self._file.close()

    def _need(self, line: bytes) -> None:
        now = time.monotonic_ns()
        if now < self._retry_ns:
            raise OSError("there was no place a moment ago")
        try:
            if self._mapping:
                self._map(max(PIECE_BYTES, len(line)))
        except OSError:
            self._retry_ns = now + _RETRY_NS
            raise

    def _map(self, size: int) -> None:
        """The next piece."""
        if self.mapped is not None:
            self._unmap()
        begin = self._base
        aligned = begin - begin % _ALIGNMENT
        size = aligned + -(-(begin - aligned + size) // _ALIGNMENT) * _ALIGNMENT - begin
        try:
            _write_at(self._descriptor, b" " * size, begin)
            self.mapped = mmap.mmap(self._descriptor, begin + size - aligned, offset=aligned)
        except (OSError, ValueError) as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, begin)
            if isinstance(error, ValueError):
                raise OSError(f"cannot be mapped: {error}") from error
            raise
        self._piece = (self.mapped, aligned)
        self._base, self.position, self.end = aligned, begin - aligned, begin + size - aligned

    def _unmap(self) -> None:
        assert self.mapped is not None
        self._piece = (None, 0)
        self.mapped.close()
        self._base += self.position
        self.mapped, self.position, self.end = None, 0, -1

    def _write(self, line: bytes) -> int:
        begin = self._base
        try:
            _write_at(self._descriptor, line, begin)
        except OSError:
            self._retry_ns = time.monotonic_ns() + _RETRY_NS
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, begin)
            raise
        self._base = begin + len(line)
        return begin


def mapping_is_safe(directory: Path) -> bool:
    """Whether a file there can be mapped so that no full disk or lost connection kills the process that stores in it.

    Source: the file system's type by /proc/self/mountinfo; unknown ones, and those of a network, are not safe.
    """
    if sys.platform != "linux":
        return False
    try:
        device = os.stat(directory).st_dev
        wanted = f"{os.major(device)}:{os.minor(device)}"
        with open(_MOUNTS, encoding="utf-8", errors="replace") as mounts:
            for mount in mounts:
                fields, _, system = mount.partition(" - ")
                if fields.split()[2] == wanted:
                    return system.split()[0] in _SAFE_SYSTEMS
    except (OSError, IndexError):
        return False
    return False


def _write_at(descriptor: int, data: bytes, offset: int) -> None:
    """All of it. Raises OSError."""
    while data:
        if sys.platform == "win32":
            os.lseek(descriptor, offset, os.SEEK_SET)
            written = os.write(descriptor, data)
        else:
            written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
