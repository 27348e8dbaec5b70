"""Steps, their parts and the layers in them as lines of the timer files."""

from __future__ import annotations

import functools
from time import perf_counter_ns
from typing import Any

import msgspec

from profiler_wrapper.live.log import SpanLog, text_line, text_name
from profiler_wrapper.live.step_rows import More, SeenStep, device_time_ns, rows_of


class LayerRows:
    """Writes them into a log, a step at a time."""

    def __init__(self, log: SpanLog) -> None:
        self._log = log

    def write(self, step: SeenStep) -> None:
        """One that the device has come to the end of; what it has not come to has no time there.

        Raises:
            OSError: the files cannot be made.
        """
        log = self._log
        now = perf_counter_ns()
        if now >= log.look_at:
            log.look(now)
        text_head, offset_ns = log.heads[0], log.offset_ns
        line_head = b'%b"step":%d,' % (log.heads[1], step.number)
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
            texts.append(text_line(text_head, label, start_ns, start_ns + lasted, device_ns))
            lines += (
                b'%b%b"start_ns":%d,"duration_ns":%d,"thread":%d,%b"device_ns":'
                % (line_head, fixed, start_ns, lasted, thread, told),
                b"null}\n" if device_ns is None else b"%d}\n" % device_ns,
            )
        log.write(b"".join(texts), b"".join(lines))


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
