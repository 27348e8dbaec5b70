/** The timeline as numbers: what lies in the range, and for who does not see the canvas, what it draws. */
import type { JSX } from "preact";
import { useEffect, useMemo, useState } from "preact/hooks";
import { columnFormat, count, cut, full, ns, share } from "../format";
import { range as chosenRange, select, type Range, type Selection } from "../state";
import type { Timeline } from "./data";
import { idleIs, laneSums, NO_LAYER, rangeSums, type Sum } from "./sums";

const MOST_ROWS = 8;
const MOST_EVENTS = 25;
const SETTLED_MS = 60;

export function RangeTables({ timeline, range: dragged }: { timeline: Timeline; range: Range }): JSX.Element {
  const [from, to] = useSettled(dragged);
  const sums = useMemo(() => rangeSums(timeline, from, to), [timeline, from, to]);
  const idle = useMemo(() => idleIs(timeline), [timeline]);
  const { device } = timeline.head;
  const kind = device ? "kernel" : "op";
  const of = device ? "of device time" : "of op time";
  const layer = (name: string): Selection | null => (name === NO_LAYER ? null : { kind: "layer", name });
  return (
    <section class="timeline-range" aria-label="The range">
      <p>
        <b>{ns(sums.length_ns)}</b> from {ns(from)} on: {device ? "device time" : "own time of ops"} <b>{ns(sums.time_ns)}</b>
        {idle !== null && sums.idle.map(({ device: number, time_ns }) => (
          <span key={number}>; {sums.idle.length > 1 ? `device ${number}` : "the device"} idle <b class="timeline-idle">{idle}{ns(time_ns)}</b> ({share(sums.drawn_ns ? time_ns / sums.drawn_ns : null)} of the range)</span>
        ))}
        . <button type="button" class="small" onClick={() => { chosenRange.value = null; }}>Let go (Escape)</button>
      </p>
      <div class="timeline-sums">
        <SumTable title="Layers" what="layer" rows={sums.layers} total={sums.time_ns} shareOf={of} chosen={layer} />
        <SumTable title={device ? "Kernels" : "Ops"} what={kind} rows={sums.names} total={sums.time_ns} shareOf={of} chosen={name => ({ kind, name })} label={name => timeline.label(name, mostLetters())} />
        <SumTable title="Phases" what="phase" rows={sums.phases} total={sums.time_ns} shareOf={of} />
        {device && <SumTable title="Classes" what="class" rows={sums.classes} total={sums.time_ns} shareOf={of} />}
        <SumTable title="Lanes" what="lane" rows={sums.lanes.filter(lane => lane.count)} total={sums.length_ns} shareOf="of the range" />
      </div>
    </section>
  );
}

/** The range once it rests: sums over many events would hold up the drag. */
function useSettled(dragged: Range): Range {
  const [settled, settle] = useState(dragged);
  useEffect(() => {
    const later = setTimeout(() => settle(dragged), SETTLED_MS);
    return () => clearTimeout(later);
  }, [dragged]);
  return settled;
}

const mostLetters = (): number => (innerWidth < 560 ? 26 : 58); // letters of a name

interface SumTableProps {
  title: string;
  what: string;
  rows: readonly Sum[];
  total: number;
  shareOf: string;
  label?: (name: string) => string;
  chosen?: (name: string) => Selection | null;
}

function SumTable({ title, what, rows, total, shareOf, chosen, label = name => cut(name, mostLetters()) }: SumTableProps): JSX.Element {
  const shown = rows.slice(0, rows.length > MOST_ROWS + 1 ? MOST_ROWS : rows.length);
  const rest = rows.slice(shown.length);
  const restTime = rest.reduce((sum, one) => sum + one.time_ns, 0);
  const { unit, text } = columnFormat("us", [...shown.map(one => one.time_ns / 1000), restTime / 1000]);
  const line = (key: string, name: JSX.Element | string, { time_ns, count: number }: Omit<Sum, "name">): JSX.Element => (
    <tr key={key} data-name={key} data-ns={time_ns}>
      <td>{name}</td>
      <td class="number">{text(time_ns / 1000)}</td>
      <td class="number">{share(total ? time_ns / total : null)}</td>
      <td class="number">{count(number)}</td>
    </tr>
  );
  return (
    <table class="timeline-sum" data-of={what}>
      <thead><tr><th>{title}</th><th class="number">{unit}</th><th class="number">{shareOf}</th><th class="number">events</th></tr></thead>
      <tbody>
        {shown.map(one => {
          const target = chosen?.(one.name);
          const name = label(one.name);
          return line(one.name, target ? <button type="button" class="timeline-link" title={full(one.name)} onClick={() => select(target)}>{name}</button> : name, one);
        })}
        {rest.length > 0 && line("\0rest", `${rest.length} more`, { time_ns: restTime, count: rest.reduce((sum, one) => sum + one.count, 0) })}
      </tbody>
    </table>
  );
}

/** What the canvas shows, as tables that only a screen reader meets. */
export function HiddenTables({ timeline }: { timeline: Timeline }): JSX.Element {
  const { head, events, gaps } = timeline;
  const lanes = useMemo(() => laneSums(timeline), [timeline]);
  const longest = useMemo(() => largest(events.count, row => (timeline.isOnDevice(row) === head.device ? events.duration_ns[row]! : -1)), [timeline]);
  const idle = useMemo(() => largest(gaps.count, row => gaps.duration_ns[row]!), [timeline]);
  const cell = (value: string | undefined): JSX.Element => <td>{value === undefined ? "" : cut(value, 120)}</td>;
  return (
    <div class="timeline-hidden">
      <table class="timeline-lanes">
        <caption>Lanes of the timeline</caption>
        <thead><tr><th>lane</th><th>busy</th><th>events</th></tr></thead>
        <tbody>{lanes.map((lane, i) => <tr key={i} data-ns={lane.time_ns}>{cell(lane.name)}{cell(ns(lane.time_ns))}{cell(count(lane.count))}</tr>)}</tbody>
      </table>
      <table class="timeline-longest">
        <caption>The longest events</caption>
        <thead><tr><th>name</th><th>duration</th><th>start</th><th>layer</th><th>phase</th></tr></thead>
        <tbody>{longest.map(row => (
          <tr key={row} data-row={row}>
            {cell(head.names[timeline.name[row]!])}{cell(ns(events.duration_ns[row]))}{cell(ns(timeline.start(row)))}{cell(head.layers[timeline.layer[row]!])}{cell(head.phases[timeline.phase[row]!])}
          </tr>
        ))}</tbody>
      </table>
      {idle.length > 0 && (
        <table class="timeline-idles">
          <caption>The longest times in which a device is idle</caption>
          <thead><tr><th>duration</th><th>start</th><th>cause</th><th>the CPU is in</th></tr></thead>
          <tbody>{idle.map(row => (
            <tr key={row} data-row={row}>
              {cell(ns(gaps.duration_ns[row]))}{cell(ns(gaps.start_ns[row]))}{cell(head.causes[gaps.column("cause")[row]!])}{cell(head.names[gaps.column("op")[row]!])}
            </tr>
          ))}</tbody>
        </table>
      )}
    </div>
  );
}

/** The rows with the largest sizes, without putting all in order. */
function largest(number: number, size: (row: number) => number): number[] {
  const found: number[] = [];
  for (let row = 0; row < number; row++) {
    if (size(row) < 0 || (found.length === MOST_EVENTS && size(row) <= size(found.at(-1)!))) continue;
    const at = found.findIndex(one => size(one) < size(row));
    found.splice(at < 0 ? found.length : at, 0, row);
    found.length = Math.min(found.length, MOST_EVENTS);
  }
  return found;
}
