"""The command line: what it prints and writes, its exit codes, and that it overwrites nothing unasked."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.profiler import profile, record_function

from profiler_wrapper import __version__, demo, mark
from profiler_wrapper.__main__ import main
from profiler_wrapper.errors import WrongUse
from profiler_wrapper.result import ProfileResult, load
from ticks import by_ticks

TINY = demo.DemoConfig(layers=4, hidden=32, heads=2, key_value_heads=1, intermediate=64, vocabulary=64, tokens=8)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of one training step of a tiny model, with its layers marked."""
    path = tmp_path_factory.mktemp("trace") / "tiny.pt.trace.json"
    model = demo.DemoLlama(TINY)
    with mark(model), profile(profile_memory=True) as profiler:
        model(demo.sequences(TINY, 0, torch.device("cpu"))).backward()
    profiler.export_chrome_trace(str(path))
    return path


@pytest.fixture(scope="module")
def trace_with_shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with shapes, of one whole step."""
    path = tmp_path_factory.mktemp("trace") / "shapes.json"
    model = demo.DemoLlama(TINY)
    with mark(model), profile(record_shapes=True) as profiler, record_function("ProfilerStep#0"):
        model(demo.sequences(TINY, 0, torch.device("cpu"))).backward()
    profiler.export_chrome_trace(str(path))
    return path


def test_analyze_prints_the_layer_table(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", str(trace)]) == 0
    output = capsys.readouterr().out
    assert "layers.{0..3}" in output
    assert "TOTAL" in output


def test_hints_name_what_the_command_line_has(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", str(trace)]) == 0
    assert "result.table()" not in capsys.readouterr().out
    assert main(["analyze", str(trace), "--format", "csv", "--select", "nosuch"]) == 2
    assert capsys.readouterr().err.startswith("error: --select nosuch: a result has no such list of rows. It has: ")


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("x.py --lr 1", "x.py is no command. To profile a script: profiler-wrapper run x.py --lr 1"),
        ("python x.py", "python is no command. To profile a script: profiler-wrapper run python x.py"),
        ("-m pkg.train", "-m is no command. To profile a script: profiler-wrapper run -m pkg.train"),
        ("t.json.gz", "t.json.gz is no command. To analyse it: profiler-wrapper analyze t.json.gz"),
        ("outputs/job", "outputs/job is no command. To analyse it: profiler-wrapper analyze outputs/job"),
        ("run --steps 3-1 x.py", "--steps 3-1: the window 3-1 ends before it begins. Write 1-3."),
        ("run --record-shapes maybe x.py", "--record-shapes maybe means nothing here. Give True, False or 'auto'."),
        ("run --rank -1 x.py", "--rank -1 is no rank. Give a number from 0."),
        ("run --ranks a x.py", "--ranks a: say ranks as in 0-7 or 0,3,8-11"),
        ("run --files nosuch x.py", "--files nosuch names no file. Give 'auto', 'all', or some of: "),
        ("run python", "No script was named. Name one, or a module after -m."),
        ("run python3 -u x.py", "-u is an option of Python: python -u -m profiler_wrapper run SCRIPT"),
    ],
)
def test_what_is_wrong_is_said_by_the_words_of_the_command_line(
    given: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(given.split()) == 2
    assert capsys.readouterr().err.startswith(f"error: {hint}")


def test_a_command_is_one_also_beside_a_file_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("analyze", "outputs"):
        Path(name).mkdir()
    assert main(["analyze", "nothing.json"]) == 1
    assert "no command" not in capsys.readouterr().err
    assert main(["outputs"]) == 2
    assert capsys.readouterr().err == (
        "error: outputs is no command. To analyse it: profiler-wrapper analyze outputs\n"
    )


def test_analyze_takes_peaks(trace_with_shapes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["analyze", str(trace_with_shapes), "--peaks", "float32=2,bandwidth=50"]
    assert main([*arguments, "--format", "json"]) == 0
    use = json.loads(capsys.readouterr().out)["utilization"]
    assert use["peaks"]["flops_per_s"] == {"float32": 2e12}
    assert use["mfu"] == pytest.approx(use["model_flops_per_step"] / 2e12 / (use["step_time_us"] / 1e6))
    assert main(arguments) == 0
    assert " of 2 TFLOP/s float32 over " in capsys.readouterr().out
    assert main(["analyze", str(trace_with_shapes), "--peaks", "quick"]) == 2


def test_analyze_as_json_is_the_result(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", str(trace), "--format", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["schema_version"] == 1
    assert {row["layer"] for row in data["layers"]} >= {"layers.0", "layers.1", "DemoLlama"}


@pytest.mark.parametrize("form", ["text", "json"])
def test_output_goes_into_a_file(trace: Path, tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "new" / "out"
    assert main(["analyze", str(trace), "--format", form, "-o", str(output)]) == 0
    assert capsys.readouterr().out == f"{output}\n"
    assert "layers.1" in output.read_text()
    assert list(output.parent.iterdir()) == [output]


def test_output_into_a_directory_has_every_report(trace: Path, tmp_path: Path) -> None:
    assert main(["analyze", str(trace), "-o", str(tmp_path)]) == 0
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()) == [
        "memory/activation_memory_sunburst.html",
        "memory/grads_memory_sunburst.html",
        "memory/memory.log",
        "memory/os_memory_sunburst.html",
        "memory/params_memory_sunburst.html",
        "memory/summary_sunburst.html",
        "report.html",
        "result.json",
        "tiny_cuda_time_plot.png",
        "tiny_memory_categories_plot.png",
        "tiny_memory_usage.txt",
        "tiny_memory_usage_line_chart.png",
        "tiny_rank_0.log",
    ]
    # What was written is itself a result to analyse.
    assert main(["analyze", str(tmp_path)]) == 0


def test_a_file_is_overwritten_only_with_force(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out.json"
    output.write_text("mine")
    arguments = ["analyze", str(trace), "--format", "json", "-o", str(output)]
    assert main(arguments) == 1
    assert capsys.readouterr().err == f"error: File already exists, will not overwrite without --force: {output}\n"
    assert output.read_text() == "mine"
    assert main([*arguments, "--force"]) == 0
    assert json.loads(output.read_text())["schema_version"] == 1


@pytest.mark.parametrize("force", [[], ["--force"]])
def test_a_device_is_not_overwritten(trace: Path, force: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    device = os.stat("/dev/null")
    assert main(["analyze", str(trace), "-o", "/dev/null", *force]) == 1
    assert capsys.readouterr().err.startswith("error: /dev/null: is no file that can be replaced")
    assert os.stat("/dev/null") == device


def test_a_link_at_the_name_of_a_temporary_file_is_not_followed(trace: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    (tmp_path / f".{os.getpid()}-out.txt").symlink_to(tmp_path / "mine")
    assert main(["analyze", str(trace), "-o", str(tmp_path / "out.txt"), "--force"]) == 0
    assert (tmp_path / "mine").read_text() == "precious"


def test_no_command_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert capsys.readouterr().out.startswith("usage: profiler-wrapper")
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"profiler-wrapper {__version__}\n"


@pytest.mark.parametrize("number", [2**63, 2**64, -(2**70)])
def test_a_huge_pid_is_only_a_name(number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    op = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1, "dur": 5}
    kernel = {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 3, "dur": 5}
    for place in ({"pid": number, "tid": 7}, {"pid": 0, "tid": number}):
        (tmp_path / "huge.json").write_text(json.dumps({"traceEvents": [op, {**kernel, **place}]}))
        assert main(["analyze", str(tmp_path / "huge.json"), "--format", "json"]) == 0
        assert json.loads(capsys.readouterr().out)["time"]["total_us"] == 5


@pytest.mark.parametrize("path", ["a\0b", "\ud800"])
def test_a_path_that_can_be_none(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["analyze", path], ["analyze", "x", "-o", path], ["snapshot", path], ["ranks", "--spans", path]):
        assert main(arguments) == 2
        assert "is no path" in capsys.readouterr().err
    with pytest.raises(WrongUse, match="is no path"):
        load(path)


@pytest.mark.full
def test_broken_and_hostile_files_end_in_a_table_or_a_sentence() -> None:
    fuzzer = Path(__file__).parents[1] / "benchmarks" / "fuzz_inputs.py"
    done = subprocess.run([sys.executable, fuzzer, "--inputs", "150"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "150 inputs in" in done.stdout


@pytest.mark.parametrize("key", ["timed_steps", "layers", "versions", "device"])
def test_a_run_json_that_is_not_what_was_written(
    key: str, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(trace, tmp_path / "profile_trace.json")
    (tmp_path / "run.json").write_text(json.dumps({key: True}))
    assert main(["analyze", str(tmp_path)]) == 1
    assert f"$.{key}" in capsys.readouterr().err
    (tmp_path / "run.json").write_text(json.dumps({key: None}))  # not known
    assert main(["analyze", str(tmp_path)]) == 0


def test_nothing_is_written_when_one_file_of_a_directory_is_in_the_way(trace: Path, tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text("{}")
    assert main(["analyze", str(trace), "-o", str(tmp_path)]) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


@pytest.mark.parametrize("content", [b"", b"no trace", b'{"traceEvents": []}', b"\x1f\x8b\x08broken"])
def test_what_is_no_trace_is_one_line_of_error(
    tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    assert main(["analyze", str(path), "-o", str(tmp_path / "out.txt")]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert "bad.json" in captured.err
    assert not (tmp_path / "out.txt").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["analyze", "-o", "page.html"],
        ["analyze", "-o", "picture.PNG"],
        ["analyze", "-o", "rows.json", "--format", "csv"],
        ["analyze", "-o", "rows.csv", "--format", "json"],
        ["report", "-o", "page.json"],
        ["report", "-o", "page.csv"],
        ["report", "-o", "page.png"],
    ],
)
def test_a_file_that_would_not_hold_what_its_name_says_is_wrong_use(
    trace: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([arguments[0], str(trace), *arguments[1:]]) == 2
    assert arguments[2] in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_peaks_know_json_by_the_files_name(tmp_path: Path) -> None:
    assert main(["peaks", "--all", "-o", str(tmp_path / "peaks.json")]) == 0
    assert isinstance(json.loads((tmp_path / "peaks.json").read_text()), list)
    assert main(["peaks", "--all", "-o", str(tmp_path / "peaks.png")]) == 2


def test_an_error_names_the_file_and_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", str(tmp_path / "absent.json")]) == 1
    assert capsys.readouterr().err == f"error: {tmp_path / 'absent.json'}: No such file or directory\n"


def test_a_rank_below_0_is_wrong_use(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", str(trace.parent), "--rank", "-1"]) == 2
    assert "rank -1" in capsys.readouterr().err


def test_the_schema_is_printed_to_a_reader_that_goes_away() -> None:
    command = f"{sys.executable} -m profiler_wrapper analyze --schema | head -c 10"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("{")
    assert "Traceback" not in done.stderr


def test_a_missing_file_is_one_line_of_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", str(tmp_path / "absent.json")]) == 1
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize("arguments", [["fly"], ["analyze"], ["analyze", "x", "--format", "xml"]])
def test_wrong_use_is_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2


def test_run_as_a_module_when_the_reader_goes_away(trace: Path) -> None:
    command = f"{sys.executable} -m profiler_wrapper analyze {trace} --format json | head -c 10"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("{")
    assert "Traceback" not in done.stderr


def test_the_demo_as_json_prints_nothing_else(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, trace: Path
) -> None:
    def run_demo(*, output_dir: str) -> ProfileResult:
        print("training, for", output_dir)
        return load(trace)

    monkeypatch.setattr(demo, "run_demo", run_demo)
    assert main(["demo", "--format", "json", "-o", "there"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == load(trace).to_dict()
    assert captured.err == "training, for there\n"


@pytest.mark.full
def test_demo_prints_the_table_and_where_the_files_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = demo.run_demo(output_dir=tmp_path, config=TINY)
    output = capsys.readouterr().out
    assert result.time.coverage is not None
    assert "layers.{0..3}" in output
    (run,) = tmp_path.iterdir()
    assert by_ticks(run / "rank0", tmp_path / "ticks").time.coverage > 0.99
    *_, where, page = output.splitlines()
    files = [path for path in (run / "rank0").rglob("*") if path.is_file()]
    assert where.startswith(f"{len(files)} files, ")
    assert where.endswith(f"in {run / 'rank0'}")
    assert page == f"The page: {run / 'report.html'}"
    assert {path.name for path in run.rglob("*.png")} == {
        "demo_cuda_time_plot.png",
        "demo_memory_categories_plot.png",
        "demo_memory_usage_line_chart.png",
        "demo_roofline_plot.png",
    }
