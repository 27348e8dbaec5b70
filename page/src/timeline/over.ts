/** What lies over the bands and changes as the pointer moves: the range, what is selected, arrows of cause and effect. */
import { ns } from "../format";
import type { Range, Selection } from "../state";
import { linksOf } from "./highlight";
import { AXIS, type Band, type Hit, type View, xOf } from "./layout";
import type { Scene } from "./draw";
import { FONT } from "./palette";

export function drawOver(context: CanvasRenderingContext2D, scene: Scene, range: Range | null, selection: Selection | null, hovered: Hit | null): void {
  const { view, timeline, palette } = scene;
  context.setTransform(view.ratio, 0, 0, view.ratio, 0, 0);
  context.clearRect(0, 0, view.width, view.height);
  context.save();
  context.beginPath();
  context.rect(view.left, 0, view.width - view.left, view.height);
  context.clip();
  if (range) drawRange(context, scene, range);
  context.beginPath();
  context.rect(view.left, AXIS, view.width - view.left, view.height - AXIS);
  context.clip();
  if (selection?.kind === "event" && selection.number < timeline.events.count) {
    for (const { from, to, kind } of linksOf(timeline, selection.number)) drawArrow(context, scene, from, to, kind === "launch" ? palette.ink : palette.accent);
    outline(context, scene, placeOf(scene, selection.number), palette.ink, 2);
  } else if (selection?.kind === "gap" && selection.number < timeline.gaps.count) {
    outline(context, scene, gapPlace(scene, selection.number), palette.ink, 2);
  }
  if (hovered && hovered.kind !== "memory") {
    outline(context, scene, hovered.kind === "gap" ? gapPlace(scene, hovered.row) : placeOf(scene, hovered.row, hovered.band), palette.ink, 1);
  }
  context.restore();
}

interface Place {
  x: number;
  y: number;
  width: number;
  height: number;
}

/** Where a row of events is drawn; in its lane, where no band is given. */
export function placeOf({ layout, timeline, view }: Scene, row: number, within?: Band): Place | null {
  const lane = timeline.lane[row]!;
  const key = `${timeline.head.lanes[lane]!.kind} ${lane}`;
  const band = within ?? layout.bands.find(one => one.key === key);
  if (!band) return null;
  const isCopy = band.kind === "communication"; // its rows are not those of the lane
  const depth = isCopy ? band.tracks.findIndex(track => track.rows.includes(row)) : timeline.depth[row]!;
  return placed(view, band, band.folded ? 0 : depth, timeline.start(row), timeline.end(row));
}

function gapPlace({ layout, timeline, view }: Scene, row: number): Place | null {
  const band = layout.bands.find(one => one.key === `idle ${timeline.gaps.column("device")[row]}`);
  const start = timeline.gaps.start_ns[row]!;
  return band ? placed(view, band, 0, start, start + timeline.gaps.duration_ns[row]!) : null;
}

function placed(view: View, band: Band, depth: number, from: number, to: number): Place {
  const x = xOf(view, from);
  const y = AXIS + band.top - view.scrolled + depth * band.rowHeight;
  return { x, y, width: Math.max(1, xOf(view, to) - x), height: band.rowHeight - 1 };
}

function outline(context: CanvasRenderingContext2D, { view, palette }: Scene, place: Place | null, color: string, width: number): void {
  if (!place) return;
  const left = Math.max(place.x, view.left - 4);
  const right = Math.min(place.x + place.width, view.width + 4);
  if (width > 1) {
    context.strokeStyle = palette.paper;
    context.lineWidth = width + 2;
    context.strokeRect(left - 0.5, place.y - 0.5, Math.max(2, right - left + 1), place.height + 1);
  }
  context.strokeStyle = color;
  context.lineWidth = width;
  context.strokeRect(left - 0.5, place.y - 0.5, Math.max(2, right - left + 1), place.height + 1);
}

function drawRange(context: CanvasRenderingContext2D, { view, palette }: Scene, [from, to]: Range): void {
  const left = xOf(view, from);
  const right = xOf(view, to);
  context.globalAlpha = 0.62;
  context.fillStyle = palette.paper;
  context.fillRect(view.left, AXIS, left - view.left, view.height);
  context.fillRect(right, AXIS, view.width - right, view.height);
  context.globalAlpha = 1;
  context.fillStyle = palette.accent;
  context.fillRect(Math.round(left) - 1, AXIS - 20, 2, view.height);
  context.fillRect(Math.round(right) - 1, AXIS - 20, 2, view.height);
  context.font = `600 11px ${FONT}`;
  context.textBaseline = "middle";
  const text = ns(to - from);
  const width = context.measureText(text).width + 10;
  const x = Math.min(view.width - width, Math.max(view.left, (left + right - width) / 2));
  context.fillRect(left, AXIS - 2, right - left, 2);
  context.fillRect(x, AXIS - 19, width, 17);
  context.fillStyle = palette.paper;
  context.fillText(text, x + 5, AXIS - 10);
}

/** From the end of what came first, or its middle where it encloses much, to the begin of what followed. */
function drawArrow(context: CanvasRenderingContext2D, scene: Scene, from: number, to: number, color: string): void {
  const one = placeOf(scene, from);
  const other = placeOf(scene, to);
  if (!one || !other) return;
  const x = one.x + Math.min(one.width, 6);
  const isBelow = other.y > one.y;
  const y = isBelow ? one.y + one.height : one.y;
  const endX = other.x;
  const endY = other.y + other.height / 2;
  const bend = Math.max(18, Math.min(90, Math.abs(endX - x) / 2));
  for (const [style, width] of [[scene.palette.paper, 4], [color, 1.6]] as const) {
    context.strokeStyle = context.fillStyle = style;
    context.lineWidth = width;
    context.beginPath();
    context.moveTo(x, y);
    context.bezierCurveTo(x, y + (isBelow ? bend : -bend), endX - bend, endY, endX - 5, endY);
    context.stroke();
  }
  context.beginPath();
  context.moveTo(endX, endY);
  context.lineTo(endX - 7, endY - 4);
  context.lineTo(endX - 7, endY + 4);
  context.fill();
}
