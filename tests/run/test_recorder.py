"""Where a recording may end: torch writes the end of what is open then into memory that it has freed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity

from profiler_wrapper.capture.owned_tensors import OwnedTensors
from profiler_wrapper.capture.scopes import RootCall
from profiler_wrapper.capture.steps import StepCounter, make_plan
from profiler_wrapper.capture.torch_state import profiler_is_on
from profiler_wrapper.errors import Notices
from profiler_wrapper.run import recorder as recorder_module
from profiler_wrapper.run.options import make_options
from profiler_wrapper.run.recorder import Recorder

CALL = RootCall("Net#0", "forward", False)


def test_a_process_that_grows_within_an_op_is_recorded_until_the_op_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows: list[Any] = []
    finisher = SimpleNamespace(
        info=SimpleNamespace(world_size=1),
        place=SimpleNamespace(part_path=lambda name: tmp_path / f"{name}.json"),
        end_history=list,
        write=lambda window, **_: windows.append(window),
    )
    marks = SimpleNamespace(attach=list, detach=list, roots=list, said=list, calls=0, requests=SimpleNamespace())
    recorder = Recorder(
        plan=make_plan("all", record_shapes=False),
        counter=StepCounter(),
        marks=marks,  # type: ignore[arg-type]
        held=OwnedTensors(lambda: ()),
        options=make_options(activities=[ProfilerActivity.CPU]),
        finisher=finisher,  # type: ignore[arg-type]
        notices=Notices(),
    )
    recorder.start()
    torch.ones(2).add(1)
    monkeypatch.setattr(recorder._growth, "exceeded", lambda: "it is too large")
    monkeypatch.setattr(recorder_module, "in_op", lambda: True)
    recorder.root_enters(CALL)
    assert profiler_is_on() and not recorder.over
    monkeypatch.setattr(recorder_module, "in_op", lambda: False)
    recorder.root_enters(CALL)
    assert recorder.over and not profiler_is_on() and not recorder.failed
    (window,) = windows
    assert window.warnings == ["recording ended in step 0, because it is too large"]
