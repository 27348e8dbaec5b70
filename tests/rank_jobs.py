"""A simulator of jobs of many ranks: durations in, meetings computed. It shares nothing with the code under test.

A rank has lines (its main thread or compute stream, a stream of communication, one for each direction of sends and
receives, a thread in the background). What is on a line begins when what is before it on that line has ended, and all
that it waits for. Members of a meeting (a collective, a send with its receive) begin each by itself, and end together:
its transfer begins when the last one has come. There is no other order: no rank waits at the end of a step.

Several variants of a job are played at once, with the same durations but for what a variant lacks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

Float = npt.NDArray[np.float64]
Int = npt.NDArray[np.int64]
MAIN = "main"


@dataclass(frozen=True, eq=False)
class Operation:
    """What each rank of a role does at one place of every step."""

    name: str
    kind: str
    role: int
    base_ms: float  # 0: only what a cause adds; of a meeting's member not asked
    line: str
    after: tuple[int, ...]  # numbers of operations of the same step and role that have ended before it begins
    parent: str = ""  # the phase that it lies in
    layer: str = ""
    microbatch: int = -1
    chunk: int = -1
    bytes: int = 0
    recorded: bool = True

    @property
    def phase(self) -> str:
        return self.parent or self.kind


@dataclass(frozen=True, eq=False)
class Meeting:
    """What members of each of some groups of ranks do together."""

    members: tuple[int, ...]  # numbers of operations
    groups: Mapping[str, Sequence[int]]  # name: its ranks, of all groups as many
    base_ms: float  # of the transfer
    like: str  # meetings with one of these names, and groups as large, take equally long


@dataclass(eq=False)
class Program:
    """One step of all ranks, which comes again and again.

    Attributes:
        roles: the ranks of each role, such as a stage of a pipeline.
    """

    roles: Sequence[Int]
    operations: list[Operation] = field(default_factory=list)
    meetings: list[Meeting] = field(default_factory=list)

    def add(
        self,
        role: int,
        name: str,
        kind: str,
        base_ms: float = 0.0,
        *,
        line: str = MAIN,
        after: Iterable[int | None] = (),
        **about: Any,
    ) -> int:
        """The number of a new operation, behind all others of its line."""
        waited = tuple(number for number in after if number is not None)
        self.operations.append(Operation(name, kind, role, base_ms, line, waited, **about))
        return len(self.operations) - 1

    def meet(self, members: Iterable[int], groups: Mapping[str, Sequence[int]], base_ms: float, like: str) -> None:
        """These operations end together, in each group by itself."""
        self.meetings.append(Meeting(tuple(members), groups, base_ms, like))

    def collective(
        self, roles: Iterable[int], name: str, groups: Mapping[str, Sequence[int]], base_ms: float, **about: Any
    ) -> int:
        """The number of the last of the members' operations, one of each role."""
        members = [self.add(role, name, "communication", **about) for role in roles]
        self.meet(members, groups, base_ms, name)
        return members[-1]

    @cached_property
    def ranks(self) -> int:
        return sum(map(len, self.roles))

    @cached_property
    def meeting_of(self) -> dict[int, int]:
        return {number: place for place, meeting in enumerate(self.meetings) for number in meeting.members}

    @cached_property
    def order(self) -> list[tuple[int, bool]]:
        """(operation, False) and (meeting, True), each behind all that it waits for.

        Raises:
            ValueError: some wait for one another for ever.
        """
        lines: dict[tuple[int, str], list[int]] = defaultdict(list)
        for number, operation in enumerate(self.operations):
            lines[operation.role, operation.line].append(number)
        queues = [numbers[::-1] for numbers in lines.values()]
        done: set[int] = set()
        ready: set[int] = set()  # members that have come to a meeting
        found: list[tuple[int, bool]] = []
        while len(done) < len(self.operations):
            before = len(done), len(ready)
            for queue in queues:
                while queue and (queue[-1] in done or set(self.operations[queue[-1]].after) <= done):
                    number = queue[-1]
                    if number in self.meeting_of and number not in done:
                        ready.add(number)
                        place = self.meeting_of[number]
                        if not set(self.meetings[place].members) <= ready:
                            break
                        found.append((place, True))
                        done.update(self.meetings[place].members)
                    elif number not in done:
                        found.append((number, False))
                        done.add(number)
                    queue.pop()
            if before == (len(done), len(ready)):
                raise ValueError(
                    "a deadlock: " + ", ".join(self.operations[queue[-1]].name for queue in queues if queue)
                )
        return found

    @cached_property
    def sequences(self) -> list[Mapping[int, int]]:
        """Of each operation by rank: how many of its name and group come before it in a step of the rank."""
        seen: Counter[tuple[str, str, int]] = Counter()
        found = []
        for number in range(len(self.operations)):
            mine = {}
            for rank, group in self.groups_of(number).items():
                key = self.operations[number].name, group, rank
                mine[rank] = seen[key]
                seen[key] += 1
            found.append(mine)
        return found

    def groups_of(self, number: int) -> dict[int, str]:
        """The group of each rank in an operation; nothing where it meets nobody."""
        place = self.meeting_of.get(number)
        if place is None:
            return {}
        mine = set(self.roles[self.operations[number].role].tolist())
        return {rank: name for name, ranks in self.meetings[place].groups.items() for rank in ranks if rank in mine}


@dataclass(frozen=True, eq=False)
class Played:
    """What became of a job. Milliseconds since it began.

    Attributes:
        begin, end: of each operation (S, ranks of its role), in the first variant.
        step_end: (S, R) of the main line.
        step_ms: (V,) the mean step of each variant: the last end of all ranks, over the steps.
    """

    begin: list[Float]
    end: list[Float]
    step_end: Float
    step_ms: Float


def play(program: Program, lengths: Sequence[Float], transfers: Sequence[Float]) -> Played:
    """All steps of a job.

    Args:
        lengths: of each operation that meets nobody (V or 1, S, ranks of its role).
        transfers: of each meeting (V or 1, S, groups).
    """
    operations, meetings = program.operations, program.meetings
    variants = max(len(values) for values in (*lengths, *transfers))
    steps = max(values.shape[1] for values in (*lengths, *transfers))
    lines = [(operation.role, operation.line) for operation in operations]
    free = {line: np.zeros((variants, len(program.roles[line[0]]))) for line in lines}
    begin = [np.empty((steps, len(program.roles[operation.role]))) for operation in operations]
    end = [np.empty_like(each) for each in begin]
    step_end = np.empty((steps, program.ranks))
    plans = [_plan(program, meeting) for meeting in meetings]
    ends: list[Float] = [np.empty(0)] * len(operations)
    for step in range(steps):

        def arrive(number: int, step: int = step) -> Float:
            at = free[lines[number]]
            for other in operations[number].after:
                at = np.maximum(at, ends[other])
            begin[number][step] = at[0]
            return at

        def leave(number: int, at: Float, step: int = step) -> None:
            free[lines[number]] = ends[number] = at
            end[number][step] = at[0]

        for number, is_meeting in program.order:
            if not is_meeting:
                leave(number, arrive(number) + lengths[number][:, step])
                continue
            members, (grid, group_of) = meetings[number].members, plans[number]
            arrived = [arrive(member) for member in members]
            met = (arrived[0] if len(members) == 1 else np.concatenate(arrived, axis=1))[:, grid].max(axis=2)
            left, first = (met + transfers[number][:, step])[:, group_of], 0
            for member, at in zip(members, arrived, strict=True):
                leave(member, left[:, first : first + at.shape[1]])
                first += at.shape[1]
        for role, ranks in enumerate(program.roles):
            step_end[step, ranks] = free[role, MAIN][0]
    last = np.concatenate([free[role, MAIN] for role in range(len(program.roles))], axis=1)
    return Played(begin, end, step_end, last.max(axis=1) / steps)


def _plan(program: Program, meeting: Meeting) -> tuple[Int, Int]:
    """Of the members' ranks, one behind the other: the places of each group's (G, size), and the group of each."""
    ranks = np.concatenate([program.roles[program.operations[number].role] for number in meeting.members])
    place = {rank: index for index, rank in enumerate(ranks.tolist())}
    grid = np.array([[place[rank] for rank in group] for group in meeting.groups.values()])
    group_of = np.empty(len(ranks), dtype=np.int64)
    group_of[grid] = np.arange(len(grid))[:, None]
    if len(np.unique(grid)) != len(ranks):
        raise ValueError(f"{meeting.like}: not every rank is in one group")
    return grid, group_of


# --- noise ---


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Relative, each the sigma of a lognormal distribution."""

    of_an_operation: float
    of_a_rank: float = 0.003  # in all steps
    of_a_step: float = 0.004  # of a rank: all that it does


def draw(program: Program, steps: int, noise: Noise, random: np.random.Generator) -> tuple[list[Float], list[Float]]:
    """How long everything takes without a cause: (S, ranks of its role) of operations, (S, groups) of meetings.

    All is drawn before a cause is planted, so that nothing but the cause differs between a job and the one without.
    """
    speed = random.lognormal(0, noise.of_a_rank, program.ranks)
    speed = speed * random.lognormal(0, noise.of_a_step, (steps, program.ranks))
    lengths = []
    for operation in program.operations:
        ranks = program.roles[operation.role]
        drawn = random.lognormal(0, noise.of_an_operation, (steps, len(ranks)))
        lengths.append(operation.base_ms * drawn * speed[:, ranks])
    transfers = [
        meeting.base_ms * random.lognormal(0, noise.of_an_operation, (steps, len(meeting.groups)))
        for meeting in program.meetings
    ]
    return lengths, transfers
