"""Follows layers and parts of the steps of one loop, and writes them as spans when the device has come to them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from profiler_wrapper.live.accelerator import Accelerator
from profiler_wrapper.live.breakdown import Boundaries, Breakdown
from profiler_wrapper.live.event_pool import EventPool
from profiler_wrapper.live.layer_rows import LayerRows, SeenStep
from profiler_wrapper.live.layer_spans import LayerSpans, StepSpans
from profiler_wrapper.live.span_log import span_log
from profiler_wrapper.live.span_place import SpanPlace
from profiler_wrapper.live.step_clock import Mark
from profiler_wrapper.notices import Notices

MOST_STEPS = 1024  # that the device may be behind


class LayerWatch:
    """Layers, parts and steps of a loop, as spans of the rank's timer files. Its methods may raise.

    Args:
        model: as it is called in the loop, wrappers included.
        mark: makes the marks of the parts.
        on_failure: told of what fails where nobody could catch it.

    Attributes:
        parts: what listens; to be started, and told of each step's begin and end.
    """

    def __init__(
        self,
        model: nn.Module,
        place: SpanPlace,
        accelerator: Accelerator | None,
        notices: Notices,
        *,
        mark: Callable[[], Mark],
        on_failure: Callable[[str, Exception], None],
        optimizers: Sequence[Any] = (),
    ) -> None:
        events = None if accelerator is None else EventPool(accelerator, lambda unread, device_ns: None, notices)
        self._layers = LayerSpans(model, events, on_failure, notices)
        self.parts = self._layers.parts = Breakdown(
            mark, on_failure, model=model, optimizers=optimizers, notices=notices, listener=self._layers
        )
        self._waiting: deque[SeenStep] = deque()
        self._log = span_log(place, notices)
        self._log.users += 1
        self._rows = LayerRows(self._log)
        self._closed = False

    def begin_step(self) -> None:
        """A step begins; the parts have been told."""
        self._layers.begin_step()

    def forget_step(self) -> None:
        """The step that was begun is none."""
        self._layers.forget_step()

    def end_step(self) -> StepSpans:
        """The step has ended; the parts have been told."""
        return self._layers.end_step()

    def add(self, number: int, begin: Mark, end: Mark, boundaries: Boundaries, found: StepSpans) -> None:
        """Write a step as soon as the device has come to its end."""
        self._waiting.append(SeenStep(number, begin, end, boundaries, found, threading.get_native_id()))
        self.pass_on()

    def leave_out(self, found: StepSpans) -> None:
        """A step that is not to be written."""
        self._layers.give_back(found.events)

    def pass_on(self, *, everything: bool = False) -> None:
        """Write the steps that the device has come to the end of, and those there are too many of."""
        waiting = self._waiting
        while waiting and (everything or len(waiting) > MOST_STEPS or waiting[0].end.reached):
            step = waiting.popleft()
            self._rows.write(step)
            if step.end.reached:
                self._layers.give_back(step.found.events)

    def close(self) -> None:
        """Write all there is, without waiting for the device, and let go of the files."""
        if self._closed:
            return
        self._closed = True
        self._layers.forget_step()
        self.parts.stop()
        self.pass_on(everything=True)
        if self._log.text is not None:
            self._log.flush()
        self._log.users -= 1
        if self._log.users <= 0:
            self._log.close()

    def flush(self) -> Path | None:
        """Write what the device has come to; the path of the text."""
        self.pass_on()
        return self._log.flush()
