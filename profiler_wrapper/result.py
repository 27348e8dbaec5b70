"""ProfileResult: what a profile says, live or from a file; and `load`, which makes one from any trace."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from profiler_wrapper.analyse import MADE_LATER, first_tables, tables
from profiler_wrapper.capture.growth import free_bytes
from profiler_wrapper.errors import UnknownLayer, WrongUse, in_a_line, shown, warn
from profiler_wrapper.place.attention_ops import HOLDING_ATTENTION
from profiler_wrapper.place.placed import Placed, place_events
from profiler_wrapper.reports.full_table import full_table
from profiler_wrapper.reports.page import result_html
from profiler_wrapper.reports.result_json import data_frame, from_dict, to_dict, write_csv, write_csv_files
from profiler_wrapper.reports.table import console_table
from profiler_wrapper.tables.deferred import defer
from profiler_wrapper.tables.layer_calls import layer_calls
from profiler_wrapper.tables.model import Analysis, LayerRow
from profiler_wrapper.tables.time_rows import Track
from profiler_wrapper.tables.timeline import timeline_or_why
from profiler_wrapper.tables.timeline_columns import FAILED, NO_TRACE_BESIDE, OTHER_TRACE, Timeline
from profiler_wrapper.tables.views.experts import CHOOSING
from profiler_wrapper.tables.work.bytes import has_rule
from profiler_wrapper.tables.work.formulas import has_formula
from profiler_wrapper.tables.work.peaks import VARIABLE, Given
from profiler_wrapper.tables.work.roofline import WorkCount, work_of_recording
from profiler_wrapper.terminal import unicode_terminal
from profiler_wrapper.trace.atomic import check_path
from profiler_wrapper.trace.events import Progress, no_garbage_collection
from profiler_wrapper.trace.rank_files import find_result
from profiler_wrapper.trace.reader import read, read_with_shapes
from profiler_wrapper.trace.run_directory import RESULT_FILE
from profiler_wrapper.trace.run_file import read_json, run_beside, trace_beside, trace_with_shapes
from profiler_wrapper.units import file_size

if TYPE_CHECKING:
    import pandas as pd

    from profiler_wrapper.ranks.report import RanksReport


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileResult(Analysis):
    """Time, memory and FLOPs of every layer. `print(result)` shows the layer table."""

    source: Path | None = field(default=None, compare=False, repr=False)  # what it was loaded from
    _ranks: list[RanksReport] = field(default_factory=list, compare=False, repr=False)  # once it was asked for

    @property
    def ranks(self) -> RanksReport | None:
        """All ranks of the run beside one another, made when first asked for; None where there is but one.

        Raises:
            BrokenTrace, EmptyRecording, MissingPackage, OSError: as `load_ranks`.
        """
        if not self._ranks and self.source is not None:
            from profiler_wrapper.ranks.load import load_ranks, run_of

            run = run_of(self.source)
            if run is not None:
                self._ranks.append(load_ranks(run))
        return self._ranks[0] if self._ranks else None

    def __str__(self) -> str:
        return console_table(self, unicode=unicode_terminal())

    def table(self, *, order: Literal["cost", "model"] | None = None, rows: int = 25, width: int = 100) -> str:
        """Every table in full; with `order`, the layer table as printed, at most `rows` by `width`."""
        if order is None:
            return full_table(self)
        return console_table(self, rows=rows, width=width, order=order, unicode=unicode_terminal())

    def layer(self, name: str) -> tuple[LayerRow, ...]:
        """The rows of one layer, a row a phase.

        Raises:
            UnknownLayer: no layer has this name; the message suggests the nearest.
        """
        found = self.rows(name)
        if not found:
            layers = sorted({row.layer for row in self.layers if row.layer})
            near = difflib.get_close_matches(name, layers, n=1)
            hint = f"\nDid you mean {shown(near[0])}?" if near else ""
            raise UnknownLayer(f"no layer {shown(name)} among the {len(layers)} recorded.{hint}")
        return found

    def to_dict(self) -> dict[str, Any]:
        """What `result.json` holds: schema version 1, times in microseconds, sizes in bytes."""
        return to_dict(self)

    def to_csv(self, path: str | os.PathLike[str], rows: str = "layers") -> tuple[Path, ...]:
        """Write one list (`"layers"`, `"operators"`, `"kernels"` ...) to `path`; every list, if that is a directory.

        A path without `.csv` at its end is a directory, which is made. Columns and units are those of `result.json`.
        A name that a spreadsheet would take for a formula gets an apostrophe before it.

        Returns:
            The files.

        Raises:
            OSError: a file cannot be written.
            WrongUse: a result has no such list.
        """
        path = Path(path)
        if path.suffix.lower() != ".csv":
            return write_csv_files(self, path)
        write_csv(self, path, rows)
        return (path,)

    def to_pandas(self, rows: str = "layers") -> pd.DataFrame:
        """One list of rows as a data frame, columns and units as in `result.json`.

        The lists: unattributed, layers, attention, classes, steps, flops, uncounted, untold_bytes, operators, kernels,
        collectives, synchronisations, products, attention_calls, experts, expert_layers, adapters, allocations and
        op_memory. Other parts of a result are no rows: `result.warnings` are texts, `result.memory` and
        `result.summary` mappings.

        Raises:
            MissingPackage: pandas is not installed.
            WrongUse: a result has no such list.
        """
        return data_frame(self, rows)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What IPython shows on a terminal: the layer table."""
        printer.text(str(self))

    def _repr_html_(self) -> str:
        """What a notebook shows: the verdict, the first findings, the layer table."""
        return result_html(self)


_MOST_UNPACKED = 20  # times the size of a gzipped trace; of tested ones 11 to 19


def as_result(analysis: Analysis, source: Path | None = None) -> ProfileResult:
    """Return the same numbers as a `ProfileResult`."""
    return ProfileResult(**{field.name: getattr(analysis, field.name) for field in fields(Analysis)}, source=source)


def attribute_trace(
    path: str | os.PathLike[str],
    *,
    run: Mapping[str, Any] | None = None,
    shapes: bool = True,
    process: int | str | None = None,
    progress: Progress | None = None,
) -> Placed:
    """Read a trace, with shapes or without, and give every event of it a layer; `run` describes the run it is from."""
    if not shapes:
        return place_events(read(path, process=process, progress=progress), run=run)
    recording, recorded = read_with_shapes(path, _has_work, process=process, progress=progress)
    return place_events(recording, run=run, shapes=recorded)


def _has_work(op: str) -> bool:
    return has_formula(op) or has_rule(op) or op in HOLDING_ATTENTION or op == CHOOSING


def work_of_trace(
    path: str | os.PathLike[str],
    *,
    timed: Placed,
    run: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> WorkCount | str:
    """FLOPs and bytes of a step of the timed trace, as another one with shapes tells them; or why it does not."""
    try:
        return work_of_recording(attribute_trace(path, run=run, progress=progress), timed)
    except Exception as error:  # the times are known, and are worth more
        return f"the trace with shapes could not be analysed ({in_a_line(error)})"


@no_garbage_collection()
def analyse_trace(
    path: str | os.PathLike[str],
    *,
    run: Mapping[str, Any] | None = None,
    track: Sequence[Track] = (),
    peaks: Given | None = None,
    process: int | str | None = None,
    progress: Progress | None = None,
    timeline: bool = False,
    source: Path | None = None,
) -> ProfileResult:
    """Return the result of one trace file; `run` describes the run it is from (run.json), `peaks` the device.

    What `MADE_LATER` lists is made when first read; until then the result holds the events of the trace in memory.

    Raises:
        BrokenTrace: the file is no trace.
        EmptyRecording: no event in it carries time.
        OSError: it cannot be read.
    """
    found = attribute_trace(path, run=run, process=process, progress=progress)
    full = trace_with_shapes(Path(path), run or {})
    if found.shapes and found.shapes.recorded:
        full = None
    work = None if full is None else work_of_trace(full, run=run, timed=found, progress=progress)
    asked: dict[str, Any] = {"run": dict(run or {}), "track": track, "work": work, "peaks": peaks}
    if timeline:
        return as_result(tables(found, timeline=True, **asked), source)
    first, make_all = first_tables(found, **asked)
    result = as_result(first, source)
    defer(result, MADE_LATER, no_garbage_collection()(make_all))
    return result


def load(
    path: str | os.PathLike[str],
    *,
    peaks: Given | None = None,
    rank: int | None = None,
    process: int | str | None = None,
    progress: Progress | None = None,
) -> ProfileResult:
    """Return the result of any torch.profiler trace, plain or gzipped, or of a run directory.

    Time, memory and FLOPs of layers and steps are made at once; views, calls, summary and warnings when one of them is
    first read, printed or written. Until then the result holds the events of the trace in memory.

    Of a directory: the `result.json` in it, else its trace; of one with a directory per rank, the
    first rank's. With `process`, its trace; with `peaks`, or PROFILER_WRAPPER_PEAK_TFLOPS in the environment, too, and
    all shares of the peak are worked out anew.

    Args:
        path: of the trace or the directory.
        peaks: what the device can do, where no table knows it or another roof is wanted: dense TFLOP/s, by type
            (`{"bfloat16": 989, "bandwidth": 3350}` with GB/s, or the same as text), or the file that
            `profiler-wrapper peaks --measure -o FILE` wrote.
        rank: which rank of a run directory is meant.
        process: which process of a trace into which those of several ranks were put, by its pid or a part of it.
        progress: is told, while a trace is read, how many bytes of the file have been read, and of how many.

    Raises:
        BrokenTrace: the file is no trace, or the directory holds none, or several runs.
        EmptyRecording: no event carries time.
        OSError: it cannot be read.
        SeveralProcesses: the file holds the traces of several processes, and none is chosen.
        WrongUse: `peaks` means none, there is no trace to work shares of them out from, or there is no such `rank`.
    """
    path = given = Path(path)
    check_path(path)
    wanted_peaks = (os.environ.get(VARIABLE) if peaks is None else peaks) if path.is_dir() else None
    path = find_result(path, rank=rank, with_trace=bool(wanted_peaks) or process is not None)
    if path.name == RESULT_FILE:
        if peaks is not None or process is not None:
            asked = "process" if peaks is None else "peaks"
            raise WrongUse(f"{path}: {asked}= needs the trace, from which the result was made. Give the trace.")
        return as_result(from_dict(read_json(path)), given)
    _warn_if_large(path)
    run = run_beside(path)
    return analyse_trace(path, run=run, peaks=peaks, process=process, progress=progress, source=given)


def load_for_page(path: Path, **asked: Any) -> ProfileResult:
    """As `load` of a file, with single events: of a `result.json` those of the trace beside it."""
    if path.name == RESULT_FILE:
        result = load(path, **asked)
        return replace(result, timeline=_timeline_beside(path, result, asked.get("progress")))
    _warn_if_large(path)
    return analyse_trace(path, run=run_beside(path), timeline=True, source=path, **asked)


@no_garbage_collection()
def _timeline_beside(path: Path, result: ProfileResult, progress: Progress | None) -> Timeline | str:
    """Of the trace that a `result.json` was made from, or why there is none."""
    trace = trace_beside(path.parent, result.run)
    if trace is None:
        return NO_TRACE_BESIDE
    try:
        found = attribute_trace(trace, run=run_beside(trace), shapes=False, progress=progress)
    except Exception as error:
        return f"{FAILED}: {in_a_line(error)}"
    if found.charges.time_ns.sum() != result.time.total_ns:
        return OTHER_TRACE
    return timeline_or_why(found, layer_calls(found, {}))


def _warn_if_large(path: Path) -> None:
    """Say that the memory may not do, while the user can still choose a larger machine or a shorter recording."""
    free = free_bytes()
    # It takes about as much memory as a CPU's trace has JSON, a GPU's less (benchmarks/reader_memory.py).
    needed = path.stat().st_size * (_MOST_UNPACKED if path.suffix == ".gz" else 1)
    if free is not None and needed > free:
        warn(f"{path}: reading it may take up to {file_size(needed)} of memory, and {file_size(free)} are free")
