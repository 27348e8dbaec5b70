"""A trace, reduced where it lies to a small table of spans."""

from __future__ import annotations

import itertools
import json
import math
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from profiler_wrapper.analysis.attributed import Attributed, attributed
from profiler_wrapper.analysis.charges import union
from profiler_wrapper.analysis.classes import COMMUNICATION
from profiler_wrapper.analysis.statistics import at, marked, sum_if_all_known
from profiler_wrapper.analysis.time_rows import exposed_communication
from profiler_wrapper.analysis.views.collectives import collective_of, element_bytes, payload_bytes_of
from profiler_wrapper.child import start_child
from profiler_wrapper.errors import BrokenTrace, SeveralProcesses, WrongUse, imported, in_a_line
from profiler_wrapper.ranks import from_trace
from profiler_wrapper.ranks.database import INSTALL, OUR_COLUMNS, available_cores
from profiler_wrapper.ranks.from_trace import Row, Steps
from profiler_wrapper.trace.atomic import replacing
from profiler_wrapper.trace.nesting import nearest
from profiler_wrapper.trace.reader import read, read_with_shapes
from profiler_wrapper.trace.recording import Bool, Category, CollectiveDetails
from profiler_wrapper.trace.run_directory import RUN_FILE
from profiler_wrapper.trace.run_file import run_beside
from profiler_wrapper.trace.spans import SPAN_COLUMNS, rank_list_text

SCHEMA_VERSION = 3  # of what is made of a trace: a table of another one is made again
_LATEST_NS = 2**62  # since 1970; what is beyond is no clock
_GREATEST = 2**31 - 1  # that a column of RANK_COLUMNS holds
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
    found = attributed(recording, run=run, shapes=read_with_shapes(trace, process=process)[1] if tells_sizes else None)
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


def place_number(value: object) -> int | None:
    """A number as a column of `RANK_COLUMNS` holds it, if it is one."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _GREATEST else None


def trace_rows(found: Attributed) -> list[Row]:
    """The rows of an attributed recording, whose times are its own."""
    steps = from_trace.steps_of(found)
    on_device = found.charges.basis == "device"
    collectives = _device_collectives(found, steps) if on_device else _cpu_collectives(found, steps)
    collective_times = union(*from_trace.bounds([row for row in collectives if row.depth == 0]))
    waits = from_trace.waits_within_events(found)
    on_cpu = from_trace.phases(
        from_trace.cpu_pieces(found, steps), steps, collective_times, thread=from_trace.main_thread(found)
    )
    garbage = from_trace.garbage_rows(found, steps)
    if on_device:
        pieces = from_trace.device_pieces(found, steps)
        compute = from_trace.phases(
            pieces, steps, collective_times, thread=from_trace.COMPUTE_THREAD, lasting=from_trace.LASTING_ON_DEVICE
        )
        rows = [*from_trace.with_device_time(found, compute), *(row for row in on_cpu if row.kind in from_trace.OF_CPU)]
    else:
        rows = from_trace.without_waits((row for row in on_cpu if row.kind != "communication"), waits)
        at_top = {row.start_ns for row in on_cpu if row.kind == "communication"}
        collectives = [row._replace(depth=0) if row.start_ns in at_top else row for row in collectives]
    return [*steps.rows(), *collectives, *rows, *garbage, *from_trace.layer_rows(found, steps, waits)]


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
# Collectives of a trace as rows of the span table: those that a device runs, or a thread of the backend.

_MOVE_THEIR_INPUT = ("all_reduce", "broadcast", "reduce", "send", "recv")


def _cpu_collectives(found: Attributed, steps: Steps) -> list[Row]:
    """Collectives as the backend's own threads show them, else as calls; calls beside the former have no number."""
    outermost = from_trace.outermost_of(found, from_trace.collective_calls(found))
    training = from_trace.on_training_threads(found)
    top = nearest(found.nesting.parent, outermost)
    # The event around them is the same collective.
    details = {int(top[one.span]): one for one in reversed(found.recording.collectives)}
    details |= {one.span: one for one in found.recording.collectives}

    def rows(chosen: Bool, depth: int) -> list[Row]:
        made = []
        for span, step in from_trace.with_steps(found, steps, outermost & chosen):
            thread = main_thread if depth else from_trace.thread_of(found, int(found.recording.spans.lane[span]))
            made.append(_collective_row(found, span, step, details.get(span), thread=thread, depth=depth))
        return _with_sequence(made)

    main_thread = from_trace.main_thread(found)
    by_backend, by_call = rows(~training, 0), rows(training, 1)
    if not by_backend:
        return by_call
    # How long the training threads run ops beside each, calls that communicate left out.
    spans = found.recording.spans
    computes = training & (spans.category == Category.CPU_OP) & ~marked(len(spans), found.tree.layer_of_span)
    computes &= nearest(found.nesting.parent, from_trace.collective_calls(found)) < 0
    beside = union(spans.start_ns[computes], spans.end_ns[computes]).overlap(*from_trace.bounds(by_backend)).tolist()
    return [
        *(row._replace(overlapped_ns=overlapped) for row, overlapped in zip(by_backend, beside, strict=True)),
        *(row._replace(sequence=None, group=None) for row in by_call),
    ]


def _device_collectives(found: Attributed, steps: Steps) -> list[Row]:
    """Kernels that communicate, each in its stream; of the step that launched it."""
    spans, charges = found.recording.spans, found.charges
    chosen = np.flatnonzero(charges.work == COMMUNICATION)
    if not len(chosen):
        return []
    exposed, _ = exposed_communication(found.recording, charges)
    details = {one.span: one for one in found.recording.collectives}
    # The innermost event around the launch that knows it.
    around = at(nearest(found.nesting.parent, marked(len(spans), details)), charges.cpu_span[chosen], -1)
    rows = []
    columns = (charges.span[chosen].tolist(), around.tolist(), exposed[chosen].tolist())
    for span, telling, exposed_ns, step in zip(*columns, steps.numbers(steps.windows.launched_in[chosen]), strict=True):
        known = details.get(span) or details.get(telling)
        row = _collective_row(found, span, step, known, thread=int(spans.stream[span]), depth=0)
        rows.append(row._replace(device_ns=row.duration_ns, overlapped_ns=row.duration_ns - exposed_ns))
    return _with_sequence(rows)


def _collective_row(
    found: Attributed, span: int, step: int | None, details: CollectiveDetails | None, *, thread: int, depth: int
) -> Row:
    spans, name = found.recording.spans, found.recording.name_of(span)
    plain = (details.name if details is not None else "") or name
    return Row(
        step=step,
        name=collective_of(plain) or collective_of(name) or name,
        kind="communication",
        start_ns=int(spans.start_ns[span]),
        duration_ns=int(spans.duration_ns[span]),
        thread=thread,
        depth=depth,
        sequence=None if details is None else details.sequence,
        group=_group(found, details),
        bytes=payload_bytes_of(details) if details is not None else _bytes_of_inputs(found, span),
    )


def _with_sequence(rows: list[Row]) -> list[Row]:
    """Numbered in each step where the trace does not number them: by name and group, in order of start."""
    numbers: defaultdict[tuple[int | None, str, str | None], Iterator[int]] = defaultdict(itertools.count)
    ordered = sorted(rows, key=lambda row: row.start_ns)
    numbered = [(row, next(numbers[row.step, row.name, row.group])) for row in ordered]
    return [row if row.sequence is not None else row._replace(sequence=number) for row, number in numbered]


def _group(found: Attributed, details: CollectiveDetails | None) -> str | None:
    """The ranks of the group, else its name; where neither is known, of a job with one group that one."""
    if details is not None and (details.ranks or details.group_name):
        return rank_list_text(details.ranks) if details.ranks else details.group_name
    info = found.recording.metadata.get("distributedInfo")
    groups = info.get("pg_config") if isinstance(info, Mapping) else None
    if isinstance(groups, list) and len(groups) == 1 and isinstance(groups[0], Mapping):
        ranks = groups[0].get("ranks")
        return rank_list_text(ranks) if isinstance(ranks, list) and ranks else str(groups[0].get("pg_desc") or "all")
    return None


def _bytes_of_inputs(found: Attributed, span: int) -> int | None:
    """Of a collective that moves its inputs, by their shapes, where they were recorded."""
    shapes = found.shapes.get(span) if found.shapes is not None else None
    if shapes is None or collective_of(found.recording.name_of(span)) not in _MOVE_THEIR_INPUT:
        return None
    inputs = [
        (math.prod(dims), element_bytes(kind)) for dims, kind in zip(shapes.dims, shapes.types, strict=False) if dims
    ]
    sizes = [None if size is None else elements * size for elements, size in inputs]
    return sum_if_all_known(sizes) if sizes else None


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


# --------------------------------------------------------------------------------------------------
# Traces reduced side by side: by processes here, or by the workers of a Dask cluster.

Done = Callable[[int, int], None]  # how many are done, of how many
_PATIENCE_S = 30.0  # to reach a scheduler


def reduce_traces(
    tasks: Sequence[Task],
    *,
    scheduler: str | None = None,
    done: Done | None = None,
    reduce: Reduce = reduce_trace,
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
