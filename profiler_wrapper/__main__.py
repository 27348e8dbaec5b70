"""The command line: `python -m profiler_wrapper`, also installed as `profiler-wrapper`.

Exit codes: 0 fine, 1 failed, 2 wrong use. A file is overwritten only with --force.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from profiler_wrapper.errors import ProfilerWrapperError, WrongUse

# torch and matplotlib take seconds to import: each command imports what it needs, so that --help is quick.
if TYPE_CHECKING:
    from profiler_wrapper.result import ProfileResult

FINE, FAILED, WRONG_USE = 0, 1, 2
TRACE_SUFFIXES = (".gz", ".json", ".trace", ".pt")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. Errors are one line on stderr."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
        sys.stdout.flush()
    except WrongUse as error:
        return _fail(error, WRONG_USE)
    except BrokenPipeError:  # the reader of our output has gone (`| head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (ProfilerWrapperError, OSError) as error:
        return _fail(error, FAILED)
    except KeyboardInterrupt:
        return _fail("interrupted", FAILED)
    return FINE


def _fail(error: object, code: int) -> int:
    print("error:", " ".join(str(error).split()), file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="profiler-wrapper",
        description="Time and memory of every layer of a Transformer.",
        epilog="Exit codes: 0 fine, 1 failed, 2 wrong use.",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    command = _command(commands, "demo", demo)
    command.add_argument("--output-dir", metavar="DIR", default="outputs", help="where files go (default: outputs)")

    command = _command(commands, "analyze", analyze)
    command.add_argument("path", metavar="TRACE_OR_RUNDIR", help="a trace (.json, .json.gz), or the directory of a run")
    command.add_argument("--format", choices=("text", "json"), default="text", help="of the output (default: text)")
    command.add_argument(
        "-o", "--output", metavar="FILE_OR_DIR", help="write there; a directory gets the tables, result.json and plots"
    )
    command.add_argument("--force", action="store_true", help="overwrite files")
    return parser


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: Callable[[argparse.Namespace], None],
) -> argparse.ArgumentParser:
    text = run.__doc__ or ""
    command = commands.add_parser(name, help=text.partition("\n")[0], description=text)
    command.set_defaults(run=run)
    return command


def demo(options: argparse.Namespace) -> None:
    """Train a small Transformer for a few seconds, print its layer table and where the files are."""
    from profiler_wrapper.demo import run_demo

    run_demo(output_dir=options.output_dir)


def analyze(options: argparse.Namespace) -> None:
    """Print or write the layer table of any torch.profiler trace, or of a run's directory."""
    from profiler_wrapper.reports.write import REPORTS
    from profiler_wrapper.result import load

    output = options.output
    if output is None:
        result = load(options.path)
        print(json.dumps(result.to_dict(), indent=2) if options.format == "json" else result)
        return
    if output.endswith(("/", os.sep)) or Path(output).is_dir():
        _write(_report_writers(Path(output), _stem(options.path)), load, options)
    else:
        report = REPORTS["result" if options.format == "json" else "log"]
        _write({Path(output): report.write}, load, options)


Writer = Callable[["ProfileResult", Path], None]


def _write(writers: Mapping[Path, Writer], load: Callable[[str], ProfileResult], options: argparse.Namespace) -> None:
    """Write each file whole, or not at all; look for files in the way before the work is done.

    Raises:
        FileExistsError: one of them is there, and --force was not given.
    """
    from profiler_wrapper.recording.atomic import replacing

    for path in writers:
        if path.exists() and not options.force:
            raise FileExistsError(f"File already exists, will not overwrite without --force: {path}")
    result = load(options.path)
    for path, write in writers.items():
        with replacing(path) as beside:
            write(result, beside)
        print(path)


def _report_writers(directory: Path, prefix: str) -> dict[Path, Writer]:
    from profiler_wrapper.reports.write import REPORTS

    return {
        directory / report.file_name.replace("<prefix>", prefix).replace("<r>", "0"): report.write
        for report in REPORTS.values()
    }


def _stem(path: str) -> str:
    """`"runs/h100.pt.trace.json.gz"` -> `"h100"`."""
    trace = Path(path).resolve()
    while trace.suffix in TRACE_SUFFIXES:
        trace = trace.with_suffix("")
    return trace.name


if __name__ == "__main__":
    sys.exit(main())
