/**
 * What is shown and chosen, once for the whole page. All of it stands in the address, so that a link or a reload
 * shows the same:
 *
 *     #kernels?select=layer:model.layers.3&step=7&range=1200000-3400000&sort=kernels:-time
 */
import { effect, signal } from "@preact/signals";

export type Place = "step" | "layers" | "kernels" | "memory" | "run";
export const PLACES: readonly Place[] = ["step", "layers", "kernels", "memory", "run"];

/** One thing of the run. `event` and `gap` are rows of the timeline's tables. */
export type Selection =
  | { kind: "layer" | "kernel" | "op" | "finding"; name: string }
  | { kind: "step" | "event" | "gap"; number: number };

/** A stretch of time: nanoseconds since the timeline's begin. */
export type Range = readonly [fromNs: number, toNs: number];

export interface Sort {
  key: string;
  descending: boolean;
}

export const place = signal<Place>("step");
export const selection = signal<Selection | null>(null);
export const step = signal<number | null>(null); // number of the step that the timeline shows; null: all that it has
export const range = signal<Range | null>(null); // dragged in the timeline
export const by = signal(""); // how Kernels groups its rows; "": by kernel, or by op where one is selected
export const sorts = signal<Readonly<Record<string, Sort>>>({}); // by the name of a table

/** Choose one thing, wherever it was clicked. Choosing it again lets it go. */
export function select(chosen: Selection | null): void {
  selection.value = chosen !== null && isSame(chosen, selection.value) ? null : chosen;
}

/** Go to a place, and choose something there. */
export function go(to: Place, chosen?: Selection): void {
  if (chosen && !isSame(chosen, selection.value)) by.value = ""; // so that its row is there
  if (chosen) selection.value = chosen;
  place.value = to;
}

export function isSame(one: Selection | null, other: Selection | null): boolean {
  return text(one) === text(other);
}

function text(one: Selection | null): string {
  if (one === null) return "";
  return `${one.kind}:${"name" in one ? one.name : one.number}`;
}

/** The address of a place with something chosen, for a link. */
export function address(to: Place, chosen: Selection | null = null): string {
  const parts = new URLSearchParams();
  if (chosen) parts.set("select", text(chosen).toWellFormed());
  const query = parts.toString();
  return `#${to}${query ? `?${query}` : ""}`;
}

// ---- the address bar follows, and leads -------------------------------------------------------------------------------

function written(): string {
  const parts = new URLSearchParams();
  if (selection.value) parts.set("select", text(selection.value).toWellFormed());
  if (step.value !== null) parts.set("step", String(step.value));
  if (range.value) parts.set("range", range.value.map(ns => String(Math.round(ns))).join("-"));
  if (by.value) parts.set("by", by.value);
  for (const [table, sort] of Object.entries(sorts.value)) parts.append("sort", `${table}:${sort.descending ? "-" : ""}${sort.key}`);
  const query = parts.toString();
  return `#${place.value}${query ? `?${query}` : ""}`;
}

function read(hash: string): void {
  const [to = "", query = ""] = hash.replace(/^#/, "").split(/\?(.*)/s);
  const parts = new URLSearchParams(query);
  place.value = PLACES.find(one => one === to) ?? "step";
  selection.value = parsed(parts.get("select"));
  step.value = whole(parts.get("step"));
  const [from, until] = (parts.get("range") ?? "").split("-").map(whole);
  range.value = from != null && until != null && from < until ? [from, until] : null;
  by.value = parts.get("by") ?? "";
  const found: Record<string, Sort> = {};
  for (const one of parts.getAll("sort")) {
    const [table, key] = one.split(/:(.*)/s);
    if (table && key) found[table] = { key: key.replace(/^-/, ""), descending: key.startsWith("-") };
  }
  sorts.value = found;
}

function parsed(chosen: string | null): Selection | null {
  const [kind, name] = (chosen ?? "").split(/:(.*)/s);
  if (!name) return null;
  if (kind === "layer" || kind === "kernel" || kind === "op" || kind === "finding") return { kind, name };
  const number = whole(name);
  return number !== null && (kind === "step" || kind === "event" || kind === "gap") ? { kind, number } : null;
}

function whole(digits: string | null | undefined): number | null {
  return digits && /^\d{1,15}$/.test(digits) ? Number(digits) : null;
}

/** Read the address now and whenever it changes; write into it what is chosen: a new place is a step of the history. */
export function followAddress(): void {
  read(location.hash);
  let at = place.value;
  addEventListener("hashchange", () => {
    read(location.hash);
    at = place.value;
  });
  effect(() => {
    const hash = written();
    if (hash === location.hash) return;
    if (place.value === at) history.replaceState(null, "", hash);
    else history.pushState(null, "", hash);
    at = place.value;
  });
}
