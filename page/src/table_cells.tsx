/** What stands in the cells of a table, how wide its columns are, and the same as CSV. */
import type { ComponentChildren, JSX } from "preact";
import { clean, columnFormat, type ColumnFormat, cut, full, UNKNOWN } from "./format";
import { Go } from "./parts";
import { isKnown, isNumeric, type Values, valueOf } from "./table_rows";

export interface Column<R> extends Values<R> {
  title: string;
  help?: string; // what it means: tooltip of the head
  missing?: string | ((row: R) => string); // why a value that is null is not known
  cell?: (row: R, letters: number) => ComponentChildren; // draws the cell, instead of the value; undefined: the value
  like?: string; // the key of a column before it whose unit and decimals it shares
  bar?: boolean; // of a share: a bar behind the number
  longest?: number; // letters of a text that are shown at most, where there is room
  shown?: (text: string, letters: number) => string; // how a text is cut; else in the middle
  fine?: boolean; // of times: in microseconds, however long the longest is
  spare?: number; // left out where there is no room, the largest number first
}

/** A column with how it writes its numbers; of texts null. */
export interface Drawn<R> {
  column: Column<R>;
  format: ColumnFormat | null;
  width: number; // pixels
  letters: number; // that fit
}

const LONGEST_CELL = 48;
const LETTER = 7; // pixels, in the mean, at the table's size
const PADDING = 14;
const ARROW = 14; // of the sort
const LEAST_NAME = 170; // pixels of the first column that has shrunk
const FINE_US = 999;
const NARROW = 0.46; // of the room: what the first column, which stays, takes at most

let measuring: CanvasRenderingContext2D | null = null;

/** Width of a text as tables write it. */
function widthOf(text: string, bold = false): number {
  measuring ??= document.createElement("canvas").getContext("2d");
  if (!measuring) return text.length * LETTER;
  measuring.font = `${bold ? "600 " : ""}12.5px ${getComputedStyle(document.body).fontFamily}`;
  return measuring.measureText(text.slice(0, 200)).width;
}

/** Those that apply to any row; `unknown`: of which no value is known. The first stays. */
export function applying<R>(columns: readonly Column<R>[], rows: readonly R[]): { columns: Column<R>[]; unknown: Column<R>[] } {
  const [first, ...others] = columns;
  const applies = others.filter(column => !rows.length || rows.some(row => valueOf(column, row) !== undefined || column.cell?.(row, LONGEST_CELL) !== undefined));
  const isUnknown = (column: Column<R>): boolean => rows.length > 0 && rows.every(row => valueOf(column, row) == null && column.cell?.(row, LONGEST_CELL) === undefined);
  return { columns: [...(first ? [first] : []), ...applies.filter(column => !isUnknown(column))], unknown: applies.filter(isUnknown) };
}

/** Columns with formats and the width that they would like. */
export function measured<R>(columns: readonly Column<R>[], rows: readonly R[]): Drawn<R>[] {
  const drawn: Drawn<R>[] = [];
  for (const column of columns) {
    const like = drawn.find(one => one.column.key === column.like)?.format;
    const values = rows.map(row => valueOf(column, row)).filter(isKnown);
    const format = !isNumeric(column) ? null : like?.unit ? like : columnFormat(column.kind, column.fine ? values.map(value => Math.min(value as number, FINE_US)) : values);
    const most = column.longest ?? LONGEST_CELL;
    // Only the largest number is written out, which takes long.
    const longest = format ? format.text(values.reduce<number>((largest, value) => (Math.abs(value as number) > Math.abs(largest) ? (value as number) : largest), 0))
      : values.reduce<string>((text, value) => (lengthOf(value) > text.length ? textOf(value, column.kind === "layer") : text), "").slice(0, most);
    const head = widthOf(column.title + (format?.unit ? ` ${format.unit}` : ""), true) + ARROW;
    const extra = column.cell || column.kind === "layer" ? 22 : 2;
    drawn.push({ column, format, width: Math.ceil(Math.max(head, widthOf(longest) + extra) + PADDING), letters: most });
  }
  return drawn;
}

/** Those for which there is room: what can be spared goes first, then the first column shrinks. */
export function fitted<R>(drawn: readonly Drawn<R>[], room: number, indent: number): { columns: Drawn<R>[]; left: Column<R>[] } {
  const columns = drawn.map((one, i) => (i ? one : { ...one, width: one.width + indent }));
  const first = columns[0];
  if (!first) return { columns, left: [] };
  const left: Column<R>[] = [];
  const wide = Math.min(first.width, Math.max(LEAST_NAME, room * 0.3));
  const over = (name: number): number => columns.slice(1).reduce((total, one) => total + one.width, name) - room;
  for (const one of drawn.filter(other => other.column.spare).sort((a, b) => b.column.spare! - a.column.spare!)) {
    if (over(wide) <= 0) break;
    columns.splice(columns.findIndex(other => other.column === one.column), 1);
    left.push(one.column);
  }
  const most = Math.max(110, Math.min(first.width, room * (over(LEAST_NAME) > 0 ? NARROW : 1)));
  first.width = Math.floor(Math.max(Math.min(LEAST_NAME, most), Math.min(most, first.width - over(first.width))));
  if (first.width < (drawn[0]?.width ?? 0) + indent) first.letters = Math.max(6, Math.floor((first.width - PADDING - indent) / LETTER));
  return { columns, left };
}

const lengthOf = (value: unknown): number => (Array.isArray(value) ? value.join(", ").length : String(value).length);

function textOf(value: unknown, isLayer: boolean): string {
  if (!Array.isArray(value)) return clean(value);
  return isLayer ? `${clean(value[0] ?? "")}${value.length > 1 ? " +99" : ""}` : value.map(clean).join(", ");
}

export const reasonOf = <R,>(column: Column<R>, row: R): string => (typeof column.missing === "function" ? column.missing(row) : column.missing) || "not known";

export function Cell<R>({ drawn: { column, format, letters }, row }: { drawn: Drawn<R>; row: R }): JSX.Element {
  const own = column.cell?.(row, letters);
  if (own !== undefined) return <>{own}</>;
  const value = valueOf(column, row);
  if (value === null) return <span title={full(reasonOf(column, row))}>{UNKNOWN}</span>;
  if (format) {
    const bar = column.bar && typeof value === "number" && value > 0;
    return <>{bar && <span class="bar" style={{ width: `${Math.min(100, 100 * value)}%` }} />}<span>{format.text(value)}</span></>;
  }
  if (column.kind === "layer") return <Layers of={Array.isArray(value) ? value : [value]} count={(row as Record<string, unknown>)["layer_count"] as number} letters={letters} />;
  if (!isKnown(value)) return <></>;
  const text = textOf(value, false);
  const shown = column.shown ? column.shown(text, letters) : cut(text, letters);
  return <span class="name" title={shown === text ? undefined : full(text)}>{shown}</span>;
}

/** The first of several layers, as a link; `count`: how many there are, where `of` names only some. */
function Layers({ of, count, letters }: { of: readonly unknown[]; count: number | undefined; letters: number }): JSX.Element {
  const named = of.filter(isKnown) as string[];
  if (!named.length) return <span class="quiet">{of.includes("") ? "outside layers" : ""}</span>;
  const more = Math.max(count ?? 0, named.length) - 1;
  return (
    <>
      <Go to="layers" select={{ kind: "layer", name: named[0]! }} class="name" title={full(named.join(", "))}>{cut(named[0], Math.max(6, letters - (more > 0 ? 4 : 0)))}</Go>
      {more > 0 && <span class="quiet"> +{more}</span>}
    </>
  );
}

/** All columns of these rows, in the units of the table, which stand in the head. */
export function csvOf<R>(drawn: readonly Drawn<R>[], rows: readonly R[]): string {
  const head = drawn.map(({ column, format }) => quoted(format?.unit ? `${column.title} [${format.unit}]` : column.title));
  const lines = rows.map(row => drawn.map(({ column, format }) => quoted(inUnit(valueOf(column, row), format))));
  return [head, ...lines].map(line => line.join(",")).join("\r\n") + "\r\n";
}

function inUnit(value: unknown, format: ColumnFormat | null): unknown {
  return format && typeof value === "number" && format.size !== 1 ? Number((value / format.size).toPrecision(15)) : value;
}

/** A field of a CSV; a text that a spreadsheet would take for a formula gets an apostrophe. */
function quoted(value: unknown): string {
  if (!isKnown(value)) return "";
  if (typeof value === "number" || typeof value === "boolean") return String(value);
  const text = Array.isArray(value) ? value.join("; ") : String(value);
  return `"${/^[=+\-@\t\r]/.test(text) ? "'" : ""}${text.replaceAll('"', '""')}"`;
}
