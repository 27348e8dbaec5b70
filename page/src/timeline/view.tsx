/** The timeline with its controls, and what is read beside it. */
import type { JSX } from "preact";
import { useEffect, useMemo, useRef } from "preact/hooks";
import { Later, Marked } from "../parts";
import { colorOf } from "../colors";
import { cut, ns } from "../format";
import type { PageData } from "../page_data";
import { range, step } from "../state";
import type { Timeline } from "./data";
import { Chosen, Tip } from "./details";
import { AXIS } from "./layout";
import { Stage } from "./stage";
import { HiddenTables, RangeTables } from "./tables";
import "./timeline.css";

const MOST_HEIGHT = "min(70vh, 46rem)";
const HELP: readonly (readonly [keys: string, does: string])[] = [
  ["drag", "select a range: its sums stand below"],
  ["Ctrl + wheel, W S, + −", "zoom"],
  ["Shift + drag or wheel, A D, ← →", "move in time"],
  ["wheel, ↑ ↓", "scroll the lanes, as in Perfetto"],
  ["click", "select an event or an idle stretch"],
  ["double click", "zoom to it"],
  [". ,", "next, previous event of its row"],
  ["F", "fit the range or what is selected"],
  ["0", "show all"],
  ["Escape", "let the range go, then what is selected"],
];

export function TimelineView({ data, timeline }: { data: PageData; timeline: Timeline }): JSX.Element {
  const stage = useMemo(() => new Stage(data, timeline), [data, timeline]);
  const scroller = useRef<HTMLDivElement>(null);
  const base = useRef<HTMLCanvasElement>(null);
  const over = useRef<HTMLCanvasElement>(null);
  useEffect(() => stage.attach(scroller.current!, base.current!, over.current!), [stage]);
  const { bands, height } = stage.layout.value;
  return (
    <div class="timeline">
      <Controls stage={stage} />
      <div class="timeline-scroller" ref={scroller} style={{ height: `min(${height + AXIS + 2}px, ${MOST_HEIGHT})` }}>
        <div class="timeline-canvases">
          <canvas ref={base} aria-hidden="true" />
          <canvas ref={over} class="timeline-over" tabIndex={0} role="application" aria-label={`Timeline of ${ns(timeline.head.length_ns)}`} aria-describedby="timeline-help" />
          <Tip stage={stage} />
        </div>
        <div class="timeline-labels" style={{ height: `${height}px` }}>
          {bands.map(band => (band.tracks.length > 1 || band.kind === "memory") && (
            <button key={band.key} type="button" aria-expanded={!band.folded} aria-label={`${band.label}: ${band.folded ? "unfold" : "fold"}`} title={cut(band.label)} style={{ top: `${band.top + AXIS}px` }} onClick={() => stage.fold(band)} />
          ))}
        </div>
      </div>
      <Legend data={data} timeline={timeline} />
      {timeline.head.note && <p class="note">{timeline.head.note}</p>}
      <Chosen stage={stage} />
      {range.value && <RangeTables timeline={timeline} range={range.value} />}
      <Later><HiddenTables timeline={timeline} /></Later>
    </div>
  );
}

function Controls({ stage }: { stage: Stage }): JSX.Element {
  const button = (name: string, title: string, act: () => void): JSX.Element => <button type="button" class="small" title={title} aria-label={title} onClick={act}>{name}</button>;
  return (
    <div class="tools timeline-tools">
      <StepPicker stage={stage} />
      <span class="segments">
        {button("−", "Zoom out (S)", () => stage.zoom(1.6))}
        {button("+", "Zoom in (W)", () => stage.zoom(1 / 1.6))}
        {button("Fit", "Fit the range or what is selected (F)", () => stage.fit())}
        {button("All", "Show all (0)", () => { step.value = null; stage.all(); })}
      </span>
      <details class="timeline-help" id="timeline-help">
        <summary>Drag selects a range, Ctrl + wheel zooms. All keys</summary>
        <dl>{HELP.map(([keys, does]) => [<dt key={keys}>{keys}</dt>, <dd key={does}>{does}</dd>])}</dl>
      </details>
    </div>
  );
}

/** All steps; those that are not here cannot be chosen. */
function StepPicker({ stage }: { stage: Stage }): JSX.Element | null {
  const { steps } = stage.timeline.head;
  if (steps.length < 2) return null;
  const drawn = steps.filter(one => one.drawn).length;
  const choose = (event: { currentTarget: HTMLSelectElement }): void => {
    const chosen = event.currentTarget.value;
    step.value = chosen === "" ? null : Number(chosen);
    if (chosen === "") stage.all();
  };
  return (
    <label>
      Step{" "}
      <select class="timeline-steps" value={step.value ?? ""} onChange={choose}>
        <option value="">{drawn < steps.length ? `the ${drawn} that are here` : `all ${drawn}`}</option>
        {steps.map(one => (
          <option key={one.number} value={one.number ?? ""} disabled={!one.drawn}>
            {one.number}: {ns(one.end_ns - one.start_ns)}{one.slowest ? ", the slowest" : ""}{one.drawn ? "" : " (not here)"}
          </option>
        ))}
      </select>
    </label>
  );
}

/** The colours of phases, and of classes where there is a device: those that are drawn. */
function Legend({ data, timeline }: { data: PageData; timeline: Timeline }): JSX.Element {
  const { head } = timeline;
  const [phases, classes] = useMemo(() => {
    const found = [new Set<number>(), new Set<number>()] as const;
    timeline.phase.forEach((phase, row) => { if (!timeline.isOnDevice(row)) found[0].add(phase); });
    timeline.class.forEach((one, row) => { if (timeline.isOnDevice(row)) found[1].add(one); });
    return found;
  }, [timeline]);
  const marks = (names: string[], used: Set<number>, kind: "phase" | "class"): JSX.Element[] =>
    names.flatMap((name, i) => (used.has(i) ? [<Marked key={name} color={colorOf(data, kind, name)}>{name.replace("_", " ")}</Marked>] : []));
  return (
    <div class="timeline-legends">
      <p class="legend"><b>{head.device ? "Layers, phases, CPU" : "Colours"}</b>{marks(head.phases, phases, "phase")}</p>
      {classes.size > 0 && <p class="legend"><b>Streams</b>{marks(head.classes, classes, "class")}</p>}
    </div>
  );
}

export function NoTimeline({ why }: { why: string }): JSX.Element {
  return (
    <div class="timeline-none">
      <p class="notice">There is no timeline here: {cut(why, 400)}</p>
    </div>
  );
}
