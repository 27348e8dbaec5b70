/** The data of the page: what result.json holds, and what its places need beside it. */

/** Rows of a list in columns, as `columns_of` of page.py writes them. */
interface Columns {
  count: number;
  columns: Record<string, { all?: unknown; text?: (number | null)[]; texts?: number[][]; values?: unknown[] }>;
}

export type Row = Record<string, unknown>;

/** Everything that the page knows. Lists are rows again when first asked for, so that one that is damaged fails alone. */
export type PageData = Record<string, any>;

export function readData(text: string): PageData {
  const data = JSON.parse(text) as PageData;
  const texts = data["texts"] as string[];
  for (const holder of [data, data["run"], data["views"]?.layers]) if (holder) decodeLists(holder, texts);
  return data;
}

type List = (key: string) => readonly unknown[]; // one of its columns

const lists = new WeakMap<PageData, Map<string, List>>();

/** One column of a list, which takes no time for the others. */
export const columnOf = (data: PageData, name: string, key: string): readonly unknown[] => lists.get(data)?.get(name)?.(key) ?? [];

function decodeLists(holder: PageData, texts: string[]): void {
  const found = new Map<string, List>();
  for (const [name, table] of Object.entries(holder)) {
    if (!table || typeof table !== "object" || !("columns" in table) || !("count" in table)) continue;
    const { count, columns } = table as Columns;
    const known = new Map<string, readonly unknown[]>();
    const list: List = key => known.get(key) ?? known.set(key, columns[key] ? decoded(columns[key], count, texts) : []).get(key)!;
    found.set(name, list);
    let rows: Row[] | null = null;
    Object.defineProperty(holder, name, { enumerable: true, get: () => (rows ??= rowsOf(Object.keys(columns), list, count)) });
  }
  lists.set(holder, found);
}

function rowsOf(names: readonly string[], list: List, count: number): Row[] {
  const values = names.map(list);
  const like = Object.fromEntries(names.map(name => [name, null])) as Row;
  return Array.from({ length: count }, (_, i) => {
    const row = { ...like };
    for (let column = 0; column < names.length; column++) row[names[column]!] = values[column]![i];
    return row;
  });
}

function decoded(column: Columns["columns"][string], count: number, texts: string[]): unknown[] {
  if ("all" in column) return new Array(count).fill(column.all);
  if (column.text) return column.text.map(number => (number === null ? null : texts[number]));
  if (column.texts) return column.texts.map(numbers => numbers.map(number => texts[number]));
  return column.values ?? [];
}
