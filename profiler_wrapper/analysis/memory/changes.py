"""What would lower the peak, from the numbers of this very run.

A change saves no more than brings the peak down to what the next highest moment needs, where that holds
less of what the change removes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from profiler_wrapper.analysis.attributed import Attributed
from profiler_wrapper.analysis.memory.owned import OwnedMemory
from profiler_wrapper.analysis.model import CATEGORIES, FORWARD_PHASES, Change, Leak
from profiler_wrapper.trace.recording import Bool, Int64

_MOST = 5
_WORTH_IT = 0.01  # of the peak
_CHUNKS = 8  # into which a loss is cut: one of them is held at a time
_STATE_KEPT = 4  # a state of 8 bits is a quarter of one of 32
_LARGE_STATE = 0.1  # of the peak

_ACTIVATION = CATEGORIES.index("activation")
_GRADS = CATEGORIES.index("grads")
_OS_STATE = CATEGORIES.index("os_state")
_WORKSPACE = CATEGORIES.index("workspace")


def find_changes(
    found: Attributed, owned: OwnedMemory, peak: int, leaks: Sequence[tuple[Leak, Int64]]
) -> tuple[Change, ...]:
    """The changes that save at least a hundredth of the peak (which is after event `peak`), best first.

    Of the leaks, the largest first, only so many are looked at as changes are told.
    """
    possible = _Changes(found, owned, peak, leaking=[blocks for _, blocks in leaks])
    changes = [
        possible.checkpoint(),
        possible.no_grad(),
        possible.free_grads(),
        possible.chunk_loss(),
        possible.smaller_batch(),
        possible.update_in_place(),
        possible.small_state(),
        *(possible.leak(leak, blocks) for leak, blocks in leaks[:_MOST]),
    ]
    least = max(1.0, _WORTH_IT * float(owned.timeline.total_bytes[peak]))
    worth = [change for change in changes if change is not None and change.saves_bytes >= least]
    return tuple(sorted(worth, key=lambda change: -change.saves_bytes)[:_MOST])


def _forwards_followed(found: Attributed) -> int:
    """Outermost calls outside of backward, if ops in forward have sequence numbers: they get them with gradients on."""
    attribution, calls = found.attribution, found.calls
    forward = np.array([place.phase in FORWARD_PHASES for place in attribution.places], dtype=np.bool_)
    numbered = np.flatnonzero((found.recording.spans.sequence >= 0) & (attribution.place_of >= 0))
    if not forward[attribution.place_of[numbered]].any():
        return 0
    return int(((calls.parent < 0) & (attribution.node_of[calls.span] < 0)).sum())


class _Changes:
    """What leaks is none of the other changes' business."""

    def __init__(self, found: Attributed, owned: OwnedMemory, peak: int, *, leaking: Sequence[Int64]) -> None:
        self.tree, self.attribution = found.tree, found.attribution
        self.charges, self.steps = found.charges, found.steps
        self.owned, self.peak = owned, peak
        blocks = owned.blocks
        self.size, self.category = blocks.size_bytes, owned.categories.category
        self.alive = np.zeros(len(blocks), dtype=np.bool_)
        self.alive[blocks.alive_after(peak)] = True
        self.leaking = np.zeros(len(blocks), dtype=np.bool_)
        for members in leaking:
            self.leaking[members] = self.alive[members]
        self.alive &= ~self.leaking
        places = self.attribution.places
        forward = [place.phase in FORWARD_PHASES for place in places] + [False]
        self.by_forward = np.array(forward, dtype=np.bool_)[blocks.place]
        self.layer = np.array([place.layer for place in places] + [-1], dtype=np.int64)[blocks.place]
        has_backward = bool(self.attribution.is_node.any())
        followed = _forwards_followed(found)  # one without a backward may have broken off before it
        self.trains = has_backward or followed > 0
        self.infers = not has_backward and followed > 1

    def checkpoint(self) -> Change | None:
        """Keep of each block what the next one reads, and run it again in backward: one at a time."""
        block_of_layer = np.array([layer.block for layer in self.tree.layers] + [-1], dtype=np.int64)
        block = block_of_layer[np.maximum(self.layer, -1)]
        kept = (self.category == _ACTIVATION) & self.by_forward & (block >= 0)
        chosen = np.flatnonzero(kept & self.alive)
        if not self.trains or not len(chosen):
            return None
        ids, row = np.unique(block[chosen], return_inverse=True)
        held = np.zeros(len(ids), dtype=np.int64)
        np.add.at(held, row, self.size[chosen])
        output = np.zeros(len(ids), dtype=np.int64)
        output[row] = self.size[chosen]  # ascending in time: the last one of each stays
        freed = held - output
        saves = self._bounded(int(freed.sum() - freed.max()), kept)
        names = tuple(self.tree.layers[i].name for i in sorted(ids.tolist(), key=lambda i: self.tree.layers[i].order))
        blocks = f"the {len(names)} blocks {names[0]} to {names[-1]}" if len(names) > 1 else f"the block {names[0]}"
        return Change(
            kind="checkpoint",
            text=f"checkpoint {blocks}: their forward runs again in backward",
            layers=names,
            saves_bytes=saves,
            costs_ns=self._forward_time(set(ids.tolist())),
        )

    def no_grad(self) -> Change | None:
        """Without gradients a layer keeps nothing but what it returns: here all but the largest goes."""
        if not self.infers:
            return None
        kept = (self.category == _ACTIVATION) & self.by_forward & (self.layer >= 0)
        chosen = np.flatnonzero(kept & self.alive)
        if not len(chosen):
            return None
        held = np.bincount(self.layer[chosen], weights=self.size[chosen])
        return Change(
            kind="no_grad",
            text="run it under torch.no_grad(): no backward came",
            layers=(),
            saves_bytes=self._bounded(int(held.sum() - held.max()), kept),
            costs_ns=0,
        )

    def free_grads(self) -> Change | None:
        """Gradients of the step before that are there while forward runs."""
        blocks = self.owned.blocks
        forward_starts, forward_ends = self._forward_intervals()
        if not len(forward_starts):
            return None
        peak_ns = int(self.owned.memory.time_ns[self.peak])
        place = int(np.searchsorted(forward_starts, peak_ns, side="right")) - 1
        if place < 0 or peak_ns >= forward_ends[place]:
            return None
        made_before = self._made_ns() < forward_starts[place]
        grads = (self.category == _GRADS) & (made_before | blocks.before)
        return Change(
            kind="free_grads",
            text="free the gradients before forward: zero_grad(set_to_none=True) straight after the optimizer's step",
            layers=(),
            saves_bytes=self._bounded(int(self.size[grads & self.alive].sum()), grads),
            costs_ns=0,
        )

    def chunk_loss(self) -> Change | None:
        """What the head and the loss make, where that is more than all other activation."""
        heads = {i for i, layer in enumerate(self.tree.layers) if layer.kind == "head"}
        of_head = np.isin(self.layer, list(heads)) | (self.layer < 0) | self._by_a_root()
        activation = self.category == _ACTIVATION
        loss = activation & of_head
        held = int(self.size[loss & self.alive].sum())
        if not (self.trains and heads) or 2 * held <= int(self.size[activation & self.alive].sum()):
            return None
        return Change(
            kind="chunk_loss",
            text=f"compute head and loss in {_CHUNKS} chunks of tokens, or with a fused loss",
            layers=tuple(self.tree.layers[i].name for i in sorted(heads)),
            saves_bytes=self._bounded(held - held // _CHUNKS, loss),
            costs_ns=None,
        )

    def smaller_batch(self) -> Change | None:
        """Half of the batch makes half of the activation."""
        activation = self.category == _ACTIVATION
        return Change(
            kind="smaller_batch",
            text="halve the batch, and accumulate gradients over two" if self.trains else "halve the batch",
            layers=(),
            saves_bytes=self._bounded(int(self.size[activation & self.alive].sum()) // 2, activation),
            costs_ns=None,
        )

    def update_in_place(self) -> Change | None:
        """What an optimizer's step makes for itself."""
        optimizer = np.array([p.phase == "optimizer" for p in self.attribution.places] + [False], dtype=np.bool_)
        workspace = (self.category == _WORKSPACE) & optimizer[self.owned.blocks.place]
        return Change(
            kind="optimizer_state",
            text="let the optimizer update in place: fused=True, else foreach=False",
            layers=(),
            saves_bytes=self._bounded(int(self.size[workspace & self.alive].sum()), workspace),
            costs_ns=None,
        )

    def small_state(self) -> Change | None:
        """A state of 8 bits, or shared out over ranks."""
        state = self.category == _OS_STATE
        held = int(self.size[state & self.alive].sum())
        if held < _LARGE_STATE * int(self.owned.timeline.total_bytes[self.peak]):
            return None
        return Change(
            kind="optimizer_state",
            text="keep the optimizer's state in 8 bits in place of 32, or shard it over ranks",
            layers=(),
            saves_bytes=self._bounded(held - held // _STATE_KEPT, state),
            costs_ns=None,
        )

    def leak(self, leak: Leak, members: Int64) -> Change:
        """What has piled up by the time of the peak."""
        leaking = np.zeros(len(self.size), dtype=np.bool_)
        leaking[members] = True
        held = int(self.size[leaking & self.leaking].sum())
        where = leak.layer or "code outside of all layers"
        return Change(
            kind="leak",
            text=f"let go of what {leak.op or 'something'} in {where} makes in every step",
            layers=(leak.layer,) if leak.layer else (),
            saves_bytes=self._bounded(held, leaking),
            costs_ns=0,
        )

    def _bounded(self, saves: int, removed: Bool) -> int:
        """What is saved at the peak, at most the way down to the highest moment without all that is `removed`."""
        blocks, count = self.owned.blocks, self.owned.blocks.events
        change = np.zeros(count + 1, dtype=np.int64)
        np.add.at(change, np.maximum(blocks.made[removed], 0), self.size[removed])
        np.add.at(change, blocks.freed[removed], -self.size[removed])
        total = self.owned.timeline.total_bytes
        without = max(0, int((total - np.cumsum(change[:count])).max()))
        return max(0, min(saves, int(total[self.peak]) - without))

    def _forward_time(self, blocks: set[int]) -> int | None:
        """Time per step of the forward of these blocks; None without steps."""
        if not len(self.steps):
            return None
        places = self.attribution.places
        chosen = np.array(
            [p.phase in FORWARD_PHASES and p.layer >= 0 and self.tree.layers[p.layer].block in blocks for p in places],
            dtype=np.bool_,
        )
        return int(self.charges.time_ns[chosen[self.charges.place]].sum()) // len(self.steps)

    def _forward_intervals(self) -> tuple[Int64, Int64]:
        starts = self.owned.timeline.phase_starts
        ends = [*(time for time, _ in starts[1:]), np.iinfo(np.int64).max]
        forward = [(time, end) for (time, phase), end in zip(starts, ends, strict=False) if phase in FORWARD_PHASES]
        columns = np.array(forward, dtype=np.int64).reshape(-1, 2)
        return columns[:, 0], columns[:, 1]

    def _made_ns(self) -> Int64:
        return np.append(self.owned.memory.time_ns, np.iinfo(np.int64).min)[self.owned.blocks.made]

    def _by_a_root(self) -> Bool:
        """Made by a root itself, below none of its layers: a loss that the model computes."""
        holding = {layer.parent for layer in self.tree.layers}
        roots = [i for i, layer in enumerate(self.tree.layers) if layer.parent < 0 and i in holding]
        mask: Bool = np.isin(self.layer, roots)
        return mask
