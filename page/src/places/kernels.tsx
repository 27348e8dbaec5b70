/** Kernels: what ran, as one table that is grouped by kernel, op, layer and more, of what is selected. */
import type { JSX } from "preact";
import { useState } from "preact/hooks";
import { AttentionView, whyNoAttention } from "../calls_attention";
import { CommunicationView, WaitsView, whyNoCommunication, whyNoWaits } from "../calls";
import { ExpertsView, whyNoExperts } from "../experts";
import { type KernelGroup, KernelTable } from "../kernels_table";
import { OpsView, whyNoOps } from "../ops";
import type { PageData } from "../page_data";
import { Later } from "../parts";
import { RooflineView, whyNoRoofline } from "../roofline";
import { ShapesView, whyNoShapes } from "../shapes";
import { by, selection } from "../state";
import { timeline } from "../whole";
import { whyNot as whyNoTimeline } from "../timeline/data";
import "../rooms.css";

interface View {
  id: string;
  title: string;
  help: string;
  why: (data: PageData) => string | null; // why it has nothing
  draw: (data: PageData) => JSX.Element;
}

const table = (group: KernelGroup) => (data: PageData): JSX.Element => <KernelTable key={group} data={data} by={group} />;

function whyNoKernels(data: PageData): string | null {
  if (data["kernels"].length) return null;
  return data["time_basis"] === "cpu" ? "nothing ran on a device: this trace has no kernels, copies or sets" : "kernels are not in this result: it was written by an older version";
}
const whyNoStream = (data: PageData): string | null => whyNoKernels(data) ?? (timeline.value === null ? `streams are known from events only. ${whyNoTimeline(data)}` : null);
const whyNoClass = (data: PageData): string | null => (data["kernels"].length || timeline.value ? null : whyNoKernels(data));

const GROUPS: readonly View[] = [
  { id: "kernel", title: "Kernel", help: "One row a kernel, which unfolds into its launch configurations", why: whyNoKernels, draw: table("kernel") },
  { id: "op", title: "Op", help: "What each op launches, and takes on the CPU", why: whyNoOps, draw: data => <OpsView data={data} /> },
  { id: "layer", title: "Layer", help: "What each layer runs itself", why: () => null, draw: table("layer") },
  { id: "phase", title: "Phase", help: "What each phase runs", why: () => null, draw: table("phase") },
  { id: "class", title: "Class", help: "By what kind of work it is", why: whyNoClass, draw: table("class") },
  { id: "shape", title: "Shape", help: "Matrix products and convolutions by their sizes", why: whyNoShapes, draw: data => <ShapesView data={data} /> },
  { id: "stream", title: "Stream", help: "What each stream of a device runs", why: whyNoStream, draw: table("stream") },
  { id: "cores", title: "Tensor cores", help: "Whether kernels use tensor cores", why: whyNoKernels, draw: table("cores") },
];
const CALLS: readonly View[] = [
  { id: "attention", title: "Attention", help: "Which implementation ran, and what it was called with", why: whyNoAttention, draw: data => <AttentionView data={data} /> },
  { id: "communication", title: "Communication", help: "What each collective moves, how fast, and what of it compute does not hide", why: whyNoCommunication, draw: data => <CommunicationView data={data} /> },
  { id: "waits", title: "Waits", help: "Where the CPU stands still until the device is done, or its data are there", why: whyNoWaits, draw: data => <WaitsView data={data} /> },
  { id: "experts", title: "Experts", help: "Tokens, time and FLOPs of each expert; adapters beside their base", why: whyNoExperts, draw: data => <ExpertsView data={data} /> },
  { id: "roofline", title: "Roofline", help: "How fast each part works, against the most that the device can do", why: whyNoRoofline, draw: data => <RooflineView data={data} /> },
];
const ALL = [...GROUPS, ...CALLS];

export function KernelsPlace({ data }: { data: PageData }): JSX.Element {
  const wanted = by.value || (selection.value?.kind === "op" ? "op" : "kernel");
  const asked = ALL.find(view => view.id === wanted) ?? ALL[0]!;
  const view = by.value || !asked.why(data) ? asked : (ALL.find(one => !one.why(data)) ?? asked);
  const reason = view.why(data);
  return (
    <>
      <div class="groups">
        <Choices label="Group by" views={GROUPS} data={data} chosen={view.id} />
        <Choices label="Or look at" views={CALLS} data={data} chosen={view.id} />
      </div>
      {reason ? <p class="notice">{view.title}: {reason}.</p> : <Later>{view.draw(data)}</Later>}
    </>
  );
}

/** Those that have nothing say why. */
function Choices({ label, views, data, chosen }: { label: string; views: readonly View[]; data: PageData; chosen: string }): JSX.Element {
  const [why, setWhy] = useState("");
  return (
    <div class="choices" role="group" aria-label={label}>
      <span class="quiet">{label}</span>
      <span class="segments">
        {views.map(view => {
          const reason = view.why(data);
          const click = (): void => {
            setWhy(reason ? `${view.title}: ${reason}.` : "");
            if (!reason) by.value = view.id;
          };
          return <button key={view.id} type="button" class="small" data-id={view.id} title={reason ?? view.help} aria-pressed={view.id === chosen} aria-disabled={reason !== null} onClick={click}>{view.title}</button>;
        })}
      </span>
      <span class="quiet" role="status">{why}</span>
    </div>
  );
}
