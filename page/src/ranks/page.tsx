/** Ranks: who or what slows a job, on what that stands, and what each rank did. */
import type { JSX } from "preact";
import { useMemo } from "preact/hooks";
import { grouped, sum } from "../basis";
import { Bars, Figure, median, outliers, Shares } from "../chart";
import { bytes, count, cut, isKnown, share, us } from "../format";
import type { PageData, Row } from "../page_data";
import { Marked, Section } from "../parts";
import { Lines, TraceOf } from "../places/run";
import { type Column, Table } from "../table";
import { HeatMaps } from "./heat_map";
import { choose, culprit, isNamed, kindColor, msColumn, rankChosen, rankColumn } from "./marks";
import { RanksTimeline } from "./timeline";
import "../rooms.css";
import "./ranks.css";

type Draw = (props: { data: PageData }) => JSX.Element | null;
const ms = (value: number | null | undefined): string | null => (isKnown(value) ? us(value * 1000) : null);
const steps = (data: PageData): number => (data["job"].judged_steps ?? data["job"].steps).length;

export function RanksPage({ data }: { data: PageData }): JSX.Element {
  return <>{[Summary, RanksTimeline as Draw, EachRank, Suspects, Held, HeatMaps as Draw, Ranks, Named, Communication, Layers, Missing, Trace].map((One, i) => <One key={i} data={data} />)}</>;
}

const Summary: Draw = ({ data }) => {
  const { job } = data;
  const busy = (job.ranks as Row[]).map(own);
  const blamed = job.verdict !== "none";
  return (
    <div id="view-summary">
      <p class={blamed ? "big blamed" : "big"} data-verdict={job.verdict} style={blamed ? { borderLeftColor: culprit(data) } : undefined}>{cut(job.sentence, 800)}</p>
      <Lines of={job.evidence} />
      <Lost data={data} />
      <div class="figures">
        {isKnown(job.wall_ms_per_step) && <Figure label="A step" value={ms(job.wall_ms_per_step)} help="on the clock, ranks waiting for one another" />}
        {busy.length > 1 && <Figure label="The slowest rank is busy" value={us(busy.reduce((a, b) => Math.max(a, b), 0))} help="what it does itself in a step" />}
        {isKnown(job.ideal_ms_per_step) && <Figure label="If all were alike" value={ms(job.ideal_ms_per_step)} help="each rank as quick as the typical one" />}
        {blamed && isKnown(job.lost_ms_per_step) && <Figure label="Lost by it" value={ms(job.lost_ms_per_step)} help="per step: what the job gains without it" />}
        {blamed && isKnown(job.share) && <Figure label="Of the lost time" value={share(job.share)} help="a step less one in which all are alike" />}
        <Figure label="Confidence" value={job.confidence} help={`${steps(data)} steps were judged`} />
        {/* The published quantities are about stages. */}
        {job.stages.length > 1 && isKnown(job.ms) && <Figure label="Ms" value={job.ms.toFixed(3)} help="part of the lost time due to the last stage" />}
        {job.stages.length > 1 && isKnown(job.mw) && <Figure label="Mw" value={job.mw.toFixed(3)} help="part of it due to the slowest few ranks" />}
      </div>
    </div>
  );
};

const Lost: Draw = ({ data }) => {
  const { job } = data;
  if (!job.causes.length) return null;
  const colors = [culprit(data), kindColor(data, "backward"), kindColor(data, "data")];
  const each = (job.causes as Row[]).map((row, i) => ({ name: `${row["who"]}: ${row["cause"]}`, value: (row["lost_ns"] as number) / 1e6, color: colors[i] ?? "#999999", help: i ? "without those before it" : "the verdict" }));
  const rest = Math.max(0, job.differ_ms_per_step - each.reduce((total, part) => total + part.value, 0));
  return <Shares title={`Lost of a step, as ranks differ: ${ms(job.differ_ms_per_step)}`} parts={[...each, { name: "spread over all", value: rest, color: kindColor(data, "other"), help: "nobody's" }]} format={value => us(value * 1000)} of="the lost time" />;
};

// ---- each rank --------------------------------------------------------------------------------------------------------

const MOST_BARS = 200; // of a small chart

/** What a rank did itself in a step, in microseconds. */
const own = (row: Row): number => Object.values(row["own_ms_per_step"] as Record<string, number | null>).reduce<number>((total, value) => total + (value ?? 0), 0) * 1000;

const EachRank: Draw = ({ data }) => {
  const rows = data["job"].ranks as Row[];
  if (rows.length < 2) return null;
  const named = new Set(rows.flatMap((row, i) => (isNamed(data, row["rank"] as number) ? [i] : [])));
  const each = Math.ceil(rows.length / MOST_BARS);
  const columns = Array.from({ length: Math.ceil(rows.length / each) }, (_, at) => rows.slice(at * each, (at + 1) * each).map((_, i) => at * each + i));
  const unknown = data["job"].unknown ?? {};
  const charts: [title: string, of: (row: Row) => number | null, format: (value: number) => string, help: string][] = [
    ["Self time", own, us, "of a step: what a rank did itself"],
    ["Waiting", row => (isKnown(row["waiting_ms_per_step"]) ? (row["waiting_ms_per_step"] as number) * 1000 : null), us, "of a step: for others, in communication"],
    ["Peak memory", row => row["peak_bytes"] as number | null, bytes, "the highest allocated"],
    ["MFU", row => row["mfu"] as number | null, share, "model FLOPs utilization of a step"],
  ];
  const reasons = ([["Peak memory", unknown.peak_bytes], ["MFU", unknown.mfu]] as const).filter(([, why]) => why) as [string, string][];
  const isOneReason = reasons.length === 2 && reasons[0]![1] === reasons[1]![1];
  return (
    <Section title={`Each of ${count(rows.length)} ranks`} help="In order; a bar's tooltip names the rank; coloured: an outlier; marked below: named by the verdict">
      <div class="multiples" style={{ "--outlier": culprit(data), gridTemplateColumns: "repeat(auto-fit, minmax(min(18rem, 100%), 1fr))" }}>
        {charts.map(([title, of, format, help]) => {
          const values = rows.map(of);
          if (!values.some(isKnown)) return null;
          const middle = median(values.filter(isKnown));
          const far = (i: number) => (isKnown(values[i]) ? Math.abs(values[i] - middle) : -1);
          const shown = columns.map(column => column.find(i => named.has(i)) ?? column.reduce((best, i) => (far(i) > far(best) ? i : best)));
          const drawn = shown.map(i => values[i]);
          const rank = (at: number) => rows[shown[at]!]!["rank"] as number;
          return <Bars key={title} title={title} values={drawn} labels={shown.map((_, at) => `rank ${rank(at)}`)} format={format} far={outliers(drawn)} marked={new Set(shown.flatMap((i, at) => (named.has(i) ? [at] : [])))} help={help} short={at => `rank ${rank(at)}`} onChoose={at => { rankChosen.value = rank(at); }} />;
        })}
      </div>
      {each > 1 && <p class="note">{each} ranks a bar: the one that the verdict names, else the one farthest from the median.</p>}
      {isOneReason ? <p class="note">Peak memory and MFU are not known: {reasons[0]![1]}</p> : reasons.map(([what, why]) => <p key={what} class="note">{what} is not known: {why}</p>)}
    </Section>
  );
};

// ---- why --------------------------------------------------------------------------------------------------------------

const Suspects: Draw = ({ data }) => {
  const rows = (data["job"].suspects as Row[]).filter(row => (row["lost_ns"] as number) > 0 && (row["share"] as number) >= 0.01);
  const columns = useMemo((): Column<Row>[] => [
    { key: "who", title: "Who", kind: "text", longest: 60 },
    { key: "cause", title: "Cause", kind: "text" },
    msColumn("lost_ns", "Per step", { of: row => (isKnown(row["lost_ns"]) ? (row["lost_ns"] as number) / 1e6 : null) }),
    { key: "share", title: "Of the lost time", kind: "share", bar: true },
    { key: "steps", title: "Steps", kind: "count", help: "in which it cost the job time", value: row => row["steps"] || undefined },
  ], [data]);
  return (
    <Section title="Suspects">
      <p class="note">{rows.length ? "What the job gains without each of them, others as they are: they overlap, so shares may add up to more than all." : "Nobody costs the job time beyond the noise."}</p>
      {rows.length > 0 && <Table name="suspects" label="Suspects" rows={rows} columns={columns} search={false} limit={12} />}
    </Section>
  );
};

const Held: Draw = ({ data }) => {
  const lost = data["job"].lost as Row[];
  if (!lost.length) return null;
  const stages = [...grouped(lost, row => row["stage"] as number)];
  return (
    <Section title="What a step is made of">
      <p class="note">Kind after kind, what each adds to the time of the rank slowest so far. The parts add up to the mean of the longest step, which is another rank's in each.</p>
      {stages.map(([stage, rows]) => (
        <Shares key={stage} title={stages.length > 1 ? `Stage ${stage}` : "A step"} format={value => us(value * 1000)} of="it" parts={rows.map(row => ({
          name: row["kind"] as string, value: row["held_ms_per_step"] as number, color: kindColor(data, row["kind"] as string),
          help: row["most_by_rank"] === null ? "all ranks alike" : `mostly on rank ${row["most_by_rank"]} (${share(row["share_of_that_rank"] as number)})`,
        }))} />
      ))}
    </Section>
  );
};

// ---- tables -----------------------------------------------------------------------------------------------------------

const PLACES = ["pp", "dp", "tp", "cp", "ep"];
const SLOW = 0.75; // a score under it

const Ranks: Draw = ({ data }) => {
  const { job } = data;
  // Those that are named come first, then those that scored low throughout, then by number.
  const rows = useMemo(() => {
    const place = (row: Row) => (isNamed(data, row["rank"] as number) ? 0 : row["flagged"] ? 1 : 2);
    return [...(job.ranks as Row[])].sort((a, b) => place(a) - place(b) || (a["rank"] as number) - (b["rank"] as number));
  }, [data]);
  const columns = useMemo((): Column<Row>[] => {
    const unknown = job.unknown ?? {};
    const any = (of: (row: Row) => unknown) => rows.some(row => isKnown(of(row)) && of(row) !== "" && of(row) !== 0);
    const staged = new Set(rows.map(row => row["stage"])).size > 1;
    const kind = (row: Row, name: string) => (row["own_ms_per_step"] as Record<string, number | null>)[name];
    const when = (is: boolean, column: Column<Row>) => (is ? [column] : []);
    /** Marked where it is low, or was for some windows in a row. */
    const score = (key: string, flag: string, title: string, help: string, more: Partial<Column<Row>> = {}): Column<Row> => ({
      key, title, kind: "number", help: `${help}; ! below 0.75, * below it for some windows of steps in a row`, ...more,
      cell: row => {
        const value = row[key] as number | null;
        const mark = !isKnown(value) ? "" : value < SLOW ? "!" : row[flag] ? "*" : "";
        return mark ? <strong>{value!.toFixed(2)}{mark}</strong> : undefined;
      },
    });
    return [
      rankColumn(data, "rank", "Rank"),
      ...when(any(row => row["share"]), { key: "share", title: "Of the lost time", kind: "share", bar: true }),
      ...when(staged, { key: "stage", title: "Stage", kind: "count" }),
      ...PLACES.filter(place => any(row => row[place])).map((place): Column<Row> => ({ key: place, title: place, kind: "count", spare: 6 })),
      ...when(any(row => row["host"]), { key: "host", title: "Host", kind: "text", longest: 24, spare: 4 }),
      ...Object.keys(data["page"].colors.kind).filter(name => any(row => kind(row, name)))
        .map(name => msColumn(name, name, { of: row => kind(row, name) ?? 0, help: "self time per step", ...({ other: { spare: 2 }, optimizer: { spare: 1 } }[name] ?? {}) })),
      msColumn("waiting_ms_per_step", "Waiting", { help: "for others, per step", missing: unknown.waiting_ms_per_step ?? "not known" }),
      msColumn("wall_ms_per_step", "Step"),
      score("relative_score", "flagged_relative", "Score", `the quickest rank${staged ? " of its stage" : ""} over this one`),
      score("individual_score", "flagged_individual", "Own score", "its own best against now", { spare: 5 }),
      msColumn("late_ms_per_step", "Late", { help: "by how much it came last to collectives, per step", spare: 3 }),
      { key: "times_last", title: "Times last", kind: "count", help: "to how many collectives it came last, in all steps", spare: 7 },
      ...when(any(row => row["peak_bytes"]), { key: "peak_bytes", title: "Peak memory", kind: "bytes", help: "the highest allocated", missing: unknown.peak_bytes ?? "not known" }),
      ...when(any(row => row["mfu"]), { key: "mfu", title: "MFU", kind: "share", missing: unknown.mfu ?? "not known" }),
    ];
  }, [data]);
  const chosen = rankChosen.value;
  return (
    <Section title="Ranks">
      <p class="note">Times are per step, the mean of the {count(steps(data))} steps that were judged. Own time is what a rank did itself, communication its transfer alone; what it waited for others stands apart{job.waiting === "estimated" ? ", and is estimated" : ""}. Other is in no span, or in one whose name tells no kind. Those that the verdict names come first.</p>
      <Table name="ranks" label="Ranks" rows={rows} columns={columns} id={row => String(row["rank"])} selected={null} rowClass={row => (row["rank"] === chosen ? "selected" : "")} onSelect={row => choose(row && (row["rank"] as number))} />
    </Section>
  );
};

const Named: Draw = ({ data }) => {
  const rows = (data["job"].named_spans ?? []) as Row[];
  const columns = useMemo((): Column<Row>[] => [
    { key: "name", title: "Span", kind: "text", longest: 60 },
    msColumn("others_ms_per_step", "Others", { missing: "there is one rank" }),
    msColumn("slowest_ms_per_step", "Slowest"),
    rankColumn(data, "slowest_rank", "Of rank"),
    { key: "per_step", title: "Per step", kind: "number", help: "times a rank has it in a step" },
    { key: "nested", title: "Place", kind: "text", value: row => (row["nested"] ? "within others" : undefined) },
  ], [data]);
  if (!rows.length) return null;
  return (
    <Section title="Named spans of no known kind">
      <p class="note">Names that tell no kind: their time is in other, or in the spans that they are within. Others: the median of the other ranks.</p>
      <Table name="named-spans" label="Named spans of no known kind" rows={rows} columns={columns} search={false} />
    </Section>
  );
};

const Communication: Draw = ({ data }) => {
  const rows = data["job"].communication as Row[];
  const columns = useMemo((): Column<Row>[] => {
    const alone = "the others of its group do not tell of it";
    const ofOne = (key: string): Partial<Column<Row>> & { value: (row: Row) => number | null } => ({ value: row => (row[key] === null ? null : (row[key] as number) / 1000 / Math.max(1, row["size"] as number)) });
    const why = (otherwise: string) => (row: Row) => (row["unknown"] as string) || otherwise;
    return [
      { key: "name", title: "Communication", kind: "text", longest: 48, value: row => (row["is_call"] ? `${row["name"]} (call)` : row["name"]) },
      { key: "group", title: "Group", kind: "text", longest: 32, value: row => (row["group"] === "stage 0" && data["job"].stages.length < 2 ? "all" : row["group"] || undefined), missing: "the calling thread does not tell who takes part" },
      { key: "size", title: "Ranks", kind: "count" },
      { key: "instances", title: "Times", kind: "count" },
      { key: "bytes", title: "Bytes", kind: "bytes", missing: "not recorded" },
      { key: "bandwidth_bytes_per_s", title: "Bandwidth", kind: "bandwidth", missing: why("bytes or transfer are not known") },
      { key: "time_ns", title: "Time", kind: "us", ...ofOne("time_ns") },
      { key: "transfer_ns", title: "Transfer", kind: "us", missing: alone, like: "time_ns", ...ofOne("transfer_ns") },
      { key: "waiting_ns", title: "Waiting", kind: "us", missing: alone, like: "time_ns", ...ofOne("waiting_ns") },
      { key: "waited", title: "Waited", kind: "share", bar: true, help: "of the time", value: row => (row["waiting_ns"] === null || !row["time_ns"] ? null : (row["waiting_ns"] as number) / (row["time_ns"] as number)), missing: alone },
      { key: "overlapped_ns", title: "Beside compute", kind: "us", like: "time_ns", help: "of the time: while its rank computed", missing: why("not known"), spare: 1, ...ofOne("overlapped_ns") },
    ];
  }, [data]);
  if (!rows.length) return <Section title="Communication"><p class="note">No communication was recorded.</p></Section>;
  const known = rows.filter(row => row["transfer_ns"] !== null);
  return (
    <Section title="Communication">
      <p class="note">Of one rank, over all steps. Transfer is the shortest duration over the ranks of each instance, as who came last did not wait; the rest is waiting. Bandwidth is bytes over transfer.{rows.some(row => row["is_call"]) ? " (call): what the calling thread takes to start the collectives of that name." : ""}</p>
      {known.length > 0 && <Shares title="All ranks together" format={us} of="the time in communication" parts={[
        { name: "transfer", value: sum(known, "transfer_ns")! / 1000, color: kindColor(data, "communication") },
        { name: "waiting for others", value: sum(known, "waiting_ns")! / 1000, color: kindColor(data, "waiting") },
      ]} />}
      <Table name="ranks-communication" label="Communication" rows={rows} columns={columns} sort={{ key: "time_ns", descending: true }} />
    </Section>
  );
};

const Layers: Draw = ({ data }) => {
  const rows = data["over_ranks"] as Row[];
  const columns = useMemo((): Column<Row>[] => [
    { key: "layer", title: "Layer", kind: "text", longest: 64 },
    { key: "kind", title: "Phase", kind: "text", cell: row => (row["kind"] ? <Marked color={kindColor(data, row["kind"] as string)}>{cut(row["kind"], 30)}</Marked> : undefined) },
    { key: "ranks", title: "Ranks", kind: "count", spare: 1 },
    msColumn("median_ms", "Median"),
    msColumn("quickest_ms", "Quickest", { spare: 2 }),
    msColumn("spread_ms", "Spread", { like: "median_ms", spare: 3, help: "1.48 times the median deviation over ranks, which of normal noise is its standard deviation" }),
    msColumn("slowest_ms", "Slowest"),
    rankColumn(data, "slowest_rank", "Of rank", { missing: "no rank is slower than the others" }),
    msColumn("beyond_ms", "Beyond", { help: "of the slowest rank, over the median" }),
    { key: "outliers", title: "Outliers", kind: "text", value: row => { const far = row["outliers"] as number[]; return far.length ? far.slice(0, 12).join(", ") + (far.length > 12 ? " …" : "") : undefined; } },
  ], [data]);
  if (!rows.length) return <Section title="Layers"><p class="note">No span is of a layer.</p></Section>;
  return (
    <Section title="Layers">
      <p class="note">Per step, what is below a layer included. Outliers are ranks more than four spreads, and a tenth, beyond the median. A click chooses the slowest rank.</p>
      <Table name="ranks-layers" label="Layers over the ranks" rows={rows} columns={columns} sort={{ key: "beyond_ms", descending: true }} onSelect={row => { if (row && isKnown(row["slowest_rank"])) rankChosen.value = row["slowest_rank"] as number; }} />
    </Section>
  );
};

const Missing: Draw = ({ data }) => {
  const { clocks, missing } = data["job"];
  const by = clocks ? { collectives: "ends of collectives", steps: "ends of steps" }[clocks.source as string] : undefined;
  const residual = clocks && isKnown(clocks.residual_us) ? `${us(clocks.residual_us)}, at most ${us(clocks.largest_residual_us)}` : "not known";
  const told = clocks ? [by ? `aligned by ${count(clocks.events)} ${by}; residual ${residual}` : "not aligned", ...clocks.notes] : ["starts of different ranks cannot be compared"];
  const gaps = (missing as Row[]).slice(0, 100).map(row => `${row["what"]}: ${row["reason"]}`);
  return (
    <>
      {gaps.length > 0 && <Section title="Missing"><Lines of={gaps} /></Section>}
      <Section title="Clocks"><Lines of={told} /></Section>
    </>
  );
};

const Trace: Draw = ({ data }) => (
  data["page"].trace_href ? <Section title="The whole trace, in another viewer"><TraceOf href={data["page"].trace_href} title={data["page"].title} say="A process for each rank, with arrows from who came last to who waited for it" search="a rank, or a layer by its name" /></Section> : null
);
