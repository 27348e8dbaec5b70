/** The panel: all that is known of what is selected, with links to what belongs to it. */
import type { ComponentChildren, JSX } from "preact";
import { capital, full } from "./format";
import type { PageData } from "./page_data";
import { Contained } from "./contained";
import { OfEvent, OfGap } from "./panel/moments";
import { OfKernel, OfOp } from "./panel/work";
import { OfLayer } from "./panel/layer";
import { OfFinding, OfStep } from "./panel/step";
import { homeOf } from "./panel/facts";
import { Go } from "./parts";
import { place, select, selection, type Selection } from "./state";
import { timeline } from "./whole";

export function Panel({ data }: { data: PageData }): JSX.Element | null {
  const chosen = selection.value;
  if (!chosen) return null;
  const key = "name" in chosen ? chosen.name : String(chosen.number);
  return (
    <aside id="panel" aria-label={`Selected ${chosen.kind}`}>
      <div class="line"><span class="kind">{chosen.kind}</span>{(["step", "layers", "kernels"] as const).filter(to => to !== place.value && (to === "step" ? timeline.value : to === homeOf(chosen))).map(to => <Go key={to} to={to} select={chosen}>{to === "step" ? "In the timeline" : `In ${capital(to)}`}</Go>)}<span class="grow" /><button type="button" class="small" aria-label="Close" title="Let it go (Escape)" onClick={() => select(null)}>✕</button></div>
      <Contained key={`${chosen.kind} ${key}`} what={`The ${chosen.kind} ${full(key)}`}><Of data={data} chosen={chosen} /></Contained>
    </aside>
  );
}

function Of({ data, chosen }: { data: PageData; chosen: Selection }): ComponentChildren {
  const events = timeline.value ?? null;
  switch (chosen.kind) {
    case "layer": return <OfLayer data={data} name={chosen.name} timeline={events} />;
    case "kernel": return <OfKernel data={data} name={chosen.name} timeline={events} />;
    case "op": return <OfOp data={data} name={chosen.name} timeline={events} />;
    case "finding": return <OfFinding data={data} name={chosen.name} />;
    case "step": return <OfStep data={data} number={chosen.number} timeline={events} />;
    case "gap": return <OfGap row={chosen.number} timeline={events} />;
    case "event": return <OfEvent data={data} row={chosen.number} timeline={events} />;
  }
}
