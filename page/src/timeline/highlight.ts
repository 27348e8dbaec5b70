/** What of the timeline belongs to what is selected. */
import type { Selection } from "../state";
import type { Timeline } from "./data";

export interface Lit {
  events: Uint8Array;
  gaps: Uint8Array;
  from: number; // the stretch that it spans
  to: number;
}

/** null: nothing is selected that is drawn here, and nothing is dimmed. */
export function litBy(timeline: Timeline, selection: Selection | null): Lit | null {
  if (!selection || selection.kind === "finding") return null;
  const { head, gaps } = timeline;
  const lit = { events: new Uint8Array(timeline.events.count), gaps: new Uint8Array(gaps.count) };
  if (selection.kind === "event") lightEvent(timeline, selection.number, lit.events);
  else if (selection.kind === "gap") {
    if (selection.number < gaps.count) lit.gaps[selection.number] = 1;
    const cause = gaps.column("event")[selection.number] ?? -1;
    if (cause >= 0) lit.events[cause] = 1;
  } else if (selection.kind === "step") {
    const at = head.steps.findIndex(one => one.number === selection.number);
    lightEqual(timeline.events.column("step"), at, lit.events);
    lightEqual(gaps.column("step"), at, lit.gaps);
  } else if (selection.kind === "layer") {
    const wanted = head.layers.map(one => one === selection.name || one.startsWith(`${selection.name}.`));
    timeline.layer.forEach((layer, row) => { if (wanted[layer]) lit.events[row] = 1; });
    gaps.column("layer").forEach((layer, row) => { if (wanted[layer]) lit.gaps[row] = 1; });
  } else if ("name" in selection) lightNamed(timeline, head.names.indexOf(selection.name), selection.kind === "kernel", lit.events);
  return stretched(timeline, lit, selection);
}

function lightEqual(values: Int32Array, wanted: number, into: Uint8Array): void {
  if (wanted >= 0) values.forEach((value, row) => { if (value === wanted) into[row] = 1; });
}

/** A kernel with what launched it; an op with all that runs in it, and the kernels of that. */
function lightNamed(timeline: Timeline, name: number, isKernel: boolean, into: Uint8Array): void {
  const { count } = timeline.events;
  if (name < 0) return;
  for (let row = 0; row < count; row++) {
    const isInside = !isKernel && into[timeline.parent[row]!];
    if (isInside || (timeline.name[row] === name && timeline.isOnDevice(row) === isKernel)) into[row] = 1;
  }
  for (let row = 0; row < count; row++) {
    const launch = timeline.launch[row]!;
    if (launch < 0) continue;
    if (isKernel && into[row]) into[launch] = 1;
    else if (!isKernel && into[launch]) into[row] = 1;
  }
}

/** An event with what it encloses, launched, made, and was made or launched by. */
function lightEvent(timeline: Timeline, row: number, into: Uint8Array): void {
  if (row >= into.length) return;
  for (const one of related(timeline, row)) into[one] = 1;
  const end = timeline.end(row);
  into[row] = 1;
  for (let below = row + 1; below < into.length && timeline.lane[below] === timeline.lane[row] && timeline.start(below) < end; below++) {
    if (!into[timeline.parent[below]!]) continue;
    into[below] = 1;
    for (const kernel of timeline.launched(below)) into[kernel] = 1;
  }
}

export interface Link {
  from: number; // what came first
  to: number;
  kind: "launch" | "backward";
}

const MOST_LINKS = 60; // more arrows than these say nothing

/** The arrows of an event: to its kernels or its launch, and between backward and forward. */
export function linksOf(timeline: Timeline, row: number): Link[] {
  const links: Link[] = [];
  const launch = timeline.launch[row]!;
  if (launch >= 0) links.push({ from: launch, to: row, kind: "launch" });
  const cpu = launch >= 0 ? launch : row;
  for (const one of timeline.outwards(cpu)) {
    const forward = timeline.forward[one]!;
    if (forward < 0) continue;
    links.push({ from: forward, to: one, kind: "backward" });
    break;
  }
  for (const backward of timeline.backwards(row)) links.push({ from: row, to: backward, kind: "backward" });
  const end = timeline.end(row);
  for (let below = row; below < timeline.events.count && links.length < MOST_LINKS; below++) {
    if (below > row && (timeline.lane[below] !== timeline.lane[row] || timeline.start(below) >= end)) break;
    for (const kernel of timeline.launched(below)) links.push({ from: below, to: kernel, kind: "launch" });
  }
  return links.slice(0, MOST_LINKS);
}

function* related(timeline: Timeline, row: number): Generator<number> {
  for (const { from, to } of linksOf(timeline, row)) {
    yield from;
    yield to;
  }
}

function stretched(timeline: Timeline, lit: { events: Uint8Array; gaps: Uint8Array }, selection: Selection): Lit | null {
  let [from, to] = [Infinity, -Infinity];
  const stretch = (start: number, end: number): void => {
    from = Math.min(from, start);
    to = Math.max(to, end);
  };
  const { gaps } = timeline;
  if (selection.kind === "event" && selection.number < lit.events.length) stretch(timeline.start(selection.number), timeline.end(selection.number));
  else {
    lit.gaps.forEach((is, row) => { if (is) stretch(gaps.start_ns[row]!, gaps.start_ns[row]! + gaps.duration_ns[row]!); });
    if (selection.kind !== "gap") lit.events.forEach((is, row) => { if (is) stretch(timeline.start(row), timeline.end(row)); });
  }
  return to >= from ? { ...lit, from, to } : null;
}
