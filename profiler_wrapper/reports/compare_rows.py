"""The rows of a printed comparison: own times of like layers together, so that they add up. Numbers, no drawing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from profiler_wrapper.analysis.compare_model import ComparedRow, Comparison
from profiler_wrapper.analysis.compare_names import folded_name, like_name
from profiler_wrapper.analysis.sums import sum_of_known

_FEWEST_FOLDED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedRow:
    """Own time of like layers in one phase, nanoseconds per step; None where a side has none of them."""

    label: str
    phase: str
    a_ns: float | None
    b_ns: float | None
    retained_a: float | None  # bytes, of all of them, with what is inside of them
    retained_b: float | None
    flops_a: int | None
    flops_b: int | None
    slower: tuple[str, ...] = ()  # those that are, by name
    faster: tuple[str, ...] = ()
    members: int = 1

    @property
    def difference_ns(self) -> float:
        return (self.b_ns or 0.0) - (self.a_ns or 0.0)


def folded_rows(comparison: Comparison) -> list[FoldedRow]:
    """Every row once, those that changed most first; what has no layer is among them."""
    groups: dict[tuple[str, str, str], list[ComparedRow]] = defaultdict(list)
    for row in comparison.rows:
        groups[like_name(row.layer, row.block)[0], row.class_name, row.phase].append(row)
    folded: list[FoldedRow] = []
    for rows in groups.values():
        members = [rows] if len(rows) >= _FEWEST_FOLDED else [[row] for row in rows]
        folded += [_folded(group, comparison) for group in members]
    for reason in comparison.unattributed:
        folded.append(
            FoldedRow(
                label=f"(unattributed) {reason.reason}",
                phase="",
                a_ns=reason.time_a_ns / comparison.steps_a,
                b_ns=reason.time_b_ns / comparison.steps_b,
                retained_a=None,
                retained_b=None,
                flops_a=None,
                flops_b=None,
            )
        )
    return sorted(folded, key=lambda row: -abs(row.difference_ns))


def _folded(rows: Sequence[ComparedRow], comparison: Comparison) -> FoldedRow:
    sides_a = [row.a for row in rows if row.a is not None]
    sides_b = [row.b for row in rows if row.b is not None]
    outside = "optimizer" if rows[0].phase == "optimizer" else "outside layers"
    return FoldedRow(
        label=folded_name({row.layer: row.block for row in rows}) or outside,
        phase=rows[0].phase,
        a_ns=sum(side.self_time_ns for side in sides_a) / comparison.steps_a if sides_a else None,
        b_ns=sum(side.self_time_ns for side in sides_b) / comparison.steps_b if sides_b else None,
        retained_a=sum_of_known(side.retained_bytes for side in sides_a),
        retained_b=sum_of_known(side.retained_bytes for side in sides_b),
        flops_a=sum_of_known(side.self_flops_per_step for side in sides_a),
        flops_b=sum_of_known(side.self_flops_per_step for side in sides_b),
        slower=tuple(row.layer for row in rows if row.decision == "slower"),
        faster=tuple(row.layer for row in rows if row.decision == "faster"),
        members=len(rows),
    )
