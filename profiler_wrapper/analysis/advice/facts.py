"""What rules of advice look at."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from profiler_wrapper.analysis.advice.device_gaps import Gaps, device_gaps
from profiler_wrapper.analysis.advice.wording import duration
from profiler_wrapper.analysis.intervals import union
from profiler_wrapper.analysis.model import LAUNCHED_BEFORE, Analysis, LayerRow
from profiler_wrapper.analysis.step_windows import StepWindows, step_windows
from profiler_wrapper.analysis.view_model import Finding
from profiler_wrapper.recording.recording import Bool, Int64

if TYPE_CHECKING:
    from profiler_wrapper.analysis.attributed import Attributed

NS_PER_US = 1000
_UNLIKE = 1.5  # times the mean step: as far as that one length speaks for all


@dataclass(frozen=True, kw_only=True)
class Facts:
    """One analysed recording, with its summary still empty."""

    analysis: Analysis
    found: Attributed

    @property
    def steps(self) -> int:
        """How many timed steps there are, at least 1: what sums over the trace are divided by."""
        return max(1, sum(row.step is not None for row in self.analysis.steps))

    @property
    def has_steps(self) -> bool:
        """Whether the trace tells where a step begins and ends. Without it, "a step" is the whole trace."""
        return any(row.step is not None for row in self.analysis.steps)

    @property
    def on_device(self) -> bool:
        """Whether times are of a device; else they are CPU time of ops."""
        return self.analysis.time_basis == "device"

    @property
    def time_name(self) -> str:
        """What times of layers are: "device time" or "CPU time"."""
        return "device time" if self.on_device else "CPU time"

    @cached_property
    def windows(self) -> StepWindows:
        """Wall time of each step, till both the CPU and the devices are done with it; a trace without steps is one."""
        return step_windows(self.found)

    @cached_property
    def step_ns(self) -> int:
        """Wall time of a step: the mean; of the whole trace where it has no steps. Over 0."""
        number = len(self.windows.number)
        return max(1, round(self.windows.length_ns / number) if number else self.analysis.time.span_ns)

    @cached_property
    def total_ns(self) -> int:
        """Device (or CPU) time of the whole trace, but for what was launched before it, which is of no step."""
        before = sum(row.time_ns for row in self.analysis.unattributed if row.reason == LAUNCHED_BEFORE)
        return self.analysis.time.total_ns - before

    @cached_property
    def work_ns(self) -> int:
        """Device (or CPU) time of a step, over all streams (or threads). Over 0."""
        return max(1, self.total_ns // self.steps)

    @property
    def peak_bytes(self) -> int | None:
        """The highest allocated; None where memory was not recorded."""
        peak = self.analysis.memory.get("peak")
        told = peak.get("allocated_bytes") if isinstance(peak, dict) else None
        return int(told) if told else None

    @property
    def peak_reserved_bytes(self) -> int | None:
        """The most that the allocator took from the device; where it does not tell, the highest allocated."""
        peak = self.analysis.memory.get("peak")
        told = peak.get("reserved_bytes") if isinstance(peak, dict) else None
        return int(told) if told else self.peak_bytes

    @property
    def device_memory_bytes(self) -> int | None:
        """What the device has; on a CPU the peak and what was free at the end. None where nobody tells, as a trace."""
        overview, told = self.analysis.overview, self.analysis.run.get("device_memory_bytes")
        free = self.analysis.run.get("free_memory_bytes")
        if not self.on_device and isinstance(free, int) and self.peak_bytes is not None:
            return self.peak_bytes + free
        if overview is not None and overview.device_memory_bytes:
            return overview.device_memory_bytes
        return told if isinstance(told, int) and told > 0 else None

    @cached_property
    def gaps(self) -> Gaps | None:
        """Within the steps, when the busiest device runs nothing; None without device events, or where not known.

        While a graph is captured nothing runs by nature.
        """
        overview = self.analysis.overview
        unknown = self.found.captured_kernels or (overview is not None and overview.gaps_ns is None)
        return None if unknown else device_gaps(self)

    @cached_property
    def idle_ns(self) -> float | None:
        """Per step, how long the busiest device runs nothing; None without device events."""
        return None if self.gaps is None else self.wall_per_step_ns(int(self.gaps.length_ns.sum()))

    @cached_property
    def launched_in_steps(self) -> Bool:
        """Per charge whether a step launched it: what was launched before the trace may run in one, but is of none."""
        charges, steps = self.found.charges, self.found.steps
        launched: Bool = charges.cpu_span >= 0
        return launched & (steps.place_of(charges.launch_ns) >= 0) if len(steps) else launched

    def within_steps_ns(self, start_ns: Int64, end_ns: Int64) -> float:
        """Per step, how much of it some of these intervals cover: an instant counts once."""
        covered = union(start_ns, end_ns)
        return self.wall_per_step_ns(int(covered.overlap(self.windows.start_ns, self.windows.end_ns).sum()))

    @property
    def step_text(self) -> str:
        """`"a step of 41.3 ms"`; without steps `"a trace of 41.3 ms"`."""
        return f"a {'step' if self.has_steps else 'trace'} of {duration(self.step_ns)}"

    @property
    def generates(self) -> bool:
        """Whether tokens were generated: steps of prefill and decode have no mean."""
        return self.has_steps and any(row.phase in ("prefill", "decode") for row in self.analysis.layers)

    @property
    def steps_text(self) -> str:
        """As `step_text`, and where steps differ much, how much: `"a step of 12.1 ms (7.3 ms to 44.1 ms)"`.

        Of generation, whose steps have no mean, `"12 steps of 7.3 ms to 44.1 ms"`.
        """
        lengths = self.windows.end_ns - self.windows.start_ns
        if not self.has_steps or len(lengths) < 2 or lengths.max() <= _UNLIKE * self.step_ns:
            return self.step_text
        least_to_most = f"{duration(float(lengths.min()))} to {duration(float(lengths.max()))}"
        return f"{len(lengths)} steps of {least_to_most}" if self.generates else f"{self.step_text} ({least_to_most})"

    def wall_per_step_ns(self, time_ns: int) -> float:
        """Wall time within the steps that are known whole, per step."""
        return time_ns / max(1, len(self.windows.number))

    def per_step_ns(self, time_ns: int) -> float:
        """A sum over the trace, per step."""
        return time_ns / self.steps

    def share_of_step(self, time_ns: float) -> float:
        """Of the wall time of a step; at most 1."""
        return min(1.0, time_ns / self.step_ns)

    def share_of_work(self, time_ns: float) -> float:
        """Of the device (or CPU) time of a step; at most 1."""
        return min(1.0, time_ns / self.work_ns)

    def saves_us(self, time_ns: float) -> float:
        """An upper bound as a finding has it: no more than a step takes."""
        return min(time_ns, self.step_ns) / NS_PER_US

    @cached_property
    def rows_of(self) -> dict[str, tuple[LayerRow, ...]]:
        """The rows of each layer, in model order; what has no layer is "" ."""
        rows: dict[str, list[LayerRow]] = {}
        for row in self.analysis.layers:
            rows.setdefault(row.layer, []).append(row)
        return {layer: tuple(members) for layer, members in rows.items()}

    @cached_property
    def blocks(self) -> tuple[str, ...]:
        """Names of the blocks that have time or calls, in model order."""
        return tuple(layer for layer, rows in self.rows_of.items() if layer and rows[0].kind == "block")


Rule = Callable[[Facts], Iterable[Finding]]
