"""Many names as few: `model.layers.{0..31}.mlp` stands for all 32 of them, and for nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterable

from profiler_wrapper.analysis.numbered_names import number_ranges

_NUMBER = re.compile(r"(?:(?<=[._#])|^)(?:0|[1-9][0-9]{0,8})(?=\.|$)")

_Split = tuple[tuple[str, ...], tuple[frozenset[int], ...]]  # what is between the numbers, and the numbers


def fold_names(names: Iterable[str]) -> tuple[str, ...]:
    """Names that differ in their numbers as one, in order of their first.

    Exact: what a folded name stands for was among the names, each number with each.
    """
    split: list[_Split] = [_split(name) for name in dict.fromkeys(names)]
    for place in range(max((len(numbers) for _, numbers in split), default=0) - 1, -1, -1):
        split = _merged(split, place)
    return tuple(_written(texts, numbers) for texts, numbers in split)


def _split(name: str) -> _Split:
    found = list(_NUMBER.finditer(name))
    ends = [0, *(match.end() for match in found)]
    starts = [*(match.start() for match in found), len(name)]
    texts = tuple(name[end:start] for end, start in zip(ends, starts, strict=True))
    return texts, tuple(frozenset([int(match.group())]) for match in found)


def _merged(split: list[_Split], place: int) -> list[_Split]:
    """Those that are equal but for the numbers at one place, as one."""
    together: dict[object, _Split] = {}
    for texts, numbers in split:
        if place >= len(numbers):
            together[texts, numbers] = (texts, numbers)
            continue
        key = (texts, numbers[:place], numbers[place + 1 :], place)
        known = together.get(key)
        here = numbers[place] | known[1][place] if known is not None else numbers[place]
        together[key] = (texts, (*numbers[:place], here, *numbers[place + 1 :]))
    return list(together.values())


def _written(texts: tuple[str, ...], numbers: tuple[frozenset[int], ...]) -> str:
    parts = [texts[0]]
    for text, members in zip(texts[1:], numbers, strict=True):
        ranges = number_ranges(sorted(members))
        parts.append(ranges if len(members) == 1 else f"{{{ranges}}}")
        parts.append(text)
    return "".join(parts)
