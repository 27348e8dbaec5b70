/**
 * Times of calls whose inputs only the steps with shapes know, in the timed steps. Both are shown, each under its name:
 * steps with shapes are warm-up steps, and slower.
 */
import { grouped, meanStep, rowsOf, sum } from "./basis";
import type { PageData, Row } from "./page_data";
import type { Column } from "./table";

const CLOSE = 0.9; // of its layers' self time an op takes at least so much: then no part is wrong by more than the rest
const MOST_ROWS = 200; // of which a result holds the longest: where there are as many, some may be missing

const time = (row: Row): number => row["time_per_step_us"] as number;
export const keyOf = (...keys: string[]) => (row: Row): string => JSON.stringify(keys.map(key => row[key]));

/** Whether shapes were recorded in the timed steps themselves: there is one time then. */
export const shapesAreTimed = (data: PageData): boolean => Boolean(data["summary"]?.comparable?.shapes_in_timed_steps);

/**
 * Rows of calls with shapes and what they are over: one step, or all steps where those are not alike and have shapes
 * themselves, as in generation, where a mean of prefill and decode is neither.
 */
export function shaped(data: PageData, rows: readonly Row[]): { rows: readonly Row[]; per: string } {
  const steps: number = data["page"].step_numbers.length;
  if (!shapesAreTimed(data) || data["page"].like_steps || steps < 2) return { rows, per: "per step" };
  return { rows: rows.map(row => ({ ...row, calls_per_step: (row["calls_per_step"] as number) * steps, time_per_step_us: time(row) * steps })), per: `in all ${steps} steps` };
}

/** `rows` with `timed_us`: what `timeOf` says of a key's rows in the timed steps, divided as in the steps with shapes. */
export function timed(rows: readonly Row[], keys: string[], timeOf: (key: string) => number | null): Row[] {
  const isWhole = rows.length < MOST_ROWS;
  return [...grouped(rows, keyOf(...keys))].flatMap(([key, group]) => {
    const all = isWhole ? timeOf(key) : null;
    const total = sum(group, "time_per_step_us");
    return group.map(row => ({ ...row, timed_us: all === null || !total ? null : (all * time(row)) / total }));
  });
}

/**
 * `products` with `timed_us`. An op's time is that of its row among the operators, where as many calls of it are known by
 * their sizes. It is divided as in the steps with shapes, but no layer's products take more than the layer itself: steps
 * with shapes are cold, and their first products slow. Not known where most of what these layers take is other work, as
 * then it is not known how much of it is whose.
 */
export function byLayers(data: PageData, products: readonly Row[]): Row[] {
  const unknown = (rows: readonly Row[]): Row[] => rows.map(row => ({ ...row, timed_us: null }));
  if (products.length >= MOST_ROWS) return unknown(products);
  const [layerKey, opKey] = [keyOf("layer", "phase"), keyOf("op", "phase")];
  const inLayer = grouped(products, layerKey);
  const own = new Map(rowsOf(data, "layers").map(row => [layerKey(row), meanStep(data, row["self_time_us"] as number)]));
  const most = (row: Row): number | null => {
    const self = own.get(layerKey(row));
    return self === undefined ? null : (self * time(row)) / (sum(inLayer.get(layerKey(row)) ?? [], "time_per_step_us") || 1);
  };
  const operators = new Map(rowsOf(data, "operators").map(row => [opKey(row), row]));
  return [...grouped(products, opKey)].flatMap(([key, rows]) => {
    const calls = sum(rows, "calls_per_step") ?? 0;
    const operator = operators.get(key);
    const isWhole = operator && Math.abs(meanStep(data, operator["calls"] as number) - calls) < 0.01 * calls;
    const bounds = new Set(rows.map(row => row["layer"])).size > 1 ? rows.map(most) : null;
    const parts = isWhole ? divided(meanStep(data, operator["time_us"] as number), rows.map(time), bounds) : null;
    return parts ? rows.map((row, i) => ({ ...row, timed_us: parts[i] })) : unknown(rows);
  });
}

/** `whole` in the proportions of `weights`, none over its `most`: what is over goes to the others; null where not known. */
function divided(whole: number, weights: readonly number[], most: readonly (number | null)[] | null): number[] | null {
  const all = (values: readonly (number | null)[]): number => values.reduce<number>((total, value) => total + (value ?? 0), 0);
  if (!all(weights)) return null;
  if (!most) return weights.map(weight => (whole * weight) / all(weights));
  if (most.includes(null) || whole < CLOSE * all(most) || whole > 1.001 * all(most)) return null;
  const parts: (number | null)[] = weights.map(() => null);
  for (;;) {
    const left = whole - all(parts);
    const free = all(weights.filter((_, i) => parts[i] === null));
    const over = weights.map((weight, i) => parts[i] === null && left * weight > most[i]! * free);
    if (!over.includes(true)) return parts.map((part, i) => part ?? (free ? (left * weights[i]!) / free : 0));
    over.forEach((is, i) => { if (is) parts[i] = most[i]!; });
  }
}

/** The columns of these times; the one to sort by first. */
export function timedColumns(data: PageData, rows: readonly Row[], per: string): Column<Row>[] {
  const withShapes: Column<Row> = { key: "time_per_step_us", title: "Time with shapes", kind: "us", help: "per step, in the steps with shapes: warm-up steps, which are slower" };
  if (shapesAreTimed(data)) return [{ ...withShapes, title: "Time", help: `${per}, which are timed` }];
  if (!rows.some(row => row["timed_us"] != null)) return [withShapes];
  return [
    { key: "timed_us", title: "Time", kind: "us", help: "per step, in the timed steps", missing: "which part of the timed steps it took is not known" },
    { ...withShapes, like: "timed_us" },
  ];
}

/** Sums of the times of rows that are alike, where all are known. */
export function timesOf(group: readonly Row[]): Row {
  const isKnown = group.every(row => row["timed_us"] !== null && row["timed_us"] !== undefined);
  return { calls_per_step: sum(group, "calls_per_step"), time_per_step_us: sum(group, "time_per_step_us"), timed_us: isKnown ? sum(group, "timed_us") : null };
}
