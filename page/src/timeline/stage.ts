/** The canvas as people use it: wheel, drag, keys; what it shows is drawn once a frame. */
import { effect, signal } from "@preact/signals";
import type { PageData } from "../page_data";
import { range, select, selection, step } from "../state";
import type { Step, Timeline } from "./data";
import { drawScene, type Scene } from "./draw";
import { type Lit, litBy } from "./highlight";
import { AXIS, type Band, bandsOf, type Hit, hitAt, layoutOf, type Memory, memoryOf, timeAt, type View, xOf } from "./layout";
import { drawOver, placeOf } from "./over";
import { Labels, type Palette, paletteOf } from "./palette";

export interface Hovered {
  hit: Hit;
  x: number;
  y: number;
}

const LEAST_SPAN_NS = 200;
const CLICK = 4; // pixels that a click may move
const EDGE = 5; // pixels beside the border of a range that take hold of it
const MOST_LAYERS = 40; // levels; what is deeper begins folded, so that the device is in sight
const MOST_UNFOLDED = 4; // threads; of more the others begin folded

export class Stage {
  readonly hovered = signal<Hovered | null>(null);
  readonly isLit = signal(false);
  readonly layout = signal(layoutOf([], new Set()));
  readonly memory: Memory | null;
  readonly view: View = { from: 0, to: 1, scrolled: 0, left: 140, width: 600, height: 300, ratio: 1 };
  readonly #blank: ReturnType<typeof bandsOf>;
  readonly #folded: Set<string>;
  readonly #labels: Labels;
  #palette: Palette;
  #lit: Lit | null = null;
  #canvases: [HTMLCanvasElement, HTMLCanvasElement] | null = null;
  #scroller: HTMLElement | null = null;
  #frame = 0;
  #stale = true; // the bands, not only what lies over them
  #drag: { x: number; from: number; to: number; kind: "pan" | "range"; fixed: number; moved: boolean } | null = null;
  #isOwn = false; // the selection was made here, and is in sight

  constructor(readonly data: PageData, readonly timeline: Timeline) {
    this.memory = memoryOf(data, timeline);
    this.#blank = bandsOf(timeline, this.memory);
    const threads = timeline.head.lanes.flatMap((lane, i) => (lane.kind === "thread" ? [i] : []));
    this.#folded = new Set(threads.slice(MOST_UNFOLDED).map(i => `thread ${i}`)); // that of the steps comes first, then by how busy
    for (const band of this.#blank) if (band.kind === "layers" && band.tracks.length > MOST_LAYERS) this.#folded.add(band.key);
    this.#palette = paletteOf(data, timeline);
    this.#labels = new Labels(timeline);
    this.layout.value = layoutOf(this.#blank, this.#folded);
  }

  /** Takes the elements; gives back what lets them go. */
  attach(scroller: HTMLElement, base: HTMLCanvasElement, over: HTMLCanvasElement): () => void {
    this.#canvases = [base, over];
    this.#scroller = scroller;
    const gone = new AbortController();
    const on = <K extends keyof HTMLElementEventMap>(type: K, take: (event: HTMLElementEventMap[K]) => void, passive = true): void =>
      over.addEventListener(type, take as EventListener, { signal: gone.signal, passive });
    on("wheel", event => this.#wheel(event), false);
    on("pointerdown", event => this.#down(event), false);
    on("pointermove", event => this.#move(event));
    on("pointerup", () => this.#up());
    on("pointercancel", () => { this.#drag = null; });
    on("pointerleave", () => this.#hover(null));
    on("click", event => this.#click(event));
    on("dblclick", () => this.#double());
    on("keydown", event => this.#key(event), false);
    on("mousedown", event => { if (event.button === 1) event.preventDefault(); }, false); // no scrolling by itself
    scroller.addEventListener("scroll", () => this.redraw(), { signal: gone.signal, passive: true });
    const sizes = new ResizeObserver(() => this.#resize());
    sizes.observe(scroller);
    const theme = new MutationObserver(() => this.#recolor());
    theme.observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
    this.#resize();
    this.all();
    const effects = [
      effect(() => this.#showStep(this.timeline.step(step.value))),
      effect(() => this.#showSelection()),
      effect(() => { if (range.value && !this.#drag) this.#bring(...range.value); this.redraw(false); }),
    ];
    return () => {
      gone.abort();
      sizes.disconnect();
      theme.disconnect();
      effects.forEach(dispose => dispose());
      cancelAnimationFrame(this.#frame);
      this.#canvases = this.#scroller = null;
    };
  }

  scene(): Scene {
    return {
      timeline: this.timeline, layout: this.layout.peek(), view: this.view, palette: this.#palette, labels: this.#labels, memory: this.memory, lit: this.#lit,
    };
  }

  redraw(isStale = true): void {
    this.#stale ||= isStale;
    this.#frame ||= requestAnimationFrame(() => this.#draw());
  }

  #draw(): void {
    this.#frame = 0;
    const [base, over] = this.#canvases ?? [];
    if (!base || !over) return;
    this.view.scrolled = this.#scroller!.scrollTop;
    if (this.#stale) drawScene(base.getContext("2d", { alpha: false })!, this.scene());
    this.#stale = false;
    drawOver(over.getContext("2d")!, this.scene(), range.value, selection.value, this.hovered.value?.hit ?? null);
  }

  #resize(): void {
    const { view } = this;
    const [width, height] = [this.#scroller!.clientWidth, this.#scroller!.clientHeight];
    if (!width || !height) return;
    Object.assign(view, { width, height, ratio: devicePixelRatio || 1, left: width < 560 ? 84 : 166 });
    for (const canvas of this.#canvases!) {
      canvas.width = Math.round(width * view.ratio);
      canvas.height = Math.round(height * view.ratio);
      canvas.style.width = `${width}px`;
      canvas.style.height = `${height}px`;
    }
    this.#stale = true;
    this.#draw(); // at once: a canvas that got a size is empty
  }

  /** At once, too: paper is printed as soon as the theme has changed. */
  #recolor(): void {
    this.#palette = paletteOf(this.data, this.timeline);
    this.#stale = true;
    this.#draw();
  }

  fold(band: Band): void {
    if (!this.#folded.delete(band.key)) this.#folded.add(band.key);
    this.layout.value = layoutOf(this.#blank, this.#folded);
    this.redraw();
  }

  // ---- what is in sight -----------------------------------------------------------------------------------------------

  show(from: number, to: number): void {
    const span = Math.min(Math.max(to - from, LEAST_SPAN_NS), this.#most * 1.04);
    const start = Math.min(Math.max((from + to - span) / 2, -0.02 * this.#most), 1.02 * this.#most - span);
    this.view.from = start;
    this.view.to = start + span;
    this.redraw();
  }

  get #most(): number {
    return Math.max(this.timeline.head.length_ns, LEAST_SPAN_NS);
  }

  zoom(factor: number, x = (this.view.left + this.view.width) / 2): void {
    const { view } = this;
    const time = timeAt(view, Math.max(x, view.left));
    const span = Math.min(Math.max((view.to - view.from) * factor, LEAST_SPAN_NS), this.#most * 1.04);
    const from = time - ((time - view.from) / (view.to - view.from)) * span;
    this.show(from, from + span);
  }

  pan(part: number): void {
    const by = (this.view.to - this.view.from) * part;
    this.show(this.view.from + by, this.view.to + by);
  }

  all(): void {
    this.show(-0.01 * this.#most, 1.01 * this.#most);
  }

  /** The range, or what is selected, with some of what is around it. */
  fit(): void {
    const [from, to] = range.value ?? [this.#lit?.from, this.#lit?.to];
    if (from === undefined || to === undefined) return;
    const room = Math.max((to - from) * 0.15, LEAST_SPAN_NS / 2);
    this.show(from - room, to + room);
  }

  #showStep(shown: Step | undefined): void {
    if (!shown) return;
    const room = (shown.end_ns - shown.start_ns) * 0.02;
    this.show(shown.start_ns - room, shown.end_ns + room);
  }

  #showSelection(): void {
    const chosen = selection.value;
    this.#lit = litBy(this.timeline, chosen);
    this.isLit.value = this.#lit !== null;
    if (this.#lit && !this.#isOwn) {
      this.#bring(this.#lit.from, this.#lit.to);
      if (chosen?.kind === "event") this.#scrollTo(chosen.number);
    }
    this.#isOwn = false;
    this.redraw();
  }

  /** What is out of sight, or too small to be seen, comes into sight. */
  #bring(from: number, to: number): void {
    const { view } = this;
    const width = ((to - from) / (view.to - view.from)) * (view.width - view.left);
    if (from < view.to && to > view.from && width >= 12) return;
    const room = Math.max((to - from) * 2, LEAST_SPAN_NS);
    this.show(from - room, to + room);
  }

  #scrollTo(row: number): void {
    const place = placeOf(this.scene(), row);
    if (!place || !this.#scroller) return;
    if (place.y < AXIS || place.y + place.height > this.view.height) this.#scroller.scrollTop += place.y - this.view.height / 2;
  }

  // ---- pointer and keys -----------------------------------------------------------------------------------------------

  #at(event: MouseEvent): [x: number, y: number] {
    const box = this.#canvases![1].getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  #wheel(event: WheelEvent): void {
    const pixels = event.deltaMode === 0 ? 1 : event.deltaMode === 1 ? 20 : 300;
    const sideways = event.shiftKey ? event.deltaX || event.deltaY : Math.abs(event.deltaX) > Math.abs(event.deltaY) ? event.deltaX : 0;
    if (event.ctrlKey || event.metaKey) {
      const by = Math.max(-120, Math.min(120, event.deltaY * pixels));
      this.zoom(Math.exp(by * 0.004), this.#at(event)[0]);
    } else if (sideways) this.pan((sideways * pixels) / (this.view.width - this.view.left));
    else return; // scrolls the bands, or the page
    event.preventDefault();
  }

  #down(event: PointerEvent): void {
    const [x, y] = this.#at(event);
    if (x < this.view.left || event.button > 1) return;
    const { from, to } = this.view;
    const isPan = event.button === 1 || event.shiftKey || event.pointerType === "touch";
    this.#canvases![1].setPointerCapture(event.pointerId);
    const edge = isPan ? undefined : this.#edge(x, y);
    this.#drag = { x, from, to, kind: isPan ? "pan" : "range", fixed: edge ?? timeAt(this.view, x), moved: false };
  }

  /** The other end of the range, where the pointer is at one of its ends. */
  #edge(x: number, y: number): number | undefined {
    if (!range.value || y < AXIS - 20) return undefined;
    const at = range.value.findIndex(time => Math.abs(xOf(this.view, time) - x) < EDGE);
    return at < 0 ? undefined : range.value[1 - at];
  }

  #move(event: PointerEvent): void {
    const [x, y] = this.#at(event);
    const drag = this.#drag;
    if (!drag) {
      const hit = hitAt(this.layout.value, this.memory, this.view, x, y);
      this.#hover(hit && { hit, x, y });
      this.#canvases![1].style.cursor = this.#edge(x, y) !== undefined ? "ew-resize" : hit && hit.kind !== "memory" ? "pointer" : "crosshair";
      return;
    }
    if (!drag.moved && Math.abs(x - drag.x) < CLICK) return;
    drag.moved = true;
    this.#hover(null);
    if (drag.kind === "pan") {
      const by = ((drag.x - x) / (this.view.width - this.view.left)) * (drag.to - drag.from);
      this.show(drag.from + by, drag.to + by);
    } else {
      const time = Math.round(Math.min(Math.max(timeAt(this.view, x), 0), this.#most));
      const fixed = Math.round(Math.min(Math.max(drag.fixed, 0), this.#most));
      if (time !== fixed) range.value = time < fixed ? [time, fixed] : [fixed, time];
    }
  }

  #up(): void {
    const moved = this.#drag?.moved;
    if (this.#drag && !moved) this.#drag = null; // a click, which follows
    else if (this.#drag) setTimeout(() => { this.#drag = null; }); // the click that follows is none
  }

  #hover(hovered: Hovered | null): void {
    if (hovered === this.hovered.value) return;
    this.hovered.value = hovered;
    this.redraw(false);
  }

  #click(event: MouseEvent): void {
    if (this.#drag || event.detail > 1) return;
    const [x, y] = this.#at(event);
    const hit = hitAt(this.layout.value, this.memory, this.view, x, y);
    if (hit?.kind === "memory" || x < this.view.left) return;
    this.#isOwn = true;
    if (hit) select({ kind: hit.kind, number: hit.row });
    else if (y >= AXIS) select(null);
    else this.#clickStep(x);
    this.#isOwn = false;
  }

  #clickStep(x: number): void {
    const time = timeAt(this.view, x);
    const one = this.timeline.head.steps.find(({ start_ns, end_ns, drawn }) => drawn && start_ns <= time && time < end_ns);
    if (one && one.number !== null) step.value = one.number;
  }

  /** Shows what the first of two clicks has selected: the panel that it opened may have moved all else below the pointer. */
  #double(): void {
    const chosen = selection.value;
    if (chosen?.kind !== "gap" && chosen?.kind !== "event") return;
    const of = chosen.kind === "gap" ? this.timeline.gaps : this.timeline.events;
    const [start, duration] = [of.start_ns[chosen.number]!, of.duration_ns[chosen.number]!];
    this.show(start - duration * 0.15, start + duration * 1.15);
  }

  #key(event: KeyboardEvent): void {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const act = this.#acts[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (!act) return;
    act();
    event.preventDefault();
  }

  readonly #acts: Readonly<Record<string, () => void>> = {
    w: () => this.zoom(0.7), "+": () => this.zoom(0.7), s: () => this.zoom(1 / 0.7), "-": () => this.zoom(1 / 0.7),
    a: () => this.pan(-0.15), ArrowLeft: () => this.pan(-0.15), d: () => this.pan(0.15), ArrowRight: () => this.pan(0.15),
    ArrowUp: () => this.#scroller?.scrollBy(0, -45), ArrowDown: () => this.#scroller?.scrollBy(0, 45),
    f: () => this.fit(), "0": () => this.all(),
    ".": () => this.#next(1), ",": () => this.#next(-1),
    Escape: () => { if (range.value) range.value = null; else selection.value = null; },
  };

  /** The event beside the one that is selected, in its row; of none, the first that is in sight. */
  #next(by: 1 | -1): void {
    const { timeline } = this;
    const at = selection.value?.kind === "event" ? selection.value.number : -1;
    const lane = timeline.lane[at] ?? Math.max(0, timeline.head.lanes.findIndex(one => one.kind === (timeline.head.device ? "stream" : "thread")));
    const track = timeline.tracks[lane]?.[timeline.depth[at] ?? 0];
    if (!track?.rows.length) return;
    const place = at < 0 ? track.firstAfter(this.view.from) : track.rows.indexOf(at) + by;
    const row = track.rows[Math.min(Math.max(place, 0), track.rows.length - 1)]!;
    selection.value = { kind: "event", number: row };
  }
}
