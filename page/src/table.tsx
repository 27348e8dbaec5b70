/**
 * Tables: sorted by a click on the head, searched, unfolded where rows have parents; rows are drawn as they scroll.
 *
 *   <Table name="waits" label="Waits" rows={rows} columns={[
 *     { key: "op", title: "Op", kind: "text" },
 *     { key: "wait_us", title: "Waited", kind: "us", help: "in the call", missing: "why a null is not known", spare: 1 },
 *   ]} sort={{ key: "wait_us", descending: true }} />
 *
 * The sort stands in the address, under the table's name.
 */
import type { ComponentChildren, JSX, TargetedKeyboardEvent } from "preact";
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { count, cut } from "./format";
import { CopyButton } from "./parts";
import { type Sort, sorts } from "./state";
import { applying, Cell, type Column, csvOf, type Drawn, fitted, measured, reasonOf } from "./table_cells";
import { Forest, isNumeric, type Shown } from "./table_rows";
import { printing } from "./theme";
import "./table.css";

export type { Column } from "./table_cells";
export { UNFOLDING, unfolding } from "./table_rows";

export interface TableProps<R> {
  name: string; // of its sort in the address, and of its CSV's file
  label: string; // what it shows, for who does not see it
  rows: readonly R[];
  columns: readonly Column<R>[];
  csvColumns?: readonly Column<R>[]; // of the CSV, where it has more
  sort?: Sort; // where the address has none; without it the order of `rows`
  id?: (row: R) => string; // default: the place in `rows`
  tree?: { parent: (row: R) => string | null; open?: (row: R) => boolean }; // parents stand before their children
  total?: R; // a last row that stays in sight
  search?: boolean; // a search field; default: where there are many rows
  selected?: string | null; // id of a row, which is unfolded and scrolled to when it was chosen elsewhere
  onSelect?: (row: R | null) => void; // null: the selected row was clicked again
  selectable?: (row: R) => boolean; // others unfold with a click
  limit?: number; // rows that are seen at once
  rowClass?: (row: R) => string;
  tools?: ComponentChildren; // beside the search field
  empty?: string; // why there are no rows
}

const ROW = 24; // pixels
const LIMIT = 22; // rows
const MANY = 8; // rows from which on there is something to search
const BESIDE = 8; // rows drawn above and below what is seen
const LEVEL = 13; // pixels that a row is moved to the right for each level
const DEEPEST_INDENT = 10; // levels
const PRINTED = 400; // rows at most

const unfolded = new Map<string, Map<string, boolean>>(); // by table: what was folded by hand stays when its place is left

export function Table<R extends object>(props: TableProps<R>): JSX.Element {
  const { name, label, rows, columns, tree, total, limit = LIMIT } = props;
  const [query, setQuery] = useState("");
  const [folds, setFolds] = useState<ReadonlyMap<string, boolean>>(unfolded.get(name) ?? new Map());
  const [active, setActive] = useState<string | null>(props.selected ?? null); // where the keys are
  const [top, setTop] = useState(0); // first row in sight
  const [room, setRoom] = useState(0); // pixels
  const whole = useRef<HTMLDivElement>(null);
  const scroller = useRef<HTMLDivElement>(null);

  const forest = useMemo(() => new Forest(rows, columns, props.id, tree?.parent), [rows, columns]);
  const { drawn, unknown } = useMemo(() => {
    const all = total ? [...rows, total] : rows;
    const found = applying(columns, all);
    return { drawn: measured(found.columns, all), unknown: found.unknown };
  }, [rows, columns, total]);
  const sort = sorts.value[name] ?? props.sort ?? null;
  const shown = useMemo(() => forest.shown(sort, query, folds, tree?.open), [forest, sort, query, folds]);
  const indent = tree ? 18 + LEVEL * Math.min(DEEPEST_INDENT, shown.reduce((most, one) => Math.max(most, one.depth), 0)) : 0;
  const { columns: fits, left } = useMemo(() => fitted(drawn, room, indent), [drawn, room, indent]);
  const matched = useMemo(() => forest.matches(query), [forest, query]);

  const fold = (changes: Iterable<[string, boolean]>): void => {
    const next = new Map([...folds, ...changes]);
    if (!query) unfolded.set(name, next);
    setFolds(next);
  };
  const search = (text: string): void => {
    if (!text !== !query) setFolds((text ? undefined : unfolded.get(name)) ?? new Map()); // what is found is seen, whatever was folded
    setQuery(text);
    setTop(0);
    if (scroller.current) scroller.current.scrollTop = 0;
  };

  useLayoutEffect(() => {
    const place = whole.current!;
    const watcher = new ResizeObserver(() => setRoom(place.clientWidth - 2));
    watcher.observe(place);
    setRoom(place.clientWidth - 2);
    return () => watcher.disconnect();
  }, []);

  const scrollTo = (at: number): void => {
    const box = scroller.current;
    if (!box || at < 0) return;
    const seen = box.clientHeight - ROW * (total ? 2 : 1) - 2;
    if (at * ROW < box.scrollTop) box.scrollTop = at * ROW;
    else if ((at + 1) * ROW > box.scrollTop + seen) box.scrollTop = (at + 1) * ROW - seen;
  };

  // What was chosen elsewhere is shown; the page itself moves only when its place is opened.
  const isOpened = useRef(false);
  useEffect(() => {
    const [id, isFirst] = [props.selected, !isOpened.current];
    isOpened.current = true;
    const row = id == null ? undefined : forest.byId.get(id);
    if (!row || id == null || (id === active && !isFirst)) return;
    const above: [string, boolean][] = [];
    for (let up = forest.parentOf(row); up; up = forest.parentOf(up)) above.push([forest.id(up), true]);
    fold(above);
    if (query && !matched?.found.has(row)) search("");
    setActive(id);
    const at = forest.shown(sort, "", new Map([...folds, ...above]), tree?.open).findIndex(one => one.id === id);
    setTimeout(() => scrollTo(at));
    if (isFirst) requestAnimationFrame(() => requestAnimationFrame(() => scroller.current?.scrollIntoView({ block: "nearest" }))); // after the place has been laid out
  }, [props.selected, forest]);

  const choose = (one: Shown<R>, isClick: boolean): void => {
    setActive(one.id);
    if (props.selectable?.(one.row) ?? true) props.onSelect?.(isClick && props.selected === one.id ? null : one.row);
    else if (isClick && one.open !== null) fold([[one.id, !one.open]]);
  };

  const pressed = (event: TargetedKeyboardEvent<HTMLTableElement>): void => {
    if (event.target !== event.currentTarget || event.ctrlKey || event.metaKey || event.altKey) return;
    const at = shown.findIndex(one => one.id === active);
    const one = shown[at];
    const seen = Math.max(1, limit - 2);
    const move = (to: number): void => {
      const next = shown[Math.max(0, Math.min(shown.length - 1, to))];
      if (!next) return;
      scrollTo(shown.indexOf(next));
      choose(next, false);
    };
    const acts: Record<string, () => void> = {
      ArrowDown: () => move(at + 1), ArrowUp: () => move(at < 0 ? 0 : at - 1), Home: () => move(0), End: () => move(shown.length - 1),
      PageDown: () => move(at + seen), PageUp: () => move(at - seen),
      ArrowRight: () => { if (one?.open === false) fold([[one.id, true]]); else if (one?.open) move(at + 1); },
      ArrowLeft: () => {
        const up = one && forest.parentOf(one.row);
        if (one?.open) fold([[one.id, false]]);
        else if (up) move(shown.findIndex(other => other.row === up));
      },
      Enter: () => { if (one?.open != null) fold([[one.id, !one.open]]); else if (one) choose(one, true); },
    };
    acts[" "] = acts["Enter"]!;
    const act = acts[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  };

  const isPrinted = printing.value;
  const from = isPrinted ? 0 : Math.max(0, Math.min(top, shown.length - limit) - BESIDE);
  const until = isPrinted ? PRINTED : from + limit + 2 * BESIDE;
  const inSight = shown.slice(from, until);
  const rowId = (at: number): string => `${name}-row-${at}`;
  const activeAt = inSight.findIndex(one => one.id === active);
  const csv = (): string => csvOf(props.csvColumns ? measured(props.csvColumns, total ? [...rows, total] : rows) : drawn,
    (tree ? rows : forest.sorted(rows, sort)).filter(row => !matched || matched.found.has(row)));
  const width = fits.reduce((all, one) => all + one.width, 0);
  const says = matched ? `${count(matched.found.size)} of ${count(rows.length)} rows match` : `${count(rows.length)} ${rows.length === 1 ? "row" : "rows"}`;

  return (
    <div class="table" ref={whole}>
      <div class="tools">
        {(props.search ?? rows.length > MANY) && <SearchField onSearch={search} query={query} />}
        {props.tools}
        {tree && rows.some(row => forest.parentOf(row)) && (
          <>
            <button type="button" class="small" onClick={() => fold(rows.map(row => [forest.id(row), true]))}>Unfold all</button>
            <button type="button" class="small" onClick={() => fold(rows.map(row => [forest.id(row), false]))}>Fold all</button>
          </>
        )}
        <span class="grow" />
        <span class="shown" role="status">{says}</span>
        {unknown.length > 0 && <span class="shown" title={unknown.map(column => `${column.title}: ${reasonOf(column, rows[0]!)}`).join("\n")}>not known: {unknown.map(column => column.title).join(", ")}</span>}
        {left.length > 0 && <span class="shown" title="There is no room for these columns: widen the window, or choose other columns. The CSV has them.">without {left.map(one => one.title).join(", ")}</span>}
        <CopyButton text={csv} label="Copy CSV" title="All rows and columns, in the units of the table" />
        <button type="button" class="small" onClick={() => saveCsv(`${name}.csv`, csv())}>Save CSV</button>
      </div>
      <div class="scroller" ref={scroller} style={{ maxHeight: `${(Math.min(limit, Math.max(1, shown.length)) + (total ? 2 : 1)) * ROW + 3}px`, maxWidth: `${width + 2}px` }}
        onScroll={event => setTop(Math.floor(event.currentTarget.scrollTop / ROW / 4) * 4)}>
        <table role={tree ? "treegrid" : "grid"} aria-label={label} aria-rowcount={shown.length + 1 + (total ? 1 : 0)} aria-colcount={fits.length} tabIndex={0}
          aria-activedescendant={activeAt < 0 ? undefined : rowId(from + activeAt)} onKeyDown={pressed} style={{ width: `${width}px` }}>
          <colgroup>{fits.map(one => <col key={one.column.key} style={{ width: `${one.width}px` }} />)}</colgroup>
          <thead><tr aria-rowindex={1}>{fits.map(one => <Head key={one.column.key} table={name} drawn={one} sort={sort} isTree={tree !== undefined} />)}</tr></thead>
          <tbody>
            {from > 0 && <Space rows={from} columns={fits.length} />}
            {inSight.map((one, i) => {
              const isSelected = props.selected === undefined ? one.id === active : one.id === props.selected;
              const classes = [props.rowClass?.(one.row) ?? "", one.isMatch ? "" : "beside", isSelected ? "selected" : "", one.id === active ? "active" : ""];
              return (
                <tr key={one.id} id={rowId(from + i)} class={classes.filter(Boolean).join(" ")} aria-rowindex={from + i + 2} aria-selected={isSelected}
                  aria-level={tree ? one.depth + 1 : undefined} aria-expanded={one.open ?? undefined} onClick={event => clicked(event, one)}>
                  {fits.map((column, k) => (
                    <td key={column.column.key} role="gridcell" class={isNumeric(column.column) ? "number" : undefined}>
                      {k === 0 && tree && <Fold one={one} />}
                      <Cell drawn={column} row={one.row} />
                    </td>
                  ))}
                </tr>
              );
            })}
            {until < shown.length && !isPrinted && <Space rows={shown.length - until} columns={fits.length} />}
            {!shown.length && <tr><td class="wide" role="gridcell" colSpan={fits.length}>{query ? `No name contains “${cut(query, 60)}”.` : (props.empty ?? "Nothing was recorded.")}</td></tr>}
          </tbody>
          {total && (
            <tfoot>
              <tr aria-rowindex={shown.length + 2}>
                {fits.map((column, k) => <td key={column.column.key} role="gridcell" class={isNumeric(column.column) ? "number" : undefined}>{k === 0 && tree && <span class="leaf" />}<Cell drawn={column} row={total} /></td>)}
              </tr>
            </tfoot>
          )}
        </table>
      </div>
      {isPrinted && shown.length > PRINTED && <p class="note">The first {PRINTED} of {count(shown.length)} rows.</p>}
    </div>
  );

  function clicked(event: MouseEvent, one: Shown<R>): void {
    const target = event.target as Element;
    if (target.closest("a, button")) return;
    if (target.closest(".fold") && one.open !== null) {
      setActive(one.id);
      fold([[one.id, !one.open]]);
    } else choose(one, true);
  }
}

function SearchField({ query, onSearch }: { query: string; onSearch: (text: string) => void }): JSX.Element {
  return <input type="search" placeholder="Search names" aria-label="Search names in the table" value={query} onInput={event => onSearch(event.currentTarget.value)} />;
}

/** A click: largest first (names: A to Z); again: the other way round; of a tree, then the order as given. */
function Head<R>({ table, drawn: { column, format }, sort, isTree }: { table: string; drawn: Drawn<R>; sort: Sort | null; isTree: boolean }): JSX.Element {
  const isSorted = sort?.key === column.key;
  const click = (): void => {
    const firstDown = isNumeric(column);
    const { [table]: _, ...others } = sorts.value;
    if (isSorted && sort.descending !== firstDown && isTree) sorts.value = others;
    else sorts.value = { ...others, [table]: { key: column.key, descending: isSorted ? !sort.descending : firstDown } };
  };
  return (
    <th scope="col" role="columnheader" data-key={column.key} class={isNumeric(column) ? "number" : undefined} title={column.help} aria-sort={!isSorted ? "none" : sort.descending ? "descending" : "ascending"}>
      <button type="button" onClick={click}>{column.title}{format?.unit && <span class="unit"> {format.unit}</span>}</button>
    </th>
  );
}

function Fold<R>({ one }: { one: Shown<R> }): JSX.Element {
  const indent = `${LEVEL * Math.min(DEEPEST_INDENT, one.depth)}px`;
  return <span class={one.open === null ? "leaf" : "fold"} style={{ marginLeft: indent }} aria-hidden="true">{one.open === null ? "" : one.open ? "▾" : "▸"}</span>;
}

/** Rows that are out of sight. */
function Space({ rows, columns }: { rows: number; columns: number }): JSX.Element {
  return <tr class="space" aria-hidden="true"><td colSpan={columns} style={{ height: `${rows * ROW}px` }} /></tr>;
}

function saveCsv(name: string, text: string): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob(["\ufeff", text], { type: "text/csv" })); // the mark tells spreadsheets that it is UTF-8
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
