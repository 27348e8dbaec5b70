"use strict";
/** Small charts over the blocks of a model, one for each measure, so that an outlier among them shows. */
(function () {
  const isKnown = value => value !== null && value !== undefined;

  /**
   * @param {object} rows of page.layerRows
   * @param {(layer: string) => void} onClick
   */
  page.blockCharts = function (data, rows, element, onClick) {
    const groups = blockGroups(rows);
    if (!groups.length) return;
    const section = page.section(element, "Blocks side by side", "One bar a block; what is far from the others stands out");
    const place = page.element("div", "multiples");
    if (groups.length > 1) {
      const choice = document.createElement("select");
      choice.setAttribute("aria-label", "Which blocks");
      groups.forEach((group, i) => {
        const option = page.text("option", `${group.full} (${group.layers.length})`);
        option.value = String(i);
        choice.append(option);
      });
      choice.addEventListener("change", () => drawGroup(data, groups[Number(choice.value)], place, onClick));
      section.append(choice);
    } else section.querySelector("h2").append(page.text("span", ` ${groups[0].full}`, "quiet"));
    page.note(section, `Times and FLOPs ${page.per()}. A dashed line is the median, a bar in another colour is an outlier, by the block's median step; a click shows the block's row.`);
    section.append(place);
    drawGroup(data, groups[0], place, onClick);
  };

  /** Groups of blocks that are in no other group, the most time first; without blocks, the groups there are. */
  function blockGroups(rows) {
    const members = group => group.row.members || [];
    const blocks = rows.groups.filter(group => members(group).some(member => member.kind === "block"));
    const chosen = blocks.length ? blocks : rows.groups;
    const inside = new Set(chosen.flatMap(group => group.layers));
    const isInner = group => {
      for (let above = group.parent; above; above = rows.layers.get(above)?.above) if (inside.has(above)) return true;
      return false;
    };
    return chosen.filter(group => !isInner(group) && members(group).length > 2).sort((a, b) => b.row.time - a.row.time).slice(0, 12);
  }

  /** The number in the block's name: it need not be its place. */
  function numberOf(member, place) {
    const numbers = member.layer.match(/\d+/g);
    return numbers ? numbers[numbers.length - 1] : place;
  }

  function drawGroup(data, group, place, onClick) {
    const { members } = group.row;
    const measures = [
      ...data.page.phases.map(phase => [phase, member => member[phase] || 0, page.format.us, page.color.phase(phase)]),
      ["attention", member => member.attention || 0, page.format.us, page.color.class("attention")],
      ["exposed comm.", member => member.exposed, page.format.us, page.color.class("communication")],
      ["retained", member => member.retained, page.format.bytes, page.color.category("activation")],
      ["FLOPs", member => member.flops, page.format.flops, page.color.split("other")],
    ];
    place.replaceChildren();
    const named = group.outliers.map(one => members.findIndex(member => member.layer === one.layer)); // as in the table
    for (const [title, value, format, color] of measures) {
      const values = members.map(value);
      if (!values.some(one => isKnown(one) && one > 0)) continue;
      const outliers = new Set([...named, ...(title === "retained" || title === "FLOPs" ? page.outliers(values) : [])]);
      page.bars(place, {
        title, values, format, color, outliers, labels: members.map(member => member.layer), onClick: i => onClick(members[i].layer), short: i => numberOf(members[i], i),
        help: outliers.size ? `Outliers: ${[...outliers].slice(0, 8).map(i => page.cut(members[i].layer, 60)).join(", ")}` : "",
      });
    }
  }
})();
