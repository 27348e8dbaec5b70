/** Where a step went: one bar of wall time that adds up, and what each part of it is made of. */
import type { JSX } from "preact";
import { onDevice, per, timeName } from "../basis";
import { colorOf } from "../colors";
import { capital, share, us } from "../format";
import type { PageData, Row } from "../page_data";
import { Marked, Section } from "../parts";
import { step } from "../state";
import type { Timeline } from "../timeline/data";
import { openPart } from "../whole";
import { MadeOf } from "./made_of";

const PARTS: readonly (readonly [key: string, help: string])[] = [
  ["kernel", "a kernel that computes is running on the device, whatever else runs beside it"],
  ["communication", "a collective is running, and no kernel, copy or set beside it"],
  ["memcpy", "a copy is running on the device, and no kernel"],
  ["memset", "memory is being set on the device, and nothing of the above"],
  ["runtime", "the CPU launches, waits or asks for memory, and the device has nothing to do"],
  ["dataloader", "the CPU waits for the DataLoader"],
  ["cpu", "the CPU is in ops, and the device has nothing to do"],
  ["other", "none of these: Python between ops, and whatever is no op"],
];
export const IDLE = new Set(["runtime", "dataloader", "cpu", "other"]);

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
  const parts = PARTS.map(([part, help]) => {
    const key = `${part}_us`;
    const said = device ? help : help.replace(/, and the device has nothing to do/, "");
    return { key: part, name: data["page"].split_names[part], help: said, us: mean(key), least: Math.min(...values(key)), most: Math.max(...values(key)) };
  });
  const of = one ? `step ${one["step"]}` : !stepwise ? "the trace" : all.length > 1 ? "a step" : "the step";
  return { of, mean: rows.length > 1 ? `, mean of ${rows.length} steps` : "", whole: one ? `step ${one["step"]}` : stepwise ? "the step" : "the trace", us: mean("span_us"), parts: parts.filter(part => part.us > 0), steps: rows.length };
}

export function StepBar({ data, timeline }: { data: PageData; timeline: Timeline | null }): JSX.Element | null {
  const split = splitOf(data);
  if (!split) return null;
  const idle = onDevice(data) ? split.parts.filter(part => IDLE.has(part.key)).reduce((total, part) => total + part.us, 0) : 0;
  const isOpen = (part: Part): boolean => openPart.value === part.key || (openPart.value === "idle" && IDLE.has(part.key));
  const open = openPart.value === "model" ? ["model"] : split.parts.filter(isOpen).map(part => part.key);
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
        <button type="button" data-part="model" aria-expanded={openPart.value === "model"} title={`${timeName(data)} by part of the model, ${per(data)}`} onClick={() => toggle("model")}>By part of the model</button>
        {idle > 0 && split.parts.filter(part => IDLE.has(part.key)).length > 1 && (
          <button type="button" data-part="idle" aria-expanded={openPart.value === "idle"} title="All in which the device has nothing to do" onClick={() => toggle("idle")}>
            Device idle <b>{us(idle)}</b> {share(idle / split.us)}
          </button>
        )}
      </div>
      {open.length > 0 && <MadeOf data={data} parts={open} timeline={timeline} />}
      {step.value !== null && <p><button type="button" class="small" onClick={() => { step.value = null; }}>All steps instead of step {step.value}</button></p>}
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
    <div class="wide" role="region" aria-label="The parts as a table" tabIndex={0}><table class="plain">
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
