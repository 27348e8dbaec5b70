/** Rows of the kernel table: one a kernel, which unfolds into its launch configurations; or groups that unfold into kernels. */
import { grouped, perStep, rowsOf, sum } from "./basis";
import { isIn } from "./cells";
import { clean, cut } from "./format";
import type { PageData, Row } from "./page_data";
import type { Selection } from "./state";
import type { Timeline } from "./timeline/data";

/** Time of one kernel, or op without a device, in one layer, phase and step. */
export interface Piece {
  name: string;
  class: string;
  layer: string; // or why it has none
  isLayer: boolean;
  phase: string;
  step: number | null;
  stream: string;
  time_ns: number;
  count: number;
}

const OUTSIDE = "(outside all layers)";
export const UNKNOWN_LAYER = "(layer not known)";
const made = new WeakMap<Timeline, Piece[]>();

/** All of the run, as Python has added it up. */
export function pieces(of: Timeline): Piece[] {
  let found = made.get(of);
  if (!found) {
    const [name, layer, phase, kind, step, count] = ["name", "layer", "phase", "class", "step", "count"].map(column => of.sums.column(column)) as [Int32Array, Int32Array, Int32Array, Int32Array, Int32Array, Int32Array];
    found = Array.from({ length: of.sums.count }, (_, i): Piece => ({
      ...placed(of, name[i]!, layer[i]!, phase[i]!, kind[i]!), step: of.head.steps[step[i]!]?.number ?? null, stream: "", time_ns: of.sums.time_ns[i]!, count: count[i]!,
    }));
    made.set(of, found);
  }
  return found;
}

/** Of the events that are drawn: their streams are in no sum. */
export function streamPieces(of: Timeline): Piece[] {
  const found: Piece[] = [];
  const step = of.events.column("step");
  for (let row = 0; row < of.events.count; row++) {
    if (!of.isOnDevice(row)) continue;
    const lane = of.head.lanes[of.lane[row]!]!;
    found.push({
      ...placed(of, of.name[row]!, of.layer[row]!, of.phase[row]!, of.class[row]!), step: of.head.steps[step[row]!]?.number ?? null,
      stream: lane.name, time_ns: of.events.duration_ns[row]!, count: 1,
    });
  }
  return found;
}

function placed({ head }: Timeline, name: number, layer: number, phase: number, kind: number): Pick<Piece, "name" | "layer" | "isLayer" | "phase" | "class"> {
  return { name: head.names[name] ?? "", layer: head.layers[layer] ?? (layer === -1 ? OUTSIDE : UNKNOWN_LAYER), isLayer: layer >= 0, phase: head.phases[phase] ?? "other", class: head.classes[kind] ?? "other" };
}

/** Whether a piece is of what is selected; null: a piece cannot tell. */
export function pieceTest(data: PageData, chosen: Selection | null): ((piece: Piece) => boolean) | null {
  if (chosen?.kind === "layer") return piece => piece.isLayer && isIn(data, piece.layer, chosen.name);
  if (chosen?.kind === "kernel") return piece => piece.name === chosen.name;
  if (chosen?.kind === "step") return piece => piece.step === chosen.number;
  return null;
}

/** The same of a row of the result, which names only some of its layers and ops. */
export function rowTest(data: PageData, chosen: Selection | null): ((row: Row) => boolean) | null {
  if (chosen?.kind === "layer") return row => (row["layers"] as string[]).some(layer => isIn(data, layer, chosen.name));
  if (chosen?.kind === "kernel") return row => row["name"] === chosen.name;
  if (chosen?.kind === "op") return row => (row["ops"] as string[]).includes(chosen.name);
  return null;
}

export const isKernel = (row: Row): boolean => row["copied_bytes"] === null && !/^Mem(cpy|set)\b/i.test(row["name"] as string);
export const coresOf = (row: Row): "yes" | "no" | "unknown" | "none" => (!isKernel(row) ? "none" : row["tensor_cores"] === null ? "unknown" : row["tensor_cores"] ? "yes" : "no");

const keyOf = (row: { name?: unknown; class?: unknown }): string => `${row["name"]}\0${row["class"]}`;
const first = (lists: unknown[], most: number): unknown[] => [...new Set(lists.flat())].slice(0, most);

/** One row a kernel and class; those with several launch configurations unfold. Times and counts per step. */
export function kernelRows(data: PageData, rows: readonly Row[], parent: string | null = null): Row[] {
  return [...grouped(rows, keyOf)].flatMap(([key, group]) => {
    const id = parent === null ? key : `${parent}\0${key}`;
    const all = { ...mergedKernel(data, group), id, parent };
    if (group.length < 2) return [all];
    return [all, ...group.map((row, i) => ({ ...ofStep(data, row), id: `${id}\0${i}`, parent: id, launch: launchOf(row) }))];
  });
}

function ofStep(data: PageData, row: Row): Row {
  return { ...row, count: perStep(data, row["count"] as number), time_us: perStep(data, row["time_us"] as number), copied_bytes: perStep(data, row["copied_bytes"] as number | null) };
}

/** What differs between the launches of one kernel is left out of the row of all. */
function mergedKernel(data: PageData, group: Row[]): Row {
  const time = sum(group, "time_us") ?? 0;
  const meanBy = (key: string): number | null =>
    group.every(row => row[key] !== null) ? group.reduce((total, row) => total + (row[key] as number) * (row["time_us"] as number), 0) / (time || 1) : null;
  const same = (key: string): unknown => (group.every(row => String(row[key]) === String(group[0]![key])) ? group[0]![key] : undefined);
  const each = (key: string): number[] => group.map(row => row[key] as number);
  return ofStep(data, {
    ...group[0], count: sum(group, "count"), time_us: time, min_us: Math.min(...each("min_us")), max_us: Math.max(...each("max_us")),
    ...Object.fromEntries(["grid", "block", "registers_per_thread", "shared_memory_bytes"].map(key => [key, same(key)])),
    blocks_per_sm: meanBy("blocks_per_sm"), occupancy: meanBy("occupancy"), copied_bytes: sum(group, "copied_bytes"),
    ops: first(group.map(row => row["ops"]), 3), layers: first(group.map(row => row["layers"]), 3), layer_count: Math.max(...group.map(row => (row["layer_count"] as number) || 0)),
  });
}

function launchOf(row: Row): string {
  const size = (key: string): string => (row[key] as number[] | null)?.join("×") ?? "";
  const parts = [size("grid") && `grid ${size("grid")}`, size("block") && `block ${size("block")}`];
  return parts.filter(Boolean).join(", ") || `${cut(clean(row["name"]), 40)} without a launch configuration`;
}

/** Rows of kernels from pieces; what is only known of all launches, as occupancy, is that of all. */
export function rowsOfPieces(data: PageData, found: readonly Piece[], steps: number, parent: string | null = null): Row[] {
  const known = kernelsByKey(data);
  return [...grouped(found, keyOf)].map(([key, group]) => {
    const all = known.get(key);
    const layers = [...grouped(group.filter(piece => piece.isLayer), piece => piece.layer)].map(([layer, of]) => [layer, of.reduce((total, piece) => total + piece.time_ns, 0)] as const);
    layers.sort((a, b) => b[1] - a[1]);
    return {
      id: parent === null ? key : `${parent}\0${key}`, parent, name: group[0]!.name, class: group[0]!.class, tensor_cores: all?.["tensor_cores"], copied_bytes: all ? all["copied_bytes"] : null,
      occupancy: all?.["occupancy"], ops: all?.["ops"], layers: layers.map(([layer]) => layer), layer_count: layers.length,
      ...totals(group, steps),
    };
  });
}

function totals(group: readonly Piece[], steps: number): { time_us: number; count: number } {
  const time_ns = group.reduce((total, piece) => total + piece.time_ns, 0);
  return { time_us: time_ns / 1000 / steps, count: group.reduce((total, piece) => total + piece.count, 0) / steps };
}

const byKey = new WeakMap<PageData, Map<string, Row>>();

function kernelsByKey(data: PageData): ReadonlyMap<string, Row> {
  let found = byKey.get(data);
  if (!found) byKey.set(data, (found = new Map([...grouped(rowsOf(data, "kernels"), keyOf)].map(([key, group]) => [key, mergedKernel(data, group)]))));
  return found;
}

/** A row for each group, which unfolds into the kernels of it. */
export function groupsOfPieces(data: PageData, found: readonly Piece[], steps: number, groupOf: (piece: Piece) => string): Row[] {
  return [...grouped(found, groupOf)].flatMap(([group, of]) => [
    { id: `\0${group}`, parent: null, group, isLayer: of[0]!.isLayer, ...totals(of, steps) }, ...rowsOfPieces(data, of, steps, `\0${group}`),
  ]);
}

/** The same of kernels of the result. */
export function groupsOfKernels(data: PageData, rows: readonly Row[], groupOf: (row: Row) => string): Row[] {
  return [...grouped(rows, groupOf)].flatMap(([group, of]) => [
    { id: `\0${group}`, parent: null, group, time_us: perStep(data, sum(of, "time_us")), count: perStep(data, sum(of, "count")) },
    ...kernelRows(data, of, `\0${group}`),
  ]);
}
