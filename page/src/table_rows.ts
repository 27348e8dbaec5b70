/** Which rows of a table are seen, and in what order: nothing is drawn here. */
import type { Row } from "./page_data";
import type { Sort } from "./state";

export type Kind = "text" | "layer" | "us" | "bytes" | "flops" | "flop_rate" | "bandwidth" | "share" | "count" | "number";

/** What a column needs to be ordered and searched. */
export interface Values<R> {
  key: string;
  kind: Kind;
  value?: (row: R) => unknown; // default: row[key]; null: not known, undefined: does not apply
}

export interface Shown<R> {
  row: R;
  id: string;
  depth: number;
  isMatch: boolean; // else it stands here for those below it
  open: boolean | null; // null: nothing is below it
}

const LONGEST_SEARCHED = 100_000;
const DEEPEST = 200;

export const isNumeric = (column: { kind: Kind }): boolean => column.kind !== "text" && column.kind !== "layer";
export const isKnown = (value: unknown): boolean => value !== null && value !== undefined && value !== "";

export function valueOf<R>(column: Values<R>, row: R): unknown {
  return column.value ? column.value(row) : (row as Record<string, unknown>)[column.key];
}

/** Rows for a table that unfolds: one of each group, and its members below where it has several. */
export function unfolding(groups: ReadonlyMap<string, Row[]>, whole: (group: Row[]) => Row): Row[] {
  return [...groups].flatMap(([id, group]) => {
    const all: Row = { ...whole(group), id, parent: null };
    return group.length < 2 ? [all] : [all, ...group.map((row, i): Row => ({ ...row, id: `${id}\0${i}`, parent: id }))];
  });
}

/** How a table reads them. */
export const UNFOLDING = { id: (row: Row): string => row["id"] as string, tree: { parent: (row: Row): string | null => row["parent"] as string | null } };

/** Rows with those below them: what does not change with sorting, searching and unfolding. */
export class Forest<R> {
  readonly byId = new Map<string, R>();
  private readonly ids = new Map<R, string>();
  private readonly below = new Map<string | null, R[]>([[null, []]]);
  private readonly texts = new Map<R, string>();

  constructor(
    readonly rows: readonly R[],
    private readonly columns: readonly Values<R>[],
    idOf: ((row: R) => string) | undefined,
    private readonly parentId: ((row: R) => string | null) | undefined,
  ) {
    rows.forEach((row, i) => this.ids.set(row, idOf ? idOf(row) : String(i)));
    for (const [row, id] of this.ids) this.byId.set(id, row);
    for (const row of rows) {
      const parent = this.parentOf(row);
      const above = parent === undefined ? null : this.id(parent);
      const siblings = this.below.get(above);
      if (siblings) siblings.push(row);
      else this.below.set(above, [row]);
    }
  }

  id(row: R): string {
    return this.ids.get(row) ?? "";
  }

  parentOf(row: R): R | undefined {
    const id = this.parentId?.(row);
    return id == null || id === this.id(row) ? undefined : this.byId.get(id);
  }

  children(id: string | null): readonly R[] {
    return this.below.get(id) ?? [];
  }

  /** Rows that have all words of the query, and all above them; null without a query. */
  matches(query: string): { found: Set<R>; above: Set<R> } | null {
    const words = query.trim().toLowerCase().split(/\s+/).filter(Boolean);
    if (!words.length) return null;
    const found = new Set<R>();
    const above = new Set<R>();
    for (const row of this.rows) {
      const text = this.text(row);
      if (!words.every(word => text.includes(word))) continue;
      found.add(row);
      for (let up = this.parentOf(row); up && !above.has(up); up = this.parentOf(up)) above.add(up);
    }
    return { found, above };
  }

  private text(row: R): string {
    let text = this.texts.get(row);
    if (text === undefined) {
      const parts = this.columns.filter(column => !isNumeric(column)).map(column => valueOf(column, row));
      text = parts.flat().filter(isKnown).join(" ").slice(0, LONGEST_SEARCHED).toLowerCase();
      this.texts.set(row, text);
    }
    return text;
  }

  sorted(rows: readonly R[], sort: Sort | null): readonly R[] {
    const column = sort && this.columns.find(one => one.key === sort.key);
    if (!column) return rows;
    const sign = sort.descending ? -1 : 1;
    const keyed = rows.map((row, i) => [sortable(valueOf(column, row)), i, row] as const);
    keyed.sort(([a, i], [b, j]) => {
      if (a === null || b === null) return a === b ? i - j : a === null ? 1 : -1; // what is not known comes last
      return (a < b ? -sign : a > b ? sign : 0) || i - j;
    });
    return keyed.map(entry => entry[2]);
  }

  /** The rows that are seen, in order. */
  shown(sort: Sort | null, query: string, toggled: ReadonlyMap<string, boolean>, isOpen?: (row: R) => boolean): Shown<R>[] {
    const matched = this.matches(query);
    const shown: Shown<R>[] = [];
    const walk = (above: string | null, depth: number, isBelowMatch: boolean): void => {
      for (const row of this.sorted(this.children(above), sort)) {
        const isMatch = !matched || matched.found.has(row);
        if (!isMatch && !isBelowMatch && !matched.above.has(row)) continue;
        const id = this.id(row);
        const has = this.children(id).length > 0 && depth < DEEPEST;
        const open = has ? (toggled.get(id) ?? (matched ? matched.above.has(row) : (isOpen?.(row) ?? false))) : null;
        shown.push({ row, id, depth, isMatch, open });
        if (open) walk(id, depth + 1, isBelowMatch || (matched !== null && isMatch));
      }
    };
    walk(null, 0, false);
    return shown;
  }
}

function sortable(value: unknown): string | number | null {
  if (!isKnown(value)) return null;
  if (Array.isArray(value)) return value.length ? String(value[0]).toLowerCase() : null;
  if (typeof value === "number") return Number.isNaN(value) ? null : value;
  return String(value).toLowerCase();
}
