"use strict";
/**
 * Numbers and names as text. `page` is the one global of this document: every other script adds to it.
 *
 * A value that is null is not known: "–". One that is undefined does not apply: "".
 */
const page = {};

(function () {
  const UNKNOWN = "–";
  const MIB = 1048576;
  const TIMES = [[1e6, "s"], [1e3, "ms"], [1, "µs"], [1e-3, "ns"]];
  const SIZES = [[1024 * MIB, "GiB"], [MIB, "MiB"], [1024, "KiB"], [1, "B"]];
  const WORK = [[1e15, "PFLOP"], [1e12, "TFLOP"], [1e9, "GFLOP"], [1e6, "MFLOP"], [1, "FLOP"]];
  const RATES = [[1e12, "TFLOP/s"], [1e9, "GFLOP/s"], [1e6, "MFLOP/s"]];
  const BANDWIDTHS = [[1e12, "TB/s"], [1e9, "GB/s"], [1e6, "MB/s"]];
  // Of each kind of column: the units it may stand in, the largest that its largest value fills.
  const UNITS = {
    us: [[1e6, "s", 1e7], [1e3, "ms"], [1, "µs"]], // the third: from where on it is the unit
    bytes: [[MIB, "MiB"], [1024, "KiB"]],
    flops: [[1e12, "TFLOP"], [1e9, "GFLOP"], [1e6, "MFLOP"]],
    flop_rate: RATES,
    bandwidth: BANDWIDTHS,
  };
  const LONGEST_SHOWN = 240;
  const LONGEST_TITLE = 2000;

  const absent = value => value === undefined ? "" : UNKNOWN;
  const isNumber = value => typeof value === "number" && Number.isFinite(value);

  /** Decimals that leave about four digits of the largest value. */
  const decimalsFor = size => size >= 1000 ? 0 : size >= 100 ? 1 : size >= 10 ? 2 : 3;
  /** In a column the small ones matter too. */
  const decimalsOfColumn = size => size >= 1e5 ? 0 : size >= 1000 ? 1 : size >= 100 ? 2 : 3;

  function scaled(value, units) {
    if (!isNumber(value)) return absent(value);
    if (value === 0) return "0 " + units[Math.min(1, units.length - 1)][1];
    const [size, unit] = units.find(([size]) => Math.abs(value) >= size) || units[units.length - 1];
    const isWhole = (unit === "B" || unit === "FLOP") && Number.isInteger(value);
    return fixed(value / size, isWhole ? 0 : decimalsFor(Math.abs(value / size))) + " " + unit;
  }

  function fixed(value, decimals) {
    if (Math.abs(value) >= 1e11) return value.toPrecision(4);
    return value.toLocaleString("en-US", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
  }

  /** What is not 0 never reads as 0. */
  function columnText(value, decimals) {
    if (value === 0) return "0";
    const least = 10 ** -decimals;
    return Math.abs(value) < least / 2 ? (value < 0 ? "-" : "") + "<" + fixed(least, decimals) : fixed(value, decimals);
  }

  const count = value => !isNumber(value) ? absent(value)
    : Number.isInteger(value) ? fixed(value, 0) : fixed(value, Math.abs(value) >= 100 ? 0 : 1);

  const share = value => !isNumber(value) ? absent(value)
    : value !== 0 && Math.abs(value) < 0.0005 ? "<0.1 %" : fixed(100 * value, 1) + " %";

  const number = value => !isNumber(value) ? absent(value)
    : Number.isInteger(value) ? fixed(value, 0) : fixed(value, Math.abs(value) >= 100 ? 1 : Math.abs(value) >= 1 ? 2 : 3);

  page.format = {
    unknown: UNKNOWN,
    us: value => scaled(value, TIMES),
    bytes: value => scaled(value, SIZES),
    flops: value => scaled(value, WORK),
    flop_rate: value => scaled(value, RATES),
    bandwidth: value => scaled(value, BANDWIDTHS),
    share,
    count,
    number,
  };

  /**
   * How a whole column writes its numbers: one unit and as many decimals for all of them.
   * @param {string} kind of the column
   * @param {Iterable<number|null|undefined>} values all of them
   * @returns {{unit: string, size: number, text: (value: any) => string}}
   */
  page.columnFormat = function (kind, values) {
    const units = UNITS[kind];
    if (kind === "number") return numberFormat(values);
    if (!units) return { unit: kind === "share" ? "%" : "", size: kind === "share" ? 0.01 : 1, text: plainText(kind) };
    let largest = 0;
    for (const value of values) if (isNumber(value)) largest = Math.max(largest, Math.abs(value));
    const [size, unit] = units.find(([size, , from = size]) => largest >= from) || units[units.length - 1];
    const decimals = decimalsOfColumn(largest / size);
    if (!largest) return { unit: "", size, text: value => isNumber(value) ? "0" : absent(value) };
    return { unit, size, text: value => isNumber(value) ? columnText(value / size, decimals) : absent(value) };
  };

  /** Plain numbers: as many decimals for all, none where all are whole. */
  function numberFormat(values) {
    const known = [...values].filter(isNumber);
    const decimals = known.every(Number.isInteger) ? 0 : Math.max(...known.map(Math.abs)) >= 1000 ? 1 : 2;
    return { unit: "", size: 1, text: value => isNumber(value) ? columnText(value, decimals) : absent(value) };
  }

  /** The unit of an axis of times up to so many microseconds: [microseconds in it, its name]. */
  page.timeUnit = largest => { const [size, unit] = UNITS.us.find(([size, , from = size]) => largest >= from) || [1, "µs"]; return [size, unit]; };

  function plainText(kind) {
    if (kind === "share") {
      return value => !isNumber(value) ? absent(value)
        : value !== 0 && Math.abs(value) < 0.0005 ? "<0.1" : fixed(100 * value, 1);
    }
    return { count }[kind] || (value => value === null || value === undefined ? absent(value) : page.clean(value));
  }

  /**
   * Text on one line that shows what it holds: control, bidirectional and lone surrogate characters as escapes, at most
   * four marks on a letter.
   */
  page.clean = function (value) {
    const text = String(value);
    const short = text.length <= 4000 ? text : text.slice(0, 2000) + text.slice(-2000);
    return short.replace(/(\p{M}{4})\p{M}+/gu, "$1").replace(
      /[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g,
      char => char === "\n" ? "\\n" : char === "\t" ? "\\t" : "\\u" + char.charCodeAt(0).toString(16).padStart(4, "0"),
    );
  };

  /** `value` cleaned and cut in the middle to at most `longest` characters. */
  page.cut = function (value, longest = LONGEST_SHOWN) {
    const letters = Array.from(page.clean(value));
    if (letters.length <= longest) return letters.join("");
    const tail = Math.floor((longest - 1) * 0.55);
    return letters.slice(0, longest - 1 - tail).join("") + "…" + letters.slice(-tail).join("");
  };

  /** What a tooltip says: the text in full, up to 2,000 characters. */
  page.full = function (value) {
    let text = page.cut(value, LONGEST_TITLE);
    for (let letters = LONGEST_TITLE; text.length > LONGEST_TITLE; text = page.cut(value, letters)) letters = Math.floor(letters / 2);
    return text;
  };
})();
