"""Who holds memory at the peak as rings that open on a click: pages that need no network.

A page reads `plotly.min.js` beside it, or, in the directory of a later window, the one of its rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from markupsafe import Markup

from profiler_wrapper.analysis.model import CATEGORIES, Analysis, MemoryCategory, MemoryUse
from profiler_wrapper.reports.describe import machine, rank_in_words, root_names
from profiler_wrapper.reports.figures import CATEGORY_COLORS, ink_on, ring_colors
from profiler_wrapper.reports.memory import MemoryNode, category_tree, layer_order, moment_in_words, walk
from profiler_wrapper.reports.page import page_template, script_json
from profiler_wrapper.reports.text import clean, shorten
from profiler_wrapper.units import MIB

SCRIPT_NAME = "plotly.min.js"
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
_RINGS = 6  # at once; a click shows those further out
_LONGEST_LABEL = 32
_SCRIPT_PLACES = ("", "../../memory/")


@dataclass(frozen=True)
class Sector:
    """A piece of a ring. Its bytes are its own and those of the sectors whose parent it is."""

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
    scripts = (place + SCRIPT_NAME for place in _SCRIPT_PLACES)
    there = next((script for script in scripts if (path.parent / script).is_file()), SCRIPT_NAME)
    path.write_bytes(page_text(analysis, page, script=there).encode())


def write_script(_: Analysis, path: Path) -> None:
    """Writes plotly's own script, which all pages share."""
    from plotly.offline import get_plotlyjs

    path.write_bytes(get_plotlyjs().encode())


def page_text(analysis: Analysis, page: str, *, script: str = SCRIPT_NAME) -> str:
    """The HTML of one of PAGES; where nothing is held, a page that says why."""
    use = analysis.memory_use
    if use is None:
        raise ValueError("A sunburst needs an analysis with memory_use; this one has none.")
    title, categories = PAGES[page]
    rings = sectors(use, page, layer_order(analysis))
    size_bytes = rings[0].size_bytes
    fixed = {
        i: CATEGORY_COLORS[category]
        for i, sector in enumerate(rings)
        for category in CATEGORIES
        if page == "summary" and sector.parent == 0 and sector.name == category
    }
    return page_template("sunburst.html").render(
        title=f"{title}: {size_bytes / MIB:.2f} MiB of {use.peak.total_bytes / MIB:.2f} MiB at the peak",
        subtitle=_subtitle(analysis, use),
        why="" if size_bytes else _why_empty(use, page, categories),
        script=script,
        sectors=_json(rings, fixed) if size_bytes else "",
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


def _json(rings: Sequence[Sector], fixed: Mapping[int, str]) -> Markup:
    """The sectors by column, in a form that cannot end the element it stands in."""
    parents, labels, names, sizes, counts, phases = zip(*map(astuple, rings), strict=True)
    colors = ring_colors(parents, labels, sizes, fixed)
    columns = {"labels": labels, "parents": parents, "bytes": sizes, "names": names, "counts": counts, "phases": phases}
    return Markup(
        script_json({"rings": _RINGS, **columns, "colors": colors, "inks": [ink_on(color) for color in colors]})
    )
