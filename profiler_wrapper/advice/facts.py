"""What rules of advice look at."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np

from profiler_wrapper.errors import first_few
from profiler_wrapper.place.classes import CLASSES, DeviceProperties, busiest_device, busiest_device_properties
from profiler_wrapper.place.intervals import Union, union
from profiler_wrapper.place.names import LAUNCHED_BEFORE, Phase
from profiler_wrapper.place.placed import Placed
from profiler_wrapper.place.roles import Role, role_of
from profiler_wrapper.place.step_windows import StepWindows, step_windows
from profiler_wrapper.tables.model import Analysis, Finding, LayerRow
from profiler_wrapper.tables.statistics import OPEN, fill_numbers
from profiler_wrapper.tables.timeline_gaps import WAITING_CALLS, IdleGaps, idle_gaps
from profiler_wrapper.trace.arrays import at, grouped, in_order
from profiler_wrapper.trace.nesting import self_time
from profiler_wrapper.trace.recording import Bool, Category, Int64
from profiler_wrapper.units import TIME_NAMES

# --- Within the steps, the gaps in which a device runs nothing: what the CPU was doing that it waited for ---

LONGEST_LAUNCH_NS = 1_000_000  # on the way to one launch; what is longer is work on the CPU, or a first call


class Gaps(NamedTuple):
    """The gaps of one device within the steps, in order of time, and their causes.

    A gap has a cause only where the event that ends it was launched within the gap: else the device waited for
    something of its own. Launching is what is left of it, but for what is too long to be on the way to one launch.
    """

    idle: IdleGaps
    loading_ns: Int64  # of it: with the thread that launched its end fetching data
    waiting_ns: Int64  # of it: with that thread in a call that waits, or hands out memory
    launching_ns: Int64  # of it: all else, with that thread on its way to the launch, and till the event began


def _gaps(facts: Facts, idle: IdleGaps) -> Gaps:
    """Find the causes of these gaps."""
    charges, recording, spans = facts.found.charges, facts.found.recording, facts.found.recording.spans
    cpu_span = at(charges.cpu_span, idle.ender, -1)
    lane = at(spans.lane, cpu_span, -1)
    launched = at(spans.start_ns, cpu_span, np.iinfo(np.int64).min)
    waiting_calls = (spans.category == Category.RUNTIME) & recording.named(WAITING_CALLS.match)
    loading, waiting, launching = np.zeros((3, len(lane)), dtype=np.int64)
    for thread in np.unique(lane[lane >= 0]).tolist():
        mine, own = np.flatnonzero((lane == thread) & (launched > idle.start_ns)), spans.lane == thread
        begin, end = idle.start_ns[mine], idle.end_ns[mine]
        call = np.minimum(launched[mine], end)
        waiting[mine] = facts.union_of(own & waiting_calls).overlap(begin, call)
        loads_ns = facts.union_of(own & facts.loads_data).overlap(begin, call)
        loading[mine] = np.minimum(loads_ns, call - begin - waiting[mine])
        rest = end - begin - waiting[mine] - loading[mine]
        launching[mine] = np.where(rest <= LONGEST_LAUNCH_NS, rest, 0)
    return Gaps(idle, loading, waiting, launching)


Confidence = Literal["high", "medium", "low"]

# --- Many names as few: `model.layers.{0..31}.mlp` stands for all 32 of them, and for nothing else ---

_NUMBER = re.compile(r"(?:(?<=[._#])|^)(0|[1-9][0-9]{0,8})(?=\.|$)")


def fold_names(names: Iterable[str]) -> tuple[str, ...]:
    """Write names that differ only in their numbers as one, in order of their first.

    Exact: what a folded name stands for was among the names, each number with each.
    """
    # Each as texts and, between them, sets of numbers: from the last place on, those that differ there alone are one.
    split: list[list[Any]] = []
    for name in dict.fromkeys(names):
        parts = _NUMBER.split(name)
        split.append([frozenset([int(part)]) if i % 2 else part for i, part in enumerate(parts)])
    for place in range(max(map(len, split), default=0) // 2 * 2 - 1, 0, -2):
        together: dict[object, list[Any]] = {}
        for parts in split:
            known = together.setdefault((*parts[:place], None, *parts[place + 1 :], place < len(parts)), parts)
            for numbers in parts[place : place + 1]:
                known[place] |= numbers
        split = list(together.values())
    texts = ([part if isinstance(part, str) else fill_numbers(OPEN, part) for part in parts] for parts in split)
    return tuple(map("".join, texts))


# --- Numbers and names as advice says them ---

_MOST_NAMES = 2


def duration(time_ns: float) -> str:
    """Write a time with three digits: `"1.23 s"`, `"41.3 ms"`, `"812 µs"`."""
    for unit, size in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if abs(time_ns) >= size * 0.9995:
            value = time_ns / size
            return f"{value:.{2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0}f} {unit}"
    return f"{time_ns:.0f} ns"


def share(part: float) -> str:
    """Write 0.62 as `"62 %"`; below one in ten with a decimal, and never 0 or 100 for what is not."""
    if 0 < part < 0.0005:
        return "under 0.1 %"
    if 0.995 <= part < 1:
        return "over 99 %"
    return f"{100 * part:.0f} %" if part >= 0.0995 or part == 0 else f"{100 * part:.1f} %"


def count(number: float, noun: str) -> str:
    """Write a number with its noun: `"1 call"`, `"32 calls"`, `"2.5 calls"`."""
    text = f"{number:.0f}" if number == round(number) or number >= 100 else f"{number:.1f}"
    return f"{text} {noun}" if text == "1" else f"{text} {noun}s"


def cut(text: str, longest: int, *, end: bool = False) -> str:
    """Cut a text to so many characters; of a path (`end`) its begin is cut."""
    if len(text) <= longest:
        return text
    return "..." + text[3 - longest :] if end else text[: longest - 3] + "..."


def where(layers: Iterable[str]) -> str:
    """Write layers in a few words: `model.layers.{0..31}.mlp`; "code outside of all layers" for ""."""
    return first_few([name or "code outside of all layers" for name in fold_names(layers)], _MOST_NAMES)


def rows_command(select: str, where: str = "") -> str:
    """Return the command that prints these rows of a run; of a table in `_COLUMNS` it prints those columns."""
    condition = f" --where {shlex.quote(where)}" if where else ""
    columns = _COLUMNS.get(select, select)
    return f"profiler-wrapper analyze {RUN} --format json --select {columns}{condition} --top 5"


NS_PER_US = 1000
RUN = "RUN"  # stands for the path of the run or trace in commands: a result may be moved
_COLUMNS = {
    "kernels": "kernels.name,kernels.count,kernels.time_us",
    "operators": "operators.op,operators.phase,operators.calls,operators.self_time_us,operators.layers",
}
PEAK = "the most memory that was allocated"  # what shares of the peak are shares of
_UNLIKE = 1.5  # times the mean step: as far as that one length speaks for all


@dataclass(frozen=True, kw_only=True)
class Facts:
    """One analysed recording, with its summary still empty."""

    analysis: Analysis
    found: Placed

    @property
    def steps(self) -> int:
        """Count the timed steps, at least 1: sums over the trace are divided by it."""
        return max(1, sum(row.step is not None for row in self.analysis.steps))

    @property
    def has_steps(self) -> bool:
        """Return whether the trace tells where a step begins and ends. Without it, "a step" is the whole trace."""
        return any(row.step is not None for row in self.analysis.steps)

    @property
    def on_device(self) -> bool:
        """Return whether times are of a device; else they are wall time of ops."""
        return self.analysis.time_basis == "device"

    @property
    def time_name(self) -> str:
        """Name what times of layers are: device time, or wall time of ops."""
        return TIME_NAMES[self.analysis.time_basis]

    @cached_property
    def windows(self) -> StepWindows:
        """Return each step's wall time, till both CPU and devices are done with it; a trace without steps is one."""
        return step_windows(self.found)

    @cached_property
    def step_ns(self) -> int:
        """Return the mean wall time of a step, over 0; of the whole trace where it has no steps."""
        number = len(self.windows.number)
        return max(1, round(self.windows.length_ns / number) if number else self.analysis.time.span_ns)

    @cached_property
    def work_ns(self) -> int:
        """Return device (or CPU) time of a step over all streams (or threads), over 0, without what came before it."""
        before = sum(row.time_ns for row in self.analysis.unattributed if row.reason == LAUNCHED_BEFORE)
        return max(1, (self.analysis.time.total_ns - before) // self.steps)

    @property
    def peak(self) -> Mapping[str, Any]:
        """Return `peak` of the memory; empty where it was not recorded."""
        return self.analysis.memory.get("peak") or {}

    @property
    def peak_bytes(self) -> int | None:
        """Return the highest allocated; None where memory was not recorded."""
        return self.peak.get("allocated_bytes") or None

    @property
    def peak_reserved_bytes(self) -> int | None:
        """Return the most that the allocator took from the device; else the highest allocated."""
        return self.peak.get("reserved_bytes") or self.peak_bytes

    @property
    def device_memory_bytes(self) -> int | None:
        """Return the memory of the device; of a CPU the peak and what was free at the end. None where not known."""
        if self.device is not None:
            return self.device.memory_bytes
        run, peak, free = self.analysis.run, self.peak_bytes, self.analysis.run.get("free_memory_bytes")
        if peak is not None and free is not None:
            return peak + free
        return run.get("device_memory_bytes") or None

    @cached_property
    def gaps(self) -> Gaps | None:
        """Find when the busiest device runs nothing within the steps; None without device events or where not known."""
        idle = idle_gaps(self.found, self.windows) if self.windows.number else None
        return None if idle is None else _gaps(self, idle.only(idle.device == busiest_device(self.found.recording)))

    @cached_property
    def idle_ns(self) -> float | None:
        """Return how long the busiest device runs nothing in a step; None without device events."""
        return None if self.gaps is None else self.wall_per_step_ns(self.gaps.idle.length_ns)

    @cached_property
    def launched_in_steps(self) -> Bool:
        """Mark the charges that a step launched; what was launched before the trace may run in one, but is of none."""
        charges, steps = self.found.charges, self.found.steps
        launched: Bool = charges.cpu_span >= 0
        return launched & (steps.place_of(charges.launch_ns) >= 0) if len(steps) else launched

    @cached_property
    def loads_data(self) -> Bool:
        """Mark the spans that are a DataLoader's annotation around one batch."""
        recording = self.found.recording
        is_annotation: Bool = recording.spans.category == Category.ANNOTATION
        return is_annotation & recording.named(lambda name: role_of(name) == Role.DATA_LOADING)

    def work_is(self, *names: str) -> Bool:
        """Mark the charges whose work is of one of these classes."""
        return np.isin(self.found.charges.work, [CLASSES.index(name) for name in names])

    def union_of(self, chosen: Bool) -> Union:
        """Return the intervals that these spans cover."""
        spans = self.found.recording.spans
        return union(spans.start_ns[chosen], spans.end_ns[chosen])

    def within_steps_ns(self, chosen: Bool) -> float:
        """Return how much of a step some of these spans cover: an instant counts once."""
        covered_ns = self.union_of(chosen).overlap(self.windows.start_ns, self.windows.end_ns)
        return self.wall_per_step_ns(covered_ns)

    @property
    def step_text(self) -> str:
        """Write `"a step of 41.3 ms"`; without steps `"a trace of 41.3 ms"`."""
        return f"a {'step' if self.has_steps else 'trace'} of {duration(self.step_ns)}"

    @property
    def steps_text(self) -> str:
        """Write `step_text`, with the range where steps differ much: `"a step of 12.1 ms (7.3 ms to 44.1 ms)"`."""
        lengths = self.windows.end_ns - self.windows.start_ns
        if not self.has_steps or lengths.max(initial=0) <= _UNLIKE * self.step_ns:
            return self.step_text
        return f"{self.step_text} ({duration(float(lengths.min()))} to {duration(float(lengths.max()))})"

    def wall_per_step_ns(self, time_ns: Int64 | int) -> float:
        """Divide wall time within the steps, or the sum of such times, by the number of steps known whole."""
        return int(np.sum(time_ns)) / max(1, len(self.windows.number))

    def per_step_ns(self, time_ns: Int64 | int) -> float:
        """Divide a time of the trace, or the sum of such times, by the number of steps."""
        return int(np.sum(time_ns)) / self.steps

    @property
    def slowed_by(self) -> str:
        """Name what made times of the CPU longer than they are; "" for nothing that is known."""
        stacks = "Python stacks" if len(self.found.recording.python) else ""
        return stacks or ("waits for a CPU core" if self.analysis.run.get("overloaded") else "")

    @property
    def wall_confidence(self) -> Confidence:
        """Return how sure a finding is that goes by times of the CPU; without steps their ends are not known."""
        return "low" if self.slowed_by else "high" if self.has_steps else "medium"

    def sure_of_times(self, confidence: Literal["high", "medium"]) -> Confidence:
        """Return `confidence`, or "low" where times of layers are CPU times and something slowed the CPU."""
        return "low" if self.slowed_by and not self.on_device else confidence

    @property
    def part_of_idle(self) -> str:
        """Write that a saving is part of the idle time, which `low_utilization` is about as a whole."""
        return "" if self.idle_ns is None else f"; part of the {duration(self.idle_ns)} that the device is idle"

    def share_of_step(self, time_ns: float) -> float:
        """Return a time as a share of the wall time of a step, at most 1."""
        return min(1.0, time_ns / self.step_ns)

    def share_of_work(self, time_ns: float) -> float:
        """Return a time as a share of the device (or CPU) time of a step, at most 1."""
        return min(1.0, time_ns / self.work_ns)

    def of_work(self, time_ns: float) -> tuple[float, str]:
        """Return `share_of_work` and what it is a share of: the work without what was launched before the trace."""
        name = "the device time that a step launched" if self.on_device else "the wall time of a step's ops"
        return self.share_of_work(time_ns), name

    def work_text(self, time_ns: float) -> str:
        """Write `"62 % of the device time that a step launched"`."""
        part, name = self.of_work(time_ns)
        return f"{share(part)} of {name}"

    def of_step(self, time_ns: float) -> tuple[float, str]:
        """Return `share_of_step`, and what it is a share of."""
        return self.share_of_step(time_ns), f"the wall time of {'a step' if self.has_steps else 'the trace'}"

    def finding(
        self,
        id: str,
        title: str,
        *evidence: str,
        fix: str,
        confidence: Confidence = "medium",
        layers: Iterable[str | None] = (),
        phase: Phase | None = None,
        share: tuple[float, str] | None = None,
        saves_ns: float | None = None,
        saves_bytes: int | None = None,
        source: str | None = None,
        rows: tuple[str] | tuple[str, str],
        details: Mapping[str, Any],
    ) -> Finding:
        """Make a finding of what a rule found.

        Args:
            rows: what `rows_command` is given to show what it is about.
            layers: in order; what is not one, and what comes again, is left out.
            details: the same as numbers; those called `_ns` are given as `_us`.
            saves_ns, saves_bytes: upper bounds, of a step and at the peak; of time no more than a step takes.
            share: how much it is about, and of what; where not given, what it saves of a step.
        """
        named = tuple(dict.fromkeys(filter(None, layers)))
        if share is None and saves_ns is not None:
            share = self.of_step(saves_ns)
        part, whole = share or (None, None)
        return Finding(
            id=id,
            title=title,
            layer=where(named) if named else None,
            phase=phase,
            share=part,
            share_of=whole,
            saves_at_most_us=None if saves_ns is None else min(saves_ns, self.step_ns) / NS_PER_US,
            saves_at_most_bytes=saves_bytes,
            evidence=evidence,
            confidence=confidence,
            fix=fix,
            source=source,
            layers=named,
            details=dict(map(_as_us, details, details.values())),
            next=rows_command(*rows),
        )

    @cached_property
    def rows_of(self) -> dict[str, list[LayerRow]]:
        """Return the rows of each layer, in model order; what has no layer is "" ."""
        return grouped((row.layer, row) for row in self.analysis.layers)

    @cached_property
    def blocks(self) -> tuple[str, ...]:
        """Return the names of the blocks that have time or calls, in model order."""
        return tuple(layer for layer, rows in self.rows_of.items() if layer and rows[0].kind == "block")

    @cached_property
    def device(self) -> DeviceProperties | None:
        """Return the device that a run was on, as far as trace and run tell; None for a CPU-only trace.

        It has a compute capability only where NVIDIA made it, and a name that may be "".
        """
        if not self.on_device:
            return None
        run, metadata = self.analysis.run, self.found.recording.metadata
        properties = busiest_device_properties(self.found.recording)
        name = str(run.get("device") or properties.name or "")
        is_amd = any(key.startswith("hip_") for key in metadata) or "hip" in run.get("versions", {}) or "AMD" in name
        stated = run.get("compute_capability")
        capability = (int(stated[0]), int(stated[1])) if stated and len(stated) == 2 else properties.compute_capability
        return replace(
            properties,
            name=name,
            compute_capability=None if is_amd else capability,
            memory_bytes=run.get("device_memory_bytes") or properties.memory_bytes or None,
        )

    def time_of_ns(self, chosen: Bool) -> float:
        """Return the device time (on a CPU-only trace, CPU time) of a step that these CPU events launched, or took."""
        charges = self.found.charges
        return self.per_step_ns(charges.time_ns[at(chosen, charges.cpu_span, False)])

    def own_cpu_ns(self) -> Int64:
        """Return per CPU event the wall time in which it is the innermost of its thread, marks and annotations too."""
        spans = self.found.recording.spans
        counts = spans.category <= Category.MODULE
        return self_time(self.found.nesting, spans.lane, spans.start_ns, spans.duration_ns, counts=counts)

    # The CPU issues work in order, and a device does it in order. So a step takes as long as the longest path through
    # it: CPU time up to some launch, then device time from there on. Without some of the work that path is still
    # there, and shorter by what of the work lay on it: CPU time before a launch and device time after it. The largest
    # such sum over all launches is one bound. The other: a device that still has all else to do cannot save more than
    # the device time of the work, and its idle time. Profiling makes ops slower on the CPU, which makes both larger,
    # never smaller.
    def saved_at_most_ns(self, vanishing: Bool, *, own_ns: Int64 | None = None) -> float:
        """Return the wall time of a step, at most, that the `vanishing` CPU events take, with all that they launch.

        Of each the time that is its own, without what lies inside; `own_ns`: that of every event, where it is less.
        """
        spans, charges = self.found.recording.spans, self.found.charges
        own_ns = self.own_cpu_ns() if own_ns is None else own_ns
        members = in_order(np.flatnonzero(vanishing & (own_ns > 0)), spans.start_ns)
        cpu_ns = float(own_ns[members].sum())
        if not self.on_device:
            return self.per_step_ns(int(cpu_ns))
        launched = in_order(np.flatnonzero(at(vanishing, charges.cpu_span, False)), charges.launch_ns)
        device_ns = float(charges.time_ns[launched].sum())
        by_path = max(cpu_ns, device_ns)
        if len(launched) and len(members):
            until = np.concatenate(([0], np.cumsum(own_ns[members])))
            before = until[np.searchsorted(spans.start_ns[members], charges.launch_ns[launched], side="right")]
            after = np.cumsum(charges.time_ns[launched][::-1])[::-1]
            by_path = max(by_path, float((before + after).max()))
        idle_ns = max(0.0, self.step_ns * self.steps - (self.analysis.time.busy_ns or 0))
        idle_ns = max(idle_ns, (self.idle_ns or 0.0) * self.steps)  # the device may be busy outside of the steps too
        return min(by_path, device_ns + idle_ns) / self.steps


def _as_us(key: str, value: Any) -> tuple[str, Any]:
    """Return a number and its name; nanoseconds become microseconds."""
    if not key.endswith("_ns"):
        return key, value
    return f"{key.removesuffix('_ns')}_us", None if value is None else value / NS_PER_US


Rule = Callable[[Facts], Iterable[Finding]]
