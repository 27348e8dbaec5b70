/** What is printed, whatever place is shown: verdict, the step's bar, findings, the tree of layers, the peak. */
import type { JSX } from "preact";
import { per, timeName } from "./basis";
import { bytes, columnFormat, cut, isKnown } from "./format";
import type { PageData, Row } from "./page_data";
import { Section } from "./parts";
import { Findings } from "./step/findings";
import { Shares } from "./step/made_of";
import { splitOf, SplitTable, Strip } from "./step/step_bar";
import { verdictOf } from "./step/verdict";

const MOST_LAYERS = 150;
const MOST_OWNERS = 15;

export function Sheet({ data }: { data: PageData }): JSX.Element {
  const verdict = verdictOf(data);
  const split = splitOf(data);
  return (
    <div class="sheet">
      {verdict && <><p class="big">{cut(verdict.headline, 300)}</p><p>{cut(verdict.more, 600)}</p>{verdict.fix && <p><b>First fix:</b> {cut(verdict.fix, 600)}</p>}</>}
      {split && <Section title={`Where ${split.of} went${split.mean}`}><Strip data={data} split={split} /><SplitTable split={split} /></Section>}
      <Findings data={data} gaps={null} />
      <Shares data={data} />
      <Tree data={data} />
      <Peak data={data} />
    </div>
  );
}

/** Layers that are folded together are one row. */
function Tree({ data }: { data: PageData }): JSX.Element | null {
  const view = data["views"].layers;
  if (view.failed) return null;
  const all: Row[] = view.total;
  const depth = new Map<unknown, number>();
  const rows: Row[] = [];
  for (const row of all) {
    const above = row["parent"] === null ? -1 : depth.get(row["parent"]);
    if (above === undefined) continue; // in a fold, or below one of it
    if (typeof row["parent"] === "string" && row["parent"].startsWith("\0group")) continue;
    depth.set(row["id"], above + 1);
    rows.push(row);
  }
  const shares = columnFormat("share", []);
  const format = columnFormat("us", rows.map(row => row["time"]));
  const keys: [key: string, title: string, kind: string][] = [["flops", "FLOPs", "flops"], ["retained", "Retained", "bytes"], ["peak", "Peak", "bytes"]];
  const shown = keys.filter(([key]) => rows.some(row => row[key])).map(([key, title, kind]) => ({ key, title, format: columnFormat(kind, rows.map(row => row[key])) }));
  const cell = (row: Row, key: string, text: (value: unknown) => string): string => (isKnown(row[key]) ? text(row[key]) : "");
  return (
    <Section title={`Layers: ${timeName(data).toLowerCase()} ${per(data)}`}>
      <table class="plain">
        <thead><tr><th>Layer</th><th class="number">Time {format.unit}</th><th class="number">Share %</th>{shown.map(one => <th key={one.key} class="number">{one.title} {one.format.unit}</th>)}</tr></thead>
        <tbody>
          {[...rows.slice(0, MOST_LAYERS), view.whole as Row].map(row => (
            <tr key={String(row["id"])} class={row["row"] === "total" ? "total" : undefined}>
              <td style={{ paddingLeft: `${Math.min(12, depth.get(row["id"]) ?? 0)}rem` }}>{cut(row["label"], 70)}{isKnown(row["fold"]) && ` (${view.groups[row["fold"] as number].layers.length}×)`}</td>
              <td class="number">{cell(row, "time", format.text)}</td><td class="number">{cell(row, "share", shares.text)}</td>{shown.map(one => <td key={one.key} class="number">{cell(row, one.key, one.format.text)}</td>)}
            </tr>
          ))}
        </tbody>
      </table>
      {rows.length > MOST_LAYERS && <p class="note">and {rows.length - MOST_LAYERS} more rows, in the page</p>}
    </Section>
  );
}

function Peak({ data }: { data: PageData }): JSX.Element | null {
  const peak = data["memory"]?.peak;
  if (!isKnown(peak?.allocated_bytes)) return null;
  const owners: Row[] = peak.owners ?? [];
  return (
    <Section title={`Peak memory: ${bytes(peak.allocated_bytes)}${isKnown(peak.reserved_bytes) ? `, reserved ${bytes(peak.reserved_bytes)}` : ""}`}>
      <table class="plain">
        <thead><tr><th>Held by</th><th>What for</th><th>Allocated by</th><th class="number">Bytes</th></tr></thead>
        <tbody>{owners.slice(0, MOST_OWNERS).map((owner, i) => <tr key={i}><td>{cut(owner["name"] || owner["layer"] || "no layer", 70)}</td><td>{data["page"].category_names[owner["category"] as string] ?? String(owner["category"])}</td><td>{cut(owner["op"], 40)}</td><td class="number">{bytes(owner["bytes"] as number)}</td></tr>)}</tbody>
      </table>
      {owners.length > MOST_OWNERS && <p class="note">and {owners.length - MOST_OWNERS} more owners, in the page</p>}
    </Section>
  );
}
