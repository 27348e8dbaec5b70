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
    const steps = [
      "In any browser: ui.perfetto.dev → “Open trace file” → choose this file. It stays on your machine.",
      "Without a network: chrome://tracing in Chrome or Chromium → “Load” → choose this file.",
      "Search there for a layer by its full name (model.layers.3.mlp), or for ProfilerStep to find a step.",
    ];
    page.add(section, page.text("p", "A browser cannot open it by a click on the link, which saves it. To look at it:"));
    page.add(section, page.element("ul", "", ...steps.map(step => page.text("li", step))));
    page.note(section, "Both read .json.gz too; the keys W, A, S, D zoom and move. Beyond about 2 GB, Perfetto needs its trace_processor beside it.");
    page.note(section, "The link works as long as page and trace lie in the same place to one another.");
  },
});
