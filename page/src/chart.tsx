/** Charts: uPlot in the theme's colours, small bars, and one bar of many parts. */
import type { ReadonlySignal } from "@preact/signals";
import type { JSX, RefObject, TargetedMouseEvent } from "preact";
import { useLayoutEffect, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import "./chart.css";
import { themeColor } from "./colors";
import { cut, full, isKnown, share } from "./format";
import { Marked } from "./parts";
import { drawnDark } from "./theme";

export type ChartOptions = Omit<uPlot.Options, "width" | "height">;
export const FONT = "12px system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif";

/** A chart as wide as its place. `options` is asked again when the theme changes; `onReady` gets each chart that is made. */
export function Chart({ data, options, height, onReady }: { data: uPlot.AlignedData; options: () => ChartOptions; height: number; onReady?: (chart: uPlot) => void }): JSX.Element {
  const holder = useRef<HTMLDivElement>(null);
  const dark = drawnDark.value;
  useLayoutEffect(() => {
    const element = holder.current!;
    const chart = new uPlot({ legend: { show: false }, ...options(), width: Math.max(1, element.clientWidth), height }, data, element);
    const sizes = new ResizeObserver(() => chart.setSize({ width: Math.max(1, element.clientWidth), height }));
    sizes.observe(element);
    onReady?.(chart);
    return () => {
      sizes.disconnect();
      chart.destroy();
    };
  }, [data, dark, height]);
  return <div class="chart" ref={holder} aria-hidden="true" style={{ height: `${height}px` }} />;
}

/** A canvas that is drawn at once, as printing does not wait, then once a frame: at a new size, theme, or value of `when`. */
export function useCanvas(draw: (context: CanvasRenderingContext2D, width: number, height: number) => void, when: readonly ReadonlySignal<unknown>[], inputs: readonly unknown[]): RefObject<HTMLCanvasElement | null> {
  const canvas = useRef<HTMLCanvasElement>(null);
  const dark = drawnDark.value;
  useLayoutEffect(() => {
    const place = canvas.current;
    if (!place) return;
    let frame = 0;
    const now = () => {
      const ratio = devicePixelRatio || 1;
      const [width, height] = [place.clientWidth, place.clientHeight];
      [place.width, place.height] = [Math.round(width * ratio), Math.round(height * ratio)];
      const context = place.getContext("2d")!;
      context.setTransform(ratio, 0, 0, ratio, 0, 0);
      context.font = FONT;
      context.textBaseline = "middle";
      draw(context, width, height);
    };
    const soon = () => { frame ||= requestAnimationFrame(() => { frame = 0; now(); }); };
    now();
    const sizes = new ResizeObserver(soon);
    sizes.observe(place);
    const stop = when.map(one => one.subscribe(soon));
    return () => { sizes.disconnect(); stop.forEach(end => end()); cancelAnimationFrame(frame); };
  }, [dark, ...inputs]);
  return canvas;
}

/** An axis in the theme's colours. */
export function axis(more: uPlot.Axis): uPlot.Axis {
  const line = { stroke: themeColor("--line"), width: 1 };
  return { stroke: themeColor("--soft"), font: FONT, labelFont: FONT, grid: line, ticks: { ...line, size: 5 }, ...more };
}

// ---- one bar of many parts --------------------------------------------------------------------------------------------

export interface Part {
  name: string;
  value: number;
  color: string;
  help?: string | undefined;
}

/** Parts of one whole beside one another, each named with its value and share below. */
export function Shares({ title, parts, format, of }: { title: string; parts: readonly Part[]; format: (value: number) => string; of: string }): JSX.Element {
  const shown = parts.filter(part => part.value > 0);
  const total = shown.reduce((sum, part) => sum + part.value, 0);
  const said = (part: Part) => full(`${part.name}: ${format(part.value)}, ${share(part.value / total)} of ${of}${part.help ? `. ${part.help}` : ""}`);
  return (
    <figure class="parts-bar">
      <figcaption>{title}</figcaption>
      <div class="strip" aria-hidden="true">
        {shown.map(part => <div key={part.name} title={said(part)} style={{ flexGrow: part.value / total, background: part.color }} />)}
      </div>
      <ul class="legend">
        {shown.map(part => <li key={part.name} title={said(part)}><Marked color={part.color}>{cut(part.name, 60)} {format(part.value)} ({share(part.value / total)})</Marked></li>)}
      </ul>
    </figure>
  );
}

// ---- small bars -------------------------------------------------------------------------------------------------------

const WIDTH = 300;
const HEIGHT = 48;

export function median(values: readonly number[]): number {
  if (!values.length) return 0;
  const sorted = [...values].sort((a, b) => a - b);
  const half = sorted.length >> 1;
  return sorted.length % 2 ? sorted[half]! : (sorted[half - 1]! + sorted[half]!) / 2;
}

/** Places of values over 20 % and 5 robust deviations off the median; as in the text table. */
export function outliers(values: readonly (number | null | undefined)[]): Set<number> {
  const known = values.filter(isKnown);
  const middle = median(known);
  if (known.length < 3 || known.length < values.length || middle <= 0) return new Set();
  const most = Math.max(0.2 * middle, 5 * 1.4826 * median(known.map(value => Math.abs(value - middle))));
  return new Set(known.flatMap((value, i) => (Math.abs(value - middle) > most ? [i] : [])));
}

export interface BarsProps {
  title: string;
  values: readonly (number | null | undefined)[]; // null leaves a gap
  labels: readonly string[];
  format: (value: number) => string;
  color?: string;
  far?: ReadonlySet<number>; // bars that stand out, named by `short`
  marked?: ReadonlySet<number>; // with a line below
  help?: string;
  short?: (i: number) => string;
  onChoose?: (i: number) => void;
}

/** A bar for each value, from 0, with the median as a line. */
export function Bars({ title, values, labels, format, color, far = new Set(), marked = new Set(), help, short = String, onChoose }: BarsProps): JSX.Element {
  const known = values.filter(isKnown);
  const most = known.reduce((a, b) => Math.max(a, b), 0) || 1;
  const middle = median(known);
  const least = known.reduce((a, b) => Math.min(a, b), Infinity);
  const width = WIDTH / values.length;
  const y = (value: number) => HEIGHT - (value / most) * (HEIGHT - 4);
  const first = [...far].slice(0, 3).map(short).join(", ");
  const named = far.size ? `outlier${far.size > 1 ? "s" : ""}: ${first}${far.size > 3 ? " …" : ""}; ` : ""; // not everybody sees colours
  const [over, setOver] = useState(-1); // one element for all bars: there are many charts, and blocks
  const range = known.length ? `${format(least)} to ${format(most)}` : "";
  const at = [...marked][0] ?? -1;
  const keys = (event: KeyboardEvent) => {
    const next = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: values.length - 1 }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    onChoose!(Math.max(0, Math.min(values.length - 1, next)));
  };
  const top = (value: number) => Math.min(HEIGHT - 1, y(value));
  const under = (event: TargetedMouseEvent<SVGSVGElement>) => {
    const box = event.currentTarget.getBoundingClientRect();
    return Math.floor(((event.clientX - box.left) / box.width) * values.length);
  };
  const said = `${title}: ${values.length} values, ${range}. ${named}`;
  const slider = { role: "slider", tabindex: 0, "aria-valuemin": 0, "aria-valuemax": values.length - 1, "aria-valuenow": Math.max(0, at), "aria-valuetext": at < 0 ? "none is chosen" : `${labels[at]}: ${isKnown(values[at]) ? format(values[at]) : "not known"}`, onKeyDown: keys } as const;
  return (
    <figure class="bars">
      <figcaption title={[`median ${format(middle)}`, range, help].filter(Boolean).join(". ")}>
        {title} <span class="quiet">{known.length ? `${named}${known.length > 1 ? "median " : ""}${format(middle)}` : "not known"}</span>
      </figcaption>
      <svg viewBox={`0 0 ${WIDTH} ${HEIGHT}`} preserveAspectRatio="none" aria-label={said}
        onMouseMove={event => setOver(under(event))} onMouseLeave={() => setOver(-1)} onClick={event => isKnown(values[under(event)]) && onChoose?.(under(event))} {...(onChoose ? slider : { role: "img" })}>
        <path d={values.map((value, i) => (isKnown(value) && value > 0 && !far.has(i) ? `M${(i + 0.1) * width} ${HEIGHT}V${top(value)}h${0.8 * width}V${HEIGHT}z` : "")).join("")} style={color ? { fill: color } : undefined} />
        {[...far].map(i => isKnown(values[i]) && <rect key={i} class="outlier" x={(i + 0.1) * width} y={top(values[i])} width={0.8 * width} height={HEIGHT - top(values[i])} />)}
        {[...marked].map(i => <rect key={i} class="marked" x={i * width} y={HEIGHT - 3} width={width} height={3} />)}
        {isKnown(values[over]) && <rect class="hover" x={over * width} y={0} width={width} height={HEIGHT}><title>{`${full(labels[over])}: ${format(values[over])}`}</title></rect>}
        {known.length > 0 && <line x1={0} x2={WIDTH} y1={y(middle)} y2={y(middle)} class="median" />}
      </svg>
    </figure>
  );
}

/** A number with what it means; what is not known has its reason, and never a dash alone. */
export function Figure({ label, value, help, missing }: { label: string; value: string | null; help?: string | undefined; missing?: string | undefined }): JSX.Element {
  return (
    <div class="figure">
      <div class="label">{label}</div>
      {value !== null ? <div class="value">{value}</div> : <div class="help">{missing ?? "not known"}</div>}
      {value !== null && help ? <div class="help">{help}</div> : null}
    </div>
  );
}
