"""Ops of which something is not known, gathered by name, class and phase: what the lists of known unknowns hold."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from profiler_wrapper.analysis.model import UncountedRow
from profiler_wrapper.analysis.phase import Phase


@dataclass(slots=True)
class _Calls:
    """Of one op."""

    count: int = 0
    time_ns: int = 0
    layers: dict[str, None] = field(default_factory=dict)


class UnknownOps:
    """Gathers calls, and gives a row for each op."""

    def __init__(self) -> None:
        self._calls: dict[tuple[str, str, Phase], _Calls] = defaultdict(_Calls)

    def add(self, op: str, class_name: str, phase: Phase, layer: str | None, time_ns: int) -> None:
        """A call; `layer`: None where it is not known."""
        calls = self._calls[op, class_name, phase]
        calls.count += 1
        calls.time_ns += time_ns
        if layer is not None:
            calls.layers[layer] = None

    def rows(self, steps: int) -> tuple[UncountedRow, ...]:
        """The longest first; times are per step."""
        rows = [
            UncountedRow(
                op=op,
                class_name=class_name,
                phase=phase,
                layers=tuple(calls.layers),
                count=calls.count,
                time_per_step_ns=calls.time_ns // steps,
            )
            for (op, class_name, phase), calls in self._calls.items()
        ]
        return tuple(sorted(rows, key=lambda row: (-row.time_per_step_ns, row.op, row.phase)))
