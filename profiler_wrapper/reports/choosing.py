"""Which folds of a layer tree get a row where there is only room for some: the dearest, each below its parent."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, Literal, TypeVar

from profiler_wrapper.reports.folding import Fold, Tree

Order = Literal["cost", "model"]
Extra = TypeVar("Extra")


@dataclass(eq=False)
class Shown(Generic[Extra]):
    """A fold that got a row, further rows that belong to it, and the folds below that got one."""

    fold: Fold
    depth: int
    parent: Shown[Extra] | None = None
    extras: list[Extra] = field(default_factory=list)
    children: list[Shown[Extra]] = field(default_factory=list)

    @property
    def inside_fold(self) -> bool:
        """Whether it stands for a part of many layers."""
        return self.parent is not None and len(self.parent.fold.members) > 1

    def walk(self) -> Iterator[Shown[Extra]]:
        """Itself and all below it."""
        stack = [self]
        while stack:
            this = stack.pop()
            yield this
            stack += this.children


def choose(
    tree: Tree, *, most: int, extras: Callable[[Shown[Extra]], list[Extra]]
) -> tuple[list[Shown[Extra]], list[Fold]]:
    """The roots with what is shown below them, in at most `most` rows; and the roots that do not fit.

    Those need one row together, which is counted. `extras` gives the further rows of a numbered
    fold; as many as fit are kept.
    """
    roots = sorted(tree.roots(), key=lambda fold: -fold.time_ns)
    fitting = roots if len(roots) <= most else roots[: max(0, most - 1)]
    rest = roots[len(fitting) :]
    room = most - len(fitting) - bool(rest)
    number = count()
    shown = [Shown[Extra](root, 0) for root in fitting]
    waiting = [(-one.fold.time_ns, next(number), one) for one in shown]
    heapq.heapify(waiting)
    while waiting:
        _, _, one = heapq.heappop(waiting)
        if one.parent is not None:
            if room < 1:
                break
            room -= 1
            one.parent.children.append(one)
        if one.fold.numbered and not one.inside_fold:
            one.extras = extras(one)[:room]
            room -= len(one.extras)
        if room > 0:
            for fold in tree.children(one.fold):
                below = Shown(fold, one.depth + 1, parent=one)
                heapq.heappush(waiting, (-fold.time_ns, next(number), below))
    return shown, rest


def in_order(shown: Sequence[Shown[Extra]], order: Order) -> list[Shown[Extra]]:
    """Siblings as they are drawn: the dearest first, or as in the model."""
    if order == "model":
        return sorted(shown, key=lambda one: one.fold.order)
    return sorted(shown, key=lambda one: (-one.fold.time_ns, one.fold.order))
