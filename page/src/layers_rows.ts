/**
 * The rows of the layer table, as Python has summed them: a layer with its phases side by side, like siblings as one
 * group, what is outside all layers, and what has none. Times are microseconds per step, of all steps where these are
 * not alike.
 */
import type { PageData, Row } from "./page_data";

export interface Group {
  label: string;
  full: string;
  parent: string | null;
  layers: string[];
  outliers: { layer: string; what: string; excess: number }[];
  row: LayerRow | null; // that sums it up
  members: LayerRow[];
}

export interface LayerRow extends Row {
  id: string;
  label: string;
  parent: string | null; // in the table: a layer or a group
  above: string | null; // the layer that holds it
  layer: string; // "" of rows that are none
  class_name: string;
  kind: string;
  flags: string[];
  row: string; // of what is no layer: "outside", "unattributed", "total"
  time: number | null;
  flops: number | null;
  known_flops: number | null;
  retained: number | null;
  lost_launches: number | null;
  group: Group | undefined;
}

export interface LayerRows {
  rows: LayerRow[];
  layers: ReadonlyMap<string, LayerRow>;
  groups: Group[];
  total: LayerRow;
  sum_ns: number; // of the outermost rows
}

/** `own`: of each layer alone, without those inside it. */
export function layerRows(data: PageData, own: boolean): LayerRows {
  const view = data["views"].layers;
  if (view.failed) throw new Error(view.failed);
  const rows = ((own ? view.self : view.total) as Row[]).map(row => ({ ...row, group: undefined }) as unknown as LayerRow);
  const layers = new Map(rows.filter(row => row.layer).map(row => [row.layer, row]));
  const groups: Group[] = own ? [] : view.groups.map((group: Group) => ({ ...group, row: null, members: group.layers.flatMap(layer => layers.get(layer) ?? []) }));
  for (const row of rows) {
    const group = groups[row["fold"] as number];
    if (!group) continue;
    row.group = group;
    group.row = row;
  }
  return { rows, layers, groups, total: view.whole, sum_ns: view.sum_ns[own ? "self" : "total"] };
}
