"""ProfileResult: what a profile says, live or from a file; and `load`, which makes one from any trace."""

from __future__ import annotations

import difflib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from profiler_wrapper.analysis.analyse import tables
from profiler_wrapper.analysis.attributed import Attributed, attributed
from profiler_wrapper.analysis.flop_formulas import has_formula
from profiler_wrapper.analysis.model import Analysis, LayerRow
from profiler_wrapper.analysis.op_bytes import has_rule
from profiler_wrapper.analysis.peaks import VARIABLE, Given
from profiler_wrapper.analysis.roofline import WorkCount, work_of_recording
from profiler_wrapper.analysis.series import Track
from profiler_wrapper.errors import BrokenTrace, UnknownLayer, WrongUse
from profiler_wrapper.recording.holdings import read_holdings
from profiler_wrapper.recording.reader import read, read_with_shapes
from profiler_wrapper.reports.full_table import full_table
from profiler_wrapper.reports.result_json import from_dict, to_dict
from profiler_wrapper.reports.tables import console_table

RESULT_FILE = "result.json"
RUN_FILE = "run.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileResult(Analysis):
    """Time, memory and FLOPs of every layer. `print(result)` shows the layer table."""

    def __str__(self) -> str:
        return console_table(self, unicode=_unicode_terminal())

    def table(self, *, order: Literal["cost", "model"] | None = None, rows: int = 25, width: int = 100) -> str:
        """Every table in full; with `order`, the layer table as printed, at most `rows` by `width`."""
        if order is None:
            return full_table(self)
        return console_table(self, rows=rows, width=width, order=order, unicode=_unicode_terminal())

    def layer(self, name: str) -> tuple[LayerRow, ...]:
        """The rows of one layer, a row a phase.

        Raises:
            UnknownLayer: no layer has this name; the message suggests the nearest.
        """
        found = self.rows(name)
        if not found:
            raise UnknownLayer(_unknown(name, sorted({row.layer for row in self.layers if row.layer})))
        return found

    def to_dict(self) -> dict[str, Any]:
        """What `result.json` holds: schema version 1, times in microseconds, sizes in bytes."""
        return to_dict(self)


def _unknown(name: str, layers: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, layers, n=1)
    hint = f"\nDid you mean {near[0]!r}?" if near else ""
    return f"no layer {name!r} among the {len(layers)} recorded.{hint}"


def _unicode_terminal() -> bool:
    encoding = getattr(sys.stdout, "encoding", None) or ""
    return sys.stdout.isatty() and encoding.lower().replace("-", "") == "utf8"


def as_result(analysis: Analysis) -> ProfileResult:
    """The same numbers as a `ProfileResult`."""
    return ProfileResult(**{field.name: getattr(analysis, field.name) for field in fields(Analysis)})


def attribute_trace(
    path: str | os.PathLike[str], *, run: Mapping[str, Any] | None = None, shapes: bool = True
) -> Attributed:
    """Read a trace, with shapes or without, and give every event of it a layer; `run` describes the run it is from."""
    if not shapes:
        return attributed(read(path), run=run)
    recording, recorded = read_with_shapes(path, _has_work)
    return attributed(recording, run=run, shapes=recorded)


def _has_work(op: str) -> bool:
    return has_formula(op) or has_rule(op)


def work_of_trace(path: str | os.PathLike[str], *, run: Mapping[str, Any] | None = None) -> WorkCount | str:
    """FLOPs and bytes as the trace with shapes tells them, which is not the timed one; or why it does not."""
    try:
        return work_of_recording(attribute_trace(path, run=run))
    except Exception as error:  # the times are known, and are worth more
        return f"the trace with shapes could not be analysed ({type(error).__name__}: {error})"


def analyse_trace(
    path: str | os.PathLike[str],
    *,
    run: Mapping[str, Any] | None = None,
    track: Sequence[Track] = (),
    peaks: Given | None = None,
) -> ProfileResult:
    """The result of one trace file; `run` describes the run it is from (run.json), `peaks` the device.

    Raises:
        BrokenTrace: the file is no trace.
        EmptyRecording: no event in it carries time.
        OSError: it cannot be read.
    """
    found = attribute_trace(path, run=run)
    full = trace_with_shapes(Path(path), run or {})
    work = work_of_trace(full, run=run) if full is not None and not (found.shapes and found.shapes.recorded) else None
    return as_result(tables(found, run=dict(run or {}), track=track, work=work, peaks=peaks))


def trace_with_shapes(trace: Path, run: Mapping[str, Any]) -> Path | None:
    """The trace with shapes that goes with the timed one; None where the run names none, or it is gone."""
    name = run.get("full_trace")
    if not isinstance(name, str) or not _same_name(str(run.get("trace")), trace.name):
        return None
    path = trace.parent / Path(name).name
    return path if path.is_file() else None


def _same_name(one: str, other: str) -> bool:
    return one.removesuffix(".gz") == other.removesuffix(".gz")


def load(path: str | os.PathLike[str], *, peaks: Given | None = None) -> ProfileResult:
    """The result of any torch.profiler trace, plain or gzipped, or of a run directory.

    Of a directory: the `result.json` in it, else its trace; of one with a directory per rank, the
    first rank's. With `peaks`, or PROFILER_WRAPPER_PEAK_TFLOPS in the environment, its trace, from which all shares
    of the peak are worked out anew.

    Args:
        path: of the trace or the directory.
        peaks: what the device can do, where no table knows it or another roof is wanted: dense TFLOP/s, by type
            (`{"bfloat16": 989, "bandwidth": 3350}` with GB/s, or the same as text), or the file that
            `python -m profiler_wrapper peaks --measure -o FILE` wrote.

    Raises:
        BrokenTrace: the file is no trace, or the directory holds none, or several runs.
        EmptyRecording: no event carries time.
        OSError: it cannot be read.
        WrongUse: `peaks` means none, or there is no trace to work shares of them out from.
    """
    path = Path(path)
    if path.is_dir():
        told = os.environ.get(VARIABLE) if peaks is None else peaks
        path = _result_or_trace(path, result=not told)
    if path.name == RESULT_FILE:
        if peaks is not None:
            raise WrongUse(f"{path}: peaks= needs the trace, from which the result was made. Give the trace.")
        return as_result(from_dict(_json(path)))
    return analyse_trace(path, run=run_beside(path), peaks=peaks)


def run_beside(trace: Path) -> dict[str, Any] | None:
    """What the run.json beside a trace says of it; what was held, only of the trace that it names. None without one.

    Raises:
        BrokenTrace: it is not what was written.
    """
    path = trace.parent / RUN_FILE
    if not path.is_file():
        return None
    run = _json(path)
    layers, compiled = run.get("layers", []), run.get("compiled", {})
    if not (isinstance(layers, list) and all(isinstance(layer, dict) for layer in layers)):
        raise BrokenTrace(f"{path}: its layers are not what was written. Delete it, and the trace is read alone.")
    if not isinstance(compiled, dict):
        raise BrokenTrace(f"{path}: its compiled is not what was written. Delete it, and the trace is read alone.")
    try:
        read_holdings(run.get("held"))
    except ValueError as error:
        raise BrokenTrace(
            f"{path}: its held is not what was written ({error}). Delete it, and the trace is read alone."
        ) from error
    if not _same_name(str(run.get("trace")), trace.name):
        run.pop("held", None)
    return run


def _json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise BrokenTrace(f"{path}: not JSON: {error}") from error
    if not isinstance(data, dict):
        raise BrokenTrace(f"{path}: a {type(data).__name__} where an object was expected")
    return data


def _result_or_trace(directory: Path, *, result: bool) -> Path:
    """The result file of a directory, its trace, or those of its first rank; without `result` a trace, if there is."""
    ranks = sorted(directory.glob("**/rank*/"), key=lambda p: (len(p.parts), _rank_number(p.name)))
    runs = sorted({rank.relative_to(directory).parts[0] for rank in ranks if rank.parent != directory})
    runs = [run for run in runs if not run.startswith("attempt")]
    if len(runs) > 1 and not any(directory.glob("rank*/")):
        raise BrokenTrace(f"{directory}: {len(runs)} runs are in it; name one: {', '.join(runs[:8])}")
    for place in (directory, *ranks):
        if result and (place / RESULT_FILE).is_file():
            return place / RESULT_FILE
        for pattern in ("*_trace.json", "*_trace.json.gz", "*.pt.trace.json", "*.pt.trace.json.gz"):
            traces = sorted(place.glob(pattern), key=lambda p: ("_full_trace" in p.name, p.name))
            if traces:
                return traces[0]
        if (place / RESULT_FILE).is_file():
            return place / RESULT_FILE
    raise BrokenTrace(f"{directory}: no {RESULT_FILE} and no trace in it")


def _rank_number(name: str) -> int:
    digits = "".join(c for c in name.removeprefix("rank").split("_")[0] if c.isdigit())
    return int(digits) if digits else 0
