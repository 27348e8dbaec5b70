"""Memory by category as text: at the peak, at each moment, over the steps, and what would lower it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import msgspec

from profiler_wrapper.place.names import Phase
from profiler_wrapper.reports.describe import machine, rank_in_words, steps_in_words
from profiler_wrapper.reports.folding import LayerBar, layer_bars
from profiler_wrapper.reports.text import cells, clean, grid, shorten
from profiler_wrapper.tables.model import CATEGORIES, Analysis, Change, Leak, MemoryCategory, MemoryUse, Owner
from profiler_wrapper.tables.statistics import OPEN, fill_numbers, split_number
from profiler_wrapper.units import MIB, mebibytes, percent

# --------------------------------------------------------------------------------------------------
# Who holds memory as a tree: below each category the model's names, and at the end a tensor's name or an op.

NO_OP = "(op not known)"
OUTSIDE = "(outside of layers)"
_CALLED = {"os_state": "optimizer state", "os_params": "optimizer's parameters"}  # else by its key


def category_name(category: str) -> str:
    """Return a category as people read it."""
    return _CALLED.get(category, category.replace("_", " "))


NAMED: tuple[MemoryCategory, ...] = ("params", "grads", "os_params", "os_state")  # whose leaves are tensors, not ops


@dataclass(eq=False)
class HeldBelow:
    """A name in the tree of a category, and what is held by it and all below it."""

    path: tuple[str, ...]  # its labels from the root on, which has none
    own_bytes: int = 0  # by no name below
    own_count: int = 0
    total_bytes: int = 0
    count: int = 0  # allocations
    is_op: bool = False
    phases: Counter[Phase] = field(default_factory=Counter)  # bytes by the phase in which they were allocated


def memory_tree(
    owners: Iterable[Owner], categories: Sequence[MemoryCategory], layers: Mapping[str, int]
) -> list[HeldBelow]:
    """Return all that a category holds, parents before children: layers as in the model, ops by what they hold.

    Of several categories the first labels are their names. Sums are exact: each total is its own and those right below.
    `layers` gives each layer its place in the model.
    """
    first = int(len(categories) > 1)
    found: dict[tuple[str, ...], HeldBelow] = {(): HeldBelow(())}
    for owner in owners:
        if owner.category in categories and owner.size_bytes > 0:
            path = (owner.category,) * first + owner_path(owner)
            for end in range(len(path) + 1):
                one = found.setdefault(path[:end], HeldBelow(path[:end]))
                one.total_bytes += owner.size_bytes
                one.count += owner.count
                if owner.phase is not None:
                    one.phases[owner.phase] += owner.size_bytes
            one.own_bytes += owner.size_bytes
            one.own_count += owner.count
            one.is_op = one.is_op or not is_named(owner)

    def place(one: HeldBelow) -> tuple[bool, float, int, list[tuple[bool, int, str]]]:
        order = layers.get(".".join(one.path[first:]), inf)
        return one.is_op, order, -one.total_bytes * one.is_op, _natural("".join(one.path[-1:]))

    places = {path: place(one) for path, one in found.items()}
    return sorted(found.values(), key=lambda one: [places[one.path[:end]] for end in range(1, len(one.path) + 1)])


def owner_path(owner: Owner) -> tuple[str, ...]:
    """`("lm_head", "weight", "exp_avg")` of an optimizer's state; `("layers", "0", "aten::mm")` of an activation."""
    if is_named(owner):
        what, of, parameter = owner.name.partition(" of ")
        return (*parameter.split("."), what) if of else tuple(owner.name.split("."))
    if owner.layer:
        return (*(owner.call_path or owner.layer.split(".")), owner.op or NO_OP)
    outside = () if owner.phase is None else (OUTSIDE if owner.phase == "other" else f"({owner.phase})",)
    return (*outside, owner.op or NO_OP)


def is_named(owner: Owner) -> bool:
    """Return whether its name is a tensor's, not an op's."""
    return bool(owner.name) and owner.category in NAMED


def _natural(label: str) -> list[tuple[bool, int, str]]:
    """So that 2 comes before 10."""
    parts = re.findall(r"([0-9]{1,18})|([^0-9]+|[0-9]+)", label)
    return [(not number, int(number or 0), text) for number, text in parts]


def layer_order(analysis: Analysis) -> dict[str, int]:
    """Return each layer's place in the model; names that are no rows (`model.layers`) have their first layer's."""
    order: dict[str, int] = {}
    for row in sorted(analysis.layers, key=lambda row: row.order):
        parts = row.layer.split(".")
        for end in range(1, len(parts) + 1):
            order.setdefault(".".join(parts[:end]), row.order)
    return order


def moment_in_words(use: MemoryUse) -> str:
    """Return when the peak was: `"in backward of step 3"`; `""` where that is not known."""
    return _in_words(use.timeline.phase_at(use.peak.time_ns), use.peak.step)


def _in_words(phase: str | None, step: int | None) -> str:
    where = " of ".join(filter(None, (phase, None if step is None else f"step {step}")))
    return f"in {where}" if where else ""


def why_no_memory_use(analysis: Analysis) -> str:
    """Return why it is not known who holds memory, as a clause."""
    if analysis.memory and not analysis.calls:
        return _reason(analysis) or "a result that is read from its file holds no allocations; the trace does"
    return _reason(analysis) or "the trace holds no allocation events (profile_memory=True records them)"


def why_no_memory(analysis: Analysis) -> str:
    """Return why no layer's memory is known, as a clause."""
    return _reason(analysis) or "the trace holds no allocation events inside layers (profile_memory=True records them)"


def _reason(analysis: Analysis) -> str:
    """That of the first warning that gives one."""
    split = (warning.partition(", because ") for warning in analysis.warnings)
    return next((reason.rstrip(". ") for what, because, reason in split if because and "memory" in what.lower()), "")


# --------------------------------------------------------------------------------------------------
# Memory as InternLM's memory.log lays it out: a summary for each moment, the layout by layer for the peak.

# What InternLM calls the root of each of its categories.
_ROOTS: Mapping[MemoryCategory, str] = {
    "params": "param_mem",
    "grads": "grad_mem",
    "os_params": "os_params_mem",
    "os_state": "os_state_mem",
    "activation": "activation_base",
}


def memory_log(analysis: Analysis) -> str:
    """Return a state for each moment in order of time; the peak comes last, with its layout.

    Lines that begin with `#` are ours, all others are as InternLM's SimpleMemoryProfiler writes them,
    with three categories more. The categories of a state add up to its total, and a layer's total
    is its own and those of the layers right below it: in bytes; what is written is rounded.

    Raises:
        ValueError: the analysis knows nothing of who holds memory.
    """
    use = analysis.memory_use
    if use is None:
        raise ValueError("memory_log needs an analysis with memory_use; this one has none.")
    return "\n".join([*_states(analysis, use), *_layout(analysis, use), ""])


def _states(analysis: Analysis, use: MemoryUse) -> Iterator[str]:
    where = ", ".join(part for part in (clean(machine(analysis)), rank_in_words(analysis)) if part)
    yield f"# Memory of {clean(use.device)} ({where}). MB is 2^20 bytes."
    yield "# time: seconds since the recording began."
    yield "# The last state is the peak, the highest allocated; the layout is what was held then."
    yield from (f"# {clean(note)}" for note in use.notes)
    moments = [*use.moments, *([use.reserved_peak] if use.reserved_peak is not None else [])]
    for moment in (*sorted(moments, key=lambda moment: moment.time_ns), use.peak):
        title = clean(moment.label) + ("" if moment.step is None else f", step {moment.step}")
        if moment is use.peak:
            title = " ".join(filter(None, ("highest allocated", moment_in_words(use))))
        reserved = "" if moment.reserved_bytes is None else f", reserved {_mb(moment.reserved_bytes)}"
        yield f"\n# {title}{reserved}"
        yield "Memory State:"
        yield f"time: {(moment.time_ns - use.begin_ns) / 1e9}"
        yield "---summary---"
        yield f"total_memory: {_mb(moment.total_bytes)}"
        yield ", ".join(f"{name}_memory: {_mb(moment.categories.get(name, 0))}" for name in CATEGORIES)


def _layout(analysis: Analysis, use: MemoryUse) -> Iterator[str]:
    """InternLM's five parts always, ours where they hold anything."""
    order = layer_order(analysis)
    yield "---Layout---"
    for category in CATEGORIES:
        tree = memory_tree(use.peak_owners, (category,), order)
        if not tree[0].total_bytes and category not in _ROOTS:
            continue
        root = _ROOTS.get(category, category)
        yield f"{root if category == 'activation' else category}_layout:"
        for one in tree:
            name = clean(".".join((root, *one.path)), unicode=True)
            yield f"layer: {name}, layer_mem: {_mb(one.own_bytes)}, total_mem: {_mb(one.total_bytes)}"


def _mb(size_bytes: int) -> str:
    return f"{_mib(size_bytes)} MB"


# --- Who holds memory, in rows: what like layers hold for the like reason is one row ---


@dataclass
class OwnerGroup:
    """Owners that differ by one number in their layer's name."""

    category: MemoryCategory
    pattern: str
    op: str
    phase: Phase | None
    numbers: set[int] = field(default_factory=set)
    size_bytes: int = 0
    count: int = 0

    @property
    def place(self) -> str:
        """`"model.layers.{0..11}.mlp"`; `""` for what has no layer."""
        return fill_numbers(self.pattern, self.numbers)

    @property
    def text(self) -> str:
        """`"aten::mul in model.layers.{0..11}.mlp"`, or a tensor's name."""
        if self.place:
            return f"{self.op} in {self.place}" if self.op else self.place
        return f"{self.op} {OUTSIDE if self.phase == 'other' else f'({self.phase})'}" if self.phase else self.op


def owner_groups(owners: Iterable[Owner]) -> list[OwnerGroup]:
    """Group like owners, the largest first; groups add up to what `owners` hold. A tensor with a name needs no op."""
    groups: dict[tuple[MemoryCategory, str, str, Phase | None], OwnerGroup] = {}
    for owner in owners:
        named = is_named(owner)
        pattern, number = split_number((owner.name if named else owner.layer).replace(OPEN, " "))
        op = "" if named else owner.op or NO_OP
        phase = None if named else owner.phase
        group = groups.setdefault((owner.category, pattern, op, phase), OwnerGroup(owner.category, pattern, op, phase))
        if number is not None:
            group.numbers.add(number)
        group.size_bytes += owner.size_bytes
        group.count += owner.count
    found = [group for group in groups.values() if group.size_bytes]
    return sorted(found, key=lambda group: (-group.size_bytes, group.category, group.pattern))


# --- Memory by category as text ---

_MOST_OWNERS = 25
_LONGEST_PLACE = 70
_LEAST_SHARE = 0.005  # of the peak: a category that holds less is not named on one line


class _Peak(msgspec.Struct):
    allocated_bytes: float
    step: int | None = None
    phase: str | None = None


class _Memory(msgspec.Struct):
    """What the lines below need of `Analysis.memory`."""

    peak: _Peak
    categories: dict[str, float]  # at the peak
    leaks: list[Leak] | None = []


def memory_lines(memory: Mapping[str, Any], width: int) -> list[str]:
    """Return the peak and the largest leak of `Analysis.memory`, a line of at most `width` columns each.

    `"memory: peak 312.4 MiB in backward of step 3: activation 61 %, params 20 %, ..."`: categories that do not fit are
    left out, the smallest first. No lines where it is not known who held the memory.
    """
    try:
        known = msgspec.convert(memory, _Memory)
    except msgspec.ValidationError:  # nothing was recorded, or somebody else wrote it
        return []
    peak, leaks = known.peak, known.leaks or []
    whole = peak.allocated_bytes
    line = f"memory: peak {whole / MIB:.1f} MiB {_in_words(peak.phase, peak.step)}".rstrip()
    between = ": "
    for name, size in sorted(known.categories.items(), key=lambda item: -item[1]):
        part = f"{between}{clean(category_name(name))} {100 * size / max(1, whole):.0f} %"
        if size <= _LEAST_SHARE * whole or cells(line + part) > width:
            break
        line, between = line + part, ", "
    lines = [shorten(line, width)]
    for leak in leaks[:1]:
        before = f"warning: leak of {leak.bytes_per_step / MIB:.3f} MiB per step ({leak.steps} steps seen): "
        after = f" (and {len(leaks) - 1} more in the log)" if len(leaks) > 1 else ""
        who = clean(f"{leak.op} in {leak.layer}" if leak.layer else leak.op)
        lines.append(shorten(before + shorten(who, max(0, width - cells(before) - cells(after))) + after, width))
    return lines


def memory_sections(analysis: Analysis) -> list[tuple[str, str]]:
    """Return titles and texts of what is known of the device's memory: all of it, or what `result.json` holds."""
    use, found = analysis.memory_use, analysis.memory
    if use is not None:
        return [
            (f"Memory of {clean(use.device)} at the peak, by category: MiB", _peak_table(use)),
            ("Who holds it at the peak: MiB", _owner_table(use)),
            ("Memory by category over time: MiB", _moment_table(use)),
            ("Memory from step to step", "\n".join(_trend(use))),
            ("What would lower the peak", "\n".join(map(_change_text, use.changes))),
        ]
    sizes: dict[str, Any] = {f"{name} at the end": found.get(f"{name}_bytes") for name in ("allocated", "reserved")}
    peak: Mapping[str, Any] = found.get("peak") or {}
    sizes |= {f"highest {name}": peak.get(f"{name}_bytes") for name in ("allocated", "reserved")}
    sizes |= {f"of it {clean(name)}": size for name, size in (found.get("categories") or {}).items()}
    lines = [f"{name}: {mebibytes(size)} MiB" for name, size in sizes.items() if size is not None]
    if not found.get("categories"):
        lines.append(f"by category: not available, because {clean(why_no_memory_use(analysis))}")
    return [("Memory: MiB", "\n".join(lines))]


def _peak_table(use: MemoryUse) -> str:
    peak = use.peak
    sizes = {category_name(name): size for name in CATEGORIES if (size := peak.categories.get(name))}
    sizes["TOTAL"] = peak.total_bytes
    rows = [[name, _mib(size), percent(size, peak.total_bytes)] for name, size in sizes.items()]
    lines = [f"highest allocated {moment_in_words(use)}".rstrip(), "", grid(("category", "MiB", "share %"), rows), ""]
    for moment in (peak, use.reserved_peak):
        if moment is not None and moment.reserved_bytes:
            spare = f"{_mib(moment.reserved_bytes - moment.total_bytes)} not allocated (fragments and cache)"
            lines.append(f"reserved at the {clean(moment.label)}: {_mib(moment.reserved_bytes)} MiB, of it {spare}")
    return "\n".join(lines).rstrip()


def _owner_table(use: MemoryUse) -> str:
    """Like layers in one row; the rest is counted, so that the rows add up."""

    def row(groups: Sequence[OwnerGroup], *names: str) -> list[str]:
        size = sum(group.size_bytes for group in groups)
        count = sum(group.count for group in groups)
        return [*names, _mib(size), percent(size, use.peak.total_bytes), str(count)]

    groups = owner_groups(use.peak_owners)
    rows = []
    for one in groups[:_MOST_OWNERS]:
        place, op = shorten(clean(one.place or "-"), _LONGEST_PLACE), clean(one.op or "-")
        rows.append(row([one], category_name(one.category), place, one.phase or "-", op))
    if rest := groups[_MOST_OWNERS:]:
        rows.append(row(rest, f"({len(rest)} more)", "", "", ""))
    titles = ("category", "layer or tensor", "phase", "op", "MiB", "share %", "allocations")
    return grid(titles, rows, left_columns=4)


def _moment_table(use: MemoryUse) -> str:
    moments = sorted((*use.moments, use.peak), key=lambda moment: moment.time_ns)
    names = [name for name in CATEGORIES if any(moment.categories.get(name) for moment in moments)]
    rows = [
        [
            clean(moment.label),
            "-" if moment.step is None else str(moment.step),
            f"{(moment.time_ns - use.begin_ns) / 1e6:.3f}",
            *(_mib(moment.categories.get(name, 0)) for name in names),
            _mib(moment.total_bytes),
            "" if moment.reserved_bytes is None else _mib(moment.reserved_bytes),
        ]
        for moment in moments
    ]
    return grid(("moment", "step", "at ms", *map(category_name, names), "TOTAL", "reserved"), rows)


def _trend(use: MemoryUse) -> Iterator[str]:
    if use.slope is not None:
        slope, error = use.slope, use.slope.error_bytes_per_step
        spread = "" if error is None else f" +- {error / MIB:.3f} (95 %)"
        doubt = " (two steps tell no uncertainty)" if error is None else ""
        growth = f"{slope.bytes_per_step / MIB:+.3f}{spread} MiB per step{doubt}"
        yield f"allocated at the ends of {slope.steps} steps: {growth}"
    for leak in use.leaks or ():
        where = f" in {clean(leak.layer)}" if leak.layer else ""
        yield (
            f"leak: {clean(leak.op)}{where} ({leak.phase}, {category_name(leak.category)}) keeps "
            f"{leak.bytes_per_step / MIB:.3f} MiB more each step (allocations: {leak.count_per_step:.3g} a step; seen "
            f"over {leak.steps} steps)"
        )


def _change_text(change: Change) -> str:
    costs = f", for {change.costs_ns / 1e6:.3f} ms more a step" if change.costs_ns else ""
    return f"{clean(change.text)}: {_mib(change.saves_bytes)} MiB less{costs}"


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / MIB:.2f}"


# --- Memory at the exit of each layer as text: one value a line, easy to read back ---


def average_slope_mib(bars: Sequence[LayerBar]) -> float | None:
    """Return the mean increase of allocated memory from entry to exit of a layer, in MiB: over blocks, or all layers.

    None where no layer's memory is known.
    """
    blocks = [bar for bar in bars if bar.block] or bars
    steps = [bar.exit_mib - bar.entry_mib for bar in blocks if bar.exit_mib is not None and bar.entry_mib is not None]
    return sum(steps) / len(steps) if steps else None


def memory_usage_text(analysis: Analysis) -> str:
    """Return the device, `average_slope` (MiB per layer), then allocated and reserved at each layer's exit.

    One value a line in MiB, the layer's name behind it; means over the calls of the timed trace.
    """
    bars = layer_bars(analysis)
    slope = average_slope_mib(bars)
    rank = rank_in_words(analysis)
    lines = [f"device: {clean(machine(analysis))}" + (f" ({rank})" if rank else "")]
    if slope is None:
        return "\n".join([*lines, f"average_slope: not available, because {clean(why_no_memory(analysis))}", ""])
    over = "block" if any(bar.block for bar in bars) else "layer"
    lines.append(f"average_slope: {slope:.3f} MiB per {over} (mean increase of allocated memory from entry to exit)")
    if analysis.time_basis == "cpu":
        lines.append(
            "note: on a CPU, of what was there before only what model and optimizers held counts: use the differences"
        )
    lines += _values(f"allocated (MiB, at exit, mean over the calls of {steps_in_words(analysis)})", bars, "exit_mib")
    lines += _values("reserved (MiB, at exit)", bars, "reserved_mib")
    return "\n".join([*lines, ""])


def _values(title: str, bars: Sequence[LayerBar], name: str) -> list[str]:
    values = [(getattr(bar, name), bar.layer) for bar in bars]
    known = [f"{value:.3f}  {clean(layer)}" for value, layer in values if value is not None]
    return ["", f"{title}:", *known] if known else ["", f"{title}: not available on this device"]
