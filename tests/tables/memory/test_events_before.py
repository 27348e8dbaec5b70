"""What was there before the recording, and when it went."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memory_recordings import BASE_NS, Tensor, category_at, held, use_of
from profiler_wrapper.tables.model import BEFORE_PROFILING, MemoryUse
from recordings import Trace, analyse

ZERO_GRAD = "Optimizer.zero_grad#AdamW.zero_grad"
W = (1000, 100, "params", "a.weight")
G = (2000, 100, "grads", "a.weight")


def loop() -> Trace:
    """A layer that makes 8 bytes at 50, and 8 bytes at 1000 after all else."""
    return Trace().mark("a", 10, 100).memory(50, 8, address=70).memory(1000, 8, address=71)


def test_what_is_told_and_was_never_allocated_was_there() -> None:
    use = use_of(loop(), (5, [W, G]), (2000, [W, G]))
    assert category_at(use, 50) == {"params": 100, "grads": 100, "activation": 8}
    owners = {owner.category: owner for owner in use.peak_owners}
    assert (owners["params"].op, owners["params"].phase, owners["params"].count) == (BEFORE_PROFILING, None, 1)
    assert (owners["params"].layer, owners["params"].name) == ("a", "a.weight")
    assert use.known_owners
    assert use.notes == ()


def test_what_only_a_later_moment_tells_was_there_too() -> None:
    use = use_of(loop(), (5, [W]), (600, [(3000, 16, "os_state", "exp_avg of a.weight")]))
    assert category_at(use, 50) == {"params": 100, "os_state": 16, "activation": 8}


def test_the_peak_of_all_tables_includes_it() -> None:
    recording = loop().op("aten::mm", 1, 2).recording(metadata={"baseTimeNanoseconds": BASE_NS})
    result = analyse(recording, run={"held": held((5, [W]), (2000, [W]))})
    (row,) = result.rows("a")
    assert (row.entry_allocated_bytes, row.peak_bytes) == (100, 108)
    assert result.memory["peak"]["allocated_bytes"] == result.memory["allocated_bytes"] == 116  # at the end
    assert result.memory["categories"]["params"] == 100
    assert "held" not in result.run


def test_gradients_go_when_zero_grad_ends_after_which_they_are_no_longer_told() -> None:
    trace = loop().annotation(ZERO_GRAD, 200, 300).annotation(ZERO_GRAD, 600, 700).memory(400, 4, address=72)
    use = use_of(trace, (5, [G]), (500, [G]), (2000, []))  # still there after the first one
    assert category_at(use, 400)["grads"] == 100
    assert category_at(use, 700) == {"activation": 8, "other": 4}
    assert 700 in use.timeline.time_ns.tolist()


def test_gradients_that_are_told_at_the_end_stay() -> None:
    use = use_of(loop().annotation(ZERO_GRAD, 200, 300), (5, [G]), (2000, [G]))
    assert category_at(use, 1000)["grads"] == 100


def test_only_gradients_go_with_zero_grad() -> None:
    trace = loop().annotation(ZERO_GRAD, 200, 300)
    use = use_of(trace, (5, [W]), (900, []))
    assert category_at(use, 300).get("params") == 100
    assert category_at(use, 1000).get("params") is None  # the last moment lists all, and lacks it


def test_what_was_there_is_gone_when_its_memory_is_given_out_again() -> None:
    trace = loop().memory(300, 30, address=2000)  # where the gradient was
    use = use_of(trace, (5, [W, G]), (2000, [W]))
    assert category_at(use, 50)["grads"] == 100
    assert category_at(use, 300) == {"params": 100, "activation": 8, "other": 30}
    inside = loop().memory(300, 30, address=2050)  # in the middle of it
    use = use_of(inside, (5, [G]), (2000, []))
    assert category_at(use, 300) == {"activation": 8, "other": 30}


def test_a_name_told_twice_frees_nothing() -> None:
    state = [(3000, 16, "os_state", "state"), (4000, 16, "os_state", "state")]
    use = use_of(loop(), (5, state), (500, state), (2000, state))
    assert category_at(use, 1000)["os_state"] == 32


def test_a_free_of_what_was_there_is_its_end() -> None:
    trace = loop().memory(300, -100, address=1000)
    use = use_of(trace, (5, [W]))
    assert category_at(use, 50)["params"] == 100
    assert "params" not in category_at(use, 300)


def test_frees_of_what_nobody_told_were_other() -> None:
    trace = loop().memory(300, -30, address=9).memory(400, -20, address=9)  # given out unseen in between
    use = use_of(trace, (5, [W]))
    assert category_at(use, 50) == {"params": 100, "activation": 8, "other": 50}
    assert category_at(use, 400) == {"params": 100, "activation": 8}
    assert {owner.category: owner.name for owner in use.peak_owners}["other"] == ""


def test_an_allocation_where_another_was_not_freed_shows_that_that_is_gone() -> None:
    trace = Trace().mark("a", 0, 500).op("aten::mm", 10, 20).memory(15, 64, address=7)
    trace.op("aten::mm", 100, 110).memory(105, 32, address=7).memory(200, -32, address=7)
    use = use_of(trace)
    assert category_at(use, 105) == {"activation": 32}
    assert category_at(use, 200) == {}


def test_on_an_accelerator_the_allocator_says_what_was_there_and_the_rest_is_other() -> None:
    trace = Trace().mark("a", 10, 100)
    trace._allocated = 10_000  # what the allocator has given out
    trace.memory(50, 512, address=70, device=0, reserved=20_480).memory(90, -512, address=70, device=0, reserved=20_480)
    use = use_of(trace, (5, [(5120, 1000, "params", "a.weight")]), device="cuda:0")
    assert category_at(use, 50) == {"params": 1024, "activation": 512, "other": 10_000 - 1024}  # given out by 512
    assert use.timeline.total_bytes.tolist() == [10_512, 10_000]
    before = [owner for owner in use.peak_owners if owner.category == "other"]
    assert [(owner.op, owner.size_bytes) for owner in before] == [(BEFORE_PROFILING, 10_000 - 1024)]
    assert use.reserved_peak is not None
    assert use.reserved_peak.reserved_bytes == 20_480


def test_holdings_of_another_device_are_none() -> None:
    trace = Trace().mark("a", 10, 100).memory(50, 512, address=70, device=0)
    assert not use_of(trace, (5, [W]), device="cpu").known_owners
    assert use_of(trace, (5, [W]), device="cuda:0").known_owners


def on_device(given_out: int, *told: Tensor) -> MemoryUse:
    """512 bytes more, at 50, than an accelerator had given out, with what is told to lie there from before."""
    trace = Trace().mark("a", 10, 100)
    trace._allocated = given_out
    return use_of(trace.memory(50, 512, address=70, device=0), (5, list(told)), device="cuda:0")


def notes_of(use: MemoryUse, words: str) -> list[str]:
    return [note for note in use.notes if words in note]


def test_what_lies_outside_of_the_allocator_is_not_counted_and_it_is_said() -> None:
    use = on_device(0, (1024, 4096, "params", "a.weight"))
    assert category_at(use, 50) == {"activation": 512}
    (note,) = notes_of(use, "outside")
    assert note.startswith("4.0 KiB of what")
    use = on_device(3072, (1024, 1024, "os_state", "exp_avg of a.weight"), (8192, 4096, "params", "a.weight"))
    assert category_at(use, 50) == {"params": 2048, "os_state": 1024, "activation": 512}  # of the largest, what fits
    assert notes_of(use, "outside")[0].startswith("2.0 KiB of what")


def test_what_begins_no_block_of_the_allocator_is_the_first_to_lie_outside() -> None:
    use = on_device(4096, (1000, 1024, "os_state", "exp_avg of a.weight"), (8192, 4096, "params", "a.weight"))
    assert category_at(use, 50) == {"params": 4096, "activation": 512}
    assert notes_of(use, "outside")[0].startswith("1.0 KiB of what")


def test_slices_of_one_block_are_not_rounded_each_and_shared_bytes_count_once() -> None:
    slices = [(10_240 + 100 * i, 100, "params", f"a.{i}") for i in range(20)]
    use = on_device(2048, *slices)
    assert category_at(use, 50) == {"params": 2000, "activation": 512, "other": 48}
    assert notes_of(use, "outside") == []
    use = on_device(2048, (10_240, 1000, "params", "a"), (10_340, 1400, "params", "b"), (10_440, 10, "params", "c"))
    assert category_at(use, 50) == {"params": 1500, "activation": 512, "other": 548}


def test_rounding_alone_is_never_outside() -> None:
    use = on_device(1000, (1024, 1000, "params", "a.weight"))
    assert category_at(use, 50) == {"params": 1000, "activation": 512}
    assert notes_of(use, "outside") == []


def test_what_a_free_tells_of_was_in_the_allocator() -> None:
    trace = Trace().mark("a", 10, 100).memory(40, 512, address=70, device=0)
    trace._allocated = 3072
    trace.memory(50, -1024, address=1024, device=0).memory(60, -1024, address=4096, device=0)
    trace._memory[0]["total_allocated_bytes"] = 3072  # 2560 when the recording began
    told = [(1024, 1000, "grads", "a.weight"), (8192, 9000, "params", "a.weight")]
    use = use_of(trace, (5, told), device="cuda:0")
    assert category_at(use, 40) == {"grads": 1024, "other": 1024, "params": 512, "activation": 512}
    assert category_at(use, 50) == {"other": 1024, "params": 512, "activation": 512}
    assert category_at(use, 60) == {"params": 512, "activation": 512}


def test_a_total_that_falls_without_a_free_cuts_the_largest_category() -> None:
    trace = Trace().mark("a", 10, 100).memory(50, 4096, address=70, device=0)
    trace._allocated -= 3072  # frees that the trace lost
    trace.memory(60, 512, address=10_000, device=0).memory(200, 512, address=20_000, device=0)
    use = use_of(trace, device="cuda:0")
    assert category_at(use, 60) == {"activation": 1536}
    assert category_at(use, 200) == {"activation": 1536, "other": 512}
    assert notes_of(use, "lacks frees")[0].startswith("the trace lacks frees: at one moment 3.0 KiB more")


def test_an_accelerator_that_states_no_totals_is_counted() -> None:
    trace = Trace().mark("a", 10, 100).memory(50, 512, address=70, device=0).memory(60, -256, address=9, device=0)
    for event in trace._memory:
        event["total_allocated_bytes"] = -1
    use = use_of(trace, (5, [(1024, 1024, "params", "a.weight")]), device="cuda:0")
    assert use.timeline.total_bytes.tolist() == [1792, 1536]
    assert category_at(use, 50) == {"params": 1024, "activation": 512, "other": 256}


@given(
    st.integers(0, 20_000),
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3000), st.sampled_from(["params", "grads"])), max_size=8),
)
def test_nothing_is_ever_negative_and_nothing_is_lost(given_out: int, told: list[tuple[int, int, str]]) -> None:
    tensors = [(256 * at, size, kind, f"t{i}") for i, (at, size, kind) in enumerate(told)]
    by_address = {tensor[0]: tensor for tensor in reversed(tensors)}  # the first at an address counts
    covered = {byte for start, size, _, _ in by_address.values() for byte in range(start, start + size)}
    use = on_device(given_out, *tensors)
    sizes = category_at(use, 50)
    explained = sizes.get("params", 0) + sizes.get("grads", 0)
    assert min(given_out, len(covered)) <= explained <= min(given_out, len(covered) + 511 * len(tensors))
    assert bool(notes_of(use, "outside")) == (given_out < len(covered))


@pytest.mark.parametrize("base", ["9" * 40, "9" * 5000, 1 << 63, -1, 1.5, float("nan"), float("inf"), True, None, "x"])
def test_a_clock_that_begins_nowhere_leaves_the_holdings_out_and_says_so(base: object) -> None:
    recording = loop().op("aten::mm", 1, 2).recording(metadata={"baseTimeNanoseconds": base})
    result = analyse(recording, run={"held": held((5, [W]))})
    assert result.memory_use is not None
    assert not result.memory_use.known_owners
    assert len([warning for warning in result.warnings if "baseTimeNanoseconds" in warning]) == 1
    untold = analyse(recording)
    assert not [warning for warning in untold.warnings if "baseTimeNanoseconds" in warning]


@pytest.mark.parametrize("base", [BASE_NS, str(BASE_NS), float(BASE_NS)])
def test_a_clock_may_be_told_as_text_or_a_whole_float(base: object) -> None:
    assert int(float(BASE_NS)) == BASE_NS
    trace = Trace().mark("a", 10, 100).op("aten::mm", 20, 60).memory(50, 8, address=70).memory(70, -8, address=70)
    recording = trace.recording(metadata={"baseTimeNanoseconds": base})
    use = analyse(recording, run={"held": held((60, [(70, 8, "grads", "a.weight")]), (90, []))}).memory_use
    assert use is not None
    assert category_at(use, 50) == {"grads": 8}  # told while it was alive


def test_totals_that_jump_without_an_event_are_other() -> None:
    trace = Trace().mark("a", 10, 100).memory(50, 512, address=70, device=0)
    trace._allocated += 2048  # events that the trace lost
    use = use_of(trace.memory(60, 512, address=71, device=0), device="cuda:0")
    assert category_at(use, 60) == {"activation": 1024, "other": 2048}
    assert next((o.category, o.op, o.size_bytes) for o in use.peak_owners) == ("other", "", 2048)


def test_holdings_that_cannot_be_read_are_a_warning() -> None:
    recording = loop().op("aten::mm", 1, 2).recording()
    result = analyse(recording, run={"held": [{"time_ns": "now"}]})
    assert any("held" in warning for warning in result.warnings)
    assert result.memory_use is not None


def test_a_trace_that_frees_only_what_was_there() -> None:
    use = use_of(
        Trace().mark("a", 0, 100).memory(20, -64, address=1).memory(30, -32, address=2), (5, [(1, 64, *W[2:])])
    )
    assert use.timeline.total_bytes.tolist() == [32, 0]
    assert use.last.total_bytes == 0
