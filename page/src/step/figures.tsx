/** How well the machine is used, in figures. One that is not known is no empty card: it stands below with its reason. */
import type { ComponentChildren, JSX } from "preact";
import { attentionElsewhere, mean, onDevice, per, perStep, rowsOf, stepTimes, sum, timeName, why } from "../basis";
import { Figure } from "../chart";
import { bytes, capital, count, cut, isKnown, share, us } from "../format";
import { columnOf, type PageData, type Row } from "../page_data";
import { Section } from "../parts";

interface Shown {
  label: string;
  value: string | null;
  help?: string | undefined;
  missing?: string | null | undefined; // why it is not known, where somebody may ask
}

export function Figures({ data }: { data: PageData }): JSX.Element | null {
  const all = [...ofTime(data), ...calls(data), ...ofPeak(data), ...(onDevice(data) ? ofDevice(data) : ofCpu(data)), ...memory(data), ...caches(data), ...coverage(data), ...attention(data)];
  const known = all.filter(one => one.value !== null);
  const unknown = all.filter(one => one.value === null && one.missing);
  if (!known.length) return null;
  return (
    <Section title="How well the machine is used">
      <div class="figures">{known.map(one => <Figure key={one.label} label={cut(one.label, 120)} value={cut(one.value, 80)} help={cut(one.help ?? "", 400)} />)}</div>
      {unknown.length > 0 && (
        <details><summary>Not known: {cut(unknown.map(one => one.label).join(", "), 300)}</summary>
          <ul class="quiet">{unknown.map(one => <li key={one.label}>{one.label}: {cut(one.missing, 400)}</li>)}</ul></details>
      )}
      <Machine data={data} />
    </Section>
  );
}

function Machine({ data }: { data: PageData }): ComponentChildren {
  const use = data["overview"];
  if (!use || !onDevice(data)) return null;
  const facts = [use.device ?? data["page"].machine, use.compute_capability && `compute capability ${use.compute_capability}`, use.multiprocessors && `${use.multiprocessors} multiprocessors`, isKnown(use.device_memory_bytes) && bytes(use.device_memory_bytes)];
  return <p class="note">{cut(facts.filter(Boolean).join(", ") + (data["page"].use ? `; ${data["page"].use}` : ""), 600)}</p>;
}

const isStepwise = (data: PageData): boolean => rowsIn(data).some(split => split["step"] !== null);
const rowsIn = (data: PageData): Row[] => data["overview"]?.steps ?? [];
const shareOf = (value: unknown): string | null => (isKnown(value) ? share(value as number) : null);

/** Of one step where steps are alike, else of all of them: as the figures beside it are. */
function ofTime(data: PageData): Shown[] {
  const { label, times } = stepTimes(data);
  const found: Shown[] = [];
  if (times.length) {
    const range = times.length > 1 ? `mean of ${times.length} steps, ${us(Math.min(...times))} to ${us(Math.max(...times))}` : "";
    const numbers: number[] = data["page"].step_numbers;
    found.push({ label: `${label}${numbers.length === 1 ? ` of step ${numbers[0]}` : ""}`, value: us(mean(times)), help: range });
  } else found.push({ label: "Step time", value: null, missing: "The trace has no steps (prof.step())." });
  const total = data["time"].total_us as number;
  const inSteps = data["page"].like_steps ? [] : rowsOf(data, "steps").filter(row => row["step"] !== null).map(row => row["time_us"] as number);
  if (inSteps.length) found.push({ label: `${timeName(data)} launched in a step`, value: us(mean(inSteps)), help: `${inSteps.length > 1 ? `mean of ${inSteps.length} steps; ` : ""}what streams do at once counts for each; over the whole trace ${us(total)}` });
  else found.push({ label: `${timeName(data)}, ${per(data)}`, value: us(perStep(data, total)), help: data["page"].like_steps && data["page"].steps > 1 ? `mean of ${data["page"].steps} steps` : "" });
  return found;
}

/** Of generation: what one call of the model takes, which no mean over both phases shows. */
function calls(data: PageData): Shown[] {
  const generating = ["prefill", "decode", "verify"];
  if (!columnOf(data, "layers", "phase").some(phase => generating.includes(phase as string))) return [];
  const rows = rowsOf(data, "layers").filter(row => row["depth"] === 0 && row["calls"] && generating.includes(row["phase"] as string));
  return rows.map(row => ({
    label: `${capital(row["phase"] as string)}, a call${rows.filter(one => one["phase"] === row["phase"]).length > 1 ? ` of ${row["layer"]}` : ""}`, value: us((row["time_us"] as number) / (row["calls"] as number)),
    help: `${timeName(data)} of ${row["layer"]}, mean of ${count(row["calls"] as number)} ${row["calls"] === 1 ? "call" : "calls"}`,
  }));
}

function ofPeak(data: PageData): Shown[] {
  const use = data["utilization"];
  const missing = why(data, "MFU", "not available") ?? why(data, "peak is known") ?? why(data, "flops", "not available") ?? "The FLOPs of a step are not known.";
  if (!use || !isKnown(use.mfu)) return [{ label: "MFU", value: null, missing }];
  const causal = isKnown(use.causal_mfu) && use.causal_mfu !== use.mfu ? `causal ${share(use.causal_mfu)}` : "";
  const of = String(data["page"].use).replace(/^.*? of (?=\d)/, "of ").replace(/;.*$/, "");
  const found: Shown[] = [{ label: "MFU", value: share(use.mfu), help: [causal, of].filter(Boolean).join("; ") }];
  if (isKnown(use.hfu) && use.hfu !== use.mfu) found.push({ label: "HFU", value: share(use.hfu), help: "with what is computed twice" });
  return found;
}

function ofDevice(data: PageData): Shown[] {
  const use = data["overview"];
  const { busy_us: busy, span_us: span } = data["time"];
  const wall = sum(use?.steps ?? [], "span_us");
  const whole = isStepwise(data) ? "the steps'" : "the trace's";
  const found: Shown[] = [];
  if (wall && isKnown(use.gaps_us)) found.push({ label: "Busy", value: share(1 - use.gaps_us / wall), help: `any work, copies too, of ${whole} wall time` });
  else if (isKnown(busy) && span) found.push({ label: "Busy", value: share(busy / span), help: "any work, copies too, of the whole trace's time" });
  if (!use) return found;
  const steps = Math.max(1, rowsIn(data).length);
  const missing = "not known from the trace";
  found.push(
    { label: "Kernels run", value: shareOf(use.utilization), help: `of ${whole} wall time`, missing: why(data, "busy", "not known") ?? missing },
    { label: "SM efficiency", value: shareOf(use.sm_efficiency), help: "the same, by how many multiprocessors have a block", missing },
    { label: "Occupancy", value: shareOf(use.occupancy), help: "resident warps of those that fit, mean by time; high is not always fast", missing },
    { label: "Tensor cores", value: shareOf(use.tensor_core_share), help: "of the kernels' time, in kernels that use them", missing },
    { label: `Kernels, ${isStepwise(data) ? "a step" : "in all"}`, value: isKnown(use.kernels) ? count(Math.round(use.kernels / steps)) : null, help: isKnown(use.launches_per_s) ? `${count(Math.round(use.launches_per_s))} launches /s` : "" },
  );
  return found;
}

function ofCpu(data: PageData): Shown[] {
  const splits = rowsIn(data);
  const span = sum(splits, "span_us");
  const ofSpan = (label: string, key: string, help: string): Shown => ({ label, value: span ? share((sum(splits, key) ?? 0) / span) : null, help, missing: "No step was recorded whole." });
  const type = data["run"]?.device_type;
  const device = type && type !== "cpu" ? "A device was there: record it with activities that hold it (ProfilerActivity.CUDA)." : "The run was on a CPU, or its kernels were not recorded.";
  return [
    ofSpan("In ops", "cpu_us", "of the steps' wall time, in which any thread is in an op"),
    ...(sum(splits, "dataloader_us") ? [ofSpan("Waiting for data", "dataloader_us", "of the steps' wall time")] : []),
    ofSpan("Between ops", "other_us", "of the steps' wall time: Python, and whatever is no op"),
    { label: `Ops, ${per(data)}`, value: count(Math.round(perStep(data, sum(rowsOf(data, "classes"), "count") ?? 0))) },
    { label: "Use of the device", value: null, missing: `There is no device in this trace. ${device}` },
  ];
}

function memory(data: PageData): Shown[] {
  const peak = data["memory"]?.peak;
  if (!isKnown(peak?.allocated_bytes)) return [{ label: "Peak memory", value: null, missing: why(data, "memory", "not available") ?? "No allocation was recorded." }];
  const all = data["overview"]?.device_memory_bytes;
  const help = [isKnown(all) && `${share(peak.allocated_bytes / all)} of ${bytes(all)}`, isKnown(peak.reserved_bytes) && `reserved ${bytes(peak.reserved_bytes)}`, peak.phase && `in ${peak.phase}`];
  return [{ label: "Peak memory", value: bytes(peak.allocated_bytes), help: help.filter(Boolean).join("; ") }];
}

/** Of each model that generated: its cache at the end of the largest request, and what more would take. */
function caches(data: PageData): Shown[] {
  const all: Row[] = data["run"]?.kv_cache ?? [];
  return all.map(cache => {
    const contexts = ((cache["contexts"] as Row[]) ?? []).filter(one => isKnown(one["bytes"])).map(one => `${bytes(one["bytes"] as number)} at ${count(one["tokens"] as number)} tokens`);
    const each = isKnown(cache["bytes_per_token"]) ? `${bytes(cache["bytes_per_token"] as number)} a token` : "";
    const [sequences, beams] = [cache["sequences"] as number, cache["beams"] as number];
    const of = sequences > 1 ? `of each of ${count(sequences / beams)} sequences${beams > 1 ? ` of ${beams} beams` : ""}` : "";
    return {
      label: `KV cache${isKnown(cache["tokens"]) ? `, at ${count(cache["tokens"] as number)} tokens` : ""}${all.length > 1 ? ` of ${cache["root"]}` : ""}`,
      value: isKnown(cache["bytes"]) ? bytes(cache["bytes"] as number) : null, missing: cache["problem"] as string | null, help: [[each, of].filter(Boolean).join(" "), ...contexts].filter(Boolean).join("; "),
    };
  });
}

/** Only where something has no layer: that all has one says nothing. */
function coverage(data: PageData): Shown[] {
  const rest = rowsOf(data, "unattributed").filter(row => (row["time_us"] as number) > 0).sort((a, b) => (b["time_us"] as number) - (a["time_us"] as number));
  if (!rest.length) return [];
  return [{ label: "Attributed to layers", value: data["page"].attributed, help: `not, ${per(data)}: ${rest.slice(0, 2).map(row => `${us(perStep(data, row["time_us"] as number))} ${row["reason"]}`).join("; ")}` }];
}

function attention(data: PageData): Shown[] {
  const times = new Map<string, number>();
  for (const row of rowsOf(data, "attention")) times.set(row["backend"] as string, (times.get(row["backend"] as string) ?? 0) + (row["time_us"] as number));
  if (!times.size) return [];
  const sorted = [...times].sort((a, b) => b[1] - a[1]);
  const other = attentionElsewhere(data);
  const parts = sorted.map(([backend, time]) => `${backend} ${us(perStep(data, time))}`);
  if (other) parts.push(`${other.reason}: ${us(perStep(data, other.time_us))}`);
  return [{ label: `Attention, ${per(data)}`, value: sorted.map(([backend]) => backend).join(" + "), help: parts.join(", ") }];
}
