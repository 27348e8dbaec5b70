"use strict";
/**
 * The rows of the layer table: a layer with its phases side by side, like siblings as one group, what is outside all
 * layers, and what has none. Times are microseconds per step (of all steps where steps are not alike).
 */
(function () {
  const FORWARD = ["forward", "prefill", "decode"];
  const US_DIGITS = 1000; // result.json has nanoseconds as thousandths

  const isKnown = value => value !== null && value !== undefined;
  /** The sum; null where one of the values is not known. */
  const knownTotal = values => values.some(value => !isKnown(value)) ? null : values.reduce((sum, value) => sum + value, 0);
  /** The sum of what is known; undefined where nothing is there, null where nothing is known. */
  const sumOf = values => {
    const known = values.filter(isKnown);
    return known.length ? known.reduce((sum, value) => sum + value, 0) : values.includes(null) ? null : undefined;
  };
  const most = values => { const known = values.filter(isKnown); return known.length ? Math.max(...known) : values.includes(null) ? null : undefined; };

  /**
   * One layer, or what stands for one.
   * @param {object[]} rows its rows, one a phase
   * @param {boolean} own without the layers below
   */
  function measured(rows, own, data) {
    const steps = data.page.steps;
    const scale = data.page.work_scale;
    const time = own ? "self_time_us" : "time_us";
    const prefix = own ? "self_" : "";
    const work = name => {
      const total = knownTotal(rows.map(row => row[prefix + name]));
      return total === null || scale === null ? null : total * scale;
    };
    const perStep = name => { const sum = sumOf(rows.map(row => row[name])); return isKnown(sum) ? sum / steps : sum; };
    const phases = {};
    for (const row of rows) phases[row.phase] = (phases[row.phase] || 0) + row[time] / steps;
    const forward = rows.filter(row => FORWARD.includes(row.phase));
    const total = sumOf(rows.map(row => row[time])) || 0;
    return withRates({
      phases,
      time: total / steps,
      time_in_all: total,
      communication: perStep("communication_us") || 0,
      exposed: own ? undefined : perStep("exposed_communication_us"),
      idle: own ? undefined : perStep("idle_us"),
      cpu: own ? undefined : perStep("cpu_time_us"),
      calls: sumOf(forward.map(row => isKnown(row.calls) ? row.calls / steps : undefined)),
      flops: work("flops_per_step"),
      known_flops: own ? undefined : work("known_flops_per_step"),
      bytes_moved: work("bytes_moved_per_step"),
      roof: work("roof_time_per_step_us"),
      memory_roof: work("memory_roof_time_per_step_us"),
      retained: forward.length ? most(forward.map(row => row[prefix + "retained_bytes"])) : undefined,
      peak: own || !rows[0].layer ? undefined : most(rows.map(row => row.peak_bytes)),
    });
  }

  /** Adds what follows from the sums. */
  function withRates(row) {
    row.rate = row.flops && row.time ? row.flops / (row.time / 1e6) : row.flops === null ? null : undefined;
    const computing = row.time - row.communication;
    row.of_roof = row.roof && computing > 0 ? row.roof / computing : row.roof === null ? null : undefined;
    row.bound = row.roof && isKnown(row.memory_roof) ? (2 * row.memory_roof > row.roof ? "memory" : "compute") : row.roof === null ? null : undefined;
    return row;
  }

  function summed(members) {
    const phases = {};
    for (const member of members) for (const [phase, us] of Object.entries(member.phases)) phases[phase] = (phases[phase] || 0) + us;
    const total = name => sumOf(members.map(member => member[name]));
    return withRates({
      phases,
      time: total("time") || 0,
      time_in_all: total("time_in_all") || 0,
      communication: total("communication") || 0,
      exposed: total("exposed"), idle: total("idle"), cpu: total("cpu"), calls: total("calls"),
      flops: knownTotal(members.map(member => member.flops)),
      known_flops: knownTotal(members.map(member => member.known_flops)),
      bytes_moved: knownTotal(members.map(member => member.bytes_moved)),
      roof: knownTotal(members.map(member => member.roof)),
      memory_roof: knownTotal(members.map(member => member.memory_roof)),
      retained: total("retained"),
      peak: most(members.map(member => member.peak)),
      attention: total("attention"),
      backends: [...new Set(members.flatMap(member => member.backends))],
    });
  }

  function outsideLabel(row) {
    const name = row.raw_name || row.class_name;
    if (name) return name;
    if (row.phase === "optimizer") return "optimizer";
    if (row.time_us && row.communication_us >= 0.9 * row.time_us) return `collectives of several layers (${row.phase})`;
    return row.phase === "other" ? "other code between calls" : `outside layers (${row.phase})`;
  }

  const OUTSIDE = "\u0000outside";
  const UNATTRIBUTED = "\u0000unattributed";

  /**
   * All rows of the table.
   * @returns {{rows: object[], total: object, sum: number, groups: object[]}} `sum`: nanoseconds of the outermost rows
   */
  page.layerRows = function (data, { own }) {
    const byLayer = new Map();
    for (const row of data.layers) {
      if (!row.layer) continue;
      if (!byLayer.has(row.layer)) byLayer.set(row.layer, []);
      byLayer.get(row.layer).push(row);
    }
    const ordered = [...byLayer].sort(([, a], [, b]) => a[0].order - b[0].order);
    const attention = attentionOf(data, own);
    const groups = own ? [] : groupsOf(data);
    const groupOf = new Map(groups.flatMap(group => group.layers.map(layer => [layer, group])));
    const rows = [];
    const layers = new Map();
    const placed = new Set();
    for (const [name, of] of ordered) {
      const group = groupOf.get(name);
      const parent = own ? null : data.page.parents[name] || null;
      if (group && !placed.has(group)) {
        placed.add(group);
        rows.push(group.row);
      }
      const row = { ...measured(of, own, data), ...named(of, parent, own), ...(attention.get(name) || { attention: undefined, backends: [] }) };
      if (group) row.parent = group.row.id;
      row.above = parent;
      layers.set(name, row);
      rows.push(row);
    }
    for (const group of groups) {
      const members = group.layers.map(layer => layers.get(layer)).filter(Boolean);
      Object.assign(group.row, summed(members), { members });
    }
    rows.push(...outsideRows(data, own), ...unattributedRows(data));
    const outermost = rows.filter(row => own ? !row.sum : !isKnown(row.parent));
    const sum = outermost.reduce((total, row) => total + Math.round(row.time_in_all * US_DIGITS), 0);
    return { rows, layers, groups, sum, total: totalRow(data, rows) };
  };

  function named(rows, parent, own) {
    const first = rows[0];
    const below = parent && first.layer.startsWith(parent + ".");
    return {
      id: first.layer,
      parent,
      layer: first.layer,
      label: below && !own ? first.layer.slice(parent.length + 1) : first.layer,
      class_name: first.class_name,
      kind: first.kind,
      order: first.order,
      flags: ["compiled", "shared", "graph"].filter(flag => rows.some(row => row[flag])),
    };
  }

  function groupsOf(data) {
    return data.page.groups.map(group => ({
      ...group,
      full: group.parent && !group.label.startsWith(group.parent) && group.layers[0].startsWith(group.parent + ".") ? `${group.parent}.${group.label}` : group.label,
      row: {
        id: `\u0000group ${group.parent || ""} ${group.label} ${group.layers[0]}`, parent: group.parent, label: group.label,
        layer: "", class_name: "", kind: "", flags: [], group,
      },
    }));
  }

  /** Attention of each layer and of those above it. */
  function attentionOf(data, own) {
    const found = new Map();
    for (const row of data.attention) {
      const seen = new Set();
      for (let layer = row.layer; layer && !seen.has(layer); layer = own ? null : data.page.parents[layer]) {
        seen.add(layer);
        if (!found.has(layer)) found.set(layer, { attention: 0, backends: [] });
        const entry = found.get(layer);
        entry.attention += row.time_us / data.page.steps;
        if (!entry.backends.includes(row.backend)) entry.backends.push(row.backend);
      }
    }
    return found;
  }

  function outsideRows(data, own) {
    const rows = data.layers.filter(row => !row.layer && row.time_us).map(row => ({
      ...measured([row], false, data), attention: row.attention_us ? row.attention_us / data.page.steps : undefined, backends: [],
      id: `${OUTSIDE} ${row.phase} ${row.raw_name}`, parent: OUTSIDE, label: outsideLabel(row), layer: "", class_name: "", kind: "", flags: [], outside: true,
    }));
    return under({ id: OUTSIDE, label: "(optimizer / other code between calls)", outside: true }, rows, own);
  }

  function unattributedRows(data) {
    const rows = data.unattributed.filter(row => row.time_us).map(row => ({
      phases: {}, time: row.time_us / data.page.steps, time_in_all: row.time_us, backends: [],
      id: `${UNATTRIBUTED} ${row.reason}`, parent: UNATTRIBUTED, label: row.reason, layer: "", class_name: "", kind: "", flags: [], unattributed: true,
    }));
    return under({ id: UNATTRIBUTED, label: "(unattributed)", unattributed: true }, rows, false);
  }

  /** `rows` below one that sums them up; a single one stands for itself. */
  function under(head, rows, flat) {
    if (!rows.length) return [];
    if (flat) return rows.map(row => ({ ...row, parent: null }));
    const sums = { ...summed(rows), ...head, parent: null, layer: "", class_name: "", kind: "", flags: [], sum: true };
    if (rows.length === 1) return [{ ...rows[0], id: head.id, parent: null, label: head.outside ? `(${rows[0].label})` : `${head.label} ${rows[0].label}` }];
    return [sums, ...rows];
  }

  function totalRow(data, rows) {
    const outermost = rows.filter(row => !isKnown(row.parent));
    const phases = {};
    for (const row of data.layers) phases[row.phase] = (phases[row.phase] || 0) + row.self_time_us / data.page.steps;
    const exposed = data.time.exposed_communication_us;
    const total = {
      id: "\u0000total", parent: null, label: "Total", layer: "", class_name: "", kind: "", flags: [], isTotal: true,
      phases, communication: 0, time: data.time.total_us / data.page.steps, backends: [],
      attention: data.attention.length ? data.attention.reduce((sum, row) => sum + row.time_us, 0) / data.page.steps : undefined,
      exposed: isKnown(exposed) ? exposed / data.page.steps : undefined,
      flops: allFlops(data),
      known_flops: (data.uncounted || []).length ? sumOf(outermost.map(row => row.known_flops)) : undefined,
      retained: sumOf(outermost.filter(row => row.layer).map(row => row.retained)),
      peak: peakOf(data, outermost),
    };
    return withRates(total);
  }

  /** Of all that ran; null where over 1 % of the time is of kernels launched before the trace, whose FLOPs are not known. */
  function allFlops(data) {
    const isBefore = row => row.reason === "launched before the trace";
    const before = data.unattributed.filter(isBefore).reduce((sum, row) => sum + row.time_us, 0);
    if (before > 0.01 * data.time.total_us || data.page.work_scale === null) return null;
    const parts = [...data.layers.map(row => row.self_flops_per_step), ...data.unattributed.filter(row => !isBefore(row)).map(row => row.flops_per_step)];
    const total = knownTotal(parts);
    return total === null ? null : total * data.page.work_scale;
  }

  function peakOf(data, outermost) {
    const whole = data.memory && data.memory.peak && data.memory.peak.allocated_bytes;
    return most([whole, ...outermost.map(row => row.peak), ...data.steps.map(step => step.peak_bytes)]);
  }

  /** Places of values over 20 % and 5 robust deviations off the median; as in the text table. */
  page.outliers = function (values) {
    const odd = new Set();
    const known = values.filter(isKnown);
    if (known.length < 3 || known.length < values.length) return odd;
    const middle = page.median(known);
    if (middle <= 0) return odd;
    const sigma = 1.4826 * page.median(known.map(value => Math.abs(value - middle)));
    const far = Math.max(0.2 * middle, 5 * sigma);
    values.forEach((value, i) => { if (Math.abs(value - middle) > far) odd.add(i); });
    return odd;
  };
})();
