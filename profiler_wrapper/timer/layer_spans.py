"""Forward, backward and recompute of each block, from moments at its boundaries, without torch's profiler.

A forward is the call of a block. For its backward, the nodes of the graph that made its outputs and its inputs are
given a hook that notes when the engine comes to them and returns nothing: gradients stay bit by bit what they are, the
modules have no hook, tensors have none either, and those of a graph are gone with it. Nothing holds a tensor.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from time import perf_counter_ns
from typing import Any, NamedTuple

import torch
from torch import nn

from profiler_wrapper.capture import scopes
from profiler_wrapper.capture.layers import Layer, RootLabels, find_roots, is_in_pipeline, name_layers
from profiler_wrapper.capture.recorder import is_compiling
from profiler_wrapper.capture.torch_state import in_backward
from profiler_wrapper.capture.wrappers import all_modules, holders
from profiler_wrapper.errors import Notices
from profiler_wrapper.timer import rank_waits
from profiler_wrapper.timer.device_events import EventPool, Moment
from profiler_wrapper.timer.log import has_process_group
from profiler_wrapper.timer.steps import Breakdown, StepWaits, Wait
from profiler_wrapper.trace.marks import ROOT_PATH
from profiler_wrapper.trace.spans import rank_list_text

# --- what is timed ---


class Unit:
    """A block, or a module beside the blocks, as an embedding, a norm, the head.

    Attributes:
        name: as the plain model has it.
        calls: in this step, recomputed ones left out.
        spans: what its spans are called, by their kind.
    """

    __slots__ = ("calls", "name", "spans")

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls = 0
        self.spans = {kind: f"{name} {kind}" for kind in ("forward", "backward", "recompute")}


class Units:
    """Those of a model, by the modules through which they are entered: the plain ones, and what wraps them.

    Holds no module.

    Args:
        model: a module, several, or a pipeline's schedule or stage, as `ProfilerWrapper` takes them.
    """

    def __init__(self, model: object) -> None:
        in_pipeline = is_in_pipeline(model, None, None)
        self._entries: dict[int, tuple[weakref.ref[nn.Module], Unit]] = {}
        self._inside: dict[int, tuple[weakref.ref[nn.Module], Unit]] = {}
        self.all: list[Unit] = []
        roots = find_roots(model, RootLabels())
        named = len(roots) > 1
        taken: set[str] = set()
        for root in roots:
            if in_pipeline and not root.in_pipeline:
                root = replace(root, in_pipeline=True)
            for layer in _units_of(name_layers(root)):
                name = layer.mark.path
                if name == ROOT_PATH or (named and name in taken):
                    name = root.label if name == ROOT_PATH else f"{root.label}.{name}"
                taken.add(name)
                self._add(name, layer)

    def get(self, module: nn.Module) -> Unit | None:
        """The unit that a call of this module enters."""
        entry = self._entries.get(id(module))
        return entry[1] if entry is not None and entry[0]() is module else None

    def around(self, module: nn.Module) -> Unit | None:
        """The unit that this module lies in."""
        entry = self._inside.get(id(module))
        return entry[1] if entry is not None and entry[0]() is module else None

    def _add(self, name: str, layer: Layer) -> None:
        if id(layer.module) in self._entries:  # two roots share it
            return
        unit = Unit(name)
        self.all.append(unit)
        for holder in layer.holders:
            self._entries[id(holder)] = weakref.ref(holder), unit
        for module in all_modules(layer.module):
            if module is not layer.module:
                self._inside.setdefault(id(module), (weakref.ref(module), unit))


def _units_of(layers: tuple[Layer, ...]) -> Iterator[Layer]:
    """The outermost blocks, and the outermost modules that hold none; the model itself where nothing is in it."""
    above: set[str] = set()  # names that something with a block in it has, lists of modules too
    for layer in layers:
        if layer.mark.kind == "block":
            above.update(_names_above(layer.mark.path))
    if len(layers) == 1:
        yield layers[0]
        return
    units: set[str] = set()
    for layer in layers:
        path = layer.mark.path
        if path == ROOT_PATH or path in above or not units.isdisjoint(_names_above(path)):
            continue
        units.add(path)
        yield layer


def _names_above(path: str) -> Iterator[str]:
    parts = path.split(".")
    return (".".join(parts[:count]) for count in range(1, len(parts)))


# --- who reduces gradients behind a backward ---


def reduced_in(model: nn.Module) -> str | None:
    """The ranks that DDP reduces the gradients of this call over, as `"0-2,5"`; None: it does not."""
    for holder in holders(model):
        if isinstance(holder, nn.parallel.DistributedDataParallel) and holder.require_backward_grad_sync:
            try:
                return rank_list_text(torch.distributed.get_process_group_ranks(holder.process_group))
            except (KeyError, ValueError):  # the group was destroyed, which a call of the model may outlive
                return None
    return None


# --- tensors of a graph ---


_MOST_VALUES = 64  # of a call, and of a list or mapping in it, that are looked at

Known = list[tuple["weakref.ref[torch.Tensor]", int]]  # tensors that are part of a graph, and their versions


def tensors_in_graph(values: Iterable[Any], depth: int = 3) -> list[tuple[torch.Tensor, Any]]:
    """Tensors with what made them in the graph, also those in tuples, lists and mappings."""
    found: list[tuple[torch.Tensor, Any]] = []
    for value in islice(values, _MOST_VALUES):
        if value is None:
            continue
        if type(value) is torch.Tensor or isinstance(value, torch.Tensor):
            try:
                node = value.grad_fn
            except RuntimeError:  # a view that was written into as autograd forbids: it has no part in any backward
                continue
            if node is not None:
                found.append((value, node))
        elif isinstance(value, (tuple, list)):
            if depth:
                found += tensors_in_graph(value, depth - 1)
        elif isinstance(value, dict) and depth:
            found += tensors_in_graph(value.values(), depth - 1)
    return found


def hook_first(tensor: Any, hook: Callable[[Any], None]) -> None:
    """Before the hooks that it has."""
    tensor._backward_hooks.move_to_end(tensor.register_hook(hook).id, last=False)


def is_among(tensor: torch.Tensor, known: Known) -> bool:
    """The same one, which nothing has been written into since."""
    for reference, version in known:  # noqa: SIM110 - half of what any() takes, and each block asks
        if reference() is tensor and version == tensor._version:
            return True
    return False


def only_accumulates(node: Any) -> bool:
    """Behind a node is nothing but parameters."""
    return all(after is None or after.name() == "torch::autograd::AccumulateGrad" for after, _ in node.next_functions)


# --- backward, by what the autograd engine comes past ---


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


class _RunHere(threading.local):
    run: _Run | None = None


class BackwardRuns:
    """Of one step: what came when, by run of the engine, whatever threads these are on.

    Attributes:
        ends: when all nodes of a graph had run, before what others do at its end; and what `end` was told of it.
    """

    def __init__(self) -> None:
        self._here = _RunHere()
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


# --- calls ---


class Forks:
    """How often this process, and those that it was forked from, began as a fork."""

    count = 0

    @classmethod
    def add(cls) -> None:
        cls.count += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=Forks.add)


class Here(threading.local):
    """What is so on this thread."""

    def __init__(self) -> None:
        self.thread = threading.get_native_id()
        self.inside = False  # a unit is being called
        self.outputs: Known = []  # of the last unit


class Call:
    """One that is going on, or was.

    Attributes:
        phase: what the step's parts were told of it; None: nothing.
        recomputed: in the backward.
    """

    __slots__ = ("begin", "ended", "inputs", "passed", "phase", "recomputed")

    def __init__(self, passed: Pass, phase: object | None, recomputed: bool) -> None:
        self.passed, self.phase, self.recomputed = passed, phase, recomputed
        self.begin: Moment = (0, None)
        self.ended = False
        self.inputs: Known = []  # that have a gradient


class StepSpans(NamedTuple):
    """What is known of the layers in a step.

    Attributes:
        spans: by their begins.
        waits: for other ranks, by their begins.
        ends: when graphs had been run, and the group that their gradients are reduced in behind that.
        events: all on the device that these are made of, and others.
    """

    spans: list[LayerSpan]
    waits: list[Wait]
    ends: list[tuple[Moment, str | None]]
    events: list[Any]


# --- listening ---


MOST_SPANS = 20_000  # of a step
MOST_EVENTS = 100_000  # that the device may be behind
_inside_functorch: Callable[[], Any] = getattr(torch._C._functorch, "peek_interpreter_stack", lambda: None)


class LayerSpans:
    """Listens to calls of modules in the place of a `Breakdown`, and passes them on to it.

    Its own failures are told to `on_failure`.

    Args:
        model: as it is called in the loop, wrappers included, or a pipeline's schedule or stage.
        events: None: nothing is measured on a device.
        notices: told once why layers are not known.
    """

    def __init__(
        self,
        model: object,
        events: EventPool | None,
        on_failure: Callable[[str, Exception], None],
        notices: Notices,
    ) -> None:
        self.parts: Breakdown  # set right after, since each needs the other
        self._events_out = 0  # that nobody has given back
        self._model = weakref.ref(model)
        self._events, self._on_failure, self._notices = events, on_failure, notices
        self._units: Units | None = None
        self._look_again_in = 1  # steps that miss a unit
        self._misses = 0
        self._here = Here()
        self._open = False
        self._waits = StepWaits(lambda: self._moment() if self._open and self._is_here() else None, self._fail)
        self._runs = BackwardRuns()
        self._spans: list[LayerSpan] = []
        self._recorded: list[Any] = []  # the step's events
        self._group: str | None = None  # that the gradients of the last forward are reduced in
        self._forks = Forks.count

    def begin_step(self) -> None:
        """A step begins. Looks for the units in the first, and when some were missed."""
        self.forget_step()
        if self._units is None:
            model = self._model()
            if model is None:
                return
            self._units = Units(model)
            scopes.keep_dynamo_off(LayerSpans.take_result, and_below=True)
            scopes.keep_dynamo_off(LayerSpans._reached, and_below=True)
            scopes.keep_dynamo_off(LayerSpans._graph_ends, and_below=True)
        for unit in self._units.all:
            unit.calls = 0
        if has_process_group():
            rank_waits.listen(self._waits)
        self._open = True

    def forget_step(self) -> None:
        """The step that was begun is none."""
        self._open = False
        self.give_back(self._take().events)

    def end_step(self) -> StepSpans:
        """The step has ended."""
        was_open, self._open = self._open, False
        taken = self._take()
        if was_open and self._units is not None and self.parts.entered.get("forward"):
            self._look_for_missed(self._units)
        return taken

    def stop(self) -> None:
        """Listen to waits no more; the step that was begun is none."""
        rank_waits.stop_listening(self._waits)
        self.forget_step()

    # -- what is listened to ----------------------------------------------------------------------

    def open_call(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], marked: set[str] | None = None
    ) -> object | None:
        """A module is called; see `calls.Listener`."""
        here, parts = self._here, self.parts
        if here.inside and self._open:
            return None  # most calls are
        within = parts.within
        phase = None if within and within[-1] != "optimizer" else parts.open_call(module, args, kwargs)
        if not self._open or self._units is None:
            return phase
        try:
            if phase is not None:
                self._group = reduced_in(module)
            unit, recomputed, in_part = self._units.get(module), in_backward(), False
            if unit is None and recomputed:
                unit, in_part = self._units.around(module), True
            if unit is None or not self._takes_more():
                return phase
            times = parts.entered.get("backward" if recomputed else "forward", 0)
            call = Call(Pass(unit, times - 1, in_part=in_part), phase, recomputed)
            if not recomputed:
                unit.calls += 1
            if not in_part:
                self._hook_inputs(call, args, kwargs)
            here.inside = True
            call.begin = self._moment()
            if recomputed:
                self._note(RECOMPUTE, call.passed, call.begin)
            return call
        except Exception as error:
            self._fail(error)
            return phase

    def take_result(self, opened: object, result: Any) -> None:
        """That call has returned something."""
        if type(opened) is not Call:
            return
        self._end(opened)
        try:
            if self._open and not opened.passed.in_part:
                self._hook_outputs(opened, result)
        except Exception as error:
            self._fail(error)

    def close_call(self, opened: Any) -> None:
        """That call has returned or raised."""
        if type(opened) is not Call:
            self.parts.close_call(opened)
            return
        self._end(opened)
        if opened.phase is not None:
            self.parts.close_call(opened.phase)

    def _end(self, call: Call) -> None:
        if call.ended:
            return
        here = self._here
        call.ended, here.inside = True, False
        if not self._open:
            return
        try:
            moment = self._moment()
            if call.recomputed:
                self._note(RECOMPUTED, call.passed, moment)
            else:
                passed = call.passed
                self._spans.append(
                    LayerSpan("forward", passed.unit, call.begin, moment, passed.microbatch, here.thread)
                )
        except Exception as error:
            self._fail(error)

    # -- boundaries in the graph ------------------------------------------------------------------

    def _hook_inputs(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if _inside_functorch() is not None:
            return
        known = self._here.outputs
        for tensor, node in tensors_in_graph((*args, *kwargs.values())):
            call.inputs.append((weakref.ref(tensor), tensor._version))
            if not is_among(tensor, known):  # else the begin of the last unit's backward is the end of this one's
                node.register_prehook(partial(self._reached, END, call.passed))

    def _hook_outputs(self, call: Call, result: Any) -> None:
        if _inside_functorch() is not None:
            return
        outputs: Known = []
        for tensor, node in tensors_in_graph((result,)):
            outputs.append((weakref.ref(tensor), tensor._version))
            if is_among(tensor, call.inputs):  # somebody else's, given on
                continue
            begins = partial(self._reached, BEGIN, call.passed)
            if tensor._backward_hooks:  # as FSDP has them, to gather what the block's backward needs: part of it
                hook_first(tensor, begins)
            else:
                node.register_prehook(begins)
            if not call.inputs and only_accumulates(node):
                node.register_hook(partial(self._reached, END, call.passed))
        self._here.outputs = outputs

    def _reached(self, what: int, passed: Pass, *_: Any) -> None:
        """The engine is about to run a node, or has run it."""
        if self._open and not is_compiling():
            try:
                self._note(what, passed, self._moment())
            except Exception as error:
                self._fail(error)

    def _note(self, what: int, passed: Pass, moment: Moment) -> None:
        self._runs.add(what, passed, moment, self.parts.entered, self._graph_ends)

    def _graph_ends(self, run: Any, task: int) -> None:
        if self._open:
            try:
                self._runs.end(run, task, self._moment(), self._group)
            except Exception as error:
                self._fail(error)

    # -- the rest ---------------------------------------------------------------------------------

    def _moment(self) -> Moment:
        if self._events is None:
            return perf_counter_ns(), None
        event = None
        if self._events_out < MOST_EVENTS:
            event = self._events.record()
            if event is not None:
                self._events_out += 1
                self._recorded.append(event)
        return perf_counter_ns(), event

    def _takes_more(self) -> bool:
        if len(self._spans) >= MOST_SPANS:
            self._notices.once(
                "layers", f"blocks were called more than {MOST_SPANS} times in a step; the rest is left out"
            )
            return False
        return self._is_here()

    def _is_here(self) -> bool:
        """This is no fork of the process that it was made in."""
        return Forks.count == self._forks

    def _take(self) -> StepSpans:
        spans, self._spans = self._spans, []
        events, self._recorded = self._recorded, []
        runs, self._runs = self._runs, BackwardRuns()
        spans += runs.take()
        spans.sort(key=lambda span: span.begin[0])
        self._here.outputs = []
        return StepSpans(spans, self._waits.take(), runs.ends, events)

    def give_back(self, events: list[Any]) -> None:
        """Those of a step that nobody reads any more."""
        self._events_out -= len(events)
        if self._events is not None:
            for event in events:
                self._events.give_back(event)

    def _look_for_missed(self, units: Units) -> None:
        """Modules may have been put in others' place, or be compiled into something that calls no module."""
        if any(unit.calls for unit in units.all):
            if all(unit.calls for unit in units.all):
                return
        else:
            self._notices.once(
                "layers",
                "no block of the model was called as a module in a step, as in a model that is compiled as a whole: "
                "their times are not known; compile the blocks one by one to see them",
            )
        self._misses += 1
        if self._misses >= self._look_again_in:
            self._misses, self._look_again_in = 0, 2 * self._look_again_in
            self._units = None

    def _fail(self, error: Exception) -> None:
        self._open = False
        self._on_failure("timing layers", error)
