"use strict";
/** Ranks: what each did itself in a step, what it waited for others, scores, and how often it came last. */
(function () {
  const KINDS = ["data", "forward", "recompute", "backward", "communication", "optimizer", "gc", "checkpoint", "other"];
  const PLACES = ["pp", "dp", "tp", "cp", "ep"];

  const any = (rows, of) => rows.some(row => { const value = of(row); return value !== null && value !== undefined && value !== ""; });

  function columns(rows) {
    const staged = new Set(rows.map(row => row.stage)).size > 1;
    const used = KINDS.filter(kind => any(rows, row => row.own_ms_per_step[kind]));
    return [
      { key: "rank", title: "Rank", kind: "count", cell: page.rankCell("rank") },
      ...(staged ? [{ key: "stage", title: "Stage", kind: "count" }] : []),
      ...PLACES.filter(place => any(rows, row => row[place])).map(place => ({ key: place, title: place, kind: "count" })),
      ...(any(rows, row => row.host) ? [{ key: "host", title: "Host", kind: "text", longest: 24, shrinks: true }] : []),
      ...used.map(kind => page.msColumn(kind, kind, { of: row => row.own_ms_per_step[kind] || 0, help: "own time per step" })),
      page.msColumn("waiting_ms_per_step", "Waiting", { help: "for others, per step" }),
      page.msColumn("wall_ms_per_step", "Step"),
      { key: "relative_score", title: "Score", kind: "number", help: "1 is as quick as the quickest of its stage" },
      { key: "individual_score", title: "Own score", kind: "number", help: "its own best against now" },
      { key: "times_last", title: "Last", kind: "count", help: "times it came last to a collective" },
      page.msColumn("late_ms", "Late", { help: "by how much, in all" }),
      ...(any(rows, row => row.share) ? [{ key: "share", title: "Of the lost time", kind: "share", bar: true }] : []),
      ...(any(rows, row => row.peak_bytes) ? [{ key: "peak_bytes", title: "Peak memory", kind: "bytes" }] : []),
      ...(any(rows, row => row.mfu) ? [{ key: "mfu", title: "MFU", kind: "share" }] : []),
    ];
  }

  page.view({
    id: "ranks",
    title: "Ranks",
    order: 40,
    draw(data, element) {
      page.note(element, "Times are per step. Own time is what a rank did itself; what it waited for others in communication stands apart.");
      page.table(element, {
        columns: columns(data.job.ranks),
        rows: data.job.ranks,
        sort: null,
        limit: 500,
        spare: ["individual_score", "host", "late_ms", "other", "optimizer"],
        rowClass: row => page.isNamed(row.rank) || row.flagged ? "odd" : "",
      });
    },
  });
})();
