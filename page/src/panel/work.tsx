/** The panels of a kernel and of an op. */
import type { JSX } from "preact";
import { per, perStep, rowsOf, sum, timeName } from "../basis";
import { colorOf } from "../colors";
import { bytes, count, cut, full, isKnown, ns, number, share, us } from "../format";
import type { PageData, Row } from "../page_data";
import { CopyButton, Go, Marked } from "../parts";
import type { Timeline } from "../timeline/data";
import { theNames } from "../whole";
import { type Entry, Entries, Facts, NotThere, ofNames, sumsBy, text } from "./facts";

export function OfKernel({ data, name, timeline }: { data: PageData; name: string; timeline: Timeline | null }): JSX.Element {
  const rows = rowsOf(data, "kernels").filter(row => row["name"] === name);
  const first = rows[0];
  if (!first) return <NotThere what={`The kernel ${full(name)}`} />;
  const time = sum(rows, "time_us") ?? 0;
  const launches = sum(rows, "count") ?? 0;
  const total = data["time"].total_us as number;
  const cores = [...new Set(rows.map(row => (row["tensor_cores"] === null ? "not known from its name" : row["tensor_cores"] ? "used" : "not used")))].join(", ");
  const copied = sum(rows, "copied_bytes");
  const ops = [...new Set(rows.flatMap(row => row["ops"] as string[]))];
  return (
    <>
      <h2 title={full(name)}>{theNames(data)(name, 90)}</h2>
      <p class="quiet"><Marked color={colorOf(data, "class", text(first, "class"))}>{text(first, "class")}</Marked></p>
      <Facts of={[
        [`Time ${per(data)}`, `${us(perStep(data, time))}, ${share(time / total)} of all ${data["page"].time_name}`],
        [`Launches ${per(data)}`, count(perStep(data, launches))],
        ["One launch", `mean ${us(time / launches)}, ${us(Math.min(...rows.map(row => row["min_us"] as number)))} to ${us(Math.max(...rows.map(row => row["max_us"] as number)))}`],
        ["Tensor cores", copied === null && !/^mem(cpy|set)/i.test(name) && cores],
        ["Copied", copied !== null && `${bytes(perStep(data, copied))} ${per(data)}, ${bytes((copied / time) * 1e6)}/s`],
        ["Launched by", ops.length > 0 && ops.map(op => <span key={op}><Go to="kernels" select={{ kind: "op", name: op }}>{cut(op, 60)}</Go> </span>)],
        ["Full name", <details><summary>{count(name.length)} letters</summary><code>{full(name)}</code> <CopyButton text={name} /></details>],
      ]} />
      <Entries title={`Layers that launch it, ${per(data)}`} entries={layersOf(data, rows, name, timeline, time)} />
      <PhasesOf data={data} name={name} timeline={timeline} time={time} />
      <Configurations data={data} rows={rows} />
    </>
  );
}

function layersOf(data: PageData, rows: readonly Row[], name: string, timeline: Timeline | null, time_us: number): Entry[] {
  const steps: number = data["page"].steps;
  const found = sumsBy(timeline, one => one.name === name, "layer");
  if (found.length) {
    return found.map(one => ({
      select: { kind: "layer", name: one.name }, name: one.name || "no layer", value: ns(one.time_ns / steps), share: time_us ? one.time_ns / 1000 / time_us : null, more: `${count(one.count / steps)}×`,
    }));
  }
  return [...new Set(rows.flatMap(row => row["layers"] as string[]))].map(layer => ({ select: { kind: "layer", name: layer }, name: layer, value: "" }));
}

export function PhasesOf({ data, name, timeline, time }: { data: PageData; name: string; timeline: Timeline | null; time: number }): JSX.Element | null {
  const found = sumsBy(timeline, one => one.name === name, "phase");
  return <Entries title={`Phases, ${per(data)}`} entries={found.map(one => ({ select: null, name: one.name || "not known", value: ns(one.time_ns / (data["page"].steps as number)), share: time ? one.time_ns / 1000 / time : null, more: `${count(one.count / (data["page"].steps as number))}×` }))} />;
}

/** Rows of one kernel differ by how it was launched. */
function Configurations({ data, rows }: { data: PageData; rows: readonly Row[] }): JSX.Element | null {
  const launched = rows.filter(row => isKnown(row["grid"]) || isKnown(row["block"]));
  const size = (value: unknown): string => (isKnown(value) ? (value as number[]).join("×") : "?");
  return <Entries title={`Launched as (${launched.length})`} entries={launched.map(row => ({
    select: null, name: `${size(row["grid"])} blocks of ${size(row["block"])}`, value: `${count(perStep(data, row["count"] as number))}× ${us((row["time_us"] as number) / (row["count"] as number))}`,
    more: [
      isKnown(row["registers_per_thread"]) && `${number(row["registers_per_thread"] as number)} registers`, row["shared_memory_bytes"] ? `${bytes(row["shared_memory_bytes"] as number)} shared` : "",
      isKnown(row["occupancy"]) && `occupancy ${share(row["occupancy"] as number)}`, isKnown(row["blocks_per_sm"]) && `${number(row["blocks_per_sm"] as number)} blocks per SM`,
    ].filter(Boolean).join(", "),
  }))} />;
}

export function OfOp({ data, name, timeline }: { data: PageData; name: string; timeline: Timeline | null }): JSX.Element {
  const rows = rowsOf(data, "operators").filter(row => row["op"] === name);
  if (!rows.length) return <NotThere what={`The op ${full(name)}`} />;
  const launched = rowsOf(data, "kernels").filter(row => (row["ops"] as string[]).includes(name));
  const kernels = [...new Set(launched.map(row => text(row, "name")))];
  const names = theNames(data);
  const unique = (key: string): string[] => [...new Set(rows.flatMap(row => row[key] as string[]))];
  const [shapes, sources] = [unique("shapes"), unique("sources")];
  return (
    <>
      <h2 title={full(name)}>{cut(name, 120)}</h2>
      <p class="quiet">{[...new Set(rows.map(row => row["class"]))].join(", ")}</p>
      <div class="wide" role="region" aria-label="By phase" tabIndex={0}><table class="plain narrow">
        <caption>{timeName(data)}, {per(data)}</caption>
        <thead><tr><th>Phase</th><th class="number">Own</th><th class="number" title="With the ops that it calls">All</th><th class="number">CPU, own</th><th class="number">Calls</th></tr></thead>
        <tbody>{rows.map(row => (
          <tr key={text(row, "phase")}><td><Marked color={colorOf(data, "phase", text(row, "phase"))}>{text(row, "phase")}</Marked></td><td class="number">{us(perStep(data, row["self_time_us"] as number))}</td><td class="number">{us(perStep(data, row["time_us"] as number))}</td><td class="number">{us(perStep(data, row["self_cpu_time_us"] as number))}</td><td class="number">{count(perStep(data, row["calls"] as number))}</td></tr>
        ))}</tbody>
      </table></div>
      <Entries title="Kernels that it launches" entries={kernels.map(kernel => ({ select: { kind: "kernel", name: kernel }, name: kernel, shown: names(kernel, 50), value: us(perStep(data, sum(launched.filter(row => row["name"] === kernel), "time_us"))), more: "in all its launches" }))} />
      <Entries title="Layers with most of it" entries={unique("layers").map(layer => ({ select: { kind: "layer", name: layer }, name: layer || "no layer", value: "" }))} />
      {shapes.length > 0 && <section><h3>Shapes of its inputs</h3><ul class="plain-list">{shapes.slice(0, 6).map(shape => <li key={shape}><code>{cut(shape, 120)}</code></li>)}</ul></section>}
      {sources.length > 0 && <section><h3>Lines of code</h3><ul class="plain-list">{sources.slice(0, 6).map(line => <li key={line}><code title={full(line)}>{cut(line, 90)}</code> <CopyButton text={line} /></li>)}</ul></section>}
      {data["time_basis"] !== "device" && <Entries title={`Layers, ${per(data)}`} entries={ofNames(data, sumsBy(timeline, one => one.name === name, "layer"), null, data["page"].steps).map(one => ({ ...one, select: { kind: "layer", name: one.name }, name: one.name || "no layer", shown: cut(one.name || "no layer", 60) }))} />}
    </>
  );
}
