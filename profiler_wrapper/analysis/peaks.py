"""The most a device can do: FLOP/s by type and bytes a second, and where that is known from."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from numbers import Real

from profiler_wrapper.analysis.peak_table import SHARED_NAMES, TABLE
from profiler_wrapper.errors import WrongUse
from profiler_wrapper.recording.measured_peaks import MeasuredPeaks, read_measured_peaks

VARIABLE = "PROFILER_WRAPPER_PEAK_TFLOPS"
TYPES = ("float64", "float32", "tfloat32", "float16", "bfloat16", "float8", "float4", "int8", "int4")

_ALIASES = {
    "fp64": "float64",
    "double": "float64",
    "fp32": "float32",
    "float": "float32",
    "tf32": "tfloat32",
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "fp8": "float8",
    "fp4": "float4",
    "uint8": "int8",
    "uint4": "int4",
    "qint8": "int8",
    "quint8": "int8",
}
_BANDWIDTH = "bandwidth"
# A thousand times the fastest device: FLOP/s or bytes a second given in the place of TFLOP/s or GB/s.
_LARGEST_TFLOPS = 1e7
_LARGEST_GB_PER_S = 1e7
_ACCEPTED = (
    "It takes dense TFLOP/s (989), type=TFLOP/s pairs with bandwidth in GB/s "
    "(bfloat16=989,float8=1979,bandwidth=3350), "
    "or a file that `python -m profiler_wrapper peaks --measure -o FILE` wrote"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """The roof of one device: dense FLOPs a second (two for a multiply-add) and bytes a second of its memory."""

    device: str  # exact name; "" where one was given for whatever device
    flops_per_s: Mapping[str, float]  # by the names in TYPES; what is not known is not there
    bandwidth_bytes_per_s: float | None
    source: str  # document of the maker, "measured ...", "given ..."

    def flops(self, dtype: str) -> float | None:
        """FLOP/s of matmuls whose operands are of this type, by torch's name; None: not known.

        `"float8_e4m3fn"` and its like are float8. A type that was not told (`""`) has the peak that all types have
        where one number was given for all.
        """
        kind = type_of(dtype)
        if kind is None and not dtype:
            values = set(self.flops_per_s.values())
            return values.pop() if len(values) == 1 and len(self.flops_per_s) == len(TYPES) else None
        return self.flops_per_s.get(kind) if kind is not None else None


def type_of(dtype: str) -> str | None:
    """The entry of TYPES that a type of torch counts as; None for one that has no peak of its own."""
    name = dtype.strip().lower().removeprefix("torch.")
    name = _ALIASES.get(name, name)
    if name in TYPES:
        return name
    small = re.match(r"float([48])_e\d+m\d+", name)
    return f"float{small[1]}" if small else None


@cache
def _by_name() -> Mapping[str, Peaks]:
    return {
        name: Peaks(
            device=name,
            flops_per_s={kind: float(round(tflops * 1e12)) for kind, tflops in entry.tflops.items()},
            bandwidth_bytes_per_s=entry.gb_per_s * 1e9,
            source=entry.source,
        )
        for entry in TABLE
        for name in entry.names
    }


def known_peaks() -> tuple[Peaks, ...]:
    """Every device of the table."""
    return tuple(_by_name().values())


def peaks_of(device_name: str) -> Peaks | None:
    """What the maker says of the device of exactly this name; None: not in the table."""
    return _by_name().get(device_name)


Given = float | Mapping[str, float] | str | os.PathLike[str] | Peaks


def find_peaks(
    device_name: str | None,
    *,
    given: Given | None = None,
    environment: Mapping[str, str] | None = None,
) -> tuple[Peaks | None, str | None]:
    """The roof to measure against, and a warning: what is `given`, else PROFILER_WRAPPER_PEAK_TFLOPS, else the table.

    Args:
        device_name: as torch and traces name it; None: a CPU, or not known.
        given: TFLOP/s for whatever type; by type (`{"bfloat16": 989, "bandwidth": 3350}`, GB/s, or the same as text),
            where the other types stay the table's; the file of a measurement; or a Peaks.
        environment: `os.environ` but in tests. The variable takes what `given` takes as text.

    Returns:
        The peaks, or None where nothing is known. The warning says what to do then; it is also there where the file
        is of another device. Else it is None.

    Raises:
        WrongUse: `given` means no peak, or is a file that is none of ours. What the variable says wrong is a warning.
    """
    environment = os.environ if environment is None else environment
    told = environment.get(VARIABLE, "").strip()
    known = peaks_of(device_name) if device_name else None
    if given is not None:
        peaks = _told(given, device_name, "peaks")
    elif told:
        try:
            peaks = _told(told, device_name, VARIABLE)
        except WrongUse as error:
            return known, f"{error} It is ignored."
    else:
        return known, None if known else _unknown(device_name)
    if device_name and peaks.device and peaks.device != device_name:
        return peaks, f"the peaks used are of {peaks.device!r} ({peaks.source}), but this device is {device_name!r}"
    return peaks, None


def _unknown(device_name: str | None) -> str:
    """What to do comes first: a table on a terminal has room for the begin."""
    if not device_name:
        why = "CPUs are in no table, or the trace does not name its device"
    elif device_name in SHARED_NAMES:
        why = f"{device_name!r} is {SHARED_NAMES[device_name]}, and the name does not tell which"
    else:
        why = f"the device {device_name!r} is in no table"
    return (
        "no peak is known: run `profiler-wrapper peaks --measure -o p.json`, give peaks='p.json'; or set "
        f"{VARIABLE}=<dense TFLOP/s> (or bfloat16=<TFLOP/s>,bandwidth=<GB/s>): {why}"
    )


def _told(given: Given, device_name: str | None, name: str) -> Peaks:
    if isinstance(given, Peaks):
        return _checked_peaks(given, name)
    if isinstance(given, (int, float, Real)):  # a bool too, which is then refused
        return _of_one_number(given, device_name, name)
    if isinstance(given, Mapping):
        return _of_pairs({str(key): value for key, value in given.items()}, device_name, name)
    if isinstance(given, os.PathLike):
        return _of_file(given)
    if not isinstance(given, str):
        raise WrongUse(f"{name} is {given!r}. {_ACCEPTED}.")
    text = given.strip()
    number = _number(text)
    if number is not None:
        return _of_one_number(number, device_name, name)
    is_file = os.path.exists(text)  # unlike a Path's, false for what can be no path at all
    if "=" in text and not is_file:
        return _of_pairs(_pairs(text, name), device_name, name)
    if not is_file:
        raise WrongUse(f"{name} is {given!r}, which is no number, no pair and no file that is there. {_ACCEPTED}.")
    return _of_file(text)


def _checked_peaks(given: Peaks, name: str) -> Peaks:
    """Peaks that the caller made, in FLOP/s and bytes a second."""
    for kind, value in given.flops_per_s.items():
        if kind not in TYPES:
            raise WrongUse(f"{name} has {kind!r}, which is none of {', '.join(TYPES)}.")
        _checked(value, f"{name}: flops_per_s[{kind!r}]={value!r}", _LARGEST_TFLOPS * 1e12, "FLOP/s")
    bandwidth = given.bandwidth_bytes_per_s
    if bandwidth is not None:
        _checked(bandwidth, f"{name}: bandwidth_bytes_per_s={bandwidth!r}", _LARGEST_GB_PER_S * 1e9, "bytes/s")
    return given


def _pairs(text: str, name: str) -> dict[str, float]:
    pairs = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        key, _, value = pair.partition("=")
        number = _number(value)
        if number is None:
            raise WrongUse(f"{name} has {pair!r}, where type=number was expected. {_ACCEPTED}.")
        pairs[key.strip()] = number
    return pairs


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _of_one_number(tflops: object, device_name: str | None, name: str) -> Peaks:
    value = _checked(tflops, f"{name}={tflops!r:.40}", _LARGEST_TFLOPS, "TFLOP/s")
    known = peaks_of(device_name) if device_name else None
    return Peaks(
        device=device_name or "",
        flops_per_s=dict.fromkeys(TYPES, value * 1e12),
        bandwidth_bytes_per_s=known.bandwidth_bytes_per_s if known else None,
        source=f"given ({name}), {value:g} TFLOP/s for every type",
    )


def _of_pairs(pairs: Mapping[str, float], device_name: str | None, name: str) -> Peaks:
    known = peaks_of(device_name) if device_name else None
    flops = dict(known.flops_per_s) if known else {}
    bandwidth = known.bandwidth_bytes_per_s if known else None
    if not pairs:
        raise WrongUse(f"{name} is empty. {_ACCEPTED}.")
    told: dict[str, str] = {}
    for key, value in pairs.items():
        same = told.setdefault(type_of(key) or key.strip().lower(), key)
        if same != key:
            raise WrongUse(f"{name} gives both {same!r} and {key!r}, which are the same. {_ACCEPTED}.")
        if key.strip().lower() == _BANDWIDTH:
            bandwidth = _checked(value, f"{name}: {key}={value!r}", _LARGEST_GB_PER_S, "GB/s") * 1e9
            continue
        kind = type_of(key)
        if kind is None:
            raise WrongUse(f"{name} has {key!r}, which is none of {', '.join(TYPES)} or {_BANDWIDTH}.")
        flops[kind] = _checked(value, f"{name}: {key}={value!r}", _LARGEST_TFLOPS, "TFLOP/s") * 1e12
    what = ", ".join(f"{key}={float(value):g}" for key, value in pairs.items())
    rest = f"; the rest: {known.source}" if known else ""
    return Peaks(
        device=device_name or "",
        flops_per_s=flops,
        bandwidth_bytes_per_s=bandwidth,
        source=f"given ({name}: {what}){rest}",
    )


def _checked(value: object, what: str, largest: float, unit: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise WrongUse(f"{what} is no number of {unit}. {_ACCEPTED}.")
    try:
        number = float(value)
    except OverflowError:  # a whole number of over 308 digits
        number = sys.float_info.max
    if not math.isfinite(number) or number <= 0:
        raise WrongUse(f"{what}: a peak is above 0 {unit}. {_ACCEPTED}.")
    if number > largest:
        raise WrongUse(f"{what} is more than any device does; the unit is {unit}. {_ACCEPTED}.")
    return number


def peaks_of_measurement(measured: MeasuredPeaks) -> Peaks:
    """A measurement as the roof that it is."""
    return Peaks(
        device=measured.device,
        flops_per_s={kind: ceiling.per_s for kind, ceiling in measured.flops.items()},
        bandwidth_bytes_per_s=measured.copy.per_s if measured.copy else None,
        source=measured.source,
    )


def _of_file(path: str | os.PathLike[str]) -> Peaks:
    measured = read_measured_peaks(path)
    if unknown := sorted(set(measured.flops) - set(TYPES)):
        raise WrongUse(f"{os.fspath(path)} has the type {unknown[0]!r}, which is none of {', '.join(TYPES)}.")
    return peaks_of_measurement(measured)
