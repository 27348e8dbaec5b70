"use strict";
/**
 * What several views are made of.
 *
 *   page.perStep(value)           a sum over the timed trace as that of one step; what is not known stays so
 *   page.per()                    "per step", or "over the whole trace" where steps are not alike or there are none
 *   page.meanStep(value)          a sum over the timed trace as the mean of its steps, alike or not: for what stands beside
 *                                 numbers per step, such as those of the steps with shapes
 *   page.sum(rows, key)           of what is known; null where nothing is
 *   page.mean(values)             of numbers
 *   page.grouped(rows, keyOf)     Map of key -> rows, in order of first appearance
 *   page.categoryName(name)       what memory is for, as people read it
 *   page.timeName()               what times are: "Device time", or "Wall time of ops" without a device
 *   page.first(lists, most)       what stands in several lists, once each, at most so many
 *   page.UNKNOWN_IN_TRACE         why a value is missing that another trace has
 *   page.inOrder(layers)          names of layers, once each, in the order of the model
 *   page.whyNot(words, otherwise) the warning of the run that holds these words
 *   page.marked(name, color)      a name with its colour before it
 *   page.markCell(key, color)     the `cell` of a column with such names; lists are shown one after another
 *   page.columns.time(key, title, help, more) ...   columns that most tables have
 *   page.stepTimes(data)          what the steps took: {label, times: [µs], of: Map of step -> µs}. That is until both the
 *                                 CPU and the devices are done; of a result without it the CPU spans, and `label` says so
 *   page.attentionElsewhere(data)   attention without a layer, {time_us over all steps, reason}, or null: no row of
 *                                 `attention` has it, and the class attention does
 *   page.chartIn(element, traces, layout, config)   a chart whose place is taken at once, without tools in bar charts
 *   page.shares(element, {title, parts: [{name, value, color, help}], format, onClick, help})   one bar of many parts
 */
(function () {
  const known = value => value !== null && value !== undefined;

  page.perStep = value => known(value) ? value / page.data.page.steps : value;
  page.per = () => page.data.page.per;
  page.meanStep = value => known(value) ? value / Math.max(1, page.data.page.step_numbers.length) : value;

  page.UNKNOWN_IN_TRACE = "not known from the trace";

  page.sum = function (rows, key) {
    let total = null;
    for (const row of rows) if (known(row[key])) total = (total || 0) + row[key];
    return total;
  };

  page.mean = values => values.reduce((sum, value) => sum + value, 0) / values.length;

  page.grouped = function (rows, keyOf) {
    const groups = new Map();
    for (const row of rows) {
      const key = keyOf(row);
      if (groups.has(key)) groups.get(key).push(row); else groups.set(key, [row]);
    }
    return groups;
  };

  page.timeName = () => page.data.page.time_name.replace(/^./, letter => letter.toUpperCase());
  page.categoryName = name => page.data.page.category_names[name] || name;
  page.first = (lists, most = 5) => [...new Set(lists.flat())].slice(0, most);

  let orders = null;
  page.inOrder = function (layers) {
    orders = orders || new Map(page.rows("layers").map(row => [row.layer, row.order]));
    const place = layer => orders.has(layer) ? orders.get(layer) : Infinity;
    return [...new Set(layers)].sort((a, b) => place(a) - place(b) || 0);
  };

  page.whyNot = (words, otherwise) => (page.data.warnings || []).find(text => text.includes(words)) || otherwise;

  page.marked = function (name, color) {
    const mark = page.element("span", "mark");
    mark.style.background = color;
    return page.element("span", "", mark, page.cut(name, 60));
  };

  page.markCell = (key, color) => (row, cell) => {
    const names = [row[key]].flat().filter(name => known(name) && name !== "");
    if (!names.length) return false;
    names.forEach((name, i) => page.add(cell, i ? " " : null, page.marked(name, color(name))));
    return true;
  };

  page.columns = {
    time: (key, title, help, more) => ({ key, title, kind: "us", help, value: row => page.perStep(row[key]), ...more }),
    count: (key, title, help, more) => ({ key, title, kind: "count", help, value: row => page.perStep(row[key]), ...more }),
    share: (key, title, help, total, more) => ({ key: "share", title, kind: "share", help, bar: true, value: row => known(row[key]) && total ? row[key] / total : row[key] === undefined ? undefined : null, ...more }),
    class: () => ({ key: "class", title: "Class", kind: "text", cell: page.markCell("class", page.color.class), help: "What kind of work it is" }),
    phase: more => ({ key: "phase", title: "Phase", kind: "text", cell: page.markCell("phase", page.color.phase), missing: "the phase is not known", ...more }),
    layers: (key = "layers", title = "Layers") => ({ key, title, kind: "layer", help: "Innermost layers, those with most of it first; a click shows the layer", missing: "the layer is not known" }),
  };

  page.stepTimes = function (data) {
    const windows = ((data.overview && data.overview.steps) || []).filter(split => split.step !== null);
    if (windows.length) return { label: "Step time", of: new Map(windows.map(split => [split.step, split.span_us])), times: windows.map(split => split.span_us) };
    const mean = data.utilization && data.utilization.step_time_us;
    if (known(mean)) return { label: "Step time", of: new Map(), times: [mean] };
    const spans = data.steps.filter(row => row.step !== null && known(row.span_us));
    return { label: "CPU span", of: new Map(), times: spans.map(row => row.span_us) };
  };

  page.attentionElsewhere = function (data) {
    const all = page.sum(data.classes.filter(row => row.class === "attention"), "time_us") || 0;
    const rest = all - (page.sum(data.attention, "time_us") || 0);
    if (rest < 0.001) return null;
    const reasons = data.unattributed.filter(row => row.time_us > 0).map(row => row.reason);
    return { time_us: rest, reason: reasons.length === 1 ? reasons[0] : "without a layer" };
  };

  page.chartIn = function (element, traces, layout, config) {
    const place = page.element("div");
    element.append(place);
    const modebar = () => ({ bgcolor: "rgba(0,0,0,0)", color: page.soft(), activecolor: page.ink() });
    const remove = ["select2d", "lasso2d", "autoScale2d", "sendChartToCloud", "copyLink"];
    return page.chart(place, traces, () => ({ modebar: { ...modebar(), remove }, ...layout() }), config);
  };

  page.shares = function (element, { title, parts, format, onClick, help }) {
    const shown = parts.filter(part => part.value > 0);
    const total = shown.reduce((sum, part) => sum + part.value, 0);
    const figure = page.element("figure", "shares");
    figure.style.margin = "0.5rem 0";
    const caption = page.text("figcaption", title);
    if (help) caption.title = help;
    const bar = page.element("div", "");
    Object.assign(bar.style, { display: "flex", height: "16px", borderRadius: "3px", overflow: "hidden", margin: "0.2rem 0" });
    const legend = page.element("div", "legend");
    for (const part of shown) {
      const says = `${part.name}: ${format(part.value)}, ${page.format.share(part.value / total)}`;
      const piece = page.element("div", "");
      Object.assign(piece.style, { width: 100 * part.value / total + "%", background: part.color, minWidth: "1px" });
      piece.title = page.full(part.help ? `${says}. ${part.help}` : says);
      bar.append(piece);
      const label = page.marked(part.name, part.color);
      page.add(label, ` ${format(part.value)} (${page.format.share(part.value / total)})`);
      label.title = piece.title;
      if (onClick) {
        const button = page.element("button", "", label);
        button.type = "button";
        button.dataset.part = part.id || part.name;
        button.addEventListener("click", () => onClick(part.id || part.name, button));
        piece.addEventListener("click", () => onClick(part.id || part.name, button));
        piece.style.cursor = "pointer";
        legend.append(button);
      } else legend.append(label);
    }
    page.add(figure, caption, bar, legend);
    element.append(figure);
    return figure;
  };
})();
