"""Peaks as text and JSON: of one device, of the whole table, and as measured beside the maker's."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from profiler_wrapper.reports.text import clean, grid
from profiler_wrapper.tables.work.peaks import TYPES, Peaks
from profiler_wrapper.trace.measured_peaks import MeasuredPeaks
from profiler_wrapper.units import percent

_LONGEST_NAME = 26  # in the whole table; a longer one has a line of its own
_SHORT = {"float64": "fp64", "float32": "fp32", "tfloat32": "tf32", "float16": "fp16", "bfloat16": "bf16",
          "float8": "fp8", "float4": "fp4", "int8": "int8", "int4": "int4"}  # fmt: skip
_NOISY = 0.8  # a median below this share of the best


def peaks_text(device: str, peaks: Peaks | None, warning: str | None, *, width: int) -> str:
    """Return the peaks of one device as text, or what to do where none are known."""
    lines = [clean(device)]
    if peaks is not None:
        rows = [(kind, _flops(peaks.flops_per_s[kind])) for kind in TYPES if kind in peaks.flops_per_s]
        rows += [("memory", _bytes(peaks.bandwidth_bytes_per_s))]
        lines += [grid(("type", "peak"), rows), "", *_wrapped(f"Source: {clean(peaks.source)}.", width)]
        lines += ["Dense matmuls, two FLOPs for a multiply-add; float32 is without TF32."]
    if warning:
        lines += _wrapped(clean(warning[0].upper() + warning[1:]) + ".", width)
    return "\n".join(lines)


def all_peaks_text(known: Sequence[Peaks], *, width: int) -> str:
    """Return the whole table as text: dense TFLOP/s by type, GB/s, and the number of the source below."""
    sources = list(dict.fromkeys(peaks.source for peaks in known))
    rows = [
        [
            (peaks.device if len(peaks.device) <= _LONGEST_NAME else "").ljust(_LONGEST_NAME),
            *(_short_number(peaks.flops_per_s.get(kind), 1e12) for kind in TYPES),
            _short_number(peaks.bandwidth_bytes_per_s, 1e9),
            f"[{sources.index(peaks.source) + 1}]",
        ]
        for peaks in known
    ]
    header = ["TFLOP/s, dense", *(_SHORT[kind] for kind in TYPES), "GB/s", "from"]
    head, rule, *written = grid(header, rows).splitlines()
    lines = [head, rule]
    for peaks, row in zip(known, written, strict=True):
        lines += [peaks.device, row] if len(peaks.device) > _LONGEST_NAME else [row]
    note = (
        "A dash: the maker gives no figure, or there is no such type. fp32 is without TF32; fp16 and"
        " fp8 accumulate in fp32. Devices of other names have no entry: measure them with --measure."
    )
    lines += ["", *_wrapped(note, width)]
    for number, source in enumerate(sources, 1):
        lines += _wrapped(f"[{number}] {source}", width, indent="     ")
    return "\n".join(lines)


def measured_text(measured: MeasuredPeaks, maker: Peaks | None, *, width: int) -> str:
    """Return a measurement as text: the best and the median of each type, and the maker's figure where there is one."""
    ceilings = {**measured.flops, **({"copy": measured.copy} if measured.copy else {})}
    of_maker = {**maker.flops_per_s, "copy": maker.bandwidth_bytes_per_s} if maker else {}
    rows = []
    for kind, ceiling in ceilings.items():
        written, makers = _bytes if kind == "copy" else _flops, of_maker.get(kind)
        beside = (written(makers), f"{percent(ceiling.per_s, makers)} %") if makers else ("", "")
        rows.append((kind, written(ceiling.per_s), written(ceiling.median_per_s), *beside, ceiling.size))
    header = ("type", "best", "median", "maker's", "best of it", "size")
    notes = ["Square matmuls, 2 n^3 FLOPs; a copy counts the bytes that it reads and those that it writes."]
    if noisy := [kind for kind, ceiling in ceilings.items() if ceiling.median_per_s < _NOISY * ceiling.per_s]:
        notes.append(
            f"The times of {', '.join(noisy)} vary: something else may run on this machine, and the roof be higher. "
            "Measure again when it is idle."
        )
    if measured.left_out:
        notes.append(f"Not measured: {'; '.join(f'{kind} ({clean(why)})' for kind, why in measured.left_out.items())}.")
    if maker:
        notes.append(f"Maker's: {clean(maker.source)}.")
    first = clean(f"{measured.device}, measured {measured.date[:16]} UTC, torch {measured.torch}")
    wrapped = (line for note in notes for line in _wrapped(note, width))
    return "\n".join([first, grid(header, rows, left_last=True), "", *wrapped])


def _flops(per_s: float) -> str:
    """`"989.4 TFLOP/s"`, `"152.3 GFLOP/s"`."""
    return f"{per_s / 1e12:.1f} TFLOP/s" if per_s >= 1e12 else f"{per_s / 1e9:.1f} GFLOP/s"


def _bytes(per_s: float | None) -> str:
    return "-" if per_s is None else f"{per_s / 1e9:.1f} GB/s"


def _short_number(value: float | None, unit: float) -> str:
    if value is None:
        return "-"
    return f"{value / unit:.0f}" if value >= 100 * unit else f"{value / unit:.4g}"


def _wrapped(text: str, width: int, *, indent: str = "") -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent=indent, break_on_hyphens=False)
