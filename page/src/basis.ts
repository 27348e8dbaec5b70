/** Per step or over the whole trace: what the numbers of the page are of, and small sums over rows of a result. */
import { capital, isKnown } from "./format";
import type { PageData, Row } from "./page_data";

/** A sum over the timed trace as that of one step, where steps are alike; what is not known stays so. */
export function perStep<T extends number | null | undefined>(data: PageData, value: T): T {
  return (isKnown(value) ? (value as number) / data["page"].steps : value) as T;
}

/** "per step", or "over the whole trace" where steps are not alike or there are none. */
export const per = (data: PageData): string => data["page"].per;

/** A sum over the timed trace as the mean of its steps, alike or not: for what stands beside numbers per step. */
export function meanStep<T extends number | null | undefined>(data: PageData, value: T): T {
  return (isKnown(value) ? (value as number) / Math.max(1, data["page"].step_numbers.length) : value) as T;
}

/** What times are: "Device time", or "Wall time of ops" without a device. */
export const timeName = (data: PageData): string => capital(data["page"].time_name);
export const onDevice = (data: PageData): boolean => data["time_basis"] === "device";
export const categoryName = (data: PageData, name: string): string => data["page"].category_names[name] ?? name;

/** The rows of a list of result.json, or none. */
export const rowsOf = (data: PageData, name: string): Row[] => data[name] ?? [];

/** Of what is known; null where nothing is. */
export function sum(rows: readonly Row[], key: string): number | null {
  let total: number | null = null;
  for (const row of rows) if (isKnown(row[key])) total = (total ?? 0) + (row[key] as number);
  return total;
}

export const mean = (values: readonly number[]): number => values.reduce((total, value) => total + value, 0) / values.length;

/** In order of first appearance. */
export function grouped<T, K>(rows: Iterable<T>, keyOf: (row: T) => K): Map<K, T[]> {
  const groups = new Map<K, T[]>();
  for (const row of rows) {
    const key = keyOf(row);
    const group = groups.get(key);
    if (group) group.push(row);
    else groups.set(key, [row]);
  }
  return groups;
}

/** The first warning of the run with all of `words` in it: why something is not known. */
export function why(data: PageData, ...words: string[]): string | null {
  const warnings: string[] = data["warnings"] ?? [];
  return warnings.find(one => words.every(word => one.toLowerCase().includes(word.toLowerCase()))) ?? null;
}

export interface StepTimes {
  label: string;
  of: ReadonlyMap<number, number>; // number of a step -> microseconds
  times: readonly number[];
}

/** What the steps took: until both the CPU and the devices are done; of a result without it their spans on the CPU. */
export function stepTimes(data: PageData): StepTimes {
  const windows = ((data["overview"]?.steps ?? []) as Row[]).filter(split => split["step"] !== null);
  if (windows.length) {
    const of = new Map(windows.map(split => [split["step"] as number, split["span_us"] as number]));
    return { label: "Step time", of, times: [...of.values()] };
  }
  const one = data["utilization"]?.step_time_us;
  if (isKnown(one)) return { label: "Step time", of: new Map(), times: [one as number] };
  const spans = rowsOf(data, "steps").filter(row => row["step"] !== null && isKnown(row["span_us"]));
  return { label: "CPU span", of: new Map(), times: spans.map(row => row["span_us"] as number) };
}

/** Names of layers, once each, in the order of the model. */
export function inOrder(data: PageData, layers: Iterable<string>): string[] {
  const orders = new Map(rowsOf(data, "layers").map(row => [row["layer"] as string, row["order"] as number]));
  return [...new Set(layers)].sort((a, b) => (orders.get(a) ?? 1e9) - (orders.get(b) ?? 1e9));
}

/** Attention without a layer, over all steps, or null: no row of `attention` has it, and the class attention does. */
export function attentionElsewhere(data: PageData): { time_us: number; reason: string } | null {
  const all = sum(rowsOf(data, "classes").filter(row => row["class"] === "attention"), "time_us") ?? 0;
  const rest = all - (sum(rowsOf(data, "attention"), "time_us") ?? 0);
  if (rest < 0.001) return null;
  const reasons = rowsOf(data, "unattributed").filter(row => (row["time_us"] as number) > 0);
  return { time_us: rest, reason: reasons.length === 1 ? (reasons[0]!["reason"] as string) : "without a layer" };
}
