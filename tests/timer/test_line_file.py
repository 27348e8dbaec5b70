"""A file of whole lines: on a full disk, and while a signal writes into it, too."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from profiler_wrapper.timer.line_file import LineFile, is_written


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lines"
    path.touch()
    lines = LineFile(path)
    lines.append(b"first\n")
    write = lines._write
    left = 3

    def write_what_fits(data: bytes) -> int:
        nonlocal left
        if not left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        data, left = data[:left], 0
        return write(data)

    monkeypatch.setattr(lines, "_write", write_what_fits)
    for _ in range(2):
        with pytest.raises(OSError, match="No space"):
            lines.append(b"second\n")
    assert path.read_bytes() == b"first\n"
    left = 100
    lines.append(b"third\n")
    monkeypatch.setattr(lines, "_write", lambda data: write(data[:2]))  # a disk that takes it bit by bit
    lines.append(b"fourth\n")
    lines.close()
    assert path.read_bytes() == b"first\nthird\nfourth\n"


def test_a_line_is_filled_in_whole_while_a_signal_fills_in_another(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"a: null\nb: null\n")
    lines = LineFile(path)
    inside = lines._inside
    stopped: list[str] = []

    class Stopped:
        """A file between whose calls the other line is filled in."""

        def __getattr__(self, name: str) -> Any:
            if not stopped:
                stopped.append(name)
                result = getattr(inside, name)
                return lambda *args: (result(*args), lines.replace(8, b"b: null\n", b"b: 2222\n"))[0]
            return getattr(inside, name)

    lines._inside = Stopped()  # type: ignore[assignment]
    lines.replace(0, b"a: null\n", b"a: 1111\n")
    lines._inside = inside
    lines.close()
    assert path.read_bytes() == b"a: 1111\nb: 2222\n"


def test_what_is_written_is_known_until_it_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    plain, lines = LineFile(path), LineFile(path, marked=True)
    assert is_written(path)
    plain.close()
    assert is_written(path)
    lines.close()
    assert not is_written(path)
    assert not is_written(tmp_path / "nothing")
