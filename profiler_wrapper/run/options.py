"""What a user asked `ProfilerWrapper` for, checked; and what the environment overrides."""

# ruff: noqa: RUF009

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, SupportsIndex

import numpy as np

from profiler_wrapper.capture.records import RunInfo, given_coordinates
from profiler_wrapper.capture.steps import SWITCH, Plan, Shapes, is_off, make_plan
from profiler_wrapper.errors import WrongUse, shown, warn
from profiler_wrapper.reports.write import REPORTS
from profiler_wrapper.tables.work.peaks import VARIABLE, Given, find_peaks
from profiler_wrapper.trace.run_directory import given_directory, safe_name
from profiler_wrapper.trace.spans import parse_ranks

_PREFIXES = {True: "opensora", False: "cogvideo", None: "profile"}

# What `files=` may name, and what each is on disk.
FILES = {
    "trace": "<prefix>_trace.json",
    "full_trace": "<prefix>_full_trace.json",
    **{name: ", ".join(file.name for file in report.files) for name, report in REPORTS.items()},
}
Trace = Literal["json", "json.gz", False]
LOCAL_DIR_VARIABLE = "PROFILER_WRAPPER_LOCAL_DIR"
FEW_RANKS = 8  # that are asked for by number: each of them writes the full set of files


# --- what a value has to be, and what is made of it ---


def _is_flag(value: object) -> bool:
    """True or False, also as a number or numpy's."""
    return isinstance(value, (int, np.bool_)) and value in (0, 1)


def _files(files: str | Iterable[str]) -> frozenset[str] | Literal["auto", "all"]:
    if isinstance(files, str):
        if files in ("auto", "all"):
            return "all" if files == "all" else "auto"
        files = [name.strip() for name in files.split(",")]
    if not isinstance(files, Iterable):
        raise WrongUse(f"files={shown(files)} names no files. Give 'auto', 'all', or some of: {', '.join(FILES)}.")
    wanted = list(files)
    unknown = [name for name in wanted if not isinstance(name, str) or name not in FILES]
    if unknown:
        raise WrongUse(f"files={shown(unknown[0])} names no file. Give 'auto', 'all', or some of: {', '.join(FILES)}.")
    return frozenset(wanted)


def _track(track: Any) -> tuple[Any, ...]:
    if isinstance(track, (str, re.Pattern)) or callable(track):
        track = (track,)
    found = tuple(track) if isinstance(track, Sequence) else (track,)
    for item in found:
        if not (isinstance(item, (str, re.Pattern)) or callable(item)):
            raise WrongUse(f"track holds {shown(item)}. Give names, regular expressions or functions.")
    return found


def _activities(activities: object) -> tuple[Any, ...]:
    from torch.profiler import ProfilerActivity

    found = tuple(activities) if isinstance(activities, Iterable) else ()
    if not found or not all(isinstance(one, ProfilerActivity) for one in found):
        raise WrongUse(
            f"activities={shown(activities)} names nothing that torch.profiler records. "
            "Give some of torch.profiler.ProfilerActivity, or leave it out for all that the machine has."
        )
    return found


def _peaks(peaks: Given) -> Given:
    """Checked; what a file says, in its place."""
    found, _ = find_peaks(None, given=peaks, environment={})
    is_file = isinstance(peaks, os.PathLike) or (isinstance(peaks, str) and Path(peaks).is_file())
    return found if is_file and found is not None else peaks


def _ranks(ranks: object) -> frozenset[int]:
    """`0`, `"0-3,8"`, `[0, 8]` or a `range`."""
    if not isinstance(ranks, str):
        numbers = ranks if isinstance(ranks, Iterable) else (ranks,)
        # A bool is no rank, though it is an int; nor is a number that is not whole.
        texts = (
            str(int(one)) if isinstance(one, SupportsIndex) and not isinstance(one, bool) else shown(one)
            for one in numbers
        )
        ranks = ",".join(texts)
    return frozenset(parse_ranks(ranks, option="ranks="))


# --- the options ---


def _option(
    default: Any,
    means_something: Callable[[Any], object] | None = None,
    advice: str = "",
    *,
    convert: Callable[[Any], Any] | None = None,
) -> Any:
    """An option of a profile: what a value has to be, what is said of others, and what is made of it.

    `convert`, too, raises WrongUse for what means nothing. A default of None may be given as well.
    """
    return field(default=default, metadata={"check": means_something, "advice": advice, "convert": convert})


def _flag(default: bool) -> Any:
    return _option(default, _is_flag, "means nothing here. Give True or False.")


def _directory(name: str, default: Path | None = None) -> Any:
    return _option(default, convert=partial(given_directory, parameter=name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Everything about a profile but the model: `ProfilerWrapper`'s parameters, checked."""

    is_st: bool | None = _option(
        None, _is_flag, "is neither True (opensora) nor False (cogvideo). Give one, or prefix='name'."
    )
    prefix: str = _option(
        "profile",
        lambda value: value is None or (isinstance(value, str) and value),
        "begins no file name. Give a text.",
        convert=lambda value: value and safe_name(value, "profile"),
    )
    run_name: str | None = _option(
        None, lambda value: isinstance(value, str), "names no directory. Give a text, the same on all ranks."
    )
    steps: Any = "auto"
    schedule: Callable[[int], Any] | None = None
    activities: tuple[Any, ...] | None = _option(None, convert=_activities)
    profile_memory: bool = _flag(True)
    record_shapes: Shapes = _option(
        "auto",
        lambda value: _is_flag(value) or (isinstance(value, str) and value == "auto"),
        "means nothing here. Give True, False or 'auto'.",
        convert=lambda value: value if isinstance(value, str) else bool(value),
    )
    with_stack: bool = _flag(False)
    output_dir: Path = _directory("output_dir", Path("outputs"))
    log_dir: Path | None = _directory("log_dir")
    mem_dir: Path | None = _directory("mem_dir")
    files: frozenset[str] | Literal["auto", "all"] = _option("auto", convert=_files)
    trace: Trace | None = _option(  # None: plain, gzipped past 8 ranks
        None,
        lambda value: isinstance(value, bool) or (isinstance(value, str) and value in ("json", "json.gz")),
        "means nothing here. Give 'json', 'json.gz' or False.",
        convert=lambda value: None if value is True else value,
    )
    enabled_record_memory_pickle: bool = _flag(False)
    enabled_record_cuda_average_time: bool = _flag(True)
    enable_record_cuda_mm: bool = _flag(True)
    enable_print_summary: bool = _flag(True)
    track: tuple[Any, ...] = _option((), convert=_track)
    layers: Any = "auto"
    rank: int | None = _option(
        None, lambda value: isinstance(value, int) and value >= 0, "is no rank. Give a number from 0."
    )
    device_mesh: Any = _option(
        None,
        lambda value: hasattr(value, "mesh_dim_names") or hasattr(value, "get_rank"),
        "is none. Give a torch.distributed.device_mesh.DeviceMesh.",
    )
    peaks: Given | None = _option(None, convert=_peaks)  # as given here or in the environment; a file is read at once
    coordinates: Mapping[str, int] | None = _option(None, convert=given_coordinates)  # in the mesh, as the user says
    ranks: frozenset[int] | None = _option(None, convert=_ranks)  # which ranks record at all; None: all
    local_dir: Path | None = _directory("local_dir")  # where files are written first; None: where they go
    background: bool = _flag(True)  # while the loop goes on, windows are finished by a child process
    off: bool = False
    from_outside: bool = False  # by `run`: stdout is the script's, and a ProfilerWrapper of its own comes first

    def with_absolute_paths(self, directory: Path = Path()) -> Options:
        """The same from now on, whatever directory the loop goes to; `directory`: that of paths that are relative."""
        places = {name: getattr(self, name) for name in ("output_dir", "log_dir", "mem_dir", "local_dir")}
        return replace(self, **{name: path and (directory / path).absolute() for name, path in places.items()})

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


OPTIONS = {option.name: option for option in fields(Options)}


def make_options(*, environment: Mapping[str, str] | None = None, **given: Any) -> Options:
    """Check what a user gave, by the names of `Options`' fields, and what the environment says. Raises WrongUse."""
    environment = os.environ if environment is None else environment
    values = {name: _checked(name, value) for name, value in given.items()}
    if values.get("prefix") is None:
        values["prefix"] = _PREFIXES[values.get("is_st")]
    for name, variable in (("peaks", VARIABLE), ("local_dir", LOCAL_DIR_VARIABLE)):
        if values.get(name) is None:
            values[name] = _of_environment(variable, partial(_checked, name), environment)
    options = Options(**values)
    options.plan()  # so that wrong steps are said here and not in the loop
    return _of_environment(SWITCH, partial(_overridden, options), environment) or options


def _checked(name: str, value: Any) -> Any:
    option = OPTIONS[name]
    if value is None and option.default is None:
        return None
    check, convert = option.metadata.get("check"), option.metadata.get("convert")
    if check is not None and not check(value):
        raise WrongUse(f"{name}={shown(value)} {option.metadata['advice']}")
    return value if convert is None else convert(value)


def _of_environment(name: str, read: Callable[[str], Any], environment: Mapping[str, str]) -> Any:
    """What a variable says; a slip in it is no error of the program that runs: a warning, and it is ignored."""
    text = environment.get(name, "").strip()
    if not text:
        return None
    try:
        return read(text)
    except WrongUse as error:
        warn(f"{name}={shown(text)} in the environment is ignored: {error}")
        return None


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
    if unknown := sorted(set(values) - {"steps", "ranks"}):
        raise WrongUse(f"it names {shown(unknown[0] or text)}. Set it to off, or to steps=20-22,ranks=0.")
    if "steps" in values:
        options = replace(options, steps=",".join(values["steps"]), schedule=None)
        options.plan()
    if "ranks" in values:
        options = replace(options, ranks=_ranks(",".join(values["ranks"])))
    return options
