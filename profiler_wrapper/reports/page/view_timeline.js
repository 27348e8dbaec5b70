"use strict";
/** Timeline: the Chrome trace, which other viewers show better than a page could. */
page.view({
  id: "timeline",
  title: "Timeline",
  order: 120,
  draw(data, element) {
    const href = data.page.trace_href;
    const section = page.section(element, "The timeline of this run");
    if (!href) {
      page.add(section, page.text("p", "No trace lies beside this page.", "notice"));
      page.note(section, "ProfilerWrapper keeps it unless trace=False. Of a trace that somebody sends you, the page is made by: profiler-wrapper report TRACE.");
      return;
    }
    const link = page.text("a", href.split("/").pop() || href);
    link.href = href;
    link.id = "trace";
    link.setAttribute("download", "");
    page.add(section, page.add(page.element("p"), "Every event on its thread or stream, with our lanes of layers and phases: ", link));
    const open = page.text("button", "Open in Perfetto", "small");
    open.type = "button";
    const said = page.element("span", "note");
    said.setAttribute("role", "status");
    open.addEventListener("click", async () => {
      if (!perfetto.canRead()) {
        window.open(perfetto.origin);
        const path = decodeURIComponent(new URL(href, location.href).pathname);
        said.replaceChildren(page.text("span", ` Drop this file there: ${path}`));
        return;
      }
      open.disabled = true;
      said.textContent = " Waiting for ui.perfetto.dev …";
      try {
        await perfetto.open(href, data.page.title);
        said.textContent = " Handed over.";
      } catch (error) {
        said.textContent = ` ${error.message}`;
      }
      open.disabled = false;
    });
    page.add(section, page.element("p", "", open, said));
    if (!perfetto.canRead()) page.note(section, "A page on a disk may not read the trace: it says where it lies, to be dropped on ui.perfetto.dev. From a page that “profiler-wrapper report --open” shows, the button hands the trace over.");
    const steps = [
      "In any browser: ui.perfetto.dev → “Open trace file” → choose this file. It stays on your machine.",
      "Without a network: chrome://tracing in Chrome or Chromium → “Load” → choose this file.",
      "Search there for a layer by its full name (model.layers.3.mlp), or for ProfilerStep to find a step.",
    ];
    page.add(section, page.text("p", "A click on the link saves it or shows it as text. To look at it:"));
    page.add(section, page.element("ul", "", ...steps.map(step => page.text("li", step))));
    page.note(section, "Both read .json.gz too; the keys W, A, S, D zoom and move. Beyond about 2 GB, Perfetto needs its trace_processor beside it.");
    page.note(section, "The link works as long as page and trace lie in the same place to one another.");
  },
});
