/** Compare: two results side by side: the verdict, both steps, what changed and how certain that is. */
import { useSignal } from "@preact/signals";
import type { JSX } from "preact";
import { useMemo, useRef } from "preact/hooks";
import { bytes, capital, count, cut, flops, isKnown, share, us } from "../format";
import type { PageData, Row } from "../page_data";
import { Section, Segments } from "../parts";
import { Lines } from "../places/run";
import { type Column, Table } from "../table";
import { BothSteps, nameOf } from "./bars";
import { asAll, CHANGE, certaintyOf, certaintyWords, Decision, errorColumn, ofFolded, RULE, sidesColumn, signed } from "./certainty";

type Draw = (props: { data: PageData }) => JSX.Element | null;
type Format = (value: number) => string;
const FORMATS: Readonly<Record<string, Format>> = { us, bytes, flops, count, share };
const SIDES = ["a", "b"] as const;
const NARROW = 0.5; // spared last: on a phone the difference says more than both sides

export function ComparePage({ data }: { data: PageData }): JSX.Element {
  const { comparison } = data;
  const notes: string[] = [
    ...(comparison.differences as Row[]).map(one => `Not alike: ${one["what"]}: ${one["a"]} → ${one["b"]}`),
    ...comparison.notes,
    ...(comparison.backend_changes as Row[]).map(one => `Attention of ${one["layer"]}: ${one["a"]} → ${one["b"]}`),
  ];
  return (
    <>
      <p class="big" data-decision={comparison.decision}>{cut(capital(headline(comparison.verdict)), 240)}</p>
      <p>{capital(cut(comparison.verdict, 800))}.</p>
      <Lines of={notes} />
      <Like data={data} />
      {[Culprits, Work, Tree, Classes].map((One, i) => <One key={i} data={data} />)}
      <p class="note">a: <span class="name">{cut(comparison.a, 400)}</span><br />b: <span class="name">{cut(comparison.b, 400)}</span></p>
    </>
  );
}

/** The verdict's first clauses, without what stands in brackets. */
function headline(verdict: string): string {
  let text = verdict;
  for (let inner = ""; inner !== text; ) [inner, text] = [text, text.replace(/ ?\([^()]*\)/g, "")];
  return text.split("; ")[0]!;
}

/** Said of the time of a step, the first of the totals, where other load or clock would show alike. */
const doubt = (data: PageData, row: Row): string =>
  row === data["comparison"].totals[0] && data["comparison"].confidence === "low" && ["slower", "faster"].includes(row["decision"] as string) ? " (low confidence)" : "";

const Totals: Draw = ({ data }) => {
  const rows = data["comparison"].totals as Row[];
  const known = useMemo(() => rows.filter(row => isKnown(row["a"]) || isKnown(row["b"])), [data]);
  const unknown = rows.filter(row => !known.includes(row)).map(row => row["name"]);
  const columns = useMemo((): Column<Row>[] => [
    { key: "name", title: "Per step", kind: "text" },
    ...SIDES.map((side): Column<Row> => ({
      key: side, title: side, kind: "text", help: cut(data["comparison"][side], 200), missing: "not recorded on this side",
      value: row => (isKnown(row[side]) ? FORMATS[row["unit"] as string]!(row[side] as number) : null),
    })),
    CHANGE, ...errorColumn(rows),
    { key: "decision", title: "Decision", kind: "text", longest: 40, value: row => (data["decisions"][rows.indexOf(row)] ? `${data["decisions"][rows.indexOf(row)]}${doubt(data, row)}` : undefined),
      cell: row => { const words = data["decisions"][rows.indexOf(row)] as string; return words ? <Decision words={`${words}${doubt(data, row)}`} of={words} /> : undefined; } },
    RULE,
  ], [data]);
  return (
    <>
      <Table name="totals" label="Totals of a step on both sides" rows={known} columns={columns} search={false} />
      {unknown.length > 0 && <p class="note">Recorded on neither side: {unknown.join(", ")}.</p>}
    </>
  );
};

const sideOf = (row: Row): string | null => (row["a_us"] === null ? "only in b" : row["b_us"] === null ? "only in a" : null);
const phaseOf = (row: Row): string => (row["layer"] || row["phase"] !== "optimizer" ? (row["phase"] as string) : "");

/** Both bars, the totals, and own time of like layers, which are the parts of the bars. */
const Like: Draw = ({ data }) => {
  const chosen = useSignal<string | null>(null);
  const table = useRef<HTMLDivElement>(null);
  const rows = data["folded"] as Row[];
  const isTimed = !(data["comparison"].differences as Row[]).some(one => one["what"] === "time basis");
  const columns = useMemo((): Column<Row>[] => {
    const most = rows.reduce((all, row) => Math.max(all, (row["a_us"] as number) ?? 0, (row["b_us"] as number) ?? 0), 0);
    const has = (key: string) => rows.some(row => (Array.isArray(row[key]) ? row[key].length : isKnown(row[key])));
    const pair = (key: string, title: string, kind: "flops" | "bytes", help: string, spare: number): Column<Row>[] => SIDES.filter(() => has(`${key}_a`) || has(`${key}_b`))
      .map(side => ({ key: `${key}_${side}`, title: `${title} ${side}`, kind, help, spare, ...(side === "b" ? { like: `${key}_a` } : {}) }));
    return [
      { key: "label", title: "Layers", kind: "text", longest: 70 },
      { key: "phase", title: "Phase", kind: "text", value: row => row["phase"] || undefined },
      { key: "a_us", title: "Own time a", kind: "us", help: "per step", missing: "only in b", spare: NARROW },
      { key: "b_us", title: "Own time b", kind: "us", help: "per step", missing: "only in a", like: "a_us", spare: NARROW },
      sidesColumn(most, row => (row["a_us"] as number) ?? 0, row => (row["b_us"] as number) ?? 0),
      { key: "difference_us", title: "b − a", kind: "us" },
      { key: "change", title: "Change", kind: "text", value: row => (row["a_us"] && row["b_us"] !== null && isTimed ? signed((row["b_us"] as number) / (row["a_us"] as number) - 1) : undefined) },
      { key: "certainty", title: "Decision", kind: "text", help: "whether it goes beyond noise", value: row => sideOf(row) ?? certaintyWords(data, ofFolded(row)), cell: row => <Decision words={sideOf(row) ?? certaintyWords(data, ofFolded(row))} of={sideOf(row) ?? ofFolded(row)} /> },
      ...(["slower", "faster"] as const).filter(has).map((key): Column<Row> => ({ key, title: key === "slower" ? "Slower" : "Faster", kind: "text", longest: 48, spare: 1, value: row => ((row[key] as string[]).length ? row[key] : undefined) })),
      ...pair("flops", "FLOPs", "flops", "own, per step", 3),
      ...pair("retained", "Retained", "bytes", "kept for backward, with what is inside of these layers", 4),
    ];
  }, [data]);
  const choose = (id: string) => {
    chosen.value = chosen.value === id ? null : id;
    if (chosen.value !== null) table.current?.scrollIntoView({ block: "nearest" });
  };
  return (
    <>
      <Section title="A step, on both sides">
        <BothSteps data={data} rows={rows} chosen={chosen.value} onChoose={choose} />
        <Totals data={data} />
      </Section>
      <div ref={table}>
        <Section title="Like layers together">
          <p class="note">Own time, the parts of the bars above: all rows add up to the time of a step.{chosen.value !== null && rows[Number(chosen.value)] ? ` Chosen: ${cut(nameOf(rows[Number(chosen.value)]!), 80)}.` : ""}</p>
          <Table name="alike" label="Own time of like layers" rows={rows} columns={columns} selected={chosen.value} limit={15} onSelect={row => { chosen.value = row && String(rows.indexOf(row)); }} />
        </Section>
      </div>
    </>
  );
};

const Culprits: Draw = ({ data }) => {
  const { common, culprits } = data["comparison"];
  const columns = useMemo((): Column<Row>[] => [
    { key: "layer", title: "Layer", kind: "text", longest: 80, value: row => row["layer"] || (row["phase"] === "optimizer" ? "optimizer" : "code between calls") },
    { key: "phase", title: "Phase", kind: "text", value: row => (row["phase"] ? phaseOf(row) : "all") },
    { key: "change_us", title: "b − a", kind: "us", help: common ? `per step, beyond the ${signed(common)} that all layers have in common` : "per step" },
    { ...CHANGE, value: row => (row["change"] === null ? `only in ${(row["change_us"] as number) > 0 ? "b" : "a"}` : signed(row["change"])) },
    ...errorColumn(culprits as Row[]),
    { key: "share", title: "Of all", kind: "share", bar: true, help: "of the change of the whole step", value: row => row["share"] ?? undefined },
  ], [data]);
  return (
    <Section title="Changed otherwise than the rest">
      {culprits.length ? <Table name="culprits" label="Layers that changed otherwise than the rest" rows={culprits as Row[]} columns={columns} search={false} />
        : <p class="note">No layer changed otherwise than the rest by more than noise.</p>}
    </Section>
  );
};

const Work: Draw = ({ data }) => {
  const rows = data["work"] as Row[];
  if (!rows.length) return null;
  return (
    <Section title="Does other work">
      <p class="note">Counted, so exact whatever the time: FLOPs, ops or device events, calls, memory kept for backward.</p>
      <Table name="work" label="Layers that do other work" rows={rows} search={false} columns={WORK} />
    </Section>
  );
};
const WORK: Column<Row>[] = [{ key: "place", title: "Layer", kind: "text", longest: 80 }, { key: "words", title: "Per step, b against a", kind: "text", longest: 120 }];

// ---- the tree ---------------------------------------------------------------------------------------------------------

const BOTH: readonly (readonly [kind: Column<Row>["kind"], key: string, title: string, help: string, spare: number])[] = [
  ["us", "time_per_step_us", "Time", "per step", NARROW],
  ["flops", "flops_per_step", "FLOPs", "per step", 2],
  ["count", "calls_per_step", "Calls", "entries of the layer per step", 5],
  ["count", "self_events_per_step", "Events", "kernels (on a CPU, ops) whose innermost layer this is, per step", 4],
  ["bytes", "retained_bytes", "Retained", "kept for backward: mean over calls", 3],
  ["bytes", "peak_bytes", "Peak", "highest allocated while inside", 3],
];

const of = (row: Row, side: "a" | "b", key: string): unknown => (row[side] as Row | null)?.[key];
const timeOf = (row: Row, side: "a" | "b"): number => (of(row, side, "time_per_step_us") as number) ?? 0;
const idOf = (row: Row): string => `${row["phase"]} ${row["layer"]}`;

type Which = "all" | "changed";

const Tree: Draw = ({ data }) => {
  const which = useSignal<Which>("all");
  const all = data["comparison"].rows as Row[];
  const changed = all.filter(row => certaintyOf(row["decision"] as string) !== "no difference");
  const ids = useMemo(() => new Set(all.map(idOf)), [data]);
  const words = (row: Row): string => (row["decision"] === "no difference" && asAll(data)) || (row["decision"] as string);
  const columns = useMemo((): Column<Row>[] => {
    const [time, ...others] = BOTH.flatMap(([kind, key, title, help, spare]) => {
      const pair = SIDES.map((side): Column<Row> => ({ key: `${key}_${side}`, title: `${title} ${side}`, kind, help, spare, value: row => of(row, side, key), ...(side === "b" ? { like: `${key}_a` } : {}) }));
      return all.some(row => isKnown(of(row, "a", key)) || isKnown(of(row, "b", key))) ? [pair] : [];
    });
    const most = all.reduce((large, row) => Math.max(large, timeOf(row, "a"), timeOf(row, "b")), 0);
    return [
      { key: "layer", title: "Layer", kind: "text", longest: 70, value: row => row["layer"] || (row["phase"] === "optimizer" ? "optimizer" : "outside layers") },
      { key: "phase", title: "Phase", kind: "text", value: row => phaseOf(row) || undefined },
      ...(time ?? []),
      sidesColumn(most, row => timeOf(row, "a"), row => timeOf(row, "b")),
      { key: "difference", title: "b − a", kind: "us", value: row => timeOf(row, "b") - timeOf(row, "a"), help: "per step" },
      { ...CHANGE, help: "of the mean over the steps" }, ...errorColumn(all),
      { key: "decision", title: "Decision", kind: "text", value: words, cell: row => <Decision words={words(row)} of={row["decision"] as string} /> },
      ...(all.some(row => row["reason"]) ? [{ ...RULE, longest: 50, spare: 1 }] : []),
      ...others.flat(),
      { key: "backends", title: "Attention", kind: "text", spare: 4, value: row => [...new Set(SIDES.map(side => ((of(row, side, "backends") as string[] | undefined) ?? []).join(" + ")))].filter(Boolean).join(" → ") || undefined },
    ];
  }, [data]);
  const isTree = which.value === "all";
  const parent = (row: Row): string | null => (ids.has(`${row["phase"]} ${row["parent"]}`) ? `${row["phase"]} ${row["parent"]}` : null);
  return (
    <Section title="Layers, side by side">
      <p class="note">Time per step with everything inside the layer, in the same phase. A decision is about what goes beyond the change that all layers have in common, unless that is beyond noise itself and of a device.</p>
      {changed.length > 0 && <div class="tools"><Segments<Which> label="Which layers" chosen={which.value} options={[["all", `All: ${count(all.length)}`], ["changed", `Decided to differ: ${count(changed.length)}`]]} onChoose={one => { which.value = one; }} /></div>}
      <Table key={which.value} name="compare-layers" label="Layers on both sides" rows={isTree ? all : changed} columns={columns} id={idOf} {...(isTree ? { tree: { parent, open: (row: Row) => (row["depth"] as number) < 2 } } : {})} />
    </Section>
  );
};

const Classes: Draw = ({ data }) => {
  const { steps_a: a, steps_b: b, classes, unattributed } = data["comparison"];
  const [byClass, reasons] = useMemo((): Column<Row>[][] => {
    const difference = (row: Row) => (row["time_b_us"] as number) / b - (row["time_a_us"] as number) / a;
    const times: Column<Row>[] = [
      { key: "time_a_us", title: "Time a", kind: "us", help: "per step", value: row => (row["time_a_us"] as number) / a },
      { key: "time_b_us", title: "Time b", kind: "us", help: "per step", like: "time_a_us", value: row => (row["time_b_us"] as number) / b },
      { key: "difference", title: "b − a", kind: "us", value: difference },
    ];
    return [[
      { key: "class", title: "Class", kind: "text" }, { key: "phase", title: "Phase", kind: "text" }, ...times,
      { key: "count_a", title: "Events a", kind: "count", help: "per step", value: row => (row["count_a"] as number) / a },
      { key: "count_b", title: "Events b", kind: "count", help: "per step", value: row => (row["count_b"] as number) / b },
      ...(classes.some((row: Row) => isKnown(row["flops_per_step_a"]) || isKnown(row["flops_per_step_b"])) ? SIDES.map((side): Column<Row> => ({ key: `flops_per_step_${side}`, title: `FLOPs ${side}`, kind: "flops", spare: 1 })) : []),
    ], [{ key: "reason", title: "Reason", kind: "text", longest: 80 }, ...times]];
  }, [data]);
  return (
    <>
      <Section title="Classes of work"><Table name="compare-classes" label="Classes of work on both sides" rows={classes as Row[]} columns={byClass!} sort={{ key: "difference", descending: true }} /></Section>
      {unattributed.length > 0 && <Section title="Time without a layer"><Table name="compare-unattributed" label="Time without a layer on both sides" rows={unattributed as Row[]} columns={reasons!} search={false} /></Section>}
    </>
  );
};
