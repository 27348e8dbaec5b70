"use strict";
/**
 * Times of calls whose inputs only the steps with shapes know, in the timed steps. Both are shown, each under its name:
 * steps with shapes are warm-up steps, and slower.
 *
 *   page.shapesAreTimed(data)     whether shapes were recorded in the timed steps themselves: there is one time then
 *   page.shaped(data, rows)       {rows, per}: rows of calls with shapes and what they are over: one step, or all steps where
 *       those are not alike and have shapes themselves, as in generation, where a mean of prefill and decode is neither
 *   page.timed(rows, keyOf, timeOf)   `rows` with `timed_us`: what the timed steps took per step for all rows of a key,
 *       which `timeOf(key, rows)` gives (null where not known), divided among them as in the steps with shapes
 *   page.byLayers(data, products)   `products` with `timed_us`, from what the timed steps took for each op and phase and for
 *       each layer and phase themselves
 *   page.timedColumns(data, rows, per)   the columns of these times; the one to sort by first
 */
(function () {
  const CLOSE = 0.9; // of its layers' self time an op takes at least so much: then no part is wrong by more than the rest
  const MOST_ROWS = 200; // of which a result holds the longest: where there are as many, some may be missing

  page.shapesAreTimed = data => Boolean(data.summary && data.summary.comparable && data.summary.comparable.shapes_in_timed_steps);

  page.shaped = function (data, rows) {
    const steps = data.page.step_numbers.length;
    if (!page.shapesAreTimed(data) || data.page.like_steps || steps < 2) return { rows, per: "per step" };
    const all = rows.map(row => ({ ...row, calls_per_step: row.calls_per_step * steps, time_per_step_us: row.time_per_step_us * steps }));
    return { rows: all, per: `in all ${steps} steps` };
  };

  page.timed = function (rows, keyOf, timeOf) {
    const isWhole = rows.length < MOST_ROWS;
    return [...page.grouped(rows, keyOf)].flatMap(([key, group]) => {
      const time = isWhole ? timeOf(key, group) : null;
      const total = page.sum(group, "time_per_step_us");
      return group.map(row => ({ ...row, timed_us: time === null || !total ? null : time * row.time_per_step_us / total }));
    });
  };

  /**
   * An op's time is that of its row among the operators, where as many calls of it are known by their sizes. It is divided
   * as in the steps with shapes, but no layer's products take more than the layer itself: steps with shapes are cold, and
   * their first products slow. Not known where most of what these layers take is other work, as then it is not known how much
   * of it is whose.
   */
  page.byLayers = function (data, products) {
    const unknown = rows => rows.map(row => ({ ...row, timed_us: null }));
    if (products.length >= MOST_ROWS) return unknown(products);
    const inLayer = page.grouped(products, layerKey);
    const own = new Map(data.layers.map(row => [layerKey(row), page.meanStep(row.self_time_us)]));
    const most = row => own.has(layerKey(row)) ? own.get(layerKey(row)) * row.time_per_step_us / (page.sum(inLayer.get(layerKey(row)), "time_per_step_us") || 1) : null;
    const operators = new Map(data.operators.map(row => [opKey(row), row]));
    return [...page.grouped(products, opKey)].flatMap(([key, rows]) => {
      const calls = page.sum(rows, "calls_per_step");
      const timed = operators.get(key);
      const time = timed && Math.abs(page.meanStep(timed.calls) - calls) < 0.01 * calls ? page.meanStep(timed.time_us) : null;
      const parts = time === null ? null : divided(time, rows.map(row => row.time_per_step_us), new Set(rows.map(row => row.layer)).size > 1 ? rows.map(most) : null);
      return parts ? rows.map((row, i) => ({ ...row, timed_us: parts[i] })) : unknown(rows);
    });
  };

  const layerKey = row => JSON.stringify([row.layer, row.phase]);
  const opKey = row => JSON.stringify([row.op, row.phase]);

  /** `time` in the proportions of `weights`, none over its `most`: what is over goes to the others; null where not known. */
  function divided(time, weights, most) {
    const sum = values => values.reduce((total, value) => total + value, 0);
    if (!sum(weights)) return null;
    if (!most) return weights.map(weight => time * weight / sum(weights));
    if (most.some(bound => bound === null) || time < CLOSE * sum(most) || time > 1.001 * sum(most)) return null;
    const parts = weights.map(() => null);
    for (;;) {
      const left = time - sum(parts.filter(part => part !== null));
      const free = sum(weights.filter((_, i) => parts[i] === null));
      const over = weights.map((weight, i) => parts[i] === null && left * weight > most[i] * free);
      if (!over.includes(true)) return parts.map((part, i) => part === null ? free ? left * weights[i] / free : 0 : part);
      over.forEach((is, i) => { if (is) parts[i] = most[i]; });
    }
  }

  page.timedColumns = function (data, rows, per) {
    const withShapes = { key: "time_per_step_us", title: "Time with shapes", kind: "us", help: "per step, in the steps with shapes: warm-up steps, which are slower" };
    if (page.shapesAreTimed(data)) return [{ ...withShapes, title: "Time", help: `${per}, which are timed` }];
    if (!rows.some(row => row.timed_us !== null)) return [withShapes];
    return [
      { key: "timed_us", title: "Time", kind: "us", help: "per step, in the timed steps", missing: "which part of the timed steps it took is not known" },
      { ...withShapes, like: "timed_us" },
    ];
  };
})();
