"use strict";
/** The icicle of layers: by time, FLOPs or retained memory, of one phase or all; drawn when it comes into sight. */
(function () {
  const MEASURES = {
    time: { title: "Time", format: page.format.us, value: (row, phase) => phase === "all" ? row.time : row[phase] || 0 },
    flops: { title: "FLOPs", format: page.format.flops, value: (row, phase, work) => phase === "all" ? row.flops : work(row.layer, phase) },
    retained: { title: "Retained memory", format: page.format.bytes, value: row => row.retained },
  };
  const DEPTH = 5;
  const PATH_BAR = 22; // pixels: where one is, once inside a field
  const LEVEL = 46; // pixels: room for two lines
  const WIDE = 0.05; // of all: a field that has room for its value beside its name

  /**
   * @param {(layer: string) => void} onClick shows the row of a layer
   */
  page.icicle = function (data, element, onClick) {
    const state = { measure: "time", phase: "all" };
    const whole = page.layerRows(data, { own: false });
    const scale = data.page.work_scale || 0; // 0: work cannot stand beside the times
    const flops = new Map(data.layers.map(row => [`${row.phase} ${row.layer}`, scale * row.flops_per_step]));
    const work = (layer, phase) => flops.get(`${phase} ${layer}`);
    const isThere = id => [...whole.layers.values()].some(row => MEASURES[id].value(row, "all") > 0);
    const measures = Object.keys(MEASURES).filter(isThere);
    if (!measures.length) return; // no layer has any
    const section = page.section(element, "Icicle: each layer as wide as its share");
    const phases = ["all", ...data.page.phases.filter(phase => [...whole.layers.values()].some(row => row[phase] > 0))];
    const tools = page.element("div", "tools");
    section.append(tools);
    const place = page.element("div", "icicle");
    const note = page.element("p", "note", `Times and FLOPs ${page.per()}. Click a field to look inside it and to select its row in the table above; click the top to go back.`);
    let drawn = null;
    const redraw = () => { if (drawn) window.Plotly.react(drawn, traces(), layout(), { displayModeBar: false, responsive: true }); };
    page.segments(tools, measures.map(id => [id, MEASURES[id].title]), "time", id => { state.measure = id; redraw(); });
    page.segments(tools, phases.map(phase => [phase, phase === "all" ? "all phases" : phase]), "all", phase => { state.phase = phase; redraw(); });
    section.append(note, place);
    const kinds = [...new Set([...whole.layers.values()].map(row => row.kind))].filter(Boolean);
    page.legend(section, kinds.map(kind => [kind, fill({ kind })]));

    const phaseShown = () => state.measure === "retained" ? "all" : state.phase; // what forward keeps has no other phase
    const traces = () => [icicleTrace(whole, MEASURES[state.measure], phaseShown(), work)];
    const levels = Math.min(DEPTH, depthOf(whole));
    const layout = () => ({ height: PATH_BAR + levels * LEVEL + 8, margin: { l: 0, r: 0, t: 4, b: 4 }, paper_bgcolor: "rgba(0,0,0,0)", font: { color: page.ink() }, uniformtext: { minsize: 11, mode: "hide" } });
    const watcher = new IntersectionObserver(async entries => {
      if (!entries.some(entry => entry.isIntersecting)) return;
      watcher.disconnect();
      drawn = await page.chart(place, traces, layout, { displayModeBar: false });
      drawn.on("plotly_click", event => {
        const layer = event.points[0].id;
        if (!whole.layers.has(layer)) return;
        onClick(layer);
        note.replaceChildren(page.link("layers", layer, layer), " is selected in the table above.");
      });
    });
    watcher.observe(place);
  };

  const LIGHT = "#c9c9c9"; // for kinds without a colour: large fields, on which names are read
  const fill = row => row.kind && row.kind !== "other" ? page.color.kind(row.kind) : LIGHT;

  /** What stands on a field: the name below its parent, of numbered ones the number. */
  function labelOf(row) {
    const below = row.above && row.layer.startsWith(row.above + ".") ? row.layer.slice(row.above.length + 1) : row.layer;
    const number = /[._](\d+)$/.exec(below);
    return page.plain(number ? number[1] : below);
  }

  /** How many levels of fields there are, that of all layers among them. */
  function depthOf(rows) {
    const entries = [...rows.layers.values()];
    const depths = new Map();
    const depth = row => {
      if (!depths.has(row.id)) depths.set(row.id, 1).set(row.id, rows.layers.has(row.above) ? 1 + depth(rows.layers.get(row.above)) : 1);
      return depths.get(row.id);
    };
    const roots = entries.filter(row => !rows.layers.has(row.above)).length;
    return entries.reduce((most, row) => Math.max(most, depth(row)), 1) + (roots > 1 ? 1 : 0);
  }

  /** Fields hold what is their own; those inside them the rest, so that sums fit. A shared layer has all its calls in its parent. */
  function icicleTrace(rows, measure, phase, work) {
    const entries = [...rows.layers.values()];
    const size = row => Math.max(0, measure.value(row, phase, work) || 0);
    const below = new Map();
    for (const row of entries) if (row.above) below.set(row.above, (below.get(row.above) || 0) + size(row));
    const shown = entries.filter(row => size(row) > 0);
    const known = new Set(shown.map(row => row.id));
    const top = "\u0000all";
    const roots = shown.filter(row => !known.has(row.above));
    const all = roots.reduce((sum, row) => sum + size(row), 0);
    const hasTop = roots.length > 1; // the one root is all layers itself
    const first = value => hasTop ? [value] : [];
    return {
      type: "icicle",
      ids: [...first(top), ...shown.map(row => row.id)],
      labels: [...first(phase === "all" ? "all layers" : page.plain(phase)), ...shown.map(labelOf)],
      parents: [...first(""), ...shown.map(row => known.has(row.above) ? row.above : hasTop ? top : "")],
      values: [...first(0), ...shown.map(row => Math.max(0, size(row) - (below.get(row.id) || 0)))],
      customdata: [...first([measure.format(all), "", ""]), ...shown.map(row => [measure.format(size(row)), page.plain(row.layer), page.plain(row.class_name)])],
      branchvalues: "remainder",
      maxdepth: DEPTH,
      sort: false,
      tiling: { orientation: "v", pad: 1 },
      text: [...first(measure.format(all)), ...shown.map(row => size(row) > WIDE * all ? measure.format(size(row)) : "")],
      textinfo: "label+text",
      textfont: { size: 12, color: [...first(page.ink()), ...shown.map(row => page.inkOn(fill(row)))] },
      leaf: { opacity: 1 },
      hovertemplate: "<b>%{customdata[1]}</b> %{customdata[2]}<br>%{customdata[0]}, %{percentRoot:.1%} of all<extra></extra>",
      marker: { colors: [...first("rgba(128,128,128,0.25)"), ...shown.map(fill)], line: { width: 1, color: page.paper() } },
      pathbar: { visible: true, thickness: PATH_BAR },
    };
  }
})();
