/** The panel of a layer: its times by phase, work, roof, memory, kernels, steps, advice. */
import type { JSX } from "preact";
import { onDevice, per, perStep, rowsOf, timeName, why } from "../basis";
import { Bars, outliers } from "../chart";
import { colorOf } from "../colors";
import { bytes, count, cut, flopRate, flops, full, isKnown, share, us } from "../format";
import type { PageData, Row } from "../page_data";
import { CopyButton, Go, Marked } from "../parts";
import { findingName, findingsOf, layersOf } from "../targets";
import type { Timeline } from "../timeline/data";
import { type Entry, Entries, Facts, known, NotThere, ofNames, sumsBy, text } from "./facts";

export function OfLayer({ data, name, timeline }: { data: PageData; name: string; timeline: Timeline | null }): JSX.Element {
  const rows = rowsOf(data, "layers").filter(row => row["layer"] === name);
  const first = rows[0];
  if (!first) return <NotThere what={`The layer ${full(name)}`} />;
  const whole = (data["views"].layers.failed ? [] : (data["views"].layers.total as Row[])).find(row => row["layer"] === name);
  const time = known(whole, "time");
  const backends = rows.flatMap(row => Object.entries((row["attention_by_backend_us"] as Record<string, number>) ?? {}));
  const flags = ["shared", "compiled", "graph"].filter(flag => first[flag]).join(", ");
  return (
    <>
      <h2 title={full(name)}>{cut(name, 160)}</h2>
      <p class="quiet">{[first["class_name"], first["kind"] !== "other" && first["kind"], flags].filter(Boolean).map(one => cut(one, 60)).join(" · ")}{isKnown(first["parent"]) && <> · in <Go to="layers" select={{ kind: "layer", name: text(first, "parent") }} title={full(first["parent"])}>{cut(first["parent"], 50)}</Go></>}</p>
      <Phases data={data} rows={rows} whole={whole} />
      <Facts of={[
        [`FLOPs ${per(data)}`, known(whole, "flops") !== null ? flops(known(whole, "flops")) : known(whole, "known_flops") ? `≥ ${flops(known(whole, "known_flops"))}` : null],
        ["Rate", known(whole, "rate") !== null && flopRate(known(whole, "rate"))],
        ["At the roof", known(whole, "roof") !== null && [us(known(whole, "roof")), known(whole, "of_roof") !== null && `${share(known(whole, "of_roof"))} of it reached`, whole?.["bound"] && `bound by ${whole["bound"]}`].filter(Boolean).join(", "), "The time that its bytes and FLOPs would take at best"],
        [`Bytes moved ${per(data)}`, known(whole, "bytes_moved") !== null && bytes(known(whole, "bytes_moved"))],
        ["Retained", known(whole, "retained") !== null && bytes(known(whole, "retained")), "Allocated inside and kept for backward: mean over calls"],
        ["Peak inside", known(whole, "peak") !== null && bytes(known(whole, "peak"))],
        ["Time on the CPU", known(whole, "cpu") !== null && us(known(whole, "cpu"))],
        ["Device idle inside", known(whole, "idle") !== null && us(known(whole, "idle"))],
        ["Exposed communication", known(whole, "exposed") ? us(known(whole, "exposed")) : null],
        ["Attention", backends.length > 0 && backends.map(([backend, time_us]) => `${cut(backend, 40)} ${us(perStep(data, time_us))}`).join(", ")],
        ["Compiled with others", sumOf(rows, "fused_us") > 0 && us(perStep(data, sumOf(rows, "fused_us"))), "Kernels for this layer and others"],
      ]} />
      {known(whole, "flops") === null && whole && <p class="note">{cut(why(data, "flops", "not available") ?? "", 400)}</p>}
      <Entries title={`${onDevice(data) ? "Kernels" : "Ops"} inside, ${per(data)}`} entries={kernels(data, name, timeline, time)} />
      <Entries title={`Layers inside, ${per(data)}`} entries={below(data, name, time)} most={5} />
      <StepsOf data={data} rows={rows} />
      <Advice data={data} layer={name} />
      <Sources data={data} layer={name} />
    </>
  );
}

const sumOf = (rows: readonly Row[], key: string): number => rows.reduce((total, row) => total + ((row[key] as number | null) ?? 0), 0);

function Phases({ data, rows, whole }: { data: PageData; rows: readonly Row[]; whole: Row | undefined }): JSX.Element {
  return (
    <table class="plain narrow">
      <caption>{timeName(data)}, {per(data)}</caption>
      <thead><tr><th>Phase</th><th class="number">All</th><th class="number" title="With no layer below it">Own</th><th class="number">Calls</th></tr></thead>
      <tbody>
        {rows.map(row => (
          <tr key={text(row, "phase")}><td><Marked color={colorOf(data, "phase", text(row, "phase"))}>{text(row, "phase")}</Marked></td><td class="number">{row["lost_launches"] ? "≥ " : ""}{us(perStep(data, row["time_us"] as number))}</td><td class="number">{us(perStep(data, row["self_time_us"] as number))}</td><td class="number">{isKnown(row["calls"]) ? count(perStep(data, row["calls"] as number)) : ""}</td></tr>
        ))}
        {whole && <tr class="total"><td>{share(known(whole, "share"))} of all</td><td class="number">{us(known(whole, "time"))}</td><td /><td /></tr>}
      </tbody>
    </table>
  );
}

/** Its own layer and all below it. */
function inside(data: PageData, name: string): Set<string> {
  const found = new Set([name]);
  for (const row of rowsOf(data, "layers")) if (found.has(text(row, "parent"))) found.add(text(row, "layer")); // parents stand before their children
  return found;
}

function kernels(data: PageData, name: string, timeline: Timeline | null, time_us: number | null): Entry[] {
  const layers = inside(data, name);
  const steps: number = data["page"].steps;
  const found = sumsBy(timeline, one => layers.has(one.layer), "name");
  if (found.length || timeline) return ofNames(data, found, time_us === null ? null : time_us * 1000 * steps, steps);
  const such = rowsOf(data, "kernels").filter(row => (row["layers"] as string[]).some(layer => layers.has(layer)));
  return [...new Set(such.map(row => text(row, "name")))].map(kernel => ({ select: { kind: "kernel", name: kernel }, name: kernel, value: "" }));
}

function below(data: PageData, name: string, time_us: number | null): Entry[] {
  const rows: Row[] = data["views"].layers.failed ? [] : data["views"].layers.total;
  const found = rows.filter(row => row["above"] === name && row["layer"] && known(row, "time"));
  found.sort((a, b) => known(b, "time")! - known(a, "time")!);
  return found.map(row => ({ select: { kind: "layer", name: text(row, "layer") }, name: text(row, "layer"), shown: cut(row["label"], 50), value: us(known(row, "time")), share: time_us ? known(row, "time")! / time_us : null }));
}

function StepsOf({ data, rows }: { data: PageData; rows: readonly Row[] }): JSX.Element | null {
  const numbers: number[] = data["page"].step_numbers;
  const phases = rows.filter(row => ((row["step_times_us"] as number[]) ?? []).length > 1 && (row["time_us"] as number) > 0).slice(0, 3);
  if (!phases.length) return null;
  return <section><h3>Over the steps</h3>{phases.map(row => {
    const values = row["step_times_us"] as number[];
    return <Bars key={text(row, "phase")} title={text(row, "phase")} values={values} labels={values.map((_, i) => `step ${numbers[i] ?? i}`)} format={us} color={colorOf(data, "phase", text(row, "phase"))} far={outliers(values)} short={i => `step ${numbers[i] ?? i}`} />;
  })}</section>;
}

export function Advice({ data, layer }: { data: PageData; layer: string }): JSX.Element | null {
  const found = findingsOf(data).filter(finding => layersOf(data, finding).includes(layer));
  if (!found.length) return null;
  return <section><h3>Advice on it</h3><ul class="plain-list">{found.map(finding => <li key={findingName(data, finding)}><Go to="step" select={{ kind: "finding", name: findingName(data, finding) }}>{cut(finding["title"], 200)}</Go></li>)}</ul></section>;
}

/** Lines of code, where an op of this layer has some. */
function Sources({ data, layer }: { data: PageData; layer: string }): JSX.Element | null {
  const lines = [...new Set(rowsOf(data, "operators").filter(row => (row["layers"] as string[]).includes(layer)).flatMap(row => row["sources"] as string[]))].slice(0, 4);
  if (!lines.length) return null;
  return <section><h3>Lines of code of its ops</h3><ul class="plain-list">{lines.map(line => <li key={line}><code title={full(line)}>{cut(line, 90)}</code> <CopyButton text={line} /></li>)}</ul></section>;
}
