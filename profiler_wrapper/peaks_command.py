"""What `python -m profiler_wrapper peaks` says: each as text, and as the data of its JSON."""

from __future__ import annotations

import sys
from pathlib import Path

from profiler_wrapper.analysis.peaks import VARIABLE, find_peaks, known_peaks, peaks_of
from profiler_wrapper.reports import peaks_table


def all_peaks() -> tuple[str, object]:
    """The whole table."""
    return peaks_table.all_peaks_text(known_peaks()), [peaks_table.peaks_dict(entry) for entry in known_peaks()]


def device_peaks(device: str | None) -> tuple[str, object]:
    """What a profile on this machine's device is measured against: of the environment, else of the table.

    Raises:
        WrongUse: there is no such device, or the environment says what means no peak.
    """
    from profiler_wrapper.capture.ceilings import device_name, find_device

    found_device = find_device(device)
    name = device_name(found_device)
    found, warning = find_peaks(None if found_device.type == "cpu" else name)
    data = {"device": name, "peaks": found and peaks_table.peaks_dict(found), "warning": warning}
    return peaks_table.peaks_text(name, found, warning), data


def measured_peaks(device: str | None, seconds: float | None) -> tuple[str, object]:
    """This machine's own ceilings; the data are those of the file that `find_peaks` reads.

    Raises:
        WrongUse: there is no such device, or no time.
    """
    from profiler_wrapper.capture.ceilings import DEFAULT_SECONDS, check_seconds, find_device, measure_ceilings

    seconds = DEFAULT_SECONDS if seconds is None else seconds
    check_seconds(seconds)
    found_device = find_device(device)
    print(f"measuring on {found_device}, for about {seconds:g} s ...", file=sys.stderr, flush=True)
    measured = measure_ceilings(found_device, seconds=seconds)
    maker = peaks_of(measured.device)
    return peaks_table.measured_text(measured, maker), peaks_table.measured_dict(measured, maker)


def how_to_use(path: Path) -> str:
    """What a written measurement is good for."""
    ways = (f"analyze --peaks {path}", f"peaks={str(path)!r} in code", f"{VARIABLE}={path}")
    return "\n".join([f"Written to {path}. To use it:", *(f"  {way}" for way in ways)])
