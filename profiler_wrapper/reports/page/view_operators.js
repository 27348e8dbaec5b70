"use strict";
/** Operators: what each op takes, by itself and with the ops that it calls, on the device and on the CPU. */
(function () {
  const LARGEST = 10;
  const BESIDE = ["device_events", "shapes", "sources"]; // for which a usual window has no room
  const SPARE = ["cpu_time_us", "time_us", "calls", "phase"];

  page.view({
    id: "operators",
    title: "Operators",
    order: 40,
    applies: data => data.operators.length ? null : "no op was recorded: the trace has no CPU activity",
    draw(data, element) {
      const onCpu = data.time_basis === "cpu";
      const total = data.time.total_us;
      const byOp = merged(data.operators);
      drawLargest(element, byOp, total, onCpu);
      const section = page.section(element, "All operators");
      page.note(section, `Times are ${page.per()}, ${data.page.steps_in_words}. “Self” leaves out the ops that an op calls` +
        (onCpu ? "; there are no device events in this trace, so all of it is " + data.page.time_name + "." : "; device time is that of the kernels, copies and sets that it launches."));
      const options = { op: byOp, phase: data.operators };
      const choice = page.segments(null, [["op", "By op"], ["phase", "By op and phase"]], "op", id => table.update({ rows: options[id] }));
      const all = columns(total, onCpu, data);
      const main = all.filter(column => !BESIDE.includes(column.key));
      const which = page.segments(null, [["main", "Main"], ["all", "All columns"]], "main", id => table.update(id === "all" ? { columns: all, spare: [] } : { columns: main, spare: SPARE }));
      const table = page.table(section, {
        columns: main,
        csvColumns: all,
        rows: byOp,
        sort: { key: "self_time_us", descending: true },
        spare: SPARE,
        limit: 200,
        tools: [choice, which],
      });
    },
  });

  /** The class that most of the time of these rows is of. */
  function classOf(group) {
    const times = new Map();
    for (const row of group) times.set(row.class, (times.get(row.class) || 0) + row.self_time_us);
    return [...times].reduce((best, one) => one[1] > best[1] ? one : best)[0];
  }

  /** One row an op: the sums over its phases. */
  function merged(rows) {
    return [...page.grouped(rows, row => row.op).values()].map(group => {
      const eligible = group.filter(row => row.tensor_core_eligible);
      const unknown = eligible.some(row => row.tensor_core_time_us === null && row.self_time_us > 0);
      const sums = ["calls", "self_time_us", "time_us", "self_cpu_time_us", "cpu_time_us", "device_events"];
      return {
        op: group[0].op,
        class: classOf(group),
        phase: page.first(group.map(row => row.phase), 9),
        ...Object.fromEntries(sums.map(key => [key, page.sum(group, key)])),
        tensor_core_eligible: eligible.length > 0,
        tensor_core_time_us: unknown ? null : page.sum(eligible, "tensor_core_time_us"),
        layer_count: Math.max(...group.map(row => row.layer_count || 0)),
        ...Object.fromEntries(["layers", "shapes", "sources"].map(key => [key, page.first(group.map(row => row[key] || []))])),
      };
    });
  }

  function columns(total, onCpu, data) {
    const { time, count, share } = page.columns;
    const recorded = name => data.operators.some(row => row[name] && row[name].length);
    const found = [
      { key: "op", title: "Op", kind: "text", longest: 60, shrinks: true },
      { ...page.columns.class(), help: "What kind of work most of its time is; what one op does for another (aten::empty within attention) is of that one's class. Overview and Kernels count each event under its own class" },
      page.columns.phase(),
      count("calls", "Calls", `Calls ${page.per()}`),
    ];
    if (onCpu) {
      found.push(
        time("self_time_us", "Self", "Wall time in the op itself"),
        share("self_time_us", "Share", `of all ${data.page.time_name}`, total),
        time("time_us", "Total", "Wall time with the ops that it calls"),
      );
    } else {
      found.push(
        time("self_time_us", "Device self", "Time of the device events that it launched itself"),
        share("self_time_us", "Share", "of all device time", total),
        time("time_us", "Device total", "with those of the ops that it calls"),
        time("self_cpu_time_us", "CPU self", "Wall time in the op itself"),
        time("cpu_time_us", "CPU total", "Wall time with the ops that it calls"),
        count("device_events", "Device events", "Kernels, copies and sets that it launched itself"),
        {
          key: "tensor_cores", title: "Tensor cores", kind: "share",
          help: "Share of its self time in kernels that use tensor cores; empty for ops that cannot",
          missing: "it could use tensor cores, but whether its kernels do is not known",
          value: row => !row.tensor_core_eligible ? undefined
            : row.tensor_core_time_us === null ? (row.self_time_us ? null : undefined)
              : row.self_time_us ? row.tensor_core_time_us / row.self_time_us : undefined,
        },
      );
    }
    found.push(page.columns.layers());
    if (recorded("shapes")) found.push({ key: "shapes", title: "Input shapes", kind: "text", longest: 60, help: "The most frequent ones" });
    if (recorded("sources")) found.push({ key: "sources", title: "Called from", kind: "text", longest: 60 });
    return found;
  }

  function drawLargest(element, rows, total, onCpu) {
    const largest = rows.filter(row => row.self_time_us > 0).sort((a, b) => b.self_time_us - a.self_time_us);
    const parts = largest.slice(0, LARGEST).map(row => ({ name: row.op, value: page.perStep(row.self_time_us), color: page.color.class(row.class) }));
    const rest = page.perStep(total) - parts.reduce((sum, part) => sum + part.value, 0);
    if (!parts.length) return;
    const [size, unit] = page.timeUnit(parts[0].value);
    const section = page.section(element, `Largest operators, self ${page.data.page.time_name} ${page.per()}`);
    page.chartIn(section, () => [{
      type: "bar",
      orientation: "h",
      y: [...parts.keys()],
      x: parts.map(part => part.value / size),
      marker: { color: parts.map(part => part.color) },
      text: parts.map(part => `${page.format.us(part.value)}, ${page.format.share(part.value / page.perStep(total))}`),
      textposition: "outside",
      textfont: { size: 11 },
      hovertemplate: parts.map(part => page.plain(part.name) + ": %{text}<extra></extra>"),
      cliponaxis: false,
    }], () => ({
      height: 60 + 21 * parts.length,
      margin: { l: 10, r: 20, t: 6, b: 36 },
      yaxis: { autorange: "reversed", tickvals: [...parts.keys()], ticktext: parts.map(part => page.plain(page.cut(part.name, 46))), showgrid: false, fixedrange: true },
      xaxis: { title: { text: unit }, range: [0, 1.18 * parts[0].value / size] }, // with room for the longest bar's text
    }), { displayModeBar: false });
    if (rest > 0) page.note(section, `All others: ${page.format.us(rest)}${onCpu ? "" : ", with what no op launched"}. Colours stand for classes:`);
    page.legend(section, [...new Set(largest.slice(0, LARGEST).map(row => row.class))].map(name => [name, page.color.class(name)]));
  }
})();
