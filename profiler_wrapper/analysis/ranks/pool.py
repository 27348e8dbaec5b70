"""Traces reduced side by side: by processes here, or by the workers of a Dask cluster."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from profiler_wrapper.analysis.ranks.reduce import Reduced, Task, read_summary, reduce_trace
from profiler_wrapper.analysis.ranks.workers import DIES, Reduce, reduce_in_workers
from profiler_wrapper.errors import MissingPackage, WrongUse
from profiler_wrapper.recording.database import available_cores

Done = Callable[[int, int], None]  # how many are done, of how many
_WORKERS = "PROFILER_WRAPPER_WORKERS"  # for tests and small machines: processes that reduce
_PATIENCE_S = 30.0  # to reach a scheduler


def reduce_traces(
    tasks: Sequence[Task],
    *,
    scheduler: str | None = None,
    workers: int | None = None,
    done: Done | None = None,
    reduce: Reduce = reduce_trace,
) -> tuple[Reduced, ...]:
    """Each trace's summary, in the order of `tasks`. A trace that cannot be reduced has a failure; none is lost.

    Args:
        scheduler: of a Dask cluster whose workers see the same files; without one, processes here.
        workers: processes; None: as many as cores.
        done: is told how many are done.
        reduce: what a worker does with a task; can be imported by its name.

    Raises:
        MissingPackage: Dask is asked for and not installed.
        WrongUse: the scheduler cannot be reached.
    """
    found: dict[int, Reduced] = {}
    for i, task in enumerate(tasks):  # what is there already needs no process
        there = _there(task)
        if there is not None:
            found[i] = there
            _tell(done, found, tasks)
    left = [i for i in range(len(tasks)) if i not in found]
    if len(left) == 1 and not scheduler and reduce is reduce_trace:
        found[left[0]] = reduce_trace(tasks[left[0]])
        _tell(done, found, tasks)
    elif left:
        run = _on_dask(tasks, left, scheduler, reduce) if scheduler else _here(tasks, left, workers, reduce)
        for i, reduced in run:
            found[i] = reduced
            _tell(done, found, tasks)
    return tuple(found[i] for i in range(len(tasks)))


def _there(task: Task) -> Reduced | None:
    try:
        for place in (task.target, task.otherwise):
            there = read_summary(Path(place), trace=Path(task.trace))
            if there is not None:
                return there._replace(reused=True)
    except OSError:  # the trace is gone: reducing it says so
        return None
    return None


def _here(tasks: Sequence[Task], left: list[int], workers: int | None, reduce: Reduce) -> Iterator[tuple[int, Reduced]]:
    count = min(workers or _told_workers() or available_cores(), len(left))
    for i, reduced in reduce_in_workers([tasks[i] for i in left], count, reduce):
        yield left[i], reduced


def _told_workers() -> int | None:
    told = os.environ.get(_WORKERS, "")
    return int(told) if told.isdecimal() and int(told) > 0 else None


def _tell(done: Done | None, found: dict[int, Reduced], tasks: Sequence[Task]) -> None:
    if done is not None:
        done(len(found), len(tasks))


# --- a cluster ---


def _on_dask(
    tasks: Sequence[Task], left: list[int], scheduler: str | None, reduce: Reduce
) -> Iterator[tuple[int, Reduced]]:
    distributed = _distributed()
    try:
        distributed.comm.get_address_host_port(scheduler, strict=True)
        client = distributed.Client(scheduler, timeout=_PATIENCE_S, set_as_default=False)
    except (OSError, ValueError, TimeoutError) as error:
        raise WrongUse(f"--scheduler {scheduler}: no Dask scheduler answers there: {error}") from error
    with client:
        futures = client.map(reduce, [tasks[i] for i in left], pure=False, retries=1)
        place = {future.key: i for future, i in zip(futures, left, strict=True)}
        for future in distributed.as_completed(futures, loop=client.loop):
            i = place[future.key]
            if future.status == "finished":
                yield i, Reduced(*future.result())
            else:
                raised = future.exception()
                killed = type(raised).__name__ == "KilledWorker"
                why = DIES if killed else f"{type(raised).__name__}: {raised}"
                yield i, Reduced(tasks[i].trace, "", tasks[i].rank, failure=why)


def _distributed() -> Any:
    try:
        import distributed
    except ImportError as error:
        raise MissingPackage("--scheduler needs Dask: pip install dask distributed") from error
    return distributed
