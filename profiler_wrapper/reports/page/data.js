"use strict";
/**
 * The data of the page: what result.json holds, in columns, see page_data.py.
 *
 *   page.data                  all of it; lists of rows are objects again
 *   page.rows(name)            rows of a list of result.json; page.data[name] is the same
 *   page.why("memory")         the warning that says why something is not known, or null
 */
(function () {
  function decodedColumn(column, count, texts) {
    if ("all" in column) return new Array(count).fill(column.all);
    if (column.text) return column.text.map(number => number === null ? null : texts[number]);
    if (column.texts) return column.texts.map(numbers => numbers.map(number => texts[number]));
    return column.values;
  }

  function decodedRows(table, texts) {
    const names = Object.keys(table.columns);
    const columns = names.map(name => decodedColumn(table.columns[name], table.count, texts));
    const rows = new Array(table.count);
    for (let i = 0; i < table.count; i += 1) {
      const row = {};
      for (let k = 0; k < names.length; k += 1) row[names[k]] = columns[k][i];
      rows[i] = row;
    }
    return rows;
  }

  /** Lists of rows are worked out when first asked for, so that one that is damaged fails only where it is shown. */
  page.readData = function () {
    const raw = JSON.parse(document.getElementById("data").textContent);
    decodeLists(raw, raw.texts);
    decodeLists(raw.run || {}, raw.texts);
    decodeLists(raw.views?.layers || {}, raw.texts);
    page.data = raw;
    return raw;
  };

  function decodeLists(raw, texts) {
    for (const [name, table] of Object.entries(raw)) {
      if (!table || typeof table !== "object" || !("columns" in table) || !("count" in table)) continue;
      let rows = null;
      Object.defineProperty(raw, name, { enumerable: true, get: () => rows || (rows = decodedRows(table, texts)) });
    }
  }

  page.rows = name => page.data[name] || [];

  /** The first warning with all of `words` in it: why something is not known. */
  page.why = (...words) => (page.data.warnings || []).find(one => words.every(word => one.toLowerCase().includes(word.toLowerCase()))) || null;
})();
