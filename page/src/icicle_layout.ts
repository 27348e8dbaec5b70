/** Where the fields of the icicle lie: each layer as wide as its share of the one above, small ones merged. */
import type { LayerRow } from "./layers_rows";

export interface Node {
  id: string;
  label: string;
  short: string; // of a numbered layer the number
  kind: string; // of work; of several layers what they all are
  row: LayerRow | null; // null: of several layers together
  value: number | null; // as it is shown
  size: number; // as it is drawn: at least what is inside; a layer that several share has all its calls in each
  parent: Node | null;
  children: Node[];
  depth: number; // of levels, with its own
}

export interface Field {
  kind: "layer" | "own" | "more"; // own: what a layer does beside those inside it; more: several small ones
  node: Node;
  x: number;
  width: number;
  level: number;
  height: number; // in levels
}

export const ALL = "\0all";
const LEAST = 7; // pixels of a field of its own
const MERGED = 64; // pixels at least of a field of many small ones, where there are so many

/** The tree of what has a value; the top is the one outermost layer, or all of them. */
export function treeOf(rows: Iterable<LayerRow>, valueOf: (row: LayerRow) => number | null | undefined): Node | null {
  const nodes = new Map<string, Node>();
  const all = [...rows];
  for (const row of all) nodes.set(row.layer, { id: row.layer, ...labels(row), kind: row.kind, row, value: valueOf(row) ?? null, size: 0, parent: null, children: [], depth: 1 });
  const roots: Node[] = [];
  for (const node of nodes.values()) {
    const parent = node.row?.above ? nodes.get(node.row.above) : undefined;
    if (parent && parent !== node) {
      node.parent = parent;
      parent.children.push(node);
    } else roots.push(node);
  }
  for (const root of roots) sized(root);
  const shown = roots.filter(root => root.size > 0);
  if (shown.length < 2) return shown[0] ?? null;
  return together(ALL, "all layers", shown, null, true);
}

function sized(node: Node): void {
  for (const child of node.children) sized(child);
  node.children = node.children.filter(child => child.size > 0);
  node.size = Math.max(0, node.value ?? 0, sizeOf(node.children));
  node.depth = 1 + deepest(node.children);
}

const deepest = (nodes: readonly Node[]): number => nodes.reduce((most, node) => Math.max(most, node.depth), 0);
const sizeOf = (nodes: readonly Node[]): number => nodes.reduce((total, node) => total + node.size, 0);

function together(id: string, label: string, children: Node[], parent: Node | null, adopt = false): Node {
  const size = sizeOf(children);
  const kind = children.every(child => child.kind === children[0]!.kind) ? children[0]!.kind : "";
  const node: Node = { id, label, short: label, kind, row: null, value: size, size, parent, children, depth: 1 + deepest(children) };
  if (adopt) for (const child of children) child.parent = node;
  return node;
}

/** The name below the layer above. */
function labels(row: LayerRow): { label: string; short: string } {
  const label = row.above && row.layer.startsWith(`${row.above}.`) ? row.layer.slice(row.above.length + 1) : row.layer;
  return { label, short: /[._](\d+)$/.exec(label)?.[1] ?? label };
}

export function found(top: Node, id: string): Node | null {
  if (top.id === id) return top;
  for (const child of top.children) {
    const inside = found(child, id);
    if (inside) return inside;
  }
  return null;
}

/** All fields of `root` and what is inside it, `levels` deep. */
export function fieldsOf(root: Node, width: number, levels: number): Field[] {
  const fields: Field[] = [];
  const place = (node: Node, x: number, wide: number, level: number): void => {
    fields.push({ kind: "layer", node, x, width: wide, level, height: 1 });
    const room = Math.min(levels - level - 1, node.depth - 1);
    if (room < 1) return;
    if (wide < LEAST) {
      const inside = node.children;
      fields.push({ kind: "more", node: inside.length === 1 ? inside[0]! : together(`${node.id}\0more`, said(inside), inside, node), x, width: wide, level: level + 1, height: room });
      return;
    }
    const scale = wide / node.size;
    let at = x;
    let small: Node[] = [];
    const merge = (): void => {
      const size = sizeOf(small) * scale;
      if (small.length === 1) place(small[0]!, at - size, size, level + 1);
      else if (small.length) {
        const inner = Math.min(room, deepest(small));
        fields.push({ kind: "more", node: together(`${small[0]!.id}\0more`, said(small), small, node), x: at - size, width: size, level: level + 1, height: inner });
      }
      small = [];
    };
    for (const child of node.children) {
      const size = child.size * scale;
      if (size >= LEAST) {
        merge();
        place(child, at, size, level + 1);
      } else small.push(child);
      at += size;
      if (sizeOf(small) * scale >= MERGED) merge();
    }
    merge();
    const rest = x + wide - at;
    if (rest >= 1) fields.push({ kind: "own", node, x: at, width: rest, level: level + 1, height: 1 });
  };
  place(root, 0, width, 0);
  return fields;
}

const said = (nodes: readonly Node[]): string => `${nodes.length} more`;
