"""The spans that one thread has been in, as a tree by name; each knows the lines it is written as but for the times."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from profiler_wrapper.recording.span_names import kind_of_span

_LONGEST_NAME = 512
# JSON lines end so; the place of the device's time is filled in when it is known.
LINE_END: Final = b'"device_ns":null}\n'
LINE_END_WITH_ROOM: Final = b'"device_ns":null            }\n'
ROOM_BYTES: Final = len(b"null            ")
TEXT_END: Final = b"nanms\n"
_SECOND_NS: Final = 1_000_000_000
_ABOUT: Final = ("layer", "microbatch", "group", "bytes")

_encode = msgspec.json.Encoder().encode


class SpanNode:
    """One name within another. `text` and `line` hold from `begin` to `until`, by the monotonic clock.

    Attributes:
        end: `until`, if they are all there is to write; else 0.
        text: takes microseconds since `begin` at its start and at its end, and how many it lasted.
        line: takes the step, nanoseconds since `begin` at its start, and how many it lasted.
        plain: its lines are whole as the templates make them, unless there was communication in it.
        waiting_ns: communication within it since it was begun; None: none was ever seen there.
    """

    __slots__ = (
        "_fixed",
        "_label",
        "begin",
        "children",
        "depth",
        "end",
        "group",
        "inside_depth",
        "is_step",
        "kind",
        "line",
        "name",
        "parent",
        "plain",
        "step",
        "text",
        "thread",
        "until",
        "waiting_ns",
    )

    def __init__(self, name: str, parent: SpanNode | None, thread: int, about: Mapping[str, Any]) -> None:
        self.name, self.parent, self.thread = name, parent, thread
        self.children: dict[Any, SpanNode] = {}
        self.kind: str = str(about.get("kind") or kind_of_span(name))
        self.is_step = parent is not None and self.kind == "step"
        self.depth: int = 0 if parent is None else parent.inside_depth
        self.inside_depth: int = self.depth + (0 if parent is None or self.is_step else 1)
        self.step, self.group = about.get("step"), about.get("group")
        self.waiting_ns: int | None = None
        self.plain = self.step is None and self.kind != "communication" and not self.is_step
        self.begin = self.end = self.until = 0
        self.text = self.line = b""
        self._label = printable(name)
        self._fixed = _fixed(self, about)

    def renew(self, second: int, begin: int, end: int, heads: tuple[bytes, bytes]) -> None:
        """Make the templates for times from `begin` to `end`, within the second `second` since 1970.

        `heads`: what a line of the text and of the JSON lines begins with.
        """
        text, line = heads
        self.text = (
            b"%b%b, start=%d.%%06d, end=%d.%%06d, cpu_dur=0.%%06ds, cuda_dur=" % (text, self._label, second, second)
            + TEXT_END
        )
        self.line = line + b'"step":%b,' + self._fixed.replace(b"\0", b'"start_ns":%d%%09d,"duration_ns":%%d,' % second)
        self.begin, self.until, self.end = begin, end, end if self.plain else 0


def printable(name: str) -> bytes:
    """As the text log has it, for use in a template: one line, whatever the name holds."""
    return one_line(name).replace(b"%", b"%%")


def one_line(name: str) -> bytes:
    """As the text log has it."""
    clean = name if name.isprintable() else "".join(letter if letter.isprintable() else " " for letter in name)
    return clean[:_LONGEST_NAME].encode("utf-8", "replace") or b"(no name)"


def _fixed(node: SpanNode, about: Mapping[str, Any]) -> bytes:
    """What of its JSON line does not change; "\\0" stands for its times."""
    name = _quoted(node.name)
    above = node.parent
    parent = b"null" if above is None or above.parent is None else _quoted(above.name)
    middle = b"".join(
        b'"%b":%b,' % (key.encode(), _encode(about[key]).replace(b"%", b"%%"))
        for key in _ABOUT
        if about.get(key) is not None
    )
    return (
        b'"name":%b,"kind":%b,%b\0"depth":%d,"parent":%b,"thread":%d,'
        % (name, _quoted(node.kind), middle, node.depth, parent, node.thread)
        + LINE_END
    )


def _quoted(text: str) -> bytes:
    return _encode(text[:_LONGEST_NAME].encode("utf-8", "replace").decode()).replace(b"%", b"%%")


def text_line(head: bytes, name: str, start_ns: int, end_ns: int, *, device_ns: int | None = None) -> bytes:
    """The line of the text log, whatever the times. Nanoseconds since 1970."""
    start, end, duration = start_ns // 1000, end_ns // 1000, (end_ns - start_ns) // 1000
    return b"%b%b, start=%d.%06d, end=%d.%06d, cpu_dur=%d.%06ds, cuda_dur=%b" % (
        head,
        one_line(name),
        *divmod(start, 1_000_000),
        *divmod(end, 1_000_000),
        *divmod(duration, 1_000_000),
        TEXT_END if device_ns is None else b"%.3fms\n" % (device_ns / 1e6),
    )


class Sequences:
    """Counts how often a name has come in a step, for each group."""

    def __init__(self) -> None:
        self._step: object = None
        self._counts: dict[Any, itertools.count[int]] = {}

    def next(self, step: object, name: object) -> int:
        """From 0."""
        if step != self._step or len(self._counts) > 10_000:
            self._step, self._counts = step, {}
        count = self._counts.get(name)
        if count is None:
            count = self._counts.setdefault(name, itertools.count())
        return next(count)
