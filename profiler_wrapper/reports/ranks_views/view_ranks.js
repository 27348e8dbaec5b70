"use strict";
/** Ranks: what each did itself in a step, what it waited for others, scores, and how often it came last. */
(function () {
  const PLACES = ["pp", "dp", "tp", "cp", "ep"];

  const any = (rows, of) => rows.some(row => { const value = of(row); return value !== null && value !== undefined && value !== ""; });

  const SLOW = 0.75; // a score under it

  /** A score, marked where it is low, or was for some windows in a row. */
  const scored = (key, flag) => (row, cell) => {
    const mark = row[key] === null ? "" : row[key] < SLOW ? "!" : row[flag] ? "*" : "";
    if (!mark) return false;
    page.add(cell, page.text("strong", `${row[key].toFixed(2)}${mark}`));
    return true;
  };

  function columns(rows, unknown) {
    const staged = new Set(rows.map(row => row.stage)).size > 1;
    const used = Object.keys(page.data.page.colors.kind).filter(kind => any(rows, row => row.own_ms_per_step[kind]));
    return [
      { key: "rank", title: "Rank", kind: "count", cell: page.rankCell("rank") },
      ...(staged ? [{ key: "stage", title: "Stage", kind: "count" }] : []),
      ...PLACES.filter(place => any(rows, row => row[place])).map(place => ({ key: place, title: place, kind: "count" })),
      ...(any(rows, row => row.host) ? [{ key: "host", title: "Host", kind: "text", longest: 24, shrinks: true }] : []),
      ...used.map(kind => page.msColumn(kind, kind, { of: row => row.own_ms_per_step[kind] || 0, help: "self time per step" })),
      page.msColumn("waiting_ms_per_step", "Waiting", { help: "for others, per step", missing: unknown.waiting_ms_per_step }),
      page.msColumn("wall_ms_per_step", "Step"),
      { key: "relative_score", title: "Score", kind: "number", help: `the quickest rank${staged ? " of its stage" : ""} over this one; ! below 0.75, * below it for some windows of steps in a row`, cell: scored("relative_score", "flagged_relative") },
      { key: "individual_score", title: "Own score", kind: "number", help: "its own best against now; ! below 0.75, * below it for some windows of steps in a row", cell: scored("individual_score", "flagged_individual") },
      page.msColumn("late_ms_per_step", "Late", { help: "by how much it came last to collectives, per step" }),
      { key: "times_last", title: "Times last", kind: "count", help: "to how many collectives it came last, in all steps" },
      ...(any(rows, row => row.share) ? [{ key: "share", title: "Of the lost time", kind: "share", bar: true }] : []),
      ...(any(rows, row => row.peak_bytes) ? [{ key: "peak_bytes", title: "Peak memory", kind: "bytes", help: "the highest allocated", missing: unknown.peak_bytes }] : []),
      ...(any(rows, row => row.mfu) ? [{ key: "mfu", title: "MFU", kind: "share", missing: unknown.mfu }] : []),
    ];
  }

  /** Those that are named come first, then those that scored low throughout, then by number. */
  function inOrder(rows) {
    const place = row => page.isNamed(row.rank) ? 0 : row.flagged ? 1 : 2;
    return [...rows].sort((a, b) => place(a) - place(b) || a.rank - b.rank);
  }

  function named(job, element) {
    const rows = job.named_spans || [];
    if (!rows.length) return;
    const section = page.section(element, "Named spans of no known kind");
    page.note(section, "Names that tell no kind: their time is in other, or in the spans that they are within. Others: the median of the other ranks.");
    page.table(section, {
      columns: [
        { key: "name", title: "Span", kind: "text", longest: 60 },
        page.msColumn("others_ms_per_step", "Others", { missing: "there is one rank" }),
        page.msColumn("slowest_ms_per_step", "Slowest"),
        { key: "slowest_rank", title: "Of rank", kind: "count", cell: page.rankCell("slowest_rank") },
        { key: "per_step", title: "Per step", kind: "number", help: "times a rank has it in a step" },
        { key: "nested", title: "Place", kind: "text", value: row => row.nested ? "within others" : "" },
      ],
      rows,
      sort: null,
      search: false,
      limit: 64,
    });
  }

  page.view({
    id: "ranks",
    title: "Ranks",
    order: 40,
    draw(data, element) {
      page.note(element, `Times are per step, the mean of the ${page.format.count((data.job.judged_steps || data.job.steps).length)} steps that were judged. Own time is what a rank did itself, communication its transfer alone; what it waited for others stands apart${data.job.waiting === "estimated" ? ", and is estimated" : ""}. Other is in no span, or in one whose name tells no kind. Those that the verdict names come first.`);
      page.table(element, {
        columns: columns(data.job.ranks, data.job.unknown || {}),
        rows: inOrder(data.job.ranks),
        sort: null,
        limit: 500,
        spare: ["individual_score", "host", "late_ms_per_step", "other", "optimizer"],
      });
      named(data.job, element);
    },
  });
})();
