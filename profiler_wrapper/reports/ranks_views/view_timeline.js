"use strict";
/** Timeline: a lane for each rank, what it did in a few steps. */
(function () {
  const NAMES = { waiting: "waiting for others", gc: "garbage collection" };

  const largest = data => Math.max(...data.timeline.bars.map(one => one.starts_us.reduce((most, start, i) => Math.max(most, start + one.lengths_us[i]), 0)), 1);

  function nameOf(kind, data) {
    if (kind === "layer") return page.plain(data.job.layer);
    if (kind === "communication" && !data.timeline.waiting_known) return "communication, with waiting";
    return NAMES[kind] || kind;
  }

  function bars(data) {
    const [size, unit] = page.timeUnit(largest(data));
    const seen = new Set();
    const order = [...Object.keys(data.page.colors.kind), "layer"];
    const { lanes } = data.timeline;
    return data.timeline.bars.map(one => {
      const framed = one.kind === "layer";
      const name = nameOf(one.kind, data);
      const isFirst = !seen.has(one.kind);
      seen.add(one.kind);
      return {
        type: "bar", orientation: "h", name, width: 0.8,
        legendgroup: one.kind, showlegend: isFirst, legendrank: order.indexOf(one.kind),
        y: one.lanes, base: one.starts_us.map(start => start / size), x: one.lengths_us.map(length => length / size),
        customdata: one.lengths_us.map((length, i) => [page.format.us(length), lanes[one.lanes[i]]]),
        hovertemplate: `%{customdata[1]}: ${name}<br>%{customdata[0]} from %{base:.4g} ${unit}<extra></extra>`,
        marker: { color: framed ? "rgba(0,0,0,0)" : page.color.kind(one.kind), line: framed ? { color: page.culpritColor(), width: 2 } : { width: 0 } },
      };
    });
  }

  /** So many names at the left as can be read; those that are named always. */
  function ticks(lanes, named) {
    const every = Math.ceil(lanes.length / 64);
    const marked = named.slice(0, 32);
    return lanes.map((_, lane) => lane).filter(lane => marked.includes(lane) || (lane % every === 0 && (every === 1 || marked.every(one => Math.abs(one - lane) >= every))));
  }

  function layout(data) {
    const { lanes, ranks, steps, begins_us: begins } = data.timeline;
    const end = largest(data);
    const [size, unit] = page.timeUnit(end);
    const red = page.culpritColor();
    const named = ranks.map((rank, lane) => page.isNamed(rank) ? lane : -1).filter(lane => lane >= 0);
    const begun = begins.map((at, i) => [at, steps[i]]).filter(([at]) => at !== null);
    const shown = ticks(lanes, named);
    const height = lanes.length <= 12 ? Math.min(56, Math.max(28, 400 / lanes.length)) : lanes.length <= 64 ? 21 : Math.max(6, 1344 / lanes.length);
    return {
      barmode: "overlay",
      height: 100 + height * Math.max(3, lanes.length),
      margin: { l: 110, r: 12, t: 56, b: 40 },
      legend: { orientation: "h", x: 0, y: 1 + 20 / (height * Math.max(3, lanes.length)), xanchor: "left", yanchor: "bottom", bgcolor: "rgba(0,0,0,0)" },
      hovermode: "closest",
      xaxis: { ticksuffix: ` ${unit}`, zeroline: false, range: [-0.004 * end / size, 1.004 * end / size] },
      yaxis: {
        tickvals: shown, range: [lanes.length - 0.5, -0.5], fixedrange: true, showgrid: false, zeroline: false,
        ticktext: shown.map(lane => named.includes(lane) ? `<b><span style="color:${red}">${page.plain(lanes[lane])}</span></b>` : page.plain(lanes[lane])),
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
      const waits = data.timeline.waiting_known ? "Grey is waiting for others" : "Communication holds waiting for others: nothing tells them apart";
      page.note(element, `${data.timeline.drawn}. ${waits}; what is empty is in no span. Times: ${data.timeline.clocks}. Drag to zoom, double click to go back.`);
      page.chartIn(element, () => bars(data), () => layout(data));
    },
  });
})();
