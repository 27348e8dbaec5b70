"use strict";
/** Layers: every layer and phase with both sides beside one another; and like layers together. */
(function () {
  const both = (kind, key, title, help) => ["a", "b"].map(side => ({ key: `${key}_${side}`, title: `${title} ${side}`, kind, help, value: row => row[side] ? row[side][key] : undefined }));
  const RETAINED = "kept for backward, with what is inside of these layers";
  const difference = row => (row.b ? row.b.time_per_step_us : 0) - (row.a ? row.a.time_per_step_us : 0);

  page.view({
    id: "layers",
    title: "Layers",
    order: 20,
    draw(data, element) {
      page.note(element, "Time per step with everything inside the layer, in the same phase. A decision is about what goes beyond the change that all layers have in common, unless that is beyond noise itself and of a device.");
      const moved = data.comparison.time_basis === "cpu" && ["slower", "faster"].includes(data.comparison.decision);
      page.table(element, {
        columns: [
          { key: "layer", title: "Layer", kind: "text", longest: 70, value: row => row.layer || (row.phase === "optimizer" ? "optimizer" : "outside layers") },
          { key: "phase", title: "Phase", kind: "text", value: row => row.layer || row.phase !== "optimizer" ? row.phase : "" },
          ...both("us", "time_per_step_us", "Time", "per step"),
          { key: "difference", title: "b − a", kind: "us", value: difference, help: "per step" },
          { key: "change", title: "Change", kind: "text", value: row => page.signed(row.change), help: "of the mean over the steps" },
          { key: "error", title: "±", kind: "text", help: "standard error of the change", value: row => row.error === null ? undefined : `${(100 * row.error).toFixed(1)} %` },
          { key: "decision", title: "Decision", kind: "text", value: row => moved && row.decision === "no difference" ? "as the rest" : row.decision },
          ...both("flops", "flops_per_step", "FLOPs", "per step"),
          ...both("count", "calls_per_step", "Calls", "entries of the layer per step"),
          ...both("count", "self_events_per_step", "Events", "kernels (on a CPU, ops) whose innermost layer this is, per step"),
          ...both("bytes", "retained_bytes", "Retained", "kept for backward: mean over calls"),
          ...both("bytes", "peak_bytes", "Peak", "highest allocated while inside"),
          { key: "backends", title: "Attention", kind: "text", value: row => [...new Set([row.a, row.b].filter(Boolean).map(side => side.backends.join(" + ")))].filter(Boolean).join(" → ") || undefined },
        ],
        rows: data.comparison.rows,
        sort: { key: "difference", descending: true },
      });
    },
  });

  page.view({
    id: "alike",
    title: "Like layers",
    order: 30,
    draw(data, element) {
      page.note(element, "Own time of like layers together: all rows add up to the time of a step.");
      page.table(element, {
        columns: [
          { key: "label", title: "Layers", kind: "text", longest: 80 },
          { key: "phase", title: "Phase", kind: "text" },
          { key: "a_us", title: "Own time a", kind: "us", help: "per step", missing: "only in b" },
          { key: "b_us", title: "Own time b", kind: "us", help: "per step", missing: "only in a" },
          { key: "difference_us", title: "b − a", kind: "us" },
          { key: "change", title: "Change", kind: "text", value: row => row.a_us && row.b_us !== null && !data.comparison.differences.some(one => one.what === "time basis") ? page.signed(row.b_us / row.a_us - 1) : undefined },
          { key: "slower", title: "Slower", kind: "text", value: row => row.slower.length ? row.slower : undefined, longest: 60 },
          { key: "faster", title: "Faster", kind: "text", value: row => row.faster.length ? row.faster : undefined, longest: 60 },
          { key: "flops_a", title: "FLOPs a", kind: "flops" },
          { key: "flops_b", title: "FLOPs b", kind: "flops" },
          { key: "retained_a", title: "Retained a", kind: "bytes", help: RETAINED },
          { key: "retained_b", title: "Retained b", kind: "bytes", help: RETAINED },
        ],
        rows: data.folded,
      });
    },
  });
})();
