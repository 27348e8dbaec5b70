/** Experts: tokens, time and FLOPs of each, what computes them, what runs beside them; adapters beside their base. */
import type { JSX } from "preact";
import { per, perStep, rowsOf } from "./basis";
import { ofSelection } from "./cells";
import type { PageData, Row } from "./page_data";
import { type Column, Table } from "./table";

export const whyNoExperts = (data: PageData): string | null =>
  data["expert_layers"].length || data["adapters"].length ? null : "the model has no mixture of experts and no adapters, as far as its layers and kernels tell";

const layer: Column<Row> = { key: "layer", title: "Layer", kind: "layer", help: "A click shows the layer" };

export function ExpertsView({ data }: { data: PageData }): JSX.Element {
  const times = (key: string, title: string, help: string, more: Partial<Column<Row>> = {}): Column<Row> =>
    ({ key, title, kind: "us", help: `${help}, ${per(data)}`, missing: "there is none with a row of its own", value: row => perStep(data, row[key] as number | null), ...more });
  const flops = (key: string, title: string): Column<Row> => ({ key, title, kind: "flops", help: "a step", missing: "not known" });
  const layers = ofSelection(data, rowsOf(data, "expert_layers"), { layer: "layer" });
  const experts = ofSelection(data, rowsOf(data, "experts"), { layer: "layer" });
  return (
    <>
      {layers.said ?? experts.said}
      {layers.rows.length > 0 && (
        <>
          <p class="note">Where a kernel computes all experts of a layer at once, nothing tells the time of one of them.</p>
          <Table name="expert-layers" label="Layers of experts" rows={layers.rows} sort={{ key: "experts_time_us", descending: true }} columns={[
            layer,
            { key: "method", title: "Computed by", kind: "text", help: "modules: one each; loop: over stacked weights; else the grouped or fused kernel" },
            { key: "experts", title: "Experts", kind: "count", help: "of this rank" },
            { key: "tokens_per_step", title: "Tokens", kind: "count", help: "each counts once for each expert that it goes to; of steps with shapes, each", missing: "not known" },
            { key: "balance", title: "Busiest / mean", kind: "count", help: "tokens of the busiest expert over the mean of all, in the mean over steps", missing: "not known" },
            times("experts_time_us", "Experts' time", "without shared experts"),
            times("router_time_us", "Router", "of the router"),
            times("shared_time_us", "Shared", "of experts that all tokens go through"),
            times("all_to_all_time_us", "All-to-all", "in and beside the experts"),
            { key: "tokens_unknown", title: "Why tokens are not known", kind: "text", longest: 80, spare: 1, value: row => row["tokens_unknown"] || undefined },
          ]} />
        </>
      )}
      {experts.rows.length > 0 && (
        <>
          <p class="note">Each expert, in the steps with shapes: forward, recompute and backward.</p>
          <Table name="experts" label="Experts" rows={experts.rows} sort={{ key: "share", descending: true }} columns={[
            layer,
            { key: "expert", title: "Expert", kind: "count" },
            { key: "tokens_per_step", title: "Tokens", kind: "count", help: "a step", missing: "not known" },
            { key: "share", title: "Of the layer's", kind: "share", bar: true, help: "of the tokens of all experts of the layer", missing: "not known" },
            { key: "time_per_step_us", title: "Time", kind: "us", help: "a step", missing: "one kernel works for several experts" },
            flops("flops_per_step", "FLOPs"),
          ]} />
        </>
      )}
      {data["adapters"].length > 0 && (
        <>
          <p class="note">Adapters (LoRA and others) beside the layers that they adapt: forward, recompute and backward.</p>
          <Table name="adapters" label="Adapters" rows={rowsOf(data, "adapters")} sort={{ key: "adapter_time_us", descending: true }} columns={[
            layer, times("base_time_us", "Base", "of what is adapted"), times("adapter_time_us", "Adapters", "with the sum of both", { like: "base_time_us" }),
            flops("base_flops_per_step", "FLOPs of the base"), flops("adapter_flops_per_step", "of the adapters"),
          ]} />
        </>
      )}
    </>
  );
}
