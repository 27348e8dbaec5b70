"""Spans of a timer: which have begun on each thread, the step they belong to, and the lines they are written as."""

from __future__ import annotations

import functools
import gc
import itertools
import multiprocessing
import multiprocessing.util
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns
from typing import Any, Final, TypedDict, get_type_hints

import msgspec

from profiler_wrapper.capture.torch_state import keep_dynamo_off
from profiler_wrapper.errors import Notices, in_a_line, shown
from profiler_wrapper.timer.device_events import Accelerator, Event, EventPool, find_accelerator
from profiler_wrapper.timer.log import PENDING_END, SpanPlace, json_name, span_log, text_line, text_name
from profiler_wrapper.trace.spans import KINDS, kind_of_span


class About(TypedDict, total=False):
    """What may be said of a span beside its name."""

    kind: str
    layer: str
    microbatch: int
    group: str
    bytes: int
    step: int


_ABOUT: Final[Mapping[str, Callable[[Any], Any]]] = get_type_hints(About)
_ABOUT_IN_ORDER: Final = ("layer", "microbatch", "group", "bytes")  # as JSON lines have it
_MOST_OPEN = 1000  # spans within one another
_MOST_SEQUENCES = 10_000  # kinds of communication that are counted in a step
_MOST_STEPS = 16  # that it is counted in at a time: spans with `step=` may come in any order
_SHORTEST_PAUSE_NS = 100_000  # of a pause for garbage that is a span; there are thousands of shorter ones a second
_WAIT_S = 10.0  # for the device, when everything is written
_NOTHING: Final[Mapping[str, Any]] = {}


class Label:
    """What the lines of all spans of a name have in common.

    Attributes:
        text: the name in the text log.
        json: name, kind and what else is said of the span.
        as_parent: the name in the JSON lines of spans within it.
    """

    __slots__ = ("as_parent", "is_communication", "is_step", "json", "name", "text")

    def __init__(self, name: str, about: Mapping[str, Any] = _NOTHING) -> None:
        kind = str(about.get("kind") or kind_of_span(name))
        fields = {"kind": kind, **{key: about[key] for key in _ABOUT_IN_ORDER if about.get(key) is not None}}
        self.name, self.text, self.as_parent = name, text_name(name), json_name(name)
        self.json = b'"name":%b,%b,' % (self.as_parent, msgspec.json.encode(fields)[1:-1])
        self.is_step, self.is_communication = kind == "step", kind == "communication"


_label = functools.lru_cache(maxsize=4096)(Label)


@dataclass(slots=True, eq=False)
class OpenSpan:
    """A span that has begun."""

    label: Label
    around: OpenSpan | None  # the one that it began in; None of the bottom of a stack, which is no span
    surely_ends: bool  # whoever begins it ends it whatever happens, as a block does
    about: Mapping[str, Any]  # what is said of it by itself
    thread: int | None  # its number, as the system has it; None: of one that has begun no span
    depth: int = 0
    depth_within: int = 0
    event: Event | None = None  # on the device, at its begin
    begin_ns: int = 0
    waiting_ns: int | None = None  # communication within it; None: there was none


class Stack(list[OpenSpan]):
    """The open spans of one thread, above one that is none.

    Attributes:
        step_begin_ns: of the step in which its last span began.
        left_open: there are spans of steps before, that nobody is sure to end.
    """

    __slots__ = ("__weakref__", "left_open", "step_begin_ns")

    def __init__(self) -> None:
        self.step_begin_ns: int | None = None
        self.left_open = False
        super().__init__([OpenSpan(_label(""), None, True, _NOTHING, threading.get_native_id())])

    def take(self, wanted: Any) -> OpenSpan | None:
        """Remove the innermost span of that name, or exactly that one; None: it is not here."""
        name = str(wanted)
        found = (span for span in reversed(self[1:]) if span is wanted or span.label.name == name)
        return next(map(self.remove_span, found), None)

    def remove_span(self, wanted: OpenSpan) -> OpenSpan | None:
        """Exactly that one; None: another thread was quicker."""
        try:
            self.remove(wanted)
        except ValueError:
            return None
        return wanted


class _Local(threading.local):
    stack: Stack | None = None


class SpanRecorder:
    """The spans of a timer. Times are of the monotonic clock (`time.perf_counter_ns`).

    Attributes:
        log: where spans are written.
        here: `here.stack` is this thread's.
        events: None without an accelerator.
    """

    def __init__(self, place: SpanPlace, notices: Notices, *, device: Any, watch_garbage: bool) -> None:
        self._notices, self._device, self._watch_garbage = notices, device, watch_garbage
        self.log = span_log(place, notices)
        self.log.recorders.add(self)
        self._garbage: Any = None  # in gc.callbacks
        self.reset()

    def reset(self) -> None:
        """As before the first span, also in a forked child: it has none of the parent's spans, and no device."""
        self.here = _Local()
        self._stacks: weakref.WeakValueDictionary[int, Stack] = weakref.WeakValueDictionary()
        self.events: EventPool | None = None
        self._prepared = False
        self._steps_begun = False
        self._number: int | None = None  # of the step
        self._step = b"null"  # as JSON lines have it
        self._step_begin_ns: int | None = None
        self._sequences: dict[bytes, dict[Any, Iterator[int]]] = {}  # of communication, by step

    # --- begin and end ---

    def start(self, name: str, surely_ends: bool, about: Mapping[str, Any]) -> OpenSpan:
        """A span begins within the innermost of this thread."""
        stack = self.here.stack or self._new_stack()
        if stack.step_begin_ns != self._step_begin_ns:
            stack.step_begin_ns = self._step_begin_ns
            stack.left_open = any(not span.surely_ends for span in stack)
        if stack.left_open or len(stack) > _MOST_OPEN:
            self._drop_left_open(stack, name)
        if about:
            about = self._checked(about)
            label = Label(name, about)
        else:
            label = _label(name)
        if label.is_step and not self._steps_begun and about.get("step") is None:
            self._set_step(0 if self._number is None else self._number + 1)
        around = stack[-1]
        depth = around.depth_within
        span = OpenSpan(label, around, surely_ends, about, around.thread, depth, depth if label.is_step else depth + 1)
        if self.events is not None:
            span.event = self.events.record()
        stack.append(span)
        span.begin_ns = perf_counter_ns()
        return span

    def stop(self, wanted: Any, end_ns: int) -> None:
        """A span ends: the innermost, if it is that one or has that name; else wherever it was begun."""
        stack = self.here.stack or self._new_stack()
        span: OpenSpan | None
        span = innermost = stack.pop()
        if not stack or (wanted is not None and innermost is not wanted and innermost.label.name != wanted):
            stack.append(innermost)
            span = stack.take(wanted) or (None if wanted is None else self._take_elsewhere(wanted))
        if span is None:
            called = shown(wanted.label.name if isinstance(wanted, OpenSpan) else wanted)
            self._notices.warn_once("stop", f"the timer was to stop {called}, which it was not told to start")
        else:
            self._end(span, end_ns)

    def stop_within(self, around: OpenSpan) -> None:
        """End all spans that this thread began within one and nobody is sure to end: an exception has ended them."""
        end_ns = perf_counter_ns()
        stack = self.here.stack
        if stack is not None and around in stack:
            for span in reversed(stack[stack.index(around) + 1 :]):
                if not span.surely_ends and stack.remove_span(span):
                    self._end(span, end_ns)

    def step(self, number: int | None) -> None:
        """A step begins; the one before, if one was begun, ends."""
        now = perf_counter_ns()
        if not self._steps_begun and number is None and self._step_begin_ns is not None:
            self._set_step(0)  # all there was so far belongs to it
            self.log.number_lines(0)
        self._steps_begun = True
        if self._number is not None and self._step_begin_ns is not None:
            self._write("step", self._step_begin_ns, now, within=0)
        self._step_begin_ns = now
        self._set_step(number if number is not None else 0 if self._number is None else self._number + 1)

    def watch_garbage(self) -> None:
        """The pauses of the garbage collector are spans from now on."""
        if self._garbage is None:
            self._garbage = _pauses(weakly(self._pause))
            gc.callbacks.append(self._garbage)

    def dump(self) -> Path | None:
        """Write everything; the path of the text, None: there is none. Waits for the device."""
        if self.events is not None:
            self.events.finish(_WAIT_S)
        return self.log.flush()

    def finish(self) -> None:
        """Write everything, and let go of the files if nobody else writes them."""
        if self._garbage in gc.callbacks:
            gc.callbacks.remove(self._garbage)
        error = _ended_by()
        if error is not None and self.log.owner is not None:
            self.log.add_header(ended_by=error)
        self.dump()
        self.log.release()

    # --- what is open ---

    def _new_stack(self) -> Stack:
        """For this thread, which begins its first span."""
        if not self._prepared:
            self._prepared = True
            self._prepare()
        if self._step_begin_ns is None:
            self._step_begin_ns = perf_counter_ns()
        stack = self.here.stack = Stack()
        self._stacks[id(stack)] = stack
        return stack

    def _prepare(self) -> None:
        try:
            accelerator: Accelerator | None = find_accelerator(self._device)
        except Exception as error:
            accelerator = None
            self._notices.warn_once("device", f"the timer tells no times on the device: {in_a_line(error)}")
        if accelerator is not None:
            self.events = EventPool(accelerator, self._notices)
        if self._watch_garbage:
            self.watch_garbage()
        if multiprocessing.parent_process() is not None:  # such a process ends without the functions of atexit
            multiprocessing.util.Finalize(None, weakly(self.dump), exitpriority=10)

    def _take_elsewhere(self, wanted: Any) -> OpenSpan | None:
        """Remove the span of that name that was begun last on another thread, or exactly that one."""
        mine, name = self.here.stack, str(wanted)
        stacks = [stack for reference in self._stacks.valuerefs() if (stack := reference()) is not None]
        found = [
            (span, stack)
            for stack in reversed(stacks)
            if stack is not mine
            for span in stack[1:]
            if span is wanted or span.label.name == name
        ]
        if not found:
            return None
        span, stack = max(found, key=lambda one: one[0].begin_ns)
        return stack.remove_span(span)

    def _drop_left_open(self, stack: Stack, name: str) -> None:
        """Forget spans that nobody stopped: of that name and a step before, or all where there are too many."""
        if len(stack) > _MOST_OPEN:  # same: asked where more are open
            self._notices.warn_once(
                "open",
                f"{_MOST_OPEN} timed spans are open, {shown(name)} among them; those that nobody stopped are left out",
            )
            dropped = stack[1:]
        else:
            begin_ns = self._step_begin_ns or 0
            dropped = [s for s in stack[1:] if s.label.name == name and not s.surely_ends and s.begin_ns < begin_ns]
        for span in dropped:
            self._notices.warn_once("open", f"the timed span {shown(name)} was begun and never stopped; it is left out")
            if stack.remove_span(span) and self.events is not None:
                self.events.give_back(span.event)

    def _checked(self, about: Mapping[str, Any]) -> dict[str, Any]:
        """What is said of a span, by the types of the table's columns; what means nothing there is left out."""
        checked: dict[str, Any] = {}
        for name, value in about.items():
            try:
                if value is not None:
                    checked[name] = _ABOUT[name](value)
                    if name == "kind" and value not in KINDS:
                        raise ValueError(value)
            except (KeyError, TypeError, ValueError, OverflowError):
                checked.pop(name, None)
                self._notices.warn_once(
                    "about", f"the timer leaves out {name}={shown(value)}: it means nothing of a span"
                )
        return checked

    def _set_step(self, number: int) -> None:
        self._number = number
        self._step = b"%d" % number

    # --- what is written ---

    def _end(self, span: OpenSpan, end_ns: int) -> None:
        """Write a pair of lines; with events the line of text comes when the device's time is known. Raises OSError."""
        log, label, around, events, waiting_ns = self.log, span.label, span.around, self.events, span.waiting_ns
        if end_ns >= log.look_at:
            log.look(end_ns)
        step = self._step if "step" not in span.about else b"%d" % span.about["step"]
        more = b""
        if label.is_communication:
            more = b'"sequence":%d,' % self._next_sequence(step, label.name, span.about.get("group"))
            waiting_ns = end_ns - span.begin_ns
        elif waiting_ns is not None:
            more = b'"waiting_ns":%d,' % waiting_ns
        if waiting_ns is not None and around is not None:
            around.waiting_ns = (around.waiting_ns or 0) + waiting_ns
        begin, end = span.begin_ns + log.offset_ns, end_ns + log.offset_ns
        in_step = b'"step":%b,' % step  # apart, since `number_lines` may change it
        line = b'%b"start_ns":%d,"duration_ns":%d,"depth":%d,"parent":%b,%b%b' % (
            label.json,
            begin,
            end - begin,
            span.depth,
            b"null" if around is None or around.around is None else around.label.as_parent,
            b"" if span.thread is None else b'"thread":%d,' % span.thread,
            more,
        )
        last = None if span.event is None or events is None else events.record()
        if events is None or span.event is None or last is None:
            log.write((text_line(label.text, begin, end),), (in_step + line + b'"device_ns":null}\n',))
            if events is not None:
                events.give_back(span.event)
            return
        line += PENDING_END
        line_end = log.write((), (in_step + line,), pending=True)

        def write_device_time(device_ns: int | None) -> None:
            if device_ns is not None:
                log.fill_in(line_end, line, device_ns)
            log.write((text_line(label.text, begin, end, device_ns),), ())

        events.add(span.event, last, write_device_time)

    def _write(self, name: str, begin_ns: int, end_ns: int, *, within: int) -> None:
        """A span that nobody began, as a step, within that one of the thread's stack."""
        stack = self.here.stack
        around = None if stack is None else stack[within]
        thread, depth = (None, 0) if around is None else (around.thread, around.depth_within)
        span = OpenSpan(_label(name), around, True, _NOTHING, thread, depth, begin_ns=begin_ns)
        self._end(span, end_ns)

    def _next_sequence(self, step: bytes, *communication: object) -> int:
        """How often that communication has come in its step, from 0. Threads may ask at the same time."""
        counts = self._sequences.get(step)
        if counts is None:
            counts = self._sequences.setdefault(step, {})
            for old in list(self._sequences)[:-_MOST_STEPS]:
                self._sequences.pop(old, None)
        elif len(counts) > _MOST_SEQUENCES:
            counts.clear()
        return next(counts.setdefault(communication, itertools.count()))

    def _pause(self, begin_ns: int, end_ns: int) -> None:
        """A pause of the garbage collector, on this thread."""
        if self.log.owner is not None:  # else there are no files yet, or this thread is just making them
            self._write("gc", begin_ns, end_ns, within=-1)


def weakly(method: Callable[..., object]) -> Callable[..., None]:
    """Calls a method of an object that may be gone, and does not hold it."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        if (there := reference()) is not None:
            there(*args)

    return call


def _pauses(long_pause: Callable[[int, int], None]) -> Callable[[str, dict[str, Any]], None]:
    """For `gc.callbacks`: calls `long_pause(begin_ns, end_ns)` after each long one, on the thread that had it."""
    begin_ns = 0

    def heard(phase: str, info: dict[str, Any]) -> None:
        nonlocal begin_ns
        now = perf_counter_ns()
        if phase == "start":
            begin_ns = now
        elif begin_ns and now - begin_ns >= _SHORTEST_PAUSE_NS:
            long_pause(begin_ns, now)

    keep_dynamo_off(heard, and_below=True)  # it may be called in the midst of a function that is compiled
    return heard


def _ended_by() -> str | None:
    """The error that ends this program; None: it ends well, or people type at it."""
    if hasattr(sys, "ps1") or sys.flags.interactive or "IPython" in sys.modules:
        return None
    error = getattr(sys, "last_type", None)  # of what nobody caught
    return error.__name__ if isinstance(error, type) else None
