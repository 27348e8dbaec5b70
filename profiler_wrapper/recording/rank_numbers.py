"""Ranks as numbers: lists of them as people write them, and which of a job's are missing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from profiler_wrapper.errors import WrongUse

_AT_MOST_NAMED = 8  # ranks that are missing are named one by one


class Gap(NamedTuple):
    """Something that is not there, and why as far as can be told."""

    what: str
    reason: str
    rank: int | None = None


def rank_gaps(ranks: Iterable[int], reason: str) -> list[Gap]:
    """Ranks that are missing for one reason: one by one, or together where they are many."""
    ranks = sorted(ranks)
    if len(ranks) <= _AT_MOST_NAMED:
        return [Gap(f"rank {rank}", reason, rank) for rank in ranks]
    return [Gap(f"{len(ranks)} ranks: {ranges(ranks)}", reason)]


def absent_ranks(there: Iterable[int], world_size: int | None, ranks: Iterable[int] = ()) -> list[Gap]:
    """The ranks of the job that `there` lacks; of those among `ranks` something else is there."""
    there, known = set(there), set(ranks)
    described = sorted(known - there)
    without = _between(there | known, world_size or 0)
    if len(described) + sum(map(len, without)) <= _AT_MOST_NAMED:
        reasons = {rank: "no file of it is there" for part in without for rank in part}
        reasons |= dict.fromkeys(described, "it left no trace and no timer's log, only its description")
        return [Gap(f"rank {rank}", reasons[rank], rank) for rank in sorted(reasons)]
    found = []
    if without:
        found.append(Gap(f"{sum(map(len, without))} ranks: {_told(without)}", "no file of theirs is there"))
    if described:
        found.append(Gap(f"{len(described)} ranks: {ranges(described)}", "they left no trace and no timer's log"))
    return found


def _between(numbers: Iterable[int], end: int) -> list[range]:
    """What is not among `numbers`, from 0 up to `end`, which may be any number that a file tells."""
    found, begin = [], 0
    for number in [*sorted(number for number in set(numbers) if 0 <= number < end), end]:
        if number > begin:
            found.append(range(begin, number))
        begin = number + 1
    return found


def ranges(numbers: Iterable[int], *, most: int = 12) -> str:
    """`[0, 1, 2, 5]` -> `"0-2, 5"`; at most so many parts."""
    return _told(parts_of(numbers), most)


def rank_list_text(ranks: Iterable[int]) -> str:
    """Who takes part, as groups are named: `(0, 1, 2, 5)` -> `"0-2,5"`."""
    return ",".join(map(_part_text, parts_of(ranks)))


def parts_of(numbers: Iterable[int]) -> list[range]:
    """`[0, 1, 2, 5]` -> `[range(0, 3), range(5, 6)]`."""
    parts: list[range] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1].stop:
            parts[-1] = range(parts[-1].start, number + 1)
        else:
            parts.append(range(number, number + 1))
    return parts


def _told(parts: Sequence[range], most: int = 12) -> str:
    return ", ".join(map(_part_text, parts[:most])) + (f" and {len(parts) - most} more" if len(parts) > most else "")


def _part_text(part: range) -> str:
    return str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}"


def parse_ranks(text: str, *, option: str = "--ranks") -> tuple[int, ...]:
    """`"0-2,5"` -> `(0, 1, 2, 5)`; `option` is what errors name.

    Raises:
        WrongUse: that is no list of ranks.
    """
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,7})\s*(?:-\s*(\d{1,7})\s*)?", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise WrongUse(f"{option} {text}: say ranks as in 0-7 or 0,3,8-11")
        found.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(sorted(found))
