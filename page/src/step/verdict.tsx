/** The verdict: one line with its share, which is a link to what it is a share of, and the first fix. */
import type { JSX } from "preact";
import { onDevice, rowsOf } from "../basis";
import { capital, cut, full } from "../format";
import type { PageData } from "../page_data";
import { CopyButton } from "../parts";
import { findingsOf, type GapOf, longestGap, matching, ofIdle, type Target, targetsOf } from "../targets";
import { To } from "./findings";

const IDLE = /^The device is idle/;
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

/** A text with the directory of the run: that in which the page lies, unless it is shared, without a trace. */
export function withRun(data: PageData, text: string | null | undefined): string {
  const here = /^file:\/\/(.*?)(\/rank\d[^/]*)?(\/steps_[^/]*)?\/[^/]*$/.exec(location.href.split("#")[0] ?? "");
  return text && here && data["run"].trace ? text.replaceAll("RUN_DIRECTORY", decodeURIComponent(here[1]!)) : (text ?? "");
}

/** What the headline's share is a share of; null: nothing that the page shows. */
export function verdictTarget(data: PageData, headline: string, gaps: readonly GapOf[] | null): Target | null {
  if (IDLE.test(headline)) return { ...ofIdle(data), ...longestGap(gaps, /./) };
  const [layer] = matching(data, data["summary"].headline?.layers ?? []);
  if (layer) return { to: "step", part: "kernel", select: { kind: "layer", name: layer }, kind: "layer", name: layer };
  const kernel = (of: string): string | undefined => rowsOf(data, "kernels").find(row => row["class"] === of)?.["name"] as string | undefined;
  const [name, part] = /\bcommunication\b/i.test(headline) ? [kernel("communication"), "communication"] : /matrix products/i.test(headline) ? [kernel("gemm"), "kernel"] : [];
  if (name && part) return { to: "step", part, select: { kind: "kernel", name }, kind: "kernel", name };
  const about = findingsOf(data).find(one => headline.toLowerCase().includes(String(one["title"]).slice(0, 30).toLowerCase()));
  return (about && targetsOf(data, about, gaps)[0]) ?? (data["overview"]?.steps.length ? { to: "step", part: onDevice(data) ? "kernel" : "cpu", kind: "part of the step", name: "what works" } : null);
}

export function Headline({ data, gaps }: { data: PageData; gaps: readonly GapOf[] | null }): JSX.Element | null {
  const verdict = verdictOf(data);
  if (!verdict) return <p class="big">This result holds no verdict: it was written without advice.</p>;
  const found = verdictTarget(data, verdict.headline, gaps);
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
