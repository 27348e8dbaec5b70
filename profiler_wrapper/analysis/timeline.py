"""The timeline of a page: events of some steps as columns, gaps of devices with their causes, sums over all steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np

from profiler_wrapper.analysis.attributed import Attributed
from profiler_wrapper.analysis.call_rows import LayerCall
from profiler_wrapper.analysis.calls import layer_lanes
from profiler_wrapper.analysis.charges import Union, union
from profiler_wrapper.analysis.classes import COMMUNICATION
from profiler_wrapper.analysis.layer_tree import is_named_block
from profiler_wrapper.analysis.model import PHASES
from profiler_wrapper.analysis.spans.threads import main_lane, on_training_threads
from profiler_wrapper.analysis.statistics import at, in_order, sum_by_key
from profiler_wrapper.analysis.steps import StepWindows, step_windows
from profiler_wrapper.analysis.time_rows import step_of_charges
from profiler_wrapper.analysis.timeline_columns import FAILED, Timeline, TimelineLane, TimelineStep
from profiler_wrapper.analysis.timeline_gaps import IdleGaps, idle_gaps, meanwhile
from profiler_wrapper.errors import in_a_line
from profiler_wrapper.trace.marks import MEMORY_POINT, REQUEST
from profiler_wrapper.trace.nesting import innermost_around, nest_chosen, rows_of_lanes
from profiler_wrapper.trace.recording import Bool, Category, Int32, Int64

_MOST_EVENTS = 250_000  # about 1 MB of a page
_MOST_STEPS = 12
_TYPICAL = 0.25  # as far from the median, at most
_LONG_GAP_NS, _LONG_GAP_SHARE = 10_000, 2000  # and a step's time divided by it, if that is less
_NOT_IDLE = "when the device is idle is not known"


def timeline_or_why(found: Attributed, calls: Sequence[LayerCall]) -> Timeline | str:
    """As `timeline`; why there is none where that fails: a page is worth more."""
    try:
        return timeline(found, calls)
    except Exception as error:
        return f"{FAILED}: {in_a_line(error)}"


def timeline(found: Attributed, calls: Sequence[LayerCall], *, most_events: int = _MOST_EVENTS) -> Timeline:
    """Of an attributed recording; `calls`: those of its layers.

    Raises:
        ValueError: nothing in it takes time.
    """
    return _Maker(found, calls, most_events).made()


class _Steps(NamedTuple):
    """All steps; without any, the whole trace as one."""

    number: tuple[int | None, ...]
    begin_ns: Int64  # on the CPU: the device may still be at work for the step before
    start_ns: Int64
    end_ns: Int64
    windows: StepWindows
    of_span: Int64  # per span of a CPU
    of_charge: Int64


def _steps_of(found: Attributed) -> _Steps:
    spans, windows, steps = found.recording.spans, step_windows(found), found.steps
    if not windows.number:
        raise ValueError("nothing in the trace takes time")
    if not len(steps):
        nowhere = np.zeros(len(spans), dtype=np.int64)
        of_charge = np.where(found.charges.cpu_span >= 0, 0, -1)
        return _Steps((None,), windows.start_ns, windows.start_ns, windows.end_ns, windows, nowhere, of_charge)
    start, end = steps.start_ns.copy(), np.minimum(steps.end_ns, spans.end_ns.max())
    if None not in windows.number:
        start[windows.place], end[windows.place] = windows.start_ns, windows.end_ns
    begin = np.minimum(start, steps.start_ns)
    return _Steps(steps.number, begin, start, end, windows, steps.place_of(spans.start_ns), step_of_charges(found))


class _Part(NamedTuple):
    """Events of one kind before they are put in order; `lane`: its place among the lanes."""

    lane: Int64
    start_ns: Int64
    duration_ns: Int64
    name: Int64  # as `_Maker.texts` has them
    layer: Int64
    phase: Int64
    work: Int64
    step: Int64
    span: Int64  # -1: it is no event of the trace


class _Maker:
    def __init__(self, found: Attributed, calls: Sequence[LayerCall], most_events: int) -> None:
        self.found, self.calls = found, calls
        self.spans, self.charges, self.tree = found.recording.spans, found.charges, found.tree
        self.on_device = self.charges.basis == "device"
        self.layer_of_place = found.attribution.layer_of_place
        self.phase_of_place = found.attribution.phase_of_place
        layers = [layer.name for layer in self.tree.layers]
        # Numbers of names: of events as the trace has them, then of layers, then of phases.
        self.texts = [*found.recording.names, *layers, *PHASES]
        self.first_layer, self.first_phase = len(found.recording.names), len(self.texts) - len(PHASES)
        self.name = self.spans.name.astype(np.int64)
        for span, layer in self.tree.layer_of_span.items():
            self.name[span] = self.first_layer + layer
        self.steps = _steps_of(found)
        self.slowest = int(np.argmax(self.steps.end_ns - self.steps.start_ns))
        self.lanes: list[TimelineLane] = []
        self._choose(most_events)
        cpu_mask = np.zeros(len(self.spans), dtype=np.bool_)
        cpu_mask[self.cpu] = True
        self.nesting = nest_chosen(self.spans, cpu_mask)
        self.place_of = self._places()

    # -- what is drawn ----------------------------------------------------------------------------

    def _choose(self, most: int) -> None:
        """The steps, and the events in the time of these; `cpu` as spans, `device` as charges."""
        found, spans, steps = self.found, self.spans, self.steps
        on_cpu = spans.category <= Category.RUNTIME
        if found.left_out is not None:
            on_cpu &= ~found.left_out
        cpu, device = np.flatnonzero(on_cpu), np.arange(len(self.charges) if self.on_device else 0)
        every = len(cpu) + len(device) <= most
        drawn = np.ones(len(steps.number), dtype=np.bool_)
        self.note = ""
        if every:
            span = np.concatenate([cpu, self.charges.span[device]])
            self.drawn_time = union(spans.start_ns[span].min(keepdims=True), spans.end_ns[span].max(keepdims=True))
        else:
            in_step = np.concatenate([steps.of_span[cpu], steps.of_charge[device]])
            chosen = self._chosen_steps(np.bincount(in_step[in_step >= 0], minlength=len(drawn)), most)
            drawn[:] = np.isin(np.arange(len(drawn)), chosen)
            self.drawn_time = union(steps.begin_ns[drawn], steps.end_ns[drawn])
            cpu, device = cpu[self._is_drawn(cpu)], device[self._is_drawn(self.charges.span[device])]
            if not drawn.all():
                self.note = f"{drawn.sum()} of {len(drawn)} steps are here; all: the trace file"
        if (too_many := len(cpu) + len(device) - most) > 0:
            lengths = spans.duration_ns[np.concatenate([cpu, self.charges.span[device]])]
            kept = np.ones(len(lengths), dtype=np.bool_)
            kept[np.argsort(lengths, kind="stable")[:too_many]] = False
            cpu, device = cpu[kept[: len(cpu)]], device[kept[len(cpu) :]]
            short = f"the {most:,} longest of its {len(lengths):,} events are here; all: the trace file"
            self.note = f"{'' if len(drawn) == 1 else f'1 of {len(drawn)} steps, and '}{short}"
        self.cpu, self.device, self.drawn = cpu, device, drawn

    def _chosen_steps(self, events: Int64, most: int) -> list[int]:
        """The median, the slowest, then the first about as long as the median: as many as fit, at least one."""
        length = self.steps.end_ns - self.steps.start_ns
        median = int(np.argmax(length == np.sort(length)[(len(length) - 1) // 2]))
        unlike = np.abs(length - length[median]) > _TYPICAL * length[median]
        others = np.lexsort((np.arange(len(length)), unlike)).tolist()
        chosen = [median]
        for step in dict.fromkeys([self.slowest, *others]):
            if len(chosen) == _MOST_STEPS:
                break
            if step != median and events[[*chosen, step]].sum() <= most:
                chosen.append(step)
        return chosen

    def _is_drawn(self, span: Int64) -> Bool:
        start, end = self.spans.start_ns[span], self.spans.end_ns[span]
        return _overlaps(self.drawn_time, start, end)

    def _places(self) -> Int32:
        """Per span its place; calls into the runtime that launch nothing are where they lie, too."""
        found, spans = self.found, self.spans
        place_of: Int32 = found.attribution.place_of.copy()
        calls = self.cpu[spans.category[self.cpu] == Category.RUNTIME]
        around = innermost_around(found.nesting, spans, spans.lane[calls], spans.start_ns[calls], spans.end_ns[calls])
        place_of[calls] = at(found.attribution.place_of, around, found.attribution.outside)
        return place_of

    # -- all together -----------------------------------------------------------------------------

    def made(self) -> Timeline:
        parts = [*self._layers(), *self._phases(), *self._threads(), *self._streams()]
        joined = _Part(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))
        order, row = rows_of_lanes(joined.lane.astype(np.int32), joined.start_ns, joined.start_ns + joined.duration_ns)
        joined, row = _Part(*(column[order] for column in joined)), row[order].astype(np.int64)
        levels = np.zeros(len(self.lanes), dtype=np.int64)
        np.maximum.at(levels, joined.lane, row + 1)
        row_of = np.full(len(self.spans) + 1, -1, dtype=np.int64)  # the last one is for "none"
        row_of[joined.span] = np.arange(len(order))
        row_of[-1] = -1
        launch = np.full(len(self.spans) + 1, -1, dtype=np.int64)
        forward = np.append(self.found.attribution.forward_op.astype(np.int64), -1)
        if self.on_device:
            launch[self.charges.span] = self.charges.cpu_span
        windows_are_steps = None not in self.steps.windows.number or not len(self.found.steps)
        idle = idle_gaps(self.found, self.steps.windows) if windows_are_steps else None
        self.origin_ns = int(self.drawn_time.start_ns[0])
        gaps, sums = self._gaps(idle, row_of), self._sums()
        names, (event_names, ops, sum_names) = self._named(joined.name, gaps["op"], sums["name"])
        events = {
            "lane": joined.lane,
            "start_ns": joined.start_ns - self.origin_ns,
            "duration_ns": joined.duration_ns,
            "depth": row,
            "name": event_names,
            "layer": joined.layer,
            "phase": joined.phase,
            "class": joined.work,
            "step": joined.step,
            "launch": row_of[launch[joined.span]],
            "forward": row_of[forward[joined.span]],
        }
        own = self._own_names()
        return Timeline(
            note="; ".join(filter(None, (self.note, _NOT_IDLE if self.on_device and idle is None else ""))),
            device=self.on_device,
            origin_ns=self.origin_ns,
            length_ns=int(self.drawn_time.end_ns[-1]) - self.origin_ns,
            steps=self._timeline_steps(idle),
            lanes=tuple(lane._replace(levels=count) for lane, count in zip(self.lanes, levels.tolist(), strict=True)),
            names=names,
            own_names=frozenset(i for i, name in enumerate(names) if name in own),
            layers=tuple(layer.name for layer in self.tree.layers),
            events=events,
            gaps={**gaps, "op": ops},
            sums={**sums, "name": sum_names},
        )

    def _named(self, *columns: Int64) -> tuple[tuple[str, ...], list[Int64]]:
        """The names that some columns use, each text once, and the columns with their numbers."""
        used = np.unique(np.concatenate(columns))
        used = used[used >= 0]
        names: dict[str, int] = {}
        number = np.full(len(self.texts) + 1, -1, dtype=np.int64)
        number[used] = [names.setdefault(self.texts[i], len(names)) for i in used.tolist()]
        return tuple(names), [number[column] for column in columns]

    def _own_names(self) -> set[str]:
        """Annotations that a user named, but for those that are layers."""
        recording = self.found.recording
        used = np.unique(recording.spans.name[recording.spans.category == Category.ANNOTATION]).tolist()
        texts = (recording.names[i] for i in used)
        own = {text for text in texts if is_named_block(text) or text.startswith((MEMORY_POINT, REQUEST))}
        return own - {layer.name for layer in self.tree.layers}

    def _timeline_steps(self, idle: IdleGaps | None) -> tuple[TimelineStep, ...]:
        steps, windows = self.steps, self.steps.windows
        idle_ns: list[int | None] = [None] * len(steps.number)
        if idle is not None:
            sums = sum_by_key(idle.window, idle.length_ns, len(windows.number)).tolist()
            for i, length_ns in zip(windows.place.tolist(), sums, strict=True):
                idle_ns[i] = length_ns
        columns = (steps.number, (steps.start_ns - self.origin_ns).tolist(), (steps.end_ns - self.origin_ns).tolist())
        return tuple(
            TimelineStep(number, start, end, drawn, i == self.slowest and len(steps.number) > 1, gap)
            for i, (number, start, end, drawn, gap) in enumerate(
                zip(*columns, self.drawn.tolist(), idle_ns, strict=True)
            )
        )

    # -- lanes ------------------------------------------------------------------------------------

    def _lane(
        self,
        kind: Literal["layers", "phases", "thread", "stream"],
        name: str,
        device: int | None,
        *,
        main: bool = False,
    ) -> int:
        self.lanes.append(TimelineLane(kind, name, device, main, 0))
        return len(self.lanes) - 1

    def _layers(self) -> Iterator[_Part]:
        """When each layer ran, on the device where there is one."""
        depth = {layer.name: (i, layer.depth) for i, layer in enumerate(self.tree.layers)}
        bars = sorted(layer_lanes(self.found, self.calls), key=lambda bar: depth[bar.name][1])  # outer ones come first
        phase_of: dict[object, int] = {phase: i for i, phase in enumerate(PHASES)}
        table = [(bar.start_ns, bar.duration_ns, depth[bar.name][0], phase_of[bar.args["phase"]]) for bar in bars]
        start, duration, layer, phase = np.array(table, dtype=np.int64).reshape(-1, 4).T
        device = np.array([-1 if bar.device is None else bar.device for bar in bars], dtype=np.int64)
        kept = _overlaps(self.drawn_time, start, start + duration)
        step = self._step_at(start)
        for one in np.unique(device[kept]).tolist():
            chosen = np.flatnonzero(kept & (device == one))
            lane = self._lane("layers", "layers", None if one < 0 else one)
            yield _Part(
                _same(lane, chosen), start[chosen], duration[chosen], self.first_layer + layer[chosen],
                layer[chosen], phase[chosen], _same(-1, chosen), step[chosen], _same(-1, chosen),
            )  # fmt: skip

    def _step_at(self, time_ns: Int64) -> Int64:
        """The step whose window an instant is in; -1 for none."""
        place = np.searchsorted(self.steps.start_ns, time_ns, side="right") - 1
        return np.where((place >= 0) & (time_ns < self.steps.end_ns[place]), place, -1)

    def _phases(self) -> Iterator[_Part]:
        """Which phase runs when: from its first event to its last, or to the first of the next."""
        charges, spans = self.charges, self.spans
        device = spans.device[charges.span].astype(np.int64) if self.on_device else _same(-1, charges.span)
        counts = self._is_drawn(charges.span)
        if self.on_device:
            counts &= charges.work != COMMUNICATION  # runs beside what it waits for
        else:
            counts &= on_training_threads(self.found)[charges.span]
        for one in np.unique(device[counts]).tolist():
            here = np.flatnonzero(counts & (device == one))
            here = in_order(here, spans.start_ns[charges.span])
            phase, step = self.phase_of_place[charges.place[here]], self.steps.of_charge[here]
            first = np.flatnonzero(np.append(True, (np.diff(phase) != 0) | (np.diff(step) != 0)))
            start, ends = spans.start_ns[charges.span[here]], spans.end_ns[charges.span[here]]
            end = np.minimum(np.maximum.reduceat(ends, first), np.append(start[first[1:]], ends.max()))
            start, phase, step = start[first], phase[first], step[first]
            lane = self._lane("phases", "phases", None if one < 0 else one)
            yield _Part(
                _same(lane, start), start, end - start, self.first_phase + phase, _same(-1, start), phase,
                _same(-1, start), step, _same(-1, start),
            )  # fmt: skip

    def _threads(self) -> Iterator[_Part]:
        """The threads of the CPU: that of the steps, those of backward, then the others, the busiest first."""
        spans, found = self.spans, self.found
        lane = spans.lane[self.cpu]
        main = main_lane(found)
        with_nodes = set(np.unique(spans.lane[found.attribution.is_node]).tolist())
        counts = np.bincount(lane, minlength=1)
        work = np.full(len(spans), -1, dtype=np.int64)
        if not self.on_device:
            work[self.charges.span] = self.charges.work
        for one in sorted(np.unique(lane).tolist(), key=lambda i: (i != main, i not in with_nodes, -counts[i], i)):
            chosen = self.cpu[lane == one]
            tid = found.recording.lanes[one].tid
            number = tid if isinstance(tid, int) else one
            name = "main thread" if one == main else f"{'backward, ' * (one in with_nodes)}thread {number}"
            place = self.place_of[chosen]
            yield _Part(
                _same(self._lane("thread", name, None, main=one == main), chosen),
                spans.start_ns[chosen], spans.duration_ns[chosen], self.name[chosen],
                self.layer_of_place[place], self.phase_of_place[place], work[chosen],
                self.steps.of_span[chosen], chosen,
            )  # fmt: skip

    def _streams(self) -> Iterator[_Part]:
        """The streams of each device."""
        spans, charges = self.spans, self.charges
        events = charges.span[self.device]
        lane = spans.lane[events]
        first = dict(zip(lane[::-1].tolist(), events[::-1].tolist(), strict=True))
        keys = {one: (int(spans.device[event]), int(spans.stream[event])) for one, event in first.items()}
        for one in sorted(keys, key=lambda i: (*keys[i], i)):
            chosen = self.device[lane == one]
            place, span = charges.place[chosen], charges.span[chosen]
            device, stream = keys[one]
            yield _Part(
                _same(self._lane("stream", f"stream {stream}", device), chosen),
                spans.start_ns[span], spans.duration_ns[span], self.name[span],
                self.layer_of_place[place], self.phase_of_place[place], charges.work[chosen].astype(np.int64),
                self.steps.of_charge[chosen], span,
            )  # fmt: skip

    # -- gaps and sums ----------------------------------------------------------------------------

    def _gaps(self, idle: IdleGaps | None, row_of: Int64) -> dict[str, Int64]:
        """The long ones of the steps that are drawn."""
        keys = ("start_ns", "duration_ns", "device", "step", "layer", "phase", "op", "cause", "event")
        if idle is None:
            return {key: np.empty(0, dtype=np.int64) for key in keys}
        windows = self.steps.windows
        step = windows.place[idle.window]
        long_ns = np.minimum((windows.end_ns - windows.start_ns) // _LONG_GAP_SHARE, _LONG_GAP_NS)
        idle = idle.only(self.drawn[step] & (idle.length_ns >= long_ns[idle.window]))
        if not len(idle.start_ns):
            return self._gaps(None, row_of)
        why = meanwhile(self.found, idle, self.nesting, self.place_of)
        columns = (
            idle.start_ns - self.origin_ns, idle.length_ns, idle.device, windows.place[idle.window],
            why.layer, why.phase, np.where(why.event >= 0, self.name[why.event], -1), why.cause, row_of[why.event],
        )  # fmt: skip
        order = np.lexsort((idle.device, idle.start_ns))
        return {key: column[order] for key, column in zip(keys, columns, strict=True)}

    def _sums(self) -> dict[str, Int64]:
        """Per name, layer, phase, class and step what took time, and how many."""
        charges = self.charges
        columns = {
            "name": self.name[charges.span],
            "layer": self.layer_of_place[charges.place],
            "phase": self.phase_of_place[charges.place],
            "class": charges.work.astype(np.int64),
            "step": self.steps.of_charge,
        }
        key, least, widths = np.zeros(len(charges), dtype=np.int64), [], []
        for column in columns.values():
            least.append(int(column.min()))
            widths.append(int(column.max()) - least[-1] + 1)
            key = key * widths[-1] + (column - least[-1])
        keys, place = np.unique(key, return_inverse=True)
        found = {}
        for name, low, width in zip(reversed(columns), reversed(least), reversed(widths), strict=True):
            keys, digit = np.divmod(keys, width)
            found[name] = digit + low
        sums = {name: found[name] for name in columns}
        count = len(keys)
        return {
            **sums,
            "time_ns": sum_by_key(place, charges.time_ns, count),
            "count": np.bincount(place, minlength=count).astype(np.int64),
        }


def _same(value: int, like: Int64) -> Int64:
    return np.full(len(like), value, dtype=np.int64)


def _overlaps(times: Union, start_ns: Int64, end_ns: Int64) -> Bool:
    """Per interval whether some of it, or the instant at which it begins, is in these times."""
    overlaps: Bool = times.overlap(start_ns, np.maximum(end_ns, start_ns + 1)) > 0
    return overlaps
