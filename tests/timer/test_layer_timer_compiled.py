"""What listens while compiled code runs is not compiled with it: Dynamo sees the frames that it sees without us."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from profiler_wrapper.timer.layer_timer import LayerTimer
from profiler_wrapper.timer.timer import Timer


@contextmanager
def frames_of_ours(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """The functions of this package that Dynamo was given to compile."""
    import torch._dynamo.convert_frame as convert_frame

    torch._dynamo.reset()
    seen: Counter[str] = Counter()
    original = convert_frame.ConvertFrame.__call__

    def spy(self, frame, *args, **kwargs):  # type: ignore[no-untyped-def]
        if str(frame.f_globals.get("__name__", "")).startswith("profiler_wrapper."):
            seen[frame.f_code.co_name] += 1
        return original(self, frame, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(convert_frame.ConvertFrame, "__call__", spy)
        yield seen


def compiled(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return torch.compile(function, backend="eager")


def test_a_wait_in_a_compiled_function(process_group: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @compiled
    def step(x: torch.Tensor, work: torch.distributed.Work) -> torch.Tensor:
        y = x + 1
        work.wait()
        return y * 2

    x = torch.ones(3)
    work = torch.distributed.all_reduce(x, async_op=True)
    model = nn.Linear(2, 2)
    with LayerTimer(model, tmp_path, device="cpu") as layers, frames_of_ours(monkeypatch) as seen:
        assert torch.equal(step(x, work), torch.full((3,), 4.0))
        assert [wait.name for wait in layers._watch._waits] == ["all_reduce"]
    assert not seen


def test_garbage_that_is_collected_in_a_compiled_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timer = Timer(tmp_path, device="cpu", gc=True)
    with timer("begins"):
        pass

    @compiled
    def step(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        gc.collect()
        return y * 2

    with frames_of_ours(monkeypatch) as seen:
        assert torch.equal(step(torch.ones(3)), torch.full((3,), 4.0))
    timer.close()
    assert not seen


def test_a_backward_in_a_compiled_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    @compiled
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).sum()
        loss.backward()
        return loss.detach()

    with LayerTimer(model, tmp_path, device="cpu") as layers, frames_of_ours(monkeypatch) as seen:
        step(torch.ones(1, 2))
        assert layers._watch.entered == {"backward": 1}
    assert model[0].weight.grad is not None
    assert not seen
