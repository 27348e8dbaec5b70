/** What is known of one event or idle stretch: under the pointer, and of the one that is selected with ways to its cause. */
import type { ComponentChildren, JSX } from "preact";
import { bytes, cut, full, ns } from "../format";
import { address, selection, type Selection } from "../state";
import type { Timeline } from "./data";
import { linksOf } from "./highlight";
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
      <Facts facts={facts} />
    </div>
  );
}

function Facts({ facts }: { facts: readonly Fact[] }): JSX.Element {
  return <dl>{facts.map(([what, value]) => [<dt key={what}>{what}</dt>, <dd key={`${what} is`}>{cut(value, 160)}</dd>])}</dl>;
}

/** A link that selects something of the timeline, and so brings it into sight. */
function To({ chosen, children }: { chosen: Selection; children: ComponentChildren }): JSX.Element {
  const go = (event: MouseEvent): void => {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    selection.value = chosen;
  };
  return <a href={address("step", chosen)} onClick={go}>{children}</a>;
}

/** What is selected, with links to what caused it and what it caused. */
export function Chosen({ stage }: { stage: Stage }): JSX.Element | null {
  const { timeline } = stage;
  const chosen = selection.value;
  if (!chosen || chosen.kind === "finding") return null;
  if (chosen.kind !== "event" && chosen.kind !== "gap") return <Highlighted stage={stage} chosen={chosen} />;
  const row = chosen.number;
  const isGap = chosen.kind === "gap";
  if (row >= (isGap ? timeline.gaps : timeline.events).count) return <Highlighted stage={stage} chosen={chosen} />;
  const name = isGap ? "Device idle" : timeline.head.names[timeline.name[row]!] ?? "";
  return (
    <div class="timeline-chosen" aria-live="polite">
      <b title={full(name)}>{timeline.label(name, 110)}</b>
      <Facts facts={isGap ? gapFacts(timeline, row) : eventFacts(timeline, row)} />
      <p class="timeline-ways">{isGap ? <GapWays timeline={timeline} row={row} /> : <EventWays timeline={timeline} row={row} />}</p>
    </div>
  );
}

/** Says why all else is pale. */
function Highlighted({ stage, chosen }: { stage: Stage; chosen: Selection }): JSX.Element {
  const name = "name" in chosen ? stage.timeline.label(chosen.name, 90) : String(chosen.number);
  const button = (text: string, act: () => void): JSX.Element => <button type="button" class="small" onClick={act}>{text}</button>;
  return (
    <p class="timeline-chosen" aria-live="polite">
      {stage.isLit.value ? <>Highlighted: {chosen.kind} <b>{name}</b> {button("Fit", () => stage.fit())}</> : <>Nothing of {chosen.kind} <b>{name}</b> is drawn here</>}{" "}
      {button("Let go", () => { selection.value = null; })}
    </p>
  );
}

function GapWays({ timeline, row }: { timeline: Timeline; row: number }): JSX.Element | null {
  const event = timeline.gaps.column("event")[row]!;
  return event < 0 ? null : <span>the CPU meanwhile: <ToEvent timeline={timeline} row={event} /></span>;
}

const MOST_WAYS = 6;

function EventWays({ timeline, row }: { timeline: Timeline; row: number }): JSX.Element {
  const layer = timeline.head.layers[timeline.layer[row]!];
  const name = timeline.head.names[timeline.name[row]!];
  const onDevice = timeline.isOnDevice(row);
  const isOp = timeline.head.lanes[timeline.lane[row]!]!.kind === "thread";
  const links = linksOf(timeline, row);
  const ways = (title: string, rows: number[]): JSX.Element | null => (rows.length === 0 ? null : (
    <span key={title}>
      {title}: {rows.slice(0, MOST_WAYS).map(one => <ToEvent key={one} timeline={timeline} row={one} />)}
      {rows.length > MOST_WAYS && <span class="quiet"> and {rows.length - MOST_WAYS} more</span>}
    </span>
  ));
  const launch = timeline.launch[row]!;
  return (
    <>
      {ways("launched by", launch < 0 ? [] : [...timeline.outwards(launch)].slice(0, 2))}
      {ways("launches", launch >= 0 ? [] : links.filter(one => one.kind === "launch").map(one => one.to))}
      {ways("forward", links.filter(one => one.kind === "backward" && one.from !== row).map(one => one.from))}
      {ways("backward", links.filter(one => one.kind === "backward" && one.from === row).map(one => one.to))}
      {layer && <span>all of <To chosen={{ kind: "layer", name: layer }}>{cut(layer, 80)}</To></span>}
      {name && (onDevice || isOp) && <span><To chosen={{ kind: onDevice ? "kernel" : "op", name }}>every call of it</To></span>}
    </>
  );
}

function ToEvent({ timeline, row }: { timeline: Timeline; row: number }): JSX.Element {
  const name = timeline.head.names[timeline.name[row]!] ?? "";
  return <To chosen={{ kind: "event", number: row }}>{timeline.label(name, 50)} ({ns(timeline.events.duration_ns[row])})</To>;
}
