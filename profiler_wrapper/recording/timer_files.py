"""The files of a rank's timer: `<run>/[attempt<N>/]timers/timer_rank<k>.log`, and `.jsonl` beside it."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from profiler_wrapper.recording.launch import attempt_name, attempt_number, job_name
from profiler_wrapper.recording.store import RUN_NAME_VARIABLE, launch_directories, safe_name

DIRECTORY = "timers"


@dataclass(frozen=True, slots=True)
class TimerFiles:
    """Two files that nobody else writes.

    Attributes:
        root: the run's directory.
        attempt: of an elastic job, from 0.
        text, lines: the lines that people read, and JSON lines.
    """

    root: Path
    attempt: int
    text: Path
    lines: Path

    def remove(self) -> None:
        """Both, and the directories that are empty then. Raises nothing."""
        with contextlib.suppress(OSError):
            self.text.unlink(missing_ok=True)
            self.lines.unlink(missing_ok=True)
            place = self.text.parent
            while place != self.root.parent:
                place.rmdir()
                place = place.parent


def claim_timer_files(
    output_dir: str | os.PathLike[str],
    *,
    rank: int = 0,
    world_size: int = 1,
    run_name: str | None = None,
    prefix: str = "profile",
    worker: int | None = None,
    environment: Mapping[str, str] = os.environ,
    now: float | None = None,
) -> TimerFiles:
    """Make the two files, empty, where there are none of this rank: nothing is ever written over.

    The run is named as for `store.open_run`, so that a timer's files lie beside those of the profiles of its job;
    where the run holds this rank's timer already, it is `<run>-2` and so on.

    Args:
        worker: the number of a process that belongs to the rank and is none, as one that loads its data.

    Raises:
        OSError: they cannot be made.
    """
    parent = Path(output_dir).expanduser()
    named = environment.get(RUN_NAME_VARIABLE) or run_name
    file = f"timer_rank{rank}" if worker is None else f"worker{worker}_of_rank{rank}"
    attempt = attempt_number(environment)
    roots: Iterator[Path]
    if named and world_size == 1:
        roots = (root / attempt_name(environment) for root in _numbered(parent / safe_name(named, prefix)))
    elif named or job_name(environment) or world_size > 1:
        roots = launch_directories(output_dir, prefix=prefix, run_name=run_name, environment=environment)
    else:
        name = f"{prefix}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}"
        roots, attempt = _new(_numbered(parent / name)), 0
    for root in roots:
        directory = root / DIRECTORY
        directory.mkdir(parents=True, exist_ok=True)
        text, lines = directory / f"{file}.log", directory / f"{file}.jsonl"
        with contextlib.suppress(FileExistsError):
            _make(lines)
            try:
                _make(text)
            except FileExistsError:
                lines.unlink()
                raise
            return TimerFiles(root.parent if attempt else root, attempt, text, lines)
    raise AssertionError("unreachable")


def _numbered(root: Path) -> Iterator[Path]:
    """`root`, `root-2`, `root-3` ..."""
    for number in itertools.count(1):
        yield root if number == 1 else root.with_name(f"{root.name}-{number}")


def _new(roots: Iterable[Path]) -> Iterator[Path]:
    """Those that nobody has made yet; makes them. Raises OSError: it cannot."""
    for root in roots:
        if not root.is_dir():
            with contextlib.suppress(FileExistsError):
                root.mkdir(parents=True)
                yield root


def _make(path: Path) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
