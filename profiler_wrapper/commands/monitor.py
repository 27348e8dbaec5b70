"""`monitor`: how a monitored training went."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from profiler_wrapper.commands import common
from profiler_wrapper.errors import ProfilerWrapperError
from profiler_wrapper.terminal import WIDTH_OF_FILES, terminal_width

if TYPE_CHECKING:
    from profiler_wrapper.monitor.read import MonitorRun


def add(commands: common.Commands) -> None:
    examples = "logs/perf_monitor\nlogs/perf_monitor -o course.png"
    command = common.add_command(commands, "monitor", monitor, examples=examples)
    command.add_argument("path", metavar="PATH", help="a log of a TrainingMonitor, or a directory with logs or runs")
    common.add_output(command, "the plot and the text")


def monitor(options: argparse.Namespace) -> None:
    """Say how a monitored training went, and draw it; of a killed run the summary is made first.

    Reads perf_steps_*.jsonl, perf_summary_*.json and perf_metrics_*.log, of FlagScale's too. `-o FILE.png` draws.
    """
    from profiler_wrapper.monitor.read import find_log, monitor_run, read_log
    from profiler_wrapper.monitor.reports import draw_monitor, monitor_text

    common.settle_format(options, others=[".png"])
    width = WIDTH_OF_FILES if options.output is not None else terminal_width()

    def text(run: MonitorRun) -> str:
        return common.json_text(run.to_dict()) if options.format == "json" else monitor_text(run, width=width)

    log = find_log(options.path)
    _rebuild_summaries(Path(options.path))
    report = f"{log.stem}_report.{'json' if options.format == 'json' else 'txt'}"
    files: dict[str, common.Writer[MonitorRun]] = {
        f"{log.stem}.png": draw_monitor,
        report: lambda run, path: common.write_text(path, text(run)),
    }
    writers = common.output_files(options, files)
    run = monitor_run(read_log(log))
    if writers:
        common.write(writers, run)
    else:
        print(text(run))


def _rebuild_summaries(path: Path) -> None:
    """Of runs that were killed. What cannot be done is said, and is no reason to stop."""
    from profiler_wrapper.monitor.logs import rebuild_summary, unfinished
    from profiler_wrapper.monitor.read import log_directories

    directories = log_directories(path) if path.is_dir() else [path.parent]
    for directory in directories:
        for steps in unfinished(directory):
            if path.is_dir() or steps == path:
                try:
                    print("made", rebuild_summary(steps), file=sys.stderr)
                except (ProfilerWrapperError, OSError) as error:
                    print(f"warning: no summary of {steps}: {error}", file=sys.stderr)
