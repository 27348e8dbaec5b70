"""The command line: `python -m profiler_wrapper`, also installed as `profiler-wrapper`.

Exit codes: 0 fine, 1 failed, 2 wrong use. A file is overwritten only with --force.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from profiler_wrapper.errors import ProfilerWrapperError, WrongUse

# torch and matplotlib take seconds to import: each command imports what it needs, so that --help is quick.
if TYPE_CHECKING:
    from profiler_wrapper.reports.write import Report, ReportFile
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
    command.add_argument(
        "--peaks",
        metavar="VALUE",
        help="of the device: dense TFLOP/s (989), bfloat16=989,bandwidth=3350 (GB/s), or a file of `peaks --measure`",
    )
    _add_output(command, "the tables, result.json and plots")

    command = _command(commands, "snapshot", snapshot)
    command.add_argument("path", metavar="FILE", help="a pickle of torch.cuda.memory._dump_snapshot; it is not run")
    _add_output(command, "the text, the JSON and a plot")

    command = _command(commands, "monitor", monitor)
    command.add_argument("path", metavar="PATH", help="a log of a TrainingMonitor, or a directory with logs or runs")
    _add_output(command, "the plot and the text")

    command = _command(commands, "peaks", peaks)
    which = command.add_mutually_exclusive_group()
    which.add_argument("--all", action="store_true", help="every device that is known")
    which.add_argument("--measure", action="store_true", help="measure it; -o writes the JSON that --peaks reads")
    command.add_argument("--seconds", type=float, metavar="S", help="that measuring may take, about (default: 15)")
    command.add_argument("--device", metavar="NAME", help="cpu, cuda:1, ... (default: the accelerator, else the CPU)")
    _add_output(command, "peaks.txt or peaks.json")
    return parser


def _add_output(command: argparse.ArgumentParser, in_directory: str) -> None:
    """How and where to a command writes; `in_directory`: what a directory gets."""
    command.add_argument("--format", choices=("text", "json"), default="text", help="of the output (default: text)")
    command.add_argument("-o", "--output", metavar="FILE_OR_DIR", help=f"write there; a directory gets {in_directory}")
    command.add_argument("--force", action="store_true", help="overwrite files")


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
        result = load(options.path, peaks=options.peaks)
        print(json.dumps(result.to_dict(), indent=2) if options.format == "json" else result)
        return
    if _is_directory(output):
        _write(_report_writers(Path(output), _stem(options.path)), partial(load, peaks=options.peaks), options)
    else:
        report = REPORTS["result" if options.format == "json" else "log"]
        _write({Path(output): (report, report.files[0])}, partial(load, peaks=options.peaks), options)


def snapshot(options: argparse.Namespace) -> None:
    """Say where the memory is: what a torch memory snapshot holds, who holds it, and how it came to that."""
    from profiler_wrapper.analysis.allocator_snapshot import allocator_report
    from profiler_wrapper.recording.atomic import replacing
    from profiler_wrapper.recording.snapshot_file import read_snapshot
    from profiler_wrapper.reports.snapshot_text import console_text
    from profiler_wrapper.reports.write_snapshot import SNAPSHOT_REPORTS, snapshot_json

    output = options.output
    if output is None:
        report = allocator_report(read_snapshot(options.path))
        unicode = (sys.stdout.encoding or "").lower() in ("utf-8", "utf8")
        print(snapshot_json(report) if options.format == "json" else console_text(report, unicode=unicode))
        return
    if _is_directory(output):
        stem = Path(options.path).stem
        writers = {Path(output) / f"{stem}{ending}": write for ending, write in SNAPSHOT_REPORTS.items()}
    else:
        writers = {Path(output): SNAPSHOT_REPORTS[f"_snapshot.{'json' if options.format == 'json' else 'txt'}"]}
    _refuse_to_overwrite(writers, options)
    report = allocator_report(read_snapshot(options.path))
    for path, write in writers.items():
        with replacing(path) as beside:
            write(report, beside)
        print(path)


def monitor(options: argparse.Namespace) -> None:
    """Say how a monitored training went, and draw it; of a killed run the summary is made first.

    Reads perf_steps_*.jsonl, perf_summary_*.json and perf_metrics_*.log, of FlagScale's too. `-o FILE.png` draws.
    """
    from profiler_wrapper.analysis.monitor_run import MonitorRun, monitor_run
    from profiler_wrapper.recording.atomic import json_bytes, replacing
    from profiler_wrapper.recording.monitor_log import find_log, read_log
    from profiler_wrapper.reports.monitor_plots import draw_monitor
    from profiler_wrapper.reports.monitor_text import monitor_text

    def text(run: MonitorRun) -> str:
        return json_bytes(run.to_dict()).decode().rstrip() if options.format == "json" else monitor_text(run)

    def write_text(run: MonitorRun, path: Path) -> None:
        path.write_text(text(run) + "\n", encoding="utf-8")

    log = find_log(options.path)
    _rebuild_summaries(Path(options.path))
    if options.output is None:
        print(text(monitor_run(read_log(log))))
        return
    output = Path(options.output)
    writers: dict[Path, Callable[[MonitorRun, Path], None]] = {
        output: draw_monitor if output.suffix == ".png" else write_text
    }
    if _is_directory(options.output):
        ending = "json" if options.format == "json" else "txt"
        writers = {output / f"{log.stem}.png": draw_monitor, output / f"{log.stem}_report.{ending}": write_text}
    _refuse_to_overwrite(writers, options)
    run = monitor_run(read_log(log))
    for path, write in writers.items():
        with replacing(path) as beside:
            write(run, beside)
        print(path)


def _rebuild_summaries(path: Path) -> None:
    """Of runs that were killed. What cannot be done is said, and is no reason to stop."""
    from profiler_wrapper.live.summary import rebuild_summary, unfinished
    from profiler_wrapper.recording.monitor_files import log_directories

    directories = log_directories(path) if path.is_dir() else [path.parent]
    for directory in directories:
        for session in unfinished(directory):
            steps = session.files["steps"]
            if path.is_dir() or steps == path:
                try:
                    print("made", rebuild_summary(steps), file=sys.stderr)
                except (ProfilerWrapperError, OSError) as error:
                    print(f"warning: no summary of {steps}: {error}", file=sys.stderr)


def peaks(options: argparse.Namespace) -> None:
    """Say what this machine's device can do at most: as its maker says, or measured."""
    from profiler_wrapper.peaks_command import all_peaks, device_peaks, how_to_use, measured_peaks
    from profiler_wrapper.recording.atomic import json_bytes, replacing

    if options.seconds is not None and not options.measure:
        raise WrongUse("--seconds is for measuring: add --measure.")
    if options.device is not None and options.all:
        raise WrongUse("--all is of every device: leave out --device.")
    as_json = options.measure or options.format == "json"
    output = None if options.output is None else Path(options.output)
    if output is not None and _is_directory(options.output):
        output /= "peaks.json" if as_json else "peaks.txt"
    if output is not None:
        _refuse_to_overwrite([output], options)
    if options.measure:
        text, data = measured_peaks(options.device, options.seconds)
    else:
        text, data = all_peaks() if options.all else device_peaks(options.device)
    if output is None:
        print(json_bytes(data).decode().rstrip() if options.format == "json" else text)
        return
    with replacing(output) as beside:
        beside.write_bytes(json_bytes(data) if as_json else f"{text}\n".encode())
    print(f"{text}\n\n{how_to_use(output)}" if options.measure else output)


def _is_directory(output: str) -> bool:
    return output.endswith(("/", os.sep)) or Path(output).is_dir()


def _refuse_to_overwrite(paths: Iterable[Path], options: argparse.Namespace) -> None:
    for path in paths:
        if path.exists() and not options.force:
            raise FileExistsError(f"File already exists, will not overwrite without --force: {path}")


Writers = Mapping[Path, tuple["Report", "ReportFile"]]


def _write(writers: Writers, load: Callable[[str], ProfileResult], options: argparse.Namespace) -> None:
    """Write each file whole, or not at all; look for files in the way before the work is done.

    What a result has nothing to say of is left out.

    Raises:
        FileExistsError: one of them is there, and --force was not given.
    """
    from profiler_wrapper.recording.atomic import replacing

    _refuse_to_overwrite(writers, options)
    result = load(options.path)
    for path, (report, file) in writers.items():
        if report.applies(result):
            with replacing(path) as beside:
                file.write(result, beside)
            print(path)


def _report_writers(directory: Path, prefix: str) -> Writers:
    from profiler_wrapper.reports.write import REPORTS

    return {
        directory / file.name.replace("<prefix>", prefix).replace("<r>", "0"): (report, file)
        for report in REPORTS.values()
        for file in report.files
    }


def _stem(path: str) -> str:
    """`"runs/h100.pt.trace.json.gz"` -> `"h100"`."""
    trace = Path(path).resolve()
    while trace.suffix in TRACE_SUFFIXES:
        trace = trace.with_suffix("")
    return trace.name


if __name__ == "__main__":
    sys.exit(main())
