"use strict";
/** Changes: the totals of a step on both sides, what changed otherwise than the rest, and what makes sides unlike. */
(function () {
  const COLORS = { a: "#0072B2", b: "#D55E00" };
  const MOST_BARS = 25;
  const FORMATS = { us: value => page.format.us(value), bytes: value => page.format.bytes(value), flops: value => page.format.flops(value), count: value => page.format.count(value), share: value => page.format.share(value) };

  page.signed = value => value === null || value === undefined ? undefined : `${value >= 0 ? "+" : "−"}${(100 * Math.abs(value)).toFixed(1)} %`;

  /** Said of the time of a step, the first of the totals, where other load or clock would show alike. */
  const doubt = (data, row) => row === data.comparison.totals[0] && data.comparison.confidence === "low" && ["slower", "faster"].includes(row.decision) ? " (low confidence)" : "";

  function totals(data, element) {
    const section = page.section(element, "A step, on both sides");
    const decided = row => data.decisions[data.comparison.totals.indexOf(row)] || undefined;
    page.table(section, {
      columns: [
        { key: "name", title: "Per step", kind: "text" },
        { key: "a", title: "a", kind: "text", value: row => row.a === null ? null : FORMATS[row.unit](row.a), help: data.comparison.a, missing: "not recorded on this side" },
        { key: "b", title: "b", kind: "text", value: row => row.b === null ? null : FORMATS[row.unit](row.b), help: data.comparison.b, missing: "not recorded on this side" },
        { key: "change", title: "Change", kind: "text", value: row => page.signed(row.change), help: "of b against a; times are means of the steps" },
        { key: "error", title: "±", kind: "text", value: row => row.error === null ? undefined : `${(100 * row.error).toFixed(1)} %`, help: "standard error of the change" },
        { key: "decision", title: "Decision", kind: "text", value: row => decided(row) && decided(row) + doubt(data, row) },
      ],
      rows: data.comparison.totals,
      search: false,
    });
  }

  function changedLayers(data, element) {
    const section = page.section(element, "Changed otherwise than the rest");
    page.table(section, {
      columns: [
        { key: "layer", title: "Layer", kind: "text", longest: 80, value: row => row.layer || (row.phase === "optimizer" ? "optimizer" : "code between calls") },
        { key: "phase", title: "Phase", kind: "text", value: row => !row.phase ? "all" : row.layer || row.phase !== "optimizer" ? row.phase : "" },
        { key: "change_us", title: "b − a", kind: "us", help: data.comparison.common ? `per step, beyond the ${page.signed(data.comparison.common)} that all layers have in common` : "per step" },
        { key: "change", title: "Change", kind: "text", value: row => row.change === null ? `only in ${row.change_us > 0 ? "b" : "a"}` : page.signed(row.change) },
        { key: "error", title: "±", kind: "text", value: row => row.error === null ? undefined : `${(100 * row.error).toFixed(1)} %`, help: "standard error of the change" },
        { key: "share", title: "Of all", kind: "share", value: row => row.share === null ? undefined : row.share, help: "of the change of the whole step" },
      ],
      rows: data.comparison.culprits,
      search: false,
      empty: "No layer changed otherwise than the rest by more than noise.",
    });
  }

  function work(data, element) {
    if (!data.work.length) return;
    const section = page.section(element, "Does other work");
    page.note(section, "Counted, so exact whatever the time: FLOPs, ops or device events, calls, memory kept for backward.");
    page.table(section, {
      columns: [{ key: "place", title: "Layer", kind: "text", longest: 80 }, { key: "words", title: "Per step, b against a", kind: "text", longest: 120 }],
      rows: data.work,
      search: false,
    });
  }

  function bars(data, element) {
    const rows = data.folded.filter(row => row.difference_us).slice(0, MOST_BARS).reverse();
    if (!rows.length) return;
    const section = page.section(element, "Own time of a step, where it changed most");
    const names = rows.map((row, i) => `${page.cut(row.label, 60)} ${row.phase}`.trim() + " ".repeat(i % 2));
    const trace = side => ({ type: "bar", orientation: "h", name: side, y: names, x: rows.map(row => (row[`${side}_us`] || 0) / 1000), marker: { color: COLORS[side] } });
    const layout = { barmode: "group", height: 140 + 30 * rows.length, xaxis: { title: { text: "ms per step" } }, yaxis: { automargin: true }, legend: { traceorder: "reversed" } };
    page.chartIn(section, () => [trace("b"), trace("a")], () => layout); // from below: so that a is above b
  }

  page.view({
    id: "changes",
    title: "Changes",
    order: 10,
    draw(data, element) {
      const unlike = data.comparison.differences;
      for (const one of unlike) page.note(element, `Not alike: ${one.what}: ${one.a} → ${one.b}`);
      for (const note of data.comparison.notes) page.note(element, note);
      for (const one of data.comparison.backend_changes) page.note(element, `Attention of ${one.layer}: ${one.a} → ${one.b}`);
      totals(data, element);
      changedLayers(data, element);
      work(data, element);
      bars(data, element);
      page.note(element, `a: ${data.comparison.a}`);
      page.note(element, `b: ${data.comparison.b}`);
    },
  });
})();
