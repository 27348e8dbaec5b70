"use strict";
/** The view Layers: small charts over the blocks, the layer table, the icicle. */
(function () {
  const CURE =
    "To see layers, record with `with ProfilerWrapper(model) as prof:`. In a profiler of your own, call `profiler_wrapper.mark(model)` " +
    "before it starts, or pass with_stack=True to it.";
  page.view({ id: "layers", title: "Layers", order: 20, draw, filter });

  const isKnown = value => value !== null && value !== undefined;
  const state = { own: false, set: "main", rows: null, table: null };

  function draw(data, element) {
    state.rows = page.layerRows(data, { own: state.own });
    explainMissing(data, element);
    page.blockCharts(data, state.rows, element, name => filter(name));
    drawTable(data, element);
    page.icicle(data, element, name => state.table.reveal(name));
  }

  /** What a trace without layers says, above everything else. */
  function explainMissing(data, element) {
    const named = new Set(data.layers.filter(row => row.layer).map(row => row.layer));
    const modules = data.layers.some(row => row.layer && row.class_name);
    if (named.size && modules) return;
    const box = page.element("div", "notice");
    page.add(
      box, page.text("strong", named.size ? "This trace names no layers: the rows are its named blocks." : "This trace has no layers."),
      page.text("p", page.why("layers") || "It has no layer marks and no nn.Module events."), page.text("p", CURE),
    );
    element.append(box);
  }

  // ---- the table ----------------------------------------------------------------------------------------------------

  function drawTable(data, element) {
    const section = page.section(element, "Where the time goes");
    const basis = page.timeName() + (data.time_basis === "device" ? "" : " (there is no device in this trace)");
    const per = data.page.like_steps ? data.page.per : "summed over the whole trace, as its steps are not alike or do not hold all of it";
    page.note(section, `${basis}, ${per}. A row holds everything below it; rows without indentation add up to the total.`);
    const own = page.segments(null, [
      ["total", "With layers below", "A layer's time with everything inside it"],
      ["self", "Self only", "Time whose innermost layer this is: what adds up over all layers"],
    ], "total", id => redraw(data, id === "self"));
    const sets = page.segments(null, [["main", "Main"], ["time", "Time"], ["work", "FLOPs"], ["memory", "Memory"]], "main", id => {
      state.set = id;
      state.table.update({ columns: columns(data) });
    });
    state.own_buttons = own;
    const spare = data.views.layers.columns.filter(column => column.spare).sort((a, b) => b.spare - a.spare);
    state.table = page.table(section, {
      columns: columns(data), rows: state.rows.rows, total: state.rows.total, tree: { id: "id", parent: "parent" },
      open: row => !row.group && !row.block && (!isKnown(row.parent) || hasGroup(row)) && row.kind !== "block",
      rowClass, tools: [own, sets], limit: 500, spare: spare.map(column => column.key),
      empty: "The trace has no time that belongs to a layer.",
    });
    state.sum = page.text("p", "", "sum");
    section.append(state.sum);
    drawSum(data);
    missing(data, section);
  }

  const hasGroup = row => state.rows.groups.some(group => group.parent === row.id || (group.parent || "").startsWith(row.id + "."));

  function redraw(data, own) {
    state.own = own;
    state.rows = page.layerRows(data, { own });
    state.table.update({
      columns: columns(data), rows: state.rows.rows, total: state.rows.total,
      tree: own ? { id: "id", parent: "none" } : { id: "id", parent: "parent" }, sort: own ? { key: "time", descending: true } : null,
    });
    for (const button of state.own_buttons.children) button.setAttribute("aria-pressed", String((button.dataset.id === "self") === own));
    drawSum(data);
  }

  /** Says that the rows add up; counted in whole nanoseconds. */
  function drawSum(data) {
    const total = Math.round(data.time.total_us * 1000);
    const text = ns => page.format.us(ns / 1000 / data.page.steps);
    const same = total === state.rows.sum;
    state.sum.classList.toggle("notice", !same);
    state.sum.textContent = same
      ? `✓ ${state.own ? "All rows" : "The rows without indentation"} add up to the total to the nanosecond: ${text(state.rows.sum)} = ${text(total)} ${data.page.per}.`
      : `The rows add up to ${text(state.rows.sum)}, the total is ${text(total)}: ${page.format.us(Math.abs(total - state.rows.sum) / 1000)} differ.`;
  }

  function missing(data, section) {
    const whys = [["retained", page.why("memory", "not available")], ["flops", page.why("flops", "not available")]].filter(([key, why]) => why && state.rows.rows.every(row => !isKnown(row[key])));
    for (const [, why] of whys) page.note(section, why);
  }

  function rowClass(row) {
    return row.group ? "group" : row.row;
  }

  /** At least so many FLOPs, where those of an op inside are not known. */
  const drawWork = why => (row, cell) => {
    if (row.flops !== null || !isKnown(row.known_flops)) return false;
    cell.append(`≥ ${page.format.flops(row.known_flops)}`);
    cell.title = page.full(`at least: ${why(row)}`);
    return true;
  };

  /** At least so much time, where kernels that it launched are not in the trace. */
  const drawTime = (row, cell) => {
    if (row.lost_launches) cell.append("≥ ");
    return false;
  };

  function columns(data) {
    const before = "those of kernels launched before the trace are not known";
    const noWork = page.why("flops", "not available") || "the FLOPs of an op inside are not known, or steps are not alike";
    const work = row => row.row === "total" && data.unattributed.length ? before : noWork;
    const roof = page.why("peak is known") || noWork;
    const whys = { work, roof, memory: page.why("memory", "not available") || "no allocation was recorded in it" };
    const label = {
      key: "label", title: "Layer", kind: "text", sets: "main time work memory", cell: drawName,
      value: row => row.row === "total" ? undefined : row.group ? row.group.full : row.layer || row.label,
    };
    const asked = { outside: ["work", "roof"], total: ["work"], unattributed: [] }; // of rows that are no layers
    const isAsked = (row, column) => row.row in asked ? asked[row.row].includes(column.why) : column.key !== "retained" || row.calls; // without a forward nothing is kept for backward
    const shown = column => ({
      ...column, missing: whys[column.why], cell: { flops: drawWork(work), time: drawTime }[column.key],
      bar: column.key === "share", like: column.kind === "us" && column.key !== "time" ? "time" : undefined,
      // Of what does not say why it is missing, there is none.
      value: row => isKnown(row[column.key]) ? row[column.key] : column.needs && !isKnown(row[column.needs]) && isAsked(row, column) ? null : undefined,
    });
    const all = [label, ...data.views.layers.columns.map(shown), { key: "class_name", title: "Class", kind: "text", sets: "memory" }];
    const used = column => ["label", "time", "share"].includes(column.key) || state.rows.rows.some(row => {
      const value = column.value ? column.value(row) : row[column.key];
      return isKnown(value) && value !== 0 && value !== "";
    });
    return all.filter(column => column.sets.includes(state.set) && used(column));
  }

  function drawName(row, cell) {
    const name = page.element("span", "name", page.cut(row.label, 60));
    name.title = page.full(`${row.layer || row.label}${row.class_name ? ` (${page.cut(row.class_name, 200)})` : ""}`);
    cell.append(name);
    if (row.group) drawSpread(row, cell);
    else if (row.class_name && row.class_name !== row.label.replace(/_\d+$/, "")) cell.append(page.element("span", "quiet", " " + page.cut(row.class_name, 32)));
    for (const flag of row.flags) cell.append(page.element("span", "flag", flag));
    return true;
  }

  /** Of a group: its outliers, the median, the range: where there is little room, the last is cut. */
  function drawSpread(row, cell) {
    const outliers = row.group.outliers;
    outliers.slice(0, 2).forEach(one => {
      const link = page.link("layers", one.layer, "");
      const name = shortName(one.layer, row.parent);
      const excess = Math.abs(one.excess) < 9 ? `${one.excess > 0 ? "+" : ""}${page.format.number(Math.round(100 * one.excess))} %` : `×${page.format.number(1 + one.excess)}`;
      link.textContent = `outlier: ${name} ${one.what === "time" ? "" : "retained "}${excess}`;
      link.className = "outlier";
      cell.append(" ", link);
    });
    if (outliers.length > 2) cell.append(page.element("span", "quiet", ` and ${outliers.length - 2} more`));
    const times = row.members.map(member => member.time);
    const { text, unit } = page.columnFormat("us", times);
    const range = `${text(Math.min(...times))}–${text(Math.max(...times))}`;
    cell.append(page.element("span", "quiet", ` ${times.length}×, median ${text(page.median(times))} ${unit} (${range})`));
  }

  /** Its name below `parent`; of a long one the number alone, which is its own. */
  function shortName(layer, parent) {
    const below = parent && layer.startsWith(parent + ".") ? layer.slice(parent.length + 1) : layer;
    const numbers = below.match(/\d+/g);
    return below.length > 14 && numbers ? numbers[numbers.length - 1] : page.cut(below, 40);
  }

  // ---- the address --------------------------------------------------------------------------------------------------

  /** A layer's name unfolds and selects it, a folded name its group; anything else is searched for. */
  function filter(text) {
    const { table } = state;
    if (!text) { if (table.query) table.search(""); return; }
    const known = state.rows.layers.has(text) ? text : null;
    const group = state.rows.groups.find(one => one.full === text || one.label === text);
    if (known || group) { table.reveal(known || group.row.id); return; }
    table.search(text.replace(/\{[^}]*\}/g, " "));
  }
})();
