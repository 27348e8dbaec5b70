/**
 * Numbers and names as text: the words and digits of the printed table.
 *
 * A value that is null is not known: "–". One that is undefined does not apply: "".
 */
export type Value = number | null | undefined;
type Unit = readonly [size: number, name: string, from?: number];

export const UNKNOWN = "–";
const MIB = 1048576;
const TIMES: readonly Unit[] = [[1e6, "s"], [1e3, "ms"], [1, "µs"], [1e-3, "ns"]];
const SIZES: readonly Unit[] = [[1024 * MIB, "GiB"], [MIB, "MiB"], [1024, "KiB"], [1, "B"]];
const WORK: readonly Unit[] = [[1e15, "PFLOP"], [1e12, "TFLOP"], [1e9, "GFLOP"], [1e6, "MFLOP"], [1, "FLOP"]];
const RATES: readonly Unit[] = [[1e12, "TFLOP/s"], [1e9, "GFLOP/s"], [1e6, "MFLOP/s"]];
const BANDWIDTHS: readonly Unit[] = [[1e12, "TB/s"], [1e9, "GB/s"], [1e6, "MB/s"]];
// Of each kind of column: the units it may stand in, the largest that its largest value fills.
const UNITS: Readonly<Record<string, readonly Unit[]>> = {
  us: [[1e6, "s", 1e7], [1e3, "ms"], [1, "µs"]], // the third: from where on it is the unit
  bytes: [[MIB, "MiB"], [1024, "KiB"]],
  flops: [[1e12, "TFLOP"], [1e9, "GFLOP"], [1e6, "MFLOP"]],
  flop_rate: RATES,
  bandwidth: BANDWIDTHS,
};
const LONGEST_SHOWN = 240;
const LONGEST_TITLE = 2000;

export const isNumber = (value: unknown): value is number => typeof value === "number" && Number.isFinite(value);
export const isKnown = <T>(value: T | null | undefined): value is T => value !== null && value !== undefined;
const absent = (value: unknown): string => (value === undefined ? "" : UNKNOWN);

/** Decimals that leave about four digits of the largest value. */
const decimalsFor = (size: number): number => (size >= 1000 ? 0 : size >= 100 ? 1 : size >= 10 ? 2 : 3);
/** In a column the small ones matter too. */
const decimalsOfColumn = (size: number): number => (size >= 1e5 ? 0 : size >= 1000 ? 1 : size >= 100 ? 2 : 3);

const writers: Intl.NumberFormat[] = []; // by decimals: to make one takes longer than to draw a row

function fixed(value: number, decimals: number): string {
  if (Math.abs(value) >= 1e11) return value.toPrecision(4);
  return (writers[decimals] ??= new Intl.NumberFormat("en-US", { minimumFractionDigits: decimals, maximumFractionDigits: decimals })).format(value);
}

function scaled(value: Value, units: readonly Unit[]): string {
  if (!isNumber(value)) return absent(value);
  if (value === 0) return `0 ${units[Math.min(1, units.length - 1)]![1]}`;
  const [size, unit] = units.find(([least]) => Math.abs(value) >= least) ?? units.at(-1)!;
  const isWhole = (unit === "B" || unit === "FLOP") && Number.isInteger(value);
  return `${fixed(value / size, isWhole ? 0 : decimalsFor(Math.abs(value / size)))} ${unit}`;
}

export const us = (value: Value): string => scaled(value, TIMES);
export const ns = (value: Value): string => scaled(isNumber(value) ? value / 1000 : value, TIMES);
export const bytes = (value: Value): string => scaled(value, SIZES);
export const flops = (value: Value): string => scaled(value, WORK);
export const flopRate = (value: Value): string => scaled(value, RATES);
export const bandwidth = (value: Value): string => scaled(value, BANDWIDTHS);

export function count(value: Value): string {
  if (!isNumber(value)) return absent(value);
  return Number.isInteger(value) ? fixed(value, 0) : fixed(value, Math.abs(value) >= 100 ? 0 : 1);
}

export function share(value: Value): string {
  if (!isNumber(value)) return absent(value);
  return value !== 0 && Math.abs(value) < 0.0005 ? "<0.1 %" : `${fixed(100 * value, 1)} %`;
}

export function number(value: Value): string {
  if (!isNumber(value)) return absent(value);
  return Number.isInteger(value) ? fixed(value, 0) : fixed(value, Math.abs(value) >= 100 ? 1 : Math.abs(value) >= 1 ? 2 : 3);
}

// ---- columns ----------------------------------------------------------------------------------------------------------

export interface ColumnFormat {
  unit: string;
  size: number; // of the unit
  text: (value: unknown) => string;
}

/** How a whole column writes its numbers: one unit and as many decimals for all of them. */
export function columnFormat(kind: string, values: Iterable<unknown>): ColumnFormat {
  if (kind === "number") return numberFormat(values);
  const units = UNITS[kind];
  if (!units) return { unit: kind === "share" ? "%" : "", size: kind === "share" ? 0.01 : 1, text: plainText(kind) };
  let largest = 0;
  for (const value of values) if (isNumber(value)) largest = Math.max(largest, Math.abs(value));
  const [size, unit] = unitFor(units, largest);
  const decimals = decimalsOfColumn(largest / size);
  if (!largest) return { unit: "", size, text: value => (isNumber(value) ? "0" : absent(value)) };
  return { unit, size, text: value => (isNumber(value) ? columnText(value / size, decimals) : absent(value)) };
}

const unitFor = (units: readonly Unit[], largest: number): Unit => units.find(([size, , from = size]) => largest >= from) ?? units.at(-1)!;

/** The unit of an axis of times up to so many microseconds. */
export function timeUnit(largestUs: number): { size: number; unit: string } {
  const [size, unit] = unitFor(UNITS["us"]!, largestUs);
  return { size, unit };
}

/** What is not 0 never reads as 0. */
function columnText(value: number, decimals: number): string {
  if (value === 0) return "0";
  const least = 10 ** -decimals;
  return Math.abs(value) < least / 2 ? `${value < 0 ? "-" : ""}<${fixed(least, decimals)}` : fixed(value, decimals);
}

/** Plain numbers: as many decimals for all, none where all are whole. */
function numberFormat(values: Iterable<unknown>): ColumnFormat {
  const known = [...values].filter(isNumber);
  const decimals = known.every(Number.isInteger) ? 0 : known.reduce((most, one) => Math.max(most, Math.abs(one)), 0) >= 1000 ? 1 : 2;
  return { unit: "", size: 1, text: value => (isNumber(value) ? columnText(value, decimals) : absent(value)) };
}

function plainText(kind: string): (value: unknown) => string {
  if (kind === "share") return value => share(value as Value).replace(/ %$/, "");
  if (kind === "count") return value => count(value as Value);
  return value => (isKnown(value) ? clean(value) : absent(value));
}

// ---- names ------------------------------------------------------------------------------------------------------------

const UNSEEN =
  /[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;

/**
 * Text on one line that shows what it holds: control, bidirectional and lone surrogate characters as escapes, at most
 * four marks on a letter.
 */
export function clean(value: unknown): string {
  const text = String(value);
  const short = text.length <= 4000 ? text : text.slice(0, 2000) + text.slice(-2000);
  return short
    .replace(/(\p{M}{4})\p{M}+/gu, "$1")
    .replace(UNSEEN, char => (char === "\n" ? "\\n" : char === "\t" ? "\\t" : `\\u${char.charCodeAt(0).toString(16).padStart(4, "0")}`));
}

/** `value` cleaned and cut in the middle to at most `longest` characters. */
export function cut(value: unknown, longest = LONGEST_SHOWN): string {
  const letters = Array.from(clean(value));
  if (letters.length <= longest) return letters.join("");
  const tail = Math.floor((longest - 1) * 0.55);
  return `${letters.slice(0, longest - 1 - tail).join("")}…${letters.slice(-tail).join("")}`;
}

/** What a tooltip says: the text in full, up to 2,000 characters. */
export function full(value: unknown): string {
  let text = cut(value, LONGEST_TITLE);
  for (let letters = LONGEST_TITLE; text.length > LONGEST_TITLE; text = cut(value, letters)) letters = Math.floor(letters / 2);
  return text;
}

export const capital = (text: string): string => text.replace(/^./u, letter => letter.toUpperCase());
