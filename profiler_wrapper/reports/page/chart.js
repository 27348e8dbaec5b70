"use strict";
/**
 * Charts. Plotly stands in the page as text and becomes a script when the first chart needs it.
 *
 *   page.chart(element, traces, layout, config) -> Promise of the chart's element; `traces` and `layout` may be
 *       functions that return them, which are asked again when the theme changes
 *   page.plain(text)          a name for Plotly, which reads some HTML in texts
 *   page.color.phase(name), page.color.class(name), page.color.category(name), page.color.split(name), page.color.kind(name)
 *   page.inkOn(color)         black or white, whichever is read more easily on it
 *   page.ink(), page.soft(), page.line()   colours of the theme
 *   page.bars(element, {title, values, labels, format, color, outliers, marked, short, onClick})   a small bar chart without Plotly
 *   page.legend(element, [[name, color], ...])
 */
(function () {
  const drawn = new Set();
  let loaded = false;

  const styleOf = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  page.ink = () => styleOf("--ink");
  page.soft = () => styleOf("--soft");
  page.line = () => styleOf("--line");
  page.paper = () => styleOf("--paper");

  const FALLBACK = "#999999";
  const colorOf = kind => name => ((page.data.page.colors || {})[kind] || {})[name] || FALLBACK;
  page.color = { phase: colorOf("phase"), class: colorOf("class"), category: colorOf("category"), split: colorOf("split"), kind: colorOf("kind") };

  page.plain = text => page.cut(text, 120).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

  /** Black or white, whichever is read more easily on `color`. */
  page.inkOn = function (color) {
    const [red, green, blue] = [1, 3, 5].map(at => parseInt(color.slice(at, at + 2), 16) / 255)
      .map(light => light <= 0.04045 ? light / 12.92 : ((light + 0.055) / 1.055) ** 2.4);
    const luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue; // as WCAG 2 defines contrast
    return (luminance + 0.05) ** 2 > 1.05 * 0.05 ? "#000000" : "#ffffff";
  };

  function loadPlotly() {
    if (loaded) return;
    loaded = true;
    const script = document.createElement("script");
    script.textContent = document.getElementById("plotly").textContent;
    document.head.append(script);
  }

  page.chart = async function (element, traces, layout, config) {
    await new Promise(done => setTimeout(done, 0)); // what is already there shows first
    loadPlotly();
    const place = page.element("div", "chart");
    element.append(place);
    const asked = thing => typeof thing === "function" ? thing() : thing;
    const draw = () => window.Plotly.react(place, asked(traces), themed(asked(layout) || {}), { displaylogo: false, responsive: true, ...config });
    await draw();
    drawn.add(draw);
    place.dataset.drawn = "true"; // for who has to wait for it
    return place;
  };

  function themed(layout) {
    const axis = { gridcolor: page.line(), zerolinecolor: page.line(), linecolor: page.line(), automargin: true };
    const axes = Object.keys(layout).filter(name => /^[xy]axis\d*$/.test(name));
    const themedAxes = Object.fromEntries([...new Set(["xaxis", "yaxis", ...axes])].map(name => [name, { ...axis, ...layout[name] }]));
    return {
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      margin: { l: 56, r: 12, t: 28, b: 40 },
      height: 320,
      ...layout,
      ...themedAxes,
      font: { color: page.ink(), size: 12, family: "system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif", ...layout.font },
      hoverlabel: { align: "left", ...layout.hoverlabel },
    };
  }

  window.addEventListener("themechange", () => { for (const draw of drawn) draw(); });

  const SVG = "http://www.w3.org/2000/svg";
  function shape(name, attributes) {
    const element = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, String(value));
    return element;
  }

  /**
   * One small bar chart: a bar for each value, from 0, with the median as a line; `outliers` (a set of indices) stand out and
   * are named by `short(index)`.
   * Values that are null leave a gap.
   */
  page.bars = function (element, { title, values, labels, format, color, outliers = new Set(), marked = new Set(), onClick, help, short }) {
    const width = 300;
    const height = 48;
    const known = values.filter(value => value !== null && value !== undefined);
    const most = Math.max(...known, 0) || 1;
    const figure = page.element("figure", "bars");
    const caption = page.text("figcaption", title);
    caption.title = [`median ${format(page.median(known))}, ${known.length ? `${format(Math.min(...known))} to ${format(Math.max(...known))}` : ""}`, help].filter(Boolean).join(". ");
    const middle = median(known);
    page.add(caption, page.text("span", known.length ? said(outliers, short || (i => i)) + (known.length > 1 ? "median " : "") + format(middle) : "not known", "quiet"));
    const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img" });
    svg.setAttribute("aria-label", `${title}: ${values.length} values`);
    const step = width / values.length;
    values.forEach((value, i) => {
      if (value === null || value === undefined) return;
      const size = Math.max(value > 0 ? 1 : 0, value / most * (height - 4));
      const bar = shape("rect", { x: i * step + step * 0.1, y: height - size, width: step * 0.8, height: size, class: outliers.has(i) ? "outlier" : "" });
      if (color && !outliers.has(i)) bar.style.fill = color;
      const hover = shape("rect", { x: i * step, y: 0, width: step, height, class: "hover" });
      const tip = document.createElementNS(SVG, "title");
      tip.textContent = `${page.full(labels[i])}: ${format(value)}`;
      hover.append(tip);
      if (onClick) hover.addEventListener("click", () => onClick(i));
      svg.append(bar, hover);
      if (marked.has(i)) svg.append(shape("rect", { x: i * step, y: height - 3, width: step, height: 3, class: "marked" }));
    });
    if (known.length) svg.append(shape("line", { x1: 0, x2: width, y1: height - middle / most * (height - 4), y2: height - middle / most * (height - 4), class: "median" }));
    page.add(figure, caption, svg);
    element.append(figure);
    return figure;
  };

  /** Which bars are outliers, by number: not everybody sees colours. */
  function said(outliers, short) {
    if (!outliers.size) return "";
    const first = [...outliers].slice(0, 3).map(short).join(", ");
    return `outlier${outliers.size > 1 ? "s" : ""}: ${first}${outliers.size > 3 ? " …" : ""}; `;
  }

  /** Places of values over 20 % and 5 robust deviations off the median; as in the text table. */
  page.outliers = function (values) {
    const far = new Set();
    const known = values.filter(value => value !== null && value !== undefined);
    if (known.length < 3 || known.length < values.length) return far;
    const middle = median(known);
    if (middle <= 0) return far;
    const most = Math.max(0.2 * middle, 5 * 1.4826 * median(known.map(value => Math.abs(value - middle))));
    values.forEach((value, i) => { if (Math.abs(value - middle) > most) far.add(i); });
    return far;
  };

  function median(values) {
    if (!values.length) return 0;
    const sorted = [...values].sort((a, b) => a - b);
    const half = sorted.length >> 1;
    return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
  }
  page.median = median;

  page.legend = function (element, entries) {
    const legend = page.element("div", "legend");
    for (const [name, color] of entries) {
      const mark = page.element("span", "mark");
      mark.style.background = color;
      legend.append(page.element("span", "", mark, name));
    }
    element.append(legend);
  };
})();
