"""`LayerTimer`: how long forward and backward of each block take, in a training loop or in a `TrainingMonitor`."""

from __future__ import annotations

import functools
import os
import weakref
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import msgspec
from torch import nn

from profiler_wrapper.capture.layers import Stage, find_stages
from profiler_wrapper.capture.owned_tensors import find_optimizers
from profiler_wrapper.capture.runinfo import run_info
from profiler_wrapper.capture.steps import is_off
from profiler_wrapper.errors import Notices, WrongUse, in_a_line
from profiler_wrapper.timer.device_events import (
    Accelerator,
    EventPool,
    Mark,
    StepClock,
    find_accelerator,
    nanoseconds_between,
)
from profiler_wrapper.timer.layer_spans import LayerSpans, SeenStep, Span
from profiler_wrapper.timer.log import SpanLog, SpanPlace, span_log, text_line, text_name
from profiler_wrapper.timer.spans import weakly
from profiler_wrapper.timer.timer import harmless

# --- a step as spans: the step, its parts, the layers in them, and the waits for other ranks in all of these ---

_PARTS_AROUND = {"forward": "forward", "backward": "backward", "recompute": "backward"}
AFTER_BACKWARD = "collectives after backward"  # until the engine returns: what DDP waits for
_OPTIONAL = ("microbatch", "waiting_ns", "sequence", "group", "bytes")  # as JSON lines have them


def spans_of(step: SeenStep) -> list[Span]:
    """All of a step, the step first, the waits for other ranks last.

    Where there were waits, each other span says how much of it they are, and its time on the device is without them.
    """
    counts = Counter(part for part, _ in step.boundaries)
    # Each forward of the step is of another micro-batch; where a rank has several stages, nothing tells.
    numbered = step.stages == 1 and counts["forward"] == counts["backward"] > 1
    parts, layers = list(_parts(step, numbered)), step.spans
    for span in layers:
        span.thread = span.thread or step.thread
        if step.boundaries:
            span.depth, span.parent = 1, _PARTS_AROUND[span.kind]
        if not numbered:
            span.microbatch = None
    whole = Span("step", "step", step.begin, step.end, step.thread)
    return [whole, *parts, *layers, *_waits(step, parts, layers)]


def _parts(step: SeenStep, numbered: bool) -> Iterator[Span]:
    """The parts, and with DDP, before a backward, what is left of it when its graph had been run."""
    seen: Counter[str] = Counter()
    stops = [mark for _, mark in step.boundaries[1:]] + [step.end]
    sequence = 0
    for (part, begin), stop in zip(step.boundaries, stops, strict=bool(step.boundaries)):
        if part == "other":
            continue
        span = Span(part, part, begin, stop, step.thread)
        if part in ("forward", "backward") and numbered:
            span.microbatch = seen[part]
            seen[part] += 1
        for end, group in step.ends if part == "backward" else ():
            if group is not None and span.begin[0] <= end[0] <= span.end[0]:
                rest = Span("communication", AFTER_BACKWARD, end, span.end, step.thread, sequence=sequence, group=group)
                rest.depth, rest.parent = 1, part
                yield rest
                sequence += 1
                span.waiting_ns = span.end[0] - end[0]
        yield span


def _waits(step: SeenStep, parts: list[Span], layers: list[Span]) -> Iterator[Span]:
    """The waits, each in the innermost span of its thread, and in the times of those around it."""
    if not step.waits:  # DDP, or what is compiled, may have waited where nobody looks
        return
    parts = [span for span in parts if span.kind != "communication"]
    for span in (*parts, *layers):
        span.waiting_ns = span.waiting_ns or 0
    part_around = _finder(parts)
    forward_around = _finder(span for span in layers if span.kind == "forward")
    backward_around = _finder(span for span in layers if span.kind != "forward")
    counts: Counter[tuple[str, str]] = Counter()
    for wait in step.waits:
        trains = wait.in_graph or wait.thread == step.thread
        layer = backward_around(wait) if wait.in_graph else forward_around(wait)
        if layer is not None and not wait.in_graph and layer.thread != wait.thread:
            layer = None
        part = part_around(wait) if trains else None
        device_ns = nanoseconds_between(wait.begin[1], wait.end[1]) or 0
        for one in (part, layer):
            if one is not None:
                one.waiting_ns = (one.waiting_ns or 0) + wait.end[0] - wait.begin[0]
                one.device_waiting_ns += device_ns
        around = layer or part
        if trains:
            wait.thread = step.thread
        if around is not None:
            wait.depth, wait.parent = around.depth + 1, around.name
        if wait.group is not None:
            wait.sequence = counts[wait.name, wait.group]
            counts[wait.name, wait.group] += 1
        yield wait


def _finder(spans: Iterable[Span]) -> Callable[[Span], Span | None]:
    """Which of these spans, of which none lies in another, a wait lies in."""
    in_order = sorted(spans, key=lambda span: span.begin[0])
    begins = [span.begin[0] for span in in_order]

    def around(wait: Span) -> Span | None:
        place = bisect_right(begins, wait.begin[0]) - 1
        return in_order[place] if place >= 0 and wait.end[0] <= in_order[place].end[0] else None

    return around


def _write_step(log: SpanLog, step: SeenStep) -> None:
    """Lines of a step that the device has come to the end of; what it has not come to has no time. Raises OSError."""
    now = perf_counter_ns()
    if now >= log.look_at:  # same: a nanosecond later is as good
        log.look(now)
    texts: list[bytes] = []
    lines: list[bytes] = []
    for span in spans_of(step):
        (begin, first), (end, last) = span.begin, span.end
        device_ns = nanoseconds_between(first, last)
        if device_ns is not None:
            device_ns = max(0, device_ns - span.device_waiting_ns)
        start_ns, lasted = begin + log.offset_ns, max(0, end - begin)
        label, fixed = _fixed(span.kind, span.name, span.layer, span.depth, span.parent)
        known = {name: value for name in _OPTIONAL if (value := getattr(span, name)) is not None}
        texts.append(text_line(label, start_ns, start_ns + lasted, device_ns))
        lines.append(
            b'"step":%d,%b"start_ns":%d,"duration_ns":%d,"thread":%d,%b"device_ns":%b}\n'
            % (
                step.number,
                fixed,
                start_ns,
                lasted,
                span.thread,
                msgspec.json.encode(known)[1:-1] + b"," if known else b"",
                b"null" if device_ns is None else b"%d" % device_ns,
            )
        )
    log.write(texts, lines)


@functools.lru_cache(maxsize=4096)
def _fixed(kind: str, name: str, layer: str | None, depth: int, parent: str | None) -> tuple[bytes, bytes]:
    """What of its line of text, and of its JSON line, is the same in each step."""
    fields = {"name": name, "kind": kind, "layer": layer, "depth": depth, "parent": parent}
    if layer is None:
        del fields["layer"]
    return text_name(name), msgspec.json.encode(fields)[1:-1] + b","


# --- the steps of a loop ---

MOST_STEPS = 1024  # that the device may be behind


class LayerWatch(LayerSpans):
    """Layers, parts and steps of a loop, as spans of the rank's timer files. Its methods may raise.

    It is to be started, and told of the begin and end of each step.

    Args:
        model: as it is called in the loop, wrappers included, or a pipeline's schedule or stage.
        others: see `Breakdown`.
    """

    def __init__(
        self, model: object, place: SpanPlace, accelerator: Accelerator | None, notices: Notices, **others: Any
    ) -> None:
        stages = find_stages(model)
        events = None if accelerator is None else EventPool(accelerator, notices)
        super().__init__(model, stages, events, notices=notices, **others)
        self._waiting: deque[SeenStep] = deque()
        self._log = span_log(_with_coordinates(place, model, stages), notices)
        self._closed = False

    def add(self, number: int, begin: Mark, end: Mark) -> None:
        """Write the step that has just ended as soon as the device has come to its end."""
        self._waiting.append(self.take(number, begin, end))
        self.pass_on()

    def pass_on(self, *, everything: bool = False) -> None:
        """Write the steps that the device has come to the end of, and those there are too many of."""
        waiting = self._waiting
        while waiting and (everything or len(waiting) > MOST_STEPS or waiting[0].end.reached):
            step = waiting.popleft()
            _write_step(self._log, step)
            if step.end.reached:
                self.give_back(step.events)

    def close(self) -> None:
        """Write all there is, without waiting for the device, and let go of the files."""
        if self._closed:
            return
        self._closed = True  # same: closed once
        self.stop()
        self.pass_on(everything=True)
        self._log.flush()
        self._log.release()

    def flush(self) -> Path | None:
        """Write what the device has come to; the path of the text."""
        self.pass_on()
        return self._log.flush()


def _with_coordinates(place: SpanPlace, model: object, stages: Sequence[Stage]) -> SpanPlace:
    """As the model's own mesh or stages tell, where the user does not."""
    if place.device_mesh is not None or place.coordinates is not None:
        return place
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
    such as collectives in compiled code, is part of the block that it lies in. See timer/steps.py.

    Where a span fails to be made there is one warning, and no more spans; `PROFILER_WRAPPER=off` turns this off.

    Args:
        model: as the loop calls it, wrappers included; of `torch.distributed.pipelining` the schedule or the stage.
        output_dir: as `Timer` takes it, and so are the others below.
        optimizer: only its steps are the optimizer's part of a step, where a loop has several.
        run_name: name of the run's directory.
        prefix: what a name by the job or the time begins with.
        rank: of this process.
        world_size: ranks of the job.
        device_mesh: the `DeviceMesh` of the job.
        device: "cpu": no times of an accelerator.

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
        place = SpanPlace(
            output_dir=output_dir,  # type: ignore[arg-type]  # made a path
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
            on_failure=weakly(self._failed),
            optimizers=find_optimizers(optimizer),
        )
        self._finish = weakref.finalize(self, _finish, self._watch, self._pid, self._notices)

    @property
    def _active(self) -> bool:
        """It is on, in the process that it was made in."""
        return not self._off and os.getpid() == self._pid

    @harmless
    def start(self) -> None:
        """The first step begins. A step that was begun is none."""
        self._begin(self._clock.mark())

    @harmless
    def step(self, number: int | None = None) -> None:
        """A step ends, and the next one begins; without `start()` the first call only begins one.

        Args:
            number: of the step that ends; by default one more than the last, from 0.
        """
        mark, begun = self._clock.mark(), self._begun
        if begun is not None:
            self._watch.end_step()
            ended = begun[0] if number is None else int(number)
            self._next = ended + 1
            self._watch.add(ended, begun[1], mark)
        self._begin(mark)

    @harmless
    def dump(self) -> Path | None:
        """Write what the device has come to, and go on; the file with the lines of text, None: there is none yet."""
        return self._watch.flush()

    def close(self) -> None:
        """Write everything, and listen no more. A step that has not ended is left out."""
        if self._active:
            self._off = True
            self._finish()

    def __enter__(self) -> LayerTimer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self, mark: Mark) -> None:
        self._watch.start()
        self._watch.begin_step(mark)
        self._begun = self._next, mark

    def _failed(self, what: str, error: Exception) -> None:
        """Something has failed: one warning, and no more layers."""
        if not self._off:
            self._notices.warn_once(
                "failed", f"layers are timed no more, because {what} failed: {in_a_line(error)}; training goes on"
            )
            self.close()


def _finish(watch: LayerWatch, pid: int, notices: Notices) -> None:
    if os.getpid() == pid:
        try:
            watch.close()
        except Exception as error:
            notices.warn_once("closing", f"the times of layers could not be ended: {in_a_line(error)}")
