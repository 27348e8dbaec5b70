"use strict";
/** The view Summary: what to do first, findings, the figures of the run, and what was not recorded. */
(function () {
  page.view({ id: "summary", title: "Summary", order: 10, draw });

  const isKnown = value => value !== null && value !== undefined;

  function draw(data, element) {
    drawVerdict(data, element);
    drawFigures(data, element);
    drawParts(data, element);
    drawFindings(data, element);
    drawUnknown(data, element);
    drawRun(data, element);
  }

  /** A text with the directory of the run: that in which the page lies, unless it is shared, without a trace. */
  function withRun(data, text) {
    const here = /^file:\/\/(.*?)(\/rank\d[^/]*)?(\/steps_[^/]*)?\/[^/]*$/.exec(location.href.split("#")[0]);
    return text && here && data.run.trace ? text.replaceAll("RUN_DIRECTORY", decodeURIComponent(here[1])) : text;
  }

  function drawVerdict(data, element) {
    const verdict = data.summary && data.summary.verdict;
    element.append(page.text("p", withRun(data, verdict) || "This result holds no verdict: it was written without advice.", "big"));
    const unlike = page.whyNot("the steps are unlike");
    if (unlike) page.note(element, `${unlike[0].toUpperCase()}${unlike.slice(1)}.`);
  }

  // ---- figures ------------------------------------------------------------------------------------------------------

  function drawFigures(data, element) {
    const place = page.element("div", "figures");
    element.append(place);
    stepTime(data, place);
    workTime(data, place);
    callTimes(data, place);
    peakShare(data, place);
    peakMemory(data, place);
    keysAndValues(data, place);
    coverage(data, place);
    attention(data, place);
  }

  /** Of one step where steps are alike, else of all of them: as the figures beside it are. */
  function stepTime(data, place) {
    const { label, times } = page.stepTimes(data);
    if (!times.length) {
      page.figure(place, { label: "Step time", value: null, missing: "The trace has no steps (prof.step())." + (isKnown(data.time.span_us) ? ` All of it spans ${page.format.us(data.time.span_us)}.` : "") });
      return;
    }
    const mean = page.format.us(page.mean(times));
    const range = times.length > 1 ? `${page.format.us(Math.min(...times))} to ${page.format.us(Math.max(...times))}` : "";
    if (data.page.like_steps || times.length < 2) {
      const steps = data.page.step_numbers;
      const of = data.page.like_steps ? page.per() : steps.length === 1 ? `of step ${steps[0]}` : "of one step";
      page.figure(place, { label: `${label}, ${of}`, value: mean, help: range ? `mean of ${times.length} steps, ${range}` : "one step: no spread is known" });
      return;
    }
    const all = times.reduce((sum, us) => sum + us, 0);
    page.figure(place, { label: `${label}, all ${times.length} steps`, value: page.format.us(all), help: `one takes ${range}, mean ${mean}` });
  }

  function workTime(data, place) {
    const onDevice = data.time_basis === "device";
    const busy = data.time.busy_us;
    const use = data.overview && data.overview.utilization;
    const help = !onDevice ? "there is no device in this trace" : isKnown(use) ? `kernels run in ${page.format.share(use)} of the ${page.stepTimes(data).of.size ? "steps'" : "trace's"} wall time`
      : isKnown(busy) && data.time.span_us ? `any work, copies too, runs in ${page.format.share(busy / data.time.span_us)} of the whole trace` : "";
    const mean = data.page.like_steps && data.page.steps > 1 ? `mean of ${data.page.steps} steps` : "";
    const outside = data.page.step_numbers.length && !data.page.like_steps ? page.sum(data.steps.filter(row => row.step === null), "time_us") : 0;
    const notes = [mean, outside ? `${page.format.us(outside)} of it in no step` : "", help];
    page.figure(place, { label: `${page.timeName()}, ${page.per()}`, value: page.format.us(page.perStep(data.time.total_us)), help: notes.filter(Boolean).join("; ") });
  }

  /** Of generation: what one call of the model takes, which no mean over both phases shows. */
  function callTimes(data, place) {
    for (const row of data.layers.filter(row => row.depth === 0 && row.calls && ["prefill", "decode", "verify"].includes(row.phase))) {
      page.figure(place, {
        label: `${row.phase[0].toUpperCase()}${row.phase.slice(1)}, a call`, value: page.format.us(row.time_us / row.calls),
        help: `${page.timeName()} of ${row.layer}, mean of ${page.format.count(row.calls)} ${row.calls === 1 ? "call" : "calls"}`,
      });
    }
  }

  function peakShare(data, place) {
    const use = data.utilization;
    const why = page.why("MFU", "not available") || page.why("peak is known") || page.why("flops", "not available") || "The FLOPs of a step are not known.";
    if (!use || !isKnown(use.mfu)) {
      page.figure(place, { label: "MFU", value: null, missing: why });
      return;
    }
    const causal = isKnown(use.causal_mfu) && use.causal_mfu !== use.mfu ? `causal ${page.format.share(use.causal_mfu)}` : "";
    const hardware = isKnown(use.hfu) && use.hfu !== use.mfu ? `HFU ${page.format.share(use.hfu)}` : "";
    const of = data.page.use.replace(/^.*? of (?=\d)/, "of ").replace(/;.*$/, "");
    page.figure(place, { label: "MFU", value: page.format.share(use.mfu), help: [causal, hardware, of].filter(Boolean).join("; ") }).title = page.full(data.page.use);
  }

  function peakMemory(data, place) {
    const peak = data.memory && data.memory.peak;
    const all = data.overview && data.overview.device_memory_bytes;
    const reserved = peak && isKnown(peak.reserved_bytes) ? `reserved ${page.format.bytes(peak.reserved_bytes)}` : "";
    const allocated = peak && peak.allocated_bytes;
    const help = [isKnown(all) && allocated ? `${page.format.share(allocated / all)} of ${page.format.bytes(all)}` : "", reserved, peak && peak.phase ? `in ${peak.phase}` : ""];
    page.figure(place, {
      label: "Peak memory", value: isKnown(allocated) ? page.format.bytes(allocated) : null, help: isKnown(allocated) ? help.filter(Boolean).join("; ") : "",
      missing: page.why("memory", "not available") || "No allocation was recorded.",
    });
  }

  /** Of each model that generated: its cache at the end of the largest request, and what more would take. */
  function keysAndValues(data, place) {
    for (const cache of data.run.kv_cache || []) {
      const longer = (cache.contexts || []).filter(one => isKnown(one.bytes)).map(one => `${page.format.bytes(one.bytes)} at ${page.format.count(one.tokens)} tokens`);
      const each = isKnown(cache.bytes_per_token) ? `${page.format.bytes(cache.bytes_per_token)} a token` : "";
      const of = cache.sequences > 1 ? `of each of ${page.format.count(cache.sequences / cache.beams)} sequences${cache.beams > 1 ? ` of ${cache.beams} beams` : ""}` : "";
      page.figure(place, {
        label: `KV cache${isKnown(cache.tokens) ? `, at ${page.format.count(cache.tokens)} tokens` : ""}${data.run.kv_cache.length > 1 ? ` of ${cache.root}` : ""}`,
        value: isKnown(cache.bytes) ? page.format.bytes(cache.bytes) : null, missing: cache.problem, help: [[each, of].filter(Boolean).join(" "), ...longer].filter(Boolean).join("; "),
      });
    }
  }

  function coverage(data, place) {
    const rest = data.unattributed.filter(row => row.time_us > 0).sort((a, b) => b.time_us - a.time_us);
    const parts = rest.slice(0, 2).map(row => `${page.format.us(page.perStep(row.time_us))} ${row.reason}`).join("; ");
    page.figure(place, { label: "Attributed to layers", value: data.page.attributed, help: rest.length ? `not, ${page.per()}: ${parts}` : "all time has a layer, or none by nature" });
  }

  function attention(data, place) {
    if (!data.attention.length) return;
    const times = new Map();
    for (const row of data.attention) times.set(row.backend, (times.get(row.backend) || 0) + row.time_us / data.page.steps);
    const sorted = [...times].sort((a, b) => b[1] - a[1]);
    const other = page.attentionElsewhere(data);
    const parts = sorted.map(([backend, us]) => `${backend} ${page.format.us(us)}`);
    if (other) parts.push(`${other.reason}: ${page.format.us(page.perStep(other.time_us))}`);
    page.figure(place, { label: `Attention, ${page.per()}`, value: sorted.map(([backend]) => backend).join(" + "), help: parts.join(", ") });
  }

  // ---- findings -----------------------------------------------------------------------------------------------------

  function drawFindings(data, element) {
    const findings = (data.summary && data.summary.findings) || [];
    const section = page.section(element, findings.length ? `What could be better (${findings.length})` : "What could be better");
    if (!findings.length) page.note(section, "No rule of advice found anything that stands out in this run.");
    else page.note(section, "Savings are upper bounds, estimated from this run's own numbers; they overlap, and do not add up.");
    const list = page.element("div", "cards");
    section.append(list);
    for (const finding of findings) {
      try {
        list.append(card(data, finding));
      } catch (error) {
        console.error(error);
        page.add(list, page.text("p", `A finding could not be shown: ${error.message}`, "notice"));
      }
    }
  }

  function card(data, finding) {
    const box = page.element("article", "card");
    box.dataset.id = String(finding.id);
    page.add(box, page.text("h3", finding.title), savings(data, finding), place(data, finding));
    const evidence = page.element("ul");
    for (const line of finding.evidence || []) evidence.append(page.text("li", withRun(data, line)));
    const fix = page.element("div", "fix");
    page.add(fix, page.text("span", withRun(data, finding.fix), "how"), page.copyButton(withRun(data, finding.fix)));
    page.add(box, evidence, fix);
    if (finding.source) page.add(box, page.add(page.element("div", "where"), page.text("code", finding.source), page.copyButton(finding.source)));
    return box;
  }

  /** A saving with what it is a part of: each share follows from the two numbers that stand beside it. */
  function savings(data, finding) {
    const line = page.element("div", "savings");
    const parts = [];
    if (isKnown(finding.saves_at_most_us)) parts.push(`${page.format.us(finding.saves_at_most_us)} a step`);
    if (isKnown(finding.saves_at_most_bytes)) parts.push(`${page.format.bytes(finding.saves_at_most_bytes)} at the peak`);
    const part = finding.id === "slow-optimizer"; // the bound is all of the optimizer: something of it stays
    page.add(line, page.text("strong", !parts.length ? "what it saves is not known" : part ? `saves a part of the ${parts[0]} that the optimizer takes` : `saves at most ${parts.join(", ")}`));
    const more = [ofStep(data, finding.saves_at_most_us), ofPeak(data, finding), `confidence ${finding.confidence}`, finding.id];
    return page.add(line, page.text("span", more.filter(Boolean).join(" · "), "quiet"));
  }

  function ofStep(data, saves) {
    const { times } = page.stepTimes(data);
    const whole = times.length ? page.mean(times) : data.time.span_us;
    if (!isKnown(saves) || !whole) return "";
    const of = !times.length ? `the trace's ${page.format.us(whole)}` : `a step of ${page.format.us(whole)}${times.length > 1 ? " (mean)" : ""}`;
    return `${page.format.share(saves / whole)} of ${of}`;
  }

  /** Fragmentation is a part of what the allocator reserves, all else of what is allocated. */
  function ofPeak(data, finding) {
    const peak = (data.memory && data.memory.peak) || {};
    const reserved = finding.id === "fragmentation" && peak.reserved_bytes;
    const whole = reserved || peak.allocated_bytes;
    if (!isKnown(finding.saves_at_most_bytes) || !whole) return "";
    return `${page.format.share(finding.saves_at_most_bytes / whole)} of the ${page.format.bytes(whole)} ${reserved ? "reserved" : "allocated"} at the peak`;
  }

  function place(data, finding) {
    const line = page.element("div", "where");
    const layers = finding.layers && finding.layers.length ? finding.layers : finding.layer ? [finding.layer] : [];
    const name = finding.layer || (layers.length === 1 ? layers[0] : null);
    if (name) page.add(line, page.link("layers", name, name));
    else for (const layer of layers.slice(0, 3)) page.add(line, page.link("layers", layer, layer), " ");
    if (finding.phase) page.add(line, page.text("span", ` ${finding.phase}`, "quiet"));
    return line.childNodes.length ? line : null;
  }

  /** Prefill and tokens of a request, models of a pipeline, roles of training. */
  function drawParts(data, element) {
    const named = [...page.grouped((data.parts || []).filter(row => row.step !== null), row => row.part).values()];
    if (named.length < 2) return;
    const calls = group => group[0].part === "other" ? null : page.sum(group, "count");
    const rows = named.map(group => ({ part: group[0].part, count: calls(group), time_us: page.sum(group, "time_us") }));
    const total = page.sum(rows, "time_us");
    const section = page.section(element, data.run.step_source === "requests" ? "Parts of a request" : "Parts of a step");
    page.table(section, {
      search: false, rows, sort: { key: "time_us", descending: true },
      columns: [
        { key: "part", title: "Part", kind: "text", longest: 60, help: "other: between the calls of the model" },
        page.columns.count("count", `Calls ${page.per()}`),
        page.columns.time("time_us", `Time ${page.per()}`),
        { key: "each", title: "Time each", kind: "us", value: row => row.count ? row.time_us / row.count : null },
        page.columns.share("time_us", "Share", "of all steps", total),
      ],
    });
  }

  // ---- what is not known, and what ran ------------------------------------------------------------------------------

  function drawUnknown(data, element) {
    const rows = data.unattributed.filter(row => row.time_us > 0);
    if (!data.warnings.length && !rows.length) return;
    const section = page.section(element, "What to know about these numbers");
    const list = page.element("ul", "warnings");
    for (const warning of data.warnings) list.append(page.text("li", warning));
    if (data.warnings.length) section.append(list);
    if (!rows.length) return;
    page.table(section, {
      search: false, rows, sort: { key: "time_us", descending: true },
      columns: [
        { key: "reason", title: "Time without a layer, because", kind: "text", longest: 90 },
        page.columns.time("time_us", `Time ${page.per()}`),
        { key: "share", title: "Share", kind: "share", bar: true, value: row => data.time.total_us ? row.time_us / data.time.total_us : undefined },
        page.columns.count("count", `${data.time_basis === "device" ? "Kernels, copies" : "Ops"} ${page.per()}`),
      ],
    });
  }

  /** CUDA counts its versions as 12090: 12.9; HIP as 60443483: 6.4.43483. */
  const version = (name, value) => /^cuda\b/.test(name) && /^\d{5}$/.test(value) ? `${Math.floor(value / 1000)}.${Math.floor(value % 1000 / 10)}`
    : /^hip\b/.test(name) && /^\d{8}$/.test(value) ? `${Math.floor(value / 1e7)}.${Math.floor(value % 1e7 / 1e5)}.${value % 1e5}` : value;

  function drawRun(data, element) {
    const section = page.section(element, "The run");
    const run = data.run;
    const facts = [
      ["Model", [...new Set(data.layers.filter(row => row.depth === 0 && row.layer).map(row => row.layer))].slice(0, 6).join(", ") || null],
      ["Device", data.page.machine],
      ["Steps", `${data.page.steps_in_words}${data.page.full_steps ? `; with shapes: ${data.page.full_steps}` : ""}`],
      ["Rank", isKnown(run.rank) ? `${run.rank}${isKnown(run.world_size) ? ` of ${run.world_size}` : ""}` : null],
      ["Coordinates", run.coordinates && Object.keys(run.coordinates).length ? Object.entries(run.coordinates).map(([name, value]) => `${name} ${value}`).join(", ") : null],
      ["Times are of", data.time_basis === "device" ? "the device" : "the CPU"],
      ["Peaks", data.page.use || null],
      ["Trace", run.trace || null],
      ...Object.entries(run.versions || {}).map(([name, value]) => [name, version(name, value)]),
      ["Complete", data.complete ? "yes" : "NO: the recording ended early"],
    ];
    const table = page.element("table", "plain");
    for (const [name, value] of facts) {
      if (!isKnown(value) || value === "") continue;
      table.append(page.add(document.createElement("tr"), page.text("th", name), page.text("td", value)));
    }
    section.append(table);
  }
})();
