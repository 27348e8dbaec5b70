/** The panels of a step and of a finding. */
import type { JSX } from "preact";
import { mean, onDevice, rowsOf, stepTimes, timeName } from "../basis";
import { colorOf } from "../colors";
import { bytes, capital, cut, full, isKnown, share, us } from "../format";
import type { PageData, Row } from "../page_data";
import { Marked } from "../parts";
import { FindingMore, Gain } from "../step/findings";
import { findingNamed, targetsOf } from "../targets";
import type { Timeline } from "../timeline/data";
import { theGaps } from "../whole";
import { Entries, Facts, known, NotThere, ofNames, sumsBy } from "./facts";

export function OfStep({ data, number, timeline }: { data: PageData; number: number; timeline: Timeline | null }): JSX.Element {
  const row = rowsOf(data, "steps").find(one => one["step"] === number);
  if (!row) return <NotThere what={`Step ${number}`} />;
  const took = stepTimes(data);
  const wall = took.of.get(number) ?? known(row, "span_us");
  const middle = took.times.length ? mean(took.times) : null;
  const at = timeline?.head.steps.findIndex(one => one.number === number) ?? -1;
  const phases = Object.entries((row["phases_us"] as Record<string, number>) ?? {}).filter(([, time]) => time > 0);
  const drawn = timeline?.head.steps[at]?.drawn;
  const total = known(row, "time_us");
  return (
    <>
      <h2>Step {number}</h2>
      <Facts of={[
        [took.label, wall !== null && wall !== undefined && `${us(wall)}${middle && took.times.length > 1 ? `, ${share(wall / middle)} of the mean` : ""}`],
        [timeName(data), total !== null && us(total)],
        ["Attention", (row["attention_us"] as number) > 0 && us(row["attention_us"] as number)],
        ["Peak memory", isKnown(row["peak_bytes"]) && bytes(row["peak_bytes"] as number)],
        ["In the timeline", timeline && !drawn && "no: the trace file has it"],
      ]} />
      <section><h3>{timeName(data)} by phase</h3><ul class="rows">{phases.map(([phase, time]) => <li key={phase}><span class="value">{us(time)}</span><Marked color={colorOf(data, "phase", phase)}>{phase}</Marked></li>)}</ul></section>
      <Split data={data} number={number} />
      {at >= 0 && <Entries title={`${onDevice(data) ? "Kernels" : "Ops"} in it`} entries={ofNames(data, sumsBy(timeline, one => one.step === at, "name"), total === null ? null : total * 1000, 1)} />}
    </>
  );
}

function Split({ data, number }: { data: PageData; number: number }): JSX.Element | null {
  const split = ((data["overview"]?.steps ?? []) as Row[]).find(row => row["step"] === number);
  if (!split) return null;
  const parts = [["kernel", "kernels"], ["communication", "exposed communication"], ["memcpy", "copies"], ["memset", "sets"], ["runtime", "CPU in runtime calls"], ["dataloader", "waiting for data"], ["cpu", "CPU in ops"], ["other", "Python between ops"]] as const;
  return <section><h3>Wall time</h3><ul class="rows">{parts.filter(([key]) => (split[`${key}_us`] as number) > 0).map(([key, name]) => <li key={key}><span class="value">{us(split[`${key}_us`] as number)}</span><Marked color={colorOf(data, "split", key)}>{name}</Marked></li>)}</ul></section>;
}

export function OfFinding({ data, name }: { data: PageData; name: string }): JSX.Element {
  const finding = findingNamed(data, name);
  if (!finding) return <NotThere what={`The finding ${full(name)}`} />;
  return <><h2>{capital(cut(finding["title"], 300))}</h2><p><Gain data={data} finding={finding} /></p><FindingMore data={data} finding={finding} targets={targetsOf(data, finding, theGaps())} /></>;
}
