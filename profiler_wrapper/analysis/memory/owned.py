"""Every block of memory with its category and owner, and what they add up to at any moment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from profiler_wrapper.analysis.attribution import Attribution
from profiler_wrapper.analysis.layer_tree import LayerTree
from profiler_wrapper.analysis.memory.blocks import Blocks, held_at_end
from profiler_wrapper.analysis.memory.categories import Categories
from profiler_wrapper.analysis.memory.events import DeviceMemory
from profiler_wrapper.analysis.model import (
    BEFORE_PROFILING,
    CATEGORIES,
    MemoryCategory,
    MemoryMoment,
    MemoryTimeline,
    Owner,
    Phase,
)
from profiler_wrapper.trace.recording import Bool, Int32, Int64

_OTHER = CATEGORIES.index("other")


@dataclass(frozen=True, slots=True, eq=False)
class OwnedMemory:
    """Every block with its category and owner: what all of `MemoryUse` is made from."""

    memory: DeviceMemory
    blocks: Blocks
    categories: Categories
    layer: Int32  # per block: index into `layers`
    layers: tuple[str, ...]  # full names; the last is "", for what has none
    phases: tuple[Phase | None, ...]  # by Attribution.places; the last is that of what was there before
    timeline: MemoryTimeline
    at_start: Int64  # shape (categories,): what is held before the first event
    lost_bytes: int  # by which, at most, the blocks that seem alive exceed what the allocator has given out

    @property
    def held_at_end(self) -> Bool:
        """Per block: listed as held when the recording ended."""
        return held_at_end(self.memory, self.blocks)

    def moment(self, label: str, step: int | None, time_ns: int, event: int) -> MemoryMoment:
        """What is held after an event; -1 for what was held before the first."""
        timeline = self.timeline
        held = timeline.bytes_by_category[:, event] if event >= 0 else self.at_start
        total = int(timeline.total_bytes[event]) if event >= 0 else self.memory.allocated_at_start
        reserved = None if timeline.reserved_bytes is None else int(timeline.reserved_bytes[max(event, 0)])
        categories: dict[MemoryCategory, int] = dict(zip(CATEGORIES, held.tolist(), strict=True))
        return MemoryMoment(
            label=label, step=step, time_ns=time_ns, total_bytes=total, reserved_bytes=reserved, categories=categories
        )

    def owners(self, event: int) -> tuple[Owner, ...]:
        """Who holds what after an event, the largest first; adds up to the total."""
        blocks, known = self.blocks, self.memory.known
        alive = blocks.alive_after(event)
        keys = np.column_stack(
            [self.categories.category, self.layer, self.categories.name, blocks.op, blocks.place]
        ).astype(np.int64)[alive]
        rows, row_of = np.unique(keys, axis=0, return_inverse=True)
        sizes, counts = np.zeros(len(rows), dtype=np.int64), np.zeros(len(rows), dtype=np.int64)
        np.add.at(sizes, row_of.reshape(-1), blocks.size_bytes[alive])
        np.add.at(counts, row_of.reshape(-1), 1)
        summed: dict[tuple[MemoryCategory, str, str, str, Phase | None], list[int]] = {}
        for row, size, count in zip(rows.tolist(), sizes.tolist(), counts.tolist(), strict=True):
            category, layer, name, op, place = row
            tensor = known.names[name] if name >= 0 else ""
            key = (CATEGORIES[category], self.layers[layer], tensor, blocks.ops[op], self.phases[place])
            entry = summed.setdefault(key, [0, 0])
            entry[0] += size
            entry[1] += count
        for category_name, size in zip(CATEGORIES, self.timeline.bytes_by_category[:, event].tolist(), strict=True):
            _cut([entry for key, entry in summed.items() if key[0] == category_name], size)
        for op, size in self._unexplained(event):
            entry = summed.setdefault(("other", "", "", op, None), [0, 0])
            entry[0] += size
            entry[1] += 1
        owners = [
            Owner(category=c, layer=layer, name=name, op=op, phase=phase, size_bytes=size, count=count)
            for (c, layer, name, op, phase), (size, count) in summed.items()
            if size
        ]
        return tuple(sorted(owners, key=lambda owner: -owner.size_bytes))

    def _unexplained(self, event: int) -> list[tuple[str, int]]:
        """What the allocator has given out that no block accounts for: (op, bytes), from the start and since."""
        blocks = self.blocks
        is_other = self.categories.category == _OTHER
        alive = blocks.alive_after(event)
        alive_bytes = int(blocks.size_bytes[alive[is_other[alive]]].sum())
        unexplained = max(0, int(self.timeline.bytes_by_category[_OTHER, event]) - alive_bytes)
        at_start = int(self.at_start[_OTHER]) - int(blocks.size_bytes[blocks.before & is_other].sum())
        from_start = min(unexplained, max(0, at_start))
        return [(BEFORE_PROFILING, from_start), ("", unexplained - from_start)]


def own(
    tree: LayerTree,
    attribution: Attribution,
    memory: DeviceMemory,
    blocks: Blocks,
    categories: Categories,
    phases: tuple[tuple[int, Phase], ...],
) -> OwnedMemory:
    """Blocks and their categories, with the layers they belong to; `phases`: when phases begin."""
    layer, layers = _layers_of_blocks(tree, attribution, memory, blocks, categories)
    of_place: tuple[Phase | None, ...] = (*(place.phase for place in attribution.places), None)
    held, lost_bytes = _held(memory, blocks, categories)
    timeline = MemoryTimeline(
        time_ns=memory.time_ns,
        bytes_by_category=held[:, 1:],
        total_bytes=memory.allocated,
        reserved_bytes=None if memory.device == "cpu" else memory.reserved,
        phase_starts=phases,
    )
    return OwnedMemory(memory, blocks, categories, layer, layers, of_place, timeline, held[:, 0], lost_bytes)


def _held(memory: DeviceMemory, blocks: Blocks, categories: Categories) -> tuple[Int64, int]:
    """Bytes by category before the first event and after each, and by how much they were too many at most.

    What no block accounts for is `other`. Where the blocks are more than the allocator has given out (the
    trace lost their frees), the largest categories are cut. So none is negative and they make the total.
    """
    count = blocks.events
    held = np.zeros((len(CATEGORIES), count + 2), dtype=np.int64)
    rows = categories.category.astype(np.int64)
    np.add.at(held, (rows, blocks.made + 1), blocks.size_bytes)
    np.add.at(held, (rows, blocks.freed + 1), -blocks.size_bytes)
    held = np.cumsum(held, axis=1, out=held)[:, : count + 1]
    missing = np.concatenate([[memory.allocated_at_start], memory.allocated]) - held.sum(axis=0)
    held[_OTHER] += np.maximum(missing, 0)
    too_many = np.flatnonzero(missing < 0)
    if not len(too_many):
        return held, 0
    order = np.argsort(-held[:, too_many], axis=0, kind="stable")
    sizes = np.take_along_axis(held[:, too_many], order, axis=0)
    cut = np.clip(-missing[too_many] - (np.cumsum(sizes, axis=0) - sizes), 0, sizes)
    left = np.empty_like(sizes)
    np.put_along_axis(left, order, sizes - cut, axis=0)
    held[:, too_many] = left
    return held, int(-missing.min())


def _cut(entries: list[list[int]], size_bytes: int) -> None:
    """Makes entries (bytes, count) no more than `size_bytes` in all, the largest first."""
    excess = sum(size for size, _ in entries) - size_bytes
    for entry in sorted(entries, key=lambda entry: -entry[0]):
        if excess <= 0:
            return
        cut = min(excess, entry[0])
        entry[0] -= cut
        excess -= cut


def _layers_of_blocks(
    tree: LayerTree, attribution: Attribution, memory: DeviceMemory, blocks: Blocks, categories: Categories
) -> tuple[Int32, tuple[str, ...]]:
    """Per block the layer: of the tensor where that is known by name, else the one that made it."""
    layers = (*(layer.name for layer in tree.layers), *tree.not_entered, "")
    nowhere = len(layers) - 1
    of_place = [place.layer if place.layer >= 0 else nowhere for place in attribution.places]
    layer = np.array([*of_place, nowhere], dtype=np.int32)[blocks.place]
    of_name = np.array([*_layers_of_names(tree, memory.known.names), -1], dtype=np.int32)[categories.name]
    return np.where(of_name >= 0, of_name, layer).astype(np.int32), layers


def _layers_of_names(tree: LayerTree, names: Sequence[str]) -> list[int]:
    """Per tensor's name the deepest layer that holds it, entered or not; -1 where there is none."""
    by_name = {**{layer.raw_name: i for i, layer in enumerate(tree.layers)}, **tree.by_name()}
    by_name |= {name: len(tree.layers) + i for i, name in enumerate(tree.not_entered) if name not in by_name}
    roots = [i for i, layer in enumerate(tree.layers) if layer.parent < 0]
    found = []
    for name in names:
        path = name.rpartition(" of ")[2]
        layer = -1
        while layer < 0 and "." in path:
            path = path.rpartition(".")[0]
            layer = by_name.get(path, -1)
        if layer < 0 and len(roots) == 1:
            layer = roots[0]
        found.append(layer)
    return found
