/** The timeline's data: columns of numbers as Python packs them, and what is looked up in them. */
import { cut } from "../format";
import { kernelNames, type ShortName } from "../names";
import type { PageData } from "../page_data";

export interface TimelineHead {
  why: string | null; // why there is no timeline: then nothing else is there
  note: string;
  device: boolean;
  origin_ns: string;
  length_ns: number;
  steps: Step[];
  lanes: Lane[];
  names: string[];
  layers: string[];
  phases: string[];
  classes: string[];
  causes: string[];
  tables: { name: "events" | "gaps" | "sums"; count: number; columns: string[] }[];
}

/** A step that is not drawn may lie outside of what is. */
export interface Step {
  number: number | null; // null: a trace without steps, as one
  start_ns: number;
  end_ns: number;
  drawn: boolean;
  slowest: boolean;
  idle_ns: number | null; // of its devices; null: not known
}

export interface Lane {
  kind: "layers" | "phases" | "thread" | "stream";
  name: string;
  device: number | null;
  main: boolean;
  levels: number;
}

/** Every other column is of whole numbers, -1 where there is none. */
export interface Table {
  count: number;
  start_ns: Float64Array;
  duration_ns: Float64Array;
  time_ns: Float64Array;
  column: (name: string) => Int32Array;
}

// All others are differences to the row before.
const PLAIN = new Set(["duration_ns", "depth", "events.name", "device", "time_ns", "count"]);
const LONG = new Set(["start_ns", "duration_ns", "time_ns"]);

/** What `element`, or the page, holds; null: no timeline, of which `whyNot` says the reason. */
export async function readTimeline(data: PageData): Promise<Timeline | null> {
  const head = data["views"]?.timeline as TimelineHead | undefined;
  const packed = document.getElementById("timeline")?.textContent;
  return !head || head.why || !packed ? null : new Timeline(head, await inflated(packed.trim()));
}

export const whyNot = (data: PageData): string =>
  data["views"]?.timeline?.why ?? "This page was made without the events of a trace.";

async function inflated(base64: string): Promise<Uint8Array> {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** Reads one column from `at` on; gives back where the next begins. */
function unpack(bytes: Uint8Array, at: number, into: Float64Array | Int32Array, isPlain: boolean): number {
  let before = 0;
  for (let i = 0; i < into.length; i++) {
    let value = bytes[at++]!;
    if (value > 127) {
      let byte = value;
      value &= 127;
      for (let bits = 7; byte > 127; bits += 7) {
        byte = bytes[at++]!;
        value += bits < 28 ? (byte & 127) << bits : (byte & 127) * 2 ** bits; // times have more than 32 bits
      }
    }
    into[i] = isPlain ? value : (before += value & 1 ? -(value + 1) / 2 : value / 2);
  }
  return at;
}

function unpackTables(head: TimelineHead, bytes: Uint8Array): Map<string, Table> {
  let at = 0;
  const tables = head.tables.map(({ name, count, columns }) => {
    const found = new Map<string, Float64Array | Int32Array>();
    for (const column of columns) {
      const into = LONG.has(column) ? new Float64Array(count) : new Int32Array(count);
      at = unpack(bytes, at, into, PLAIN.has(column) || PLAIN.has(`${name}.${column}`));
      found.set(column, into);
    }
    const table: Table = {
      count,
      start_ns: found.get("start_ns") as Float64Array,
      duration_ns: found.get("duration_ns") as Float64Array,
      time_ns: found.get("time_ns") as Float64Array,
      column: column => found.get(column) as Int32Array,
    };
    return [name, table] as const;
  });
  if (at !== bytes.length) throw new Error("the events of this page are not whole");
  return new Map(tables);
}

/** Rows of a table that lie one after another, with what a walk over many of them needs to be fast. */
export class Track {
  readonly start: Float64Array;
  readonly end: Float64Array;
  readonly before: Float64Array; // time of all rows before
  readonly #longest: Int32Array; // of each block
  static readonly BLOCK = 32;

  constructor(readonly rows: Int32Array, start_ns: Float64Array, duration_ns: Float64Array) {
    const count = rows.length;
    this.start = new Float64Array(count);
    this.end = new Float64Array(count);
    this.before = new Float64Array(count + 1);
    this.#longest = new Int32Array(Math.ceil(count / Track.BLOCK));
    for (let i = 0; i < count; i++) {
      const duration = duration_ns[rows[i]!]!;
      this.start[i] = start_ns[rows[i]!]!;
      this.end[i] = this.start[i]! + duration;
      this.before[i + 1] = this.before[i]! + duration;
      const block = (i / Track.BLOCK) | 0;
      if (i % Track.BLOCK === 0 || duration > this.length(this.#longest[block]!)) this.#longest[block] = i;
    }
  }

  length(i: number): number {
    return this.end[i]! - this.start[i]!;
  }

  /** The first that ends after `time`. */
  firstAfter(time: number): number {
    return lowerBound(this.end, time, 0, this.rows.length, true);
  }

  /** The first from `low` on that begins at `time` or later: most often one of the next. */
  firstFrom(time: number, low: number): number {
    const count = this.rows.length;
    let step = 1;
    while (low + step < count && this.start[low + step]! < time) step *= 2;
    return lowerBound(this.start, time, low, Math.min(count, low + step + 1), false);
  }

  /** The longest of those in [from, to). */
  longest(from: number, to: number): number {
    let found = from;
    for (let i = from + 1; i < to; ) {
      const isWhole = i % Track.BLOCK === 0 && i + Track.BLOCK <= to;
      const one = isWhole ? this.#longest[i / Track.BLOCK]! : i;
      if (this.length(one) > this.length(found)) found = one;
      i += isWhole ? Track.BLOCK : 1;
    }
    return found;
  }
}

/** The first of ascending `values` in [low, high) that is at least `value`, or more than it where `isAbove`. */
export function lowerBound(values: Float64Array, value: number, low: number, high: number, isAbove: boolean): number {
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle]! < value || (isAbove && values[middle] === value)) low = middle + 1;
    else high = middle;
  }
  return low;
}

export class Timeline {
  readonly events: Table;
  readonly gaps: Table;
  readonly sums: Table;
  readonly lane: Int32Array;
  readonly depth: Int32Array;
  readonly name: Int32Array;
  readonly layer: Int32Array;
  readonly phase: Int32Array;
  readonly class: Int32Array;
  readonly launch: Int32Array;
  readonly forward: Int32Array;
  readonly parent: Int32Array; // the event that encloses it in its lane
  readonly tracks: Track[][]; // of each lane, by depth
  /** Kernels of a launch; backward of an op of forward. */
  readonly launched: (row: number) => Int32Array;
  readonly backwards: (row: number) => Int32Array;
  readonly isStream: boolean[]; // of each lane
  readonly communication: number; // in classes

  constructor(readonly head: TimelineHead, bytes: Uint8Array) {
    const tables = unpackTables(head, bytes);
    const events = (this.events = tables.get("events")!);
    this.gaps = tables.get("gaps")!;
    this.sums = tables.get("sums")!;
    this.lane = events.column("lane");
    this.depth = events.column("depth");
    this.name = events.column("name");
    this.layer = events.column("layer");
    this.phase = events.column("phase");
    this.class = events.column("class");
    this.launch = events.column("launch");
    this.forward = events.column("forward");
    this.isStream = head.lanes.map(lane => lane.kind === "stream");
    this.communication = head.classes.indexOf("communication");
    this.launched = inverse(this.launch);
    this.backwards = inverse(this.forward);
    this.parent = new Int32Array(events.count);
    const counts = head.lanes.map(lane => new Int32Array(lane.levels));
    for (let row = 0; row < events.count; row++) counts[this.lane[row]!]![this.depth[row]!]!++;
    const places = counts.map(levels => Array.from(levels, count => new Int32Array(count)));
    counts.forEach(levels => levels.fill(0));
    for (let row = 0; row < events.count; row++) {
      const depth = this.depth[row]!;
      const levels = places[this.lane[row]!]!;
      const next = counts[this.lane[row]!]!;
      // Rows are in order: the last one of the level above encloses it.
      this.parent[row] = depth ? levels[depth - 1]![next[depth - 1]! - 1]! : -1;
      levels[depth]![next[depth]!++] = row;
    }
    this.tracks = places.map(levels => levels.map(rows => this.track(rows)));
  }

  track(rows: Int32Array): Track {
    return new Track(rows, this.events.start_ns, this.events.duration_ns);
  }

  start(row: number): number {
    return this.events.start_ns[row]!;
  }

  end(row: number): number {
    return this.events.start_ns[row]! + this.events.duration_ns[row]!;
  }

  isOnDevice(row: number): boolean {
    return this.isStream[this.lane[row]!]!;
  }

  /** The row itself, then each that encloses it. */
  *outwards(row: number): Generator<number> {
    for (let at = row; at >= 0; at = this.parent[at]!) yield at;
  }

  /** A name of an event, short: kernels still distinct, layers by the end that tells them from others. */
  label(name: string, longest: number): string {
    if (!this.#kernels) {
      const kernels = new Set<string>();
      this.name.forEach((one, row) => { if (this.isOnDevice(row)) kernels.add(this.head.names[one]!); });
      this.#kernels = { names: kernels, short: kernelNames(kernels), layers: new Set(this.head.layers) };
    }
    const { names, short, layers } = this.#kernels;
    return names.has(name) ? short(name, longest) : cut(layers.has(name) ? layerTail(name) : name, longest);
  }

  #kernels: { names: Set<string>; short: ShortName; layers: Set<string> } | null = null;

  /** The stretches that are drawn: those of steps, which may overlap, or all where there are none. */
  drawn(): [from: number, to: number][] {
    const found: [number, number][] = [];
    for (const { drawn, start_ns, end_ns } of this.head.steps) {
      const last = found.at(-1);
      if (drawn && last && start_ns <= last[1]) last[1] = Math.max(last[1], end_ns);
      else if (drawn) found.push([start_ns, end_ns]);
    }
    return found.length ? found : [[0, this.head.length_ns]];
  }

  step(number: number | null): Step | undefined {
    return number === null ? undefined : this.head.steps.find(one => one.number === number && one.drawn);
  }
}

/** `layers.3`, `q_proj`. */
function layerTail(name: string): string {
  return /[^.]*\.\d+$/.exec(name)?.[0] ?? name.slice(name.lastIndexOf(".") + 1);
}

/** Of links to rows: who points to a row; made when first asked for. */
function inverse(links: Int32Array): (row: number) => Int32Array {
  let first: Int32Array | null = null;
  let from = new Int32Array();
  const make = (): Int32Array => {
    const ends = new Int32Array(links.length + 1);
    for (const to of links) if (to >= 0) ends[to + 1]!++;
    for (let i = 0; i < links.length; i++) ends[i + 1]! += ends[i]!;
    const next = ends.slice();
    from = new Int32Array(ends[links.length]!);
    for (let row = 0; row < links.length; row++) if (links[row]! >= 0) from[next[links[row]!]!++] = row;
    return ends;
  };
  return row => {
    first ??= make();
    return from.subarray(first[row], first[row + 1]);
  };
}
