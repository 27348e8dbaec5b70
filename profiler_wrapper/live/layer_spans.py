"""Forward, backward and recompute of each block, from moments at its boundaries, without torch's profiler.

A forward is the call of a block. For its backward, the nodes of the graph that made its outputs and its inputs are
given a hook that notes when the engine comes to them and returns nothing: gradients stay bit by bit what they are, the
modules have no hook, tensors have none either, and those of a graph are gone with it. Nothing holds a tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from time import perf_counter_ns
from typing import Any

import torch
from torch import nn

from profiler_wrapper.capture import calls
from profiler_wrapper.capture.phases import in_backward
from profiler_wrapper.capture.signals import is_compiling
from profiler_wrapper.live import rank_waits
from profiler_wrapper.live.backward_runs import (
    BEGIN,
    END,
    RECOMPUTE,
    RECOMPUTED,
    BackwardRuns,
    LayerSpan,
    Moment,
    Pass,
)
from profiler_wrapper.live.breakdown import Breakdown
from profiler_wrapper.live.device_events import EventPool
from profiler_wrapper.live.graph_tensors import Known, hook_first, is_among, only_accumulates, tensors_in_graph
from profiler_wrapper.live.layer_calls import Call, Forks, Here, StepSpans
from profiler_wrapper.live.layer_units import Units
from profiler_wrapper.live.log import has_process_group
from profiler_wrapper.live.reducing import reduced_in
from profiler_wrapper.live.step_waits import StepWaits
from profiler_wrapper.notices import Notices

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
            calls.keep_dynamo_off(LayerSpans.take_result, and_below=True)
            calls.keep_dynamo_off(LayerSpans._reached, and_below=True)
            calls.keep_dynamo_off(LayerSpans._graph_ends, and_below=True)
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
