"""The spans that have begun and not ended, on each thread by themselves."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from typing import Any

from profiler_wrapper.live.span_nodes import SpanNode

# A span that was begun, when, the event on the device, and whether whoever began it ends it whatever happens.
Frame = tuple[SpanNode, int, Any, bool]

MOST_OPEN = 1000  # spans within one another
_MOST_NODES = 4096  # names within names that a thread remembers


class Stack(list[Frame]):
    """Those of one thread; at the bottom one that is none, whose node has all that the thread was in.

    Attributes:
        thread: its number, as the system has it.
    """

    __slots__ = ("__weakref__", "_nodes", "thread")

    def __init__(self) -> None:
        self.thread = threading.get_native_id()
        self._nodes = 0
        super().__init__([(SpanNode("", None, self.thread, {}), 0, None, True)])

    def node(self, name: str, about: Mapping[str, Any]) -> SpanNode:
        """That of a span that begins now. One that begins a step is not among the children by its name alone."""
        above = self[-1][0]
        key = (name, *sorted(about.items())) if about else name
        node = above.children.get(key) or above.children.get((name,))
        if node is None:
            self._nodes += 1
            if self._nodes > _MOST_NODES:
                self.forget_nodes()
            node = SpanNode(name, above, self.thread, about)
            above.children[(name,) if node.is_step and not about else key] = node
        return node

    def forget_nodes(self) -> None:
        """All but those of spans that are open, which are made anew when they are next needed."""
        for node, _, _, _ in list(self):
            node.children = {}
            node.end = 0
        self._nodes = len(self)

    def take(self, span: Any) -> Frame | None:
        """Remove the innermost span of that name, or exactly that one; None: it is not here."""
        name = str(span)
        for frame in reversed(self[1:]):
            if frame is span or frame[0].name == name or span is None:
                return self.remove_frame(frame)
        return None

    def remove_frame(self, wanted: Frame) -> Frame | None:
        """Exactly that one; None: another thread was quicker."""
        for place in range(len(self) - 1, 0, -1):
            if self[place] is wanted:
                del self[place]
                return wanted
        return None

    def take_above(self, wanted: Frame) -> list[Frame]:
        """Remove those that were begun within a span and that nobody is sure to end, the innermost first."""
        place = next((place for place, frame in enumerate(self) if frame is wanted), len(self))
        left = [frame for frame in self[place + 1 :] if not frame[3]]
        return [frame for frame in reversed(left) if self.remove_frame(frame)]

    def take_forgotten(self, name: str, before: int) -> list[Frame]:
        """Remove those of a name that were begun before a time, and that nobody is sure to end."""
        left = [frame for frame in self[1:] if frame[0].name == name and not frame[3] and frame[1] < before]
        return [frame for frame in left if self.remove_frame(frame)]

    def take_all(self) -> list[Frame]:
        """Remove all."""
        frames = self[1:]
        del self[1:]
        return frames


class _Local(threading.local):
    stack: Stack | None = None


class OpenSpans:
    """Those of all threads. `here.stack` is this thread's, once it was made."""

    def __init__(self) -> None:
        self.here = _Local()
        self._all: dict[int, weakref.ref[Stack]] = {}

    def new(self) -> Stack:
        """For this thread."""
        stack = self.here.stack = Stack()
        for key in [key for key, reference in list(self._all.items()) if reference() is None]:
            self._all.pop(key, None)
        self._all[id(stack)] = weakref.ref(stack)
        return stack

    def stacks(self) -> list[Stack]:
        """Of all threads that live."""
        return [stack for reference in list(self._all.values()) if (stack := reference()) is not None]

    def take_elsewhere(self, span: Any) -> Frame | None:
        """Remove the span of that name that was begun last on another thread, or exactly that one."""
        mine, name = self.here.stack, str(span)
        found = [
            (frame[1], number, stack, frame)
            for number, stack in enumerate(self.stacks())
            if stack is not mine
            for frame in stack[1:]
            if frame is span or frame[0].name == name
        ]
        if not found:
            return None
        _, _, stack, frame = max(found, key=lambda one: one[:2])
        return stack.remove_frame(frame)

    def forget_nodes(self) -> None:
        """Of all threads: their lines begin with something else from now on."""
        for stack in self.stacks():
            stack.forget_nodes()
