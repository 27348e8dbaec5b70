"""A trace, reduced where it lies to a small table of spans."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from profiler_wrapper.analysis.attributed import attributed
from profiler_wrapper.analysis.ranks.span_rows import Row
from profiler_wrapper.analysis.ranks.trace_spans import trace_rows
from profiler_wrapper.errors import MissingPackage
from profiler_wrapper.recording.atomic import replacing
from profiler_wrapper.recording.database import INSTALL
from profiler_wrapper.recording.reader import read, read_shapes
from profiler_wrapper.recording.span_table import SPAN_COLUMNS
from profiler_wrapper.recording.store import RUN_FILE

SCHEMA_VERSION = 2  # of what is made of a trace: a table of another one is made again
_LATEST_NS = 2**62  # since 1970; what is beyond is no clock
_GREATEST_RANK = 2**31 - 1
_KEY = b"profiler_wrapper"
_ARROW = {"INTEGER": "int32", "BIGINT": "int64", "SMALLINT": "int16", "VARCHAR": "string"}


class Task(NamedTuple):
    """A trace to reduce. Goes to another process, or another machine that sees the same files."""

    trace: str
    target: str  # where the table goes
    otherwise: str  # where it goes if nothing can be written there
    rank: int | None = None  # where the trace does not tell


class Reduced(NamedTuple):
    """What became of a trace."""

    trace: str
    spans: str  # the table; "" if there is none
    rank: int | None = None
    stored_rank: int | None = None  # as the table has it
    rows: int = 0
    world_size: int | None = None
    host: str | None = None
    steps: tuple[int, ...] = ()
    on_device: bool = False
    notes: tuple[str, ...] = ()
    failure: str = ""  # why there is no table
    reused: bool = False


def reduce_trace(task: Task) -> Reduced:
    """Makes the table of a trace, or takes the one that is there if it was made from this trace by this version.

    Raises nothing but MemoryError: what is wrong with a trace is its failure, and the others go on.
    """
    trace, target = Path(task.trace), Path(task.target)
    try:
        for place in (target, Path(task.otherwise)):
            if (there := read_summary(place, trace=trace)) is not None:
                return there._replace(reused=True)
        summary, rows = _reduce(trace, task.rank)
        try:
            return write_spans(target, rows, summary)
        except OSError:
            return write_spans(Path(task.otherwise), rows, summary)
    except MemoryError:
        raise
    except Exception as error:
        return Reduced(task.trace, "", task.rank, failure=f"{type(error).__name__}: {error}")


def _reduce(trace: Path, rank: int | None) -> tuple[Reduced, list[Row]]:
    recording = read(trace)
    run = _run_beside(trace)
    tells_sizes = recording.metadata.get("record_shapes") and not recording.device_mask.any()
    found = attributed(recording, run=run, shapes=read_shapes(trace) if tells_sizes else None)
    base = recording.metadata.get("baseTimeNanoseconds")
    shift = base if isinstance(base, int) and 0 <= base <= _LATEST_NS else 0
    rows = [row._replace(start_ns=row.start_ns + shift) for row in trace_rows(found)]
    info = recording.metadata.get("distributedInfo")
    info = info if isinstance(info, Mapping) else {}
    world_size, host = info.get("world_size") or run.get("world_size"), recording.metadata.get("host_name")
    told = [one for one in (recording.rank, rank) if one is not None and 0 <= one <= _GREATEST_RANK]
    notes = list(recording.warnings)
    if not found.tree.layers:
        notes.append("no layers: the trace has no layer marks, no nn.Module events and no named blocks")
    summary = Reduced(
        str(trace),
        "",
        told[0] if told else None,
        rows=len(rows),
        world_size=world_size if isinstance(world_size, int) and 0 < world_size <= _GREATEST_RANK else None,
        host=host if isinstance(host, str) else None,
        steps=tuple(sorted({row.step for row in rows if row.kind == "step" and row.step is not None})),
        on_device=found.charges.basis == "device",
        notes=tuple(notes),
    )
    return summary, rows


def _run_beside(trace: Path) -> dict[str, Any]:
    """What run.json tells of the layers and steps; empty where there is none, or it cannot be read."""
    try:
        run = json.loads((trace.parent / RUN_FILE).read_bytes())
    except (OSError, ValueError):
        return {}
    known = run if isinstance(run, dict) else {}
    layers = known.get("layers")
    if not (isinstance(layers, list) and all(isinstance(layer, dict) for layer in layers)):
        known.pop("layers", None)
    return known


# --- files ---


def write_spans(path: Path, rows: Iterable[Row], summary: Reduced) -> Reduced:
    """Write a table whole or not at all.

    Raises:
        MissingPackage: pyarrow is not installed.
        OSError: it cannot be written.
    """
    arrow, parquet = _arrow()
    rows = list(rows)
    columns = list(zip(*rows, strict=True)) or [()] * len(Row._fields)
    values: dict[str, Sequence[Any]] = dict(zip(Row._fields, columns, strict=True))
    stored = summary.rank if summary.rank is not None else 0
    values["rank"] = [stored] * len(rows)
    schema = arrow.schema([(name, getattr(arrow, _ARROW[kind])()) for name, (kind, _) in SPAN_COLUMNS.items()])
    arrays = [arrow.array(list(values[name]), type=schema.field(name).type) for name in SPAN_COLUMNS]
    trace = Path(summary.trace)
    state = trace.stat()
    done = summary._replace(spans=str(path), rows=len(rows), stored_rank=stored)
    told = {
        **done._asdict(),
        "schema_version": SCHEMA_VERSION,
        "columns": list(SPAN_COLUMNS),
        "trace": trace.name,
        "trace_bytes": state.st_size,
        "trace_mtime_ns": state.st_mtime_ns,
        "run_mtime_ns": _run_time(trace),
    }
    table = arrow.Table.from_arrays(arrays, schema=schema.with_metadata({_KEY: json.dumps(told).encode()}))
    with replacing(path) as beside:
        parquet.write_table(table, beside, compression="zstd")
    return done


def read_summary(path: Path, *, trace: Path | None = None) -> Reduced | None:
    """What a table of ours says of itself; None where it is none, or was not made from `trace` as it is now."""
    if not path.is_file():
        return None
    arrow, parquet = _arrow()
    try:
        metadata = parquet.read_metadata(path)
        told = json.loads((metadata.metadata or {}).get(_KEY) or b"{}")
    except (OSError, ValueError, arrow.ArrowException):
        return None
    if told.get("schema_version") != SCHEMA_VERSION or told.get("columns") != list(SPAN_COLUMNS):
        return None
    if trace is not None:
        state = trace.stat()
        now = (trace.name, state.st_size, state.st_mtime_ns, _run_time(trace))
        if (told.get("trace"), told.get("trace_bytes"), told.get("trace_mtime_ns"), told.get("run_mtime_ns")) != now:
            return None
    fields = {name: told[name] for name in Reduced._fields if name in told}
    fields["trace"] = str(trace) if trace is not None else str(path.parent / str(told.get("trace")))
    return Reduced(**{**fields, "spans": str(path), "steps": tuple(told["steps"]), "notes": tuple(told["notes"])})


def table_rows(path: Path, columns: Iterable[str]) -> int | None:
    """Rows of a Parquet table that has these columns; None of what is none."""
    arrow, parquet = _arrow()
    try:
        metadata = parquet.read_metadata(path)
    except (OSError, arrow.ArrowException):
        return None
    return int(metadata.num_rows) if set(columns) <= set(metadata.schema.names) else None


def problem_of_table(path: Path) -> str:
    """Why a Parquet table cannot be read to its end; empty if it can."""
    arrow, parquet = _arrow()
    try:
        for _ in parquet.ParquetFile(path).iter_batches():
            pass
    except (OSError, arrow.ArrowException) as error:
        return str(error).strip().split("\n")[0] or type(error).__name__
    return ""


def _run_time(trace: Path) -> int | None:
    try:
        return os.stat(trace.parent / RUN_FILE).st_mtime_ns
    except OSError:
        return None


def _arrow() -> tuple[Any, Any]:
    """pyarrow and its Parquet.

    Raises:
        MissingPackage: it is not installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingPackage(f"tables of spans need pyarrow: {INSTALL}") from error
    return pyarrow, pyarrow.parquet
