"use strict";
/** Timeline: a lane for each rank, what it did in a few steps. */
(function () {
  const ORDER = ["communication", "other", "forward", "backward", "optimizer", "recompute", "data", "checkpoint", "gc", "layer"];

  function bars(data) {
    const [size, unit] = page.timeUnit(Math.max(...data.timeline.bars.map(one => one.starts_us.reduce((most, start) => Math.max(most, start), 0)), 1));
    const place = one => ORDER.indexOf(one.kind) < 0 ? 1 : ORDER.indexOf(one.kind);
    return [...data.timeline.bars].sort((a, b) => place(a) - place(b)).map(one => {
      const framed = one.kind === "layer";
      const name = framed ? page.plain(data.job.layer) : one.kind === "communication" ? "communication, with waiting" : one.kind;
      return {
        type: "bar", orientation: "h", name, width: 0.76,
        y: one.lanes, base: one.starts_us.map(start => start / size), x: one.lengths_us.map(length => length / size),
        customdata: one.lengths_us.map((length, i) => [page.format.us(length), data.timeline.lanes[one.lanes[i]]]),
        hovertemplate: `%{customdata[1]}: ${name}<br>%{customdata[0]} from %{base:.4g} ${unit}<extra></extra>`,
        marker: { color: framed ? "rgba(0,0,0,0)" : page.color.kind(one.kind), line: framed ? { color: page.culpritColor(), width: 2 } : { width: 0 } },
      };
    });
  }

  function layout(data) {
    const { lanes, ranks, steps, begins_us: begins } = data.timeline;
    const largest = Math.max(...data.timeline.bars.map(one => one.starts_us.reduce((most, start) => Math.max(most, start), 0)), 1);
    const [size, unit] = page.timeUnit(largest);
    const red = page.culpritColor();
    const named = ranks.map((rank, lane) => page.isNamed(rank) ? lane : -1).filter(lane => lane >= 0);
    const begun = begins.map((at, i) => [at, steps[i]]).filter(([at]) => at !== null);
    return {
      barmode: "overlay",
      height: 130 + 26 * Math.max(3, lanes.length),
      margin: { l: 110, r: 12, t: 28, b: 40 },
      legend: { orientation: "h", y: -0.06 - 0.8 / Math.max(3, lanes.length) },
      hovermode: "closest",
      xaxis: { ticksuffix: ` ${unit}`, zeroline: false },
      yaxis: {
        tickvals: lanes.map((_, lane) => lane), range: [lanes.length - 0.5, -0.5], fixedrange: true, showgrid: false, zeroline: false,
        ticktext: lanes.map((lane, i) => named.includes(i) ? `<b><span style="color:${red}">${page.plain(lane)}</span></b>` : page.plain(lane)),
      },
      shapes: [
        ...named.map(lane => ({ type: "rect", xref: "paper", x0: 0, x1: 1, y0: lane - 0.5, y1: lane + 0.5, fillcolor: red, opacity: 0.16, line: { width: 0 }, layer: "below" })),
        ...begun.map(([at]) => ({ type: "line", yref: "paper", y0: 0, y1: 1, x0: at / size, x1: at / size, line: { color: page.soft(), width: 1, dash: "dot" } })),
      ],
      annotations: begun.map(([at, step]) => ({ x: at / size, y: 1, yref: "paper", yanchor: "bottom", xanchor: "left", showarrow: false, text: `step ${step}` })),
    };
  }

  page.view({
    id: "timeline",
    title: "Timeline",
    order: 20,
    applies: data => data.timeline.bars.length ? null : "no span lies in the steps that would be drawn",
    draw(data, element) {
      const all = data.job.ranks.length;
      const shown = data.timeline.lanes.length;
      const which = shown < all ? `${shown} of ${page.format.count(all)} ranks, those that are named or suspected and some of each stage` : `all ${all} ranks`;
      page.note(element, `${data.timeline.steps.length} of ${data.job.steps.length} steps, ${which}. Pale is communication, most of it waiting for others; white is in no span. Drag to zoom, double click to go back.`);
      page.chartIn(element, () => bars(data), () => layout(data));
    },
  });
})();
