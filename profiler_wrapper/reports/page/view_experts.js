"use strict";
/** Experts: tokens, time and FLOPs of each, what computes them, what runs beside them; adapters beside their base. */
(function () {
  page.view({
    id: "experts",
    title: "Experts",
    order: 95,
    applies: data => data.expert_layers.length || data.adapters.length ? null : "the model has no mixture of experts and no adapters, as far as its layers and kernels tell",
    draw(data, element) {
      if (data.expert_layers.length) drawLayers(data, element);
      if (data.experts.length) drawExperts(data, element);
      if (data.adapters.length) drawAdapters(data, element);
    },
  });

  const layer = { ...page.columns.layers("layer", "Layer"), help: "A click shows the layer" };

  function drawLayers(data, element) {
    const rows = data.expert_layers;
    const time = (key, title, help) => page.columns.time(key, title, `${help}, ${page.per()}`, { missing: "there is none with a row of its own" });
    page.note(element, "Where a kernel computes all experts of a layer at once, nothing tells the time of one of them.");
    page.table(element, {
      columns: [
        layer,
        { key: "method", title: "Computed by", kind: "text", help: "modules: one each; loop: over stacked weights; else the grouped or fused kernel" },
        { key: "experts", title: "Experts", kind: "count", help: "of this rank" },
        { key: "tokens_per_step", title: "Tokens", kind: "count", help: "each counts once for each expert that it goes to; of steps with shapes, each", missing: "not known" },
        { key: "balance", title: "Busiest / mean", kind: "count", help: "tokens of the busiest expert over the mean of all, in the mean over steps", missing: "not known" },
        time("experts_time_us", "Experts' time", "without shared experts"),
        time("router_time_us", "Router", "of the router"),
        time("shared_time_us", "Shared", "of experts that all tokens go through"),
        time("all_to_all_time_us", "All-to-all", "in and beside the experts"),
        { key: "tokens_unknown", title: "Why tokens are not known", kind: "text", longest: 80, shrinks: true, value: row => row.tokens_unknown || undefined },
      ],
      rows,
      sort: { key: "experts_time_us", descending: true },
      limit: 200,
    });
  }

  function drawExperts(data, element) {
    page.note(element, "Each expert, in the steps with shapes: forward, recompute and backward.");
    page.table(element, {
      columns: [
        layer,
        { key: "expert", title: "Expert", kind: "count" },
        { key: "tokens_per_step", title: "Tokens", kind: "count", help: "a step", missing: "not known" },
        { key: "share", title: "Share", kind: "share", bar: true, help: "of the tokens of all experts of the layer", missing: "not known" },
        { key: "time_per_step_us", title: "Time", kind: "us", help: "a step", missing: "one kernel works for several experts" },
        { key: "flops_per_step", title: "FLOPs", kind: "flops", help: "a step", missing: "not known" },
      ],
      rows: data.experts,
      sort: { key: "share", descending: true },
      limit: 200,
    });
  }

  function drawAdapters(data, element) {
    page.note(element, "Adapters (LoRA and others) beside the layers that they adapt: forward, recompute and backward.");
    page.table(element, {
      columns: [
        layer,
        page.columns.time("base_time_us", "Base", `of what is adapted, ${page.per()}`),
        page.columns.time("adapter_time_us", "Adapters", `with the sum of both, ${page.per()}`, { like: "base_time_us" }),
        { key: "base_flops_per_step", title: "FLOPs of the base", kind: "flops", help: "a step", missing: "not known" },
        { key: "adapter_flops_per_step", title: "of the adapters", kind: "flops", help: "a step", missing: "not known" },
      ],
      rows: data.adapters,
      sort: { key: "adapter_time_us", descending: true },
      limit: 200,
    });
  }
})();
