/** The timeline of many ranks: a lane for each, what it did; zoomed, moved, and a range of it added up. */
import { type Signal, useComputed, useSignal } from "@preact/signals";
import type { JSX } from "preact";
import { useEffect, useMemo, useRef } from "preact/hooks";
import { FONT, useCanvas } from "../chart";
import { themeColor } from "../colors";
import { cut, timeUnit, us } from "../format";
import type { PageData, Row } from "../page_data";
import { Marked, Section } from "../parts";
import { type Column, Table } from "../table";
import { drawnDark } from "../theme";
import { firstAfter, type Lanes, lanesOf, seen } from "./lanes";
import { choose, culprit, isNamed, kindColor, kindName, rankChosen, rankColumn } from "./marks";

type Stretch = readonly [from: number, to: number];
const TOP = 34; // pixels: numbers of steps and times
const LEAST_DRAG = 4; // pixels
const CLOSE = 0.4; // pixels between bars that are drawn as one

interface Hit {
  x: number;
  y: number;
  lane: number;
  kind: string;
  start: number;
  end: number;
}

const gutter = (width: number): number => (width < 560 ? 62 : 118);
const laneHeight = (count: number): number => (count <= 12 ? Math.min(56, Math.max(28, 400 / count)) : count <= 64 ? 21 : Math.max(6, 1344 / count));

export function RanksTimeline({ data }: { data: PageData }): JSX.Element | null {
  const lanes = useMemo(() => lanesOf(data), [data]);
  const view = useSignal<Stretch>(lanes.opensAt);
  const range = useSignal<Stretch | null>(null);
  const hit = useSignal<Hit | null>(null);
  const hovered = useComputed(() => hit.value?.lane ?? -1);
  const left = () => gutter(canvas.current!.clientWidth);
  const canvas = useCanvas((context, width, height) => draw(context, width, height, data, lanes, view.value, range.value, hovered.value), [view, range, hovered, rankChosen], [lanes]);
  const drag = useRef<{ x: number; isMove: boolean; view: Stretch } | null>(null);
  const dark = drawnDark.value;
  const { timeline } = data;

  useEffect(() => {
    const wheel = (event: WheelEvent) => {
      if (!event.ctrlKey && !event.shiftKey) return;
      event.preventDefault();
      const by = event.deltaY || event.deltaX;
      if (event.ctrlKey) zoom(by < 0 ? 0.8 : 1.25, timeAt(event.offsetX));
      else move((by / 800) * (view.value[1] - view.value[0]));
    };
    canvas.current?.addEventListener("wheel", wheel, { passive: false });
    return () => canvas.current?.removeEventListener("wheel", wheel);
  }, [lanes]);

  if (!timeline.bars.length) return <Section title="Timeline"><p class="note">No span lies in the steps that would be drawn.</p></Section>;

  const timeAt = (x: number): number => {
    const [from, to] = view.value;
    return from + ((x - left()) / Math.max(1, canvas.current!.clientWidth - left())) * (to - from);
  };
  const show = ([from, to]: Stretch) => {
    const wide = Math.min(lanes.end, Math.max(to - from, lanes.end / 1e6));
    const start = Math.min(Math.max(0, from), lanes.end - wide);
    view.value = [start, start + wide];
  };
  const zoom = (factor: number, around: number) => {
    const [from, to] = view.value;
    show([around - (around - from) * factor, around + (to - around) * factor]);
  };
  const move = (by: number) => show([view.value[0] + by, view.value[1] + by]);
  const laneAt = (y: number): number => Math.floor((y - TOP) / laneHeight(lanes.ranks.length));

  const down = (event: PointerEvent) => {
    if (event.button) return;
    canvas.current!.setPointerCapture(event.pointerId);
    drag.current = { x: event.offsetX, isMove: event.shiftKey, view: view.value };
  };
  const moved = (event: PointerEvent) => {
    const began = drag.current;
    if (!began) { hit.value = found(lanes, laneAt(event.offsetY), timeAt(event.offsetX), event); return; }
    if (Math.abs(event.offsetX - began.x) < LEAST_DRAG) return;
    if (began.isMove) {
      const by = ((began.x - event.offsetX) / (canvas.current!.clientWidth - left())) * (began.view[1] - began.view[0]);
      show([began.view[0] + by, began.view[1] + by]);
    } else {
      const ends = [timeAt(began.x), timeAt(event.offsetX)].map(time => Math.min(view.value[1], Math.max(view.value[0], time)));
      range.value = [Math.min(...ends), Math.max(...ends)];
    }
  };
  const up = (event: PointerEvent) => {
    if (drag.current && Math.abs(event.offsetX - drag.current.x) < LEAST_DRAG) {
      range.value = null;
      const rank = lanes.ranks[laneAt(event.offsetY)];
      if (rank !== undefined) choose(rank);
    }
    drag.current = null;
  };
  const keys = (event: KeyboardEvent) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const [from, to] = view.value;
    const middle = (from + to) / 2;
    const by = (to - from) / 8;
    const rank = (step: number) => { const at = lanes.ranks.indexOf(rankChosen.value ?? -1); rankChosen.value = lanes.ranks[Math.max(0, Math.min(lanes.ranks.length - 1, at + step))]!; };
    const acts: Record<string, () => void> = {
      w: () => zoom(0.6, middle), "+": () => zoom(0.6, middle), s: () => zoom(1.6, middle), "-": () => zoom(1.6, middle),
      a: () => move(-by), d: () => move(by), ArrowLeft: () => move(-by), ArrowRight: () => move(by),
      ArrowUp: () => rank(-1), ArrowDown: () => rank(1), Enter: () => { range.value = view.value; },
      Home: () => show([0, lanes.end]), Escape: () => { range.value = null; rankChosen.value = null; },
    };
    const act = acts[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  };

  const waits = timeline.waiting_known ? `${dark ? "Dark grey" : "Grey"} is waiting for others` : "Communication holds waiting for others: nothing tells them apart";
  const isWhole = view.value[1] - view.value[0] >= lanes.end;
  const height = TOP + laneHeight(lanes.ranks.length) * lanes.ranks.length + 2;
  const stepAt = (number: number): Stretch => {
    const at = lanes.steps.findIndex(one => one.number === number);
    return [lanes.steps[at]!.begin, lanes.steps[at + 1]?.begin ?? lanes.end];
  };
  return (
    <Section title="Timeline">
      <p class="note">{timeline.drawn}. {waits}; what is empty is in no span. Times: {timeline.clocks}.</p>
      <div class="tools">
        <label>Step <select aria-label="Step that is shown" value="" onChange={event => { if (event.currentTarget.value) show(stepAt(Number(event.currentTarget.value))); event.currentTarget.value = ""; }}>
          <option value="">go to …</option>
          {lanes.steps.map(one => <option key={one.number} value={one.number}>step {one.number}</option>)}
        </select></label>
        {range.value && <button type="button" class="small" onClick={() => { show(range.value!); }}>Zoom to the range</button>}
        {!isWhole && <button type="button" class="small" onClick={() => show([0, lanes.end])}>Show all</button>}
      </div>
      <div class="ranks-timeline">
        <canvas ref={canvas} tabIndex={0} role="application" aria-label={`Timeline of ${lanes.ranks.length} ranks; what they did is in the table behind it`} style={{ height: `${height}px` }}
          onPointerDown={down} onPointerMove={moved} onPointerUp={up} onPointerLeave={() => { hit.value = null; }} onDblClick={() => show([0, lanes.end])} onKeyDown={keys} />
        {hit.value && <Tip data={data} lanes={lanes} hit={hit.value} width={canvas.current?.clientWidth ?? 0} />}
      </div>
      <ul class="legend">{lanes.kinds.map(kind => <li key={kind}>{kind === "layer" ? <span><span class="mark framed" style={{ borderColor: culprit(data) }} />{cut(kindName(data, kind), 60)}</span> : <Marked color={kindColor(data, kind)}>{kindName(data, kind)}</Marked>}</li>)}</ul>
      <p class="note keys">Drag: a range, added up below. Ctrl and wheel, W and S: zoom. Shift and drag, A and D: move. Click, ↑ and ↓: a rank. Enter: what is in sight as a range. Double click: all.</p>
      <InRange data={data} lanes={lanes} range={range} />
    </Section>
  );
}

function Tip({ data, lanes, hit, width }: { data: PageData; lanes: Lanes; hit: Hit; width: number }): JSX.Element {
  return (
    <div class="tip" style={{ top: `${hit.y + 14}px`, ...(hit.x > width / 2 ? { right: `${width - hit.x}px` } : { left: `${hit.x}px` }) }}>
      <strong>{lanes.names[hit.lane]}</strong>: {hit.kind ? cut(kindName(data, hit.kind), 80) : "in no span"}{hit.kind && <><br />{us(hit.end - hit.start)}, from {us(hit.start)}</>}
    </div>
  );
}

/** The uppermost bar at a time; of frames only what is in them. */
function found(lanes: Lanes, lane: number, time: number, event: PointerEvent): Hit | null {
  const runs = lanes.runs[lane];
  if (!runs || time < 0) return null;
  const spot = { x: event.offsetX, y: event.offsetY, lane };
  for (let at = runs.length - 1; at >= 0; at--) {
    const run = runs[at]!;
    const i = firstAfter(run.ends, time);
    if (run.kind !== "layer" && i < run.starts.length && run.starts[i]! <= time) return { ...spot, kind: run.kind, start: run.starts[i]!, end: run.ends[i]! };
  }
  return { ...spot, kind: "", start: time, end: time };
}

/** What each rank did in a range; without one the whole, for those who do not see the picture. */
function InRange({ data, lanes, range }: { data: PageData; lanes: Lanes; range: Signal<Stretch | null> }): JSX.Element {
  const open = useSignal(false);
  const [from, to] = range.value ?? [0, lanes.end];
  const isShown = open.value || range.value !== null;
  const rows = useMemo(() => (isShown ? lanes.ranks : []).map((rank, lane): Row => ({ rank, ...Object.fromEntries(seen(lanes.runs[lane]!, from, to)) })), [lanes, from, to, isShown]);
  const columns = useMemo((): Column<Row>[] => [
    rankColumn(data, "rank", "Rank"),
    ...lanes.kinds.filter(kind => kind !== "layer").map((kind): Column<Row> => ({ key: kind, title: kindName(data, kind), kind: "us", value: row => row[kind] ?? 0 })),
    { key: "nothing", title: "In no span", kind: "us", value: row => row[""] ?? 0 },
  ], [data, lanes]);
  const chosen = rankChosen.value;
  const table = <Table name="range-ranks" label={`What each rank did, ${us(to - from)}`} rows={rows} columns={columns} id={row => String(row["rank"])} selected={null} rowClass={row => (row["rank"] === chosen ? "selected" : "")} limit={12} onSelect={row => choose(row && (row["rank"] as number))} />;
  if (!range.value) return <details onToggle={event => { open.value = event.currentTarget.open; }}><summary>What is drawn, as a table</summary>{open.value && table}</details>;
  return (
    <>
      <h3>From {us(from)} to {us(to)}: what each rank did</h3>
      <p class="note">What lies uppermost: each row adds up to {us(to - from)}. <button type="button" class="small" onClick={() => { range.value = null; }}>Leave the range</button></p>
      {table}
    </>
  );
}

// ---- drawing ----------------------------------------------------------------------------------------------------------

function draw(ctx: CanvasRenderingContext2D, width: number, height: number, data: PageData, lanes: Lanes, [from, to]: Stretch, range: Stretch | null, hovered: number): void {
  const left = gutter(width);
  const [ink, soft, line, red] = [themeColor("--ink"), themeColor("--soft"), themeColor("--line"), culprit(data)];
  const scale = (width - left) / (to - from);
  const x = (time: number) => left + (time - from) * scale;
  const high = laneHeight(lanes.ranks.length);
  const gap = lanes.ranks.length > 64 ? 0 : Math.min(4, high * 0.1);
  const every = Math.ceil(15 / high);
  lanes.ranks.forEach((rank, lane) => {
    const top = TOP + lane * high;
    const named = isNamed(data, rank);
    if (named || rank === rankChosen.value || lane === hovered) {
      ctx.globalAlpha = named ? 0.16 : 1;
      ctx.fillStyle = named ? red : themeColor(rank === rankChosen.value ? "--select" : "--panel");
      ctx.fillRect(0, top, width, high);
      ctx.globalAlpha = 1;
    }
    if (rank === rankChosen.value) { ctx.strokeStyle = themeColor("--accent"); ctx.strokeRect(0.5, top + 0.5, width - 1, high - 1); }
    if (!named && lane % every) return;
    ctx.fillStyle = named ? red : ink;
    ctx.font = named ? `bold ${FONT}` : FONT;
    const name = lanes.names[lane]!;
    ctx.fillText(left < 100 ? name.replace(/^rank /, "").replace(/, stage /, ", s") : name, 4, top + high / 2, left - 8);
  });
  ctx.save();
  ctx.beginPath();
  ctx.rect(left, 0, width - left, height);
  ctx.clip();
  lanes.runs.forEach((runs, lane) => {
    const top = TOP + lane * high + gap;
    for (const run of runs) {
      const framed = run.kind === "layer";
      ctx.fillStyle = ctx.strokeStyle = framed ? red : kindColor(data, run.kind);
      ctx.lineWidth = 2;
      const bar = (a: number, b: number) => {
        if (framed) ctx.strokeRect(a, top + 1, Math.max(1, b - a), high - 2 * gap - 2);
        else ctx.fillRect(a, top, Math.max(0.6, b - a), high - 2 * gap);
      };
      let [begin, end] = [-1, -1];
      for (let i = firstAfter(run.ends, from); i < run.starts.length && run.starts[i]! < to; i++) {
        const a = x(run.starts[i]!);
        if (end < 0 || a - end > CLOSE) {
          if (end >= 0) bar(begin, end);
          begin = a;
        }
        end = Math.max(end, x(run.ends[i]!));
      }
      if (end >= 0) bar(begin, end);
    }
  });
  ctx.font = FONT;
  ctx.fillStyle = soft;
  let free = left;
  for (const step of lanes.steps) {
    const at = x(step.begin);
    if (at < left - 1 || at > width) continue;
    ctx.strokeStyle = soft;
    ctx.lineWidth = 1;
    ctx.setLineDash([2, 3]);
    ctx.beginPath();
    ctx.moveTo(at, 2); // not through the times
    ctx.lineTo(at, 16);
    ctx.moveTo(at, TOP);
    ctx.lineTo(at, height);
    ctx.stroke();
    const text = `step ${step.number}`;
    if (at < free) continue;
    ctx.fillText(text, at + 4, 9);
    free = at + ctx.measureText(text).width + 12;
  }
  ctx.setLineDash([]);
  const { size, unit } = timeUnit(to);
  const round = tickOf((to - from) / Math.max(2, (width - left) / 110));
  ctx.textAlign = "center";
  for (let tick = Math.ceil(from / round) * round; tick <= to; tick += round) {
    ctx.fillStyle = line;
    ctx.fillRect(x(tick), TOP - 6, 1, 6);
    ctx.fillStyle = soft;
    ctx.fillText(`${Number((tick / size).toPrecision(6)).toLocaleString("en-US", { maximumFractionDigits: 6 })} ${unit}`, Math.max(left + 22, Math.min(width - 26, x(tick))), 24);
  }
  ctx.textAlign = "left";
  if (range) {
    ctx.fillStyle = ctx.strokeStyle = themeColor("--accent");
    ctx.globalAlpha = 0.2;
    ctx.fillRect(x(range[0]), TOP, x(range[1]) - x(range[0]), height - TOP);
    ctx.globalAlpha = 1;
    ctx.strokeRect(x(range[0]), TOP, x(range[1]) - x(range[0]), height - TOP - 1);
  }
  ctx.restore();
}

/** 1, 2 or 5 times a power of ten, at least so much. */
function tickOf(least: number): number {
  const power = 10 ** Math.floor(Math.log10(least));
  return power * ([1, 2, 5].find(one => one * power >= least) ?? 10);
}
