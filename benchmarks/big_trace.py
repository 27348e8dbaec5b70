"""Makes a large trace from a real one by repeating its steps; with --page, how long its page takes to make.

    python benchmarks/big_trace.py TRACE OUT [--megabytes 500] [--page]

Each copy begins after the one before: times, correlation ids, flow ids, sequence numbers, python ids and step
numbers move on, everything else stays. What was launched before the first copy began stays so in each.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import re
import resource
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import measuring  # noqa: F401

_GAP_US = 10.0
# Numbers that say which events belong together.
_LINKS = ("External id", "correlation", "Sequence number", "Ev Idx", "Python id", "Python parent id")
_STEP = re.compile(r"(ProfilerStep#)(\d+)$")


def main() -> None:
    """Writes the trace; then, if asked, reads it and writes its page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--megabytes", type=float, default=500.0)
    parser.add_argument("--page", action="store_true", help="measure load and write_page")
    asked = parser.parse_args()
    copies = write(asked.trace, asked.out, asked.megabytes * 1e6)
    print(f"{asked.out}: {copies} copies of {asked.trace.name}, {asked.out.stat().st_size / 1e6:.0f} MB")
    if asked.page:
        make_page(asked.out)


def write(source: Path, out: Path, size: float) -> int:
    """Writes copies of `source` until the file has `size` bytes; how many."""
    opener = gzip.open if source.name.endswith(".gz") else open
    with opener(source, "rb") as file:
        trace = json.loads(file.read())
    events = [event for event in trace.pop("traceEvents") if event.get("cat") != "Trace"]
    timed = [event for event in events if event.get("ph") != "M"]
    begin = min(event["ts"] for event in timed)
    span = max(event["ts"] + event.get("dur", 0) for event in timed) - begin + _GAP_US
    steps = [int(found[2]) for event in timed if (found := _STEP.match(str(event.get("name"))))]
    counted = {
        **{
            name: 1 + max((args[name] for args in _args(timed) if isinstance(args.get(name), int)), default=0)
            for name in _LINKS
        },
        "id": 1 + max((event["id"] for event in timed if isinstance(event.get("id"), int)), default=0),
        "step": max(steps) - min(steps) + 1 if steps else 0,
    }
    with out.open("w") as file:
        file.write(json.dumps(trace)[:-1] + ', "traceEvents": [\n')
        file.write(",\n".join(_text(event) for event in events if event.get("ph") == "M"))
        copies, written = 0, file.tell()
        before = ",\n" if len(timed) < len(events) else ""
        while written < size:
            file.write(before + ",\n".join(_text(_moved(event, copies, span, counted)) for event in timed))
            copies, written, before = copies + 1, file.tell(), ",\n"
        file.write("\n]}\n")
    return copies


def _text(event: Mapping[str, Any]) -> str:
    """An event on lines of its own, broken and indented as Kineto does, so that a file has its size."""
    head = {key: value for key, value in event.items() if key not in ("ts", "dur", "args")}
    times = {key: event[key] for key in ("ts", "dur") if key in event}
    parts = [json.dumps(part)[1:-1] for part in (head, times) if part]
    if "args" in event:
        parts.append(f'"args": {{\n      {json.dumps(event["args"])[1:-1]}\n    }}')
    return "  {\n    " + ",\n    ".join(parts) + "\n  }"


def _args(events: list[dict[str, Any]]) -> Iterator[Mapping[str, Any]]:
    return (event["args"] for event in events if isinstance(event.get("args"), dict))


def _moved(event: dict[str, Any], copy: int, span: float, counted: Mapping[str, int]) -> dict[str, Any]:
    """`event` in the `copy`-th repetition."""
    moved = {**event, "ts": round(event["ts"] + copy * span, 3)}
    if isinstance(event.get("id"), int):
        moved["id"] = event["id"] + copy * counted["id"]
    if found := _STEP.match(str(event.get("name"))):
        moved["name"] = f"{found[1]}{int(found[2]) + copy * counted['step']}"
    args = event.get("args")
    if isinstance(args, dict):
        links = {name: args[name] + copy * counted[name] for name in _LINKS if isinstance(args.get(name), int)}
        moved["args"] = {**args, **links}
    return moved


def make_page(trace: Path) -> None:
    """Prints how long reading and writing take, and how much of what is left."""
    import profiler_wrapper as pw
    from profiler_wrapper.reports.page import write_page

    begin, cpu = time.perf_counter(), time.process_time()
    result = pw.load(trace)
    loaded = time.perf_counter()
    path = trace.with_suffix(".html")
    write_page(result, path)
    written = time.perf_counter()
    cpu = time.process_time() - cpu
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{platform.machine()}, Python {platform.python_version()}, {os.cpu_count()} cores, "
        f"load {os.getloadavg()[0]:.1f}"
    )
    print(f"{len(result.steps)} steps, {len(result.layers)} rows of layers; peak memory {peak_mib:.0f} MiB")
    print(f"load {loaded - begin:.1f} s, write_page {written - loaded:.2f} s (CPU time of both {cpu:.1f} s)")
    print(f"page {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
