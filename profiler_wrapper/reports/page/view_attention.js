"use strict";
/** Attention: which implementation ran in which layer and phase, and what it was called with. */
(function () {
  const COLORS = { flash: "#009E73", cudnn: "#0072B2", mem_efficient: "#56B4E9", flex: "#CC79A7", external: "#7B6FD0", math: "#D55E00" };
  const HELP = {
    flash: "FlashAttention in torch",
    cudnn: "cuDNN's fused attention",
    mem_efficient: "memory-efficient attention in torch",
    flex: "FlexAttention",
    external: "a library's own: flash-attn, xFormers, Transformer Engine",
    math: "not fused: all scores are written to memory",
  };
  const color = name => COLORS[name] || "#999999";

  page.view({
    id: "attention",
    title: "Attention",
    order: 60,
    applies: data => data.attention.length || data.attention_calls.length || findings(data).length ? null : "no attention was found: no op or kernel of scaled-dot-product attention ran",
    draw(data, element) {
      const other = page.attentionElsewhere(data);
      const elsewhere = other ? [{ layer: null, phase: null, backend: other.reason, time_us: other.time_us, kernels: [] }] : [];
      const rows = [...data.attention, ...elsewhere];
      const total = data.time.total_us;
      const fallback = findings(data);
      if (!rows.length && !data.attention_calls.length) {
        drawUnfused(element, data, fallback);
        return;
      }
      const parts = [...page.grouped(rows, row => row.backend)].map(([name, group]) => ({ name, value: page.perStep(page.sum(group, "time_us")), color: color(name), help: HELP[name] }));
      page.shares(element, { title: `Time in attention, ${page.per()}: ${page.format.us(page.perStep(page.sum(rows, "time_us")))}, ${page.format.share(total ? (page.sum(rows, "time_us") || 0) / total : null)} of all`, parts, format: page.format.us });
      for (const finding of fallback) page.add(element, page.text("p", sentences([finding.title, ...(finding.evidence || []), finding.fix]), "notice"));
      const section = page.section(element, "By layer and phase");
      const phases = [...page.grouped(rows, row => `${row.backend} ${row.phase}`).values()].map(group => ({
        ...group[0], layer: group[0].layer === null ? null : page.inOrder(group.map(row => row.layer)), time_us: page.sum(group, "time_us"), kernels: page.first(group.map(row => row.kernels), 5),
      }));
      const options = { layer: rows, phase: phases };
      const choice = page.segments(null, [["phase", "By phase"], ["layer", "By layer and phase"]], "phase", id => table.update({ rows: options[id] }));
      const table = page.table(section, {
        columns: [
          page.columns.layers("layer", "Layer"),
          page.columns.phase(),
          { key: "backend", title: "Backend", kind: "text", cell: (row, cell) => { cell.title = HELP[row.backend] || ""; cell.append(page.marked(row.backend, color(row.backend))); return true; } },
          page.columns.time("time_us", "Time", page.per()),
          page.columns.share("time_us", "Share", "of all time", total),
          { key: "kernels", title: data.time_basis === "cpu" ? "Ops" : "Kernels", kind: "text", longest: 90, help: "the most expensive first" },
        ],
        rows: phases,
        sort: { key: "time_us", descending: true },
        limit: 100,
        tools: [choice],
      });
      drawCalls(element, data);
    },
  });

  /** Code at the end keeps its letters as they are. */
  const sentences = texts => texts.filter(Boolean).map(text => /^[a-z]+[ ,:]/.test(text) ? text[0].toUpperCase() + text.slice(1) : text).join(". ");
  const findings = data => ((data.summary && data.summary.findings) || []).filter(finding => finding.id === "attention-fallback");

  /** Attention that is made of single ops: no fused one ran, so its layers are shown. */
  function drawUnfused(element, data, found) {
    for (const finding of found) page.add(element, page.text("p", sentences(["Attention runs as single ops (eager): no fused attention ran", finding.title, ...(finding.evidence || []), finding.fix]), "notice"));
    const rows = data.layers.filter(row => row.kind === "attention" && row.time_us > 0);
    if (!rows.length) return;
    const total = data.time.total_us;
    const section = page.section(element, "Layers of attention");
    page.note(section, `All that they do, projections included, ${page.per()}.`);
    page.table(section, {
      columns: [
        page.columns.layers("layer", "Layer"),
        page.columns.phase(),
        page.columns.time("time_us", "Time", `${page.per()}, with the layers below`),
        page.columns.time("self_time_us", "Own", "without the layers below: without projections, where those are layers", { like: "time_us" }),
        page.columns.share("time_us", "Share", "of all time", total),
      ],
      rows, sort: { key: "time_us", descending: true }, limit: 100,
    });
  }

  const callKey = row => JSON.stringify([row.layer, row.phase, row.backend]);

  function drawCalls(element, data) {
    const section = page.section(element, "Calls");
    const { rows, per } = page.shaped(data, data.attention_calls);
    if (!rows.length) {
      page.note(section, "What attention was called with is not known: record a step with shapes (record_shapes, which the warm-up steps have by default).");
      return;
    }
    page.note(section, `Calls with equal inputs, ${per}. Shapes are (batch, heads, tokens, head_dim). ` + (page.shapesAreTimed(data) ? ""
      : "The time is that of the timed steps, as above, divided among the calls as in the steps with shapes; those are warm-up steps, and slower."));
    const timeOf = page.grouped(data.attention, callKey);
    const calls = page.timed(rows, callKey, key => timeOf.has(key) ? page.meanStep(page.sum(timeOf.get(key), "time_us")) : null);
    const yesNo = (key, title, help) => ({ key, title, kind: "text", help, missing: page.UNKNOWN_IN_TRACE, value: row => row[key] === null || row[key] === undefined ? null : row[key] ? "yes" : "no" });
    const layers = row => row.layers;
    const alike = [...page.grouped(calls, row => JSON.stringify([row.phase, row.backend, row.dtype, row.query_shape, row.key_shape, row.mask, row.causal, row.dropout, row.grouped])).values()].map(group => ({
      ...group[0], layers: page.inOrder(group.map(row => row.layer)), calls_per_step: page.sum(group, "calls_per_step"), time_per_step_us: page.sum(group, "time_per_step_us"),
      timed_us: group.every(row => row.timed_us !== null) ? page.sum(group, "timed_us") : null,
    }));
    page.table(section, {
      columns: [
        { ...page.columns.layers("layers", "Layers"), value: layers },
        page.columns.phase(),
        { key: "backend", title: "Backend", kind: "text", cell: (row, cell) => { cell.title = HELP[row.backend] || ""; cell.append(page.marked(row.backend, color(row.backend))); return true; } },
        { key: "dtype", title: "Type", kind: "text", missing: page.UNKNOWN_IN_TRACE, value: row => row.dtype || null },
        { key: "query_shape", title: "Query", kind: "text", value: row => row.query_shape.join("×") },
        { key: "key_shape", title: "Key", kind: "text", value: row => row.key_shape.join("×") },
        yesNo("mask", "Mask", "a tensor was given as mask"),
        yesNo("causal", "Causal"),
        { key: "dropout", title: "Dropout", kind: "number", missing: page.UNKNOWN_IN_TRACE },
        yesNo("grouped", "Grouped", "fewer heads of keys than of queries"),
        { key: "calls_per_step", title: "Calls", kind: "count", help: per },
        ...page.timedColumns(data, alike, per),
      ],
      rows: alike,
      sort: { key: page.timedColumns(data, alike, per)[0].key, descending: true },
      limit: 100,
    });
  }
})();
