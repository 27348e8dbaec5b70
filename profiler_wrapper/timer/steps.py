"""The parts of a step: data, forward, backward, optimizer, other, each measured where it begins and ends.

`data` is the time from the step's begin to the first forward, `forward` that in calls of the model or, where the loop
calls only modules in it, of the outermost of these (where no model is known: of the outermost modules), `backward` that
in the autograd engine, `optimizer` that in optimizers' steps, `other` the rest, such as a loss between forward and
backward. Several in a step sum up. Where a part was not seen that must have been there, none is known.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from profiler_wrapper.capture import scopes
from profiler_wrapper.capture.layers import all_modules
from profiler_wrapper.capture.torch_state import OptimizerSteps, in_backward
from profiler_wrapper.errors import Notices
from profiler_wrapper.timer.device_events import Mark, seconds_between
from profiler_wrapper.timer.listening import ENGINE

PARTS = ("data", "forward", "backward", "optimizer", "other")  # of a step's time

MOST_BOUNDARIES = 20_000  # of a step
_WRAPPED = ("_orig_mod", "module")  # where torch.compile and DDP keep the model

Boundaries = tuple[tuple[str, Mark], ...]  # each part with where it begins


def parts_of(boundaries: Sequence[tuple[str, Mark]], end: Mark, step_time_s: float) -> dict[str, float] | None:
    """Seconds by PARTS, which add up to `step_time_s`; None where no clock tells one of them."""
    seconds = dict.fromkeys(PARTS, 0.0)
    stops = [*(mark for _, mark in boundaries[1:]), end]
    for (part, begin), stop in zip(boundaries, stops, strict=True):
        duration = seconds_between(begin, stop)
        if duration is None:
            return None
        seconds[part] += duration
    rest_s = step_time_s - sum(duration for part, duration in seconds.items() if part != "other")
    seconds["other"] = max(0.0, rest_s)
    if rest_s < 0:  # the device's clock has steps of about a microsecond, so that parts may exceed the whole by some
        seconds[max(seconds, key=lambda part: seconds[part])] += rest_s
    return seconds


class Breakdown(scopes.Listener):
    """Listens to calls of modules, of the autograd engine and of optimizers, between `start()` and `stop()`.

    Nothing is left on the model, and what is compiled stays as it is. Its own failures go to `on_failure`.

    Args:
        model: whose calls, and those of modules in it, are forward; None: the outermost modules that are called.
        optimizers: whose steps count; empty: those of all.
        notices: say once why parts are not known.
        listener: who listens to calls of modules in the place of this, and passes them on to it.

    Attributes:
        entered: how often the step has come to each part.
        within: the parts that are being measured, outermost first.
    """

    def __init__(
        self,
        mark: Callable[[], Mark],
        on_failure: Callable[[str, Exception], None],
        *,
        model: nn.Module | None = None,
        optimizers: Sequence[Any] = (),
        notices: Notices | None = None,
        listener: scopes.Listener | None = None,
    ) -> None:
        self._listener = self if listener is None else listener
        self._mark, self._on_failure = mark, on_failure
        self._notices = notices or Notices()
        self._model = None if model is None else weakref.ref(model)
        self._inside: set[int] = set()  # the ids of the modules in the model
        self._outside: set[int] = set()  # those of others, such as a teacher
        self._looked_inside = False  # in this step
        self._optimizers = {id(optimizer) for optimizer in optimizers}
        self._steps: OptimizerSteps | None = None
        self._boundaries: list[tuple[str, Mark]] = []
        self._open = False  # a step is
        self.within: list[str] = []
        self.entered: dict[str, int] = {}
        self._pid = os.getpid()  # a forked worker of a data loader may call modules too

    def start(self) -> None:
        """Listen from now on."""
        if self._steps is not None:
            return
        scopes.listen(self._listener)
        self._steps = OptimizerSteps(before=self._optimizer_begins, after=self._optimizer_ends)
        ENGINE.listen(self)

    def stop(self) -> None:
        """Listen no more; a second call does nothing."""
        steps, self._steps, self._open = self._steps, None, False
        if steps is None:
            return
        steps.remove()
        scopes.stop_listening(self._listener)
        ENGINE.stop_listening(self)

    def begin_step(self, mark: Mark) -> None:
        """A step begins, at `mark`."""
        self._boundaries = [("data", mark)]
        self._open, self.entered, self.within, self._looked_inside = True, {}, [], False

    def end_step(self) -> Boundaries:
        """The step has ended: where its parts begin; nothing, where one of them has not been seen."""
        boundaries, self._boundaries, was_open, self._open = self._boundaries, [], self._open, False
        if not was_open or not self.entered:  # nothing was done in it
            return ()
        unseen = None
        if "forward" not in self.entered:
            whose = "" if self._model is None else " of the model that the monitor was given"
            unseen = f"no module{whose} was called in it (model.forward() is not seen)"
        elif "optimizer" in self.entered and "backward" not in self.entered:
            unseen = "an optimizer made a step in it and no backward was seen before"
        if unseen is not None:
            self._outside.clear()  # modules may have come into the model
            self._notices.warn_once("parts", f"the parts of a step are not known: {unseen}")
            return ()
        return tuple(boundaries)

    # -- what is listened to ----------------------------------------------------------------------

    def open_call(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], marked: set[str] | None = None
    ) -> object | None:
        """A module is called; see `scopes.Listener`."""
        if not self._may_enter() or not self._is_forward(module):
            return None
        return self if self._enter("forward") else None

    def close_call(self, opened: object) -> None:
        """That call has returned or raised."""
        self._leave("forward")

    def _is_forward(self, module: nn.Module) -> bool:
        if in_backward():
            return False
        model = self._model() if self._model is not None else None
        if model is None:
            return True
        if id(module) in self._outside:
            return False
        if self._is_of(model, module):
            return True
        if self._looked_inside:
            return False
        self._looked_inside = True  # once in a step: it takes milliseconds where there are thousands of modules
        try:
            self._inside = {id(one) for one in all_modules(model)}
            if self._is_of(model, module):
                return True
            self._outside.update(id(one) for one in all_modules(module) if id(one) not in self._inside)
        except Exception as error:
            self._open = False
            self._on_failure("measuring the parts of a step", error)
        return False

    def _is_of(self, model: nn.Module, module: nn.Module) -> bool:
        found: Any = module
        while found is not None:
            if found is model or id(found) in self._inside:
                return True
            children = found.__dict__.get("_modules") or {}
            found = next((children[name] for name in _WRAPPED if children.get(name) is not None), None)
        return False

    def open_run(self) -> bool:
        """The autograd engine is about to run."""
        return self._enter("backward")

    def close_run(self) -> None:
        """That run is over."""
        self._leave("backward")

    def _optimizer_begins(self, optimizer: Callable[[], Any]) -> None:
        if not self._optimizers or id(optimizer()) in self._optimizers:
            self._enter("optimizer")

    def _optimizer_ends(self, optimizer: Callable[[], Any]) -> None:
        if not self._optimizers or id(optimizer()) in self._optimizers:
            self._leave("optimizer")

    def _may_enter(self) -> bool:
        """What lies within forward or backward is part of it; an optimizer may call both."""
        return self._open and self.within[-1:] in ([], ["optimizer"]) and os.getpid() == self._pid

    def _enter(self, part: str) -> bool:
        if not self._may_enter():
            return False
        if len(self._boundaries) >= MOST_BOUNDARIES:
            self._open, self._boundaries = False, []  # nothing of this step is kept
            self._notices.warn_once(
                "parts",
                f"the parts of a step are not known: it came to more than {MOST_BOUNDARIES // 2} of them "
                "(has the loop told where its steps end?)",
            )
            return False
        self.within.append(part)
        self.entered[part] = self.entered.get(part, 0) + 1
        self._add(part)
        return True

    def _leave(self, part: str) -> None:
        if self._open and self.within[-1:] == [part]:
            self.within.pop()
            self._add(self.within[-1] if self.within else "other")

    def _add(self, part: str) -> None:
        try:
            mark = self._mark()
            if (mark.event is None) == (self._boundaries[0][1].event is None):  # else a graph is being captured
                self._boundaries.append((part, mark))
        except Exception as error:
            self._open = False
            self._on_failure("measuring the parts of a step", error)
