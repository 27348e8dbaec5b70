"""A memory snapshot in numbers: what is held, by whom, what is lost to fragmentation, and how it came to this."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from profiler_wrapper.analysis.allocator_history import (
    Lifetimes,
    curves,
    grouped,
    lifetimes,
    reserved,
    times_us,
)
from profiler_wrapper.analysis.allocator_model import (
    AllocatorReport,
    Band,
    DeviceMemory,
    FailedAllocation,
    LayerMemory,
    MemoryHistory,
    MemoryOwner,
    Moment,
    PoolMemory,
)
from profiler_wrapper.analysis.stack_places import LONG_AGO, Place, place
from profiler_wrapper.recording.recording import Int64
from profiler_wrapper.recording.snapshot_records import (
    ACTIONS,
    NO_TEXT,
    UNKNOWN,
    AllocatorEvents,
    MemorySnapshot,
    Segment,
)

_ALLOC, _OOM = ACTIONS.index("alloc"), ACTIONS.index("oom")
_FAILURES = 8  # the last ones, each with its owners
_BANDS = 6  # owners that the plot tells apart


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
        self.frames, self.texts = snapshot.stacks, snapshot.texts
        self._numbers: dict[Place, int] = {}
        of_stack = [self._numbers.setdefault(place(stack), len(self._numbers)) for stack in snapshot.stacks]
        of_stack.append(self._numbers.setdefault(LONG_AGO, len(self._numbers)))  # BEFORE is -1: the last
        self.of_stack = np.array(of_stack, np.int64)
        self.places = tuple(self._numbers)

    def groups(self, stack: Int64, text: Int64) -> Int64:
        """A number for each pair of place and metadata."""
        numbers: Int64 = self.of_stack[stack] * len(self.texts) + text
        return numbers

    def of_group(self, group: int) -> tuple[Place, str]:
        return self.places[group // len(self.texts)], self.texts[group % len(self.texts)]

    def owners(self, stack: Int64, text: Int64, sizes: Int64) -> tuple[MemoryOwner, ...]:
        """Largest first; of equal size in the order they were met."""
        groups, inverse = np.unique(self.groups(stack, text), return_inverse=True)
        totals, counts = grouped(inverse, sizes, len(groups))
        largest = np.zeros(len(groups), np.int64)
        np.maximum.at(largest, inverse, sizes)
        rows = np.full(len(groups), -1, np.int64)  # the first row of the largest size
        at_most = np.flatnonzero(sizes == largest[inverse])[::-1]
        rows[inverse[at_most]] = at_most
        found = []
        for i in np.argsort(-totals, kind="stable").tolist():
            where, metadata = self.of_group(int(groups[i]))
            example = int(stack[rows[i]])
            found.append(
                MemoryOwner(
                    place=where,
                    metadata=metadata,
                    size_bytes=int(totals[i]),
                    blocks=int(counts[i]),
                    largest_bytes=int(largest[i]),
                    frames=self.frames[example] if example >= 0 else (),
                )
            )
        return tuple(found)


# -- now ------------------------------------------------------------------------------------------


def _device(number: int, segments: Sequence[Segment], events: AllocatorEvents | None, stacks: _Stacks) -> DeviceMemory:
    blocks = [block for segment in segments for block in segment.blocks]
    held = [block for block in blocks if block.state == "allocated"]
    sizes = np.array([block.size_bytes for block in held], np.int64)
    stamped = _metadata(events) if events is not None else {}
    texts = [block.text or stamped.get(block.address, NO_TEXT) for block in held]
    owners = stacks.owners(np.array([block.stack for block in held], np.int64), np.array(texts, np.int64), sizes)
    free = [block.size_bytes for block in blocks if block.state == "free"]
    reserved_bytes = sum(segment.size_bytes for segment in segments)
    return DeviceMemory(
        device=number,
        reserved_bytes=reserved_bytes,
        allocated_bytes=int(sizes.sum()),
        awaiting_free_bytes=sum(block.size_bytes for block in blocks if block.state == "awaiting_free"),
        free_bytes=sum(free),
        largest_free_bytes=max(free, default=0),
        rounding_bytes=sum(block.size_bytes - block.requested_bytes for block in held),
        blocks=len(held),
        pools=_pools(segments),
        owners=owners,
        layers=_layers(owners),
        history=_history(events, segments, reserved_bytes, stacks) if events is not None and len(events) else None,
    )


def _metadata(events: AllocatorEvents) -> dict[int, int]:
    """The metadata of the last allocation at each address: torch writes it into the history only."""
    allocs = events.action == _ALLOC
    if not events.text[allocs].any():
        return {}
    return dict(zip(events.address[allocs].tolist(), events.text[allocs].tolist(), strict=True))


def _pools(segments: Iterable[Segment]) -> tuple[PoolMemory, ...]:
    alike: dict[tuple[tuple[int, int], int, str, bool], list[Segment]] = defaultdict(list)
    for segment in segments:
        alike[segment.pool, segment.stream, segment.kind, segment.expandable].append(segment)
    rows = []
    for (pool, stream, kind, expandable), members in alike.items():
        by_state: dict[str, list[int]] = {"allocated": [], "awaiting_free": [], "free": []}
        for block in (block for segment in members for block in segment.blocks):
            by_state[block.state].append(block.size_bytes)
        rows.append(
            PoolMemory(
                pool=pool,
                stream=stream,
                kind=kind,
                expandable=expandable,
                segments=len(members),
                reserved_bytes=sum(segment.size_bytes for segment in members),
                allocated_bytes=sum(by_state["allocated"]),
                awaiting_free_bytes=sum(by_state["awaiting_free"]),
                free_bytes=sum(by_state["free"]),
                largest_free_bytes=max(by_state["free"], default=0),
            )
        )
    return tuple(sorted(rows, key=lambda row: -row.reserved_bytes))


def _layers(owners: Iterable[MemoryOwner]) -> tuple[LayerMemory, ...]:
    """By the line of the innermost `forward`; what has none, by where it came from."""
    alike: dict[tuple[str, str], list[MemoryOwner]] = defaultdict(list)
    for owner in owners:
        origin = owner.place.origin
        layer = owner.place.layer if origin == "forward" else ""
        alike[layer, origin].append(owner)
    rows = [
        LayerMemory(
            layer=layer,
            origin=origin,
            size_bytes=sum(owner.size_bytes for owner in members),
            blocks=sum(owner.blocks for owner in members),
        )
        for (layer, origin), members in alike.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.size_bytes))


# -- before ---------------------------------------------------------------------------------------


def _history(
    events: AllocatorEvents, segments: Sequence[Segment], reserved_bytes: int, stacks: _Stacks
) -> MemoryHistory:
    lives = lifetimes(events, segments)
    states = len(events) + 1
    allocated, course, times = lives.allocated(states), reserved(events, reserved_bytes), times_us(events)

    def moment(state: int) -> Moment:
        alive = lives.alive(state)
        return Moment(
            state=state,
            time_us=int(times[max(0, state - 1)]) if times is not None else None,
            allocated_bytes=int(allocated[state]),
            reserved_bytes=int(course[state]) if course is not None else None,
            owners=stacks.owners(lives.stack[alive], lives.text[alive], lives.size_bytes[alive]),
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


def _bands(lives: Lifetimes, worst: Moment, stacks: _Stacks, states: int) -> tuple[Band, ...]:
    shown = {(owner.place, owner.metadata) for owner in worst.owners[:_BANDS]}
    groups = stacks.groups(lives.stack, lives.text)
    numbers = [number for number in np.unique(groups).tolist() if stacks.of_group(number) in shown]
    bands = [
        Band(place=stacks.of_group(number)[0], metadata=stacks.of_group(number)[1], allocated_bytes=course)
        for number, course in zip(numbers, curves(lives, groups, numbers, states), strict=True)
    ]
    return tuple(sorted(bands, key=lambda band: -int(band.allocated_bytes[worst.state])))


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
