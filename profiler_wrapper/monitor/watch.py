"""Follows the steps of one loop: begins and ends them, and passes on what is known of each as soon as it is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from profiler_wrapper.capture.owned_tensors import find_optimizers
from profiler_wrapper.capture.torch_state import profiler_is_on
from profiler_wrapper.errors import Notices
from profiler_wrapper.monitor.flop_probe import FlopProbe
from profiler_wrapper.monitor.job import Job, Told
from profiler_wrapper.monitor.records import RunStatistics, StepRecord
from profiler_wrapper.monitor.sinks import Sinks
from profiler_wrapper.monitor.steps import (
    Batch,
    BatchCounter,
    Batches,
    Copy,
    Gaps,
    Intake,
    Memory,
    PendingStep,
    PendingSteps,
)
from profiler_wrapper.monitor.work import Shapes, StepWorks, why_over_peak
from profiler_wrapper.timer.device_events import Accelerator, Mark, StepClock
from profiler_wrapper.timer.layer_timer import LayerWatch
from profiler_wrapper.timer.log import SpanPlace
from profiler_wrapper.timer.steps import Boundaries, Breakdown

CLOSING_WAIT_S = 10.0  # for the device, when the monitor is closed
_LOOK_EVERY_S = 0.001


@dataclass(frozen=True, slots=True)
class _Point:
    """Where a step begins or ends."""

    mark: Mark
    profiled: bool  # some torch profiler was on


@dataclass(frozen=True, slots=True)
class _Begun:
    step: int
    point: _Point
    recorded: bool  # by the probe


@dataclass(frozen=True, slots=True)
class _Opened:
    """What is there from the end of the first step on."""

    job: Job
    works: StepWorks
    batches: Batches
    sinks: Sinks


class StepWatch:
    """What stands behind a `TrainingMonitor`; its methods may raise.

    Args:
        on_failure: told of what fails where nobody could catch it.
        on_open: called when the logs have been opened.
        layers: the spans of each step's layers and parts are written, too.
    """

    def __init__(
        self,
        told: Told,
        notices: Notices,
        accelerator: Accelerator | None,
        *,
        on_failure: Callable[[str, Exception], None],
        on_open: Callable[[], None],
        layers: bool = False,
    ) -> None:
        self.last: StepRecord | None = None
        self.explicit_starts = False
        self._told, self._notices = told, notices
        self._on_open = on_open
        self._start_time = time.time()
        self._clock = StepClock(accelerator)
        self._intake = Intake(accelerator, notices)
        self._memory = Memory(accelerator) if told.config.perf_memory_tracking else None
        self._probe = FlopProbe(told.config.flops_profile_freq, notices)
        self._optimizers = find_optimizers(told.optimizer)
        self._breakdown: Breakdown | None = None
        self._layers: LayerWatch | None = None
        if layers and told.model is not None:
            self._layers = LayerWatch(
                told.model,
                _place_of(told),
                accelerator,
                notices,
                mark=self._clock.mark,
                on_failure=on_failure,
                optimizers=self._optimizers,
            )
            self._breakdown = self._layers.parts
        elif told.config.perf_breakdown:
            self._breakdown = Breakdown(
                self._clock.mark, on_failure, model=told.model, optimizers=self._optimizers, notices=notices
            )
        self._calls: BatchCounter | None = None  # of the model, until a step has told whether they are as told
        if told.model is not None and (told.batch_size or told.seq_length):
            self._calls = BatchCounter(told.model)
        self._job: Job | None = None
        self._opened: _Opened | None = None
        self._opening = threading.Lock()  # loops on two threads have one log
        self._recorded_shapes: Shapes = ()
        self._pending = PendingSteps()
        self._gaps = Gaps(notices)
        self._begun: _Begun | None = None
        self._last_end: _Point | None = None
        self._next_step = 0

    @property
    def statistics(self) -> RunStatistics | None:
        return None if self._opened is None else self._opened.sinks.statistics

    def begin(self, step: Any, *, at_last_end: bool = False) -> None:
        """A step begins: now, or where the last one ended."""
        self.forget()
        self._pass_on()
        job = self._job or self._find_job()
        told = self._intake.whole("step", step)
        number = self._next_step if told is None else told
        recorded = self._probe.wants(number, otherwise_known=self._known_otherwise(job)) and self._probe.begin(number)
        point = self._last_end if at_last_end and not recorded else None
        self._begun = _Begun(number, point or self._now(), recorded)
        if self._breakdown is not None:
            self._breakdown.start()
            self._breakdown.begin_step(self._begun.point.mark)
        if self._layers is not None:
            self._layers.layers.begin_step()
        if self._calls is not None:
            self._calls.start()
            self._calls.sizes.clear()  # of a step that was forgotten

    def forget(self) -> None:
        """The step that was begun is none."""
        begun, self._begun = self._begun, None
        if begun is None:
            return
        if begun.recorded:
            self._probe.cancel()
        if self._breakdown is not None:
            self._breakdown.end_step()
        if self._layers is not None:
            self._layers.layers.forget_step()

    def forget_time(self) -> None:
        """The step that was begun will end with its counts and no time."""
        self.forget()
        self._last_end = None  # else it would begin there

    def end(
        self,
        *,
        step: Any,
        epoch: Any,
        samples: Any,
        tokens: Any,
        attention_mask: Any,
        shapes: Any,
        numbers: Mapping[str, Any],
        skip: frozenset[str],
    ) -> None:
        """The step ends now."""
        end, timestamp = self._now(), time.time()
        begun, self._begun = self._begun, None
        begin = begun.point if begun is not None else self._last_end
        boundaries = self._parts(begun)
        found = None if self._layers is None else self._layers.layers.end_step()
        recorded = begun is not None and begun.recorded
        if begin is not None and self._last_end is not None and not recorded:
            between_s = begin.mark.host_s - self._last_end.mark.host_s
            self._gaps.add(between_s=between_s, inside_s=end.mark.host_s - begin.mark.host_s)
        if recorded:
            self._probe.end()
        opened = self._opened or self._open()
        told = self._intake.whole("step", step)
        number = told if told is not None else begun.step if begun is not None else self._next_step
        profiled = recorded or end.profiled or (begin is not None and begin.profiled)
        if self._layers is not None and found is not None:
            if begun is None or profiled:  # nobody saw it, or it was slow for a reason of its own
                self._layers.layers.give_back(found.events)
            else:
                self._layers.add(number, begun.point.mark, end.mark, boundaries or (), found)
        batch = opened.batches.of(samples, tokens, attention_mask, shapes)
        if self._calls is not None and begun is not None:
            self._compare_batch(self._calls, opened, number, batch, told=attention_mask is None and shapes is None)
        logged = {name: self._intake.number(name, value) for name, value in numbers.items()}
        if logged.get("learning_rate") is None and self._optimizers:
            rate = self._optimizers[0].param_groups[0].get("lr")
            logged["learning_rate"] = self._intake.number("learning_rate", rate)
        copied = any(isinstance(value, Copy) for value in (*batch.numbers, *logged.values()))
        if recorded:
            self._recorded_shapes = batch.shapes
        measurement = self._probe.finished()
        if measurement is not None:
            opened.works.take(measurement, self._recorded_shapes)
        self._pending.add(
            PendingStep(
                step=number,
                timestamp=timestamp,
                begin=None if begin is None else begin.mark,
                end=end.mark,
                read_after=self._clock.mark() if copied else end.mark,
                profiled=profiled,
                epoch=self._intake.whole("epoch", epoch),
                samples=batch.samples,
                tokens=batch.tokens,
                numbers=logged,
                work=opened.works.of(batch.shapes),
                memory=(None, None) if self._memory is None else self._memory.read(),
                boundaries=boundaries if self._told.config.perf_breakdown else None,
                skip=skip,
            )
        )
        self._next_step = number + 1
        self._last_end = self._now() if recorded else end  # writing the trace is no part of the next step
        self._pass_on()

    def close(self, *, wait: bool) -> None:
        """Pass on what is left, waiting for the device if asked to, and take everything away."""
        actions: list[Callable[[], object]] = [self.forget]
        if self._opened is not None:
            actions += [self._wait] if wait else []
            actions += [lambda: self._pending.take(self._give, everything=True), self._opened.sinks.close]
        if self._breakdown is not None:
            actions.insert(0, self._breakdown.stop)
        if self._layers is not None:
            actions.append(self._layers.close)
        if self._memory is not None:
            actions.append(self._memory.close)
        if self._calls is not None:
            actions.append(self._calls.stop)
        actions.append(self._probe.close)
        for action in actions:
            try:
                action()
            except Exception as error:
                self._notices.warn_once("closing", f"closing the monitor: {type(error).__name__}: {error}")

    def _now(self) -> _Point:
        return _Point(self._clock.mark(), profiler_is_on())

    def _find_job(self) -> Job:
        self._job = Job(self._told, self._notices)
        return self._job

    def _open(self) -> _Opened:
        """What needs a device that is in use: its peaks, and the logs that tell them."""
        with self._opening:
            if self._opened is not None:
                return self._opened
            job = self._job or self._find_job()
            works = job.works()
            sinks = job.sinks(works.roof.peaks, self._start_time, "" if self._memory is None else self._memory.kind)
            batches = Batches(self._told, job.sizes, self._intake, self._notices)
            self._opened = _Opened(job, works, batches, sinks)
            self._on_open()
            return self._opened

    def _known_otherwise(self, job: Job) -> bool:
        """Something but a measurement tells the FLOPs of a step."""
        if self._told.flops_per_step is not None:
            return True
        return job.formula is not None and (self._opened is None or not self._opened.works.formula_fails)

    def _parts(self, begun: _Begun | None) -> Boundaries | None:
        if self._breakdown is None:
            return None
        boundaries = self._breakdown.end_step()
        return boundaries if begun is not None else None

    def _compare_batch(self, calls: BatchCounter, opened: _Opened, step: int, batch: Batch, *, told: bool) -> None:
        """What was `told` of all batches, with the calls of the first step that has some."""
        seen = calls.take()
        if seen:
            calls.stop()
            self._calls = None
            if told:
                opened.batches.compare(step, batch.shapes, seen)

    def _pass_on(self) -> None:
        if self._opened is not None:
            self._pending.take(self._give)
        if self._layers is not None:
            self._layers.pass_on()

    def _give(self, step: PendingStep, reached: bool) -> None:
        opened = self._opened
        assert opened is not None
        if not reached:
            self._notices.warn_once(
                "never reached", f"the time of step {step.step} is not known: the device did not come to its end"
            )
        record = step.record(
            world_size=opened.job.sizes.world_size,
            convention=self._told.convention,
            notices=self._notices,
            reached=reached,
        )
        if record.mfu is not None and record.mfu > 1:
            self._notices.warn_once("over the peak", why_over_peak(record, opened.works))
        self.last = record
        opened.sinks.write(record, skip=step.skip)

    def _wait(self) -> None:
        """For the device, no longer than CLOSING_WAIT_S."""
        until = time.monotonic() + CLOSING_WAIT_S
        self._pass_on()
        while len(self._pending) and time.monotonic() < until:
            time.sleep(_LOOK_EVERY_S)
            self._pass_on()


def _place_of(told: Told) -> SpanPlace:
    return SpanPlace(
        output_dir=told.output_dir, rank=told.rank, world_size=told.sizes.world_size, device_mesh=told.device_mesh
    )
