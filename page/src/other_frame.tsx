/** The frame of pages of two runs or of many ranks: what it is of, then the whole page without places. */
import type { JSX } from "preact";
import { ComparePage } from "./compare/page";
import { Contained } from "./contained";
import { cut, full } from "./format";
import type { PageData } from "./page_data";
import { RanksPage } from "./ranks/page";
import { nextTheme, theme } from "./theme";

export function OtherFrame({ data }: { data: PageData }): JSX.Element {
  const about = data["page"];
  const facts = [about.rank, about.steps_in_words].filter(Boolean).join(" · ");
  return (
    <>
      <header id="head">
        <div class="line">
          <h1 title={full(about.title)}>{cut(about.title, 160)}</h1>
          <span class="grow" />
          <button type="button" class="small" id="theme" title="Light, dark, or as the system" onClick={nextTheme}>{{ auto: "Theme: system", light: "Theme: light", dark: "Theme: dark" }[theme.value]}</button>
        </div>
        <div class="facts">{cut(facts, 300)}</div>
      </header>
      <main id="places" tabIndex={-1}>
        <Contained what="The page">{about.kind === "ranks" ? <RanksPage data={data} /> : <ComparePage data={data} />}</Contained>
      </main>
    </>
  );
}
