"""What a timer keeps: the spans that are open, the step, the events on the device, and where all that is written."""

from __future__ import annotations

import multiprocessing
import multiprocessing.util
import sys
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter_ns
from typing import Any, Final

from profiler_wrapper.live.accelerator import Accelerator, find_accelerator
from profiler_wrapper.live.event_pool import EventPool
from profiler_wrapper.live.garbage_spans import GarbageSpans
from profiler_wrapper.live.open_spans import MOST_OPEN, Frame, OpenSpans, Stack
from profiler_wrapper.live.span_lines import SpanLines
from profiler_wrapper.live.span_log import span_log
from profiler_wrapper.live.span_nodes import SpanNode
from profiler_wrapper.live.span_place import SpanPlace
from profiler_wrapper.notices import Notices
from profiler_wrapper.recording.span_table import KINDS

_ABOUT: Final[Mapping[str, Callable[[Any], Any]]] = {
    "kind": str,
    "layer": str,
    "group": str,
    "microbatch": int,
    "bytes": int,
    "step": int,
}
_WAIT_S = 10.0  # for the device, when everything is written


class SpanRecorder:
    """Times are of the monotonic clock.

    Attributes:
        log, lines: where spans are written.
        open: those that have not ended; `here.stack` is this thread's.
        events: None without an accelerator.
    """

    def __init__(self, place: SpanPlace, notices: Notices, *, device: Any, watch_garbage: bool) -> None:
        self._notices, self._device, self._watch_garbage = notices, device, watch_garbage
        self.log = span_log(place, notices)
        self.log.users += 1
        self.log.moved.append(weakref.WeakMethod(self._forget_nodes))
        self._garbage: GarbageSpans | None = None
        self._begin()

    def _begin(self) -> None:
        self.lines = SpanLines(self.log)
        self.open = OpenSpans()
        self.here = self.open.here
        self.events: EventPool | None = None
        self._prepared = False
        self._steps_begun = False
        self._number: int | None = None  # of the step
        self._step_begin: int | None = None

    def after_fork(self) -> None:
        """In the child: the parent's spans are not its own, and it has no device."""
        self._begin()

    def new_stack(self) -> Stack:
        """For this thread, which begins its first span."""
        if not self._prepared:
            self._prepared = True
            self._prepare()
        if self._step_begin is None:
            self._step_begin = perf_counter_ns()
        return self.open.new()

    def _prepare(self) -> None:
        try:
            accelerator: Accelerator | None = find_accelerator(self._device)
        except Exception as error:
            accelerator = None
            self._notices.once("device", f"the timer tells no times on the device: {type(error).__name__}: {error}")
        if accelerator is not None:
            self.events = EventPool(accelerator, self.lines.tell, self._notices)
        if self._watch_garbage:
            self.watch_garbage()
        if multiprocessing.parent_process() is not None:  # such a process ends without the functions of atexit
            multiprocessing.util.Finalize(None, _dump, (weakref.ref(self),), exitpriority=10)

    def watch_garbage(self) -> None:
        """The pauses of the garbage collector are spans from now on."""
        if self._garbage is None:
            self._garbage = GarbageSpans(weakref.WeakMethod(self._pause))
            self._garbage.install()

    def node(self, stack: Stack, name: Any, about: Mapping[str, Any]) -> SpanNode:
        """That of a span that begins now, where it is not the plain case."""
        if len(stack) > MOST_OPEN:
            self._notices.once(
                "open", f"{MOST_OPEN} timed spans are open, {name!r} among them; those that nobody stopped are left out"
            )
            for frame in stack.take_all():
                self._give_back(frame[2])
        name = str(name)
        if self._step_begin is not None:
            for frame in stack.take_forgotten(name, self._step_begin):
                self._notices.once("open", f"the timed span {name!r} was begun and never stopped; it is left out")
                self._give_back(frame[2])
        node = stack.node(name, self._checked(about) if about else about)
        if node.is_step and not self._steps_begun and node.step is None:
            self._set_step(0 if self._number is None else self._number + 1)
        return node

    def close(self, node: SpanNode, start: int, end: int, event: Any) -> None:
        """Write a span that has ended, where it is not the plain case."""
        last = None
        if event is not None:
            last = None if self.events is None else self.events.record()
            if last is None:
                self._give_back(event)
        if last is None or self.events is None:
            self.lines.write(node, start, end)
            return
        unread = self.lines.write(node, start, end, (event, last))
        if unread is not None:
            self.events.add(unread)

    def stop_elsewhere(self, stack: Stack, span: Any, end: int) -> None:
        """End a span that is not the innermost of this thread."""
        frame = stack.take(span) or (None if span is None else self.open.take_elsewhere(span))
        if frame is None:
            self._notices.once("stop", f"the timer was to stop {_called(span)}, which it was not told to start")
        else:
            self.close(frame[0], frame[1], end, frame[2])

    def stop_within(self, frame: Frame) -> None:
        """End all spans that this thread began within one: an exception has ended them."""
        end = perf_counter_ns()
        stack = self.here.stack
        for node, start, event, _ in () if stack is None else stack.take_above(frame):
            self.close(node, start, end, event)

    def step(self, number: int | None) -> None:
        """A step begins; the one before, if one was begun, ends."""
        now = perf_counter_ns()
        if not self._steps_begun and number is None and self._step_begin is not None:
            self._number = 0  # all there was so far belongs to it
            self.lines.step = b"0"
            self.log.number_lines(0)
        self._steps_begun = True
        if self._number is not None and self._step_begin is not None:
            stack = self.here.stack
            self.lines.add(
                "step", self._step_begin, now, kind="step", step=self._number, thread=stack.thread if stack else None
            )
        self._step_begin = now
        self._set_step(number if number is not None else 0 if self._number is None else self._number + 1)

    def dump(self) -> Path | None:
        """Write everything; the path of the text, None: there is none. Waits for the device."""
        if self.events is not None:
            self.events.finish(_WAIT_S)
        if self._garbage is not None and self._garbage.short and self.log.text is not None:
            self.log.add_header(short_gc={"count": self._garbage.short, "duration_ns": self._garbage.short_ns})
        return self.log.flush()

    def finish(self) -> None:
        """Write everything, and let go of the files if nobody else writes them."""
        if self._garbage is not None:
            self._garbage.remove()
        error = _ended_by()
        if error is not None and self.log.text is not None:
            self.log.add_header(ended_by=error)
        self.dump()
        self.log.users -= 1
        if self.log.users <= 0:
            self.log.close()

    def _checked(self, about: Mapping[str, Any]) -> dict[str, Any]:
        """What is said of a span as the columns of the table have it; what means nothing there is left out."""
        checked: dict[str, Any] = {}
        for name, value in about.items():
            kind = _ABOUT.get(name)
            try:
                if value is not None and kind is not None:
                    checked[name] = kind(value)
            except (TypeError, ValueError, OverflowError):
                kind = None
            if kind is None or (name == "kind" and value is not None and value not in KINDS):
                checked.pop(name, None)
                self._notices.once("about", f"the timer leaves out {name}={value!r:.100}: it means nothing of a span")
        return checked

    def _set_step(self, number: int) -> None:
        self._number = number
        self.lines.step = b"%d" % number

    def _pause(self, start: int, end: int) -> None:
        """A pause of the garbage collector, on this thread."""
        if self.log.owner is None:  # there are no files yet, or this thread is just making them
            return
        stack = self.here.stack
        around = None if stack is None else stack[-1][0]
        self.lines.add(
            "gc",
            start,
            end,
            kind="gc",
            depth=0 if around is None else around.inside_depth,
            parent=around.name if around is not None and around.parent is not None else None,
            thread=None if stack is None else stack.thread,
        )

    def _give_back(self, event: Any) -> None:
        if self.events is not None:
            self.events.give_back(event)

    def _forget_nodes(self) -> None:
        self.open.forget_nodes()


def _called(span: Any) -> str:
    """What a user calls it."""
    return repr(span[0].name if isinstance(span, tuple) else span)[:200]


def _ended_by() -> str | None:
    """The error that ends this program; None: it ends well, or people type at it."""
    if hasattr(sys, "ps1") or sys.flags.interactive or "IPython" in sys.modules:
        return None
    error = getattr(sys, "last_type", None)  # of what nobody caught
    return error.__name__ if isinstance(error, type) else None


def _dump(recorder: weakref.ref[SpanRecorder]) -> None:
    there = recorder()
    if there is not None:
        there.dump()
