"""Which directory the ranks of one launch meet in. Each finds it alone: nobody waits, and nobody is asked.

A launch is one start of a job: `torchrun`, `srun`, `mpirun`, `torch.multiprocessing.spawn`, or a loop in a shell. The
first rank that comes leaves a file in the run's directory that tells its launch by what all ranks of it see alike.
Another launch of the same name finds that it is not its own, and goes beside it: nothing is overwritten.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

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
        meeting: address and port at which the ranks meet; "" where it is not told.
        host: the machine, on which the next two are the same for all ranks.
        launcher: the folder that torchrun made for this launch; "" without.
        started_s: when the process that started this one did, in seconds since 1970; None where nothing tells.
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
    job, exact = _job(environment)
    address, port = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "")
    size = environment.get("WORLD_SIZE", "")
    launcher, _, below = environment.get("TORCHELASTIC_ERROR_FILE", "").partition("/attempt_")
    return Launch(
        job=job,
        exact=exact,
        meeting=f"{address}:{port}" if port else "",
        host=socket.gethostname(),
        launcher=launcher if below else "",
        started_s=parent_start_s(),
        world_size=int(size) if below and size.isdecimal() else None,
    )


def launch_name(launch: Launch, environment: Mapping[str, str]) -> str:
    """The job's id; else the same on the ranks that one process launched: when it started, and where they meet."""
    if launch.job:
        return launch.job
    name = time.strftime("%Y%m%d-%H%M%S", time.localtime(launch.started_s))
    port = environment.get("MASTER_PORT", "")
    return f"{name}-{port}" if port else name


def attempt_number(environment: Mapping[str, str]) -> int:
    """Which start of an elastic or requeued job this is, from 0."""
    for variable in _ATTEMPT_VARIABLES:
        count = environment.get(variable, "")
        if count.isdecimal() and int(count) > 0:
            return int(count)
    return 0


def attempt_name(environment: Mapping[str, str]) -> str:
    """The directory of this attempt in the run's; "" for the first, which has none of its own."""
    number = attempt_number(environment)
    return f"attempt{number}" if number else ""


def claim(root: Path, launch: Launch, *, restarted: bool = False) -> bool:
    """Whether ranks of `launch` may write into `root`: nobody has yet, or they have.

    Raises:
        OSError: nothing can be written there.
    """
    told = _told(root)
    if told is None:
        if _has_ranks(root) and _told(root) is None:  # they leave the file first, so these are older, or one alone
            return False
        root.mkdir(parents=True, exist_ok=True)
        _leave(root / LAUNCH_FILE, launch)
        told = _told(root)
    return told is None or not launch.is_other_than(told, restarted=restarted)


def _has_ranks(root: Path) -> bool:
    return any(True for pattern in ("rank*/", "attempt*/rank*/") for _ in root.glob(pattern))


def _told(root: Path) -> Launch | None:
    """What the first rank left; None if there is nothing, or nothing that can be read."""
    try:
        told = json.loads((root / LAUNCH_FILE).read_bytes())
        return Launch(**{name: told[name] for name in Launch.__slots__ if name in told})
    except (OSError, ValueError, TypeError):
        return None


def _leave(path: Path, launch: Launch) -> None:
    """Write it whole and where there is none: of several ranks that come at once, one does."""
    beside = path.with_name(f"{path.name}-{secrets.token_hex(8)}")
    beside.write_text(json.dumps(asdict(launch)), encoding="utf-8")
    try:
        os.link(beside, path)
    except FileExistsError:
        pass
    except OSError:  # a file system without links
        with suppress(FileExistsError), path.open("x", encoding="utf-8") as file:
            file.write(json.dumps(asdict(launch)))
    finally:
        beside.unlink(missing_ok=True)


def job_name(environment: Mapping[str, str]) -> str:
    """The job's id; "" without one."""
    return _job(environment)[0]


def _job(environment: Mapping[str, str]) -> tuple[str, bool]:
    for variable in _JOB_VARIABLES:
        job = environment.get(variable, "")
        if job and job != "none":
            step = environment.get("SLURM_STEP_ID", "") if variable == "SLURM_JOB_ID" else ""
            return (f"{job}.{step}", True) if step.isdigit() else (job, variable == "PMIX_NAMESPACE")
    return "", False


def parent_start_s() -> float | None:
    """When this process's parent started, in seconds since 1970; None where the system does not tell."""
    try:
        fields = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
        boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime"))
        return int(boot.split()[1]) + int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, StopIteration, AttributeError):
        return None
