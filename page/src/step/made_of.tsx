/** What a part of a step is made of: parts of the model, kernels, collectives, gaps, waits. The numbers are Python's. */
import type { JSX } from "preact";
import { grouped, onDevice, per, perStep, rowsOf, sum, timeName } from "../basis";
import { count, cut, isKnown, ns, us } from "../format";
import type { PageData, Row } from "../page_data";
import { Entries, type Entry, sumsBy } from "../panel/facts";
import type { Timeline } from "../timeline/data";
import { theNames } from "../whole";

export function MadeOf({ data, parts, timeline }: { data: PageData; parts: readonly string[]; timeline: Timeline | null }): JSX.Element {
  const [part] = parts;
  const isIdle = /^(runtime|dataloader|cpu|other)$/.test(part!);
  const device = onDevice(data);
  if (!device && (part === "dataloader" || part === "other")) return <p class="note">No op runs then: the timeline has the stretches between ops.</p>;
  return (
    <div class="made-of">
      {part === "communication" && <Collectives data={data} />}
      {part === "model" && <Shares data={data} />}
      {!device && (isIdle || part === "model") && <Ops data={data} />}
      {!isIdle && (device || part !== "model") && <Kernels data={data} part={part!} timeline={timeline} />}
      {device && isIdle && <Idle data={data} timeline={timeline} only={parts.length === 1 && part === "dataloader" ? /dataloader/i : /./} />}
      {device && isIdle && <Waits data={data} />}
    </div>
  );
}

const layerOrNone = (name: unknown): Entry["select"] => (name ? { kind: "layer", name: name as string } : null);

/** What each part of the model takes of the device's time; these add up to all of it. */
export function Shares({ data }: { data: PageData }): JSX.Element {
  const rows: Row[] = data["views"].shares.rows;
  return <Entries title={`${timeName(data)} by part of the model, ${per(data)}`} most={12} entries={rows.map(row => ({
    select: layerOrNone(row["layer"]), name: row["name"] as string, value: us(perStep(data, row["time_us"] as number)), share: row["share"] as number, more: (row["layers"] as number) > 1 ? `${count(row["layers"] as number)} layers` : "",
  }))} />;
}

function Kernels({ data, part, timeline }: { data: PageData; part: string; timeline: Timeline | null }): JSX.Element {
  const title = { model: "Kernels", kernel: "Kernels", communication: "Kernels of communication", memcpy: "Copies", memset: "Sets" }[part] ?? part;
  const kernels = new Map(rowsOf(data, "kernels").filter(row => part === "model" || partOf(row) === part).map(row => [row["name"] as string, row]));
  const steps: number = data["page"].step_numbers.length;
  // The bar is of steps: so are these, where it is known what belongs to them.
  const ofSteps = part !== "model" && timeline && steps ? sumsBy(timeline, one => one.step >= 0 && kernels.has(one.name), "name").map(one => ({ name: one.name, us: one.time_ns / 1000 / steps, count: one.count / steps })) : null;
  const all = ofSteps ?? [...grouped(rowsOf(data, "kernels").filter(row => kernels.has(row["name"] as string)), row => row["name"] as string)].map(([name, rows]) => ({ name, us: perStep(data, sum(rows, "time_us") ?? 0), count: perStep(data, sum(rows, "count") ?? 0) }));
  return <Entries title={`${title}, ${ofSteps ? "per step" : per(data)}, beside other work or not`} entries={all.sort((a, b) => b.us - a.us).map(one => ({
    select: { kind: "kernel", name: one.name }, name: one.name, shown: theNames(data)(one.name, 60), value: us(one.us), more: `${kernels.get(one.name)!["class"]}, ${count(one.count)}×`,
  }))} />;
}

const partOf = (row: Row): string =>
  row["class"] === "communication" ? "communication" : /^memcpy/i.test(String(row["name"])) ? "memcpy" : /^memset/i.test(String(row["name"])) ? "memset" : "kernel";

const byTime = (rows: readonly Row[], key: string): Row[] => rows.filter(row => (row[key] as number) > 0).sort((a, b) => (b[key] as number) - (a[key] as number));

function Collectives({ data }: { data: PageData }): JSX.Element {
  return <Entries title={`Collectives by what no compute hides, ${per(data)}`} entries={byTime(rowsOf(data, "collectives"), "exposed_us").map(row => ({
    select: layerOrNone(row["layer"]), name: String(row["collective"]).replaceAll("_", " "), value: us(perStep(data, row["exposed_us"] as number)),
    more: [row["layer"] && `in ${cut(row["layer"], 60)}`, row["phase"], row["dtype"], `${count(perStep(data, row["count"] as number))} calls`].filter(Boolean).join(", "),
  }))} />;
}

function Ops({ data }: { data: PageData }): JSX.Element {
  const ops = [...grouped(rowsOf(data, "operators"), row => row["op"] as string)].map(([op, rows]) => ({ op, us: sum(rows, "self_cpu_time_us") ?? 0, calls: sum(rows, "calls") ?? 0 }));
  return <Entries title={`Ops by their own time, ${per(data)}`} entries={ops.sort((a, b) => b.us - a.us).map(one => ({ select: { kind: "op", name: one.op }, name: one.op, value: us(perStep(data, one.us)), more: `${count(perStep(data, one.calls))}×` }))} />;
}

function Idle({ data, timeline, only }: { data: PageData; timeline: Timeline | null; only: RegExp }): JSX.Element {
  if (!timeline?.gaps.count) {
    return <Entries title={`Layers inside which the device is idle, those below them included, ${per(data)}`} entries={byTime(rowsOf(data, "layers"), "idle_us").filter(row => row["layer"]).map(row => ({
      select: { kind: "layer", name: row["layer"] as string }, name: row["layer"] as string, value: us(perStep(data, row["idle_us"] as number)), more: row["phase"] as string,
    }))} />;
  }
  const { head, gaps } = timeline;
  const [cause, op, layer] = [gaps.column("cause"), gaps.column("op"), gaps.column("layer")];
  const found = [...gaps.duration_ns.keys()].filter(row => only.test(head.causes[cause[row]!] ?? "")).sort((a, b) => gaps.duration_ns[b]! - gaps.duration_ns[a]!);
  return <Entries title="The longest gaps of the steps that are drawn" entries={found.slice(0, 60).map(row => ({
    select: { kind: "gap", number: row }, name: head.causes[cause[row]!] ?? "gap", shown: cut(head.causes[cause[row]!] ?? "gap", 80), value: ns(gaps.duration_ns[row]!), more: [head.names[op[row]!], head.layers[layer[row]!]].filter(isKnown).map(name => cut(name, 60)).join(", in "),
  }))} />;
}

function Waits({ data }: { data: PageData }): JSX.Element {
  return <Entries title={`The CPU waits for the device, ${per(data)}`} entries={byTime(rowsOf(data, "synchronisations"), "wait_us").map(row => ({
    select: { kind: "op", name: row["op"] as string }, name: row["op"] as string, value: us(perStep(data, row["wait_us"] as number)),
    more: [`${row["kind"]}, ${count(perStep(data, row["count"] as number))}×`, row["layer"] && `in ${cut(row["layer"], 60)}`, cut((row["sources"] as string[])[0] ?? "", 80)].filter(Boolean).join(", "),
  }))} />;
}
