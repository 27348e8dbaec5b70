"use strict";
/** What a table does where it is too wide for the window. `page.TableFit` is what page.table builds on. */
(function () {
  const LEAST_WIDTH = 160; // pixels of a column that has shrunk

  page.TableFit = class extends page.TableKeys {
    /** Leaves out what can be spared, one column after another, until the table fits its place. */
    fit() {
      const { spare = [], columns } = this.options;
      this.width = this.element.parentElement ? this.element.parentElement.clientWidth : 0;
      for (const key of spare) {
        if (this.scroller.scrollWidth <= this.scroller.clientWidth) break;
        if (this.left.has(key) || !columns.some(column => column.key === key)) continue;
        this.left.add(key);
        this.drawHead();
        this.drawRows();
      }
      this.shrink();
      const names = columns.filter(column => this.left.has(column.key)).map(column => column.title);
      this.without.textContent = names.length ? `without ${names.join(", ")}` : "";
      this.without.title = "There is no room for these columns: widen the window, or choose other columns. The CSV has them.";
    }

    /** Where the column that shrinks stands, of those that are drawn; -1: none does. */
    shrinking() {
      return this.options.columns.filter(column => !this.left.has(column.key)).findIndex(column => column.shrinks);
    }

    /** Takes from one column what the table is too wide by, if that leaves it wide enough to be read. */
    shrink() {
      const at = this.shrinking();
      const over = this.scroller.scrollWidth - this.scroller.clientWidth;
      if (at < 0 || over <= 0) return;
      const before = this.head.rows[0].cells[at].offsetWidth;
      const width = before - over - 1;
      if (width < LEAST_WIDTH) return;
      const column = this.drawnColumns()[at][0];
      const letters = Math.floor(column.longest * (width / before) * 0.95); // as wide as they are in the mean
      for (const line of this.body.rows) {
        if (!line.row) continue;
        const cell = line.cells[at];
        cell.style.maxWidth = width + "px";
        cell.replaceChildren();
        page.drawCell(cell, { ...column, longest: letters }, null, line.row);
        if (!cell.title) cell.title = page.full(cell.textContent);
      }
    }

    /** After the window has changed. */
    refit() {
      const width = this.element.parentElement ? this.element.parentElement.clientWidth : 0;
      if (!width || width === this.width) return;
      this.left.clear();
      this.drawHead();
      this.draw();
    }
  };
})();
