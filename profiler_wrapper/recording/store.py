"""A run on disk: where its files go, and writing them so that a file is either whole or not there.

    <output_dir>/<run>/[attempt<N>/]<rank>/[steps_<first>-<last>/]<file>

Nothing here waits for another rank: each writes only into its own directory. One of them writes the page above it.
How the ranks of one launch find the same directory is in `launch`.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from profiler_wrapper.errors import ProfilerWrapperError, WrongUse
from profiler_wrapper.recording.atomic import check_path, json_bytes, replacing
from profiler_wrapper.recording.launch import attempt_name, claim, find_launch, job_name, launch_name

__all__ = [
    "PAGE_FILE",
    "RESULT_FILE",
    "RUN_FILE",
    "RUN_NAME_VARIABLE",
    "RunDirectory",
    "check_run",
    "given_directory",
    "json_bytes",
    "launch_directories",
    "open_run",
    "rank_directories",
    "read_run",
    "replacing",
    "safe_name",
]

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
        """Where this rank's files of this window lie."""
        return self.root / self.rank_name / self.window

    @property
    def page(self) -> Path:
        """Where the page goes: that of the first window into the run's directory, a later one beside its files."""
        return (self.directory if self.window else self.root) / PAGE_FILE

    def path(self, name: str) -> Path:
        """The path of a file: `path("<prefix>_rank_<r>.log")`."""
        return self.directory / name.replace("<prefix>", self.prefix).replace("<r>", str(self.rank))

    def for_window(self, first: int, last: int) -> RunDirectory:
        """The same rank, with the files of steps `first` to `last` in a directory of their own."""
        return replace(self, window=f"steps_{first}-{last}")

    def write_bytes(self, name: str, data: bytes) -> Path:
        """Writes a file whole or not at all. Raises OSError with its path."""
        path = self.path(name)
        with replacing(path) as beside:
            beside.write_bytes(data)
        return path

    def write_text(self, name: str, text: str) -> Path:
        """As `write_bytes`; what UTF-8 cannot say becomes `?`."""
        return self.write_bytes(name, text.encode("utf-8", "replace"))

    def write_json(self, name: str, value: Any) -> Path:
        """As `write_bytes`; numbers that are not finite become null."""
        return self.write_bytes(name, json_bytes(value))

    def write_with(self, name: str, write: Callable[[Path], object]) -> Path:
        """As `write_bytes`, for what writes a file itself (an export, a plot): it gets the path to write to."""
        path = self.path(name)
        with replacing(path) as beside:
            write(beside)
        return path

    def write_run(self, info: Mapping[str, Any], *, complete: bool) -> Path:
        """Writes run.json: what is known of the run, and whether its files are all there."""
        return self.write_json(RUN_FILE, {**info, "complete": complete})


def open_run(
    output_dir: str | os.PathLike[str],
    *,
    prefix: str,
    rank: int = 0,
    rank_name: str | None = None,
    world_size: int = 1,
    run_name: str | None = None,
    environment: Mapping[str, str] = os.environ,
    now: float | None = None,
) -> RunDirectory:
    """The directory for this rank's files, made now.

    The run is named by PROFILER_WRAPPER_RUN or `run_name`, else by the job's id, so that all ranks
    meet in it; else by the time: of the launcher's start if there are several ranks, of now if there
    is one. Nothing is written into twice: the second launch of a name, the second profile of a process,
    gets `<run>-2` on every rank.

    Raises:
        OSError: the directory cannot be made.
    """
    prefix = safe_name(prefix, "profile")
    rank_name = safe_name(rank_name or f"rank{rank}", f"rank{rank}")
    parent = Path(output_dir).expanduser()
    if world_size > 1 or environment.get(RUN_NAME_VARIABLE) or run_name or job_name(environment):
        roots = launch_directories(output_dir, prefix=prefix, run_name=run_name, environment=environment)
        root = _make_first(roots, rank_name)
    else:
        name = f"{prefix}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}"
        root = _first_without(parent, name)
    run = RunDirectory(root, rank_name, prefix, rank)
    run.directory.mkdir(parents=True, exist_ok=True)
    return run


def read_run(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """What run.json in a rank's directory says.

    Raises:
        FileNotFoundError: there is none.
        ProfilerWrapperError: it is damaged.
    """
    path = Path(directory, RUN_FILE)
    try:
        info = json.loads(path.read_bytes())
    except ValueError as error:
        raise ProfilerWrapperError(
            f"{path}: not the JSON that was written ({error}). Delete it, or record again."
        ) from error
    if not isinstance(info, dict):
        raise ProfilerWrapperError(f"{path}: holds no JSON object. Delete it, or record again.")
    return info


class _Described(msgspec.Struct, gc=False):
    """What run.json says, as far as reports go by it. Whatever is not there was not known."""

    rank: int | None = None
    world_size: int | None = None
    coordinates: dict[str, int] | None = None
    device: str | None = None
    device_type: str | None = None
    device_memory_bytes: int | None = None
    free_memory_bytes: int | None = None
    compute_capability: list[int] | None = None
    cpu_name: str | None = None
    versions: dict[str, str | int] | None = None
    float32_matmul_precision: str | None = None
    timed_steps: list[int] | None = None
    full_steps: list[int] | None = None
    layers: list[dict[str, Any]] | None = None
    compiled: dict[str, Any] | None = None
    optimizers: list[dict[str, Any]] | None = None
    wrappers: list[str] | None = None
    attention_backends: dict[str, bool] | None = None
    attention_implementation: str | None = None
    process_group_backend: str | None = None
    allocator_settings: str | None = None


def check_run(run: Mapping[str, Any]) -> None:
    """Raises ValueError, with the key, where a run's description is not what was written."""
    try:
        msgspec.convert(run, _Described)
    except (msgspec.ValidationError, ValueError) as error:  # ValueError: a text that is none, of half a character
        raise ValueError(str(error)) from error


def rank_directories(run: str | os.PathLike[str]) -> list[Path]:
    """The directories of the ranks below `run`, which may be one itself; by rank, the last attempt's."""
    run = Path(run)
    if (run / RUN_FILE).is_file():
        return [run]
    attempts = sorted(run.glob("attempt*"), key=lambda path: _number_in(path.name))
    last = attempts[-1] if attempts else run
    found = [path.parent for path in last.glob(f"*/{RUN_FILE}")]
    return sorted(found, key=lambda path: (_number_in(path.name), path.name))


def safe_name(text: str, default: str) -> str:
    """`text` as one harmless file name of at most 120 bytes; different texts stay different."""
    kept = "".join(letter if letter.isalnum() or letter in "._+=@-" else "_" for letter in text)
    kept = kept.lstrip(".-")
    if not kept.strip("._"):
        kept = default
    if kept == text and len(kept.encode()) <= _LONGEST_NAME_BYTES:
        return kept
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{kept.encode()[: _LONGEST_NAME_BYTES - 9].decode('utf-8', 'ignore')}-{digest}" if text else default


def given_directory(path: object, parameter: str) -> Path:
    """A directory as a user gives it, `~` resolved.

    Raises:
        WrongUse: it can be none.
    """
    try:
        found = Path(path).expanduser()  # type: ignore[arg-type]
    except TypeError:
        raise WrongUse(f"{parameter}={path!r} is no directory. Give a path.") from None
    except RuntimeError as error:  # of a user who is not known
        raise WrongUse(f"{parameter}={path!r} is no directory: {error}") from error
    check_path(found)
    return found


# --- names of runs ---


def launch_directories(
    output_dir: str | os.PathLike[str],
    *,
    prefix: str = "profile",
    run_name: str | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Iterator[Path]:
    """Where the ranks of this process's launch may write, the first place first, without end.

    `<run>/[attempt<N>]`, then `<run>-2/[attempt<N>]` ...: all ranks of a launch are told the same, those of another
    launch of the same name others. What is told is there, or is made.

    Raises:
        OSError: nothing can be written there.
    """
    launch, attempt = find_launch(environment), attempt_name(environment)
    named = environment.get(RUN_NAME_VARIABLE) or run_name
    name = safe_name(named or f"{prefix}-{launch_name(launch, environment)}", prefix)
    parent = Path(output_dir).expanduser()
    for number in itertools.count(1):
        run = parent / (name if number == 1 else f"{name}-{number}")
        root = run / attempt
        if claim(run, launch, restarted=bool(attempt)) and (not attempt or claim(root, launch)):
            yield root


def _make_first(roots: Iterable[Path], rank_name: str) -> Path:
    """The first in which this rank has not been, with its directory."""
    for root in roots:
        with contextlib.suppress(FileExistsError):
            (root / rank_name).mkdir()
            return root
    raise AssertionError("there is always another one")


def _first_without(parent: Path, name: str) -> Path:
    """The first of `name`, `name-2` ... in `parent` that is not there yet; makes it."""
    number = 1
    while True:
        root = parent / (name if number == 1 else f"{name}-{number}")
        try:
            root.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return root


def _number_in(name: str) -> int:
    digits = "".join(letter if letter.isdigit() else " " for letter in name).split()
    return int(digits[0]) if digits else -1
