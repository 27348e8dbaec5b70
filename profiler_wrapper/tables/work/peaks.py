"""The most a device can do: FLOP/s by type and bytes a second, as its maker says, as measured, or as given.

The table has dense figures (no sparsity).

- Names are exactly those that the driver gives, which `torch.cuda.get_device_name()` and a trace repeat. Devices that
  differ but share a name, and parts of a device (MIG, a virtual function), are not in the table.
- float32 is real float32, on CUDA cores at NVIDIA; on AMD's CDNA its matrix cores do it too. tfloat32 stands apart.
- float64 is of tensor or matrix cores where the device has them for it: matmuls run there.
- float16 and float8 accumulate in float32, as torch's matmuls do. On GeForce that is half of the figure for float16.
- A figure that the maker does not give, or on which its present pages disagree (B300 in float4), is left out.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real

from profiler_wrapper.errors import WrongUse, shown
from profiler_wrapper.trace.measured_peaks import read_measured_peaks

VARIABLE = "PROFILER_WRAPPER_PEAK_TFLOPS"
TYPES = ("float64", "float32", "tfloat32", "float16", "bfloat16", "float8", "float4", "int8", "int4")

_ALIASES = {"fp64": "float64", "double": "float64", "fp32": "float32", "float": "float32", "tf32": "tfloat32",
            "fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp8": "float8", "fp4": "float4",
            "uint8": "int8", "qint8": "int8", "quint8": "int8", "uint4": "int4"}  # fmt: skip
_BANDWIDTH = "bandwidth"
# In TFLOP/s or GB/s a thousand times the fastest device: given were FLOP/s or bytes a second.
_LARGEST = 1e7
_ACCEPTED = (
    "It takes dense TFLOP/s (989), type=TFLOP/s pairs with bandwidth in GB/s "
    "(bfloat16=989,float8=1979,bandwidth=3350), "
    "or a file that `profiler-wrapper peaks --measure -o FILE` wrote"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """The roof of one device: dense FLOPs a second (two for a multiply-add) and bytes a second of its memory."""

    device: str  # exact name; "" where one was given for whatever device
    flops_per_s: Mapping[str, float]  # by the names in TYPES; what is not known is not there
    bandwidth_bytes_per_s: float | None  # of its memory; null where not known
    source: str  # document of the maker, "measured ...", "given ..."

    def flops(self, dtype: str) -> float | None:
        """Return the FLOP/s of matmuls whose operands are of this type, by torch's name; None: not known.

        `"float8_e4m3fn"` and its like are float8. A type that is not known (`""`) has the peak that all types have
        where one number was given for all.
        """
        kind = type_of(dtype)
        if kind is None and not dtype:
            values = set(self.flops_per_s.values())
            return values.pop() if len(values) == 1 and len(self.flops_per_s) == len(TYPES) else None
        return self.flops_per_s.get(kind) if kind is not None else None


def type_of(dtype: str) -> str | None:
    """Return the entry of TYPES that a type of torch counts as; None for one that has no peak of its own."""
    name = dtype.strip().lower().removeprefix("torch.")
    name = _ALIASES.get(name, name)
    if name in TYPES:
        return name
    small = re.match(r"float([48])_e\d+m\d+", name)
    return f"float{small[1]}" if small else None


def known_peaks() -> tuple[Peaks, ...]:
    """Return the peaks of every device of the table."""
    return tuple(_BY_NAME.values())


def peaks_of(device_name: str | None) -> Peaks | None:
    """Return what the maker says of the device of exactly this name; None: not in the table."""
    return _BY_NAME.get(device_name or "")


Given = float | Mapping[str, float] | str | os.PathLike[str] | Peaks


def find_peaks(
    device_name: str | None, *, given: Given | None = None, environment: Mapping[str, str] | None = None
) -> tuple[Peaks | None, str | None]:
    """Return the roof to measure against, and a warning: `given`, else PROFILER_WRAPPER_PEAK_TFLOPS, else the table.

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
    text = environment.get(VARIABLE, "").strip()
    known = peaks_of(device_name)
    if given is not None:
        peaks = _peaks_from(given, device_name, "peaks")
    elif text:
        try:
            peaks = _peaks_from(text, device_name, VARIABLE)
        except WrongUse as error:
            return known, f"{error} It is ignored."
    else:
        return known, None if known else _unknown(device_name)
    if device_name and peaks.device and peaks.device != device_name:
        theirs, this = shown(peaks.device), shown(device_name)
        return peaks, f"the peaks used are of {theirs} ({peaks.source}), but this device is {this}"
    return peaks, None


NO_PEAK = "no peak is known"  # how the warning begins


def _unknown(device_name: str | None) -> str:
    why = f"the device {shown(device_name)} is in no table"
    if not device_name:
        why = "CPUs are in no table, or the trace does not name its device"
    return (
        f"{NO_PEAK}: run `profiler-wrapper peaks --measure -o peaks.json`, give peaks='peaks.json'; or set "
        f"{VARIABLE}=<dense TFLOP/s> (or bfloat16=<TFLOP/s>,bandwidth=<GB/s>): {why}"
    )


def _peaks_from(given: Given, device_name: str | None, name: str) -> Peaks:
    """Return what is given as peaks: themselves, a file's, by type, or one number. `name` is what errors name."""
    if isinstance(given, str):
        text = given.strip()
        if os.path.exists(text):  # unlike a Path's, false for what can be no path at all
            return _of_file(text)
        if "=" in text:
            pairs = [pair.partition("=") for pair in text.split(",") if pair.strip()]
            return _of_pairs({key.strip(): value for key, _, value in pairs}, device_name, name)
        try:
            given = float(text)
        except ValueError:
            wrong = f"{name} is {shown(given)}, which is no number, no pair and no file that is there. {_ACCEPTED}."
            raise WrongUse(wrong) from None
    if isinstance(given, os.PathLike):
        return _of_file(given)
    if isinstance(given, Mapping):
        return _of_pairs({str(key): value for key, value in given.items()}, device_name, name)
    if isinstance(given, Peaks):
        for kind, per_s in given.flops_per_s.items():
            if kind not in TYPES:
                raise WrongUse(f"{name} has {shown(kind)}, which is none of {', '.join(TYPES)}.")
            _checked(per_s, f"{name}: flops_per_s[{shown(kind)}]={shown(per_s)}", "FLOP/s", _LARGEST * 1e12)
        if (bandwidth := given.bandwidth_bytes_per_s) is not None:
            _checked(bandwidth, f"{name}: bandwidth_bytes_per_s={shown(bandwidth)}", "bytes/s", _LARGEST * 1e9)
        return given
    tflops = _checked(given, f"{name}={shown(given)}", "TFLOP/s")
    known = peaks_of(device_name)
    return Peaks(
        device=device_name or "",
        flops_per_s=dict.fromkeys(TYPES, tflops * 1e12),
        bandwidth_bytes_per_s=known.bandwidth_bytes_per_s if known else None,
        source=f"given ({name}), {tflops:g} TFLOP/s for every type",
    )


def _of_pairs(pairs: Mapping[str, object], device_name: str | None, name: str) -> Peaks:
    """Return the peaks of types in TFLOP/s and of the bandwidth in GB/s; what is not among them is the table's."""
    if not pairs:
        raise WrongUse(f"{name} is empty. {_ACCEPTED}.")
    known = peaks_of(device_name)
    flops = dict(known.flops_per_s) if known else {}
    bandwidth = known.bandwidth_bytes_per_s if known else None
    stated: dict[str, float] = {}
    for key, value in pairs.items():
        kind = _BANDWIDTH if key.strip().lower() == _BANDWIDTH else type_of(key)
        if kind is None:
            raise WrongUse(f"{name} has {shown(key)}, which is none of {', '.join(TYPES)} or {_BANDWIDTH}.")
        unit = "GB/s" if kind == _BANDWIDTH else "TFLOP/s"
        stated[key] = _checked(value, f"{name}: {key}={shown(value)}", unit)
        if kind == _BANDWIDTH:
            bandwidth = stated[key] * 1e9
        else:
            flops[kind] = stated[key] * 1e12
    what = ", ".join(f"{key}={number:g}" for key, number in stated.items())
    rest = f"; the rest: {known.source}" if known else ""
    return Peaks(
        device=device_name or "",
        flops_per_s=flops,
        bandwidth_bytes_per_s=bandwidth,
        source=f"given ({name}: {what}){rest}",
    )


def _checked(value: object, what: str, unit: str, largest: float = _LARGEST) -> float:
    """Return a peak as a number. Raises WrongUse: `what` is none, or not above 0, or more than the `largest`."""
    try:
        if isinstance(value, bool) or not isinstance(value, (Real, str)):
            raise ValueError
        number = float(value)
    except ValueError:
        raise WrongUse(f"{what} is no number of {unit}. {_ACCEPTED}.") from None
    except OverflowError:  # a whole number of over 308 digits
        number = sys.float_info.max
    if not math.isfinite(number) or number <= 0:
        raise WrongUse(f"{what}: a peak is above 0 {unit}. {_ACCEPTED}.")
    if number > largest:
        raise WrongUse(f"{what} is more than any device does; the unit is {unit}. {_ACCEPTED}.")
    return number


def _of_file(path: str | os.PathLike[str]) -> Peaks:
    measured = read_measured_peaks(path)
    if unknown := sorted(set(measured.flops) - set(TYPES)):
        raise WrongUse(f"{os.fspath(path)} has the type {shown(unknown[0])}, which is none of {', '.join(TYPES)}.")
    return Peaks(
        device=measured.device,
        flops_per_s={kind: ceiling.per_s for kind, ceiling in measured.flops.items()},
        bandwidth_bytes_per_s=measured.copy.per_s if measured.copy else None,
        source=measured.source,
    )


_V100 = "NVIDIA V100 datasheet, January 2020 (nvidia.com/en-us/data-center/v100)"
_A100 = "NVIDIA A100 datasheet (nvidia.com/en-us/data-center/a100)"
_AMPERE_RTX = "NVIDIA Ampere GA102 GPU architecture whitepaper v2.1, with FP32 accumulate"
_ADA_RTX = "NVIDIA Ada GPU architecture whitepaper v2.1, with FP32 accumulate"
_BLACKWELL_RTX = "NVIDIA RTX Blackwell GPU architecture whitepaper v1.1, with FP32 accumulate"
_BLACKWELL_PRO = "NVIDIA RTX PRO Blackwell GPU architecture whitepaper v1.0, with FP32 accumulate"
_HOPPER = "NVIDIA H100 Tensor Core GPU architecture whitepaper v1.04, table 2"
_GH200 = "NVIDIA GH200 Grace Hopper Superchip datasheet (resources.nvidia.com), half of the sparse figures"
_CDNA2 = "AMD Instinct MI200 series datasheet (amd.com), one GCD: torch sees each half of the package as a device"
_CDNA3 = "AMD CDNA 3 architecture whitepaper and data sheet (amd.com/en/products/accelerators/instinct/mi300)"
_CDNA4 = "AMD CDNA 4 architecture whitepaper and data sheet (amd.com/en/products/accelerators/instinct/mi350)"

_COLUMNS = ("float64", "float32", "tfloat32", "float16", "bfloat16", "float8", "int8", "int4", "float4")
# fmt: off
_TABLE: tuple[tuple[str, ...], ...] = (
    #    GB/s  fp64  fp32   tf32   fp16     bf16    fp8   int8   int4     fp4   source, names
    # NVIDIA, data centre
    ("   900   7.8  15.7      -    125        -      -      -      -       -",
     _V100, "Tesla V100-SXM2-16GB", "Tesla V100-SXM2-32GB"),
    ("   900     7    14      -    112        -      -      -      -       -",
     _V100, "Tesla V100-PCIE-16GB", "Tesla V100-PCIE-32GB"),
    ("  1134   8.2  16.4      -    130        -      -      -      -       -", _V100, "Tesla V100S-PCIE-32GB"),
    ("   320     -   8.1      -     65        -      -    130    260       -",
     "NVIDIA T4 datasheet and product brief PB-09256 (nvidia.com/en-us/data-center/tesla-t4)", "Tesla T4"),
    ("  1555  19.5  19.5    156    312      312      -    624   1248       -",
     _A100, "NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB", "A100-PCIE-40GB"),
    ("  2039  19.5  19.5    156    312      312      -    624   1248       -",
     _A100, "NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
    ("  1935  19.5  19.5    156    312      312      -    624   1248       -", _A100, "NVIDIA A100 80GB PCIe"),
    ("  2039  19.5  19.5    156    312      312      -    624   1248       -",
     "NVIDIA A800 datasheet: the A100's, but for NVLink", "NVIDIA A800-SXM4-80GB"),
    ("  1935  19.5  19.5    156    312      312      -    624   1248       -",
     "NVIDIA A800 datasheet: the A100's, but for NVLink", "NVIDIA A800 80GB PCIe"),
    ("   933  10.3  10.3     82    165      165      -    330    661       -",
     "NVIDIA A30 datasheet (nvidia.com/en-us/data-center/products/a30-gpu)", "NVIDIA A30"),
    ("   696     -  37.4   74.8  149.7    149.7      -  299.3  598.7       -",
     "NVIDIA A40 datasheet (nvidia.com/en-us/data-center/a40)", "NVIDIA A40"),
    ("   600     -  31.2   62.5    125      125      -    250    500       -",
     "NVIDIA A10 datasheet (nvidia.com/en-us/data-center/products/a10-gpu)", "NVIDIA A10"),
    ("   600     -    35     35     70       70      -    140    280       -",
     "NVIDIA A10G datasheet for AWS, February 2022 (d1.awsstatic.com/product-marketing/ec2)", "NVIDIA A10G"),
    ("   300     -  30.3     60    121      121  242.5  242.5      -       -",
     "NVIDIA L4 datasheet (nvidia.com/en-us/data-center/l4), half of the sparse figures", "NVIDIA L4"),
    ("   864     -  90.5   90.5 181.05   181.05    362    362    724       -",
     "NVIDIA L40 datasheet (nvidia.com/en-us/data-center/l40)", "NVIDIA L40"),
    ("   864     -  91.6    183 362.05   362.05    733    733    733       -",
     "NVIDIA L40S datasheet (nvidia.com/en-us/data-center/l40s)", "NVIDIA L40S"),
    ("  3350  66.9  66.9  494.7  989.4    989.4 1978.9 1978.9      -       -",
     f"{_HOPPER}; bandwidth: NVIDIA H100 datasheet", "NVIDIA H100 80GB HBM3"),
    ("  2039  51.2  51.2    378    756      756   1513   1513      -       -",
     f"{_HOPPER}; bandwidth: NVIDIA H100 PCIe product brief PB-11133", "NVIDIA H100 PCIe"),
    ("  3900    60    60  417.5  835.5    835.5 1670.5 1670.5      -       -",
     "NVIDIA H100 datasheet (nvidia.com/en-us/data-center/h100), one GPU, half of the sparse figures",
     "NVIDIA H100 NVL"),
    ("  3350     -  66.9  494.7  989.4    989.4 1978.9 1978.9      -       -",
     "NVIDIA H800 datasheet: the H100 SXM's, but for float64 and NVLink", "NVIDIA H800"),
    ("  4000     -    44     74    148      148    296    296      -       -",
     "NVIDIA publishes no document on the H20; as third parties report", "NVIDIA H20"),
    ("  4800  66.9  66.9  494.7  989.4    989.4 1978.9 1978.9      -       -",
     f"NVIDIA H200 datasheet (the H100 SXM's compute); {_HOPPER}", "NVIDIA H200"),
    ("  4800    60    60  417.5  835.5    835.5 1670.5 1670.5      -       -",
     "NVIDIA H200 datasheet (nvidia.com/en-us/data-center/h200), half of the sparse figures", "NVIDIA H200 NVL"),
    ("  4000  66.9  66.9  494.7  989.4    989.4 1978.9 1978.9      -       -",
     _GH200, "NVIDIA GH200 480GB", "NVIDIA GH200 120GB"),
    ("  4900  66.9  66.9  494.7  989.4    989.4 1978.9 1978.9      -       -", _GH200, "NVIDIA GH200 144G HBM3e"),
    ("  8000    37    75   1125   2250     2250   4500   4500      -    9000",
     "NVIDIA HGX B200 (nvidia.com/en-us/data-center/hgx), DGX B200 datasheet: an eighth, half of the sparse",
     "NVIDIA B200"),
    ("  8000    40    80   1250   2500     2500   5000   5000      -   10000",
     "NVIDIA GB200 NVL72 (nvidia.com/en-us/data-center/gb200-nvl72), one GPU, half of the sparse figures",
     "NVIDIA GB200"),
    ("  8000  1.25    75   1125   2250     2250   4500      -      -       -",
     "NVIDIA HGX B300 (nvidia.com/en-us/data-center/hgx): an eighth, half of the sparse figures",
     "NVIDIA B300 SXM6 AC"),
    ("  8000   1.3    80   1250   2500     2500   5000      -      -   15000",
     "NVIDIA GB300 NVL72 (nvidia.com/en-us/data-center/gb300-nvl72), one GPU, half of the sparse figures",
     "NVIDIA GB300"),
    # NVIDIA, workstations
    ("   768     -  38.7   77.4  154.8    154.8      -  309.7  619.3       -",
     _AMPERE_RTX, "NVIDIA RTX A6000", "RTX A6000"),
    ("   960     -  91.1  182.1  364.2    364.2  728.5  728.5   1457       -",
     _ADA_RTX, "NVIDIA RTX 6000 Ada Generation"),
    ("  1792     -   126  251.9  503.8    503.8 1007.6 1007.6      -  2015.2",
     _BLACKWELL_PRO, "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"),
    ("  1792     - 109.7  219.4  438.9    438.9  877.7  877.7      -  1755.7",
     _BLACKWELL_PRO, "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition"),
    # NVIDIA GeForce: with float32 accumulate, half of what float16 accumulate gives
    ("   760     -  29.8   29.8   59.5     59.5      -    238    476       -",
     _AMPERE_RTX, "NVIDIA GeForce RTX 3080", "GeForce RTX 3080"),
    ("   936     -  35.6   35.6     71       71      -    284    568       -",
     _AMPERE_RTX, "NVIDIA GeForce RTX 3090", "GeForce RTX 3090"),
    ("  1008     -    40     40     80       80      -    320    640       -",
     _AMPERE_RTX, "NVIDIA GeForce RTX 3090 Ti"),
    (" 716.8     -  48.7   48.7   97.5     97.5  194.9  389.9  779.8       -", _ADA_RTX, "NVIDIA GeForce RTX 4080"),
    ("  1008     -  82.6   82.6  165.2    165.2  330.3  660.6 1321.2       -", _ADA_RTX, "NVIDIA GeForce RTX 4090"),
    ("   960     -  56.3   56.3  112.6    112.6  225.1  450.2      -   900.4",
     _BLACKWELL_RTX, "NVIDIA GeForce RTX 5080"),
    ("  1792     - 104.8  104.8  209.5    209.5    419    838      -    1676",
     _BLACKWELL_RTX, "NVIDIA GeForce RTX 5090"),
    # AMD
    ("1228.8  11.5  46.1      -  184.6     92.3      -  184.6      -       -",
     "AMD Instinct MI100 datasheet (amd.com/en/products/accelerators/instinct/mi100.html)", "AMD Instinct MI100"),
    ("1638.4  45.3  45.3      -    181      181      -    181      -       -",
     "AMD Instinct MI210 datasheet (amd.com/en/products/accelerators/instinct/mi200/mi210.html)",
     "AMD Instinct MI210"),
    ("1638.4 47.85 47.85      -  191.5    191.5      -  191.5      -       -", _CDNA2, "AMD Instinct MI250X"),
    ("  5300 122.6 122.6  490.3  980.6    980.6 1961.2 1961.2      -       -", _CDNA3, "AMD Instinct MI300A"),
    ("  5300 163.4 163.4  653.7 1307.4   1307.4 2614.9 2614.9      -       -", _CDNA3, "AMD Instinct MI300X"),
    ("  6000 163.4 163.4  653.7 1307.4   1307.4 2614.9 2614.9      -       -", _CDNA3, "AMD Instinct MI325X"),
    ("  8000  72.1 144.2      - 2306.9   2306.9 4613.7 4613.7      -  9227.5", _CDNA4, "AMD Instinct MI350X"),
    ("  8000  78.6 157.3      - 2516.6   2516.6 5033.2 5033.2      - 10066.3", _CDNA4, "AMD Instinct MI355X"),
)
# fmt: on


def _read_table() -> dict[str, Peaks]:
    """Return the table by the names of devices."""
    found: dict[str, Peaks] = {}
    for figures, source, *names in _TABLE:
        gb_per_s, *tflops = figures.split()
        flops = {kind: float(round(float(t) * 1e12)) for kind, t in zip(_COLUMNS, tflops, strict=True) if t != "-"}
        bandwidth = float(gb_per_s) * 1e9
        found |= {
            name: Peaks(device=name, flops_per_s=flops, bandwidth_bytes_per_s=bandwidth, source=source)
            for name in names
        }
    return found


_BY_NAME = _read_table()
