"""Names that differ in a number, as one: `layers.3` and `layers.4` are `layers.{3,4}`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise

FEWEST_IN_STEPS = 3  # more numbers at equal distances are written as a range with its step

# A number that is a component of a name, or ends one: `layers.3.mlp`, `Qwen2DecoderLayer_7`.
_NUMBER = re.compile(r"(?:(?<=[._#])|^)[0-9]{1,9}(?=\.|$)")
OPEN = "\0"  # stands for it in a pattern; no name that is written holds it


def split_number(name: str, *, left_open: str = OPEN) -> tuple[str, int | None]:
    """A name with its last number left open, and that number: equal for `layers.3` and `layers.4` but for it."""
    matches = list(_NUMBER.finditer(name))
    if not matches:
        return name, None
    last = matches[-1]
    return name[: last.start()] + left_open + name[last.end() :], int(last.group())


def fill_numbers(pattern: str, numbers: Iterable[int]) -> str:
    """A name that `split_number` left open, with the numbers of all that it stands for: `layers.{0..31}.mlp`."""
    ordered = sorted(numbers)
    if not ordered:
        return pattern
    ranges = number_ranges(ordered)
    return pattern.replace(OPEN, ranges if len(ordered) == 1 else f"{{{ranges}}}")


def number_ranges(numbers: Sequence[int]) -> str:
    """`[0, 1, 2, 3, 7]` -> `"0..3,7"`, `[0, 2, 4, 6]` -> `"0,2..6"`; `numbers` ascend."""
    distances = {after - before for before, after in pairwise(numbers)}
    if len(numbers) > FEWEST_IN_STEPS and len(distances) == 1 and distances != {1}:
        return f"{numbers[0]},{numbers[1]}..{numbers[-1]}"
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(
        str(first) if first == last else f"{first},{last}" if last == first + 1 else f"{first}..{last}"
        for first, last in ranges
    )
