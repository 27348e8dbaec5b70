"""A memory snapshot in numbers: what is held, by whom, what is lost to fragmentation, and how it came to this.

Times are microseconds since 1970. State k of a history is that after k entries.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from operator import attrgetter, itemgetter
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from profiler_wrapper.snapshot.read import SEGMENT_SIGNS, AllocatorEvent, Block, Frame, MemorySnapshot, Segment, Stack
from profiler_wrapper.trace.recording import Bool, Int64
from profiler_wrapper.units import mebibytes

Origin = Literal["forward", "backward", "optimizer", "other", "no stack"]

NO_LINE = "(no Python stack)"  # autograd's own threads and C++ have none
BEFORE_HISTORY = "(allocated before the history begins)"
# What kind of file a frame is in, by the first that fits; else it is the user's "own". A group is the short name.
_KINDS = {
    "torch": r"(?:|.*(?:site|dist)-packages/|.*/pytorch/)(torch/.*)",
    "compiled": r".*/torchinductor_[^/]*/.*()",
    "python": r".*/lib/python3\.\d+/(?!site-packages/|dist-packages/).*()|<eval_with_key.*",  # or made by torch.fx
    "profiler": r"(?:|.*/)(profiler_wrapper/(?:capture/.*|\w+\.py))",
    "installed": r".*/(?:site|dist)-packages/(.*)",
}
# Patterns of lines of a stack, `"kind file.py:12 function"`, those that say more first.
_MODULES = r"torch torch/nn/(?!modules/(module|container)\.py)"
_INSIDE = (
    rf"{_MODULES}modules/|torch torch/optim/",
    r"torch torch/(?!utils/_|_|fx/|nn/modules/(module|container)\.py)",
)
_LAYER = (r"(own|installed) .* forward$", rf"{_MODULES}.* forward$")
_ORIGINS: dict[Origin, str] = {
    "optimizer": r"torch torch/optim/",
    "forward": r".* forward$",
    "backward": r"torch torch/(autograd/|_tensor\.py).* \S*backward\S*$",
}


class Place(msgspec.Struct, frozen=True):
    """Where memory was asked for. Texts are `"file.py:12 function"`, "" where the stack has none."""

    line: str  # the innermost line outside of torch and Python itself; NO_LINE, BEFORE_HISTORY
    inside: str = ""  # what of torch that line was in: the nn module, the optimizer, compiled code
    layer: str = ""  # the innermost `forward`, the user's before torch's
    caller: str = ""  # the innermost line that is not of an installed package, where that is another one than `line`
    origin: Origin = "no stack"
    metadata: str = ""  # that it was stamped with


def place(stack: Stack) -> Place:
    """Return the lines that matter of a stack."""
    lines = [_line(frame) for frame in stack.frames if _is_python(frame)]
    if not lines:
        return Place(NO_LINE, metadata=stack.metadata)
    outside = next((at for at, line in enumerate(lines) if re.match("own |installed ", line)), 0)
    line, below = lines[outside].partition(" ")[2], lines[:outside]
    if source := next((frame.source for frame in stack.frames if frame.source), ""):
        file, _, rest = source.rpartition(":")
        line, below = f"{file_kind(file)[1]}:{rest}", lines
    compiled, caller = _first(below, "compiled "), _first(lines, "own ")
    # The innermost line that says so: a checkpointed forward within backward counts as forward.
    origins = (origin for text in lines for origin, pattern in _ORIGINS.items() if re.match(pattern, text))
    return Place(
        line=line,
        inside=f"compiled code, {compiled}" if compiled else _first(below, *_INSIDE),
        layer=_first(lines, *_LAYER),
        caller=caller if caller != line else "",
        origin=next(origins, "other"),
        metadata=stack.metadata,
    )


def _first(lines: Sequence[str], *patterns: str) -> str:
    """Return the first line that the first pattern fits, else the next pattern, ...; "" where none fits."""
    found = (line for pattern in patterns for line in lines if re.match(pattern, line))
    return next(found, "").partition(" ")[2]


def _is_python(frame: Frame) -> bool:
    """A file of C++ that `stacks="all"` adds is none; cells of a notebook are named `<ipython-input-...>`."""
    if frame.file.startswith("<"):
        return bool(frame.source) or not frame.file.startswith(("<frozen", "<__array", "<eval_with_key"))
    return frame.file.endswith((".py", ".ipynb", ".pyx"))


def _line(frame: Frame) -> str:
    """Return `"torch torch/nn/modules/linear.py:134 forward"`."""
    return f"{' '.join(file_kind(frame.file))}:{frame.line} {frame.name}".rstrip()


@lru_cache(10_000)
def file_kind(file: str) -> tuple[str, str]:
    """Return which of _KINDS a file is and its short name: `"/home/me/run/a.py"` -> `"own"`, `"run/a.py"`."""
    file = file.replace("\\", "/")
    short = "/".join(file.split("/")[-2:])
    found = ((kind, re.fullmatch(pattern, file)) for kind, pattern in _KINDS.items())
    return next(((kind, match[1] or short) for kind, match in found if match), ("own", short))


class Reserved(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Bytes of segments. `reserved` = `allocated` + `awaiting_free` + `free`."""

    reserved_bytes: int
    allocated_bytes: int  # given to tensors
    awaiting_free_bytes: int  # freed, but another stream may still use it
    free_bytes: int  # reserved and unused
    largest_free_bytes: int


class PoolMemory(Reserved, frozen=True, kw_only=True, eq=False):
    """Segments of one pool, stream and kind."""

    pool: tuple[int, int]
    stream: int
    kind: str
    expandable: bool
    segments: int


class MemoryOwner(msgspec.Struct, frozen=True):
    """What one line of code holds at one moment. `stack` is the whole one of its largest part."""

    place: Place
    size_bytes: int
    blocks: int
    largest_bytes: int
    stack: tuple[Frame, ...]


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """The allocator after `state` entries of its history. Owners add up to `allocated_bytes`, as asked for."""

    state: int
    time_us: int | None
    allocated_bytes: int
    reserved_bytes: int | None
    owners: tuple[MemoryOwner, ...]  # largest first

    @property
    def unallocated_bytes(self) -> int | None:
        """Reserved but not allocated then."""
        return None if self.reserved_bytes is None else max(0, self.reserved_bytes - self.allocated_bytes)


class FailedAllocation(msgspec.Struct, frozen=True, kw_only=True):
    """An allocation that could not be met, and what there was at that moment."""

    requested_bytes: int
    device_free_bytes: int | None
    fragmented: bool  # as much as was asked for was reserved and free, but in pieces
    line: str  # that asked for it
    moment: Moment


class Curve(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Memory over a history, of about 1000 of its states: the ends, the highest of each stretch, the most reserved."""

    state: Int64
    time_us: Int64 | None  # since 1970; None where entries do not say, or where the clock went backwards
    allocated_bytes: Int64  # as asked for
    reserved_bytes: Int64 | None  # None where it cannot be counted back from the end


class MemoryHistory(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A device's history."""

    entries: int
    before_bytes: int  # allocated before the first entry
    before_unknown_bytes: int  # of them, what was freed within the history, so that its stack is not known
    inconsistent: int  # entries and blocks that contradict one another
    failed: int  # allocations that could not be met
    peak: Moment
    failures: tuple[FailedAllocation, ...]  # the last of them, in order
    curve: Curve
    bands: tuple[tuple[Place, Int64], ...]  # what the largest owners at `worst` held in the states of the curve

    @property
    def worst(self) -> Moment:
        """The last failure, else the peak."""
        return self.failures[-1].moment if self.failures else self.peak


class DeviceMemory(Reserved, frozen=True, kw_only=True, eq=False):
    """One device at the time of the snapshot, and what led there."""

    device: int
    rounding_bytes: int  # `allocated` less what was asked for
    blocks: int  # that are allocated
    pools: tuple[PoolMemory, ...]  # largest first
    owners: tuple[MemoryOwner, ...]  # of what is allocated, largest first; they add up to `allocated_bytes`
    history: MemoryHistory | None  # None: none was recorded
    layers: list[dict[str, Any]]  # of the owners: see `layer_rows`

    @property
    def failure(self) -> FailedAllocation | None:
        """The last allocation that could not be met."""
        return self.history.failures[-1] if self.history and self.history.failures else None


class AllocatorReport(msgspec.Struct, frozen=True, eq=False):
    """All of a snapshot."""

    name: str
    file_bytes: int
    devices: tuple[DeviceMemory, ...]  # those with any memory or history; those that ran out first, then by reserved
    settings: Mapping[str, str]
    notes: tuple[str, ...]


BEFORE = -1  # the number of the stack of what was allocated before the history and freed within it
_FAILURES = 8  # the last ones, each with its owners
_BANDS = 6  # owners that the plot shows each in its own colour
_CURVE_STATES = 1000  # a screen has about as many columns


class Lifetimes(NamedTuple):
    """Every allocation that a history or its end knows, as columns: alive in the states `born` <= k < `died`."""

    born: Int64  # 0 for what was there before the first entry
    died: Int64  # number of entries + 1 for what is alive at the end
    size_bytes: Int64  # asked for
    stack: Int64  # BEFORE where it is not known
    inconsistent: int  # entries and blocks that contradict one another

    def allocated(self, states: int, which: Bool | slice = slice(None)) -> Int64:
        """Return the bytes alive in the states 0, 1, ..., `states` - 1, of all or of those chosen."""
        change = np.zeros(states + 1, np.int64)
        np.add.at(change, self.born[which], self.size_bytes[which])
        np.subtract.at(change, self.died[which], self.size_bytes[which])
        return np.cumsum(change[:states])


def lifetimes(events: Sequence[AllocatorEvent], blocks: Iterable[Block]) -> Lifetimes:
    """Find the lifetimes in the history of a device and its blocks at the end.

    What is freed without having been allocated was there before; so was what is alive at the end and was never
    allocated. Memory is alive until its free is completed, unless such entries were not recorded.
    """
    end = len(events) + 1
    completes = any(event.action == "free_completed" for event in events)
    free = "free_completed" if completes else "free_requested"
    rows: list[tuple[int, int, int, int]] = []  # the columns of Lifetimes
    live: dict[int, tuple[int, int, int]] = {}  # by address: born, size, stack
    inconsistent = 0
    for state, event in enumerate(events, 1):
        if event.action not in ("alloc", free):
            continue
        if known := live.pop(event.address, None):
            rows.append((known[0], state, *known[1:]))
        elif event.action == free:
            rows.append((0, state, event.size_bytes, BEFORE))
        if event.action == "alloc":
            live[event.address] = (state, event.size_bytes, event.stack)
            inconsistent += known is not None
    for block in blocks:
        if block.state == "free" or (block.state == "awaiting_free" and not completes):
            continue
        born, size, stack = live.pop(block.address, (0, block.requested_bytes, 0))
        rows.append((born, end, size, block.stack or stack))
    rows += [(born, end, size, stack) for born, size, stack in live.values()]  # not freed, and in no block
    born, died, sizes, stacks = np.array(rows, np.int64).reshape(-1, 4).T.copy()
    return Lifetimes(born, died, sizes, stacks, inconsistent + len(live))


def allocator_report(snapshot: MemorySnapshot) -> AllocatorReport:
    """Return the numbers of a snapshot."""
    owners = _Owners(snapshot.stacks)
    of_device: dict[int, list[Segment]] = defaultdict(list)
    for segment in snapshot.segments:
        of_device[segment.device].append(segment)
    numbers = sorted(of_device.keys() | snapshot.events.keys())
    devices = [_device(number, of_device[number], snapshot.events.get(number, []), owners) for number in numbers]
    notes = (*snapshot.notes, *_notes(devices))
    devices.sort(key=lambda one: (one.failure is None, -one.reserved_bytes))
    return AllocatorReport(snapshot.name, snapshot.file_bytes, tuple(devices), snapshot.settings, notes)


class _Owners:
    """Who asked for memory, by the number of a stack; each stack's place is worked out once."""

    def __init__(self, stacks: Sequence[Stack]) -> None:
        self._stacks = (*stacks, Stack())  # BEFORE is -1: the last
        self.places = (*map(place, stacks), Place(BEFORE_HISTORY))
        first: dict[Place, int] = {}
        self.numbers = [first.setdefault(one, number) for number, one in enumerate(self.places)]

    def of(self, held: Iterable[tuple[int, int]]) -> tuple[MemoryOwner, ...]:
        """Return the owners of memory, given as stacks and sizes; the largest first, then in the order of the file."""
        groups: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for stack, size in held:
            groups[self.numbers[stack]].append((stack, size))
        owners = []
        for number, blocks in sorted(groups.items()):
            example, largest = max(blocks, key=itemgetter(1))
            total, frames = sum(size for _, size in blocks), self._stacks[example].frames
            owners.append(MemoryOwner(self.places[number], total, len(blocks), largest, frames))
        return tuple(sorted(owners, key=attrgetter("size_bytes"), reverse=True))


def _device(
    number: int, segments: Sequence[Segment], events: Sequence[AllocatorEvent], owners: _Owners
) -> DeviceMemory:
    blocks = [block for segment in segments for block in segment.blocks]
    held = [block for block in blocks if block.state == "allocated"]
    holders = owners.of((block.stack, block.size_bytes) for block in held)
    pools: dict[tuple[tuple[int, int], int, str, bool], list[Segment]] = defaultdict(list)
    for one in segments:
        pools[one.pool or (0, 0), one.stream, one.kind, bool(one.expandable)].append(one)
    rows = [
        PoolMemory(pool=pool, stream=stream, kind=kind, expandable=expandable, segments=len(members), **_sums(members))
        for (pool, stream, kind, expandable), members in pools.items()
    ]
    sums = _sums(segments)
    return DeviceMemory(
        device=number,
        **sums,
        rounding_bytes=sum(block.size_bytes - block.requested_bytes for block in held),
        blocks=len(held),
        pools=tuple(sorted(rows, key=attrgetter("reserved_bytes"), reverse=True)),
        owners=holders,
        history=_history(events, blocks, sums["reserved_bytes"], owners) if events else None,
        layers=_layer_rows(holders),
    )


def _sums(segments: Sequence[Segment]) -> dict[str, int]:
    """The fields of `Reserved`."""
    sizes: dict[str, list[int]] = {"allocated": [], "awaiting_free": [], "free": []}
    for block in (block for segment in segments for block in segment.blocks):
        sizes[block.state].append(block.size_bytes)
    sums = {f"{state}_bytes": sum(of_state) for state, of_state in sizes.items()}
    sums["reserved_bytes"] = sum(segment.size_bytes for segment in segments)
    return {**sums, "largest_free_bytes": max(sizes["free"], default=0)}


def _layer_rows(owners: Iterable[MemoryOwner]) -> list[dict[str, Any]]:
    """By the line of the innermost `forward`; what has none, by where it came from. Largest first."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for one in owners:
        layer, origin = one.place.layer if one.place.origin == "forward" else "", one.place.origin
        row = rows.setdefault((layer, origin), {"layer": layer, "origin": origin, "size_bytes": 0, "blocks": 0})
        row["size_bytes"] += one.size_bytes
        row["blocks"] += one.blocks
    return sorted(rows.values(), key=itemgetter("size_bytes"), reverse=True)


def _history(
    events: Sequence[AllocatorEvent], blocks: Iterable[Block], reserved_bytes: int, owners: _Owners
) -> MemoryHistory:
    lives, states = lifetimes(events, blocks), len(events) + 1
    allocated = lives.allocated(states)
    gains = [event.size_bytes * SEGMENT_SIGNS.get(event.action or "", 0) for event in events]
    counted: Int64 = reserved_bytes - np.cumsum([0, *gains[::-1]], dtype=np.int64)[::-1]  # back from the end
    reserved = counted if counted.min() >= 0 else None  # else the history is not of these segments
    said = np.array([events[0].time_us, *(event.time_us for event in events)], np.int64)
    times = said if said[0] > 0 and (np.diff(said) >= 0).all() else None

    def moment(state: int) -> Moment:
        alive = (lives.born <= state) & (state < lives.died)
        return Moment(
            state=state,
            time_us=None if times is None else int(times[state]),
            allocated_bytes=int(allocated[state]),
            reserved_bytes=None if reserved is None else int(reserved[state]),
            owners=owners.of(zip(lives.stack[alive].tolist(), lives.size_bytes[alive].tolist(), strict=True)),
        )

    def failure(state: int) -> FailedAllocation:
        event, then = events[state - 1], moment(state)
        return FailedAllocation(
            requested_bytes=event.size_bytes,
            device_free_bytes=event.device_free_bytes,
            fragmented=(then.unallocated_bytes or 0) >= event.size_bytes,
            line=owners.places[event.stack].line,
            moment=then,
        )

    failed = [state for state, event in enumerate(events, 1) if event.action == "oom"]
    failures, peak = tuple(map(failure, failed[-_FAILURES:])), moment(int(allocated.argmax()))
    worst, numbers = failures[-1].moment if failures else peak, np.array(owners.numbers)[lives.stack]
    largest = [(one.place, numbers == owners.places.index(one.place)) for one in worst.owners[:_BANDS]]
    kept = [0, int(counted.argmax()), *failed[-_FAILURES:]]
    shown = np.union1d(highest_states(allocated, _CURVE_STATES), kept)
    return MemoryHistory(
        entries=len(events),
        before_bytes=int(allocated[0]),
        before_unknown_bytes=int(lives.size_bytes[(lives.born == 0) & (lives.died < states)].sum()),
        inconsistent=lives.inconsistent,
        failed=len(failed),
        peak=peak,
        failures=failures,
        curve=Curve(
            state=shown,
            time_us=None if times is None else times[shown],
            allocated_bytes=allocated[shown],
            reserved_bytes=None if reserved is None else reserved[shown],
        ),
        bands=tuple((where, lives.allocated(states, of_place)[shown]) for where, of_place in largest),
    )


def highest_states(allocated_bytes: Int64, points: int) -> Int64:
    """Return at most `points` states in order, of each stretch the one with the most allocated, and the last."""
    states = len(allocated_bytes)
    if states <= points:
        return np.arange(states)
    edges = np.linspace(0, states, points, dtype=np.int64)
    highest = [first + allocated_bytes[first:last].argmax() for first, last in pairwise(edges)]
    return np.union1d(highest, [states - 1])


def _notes(devices: Iterable[DeviceMemory]) -> Iterator[str]:
    for one in devices:
        name, history = f"cuda:{one.device}", one.history
        if history is None:
            yield (
                f"{name} has no history, so there is no peak and no curve: call "
                "torch.cuda.memory._record_memory_history() before the allocations"
            )
            continue
        if history.before_bytes:
            yield (
                f"{name}: {mebibytes(history.before_bytes)} MiB were allocated before the first of the "
                f"{history.entries} entries: recording began later, or it dropped its oldest entries (max_entries)"
            )
        if history.inconsistent:
            yield (
                f"{name}: {history.inconsistent} allocations of the history do not fit what came after: "
                "entries are missing, or the history ended before the snapshot"
            )
        if history.curve.reserved_bytes is None:
            yield f"{name}: reserved memory over time is not available: the history is not of these segments"
