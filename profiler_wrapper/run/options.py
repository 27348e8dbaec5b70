"""What a user asked `ProfilerWrapper` for, checked; and what the environment overrides."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, SupportsIndex, TypeVar

import numpy as np

from profiler_wrapper.analysis.work.peaks import VARIABLE, Given, find_peaks
from profiler_wrapper.capture.rank import RunInfo, given_coordinates
from profiler_wrapper.capture.steps import SWITCH, Plan, Shapes, is_off, make_plan
from profiler_wrapper.errors import WrongUse, tell
from profiler_wrapper.reports.write import REPORTS
from profiler_wrapper.trace.run_directory import given_directory, safe_name

PREFIXES = {True: "opensora", False: "cogvideo", None: "profile"}

# What `files=` may name, and what each is on disk.
FILES = {
    "trace": "<prefix>_trace.json",
    "full_trace": "<prefix>_full_trace.json",
    **{name: ", ".join(file.name for file in report.files) for name, report in REPORTS.items()},
}
Trace = Literal["json", "json.gz", False]
LOCAL_DIR_VARIABLE = "PROFILER_WRAPPER_LOCAL_DIR"
_FLAGS = (
    "profile_memory", "with_stack", "enabled_record_memory_pickle", "enabled_record_cuda_average_time",
    "enable_record_cuda_mm", "enable_print_summary", "background",
)  # fmt: skip
Value = TypeVar("Value")
FEW_RANKS = 8  # that are asked for by number: each of them writes the full set of files


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Everything about a profile but the model. Fields are `ProfilerWrapper`'s parameters."""

    is_st: bool | None = None
    prefix: str = "profile"
    run_name: str | None = None
    steps: Any = "auto"
    schedule: Callable[[int], Any] | None = None
    activities: tuple[Any, ...] | None = None
    profile_memory: bool = True
    record_shapes: Shapes = "auto"
    with_stack: bool = False
    output_dir: Path = Path("outputs")
    log_dir: Path | None = None
    mem_dir: Path | None = None
    files: frozenset[str] | Literal["auto", "all"] = "auto"
    trace: Trace | None = None  # None: plain, gzipped past 8 ranks
    enabled_record_memory_pickle: bool = False
    enabled_record_cuda_average_time: bool = True
    enable_record_cuda_mm: bool = True
    enable_print_summary: bool = True
    track: tuple[Any, ...] = ()
    layers: Any = "auto"
    rank: int | None = None
    device_mesh: Any = None
    peaks: Given | None = None  # as given here or in the environment; a file is read at once
    coordinates: Mapping[str, int] | None = None  # in the device mesh, as the user says
    ranks: frozenset[int] | None = None  # which ranks record at all; None: all
    local_dir: Path | None = None  # where files are written first; None: where they go
    background: bool = True  # while the loop goes on, windows are finished by a child process
    off: bool = False

    def with_absolute_paths(self) -> Options:
        """The same from now on, whatever directory the loop goes to."""
        return replace(
            self,
            output_dir=self.output_dir.absolute(),
            log_dir=self.log_dir and self.log_dir.absolute(),
            mem_dir=self.mem_dir and self.mem_dir.absolute(),
            local_dir=self.local_dir and self.local_dir.absolute(),
        )

    def plan(self) -> Plan:
        """What to record of which step."""
        return make_plan(self.steps, schedule=self.schedule, record_shapes=self.record_shapes)

    def is_first(self, info: RunInfo) -> bool:
        """Whether it is the first of the ranks that record: the one that speaks for all."""
        return info.rank == min(self.ranks or (0,))

    def writes_everything(self, info: RunInfo) -> bool:
        """Whether this rank writes the full set of files, where none are named."""
        chosen = self.ranks is not None and (len(self.ranks) <= FEW_RANKS or self.is_first(info))
        return chosen or info.writes_everything

    def of_several(self, info: RunInfo) -> bool:
        """Whether other ranks of the job record too."""
        return info.world_size > 1 and (self.ranks is None or sum(rank < info.world_size for rank in self.ranks) > 1)

    def shapes(self, *, warm_up: bool) -> bool:
        """Whether shapes are recorded in warm-up steps, or in timed ones."""
        return warm_up if self.record_shapes == "auto" else bool(self.record_shapes)


def make_options(
    *,
    prefix: str | None = None,
    is_st: bool | None = None,
    output_dir: str | os.PathLike[str] = "outputs",
    log_dir: str | os.PathLike[str] | None = None,
    mem_dir: str | os.PathLike[str] | None = None,
    files: str | Iterable[str] = "auto",
    track: Any = (),
    activities: Iterable[Any] | None = None,
    record_shapes: object = "auto",
    trace: object = None,
    peaks: Given | None = None,
    coordinates: object = None,
    ranks: object = None,
    local_dir: str | os.PathLike[str] | None = None,
    environment: Mapping[str, str] | None = None,
    **others: Any,
) -> Options:
    """Check what a user gave and what the environment says.

    Raises:
        WrongUse: a value that means nothing; the message says which values do.
    """
    if is_st is not None and not _is_flag(is_st):
        raise WrongUse(f"is_st={is_st!r} is neither True (opensora) nor False (cogvideo). Give one, or prefix='name'.")
    environment = os.environ if environment is None else environment
    options = Options(
        is_st=is_st,
        prefix=_prefix(PREFIXES[is_st] if prefix is None else prefix),
        output_dir=given_directory(output_dir, "output_dir"),
        log_dir=None if log_dir is None else given_directory(log_dir, "log_dir"),
        mem_dir=None if mem_dir is None else given_directory(mem_dir, "mem_dir"),
        files=_files(files),
        track=_track(track),
        activities=_activities(activities),
        record_shapes=_shapes(record_shapes),
        trace=_trace(trace),
        peaks=_of_environment(VARIABLE, _peaks, environment) if peaks is None else _peaks(peaks),
        coordinates=None if coordinates is None else given_coordinates(coordinates),
        ranks=None if ranks is None else _given_ranks(ranks),
        local_dir=_of_environment(LOCAL_DIR_VARIABLE, lambda path: given_directory(path, "path"), environment)
        if local_dir is None
        else given_directory(local_dir, "local_dir"),
        **others,
    )
    _check(options)
    return _of_environment(SWITCH, lambda text: _overridden(options, text), environment) or options


def _of_environment(name: str, read: Callable[[str], Value], environment: Mapping[str, str]) -> Value | None:
    """What a variable says; a slip in it is no error of the program that runs: a warning, and it is ignored."""
    text = environment.get(name, "").strip()
    if not text:
        return None
    try:
        return read(text)
    except WrongUse as error:
        tell(f"{name}={text!r} in the environment is ignored: {error}")
        return None


def _check(options: Options) -> None:
    for name in _FLAGS:
        if not _is_flag(getattr(options, name)):
            raise WrongUse(f"{name}={getattr(options, name)!r} means nothing here. Give True or False.")
    if options.run_name is not None and not isinstance(options.run_name, str):
        raise WrongUse(f"run_name={options.run_name!r} names no directory. Give a text, the same on all ranks.")
    if options.rank is not None and not (isinstance(options.rank, int) and options.rank >= 0):
        raise WrongUse(f"rank={options.rank!r} is no rank. Give a number from 0.")
    mesh = options.device_mesh
    if mesh is not None and not hasattr(mesh, "mesh_dim_names") and not hasattr(mesh, "get_rank"):
        raise WrongUse(f"device_mesh={mesh!r} is none. Give a torch.distributed.device_mesh.DeviceMesh.")
    options.plan()  # so that wrong steps are said here and not in the loop


def _is_flag(value: object) -> bool:
    """True or False, also as a number or numpy's."""
    return isinstance(value, (int, np.bool_)) and value in (0, 1)


def _prefix(prefix: object) -> str:
    if not isinstance(prefix, str) or not prefix:
        raise WrongUse(f"prefix={prefix!r} begins no file name. Give a text.")
    return safe_name(prefix, "profile")


def _files(files: str | Iterable[str]) -> frozenset[str] | Literal["auto", "all"]:
    if isinstance(files, str):
        if files in ("auto", "all"):
            return "all" if files == "all" else "auto"
        files = (files,)
    if not isinstance(files, Iterable):
        raise WrongUse(f"files={files!r} names no files. Give 'auto', 'all', or some of: {', '.join(FILES)}.")
    wanted = list(files)
    unknown = [name for name in wanted if not isinstance(name, str) or name not in FILES]
    if unknown:
        raise WrongUse(f"files names {unknown[0]!r}. Give 'auto', 'all', or some of: {', '.join(FILES)}.")
    return frozenset(wanted)


def _track(track: Any) -> tuple[Any, ...]:
    if isinstance(track, (str, re.Pattern)) or callable(track):
        track = (track,)
    found = tuple(track) if isinstance(track, Sequence) else (track,)
    for item in found:
        if not (isinstance(item, (str, re.Pattern)) or callable(item)):
            raise WrongUse(f"track holds {item!r}. Give names, regular expressions or functions.")
    return found


def _activities(activities: Iterable[Any] | None) -> tuple[Any, ...] | None:
    if activities is None:
        return None
    from torch.profiler import ProfilerActivity

    found = tuple(activities) if isinstance(activities, Iterable) else ()
    if not found or not all(isinstance(one, ProfilerActivity) for one in found):
        raise WrongUse(
            f"activities={activities!r} names nothing that torch.profiler records. "
            "Give some of torch.profiler.ProfilerActivity, or leave it out for all that the machine has."
        )
    return found


def _shapes(record_shapes: object) -> Shapes:
    if _is_flag(record_shapes):
        return bool(record_shapes)
    if isinstance(record_shapes, str) and record_shapes == "auto":
        return "auto"
    raise WrongUse(f"record_shapes={record_shapes!r} means nothing here. Give True, False or 'auto'.")


def _trace(trace: object) -> Trace | None:
    if trace is None or trace is True:
        return None
    if trace is False:
        return False
    if isinstance(trace, str) and trace in ("json", "json.gz"):
        return "json" if trace == "json" else "json.gz"
    raise WrongUse(f"trace={trace!r} means nothing here. Give 'json', 'json.gz' or False.")


def _peaks(peaks: Given) -> Given:
    """Checked; what a file says, in its place."""
    found, _ = find_peaks(None, given=peaks, environment={})
    is_file = isinstance(peaks, os.PathLike) or (isinstance(peaks, str) and Path(peaks).is_file())
    return found if is_file and found is not None else peaks


def _overridden(options: Options, text: str) -> Options:
    """`off`, or `steps=20-22,ranks=0`: a part without `=` goes on with the value before it."""
    if text in ("on", "1"):
        return options
    if is_off({SWITCH: text}):
        return replace(options, off=True)
    values: dict[str, list[str]] = {}
    name = ""
    for part in text.split(","):
        key, equals, value = part.partition("=")
        name = key.strip() if equals else name
        values.setdefault(name, []).append(value.strip() if equals else part.strip())
    unknown = sorted(set(values) - {"steps", "ranks"})
    if unknown:
        raise WrongUse(f"it names {unknown[0] or text!r}. Set it to off, or to something like steps=20-22,ranks=0.")
    if "steps" in values:
        options = replace(options, steps=",".join(values["steps"]), schedule=None)
        options.plan()
    if "ranks" in values:
        options = replace(options, ranks=_given_ranks(",".join(values["ranks"])))
    return options


def _given_ranks(ranks: object) -> frozenset[int]:
    """`0`, `"0-3,8"`, `[0, 8]` or a `range`."""
    found: set[int] = set()
    for part in _parts(ranks):
        match = re.fullmatch(r"([0-9]{1,7})(?:-([0-9]{1,7}))?", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise WrongUse(f"ranks={ranks!r}: {part!r} is no rank. Give a number, '0-3,8', or a list of numbers.")
        found |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(found)


def _parts(ranks: object) -> Sequence[str]:
    if isinstance(ranks, str):
        return [part.strip() for part in ranks.split(",")]
    numbers = ranks if isinstance(ranks, Iterable) else (ranks,)
    # A bool is no rank, though it is an int; nor is a number that is not whole.
    parts = [
        str(int(one)) if isinstance(one, SupportsIndex) and not isinstance(one, bool) else repr(one) for one in numbers
    ]
    return parts or [""]
