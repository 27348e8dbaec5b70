import type { JSX } from "preact";
import type { PageData } from "../page_data";

export function StepPlace(_: { data: PageData }): JSX.Element {
  return <p class="note">Not there yet.</p>;
}
