"""What is known of a job of many ranks, and what is said of it. Frozen; arrays and rows.

Axes of arrays: S steps, R ranks, K kinds of time, G stages of the pipeline, L layers, C instances of collectives.
Times are nanoseconds as floats, with `nan` for what is not known: a rank without a step has `nan` there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from profiler_wrapper.analysis.statistics import median
from profiler_wrapper.trace.spans import KINDS

# --------------------------------------------------------------------------------------------------
# A report on many ranks as plain data, for JSON.

Float = npt.NDArray[np.float64]


def report_dict(report: RanksReport) -> dict[str, Any]:
    """What `RanksReport.to_dict` gives. Averages are over `judged_steps`; why a value is null stands in `unknown`."""
    from profiler_wrapper.ranks.times import waiting_source

    source, why_no_waiting = waiting_source(report.told)
    verdict = _verdict_dict(report)
    slowdown = _slowdown(report)
    return {
        "schema_version": 1,
        "run": report.run,
        **verdict,
        "slowdown": slowdown,
        "world_size": report.world_size,
        "spans": report.spans,
        "steps": [int(step) for step in report.own.steps],
        "judged_steps": [int(step) for step in report.told.steps],
        "waiting": source,
        "lost": _lost_dict(report.accounting),
        "ranks": _rank_dicts(report),
        "stages": _stage_dicts(report),
        "communication": _communication_dicts(report.communication),
        "layers": _layer_dicts(report.layers),
        "named_spans": [_named_dict(row) for row in report.named_spans],
        "clocks": _clock_dict(report.clocks),
        "missing": [_row_dict(row) for row in report.missing],
        "unknown": {
            "peak_bytes": report.peak_unknown,
            "mfu": report.mfu_unknown,
            "waiting_ms_per_step": why_no_waiting,
            **_why_null(report, {**verdict, "slowdown": slowdown, "world_size": report.world_size}),
        },
    }


_NO_VERDICT = "no straggler was found"
_OF_ANOTHER_KIND = "the verdict names none"
_NO_REPLAY = "no replay of dependencies was made"


def _why_null(report: RanksReport, found: Mapping[str, Any]) -> dict[str, str]:
    """Of keys of the report that are null, the reason."""
    none = report.verdict.verdict == "none"
    named = _NO_VERDICT if none else _OF_ANOTHER_KIND
    too_few = "too few steps were judged"
    reasons = {
        "rank": named,
        "stage": named if _has_stages(report) else "the job has no stages, or one",
        "layer": named,
        "share": _NO_VERDICT,
        "lost_ms_per_step": _NO_VERDICT,
        "step_ms_per_step": too_few,
        "ideal_ms_per_step": too_few,
        "differ_ms_per_step": too_few,
        "slowdown": too_few,
        "ms": report.replay_unknown or _NO_REPLAY,
        "mw": report.replay_unknown or _NO_REPLAY,
        "world_size": "no file tells it",
    }
    told = {key: why for key, why in reasons.items() if found.get(key) is None}
    if report.replay is None:
        told["ranks.share"] = told["stages.share"] = report.replay_unknown or _NO_REPLAY
    if report.arrivals is None:
        told["ranks.times_last"] = told["ranks.late_ms"] = "no two ranks tell of the same communication"
    if report.clocks is None:
        told["clocks"] = "starts say nothing of when other ranks started"
    return told


def _has_stages(report: RanksReport) -> bool:
    return len(np.unique(report.own.stages)) > 1


def _slowdown(report: RanksReport) -> float | None:
    """T / T ideal: replayed where there is a replay, else of the step that is judged."""
    if report.replay is not None:
        return _number(report.replay.slowdown)
    step_ns, ideal_ns = report.verdict.step_ns, report.verdict.ideal_ns
    return _number(step_ns / ideal_ns) if step_ns is not None and ideal_ns else None


def _verdict_dict(report: RanksReport) -> dict[str, Any]:
    verdict, staged = report.verdict, _has_stages(report)
    found = _row_dict(verdict)
    for key in ("lost_ns", "step_ns", "ideal_ns"):
        value = found.pop(key)
        found[key.replace("_ns", "_ms_per_step")] = None if value is None else value / 1e6
    step, ideal = found["step_ms_per_step"], found["ideal_ms_per_step"]
    found["differ_ms_per_step"] = None if step is None or ideal is None else max(0.0, step - ideal)
    found["stage"] = verdict.stage if staged else None
    found["evidence"] = list(verdict.evidence)
    found["suspects"] = [
        _row_dict(suspect) | {"stage": suspect.stage if staged else None, "evidence": list(suspect.evidence)}
        for suspect in verdict.suspects
    ]
    return found


def _communication_dicts(rows: Sequence[CommunicationRow]) -> list[dict[str, Any]]:
    from profiler_wrapper.ranks.times import is_call

    return [_row_dict(row) | {"is_call": is_call(row, rows)} for row in rows]


def _named_dict(row: NamedSpan) -> dict[str, Any]:
    return {
        "name": row.name,
        "slowest_rank": row.slowest_rank,
        "slowest_ms_per_step": row.slowest_ns / 1e6,
        "others_ms_per_step": None if row.others_ns is None else row.others_ns / 1e6,
        "per_step": row.per_step,
        "nested": row.nested,
    }


def _lost_dict(accounting: Accounting) -> list[dict[str, Any]]:
    """Per stage and kind: the mean time a step was held by it, and the rank that held it most."""
    rows = []
    for place, stage in enumerate(accounting.stages):
        for kind, name in enumerate(accounting.kinds):
            held = accounting.held_ns[:, place, kind]
            if not held.any():
                continue
            holders, at = np.unique(accounting.holder[:, place, kind][held > 0], return_inverse=True)
            by_rank = np.bincount(at, weights=held[held > 0])
            most = int(holders[by_rank.argmax()])
            rows.append(
                {
                    "stage": int(stage),
                    "kind": name,
                    "held_ms_per_step": float(held.mean()) / 1e6,
                    "most_by_rank": most if most >= 0 else None,  # None: the ranks are equally long
                    "share_of_that_rank": float(by_rank.max() / by_rank.sum()) if most >= 0 else None,
                }
            )
    return rows


def _rank_dicts(report: RanksReport) -> list[dict[str, Any]]:
    from profiler_wrapper.ranks.times import waiting_source

    own, arrivals, replay = report.told, report.arrivals, report.replay
    source, _ = waiting_source(own)
    met_steps = len(np.unique(arrivals.step)) if arrivals else 0
    means = _means(own.own_ns)  # (R, K)
    waiting, wall = _means(own.waiting_ns), _means(own.wall_ns)
    arrived = {int(rank): at for at, rank in enumerate(arrivals.ranks)} if arrivals else {}
    replayed = {int(rank): at for at, rank in enumerate(replay.ranks)} if replay else {}
    rows = []
    for at, rank in enumerate(own.ranks.tolist()):
        last = arrived.get(rank)
        worker = replayed.get(rank)
        rows.append(
            {
                "rank": rank,
                "stage": int(own.stages[at]),
                **{name: int(values[at]) for name, values in report.coordinates.items() if values[at] >= 0},
                "host": report.hosts[at] if report.hosts else None,
                "own_ms_per_step": {
                    kind: _number(means[at, place] / 1e6) for place, kind in enumerate(own.kinds) if means[at, place]
                },
                "waiting_ms_per_step": None if source == "unknown" else _number(waiting[at] / 1e6),
                "wall_ms_per_step": _number(wall[at] / 1e6),
                "relative_score": _number(float(median(report.scores.relative[:, at]))),
                "individual_score": _number(float(median(report.scores.individual[:, at]))),
                "flagged": bool(report.scores.flagged_relative[at] or report.scores.flagged_individual[at]),
                "flagged_relative": bool(report.scores.flagged_relative[at]),
                "flagged_individual": bool(report.scores.flagged_individual[at]),
                "times_last": None if last is None or arrivals is None else int(arrivals.times_last[last]),
                "late_ms": None if last is None or arrivals is None else _number(arrivals.late_ns[last] / 1e6),
                "late_ms_per_step": (
                    None if last is None or arrivals is None else _number(arrivals.late_ns[last] / 1e6 / met_steps)
                ),
                "share": None if worker is None or replay is None else _number(replay.share_of_rank[worker]),
                "peak_bytes": None if report.peak_bytes is None else _number(report.peak_bytes[at]),
                "mfu": None if report.mfu is None else _number(report.mfu[at]),
            }
        )
    return rows


def _stage_dicts(report: RanksReport) -> list[dict[str, Any]]:
    replay = report.replay
    shares = {int(stage): at for at, stage in enumerate(replay.stages)} if replay else {}
    own = report.told.own_ns.sum(axis=2)
    rows = []
    for stage in np.unique(report.told.stages).tolist():
        members = own[:, report.told.stages == stage]
        at = shares.get(stage)
        rows.append(
            {
                "stage": stage,
                "ranks": int(members.shape[1]),
                "own_ms_per_step": _number(float(median(members.ravel())) / 1e6),
                "share": None if at is None or replay is None else _number(replay.share_of_stage[at]),
            }
        )
    return rows


def _layer_dicts(layers: LayerTimes | None) -> list[dict[str, Any]]:
    """Each layer over its ranks: the typical time, the widest, whose it is, and who is far beyond the others."""
    from profiler_wrapper.ranks.times import over_ranks

    rows = []
    for at, layer in enumerate(layers.layers if layers else ()):
        assert layers is not None
        for place, kind in enumerate(layers.kinds):
            times = layers.own_ns[:, at, place]
            known = np.isfinite(times)
            if not known.any():
                continue
            slowest = int(np.nanargmax(times))
            equal = known.sum() > 1 and times[known].min() == times[slowest]
            found = over_ranks(times[known], layers.ranks[known])
            rows.append(
                {
                    "layer": layer,
                    "kind": kind,
                    "ranks": int(known.sum()),
                    "median_ms": float(np.median(times[known])) / 1e6,
                    "slowest_ms": float(times[slowest]) / 1e6,
                    "slowest_rank": None if equal else int(layers.ranks[slowest]),
                    "spread_ms": float(np.std(times[known])) / 1e6,
                    "quickest_ms": float(times[known].min()) / 1e6,
                    "typical_deviation_ms": found.spread / 1e6,
                    "outliers": list(found.outliers),
                }
            )
    return rows


def _clock_dict(clocks: Clocks | None) -> dict[str, Any] | None:
    if clocks is None:
        return None
    return {
        "source": clocks.source,
        "events": clocks.events,
        "largest_offset_ms": _number(_largest(np.abs(clocks.offset_ns)) / 1e6),
        "largest_drift_ppm": _number(_largest(np.abs(clocks.drift)) * 1e6),
        "residual_us": _number(float(median(clocks.residual_ns)) / 1e3),
        "largest_residual_us": _number(_largest(clocks.residual_ns) / 1e3),
        "notes": list(clocks.notes),
    }


def _row_dict(row: Any) -> dict[str, Any]:
    """A frozen row as a dict, floats that are not finite as None."""
    values = {name: getattr(row, name) for name in row.__dataclass_fields__}
    return {name: _number(value) if isinstance(value, float) else value for name, value in values.items()}


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _means(values: Float) -> Float:
    """Over steps, what is not known left out; nan where nothing is known."""
    known = np.isfinite(values)
    counts = known.sum(axis=0)
    sums = np.where(known, values, 0.0).sum(axis=0)
    return np.asarray(np.divide(sums, counts, out=np.full(sums.shape, np.nan), where=counts > 0))


def _largest(values: Float) -> float:
    known = values[np.isfinite(values)]
    return float(known.max()) if known.size else math.nan


Int = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

# What a rank's step is made of, in the order in which a step has them.
OWN_KINDS: Final = tuple(kind for kind in KINDS if kind != "step")
COMPUTE: Final = ("forward", "recompute", "backward")
VerdictName = Literal["rank", "stage", "imbalance", "data", "gc", "none"]
Cause = Literal[
    "forward",
    "backward",
    "optimizer",
    "checkpoint",
    "compute",  # of forward and backward alike
    "other",
    "data loading",
    "data imbalance",
    "garbage collection",
    "late collective",
    "slow stage",
    "slow layer",
    "none",
]
Confidence = Literal["high", "medium", "low"]
WaitingSource = Literal["measured", "estimated", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OwnTimes:
    """What each rank did itself in each step, apart from what it waited for others.

    `own_ns.sum(axis=2) + waiting_ns == wall_ns`, to rounding, with `basis` "cpu". Each moment of a step is in one
    kind: that of the span of depth 0 around it, but garbage collection, checkpoints (files) and recompute are their own
    wherever they lie, and "other" has what no span covers. "communication" is a collective's transfer (its shortest
    duration over ranks); the rest of its duration is waiting. Where nothing tells a transfer, all of it is waiting.
    """

    ranks: Int  # (R,), ascending
    stages: Int  # (R,) of the pipeline; 0 without one. Only ranks of one stage are compared with one another
    steps: Int  # (S,), ascending
    own_ns: Float  # (S, R, K)
    waiting_ns: Float  # (S, R) within communication
    wall_ns: Float  # (S, R) of the step
    begin_ns: Float  # (S, R) of the step, by aligned clocks
    kinds: tuple[str, ...] = OWN_KINDS
    roles: tuple[str, ...] = ()  # (R,) what a rank is beside its stage, where a job has several roles; empty: one
    basis: Literal["cpu", "device"] = "cpu"  # "device": compute is device time, and sums are not the wall time
    waiting_known: bool = True  # False: nothing tells waiting apart, so phases may hold waiting for others

    def of(self, *kinds: str) -> Float:
        """Own time of some kinds together, (S, R)."""
        chosen = [self.kinds.index(kind) for kind in kinds if kind in self.kinds]
        return np.asarray(self.own_ns[:, :, chosen].sum(axis=2), dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arrivals:
    """Who came last to each collective, and who waited. One entry of the (C,) arrays per instance, by step.

    A blocking collective ends on all its ranks together, so the rank that came last has the shortest duration, whatever
    the clocks say. Starts by aligned clocks say the same where alignment is good.
    """

    step: Int  # (C,)
    group: tuple[str, ...]  # (C,) who takes part; "" where not known
    name: tuple[str, ...]  # (C,) of the collective
    sequence: Int  # (C,) n-th of its name in group and step
    size: Int  # (C,) ranks seen in it
    first_rank: Int  # (C,) by aligned starts; -1 where not known
    last_rank: Int  # (C,) by aligned starts; -1 where not known
    lateness_ns: Float  # (C,) last arrival - median arrival, by aligned starts
    shortest_rank: Int  # (C,) that with the shortest duration
    shorter_by_ns: Float  # (C,) median duration - shortest duration
    transfer_ns: Float  # (C,) the shortest duration
    waiting_ns: Float  # (C,) durations beyond the shortest, summed over ranks
    ranks: Int  # (R,) the arrays below are of each rank, over all instances
    times_last: Int  # (R,) times it had the shortest duration
    late_ns: Float  # (R,) summed `shorter_by_ns` of these
    rank_waiting_ns: Float  # (R,) summed duration beyond the shortest


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerTimes:
    """Each layer's own time in a step of a rank (its collectives left out), the typical one and how it varies."""

    ranks: Int  # (R,)
    stages: Int  # (R,)
    layers: tuple[str, ...]  # (L,) full names, in the model's order where known
    kinds: tuple[str, ...]  # of COMPUTE
    own_ns: Float  # (R, L, K) median over steps; nan where the rank has no such layer
    spread_ns: Float  # (R, L, K) standard deviation over steps, or 1.48 times the median deviation
    steps: Int  # (R,) how many each rank has


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replay:
    """What the job would take if some spans were as quick as their like: dependencies replayed.

    As defined in "Understanding Stragglers in Large Model Training Using What-if Analysis" (OSDI 2025): T as recorded
    and replayed, T_ideal with every span as long as the typical one of its kind.
    """

    recorded_ns: float  # of all steps, as recorded
    total_ns: float  # T: the same, replayed
    ideal_ns: float  # T_ideal
    slowdown: float  # T / T_ideal
    ms: float  # share of the lost time that goes away with the last stage ideal
    mw: float  # share of the lost time that goes away with the slowest few ranks ideal
    slowest_ranks: tuple[int, ...]  # those of `mw`
    ranks: Int  # (R,)
    stages: Int  # (G,)
    kinds: tuple[str, ...]  # of operations, as replayed
    share_of_rank: Float  # (R,) (T - T without its slowness) / (T - T_ideal)
    share_of_stage: Float  # (G,)
    share_of_kind: Float  # (K,)
    slowdown_of_rank: Float  # (R,) T with only its slowness / T_ideal
    slowdown_of_stage: Float  # (G,)
    slowdown_of_kind: Float  # (K,)
    steps: int = 0
    notes: tuple[str, ...] = ()  # what was assumed, what was left out


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Clocks:
    """How each rank's clock stands to the others': aligned = own - offset - drift * (own - reference)."""

    ranks: Int  # (R,)
    reference_ns: float
    offset_ns: Float  # (R,) at the reference; nan: not known, its times are taken as they are
    drift: Float  # (R,) seconds per second
    residual_ns: Float  # (R,) of common events after the fit, the typical one; nan where there are none
    source: Literal["collectives", "steps", "none"]  # whose ends were taken as common
    events: int = 0  # common events in the fit
    notes: tuple[str, ...] = ()
    residual_p95_ns: Float = field(default_factory=lambda: np.zeros(0))  # (R,) 95 of 100 are less


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Accounting:
    """A step's time of each stage, split up by who held it: the running maximum over ranks of the time up to each kind.

    `held_ns.sum(axis=2)` is the longest rank's time: parts add up exactly (integers). A part is what a kind adds to the
    maximum of the times up to its end, `holder` the rank that has this maximum. Only what ranks did themselves counts.
    """

    stages: Int  # (G,)
    steps: Int  # (S,)
    kinds: tuple[str, ...]
    held_ns: Int  # (S, G, K); 0 where no rank of the stage has the step
    holder: Int  # (S, G, K) rank; -1 where no rank of the stage has the step, or all are equally long


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scores:
    """1 is as quick as the fastest; below 0.75 for three windows in a row is flagged. (W windows of steps, R ranks)."""

    window: int  # steps
    first_steps: Int  # (W,)
    relative: Float  # (W, R) quickest median of its stage / own median
    individual: Float  # (W, R) own best / own now
    flagged_relative: Bool  # (R,)
    flagged_individual: Bool  # (R,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """Something that may have cost time, with what the job would gain without it."""

    verdict: VerdictName
    cause: Cause
    rank: int | None = None
    stage: int | None = None
    layer: str | None = None
    share: float = 0.0  # (T - T without it) / (T - T ideal)
    lost_ns: float = 0.0  # T - T without it, per step
    steps: int = 0  # in which it cost the job time
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Who or what slows the job, in one sentence. `none`: nothing beyond the noise."""

    verdict: VerdictName
    sentence: str
    cause: Cause = "none"
    rank: int | None = None
    stage: int | None = None
    layer: str | None = None
    share: float | None = None  # of the lost time
    lost_ns: float | None = None  # by it, per step
    step_ns: float | None = None  # the job's step, T
    ideal_ns: float | None = None  # T ideal, per step
    confidence: Confidence = "low"
    steps: int = 0  # that were judged
    ms: float | None = None
    mw: float | None = None
    evidence: tuple[str, ...] = ()
    suspects: tuple[Suspect, ...] = ()  # all that were weighed, the greatest share first


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationRow:
    """One collective, send or receive in one group, over all ranks and steps."""

    name: str
    group: str
    size: int  # ranks seen
    instances: int
    bytes: int | None  # moved, of one rank, in all
    time_ns: int  # of all ranks
    transfer_ns: int | None  # shortest durations, times the ranks
    waiting_ns: int | None  # the rest
    overlapped_ns: int | None  # of all ranks, with their compute beside it; None where not known
    bandwidth_bytes_per_s: float | None  # bytes over transfer
    unknown: str = ""  # why overlap or bandwidth are not known


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedSpan:
    """A span whose name tells no kind, in the judged steps: what it takes a rank per step."""

    name: str
    slowest_rank: int
    slowest_ns: float
    others_ns: float | None  # the median of the other ranks; one that never has it takes 0; None: there are none
    per_step: float  # times a rank has it in a step, the mean
    nested: bool  # always within other spans, whose time holds its

    @property
    def beyond_ns(self) -> float:
        """What the slowest rank takes longer than the typical other one."""
        return self.slowest_ns - (self.others_ns or 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """What the report lacks, and why: a rank without a file, a torn line, steps that not all ranks have."""

    what: str
    reason: str
    rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RanksReport:
    """A job of many ranks: what reports draw and `--format json` prints."""

    run: str
    verdict: Verdict
    own: OwnTimes  # in all steps
    accounting: Accounting  # of `judged`, as are scores
    scores: Scores
    judged: OwnTimes | None = None  # in the judged steps, with waiting estimated where nothing tells it; None: `own`
    arrivals: Arrivals | None = None
    layers: LayerTimes | None = None
    replay: Replay | None = None
    clocks: Clocks | None = None
    coordinates: Mapping[str, Int] = field(default_factory=dict)  # "dp", "tp", "pp", ...: (R,), -1 where not known
    hosts: tuple[str, ...] = ()  # (R,)
    world_size: int | None = None
    communication: tuple[CommunicationRow, ...] = ()
    peak_bytes: Float | None = None  # (R,)
    mfu: Float | None = None  # (R,) 0 to 1
    peak_unknown: str | None = None  # why peaks of memory are not known, of all ranks or of which
    mfu_unknown: str | None = None
    replay_unknown: str | None = None  # why there is no replay, where it was tried
    missing: tuple[Missing, ...] = ()
    named_spans: tuple[NamedSpan, ...] = ()  # that which differs most between ranks first
    spans: int = 0

    @property
    def told(self) -> OwnTimes:
        """What averages and tables are of: the judged steps."""
        return self.own if self.judged is None else self.judged

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; what is not known is None. It grows with ranks, not with ranks times steps."""
        return report_dict(self)
