"""Collections of garbage are in the trace, and nothing of ours stays behind."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity

from profiler_wrapper.capture.session import GarbageMarks, Session
from profiler_wrapper.trace.marks import GARBAGE
from profiler_wrapper.trace.reader import read


@pytest.fixture(autouse=True)
def only_asked_for():
    """No collection but those of the test."""
    gc.disable()
    yield
    gc.enable()


def recorded(path: Path, work) -> list[tuple[int, int]]:
    """(start, end) of each mark in ns, as read back."""
    session = Session(activities=[ProfilerActivity.CPU])
    session.start()
    try:
        torch.ones(2).add(1)
        work()
    finally:
        session.stop()
    session.export(path)
    session.close()
    recording = read(path)
    spans = recording.spans
    found = [span for span in range(len(spans)) if recording.name_of(span) == GARBAGE]
    return [(int(spans.start_ns[span]), int(spans.end_ns[span])) for span in found]


def test_full_collections_are_marked_and_young_ones_are_not(tmp_path: Path) -> None:
    def work() -> None:
        gc.collect()
        gc.collect(1)
        for _ in range(50):
            gc.collect(0)

    marks = recorded(tmp_path / "trace.json", work)
    assert len(marks) == 2, "one for each collection of an older generation"
    assert all(end > start for start, end in marks)


def test_nothing_stays_behind(tmp_path: Path) -> None:
    before = list(gc.callbacks)
    assert recorded(tmp_path / "trace.json", lambda: None) == []
    assert gc.callbacks == before


def test_what_user_code_raises_while_collecting_is_none_of_ours(tmp_path: Path) -> None:
    class Cycle:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            torch.ones(2).mul(2)

    def work() -> None:
        Cycle()
        gc.collect()
        torch.ones(2).sub(1)

    assert len(recorded(tmp_path / "trace.json", work)) == 1


def test_removed_within_a_collection_the_mark_is_closed() -> None:
    marks = GarbageMarks()
    marks.install()
    marks.install()
    assert gc.callbacks.count(marks._heard) == 1
    marks._heard("start", {"generation": 2})
    marks.remove()
    assert marks._heard not in gc.callbacks and marks._open is None
    marks._heard("stop", {"generation": 2})  # the end of that collection: nothing to close
    marks.remove()


def test_other_threads_and_forks_may_collect(tmp_path: Path) -> None:
    def work() -> None:
        thread = threading.Thread(target=gc.collect)
        thread.start()
        thread.join()
        if (child := os.fork()) == 0:
            gc.collect()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        gc.collect()

    assert len(recorded(tmp_path / "trace.json", work)) == 1, "that of the thread which records"


def test_a_compiled_function_that_collects_is_compiled_as_without_us() -> None:
    """Dynamo looks at each frame below a compiled one, and would take ours for part of the model."""
    import torch._dynamo

    def collecting(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        gc.collect()
        return y * 2

    def frames(callbacks: list) -> int:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        gc.callbacks.extend(callbacks)
        try:
            assert torch.equal(torch.compile(collecting, backend="eager")(torch.ones(3)), torch.full((3,), 4.0))
        finally:
            for callback in callbacks:
                gc.callbacks.remove(callback)
        return torch._dynamo.utils.counters["frames"]["total"]

    def plain(phase: str, info: dict[str, int]) -> None:
        str(phase)

    without = frames([])
    assert frames([plain]) > without, "else this says nothing: Dynamo leaves the frames of callbacks alone"
    assert frames([GarbageMarks()._heard]) == without
