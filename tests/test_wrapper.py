"""ProfilerWrapper around real loops: which steps are recorded, and what of them is reported."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import models
import profiler_wrapper as pw
from models import Case
from profiler_wrapper.capture import growth
from profiler_wrapper.run import recorder
from profiling import directory_of, event_names, profiler, result_of, rows_with_time
from programs import TESTS, run_program

# --- which steps --------------------------------------------------------------------------------


def test_five_steps_are_recorded_and_the_last_three_reported(
    case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with profiler(case, tmp_path, files="auto", enable_print_summary=True) as prof:
        models.train(case, steps=8)
    result = result_of(prof)
    assert result.complete
    assert result.run["full_steps"] == [0, 1]
    assert result.run["timed_steps"] == [2, 3, 4] == [row.step for row in result.steps if row.step is not None]
    assert result.time.total_ns == sum(row.self_time_ns for row in result.layers) + result.time.unattributed_ns
    assert (
        rows_with_time(result, "forward") == rows_with_time(result, "backward") == ["model.layers.0", "model.layers.1"]
    )

    assert sorted(path.name for path in directory_of(prof).iterdir()) == [
        "memory",
        "profile_cuda_time_plot.png",
        "profile_full_trace.json",
        "profile_memory_categories_plot.png",
        "profile_memory_usage.txt",
        "profile_memory_usage_line_chart.png",
        "profile_rank_0.log",
        "profile_roofline_plot.png",
        "profile_trace.json",
        "result.json",
        "run.json",
    ]
    run = json.loads((directory_of(prof) / "run.json").read_text())
    assert run["complete"] is True
    assert "record_shapes" not in json.loads((directory_of(prof) / "profile_trace.json").read_text())
    assert json.loads((directory_of(prof) / "profile_full_trace.json").read_text())["record_shapes"] == 1
    printed = capsys.readouterr().out
    assert "self_attn" in printed
    *table, where, page = printed.splitlines()
    assert len(table) + 2 <= 25
    assert where.endswith(f"in {directory_of(prof)}")
    assert page == f"The page: {directory_of(prof).parent / 'report.html'}"
    assert directory_of(prof).parent.joinpath("report.html").stat().st_size > 3e5


@pytest.mark.full
def test_a_name_that_is_taken_is_told(case: Case, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    said = []
    for _ in range(3):
        with profiler(case, tmp_path, run_name="first", files="result"):
            models.train(case, steps=5)
        said.append([line for line in capfd.readouterr().err.splitlines() if "profiler_wrapper" in line])
    line = "profiler_wrapper: the run first is there already, so this one is first-{}"
    assert said == [[], [line.format(2)], [line.format(3)]]


def test_load_gives_the_same_as_the_block(case: Case, tmp_path: Path) -> None:
    with profiler(case, tmp_path) as prof:
        models.train(case, steps=6)
    assert pw.load(directory_of(prof)).to_dict() == result_of(prof).to_dict()


@pytest.mark.full
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_a_block_that_ends_early_reports_what_it_has_and_says_so(case: Case, tmp_path: Path, steps: int) -> None:
    with profiler(case, tmp_path) as prof:
        models.train(case, steps=steps)
    result = result_of(prof)
    assert result.run["timed_steps"] == ([0, 1][:steps] if steps < 3 else [2, 3])
    assert any("times are of warm-up steps" in warning for warning in result.warnings) == (steps < 3)


@pytest.mark.full
def test_accumulated_micro_batches_are_one_step(case: Case, tmp_path: Path) -> None:
    with profiler(case, tmp_path, steps="1") as prof:
        models.train(case, steps=3, accumulate=8)
    result = result_of(prof)
    assert result.run["timed_steps"] == [1]
    assert {row.calls for row in result.rows("LlamaForCausalLM") if row.phase == "forward"} == {8}


def test_the_users_steps_count_and_the_optimizers_do_not_count_twice(case: Case, tmp_path: Path) -> None:
    optimizer = models.optimizer_of(case.model)
    with profiler(case, tmp_path) as prof:
        for step in range(6):
            models.train_step(case, case.model, optimizer, seed=step)
            prof.step()
    result = result_of(prof)
    assert result.run["timed_steps"] == [2, 3, 4]
    assert {row.calls for row in result.rows("LlamaForCausalLM") if row.phase == "forward"} == {3}


def test_windows_have_a_directory_and_a_result_each(case: Case, tmp_path: Path) -> None:
    with profiler(case, tmp_path, steps="2-3,6", files=("result", "sunbursts")) as prof:
        models.train(case, steps=9)
    assert [result.run["timed_steps"] for result in prof.results] == [[2, 3], [6]]
    assert [result.run["full_steps"] for result in prof.results] == [[1], [5]]
    assert result_of(prof) is prof.results[-1]
    assert (directory_of(prof) / "result.json").is_file()
    later = directory_of(prof) / "steps_6-6"
    assert (later / "result.json").is_file()
    assert (later / "memory" / "params_memory_sunburst.html").is_file()
    assert not list(tmp_path.rglob("*.js"))
    assert not list(tmp_path.rglob("*part*"))


@pytest.mark.full
def test_a_schedule_takes_the_place_of_steps(case: Case, tmp_path: Path) -> None:
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=2)
    with profiler(case, tmp_path, schedule=schedule) as prof:
        models.train(case, steps=10)
    assert [result.run["timed_steps"] for result in prof.results] == [[2, 3], [6, 7]]


@pytest.mark.full
def test_warm_up_goes_on_while_something_compiles(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    case.model.register_forward_pre_hook(lambda module, args: calls.append(module))
    monkeypatch.setattr(recorder, "compilations", lambda: min(len(calls), 3))  # in each of the first three steps
    with profiler(case, tmp_path) as prof:
        models.train(case, steps=8)
    assert result_of(prof).run["full_steps"] == [0, 1, 2, 3]
    assert result_of(prof).run["timed_steps"] == [4, 5, 6]


@pytest.mark.full
def test_an_evaluation_first_is_not_mistaken_for_the_steps(case: Case, tmp_path: Path) -> None:
    with profiler(case, tmp_path) as prof:
        with torch.no_grad():
            for _ in range(3):
                case.model(**case.batch(0))
        models.train(case, steps=8)
    result = result_of(prof)
    assert len(result.run["timed_steps"]) == 3
    assert rows_with_time(result, "backward")


@pytest.mark.full
def test_without_an_optimizer_each_call_without_gradients_is_a_step(case: Case, tmp_path: Path) -> None:
    with profiler(None, tmp_path) as prof, torch.no_grad():
        for _ in range(7):
            case.model(**case.batch(0))
    result = result_of(prof)
    assert result.run["timed_steps"] == [2, 3, 4]
    assert rows_with_time(result, "forward") == ["model.layers.0", "model.layers.1"]


@pytest.mark.full
def test_a_request_is_recorded_whole_with_prefill_and_decode(case: Case, tmp_path: Path) -> None:
    case.model.eval()
    ids = case.batch(0)["input_ids"]
    with profiler(case, tmp_path) as prof, torch.no_grad():
        tokens = case.model.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=40,
            min_new_tokens=40,
            do_sample=False,
            use_cache=True,
            pad_token_id=0,
        )
    assert tokens.shape[1] == ids.shape[1] + 40
    result = result_of(prof)
    calls = {row.phase: row.calls for row in result.rows("LlamaForCausalLM")}
    assert calls == {"prefill": 1, "decode": 39}


@pytest.mark.full
def test_shapes_in_all_or_in_none(case: Case, tmp_path: Path) -> None:
    for shapes in (True, False):
        with profiler(case, tmp_path, record_shapes=shapes) as prof:
            models.train(case, steps=6)
        assert directory_of(prof) is not None
        trace = json.loads((directory_of(prof) / "profile_trace.json").read_text())
        assert ("record_shapes" in trace) == shapes
        assert result_of(prof).run["timed_steps"] == [2, 3, 4]
        assert not (directory_of(prof) / "profile_full_trace.json").exists()


@pytest.mark.full
def test_growth_ends_an_open_ended_recording(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "MOST_GROWTH_BYTES", -1)
    monkeypatch.setattr(growth, "LOOK_EVERY_S", 0.0)
    with profiler(case, tmp_path, steps="all") as prof:
        models.train(case, steps=6)
    result = result_of(prof)
    assert not result.complete
    assert any("the process grew by" in warning for warning in result.warnings)


# --- entered again and again --------------------------------------------------------------------


@pytest.mark.full
def test_a_with_around_each_layer_records_them_all_and_their_backward(tmp_path: Path) -> None:
    case = models.build("llama", layers=6)
    blocks = case.model.get_submodule(case.blocks)
    hidden = torch.randn(2, 8, 64, requires_grad=True)
    positions = case.model.get_submodule("model.rotary_emb")(hidden, torch.arange(8)[None])
    prof = profiler(None, tmp_path)
    x: torch.Tensor = hidden
    for block in blocks.children():
        with prof:
            x = block(x, position_embeddings=positions)
    x.sum().backward()
    prof.leave()
    result = result_of(prof)
    assert len(prof.results) == 1
    assert len(rows_with_time(result, "forward")) == len(rows_with_time(result, "backward")) == 6
    names = event_names(directory_of(prof) / "profile_trace.json", "user_annotation")
    assert [name for name in names if name.startswith("iteration#")] == [f"iteration#{n}" for n in range(6)]
    prof.leave()
    assert len(prof.results) == 1


@pytest.mark.full
def test_a_block_of_steps_entered_again_stays_open_until_leave(case: Case, tmp_path: Path) -> None:
    optimizer = models.optimizer_of(case.model)
    prof = profiler(case, tmp_path)
    for step in range(8):
        with prof:
            models.train_step(case, case.model, optimizer, seed=step)
    prof.leave()
    assert [result.run["timed_steps"] for result in prof.results] == [[0], [1, 2, 3, 4, 5, 6, 7]]


@pytest.mark.full
def test_a_part_called_once_is_reported_when_the_result_is_asked_for(case: Case, tmp_path: Path) -> None:
    layer = case.model.get_submodule("model.norm")
    with profiler(None, tmp_path) as prof:
        y = layer(torch.randn(2, 8, 64))
    y.sum().backward()
    result = result_of(prof)
    assert {row.phase for row in result.rows("LlamaRMSNorm")} >= {"forward", "backward"}


def test_an_unfinished_loop_over_layers_is_reported_at_exit(tmp_path: Path) -> None:
    program = f"""
import torch
from profiler_wrapper import ProfilerWrapper
blocks = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
prof = ProfilerWrapper(output_dir={str(tmp_path)!r}, files="result")
x = torch.randn(2, 4)
for block in blocks:
    with prof:
        x = block(x)
x.sum().backward()
"""
    done = run_program("-c", program, environment={"PYTHONPATH": str(TESTS.parent)})
    assert done.returncode == 0 and "Linear" in done.stdout
    assert len(list(tmp_path.rglob("result.json"))) == 1


# --- named blocks -------------------------------------------------------------------------------


@pytest.mark.full
def test_named_blocks_give_back_what_they_ran_and_become_series(case: Case, tmp_path: Path) -> None:
    with profiler(case, tmp_path, steps="all", record_shapes=False) as prof:
        for step in range(2):
            loss = prof.record_function("the forward", lambda seed=step: case.loss(case.model, case.batch(seed)))  # type: ignore[misc]
            with prof.record_function('a "quoted" name'):
                loss.backward()
            prof.step()
    result = result_of(prof)
    assert isinstance(loss, torch.Tensor)
    for name in ("the forward", "a 'quoted' name"):
        series = result.series[name]
        assert len(series) >= 2
        assert all(value is not None and value > 0 for value in series[:2])


def _by_function(prof: pw.ProfilerWrapper, run: Callable[[], object]) -> None:
    for _ in range(8):
        prof.record_function("block", run)


def _by_with(prof: pw.ProfilerWrapper, run: Callable[[], object]) -> None:
    for _ in range(8):
        with prof.record_function("block"):
            run()


def _around_all_calls(prof: pw.ProfilerWrapper, run: Callable[[], object]) -> None:
    with prof.record_function("block"):
        for _ in range(8):
            run()


def _with_step(prof: pw.ProfilerWrapper, run: Callable[[], object]) -> None:
    for _ in range(8):
        with prof.record_function("block"):
            run()
            prof.step()


@pytest.mark.full
@pytest.mark.parametrize("loop", [_by_function, _by_with, _around_all_calls, _with_step])
@pytest.mark.parametrize("how", ["inference", "by hand", "training", "a window"])
def test_every_call_of_a_named_block_is_in_its_series(
    tmp_path: Path, loop: Callable[[pw.ProfilerWrapper, Callable[[], object]], None], how: str
) -> None:
    """Steps end, and sessions change, in the midst of these blocks: where a root is called, or an optimizer steps."""
    layers = [nn.Linear(8, 8) for _ in range(3)]
    model, x = nn.Sequential(*layers), torch.ones(2, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def by_hand() -> None:
        for layer in layers:
            layer(x)

    def training() -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    run = {"by hand": by_hand, "training": training}.get(how, lambda: model(x))
    prof = pw.ProfilerWrapper(
        None if how == "by hand" else model,
        steps="2-3,6" if how == "a window" else "auto",
        output_dir=tmp_path,
        files="result",
        enable_print_summary=False,
        background=False,
    )
    with torch.set_grad_enabled(how == "training"), prof:
        loop(prof, run)
    assert len(prof.results) == (2 if how == "a window" else 1)
    for result in prof.results:
        assert result.time.total_ns > 0
        assert sum(result.series["block"]) == pytest.approx(result.time.total_ns / 1e3)  # type: ignore[arg-type]


def test_what_a_named_block_raises_passes_through(tmp_path: Path) -> None:
    class Boom(Exception):
        pass

    def boom() -> None:
        raise Boom

    prof = profiler(None, tmp_path)
    with pytest.raises(Boom), prof:
        prof.record_function("it", boom)
