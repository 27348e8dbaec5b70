"""Which ops a layer calls more often: only what can be no other layer's.

Calls are counted per phase, and where an op ran is known. So an op says something about a row only if, of all rows
of its phase with more events, this is the only one that it ran in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from profiler_wrapper.analysis.guard_model import Baseline
from profiler_wrapper.analysis.guard_rows import Row, count_text, events_limit, outside, renamed_layers
from profiler_wrapper.analysis.phase import Phase

_WAITS = frozenset({"aten::item", "aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero"})
_MOST_OPS = 3
_Calls = tuple[float, float]  # in the baseline, in the run


def grown_ops(base: Baseline, run: Baseline) -> dict[Phase, dict[str, _Calls]]:
    """Per phase the ops of a step that are called more often."""
    grown: dict[Phase, dict[str, _Calls]] = {}
    for phase, ops in run.ops.items():
        for op, now in ops.items():
            before = base.ops.get(phase, {}).get(op, (0.0, 0.0))
            found = outside(events_limit(before), now, before)
            if found is not None and found[1] > found[0]:
                grown.setdefault(phase, {})[op] = found
    return grown


def with_ops(rows: Sequence[Row], base: Baseline, run: Baseline) -> list[Row]:
    """The rows; those with more events name the ops, as `+2 aten::item`, for each of their layers."""
    grown, renamed = grown_ops(base, run), renamed_layers(base, run)
    told = []
    for row in rows:
        phase = row.finding.phase
        text = ""
        if row.worse and phase is not None:
            same_phase = [one for one in rows if one.worse and one.finding.phase == phase]
            text = _told(_own(row, same_phase, grown.get(phase, {}), run.op_layers.get(phase, {}), renamed))
        told.append(replace(row, finding=replace(row.finding, text=f"{row.finding.text}: {text}")) if text else row)
    return told


def _own(
    row: Row,
    rows: Iterable[Row],
    grown: Mapping[str, _Calls],
    layers_of: Mapping[str, Sequence[str]],
    renamed: Mapping[str, str],
) -> dict[str, _Calls]:
    """The ops that ran in this row and in no other, with the calls of the whole phase per layer of the row."""
    own: dict[str, _Calls] = {}
    for op, (before, after) in grown.items():
        layers = None if op not in layers_of else {renamed.get(layer, layer) for layer in layers_of[op]}
        possible = [one for one in rows if layers is None or not layers.isdisjoint(one.layers)]
        if possible == [row] and (layers is None or layers.issuperset(row.layers)):
            own[op] = before / row.members, after / row.members
    return own


def _told(grown: Mapping[str, _Calls]) -> str:
    """What waits first, then what grew by the largest factor."""
    order = sorted(grown, key=lambda op: (op not in _WAITS, -_factor(*grown[op]), op))
    more = f" and {len(order) - _MOST_OPS} more" if len(order) > _MOST_OPS else ""
    return ", ".join(f"+{count_text(grown[op][1] - grown[op][0])} {op}" for op in order[:_MOST_OPS]) + more


def _factor(before: float, after: float) -> float:
    return after / before if before else float("inf")
