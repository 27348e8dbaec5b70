"""A memory snapshot in numbers: what is held, by whom, what is lost to fragmentation, and how it came to this.

Times are microseconds since 1970. State k of a history is that after k entries.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from profiler_wrapper.snapshot.read import SEGMENT_SIGNS, AllocatorEvent, Block, Frame, MemorySnapshot, Segment, Stack
from profiler_wrapper.trace.recording import Bool, Int64

Origin = Literal["forward", "backward", "optimizer", "other", "no stack"]

NO_LINE = "(no Python stack)"  # autograd's own threads and C++ have none
BEFORE_HISTORY = "(allocated before the history begins)"
_TORCH = re.compile(r"(?:^|(?:site|dist)-packages/|/pytorch/)(torch/.*)")
_INSTALLED = re.compile(r".*/(?:site|dist)-packages/(.*)")
_COMPILED = re.compile(r"/torchinductor_[^/]*/")
_GENERATED = "<eval_with_key"  # by torch.fx
_NOBODYS = re.compile(  # compiled and generated code, the standard library, this package
    rf"{_COMPILED.pattern}|^{_GENERATED}|/lib/python3\.\d+/(?!site-packages/|dist-packages/)"
    r"|(?:^|/)profiler_wrapper/(?:capture/|\w+\.py)"
)
_PLUMBING = ("torch/nn/modules/module.py", "torch/nn/modules/container.py", "torch/utils/_", "torch/_", "torch/fx/")


class Place(msgspec.Struct, frozen=True):
    """Where memory was asked for. Texts are `"file.py:12 function"`, "" where the stack has none."""

    line: str  # the innermost line outside of torch and Python itself; NO_LINE, BEFORE_HISTORY
    inside: str = ""  # what of torch that line was in: the nn module, the optimizer, compiled code
    layer: str = ""  # the innermost `forward`, the user's before torch's
    caller: str = ""  # the innermost line that is not of an installed package, where that is another one than `line`
    origin: Origin = "no stack"
    metadata: str = ""  # that it was stamped with


def place(stack: Stack) -> Place:
    """The lines that matter of a stack."""
    python = [frame for frame in stack.frames if _is_python(frame)]
    if not python:
        return Place(NO_LINE, metadata=stack.metadata)
    files = [frame.file.replace("\\", "/") for frame in python]
    torch = [match[1] if (match := _TORCH.search(file)) else "" for file in files]
    outside = [i for i, file in enumerate(files) if not torch[i] and not _NOBODYS.search(file)]
    own = next((i for i in outside if not _INSTALLED.match(files[i])), None)
    below, texts = outside[0] if outside else 0, [*map(_text, python)]
    line, caller = texts[below], texts[own] if own is not None else ""
    if source := next((frame.source for frame in python if frame.source), ""):
        file, _, rest = source.rpartition(":")
        line, below = f"{short_file(file)}:{rest}", len(python)
    forwards = [i for i, frame in enumerate(python) if frame.name == "forward"]
    modules = [i for i in forwards if torch[i].startswith("torch/nn/") and not torch[i].startswith(_PLUMBING)]
    layers = [i for i in forwards if i in outside] or modules
    return Place(
        line=line,
        inside=_inside(texts[:below], files, torch),
        layer=texts[layers[0]] if layers else "",
        caller=caller if caller != line else "",
        origin=_origin(python, torch),
        metadata=stack.metadata,
    )


def _is_python(frame: Frame) -> bool:
    """A file of C++ that `stacks="all"` adds is none; cells of a notebook are named `<ipython-input-...>`."""
    if frame.file.startswith("<"):
        return bool(frame.source) or not frame.file.startswith(("<frozen", "<__array", _GENERATED))
    return frame.file.endswith((".py", ".ipynb", ".pyx"))


def _inside(below: Sequence[str], files: Sequence[str], torch: Sequence[str]) -> str:
    """Of the frames below the user's line, the one that says most: a module or an optimizer before any other."""
    telling = [i for i in range(len(below)) if torch[i] and not torch[i].startswith(_PLUMBING)]
    compiled = [i for i in range(len(below)) if _COMPILED.search(files[i])]
    best = [i for i in telling if torch[i].startswith(("torch/nn/modules/", "torch/optim/"))]
    text = next((below[i] for i in (*compiled, *best, *telling)), "")
    return f"compiled code, {text}" if compiled else text


def _origin(python: Sequence[Frame], torch: Sequence[str]) -> Origin:
    """The innermost frame that tells decides: a checkpointed forward within backward counts as forward."""
    for frame, file in zip(python, torch, strict=True):
        if file.startswith("torch/optim/"):
            return "optimizer"
        if frame.name == "forward":
            return "forward"
        if file.startswith(("torch/autograd/", "torch/_tensor.py")) and "backward" in frame.name:
            return "backward"
    return "other"


def _text(frame: Frame) -> str:
    return f"{short_file(frame.file)}:{frame.line} {frame.name}".rstrip()


def short_file(file: str) -> str:
    """`"/usr/lib/python3/site-packages/torch/x.py"` -> `"torch/x.py"`, `"/home/me/run/a.py"` -> `"run/a.py"`."""
    file = file.replace("\\", "/")
    if match := _TORCH.search(file) or _INSTALLED.match(file):
        return match[1]
    return "/".join(file.split("/")[-2:])


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


class MemoryHistory(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A device's history. Courses have a value for each state: that before the first entry and those after each."""

    entries: int
    before_bytes: int  # allocated before the first entry
    before_unknown_bytes: int  # of them, what was freed within the history, so that its stack is not known
    inconsistent: int  # entries and blocks that contradict one another
    failed: int  # allocations that could not be met
    peak: Moment
    failures: tuple[FailedAllocation, ...]  # the last of them, in order
    time_us: Int64 | None  # since 1970; None where entries do not say, or where the clock went backwards
    allocated_bytes: Int64  # as asked for
    reserved_bytes: Int64 | None  # None where it cannot be counted back from the end
    bands: tuple[tuple[Place, Int64], ...]  # what the largest owners at `worst` held

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


class Lifetimes(NamedTuple):
    """Every allocation that a history or its end knows, as columns: alive in the states `born` <= k < `died`."""

    born: Int64  # 0 for what was there before the first entry
    died: Int64  # number of entries + 1 for what is alive at the end
    size_bytes: Int64  # asked for
    stack: Int64  # BEFORE where it is not known
    inconsistent: int  # entries and blocks that contradict one another

    def allocated(self, states: int, which: Bool | slice = slice(None)) -> Int64:
        """Bytes alive in the states 0, 1, ..., `states` - 1, of all or of those chosen."""
        change = np.zeros(states + 1, np.int64)
        np.add.at(change, self.born[which], self.size_bytes[which])
        np.subtract.at(change, self.died[which], self.size_bytes[which])
        return np.cumsum(change[:states])


def lifetimes(events: Sequence[AllocatorEvent], blocks: Iterable[Block]) -> Lifetimes:
    """From the history of a device and its blocks at the end.

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


_FAILURES = 8  # the last ones, each with its owners
_BANDS = 6  # owners that the plot shows each in its own colour


def allocator_report(snapshot: MemorySnapshot) -> AllocatorReport:
    """The numbers of a snapshot."""
    stacks = _Stacks(snapshot)
    of_device: dict[int, list[Segment]] = defaultdict(list)
    for segment in snapshot.segments:
        of_device[segment.device].append(segment)
    numbers = sorted(of_device.keys() | snapshot.events.keys())
    devices = [_device(number, of_device[number], snapshot.events.get(number, []), stacks) for number in numbers]
    notes = (*snapshot.notes, *_notes(devices))
    devices.sort(key=lambda one: (one.failure is None, -one.reserved_bytes))
    return AllocatorReport(snapshot.name, snapshot.file_bytes, tuple(devices), snapshot.settings, notes)


class _Stacks:
    """The places of all stacks, each worked out once, and the owners that follow."""

    def __init__(self, snapshot: MemorySnapshot) -> None:
        self._stacks = (*snapshot.stacks, Stack())  # BEFORE is -1: the last
        of_stack = [*map(place, snapshot.stacks), Place(BEFORE_HISTORY)]
        self.places = tuple(dict.fromkeys(of_stack))
        numbers = {one: number for number, one in enumerate(self.places)}
        self.numbers = [numbers[one] for one in of_stack]

    def owners(self, held: Iterable[tuple[int, int]]) -> tuple[MemoryOwner, ...]:
        """By the numbers of stacks and sizes. Largest first; of equal size in the order of their places."""
        groups: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for stack, size in held:
            groups[self.numbers[stack]].append((stack, size))
        owners = []
        for number, blocks in sorted(groups.items()):
            example, largest = max(blocks, key=itemgetter(1))
            total, frames = sum(size for _, size in blocks), self._stacks[example].frames
            owners.append(MemoryOwner(self.places[number], total, len(blocks), largest, frames))
        return tuple(sorted(owners, key=lambda owner: -owner.size_bytes))


def _device(
    number: int, segments: Sequence[Segment], events: Sequence[AllocatorEvent], stacks: _Stacks
) -> DeviceMemory:
    blocks = [block for segment in segments for block in segment.blocks]
    held = [block for block in blocks if block.state == "allocated"]
    sums, owners = _sums(segments), stacks.owners((block.stack, block.size_bytes) for block in held)
    return DeviceMemory(
        device=number,
        **sums,
        rounding_bytes=sum(block.size_bytes - block.requested_bytes for block in held),
        blocks=len(held),
        pools=_pools(segments),
        owners=owners,
        history=_history(events, blocks, sums["reserved_bytes"], stacks) if events else None,
        layers=layer_rows(owners),
    )


def layer_rows(owners: Iterable[MemoryOwner]) -> list[dict[str, Any]]:
    """By the line of the innermost `forward`; what has none, by where it came from. Largest first."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for one in owners:
        layer, origin = one.place.layer if one.place.origin == "forward" else "", one.place.origin
        row = rows.setdefault((layer, origin), {"layer": layer, "origin": origin, "size_bytes": 0, "blocks": 0})
        row["size_bytes"] += one.size_bytes
        row["blocks"] += one.blocks
    return sorted(rows.values(), key=lambda row: -row["size_bytes"])


def _sums(segments: Sequence[Segment]) -> dict[str, int]:
    """The fields of `Reserved`."""
    sizes: dict[str, list[int]] = {"allocated": [], "awaiting_free": [], "free": []}
    for block in (block for segment in segments for block in segment.blocks):
        sizes[block.state].append(block.size_bytes)
    sums = {f"{state}_bytes": sum(of_state) for state, of_state in sizes.items()}
    sums["reserved_bytes"] = sum(segment.size_bytes for segment in segments)
    return {**sums, "largest_free_bytes": max(sizes["free"], default=0)}


def _pools(segments: Iterable[Segment]) -> tuple[PoolMemory, ...]:
    groups: dict[tuple[tuple[int, int], int, str, bool], list[Segment]] = defaultdict(list)
    for one in segments:
        groups[one.pool or (0, 0), one.stream, one.kind, bool(one.expandable)].append(one)
    rows = [
        PoolMemory(pool=pool, stream=stream, kind=kind, expandable=expandable, segments=len(members), **_sums(members))
        for (pool, stream, kind, expandable), members in groups.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.reserved_bytes))


def _history(
    events: Sequence[AllocatorEvent], blocks: Iterable[Block], reserved_bytes: int, stacks: _Stacks
) -> MemoryHistory:
    lives, states = lifetimes(events, blocks), len(events) + 1
    allocated = lives.allocated(states)
    gains = [event.size_bytes * SEGMENT_SIGNS.get(event.action or "", 0) for event in events]
    course = reserved_bytes - np.cumsum([0, *gains[::-1]], dtype=np.int64)[::-1]  # counted back from the end
    of_these_segments = course.min() >= 0
    times = np.array([events[0].time_us, *(event.time_us for event in events)], np.int64)
    timed = times[0] > 0 and (np.diff(times) >= 0).all()

    def moment(state: int) -> Moment:
        alive = (lives.born <= state) & (state < lives.died)
        return Moment(
            state=state,
            time_us=int(times[state]) if timed else None,
            allocated_bytes=int(allocated[state]),
            reserved_bytes=int(course[state]) if of_these_segments else None,
            owners=stacks.owners(zip(lives.stack[alive].tolist(), lives.size_bytes[alive].tolist(), strict=True)),
        )

    def failure(state: int) -> FailedAllocation:
        event, then = events[state - 1], moment(state)
        return FailedAllocation(
            requested_bytes=event.size_bytes,
            device_free_bytes=event.device_free_bytes,
            fragmented=(then.unallocated_bytes or 0) >= event.size_bytes,
            line=stacks.places[stacks.numbers[event.stack]].line,
            moment=then,
        )

    failed = [state for state, event in enumerate(events, 1) if event.action == "oom"]
    failures, peak = tuple(map(failure, failed[-_FAILURES:])), moment(int(allocated.argmax()))
    worst, numbers = failures[-1].moment if failures else peak, np.array(stacks.numbers)[lives.stack]
    largest = [(one.place, numbers == stacks.places.index(one.place)) for one in worst.owners[:_BANDS]]
    return MemoryHistory(
        entries=len(events),
        before_bytes=int(allocated[0]),
        before_unknown_bytes=int(lives.size_bytes[(lives.born == 0) & (lives.died < states)].sum()),
        inconsistent=lives.inconsistent,
        failed=len(failed),
        peak=peak,
        failures=failures,
        time_us=times if timed else None,
        allocated_bytes=allocated,
        reserved_bytes=course if of_these_segments else None,
        bands=tuple((place, lives.allocated(states, which)) for place, which in largest),
    )


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
                f"{name}: {history.before_bytes / 2**20:.1f} MiB were allocated before the first of the "
                f"{history.entries} entries: recording began later, or it dropped its oldest entries (max_entries)"
            )
        if history.inconsistent:
            yield (
                f"{name}: {history.inconsistent} allocations of the history do not fit what came after: "
                "entries are missing, or the history ended before the snapshot"
            )
        if history.reserved_bytes is None:
            yield f"{name}: reserved memory over time is not available: the history is not of these segments"
