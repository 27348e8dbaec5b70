"""Ops of real runs against torch's own table, and of recorded traces of GPUs against plain json."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from gpu_traces import exact_events, names_of_traces, result
from profiler_wrapper.tables.views.operators import NO_OP
from profiler_wrapper.trace.reader import read
from recordings import analyse
from shared_traces import needs_traces
from truths import device_total_of


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(2, 8, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def calling_themselves(path: Path) -> set[str]:
    """Ops within an op of the same name: `aten::mul` with a number makes it a tensor and calls itself."""
    ops = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("cat") == "cpu_op"]
    found = set()
    for outer in ops:
        inside = (event for event in ops if event is not outer and event["name"] == outer["name"])
        if any(outer["ts"] <= event["ts"] <= outer["ts"] + outer["dur"] for event in inside):
            found.add(outer["name"])
    return found


def test_ops_of_a_training_step_are_those_of_torchs_own_table(tmp_path: Path) -> None:
    model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        step(model, optimizer)
    prof.export_chrome_trace(str(tmp_path / "trace.json"))
    rows = analyse(read(tmp_path / "trace.json")).operators
    calls, own_ns, all_ns = Counter[str](), Counter[str](), Counter[str]()
    for row in rows:
        calls[row.op] += row.calls
        own_ns[row.op] += row.self_time_ns
        all_ns[row.op] += row.time_ns
    theirs = {event.key: event for event in prof.key_averages() if not event.is_user_annotation}
    assert set(calls) == set(theirs)
    recursive = calling_themselves(tmp_path / "trace.json")
    recorded_calls = Counter(event.name() for event in prof.profiler.kineto_results.events())
    assert calls == {op: recorded_calls[op] for op in theirs}
    for op, event in theirs.items():
        assert own_ns[op] / 1000 == pytest.approx(event.self_cpu_time_total, abs=0.003 * calls[op]), op
        if (
            op not in recursive
        ):  # of one that calls itself torch's table leaves out some calls, and counts some time twice
            assert calls[op] == event.count, op
            assert all_ns[op] / 1000 == pytest.approx(event.cpu_time_total, abs=0.003 * calls[op]), op


class Gate(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return scaled(torch.tanh(x))


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * x


def test_lines_of_ops_are_those_of_the_functions_that_call_them(tmp_path: Path) -> None:
    """The profiler tells the line where a function begins."""
    gate, x = Gate(), torch.randn(4, requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU], with_stack=True) as prof:
        gate(x).sum().backward()
    prof.export_chrome_trace(str(tmp_path / "trace.json"))
    rows = {(row.op, row.phase): row for row in analyse(read(tmp_path / "trace.json")).operators}
    lines = {
        name: Path(__file__).name + f":{function.__code__.co_firstlineno}"
        for name, function in (("tanh", Gate.forward), ("mul", scaled))
    }
    for key, name in {
        ("aten::tanh", "forward"): "tanh",
        ("aten::mul", "forward"): "mul",
        ("aten::mul", "backward"): "mul",
        ("MulBackward0", "backward"): "mul",
        ("aten::tanh_backward", "backward"): "tanh",
    }.items():
        (source,) = rows[key].sources
        assert source.endswith(lines[name]), key


# --- recorded traces ---


def innermost_ops(events: list[dict[str, Any]]) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """(device nanoseconds, device events, calls) per op, from the file alone: a stack per thread, decimals."""
    complete = [event for event in events if event.get("ph") == "X"]
    launched: dict[int, list[Any]] = defaultdict(list)
    for event in complete:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            launched[event["args"].get("correlation", -1)].append(event)
    runtimes: dict[int, Any] = {}
    for event in complete:
        if event.get("cat") in ("cuda_runtime", "cuda_driver", "Runtime"):
            runtimes[event["args"].get("correlation", -1)] = event
    time_ns, count, calls = Counter[str](), Counter[str](), Counter[str]()
    ops = [event for event in complete if event.get("cat") in ("cpu_op", "Operator")]
    calls.update(event["name"] for event in ops)
    threads: dict[Any, list[tuple[Any, ...]]] = defaultdict(list)
    for event in ops:
        begin, end = Decimal(event["ts"]), Decimal(event["ts"]) + Decimal(event["dur"])
        threads[event["pid"], event["tid"]].append((begin, 0, -end, event["name"]))
    for correlation, event in runtimes.items():
        if correlation in launched:
            begin, end = Decimal(event["ts"]), Decimal(event["ts"]) + Decimal(event["dur"])
            threads[event["pid"], event["tid"]].append((begin, 1, -end, correlation))
    for found in threads.values():
        stack: list[tuple[Decimal, str]] = []
        for _begin, is_launch, negated_end, what in sorted(found, key=lambda item: item[:3]):
            while stack and stack[-1][0] < -negated_end:
                stack.pop()
            if not is_launch:
                stack.append((-negated_end, what))
                continue
            op = stack[-1][1] if stack else NO_OP
            for event in launched.pop(what):
                time_ns[op] += int(Decimal(event["dur"]) * 1000)
                count[op] += 1
    for event in (event for rest in launched.values() for event in rest):
        time_ns[NO_OP] += int(Decimal(event["dur"]) * 1000)
        count[NO_OP] += 1
    return time_ns, count, calls


@needs_traces
@pytest.mark.parametrize("name", names_of_traces(largest=pytest.mark.full))
def test_ops_launch_what_the_file_says(name: str) -> None:
    time_ns, events, calls = innermost_ops(exact_events(name))
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for row in result(name).operators:
        found["time_ns"][row.op] += row.self_time_ns
        found["events"][row.op] += row.device_events
        found["calls"][row.op] += row.calls
    assert +found["time_ns"] == +time_ns
    assert +found["events"] == +events
    assert +found["calls"] == +calls
    assert result(name).time.total_ns == device_total_of(exact_events(name))
