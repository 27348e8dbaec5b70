"""The columns of the layer table, an entry each: the printed table, the full one and the page are all made from these.

Rows hold their values by the keys of columns; the time in a phase stands by the phase's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from profiler_wrapper.place.classes import BACKENDS
from profiler_wrapper.place.names import FORWARD_PHASES, PHASES
from profiler_wrapper.reports.describe import step_count, work_scale
from profiler_wrapper.tables.model import Analysis, LayerRow, bound_of
from profiler_wrapper.tables.statistics import sum_if_all_known, sum_of_known

Values = Mapping[str, Any]  # None: not known, or there is none
Sum = Callable[[Iterable[Any]], Any]


def most(values: Iterable[Any]) -> Any:
    """Return the largest that is known; None where none is."""
    return max((value for value in values if value is not None), default=None)


@dataclass(frozen=True, kw_only=True)
class Column:
    """What a column holds, how it is summed, how it is written, and where it is shown.

    Attributes:
        key: of its value in a row; on the page, of the column.
        kind: how it is written: as "time" (ns), "bytes", "flops", "rate" (a second; of FLOPs in the printed table and
            on the page), "share" (0 to 1), "count", "number" or "text".
        field: of `LayerRow`; "": there is none, and `value` makes it from other columns. Its name says how it becomes
            the value of one step: `..._per_step...` is work of a step, `..._bytes` stays, all else is divided by steps.
        over_phases: makes one value of those of a layer's phases; None: it is of one phase, in the full table alone.
        over_layers: makes one value of those of several layers.
        forward: of a layer's phases, those of the forward count.
        value: from the other values of a row, and the time of the whole.
        zero: whether 0 is written.
        console, full, page: its title in the printed table, in the full one and on the page; "": it is not shown there.
        goes: where a printed table has no room, the column with the highest gives way first.
        spare: so too on the page; 0: it stays.
        sets: of the page, in which it is shown: main, time, work, memory.
        help: what it says, on the page; and of one without a field, for which the field speaks, in the reference.
        needs: of the page: the key without which it is not known, and `why`: which warning says why.
    """

    key: str
    kind: str
    field: str = ""
    over_phases: Sum | None = sum_of_known
    over_layers: Sum = sum_of_known
    forward: bool = False
    value: Callable[[Values, float], Any] | None = None
    zero: bool = True
    console: str = ""
    full: str = ""
    page: str = ""
    goes: int = 0
    spare: int = 0
    sets: str = ""
    help: str = ""
    needs: str = ""
    why: str = ""


def _time(key: str, field: str, **more: Any) -> Column:
    return Column(key=key, kind="time", field=field, **more)


def _work(key: str, kind: str, field: str, **more: Any) -> Column:
    """Make a column of work in a step, of which one unknown part makes all unknown."""
    return Column(key=key, kind=kind, field=field, over_phases=sum_if_all_known, over_layers=sum_if_all_known, **more)


def _of_phase(key: str, kind: str, field: str, **more: Any) -> Column:
    return Column(key=key, kind=kind, field=field, over_phases=None, **more)


def _border(key: str, field: str, **more: Any) -> Column:
    """Make a column of memory as a layer is entered or left: in the first forward phase that knows it."""
    return Column(key=key, kind="bytes", field=field, over_phases=_first, over_layers=most, forward=True, **more)


def _first(values: Iterable[Any]) -> Any:
    return next((value for value in values if value is not None), None)


def _ratio(above: str, below: str, factor: float = 1) -> Callable[[Values, float], float | None]:
    """Make a value of two others: their ratio; None where either is not known or 0."""
    return lambda row, _: factor * row[above] / row[below] if row[above] and row[below] else None


def _of_roof(row: Values, _: float) -> float | None:
    """Return the share of the time that was no communication, which has no roof here."""
    computing_ns = row["time"] - (row["communication"] or 0)
    return row["roof"] / computing_ns if row["roof"] and computing_ns > 0 else None


# In the order in which all views show them.
COLUMNS = (
    _of_phase("self", "time", "self_time_ns", full="self"),
    _time("time", "time_ns", console="total", full="time", page="Time", sets="main time work memory",
          help="Device time (wall time of ops without a device); kernels that overlap on two streams count twice"),
    Column(key="share", kind="share", value=lambda row, total: row["time"] / total if total > 0 else None,
           console="share", full="share %", page="Share", goes=7, sets="main time work",
           help="Of the total; a layer holds those below it, so these do not add up to 100 %"),
    Column(key="lost_launches", kind="count", field="lost_launches"),  # where there are some, the time is a lower bound
    _time("fused", "fused_ns", zero=False, full="fused"),
    _time("cpu", "cpu_time_ns", full="CPU", page="CPU", sets="time", help="Wall time of its ops"),
    _time("attention", "attention_ns", zero=False, console="attention", full="attention", page="Attention", goes=11,
          spare=2, sets="main time", help="Of it in attention kernels"),
    Column(key="backend", kind="text", page="Backend", spare=9, sets="main time",
           help=f"Of attention: {', '.join(BACKENDS)}"),
    _time("communication", "communication_ns", zero=False, full="communication"),
    _time("exposed", "exposed_communication_ns", zero=False, full="exposed", page="Exposed comm.", spare=4,
          sets="main time", help="Communication with no compute beside it"),
    _time("idle", "idle_ns", zero=False, full="idle", page="Idle", spare=11, sets="main time",
          help="The device had nothing to run while the CPU was here"),
    _work("flops", "flops", "flops_per_step", console="work", full="GFLOP", page="Work", goes=14, spare=1,
          sets="main work", help="FLOPs of matrix products, convolutions and attention; 2 per multiply-add",
          needs="flops", why="work"),
    _work("known_flops", "flops", "known_flops_per_step"),  # at least so many, where an op tells none
    _of_phase("self_flops", "flops", "self_flops_per_step", full="self GFLOP"),
    _of_phase("causal_flops", "flops", "causal_flops_per_step", full="causal GFLOP",  # where they are others
              value=lambda row, _: None if row["causal_flops"] == row["flops"] else row["causal_flops"]),
    Column(key="rate", kind="rate", value=_ratio("flops", "time", 1e9), console="speed", full="GFLOP/s", page="Speed",
           goes=9, spare=8, sets="main work", needs="flops", why="work",
           help="FLOPs over the time of the row; elementwise work is in the time and has none"),
    _of_phase("peak_time", "time", "peak_time_per_step_ns"),
    Column(key="of_peak", kind="share", value=_ratio("peak_time", "time"), full="% of peak",
           help="The time that its FLOPs take at the peak of their types, over its time; needs a known peak"),
    _work("bytes_moved", "bytes", "bytes_moved_per_step", full="moved", page="Moved", sets="work",
          help="Each input of an op read once, each output written once", needs="bytes_moved", why="roof"),
    Column(key="byte_rate", kind="rate", value=_ratio("bytes_moved", "time", 1e9), full="GB/s",
           help="Bytes moved over its time, in GB (10^9 bytes)"),
    Column(key="intensity", kind="number", value=_ratio("flops", "bytes_moved"), full="FLOP/B",
           help="FLOPs over bytes moved"),
    _work("roof", "time", "roof_time_per_step_ns", full="at roof"),
    _work("memory_roof", "time", "memory_roof_time_per_step_ns"),  # of it, in ops that bytes bound
    Column(key="of_roof", kind="share", value=_of_roof, console="of roof", full="% of roof", page="Of roof", goes=8,
           spare=3, sets="main work", needs="roof", why="roof",
           help="Time at the roof over the time without communication; over 100 %: data in a cache, or too low a roof"),
    Column(key="bound", kind="text", value=lambda row, _: bound_of(row["roof"], row["memory_roof"]), console="bound",
           full="bound", page="Bound", goes=10, spare=12, sets="main work", needs="roof", why="roof",
           help="What holds it at the roof: bytes (memory) or FLOPs (compute)"),
    Column(key="calls", kind="count", field="calls", forward=True, console="calls", full="calls", page="Calls", goes=15,
           spare=10, sets="main time work memory", help="Entries of the layer"),
    _border("entry", "entry_allocated_bytes", full="at entry"),
    _border("exit", "allocated_bytes", full="at exit"),
    _border("reserved", "reserved_bytes", full="reserved"),
    Column(key="retained", kind="bytes", field="retained_bytes", over_phases=most, forward=True, console="retained",
           full="retained", page="Retained", goes=12, sets="main memory", needs="retained", why="memory",
           help="Allocated in its forward and kept for the backward, mean over calls"),
    _of_phase("self_retained", "bytes", "self_retained_bytes", full="self retained"),
    Column(key="peak", kind="bytes", field="peak_bytes", over_phases=most, over_layers=most, console="peak",
           full="peak", page="Peak", goes=13, sets="main memory", needs="peak", why="memory",
           help="Highest allocated on the device while inside"),
)  # fmt: skip

SUMMED = tuple(column for column in COLUMNS if column.field and column.over_phases is not None)
_PER_STEP = {column.key for column in COLUMNS if "_per_step" in column.field}  # not summed over the steps
_AT_ONE_TIME = {column.key for column in COLUMNS if column.field.endswith("_bytes")}  # nor are these
_FIELDS = {field.name for field in fields(LayerRow)}


def phase_values(row: LayerRow) -> dict[str, Any]:
    """Return the values of one layer in one phase."""
    return {column.key: getattr(row, column.field) for column in COLUMNS if column.field}


def layer_values(rows: Sequence[LayerRow], *, own: bool = False) -> dict[str, Any]:
    """Return the values of one layer, from its rows; `own`: without the layers below it, where its rows say so."""
    values: dict[str, Any] = {}
    for row in rows:
        values[row.phase] = values.get(row.phase, 0) + (row.self_time_ns if own else row.time_ns)
    forward = [row for row in rows if row.phase in FORWARD_PHASES]
    for column in SUMMED:
        assert column.over_phases is not None
        name = f"self_{column.field}" if own and column.key != "calls" else column.field
        if name in _FIELDS:
            values[column.key] = column.over_phases(getattr(row, name) for row in (forward if column.forward else rows))
    return values


def summed(rows: Sequence[Values]) -> dict[str, Any]:
    """Sum several layers, as if they were one."""
    phases = [phase for phase in PHASES if any(phase in row for row in rows)]
    return {phase: sum(row.get(phase, 0) for row in rows) for phase in phases} | {
        column.key: column.over_layers(row.get(column.key) for row in rows) for column in SUMMED
    }


def phase_times(values: Values) -> dict[Any, Any]:
    """Return the time in each phase that there is, in their order."""
    return {phase: values[phase] for phase in PHASES if phase in values}


class Scale(NamedTuple):
    """What makes the values of one table from sums over the timed trace and from work per step."""

    steps: int  # sums are divided by it
    work: int | None  # what work is multiplied with; None: it cannot stand beside the times
    total_ns: float  # in the table

    def of(self, sums: Values) -> dict[str, Any]:
        """Return all values of a row, from sums."""
        return self.completed({key: self._scaled(key, value) for key, value in sums.items()})

    def _scaled(self, key: str, value: Any) -> Any:
        if value is None or key in _AT_ONE_TIME:
            return value
        if key in _PER_STEP:
            return None if self.work is None else value * self.work
        return value / self.steps

    def completed(self, values: Values) -> dict[str, Any]:
        """Add what follows from other values; each column has a value."""
        whole = {**dict.fromkeys(column.key for column in COLUMNS), **values}
        for column in COLUMNS:
            if column.value is not None:
                whole[column.key] = column.value(whole, self.total_ns)
            elif not column.zero:
                whole[column.key] = whole[column.key] or None
        return whole


def scale_of(analysis: Analysis) -> Scale:
    """Return the scale of all tables of a result."""
    steps = step_count(analysis)
    return Scale(steps, work_scale(analysis), analysis.time.total_ns / steps)
