"""The timeline of a page: events of some steps as columns, gaps of devices with their causes, sums over all steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from profiler_wrapper.errors import in_a_line
from profiler_wrapper.place.classes import COMMUNICATION
from profiler_wrapper.place.intervals import Union, uncovered, union
from profiler_wrapper.place.layers import is_named_block
from profiler_wrapper.place.names import PHASES
from profiler_wrapper.place.placed import Placed
from profiler_wrapper.place.step_windows import StepWindows, step_windows
from profiler_wrapper.tables.call_rows import LayerCall
from profiler_wrapper.tables.layer_lanes import layer_lanes
from profiler_wrapper.tables.spans.threads import main_lane, on_training_threads
from profiler_wrapper.tables.time_rows import step_of_charges
from profiler_wrapper.tables.timeline_columns import FAILED, Timeline, TimelineLane, TimelineStep
from profiler_wrapper.tables.timeline_gaps import IdleGaps, idle_gaps, meanwhile
from profiler_wrapper.trace.arrays import at, marked, sum_by_key
from profiler_wrapper.trace.marks import MEMORY_POINT, REQUEST
from profiler_wrapper.trace.nesting import innermost_around, nest_chosen, rows_of_lanes
from profiler_wrapper.trace.recording import Bool, Category, Int32, Int64

_MOST_EVENTS = 250_000  # about 1 MB of a page
_MOST_STEPS = 12
_TYPICAL = 0.25  # as far from the median, at most
_LONG_GAP_NS, _LONG_GAP_SHARE = 10_000, 2000  # and a step's time divided by it, if that is less
_NOT_IDLE = "idle stretches are not drawn, as not all that ran on the device is in the trace"


def timeline_or_why(found: Placed, calls: Sequence[LayerCall]) -> Timeline | str:
    """As `timeline`; why there is none where that fails: a page is worth more."""
    try:
        return timeline(found, calls)
    except Exception as error:
        return f"{FAILED}: {in_a_line(error)}"


def timeline(found: Placed, calls: Sequence[LayerCall], *, most_events: int = _MOST_EVENTS) -> Timeline:
    """Of an attributed recording; `calls`: those of its layers. Raises ValueError: nothing in it takes time."""
    return _Maker(found, calls, most_events).made()


class _Steps(NamedTuple):
    """All steps; without any, the whole trace as one."""

    number: tuple[int | None, ...]
    begin_ns: Int64  # on the CPU: the device may still be at work for the step before
    start_ns: Int64
    end_ns: Int64
    windows: StepWindows
    of_charge: Int64


def _steps_of(found: Placed) -> _Steps:
    windows, steps = step_windows(found), found.steps
    if not windows.number:
        raise ValueError("nothing in the trace takes time")
    if not len(steps):
        of_charge = np.where(found.charges.cpu_span >= 0, 0, -1)
        return _Steps((None,), windows.start_ns, windows.start_ns, windows.end_ns, windows, of_charge)
    start, end = steps.start_ns.copy(), np.minimum(steps.end_ns, found.recording.spans.end_ns.max())
    if None not in windows.number:
        start[windows.place], end[windows.place] = windows.start_ns, windows.end_ns
    return _Steps(steps.number, np.minimum(start, steps.start_ns), start, end, windows, step_of_charges(found))


class _Events(NamedTuple):
    """Events of one lane."""

    start_ns: Int64
    duration_ns: Int64
    name: Int64  # as `_Maker.texts` has them
    layer: Int64
    phase: Int64
    work: Int64
    step: Int64
    span: Int64  # -1: it is no event of the trace


class _Maker:
    def __init__(self, found: Placed, calls: Sequence[LayerCall], most_events: int) -> None:
        self.found, self.calls = found, calls
        self.spans, self.charges, self.tree = found.recording.spans, found.charges, found.tree
        self.on_device = self.charges.basis == "device"
        self.layer_of_place = found.attribution.layer_of_place
        self.phase_of_place = found.attribution.phase_of_place
        # Numbers of names: of events as the trace has them, then of layers, then of phases.
        self.layers = tuple(layer.name for layer in self.tree.layers)
        self.texts = [*found.recording.names, *self.layers, *PHASES]
        self.first_layer, self.first_phase = len(found.recording.names), len(self.texts) - len(PHASES)
        self.name = self.spans.name.astype(np.int64)
        entries = np.array([*self.tree.layer_of_span.items()], dtype=np.int64).reshape(-1, 2)
        self.name[entries[:, 0]] = self.first_layer + entries[:, 1]
        self.steps = _steps_of(found)
        self.slowest = int(np.argmax(self.steps.end_ns - self.steps.start_ns))
        # Per span: its class and its step.
        self.work = np.full(len(self.spans), -1, dtype=np.int64)
        self.work[self.charges.span] = self.charges.work
        self.step = found.steps.place_of(self.spans.start_ns) if len(found.steps) else np.zeros_like(self.work)
        self.step[self.charges.span] = self.steps.of_charge
        self._choose(most_events)
        self.cpu = self.events[self.spans.category[self.events] <= Category.RUNTIME]
        self.nesting = nest_chosen(self.spans, marked(len(self.spans), self.cpu))
        self.place_of = self._places()

    def made(self) -> Timeline:
        parts = [*self._layers(), *self._phases(), *self._lanes_of_trace()]
        joined = _Events(*(np.concatenate(columns) for columns in zip(*(events for _, events in parts), strict=True)))
        lane = np.repeat(np.arange(len(parts)), [len(events.start_ns) for _, events in parts])
        order, row = rows_of_lanes(lane.astype(np.int32), joined.start_ns, joined.start_ns + joined.duration_ns)
        levels = np.zeros(len(parts), dtype=np.int64)
        np.maximum.at(levels, lane, row + 1)
        joined = _Events(*(column[order] for column in joined))
        launch, forward, row_of = np.full((3, len(self.spans) + 1), -1, dtype=np.int64)  # the last one is for "none"
        launch[self.charges.span] = self.charges.cpu_span if self.on_device else -1
        forward[:-1] = self.found.attribution.forward_op
        row_of[joined.span] = np.arange(len(order))
        row_of[-1] = -1
        windows = self.steps.windows
        are_steps = None not in windows.number or not len(self.found.steps)
        idle = idle_gaps(self.found, windows) if are_steps else None
        gaps, sums = self._gaps(idle, row_of), self._sums()
        names, (name, gaps["op"], sums["name"]) = self._named(joined.name, gaps["op"], sums["name"])
        keys = ("lane", "start_ns", "duration_ns", "depth", "name", "layer", "phase", "class", "step")
        times = lane[order], joined.start_ns - self.origin_ns, joined.duration_ns, row[order].astype(np.int64)
        links = {"launch": row_of[launch[joined.span]], "forward": row_of[forward[joined.span]]}
        columns = (*times, name, joined.layer, joined.phase, joined.work, joined.step)
        own = self._own_names()
        return Timeline(
            note="; ".join(filter(None, (self.note, _NOT_IDLE if self.on_device and idle is None else ""))),
            device=self.on_device,
            origin_ns=self.origin_ns,
            length_ns=int(self.drawn_time.end_ns[-1]) - self.origin_ns,
            steps=self._timeline_steps(idle),
            lanes=tuple(one._replace(levels=count) for (one, _), count in zip(parts, levels.tolist(), strict=True)),
            names=names,
            own_names=frozenset(i for i, text in enumerate(names) if text in own),
            layers=self.layers,
            events={**dict(zip(keys, columns, strict=True)), **links},
            gaps=gaps,
            sums=sums,
        )

    # -- what is drawn ----------------------------------------------------------------------------

    def _choose(self, most: int) -> None:
        """The steps, and the events in their time."""
        spans, steps = self.spans, self.steps
        counts = spans.category <= Category.RUNTIME
        if self.found.left_out is not None:
            counts &= ~self.found.left_out
        counts[self.charges.span] = True
        events = np.flatnonzero(counts)
        self.drawn, parts = np.ones(len(steps.number), dtype=np.bool_), []
        self.drawn_time = union(spans.start_ns[events].min(keepdims=True), spans.end_ns[events].max(keepdims=True))
        if len(events) > most:
            in_step = self.step[events]
            self._choose_steps(np.bincount(in_step[in_step >= 0], minlength=len(self.drawn)), most)
            self.drawn_time = union(steps.begin_ns[self.drawn], steps.end_ns[self.drawn])
            events = events[self._is_drawn(events)]
        if not self.drawn.all():
            parts.append(f"{self.drawn.sum()} of {len(self.drawn)} steps")
        if len(events) > most:
            parts.append(f"the {most:,} longest of {len(events):,} events")
            events = np.sort(events[np.argsort(spans.duration_ns[events], kind="stable")[-most:]])
        are = "is" if parts == [f"1 of {len(self.drawn)} steps"] else "are"
        self.note = f"{', of it '.join(parts)} {are} here; all: the trace file" if parts else ""
        self.events, self.origin_ns = events, int(self.drawn_time.start_ns[0])

    def _choose_steps(self, events: Int64, most: int) -> None:
        """The median, the slowest, then the first about as long as the median: as many as fit, at least one."""
        length = self.steps.end_ns - self.steps.start_ns
        median = int(np.argmax(length == np.sort(length)[(len(length) - 1) // 2]))
        others = np.argsort(np.abs(length - length[median]) > _TYPICAL * length[median], kind="stable")
        chosen = [median]
        for step in dict.fromkeys([self.slowest, *others.tolist()]):
            if len(chosen) < _MOST_STEPS and step != median and events[[*chosen, step]].sum() <= most:
                chosen.append(step)
        self.drawn = marked(len(length), chosen)

    def _is_drawn(self, span: Int64) -> Bool:
        return _overlaps(self.drawn_time, self.spans.start_ns[span], self.spans.end_ns[span])

    def _places(self) -> Int32:
        """Per span its place; calls into the runtime that launch nothing are where they lie, too."""
        found, spans = self.found, self.spans
        place_of: Int32 = found.attribution.place_of.copy()
        calls = self.cpu[spans.category[self.cpu] == Category.RUNTIME]
        around = innermost_around(found.nesting, spans, spans.lane[calls], spans.start_ns[calls], spans.end_ns[calls])
        place_of[calls] = at(found.attribution.place_of, around, found.attribution.outside)
        place_of[self.charges.span] = self.charges.place
        return place_of

    def _named(self, *columns: Int64) -> tuple[tuple[str, ...], list[Int64]]:
        """The names that some columns use, each text once, and the columns with their numbers."""
        used = np.unique(np.concatenate([column[column >= 0] for column in columns]))
        names: dict[str, int] = {}
        number = np.full(len(self.texts) + 1, -1, dtype=np.int64)
        number[used] = [names.setdefault(self.texts[i], len(names)) for i in used.tolist()]
        return tuple(names), [number[column] for column in columns]

    def _own_names(self) -> set[str]:
        """Annotations that a user named, but for those that are layers."""
        used = np.unique(self.spans.name[self.spans.category == Category.ANNOTATION]).tolist()
        texts = {self.texts[i] for i in used}
        return {t for t in texts if is_named_block(t) or t.startswith((MEMORY_POINT, REQUEST))} - {*self.layers}

    def _timeline_steps(self, idle: IdleGaps | None) -> tuple[TimelineStep, ...]:
        numbers, windows = self.steps.number, self.steps.windows
        idle_ns: dict[int, int] = {}
        if idle is not None:
            sums = sum_by_key(idle.window, idle.length_ns, len(windows.number))
            idle_ns = dict(zip(windows.place.tolist(), sums.tolist(), strict=True))
        times = ((column - self.origin_ns).tolist() for column in (self.steps.start_ns, self.steps.end_ns))
        return tuple(
            TimelineStep(number, start, end, drawn, i == self.slowest and len(numbers) > 1, idle_ns.get(i))
            for i, (number, start, end, drawn) in enumerate(zip(numbers, *times, self.drawn.tolist(), strict=True))
        )

    # -- lanes ------------------------------------------------------------------------------------

    def _layers(self) -> Iterator[tuple[TimelineLane, _Events]]:
        """When each layer ran, on the device where there is one."""
        place = {layer.name: (layer.depth, i) for i, layer in enumerate(self.tree.layers)}
        phase_of: dict[object, int] = {phase: i for i, phase in enumerate(PHASES)}
        bars = layer_lanes(self.found, self.calls)
        bars.sort(key=lambda bar: place[bar.name])  # outer ones come first
        device = np.array([-1 if bar.device is None else bar.device for bar in bars], dtype=np.int64)
        table = [(bar.start_ns, bar.duration_ns, place[bar.name][1], phase_of[bar.args["phase"]]) for bar in bars]
        start, duration, layer, phase = np.array(table, dtype=np.int64).reshape(-1, 4).T
        step = np.searchsorted(self.steps.start_ns, start, side="right") - 1
        step = np.where((step >= 0) & (start < self.steps.end_ns[step]), step, -1)
        none = np.full(len(start), -1)
        events = _Events(start, duration, self.first_layer + layer, layer, phase, none, step, none)
        drawn = _overlaps(self.drawn_time, start, start + duration)
        for one in np.unique(device[drawn]).tolist():
            lane = TimelineLane("layers", "layers", None if one < 0 else one, False, 0)
            yield lane, _Events(*(column[drawn & (device == one)] for column in events))

    def _phases(self) -> Iterator[tuple[TimelineLane, _Events]]:
        """Which phase runs, until the next one does: what communicates counts where nothing else runs."""
        charges, spans = self.charges, self.spans
        is_drawn, moves = self._is_drawn(charges.span), charges.work == COMMUNICATION
        counts = is_drawn & (~moves if self.on_device else on_training_threads(self.found)[charges.span])
        moves &= is_drawn & self.on_device
        start, end = spans.start_ns[charges.span], spans.end_ns[charges.span]
        device = spans.device[charges.span].astype(np.int64) if self.on_device else np.full(len(charges), -1)
        for one in np.unique(device[counts]).tolist():
            here, beside = np.flatnonzero(counts & (device == one)), np.flatnonzero(moves & (device == one))
            left, right, _ = uncovered(union(start[here], end[here]), start[beside], end[beside])
            starts, ends = np.append(start[here], left), np.append(end[here], right)
            order = np.argsort(starts, kind="stable")
            charge = np.append(here, beside[np.searchsorted(start[beside], left, side="right") - 1])[order]
            phase, step = self.phase_of_place[charges.place[charge]], self.steps.of_charge[charge]
            first = np.flatnonzero(np.append(True, (np.diff(phase) != 0) | (np.diff(step) != 0)))
            begins, ends = starts[order][first], ends[order]
            lasts = np.minimum(np.maximum.reduceat(ends, first), np.append(begins[1:], ends.max()))
            phase, none = phase[first], np.full(len(first), -1)
            lane = TimelineLane("phases", "phases", None if one < 0 else one, False, 0)
            yield lane, _Events(begins, lasts - begins, self.first_phase + phase, none, phase, none, step[first], none)

    def _lanes_of_trace(self) -> Iterator[tuple[TimelineLane, _Events]]:
        """The threads: that of the steps, those of backward, then the others, the busiest first; streams by device."""
        spans, found, main = self.spans, self.found, main_lane(self.found)
        with_nodes = set(np.unique(spans.lane[found.attribution.is_node]).tolist())
        lane_of = spans.lane[self.events]
        lanes, first, counts = np.unique(lane_of, return_index=True, return_counts=True)
        shown: list[tuple[tuple[int, ...], int, TimelineLane]] = []
        for lane, event, count in zip(lanes.tolist(), self.events[first].tolist(), counts.tolist(), strict=True):
            device, stream, tid = int(spans.device[event]), int(spans.stream[event]), found.recording.lanes[lane].tid
            if spans.category[event] > Category.RUNTIME:
                shown.append(((1, device, stream), lane, TimelineLane("stream", f"stream {stream}", device, False, 0)))
                continue
            name = f"{'backward, ' * (lane in with_nodes)}thread {tid if isinstance(tid, int) else lane}"
            thread = TimelineLane("thread", "main thread" if lane == main else name, None, lane == main, 0)
            shown.append(((0, lane != main, lane not in with_nodes, -count), lane, thread))
        for _, lane, one in sorted(shown):
            span = self.events[lane_of == lane]
            times, place = (spans.start_ns[span], spans.duration_ns[span]), self.place_of[span]
            where = self.layer_of_place[place], self.phase_of_place[place]
            yield one, _Events(*times, self.name[span], *where, self.work[span], self.step[span], span)

    # -- gaps and sums ----------------------------------------------------------------------------

    def _gaps(self, idle: IdleGaps | None, row_of: Int64) -> dict[str, Int64]:
        """The long ones of the steps that are drawn."""
        keys = ("start_ns", "duration_ns", "device", "step", "layer", "phase", "op", "cause", "event")
        windows = self.steps.windows
        if idle is not None:
            long_ns = np.minimum((windows.end_ns - windows.start_ns) // _LONG_GAP_SHARE, _LONG_GAP_NS)
            idle = idle.only(self.drawn[windows.place[idle.window]] & (idle.length_ns >= long_ns[idle.window]))
        if idle is None or not len(idle.start_ns):
            return {key: np.empty(0, dtype=np.int64) for key in keys}
        cause, event, *where = meanwhile(self.found, idle, self.nesting, self.place_of)
        op = np.where(event >= 0, self.name[event], -1)
        start, step = idle.start_ns - self.origin_ns, windows.place[idle.window]
        columns = (start, idle.length_ns, idle.device, step, *where, op, cause, row_of[event])
        order = np.lexsort((idle.device, idle.start_ns))
        return {key: column[order] for key, column in zip(keys, columns, strict=True)}

    def _sums(self) -> dict[str, Int64]:
        """Per name, layer, phase, class and step what took time, and how many."""
        charges, place = self.charges, self.charges.place
        where = self.layer_of_place[place], self.phase_of_place[place]
        columns = np.array([self.name[charges.span], *where, charges.work, self.steps.of_charge], dtype=np.int64)
        order = np.lexsort(columns[::-1])
        columns = columns[:, order]
        first = np.flatnonzero(np.append(True, (np.diff(columns) != 0).any(axis=0)))
        sums = np.add.reduceat(charges.time_ns[order], first), np.diff(np.append(first, len(order)))
        keys = ("name", "layer", "phase", "class", "step", "time_ns", "count")
        return dict(zip(keys, (*columns[:, first], *sums), strict=True))


def _overlaps(times: Union, start_ns: Int64, end_ns: Int64) -> Bool:
    """Per interval whether some of it, or the instant at which it begins, is in these times."""
    overlaps: Bool = times.overlap(start_ns, np.maximum(end_ns, start_ns + 1)) > 0
    return overlaps
