"""The files of a monitor's log directory: their names, which belong together, which are still written, which go."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Literal

from profiler_wrapper.monitor.records import Session

if sys.platform != "win32":  # there nothing is known to be written
    import fcntl

LogKind = Literal["steps", "summary", "text"]
REALTIME_FILE = "perf_realtime.log"

# The best source first: every step, the rows of a log interval with statistics, the rows alone.
_NAMES: Mapping[LogKind, tuple[str, str]] = {
    "steps": ("perf_steps_", ".jsonl"),
    "summary": ("perf_summary_", ".json"),
    "text": ("perf_metrics_", ".log"),
}


def log_file(directory: Path, kind: LogKind, stamp: str) -> Path:
    """`perf_steps_20240129_103000.jsonl` in `directory`."""
    begin, end = _NAMES[kind]
    return directory / f"{begin}{stamp}{end}"


def kind_and_stamp(path: Path) -> tuple[LogKind | None, str]:
    """By its name; None: it is no log file."""
    for kind, (begin, end) in _NAMES.items():
        if path.name.startswith(begin) and path.name.endswith(end):
            return kind, path.name[len(begin) : -len(end)]
    return None, ""


@dataclass(frozen=True, slots=True)
class LogSession:
    """The files of one run of a monitor."""

    stamp: str  # its start, as in the names of its files: `20240129_103000`, or `20240129_103000_2` of a second
    files: Mapping[LogKind, Path]

    @property
    def best(self) -> Path:
        """The file with the most detail."""
        return next(self.files[kind] for kind in _NAMES if kind in self.files)


def log_sessions(directory: Path) -> list[LogSession]:
    """The sessions in a directory, the oldest first. Raises OSError if it cannot be listed."""
    found: dict[str, dict[LogKind, Path]] = {}
    for path in directory.iterdir():
        kind, stamp = kind_and_stamp(path)
        if kind is not None:
            found.setdefault(stamp, {})[kind] = path
    return [LogSession(stamp, found[stamp]) for stamp in sorted(found)]


def log_directories(root: Path) -> Iterator[Path]:
    """`root` and all directories in it that hold log files."""
    for directory, _, names in os.walk(root):
        if any(kind_and_stamp(Path(name))[0] is not None for name in names):
            yield Path(directory)


def unfinished(directory: Path) -> list[LogSession]:
    """Runs that ended without a summary, as if killed. Raises OSError."""
    return [
        session
        for session in log_sessions(directory)
        if "steps" in session.files
        and "summary" not in session.files
        and not any(is_locked(path) for path in session.files.values())
    ]


def lock(descriptor: int) -> None:
    """Marks an open file as being written, until it is closed or the process dies. It hinders nobody."""
    if sys.platform != "win32":
        with contextlib.suppress(OSError):  # some file systems have no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


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


# --------------------------------------------------------------------------------------------------
# Writing them.


class LineFile:
    """Appends whole lines. Nothing is buffered in the process, so a fork repeats none and a kill loses none."""

    def __init__(self, path: Path, *, new: bool = False) -> None:
        """Raises OSError: it cannot be opened, or is there although it should be new."""
        self.path = path
        self._file = open(path, "xb" if new else "ab", buffering=0)  # noqa: SIM115 - closed in close
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


class LogFiles:
    """Names the files of a run alike, lets no two runs share one, and removes the oldest.

    Args:
        kinds: what this run writes.
        max_files: of each kind, the newest so many stay, this run's among them; 0: all.

    Attributes:
        stamp: of this run's files, as in their names.
    """

    def __init__(self, kinds: Collection[LogKind], *, max_files: int) -> None:
        self._kinds, self._max_files = tuple(kinds), max_files
        self._lock = Lock()  # each log opens its file in a thread of its own
        self._opened: dict[LogKind, LineFile] = {}
        self.stamp = ""

    def open(self, session: Session, kind: LogKind) -> LineFile:
        """The new file of this kind; the first call makes those of all kinds. Raises OSError: they cannot be made."""
        directory = log_directory(session)
        with self._lock:
            if not self._opened:
                self._opened = self._make(directory, session.stamp)
                others = [one.files for one in log_sessions(directory) if one.stamp != self.stamp]
                for one in self._kinds if self._max_files else ():
                    remove_oldest([files[one] for files in others if one in files], keep=self._max_files - 1)
        return self._opened[kind]

    def _make(self, directory: Path, stamp: str) -> dict[LogKind, LineFile]:
        for number in itertools.count(1):
            self.stamp = stamp if number == 1 else f"{stamp}_{number}"
            paths = {kind: log_file(directory, kind, self.stamp) for kind in self._kinds}
            if any(path.exists() for path in paths.values()):
                continue
            made: dict[LogKind, LineFile] = {}
            try:
                for kind in paths.keys() - {"summary"}:  # that one is made at the end
                    made[kind] = LineFile(paths[kind], new=True)
            except FileExistsError:  # another process was quicker
                for file in made.values():
                    file.close()
                    file.path.unlink(missing_ok=True)
                continue
            break
        return made


def remove_oldest(files: Sequence[Path], *, keep: int) -> None:
    """All but the last so many, and but for those that are still written."""
    for path in files[: max(0, len(files) - keep)]:
        if not is_locked(path):
            with contextlib.suppress(OSError):
                path.unlink()


def log_directory(session: Session) -> Path:
    """Made if it is not there. Raises OSError."""
    if session.log_dir is None:
        raise FileNotFoundError("there is no log directory")
    session.log_dir.mkdir(parents=True, exist_ok=True)
    return session.log_dir
