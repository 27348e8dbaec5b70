"use strict";
/** Classes: what kind of work changed. */
(function () {
  page.view({
    id: "classes",
    title: "Classes",
    order: 40,
    draw(data, element) {
      const { steps_a: a, steps_b: b, classes, unattributed } = data.comparison;
      page.table(element, {
        columns: [
          { key: "class", title: "Class", kind: "text" },
          { key: "phase", title: "Phase", kind: "text", value: row => row.phase },
          { key: "time_a_us", title: "Time a", kind: "us", help: "per step", value: row => row.time_a_us / a },
          { key: "time_b_us", title: "Time b", kind: "us", help: "per step", value: row => row.time_b_us / b },
          { key: "difference", title: "b − a", kind: "us", value: row => row.time_b_us / b - row.time_a_us / a },
          { key: "count_a", title: "Events a", kind: "count", help: "per step", value: row => row.count_a / a },
          { key: "count_b", title: "Events b", kind: "count", help: "per step", value: row => row.count_b / b },
          { key: "flops_per_step_a", title: "FLOPs a", kind: "flops" },
          { key: "flops_per_step_b", title: "FLOPs b", kind: "flops" },
        ],
        rows: classes,
        sort: { key: "difference", descending: true },
      });
      if (!unattributed.length) return;
      const section = page.section(element, "Time without a layer");
      page.table(section, {
        columns: [
          { key: "reason", title: "Reason", kind: "text" },
          { key: "time_a_us", title: "Time a", kind: "us", help: "per step", value: row => row.time_a_us / a },
          { key: "time_b_us", title: "Time b", kind: "us", help: "per step", value: row => row.time_b_us / b },
        ],
        rows: unattributed,
        search: false,
      });
    },
  });
})();
