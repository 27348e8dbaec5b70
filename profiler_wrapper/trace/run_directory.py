"""A run on disk: where its files go, and writing them so that a file is either whole or not there.

    <output_dir>/<run>/[attempt<N>/]<rank>/[steps_<first>-<last>/]<file>

Nothing here waits for another rank: each writes only into its own directory. One of them writes the page above it.
Launches are kept apart by the file that its first rank leaves, see `run_roots`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypedDict
from urllib.parse import quote

import msgspec

from profiler_wrapper.errors import BrokenTrace, WrongUse, first_few, in_a_line, shown
from profiler_wrapper.trace.atomic import check_path, json_bytes, replacing

# --------------------------------------------------------------------------------------------------
# Takes files that were written on a node's own disk to where the run is kept.


class Carried(NamedTuple):
    """What came of it."""

    there: tuple[Path, ...]  # where they are now
    left: tuple[Path, ...]  # that could not be copied, and are where they were
    problem: str  # why not; "" if none is left


def carry(files: Iterable[Path], source: Path, target: Path) -> Carried:
    """Move files below `source` to the same places below `target`, each whole or not at all.

    A file is taken away only after its copy was read back at its end. Others below `source` stay: another window may be
    writing them.
    """
    there: list[Path] = []
    left: list[Path] = []
    problem = ""
    for path in files:
        copy = target / path.relative_to(source)
        try:
            with replacing(copy) as beside:
                shutil.copyfile(path, beside)
                if beside.stat().st_size != path.stat().st_size:
                    raise OSError(f"{beside.stat().st_size} of {path.stat().st_size} bytes were copied")
            path.unlink()
        except OSError as error:
            left.append(path)
            problem = problem or in_a_line(error)
        else:
            there.append(copy)
    return Carried(tuple(there), tuple(left), problem)


def remove_empty(directory: Path) -> None:
    """Take away the directories below `directory` in which nothing is, and itself."""
    below = sorted((path for path in directory.rglob("*") if path.is_dir()), reverse=True)
    for empty in (*below, directory):
        with suppress(OSError):
            empty.rmdir()


# --------------------------------------------------------------------------------------------------
# Which directory the ranks of one launch meet in. Each finds it alone: nobody waits, and nobody is asked.
#
# A launch is one start of a job: `torchrun`, `srun`, `mpirun`, `torch.multiprocessing.spawn`, or a loop in a shell. The
# first rank that comes leaves a file in the run's directory that tells its launch by what all ranks of it see alike.
# Another launch of the same name finds that it is not its own, and goes beside it: nothing is overwritten.

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
    for variable in _ATTEMPT_VARIABLES:
        count = environment.get(variable, "")
        if count.isdecimal() and int(count) > 0:
            return int(count)
    return 0


def claim(root: Path, launch: Launch, *, restarted: bool = False) -> bool:
    """Whether ranks of `launch` may write into `root`: they have, or nobody has. Raises OSError: it cannot be made."""
    owner = _owner(root)
    if owner is None:
        ranks = (rank for pattern in ("rank*/", "attempt*/rank*/") for rank in root.glob(pattern))
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
    except FileExistsError:
        pass
    except OSError:  # a file system without links
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


# --------------------------------------------------------------------------------------------------
# The files of one rank of one run.

RUN_FILE = "run.json"
RESULT_FILE = "result.json"
PAGE_FILE = "report.html"
RUN_NAME_VARIABLE = "PROFILER_WRAPPER_RUN"
_MOST_DIGITS = 20  # and sign: what 64 bits hold
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

    def write_run(self, info: Mapping[str, Any], *, complete: bool) -> Path:
        """Writes run.json: what is known of the run, and whether its files are all there. Raises OSError."""
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
    now: float | None = None,
) -> RunDirectory:
    """The directory for this rank's files, made now.

    The run is named by PROFILER_WRAPPER_RUN or `run_name`, else by the job's id, so that all ranks
    meet in it; else by the time: of the launcher's start if there are several ranks, of now if there
    is one. Nothing is written into twice: the second launch of a name, the second profile of a process,
    gets `<run>-2` on every rank.

    Raises OSError: the directory cannot be made.
    """
    prefix = safe_name(prefix, "profile")
    rank_name = safe_name(rank_name or f"rank{rank}", f"rank{rank}")
    for _, root in run_roots(
        output_dir, prefix=prefix, world_size=world_size, run_name=run_name, environment=environment, now=now
    ):
        with suppress(FileExistsError):  # this rank has been there
            (root / rank_name).mkdir()
            return RunDirectory(root, rank_name, prefix, rank)
    raise AssertionError("there is always another one")


class KVCacheLayers(TypedDict):
    """Layers of a cache that hold the same; sizes are those of one of them."""

    attention: str  # self, cross
    kind: str  # full, sliding, static, static sliding, quantized, state (of a layer without keys: it does not grow)
    count: int  # how many layers
    dtype: str  # type of its numbers
    window: int | None  # tokens that a sliding window spans; the cache keeps one less
    capacity: int | None  # tokens that a static cache has room for
    bytes: int  # keys and values, of all sequences
    held_bytes: int  # the memory behind them: more, where they are a part of a larger tensor
    bytes_per_token: int | None  # of one token of one sequence; null where that is not even


class KVCache(TypedDict):
    """The KV cache of a model, as the last call of a request left it."""

    root: str  # the model's label
    cache: str  # class of the cache
    requests: int  # in how many it was seen; this is the largest
    sequences: int | None  # rows of the batch, with beams
    beams: int  # of each
    tokens: int | None  # of each sequence; null where only values tell
    bytes_after_prefill: int | None  # null where the cache cannot be read
    bytes: int | None  # at the end
    bytes_per_token: int | None  # what one more token of every sequence adds
    layers: Sequence[KVCacheLayers]  # those that hold the same in one
    contexts: Sequence[Mapping[str, int | None]]  # {tokens, bytes}: what longer ones would take
    problem: str | None  # why it cannot be read


class Run(TypedDict, total=False):
    """What `run.json` and the `run` of a result say: where it was recorded, and what. There may be other keys."""

    timed_steps: Sequence[int]  # numbers of the steps whose times are reported
    full_steps: Sequence[int]  # numbers of the steps whose shapes were recorded
    step_source: str | None  # what ended a step: prof.step(), optimizer, updates, requests, root calls; None: nothing
    left_out: Sequence[Mapping[str, Any]]  # {what, count, time_us} of what ran before, or between, the timed steps
    kv_cache: Sequence[KVCache]  # of each root, where requests were recorded: the largest that one of them had
    evaluated_steps: Sequence[int]  # recorded, and in no figure: a model that learns was evaluated in them
    trace: str | None  # file of the timed trace
    full_trace: str | None  # file of the trace with shapes
    rank: int  # rank of the process
    world_size: int  # number of ranks
    local_rank: int | None  # rank among those of its host; None where nobody tells
    host: str  # name of the machine
    process: int  # number of the process on its host
    attempt: int  # which start of an elastic or requeued job this is, from 0
    stages: Sequence[int]  # stages of the pipeline that this rank holds, where they are known
    recorded_ranks: Sequence[int] | None  # ranks that were asked for; None for all
    window_begin_ns: int | None  # when recording began, since 1970 by the clock of the host; None: not known
    window_end_ns: int | None  # when it ended
    coordinates: Mapping[str, int]  # place in the device mesh, by dimension: dp, tp, pp ...
    device: str | None  # name of the device; None without one
    device_type: str  # cpu, cuda ...
    cpu_name: str  # name of the CPU, and the threads that ops use
    versions: Mapping[str, str | int]  # versions by name: torch, python, cuda ...
    environment: Mapping[str, str]  # variables that change how fast it runs, as OMP_NUM_THREADS; empty: not set
    float32_matmul_precision: str | None  # torch.get_float32_matmul_precision()
    prefix: str  # of the file names
    complete: bool  # False where recording was cut short
    warnings: Sequence[str]  # what is not as asked for, or not known
    layers: Sequence[Mapping[str, Any]]  # what is known of each layer of the model, in its order
    compiled: Mapping[str, Any]  # layers of compiled code, by its graphs
    cpu_frees_unsure: bool  # on a CPU, whether frees of what was there before may be missing
    frees_unseen: bool  # whether threads that were not recorded may have freed memory
    peaks: Mapping[str, Any]  # what the device can do, as it was given
    optimizers: Sequence[Mapping[str, Any]]  # class and settings of each optimizer
    parameters: Mapping[str, Any]  # how many there are, of which types
    wrappers: Sequence[str]  # classes that wrap the model: DistributedDataParallel ...
    attention_implementation: str | None  # as the model is configured: sdpa, eager, flash_attention_2 ...
    attention_backends: Mapping[str, bool]  # backends of scaled-dot-product attention, and whether they are allowed
    free_memory_bytes: int | None  # what the machine still had for this process at the end
    process_group_backend: str | None  # nccl, gloo ...; None without a process group
    device_count: int | None  # devices that this process could use
    device_memory_bytes: int | None  # memory of the device
    compute_capability: Sequence[int] | None  # of the device: 9, 0
    tf32: Mapping[str, Any] | None  # whether products and convolutions of float32 may use TF32
    cudnn: Mapping[str, Any] | None  # its settings: benchmark, deterministic
    allocator_settings: str | None  # of the caching allocator, as the environment has them
    graph_breaks: Sequence[Mapping[str, Any]] | None  # where torch.compile broke its graph, and why


def check_run(run: Mapping[str, Any]) -> None:
    """Raises ValueError, with the key, where a run's description is not what was written."""
    known = {key: value for key, value in run.items() if value is not None}
    try:
        msgspec.convert(known, Run)
    except (msgspec.ValidationError, ValueError) as error:  # ValueError: a text that is none, of half a character
        raise ValueError(str(error)) from error


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
    """A directory as a user gives it, `~` resolved. Raises WrongUse: it can be none."""
    try:
        found = Path(path).expanduser()  # type: ignore[arg-type]
    except TypeError:
        raise WrongUse(f"{parameter}={shown(path)} is no directory. Give a path.") from None
    except RuntimeError as error:  # of a user who is not known
        raise WrongUse(f"{parameter}={shown(path)} is no directory: {error}") from error
    check_path(found)
    return found


# --- names of runs ---


def run_roots(
    output_dir: str | os.PathLike[str],
    *,
    prefix: str,
    world_size: int,
    run_name: str | None,
    environment: Mapping[str, str],
    now: float | None = None,
) -> Iterator[tuple[Path, Path]]:
    """Runs in which this process may write, and where in each, the first place first, without end; made, if need be.

    `<run>/[attempt<N>]`, then `<run>-2/[attempt<N>]` ...: all ranks of a launch find the same, those of another
    launch of the same name others. A process that is alone, without a name, has a run of its own, named by the time.

    Raises OSError: nothing can be written there.
    """
    parent = Path(output_dir).expanduser()
    launch, number = find_launch(environment), attempt_number(environment)
    attempt = f"attempt{number}" if number else ""  # the first has no directory of its own
    named = environment.get(RUN_NAME_VARIABLE) or run_name
    if not (named or launch.job or world_size > 1):
        parent.mkdir(parents=True, exist_ok=True)  # where that fails, as behind a dangling link, no other name helps
        for run in numbered(parent / f"{prefix}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}"):
            with suppress(FileExistsError):
                run.mkdir()
                yield run, run
    name = safe_name(named or f"{prefix}-{launch_name(launch, environment)}", prefix)
    for run in numbered(parent / name):
        root = run / attempt
        if claim(run, launch, restarted=bool(attempt)) and (not attempt or claim(root, launch)):
            yield run, root


def numbered(root: Path) -> Iterator[Path]:
    """`root`, `root-2`, `root-3` ..."""
    for number in itertools.count(1):
        yield root if number == 1 else root.with_name(f"{root.name}-{number}")


# --------------------------------------------------------------------------------------------------
# The tensors that the model and its optimizers own, and compiled graphs, as run.json has them.
#
# `held`:
#
#     [{"time_ns": unix time, "tensors": {device: [[address, bytes, category, name], ...]}}, ...]
#
# in order of time: one entry when the recording begins, one before each step of an optimizer (gradients) and
# one after it (state, if that is other than before), one when it ends. A category is params, grads, os_params
# or os_state. `address` is where the storage begins, `bytes` how long it is; storages that several tensors
# share are listed once. What is not listed at one moment may be held all the same: only the first and the last
# entry list everything, and the first knows no optimizer that has made no step yet. What the list does not
# know it leaves out; it is empty where nothing is known.
#
# Of compiled code, per Inductor graph, by its cache key, which modules each kernel works for:
#
#     {"kernels": [[name, is_extern, phase, [number of a module, ...]], ...],     in the order of the calls
#      "inside": [[root, path, [full name of each module, by number]], ...]}      the layers that it may run in
#
# A module without a kernel ran as well, but nothing of it is left. Instead of all that, why a graph's kernels are
# not known.

_Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class HeldTensor(NamedTuple):
    """A storage that the model or an optimizer holds."""

    address: _Number
    size_bytes: _Number
    category: str  # params, grads, os_params, os_state
    name: str  # full name of the parameter or buffer; "exp_avg of <name>" for state; "master of <name>"


@dataclass(frozen=True, slots=True)
class Holding:
    """What was held at one moment."""

    time_ns: _Number  # unix time
    tensors: Mapping[str, tuple[HeldTensor, ...]]  # by device: "cpu", "cuda:0"


def holdings_to_list(holdings: Sequence[Holding]) -> list[dict[str, Any]]:
    """As run.json has it."""
    found: list[dict[str, Any]] = msgspec.to_builtins(list(holdings))
    return found


def read_holdings(held: object) -> tuple[Holding, ...]:
    """What a run says of it; empty where it says nothing. Raises ValueError: it is not what was written."""
    try:
        return msgspec.convert(() if held is None else held, tuple[Holding, ...])
    except (msgspec.ValidationError, OverflowError) as error:
        raise ValueError(f"held: {error}") from error


# --------------------------------------------------------------------------------------------------
# Which file of a run or a directory is meant: its result, its trace, the trace with shapes, what run.json says.


def find_result(path: Path, *, rank: int | None = None, with_trace: bool = False) -> Path:
    """The file to read for `path`: itself, or of a directory its result, else its trace, else those of its first rank.

    Of a job that was started again the last attempt counts. `rank`: of a run, that rank's. `with_trace`: a trace, if
    there is any.

    Raises:
        BrokenTrace: the directory holds no result and no trace, or several runs.
        WrongUse: it holds nothing of `rank`, `path` is no directory, or `rank` is below 0.
    """
    if rank is not None and rank < 0:
        raise WrongUse(f"rank {rank}: ranks are numbered from 0.")
    if not path.is_dir():
        if rank is not None:
            raise WrongUse(f"{path}: is no directory of a run, so it has no rank {rank}. Give the run's directory.")
        return path
    ranks = sorted(path.glob("**/rank*/"), key=lambda p: (-_attempt(p, path), len(p.parts), rank_number(p.name)))
    runs = sorted({place.relative_to(path).parts[0] for place in ranks if place.parent != path})
    runs = [run for run in runs if not run.startswith("attempt")]
    if len(runs) > 1 and not any(path.glob("rank*/")):
        raise BrokenTrace(f"{path}: {len(runs)} runs are in it; name one: {first_few(runs, 8)}")
    places = (path, *ranks)
    if rank is not None:
        places = tuple(place for place in (*ranks, path.resolve()) if rank_number(place.name) == rank)
        if not places:
            known = ", ".join(dict.fromkeys(str(rank_number(place.name)) for place in ranks)) or "none"
            raise WrongUse(f"{path}: nothing of rank {rank} is in it; ranks: {known}")
    for place in places:
        if not with_trace and (place / RESULT_FILE).is_file():
            return place / RESULT_FILE
        for pattern in ("*_trace.json", "*_trace.json.gz", "*.pt.trace.json", "*.pt.trace.json.gz"):
            traces = sorted(place.glob(pattern), key=lambda p: ("_full_trace" in p.name, p.name))
            if traces:
                return traces[0]
        if (place / RESULT_FILE).is_file():
            return place / RESULT_FILE
    timers = any(path.glob("**/timer_rank*.jsonl"))
    instead = "; its timers are read by `profiler-wrapper ranks`, or pw.load_ranks(path)" if timers else ""
    raise BrokenTrace(f"{path}: no {RESULT_FILE} and no trace in it{instead}")


def rank_number(name: str) -> int:
    """`"rank3_dp1"` -> 3; -1 for what is no rank's directory."""
    digits = name.removeprefix("rank").split("_")[0]
    return int(digits) if name.startswith("rank") and digits.isdecimal() else -1


def _attempt(place: Path, run: Path) -> int:
    """Which start of the job a rank's directory is of."""
    numbers = (part.removeprefix("attempt") for part in place.relative_to(run).parts if part.startswith("attempt"))
    return max((int(number) for number in numbers if number.isdecimal()), default=0)


def trace_beside(directory: Path, run: Mapping[str, Any]) -> Path | None:
    """The timed trace that a run's description names; None where it names none, or it is gone."""
    name = run.get("trace")
    path = directory / Path(name).name if isinstance(name, str) and name else None
    return path if path is not None and path.is_file() else None


def trace_with_shapes(trace: Path, run: Mapping[str, Any]) -> Path | None:
    """The trace with shapes that goes with the timed one; None where the run names none, or it is gone."""
    name = run.get("full_trace")
    if not isinstance(name, str) or not _same_name(str(run.get("trace")), trace.name):
        return None
    path = trace.parent / Path(name).name
    return path if path.is_file() else None


def run_beside(trace: Path) -> dict[str, Any] | None:
    """What the run.json beside a trace says of it; what was held, only of the trace that it names. None without one.

    Raises BrokenTrace: it is not what was written.
    """
    path = trace.parent / RUN_FILE
    if not path.is_file():
        return None
    run = read_json(path)
    try:
        check_run(run)
        read_holdings(run.get("held"))
    except ValueError as error:
        raise BrokenTrace(f"{path}: not what was written: {error}. Delete it, and the trace is read alone.") from error
    if not _same_name(str(run.get("trace")), trace.name):
        run.pop("held", None)
    return run


def href(file: Path, *, page: Path) -> str:
    """The link from a page to a file: relative, so that both can be moved together, where a path leads there."""
    try:
        relative = os.path.relpath(file.resolve(), page.parent.resolve())
    except ValueError:  # on another drive
        return file.resolve().as_uri()
    return quote(Path(relative).as_posix())


def read_json(path: Path) -> dict[str, Any]:
    """An object. Raises BrokenTrace: the file holds none."""
    try:
        data = json.loads(path.read_bytes(), parse_int=_whole_number)
    except (ValueError, RecursionError) as error:
        raise BrokenTrace(f"{path}: not JSON: {error}") from error
    if not isinstance(data, dict):
        raise BrokenTrace(f"{path}: a {type(data).__name__} where an object was expected")
    return data


def _whole_number(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _same_name(one: str, other: str) -> bool:
    return one.removesuffix(".gz") == other.removesuffix(".gz")
