"""Who holds memory at the peak as rings that open on a click: pages that need nothing but themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from profiler_wrapper.analysis.model import CATEGORIES, Analysis, MemoryCategory, MemoryUse
from profiler_wrapper.reports.describe import machine, rank_in_words, root_names
from profiler_wrapper.reports.figures import CATEGORY_COLORS, ink_on, ring_colors
from profiler_wrapper.reports.memory import MemoryNode, category_tree, layer_order, moment_in_words, walk
from profiler_wrapper.reports.page import page_template
from profiler_wrapper.reports.text import clean, shorten
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
    """Writes one of PAGES.

    Raises:
        ValueError: the analysis knows nothing of who holds memory.
    """
    path.write_bytes(page_text(analysis, page).encode())


def page_text(analysis: Analysis, page: str) -> str:
    """The HTML of one of PAGES; where nothing is held, a page that says why."""
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
    """The sectors of a page, parents before children; `layers` gives each layer its place in the model."""
    title, categories = PAGES[page]
    trees = [category_tree(use.peak_owners, category, category) for category in categories]
    root = trees[0]
    if len(trees) > 1:
        root = MemoryNode(title, total_bytes=sum(tree.total_bytes for tree in trees))
        root.count = sum(tree.count for tree in trees)
        root.children = {tree.label: tree for tree in trees if tree.total_bytes}
    root.label = title
    found: list[Sector] = []
    numbers: dict[tuple[str, ...], int] = {}
    for path, node in walk(root, layers, above=len(trees) > 1):
        numbers[path] = len(found)
        name = clean(".".join(path) or title, unicode=True)
        label = shorten(clean(node.label, unicode=True), _LONGEST_LABEL, ellipsis="…")
        parent = numbers[path[:-1]] if path else None
        found.append(Sector(parent, label, name, node.total_bytes, node.count, _phases(node)))
        if node.children and node.own_bytes:
            count = node.count - sum(child.count for child in node.children.values())
            found.append(Sector(numbers[path], "itself", f"{name} itself", node.own_bytes, count, ""))
    return found


def _phases(node: MemoryNode) -> str:
    """`"forward"`; where there are several, each with its size."""
    phases = sorted(node.phases.items(), key=lambda item: -item[1])
    if len(phases) == 1:
        return phases[0][0]
    return ", ".join(f"{phase} {size / MIB:.2f} MiB" for phase, size in phases)


def _subtitle(analysis: Analysis, use: MemoryUse) -> str:
    model = shorten(clean(root_names(analysis), unicode=True), 60)
    where = clean(machine(analysis), unicode=True)
    parts = [
        f"{model} on {where}" if model else where,
        rank_in_words(analysis),
        clean(use.device),
        f"highest allocated {moment_in_words(use)}".rstrip(),
    ]
    return ", ".join(part for part in parts if part) + ". MiB is 2^20 bytes."


def _why_empty(use: MemoryUse, page: str, categories: Sequence[MemoryCategory]) -> str:
    """Why nothing is held at the peak, and what was at other times."""
    course = sum(use.timeline.bytes_by_category[CATEGORIES.index(category)] for category in categories)
    most = int(course.max()) if len(use.timeline.time_ns) else 0
    other = f" At another moment it was up to {most / MIB:.2f} MiB: see memory.log." if most else ""
    return _WHY_EMPTY[page] + other
