"""The rows of a comparison, in nanoseconds and bytes. `a` is what was before, `b` what is now."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from profiler_wrapper.place.names import Phase
from profiler_wrapper.reports.result_json import NS_PER_US, to_plain
from profiler_wrapper.tables.model import LayerRow

SAME = 0.01  # relative: FLOPs and bytes that are nearer are as good as equal
LEAST_BYTES = 64 << 10  # of memory: a smaller difference is none

Decision = Literal["slower", "faster", "no difference", "not certain", "not judged", "only in a", "only in b"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRow:
    """One layer in one phase, on both sides or on one. `change`: relative, of the time of a step: 0.1 is 10 % slower.

    `decision` is about what goes beyond the change that all layers have in common. On a device, where that is beyond
    noise itself, it is about the whole change; on a CPU that is as likely other load.
    """

    layer: str  # as `b` names it, else as `a` does
    phase: Phase
    a: LayerRow | None
    b: LayerRow | None
    backends_a: tuple[str, ...] = ()  # of the attention in this very layer, the one with most time first
    backends_b: tuple[str, ...] = ()
    change: float | None = None
    error: float | None = None  # its standard error; None where noise is not known
    decision: Decision = "not judged"

    @property
    def row(self) -> LayerRow:
        """Return that of `b`, else that of `a`."""
        row = self.b if self.b is not None else self.a
        assert row is not None
        return row

    def to_dict(self, steps_a: int, steps_b: int) -> dict[str, Any]:
        """Return plain data."""
        return {
            "layer": self.layer,
            **{name: getattr(self.row, name) for name in ("class_name", "kind", "block", "parent", "depth", "order")},
            "phase": self.phase,
            "a": None if self.a is None else _side_to_dict(self.a, steps_a, self.backends_a),
            "b": None if self.b is None else _side_to_dict(self.b, steps_b, self.backends_b),
            **{name: getattr(self, name) for name in ("change", "error", "decision")},
        }


def _side_to_dict(row: LayerRow, steps: int, backends: tuple[str, ...]) -> dict[str, Any]:
    """Return one layer in one phase on one side, with times and counts per step beside the sums."""
    return {
        "layer": row.layer,
        "time_us": row.time_ns / NS_PER_US,
        "self_time_us": row.self_time_ns / NS_PER_US,
        "time_per_step_us": row.time_ns / steps / NS_PER_US,
        "calls_per_step": None if row.calls is None else row.calls / steps,
        "self_events_per_step": None if row.self_events is None else row.self_events / steps,
        "flops_per_step": row.flops_per_step,
        "self_flops_per_step": row.self_flops_per_step,
        "retained_bytes": row.retained_bytes,
        "peak_bytes": row.peak_bytes,
        "backends": list(backends),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedTotal:
    """Something of a whole step, on both sides; None where it is not known. Times are nanoseconds.

    Times are means over the steps, and `change` is `b / a - 1`.
    """

    name: str
    unit: Literal["ns", "bytes", "flops", "count", "share"]
    a: float | None
    b: float | None
    change: float | None = None
    error: float | None = None  # standard error of `change`
    decision: Decision = "not judged"
    reason: str = ""  # the rule by which it is no difference, or not certain

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, times in microseconds."""
        in_us = self.unit == "ns"
        a, b = (value / NS_PER_US if in_us and value is not None else value for value in (self.a, self.b))
        return to_plain(self) | {"unit": "us" if in_us else self.unit, "a": a, "b": b}


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedClass:
    """One class of events in one phase. Sums over the timed trace, 0 where there is none."""

    class_name: str
    phase: Phase
    time_a_ns: int
    time_b_ns: int
    count_a: int
    count_b: int
    flops_per_step_a: int | None
    flops_per_step_b: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedReason:
    """Time without a layer, for one reason."""

    reason: str
    time_a_ns: int
    time_b_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Something that makes two results hard to compare."""

    what: str  # "device", "torch" ...
    a: str
    b: str
    of_time_only: bool  # what does not depend on the machine can still be compared


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedLayer:
    """The deepest layer that explains a change."""

    layer: str  # may stand for sibling layers: `model.layers.{0..23}.mlp`
    layers: tuple[str, ...]
    phase: Phase | None  # None: no phase alone
    change: float | None  # relative, of its self time; None: only one side has it
    error: float | None
    change_ns: float  # per step, without `Comparison.common`
    share: float | None  # of the change of the whole step; None where that is no difference


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkChange:
    """Own work of a layer, of all its phases, that both sides do otherwise: exact. Per step; None: not known."""

    layer: str  # may stand for sibling layers; "" goes by its phase
    layers: tuple[str, ...]
    phase: Phase | None
    flops_a: int | None
    flops_b: int | None
    events_a: float | None  # device events, on a CPU ops
    events_b: float | None
    calls_a: float | None
    calls_b: float | None
    retained_a: float | None  # bytes kept for backward: mean over calls
    retained_b: float | None
    time_a_ns: float = 0.0  # self time in `a`, which has noise
    time_b_ns: float = 0.0  # and in `b`

    def delta(self, what: Literal["flops", "events", "calls", "retained"]) -> float:
        """Return by how much `b` does more; 0 where a side does not know."""
        a, b = getattr(self, f"{what}_a"), getattr(self, f"{what}_b")
        return 0 if a is None or b is None else b - a
