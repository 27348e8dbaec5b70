"use strict";
/** Which rows of a table are seen, and in what order: no drawing. `page.TableRows` is what page.table builds on. */
(function () {
  const LONGEST_SEARCHED = 100000;
  const NUMBERS = new Set(["us", "bytes", "flops", "flop_rate", "bandwidth", "share", "count", "number"]);

  const isKnown = value => value !== null && value !== undefined && value !== "";
  const valueOf = (column, row) => column.value ? column.value(row) : row[column.key];
  page.isFilled = isKnown;
  page.cellValue = valueOf;
  page.isNumeric = column => NUMBERS.has(column.kind);

  const sortable = value => !isKnown(value) ? null : Array.isArray(value) ? (value.length ? String(value[0]).toLowerCase() : null)
    : typeof value === "number" ? (Number.isNaN(value) ? null : value) : String(value).toLowerCase();


  page.TableRows = class {
    constructor(options) {
      this.options = { limit: 500, tree: null, sort: null, search: true, total: null, empty: "Nothing was recorded.", ...options };
      this.sort = this.options.sort;
      this.toggled = new Map(); // id of a row -> whether it was unfolded by hand
      this.query = "";
      this.matched = null;
      this.selected = null;
      this.load();
    }

    /** Works out what does not change with sorting, searching and folding. */
    load() {
      const { rows, tree, columns } = this.options;
      this.limit = this.options.limit;
      this.children = new Map([[null, []]]);
      this.byId = new Map();
      this.haystacks = new Map();
      if (tree) for (const row of rows) this.byId.set(row[tree.id], row);
      for (const row of rows) {
        const above = tree && this.byId.has(row[tree.parent]) && row[tree.parent] !== row[tree.id] ? row[tree.parent] : null;
        if (!this.children.has(above)) this.children.set(above, []);
        this.children.get(above).push(row);
      }
      const counted = this.options.total ? [...rows, this.options.total] : rows;
      this.formats = [];
      for (const column of columns) {
        const like = column.like === undefined ? -1 : columns.findIndex(one => one.key === column.like);
        if (like >= 0 && this.formats[like] && this.formats[like].unit) this.formats.push(this.formats[like]);
        else this.formats.push(NUMBERS.has(column.kind) ? page.columnFormat(column.kind, counted.map(row => valueOf(column, row))) : null);
      }
    }

    haystack(row) {
      let text = this.haystacks.get(row);
      if (text === undefined) {
        const parts = this.options.columns.filter(one => !NUMBERS.has(one.kind)).map(one => valueOf(one, row));
        if (this.options.tree) parts.push(row[this.options.tree.id]);
        text = parts.flat().filter(isKnown).join(" ").slice(0, LONGEST_SEARCHED).toLowerCase();
        this.haystacks.set(row, text);
      }
      return text;
    }

    parentOf(row) {
      const { tree } = this.options;
      return tree && row[tree.parent] !== row[tree.id] ? this.byId.get(row[tree.parent]) : undefined;
    }

    /** Rows that match, and all above them; null without a query. */
    matches() {
      if (!this.query) return null;
      const words = this.query.split(/\s+/);
      const found = new Set();
      const above = new Set();
      for (const row of this.options.rows) {
        const text = this.haystack(row);
        if (!words.every(word => text.includes(word))) continue;
        found.add(row);
        for (let up = this.parentOf(row); up && !above.has(up); up = this.parentOf(up)) above.add(up);
      }
      return { found, above };
    }

    isOpen(row) {
      const id = row[this.options.tree.id];
      if (this.toggled.has(id)) return this.toggled.get(id);
      if (this.matched) return this.matched.above.has(row);
      return Boolean(this.options.open && this.options.open(row));
    }

    /** Visible rows as [row, depth, isMatch], in order. */
    visible() {
      const shown = [];
      const walk = (id, depth, below) => {
        for (const row of this.sorted(this.children.get(id) || [])) {
          const isMatch = !this.matched || this.matched.found.has(row);
          if (this.matched && !isMatch && !below && !this.matched.above.has(row)) continue;
          shown.push([row, depth, isMatch]);
          if (this.options.tree && depth < 200) {
            const own = row[this.options.tree.id];
            if (this.children.has(own) && this.isOpen(row)) walk(own, depth + 1, below || (this.matched && isMatch));
          }
        }
      };
      walk(null, 0, false);
      return shown;
    }

    sorted(rows) {
      const column = this.sort && this.options.columns.find(one => one.key === this.sort.key);
      if (!column) return rows;
      const sign = this.sort.descending ? -1 : 1;
      const keyed = rows.map((row, i) => [sortable(valueOf(column, row)), i, row]);
      keyed.sort(([a, i], [b, j]) => {
        if (a === null || b === null) return a === b ? i - j : a === null ? 1 : -1;
        return (a < b ? -sign : a > b ? sign : 0) || i - j;
      });
      return keyed.map(entry => entry[2]);
    }
  };
})();
