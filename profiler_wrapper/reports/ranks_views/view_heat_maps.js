"use strict";
/** Heat maps: ranks by kinds of time and by blocks, and the mesh. */
(function () {
  const DIFFERENCE = [[0, "#053061"], [0.25, "#4393c3"], [0.5, "#f7f7f7"], [0.75, "#d6604d"], [1, "#67001f"]];

  function most(map) {
    let largest = 0;
    for (const row of map.values_ms) for (const value of row) if (value !== null) largest = Math.max(largest, Math.abs(value));
    return largest || 1;
  }

  function traces(map, data) {
    const floor = map.is_difference ? 0.05 * (data.job.step_ms_per_step || 0) / (map === data.heat[0] ? 1 : map.rows.length) : 0; // small differences stay pale
    const widest = Math.max(most(map), floor);
    return [{
      type: "heatmap", z: map.values_ms, x: map.ranks.map((_, i) => i), y: map.rows.map((_, i) => i),
      colorscale: map.is_difference ? DIFFERENCE : "Viridis", ...(map.is_difference ? { zmin: -widest, zmax: widest } : {}),
      text: map.rows.map(row => map.ranks.map(rank => `${map.across} ${rank}, ${page.plain(`${map.down} ${row}`.trim())}`)),
      hovertemplate: "%{text}: %{z:.4g} ms<extra></extra>", colorbar: { title: { text: "ms" } },
    }];
  }

  /** Numbers of ranks below, so many that they can be read; those that are named always. */
  function ticks(map, marked) {
    const every = Math.ceil(map.ranks.length / 32);
    const some = map.ranks.map((_, i) => i).filter(i => marked.includes(i) || (i % every === 0 && marked.every(one => Math.abs(one - i) >= every || every === 1)));
    const red = page.culpritColor();
    return { tickvals: some, ticktext: some.map(i => marked.includes(i) ? `<b><span style="color:${red}">${map.ranks[i]}</span></b>` : String(map.ranks[i])) };
  }

  function markedColumns(map, data) {
    if (map.across === "stage") return data.job.verdict === "stage" ? map.ranks.flatMap((stage, i) => stage === data.job.stage ? [i] : []) : [];
    if (map.across !== "rank") return [];
    const last = Math.max(...data.job.ranks.map(row => row.rank));
    return map.ranks.flatMap((first, i) => data.named.some(rank => rank >= first && rank < (i + 1 < map.ranks.length ? map.ranks[i + 1] : last + 1)) ? [i] : []);
  }

  function layout(map, data) {
    const marked = markedColumns(map, data).slice(0, 64);
    return {
      height: 110 + 22 * Math.min(40, Math.max(3, map.rows.length)),
      xaxis: { title: { text: { stage: "pipeline stage" }[map.across] || map.across }, showgrid: false, zeroline: false, ...ticks(map, marked.slice(0, 8)) },
      yaxis: { title: { text: { dp: "data parallel" }[map.down] || map.down }, autorange: "reversed", showgrid: false, zeroline: false, ...rowTicks(map) },
      shapes: marked.map(i => ({ type: "rect", x0: i - 0.5, x1: i + 0.5, y0: -0.5, y1: map.rows.length - 0.5, line: { color: page.culpritColor(), width: 2 }, fillcolor: "rgba(0,0,0,0)" })),
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
