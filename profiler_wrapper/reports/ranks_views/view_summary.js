"use strict";
/** Summary: who or what slows the job, on what that stands, what else was weighed, and what is missing. */
(function () {
  const ms = value => value === null || value === undefined ? null : page.format.us(value * 1000);

  function figures(job, element) {
    const place = page.element("div", "figures");
    element.append(place);
    page.figure(place, { label: "A step", value: ms(job.wall_ms_per_step), help: "on the clock, ranks waiting for one another" });
    const busy = job.ranks.map(row => Object.values(row.own_ms_per_step).reduce((sum, value) => sum + value, 0));
    if (job.ranks.length > 1) page.figure(place, { label: "The slowest rank is busy", value: ms(Math.max(...busy)), help: "what it does itself in a step" });
    page.figure(place, { label: "If all were alike", value: ms(job.ideal_ms_per_step), help: "each rank as quick as the typical one" });
    if (job.verdict !== "none") {
      page.figure(place, { label: "Lost by it", value: ms(job.lost_ms_per_step), help: "per step: what the job gains without it" });
      page.figure(place, { label: "Of the lost time", value: job.share === null ? null : page.format.share(job.share), help: "a step less one in which all are alike" });
    }
    page.figure(place, { label: "Confidence", value: job.confidence, help: `${(job.judged_steps || job.steps).length} steps were judged` });
    if (job.stages.length < 2) return; // the published quantities are about stages
    if (job.ms !== null) page.figure(place, { label: "Ms", value: job.ms.toFixed(3), help: "part of the lost time due to the last stage" });
    if (job.mw !== null) page.figure(place, { label: "Mw", value: job.mw.toFixed(3), help: "part of it due to the slowest few ranks" });
  }

  function lost(job, element) {
    if (!job.causes.length) return;
    const section = page.section(element, "Lost time");
    const colors = [page.culpritColor(), page.color.kind("backward"), page.color.kind("data")];
    const each = job.causes.map((row, index) => ({ name: `${row.who}: ${row.cause}`, value: row.lost_ns / 1e6, color: colors[index], help: index ? "without those before it" : "the verdict" }));
    const rest = job.differ_ms_per_step - each.reduce((sum, part) => sum + part.value, 0);
    page.shares(section, {
      title: `${ms(job.differ_ms_per_step)} of a step`,
      parts: [...each, { name: "spread over all", value: Math.max(0, rest), color: page.color.kind("other"), help: "nobody's" }],
      format: ms,
    });
  }

  function suspects(job, element) {
    const section = page.section(element, "Suspects");
    page.note(section, "What the job gains without each of them, others as they are: they overlap, so shares may add up to more than all.");
    page.table(section, {
      columns: [
        { key: "who", title: "Who", kind: "text", longest: 60 },
        { key: "cause", title: "Cause", kind: "text" },
        page.msColumn("lost_ns", "Per step", { of: row => row.lost_ns === null ? null : row.lost_ns / 1e6 }),
        { key: "share", title: "Of the lost time", kind: "share", bar: true },
        { key: "steps", title: "Steps", kind: "count", help: "in which it cost the job time", value: row => row.steps || undefined },
      ],
      rows: job.suspects.filter(row => row.lost_ns > 0 && row.share >= 0.01),
      search: false,
      limit: 12,
      empty: "Nobody costs the job time beyond the noise.",
    });
  }

  function held(job, element) {
    if (!job.lost.length) return;
    const section = page.section(element, "What a step is made of");
    page.note(section, "Kind after kind, what each adds to the time of the rank slowest so far. The parts add up to the mean of the longest step, which is another rank's in each.");
    const staged = new Set(job.lost.map(row => row.stage)).size > 1;
    for (const rows of page.grouped(job.lost, row => row.stage).values()) {
      page.shares(section, {
        title: staged ? `Stage ${rows[0].stage}` : "A step",
        parts: rows.map(row => ({ name: row.kind, value: row.held_ms_per_step, color: page.color.kind(row.kind), help: row.most_by_rank === null ? "all ranks alike" : `mostly on rank ${row.most_by_rank} (${page.format.share(row.share_of_that_rank)})` })),
        format: value => page.format.us(value * 1000),
      });
    }
  }

  function list(element, title, lines) {
    if (!lines.length) return;
    const section = page.section(element, title);
    const all = page.element("ul", "");
    for (const line of lines) all.append(page.text("li", line));
    section.append(all);
  }

  function clocks(job) {
    const found = job.clocks;
    if (!found) return ["starts of different ranks cannot be compared"];
    const by = { collectives: "ends of collectives", steps: "ends of steps" }[found.source];
    const residual = found.residual_us === null ? "not known" : `${page.format.us(found.residual_us)}, at most ${page.format.us(found.largest_residual_us)}`;
    return [by ? `aligned by ${page.format.count(found.events)} ${by}; residual ${residual}` : "not aligned", ...found.notes];
  }

  page.view({
    id: "summary",
    title: "Summary",
    order: 10,
    draw(data, element) {
      const job = data.job;
      const sentence = page.text("p", job.sentence, "big");
      sentence.style.fontSize = "1.35rem";
      sentence.style.fontWeight = "600";
      if (job.verdict !== "none") sentence.style.borderLeft = `6px solid ${page.culpritColor()}`;
      sentence.style.paddingLeft = "0.6rem";
      sentence.dataset.verdict = job.verdict;
      element.append(sentence);
      figures(job, element);
      lost(job, element);
      if (job.ranks.length > 1) page.rankBars(page.section(element, `Each of ${page.format.count(job.ranks.length)} ranks`, "in order; a bar's tooltip names the rank; coloured: an outlier; marked below: named by the verdict"), data);
      list(element, "Evidence", job.evidence);
      suspects(job, element);
      held(job, element);
      list(element, "Missing", job.missing.slice(0, 100).map(row => `${row.what}: ${row.reason}`));
      list(element, "Clocks", clocks(job));
    },
  });
})();
