"use strict";
/** Communication: of each collective and group what it moves, how fast, and what of it is waiting for others. */
(function () {
  const us = key => row => row[key] === null ? null : row[key] / 1000 / Math.max(1, row.size);

  page.view({
    id: "communication",
    title: "Communication",
    order: 50,
    applies: data => data.job.communication.length ? null : "no communication was recorded",
    draw(data, element) {
      const rows = data.job.communication;
      page.note(element, "Of one rank, over all steps. Transfer is the shortest duration over the ranks of each instance, as who came last did not wait; the rest is waiting. Bandwidth is bytes over transfer." + (rows.some(row => row.is_call) ? " (call): what the calling thread takes to start the collectives of that name." : ""));
      const known = rows.filter(row => row.transfer_ns !== null);
      if (known.length) {
        page.shares(element, {
          title: "All ranks together",
          parts: [
            { name: "transfer", value: page.sum(known, "transfer_ns") / 1000, color: page.color.kind("communication") },
            { name: "waiting for others", value: page.sum(known, "waiting_ns") / 1000, color: page.color.kind("waiting") },
          ],
          format: page.format.us,
        });
      }
      const alone = "the others of its group do not tell of it";
      page.table(element, {
        columns: [
          { key: "name", title: "Communication", kind: "text", longest: 48, value: row => row.is_call ? `${row.name} (call)` : row.name },
          { key: "group", title: "Group", kind: "text", longest: 32, value: row => row.group === "stage 0" && data.job.stages.length < 2 ? "all" : row.group || undefined, missing: "the calling thread does not tell who takes part" },
          { key: "size", title: "Ranks", kind: "count" },
          { key: "instances", title: "Times", kind: "count" },
          { key: "bytes", title: "Bytes", kind: "bytes", missing: "not recorded" },
          { key: "bandwidth_bytes_per_s", title: "Bandwidth", kind: "bandwidth", missing: row => row.unknown || "bytes or transfer are not known" },
          { key: "time_ns", title: "Time", kind: "us", value: us("time_ns") },
          { key: "transfer_ns", title: "Transfer", kind: "us", value: us("transfer_ns"), missing: alone },
          { key: "waiting_ns", title: "Waiting", kind: "us", value: us("waiting_ns"), missing: alone },
          { key: "waited", title: "Waited", kind: "share", bar: true, value: row => row.waiting_ns === null || !row.time_ns ? null : row.waiting_ns / row.time_ns, missing: alone },
          { key: "overlapped_ns", title: "Beside compute", kind: "us", like: "time_ns", value: us("overlapped_ns"), help: "of the time: while its rank computed", missing: row => row.unknown || "not known" },
        ],
        rows,
        sort: { key: "time_ns", descending: true },
        limit: 200,
      });
    },
  });
})();
