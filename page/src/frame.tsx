/** The frame: what ran, five places, the panel of what is selected, search. */
import type { JSX } from "preact";
import { useEffect } from "preact/hooks";
import { Contained } from "./contained";
import { capital, cut, full } from "./format";
import type { PageData } from "./page_data";
import { Panel } from "./panel";
import { Go } from "./parts";
import { KernelsPlace } from "./places/kernels";
import { LayersPlace } from "./places/layers";
import { MemoryPlace } from "./places/memory";
import { RunPlace } from "./places/run";
import { StepPlace } from "./places/step";
import { Sheet } from "./sheet";
import { Search, searching } from "./search";
import { place, type Place, PLACES, select, selection } from "./state";
import { verdictOf } from "./step/verdict";
import { nextTheme, printing, theme } from "./theme";

const SHOWN: Readonly<Record<Place, (props: { data: PageData }) => JSX.Element>> = {
  step: StepPlace, layers: LayersPlace, kernels: KernelsPlace, memory: MemoryPlace, run: RunPlace,
};
const HELP: Readonly<Record<Place, string>> = {
  step: "Where a step went, its timeline, and what could be better", layers: "Time, FLOPs and memory of each layer", kernels: "What ran on the device, by kernel, op, layer, phase, class",
  memory: "Who holds memory, when, and what would lower the peak", run: "Notes on these numbers, files, versions",
};
const THEME_NAMES = { auto: "Theme: system", light: "Theme: light", dark: "Theme: dark" };

export function Frame({ data }: { data: PageData }): JSX.Element {
  useEffect(() => {
    const letGo = (event: KeyboardEvent): void => {
      if (event.key === "Escape" && !searching.value && !event.defaultPrevented) select(null);
    };
    addEventListener("keydown", letGo);
    return () => removeEventListener("keydown", letGo);
  }, []);
  useEffect(() => { scrollTo(0, 0); }, [place.value]);
  if (printing.value) return <><Head data={data} /><main><Contained what="The sheet"><Sheet data={data} /></Contained></main></>;
  const here = place.value;
  const Shown = SHOWN[here];
  return (
    <>
      <a class="skip" href="#places" onClick={event => { event.preventDefault(); document.getElementById("places")!.focus(); }}>To the content</a>
      <Head data={data} />
      <nav id="tabs" aria-label="Places">
        {PLACES.map(one => (
          <Go key={one} to={one} select={selection.value ?? undefined} class="tab" title={HELP[one]} id={`tab-${one}`} current={one === here ? "page" : undefined}>{capital(one)}</Go>
        ))}
        <span class="grow" />
        <button type="button" class="small search" onClick={() => { searching.value = true; }}>Search <kbd>/</kbd></button>
      </nav>
      <div class={selection.value ? "with-panel" : undefined}>
        <main id="places" tabIndex={-1} data-place={here}>
          {PLACES.map(one => <div key={one} id={`view-${one}`} hidden={one !== here}>{one === here && <Contained what={capital(here)}><Shown data={data} /></Contained>}</div>)}
        </main>
        <Panel data={data} />
      </div>
      <Contained what="Search"><Search data={data} /></Contained>
    </>
  );
}

function Head({ data }: { data: PageData }): JSX.Element {
  const about = data["page"];
  const world = data["run"]?.world_size;
  const ranks = world > 1 ? `${about.rank} of ${world} (all of them: profiler-wrapper ranks)` : about.rank;
  const facts = [about.title.includes(about.machine) ? "" : about.machine, ranks, about.steps_in_words].filter(Boolean).join(" · ");
  const verdict = place.value === "step" || printing.value ? null : verdictOf(data);
  return (
    <header id="head">
      <div class="line">
        <h1 title={full(about.title)}>{cut(about.title, 160)}</h1>
        <span class="grow" />
        {about.trace_href && <a class="small" id="trace" href={about.trace_href} download="" title="For ui.perfetto.dev or chrome://tracing: all events of all steps, with a lane for the layers">Chrome trace</a>}
        <button type="button" class="small" id="theme" title="Light, dark, or as the system" onClick={nextTheme}>{THEME_NAMES[theme.value]}</button>
      </div>
      <div class="facts">{cut(facts, 300)}{data["complete"] === false && <b class="warn"> · INCOMPLETE</b>}</div>
      {verdict && <p class="verdict"><Go to="step" title="To the step">{cut(verdict.headline, 200)}</Go></p>}
    </header>
  );
}
