/** Shapes: matrix products and convolutions by their sizes; each unfolds into the layers that compute it. */
import type { JSX } from "preact";
import { useMemo, useState } from "preact/hooks";
import { grouped, inOrder, rowsOf, sum } from "./basis";
import { markColumn, ofSelection } from "./cells";
import { count } from "./format";
import type { PageData, Row } from "./page_data";
import { Segments } from "./parts";
import { type Column, Table, UNFOLDING, unfolding } from "./table";
import { byLayers, keyOf, shaped, shapesAreTimed, timedColumns, timesOf } from "./timed";

const ALIGNED = 8;
const SIZE = ["op", "phase", "dtype", "m", "n", "k", "batch"];

export const whyNoShapes = (data: PageData): string | null =>
  data["products"].length ? null : "no sizes of products are known: record a step with shapes (record_shapes, which the warm-up steps have by default)";

const isOdd = (row: Row): boolean => ["m", "n", "k"].some(key => isOddSize(row[key] as number));
const isOddSize = (size: number): boolean => size > 1 && size % ALIGNED !== 0;
const workOf = (row: Row): number => 2 * (["m", "n", "k", "batch", "calls_per_step"].map(key => row[key] as number).reduce((all, one) => all * one, 1));

export function ShapesView({ data }: { data: PageData }): JSX.Element {
  const [only, setOnly] = useState<"all" | "odd">("all");
  const { rows: of, said } = ofSelection(data, rowsOf(data, "products"), { layer: "layer", op: "op" });
  const { products, per } = useMemo(() => {
    const { rows, per } = shaped(data, rowsOf(data, "products"));
    return { products: shapesAreTimed(data) ? [...rows] : byLayers(data, rows), per };
  }, [data]);
  const rows = useMemo(() => {
    const one = keyOf(...SIZE, "layer");
    const kept = new Set(of.map(one));
    const shown = products.filter(row => kept.has(one(row)) && (only === "all" || isOdd(row)));
    return unfolding(grouped(shown, keyOf(...SIZE)), group => ({ ...group[0], ...timesOf(group), layer: inOrder(data, group.map(row => row["layer"] as string)) }));
  }, [products, of.length, of[0], only]);
  const columns = useMemo(() => columnsOf(data, products, per), [data, products, per]);
  return (
    <>
      <p class="note">Matrix products (m×k by k×n) and convolutions by size, {per}. {!shapesAreTimed(data) && timesNote(products)}Sizes that are no multiple of {ALIGNED} are marked: tensor cores like multiples of 8 (16-bit types) or 16 (8-bit).</p>
      {said}
      <Table name="shapes" label="Products by their sizes" rows={rows} columns={columns} {...UNFOLDING}
        sort={{ key: timedColumns(data, products, per)[0]!.key, descending: true }} search
        tools={products.some(isOdd) && <Segments label="Which sizes" options={[["all", "All"], ["odd", "Only unaligned"]]} chosen={only} onChoose={setOnly} />} />
    </>
  );
}

function columnsOf(data: PageData, products: readonly Row[], per: string): Column<Row>[] {
  const times = timedColumns(data, products, per);
  const time = times[0]!.key;
  const total = sum(products, time);
  const size = (key: string): Column<Row> => ({
    key, title: key, kind: "count", cell: row => (isOddSize(row[key] as number) ? <span class="odd" title={`no multiple of ${ALIGNED}`}>{count(row[key] as number)}</span> : undefined),
  });
  return [
    { key: "op", title: "Op", kind: "text", longest: 40 },
    { key: "layer", title: "Layer", kind: "layer", longest: 30, missing: "the layer is not known" },
    markColumn(data, "phase", "phase", "Phase", { missing: "the phase is not known", spare: 4 }),
    { key: "dtype", title: "Type", kind: "text", spare: 2 },
    size("m"), size("n"), size("k"),
    { key: "batch", title: "Batch", kind: "count", help: "products of this size in one call", spare: 1 },
    { key: "calls_per_step", title: "Calls", kind: "count", help: per },
    ...times,
    { key: "share", title: "Of products", kind: "share", bar: true, help: "of the time of all products", value: row => (total && row[time] != null ? (row[time] as number) / total : null) },
    { key: "flops", title: "FLOPs", kind: "flops", help: `${per}: 2·m·n·k for each product`, value: workOf, spare: 3 },
    { key: "rate", title: "Rate", kind: "flop_rate", missing: "its time is not known", value: row => (row[time] ? (workOf(row) / (row[time] as number)) * 1e6 : null) },
  ];
}

/** Where the time in the timed steps comes from, which had no shapes. */
function timesNote(products: readonly Row[]): string {
  const known = products.filter(row => row["timed_us"] !== null).length;
  const warmUp = "“Time with shapes” is that of the steps with shapes: warm-up steps, which are slower. ";
  if (!known) return `What a size takes in the timed steps is not known. ${warmUp}`;
  return "“Time” is an estimate for the timed steps: what an op takes in them (see Op), divided by what its layers take themselves (see Layers). " + warmUp +
    (known < products.length ? "Where that is not known, only the latter is shown. " : "");
}
