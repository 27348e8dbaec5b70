/** Where the page shows what a finding or the verdict is about. Only what is in the data: no link finds nothing. */
import { grouped, onDevice, rowsOf, sum } from "./basis";
import { isKnown } from "./format";
import { columnOf, type PageData, type Row } from "./page_data";
import type { Place, Selection } from "./state";

export interface Target {
  to: Place;
  select?: Selection; // none: the place as a whole
  part?: string; // of the step's bar, whose makings are unfolded
  kind: string; // what it is, in a word
  name: string;
}

/** A gap of the timeline, as targets need it. */
export interface GapOf {
  row: number;
  durationNs: number;
  cause: string;
}

// Of rules: the words of the causes of those gaps that they are about; all of them where there are no such gaps.
const GAPS: Readonly<Record<string, RegExp>> = {
  "low-utilization": /./, "launch-bound": /launch/i, "outside-ops": /python/i, "dataloader-bound": /dataloader/i,
  "synchronisation": /wait/i, "graph-break": /python/i,
};
const KERNELS: Readonly<Record<string, (row: Row) => boolean>> = {
  "communication-bound": row => row["class"] === "communication",
  "exposed-communication": row => row["class"] === "communication",
  "slow-backend": row => row["class"] === "communication",
  "data-parallel": row => /^Memcpy|communication/.test(`${row["name"]} ${row["class"]}`),
  "unpinned-copies": row => /HtoD.*Pageable/.test(String(row["name"])),
  "many-small-kernels": row => row["class"] === "elementwise",
  "unfused-elementwise": row => row["class"] === "elementwise",
  "tensor-cores-unused": row => row["class"] === "gemm" && row["tensor_cores"] === false,
  "no-tf32": row => row["class"] === "gemm" && row["tensor_cores"] === false,
  "attention-fallback": row => row["class"] === "softmax",
};
const OPS: Readonly<Record<string, (row: Row) => boolean>> = {
  "graph-break": row => /^Torch-Compiled Region/.test(String(row["op"])),
  "slow-optimizer": row => row["phase"] === "optimizer",
  "communication-bound": row => row["class"] === "communication",
  "exposed-communication": row => row["class"] === "communication",
  "slow-backend": row => row["class"] === "communication",
};
const OF_MEMORY = /^(memory-nearly-full|fragmentation|memory-leak|recompute-would-help|recompute-not-needed|allocation-too-large)$/;

export const findingsOf = (data: PageData): Row[] => data["summary"]?.findings ?? [];

/** What a finding is called in the address: its rule; of several by one rule with their number. */
export function findingName(data: PageData, finding: Row): string {
  const alike = findingsOf(data).filter(one => one["id"] === finding["id"]);
  return alike.length > 1 ? `${finding["id"]}:${alike.indexOf(finding) + 1}` : String(finding["id"]);
}

export const findingNamed = (data: PageData, name: string): Row | undefined => findingsOf(data).find(one => findingName(data, one) === name);

/** Most to the point first. */
export function targetsOf(data: PageData, finding: Row, gaps: readonly GapOf[] | null): Target[] {
  const rule = String(finding["id"]);
  const found: (Target | null)[] = [];
  if (Object.hasOwn(GAPS, rule)) found.push(longestGap(gaps, GAPS[rule]!));
  const layers = layersOf(data, finding);
  if (OF_MEMORY.test(rule) && data["memory"]?.peak) found.push({ to: "memory", kind: "memory", name: "the peak" });
  const kernel = Object.hasOwn(KERNELS, rule) ? largest(rowsOf(data, "kernels").filter(KERNELS[rule]!), "name", "time_us") : null;
  const op = opOf(data, finding, rule);
  const byLayer = layers.length ? ofLayer(layers[0]!, layers.length) : null;
  const byKernel: Target | null = kernel === null ? null : { to: "kernels", select: { kind: "kernel", name: kernel }, kind: "kernel", name: kernel };
  const byOp: Target | null = op === null ? null : { to: "kernels", select: { kind: "op", name: op }, kind: "op", name: op };
  found.push(...(kernel && !/^(attention|many|unfused)/.test(rule) ? [byKernel, byOp, byLayer] : [byLayer, byKernel, byOp]));
  if (Object.hasOwn(GAPS, rule) && data["overview"]?.steps.length) found.push(ofIdle(data));
  return found.filter(isKnown);
}

/** What the step does where nothing works: a part of its bar. */
export const ofIdle = (data: PageData): Target => (onDevice(data) ? { to: "step", part: "idle", kind: "idle time", name: "of the step" } : { to: "step", part: "other", kind: "part of the step", name: "between ops" });

const ofLayer = (name: string, count: number): Target => ({
  to: "layers", select: { kind: "layer", name }, kind: "layer", name: count > 1 ? `${name} and ${count - 1} more` : name,
});

/** The longest gap with such a cause, else the longest of all. */
export function longestGap(gaps: readonly GapOf[] | null, cause: RegExp): Target | null {
  const such = (gaps ?? []).filter(gap => cause.test(gap.cause));
  const longest = (such.length ? such : (gaps ?? [])).reduce<GapOf | null>((most, gap) => (most && most.durationNs >= gap.durationNs ? most : gap), null);
  return longest && { to: "step", select: { kind: "gap", number: longest.row }, kind: "gap", name: longest.cause };
}

function opOf(data: PageData, finding: Row, rule: string): string | null {
  if (rule === "synchronisation") {
    const waits = rowsOf(data, "synchronisations").filter(row => String(finding["title"]).includes(` in ${row["op"]} `));
    const op = largest(waits, "op", "wait_us");
    return op && rowsOf(data, "operators").some(row => row["op"] === op) ? op : null;
  }
  return Object.hasOwn(OPS, rule) ? largest(rowsOf(data, "operators").filter(OPS[rule]!), "op", "self_time_us") : null;
}

/** The name with most of `measure` in all its rows. */
export function largest(rows: Row[], key: string, measure: string): string | null {
  const all = [...grouped(rows, row => row[key] as string)].map(([name, group]) => [name, sum(group, measure) ?? 0] as const);
  return all.length ? all.reduce((most, one) => (one[1] > most[1] ? one : most))[0] : null;
}

const layersFound = new WeakMap<Row, string[]>();

/** Layers that a finding names, folded or cut, those with most time first. */
export function layersOf(data: PageData, finding: Row): string[] {
  const before = layersFound.get(finding);
  if (before) return before;
  const named = (finding["layers"] as string[] | undefined)?.length ? (finding["layers"] as string[]) : finding["layer"] ? [finding["layer"] as string] : [];
  const found = matching(data, named);
  layersFound.set(finding, found);
  return found;
}

export function matching(data: PageData, named: readonly string[]): string[] {
  const time = new Map<string, number>();
  const times = columnOf(data, "layers", "time_us") as number[];
  (columnOf(data, "layers", "layer") as string[]).forEach((layer, i) => { if (layer) time.set(layer, (time.get(layer) ?? 0) + times[i]!); });
  const found = new Set<string>();
  for (const name of named) {
    if (time.has(name)) { found.add(name); continue; }
    const pattern = foldedPattern(name);
    const such = [...time.keys()].filter(layer => pattern.test(layer));
    // Of a name that was cut the layers next below where it was cut, not all that is in them.
    const depth = Math.min(...such.map(layer => layer.split(".").length));
    for (const layer of such) if (layer.split(".").length === depth) found.add(layer);
  }
  return [...found].sort((a, b) => time.get(b)! - time.get(a)!);
}

/** `model.layers.{0..31}.self_attn`, `x.{0,2,5}`, and what was cut: `model.layers.{0..31}.self_at...` */
function foldedPattern(name: string): RegExp {
  const cutAt = /(\{[^}]*)?(\.\.\.|…)$/.exec(name);
  const whole = cutAt ? name.slice(0, cutAt.index) : name;
  const pattern = whole.split(/(\{[^{}]*\})/).map(part => (/^\{/.test(part) ? "\\d+" : part.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"))).join("");
  return new RegExp(`^${pattern}${cutAt ? ".*" : ""}$`);
}

