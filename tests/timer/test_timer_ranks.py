"""The timers of a job: a file for each rank, whenever and however its rank becomes known."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from processes import started_as_ranks
from profiler_wrapper.timer.timer import Timer
from profiler_wrapper.trace.spans import SPAN_COLUMNS
from timed_runs import files_of, header_of, span_rows, text_rows

ROOT = Path(__file__).parents[2]

# The snippet of the tool that it takes the place of, its import adapted, within a program of several ranks.
SNIPPET = """
    from profiler_wrapper import global_timer

    with global_timer("before the group"):
        import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    model = torch.nn.Linear(8, 8)

    for _ in range(3):
        # begin a phase
        global_timer.start("forward")

        loss = model(torch.ones(2, 8)).sum()

        # end it
        global_timer.stop("forward")

        with global_timer("backward"):
            loss.backward()
            with global_timer("all_reduce"):
                dist.all_reduce(model.weight.grad)
        global_timer.step()

    # write all of them
    global_timer.dump()
    dist.barrier()
    dist.destroy_process_group()
"""


@pytest.fixture(scope="module", params=[1, 4])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The lines of text that the snippet has left, by rank."""
    folder, world_size = tmp_path_factory.mktemp("run"), request.param
    script = folder / "train.py"
    script.write_text(textwrap.dedent(SNIPPET))
    with started_as_ranks(script, world_size=world_size, cwd=folder, environment={"PYTHONPATH": str(ROOT)}) as ranks:
        for rank in ranks:
            rank.wait()
    assert [(rank.returncode, rank.stderr) for rank in ranks] == [(0, "")] * world_size
    paths = files_of(folder / "outputs")
    assert [path.name for path in paths] == [f"timer_rank{rank}.log" for rank in range(world_size)]
    assert len({path.parent for path in paths}) == 1
    assert len(files_of(folder / "outputs", "*")) == 2 * world_size
    return paths


@pytest.mark.full
def test_the_snippet_of_global_timer(run: list[Path]) -> None:
    for rank, path in enumerate(run):
        rows, spans = text_rows(path), span_rows(path)  # each line of text matches the format
        assert {row["rank"] for row in rows} == {str(rank)}
        assert {row["cuda_dur"] for row in rows} == {"nan"}
        assert [row["name"] for row in rows] == [span["name"] for span in spans]
        in_steps = [(span["name"], span["step"]) for span in spans if span["name"] != "before the group"]
        assert in_steps == [(name, step) for step in range(3) for name in ("forward", "all_reduce", "backward", "step")]
        assert all(span["rank"] == rank for span in spans)
        header = header_of(path)
        assert (header["rank"], header["world_size"]) == (rank, len(run))


@pytest.mark.full
def test_the_text_becomes_a_data_frame_by_a_regular_expression(run: list[Path]) -> None:
    pandas = pytest.importorskip("pandas")
    pattern = re.compile(
        r"\[RANK (\d+)\] (.+), start=([\d.]+), end=([\d.]+), cpu_dur=([\d.]+)s, cuda_dur=([\d.]+|nan)ms"
    )
    rows = [row for path in run for row in pattern.findall(path.read_text())]
    frame = pandas.DataFrame(rows, columns=["rank", "name", "start", "end", "cpu_dur", "cuda_dur"]).astype(
        {"rank": int, "start": float, "end": float, "cpu_dur": float, "cuda_dur": float}
    )
    assert len(frame) == len(run) * 13
    assert ((frame.end - frame.start - frame.cpu_dur).abs() < 2e-6).all()
    assert frame.cuda_dur.isna().all()
    counts = frame.groupby(["rank", "name"]).size()
    assert [counts.loc[(rank, "forward")] for rank in range(len(run))] == [3] * len(run)
    lines = pandas.concat(pandas.read_json(path.with_suffix(".jsonl"), lines=True) for path in run)
    lines = lines[lines.name.notna()]
    assert len(lines) == len(frame)
    assert set(lines.columns) - set(SPAN_COLUMNS) <= {"header"}


def late_rank(rank: int, world_size: int, folder: str) -> None:
    """A process that learns which rank it is when it joins the group."""
    timer = Timer(Path(folder) / "outputs", device="cpu")
    with timer("early"):
        pass
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    dist.barrier()
    with timer("late"):
        pass
    timer.dump()
    with timer("after"):
        pass
    timer.close()
    dist.destroy_process_group()


@pytest.mark.full
def test_files_move_to_their_rank_when_it_becomes_known(tmp_path: Path) -> None:
    multiprocessing.start_processes(late_rank, (2, str(tmp_path)), nprocs=2, start_method="fork")
    paths = files_of(tmp_path / "outputs", "*.log")
    assert [path.name for path in paths] == ["timer_rank0.log", "timer_rank1.log"]
    assert len({path.parent for path in paths}) == 1
    for rank, path in enumerate(paths):
        assert [(row["rank"], row["name"]) for row in text_rows(path)] == [
            (str(rank), name) for name in ("early", "late", "after")
        ]
        assert [(span["rank"], span["name"]) for span in span_rows(path)] == [
            (rank, name) for name in ("early", "late", "after")
        ]
        headers = [line for line in path.with_suffix(".jsonl").read_text().splitlines() if '"schema_version"' in line]
        assert len(headers) == 1
        assert json.loads(headers[0])["header"]["world_size"] == 2
    directories = [path for path in (tmp_path / "outputs").rglob("*") if path.is_dir()]
    assert len(directories) == 2  # nothing is left of where they were: the run and its timers


class Mesh:
    """What is asked of a DeviceMesh."""

    mesh_dim_names = ("pp", "dp")
    shape = (2, 2)

    def get_coordinate(self) -> list[int]:
        return [1, 0]

    def get_rank(self) -> int:
        return 2


def test_the_place_in_the_mesh_is_in_each_line(tmp_path: Path) -> None:
    timer = Timer(tmp_path, device="cpu", device_mesh=Mesh(), world_size=4)
    with timer("forward"):
        pass
    timer.close()
    (path,) = files_of(tmp_path)
    assert path.name == "timer_rank2.log"
    (span,) = span_rows(path)
    expected: dict[str, Any] = {"rank": 2, "pp": 1, "dp": 0, "tp": 0}
    assert {name: span[name] for name in expected} == expected
    assert header_of(path)["coordinates"] == {"dp": 0, "tp": 0, "pp": 1}
