"use strict";
/** Roofline: how fast each part of the model works, against the most that the device can do. */
(function () {
  const MARKERS = { forward: "circle", prefill: "circle", decode: "diamond", verify: "diamond", backward: "square", recompute: "triangle-up" };
  const LONGEST_NAME = 34;
  const FILLED = new Set(["forward", "prefill", "decode", "verify"]);

  page.view({
    id: "roofline",
    title: "Roofline",
    order: 100,
    applies(data) {
      const what = (data.views || {}).roofline;
      if (!what) return "the roofline is not in this page";
      if (what.failed) return null;
      return what.points.some(isKnown) || data.utilization ? null : page.whyNot("FLOPs", "no part of the model has FLOPs and bytes that are known: record a step with shapes");
    },
    draw(data, element) {
      const what = data.views.roofline;
      if (what.failed) throw new Error(what.failed);
      drawUse(element, data, what);
      const drawn = what.points.filter(isKnown);
      if (drawn.length) {
        const section = page.section(element, "How fast each part works (like layers together; the larger, the more time)");
        drawRoofs(section, what, drawn);
        page.note(section, "Shapes stand for phases (circle forward, square backward, triangle recompute, diamond decode), colours for kinds:");
        page.legend(section, [...new Set(drawn.map(point => what.colors[point.kind] ? point.kind : "other"))].map(kind => [kind, what.colors[kind] || what.other]));
      } else page.note(element, page.whyNot("FLOPs", "no part of the model has both FLOPs and bytes that are known"));
      if (what.how) page.add(element, page.text("p", what.how, "notice"));
      if (what.not_shown) page.note(element, what.not_shown);
      drawTable(element, what, data);
    },
  });

  const isKnown = point => point.flops_per_byte !== null && point.flops_per_s !== null;

  function drawUse(element, data, what) {
    const use = data.utilization;
    const figures = page.element("div", "figures");
    const why = page.whyNot("FLOPs", "shapes were not recorded");
    const hasPeak = Object.keys(what.flops_per_s).length > 0;
    const noPeak = use && !hasPeak ? "what this device can do is not known" : page.why("MFU", "not available") || why;
    const value = (key, format) => use && use[key] !== null && use[key] !== undefined ? format(use[key]) : null;
    const causal = (key, format) => {
      const [all, rest] = [use && use[key], use && use[`causal_${key}`]];
      return !rest || rest === all ? "" : `${format(rest)} without what a causal mask hides`;
    };
    page.figure(figures, { label: "MFU", value: value("mfu", page.format.share), missing: noPeak, help: causal("mfu", page.format.share) });
    page.figure(figures, { label: "HFU", value: value("hfu", page.format.share), missing: noPeak, help: use && use.hfu !== null ? "with what is computed again" : "" });
    page.figure(figures, { label: "Model FLOPs, a step", value: value("model_flops_per_step", page.format.flops), missing: why, help: causal("model_flops_per_step", page.format.flops) });
    page.figure(figures, { label: "Hardware FLOPs, a step", value: value("hardware_flops_per_step", page.format.flops), missing: why, help: causal("hardware_flops_per_step", page.format.flops) });
    page.figure(figures, { label: "Step, end to end", value: value("step_time_us", page.format.us), missing: why, help: "mean over the steps" });
    const peaks = use && use.peaks;
    page.figure(figures, {
      label: "Peak of the device", value: peaks && hasPeak ? Object.entries(what.flops_per_s).map(([dtype, peak]) => `${page.format.flop_rate(peak)} ${dtype}`.trim()).join(", ") : null,
      missing: noPeak, help: what.bytes_per_s ? page.format.bandwidth(what.bytes_per_s) : "",
    });
    element.append(figures);
    if (peaks && peaks.source) page.note(element, `The peak is that of ${peaks.source}${use.devices > 1 ? `, for each of ${use.devices} devices` : ""}. MFU leaves out what is computed again; HFU counts it.`);
  }

  function limits(what, drawn) {
    const across = drawn.map(point => point.flops_per_byte);
    const up = drawn.map(point => point.flops_per_s);
    const peaks = Object.values(what.flops_per_s);
    if (what.bytes_per_s) across.push(...peaks.map(peak => peak / what.bytes_per_s));
    up.push(...peaks);
    return { left: Math.min(...across) / 4, right: Math.max(...across) * 6, low: Math.min(...up) / 4, high: Math.max(...up) * 2.5 };
  }

  /** Names beside points, right of them or left, the longest parts first; what finds no room has its name in its tooltip. */
  function named(drawn, { left, right, low, high }) {
    const place = point => [Math.log(point.flops_per_byte / left) / Math.log(right / left), Math.log(point.flops_per_s / low) / Math.log(high / low)];
    const boxes = drawn.map(point => { const [x, y] = place(point); return [x - 0.008, x + 0.008, y - 0.025, y + 0.025]; });
    const kept = [];
    drawn.forEach((point, i) => {
      const [x, y] = place(point);
      const near = other => Math.abs(x - place(other)[0]) < 0.04 && Math.abs(y - place(other)[1]) < 0.06;
      if (kept.some(one => one.point.name === point.name && near(one.point))) return;
      const width = 0.03 + 0.005 * Math.min(LONGEST_NAME, point.name.length);
      for (const side of [1, -1]) {
        const box = side > 0 ? [x + 0.012, x + width, y - 0.02, y + 0.02] : [x - width, x - 0.012, y - 0.02, y + 0.02];
        if (box[0] < 0 || box[1] > 1 || boxes.some((other, k) => k !== i && box[0] < other[1] && other[0] < box[1] && box[2] < other[3] && other[2] < box[3])) continue;
        boxes.push(box);
        kept.push({ point, side });
        return;
      }
    });
    return kept;
  }

  function drawRoofs(section, what, drawn) {
    const { left, right, low, high } = limits(what, drawn);
    const longest = Math.max(...drawn.map(point => point.time_us));
    const color = point => what.colors[point.kind] || what.other;
    const points = () => ({
      type: "scatter", mode: "markers", showlegend: false,
      x: drawn.map(point => point.flops_per_byte), y: drawn.map(point => point.flops_per_s),
      marker: {
        symbol: drawn.map(point => MARKERS[point.phase] || "x"),
        size: drawn.map(point => Math.max(8, 32 * Math.sqrt(point.time_us / longest))),
        color: drawn.map(point => FILLED.has(point.phase) ? color(point) : page.paper()),
        line: { color: drawn.map(color), width: 2 }, opacity: 0.9,
      },
      hovertemplate: drawn.map(point => [
        `<b>${page.plain(point.name)}</b>, ${page.plain(point.phase)}`,
        `${page.format.us(point.time_us)} ${page.per()}, ${page.format.flop_rate(point.flops_per_s)}`,
        `${page.format.number(point.flops_per_byte)} FLOPs a byte`,
        point.of_roof === null ? "" : `${page.format.share(point.of_roof)} of the roof${point.bound ? `, bound by ${point.bound}` : ""}`,
      ].filter(Boolean).join("<br>") + "<extra></extra>"),
    });
    const roofs = () => Object.entries(what.flops_per_s).map(([dtype, peak]) => {
      const ridge = what.bytes_per_s ? peak / what.bytes_per_s : left;
      const start = what.bytes_per_s ? Math.max(left, low / what.bytes_per_s) : left;
      return {
        type: "scatter", mode: "lines", showlegend: false, hoverinfo: "skip", line: { color: page.ink(), width: 1.6 },
        x: ridge > left ? [start, ridge, right] : [left, right], y: ridge > left ? [start * what.bytes_per_s, peak, peak] : [peak, peak],
        name: dtype,
      };
    });
    const names = () => [
      ...Object.entries(what.flops_per_s).map(([dtype, peak]) => ({
        x: Math.log10(right), y: Math.log10(peak), xanchor: "right", yanchor: "bottom", showarrow: false, text: page.plain(`${page.format.flop_rate(peak)} ${dtype}`.trim()), font: { size: 11, color: page.ink() },
      })),
      ...named(drawn, { left, right, low, high }).map(({ point, side }) => ({
        x: Math.log10(point.flops_per_byte), y: Math.log10(point.flops_per_s), showarrow: false,
        xanchor: side > 0 ? "left" : "right", xshift: side * (6 + 16 * Math.sqrt(point.time_us / longest)),
        text: page.plain(page.cut(point.name, LONGEST_NAME)), font: { size: 10, color: page.soft() },
      })),
    ];
    page.chartIn(section, () => [...roofs(), points()], () => ({
      height: 430,
      margin: { l: 70, r: 14, t: 10, b: 46 },
      hovermode: "closest",
      xaxis: { type: "log", range: [Math.log10(left), Math.log10(right)], title: { text: "FLOPs per byte moved (each input of an op read once, each output written once)" }, tickformat: "~r", dtick: 1 },
      yaxis: { type: "log", range: [Math.log10(low), Math.log10(high)], title: { text: "FLOP/s" }, tickformat: "~s", dtick: 1 },
      annotations: names(),
    }));
  }

  function drawTable(element, what, data) {
    const section = page.section(element, "Parts of the model, against their roof");
    page.note(section, `Times are ${page.per()}. What a causal mask hides is left out of the FLOPs. At the roof: per op the longer of its bytes and its FLOPs at the device's peak.`);
    const known = what.points.some(point => point.roof_us !== null);
    page.table(section, {
      columns: [
        { key: "name", title: "Part", kind: "text", longest: 60 },
        { key: "kind", title: "Kind", kind: "text", cell: page.markCell("kind", kind => what.colors[kind] || what.other) },
        page.columns.phase(),
        { key: "time_us", title: "Time", kind: "us" },
        { key: "time_share", title: "Share", kind: "share", bar: true, help: "of all time", value: row => what.total_us ? row.time_us / what.total_us : null },
        ...(known ? [{ key: "roof_us", title: "At the roof", kind: "us", missing: row => row.why },
        { key: "of_roof", title: "Of the roof", kind: "share", help: "time at the roof over time: 100 % is as fast as the device can; over it: what is in a cache needs no memory", missing: row => row.why || "not known" },
        { key: "bound", title: "Bound by", kind: "text", missing: row => row.why || "not known" }] : []),
        { key: "flops_per_s", title: "Rate", kind: "flop_rate", missing: "its FLOPs are not known" },
        { key: "flops_per_byte", title: "FLOPs a byte", kind: "number", missing: "its FLOPs or bytes are not known" },
        { key: "flops", title: "FLOPs", kind: "flops", missing: "its FLOPs are not known" },
        { key: "bytes_moved", title: "Bytes moved", kind: "bytes", missing: "its bytes are not known" },
      ],
      spare: ["flops_per_byte", "roof_us"],
      rows: what.points,
      sort: { key: "time_us", descending: true },
      limit: 100,
    });
  }
})();
