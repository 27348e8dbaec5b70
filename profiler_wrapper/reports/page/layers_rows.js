"use strict";
/**
 * The rows of the layer table, as the package has summed them: a layer with its phases side by side, like siblings as one
 * group, what is outside all layers, and what has none. Times are microseconds per step (of all steps where steps are not
 * alike).
 */
(function () {
  const isKnown = value => value !== null && value !== undefined;

  /**
   * All rows of the table.
   * @returns {{rows: object[], layers: Map, groups: object[], total: object, sum: number}} `sum`: nanoseconds of the outermost rows
   */
  page.layerRows = function (data, { own }) {
    const view = data.views.layers;
    if (view.failed) throw new Error(view.failed);
    const rows = own ? view.self : view.total;
    const layers = new Map(rows.filter(row => row.layer).map(row => [row.layer, row]));
    const groups = own ? [] : view.groups.map(group => ({ ...group }));
    for (const row of rows) {
      const group = groups[row.fold];
      if (!group) continue;
      Object.assign(row, { group, members: group.layers.map(layer => layers.get(layer)) });
      group.row = row;
    }
    return { rows, layers, groups, total: view.whole, sum: view.sum_ns[own ? "self" : "total"] };
  };
})();
