/** What is known of one event or idle stretch: under the pointer, and in a line of the one that is selected. */
import type { JSX } from "preact";
import { bytes, cut, full, ns } from "../format";
import { selection, type Selection } from "../state";
import type { Timeline } from "./data";
import type { Stage } from "./stage";

type Fact = readonly [what: string, value: string];

const known = (facts: readonly (readonly [string, string | undefined | null])[]): Fact[] => facts.filter((one): one is Fact => Boolean(one[1]));

function eventFacts(timeline: Timeline, row: number): Fact[] {
  const { head } = timeline;
  const launch = timeline.launch[row]!;
  return known([
    ["duration", ns(timeline.events.duration_ns[row])],
    ["layer", timeline.layer[row] === -2 ? "not known" : head.layers[timeline.layer[row]!]],
    ["phase", head.phases[timeline.phase[row]!]?.replace("_", " ")],
    ["class", head.classes[timeline.class[row]!]],
    ["start", startText(timeline, timeline.start(row), timeline.events.column("step")[row]!)],
    ["launched", launch >= 0 ? `${ns(timeline.start(row) - timeline.start(launch))} before it began` : null],
  ]);
}

function gapFacts(timeline: Timeline, row: number): Fact[] {
  const { head, gaps } = timeline;
  const of = (column: string): number => gaps.column(column)[row]!;
  return known([
    ["duration", ns(gaps.duration_ns[row])],
    ["cause", head.causes[of("cause")]],
    ["CPU is in", head.names[of("op")]],
    ["layer", head.layers[of("layer")]],
    ["phase", head.phases[of("phase")]],
    ["start", startText(timeline, gaps.start_ns[row]!, of("step"))],
  ]);
}

/** Since the begin of its step, where it has one. */
function startText(timeline: Timeline, start: number, at: number): string {
  const one = timeline.head.steps[at];
  return one && one.number !== null ? `${ns(start - one.start_ns)} into step ${one.number}` : ns(start);
}

export function Tip({ stage }: { stage: Stage }): JSX.Element | null {
  const hovered = stage.hovered.value;
  if (!hovered) return null;
  const { hit, x, y } = hovered;
  const { timeline, view } = stage;
  const facts = hit.kind === "memory" ? [] : hit.kind === "gap" ? gapFacts(timeline, hit.row) : eventFacts(timeline, hit.row);
  const title = hit.kind === "memory" ? `${bytes(hit.bytes)} allocated` : hit.kind === "gap" ? "Device idle" : timeline.head.names[timeline.name[hit.row]!] ?? "";
  const isLeft = x > view.width / 2;
  const isAbove = y > view.height / 2;
  const place = {
    [isLeft ? "right" : "left"]: `${isLeft ? view.width - x + 14 : x + 14}px`,
    [isAbove ? "bottom" : "top"]: `${isAbove ? 10 - y : y + 14}px`, // of a box without height, at the top
    maxWidth: `${Math.max(160, (isLeft ? x : view.width - x) - 24)}px`,
  };
  return (
    <div class="timeline-tip" role="tooltip" style={place}>
      <b>{timeline.label(title, 160)}</b>
      <dl>{facts.map(([what, value]) => [<dt key={what}>{what}</dt>, <dd key={`${what} is`}>{cut(value, 160)}</dd>])}</dl>
    </div>
  );
}

/** Says why all else is pale; the panel has all that is known of it. */
export function Chosen({ stage }: { stage: Stage }): JSX.Element | null {
  const { timeline } = stage;
  const chosen = selection.value;
  if (!chosen || chosen.kind === "finding") return null;
  const button = (text: string, act: () => void): JSX.Element => <button type="button" class="small" onClick={act}>{text}</button>;
  const { name, facts } = factsOf(timeline, chosen);
  return (
    <p class="timeline-chosen" aria-live="polite">
      {stage.isLit.value ? "Highlighted" : "Nothing is drawn here of"}: {chosen.kind} <b title={full(name)}>{timeline.label(name, 90)}</b>
      {facts.map(([what, value]) => <span key={what}>, <span class="quiet">{what}</span> {cut(value, 120)}</span>)}{" "}
      {stage.isLit.value && button("Fit", () => stage.fit())} {button("Let go", () => { selection.value = null; })}
    </p>
  );
}

const MOST_TO_SAY = new Set(["duration", "cause", "launched"]);

function factsOf(timeline: Timeline, chosen: Selection): { name: string; facts: Fact[] } {
  if ("name" in chosen) return { name: chosen.name, facts: [] };
  const row = chosen.number;
  const name = timeline.head.names[timeline.name[row] ?? -1];
  const said = (facts: Fact[]): Fact[] => facts.filter(([what]) => MOST_TO_SAY.has(what));
  if (chosen.kind === "gap" && row < timeline.gaps.count) return { name: "device idle", facts: said(gapFacts(timeline, row)) };
  if (chosen.kind === "event" && name !== undefined) return { name, facts: said(eventFacts(timeline, row)) };
  return { name: String(row), facts: [] };
}
