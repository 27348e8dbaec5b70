"""A recorded run by a clock that ticks with its events, so that no time of it depends on what else the machine did."""

from __future__ import annotations

import bisect
import json
import math
import shutil
from collections import Counter
from pathlib import Path

import profiler_wrapper as pw
from paused_traces import move_clock

SLOW = 1000  # ticks


def by_ticks(directory: Path, to: Path, *, slower: str = "", by_size: bool = False) -> pw.ProfileResult:
    """The run of a rank's directory, copied to `to`, by a clock that ticks whenever something begins or ends.

    Args:
        slower: a layer in whose first op the clock ticks a thousand times more.
        by_size: in each op the clock ticks once more for every number that the op is given, if shapes were recorded.
    """
    shutil.copytree(directory, to)
    path = to / f"{json.loads((to / 'run.json').read_text())['prefix']}_trace.json"
    trace = json.loads(path.read_text())
    events = [event for event in trace["traceEvents"] if "ts" in event and event["ph"] != "M"]
    spans = [
        (event, round(1000 * event["ts"]), round(1000 * (event["ts"] + event.get("dur", 0.0)))) for event in events
    ]
    begins = [begin for event, begin, _ in spans if slower and event["name"].startswith(f"layer: {slower} ")]
    assert bool(begins) == bool(slower)
    ops = sorted(begin for event, begin, _ in spans if event.get("cat") == "cpu_op")
    longer = Counter({ops[bisect.bisect_right(ops, begin)]: SLOW for begin in begins})
    if by_size:
        for event, begin, _ in spans:
            shapes = event.get("args", {}).get("Input Dims", ())
            longer[begin] += sum(math.prod(shape) for shape in shapes if shape and isinstance(shape[0], int))
    ticks, now = {}, 0
    for time_ns in sorted({time_ns for _, *both in spans for time_ns in both}):
        ticks[time_ns] = now
        now += 1 + longer[time_ns]
    move_clock(events, lambda time_us: ticks[round(1000 * time_us)])
    path.write_text(json.dumps(trace))
    return pw.load(path)
