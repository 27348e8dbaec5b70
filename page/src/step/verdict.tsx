/** The verdict: one line with its share, which is a link to what it is a share of, and the first fix. */
import type { JSX } from "preact";
import { rowsOf } from "../basis";
import { cut, full } from "../format";
import type { PageData, Row } from "../page_data";
import { CopyButton, Go } from "../parts";
import { findingsOf, type GapOf, longestGap, type Target, targetsOf } from "../targets";
import { openPart } from "./step_bar";

const MOST_WORDS = 15;
const SHARE = /(?:over |at least |at most )?\d[\d.,]* %/;

export interface Verdict {
  headline: string;
  more: string; // what else it says
  fix: string;
}

/** The first sentence that says something in at most 15 words, the others, and the fix. */
export function verdictOf(data: PageData): Verdict | null {
  const text = withRun(data, data["summary"]?.verdict);
  if (!text) return null;
  const [said = "", fix = ""] = text.split(/First fix: (.*)/s);
  const sentences = said.trim().split(/(?<=[.;])\s+(?=\S)/).map(one => one.replace(/[.;]$/, ""));
  const chosen = sentences.find(one => SHARE.test(one)) ?? sentences[0] ?? "";
  const headline = shortened(chosen);
  const others = sentences.filter(one => one !== chosen);
  const rest = chosen.slice(headline.length).replace(/^\W+/, "");
  return { headline, more: [rest, ...others].filter(Boolean).map(sentence).join(" "), fix: fix.trim().replace(/\.$/, "") };
}

const sentence = (text: string): string => `${text[0]!.toUpperCase()}${text.slice(1)}.`;

function shortened(text: string): string {
  const clauses = text.split(/, (?=which|with|mostly)|: | \(/);
  const first = text.split(" ").length <= MOST_WORDS ? text : (clauses[0] ?? text);
  return first.split(" ").length <= MOST_WORDS ? first : `${first.split(" ").slice(0, MOST_WORDS).join(" ")} …`;
}

/** A text with the directory of the run: that in which the page lies, unless it is shared, without a trace. */
export function withRun(data: PageData, text: string | null | undefined): string {
  const here = /^file:\/\/(.*?)(\/rank\d[^/]*)?(\/steps_[^/]*)?\/[^/]*$/.exec(location.href.split("#")[0] ?? "");
  return text && here && data["run"].trace ? text.replaceAll("RUN_DIRECTORY", decodeURIComponent(here[1]!)) : (text ?? "");
}

/** Part of the model that takes so much of the time, as `views.shares` has them: it is a row below the step's bar. */
const shares = (data: PageData): Row[] => data["views"]?.shares ?? [];

/** What the headline's share is a share of. */
export function verdictTarget(data: PageData, headline: string, gaps: readonly GapOf[] | null): { target: Target; part: string } | null {
  if (/\bidle\b/.test(headline)) {
    const target = longestGap(gaps, /./);
    return target && { target, part: "idle" };
  }
  const share = shares(data).find(row => headline.startsWith(String(row["name"])));
  const layer = (share?.["layers"] as string[] | undefined)?.[0];
  if (layer && rowsOf(data, "layers").some(row => row["layer"] === layer)) return { target: { to: "step", select: { kind: "layer", name: layer }, kind: "layer", name: layer }, part: "kernel" };
  const about = findingsOf(data).find(one => headline.includes(String(one["title"]).slice(0, 40)));
  const target = about && targetsOf(data, about, gaps)[0];
  if (target) return { target, part: "" };
  const communication = /^communication/i.test(headline) ? rowsOf(data, "kernels").find(row => row["class"] === "communication") : undefined;
  return communication ? { target: { to: "step", select: { kind: "kernel", name: String(communication["name"]) }, kind: "kernel", name: String(communication["name"]) }, part: "communication" } : null;
}

export function Headline({ data, gaps }: { data: PageData; gaps: readonly GapOf[] | null }): JSX.Element | null {
  const verdict = verdictOf(data);
  if (!verdict) return <p class="big">This result holds no verdict: it was written without advice.</p>;
  const found = verdictTarget(data, verdict.headline, gaps);
  return (
    <div class="verdict-box">
      <p class="big">{found ? <WithLink text={verdict.headline} target={found.target} part={found.part} /> : cut(verdict.headline, 300)}</p>
      {verdict.more && <p class="quiet">{cut(verdict.more, 500)}</p>}
      {verdict.fix && <div class="fix"><span class="how" title={full(verdict.fix)}><b>First fix:</b> {cut(verdict.fix, 600)}</span><CopyButton text={verdict.fix} /></div>}
    </div>
  );
}

/** The headline with its share as a link; where it has none, all of it. */
function WithLink({ text, target, part }: { text: string; target: Target; part: string }): JSX.Element {
  const share = SHARE.exec(text)?.[0] ?? text;
  const at = text.indexOf(share);
  return (
    <>
      {cut(text.slice(0, at), 200)}
      <Go to={target.to} title={`Show it: ${full(target.name)}`} onGo={() => { if (part) openPart.value = part; }} {...(target.select ? { select: target.select } : {})}>{cut(share, 200)}</Go>
      {cut(text.slice(at + share.length), 200)}
    </>
  );
}
