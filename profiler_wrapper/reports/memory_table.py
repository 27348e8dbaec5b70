"""Memory by category as text: at the peak, at each moment, over the steps, and what would lower it."""

from __future__ import annotations

from profiler_wrapper.analysis.memory_model import CATEGORIES, Change, Leak, MemoryMoment, MemoryUse, Slope
from profiler_wrapper.reports.memory_owners import owner_groups
from profiler_wrapper.reports.memory_tree import moment_in_words
from profiler_wrapper.reports.text import cells, clean, grid, shorten
from profiler_wrapper.units import MIB, percent

_MOST_OWNERS = 25
_LONGEST_PLACE = 70
_LEAST_SHARE = 0.005  # of the peak: a category that holds less is not named on one line


def peak_line(use: MemoryUse, width: int) -> str:
    """`"memory: peak 312.4 MiB in backward of step 3: activation 61 %, params 20 %, ..."`.

    Categories that do not fit into `width` are left out, the smallest first.
    """
    peak = use.peak
    when = f" {moment_in_words(use)}".rstrip()
    line = f"memory: peak {peak.total_bytes / MIB:.1f} MiB{when}"
    held = sorted(peak.categories.items(), key=lambda item: -item[1])
    between = ": "
    for name, size in held:
        part = f"{between}{name} {100 * size / max(1, peak.total_bytes):.0f} %"
        if size <= _LEAST_SHARE * peak.total_bytes or cells(line + part) > width:
            break
        line, between = line + part, ", "
    return shorten(line, width)


def leak_line(use: MemoryUse, width: int) -> str:
    """The largest leak in at most `width` columns, whose name is shortened; `""` where there is none."""
    if not use.leaks:
        return ""
    leak = use.leaks[0]
    before = f"warning: leak of {leak.bytes_per_step / MIB:.3f} MiB per step ({leak.steps} steps seen): "
    after = f" (and {len(use.leaks) - 1} more in the log)" if len(use.leaks) > 1 else ""
    who = f"{leak.op} in {leak.layer}" if leak.layer else leak.op
    return shorten(before + shorten(clean(who), max(0, width - cells(before) - cells(after))) + after, width)


def memory_use_sections(use: MemoryUse) -> list[tuple[str, str]]:
    """Titles and texts, all sizes in MiB."""
    sections = [
        (f"Memory of {clean(use.device)} at the peak, by category: MiB", _peak_table(use)),
        ("Who holds it at the peak: MiB", _owner_table(use)),
        ("Memory by category over time: MiB", _moment_table(use)),
        ("Memory from step to step", "\n".join(_trend(use))),
        ("What would lower the peak", "\n".join(map(_change_text, use.changes))),
    ]
    return [(title, text) for title, text in sections if text]


def _peak_table(use: MemoryUse) -> str:
    peak = use.peak
    rows = [
        [name, _mib(peak.categories[name]), percent(peak.categories[name], peak.total_bytes)]
        for name in CATEGORIES
        if peak.categories.get(name)
    ]
    rows.append(["TOTAL", _mib(peak.total_bytes), percent(peak.total_bytes, peak.total_bytes)])
    reserved = [moment for moment in (peak, use.reserved_peak) if moment is not None and moment.reserved_bytes]
    lines = [f"highest allocated {moment_in_words(use)}".rstrip(), "", grid(("category", "MiB", "share %"), rows), ""]
    lines += [f"reserved at the {clean(moment.label)}: {_reserved_text(moment)}" for moment in reserved]
    return "\n".join(lines).rstrip()


def _reserved_text(moment: MemoryMoment) -> str:
    reserved = moment.reserved_bytes or 0
    return f"{_mib(reserved)} MiB, of it {_mib(reserved - moment.total_bytes)} not allocated (fragments and cache)"


def _owner_table(use: MemoryUse) -> str:
    """Like layers in one row; the rest is counted, so that the rows add up."""
    groups = owner_groups(use.peak_owners)
    total = use.peak.total_bytes
    rows = [
        [
            group.category,
            shorten(clean(group.place or "-"), _LONGEST_PLACE),
            group.phase or "-",
            clean(group.op or "-"),
            _mib(group.size_bytes),
            percent(group.size_bytes, total),
            str(group.count),
        ]
        for group in groups[:_MOST_OWNERS]
    ]
    if rest := groups[_MOST_OWNERS:]:
        size = sum(group.size_bytes for group in rest)
        rows.append(
            [f"({len(rest)} more)", "", "", "", _mib(size), percent(size, total), str(sum(g.count for g in rest))]
        )
    titles = ("category", "layer or tensor", "phase", "op", "MiB", "share %", "allocations")
    return grid(titles, rows, left_columns=4) if rows else ""


def _moment_table(use: MemoryUse) -> str:
    moments = sorted((*use.moments, use.peak), key=lambda moment: moment.time_ns)
    begin_ns = int(use.timeline.time_ns[0]) if len(use.timeline.time_ns) else moments[0].time_ns
    names = [name for name in CATEGORIES if any(moment.categories.get(name) for moment in moments)]
    rows = [
        [
            clean(moment.label),
            "-" if moment.step is None else str(moment.step),
            f"{(moment.time_ns - begin_ns) / 1e6:.3f}",
            *(_mib(moment.categories.get(name, 0)) for name in names),
            _mib(moment.total_bytes),
            "" if moment.reserved_bytes is None else _mib(moment.reserved_bytes),
        ]
        for moment in moments
    ]
    return grid(("moment", "step", "at ms", *names, "TOTAL", "reserved"), rows)


def _trend(use: MemoryUse) -> list[str]:
    lines = [_slope_text(use.slope)] if use.slope is not None else []
    return [*lines, *(f"leak: {_leak_text(leak)}" for leak in use.leaks)]


def _slope_text(slope: Slope) -> str:
    error = slope.error_bytes_per_step
    spread = "" if error is None else f" +- {error / MIB:.3f} (95 %)"
    doubt = " (two steps tell no uncertainty)" if error is None else ""
    return (
        f"allocated at the ends of {slope.steps} steps: {slope.bytes_per_step / MIB:+.3f}{spread} MiB per step{doubt}"
    )


def _leak_text(leak: Leak) -> str:
    where = f" in {clean(leak.layer)}" if leak.layer else ""
    return (
        f"{clean(leak.op)}{where} ({leak.phase}, {leak.category}) keeps {leak.bytes_per_step / MIB:.3f} MiB "
        f"more each step (allocations: {leak.count_per_step:.3g} a step; seen over {leak.steps} steps)"
    )


def _change_text(change: Change) -> str:
    costs = f", for {change.costs_ns / 1e6:.3f} ms more a step" if change.costs_ns else ""
    return f"{clean(change.text)}: {_mib(change.saves_bytes)} MiB less{costs}"


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / MIB:.2f}"
