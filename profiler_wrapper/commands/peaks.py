"""`peaks`: what this machine's device can do at most."""

from __future__ import annotations

import argparse
import math
import sys

from profiler_wrapper.commands import common
from profiler_wrapper.errors import WrongUse, shown
from profiler_wrapper.terminal import terminal_width


def add(commands: common.Commands) -> None:
    command = common.add_command(commands, "peaks", peaks, examples="--all\n--measure -o peaks.json")
    which = command.add_mutually_exclusive_group()
    which.add_argument("--all", action="store_true", help="every device that is known")
    which.add_argument("--measure", action="store_true", help="measure it; -o writes the JSON that --peaks reads")
    command.add_argument("--seconds", type=float, metavar="S", help="that measuring may take, about (default: 15)")
    command.add_argument("--device", metavar="NAME", help="cpu, cuda:1, ... (default: the accelerator, else the CPU)")
    common.add_output(command, "peaks.txt or peaks.json")


def peaks(options: argparse.Namespace) -> None:
    """Say what this machine's device can do at most: as its maker says, or measured."""
    from profiler_wrapper.tables.work.peaks import VARIABLE
    from profiler_wrapper.trace.atomic import replacing

    if options.seconds is not None and not options.measure:
        raise WrongUse("--seconds is for measuring: add --measure.")
    if options.device is not None and options.all:
        raise WrongUse("--all is of every device: leave out --device.")
    common.settle_format(options)
    as_json = options.measure or options.format == "json"
    output = common.output_file(options, "peaks.json" if as_json else "peaks.txt")
    text, data = _said(options)
    if output is None:
        print(common.json_text(data) if options.format == "json" else text)
        return
    with replacing(output) as beside:
        common.write_text(beside, common.json_text(data) if as_json else text)
    use = f"  analyze --peaks {output}\n  peaks={str(output)!r} in code\n  {VARIABLE}={output}"
    print(f"{text}\n\nWritten to {output}. To use it:\n{use}" if options.measure else output)


def _said(options: argparse.Namespace) -> tuple[str, object]:
    """The text, and the data of the JSON, which `find_peaks` reads where it was measured. Raises WrongUse."""
    from msgspec import to_builtins

    from profiler_wrapper.reports import peaks as reports
    from profiler_wrapper.tables.work.peaks import find_peaks, known_peaks, peaks_of

    width = terminal_width()
    if options.all:
        return reports.all_peaks_text(known_peaks(), width=width), to_builtins(known_peaks())
    from profiler_wrapper.capture import ceilings

    seconds = 15.0 if options.seconds is None else options.seconds
    if not 0 < seconds < math.inf:
        raise WrongUse(f"seconds={shown(seconds)}: a time above 0 is needed to measure anything.")
    device = ceilings.find_device(options.device)
    if options.measure:
        print(f"measuring on {device}, for about {seconds:g} s ...", file=sys.stderr, flush=True)
        measured = ceilings.measure_ceilings(device, seconds=seconds)
        maker = peaks_of(measured.device)
        data = {**to_builtins(measured), "maker": to_builtins(maker)}
        return reports.measured_text(measured, maker, width=width), data
    name = ceilings.device_name(device)
    found, warning = find_peaks(None if device.type == "cpu" else name)
    data = {"device": name, "peaks": to_builtins(found), "warning": warning}
    return reports.peaks_text(name, found, warning, width=width), data
