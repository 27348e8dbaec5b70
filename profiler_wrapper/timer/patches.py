"""Functions of torch that ours stand in front of while somebody listens: where torch has no hook."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from profiler_wrapper.capture.torch_state import keep_dynamo_off


class Patch(NamedTuple):
    """One function: `wrap` makes of torch's the one that takes its place."""

    module: str
    owner: str  # a class in it; "": the module itself
    name: str
    wrap: Callable[[Any], Any]


class Patches:
    """Functions that are ours from the first `listen` to the last `stop_listening`, however many listen.

    What a version of torch does not have is not wrapped.

    Attributes:
        listeners: those that there are now.
    """

    def __init__(self, patches: Sequence[Patch]) -> None:
        self.patches = tuple(patches)
        self.listeners: tuple[Any, ...] = ()
        self._in_place: dict[Patch, tuple[Any, Any, Any]] = {}  # -> owner, what was there, ours
        self._lock = threading.RLock()

    def listen(self, listener: object) -> None:
        """Tell `listener`. To be called again when torch's modules may have been imported since; that is quick."""
        if listener in self.listeners and len(self._in_place) == len(self.patches):
            return
        with self._lock:
            if listener not in self.listeners:
                self.listeners = (*self.listeners, listener)
            for patch in self.patches:
                module = sys.modules.get(patch.module)
                owner = getattr(module, patch.owner, None) if patch.owner else module
                original = None if owner is None else vars(owner).get(patch.name)
                # Ours is there, or somebody's above it; else somebody may have put the original back.
                if original is None or (patch in self._in_place and original is not self._in_place[patch][1]):
                    continue
                ours = functools.wraps(original)(patch.wrap(getattr(owner, patch.name)))
                keep_dynamo_off(ours, and_below=False)
                setattr(owner, patch.name, ours)
                self._in_place[patch] = owner, original, ours

    def stop_listening(self, listener: object) -> None:
        """With the last one all is as it was; ours stays, and does nothing, where somebody has wrapped it since."""
        with self._lock:
            self.listeners = tuple(one for one in self.listeners if one is not listener)
            if self.listeners:
                return
            for patch, (owner, original, ours) in list(self._in_place.items()):
                if vars(owner).get(patch.name) is ours:
                    setattr(owner, patch.name, original)
                    del self._in_place[patch]
