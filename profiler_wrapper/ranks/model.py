"""What is known of a job of many ranks, and what is said of it. Frozen; arrays and rows.

Axes of arrays: S steps, R ranks, K kinds of time, G stages of the pipeline, L layers, C instances of collectives.
Times are nanoseconds as floats, with `nan` for what is not known: a rank without a step has `nan` there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from profiler_wrapper.trace.spans import KINDS, ranges

Float = npt.NDArray[np.float64]
Int = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

# What a rank's step is made of, in the order in which a step has them.
SELF_KINDS: Final = tuple(kind for kind in KINDS if kind != "step")
BETWEEN: Final = "between steps"  # after the end of a step, before the begin of the next
COMPUTE: Final = ("forward", "recompute", "backward")
VerdictName = Literal[
    "rank",
    "host",
    "stage",
    "imbalance",
    "data",
    "gc",
    "save",
    "link",
    "group",
    "steps",
    "unrecorded",
    "unknown",
    "none",
]
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
    "communication",
    "slow stage",
    "slow layer",
    "none",
]
Confidence = Literal["high", "medium", "low"]
Basis = Literal["cpu", "device"]  # of times: the clock that they are by
WaitingSource = Literal["measured", "estimated", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SelfTimes:
    """What each rank did itself in each step, apart from what it waited for others.

    `self_ns.sum(axis=2) + waiting_ns == wall_ns`, to rounding, with `basis` "cpu". Each moment of a step is in one
    kind: that of the span of depth 0 around it, but garbage collection, checkpoints (files) and recompute are their own
    wherever they lie, and "other" has what no span covers. "communication" is a collective's transfer (its shortest
    duration over ranks); the rest of its duration is waiting. Where nothing tells a transfer, all of it is waiting.
    """

    ranks: Int  # (R,), ascending
    stages: Int  # (R,) of the pipeline; 0 without one. Only ranks of one stage are compared with one another
    steps: Int  # (S,), ascending
    self_ns: Float  # (S, R, K)
    waiting_ns: Float  # (S, R) within communication
    wall_ns: Float  # (S, R) of the step
    kinds: tuple[str, ...] = SELF_KINDS
    basis: Basis = "cpu"  # "device": compute is device time, and sums are not the wall time
    waiting_known: bool = True  # False: nothing tells waiting apart, so phases may hold waiting for others

    def of(self, *kinds: str) -> Float:
        """Self time of some kinds together, (S, R)."""
        chosen = [self.kinds.index(kind) for kind in kinds if kind in self.kinds]
        return np.asarray(self.self_ns[:, :, chosen].sum(axis=2), dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arrivals:
    """Who came last to each collective. One entry of the (C,) arrays per instance, by step.

    A blocking collective ends on all its ranks together, so the rank that came last has the shortest duration, whatever
    the clocks say.
    """

    step: Int  # (C,)
    name: tuple[str, ...]  # (C,) of the collective
    shortest_rank: Int  # (C,) that with the shortest duration
    shorter_by_ns: Float  # (C,) median duration - shortest duration
    ranks: Int  # (R,) the arrays below are of each rank, over all instances
    times_last: Int  # (R,) times it had the shortest duration
    late_ns: Float  # (R,) summed `shorter_by_ns` of these


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerTimes:
    """Each layer's self time in the typical step of a rank, its collectives left out."""

    ranks: Int  # (R,)
    layers: tuple[str, ...]  # (L,) full names, in the model's order where known
    kinds: tuple[str, ...]  # of COMPUTE
    self_ns: Float  # (R, L, K) median over steps; nan where the rank has no such layer

    @property
    def all_phases_ns(self) -> Float:
        """(R, L); nan where a rank has no such layer."""
        known = np.isfinite(self.self_ns)
        return np.where(known.any(axis=2), self.self_ns.sum(axis=2, where=known), np.nan)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replay:
    """What the job would take if some of its operations took what is typical of their kind: dependencies replayed.

    As defined in "Understanding Stragglers in Large Model Training Using What-if Analysis" (OSDI 2025): T as recorded,
    T_ideal with every operation as long as the typical one of its kind.
    """

    total_ns: float  # T
    ideal_ns: float  # T_ideal
    slowdown: float  # T / T_ideal
    ms: float  # share of the lost time that goes away with the last stage typical
    mw: float  # share of the lost time that goes away with the slowest few ranks typical
    slowest_ranks: tuple[int, ...]  # those of `mw`
    ranks: Int  # (R,)
    stages: Int  # (G,)
    share_of_rank: Float  # (R,) (T - T with it typical) / (T - T_ideal); nan: not among the slowest, not replayed
    share_of_stage: Float  # (G,)
    steps: int = 0
    notes: tuple[str, ...] = ()  # what was left out


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
    named_ranks: tuple[int, ...] = ()
    host: str | None = None
    group: str | None = None
    phase: str | None = None
    first_step: int | None = None  # of those
    last_step: int | None = None

    @property
    def who(self) -> str:
        """The ranks, the host, the stage; and the layer."""
        if self.host is not None:
            name = f"host {self.host}"
        elif self.verdict == "stage" and self.stage is not None and self.layer is None:
            name = f"stage {self.stage}"
        elif self.named_ranks:
            name = f"rank{'s' if len(self.named_ranks) > 1 else ''} {ranges(self.named_ranks)}"
        else:
            name = "another rank in each step" if self.verdict == "imbalance" else "all ranks"
        return name if self.layer is None else f"{name}, {self.layer}"


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
    step_ns: float | None = None  # T: a step on the clock
    wall_ns: float | None = None  # a step on the clock, of the rank whose steps take longest
    ideal_ns: float | None = None  # T ideal, per step
    confidence: Confidence = "low"
    steps: int = 0  # that were judged
    ms: float | None = None
    mw: float | None = None
    evidence: tuple[str, ...] = ()
    suspects: tuple[Suspect, ...] = ()  # the greatest share first
    causes: tuple[Suspect, ...] = ()  # the verdict's, then what is left without it, and so on
    named_ranks: tuple[int, ...] = ()  # empty: none, or all
    host: str | None = None
    group: str | None = None  # of the communication that is slow
    phase: str | None = None  # where it is one
    first_step: int | None = None  # in which it shows, and the last one
    last_step: int | None = None


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
    is_call: bool = False  # what the calling thread takes to start collectives that another row has, of the backend's


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
