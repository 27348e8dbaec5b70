"""Numbers and names as advice says them."""

from __future__ import annotations

from collections.abc import Iterable

from profiler_wrapper.analysis.advice.folded_names import fold_names
from profiler_wrapper.units import file_size

_MOST_NAMES = 2


def duration(time_ns: float) -> str:
    """`"1.23 s"`, `"41.3 ms"`, `"812 µs"`: three digits."""
    for unit, size in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if abs(time_ns) >= size * 0.9995:
            value = time_ns / size
            return f"{value:.{2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0}f} {unit}"
    return f"{time_ns:.0f} ns"


def share(part: float) -> str:
    """0.62 -> `"62 %"`; below one in ten with a decimal, and never 0 or 100 for what is not."""
    if 0 < part < 0.0005:
        return "under 0.1 %"
    if 0.995 <= part < 1:
        return "over 99 %"
    return f"{100 * part:.0f} %" if part >= 0.0995 or part == 0 else f"{100 * part:.1f} %"


def size(size_bytes: float) -> str:
    """Bytes in binary units: `"3.4 MiB"`."""
    return file_size(round(size_bytes))


def count(number: float, noun: str, plural: str = "") -> str:
    """`"1 call"`, `"32 calls"`, `"2.5 calls"`; `plural`: where it does not end in "s" alone."""
    text = f"{number:.0f}" if number == round(number) or number >= 100 else f"{number:.1f}"
    return f"{text} {noun}" if text == "1" else f"{text} {plural or noun + 's'}"


def where(layers: Iterable[str]) -> str:
    """Layers in a few words: `model.layers.{0..31}.mlp`; "code outside of all layers" for ""."""
    folded = [name or "code outside of all layers" for name in fold_names(layers)]
    more = len(folded) - _MOST_NAMES
    return ", ".join(folded[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
