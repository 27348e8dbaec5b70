"use strict";
/** Heat maps: ranks by kinds of time and by blocks, and the mesh. */
(function () {
  const DIFFERENCE = [[0, "#053061"], [0.25, "#4393c3"], [0.5, "#f7f7f7"], [0.75, "#d6604d"], [1, "#67001f"]];

  function most(map) {
    let largest = 0;
    for (const row of map.values_ms) for (const value of row) if (value !== null) largest = Math.max(largest, Math.abs(value));
    return largest || 1;
  }

  /** Few cells have their numbers in them: of differences those that are not next to nothing. */
  const isSmall = map => map.ranks.length <= 16 && map.ranks.length * map.rows.length <= 160;
  const short = value => Math.abs(value) >= 100 ? value.toFixed(0) : Math.abs(value) >= 1 ? value.toFixed(1) : value.toFixed(2);

  function numbers(map, widest) {
    if (!isSmall(map)) return {};
    const least = map.is_difference ? widest / 20 : 0;
    return { text: map.values_ms.map(row => row.map(value => value === null || Math.abs(value) < least ? "" : short(value))), texttemplate: "%{text}" };
  }

  const least = map => Math.min(...map.values_ms.flat().filter(value => value !== null));

  function traces(map, data) {
    const floor = map.is_difference ? 0.05 * (data.job.step_ms_per_step || 0) / (map === data.heat[0] ? 1 : map.rows.length) : 0; // small differences stay pale
    const widest = Math.max(most(map), floor);
    const each = map.ranks.length > 1 && map.across === "rank" && map.ranks.length < data.job.ranks.length;
    const names = map.ranks.map((rank, i) => each ? `${map.across}s ${rank} to ${inside(map, i, data).at(-1)}` : `${map.across} ${rank}`);
    return [{
      type: "heatmap", z: map.values_ms, x: map.ranks.map((_, i) => i), y: map.rows.map((_, i) => i),
      colorscale: map.is_difference ? DIFFERENCE : "Viridis", ...(map.is_difference ? { zmin: -widest, zmax: widest } : { zmin: Math.min(least(map), widest / 2), zmax: widest }),
      ...numbers(map, widest),
      hovertext: map.rows.map(row => names.map(name => `${name}, ${page.plain(`${map.down} ${row}`.trim())}`)),
      hovertemplate: "%{hovertext}: %{z:.4g} ms<extra></extra>", colorbar: { title: { text: "ms" } },
    }];
  }

  const frame = (column, y0, y1) => ({ type: "rect", x0: column - 0.5, x1: column + 0.5, y0, y1, line: { color: page.culpritColor(), width: 2 }, fillcolor: "rgba(0,0,0,0)" });

  /** The number of the highest cell beside it, where that is much: more than a twentieth of a step. */
  function largest(map, data) {
    if (!map.is_difference || isSmall(map)) return [];
    const parts = map === data.heat[0] ? 1 : map.rows.length;
    let best = { value: 0.05 * (data.job.step_ms_per_step || 0) / parts };
    map.values_ms.forEach((row, y) => row.forEach((value, x) => { if (value !== null && value >= best.value) best = { value, x, y }; }));
    if (best.x === undefined) return [];
    const right = best.x < 0.8 * map.ranks.length;
    return [{ x: best.x + (right ? 0.5 : -0.5), y: best.y, xanchor: right ? "left" : "right", showarrow: false, text: `<b>+${page.format.us(best.value * 1000)}</b>`, font: { color: page.culpritColor() } }];
  }

  /** The ranks of a column: from its first to before the next one's. */
  const inside = (map, i, data) => data.job.ranks.map(row => row.rank).filter(rank => rank >= map.ranks[i] && (i + 1 === map.ranks.length || rank < map.ranks[i + 1]));

  /** What stands below a column: its first rank, or the one in it that is named. */
  function label(map, i, data) {
    if (map.across !== "rank") return map.ranks[i];
    const named = inside(map, i, data).find(page.isNamed);
    return named === undefined ? map.ranks[i] : named;
  }

  /** Numbers of ranks below, so many that they can be read; those that are named always. */
  function ticks(map, marked, data) {
    const every = Math.ceil(map.ranks.length / 32);
    const some = map.ranks.map((_, i) => i).filter(i => marked.includes(i) || (i % every === 0 && marked.every(one => Math.abs(one - i) >= every || every === 1)));
    const red = page.culpritColor();
    return { tickvals: some, ticktext: some.map(i => marked.includes(i) ? `<b><span style="color:${red}">${label(map, i, data)}</span></b>` : String(map.ranks[i])) };
  }

  function markedColumns(map, data) {
    if (map.across !== "rank") return [];
    return map.ranks.flatMap((first, i) => data.named.some(rank => rank >= first && (i + 1 === map.ranks.length || rank < map.ranks[i + 1])) ? [i] : []);
  }

  function layout(map, data) {
    const marked = markedColumns(map, data).slice(0, 64);
    const thin = map.ranks.length > 128; // a frame would hide what is in it
    return {
      height: 110 + 22 * Math.min(40, Math.max(3, map.rows.length)),
      xaxis: { title: { text: { stage: "pipeline stage" }[map.across] || map.across }, showgrid: false, zeroline: false, ...ticks(map, marked.slice(0, 8), data) },
      yaxis: { title: { text: { dp: "data parallel" }[map.down] || map.down }, autorange: "reversed", showgrid: false, zeroline: false, ...rowTicks(map) },
      shapes: [
        ...(thin ? [] : marked.map(i => frame(i, -0.5, map.rows.length - 0.5))),
        ...(map.named || []).slice(0, 256).map(([row, column]) => frame(column, row - 0.5, row + 0.5)),
      ],
      annotations: [
        ...(thin ? marked.map(i => ({ x: i, y: 1, yref: "paper", yanchor: "bottom", showarrow: false, text: "▼", font: { color: page.culpritColor() } })) : []),
        ...largest(map, data),
      ],
    };
  }

  function rowTicks(map) {
    const every = Math.ceil(map.rows.length / 40);
    const some = map.rows.map((_, i) => i).filter(i => i % every === 0);
    return { tickvals: some, ticktext: some.map(i => page.plain(page.cut(map.rows[i], 40))) };
  }

  page.view({
    id: "heat",
    title: "Heat maps",
    order: 30,
    applies: data => data.heat.length ? null : "no rank has a step",
    draw(data, element) {
      for (const map of data.heat) {
        const section = page.section(element, map.title);
        if (map.across === "rank" && map.ranks.length < data.job.ranks.length) page.note(section, "Several ranks a column: the one farthest from 0.");
        page.chartIn(section, () => traces(map, data), () => layout(map, data));
      }
    },
  });
})();
