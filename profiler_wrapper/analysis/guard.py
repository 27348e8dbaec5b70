"""A guard for continuous integration: what is exact first, then time, and only what can be judged."""

from __future__ import annotations

from collections.abc import Sequence

from profiler_wrapper.analysis.compare_differences import OF_MACHINE, differences
from profiler_wrapper.analysis.compare_model import Difference
from profiler_wrapper.analysis.guard_exact import (
    better_attention,
    check_backends,
    check_breaks,
    check_events,
    check_flops,
    check_memory,
    check_synchronisations,
)
from profiler_wrapper.analysis.guard_model import Baseline, GuardCheck, GuardReport
from profiler_wrapper.analysis.guard_times import check_time

_NAMES = ("FLOPs", "ops", "synchronisations", "graph breaks", "memory", "attention", "time")
_OF_TIMES = OF_MACHINE | {"allocations in the timed steps"}  # recording those takes a few percent of a step
_OF_COUNTS = OF_MACHINE - {"CPU", "Python"}  # what the numbers of kernels, waits and bytes depend on


def guard(base: Baseline, run: Baseline, *, baseline_name: str = "baseline", run_name: str = "run") -> GuardReport:
    """Whether `run` is worse than `base`: FLOPs, kernels, waits, graph breaks, memory, attention, then time.

    Over several runs a regression is what all of them show. What is not comparable is not judged, and says why.
    """
    found = differences(base.traits, run.traits)
    return GuardReport(
        baseline=baseline_name,
        run=run_name,
        baseline_runs=base.runs,
        checks=_checks(base, run, found),
        differences=tuple((one.what, one.a, one.b) for one in found),
    )


def _checks(base: Baseline, run: Baseline, found: Sequence[Difference]) -> tuple[GuardCheck, ...]:
    model = next((one for one in found if one.what == "model"), None)
    if model is not None:
        reason = f"the baseline is of {model.a}, the run of {model.b}"
        return tuple(GuardCheck(name=name, status="not judged", reason=reason) for name in _NAMES)
    one, other = (bool(side.traits.get("steps")) for side in (base, run))
    if one != other:
        reason = f"{'the run' if one else 'the baseline'} marks no steps, so that nothing of it is per step"
        return tuple(GuardCheck(name=name, status="not judged", reason=reason) for name in _NAMES)
    other_machine = _told([one for one in found if one.what in _OF_COUNTS])
    if other_machine:
        names = ("kernels or ops", "synchronisations", "graph breaks", "memory", "attention")
        exact = tuple(GuardCheck(name=name, status="not judged", reason=other_machine) for name in names)
    else:
        causes = better_attention(base, run)
        exact = (
            check_events(base, run, causes=causes),
            check_synchronisations(base, run),
            check_breaks(base, run),
            check_memory(base, run, causes=causes),
            check_backends(base, run),
        )
    differs = _told([one for one in found if one.what in _OF_TIMES])
    return (check_flops(base, run), *exact, check_time(base, run, differs=differs))


def _told(found: Sequence[Difference]) -> str:
    return "; ".join(f"{one.what} was {one.a}, is {one.b}" for one in found)
