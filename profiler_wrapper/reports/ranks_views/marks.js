"use strict";
/**
 * What the views of many ranks share.
 *
 *   page.ofRank(rank)             "rank 3"; those that the verdict names are marked
 *   page.rankCell(key)            the `cell` of a column with the number of a rank
 *   page.msColumn(key, title, more)   a column of milliseconds
 *   page.culpritColor()
 *   page.rankBars(element, data)  small bar charts over all ranks: self time, waiting, peak memory and MFU; outliers
 *                                 stand out, a mark is below those that the verdict names, and what is not known says why
 */
(function () {
  const MS = 1000; // in µs, which the tables format
  const MOST_BARS = 200; // of a small chart

  const DARK = { gc: "#FFFFFF", waiting: "#3B424C", culprit: "#FF6B6B" }; // these would not be seen, or be all that is
  const onLight = page.color.kind;
  page.color.kind = name => (document.documentElement.dataset.theme === "dark" && DARK[name]) || onLight(name);

  page.culpritColor = () => page.color.kind("culprit");
  page.isNamed = rank => page.data.named.includes(rank);

  page.msColumn = (key, title, more) => ({
    key, title, kind: "us", ...more,
    value: row => { const value = more && more.of ? more.of(row) : row[key]; return value === null || value === undefined ? value : value * MS; },
  });

  const known = value => value !== null && value !== undefined;

  page.rankBars = function (element, data) {
    const rows = data.job.ranks;
    if (rows.length < 2) return;
    const own = row => Object.values(row.own_ms_per_step).reduce((sum, value) => sum + (value || 0), 0) * MS;
    const named = new Set(rows.flatMap((row, i) => page.isNamed(row.rank) ? [i] : []));
    const each = Math.ceil(rows.length / MOST_BARS);
    const columns = Array.from({ length: Math.ceil(rows.length / each) }, (_, at) => rows.slice(at * each, (at + 1) * each).map((_, i) => at * each + i));
    const place = page.element("div", "multiples");
    place.style.setProperty("--outlier", page.culpritColor());
    place.style.gridTemplateColumns = "repeat(auto-fit, minmax(18rem, 1fr))";
    const unknown = data.job.unknown || {};
    const draw = (title, of, format, help) => {
      const values = rows.map(of);
      const middle = page.median(values.filter(known));
      const far = i => known(values[i]) ? Math.abs(values[i] - middle) : -1;
      const shown = columns.map(column => column.find(i => named.has(i)) ?? column.reduce((best, i) => far(i) > far(best) ? i : best));
      const marked = new Set(shown.flatMap((i, at) => named.has(i) ? [at] : []));
      const drawn = shown.map(i => values[i]);
      if (values.some(known)) page.bars(place, { title, values: drawn, labels: shown.map(i => `rank ${rows[i].rank}`), format, outliers: page.outliers(drawn), marked, help, short: at => `rank ${rows[shown[at]].rank}` });
    };
    draw("Self time", own, page.format.us, "of a step: what a rank did itself");
    draw("Waiting", row => known(row.waiting_ms_per_step) ? row.waiting_ms_per_step * MS : null, page.format.us, "of a step: for others, in communication");
    draw("Peak memory", row => row.peak_bytes, page.format.bytes, "the highest allocated");
    draw("MFU", row => row.mfu, page.format.share, "model FLOPs utilization of a step");
    element.append(place);
    if (each > 1) page.note(element, `${each} ranks a bar: the one that the verdict names, else the one farthest from the median.`);
    const reasons = [["Peak memory", unknown.peak_bytes], ["MFU", unknown.mfu]].filter(([, why]) => why);
    if (reasons.length === 2 && reasons[0][1] === reasons[1][1]) page.note(element, `Peak memory and MFU are not known: ${reasons[0][1]}`);
    else for (const [what, why] of reasons) page.note(element, `${what} is not known: ${why}`);
  };

  page.rankCell = key => (row, cell) => {
    const rank = row[key];
    if (rank === null || rank === undefined || !page.isNamed(rank)) return false;
    const text = page.text("strong", `${rank}`);
    text.style.color = page.culpritColor();
    text.title = "named by the verdict";
    page.add(cell, "▸ ", text);
    return true;
  };
})();
