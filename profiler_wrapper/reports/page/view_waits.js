"use strict";
/** Waits: where the CPU stands still until the device is done, or its data are there. */
(function () {
  const COLORS = { item: "#D55E00", nonzero: "#CC79A7", "blocking copy": "#E69F00", stream: "#0072B2", device: "#56B4E9", event: "#009E73", other: "#999999" };
  const HELP = {
    item: "a number is read from the device: .item(), float(tensor), if tensor: read it less often, or after the step",
    nonzero: "the size of a result depends on the data: nonzero, masks as indices, unique: use torch.where or a fixed size",
    "blocking copy": "a copy that the CPU waits for: pin the memory and pass non_blocking=True",
    stream: "the CPU waits for one stream",
    device: "the CPU waits for the whole device: torch.cuda.synchronize()",
    event: "the CPU waits for an event",
    other: "another call that waits",
  };

  const waitsForData = data => data.overview ? page.sum(data.overview.steps || [], "dataloader_us") : 0;

  page.view({
    id: "waits",
    title: "Waits",
    order: 90,
    applies: data => data.synchronisations.length || waitsForData(data) ? null
      : data.time_basis === "cpu" ? "nothing ran on a device that the CPU could wait for, and nothing waited for a DataLoader" : "no wait of the CPU for the device or a DataLoader was found in this trace",
    draw(data, element) {
      const rows = data.synchronisations;
      if (waitsForData(data)) {
        const steps = data.overview.steps;
        const place = page.element("div", "figures");
        page.figure(place, { label: "The CPU waits for the DataLoader, per step", value: page.format.us(waitsForData(data) / steps.length), help: `${page.format.share(waitsForData(data) / page.sum(steps, "span_us"))} of the steps' wall time` });
        element.append(place);
      }
      if (!rows.length) return;
      const figures = page.element("div", "figures");
      page.figure(figures, { label: `The CPU waits, ${page.per()}`, value: page.format.us(page.perStep(page.sum(rows, "wait_us"))), help: "time in calls that wait for the device" });
      page.figure(figures, { label: `Waits, ${page.per()}`, value: page.format.count(page.perStep(page.sum(rows, "count"))) });
      element.append(figures);
      const kinds = [...page.grouped(rows, row => row.kind)].map(([name, group]) => ({ name, value: page.perStep(page.sum(group, "wait_us")), color: COLORS[name] || "#999999", help: HELP[name] }));
      kinds.sort((a, b) => b.value - a.value);
      page.shares(element, { title: `By kind, ${page.per()} (click to filter)`, parts: kinds, format: page.format.us, onClick: name => table.search(table.query === name ? "" : name) });
      page.note(element, "While the CPU waits it launches nothing, so the device runs dry after the wait. A wait at the end of a step, as for a loss that is printed, may be meant; one inside a layer hardly ever is.");
      const table = page.table(element, {
        columns: [
          { key: "kind", title: "Kind", kind: "text", cell: (row, cell) => { cell.title = HELP[row.kind] || ""; cell.append(page.marked(row.kind, COLORS[row.kind] || "#999999")); return true; } },
          { key: "op", title: "Op or call", kind: "text", longest: 60 },
          page.columns.layers("layer", "Layer"),
          page.columns.phase(),
          page.columns.count("count", "Waits", `Waits ${page.per()}`),
          page.columns.time("wait_us", "Waited", `Wall time in the call, ${page.per()}`),
          { key: "each_us", title: "Each", kind: "us", help: "of one wait, in the mean", value: row => row.count ? row.wait_us / row.count : null },
          ...(rows.some(row => row.sources.length) ? [{ key: "sources", title: "Source", kind: "text", longest: 44, value: row => row.sources.length ? row.sources : undefined }] : []),
          { key: "cure", title: "What helps", kind: "text", longest: 130, shrinks: true, value: row => HELP[row.kind] },
        ],
        rows,
        spare: ["each_us", "phase"],
        sort: { key: "wait_us", descending: true },
        limit: 200,
      });
      if (!rows.some(row => row.sources.length)) page.note(element, "Lines of code are not known, as Python stacks were not recorded (with_stack=True).");
    },
  });
})();
