/** The colours of the timeline in one theme, and the names of what it draws, cut and measured. */
import { colorOf, inkOn, themeColor } from "../colors";
import type { PageData } from "../page_data";
import type { Timeline } from "./data";

export const FONT = "system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif";
// Of a box: how much of it is busy, where it stands for many; or that it is not what is selected.
const STRENGTHS = [0.45, 0.72, 1, 0.2] as const;
export const SHADES = STRENGTHS.length;
export const FULL = 2;
export const DIM = 3;

export interface Palette {
  paper: string;
  panel: string;
  ink: string;
  soft: string;
  line: string;
  accent: string;
  outlier: string;
  bar: string;
  /** By colour and shade; phases, then classes: each with one more for what has none. */
  fills: string[];
  inks: string[];
  classesFrom: number;
}

export function paletteOf(data: PageData, timeline: Timeline): Palette {
  const { phases, classes } = timeline.head;
  const paper = themeColor("--paper") || "#ffffff";
  const colors = [
    ...phases.map(name => colorOf(data, "phase", name)), colorOf(data, "phase", null),
    ...classes.map(name => colorOf(data, "class", name)), colorOf(data, "class", null),
  ];
  const fills = colors.flatMap(color => STRENGTHS.map(strength => mixed(color, paper, strength)));
  return {
    paper,
    panel: themeColor("--panel"),
    ink: themeColor("--ink"),
    soft: themeColor("--soft"),
    line: themeColor("--line"),
    accent: themeColor("--accent"),
    outlier: themeColor("--outlier"),
    bar: themeColor("--bar"),
    fills,
    inks: fills.map((fill, i) => (i % SHADES === DIM ? themeColor("--soft") : inkOn(fill))),
    classesFrom: phases.length + 1,
  };
}

function mixed(color: string, paper: string, strength: number): string {
  const part = (text: string, at: number): number => parseInt(text.slice(at, at + 2), 16);
  return `#${[1, 3, 5].map(at => Math.round(part(color, at) * strength + part(paper, at) * (1 - strength)).toString(16).padStart(2, "0")).join("")}`;
}

const LONGEST = 70;

/** Short names, each made and measured once. */
export class Labels {
  readonly #texts: (string | undefined)[] = [];
  readonly #widths: number[] = [];

  constructor(readonly timeline: Timeline) {}

  /** As much of a name as fits into `room`. */
  fitted(context: CanvasRenderingContext2D, name: number, room: number): string {
    const text = (this.#texts[name] ??= this.timeline.label(this.timeline.head.names[name] ?? "", LONGEST));
    return fitted(text, room, (this.#widths[name] ??= context.measureText(text).width));
  }
}

const ELLIPSIS = 10; // pixels

/** As much of a text so wide as fits into `room`; "" where that says nothing. */
export function fitted(text: string, room: number, width: number): string {
  if (width <= room) return text;
  const letters = Math.floor((0.95 * text.length * (room - ELLIPSIS)) / width);
  return letters < 2 ? "" : `${text.slice(0, letters)}…`;
}
