/** The panels of a gap and of one event of the timeline. */
import type { JSX } from "preact";
import { capital, cut, full, ns, share } from "../format";
import type { PageData } from "../page_data";
import { Go } from "../parts";
import type { Timeline } from "../timeline/data";
import { isThere, theNames, timeline as shared } from "../whole";
import { type Entry, Entries, Facts, NotThere } from "./facts";

const NOT_YET = <p class="note">The timeline is being read.</p>;

export function OfGap({ row, timeline }: { row: number; timeline: Timeline | null }): JSX.Element {
  if (shared.value === undefined) return NOT_YET;
  if (!timeline || row >= timeline.gaps.count) return <NotThere what="This gap" />;
  const { head, gaps } = timeline;
  const at = (column: string): number => gaps.column(column)[row]!;
  const [start, length] = [gaps.start_ns[row]!, gaps.duration_ns[row]!];
  const step = head.steps[at("step")];
  const op = head.names[at("op")];
  const event = at("event");
  return (
    <>
      <h2>{ns(length)} with nothing on the device</h2>
      <p><b>{capital(cut(head.causes[at("cause")] ?? "cause not known", 200))}</b></p>
      <Facts of={[
        ["Begins", step ? `${ns(start - step.start_ns)} after step ${step.number} began` : ns(start)],
        ["Ends", step && ns(start + length - step.start_ns)],
        ["Share", step && `${share(length / (step.end_ns - step.start_ns))} of step ${step.number}`],
        ["The CPU was in", op && (event >= 0 ? <Go to="step" select={{ kind: "event", number: event }} title={full(op)}>{cut(op, 70)}</Go> : cut(op, 70))],
        ["Layer", head.layers[at("layer")] && <Layer name={head.layers[at("layer")]!} />],
        ["Phase", head.phases[at("phase")]],
        ["Device", head.lanes.some(lane => (lane.device ?? 0) > 0) && String(at("device"))],
        ["Op", op && isThere({ kind: "op", name: op }) && <Go to="kernels" select={{ kind: "op", name: op }}>all of {cut(op, 60)}</Go>],
      ]} />
      <Entries title="During it, on the CPU" entries={during(timeline, start, start + length)} />
    </>
  );
}

const Layer = ({ name }: { name: string }): JSX.Element => <Go to="layers" select={{ kind: "layer", name }} title={full(name)}>{cut(name, 70)}</Go>;

/** The longest things on the main thread within a stretch, outermost first where they are as long. */
function during(timeline: Timeline, from: number, to: number): Entry[] {
  const lane = timeline.head.lanes.findIndex(one => one.kind === "thread" && one.main);
  const found: { row: number; time: number }[] = [];
  for (const track of timeline.tracks[lane] ?? []) {
    for (let i = track.firstAfter(from); i < track.rows.length && track.start[i]! < to; i++) {
      const row = track.rows[i]!;
      if (timeline.end(row) - timeline.start(row) > 4 * (to - from) && timeline.depth[row]! < 3) continue; // encloses far more: the step itself
      found.push({ row, time: Math.min(track.end[i]!, to) - Math.max(track.start[i]!, from) });
    }
  }
  found.sort((a, b) => b.time - a.time || timeline.depth[a.row]! - timeline.depth[b.row]!);
  return found.slice(0, 60).map(({ row, time }) => {
    const name = timeline.head.names[timeline.name[row]!] ?? "";
    return { select: { kind: "event", number: row }, name, value: ns(time) };
  });
}

export function OfEvent({ data, row, timeline }: { data: PageData; row: number; timeline: Timeline | null }): JSX.Element {
  if (shared.value === undefined) return NOT_YET;
  if (!timeline || row >= timeline.events.count) return <NotThere what="This event" />;
  const { head } = timeline;
  const name = head.names[timeline.name[row]!] ?? "";
  const lane = head.lanes[timeline.lane[row]!]!;
  const step = head.steps[timeline.events.column("step")[row]!];
  const layer = head.layers[timeline.layer[row]!];
  const isKernel = isThere({ kind: "kernel", name });
  const isOp = isThere({ kind: "op", name });
  const isLayer = lane.kind === "layers" && isThere({ kind: "layer", name });
  const link = (rows: Iterable<number>): Entry[] => [...rows].filter(one => one >= 0).map(one => ({ select: { kind: "event" as const, number: one }, name: head.names[timeline.name[one]!] ?? "", value: ns(timeline.events.duration_ns[one]!) }));
  return (
    <>
      <h2 title={full(name)}>{lane.kind === "stream" ? theNames(data)(name, 90) : cut(name, 120)}</h2>
      <Facts of={[
        ["Takes", ns(timeline.events.duration_ns[row]!)],
        ["Begins", step ? `${ns(timeline.start(row) - step.start_ns)} after step ${step.number} began` : ns(timeline.start(row))],
        ["On", cut(lane.name, 60)],
        ["Layer", layer && <Layer name={layer} />],
        ["Phase", head.phases[timeline.phase[row]!]],
        ["Class", head.classes[timeline.class[row]!]],
        ["All of it", isKernel ? <Go to="kernels" select={{ kind: "kernel", name }}>this kernel in all steps</Go> : isOp ? <Go to="kernels" select={{ kind: "op", name }}>this op in all steps</Go> : isLayer ? <Go to="layers" select={{ kind: "layer", name }}>this layer in all steps</Go> : null],
      ]} />
      <Entries title="Launched by" entries={link([timeline.launch[row]!])} />
      <Entries title="Launches" entries={link(timeline.launched(row))} />
      <Entries title="Backward of" entries={link([timeline.forward[row]!])} />
      <Entries title="Its backward" entries={link(timeline.backwards(row))} />
      <Entries title="Within" entries={link([...timeline.outwards(row)].slice(1))} most={4} />
    </>
  );
}
