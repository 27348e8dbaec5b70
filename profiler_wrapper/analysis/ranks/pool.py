"""Traces reduced side by side: by a pool of processes here, or by the workers of a Dask cluster."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from profiler_wrapper.analysis.ranks.reduce import Reduced, Task, read_summary, reduce_trace
from profiler_wrapper.errors import MissingPackage, WrongUse
from profiler_wrapper.recording.span_database import INSTALL, available_cores

Reduce = Callable[[Task], Reduced]
Done = Callable[[int, int], None]  # how many are done, of how many
_WORKERS = "PROFILER_WRAPPER_WORKERS"  # for tests and small machines: processes of the pool
_DIES = "the process that reduced it was killed, twice: is there enough memory for it?"
_NONE_BEGINS = (
    "the process that should reduce it ended before it began: "
    'a script needs `if __name__ == "__main__":` around what it does'
)
_NO_MEMORY = "there is not enough memory for it"
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
        run = _on_dask(tasks, left, scheduler, reduce) if scheduler else _in_pool(tasks, left, workers, reduce)
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


def _tell(done: Done | None, found: dict[int, Reduced], tasks: Sequence[Task]) -> None:
    if done is not None:
        done(len(found), len(tasks))


# --- processes here ---


def _in_pool(
    tasks: Sequence[Task], left: list[int], workers: int | None, reduce: Reduce
) -> Iterator[tuple[int, Reduced]]:
    """All at once; if a worker dies, the others again, and then, one by one, those that may have killed it."""
    count = min(workers or _told_workers() or available_cores(), len(left))
    waiting = list(left)
    suspects: list[int] = []
    any_done = False
    while waiting:
        broken: list[int] = []
        for i, reduced in _one_pool(tasks, waiting, count, broken, reduce):
            any_done = True
            yield i, reduced
        if not broken:
            break
        # The pool does not tell which worker died: all that may have been running are looked at alone.
        under_way, waiting = broken[: 2 * count], broken[2 * count :]
        suspects += under_way
    while suspects:  # one at a time: a worker that dies now tells of what
        dead: list[int] = []
        for i, reduced in _one_pool(tasks, suspects, 1, dead, reduce, ahead=1):
            any_done = True
            yield i, reduced
        if not dead:
            break
        why = _DIES if any_done else _NONE_BEGINS
        yield dead[0], Reduced(tasks[dead[0]].trace, "", tasks[dead[0]].rank, failure=why)
        suspects = dead[1:]


def _one_pool(
    tasks: Sequence[Task], members: list[int], count: int, broken: list[int], reduce: Reduce, *, ahead: int = 2
) -> Iterator[tuple[int, Reduced]]:
    """What a pool gets done; `broken` gets the rest, in order, if one of its workers dies.

    `ahead`: tasks that are given out at a time, for each worker; so many are in doubt if one dies.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, mp_context=context, initializer=_be_quiet) as pool:
        futures: dict[Future[Reduced], int] = {}
        upcoming = iter(members)
        finished: set[int] = set()
        try:
            for i in upcoming:
                futures[pool.submit(reduce, tasks[i])] = i
                if len(futures) >= ahead * count:
                    break
            while futures:
                ready, _ = wait(futures, return_when=FIRST_COMPLETED)
                for future in ready:
                    i = futures[future]
                    try:
                        reduced = future.result()
                    except MemoryError:
                        reduced = Reduced(tasks[i].trace, "", tasks[i].rank, failure=_NO_MEMORY)
                    del futures[future]
                    finished.add(i)
                    yield i, reduced
                    after = next(upcoming, None)
                    if after is not None:
                        futures[pool.submit(reduce, tasks[after])] = after
        except BrokenProcessPool:
            broken += [i for i in members if i not in finished]


def _be_quiet() -> None:
    """A worker leaves Ctrl-C to the process that started it, and computes on one core."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"


def _told_workers() -> int | None:
    told = os.environ.get(_WORKERS, "")
    return int(told) if told.isdecimal() and int(told) > 0 else None


# --- a cluster ---


def _on_dask(
    tasks: Sequence[Task], left: list[int], scheduler: str | None, reduce: Reduce
) -> Iterator[tuple[int, Reduced]]:
    distributed = _distributed()
    try:
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
                why = _DIES if killed else f"{type(raised).__name__}: {raised}"
                yield i, Reduced(tasks[i].trace, "", tasks[i].rank, failure=why)


def _distributed() -> Any:
    try:
        import distributed
    except ImportError as error:
        raise MissingPackage(f"--scheduler needs Dask: {INSTALL}") from error
    return distributed
