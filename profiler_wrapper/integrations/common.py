"""What the monitors of other people's loops have in common."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from profiler_wrapper.errors import in_a_line, warn
from profiler_wrapper.monitor.batches import BatchSize
from profiler_wrapper.monitor.config import MonitorConfig
from profiler_wrapper.monitor.logs import sinks_of
from profiler_wrapper.monitor.monitor import TrainingMonitor
from profiler_wrapper.monitor.records import Row
from profiler_wrapper.monitor.sinks import Sink, tagged
from profiler_wrapper.result import ProfileResult
from profiler_wrapper.wrapper import ProfilerWrapper

# --- Callbacks that cannot stop the training they are called from ---

T = TypeVar("T", bound=Callable[..., Any])


class Guarded:
    """Base of a callback: after the first failure in a `guarded` method it does nothing any more.

    A copy, also one by pickle, is a callback that has not begun.
    """

    failed = False  # and one `ProfilerWrapperWarning` has said so

    def rest(self) -> None:
        """Set what changes while it runs to what it is before. Called when it is made."""

    def __getstate__(self) -> dict[str, Any]:
        idle: Guarded = object.__new__(type(self))
        vars(idle).update(vars(self), failed=False)
        for name in ("log", "log_dict"):  # methods of the model that Lightning puts on a callback while it trains
            vars(idle).pop(name, None)
        idle.rest()
        return vars(idle)

    def abandon(self) -> None:
        """Let go of everything, in whatever state it is. What this raises is dropped: the failure has been told."""


def guarded(method: T) -> T:
    """What the method raises becomes one warning and turns its `Guarded` object off; Ctrl-C and the like pass."""

    @functools.wraps(method)
    def body(self: Guarded, *args: Any, **kwargs: Any) -> None:
        if self.failed:
            return
        try:
            method(self, *args, **kwargs)
        except Exception as error:
            self.failed = True
            warn(f"{type(self).__name__} is off from now on, because {method.__name__} failed: {in_a_line(error)}")
            with contextlib.suppress(Exception):  # of no use to anybody after the first
                self.abandon()

    return body  # type: ignore[return-value]  # the same parameters; a callback returns nothing


class Outlets:
    """Places of other people that numbers go to. One that raises gets no more, and one warning says so."""

    def __init__(self) -> None:
        self._dropped: set[str] = set()

    def send(self, name: str, action: Callable[[], object]) -> None:
        """Run `action`, which gives numbers to the place of that name."""
        if name in self._dropped:
            return
        try:
            action()
        except Exception as error:
            self._dropped.add(name)
            warn(f"{name} gets no more of the monitor's numbers, because it failed: {in_a_line(error)}")


class MonitoredTraining(Guarded):
    """A `TrainingMonitor`, with its options, beside one training at a time."""

    def __init__(self, output_dir: str | os.PathLike[str] | None = None, config: Any = None, **options: Any) -> None:
        super().__init__()
        names = {field.name for field in fields(MonitorConfig)}
        of_config = {name: value for name, value in options.items() if name in names}
        self._config = MonitorConfig.of(config).with_options(**of_config)
        self._output_dir = output_dir
        self._options = {name: value for name, value in options.items() if name not in names}
        self._interval_given = config is not None or "perf_log_interval" in of_config
        silent = replace(self._config, enable_perf_monitor=False, perf_memory_tracking=False)
        TrainingMonitor(config=silent, **self._options)  # raises for what is wrong, and does nothing else
        self.rest()

    def rest(self) -> None:
        self.monitor: TrainingMonitor | None = None
        self._learning_rate: float | None = None

    def _start(
        self,
        default_dir: str | os.PathLike[str],
        *,
        interval: int,
        tensorboard_dir: str | None = None,
        instead_of_wandb: bool = False,
        more_sinks: Sequence[Sink] = (),
        **found: Any,
    ) -> None:
        """A training begins. What its loop has stands where the user gave nothing: `found`, by the monitor's options.

        `interval`: of the loop's own log, in steps. `more_sinks`: besides those of the config; with `instead_of_wandb`
        one of them logs to a run of W&B that the loop has.
        """
        output_dir = Path(self._output_dir if self._output_dir is not None else default_dir)
        config = self._config
        config = replace(
            config,
            perf_log_interval=config.perf_log_interval if self._interval_given else max(1, interval),
            tensorboard_dir=config.tensorboard_dir or tensorboard_dir,
            wandb=config.wandb and not instead_of_wandb,
        )
        options = {**found, **self._options}
        if "sinks" not in options:
            log_file = options.get("log_file", "training_log.json")
            log = None if log_file is None else output_dir / log_file
            options["sinks"] = [*sinks_of(config, training_log=log), *more_sinks]
        self.monitor = TrainingMonitor(output_dir, config, **options)


class Collector(Sink):
    """Keeps rows for a loop that logs them itself, in its own thread."""

    name = "trainer"

    def __init__(self) -> None:
        self._rows: deque[Row] = deque(maxlen=1000)

    def write_row(self, row: Row) -> None:
        self._rows.append(row)

    def take(self) -> Iterator[Row]:
        """The rows since the last time."""
        while self._rows:
            yield self._rows.popleft()


def tagged_for_trainer(row: Row) -> dict[str, float]:
    """A row by its tags, without what a trainer logs itself: loss, learning rate, epoch."""
    return {tag: value for tag, value in tagged(row).items() if not tag.startswith("train/")}


def counts(sizes: Sequence[BatchSize], *, context_parallel: int = 1) -> dict[str, Any]:
    """What `TrainingMonitor.end_step` takes of the batches of one step: samples, and masks or shapes.

    `context_parallel`: ranks that have a part of each sequence.
    """
    known = [size.samples for size in sizes if size.samples is not None]
    batch: dict[str, Any] = {"samples": sum(known) if known and len(known) == len(sizes) else None}
    masks = [size.mask for size in sizes if size.mask is not None]
    shapes = [(size.samples, size.length * context_parallel) for size in sizes if size.length is not None]
    if masks and len(masks) == len(sizes) and context_parallel == 1:
        batch["attention_mask"] = masks
    elif shapes and len(shapes) == len(sizes):
        batch["shapes"] = shapes
    return batch


# --- What the profiling callbacks of other people's loops have in common ---


class ProfiledTraining(Guarded):
    """A `ProfilerWrapper`, with its options, around one training at a time."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        ProfilerWrapper(**options)  # wrong options are told here, not in the training
        self._options = options
        self.rest()

    def rest(self) -> None:
        self.profiler: ProfilerWrapper | None = None
        self._inside = False

    @property
    def result(self) -> ProfileResult | None:
        """What `ProfilerWrapper.result` is; None before anything was recorded."""
        return None if self.profiler is None else self.profiler.result

    def abandon(self) -> None:
        self._leave()

    def _enter(self, model: object) -> None:
        """A training begins; one before it may have ended by an exception."""
        self._leave()
        self.profiler = ProfilerWrapper(model, **self._options)
        self.profiler.__enter__()
        self._inside = True
        atexit.register(self._leave)

    def _step(self) -> None:
        if self._inside and self.profiler is not None:
            self.profiler.step()

    def _leave(self, error: BaseException | None = None) -> None:
        if self._inside and self.profiler is not None:
            self._inside = False
            atexit.unregister(self._leave)
            self.profiler.__exit__(None if error is None else type(error), error, None)
