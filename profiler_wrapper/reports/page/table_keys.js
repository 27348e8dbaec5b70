"use strict";
/** Clicks and keys on the rows of a table. `page.TableKeys` is what page.table builds on. */
(function () {
  page.TableKeys = class extends page.TableRows {
    clicked(event) {
      const line = event.target.closest("tr");
      if (!line || !line.row || event.target.closest("a, button")) return;
      if (event.target.closest(".fold")) this.toggle(line.row); else this.select(line);
    }

    toggle(row) {
      this.toggled.set(row[this.options.tree.id], !this.isOpen(row));
      this.selected = row;
      this.draw();
    }

    select(line) {
      this.selected = line.row;
      for (const other of this.body.querySelectorAll("tr.selected")) other.classList.remove("selected");
      line.classList.add("selected");
      this.focus(line);
      if (this.options.onSelect) this.options.onSelect(line.row);
    }

    focus(line) {
      for (const other of this.body.querySelectorAll("tr[tabindex='0']")) other.tabIndex = -1;
      line.tabIndex = 0;
      line.focus({ preventScroll: true });
    }

    pressed(event) {
      const line = event.target.closest("tr");
      if (!line || !line.row || event.target !== line) return;
      const has = this.options.tree && this.children.has(line.row[this.options.tree.id]);
      const lines = [...this.body.rows].filter(one => one.row);
      const at = lines.indexOf(line);
      const go = to => {
        const next = lines[Math.max(0, Math.min(lines.length - 1, to))];
        this.select(next);
        next.scrollIntoView({ block: "nearest" });
      };
      const acts = {
        ArrowDown: () => go(at + 1),
        ArrowUp: () => go(at - 1),
        Home: () => go(0),
        End: () => go(lines.length - 1),
        PageDown: () => go(at + 15),
        PageUp: () => go(at - 15),
        ArrowRight: () => { if (has && !this.isOpen(line.row)) this.toggle(line.row); else go(at + 1); },
        ArrowLeft: () => {
          if (has && this.isOpen(line.row)) this.toggle(line.row);
          else { const up = this.parentOf(line.row); if (up) go(lines.findIndex(one => one.row === up)); }
        },
        Enter: () => { if (has) this.toggle(line.row); else this.select(line); },
        " ": () => { if (has) this.toggle(line.row); else this.select(line); },
      };
      if (!acts[event.key]) return;
      event.preventDefault();
      acts[event.key]();
    }
  };
})();
