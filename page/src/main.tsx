/** The page: reads its data and draws the frame. */
import { type JSX, render } from "preact";
import { rowsOf } from "./basis";
import { Contained } from "./contained";
import { Frame } from "./frame";
import { OtherFrame } from "./other_frame";
import { type PageData, readData } from "./page_data";
import { followAddress } from "./state";
import { followTheme } from "./theme";
import { loadTimeline, readNames } from "./whole";
import "./style.css";

function start(): void {
  followAddress();
  try {
    const data = readData(document.getElementById("data")?.textContent ?? "");
    setTimeout(() => draw(data)); // a task of its own: clicks and scrolling come between
  } catch (error) {
    console.error(error);
    show(<p class="notice">The data of this page cannot be read ({String(error)}): is the file whole?</p>);
  }
}

function draw(data: PageData): void {
  const isRun = data["page"].kind === "run";
  if (isRun) {
    readNames(data);
    Object.assign(window, { page: { data, rows: (name: string) => rowsOf(data, name) } }); // for scripts of one's own, in the console
  }
  show(<Contained what="The page">{isRun ? <Frame data={data} /> : <OtherFrame data={data} />}</Contained>);
  if (isRun) void loadTimeline(data);
  requestAnimationFrame(() => setTimeout(() => performance.mark("drawn"))); // for who measures how long it takes
}

function show(drawn: JSX.Element): void {
  const root = document.getElementById("root") ?? document.body.appendChild(document.createElement("div"));
  document.documentElement.dataset["ready"] = "true";
  root.textContent = ""; // the title and the headline, which stand in the file
  render(drawn, root);
}

followTheme();
start();
