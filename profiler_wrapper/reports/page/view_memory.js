"use strict";
/** Memory: how much is held when, by whom, and what would make the peak lower. */
(function () {
  page.view({
    id: "memory",
    title: "Memory",
    order: 70,
    applies: data => data.memory && data.memory.peak ? null : page.whyNot("memory is not available", "no allocation was recorded (profile_memory=True)"),
    draw(data, element) {
      drawFigures(element, data);
      const { memory } = data;
      const over = page.section(element, "Over time");
      let curve = null;
      if (memory.curve) {
        if (memory.curve.events > memory.curve.time_us.length) {
          page.note(over, `${page.format.count(memory.curve.time_us.length)} of ${page.format.count(memory.curve.events)} events are drawn: the highest and lowest of each stretch, all peaks of steps, and what is held in pauses.`);
        }
        curve = page.memoryCurve(over, data);
      } else page.note(over, "The curve is not in this result: it was written by an older version.");
      const at = page.section(element, "At the peak");
      page.shares(at, {
        title: when(memory),
        parts: Object.entries(memory.categories || {}).map(([name, value]) => ({ name: page.categoryName(name), value, color: page.color.category(name), help: HELP[name] })).sort((a, b) => b.value - a.value),
        format: page.format.bytes,
      });
      drawOwners(element, memory);
      drawChanges(element, memory, data);
      drawBlocks(element, data);
      drawMoments(element, memory);
      drawAllocations(element, data, curve);
      drawOps(element, data);
    },
  });

  const HELP = {
    params: "parameters and buffers",
    grads: "what .grad holds",
    os_params: "an optimizer's own copies of parameters",
    os_state: "the state of optimizers",
    activation: "what the passes through the model make and hold beyond the op that made it",
    communication: "buffers of collectives",
    workspace: "gone again when the op, or the optimizer's step, that made it ends",
    other: "all else, with what was there before profiling",
  };
  const category = { key: "category", title: "Category", kind: "text", cell: (row, cell) => { cell.title = HELP[row.category] || ""; cell.append(page.marked(page.categoryName(row.category), page.color.category(row.category))); return true; } };

  const when = memory => [
    memory.peak.step === null || memory.peak.step === undefined ? "" : `step ${memory.peak.step}`,
    memory.peak.phase,
    memory.curve ? `${page.format.us((memory.peak.time_ns - memory.curve.start_ns) / 1000)} after the recording began` : "",
  ].filter(Boolean).join(", ");

  function drawFigures(element, data) {
    const { memory } = data;
    const figures = page.element("div", "figures");
    const room = data.overview && data.overview.device_memory_bytes;
    page.figure(figures, {
      label: `Peak allocated on ${memory.device}`, value: page.format.bytes(memory.peak.allocated_bytes),
      help: [when(memory), room ? `${page.format.share(memory.peak.allocated_bytes / room)} of ${page.format.bytes(room)}` : ""].filter(Boolean).join("; "),
    });
    const reserved = memory.peak.reserved_bytes;
    const atReserved = memory.peak.reserved;
    page.figure(figures, {
      label: "Peak reserved", value: reserved === null || reserved === undefined ? null : page.format.bytes(reserved),
      missing: memory.device === "cpu" ? "a CPU's allocator reserves nothing" : page.UNKNOWN_IN_TRACE,
      help: atReserved ? `${page.format.bytes(reserved - atReserved.allocated_bytes)} of it free then` : "",
    });
    page.figure(figures, { label: "Allocated at the end", value: page.format.bytes(memory.allocated_bytes) });
    const { slope } = memory;
    page.figure(figures, {
      label: "Grows by, a step", value: slope ? page.format.bytes(Math.round(slope.bytes_per_step)) : null, missing: "fewer than two steps",
      help: slope ? `${slope.error_bytes_per_step === null ? "" : `± ${page.format.bytes(Math.round(slope.error_bytes_per_step))}, `}over ${slope.steps} steps` : "",
    });
    element.append(figures);
    if (memory.known_owners === false) page.note(element, "What the model and its optimizers hold is not known (no model was given, or a trace from elsewhere): gradients and optimizer state are inferred from what stays.");
  }

  function drawOwners(element, memory) {
    const owners = memory.peak.owners || [];
    const total = memory.peak.allocated_bytes;
    const listed = page.sum(owners, "bytes") || 0;
    const section = page.section(element, "Who holds it at the peak");
    page.note(section, listed < total ? `The ${owners.length} largest, ${page.format.share(listed / total)} of the peak.` : "All of the peak.");
    page.table(section, {
      columns: [
        category,
        page.columns.layers("layer", "Layer"),
        ...(owners.some(row => row.call_path?.length) ? [{ key: "call_path", title: "Called as", kind: "text", longest: 60, help: "Of a layer that several call", value: row => row.call_path.join(" > ") || undefined }] : []),
        { key: "name", title: "Tensor", kind: "text", longest: 60, value: row => row.name || undefined },
        { key: "op", title: "Allocated by", kind: "text", longest: 60, missing: "no op was around the allocation", value: row => row.op || null },
        page.columns.phase({ missing: "it was there before the recording" }),
        { key: "bytes", title: "Size", kind: "bytes" },
        { key: "share", title: "Share", kind: "share", bar: true, help: "of the peak", value: row => total ? row.bytes / total : null },
        { key: "count", title: "Blocks", kind: "count", help: "allocations" },
      ],
      rows: owners,
      limit: 15,
    });
  }

  function drawChanges(element, memory, data) {
    const changes = memory.changes || [];
    const leaks = memory.leaks || [];
    if (changes.length) {
      const section = page.section(element, "What would lower the peak");
      page.note(section, "Estimated from this run; a saving counts up to the next peak.");
      page.table(section, {
        columns: [
          { key: "text", title: "Change", kind: "text", longest: 110 },
          { key: "saves_bytes", title: "Saves", kind: "bytes" },
          { key: "share", title: "of the peak", kind: "share", bar: true, value: row => row.saves_bytes / memory.peak.allocated_bytes },
          { key: "costs_us", title: "Costs", kind: "us", help: "time more, a step", missing: "not known from this run", value: row => row.costs_ns === null || row.costs_ns === undefined ? null : row.costs_ns / 1000 },
          page.columns.layers(),
        ],
        rows: changes, search: false, limit: 20,
      });
    }
    const section = page.section(element, "Leaks");
    if (!leaks.length) {
      const steps = data.page.step_numbers.length;
      page.note(section, steps > 1 && memory.leaks ? "None: nothing that a step allocates stays step after step." : "Not known: that takes more than one step, and the frees of all threads.");
      return;
    }
    page.table(section, {
      columns: [
        category,
        page.columns.layers("layer", "Layer"),
        { key: "op", title: "Allocated by", kind: "text", longest: 60 },
        page.columns.phase(),
        { key: "bytes_per_step", title: "Stays, a step", kind: "bytes" },
        { key: "count_per_step", title: "Blocks, a step", kind: "number" },
        { key: "steps", title: "Steps", kind: "count", help: "over which this was seen" },
      ],
      rows: leaks, search: false, limit: 20,
    });
  }

  function drawBlocks(element, data) {
    const rows = data.layers.filter(row => row.kind === "block" && row.phase !== "recompute" && row.peak_bytes !== null);
    const kinds = [...page.grouped(rows.sort((a, b) => a.order - b.order), row => `${row.class_name} ${row.phase}`).values()].filter(group => group.length > 1);
    if (!kinds.length) return;
    const section = page.section(element, "Over the blocks", "Per call: what a block leaves behind for the backward, and the highest allocated while inside");
    const grid = page.element("div", "multiples");
    section.append(grid);
    for (const group of kinds) {
      const charts = [["retained_bytes", "kept for the backward"], ["peak_bytes", "highest while inside"]];
      for (const [key, title] of charts) {
        page.bars(grid, {
          title: `${group[0].class_name}: ${title}`, values: group.map(row => row[key]), labels: group.map(row => row.layer), format: page.format.bytes,
          color: page.color.phase(group[0].phase), onClick: i => page.goto("layers", group[i].layer),
        });
      }
    }
  }

  function drawMoments(element, memory) {
    const moments = memory.moments || [];
    if (!moments.length) return;
    const names = Object.keys(memory.categories || {}).filter(name => moments.some(one => one.categories[name]));
    const section = page.section(element, "After each phase");
    page.table(section, {
      columns: [
        { key: "step", title: "Step", kind: "number", missing: "in no step" },
        { key: "label", title: "Moment", kind: "text" },
        { key: "allocated_bytes", title: "Allocated", kind: "bytes" },
        ...(moments.some(one => one.reserved_bytes !== null) ? [{ key: "reserved_bytes", title: "Reserved", kind: "bytes" }] : []),
        ...names.map(name => ({ key: name, title: page.categoryName(name), kind: "bytes", help: HELP[name], value: row => row.categories[name] })),
      ],
      rows: moments, search: false, limit: 12,
    });
  }

  function drawAllocations(element, data, curve) {
    const rows = data.allocations;
    if (!rows.length) return;
    const end = data.memory.curve ? data.memory.curve.end_us : null;
    const see = page.text("button", "See it in the curve ↑", "small");
    see.type = "button";
    see.hidden = true;
    see.addEventListener("click", () => curve.show());
    const section = page.section(element, "Largest allocations");
    page.note(section, `The ${page.format.count(rows.length)} largest of the recording. A click on one marks in the curve how long it lives.`);
    page.table(section, {
      columns: [
        { key: "size_bytes", title: "Size", kind: "bytes" },
        category,
        page.columns.layers("layer", "Layer"),
        { key: "op", title: "By", kind: "text", longest: 60, missing: "no op was around the allocation", value: row => row.op || null },
        page.columns.phase(),
        { key: "allocated_us", title: "Allocated at", kind: "us", help: "since the recording began" },
        { key: "released_us", title: "Released at", kind: "us", missing: "alive when the recording ended" },
        { key: "life_us", title: "Lives", kind: "us", missing: "longer than the recording", value: row => row.released_us === null ? null : row.released_us - row.allocated_us },
      ],
      rows,
      limit: 15,
      tools: [see],
      onSelect: row => {
        if (!curve) return;
        curve.mark(row.allocated_us, row.released_us === null ? end : row.released_us);
        see.hidden = false;
      },
    });
  }

  function drawOps(element, data) {
    const rows = data.op_memory;
    if (!rows.length) return;
    const total = page.sum(rows, "allocated_bytes");
    const section = page.section(element, "Operators by what they allocate");
    page.note(section, "Over the whole recording, without what was there before. An op is charged with what it allocates itself, through aten::empty and its like too.");
    page.table(section, {
      columns: [
        { key: "op", title: "Op", kind: "text", longest: 70, value: row => row.op || "(outside of all ops)" },
        { key: "allocations", title: "Allocations", kind: "count" },
        { key: "allocated_bytes", title: "Allocated", kind: "bytes", help: "sum over its allocations" },
        page.columns.share("allocated_bytes", "Share", "of all that was allocated", total),
        { key: "kept_bytes", title: "Kept", kind: "bytes", help: "of it, still alive when the op returned", missing: "no op was around it" },
        { key: "largest_bytes", title: "Largest", kind: "bytes", help: "one allocation" },
      ],
      rows,
      sort: { key: "allocated_bytes", descending: true },
      limit: 15,
    });
  }
})();
