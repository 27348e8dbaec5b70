"""A run on disk: where its files go, and writing them so that a file is either whole or not there.

    <output_dir>/<run>/[attempt<N>/]<rank>/[steps_<first>-<last>/]<file>

Nothing here waits for another rank: each writes only into its own directory. One of them writes the page above it.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from profiler_wrapper.errors import ProfilerWrapperError
from profiler_wrapper.recording.atomic import json_bytes, replacing

__all__ = [
    "PAGE_FILE",
    "RESULT_FILE",
    "RUN_FILE",
    "RUN_NAME_VARIABLE",
    "RunDirectory",
    "json_bytes",
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
# The same on all ranks of a job. torchrun writes "none" where it was given no id.
_JOB_VARIABLES = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "PMIX_NAMESPACE", "LSB_JOBID", "PBS_JOBID")
_ATTEMPT_VARIABLES = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
_LONGEST_NAME_BYTES = 120  # leaves room in the 255 bytes that a file name may have

_opened: dict[Path, int] = {}  # rank directories of this process -> how often each was asked for


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
    is one. A run that we name is never written into twice: the second profile of a job, or of a
    process, gets `<run>-2` on every rank. One that the user names is, but not twice by one process.

    Raises:
        OSError: the directory cannot be made.
    """
    prefix = safe_name(prefix, "profile")
    rank_name = safe_name(rank_name or f"rank{rank}", f"rank{rank}")
    parent = Path(output_dir).expanduser()
    attempt = _attempt(environment)
    job = _job_name(environment)
    if named := environment.get(RUN_NAME_VARIABLE) or run_name:
        root = _not_opened_before(parent / safe_name(named, prefix), rank_name) / attempt
    elif job or world_size > 1:
        name = safe_name(f"{prefix}-{job or _launch_name(environment)}", prefix)
        root = _first_without(parent, name, Path(attempt, rank_name)) / attempt
    else:
        name = f"{prefix}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}"
        root = _first_without(parent, name, Path())
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


# --- names of runs ---


def _job_name(environment: Mapping[str, str]) -> str | None:
    for variable in _JOB_VARIABLES:
        job = environment.get(variable, "")
        if job and job != "none":
            step = environment.get("SLURM_STEP_ID", "") if variable == "SLURM_JOB_ID" else ""
            return f"{job}.{step}" if step.isdigit() else job
    return None


def _launch_name(environment: Mapping[str, str]) -> str:
    """The same on the ranks that one process launched: when it started, and the port they meet at."""
    name = time.strftime("%Y%m%d-%H%M%S", time.localtime(_parent_start_s()))
    port = environment.get("MASTER_PORT", "")
    return f"{name}-{port}" if port else name


def _parent_start_s() -> float:
    """When this process's parent started, in seconds since 1970; now, where the system does not tell."""
    try:
        fields = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
        boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime"))
        return int(boot.split()[1]) + int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, StopIteration, AttributeError):
        return time.time()


def _attempt(environment: Mapping[str, str]) -> str:
    for variable in _ATTEMPT_VARIABLES:
        count = environment.get(variable, "")
        if count.isdecimal() and int(count) > 0:
            return f"attempt{int(count)}"
    return ""


def _not_opened_before(root: Path, rank_name: str) -> Path:
    """`root`, or `root-2` and so on if this process has already got it for this rank."""
    place = root.absolute() / rank_name
    _opened[place] = times = _opened.get(place, 0) + 1
    return root if times == 1 else root.with_name(f"{root.name}-{times}")


def _first_without(parent: Path, name: str, below: Path) -> Path:
    """The first of `name`, `name-2` ... in `parent` that does not hold `below` yet; makes it there."""
    number = 1
    while True:
        root = parent / (name if number == 1 else f"{name}-{number}")
        try:
            (root / below).mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return root


def _number_in(name: str) -> int:
    digits = "".join(letter if letter.isdigit() else " " for letter in name).split()
    return int(digits[0]) if digits else -1
