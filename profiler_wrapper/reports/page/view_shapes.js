"use strict";
/** Shapes: matrix products and convolutions by their sizes. */
(function () {
  const ALIGNED = 8;

  page.view({
    id: "shapes",
    title: "Shapes",
    order: 110,
    applies: data => data.products.length ? null : "no sizes of products are known: record a step with shapes (record_shapes, which the warm-up steps have by default)",
    draw(data, element) {
      const { rows, per } = page.shaped(data, data.products);
      const products = page.shapesAreTimed(data) ? rows : page.byLayers(data, rows);
      const bySize = merged(products);
      const times = page.timedColumns(data, products, per);
      const time = times[0].key;
      let shown = bySize;
      const odd = row => [row.m, row.n, row.k].some(size => size > 1 && size % ALIGNED);
      const total = page.sum(products, time);
      page.note(element, `Matrix products (m×k by k×n) and convolutions by size, ${per}. ` +
        (page.shapesAreTimed(data) ? "" : timesNote(data, products)) +
        `Sizes that are no multiple of ${ALIGNED} are marked: tensor cores like multiples of 8 (16-bit types) or 16 (8-bit).`);
      const size = name => ({
        key: name, title: name, kind: "count",
        cell: (row, cell) => {
          if (!(row[name] > 1 && row[name] % ALIGNED)) return false;
          const text = page.element("span", "", page.format.count(row[name]));
          text.style.color = "var(--outlier)";
          cell.append(text);
          cell.title = `no multiple of ${ALIGNED}`;
          return true;
        },
      });
      let only = false;
      const show = () => table.update({ rows: only ? shown.filter(odd) : shown });
      const by = page.segments(null, [["size", "By size"], ["layer", "By layer"]], "size", id => { shown = id === "size" ? bySize : products; show(); });
      const which = page.segments(null, [["all", "All"], ["odd", "Only unaligned"]], "all", id => { only = id === "odd"; show(); });
      const table = page.table(element, {
        columns: [
          { key: "op", title: "Op", kind: "text", longest: 44 },
          page.columns.layers("layer", "Layer"),
          page.columns.phase(),
          { key: "dtype", title: "Type", kind: "text" },
          size("m"), size("n"), size("k"),
          { key: "batch", title: "Batch", kind: "count", help: "products of this size in one call" },
          { key: "calls_per_step", title: "Calls", kind: "count", help: per },
          ...times,
          page.columns.share(time, "Share", "of the time of all products", total),
          { key: "flops", title: "FLOPs", kind: "flops", help: `${per}: 2·m·n·k for each product`, value: row => 2 * row.m * row.n * row.k * row.batch * row.calls_per_step },
          { key: "rate", title: "Rate", kind: "flop_rate", missing: "its time is not known", value: row => row[time] ? 2 * row.m * row.n * row.k * row.batch * row.calls_per_step / row[time] * 1e6 : null },
        ],
        rows: shown,
        sort: { key: time, descending: true },
        limit: 200,
        tools: data.products.some(odd) ? [by, which] : [by],
      });
    },
  });

  /** Where the time in the timed steps comes from, which had no shapes. */
  function timesNote(data, products) {
    const known = products.filter(row => row.timed_us !== null).length;
    const warmUp = "“Time with shapes” is that of the steps with shapes: warm-up steps, which are slower. ";
    if (!known) return `What a size takes in the timed steps is not known. ${warmUp}`;
    return "“Time” is an estimate for the timed steps: what an op takes in them (see Operators), divided by what its layers take themselves (see Layers). " + warmUp +
      (known < products.length ? "Where that is not known, only the latter is shown. " : "");
  }

  /** One row for each size in each phase: all layers together. */
  function merged(rows) {
    const key = row => JSON.stringify([row.op, row.phase, row.dtype, row.m, row.n, row.k, row.batch]);
    return [...page.grouped(rows, key).values()].map(group => ({
      ...group[0],
      layer: page.inOrder(group.map(row => row.layer)),
      calls_per_step: page.sum(group, "calls_per_step"),
      time_per_step_us: page.sum(group, "time_per_step_us"),
      timed_us: group.every(row => row.timed_us !== null) ? page.sum(group, "timed_us") : null,
    }));
  }
})();
