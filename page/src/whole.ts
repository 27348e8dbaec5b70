/** What is read once for the whole page: the events of the timeline, short names of kernels. */
import { computed, signal } from "@preact/signals";
import { rowsOf } from "./basis";
import { kernelNames, type ShortName } from "./names";
import { columnOf, type PageData } from "./page_data";
import type { Selection } from "./state";
import type { GapOf } from "./targets";
import { readTimeline, type Timeline } from "./timeline/data";

/** undefined: not read yet; null: there is none. */
export const timeline = signal<Timeline | null | undefined>(undefined);
export const timelineFailure = signal("");

const NAMED = { layer: ["layers", "layer"], kernel: ["kernels", "name"], op: ["operators", "op"] } as const;
let named: ReadonlyMap<string, ReadonlySet<unknown>> = new Map();

export function readNames(data: PageData): void {
  named = new Map(Object.entries(NAMED).map(([kind, [table, key]]) => [kind, new Set(columnOf(data, table, key))]));
}

/** Whether the page knows anything of it: rows may name what only another part of a result, or nothing, has. */
export const isThere = (one: Selection): boolean => !("name" in one) || (one.name !== "" && (named.get(one.kind)?.has(one.name) ?? true));

export async function loadTimeline(data: PageData): Promise<void> {
  try {
    timeline.value = await readTimeline(data);
  } catch (error) {
    console.error(error);
    timelineFailure.value = error instanceof Error ? error.message : String(error);
    timeline.value = null;
  }
}

const gaps = computed((): GapOf[] | null => {
  const events = timeline.value;
  if (!events) return null;
  const cause = events.gaps.column("cause");
  return Array.from(events.gaps.duration_ns, (durationNs, row) => ({ row, durationNs, cause: events.head.causes[cause[row]!] ?? "" }));
});

/** All gaps of the timeline; null where there is none. */
export const theGaps = (): readonly GapOf[] | null => gaps.value;

/** The part of the step whose makings are shown; "idle": all parts in which the device has nothing to do. */
export const openPart = signal<string | null>(null);

let names: ShortName | null = null;

export const theNames = (data: PageData): ShortName => (names ??= kernelNames(rowsOf(data, "kernels").map(row => row["name"] as string)));
