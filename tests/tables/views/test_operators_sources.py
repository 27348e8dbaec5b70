"""Lines of Python behind ops: whose they are, which one counts, and those of backward."""

from __future__ import annotations

import numpy as np
import pytest

from profiler_wrapper.place.placed import place_events
from profiler_wrapper.tables.views.operators import Origin, PythonSources, operator_rows, origin_of
from recordings import AUTOGRAD, MAIN, Trace


def sources_of(trace: Trace, name: str) -> list[tuple[str, str]]:
    """The lines of each op of that name: the user's, a library's."""
    recording = trace.recording()
    found = place_events(recording)
    sources = PythonSources(recording, found.attribution)
    ops = np.array([i for i in range(len(recording.spans)) if recording.name_of(i) == name], dtype=np.int64)
    lines = sources.of(ops)
    texts = ([sources.text(line) if line >= 0 else "" for line in each.tolist()] for each in lines)
    return list(zip(*texts, strict=True))


@pytest.mark.parametrize(
    ("file", "origin"),
    [
        ("train.py", Origin.USER),
        ("my model/layers.py", Origin.USER),
        ("megatron/core/transformer/attention.py", Origin.USER),
        ("/home/me/run/train.py", Origin.USER),
        ("/tmp/ipykernel_12/3456.py", Origin.USER),
        ("<ipython-input-3-abc>", Origin.USER),
        ("C:\\work\\train.py", Origin.USER),
        ("transformers/models/llama/modeling_llama.py", Origin.LIBRARY),
        ("/usr/lib/python3/dist-packages/anything/x.py", Origin.LIBRARY),
        ("/opt/venv/lib/python3.11/site-packages/anything/x.py", Origin.LIBRARY),
        ("profiler_wrapper/capture/scopes.py", Origin.NOBODY),
        ("torch/nn/modules/linear.py", Origin.NOBODY),
        ("/opt/venv/lib/python3.11/site-packages/torch/nn/modules/linear.py", Origin.NOBODY),
        ("torch/_dynamo/eval_frame.py", Origin.NOBODY),
        ("contextlib.py", Origin.NOBODY),
        ("threading.py", Origin.NOBODY),
        ("/usr/lib/python3.11/threading.py", Origin.NOBODY),
        ("<frozen importlib._bootstrap>", Origin.NOBODY),
        ("<string>", Origin.NOBODY),
        ("/tmp/torchinductor_me/ab/cab.py", Origin.NOBODY),
    ],
)
def test_whose_a_file_is(file: str, origin: Origin) -> None:
    assert origin_of(file) == origin


def nested() -> Trace:
    trace = Trace().python("train.py(3): main", 0, 1000).python("torch/nn/modules/module.py(1): _call_impl", 10, 400)
    trace.python("model.py(20): forward", 20, 300).python("torch/nn/functional.py(9): linear", 30, 90)
    trace.op("aten::linear", 40, 80).op("aten::addmm", 50, 70)
    return trace.op("aten::relu", 310, 320).op("aten::relu", 1100, 1110)


def test_the_innermost_line_of_the_users_counts() -> None:
    assert sources_of(nested(), "aten::addmm") == [("model.py:20", "")]
    assert sources_of(nested(), "aten::relu") == [("train.py:3", ""), ("", "")]


def test_of_libraries_the_innermost_counts_within_the_users() -> None:
    trace = Trace().python("transformers/trainer.py(1): train", 0, 100).python("torch/x.py(2): f", 10, 90)
    trace.python("accelerate/a.py(3): g", 20, 80).op("aten::mm", 30, 40).op("aten::add", 92, 95)
    assert sources_of(trace, "aten::mm") == [("", "accelerate/a.py:3")]
    assert sources_of(trace, "aten::add") == [("", "transformers/trainer.py:1")]
    trace.python("model.py(8): step", 15, 85)
    assert sources_of(trace, "aten::mm") == [("model.py:8", "accelerate/a.py:3")]
    trace.python("model.py(9): scale", 25, 60)
    assert sources_of(trace, "aten::mm") == [("model.py:9", "")]


def test_other_threads_have_no_say() -> None:
    trace = Trace().python("train.py(3): main", 0, 100, thread=9).op("aten::mm", 10, 20)
    assert sources_of(trace, "aten::mm") == [("", "")]


def test_backward_comes_from_the_lines_that_made_the_node() -> None:
    trace = Trace().python("train.py(3): main", 0, 1000).python("model.py(20): forward", 10, 100)
    trace.mark("fc", 15, 95).op("aten::mm", 20, 30, sequence=5, forward_thread=0)
    for thread in (MAIN, AUTOGRAD):
        begin = 200 if thread == MAIN else 400
        trace.node("MmBackward0", begin, begin + 50, number=5, thread=thread)
        trace.op("aten::t", begin + 10, begin + 20, thread=thread)
    assert sources_of(trace, "aten::t") == [("model.py:20", "")] * 2
    trace.python("timm/layers/mlp.py(4): forward", 15, 90)
    assert sources_of(trace, "aten::t") == [("model.py:20", "timm/layers/mlp.py:4")] * 2


def test_what_python_runs_inside_backward_has_its_own_line() -> None:
    trace = Trace().python("train.py(3): main", 0, 1000).python("model.py(20): forward", 10, 100)
    trace.op("aten::mm", 20, 30, sequence=5, forward_thread=0)
    trace.node("MyFunctionBackward", 200, 300, number=5, thread=MAIN)
    trace.python("kernels.py(7): backward", 210, 290).op("aten::t", 220, 230)
    assert sources_of(trace, "aten::t") == [("kernels.py:7", "")]


def test_rows_have_the_dearest_lines_first() -> None:
    trace, now = Trace(), 0
    for line, length in ((1, 10), (2, 30), (3, 20), (4, 1), (5, 2), (6, 3), (2, 5)):
        trace.python(f"train.py({line}): f", now, now + 50).op("aten::mm", now + 5, now + 5 + length)
        now += 100
    (row,) = operator_rows(place_events(trace.recording()), {})
    assert row.sources == ("train.py:2", "train.py:3", "train.py:1", "train.py:6", "train.py:5")
    for file in ("peft/a.py", "peft/b.py", "peft/c.py"):
        trace.python(f"{file}(1): f", now, now + 50).op("aten::mm", now + 5, now + 45)
        now += 100
    (row,) = operator_rows(place_events(trace.recording()), {})
    assert row.sources == ("train.py:2", "train.py:3", "train.py:1", "peft/a.py:1", "peft/b.py:1")


def test_without_stacks_there_are_no_sources() -> None:
    (row,) = operator_rows(place_events(Trace().op("aten::mm", 0, 5).recording()), {})
    assert row.sources == ()
