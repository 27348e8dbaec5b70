"""Follows the steps of one loop: begins and ends them, and passes on what is known of each as soon as it is."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, NamedTuple

import torch

from profiler_wrapper.capture.growth import peak_resident_bytes
from profiler_wrapper.capture.owned_tensors import find_optimizers
from profiler_wrapper.capture.torch_state import profiler_is_on
from profiler_wrapper.errors import Notices
from profiler_wrapper.monitor.batches import (
    AsyncScalars,
    Batch,
    BatchCounter,
    Batches,
    Count,
    Number,
    value_of,
)
from profiler_wrapper.monitor.flop_probe import FlopProbe
from profiler_wrapper.monitor.job import Job, MonitorArgs
from profiler_wrapper.monitor.records import RunStatistics, StepRecord
from profiler_wrapper.monitor.sinks import Sinks
from profiler_wrapper.monitor.work import Shapes, StepWorks, why_over_peak
from profiler_wrapper.timer.device_events import Accelerator, Mark, StepClock, seconds_between
from profiler_wrapper.timer.layer_timer import LayerWatch
from profiler_wrapper.timer.log import SpanPlace
from profiler_wrapper.timer.steps import Boundaries, Breakdown, parts_of

# --------------------------------------------------------------------------------------------------
# Steps that have ended on the host but perhaps not on the device, in order.

MOST_PENDING = 1024  # steps that the device may be behind


@dataclass(slots=True, kw_only=True)
class PendingStep:
    """A step that has ended on the host."""

    known: StepRecord  # at once
    begin: Mark | None  # None: nobody saw it
    end: Mark
    read_after: Mark  # the mark behind which all of `numbers` and the step's end are there
    batch: Batch
    numbers: Mapping[str, Number]  # loss, grad_norm, learning_rate
    boundaries: Boundaries | None  # of its parts; None: not measured
    skip: frozenset[str]  # the sinks that don't get it

    def record(self, notices: Notices, *, reached: bool) -> StepRecord:
        """The step as it is reported; without `reached`, what the device did not come to is not known."""
        step = self.known.step
        if not reached:
            notices.warn_once(
                "never reached", f"the time of step {step} is not known: the device did not come to its end"
            )
            return self.known
        time_s = None if self.begin is None else seconds_between(self.begin, self.end)
        if self.begin is not None and time_s is None:
            notices.warn_once("clock", f"the time of step {step} is not known: the clock ran backwards in it")
        return replace(
            self.known,
            step_time_s=time_s,
            breakdown_s=parts_of(self.boundaries, self.end, time_s) if self.boundaries and time_s is not None else None,
            samples=_total(self.batch.samples),
            tokens=_total(self.batch.tokens),
            **{name: value_of(number) for name, number in self.numbers.items()},  # type: ignore[arg-type]
        )


def _total(count: Count) -> int | None:
    """Of the job; None where it is not known."""
    value = None if count is None else value_of(count[0])
    return None if count is None or value is None else round(value * count[1])


# --------------------------------------------------------------------------------------------------
# Time that lies between steps: a loop that fetches its batches there is slower than its steps say.

_STEPS = 20  # after so many it is known how the loop goes
_LARGE = 0.1  # share of the time


class Gaps:
    """Looks at the first steps, on the host's clock, and says once if usually much time lies between them."""

    def __init__(self, notices: Notices) -> None:
        self._notices = notices
        self._shares: list[float] = []

    def add(self, between_ns: int, inside_ns: int) -> None:
        """The time from the end of the step before to the begin of this one, and that of this one."""
        if len(self._shares) < _STEPS:
            self._shares.append(max(0, between_ns) / (max(0, between_ns) + max(0, inside_ns) or 1))
            share = median(self._shares)  # an evaluation now and then is no part of the loop
            if len(self._shares) == _STEPS and share > _LARGE:
                self._notices.warn_once(
                    "gaps",
                    f"{100 * share:.0f} % of the time lies between steps (fetching batches?), and is in no step time "
                    "or rate: let a step hold it, by log_step() at its end, or with batch = next(batches) inside it",
                )


# --------------------------------------------------------------------------------------------------
# The memory that a training uses: the accelerator's, or without one the process's.

ON_DEVICE = "allocated on the accelerator, as torch's allocator counts"
IN_PROCESS = "resident memory of the process"


class Memory:
    """Reads current and peak bytes; resets nothing."""

    def __init__(self, accelerator: Accelerator | None) -> None:
        self._accelerator = accelerator
        self._peak: int | None = None

    @property
    def kind(self) -> str:
        """What is counted."""
        return IN_PROCESS if self._accelerator is None else ON_DEVICE

    def read(self) -> tuple[int | None, int | None]:
        """Bytes now, and the most since the process began or the user last reset it; None where not known."""
        if self._accelerator is not None:
            return self._accelerator.memory() if self._accelerator.ready() else (None, None)
        try:
            with open("/proc/self/statm", "rb", buffering=0) as statm:  # a third of the time of a buffered file
                current = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except OSError:  # no such file on this system
            current = None
        known = [size for size in (current, peak_resident_bytes(), self._peak) if size is not None]
        self._peak = max(known, default=None)  # the system's two counts are not of the same instant
        return current, self._peak


# --------------------------------------------------------------------------------------------------
# The steps of one loop.

CLOSING_WAIT_S = 10.0  # for the device, when the monitor is closed
_LOOK_EVERY_S = 0.001


class _Point(NamedTuple):
    """Where a step begins or ends."""

    mark: Mark
    profiled: bool  # some torch profiler was on
    step: int = 0  # that begins here
    recorded: bool = False  # by the probe


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
        layers: the spans of each step's layers and parts are written, too.
    """

    def __init__(
        self,
        given: MonitorArgs,
        notices: Notices,
        accelerator: Accelerator | None,
        *,
        on_failure: Callable[[str, Exception], None],
        layers: bool = False,
    ) -> None:
        self.last: StepRecord | None = None
        self.explicit_starts = False
        self._args, self._notices = given, notices
        self.on_open: Callable[[], object] = lambda: None  # called when the logs have been opened
        self._start_time = time.time()
        self._clock = StepClock(accelerator)
        self._scalars = AsyncScalars(accelerator, notices)
        self._memory = Memory(accelerator) if given.config.perf_memory_tracking else None
        self._probe = FlopProbe(given.config.flops_profile_freq, notices)
        self._optimizers = find_optimizers(given.optimizer)
        self._breakdown: Breakdown | None = None
        self._layers: LayerWatch | None = None
        if layers and given.model is not None:
            self._layers = LayerWatch(
                given.model,
                SpanPlace(
                    output_dir=given.output_dir,
                    rank=given.rank,
                    world_size=given.world_size,
                    device_mesh=given.device_mesh,
                ),
                accelerator,
                notices,
                mark=self._clock.mark,
                on_failure=on_failure,
                optimizers=self._optimizers,
            )
            self._breakdown = self._layers.parts
        elif given.config.perf_breakdown:
            self._breakdown = Breakdown(
                self._clock.mark, on_failure, model=given.model, optimizers=self._optimizers, notices=notices
            )
        self._calls: BatchCounter | None = None  # of the model, until a step has told whether they are as told
        if given.model is not None and (given.batch_size or given.seq_length):
            self._calls = BatchCounter(given.model)
        self._job: Job | None = None
        self._opened: _Opened | None = None
        self._opening = threading.Lock()  # loops on two threads have one log
        self._recorded_shapes: Shapes = ()
        self._pending: deque[PendingStep] = deque()  # in order; the device has perhaps not come to their end
        self._gaps = Gaps(notices)
        self._begun: _Point | None = None
        self._last_end: _Point | None = None
        self._next_step = 0

    @property
    def statistics(self) -> RunStatistics | None:
        return None if self._opened is None else self._opened.sinks.statistics

    def begin(self, step: Any, *, at_last_end: bool = False) -> None:
        """A step begins: now, or where the last one ended."""
        self.forget()
        self._pass_on()
        job = self._job = self._job or Job(self._args, self._notices)
        given_step = self._scalars.whole("step", step)
        number = self._next_step if given_step is None else given_step
        recorded = self._probe.wants(number, otherwise_known=self._known_otherwise(job)) and self._probe.begin(number)
        point = self._last_end if at_last_end and not recorded else None
        self._begun = begun = (point or self._now())._replace(step=number, recorded=recorded)
        if self._breakdown is not None:
            self._breakdown.start()
            self._breakdown.begin_step(begun.mark)
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
        begin = begun or self._last_end
        ended_parts = () if self._breakdown is None else self._breakdown.end_step()
        boundaries = None if self._breakdown is None or begun is None else ended_parts
        found = None if self._layers is None else self._layers.layers.end_step()
        recorded = begun is not None and begun.recorded
        if begin is not None and self._last_end is not None and not recorded:
            between_ns = begin.mark.host_ns - self._last_end.mark.host_ns
            self._gaps.add(between_ns, end.mark.host_ns - begin.mark.host_ns)
        if recorded:
            self._probe.end()
        opened = self._opened or self._open()
        given_step = self._scalars.whole("step", step)
        number = given_step if given_step is not None else begun.step if begun is not None else self._next_step
        profiled = recorded or end.profiled or (begin is not None and begin.profiled)
        if self._layers is not None and found is not None:
            if begun is None or profiled:  # nobody saw it, or it was slow for a reason of its own
                self._layers.layers.give_back(found.events)
            else:
                self._layers.add(number, begun.mark, end.mark, boundaries or (), found)
        batch = opened.batches.of(samples, tokens, attention_mask, shapes)
        if self._calls is not None and begun is not None:
            seen = self._calls.take()
            if seen:  # the first step that has some
                self._calls.stop()
                self._calls = None
                opened.batches.compare(number, batch.shapes, seen)
        logged = {name: self._scalars.number(name, value) for name, value in numbers.items()}
        if logged.get("learning_rate") is None and self._optimizers:
            rate = self._optimizers[0].param_groups[0].get("lr")
            logged["learning_rate"] = self._scalars.number("learning_rate", rate)
        counts = [count[0] for count in (batch.samples, batch.tokens) if count is not None]
        copied = any(isinstance(value, torch.Tensor) for value in (*counts, *logged.values()))
        if recorded:
            self._recorded_shapes = batch.shapes
        measurement = self._probe.finished()
        if measurement is not None:
            opened.works.take(measurement, self._recorded_shapes)
        work = opened.works.of(batch.shapes)
        memory, peak = (None, None) if self._memory is None else self._memory.read()
        known = StepRecord(
            step=number,
            timestamp=timestamp,
            convention=self._args.convention,
            world_size=opened.job.sizes.world_size,
            memory_bytes=memory,
            peak_memory_bytes=peak,
            profiled=profiled,
            epoch=self._scalars.whole("epoch", epoch),
            **({} if work is None else work._asdict()),
        )
        self._pending.append(
            PendingStep(
                known=known,
                begin=None if begin is None else begin.mark,
                end=end.mark,
                read_after=self._clock.mark() if copied else end.mark,
                batch=batch,
                numbers=logged,
                boundaries=boundaries if self._args.config.perf_breakdown else None,
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
            actions += [lambda: self._pass_on(everything=True), self._opened.sinks.close]
        if self._breakdown is not None:
            actions.insert(0, self._breakdown.stop)
        if self._layers is not None:
            actions.append(self._layers.close)
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

    def _open(self) -> _Opened:
        """What needs a device that is in use: its peaks, and the logs that tell them."""
        with self._opening:
            if self._opened is not None:
                return self._opened
            job = self._job = self._job or Job(self._args, self._notices)
            works = job.works()
            sinks = job.sinks(works.roof.peaks, self._start_time, "" if self._memory is None else self._memory.kind)
            batches = Batches(self._args, job.sizes, self._scalars, self._notices)
            self._opened = _Opened(job, works, batches, sinks)
            self.on_open()
            return self._opened

    def _known_otherwise(self, job: Job) -> bool:
        """Something but a measurement tells the FLOPs of a step."""
        if self._args.flops_per_step is not None:
            return True
        return job.formula is not None and (self._opened is None or not self._opened.works.formula_fails)

    def _pass_on(self, *, everything: bool = False) -> None:
        """All steps that the device came to the end of, and those it is too far behind with; or `everything`."""
        pending = self._pending
        while pending and self._opened is not None:
            reached = pending[0].read_after.reached
            if not reached and not everything and len(pending) <= MOST_PENDING:
                break
            step = pending.popleft()
            record = step.record(self._notices, reached=reached)
            if record.mfu is not None and record.mfu > 1:
                self._notices.warn_once("over the peak", why_over_peak(record, self._opened.works))
            self.last = record
            self._opened.sinks.write(record, skip=step.skip)
        if self._layers is not None:
            self._layers.pass_on()

    def _wait(self) -> None:
        """For the device, no longer than CLOSING_WAIT_S."""
        until = time.monotonic() + CLOSING_WAIT_S
        self._pass_on()
        while self._pending and time.monotonic() < until:
            time.sleep(_LOOK_EVERY_S)
            self._pass_on()
