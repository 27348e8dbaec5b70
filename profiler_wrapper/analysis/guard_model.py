"""The baseline that a guard compares with, small enough to commit, and what the guard says. Frozen rows.

A range is (least, most) over the runs that the baseline was made from.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import msgspec

from profiler_wrapper.analysis.numbered_names import OPEN, fill_numbers
from profiler_wrapper.analysis.phase import Phase
from profiler_wrapper.errors import WrongUse

BASELINE_VERSION = 2
_MOST_LAYERS = 1_000_000
ANY_NUMBER = "*"  # in the pattern of a name

Range = tuple[float, float]
Status = Literal["ok", "regression", "improved", "not judged"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """One layer, or many whose names differ in one number: `pattern` has `*` in its place."""

    pattern: str
    numbers: tuple[tuple[int, int], ...] = ()  # first and last of each run of numbers; empty: `pattern` is the name

    def layers(self) -> list[str]:
        """All the names."""
        if not self.numbers:
            return [self.pattern]
        before, _, after = self.pattern.partition(ANY_NUMBER)
        return [f"{before}{number}{after}" for first, last in self.numbers for number in range(first, last + 1)]


def names_of(pattern: str, numbers: Iterable[int]) -> Names:
    """`pattern` with `OPEN` in the place of the numbers."""
    runs: list[tuple[int, int]] = []
    for number in sorted(numbers):
        runs[-1:] = [(runs[-1][0], number)] if runs and number == runs[-1][1] + 1 else [*runs[-1:], (number, number)]
    return Names(pattern=pattern.replace(OPEN, ANY_NUMBER, 1), numbers=tuple(runs))


def shown(pattern: str, numbers: Iterable[int]) -> str:
    """`model.layers.{0..5}.mlp`, of a pattern with `*`."""
    return fill_numbers(pattern.replace(ANY_NUMBER, OPEN, 1), numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactRow:
    """What is exact of like layers in one phase: the same for each of them. None where not known."""

    names: Names
    phase: Phase
    flops: Range | None = None  # of its own ops, per step: of the model, in recompute all (see guard_exact.check_flops)
    events: Range | None = None  # of its own, per step
    retained_bytes: Range | None = None  # of its own
    backends: tuple[str, ...] = ()  # of its attention


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeRow:
    """Times of like layers, phases together: a level and a spread each."""

    names: Names
    phase: Phase | None = None  # of what has no module; else None
    levels_us: tuple[float, ...]  # of a step, one per layer
    spreads: tuple[float, ...]  # of a step, relative
    own: float = 1.0  # share of the time that is in no layer below


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """What a run may cost, from one run or several of the same thing."""

    guard_baseline_version: int = BASELINE_VERSION
    runs: int
    sources: tuple[str, ...] = ()
    traits: Mapping[str, Any]
    flops: Range | None  # all of a step, as in the rows
    events: Range
    peak_bytes: Range | None
    graph_breaks: Range | None  # distinct places
    break_places: tuple[str, ...] = ()
    synchronisations: Mapping[str, Range] | None  # "kind of op in layer (phase)" -> per step; None without a device
    classes: Mapping[str, Range]  # class -> events of a step
    ops: Mapping[Phase, Mapping[str, Range]]  # phase -> op -> calls of a step
    rows: tuple[ExactRow, ...]
    step_us: float | None = None  # level of all time of a step; None: times cannot be judged
    step_spread: float | None = None
    times: tuple[TimeRow, ...] = ()
    no_times: str = ""  # why times cannot be judged
    # Phase -> op -> layers it ran in, "" for none; missing: more than are known. Of the run, so not in the file.
    op_layers: Mapping[Phase, Mapping[str, tuple[str, ...]]] = field(default_factory=dict, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """What the file holds: a range of one number as that number, and nothing of what is not known."""
        data: dict[str, Any] = _short(asdict(self))
        del data["op_layers"]
        return data


def _short(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _short(item) for key, item in value.items() if key == "pattern" or not _is_nothing(item)}
    if isinstance(value, tuple) and len(value) == 2 and value[0] == value[1] and isinstance(value[0], float):
        return _whole(value[0])
    if isinstance(value, (tuple, list)):
        return [_short(item) for item in value]
    return _whole(value) if isinstance(value, float) else value


def _is_nothing(value: object) -> bool:
    return value is None or value == () or value == ""


def _whole(value: float) -> float | int:
    return int(value) if value.is_integer() else value


_RANGES = ("flops", "events", "peak_bytes", "graph_breaks", "retained_bytes")
_MAPS_OF_RANGES = ("synchronisations", "classes")


def _long(data: Mapping[str, Any]) -> dict[str, Any]:
    """What `_short` made short."""
    long = {name: _range(value) if name in _RANGES else value for name, value in data.items()}
    for name in _MAPS_OF_RANGES:
        if isinstance(long.get(name), Mapping):
            long[name] = {key: _range(value) for key, value in long[name].items()}
    if isinstance(long.get("ops"), Mapping):
        long["ops"] = {phase: {op: _range(calls) for op, calls in ops.items()} for phase, ops in long["ops"].items()}
    return long


def _range(value: Any) -> Any:
    return [value, value] if isinstance(value, (int, float)) else value


def baseline_from_dict(data: Mapping[str, Any]) -> Baseline:
    """The baseline that `to_dict` wrote.

    Raises:
        WrongUse: it is none, or of a later version.
    """
    version = data.get("guard_baseline_version")
    if version != BASELINE_VERSION:
        raise WrongUse(f"guard_baseline_version is {version!r}, expected {BASELINE_VERSION}: make the baseline anew")
    try:
        long = {"flops": None, "peak_bytes": None, "graph_breaks": None, "synchronisations": None} | _long(data)
        long["rows"] = [_long(row) for row in data["rows"]]
        for row in long.get("times", ()):  # two equal numbers are no range here
            row |= {key: _range(row[key]) for key in ("levels_us", "spreads") if not isinstance(row[key], list)}
        baseline = msgspec.convert(long, Baseline)
    except (msgspec.ValidationError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise WrongUse(f"not a baseline that guard wrote: {error}") from error
    for problem in _problems(baseline):
        raise WrongUse(f"not a baseline that guard wrote: {problem}")
    return baseline


def _problems(baseline: Baseline) -> Iterator[str]:
    """What an edit by hand may have broken: a number that is none would let every run pass."""
    names = [*(row.names for row in baseline.rows), *(row.names for row in baseline.times)]
    layers = sum(last - first + 1 for told in names for first, last in told.numbers)
    if baseline.runs < 1 or layers > _MOST_LAYERS:
        yield f"it is of {baseline.runs} runs, with {layers} numbered layers"
        return
    maps = (baseline.synchronisations or {}, baseline.classes, *baseline.ops.values())
    ranges = [baseline.flops, baseline.events, baseline.peak_bytes, baseline.graph_breaks]
    ranges += [limits for named in maps for limits in named.values()]
    ranges += [limits for row in baseline.rows for limits in (row.flops, row.events, row.retained_bytes)]
    for limits in ranges:
        if limits is not None and not (math.isfinite(limits[1]) and limits[0] <= limits[1]):
            yield f"{limits} is no range"
    for row in baseline.times:
        if not len(row.levels_us) == len(row.spreads) == len(row.names.layers()):
            yield f"{row.names.pattern} does not have one time and one spread for each layer"
        if not all(math.isfinite(level) and level > 0 for level in row.levels_us):
            yield f"times of {row.names.pattern} are {row.levels_us}"
        if not all(math.isfinite(spread) and spread >= 0 for spread in (*row.spreads, row.own)):
            yield f"spreads of {row.names.pattern} are {row.spreads}"
    for value in (baseline.step_us, baseline.step_spread):
        if value is not None and not (math.isfinite(value) and value >= 0):
            yield f"{value} is no time of a step"
    coverage = baseline.traits.get("coverage", 0.0)
    if not isinstance(coverage, (int, float)):
        yield f"coverage is {coverage!r}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardFinding:
    """One thing that is otherwise than in the baseline."""

    layer: str  # folded where like layers changed alike; "" for all of a step
    phase: Phase | None
    what: str  # "FLOPs", "kernels", "time" ...
    before: float | None  # the nearer end of the baseline's range; None: it has none
    after: float | None
    limit: float | None  # what would still have been fine
    text: str  # one line


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardCheck:
    """One kind of check."""

    name: str
    status: Status
    regressions: tuple[GuardFinding, ...] = ()
    improvements: tuple[GuardFinding, ...] = ()
    consequences: tuple[GuardFinding, ...] = ()  # of a better backend of attention in these layers: no regressions
    reason: str = ""  # why it was not judged, or what was let pass


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardReport:
    """What a guard says. `print(report)` says it in words."""

    baseline: str
    run: str
    baseline_runs: int
    checks: tuple[GuardCheck, ...]
    differences: tuple[tuple[str, str, str], ...] = field(default=())  # what, in the baseline, in the run

    @property
    def regressed(self) -> bool:
        """Whether anything is worse."""
        return any(check.status == "regression" for check in self.checks)

    @property
    def judged(self) -> bool:
        """Whether anything could be judged."""
        return any(check.status != "not judged" for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """Plain data: {verdict, regressed, judged, baseline, run, baseline_runs, differences[], checks[{name, status,
        reason, regressions[{layer, phase, what, before, after, limit, text}], improvements[...],
        consequences[...]}]}."""
        return {
            "verdict": self.verdict,
            "regressed": self.regressed,
            "judged": self.judged,
            "baseline": self.baseline,
            "run": self.run,
            "baseline_runs": self.baseline_runs,
            "differences": [{"what": what, "baseline": a, "run": b} for what, a, b in self.differences],
            "checks": [asdict(check) for check in self.checks],
        }

    @property
    def verdict(self) -> str:
        """One line."""
        worse = [finding for check in self.checks for finding in check.regressions]
        if worse:
            more = f", and {len(worse) - 1} more" if len(worse) > 1 else ""
            return f"regression: {worse[0].text}{more}"
        if not self.judged:
            return "nothing could be judged"
        better = [finding for check in self.checks for finding in check.improvements]
        return f"improved: {better[0].text}" if better else "no regression"
