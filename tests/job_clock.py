"""Time for a job of several ranks: the machine's, or one that only what is planned takes, however busy the machine."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from profiler_wrapper.timer.device_events import StepClock

_BEGIN_NS = 10**15
_1970_NS = 1_767_225_600_000_000_000  # what the wall clock is ahead
TRANSFER_NS = 1_000_000


class RealTime:
    """What takes time takes it."""

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def meet(self, group: Any = None) -> None:
        """After a collective of the group."""

    def sent(self, other: int) -> None:
        """After a send to another rank."""

    def received(self, other: int) -> None:
        """After a receive from another rank."""

    def shown(self) -> contextlib.AbstractContextManager[object]:
        """Timers read this clock."""
        return contextlib.nullcontext()


class PlannedTime(RealTime):
    """Only `sleep` takes time, and waiting for ranks that have slept: exact numbers.

    Ranks leave a collective 1 ms after the last has come to it, and a receive 1 ms after the send.
    """

    def __init__(self) -> None:
        self.now_ns = _BEGIN_NS

    def sleep(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)

    def meet(self, group: Any = None) -> None:
        latest = torch.tensor(self.now_ns)
        dist.all_reduce(latest, dist.ReduceOp.MAX, group)
        self.now_ns = int(latest) + TRANSFER_NS

    def sent(self, other: int) -> None:
        dist.send(torch.tensor(self.now_ns), other)
        self.now_ns += TRANSFER_NS

    def received(self, other: int) -> None:
        at_ns = torch.tensor(0)
        dist.recv(at_ns, other)
        self.now_ns = max(self.now_ns, int(at_ns)) + TRANSFER_NS

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        def monotonic_ns() -> int:
            return self.now_ns

        with contextlib.ExitStack() as patches:
            for reader in ("spans", "timer", "layer_spans", "layer_timer"):
                patches.enter_context(mock.patch(f"profiler_wrapper.timer.{reader}.perf_counter_ns", monotonic_ns))
            patches.enter_context(mock.patch("time.perf_counter_ns", monotonic_ns))
            defaults = StepClock.__init__.__kwdefaults__
            patches.enter_context(mock.patch.dict(defaults, host_clock=monotonic_ns))
            patches.enter_context(mock.patch("time.time_ns", lambda: self.now_ns + _1970_NS))
            yield


class Sleeps(torch.autograd.Function):
    """Takes time of a clock in forward and in backward, as the work of a device would."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_s: float, backward_s: float, clock: RealTime) -> torch.Tensor:
        ctx.backward_s, ctx.clock = backward_s, clock
        clock.sleep(forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.clock.sleep(ctx.backward_s)
        return grads[0], None, None, None
