/** The bars of a timeline of many ranks: a lane for each rank; what lies over what. Microseconds since the first. */
import type { PageData } from "../page_data";

/** Bars of one kind in one lane, in the order of time. */
export interface Run {
  kind: string;
  level: number; // higher ones lie over lower ones
  starts: Float64Array;
  ends: Float64Array;
}

export interface Lanes {
  ranks: readonly number[];
  names: readonly string[];
  steps: readonly { number: number; begin: number }[];
  runs: readonly (readonly Run[])[]; // of each lane, the undermost first
  kinds: readonly string[];
  end: number;
  opensAt: readonly [from: number, to: number];
}

export function lanesOf(data: PageData): Lanes {
  const { ranks, lanes, steps, begins_us: begins, bars, opens_at: opens } = data["timeline"];
  const runs: Run[][] = lanes.map(() => []);
  let end = 1;
  (bars as { kind: string; lanes: number[]; starts_us: number[]; lengths_us: number[] }[]).forEach((one, level) => {
    const places = new Map<number, number[]>();
    one.lanes.forEach((lane, i) => {
      const found = places.get(lane);
      if (found) found.push(i);
      else places.set(lane, [i]);
    });
    for (const [lane, rows] of places) {
      const starts = Float64Array.from(rows, i => one.starts_us[i]!);
      const ends = Float64Array.from(rows, i => one.starts_us[i]! + one.lengths_us[i]!);
      runs[lane]!.push({ kind: one.kind, level, starts, ends });
      for (const value of ends) end = Math.max(end, value);
    }
  });
  const begun = (steps as number[]).map((number, i) => ({ number, begin: begins[i] as number | null })).filter((one): one is { number: number; begin: number } => one.begin !== null);
  const [first, last] = [(opens as number[])[0], (opens as number[]).at(-1)].map(number => begun.findIndex(one => one.number === number)) as [number, number];
  const opensAt = first < 0 ? ([0, end] as const) : ([begun[first]!.begin, begun[last + 1]?.begin ?? end] as const);
  const order = [...Object.keys(data["page"].colors.kind), "layer"];
  const kinds = [...new Set(bars.map((one: { kind: string }) => one.kind) as string[])].sort((a, b) => order.indexOf(a) - order.indexOf(b));
  return { ranks, names: lanes, steps: begun, runs, kinds, end, opensAt };
}

/** The first of ascending `ends` that is after `time`. */
export function firstAfter(ends: Float64Array, time: number): number {
  let [low, high] = [0, ends.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (ends[middle]! <= time) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** What is seen of a lane in a stretch of time: of each kind how long it lies uppermost; "" is in no span. Adds up to it. */
export function seen(runs: readonly Run[], from: number, to: number): Map<string, number> {
  const edges: [at: number, run: number, change: number][] = [];
  runs.forEach((run, number) => {
    if (run.kind === "layer") return; // a frame around what is seen
    for (let i = firstAfter(run.ends, from); i < run.starts.length && run.starts[i]! < to; i++) edges.push([Math.max(from, run.starts[i]!), number, 1], [Math.min(to, run.ends[i]!), number, -1]);
  });
  edges.sort((a, b) => a[0] - b[0]);
  const open = runs.map(() => 0);
  const found = new Map<string, number>();
  let before = from;
  for (const [at, run, change] of [...edges, [to, -1, 0] as const]) {
    if (at > before) {
      const top = open.findLastIndex(count => count > 0);
      const kind = top < 0 ? "" : runs[top]!.kind;
      found.set(kind, (found.get(kind) ?? 0) + at - before);
      before = at;
    }
    if (run >= 0) open[run]! += change;
  }
  return found;
}
