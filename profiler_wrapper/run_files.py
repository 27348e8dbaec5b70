"""Which file of a run or a directory is meant: its result, its trace, the trace with shapes, what run.json says."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from profiler_wrapper.errors import BrokenTrace, WrongUse
from profiler_wrapper.recording.owned import read_holdings
from profiler_wrapper.recording.store import RESULT_FILE, RUN_FILE, check_run


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
        raise BrokenTrace(f"{path}: {len(runs)} runs are in it; name one: {', '.join(runs[:8])}")
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

    Raises:
        BrokenTrace: it is not what was written.
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
    """An object.

    Raises:
        BrokenTrace: the file holds none.
    """
    try:
        data = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise BrokenTrace(f"{path}: not JSON: {error}") from error
    if not isinstance(data, dict):
        raise BrokenTrace(f"{path}: a {type(data).__name__} where an object was expected")
    return data


def _same_name(one: str, other: str) -> bool:
    return one.removesuffix(".gz") == other.removesuffix(".gz")
