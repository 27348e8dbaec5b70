/** Columns that several tables have, and rows narrowed to what is selected. */
import type { JSX } from "preact";
import { categoryName, rowsOf } from "./basis";
import { type ColorKind, colorOf } from "./colors";
import { count, cut, full } from "./format";
import type { PageData, Row } from "./page_data";
import { Go, Marked } from "./parts";
import { place, select, selection } from "./state";
import type { Column } from "./table";

/** What memory of a category is. */
export const CATEGORY_HELP: Readonly<Record<string, string>> = {
  params: "parameters and buffers",
  grads: "what .grad holds",
  os_params: "an optimizer's own copies of parameters",
  os_state: "the state of optimizers",
  activation: "what the passes through the model make and hold beyond the op that made it",
  communication: "buffers of collectives",
  workspace: "gone again when the op, or the optimizer's step, that made it ends",
  other: "all else, with what was there before profiling",
};

const first = (value: unknown): unknown => (Array.isArray(value) ? value[0] : value);

/** Layers or ops whose names select them. */
export function pickColumn(kind: "layer" | "op", key: string, title: string, more: Partial<Column<Row>> = {}): Column<Row> {
  return {
    key, title, kind: "text", longest: kind === "op" ? 40 : 48, ...more,
    value: row => (Array.isArray(row[key]) && !row[key].length ? undefined : first(row[key]) || null),
    cell: (row, letters) => {
      const name = first(row[key]);
      if (typeof name !== "string" || !name) return undefined;
      const others = Array.isArray(row[key]) ? row[key].length - 1 : 0;
      return <><Go to={place.value} select={{ kind, name }} class="name" title={full(others ? (row[key] as string[]).join(", ") : name)}>{cut(name, letters)}</Go>{others > 0 && <span class="quiet"> +{others}</span>}</>;
    },
  };
}

/** Names with their colours before them. */
export function markColumn(data: PageData, kind: ColorKind, key: string, title: string, more: Partial<Column<Row>> = {}): Column<Row> {
  return {
    key, title, kind: "text", ...more,
    value: row => (kind === "category" && typeof row[key] === "string" ? categoryName(data, row[key]) : (row[key] ?? null)),
    cell: row => {
      const name = row[key];
      if (typeof name !== "string" || !name) return undefined;
      const shown = kind === "category" ? categoryName(data, name) : name;
      return <span title={kind === "category" ? CATEGORY_HELP[name] : undefined}><Marked color={colorOf(data, kind, name)}>{cut(shown, 40)}</Marked></span>;
    },
  };
}

let parents: { of: PageData; above: Map<string, string | null> } | null = null;

/** Whether a layer is `outer`, or in it. */
export function isIn(data: PageData, layer: string, outer: string): boolean {
  if (parents?.of !== data) parents = { of: data, above: new Map(rowsOf(data, "layers").map(row => [row["layer"] as string, row["parent"] as string | null])) };
  for (let at: string | null | undefined = layer, left = 200; at && left; at = parents.above.get(at), left--) if (at === outer) return true;
  return false;
}

/** The rows of what is selected, where it is a layer or an op and any is of it, and a line that says so. */
export function ofSelection(data: PageData, rows: readonly Row[], keys: { layer?: string; op?: string }): { rows: readonly Row[]; said: JSX.Element | null } {
  const chosen = selection.value;
  const key = chosen?.kind === "layer" ? keys.layer : chosen?.kind === "op" ? keys.op : undefined;
  if (!chosen || !("name" in chosen) || !key) return { rows, said: null };
  const isOf = (row: Row) => (chosen.kind === "op" ? row[key] === chosen.name : typeof row[key] === "string" && isIn(data, row[key], chosen.name));
  const found = rows.filter(isOf);
  if (!found.length) return { rows, said: <p class="note">None of these is of {cut(chosen.name, 80)}, which is selected: all are shown.</p> };
  return {
    rows: found,
    said: <p class="note">Only of <strong class="name">{cut(chosen.name, 80)}</strong>: {count(found.length)} of {count(rows.length)}. <button type="button" class="small" onClick={() => select(null)}>Show all</button></p>,
  };
}
