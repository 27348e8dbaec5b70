/** Heat maps: ranks by kinds of time and by blocks, and the mesh. */
import { useSignal } from "@preact/signals";
import type { JSX } from "preact";
import { FONT, useCanvas } from "../chart";
import { inkOn, themeColor } from "../colors";
import { cut, isKnown, us } from "../format";
import type { PageData } from "../page_data";
import { Section } from "../parts";
import { drawnDark } from "../theme";
import { choose, culprit, isNamed, rankChosen } from "./marks";

export interface HeatMap {
  title: string;
  across: string; // what the columns are: "rank", or a coordinate
  down: string;
  ranks: number[]; // the first of each column
  rows: string[];
  values_ms: (number | null)[][];
  is_difference: boolean;
  named?: [row: number, column: number][];
}

type Rgb = readonly [number, number, number];
const LESS: Rgb = [33, 102, 172];
const MORE: Rgb = [178, 24, 43];
const VIRIDIS: readonly Rgb[] = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];
const TOP = 4; // pixels
const BELOW = 36; // numbers of ranks, and what they are
const MOST_NAMED = 32;

const hex = (color: Rgb): string => `#${color.map(part => Math.round(part).toString(16).padStart(2, "0")).join("")}`;
const mixed = (a: Rgb, b: Rgb, part: number): Rgb => [0, 1, 2].map(i => a[i]! + (b[i]! - a[i]!) * part) as unknown as Rgb;

/** `part` of the way: -1 to 1 of differences, 0 to 1 of others. */
function heat(part: number, isDifference: boolean): string {
  const middle: Rgb = drawnDark.value ? [38, 43, 50] : [247, 247, 247];
  if (isDifference) return hex(mixed(middle, part < 0 ? (drawnDark.value ? [90, 160, 235] : LESS) : drawnDark.value ? [255, 107, 107] : MORE, Math.min(1, Math.abs(part))));
  const at = Math.min(0.999, Math.max(0, part)) * (VIRIDIS.length - 1);
  return hex(mixed(VIRIDIS[Math.floor(at)]!, VIRIDIS[Math.floor(at) + 1]!, at % 1));
}

const short = (value: number): string => (Math.abs(value) >= 100 ? value.toFixed(0) : Math.abs(value) >= 1 ? value.toFixed(1) : value.toFixed(2));

interface Scale {
  low: number;
  high: number;
  floor: number; // a difference of at least so much is much: a twentieth of a step
  of: (value: number) => string;
}

function scaleOf(map: HeatMap, data: PageData): Scale {
  const known = map.values_ms.flat().filter(isKnown);
  const most = known.reduce((large, value) => Math.max(large, Math.abs(value)), 0) || 1;
  const floor = (0.05 * (data["job"].step_ms_per_step ?? 0)) / (map === data["heat"][0] ? 1 : map.rows.length); // small differences stay pale
  if (map.is_difference) {
    const high = Math.max(most, floor);
    return { low: -high, high, floor, of: value => heat(value / high, true) };
  }
  const low = Math.min(known.reduce((small, value) => Math.min(small, value), Infinity), most / 2);
  return { low, high: most, floor, of: value => heat(most > low ? (value - low) / (most - low) : 1, false) };
}

/** The ranks of a column: from its first to before the next one's. */
const inside = (map: HeatMap, column: number, data: PageData): number[] => (data["job"].ranks as { rank: number }[]).map(row => row.rank)
  .filter(rank => rank >= map.ranks[column]! && (column + 1 === map.ranks.length || rank < map.ranks[column + 1]!));

export function HeatMaps({ data }: { data: PageData }): JSX.Element {
  const maps = data["heat"] as HeatMap[];
  return (
    <Section title="Heat maps">
      {maps.length === 0 && <p class="note">No rank has a step.</p>}
      {maps.map(map => <One key={map.title} data={data} map={map} />)}
    </Section>
  );
}

function One({ data, map }: { data: PageData; map: HeatMap }): JSX.Element {
  const at = useSignal<readonly [row: number, column: number] | null>(null);
  const ofRanks = map.across === "rank";
  const isBinned = ofRanks && map.ranks.length < data["job"].ranks.length;
  const across = { stage: "pipeline stage" }[map.across] ?? map.across;
  const rowHeight = map.rows.length <= 40 ? 22 : Math.max(6, 880 / map.rows.length);
  const scale = scaleOf(map, data);
  const names = map.rows.reduce((most, name) => Math.max(most, Math.min(40, name.length)), 4);
  const gutter = (width: number) => Math.min(width * 0.35, 14 + names * 6.6);
  const left = () => gutter(canvas.current!.clientWidth);
  const canvas = useCanvas((context, width) => draw(context, width, data, map, scale, gutter(width), rowHeight, at.value), [at, rankChosen], [map]);

  const cellAt = (event: MouseEvent): readonly [number, number] | null => {
    const column = Math.floor(((event.offsetX - left()) / (canvas.current!.clientWidth - left() - 2)) * map.ranks.length);
    const row = Math.floor((event.offsetY - TOP) / rowHeight);
    return column >= 0 && column < map.ranks.length && row >= 0 && row < map.rows.length ? [row, column] : null;
  };
  const name = (column: number): string => (isBinned ? `ranks ${map.ranks[column]} to ${inside(map, column, data).at(-1)}` : `${across} ${map.ranks[column]}`);
  const said = (row: number, column: number): string => {
    const value = map.values_ms[row]![column];
    return `${name(column)}, ${`${map.down} ${cut(map.rows[row], 80)}`.trim()}: ${isKnown(value) ? `${map.is_difference && value > 0 ? "+" : ""}${us(value * 1000)}` : "not known"}`;
  };
  const keys = (event: KeyboardEvent) => {
    const [row, column] = at.value ?? [0, -1];
    const next = { ArrowLeft: [row, column - 1], ArrowRight: [row, column + 1], ArrowUp: [row - 1, column], ArrowDown: [row + 1, Math.max(0, column)] }[event.key];
    if (event.key === "Escape") at.value = null;
    else if (event.key === "Enter" && ofRanks && at.value) choose(map.ranks[column]!);
    else if (next) at.value = [Math.max(0, Math.min(map.rows.length - 1, next[0]!)), Math.max(0, Math.min(map.ranks.length - 1, next[1]!))];
    else return;
    event.preventDefault();
  };
  return (
    <figure class="heat">
      <figcaption><strong>{map.title}</strong>{isBinned && <span class="quiet"> Several ranks a column: the one farthest from 0.</span>}</figcaption>
      <canvas ref={canvas} tabIndex={0} role="application" aria-label={`${map.title}: arrow keys move, its numbers are in the table behind it`} style={{ height: `${TOP + rowHeight * map.rows.length + BELOW}px` }}
        onPointerMove={event => { at.value = cellAt(event); }} onPointerLeave={() => { at.value = null; }} onKeyDown={keys}
        onClick={event => { const cell = cellAt(event); if (cell && ofRanks) choose(inside(map, cell[1], data).find(rank => isNamed(data, rank)) ?? map.ranks[cell[1]]!); }} />
      <div class="legend"><span>{us(scale.low * 1000)} <span class="ramp" style={{ background: `linear-gradient(to right, ${Array.from({ length: 9 }, (_, i) => scale.of(scale.low + ((scale.high - scale.low) * i) / 8)).join(", ")})` }} /> {us(scale.high * 1000)}</span>
        <span aria-live="polite">{at.value ? said(...at.value) : largest(map, scale, said)}</span></div>
      <div class="unseen"><table>
        <caption>{map.title}</caption>
        <thead><tr><th scope="col">{across}</th>{map.ranks.slice(0, 64).map((rank, i) => <th key={rank} scope="col">{name(i)}</th>)}</tr></thead>
        <tbody>{map.rows.slice(0, 64).map((row, i) => <tr key={row}><th scope="row">{cut(row, 80)}</th>{map.values_ms[i]!.slice(0, 64).map((value, k) => <td key={k}>{isKnown(value) ? us(value * 1000) : "not known"}</td>)}</tr>)}</tbody>
      </table></div>
    </figure>
  );
}

/** The highest cell, where that is much. */
function largest(map: HeatMap, scale: Scale, said: (row: number, column: number) => string): string {
  let best: { value: number; row: number; column: number } | null = null;
  map.values_ms.forEach((row, y) => row.forEach((value, x) => { if (isKnown(value) && value > (best?.value ?? -Infinity)) best = { value, row: y, column: x }; }));
  const found = best as { value: number; row: number; column: number } | null;
  return found && (!map.is_difference || found.value >= scale.floor) ? `Highest: ${said(found.row, found.column)}` : "";
}

function draw(ctx: CanvasRenderingContext2D, width: number, data: PageData, map: HeatMap, scale: Scale, left: number, rowHeight: number, hovered: readonly [number, number] | null): void {
  const cell = (width - left - 2) / map.ranks.length;
  const x = (column: number) => left + column * cell;
  const y = (row: number) => TOP + row * rowHeight;
  const [ink, soft, red] = [themeColor("--ink"), themeColor("--soft"), culprit(data)];
  const ofRanks = map.across === "rank";
  const hasNumbers = map.ranks.length <= 16 && map.ranks.length * map.rows.length <= 160 && cell > 34;
  const least = map.is_difference ? scale.high / 20 : 0;
  map.values_ms.forEach((row, i) => row.forEach((value, k) => {
    ctx.fillStyle = isKnown(value) ? scale.of(value) : themeColor("--panel");
    ctx.fillRect(x(k), y(i), Math.ceil(cell * devicePixelRatio) / devicePixelRatio, rowHeight);
    if (!hasNumbers || !isKnown(value) || Math.abs(value) < least) return;
    ctx.fillStyle = inkOn(scale.of(value));
    ctx.textAlign = "center";
    ctx.fillText(short(value), x(k) + cell / 2, y(i) + rowHeight / 2);
  }));
  ctx.fillStyle = ink;
  ctx.textAlign = "right";
  const apart = Math.ceil(14 / rowHeight);
  map.rows.forEach((name, i) => { if (i % apart === 0) ctx.fillText(cut(`${{ dp: "dp" }[map.down] ?? ""} ${name}`.trim(), Math.floor((left - 8) / 6.2)), left - 6, y(i) + rowHeight / 2); });
  const frame = (column: number, row: number, rows: number, color: string) => {
    ctx.strokeStyle = color;
    ctx.lineWidth = 2;
    ctx.strokeRect(x(column) + 1, y(row) + 1, Math.max(1, cell - 2), rows * rowHeight - 2);
  };
  const columns = map.ranks.map((_, i) => i);
  const marked = ofRanks ? columns.filter(i => inside(map, i, data).some(rank => isNamed(data, rank))) : [];
  if (cell > 6) for (const i of marked.slice(0, 64)) frame(i, 0, map.rows.length, red);
  for (const [row, column] of (map.named ?? []).slice(0, 256)) frame(column, row, 1, red);
  const chosen = ofRanks && rankChosen.value !== null ? columns.findLastIndex(i => map.ranks[i]! <= rankChosen.value!) : -1;
  if (chosen >= 0) frame(chosen, 0, map.rows.length, themeColor("--accent"));
  if (hovered) frame(hovered[1], hovered[0], 1, ink);
  // Numbers below, so many that they can be read; those that are named always.
  ctx.textAlign = "center";
  const below = TOP + map.rows.length * rowHeight;
  const every = Math.max(Math.ceil(map.ranks.length / MOST_NAMED), Math.ceil(26 / cell));
  const shown = marked.slice(0, 8);
  for (const i of columns) {
    const isMarked = shown.includes(i);
    if (!isMarked && (i % every || shown.some(one => one !== i && Math.abs(one - i) < every))) continue;
    ctx.fillStyle = isMarked ? red : soft;
    ctx.font = isMarked ? `bold ${FONT}` : FONT;
    const label = isMarked ? inside(map, i, data).find(rank => isNamed(data, rank))! : map.ranks[i]!;
    ctx.fillText(`${isMarked ? "▴" : ""}${label}`, Math.min(width - 10, x(i) + cell / 2), below + 10);
  }
  ctx.font = FONT;
  ctx.fillStyle = soft;
  ctx.fillText({ stage: "pipeline stage" }[map.across] ?? map.across, left + (width - left) / 2, below + 26);
  if (map.down) { ctx.textAlign = "left"; ctx.fillText(`rows: ${{ dp: "data parallel" }[map.down] ?? map.down}`, 4, below + 26); }
}
