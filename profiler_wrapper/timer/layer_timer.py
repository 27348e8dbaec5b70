"""`LayerTimer`: how long forward and backward of each block take, in a training loop or in a `TrainingMonitor`."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter_ns
from types import TracebackType
from typing import Any, NamedTuple

import msgspec
from torch import nn

from profiler_wrapper.capture.layers import find_stages
from profiler_wrapper.capture.owned_tensors import find_optimizers
from profiler_wrapper.capture.post_import import is_off
from profiler_wrapper.capture.runinfo import run_info
from profiler_wrapper.errors import Notices, WrongUse
from profiler_wrapper.timer.device_events import Accelerator, EventPool, Mark, Moment, StepClock, find_accelerator
from profiler_wrapper.timer.layer_spans import LayerSpans, StepSpans
from profiler_wrapper.timer.log import SpanLog, SpanPlace, checked_place, span_log, text_line, text_name
from profiler_wrapper.timer.steps import Boundaries, Breakdown, Wait

# --------------------------------------------------------------------------------------------------
# A step that was seen as rows: the step, its parts, the layers in them, and the waits for other ranks in all of these.
#
# Where there were waits, each row says how much of it they are, and its time on the device is without them.

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


def _write_step(log: SpanLog, step: SeenStep) -> None:
    """Lines of a step that the device has come to the end of; what it has not come to has no time there.

    Raises:
        OSError: the files cannot be made.
    """
    now = perf_counter_ns()
    if now >= log.look_at:
        log.look(now)
    heads, offset_ns = log.heads, log.offset_ns
    line_head = b'%b"step":%d,' % (heads[1], step.number)
    texts: list[bytes] = []
    lines: list[bytes] = []
    for kind, name, layer, (begin, first), (end, last), thread, depth, parent, more in rows_of(step):
        end = max(begin, end)
        device_ns = None if first is None else device_time_ns(first, last)
        if device_ns is not None and more is not None:
            device_ns = max(0, device_ns - more.device_waiting_ns)
        start_ns, lasted = begin + offset_ns, end - begin
        label, fixed = _fixed(kind, name, layer, depth, parent)
        told = b"" if more is None else _more(more)
        texts.append(text_line(heads[0], label, start_ns, start_ns + lasted, device_ns))
        lines += (
            b'%b%b"start_ns":%d,"duration_ns":%d,"thread":%d,%b"device_ns":'
            % (line_head, fixed, start_ns, lasted, thread, told),
            b"null}\n" if device_ns is None else b"%d}\n" % device_ns,
        )
    log.write(b"".join(texts), b"".join(lines), heads)


@functools.lru_cache(maxsize=4096)
def _fixed(kind: str, name: str, layer: str | None, depth: int, parent: str | None) -> tuple[bytes, bytes]:
    """What of its line of text, and of its JSON line, is the same in each step."""
    fields: dict[str, Any] = {"name": name, "kind": kind}
    if layer is not None:
        fields["layer"] = layer
    fields |= {"depth": depth, "parent": parent}
    return text_name(name), msgspec.json.encode(fields)[1:-1] + b","


def _more(more: More) -> bytes:
    fields = {name: value for name, value in zip(more._fields[:-1], more[:-1], strict=True) if value is not None}
    return msgspec.json.encode(fields)[1:-1] + b"," if fields else b""


MOST_STEPS = 1024  # that the device may be behind


class LayerWatch:
    """Layers, parts and steps of a loop, as spans of the rank's timer files. Its methods may raise.

    Args:
        model: as it is called in the loop, wrappers included, or a pipeline's schedule or stage.
        mark: makes the marks of the parts.
        on_failure: told of what fails where nobody could catch it.

    Attributes:
        parts: what listens; to be started, and told of each step's begin and end.
    """

    def __init__(
        self,
        model: object,
        place: SpanPlace,
        accelerator: Accelerator | None,
        notices: Notices,
        *,
        mark: Callable[[], Mark],
        on_failure: Callable[[str, Exception], None],
        optimizers: Sequence[Any] = (),
    ) -> None:
        events = None if accelerator is None else EventPool(accelerator, notices)
        self._layers = LayerSpans(model, events, on_failure, notices)
        stages = find_stages(model)
        self._stages = max(1, len(stages))
        # What a schedule calls are its stages' modules; nobody else holds this list. A model is not held.
        self._called = None if isinstance(model, nn.Module) else nn.ModuleList(stage.module for stage in stages)
        self.parts = self._layers.parts = Breakdown(
            mark,
            on_failure,
            model=model if isinstance(model, nn.Module) else self._called,
            optimizers=optimizers,
            notices=notices,
            listener=self._layers,
        )
        self._waiting: deque[SeenStep] = deque()
        self._log = span_log(_with_coordinates(place, model), notices)
        self._log.users += 1
        self._closed = False

    def begin_step(self) -> None:
        """A step begins; the parts have been told."""
        self._layers.begin_step()

    def forget_step(self) -> None:
        """The step that was begun is none."""
        self._layers.forget_step()

    def end_step(self) -> StepSpans:
        """The step has ended; the parts have been told."""
        return self._layers.end_step()

    def add(self, number: int, begin: Mark, end: Mark, boundaries: Boundaries, found: StepSpans) -> None:
        """Write a step as soon as the device has come to its end."""
        self._waiting.append(SeenStep(number, begin, end, boundaries, found, threading.get_native_id(), self._stages))
        self.pass_on()

    def leave_out(self, found: StepSpans) -> None:
        """A step that is not to be written."""
        self._layers.give_back(found.events)

    def pass_on(self, *, everything: bool = False) -> None:
        """Write the steps that the device has come to the end of, and those there are too many of."""
        waiting = self._waiting
        while waiting and (everything or len(waiting) > MOST_STEPS or waiting[0].end.reached):
            step = waiting.popleft()
            _write_step(self._log, step)
            if step.end.reached:
                self._layers.give_back(step.found.events)

    def close(self) -> None:
        """Write all there is, without waiting for the device, and let go of the files."""
        if self._closed:
            return
        self._closed = True
        self._layers.stop()
        self.parts.stop()
        self.pass_on(everything=True)
        if self._log.owner is not None:
            self._log.flush()
        self._log.users -= 1
        if self._log.users <= 0:
            self._log.close()

    def flush(self) -> Path | None:
        """Write what the device has come to; the path of the text."""
        self.pass_on()
        return self._log.flush()


def _with_coordinates(place: SpanPlace, model: object) -> SpanPlace:
    """As the model's own mesh or stages tell, where the user does not."""
    if place.device_mesh is not None or place.coordinates is not None:
        return place
    stages = find_stages(model)
    modules = [model] if isinstance(model, nn.Module) else [stage.module for stage in stages]
    info = run_info(modules=modules, stages=stages, environment=place.environment)
    return replace(place, coordinates=dict(info.coordinates) or None)


class LayerTimer:
    """Forward, backward and recompute of every block, and of what lies beside the blocks, in every step.

        with LayerTimer(model) as layers:
            for batch in batches:
                model(**batch).loss.backward(); optimizer.step(); optimizer.zero_grad()
                layers.step()

    Each is a span of `<run>/timers/timer_rank<k>.jsonl`, beside those of `Timer`: `layer` has the block's name in the
    plain model, `kind` is forward, backward or recompute, `parent` the part of the step that it lies in. The parts are
    spans, too: step, data, forward, backward, optimizer. Lines are written when the step has ended and the device has
    come there; nothing waits for it. The times are the CPU's, which are what counts without an accelerator, and with
    one those between events on the stream that the block was given to.

    No torch profiler is used, no module gets a hook, and gradients, random numbers and compiled code are what they are
    without this. A block's backward lasts from where the engine comes to what made its output to where it comes to
    what made its input. Where its inputs need no gradient it lasts until the graph ends. It is in two pieces, around
    the recompute, where its forward is computed again.

    What is not seen: modules in a model that is compiled as a whole, as no module is called there; a call of
    `model.forward()`; backward in compiled autograd.

    Waits for other ranks are spans of communication, and each span says how much of it they are (`waiting_ns`): where
    torch's Python code waits, as for FSDP's parameters and gradients, a tensor parallel sum or what another stage
    sends, and with DDP what is left of the backward behind the last block. The time on the device is without them.
    With an accelerator FSDP's wait for parameters is what is seen of it, not that for gradients. What waits in C++,
    such as collectives in compiled code, is part of the block that it lies in. See timer/rank_waits.py.

    Where a span fails to be made there is one warning, and no more spans; `PROFILER_WRAPPER=off` turns this off.

    Args:
        model: as the loop calls it, wrappers included; of `torch.distributed.pipelining` the schedule or the stage.
        output_dir, run_name, prefix, rank, world_size, device_mesh, device: as `Timer` takes them.
        optimizer: only its steps are the optimizer's part of a step, where a loop has several.

    Raises:
        WrongUse: an argument has a value that means nothing.
    """

    def __init__(
        self,
        model: Any,
        output_dir: str | os.PathLike[str] = "outputs",
        *,
        optimizer: Any = None,
        run_name: str | None = None,
        prefix: str = "profile",
        rank: int | None = None,
        world_size: int | None = None,
        device_mesh: Any = None,
        device: Any = None,
    ) -> None:
        if not isinstance(model, nn.Module) and not find_stages(model):
            raise WrongUse(
                f"model is a {type(model).__name__}. Give a torch.nn.Module, or a pipeline's schedule or stage."
            )
        place = checked_place(
            output_dir=output_dir,
            run_name=run_name,
            prefix=prefix,
            rank=rank,
            world_size=world_size,
            device_mesh=device_mesh,
        )
        self._notices = Notices()
        self._pid = os.getpid()
        self._off = is_off()
        self._begun: tuple[int, Mark] | None = None
        self._next = 0
        if self._off:
            return
        accelerator = find_accelerator(device)
        self._clock = StepClock(accelerator)
        self._watch = LayerWatch(
            model,
            place,
            accelerator,
            self._notices,
            mark=self._clock.mark,
            on_failure=_weakly_failing(weakref.ref(self)),
            optimizers=find_optimizers(optimizer),
        )
        self._finish = weakref.finalize(self, _finish, self._watch, self._pid, self._notices)

    def start(self) -> None:
        """The first step begins. A step that was begun is none."""
        self._guarded("start()", lambda: self._begin(self._clock.mark()))

    def step(self, number: int | None = None) -> None:
        """A step ends, and the next one begins; without `start()` the first call only begins one.

        Args:
            number: of the step that ends; by default one more than the last, from 0.
        """
        self._guarded("step()", lambda: self._step(number))

    def dump(self) -> Path | None:
        """Write what the device has come to, and go on; the file with the lines of text, None: there is none yet."""
        path: Path | None = self._guarded("dump()", lambda: self._watch.flush())
        return path

    def close(self) -> None:
        """Write everything, and listen no more. A step that has not ended is left out."""
        if not self._off and os.getpid() == self._pid:
            self._off = True
            self._finish()

    def __enter__(self) -> LayerTimer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _begin(self, mark: Mark) -> None:
        self._watch.parts.start()
        self._watch.parts.begin_step(mark)
        self._watch.begin_step()
        self._begun = self._next, mark

    def _step(self, number: int | None) -> None:
        mark, begun = self._clock.mark(), self._begun
        if begun is not None:
            boundaries = self._watch.parts.end_step()
            found = self._watch.end_step()
            told = begun[0] if number is None else int(number)
            self._next = told + 1
            self._watch.add(told, begun[1], mark, boundaries, found)
        self._begin(mark)

    def _guarded(self, what: str, action: Any) -> Any:
        if self._off or os.getpid() != self._pid:
            return None
        try:
            return action()
        except Exception as error:
            self._failed(what, error)
            return None

    def _failed(self, what: str, error: Exception) -> None:
        if not self._off:
            self._notices.once(
                "failed",
                f"layers are timed no more, because {what} failed: {type(error).__name__}: {error}; training goes on",
            )
            self.close()


def _weakly_failing(timer: weakref.ref[LayerTimer]) -> Any:
    def fail(what: str, error: Exception) -> None:
        there = timer()
        if there is not None:
            there._failed(what, error)

    return fail


def _finish(watch: LayerWatch, pid: int, notices: Notices) -> None:
    if os.getpid() == pid:
        try:
            watch.close()
        except Exception as error:
            notices.once("closing", f"the times of layers could not be ended: {type(error).__name__}: {error}")
