/** How certain a change is: what was decided, in words and a colour. */
import type { JSX } from "preact";
import { isNumber, UNKNOWN } from "../format";
import type { PageData, Row } from "../page_data";
import { Marked } from "../parts";
import type { Column } from "../table";

export type Certainty = "slower" | "faster" | "other" | "not certain" | "no difference";

export const CERTAINTIES: Readonly<Record<Certainty, { color: string; words: string }>> = {
  slower: { color: "var(--outlier)", words: "slower, beyond noise" },
  faster: { color: "var(--good)", words: "faster, beyond noise" },
  other: { color: "var(--accent)", words: "only on one side" },
  "not certain": { color: "var(--warn)", words: "not certain: it may be noise" },
  "no difference": { color: "var(--faint)", words: "no difference, or not judged" },
};

const LEAST_COMMON = 0.001; // a smaller change of all layers is written as none

/** Said of what is no difference where decisions leave out a change that all layers have in common: `as all layers, +7.8 %`. */
export function asAll(data: PageData): string | null {
  const common = data["comparison"].common as number | null;
  return common !== null && Math.abs(common) >= LEAST_COMMON ? `as all layers, ${signed(common)}` : null;
}

export const certaintyWords = (data: PageData, certainty: Certainty): string => (certainty === "no difference" && asAll(data)) || CERTAINTIES[certainty].words;

export function certaintyOf(decision: string): Certainty {
  if (decision.startsWith("only in")) return "other";
  return decision === "slower" || decision === "faster" || decision === "not certain" ? decision : "no difference";
}

/** Of like layers: what was decided of any of them. */
export function ofFolded(row: Row): Certainty {
  if (typeof row["decision"] === "string") return certaintyOf(row["decision"]);
  if (row["a_us"] === null || row["b_us"] === null) return "other";
  const [slower, faster] = [row["slower"] as string[], row["faster"] as string[]];
  if (slower.length && faster.length) return (row["difference_us"] as number) > 0 ? "slower" : "faster";
  return slower.length ? "slower" : faster.length ? "faster" : "no difference";
}

export function Decision({ words, of }: { words: string; of: string }): JSX.Element {
  return <Marked color={CERTAINTIES[certaintyOf(of)].color}>{words}</Marked>;
}

/** `+7.8 %`; nothing where it does not apply, a dash where it is not known. */
export const signed = (value: unknown): string | undefined =>
  isNumber(value) ? `${value >= 0 ? "+" : "−"}${(100 * Math.abs(value)).toFixed(1)} %` : value === null ? undefined : UNKNOWN;

export const CHANGE: Column<Row> = { key: "change", title: "Change", kind: "text", value: row => signed(row["change"]), help: "of b against a; times are means of the steps" };
const ERROR: Column<Row> = { key: "error", title: "±", kind: "text", value: row => (isNumber(row["error"]) ? `${(100 * row["error"]).toFixed(1)} %` : undefined), help: "standard error of the change" };
/** The standard error, where it is known of any row. */
export const errorColumn = (rows: readonly Row[]): Column<Row>[] => (rows.some(row => isNumber(row["error"])) ? [ERROR] : []);
/** The rule that decided, beside the number. */
export const RULE: Column<Row> = { key: "reason", title: "Because", kind: "text", longest: 100, value: row => row["reason"] || undefined, help: "the rule by which it was decided" };

/** Both sides as two thin bars, on one scale for the whole table. */
export function sidesColumn(most: number, a: (row: Row) => number, b: (row: Row) => number): Column<Row> {
  const bar = (value: number, side: string) => <i class={side} style={{ width: `${most ? (100 * value) / most : 0}%` }} />;
  return { key: "sides", title: "a above b", kind: "text", spare: 1, help: "time on both sides, on one scale", value: () => undefined, cell: row => <span class="sides" aria-hidden="true">{bar(a(row), "a")}{bar(b(row), "b")}</span> };
}
