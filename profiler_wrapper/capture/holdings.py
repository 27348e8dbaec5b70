"""Tells which memory the model and its optimizers hold, while a session records.

Everything is told when a session begins and when it ends; before each step of an optimizer the gradients of
its parameters; after it its state, if that has changed hands. What else an optimizer holds is told when it
makes its first step in a session, for nobody knew it before. Of an optimizer that is none of torch's both
are told at the end of each step of the loop: of gradients only those that are still there.

A loop may run for long, so there are bounds. After `FULL_STEPS` steps of an optimizer, or `MOST_TENSORS`
entries, a moment tells only what lies where nothing was told before, after as many again nothing; the last
moment before the end and the end itself are always told in full.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from profiler_wrapper.capture.layers import Root
from profiler_wrapper.capture.optimizers import OptimizerHolds
from profiler_wrapper.capture.parameters import ParameterNames, gradients_of
from profiler_wrapper.capture.phases import in_backward
from profiler_wrapper.capture.storages import Listing
from profiler_wrapper.recording.owned import Holding

FULL_STEPS = 20
MOST_TENSORS = 100_000

Reference = Callable[[], Any]  # a weak reference to an optimizer


class HeldMemory:
    """What the model and its optimizers hold. Tensors and optimizers are held weakly.

    Only a given optimizer to which there are no weak references (it has `__slots__`) lives as long as this.

    No method raises: what fails is in `problem`, and telling ends.

    Args:
        roots: asks for the models known so far.
        optimizers: those that a user gave, see `find_optimizers`; others are found by their steps.
    """

    def __init__(self, roots: Callable[[], Sequence[Root]], optimizers: Iterable[object] = ()) -> None:
        self.problem: str | None = None
        self._names = ParameterNames(roots)
        self._optimizers = {id(one): _reference(one) for one in optimizers}  # in the order they came
        self._session: _Session | None = None

    def begin(self) -> None:
        """A session is about to begin."""
        self.problem = None
        self._session = _Session()
        self._safely(self._tell_everything)

    def end(self) -> tuple[Holding, ...]:
        """The session is about to end: all that was told in it, in order of time; nothing if there is a problem.

        For the last moment has to list everything: what is missing there is taken for gone.
        """
        self._safely(self._tell_last)
        session, self._session = self._session, None
        return session.holdings() if session is not None and self.problem is None else ()

    def optimizers(self) -> list[Any]:
        """Those that were given, or have made a step in a session, and are still there."""
        return self._alive()

    def forget(self) -> None:
        """The session is worth nothing."""
        self._session = None

    def before_step(self, optimizer: Reference) -> None:
        """An optimizer is about to make a step; one of another training, on its own thread, is not ours to read."""
        self._safely(lambda session: None if session.is_elsewhere() else self._before_step(session, optimizer))

    def after_step(self, optimizer: Reference) -> None:
        """It has made it."""
        self._safely(lambda session: None if session.is_elsewhere() else self._after_step(session, optimizer()))

    def step_ended(self) -> None:
        """A step of the loop is about to end: tell of the optimizers whose steps torch does not tell of."""
        self._safely(self._tell_silent)

    def _safely(self, action: Callable[[_Session], None]) -> None:
        session = self._session  # another thread may end it meanwhile
        if session is None or self.problem is not None:
            return
        try:
            with torch._C.DisableTorchFunction():  # what a mode or a subclass makes of reading an attribute is not ours
                action(session)
        except Exception as error:
            self.problem = (
                "what the model and its optimizers hold is not known, because listing it failed: "
                f"{type(error).__name__}: {error}"
            )

    def _tell_everything(self, session: _Session) -> None:
        listing, names = Listing(), self._names
        names.refresh()
        for tensor, name in names.tensors():
            listing.add(tensor, "params", name)
        parameters = list(names.parameters())
        gradients = gradients_of(tensor for tensor, _ in parameters)
        for (_, name), gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                listing.add(gradient, "grads", name)
        for optimizer in self._alive():
            holds = session.holds[id(optimizer)] = OptimizerHolds()
            holds.add_all(listing, optimizer, names)
        session.keep(listing)

    def _tell_last(self, session: _Session) -> None:
        session.keep_what_waits()
        self._tell_everything(session)

    def _before_step(self, session: _Session, reference: Reference) -> None:
        optimizer = reference()
        known = self._optimizers.get(id(optimizer))
        if known is None or known() is not optimizer:  # it may have the id of one that is no more
            self._optimizers[id(optimizer)] = reference
            session.holds.pop(id(optimizer), None)
        holds = session.holds.setdefault(id(optimizer), OptimizerHolds())
        session.tell(holds.before_step(optimizer, self._names), in_full=holds.steps < FULL_STEPS)

    def _after_step(self, session: _Session, optimizer: Any) -> None:
        holds = session.holds.get(id(optimizer))
        if holds is None:  # the session began within its step
            return
        listing = holds.after_step(optimizer)
        if listing is not None:
            session.tell(listing, in_full=holds.steps <= FULL_STEPS)

    def _tell_silent(self, session: _Session) -> None:
        for optimizer in self._alive():
            if not isinstance(optimizer, torch.optim.Optimizer):
                self._before_step(session, _reference(optimizer))
                self._after_step(session, optimizer)

    def _alive(self) -> list[Any]:
        alive = {key: optimizer for key, one in self._optimizers.items() if (optimizer := one()) is not None}
        self._optimizers = {key: self._optimizers[key] for key in alive}
        return list(alive.values())


def _reference(optimizer: object) -> Reference:
    try:
        return weakref.ref(optimizer)
    except TypeError:
        return lambda: optimizer


class _Session:
    """What is told in one session."""

    def __init__(self) -> None:
        self.holds: dict[int, OptimizerHolds] = {}  # by id of the optimizer
        self._moments: list[Listing] = []
        self._places: dict[int, int] = {}  # address: bytes, of the first `_placed` moments
        self._placed = 0
        self._count = 0
        self._waiting: Listing | None = None
        self._thread = threading.get_ident()

    def is_elsewhere(self) -> bool:
        """On a thread that is neither the session's nor one of autograd's engine.

        torch writes a gradient without Python's lock: whoever reads it meanwhile crashes.
        """
        return threading.get_ident() != self._thread and not in_backward()

    def tell(self, listing: Listing, *, in_full: bool) -> None:
        """Keep a moment, or what is new in it."""
        if not len(listing):
            return  # an optimizer without gradients or state
        if in_full and self._count < MOST_TENSORS:
            self.keep(listing)
            return
        self._waiting = listing
        if self._count < 2 * MOST_TENSORS:
            new = listing.leave_out(self._all_places())
            if len(new):
                self._keep(new)

    def keep(self, listing: Listing) -> None:
        """Keep a moment in full."""
        self._waiting = None
        self._keep(listing)

    def keep_what_waits(self) -> None:
        """Nothing comes after the last moment: keep it in full."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            if self._moments and self._moments[-1].time_ns == waiting.time_ns:
                self._moments.pop()
            self._keep(waiting)

    def holdings(self) -> tuple[Holding, ...]:
        """All that was kept, in order of time."""
        return tuple(listing.holding() for listing in self._moments)

    def _keep(self, listing: Listing) -> None:
        self._moments.append(listing)
        self._count += len(listing)

    def _all_places(self) -> dict[int, int]:
        for listing in self._moments[self._placed :]:
            listing.add_places(self._places)
        self._placed = len(self._moments)
        return self._places
