"use strict";
/**
 * Tables: sortable, searchable, collapsible where rows have parents, a page of `limit` rows at a time.
 *
 *   const table = page.table(element, {
 *     columns: [{
 *       key, title,
 *       kind: "text" | "layer" | "us" | "bytes" | "flops" | "flop_rate" | "bandwidth" | "share" | "count" | "number",
 *       help,                       // what it means: tooltip of the heading
 *       value: row => ...,          // default: row[key]; null: not known, undefined: does not apply
 *       missing: "why" | row => "why",   // tooltip of what is not known
 *       cell: (row, td) => true,    // draws the cell itself
 *       bar: true,                  // of a share: a bar behind the number
 *       like: "time",               // the key of a column before it whose unit and decimals it shares
 *       longest: 48,                // characters of a text that are shown
 *       shown: (text, longest) => text,   // how a text is cut; default: in the middle
 *       shrinks: true,              // of a text: gives way where the table does not fit by a little
 *     }],
 *     rows,
 *     tree: {id: "layer", parent: "parent"} | null,   // keys of rows; parents stand before their children
 *     open: row => boolean,         // of a tree: rows that begin unfolded
 *     sort: {key, descending} | null,   // null: the order of `rows`
 *     search: true | "text" | false,
 *     limit: 500,
 *     total: row | null,            // a last row that stays in sight
 *     rowClass: row => "class" | "",
 *     onSelect: row => void,
 *     tools: [element],             // beside the search field
 *     empty: "why there are no rows",
 *     csvColumns: [column],         // of the CSV; default: `columns`
 *     spare: ["key"],               // columns to leave out, in this order, until the table fits the window
 *   })
 *   table.search(text), table.reveal(id) -> boolean, table.update({columns, rows, total, sort}), table.element
 */
(function () {
  page.table = (element, options) => new Table(element, options);

  /** The search field of the first table in `element`. */
  page.searchFirst = (element, text) => { element.querySelector(".table")?.table.search(text); };

  class Table extends page.TableFit {
    constructor(element, options) {
      super(options);
      this.left = new Set(); // keys of columns for which there is no room
      this.element = page.element("div", "table");
      this.element.table = this;
      this.build();
      element.append(this.element);
      this.drawHead();
      if (typeof this.options.search === "string") this.search(this.options.search); else this.draw();
    }

    build() {
      const tools = page.element("div", "tools");
      if (this.options.search !== false) {
        this.field = document.createElement("input");
        this.field.type = "search";
        this.field.placeholder = "Search names";
        this.field.setAttribute("aria-label", "Search names");
        let waiting = 0;
        this.field.addEventListener("input", () => {
          clearTimeout(waiting);
          waiting = setTimeout(() => {
            this.search(this.field.value);
            const view = this.element.closest(".view");
            if (view && view.querySelector(".table") === this.element) page.remember(view.id.slice(5), this.field.value);
          }, 120);
        });
        tools.append(this.field);
      }
      page.add(tools, ...(this.options.tools || []));
      if (this.options.tree) {
        tools.append(this.button("Expand all", () => this.openAll(true)), this.button("Collapse all", () => this.openAll(false)));
      }
      this.shown = page.element("span", "shown");
      this.without = page.element("span", "shown");
      tools.append(page.element("span", "grow"), this.shown, this.without, page.copyButton(() => this.csv(), "Copy CSV"));
      this.table = document.createElement("table");
      this.table.setAttribute("role", this.options.tree ? "treegrid" : "grid");
      this.head = document.createElement("thead");
      this.body = document.createElement("tbody");
      this.foot = document.createElement("tfoot");
      page.add(this.table, this.head, this.body, this.foot);
      this.scroller = page.element("div", "scroller", this.table);
      page.add(this.element, tools, this.scroller);
      this.body.addEventListener("click", event => this.clicked(event));
      this.body.addEventListener("keydown", event => this.pressed(event));
      if (this.options.spare || this.shrinking() >= 0) window.addEventListener("resize", () => this.refit());
    }

    button(label, act) {
      const button = page.text("button", label, "small");
      button.type = "button";
      button.addEventListener("click", act);
      return button;
    }

    update(changes) {
      Object.assign(this.options, changes);
      if ("sort" in changes) this.sort = changes.sort;
      if ("columns" in changes) this.left.clear();
      this.load();
      this.drawHead();
      this.draw();
    }

    search(text) {
      this.query = text.trim().toLowerCase();
      if (this.field && this.field.value !== text) this.field.value = text;
      this.toggled.clear();
      this.limit = this.options.limit;
      this.draw();
    }

    openAll(open) {
      this.toggled.clear();
      for (const id of this.children.keys()) if (id !== null) this.toggled.set(id, open);
      this.draw();
    }

    /** Unfolds everything above a row, scrolls to it and selects it; whether there is one. */
    reveal(id) {
      const row = this.byId.get(id) || (this.options.tree ? undefined : this.options.rows.find(one => one.key === id));
      if (!row) return false;
      if (this.query) this.search("");
      for (let up = this.parentOf(row); up; up = this.parentOf(up)) this.toggled.set(up[this.options.tree.id], true);
      this.selected = row;
      const place = this.visible().findIndex(([one]) => one === row);
      if (place >= this.limit) this.limit = place + this.options.limit;
      this.draw();
      const drawn = this.body.rows[place];
      if (drawn) {
        const room = this.scroller.clientHeight;
        this.scroller.scrollTop = Math.max(0, drawn.offsetTop - room / 3);
        drawn.scrollIntoView({ block: "nearest" });
        this.focus(drawn);
      }
      return true;
    }

    // ---- drawing ---------------------------------------------------------------------------------------------------

    /** Columns that are drawn, with how each writes its numbers. */
    drawnColumns() {
      return this.options.columns.map((column, i) => [column, this.formats[i]]).filter(([column]) => !this.left.has(column.key));
    }

    drawHead() {
      const line = document.createElement("tr");
      for (const [column, format] of this.drawnColumns()) {
        const cell = document.createElement("th");
        cell.scope = "col";
        cell.dataset.key = column.key;
        if (page.isNumeric(column)) cell.className = "number";
        const button = page.text("button", column.title);
        button.type = "button";
        const unit = format && format.unit;
        if (unit) page.add(button, page.text("span", " " + unit, "unit"));
        if (column.help) cell.title = column.help;
        button.addEventListener("click", () => this.sortBy(column));
        page.add(cell, button);
        line.append(cell);
      }
      this.head.replaceChildren(line);
    }

    /** First click: largest first (names: A to Z). Second: the other way round. Third: the order as given. */
    sortBy(column) {
      const firstDown = page.isNumeric(column);
      const same = this.sort && this.sort.key === column.key;
      if (!same) this.sort = { key: column.key, descending: firstDown };
      else if (Boolean(this.sort.descending) === firstDown) this.sort = { key: column.key, descending: !firstDown };
      else this.sort = this.options.tree ? null : { key: column.key, descending: firstDown };
      this.draw();
    }

    draw() {
      this.drawRows();
      this.fit();
    }

    drawRows() {
      const hadFocus = this.body.contains(document.activeElement);
      this.matched = this.matches();
      const shown = this.visible();
      const drawn = shown.slice(0, this.limit).map(([row, depth, isMatch]) => this.drawRow(row, depth, isMatch));
      this.body.replaceChildren(...drawn);
      if (shown.length > this.limit) this.body.append(this.moreRow(shown.length - this.limit));
      if (!shown.length) {
        const why = this.query ? `No name contains “${page.cut(this.query, 60)}”.` : this.options.empty;
        this.body.append(this.wideRow(page.text("span", why)));
      }
      this.foot.replaceChildren(...(this.options.total ? [this.drawRow(this.options.total, 0, true)] : []));
      const all = this.options.rows.length;
      this.shown.textContent = this.matched ? `${page.format.count(this.matched.found.size)} of ${page.format.count(all)} rows match`
        : drawn.length < all ? `${page.format.count(drawn.length)} shown of ${page.format.count(all)} rows`
          : `${page.format.count(all)} ${all === 1 ? "row" : "rows"}`;
      for (const cell of this.head.querySelectorAll("th")) {
        const isSorted = this.sort && this.sort.key === cell.dataset.key;
        cell.setAttribute("aria-sort", !isSorted ? "none" : this.sort.descending ? "descending" : "ascending");
      }
      const focused = this.selectedRow() || this.body.querySelector("tr");
      if (focused) { focused.tabIndex = 0; if (hadFocus) focused.focus({ preventScroll: true }); }
    }

    selectedRow() {
      return [...this.body.rows].find(line => line.row && line.row === this.selected);
    }

    wideRow(content) {
      const line = document.createElement("tr");
      const cell = document.createElement("td");
      cell.colSpan = this.drawnColumns().length;
      cell.className = "wide";
      page.add(line, page.add(cell, content));
      return line;
    }

    moreRow(hidden) {
      const next = Math.min(hidden, this.options.limit);
      return this.wideRow(this.button(`Show ${page.format.count(next)} more of ${page.format.count(hidden)}`, () => {
        this.limit += this.options.limit;
        this.draw();
      }));
    }

    drawRow(row, depth, isMatch) {
      const { tree, rowClass } = this.options;
      const line = document.createElement("tr");
      line.row = row;
      line.tabIndex = -1;
      line.className = [(rowClass && rowClass(row)) || "", isMatch ? "" : "beside", row === this.selected ? "selected" : ""].join(" ").trim();
      this.drawnColumns().forEach(([column, format], i) => {
        const cell = document.createElement("td");
        if (page.isNumeric(column)) cell.className = "number";
        if (i === 0 && tree) this.drawFold(cell, line, row, depth);
        if (!(column.cell && column.cell(row, cell))) page.drawCell(cell, column, format, row);
        line.append(cell);
      });
      return line;
    }

    drawFold(cell, line, row, depth) {
      line.setAttribute("aria-level", String(depth + 1));
      cell.style.paddingLeft = 0.5 + Math.min(depth, 12) * 0.9 + "rem";
      const has = this.children.has(row[this.options.tree.id]);
      const sign = page.element("span", has ? "fold" : "leaf");
      if (has) {
        const open = this.isOpen(row);
        line.setAttribute("aria-expanded", String(open));
        sign.textContent = open ? "▾" : "▸";
      }
      cell.append(sign);
    }

    /** All rows that match. */
    csv() {
      const matched = this.matches();
      return page.csvOf(this.options.csvColumns || this.options.columns, this.options.rows.filter(row => !matched || matched.found.has(row)));
    }
  }
})();
