"""`monitor`: how a monitored training went."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from profiler_wrapper.commands.common import (
    Commands,
    add_command,
    add_output,
    is_directory,
    json_text,
    refuse_to_overwrite,
    settle_format,
    write,
)
from profiler_wrapper.errors import ProfilerWrapperError
from profiler_wrapper.units import WIDTH_OF_FILES, terminal_width

if TYPE_CHECKING:
    from profiler_wrapper.monitor.read import MonitorRun


def add(commands: Commands) -> None:
    """The parser."""
    command = add_command(commands, "monitor", monitor, examples="logs/perf_monitor\nlogs/perf_monitor -o course.png")
    command.add_argument("path", metavar="PATH", help="a log of a TrainingMonitor, or a directory with logs or runs")
    add_output(command, "the plot and the text")


def monitor(options: argparse.Namespace) -> None:
    """Say how a monitored training went, and draw it; of a killed run the summary is made first.

    Reads perf_steps_*.jsonl, perf_summary_*.json and perf_metrics_*.log, of FlagScale's too. `-o FILE.png` draws.
    """
    from profiler_wrapper.monitor.read import find_log, monitor_run, read_log
    from profiler_wrapper.monitor.reports import draw_monitor, monitor_text

    settle_format(options, others=[".png"])
    width = WIDTH_OF_FILES if options.output is not None else terminal_width()

    def text(run: MonitorRun) -> str:
        return json_text(run.to_dict()) if options.format == "json" else monitor_text(run, width=width)

    def write_text(run: MonitorRun, path: Path) -> None:
        path.write_text(text(run) + "\n", encoding="utf-8")

    log = find_log(options.path)
    _rebuild_summaries(Path(options.path))
    if options.output is None:
        print(text(monitor_run(read_log(log))))
        return
    output = Path(options.output)
    writers: dict[Path, Callable[[MonitorRun, Path], None]] = {
        output: draw_monitor if output.suffix.lower() == ".png" else write_text
    }
    if is_directory(options.output):
        ending = "json" if options.format == "json" else "txt"
        writers = {output / f"{log.stem}.png": draw_monitor, output / f"{log.stem}_report.{ending}": write_text}
    refuse_to_overwrite(writers, force=options.force)
    write(writers, monitor_run(read_log(log)))


def _rebuild_summaries(path: Path) -> None:
    """Of runs that were killed. What cannot be done is said, and is no reason to stop."""
    from profiler_wrapper.monitor.log_files import log_directories, unfinished
    from profiler_wrapper.monitor.logs import rebuild_summary

    directories = log_directories(path) if path.is_dir() else [path.parent]
    for directory in directories:
        for session in unfinished(directory):
            steps = session.files["steps"]
            if path.is_dir() or steps == path:
                try:
                    print("made", rebuild_summary(steps), file=sys.stderr)
                except (ProfilerWrapperError, OSError) as error:
                    print(f"warning: no summary of {steps}: {error}", file=sys.stderr)
