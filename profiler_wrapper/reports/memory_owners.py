"""Who holds memory, in rows: what like layers hold for the like reason is one row."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from profiler_wrapper.analysis.memory_model import MemoryCategory, Owner
from profiler_wrapper.analysis.numbered_names import OPEN, fill_numbers, split_number
from profiler_wrapper.analysis.phase import Phase
from profiler_wrapper.reports.memory_tree import NO_OP, OUTSIDE, is_named


@dataclass
class OwnerGroup:
    """Owners that differ by one number in their layer's name."""

    category: MemoryCategory
    pattern: str
    op: str
    phase: Phase | None
    numbers: set[int] = field(default_factory=set)
    size_bytes: int = 0
    count: int = 0

    @property
    def place(self) -> str:
        """`"model.layers.{0..11}.mlp"`; `""` for what has no layer."""
        return fill_numbers(self.pattern, self.numbers)

    @property
    def text(self) -> str:
        """`"aten::mul in model.layers.{0..11}.mlp"`, or a tensor's name."""
        if self.op and self.place:
            return f"{self.op} in {self.place}"
        if self.place:
            return self.place
        return f"{self.op} {OUTSIDE if self.phase == 'other' else f'({self.phase})'}" if self.phase else self.op


def owner_groups(owners: Iterable[Owner]) -> list[OwnerGroup]:
    """The largest first; they add up to what `owners` hold. A tensor that has a name needs no op."""
    groups: dict[tuple[MemoryCategory, str, str, Phase | None], OwnerGroup] = {}
    for owner in owners:
        named = is_named(owner)
        pattern, number = split_number((owner.name if named else owner.layer).replace(OPEN, " "))
        op = "" if named else owner.op or NO_OP
        phase = None if named else owner.phase
        group = groups.setdefault((owner.category, pattern, op, phase), OwnerGroup(owner.category, pattern, op, phase))
        if number is not None:
            group.numbers.add(number)
        group.size_bytes += owner.size_bytes
        group.count += owner.count
    found = [group for group in groups.values() if group.size_bytes]
    return sorted(found, key=lambda group: (-group.size_bytes, group.category, group.pattern))
