"""Forward, backward and recompute of each block, timed at its boundaries, without torch's profiler.

A forward is the call of a block. For its backward, the nodes of the graph that made its outputs and its inputs are
given a hook that notes when the autograd engine comes to them and returns nothing: gradients stay bit by bit what they
are, the modules have no hook, tensors have none either, and those of a graph are gone with it. Nothing holds a tensor.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from time import perf_counter_ns
from typing import Any

import torch
from torch import nn

from profiler_wrapper.capture.layers import Layer, RootLabels, Stage, all_modules, find_roots, holders, name_layers
from profiler_wrapper.capture.runinfo import is_in_pipeline
from profiler_wrapper.capture.torch_state import in_backward, is_tracing, keep_dynamo_off
from profiler_wrapper.timer import log
from profiler_wrapper.timer.device_events import EventPool, Mark, Moment
from profiler_wrapper.timer.steps import WAITS, Boundaries, Breakdown, WaitInfo
from profiler_wrapper.trace.marks import ROOT_PATH
from profiler_wrapper.trace.spans import rank_list_text

# Of one step: more is not kept, however often a loop calls the model or runs a graph that it keeps.
MOST_NOTED = 200_000  # calls of blocks, places in backward, waits
MOST_EVENTS = 100_000  # that the device may be behind, of all steps
_MOST_VALUES = 64  # of a call, and of a list or mapping in it, that are looked at

# --- which modules are timed ---


@dataclass(slots=True, eq=False)
class TimedModule:
    """A block, or a module beside the blocks, as an embedding, a norm, the head."""

    name: str  # as the plain model has it
    calls: int = 0  # in this step, recomputed ones left out


_ById = dict[int, "tuple[weakref.ref[nn.Module], TimedModule]"]


class TimedModules:
    """Those of a model, by the modules through which they are entered: the plain ones, and what wraps them.

    Holds no module.

    Args:
        model: a module, several, or a pipeline's schedule or stage, as `ProfilerWrapper` takes them.
    """

    def __init__(self, model: object) -> None:
        self._entered: _ById = {}
        self._inside: _ById = {}
        self.all: list[TimedModule] = []
        roots = find_roots(model, RootLabels(), in_pipeline=is_in_pipeline(model, None, None))
        taken: set[str] = set()
        for root in roots:
            for layer in _outermost(name_layers(root)):
                name = layer.mark.path
                if name == ROOT_PATH or (len(roots) > 1 and name in taken):
                    name = root.label if name == ROOT_PATH else f"{root.label}.{name}"
                taken.add(name)
                if id(layer.module) not in self._entered:  # else two roots share it
                    self._add(TimedModule(name), layer)

    def find(self, module: nn.Module, *, inside: bool = False) -> TimedModule | None:
        """What a call of this module enters, or what it lies `inside` of."""
        entry = (self._inside if inside else self._entered).get(id(module))
        return entry[1] if entry is not None and entry[0]() is module else None

    def _add(self, timed: TimedModule, layer: Layer) -> None:
        self.all.append(timed)
        for holder in layer.holders:
            self._entered[id(holder)] = weakref.ref(holder), timed
        for module in all_modules(layer.module):
            if module is not layer.module:
                self._inside.setdefault(id(module), (weakref.ref(module), timed))


def _outermost(layers: tuple[Layer, ...]) -> Iterator[Layer]:
    """The outermost blocks, and the outermost modules that hold none; the model itself where nothing is in it."""
    if len(layers) == 1:
        yield layers[0]
        return
    # names that something with a block in it has, lists of modules too
    above = {name for layer in layers if layer.mark.kind == "block" for name in _names_above(layer.mark.path)}
    timed: set[str] = set()
    for layer in layers:
        path = layer.mark.path
        if path != ROOT_PATH and path not in above and timed.isdisjoint(_names_above(path)):
            timed.add(path)
            yield layer


def _names_above(path: str) -> Iterator[str]:
    parts = path.split(".")
    # same (1 -> 0): no timed layer is named by nothing
    return (".".join(parts[:count]) for count in range(1, len(parts)))


def _reduced_over(model: nn.Module) -> str | None:
    """The ranks that DDP reduces the gradients of this call over, as `"0-2,5"`; None: it does not."""
    for holder in holders(model):
        if isinstance(holder, nn.parallel.DistributedDataParallel) and holder.require_backward_grad_sync:
            try:
                return rank_list_text(torch.distributed.get_process_group_ranks(holder.process_group))
            except (KeyError, ValueError):  # the group was destroyed, which a call of the model may outlive
                return None
    return None


# --- tensors of a graph ---


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


def is_among(tensor: torch.Tensor, known: Known) -> bool:
    """The same one, which nothing has been written into since."""
    for reference, version in known:  # noqa: SIM110 - half of what any() takes, and each block asks
        if reference() is tensor and version == tensor._version:
            return True
    return False


def only_accumulates(node: Any) -> bool:
    """Behind a node is nothing but parameters."""
    return all(after is None or after.name() == "torch::autograd::AccumulateGrad" for after, _ in node.next_functions)


# --- what is noted of a step ---


@dataclass(slots=True, eq=False)
class Call:
    """One call of a timed module: a span of forward, and what the hooks in its graph belong to. Holds no tensor."""

    module: TimedModule
    microbatch: int  # the forward of the step that it belongs to, from 0
    phase: object | None  # what the step's parts returned for it; None: nothing
    thread: int
    recomputed: bool  # in the backward
    # Only a module in it was called, by one that computes its forward again without being called: the number of the
    # node in the graph that it does so for; None: it was called itself.
    for_node: int | None
    begin: Moment = (0, None)
    end: Moment | None = None
    inputs: Known = field(default_factory=list)  # that have a gradient

    def is_part_like(self, other: Call) -> bool:
        """Both are modules in a block that are called one after the other for one node: one recompute of the block."""
        return other.for_node is not None and (self.module, self.for_node) == (other.module, other.for_node)


@dataclass(slots=True)
class Span:
    """A line of the files: the step, a part of it, a layer in that, a wait for other ranks."""

    kind: str
    name: str
    begin: Moment
    end: Moment
    thread: int  # 0: that of the training loop
    layer: str | None = None  # None: it is no layer's
    depth: int = 0
    parent: str | None = None  # None: it lies in nothing but the step
    microbatch: int | None = None
    waiting_ns: int | None = None
    sequence: int | None = None
    group: str | None = None
    bytes: int | None = None
    device_waiting_ns: int = 0  # no part of the span's time on the device
    in_graph: bool = False  # of a wait: the autograd engine ran on its thread


@dataclass(slots=True)
class SeenStep:
    """A step that has ended on the host."""

    number: int
    begin: Mark
    end: Mark
    boundaries: Boundaries  # of its parts
    spans: list[Span]  # of layers, by their begins
    waits: list[Span]  # for other ranks, by their begins
    # when graphs had been run, and the ranks that their gradients are reduced over behind that
    ends: list[tuple[Moment, str | None]]
    events: list[Any]  # all on the device that these are made of, and others
    thread: int  # of the training loop
    stages: int = 1  # of a pipeline, so many are here


# --- backward, by what the autograd engine comes past ---

BEGIN, END, RECOMPUTE, RECOMPUTED, GRAPH_ENDS = range(5)
_Record = tuple[int, "Call | None", Moment]
_task_id = torch._C._current_graph_task_id


@dataclass(slots=True, eq=False)
class EngineRun:
    """One run of the autograd engine, with those that were started within it."""

    backward: int  # the step's how-manieth
    finished: bool = False
    records: list[_Record] = field(default_factory=list)


def _spans_of(records: list[_Record]) -> Iterator[Span]:
    """Backward and recompute in order; the backward of a block is in pieces where something is recomputed in it."""
    call: Call | None = None  # whose backward it is
    since: Moment | None = None
    interrupted: Call | None = None
    recompute_since: Moment | None = None
    for what, which, moment in records:
        if what == BEGIN and which is call:
            continue  # it has several outputs
        if what == END and which is not call:
            continue  # a tensor that many blocks take
        if call is not None and since is not None:
            yield _span("backward", call, since, moment)
        if what == RECOMPUTE:
            interrupted, call, recompute_since = call, None, moment
        elif what == RECOMPUTED:
            if which is not None and recompute_since is not None:
                yield _span("recompute", which, recompute_since, moment)
            call, since, recompute_since = interrupted, moment, None
        elif what == BEGIN:
            call, since = which, moment
        else:
            call = None


def _span(kind: str, call: Call, begin: Moment, end: Moment, thread: int = 0) -> Span:
    name = call.module.name
    return Span(kind, f"{name} {kind}", begin, end, thread, name, microbatch=call.microbatch)


def _node_number() -> int:
    """Of the node that the autograd engine runs on this thread."""
    node = torch._C._current_autograd_node()
    return -1 if node is None else node._sequence_nr()


# --- listening ---

_inside_functorch: Callable[[], Any] = getattr(torch._C._functorch, "peek_interpreter_stack", lambda: None)


class _Here(threading.local):
    """What is so on this thread."""

    def __init__(self) -> None:
        self.thread = threading.get_native_id()
        self.inside = False  # a timed module is being called
        self.outputs: Known = []  # of the last one
        self.run: EngineRun | None = None


class LayerSpans(Breakdown):
    """Listens to calls of modules, of the autograd engine and of optimizers, and to waits for other ranks.

    Beside the parts of a step this notes when the blocks of a model are called, and when their backward is run. Its own
    failures go to `on_failure`.

    Args:
        model: as it is called in the loop, wrappers included, or a pipeline's schedule or stage.
        stages: of the pipeline, those that are here.
        events: None: nothing is measured on a device.
        others: see `Breakdown`.
    """

    def __init__(self, model: object, stages: Sequence[Stage], events: EventPool | None, **others: Any) -> None:
        # What a schedule calls are its stages' modules; nobody else holds this list. A model is not held.
        self._called = None if isinstance(model, nn.Module) else nn.ModuleList(stage.module for stage in stages)
        super().__init__(model=model if isinstance(model, nn.Module) else self._called, **others)
        self._stages = max(1, len(stages))
        self._events_out = 0  # that nobody has given back
        self._timed = weakref.ref(model)
        self._events = events
        self._modules: TimedModules | None = None
        self._look_again_in = 1  # steps that miss a module
        self._misses = 0
        self._here = _Here()
        self._times_layers = False  # a step is open, and no failure was in it
        self._group: str | None = None  # that the gradients of the last forward are reduced over
        self._forks = log.forks
        self._last_boundaries: Boundaries = ()
        self._reset()

    def _reset(self) -> None:
        """As at the begin of a step."""
        self._calls: list[Call] = []  # forwards that have ended
        self._waits: list[Span] = []
        self._ends: list[tuple[Moment, str | None]] = []
        self._recorded: list[Any] = []  # events
        self._runs: list[EngineRun] = []  # whatever threads these are on
        self._run_of_task: dict[int, EngineRun] = {}
        self._room = MOST_NOTED
        self._here.outputs = []

    def begin_step(self, mark: Mark) -> None:
        """A step begins. Looks for the modules in the first, and when some were missed."""
        super().begin_step(mark)
        self.forget_layers()
        if self._modules is None:
            model = self._timed()
            if model is None:
                return
            self._modules = TimedModules(model)
        for timed in self._modules.all:
            timed.calls = 0
        if log.has_process_group():
            WAITS.listen(self)
        self._times_layers = True

    def forget_layers(self) -> None:
        """What was noted of layers since `take` is of no step that is written."""
        self._times_layers = False
        self.give_back(self._recorded)
        for run in self._runs:
            run.finished = True
        self._reset()

    def end_step(self) -> Boundaries:
        """The step has ended: where its parts begin. Its layers are what `take` returns."""
        boundaries = self._last_boundaries = super().end_step()
        self._times_layers = False
        return boundaries

    def take(self, number: int, begin: Mark, end: Mark) -> SeenStep:
        """Return the step that has just ended, whose events are to be given back."""
        if self._modules is not None and self.entered.get("forward"):
            self._look_for_missed(self._modules)
        spans = [_span("forward", call, call.begin, call.end, call.thread) for call in self._calls if call.end]
        for run in self._runs:
            run.finished = True
            spans += _spans_of(run.records)
        spans.sort(key=lambda span: span.begin[0])
        self._waits.sort(key=lambda wait: wait.begin[0])
        noted = (self._last_boundaries, spans, self._waits, self._ends, self._recorded)
        step = SeenStep(number, begin, end, *noted, threading.get_native_id(), self._stages)
        self._reset()
        return step

    def stop(self) -> None:
        """Listen no more; the step that was begun is none."""
        WAITS.stop_listening(self)
        super().stop()
        self.forget_layers()

    def give_back(self, events: list[Any]) -> None:
        """Those of a step that nobody reads any more."""
        self._events_out -= len(events)
        if self._events is not None:
            for event in events:
                self._events.give_back(event)

    # -- calls of modules, as `scopes.Listener` has it ------------------------------------------------

    def open_call(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], marked: set[str] | None = None
    ) -> object | None:
        """A module is called."""
        here, within = self._here, self.within
        if here.inside and self._times_layers:
            return None  # most calls are
        phase = None if within and within[-1] != "optimizer" else super().open_call(module, args, kwargs)
        if not self._times_layers or self._modules is None:
            return phase
        try:
            if phase is not None:
                self._group = _reduced_over(module)
            timed, recomputed, for_node = self._modules.find(module), in_backward(), None
            if timed is None and recomputed:
                timed, for_node = self._modules.find(module, inside=True), _node_number()
            if timed is None or not self._is_here() or not self._has_room():
                return phase
            times = self.entered.get("backward" if recomputed else "forward", 0)
            call = Call(timed, times - 1, phase, here.thread, recomputed, for_node)
            if not recomputed:
                timed.calls += 1
            if for_node is None:
                self._hook_inputs(call, args, kwargs)
            here.inside = True
            call.begin = self._moment()
            if recomputed:
                self._note(RECOMPUTE, call, call.begin)
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
            if self._times_layers and opened.for_node is None:
                self._hook_outputs(opened, result)
        except Exception as error:
            self._fail(error)

    def close_call(self, opened: Any) -> None:
        """That call has returned or raised."""
        if type(opened) is not Call:
            super().close_call(opened)
            return
        self._end(opened)
        if opened.phase is not None:
            super().close_call(opened.phase)

    def _end(self, call: Call) -> None:
        if call.end is not None:
            return
        call.end = call.begin  # where no step is open
        self._here.inside = False
        if not self._times_layers:
            return
        try:
            call.end = self._moment()
            if call.recomputed:
                self._note(RECOMPUTED, call, call.end)
            else:
                self._calls.append(call)
        except Exception as error:
            self._fail(error)

    # -- boundaries in the graph ------------------------------------------------------------------

    def _hook_inputs(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if _inside_functorch() is not None:
            return
        known = self._here.outputs
        for tensor, node in tensors_in_graph((*args, *kwargs.values())):
            call.inputs.append((weakref.ref(tensor), tensor._version))
            if not is_among(tensor, known):  # else the begin of the last one's backward is the end of this one's
                node.register_prehook(partial(self._reached, END, call))

    def _hook_outputs(self, call: Call, result: Any) -> None:
        if _inside_functorch() is not None:
            return
        outputs: Known = []
        for tensor, node in tensors_in_graph((result,)):
            outputs.append((weakref.ref(tensor), tensor._version))
            if is_among(tensor, call.inputs):  # somebody else's, given on
                continue
            begins = partial(self._reached, BEGIN, call)
            hooks: Any = tensor._backward_hooks
            if hooks:  # as FSDP has them, to gather what the block's backward needs, which is part of it: ours is first
                hooks.move_to_end(tensor.register_hook(begins).id, last=False)  # type: ignore[no-untyped-call]
            else:
                node.register_prehook(begins)
            if not call.inputs and only_accumulates(node):
                node.register_hook(partial(self._reached, END, call))
        self._here.outputs = outputs

    def _reached(self, what: int, call: Call, *_: Any) -> None:
        """The engine is about to run a node, or has run it."""
        if self._times_layers and not is_tracing():
            try:
                self._note(what, call, self._moment())
            except Exception as error:
                self._fail(error)

    def _note(self, what: int, call: Call, moment: Moment) -> None:
        """The engine that runs on this thread came past something."""
        task = _task_id()
        run = self._run_of_task.get(task)
        if self._room <= 0 and not self._has_room():
            return
        self._room -= 1
        if run is None:
            if task == -1:
                return
            backward, run = self.entered.get("backward", 0), self._here.run
            if run is None or run.finished or run.backward != backward:  # else a checkpoint runs its own graph
                run = self._here.run = EngineRun(backward)
                self._runs.append(run)
            self._run_of_task[task] = run
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._graph_ends, run, task))
        if what == RECOMPUTE and run.records:
            before, one, _ = run.records[-1]
            if before == RECOMPUTED and one is not None and one.is_part_like(call):
                run.records.pop()
                return
        run.records.append((what, call, moment))

    def _graph_ends(self, run: EngineRun, task: int) -> None:
        """All nodes of a graph have run; what others do at its end comes behind this."""
        if not self._times_layers:
            return
        try:
            moment = self._moment()
            run.records.append((GRAPH_ENDS, None, moment))
            self._run_of_task.pop(task, None)
            if run not in self._run_of_task.values():  # else it was run within another
                run.finished = True
                self._ends.append((moment, self._group))
        except Exception as error:
            self._fail(error)

    # -- waits, as listeners of `WAITS` have it -----------------------------------------------------

    def open_wait(self) -> Moment | None:
        """A wait for other ranks begins."""
        try:
            if self._times_layers and self._is_here() and self._has_room():
                return self._moment()
        except Exception as error:
            self._fail(error)
        return None

    def close_wait(self, opened: Moment, info: WaitInfo) -> None:
        """That one is over."""
        try:
            if self._times_layers and self._is_here():
                wait = Span("communication", info.name, opened, self._moment(), threading.get_native_id())
                wait.group, wait.bytes, wait.in_graph = info.group, info.bytes, in_backward()
                self._waits.append(wait)
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

    def _has_room(self) -> bool:
        """For one more of this step."""
        self._room -= 1
        if self._room < 0:
            self._notices.warn_once(
                "layers", f"blocks, and their backward, were run {MOST_NOTED} times in a step; the rest is left out"
            )
        return self._room >= 0

    def _is_here(self) -> bool:
        """This is no fork of the process that it was made in."""
        return log.forks == self._forks

    def _look_for_missed(self, modules: TimedModules) -> None:
        """Modules may have been put in others' place, or be compiled into something that calls no module."""
        missed = [timed for timed in modules.all if not timed.calls]
        if modules.all and not missed:
            return
        if len(missed) == len(modules.all):
            self._notices.warn_once(
                "layers",
                "no block of the model was called as a module in a step, as in a model that is compiled as a whole: "
                "their times are not known; compile the blocks one by one to see them",
            )
        self._misses += 1
        if self._misses >= self._look_again_in:
            self._misses, self._look_again_in = 0, 2 * self._look_again_in
            self._modules = None

    def _fail(self, error: Exception) -> None:
        self._times_layers = False
        self._on_failure("timing layers", error)


# What compiled code comes to where it breaks, and backward while Dynamo compiles.
for _ours in (LayerSpans.take_result, LayerSpans._reached, LayerSpans._graph_ends):
    keep_dynamo_off(_ours, and_below=True)
