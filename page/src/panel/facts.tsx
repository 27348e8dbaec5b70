/** What panels are made of: pairs of name and value, and short lists with times. */
import type { ComponentChildren, JSX } from "preact";
import { count, cut, full, isKnown, ns, share } from "../format";
import type { PageData, Row } from "../page_data";
import { Go } from "../parts";
import { place, type Place, type Selection } from "../state";
import type { Timeline } from "../timeline/data";
import { theNames } from "../whole";

export type Fact = readonly [name: string, value: ComponentChildren | null | undefined | false, help?: string];

/** What is not known is left out. */
export function Facts({ of }: { of: readonly Fact[] }): JSX.Element | null {
  const shown = of.filter(([, value]) => isKnown(value) && value !== false && value !== "");
  if (!shown.length) return null;
  return <dl class="facts-list">{shown.map(([name, value, help]) => <div key={name} title={help}><dt>{name}</dt><dd>{value}</dd></div>)}</dl>;
}

export interface Entry {
  select: Selection | null;
  name: string;
  shown?: string;
  value: string;
  share?: number | null | undefined;
  more?: string | undefined;
}

const MOST = 8;

/** The first of a list, with the others behind a fold. */
export function Entries({ title, entries, most = MOST }: { title: string; entries: readonly Entry[]; most?: number }): JSX.Element | null {
  if (!entries.length) return null;
  const isTimed = entries.some(one => one.value);
  const row = (one: Entry, i: number): JSX.Element => (
    <li key={i}>
      {isTimed && <span class="value">{one.value}{isKnown(one.share) && <span class="quiet"> {share(one.share)}</span>}</span>}
      <span>{one.select ? <Go to={placeOf(one.select)} select={one.select} title={full(one.name)}>{one.shown ?? cut(one.name, 60)}</Go> : <span title={full(one.name)}>{one.shown ?? cut(one.name, 60)}</span>}{one.more && <span class="quiet"> {cut(one.more, 240)}</span>}</span>
    </li>
  );
  return (
    <section>
      <h3>{title}</h3>
      <ul class={isTimed ? "rows" : "plain-list"}>{entries.slice(0, most).map(row)}</ul>
      {entries.length > most && <details><summary>{count(entries.length - most)} more</summary><ul class={isTimed ? "rows" : "plain-list"}>{entries.slice(most, most + 200).map(row)}</ul></details>}
    </section>
  );
}

/** The place where one looks for such a thing. */
export const homeOf = (one: Selection): Place => (one.kind === "layer" ? "layers" : one.kind === "kernel" || one.kind === "op" ? "kernels" : "step");

/** Where a link leads: the timeline shows everything, so who looks at it stays. */
const placeOf = (one: Selection): Place => (place.value === "step" ? "step" : homeOf(one));

export interface Summed {
  name: string;
  layer: string;
  phase: string;
  class: string;
  step: number; // its place, -1 for none
  time_ns: number;
  count: number;
}

/** Rows of the sums that `keep` wants, of all steps: grouped for showing, the numbers are Python's. */
export function sumsBy(timeline: Timeline | null, keep: (one: Summed) => boolean, key: "name" | "layer" | "phase"): { name: string; time_ns: number; count: number }[] {
  if (!timeline) return [];
  const groups = new Map<string, { name: string; time_ns: number; count: number }>();
  eachSum(timeline, one => {
    if (!keep(one)) return;
    const group = groups.get(one[key]);
    if (group) { group.time_ns += one.time_ns; group.count += one.count; } else groups.set(one[key], { name: one[key], time_ns: one.time_ns, count: one.count });
  });
  return [...groups.values()].sort((a, b) => b.time_ns - a.time_ns);
}

function eachSum({ head, sums }: Timeline, take: (one: Summed) => void): void {
  const [name, layer, phase, kind, step, count] = ["name", "layer", "phase", "class", "step", "count"].map(column => sums.column(column)) as [Int32Array, Int32Array, Int32Array, Int32Array, Int32Array, Int32Array];
  for (let i = 0; i < sums.count; i++) {
    take({
      name: head.names[name[i]!] ?? "", layer: head.layers[layer[i]!] ?? "", phase: head.phases[phase[i]!] ?? "", class: head.classes[kind[i]!] ?? "",
      step: step[i]!, time_ns: sums.time_ns[i]!, count: count[i]!,
    });
  }
}

/** Kernels (ops, without a device) as entries, their times per step. */
export function ofNames(data: PageData, found: readonly { name: string; time_ns: number; count: number }[], whole_ns: number | null, steps: number): Entry[] {
  const kind = data["time_basis"] === "device" ? "kernel" : "op";
  const names = theNames(data);
  return found.map(one => ({
    select: { kind, name: one.name }, name: one.name, shown: kind === "kernel" ? names(one.name, 44) : cut(one.name, 44), value: ns(one.time_ns / steps), share: whole_ns ? one.time_ns / whole_ns : undefined,
    more: `${count(one.count / steps)}×`,
  }));
}

export const text = (row: Row, key: string): string => String(row[key] ?? "");
export const known = (row: Row | undefined, key: string): number | null => (row && isKnown(row[key]) ? (row[key] as number) : null);

/** A link to a file's line cannot be opened from a page: it can be copied. */
export const NotThere = ({ what }: { what: string }): JSX.Element => <p class="notice">{what} is not in this run.</p>;
