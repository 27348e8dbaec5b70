/** Findings as rows: what is so, what it gains at most, and where it is to be seen; evidence and fix unfold. */
import type { ComponentChildren, JSX } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { mean, stepTimes } from "../basis";
import { bytes, capital, cut, full, isKnown, share, us } from "../format";
import type { PageData, Row } from "../page_data";
import { CopyButton, Go, Section } from "../parts";
import { selection } from "../state";
import { findingName, findingsOf, type GapOf, layersOf, type Target, targetsOf } from "../targets";
import { printing } from "../theme";
import { openPart, theNames } from "../whole";
import { withRun } from "./verdict";

export function Findings({ data, gaps }: { data: PageData; gaps: readonly GapOf[] | null }): JSX.Element {
  const findings = findingsOf(data);
  if (!findings.length) return <Section title="What could be better"><p class="note">No rule of advice found anything that stands out in this run.</p></Section>;
  return (
    <Section title={`What could be better (${findings.length})`} help="Gains are upper bounds, estimated from this run's own numbers; they overlap, and do not add up.">
      <div class="row head quiet" aria-hidden="true"><span>Finding</span><span>Gains at most</span><span>Confidence</span></div>
      <ul class="findings" aria-label="Findings">
        {findings.map(finding => <Finding key={findingName(data, finding)} data={data} finding={finding} gaps={gaps} />)}
      </ul>
      <p class="note">Each gains at most so much, estimated from this run's own numbers; they overlap, and do not add up.</p>
    </Section>
  );
}

function Finding({ data, finding, gaps }: { data: PageData; finding: Row; gaps: readonly GapOf[] | null }): JSX.Element {
  const name = findingName(data, finding);
  const chosen = selection.value?.kind === "finding" && selection.value.name === name;
  const [open, setOpen] = useState(chosen);
  const item = useRef<HTMLLIElement>(null);
  useEffect(() => {
    if (!chosen) return;
    setOpen(true);
    item.current?.scrollIntoView({ block: "nearest" });
  }, [chosen]);
  const targets = targetsOf(data, finding, gaps);
  const shown = open || printing.value;
  return (
    <li ref={item} data-id={String(finding["id"])} class={`card${chosen ? " selected" : ""}`}>
      <div class="row">
        <button type="button" class="title" aria-expanded={shown} onClick={() => setOpen(!open)}>{capital(cut(finding["title"], 400))}</button>
        <Gain data={data} finding={finding} />
        <span class="quiet" title="Confidence">{String(finding["confidence"])}<span class="unseen"> confidence</span></span>
        {targets[0] && <To class="show small" target={targets[0]}>Show the {targets[0].kind === "memory" ? "peak" : targets[0].kind}</To>}
      </div>
      {shown && <FindingMore data={data} finding={finding} targets={targets} />}
    </li>
  );
}

/** A link to what a finding is about. */
export function To({ target, children, class: className }: { target: Target; children: ComponentChildren; class?: string }): JSX.Element {
  const open = (): void => {
    if (target.part) openPart.value = target.part;
    const shows = target.select?.kind === "gap" ? "view-timeline" : target.part && !target.select ? "where" : null;
    if (shows) requestAnimationFrame(() => document.getElementById(shows)?.scrollIntoView({ block: "start" }));
  };
  return <Go class={className} to={target.to} select={target.select} title={full(`${target.kind}: ${target.name}`)} onGo={open}>{children}</Go>;
}

/** Evidence, the other things that it is about, the fix and where to change it. */
export function FindingMore({ data, finding, targets }: { data: PageData; finding: Row; targets: readonly Target[] }): JSX.Element {
  const fix = withRun(data, finding["fix"] as string);
  const layers = layersOf(data, finding);
  const source = finding["source"] as string | null;
  return (
    <div class="more">
      <ul>{((finding["evidence"] as string[]) ?? []).map(line => <li key={line}>{cut(withRun(data, line), 400)}</li>)}</ul>
      {(targets.length > 0 || isKnown(finding["phase"])) && (
        <p class="quiet">
          {targets.map((target, i) => <span key={i}>{i ? " · " : "In: "}<To target={target}>{target.kind} {target.kind === "kernel" ? theNames(data)(target.name, 80) : cut(target.name, 80)}</To></span>)}
          {isKnown(finding["phase"]) && <span>{targets.length ? " · " : "In "}phase {String(finding["phase"])}</span>}
        </p>
      )}
      {layers.length > 1 && (
        <details><summary>All {layers.length} layers</summary><p>{layers.slice(0, 200).map(layer => <span key={layer}><Go to="layers" select={{ kind: "layer", name: layer }}>{cut(layer, 120)}</Go> </span>)}</p></details>
      )}
      <div class="fix"><span class="how"><b>Fix:</b> {cut(fix, 600)}</span><CopyButton text={fix} /></div>
      {source && <p class="where"><code title={full(source)}>{cut(source, 160)}</code> <CopyButton text={source} /></p>}
      {isKnown(finding["next"]) && <p class="where quiet">Its rows in a terminal: <code>{cut(finding["next"], 240)}</code></p>}
    </div>
  );
}

/** A gain with what it is a part of: each share follows from the two numbers that stand beside it. */
export function Gain({ data, finding }: { data: PageData; finding: Row }): JSX.Element {
  const time = finding["saves_at_most_us"] as number | null;
  const size = finding["saves_at_most_bytes"] as number | null;
  const parts: string[] = [];
  if (isKnown(time)) parts.push(`${us(time)} a step`, ofStep(data, time));
  if (isKnown(size)) parts.push(`${bytes(size)} at the peak`, ofPeak(data, finding, size));
  const words = parts.filter(Boolean);
  const isPart = finding["id"] === "slow-optimizer"; // the bound is all of the optimizer: something of it stays
  const before = isPart ? "a part of " : "";
  return (
    <span class="gain">
      <b>{words.length ? `${before}${words[0]}` : "gain not known"}</b>
      <span class="quiet"> {words.slice(1).join(" · ")}</span>
    </span>
  );
}

function ofStep(data: PageData, saves: number): string {
  const { times } = stepTimes(data);
  const whole = times.length ? mean(times) : data["time"].span_us;
  return whole ? `${share(saves / whole)} of ${times.length ? "a step" : "the trace"}` : "";
}

/** Fragmentation is a part of what the allocator reserves, all else of what is allocated. */
function ofPeak(data: PageData, finding: Row, saves: number): string {
  const peak = data["memory"]?.peak ?? {};
  const reserved = finding["id"] === "fragmentation" && peak.reserved_bytes;
  const whole = reserved || peak.allocated_bytes;
  return whole ? `${share(saves / whole)} of the ${bytes(whole)} ${reserved ? "reserved" : "allocated"}` : "";
}
