"""Who holds memory at the peak as rings that open on a click: pages that need no network.

A page reads `plotly.min.js` beside it, or, in the directory of a later window, the one of its rank.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template

from profiler_wrapper.analysis.model import CATEGORIES, Analysis, MemoryCategory, MemoryUse
from profiler_wrapper.reports.describe import machine, rank_in_words, root_names
from profiler_wrapper.reports.figures import CATEGORY_COLORS, ink_on, ring_colors
from profiler_wrapper.reports.memory import MemoryNode, category_tree, layer_order, moment_in_words, walk
from profiler_wrapper.reports.text import clean, shorten
from profiler_wrapper.units import MIB

# --------------------------------------------------------------------------------------------------
# The frame of a sunburst page: `$name` stands for what `string.Template` puts in. It loads nothing from a network.

_HEAD = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1a1a1a; --soft: #5b6168; }
@media (prefers-color-scheme: dark) { :root { --paper: #16181c; --ink: #e8e8e8; --soft: #a3a9b1; } }
html, body { height: 100%; margin: 0; background: var(--paper); color: var(--ink); }
body { display: flex; flex-direction: column; box-sizing: border-box; padding: 1rem 1.5rem; gap: 0.3rem;
       font: 15px/1.4 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.25rem; margin: 0; }
p { margin: 0; color: var(--soft); overflow-wrap: anywhere; }
#rings { flex: 1; min-height: 320px; }
</style>
</head>
<body>
<h1>$title</h1>
<p>$subtitle</p>
"""

EMPTY_PAGE = Template(
    _HEAD
    + """<p id="empty">$why</p>
</body>
</html>
"""
)

PAGE = Template(
    _HEAD
    + """<p>Click a sector to look inside it, the middle to go back. Point at one for its full name and size.</p>
<div id="rings"><noscript>The rings are drawn by JavaScript, which is off.</noscript></div>
<script type="application/json" id="sectors">$sectors</script>
<script src="$script"></script>
<script>
"use strict";
(function () {
  const place = document.getElementById("rings");
  if (!window.Plotly) {
    place.textContent = "$script was not found beside this page: keep the directory as it was written.";
    return;
  }
  const data = JSON.parse(document.getElementById("sectors").textContent);
  // Plotly reads some HTML in texts.
  const plain = text => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const inLines = text => (text.match(/.{1,80}/gsu) || [""]).map(plain).join("<br>");
  const mebibytes = bytes => (bytes / 1048576).toFixed(bytes < 1048576 ? 4 : 2);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const trace = () => ({
    type: "sunburst",
    ids: data.labels.map((_, i) => String(i)),
    parents: data.parents.map(parent => parent === null ? "" : String(parent)),
    labels: data.labels.map(plain),
    values: data.bytes,
    customdata: data.names.map((name, i) => [
      inLines(name),
      mebibytes(data.bytes[i]),
      data.counts[i],
      data.phases[i] ? "<br>allocated in " + data.phases[i] : ""
    ]),
    hovertemplate: "<b>%{customdata[0]}</b><br>%{customdata[1]} MiB (%{value:,d} bytes)"
      + "<br>%{percentRoot:.2%} of this page, %{percentParent:.2%} of the sector inside it"
      + "<br>allocations: %{customdata[2]:,d}%{customdata[3]}<extra></extra>",
    texttemplate: "%{label}<br>%{customdata[1]}",
    branchvalues: "total",
    sort: false,
    maxdepth: data.rings,
    rotation: 90,
    insidetextorientation: "radial",
    textfont: { color: data.inks },
    leaf: { opacity: 1 },
    marker: { colors: data.colors, line: { width: 1, color: dark.matches ? "#16181c" : "#ffffff" } }
  });
  const layout = () => ({
    margin: { l: 0, r: 0, t: 8, b: 0 },
    paper_bgcolor: "rgba(0,0,0,0)",
    font: { color: dark.matches ? "#e8e8e8" : "#1a1a1a" },
    hoverlabel: { align: "left", font: { size: 13 } },
    uniformtext: { minsize: 8, mode: "hide" }
  });
  const draw = () => window.Plotly.react(place, [trace()], layout(), { displaylogo: false, responsive: true });
  dark.addEventListener("change", draw);
  draw();
})();
</script>
</body>
</html>
"""
)


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
    path.write_bytes(page_text(analysis, page, script=_script_from(path.parent)).encode())


def write_script(_: Analysis, path: Path) -> None:
    """Writes plotly's own script, which all pages share."""
    from plotly.offline import get_plotlyjs

    path.write_bytes(get_plotlyjs().encode())


def _script_from(directory: Path) -> str:
    """The address of the script for a page in `directory`."""
    for place in _SCRIPT_PLACES:
        if (directory / place / SCRIPT_NAME).is_file():
            return place + SCRIPT_NAME
    return SCRIPT_NAME


def page_text(analysis: Analysis, page: str, *, script: str = SCRIPT_NAME) -> str:
    """The HTML of one of PAGES; where nothing is held, a page that says why."""
    use = analysis.memory_use
    if use is None:
        raise ValueError("A sunburst needs an analysis with memory_use; this one has none.")
    title, categories = PAGES[page]
    rings = sectors(use, page, layer_order(analysis))
    size_bytes = rings[0].size_bytes
    words = {
        "title": escape(f"{title}: {size_bytes / MIB:.2f} MiB of {use.peak.total_bytes / MIB:.2f} MiB at the peak"),
        "subtitle": escape(_subtitle(analysis, use)),
    }
    if not size_bytes:
        return EMPTY_PAGE.substitute(words, why=escape(_why_empty(use, page, categories)))
    fixed = {
        i: CATEGORY_COLORS[category]
        for i, sector in enumerate(rings)
        for category in CATEGORIES
        if page == "summary" and sector.parent == 0 and sector.name == category
    }
    return PAGE.substitute(words, script=script, sectors=_json(rings, fixed))


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
    for placed in walk(root, layers, above=len(trees) > 1):
        path, node = placed.path, placed.node
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


def _json(rings: Sequence[Sector], fixed: Mapping[int, str]) -> str:
    """The sectors by column, in a form that cannot end the element it stands in."""
    sizes = [sector.size_bytes for sector in rings]
    parents = [sector.parent for sector in rings]
    colors = ring_colors(parents, [sector.label for sector in rings], sizes, fixed)
    columns = {
        "rings": _RINGS,
        "labels": [sector.label for sector in rings],
        "parents": parents,
        "bytes": sizes,
        "names": [sector.name for sector in rings],
        "counts": [sector.count for sector in rings],
        "phases": [sector.phases for sector in rings],
        "colors": colors,
        "inks": [ink_on(color) for color in colors],
    }
    text = json.dumps(columns, separators=(",", ":"))  # ASCII
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
