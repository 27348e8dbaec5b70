"""Traces of real runs whose clock is then moved by hand: no load of the machine decides what is said of them."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Iterable
from itertools import accumulate
from pathlib import Path
from typing import Any


def put_pauses(trace: Path, pause_us: Callable[[dict[str, Any]], float]) -> None:
    """Let each complete event of the file last as much longer as is said, and everything after its start be later."""
    told = json.loads(trace.read_text())
    events = [event for event in told["traceEvents"] if "ts" in event]
    pauses = sorted((event["ts"], pause_us(event)) for event in events if event.get("ph") == "X" and pause_us(event))
    starts, sums = [start for start, _ in pauses], [0.0, *accumulate(pause for _, pause in pauses)]

    def moved(time_us: float) -> float:
        return time_us + sums[bisect_left(starts, time_us)]

    move_clock(events, moved)
    trace.write_text(json.dumps(told))


def move_clock(events: Iterable[dict[str, Any]], moved: Callable[[float], float]) -> None:
    """Let each event begin and end when `moved` says, in us."""
    for event in events:
        start = moved(event["ts"])
        if "dur" in event:
            event["dur"] = moved(event["ts"] + event["dur"]) - start
        event["ts"] = start


def within(trace: Path, mark: str) -> Callable[[dict[str, Any]], bool]:
    """Whether an event begins while the layer of that mark runs, on its thread."""
    marks = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("name", "").startswith(mark)]

    def is_within(event: dict[str, Any]) -> bool:
        return any(one["tid"] == event["tid"] and 0 <= event["ts"] - one["ts"] <= one["dur"] for one in marks)

    return is_within
