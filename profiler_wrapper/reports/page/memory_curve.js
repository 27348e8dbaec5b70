"use strict";
/**
 * Memory over time: what each category holds, stacked, with steps, phases, the peak and what is reserved.
 *
 *   page.memoryCurve(element, data) -> {mark(fromUs, toUs), show()}   marks a stretch of time; brings the curve into sight
 */
(function () {
  const MIB = 1048576;
  // What stays lies below what comes and goes.
  const FROM_BELOW = ["params", "os_params", "os_state", "grads", "other", "communication", "activation", "workspace"];
  const MOST_NAMED_STEPS = 14;

  page.memoryCurve = function (element, data) {
    const { curve, peak } = data.memory;
    const end = curve.end_us / 1000;
    const times = [...curve.time_us.map(time => time / 1000), end];
    const held = sizes => [...sizes, sizes[sizes.length - 1]].map(size => size / MIB);
    const names = Object.keys(curve.categories).sort((a, b) => FROM_BELOW.indexOf(a) - FROM_BELOW.indexOf(b));
    let marked = null;
    let place = null;
    const label = name => `${name}: %{y:,.1f} MiB<extra></extra>`;
    const traces = () => {
      const stacked = names.map(name => ({
        name: name.replaceAll("_", " "), x: times, y: held(curve.categories[name]), mode: "lines", stackgroup: "held",
        line: { shape: "hv", width: 0, color: page.color.category(name) }, fillcolor: page.color.category(name),
        hovertemplate: label(name.replaceAll("_", " ")),
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
      const peakMs = (peak.time_ns - curve.start_ns) / 1e6;
      stacked.push({
        name: "peak", x: [peakMs], y: [peak.allocated_bytes / MIB], mode: "markers",
        marker: { symbol: "triangle-down", size: 12, color: page.ink(), line: { color: page.paper(), width: 1 } },
        hovertemplate: `peak: %{y:,.1f} MiB<br>${largestOwners(peak)}<extra></extra>`,
      });
      return [...stacked, ...phaseStrip(curve, end)];
    };
    const layout = () => ({
      height: 400,
      margin: { l: 64, r: 14, t: 34, b: 84 },
      hovermode: "x unified",
      xaxis: { title: { text: "ms since the recording began (drag to zoom, double click to see all)", standoff: 6 }, range: [0, end], showspikes: false },
      yaxis: { title: { text: `MiB on ${page.plain(data.memory.device || "")}` }, rangemode: "tozero", domain: [0, 0.93], fixedrange: false, tickformat: ",~r" },
      yaxis2: { domain: [0.95, 1], showticklabels: false, showgrid: false, zeroline: false, fixedrange: true, range: [-0.5, 0.5] },
      barmode: "overlay",
      bargap: 0,
      legend: { orientation: "h", y: -0.19, yanchor: "top", traceorder: "normal" },
      shapes: shapes(curve, marked),
      annotations: stepNames(curve),
    });
    const ready = page.chartIn(element, traces, layout);
    ready.then(chart => { place = chart; });
    return {
      mark(fromUs, toUs) {
        marked = [fromUs / 1000, toUs / 1000];
        if (place) window.Plotly.relayout(place, { shapes: shapes(curve, marked) });
      },
      show() { element.scrollIntoView({ block: "start", behavior: "smooth" }); },
    };
  };

  function largestOwners(peak) {
    return (peak.owners || []).slice(0, 5).map(one =>
      page.plain(`${one.category}: ${one.name || one.layer || one.op || "not known"}, ${page.format.bytes(one.bytes)}`)).join("<br>");
  }

  function shapes(curve, marked) {
    const lines = curve.steps.flatMap(step => [step.start_us, step.end_us]);
    const found = [...new Set(lines)].slice(0, 400).map(time => ({
      type: "line", x0: time / 1000, x1: time / 1000, yref: "paper", y0: 0, y1: 1, line: { color: page.soft(), width: 1, dash: "dot" }, layer: "below",
    }));
    if (marked) {
      found.push({ type: "rect", x0: marked[0], x1: marked[1], yref: "paper", y0: 0, y1: 0.93, fillcolor: page.ink(), opacity: 0.18, line: { width: 1, color: page.ink() } });
    }
    return found;
  }

  function stepNames(curve) {
    const every = Math.ceil(curve.steps.length / MOST_NAMED_STEPS) || 1;
    return curve.steps.filter((step, i) => i % every === 0).map(step => ({
      x: (step.start_us + step.end_us) / 2000, yref: "paper", y: 1, yanchor: "bottom", showarrow: false, text: `step ${step.step}`, font: { size: 11, color: page.soft() },
    }));
  }

  /** A line of bars above the curve: when which phase begins, until the next. */
  function phaseStrip(curve, end) {
    const starts = curve.phases;
    const byPhase = page.grouped(starts.map((one, i) => ({
      phase: one.phase, from: one.start_us / 1000, to: i + 1 < starts.length ? starts[i + 1].start_us / 1000 : end,
    })), one => one.phase);
    return [...byPhase].filter(([phase]) => phase).map(([phase, spans]) => ({
      type: "bar", orientation: "h", yaxis: "y2", y: spans.map(() => 0), width: 1, base: spans.map(span => span.from), x: spans.map(span => span.to - span.from),
      marker: { color: page.color.phase(phase), line: { width: 0 } }, name: `phase ${phase.replaceAll("_", " ")}`,
      hovertemplate: `${phase.replaceAll("_", " ")}: from %{base:.3f} to %{x:.3f} ms<extra></extra>`,
    }));
  }
})();
