"""Which launch of a job a process belongs to: all ranks of one meet in a directory. Nobody waits, and nobody is asked.

A launch is one start of a job: `torchrun`, `srun`, `mpirun`, `torch.multiprocessing.spawn`, or a loop in a shell. The
first rank that comes leaves a file in the run's directory that tells its launch by what all ranks of it see alike.
Another launch of the same name finds that it is not its own, and goes beside it: nothing is overwritten.
"""

from __future__ import annotations

import itertools
import os
import secrets
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

LAUNCH_FILE = ".launch.json"
# The same on all ranks of a job, and where a job may launch several times, what tells its launches apart.
_JOB_VARIABLES = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "PMIX_NAMESPACE", "LSB_JOBID", "PBS_JOBID")
_ATTEMPT_VARIABLES = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
_SAME_START_S = 30.0  # ranks behind wrappers of their own, whose parents do not start at one moment


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What this process knows of its launch.

    Attributes:
        job: the job's id; "" without one. torchrun writes "none" where it was given no id.
        exact: no other launch has this job's id.
        meeting: address and port at which the ranks meet; "" where it is not known.
        host, launcher: the machine, and the folder that torchrun made on it for this launch; "" without torchrun.
        started_s: when the process that started this one did, in seconds since 1970; None where nothing tells. Without
            it, a rank that never came in one launch would join that one's directory in the next.
        world_size: as torchrun tells it; None without. Where nodes come or go it starts all ranks again and counts that
            as no restart: this is what tells such rounds apart.
    """

    job: str = ""
    exact: bool = False
    meeting: str = ""
    host: str = ""
    launcher: str = ""
    started_s: float | None = None
    world_size: int | None = None

    def is_other_than(self, other: Launch, *, restarted: bool = False) -> bool:
        """Whether the two cannot be one launch. `restarted`: ranks may by now meet elsewhere."""
        if self.job != other.job:
            return True
        if self.job and self.exact:
            return False
        if not restarted and None not in (self.world_size, other.world_size) and self.world_size != other.world_size:
            return True
        if self.host == other.host and self.launcher and other.launcher:
            return self.launcher != other.launcher
        if not restarted and self.meeting != other.meeting:
            return True
        if self.host != other.host or self.started_s is None or other.started_s is None:
            return False
        return abs(self.started_s - other.started_s) > _SAME_START_S


def find_launch(environment: Mapping[str, str]) -> Launch:
    """Of this process."""
    variable = next((name for name in _JOB_VARIABLES if environment.get(name, "none") not in ("", "none")), "")
    job, step = environment.get(variable, ""), environment.get("SLURM_STEP_ID", "")
    is_step = variable == "SLURM_JOB_ID" and step.isdigit()
    address, port = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "")
    size = environment.get("WORLD_SIZE", "")
    launcher, _, below = environment.get("TORCHELASTIC_ERROR_FILE", "").partition("/attempt_")
    return Launch(
        job=f"{job}.{step}" if is_step else job,
        exact=is_step or variable == "PMIX_NAMESPACE",
        meeting=f"{address}:{port}" if port else "",
        host=socket.gethostname(),
        launcher=launcher if below else "",
        started_s=parent_start_s(),
        world_size=int(size) if below and size.isdecimal() else None,
    )


def launch_name(launch: Launch, environment: Mapping[str, str]) -> str:
    """When it began, for names that sort, and the job's id, else where its ranks meet; of several nodes the id alone.

    Nodes know of one another's begin nothing. Of the ranks of one node torchrun made the folders at one moment.
    """
    begun_s, last = launch.started_s, launch.job or environment.get("MASTER_PORT", "")
    if launch.job:
        try:
            begun_s = Path(launch.launcher, "attempt_0").stat().st_mtime
        except OSError:
            return launch.job
        if environment.get("GROUP_WORLD_SIZE") != "1":
            return launch.job
    name = time.strftime("%Y%m%d-%H%M%S", time.localtime(begun_s))
    return f"{name}-{last}" if last else name


def attempt_number(environment: Mapping[str, str]) -> int:
    """Which start of an elastic or requeued job this is, from 0."""
    counts = (environment.get(variable, "") for variable in _ATTEMPT_VARIABLES)
    return next((int(count) for count in counts if count.isdecimal() and int(count)), 0)


def claim(root: Path, launch: Launch, *, restarted: bool = False) -> bool:
    """Whether ranks of `launch` may write into `root`: they have, or nobody has. Raises OSError: it cannot be made."""
    owner = _owner(root)
    if owner is None:
        ranks = itertools.chain(root.glob("rank*/"), root.glob("attempt*/rank*/"))
        if any(ranks) and _owner(root) is None:  # they leave the file first, so these are older, or one alone
            return False
        root.mkdir(parents=True, exist_ok=True)
        _leave(root / LAUNCH_FILE, msgspec.json.encode(launch))
        owner = _owner(root)
    return owner is None or not launch.is_other_than(owner, restarted=restarted)


def _leave(path: Path, data: bytes) -> None:
    """Write it whole and where there is none: of several ranks that come at once, one does."""
    beside = path.with_name(f"{path.name}-{secrets.token_hex(8)}")
    try:
        beside.write_bytes(data)
        os.link(beside, path)
    except OSError:  # there is one, or the file system knows no links
        with suppress(FileExistsError), path.open("xb") as file:
            file.write(data)
    finally:
        beside.unlink(missing_ok=True)


def _owner(root: Path) -> Launch | None:
    """What the first rank left; None if there is nothing, or nothing that can be read."""
    try:
        return msgspec.json.decode((root / LAUNCH_FILE).read_bytes(), type=Launch)
    except (OSError, ValueError, msgspec.DecodeError):
        return None


def parent_start_s() -> float | None:
    """When this process's parent started, in seconds since 1970; None where the system does not tell."""
    try:
        fields = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
        boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime"))
        return int(boot.split()[1]) + int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, StopIteration, AttributeError):
        return None
