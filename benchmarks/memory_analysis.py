"""Seconds and memory that the memory analysis of a trace takes, and how both grow with the trace.

    python benchmarks/memory_analysis.py [TRACE] [--times 1,2,5,10] [--rounds 3] [--held]

The trace is repeated: each repetition has all of its events again, later and with addresses of its own.
Reading and attributing it is not counted. `peak` is what the analysis itself allocates at most (tracemalloc),
measured apart. `--held` tells at every step of an optimizer where 300 gradients and 600 tensors of state lie.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import measuring
import shared_traces
from profiler_wrapper.place.placed import Placed, place_events
from profiler_wrapper.tables.memory.blocks import owned_memory
from profiler_wrapper.tables.memory.events import device_memory
from profiler_wrapper.tables.memory.use import memory_use
from profiler_wrapper.tables.model import MemoryUse
from profiler_wrapper.trace.reader import read
from profiler_wrapper.trace.recording import MemoryEvents, Recording, Spans
from profiler_wrapper.trace.run_file import HeldTensor, Holding

DEFAULT = shared_traces.TRACES / "ddp_training_with_memory.pt.trace.json.gz"
OPTIMIZER_STEP = "Optimizer.step#"


def repeated(recording: Recording, times: int) -> Recording:
    """The recording `times` times, one after another."""
    spans, memory = recording.spans, recording.memory
    begin = min(int(spans.start_ns.min()), int(memory.time_ns.min()))
    length = max(int(spans.end_ns.max()), int(memory.time_ns.max())) - begin + 1_000_000
    reach = int(memory.address.max()) - int(memory.address.min()) + (1 << 36)

    def again(column: np.ndarray, step: int = 0) -> np.ndarray:
        return np.concatenate([column + i * step for i in range(times)]) if step else np.tile(column, times)

    new_spans = {field.name: again(getattr(spans, field.name)) for field in dataclasses.fields(Spans)}
    new_memory = {field.name: again(getattr(memory, field.name)) for field in dataclasses.fields(MemoryEvents)}
    return dataclasses.replace(
        recording,
        spans=Spans(**{**new_spans, "start_ns": again(spans.start_ns, length)}),
        memory=MemoryEvents(
            **{**new_memory, "time_ns": again(memory.time_ns, length), "address": again(memory.address, reach)}
        ),
    )


def made_up_holdings(recording: Recording, device: str) -> tuple[Holding, ...]:
    """Before each step of an optimizer 300 gradients, after it 600 tensors of state, where something was allocated."""
    spans = recording.spans
    named = [i for i, name in enumerate(recording.names) if name.startswith(OPTIMIZER_STEP)]
    steps = np.flatnonzero(np.isin(spans.name, named))
    addresses = np.unique(recording.memory.address)[:900].tolist()
    grads = [HeldTensor(address, 1, "grads", f"layers.{i}.weight") for i, address in enumerate(addresses[:300])]
    state = [HeldTensor(address, 1, "os_state", f"exp_avg of layers.{i}.weight") for i, address in enumerate(addresses)]
    return tuple(
        holding
        for step in steps.tolist()
        for holding in (
            Holding(int(spans.start_ns[step]), {device: grads}),
            Holding(int(spans.end_ns[step]), {device: state[300:]}),
        )
    )


def analysed(found: Placed, holdings: Sequence[Holding]) -> MemoryUse:
    memory = device_memory(found.recording, holdings)
    assert memory is not None, "the trace has no memory events"
    return memory_use(found, owned_memory(found, memory))


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", nargs="?", type=Path, default=DEFAULT)
    parser.add_argument("--times", default="1,2,5,10")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--held", action="store_true")
    options = parser.parse_args(arguments)
    recording = read(options.trace)
    print(measuring.machine())
    print(f"\n{options.trace.name}: {len(recording.spans):,} events, {len(recording.memory):,} of memory\n")
    print(f"{'times':>5} {'memory events':>13} {'seconds':>8} {'us/event':>8} {'peak MiB':>8} {'bytes/event':>11}")
    for times in map(int, options.times.split(",")):
        found = place_events(repeated(recording, times))
        known = device_memory(found.recording)
        holdings = made_up_holdings(found.recording, known.device) if options.held and known else ()
        seconds = []
        for _ in range(options.rounds):
            start = time.perf_counter()
            use = analysed(found, holdings)
            seconds.append(time.perf_counter() - start)
        assert (use.timeline.bytes_by_category.sum(axis=0) == use.timeline.total_bytes).all()
        tracemalloc.start()
        analysed(found, holdings)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        events, took = len(found.recording.memory), statistics.median(seconds)
        print(
            f"{times:5} {events:13,} {took:8.3f} {took / events * 1e6:8.2f} {peak / 2**20:8.1f} {peak / events:11.0f}"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
