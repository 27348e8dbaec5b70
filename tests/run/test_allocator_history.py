"""The allocator's history, with a stand-in for torch's: when it is on, what is dumped, and that nobody is hurt."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from profiler_wrapper.run import allocator_history
from profiler_wrapper.run.allocator_history import (
    MOST_ENTRIES,
    MOST_FAILURES,
    AllocatorHistory,
    SnapshotUnavailable,
    snapshot_name,
)
from snapshots import snapshot as taken
from snapshots import training


class FakeTorch:
    """torch.cuda.memory's three functions and the allocator's observers."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.observers: list[Callable[[int, int, int, int], None]] = []
        self.enabled = False
        self.dumps = 0
        self.fail_to_dump = False

    def record(self, **options: Any) -> None:
        self.calls.append(options)
        self.enabled = options["enabled"] is not None

    def dump(self, path: str) -> None:
        self.dumps += 1
        if self.fail_to_dump:
            Path(path).write_bytes(b"half")
            raise OSError("disk full")
        Path(path).write_bytes(pickle.dumps(taken(training(steps=1))))

    def run_out(self) -> None:
        """What the allocator does when an allocation cannot be met."""
        for observer in self.observers:
            observer(0, 4 << 20, 1 << 30, 0)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 MiB.")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTorch]:
    fake = FakeTorch()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", fake.record)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", fake.dump)
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: fake.enabled, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", fake.observers.append, raising=False)
    monkeypatch.setattr(allocator_history, "_listening", False)
    yield fake
    assert allocator_history._watching == []


def test_history_is_bounded_with_python_stacks_and_ends(gpu: FakeTorch, tmp_path: Path) -> None:
    history = AllocatorHistory()
    history.start()
    assert gpu.calls == [{"enabled": "all", "context": "all", "stacks": "python", "max_entries": MOST_ENTRIES}]
    history.dump(tmp_path / "memory" / "a.pickle")
    history.stop()
    history.stop()
    assert gpu.calls[1:] == [{"enabled": None}]
    assert gpu.observers == []  # nobody asked for snapshots of failures
    assert [path.name for path in (tmp_path / "memory").iterdir()] == ["a.pickle"]


def test_the_users_own_history_stays_on(gpu: FakeTorch) -> None:
    gpu.enabled = True
    history = AllocatorHistory()
    history.start()
    history.stop()
    assert gpu.calls == []
    assert gpu.enabled


def test_a_failed_allocation_is_dumped_before_torch_raises(gpu: FakeTorch, tmp_path: Path) -> None:
    order: list[str] = []
    gpu.observers.append(lambda *_: order.append("user"))
    history = AllocatorHistory(failure_path=lambda: tmp_path / "oom.pickle")
    history.start()
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        try:
            gpu.run_out()
        finally:
            order.append("unwinding")
            assert (tmp_path / "oom.pickle").exists()
    history.stop()
    assert order == ["user", "unwinding"]
    assert history.failures == [tmp_path / "oom.pickle"]
    assert pickle.loads((tmp_path / "oom.pickle").read_bytes())["segments"]


def test_after_the_end_a_failure_writes_nothing(gpu: FakeTorch, tmp_path: Path) -> None:
    history = AllocatorHistory(failure_path=lambda: tmp_path / "oom.pickle")
    history.start()
    history.stop()
    with pytest.raises(torch.OutOfMemoryError):
        gpu.run_out()
    assert list(tmp_path.iterdir()) == []


def test_a_second_history_adds_no_second_observer(gpu: FakeTorch, tmp_path: Path) -> None:
    for name in ("a", "b"):
        history = AllocatorHistory(failure_path=lambda name=name: tmp_path / f"{name}.pickle")  # type: ignore[misc]
        history.start()
        with pytest.raises(torch.OutOfMemoryError):
            gpu.run_out()
        history.stop()
    assert len(gpu.observers) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pickle", "b.pickle"]


def test_a_loop_of_failures_is_dumped_a_few_times_only(gpu: FakeTorch, tmp_path: Path) -> None:
    history = AllocatorHistory(failure_path=lambda: tmp_path / "oom.pickle")
    history.start()
    for _ in range(20):
        with pytest.raises(torch.OutOfMemoryError):
            gpu.run_out()
    history.stop()
    assert gpu.dumps == MOST_FAILURES
    assert history.failures == [tmp_path / "oom.pickle"]


@pytest.mark.parametrize("broken", ["dump", "path"])
def test_our_own_failure_never_takes_the_place_of_torchs_error(gpu: FakeTorch, tmp_path: Path, broken: str) -> None:
    def path() -> Path:
        if broken == "path":
            raise RuntimeError("no directory")
        return tmp_path / "oom.pickle"

    gpu.fail_to_dump = broken == "dump"
    history = AllocatorHistory(failure_path=path)
    history.start()
    with pytest.raises(torch.OutOfMemoryError):
        gpu.run_out()
    history.stop()
    assert history.failures == []
    assert len(history.problems) == 1
    assert list(tmp_path.iterdir()) == []  # no half of a file


def test_a_torch_that_does_not_tell_of_failures_still_has_a_history(
    gpu: FakeTorch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delattr(torch._C, "_cuda_attach_out_of_memory_observer")
    history = AllocatorHistory(failure_path=lambda: tmp_path / "oom.pickle")
    history.start()
    assert history.running
    history.stop()


def test_without_a_gpu_it_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SnapshotUnavailable, match="not available, because"):
        AllocatorHistory().start()


def test_names_say_what_and_when(monkeypatch: pytest.MonkeyPatch) -> None:
    assert snapshot_name("run", clock=lambda: 0.0).startswith("run_mem_19")
    assert snapshot_name("run", what="oom", clock=lambda: 0.0).startswith("run_oom_19")
