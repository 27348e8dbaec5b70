"use strict";
/** Layers: each over the ranks that have it, and who stands out. */
(function () {
  page.view({
    id: "layers",
    title: "Layers",
    order: 60,
    applies: data => data.over_ranks.length ? null : "no span is of a layer",
    draw(data, element) {
      page.note(element, "Per step, what is below a layer included. Outliers are ranks more than four spreads, and a tenth, beyond the median.");
      page.table(element, {
        columns: [
          { key: "layer", title: "Layer", kind: "text", longest: 64 },
          { key: "kind", title: "Phase", kind: "text", cell: page.markCell("kind", page.color.kind) },
          { key: "ranks", title: "Ranks", kind: "count" },
          page.msColumn("median_ms", "Median"),
          page.msColumn("quickest_ms", "Quickest"),
          page.msColumn("spread_ms", "Spread", { like: "median_ms", help: "1.48 times the median deviation over ranks, which of normal noise is its standard deviation" }),
          page.msColumn("slowest_ms", "Slowest"),
          { key: "slowest_rank", title: "Of rank", kind: "count", cell: page.rankCell("slowest_rank") },
          page.msColumn("beyond_ms", "Beyond", { help: "of the slowest rank, over the median" }),
          { key: "outliers", title: "Outliers", kind: "text", value: row => row.outliers.length ? row.outliers.slice(0, 12).join(", ") + (row.outliers.length > 12 ? " …" : "") : undefined },
        ],
        rows: data.over_ranks,
        sort: { key: "beyond_ms", descending: true },
        limit: 200,
      });
    },
  });
})();
