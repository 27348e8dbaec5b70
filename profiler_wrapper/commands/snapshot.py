"""`snapshot`: who holds the memory, by a pickle of torch's allocator."""

from __future__ import annotations

import argparse
from pathlib import Path

from profiler_wrapper.commands import common
from profiler_wrapper.terminal import terminal_width, unicode_output


def add(commands: common.Commands) -> None:
    command = common.add_command(commands, "snapshot", snapshot, examples="memory.pickle\nmemory.pickle -o reports/")
    command.add_argument("path", metavar="FILE", help="a pickle of torch.cuda.memory._dump_snapshot; it is not run")
    common.add_output(command, "the text, the JSON and a plot")


def snapshot(options: argparse.Namespace) -> None:
    """Say where the memory is: what a torch memory snapshot holds, who holds it, and how it came to that."""
    from profiler_wrapper.snapshot.analyse import allocator_report
    from profiler_wrapper.snapshot.read import read_snapshot
    from profiler_wrapper.snapshot.reports import SNAPSHOT_REPORTS, console_text, to_dict

    common.settle_format(options, others=[".png"])
    stem = Path(options.path).stem
    files = {f"{stem}{ending}": write_to for ending, write_to in SNAPSHOT_REPORTS.items()}
    writers = common.output_files(options, files)
    report = allocator_report(read_snapshot(options.path))
    if writers:
        common.write(writers, report)
    elif options.format == "json":
        print(common.json_text(to_dict(report)))
    else:
        print(console_text(report, unicode=unicode_output(), width=terminal_width()))
