"""A trace, reduced where it lies to a small table of spans."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from profiler_wrapper.child import start_child
from profiler_wrapper.errors import BrokenTrace, SeveralProcesses, WrongUse, imported, in_a_line
from profiler_wrapper.place.placed import place_events
from profiler_wrapper.ranks.database import INSTALL, OUR_COLUMNS, available_cores
from profiler_wrapper.tables.spans.row import Row
from profiler_wrapper.tables.spans.trace_rows import trace_rows
from profiler_wrapper.trace.atomic import replacing
from profiler_wrapper.trace.reader import read, read_with_shapes
from profiler_wrapper.trace.run_directory import RUN_FILE
from profiler_wrapper.trace.run_file import run_beside
from profiler_wrapper.trace.spans import SPAN_COLUMNS, place_number

SCHEMA_VERSION = 3  # of what is made of a trace: a table of another one is made again
_LATEST_NS = 2**62  # since 1970; what is beyond is no clock
_KEY = b"profiler_wrapper"
_ARROW = {"INTEGER": "int32", "BIGINT": "int64", "SMALLINT": "int16", "VARCHAR": "string"}


class Task(NamedTuple):
    """A trace to reduce. Goes to another process, or another machine that sees the same files."""

    trace: str
    target: str  # where the table goes
    otherwise: str  # where it goes if nothing can be written there
    rank: int | None = None  # where the trace does not tell
    process: str | None = None  # whose, of a file that holds several


class Reduced(NamedTuple):
    """What became of a trace."""

    trace: str
    spans: str  # the table; "" if there is none
    rank: int | None = None
    stored_rank: int | None = None  # as the table has it
    world_size: int | None = None
    host: str | None = None
    steps: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    failure: str = ""  # why there is no table
    processes: tuple[str, ...] = ()  # of the file, where none was chosen


def reduce_trace(task: Task) -> Reduced:
    """Makes the table of a trace, or takes the one that is there if it was made from this trace by this version."""
    if (there := _there(task)) is not None:
        return there
    summary, rows = _reduce(Path(task.trace), task.rank, task.process)
    try:
        return write_spans(Path(task.target), rows, summary)
    except OSError:
        return write_spans(Path(task.otherwise), rows, summary)


def _there(task: Task) -> Reduced | None:
    """What was made of the trace as it is now by this version, if it was."""
    found = (read_summary(Path(place), trace=Path(task.trace)) for place in (task.target, task.otherwise))
    return next((summary for summary in found if summary is not None), None)


def _reduce(trace: Path, rank: int | None, process: str | None) -> tuple[Reduced, list[Row]]:
    recording = read(trace, process=process)
    run: Mapping[str, Any] = {}
    with suppress(OSError, BrokenTrace):  # the trace is read alone
        run = run_beside(trace) or {}
    tells_sizes = recording.metadata.get("record_shapes") and not recording.device_mask.any()
    found = place_events(
        recording, run=run, shapes=read_with_shapes(trace, process=process)[1] if tells_sizes else None
    )
    base = recording.metadata.get("baseTimeNanoseconds")
    shift = base if isinstance(base, int) and 0 <= base <= _LATEST_NS else 0
    rows = [row._replace(start_ns=row.start_ns + shift) for row in trace_rows(found)]
    info = recording.metadata.get("distributedInfo")
    info = info if isinstance(info, Mapping) else {}
    host, in_trace = recording.metadata.get("host_name"), place_number(recording.rank)
    notes = list(recording.warnings)
    if lost := len(found.lost_launches):
        notes.append(f"{lost} launches have no kernel in the trace: device times are lower bounds")
    if not found.tree.layers:
        notes.append("no layers: the trace has no layer marks, no nn.Module events and no named blocks")
    summary = Reduced(
        str(trace),
        "",
        in_trace if in_trace is not None else place_number(rank),
        world_size=place_number(info.get("world_size") or run.get("world_size")) or None,
        host=host if isinstance(host, str) else None,
        steps=tuple(sorted({row.step for row in rows if row.kind == "step" and row.step is not None})),
        notes=tuple(notes),
    )
    return summary, rows


# --- files ---


def write_spans(path: Path, rows: Sequence[Row], summary: Reduced) -> Reduced:
    """Write a table whole or not at all.

    Raises:
        MissingPackage: pyarrow is not installed.
        OSError: it cannot be written.
    """
    arrow, parquet = _arrow()
    done = summary._replace(spans=str(path), stored_rank=summary.rank or 0)
    values: dict[str, Sequence[Any]] = dict(zip(Row._fields, zip(*rows, strict=True), strict=False))
    values["rank"] = [done.stored_rank] * len(rows)
    columns = {name: arrow.array(values.get(name, ()), _ARROW[kind]) for name, (kind, _) in SPAN_COLUMNS.items()}
    metadata = json.dumps({**done._asdict(), **_version(Path(summary.trace))}).encode()
    with replacing(path) as beside:
        parquet.write_table(arrow.table(columns, metadata={_KEY: metadata}), beside, compression="zstd")
    return done


def read_summary(path: Path, *, trace: Path | None = None) -> Reduced | None:
    """What the metadata of a table of ours say; None where it is none, or was not made from `trace` as it is now."""
    arrow, parquet = _arrow()
    try:
        known = json.loads((parquet.read_metadata(path).metadata or {}).get(_KEY) or b"{}")
        if any(known.get(name) != value for name, value in _version(trace).items()):
            return None
    except (OSError, ValueError, arrow.ArrowException):
        return None
    fields = {name: known[name] for name in Reduced._fields if name in known}
    of_lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
    made_from = trace if trace is not None else path.parent / str(known.get("trace"))
    return Reduced(**{**fields, **of_lists, "trace": str(made_from), "spans": str(path)})


def read_alone(path: Path, rank: int | None) -> Reduced:
    """A table of spans without a trace: one was reduced to it, or somebody else wrote it."""
    if (summary := read_summary(path)) is not None:
        return summary if summary.rank is not None else summary._replace(rank=rank)
    arrow, parquet = _arrow()
    with suppress(OSError, arrow.ArrowException):
        if set(OUR_COLUMNS) <= set(parquet.read_metadata(path).schema.names):
            return Reduced(str(path), str(path), rank, stored_rank=rank)
    return Reduced(str(path), "", rank, failure=f"is no table with the columns {', '.join(OUR_COLUMNS)}")


def problem_of_table(path: Path) -> str:
    """Why a Parquet table cannot be read to its end; empty if it can."""
    arrow, parquet = _arrow()
    try:
        for _ in parquet.ParquetFile(path).iter_batches():
            pass
    except (OSError, arrow.ArrowException) as error:
        return str(error).strip().split("\n")[0] or type(error).__name__
    return ""


def _version(trace: Path | None) -> dict[str, Any]:
    """What tells whether a table is of this version, and its trace, and run.json beside it, are as they were."""
    version: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "columns": list(SPAN_COLUMNS)}
    if trace is not None:
        state, run = trace.stat(), trace.parent / RUN_FILE
        version |= {"trace": trace.name, "trace_bytes": state.st_size, "trace_mtime_ns": state.st_mtime_ns}
        version["run_mtime_ns"] = run.stat().st_mtime_ns if run.exists() else None
    return version


def _arrow() -> tuple[Any, Any]:
    """pyarrow and its Parquet; raises MissingPackage where it is not installed."""
    needed = f"tables of spans need pyarrow: {INSTALL}"
    return imported("pyarrow", needed), imported("pyarrow.parquet", needed)


# --------------------------------------------------------------------------------------------------
# Child processes that reduce traces. A function goes in by its name, a task as plain data; a summary comes back.

Reduce = Callable[[Task], Reduced]
_KILLED = "the process that reduced it was killed, twice: is there enough memory for it?"
_REDUCE = f"from {__name__} import reduce_each; reduce_each()"


def reduce_in_workers(tasks: Sequence[Task], count: int, reduce: Reduce) -> Iterator[tuple[int, Reduced]]:
    """Each task's place and what became of it, as they end, by `count` child processes at a time.

    A task whose process dies is done again: only one that kills two has a failure.
    """
    children: set[subprocess.Popen[bytes]] = set()
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    ended, alone, own = threading.Event(), threading.Lock(), threading.local()

    def reduced(task: Task) -> Reduced:
        failure = "nobody waits for it any more"
        for _ in range(2):
            if ended.is_set():
                break
            try:  # of this thread's own: to start one takes longer than to reduce a small trace
                child = vars(own).pop("child", None) or start_child(_REDUCE, **pipes)
            except OSError:  # where none can be started, this process does it, a trace at a time
                with alone:
                    return _reduced(reduce, task)
            children.add(child)
            if ended.is_set():
                child.kill()
            if (found := _answer(child, reduce, task)) is not None:
                own.child = child
                return found
            children.remove(child)
            how = f"the process that should reduce it ended with {child.returncode}"
            failure = _KILLED if child.returncode < 0 else how
        return Reduced(task.trace, "", task.rank, failure=failure)

    threads = ThreadPoolExecutor(count, thread_name_prefix="profiler_wrapper")
    try:
        futures = {threads.submit(reduced, task): i for i, task in enumerate(tasks)}
        for future in as_completed(futures):
            yield futures.pop(future), future.result()
    finally:  # also where somebody pressed Ctrl-C
        ended.set()
        for child in tuple(children):
            child.kill()
        threads.shutdown(wait=True, cancel_futures=True)
        for child in children:
            child.communicate()


def _answer(child: subprocess.Popen[bytes], reduce: Reduce, task: Task) -> Reduced | None:
    """What a child process says of a task; None where it ended instead."""
    assert child.stdin is not None and child.stdout is not None
    try:
        pickle.dump((reduce, task), child.stdin)
        child.stdin.flush()
        found: Reduced = pickle.load(child.stdout)
    except (OSError, EOFError, pickle.UnpicklingError):  # the last where it ended within its answer
        child.communicate()
        return None
    return found


def reduce_each() -> None:
    """What a child process does: reduce the traces that it is told, one after the other."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started it, which ends this one
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what anything prints is no answer
    sys.stdout = sys.stderr
    with suppress(BrokenPipeError, EOFError), out:  # whoever asked has gone
        while True:
            pickle.dump(_reduced(*pickle.load(sys.stdin.buffer)), out)
            out.flush()


def _reduced(reduce: Reduce, task: Task) -> Reduced:
    try:
        return reduce(task)
    except MemoryError:
        return Reduced(task.trace, "", task.rank, failure="there is not enough memory for it")
    except SeveralProcesses as error:
        return Reduced(task.trace, "", task.rank, failure=str(error), processes=error.names)
    except Exception as error:
        return Reduced(task.trace, "", task.rank, failure=in_a_line(error))


# --- Traces reduced side by side: by processes here, or by the workers of a Dask cluster ---

Done = Callable[[int, int], None]  # how many are done, of how many
_PATIENCE_S = 30.0  # to reach a scheduler


def reduce_traces(
    tasks: Sequence[Task], *, scheduler: str | None = None, done: Done | None = None, reduce: Reduce = reduce_trace
) -> tuple[Reduced, ...]:
    """Each trace's summary, in the order of `tasks`. A trace that cannot be reduced has a failure; none is lost.

    A file into which the traces of several processes were put has a summary of each, in order, after all others.

    By the workers of a Dask cluster, which see the same files, else by processes here, as many as cores.

    Raises:
        MissingPackage: Dask is asked for and not installed.
        WrongUse: the scheduler cannot be reached.
    """
    found: dict[int, Reduced] = {}
    for i, reduced in _summaries(tasks, scheduler, reduce):
        found[i] = reduced
        if done is not None:
            done(len(found), len(tasks))
    summaries = [found[i] for i in range(len(tasks))]
    parts = [
        Task(task.trace, _numbered(task.target, i), _numbered(task.otherwise, i), process=name)
        for task, one in zip(tasks, summaries, strict=True)
        for i, name in enumerate(one.processes)
    ]
    if parts:
        summaries = [one for one in summaries if not one.processes]
        summaries += reduce_traces(parts, scheduler=scheduler, done=done, reduce=reduce)
    return tuple(summaries)


def _numbered(path: str, number: int) -> str:
    return str(Path(path).with_stem(f"{Path(path).stem}_{number}"))


def _summaries(tasks: Sequence[Task], scheduler: str | None, reduce: Reduce) -> Iterator[tuple[int, Reduced]]:
    there = {i: summary for i, task in enumerate(tasks) if (summary := _there(task)) is not None}
    yield from there.items()  # what is there already needs no process
    left = [i for i in range(len(tasks)) if i not in there]
    chosen = [tasks[i] for i in left]
    if scheduler and left:
        run = _on_dask(chosen, scheduler, reduce)
    elif len(left) == 1 and reduce is reduce_trace:
        run = iter([(0, _reduced(reduce, *chosen))])
    else:
        in_environment = os.environ.get("PROFILER_WRAPPER_WORKERS", "")  # for tests and small machines
        count = (int(in_environment) if in_environment.isdecimal() else 0) or available_cores()
        run = reduce_in_workers(chosen, max(1, min(count, len(left))), reduce)
    yield from ((left[place], reduced) for place, reduced in run)


# --- a cluster ---


def _on_dask(tasks: Sequence[Task], scheduler: str, reduce: Reduce) -> Iterator[tuple[int, Reduced]]:
    distributed = imported("distributed", "--scheduler needs Dask: pip install dask distributed")
    try:
        distributed.comm.get_address_host_port(scheduler, strict=True)
        client = distributed.Client(scheduler, timeout=_PATIENCE_S, set_as_default=False)
    except (OSError, ValueError, TimeoutError) as error:
        raise WrongUse(f"--scheduler {scheduler}: no Dask scheduler answers there: {error}") from error
    with client:
        futures = client.map(partial(_reduced, reduce), list(tasks), pure=False, retries=1)
        place = {future.key: i for i, future in enumerate(futures)}
        for future in distributed.as_completed(futures, loop=client.loop):
            i = place[future.key]
            if future.status == "finished":
                yield i, Reduced(*future.result())
            else:
                raised = future.exception()
                why = _KILLED if type(raised).__name__ == "KilledWorker" else in_a_line(raised)
                yield i, Reduced(tasks[i].trace, "", tasks[i].rank, failure=why)
