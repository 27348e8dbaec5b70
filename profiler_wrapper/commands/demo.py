"""`demo`: something to look at in a few seconds."""

from __future__ import annotations

import argparse
import contextlib
import sys

from profiler_wrapper.commands.common import FORMATS, Commands, add_command, json_text


def add(commands: Commands) -> None:
    command = add_command(commands, "demo", demo, examples="-o outputs")
    command.add_argument(
        "-o", "--output", "--output-dir", dest="output", metavar="DIR", default="outputs",
        help="where the run's directory is made, which is always a new one (default: outputs)",
    )  # fmt: skip
    command.add_argument("--format", choices=FORMATS, default="text", help="of what is printed (default: text)")


def demo(options: argparse.Namespace) -> None:
    """Train a small Transformer for a few seconds, print its layer table and where the files are."""
    from profiler_wrapper.demo import run_demo

    if options.format == "text":
        run_demo(output_dir=options.output)
        return
    with contextlib.redirect_stdout(sys.stderr):  # what is said on the way
        result = run_demo(output_dir=options.output)
    print(json_text(result.to_dict()))
