"""`compare`: two runs or traces side by side."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from profiler_wrapper.commands import common
from profiler_wrapper.errors import WrongUse
from profiler_wrapper.terminal import terminal_width

if TYPE_CHECKING:
    from profiler_wrapper.comparison.text import Comparison


DEFAULT_ROWS = 20


def add(commands: common.Commands) -> None:
    examples = "outputs/before outputs/after\nbefore.json.gz after.json.gz -o difference.html"
    command = common.add_command(commands, "compare", compare, examples=examples)
    command.add_argument("a", metavar="A", help="what was before: a trace, a result.json, or the directory of a run")
    command.add_argument("b", metavar="B", help="what is now")
    command.add_argument("--top", type=int, metavar="N", help=f"rows of the table (default: {DEFAULT_ROWS})")
    common.add_output(
        command, "the text, the JSON, a CSV and the page; the ending of FILE (.html .json .csv .txt) says which"
    )


def compare(options: argparse.Namespace) -> None:
    """Say what is otherwise in B than in A: time, memory, FLOPs and calls of every layer, phase and class.

    Slower and faster are said of what goes beyond the noise that the steps show. Works across renamed wrappers,
    devices and foreign traces; what makes the two unlike is said first.
    """
    from profiler_wrapper.comparison.compare import compare as compare_results

    if options.top is not None and options.top < 1:
        raise WrongUse("--top is a number of rows, 1 or more")
    rows = options.top or DEFAULT_ROWS
    files: dict[str, common.Writer[Comparison]] = {
        "compare.txt": lambda found, path: common.write_text(path, found.table(rows=rows)),
        "compare.json": lambda found, path: common.write_text(path, common.json_text(found.to_dict())),
        "compare.csv": lambda found, path: found.to_csv(path),
        "compare.html": lambda found, path: found.write_page(path),
    }
    writers = common.output_files(options, files)
    a, b = (common.read_result(Path(path)) for path in (options.a, options.b))
    found = compare_results(a, b, name_a=options.a, name_b=options.b)
    if writers:
        common.write(writers, found)
    elif options.format == "json":
        print(common.json_text(found.to_dict()))
    else:
        print(found.table(rows=rows, width=terminal_width()))
