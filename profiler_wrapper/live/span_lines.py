"""Spans as lines of the log, also those that take longer to write: on a device, or of communication."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from profiler_wrapper.live.accelerator import Event
from profiler_wrapper.live.line_files import Unread
from profiler_wrapper.live.span_log import SpanLog
from profiler_wrapper.live.span_nodes import (
    LINE_END,
    LINE_END_WITH_ROOM,
    ROOM_BYTES,
    TEXT_END,
    Sequences,
    SpanNode,
    text_line,
)

_ROOM_FROM_END = ROOM_BYTES + len(b"}\n")

_encode = msgspec.json.Encoder().encode


class SpanLines:
    """Writes spans into a log. Times are of the monotonic clock (`time.perf_counter_ns`).

    Attributes:
        step: the one that spans belong to, as JSON lines have it.
    """

    def __init__(self, log: SpanLog) -> None:
        self.log = log
        self.step = b"null"
        self._sequences = Sequences()

    def write(self, node: SpanNode, start: int, end: int, events: tuple[Event, Event] | None = None) -> Unread | None:
        """A span has ended. With events it is returned, and the device's time can be told later."""
        log = self.log
        if not node.begin <= start < node.until:
            node.renew(*log.era(start), log.heads)
        begin, lasted = node.begin, end - start
        step = self.step if node.step is None else b"%d" % node.step
        line = node.line % (step, start - begin, lasted)
        if end < node.until:
            text = node.text % ((start - begin) // 1000, (end - begin) // 1000, lasted // 1000)
        else:
            text = text_line(log.heads[0], node.name, start + log.offset_ns, end + log.offset_ns)
            node.renew(*log.era(end), log.heads)
        if node.plain and node.waiting_ns is None:
            if events is None:
                log.write(text, line)
                return None
            line = line[: -len(LINE_END)] + LINE_END_WITH_ROOM
        else:
            ending = LINE_END if events is None else LINE_END_WITH_ROOM
            line = line[: -len(LINE_END)] + self._more(node, step, lasted) + ending
            if events is None:
                log.write(text, line)
                return None
        unread = Unread(*events, text, len(line) - _ROOM_FROM_END)
        log.write(b"", line, unread)
        return unread

    def tell(self, unread: Unread, device_ns: int | None) -> None:
        """The device's time of a span that was written without it."""
        self.log.write_device_time(unread, device_ns)
        text = unread.text
        if device_ns is not None:
            text = text[: -len(TEXT_END)] + b"%.3fms\n" % (device_ns / 1e6)
        self.log.write(text, b"")

    def add(self, name: str, start: int, end: int, *, device_ns: int | None = None, **columns: Any) -> None:
        """A span that no thread was in, as a layer's or a pause: `columns` as in `SPAN_COLUMNS`, None left out."""
        log = self.log
        log.era(start)
        row: Mapping[str, Any] = {
            "step": None,
            "name": name,
            "start_ns": start + log.offset_ns,
            "duration_ns": end - start,
            "depth": 0,
            "parent": None,
            **{key: value for key, value in columns.items() if value is not None},
            "device_ns": device_ns,
        }
        if row["step"] is None:
            row = {**row, "step": msgspec.Raw(self.step)}
        text = text_line(log.heads[0], name, start + log.offset_ns, end + log.offset_ns, device_ns=device_ns)
        log.write(text, log.heads[1] + _encode(row)[1:] + b"\n")

    def _more(self, node: SpanNode, step: bytes, lasted: int) -> bytes:
        """What else there is to say of a span, and what is to be said of the one around it."""
        more = b""
        communication = node.kind == "communication"
        waited = lasted if communication else node.waiting_ns
        if waited is not None:
            above = node.parent
            if above is not None and above.parent is not None:
                above.waiting_ns = (above.waiting_ns or 0) + waited
                above.end = 0  # its lines are not plain
            if not communication:
                more += b'"waiting_ns":%d,' % waited
                node.waiting_ns, node.end = None, node.until if node.plain else 0
        if communication:
            more += b'"sequence":%d,' % self._sequences.next(step, (node.name, node.group))
        return more
