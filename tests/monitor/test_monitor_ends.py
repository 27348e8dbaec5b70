"""Monitors that nobody closes: the process ends, or they are let go of, while a step is recorded or after steps."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from monitoring import Kept
from profiler_wrapper.monitor.monitor import TrainingMonitor

# Each ending in a process of its own; they are forked from one that has imported everything and recorded nothing.
PROGRAM = """
import os, sys, threading, torch
import torch._dynamo  # as its profiler does, in a second: before the forks
from profiler_wrapper import TrainingMonitor

def end(directory, rank, ending):
    model = torch.nn.Linear(8, 8)
    monitor = TrainingMonitor(directory, rank=rank, world_size=2, flops_profile_freq=500)

    def begin():
        monitor.start_step()
        model(torch.ones(4, 8)).sum().backward()

    if ending == "thread":
        thread = threading.Thread(target=begin)
        thread.start()
        thread.join()
    else:
        begin()
    if ending == "raise":
        raise ValueError("theirs")
    if ending == "exit":
        sys.exit(3)
    if ending == "held":
        torch.held = monitor

def ended(number, rank, ending):
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    end(f"{sys.argv[1]}/{number}", rank, ending)
    sys.exit()

endings = [(0, "raise"), (1, "raise"), (0, "exit"), (0, "held"), (0, "let go"), (0, "thread")]
print([ended(number, *ending) for number, ending in enumerate(endings)])
"""


@pytest.mark.full
def test_a_process_that_ends_within_a_recorded_step_ends_as_without(tmp_path: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert found.stdout.splitlines()[-1:] == ["[1, 1, 3, 0, 0, 0]"], found.stderr


def test_a_monitor_that_nobody_holds_any_more_is_closed(tmp_path: Path) -> None:
    sink = Kept()
    monitor = TrainingMonitor(tmp_path, sinks=[sink], peaks=1.0, breakdown=True, flops_profile_freq=1)
    monitor.log_step(0)
    monitor.start_step()
    assert torch._C._autograd._profiler_enabled()
    del monitor
    assert not torch._C._autograd._profiler_enabled()
    assert (len(sink.records), sink.closed) == (1, 1)
