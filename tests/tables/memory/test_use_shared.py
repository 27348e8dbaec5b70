"""Memory of a module that several layers call: activations are the caller's, parameters and gradients the module's."""

from __future__ import annotations

from memory_recordings import use_of
from profiler_wrapper.reports.memory import memory_tree
from profiler_wrapper.tables.model import Analysis
from recordings import Trace, analyse

SHARED = ("shared",)


def two_callers() -> Trace:
    """`first` calls `first.0`, in which 100 bytes are made; `second` calls it too, for 30, and its own for 7."""
    trace = Trace().mark(".", 0, 1000)
    for caller, begin, size in (("first", 10, 100), ("second", 400, 30)):
        trace.mark(caller, begin, begin + 350).mark("first.0", begin + 10, begin + 100, flags=SHARED)
        trace.mark("first.0.up", begin + 20, begin + 90).op("aten::mm", begin + 30, begin + 60, sequence=begin)
        trace.memory(begin + 40, size, address=begin)
    trace.mark("second.0", 610, 690).op("aten::mm", 620, 650, sequence=3)
    return trace.memory(630, 7, address=3)


def tree_of(result: Analysis, category: str = "activation") -> dict[str, int]:
    """Bytes by labels from the root on, with everything below."""
    assert result.memory_use is not None
    tree = memory_tree(result.memory_use.peak_owners, (category,), {})  # type: ignore[arg-type]
    return {" > ".join(one.path): one.total_bytes for one in tree if not one.is_op}


def test_activations_are_below_the_layer_that_called() -> None:
    result = analyse(two_callers().recording())
    assert tree_of(result) == {
        "": 137, "first": 100, "first > 0": 100, "first > 0 > up": 100,
        "second": 37, "second > first.0": 30, "second > first.0 > up": 30, "second > 0": 7,
    }  # fmt: skip
    owners = [(one["layer"], one["bytes"], list(one["call_path"])) for one in result.memory["peak"]["owners"]]
    assert owners == [("first.0.up", 100, []), ("first.0.up", 30, ["second", "first.0", "up"]), ("second.0", 7, [])]


def test_what_the_root_calls_itself_is_not_below_the_layer_that_its_name_tells() -> None:
    trace = Trace().mark(".", 0, 1000).mark("first", 10, 100).op("aten::mm", 20, 40, sequence=1)
    trace.mark("first.0", 200, 300, flags=SHARED).op("aten::mm", 210, 240, sequence=2)
    trace.memory(30, 5, address=1).memory(220, 9, address=2)
    assert tree_of(analyse(trace.recording())) == {"": 14, "first": 5, "first.0": 9}


def test_parameters_and_gradients_are_below_the_module_whoever_calls_it() -> None:
    trace = two_callers().node("MmBackward0", 1100, 1190, number=400, thread=1).arrow(430, 1100, backward_thread=1)
    trace.memory(1120, 64, address=9)
    held = [(5000, 256, "params", "first.0.up.weight"), (9, 64, "grads", "first.0.up.weight")]
    use = use_of(trace, (5, held[:1]), (1300, held))
    assert {(one.category, one.name, one.call_path, one.size_bytes) for one in use.peak_owners if one.name} == {
        ("params", "first.0.up.weight", (), 256), ("grads", "first.0.up.weight", (), 64),
    }  # fmt: skip


def test_blocks_to_checkpoint_are_those_that_called() -> None:
    """Two blocks call one attention: each keeps two tensors of 1,000 bytes, one of them its output."""
    trace = Trace().mark(".", 0, 1000)
    for number, begin in enumerate((10, 400)):
        trace.mark(f"layers.{number}", begin, begin + 300, kind="block")
        trace.mark("layers.0.attention", begin + 10, begin + 200, flags=SHARED)
        for at in (0, 1):
            trace.op("aten::mm", begin + 20 + 50 * at, begin + 60 + 50 * at, sequence=2 * number + at, forward_thread=0)
            trace.memory(begin + 30 + 50 * at, 1000, address=10 * number + at + 1)
    trace.node("MmBackward0", 800, 900, number=3).arrow(470, 800)
    result = analyse(trace.recording())
    assert result.memory_use is not None
    (change,) = (one for one in result.memory_use.changes if one.kind == "checkpoint")
    assert change.layers == ("layers.0", "layers.1")
    assert change.saves_bytes == 1000  # of two blocks one is there at a time


def test_a_leak_of_a_module_is_one_whoever_calls_it() -> None:
    trace = Trace()
    for step in range(6):
        begin = 1000 * step
        trace.annotation(f"ProfilerStep#{step}", begin, begin + 990).mark(".", begin + 5, begin + 980)
        for caller, at in (("first", begin + 10), ("second", begin + 500)):
            trace.mark(caller, at, at + 300).mark("first.0", at + 10, at + 100, flags=SHARED)
            trace.op("aten::mm", at + 20, at + 60, sequence=step).memory(at + 30, 4096, address=at)
    use = analyse(trace.recording()).memory_use
    assert use is not None and use.leaks is not None
    assert [(one.layer, one.bytes_per_step, one.count_per_step) for one in use.leaks] == [("first.0", 8192, 2)]
