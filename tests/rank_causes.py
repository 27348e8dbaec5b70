"""What slows a job of `rank_jobs`: causes by kind, planted by seed, and what a step would take without each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

import rank_layouts
from rank_jobs import Float, Meeting, Noise, Operation, Played, Program, draw, play
from rank_layouts import BACKGROUND_SAVE, LAYOUTS, SAVE, Shape

KINDS = (
    "phase",  # one phase of a rank
    "rank",  # all that it computes
    "host",
    "tied",  # ranks of several hosts, equally slow
    "half",  # of all ranks
    "layer of a rank",
    "layer",  # on all ranks
    "stage",
    "data of a rank",
    "data",
    "gc",
    "save",
    "background save",
    "link",
    "group",
    "uneven work",
    "unrecorded rank",
)
COMPUTE = ("forward", "backward", "optimizer")
TOKENS = 4096  # of a step of a rank


@dataclass(frozen=True, kw_only=True)
class Planted:
    """The truth about one cause."""

    kind: str
    ranks: tuple[int, ...] = ()  # that it is of; none: of all
    host: str | None = None
    stage: int | None = None
    layer: str | None = None
    phase: str | None = None
    group: str | None = None
    steps: tuple[int, ...] = ()  # in which it is there; none: in all
    gain_ms: float = 0.0  # by how much the mean step would be shorter without it alone
    phases_ms: Mapping[str, float] = field(default_factory=dict)  # without what it does to one phase


@dataclass(frozen=True)
class Truth:
    causes: tuple[Planted, ...]
    step_ms: float

    @property
    def largest(self) -> Planted | None:
        return max(self.causes, key=lambda cause: cause.gain_ms, default=None)


class Change(NamedTuple):
    """What a cause does to operations: `more` of their length, and milliseconds, times `amount` (S, R)."""

    touches: Callable[[Operation], bool]
    amount: Float
    more: float = 0.0
    more_ms: float = 0.0


class SlowTransfer(NamedTuple):
    """What a cause does to groups of meetings: milliseconds more in each of the steps where `amount` (S,) is 1."""

    touches: Callable[[Meeting, str], bool]
    amount: Float
    more_ms: float


@dataclass(frozen=True, kw_only=True)
class Cause:
    planted: Planted
    changes: tuple[Change, ...] = ()
    transfers: tuple[SlowTransfer, ...] = ()
    tokens: Float | None = None  # (S, R) of a step, as shares of the usual
    otherwise: tuple[Change, ...] = ()  # what is there without it

    @property
    def phases(self) -> tuple[str, ...]:
        """What it is told apart by: one phase may have nearly all of it."""
        return COMPUTE if any(change.touches is _computes for change in self.changes) else ()

    def without(self, phase: str) -> Cause:
        """What it does to all other phases."""

        def others(change: Change) -> Change:
            return change._replace(touches=lambda each: each.kind != phase and change.touches(each))

        return replace(self, changes=tuple(map(others, self.changes)))


@dataclass(kw_only=True, eq=False)
class Job:
    """A job with its noise drawn, and the causes in it."""

    shape: Shape
    program: Program
    steps: int
    lengths: list[Float]
    transfers: list[Float]
    causes: tuple[Cause, ...] = ()
    unrecorded: set[int] = field(default_factory=set)

    @cached_property
    def played(self) -> Played:
        """With all causes; then without each of them, wholly and in each phase."""
        variants = [self.causes]
        for place, cause in enumerate(self.causes):
            before, behind = self.causes[:place], self.causes[place + 1 :]
            variants.append((*before, *behind, replace(cause, changes=cause.otherwise, transfers=())))
            variants += [(*before, cause.without(phase), *behind) for phase in cause.phases]
        lengths = [
            _stacked([_length(self.program, number, base, causes) for causes in variants])
            for number, base in enumerate(self.lengths)
        ]
        transfers = [
            _stacked([_transfer(self.program.meetings[place], base, causes) for causes in variants])
            for place, base in enumerate(self.transfers)
        ]
        return play(self.program, lengths, transfers)

    @cached_property
    def truth(self) -> Truth:
        _, *gains = (self.played.step_ms[0] - self.played.step_ms).tolist()
        causes = []
        for cause in self.causes:
            gain, *of_phases = gains[: 1 + len(cause.phases)]
            del gains[: 1 + len(cause.phases)]
            phases_ms = dict(zip(cause.phases, of_phases, strict=True))
            causes.append(replace(cause.planted, gain_ms=gain, phases_ms=phases_ms))
        return Truth(tuple(causes), float(self.played.step_ms[0]))


def _stacked(values: list[Float]) -> Float:
    """Of each variant; one where all are the same."""
    if all(each is values[0] for each in values):
        return values[0][None]
    return np.stack(values)


def _length(program: Program, number: int, base: Float, causes: Iterable[Cause]) -> Float:
    operation = program.operations[number]
    found = base
    for change in (change for cause in causes for change in cause.changes if change.touches(operation)):
        amount = change.amount[:, program.roles[operation.role]]
        found = found + base * change.more * amount + change.more_ms * amount
    return found


def _transfer(meeting: Meeting, base: Float, causes: Iterable[Cause]) -> Float:
    found = base
    for slow in (slow for cause in causes for slow in cause.transfers):
        hit = np.array([slow.touches(meeting, group) for group in meeting.groups])
        if hit.any():
            found = found + slow.more_ms * slow.amount[:, None] * hit
    return found


# --- jobs by seed ---


def make_job(
    seed: int,
    *,
    kind: str | None = None,
    layout: str | None = None,
    ranks: int | None = None,
    causes: int | None = None,
) -> Job:
    """The job of a seed.

    Args:
        kind: of its first cause; None: by the seed, as all that follows.
    """
    random = np.random.default_rng(seed)
    count = int(random.choice(4, p=[0.15, 0.55, 0.2, 0.1])) if causes is None else causes
    first = KINDS[random.integers(len(KINDS))] if kind is None else kind
    shape = _shape(layout or LAYOUTS[random.integers(len(LAYOUTS))], ranks, random)
    while layout is None and (shape.ranks < (ranks or 0) or (count and not _possible(first, shape))):
        shape = _shape(LAYOUTS[random.integers(len(LAYOUTS))], ranks, random)
    program = rank_layouts.build(shape, float(np.exp(random.uniform(np.log(0.7), np.log(3.0)))))
    steps = 24 if shape.ranks > 64 else round(float(np.exp(random.uniform(np.log(24), np.log(200)))))
    lengths, transfers = draw(program, steps, Noise(of_an_operation=random.uniform(0.01, 0.05)), random)
    job = Job(shape=shape, program=program, steps=steps, lengths=lengths, transfers=transfers)
    step_ms = float(replace_steps(job, 3).played.step_ms[0])
    for place in range(count):
        open_kinds = [each for each in KINDS if _possible(each, shape)]
        chosen = first if place == 0 and _possible(first, shape) else open_kinds[random.integers(len(open_kinds))]
        for _ in range(8):  # until it has nothing in common with those before
            cause = _plant(chosen, job, random, step_ms)
            if all(_apart(cause.planted, other.planted) for other in job.causes):
                job.causes += (cause,)
                break
            chosen = open_kinds[random.integers(len(open_kinds))]
    job.unrecorded |= {
        rank for cause in job.causes if cause.planted.kind == "unrecorded rank" for rank in cause.planted.ranks
    }
    return job


def replace_steps(job: Job, steps: int) -> Job:
    """The first steps of a job."""
    return replace(
        job,
        steps=steps,
        lengths=[values[:steps] for values in job.lengths],
        transfers=[values[:steps] for values in job.transfers],
    )


def _apart(one: Planted, other: Planted) -> bool:
    """Whether two causes are told apart: of other ranks, and none a kind of the other, as data and data of a rank."""
    alike = one.kind in other.kind or other.kind in one.kind
    return not alike and not set(one.ranks) & set(other.ranks)


def _shape(layout: str, ranks: int | None, random: np.random.Generator) -> Shape:
    """A job of 4 to 64 ranks, or of about as many as are given; small steps where it is large."""

    def one_of(*numbers: int) -> int:
        return int(random.choice(numbers))

    total, per_host = one_of(4, 8, 16, 32, 64) if ranks is None else ranks, one_of(4, 8)
    layers, tensor, stages, chunks, microbatches = one_of(3, 4, 6), 1, 1, 1, 1
    if layout == "hosts":
        total = max(total, 2 * per_host)
    elif layout == "tensor":
        total, tensor = max(total, 8), one_of(2, 4)
    elif layout == "pipeline":
        total = stages = one_of(4, 8)
    elif layout in ("interleaved", "pipeline_data"):
        stages = one_of(2, 4)
        total = 2 * stages if layout == "interleaved" and ranks is None else max(total, 2 * stages)
    if layout == "interleaved":
        chunks, microbatches = 2, stages * one_of(1, 2)
    elif stages > 1:
        microbatches = one_of(4, 6, 8)
    is_large = total > 64
    return Shape(
        layout=layout,
        replicas=total // stages // tensor,
        tensor=tensor,
        stages=stages,
        chunks=chunks,
        microbatches=min(microbatches, 4) if is_large else microbatches,
        layers=2 if is_large else layers,
        ranks_of_host=per_host,
        prefetch=one_of(1, 2, 3),
        phases=layout != "fsdp" or bool(random.random() < 0.5),
    )


def _possible(kind: str, shape: Shape) -> bool:
    """Whether such a cause can be in such a job."""
    hosts = -(-shape.ranks // shape.ranks_of_host)
    return {
        "host": hosts > 1,
        "tied": hosts > 1 and shape.replicas > 3,
        "half": shape.replicas > 3,
        "layer of a rank": shape.stages == 1,
        "layer": shape.stages == 1,
        "stage": shape.stages > 1,
        "link": shape.stages > 1 or (shape.layout == "hosts" and hosts == 2),
        "group": shape.layout in ("hosts", "tensor") or (shape.stages > 1 and shape.replicas > 1),
        "uneven work": shape.replicas > 1,
        "unrecorded rank": shape.ranks > 3,
    }.get(kind, True)


# --- causes ---


def _when(steps: int, random: np.random.Generator, *, always: float = 0.6) -> Float:
    """(S,) 1 in the steps with the cause, else 0: in all, from the middle on, until then, or in some."""
    hit = np.ones(steps)
    way = random.random()
    if way >= always:
        third = (1 - always) / 3
        middle = int(steps * random.uniform(0.35, 0.65))
        if way < always + third:
            hit[:middle] = 0
        elif way < always + 2 * third:
            hit[middle:] = 0
        else:
            hit = (random.random(steps) < random.uniform(0.12, 0.5)).astype(float)
            hit[random.integers(1, steps, 2)] = 1
    return hit


def _size_ms(step_ms: float, hit: Float, random: np.random.Generator) -> float:
    """How much longer a cause makes the steps that it hits: 3 to 60 % of a step, more where they are few."""
    size = step_ms * float(np.exp(random.uniform(np.log(0.03), np.log(0.6))))
    return size * min(4.0, len(hit) / hit.sum())


def _listed(hit: Float) -> tuple[int, ...]:
    return () if hit.all() else tuple(np.flatnonzero(hit).tolist())


def _on(job: Job, hit: Float, ranks: Sequence[int]) -> Float:
    """(S, R) of some ranks in some steps."""
    amount = np.zeros((job.steps, job.program.ranks))
    amount[:, list(ranks)] = hit[:, None]
    return amount


def _base_ms(job: Job, rank: int, touches: Callable[[Operation], bool]) -> float:
    """What a rank does of that kind in a step."""
    return sum(
        each.base_ms
        for number, each in enumerate(job.program.operations)
        if touches(each) and rank in job.program.roles[each.role] and number not in job.program.meeting_of
    )


def _computes(operation: Operation) -> bool:
    return operation.kind in COMPUTE


def _slow(
    kind: str, job: Job, random: np.random.Generator, step_ms: float, ranks: Sequence[int], about: Mapping[str, Any]
) -> Cause:
    """Those ranks, or all, take longer by a factor: in one phase, one layer, or in all that they compute."""
    phase, layer, hit = about.get("phase"), about.get("layer"), _when(job.steps, random)

    def narrow(operation: Operation) -> bool:
        return operation.kind == phase if phase else _computes(operation) and operation.layer == layer

    touches = narrow if phase or layer else _computes
    everyone = range(job.shape.ranks)
    more = _size_ms(step_ms, hit, random) / _base_ms(job, (ranks or everyone)[0], touches)
    named, amount = (
        Planted(kind=kind, ranks=tuple(ranks), steps=_listed(hit), **about),
        _on(job, hit, ranks or everyone),
    )
    # What all data take in all steps has no like: the question is what a step takes without loading any.
    otherwise = (Change(touches, amount, -1.0),) if kind == "data" and hit.all() else ()
    return Cause(planted=named, changes=(Change(touches, amount, more),), otherwise=otherwise)


def _who(kind: str, job: Job, random: np.random.Generator) -> tuple[list[int], dict[str, Any]]:
    """Which ranks are slow in a cause of a kind that `_slow` makes; none: all. What else its truth says."""
    shape = job.shape
    anyone, host = int(random.integers(shape.ranks)), int(random.integers(len(shape.hosts())))
    stage, layer = int(random.integers(shape.stages)), f"model.layers.{random.integers(shape.layers)}"
    half = random.permutation(shape.replicas)[: shape.replicas // 2].tolist()
    found: dict[str, tuple[list[int], dict[str, Any]]] = {
        "phase": ([anyone], {"phase": COMPUTE[random.integers(3)]}),
        "rank": ([anyone], {}),
        "unrecorded rank": ([anyone], {}),
        "host": (shape.hosts()[host], {"host": host_name(host)}),
        "tied": (_tied(shape, stage, random), {}),
        "half": (_of_replicas(shape, half), {}),
        "layer of a rank": ([anyone], {"layer": layer}),
        "layer": ([], {"layer": layer}),
        "stage": (job.program.roles[stage].tolist(), {"stage": stage}),
        "data of a rank": ([anyone], {"phase": "data"}),
        "data": ([], {"phase": "data"}),
    }
    return found[kind]


def _tied(shape: Shape, stage: int, random: np.random.Generator) -> list[int]:
    """Two to four ranks of one stage, of different hosts as far as there are."""
    ranks = random.permutation([rank for rank in range(shape.ranks) if shape.place(rank)["stage"] == stage]).tolist()
    of_host = {shape.host(rank): rank for rank in ranks}
    chosen = list(of_host.values())[: int(random.integers(2, 5))]
    return sorted(chosen if len(chosen) > 1 else ranks[:2])


def _of_replicas(shape: Shape, replicas: Sequence[int]) -> list[int]:
    """All ranks of some replicas of the model."""
    return [rank for rank in range(shape.ranks) if shape.place(rank)["dp"] in replicas]


def host_name(host: int) -> str:
    return f"node-{host:03d}"


def _gc(kind: str, job: Job, random: np.random.Generator, step_ms: float) -> Cause:
    """Of one rank, of all ranks at once, or of each by itself."""
    way, every, rank = (int(random.integers(end)) for end in (3, 8, job.shape.ranks))
    amount = np.zeros((job.steps, job.shape.ranks))
    for each in [rank] if way == 0 else range(job.shape.ranks):
        amount[(random.integers(every + 1) if way == 2 else every) :: every + 1, each] = 1
    hit = amount.max(axis=1)
    named = Planted(kind=kind, ranks=(rank,) if way == 0 else (), steps=_listed(hit))
    size = _size_ms(step_ms, hit, random)
    return Cause(planted=named, changes=(Change(lambda each: each.kind == "gc", amount, 0.0, size),))


def _save(kind: str, job: Job, random: np.random.Generator, step_ms: float) -> Cause:
    """Of one rank or of all, now and then. Nobody waits for one in the background, but the steps beside it, that in
    which it begins and up to two more, compute slower."""
    every, lasts, more = int(random.integers(6, 13)), int(random.integers(1, 4)), float(random.uniform(0.2, 1.0))
    ranks = [0] if random.random() < 0.5 else list(range(job.shape.ranks))
    hit = np.zeros(job.steps)
    hit[every - 1 :: every] = 1
    slowed = np.clip(np.convolve(hit, np.ones(lasts))[: job.steps], 0, 1) if kind == "background save" else hit
    named = Planted(kind=kind, ranks=(0,) if len(ranks) == 1 else (), steps=_listed(slowed))
    amount = _on(job, hit, ranks)
    if kind == "save":
        size = step_ms * random.uniform(0.4, 5)
        return Cause(planted=named, changes=(Change(lambda each: each.name == SAVE, amount, 0.0, size),))
    size = step_ms * (lasts - 0.3) * (1 + more)
    runs = Change(lambda each: each.name == BACKGROUND_SAVE, amount, 0.0, size)
    return Cause(planted=named, changes=(runs, Change(_computes, _on(job, slowed, ranks), more)))


def _slow_group(kind: str, job: Job, random: np.random.Generator, step_ms: float) -> Cause:
    """The transfers of a group, or of a link, which two ranks have, in one direction or in both.

    A group that is the only one of its kind is slow in some steps: it has no like but itself in others.
    """
    meetings = [each for each in job.program.meetings if len(each.groups) > 1]
    sends = kind == "link" and job.shape.stages > 1
    if kind == "link":
        meetings = [each for each in meetings if all(len(ranks) == 2 for ranks in each.groups.values())]
    if job.shape.stages > 1:
        meetings = [each for each in job.program.meetings if ("send" in each.like) == sends]
    meeting = meetings[random.integers(len(meetings))]
    group = list(meeting.groups)[random.integers(len(meeting.groups))]
    ranks, both = tuple(sorted(meeting.groups[group])), bool(random.random() < 0.5)

    def touches(other: Meeting, name: str) -> bool:
        if sends:
            return name == group or (both and "send" in other.like and tuple(sorted(other.groups[name])) == ranks)
        return other.like == meeting.like and name == group

    alike = {name for each in job.program.meetings if each.like == meeting.like for name in each.groups}
    hit = _when(job.steps, random, always=0.6 if len(alike) > 1 else 0.0)
    times = sum(touches(other, name) for other in job.program.meetings for name in other.groups)
    planted = Planted(kind=kind, ranks=ranks, group=group, steps=_listed(hit))
    return Cause(planted=planted, transfers=(SlowTransfer(touches, hit, _size_ms(step_ms, hit, random) / times),))


def _uneven(kind: str, job: Job, random: np.random.Generator, step_ms: float) -> Cause:
    """More tokens for one replica, always the same or another one in each step."""
    shape, always = job.shape, bool(random.random() < 0.4)
    given = random.integers(0, shape.replicas, job.steps)
    if always:
        given[:] = given[0]
    hit = _when(job.steps, random, always=0.8)
    of = np.array([shape.place(rank)["dp"] for rank in range(shape.ranks)])
    amount = (of[None, :] == given[:, None]) * hit[:, None]

    def touches(operation: Operation) -> bool:
        return operation.kind in ("forward", "backward")

    more = _size_ms(step_ms, hit, random) / _base_ms(job, 0, touches)
    ranks = _of_replicas(shape, given[:1].tolist()) if always else []
    planted = Planted(kind=kind, ranks=tuple(ranks), steps=_listed(hit))
    return Cause(planted=planted, changes=(Change(touches, amount, more),), tokens=1 + more * amount)


def _plant(kind: str, job: Job, random: np.random.Generator, step_ms: float) -> Cause:
    """A cause of that kind, of a random place and size."""
    others = {"gc": _gc, "save": _save, "background save": _save, "link": _slow_group, "group": _slow_group}
    others["uneven work"] = _uneven
    if kind in others:
        return others[kind](kind, job, random, step_ms)
    return _slow(kind, job, random, step_ms, *_who(kind, job, random))
