"""What would lower the peak: each change on a step written by hand."""

from __future__ import annotations

import pytest

import memory_recordings
from memory_recordings import use_in_any_order as use_of
from profiler_wrapper.tables.memory import use as memory_use
from profiler_wrapper.tables.model import Change, Leak, MemoryUse
from profiler_wrapper.trace.recording import Int64
from recordings import AUTOGRAD, Trace

OPTIMIZER = "Optimizer.step#AdamW.step"
ZERO_GRAD = "Optimizer.zero_grad#AdamW.zero_grad"
KEPT = (400, 300, 100)  # bytes of the allocations of a block's forward that stay: the last is its output


def change(use: MemoryUse, kind: str) -> Change | None:
    return next((change for change in use.changes if change.kind == kind), None)


def blocks(
    trace: Trace, t: int = 0, *, count: int = 3, kept: tuple[int, ...] = KEPT, root: bool = True, backward: bool = True
) -> Trace:
    """A forward of blocks of 100 ns, each with an op of 40, and the backward of it that frees in reverse."""
    number = t
    if root:
        trace.mark(".", t, t + 100 * count + 150)
    addresses = []
    for block in range(count):
        begin = t + 10 + 100 * block
        trace.mark(f"layers.{block}", begin, begin + 90, kind="block")
        trace.op("aten::mm", begin + 10, begin + 50, sequence=number + block, forward_thread=0)
        for i, size in enumerate(kept):
            addresses.append((block, 10_000 * block + 1000 * i, size))
            trace.memory(begin + 20 + i, size, address=addresses[-1][1])
    later = t + 100 * count + 200
    for block in reversed(range(count if backward else 0)):
        trace.node("MmBackward0", later, later + 50, number=number + block)
        for of, address, size in addresses:
            if of == block:
                trace.memory(later + 40, -size, address=address, thread=AUTOGRAD)
        later += 60
    return trace


def test_checkpointing_keeps_the_output_of_each_block_and_one_block_in_full() -> None:
    use = use_of(blocks(Trace()))
    assert use.peak.total_bytes == 2400
    found = change(use, "checkpoint")
    assert found is not None
    assert found.saves_bytes == 3 * 700 - 700  # outputs of 100 stay, and one block while it runs again
    assert found.layers == ("layers.0", "layers.1", "layers.2")
    assert found.costs_ns == 3 * 40  # their forward, once more
    assert "layers.0 to layers.2" in found.text


def test_blocks_may_be_roots() -> None:
    found = change(use_of(blocks(Trace(), root=False)), "checkpoint")
    assert found is not None
    assert (found.saves_bytes, found.costs_ns) == (3 * 700 - 700, 3 * 40)


def test_a_forward_that_broke_off_before_its_backward_trains() -> None:
    use = use_of(blocks(Trace(), backward=False))
    assert change(use, "checkpoint") is not None and change(use, "no_grad") is None


def test_what_costs_forward_is_per_step() -> None:
    trace = blocks(blocks(Trace(), 0), 1000)
    for step in range(2):
        trace.annotation(f"ProfilerStep#{step}", 1000 * step, 1000 * step + 900)
    found = change(use_of(trace), "checkpoint")
    assert found is not None
    assert found.costs_ns == 3 * 40


def test_a_single_block_or_blocks_that_keep_only_their_output_need_no_checkpoint() -> None:
    assert change(use_of(blocks(Trace(), count=1)), "checkpoint") is None
    assert change(use_of(blocks(Trace(), kept=(100,))), "checkpoint") is None


def test_inference_needs_no_checkpoint() -> None:
    trace = Trace().mark(".", 0, 300)
    for block in range(2):
        trace.mark(f"layers.{block}", 10 + 100 * block, 90 + 100 * block, kind="block")
        trace.memory(20 + 100 * block, 500, address=1000 * block).memory(30 + 100 * block, 500, address=5000 + block)
    use = use_of(trace)
    assert [found.kind for found in use.changes] == ["smaller_batch"]
    assert "gradients" not in use.changes[0].text


def test_a_change_saves_no_more_than_down_to_the_next_peak() -> None:
    trace = blocks(Trace()).op("aten::randn", 900, 950).memory(920, 2000, address=90_000)  # not of the model
    use = use_of(trace)
    found = {change.kind: change.saves_bytes for change in use.changes}
    assert use.peak.total_bytes == 2400
    assert found["checkpoint"] == 400


def test_gradients_that_are_there_in_forward_can_be_freed() -> None:
    trace = Trace().mark(".", 0, 200).mark("a", 10, 90).op("aten::mm", 20, 30, sequence=1, forward_thread=0)
    trace.memory(25, 1000, address=10).memory(390, -1000, address=10).node("MmBackward0", 300, 400, number=1)
    grads = [(50_000, 600, "grads", "a.weight")]
    use = use_of(trace, (5, grads), (350, grads), (2000, grads))
    found = change(use, "free_grads")
    assert found is not None
    assert (found.saves_bytes, found.costs_ns) == (600, 0)


def test_gradients_of_this_step_are_no_such() -> None:
    trace = Trace().mark(".", 0, 200).mark("a", 10, 90).op("aten::mm", 20, 30, sequence=1, forward_thread=0)
    trace.memory(25, 100, address=10).node("MmBackward0", 300, 400, number=1)
    trace.op("aten::mm", 310, 320, thread=AUTOGRAD).memory(315, 600, address=5000, thread=AUTOGRAD)
    use = use_of(trace.memory(350, 1, address=9000, thread=AUTOGRAD))
    assert change(use, "free_grads") is None


def loss(logits: int) -> Trace:
    trace = Trace().mark(".", 0, 400).mark("layers.0", 10, 90, kind="block").mark("layers.1", 100, 190, kind="block")
    trace.op("aten::mm", 20, 30, sequence=1, forward_thread=0).memory(25, 400, address=1000)
    trace.op("aten::mm", 120, 130, sequence=2, forward_thread=0).memory(125, 400, address=2000)
    trace.mark("lm_head", 200, 250, kind="head").op("aten::mm", 210, 220, sequence=3, forward_thread=0)
    trace.memory(215, logits, address=10_000)
    trace.op("aten::_log_softmax", 300, 310, sequence=4, forward_thread=0).memory(305, logits, address=20_000)
    trace.node("LogSoftmaxBackward0", 500, 600, number=4).memory(550, -logits, address=20_000, thread=AUTOGRAD)
    return trace.memory(560, -logits, address=10_000, thread=AUTOGRAD)


def test_a_loss_that_takes_most_of_the_activation_can_be_computed_in_chunks() -> None:
    found = change(use_of(loss(logits=800)), "chunk_loss")
    assert found is not None
    assert found.saves_bytes == 1400  # one of 8 chunks of 2 * 800 is held at a time
    assert found.layers == ("lm_head",)
    assert change(use_of(loss(logits=300)), "chunk_loss") is None


def test_half_a_batch_makes_half_of_the_activation() -> None:
    found = change(use_of(blocks(Trace())), "smaller_batch")
    assert found is not None
    assert found.saves_bytes == 1200


def test_what_an_optimizer_makes_for_itself_and_a_large_state() -> None:
    trace = Trace().mark("a", 0, 50).annotation(OPTIMIZER, 100, 300).op("aten::_foreach_sqrt", 110, 120)
    trace.memory(115, 500, address=1000).memory(290, -500, address=1000)
    state = [(50_000, 800, "os_state", "exp_avg of a.weight")]
    found = {change.text: change.saves_bytes for change in use_of(trace, (5, state)).changes}
    assert [size for text, size in found.items() if "fused=True" in text] == [500]
    assert [size for text, size in found.items() if "8 bits" in text] == [600]


@pytest.mark.parametrize(("state_bytes", "told"), [(999, False), (1000, True)])
def test_a_state_counts_from_a_tenth_of_the_peak_on(state_bytes: int, told: bool) -> None:
    trace = Trace().mark("a", 0, 50).memory(20, 1, address=9).memory(30, -1, address=9)
    held = [
        (50_000, state_bytes, "os_state", "exp_avg of a.weight"),
        (90_000, 9999 - state_bytes, "params", "a.weight"),
    ]
    assert any("8 bits" in change.text for change in use_of(trace, (5, held)).changes) == told


def test_a_leak_is_a_change() -> None:
    trace = Trace()
    for step in range(10):
        t = 100 * step
        trace.annotation(f"ProfilerStep#{step}", t, t + 100).mark("a", t + 10, t + 50)
        trace.op("aten::relu", t + 20, t + 30).memory(t + 25, 4096, address=10_000 * (step + 1))
    use = use_of(trace)
    found = change(use, "leak")
    assert found is not None
    assert found.saves_bytes == 8 * 4096  # of the steps between the first and the last
    assert "aten::relu in a" in found.text


def test_only_the_largest_of_many_leaks_are_weighed(monkeypatch: pytest.MonkeyPatch) -> None:
    weighed = []
    weigh = memory_use._Changes.leak

    def counted(self: memory_use._Changes, leak: Leak, members: Int64) -> Change:
        weighed.append(leak.bytes_per_step)
        return weigh(self, leak, members)

    monkeypatch.setattr(memory_use._Changes, "leak", counted)
    trace = Trace()
    for step in range(10):
        t = 1000 * step
        trace.annotation(f"ProfilerStep#{step}", t, t + 1000)
        for i in range(20):
            begin = t + 10 * i
            trace.op(f"aten::op{i}", begin, begin + 9)
            trace.memory(begin + 5, 2048 * (i + 1), address=(step * 20 + i + 1) << 20)
    use = memory_recordings.use_of(trace)
    assert len(use.leaks) == 20
    assert weighed == [2048 * i for i in (20, 19, 18, 17, 16)]


def test_only_what_is_worth_it_is_told_and_the_best_comes_first() -> None:
    use = use_of(blocks(Trace()), (5, [(500_000, 10**6, "params", "layers.0.weight")]))
    assert use.changes == ()  # 2,400 of a million bytes
    sizes = [change.saves_bytes for change in use_of(blocks(Trace())).changes]
    assert sizes == sorted(sizes, reverse=True)
    assert len(sizes) <= 5
