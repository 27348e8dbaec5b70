"""The frame of a sunburst page: `$name` stands for what `string.Template` puts in. It loads nothing from a network."""

from __future__ import annotations

from string import Template

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
