"use strict";
/**
 * Memory over time: what each category holds, stacked, with steps, phases, the peak and what is reserved.
 *
 *   page.memoryCurve(element, data) -> {mark(fromUs, toUs), show()}   marks a stretch of time; brings the curve into sight
 */
(function () {
  const MIB = 1048576;
  const LARGE = 4096 * MIB; // from here on in GiB, as everywhere
  // What stays lies below what comes and goes.
  const FROM_BELOW = ["params", "os_params", "os_state", "grads", "other", "communication", "activation", "workspace"];
  const MOST_NAMED_STEPS = 14;
  const calm = window.matchMedia("(prefers-reduced-motion: reduce)");

  page.memoryCurve = function (element, data) {
    const { curve, peak } = data.memory;
    const [tick, second] = page.timeUnit(Math.max(1000, curve.end_us));
    const [size, unit] = peak.allocated_bytes >= LARGE ? [1024 * MIB, "GiB"] : [MIB, "MiB"];
    const end = curve.end_us / tick;
    const times = [...curve.time_us.map(time => time / tick), end];
    const held = sizes => [...sizes, sizes[sizes.length - 1]].map(bytes => bytes / size);
    const names = Object.keys(curve.categories).sort((a, b) => FROM_BELOW.indexOf(a) - FROM_BELOW.indexOf(b));
    let marked = null;
    let place = null;
    const label = name => `${name}: %{y:,.4~r} ${unit}<extra></extra>`;
    const traces = () => {
      const stacked = names.map(name => ({
        name: page.categoryName(name), x: times, y: held(curve.categories[name]), mode: "lines", stackgroup: "held",
        line: { shape: "hv", width: 0, color: page.color.category(name) }, fillcolor: page.color.category(name),
        hovertemplate: label(page.categoryName(name)),
      }));
      stacked.push({
        name: "allocated in all", x: times, y: held(curve.allocated_bytes), mode: "lines",
        line: { shape: "hv", width: 0.8, color: page.ink() }, hovertemplate: label("allocated"), showlegend: false,
      });
      if (curve.reserved_bytes) {
        stacked.push({
          name: "reserved", x: times, y: held(curve.reserved_bytes), mode: "lines",
          line: { shape: "hv", dash: "dash", width: 1.4, color: page.ink() }, hovertemplate: label("reserved"),
        });
      }
      stacked.push({
        name: "peak", x: [(peak.time_ns - curve.start_ns) / 1000 / tick], y: [peak.allocated_bytes / size], mode: "markers",
        marker: { symbol: "triangle-down", size: 12, color: page.ink(), line: { color: page.paper(), width: 1 } },
        hovertemplate: `peak: ${page.format.bytes(peak.allocated_bytes)}<br>${largestOwners(peak)}<extra></extra>`,
      });
      return [...stacked, ...phaseStrip(curve, end, [tick, second])];
    };
    const layout = () => ({
      height: 400,
      margin: { l: 64, r: 14, t: 34, b: 84 },
      hovermode: "x unified",
      xaxis: { title: { text: `${second} since the recording began (drag to zoom, double click to see all)`, standoff: 6 }, range: [0, end], showspikes: false },
      yaxis: { title: { text: `${unit} on ${page.plain(data.memory.device || "")}` }, rangemode: "tozero", domain: [0, 0.89], fixedrange: false, tickformat: ",~r" },
      yaxis2: { domain: [0.92, 1], showticklabels: false, showgrid: false, zeroline: false, fixedrange: true, range: [-0.5, 0.5] },
      barmode: "overlay",
      bargap: 0,
      uniformtext: { minsize: 9, mode: "hide" },
      legend: { orientation: "h", y: -0.19, yanchor: "top", traceorder: "normal" },
      shapes: shapes(curve, marked, tick),
      annotations: stepNames(curve, tick),
    });
    const ready = page.chartIn(element, traces, layout);
    ready.then(chart => { place = chart; });
    return {
      mark(fromUs, toUs) {
        marked = [fromUs / tick, toUs / tick];
        if (place) window.Plotly.relayout(place, { shapes: shapes(curve, marked, tick) });
      },
      show() { element.scrollIntoView({ block: "start", behavior: calm.matches ? "auto" : "smooth" }); },
    };
  };

  function largestOwners(peak) {
    return (peak.owners || []).slice(0, 5).map(one =>
      page.plain(`${page.categoryName(one.category)}: ${one.name || one.layer || one.op || "not known"}, ${page.format.bytes(one.bytes)}`)).join("<br>");
  }

  function shapes(curve, marked, tick) {
    const lines = curve.steps.flatMap(step => [step.start_us, step.end_us]);
    const found = [...new Set(lines)].slice(0, 400).map(time => ({
      type: "line", x0: time / tick, x1: time / tick, yref: "paper", y0: 0, y1: 1, line: { color: page.soft(), width: 1, dash: "dot" }, layer: "below",
    }));
    if (marked) {
      found.push({ type: "rect", x0: marked[0], x1: marked[1], yref: "paper", y0: 0, y1: 0.89, fillcolor: page.ink(), opacity: 0.18, line: { width: 1, color: page.ink() } });
    }
    return found;
  }

  function stepNames(curve, tick) {
    const every = Math.ceil(curve.steps.length / MOST_NAMED_STEPS) || 1;
    return curve.steps.filter((step, i) => i % every === 0).map(step => ({
      x: (step.start_us + step.end_us) / 2 / tick, yref: "paper", y: 1, yanchor: "bottom", showarrow: false, text: `step ${step.step}`, font: { size: 11, color: page.soft() },
    }));
  }

  /**
   * A line of bars above the curve: when which phase begins, until the next or the end of its step; named where there is
   * room. An optimizer's step that is open when the recording stops lasts, in the trace, until that has stopped.
   */
  function phaseStrip(curve, end, [tick, second]) {
    const starts = curve.phases;
    const until = i => {
      const next = i + 1 < starts.length ? starts[i + 1].start_us : end * tick;
      const within = curve.steps.find(step => step.start_us <= starts[i].start_us && starts[i].start_us < step.end_us);
      return within ? Math.min(next, within.end_us) : next;
    };
    const byPhase = page.grouped(starts.map((one, i) => ({ phase: one.phase, from: one.start_us / tick, to: until(i) / tick })), one => one.phase);
    return [...byPhase].filter(([phase]) => phase).map(([phase, spans]) => ({
      type: "bar", orientation: "h", yaxis: "y2", y: spans.map(() => 0), width: 1, base: spans.map(span => span.from), x: spans.map(span => span.to - span.from),
      marker: { color: page.color.phase(phase), line: { width: 0 } }, name: phase, showlegend: false, // categories have the same colours
      text: spans.map(() => phase), textposition: "inside", insidetextanchor: "middle", textangle: 0, textfont: { size: 10, color: page.inkOn(page.color.phase(phase)) },
      hovertemplate: `${phase}: from %{base:.3f} to %{x:.3f} ${second}<extra></extra>`,
    }));
  }
})();
