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

const columns = new WeakMap<PageData, (list: string, key: string) => readonly unknown[]>();

/** One column of a list, which takes no time for the others. */
export const columnOf = (data: PageData, list: string, key: string): readonly unknown[] => columns.get(data)?.(list, key) ?? [];

function decodeLists(holder: PageData, texts: string[]): void {
  const tables = new Map<string, Columns>();
  for (const [name, table] of Object.entries(holder)) {
    if (!table || typeof table !== "object" || !("columns" in table) || !("count" in table)) continue;
    tables.set(name, table);
    let rows: Row[] | null = null;
    Object.defineProperty(holder, name, { enumerable: true, get: () => (rows ??= decodedRows(table as Columns, texts)) });
  }
  columns.set(holder, (list, key) => {
    const table = tables.get(list);
    return table && key in table.columns ? decoded(table.columns[key]!, table.count, texts) : [];
  });
}

function decodedRows(table: Columns, texts: string[]): Row[] {
  const names = Object.keys(table.columns);
  const values = names.map(name => decoded(table.columns[name]!, table.count, texts));
  const like = Object.fromEntries(names.map(name => [name, null])) as Row;
  return Array.from({ length: table.count }, (_, i) => {
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
