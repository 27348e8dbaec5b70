/** What the parts of the page of many ranks share: colours, columns, and which rank is chosen. */
import { signal } from "@preact/signals";
import type { JSX } from "preact";
import { isKnown } from "../format";
import type { PageData, Row } from "../page_data";
import type { Column } from "../table";
import { drawnDark } from "../theme";

export const rankChosen = signal<number | null>(null); // clicked in a table, a map or the timeline; marked in all, and nothing scrolls there

const DARK: Readonly<Record<string, string>> = { gc: "#FFFFFF", waiting: "#3B424C", culprit: "#FF6B6B" }; // these would not be seen, or be all that is

export const kindColor = (data: PageData, kind: string): string => (drawnDark.value ? DARK[kind] : undefined) ?? data["page"].colors.kind[kind] ?? "#999999";
export const culprit = (data: PageData): string => kindColor(data, "culprit");
export const isNamed = (data: PageData, rank: number): boolean => (data["named"] as number[]).includes(rank);

export function choose(rank: number | null): void {
  rankChosen.value = rank === rankChosen.value ? null : rank;
}

/** A rank; those that the verdict names are marked. */
export function Rank({ data, rank }: { data: PageData; rank: number }): JSX.Element {
  if (!isNamed(data, rank)) return <>{rank}</>;
  return <span title="named by the verdict">▸ <strong style={{ color: culprit(data) }}>{rank}</strong></span>;
}

export const rankColumn = (data: PageData, key: string, title: string, more: Partial<Column<Row>> = {}): Column<Row> => ({
  key, title, kind: "count", ...more, cell: row => (isKnown(row[key]) ? <Rank data={data} rank={row[key] as number} /> : undefined),
});

/** Milliseconds of a job's numbers, which tables write with the unit that fits. */
export const msColumn = (key: string, title: string, { of, ...more }: Partial<Column<Row>> & { of?: (row: Row) => number | null } = {}): Column<Row> => ({
  key, title, kind: "us", ...more,
  value: row => {
    const value = of ? of(row) : (row[key] as number | null | undefined);
    return isKnown(value) ? value * 1000 : value;
  },
});

/** What people read of a kind. */
export const kindName = (data: PageData, kind: string): string => {
  if (kind === "layer") return data["job"].layer ?? "layer";
  if (kind === "communication" && !data["timeline"].waiting_known) return "communication, with waiting";
  return { waiting: "waiting for others", gc: "garbage collection" }[kind] ?? kind;
};
