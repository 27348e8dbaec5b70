"""The pages "Moving from": a script moved by the page alone runs, and writes the files and numbers that it promises."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import profiler_wrapper as pw
from profiler_wrapper import compat
from profiler_wrapper.__main__ import main
from profiler_wrapper.monitor.sinks import Sink, tagged

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
PAGES = ("profiler-tools", "internlm", "flagscale", "mfu", "torch-profiler")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
NAME = re.compile(r"`([^`]+)`")

# What the tables name and nothing here can call: what is on the other tool's side of the move.
THEIRS_ALONE = {
    "*_trace.json", "*_cuda_time_plot.png", "*_memory_usage_line_chart.png", "*_memory_usage.txt",
    "log_dir/*_rank_*.log", "time_log/timer_rank0.log", "time_log/",
    "--profiling", "initialize_llm_profile()", "{JOB_NAME}/{start_time}/traces/rank{}_dp{}_tp{}_pp{}",
    "*.pt.trace.json", "tensorboard --logdir", "memory_trace/rank{}_dp{}_tp{}",
    "--tensorboard", "--tensorboard-dir", "hooks.py", "integration.py", "arguments.py", "perf_metrics.py",
    "perf_logger.py", "flops_calculator.py", "with_flops", "add", "mul",
    "get_gpu_peak_flops()", "activities=[CUDA]", "eval()", "min(mfu, 1.0)", "step_time",
    "add_metadata()", "export_stacks(path)", "events()", "prof.start()", "prof.stop()", "worker_name=",
    ".table(sort_by=..., row_limit=...)", "toggle_collection_dynamic()",
}  # fmt: skip

# Tables, by their first cell, that tests below read and check row by row; so are those of the same tags.
READ_BY_TESTS = {"`*_trace.json`", "`memory_trace/rank{}_dp{}_tp{}`", "`perf_metrics_<time>.log`", "`perf/mfu`"}


def page_of(page: str) -> str:
    return (ROOT / "docs" / "migrate" / f"{page}.md").read_text(encoding="utf-8")


def tables(page: str) -> list[list[list[str]]]:
    """The cells of each table, without its heading."""
    found = re.findall(r"^\|[^\n]*\n\|[-|]+\|\n((?:\|[^\n]*\n)+)", page_of(page), re.MULTILINE)
    return [[[cell.strip() for cell in line.strip("|").split(" | ")] for line in rows.splitlines()] for rows in found]


def start() -> dict[str, Any]:
    """What the pages' prelude gives."""
    space: dict[str, Any] = {"__name__": "page"}
    exec((ROOT / "tests" / "docs_preludes" / "tiny.py").read_text(encoding="utf-8"), space)
    return space


def follow(page: str) -> dict[str, Any]:
    """The page's own scripts, run in order in the current directory."""
    space = start()
    for language, code in BLOCK.findall(page_of(page)):
        if language == "python":
            exec(compile(code, page, "exec"), space)
        elif language == "sh":
            for line in code.splitlines():
                assert main(line.split()[1:]) == 0
    return space


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", PAGES)
def test_what_a_table_names_is_run_here_or_on_the_page(page: str) -> None:
    run = Path(__file__).read_text(encoding="utf-8").split("def page_of", 1)[1]
    run += "".join(code for language, code in BLOCK.findall(page_of(page)) if language in ("python", "sh"))
    words = set(re.findall(r"[\w/:-]+", run)) | set(re.findall(r"\w+", run))
    rows = [row for table in tables(page) if table[0][0] not in READ_BY_TESTS for row in table]
    named = {name for row in rows if row[1] != "the same tag" for name in NAME.findall(row[0])}
    left_out = []
    for name in sorted(named - THEIRS_ALONE):
        parts = set(re.findall(r"[\w/:-]*\w", re.sub(r"<\w+>|\*|\{\}|\.{3}", " ", name)))
        if not parts <= words and name not in run:
            left_out.append(name)
    assert left_out == []


# --- the wrapper and the timer of profiler tools --------------------------------------------------


def test_profiler_tools(here: Path) -> None:
    space = follow("profiler-tools")
    (files,) = [table for table in tables("profiler-tools") if table[0][0] == "`*_trace.json`"]
    promised = [NAME.findall(row[1])[0] for row in files]
    moved = [name.replace("<run>", "moved") for name in promised if name.startswith("outputs/")]
    assert len(moved) == 5 and all((here / name).is_file() for name in moved)
    result = space["profiler"].result
    (block_us,) = result.series["block"]
    assert 0 < block_us * 1e3 <= result.time.total_ns
    text = (here / "outputs/moved/rank0/cogvideo_memory_usage.txt").read_text()
    assert "average_slope" in text and re.search(r"^\d+\.\d{3}  model\.layers\.1$", text, re.MULTILINE)


@pytest.mark.parametrize("is_st", [True, False])
def test_profiler_tools_every_option(here: Path, is_st: bool) -> None:
    space = start()
    options: dict[str, Any] = {
        "activities": [ProfilerActivity.CPU, ProfilerActivity.CUDA],
        "profile_memory": True,
        "record_shapes": True,
        "log_dir": "tables",
        "mem_dir": "snapshots",
        "enabled_record_memory_pickle": True,
        "enabled_record_cuda_average_time": False,
        "enable_record_cuda_mm": False,
        "enable_print_summary": True,
        "track": ("temporal block", "aten::mm", "cogvideo block", "aten::_flash_attention_forward"),
    }

    def fn() -> torch.Tensor:
        return space["model"](**space["batches"][0]).loss  # type: ignore[no-any-return]

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the memory snapshot is not available")
        with pw.ProfilerWrapper(is_st, **options) as prof, torch.profiler.record_function("temporal block"):
            out = prof.record_function("spatial block", fn)
    assert isinstance(out, torch.Tensor)
    prefix = "opensora" if is_st else "cogvideo"
    assert [path.name for path in (here / "tables").iterdir()] == [f"{prefix}_rank_0.log"]
    assert len(list((here / "snapshots").glob(f"{prefix}_mem_*.pickle"))) == torch.cuda.is_available()
    written = {path.name for path in (here / "outputs").rglob("*")}
    assert f"{prefix}_trace.json" in written
    assert not {f"{prefix}_cuda_time_plot.png", f"{prefix}_memory_usage.txt"} & written
    assert prof.result is not None
    series = prof.result.series
    assert {"spatial block", "temporal block", "aten::mm"} <= set(series)
    assert series["temporal block"][0] >= series["spatial block"][0] > 0
    mm = [row for row in prof.result.operators if row.op == "aten::mm"]
    assert series["aten::mm"][0] == pytest.approx(sum(row.time_ns for row in mm) / 1e3, rel=1e-6)


def test_the_timer_by_its_other_name(here: Path) -> None:
    timer = compat.MyTimer(run_name="timer")
    timer.start("forward")
    timer.stop("forward")
    log = timer.dump()
    assert log == here / "outputs/timer/timers/timer_rank0.log"
    assert re.fullmatch(r"\[RANK 0\] forward, start=\S+, end=\S+, cpu_dur=\S+s, cuda_dur=\S+ms\n", log.read_text())


# --- InternLM -------------------------------------------------------------------------------------


def parts_in_mb(log: Path) -> list[dict[str, float]]:
    states = log.read_text().split("Memory State:")[1:]
    return [{name: float(mb) for name, mb in re.findall(r"(\w+_memory): (\d+\.\d\d) MB", one)} for one in states]


def parts_by_title(log: Path) -> list[tuple[str, dict[str, float]]]:
    """The comment above each state, and its parts."""
    above = [text.strip().splitlines()[-1] for text in log.read_text().split("Memory State:")[:-1]]
    return list(zip(above, parts_in_mb(log), strict=True))


def test_internlm(here: Path) -> None:
    space = follow("internlm")
    (files,) = [table for table in tables("internlm") if table[0][0] == "`memory_trace/rank{}_dp{}_tp{}`"]
    names = {NAME.findall(row[0])[0] for row in files[1:]}
    folders = (here / "memory_trace/rank0_dp0_tp0", here / "7b_train/Sep08_11-00-51/rank0_dp0_tp0_pp0/memory")
    for folder in folders:
        assert {path.name for path in folder.iterdir()} == names
    assert (folders[1].parent / "profile_trace.json").is_file()
    assert [result.run["timed_steps"] for result in space["prof"].results] == [[3]]
    params_mb = sum(parameter.numel() * 4 for parameter in space["model"].parameters()) / 2**20
    for folder in folders:
        for state in parts_in_mb(folder / "memory.log"):
            in_parts = sum(mb for name, mb in state.items() if name != "total_memory")
            assert in_parts == pytest.approx(state["total_memory"], abs=0.05)
            assert state["params_memory"] == pytest.approx(params_mb, abs=0.01)
            assert state["os_state_memory"] == pytest.approx(2 * params_mb, abs=0.01)
            assert state["os_params_memory"] == 0
        after = parts_by_title(folder / "memory.log")
        for moment, grads_mb, held in (("forward", 0, True), ("backward", params_mb, False)):
            states = [state for title, state in after if title.startswith(f"# after {moment}")]
            assert states and all(state["grads_memory"] == pytest.approx(grads_mb, abs=0.01) for state in states)
            assert all((state["activation_memory"] > 0.1) == held for state in states)
        log = (folder / "memory.log").read_text()
        assert log.count("---Layout---") == 1
        layers = re.findall(
            r"^layer: param_mem(\S*), layer_mem: ([\d.]+) MB, total_mem: ([\d.]+) MB$", log, re.MULTILINE
        )
        assert float(layers[0][2]) == pytest.approx(params_mb, abs=0.01)
        assert sum(float(layer_mem) for _, layer_mem, _ in layers) == pytest.approx(
            params_mb, abs=0.01 * len(layers) / 2
        )
        assert {f".{name}" for name, _ in space["model"].named_parameters()} <= {name for name, _, _ in layers}
        layouts = "params_layout: grads_layout: os_params_layout: os_state_layout: activation_base_layout:"
        assert all(f"\n{layout}\n" in log for layout in layouts.split())
        assert "time: " in log
        for page in names - {"memory.log"}:
            assert not re.search("https?://|src=", (folder / page).read_text())


def test_internlm_calls(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    space = start()
    memory = compat.SimpleMemoryProfiler([space["model"]], space["optimizer"], log_folder="memory_trace", total_steps=1)
    loss = space["model"](**space["batches"][0]).loss
    memory.point("params,grads", True)  # by position, as their own code has it: the name of the point
    memory.point(with_options="all", create=True)
    loss.backward()
    memory.step()
    log = Path("memory_trace/memory.log").read_text()
    assert "# params,grads, step 0" in log and "# point, step 0" in log
    monkeypatch.setenv("PROFILER_WRAPPER", "off")
    with pw.ProfilerWrapper(space["model"], output_dir="off", with_stack=True) as prof:
        space["step"](space["batches"][0])
        prof.step()
    assert prof.result is None and not (here / "off").exists()


# --- FlagScale ------------------------------------------------------------------------------------


class Rows(Sink):
    """Keeps the tags of each row."""

    def __init__(self) -> None:
        self.tags: list[dict[str, float]] = []

    def write_row(self, row: Any) -> None:
        self.tags.append(tagged(row))


class Writer:
    def __init__(self) -> None:
        self.tags: set[str] = set()

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.tags.add(tag)


def test_flagscale(here: Path) -> None:
    space = follow("flagscale")
    for folder, steps in (("logs/perf_monitor", [2, 4, 6]), ("outputs/logs/perf_monitor", [0, 2, 4, 5])):
        kinds = {re.sub(r"\d{8}_\d{6}", "<time>", path.name) for path in (here / folder).iterdir()}
        (files,) = [table for table in tables("flagscale") if table[0][0] == "`perf_metrics_<time>.log`"]
        assert kinds == {NAME.findall(" ".join(row[:2]))[0] for row in files}
        (text,) = (here / folder).glob("perf_metrics_*.log")
        assert [int(line.split()[2]) for line in text.read_text().splitlines()[5:]] == steps
    heading = next(here.glob("logs/perf_monitor/perf_metrics_*")).read_text().splitlines()[3]
    columns = ["Timestamp", "Step", "TFLOPS/GPU", "TFLOPS", "Samples/s", "Tokens/s", "Time(ms)", "Memory(GB)"]
    assert heading.split() == columns
    published = (ROOT / "tests/data/flagscale_example.log").read_text()
    assert heading in published
    data = space["data"]
    assert {"start_time", "end_time", "total_iterations"} <= data["session_info"].keys()
    statistics = {"avg_tflops_per_gpu", "max_tflops_per_gpu", "min_tflops_per_gpu", "avg_throughput_tokens"}
    assert statistics | {"peak_memory_gb"} <= data["final_statistics"].keys()
    for line in data["iteration_logs"]:
        assert line["TFLOPS_per_GPU"] == pytest.approx(float(space["flops"]) / 1e9 / line["step_time_ms"], rel=1e-3)
        assert line["tokens_per_sec"] == pytest.approx(32 / line["step_time_ms"] * 1e3, rel=1e-3)
    (summary,) = (here / "outputs/logs/perf_monitor").glob("perf_summary_*.json")
    for line in json.loads(summary.read_text())["iteration_logs"]:
        assert sum(line["breakdown_ms"].values()) == pytest.approx(line["step_time_ms"], rel=1e-6)
    assert (here / "course.png").stat().st_size > 10_000


def test_flagscale_options(here: Path) -> None:
    parser = compat.add_perf_monitor_arguments(argparse.ArgumentParser())
    defaults = vars(parser.parse_args([]))
    assert defaults == {
        "enable_perf_monitor": False,
        "perf_log_interval": 10,
        "perf_log_dir": None,
        "perf_console_output": False,
        "perf_log_format": "both",
        "perf_memory_tracking": True,
        "perf_breakdown": False,
        "perf_max_log_files": 10,
        "perf_model_type": "auto",
    }
    given = "--enable-perf-monitor --perf-log-interval 1 --perf-console-output --perf-memory-tracking --perf-breakdown"
    args = parser.parse_args([*given.split(), "--perf-log-dir", "theirs", "--perf-max-log-files", "1"])
    model = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "padded_vocab_size": 128, "seq_length": 16}
    vars(args).update(
        {**model, "ffn_hidden_size": 64, "max_position_embeddings": 16, "global_batch_size": 2, "swiglu": True}
    )
    writer, printed = Writer(), io.StringIO()
    with contextlib.redirect_stdout(printed):
        for _ in range(2):
            assert compat.initialize_perf_monitor(args) is compat.get_perf_monitor() is not None
            for iteration in (1, 2):
                compat.perf_monitor_start_iteration(iteration)
                compat.perf_monitor_end_iteration(iteration, writer=writer)
            compat.perf_monitor_end_training(writer=writer)
    assert re.findall(r"^step \d", printed.getvalue(), re.MULTILINE) == ["step 1", "step 2"] * 2
    assert len(list((here / "theirs").glob("perf_metrics_*.log"))) == 1  # the newest
    tags = {NAME.findall(row[0])[0] for table in tables("flagscale") for row in table if row[1] == "the same tag"}
    assert len(tags) == 6 and tags <= writer.tags


@pytest.mark.parametrize("section", ["train: {system: {%s}}", "system: {%s}", "%s"])
def test_flagscale_configuration(here: Path, section: str) -> None:
    text = section % "enable_perf_monitor: true, perf_log_interval: 3"
    Path("conf.yaml").write_text(text if text.startswith(("train", "system")) else f"{{{text}}}")
    config = pw.MonitorConfig.from_yaml("conf.yaml")
    assert config.perf_log_interval == 3 and config.enable_perf_monitor
    Path("conf.yaml").write_text("system: {perf_log_intervall: 3}")
    with pytest.raises(pw.WrongUse, match="'perf_log_interval'"):
        pw.MonitorConfig.from_yaml("conf.yaml")


def test_flagscale_old_logs_and_module_names(here: Path) -> None:
    log = here / "perf_metrics_20240129_103000.log"
    log.write_text((ROOT / "tests/data/flagscale_example.log").read_text())
    assert main(["monitor", str(log), "-o", "old.txt"]) == 0
    assert "126.71" in Path("old.txt").read_text()  # by time: not the mean of the two rows, 126.73
    (modules,) = [table for table in tables("flagscale") if table[0][0] == "`hooks.py`, `integration.py`"]
    for name in NAME.findall(modules[0][2]):
        assert callable(getattr(compat, name))
    assert compat.FLOPSMeasurementCallback(argparse.Namespace(enable_perf_monitor=True), log_interval=1)


# --- MFU scripts ----------------------------------------------------------------------------------

# The model of tests/docs_preludes/tiny.py: width 32, 64 in the MLP, 128 tokens known, 2 layers.
MFU_MATMULS = 2 * 2 * 16 * (2 * (4 * 32 * 32 + 3 * 32 * 64) + 32 * 128)
MFU_ATTENTION = 2 * 4 * 2 * 16**2 * 32


def test_mfu(here: Path) -> None:
    space = follow("mfu")
    assert space["by_op"]["aten::mm"] == MFU_MATMULS
    assert space["flops"].forward == MFU_MATMULS + MFU_ATTENTION
    assert space["mfu"] == pytest.approx(3 * (MFU_MATMULS + MFU_ATTENTION) / 1e12 / 0.1, rel=1e-12)
    assert space["model"].training
    log = json.loads((here / "outputs/training_log.json").read_text())
    assert log.keys() == {"step_logs", "epoch_logs", "total_training_time"}
    for entry in log["step_logs"][1:]:
        by_hand = 3 * (MFU_MATMULS + MFU_ATTENTION) / 1e12 / entry["step_time"]
        assert entry["mfu"] == pytest.approx(by_hand, rel=1e-9)
        assert entry["tokens_per_second"] == pytest.approx(32 / entry["step_time"], rel=1e-9)
    (steps,) = (here / "outputs/logs/perf_monitor").glob("perf_steps_*.jsonl")
    assert '"flops_source":"measured"' in steps.read_text()


@pytest.mark.parametrize("as_file", [True, False])
def test_mfu_monitor_by_position(here: Path, as_file: bool) -> None:
    space, rows = start(), Rows()
    Path("config.yaml").write_text("monitoring:\n  flops_profile_freq: 500\nmodel: {name: llama}\n")
    config: Any = "config.yaml" if as_file else {"monitoring": {"flops_profile_freq": 7}}
    options = {"perf_log_interval": 1, "sinks": [rows], "model": space["model"], "peaks": "float32=1"}
    output_dir, log_file, flops_profile_freq = "./outputs", "training_log.json", None if as_file else 500
    monitor = pw.TrainingMonitor(output_dir, config, log_file, flops_profile_freq, **options)
    assert monitor.config.flops_profile_freq == 500
    step, epoch, loss, grad_norm, learning_rate, skip_wandb = 0, 0, torch.tensor(2.0), 1.0, 1e-3, True
    attention_mask = torch.tensor([[1] * 10 + [0] * 6] * 2)
    for step in range(3):
        space["step"](space["batches"][step])
        monitor.log_step(step, epoch, loss, grad_norm, learning_rate, attention_mask, skip_wandb)
    monitor.close()
    (tags,) = [table for table in tables("mfu") if table[0][0] == "`perf/mfu`"]
    names = {NAME.findall(row[0])[0] for row in tags}
    last = rows.tags[-1]
    assert len(names) == 6 and names <= last.keys()
    assert last["perf/mfu_percent"] == pytest.approx(100 * last["perf/mfu"])
    assert last["perf/tokens_per_second"] == pytest.approx(20 / last["perf/step_time"])  # real tokens
    assert last["train/loss"] == 2.0


def test_mfu_is_not_cut_off_and_never_zero_for_unknown() -> None:
    model = start()["model"]
    with pytest.warns(pw.ProfilerWrapperWarning, match="more than the peak"):
        mfu = compat.calculate_mfu_with_profiler(model, batch_size=2, seq_length=16, step_time=1e-7, peaks="float32=1")
    assert mfu == pytest.approx(51.11808, rel=1e-9)
    with pytest.warns(pw.ProfilerWrapperWarning, match="not available"):
        assert math.isnan(compat.calculate_mfu_with_profiler(model, 2, 16, step_time=0, peaks="float32=1"))


# --- torch.profiler -------------------------------------------------------------------------------


def test_torch_profiler(here: Path) -> None:
    space = follow("torch-profiler")
    moved = here / "outputs/moved"
    assert (moved / "report.html").is_file() and (here / "theirs_report.html").is_file()
    assert (moved / "rank0/profile_trace.json").is_file()
    assert (moved / "rank0/profile_memory_categories_plot.png").is_file()  # for export_memory_timeline(path)
    assert {path.name for path in (here / "profiling/kept/rank0").iterdir()} == {
        "profile_trace.json.gz",
        "result.json",
        "run.json",
    }  # tensorboard_trace_handler(dir_name) with use_gzip=True
    cycles = here / "outputs/cycles/rank0"
    assert (cycles / "result.json").is_file() and (cycles / "steps_4-4/result.json").is_file()
    result = space["result"]
    assert result.run["timed_steps"] == [2, 3, 4]
    assert sum(row.self_time_ns for row in result.layers) + result.time.unattributed_ns == result.time.total_ns


def test_torch_profiler_arguments() -> None:
    (arguments,) = [table for table in tables("torch-profiler") if table[0][0] == "`activities`"]
    left_out = [name for row in arguments if row[1].startswith("not") for name in NAME.findall(row[0])]
    given = dict.fromkeys(left_out, True)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        pw.ProfilerWrapper(
            None, activities=[ProfilerActivity.CPU], record_shapes=True, profile_memory=True, with_stack=True, **given
        )
    assert sorted(str(one.message).split("=")[0] for one in said) == sorted(left_out)
    assert {"on_trace_ready", "with_flops", "with_modules", "acc_events", "use_cuda", "experimental_config"} <= {*given}
    assert {"execution_trace_observer", "post_processing_timeout_s", "custom_trace_id_callback"} <= {*given}
    assert len(given) == 9


def test_the_columns_of_key_averages(here: Path) -> None:
    space = start()
    space["step"](space["batches"][0])
    with profile(
        activities=[ProfilerActivity.CPU], record_shapes=True, profile_memory=True, with_flops=True, with_stack=True
    ) as theirs:
        for batch in space["batches"][:2]:
            space["step"](batch)
    theirs.export_chrome_trace("theirs.json")
    result = pw.load("theirs.json")
    frame = result.to_pandas("operators")
    assert not frame.duplicated(["op", "phase"]).any()
    ours = frame.groupby("op")[["calls", "self_time_us", "time_us", "self_cpu_time_us", "cpu_time_us"]].sum()
    averages = {event.key: event for event in theirs.key_averages() if event.key in ours.index}
    assert len(averages) == len(ours) - ("(no op)" in ours.index) > 50
    calls_itself = {"aten::mul", "aten::div", "aten::div_", "aten::arange", "aten::pow", "aten::add", "aten::mean"}
    for name, event in averages.items():
        row = ours.loc[name]
        assert row.self_cpu_time_us == pytest.approx(event.self_cpu_time_total, abs=1), name
        assert row.self_time_us == row.self_cpu_time_us and row.time_us == row.cpu_time_us  # self_device_time_total
        if name not in calls_itself:
            assert row.calls == event.count, name
            assert row.cpu_time_us == pytest.approx(event.cpu_time_total, abs=1), name
            assert row.cpu_time_us / row.calls == pytest.approx(event.cpu_time, abs=1), name  # device_time_total
    assert ours.loc["aten::mul", "calls"] > averages["aten::mul"].count
    assert "Optimizer.step#AdamW.step" not in ours.index
    memory = result.to_pandas("op_memory").set_index("op")
    softmax = averages["aten::_log_softmax"]  # frees nothing: cpu_memory_usage, device_memory_usage, as on a device
    assert memory.loc["aten::_log_softmax", "allocated_bytes"] == softmax.self_cpu_memory_usage
    assert memory.loc["aten::_log_softmax", "kept_bytes"] == softmax.self_cpu_memory_usage  # self_device_memory_usage
    mm = frame[frame.op == "aten::mm"]
    assert all("float32[32, 32], float32[32, 32]" in shapes or shapes for shapes in mm["shapes"])  # input_shapes
    stack = [source for sources in mm["sources"] for source in sources]
    assert any("modeling_llama.py:" in source for source in stack)
    by_shape = theirs.key_averages(group_by_input_shape=True)
    theirs_mm = sum(event.count for event in by_shape if event.key == "aten::mm")
    by_stack = theirs.key_averages(group_by_stack_n=5)
    assert sum(event.count for event in by_stack if event.key == "aten::mm") == theirs_mm
    products = result.to_pandas("products")
    assert products[products.op == "aten::mm"].calls_per_step.sum() * len(result.steps or [0]) == theirs_mm
    assert len(result.to_pandas("attention_calls")) > 0
    totals = sum(event.self_cpu_time_total for event in theirs.key_averages())
    assert totals > 1.2 * result.time.total_ns / 1e3  # names count as work there
