"""Who holds memory at the peak as rings that open on a click: pages that need nothing but themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from profiler_wrapper.reports.describe import model_in_words
from profiler_wrapper.reports.figures import CATEGORY_COLORS, ink_on, ring_colors
from profiler_wrapper.reports.memory import HeldBelow, layer_order, memory_tree, moment_in_words
from profiler_wrapper.reports.page import page_template
from profiler_wrapper.reports.text import clean, shorten
from profiler_wrapper.tables.model import CATEGORIES, Analysis, MemoryCategory, MemoryUse
from profiler_wrapper.units import MIB

PAGES: Mapping[str, tuple[str, tuple[MemoryCategory, ...]]] = {
    "params": ("Parameters and buffers", ("params",)),
    "grads": ("Gradients", ("grads",)),
    "os": ("Optimizer", ("os_params", "os_state")),
    "activation": ("Activations", ("activation",)),
    "summary": ("All memory", CATEGORIES),
}
_WHY_EMPTY: Mapping[str, str] = {
    "params": "No parameter or buffer is known to have been on this device then.",
    "grads": "No gradient was held then: no backward came before, or zero_grad() had let go of them.",
    "os": "No optimizer held anything then: there is none, it had not stepped yet, or it keeps no state (plain SGD).",
    "activation": "No pass through the model held anything then.",
    "summary": "Nothing was allocated.",
}
_LONGEST_LABEL = 32


@dataclass(frozen=True)
class Sector:
    """A piece of a ring. Those whose parent it is add up to its bytes, if there are any."""

    parent: int | None  # number of the sector inside it; None in the middle
    label: str
    name: str  # in full
    size_bytes: int
    count: int  # allocations
    phases: str  # in which they were made


def write_page(analysis: Analysis, path: Path, *, page: str) -> None:
    """Write one of PAGES.

    Raises:
        ValueError: the analysis knows nothing of who holds memory.
    """
    path.write_bytes(page_text(analysis, page).encode())


def page_text(analysis: Analysis, page: str) -> str:
    """Return the HTML of one of PAGES; where nothing is held, a page that says why."""
    use = analysis.memory_use
    if use is None:
        raise ValueError("A sunburst needs an analysis with memory_use; this one has none.")
    title, categories = PAGES[page]
    rings = sectors(use, page, layer_order(analysis))
    size_bytes = rings[0].size_bytes
    known = CATEGORY_COLORS.items() if page == "summary" else ()
    fixed = {i: color for i, one in enumerate(rings) for name, color in known if (one.parent, one.name) == (0, name)}
    parents, labels, sizes = zip(*((sector.parent, sector.label, sector.size_bytes) for sector in rings), strict=True)
    colors = ring_colors(parents, labels, sizes, fixed)
    return page_template("sunburst.html").render(
        title=f"{title}: {size_bytes / MIB:.2f} MiB of {use.peak.total_bytes / MIB:.2f} MiB at the peak",
        subtitle=_subtitle(analysis, use),
        why="" if size_bytes else _why_empty(use, page, categories),
        sectors=zip(rings, colors, map(ink_on, colors), strict=True),
        whole=size_bytes,
    )


def sectors(use: MemoryUse, page: str, layers: Mapping[str, int]) -> list[Sector]:
    """Return the sectors of a page, parents before children; `layers` gives each layer its place in the model."""
    title, categories = PAGES[page]
    found: list[Sector] = []
    numbers: dict[tuple[str, ...], int] = {}
    for one in memory_tree(use.peak_owners, categories, layers):
        numbers[one.path] = len(found)
        name = clean(".".join(one.path) or title, unicode=True)
        label = shorten(clean(one.path[-1] if one.path else title, unicode=True), _LONGEST_LABEL, ellipsis="…")
        parent = numbers[one.path[:-1]] if one.path else None
        found.append(Sector(parent, label, name, one.total_bytes, one.count, _phases(one)))
        if 0 < one.own_bytes < one.total_bytes:
            found.append(Sector(numbers[one.path], "itself", f"{name} itself", one.own_bytes, one.own_count, ""))
    return found


def _phases(one: HeldBelow) -> str:
    """Return `"forward"`; where there are several, each with its size."""
    if len(one.phases) == 1:
        return next(iter(one.phases))
    return ", ".join(f"{phase} {size / MIB:.2f} MiB" for phase, size in one.phases.most_common())


def _subtitle(analysis: Analysis, use: MemoryUse) -> str:
    peak = f"highest allocated {moment_in_words(use)}".rstrip()
    return f"{model_in_words(analysis)}, {clean(use.device)}, {peak}. MiB is 2^20 bytes."


def _why_empty(use: MemoryUse, page: str, categories: Sequence[MemoryCategory]) -> str:
    """Return why nothing is held at the peak, and what was at other times."""
    course = sum(use.timeline.bytes_by_category[CATEGORIES.index(category)] for category in categories)
    most = int(course.max()) if len(use.timeline.time_ns) else 0
    other = f" At another moment it was up to {most / MIB:.2f} MiB: see memory.log." if most else ""
    return _WHY_EMPTY[page] + other
