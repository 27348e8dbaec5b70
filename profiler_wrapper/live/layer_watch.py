"""Follows layers and parts of the steps of one loop, and writes them as spans when the device has come to them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from profiler_wrapper.capture.pipeline import find_stages
from profiler_wrapper.capture.runinfo import run_info
from profiler_wrapper.live.breakdown import Boundaries, Breakdown
from profiler_wrapper.live.device_events import Accelerator, EventPool, Mark
from profiler_wrapper.live.layer_calls import StepSpans
from profiler_wrapper.live.layer_rows import LayerRows
from profiler_wrapper.live.layer_spans import LayerSpans
from profiler_wrapper.live.log import SpanPlace, span_log
from profiler_wrapper.live.step_rows import SeenStep
from profiler_wrapper.notices import Notices

MOST_STEPS = 1024  # that the device may be behind


class LayerWatch:
    """Layers, parts and steps of a loop, as spans of the rank's timer files. Its methods may raise.

    Args:
        model: as it is called in the loop, wrappers included, or a pipeline's schedule or stage.
        mark: makes the marks of the parts.
        on_failure: told of what fails where nobody could catch it.

    Attributes:
        parts: what listens; to be started, and told of each step's begin and end.
    """

    def __init__(
        self,
        model: object,
        place: SpanPlace,
        accelerator: Accelerator | None,
        notices: Notices,
        *,
        mark: Callable[[], Mark],
        on_failure: Callable[[str, Exception], None],
        optimizers: Sequence[Any] = (),
    ) -> None:
        events = None if accelerator is None else EventPool(accelerator, notices)
        self._layers = LayerSpans(model, events, on_failure, notices)
        stages = find_stages(model)
        self._stages = max(1, len(stages))
        # What a schedule calls are its stages' modules; nobody else holds this list. A model is not held.
        self._called = None if isinstance(model, nn.Module) else nn.ModuleList(stage.module for stage in stages)
        self.parts = self._layers.parts = Breakdown(
            mark,
            on_failure,
            model=model if isinstance(model, nn.Module) else self._called,
            optimizers=optimizers,
            notices=notices,
            listener=self._layers,
        )
        self._waiting: deque[SeenStep] = deque()
        self._log = span_log(_with_coordinates(place, model), notices)
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
        self._waiting.append(SeenStep(number, begin, end, boundaries, found, threading.get_native_id(), self._stages))
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
        self._layers.stop()
        self.parts.stop()
        self.pass_on(everything=True)
        if self._log.owner is not None:
            self._log.flush()
        self._log.users -= 1
        if self._log.users <= 0:
            self._log.close()

    def flush(self) -> Path | None:
        """Write what the device has come to; the path of the text."""
        self.pass_on()
        return self._log.flush()


def _with_coordinates(place: SpanPlace, model: object) -> SpanPlace:
    """As the model's own mesh or stages tell, where the user does not."""
    if place.device_mesh is not None or place.coordinates is not None:
        return place
    stages = find_stages(model)
    modules = [model] if isinstance(model, nn.Module) else [stage.module for stage in stages]
    info = run_info(modules=modules, stages=stages, environment=place.environment)
    return replace(place, coordinates=dict(info.coordinates) or None)
