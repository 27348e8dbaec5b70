"""Traces of ranks, small and made by hand."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock


def write_trace(path: Path, rank: int = 0, scale: int = 1, *, world_size: int = 2, steps: int = 2) -> Path:
    """Steps of 300 µs times `scale`: a forward of 100 times `scale`, an optimizer of 50; numbered from 3 on."""
    events: list[dict[str, Any]] = []

    def add(name: str, category: str, start: float, length: float) -> None:
        events.append({"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 7, "ts": start, "dur": length})

    for step in range(steps):
        begin = step * 400
        add(f"ProfilerStep#{step + 3}", "user_annotation", begin, 300 * scale)
        add("nn.Module: Net_0", "python_function", begin + 10, 100 * scale)
        add("aten::linear", "cpu_op", begin + 11, 98 * scale)
        now = begin + max(200, 10 + 100 * scale)  # once forward is done: a thread does one thing at a time
        add("Optimizer.step#SGD.step", "user_annotation", now, 50)
        add("aten::add_", "cpu_op", now + 1, 40)
    told = {"rank": rank, "world_size": world_size}
    data = {"distributedInfo": told, "baseTimeNanoseconds": 10**18, "traceEvents": events}
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


@contextlib.contextmanager
def reduced_here() -> Iterator[None]:
    """This process reduces traces, as where none can be started: to start one takes longer than some small traces."""
    with mock.patch("profiler_wrapper.ranks.reduce.start_child", side_effect=OSError("none is started here")):
        yield
