"""When a step has ended: by what the user says, what the optimizer does, what is called. Without torch."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

# Calls with gradients while an optimizer may come: micro-batches, until there are too many of them.
MOST_MICRO_BATCHES = 64
# Steps of another optimizer while the first makes none: then that one has taken over.
MOST_OTHER_STEPS = 16


class Ended(Enum):
    """What an event means for the step that is running."""

    NO = "it goes on"
    YES = "it has ended"
    RESTART = "it has ended, and what was taken for steps before it was none"


@dataclass(slots=True)
class StepCounter:
    """Says when a step has ended.

    A step is what `prof.step()` ends. Without it, one step of the first optimizer seen, or of the next one
    once that is no more or has made none for `MOST_OTHER_STEPS` steps of another; of one that tells
    nobody (compiled, not torch's, or made inside of backward), what changes the parameters between two
    calls. Without that, one call of the root and the backward after it: when a root is called that was
    already called in this step, a new one begins. While an optimizer that may step is alive, calls with
    gradients are micro-batches, until there are `MOST_MICRO_BATCHES` of them. Where one steps though none
    was alive, what was recorded so far is recorded anew.

    Args:
        optimizer_may_come: whether one is alive that holds a parameter of a root; asked once, at the first call
            for which it matters.
    """

    source: Literal["nothing yet", "prof.step()", "optimizer", "updates", "root calls"] = "nothing yet"
    ended: int = 0
    count_root_calls: bool = True
    optimizer_may_come: Callable[[], bool] = lambda: True
    _optimizer: Hashable | None = None
    _others: Counter[Hashable] = field(default_factory=Counter)  # their steps since the first one's last
    _roots: set[Hashable] = field(default_factory=set)  # called in the running step
    _trained: bool = False  # a root was called with gradients in the running step
    _micro_batches: int = 0  # calls with gradients that may have been some
    _waits_for_optimizer: bool | None = None  # not asked yet

    def user_step(self) -> Ended:
        """`prof.step()` was called: from now on nothing else counts."""
        before, self.source = self.source, "prof.step()"
        # The optimizer's step just before the first prof.step() was the same step.
        if before == "optimizer" and not self._trained:
            return Ended.NO
        return self._end()

    def optimizer_step(self, optimizer: Hashable) -> Ended:
        """An optimizer, or what a weak reference to it refers to, has made a step."""
        self._others[optimizer] += 1
        if _is_gone(self._optimizer) or self._others[optimizer] > MOST_OTHER_STEPS:
            self._optimizer = optimizer
        if optimizer == self._optimizer:
            self._others.clear()
        if self.source == "prof.step()" or optimizer != self._optimizer:
            return Ended.NO
        before, self.source = self.source, "optimizer"
        self._end()
        return Ended.RESTART if before == "root calls" else Ended.YES

    def root_enters(self, root: Hashable, *, gradients: bool, updated: bool = False) -> Ended:
        """A root is about to be called; YES: the step before this call has ended.

        `updated`: the parameters have changed since the last call.
        """
        again = root in self._roots
        self._roots.add(root)
        self._trained |= gradients
        if self.source in ("prof.step()", "optimizer") or not again or not self.count_root_calls:
            return Ended.NO
        were_none = False
        if updated:
            were_none = self.source == "root calls" and self._micro_batches > 0
            self.source = "updates"
        elif self.source == "updates" or (gradients and self._is_micro_batch()):
            return Ended.NO
        else:
            self.source = "root calls"
        self._end()
        self._roots.add(root)
        self._trained = gradients
        return Ended.RESTART if were_none else Ended.YES

    def _is_micro_batch(self) -> bool:
        """Whether this call with gradients, after another one, may belong to the same step of an optimizer."""
        self._micro_batches += 1
        if self._waits_for_optimizer is None:
            self._waits_for_optimizer = self.optimizer_may_come()
        return self._waits_for_optimizer and self._micro_batches < MOST_MICRO_BATCHES

    def last_step_counts(self) -> bool:
        """The recording ends now: is what runs a step of its own, not just what follows the last one?"""
        if self.source == "nothing yet":
            return True
        return self.source in ("updates", "root calls") and bool(self._roots)

    def _end(self) -> Ended:
        self.ended += 1
        self._roots.clear()
        self._trained = False
        return Ended.YES


def _is_gone(optimizer: Hashable | None) -> bool:
    return optimizer is None or (isinstance(optimizer, weakref.ref) and optimizer() is None)
