"""`peaks`: what this machine's device can do at most."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from profiler_wrapper.commands.common import (
    Commands,
    add_command,
    add_output,
    json_text,
    output_file,
    settle_format,
    write_text,
)
from profiler_wrapper.errors import WrongUse
from profiler_wrapper.units import terminal_width


def add(commands: Commands) -> None:
    """The parser."""
    command = add_command(commands, "peaks", peaks, examples="--all\n--measure -o peaks.json")
    which = command.add_mutually_exclusive_group()
    which.add_argument("--all", action="store_true", help="every device that is known")
    which.add_argument("--measure", action="store_true", help="measure it; -o writes the JSON that --peaks reads")
    command.add_argument("--seconds", type=float, metavar="S", help="that measuring may take, about (default: 15)")
    command.add_argument("--device", metavar="NAME", help="cpu, cuda:1, ... (default: the accelerator, else the CPU)")
    add_output(command, "peaks.txt or peaks.json")


def peaks(options: argparse.Namespace) -> None:
    """Say what this machine's device can do at most: as its maker says, or measured."""
    from profiler_wrapper.trace.atomic import replacing

    if options.seconds is not None and not options.measure:
        raise WrongUse("--seconds is for measuring: add --measure.")
    if options.device is not None and options.all:
        raise WrongUse("--all is of every device: leave out --device.")
    settle_format(options)
    as_json = options.measure or options.format == "json"
    output = output_file(options, "peaks.json" if as_json else "peaks.txt")
    if options.measure:
        text, data = _measured_peaks(options.device, options.seconds)
    else:
        text, data = _all_peaks() if options.all else _device_peaks(options.device)
    if output is None:
        print(json_text(data) if options.format == "json" else text)
        return
    with replacing(output) as beside:
        write_text(beside, json_text(data) if as_json else text)
    print(f"{text}\n\n{_how_to_use(output)}" if options.measure else output)


# --- each as text, and as the data of its JSON ---


def _all_peaks() -> tuple[str, object]:
    """The whole table."""
    from profiler_wrapper.analysis.work.peaks import known_peaks
    from profiler_wrapper.reports import peaks as peaks_table

    return peaks_table.all_peaks_text(known_peaks(), width=terminal_width()), [
        peaks_table.peaks_dict(entry) for entry in known_peaks()
    ]


def _device_peaks(device: str | None) -> tuple[str, object]:
    """What a profile on this machine's device is measured against: of the environment, else of the table.

    Raises:
        WrongUse: there is no such device, or the environment says what means no peak.
    """
    from profiler_wrapper.analysis.work.peaks import find_peaks
    from profiler_wrapper.capture.ceilings import device_name, find_device
    from profiler_wrapper.reports import peaks as peaks_table

    found_device = find_device(device)
    name = device_name(found_device)
    found, warning = find_peaks(None if found_device.type == "cpu" else name)
    data = {"device": name, "peaks": found and peaks_table.peaks_dict(found), "warning": warning}
    return peaks_table.peaks_text(name, found, warning, width=terminal_width()), data


def _measured_peaks(device: str | None, seconds: float | None) -> tuple[str, object]:
    """This machine's own ceilings; the data are those of the file that `find_peaks` reads.

    Raises:
        WrongUse: there is no such device, or no time.
    """
    from profiler_wrapper.analysis.work.peaks import peaks_of
    from profiler_wrapper.capture.ceilings import DEFAULT_SECONDS, check_seconds, find_device, measure_ceilings
    from profiler_wrapper.reports import peaks as peaks_table

    seconds = DEFAULT_SECONDS if seconds is None else seconds
    check_seconds(seconds)
    found_device = find_device(device)
    print(f"measuring on {found_device}, for about {seconds:g} s ...", file=sys.stderr, flush=True)
    measured = measure_ceilings(found_device, seconds=seconds)
    maker = peaks_of(measured.device)
    text = peaks_table.measured_text(measured, maker, width=terminal_width())
    return text, peaks_table.measured_dict(measured, maker)


def _how_to_use(path: Path) -> str:
    """What a written measurement is good for."""
    from profiler_wrapper.analysis.work.peaks import VARIABLE

    ways = (f"analyze --peaks {path}", f"peaks={str(path)!r} in code", f"{VARIABLE}={path}")
    return "\n".join([f"Written to {path}. To use it:", *(f"  {way}" for way in ways)])
