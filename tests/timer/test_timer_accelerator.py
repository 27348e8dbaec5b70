"""`Timer` on a real accelerator: the device's own times, and no synchronisation. Skipped without one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from profiler_wrapper.timer.timer import Timer
from timed_runs import span_rows, text_rows

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device")

STEPS, SPANS = 5, 20


def test_spans_have_the_times_of_their_work_and_nothing_waits(tmp_path: Path) -> None:
    x = torch.ones(4096, 4096, device="cuda")
    (x @ x).sum().item()
    timer = Timer(tmp_path)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        begin.record()
        for _ in range(STEPS):
            with timer("forward"):
                for _ in range(SPANS):
                    with timer("product"):
                        x = x @ x / 4096
            timer.step()
        end.record()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    path = timer.dump()
    assert path is not None
    spans = [span for span in span_rows(path) if span["kind"] != "step"]
    of = {name: [span["device_ns"] for span in spans if span["name"] == name] for name in ("forward", "product")}
    assert (len(of["forward"]), len(of["product"])) == (STEPS, STEPS * SPANS)
    torch.cuda.synchronize()
    all_ns = begin.elapsed_time(end) * 1e6
    assert sum(of["product"]) <= sum(of["forward"]) <= all_ns
    assert sum(of["product"]) > 0.8 * all_ns
    told = [float(row["cuda_dur"]) for row in text_rows(path) if row["name"] == "forward"]
    assert told == pytest.approx([device_ns / 1e6 for device_ns in of["forward"]], abs=0.001)
    timer.close()


def test_a_graph_that_is_captured_holds_no_event_of_ours(tmp_path: Path) -> None:
    x = torch.ones(64, device="cuda")
    timer = Timer(tmp_path)
    graph = torch.cuda.CUDAGraph()
    with timer("around"):
        with torch.cuda.graph(graph), timer("captured"):
            y = x * 2
        graph.replay()
    assert y.tolist() == [2.0] * 64
    path = timer.dump()
    assert path is not None
    assert {span["name"]: span["device_ns"] is None for span in span_rows(path)} == {"captured": True, "around": False}
    timer.close()
