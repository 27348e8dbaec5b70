"use strict";
/** Kernels: what ran on the device, how it was launched, and whether it uses tensor cores. */
(function () {
  const CORES = { yes: "use tensor cores", no: "do not", unknown: "not known from the kernel's name" };
  const CORE_COLORS = { yes: "#009E73", no: "#D55E00", unknown: "#999999" };

  // Columns that are shown together, so that no window cuts them.
  const MAIN = new Set(["name", "class", "tensor_cores", "count", "time_us", "share", "mean_us", "occupancy", "ops", "layers"]);
  const LAUNCH = new Set(["name", "count", "time_us", "mean_us", "min_us", "max_us", "blocks_per_sm", "occupancy", "grid", "block", "registers_per_thread", "shared_memory_bytes", "copied_bytes", "copy_rate"]);
  const SETS = { main: MAIN, how: LAUNCH };

  page.view({
    id: "kernels",
    title: "Kernels",
    order: 50,
    applies: data => data.kernels.length ? null
      : data.time_basis === "cpu" ? "nothing ran on a device: this trace has no kernels, copies or sets" : "kernels are not in this result: it was written by an older version",
    draw(data, element) {
      let rows = data.kernels;
      let byLaunch = true;
      let chosen = null;
      const total = page.sum(data.kernels, "time_us");
      drawFigures(element, data, total);
      const shown = () => {
        const of = chosen ? rows.filter(chosen.test) : rows;
        return byLaunch ? of : merged(of);
      };
      const reset = page.text("button", "All kernels", "small");
      reset.type = "button";
      reset.hidden = true;
      const choose = (label, test) => {
        chosen = chosen && chosen.label === label ? null : { label, test };
        reset.hidden = !chosen;
        reset.textContent = chosen ? `Only ${chosen.label} ✕` : "All kernels";
        table.update({ rows: shown() });
      };
      reset.addEventListener("click", () => choose(chosen.label, chosen.test));
      const byClass = [...page.grouped(data.classes, row => row.class)].map(([name, group]) => ({ name, value: page.perStep(page.sum(group, "time_us")), color: page.color.class(name) }));
      byClass.sort((a, b) => b.value - a.value);
      page.shares(element, { title: `Device time by class, ${page.per()} (click to filter)`, parts: byClass, format: page.format.us, onClick: name => choose(name, row => row.class === name) });
      const byCores = [...page.grouped(data.kernels.filter(isKernel), cores)].map(([id, group]) => ({ id, name: CORES[id], value: page.perStep(page.sum(group, "time_us")), color: CORE_COLORS[id] }));
      page.shares(element, { title: "Kernel time by tensor cores", parts: byCores, format: page.format.us, onClick: id => choose(`kernels that ${CORES[id]}`.replace("that not known", "with tensor cores not known"), row => isKernel(row) && cores(row) === id) });
      const section = page.section(element, "All kernels, copies and sets");
      page.note(section, `Calls and times are ${page.per()}, ${data.page.steps_in_words}; mean, least and most are those of one launch. Occupancy and blocks per SM are the profiler's estimates.`);
      const choice = page.segments(null, [["launch", "By launch configuration"], ["kernel", "By kernel"]], "launch", id => { byLaunch = id === "launch"; table.update({ rows: shown() }); });
      const all = columns(data, total);
      const set = id => all.filter(column => !SETS[id] || SETS[id].has(column.key));
      const which = page.segments(null, [["main", "Main"], ["how", "Launch"], ["all", "All columns"]], "main", id => table.update({ columns: set(id) }));
      const table = page.table(section, { columns: set("main"), csvColumns: all, rows, sort: { key: "time_us", descending: true }, limit: 200, tools: [choice, which, reset] });
    },
  });

  const isKernel = row => row.copied_bytes === null && !/^Mem(cpy|set)\b/i.test(row.name);
  const cores = row => row.tensor_cores === null ? "unknown" : row.tensor_cores ? "yes" : "no";

  /** One row a kernel and class: what differs between its launches is left out. */
  function merged(rows) {
    return [...page.grouped(rows, row => JSON.stringify([row.name, row.class])).values()].map(group => {
      const time = page.sum(group, "time_us");
      const meanBy = key => group.every(row => row[key] !== null) ? group.reduce((sum, row) => sum + row[key] * row.time_us, 0) / (time || 1) : null;
      const same = key => group.every(row => String(row[key]) === String(group[0][key])) ? group[0][key] : undefined;
      return {
        ...group[0],
        count: page.sum(group, "count"),
        time_us: time,
        min_us: Math.min(...group.map(row => row.min_us)),
        max_us: Math.max(...group.map(row => row.max_us)),
        ...Object.fromEntries(["grid", "block", "registers_per_thread", "shared_memory_bytes"].map(key => [key, same(key)])),
        blocks_per_sm: meanBy("blocks_per_sm"),
        occupancy: meanBy("occupancy"),
        copied_bytes: page.sum(group, "copied_bytes"),
        ops: page.first(group.map(row => row.ops), 3),
        layers: page.first(group.map(row => row.layers), 3),
        layer_count: Math.max(...group.map(row => row.layer_count || 0)),
      };
    });
  }

  function columns(data, total) {
    const isRecorded = name => data.kernels.some(row => row[name] !== null && row[name] !== undefined);
    const { time, count, share } = page.columns;
    const ofKernels = (key, title, kind, help, more) => isRecorded(key)
      ? [{ key, title, kind, help, missing: row => isKernel(row) ? "not known of this kernel" : "", value: row => isKernel(row) ? row[key] : undefined, ...more }] : [];
    const size = (key, title, help) => ofKernels(key, title, "text", help, { value: row => isKernel(row) ? row[key] && row[key].join("×") : undefined });
    return [
      { key: "name", title: "Kernel", kind: "text", longest: 60, shrinks: true, shown: page.kernelNames(data.kernels.map(row => row.name)) },
      page.columns.class(),
      {
        key: "tensor_cores", title: "Tensor cores", kind: "text", help: "By what the kernel is; – where it is not known from its name",
        missing: "not known from the kernel's name", value: row => !isKernel(row) ? undefined : row.tensor_cores === null ? null : row.tensor_cores ? "yes" : "no",
      },
      count("count", "Calls", `Launches ${page.per()}`),
      time("time_us", "Total", `Time ${page.per()}`),
      share("time_us", "Share", "of all device time", total),
      { key: "mean_us", title: "Mean", kind: "us", help: "of one launch", value: row => row.count ? row.time_us / row.count : null },
      { key: "min_us", title: "Least", kind: "us" },
      { key: "max_us", title: "Most", kind: "us" },
      ...ofKernels("blocks_per_sm", "Blocks per SM", "number", "Under 1: there are fewer blocks than multiprocessors, and some of the device stands still"),
      ...ofKernels("occupancy", "Occupancy", "share", "Achieved, as the profiler estimates it; mean by time"),
      ...size("grid", "Grid", "Blocks"),
      ...size("block", "Block", "Threads of a block"),
      ...ofKernels("registers_per_thread", "Registers", "count", "per thread"),
      ...ofKernels("shared_memory_bytes", "Shared memory", "bytes", "of a block"),
      ...(isRecorded("copied_bytes") ? [
        { key: "copied_bytes", title: "Copied", kind: "bytes", help: `of copies and sets, ${page.per()}`, value: row => row.copied_bytes === null ? undefined : page.perStep(row.copied_bytes) },
        { key: "copy_rate", title: "Copy rate", kind: "bandwidth", value: row => row.copied_bytes === null || !row.time_us ? undefined : row.copied_bytes / row.time_us * 1e6 },
      ] : []),
      { key: "ops", title: "Launched by", kind: "text", longest: 36 },
      { ...page.columns.layers(), longest: 24 },
    ];
  }

  function drawFigures(element, data, total) {
    const kernels = data.kernels.filter(isKernel);
    const time = page.sum(kernels, "time_us");
    const of = test => page.sum(kernels.filter(test), "time_us") || 0;
    const figures = page.element("div", "figures");
    const launches = page.sum(data.kernels, "count");
    page.figure(figures, { label: `Kernels, ${page.per()}`, value: page.format.us(page.perStep(time)), help: `copies and sets: ${page.format.us(page.perStep(total - (time || 0)))}` });
    page.figure(figures, { label: `Launches, ${page.per()}`, value: page.format.count(page.perStep(launches)), help: `${page.format.us(launches ? total / launches : null)} each in the mean` });
    const used = of(row => row.tensor_cores === true);
    const unknown = of(row => row.tensor_cores === null);
    page.figure(figures, {
      label: "Kernel time on tensor cores",
      value: time && unknown < time ? page.format.share(used / time) : null,
      missing: "not known from any kernel's name",
      help: unknown > 0 && unknown < time ? `not known of ${page.format.share(unknown / time)}` : "",
    });
    const [short, number] = [kernels.filter(row => row.count && row.time_us / row.count < 5), kernels].map(rows => page.sum(rows, "count") || 0);
    page.figure(figures, { label: "Kernels under 5 µs", value: page.format.share(number ? short / number : null), help: "of all kernels, by the mean of their row; many of them: the CPU sets the pace" });
    element.append(figures);
  }
})();
