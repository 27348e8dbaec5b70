"""A memory snapshot in numbers: what is held, by whom, what is lost to fragmentation, and how it came to this."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Literal

import msgspec
import numpy as np

from profiler_wrapper.snapshot.read import ACTIONS, UNKNOWN, AllocatorEvents, Frame, MemorySnapshot, Segment, Stack
from profiler_wrapper.trace.recording import Bool, Int64

# -- which line of a stack asked for memory ---------------------------------------------------------

Origin = Literal["forward", "backward", "optimizer", "other", "no stack"]

NO_LINE = "(no Python stack)"  # autograd's own threads and C++ have none
BEFORE_HISTORY = "(allocated before the history begins)"
_TORCH = re.compile(r"(?:^|(?:site|dist)-packages/|/pytorch/)(torch/.*)")
_INSTALLED = re.compile(r".*/(?:site|dist)-packages/(.*)")
_STANDARD_LIBRARY = re.compile(r"/lib/python3\.\d+/(?!site-packages/|dist-packages/)")
_OWN = re.compile(r"(?:^|/)profiler_wrapper/(?:capture/|\w+\.py)")
_COMPILED = re.compile(r"/torchinductor_[^/]*/")
_GENERATED = "<eval_with_key"  # by torch.fx
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
    outside = [i for i, file in enumerate(files) if not torch[i] and not _is_plumbing(file)]
    own = next((i for i in outside if not _INSTALLED.match(files[i])), None)
    below = outside[0] if outside else 0
    line, caller = _text(python[below]), _text(python[own]) if own is not None else ""
    if source := next((frame.source for frame in python if frame.source), ""):
        file, _, rest = source.rpartition(":")
        line, below = f"{short_file(file)}:{rest}", len(python)
    forwards = [i for i, frame in enumerate(python) if frame.name == "forward"]
    modules = [i for i in forwards if torch[i].startswith("torch/nn/") and not torch[i].startswith(_PLUMBING)]
    layers = [i for i in forwards if i in outside] or modules
    return Place(
        line=line,
        inside=_inside(python[:below], files, torch),
        layer=_text(python[layers[0]]) if layers else "",
        caller=caller if caller != line else "",
        origin=_origin(python, torch),
        metadata=stack.metadata,
    )


def _is_python(frame: Frame) -> bool:
    """A file of C++ that `stacks="all"` adds is none; cells of a notebook are named `<ipython-input-...>`."""
    if frame.file.startswith("<"):
        return bool(frame.source) or not frame.file.startswith(("<frozen", "<__array", _GENERATED))
    return frame.file.endswith((".py", ".ipynb", ".pyx"))


def _is_plumbing(file: str) -> bool:
    patterns = (_STANDARD_LIBRARY, _OWN, _COMPILED)
    return file.startswith(_GENERATED) or any(pattern.search(file) for pattern in patterns)


def _inside(below: Sequence[Frame], files: Sequence[str], torch: Sequence[str]) -> str:
    """Of the frames below the user's line, the one that says most: a module or an optimizer before any other."""
    telling = [i for i in range(len(below)) if torch[i] and not torch[i].startswith(_PLUMBING)]
    compiled = [i for i in range(len(below)) if _COMPILED.search(files[i])]
    best = [i for i in telling if torch[i].startswith(("torch/nn/modules/", "torch/optim/"))]
    for chosen in (compiled, best, telling):
        if chosen:
            text = _text(below[chosen[0]])
            return f"compiled code, {text}" if chosen is compiled else text
    return ""


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


# -- the rows, in bytes and microseconds since 1970 -------------------------------------------------


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


class MemoryOwner(msgspec.Struct, frozen=True, kw_only=True):
    """What one line of code holds at one moment. `frames` is the whole stack of its largest part."""

    place: Place
    size_bytes: int
    blocks: int
    largest_bytes: int
    frames: tuple[Frame, ...]


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """The allocator after `state` entries of its history. Owners add up to `allocated_bytes`, as asked for."""

    state: int
    time_us: int | None
    allocated_bytes: int
    reserved_bytes: int | None
    owners: tuple[MemoryOwner, ...]  # largest first


class FailedAllocation(msgspec.Struct, frozen=True, kw_only=True):
    """An allocation that could not be met, and what there was at that moment."""

    requested_bytes: int
    device_free_bytes: int | None
    place: Place
    moment: Moment

    @property
    def unallocated_bytes(self) -> int | None:
        """Reserved but not allocated then."""
        reserved_bytes = self.moment.reserved_bytes
        return None if reserved_bytes is None else max(0, reserved_bytes - self.moment.allocated_bytes)

    @property
    def fragmented(self) -> bool:
        """As much as was asked for was reserved and free, but in pieces."""
        return (self.unallocated_bytes or 0) >= self.requested_bytes


class MemoryHistory(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A device's history. Courses have one value more than there are entries: the state before the first."""

    entries: int
    time_us: Int64 | None  # of each entry, since 1970
    allocated_bytes: Int64  # as asked for
    reserved_bytes: Int64 | None  # None where it cannot be counted back from the end
    before_bytes: int  # allocated before the first entry
    before_unknown_bytes: int  # of them, what was freed within the history, so that its stack is not known
    peak: Moment
    failed: int  # allocations that could not be met
    failures: tuple[FailedAllocation, ...]  # the last of them, in order
    bands: tuple[tuple[Place, Int64], ...]  # what the largest owners at `worst` held, by state
    inconsistent: int  # entries and blocks that contradict one another

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

    @property
    def failure(self) -> FailedAllocation | None:
        """The last allocation that could not be met."""
        return self.history.failures[-1] if self.history and self.history.failures else None


class AllocatorReport(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """All of a snapshot."""

    name: str
    file_bytes: int
    devices: tuple[DeviceMemory, ...]  # those with any memory or history; those that ran out first, then by reserved
    settings: Mapping[str, str]
    notes: tuple[str, ...]


# -- lifetimes: what a history says -----------------------------------------------------------------

BEFORE = -1  # the number of the stack of what was allocated before the history and freed within it
_ALLOC, _FREE_REQUESTED, _FREE_COMPLETED = (ACTIONS.index(name) for name in ACTIONS[:3])
_GAINS = [ACTIONS.index(name) for name in ("segment_alloc", "segment_map")]
_LOSSES = [ACTIONS.index(name) for name in ("segment_free", "segment_unmap")]


class Lifetimes(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Every allocation that a history or its end knows, as columns. State k is that after k entries.

    Alive in the states `born` <= k < `died`.
    """

    born: Int64  # 0 for what was there before the first entry
    died: Int64  # number of entries + 1 for what is alive at the end
    size_bytes: Int64  # asked for
    stack: Int64  # BEFORE where it is not known
    inconsistent: int  # entries and blocks that contradict one another

    def allocated(self, states: int, which: Bool | slice = slice(None)) -> Int64:
        """Bytes alive in the states 0, 1, ..., `states` - 1, of all or of those chosen."""
        change = np.zeros(states + 1, np.int64)
        np.add.at(change, self.born[which], self.size_bytes[which])
        np.subtract.at(change, np.minimum(self.died, states)[which], self.size_bytes[which])
        return np.cumsum(change[:states])


def lifetimes(events: AllocatorEvents, segments: Iterable[Segment]) -> Lifetimes:
    """From the history of a device and its segments at the end.

    What is freed without having been allocated was there before; so was what is alive at the end and was never
    allocated. Memory is alive until its free is completed, unless such entries were not recorded.
    """
    end = len(events) + 1
    completes = bool((events.action == _FREE_COMPLETED).any())
    free = _FREE_COMPLETED if completes else _FREE_REQUESTED
    rows: list[tuple[int, int, int, int]] = []  # the columns of Lifetimes
    live: dict[int, tuple[int, int, int]] = {}  # by address: born, size, stack
    inconsistent = 0
    columns = (events.action, events.address, events.size_bytes, events.stack)
    for state, (action, address, size, stack) in enumerate(zip(*(c.tolist() for c in columns), strict=True), 1):
        if action not in (_ALLOC, free):
            continue
        known = live.pop(address, None)
        if action == _ALLOC:
            live[address] = (state, size, stack)
            inconsistent += known is not None
        if known is not None:
            rows.append((known[0], state, *known[1:]))
        elif action == free:
            rows.append((0, state, size, BEFORE))
    for block in (block for segment in segments for block in segment.blocks):
        if block.state == "free" or (block.state == "awaiting_free" and not completes):
            continue
        born, size, stack = live.pop(block.address, (0, block.requested_bytes, 0))
        rows.append((born, end, size, block.stack or stack))
    rows += [(born, end, size, stack) for born, size, stack in live.values()]  # not freed, and in no block
    born, died, size_bytes, stacks = np.array(rows, np.int64).reshape(-1, 4).T.copy()
    inconsistent += len(live)
    return Lifetimes(born=born, died=died, size_bytes=size_bytes, stack=stacks, inconsistent=inconsistent)


def reserved(events: AllocatorEvents, reserved_at_end: int) -> Int64 | None:
    """Bytes that the allocator holds of the device in the states 0, 1, ..., counted back from the end.

    None where that would be negative: the history is not that of these segments.
    """
    sign = np.isin(events.action, _GAINS).astype(np.int64) - np.isin(events.action, _LOSSES)
    change = np.concatenate([[0], np.cumsum(sign * events.size_bytes)])
    course: Int64 = reserved_at_end - change[-1] + change
    return course if course.min() >= 0 else None


# -- the report -------------------------------------------------------------------------------------

_OOM = ACTIONS.index("oom")
_FAILURES = 8  # the last ones, each with its owners
_BANDS = 6  # owners that the plot shows each in its own colour


def allocator_report(snapshot: MemorySnapshot) -> AllocatorReport:
    """The numbers of a snapshot."""
    stacks = _Stacks(snapshot)
    of_device: dict[int, list[Segment]] = defaultdict(list)
    for segment in snapshot.segments:
        of_device[segment.device].append(segment)
    numbers = sorted(of_device.keys() | snapshot.events.keys())
    devices = [_device(number, of_device[number], snapshot.events.get(number), stacks) for number in numbers]
    return AllocatorReport(
        name=snapshot.name,
        file_bytes=snapshot.file_bytes,
        devices=tuple(sorted(devices, key=lambda one: (one.failure is None, -one.reserved_bytes))),
        settings=snapshot.settings,
        notes=(*snapshot.notes, *_notes(devices)),
    )


class _Stacks:
    """The places of all stacks, each worked out once, and the owners that follow."""

    def __init__(self, snapshot: MemorySnapshot) -> None:
        self._stacks = snapshot.stacks
        numbers: dict[Place, int] = {}
        places = [*map(place, snapshot.stacks), Place(BEFORE_HISTORY)]  # BEFORE is -1: the last
        self.of_stack = np.array([numbers.setdefault(one, len(numbers)) for one in places], np.int64)
        self.places = tuple(numbers)

    def owners(self, stacks: Int64, sizes: Int64) -> tuple[MemoryOwner, ...]:
        """Largest first; of equal size in the order of their places."""
        groups: dict[int, list[tuple[int, int]]] = defaultdict(list)  # sizes and stacks
        for number, size, stack in zip(self.of_stack[stacks].tolist(), sizes.tolist(), stacks.tolist(), strict=True):
            groups[number].append((size, stack))
        owners = []
        for number, blocks in sorted(groups.items()):
            largest, example = max(blocks, key=itemgetter(0))
            owners.append(
                MemoryOwner(
                    place=self.places[number],
                    size_bytes=sum(size for size, _ in blocks),
                    blocks=len(blocks),
                    largest_bytes=largest,
                    frames=self._stacks[example].frames if example >= 0 else (),
                )
            )
        return tuple(sorted(owners, key=lambda owner: -owner.size_bytes))


# -- now ------------------------------------------------------------------------------------------


def _device(number: int, segments: Sequence[Segment], events: AllocatorEvents | None, stacks: _Stacks) -> DeviceMemory:
    held = [block for segment in segments for block in segment.blocks if block.state == "allocated"]
    of_stacks, sizes = (np.array([getattr(one, name) for one in held], np.int64) for name in ("stack", "size_bytes"))
    sums = _sums(segments)
    return DeviceMemory(
        device=number,
        **sums,
        rounding_bytes=sum(block.size_bytes - block.requested_bytes for block in held),
        blocks=len(held),
        pools=_pools(segments),
        owners=stacks.owners(of_stacks, sizes),
        history=_history(events, segments, sums["reserved_bytes"], stacks) if events else None,
    )


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
    for segment in segments:
        pool = segment.pool or (0, 0)
        groups[pool, segment.stream, segment.kind, bool(segment.expandable)].append(segment)
    rows = [
        PoolMemory(pool=pool, stream=stream, kind=kind, expandable=expandable, segments=len(members), **_sums(members))
        for (pool, stream, kind, expandable), members in groups.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.reserved_bytes))


# -- before ---------------------------------------------------------------------------------------


def _history(
    events: AllocatorEvents, segments: Sequence[Segment], reserved_bytes: int, stacks: _Stacks
) -> MemoryHistory:
    lives = lifetimes(events, segments)
    states = len(events) + 1
    allocated, course = lives.allocated(states), reserved(events, reserved_bytes)
    # None where entries do not say when they were made, or where the clock went backwards.
    times = events.time_us if (events.time_us > 0).all() and (np.diff(events.time_us) >= 0).all() else None

    def moment(state: int) -> Moment:
        alive = (lives.born <= state) & (state < lives.died)
        return Moment(
            state=state,
            time_us=int(times[max(0, state - 1)]) if times is not None else None,
            allocated_bytes=int(allocated[state]),
            reserved_bytes=int(course[state]) if course is not None else None,
            owners=stacks.owners(lives.stack[alive], lives.size_bytes[alive]),
        )

    peak = moment(int(allocated.argmax()))
    failed = np.flatnonzero(events.action == _OOM)
    unknown = lives.size_bytes[(lives.born == 0) & (lives.died < states)]
    failures = tuple(
        FailedAllocation(
            requested_bytes=int(events.size_bytes[i]),
            device_free_bytes=int(free) if (free := events.device_free_bytes[i]) != UNKNOWN else None,
            place=stacks.places[stacks.of_stack[events.stack[i]]],
            moment=moment(i + 1),
        )
        for i in failed[-_FAILURES:].tolist()
    )
    return MemoryHistory(
        entries=len(events),
        time_us=times,
        allocated_bytes=allocated,
        reserved_bytes=course,
        before_bytes=int(allocated[0]),
        before_unknown_bytes=int(unknown.sum()),
        peak=peak,
        failed=len(failed),
        failures=failures,
        bands=_bands(lives, failures[-1].moment if failures else peak, stacks, states),
        inconsistent=lives.inconsistent,
    )


def _bands(lives: Lifetimes, worst: Moment, stacks: _Stacks, states: int) -> tuple[tuple[Place, Int64], ...]:
    owners, places = worst.owners[:_BANDS], stacks.of_stack[lives.stack]
    return tuple((one.place, lives.allocated(states, places == stacks.places.index(one.place))) for one in owners)


def _notes(devices: Iterable[DeviceMemory]) -> list[str]:
    notes = []
    for one in devices:
        name, history = f"cuda:{one.device}", one.history
        if history is None:
            notes.append(
                f"{name} has no history, so there is no peak and no curve: call "
                "torch.cuda.memory._record_memory_history() before the allocations"
            )
            continue
        if history.before_bytes:
            notes.append(
                f"{name}: {history.before_bytes / 2**20:.1f} MiB were allocated before the first of the "
                f"{history.entries} entries: recording began later, or it dropped its oldest entries (max_entries)"
            )
        if history.inconsistent:
            notes.append(
                f"{name}: {history.inconsistent} allocations of the history do not fit what came after: "
                "entries are missing, or the history ended before the snapshot"
            )
        if history.reserved_bytes is None:
            notes.append(f"{name}: reserved memory over time is not available: the history is not of these segments")
    return notes
