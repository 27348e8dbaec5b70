/** A step on both sides: two bars on one scale, each part where the other bar has it too, coloured by certainty. */
import type { JSX } from "preact";
import { count, cut, full, us } from "../format";
import type { PageData, Row } from "../page_data";
import { Marked } from "../parts";
import { CERTAINTIES, type Certainty, certaintyWords, ofFolded, signed } from "./certainty";
import { grouped } from "../basis";
import "./compare.css";

const MOST = 14; // parts; the rest are one
const BETWEEN = 34; // pixels between both bars

interface Part {
  id: string; // place in the rows; "" of the rest
  name: string;
  a: number;
  b: number;
  certainty: Certainty;
}

const time = (row: Row, side: "a" | "b"): number => (row[`${side}_us`] as number | null) ?? 0;

export const nameOf = (row: Row): string => `${row["label"]} ${row["phase"]}`.trim();

function partsOf(rows: readonly Row[]): Part[] {
  const inSize = rows.map((row, i) => ({ row, i })).sort((x, y) => Math.max(time(y.row, "a"), time(y.row, "b")) - Math.max(time(x.row, "a"), time(x.row, "b")));
  const isShown = (row: Row, place: number) => place < MOST || (ofFolded(row) !== "no difference" && place < 2 * MOST);
  const shown = inSize.filter(({ row }, place) => isShown(row, place));
  const rest = inSize.filter(({ row }, place) => !isShown(row, place)).map(one => one.row);
  const parts = shown.map(({ row, i }): Part => ({ id: String(i), name: nameOf(row), a: time(row, "a"), b: time(row, "b"), certainty: ofFolded(row) }));
  if (rest.length) parts.push({ id: "", name: `${count(rest.length)} more`, a: rest.reduce((sum, row) => sum + time(row, "a"), 0), b: rest.reduce((sum, row) => sum + time(row, "b"), 0), certainty: "no difference" });
  return parts;
}

export function BothSteps({ data, rows, chosen, onChoose }: { data: PageData; rows: readonly Row[]; chosen: string | null; onChoose: (id: string) => void }): JSX.Element {
  const parts = partsOf(rows);
  const [a, b] = (["a", "b"] as const).map(side => parts.reduce((sum, part) => sum + part[side], 0)) as [number, number];
  const whole = Math.max(a, b) || 1;
  const said = (part: Part) => full(`${part.name}: ${us(part.a)} → ${us(part.b)}${part.a && part.b ? `, ${signed(part.b / part.a - 1)}` : ""}. ${certaintyWords(data, part.certainty)}`);
  let [atA, atB] = [0, 0];
  const between = parts.map(part => {
    const points = `${atA},0 ${atA + part.a / whole},0 ${atB + part.b / whole},1 ${atB},1`;
    atA += part.a / whole;
    atB += part.b / whole;
    return <polygon key={part.id} points={points} style={{ fill: CERTAINTIES[part.certainty].color }} class={part.id && part.id === chosen ? "chosen" : undefined} />;
  });
  const bar = (side: "a" | "b", name: string, total: number) => (
    <div class="side">
      <div class="label"><strong>{side}</strong> <span class="name">{cut(name, 60)}</span>: {us(total)}</div>
      <div class="strip" style={{ width: `${(100 * total) / whole}%` }}>
        {parts.filter(part => part[side] > 0).map(part => (
          <button key={part.id} type="button" title={said(part)} aria-label={said(part)} aria-pressed={part.id !== "" && part.id === chosen} disabled={!part.id}
            style={{ width: `${(100 * part[side]) / total}%`, "--of": CERTAINTIES[part.certainty].color }} onClick={() => onChoose(part.id)}>
            {part[side] > whole / 12 ? cut(part.name, 60) : ""}
          </button>
        ))}
      </div>
    </div>
  );
  const change = (group: readonly Part[]) => group.reduce((sum, part) => sum + part.b - part.a, 0);
  return (
    <figure class="both">
      {bar("a", data["comparison"].a, a)}
      <svg viewBox="0 0 1 1" preserveAspectRatio="none" height={BETWEEN} aria-hidden="true">{between}</svg>
      {bar("b", data["comparison"].b, b)}
      <ul class="legend">
        {[...grouped(parts, part => part.certainty)].map(([certainty, group]) => (
          <li key={certainty}><Marked color={CERTAINTIES[certainty].color}>{certaintyWords(data, certainty)}: {change(group) < 0 ? "−" : "+"}{us(Math.abs(change(group)))}</Marked></li>
        ))}
      </ul>
    </figure>
  );
}
