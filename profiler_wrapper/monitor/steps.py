"""Follows the steps of one loop: begins and ends them, and passes on what is known of each as soon as it is."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from profiler_wrapper.capture.growth import peak_resident_bytes
from profiler_wrapper.capture.layers import all_parameters
from profiler_wrapper.capture.owned_tensors import find_optimizers
from profiler_wrapper.capture.records import RunInfo
from profiler_wrapper.capture.runinfo import float32_matmul_precision, mesh_of, run_info
from profiler_wrapper.capture.torch_state import profiler_is_on
from profiler_wrapper.errors import Notices, WrongUse, in_a_line, occupy_closed_streams, shown
from profiler_wrapper.monitor.batches import (
    AsyncScalars,
    Batch,
    BatchCounter,
    Batches,
    BatchSize,
    Count,
    Number,
    value_of,
)
from profiler_wrapper.monitor.config import MonitorConfig
from profiler_wrapper.monitor.flop_probe import FlopProbe
from profiler_wrapper.monitor.logs import sinks_of
from profiler_wrapper.monitor.records import RunStatistics, Session, StepRecord
from profiler_wrapper.monitor.sinks import Sink, Sinks
from profiler_wrapper.monitor.work import BatchKey, Formula, Parallelism, Roof, StepWorks, formula_of, why_over_peak
from profiler_wrapper.tables.work.peaks import find_peaks, type_of
from profiler_wrapper.timer.device_events import Accelerator, Mark, StepClock, seconds_between
from profiler_wrapper.timer.layer_timer import LayerWatch
from profiler_wrapper.timer.log import SpanPlace
from profiler_wrapper.timer.steps import Boundaries, Breakdown, parts_of

# --------------------------------------------------------------------------------------------------
# What a monitor is told when it is made, and what it finds out about the job when the first step ends.

# How the ranks share the work; found out without asking any other rank.
_PARALLEL = ("data_parallel", "tensor_parallel", "pipeline_parallel", "context_parallel")
# What the dimensions of a device mesh are called. The ranks that none of these divides work on other data.
_SHARE_A_BATCH = {
    "tensor": ("tp", "tensor", "tensor_parallel", "model"),
    "pipeline": ("pp", "pipeline", "pipeline_parallel", "pipe"),
    "context": ("cp", "context", "context_parallel", "sp", "sequence"),
}
_FROZEN_SHARE = 0.5  # of the parameters, from which on FLOPs by a config are said to be too high


@dataclass(frozen=True, kw_only=True)
class MonitorArgs:
    """What the user says, checked. Raises WrongUse: a value means nothing."""

    config: MonitorConfig
    output_dir: Path
    log_file: str | None
    log_dir: Path = Path()
    model: nn.Module | None = None
    model_config: Any = None
    batch_size: int | None = None
    seq_length: int | None = None
    flops_per_step: float | None = None
    dtype: str = ""
    counts: Literal["rank", "job"] = "rank"
    world_size: int | None = None
    data_parallel: int | None = None
    tensor_parallel: int | None = None
    pipeline_parallel: int | None = None
    context_parallel: int | None = None
    rank: int | None = None
    on_cpu: bool = False  # though there may be an accelerator
    device_mesh: Any = None
    sinks: Sequence[Sink] | None = None
    optimizer: Any = None

    def __post_init__(self) -> None:
        if self.model is not None and not isinstance(self.model, nn.Module):
            raise WrongUse(f"model is a {type(self.model).__name__}. Give a torch.nn.Module, or nothing.")
        if self.log_file is not None and not isinstance(self.log_file, (str, os.PathLike)):
            raise WrongUse(f"log_file={shown(self.log_file)}: give a path, or None.")
        for name in ("batch_size", "seq_length", "world_size", *_PARALLEL):
            size = getattr(self, name)
            if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
                raise WrongUse(f"{name}={shown(size)}: give a whole number above 0.")
        if self.world_size is not None and self.world_size % self.named_ranks:
            raise WrongUse(
                f"a world of {self.world_size} ranks does not divide by the {self.named_ranks} that data, tensor, "
                "pipeline and context parallel sizes make together."
            )
        try:
            is_number = self.flops_per_step is None or 0 < float(self.flops_per_step) < math.inf
        except (TypeError, ValueError, OverflowError):
            is_number = False
        if not is_number:
            raise WrongUse(f"flops_per_step={shown(self.flops_per_step)}: give those of a step's forward and backward.")
        if self.dtype and type_of(self.dtype) is None:
            raise WrongUse(f"dtype={shown(self.dtype)} is no type of numbers that has a peak. Give 'bfloat16', say.")
        if not isinstance(self.counts, str) or self.counts not in ("rank", "job"):
            raise WrongUse(f"counts={shown(self.counts)}: give 'rank' or 'job'.")
        if self.config.peaks is not None:
            find_peaks(None, given=self.config.peaks)  # raises

    @property
    def named_ranks(self) -> int:
        """The ranks that the given parallel sizes make together."""
        return math.prod(getattr(self, name) or 1 for name in _PARALLEL)


class Job:
    """This process within its job: who it is, and what its steps compute. Asks no other rank."""

    works: StepWorks  # what steps compute, and where they are written: once `open` has been called
    sinks: Sinks

    def __init__(self, given: MonitorArgs, notices: Notices) -> None:
        self.given, self.notices = given, notices
        self.info = _info(given)
        mesh = mesh_of((given.model,)) if given.device_mesh is None and given.model is not None else given.device_mesh
        self.sizes = parallelism(given, world_size=self.info.world_size, device_mesh=mesh)
        ranks = self.sizes.world_size
        self.is_log_rank = ranks == 1 or self.info.rank == given.config.log_rank % ranks
        notices.quiet = not self.is_log_rank
        if self.sizes.warning is not None:
            notices.warn_once("sizes", self.sizes.warning)
        self.formula = None if given.flops_per_step is not None else _formula(given, notices)

    def open(self, start_time: float, memory_kind: str) -> None:
        """What needs a device that is in use: its peaks, and the log that tells them, on the rank that writes it."""
        given, config = self.given, self.given.config
        self.info = _info(given)  # the device has started since
        try:
            peaks, warning = find_peaks(self.info.device, given=config.peaks)
        except WrongUse as error:  # of the environment: what the user gave was checked
            peaks, warning = None, f"no share of the peak: {error}"
        if warning is not None:
            self.notices.warn_once("peaks", warning)
        tf32 = self.info.device_type == "cuda" and float32_matmul_precision() in ("high", "medium")
        dtype = given.dtype or _dtype_of(given.model)
        self.works = StepWorks(
            roof=Roof(peaks, self.notices, tf32=tf32),
            sizes=self.sizes,
            convention=config.convention,
            notices=self.notices,
            given=None if given.flops_per_step is None else float(given.flops_per_step),
            given_by_job=given.counts == "job",
            formula=self.formula,
            dtype=dtype,
        )
        unmeasured = f"; FLOPs that are not measured are taken for {dtype}" if dtype else ""
        session = Session(
            start_time=start_time,
            log_dir=given.log_dir,
            log_interval=config.perf_log_interval,
            rank=self.info.rank,
            world_size=self.sizes.world_size,
            device_name=self.info.device or self.info.cpu_name,
            peak_flops_per_s=None if peaks is None else peaks.flops_per_s,
            peak_source=None if peaks is None else f"{peaks.source}{unmeasured}",
            convention=config.convention,
            memory_kind=memory_kind,
            versions=self.info.versions,
        )
        sinks: Sequence[Sink] = ()
        if self.is_log_rank:
            log = None if given.log_file is None else given.output_dir / given.log_file
            sinks = sinks_of(config, training_log=log) if given.sinks is None else given.sinks
        self.sinks = Sinks(sinks, session)


def _info(given: MonitorArgs) -> RunInfo:
    modules = () if given.model is None else (given.model,)
    version = str(getattr(sys.modules.get("profiler_wrapper"), "__version__", ""))
    info = run_info(modules=modules, rank=given.rank, device_mesh=given.device_mesh, version=version)
    return replace(info, device=None, device_type="cpu") if given.on_cpu else info


def parallelism(given: MonitorArgs, *, world_size: int, device_mesh: Any = None) -> Parallelism:
    """What the user gave, then what the mesh says, then that every rank has data of its own.

    `world_size`: of the process group or the environment. `device_mesh`: a `DeviceMesh` with named dimensions.
    """
    sharing = {
        kind: getattr(given, f"{kind}_parallel") or _size_of_mesh(device_mesh, names)
        for kind, names in _SHARE_A_BATCH.items()
    }
    share_a_batch = math.prod(sharing.values())
    # Without a process group and an environment, the given sizes say how many ranks there are.
    world_size = given.world_size or (given.named_ranks if world_size == 1 else world_size)
    data_parallel = given.data_parallel or max(1, world_size // share_a_batch)
    warning = None
    if world_size % (share_a_batch * (given.data_parallel or 1)):
        warning = (
            f"data_parallel={data_parallel} is taken, which does not fit a world of {world_size} ranks of which "
            f"{share_a_batch} share a batch: check the totals"
        )
    return Parallelism(
        world_size=world_size, data_parallel=data_parallel, pipeline_parallel=sharing["pipeline"], warning=warning
    )


def _size_of_mesh(mesh: Any, names: Sequence[str]) -> int:
    """The product of the dimensions with these names."""
    dimensions = zip(getattr(mesh, "mesh_dim_names", None) or (), getattr(mesh, "shape", None) or (), strict=False)
    return math.prod(int(size) for name, size in dimensions if str(name).lower() in names)


def _formula(given: MonitorArgs, notices: Notices) -> Formula | None:
    config = given.model if given.model_config is None else given.model_config
    if config is None:
        return None
    formula = formula_of(
        config,
        family=given.config.perf_model_type,
        convention=given.config.convention,
        notices=notices,
        asked_for=given.model_config is not None or given.config.perf_model_type != "auto",
    )
    frozen = 0.0 if formula is None else _frozen_share(given.model)
    if frozen >= _FROZEN_SHARE:
        notices.warn_once(
            "frozen",
            f"{100 * frozen:.0f} % of the parameters are not trained, and FLOPs by the model's config count the "
            "backward of all: flops_profile_freq=500 measures them",
        )
    return formula


def _frozen_share(model: nn.Module | None) -> float:
    parameters = [] if model is None else list(all_parameters(model))
    total = sum(parameter.numel() for parameter in parameters)
    frozen = sum(parameter.numel() for parameter in parameters if not parameter.requires_grad)
    return frozen / total if total else 0.0


def _dtype_of(model: nn.Module | None) -> str:
    """The floating type that most of the model's parameters have; "" without any."""
    sizes = Counter[str]()
    for parameter in all_parameters(model) if model is not None else ():
        if parameter.is_floating_point():
            sizes[str(parameter.dtype).removeprefix("torch.")] += parameter.numel()
    return sizes.most_common(1)[0][0] if sizes else ""


# --- Steps that have ended on the host but perhaps not on the device, in order ---

MOST_PENDING = 1024  # steps that the device may be behind


@dataclass(slots=True, kw_only=True)
class PendingStep:
    """A step that has ended on the host."""

    known: Mapping[str, Any]  # at once, as a record has it
    begin: Mark | None  # None: nobody saw it
    end: Mark
    read_after: Mark  # the mark behind which all of `numbers` and the step's end are there
    batch: Batch
    numbers: Mapping[str, Number]  # loss, grad_norm, learning_rate
    boundaries: Boundaries | None  # of its parts; None: not measured
    skip: frozenset[str]  # the sinks that don't get it

    def record(self, notices: Notices, *, reached: bool) -> StepRecord:
        """The step as it is reported; without `reached`, what the device did not come to is not known."""
        step = self.known["step"]
        if not reached:
            notices.warn_once(
                "never reached", f"the time of step {step} is not known: the device did not come to its end"
            )
            return StepRecord(**self.known)
        time_s = None if self.begin is None else seconds_between(self.begin, self.end)
        if self.begin is not None and time_s is None:
            notices.warn_once("clock", f"the time of step {step} is not known: the clock ran backwards in it")
        return StepRecord(
            **self.known,
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


# --- Time that lies between steps: a loop that fetches its batches there is slower than its steps say ---

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


# --- The memory that a training uses: the accelerator's, or without one the process's ---

ON_DEVICE = "allocated on the accelerator, as torch's allocator counts"
IN_PROCESS = "resident memory of the process"


class Memory:
    """Reads current and peak bytes; resets nothing."""

    def __init__(self, accelerator: Accelerator | None) -> None:
        self._accelerator = accelerator
        self._peak: int | None = None
        self.kind = IN_PROCESS if accelerator is None else ON_DEVICE  # what is counted

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


# --- The steps of one loop ---

CLOSING_WAIT_S = 10.0  # for the device, when the monitor is closed
_LOOK_EVERY_S = 0.001


class _Point(NamedTuple):
    """Where a step begins or ends."""

    mark: Mark
    profiled: bool  # some torch profiler was on
    step: int = 0  # that begins here; same (0 -> -1): a step's end, which nobody reads
    recorded: bool = False  # by the probe


class StepWatch:
    """What stands behind a `TrainingMonitor`; its methods may raise.

    `on_failure` is told of what fails where nobody could catch it; with `layers` spans of layers and parts are written.
    """

    def __init__(
        self,
        given: MonitorArgs,
        notices: Notices,
        accelerator: Accelerator | None,
        *,
        on_failure: Callable[[str, Exception], None],
        layers: bool = False,  # same: its one maker says it
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
        listening: dict[str, Any] = {
            "mark": self._clock.mark, "on_failure": on_failure, "optimizers": self._optimizers, "notices": notices
        }  # fmt: skip
        if layers and given.model is not None:
            job = {name: getattr(given, name) for name in ("output_dir", "rank", "world_size", "device_mesh")}
            self._breakdown = self._layers = LayerWatch(given.model, SpanPlace(**job), accelerator, **listening)
        elif given.config.perf_breakdown:
            self._breakdown = Breakdown(model=given.model, **listening)
        self._calls = None if given.model is None else BatchCounter(given.model)
        self._compared = False  # a step has told whether they are as told
        self._job: Job | None = None
        self._opened: Job | None = None  # from the end of the first step on
        self._batches: Batches
        self._opening = threading.Lock()  # loops on two threads have one log
        self._recorded_key: BatchKey = ()
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
        mark, profiled, *_ = point or self._now()
        self._begun = begun = _Point(mark, profiled, number, recorded)
        if self._breakdown is not None:
            self._breakdown.start()
            self._breakdown.begin_step(begun.mark)
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

    def forget_time(self) -> None:
        """The step that was begun will end with its counts and no time."""
        self.forget()
        self._last_end = None  # else it would begin there

    def end(
        self, *, step: Any, epoch: Any, batch: Mapping[str, Any], numbers: Mapping[str, Any], skip: frozenset[str]
    ) -> None:
        """The step ends; `batch`: as `Batches.of` takes it, `numbers`: loss, grad_norm, learning_rate."""
        end, timestamp = self._now(), time.time()
        begun, self._begun = self._begun, None
        begin = begun or self._last_end
        boundaries = None if self._breakdown is None else self._breakdown.end_step()
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
        if self._layers is not None and begun is not None and not profiled:  # that is slow for a reason of its own
            self._layers.add(number, begun.mark, end.mark)
        of_step = self._batches.of(**batch)
        seen: Sequence[BatchSize] = ()
        if self._calls is not None and begun is not None:
            seen = self._calls.take()
            if seen and not self._compared and (self._args.batch_size or self._args.seq_length):
                self._batches.compare(number, of_step.shapes, seen)
            self._compared |= bool(seen)
            # Further ones matter where FLOPs that were measured hold for like batches alone.
            if seen and not (self._calls.counts and self._probe.measures(self._known_otherwise(opened))):
                self._calls.stop()
                self._calls = None
        key = of_step.key(seen)
        logged = {name: self._scalars.number(name, value) for name, value in numbers.items()}
        if logged.get("learning_rate") is None and self._optimizers:
            rate = self._optimizers[0].param_groups[0].get("lr")
            logged["learning_rate"] = self._scalars.number("learning_rate", rate)
        counts = [count[0] for count in (of_step.samples, of_step.tokens) if count is not None]
        copied = any(isinstance(value, torch.Tensor) for value in (*counts, *logged.values()))
        if recorded:
            self._recorded_key = key
        measurement = self._probe.finished()
        if measurement is not None:
            opened.works.take(measurement, self._recorded_key)
        work = opened.works.of(of_step.shapes, key)
        memory, peak = (None, None) if self._memory is None else self._memory.read()
        known = dict(
            step=number,
            timestamp=timestamp,
            convention=self._args.config.convention,
            world_size=opened.sizes.world_size,
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
                batch=of_step,
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
                self._notices.warn_once("closing", f"closing the monitor: {in_a_line(error)}")

    def _now(self) -> _Point:
        return _Point(self._clock.mark(), profiler_is_on())

    def _open(self) -> Job:
        with self._opening:
            if self._opened is None:
                job = self._job = self._job or Job(self._args, self._notices)
                occupy_closed_streams()
                job.open(self._start_time, "" if self._memory is None else self._memory.kind)
                given = {name: getattr(self._args, name) for name in ("batch_size", "seq_length", "counts")}
                self._batches = Batches(job.sizes, self._scalars, self._notices, **given)
                self._opened = job
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
