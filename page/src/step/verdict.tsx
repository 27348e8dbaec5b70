/** The verdict: one line with its share, which is a link to what it is a share of, and the first fix. */
import type { JSX } from "preact";
import { rowsOf } from "../basis";
import { capital, cut, full } from "../format";
import type { PageData } from "../page_data";
import { CopyButton } from "../parts";
import { type GapOf, largest, longestGap, matching, ofIdle, type Target } from "../targets";
import { To } from "./findings";

const SHARE = /(?:over |at least |at most )?\d[\d.,]* %/;

export interface Verdict {
  headline: string;
  more: string; // what else it says
  fix: string;
}

/** The headline, what else the verdict says, and the fix. Results of older versions have no headline: their first sentence. */
export function verdictOf(data: PageData): Verdict | null {
  const text = withRun(data, data["summary"]?.verdict);
  if (!text) return null;
  const [said = "", fix = ""] = text.split(/First fix: (.*)/s);
  const headline = withoutEnd(data["summary"].headline?.text ?? /^.*?[.;](?=\s|$)/s.exec(said)?.[0] ?? said);
  const more = said.startsWith(headline) ? said.slice(headline.length).replace(/^[.;]\s*/, "") : said;
  return { headline, more: capital(more.trim()), fix: withoutEnd(fix) };
}

const withoutEnd = (text: string): string => text.trim().replace(/[.;]$/, "");

/** A text with the directory of the run: that in which the page lies, if its trace lies below. */
export function withRun(data: PageData, text: string | null | undefined): string {
  const here = /^file:\/\/(.*?)(\/rank\d[^/]*)?(\/steps_[^/]*)?\/[^/]*$/.exec(location.href.split("#")[0] ?? "");
  return text && here && /^(rank|steps_)\d/.test(data["page"].trace_href ?? "") ? text.replaceAll("RUN_DIRECTORY", decodeURIComponent(here[1]!)) : (text ?? "");
}

/** What the headline's share is a share of; null: nothing that the page shows. */
export function verdictTarget(data: PageData, gaps: readonly GapOf[] | null): Target | null {
  const { about = "none", layers = [] } = data["summary"]?.headline ?? {};
  if (about === "none") return null;
  if (about === "idle") return { ...ofIdle(data), ...longestGap(gaps, /./) };
  const parts = { to: "step", part: "model" } as const;
  const [layer] = matching(data, layers);
  if (layer) return { ...parts, select: { kind: "layer", name: layer }, kind: "layer", name: layer };
  const name = about === "communication" ? largest(rowsOf(data, "kernels").filter(row => row["class"] === about), "name", "time_us") : null;
  return name === null ? { ...parts, kind: "parts", name: "of the model" } : { ...parts, select: { kind: "kernel", name }, kind: "kernel", name };
}

export function Headline({ data, gaps }: { data: PageData; gaps: readonly GapOf[] | null }): JSX.Element | null {
  const verdict = verdictOf(data);
  if (!verdict) return <p class="big">This result holds no verdict: it was written without advice.</p>;
  const found = verdictTarget(data, gaps);
  return (
    <div class="verdict-box">
      <p class="big">{found ? <WithLink text={verdict.headline} target={found} /> : cut(verdict.headline, 300)}</p>
      {verdict.more && <p class="quiet">{cut(verdict.more, 500)}</p>}
      {verdict.fix && <div class="fix"><span class="how" title={full(verdict.fix)}><b>First fix:</b> {cut(verdict.fix, 600)}</span><CopyButton text={verdict.fix} /></div>}
    </div>
  );
}

/** The headline with its share as a link; where it has none, all of it. */
function WithLink({ text, target }: { text: string; target: Target }): JSX.Element {
  const share = SHARE.exec(text)?.[0] ?? text;
  const at = text.indexOf(share);
  return <>{cut(text.slice(0, at), 200)}<To target={target}>{cut(share, 200)}</To>{cut(text.slice(at + share.length), 200)}</>;
}
