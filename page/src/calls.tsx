/** What stands between the compute: collectives, and waits of the CPU. */
import type { JSX } from "preact";
import { grouped, mean, onDevice, per, perStep, rowsOf, stepTimes, sum, timeName } from "./basis";
import { markColumn, ofSelection } from "./cells";
import { Figure, Shares } from "./chart";
import { colorOf } from "./colors";
import { bytes, count, share, us } from "./format";
import type { PageData, Row } from "./page_data";
import { Marked } from "./parts";
import { type Column, Table, UNFOLDING, unfolding } from "./table";

const UNKNOWN_IN_TRACE = "not known from the trace";
const EXPOSED = "#D55E00";
const HIDDEN = "#56B4E9";
const KIND = ["collective", "group", "group_size", "dtype"];

// ---- communication ----------------------------------------------------------------------------------------------------

export function whyNoCommunication(data: PageData): string | null {
  if (data["collectives"].length) return null;
  return Number(data["run"].world_size || 1) > 1 ? "no collective was found in this trace" : "no collective ran: this was one process, or the trace holds none of its communication";
}

export function CommunicationView({ data }: { data: PageData }): JSX.Element {
  const { rows: of, said } = ofSelection(data, rowsOf(data, "collectives"), { layer: "layer" });
  const rows = unfolding(grouped(of, row => JSON.stringify(KIND.map(key => row[key]))), mergedCollective);
  const isKnown = of.every(row => row["exposed_us"] !== null);
  const parts = isKnown ? [
    { name: "exposed", value: perStep(data, sum(of, "exposed_us") ?? 0), color: EXPOSED, help: "with no compute beside it: this is what it costs" },
    { name: "overlapped", value: perStep(data, sum(of, "overlapped_us") ?? 0), color: HIDDEN, help: "with compute beside it" },
  ] : rows.filter(row => row["parent"] === null).map((row, i) => ({
    name: `${String(row["collective"]).replaceAll("_", " ")} ${row["dtype"]}`, value: perStep(data, row["time_us"] as number), color: i % 2 ? HIDDEN : colorOf(data, "class", "communication"),
  }));
  return (
    <>
      <CommunicationFigures data={data} />
      <Shares title={isKnown ? `Exposed and overlapped, ${per(data)}, each collective by itself` : `Wall time of the calls, ${per(data)}`} parts={parts} format={us} of="the time of collectives" />
      <p class="note">
        Counts, bytes and times are {per(data)}. Bytes are those of one rank: the larger of what goes in and what comes out. Bus bandwidth is what nccl-tests call busbw: it compares with the speed of the
        link.{onDevice(data) ? "" : " On a CPU it is known of all together, not of each, what compute hides."} A row unfolds into its layers and phases.
      </p>
      {said}
      <Table name="communication" label="Collectives" rows={rows} columns={collectiveColumns(data)} {...UNFOLDING} sort={{ key: "time_us", descending: true }} />
    </>
  );
}

/** One row a kind of collective in one group with one type of number. */
function mergedCollective(group: Row[]): Row {
  const time = sum(group, "time_us") ?? 0;
  const isWhole = (key: string): boolean => group.every(row => row[key] !== null);
  const all = (key: string): number | null => (isWhole(key) ? sum(group, key) : null);
  const rate = (key: string): number | null => (isWhole(key) && time ? group.reduce((total, row) => total + (row[key] as number) * (row["time_us"] as number), 0) / time : null);
  return {
    ...group[0], layer: [...new Set(group.map(row => row["layer"]))], phase: [...new Set(group.map(row => row["phase"]))].join(", "), count: sum(group, "count"), time_us: time,
    payload_bytes: all("payload_bytes"), exposed_us: all("exposed_us"), overlapped_us: all("overlapped_us"),
    bandwidth_bytes_per_s: rate("bandwidth_bytes_per_s"), bus_bandwidth_bytes_per_s: rate("bus_bandwidth_bytes_per_s"),
  };
}

function collectiveColumns(data: PageData): Column<Row>[] {
  const unknownBytes = "how much it moves is not known from the trace";
  const noDevice = "without device events it is not known what compute hides";
  const times = (key: string, title: string, help: string, more: Partial<Column<Row>> = {}): Column<Row> => ({ key, title, kind: "us", help, value: row => perStep(data, row[key] as number | null), ...more });
  return [
    { key: "collective", title: "Collective", kind: "text", longest: 30, shown: text => text.replaceAll("_", " ") },
    { key: "layer", title: "Layer", kind: "layer", longest: 30, missing: "the layer is not known", spare: 2 },
    markColumn(data, "phase", "phase", "Phase", { missing: "the phase is not known", spare: 3 }),
    { key: "group", title: "Group", kind: "text", longest: 24, missing: UNKNOWN_IN_TRACE, value: row => row["group"] || null, spare: 6 },
    { key: "group_size", title: "Ranks", kind: "count", help: "in the group", missing: UNKNOWN_IN_TRACE },
    { key: "dtype", title: "Type", kind: "text", missing: UNKNOWN_IN_TRACE, value: row => row["dtype"] || null, spare: 1 },
    { key: "count", title: "Count", kind: "count", help: per(data), value: row => perStep(data, row["count"] as number) },
    { key: "payload_bytes", title: "Bytes", kind: "bytes", help: `${per(data)}: the larger of what goes in and comes out`, missing: unknownBytes, value: row => perStep(data, row["payload_bytes"] as number | null) },
    times("time_us", timeName(data), per(data)),
    times("exposed_us", "Exposed", "with no compute beside it: this is what it costs", { like: "time_us", missing: noDevice }),
    times("overlapped_us", "Overlapped", "with compute beside it", { like: "time_us", missing: noDevice, spare: 5 }),
    { key: "exposed_share", title: "Exposed", kind: "share", bar: true, help: "of its own time", missing: noDevice, value: row => (row["exposed_us"] == null || !row["time_us"] ? null : (row["exposed_us"] as number) / (row["time_us"] as number)) },
    { key: "bandwidth_bytes_per_s", title: "Bandwidth", kind: "bandwidth", help: "bytes over time", missing: unknownBytes, spare: 4 },
    { key: "bus_bandwidth_bytes_per_s", title: "Bus bandwidth", kind: "bandwidth", help: "as nccl-tests define it", missing: unknownBytes },
  ];
}

function CommunicationFigures({ data }: { data: PageData }): JSX.Element {
  const rows = rowsOf(data, "collectives");
  const time = perStep(data, sum(rows, "time_us") ?? 0);
  const exposed = data["time"].exposed_communication_us as number | null;
  const took = stepTimes(data);
  const span = data["page"].like_steps && took.times.length ? mean(took.times) : null;
  const ofStep = (value: number): string => (span ? `${share(value / span)} of ${took.label === "CPU span" ? "a step's CPU span" : "a step"} of ${us(span)}` : "");
  const moved = sum(rows, "payload_bytes");
  const unknown = sum(rows.filter(row => row["payload_bytes"] === null), "count");
  return (
    <div class="figures">
      {onDevice(data) ? <Figure label={`Communication, ${per(data)}`} value={us(time)} help={ofStep(time)} />
        : <Figure label={`Wall time of the calls, ${per(data)}`} value={us(time)} help="without what other threads do for them, and without waiting" />}
      <Figure label={`Exposed, ${per(data)}`} value={exposed === null ? null : us(perStep(data, exposed))} missing="no collective is seen to run"
        help={exposed === null ? undefined : ["with no compute beside it, waiting for other ranks included", ofStep(perStep(data, exposed))].filter(Boolean).join(": ")} />
      <Figure label={`Moved, ${per(data)}`} value={moved === null ? null : bytes(perStep(data, moved))} missing={UNKNOWN_IN_TRACE}
        help={moved !== null && unknown ? `at least: of ${count(perStep(data, unknown))} collectives it is not known` : undefined} />
      <Figure label="Collectives" value={count(perStep(data, sum(rows, "count")))} help={per(data)} />
    </div>
  );
}

// ---- waits ------------------------------------------------------------------------------------------------------------

const WAIT_COLORS: Readonly<Record<string, string>> = { item: "#D55E00", nonzero: "#CC79A7", "blocking copy": "#E69F00", stream: "#0072B2", device: "#56B4E9", event: "#009E73", other: "#999999" };
const CURES: Readonly<Record<string, string>> = {
  item: "a number is read from the device: .item(), float(tensor), if tensor: read it less often, or after the step",
  nonzero: "the size of a result depends on the data: nonzero, masks as indices, unique: use torch.where or a fixed size",
  "blocking copy": "a copy that the CPU waits for: pin the memory and pass non_blocking=True",
  stream: "the CPU waits for one stream",
  device: "the CPU waits for the whole device: torch.cuda.synchronize()",
  event: "the CPU waits for an event",
  other: "another call that waits",
};

const waitsForData = (data: PageData): number => sum(data["overview"]?.steps ?? [], "dataloader_us") ?? 0;

export function whyNoWaits(data: PageData): string | null {
  if (data["synchronisations"].length || waitsForData(data)) return null;
  return data["time_basis"] === "cpu" ? "nothing ran on a device that the CPU could wait for, and nothing waited for a DataLoader" : "no wait of the CPU for the device or a DataLoader was found in this trace, but for that at the end of the recording";
}

export function WaitsView({ data }: { data: PageData }): JSX.Element {
  const all = rowsOf(data, "synchronisations");
  const { rows, said } = ofSelection(data, all, { layer: "layer", op: "op" });
  const hasSources = all.some(row => (row["sources"] as string[]).length);
  const steps: Row[] = data["overview"]?.steps ?? [];
  const kinds = [...grouped(all, row => row["kind"] as string)].map(([name, group]) => ({ name, value: perStep(data, sum(group, "wait_us") ?? 0), color: WAIT_COLORS[name] ?? "#999999", help: CURES[name] }));
  const columns: Column<Row>[] = [
    { key: "kind", title: "Kind", kind: "text", cell: row => <span title={CURES[row["kind"] as string]}><Marked color={WAIT_COLORS[row["kind"] as string] ?? "#999999"}>{row["kind"] as string}</Marked></span> },
    { key: "op", title: "Op or call", kind: "text", longest: 40 },
    { key: "layer", title: "Layer", kind: "layer", longest: 34, missing: "the layer is not known" },
    markColumn(data, "phase", "phase", "Phase", { missing: "the phase is not known", spare: 1 }),
    { key: "count", title: "Waits", kind: "count", help: `Waits ${per(data)}`, value: row => perStep(data, row["count"] as number) },
    { key: "wait_us", title: "Waited", kind: "us", help: `Wall time in the call, ${per(data)}`, value: row => perStep(data, row["wait_us"] as number) },
    { key: "each_us", title: "Each", kind: "us", help: "of one wait, in the mean", value: row => (row["count"] ? (row["wait_us"] as number) / (row["count"] as number) : null), spare: 2 },
    ...(hasSources ? [{ key: "sources", title: "Source", kind: "text", longest: 44, value: row => ((row["sources"] as string[]).length ? row["sources"] : undefined) } satisfies Column<Row>] : []),
    { key: "cure", title: "What helps", kind: "text", longest: 110, value: row => CURES[row["kind"] as string], spare: 3 },
  ];
  return (
    <>
      <div class="figures">
        {waitsForData(data) > 0 && <Figure label="The CPU waits for the DataLoader, per step" value={us(waitsForData(data) / steps.length)} help={`${share(waitsForData(data) / (sum(steps, "span_us") || 1))} of the steps' wall time`} />}
        {all.length > 0 && <Figure label={`The CPU waits, ${per(data)}`} value={us(perStep(data, sum(all, "wait_us")))} help="time in calls that wait for the device" />}
        {all.length > 0 && <Figure label={`Waits, ${per(data)}`} value={count(perStep(data, sum(all, "count")))} />}
      </div>
      {all.length > 0 && (
        <>
          <Shares title={`By kind, ${per(data)}`} parts={kinds.sort((a, b) => b.value - a.value)} format={us} of="the time of waits" />
          <p class="note">While the CPU waits it launches nothing, so the device runs dry after the wait. A wait at the end of a step, as for a loss that is printed, may be meant; one inside a layer hardly ever is.</p>
          {said}
          <Table name="waits" label="Waits of the CPU" rows={rows} columns={columns} sort={{ key: "wait_us", descending: true }} search />
          {!hasSources && <p class="note">Lines of code are not known, as Python stacks were not recorded (with_stack=True).</p>}
          <ul class="cures">{kinds.map(kind => <li key={kind.name}><Marked color={kind.color}>{kind.name}</Marked>: {CURES[kind.name]}</li>)}</ul>
        </>
      )}
    </>
  );
}
