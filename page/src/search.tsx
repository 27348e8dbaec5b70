/** Search over layers, kernels, ops, findings and steps: `/` opens it, arrows choose, Enter goes there. */
import { signal } from "@preact/signals";
import type { JSX } from "preact";
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { rowsOf } from "./basis";
import { clean, count, cut, full } from "./format";
import type { PageData } from "./page_data";
import { homeOf } from "./panel/facts";
import { go, type Selection } from "./state";
import { findingName, findingsOf } from "./targets";
import { theNames } from "./whole";

export const searching = signal(false);

interface Item {
  select: Selection;
  shown: string;
  text: string; // that is searched, in small letters
  weight: number; // share of all time: of equally good ones the larger comes first
}

const MOST = 40;

/** Everything that has a name, each once. */
function itemsOf(data: PageData): Item[] {
  const total = (data["time"].total_us as number) || 1;
  const found = new Map<string, Item>();
  const names = theNames(data);
  const add = (select: Selection, name: string, shown: string, time: number): void => {
    const key = `${select.kind} ${name}`;
    const there = found.get(key);
    if (there) there.weight += time / total;
    else found.set(key, { select, shown, text: clean(name).toLowerCase(), weight: time / total });
  };
  for (const finding of findingsOf(data)) add({ kind: "finding", name: findingName(data, finding) }, `${finding["title"]} ${finding["id"]}`, cut(finding["title"], 140), 2 * total);
  for (const row of rowsOf(data, "layers")) if (row["layer"]) add({ kind: "layer", name: row["layer"] as string }, `${row["layer"]} ${row["class_name"]}`, cut(row["layer"], 110), row["time_us"] as number);
  for (const row of rowsOf(data, "kernels")) add({ kind: "kernel", name: row["name"] as string }, row["name"] as string, names(row["name"] as string, 100), row["time_us"] as number);
  for (const row of rowsOf(data, "operators")) add({ kind: "op", name: row["op"] as string }, row["op"] as string, cut(row["op"], 100), row["self_time_us"] as number);
  for (const row of rowsOf(data, "steps")) if (row["step"] !== null) add({ kind: "step", number: row["step"] as number }, `step ${row["step"]}`, `step ${row["step"]}`, 0);
  return [...found.values()];
}

/** All words somewhere in the name, or its kind; a name that ends in the last word, then one with words at their begin, first. */
function searched(items: readonly Item[], query: string): Item[] {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  const scored: { item: Item; score: number }[] = [];
  for (const item of items) {
    if (!words.every(word => item.text.includes(word) || item.select.kind === word)) continue;
    const last = words.at(-1) ?? "";
    const score = (item.text.endsWith(last) && last ? 2 : 0) + words.filter(word => new RegExp(`(^|[^a-z0-9])${word.replace(/[^a-z0-9]/g, "\\$&")}`).test(item.text)).length + Math.min(1, item.weight);
    scored.push({ item, score });
  }
  return scored.sort((a, b) => b.score - a.score).map(one => one.item);
}

export function Search({ data }: { data: PageData }): JSX.Element | null {
  useEffect(() => {
    const open = (event: KeyboardEvent): void => {
      const typed = event.target instanceof HTMLElement && /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName);
      if (event.key !== "/" || typed || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      searching.value = true;
    };
    addEventListener("keydown", open);
    return () => removeEventListener("keydown", open);
  }, []);
  return searching.value ? <Palette data={data} /> : null;
}

function Palette({ data }: { data: PageData }): JSX.Element {
  const dialog = useRef<HTMLDialogElement>(null);
  const [query, setQuery] = useState("");
  const [at, setAt] = useState(0);
  const items = useMemo(() => itemsOf(data), [data]);
  const found = useMemo(() => searched(items, query), [items, query]);
  const shown = found.slice(0, MOST);
  useLayoutEffect(() => { dialog.current!.showModal(); }, []); // before the next key is typed
  useEffect(() => { document.getElementById(`found-${at}`)?.scrollIntoView({ block: "nearest" }); }, [at]);
  const close = (): void => { searching.value = false; };
  const choose = (item: Item | undefined): void => {
    if (!item) return;
    close();
    go(homeOf(item.select), item.select);
  };
  const keys = (event: KeyboardEvent): void => {
    const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (by && shown.length) setAt((at + by + shown.length) % shown.length);
    else if (event.key === "Enter") choose(shown[at]);
    else return;
    event.preventDefault();
  };
  return (
    <dialog ref={dialog} id="search" aria-label="Search" onClose={close} onClick={event => { if (event.target === dialog.current) close(); }}>
      <input type="text" role="combobox" aria-label="Search layers, kernels, ops, findings and steps" placeholder="Layer, kernel, op, finding, step" aria-expanded="true" aria-controls="found" aria-autocomplete="list"
        aria-activedescendant={shown.length ? `found-${at}` : undefined} autocomplete="off" spellcheck={false} value={query} onKeyDown={keys} onInput={event => { setQuery(event.currentTarget.value); setAt(0); }} />
      <ul id="found" role="listbox" aria-label="Found">
        {shown.map((item, i) => (
          <li key={`${item.select.kind} ${item.text}`} id={`found-${i}`} role="option" aria-selected={i === at} title={full(item.text)} onClick={() => choose(item)}><span class="kind">{item.select.kind}</span> {item.shown}</li>
        ))}
      </ul>
      <p class="note" role="status">{!found.length ? "Nothing in this run is called so." : found.length > MOST ? `The first ${MOST} of ${count(found.length)}: type more of the name` : `${count(found.length)} found`}. ↑ ↓ choose, Enter goes there, Escape closes.</p>
    </dialog>
  );
}
