"""What is kept of the calls of a model's units, by thread and by step. Holds no tensor."""

from __future__ import annotations

import os
import threading
from typing import Any, NamedTuple

from profiler_wrapper.live.backward_runs import LayerSpan, Moment, Pass
from profiler_wrapper.live.graph_tensors import Known
from profiler_wrapper.live.step_waits import Wait


class Forks:
    """How often this process, and those that it was forked from, began as a fork."""

    count = 0

    @classmethod
    def add(cls) -> None:
        cls.count += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=Forks.add)


class Here(threading.local):
    """What is so on this thread."""

    def __init__(self) -> None:
        self.thread = threading.get_native_id()
        self.inside = False  # a unit is being called
        self.outputs: Known = []  # of the last unit


class Call:
    """One that is going on, or was.

    Attributes:
        phase: what the step's parts were told of it; None: nothing.
        recomputed: in the backward.
    """

    __slots__ = ("begin", "ended", "inputs", "passed", "phase", "recomputed")

    def __init__(self, passed: Pass, phase: object | None, recomputed: bool) -> None:
        self.passed, self.phase, self.recomputed = passed, phase, recomputed
        self.begin: Moment = (0, None)
        self.ended = False
        self.inputs: Known = []  # that have a gradient


class StepSpans(NamedTuple):
    """What is known of the layers in a step.

    Attributes:
        spans: by their begins.
        waits: for other ranks, by their begins.
        ends: when graphs had been run, and the group that their gradients are reduced in behind that.
        events: all on the device that these are made of, and others.
    """

    spans: list[LayerSpan]
    waits: list[Wait]
    ends: list[tuple[Moment, str | None]]
    events: list[Any]
