/** Where a step went: one bar of wall time that adds up, and what each part of it is made of. */
import type { ComponentChildren, JSX } from "preact";
import { grouped, onDevice, per, perStep, rowsOf, sum, timeName } from "../basis";
import { colorOf } from "../colors";
import { capital, count, cut, full, isKnown, ns, share, us } from "../format";
import type { PageData, Row } from "../page_data";
import { Go, Marked, Section, Text } from "../parts";
import { step } from "../state";
import type { Timeline } from "../timeline/data";
import { openPart, theNames } from "../whole";

const PARTS: readonly (readonly [key: string, name: string, onCpu: string, help: string])[] = [
  ["kernel", "Kernels", "Kernels", "a kernel that computes is running on the device, whatever else runs beside it"],
  ["communication", "Exposed communication", "Communication", "a collective is running, and no kernel, copy or set beside it"],
  ["memcpy", "Copies", "Copies", "a copy is running on the device, and no kernel"],
  ["memset", "Sets", "Sets", "memory is being set on the device, and nothing of the above"],
  ["runtime", "Idle: CPU in runtime calls", "Runtime calls", "the CPU launches, waits or asks for memory, and the device has nothing to do"],
  ["dataloader", "Idle: waiting for data", "Waiting for data", "the CPU waits for the DataLoader"],
  ["cpu", "Idle: CPU in ops", "In ops", "the CPU is in ops, and the device has nothing to do"],
  ["other", "Idle: Python between ops", "Between ops", "none of these: Python between ops, and whatever is no op"],
];
const IDLE = new Set(["runtime", "dataloader", "cpu", "other"]);
const MOST = 8; // rows of what a part is made of

interface Part {
  key: string;
  name: string;
  help: string;
  us: number;
  least: number;
  most: number;
}

interface Split {
  of: string; // what it is a split of
  mean: string; // over how many, where over several
  whole: string; // the same, as what shares are of
  us: number;
  parts: Part[];
  steps: number;
}

/** Of the step that is chosen, else the mean of all. */
export function splitOf(data: PageData): Split | null {
  const all: Row[] = data["overview"]?.steps ?? [];
  if (!all.length) return null;
  const one = all.find(row => row["step"] !== null && row["step"] === step.value);
  const rows = one ? [one] : all;
  const stepwise = all.some(row => row["step"] !== null);
  const mean = (key: string): number => rows.reduce((total, row) => total + (row[key] as number), 0) / rows.length;
  const values = (key: string): number[] => rows.map(row => row[key] as number);
  const device = onDevice(data);
  const parts = PARTS.map(([part, name, onCpu, help]) => {
    const key = `${part}_us`;
    const said = device ? help : help.replace(/, and the device has nothing to do/, "");
    return { key: part, name: device ? name : onCpu, help: said, us: mean(key), least: Math.min(...values(key)), most: Math.max(...values(key)) };
  });
  const of = one ? `step ${one["step"]}` : !stepwise ? "the trace" : all.length > 1 ? "a step" : "the step";
  return { of, mean: rows.length > 1 ? `, mean of ${rows.length} steps` : "", whole: one ? `step ${one["step"]}` : stepwise ? "the step" : "the trace", us: mean("span_us"), parts: parts.filter(part => part.us > 0), steps: rows.length };
}

export function StepBar({ data, timeline }: { data: PageData; timeline: Timeline | null }): JSX.Element | null {
  const split = splitOf(data);
  if (!split) return null;
  const idle = onDevice(data) ? split.parts.filter(part => IDLE.has(part.key)).reduce((total, part) => total + part.us, 0) : 0;
  const isOpen = (part: Part): boolean => openPart.value === part.key || (openPart.value === "idle" && IDLE.has(part.key));
  const open = split.parts.filter(isOpen);
  const title = `Where ${split.of} went: ${us(split.us)}${split.mean}`;
  return (
    <Section id="where" title={title} help="Wall time without overlap: an instant belongs to the first part that applies to it. The parts add up to the whole exactly.">
      <Strip data={data} split={split} isOpen={isOpen} onChoose={toggle} />
      <div class="legend buttons">
        {split.parts.map(part => (
          <button key={part.key} type="button" data-part={part.key} aria-expanded={isOpen(part)} title={capital(part.help)} onClick={() => toggle(part.key)}>
            <Marked color={colorOf(data, "split", part.key)}>{part.name} <b>{us(part.us)}</b> {share(part.us / split.us)}</Marked>
          </button>
        ))}
        {idle > 0 && split.parts.filter(part => IDLE.has(part.key)).length > 1 && (
          <button type="button" data-part="idle" aria-expanded={openPart.value === "idle"} title="All in which the device has nothing to do" onClick={() => toggle("idle")}>
            The device is idle <b>{us(idle)}</b> {share(idle / split.us)}
          </button>
        )}
      </div>
      {open.length > 0 && <MadeOf data={data} parts={open} timeline={timeline} />}
      <details>
        <summary>The parts as a table</summary>
        <SplitTable split={split} />
      </details>
    </Section>
  );
}

/** The bar alone; buttons with names stand below it. */
export function Strip({ data, split, isOpen, onChoose }: { data: PageData; split: Split; isOpen?: (part: Part) => boolean; onChoose?: (part: string) => void }): JSX.Element {
  return (
    <div class="step-bar" aria-hidden="true">
      {split.parts.map(part => (
        <div key={part.key} class={`${IDLE.has(part.key) && onDevice(data) ? "idle" : ""}${isOpen?.(part) ? " open" : ""}`} title={`${part.name}: ${us(part.us)}, ${share(part.us / split.us)} of ${split.whole}. ${capital(part.help)}.`}
          style={{ flexGrow: part.us / split.us, background: colorOf(data, "split", part.key) }} onClick={() => onChoose?.(part.key)} />
      ))}
    </div>
  );
}

function toggle(part: string): void {
  openPart.value = openPart.value === part ? null : part;
}

export function SplitTable({ split }: { split: Split }): JSX.Element {
  const many = split.steps > 1;
  return (
    <div class="wide"><table class="plain">
      <thead><tr><th>Part</th><th class="number">{many ? `Mean of ${split.steps} steps` : "Time"}</th><th class="number">Share of {split.whole}</th>{many && <><th class="number">Least</th><th class="number">Most</th></>}<th>Means</th></tr></thead>
      <tbody>
        {split.parts.map(part => (
          <tr key={part.key}><td>{part.name}</td><td class="number">{us(part.us)}</td><td class="number">{share(part.us / split.us)}</td>{many && <><td class="number">{us(part.least)}</td><td class="number">{us(part.most)}</td></>}<td class="quiet">{part.help}</td></tr>
        ))}
        <tr class="total"><td>All</td><td class="number">{us(split.us)}</td><td class="number">100 %</td>{many && <><td /><td /></>}<td /></tr>
      </tbody>
    </table></div>
  );
}

// ---- what a part is made of -------------------------------------------------------------------------------------------

function MadeOf({ data, parts, timeline }: { data: PageData; parts: readonly Part[]; timeline: Timeline | null }): JSX.Element {
  const [first] = parts;
  if (!IDLE.has(first!.key)) return <div class="made-of"><Work data={data} part={first!.key} /></div>;
  if (!onDevice(data)) return <div class="made-of"><CpuWork data={data} part={first!.key} /></div>;
  return <div class="made-of"><Idle data={data} timeline={timeline} only={parts.length === 1 && first!.key === "dataloader" ? /dataloader/i : /./} /><Waits data={data} /></div>;
}

/** Rows of [what, how long, of what]: the longest first. */
function List({ title, rows, rest }: { title: string; rows: readonly { key: string; link: ComponentChildren; value: string; more?: ComponentChildren }[]; rest?: string | undefined }): JSX.Element | null {
  if (!rows.length) return null;
  return (
    <div>
      <h3>{title}</h3>
      <ul class="rows">{rows.map(row => <li key={row.key}><span class="value">{row.value}</span><span>{row.link} {row.more && <span class="quiet">{row.more}</span>}</span></li>)}</ul>
      {rest && <p class="note">{rest}</p>}
    </div>
  );
}

/** What each part of the model takes of the device's time; these add up to all of it. */
export function Shares({ data }: { data: PageData }): JSX.Element | null {
  const rows: Row[] = data["views"]?.shares ?? [];
  const shown = rows.slice(0, 12).map(row => {
    const layers = (row["layers"] as string[]) ?? [];
    const link = layers.length ? <Go to="step" select={{ kind: "layer", name: layers[0]! }}>{cut(row["name"], 80)}</Go> : <Text of={row["name"]} longest={80} />;
    return { key: String(row["name"]), link, value: us(perStep(data, row["time_us"] as number)), more: `${share(row["share"] as number)} of the ${data["page"].time_name}${layers.length > 1 ? `, ${count(layers.length)} layers` : ""}` };
  });
  return <List title={`${timeName(data)} by part of the model, ${per(data)}`} rows={shown} rest={rows.length > 12 ? `and ${rows.length - 12} more` : undefined} />;
}

function Work({ data, part }: { data: PageData; part: string }): JSX.Element {
  const kernels = rowsOf(data, "kernels").filter(row => kindOf(row) === part);
  const names = theNames(data);
  const all = [...grouped(kernels, row => row["name"] as string)].map(([name, group]) => ({ name, us: sum(group, "time_us") ?? 0, count: sum(group, "count") ?? 0, class: group[0]!["class"] as string }));
  all.sort((a, b) => b.us - a.us);
  const rows = all.slice(0, MOST).map(one => ({
    key: one.name, value: us(perStep(data, one.us)),
    link: <Go to="step" select={{ kind: "kernel", name: one.name }} title={full(one.name)}>{names(one.name, 60)}</Go>, more: `${one.class}, ${count(perStep(data, one.count))} launches`,
  }));
  return (
    <>
      {part === "kernel" && <Shares data={data} />}
      {part === "communication" && <Collectives data={data} />}
      <List title={`${{ kernel: "Kernels", communication: "Kernels of communication", memcpy: "Copies", memset: "Sets" }[part] ?? "Kernels"} ${per(data)}, beside other work or not`} rows={rows} rest={all.length > MOST ? `and ${all.length - MOST} more in Kernels` : undefined} />
    </>
  );
}

const kindOf = (row: Row): string =>
  row["class"] === "communication" ? "communication" : /^memcpy/i.test(String(row["name"])) ? "memcpy" : /^memset/i.test(String(row["name"])) ? "memset" : "kernel";

function Collectives({ data }: { data: PageData }): JSX.Element | null {
  const rows = rowsOf(data, "collectives").filter(row => isKnown(row["exposed_us"]) && (row["exposed_us"] as number) > 0).sort((a, b) => (b["exposed_us"] as number) - (a["exposed_us"] as number));
  return <List title={`Collectives by what no compute hides, ${per(data)}`} rows={rows.slice(0, MOST).map((row, i) => ({
    key: String(i), value: us(perStep(data, row["exposed_us"] as number)),
    link: row["layer"] ? <Go to="step" select={{ kind: "layer", name: row["layer"] as string }}>{cut(row["collective"], 40)} in {cut(row["layer"], 60)}</Go> : <Text of={String(row["collective"]).replaceAll("_", " ")} />,
    more: [row["phase"], row["dtype"], `${count(perStep(data, row["count"] as number))} calls`].filter(Boolean).join(", "),
  }))} />;
}

function CpuWork({ data, part }: { data: PageData; part: string }): JSX.Element | null {
  if (part === "dataloader" || part === "other") return <p class="note">{capital(PARTS.find(one => one[0] === part)![3])}.</p>;
  const ops = [...grouped(rowsOf(data, "operators"), row => row["op"] as string)].map(([op, rows]) => ({ op, us: sum(rows, "self_cpu_time_us") ?? 0, calls: sum(rows, "calls") ?? 0 }));
  ops.sort((a, b) => b.us - a.us);
  return <><Shares data={data} /><List title={`Ops by their own time, ${per(data)}`} rows={ops.slice(0, MOST).map(one => ({
    key: one.op, value: us(perStep(data, one.us)), link: <Go to="step" select={{ kind: "op", name: one.op }}>{cut(one.op, 60)}</Go>, more: `${count(perStep(data, one.calls))} calls`,
  }))} /></>;
}

function Idle({ data, timeline, only }: { data: PageData; timeline: Timeline | null; only: RegExp }): JSX.Element | null {
  if (!timeline?.gaps.count) return <IdleLayers data={data} />;
  const { head, gaps } = timeline;
  const found = [...gaps.duration_ns.keys()].filter(row => only.test(head.causes[gaps.column("cause")[row]!] ?? ""));
  found.sort((a, b) => gaps.duration_ns[b]! - gaps.duration_ns[a]!);
  return <List title="The longest gaps of the steps that are drawn" rows={found.slice(0, MOST).map(row => ({
    key: String(row), value: ns(gaps.duration_ns[row]!),
    link: <Go to="step" select={{ kind: "gap", number: row }}>{cut(head.causes[gaps.column("cause")[row]!] ?? "gap", 80)}</Go>,
    more: [head.names[gaps.column("op")[row]!], head.layers[gaps.column("layer")[row]!]].filter(Boolean).map(name => cut(name, 60)).join(", in "),
  }))} rest={found.length > MOST ? `and ${count(found.length - MOST)} more, in the timeline` : undefined} />;
}

/** Where no gaps are known: the innermost layers in which the device has most time nothing to do. */
function IdleLayers({ data }: { data: PageData }): JSX.Element | null {
  const rows = rowsOf(data, "layers").filter(row => (row["idle_us"] as number) > 0 && row["layer"]).sort((a, b) => (b["idle_us"] as number) - (a["idle_us"] as number));
  return <List title={`Layers inside which the device is idle, those below them included, ${per(data)}`} rows={rows.slice(0, MOST).map(row => ({
    key: `${row["layer"]} ${row["phase"]}`, value: us(perStep(data, row["idle_us"] as number)), link: <Go to="step" select={{ kind: "layer", name: row["layer"] as string }}>{cut(row["layer"], 80)}</Go>, more: row["phase"] as string,
  }))} />;
}

function Waits({ data }: { data: PageData }): JSX.Element | null {
  const rows = [...rowsOf(data, "synchronisations")].sort((a, b) => (b["wait_us"] as number) - (a["wait_us"] as number));
  const ops = new Set(rowsOf(data, "operators").map(row => row["op"]));
  return <List title={`The CPU waits for the device, ${per(data)}`} rows={rows.slice(0, MOST).map((row, i) => ({
    key: String(i), value: us(perStep(data, row["wait_us"] as number)),
    link: ops.has(row["op"]) ? <Go to="step" select={{ kind: "op", name: row["op"] as string }}>{cut(row["op"], 60)}</Go> : <Text of={row["op"]} longest={60} />,
    more: [`${row["kind"]}, ${count(perStep(data, row["count"] as number))}×`, row["layer"] && `in ${cut(row["layer"], 60)}`, cut((row["sources"] as string[])[0] ?? "", 80)].filter(Boolean).join(", "),
  }))} />;
}
