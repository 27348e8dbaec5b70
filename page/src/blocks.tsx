/** Small charts over the blocks of a model, one for each measure, so that an outlier among them shows. */
import type { JSX } from "preact";
import { useState } from "preact/hooks";
import { per } from "./basis";
import { Bars, outliers } from "./chart";
import { colorOf } from "./colors";
import { bytes, cut, flops, us } from "./format";
import type { Group, LayerRow, LayerRows } from "./layers_rows";
import type { PageData } from "./page_data";
import { Section } from "./parts";
import { select, selection } from "./state";

const MOST_GROUPS = 12;

export function BlockCharts({ data, layers }: { data: PageData; layers: LayerRows }): JSX.Element | null {
  const [chosen, setChosen] = useState(0);
  const groups = blockGroups(layers);
  const group = groups[chosen];
  if (!group) return null;
  const members = group.members;
  const named = group.outliers.map(one => members.findIndex(member => member.layer === one.layer)); // as in the table
  const here = selection.value?.kind === "layer" ? members.findIndex(member => member.layer === (selection.value as { name: string }).name) : -1;
  const measures: [string, string, (value: number) => string, string][] = [
    ...(data["page"].phases as string[]).map((phase): [string, string, (value: number) => string, string] => [phase, phase, us, colorOf(data, "phase", phase)]),
    ["attention", "attention", us, colorOf(data, "class", "attention")],
    ["exposed", "exposed comm.", us, colorOf(data, "class", "communication")],
    ["retained", "retained", bytes, colorOf(data, "category", "activation")],
    ["flops", "FLOPs", flops, colorOf(data, "split", "other")],
  ];
  const isCounted = (key: string): boolean => key === "retained" || key === "flops" || key === "exposed";
  return (
    <Section title="Blocks side by side" help="One bar a block; what is far from the others stands out">
      {groups.length > 1
        ? <select aria-label="Which blocks" value={chosen} onChange={event => setChosen(Number(event.currentTarget.value))}>{groups.map((one, i) => <option key={one.full} value={i}>{cut(one.full, 80)} ({one.layers.length})</option>)}</select>
        : <span class="quiet">{cut(group.full, 120)} ({members.length})</span>}
      <p class="note">Times and FLOPs {per(data)}. A dashed line is the median, a bar in another colour is an outlier, by the block's median step; a click selects the block.</p>
      <div class="multiples">
        {measures.map(([key, title, format, color]) => {
          const values = members.map(member => (isCounted(key) ? (member[key] as number | null) : ((member[key] as number | null) ?? 0)));
          if (!values.some(value => value !== null && value > 0)) return null;
          const far = new Set([...named, ...(key === "retained" || key === "flops" ? outliers(values) : [])]);
          const help = far.size ? `Outliers: ${[...far].slice(0, 8).map(i => cut(members[i]?.layer, 60)).join(", ")}` : "";
          return (
            <Bars key={key} title={title} values={values} labels={members.map(member => member.layer)} format={format} color={color} far={far} help={help}
              short={i => numberOf(members[i]!, i)} marked={new Set(here < 0 ? [] : [here])} onChoose={i => select({ kind: "layer", name: members[i]!.layer })} />
          );
        })}
      </div>
    </Section>
  );
}

/** Groups of blocks that are in no other group, the most time first; without blocks, the groups there are. */
function blockGroups({ groups, layers }: LayerRows): Group[] {
  const blocks = groups.filter(group => group.members.some(member => member.kind === "block"));
  const chosen = blocks.length ? blocks : groups;
  const inside = new Set(chosen.flatMap(group => group.layers));
  const isInner = (group: Group): boolean => {
    for (let above = group.parent; above; above = layers.get(above)?.above ?? null) if (inside.has(above)) return true;
    return false;
  };
  const time = (group: Group): number => group.row?.time ?? 0;
  return chosen.filter(group => !isInner(group) && group.members.length > 2).sort((a, b) => time(b) - time(a)).slice(0, MOST_GROUPS);
}

/** The number in the block's name: it need not be its place. */
const numberOf = (member: LayerRow, place: number): string => member.layer.match(/\d+/g)?.at(-1) ?? String(place);
