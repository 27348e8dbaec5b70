/** What lies in a stretch of time: the one thing that the page adds up itself. */
import type { Timeline, Track } from "./data";

export interface Sum {
  name: string;
  time_ns: number;
  count: number;
}

export interface RangeSums {
  from_ns: number;
  to_ns: number;
  length_ns: number;
  time_ns: number; // of all that the others share out: the device's, or self time of ops without one
  lanes: Sum[]; // when anything runs in each
  layers: Sum[];
  names: Sum[]; // kernels, or ops
  phases: Sum[];
  classes: Sum[];
  idle: { device: number; time_ns: number }[]; // within what is drawn
  drawn_ns: number;
}

export const NO_LAYER = "(no layer)";

export function rangeSums(timeline: Timeline, from: number, to: number): RangeSums {
  const { head } = timeline;
  const sums = {
    layers: new Map<string, Sum>(), names: new Map<string, Sum>(), phases: new Map<string, Sum>(), classes: new Map<string, Sum>(),
  };
  let total = 0;
  const add = (row: number, time: number): void => {
    total += time;
    addTo(sums.layers, head.layers[timeline.layer[row]!] ?? NO_LAYER, time);
    addTo(sums.names, head.names[timeline.name[row]!] ?? "", time);
    addTo(sums.phases, head.phases[timeline.phase[row]!] ?? "other", time);
    addTo(sums.classes, head.classes[timeline.class[row]!] ?? "other", time);
  };
  head.lanes.forEach((lane, i) => {
    if (lane.kind === (head.device ? "stream" : "thread")) for (const [row, time] of ownTimes(timeline, timeline.tracks[i]!, from, to)) add(row, time);
  });
  const drawn = timeline.drawn().map(([start, end]) => cutTo([start, end], from, to)).filter(([start, end]) => end > start);
  return {
    from_ns: from,
    to_ns: to,
    length_ns: to - from,
    time_ns: total,
    lanes: laneSums(timeline, from, to),
    layers: largestFirst(sums.layers),
    names: largestFirst(sums.names),
    phases: largestFirst(sums.phases),
    classes: largestFirst(sums.classes),
    idle: devices(timeline).map(device => ({ device, time_ns: idle(timeline, device, drawn) })),
    drawn_ns: covered(drawn),
  };
}

function addTo(sums: Map<string, Sum>, name: string, time: number): void {
  const sum = sums.get(name);
  if (!sum) sums.set(name, { name, time_ns: time, count: 1 });
  else {
    sum.time_ns += time;
    sum.count++;
  }
}

const largestFirst = (sums: Map<string, Sum>): Sum[] => [...sums.values()].sort((a, b) => b.time_ns - a.time_ns || (a.name < b.name ? -1 : 1));

function cutTo([start, end]: readonly [number, number], from: number, to: number): [number, number] {
  return [Math.max(start, from), Math.min(end, to)];
}

/** Calls `take` with each row that touches the stretch, and how much of it lies within. */
function eachIn(tracks: readonly Track[], from: number, to: number, take: (row: number, time: number) => void): void {
  for (const track of tracks) {
    for (let i = track.firstAfter(from - 1); i < track.rows.length && track.start[i]! < to; i++) {
      const time = Math.min(track.end[i]!, to) - Math.max(track.start[i]!, from);
      if (time > 0 || (time === 0 && track.length(i) === 0)) take(track.rows[i]!, time);
    }
  }
}

/** How long each event with a class runs in the stretch; on a CPU without those with a class that it encloses. */
function ownTimes(timeline: Timeline, tracks: readonly Track[], from: number, to: number): Map<number, number> {
  const own = new Map<number, number>();
  eachIn(tracks, from, to, (row, time) => {
    if (timeline.class[row]! >= 0) own.set(row, (own.get(row) ?? 0) + time);
    if (timeline.class[row]! < 0 || timeline.isOnDevice(row)) return;
    for (const around of timeline.outwards(timeline.parent[row]!)) {
      if (timeline.class[around]! < 0) continue; // a mark: what encloses it does not know of it
      own.set(around, (own.get(around) ?? 0) - time);
      break;
    }
  });
  return own;
}

/** When anything of each lane runs, each stretch once, and how many events. */
export function laneSums(timeline: Timeline, from = -Infinity, to = Infinity): Sum[] {
  return timeline.head.lanes.map((lane, i) => {
    const tracks = timeline.tracks[i]!;
    const stretches: [number, number][] = [];
    // What a thread encloses adds nothing; events of a stream may overlap.
    for (const track of lane.kind === "stream" ? tracks : tracks.slice(0, 1)) eachOf(track, from, to, stretches);
    let count = 0;
    eachIn(tracks, from, to, () => count++);
    return { name: lane.name, time_ns: covered(stretches), count };
  });
}

function eachOf(track: Track, from: number, to: number, into: [number, number][]): void {
  for (let i = track.firstAfter(from); i < track.rows.length && track.start[i]! < to; i++) {
    into.push(cutTo([track.start[i]!, track.end[i]!], from, to));
  }
}

/** The time that stretches cover together. */
function covered(stretches: [number, number][]): number {
  let time = 0;
  let until = -Infinity;
  for (const [start, end] of stretches.sort((a, b) => a[0] - b[0])) {
    time += Math.max(0, end - Math.max(start, until));
    until = Math.max(until, end);
  }
  return time;
}

export function devices(timeline: Timeline): number[] {
  const found = timeline.head.lanes.filter(lane => lane.kind === "stream").map(lane => lane.device ?? 0);
  return [...new Set(found)].sort((a, b) => a - b);
}

function idle(timeline: Timeline, device: number, within: readonly [number, number][]): number {
  return within.reduce((time, [from, to]) => {
    const running: [number, number][] = [];
    timeline.head.lanes.forEach((lane, i) => {
      if (lane.kind !== "stream" || (lane.device ?? 0) !== device) return;
      for (const track of timeline.tracks[i]!) eachOf(track, from, to, running);
    });
    return time + to - from - covered(running);
  }, 0);
}

/**
 * What to say before the idle time of a range: that it is at most so much, where events are left out and Python knows of
 * less; null where Python does not know it.
 */
export function idleIs(timeline: Timeline): "" | "at most " | null {
  let known = 0;
  for (const step of timeline.head.steps) {
    if (step.drawn && step.idle_ns === null) return null;
    if (step.drawn) known += step.idle_ns!;
  }
  const here = devices(timeline).reduce((sum, device) => sum + idle(timeline, device, timeline.drawn()), 0);
  return here > known ? "at most " : "";
}
