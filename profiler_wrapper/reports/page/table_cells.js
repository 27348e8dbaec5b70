"use strict";
/** What stands in the cells of a table, on the page and as CSV. */
(function () {
  const LONGEST_CELL = 48;
  const { isFilled: isKnown, cellValue: valueOf } = page;

  /** The value of a row in one column, with its tooltip. */
  page.drawCell = function (cell, column, format, row) {
    const value = valueOf(column, row);
    if (format) {
      if (column.bar && value > 0) {
        const bar = page.element("div", "bar");
        bar.style.width = Math.min(100, 100 * value) + "%";
        cell.append(bar);
      }
      page.add(cell, page.element("span", "", format.text(value)));
    } else if (column.kind === "layer") {
      drawLayers(cell, Array.isArray(value) ? value : [value], column.longest || LONGEST_CELL, row.layer_count);
    } else if (isKnown(value)) {
      const text = Array.isArray(value) ? value.join(", ") : String(value);
      const span = page.element("span", "name", column.shown ? column.shown(text, column.longest) : page.cut(text, column.longest || LONGEST_CELL));
      if (span.textContent !== text) span.title = page.full(text);
      cell.append(span);
    } else if (value === null) cell.append(page.format.unknown);
    if (value === null) {
      const why = typeof column.missing === "function" ? column.missing(row) : column.missing;
      cell.title = page.full(why || "not known");
    }
  };

  /** Rows with every column: numbers as they are, without the unit of the display. */
  page.csvOf = function (columns, rows) {
    const lines = [columns.map(column => quoted(column.key)), ...rows.map(row => columns.map(column => quoted(valueOf(column, row))))];
    return lines.map(line => line.join(",")).join("\r\n") + "\r\n";
  };

  /** A field of a CSV; a text that a spreadsheet would take for a formula gets an apostrophe. */
  function quoted(value) {
    if (!isKnown(value)) return "";
    if (typeof value === "number" || typeof value === "boolean") return String(value);
    const text = Array.isArray(value) ? value.join("; ") : String(value);
    return '"' + (/^[=+\-@\t\r]/.test(text) ? "'" : "") + text.replaceAll('"', '""') + '"';
  }

  /** `count`: how many layers there are, of which `layers` names some. */
  function drawLayers(cell, layers, longest, count) {
    const named = layers.filter(isKnown);
    if (!named.length) {
      const isOutside = layers.includes("");
      cell.append(page.element("span", "quiet", isOutside ? "outside layers" : layers[0] === null ? page.format.unknown : ""));
      return;
    }
    const link = page.link("layers", named[0], "");
    link.textContent = page.cut(named[0], longest);
    link.title = page.full(named.join("\n").replaceAll("\n", ", "));
    link.classList.add("name");
    cell.append(link);
    const more = Math.max(count || 0, named.length) - 1;
    if (more > 0) cell.append(page.element("span", "quiet", ` +${more}`));
  }
})();
