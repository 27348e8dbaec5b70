/** Roofline: how fast each part of the model works, against the most that the device can do. */
import type { JSX } from "preact";
import { useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { per, why } from "./basis";
import { markColumn } from "./cells";
import { Figure } from "./chart";
import { bandwidth, cut, flopRate, flops, full, isKnown, number, share, us } from "./format";
import type { PageData, Row } from "./page_data";
import { Marked } from "./parts";
import { type Column, Table } from "./table";

interface Point extends Row { name: string; kind: string; phase: string; time_us: number; flops_per_byte: number; flops_per_s: number; of_roof: number | null; bound: string | null }
interface Roof { points: Point[]; total_us: number; flops_per_s: Record<string, number>; bytes_per_s: number | null; not_shown: string; how: string; colors: Record<string, string>; other: string; failed?: string }
interface Limits { left: number; right: number; low: number; high: number }

const HEIGHT = 400;
const EDGE = { left: 64, right: 12, top: 10, bottom: 40 };
const LONGEST_NAME = 34;
const LETTER = 5.6; // pixels, in the mean, of a name beside a point
const SHAPES: Readonly<Record<string, string>> = { forward: "circle", prefill: "circle", decode: "diamond", verify: "diamond", backward: "square", recompute: "triangle" };
const FILLED = new Set(["forward", "prefill", "decode", "verify"]);

const isDrawn = (point: Point): boolean => isKnown(point.flops_per_byte) && isKnown(point.flops_per_s);

export function whyNoRoofline(data: PageData): string | null {
  const what = data["views"]?.roofline as Roof | undefined;
  if (!what) return "the roofline is not in this page";
  if (what.failed) return what.failed;
  return what.points.some(isDrawn) || data["utilization"] ? null : (why(data, "flops") ?? "no part of the model has FLOPs and bytes that are known: record a step with shapes");
}

export function RooflineView({ data }: { data: PageData }): JSX.Element {
  const what = data["views"].roofline as Roof;
  const drawn = what.points.filter(isDrawn);
  const [over, setOver] = useState<Point | null>(null);
  const kinds = [...new Set(drawn.map(point => (what.colors[point.kind] ? point.kind : "other")))];
  return (
    <>
      <Use data={data} what={what} />
      {drawn.length > 0 ? (
        <>
          <p class="note">How fast each part works: like layers together; the larger, the more time. Shapes stand for phases (circle forward, square backward, triangle recompute, diamond decode), colours for kinds:</p>
          <div class="legend">{kinds.map(kind => <Marked key={kind} color={what.colors[kind] ?? what.other}>{kind}</Marked>)}</div>
          <Chart data={data} what={what} drawn={drawn} over={over} onOver={setOver} />
        </>
      ) : <p class="note">{why(data, "flops") ?? "no part of the model has both FLOPs and bytes that are known"}</p>}
      {what.how && <p class="notice">{what.how}</p>}
      {what.not_shown && <p class="note">{what.not_shown}</p>}
      <Parts data={data} what={what} over={over} onOver={setOver} />
    </>
  );
}

function Use({ data, what }: { data: PageData; what: Roof }): JSX.Element {
  const use = data["utilization"];
  const reason = why(data, "flops") ?? "shapes were not recorded";
  const peaks = Object.entries(what.flops_per_s);
  const noPeak = use && !peaks.length ? (what.bytes_per_s ? "only its bandwidth is known, no peak of these types" : "what this device can do is not known") : (why(data, "mfu", "not available") ?? reason);
  const value = (key: string, format: (value: number) => string): string | null => (isKnown(use?.[key]) ? format(use[key]) : null);
  const causal = (key: string, format: (value: number) => string): string | undefined => {
    const rest = use?.[`causal_${key}`];
    return !rest || rest === use[key] ? undefined : `${format(rest)} without what a causal mask hides`;
  };
  return (
    <>
      <div class="figures">
        <Figure label="MFU" value={value("mfu", share)} missing={noPeak} help={causal("mfu", share)} />
        <Figure label="HFU" value={value("hfu", share)} missing={noPeak} help="with what is computed again" />
        <Figure label="Model FLOPs, a step" value={value("model_flops_per_step", flops)} missing={reason} help={causal("model_flops_per_step", flops)} />
        <Figure label="Hardware FLOPs, a step" value={value("hardware_flops_per_step", flops)} missing={reason} help={causal("hardware_flops_per_step", flops)} />
        <Figure label="Step, end to end" value={value("step_time_us", us)} missing={reason} help="mean over the steps" />
        <Figure label="Peak of the device" value={use?.peaks && peaks.length ? peaks.map(([dtype, peak]) => `${flopRate(peak)} ${dtype}`.trim()).join(", ") : null} missing={noPeak} help={what.bytes_per_s ? bandwidth(what.bytes_per_s) : undefined} />
      </div>
      {use?.peaks?.source && <p class="note">{peaks.length ? "The peak" : "The bandwidth"} is that of {cut(use.peaks.source, 300)}{use.devices > 1 ? `, for each of ${use.devices} devices` : ""}. MFU leaves out what is computed again; HFU counts it.</p>}
    </>
  );
}

function limits(what: Roof, drawn: readonly Point[]): Limits {
  const peaks = Object.values(what.flops_per_s);
  const across = [...drawn.map(point => point.flops_per_byte), ...(what.bytes_per_s ? peaks.map(peak => peak / what.bytes_per_s!) : [])];
  const up = [...drawn.map(point => point.flops_per_s), ...peaks];
  return { left: Math.min(...across) / 4, right: Math.max(...across) * 6, low: Math.min(...up) / 4, high: Math.max(...up) * 2.5 };
}

function Chart({ data, what, drawn, over, onOver }: { data: PageData; what: Roof; drawn: readonly Point[]; over: Point | null; onOver: (point: Point | null) => void }): JSX.Element {
  const holder = useRef<HTMLDivElement>(null);
  const [width, setWidth] = useState(0);
  useLayoutEffect(() => {
    const box = holder.current!;
    const watcher = new ResizeObserver(() => setWidth(box.clientWidth));
    watcher.observe(box);
    setWidth(box.clientWidth);
    return () => watcher.disconnect();
  }, []);
  const { left, right, low, high } = limits(what, drawn);
  const [wide, tall] = [Math.max(1, width - EDGE.left - EDGE.right), HEIGHT - EDGE.top - EDGE.bottom];
  const x = (value: number): number => EDGE.left + (wide * Math.log(value / left)) / Math.log(right / left);
  const y = (value: number): number => EDGE.top + tall * (1 - Math.log(value / low) / Math.log(high / low));
  const longest = Math.max(...drawn.map(point => point.time_us));
  const radius = (point: Point): number => Math.max(4, 15 * Math.sqrt(point.time_us / longest));
  const color = (point: Point): string => what.colors[point.kind] ?? what.other;
  const names = useMemo(() => named(drawn, x, y, radius, EDGE.left + wide), [drawn.length, drawn[0], wide]);
  return (
    <div class="roofline" ref={holder}>
      <svg width={width} height={HEIGHT} role="img" aria-label={`Roofline: ${drawn.length} parts of the model by FLOPs per byte and FLOPs per second; the table below has them`}>
        {powers(left, right).map(value => <g key={`x${value}`} class="tick"><line x1={x(value)} x2={x(value)} y1={EDGE.top} y2={EDGE.top + tall} /><text x={x(value)} y={HEIGHT - 24} text-anchor="middle">{number(value)}</text></g>)}
        {powers(low, high).map(value => <g key={`y${value}`} class="tick"><line x1={EDGE.left} x2={EDGE.left + wide} y1={y(value)} y2={y(value)} /><text x={EDGE.left - 6} y={y(value) + 4} text-anchor="end">{flopRate(value).replace(/\.0+ /, " ").replace("FLOP/s", "F/s")}</text></g>)}
        <text class="axis" x={EDGE.left + wide / 2} y={HEIGHT - 6} text-anchor="middle">{width > 700 ? "FLOPs per byte moved (each input of an op read once, each output written once)" : "FLOPs per byte moved"}</text>
        {Object.entries(what.flops_per_s).map(([dtype, peak]) => {
          const start = what.bytes_per_s ? Math.max(left, low / what.bytes_per_s) : left;
          const ridge = what.bytes_per_s ? Math.max(left, peak / what.bytes_per_s) : left;
          const slope = what.bytes_per_s && ridge > left ? `${x(start)},${y(start * what.bytes_per_s)} ` : "";
          return (
            <g key={dtype} class="roof">
              <polyline points={`${slope}${x(ridge)},${y(peak)} ${x(right)},${y(peak)}`} />
              <text x={x(right) - 2} y={y(peak) - 4} text-anchor="end">{`${flopRate(peak)} ${dtype}`.trim()}</text>
            </g>
          );
        })}
        {drawn.map((point, i) => (
          <g key={i} class={point === over ? "point over" : "point"} onMouseEnter={() => onOver(point)} onMouseLeave={() => onOver(null)} fill={FILLED.has(point.phase) ? color(point) : "var(--paper)"} stroke={color(point)}>
            <Mark shape={SHAPES[point.phase] ?? "cross"} x={x(point.flops_per_byte)} y={y(point.flops_per_s)} size={radius(point)} />
            <title>{said(point, per(data))}</title>
          </g>
        ))}
        {names.map(({ point, at, isRight }) => <text key={at} class="name" x={x(point.flops_per_byte) + (isRight ? 1 : -1) * (radius(point) + 4)} y={y(point.flops_per_s) + 4} text-anchor={isRight ? "start" : "end"}>{cut(point.name, LONGEST_NAME)}</text>)}
      </svg>
    </div>
  );
}

function Mark({ shape, x, y, size }: { shape: string; x: number; y: number; size: number }): JSX.Element {
  if (shape === "circle") return <circle cx={x} cy={y} r={size} />;
  if (shape === "square") return <rect x={x - size * 0.9} y={y - size * 0.9} width={size * 1.8} height={size * 1.8} />;
  const corners: readonly (readonly [number, number])[] = shape === "diamond" ? [[0, -1.2], [1.2, 0], [0, 1.2], [-1.2, 0]] : shape === "triangle" ? [[0, -1.1], [1.1, 0.9], [-1.1, 0.9]] : [[-1, -1], [1, 1], [0, 0], [1, -1], [-1, 1], [0, 0]];
  return <polygon points={corners.map(([dx, dy]) => `${x + dx * size},${y + dy * size}`).join(" ")} />;
}

function said(point: Point, reach: string): string {
  const roof = point.of_roof === null ? "" : `${share(point.of_roof)} of the roof${point.bound ? `, bound by ${point.bound}` : ""}`;
  return [`${full(point.name)}, ${point.phase}`, `${us(point.time_us)} ${reach}, ${flopRate(point.flops_per_s)}`, `${number(point.flops_per_byte)} FLOPs a byte`, roof].filter(Boolean).join("\n");
}

/** Powers of ten between two numbers. */
function powers(from: number, to: number): number[] {
  const [first, last] = [Math.ceil(Math.log10(from)), Math.floor(Math.log10(to))];
  return Array.from({ length: Math.max(0, last - first + 1) }, (_, i) => 10 ** (first + i));
}

/** Names beside points, right of them or left, the longest parts first; what finds no room has its name in its tooltip. */
function named(drawn: readonly Point[], x: (value: number) => number, y: (value: number) => number, radius: (point: Point) => number, end: number): { point: Point; at: number; isRight: boolean }[] {
  type Box = readonly [left: number, right: number, top: number, bottom: number];
  const boxOf = (point: Point): Box => [x(point.flops_per_byte) - radius(point), x(point.flops_per_byte) + radius(point), y(point.flops_per_s) - radius(point), y(point.flops_per_s) + radius(point)];
  const boxes: Box[] = drawn.map(boxOf);
  const kept: { point: Point; at: number; isRight: boolean }[] = [];
  const order = drawn.map((point, at) => ({ point, at })).sort((a, b) => b.point.time_us - a.point.time_us);
  for (const { point, at } of order) {
    const [from, until] = boxOf(point);
    const middle = y(point.flops_per_s);
    if (kept.some(one => one.point.name === point.name && Math.abs(x(one.point.flops_per_byte) - x(point.flops_per_byte)) < 30 && Math.abs(y(one.point.flops_per_s) - middle) < 20)) continue;
    const wide = LETTER * Math.min(LONGEST_NAME, point.name.length) + 4;
    for (const isRight of [true, false]) {
      const box: Box = isRight ? [until + 2, until + 2 + wide, middle - 7, middle + 7] : [from - 2 - wide, from - 2, middle - 7, middle + 7];
      if (box[0] < EDGE.left || box[1] > end || boxes.some((other, i) => i !== at && box[0] < other[1] && other[0] < box[1] && box[2] < other[3] && other[2] < box[3])) continue;
      boxes.push(box);
      kept.push({ point, at, isRight });
      break;
    }
  }
  return kept;
}

function Parts({ data, what, over, onOver }: { data: PageData; what: Roof; over: Point | null; onOver: (point: Point | null) => void }): JSX.Element {
  const isRoofKnown = what.points.some(point => point["roof_us"] !== null);
  const reason = (row: Point): string => (row["why"] as string) || "not known";
  const columns = useMemo((): Column<Point>[] => [
    { key: "name", title: "Part", kind: "text", longest: 60 },
    { key: "kind", title: "Kind", kind: "text", cell: row => <Marked color={what.colors[row.kind] ?? what.other}>{row.kind}</Marked> },
    markColumn(data, "phase", "phase", "Phase") as Column<Point>,
    { key: "time_us", title: "Time", kind: "us", help: per(data) },
    { key: "time_share", title: "Of all", kind: "share", bar: true, help: "of all time", value: row => (what.total_us ? row.time_us / what.total_us : null) },
    ...(isRoofKnown ? ([
      { key: "roof_us", title: "At the roof", kind: "us", like: "time_us", missing: reason, spare: 1 },
      { key: "of_roof", title: "Of the roof", kind: "share", help: "time at the roof over time: 100 % is as fast as the device can; over it: what is in a cache needs no memory", missing: reason },
      { key: "bound", title: "Bound by", kind: "text", missing: reason },
    ] satisfies Column<Point>[]) : []),
    { key: "flops_per_s", title: "Rate", kind: "flop_rate", missing: "its FLOPs are not known" },
    { key: "flops_per_byte", title: "FLOPs a byte", kind: "number", missing: "its FLOPs or bytes are not known", spare: 2 },
    { key: "flops", title: "FLOPs", kind: "flops", missing: "its FLOPs are not known", spare: 3 },
    { key: "bytes_moved", title: "Bytes moved", kind: "bytes", missing: "its bytes are not known", spare: 4 },
  ], [data]);
  const id = (row: Point): string => String(what.points.indexOf(row));
  return (
    <>
      <p class="note">Times are {per(data)}. What a causal mask hides is left out of the FLOPs. At the roof: per op the longer of its bytes and its FLOPs at the device's peak. A row that is chosen stands out in the chart.</p>
      <Table name="roofline" label="Parts of the model, against their roof" rows={what.points} columns={columns} id={id} sort={{ key: "time_us", descending: true }} selected={over ? id(over) : null} onSelect={onOver} />
    </>
  );
}
