/** Memory: how much is held when, by whom, and what would make the peak lower. */
import { type Signal, useSignal } from "@preact/signals";
import type { JSX } from "preact";
import { useMemo, useRef } from "preact/hooks";
import { categoryName, grouped, rowsOf, sum, why } from "../basis";
import { CATEGORY_HELP, markColumn, ofSelection, pickColumn } from "../cells";
import { Bars, Figure, Shares } from "../chart";
import { colorOf } from "../colors";
import { bytes, capital, count, cut, isKnown, share, us } from "../format";
import { categoriesOf, type Curve, MemoryCurve, placeInSteps, pointAt, type Stretch } from "../memory_curve";
import type { PageData, Row } from "../page_data";
import { Later, Section, Segments } from "../parts";
import { range, select, selection } from "../state";
import { type Column, Table } from "../table";

type Draw = (props: { data: PageData }) => JSX.Element | null;

export function MemoryPlace({ data }: { data: PageData }): JSX.Element {
  if (!data["memory"]?.peak) return <WhyNot data={data} />;
  return <Known data={data} />;
}

function WhyNot({ data }: { data: PageData }): JSX.Element {
  const reason = why(data, "memory", "not available");
  return (
    <Section title="Memory">
      <p class="notice">{reason ? `${capital(cut(reason, 400))}.` : "No allocation was recorded in this trace."}</p>
      <p class="note">Memory is recorded with profile_memory=True; ProfilerWrapper does so unless told otherwise.</p>
    </Section>
  );
}

function Known({ data }: { data: PageData }): JSX.Element {
  const { memory } = data;
  const curve = memory.curve as Curve | null;
  const moment = useSignal<number | null>(null);
  const life = useSignal<Stretch | null>(null);
  const top = useRef<HTMLDivElement>(null);
  const clock = useMemo(() => timelineClock(data), [data]);
  const chosen = range.value && curve ? clock.toStretch(range.value, curve) : null;
  const show = () => top.current?.scrollIntoView({ block: "start" });
  return (
    <>
      <Figures data={data} />
      {memory.known_owners === false && <p class="note">What the model and its optimizers hold is not known (no model was given, or a trace from elsewhere): gradients and optimizer state are inferred from what stays.</p>}
      <div ref={top}>
        <Section title="Over time">
          {curve ? <MemoryCurve data={data} moment={moment} chosen={chosen} life={life} onRange={one => { range.value = one && clock.toRange(one); }} />
            : <p class="note">The curve is not in this result: it was written by an older version.</p>}
          {range.value && !chosen && <p class="note">The range that is chosen lies outside of what was recorded of memory.</p>}
          {curve && curve.events > curve.time_us.length && <p class="note">{count(curve.time_us.length)} of {count(curve.events)} events are drawn: the highest and lowest of each stretch, all peaks of steps, and what is held in pauses.</p>}
        </Section>
      </div>
      <Later>
        {curve && chosen ? <InRange data={data} curve={curve} chosen={chosen} life={life} />
          : curve && moment.value !== null ? <AtMoment data={data} curve={curve} moment={moment} life={life} /> : <AtPeak data={data} />}
        {(memory.leaks?.length ? [Leaks, Changes, Moments, Blocks] : [Changes, Leaks, Moments, Blocks]).map((One, i) => <One key={i} data={data} />)}
        <Later>
          <Largest data={data} life={life} show={show} />
          <Ops data={data} />
        </Later>
      </Later>
    </>
  );
}

/** Between the timeline's time, in which a range is chosen, and microseconds since the recording of memory began. */
function timelineClock(data: PageData): { toStretch: (chosen: readonly [number, number], curve: Curve) => Stretch | null; toRange: (one: Stretch) => readonly [number, number] } {
  const origin = data["views"]?.timeline?.origin_ns;
  const start = data["memory"]?.curve?.start_ns;
  const aheadNs = isKnown(origin) && isKnown(start) ? Number(BigInt(Math.round(start)) - BigInt(origin)) : 0;
  return {
    toStretch: ([from, to], curve) => {
      const ends = [from, to].map(ns => Math.min(curve.end_us, Math.max(0, (ns - aheadNs) / 1000)));
      return ends[0]! < ends[1]! ? [ends[0]!, ends[1]!] : null;
    },
    toRange: ([from, to]) => [Math.round(from * 1000 + aheadNs), Math.max(Math.round(from * 1000 + aheadNs) + 1, Math.round(to * 1000 + aheadNs))],
  };
}

const Figures: Draw = ({ data }) => {
  const { memory } = data;
  const { peak, slope } = memory;
  const room = data["overview"]?.device_memory_bytes;
  const known = isKnown(peak.reserved_bytes);
  return (
    <>
      <div class="figures">
        <Figure label={`Peak allocated on ${memory.device}`} value={bytes(peak.allocated_bytes)} help={[peakPlace(memory), room ? `${share(peak.allocated_bytes / room)} of the device's ${bytes(room)}` : ""].filter(Boolean).join("; ")} />
        {known && <Figure label="Peak reserved" value={bytes(peak.reserved_bytes)} help={peak.reserved ? `${bytes(peak.reserved_bytes - peak.reserved.allocated_bytes)} of it free then` : undefined} />}
        <Figure label="Allocated at the end" value={bytes(memory.allocated_bytes)} />
        {slope && <Figure label="Grows by, a step" value={bytes(Math.round(slope.bytes_per_step))} help={`${isKnown(slope.error_bytes_per_step) ? `± ${bytes(Math.round(slope.error_bytes_per_step))}, ` : ""}over ${slope.steps} steps`} />}
      </div>
      {!known && memory.device !== "cpu" && <p class="note">What the allocator reserves is not known from the trace.</p>}
    </>
  );
};

const peakPlace = (memory: PageData): string => [
  isKnown(memory["peak"].step) ? `step ${memory["peak"].step}` : "",
  memory["peak"].phase,
  memory["curve"] ? `${us((memory["peak"].time_ns - memory["curve"].start_ns) / 1000)} after the recording began` : "",
].filter(Boolean).join(", ");

// ---- who held what ----------------------------------------------------------------------------------------------------

const parts = (data: PageData, categories: Record<string, number>) => Object.entries(categories)
  .map(([name, value]) => ({ name: categoryName(data, name), value, color: colorOf(data, "category", name), help: CATEGORY_HELP[name] }))
  .sort((a, b) => b.value - a.value);

const category = (data: PageData): Column<Row> => markColumn(data, "category", "category", "Category");
const layer = (more?: Partial<Column<Row>>): Column<Row> => pickColumn("layer", "layer", "Layer", { missing: "the layer is not known", help: "The innermost layer. A click selects it", ...more });
const op = (more?: Partial<Column<Row>>): Column<Row> => pickColumn("op", "op", "Allocated by", { missing: "no op was around the allocation", help: "A click selects the op", ...more });
const phase = (data: PageData, more?: Partial<Column<Row>>): Column<Row> => markColumn(data, "phase", "phase", "Phase", { missing: "the phase is not known", spare: 2, ...more });

const AtPeak: Draw = ({ data }) => {
  const { memory } = data;
  const total = memory.peak.allocated_bytes as number;
  const owners = (memory.peak.owners ?? []) as Row[];
  const listed = sum(owners, "bytes") ?? 0;
  const { rows, said } = ofSelection(data, owners, { layer: "layer", op: "op" });
  const columns = useMemo((): Column<Row>[] => [
    category(data), layer(),
    ...(owners.some(row => (row["call_path"] as string[] | undefined)?.length) ? [{ key: "call_path", title: "Called as", kind: "text", longest: 60, spare: 5, help: "Of a layer that several call", value: (row: Row) => (row["call_path"] as string[]).join(" > ") || undefined } as const] : []),
    ...(owners.some(row => row["name"]) ? [{ key: "name", title: "Tensor", kind: "text", longest: 48, spare: 1, value: (row: Row) => row["name"] || undefined } as const] : []),
    op(), phase(data, { missing: "it was there before the recording" }),
    { key: "bytes", title: "Size", kind: "bytes" },
    { key: "share", title: "Share", kind: "share", bar: true, help: "of the peak", value: row => (total ? (row["bytes"] as number) / total : null) },
    { key: "count", title: "Allocations", kind: "count", spare: 3 },
  ], [data]);
  return (
    <Section title="At the peak: who holds it">
      <Shares title={peakPlace(memory)} parts={parts(data, memory.categories ?? {})} format={bytes} of="the peak" />
      <p class="note">{listed < total ? `The ${owners.length} largest holders, ${share(listed / total)} of the peak.` : "All of the peak."} A click in the curve shows any other moment, a drag what happens in a range.</p>
      {said}
      <Table name="peak" label="Who holds the memory at the peak" rows={rows} columns={columns} limit={15} />
    </Section>
  );
};

const allocationColumns = (data: PageData): Column<Row>[] => [
  { key: "size_bytes", title: "Size", kind: "bytes" },
  category(data), layer(), op(), phase(data),
  { key: "allocated_us", title: "Allocated at", kind: "us", help: "since the recording began", spare: 3 },
  { key: "released_us", title: "Freed at", kind: "us", missing: "alive when the recording ended", like: "allocated_us", spare: 4 },
  { key: "life_us", title: "Lives", kind: "us", missing: "longer than the recording", value: row => (isKnown(row["released_us"]) ? (row["released_us"] as number) - (row["allocated_us"] as number) : null) },
];

/** Allocations; the one that is clicked shows in the curve when it lives. */
function Allocations({ data, name, label, rows, life, limit = 12, empty }: { data: PageData; name: string; label: string; rows: readonly Row[]; life: Signal<Stretch | null>; limit?: number; empty?: string }): JSX.Element {
  const columns = useMemo(() => allocationColumns(data), [data]);
  const end = data["memory"].curve?.end_us as number | undefined;
  const lives = (row: Row | null) => { life.value = row && end !== undefined ? [row["allocated_us"] as number, (row["released_us"] as number | null) ?? end] : null; };
  return <Table name={name} label={label} rows={rows} columns={columns} limit={limit} onSelect={lives} {...(empty ? { empty } : {})} />;
}

function AtMoment({ data, curve, moment, life }: { data: PageData; curve: Curve; moment: Signal<number | null>; life: Signal<Stretch | null> }): JSX.Element {
  const time = moment.value!;
  const point = pointAt(curve, time);
  const all = rowsOf(data, "allocations");
  const alive = useMemo(() => bySize(all.filter(row => (row["allocated_us"] as number) <= time && ((row["released_us"] as number | null) ?? Infinity) > time)), [data, time]);
  const held = sum(alive, "size_bytes") ?? 0;
  const total = curve.allocated_bytes[point]!;
  const { rows, said } = ofSelection(data, alive, { layer: "layer", op: "op" });
  const where = placeInSteps(curve, time);
  return (
    <Section title={`At ${us(time)}: who holds it`}>
      <Shares title={`${where ? `${where}: ` : ""}${bytes(total)} allocated`} parts={parts(data, Object.fromEntries(categoriesOf(curve).map(name => [name, curve.categories[name]![point]!])))} format={bytes} of="what is allocated" />
      <div class="tools"><button type="button" class="small" onClick={() => { moment.value = null; }}>Back to the peak</button></div>
      <p class="note">Of the {count(all.length)} largest allocations of the recording {count(alive.length)} are alive{total ? `: ${bytes(held)}, ${share(Math.min(1, held / total))} of what is allocated` : ""}. What was there before the recording, and smaller ones, hold the rest.</p>
      {said}
      <Allocations data={data} name="moment" label={`Allocations alive at ${us(time)}`} rows={rows} life={life} empty="None of the largest allocations is alive then." />
    </Section>
  );
}

const bySize = (rows: Row[]): Row[] => rows.sort((a, b) => (b["size_bytes"] as number) - (a["size_bytes"] as number));

type Event = "allocated" | "freed" | "held";

function InRange({ data, curve, chosen, life }: { data: PageData; curve: Curve; chosen: Stretch; life: Signal<Stretch | null> }): JSX.Element {
  const event = useSignal<Event>("allocated");
  const [from, to] = chosen;
  const found = useMemo(() => {
    const isIn = (time: unknown) => isKnown(time) && (time as number) >= from && (time as number) <= to;
    const all = rowsOf(data, "allocations");
    return {
      allocated: bySize(all.filter(row => isIn(row["allocated_us"]))),
      freed: bySize(all.filter(row => isIn(row["released_us"]))),
      held: bySize(all.filter(row => (row["allocated_us"] as number) < from && ((row["released_us"] as number | null) ?? Infinity) > to)),
    };
  }, [data, from, to]);
  const points = [pointAt(curve, from), pointAt(curve, to)] as const;
  const ofRange = (sizes: readonly number[]) => sizes.slice(points[0], points[1] + 1);
  const line = (name: string, label: string, sizes: readonly number[]): Row => {
    const within = ofRange(sizes);
    return { category: name, label, begin: within[0], end: within.at(-1), change: within.at(-1)! - within[0]!, most: within.reduce((a, b) => Math.max(a, b)) };
  };
  const lines = categoriesOf(curve).map(name => line(name, categoryName(data, name), curve.categories[name]!)).filter(row => row["most"]);
  const columns = useMemo((): Column<Row>[] => [
    { ...category(data), value: row => row["label"], cell: row => (row["category"] ? category(data).cell!(row, 40) : undefined) },
    { key: "begin", title: "At its begin", kind: "bytes" }, { key: "end", title: "At its end", kind: "bytes", like: "begin" },
    { key: "change", title: "Change", kind: "bytes", like: "begin" }, { key: "most", title: "Highest in it", kind: "bytes", like: "begin" },
  ], [data]);
  const { rows, said } = ofSelection(data, found[event.value], { layer: "layer", op: "op" });
  const options = (["allocated", "freed", "held"] as const).map(one => [one, `${{ allocated: "Allocated in it", freed: "Freed in it", held: "Alive all through" }[one]}: ${count(found[one].length)}, ${bytes(sum(found[one], "size_bytes") ?? 0)}`] as const);
  const where = [placeInSteps(curve, from), placeInSteps(curve, to)];
  return (
    <Section title={`From ${us(from)} to ${us(to)}: what is allocated and freed`}>
      <p class="note">{us(to - from)}{where[0] || where[1] ? `, from ${where[0] || "before the steps"} to ${where[1] || "after the steps"}` : ""}, as the curve has it. <button type="button" class="small" onClick={() => { range.value = null; }}>Leave the range</button></p>
      <Table name="range-categories" label="Categories in the range" rows={lines} columns={columns} total={line("", "All", curve.allocated_bytes)} search={false} />
      <div class="tools"><Segments<Event> label="Allocations of the range" options={options} chosen={event.value} onChoose={one => { event.value = one; }} /></div>
      <p class="note">Of the {count(rowsOf(data, "allocations").length)} largest allocations of the recording.</p>
      {said}
      <Allocations data={data} name="range" label="Allocations of the range" rows={rows} life={life} empty="None of the largest allocations." />
    </Section>
  );
}

// ---- what to do about it ----------------------------------------------------------------------------------------------

const Changes: Draw = ({ data }) => {
  const changes = (data["memory"].changes ?? []) as Row[];
  const columns = useMemo((): Column<Row>[] => [
    { key: "text", title: "Change", kind: "text", longest: 110 },
    { key: "saves_bytes", title: "Saves", kind: "bytes" },
    { key: "share", title: "Of the peak", kind: "share", bar: true, value: row => (row["saves_bytes"] as number) / data["memory"].peak.allocated_bytes },
    ...(changes.some(row => isKnown(row["costs_ns"])) ? [{ key: "costs_us", title: "Costs", kind: "us", help: "time more, a step", missing: "not known from this run", value: (row: Row) => (isKnown(row["costs_ns"]) ? (row["costs_ns"] as number) / 1000 : null) } as const] : []),
    ...(changes.some(row => (row["layers"] as string[]).length) ? [pickColumn("layer", "layers", "Layers")] : []),
  ], [data]);
  if (!changes.length) return null;
  return (
    <Section title="What would lower the peak">
      <p class="note">Estimated from this run; a saving counts up to the next peak.{changes.every(row => !isKnown(row["costs_ns"])) ? " What it costs in time is not known from this run." : ""}</p>
      <Table name="changes" label="What would lower the peak" rows={changes} columns={columns} search={false} />
    </Section>
  );
};

const Leaks: Draw = ({ data }) => {
  const leaks = (data["memory"].leaks ?? []) as Row[];
  const steps = data["page"].step_numbers.length;
  const columns = useMemo((): Column<Row>[] => [
    category(data), layer(), op(), phase(data),
    { key: "bytes_per_step", title: "Stays, a step", kind: "bytes" },
    { key: "count_per_step", title: "Allocations, a step", kind: "number" },
    { key: "steps", title: "Steps", kind: "count", help: "over which this was seen" },
  ], [data]);
  return (
    <Section title={leaks.length ? `Leaks (${leaks.length})` : "Leaks"}>
      {leaks.length ? <Table name="leaks" label="Leaks" rows={leaks} columns={columns} search={false} />
        : <p class="note">{steps > 1 && data["memory"].leaks ? "None: nothing that a step allocates stays step after step." : "Not known: that takes more than one step, and the frees of all threads."}</p>}
    </Section>
  );
};

const Moments: Draw = ({ data }) => {
  const moments = (data["memory"].moments ?? []) as Row[];
  const of = (row: Row, name: string) => (row["categories"] as Record<string, number>)[name];
  const columns = useMemo((): Column<Row>[] => [
    { key: "label", title: "Moment", kind: "text" },
    { key: "step", title: "Step", kind: "number", missing: "in no step" },
    { key: "allocated_bytes", title: "Allocated", kind: "bytes" },
    ...(moments.some(row => isKnown(row["reserved_bytes"])) ? [{ key: "reserved_bytes", title: "Reserved", kind: "bytes", like: "allocated_bytes" } as const] : []),
    ...Object.keys(data["memory"].categories ?? {}).filter(name => moments.some(row => of(row, name)))
      .map((name, i): Column<Row> => ({ key: name, title: categoryName(data, name), kind: "bytes", like: "allocated_bytes", spare: i + 1, value: row => of(row, name), ...(CATEGORY_HELP[name] ? { help: CATEGORY_HELP[name] } : {}) })),
  ], [data]);
  if (!moments.length) return null;
  const chosen = selection.value;
  return (
    <Section title="After each phase">
      <Table name="moments" label="Memory after each phase" rows={moments} columns={columns} search={false} limit={12} rowClass={row => (chosen?.kind === "step" && chosen.number === row["step"] ? "selected" : "")} />
    </Section>
  );
};

const Blocks: Draw = ({ data }) => {
  const rows = useMemo(() => rowsOf(data, "layers").filter(row => row["kind"] === "block" && row["phase"] !== "recompute" && isKnown(row["peak_bytes"])).sort((a, b) => (a["order"] as number) - (b["order"] as number)), [data]);
  const kinds = [...grouped(rows, row => `${row["class_name"]} ${row["phase"]}`).values()].filter(group => group.length > 1);
  if (!kinds.length) return null;
  const chosen = selection.value?.kind === "layer" ? selection.value.name : null;
  const kept = rowsOf(data, "layers").some(row => row["phase"] === "backward") ? "kept for the backward" : "left behind";
  return (
    <Section title="Over the blocks">
      <p class="note">Per call: what of a block's allocations is {kept}, and the highest allocated while inside. A click selects the block.</p>
      <div class="multiples">
        {kinds.flatMap(group => (["retained_bytes", "peak_bytes"] as const).map(key => (
          <Bars key={`${group[0]!["class_name"]} ${group[0]!["phase"]} ${key}`} title={`${group[0]!["class_name"]}: ${key === "peak_bytes" ? "highest while inside" : kept}`}
            values={group.map(row => row[key] as number | null)} labels={group.map(row => row["layer"] as string)} format={bytes} color={colorOf(data, "phase", group[0]!["phase"] as string)}
            marked={new Set(group.flatMap((row, i) => (row["layer"] === chosen ? [i] : [])))} onChoose={i => select({ kind: "layer", name: group[i]!["layer"] as string })} />
        )))}
      </div>
    </Section>
  );
};

function Largest({ data, life, show }: { data: PageData; life: Signal<Stretch | null>; show: () => void }): JSX.Element | null {
  const all = rowsOf(data, "allocations");
  if (!all.length) return null;
  const { rows, said } = ofSelection(data, all, { layer: "layer", op: "op" });
  return (
    <Section title="Largest allocations">
      <p class="note">The {count(all.length)} largest of the recording. A click on one marks in the curve how long it lives. {life.value && <button type="button" class="small" onClick={show}>See it in the curve ↑</button>}</p>
      {said}
      <Allocations data={data} name="allocations" label="Largest allocations" rows={rows} life={life} limit={15} />
    </Section>
  );
}

const Ops: Draw = ({ data }) => {
  const all = rowsOf(data, "op_memory");
  const columns = useMemo((): Column<Row>[] => {
    const total = sum(all, "allocated_bytes");
    const named = op({ title: "Op", longest: 70 });
    return [
      { ...named, cell: (row, letters) => (row["op"] ? named.cell!(row, letters) : <span class="quiet">(outside of all ops)</span>) },
      { key: "allocations", title: "Allocations", kind: "count" },
      { key: "allocated_bytes", title: "Allocated", kind: "bytes", help: "sum over its allocations" },
      { key: "share", title: "Share", kind: "share", bar: true, help: "of all that was allocated", value: row => (total ? (row["allocated_bytes"] as number) / total : undefined) },
      { key: "kept_bytes", title: "Alive after", kind: "bytes", help: "of it, not yet freed when the op returned", missing: "no op was around it" },
      { key: "largest_bytes", title: "Largest", kind: "bytes", help: "one allocation", spare: 1 },
    ];
  }, [data]);
  if (!all.length) return null;
  const { rows, said } = ofSelection(data, all, { op: "op" });
  return (
    <Section title="Operators by what they allocate">
      <p class="note">Over the whole recording, without what was there before. An op is charged with what it allocates itself, through aten::empty and its like too.</p>
      {said}
      <Table name="op-memory" label="Operators by what they allocate" rows={rows} columns={columns} sort={{ key: "allocated_bytes", descending: true }} limit={15} />
    </Section>
  );
};
