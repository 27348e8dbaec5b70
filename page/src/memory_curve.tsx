/**
 * Memory over time: what each category holds, stacked, with steps, phases, the peak and what is reserved. A click chooses a
 * moment, a drag a range.
 */
import { effect, type Signal, useComputed, useSignal } from "@preact/signals";
import type { JSX } from "preact";
import { useMemo, useRef } from "preact/hooks";
import uPlot from "uplot";
import { categoryName } from "./basis";
import { axis, Chart, type ChartOptions, FONT } from "./chart";
import { colorOf, inkOn, themeColor } from "./colors";
import { bytes, clean, timeUnit, us } from "./format";
import type { PageData } from "./page_data";
import { Marked } from "./parts";
import { selection } from "./state";

const MIB = 1048576;
const LARGE = 4096 * MIB; // from here on in GiB, as everywhere
// What stays lies below what comes and goes.
const FROM_BELOW = ["params", "os_params", "os_state", "grads", "other", "communication", "activation", "workspace"];
const MOST_STEP_LINES = 400;
const MOST_LISTED = 60; // rows of the table for those who do not see the curve
const STRIP = 15; // height of the phases' strip
const TOP = 36; // above the curve: names of steps, then phases

/** Microseconds are since the recording began. */
export interface Curve {
  start_ns: number;
  end_us: number;
  events: number;
  time_us: number[];
  allocated_bytes: number[];
  reserved_bytes: number[] | null;
  categories: Record<string, number[]>;
  steps: { step: number; start_us: number; end_us: number }[];
  phases: { phase: string; start_us: number }[];
}

export type Stretch = readonly [fromUs: number, toUs: number];

export const categoriesOf = (curve: Curve): string[] => Object.keys(curve.categories).sort((a, b) => FROM_BELOW.indexOf(a) - FROM_BELOW.indexOf(b));

/** The last point of the curve at or before a time; the first where there is none. */
export function pointAt(curve: Curve, timeUs: number): number {
  let [low, high] = [0, curve.time_us.length - 1];
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (curve.time_us[middle]! <= timeUs) low = middle;
    else high = middle - 1;
  }
  return low;
}

/** Step and phase at a time, as far as they are known. */
export function placeInSteps(curve: Curve, timeUs: number): string {
  const step = curve.steps.find(one => one.start_us <= timeUs && timeUs < one.end_us);
  const phase = curve.phases.findLast(one => one.start_us <= timeUs);
  return [step ? `step ${step.step}` : "", phase && (!step || phase.start_us >= step.start_us) ? phase.phase : ""].filter(Boolean).join(", ");
}

interface Props {
  data: PageData;
  moment: Signal<number | null>;
  chosen: Stretch | null; // the range
  life: Signal<Stretch | null>; // of one allocation
  onRange: (range: Stretch | null) => void;
}

export function MemoryCurve({ data, moment, chosen, life, onRange }: Props): JSX.Element {
  const { curve, peak } = data["memory"] as { curve: Curve; peak: { time_ns: number; allocated_bytes: number } };
  const view = useSignal<Stretch | null>(null); // what is zoomed into
  const hover = useSignal<number | null>(null);
  const chart = useRef<uPlot | null>(null);
  const range = useSignal(chosen);
  range.value = chosen;
  const stepChosen = useComputed((): Stretch | null => {
    const one = selection.value?.kind === "step" ? selection.value.number : null;
    const found = curve.steps.find(other => other.step === one);
    return found ? [found.start_us, found.end_us] : null;
  });
  const { size: tick, unit: second } = timeUnit(Math.max(1000, curve.end_us));
  const [size, unit] = peak.allocated_bytes >= LARGE ? [1024 * MIB, "GiB"] : [MIB, "MiB"];
  const peakUs = (peak.time_ns - curve.start_ns) / 1000;
  const names = categoriesOf(curve);
  const drawn = useMemo(() => stacked(curve, names, tick, size), [curve]);
  const [from, to] = view.value ?? [0, curve.end_us];

  const zoom = (factor: number, around: number) => {
    const [a, b] = view.value ?? [0, curve.end_us];
    const wide = Math.min(curve.end_us, Math.max((b - a) * factor, 1));
    const left = Math.min(Math.max(0, around - ((around - a) / (b - a)) * wide), curve.end_us - wide);
    view.value = wide >= curve.end_us ? null : [left, left + wide];
  };
  const choose = (timeUs: number) => {
    onRange(null);
    moment.value = Math.min(curve.end_us, Math.max(0, timeUs));
  };

  const options = (): ChartOptions => ({
    padding: [TOP, 14, 0, 0],
    scales: { x: { time: false, range: () => (view.value ?? [0, curve.end_us]).map(one => one / tick) as [number, number] }, y: { range: (_, __, most) => [0, most * 1.03 || 1] } },
    axes: [
      axis({ label: `${second} since the recording began`, labelSize: 22, size: 34 }),
      axis({ label: `${unit} on ${clean(data["memory"].device ?? "")}`, labelSize: 20, size: 58, values: (_, splits) => splits.map(one => one.toLocaleString("en-US")) }),
    ],
    series: [
      {},
      ...names.map(name => ({ label: name, stroke: "transparent", width: 0, paths: uPlot.paths.stepped!({ align: 1 }), points: { show: false }, fill: colorOf(data, "category", name) })),
      { label: "allocated", stroke: themeColor("--ink"), width: 1, paths: uPlot.paths.stepped!({ align: 1 }), points: { show: false } },
      ...(curve.reserved_bytes ? [{ label: "reserved", stroke: themeColor("--ink"), width: 1.4, dash: [6, 4], paths: uPlot.paths.stepped!({ align: 1 }), points: { show: false } }] : []),
    ],
    bands: names.slice(1).map((name, i) => ({ series: [i + 2, i + 1] as [number, number], fill: colorOf(data, "category", name) })),
    cursor: {
      y: false, points: { show: false }, drag: { x: true, y: false, setScale: false, dist: 4 },
      bind: { dblclick: () => () => { view.value = null; return null; } },
    },
    hooks: {
      draw: [one => drawOver(one, data, curve, tick, { peak: [peakUs, peak.allocated_bytes / size], moment: moment.value, range: range.value, life: life.value ?? stepChosen.value })],
      setCursor: [one => { hover.value = (one.cursor.left ?? -1) >= 0 ? one.posToVal(one.cursor.left!, "x") * tick : null; }],
      setSelect: [one => {
        if (one.select.width < 3) return;
        const ends = [one.select.left, one.select.left + one.select.width].map(left => Math.min(curve.end_us, Math.max(0, one.posToVal(left, "x") * tick)));
        one.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
        moment.value = null;
        onRange([ends[0]!, ends[1]!]);
      }],
    },
  });

  const ready = (made: uPlot) => {
    chart.current = made;
    made.over.addEventListener("click", event => choose(made.posToVal(event.offsetX, "x") * tick));
    made.over.addEventListener("wheel", event => {
      if (!event.ctrlKey) return; // else the page could not be scrolled past it
      event.preventDefault();
      zoom(event.deltaY < 0 ? 0.8 : 1.25, made.posToVal(event.offsetX, "x") * tick);
    }, { passive: false });
    const stop = effect(() => {
      const [a, b] = view.value ?? [0, curve.end_us];
      made.setScale("x", { min: a / tick, max: b / tick });
    });
    const stopMarks = effect(() => {
      void [moment.value, range.value, life.value, stepChosen.value];
      made.redraw(false, false);
    });
    made.hooks["destroy"] = [() => { stop(); stopMarks(); }];
  };

  const onKeyDown = (event: KeyboardEvent) => {
    const at = moment.value ?? peakUs;
    const by = (to - from) / 100;
    const ends = curve.phases.map(one => one.start_us);
    const next = {
      ArrowLeft: () => at - by, ArrowRight: () => at + by, Home: () => 0, End: () => curve.end_us,
      PageDown: () => ends.find(one => one > at) ?? curve.end_us, PageUp: () => ends.findLast(one => one < at) ?? 0,
    }[event.key];
    if (next && event.shiftKey) {
      const ends = [range.value?.[0] ?? at, Math.min(curve.end_us, Math.max(0, range.value ? range.value[1] + (event.key === "ArrowLeft" ? -by : by) : next()))];
      onRange([Math.min(...ends), Math.max(...ends)]);
    } else if (next) choose(next());
    else if (event.key === "+" || event.key === "=") zoom(0.5, at);
    else if (event.key === "-") zoom(2, at);
    else if (event.key === "Escape") { onRange(null); moment.value = null; view.value = null; }
    else return;
    event.preventDefault();
  };

  const shown = hover.value ?? moment.value ?? peakUs;
  const point = pointAt(curve, shown);
  const reading = `${us(shown)}${placeInSteps(curve, shown) ? `, ${placeInSteps(curve, shown)}` : ""}: ${bytes(curve.allocated_bytes[point])} allocated${curve.reserved_bytes ? `, ${bytes(curve.reserved_bytes[point])} reserved` : ""}`;
  const highest = chosen && curve.allocated_bytes.slice(pointAt(curve, chosen[0]), pointAt(curve, chosen[1]) + 1).reduce((a, b) => Math.max(a, b));
  const said = hover.value !== null || moment.value !== null ? reading : chosen ? `Range, ${us(chosen[0])} to ${us(chosen[1])}: up to ${bytes(highest)} allocated` : `Peak: ${reading}`;
  return (
    <div class="memory-curve">
      <div class="tools">
        <strong class="reading">{said}</strong>
        {chosen && <button type="button" class="small" onClick={() => { view.value = chosen; }}>Zoom to the range</button>}
        {view.value && <button type="button" class="small" onClick={() => { view.value = null; }}>Show all</button>}
      </div>
      <div tabIndex={0} role="slider" aria-label="Moment in the memory curve" aria-valuemin={0} aria-valuemax={Math.round(curve.end_us)} aria-valuenow={Math.round(moment.value ?? peakUs)} aria-valuetext={said} onKeyDown={onKeyDown}>
        <Chart data={drawn} options={options} height={380} onReady={ready} />
      </div>
      <ul class="legend values">
        {names.map(name => <li key={name}><Marked color={colorOf(data, "category", name)}>{categoryName(data, name)} <b>{bytes(curve.categories[name]![point])}</b></Marked></li>)}
        {curve.reserved_bytes && <li><span class="dashed" />reserved <b>{bytes(curve.reserved_bytes[point])}</b></li>}
      </ul>
      <p class="note">Click: a moment. Drag: a range. Ctrl and wheel, or + and −: zoom. Keys: arrows, with Shift a range; Page Up and Down go from phase to phase; Escape: the peak.</p>
      <HiddenTable data={data} curve={curve} names={names} />
    </div>
  );
}

/** For those who do not see the curve: its value where each phase begins, or at even distances. */
function HiddenTable({ data, curve, names }: { data: PageData; curve: Curve; names: readonly string[] }): JSX.Element {
  const starts = curve.phases.length ? curve.phases.map(one => one.start_us) : Array.from({ length: 20 }, (_, i) => (curve.end_us * i) / 19);
  return (
    <div class="unseen"><table>
      <caption>Memory where each phase begins{starts.length > MOST_LISTED ? `, the first ${MOST_LISTED} of ${starts.length}` : ""}</caption>
      <thead><tr><th scope="col">Time</th><th scope="col">Step, phase</th><th scope="col">Allocated</th>{names.map(name => <th key={name} scope="col">{categoryName(data, name)}</th>)}</tr></thead>
      <tbody>
        {starts.slice(0, MOST_LISTED).map((time, i) => {
          const at = pointAt(curve, time);
          return <tr key={i}><td>{us(time)}</td><td>{placeInSteps(curve, time)}</td><td>{bytes(curve.allocated_bytes[at])}</td>{names.map(name => <td key={name}>{bytes(curve.categories[name]![at])}</td>)}</tr>;
        })}
      </tbody>
    </table></div>
  );
}

/** Times, then each category on top of those below it, what is allocated in all, what is reserved; held until the end. */
function stacked(curve: Curve, names: readonly string[], tick: number, size: number): uPlot.AlignedData {
  const held = (sizes: readonly number[]) => [...sizes, sizes.at(-1) ?? 0].map(one => one / size);
  const below = new Float64Array(curve.time_us.length + 1);
  const layers = names.map(name => {
    held(curve.categories[name]!).forEach((value, i) => { below[i]! += value; });
    return below.slice();
  });
  const times = [...curve.time_us, curve.end_us].map(time => time / tick);
  return [times, ...layers, held(curve.allocated_bytes), ...(curve.reserved_bytes ? [held(curve.reserved_bytes)] : [])];
}

interface Marks {
  peak: readonly [timeUs: number, size: number];
  moment: number | null;
  range: Stretch | null;
  life: Stretch | null;
}

/** Over the curve: steps, phases, the peak, what is chosen. Canvas pixels. */
function drawOver(chart: uPlot, data: PageData, curve: Curve, tick: number, marks: Marks): void {
  const { ctx, bbox } = chart;
  const ratio = uPlot.pxRatio;
  const x = (timeUs: number) => Math.min(bbox.left + bbox.width, Math.max(bbox.left, chart.valToPos(timeUs / tick, "x", true)));
  const inSight = (a: number, b: number) => x(b) > bbox.left && x(a) < bbox.left + bbox.width;
  const [ink, soft] = [themeColor("--ink"), themeColor("--soft")];
  ctx.save();
  ctx.lineWidth = ratio;
  ctx.textBaseline = "middle";
  ctx.textAlign = "center";
  ctx.font = FONT.replace("12px", `${11 * ratio}px`);
  const line = (timeUs: number, color: string, dash: number[], top = bbox.top) => {
    if (!inSight(timeUs, timeUs)) return;
    ctx.strokeStyle = color;
    ctx.setLineDash(dash.map(one => one * ratio));
    ctx.beginPath();
    ctx.moveTo(x(timeUs), top);
    ctx.lineTo(x(timeUs), bbox.top + bbox.height);
    ctx.stroke();
  };
  const top = bbox.top - TOP * ratio;
  let named = -Infinity;
  curve.steps.slice(0, MOST_STEP_LINES).forEach(step => {
    line(step.start_us, soft, [2, 3], top);
    line(step.end_us, soft, [2, 3], top);
    const [a, b] = [x(step.start_us), x(step.end_us)];
    const text = `step ${step.step}`;
    const wide = ctx.measureText(text).width;
    const middle = (a + b) / 2;
    if (!inSight(step.start_us, step.end_us) || middle - wide / 2 < named) return;
    named = middle + wide / 2 + 8 * ratio;
    ctx.fillStyle = soft;
    ctx.fillText(text, Math.min(middle, bbox.left + bbox.width - wide / 2), top + 8 * ratio);
  });
  ctx.setLineDash([]);
  curve.phases.forEach((one, i) => {
    const next = curve.phases[i + 1]?.start_us ?? curve.end_us;
    // An optimizer's step that is open when the recording stops lasts, in the trace, until that has stopped.
    const within = curve.steps.find(step => step.start_us <= one.start_us && one.start_us < step.end_us);
    const until = within ? Math.min(next, within.end_us) : next;
    if (!one.phase || !inSight(one.start_us, until)) return;
    const [a, b] = [x(one.start_us), x(until)];
    ctx.fillStyle = colorOf(data, "phase", one.phase);
    ctx.fillRect(a, bbox.top - (STRIP + 2) * ratio, Math.max(b - a, ratio), STRIP * ratio);
    if (ctx.measureText(one.phase).width + 6 * ratio > b - a) return;
    ctx.fillStyle = inkOn(colorOf(data, "phase", one.phase));
    ctx.fillText(one.phase, (a + b) / 2, bbox.top - (STRIP / 2 + 2) * ratio);
  });
  const box = ([from, to]: Stretch, color: string, alpha: number) => {
    if (!inSight(from, to)) return;
    ctx.fillStyle = ctx.strokeStyle = color;
    ctx.globalAlpha = alpha;
    ctx.fillRect(x(from), bbox.top, Math.max(x(to) - x(from), ratio), bbox.height);
    ctx.globalAlpha = 1;
    ctx.strokeRect(x(from), bbox.top, Math.max(x(to) - x(from), ratio), bbox.height);
  };
  if (marks.life) box(marks.life, ink, 0.18);
  if (marks.range) box(marks.range, themeColor("--accent"), 0.13);
  ctx.lineWidth = 2 * ratio;
  if (marks.moment !== null) line(marks.moment, themeColor("--accent"), []);
  const [peakUs, size] = marks.peak;
  if (inSight(peakUs, peakUs)) {
    const [at, high] = [x(peakUs), chart.valToPos(size, "y", true)];
    ctx.beginPath();
    ctx.moveTo(at, high);
    ctx.lineTo(at - 6 * ratio, high - 10 * ratio);
    ctx.lineTo(at + 6 * ratio, high - 10 * ratio);
    ctx.closePath();
    ctx.fillStyle = ink;
    ctx.strokeStyle = themeColor("--paper");
    ctx.stroke();
    ctx.fill();
  }
  ctx.restore();
}
