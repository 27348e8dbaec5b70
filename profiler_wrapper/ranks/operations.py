"""What the ranks of a pipeline do in a step, from the span table: places, operations, their order and transfers."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from profiler_wrapper.analysis.statistics import median
from profiler_wrapper.ranks.database import Database, to_arrays
from profiler_wrapper.ranks.model import Bool, Float, Int

# --------------------------------------------------------------------------------------------------
# Where ranks are in a job: which are the stages of one pipeline, which replicas of one stage.

COORDINATES: Final = ("dp", "tp", "cp", "ep")


class NotReplayable(Exception):
    """What the replay would need is not in the table; the message says what."""


def read_places(database: Database, present: Int) -> dict[str, Int]:
    """Where the ranks that are present are in the job: fields of `Cells`.

    Raises:
        NotReplayable: which ranks belong together is not known.
    """
    wanted = ", ".join(f"max({name})" for name in COORDINATES)
    rows = database.execute(
        f"SELECT rank, max(coalesce(stage, 0)), {wanted} FROM ranks GROUP BY rank ORDER BY rank"
    ).fetchall()
    there = set(present.tolist())
    rows = [row for row in rows if row[0] in there]
    if not rows:
        raise NotReplayable("the places of the ranks in the job are not known")
    ranks = np.array([row[0] for row in rows], dtype=np.int64)
    stage = np.array([row[1] for row in rows], dtype=np.int64)
    places = np.array([[-1 if value is None else value for value in row[2:]] for row in rows], dtype=np.int64)
    stages = np.unique(stage)
    keys = [tuple(row) for row in places.tolist()]
    if len(set(zip(stage.tolist(), keys, strict=True))) < len(ranks) or (places[:, 0] < 0).any():
        sizes = {int((stage == number).sum()) for number in stages}
        if len(sizes) > 1:
            raise NotReplayable("stages have different numbers of ranks, and which ranks are one pipeline is not known")
        for number in stages:  # frameworks number the ranks of all stages in one way
            for place, index in enumerate(np.flatnonzero(stage == number).tolist()):
                keys[index] = (place, -1, -1, -1)
    pipelines = sorted(set(keys))
    grid = np.full((len(stages), len(pipelines)), -1, dtype=np.int64)
    column = {key: place for place, key in enumerate(pipelines)}
    for index, key in enumerate(keys):
        grid[np.searchsorted(stages, stage[index]), column[key]] = index
    coordinates = np.array(pipelines, dtype=np.int64).reshape(-1, len(COORDINATES))
    return {"ranks": ranks, "stages": stages, "grid": grid, "coordinates": coordinates}


# --------------------------------------------------------------------------------------------------
# The operations of a job as arrays: what each rank did in each step, read once from the span table.
#
# A slot is the n-th operation of a name within a step. Ranks and steps with the same slots stand beside one another, so
# that the replay works on whole arrays.

Align = Callable[[Int, Int], Int]  # (ranks, own times) -> times by the common clock

ROWS_AT_ONCE: Final = 500_000
MOST_ROWS_OF_ONE_STAGE: Final = 400_000
_OPERATIONS: Final = "coalesce(depth, 0) = 0 AND kind <> 'step' AND step IS NOT NULL AND duration_ns >= 0"


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """Axes: K slots, R ranks, S steps; G stages, P pipelines (ranks of one stage that differ in other coordinates)."""

    ranks: Int  # (R,)
    stages: Int  # (G,) numbers of the stages, ascending
    grid: Int  # (G, P) index into ranks; -1: no such rank in the table
    coordinates: Int  # (P, 4) of COORDINATES; -1 where not known
    steps: Int  # (S,)
    all_steps: int  # in the table; more than S where steps were left out to bound time and memory
    names: tuple[tuple[str, str], ...]  # (name, kind)
    slot_name: Int  # (K,) index into names
    start_ns: Float  # (K, R, S) from the step's first start; nan: no such operation
    length_ns: npt.NDArray[np.float32]  # (K, R, S) its duration
    microbatch: npt.NDArray[np.int16]  # (K, R, S); -1: not known
    chunk: npt.NDArray[np.int16]  # (K, R, S) part of the model within the stage; -1: not known
    group: Int  # (K, R) of a collective, a number for each group of the table; -1: not known
    waiting_share: float  # of forwards and backwards that is communication within them


def read_cells(database: Database, *, most_rows: int, align: Align | None) -> Cells:
    """The operations of depth 0 of all ranks.

    Steps are left out evenly beyond `most_rows` operations, sooner where there is no pipeline: all ranks are equal.

    Raises:
        NotReplayable: the table has no operations, or ranks whose places in the job are not known.
    """
    query = f"SELECT rank, step, count(*), min(start_ns) FROM spans WHERE {_OPERATIONS} GROUP BY rank, step"
    found = np.stack([np.asarray(column).astype(np.int64) for column in to_arrays(database, query).values()], axis=1)
    if not len(found):
        raise NotReplayable("no operation has a step")
    places = read_places(database, np.unique(found[:, 0]))
    ranks = places["ranks"].tolist()
    most_rows = most_rows if len(places["stages"]) > 1 else min(most_rows, MOST_ROWS_OF_ONE_STAGE)
    all_steps = _choose_steps(database, found, most_rows)
    database.execute(
        "CREATE OR REPLACE TEMP TABLE replay_ranks AS "
        "SELECT unnest(?::INTEGER[]) AS rank, unnest(?::INTEGER[]) AS place",
        [ranks, list(range(len(ranks)))],
    )
    _read_rows(database)
    cells, count = _filled(database, places, all_steps, align, by_order=False)
    if int((~np.isnan(cells.length_ns)).sum()) < count:  # two had one number: all by their order, then
        cells, _ = _filled(database, places, all_steps, align, by_order=True)
    database.execute("DROP TABLE replay_rows")
    database.execute("DROP TABLE replay_slots")
    return cells


def _choose_steps(database: Database, found: Int, most_rows: int) -> int:
    """A table of chosen steps with the first start in each, of (rank, step, count, first start); how many there are."""
    steps, place = np.unique(found[:, 1], return_inverse=True)
    bases = np.full(len(steps), np.iinfo(np.int64).max)
    np.minimum.at(bases, place.reshape(-1), found[:, 3])
    typical = max(1, int(found[:, 2].sum()) // len(steps))
    count = max(1, min(len(steps), most_rows // typical))
    chosen = np.unique(np.linspace(0, len(steps) - 1, count).round().astype(int))
    database.execute(
        "CREATE OR REPLACE TEMP TABLE replay_steps AS SELECT unnest(?::BIGINT[]) AS step, unnest(?::BIGINT[]) AS base,"
        " unnest(?::INTEGER[]) AS place",
        [steps[chosen].tolist(), bases[chosen].tolist(), list(range(len(chosen)))],
    )
    return len(steps)


def _read_rows(database: Database) -> None:
    """A table of the operations of the chosen steps: the spans may lie in many files, which are read once."""
    computes = "kind IN ('forward', 'backward')"
    database.execute(
        f"""CREATE OR REPLACE TEMP TABLE replay_rows AS
        SELECT r.place AS rank, t.place AS step, name, kind, start_ns, duration_ns::FLOAT AS length, sequence,
            coalesce(microbatch, -1)::SMALLINT AS microbatch,
            coalesce(chunk, -1)::SMALLINT AS chunk,
            CASE WHEN kind = 'communication' AND "group" IS NOT NULL
                THEN (hash("group") >> 1)::BIGINT ELSE -1 END AS of,
            CASE WHEN {computes} THEN coalesce(waiting_ns, 0) ELSE 0 END::FLOAT AS waiting,
            CASE WHEN {computes} THEN duration_ns ELSE 0 END::FLOAT AS computing
        FROM spans JOIN replay_steps t USING (step) JOIN replay_ranks r USING (rank)
        WHERE {_OPERATIONS}"""
    )


def _filled(
    database: Database, places: dict[str, Int], all_steps: int, align: Align | None, *, by_order: bool
) -> tuple[Cells, int]:
    """The cells, and how many operations there were to fill in.

    An operation's slot is told by `sequence`, else by its order among those of its name; `by_order`: always by that.
    """
    # Other numbers go on over steps, or begin anew in each group.
    numbered = (
        "false" if by_order else "coalesce(bool_and(known = n AND low >= 0) AND max(high) < 2 * max(n) + 4, false)"
    )
    database.execute(
        f"""CREATE OR REPLACE TEMP TABLE replay_names AS
        SELECT name, kind, numbered, slots, sum(slots) OVER (ORDER BY name, kind) - slots AS first_slot FROM (
            SELECT name, kind, {numbered} AS numbered, CASE WHEN {numbered} THEN max(high) + 1 ELSE max(n) END AS slots
            FROM (SELECT name, kind, count(*) AS n, count(sequence) AS known, min(sequence) AS low,
                max(sequence) AS high FROM replay_rows GROUP BY rank, step, name, kind) GROUP BY name, kind)"""
    )
    database.execute(
        """CREATE OR REPLACE TEMP TABLE replay_slots AS
        SELECT rank, step, start_ns, length, microbatch, chunk, of, (first_slot + CASE WHEN numbered THEN sequence ELSE
            row_number() OVER (PARTITION BY rank, step, name, kind ORDER BY start_ns) - 1 END)::INTEGER AS slot
        FROM replay_rows JOIN replay_names USING (name, kind)"""
    )
    names = database.execute("SELECT name, kind, slots::INTEGER FROM replay_names ORDER BY first_slot").fetchall()
    steps = database.execute("SELECT step, base FROM replay_steps ORDER BY place").fetchall()
    count, waiting = database.execute(
        "SELECT count(*), sum(waiting) / greatest(1, sum(computing)) FROM replay_rows"
    ).fetchone() or (0, 0.0)
    shape = (sum(slots for *_, slots in names), len(places["ranks"]), len(steps))
    cells = Cells(
        **places,
        steps=np.array([step for step, _ in steps], dtype=np.int64),
        all_steps=all_steps,
        names=tuple((name, kind) for name, kind, _ in names),
        slot_name=np.repeat(np.arange(len(names)), [slots for *_, slots in names]).astype(np.int64),
        start_ns=np.full(shape, np.nan),
        length_ns=np.full(shape, np.nan, dtype=np.float32),
        microbatch=np.full(shape, -1, dtype=np.int16),
        chunk=np.full(shape, -1, dtype=np.int16),
        group=np.full(shape[:2], -1, dtype=np.int64),
        waiting_share=waiting or 0.0,
    )
    bases = np.array([base for _, base in steps], dtype=np.int64)
    for first in range(0, count, ROWS_AT_ONCE):
        where = f"rowid >= {first} AND rowid < {first + ROWS_AT_ONCE}"
        _place(cells, database.execute(f"SELECT * FROM replay_slots WHERE {where}").fetchnumpy(), bases, align)
    return cells, count


def _place(cells: Cells, rows: dict[str, Any], bases: Int, align: Align | None) -> None:
    rank, step, slot, start = (rows[key].astype(np.int64) for key in ("rank", "step", "slot", "start_ns"))
    if align is not None:
        start = align(cells.ranks[rank], start)
    cells.start_ns[slot, rank, step] = start - bases[step]
    cells.length_ns[slot, rank, step] = rows["length"]
    cells.microbatch[slot, rank, step] = rows["microbatch"]
    cells.chunk[slot, rank, step] = rows["chunk"]
    known = rows["of"] >= 0
    cells.group[slot[known], rank[known]] = rows["of"][known]


# --------------------------------------------------------------------------------------------------
# What an operation does in a jobby its name: computes, sends, receives, meets others, or none of these.

Direction = Literal["forward", "backward", ""]
Scope = Literal["itself", "tensor", "replicas", "ends", "all"]
Verb = Literal["send", "receive"]
Part = tuple[Verb, Direction]

_DIRECTIONS: Final[dict[str, Direction]] = {
    "forward": "forward",
    "fwd": "forward",
    "backward": "backward",
    "bwd": "backward",
}
_VERBS: Final[dict[str, Verb]] = {
    "send": "send",
    "isend": "send",
    "recv": "receive",
    "irecv": "receive",
    "receive": "receive",
}
# Megatron's timers: this one holds the all-reduce of the gradients' norm over the whole job.
_CLIPS: Final = ("optimizer-clip-main-grad",)


@dataclass(frozen=True, slots=True)
class Role:
    """An operation's place in the dependencies.

    `parts` of a point-to-point transfer: ("send", "forward") and so on, two where one span is of two transfers.
    `scope` of a collective: "replicas" are the ranks of its stage with its share of the tensors, "tensor"
    the ranks that share its tensors, "ends" the first and the last stage of its pipeline, "all" the job.
    """

    what: Literal["compute", "transfer", "collective", "local"]
    direction: Direction = ""
    parts: tuple[Part, ...] = ()
    scope: Scope = "itself"
    gathers: bool = False  # parameters, before they are used
    reduces: bool = False  # gradients, once they are there

    @property
    def meets(self) -> bool:
        """Whether its typical length is a median: transfers have long tails that the network makes, not the rank."""
        return self.what in ("transfer", "collective")


def role_of(name: str, kind: str) -> Role:
    """The role of an operation, by its name and its kind in the span table."""
    words = re.split(r"[^a-z0-9]+", name.lower())
    if kind in ("forward", "backward", "recompute") and not any(word in _VERBS for word in words):
        weights = kind == "backward" and any(word in ("weight", "weights", "wgrad") for word in words)
        if kind == "recompute" or weights:  # of no transfer: nobody waits for it by itself
            return Role("local")
        return Role("compute", direction="forward" if kind == "forward" else "backward")
    plain = "-".join(words)
    if kind != "communication" and plain not in _CLIPS:
        return Role("local")
    parts = _parts(words)
    return Role("transfer", parts=parts) if parts else _collective(plain, set(words))


def _parts(words: list[str]) -> tuple[Part, ...]:
    """Of "forward-send-backward-recv" (timers) or "send_forward_recv_backward" (functions)."""
    known = [word for word in words if word in _VERBS or word in _DIRECTIONS]
    if all(word in _VERBS for word in known):
        return tuple((_VERBS[word], "") for word in known)
    for verbs, directions in ((known[::2], known[1::2]), (known[1::2], known[::2])):
        if len(verbs) == len(directions) and all(map(_VERBS.get, verbs)) and all(map(_DIRECTIONS.get, directions)):
            return tuple((_VERBS[verb], _DIRECTIONS[way]) for verb, way in zip(verbs, directions, strict=True))
    return ()


def _collective(plain: str, words: set[str]) -> Role:
    if plain in _CLIPS or ("norm" in words and "layer" not in words):
        return Role("collective", scope="all")
    if words & {"embedding", "embeddings"}:
        return Role("collective", scope="ends")
    if words & {"layernorm", "tp", "tensor"}:
        return Role("collective", scope="tensor")
    gradients = bool(words & {"grad", "grads", "gradient", "gradients"})
    scatters = "reduce-scatter" in plain or "reducescatter" in words
    return Role(
        "collective",
        scope="replicas",
        gathers="all-gather" in plain or "allgather" in words,
        reduces="separate" not in words and (scatters or gradients),
    )


# --------------------------------------------------------------------------------------------------
# The order in which the ranks of a stage do their operations, read from what they did.

CELLS_READ: Final = 40  # of a stage: the order of a schedule is the same in all of them
CELLS_OF_RARE: Final = 3  # more, for an operation that these do not have


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation of a stage, the same on all its ranks and in all steps of a class."""

    stage: int  # index
    slot: int
    name: int  # index
    role: Role
    microbatch: int  # -1: not known
    chunk: int  # -1: not known


@dataclass(frozen=True, slots=True, eq=False)
class StageOrder:
    """Operations of a stage by their starts. `starts` and `ends`: (cells, operations), nan where a cell has none."""

    operations: tuple[Operation, ...]
    starts: Float
    ends: Float

    def ends_after(self, one: int, other: int) -> float:
        """The same of their ends."""
        return float(median(self.ends[:, one] - self.ends[:, other]))

    def begins_after_end(self, one: int, other: int) -> float:
        """The same from the end of the other to the start of this one."""
        return float(median(self.starts[:, one] - self.ends[:, other]))


def classes_of_steps(cells: Cells, roles: list[Role]) -> list[Int]:
    """Indices of steps with as many forwards and backwards on each stage as one another, the largest class first."""
    computes = [np.flatnonzero(cells.slot_name == name) for name, role in enumerate(roles) if role.what == "compute"]
    columns = []
    for members in cells.grid:
        known = members[members >= 0]
        columns += [(~np.isnan(cells.length_ns[slots][:, known])).sum(axis=0).max(axis=0) for slots in computes]
    _, of_step = np.unique(np.stack(columns), axis=1, return_inverse=True)
    of_step = of_step.reshape(-1)
    sizes = np.bincount(of_step)
    return [np.flatnonzero(of_step == label) for label in np.argsort(-sizes, kind="stable")]


def stage_order(cells: Cells, roles: list[Role], stage: int, steps: Int) -> StageOrder:
    """Operations of one stage in the steps given, in the order in which most ranks begin them."""
    members = cells.grid[stage]
    members = members[members >= 0]
    there = np.stack([~np.isnan(plane[np.ix_(members, steps)]).reshape(-1) for plane in cells.length_ns])  # (K, cells)
    slots = np.flatnonzero(there.any(axis=1))
    there = there[slots]
    chosen = _chosen(there)
    rank, step = members[chosen // len(steps)], steps[chosen % len(steps)]
    starts = cells.start_ns[slots[:, None], rank, step].T
    ends = starts + cells.length_ns[slots[:, None], rank, step].T
    regular = there.mean(axis=1) >= 0.5
    before = np.array([np.searchsorted(np.sort(row[regular]), row) for row in starts]).astype(np.float64)
    before[np.isnan(starts)] = np.nan  # how many of the regular operations begin before each
    order = np.lexsort((np.arange(len(slots)), median(starts), median(before)))
    microbatch, chunk = (each[slots[:, None], rank, step].T for each in (cells.microbatch, cells.chunk))
    operations = tuple(
        Operation(
            stage=stage,
            slot=int(slots[index]),
            name=int(cells.slot_name[slots[index]]),
            role=roles[cells.slot_name[slots[index]]],
            microbatch=_usual(microbatch[~np.isnan(starts[:, index]), index]),
            chunk=_usual(chunk[~np.isnan(starts[:, index]), index]),
        )
        for index in order
    )
    return StageOrder(operations, starts[:, order], ends[:, order])


def _chosen(there: Bool) -> Int:
    """Cells that have most, evenly spread, and some for each operation that only others have."""
    counts = there.sum(axis=0)
    full = np.flatnonzero(counts == counts.max())
    chosen = full[np.unique(np.linspace(0, len(full) - 1, min(CELLS_READ, len(full))).round().astype(int))]
    for slot in np.flatnonzero(~there[:, chosen].any(axis=1)):
        chosen = np.concatenate([chosen, np.flatnonzero(there[slot])[:CELLS_OF_RARE]])
    return np.unique(chosen).astype(np.int64)


def _usual(values: npt.NDArray[np.int16]) -> int:
    found, counts = np.unique(values, return_counts=True)
    return int(found[counts.argmax()])


# --------------------------------------------------------------------------------------------------
# Which send belongs to which receive, and both to which forward or backward.
#
# Activations of a microbatch go from each part of the model to the next one, gradients the other way. With several
# parts (chunks) per stage the last stage's part is followed by the first stage's next one.

SLACK_NS: Final = 50_000.0  # two starts that belong together are recorded this far apart


class End(NamedTuple):
    """One end of a transfer: the forward or backward that makes or needs what is moved, and the span of the move."""

    compute: int
    transfer: int | None  # None: not recorded


@dataclass(slots=True)
class Transfers:
    """Numbers are of operations over all stages: the first stage's from 0 in their order, then the second's ..."""

    crossings: list[tuple[End, End]] = field(default_factory=list)  # between two stages: sender, receiver
    sends: list[End] = field(default_factory=list)  # all that follow a compute, also those that move nothing
    receives: list[End] = field(default_factory=list)  # all that precede a compute, also those that move nothing
    chunks: int = 1  # parts of the model per stage
    chunk_of: dict[int, int] = field(default_factory=dict)  # compute -> its part, from 0


class _Compute(NamedTuple):
    number: int  # of the operation
    part: int  # of the whole model, from 0


def match_transfers(orders: list[StageOrder], first: list[int]) -> Transfers:
    """Both ends of each transfer; `first` is the number of each stage's first operation.

    Raises:
        NotReplayable: sends or receives do not fit the forwards and backwards in number.
    """
    found = Transfers()
    if len(orders) == 1:
        return found
    chunks = [_chunks(order) for order in orders]
    found.chunks = max([1, *(1 + chunk for each in chunks for chunk in each.values())])
    stages, parts = len(orders), found.chunks * len(orders)
    ends: dict[tuple[int, Verb, Direction], list[End]] = {}
    for stage, order in enumerate(orders):
        found.chunk_of.update({first[stage] + index: chunk for index, chunk in chunks[stage].items()})
        parts_known = all(
            order.operations[at].chunk >= 0 or order.operations[at].microbatch >= 0 for at in chunks[stage]
        )
        directions: tuple[Direction, ...] = ("forward", "backward")
        for direction in directions:
            computes = [
                _Compute(first[stage] + index, chunk * stages + stage)
                for index, chunk in chunks[stage].items()
                if order.operations[index].role.direction == direction
            ]
            verbs: tuple[Verb, ...] = ("send", "receive")
            for verb in verbs:
                needing = [each for each in computes if 0 <= _other_part(each.part, verb, direction) < parts]
                matched = _match(order, first[stage], verb, direction, computes, needing)
                if matched and not needing and not parts_known:
                    raise NotReplayable("whether a stage has several parts of the model is not known")
                (found.sends if verb == "send" else found.receives).extend(
                    End(compute, transfer) for compute, transfer in matched.items()
                )
                ends[stage, verb, direction] = [End(each.number, matched.get(each.number)) for each in needing]
    found.crossings = _pair(ends, stages)
    return found


def _other_part(part: int, verb: Verb, direction: Direction) -> int:
    return part + (1 if (verb == "send") == (direction == "forward") else -1)


def _chunks(order: StageOrder) -> dict[int, int]:
    """Part within the stage of each forward and backward, in their order: known, or by repeats of a microbatch."""
    computes = [index for index, each in enumerate(order.operations) if each.role.what == "compute"]
    known = {index: order.operations[index].chunk for index in computes}
    if all(chunk >= 0 for chunk in known.values()):
        return known
    seen: dict[tuple[str, int], int] = {}
    repeats = {}
    for index in computes:
        each = order.operations[index]
        key = (each.role.direction, each.microbatch)
        repeats[index] = seen.get(key, 0) if each.microbatch >= 0 else 0
        seen[key] = repeats[index] + 1
    last = max(repeats.values(), default=0)
    direction = {index: order.operations[index].role.direction for index in computes}
    return {index: repeat if direction[index] == "forward" else last - repeat for index, repeat in repeats.items()}


def _match(
    order: StageOrder, first: int, verb: Verb, direction: Direction, computes: list[_Compute], needing: list[_Compute]
) -> dict[int, int]:
    """Compute -> its transfer. Both are done in one order; transfers recorded without being launched are left out."""
    wanted = [
        index for index, each in enumerate(order.operations) if (verb, direction) in _transfer_parts(order, index)
    ]
    if not computes:
        return {}
    if verb == "receive":
        last = computes[-1].number - first
        kept = [index for index in wanted if float(median(order.starts[:, index] - order.starts[:, last])) <= SLACK_NS]
    else:
        earliest = computes[0].number - first
        kept = [index for index in wanted if order.ends_after(index, earliest) >= -SLACK_NS]
    if not kept:
        return {}
    if len(kept) == len(computes):
        chosen = computes
    elif len(kept) == len(needing):
        chosen = needing
    elif len(kept) == len(computes) - 1:  # one of the ends of the model has one that moves nothing, not always recorded
        chosen = computes[1:] if verb == "receive" else computes[:-1]
    else:
        raise NotReplayable(
            f"stage {order.operations[0].stage} has {len(kept)} of {direction} {verb} a step "
            f"for {len(computes)} of {direction}: which belongs to which is not known"
        )
    return {compute.number: first + index for compute, index in zip(chosen, kept, strict=True)}


def _transfer_parts(order: StageOrder, index: int) -> tuple[tuple[str, str], ...]:
    """What a transfer sends and receives; where no direction is known, that of the compute before or after it."""
    parts = []
    for verb, direction in order.operations[index].role.parts:
        others = order.operations[:index][::-1] if verb == "send" else order.operations[index + 1 :]
        near = (other.role.direction for other in others if other.role.what == "compute")
        parts.append((verb, direction or next(near, direction)))
    return tuple(parts)


def _pair(ends: dict[tuple[int, Verb, Direction], list[End]], stages: int) -> list[tuple[End, End]]:
    """Sender and receiver of each transfer: what one stage sends to another is received in the same order."""
    crossings = []
    for (stage, verb, direction), sent in ends.items():
        if verb == "receive":
            continue
        peer = (stage + (1 if direction == "forward" else -1)) % stages
        received = ends[peer, "receive", direction]
        if len(sent) != len(received):
            raise NotReplayable(
                f"stage {stage} sends {len(sent)} times {direction} a step and stage {peer} receives {len(received)} "
                "times: which belongs to which is not known"
            )
        crossings += list(zip(sent, received, strict=True))
    return crossings
