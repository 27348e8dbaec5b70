/** The table of kernels: one row a kernel, or groups of them; narrowed to what is selected. */
import type { JSX } from "preact";
import { useMemo, useState } from "preact/hooks";
import { grouped, onDevice, per, perStep, rowsOf, sum } from "./basis";
import { markColumn, pickColumn } from "./cells";
import { Figure, Shares } from "./chart";
import { colorOf } from "./colors";
import { count, cut, full, share, us } from "./format";
import { coresOf, groupsOfKernels, groupsOfPieces, isKernel, kernelRows, type Piece, pieces, pieceTest, rowsOfPieces, rowTest, streamPieces, UNKNOWN_LAYER } from "./kernels_rows";
import type { PageData, Row } from "./page_data";
import { Segments } from "./parts";
import { select, type Selection, selection } from "./state";
import { type Column, Table, UNFOLDING } from "./table";
import type { Timeline } from "./timeline/data";
import { theNames, timeline } from "./whole";

export type KernelGroup = "kernel" | "layer" | "phase" | "class" | "stream" | "cores";
const TITLES: Record<KernelGroup, string> = { kernel: "Kernel", layer: "Layer", phase: "Phase", class: "Class", stream: "Stream", cores: "Tensor cores" };
const CORES: Readonly<Record<string, string>> = { yes: "use tensor cores", no: "do not", unknown: "not known from the kernel's name", none: "copies and sets" };
const CORE_COLORS: Readonly<Record<string, string>> = { yes: "#009E73", no: "#D55E00", unknown: "#999999" };
const SHORT_US = 5;

// Columns that are shown together, so that no window cuts them.
const MAIN = ["name", "class", "tensor_cores", "count", "time_us", "of_selected", "share", "mean_us", "occupancy", "ops", "layers"];
const LAUNCH = ["name", "count", "time_us", "mean_us", "min_us", "max_us", "blocks_per_sm", "occupancy", "grid", "block", "registers_per_thread", "shared_memory_bytes", "copied_bytes", "copy_rate"];

interface Found {
  rows: Row[];
  isNarrowed: boolean;
  said: string; // how far the numbers reach
}

export function KernelTable({ data, by }: { data: PageData; by: KernelGroup }): JSX.Element {
  const [set, setSet] = useState<"main" | "how" | "all">("main");
  const chosen = selection.value;
  const events = timeline.value ?? null;
  const found = useMemo(() => rowsFor(data, by, chosen, events), [data, by, chosen, events]);
  const leftOut = chosen?.kind === "step" ? "share" : by === "cores" ? "tensor_cores" : ""; // a step has no share of the mean step
  const all = useMemo(() => columnsOf(data, by, found).filter(column => column.key !== leftOut), [data, by, found]);
  const keys = set === "main" ? MAIN : LAUNCH;
  const columns = useMemo(() => all.filter(column => set === "all" || keys.includes(column.key)), [all, set]);
  const selected = chosen?.kind === "kernel" ? (found.rows.find(row => row["name"] === chosen.name && !row["launch"])?.["id"] as string) : chosen?.kind === "layer" && by === "layer" ? `\0${chosen.name}` : null;
  const what = onDevice(data) ? "" : " Ops by self time: there is no device in this trace.";
  return (
    <>
      {by === "kernel" && !found.isNarrowed && <Figures data={data} />}
      {by === "class" && !found.isNarrowed && <ClassBar data={data} />}
      {by === "cores" && !found.isNarrowed && <CoreBar data={data} />}
      {found.isNarrowed && chosen && <Only of={chosen} />}
      <p class="note">{found.said || `Calls and times are ${per(data)}, ${data["page"].steps_in_words}`}; mean, least and most are those of one launch. Occupancy and blocks per SM are the profiler's estimates.{what}</p>
      <Table name={by === "kernel" ? "kernels" : `kernels-${by}`} label={`Kernels by ${TITLES[by]}`} rows={found.rows} columns={columns} csvColumns={all} {...UNFOLDING}
        sort={{ key: "time_us", descending: true }} search selected={selected ?? null}
        selectable={row => row["name"] !== undefined ? !row["launch"] : Boolean(row["isLayer"])} onSelect={row => { selection.value = row && selectionOf(data, row); }}
        rowClass={row => (row["group"] !== undefined ? "group" : chosen?.kind === "kernel" && row["name"] === chosen.name ? "selected" : "")} empty={found.isNarrowed ? "What is selected ran none." : "Nothing ran on a device."}
        tools={<Segments label="Columns" options={[["main", "Main"], ["how", "Launch"], ["all", "All columns"]]} chosen={set} onChoose={setSet} />} />
    </>
  );
}

function selectionOf(data: PageData, row: Row): Selection {
  if (row["name"] === undefined) return { kind: "layer", name: row["group"] as string };
  return { kind: onDevice(data) ? "kernel" : "op", name: row["name"] as string };
}

/** Why the layer is not known, where there is one reason. */
function groupName(data: PageData, group: string): string {
  const reasons = rowsOf(data, "unattributed").filter(row => (row["time_us"] as number) > 0);
  return group === UNKNOWN_LAYER && reasons.length === 1 ? `(${reasons[0]!["reason"]})` : group;
}

/** Complete sums where there is a timeline, else the rows of the result. */
function rowsFor(data: PageData, by: KernelGroup, chosen: Selection | null, events: Timeline | null): Found {
  const isOwn = chosen === null || chosen.kind === by; // its row is there
  const isOfPieces = isOwn ? null : pieceTest(data, chosen);
  const isOfRows = isOwn ? null : rowTest(data, chosen);
  const steps: number = chosen?.kind === "step" ? 1 : data["page"].steps;
  const said = chosen?.kind === "step" ? `Calls and times are those of step ${chosen.number}` : "";
  const groupOf: Record<KernelGroup, (piece: Piece) => string> = {
    kernel: piece => piece.name, layer: piece => piece.layer, phase: piece => piece.phase, class: piece => piece.class, stream: piece => piece.stream, cores: () => "",
  };
  if (by === "stream") {
    const drawn = events ? streamPieces(events) : [];
    const number = events?.head.steps.filter(one => one.drawn).length || 1;
    const rows = groupsOfPieces(data, isOfPieces ? drawn.filter(isOfPieces) : drawn, steps === 1 ? 1 : number, groupOf.stream);
    return { rows, isNarrowed: isOfPieces !== null, said: `Calls and times are ${steps === 1 ? "those of what the timeline draws" : `per step of the ${number} that the timeline draws`}${events?.head.note ? ` (${events.head.note})` : ""}` };
  }
  const needsPieces = by === "layer" || by === "phase" || !onDevice(data) || isOfPieces !== null;
  if (events && needsPieces && !(by === "cores" && !isOfPieces)) {
    const of = isOfPieces ? pieces(events).filter(isOfPieces) : pieces(events);
    if (by === "kernel") return { rows: rowsOfPieces(data, of, steps), isNarrowed: isOfPieces !== null, said };
    if (by === "cores") return { rows: coreGroups(rowsOfPieces(data, of, steps)), isNarrowed: true, said };
    const rows = groupsOfPieces(data, of, steps, groupOf[by]);
    return { rows: chosen?.kind === "kernel" ? rows.filter(row => row["parent"] === null) : rows, isNarrowed: isOfPieces !== null, said };
  }
  if (by === "phase") return { rows: phaseRows(data), isNarrowed: false, said: "" };
  if (by === "layer") return { rows: layerOnly(data), isNarrowed: false, said: "" };
  const rows = isOfRows ? rowsOf(data, "kernels").filter(isOfRows) : rowsOf(data, "kernels");
  const some = chosen?.kind === "op" ? "three ops" : "three layers";
  const reach = isOfRows && chosen?.kind !== "kernel" ? `Each row is one kernel in the whole model, ${per(data)}: of the result without events, a kernel names at most ${some} that launched it` : said;
  if (by === "kernel") return { rows: kernelRows(data, rows), isNarrowed: isOfRows !== null, said: reach };
  return { rows: groupsOfKernels(data, rows, by === "class" ? row => row["class"] as string : row => CORES[coresOf(row)]!), isNarrowed: isOfRows !== null, said: reach };
}

function coreGroups(rows: readonly Row[]): Row[] {
  return [...grouped(rows, row => CORES[coresOf(row)]!)].flatMap(([group, of]) => [
    { id: `\0${group}`, parent: null, group, time_us: sum(of, "time_us"), count: sum(of, "count") }, ...of.map(row => ({ ...row, parent: `\0${group}` })),
  ]);
}

/** Phases with their classes: what a result knows of them. */
function phaseRows(data: PageData): Row[] {
  const ofStep = (row: Row): Row => ({ time_us: perStep(data, row["time_us"] as number), count: perStep(data, row["count"] as number) });
  return [...grouped(rowsOf(data, "classes"), row => row["phase"] as string)].flatMap(([group, of]) => [
    { id: `\0${group}`, parent: null, group, ...ofStep({ time_us: sum(of, "time_us"), count: sum(of, "count") }) },
    ...of.map(row => ({ id: `\0${group}\0${row["class"]}`, parent: `\0${group}`, group: row["class"], class: row["class"], ...ofStep(row) })),
  ]);
}

function layerOnly(data: PageData): Row[] {
  return (data["views"].layers.self as Row[]).map(row => ({ id: row["layer"] ? `\0${row["layer"]}` : row["id"], parent: null, group: row["layer"] || row["label"], isLayer: Boolean(row["layer"]), time_us: row["time"], count: undefined }));
}

function columnsOf(data: PageData, by: KernelGroup, found: Found): Column<Row>[] {
  const kernels = rowsOf(data, "kernels");
  const isRecorded = (name: string): boolean => kernels.some(row => row[name] !== null && row[name] !== undefined);
  const total = perStep(data, data["time"].total_us as number);
  const outer = sum(found.rows.filter(row => row["parent"] === null), "time_us");
  const isOne = (row: Row): boolean => row["name"] !== undefined && isKernel(row);
  const names = theNames(data);
  const ofKernels = (key: string, title: string, kind: Column<Row>["kind"], help: string, more: Partial<Column<Row>> = {}): Column<Row>[] =>
    isRecorded(key) ? [{ key, title, kind, help, missing: row => (isOne(row) ? "not known of this kernel" : ""), value: row => (isOne(row) ? row[key] : undefined), ...more }] : [];
  const size = (key: string, title: string, help: string): Column<Row>[] =>
    ofKernels(key, title, "text", help, { value: row => (isOne(row) ? (row[key] as number[] | null)?.join("×") : undefined) });
  const color = (row: Row): string | null => (by === "phase" && row["class"] === undefined ? colorOf(data, "phase", row["group"] as string) : by === "class" || row["class"] ? colorOf(data, "class", row["group"] as string) : null);
  return [
    {
      key: "name", title: by === "kernel" ? (onDevice(data) ? "Kernel" : "Op") : `${TITLES[by]}, ${onDevice(data) ? "kernel" : "op"}`, kind: "text", longest: 76,
      value: row => row["launch"] ?? row["name"] ?? row["group"],
      cell: (row, letters) => {
        if (row["launch"]) return <span class="quiet">{cut(row["launch"], letters)}</span>;
        if (row["name"] !== undefined) return <span class="name" title={full(row["name"])}>{names(row["name"] as string, letters)}</span>;
        const mark = (by === "phase" || by === "class") && color(row);
        return <span class="name" title={full(row["group"])}>{mark && <span class="mark" style={{ background: mark }} />}{cut(groupName(data, row["group"] as string), Math.floor(0.9 * letters))}</span>;
      },
    },
    { ...markColumn(data, "class", "class", "Class"), help: "What kind of work it is", value: row => (row["name"] !== undefined && !row["launch"] ? row["class"] : undefined), spare: by === "class" ? 9 : 2 },
    {
      key: "tensor_cores", title: "Tensor cores", kind: "text", help: "By what the kernel is; – where it is not known from its name", missing: "not known from the kernel's name", spare: 4,
      value: row => (!isOne(row) || row["launch"] || row["tensor_cores"] === undefined ? undefined : row["tensor_cores"] === null ? null : row["tensor_cores"] ? "yes" : "no"),
    },
    { key: "count", title: "Calls", kind: "count", help: `Launches ${per(data)}` },
    { key: "time_us", title: "Total", kind: "us", help: `Time ${per(data)}` },
    ...(found.isNarrowed ? [{ key: "of_selected", title: "Of selected", kind: "share", bar: true, help: "of all that what is selected ran", value: row => (outer ? (row["time_us"] as number) / outer : undefined) } satisfies Column<Row>] : []),
    { key: "share", title: "Of all", kind: "share", bar: !found.isNarrowed, help: `of all ${data["page"].time_name}`, value: row => (total ? (row["time_us"] as number) / total : undefined), ...(found.isNarrowed && { spare: 5 }) },
    { key: "mean_us", title: "Mean", kind: "us", help: "of one launch", value: row => (row["count"] ? (row["time_us"] as number) / (row["count"] as number) : undefined), fine: true, spare: 3 },
    { key: "min_us", title: "Least", kind: "us", fine: true },
    { key: "max_us", title: "Most", kind: "us", fine: true },
    ...ofKernels("blocks_per_sm", "Blocks per SM", "number", "Under 1: there are fewer blocks than multiprocessors, and some of the device stands still"),
    ...ofKernels("occupancy", "Occupancy", "share", "Achieved, as the profiler estimates it; mean by time", { spare: 6 }),
    ...size("grid", "Grid", "Blocks"),
    ...size("block", "Block", "Threads of a block"),
    ...ofKernels("registers_per_thread", "Registers", "count", "per thread"),
    ...ofKernels("shared_memory_bytes", "Shared memory", "bytes", "of a block"),
    ...(isRecorded("copied_bytes") ? ([
      { key: "copied_bytes", title: "Copied", kind: "bytes", help: `of copies and sets, ${per(data)}`, value: row => row["copied_bytes"] ?? undefined },
      { key: "copy_rate", title: "Copy rate", kind: "bandwidth", value: row => (row["copied_bytes"] && row["time_us"] ? ((row["copied_bytes"] as number) / (row["time_us"] as number)) * 1e6 : undefined) },
    ] satisfies Column<Row>[]) : []),
    { ...pickColumn("op", "ops", "Launched by", { longest: 30, spare: 7 }), value: row => (row["name"] === undefined || row["launch"] ? undefined : ((row["ops"] as string[] | undefined)?.[0] ?? undefined)) },
    { key: "layers", title: "Layers", kind: "layer", longest: 30, help: "Innermost layers, those with most of it first", missing: "the layer is not known", spare: 8 },
  ];
}

// ---- beside the table -------------------------------------------------------------------------------------------------

function Figures({ data }: { data: PageData }): JSX.Element | null {
  const rows = rowsOf(data, "kernels");
  const kernels = rows.filter(isKernel);
  if (!kernels.length) return null;
  const total = data["time"].total_us as number;
  const time = sum(kernels, "time_us") ?? 0;
  const launches = sum(rows, "count") ?? 0;
  const of = (test: (row: Row) => boolean): number => sum(kernels.filter(test), "time_us") ?? 0;
  const [used, unknown] = [of(row => row["tensor_cores"] === true), of(row => row["tensor_cores"] === null)];
  const short = sum(kernels.filter(row => (row["time_us"] as number) / (row["count"] as number) < SHORT_US), "count") ?? 0;
  return (
    <div class="figures">
      <Figure label={`Kernels, ${per(data)}`} value={us(perStep(data, time))} help={`copies and sets: ${us(perStep(data, total - time))}`} />
      <Figure label={`Launches, ${per(data)}`} value={count(perStep(data, launches))} help={launches ? `${us(total / launches)} each in the mean` : undefined} />
      <Figure label="Kernel time on tensor cores" value={time && unknown < time ? share(used / time) : null} missing="not known from any kernel's name" help={unknown > 0 ? `not known of ${share(unknown / time)}` : undefined} />
      <Figure label={`Kernels under ${SHORT_US} µs`} value={share(short / (sum(kernels, "count") || 1))} help="of all launches of kernels, by the mean of their row" />
    </div>
  );
}

function ClassBar({ data }: { data: PageData }): JSX.Element {
  const parts = [...grouped(rowsOf(data, "classes"), row => row["class"] as string)].map(([name, group]) => ({ name, value: perStep(data, sum(group, "time_us") ?? 0), color: colorOf(data, "class", name) }));
  return <Shares title={`By class, ${per(data)}`} parts={parts.sort((a, b) => b.value - a.value)} format={us} of={`all ${data["page"].time_name}`} />;
}

function CoreBar({ data }: { data: PageData }): JSX.Element {
  const parts = [...grouped(rowsOf(data, "kernels").filter(isKernel), coresOf)].map(([id, group]) => ({ name: CORES[id]!, value: perStep(data, sum(group, "time_us") ?? 0), color: CORE_COLORS[id]! }));
  return <Shares title={`Kernel time by tensor cores, ${per(data)}`} parts={parts} format={us} of="the time of kernels" />;
}

/** What the rows are narrowed to. */
export function Only({ of: chosen }: { of: Selection }): JSX.Element {
  const name = "name" in chosen ? cut(chosen.name, 90) : `${chosen.kind} ${chosen.number}`;
  return (
    <p class="only">
      Only of the selected {"name" in chosen ? `${chosen.kind} ` : ""}<strong class="name">{name}</strong>{chosen.kind === "layer" && " and what is inside it"}. <button type="button" class="small" onClick={() => select(null)}>Show all</button>
    </p>
  );
}
