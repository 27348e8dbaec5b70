/** The place Step: the verdict, where the step went, the timeline, findings, how well the machine is used. */
import type { JSX } from "preact";
import type { PageData } from "../page_data";
import { Findings } from "../step/findings";
import { Figures } from "../step/figures";
import { StepBar } from "../step/step_bar";
import { Parts, Series, Steps } from "../step/steps";
import { Headline } from "../step/verdict";
import { Contained } from "../contained";
import { Later, Section } from "../parts";
import { address, selection } from "../state";
import { whyNot } from "../timeline/data";
import { NoTimeline, TimelineView } from "../timeline/view";
import { theGaps, timeline, timelineFailure } from "../whole";

export function StepPlace({ data }: { data: PageData }): JSX.Element {
  const gaps = theGaps();
  const alone = (what: string, part: JSX.Element): JSX.Element => <Contained key={what} what={what}>{part}</Contained>;
  return (
    <>
      <div id="view-summary">
        {alone("The verdict", <Headline data={data} gaps={gaps} />)}
        <p><a id="tab-timeline" href={address("step", selection.value)} onClick={showTimeline}>To the timeline ↓</a></p>
        {alone("Where the step went", <StepBar data={data} timeline={timeline.value ?? null} />)}
        <Section id="view-timeline" title="Timeline">{alone("The timeline", <Events data={data} />)}</Section>
        {alone("Findings", <Findings data={data} gaps={gaps} />)}
      </div>
      <Later>
        {alone("The use of the machine", <Figures data={data} />)}
        {alone("Steps", <Steps data={data} />)}
        {alone("Parts", <Parts data={data} />)}
        {alone("What was followed", <Series data={data} />)}
      </Later>
    </>
  );
}

function showTimeline(event: MouseEvent): void {
  event.preventDefault();
  document.getElementById("view-timeline")!.scrollIntoView({ block: "start" });
}

function Events({ data }: { data: PageData }): JSX.Element {
  if (timeline.value === undefined) return <div class="timeline-room" aria-busy="true" />;
  if (timeline.value === null) return <NoTimeline why={timelineFailure.value ? `The events cannot be read (${timelineFailure.value}): is the file whole?` : whyNot(data)} />;
  return <TimelineView data={data} timeline={timeline.value} />;
}
