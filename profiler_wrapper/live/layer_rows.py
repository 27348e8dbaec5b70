"""Steps, their parts and the layers in them as lines of the timer files."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from profiler_wrapper.live.backward_runs import Moment
from profiler_wrapper.live.breakdown import Boundaries
from profiler_wrapper.live.layer_spans import StepSpans
from profiler_wrapper.live.span_log import SpanLog
from profiler_wrapper.live.span_nodes import text_line
from profiler_wrapper.live.step_clock import Mark

AFTER_BACKWARD = "after the last block"  # until the engine returns: what DDP waits for


@dataclass(frozen=True, slots=True)
class SeenStep:
    """A step that has ended on the host."""

    number: int
    begin: Mark
    end: Mark
    boundaries: Boundaries
    found: StepSpans
    thread: int


class _Row(NamedTuple):
    kind: str
    name: str
    layer: str | None
    begin: Moment
    end: Moment
    thread: int
    parent: str | None = None  # None: it lies in nothing but the step
    microbatch: int | None = None
    waiting_ns: int | None = None
    sequence: int | None = None
    group: str | None = None


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
        log.era(step.found.spans[0].begin[0] if step.found.spans else _moment(step.begin)[0])
        (text_head, line_head), offset_ns = log.heads, log.offset_ns
        texts, lines = [], []
        for row in _rows(step):
            start, end = row.begin[0], max(row.begin[0], row.end[0])
            device_ns = _device_ns(row.begin[1], row.end[1])
            fixed = _fixed(row.kind, row.name, row.layer, row.parent)
            more = b"" if row[7:] == (None, None, None, None) else _more(row)
            lines.append(
                b'%b"step":%d,%b"start_ns":%d,"duration_ns":%d,"thread":%d,%b"device_ns":%b}\n'
                % (
                    line_head,
                    step.number,
                    fixed,
                    start + offset_ns,
                    end - start,
                    row.thread,
                    more,
                    b"null" if device_ns is None else b"%d" % device_ns,
                )
            )
            texts.append(text_line(text_head, row.name, start + offset_ns, end + offset_ns, device_ns=device_ns))
        log.write(b"".join(texts), b"".join(lines))


def _rows(step: SeenStep) -> Iterator[_Row]:
    thread = step.thread
    yield _Row("step", "step", None, _moment(step.begin), _moment(step.end), thread)
    counts = Counter(part for part, _ in step.boundaries)
    numbered = counts["forward"] == counts["backward"] > 1
    seen: Counter[str] = Counter()
    stops = [mark for _, mark in step.boundaries[1:]] + [step.end]
    sequence = 0
    for (part, begin), stop in zip(step.boundaries, stops, strict=True):
        if part == "other":
            continue
        row = _Row(part, part, None, _moment(begin), _moment(stop), thread)
        if numbered and part in ("forward", "backward"):
            row = row._replace(microbatch=seen[part])
            seen[part] += 1
        for end, group in step.found.ends if part == "backward" else ():
            if group is not None and row.begin[0] <= end[0] <= row.end[0]:
                name = AFTER_BACKWARD
                yield _Row("communication", name, None, end, row.end, thread, part, sequence=sequence, group=group)
                sequence += 1
                row = row._replace(waiting_ns=row.end[0] - end[0])
        yield row
    for kind, unit, start, stop_, microbatch, own_thread in step.found.spans:
        parent = ("forward" if kind == "forward" else "backward") if step.boundaries else None
        number = microbatch if numbered else None
        name = f"{unit.name} {kind}"
        yield _Row(kind, name, unit.name, start, stop_, own_thread or thread, parent, number)


@functools.lru_cache(maxsize=4096)
def _fixed(kind: str, name: str, layer: str | None, parent: str | None) -> bytes:
    """What of its JSON line is the same in each step."""
    fields: dict[str, Any] = {"name": name, "kind": kind}
    if layer is not None:
        fields["layer"] = layer
    fields |= {"depth": 0 if parent is None else 1, "parent": parent}
    return msgspec.json.encode(fields)[1:-1] + b","


def _more(row: _Row) -> bytes:
    fields = {key: value for key, value in zip(row._fields[7:], row[7:], strict=True) if value is not None}
    return msgspec.json.encode(fields)[1:-1] + b","


def _moment(mark: Mark) -> Moment:
    return round(mark.host_s * 1e9), mark.event


def _device_ns(begin: Any, end: Any) -> int | None:
    if begin is None or end is None:
        return None
    try:
        if begin.query() and end.query():
            milliseconds: float = begin.elapsed_time(end)
            return max(0, round(milliseconds * 1e6))
    except RuntimeError:  # events of two devices
        pass
    return None
