"""`snapshot`: who holds the memory, by a pickle of torch's allocator."""

from __future__ import annotations

import argparse
from pathlib import Path

from profiler_wrapper.commands.common import (
    Commands,
    add_command,
    add_output,
    json_text,
    output_files,
    settle_format,
    write,
)
from profiler_wrapper.units import terminal_width, unicode_output


def add(commands: Commands) -> None:
    command = add_command(commands, "snapshot", snapshot, examples="memory.pickle\nmemory.pickle -o reports/")
    command.add_argument("path", metavar="FILE", help="a pickle of torch.cuda.memory._dump_snapshot; it is not run")
    add_output(command, "the text, the JSON and a plot")


def snapshot(options: argparse.Namespace) -> None:
    """Say where the memory is: what a torch memory snapshot holds, who holds it, and how it came to that."""
    from profiler_wrapper.snapshot.analyse import allocator_report
    from profiler_wrapper.snapshot.read import read_snapshot
    from profiler_wrapper.snapshot.reports import SNAPSHOT_REPORTS, console_text, to_dict

    settle_format(options, others=[".png"])
    stem = Path(options.path).stem
    writers = output_files(options, {f"{stem}{ending}": write_to for ending, write_to in SNAPSHOT_REPORTS.items()})
    report = allocator_report(read_snapshot(options.path))
    if writers:
        write(writers, report)
    elif options.format == "json":
        print(json_text(to_dict(report)))
    else:
        print(console_text(report, unicode=unicode_output(), width=terminal_width()))
