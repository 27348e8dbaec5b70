"""All that is said of one device's memory: curve, growth, moments, what would lower the peak; the result's summary."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import numpy as np

from profiler_wrapper.place.names import FORWARD_PHASES, PHASES, Phase
from profiler_wrapper.place.optimizer_calls import optimizer_calls
from profiler_wrapper.place.placed import Placed
from profiler_wrapper.place.steps import Steps
from profiler_wrapper.tables.memory.blocks import OwnedMemory
from profiler_wrapper.tables.memory.events import NEVER, DeviceMemory, device_name
from profiler_wrapper.tables.model import (
    BEFORE_PROFILING,
    CATEGORIES,
    Change,
    ChangeKind,
    Curve,
    Leak,
    Memory,
    MemoryMoment,
    MemoryUse,
    Owner,
    Slope,
    StepTime,
)
from profiler_wrapper.trace.arrays import at, marked, sum_by_key
from profiler_wrapper.trace.marks import MEMORY_POINT
from profiler_wrapper.trace.recording import Bool, Category, Int32, Int64, Recording
from profiler_wrapper.units import file_size

# --- Memory over time in as many points as a page can show, as plain numbers ---

_MOST_POINTS = 1500
_STRETCHES = 500  # of as many events each; the highest and the lowest of each are shown
_PAUSES = 400  # the longest ones: what is held in them is shown exactly
_MOST_PHASES = 1000  # where there are more, none can be told from the next


def memory_curve(use: MemoryUse) -> Curve:
    """What is held from each of some times on, until the next: by category, which add up, and in all.

    Times are microseconds since `start_ns`, the begin of the recording on the trace's clock. Each point is
    what is held after one event. The highest in all, the highest reserved, the highest of each step and
    the highest and lowest of each stretch of events are among them. Categories that never hold anything
    are left out.
    """
    timeline = use.timeline
    times, reserved, begin_ns, end_ns = timeline.time_ns, timeline.reserved_bytes, use.begin_ns, use.end_ns
    events = points_of(use, most=_MOST_POINTS)
    held = dict(zip(CATEGORIES, timeline.bytes_by_category, strict=True))
    phases = timeline.phase_starts if len(timeline.phase_starts) <= _MOST_PHASES else ()
    return {
        "start_ns": begin_ns,
        "end_us": (end_ns - begin_ns) / 1000,
        "events": len(timeline.time_ns),
        "time_us": ((times[events] - begin_ns) / 1000).tolist(),
        "allocated_bytes": timeline.total_bytes[events].tolist(),
        "reserved_bytes": None if reserved is None else reserved[events].tolist(),
        "categories": {name: sizes[events].tolist() for name, sizes in held.items() if sizes.any()},
        "steps": [
            {"step": step.number, "start_us": (step.start_ns - begin_ns) / 1000, "end_us": (end - begin_ns) / 1000}
            for step in use.steps
            if (end := min(step.end_ns, end_ns)) > step.start_ns
        ],
        "phases": [{"phase": phase, "start_us": (start_ns - begin_ns) / 1000} for start_ns, phase in phases],
    }


def points_of(use: MemoryUse, *, most: int) -> Int64:
    """The events to show, ascending: all of them, or where there are more than `most`, those that matter."""
    times, total, reserved = use.timeline.time_ns, use.timeline.total_bytes, use.timeline.reserved_bytes
    count = len(times)
    if count <= most:
        return np.arange(count)
    marked = [0, count - 1, int(total.argmax()), *([] if reserved is None else [int(reserved.argmax())])]
    pauses = np.argsort(-np.diff(times), kind="stable")[:_PAUSES]  # the same ones of equal pauses on any machine
    bounds = np.linspace(0, count, min(_STRETCHES, (most - _PAUSES - len(marked)) // 2) + 1).astype(np.int64)
    extremes = [
        first + int(find(total[first:end]))
        for first, end in pairwise(bounds.tolist())
        for find in (np.argmax, np.argmin)
    ]
    chosen = np.unique(np.concatenate([marked, pauses, extremes]))
    in_steps = [np.searchsorted(times, [step.start_ns, step.end_ns]).tolist() for step in use.steps]
    peaks = [first + int(total[first:end].argmax()) for first, end in in_steps if end > first]
    room = max(0, most - len(chosen))
    return np.sort(np.append(chosen, np.setdiff1d(np.array(peaks, dtype=np.int64), chosen)[:room])).astype(np.int64)


# --- Whether memory grows from step to step, and whose allocations stay ---

_FEWEST_STEPS = 3  # without the first
_FEW_STEPS = 5  # with fewer, the first step counts too, and a leak has to be in every one
_MOST_RARE = 0.4  # of the steps: a leak may come in every second one
_SMALLEST_LEAK_BYTES = 1024  # a step: a list of losses is none

# Two-sided 95 % quantiles of Student's t for 1 to 10 degrees of freedom (any table of it).
_STUDENT = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)
_NORMAL = 1.959964


def student_quantile(degrees_of_freedom: int) -> float:
    """The two-sided 95 % quantile of Student's t, to 0.1 %.

    Beyond ten degrees of freedom by the expansion of Cornish and Fisher (Abramowitz and Stegun 26.7.5).
    """
    n, z = degrees_of_freedom, _NORMAL
    if n <= len(_STUDENT):
        return _STUDENT[n - 1]
    return z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)


def slope_of(owned: OwnedMemory, steps: Steps) -> Slope | None:
    """The least-squares line through what is allocated at the ends of the steps; None for fewer than two.

    Of more than three the first is left out: it makes what is kept on purpose.
    """
    ends = steps.end_ns[1:] if len(steps) > _FEWEST_STEPS else steps.end_ns
    count = len(ends)
    if count < 2:
        return None
    event = np.searchsorted(owned.memory.time_ns, ends, side="right") - 1
    y = at(owned.timeline.total_bytes, event, owned.memory.allocated_at_start).astype(np.float64)
    x = np.arange(count) - (count - 1) / 2
    spread = float(x @ x)
    slope = float(x @ (y - y.mean())) / spread
    error = None
    if count > 2:
        residual = y - y.mean() - slope * x
        deviation = math.sqrt(float(residual @ residual) / (count - 2) / spread)
        error = student_quantile(count - 2) * deviation
    return Slope(bytes_per_step=slope, error_bytes_per_step=error, steps=count)


def find_leaks(owned: OwnedMemory, steps: Steps) -> tuple[tuple[Leak, Int64], ...]:
    """Allocations that stay, step after step, each with its blocks; those that take most first.

    What counts is alive when the recording ends and was made in every step before the last, whose own may yet be
    freed; of five steps or more, in two fifths of them up to the end, without the first: what is made once is kept on
    purpose. What the model or an optimizer still holds when the recording ends is none either, though it may grow (the
    history of L-BFGS).
    """
    few = len(steps) < _FEW_STEPS
    first = 0 if few else 1
    count = len(steps) - 1 - first
    if count < 2:
        return ()
    blocks = owned.blocks
    staying = np.flatnonzero((blocks.freed == blocks.events) & ~blocks.before & ~owned.held_at_end)
    step = steps.place_of(owned.memory.time_ns[blocks.made[staying]]) - first
    inside = (step >= 0) & (step < count)
    staying, step = staying[inside], step[inside]
    if not len(staying):
        return ()
    phases = np.array([-1 if one is None else PHASES.index(one) for one in owned.phases])[blocks.place[staying]]
    keys = np.column_stack([owned.layer[staying], blocks.op[staying], phases, owned.category[staying]])
    _, group, sizes = np.unique(keys, axis=0, return_inverse=True, return_counts=True)
    group = group.reshape(-1)
    leaks: list[tuple[Leak, Int64]] = []
    for members in np.split(np.argsort(group, kind="stable"), np.cumsum(sizes)[:-1]):
        size = int(blocks.size_bytes[staying[members]].sum())
        seen = np.unique(step[members])
        goes_on = len(seen) == count if few else len(seen) >= max(2, _MOST_RARE * count) and seen[-1] >= count - 2
        if not goes_on or size < _SMALLEST_LEAK_BYTES * count:
            continue
        one = int(staying[members[0]])
        leak = Leak(
            layer=owned.layers[int(owned.layer[one])],
            op=blocks.ops[int(blocks.op[one])],
            phase=owned.phases[int(blocks.place[one])] or "other",
            category=CATEGORIES[int(owned.category[one])],
            bytes_per_step=size / count,
            count_per_step=len(members) / count,
            steps=count,
        )
        leaks.append((leak, staying[members]))
    return tuple(sorted(leaks, key=lambda found: -found[0].bytes_per_step))


def find_moments(placed: Placed, owned: OwnedMemory) -> tuple[MemoryMoment, ...]:
    """The moments of each step, as far as it has them, and those that somebody asked for, in order of time.

    "after forward": where backward begins, without one where the last outermost layer ends; "after backward":
    where the last node of autograd ends; "after optimizer": where the last step of an optimizer ends. Moments
    that the loop asks for have the name it gives them.
    """
    recording, spans, steps = placed.recording, placed.recording.spans, placed.steps
    found: list[MemoryMoment] = []

    def add(label: str, step: int | None, time_ns: int) -> None:
        event = int(np.searchsorted(owned.memory.time_ns, time_ns, side="right")) - 1
        found.append(owned.moment(label, step, time_ns, event))

    def extents(chosen: Int64 | Int32) -> list[tuple[int, int]]:
        """Per step the first start and the last end of those that begin in it."""
        step = steps.place_of(spans.start_ns[chosen])
        first, last = (np.full(len(steps) + 1, value) for value in (NEVER, -NEVER))  # the last ones are for no step
        np.minimum.at(first, step, spans.start_ns[chosen])
        np.maximum.at(last, step, spans.end_ns[chosen])
        return list(zip(first[:-1].tolist(), last[:-1].tolist(), strict=True))

    nodes, stepped = np.flatnonzero(placed.attribution.is_node), optimizer_calls(recording, "step")
    of_steps = (extents(chosen) for chosen in (nodes, placed.calls.outermost, stepped))
    for number, backward, forward, optimizer in zip(steps.number, *of_steps, strict=True):
        if backward[0] < NEVER:
            add("after forward", number, backward[0] - 1)
            add("after backward", number, backward[1])
        elif forward[0] < NEVER:
            add("after forward", number, forward[1])
        if optimizer[0] < NEVER:
            add("after optimizer", number, optimizer[1])
    is_point = recording.named(lambda name: name.startswith(MEMORY_POINT))
    asked = np.flatnonzero(is_point & (spans.category <= Category.ANNOTATION))
    for point, time_ns in zip(asked.tolist(), spans.start_ns[asked].tolist(), strict=True):
        add(recording.name_of(point).removeprefix(MEMORY_POINT), steps.number_at(time_ns), time_ns)
    return tuple(sorted(found, key=lambda moment: moment.time_ns))


# --------------------------------------------------------------------------------------------------
# What would lower the peak, from the numbers of this very run.
#
# A change saves no more than brings the peak down to what the next highest moment needs, where that holds
# less of what the change removes.

_MOST_CHANGES = 5
_WORTH_IT = 0.01  # of the peak
_CHUNKS = 8  # into which a loss is cut: one of them is held at a time
_STATE_KEPT = 4  # a state of 8 bits is a quarter of one of 32
_LARGE_STATE = 0.1  # of the peak

_ACTIVATION, _GRADS, _OS_STATE, _WORKSPACE = map(CATEGORIES.index, ("activation", "grads", "os_state", "workspace"))


def find_changes(
    placed: Placed, owned: OwnedMemory, peak: int, leaks: Sequence[tuple[Leak, Int64]]
) -> tuple[Change, ...]:
    """The changes that save at least a hundredth of the peak (which is after event `peak`), best first.

    Of the leaks, the largest first, only so many are looked at as changes are listed.
    """
    possible = _Changes(placed, owned, peak, leaking=[blocks for _, blocks in leaks])
    changes = [
        possible.checkpoint(),
        possible.no_grad(),
        possible.free_grads(),
        possible.chunk_loss(),
        possible.smaller_batch(),
        possible.update_in_place(),
        possible.small_state(),
        *(possible.leak(leak, blocks) for leak, blocks in leaks[:_MOST_CHANGES]),
    ]
    least = max(1.0, _WORTH_IT * float(owned.timeline.total_bytes[peak]))  # same (1.0 -> 2.0): no change saves a byte
    worth = [change for change in changes if change is not None and change.saves_bytes >= least]
    return tuple(sorted(worth, key=lambda change: -change.saves_bytes)[:_MOST_CHANGES])


class _Changes:
    """One change a method, None where it does not apply. What leaks is none of the other changes' business."""

    def __init__(self, placed: Placed, owned: OwnedMemory, peak: int, *, leaking: Sequence[Int64]) -> None:
        self.placed, self.owned, self.peak = placed, owned, peak
        self.layers, places = placed.tree.layers, placed.attribution.places
        self.block_of_place = np.array([placed.tree.block_of(place.chain) for place in places], dtype=np.int64)
        self.size, self.category = owned.blocks.size_bytes, owned.category
        self.at_peak = marked(len(self.size), owned.blocks.alive_after(peak))
        self.alive = self.at_peak & ~marked(len(self.size), np.concatenate([np.empty(0, np.int64), *leaking]))
        self.layer = at(placed.attribution.layer_of_place, owned.blocks.place, -1)
        self.by_forward = self._made_in(*FORWARD_PHASES)
        has_backward = bool(placed.attribution.is_node.any())
        # Ops in forward have sequence numbers where gradients are on; one without a backward may have broken off.
        forward = at(placed.attribution.in_phases(*FORWARD_PHASES), placed.attribution.place_of, False)
        followed = forward[placed.recording.spans.sequence >= 0].any() * len(placed.calls.outermost)
        self.trains = has_backward or followed > 0
        self.infers = not has_backward and followed > 1

    def checkpoint(self) -> Change | None:
        """Keep of each block what the next one reads, and run it again in backward: one at a time."""
        block = at(self.block_of_place, self.owned.blocks.place, -1)
        kept = (self.category == _ACTIVATION) & self.by_forward & (block >= 0)
        chosen = np.flatnonzero(kept & self.alive)
        if not self.trains or not len(chosen):
            return None
        ids, row = np.unique(block[chosen], return_inverse=True)
        output = np.zeros(len(ids), dtype=np.int64)
        output[row] = self.size[chosen]  # ascending in time: the last one of each stays
        freed = sum_by_key(row, self.size[chosen], len(ids)) - output
        names = [self.layers[i].name for i in sorted(ids.tolist(), key=lambda i: self.layers[i].order)]
        blocks = f"the {len(names)} blocks {names[0]} to {names[-1]}" if len(names) > 1 else f"the block {names[0]}"
        text = f"checkpoint {blocks}: their forward runs again in backward"
        saves = int(freed.sum() - freed.max())
        return self._change("checkpoint", text, kept, saves, layers=names, costs_ns=self._forward_time({*ids.tolist()}))

    def no_grad(self) -> Change | None:
        """Without gradients a layer keeps nothing but what it returns: here all but the largest goes."""
        kept = (self.category == _ACTIVATION) & self.by_forward & (self.layer >= 0)
        chosen = np.flatnonzero(kept & self.alive)
        if not self.infers or not len(chosen):
            return None
        held = np.bincount(self.layer[chosen], weights=self.size[chosen])
        text = "run it under torch.no_grad(): no backward came"
        return self._change("no_grad", text, kept, int(held.sum() - held.max()), costs_ns=0)

    def free_grads(self) -> Change | None:
        """Gradients of the step before that are there while forward runs."""
        timeline, time_ns = self.owned.timeline, self.owned.memory.time_ns
        peak_ns = int(time_ns[self.peak])
        if timeline.phase_at(peak_ns) not in FORWARD_PHASES:
            return None
        forward_ns = max(start_ns for start_ns, _ in timeline.phase_starts if start_ns <= peak_ns)
        grads = (self.category == _GRADS) & (at(time_ns, self.owned.blocks.made, -NEVER) < forward_ns)
        text = "free the gradients before forward: zero_grad(set_to_none=True) straight after the optimizer's step"
        return self._change("free_grads", text, grads, costs_ns=0)

    def chunk_loss(self) -> Change | None:
        """What the head and the loss make, where that is more than all other activation."""
        heads = [i for i, layer in enumerate(self.layers) if layer.kind == "head"]
        holding = {layer.parent for layer in self.layers}
        roots = [i for i, layer in enumerate(self.layers) if layer.parent < 0 and i in holding]
        # A loss that the model computes is made by a root itself, below none of its layers.
        loss = (self.category == _ACTIVATION) & (np.isin(self.layer, [*heads, *roots]) | (self.layer < 0))
        held = self._held(loss)
        if not (self.trains and heads) or 2 * held <= self._held(self.category == _ACTIVATION):
            return None
        text = f"compute head and loss in {_CHUNKS} chunks of tokens, or with a fused loss"
        names = [self.layers[i].name for i in heads]
        return self._change("chunk_loss", text, loss, held - held // _CHUNKS, layers=names)

    def smaller_batch(self) -> Change | None:
        """Half of the batch makes half of the activation."""
        activation = self.category == _ACTIVATION
        text = "halve the batch, and accumulate gradients over two" if self.trains else "halve the batch"
        return self._change("smaller_batch", text, activation, self._held(activation) // 2)

    def update_in_place(self) -> Change | None:
        """What an optimizer's step makes for itself."""
        workspace = (self.category == _WORKSPACE) & self._made_in("optimizer")
        text = "let the optimizer update in place: fused=True, else foreach=False"
        return self._change("optimizer_state", text, workspace)

    def small_state(self) -> Change | None:
        """A state of 8 bits, or shared out over ranks."""
        state = self.category == _OS_STATE
        held = self._held(state)
        if held < _LARGE_STATE * int(self.owned.timeline.total_bytes[self.peak]):
            return None
        text = "keep the optimizer's state in 8 bits in place of 32, or shard it over ranks"
        return self._change("optimizer_state", text, state, held - held // _STATE_KEPT)

    def leak(self, leak: Leak, members: Int64) -> Change:
        """What has piled up by the time of the peak."""
        leaking = marked(len(self.alive), members)
        where = leak.layer or "code outside of all layers"
        text = f"let go of what {leak.op or 'something'} in {where} makes in every step"
        held = int(self.size[leaking & self.at_peak].sum())
        return self._change("leak", text, leaking, held, layers=[leak.layer] if leak.layer else (), costs_ns=0)

    def _change(
        self,
        kind: ChangeKind,
        text: str,
        removed: Bool,
        saves: int | None = None,
        *,
        layers: Sequence[str] = (),
        costs_ns: int | None = None,
    ) -> Change:
        """A change that saves what is `removed` at the peak, or `saves` of it.

        At most the way down to the highest moment without all that is `removed`.
        """
        blocks, count = self.owned.blocks, self.owned.blocks.events
        change = sum_by_key(np.maximum(blocks.made[removed], 0), self.size[removed], count + 1)
        change -= sum_by_key(blocks.freed[removed], self.size[removed], count + 1)
        total = self.owned.timeline.total_bytes
        without = max(0, int((total - np.cumsum(change[:count])).max()))
        saves = self._held(removed) if saves is None else saves
        saves_bytes = max(0, min(saves, int(total[self.peak]) - without))
        return Change(kind=kind, text=text, layers=tuple(layers), saves_bytes=saves_bytes, costs_ns=costs_ns)

    def _held(self, chosen: Bool) -> int:
        """Bytes of the chosen blocks at the peak."""
        return int(self.size[chosen & self.alive].sum())

    def _made_in(self, *phases: Phase) -> Bool:
        """Per block: made in one of these phases."""
        return at(self.placed.attribution.in_phases(*phases), self.owned.blocks.place, False)

    def _forward_time(self, blocks: set[int]) -> int | None:
        """Time per step of the forward of these blocks; None without steps."""
        if not len(self.placed.steps):
            return None
        charges, forward = self.placed.charges, self.placed.attribution.in_phases(*FORWARD_PHASES)
        chosen = forward & np.isin(self.block_of_place, list(blocks))
        return int(charges.time_ns[chosen[charges.place]].sum()) // len(self.placed.steps)


# --- What `result.json` says of memory: numbers in bytes, times in nanoseconds on the trace's clock ---

_MOST_OWNERS = 50
_FREES_UNSEEN = (
    "whether memory grows from step to step is not known, and less may be held than is shown: other threads may "
    "have freed memory, which torch.profiler does not record"
)


def memory_summary(use: MemoryUse | None) -> Memory:
    """The `memory` of a result; `categories` are those at the peak. All None where nothing was recorded."""
    if use is None:
        return {"device": None, "allocated_bytes": None, "reserved_bytes": None, "peak": None, "categories": None}
    timeline = use.timeline
    reserved = timeline.reserved_bytes
    return {
        "device": use.device,
        "known_owners": use.known_owners,
        "allocated_bytes": int(timeline.total_bytes[-1]),
        "reserved_bytes": None if reserved is None else int(reserved[-1]),
        "categories": dict(use.peak.categories),
        "peak": {
            "allocated_bytes": use.peak.total_bytes,
            "reserved_bytes": None if reserved is None else int(reserved.max()),
            "time_ns": use.peak.time_ns,
            "step": use.peak.step,
            "phase": timeline.phase_at(use.peak.time_ns),
            "owners": [_renamed(owner, size_bytes="bytes") for owner in use.peak_owners[:_MOST_OWNERS]],
            "reserved": _renamed(use.reserved_peak, total_bytes="allocated_bytes"),
        },
        "moments": [_renamed(moment, total_bytes="allocated_bytes") for moment in use.moments],
        "slope": None if use.slope is None else asdict(use.slope),
        "leaks": None if use.leaks is None else [asdict(leak) for leak in use.leaks],
        "changes": [asdict(change) for change in use.changes],
        "curve": memory_curve(use),
    }


def _renamed(row: MemoryMoment | Owner | None, **names: str) -> Any:
    """Return the fields of a row, some under the names that `result.json` gives them; None for no row."""
    return None if row is None else {names.get(name, name): value for name, value in asdict(row).items()}


# --- Whose bytes, why and when: the memory of one device over a recording ---


def begin_of(recording: Recording) -> int:
    """When the first event of a recording begins, on the trace's clock."""
    spans, memory = recording.spans, recording.memory
    return min(int(times.min()) for times in (spans.start_ns, memory.time_ns) if len(times))


def memory_use(placed: Placed, owned: OwnedMemory, *, frees_unseen: bool = False) -> MemoryUse:
    """Everything known of the memory of the device whose blocks these are."""
    recording, steps, memory = placed.recording, placed.steps, owned.memory
    reserved = owned.timeline.reserved_bytes
    top, last = int(np.argmax(owned.timeline.total_bytes)), _last_moment(recording, memory)
    peak_owners, leaks = owned.owners(top), () if frees_unseen else find_leaks(owned, steps)

    def moment(label: str, event: int) -> MemoryMoment:
        time_ns = int(memory.time_ns[event])
        return owned.moment(label, steps.number_at(time_ns), time_ns, event)

    return MemoryUse(
        device=memory.device,
        known_owners=len(memory.known) > 0,
        timeline=owned.timeline,
        peak=moment("highest allocated", top),
        peak_owners=peak_owners,
        reserved_peak=None if reserved is None else moment("highest reserved", int(np.argmax(reserved))),
        moments=find_moments(placed, owned),
        last=moment("last allocation", last),
        last_owners=peak_owners if last == top else owned.owners(last),
        slope=None if frees_unseen else slope_of(owned, steps),
        leaks=None if frees_unseen else tuple(leak for leak, _ in leaks),
        changes=find_changes(placed, owned, top, leaks),
        notes=(*_notes(owned), *([_FREES_UNSEEN] if frees_unseen else [])),
        begin_ns=begin_of(recording),
        end_ns=max(int(times.max()) for times in (recording.spans.end_ns, recording.memory.time_ns) if len(times)),
        steps=tuple(map(StepTime, steps.number, steps.start_ns.tolist(), steps.end_ns.tolist())),
    )


def _last_moment(recording: Recording, memory: DeviceMemory) -> int:
    """The event before the last allocation that failed on this device; without one, the last allocation."""
    failed = [
        failure.time_ns
        for failure in recording.failed_allocations
        if device_name(failure.device_type, failure.device) == memory.device
    ]
    if failed:
        return max(0, int(np.searchsorted(memory.time_ns, failed[-1], side="right")) - 1)
    made = np.flatnonzero(memory.size_bytes > 0)
    return int(made[-1]) if len(made) else len(memory.size_bytes) - 1


def _notes(owned: OwnedMemory) -> tuple[str, ...]:
    memory = owned.memory
    notes = list(memory.notes)
    if not len(memory.known):
        notes.append(
            "what the model and its optimizers hold is not known: gradients and optimizer state are inferred from "
            f"what stays, and what was there before the recording is '{BEFORE_PROFILING}'"
        )
    if memory.before.outside_bytes:
        notes.append(
            f"{file_size(memory.before.outside_bytes)} of what the model and its optimizers hold lie outside of what "
            "the allocator had given out when the recording began (memory of another allocator or process): "
            "they are not counted"
        )
    if owned.lost_bytes:
        notes.append(
            f"the trace lacks frees: at one moment {file_size(owned.lost_bytes)} more seem to be held than the "
            "allocator has given out; the largest categories are less by as much"
        )
    return tuple(notes)
