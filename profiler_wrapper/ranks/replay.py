"""What the job would take if some of its operations were as quick as their like.

"Understanding Stragglers in Large Model Training Using What-if Analysis" (OSDI 2025): the dependencies of a step are
replayed with each operation's own time, then with some of these times replaced by the typical one of their kind.
S = T / T_ideal (its equation 1); of a kind of operation, with only this kind as slow as it was (2); of a worker, with
only its operations (4); M_W is the share of T - T_ideal that goes away with the slowest 3 % of workers typical (5), M_S
the same with the last stage typical (section 5.2).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from profiler_wrapper.analysis.statistics import median
from profiler_wrapper.ranks.model import Missing, Replay

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection


# --------------------------------------------------------------------------------------------------
# Where ranks are in a job: which are the stages of one pipeline, which replicas of one stage.

Int = npt.NDArray[np.int64]

COORDINATES: Final = ("dp", "tp", "cp", "ep")


class NotReplayable(Exception):
    """What the replay would need is not in the table; the message says what."""


class Places(NamedTuple):
    """Where ranks are in the job: the fields of `Cells`."""

    ranks: Int  # (R,)
    stages: Int  # (G,) numbers of the stages, ascending
    grid: Int  # (G, P) index into ranks; -1: no such rank in the table
    coordinates: Int  # (P, 4) of COORDINATES; -1 where not known


def read_places(connection: DuckDBPyConnection, present: Int) -> Places:
    """The places of the ranks that are present.

    Raises:
        NotReplayable: which ranks belong together is not told.
    """
    known = {row[0] for row in connection.execute("DESCRIBE ranks").fetchall()}
    wanted = ", ".join(f"max({name})" if name in known else "NULL" for name in COORDINATES)
    rows = connection.execute(
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
            raise NotReplayable("stages have different numbers of ranks, and which ranks are one pipeline is not told")
        for number in stages:  # frameworks number the ranks of all stages alike
            for place, index in enumerate(np.flatnonzero(stage == number).tolist()):
                keys[index] = (place, -1, -1, -1)
    pipelines = sorted(set(keys))
    grid = np.full((len(stages), len(pipelines)), -1, dtype=np.int64)
    column = {key: place for place, key in enumerate(pipelines)}
    for index, key in enumerate(keys):
        grid[np.searchsorted(stages, stage[index]), column[key]] = index
    return Places(ranks, stages, grid, np.array(pipelines, dtype=np.int64).reshape(-1, len(COORDINATES)))


# --------------------------------------------------------------------------------------------------
# The operations of a job as arrays: what each rank did in each step, read once from the span table.
#
# A slot is the n-th operation of a name within a step. Ranks and steps with the same slots stand beside one another, so
# that the replay works on whole arrays.

Float = npt.NDArray[np.float64]
Align = Callable[[Int, Int], Int]  # (ranks, own times) -> times by the common clock

ROWS_AT_ONCE: Final = 500_000
_OPERATIONS: Final = "coalesce(depth, 0) = 0 AND kind <> 'step' AND step IS NOT NULL AND duration_ns >= 0"
_OF_SPANS: Final = "coalesce(s.depth, 0) = 0 AND s.kind <> 'step' AND duration_ns >= 0"


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
    group: Int  # (K, R) of a collective, a number for each group of the table; -1: not told
    waiting_share: float  # of forwards and backwards that is communication within them


class _Name(NamedTuple):
    """Operations of one name: how many slots they take, and whether `sequence` numbers them, else their order."""

    name: str
    kind: str
    slots: int
    numbered: bool


def read_cells(
    connection: DuckDBPyConnection, *, most_rows: int, most_rows_of_one_stage: int, align: Align | None = None
) -> Cells:
    """The operations of depth 0 of all ranks.

    Steps are left out evenly beyond `most_rows` operations, sooner where there is no pipeline: all ranks are alike.

    Raises:
        NotReplayable: the table has no operations, or ranks whose places in the job are not told.
    """
    found = _ranks_and_steps(connection)
    places = read_places(connection, np.unique(found[:, 0]))
    all_steps = _choose_steps(connection, found, most_rows if len(places.stages) > 1 else most_rows_of_one_stage)
    connection.execute(
        "CREATE OR REPLACE TEMP TABLE replay_ranks AS "
        "SELECT unnest(?::INTEGER[]) AS rank, unnest(?::INTEGER[]) AS place",
        [places.ranks.tolist(), list(range(len(places.ranks)))],
    )
    _read_rows(connection)
    cells, count = _filled(connection, places, _names(connection, by_order=False), all_steps, align)
    if int((~np.isnan(cells.length_ns)).sum()) < count:  # two had one number: all by their order, then
        cells, _ = _filled(connection, places, _names(connection, by_order=True), all_steps, align)
    connection.execute("DROP TABLE replay_rows")
    return cells


def _ranks_and_steps(connection: DuckDBPyConnection) -> Int:
    """(rank, step, operations, first start); by the table that other queries made of it, where it is."""
    query = f"SELECT rank, step, count(*), min(start_ns) FROM spans WHERE {_OPERATIONS} GROUP BY rank, step"
    made = connection.execute("SELECT count(*) FROM information_schema.tables WHERE table_name = 'step_windows'")
    if (made.fetchone() or (0,))[0]:
        (rank,) = connection.execute("SELECT coalesce(min(rank), 0) FROM step_windows").fetchone() or (0,)
        (count,) = connection.execute(  # one rank tells about how many there are
            f"SELECT count(*) // greatest(1, count(DISTINCT step)) FROM spans WHERE {_OPERATIONS} AND rank = {rank}"
        ).fetchone() or (1,)
        query = f"SELECT rank, step, {max(1, count)}, begin_ns FROM step_windows WHERE step IS NOT NULL"
    rows = connection.execute(query).fetchnumpy()
    found = np.stack([np.asarray(column).astype(np.int64) for column in rows.values()], axis=1)
    if not len(found):
        raise NotReplayable("no operation has a step")
    return found


def _choose_steps(connection: DuckDBPyConnection, found: Int, most_rows: int) -> int:
    """A table of chosen steps with the first start in each, of (rank, step, count, first start); how many there are."""
    steps, place = np.unique(found[:, 1], return_inverse=True)
    bases = np.full(len(steps), np.iinfo(np.int64).max)
    np.minimum.at(bases, place.reshape(-1), found[:, 3])
    typical = max(1, int(found[:, 2].sum()) // len(steps))
    count = max(1, min(len(steps), most_rows // typical))
    chosen = np.unique(np.linspace(0, len(steps) - 1, count).round().astype(int))
    connection.execute(
        "CREATE OR REPLACE TEMP TABLE replay_steps AS SELECT unnest(?::BIGINT[]) AS step, unnest(?::BIGINT[]) AS base,"
        " unnest(?::INTEGER[]) AS place",
        [steps[chosen].tolist(), bases[chosen].tolist(), list(range(len(chosen)))],
    )
    return len(steps)


def _read_rows(connection: DuckDBPyConnection) -> None:
    """A table of the operations of the chosen steps: the spans may lie in many files, which are read once."""
    columns = {row[0] for row in connection.execute("DESCRIBE spans").fetchall()}
    computes = "s.kind IN ('forward', 'backward')"
    waiting = f"CASE WHEN {computes} THEN coalesce(waiting_ns, 0) ELSE 0 END" if "waiting_ns" in columns else "0"
    connection.execute(
        f"""CREATE OR REPLACE TEMP TABLE replay_rows AS
        SELECT r.place AS rank, t.place AS step, name, kind, start_ns, duration_ns::FLOAT AS length, sequence,
            coalesce(microbatch, -1)::SMALLINT AS microbatch,
            {"coalesce(chunk, -1)" if "chunk" in columns else "-1"}::SMALLINT AS chunk,
            CASE WHEN s.kind = 'communication' AND "group" IS NOT NULL
                THEN (hash("group") >> 1)::BIGINT ELSE -1 END AS of,
            ({waiting})::FLOAT AS waiting, CASE WHEN {computes} THEN duration_ns ELSE 0 END::FLOAT AS computing
        FROM spans s JOIN replay_steps t ON s.step = t.step JOIN replay_ranks r ON s.rank = r.rank
        WHERE {_OF_SPANS}"""
    )


def _names(connection: DuckDBPyConnection, *, by_order: bool) -> list[_Name]:
    rows = connection.execute(
        """SELECT name, kind, max(n), bool_and(told = n AND low >= 0), max(high) FROM
            (SELECT name, kind, count(*) AS n, count(sequence) AS told, min(sequence) AS low, max(sequence) AS high
            FROM replay_rows GROUP BY rank, step, name, kind) GROUP BY name, kind ORDER BY name, kind"""
    ).fetchall()
    names = []
    for name, kind, count, told, high in rows:  # else numbers go on over steps, or begin anew in each group
        numbered = bool(not by_order and told and high + 1 <= 2 * count + 4)
        names.append(_Name(name, kind, int(high) + 1 if numbered else int(count), numbered))
    return names


def _filled(
    connection: DuckDBPyConnection, places: Places, names: list[_Name], all_steps: int, align: Align | None
) -> tuple[Cells, int]:
    """The cells, and how many operations there were to fill in."""
    most = [each.slots for each in names]
    connection.execute(
        "CREATE OR REPLACE TEMP TABLE replay_names AS "
        "SELECT unnest(?::VARCHAR[]) AS name, unnest(?::VARCHAR[]) AS kind, unnest(?::INTEGER[]) AS slot, "
        "unnest(?::BOOLEAN[]) AS numbered",
        [
            [each.name for each in names],
            [each.kind for each in names],
            (np.cumsum(most) - most).tolist(),
            [each.numbered for each in names],
        ],
    )
    steps = connection.execute("SELECT step, base FROM replay_steps ORDER BY place").fetchall()
    shape = (sum(most), len(places.ranks), len(steps))
    cells = Cells(
        *places,
        steps=np.array([step for step, _ in steps], dtype=np.int64),
        all_steps=all_steps,
        names=tuple((each.name, each.kind) for each in names),
        slot_name=np.repeat(np.arange(len(names)), most).astype(np.int64),
        start_ns=np.full(shape, np.nan),
        length_ns=np.full(shape, np.nan, dtype=np.float32),
        microbatch=np.full(shape, -1, dtype=np.int16),
        chunk=np.full(shape, -1, dtype=np.int16),
        group=np.full(shape[:2], -1, dtype=np.int64),
        waiting_share=0.0,
    )
    bases = np.array([base for _, base in steps], dtype=np.int64)
    count, waiting, computing = 0, 0.0, 0.0
    for rows in _rows(connection, numbered=all(each.numbered for each in names)):
        count += len(rows["slot"])
        waiting, computing = waiting + float(rows["waiting"].sum()), computing + float(rows["computing"].sum())
        _place(cells, rows, bases, align)
    return replace(cells, waiting_share=waiting / max(1.0, computing)), count


def _rows(connection: DuckDBPyConnection, *, numbered: bool) -> Iterator[dict[str, Any]]:
    """The operations with their slots, some at a time."""
    if not numbered:
        connection.execute(
            """CREATE OR REPLACE TEMP TABLE replay_rows AS SELECT * EXCLUDE (numbered) REPLACE (CASE WHEN numbered
                THEN sequence ELSE row_number() OVER (PARTITION BY rank, step, name, kind ORDER BY start_ns) - 1
                END AS sequence)
            FROM (SELECT replay_rows.*, numbered FROM replay_rows JOIN replay_names USING (name, kind))"""
        )
    (count,) = connection.execute("SELECT count(*) FROM replay_rows").fetchone() or (0,)
    for first in range(0, count, ROWS_AT_ONCE):
        rows = connection.execute(
            """SELECT rank, step, start_ns, length, (n.slot + sequence)::INTEGER AS slot, microbatch, chunk, of,
                waiting, computing
            FROM (SELECT * FROM replay_rows WHERE rowid >= ? AND rowid < ?) JOIN replay_names n USING (name, kind)""",
            [first, first + ROWS_AT_ONCE],
        ).fetchnumpy()
        yield {name: np.asarray(column) for name, column in rows.items()}


def _place(cells: Cells, rows: dict[str, Any], bases: Int, align: Align | None) -> None:
    rank, step, slot, start = (rows[key].astype(np.int64) for key in ("rank", "step", "slot", "start_ns"))
    if align is not None:
        start = align(cells.ranks[rank], start)
    row = slot * len(cells.ranks) + rank
    place = row * len(cells.steps) + step
    cells.start_ns.reshape(-1)[place] = start - bases[step]
    cells.length_ns.reshape(-1)[place] = rows["length"]
    cells.microbatch.reshape(-1)[place] = rows["microbatch"]
    cells.chunk.reshape(-1)[place] = rows["chunk"]
    told = rows["of"] >= 0
    cells.group.reshape(-1)[row[told]] = rows["of"][told]


# --------------------------------------------------------------------------------------------------
# What an operation does in a job, told from its name: computes, sends, receives, meets others, or none of these.

Direction = Literal["forward", "backward", ""]
Scope = Literal["itself", "tensor", "replicas", "ends", "all"]
Part = tuple[Literal["send", "receive"], Direction]

_DIRECTIONS: Final[dict[str, Direction]] = {
    "forward": "forward",
    "fwd": "forward",
    "backward": "backward",
    "bwd": "backward",
}
_VERBS: Final[dict[str, Literal["send", "receive"]]] = {
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
    family: str = ""  # what is reported together: both ends of a transfer

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
            return Role("local", family=name)
        return Role("compute", direction="forward" if kind == "forward" else "backward", family=name)
    plain = "-".join(words)
    if kind != "communication" and plain not in _CLIPS:
        return Role("local", family=name)
    parts = _parts(words)
    if parts:
        directions = {direction for _, direction in parts}
        return Role("transfer", parts=parts, family=f"{directions.pop()} transfer" if len(directions) == 1 else name)
    return _collective(name, plain, set(words))


def _parts(words: list[str]) -> tuple[Part, ...]:
    """Of "forward-send-backward-recv" (timers) or "send_forward_recv_backward" (functions)."""
    told = [word for word in words if word in _VERBS or word in _DIRECTIONS]
    verbs = [word for word in told if word in _VERBS]
    if len(verbs) == len(told):
        return tuple((_VERBS[word], "") for word in verbs)
    if len(told) != 2 * len(verbs):
        return ()
    pairs = [(told[i], told[i + 1]) for i in range(0, len(told), 2)]
    if all(first in _VERBS and second in _DIRECTIONS for first, second in pairs):
        return tuple((_VERBS[first], _DIRECTIONS[second]) for first, second in pairs)
    if all(first in _DIRECTIONS and second in _VERBS for first, second in pairs):
        return tuple((_VERBS[second], _DIRECTIONS[first]) for first, second in pairs)
    return ()


def _collective(name: str, plain: str, words: set[str]) -> Role:
    if plain in _CLIPS or ("norm" in words and "layer" not in words):
        return Role("collective", scope="all", family=name)
    if "embedding" in words or "embeddings" in words:
        return Role("collective", scope="ends", family=name)
    if "layernorm" in words or "tp" in words or "tensor" in words:
        return Role("collective", scope="tensor", family=name)
    gradients = bool(words & {"grad", "grads", "gradient", "gradients"})
    scatters = "reduce-scatter" in plain or "reducescatter" in words
    return Role(
        "collective",
        scope="replicas",
        gathers="all-gather" in plain or "allgather" in words,
        reduces="separate" not in words and (scatters or gradients),
        family=name,
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

    def begins_after(self, one: int, other: int) -> float:
        """Typical time from the start of another operation to this one's start, in ns."""
        return float(median(self.starts[:, one] - self.starts[:, other]))

    def ends_after(self, one: int, other: int) -> float:
        """Typical time from the end of another operation to this one's end, in ns."""
        return float(median(self.ends[:, one] - self.ends[:, other]))

    def begins_after_end(self, one: int, other: int) -> float:
        """Typical time from the end of another operation to this one's start, in ns."""
        return float(median(self.starts[:, one] - self.ends[:, other]))


def classes_of_steps(cells: Cells, roles: list[Role]) -> list[Int]:
    """Indices of steps with as many forwards and backwards on each stage as one another, the largest class first."""
    computes = [np.flatnonzero(cells.slot_name == name) for name, role in enumerate(roles) if role.what == "compute"]
    columns = []
    for members in cells.grid:
        known = members[members >= 0]
        columns += [(~np.isnan(cells.length_ns[slots][:, known])).sum(axis=0).max(axis=0) for slots in computes]
    if not columns:
        return [np.arange(len(cells.steps))]
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
    before = np.array([_places(row, row[regular]) for row in starts])
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


def _chosen(there: npt.NDArray[np.bool_]) -> Int:
    """Cells that have most, evenly spread, and some for each operation that only others have."""
    counts = there.sum(axis=0)
    full = np.flatnonzero(counts == counts.max())
    chosen = full[np.unique(np.linspace(0, len(full) - 1, min(CELLS_READ, len(full))).round().astype(int))]
    for slot in np.flatnonzero(~there[:, chosen].any(axis=1)):
        chosen = np.concatenate([chosen, np.flatnonzero(there[slot])[:CELLS_OF_RARE]])
    return np.unique(chosen).astype(np.int64)


def _places(starts: Float, regular: Float) -> Float:
    """How many of the regular operations begin before each; nan where there is none."""
    found = np.searchsorted(np.sort(regular[~np.isnan(regular)]), starts).astype(np.float64)
    found[np.isnan(starts)] = np.nan
    return found


def _usual(values: npt.NDArray[np.int16]) -> int:
    found, counts = np.unique(values, return_counts=True)
    return int(found[counts.argmax()])


# --------------------------------------------------------------------------------------------------
# Which send belongs to which receive, and both to which forward or backward.
#
# Activations of a microbatch go from each part of the model to the next one, gradients the other way. With several
# parts
# (chunks) per stage the last stage's part is followed by the first stage's next one.

Verb = Literal["send", "receive"]
SLACK_NS: Final = 50_000.0  # two starts that belong together are recorded this far apart


class End(NamedTuple):
    """One end of a transfer: the forward or backward that makes or needs what is moved, and the span of the move."""

    compute: int
    transfer: int | None  # None: not recorded


class Crossing(NamedTuple):
    """A transfer between two stages."""

    sender: End
    receiver: End


@dataclass(slots=True)
class Transfers:
    """Numbers are of operations over all stages: the first stage's from 0 in their order, then the second's ..."""

    crossings: list[Crossing] = field(default_factory=list)
    sends: list[End] = field(default_factory=list)  # all that follow a compute, also those that move nothing
    receives: list[End] = field(default_factory=list)  # all that precede a compute, also those that move nothing
    chunks: int = 1  # parts of the model per stage
    chunk_of: dict[int, int] = field(default_factory=dict)  # compute -> its part, from 0


class _Compute(NamedTuple):
    number: int  # of the operation
    microbatch: int
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
    ends: dict[tuple[int, Verb, Direction], list[tuple[_Compute, End]]] = {}
    for stage, order in enumerate(orders):
        found.chunk_of.update({first[stage] + index: chunk for index, chunk in chunks[stage].items()})
        directions: tuple[Direction, ...] = ("forward", "backward")
        for direction in directions:
            computes = [
                _Compute(first[stage] + index, order.operations[index].microbatch, chunk * stages + stage)
                for index, chunk in chunks[stage].items()
                if order.operations[index].role.direction == direction
            ]
            verbs: tuple[Verb, ...] = ("send", "receive")
            for verb in verbs:
                needing = [each for each in computes if 0 <= _other_part(each.part, verb, direction) < parts]
                matched = _match(order, first[stage], verb, direction, computes, needing)
                if matched and not needing and not _parts_told(order):
                    raise NotReplayable("whether a stage has several parts of the model is not told")
                (found.sends if verb == "send" else found.receives).extend(
                    End(compute, transfer) for compute, transfer in matched.items()
                )
                ends[stage, verb, direction] = [(each, End(each.number, matched.get(each.number))) for each in needing]
    found.crossings = _pair(ends, stages)
    return found


def _other_part(part: int, verb: Verb, direction: Direction) -> int:
    return part + (1 if (verb == "send") == (direction == "forward") else -1)


def _chunks(order: StageOrder) -> dict[int, int]:
    """Part within the stage of each forward and backward, in their order: told, or by repeats of a microbatch."""
    computes = [index for index, each in enumerate(order.operations) if each.role.what == "compute"]
    told = {index: order.operations[index].chunk for index in computes}
    if all(chunk >= 0 for chunk in told.values()):
        return told
    seen: dict[tuple[str, int], int] = {}
    repeats = {}
    for index in computes:
        each = order.operations[index]
        key = (each.role.direction, each.microbatch)
        repeats[index] = seen.get(key, 0) if each.microbatch >= 0 else 0
        seen[key] = repeats[index] + 1
    last = max(repeats.values(), default=0)
    forward = {index: order.operations[index].role.direction == "forward" for index in computes}
    return {index: repeat if forward[index] else last - repeat for index, repeat in repeats.items()}


def _parts_told(order: StageOrder) -> bool:
    computes = [each for each in order.operations if each.role.what == "compute"]
    return all(each.chunk >= 0 or each.microbatch >= 0 for each in computes)


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
        kept = [index for index in wanted if order.begins_after(index, last) <= SLACK_NS]
    else:
        earliest = computes[0].number - first
        kept = [index for index in wanted if order.ends_after(index, earliest) >= -SLACK_NS]
    if not kept:
        return {}
    by_identity = _by_microbatch(order, kept, first, computes)
    if by_identity:
        return by_identity
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


def _by_microbatch(order: StageOrder, kept: list[int], first: int, computes: list[_Compute]) -> dict[int, int]:
    """By microbatch and chunk where the transfers tell them and each is there once; else empty."""
    own = {
        (order.operations[each.number - first].microbatch, order.operations[each.number - first].chunk): each.number
        for each in computes
    }
    told = {(order.operations[index].microbatch, order.operations[index].chunk): first + index for index in kept}
    if len(own) < len(computes) or len(told) < len(kept) or any(key[0] < 0 or key not in own for key in told):
        return {}
    return {own[key]: transfer for key, transfer in told.items()}


def _transfer_parts(order: StageOrder, index: int) -> tuple[tuple[str, str], ...]:
    """What a transfer sends and receives; where no direction is told, that of the compute before or after it."""
    parts = []
    for verb, direction in order.operations[index].role.parts:
        near = direction
        if not near:
            after = range(index + 1, len(order.operations))
            for other in range(index - 1, -1, -1) if verb == "send" else after:
                if order.operations[other].role.what == "compute":
                    near = order.operations[other].role.direction
                    break
        parts.append((verb, near))
    return tuple(parts)


def _pair(ends: dict[tuple[int, Verb, Direction], list[tuple[_Compute, End]]], stages: int) -> list[Crossing]:
    senders = {key: value for key, value in ends.items() if key[1] == "send"}
    by_what: dict[tuple[str, int, int], End] = {}
    receivers: dict[tuple[str, int, int], End] = {}
    count = 0
    for (_, verb, direction), each in ends.items():
        for compute, end in each:
            count += 1
            if verb == "send":
                by_what[direction, compute.microbatch, compute.part] = end
            else:
                receivers[direction, compute.microbatch, _other_part(compute.part, verb, direction)] = end
    told = all(microbatch >= 0 for _, microbatch, _ in by_what) and len(by_what) + len(receivers) == count
    if told and by_what.keys() == receivers.keys():
        return [Crossing(end, receivers[key]) for key, end in by_what.items()]
    crossings = []
    for (stage, _, direction), sent in senders.items():
        peer = (stage + (1 if direction == "forward" else -1)) % stages
        received = ends[peer, "receive", direction]
        if len(sent) != len(received):
            raise NotReplayable(
                f"stage {stage} sends {len(sent)} times {direction} a step and stage {peer} receives {len(received)} "
                "times: which belongs to which is not known"
            )
        crossings += [Crossing(one[1], other[1]) for one, other in zip(sent, received, strict=True)]
    return crossings


# --------------------------------------------------------------------------------------------------
# What waits for what in a step: the operations of all stages with their dependencies, sorted so that none comes early.
#
# The model of "Understanding Stragglers in Large Model Training Using What-if Analysis" (OSDI 2025), section 3: on each
# rank one stream of computing, one of sends and one of receives for each direction, one of collectives over replicas;
# what is received comes before what computes with it, what computes before what is sent; and those who take part in a
# transfer or a collective begin it together, when the last of them is there. Here orders are read from the table.


@dataclass(frozen=True, slots=True, eq=False)
class Meeting:
    """Operations that begin together: those of equal labels, over operations and pipelines."""

    members: tuple[int, ...]  # operations
    labels: Int  # (operations, P)
    how: str  # "alone", "operations": of each pipeline by itself, "all", "some"

    def last(self, starts: Float) -> Float:
        """When the last one is there; starts (operations, P, ...), the answer of a shape that spreads to it."""
        if self.how == "alone":
            return starts
        if self.how == "operations":
            return np.asarray(starts.max(axis=0, keepdims=True))
        if self.how == "all":
            return np.asarray(starts.max(axis=(0, 1), keepdims=True))
        flat = starts.reshape(self.labels.size, -1)
        order = np.argsort(self.labels.reshape(-1), kind="stable")
        ordered = self.labels.reshape(-1)[order]
        begins = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
        highest = np.maximum.reduceat(flat[order], begins, axis=0)
        place = np.empty(len(order), dtype=np.int64)
        place[order] = np.cumsum(np.concatenate([[False], ordered[1:] != ordered[:-1]]))
        return np.asarray(highest[place].reshape(starts.shape))


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """N operations over all stages; each meeting comes after all that its operations wait for."""

    operations: tuple[Operation, ...]  # (N,)
    waits_for: tuple[tuple[int, ...], ...]  # (N,)
    meetings: tuple[Meeting, ...]  # sorted
    ends: tuple[int, ...]  # operations that nothing waits for
    chunks: int = 1

    @property
    def stages(self) -> Int:
        """Index of each operation's stage."""
        return np.array([each.stage for each in self.operations], dtype=np.int64)


def build_graph(orders: list[StageOrder], coordinates: Int, groups: Callable[[Operation], Int | None]) -> Graph:
    """The dependencies of one step.

    `groups` gives for a collective the label of the group that each pipeline's rank is in, or None where the table has
    no groups: then the names tell.

    Raises:
        NotReplayable: transfers do not fit the computes, or what waits for what is a circle.
    """
    first = [0, *np.cumsum([len(order.operations) for order in orders]).tolist()]
    operations = [each for order in orders for each in order.operations]
    if not operations:
        raise NotReplayable("no operation of a step is in all of its ranks")
    transfers = match_transfers(orders, first)
    waits: list[set[int]] = [set() for _ in operations]
    for stage, order in enumerate(orders):
        _within_rank(order, first[stage], transfers, waits)
    joined: dict[int, int] = {}
    for crossing in transfers.crossings:
        source, target = crossing.sender.transfer, crossing.receiver.transfer
        if source is not None and target is not None:
            joined[_root(joined, source)] = _root(joined, target)
        else:  # what is not recorded takes no time
            waits[crossing.receiver.compute if target is None else target].add(
                crossing.sender.compute if source is None else source
            )
    meetings = _meetings(operations, joined, coordinates, groups)
    needed = {other for each in waits for other in each}
    return Graph(
        tuple(operations),
        tuple(tuple(sorted(each)) for each in waits),
        tuple(_sorted(meetings, waits, operations)),
        tuple(number for number in range(len(operations)) if number not in needed),
        transfers.chunks,
    )


def _within_rank(order: StageOrder, first: int, transfers: Transfers, waits: list[set[int]]) -> None:
    operations = order.operations
    computes = [index for index, each in enumerate(operations) if each.role.what == "compute"]
    beside = _beside_compute(order, computes)
    line = [
        first + index for index, each in enumerate(operations) if each.role.what != "transfer" and index not in beside
    ]
    _chain(line, waits)
    streams: dict[tuple[str, str], list[int]] = {}
    for index, each in enumerate(operations):
        for part in each.role.parts:
            streams.setdefault(part, []).append(first + index)
    for stream in streams.values():
        _chain(stream, waits)
    here = range(first, first + len(operations))
    for compute, transfer in transfers.sends:
        if transfer is not None and compute in here:
            waits[transfer].add(compute)
    before: dict[int, int] = {}  # the compute before it in its direction: a receive is posted when this is done
    for direction in ("forward", "backward"):
        same = [first + index for index in computes if operations[index].role.direction == direction]
        before.update(zip(same[1:], same[:-1], strict=True))
    backward = [place for place, index in enumerate(computes) if operations[index].role.direction == "backward"]
    for compute, transfer in transfers.receives:
        if transfer is not None and compute in here:
            waits[compute].add(transfer)
            if compute in before:
                waits[transfer].add(before[compute])
            elif backward and compute == first + computes[backward[0]] and backward[0] >= 2:
                waits[transfer].add(first + computes[backward[0] - 2])  # with the warm-up's last send but one
    if beside:
        _collectives_beside(order, first, sorted(beside), computes, transfers, waits)


def _chain(numbers: list[int], waits: list[set[int]]) -> None:
    for one, other in pairwise(numbers):
        waits[other].add(one)


def _beside_compute(order: StageOrder, computes: list[int]) -> set[int]:
    """Collectives over replicas that run while the rank computes: gathers before their use, reduces of what is done."""
    if not computes:
        return set()
    last = max(computes, key=lambda index: order.ends_after(index, computes[0]))
    return {
        index
        for index, each in enumerate(order.operations)
        if (each.role.gathers or each.role.reduces) and order.begins_after_end(index, last) < -SLACK_NS
    }


def _collectives_beside(
    order: StageOrder, first: int, beside: list[int], computes: list[int], transfers: Transfers, waits: list[set[int]]
) -> None:
    """Gathers come before the first forward of their part of the model, reduces after its last backward."""
    operations = order.operations
    _chain([first + index for index in beside], waits)

    def of_part(index: int, direction: str) -> list[int]:
        part = operations[index].chunk if transfers.chunks > 1 else 0
        return [
            each
            for each in computes
            if operations[each].role.direction == direction
            and (part < 0 or transfers.chunk_of.get(first + each, 0) == part)
        ]

    used: dict[int, int] = {}
    for index in beside:
        if operations[index].role.gathers:
            users = of_part(index, "forward")
            if operations[index].chunk < 0 and transfers.chunks > 1:  # by time, where the part is not told
                users = [each for each in users if order.begins_after_end(each, index) >= -SLACK_NS]
            if users:
                used[users[0]] = index  # the last gather of a part has all of it
    for user, index in used.items():
        waits[first + user].add(first + index)
    known: set[int] = set()
    for index in beside:
        if operations[index].role.reduces:
            makers = of_part(index, "backward")
            if operations[index].chunk < 0 and transfers.chunks > 1:
                makers = [each for each in makers if order.ends_after(index, each) >= -SLACK_NS]
            if makers and makers[-1] not in known:
                known.add(makers[-1])
                waits[first + index].add(first + makers[-1])
    rest = [
        index
        for index, each in enumerate(operations)
        if index > computes[-1] and each.role.what != "transfer" and index not in beside
    ]
    reduces = [index for index in beside if operations[index].role.reduces]
    if rest and reduces:
        waits[first + rest[0]].add(first + reduces[-1])


def _root(joined: dict[int, int], number: int) -> int:
    while number in joined and joined[number] != number:
        number = joined[number]
    return number


def _meetings(
    operations: list[Operation], joined: dict[int, int], coordinates: Int, groups: Callable[[Operation], Int | None]
) -> list[Meeting]:
    pipelines = len(coordinates)
    each_alone = np.arange(pipelines)
    together: dict[object, list[int]] = {}
    labels: dict[int, Int] = {}
    told_of: dict[int, list[list[int]]] = {}
    last_stage = max(each.stage for each in operations)
    for number, operation in enumerate(operations):
        role, key = operation.role, object()
        labels[number] = each_alone
        if role.what == "transfer":
            key = ("transfer", _root(joined, number))
        elif role.what == "collective":
            told = groups(operation)
            if told is not None:
                labels[number] = told
                key = ("told", _with_shared(told_of.setdefault(operation.slot, []), number, labels))
            elif role.scope == "all" or (role.scope == "ends" and operation.stage in (0, last_stage)):
                key = (role.scope, operation.slot)
                labels[number] = np.zeros_like(each_alone) if role.scope == "all" else each_alone
            elif role.scope in ("tensor", "replicas"):
                labels[number] = _neighbours(coordinates, across_tensors=role.scope == "tensor")
        together.setdefault(key, []).append(number)
    return [_meeting(members, np.stack([labels[number] for number in members])) for members in together.values()]


def _with_shared(lists: list[list[int]], number: int, labels: dict[int, Int]) -> int:
    """The first of those operations that share a group with this one; stages whose groups are apart stay apart."""
    for members in lists:
        if any(np.isin(labels[number], labels[other]).any() for other in members):
            members.append(number)
            return members[0]
    lists.append([number])
    return number


def _neighbours(coordinates: Int, *, across_tensors: bool) -> Int:
    """Label of each pipeline: those that differ only in the tensors' share, or only in the rest, have the same."""
    tensors = COORDINATES.index("tp")
    kept = np.delete(coordinates, tensors, axis=1) if across_tensors else coordinates[:, tensors : tensors + 1]
    if across_tensors and (coordinates[:, tensors] < 0).any():
        return np.arange(len(coordinates))
    return np.unique(kept, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)


def _meeting(members: list[int], labels: Int) -> Meeting:
    counts = np.unique(labels, return_counts=True)[1]
    if (counts == 1).all():
        how = "alone"
    elif len(counts) == 1:
        how = "all"
    elif (labels == labels[0]).all() and len(counts) == labels.shape[1]:
        how = "operations"
    else:
        how = "some"
    return Meeting(tuple(members), labels, how)


def _sorted(meetings: list[Meeting], waits: list[set[int]], operations: list[Operation]) -> list[Meeting]:
    of_operation = {number: index for index, each in enumerate(meetings) for number in each.members}
    before = [{of_operation[other] for number in each.members for other in waits[number]} for each in meetings]
    after: list[list[int]] = [[] for _ in meetings]
    for index, each in enumerate(before):
        for other in each:
            after[other].append(index)
    open_before = [len(each) for each in before]
    ready = [index for index, count in enumerate(open_before) if count == 0]
    done = []
    while ready:
        index = ready.pop()
        done.append(meetings[index])
        for other in after[index]:
            open_before[other] -= 1
            if open_before[other] == 0:
                ready.append(other)
    if len(done) < len(meetings):
        stuck = next(index for index, count in enumerate(open_before) if count > 0)
        stages = sorted({operations[number].stage for number in meetings[stuck].members})
        raise NotReplayable(f"what waits for what is a circle, among operations of stage {stages[0]}")
    return done


# --------------------------------------------------------------------------------------------------
# When each operation of a graph would end, given how long each takes: many steps and pipelines at once.

NUMBERS_AT_ONCE: Final = 2_000_000  # 16 MB
Length = Float | npt.NDArray[np.float32] | float  # of one operation: (P, B), or the same for all
Lengths = Callable[[int, int], Sequence[Length]]  # (first, end) of a batch -> of each operation


def ends_of(
    graph: Graph,
    lengths: Sequence[Length],
    shape: tuple[int, int],
    *,
    gaps: Float | None = None,
    pairs: bool = False,
) -> Float:
    """End of each operation, from the begin of the step at 0; (N, P, B), where `shape` is (P, B).

    `gaps`: how long an operation begins after all that it waits for. With `pairs` there are two pipelines: one to look
    at, and one that stands for all others.
    """
    ends = np.empty((len(lengths), *shape))
    starts = np.empty((max(len(each.members) for each in graph.meetings), *shape))
    for meeting in graph.meetings:
        first = meeting.members[0]
        if meeting.how == "alone" and len(graph.waits_for[first]) == 1 and gaps is None:  # most are so
            np.add(ends[graph.waits_for[first][0]], lengths[first], out=ends[first])
            continue
        own = starts[: len(meeting.members)]
        for place, number in enumerate(meeting.members):
            _start(own[place], ends, graph.waits_for[number])
            if gaps is not None:
                own[place] += gaps[number]
        begin = _begin(meeting, own, pairs=pairs)
        for place, number in enumerate(meeting.members):
            np.add(begin[place if len(begin) > 1 else 0], lengths[number], out=ends[number])
    return ends


def _start(start: Float, ends: Float, waits_for: tuple[int, ...]) -> None:
    if not waits_for:
        start[...] = 0.0
    elif len(waits_for) == 1:
        start[...] = ends[waits_for[0]]
    else:
        np.maximum(ends[waits_for[0]], ends[waits_for[1]], out=start)
        for other in waits_for[2:]:
            np.maximum(start, ends[other], out=start)


def _begin(meeting: Meeting, starts: Float, *, pairs: bool) -> Float:
    if not pairs:
        return meeting.last(starts)
    if meeting.how in ("all", "some") and meeting.labels.shape[1] > 1:
        return np.asarray(starts.max(axis=(0, 1), keepdims=True))
    return starts if meeting.how == "alone" else np.asarray(starts.max(axis=0, keepdims=True))


def step_times(graph: Graph, lengths: Lengths, pipelines: int, count: int, *, pairs: bool = False) -> Float:
    """Time of each of `count` steps, from its first start to its last end."""
    batch = max(1, NUMBERS_AT_ONCE // (len(graph.operations) * pipelines))
    found = np.empty(count)
    last = list(graph.ends)
    for first in range(0, count, batch):
        end = min(count, first + batch)
        ends = ends_of(graph, lengths(first, end), (pipelines, end - first), pairs=pairs)
        found[first:end] = ends[last].max(axis=(0, 1))
    return found


# --------------------------------------------------------------------------------------------------
# How long each operation takes by itself, without waiting for others, in every step and on every rank.

Bool = npt.NDArray[np.bool_]
Float32 = npt.NDArray[np.float32]
CLOCK_ERROR_NS: Final = 10e6  # a transfer that ends this long before the other end began was wrongly recorded: 0
MOST_WRONG: Final = 0.4  # of transfers and collectives recorded so, beyond which the clocks or the groups are wrong
MOST_LOST: Final = 0.2  # of the operations, beyond which a replay says little


@dataclass(frozen=True, slots=True, eq=False)
class StepClass:
    """Steps of one graph, with what each operation took. Axes: N operations, P pipelines, S steps."""

    graph: Graph
    steps: Int  # (S,) index
    own_ns: Float32  # (N, P, S) of a transfer or collective: from when the last one was there
    recorded_ns: Float  # (S,) from first start to last end
    unknown: Bool | None  # (N, P, S) not in the table, or its other end is not; None: all is known
    lost: int  # operations that are not in the table, though others of the pipeline are
    absent: Bool | None  # (N, P, S) the pipeline had no such operation in the step: takes no time; None: all had

    def times(self, typical_ns: Float, as_recorded: Bool) -> Float:
        """Time of each step (S,) where the chosen operations (N, P) take what they took, the others what is typical."""

        def lengths(first: int, end: int) -> list[Length]:
            part = slice(first, end)
            return [self._length(number, part, typical_ns, as_recorded[number]) for number in range(len(typical_ns))]

        return step_times(self.graph, lengths, self.own_ns.shape[1], len(self.steps))

    def _length(self, number: int, part: slice, typical_ns: Float, as_recorded: Bool) -> Length:
        if as_recorded.all():
            return self.own_ns[number, :, part]
        found: Length = typical_ns[number]
        if as_recorded.any():
            found = np.where(as_recorded[:, None], self.own_ns[number, :, part], typical_ns[number])
        if self.absent is not None and self.absent[number, :, part].any():
            found = np.where(self.absent[number, :, part], 0.0, found)
        return found

    def times_with_one(self, typical_ns: Float, operations: Bool) -> Float:
        """As `times`, where one pipeline's chosen operations (N,) take what they took: (P, S), for each pipeline.

        All other pipelines are alike then, so one stands for them, and all P answers come at once.
        """
        pipelines, steps = self.own_ns.shape[1:]
        own = self.own_ns.reshape(len(typical_ns), -1)
        none = None if self.absent is None else self.absent.reshape(len(typical_ns), -1)

        def lengths(first: int, end: int) -> list[Length]:
            found: list[Length] = []
            for number, typical in enumerate(typical_ns.tolist()):
                gone = none is not None and none[number, first:end].any()
                if not operations[number] and not gone:
                    found.append(typical)
                    continue
                both = np.full((2, end - first), typical)
                if operations[number]:
                    both[0] = own[number, first:end]
                if none is not None:
                    both[0][none[number, first:end]] = 0.0
                found.append(both)
            return found

        count = pipelines * steps
        return step_times(self.graph, lengths, 2, count, pairs=True).reshape(pipelines, steps)


def own_lengths(cells: Cells, graph: Graph, steps: Int) -> StepClass:
    """What each operation took in the steps given; nan in `own_ns` where it is not in the table.

    Raises:
        NotReplayable: operations that belong together did not run together.
    """
    shape = (len(graph.operations), cells.grid.shape[1], len(steps))
    own = np.full(shape, np.nan, dtype=np.float32)
    wrong = moves = 0
    first, last = np.full(len(steps), np.inf), np.full(len(steps), -np.inf)
    for meeting in graph.meetings:
        found = [_recorded(cells, graph, number, steps) for number in meeting.members]
        for starts, lengths in found:
            first = np.fmin(first, np.fmin.reduce(starts, axis=0))
            last = np.fmax(last, np.fmax.reduce(starts + lengths, axis=0))
        if meeting.how == "alone" or not graph.operations[meeting.members[0]].role.meets:
            for number, (_, lengths) in zip(meeting.members, found, strict=True):
                own[number] = lengths
            continue
        begun = meeting.last(np.stack([np.where(np.isnan(starts), -np.inf, starts) for starts, _ in found]))
        for place, (number, (starts, lengths)) in enumerate(zip(meeting.members, found, strict=True)):
            alone = starts + lengths - begun[place if len(begun) > 1 else 0]
            before = alone <= -CLOCK_ERROR_NS
            alone[before] = 0.0
            wrong, moves = wrong + int(before.sum()), moves + before.size
            own[number] = alone
    if wrong > MOST_WRONG * moves:
        raise NotReplayable(
            f"{wrong / moves:.0%} of transfers and collectives end before others begin them: "
            "clocks differ, or their groups are others"
        )
    there = ~np.isnan(own)
    for meeting in graph.meetings:  # where the other end is lost, how long this one waited for it is not known
        if meeting.how == "operations" and graph.operations[meeting.members[0]].role.what == "transfer":
            own[list(meeting.members)] += np.where(there[list(meeting.members)].all(axis=0), 0, np.nan)
    if there.all():
        return StepClass(graph, steps, own, last - first, None, 0, None)
    absent = _absent(graph, there)
    return StepClass(graph, steps, own, last - first, np.isnan(own) & ~absent, int((~there & ~absent).sum()), absent)


def _recorded(cells: Cells, graph: Graph, number: int, steps: Int) -> tuple[Float, Float]:
    """Starts and durations of one operation, (P, S); nan where it is not in the table."""
    operation = graph.operations[number]
    ranks = cells.grid[operation.stage]
    starts = cells.start_ns[operation.slot][ranks][:, steps]
    lengths = cells.length_ns[operation.slot][ranks][:, steps].astype(np.float64)
    if (ranks < 0).any():
        starts[ranks < 0] = lengths[ranks < 0] = np.nan
    return starts, lengths


def _absent(graph: Graph, there: Bool) -> Bool:
    """Operations that a pipeline did not have in a step, as far as can be told from those it had."""
    ordinary = there.mean(axis=(1, 2)) >= 0.5
    absent = ~there & ~ordinary[:, None, None]  # pauses come and go
    slots: dict[int, list[int]] = {}
    for number, operation in enumerate(graph.operations):
        slots.setdefault(operation.slot, []).append(number)
    for alike in slots.values():
        absent[alike] |= ~there[alike].any(axis=0)  # no stage of the pipeline has it
    return np.asarray(absent)


def typical_lengths(classes: Sequence[StepClass]) -> dict[int, float]:
    """The typical time of each name: the mean of what computes, the median of what moves data, over all there is."""
    found: dict[int, list[Float32]] = {}
    meets = {}
    for each in classes:
        for number, operation in enumerate(each.graph.operations):
            values = each.own_ns[number]
            found.setdefault(operation.name, []).append(values[~np.isnan(values)])
            meets[operation.name] = operation.role.meets
    typical = {}
    for name, parts in found.items():
        values = np.concatenate(parts).astype(np.float64)
        if len(values):
            typical[name] = float(np.median(values) if meets[name] else values.mean())
    return typical


def fill_unknown(each: StepClass, typical_ns: Float) -> None:
    """Give operations of which nothing is known their typical time.

    Raises:
        NotReplayable: so many that the replay would be made up.
    """
    if each.lost > MOST_LOST * each.own_ns.size:
        raise NotReplayable(f"{each.lost / each.own_ns.size:.0%} of the operations of a step are not in the table")
    if each.unknown is not None:
        np.copyto(each.own_ns, typical_ns[:, None, None].astype(np.float32), where=each.unknown)
    np.copyto(each.own_ns, np.float32(0), where=np.isnan(each.own_ns))


# --------------------------------------------------------------------------------------------------
# The what-if questions: the job's time with some operations as they were and the others typical.

SLOWEST: Final = 0.03  # of the workers, in M_W
NUMBERS_FOR_RANKS: Final = 40e6  # replayed to answer "without this rank": each takes a replay of its own


@dataclass(frozen=True, slots=True, eq=False)
class Scenarios:
    """Times in ns, summed over all steps."""

    cells: Cells
    classes: tuple[StepClass, ...]
    typical: dict[int, float]  # by name

    def total(self, as_recorded: Callable[[StepClass], Bool]) -> float:
        """The job's time with the chosen operations (N, P) as recorded and the others typical."""
        return sum(
            float(each.times(self.typical_of(each), np.broadcast_to(as_recorded(each), each.own_ns.shape[:2])).sum())
            for each in self.classes
        )

    def recorded(self) -> float:
        """The job's time where all is as recorded."""
        return self.total(lambda each: np.array([[True]]))

    def ideal(self) -> float:
        """The job's time where all is typical."""
        return self.total(lambda each: np.array([[False]]))

    def of_stage(self, stage: int, *, kept: bool) -> float:
        """With only one stage as recorded, or with all but one."""
        return self.total(lambda each: ((each.graph.stages == stage) == kept)[:, None])

    def of_family(self, family: str, *, kept: bool) -> float:
        """With only one kind of operation as recorded, or with all but one."""
        return self.total(lambda each: (families(each) == family)[:, None] == kept)

    def without(self, ranks: Int) -> float:
        """With all but these ranks (indices) as recorded."""
        gone = np.isin(self.cells.grid, ranks)  # (G, P)
        return self.total(lambda each: ~gone[each.graph.stages])

    def with_one_pipeline(self, stage: int | None = None) -> Float:
        """With only one pipeline as recorded, or only its rank in one stage; for each pipeline (P,)."""
        pipelines = self.cells.grid.shape[1]
        if pipelines == 1:
            whole = self.recorded() if stage is None else self.of_stage(stage, kept=True)
            return np.array([whole])
        found = np.zeros(pipelines)
        for each in self.classes:
            chosen = np.ones(len(each.graph.operations), bool) if stage is None else each.graph.stages == stage
            found += each.times_with_one(self.typical_of(each), chosen).sum(axis=1)
        return found

    def typical_of(self, each: StepClass) -> Float:
        """Typical time of each operation (N,)."""
        return np.array([self.typical.get(operation.name, 0.0) for operation in each.graph.operations])


def families(each: StepClass) -> npt.NDArray[np.str_]:
    """What each operation is reported under (N,)."""
    return np.array([operation.role.family for operation in each.graph.operations])


def slowest_ranks(cells: Cells, of_pipeline: Float, of_stage: Float) -> Int:
    """Indices of the slowest 3 % of ranks, at least one: a rank is as slow as the lesser of its pipeline and stage."""
    score = np.minimum(of_pipeline[None, :], of_stage[:, None])
    known = cells.grid >= 0
    index, score = cells.grid[known], score[known]
    order = np.lexsort((cells.ranks[index], -score))
    return np.asarray(index[order[: -(-len(index) * round(100 * SLOWEST) // 100)]])


def shares_of_ranks(scenarios: Scenarios, slowdown: Float, total: float, lost: float) -> tuple[Float, int]:
    """Share of the lost time that goes away with one rank typical (R,), for the slowest; nan for the rest; how many."""
    cost = sum(each.own_ns.size for each in scenarios.classes)
    shares = np.full(len(slowdown), np.nan)
    asked = np.argsort(-slowdown, kind="stable")[: max(1, int(NUMBERS_FOR_RANKS // cost))]
    for index in asked:
        shares[index] = (total - scenarios.without(np.array([index]))) / lost
    return shares, len(asked)


MOST_ROWS: Final = 2_000_000  # operations replayed; beyond it steps are left out evenly
MOST_ROWS_OF_ONE_STAGE: Final = 400_000
MOST_CLASSES: Final = 24  # of steps with different numbers of microbatches
LEAST_LOST: Final = 1e-6  # of T, below which there is nothing to share out
MOST_WAITING: Final = 0.05  # of forwards and backwards
LONGEST: Final = 1.2  # times the recorded time: what takes longer when replayed runs by other dependencies
GAPS: Final = 0.1  # of the recorded time, from which on they are told


def what_if(
    connection: DuckDBPyConnection, *, align: Align | None = None, most_rows: int = MOST_ROWS
) -> Replay | Missing:
    """The replay of the job in the tables `spans` and `ranks`, or why there is none.

    `align` gives times by a common clock; without it the ranks' clocks are taken as they are.
    """
    try:
        cells = read_cells(
            connection,
            most_rows=most_rows,
            most_rows_of_one_stage=min(most_rows, MOST_ROWS_OF_ONE_STAGE),
            align=align,
        )
        roles = [role_of(name, kind) for name, kind in cells.names]
        _check(cells, roles)
        classes = classes_of_steps(cells, roles)
        replayed = [_class(cells, roles, steps) for steps in classes[:MOST_CLASSES]]
        typical = typical_lengths(replayed)
        scenarios = Scenarios(cells, tuple(replayed), typical)
        for each in replayed:
            fill_unknown(each, scenarios.typical_of(each))
        notes = _notes(cells, classes, replayed)
        notes += _gaps(scenarios.recorded(), sum(float(each.recorded_ns.sum()) for each in replayed))
        return _answers(scenarios, notes)
    except NotReplayable as reason:
        return Missing(what="replay", reason=str(reason))


def _check(cells: Cells, roles: list[Role]) -> None:
    if cells.waiting_share > MOST_WAITING:
        raise NotReplayable(
            f"{cells.waiting_share:.0%} of forwards and backwards is communication within them, which has no place"
        )
    if cells.grid.size == 1:
        raise NotReplayable("one rank alone waits for no other")
    if not any(role.what == "compute" for role in roles):
        raise NotReplayable("no forward or backward is in the table")
    if len(cells.stages) > 1:
        whole = [cells.names[index] for index, role in enumerate(roles) if role.what == "compute"]
        if {kind for _, kind in whole} != {"forward", "backward"}:
            raise NotReplayable("a pipeline's forwards and backwards are not both in the table")
    elif not any(role.what == "collective" for role in roles):
        raise NotReplayable("no collective is in the table: what ranks wait for is not known")


def _class(cells: Cells, roles: list[Role], steps: Int) -> StepClass:
    orders = [stage_order(cells, roles, stage, steps) for stage in range(len(cells.stages))]
    return own_lengths(cells, build_graph(orders, cells.coordinates, partial(_groups, cells, steps)), steps)


def _groups(cells: Cells, steps: Int, operation: Operation) -> Int | None:
    """The group of each pipeline's rank (P,) as the table tells; None where it does not, or where they cannot be so."""
    ranks = cells.grid[operation.stage]
    told = np.where(ranks >= 0, cells.group[operation.slot][ranks], -1).astype(np.int64)
    if (told < 0).all():
        return None
    for group in np.unique(told[told >= 0]):
        members = np.flatnonzero(cells.group[operation.slot] == group)
        starts = cells.start_ns[operation.slot][members][:, steps]
        ends = starts + cells.length_ns[operation.slot][members][:, steps]
        late = np.fmax.reduce(starts) - np.fmin.reduce(ends)  # of one collective nobody begins when others are done
        if len(members) > 1 and (late > CLOCK_ERROR_NS).mean() > 0.5:
            return None
    unknown = -2 - operation.stage * len(ranks) - np.arange(len(ranks))
    return np.where(told >= 0, told, unknown)


def _answers(scenarios: Scenarios, notes: list[str]) -> Replay:
    cells = scenarios.cells
    recorded = sum(float(each.recorded_ns.sum()) for each in scenarios.classes)
    total, ideal = scenarios.recorded(), scenarios.ideal()
    if not ideal > 0:
        raise NotReplayable("its operations take no time")
    lost = total - ideal if total - ideal > LEAST_LOST * total else float("nan")
    kinds = sorted({family for each in scenarios.classes for family in families(each).tolist()})
    stages = range(len(cells.stages))

    def shares(without: Callable[[int], float], count: int) -> np.ndarray:
        return np.array([(total - without(index)) / lost for index in range(count)])

    share_of_stage = shares(lambda stage: scenarios.of_stage(stage, kept=False), len(stages))
    slowdown_of_stage = np.array([scenarios.of_stage(stage, kept=True) for stage in stages]) / ideal
    slowest = slowest_ranks(cells, scenarios.with_one_pipeline() / ideal, slowdown_of_stage)
    slowdown_of_rank = np.full(len(cells.ranks), np.nan)
    for stage, members in zip(stages, cells.grid, strict=True):
        slowdown_of_rank[members[members >= 0]] = (scenarios.with_one_pipeline(stage) / ideal)[members >= 0]
    share_of_rank, asked = shares_of_ranks(scenarios, slowdown_of_rank, total, lost)
    if asked < len(cells.ranks):
        notes.append(f"shares of the lost time are of the {asked} slowest ranks of {len(cells.ranks)}")
    return Replay(
        recorded_ns=recorded,
        total_ns=total,
        ideal_ns=ideal,
        slowdown=total / ideal,
        ms=float(share_of_stage[-1]),
        mw=(total - scenarios.without(slowest)) / lost,
        slowest_ranks=tuple(cells.ranks[slowest].tolist()),
        ranks=cells.ranks,
        stages=cells.stages,
        kinds=tuple(kinds),
        share_of_rank=share_of_rank,
        share_of_stage=share_of_stage,
        share_of_kind=shares(lambda index: scenarios.of_family(kinds[index], kept=False), len(kinds)),
        slowdown_of_rank=slowdown_of_rank,
        slowdown_of_stage=slowdown_of_stage,
        slowdown_of_kind=np.array([scenarios.of_family(kind, kept=True) for kind in kinds]) / ideal,
        steps=sum(len(each.steps) for each in scenarios.classes),
        notes=tuple(notes),
    )


def _gaps(replayed: float, recorded: float) -> list[str]:
    """What lies between operations and is not replayed.

    Raises:
        NotReplayable: the replay takes much longer than the job did.
    """
    if replayed > LONGEST * recorded:
        raise NotReplayable(
            f"replayed, the job takes {replayed / recorded:.2f} times as long as recorded: it waits for something else"
        )
    if replayed < (1 - GAPS) * recorded:
        return [f"{1 - replayed / recorded:.0%} of the recorded time lies between operations and is not replayed"]
    return []


def _notes(cells: Cells, classes: list[Int], replayed: list[StepClass]) -> list[str]:
    notes = []
    lost = sum(each.lost for each in replayed)
    if len(cells.steps) < cells.all_steps:
        notes.append(f"{len(cells.steps)} of {cells.all_steps} steps were replayed, evenly spread")
    if len(replayed) < len(classes):
        left = sum(len(steps) for steps in classes[len(replayed) :])
        notes.append(f"{left} steps with rare numbers of microbatches were left out")
    if lost:
        notes.append(f"{lost} operations that are not in the table were taken as typical")
    if len(cells.stages) == 1:
        notes.append("with one stage, its share is all by definition")
    return notes
