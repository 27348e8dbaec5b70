"""Numbers as people read them. Every text says its unit; MiB is 2^20 bytes."""

from __future__ import annotations

TIME_NAMES = {"device": "device time", "cpu": "wall time of ops"}  # what times are, by a result's `time_basis`
MIB = 1 << 20


def mebibytes(size_bytes: float | None) -> str:
    """Bytes as MiB with one decimal; None -> `"-"`."""
    return "-" if size_bytes is None else f"{size_bytes / MIB:.1f}"


def percent(part: float, whole: float) -> str:
    """`part` of `whole` with one decimal; a whole of 0 has no share: `"-"`."""
    return "-" if whole == 0 else f"{100 * part / whole:.1f}"


def file_size(size_bytes: float) -> str:
    """`"812 B"`, `"3.4 KiB"`, `"81.0 MiB"`, `"1.2 GiB"`."""
    size = float(round(size_bytes))
    if size < 1024:
        return f"{size:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1024 or unit == "GiB":
            break
    return f"{size:.1f} {unit}"
