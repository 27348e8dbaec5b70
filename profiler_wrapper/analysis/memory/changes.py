"""What would lower the peak, from the numbers of this very run.

A change saves no more than brings the peak down to what the next highest moment needs, where that holds
less of what the change removes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from profiler_wrapper.analysis.attributed import Attributed
from profiler_wrapper.analysis.memory.blocks import OwnedMemory
from profiler_wrapper.analysis.memory.events import NEVER
from profiler_wrapper.analysis.model import CATEGORIES, FORWARD_PHASES, Change, ChangeKind, Leak, Phase
from profiler_wrapper.analysis.statistics import at, sum_by_key
from profiler_wrapper.trace.recording import Bool, Int64

_MOST = 5
_WORTH_IT = 0.01  # of the peak
_CHUNKS = 8  # into which a loss is cut: one of them is held at a time
_STATE_KEPT = 4  # a state of 8 bits is a quarter of one of 32
_LARGE_STATE = 0.1  # of the peak

_ACTIVATION, _GRADS, _OS_STATE, _WORKSPACE = map(CATEGORIES.index, ("activation", "grads", "os_state", "workspace"))


def find_changes(
    attributed: Attributed, owned: OwnedMemory, peak: int, leaks: Sequence[tuple[Leak, Int64]]
) -> tuple[Change, ...]:
    """The changes that save at least a hundredth of the peak (which is after event `peak`), best first.

    Of the leaks, the largest first, only so many are looked at as changes are listed.
    """
    possible = _Changes(attributed, owned, peak, leaking=[blocks for _, blocks in leaks])
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


class _Changes:
    """One change a method, None where it does not apply. What leaks is none of the other changes' business."""

    def __init__(self, attributed: Attributed, owned: OwnedMemory, peak: int, *, leaking: Sequence[Int64]) -> None:
        self.attributed, self.owned, self.peak = attributed, owned, peak
        self.layers = attributed.tree.layers
        self.size, self.category = owned.blocks.size_bytes, owned.category
        self.alive = np.zeros(len(self.size), dtype=np.bool_)
        self.alive[owned.blocks.alive_after(peak)] = True
        self.leaking = np.zeros_like(self.alive)
        for members in leaking:
            self.leaking[members] = self.alive[members]
        self.alive &= ~self.leaking
        self.layer = at(attributed.attribution.layer_of_place, owned.blocks.place, -1)
        self.by_forward = self._made_in(*FORWARD_PHASES)
        has_backward = bool(attributed.attribution.is_node.any())
        followed = _forwards_followed(attributed)  # one without a backward may have broken off before it
        self.trains = has_backward or followed > 0
        self.infers = not has_backward and followed > 1

    def checkpoint(self) -> Change | None:
        """Keep of each block what the next one reads, and run it again in backward: one at a time."""
        block = at(np.array([layer.block for layer in self.layers], dtype=np.int64), np.maximum(self.layer, -1), -1)
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
        leaking = np.zeros_like(self.alive)
        leaking[members] = True
        where = leak.layer or "code outside of all layers"
        text = f"let go of what {leak.op or 'something'} in {where} makes in every step"
        held = int(self.size[leaking & self.leaking].sum())
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
        return at(self.attributed.attribution.in_phases(*phases), self.owned.blocks.place, False)

    def _forward_time(self, blocks: set[int]) -> int | None:
        """Time per step of the forward of these blocks; None without steps."""
        if not len(self.attributed.steps):
            return None
        places, charges = self.attributed.attribution.places, self.attributed.charges
        chosen = np.array(
            [p.phase in FORWARD_PHASES and p.layer >= 0 and self.layers[p.layer].block in blocks for p in places],
            dtype=np.bool_,
        )
        return int(charges.time_ns[chosen[charges.place]].sum()) // len(self.attributed.steps)


def _forwards_followed(attributed: Attributed) -> int:
    """Outermost calls outside of backward, if ops in forward have sequence numbers: they get them with gradients on."""
    forward = at(attributed.attribution.in_phases(*FORWARD_PHASES), attributed.attribution.place_of, False)
    return len(attributed.calls.outermost) if forward[attributed.recording.spans.sequence >= 0].any() else 0
