"""Advice on real runs: made to deserve it, and made not to."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

import profiler_wrapper as pw
from advice_facts import facts_of_trace, findings, the_finding
from models import Size, build, train
from paused_traces import put_pauses, within
from processes import run_in_processes
from profiler_wrapper.advice.memory import recompute_not_needed
from profiler_wrapper.capture.compiled import graph_breaks
from profiling import QUICK, profiler, result_of

pytestmark = pytest.mark.full
SECOND = 1e6  # in us
STEPS = 8  # two in full, three timed, and some more for what compiles first


class Block(nn.Module):
    """Two Linears and a branch that no compiler can follow, if it is asked for."""

    def __init__(self, width: int, inner: int, *, breaks: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.breaks = nn.Linear(width, inner), nn.Linear(inner, width), breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.up(x))
        if self.breaks and x.sum() > 1e9:
            x = x + 1
        return self.down(x)


class Net(nn.Module):
    """Like blocks one after another; with `recomputes`, checkpointed."""

    def __init__(self, inner: list[int], *, breaks: bool = False, recomputes: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(32, width, breaks=breaks) for width in inner)
        self.recomputes = recomputes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
        return x.sum()


def profiled(model: nn.Module, directory: Path, *, rows: int = 256, batches: Any = None) -> pw.ProfileResult:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with pw.ProfilerWrapper(
        model, output_dir=directory, run_name="run", files=QUICK, enable_print_summary=False
    ) as prof:
        for batch in batches if batches is not None else [torch.ones(rows, 32)] * STEPS:
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            prof.step()
    return result_of(prof)


def timed_trace(directory: Path) -> Path:
    (trace,) = directory.glob("run/rank0/*profile_trace.json")
    return trace


def told(result: pw.ProfileResult) -> dict[str, dict[str, Any]]:
    """The findings of a result by their id."""
    return {finding["id"]: finding for finding in result.summary["findings"]}


# --- the DataLoader ------------------------------------------------------------------------------


class Samples(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(512, 32)


def of_loader(directory: Path, *, pause_in: str) -> pw.ProfileResult:
    """A run in which the clock stands still for a second in each of these events."""
    profiled(Net([64] * 2), directory, batches=DataLoader(Samples(), batch_size=None))
    put_pauses(timed_trace(directory), lambda event: SECOND * event["name"].startswith(pause_in))
    return pw.load(timed_trace(directory))


def test_a_slow_dataloader(tmp_path: Path) -> None:
    result = of_loader(tmp_path, pause_in="enumerate(DataLoader)#")
    found = told(result)["dataloader-bound"]
    assert SECOND <= found["saves_at_most_us"] <= result.summary["comparable"]["step_us"]
    assert found["share"] > 0.5
    assert "waits for the DataLoader" in result.summary["verdict"]


def test_a_quick_dataloader(tmp_path: Path) -> None:
    assert "dataloader-bound" not in told(of_loader(tmp_path, pause_in="aten::addmm"))


# --- blocks --------------------------------------------------------------------------------------


def of_blocks(directory: Path, inner: list[int]) -> pw.ProfileResult:
    """A run whose products take as long as their blocks are wide."""
    profiled(Net(inner), directory, rows=16)
    trace = timed_trace(directory)
    blocks = [(within(trace, f"layer: layers.{number}"), width) for number, width in enumerate(inner)]

    def pause_us(event: dict[str, Any]) -> float:
        if event["name"] != "aten::addmm":
            return 0
        return next(SECOND * width for is_within, width in blocks if is_within(event))

    put_pauses(trace, pause_us)
    return pw.load(trace)


def test_a_block_that_is_wider_than_its_likes(tmp_path: Path) -> None:
    result = of_blocks(tmp_path, [32, 32, 32, 192, 32, 32])
    found = told(result)["odd-block"]
    assert found["layer"] == "layers.3"
    assert any("it does 6.00 times the FLOPs of the others" in line for line in found["evidence"]), found["evidence"]
    assert found["saves_at_most_us"] > 0


def test_blocks_that_are_alike(tmp_path: Path) -> None:
    assert "odd-block" not in told(of_blocks(tmp_path, [32] * 6))


# --- recompute -----------------------------------------------------------------------------------


@pytest.mark.parametrize("recomputes", [True, False])
def test_recompute(tmp_path: Path, recomputes: bool) -> None:
    profiled(Net([512] * 4, recomputes=recomputes), tmp_path, rows=1024)
    put_pauses(timed_trace(tmp_path), lambda event: SECOND * (event["name"] == "aten::addmm"))
    result = pw.load(timed_trace(tmp_path))
    assert ("recompute-not-needed" in told(result)) == recomputes  # this machine has far more than these kilobytes
    facts = facts_of_trace(timed_trace(tmp_path))
    assert 0 < facts.analysis.run["free_memory_bytes"] < 1 << 50
    facts.analysis.run["free_memory_bytes"] = 80 << 30  # type: ignore[index]
    if not recomputes:
        assert findings(recompute_not_needed, facts) == []
        return
    found = the_finding(recompute_not_needed, facts)
    assert found.layer == "layers.{0..3}"
    recomputed = sum(row.self_time_ns for row in facts.analysis.layers if row.phase == "recompute")
    assert found.details["recompute_us"] == pytest.approx(recomputed / facts.steps / 1000)
    assert found.details["needs_bytes"] > 3 * 1024 * 512 * 4  # of each block but one, what relu keeps


# --- graph breaks --------------------------------------------------------------------------------


def compiled(directory: Path, *, breaks: bool) -> pw.ProfileResult:
    model = Net([64] * 3, breaks=breaks)
    for layer in model.layers:
        layer.compile(backend="eager")
    return profiled(model, directory)


def test_a_graph_break_in_each_block(tmp_path: Path) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    result = compiled(tmp_path, breaks=True)
    breaks = result.run["graph_breaks"]
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "x.sum() > 1e9" in text)
    here = f"{Path(__file__)}:{line}"
    assert [entry["source"] for entry in breaks] == [here]
    assert "a branch on the value of a tensor" in breaks[0]["reason"]
    found = told(result)["graph-break"]
    assert found["layer"] == "layers.{0..2}"
    assert found["source"] == here
    assert found["title"].startswith("3 graph breaks a step in layers.{0..2}")
    assert json.loads((tmp_path / "run/rank0/run.json").read_text())["graph_breaks"] == breaks


def test_blocks_that_compile_whole(tmp_path: Path) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    result = compiled(tmp_path, breaks=False)
    assert result.run["graph_breaks"] == []
    assert "graph-break" not in told(result)


def test_breaks_cost_nothing_where_nobody_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(__import__("sys").modules, "torch._dynamo.utils", raising=False)
    assert graph_breaks() == []


# --- ranks ---------------------------------------------------------------------------------------


def train_one_rank(directory: str) -> dict[str, Any] | None:
    """A large Linear on a small batch: its gradients take longer to go round than to compute."""
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 20_000)))
    result = profiled(_Summed(model), Path(directory), rows=1)
    small = nn.parallel.DistributedDataParallel(nn.Linear(32, 32))
    behind = profiled(_Summed(small), Path(directory, "behind"), batches=_slow_on_rank_1())
    return {**result.summary, "behind": behind.to_dict()}


def _slow_on_rank_1() -> Iterator[torch.Tensor]:
    for _ in range(STEPS):
        time.sleep(0.3 * torch.distributed.get_rank())
        yield torch.ones(1, 32)


class _Summed(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x).sum()  # type: ignore[no-any-return]


def test_ranks_that_communicate_most_of_the_time(tmp_path: Path) -> None:
    summaries = run_in_processes(train_one_rank, str(tmp_path))
    found = [{finding["id"]: finding for finding in summary["findings"]} for summary in summaries]
    assert all(one["communication-bound"]["share"] > 0.1 for one in found)
    assert not any("slow-backend" in one for one in found)  # gloo is what a CPU has
    assert [summary["comparable"]["world_size"] for summary in summaries] == [2, 2]
    waits = summaries[0]["behind"]
    (finding,) = (one for one in waits["summary"]["findings"] if "communication" in one["id"])
    assert finding["title"].endswith("communication with nothing computing beside it, mostly waiting for rank 1")
    steps = len(waits["run"]["timed_steps"])
    assert finding["details"]["exposed_us"] == pytest.approx(
        waits["time"]["exposed_communication_us"] / steps, rel=1e-5
    )


def test_one_rank_alone(tmp_path: Path) -> None:
    model = _Summed(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 20_000)))
    assert "communication-bound" not in told(profiled(model, tmp_path, rows=1))


# --- the summary as a whole ----------------------------------------------------------------------


def test_the_summary_of_a_llama_that_trains(tmp_path: Path) -> None:
    case = build("llama", Size(layers=6, hidden=64, tokens=32))
    with profiler(case, tmp_path) as prof:
        train(case, steps=6)
    summary = json.loads(json.dumps(result_of(prof).to_dict()))["summary"]
    assert len(json.dumps(summary)) / 3 < 2000
    assert summary["verdict"]
    assert len(summary["findings"]) <= 10
    alike = summary["comparable"]
    assert alike["model"] == "LlamaForCausalLM"
    assert alike["blocks"] == 6
    assert alike["parameters"] == sum(p.numel() for p in case.model.parameters())
    assert alike["time_basis"] == "cpu"
    assert alike["torch"] == torch.__version__
    assert (alike["shapes_in_timed_steps"], alike["memory_in_timed_steps"], alike["complete"]) == (False, True, True)
    assert alike["attention_shape"] == [2, 4, 32, 16]
    assert alike["shapes"]
    assert alike["dtypes"] == ["float32"]
    saved = [finding["saves_at_most_us"] for finding in summary["findings"] if finding["saves_at_most_us"]]
    assert all(0 < micros <= alike["step_us"] for micros in saved)


@pytest.mark.parametrize(
    ("change", "same"),
    [({}, True), ({"tokens": 48}, False), ({"batch": 3}, False), ({"attention": "eager"}, True)],
    ids=str,
)
def test_equal_sizes_have_equal_digests(tmp_path: Path, change: dict[str, Any], same: bool) -> None:
    digests = []
    for name, sizes in (("one", {}), ("other", change)):
        case = build("llama", Size(layers=1, **sizes))
        with profiler(case, tmp_path / name) as prof:
            train(case, steps=6)
        digests.append(result_of(prof).summary["comparable"]["shapes"])
    assert (digests[0] == digests[1]) is same
