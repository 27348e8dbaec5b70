"""Recordings written event by event, so that their answers can be derived by hand.

    trace = Trace()
    trace.mark("layers.0", 0, 100)
    trace.op("aten::mm", 10, 20).kernel("gemm", 30, 70, launched=12)
    trace.recording()

All times are nanoseconds, begin and end. Events keep the order in which they are written. `write`
gives the same trace as a Chrome trace file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from copy import copy
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from profiler_wrapper.analyse import tables
from profiler_wrapper.place.placed import place_events
from profiler_wrapper.tables.model import Analysis
from profiler_wrapper.trace.marks import Mark, format_mark
from profiler_wrapper.trace.recording import (
    Category,
    Configurations,
    DeviceDetails,
    ForwardBackwardFlows,
    Lane,
    MemoryEvents,
    PythonCalls,
    Recording,
    Shapes,
    Spans,
)


def analyse(
    recording: Recording, *, run: Mapping[str, Any] | None = None, shapes: Shapes | None = None, **asked: Any
) -> Analysis:
    """What all tables say of a recording; `asked`: as `tables` takes it."""
    return tables(place_events(recording, run=run, shapes=shapes), run=run or {}, **asked)


MAIN = 1  # the thread that runs forward
AUTOGRAD = 2  # the thread that runs backward
NODE = "autograd::engine::evaluate_function: "
_PROCESS = 100
_format_mark = lru_cache(maxsize=10_000)(format_mark)  # the same ones in every step
_CATEGORY_NAMES = {
    Category.CPU_OP: "cpu_op",
    Category.ANNOTATION: "user_annotation",
    Category.MODULE: "python_function",
    Category.RUNTIME: "cuda_runtime",
    Category.SYNC: "cuda_sync",
    Category.KERNEL: "kernel",
    Category.MEMCPY: "gpu_memcpy",
    Category.MEMSET: "gpu_memset",
}
_DTYPES = {"category": np.int8, "name": np.int32, "lane": np.int32, "forward_thread": np.int32}
_DTYPES |= {"device": np.int16, "stream": np.int32, "graph": np.bool_}


class Trace:
    """A trace under construction. Every method returns it."""

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._lanes: dict[Lane, int] = {}
        self._spans: list[dict[str, Any]] = []
        self._memory: list[dict[str, Any]] = []
        self._flows: list[tuple[int, int, int, int]] = []
        self._python: list[tuple[int, int, int, int]] = []
        self._told: dict[int, dict[str, Any]] = {}
        self._correlation = 0
        self._allocated = 0

    def op(self, name: str, start: int, end: int, *, thread: int = MAIN, **fields: int) -> Trace:
        """An op; `sequence`, `forward_thread`, `external_id` as fields."""
        return self._span(Category.CPU_OP, name, start, end, Lane(_PROCESS, thread), **fields)

    def mark(
        self,
        path: str,
        start: int,
        end: int,
        *,
        thread: int = MAIN,
        kind: str = "other",
        class_name: str = "Layer",
        root: str = "Net#0",
        flags: tuple[str, ...] = (),
    ) -> Trace:
        """A layer mark, as our hooks write it."""
        name = _format_mark(Mark(path, class_name, kind, root, flags))
        return self._span(Category.CPU_OP, name, start, end, Lane(_PROCESS, thread))

    def annotation(self, name: str, start: int, end: int, *, thread: int = MAIN) -> Trace:
        """What `record_function` writes."""
        return self._span(Category.ANNOTATION, name, start, end, Lane(_PROCESS, thread))

    def module(self, instance: str, start: int, end: int, *, thread: int = MAIN) -> Trace:
        """A `nn.Module: ...` python event."""
        return self._span(Category.MODULE, f"nn.Module: {instance}", start, end, Lane(_PROCESS, thread))

    def node(
        self, name: str, start: int, end: int, *, number: int = -1, thread: int = AUTOGRAD, forward_thread: int = 1
    ) -> Trace:
        """An autograd node that runs: the engine's wrapper, which carries the number."""
        fields = {"sequence": number, "forward_thread": forward_thread} if number >= 0 else {}
        return self.op(NODE + name, start, end, thread=thread, **fields)

    def arrow(
        self, forward: int, backward: int, *, forward_thread: int = MAIN, backward_thread: int = AUTOGRAD
    ) -> Trace:
        """A `fwdbwd` flow between the starts of a forward op and of its node."""
        lanes = (self._lane(Lane(_PROCESS, forward_thread)), self._lane(Lane(_PROCESS, backward_thread)))
        self._flows.append((lanes[0], forward, lanes[1], backward))
        return self

    def kernel(
        self,
        name: str,
        start: int,
        end: int,
        *,
        launched: int | None = None,
        thread: int = MAIN,
        device: int = 0,
        stream: int = 7,
        correlation: int | None = None,
        category: Category = Category.KERNEL,
        graph: bool = False,
        external_id: int = -1,
    ) -> Trace:
        """A device event; `launched` writes the call that launched it, 1 ns long, at that time."""
        if correlation is None:
            self._correlation += 1
            correlation = self._correlation
        if launched is not None:
            self.launch(launched, launched + 1, correlation=correlation, thread=thread)
        return self._span(
            category,
            name,
            start,
            end,
            Lane(device, stream),
            correlation=correlation,
            device=device,
            stream=stream,
            graph=graph,
            external_id=external_id,
        )

    def told(
        self,
        *,
        grid: tuple[int, int, int] | None = None,
        block: tuple[int, int, int] | None = None,
        registers: int | None = None,
        shared_memory: int | None = None,
        blocks_per_sm: float | None = None,
        occupancy_percent: float | None = None,
        copied_bytes: int | None = None,
    ) -> Trace:
        """What the last device event tells of its launch, or of what it copies."""
        self._told[len(self._spans) - 1] = {
            "grid": grid,
            "block": block,
            "registers per thread": registers,
            "shared memory": shared_memory,
            "blocks per SM": blocks_per_sm,
            "est. achieved occupancy %": occupancy_percent,
            "bytes": copied_bytes,
        }
        return self

    def launch(
        self, start: int, end: int, *, correlation: int = -1, thread: int = MAIN, name: str = "cudaLaunchKernel"
    ) -> Trace:
        """A call into the CUDA runtime."""
        self._correlation = max(self._correlation, correlation)
        return self._span(Category.RUNTIME, name, start, end, Lane(_PROCESS, thread), correlation=correlation)

    def python(self, frame: str, start: int, end: int, *, thread: int = MAIN) -> Trace:
        """A call of a Python function: `train.py(12): step`. Not written to files."""
        lane = self._lane(Lane(_PROCESS, thread))
        self._python.append((self._names.setdefault(frame, len(self._names)), lane, start, end - start))
        return self

    def memory(
        self, time: int, size: int, *, address: int, thread: int = MAIN, device: int = -1, reserved: int = 0
    ) -> Trace:
        """An allocation, or with a negative size a free; `device` -1 is the CPU."""
        self._allocated += size
        lane = self._lane(Lane(_PROCESS, thread))
        self._memory.append(
            {
                "time_ns": time,
                "lane": lane,
                "address": address,
                "size_bytes": size,
                "total_allocated_bytes": self._allocated,
                "total_reserved_bytes": reserved,
                "device_type": 0 if device < 0 else 1,
                "device": device,
            }
        )
        return self

    def rotations(self, *, most: int = 30) -> Iterator[Trace]:
        """The same events, another one first each time: a file has them in no particular order."""
        for first in range(1, len(self._spans), 1 + len(self._spans) // most):
            other = copy(self)
            other._spans = self._spans[first:] + self._spans[:first]
            yield other

    def recording(self, **fields: Any) -> Recording:
        """The trace as columns; fields of `Recording` to replace."""
        empty = {"category": 0, "name": 0, "lane": 0, "start_ns": 0, "duration_ns": 0, **_span_fields()}
        spans = {key: np.array([span[key] for span in self._spans], dtype=_DTYPES.get(key, np.int64)) for key in empty}
        ordered = sorted(self._memory, key=lambda event: event["time_ns"])
        memory = {
            key: np.array([event[key] for event in ordered], dtype=dtype)
            for key, dtype in {
                "time_ns": np.int64,
                "lane": np.int32,
                "address": np.int64,
                "size_bytes": np.int64,
                "total_allocated_bytes": np.int64,
                "total_reserved_bytes": np.int64,
                "device_type": np.int8,
                "device": np.int16,
            }.items()
        }
        flows = np.array(self._flows, dtype=np.int64).reshape(-1, 4)
        return Recording(
            **{
                "path": "",
                "names": tuple(self._names),
                "lanes": tuple(self._lanes),
                "spans": Spans(**spans),
                "memory": MemoryEvents(**memory),
                "flows": ForwardBackwardFlows(
                    forward_lane=flows[:, 0].astype(np.int32),
                    forward_ns=flows[:, 1],
                    backward_lane=flows[:, 2].astype(np.int32),
                    backward_ns=flows[:, 3],
                ),
                "metadata": {},
                "python": _python_calls(self._python),
                "details": _details(self._told),
                **fields,
            }
        )

    def write(self, path: Path) -> Path:
        """The trace as a file, in microseconds with three decimals."""
        names, lanes = list(self._names), list(self._lanes)
        events: list[dict[str, Any]] = []
        for index, span in enumerate(self._spans):
            lane = lanes[span["lane"]]
            fields = {
                "correlation": span["correlation"],
                "External id": span["external_id"],
                "Sequence number": span["sequence"],
                "Fwd thread id": span["forward_thread"],
                "device": span["device"],
                "stream": span["stream"],
            }
            arguments: dict[str, Any] = {key: value for key, value in fields.items() if value >= 0}
            if span["graph"]:
                arguments["graph node id"] = 9
            arguments |= {key: value for key, value in self._told.get(index, {}).items() if value is not None}
            events.append(
                {
                    "ph": "X",
                    "cat": _CATEGORY_NAMES[Category(span["category"])],
                    "name": names[span["name"]],
                    "pid": lane.pid,
                    "tid": lane.tid,
                    "ts": span["start_ns"] / 1000,
                    "dur": span["duration_ns"] / 1000,
                    "args": arguments,
                }
            )
        for event in self._memory:
            lane = lanes[event["lane"]]
            arguments = {
                "Addr": event["address"],
                "Bytes": event["size_bytes"],
                "Total Allocated": event["total_allocated_bytes"],
                "Total Reserved": event["total_reserved_bytes"],
                "Device Type": event["device_type"],
                "Device Id": event["device"],
            }
            head = {"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]"}
            events.append({**head, "pid": lane.pid, "tid": lane.tid, "ts": event["time_ns"] / 1000, "args": arguments})
        for identity, (forward_lane, forward_ns, backward_lane, backward_ns) in enumerate(self._flows):
            for phase, lane_id, time_ns in (("s", forward_lane, forward_ns), ("f", backward_lane, backward_ns)):
                lane = lanes[lane_id]
                head = {"ph": phase, "cat": "fwdbwd", "name": "fwdbwd", "id": identity, "bp": "e"}
                events.append({**head, "pid": lane.pid, "tid": lane.tid, "ts": time_ns / 1000})
        path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
        return path

    def _lane(self, lane: Lane) -> int:
        return self._lanes.setdefault(lane, len(self._lanes))

    def _span(self, category: Category, name: str, start: int, end: int, lane: Lane, **fields: Any) -> Trace:
        assert end >= start, f"{name} ends before it starts"
        self._spans.append(
            {
                **_span_fields(),
                "category": int(category),
                "name": self._names.setdefault(name, len(self._names)),
                "lane": self._lane(lane),
                "start_ns": start,
                "duration_ns": end - start,
                **fields,
            }
        )
        return self


def _details(told: dict[int, dict[str, Any]]) -> DeviceDetails:
    def column(key: str, dtype: type, unsaid: Any) -> Any:
        rows = [row[key] if row[key] is not None else unsaid for row in told.values()]
        return np.array(rows, dtype=dtype).reshape(-1, 3) if key in ("grid", "block") else np.array(rows, dtype=dtype)

    nothing = (-1, -1, -1)
    return DeviceDetails(
        span=np.array(list(told), dtype=np.int64),
        configuration=np.arange(len(told), dtype=np.int32),
        configurations=Configurations(
            grid=column("grid", np.int64, nothing),
            block=column("block", np.int64, nothing),
            registers=column("registers per thread", np.int64, -1),
            shared_memory_bytes=column("shared memory", np.int64, -1),
            copied_bytes=column("bytes", np.int64, -1),
            blocks_per_sm=column("blocks per SM", np.float64, np.nan),
            occupancy=column("est. achieved occupancy %", np.float64, np.nan) / 100,
        ),
    )


def _python_calls(calls: list[tuple[int, int, int, int]]) -> PythonCalls:
    table = np.array(calls, dtype=np.int64).reshape(-1, 4)
    return PythonCalls(
        name=table[:, 0].astype(np.int32),
        lane=table[:, 1].astype(np.int32),
        start_ns=table[:, 2],
        duration_ns=table[:, 3],
    )


def _span_fields() -> dict[str, Any]:
    """What an event has that does not say otherwise."""
    unsaid = ("correlation", "external_id", "sequence", "forward_thread", "device", "stream")
    return {**dict.fromkeys(unsaid, -1), "graph": False}
