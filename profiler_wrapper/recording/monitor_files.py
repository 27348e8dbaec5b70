"""The files of a monitor's log directory: their names, which are whose, and which are still written."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

if sys.platform != "win32":  # there nothing is known to be written
    import fcntl

LogKind = Literal["steps", "summary", "text"]

# The best source first: every step, the rows of a log interval with statistics, the rows alone.
LOG_KINDS: tuple[LogKind, ...] = ("steps", "summary", "text")
REALTIME_FILE = "perf_realtime.log"

_NAMES: Mapping[LogKind, tuple[str, str]] = {
    "steps": ("perf_steps_", ".jsonl"),
    "summary": ("perf_summary_", ".json"),
    "text": ("perf_metrics_", ".log"),
}
_NAME = re.compile(
    "|".join(f"{re.escape(begin)}(?P<{kind}>.+){re.escape(end)}" for kind, (begin, end) in _NAMES.items())
)
_STAMP = re.compile(r"(\d{8}_\d{6})(?:_(\d+))?")


def log_file(directory: Path, kind: LogKind, stamp: str) -> Path:
    """`perf_steps_20240129_103000.jsonl` in `directory`."""
    begin, end = _NAMES[kind]
    return directory / f"{begin}{stamp}{end}"


@dataclass(frozen=True, slots=True)
class LogSession:
    """The files of one run of a monitor.

    Attributes:
        stamp: its start, as in the names of its files: `20240129_103000`, or `20240129_103000_2` of a second.
    """

    directory: Path
    stamp: str
    files: Mapping[LogKind, Path]

    @property
    def best(self) -> Path:
        """The file that tells most."""
        return next(self.files[kind] for kind in LOG_KINDS if kind in self.files)

    @property
    def is_running(self) -> bool:
        """Whether a process still writes it, as far as the file system tells."""
        return any(is_locked(path) for kind, path in self.files.items() if kind != "summary")


def log_sessions(directory: Path) -> list[LogSession]:
    """The sessions in a directory, the oldest first. Raises OSError if it cannot be listed."""
    found: dict[str, dict[LogKind, Path]] = {}
    for path in directory.iterdir():
        kind, stamp = kind_and_stamp(path)
        if kind is not None:
            found.setdefault(stamp, {})[kind] = path
    return [LogSession(directory, stamp, found[stamp]) for stamp in sorted(found, key=_order)]


def log_directories(root: Path) -> Iterator[Path]:
    """`root` and all directories in it that hold log files."""
    for directory, _, names in os.walk(root):
        if any(kind_and_stamp(Path(name))[0] is not None for name in names):
            yield Path(directory)


def kind_and_stamp(path: Path) -> tuple[LogKind | None, str]:
    """By its name; None: it is no log file."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        return None, ""
    kind = next(kind for kind in LOG_KINDS if match[kind] is not None)
    return kind, match[kind]


def _order(stamp: str) -> tuple[str, int, str]:
    match = _STAMP.fullmatch(stamp)
    return (match[1], int(match[2] or 1), "") if match else ("", 0, stamp)


def lock(descriptor: int) -> None:
    """Marks an open file as being written, until it is closed or the process dies. It hinders nobody."""
    if sys.platform == "win32":
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # some file systems have no locks
        return


def is_locked(path: Path) -> bool:
    """Whether somebody has marked it by `lock`."""
    if sys.platform == "win32":
        return False
    try:
        with path.open("rb") as file:
            fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
