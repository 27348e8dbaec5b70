/** Layers: the icicle, the table of the tree with its exact sums, small charts over the blocks. */
import type { ComponentChildren, JSX } from "preact";
import { useMemo, useState } from "preact/hooks";
import { per, rowsOf, timeName, why } from "../basis";
import { BlockCharts } from "../blocks";
import { median } from "../chart";
import { columnFormat, cut, flops, full, isKnown, ns, number } from "../format";
import { Icicle } from "../icicle";
import { type Group, type LayerRow, type LayerRows, layerRows } from "../layers_rows";
import { columnOf, type PageData } from "../page_data";
import { Go, Later, Section, Segments } from "../parts";
import { address, selection } from "../state";
import { type Column, Table } from "../table";
import "../rooms.css";

type Columns = "main" | "time" | "work" | "memory";
const CURE =
  "To see layers, record with `with ProfilerWrapper(model) as prof:`. In a profiler of your own, call `profiler_wrapper.mark(model)` " +
  "before it starts, or pass with_stack=True to it.";

export function LayersPlace({ data }: { data: PageData }): JSX.Element {
  const whole = useMemo(() => layerRows(data, false), [data]);
  return (
    <>
      <Unnamed data={data} />
      <Icicle data={data} layers={whole} />
      <Later>
        <LayerTable data={data} whole={whole} />
        <BlockCharts data={data} layers={whole} />
      </Later>
    </>
  );
}

/** What a trace without layers says, above everything else. */
function Unnamed({ data }: { data: PageData }): JSX.Element | null {
  if (columnOf(data, "layers", "class_name").some(Boolean)) return null;
  return (
    <div class="notice">
      <strong>{columnOf(data, "layers", "layer").some(Boolean) ? "This trace names no layers: the rows are its named blocks." : "This trace has no layers."}</strong>
      <p>{why(data, "layers") ?? "It has no layer marks and no nn.Module events."}</p>
      <p>{CURE}</p>
    </div>
  );
}

function LayerTable({ data, whole }: { data: PageData; whole: LayerRows }): JSX.Element {
  const [own, setOwn] = useState(false);
  const [set, setSet] = useState<Columns>("main");
  const layers = useMemo(() => (own ? layerRows(data, true) : whole), [data, own]);
  const columns = useMemo(() => columnsOf(data, layers, set), [data, layers, set]);
  const all = useMemo(() => columnsOf(data, layers, null), [data, layers]);
  const chosen = selection.value?.kind === "layer" ? selection.value.name : null;
  const basis = timeName(data) + (data["time_basis"] === "device" ? "" : " (there is no device in this trace)");
  const reach = data["page"].like_steps ? per(data) : "summed over the whole trace, as its steps are not alike or do not hold all of it";
  const unknown = [["retained", why(data, "memory", "not available")], ["flops", why(data, "flops", "not available")]] as const;
  return (
    <Section title="Where the time goes">
      <p class="note">{basis}, {reach}. A row holds everything below it.</p>
      <Table name="layers" label="Layers" rows={layers.rows} columns={columns} csvColumns={all} total={layers.total} id={row => row.id}
        {...(own ? { sort: { key: "time", descending: true } } : { tree: { parent: (row: LayerRow) => row.parent, open: (row: LayerRow) => isOpen(row, layers) } })}
        search selected={chosen} selectable={row => row.layer !== ""} onSelect={row => { selection.value = row ? { kind: "layer", name: row.layer } : null; }}
        rowClass={row => (row.group ? "group" : row.row)} empty="The trace has no time that belongs to a layer."
        tools={
          <>
            <Segments label="What a row holds" chosen={own ? "self" : "total"} onChoose={id => setOwn(id === "self")}
              options={[["total", "With layers below", "A layer's time with everything inside it"], ["self", "Self only", "Time whose innermost layer this is: what adds up over all layers"]]} />
            <Segments label="Columns" chosen={set} onChoose={setSet} options={[["main", "Main"], ["time", "Time"], ["work", "FLOPs"], ["memory", "Memory"]]} />
            {chosen !== null && whole.layers.has(chosen) && <a class="small" href={address("kernels", selection.value)}>Its kernels →</a>}
          </>
        } />
      <Sum data={data} layers={layers} own={own} />
      {unknown.map(([key, says]) => says && layers.rows.every(row => !isKnown(row[key])) && <p key={key} class="note">{says}</p>)}
    </Section>
  );
}

/** Says that the rows add up, counted in whole nanoseconds. */
function Sum({ data, layers, own }: { data: PageData; layers: LayerRows; own: boolean }): JSX.Element {
  const total_ns = Math.round(data["time"].total_us * 1000);
  const text = (value: number): string => ns(value / data["page"].steps);
  if (total_ns !== layers.sum_ns) {
    return <p class="sum notice">The rows add up to {text(layers.sum_ns)}, the total is {text(total_ns)}: {ns(Math.abs(total_ns - layers.sum_ns))} differ.</p>;
  }
  return <p class="sum">✓ {own ? "All rows" : "The rows without indentation"} add up to the total to the nanosecond: {text(layers.sum_ns)} = {text(total_ns)} {per(data)}.</p>;
}

/** What begins unfolded: the outermost layers, and those that hold groups. */
function isOpen(row: LayerRow, { groups }: LayerRows): boolean {
  if (row.group || row["block"] || row.kind === "block") return false;
  return row.parent === null || groups.some(group => group.parent === row.id || (group.parent ?? "").startsWith(`${row.id}.`));
}

interface ViewColumn { key: string; title: string; kind: Column<LayerRow>["kind"]; help: string; sets: string; spare: number; needs: string; why: string }

/** `set`: null for all of them. */
function columnsOf(data: PageData, layers: LayerRows, set: Columns | null): Column<LayerRow>[] {
  const noWork = why(data, "flops", "not available") ?? "the FLOPs of an op inside are not known, or steps are not alike";
  const work = (row: LayerRow): string => (row.row === "total" && rowsOf(data, "unattributed").length ? "those of kernels launched before the trace are not known" : noWork);
  const memory = why(data, "memory", "not available") ?? "no allocation was recorded in it";
  const whys: Record<string, string | ((row: LayerRow) => string)> = { work, roof: why(data, "peak is known") ?? noWork, memory };
  const asked: Record<string, string[]> = { outside: ["work", "roof"], total: ["work"], unattributed: [] }; // of rows that are no layers
  const isAsked = (row: LayerRow, column: ViewColumn): unknown => asked[row.row]?.includes(column.why) ?? (column.key !== "retained" || row["calls"]); // without a forward nothing is kept for backward
  const name: Column<LayerRow> & { sets: string } = {
    key: "label", title: "Layer", kind: "text", sets: "main time work memory", longest: 60, cell: drawName,
    value: row => (row.row === "total" ? undefined : row.group ? row.group.full : row.layer || row.label),
  };
  const shown = (column: ViewColumn): Column<LayerRow> & { sets: string } => ({
    key: column.key, title: column.title, kind: column.kind, help: column.help, sets: column.sets, spare: column.spare, bar: column.key === "share",
    ...(whys[column.why] && { missing: whys[column.why]! }),
    ...(column.kind === "us" && column.key !== "time" && { like: "time" }),
    ...(column.key === "flops" && { cell: (row: LayerRow) => drawWork(row, work(row)) }),
    ...(column.key === "time" && { cell: drawTime(layers) }),
    // Of what does not say why it is missing, there is none.
    value: row => (isKnown(row[column.key]) ? row[column.key] : column.needs && !isKnown(row[column.needs]) && isAsked(row, column) ? null : undefined),
  });
  const kind: Column<LayerRow> & { sets: string } = { key: "class_name", title: "Class", kind: "text", sets: "memory" };
  const used = (column: Column<LayerRow>): boolean => ["label", "time", "share"].includes(column.key) || layers.rows.some(row => {
    const value = column.value ? column.value(row) : row[column.key];
    return isKnown(value) && value !== 0 && value !== "";
  });
  return [name, ...(data["views"].layers.columns as ViewColumn[]).map(shown), kind].filter(column => (set === null || column.sets.includes(set)) && used(column));
}

/** At least so many FLOPs, where those of an op inside are not known. */
function drawWork(row: LayerRow, reason: string): ComponentChildren {
  if (row.flops !== null || !isKnown(row.known_flops)) return undefined;
  return <span title={full(`at least: ${reason}`)}>≥ {flops(row.known_flops)}</span>;
}

/** At least so much time, where kernels that it launched are not in the trace. */
function drawTime(layers: LayerRows): (row: LayerRow) => ComponentChildren {
  const { text } = columnFormat("us", [...layers.rows, layers.total].map(row => row.time));
  return row => (row.lost_launches ? <span title="at least: kernels that it launched are not in the trace">≥ {text(row.time)}</span> : undefined);
}

function drawName(row: LayerRow, letters: number): ComponentChildren {
  const isUsual = row.class_name === row.label.replace(/_\d+$/, "");
  return (
    <>
      <span class="name" title={full(`${row.layer || row.label}${row.class_name ? ` (${cut(row.class_name, 200)})` : ""}`)}>{cut(row.label, Math.max(10, letters))}</span>
      {row.group ? <Spread group={row.group} /> : row.class_name && !isUsual && <span class="quiet"> {cut(row.class_name, 32)}</span>}
      {row.flags?.map(flag => <span key={flag} class="flag">{flag}</span>)}
    </>
  );
}

/** Of a group: its outliers, the median, the range: where there is little room, the last is cut. */
function Spread({ group }: { group: Group }): JSX.Element {
  const times = group.members.map(member => member.time ?? 0);
  const { text, unit } = columnFormat("us", times);
  const range = `${text(Math.min(...times))}–${text(Math.max(...times))}`;
  return (
    <>
      {group.outliers.slice(0, 2).map(one => (
        <span key={one.layer}> <Go to="layers" select={{ kind: "layer", name: one.layer }} class="outlier">outlier: {shortName(one.layer, group.parent)} {one.what === "time" ? "" : "retained "}{excess(one.excess)}</Go></span>
      ))}
      {group.outliers.length > 2 && <span class="quiet"> and {group.outliers.length - 2} more</span>}
      <span class="quiet"> {times.length}×, median {text(median(times))} {unit} ({range})</span>
    </>
  );
}

const excess = (value: number): string => (Math.abs(value) < 9 ? `${value > 0 ? "+" : ""}${number(Math.round(100 * value))} %` : `×${number(1 + value)}`);

/** Its name below `parent`; of a long one the number alone, which is its own. */
function shortName(layer: string, parent: string | null): string {
  const below = parent && layer.startsWith(`${parent}.`) ? layer.slice(parent.length + 1) : layer;
  return (below.length > 14 && below.match(/\d+/g)?.at(-1)) || cut(below, 40);
}
