/** The timeline alone, for a page that is not built by the frame: `drawTimeline(element, data)`. */
import { render } from "preact";
import type { PageData } from "../page_data";
import { followAddress } from "../state";
import { readTimeline, whyNot } from "./data";
import { NoTimeline, TimelineView } from "./view";

declare global {
  interface Window {
    drawTimeline: (element: HTMLElement, data: PageData) => void;
  }
}

window.drawTimeline = (element, data) => {
  followAddress();
  readTimeline(data).then(
    timeline => render(timeline ? <TimelineView data={data} timeline={timeline} /> : <NoTimeline why={whyNot(data)} />, element),
    (error: unknown) => {
      console.error(error);
      render(<NoTimeline why={`its data cannot be read (${String(error)}): is the file whole?`} />, element);
    },
  );
};
