"use strict";
/** Communication: what each collective moves, how fast, and how much of it the compute does not hide. */
(function () {
  const EXPOSED = "#D55E00";
  const HIDDEN = "#56B4E9";

  page.view({
    id: "communication",
    title: "Communication",
    order: 80,
    applies: data => data.collectives.length ? null
      : Number(data.run.world_size || 1) > 1 ? "no collective was found in this trace" : "no collective ran: this was one process, or the trace holds none of its communication",
    draw(data, element) {
      const rows = data.collectives;
      drawFigures(element, rows, data);
      const kinds = merged(rows);
      drawBars(element, kinds, data);
      const known = data.time_basis === "device";
      const first = page.section(element, "Collectives");
      page.note(first, `Counts, bytes and times are ${page.per()}. Bytes are those of one rank: the larger of what goes in and what comes out. Bus bandwidth is what nccl-tests call busbw: it compares with the speed of the link.` +
        (known ? "" : " On a CPU it is known of all together, not of each, what compute hides."));
      page.table(first, { columns: columns(false), rows: kinds, sort: { key: "time_us", descending: true }, limit: 50 });
      const second = page.section(element, "By layer and phase");
      page.table(second, { columns: columns(true), rows, spare: ["group", "overlapped_us", "bandwidth_bytes_per_s"], sort: { key: "time_us", descending: true }, limit: 100 });
    },
  });

  /** One row a kind of collective in one group with one type of number. */
  function merged(rows) {
    return [...page.grouped(rows, row => JSON.stringify([row.collective, row.group, row.group_size, row.dtype])).values()].map(group => {
      const time = page.sum(group, "time_us");
      const all = key => group.every(row => row[key] !== null) ? page.sum(group, key) : null;
      const rate = key => group.every(row => row[key] !== null) && time ? group.reduce((sum, row) => sum + row[key] * row.time_us, 0) / time : null;
      return {
        ...group[0],
        phase: page.first(group.map(row => row.phase), 9),
        count: page.sum(group, "count"),
        time_us: time,
        payload_bytes: all("payload_bytes"),
        exposed_us: all("exposed_us"),
        overlapped_us: all("overlapped_us"),
        bandwidth_bytes_per_s: rate("bandwidth_bytes_per_s"),
        bus_bandwidth_bytes_per_s: rate("bus_bandwidth_bytes_per_s"),
      };
    });
  }

  function columns(byLayer) {
    const unknownBytes = "how much it moves is not known from the trace";
    const noDevice = "without device events it is not known what compute hides";
    return [
      { key: "collective", title: "Collective", kind: "text", cell: (row, cell) => { cell.append(row.collective.replaceAll("_", " ")); return true; } },
      ...(byLayer ? [page.columns.layers("layer", "Layer")] : []),
      page.columns.phase(),
      { key: "group", title: "Group", kind: "text", longest: 30, missing: page.UNKNOWN_IN_TRACE, value: row => row.group || null },
      { key: "group_size", title: "Ranks", kind: "count", help: "in the group", missing: page.UNKNOWN_IN_TRACE },
      { key: "dtype", title: "Type", kind: "text", missing: page.UNKNOWN_IN_TRACE, value: row => row.dtype || null },
      page.columns.count("count", "Count", `${page.per()}`),
      { key: "payload_bytes", title: "Bytes", kind: "bytes", help: `${page.per()}: the larger of what goes in and comes out`, missing: unknownBytes, value: row => page.perStep(row.payload_bytes) },
      page.columns.time("time_us", page.timeName(), page.per()),
      page.columns.time("exposed_us", "Exposed", "with no compute beside it: this is what it costs", { like: "time_us", missing: noDevice }),
      page.columns.time("overlapped_us", "Overlapped", "with compute beside it", { like: "time_us", missing: noDevice }),
      { key: "exposed_share", title: "Exposed", kind: "share", bar: true, missing: noDevice, value: row => row.exposed_us === null || !row.time_us ? null : row.exposed_us / row.time_us },
      { key: "bandwidth_bytes_per_s", title: "Bandwidth", kind: "bandwidth", help: "bytes over time", missing: unknownBytes },
      { key: "bus_bandwidth_bytes_per_s", title: "Bus bandwidth", kind: "bandwidth", help: "as nccl-tests define it", missing: unknownBytes },
    ];
  }

  function drawFigures(element, rows, data) {
    const figures = page.element("div", "figures");
    const time = page.sum(rows, "time_us");
    const exposed = data.time.exposed_communication_us;
    const onDevice = data.time_basis === "device";
    const took = page.stepTimes(data);
    const span = data.page.like_steps && took.times.length ? page.mean(took.times) : null;
    const step = took.label === "CPU span" ? "a step's CPU span" : "a step";
    const ofStep = us => span ? `${page.format.share(page.perStep(us) / span)} of ${step} of ${page.format.us(span)}` : "";
    page.figure(figures, onDevice ? { label: `Communication, ${page.per()}`, value: page.format.us(page.perStep(time)), help: ofStep(time) }
      : { label: `Wall time of the calls, ${page.per()}`, value: page.format.us(page.perStep(time)), help: "without what other threads do for them, and without waiting" });
    page.figure(figures, {
      label: `Exposed, ${page.per()}`, value: exposed === null ? null : page.format.us(page.perStep(exposed)), missing: "no collective is seen to run",
      help: exposed === null ? "" : ["with no compute beside it, waiting for other ranks included", ofStep(exposed)].filter(Boolean).join(": "),
    });
    const bytes = page.sum(rows, "payload_bytes");
    const unknown = page.sum(rows.filter(row => row.payload_bytes === null), "count");
    page.figure(figures, {
      label: `Moved, ${page.per()}`, value: bytes === null ? null : page.format.bytes(page.perStep(bytes)), missing: page.UNKNOWN_IN_TRACE,
      help: bytes !== null && unknown ? `at least: of ${page.format.count(page.perStep(unknown))} collectives it is not known` : "",
    });
    page.figure(figures, { label: "Collectives", value: page.format.count(page.perStep(page.sum(rows, "count"))), help: page.per() });
    element.append(figures);
  }

  function drawBars(element, kinds, data) {
    const rows = kinds.filter(row => row.time_us).sort((a, b) => b.time_us - a.time_us).slice(0, 12);
    if (!rows.length) return;
    const known = rows.every(row => row.exposed_us !== null);
    const names = rows.map(row => [row.collective.replaceAll("_", " "), row.group, row.dtype].filter(Boolean).join(", "));
    const section = page.section(element, known ? `Exposed and overlapped ${page.per()}` : `Wall time of the calls ${page.per()}`);
    const [size, unit] = page.timeUnit(page.perStep(rows[0].time_us));
    const bar = (name, key, color) => ({
      type: "bar", orientation: "h", name, y: [...rows.keys()], x: rows.map(row => page.perStep(row[key]) / size), marker: { color },
      hovertemplate: rows.map((row, i) => `${page.plain(names[i])}: ${page.format.us(page.perStep(row[key]))} ${name}<extra></extra>`),
    });
    page.chartIn(section, () => known ? [bar("exposed", "exposed_us", EXPOSED), bar("overlapped", "overlapped_us", HIDDEN)] : [bar("time", "time_us", page.color.class("communication"))], () => ({
      height: 80 + 26 * rows.length,
      barmode: "stack",
      margin: { l: 10, r: 20, t: 10, b: 36 },
      yaxis: { autorange: "reversed", tickvals: [...rows.keys()], ticktext: names.map(name => page.plain(page.cut(name, 40))), showgrid: false, fixedrange: true },
      xaxis: { rangemode: "tozero", title: { text: unit } },
      showlegend: known,
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", traceorder: "normal" },
    }), { displayModeBar: false });
  }
})();
