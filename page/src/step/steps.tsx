/** All steps side by side, the parts of a step or request, and series that were followed. */
import type { JSX } from "preact";
import { useRef } from "preact/hooks";
import { grouped, onDevice, per, perStep, rowsOf, stepTimes, sum, timeName, why } from "../basis";
import { Bars, median, outliers } from "../chart";
import { colorOf } from "../colors";
import { cut, isKnown, isNumber, number, us } from "../format";
import { columnOf, type PageData, type Row } from "../page_data";
import { Section } from "../parts";
import { isSame, select, selection, step } from "../state";
import { type Column, Table } from "../table";

interface StepOf {
  number: number;
  us: number;
}

function timesOf(data: PageData): StepOf[] {
  const took = stepTimes(data);
  const rows = rowsOf(data, "steps").filter(row => row["step"] !== null);
  return rows.map(row => ({ number: row["step"] as number, us: (took.of.size ? took.of.get(row["step"] as number) : (row["span_us"] as number | null)) ?? NaN })).filter(one => isNumber(one.us));
}

/** Chooses a step for the panel and the bar alike; once more: lets it go. */
function choose(chosen: number): void {
  select({ kind: "step", number: chosen });
  step.value = isSame(selection.value, { kind: "step", number: chosen }) ? chosen : null;
}

export function Steps({ data }: { data: PageData }): JSX.Element | null {
  const times = timesOf(data);
  const rows = rowsOf(data, "steps").filter(row => row["step"] !== null);
  if (rows.length < 2) return null;
  const slowest = times.reduce<StepOf | null>((most, one) => (most && most.us >= one.us ? most : one), null);
  const middle = median(times.map(one => one.us));
  const told = slowest && times.length > 1 ? `median ${us(middle)}, slowest step ${slowest.number}: ${us(slowest.us)}` : "";
  return (
    <Section title={`Steps (${rows.length})`}>
      {times.length > 1 && <><p class="note">{told}. A click shows a step; the keys ← and → go on to the next.</p><StepBars times={times} slowest={slowest} /></>}
      <details><summary>All steps as a table</summary><StepTable data={data} rows={[...rows, ...rowsOf(data, "steps").filter(row => row["step"] === null && (row["time_us"] as number) > 0)]} /></details>
    </Section>
  );
}

/** One button a step; one stop of the Tab key, arrows go from step to step. */
function StepBars({ times, slowest }: { times: readonly StepOf[]; slowest: StepOf | null }): JSX.Element {
  const holder = useRef<HTMLDivElement>(null);
  const chosen = selection.value?.kind === "step" ? selection.value.number : step.value;
  const at = Math.max(0, times.findIndex(one => one.number === chosen));
  const most = slowest?.us || 1;
  const move = (event: KeyboardEvent): void => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    const buttons = holder.current!.children;
    const now = [...buttons].indexOf(document.activeElement!);
    (buttons[Math.min(buttons.length - 1, Math.max(0, now + by))] as HTMLElement).focus();
  };
  return (
    <div class="step-bars" role="group" aria-label="Steps" ref={holder} onKeyDown={move}>
      {times.map((one, i) => {
        const says = `step ${one.number}: ${us(one.us)}${one === slowest ? ", the slowest" : ""}`;
        return <button key={one.number} type="button" tabIndex={i === at ? 0 : -1} aria-pressed={one.number === chosen} aria-label={says} title={says} class={one === slowest && times.length > 1 ? "slowest" : undefined} onClick={() => choose(one.number)}><span style={{ height: `${Math.max(2, (100 * one.us) / most)}%` }} /></button>;
      })}
    </div>
  );
}

function StepTable({ data, rows }: { data: PageData; rows: readonly Row[] }): JSX.Element {
  const took = stepTimes(data);
  const phases = (data["page"].phases as string[]).filter(phase => rows.some(row => ((row["phases_us"] as Record<string, number>)?.[phase] ?? 0) > 0));
  const wall = (row: Row): number | null | undefined => (row["step"] === null ? undefined : (took.of.get(row["step"] as number) ?? null));
  const cpuSpan = (row: Row): number | null | undefined => (row["step"] === null ? undefined : (row["span_us"] as number | null));
  const columns: Column<Row>[] = [{ key: "step", title: "Step", kind: "text", value: row => (row["step"] === null ? "in no step" : String(row["step"])) }];
  if (took.of.size) columns.push({ key: "wall_us", title: "Step time", kind: "us", missing: "it was not recorded whole", value: wall, help: "Until both the CPU and the device are done with it" });
  if (!rows.every(row => row["step"] === null || row["span_us"] === wall(row))) columns.push({ key: "span_us", title: "CPU span", kind: "us", missing: "where it begins and ends is not known from the trace", value: cpuSpan, help: "From its begin to its end on the CPU" });
  columns.push({ key: "time_us", title: timeName(data), kind: "us" });
  phases.forEach((phase, i) => columns.push({ key: phase, title: phase, kind: "us", like: "time_us", spare: i + 1, value: row => (row["phases_us"] as Record<string, number>)[phase] || undefined }));
  if (rows.some(row => row["attention_us"])) columns.push({ key: "attention_us", title: "attention", kind: "us", like: "time_us", value: row => (row["attention_us"] as number) || undefined });
  if (rows.some(row => isKnown(row["peak_bytes"]))) columns.push({ key: "peak_bytes", title: "Peak", kind: "bytes", missing: why(data, "memory", "not available") ?? "no allocation was recorded in it", value: row => (row["step"] === null ? undefined : (row["peak_bytes"] as number | null)) });
  const chosen = selection.value?.kind === "step" ? String(selection.value.number) : null;
  return <Table name="steps" label="Steps" rows={rows} columns={columns} id={row => String(row["step"])} selected={chosen} onSelect={row => { if (row === null) { if (chosen !== null) choose(Number(chosen)); } else if (row["step"] !== null) choose(row["step"] as number); }} />;
}

/** Prefill and tokens of a request, models of a pipeline, roles of training. */
export function Parts({ data }: { data: PageData }): JSX.Element | null {
  const named = [...grouped(rowsOf(data, "parts").filter(row => row["step"] !== null), row => row["part"] as string)];
  if (named.length < 2) return null;
  const rows: Row[] = named.map(([part, group]) => {
    const count = part === "other" ? null : sum(group, "count");
    const time = sum(group, "time_us") ?? 0;
    return { part, count: count === null ? undefined : perStep(data, count), time_us: perStep(data, time), each: count ? time / count : undefined };
  });
  const total = sum(rows, "time_us");
  return (
    <Section title={data["run"]?.step_source === "requests" ? "Parts of a request" : "Parts of a step"}>
      <Table name="parts" label="Parts" search={false} rows={rows} sort={{ key: "time_us", descending: true }} columns={[
        { key: "part", title: "Part", kind: "text", longest: 60, help: "other: between the calls of the model" },
        { key: "time_us", title: `${onDevice(data) ? "Device time" : "Time"} ${per(data)}`, kind: "us" },
        { key: "share", title: "Share of all steps", kind: "share", bar: true, value: row => (total ? (row["time_us"] as number) / total : undefined) },
        { key: "count", title: `Calls ${per(data)}`, kind: "count" },
        { key: "each", title: "Time each", kind: "us" },
      ]} />
    </Section>
  );
}

const FIRST_SERIES = 12;
const FUNCTION_OF_LAYER = /^(?:<lambda>|\w+)\[(.+)\]$/s; // such a series has the function's own unit, all others are times

/** Layers and functions that were followed, a value a step or entry. */
export function Series({ data }: { data: PageData }): JSX.Element | null {
  const all = Object.entries((data["series"] ?? {}) as Record<string, (number | null)[]>).filter(([, values]) => values.some(isNumber));
  if (!all.length) return null;
  const numbers: number[] = data["page"].step_numbers;
  const layers = new Set(columnOf(data, "layers", "layer"));
  const isTimed = (name: string): boolean => !layers.has(FUNCTION_OF_LAYER.exec(name)?.[1]);
  const drawn = ([name, values]: [string, (number | null)[]]): JSX.Element => {
    const stepwise = values.length === numbers.length;
    return <Bars key={name} title={cut(name, 60)} values={values} labels={values.map((_, i) => (stepwise ? `step ${numbers[i]}` : `entry ${i + 1}`))} format={isTimed(name) ? us : number} far={outliers(values)} short={i => (stepwise ? `step ${numbers[i]}` : `entry ${i + 1}`)}
      color={colorOf(data, "split", "cpu")} {...(stepwise ? { onChoose: (i: number) => choose(numbers[i]!) } : {})} />;
  };
  return (
    <Section title={`Followed (${all.length})`} help="What was followed over the steps, or over the entries of a layer">
      {all.some(([name]) => isTimed(name)) && <p class="note">{timeName(data)} of what is launched while each runs: of a block around forward, without the backward that follows from it.</p>}
      <div class="multiples">{all.slice(0, FIRST_SERIES).map(drawn)}</div>
      {all.length > FIRST_SERIES && <details><summary>{all.length - FIRST_SERIES} more</summary><div class="multiples">{all.slice(FIRST_SERIES).map(drawn)}</div></details>}
    </Section>
  );
}
