"""What a run of the autograd engine came past, put together to the time that each block's backward took.

A hook before the node that made a block's output is the begin of its backward; one before the node that made its input,
or the begin of the next block's, is the end. Where nothing comes before a block, its backward ends with the graph.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from profiler_wrapper.live.layer_units import Unit

Moment = tuple[int, Any]  # nanoseconds of the monotonic clock, and the event on the device if there is one

BEGIN, END, RECOMPUTE, RECOMPUTED, GRAPH_ENDS = range(5)
MOST_RECORDS = 200_000  # of a step: a graph that is kept may be run any number of times
_task_id = torch._C._current_graph_task_id


class Pass:
    """One call of a unit, which hooks in the graph belong to. Holds no tensor.

    Attributes:
        in_part: only a module in it was called, by a unit that computes its forward again without being called.
    """

    __slots__ = ("in_part", "microbatch", "unit")

    def __init__(self, unit: Unit, microbatch: int, *, in_part: bool = False) -> None:
        self.unit, self.microbatch, self.in_part = unit, microbatch, in_part


class LayerSpan(NamedTuple):
    """A part of a unit's time. `microbatch`: the forward of the step that it belongs to, from 0."""

    kind: str
    unit: Unit
    begin: Moment
    end: Moment
    microbatch: int
    thread: int | None


_Record = tuple[int, "Pass | None", Moment]


class _Run:
    """One run of the engine, with those that were started within it."""

    __slots__ = ("backward", "finished", "records")

    def __init__(self, backward: int) -> None:
        self.backward = backward
        self.finished = False
        self.records: list[_Record] = []


class _Here(threading.local):
    run: _Run | None = None


class BackwardRuns:
    """Of one step: what came when, by run of the engine, whatever threads these are on.

    Attributes:
        ends: when all nodes of a graph had run, before what others do at its end; and what `end` was told of it.
    """

    def __init__(self) -> None:
        self._here = _Here()
        self.ends: list[tuple[Moment, str | None]] = []
        self._by_task: dict[int, _Run] = {}
        self._all: list[_Run] = []
        self._left = MOST_RECORDS

    def add(self, what: int, passed: Pass | None, moment: Moment, entered: Mapping[str, int], at_end: Any) -> None:
        """The engine that runs on this thread came past something.

        Args:
            entered: how often the step has come to its parts.
            at_end: `at_end(run, task)` is called when the graph has been run.
        """
        task = _task_id()
        run = self._by_task.get(task)
        if self._left <= 0:
            return
        self._left -= 1
        if run is None:
            if task == -1:
                return
            run = self._begin(task, entered.get("backward", 0), at_end)
        run.records.append((what, passed, moment))

    def end(self, run: Any, task: int, moment: Moment, group: str | None) -> None:
        """A graph has been run. `group`: that its gradients are reduced in."""
        run.records.append((GRAPH_ENDS, None, moment))
        self._by_task.pop(task, None)
        if run not in self._by_task.values():  # else it was run within another
            run.finished = True
            self.ends.append((moment, group))

    def take(self) -> list[LayerSpan]:
        """The spans of all runs, which are forgotten."""
        runs, self._all, self._by_task = self._all, [], {}
        spans: list[LayerSpan] = []
        for run in runs:
            run.finished = True
            spans += _spans_of(_joined(run.records))
        return spans

    def _begin(self, task: int, backward: int, at_end: Any) -> _Run:
        around = self._here.run
        if around is not None and not around.finished and around.backward == backward:
            run = around  # a checkpoint that runs its own graph
        else:
            run = self._here.run = _Run(backward)
            self._all.append(run)
        self._by_task[task] = run
        torch.autograd.Variable._execution_engine.queue_callback(partial(at_end, run, task))
        return run


def _spans_of(records: list[_Record]) -> Iterator[LayerSpan]:
    """Backward and recompute in order; the backward of a block is in pieces where something is recomputed in it."""
    passed: Pass | None = None  # whose backward it is
    since: Moment | None = None
    interrupted: Pass | None = None
    recompute_since: Moment | None = None
    for what, which, moment in records:
        if what == BEGIN and which is passed:
            continue  # it has several outputs
        if what == END and which is not passed:
            continue  # a tensor that many blocks take
        if passed is not None and since is not None:
            yield LayerSpan("backward", passed.unit, since, moment, passed.microbatch, None)
        if what == RECOMPUTE:
            interrupted, passed, recompute_since = passed, None, moment
        elif what == RECOMPUTED:
            if which is not None and recompute_since is not None:
                yield LayerSpan("recompute", which.unit, recompute_since, moment, which.microbatch, None)
            passed, since, recompute_since = interrupted, moment, None
        elif what == BEGIN:
            passed, since = which, moment
        else:
            passed = None


def _joined(records: list[_Record]) -> list[_Record]:
    """What modules in a unit computed again one after the other is one recompute of it.

    It is over where more time passes than it took so far: what was computed again is now gone through in backward.
    """
    joined: list[_Record] = []
    since = 0
    for record in records:
        what, which, (now, _) = record
        if what == RECOMPUTE and which is not None and which.in_part:
            before = joined[-1] if joined else None
            if before is not None and before[0] == RECOMPUTED and before[1] is not None and before[1].in_part:
                ended = before[2][0]
                if before[1].unit is which.unit and now - ended <= ended - since:
                    joined.pop()
                    continue
            since = now
        joined.append(record)
    return joined
