/** Operators: what each op takes, by itself and with the ops that it calls; each unfolds into its phases. */
import type { JSX } from "preact";
import { useMemo, useState } from "preact/hooks";
import { grouped, onDevice, per, perStep, rowsOf, sum } from "./basis";
import { isIn, markColumn } from "./cells";
import { Shares } from "./chart";
import { colorOf } from "./colors";
import { us } from "./format";
import { Only } from "./kernels_table";
import type { PageData, Row } from "./page_data";
import { Segments } from "./parts";
import { type Selection, selection } from "./state";
import { type Column, Table, UNFOLDING, unfolding } from "./table";

const LARGEST = 10;
const BESIDE = ["device_events", "shapes", "sources"]; // for which a usual window has no room
const SUMS = ["calls", "self_time_us", "time_us", "self_cpu_time_us", "cpu_time_us", "device_events"];

export const whyNoOps = (data: PageData): string | null => (data["operators"].length ? null : "no op was recorded: the trace has no CPU activity");

export function OpsView({ data }: { data: PageData }): JSX.Element {
  const [set, setSet] = useState<"main" | "all">("main");
  const chosen = selection.value;
  const rows = useMemo(() => opRows(data, chosen), [data, chosen]);
  const all = useMemo(() => columnsOf(data), [data]);
  const columns = useMemo(() => (set === "all" ? all : all.filter(column => !BESIDE.includes(column.key))), [all, set]);
  const isDevice = onDevice(data);
  const isNarrowed = chosen?.kind === "layer" || chosen?.kind === "kernel";
  const reach = isNarrowed ? ` Each row is one op in the whole model: an op names at most five layers, a kernel at most three ops.` : "";
  const selected = chosen?.kind === "op" ? chosen.name : null;
  return (
    <>
      {isNarrowed ? <Only of={chosen} /> : <Largest data={data} rows={rows} />}
      <p class="note">
        Times are {per(data)}, {data["page"].steps_in_words}. “Self” leaves out the ops that an op calls{isDevice
          ? "; device time is that of the kernels, copies and sets that it launches."
          : `; there are no device events in this trace, so all of it is ${data["page"].time_name}.`}{reach}
      </p>
      <Table name="ops" label="Operators" rows={rows} columns={columns} csvColumns={all} {...UNFOLDING}
        sort={{ key: "self_time_us", descending: true }} search selected={selected} selectable={row => row["parent"] === null}
        onSelect={row => { selection.value = row && { kind: "op", name: row["op"] as string }; }} empty={isNarrowed ? "No op names what is selected." : "No op was recorded."}
        tools={<Segments label="Columns" options={[["main", "Main"], ["all", "All columns"]]} chosen={set} onChoose={setSet} />} />
    </>
  );
}

function opRows(data: PageData, chosen: Selection | null): Row[] {
  const ofKernel = chosen?.kind === "kernel" ? new Set(rowsOf(data, "kernels").filter(row => row["name"] === chosen.name).flatMap(row => row["ops"] as string[])) : null;
  const isOf = (row: Row): boolean => (chosen?.kind === "layer" ? (row["layers"] as string[]).some(layer => isIn(data, layer, chosen.name)) : !ofKernel || ofKernel.has(row["op"] as string));
  return unfolding(grouped(rowsOf(data, "operators").filter(isOf), row => row["op"] as string), group => (group.length < 2 ? group[0]! : merged(group)));
}

/** One row an op: the sums over its phases; of the class that most of its time is of. */
function merged(group: Row[]): Row {
  const eligible = group.filter(row => row["tensor_core_eligible"]);
  const isUnknown = eligible.some(row => row["tensor_core_time_us"] === null && (row["self_time_us"] as number) > 0);
  const times = new Map<unknown, number>();
  for (const row of group) times.set(row["class"], (times.get(row["class"]) ?? 0) + (row["self_time_us"] as number));
  const first = (key: string): unknown[] => [...new Set(group.flatMap(row => (row[key] as unknown[]) ?? []))].slice(0, 5);
  return {
    op: group[0]!["op"], class: [...times].reduce((best, one) => (one[1] > best[1] ? one : best))[0], phase: group.map(row => row["phase"]),
    ...Object.fromEntries(SUMS.map(key => [key, sum(group, key)])), tensor_core_eligible: eligible.length > 0, tensor_core_time_us: isUnknown ? null : sum(eligible, "tensor_core_time_us"),
    layer_count: Math.max(...group.map(row => (row["layer_count"] as number) || 0)), layers: first("layers"), shapes: first("shapes"), sources: first("sources"),
  };
}

function columnsOf(data: PageData): Column<Row>[] {
  const isRecorded = (name: string): boolean => rowsOf(data, "operators").some(row => (row[name] as unknown[] | null)?.length);
  const total = data["time"].total_us as number;
  const times = (key: string, title: string, help: string, spare = 0): Column<Row> => ({ key, title, kind: "us", help, spare, value: row => perStep(data, row[key] as number) });
  const counts = (key: string, title: string, help: string, spare = 0): Column<Row> => ({ key, title, kind: "count", help, spare, value: row => perStep(data, row[key] as number) });
  const share: Column<Row> = { key: "share", title: "Of all", kind: "share", bar: true, help: `of all ${data["page"].time_name}`, value: row => (total ? (row["self_time_us"] as number) / total : undefined) };
  return [
    { key: "op", title: "Op", kind: "text", longest: 60, cell: row => (row["parent"] === null ? undefined : <span class="quiet">{row["phase"] as string}</span>) },
    { ...markColumn(data, "class", "class", "Class"), help: "What kind of work most of its time is; what one op does for another (aten::empty within attention) is of that one's class. By class each event counts under its own" },
    { key: "phase", title: "Phase", kind: "text", longest: 14, spare: 4, value: row => [row["phase"]].flat().join(", "), cell: row => <Phases data={data} of={row["phase"]} /> },
    counts("calls", "Calls", `Calls ${per(data)}`, 3),
    ...(onDevice(data) ? [
      times("self_time_us", "Device self", "Time of the device events that it launched itself"), share, times("time_us", "Device total", "with those of the ops that it calls", 2),
      times("self_cpu_time_us", "CPU self", "Wall time in the op itself"), times("cpu_time_us", "CPU total", "Wall time with the ops that it calls", 5),
      counts("device_events", "Device events", "Kernels, copies and sets that it launched itself"),
      {
        key: "tensor_cores", title: "Tensor cores", kind: "share", help: "Share of its self time in kernels that use tensor cores; empty for ops that cannot", missing: "it could use tensor cores, but whether its kernels do is not known", spare: 6,
        value: row => {
          if (!row["tensor_core_eligible"] || !row["self_time_us"]) return undefined;
          return row["tensor_core_time_us"] === null ? null : (row["tensor_core_time_us"] as number) / (row["self_time_us"] as number);
        },
      } satisfies Column<Row>,
    ] : [times("self_time_us", "Self", "Wall time in the op itself"), share, times("time_us", "Total", "Wall time with the ops that it calls")]),
    { key: "layers", title: "Layers", kind: "layer", longest: 34, help: "Innermost layers, those with most of it first", missing: "the layer is not known", spare: 7 },
    ...(isRecorded("shapes") ? [{ key: "shapes", title: "Input shapes", kind: "text", longest: 60, help: "The most frequent ones" } satisfies Column<Row>] : []),
    ...(isRecorded("sources") ? [{ key: "sources", title: "Called from", kind: "text", longest: 60 } satisfies Column<Row>] : []),
  ];
}

function Phases({ data, of }: { data: PageData; of: unknown }): JSX.Element {
  const names = [of].flat() as string[];
  return <span title={names.join(", ")}>{names.map(name => <span key={name} class="mark" style={{ background: colorOf(data, "phase", name) }} />)}{names.length === 1 ? names[0] : `${names.length} phases`}</span>;
}

function Largest({ data, rows }: { data: PageData; rows: readonly Row[] }): JSX.Element | null {
  const self = (row: Row): number => perStep(data, row["self_time_us"] as number);
  const largest = rows.filter(row => row["parent"] === null && self(row) > 0).sort((a, b) => self(b) - self(a)).slice(0, LARGEST);
  if (!largest.length) return null;
  const total = perStep(data, data["time"].total_us as number);
  const rest = total - largest.reduce((all, row) => all + self(row), 0);
  const parts = largest.map(row => ({ name: row["op"] as string, value: self(row), color: colorOf(data, "class", row["class"] as string) }));
  if (rest > 1e-6 * total) parts.push({ name: onDevice(data) ? "all others, with what no op launched" : "all others", value: rest, color: "#bbbbbb" });
  return <Shares title={`Largest operators, self ${data["page"].time_name} ${per(data)}; colours stand for classes`} parts={parts} format={us} of={`all ${data["page"].time_name}`} />;
}
