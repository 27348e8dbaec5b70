"""A run on disk: where its files go.

    <output_dir>/<run>/[attempt<N>/]<rank>/[steps_<first>-<last>/]<file>

Nothing here waits for another rank: each writes only into its own directory. One of them writes the page above it.
Launches are kept apart by the file that its first rank leaves, see `launch`.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from profiler_wrapper.errors import WrongUse, shown
from profiler_wrapper.trace.atomic import check_path, json_bytes, replacing
from profiler_wrapper.trace.launch import attempt_number, claim, find_launch, launch_name

RUN_FILE = "run.json"
RESULT_FILE = "result.json"
PAGE_FILE = "report.html"
RUN_NAME_VARIABLE = "PROFILER_WRAPPER_RUN"
_LONGEST_NAME_BYTES = 120  # leaves room in the 255 bytes that a file name may have


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The files of one rank of one run.

    Attributes:
        root: the run's directory, common to its ranks.
        rank_name: the rank's directory in it, `rank0_dp0_tp0_pp0` or `rank0`.
        prefix, rank: what `<prefix>` and `<r>` in the name of a file stand for.
        window: the directory of a later recorded window, `steps_500-502`; "" for the first.
    """

    root: Path
    rank_name: str
    prefix: str
    rank: int
    window: str = ""

    @property
    def directory(self) -> Path:
        """Return the directory of this rank's files of this window."""
        return self.root / self.rank_name / self.window

    @property
    def page(self) -> Path:
        """Return the path of the page: of the first window in the run's directory, of a later one with its files."""
        return (self.directory if self.window else self.root) / PAGE_FILE

    def path(self, name: str) -> Path:
        """Return the path of a file: `path("<prefix>_rank_<r>.log")`."""
        return self.directory / name.replace("<prefix>", self.prefix).replace("<r>", str(self.rank))

    def write_run(self, info: Mapping[str, Any], *, complete: bool) -> Path:
        """Write run.json: the run's description, and whether its files are all there. Raises OSError."""
        path = self.path(RUN_FILE)
        with replacing(path) as beside:
            beside.write_bytes(json_bytes({**info, "complete": complete}))
        return path


def open_run(
    output_dir: str | os.PathLike[str],
    *,
    prefix: str,
    rank: int = 0,
    rank_name: str | None = None,
    world_size: int = 1,
    run_name: str | None = None,
    environment: Mapping[str, str] = os.environ,
) -> RunDirectory:
    """Make the directory for this rank's files.

    The run is named by PROFILER_WRAPPER_RUN or `run_name`, else by the job's id, so that all ranks
    meet in it; else by the time: of the launcher's start if there are several ranks, of now if there
    is one. Nothing is written into twice: the second launch of a name, the second profile of a process,
    gets `<run>-2` on every rank.

    Raises OSError: the directory cannot be made.
    """
    prefix = safe_name(prefix, "profile")
    rank_name = safe_name(rank_name or f"rank{rank}", f"rank{rank}")
    for _, root in run_roots(
        output_dir, prefix=prefix, world_size=world_size, run_name=run_name, environment=environment
    ):
        with suppress(FileExistsError):  # this rank has been there
            (root / rank_name).mkdir()
            return RunDirectory(root, rank_name, prefix, rank)
    raise AssertionError("there is always another one")


def run_roots(
    output_dir: str | os.PathLike[str],
    *,
    prefix: str,
    world_size: int,
    run_name: str | None,
    environment: Mapping[str, str],
) -> Iterator[tuple[Path, Path]]:
    """Yield runs in which this process may write, and where in each, the first place first, without end.

    `<run>/[attempt<N>]`, then `<run>-2/[attempt<N>]` ...: all ranks of a launch find the same, those of another
    launch of the same name others. A process that is alone, without a name, has a run of its own, named by the time.

    Raises OSError: nothing can be written there.
    """
    parent = Path(output_dir).expanduser()
    launch, number = find_launch(environment), attempt_number(environment)
    attempt = f"attempt{number}" if number else ""  # the first has no directory of its own
    named = environment.get(RUN_NAME_VARIABLE) or run_name
    alone = not (named or launch.job or world_size > 1)
    if alone:
        parent.mkdir(parents=True, exist_ok=True)  # where that fails, as behind a dangling link, no other name helps
        name = f"{prefix}-{time.strftime('%Y%m%d-%H%M%S')}"
    else:
        name = safe_name(named or f"{prefix}-{launch_name(launch, environment)}", prefix)
    for count in itertools.count(1):
        run = parent / (name if count == 1 else f"{name}-{count}")
        root = run / attempt
        if alone:
            with suppress(FileExistsError):
                run.mkdir()
                yield run, run
        elif claim(run, launch, restarted=bool(attempt)) and (not attempt or claim(root, launch)):
            yield run, root


def safe_name(text: str, default: str) -> str:
    """Return `text` as one harmless file name of at most 120 bytes; different texts stay different."""
    kept = "".join(letter if letter.isalnum() or letter in "._+=@-" else "_" for letter in text).lstrip(".-")
    kept = kept if kept.strip("._") else default
    if kept == text and len(kept.encode()) <= _LONGEST_NAME_BYTES:
        return kept
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{kept.encode()[: _LONGEST_NAME_BYTES - 9].decode('utf-8', 'ignore')}-{digest}" if text else default


def given_directory(path: object, parameter: str) -> Path:
    """Return a directory as a user gives it, with `~` resolved. Raises WrongUse: it is no path."""
    try:
        found = Path(path).expanduser()  # type: ignore[arg-type]
    except TypeError:
        raise WrongUse(f"{parameter}={shown(path)} is no directory. Give a path.") from None
    except RuntimeError as error:  # of a user who is not known
        raise WrongUse(f"{parameter}={shown(path)} is no directory: {error}") from error
    check_path(found)
    return found


def href(file: Path, *, page: Path) -> str:
    """Return the link from a page to a file: relative where possible, so that both can be moved together."""
    try:
        relative = os.path.relpath(file.resolve(), page.parent.resolve())
    except ValueError:  # on another drive
        return file.resolve().as_uri()
    return quote(Path(relative).as_posix())
