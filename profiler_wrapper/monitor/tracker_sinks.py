"""The sinks that a configuration asks for; rows to the console, to TensorBoard and to W&B."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from typing import Any, Protocol

from profiler_wrapper.monitor.logs import JsonLog, LogFiles, RealtimeLog, TextLog, TrainingLog
from profiler_wrapper.monitor.read import LogKind
from profiler_wrapper.monitor.records import Session
from profiler_wrapper.monitor.sinks import Sink
from profiler_wrapper.monitor.statistics import Row, RunStatistics

GB = 1 << 30


def tagged(row: Row) -> dict[str, float]:
    """What is known of a row, by the tags of TensorBoard and W&B: those of FlagScale's monitor, and `perf/`.

    GB are 2^30 bytes, times seconds.
    """
    record, step_time_s = row.record, row.step_time_s
    values = {
        "performance/tflops_per_gpu": row.tflops_per_gpu,
        "performance/tflops_total": row.tflops_total,
        "performance/samples_per_second": row.samples_per_s,
        "performance/tokens_per_second": row.tokens_per_s,
        "memory/current_gb": None if record.memory_bytes is None else record.memory_bytes / GB,
        "memory/peak_gb": None if record.peak_memory_bytes is None else record.peak_memory_bytes / GB,
        "perf/mfu": row.mfu,
        "perf/mfu_percent": None if row.mfu is None else 100 * row.mfu,
        "perf/hfu": row.hfu,
        "perf/step_time": step_time_s,
        "perf/steps_per_second": 1 / step_time_s if step_time_s else None,
        "perf/tokens_per_second": row.tokens_per_s,
        "perf/samples_per_second": row.samples_per_s,
        "train/loss": record.loss,
        "train/grad_norm": record.grad_norm,
        "train/learning_rate": record.learning_rate,
        "train/epoch": record.epoch,
        **{f"breakdown/{part}": time_s for part, time_s in (row.breakdown_s or {}).items()},
    }
    return {tag: value for tag, value in values.items() if value is not None}


class Console(Sink):
    """A line on stdout for each row."""

    name = "console"

    def write_row(self, row: Row) -> None:
        print("  ".join(_in_words(row)), file=sys.stdout, flush=True)


def _in_words(row: Row) -> Iterator[str]:
    record = row.record
    yield f"step {record.step}"
    if row.step_time_s is not None:
        yield f"{row.step_time_s * 1e3:.1f} ms"
    if row.tokens_per_s is not None:
        yield f"{row.tokens_per_s:.0f} tokens/s"
    if row.samples_per_s is not None:
        yield f"{row.samples_per_s:.1f} samples/s"
    if row.tflops_per_gpu is not None:
        yield f"{row.tflops_per_gpu:.2f} TFLOPS/GPU"
    if row.mfu is not None:
        yield f"MFU {100 * row.mfu:.1f} %"
    if record.memory_bytes is not None:
        yield f"{record.memory_bytes / GB:.2f} GB"
    if record.loss is not None:
        yield f"loss {record.loss:.4g}"


class _Package:
    """A package that need not be there, imported now: seconds of importing beside a training would slow its steps."""

    def __init__(self, module: str, package: str) -> None:
        self._package = package
        self._error: Exception | None = None
        try:
            self._module = importlib.import_module(module)
        except Exception as error:  # a broken installation raises anything
            self._error = error

    def get(self) -> Any:
        """The module. Raises ImportError: there is none; the message says what to do."""
        if self._error is not None:
            raise ImportError(f"pip install {self._package} ({self._error})") from self._error
        return self._module


class TensorBoard(Sink):
    """Scalars of each row, in an event file of their own."""

    name = "tensorboard"

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._package = _Package("torch.utils.tensorboard", self.name)
        self._writer: Any = None

    def open(self, session: Session) -> None:
        self._writer = self._package.get().SummaryWriter(self._directory)

    def write_row(self, row: Row) -> None:
        for tag, value in tagged(row).items():
            self._writer.add_scalar(tag, value, global_step=row.record.step, walltime=row.record.timestamp)

    def flush(self) -> None:
        self._writer.flush()

    def close(self, statistics: RunStatistics) -> None:
        self._writer.close()


class Wandb(Sink):
    """Each row to the run that is active, else to one of its own, in the mode that `WANDB_MODE` or the settings tell.

    The step is that of the loop. If the active run has gone beyond it, the values go to the step that it is at.
    """

    name = "wandb"

    def __init__(self) -> None:
        self._package = _Package("wandb", self.name)
        self._run: Any = None
        self._own = False

    def open(self, session: Session) -> None:
        wandb = self._package.get()
        if wandb.run is None:
            wandb.init(config=session.to_dict())
            self._own = True
        self._run = wandb.run

    def write_row(self, row: Row) -> None:
        values = tagged(row)
        if self._run.step > row.record.step:
            self._run.log(values, commit=False)
        else:
            self._run.log(values, step=row.record.step)

    def close(self, statistics: RunStatistics) -> None:
        if self._own:
            self._run.finish()


class SinkOptions(Protocol):
    """The options that say where steps go."""

    @property
    def perf_log_format(self) -> str: ...
    @property
    def perf_console_output(self) -> bool: ...
    @property
    def perf_max_log_files(self) -> int: ...
    @property
    def tensorboard_dir(self) -> str | None: ...
    @property
    def wandb(self) -> bool: ...


def sinks_of(config: SinkOptions, *, training_log: str | os.PathLike[str] | None = None) -> list[Sink]:
    """The sinks for `config`: text and JSON files, console, TensorBoard, W&B, and `training_log` if it is named.

    What they need is imported now, and nothing opened yet. Log files go into the session's `log_dir`.

    Names, as `Sinks.write(skip=)` takes them: `text`, `realtime`, `json`, `training_log`, `console`, `tensorboard`,
    `wandb`.
    """
    text, steps = config.perf_log_format in ("text", "both"), config.perf_log_format in ("json", "both")
    kinds: list[LogKind] = [*(["text"] if text else []), *(["steps", "summary"] if steps else [])]  # type: ignore[list-item]
    files = LogFiles(kinds, max_files=config.perf_max_log_files)
    sinks: list[Sink] = []
    if text:
        sinks += [TextLog(files), RealtimeLog()]
    if steps:
        sinks.append(JsonLog(files))
    if training_log is not None:
        sinks.append(TrainingLog(training_log, max_files=config.perf_max_log_files))
    if config.perf_console_output:
        sinks.append(Console())
    if config.tensorboard_dir is not None:
        sinks.append(TensorBoard(config.tensorboard_dir))
    if config.wandb:
        sinks.append(Wandb())
    return sinks
