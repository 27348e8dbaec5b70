"""Where torch.compile could not go on: the graph breaks of this process so far, as Dynamo tells them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any

_MOST = 20
_LONGEST = 200
_PLAINLY = (  # Dynamo's own words for what has a plain name
    ("generic_jump", "a branch on the value of a tensor"),
    ("call_function graph_break", "torch._dynamo.graph_break() was called"),
)


def graph_breaks() -> list[dict[str, Any]] | None:
    """`{reason, count, source}` per reason and place (`file:line`, None where not told), the most frequent first.

    A place counts once for each time it was compiled, recompilations among them. Empty where nothing was compiled:
    Dynamo is not imported for this. None where this torch does not tell.
    """
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is None:
        return []
    told, counters = getattr(utils, "graph_break_reasons", None), getattr(utils, "counters", None)
    if told is None and counters is None:
        return None
    found: Counter[tuple[str, str | None]] = Counter()
    for entry in list(told or ()):
        if getattr(entry, "graph_break", True):
            found[_reason(getattr(entry, "reason", "")), _source(getattr(entry, "user_stack", None))] += 1
    with_place = {reason for reason, _ in found}
    for text, count in dict((counters or {}).get("graph_break") or {}).items():
        if _reason(text) not in with_place:
            found[_reason(text), None] += int(count)
    return [
        {"reason": reason, "count": count, "source": source} for (reason, source), count in found.most_common(_MOST)
    ]


def _reason(text: object) -> str:
    """Its first line: what follows is an explanation of many."""
    first = next((line.strip() for line in str(text).splitlines() if line.strip()), "")
    plain = next((plain for begin, plain in _PLAINLY if first.startswith(begin)), None)
    return (f"{plain} ({first})" if plain else first)[:_LONGEST]


def _source(stack: Iterable[Any] | None) -> str | None:
    """`file:line` of the innermost frame."""
    frames = list(stack or ())
    if not frames:
        return None
    name, line = getattr(frames[-1], "filename", None), getattr(frames[-1], "lineno", None)
    return f"{name}:{line}" if name and line else None
