"""The bytes of a trace file, plain or gzipped, a piece at a time."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from profiler_wrapper.errors import BrokenTrace
from profiler_wrapper.recording.repair import repair

# Told while a file is read: bytes of it that were read, and bytes in all; of a gzipped file, compressed ones.
Progress = Callable[[int, int], None]

_COMPRESSED_BYTES = 1 << 20
_LONGEST_VALUE_BYTES = 64 << 20  # a larger one is damage, or meant to fill the memory
_SPACE = re.compile(rb"[ \t\r\n]*")
_GZIP = b"\x1f\x8b"


class ByteSource:
    """The bytes of a file, decompressed if they are gzip, a chunk at a time.

    `tear` is set, once the end is reached, when the compressed data stop in the middle.
    """

    def __init__(self, path: Path, progress: Progress | None = None) -> None:
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a directory, not a trace file; give the file inside it")
        self._path = path
        self._progress = progress
        self._file = path.open("rb")
        self._size = os.fstat(self._file.fileno()).st_size
        self._inflate: Any = None
        if self._file.peek(2)[:2] == _GZIP:
            self._inflate = zlib.decompressobj(wbits=31)
        self._compressed = b""
        self._produced = 0
        self.compressed = self._inflate is not None
        self.tear = ""

    def close(self) -> None:
        self._file.close()

    def read(self, at_most: int) -> bytes:
        """The next bytes; empty at the end.

        Raises:
            BrokenTrace: the compressed data are damaged.
        """
        data = self._file.read(at_most) if self._inflate is None else self._inflated(at_most)
        if self._progress is not None:
            self._progress(self._file.tell(), self._size)
        return data

    def _inflated(self, at_most: int) -> bytes:
        parts: list[bytes] = []
        size = 0
        while size < at_most:
            part = self._inflate_some(at_most - size)
            if part is None:
                break
            parts.append(part)
            size += len(part)
        self._produced += size
        return b"".join(parts)

    def _inflate_some(self, at_most: int) -> bytes | None:
        if not self._compressed:
            self._compressed = self._file.read(_COMPRESSED_BYTES)
        if self._inflate.eof:
            self._compressed = self._compressed.lstrip(b"\0")  # padding is allowed
            if not self._compressed.startswith(_GZIP):
                return None
            self._inflate = zlib.decompressobj(wbits=31)
        if not self._compressed:
            self.tear = "the gzip data stop in the middle"
            return None
        try:
            part: bytes = self._inflate.decompress(self._compressed, at_most)
        except zlib.error as error:
            raise BrokenTrace(
                f"{self._path}: damaged gzip data after {self._produced} decompressed bytes ({error}). "
                "Copy the file again, or record it again."
            ) from error
        self._compressed = self._inflate.unconsumed_tail or self._inflate.unused_data
        return part


class Window:
    """The part of a file that is being looked at: it grows at its end and is taken off at its start."""

    def __init__(self, path: Path, progress: Progress | None = None) -> None:
        self.path = path
        self.data = b""
        self.base = 0  # offset of the data in the (decompressed) file
        self.ended = False  # all of the file has been read
        self.repairs: dict[str, tuple[int, int]] = {}  # what was repaired -> (count, offset of the first)
        self._source = ByteSource(path, progress)

    @property
    def tear(self) -> str:
        """Why the file ends too early; known once `ended`."""
        return self._source.tear

    def close(self) -> None:
        self._source.close()

    def more(self, at_most: int) -> bool:
        """Appends the next bytes; False at the end of the file."""
        if self.ended:
            return False
        if len(self.data) > _LONGEST_VALUE_BYTES:
            raise self.broken(0, f"one value of more than {_LONGEST_VALUE_BYTES >> 20} MiB; no trace has that")
        chunk = self._source.read(at_most)
        if not chunk:
            self.ended = True
            if self.data.endswith(b"\0"):
                self.data = self.data.rstrip(b"\0")
                self._source.tear = "the rest is NUL bytes"
            return False
        self.data = self.data + chunk if self.data else chunk
        return True

    def drop(self, size: int) -> None:
        """Takes `size` bytes off the start."""
        self.base += min(size, len(self.data))
        self.data = self.data[size:]

    def peek(self, at_most: int) -> bytes:
        """The next byte that is not white space, now first in the data; empty at the end."""
        while True:
            space = _SPACE.match(self.data)
            self.drop(space.end() if space else 0)
            if self.data or not self.more(at_most):
                return self.data[:1]

    def broken(self, local: int, cause: str) -> BrokenTrace:
        """The error for what is wrong at `local` in the data."""
        where = " of the decompressed data" if self._source.compressed else ""
        return BrokenTrace(f"{self.path}: byte {self.base + local}{where}: {cause}")

    def repaired(self, data: bytes) -> bytes:
        """`data`, the start of the window, with what breaks a JSON parser replaced; its length stays."""
        good, notes = repair(data)
        for what, (count, offset) in notes.items():
            before, first = self.repairs.get(what, (0, self.base + offset))
            self.repairs[what] = (before + count, first)
        return good
