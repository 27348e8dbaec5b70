"""A file of lines: what is there at each moment, when the disk is full, and when somebody else touches the file."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from profiler_wrapper.live import kept_lines
from profiler_wrapper.live.kept_lines import PIECE_BYTES, KeptLines, mapping_is_safe


@pytest.fixture(params=[True, False], ids=["mapped", "own lines"])
def lines(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[KeptLines]:
    path = tmp_path / "lines"
    path.touch()
    lines = KeptLines(path, mapping=request.param)
    yield lines
    lines.close()


def test_every_line_is_in_the_file_at_once(lines: KeptLines) -> None:
    wanted = b""
    for number in range(4000):
        line = b"%d %b\n" % (number, b"x" * (number % 97))
        assert lines.append(line) == len(wanted)
        wanted += line
        if number % 500 == 0:
            assert lines.path.read_bytes().rstrip(b" ") == wanted
    assert len(wanted) > 2 * PIECE_BYTES
    assert lines.read() == wanted
    lines.trim()
    assert lines.path.read_bytes() == wanted
    lines.append(b"more\n")
    lines.close()
    assert lines.path.read_bytes() == wanted + b"more\n"


def test_nothing_is_written_after_the_end(lines: KeptLines) -> None:
    lines.append(b"first\n")
    lines.close()
    with open(lines.path, "rb"), pytest.raises(OSError, match="descriptor"):  # which has the number now
        lines.append(b"second\n")
    assert lines.path.read_bytes() == b"first\n"


def test_a_line_longer_than_a_piece(lines: KeptLines) -> None:
    wanted = b"y" * (3 * PIECE_BYTES) + b"\n"
    lines.append(b"short\n")
    lines.append(wanted)
    lines.trim()
    assert lines.path.read_bytes() == b"short\n" + wanted


def test_places_can_be_filled_in_later(lines: KeptLines) -> None:
    places = [lines.append(b"%05d null\n" % number) for number in range(20_000)]
    for place in places[::777]:
        lines.patch(place + 6, b"full")
    lines.trim()
    found = lines.path.read_bytes().splitlines()
    assert [number for number, line in enumerate(found) if line.endswith(b"full")] == list(range(0, 20_000, 777))
    assert len(found) == 20_000


def test_a_full_disk_is_said_and_leaves_whole_lines(lines: KeptLines, monkeypatch: pytest.MonkeyPatch) -> None:
    full = False
    write_at = kept_lines._write_at

    def write(descriptor: int, data: bytes, offset: int) -> None:
        if full:
            write_at(descriptor, data[: len(data) // 2], offset)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_at(descriptor, data, offset)

    monkeypatch.setattr(kept_lines, "_write_at", write)
    line = b"x" * 99 + b"\n"
    for _ in range(10):
        lines.append(line)
    full = True
    kept = 10
    with pytest.raises(OSError, match="No space"):
        for _ in range(PIECE_BYTES):
            lines.append(line)
            kept += 1
    with pytest.raises(OSError, match="a moment ago"):  # which costs no system call
        lines.append(line)
    assert lines.path.read_bytes() == line * kept
    full = False
    monkeypatch.setattr(kept_lines, "_RETRY_NS", 0)
    lines._retry_ns = 0
    lines.append(line)
    lines.trim()
    assert lines.path.read_bytes() == line * (kept + 1)


def test_a_file_that_becomes_shorter_is_no_longer_mapped(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.touch()
    lines = KeptLines(path, mapping=True)
    lines.append(b"first\n")
    path.write_bytes(b"")
    with pytest.raises(OSError, match="shorter"):
        lines.check()
    lines.append(b"second\n")
    lines.check()
    lines.close()
    assert path.read_bytes() == b"second\n"


def test_a_file_that_was_removed_is_missed(lines: KeptLines) -> None:
    lines.append(b"first\n")
    lines.check()
    lines.path.unlink()
    with pytest.raises(FileNotFoundError, match="removed"):
        lines.check()
    lines.path.touch()  # for close


@pytest.mark.parametrize(
    ("system", "safe"), [("ext4", True), ("tmpfs", True), ("nfs4", False), ("lustre", False), ("fuse.sshfs", False)]
)
def test_only_local_file_systems_are_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: str, safe: bool
) -> None:
    device = os.stat(tmp_path).st_dev
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "21 1 0:999 / /proc rw - proc proc rw\n"
        f"36 35 {os.major(device)}:{os.minor(device)} / /mnt rw,noatime shared:1 master:2 - {system} /dev/x rw\n"
    )
    monkeypatch.setattr(kept_lines, "_MOUNTS", str(mounts))
    assert mapping_is_safe(tmp_path) is (safe and sys.platform == "linux")


def test_where_nothing_is_known_nothing_is_mapped(tmp_path: Path) -> None:
    assert not mapping_is_safe(tmp_path / "missing")
