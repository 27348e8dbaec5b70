/** Which bands the timeline has, one below the other, and what lies under a point. */
import { cut } from "../format";
import type { PageData } from "../page_data";
import { type Timeline, Track } from "./data";
import { devices } from "./sums";

export type BandKind = "layers" | "phases" | "thread" | "stream" | "idle" | "communication" | "memory";

export interface Band {
  key: string;
  kind: BandKind;
  label: string;
  tracks: Track[]; // one below the other; of gaps: of rows of `gaps`
  top: number;
  height: number;
  rowHeight: number;
  folded: boolean;
}

export interface Layout {
  bands: Band[];
  height: number;
}

/** A stretch of time at a width in pixels, behind the labels. */
export interface View {
  from: number;
  to: number;
  scrolled: number;
  left: number; // where the labels end
  width: number;
  height: number;
  ratio: number; // device pixels
}

export type Hit =
  | { kind: "event" | "gap"; row: number; band: Band }
  | { kind: "memory"; bytes: number; band: Band };

export const AXIS = 40; // what the steps and the time take at the top
const SPACE = 5;
const ROW_HEIGHTS: Readonly<Record<BandKind, number>> = {
  layers: 16, phases: 16, idle: 18, stream: 18, communication: 16, thread: 15, memory: 46,
};
const NEAR = 3; // pixels beside a box that still mean it

/** What memory is held when, on the timeline's clock. */
export interface Memory {
  time: Float64Array;
  bytes: Float64Array;
  most: number;
}

export function memoryOf(data: PageData, timeline: Timeline): Memory | null {
  const curve = data["memory"]?.curve;
  if (!curve?.time_us?.length) return null;
  const begin = Number(BigInt(curve.start_ns) - BigInt(timeline.head.origin_ns));
  const time = Float64Array.from(curve.time_us as number[], us => begin + us * 1000);
  if (time[0]! > timeline.head.length_ns || begin + curve.end_us * 1000 < 0) return null; // another clock
  const bytes = Float64Array.from(curve.allocated_bytes as number[]);
  return { time, bytes, most: bytes.reduce((most, one) => Math.max(most, one), 1) };
}

type Blank = Omit<Band, "top" | "height" | "rowHeight" | "folded">;

/**
 * All bands: layers and phases, then each device with when it is idle, its streams and what it sends, then memory. The
 * threads of the CPU, which are high, come last, so that the others are seen together.
 */
export function bandsOf(timeline: Timeline, memory: Memory | null): Blank[] {
  const { lanes } = timeline.head;
  const of = (kind: BandKind, device?: number): Blank[] => lanes.flatMap((lane, i) => (lane.kind === kind && (device === undefined || (lane.device ?? 0) === device)
    ? [{ key: `${kind} ${i}`, kind, label: labelOf(timeline, i), tracks: timeline.tracks[i]! }] : []));
  const found = devices(timeline);
  const onDevice = found.flatMap(device => {
    const number = found.length > 1 ? ` ${device}` : "";
    const gaps = gapsOf(timeline, device);
    const sent = communicationOf(timeline, device);
    return [
      ...(gaps.rows.length ? [{ key: `idle ${device}`, kind: "idle" as const, label: `device${number} idle`, tracks: [gaps] }] : []),
      ...of("stream", device),
      ...(sent.length ? [{ key: `communication ${device}`, kind: "communication" as const, label: `communication${number}`, tracks: sent }] : []),
    ];
  });
  const held: Blank[] = memory ? [{ key: "memory", kind: "memory", label: "memory", tracks: [] }] : [];
  return [...of("layers"), ...of("phases"), ...onDevice, ...held, ...of("thread")];
}

export function layoutOf(bands: readonly Blank[], folded: ReadonlySet<string>): Layout {
  let top = 0;
  const placed = bands.map(band => {
    const isFolded = folded.has(band.key);
    const rowHeight = band.kind === "memory" && isFolded ? 16 : ROW_HEIGHTS[band.kind];
    const height = rowHeight * (isFolded ? 1 : Math.max(1, band.tracks.length));
    const one = { ...band, top, height, rowHeight, folded: isFolded };
    top += height + SPACE;
    return one;
  });
  return { bands: placed, height: top };
}

function labelOf(timeline: Timeline, at: number): string {
  const lane = timeline.head.lanes[at]!;
  const of = lane.device !== null && lane.kind !== "stream" && devices(timeline).length > 1 ? `, device ${lane.device}` : "";
  return `${timeline.isStream[at] && onlySends(timeline, at) ? "communication, " : ""}${cut(lane.name, 60)}${of}`;
}

const onlySends = (timeline: Timeline, lane: number): boolean =>
  timeline.tracks[lane]!.every(track => track.rows.every(row => timeline.class[row] === timeline.communication));

function gapsOf(timeline: Timeline, device: number): Track {
  const { gaps } = timeline;
  const of = gaps.column("device");
  const rows = Int32Array.from({ length: gaps.count }, (_, row) => row).filter(row => of[row] === device);
  return new Track(rows, gaps.start_ns, gaps.duration_ns);
}

/** What a device sends, on as many rows as run side by side; none where the streams of that do nothing else. */
function communicationOf(timeline: Timeline, device: number): Track[] {
  const rows: number[] = [];
  timeline.head.lanes.forEach((lane, i) => {
    if (lane.kind !== "stream" || (lane.device ?? 0) !== device || onlySends(timeline, i)) return;
    for (const track of timeline.tracks[i]!) {
      for (const row of track.rows) if (timeline.communication >= 0 && timeline.class[row] === timeline.communication) rows.push(row);
    }
  });
  const levels: number[][] = [];
  for (const row of rows.sort((a, b) => timeline.start(a) - timeline.start(b))) {
    const free = levels.find(level => timeline.end(level.at(-1)!) <= timeline.start(row));
    if (free) free.push(row);
    else levels.push([row]);
  }
  return levels.map(level => timeline.track(Int32Array.from(level)));
}

export const timeAt = (view: View, x: number): number => view.from + ((x - view.left) / (view.width - view.left)) * (view.to - view.from);
export const xOf = (view: View, time: number): number => view.left + ((time - view.from) / (view.to - view.from)) * (view.width - view.left);

/** What lies at a point, the nearest within a few pixels; of what is drawn as one, the longest. */
export function hitAt(layout: Layout, memory: Memory | null, view: View, x: number, y: number): Hit | null {
  const below = y - AXIS + view.scrolled;
  const band = layout.bands.find(one => below >= one.top && below < one.top + one.height);
  if (!band || y < AXIS || x < view.left) return null;
  const time = timeAt(view, x);
  if (band.kind === "memory") {
    const bytes = memory && memory.bytes[memory.time.findLastIndex(one => one <= time)];
    return bytes == null ? null : { kind: "memory", bytes, band };
  }
  const track = band.tracks[Math.floor((below - band.top) / band.rowHeight)];
  if (!track) return null;
  const near = ((view.to - view.from) / (view.width - view.left)) * NEAR;
  const first = track.firstAfter(time - near);
  const end = track.firstFrom(time + near, first);
  if (first >= end) return null;
  let found = track.longest(first, end);
  for (let i = first; i < end; i++) {
    // The box that is under the point, where it is wide enough to be meant.
    if (track.start[i]! <= time && track.end[i]! > time && track.length(i) > near / NEAR) found = i;
  }
  return { kind: band.kind === "idle" ? "gap" : "event", row: track.rows[found]!, band };
}
