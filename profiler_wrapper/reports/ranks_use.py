"""How much of its device each rank uses: peak memory and MFU, as bars beside the heat maps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from profiler_wrapper.analysis.ranks.model import Float, Int, RanksReport
from profiler_wrapper.reports import figures
from profiler_wrapper.reports.span_colors import CULPRIT

if TYPE_CHECKING:
    from matplotlib.axes import Axes

USE_IN = 1.9  # the height of its axes
_BAR = "#7C8794"
_GIB, _MIB = 2**30, 2**20


class Use(NamedTuple):
    """One number of each rank."""

    name: str
    unit: str
    values: Float  # (R,) in the unit; nan: not known
    is_worse: str  # "high" or "low": which of several ranks a column shows


def uses_of_ranks(report: RanksReport) -> list[Use]:
    """Peak memory and MFU, as far as any rank's is known."""
    found = []
    if report.peak_bytes is not None:
        size, unit = (_GIB, "GiB") if np.nanmax(report.peak_bytes) >= _GIB / 2 else (_MIB, "MiB")
        found.append(Use("Peak memory allocated", unit, report.peak_bytes / size, "high"))
    if report.mfu is not None:
        found.append(Use("MFU", "%", 100 * report.mfu, "low"))
    return found


def unknown_uses(report: RanksReport) -> str:
    """What is not known of them, and why; empty where all is."""
    if report.peak_unknown is not None and report.peak_unknown == report.mfu_unknown:
        return f"Peak memory and MFU are not known: {report.peak_unknown}"
    told = [("Peak memory", report.peak_unknown), ("MFU", report.mfu_unknown)]
    return "; ".join(f"{what} is not known: {why}" for what, why in told if why is not None)


def draw_use(axes: Axes, use: Use, firsts: Int, marked: Sequence[int]) -> None:
    """A bar for each column of ranks; those that hold a rank that is named are red, a line is at the median."""
    parts = np.split(use.values, firsts[1:])
    pick = np.max if use.is_worse == "high" else np.min
    heights = [float(pick(part[np.isfinite(part)])) if np.isfinite(part).any() else np.nan for part in parts]
    colors = [CULPRIT if at in set(marked) else _BAR for at in range(len(firsts))]
    axes.bar(range(len(firsts)), heights, width=0.86 if len(firsts) <= 128 else 1.0, color=colors, gid=use.name)
    middle = float(np.nanmedian(use.values))
    axes.axhline(middle, color=figures.INK, linewidth=0.9, linestyle="--")
    axes.set_xlim(-0.5, len(firsts) - 0.5)
    axes.set_ylim(0, max(1.15 * float(np.nanmax(heights)), 1e-9))
    axes.set_ylabel(use.unit, fontsize=figures.FONT_SIZE)
    axes.tick_params(labelsize=figures.FONT_SIZE - 1)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    each = int(firsts[1]) if len(firsts) > 1 else 1
    title = f"{use.name}, {use.unit}: median {middle:.3g}"
    if each > 1:
        title += f" ({each} ranks a column: the {use.is_worse}est)"
    axes.set_title(title, loc="left", fontsize=figures.FONT_SIZE + 1, fontweight="bold", pad=14)
