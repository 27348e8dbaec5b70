"use strict";
/** The view Overview: how busy the device is, how the wall time of a step divides, steps, and classes by phase. */
(function () {
  page.view({
    id: "overview", title: "Overview", order: 30, draw,
    applies: data => data.overview || data.classes.length || data.steps.length ? null : "no time was recorded",
  });

  const isKnown = value => value !== null && value !== undefined;
  const PARTS = [
    ["kernel", "Kernel", "a kernel that computes is running on the device, whatever else runs beside it"],
    ["memcpy", "Memcpy", "a copy is running on the device, and no kernel"],
    ["memset", "Memset", "memory is being set on the device, and neither of the above"],
    ["communication", "Communication", "a collective is running, and none of the above: exposed communication"],
    ["runtime", "Runtime", "the CPU is in a call into the runtime or driver, and the device has nothing to do"],
    ["dataloader", "DataLoader", "the CPU waits for data"],
    ["cpu", "CPU", "the CPU is in ops, and the device has nothing to do"],
    ["other", "Other", "none of these: Python between ops"],
  ];

  function draw(data, element) {
    if (data.time_basis !== "device") page.add(element, page.text("p", `There is no device in this trace, so utilisation, SM efficiency, occupancy, tensor cores and launches are not known. ${whyNoDevice(data)}`, "notice"));
    if (data.overview) {
      if (data.time_basis === "device") drawUse(data, element); else drawUseOfCpu(data, element);
      drawSplit(data, element);
    } else page.note(element, page.why("overview") || "How the step divides is not known: this result holds no overview.");
    drawClasses(data, element);
    drawSteps(data, element);
  }

  function whyNoDevice(data) {
    const type = data.run && data.run.device_type;
    return type && type !== "cpu" ? "A device was there: record it with activities that hold it (ProfilerActivity.CUDA)." : "The run was on a CPU, or its kernels were not recorded.";
  }

  /** Whether it is by steps: a trace without any is taken as one. */
  const isStepwise = overview => overview.steps.some(split => split.step !== null);

  function drawUse(data, element) {
    const use = data.overview;
    const section = page.section(element, "How busy the device is");
    const none = page.UNKNOWN_IN_TRACE;
    const steps = Math.max(1, use.steps.length);
    const mean = !isStepwise(use) ? "over the whole trace" : steps > 1 ? `a step, mean of ${steps}` : "a step";
    const place = page.element("div", "figures");
    section.append(place);
    const shown = (label, value, help, missing = none) => page.figure(place, { label, value: isKnown(value) ? value : null, help, missing });
    const share = value => isKnown(value) ? page.format.share(value) : null;
    shown("Utilisation", share(use.utilization), "of the steps' wall time in which any kernel runs");
    shown("SM efficiency", share(use.sm_efficiency), "the same, weighed with how many multiprocessors have a block", none);
    shown("Occupancy", share(use.occupancy), "warps that are resident of those that fit, mean over kernels by time; high is not always fast");
    shown("Tensor cores", share(use.tensor_core_share), "of the kernels' time in kernels that use them");
    shown("Kernels", isKnown(use.kernels) ? page.format.count(Math.round(use.kernels / steps)) : null, mean);
    shown("Launches", isKnown(use.launches_per_s) ? `${page.format.count(Math.round(use.launches_per_s))} /s` : null, "of kernels, over the wall time of the steps");
    shown("Gaps", isKnown(use.gaps_us) ? page.format.us(use.gaps_us / steps) : null, `${mean}, in which nothing runs on the device`);
    const device = [use.device || data.page.machine, use.compute_capability ? `compute capability ${use.compute_capability}` : "", use.multiprocessors ? `${use.multiprocessors} multiprocessors` : "", isKnown(use.device_memory_bytes) ? page.format.bytes(use.device_memory_bytes) : ""];
    page.note(section, device.filter(Boolean).join(", "));
  }

  function drawUseOfCpu(data, element) {
    const steps = data.overview.steps || [];
    const span = sumOf(steps, "span_us");
    const section = page.section(element, "How busy the CPU is");
    const place = page.element("div", "figures");
    section.append(place);
    const shown = (label, value, help) => page.figure(place, { label, value: isKnown(value) ? value : null, help, missing: "No step was recorded whole." });
    shown("In ops", span ? page.format.share(sumOf(steps, "cpu_us") / span) : null, "of the steps' wall time in which any thread is in an op");
    shown("Waiting for data", span ? page.format.share(sumOf(steps, "dataloader_us") / span) : null, "of the steps' wall time");
    shown("Between ops", span ? page.format.share(sumOf(steps, "other_us") / span) : null, "of the steps' wall time: Python, and whatever is no op");
    shown("Ops", page.format.count(Math.round(sumOf(data.classes, "count") / data.page.steps)), data.page.per);
  }

  const sumOf = (rows, key) => rows.reduce((sum, row) => sum + row[key], 0);

  // ---- the split of the step ----------------------------------------------------------------------------------------

  function drawSplit(data, element) {
    const steps = data.overview.steps || [];
    const stepwise = isStepwise({ steps });
    const section = page.section(element, stepwise ? "Where the wall time of a step goes" : "Where the wall time of the trace goes");
    if (!steps.length) { page.note(section, "No step was recorded whole."); return; }
    page.note(section, "Without overlap, in this order of priority: an instant belongs to the first part that applies to it. The parts add up to the whole exactly.");
    const name = step => step.step === null ? "all" : `step ${step.step}`;
    const used = PARTS.filter(([part]) => steps.some(step => step[`${part}_us`] > 0));
    page.legend(section, used.map(([part, title]) => [title, page.color.split(part)]));
    const most = Math.max(...steps.map(step => step.span_us), 1e-9);
    const bars = page.element("div", "splits");
    for (const step of steps.slice(0, 60)) {
      const pieces = used.map(([part, title]) => [title, step[`${part}_us`], page.color.split(part)]);
      bars.append(stacked(name(step), pieces, step.span_us, most));
    }
    section.append(bars);
    if (steps.length > 60) page.note(section, `The first 60 of ${steps.length} steps are drawn; the table has the means of all.`);
    const mean = key => sumOf(steps, key) / steps.length;
    const span = mean("span_us");
    const withDevice = data.time_basis === "device";
    page.table(section, {
      search: false, sort: null, total: { part: stepwise ? "Step" : "All", time: span, least: Math.min(...steps.map(step => step.span_us)), most: Math.max(...steps.map(step => step.span_us)), help: "" },
      rows: used.map(([part, title, help]) => {
        const key = `${part}_us`;
        return {
          part: title, help: withDevice ? help : help.replace(/, and the device has nothing to do|: exposed communication/, ""), time: mean(key),
          least: Math.min(...steps.map(step => step[key])), most: Math.max(...steps.map(step => step[key])),
        };
      }),
      columns: [
        { key: "part", title: "Part", kind: "text" },
        { key: "time", title: stepwise && steps.length > 1 ? `Mean of ${steps.length} steps` : "Time", kind: "us" },
        { key: "share", title: "Share", kind: "share", bar: true, value: row => span ? row.time / span : undefined },
        ...(steps.length > 1 ? [{ key: "least", title: "Least", kind: "us", like: "time" }, { key: "most", title: "Most", kind: "us", like: "time" }] : []),
        { key: "help", title: "Means", kind: "text", longest: 100 },
      ],
    });
  }

  /** One bar of pieces [[title, microseconds, color]]; `total` of `most` is how long it is. */
  function stacked(name, pieces, total, most) {
    const line = page.element("div", "split");
    const bar = page.element("div", "parts");
    bar.style.width = 100 * total / most + "%";
    for (const [title, us, color] of pieces) {
      if (!(us > 0)) continue;
      const piece = page.element("div", "piece");
      piece.style.width = 100 * us / total + "%";
      piece.style.background = color;
      piece.title = `${title}: ${page.format.us(us)}, ${page.format.share(us / total)} of ${name}`;
      bar.append(piece);
    }
    return page.add(line, page.text("span", name, "quiet"), page.element("div", "room", bar), page.text("span", page.format.us(total), "quiet"));
  }

  // ---- classes and steps --------------------------------------------------------------------------------------------

  function drawClasses(data, element) {
    if (!data.classes.length) return;
    const section = page.section(element, "Classes of work by phase");
    page.note(section, `${page.timeName()} ${data.page.per}${data.page.like_steps && data.page.steps > 1 ? `, mean of ${data.page.steps} steps` : ""}.`);
    const rows = new Map();
    for (const row of data.classes) {
      if (!rows.has(row.class)) rows.set(row.class, { name: row.class, time: 0, count: 0, flops: null, phases: {} });
      const sums = rows.get(row.class);
      sums.time += row.time_us / data.page.steps;
      sums.count += row.count / data.page.steps;
      sums.phases[row.phase] = (sums.phases[row.phase] || 0) + row.time_us / data.page.steps;
      if (isKnown(row.flops_per_step) && data.page.work_scale !== null) sums.flops = (sums.flops || 0) + row.flops_per_step * data.page.work_scale;
    }
    const phases = data.page.phases.filter(phase => data.classes.some(row => row.phase === phase && row.time_us > 0));
    const total = data.time.total_us / data.page.steps;
    const sum = { name: "All", time: 0, count: 0, flops: undefined, phases: {}, isTotal: true };
    for (const row of rows.values()) {
      sum.time += row.time;
      sum.count += row.count;
      for (const phase of phases) sum.phases[phase] = (sum.phases[phase] || 0) + (row.phases[phase] || 0);
    }
    drawPhases(section, [...rows.values()].sort((a, b) => b.time - a.time), phases);
    page.table(section, {
      search: false, rows: [...rows.values()], sort: { key: "time", descending: true }, total: sum,
      columns: [
        { key: "name", title: "Class", kind: "text", cell: (row, cell) => { if (!row.isTotal) { const mark = page.element("span", "mark"); mark.style.background = page.color.class(row.name); cell.append(mark); } cell.append(row.name); return true; } },
        { key: "time", title: "Time", kind: "us" },
        { key: "share", title: "Share", kind: "share", bar: true, value: row => total ? row.time / total : undefined },
        ...phases.map(phase => ({ key: phase, title: phase, kind: "us", like: "time", value: row => row.phases[phase] || undefined })),
        { key: "count", title: data.time_basis === "device" ? "Kernels, copies" : "Ops", kind: "count" },
        ...([...rows.values()].some(row => row.flops) ? [{ key: "flops", title: "Work", kind: "flops", value: row => row.flops || undefined }] : []),
      ],
    });
  }

  /** One bar a phase, of the classes in it. */
  function drawPhases(section, rows, phases) {
    page.legend(section, rows.map(row => [row.name, page.color.class(row.name)]));
    const totals = phases.map(phase => rows.reduce((sum, row) => sum + (row.phases[phase] || 0), 0));
    const bars = page.element("div", "splits");
    phases.forEach((phase, i) => bars.append(stacked(phase, rows.map(row => [row.name, row.phases[phase] || 0, page.color.class(row.name)]), totals[i], Math.max(...totals))));
    section.append(bars);
  }

  function drawStepBars(section, steps, took, wall) {
    if (steps.length < 3) return;
    const place = page.element("div", "multiples");
    section.append(place);
    const measures = [
      [took.label.toLowerCase().replace("cpu", "CPU"), wall, page.format.us, page.color.split("cpu")],
      ["time of the work", row => row.time_us, page.format.us, page.color.split("kernel")],
      ["peak memory", row => row.peak_bytes, page.format.bytes, page.color.category("activation")],
    ];
    for (const [title, value, format, color] of measures) {
      const values = steps.map(value);
      if (!values.some(isKnown)) continue;
      page.bars(place, { title, values, format, color, outliers: page.outliers(values), labels: steps.map(row => `step ${row.step}`), short: i => `step ${steps[i].step}` });
    }
  }

  function drawSteps(data, element) {
    const steps = data.steps.filter(row => row.step !== null);
    if (!steps.length) return;
    const section = page.section(element, "Steps");
    const phases = data.page.phases.filter(phase => steps.some(row => row.phases_us && row.phases_us[phase] > 0));
    const took = page.stepTimes(data);
    const wall = row => took.of.size ? took.of.get(row.step) ?? null : row.span_us;
    drawStepBars(section, steps, took, wall);
    const outside = data.steps.filter(row => row.step === null && row.time_us > 0);
    page.table(section, {
      search: false, rows: [...steps, ...outside], sort: null, limit: 100,
      columns: [
        { key: "step", title: "Step", kind: "text", value: row => row.step === null ? "in no step" : String(row.step) },
        ...(took.of.size ? [{ key: "wall_us", title: "Step time", kind: "us", missing: "it was not recorded whole", value: row => row.step === null ? undefined : wall(row), help: "Until both the CPU and the device are done with it" }] : []),
        ...(took.of.size && steps.every(row => row.span_us === wall(row)) ? [] : [{ key: "span_us", title: "CPU span", kind: "us", missing: "where it begins and ends is not known from the trace", value: row => row.step === null ? undefined : row.span_us, help: "From its begin to its end on the CPU" }]),
        { key: "time_us", title: page.timeName(), kind: "us", like: took.of.size ? "wall_us" : "span_us" },
        ...phases.map(phase => ({ key: phase, title: phase, kind: "us", like: took.of.size ? "wall_us" : "span_us", value: row => row.phases_us[phase] || undefined })),
        ...(steps.some(row => row.attention_us) ? [{ key: "attention_us", title: "attention", kind: "us", like: took.of.size ? "wall_us" : "span_us", value: row => row.attention_us || undefined }] : []),
        ...(steps.some(row => isKnown(row.peak_bytes)) ? [{ key: "peak_bytes", title: "Peak", kind: "bytes", missing: page.why("memory", "not available") || "no allocation was recorded in it", value: row => row.step === null ? undefined : row.peak_bytes }] : []),
      ],
    });
  }
})();
