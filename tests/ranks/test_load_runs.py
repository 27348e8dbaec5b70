"""A real run of two gloo processes and recorded traces of GPUs, through the whole of `ranks`."""

from __future__ import annotations

import json
import shutil
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

pytest.importorskip("duckdb")
pytest.importorskip("pyarrow")

import profiler_wrapper as pw
from processes import run_in_processes
from profiler_wrapper.__main__ import main
from profiler_wrapper.ranks.load import load_ranks, open_ranks
from profiler_wrapper.ranks.reduce import Reduced, Task, reduce_trace
from profiler_wrapper.ranks.report import RanksReport
from profiler_wrapper.result import load
from shared_traces import TRACE_NAMES, TRACES, needs_traces

STRAGGLERS = TRACES.parent / "stragglers"
SLEEP_S = 0.02
STEPS = 6


class Net(nn.Module):
    """Three blocks; that of rank 1 sleeps in its second."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(i) for i in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Block(nn.Module):
    def __init__(self, place: int) -> None:
        super().__init__()
        self.place, self.linear = place, nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.place == 1 and dist.get_rank() == 1:
            time.sleep(SLEEP_S)
        return torch.relu(self.linear(x))


def train(folder: str) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    files = ["trace", "result"]
    with pw.ProfilerWrapper(
        model,
        output_dir=folder,
        run_name="job",
        files=files,
        steps=f"2-{1 + STEPS}",
        background=False,
        enable_print_summary=False,
    ) as prof:
        for x in DataLoader(torch.randn(2 * (STEPS + 3), 16), batch_size=2):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            prof.step()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("ranks")
    run_in_processes(train, str(folder))
    return folder / "job"


@pytest.fixture(scope="module")
def report(run: Path) -> RanksReport:
    return load_ranks(run)


@pytest.mark.full
def test_each_step_adds_up(report: RanksReport) -> None:
    own = report.own
    assert own.ranks.tolist() == [0, 1]
    assert own.steps.tolist() == list(range(2, 2 + STEPS))
    assert np.array_equal(own.self_ns.sum(axis=2) + own.waiting_ns, own.wall_ns)
    assert (own.self_ns >= 0).all()
    assert (own.of("data") > 0).all()
    assert (own.of("optimizer") > 0).all()


@pytest.mark.full
def test_the_slow_rank_and_the_collectives(report: RanksReport) -> None:
    """A busy machine can only add; test_stragglers.py has verdict and waiting by a clock of its own."""
    assert (report.own.of("forward")[:, 1] >= SLEEP_S * 1e9).all()
    assert (report.own.waiting_ns > 0).any()
    assert report.arrivals is not None
    assert report.arrivals.times_last.sum() == len(report.arrivals.step) >= STEPS
    assert {(row.size, row.group) for row in report.communication if row.transfer_ns is not None} == {(2, "0-1")}


@pytest.mark.full
def test_layers_of_both_ranks(report: RanksReport) -> None:
    layers = report.layers
    assert layers is not None
    assert {f"layers.{i}" for i in range(3)} <= set(layers.layers)
    forward = layers.self_ns[:, :, layers.kinds.index("forward")] / 1e9
    slow = layers.layers.index("layers.1")
    assert forward[1, slow] >= SLEEP_S
    backward = layers.self_ns[:, :, layers.kinds.index("backward")]
    assert (backward[:, slow] > 0).all()
    assert report.missing == ()


@pytest.mark.full
def test_the_directory_of_a_rank_is_that_rank_of_the_run(run: Path) -> None:
    by_place, by_number = load_ranks(run / "rank1"), load_ranks(run, ranks=[1])
    assert by_place.own.steps.tolist() == by_number.own.steps.tolist() == list(range(2, 2 + STEPS))
    assert by_place.to_dict() == by_number.to_dict()


@pytest.mark.full
def test_a_result_has_its_run(run: Path) -> None:
    result = load(run)
    assert result.ranks is not None
    assert result.ranks is result.ranks
    assert result.ranks.own.ranks.tolist() == [0, 1]
    assert load(run, rank=1).ranks is not None


@pytest.mark.full
def test_reduced_once(run: Path) -> None:
    load_ranks(run)
    made = {path: path.stat().st_mtime_ns for path in run.glob("rank*/spans.parquet")}
    assert len(made) == 2
    load_ranks(run)
    assert {path: path.stat().st_mtime_ns for path in made} == made


@pytest.mark.full
def test_ranks_that_are_missing(run: Path, tmp_path: Path) -> None:
    job = tmp_path / "job"
    shutil.copytree(run, job)
    for file in (job / "rank1").iterdir():
        if file.name not in ("run.json", "result.json"):
            file.unlink()
    told = {(row.what, row.rank) for row in load_ranks(job).missing}
    assert ("trace of rank 1", 1) in told
    shutil.rmtree(job / "rank1")
    assert {(row.what, row.rank) for row in load_ranks(job).missing} == {("rank 1", 1)}


@pytest.mark.full
def test_a_broken_trace_is_said_and_the_others_are_read(run: Path, tmp_path: Path) -> None:
    job = tmp_path / "job"
    shutil.copytree(run, job)
    (job / "rank1" / "spans.parquet").unlink(missing_ok=True)
    next((job / "rank1").glob("*_trace.json")).write_text("no trace", encoding="utf-8")
    report = load_ranks(job)
    assert report.own.ranks.tolist() == [0]
    assert [row.rank for row in report.missing] == [1]
    assert "BrokenTrace" in report.missing[0].reason


# --- the command ---


@pytest.mark.full
def test_the_command(run: Path, report: RanksReport, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ranks", str(run)]) == 0
    assert report.verdict.sentence[:20] in capsys.readouterr().out
    assert main(["ranks", str(run), "--format", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    suspects = [(row["verdict"], row["rank"], row["layer"]) for row in told["suspects"]]
    assert suspects == [(one.verdict, one.rank, one.layer) for one in report.verdict.suspects]
    assert main(["ranks", str(run), "-o", f"{tmp_path}/report/"]) == 0
    assert {"ranks.txt", "ranks.json", "timeline.png", "heat_map.png"} <= {
        path.name for path in (tmp_path / "report").iterdir()
    }
    assert main(["ranks", str(run), "-o", f"{tmp_path}/report/"]) == 1
    assert "--force" in capsys.readouterr().err
    assert main(["ranks", str(run), "--ranks", "0", "--format", "json"]) == 0
    assert [row["rank"] for row in json.loads(capsys.readouterr().out)["ranks"]] == [0]


@pytest.mark.full
def test_wrong_use(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, code, message in [
        ([], 2, "say which run"),
        ([str(run), "--ranks", "7"], 2, "no spans of ranks 7"),
        ([str(run), "--ranks", "x"], 2, "say ranks as in 0-7"),
        ([str(run), "--columns", "a=rank"], 2, "--columns is of a table"),
        ([str(run), "--use", "timers"], 2, "no log of a timer"),
        ([str(tmp_path)], 1, "no rank's files in it"),
        ([str(tmp_path / "nowhere")], 1, "No such file"),
    ]:
        assert main(["ranks", *arguments]) == code
        assert message in capsys.readouterr().err


@pytest.mark.skipif(not STRAGGLERS.is_dir(), reason=f"no recorded job at {STRAGGLERS}")
def test_the_recorded_job(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ranks", "--spans", str(STRAGGLERS / "trace-ST.parquet"), "--format", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["verdict"], told["stage"]) == ("stage", 3)
    for name in ("ms", "mw"):
        published = json.loads((STRAGGLERS / f"{name}-ST.json").read_text(encoding="utf-8"))
        assert told[name] == pytest.approx(published[name.capitalize()], abs=0.05)


# --- recorded traces of GPUs ---


def reduced_rows(name: str, folder: Path) -> tuple[Reduced, list[dict[str, Any]]]:
    import pyarrow.parquet

    reduced = reduce_trace(Task(str(TRACES / name), str(folder / "spans.parquet"), str(folder / "other.parquet")))
    assert reduced.failure == ""
    return reduced, pyarrow.parquet.read_table(reduced.spans).to_pylist()


@needs_traces
@pytest.mark.parametrize("name", [name for name in TRACE_NAMES if "vllm" not in name and "ddp_training" not in name])
def test_layers_have_the_time_of_the_layer_table(name: str, tmp_path: Path) -> None:
    """The table's time of a layer, less its collectives, is the sum of its rows."""
    _, rows = reduced_rows(name, tmp_path)
    table: dict[tuple[str, str], int] = defaultdict(int)
    phases = {"prefill": "forward", "decode": "forward", "accumulate_grad": "backward"}
    for row in load(TRACES / name).layers:
        table[row.layer or "", phases.get(row.phase, row.phase)] += row.time_ns - row.communication_ns
    sums: dict[tuple[str, str], int] = defaultdict(int)
    for found in rows:
        if found["layer"] is not None and not found["layer"].startswith("## "):  # a named block of an optimizer's
            sums[found["layer"], found["kind"]] += found["device_ns"]
    assert sums == {key: table[key] for key in sums}


@needs_traces
def test_phases_and_collectives_of_a_checkpointed_model(tmp_path: Path) -> None:
    reduced, rows = reduced_rows("mi300_resnet_checkpointing_training.json.gz", tmp_path)
    assert (reduced.world_size, reduced.steps) == (8, (15, 16, 17))
    collectives = [row for row in rows if row["kind"] == "communication"]
    assert {row["group"] for row in collectives} == {"0-7"}
    result = load(TRACES / "mi300_resnet_checkpointing_training.json.gz")
    communication = sum(row.time_ns for row in result.classes if row.class_name == "communication")
    assert sum(row["duration_ns"] for row in collectives) == communication
    kinds = {row["kind"] for row in rows if row["depth"] == 0}
    assert kinds >= {"step", "forward", "backward", "recompute", "optimizer", "communication"}
    with open_ranks(reduced.spans) as (_, report):
        assert np.array_equal(report.own.self_ns.sum(axis=2) + report.own.waiting_ns, report.own.wall_ns)
