"""Memory as InternLM's memory.log lays it out: a summary for each moment, the layout by layer for the peak."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from profiler_wrapper.analysis.memory_model import CATEGORIES, MemoryCategory, MemoryMoment, MemoryUse
from profiler_wrapper.analysis.model import Analysis
from profiler_wrapper.reports.describe import machine, rank_in_words
from profiler_wrapper.reports.memory_tree import category_tree, layer_order, moment_in_words, walk
from profiler_wrapper.reports.text import clean
from profiler_wrapper.units import MIB

# What InternLM calls the part of each category, and its root there; ours where it has no such category.
_LAYOUTS: Mapping[MemoryCategory, tuple[str, str]] = {
    "params": ("params_layout", "param_mem"),
    "grads": ("grads_layout", "grad_mem"),
    "os_params": ("os_params_layout", "os_params_mem"),
    "os_state": ("os_state_layout", "os_state_mem"),
    "activation": ("activation_base_layout", "activation_base"),
    "communication": ("communication_layout", "communication"),
    "workspace": ("workspace_layout", "workspace"),
    "other": ("other_layout", "other"),
}


def memory_log(analysis: Analysis) -> str:
    """A state for each moment in order of time; the peak comes last, with its layout.

    Lines that begin with `#` are ours, all others are as InternLM's SimpleMemoryProfiler writes them,
    with three categories more. The categories of a state add up to its total, and a layer's total
    is its own and those of the layers right below it: in bytes; what is written is rounded.

    Raises:
        ValueError: the analysis knows nothing of who holds memory.
    """
    use = analysis.memory_use
    if use is None:
        raise ValueError("memory_log needs an analysis with memory_use; this one has none.")
    return "\n".join([*_head(analysis, use), "", *_states(use), *_layout(analysis, use), ""])


def _head(analysis: Analysis, use: MemoryUse) -> Iterator[str]:
    where = ", ".join(part for part in (clean(machine(analysis)), rank_in_words(analysis)) if part)
    yield f"# Memory of {clean(use.device)} ({where}). MB is 2^20 bytes."
    yield "# time: seconds since the first allocation that was recorded."
    yield "# The last state is the peak, the highest allocated; the layout is what was held then."
    yield from (f"# {clean(note)}" for note in use.notes)


def _states(use: MemoryUse) -> Iterator[str]:
    begin_ns = int(use.timeline.time_ns[0]) if len(use.timeline.time_ns) else use.peak.time_ns
    moments = [*use.moments, *([use.reserved_peak] if use.reserved_peak is not None else [])]
    for moment in sorted(moments, key=lambda moment: moment.time_ns):
        yield from _state(moment, begin_ns, _title(moment))
        yield ""
    yield from _state(use.peak, begin_ns, " ".join(filter(None, ("highest allocated", moment_in_words(use)))))


def _title(moment: MemoryMoment) -> str:
    return clean(moment.label) + ("" if moment.step is None else f", step {moment.step}")


def _state(moment: MemoryMoment, begin_ns: int, title: str) -> Iterator[str]:
    reserved = "" if moment.reserved_bytes is None else f", reserved {_mb(moment.reserved_bytes)}"
    yield f"# {title}{reserved}"
    yield "Memory State:"
    yield f"time: {(moment.time_ns - begin_ns) / 1e9}"
    yield "---summary---"
    yield f"total_memory: {_mb(moment.total_bytes)}"
    yield ", ".join(f"{name}_memory: {_mb(moment.categories.get(name, 0))}" for name in CATEGORIES)


def _layout(analysis: Analysis, use: MemoryUse) -> Iterator[str]:
    """InternLM's five parts always, ours where they hold anything."""
    order = layer_order(analysis)
    yield "---Layout---"
    for category, (title, root_name) in _LAYOUTS.items():
        root = category_tree(use.peak_owners, category, root_name)
        if not root.total_bytes and category in ("communication", "workspace", "other"):
            continue
        yield f"{title}:"
        for placed in walk(root, order):
            name = clean(".".join((root_name, *placed.path)), unicode=True)
            own, total = placed.node.own_bytes, placed.node.total_bytes
            yield f"layer: {name}, layer_mem: {_mb(own)}, total_mem: {_mb(total)}"


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / MIB:.2f} MB"
