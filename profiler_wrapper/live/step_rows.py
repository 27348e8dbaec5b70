"""A step that was seen as rows: the step, its parts, the layers in them, and the waits for other ranks in all of these.

Where there were waits, each row says how much of it they are, and its time on the device is without them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from profiler_wrapper.live.breakdown import Boundaries
from profiler_wrapper.live.device_events import Mark, Moment
from profiler_wrapper.live.layer_spans import StepSpans
from profiler_wrapper.live.step_waits import Wait

_PARENTS: dict[str, str | None] = {"forward": "forward", "backward": "backward", "recompute": "backward"}
_NO_PARENTS: dict[str, str | None] = dict.fromkeys(_PARENTS)
AFTER_BACKWARD = "collectives after backward"  # until the engine returns: what DDP waits for


@dataclass(frozen=True, slots=True)
class SeenStep:
    """A step that has ended on the host. `stages`: of a pipeline, so many are here."""

    number: int
    begin: Mark
    end: Mark
    boundaries: Boundaries
    found: StepSpans
    thread: int
    stages: int = 1


class More(NamedTuple):
    """What only some rows have. `device_waiting_ns` is no part of the row's time on the device."""

    microbatch: int | None = None
    waiting_ns: int | None = None
    sequence: int | None = None
    group: str | None = None
    bytes: int | None = None
    device_waiting_ns: int = 0


class Row(NamedTuple):
    """One. `parent`: None: it lies in nothing but the step."""

    kind: str
    name: str
    layer: str | None
    begin: Moment
    end: Moment
    thread: int
    depth: int
    parent: str | None
    more: More | None = None


def rows_of(step: SeenStep) -> list[Row]:
    """All of a step, the step first."""
    parts, layers = list(_parts(step)), _layers(step)
    whole = Row("step", "step", None, moment_of(step.begin), moment_of(step.end), step.thread, 0, None)
    return [whole, *(_with_waits(step, parts, layers) if step.found.waits else (*parts, *layers))]


def _parts(step: SeenStep) -> Iterator[Row]:
    if not step.boundaries:
        return
    numbered = _has_microbatches(step)
    seen: Counter[str] = Counter()
    stops = [mark for _, mark in step.boundaries[1:]] + [step.end]
    sequence = 0
    for (part, begin), stop in zip(step.boundaries, stops, strict=True):
        if part == "other":
            continue
        row = Row(part, part, None, moment_of(begin), moment_of(stop), step.thread, 0, None)
        more = More()
        if part in ("forward", "backward") and numbered:
            more = more._replace(microbatch=seen[part])
            seen[part] += 1
        for end, group in step.found.ends if part == "backward" else ():
            if group is not None and row.begin[0] <= end[0] <= row.end[0]:
                told = More(sequence=sequence, group=group)
                yield Row("communication", AFTER_BACKWARD, None, end, row.end, step.thread, 1, part, told)
                sequence += 1
                more = more._replace(waiting_ns=row.end[0] - end[0])
        yield row._replace(more=more)


def _layers(step: SeenStep) -> list[Row]:
    depth = 1 if step.boundaries else 0
    parents = _PARENTS if depth else _NO_PARENTS
    numbered, trains = _has_microbatches(step), step.thread
    return [
        Row(
            kind,
            unit.spans[kind],
            unit.name,
            begin,
            end,
            thread or trains,
            depth,
            parents[kind],
            More(microbatch) if numbered else None,
        )
        for kind, unit, begin, end, microbatch, thread in step.found.spans
    ]


def _has_microbatches(step: SeenStep) -> bool:
    """Each forward of the step is of another one; where a rank has several stages, nothing tells."""
    counts = Counter(part for part, _ in step.boundaries)
    return step.stages == 1 and counts["forward"] == counts["backward"] > 1


# --- waits ---


def _with_waits(step: SeenStep, parts: list[Row], layers: list[Row]) -> Iterator[Row]:
    waited = _Waited()
    in_parts = _Places(row for row in parts if row.kind != "communication")
    ahead = _Places(row for row in layers if row.kind == "forward")
    behind = _Places(row for row in layers if row.kind != "forward")
    counts: Counter[tuple[str, str]] = Counter()
    rows = []
    for wait in step.found.waits:
        layer = behind.around(wait) if wait.in_graph else ahead.around(wait)
        if layer is not None and not wait.in_graph and layer.thread != wait.thread:
            layer = None
        trains = wait.in_graph or wait.thread == step.thread
        part = in_parts.around(wait) if trains else None
        for row in (part, layer):
            if row is not None:
                waited.add(row, wait)
        around = layer or part
        name, group, size = wait.told
        sequence = None if group is None else counts[name, group]
        if group is not None:
            counts[name, group] += 1
        rows.append(
            Row(
                "communication",
                name,
                None,
                wait.begin,
                wait.end,
                step.thread if trains else wait.thread,
                0 if around is None else around.depth + 1,
                None if around is None else around.name,
                More(sequence=sequence, group=group, bytes=size),
            )
        )
    for row in (*parts, *layers):
        yield row if row.kind == "communication" else waited.told(row)
    yield from rows


class _Places:
    """Rows of which none lies in another, to be found by time."""

    def __init__(self, rows: Iterator[Row]) -> None:
        self._rows = sorted(rows, key=lambda row: row.begin[0])
        self._begins = [row.begin[0] for row in self._rows]

    def around(self, wait: Wait) -> Row | None:
        place = bisect_right(self._begins, wait.begin[0]) - 1
        return self._rows[place] if place >= 0 and wait.end[0] <= self._rows[place].end[0] else None


class _Waited:
    """How much of each row waits are, by its place in memory: rows live as long as this."""

    def __init__(self) -> None:
        self._sums: dict[int, tuple[int, int]] = {}

    def add(self, row: Row, wait: Wait) -> None:
        on_host, on_device = self._sums.get(id(row), (0, 0))
        device_ns = device_time_ns(wait.begin[1], wait.end[1])
        self._sums[id(row)] = on_host + wait.end[0] - wait.begin[0], on_device + (device_ns or 0)

    def told(self, row: Row) -> Row:
        on_host, on_device = self._sums.get(id(row), (0, 0))
        more = row.more or More()
        return row._replace(
            more=more._replace(waiting_ns=(more.waiting_ns or 0) + on_host, device_waiting_ns=on_device)
        )


# --- moments ---


def moment_of(mark: Mark) -> Moment:
    """A mark as one."""
    return round(mark.host_s * 1e9), mark.event


def device_time_ns(begin: Any, end: Any) -> int | None:
    """Between two events; None: there are none, or the device has not come to them, or they are of two devices."""
    if begin is None or end is None:
        return None
    try:
        if begin.query() and end.query():
            milliseconds: float = begin.elapsed_time(end)
            return max(0, round(milliseconds * 1e6))
    except RuntimeError:  # events of two devices
        pass
    return None
