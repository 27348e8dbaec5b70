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
 *   page.timedColumns(data, rows, per)   the columns of these times; the one to sort by first
 */
(function () {
  const MOST_ROWS = 200; // of which a result holds the dearest: where there are as many, some may be missing

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
