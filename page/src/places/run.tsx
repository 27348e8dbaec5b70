/** Run: what to know about the numbers, how they were made, parts, experts, the trace, files, versions, environment. */
import { useSignal } from "@preact/signals";
import type { ComponentChildren, JSX } from "preact";
import { useMemo } from "preact/hooks";
import { onDevice, per, perStep, rowsOf } from "../basis";
import { ExpertsView, whyNoExperts } from "../experts";
import { bytes, capital, clean, count, cut, full, isKnown, us } from "../format";
import type { PageData, Row } from "../page_data";
import { Section } from "../parts";
import { canRead, openInPerfetto, perfetto } from "../perfetto";
import { Parts } from "../step/steps";
import { type Column, Table } from "../table";

type Draw = (props: { data: PageData }) => JSX.Element | null;

export function RunPlace({ data }: { data: PageData }): JSX.Element {
  return <>{[Notes, HowMade, Parts as Draw, Experts, Trace, Facts, Environment].map((One, i) => <One key={i} data={data} />)}</>;
}

// ---- what to know about these numbers ---------------------------------------------------------------------------------

const Notes: Draw = ({ data }) => {
  const warnings = data["warnings"] as string[];
  const rows = useMemo(() => rowsOf(data, "unattributed").filter(row => (row["time_us"] as number) > 0), [data]);
  const columns = useMemo((): Column<Row>[] => [
    { key: "reason", title: "Time without a layer, because", kind: "text", longest: 90 },
    { key: "time_us", title: `Time ${per(data)}`, kind: "us", value: row => perStep(data, row["time_us"] as number) },
    { key: "share", title: "Share", kind: "share", bar: true, help: `of the ${data["page"].time_name}`, value: row => (data["time"].total_us ? (row["time_us"] as number) / data["time"].total_us : undefined) },
    { key: "count", title: `${onDevice(data) ? "Kernels, copies" : "Ops"} ${per(data)}`, kind: "count", value: row => perStep(data, row["count"] as number) },
  ], [data]);
  return (
    <Section title="What to know about these numbers">
      {!data["complete"] && <p class="notice">The recording ended early: what came after is in no number.</p>}
      <Lines of={warnings} />
      {!warnings.length && !rows.length && <p class="note">Nothing: all that was asked for was recorded, and all time has a layer, or none by nature.</p>}
      {rows.length > 0 && <Table name="unattributed" label="Time without a layer" rows={rows} columns={columns} sort={{ key: "time_us", descending: true }} search={false} />}
    </Section>
  );
};

export function Lines({ of }: { of: readonly string[] }): JSX.Element | null {
  return of.length ? <ul class="warnings">{of.map((line, i) => <li key={i} title={cut(line, 800) === line ? undefined : full(line)}>{capital(cut(line, 800))}</li>)}</ul> : null;
}

const ENDED_BY: Readonly<Record<string, string>> = {
  "prof.step()": "Each call of prof.step() ends a step.",
  optimizer: "Each step of the optimizer ends a step.",
  updates: "Each update of the parameters ends a step.",
  requests: "A step is a request.",
  "root calls": "A step is a call of the model.",
};

const HowMade: Draw = ({ data }) => {
  const { run, page } = data;
  const steps: number[] = page.step_numbers;
  const left: Row[] = run.left_out ?? [];
  const lines = [
    steps.length ? `Times are of ${page.steps_in_words}${steps.length > 1 ? page.like_steps ? ": a number “per step” is the sum over them, divided by how many there are" : ": they are unlike, so numbers are over the whole trace" : ""}.` : "The trace has no steps (prof.step()): numbers are of all of it.",
    run.step_source ? ENDED_BY[run.step_source] ?? `What ends a step: ${run.step_source}.` : "",
    page.full_steps ? `Shapes, and so FLOPs, are of the steps with shapes (${page.full_steps}), which are slower: no time per step is taken from them.` : "",
    onDevice(data) ? "Times are of the device: how long its kernels, copies and sets run, wherever the CPU was." : "Times are of the CPU, as there is no device in the trace: the wall time of ops, each without those that it calls.",
    `${page.attributed} of the time has a layer, or none by nature, as the optimizer's.`,
    run.evaluated_steps?.length ? `Steps ${run.evaluated_steps.join(", ")} were recorded, and are in no number: the model was evaluated in them.` : "",
    ...left.map(one => `Left out: ${one["what"]}, ${count(one["count"] as number)} time${one["count"] === 1 ? "" : "s"}, ${us(one["time_us"] as number)}.`),
  ];
  return <Section title="How the numbers were made"><Lines of={lines.filter(Boolean)} /></Section>;
};

const Experts: Draw = ({ data }) => (whyNoExperts(data) ? null : <Section title="Experts and adapters"><ExpertsView data={data} /></Section>);

// ---- the trace --------------------------------------------------------------------------------------------------------

const Trace: Draw = ({ data }) => {
  const href = data["page"].trace_href as string | null;
  return <Section title="The whole trace, in another viewer" id="whole-trace"><TraceOf href={href} say="Every event on its thread or stream, with our lanes of layers and phases" title={data["page"].title} search="a layer by its full name (model.layers.3.mlp), or for ProfilerStep to find a step" /></Section>;
};

/** Where the Chrome trace lies, and what to do with it. */
export function TraceOf({ href, say, title, search }: { href: string | null; say: string; title: string; search: string }): JSX.Element {
  if (!href) {
    return (
      <>
        <p>No trace lies beside this page.</p>
        <p class="note">ProfilerWrapper keeps it unless trace=False. Of a trace that somebody sends you, the page is made by: <code>profiler-wrapper report TRACE</code></p>
      </>
    );
  }
  return (
    <>
      <p>{say}: <a id="trace-file" href={href} download="">{cut(href.split("/").pop() || href, 120)}</a></p>
      <OpenInPerfetto href={href} title={title} />
      <p>A click on the link saves it or shows it as text. To look at it:</p>
      <ul>
        <li>In any browser: ui.perfetto.dev → “Open trace file” → choose this file. It stays on your machine.</li>
        <li>Without a network: chrome://tracing in Chrome or Chromium → “Load” → choose this file.</li>
        <li>Search there for {search}.</li>
      </ul>
      <p class="note">Both read .json.gz too; the keys W, A, S, D zoom and move. Beyond about 2 GB, Perfetto needs its trace_processor beside it. The link works as long as page and trace lie in the same place to one another.</p>
    </>
  );
}

function OpenInPerfetto({ href, title }: { href: string; title: string }): JSX.Element {
  const said = useSignal("");
  const waits = useSignal(false);
  const open = async (): Promise<void> => {
    if (!canRead()) {
      window.open(perfetto.origin);
      said.value = `Drop this file there: ${decodeURIComponent(new URL(href, location.href).pathname)}`;
      return;
    }
    waits.value = true;
    said.value = "Waiting for Perfetto …";
    said.value = await openInPerfetto(href, title).then(() => "Handed over.", (error: Error) => error.message);
    waits.value = false;
  };
  return (
    <>
      <p><button type="button" class="small" id="perfetto" disabled={waits.value} onClick={() => void open()}>Open in Perfetto</button> <span class="note" role="status">{said.value}</span></p>
      {!canRead() && <p class="note">A page on a disk may not read the trace: it says where it lies, to be dropped on ui.perfetto.dev. From a page that “profiler-wrapper report --open” shows, the button hands the trace over.</p>}
    </>
  );
}

// ---- what ran, on what ------------------------------------------------------------------------------------------------

/** CUDA counts its versions as 12090: 12.9; HIP as 60443483: 6.4.43483. */
function version(name: string, value: string): string {
  const digits = Number(value);
  if (/^cuda\b/.test(name) && /^\d{5}$/.test(value)) return `${Math.floor(digits / 1000)}.${Math.floor((digits % 1000) / 10)}`;
  if (/^hip\b/.test(name) && /^\d{8}$/.test(value)) return `${Math.floor(digits / 1e7)}.${Math.floor((digits % 1e7) / 1e5)}.${digits % 1e5}`;
  return value;
}

/** Any plain value in words; nothing for what is not known, or empty. */
function inWords(value: unknown): string {
  if (!isKnown(value) || value === "") return "";
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value === "number") return count(value);
  if (Array.isArray(value)) return value.map(inWords).filter(Boolean).join(", ");
  if (typeof value !== "object") return String(value);
  return Object.entries(value as object).map(([name, one]) => [name.replaceAll("_", " "), inWords(one)] as const).filter(([, one]) => one).map(([name, one]) => `${name} ${one}`).join(", ");
}

type Fact = readonly [name: string, value: unknown];

function FactTable({ facts, label }: { facts: readonly Fact[]; label: string }): JSX.Element {
  const known = facts.map(([name, value]) => [name, inWords(value)] as const).filter(([, value]) => value);
  return (
    <table class="plain long run-facts" aria-label={label}>
      <tbody>{known.map(([name, value]) => <tr key={name}><th scope="row">{cut(name, 80)}</th><td title={cut(value, 400) === value ? undefined : full(value)}>{cut(value, 400)}</td></tr>)}</tbody>
    </table>
  );
}

const Facts: Draw = ({ data }) => {
  const { run, page } = data;
  const roots = [...new Set(rowsOf(data, "layers").filter(row => row["depth"] === 0 && row["layer"]).map(row => row["layer"] as string))].slice(0, 6);
  const files = (page.files ?? []) as { name: string; what: string }[];
  const began = isKnown(run.window_begin_ns) ? new Date(run.window_begin_ns / 1e6).toISOString().replace("T", " ").slice(0, 19) : null;
  const facts: Fact[] = [
    ["Model", roots],
    ["Parameters", isKnown(run.parameters?.elements) ? `${count(run.parameters.elements)} in ${count(run.parameters.tensors)} tensors${isKnown(run.parameters.trainable_elements) ? `, ${count(run.parameters.trainable_elements)} of them trained` : ""}${run.parameters.bytes_by_dtype ? `; ${Object.entries(run.parameters.bytes_by_dtype as Record<string, number>).map(([type, size]) => `${bytes(size)} of ${type}`).join(", ")}` : ""}` : null],
    ["Attention", run.attention_implementation],
    ["Wrapped by", run.wrappers],
    ["Device", page.machine],
    ["Devices of this process", run.device_count],
    ["Device memory", isKnown(run.device_memory_bytes) ? bytes(run.device_memory_bytes) : null],
    ["CPU", run.cpu_name === page.machine ? null : run.cpu_name],
    ["Machine", run.host],
    ["Rank", isKnown(run.rank) ? `${run.rank}${isKnown(run.world_size) ? ` of ${run.world_size}` : ""}${isKnown(run.local_rank) ? `, on its machine ${run.local_rank}` : ""}` : null],
    ["Place in the mesh", run.coordinates],
    ["Stages of the pipeline", run.stages],
    ["Ranks recorded", run.recorded_ranks],
    ["Start of the job", run.attempt ? `number ${run.attempt + 1}: it was started again` : null],
    ["Recorded", began ? `${began} UTC${isKnown(run.window_end_ns) ? `, ${us((run.window_end_ns - run.window_begin_ns) / 1000)}` : ""}` : null],
    ["Steps", `${page.steps_in_words}${page.full_steps ? `; with shapes: ${page.full_steps}` : ""}`],
    ["Times are of", onDevice(data) ? "the device" : "the CPU"],
    ["Peaks", page.use],
    ["Trace", run.trace], ["Trace with shapes", run.full_trace],
    ["Complete", data["complete"] ? "yes" : "no: the recording ended early"],
    ...Object.entries((run.versions ?? {}) as Record<string, string>).map(([name, value]): Fact => [name, version(name, String(value))]),
  ];
  const rest: ComponentChildren = files.length > 0 && (
    <><h3>Files beside this page</h3><table class="plain run-facts" aria-label="Files"><tbody>{files.map(one => <tr key={one.name}><th scope="row"><a href={encodeURI(one.name)}>{cut(one.name, 120)}</a></th><td>{clean(one.what)}</td></tr>)}</tbody></table></>
  );
  return <Section title="The run"><FactTable facts={facts} label="The run" />{rest}</Section>;
};

const Environment: Draw = ({ data }) => {
  const { run } = data;
  const variables = Object.entries((run.environment ?? {}) as Record<string, string>);
  const unset = variables.filter(([, value]) => value === "").map(([name]) => name);
  const optimizers = ((run.optimizers ?? []) as Row[]).map(one => {
    const { class_name: name, module: _, ...settings } = one;
    return `${name}: ${inWords(settings)}`;
  });
  const allowed = Object.entries((run.attention_backends ?? {}) as Record<string, boolean>);
  const facts: Fact[] = [
    ["Optimizers", optimizers.join("; ")],
    ["Attention may use", allowed.filter(([, may]) => may).map(([name]) => name)],
    ["Attention may not use", allowed.filter(([, may]) => !may).map(([name]) => name)],
    ["Precision of float32 products", run.float32_matmul_precision],
    ["TF32", run.tf32],
    ["cuDNN", run.cudnn],
    ["Compute capability", (run.compute_capability as number[] | undefined)?.join(".")],
    ["Allocator", run.allocator_settings],
    ["Free memory at the end", isKnown(run.free_memory_bytes) ? bytes(run.free_memory_bytes) : null],
    ["Process group", run.process_group_backend],
    ["Graph breaks", ((run.graph_breaks ?? []) as unknown[]).map(inWords).join("; ")],
    ["The machine was overloaded", run.overloaded || null],
    ...variables.filter(([, value]) => value !== ""),
    ["Not set", unset],
  ];
  if (!facts.some(([, value]) => inWords(value))) return null;
  return <Section title="Environment"><FactTable facts={facts} label="Environment" /></Section>;
};
