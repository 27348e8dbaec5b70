"""Which sinks a configuration asks for."""

from __future__ import annotations

import os
from typing import Protocol

from profiler_wrapper.live.json_log import JsonLog
from profiler_wrapper.live.log_files import LogFiles
from profiler_wrapper.live.sinks import Sink
from profiler_wrapper.live.text_log import RealtimeLog, TextLog
from profiler_wrapper.live.tracker_sinks import Console, TensorBoard, Wandb
from profiler_wrapper.live.training_log import TrainingLog
from profiler_wrapper.recording.monitor_files import LogKind


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
