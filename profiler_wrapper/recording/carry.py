"""Takes files that were written on a node's own disk to where the run is kept."""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from profiler_wrapper.recording.atomic import replacing


@dataclass(frozen=True, slots=True)
class Carried:
    """What came of it."""

    there: tuple[Path, ...]  # where they are now
    left: tuple[Path, ...]  # that could not be copied, and are where they were
    problem: str  # why not; "" if none is left


def carry(source: Path, target: Path) -> Carried:
    """Move every file below `source` to the same place below `target`, each whole or not at all.

    A file is taken away only after its copy was read back at its end. Hidden files stay: they are not finished.
    """
    there: list[Path] = []
    left: list[Path] = []
    problem = ""
    for path in _files(source):
        copy = target / path.relative_to(source)
        try:
            with replacing(copy) as beside:
                shutil.copyfile(path, beside)
                if beside.stat().st_size != path.stat().st_size:
                    raise OSError(f"{beside.stat().st_size} of {path.stat().st_size} bytes were copied")
            path.unlink()
        except OSError as error:
            left.append(path)
            problem = problem or f"{type(error).__name__}: {error}"
        else:
            there.append(copy)
    return Carried(tuple(there), tuple(left), problem)


def remove_empty(directory: Path) -> None:
    """Take away the directories below `directory` in which nothing is, and itself."""
    below = sorted((path for path in directory.rglob("*") if path.is_dir()), reverse=True)
    for empty in (*below, directory):
        with suppress(OSError):
            empty.rmdir()


def _files(source: Path) -> list[Path]:
    files = sorted(path for path in source.rglob("*") if path.is_file())
    return [path for path in files if not any(part.startswith(".") for part in path.relative_to(source).parts)]
