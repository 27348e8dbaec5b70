/** The frame: what ran, five places, the panel of what is selected. */
import type { JSX } from "preact";
import type { PageData } from "./page_data";
import { KernelsPlace } from "./places/kernels";
import { LayersPlace } from "./places/layers";
import { MemoryPlace } from "./places/memory";
import { RunPlace } from "./places/run";
import { StepPlace } from "./places/step";
import { place, type Place } from "./state";

const SHOWN: Readonly<Record<Place, (props: { data: PageData }) => JSX.Element>> = {
  step: StepPlace, layers: LayersPlace, kernels: KernelsPlace, memory: MemoryPlace, run: RunPlace,
};

export function Frame({ data }: { data: PageData }): JSX.Element {
  const Shown = SHOWN[place.value];
  return <Shown data={data} />;
}
