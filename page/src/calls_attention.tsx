/** Attention: which implementation ran in which layer and phase, and what it was called with. */
import type { JSX } from "preact";
import { attentionElsewhere, grouped, inOrder, meanStep, per, perStep, rowsOf, sum } from "./basis";
import { markColumn, ofSelection } from "./cells";
import { Shares } from "./chart";
import { share, us } from "./format";
import type { PageData, Row } from "./page_data";
import { Marked, Section } from "./parts";
import { type Column, Table, UNFOLDING, unfolding } from "./table";
import { keyOf, shaped, shapesAreTimed, timed, timedColumns, timesOf } from "./timed";

const COLORS: Readonly<Record<string, string>> = { flash: "#009E73", cudnn: "#0072B2", mem_efficient: "#56B4E9", flex: "#CC79A7", external: "#7B6FD0", math: "#D55E00" };
const HELP: Readonly<Record<string, string>> = {
  flash: "FlashAttention in torch",
  cudnn: "cuDNN's fused attention",
  mem_efficient: "memory-efficient attention in torch",
  flex: "FlexAttention",
  external: "a library's own: flash-attn, xFormers, Transformer Engine",
  math: "not fused: all scores are written to memory",
};
const UNKNOWN_IN_TRACE = "not known from the trace";
const CALL = ["phase", "backend", "dtype", "query_shape", "key_shape", "mask", "causal", "dropout", "grouped"];

const fallbacks = (data: PageData): Row[] => ((data["summary"]?.findings ?? []) as Row[]).filter(finding => finding["id"] === "attention-fallback");

export const whyNoAttention = (data: PageData): string | null =>
  data["attention"].length || data["attention_calls"].length || fallbacks(data).length || attentionElsewhere(data) ? null : "no attention was found: no op or kernel of scaled-dot-product attention ran";

export function AttentionView({ data }: { data: PageData }): JSX.Element {
  if (!data["attention"].length && !data["attention_calls"].length && !attentionElsewhere(data)) return <Unfused data={data} />;
  return (
    <>
      <ByBackend data={data} />
      <Calls data={data} />
    </>
  );
}

const backend: Column<Row> = {
  key: "backend", title: "Backend", kind: "text",
  cell: row => <span title={HELP[row["backend"] as string]}><Marked color={COLORS[row["backend"] as string] ?? "#999999"}>{row["backend"] as string}</Marked></span>,
};

function ByBackend({ data }: { data: PageData }): JSX.Element {
  const other = attentionElsewhere(data);
  const all: Row[] = [...rowsOf(data, "attention"), ...(other ? [{ layer: null, phase: null, backend: other.reason, time_us: other.time_us, kernels: [] }] : [])];
  const { rows, said } = ofSelection(data, all, { layer: "layer" });
  const total = data["time"].total_us as number;
  const time = sum(all, "time_us") ?? 0;
  const parts = [...grouped(all, row => row["backend"] as string)].map(([name, group]) => ({ name, value: perStep(data, sum(group, "time_us") ?? 0), color: COLORS[name] ?? "#999999", help: HELP[name] }));
  const tree = unfolding(grouped(rows, row => `${row["backend"]} ${row["phase"]}`), group => ({
    ...group[0], layer: group[0]!["layer"] === null ? null : inOrder(data, group.map(row => row["layer"] as string)), time_us: sum(group, "time_us"),
    kernels: [...new Set(group.flatMap(row => row["kernels"] as string[]))].slice(0, 5),
  }));
  const columns: Column<Row>[] = [
    backend,
    markColumn(data, "phase", "phase", "Phase", { missing: "the phase is not known" }),
    { key: "layer", title: "Layer", kind: "layer", missing: "the layer is not known" },
    { key: "time_us", title: "Time", kind: "us", help: per(data), value: row => perStep(data, row["time_us"] as number) },
    { key: "share", title: "Of all", kind: "share", bar: true, help: `of all ${data["page"].time_name}`, value: row => (total ? (row["time_us"] as number) / total : null) },
    { key: "kernels", title: data["time_basis"] === "cpu" ? "Ops" : "Kernels", kind: "text", longest: 80, help: "the most expensive first", spare: 1 },
  ];
  return (
    <>
      <Shares title={`Time in attention, ${per(data)}: ${us(perStep(data, time))}, ${share(total ? time / total : null)} of all ${data["page"].time_name}`} parts={parts} format={us} of="attention" />
      {fallbacks(data).map((finding, i) => <Finding key={i} of={finding} />)}
      {said}
      <Table name="attention" label="Attention by implementation, phase and layer" rows={tree} columns={columns} {...UNFOLDING} sort={{ key: "time_us", descending: true }} />
    </>
  );
}

function Finding({ of, before = "" }: { of: Row; before?: string }): JSX.Element {
  const texts = [before, of["title"], ...((of["evidence"] as string[]) ?? []), of["fix"]].filter(Boolean) as string[];
  // Code at the end keeps its letters as they are.
  return <p class="notice">{texts.map(text => (/^[a-z]+[ ,:]/.test(text) ? text[0]!.toUpperCase() + text.slice(1) : text)).join(". ")}</p>;
}

/** Attention that is made of single ops: no fused one ran, so its layers are shown. */
function Unfused({ data }: { data: PageData }): JSX.Element {
  const rows = rowsOf(data, "layers").filter(row => row["kind"] === "attention" && (row["time_us"] as number) > 0);
  const total = data["time"].total_us as number;
  const columns: Column<Row>[] = [
    { key: "layer", title: "Layer", kind: "layer" },
    markColumn(data, "phase", "phase", "Phase"),
    { key: "time_us", title: "Time", kind: "us", help: `${per(data)}, with the layers below`, value: row => perStep(data, row["time_us"] as number) },
    { key: "self_time_us", title: "Own", kind: "us", help: "without the layers below: without projections, where those are layers", like: "time_us", value: row => perStep(data, row["self_time_us"] as number) },
    { key: "share", title: "Of all", kind: "share", bar: true, help: `of all ${data["page"].time_name}`, value: row => (total ? (row["time_us"] as number) / total : null) },
  ];
  return (
    <>
      {fallbacks(data).map((finding, i) => <Finding key={i} of={finding} before="Attention runs as single ops (eager): no fused attention ran" />)}
      {rows.length > 0 && <p class="note">Layers of attention: all that they do, projections included, {per(data)}.</p>}
      {rows.length > 0 && <Table name="attention" label="Layers of attention" rows={rows} columns={columns} sort={{ key: "time_us", descending: true }} />}
    </>
  );
}

function Calls({ data }: { data: PageData }): JSX.Element {
  const all = rowsOf(data, "attention_calls");
  const { rows: of, said } = ofSelection(data, all, { layer: "layer" });
  if (!all.length) return <Section title="Calls"><p class="note">What attention was called with is not known: record a step with shapes (record_shapes, which the warm-up steps have by default).</p></Section>;
  const { rows, per: reach } = shaped(data, of);
  const keys = ["layer", "phase", "backend"];
  const timeOf = grouped(rowsOf(data, "attention"), keyOf(...keys));
  const calls = timed(rows, keys, key => (timeOf.has(key) ? meanStep(data, sum(timeOf.get(key)!, "time_us")) : null));
  const found = [...grouped(calls, keyOf(...CALL)).values()].map(group => ({ ...group[0], ...timesOf(group), layers: inOrder(data, group.map(row => row["layer"] as string)) }));
  const yesNo = (key: string, title: string, help?: string): Column<Row> => ({ key, title, kind: "text", missing: UNKNOWN_IN_TRACE, value: row => (row[key] == null ? null : row[key] ? "yes" : "no"), ...(help && { help }) });
  const size = (key: string, title: string): Column<Row> => ({ key, title, kind: "text", value: row => (row[key] as number[]).join("×") });
  const times = timedColumns(data, found, reach);
  const columns: Column<Row>[] = [
    { key: "layers", title: "Layers", kind: "layer" }, markColumn(data, "phase", "phase", "Phase"), backend,
    { key: "dtype", title: "Type", kind: "text", missing: UNKNOWN_IN_TRACE, value: row => row["dtype"] || null },
    size("query_shape", "Query"), size("key_shape", "Key"), yesNo("mask", "Mask", "a tensor was given as mask"), yesNo("causal", "Causal"),
    { key: "dropout", title: "Dropout", kind: "number", missing: UNKNOWN_IN_TRACE }, yesNo("grouped", "Grouped", "fewer heads of keys than of queries"),
    { key: "calls_per_step", title: "Calls", kind: "count", help: reach }, ...times,
  ];
  return (
    <Section title="Calls">
      <p class="note">
        Calls with equal inputs, {reach}. Shapes are (batch, heads, tokens, head_dim). {!shapesAreTimed(data) &&
          "The time is that of the timed steps, as above, divided among the calls as in the steps with shapes; those are warm-up steps, and slower."}
      </p>
      {said}
      <Table name="attention-calls" label="Calls of attention" rows={found} columns={columns} sort={{ key: times[0]!.key, descending: true }} />
    </Section>
  );
}
