/**
 * The canvas: bands of boxes, the axis, the memory curve.
 *
 * What falls on one pixel is one box, found by a jump to the first that begins on the next: a walk over as many pixels as
 * there are, not over all events. Such a box has the colour of its longest event, paler where little of the pixel is busy.
 */
import { bytes as bytesText } from "../format";
import type { Step, Timeline, Track } from "./data";
import type { Lit } from "./highlight";
import { AXIS, type Band, type Layout, type Memory, type View, timeAt, xOf } from "./layout";
import { DIM, fitted, FONT, FULL, type Labels, type Palette, SHADES } from "./palette";

export interface Scene {
  timeline: Timeline;
  layout: Layout;
  view: View;
  palette: Palette;
  labels: Labels;
  memory: Memory | null;
  lit: Lit | null;
}

const LEAST_TEXT = 26; // pixels of a box
const STEPS_HEIGHT = 18;
const STEPS_APART = 4; // pixels: nearer borders are one

/** Boxes of one row by colour, in device pixels; those that touch are one. */
class Boxes {
  readonly #xs: number[][] = [];
  readonly #used: number[] = [];
  #last = -1;
  #end = NaN;

  add(color: number, x: number, end: number): void {
    const xs = (this.#xs[color] ??= []);
    if (color === this.#last && x <= this.#end) xs[xs.length - 1] = end;
    else {
      if (!xs.length) this.#used.push(color);
      xs.push(x, end);
    }
    this.#last = color;
    this.#end = end;
  }

  /** Leaves a line between this box and the next. */
  close(): void {
    this.#last = -1;
  }

  draw(context: CanvasRenderingContext2D, fills: readonly string[], y: number, height: number): void {
    for (const color of this.#used) {
      const xs = this.#xs[color]!;
      context.fillStyle = fills[color]!;
      for (let i = 0; i < xs.length; i += 2) context.fillRect(xs[i]!, y, xs[i + 1]! - xs[i]!, height);
      xs.length = 0;
    }
    this.#used.length = 0;
    this.close();
  }
}

const boxes = new Boxes();

export function drawScene(context: CanvasRenderingContext2D, scene: Scene): void {
  const { view, palette, layout, timeline } = scene;
  context.setTransform(1, 0, 0, 1, 0, 0);
  context.fillStyle = palette.paper;
  context.fillRect(0, 0, Math.ceil(view.width * view.ratio), Math.ceil(view.height * view.ratio));
  drawTicks(context, scene);
  const shown = layout.bands.filter(band => band.top + band.height > view.scrolled && band.top + AXIS < view.scrolled + view.height);
  for (const band of shown) {
    if (band.kind === "memory") drawMemory(context, scene, band);
    else if (band.kind === "idle") drawGaps(context, scene, band);
    else (band.folded ? band.tracks.slice(0, 1) : band.tracks).forEach((track, i) => drawTrack(context, scene, band, track, bandTop(view, band) + i * band.rowHeight));
  }
  context.setTransform(view.ratio, 0, 0, view.ratio, 0, 0);
  drawGutter(context, scene, shown);
  drawSteps(context, scene, timeline.head.steps);
}

const bandTop = (view: View, band: Band): number => AXIS + band.top - view.scrolled;

function drawTrack(context: CanvasRenderingContext2D, scene: Scene, band: Band, track: Track, top: number): void {
  const { view, palette, timeline, lit } = scene;
  const { ratio, from, to } = view;
  if (top + band.rowHeight < AXIS || top > view.height) return;
  const left = view.left * ratio;
  const scale = ((view.width - view.left) * ratio) / (to - from);
  const byClass = band.kind === "stream" || band.kind === "communication";
  const colors = byClass ? timeline.class : timeline.phase;
  const none = byClass ? timeline.head.classes.length : timeline.head.phases.length;
  const base = byClass ? palette.classesFrom : 0;
  const lowest = LEAST_TEXT * ratio;
  const texts: number[] = []; // triples: row, begin, end
  const { rows, start, end, before } = track;
  for (let i = track.firstAfter(from); i < rows.length && start[i]! < to; ) {
    const x = left + (start[i]! - from) * scale;
    const stop = left + (end[i]! - from) * scale;
    let next = i + 1;
    let shown = i;
    let shade = FULL;
    let boxFrom = Math.max(left, Math.round(x));
    let boxTo = Math.round(stop);
    if (stop - x < ratio) {
      const pixel = Math.floor(x / ratio) * ratio;
      next = track.firstFrom(from + (pixel + ratio - left) / scale, i);
      next = Math.max(next, i + 1); // where rounding says otherwise
      if (next > i + 1 && track.length(next - 1) * scale >= ratio) next--; // has a box of its own
      boxFrom = Math.max(left, Math.floor(pixel));
      boxTo = Math.max(boxFrom + 1, Math.floor(pixel + ratio));
      shown = next > i + 1 ? track.longest(i, next) : i;
      const busy = ((before[next]! - before[i]!) * scale) / ratio;
      shade = busy > 0.6 ? 2 : busy > 0.25 ? 1 : 0;
    }
    if (lit) {
      let one = i;
      while (one < next && !lit.events[rows[one]!]) one++;
      if (one === next) shade = DIM;
      else shown = one;
    }
    const row = rows[shown]!;
    const color = (base + (colors[row]! < 0 ? none : colors[row]!)) * SHADES + shade;
    const isWide = boxTo - boxFrom >= 4 * ratio;
    boxTo = Math.min(boxTo, view.width * ratio);
    if (isWide) boxes.close();
    boxes.add(color, boxFrom, isWide ? boxTo - Math.ceil(ratio / 2) : Math.max(boxTo, boxFrom + 1));
    if (isWide) boxes.close();
    if (boxTo - boxFrom >= lowest) texts.push(row, boxFrom / ratio, boxTo / ratio, color);
    i = next;
  }
  context.setTransform(1, 0, 0, 1, 0, 0);
  boxes.draw(context, palette.fills, Math.round(top * ratio), Math.round((band.rowHeight - 1) * ratio));
  if (texts.length) drawTexts(context, scene, texts, top + (band.rowHeight - 1) / 2);
}

function drawTexts(context: CanvasRenderingContext2D, scene: Scene, texts: readonly number[], y: number): void {
  const { view, palette, timeline, labels } = scene;
  context.setTransform(view.ratio, 0, 0, view.ratio, 0, 0);
  context.font = `11px ${FONT}`;
  context.textBaseline = "middle";
  let ink = "";
  for (let i = 0; i < texts.length; i += 4) {
    const [row, from, to, color] = [texts[i]!, texts[i + 1]!, texts[i + 2]!, texts[i + 3]!];
    const text = labels.fitted(context, timeline.name[row]!, to - from - 7);
    if (!text) continue;
    if (palette.inks[color] !== ink) context.fillStyle = ink = palette.inks[color]!;
    context.fillText(text, from + 3, y);
  }
}

/** Where the device has nothing to do: hatched, with the cause where there is room. */
function drawGaps(context: CanvasRenderingContext2D, scene: Scene, band: Band): void {
  const { view, palette, timeline, lit } = scene;
  const track = band.tracks[0]!;
  const cause = timeline.gaps.column("cause");
  const top = bandTop(view, band);
  const height = band.rowHeight - 1;
  const [hatch, dimmed, ...solid] = Array.from({ length: 5 }, () => new Path2D()) as [Path2D, Path2D, Path2D, Path2D, Path2D];
  const perPixel = (view.width - view.left) / (view.to - view.from);
  const texts: [text: string, x: number, room: number, isDim: boolean][] = [];
  for (let i = track.firstAfter(view.from); i < track.rows.length && track.start[i]! < view.to; ) {
    const x = Math.max(view.left, xOf(view, track.start[i]!));
    const end = Math.min(view.width, Math.max(x + 1, xOf(view, track.end[i]!)));
    let next = end - x < 1.5 ? Math.max(i + 1, track.firstFrom(timeAt(view, x + 1), i)) : i + 1;
    if (next > i + 1 && track.length(next - 1) * perPixel >= 1.5) next--; // has a box of its own
    let isDim = lit !== null;
    for (let one = i; isDim && one < next; one++) isDim = !lit!.gaps[track.rows[one]!];
    const row = track.rows[i]!;
    const busy = Math.min(1, ((track.before[next]! - track.before[i]!) * perPixel) / Math.max(1, end - x));
    (isDim ? dimmed : end - x < 5 ? solid[Math.min(2, Math.floor(busy * 3))]! : hatch).rect(x, top, Math.max(1, end - x - (end - x > 3 ? 1 : 0)), height);
    if (end - x > LEAST_TEXT * 1.5) texts.push([(timeline.head.causes[cause[row]!] ?? "").replace(/^the /, ""), x, end - x, isDim]);
    i = next;
  }
  context.setTransform(view.ratio, 0, 0, view.ratio, 0, 0);
  const hatching = hatchingOf(context, palette.outlier, view.ratio);
  for (const [path, fill, strength] of [[hatch, hatching, 1], [dimmed, palette.outlier, 0.15], [solid[0]!, palette.outlier, 0.45], [solid[1]!, palette.outlier, 0.6], [solid[2]!, palette.outlier, 0.8]] as const) {
    context.globalAlpha = strength;
    context.fillStyle = fill;
    context.fill(path);
  }
  context.globalAlpha = 1;
  context.font = `11px ${FONT}`;
  context.textBaseline = "middle";
  for (const [text, x, room, isDim] of texts) {
    const shown = fitted(text, room - 16, context.measureText(text).width);
    if (shown.length < 5) continue;
    context.fillStyle = palette.paper;
    context.fillRect(x + 4, top + 2, context.measureText(shown).width + 6, height - 4);
    context.fillStyle = isDim ? palette.soft : palette.ink;
    context.fillText(shown, x + 7, top + height / 2);
  }
}

let hatched: { color: string; ratio: number; pattern: CanvasPattern } | null = null;

function hatchingOf(context: CanvasRenderingContext2D, color: string, ratio: number): CanvasPattern {
  if (hatched?.color === color && hatched.ratio === ratio) return hatched.pattern;
  const size = Math.round(6 * ratio);
  const tile = new OffscreenCanvas(size, size);
  const lines = tile.getContext("2d")!;
  lines.strokeStyle = color;
  lines.lineWidth = ratio;
  lines.beginPath();
  for (const shift of [-size, 0, size]) {
    lines.moveTo(shift, size);
    lines.lineTo(shift + size, 0);
  }
  lines.stroke();
  const pattern = context.createPattern(tile, "repeat")!;
  pattern.setTransform(new DOMMatrix().scale(1 / ratio));
  hatched = { color, ratio, pattern };
  return pattern;
}

function drawMemory(context: CanvasRenderingContext2D, scene: Scene, band: Band): void {
  const { view, palette, memory } = scene;
  if (!memory) return;
  const bottom = bandTop(view, band) + band.height - 1;
  const y = (bytes: number): number => bottom - (bytes / memory.most) * (band.height - 4);
  const line = new Path2D();
  const { time, bytes } = memory;
  let i = Math.max(0, time.findIndex(one => one > view.from) - 1);
  const begin = Math.max(view.left, xOf(view, time[i]!));
  let x = begin;
  line.moveTo(x, y(bytes[i]!));
  for (i++; i < time.length && time[i]! < view.to; i++) {
    x = Math.max(view.left, xOf(view, time[i]!));
    line.lineTo(x, y(bytes[i - 1]!));
    line.lineTo(x, y(bytes[i]!));
  }
  x = Math.min(view.width, xOf(view, Math.min(view.to, scene.timeline.head.length_ns)));
  line.lineTo(x, y(bytes[i - 1]!));
  context.setTransform(view.ratio, 0, 0, view.ratio, 0, 0);
  const area = new Path2D(line);
  area.lineTo(x, bottom);
  area.lineTo(begin, bottom);
  context.fillStyle = palette.bar;
  context.fill(area);
  context.strokeStyle = palette.accent;
  context.lineWidth = 1.2;
  context.stroke(line);
}

// ---- the axis and the labels ------------------------------------------------------------------------------------------

const UNITS = [[1e9, "s"], [1e6, "ms"], [1e3, "µs"], [1, "ns"]] as const;

/** Round times at least `room` pixels apart, as text in one unit. */
export function ticksOf(view: View, room = 90): { time: number; text: string }[] {
  const least = ((view.to - view.from) / (view.width - view.left)) * room;
  const power = 10 ** Math.floor(Math.log10(least));
  const every = Math.max(1, [1, 2, 5, 10].map(one => one * power).find(one => one >= least)!);
  const largest = Math.max(Math.abs(view.from), Math.abs(view.to));
  // The unit of the distance, while numbers stay short.
  const [size, unit] = UNITS.find(([one]) => every >= one || largest >= one * 1e5) ?? UNITS[3];
  const decimals = Math.max(0, Math.ceil(Math.log10(size / every) - 1e-9));
  const found = [];
  for (let i = Math.ceil(view.from / every); i * every <= view.to; i++) {
    const value = ((i * every) / size || 0).toLocaleString("en-US", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
    found.push({ time: i * every, text: `${value} ${unit}` });
  }
  return found;
}

function drawTicks(context: CanvasRenderingContext2D, { view, palette, timeline }: Scene): void {
  context.setTransform(view.ratio, 0, 0, view.ratio, 0, 0);
  context.fillStyle = palette.line;
  for (const { time } of ticksOf(view)) context.fillRect(Math.round(xOf(view, time)), AXIS - 4, 1, view.height);
  context.fillStyle = palette.soft;
  let last = view.left - STEPS_APART;
  for (const time of timeline.head.steps.flatMap(one => (one.drawn ? [one.start_ns, one.end_ns] : []))) {
    const x = Math.round(xOf(view, time));
    if (x - last < STEPS_APART || x > view.width) continue;
    for (let y = AXIS; y < view.height; y += 6) context.fillRect(x, y, 1, 3);
    last = x;
  }
}

function drawGutter(context: CanvasRenderingContext2D, { view, palette, memory, layout }: Scene, shown: readonly Band[]): void {
  context.fillStyle = palette.paper;
  context.fillRect(0, 0, view.left, view.height);
  context.font = `11px ${FONT}`;
  context.textBaseline = "middle";
  for (const band of shown) {
    const top = bandTop(view, band);
    context.fillStyle = palette.line;
    if (band !== layout.bands[0]) context.fillRect(0, top - 3, view.width, 1);
    context.fillStyle = palette.ink;
    const room = view.left - 20;
    fillWithin(context, band.label, 16, top + 8, room);
    const foldable = band.tracks.length > 1 || band.kind === "memory";
    context.fillStyle = palette.soft;
    if (foldable) context.fillText(band.folded ? "▸" : "▾", 4, top + 8);
    if (band.kind === "memory" && memory && !band.folded) fillWithin(context, `up to ${bytesText(memory.most)}`, 16, top + 23, room);
  }
  context.fillStyle = palette.line;
  context.fillRect(view.left - 1, 0, 1, view.height);
  context.fillStyle = palette.paper;
  context.fillRect(0, 0, view.width, AXIS);
}

function fillWithin(context: CanvasRenderingContext2D, text: string, x: number, y: number, room: number): void {
  context.fillText(fitted(text, room, context.measureText(text).width), x, y);
}

/** The steps, those that are not drawn too, and the time. */
function drawSteps(context: CanvasRenderingContext2D, { view, palette }: Scene, steps: readonly Step[]): void {
  context.fillStyle = palette.soft;
  context.textBaseline = "middle";
  for (const { time, text } of ticksOf(view)) {
    const x = xOf(view, time);
    context.fillRect(Math.round(x), AXIS - 6, 1, 6);
    if (x + context.measureText(text).width + 4 < view.width) context.fillText(text, Math.max(view.left, x) + 4, STEPS_HEIGHT + 9);
  }
  let free = view.left;
  for (const { number, start_ns, end_ns, drawn, slowest } of steps) {
    const from = Math.max(view.left, xOf(view, start_ns));
    const to = Math.min(view.width, xOf(view, end_ns));
    if (number === null || to <= view.left || from >= view.width || to - from < 1) continue;
    context.fillStyle = drawn ? palette.panel : palette.paper;
    context.fillRect(from, 0, to - from, STEPS_HEIGHT - 2);
    context.strokeStyle = palette.line;
    context.strokeRect(from + 0.5, 0.5, Math.max(0, to - from - 1), STEPS_HEIGHT - 3);
    context.fillStyle = slowest ? palette.outlier : drawn ? palette.ink : palette.soft;
    const text = [`step ${number}${slowest ? ", slowest" : ""}${drawn ? "" : ": not here"}`, `step ${number}`, String(number)];
    const fits = text.find(one => context.measureText(one).width + 8 <= to - from);
    if (fits && from >= free - 1) {
      context.fillText(fits, from + 4, STEPS_HEIGHT / 2 - 1);
      free = from + context.measureText(fits).width;
    }
  }
  context.fillStyle = palette.paper;
  context.fillRect(0, 0, view.left - 1, AXIS);
  context.fillStyle = palette.soft;
  context.fillText("time", 16, STEPS_HEIGHT + 9);
}
