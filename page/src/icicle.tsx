/** The icicle of layers: by time, FLOPs or retained memory, of one phase or all. A click selects, a double click looks inside. */
import type { JSX, TargetedKeyboardEvent, TargetedMouseEvent } from "preact";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { per } from "./basis";
import { useCanvas } from "./chart";
import { colorOf, inkOn, themeColor } from "./colors";
import { bytes, cut, flops, full, share, us, type Value } from "./format";
import { type Field, fieldsOf, found, type Node, treeOf } from "./icicle_layout";
import type { LayerRow, LayerRows } from "./layers_rows";
import { columnOf, type PageData } from "./page_data";
import { Marked, Segments } from "./parts";
import { selection } from "./state";

type Measure = "time" | "flops" | "retained";
const TITLES: Record<Measure, string> = { time: "Time", flops: "FLOPs", retained: "Retained memory" };
const FORMATS: Record<Measure, (value: Value) => string> = { time: us, flops, retained: bytes };
const DEPTH = 6;
const LEVEL = 27; // pixels
const LETTER = 6.8; // pixels, in the mean
const LIGHT = "#c9c9c9"; // kinds without a colour: large fields, on which names are read

export function Icicle({ data, layers }: { data: PageData; layers: LayerRows }): JSX.Element | null {
  const [measure, setMeasure] = useState<Measure>("time");
  const [phase, setPhase] = useState("all");
  const [zoomed, setZoomed] = useState<Node | null>(null);
  const [width, setWidth] = useState(0);
  const [hovered, setHovered] = useState<{ field: Field; x: number } | null>(null);
  const place = useRef<HTMLDivElement>(null);
  const pointed = useRef<Node | undefined>(undefined); // by the last click
  const all = useMemo(() => [...layers.layers.values()], [layers]);
  const needsWork = measure === "flops" && phase !== "all";
  const work = useMemo(() => (needsWork ? phaseWork(data) : null), [data, needsWork]);
  const valueOf = (row: LayerRow, of: Measure, within: string): Value =>
    within === "all" || of === "retained" ? row[of] : of === "time" ? (row[within] as Value) : work?.get(`${within} ${row.layer}`);
  const measures = (Object.keys(TITLES) as Measure[]).filter(one => all.some(row => (row[one] ?? 0) > 0));
  const phases = ["all", ...(data["page"].phases as string[]).filter(one => all.some(row => ((row[one] as number) ?? 0) > 0))];
  const shownPhase = measure === "retained" ? "all" : phase; // what forward keeps has no other phase
  const tree = useMemo(() => treeOf(all, row => valueOf(row, measure, shownPhase)), [all, measure, shownPhase]);
  const chosen = selection.value?.kind === "layer" ? selection.value.name : null;

  // What is looked into stays so in another measure; a layer that was chosen elsewhere is in sight.
  const root = tree && zoomed ? (isIn(tree, zoomed) ? zoomed : (found(tree, (zoomed.row ? zoomed : zoomed.parent ?? zoomed).id) ?? tree)) : tree;
  const levels = root ? Math.min(DEPTH, root.depth) : 0;
  const fields = useMemo(() => (root && width > 0 ? fieldsOf(root, width, levels) : []), [root, width, levels]);
  useEffect(() => {
    if (tree && chosen !== null && root && found(tree, chosen) && !found(root, chosen)) setZoomed(null);
  }, [chosen, tree]);

  useEffect(() => {
    const box = place.current;
    if (!box) return;
    const watcher = new ResizeObserver(() => setWidth(box.clientWidth));
    watcher.observe(box);
    return () => watcher.disconnect();
  }, [tree === null]);
  const color = (node: Node): string => (node.kind && node.kind !== "other" ? colorOf(data, "kind", node.kind) : LIGHT);
  const canvas = useCanvas(pen => draw(pen, fields, chosen, color, FORMATS[measure]), [], [fields, chosen]);

  if (!measures.length) return null;
  const kinds = [...new Set(all.map(row => row.kind))].filter(kind => kind && kind !== "other");
  const format = FORMATS[measure];
  const total = tree?.size ?? 0;
  const basis = `${phase === "all" || measure === "retained" ? "" : `${phase}, `}${measure === "retained" ? "kept for backward" : per(data)}`;

  const at = (event: TargetedMouseEvent<HTMLCanvasElement>): Field | undefined => {
    const level = Math.floor(event.offsetY / LEVEL);
    return fields.find(field => event.offsetX >= field.x && event.offsetX < field.x + field.width && level >= field.level && level < field.level + field.height);
  };
  const choose = (node: Node | undefined): void => {
    if (node?.row) selection.value = { kind: "layer", name: node.row.layer };
  };
  const lookInto = (node: Node | undefined): void => {
    if (node) setZoomed(node === root ? node.parent : node.children.length ? node : (node.parent ?? node));
  };
  const clicked = (event: TargetedMouseEvent<HTMLCanvasElement>): void => {
    if (event.detail > 1) return; // the panel that a selection opens moves the fields
    const field = at(event);
    pointed.current = field?.node;
    if (field?.kind === "more" && !field.node.row) lookInto(field.node);
    else choose(field?.node);
  };
  const pressed = (event: TargetedKeyboardEvent<HTMLCanvasElement>): void => {
    if (!root || !tree) return;
    const here = (chosen !== null && found(root, chosen)) || root;
    const siblings = here.parent?.children ?? [here];
    const beside = (by: number): Node | undefined => siblings[siblings.indexOf(here) + by];
    const acts: Record<string, () => void> = {
      ArrowLeft: () => choose(beside(-1)), ArrowRight: () => choose(beside(1)), ArrowUp: () => here !== root && choose(here.parent ?? undefined), ArrowDown: () => choose(here.children[0]),
      Enter: () => lookInto(here), Escape: () => setZoomed(root.parent), Backspace: () => setZoomed(root.parent),
    };
    const act = acts[event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act();
  };
  const path: Node[] = [];
  for (let up: Node | null = root; up; up = up.parent) path.unshift(up);

  return (
    <section class="icicle">
      <h2>Layers by {TITLES[measure].replace(/^[TR]/, letter => letter.toLowerCase())}</h2>
      <p class="note">Each as wide as its share, {basis}. A click selects; a double click or Enter looks inside.</p>
      <div class="tools">
        {measures.length > 1 && <Segments label="Measure" options={measures.map(one => [one, TITLES[one]] as const)} chosen={measure} onChoose={setMeasure} />}
        {phases.length > 2 && measure !== "retained" && <Segments label="Phase" options={phases.map(one => [one, one === "all" ? "all phases" : one] as const)} chosen={phase} onChoose={setPhase} />}
        {path.length > 1 && (
          <nav class="path" aria-label="What is looked into">
            {path.map((node, i) => <span key={node.id}>{i > 0 && " › "}{node === root ? <strong>{cut(node.label, 40)}</strong> : <button type="button" class="link" onClick={() => setZoomed(node)}>{cut(node.label, 40)}</button>}</span>)}
          </nav>
        )}
      </div>
      {!root && <p class="note">No layer has any in {phase}.</p>}
      <div class="fields" ref={place} onMouseLeave={() => setHovered(null)}>
        <canvas ref={canvas} tabIndex={0} role="application" aria-label={`Icicle of layers by ${TITLES[measure]}: arrow keys move, Enter looks inside, Escape goes out; its fields are in the table after it`}
          style={{ height: `${levels * LEVEL}px`, width: "100%" }} onClick={clicked} onDblClick={() => pointed.current?.row && lookInto(pointed.current)} onKeyDown={pressed}
          onMouseMove={event => { const field = at(event); setHovered(field ? { field, x: event.offsetX } : null); }} />
        {hovered && <Tip field={hovered.field} x={hovered.x} width={width} total={total} format={format} />}
      </div>
      <div class="unseen"><table>
        <caption>Fields of the icicle: {TITLES[measure]}, {basis}</caption>
        <thead><tr><th>Layer</th><th>{TITLES[measure]}</th><th>Share</th></tr></thead>
        <tbody>{fields.filter(field => field.kind !== "own").map(field => <tr key={`${field.kind} ${field.node.id}`}><td>{full(nameOf(field))}</td><td>{format(field.node.value)}</td><td>{share(field.node.size / total)}</td></tr>)}</tbody>
      </table></div>
      {kinds.length > 0 && <div class="legend">{kinds.map(kind => <Marked key={kind} color={colorOf(data, "kind", kind)}>{kind}</Marked>)}<Marked color={LIGHT}>other</Marked></div>}
    </section>
  );
}

/** FLOPs of each layer in each phase, on the basis of the times beside them. */
function phaseWork(data: PageData): ReadonlyMap<string, number> {
  const scale: number = data["page"].work_scale || 0; // 0: work cannot stand beside the times
  const [phase, layer, flops] = ["phase", "layer", "flops_per_step"].map(key => columnOf(data, "layers", key)) as [string[], string[], number[]];
  return new Map(layer.map((name, i) => [`${phase[i]} ${name}`, scale * flops[i]!]));
}

function isIn(top: Node, node: Node): boolean {
  let up: Node = node;
  while (up.parent) up = up.parent;
  return up === top;
}

function nameOf({ kind, node }: Field): string {
  if (kind === "more" && !node.row) return `${node.label}: ${node.children[0]?.id} to ${node.children.at(-1)?.id}`;
  return node.row?.layer ?? node.label;
}

function Tip({ field, x, width, total, format }: { field: Field; x: number; width: number; total: number; format: (value: Value) => string }): JSX.Element {
  const { node, kind } = field;
  const inside = node.children.reduce((all, child) => all + child.size, 0);
  const size = kind === "own" ? node.size - inside : node.size;
  const above = node.parent && kind !== "own" ? `, ${share(node.size / node.parent.size)} of ${cut(node.parent.row?.layer ?? node.parent.label, 60)}` : "";
  const below = (field.level + field.height) * LEVEL + 4;
  return (
    <div class="tip" style={{ top: `${below}px`, ...(x > width / 2 ? { right: `${width - x}px` } : { left: `${x}px` }) }}>
      <strong>{cut(nameOf(field), 120)}</strong>{kind === "own" ? " itself" : node.row?.class_name ? ` ${cut(node.row.class_name, 40)}` : ""}
      <br />{format(kind === "own" ? size : node.value)}: {share(size / total)} of all layers{above}
    </div>
  );
}

function draw(pen: CanvasRenderingContext2D, fields: readonly Field[], chosen: string | null, color: (node: Node) => string, format: (value: Value) => string): void {
  const [ink, paper] = (["--ink", "--paper"] as const).map(themeColor) as [string, string];
  for (const field of fields) {
    const { node, kind, x, width: wide } = field;
    const y = field.level * LEVEL;
    const high = field.height * LEVEL - 1;
    const gap = wide > 4 ? 1 : 0;
    pen.fillStyle = color(node);
    pen.globalAlpha = kind === "own" ? 0.25 : 1;
    pen.fillRect(x, y, Math.max(0.5, wide - gap), high);
    pen.globalAlpha = 1;
    if (wide < 18) continue;
    pen.fillStyle = kind === "own" ? ink : inkOn(color(node));
    const letters = Math.floor((wide - 10) / LETTER);
    const value = kind === "own" ? "" : format(node.value);
    const name = kind === "own" ? "itself" : letters >= node.label.length ? node.label : node.short;
    const says = letters >= name.length + value.length + 2 ? `${name}  ${value}` : letters >= Math.min(7, name.length) ? cut(name, letters) : "";
    pen.fillText(says, x + 6, y + LEVEL / 2, wide - 8);
  }
  const marked = fields.find(field => field.kind === "layer" && field.node.id === chosen) ?? fields.find(field => chosen !== null && field.kind === "more" && found(field.node, chosen));
  if (!marked) return;
  const [x, y, wide, high] = [marked.x, marked.level * LEVEL, Math.max(4, marked.width - 1), marked.height * LEVEL - 1];
  for (const [at, style] of [[1.5, ink], [3.5, paper]] as const) {
    pen.lineWidth = 2;
    pen.strokeStyle = style;
    if (wide > 2 * at && high > 2 * at) pen.strokeRect(x + at - 0.5, y + at - 0.5, wide - 2 * at + 1, high - 2 * at + 1);
  }
}
