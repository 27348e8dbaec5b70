"""What tells of steps in a loop that says nothing: optimizers, and the compiler."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Hashable
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook


def on_optimizer_step(stepped: Callable[[Hashable], None]) -> Any:
    """Call `stepped` after each step of any optimizer, with what stands for that optimizer.

    The handle's `remove()` ends it.
    """
    # An object of ours stands for it: its id could be given to another one.
    known: weakref.WeakKeyDictionary[Any, object] = weakref.WeakKeyDictionary()

    def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        stepped(known.setdefault(optimizer, object()))

    return register_optimizer_step_post_hook(after_step)


def compilations() -> int:
    """How much torch.compile has compiled so far; 0 where nobody has used it."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    if not counters:
        return 0
    return int(counters["stats"]["unique_graphs"]) + int(counters["frames"]["total"])
