"""`python -m profiler_wrapper peaks`: what is printed and written, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from profiler_wrapper.__main__ import main
from profiler_wrapper.capture import ceilings
from profiler_wrapper.tables.work.peaks import VARIABLE, find_peaks, known_peaks

H200 = "NVIDIA H200"


@pytest.fixture(autouse=True)
def _small_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(ceilings, "_CPU_SIZES", (16, 32))
    monkeypatch.setattr(ceilings, "_CPU_COPY_BYTES", 1 << 16)


@pytest.fixture
def on_an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine's CPU under the name of a device that has an entry."""
    monkeypatch.setattr(ceilings, "find_device", lambda device: torch.device("cuda", 0))
    monkeypatch.setattr(ceilings, "device_name", lambda device: H200)


def fits(text: str) -> bool:
    return text.isascii() and all(len(line) <= 100 for line in text.splitlines())


def test_a_cpu_is_told_to_measure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["peaks", "--device", "cpu"]) == 0
    output = capsys.readouterr().out
    assert fits(output)
    assert "peaks --measure" in " ".join(output.split())


@pytest.mark.usefixtures("on_an_h200")
def test_a_known_device_has_its_figures_and_their_source(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["peaks"]) == 0
    output = capsys.readouterr().out
    assert fits(output)
    assert output.startswith(f"{H200}\n")
    assert "989.4 TFLOP/s" in output
    assert "4800.0 GB/s" in output
    assert "NVIDIA H200 datasheet" in output


@pytest.mark.usefixtures("on_an_h200")
def test_what_the_environment_says_is_what_is_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "bfloat16=700")
    assert main(["peaks", "--format", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["device"] == H200
    assert data["peaks"]["flops_per_s"]["bfloat16"] == 7e14
    assert "given" in data["peaks"]["source"]


def test_the_whole_table_has_every_name_and_every_source(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["peaks", "--all"]) == 0
    output = capsys.readouterr().out
    assert fits(output)
    lines = output.splitlines()
    unwrapped = " ".join(output.split())
    for peaks in known_peaks():
        assert any(line == peaks.device or line.startswith(f"{peaks.device}  ") for line in lines)
        assert peaks.source in unwrapped
    (row,) = (line for line in lines if line.startswith("NVIDIA H100 80GB HBM3 "))
    assert row.split()[4:-1] == ["66.9", "66.9", "495", "989", "989", "1979", "-", "1979", "-", "3350"]


def test_the_whole_table_as_json_is_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["peaks", "--all", "--format", "json", "-o", f"{tmp_path}/"]) == 0
    path = tmp_path / "peaks.json"
    assert capsys.readouterr().out == f"{path}\n"
    data = json.loads(path.read_text())
    assert [entry["device"] for entry in data] == [peaks.device for peaks in known_peaks()]
    assert data[0]["flops_per_s"] == dict(known_peaks()[0].flops_per_s)


def test_the_table_needs_no_torch() -> None:
    """So it is quick, and works where torch is broken."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from profiler_wrapper.tables.work.peaks import known_peaks\n"
        "from profiler_wrapper.reports.peaks import all_peaks_text\n"
        "print(all_peaks_text(known_peaks(), width=100))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert "NVIDIA H200" in done.stdout


def test_a_measurement_is_printed_written_and_used_as_the_roof(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "new" / "mine.json"
    assert main(["peaks", "--measure", "--device", "cpu", "--seconds", "0.1", "-o", str(path)]) == 0
    captured = capsys.readouterr()
    assert captured.err == "measuring on cpu, for about 0.1 s ...\n"
    assert fits("\n".join(line for line in captured.out.splitlines() if str(path) not in line))
    assert "bfloat16" in captured.out
    assert f"{VARIABLE}={path}" in captured.out
    written: dict[str, Any] = json.loads(path.read_text())
    assert written["maker"] is None
    assert written["threads"] == torch.get_num_threads()
    monkeypatch.setenv(VARIABLE, str(path))
    peaks, warning = find_peaks(None)
    assert warning is None
    assert peaks is not None
    assert peaks.flops("float32") == written["flops"]["float32"]["per_s"]


@pytest.mark.parametrize("seconds", ["-1", "0", "nan", "inf"])
def test_what_is_no_time_is_refused_before_anything_is_said(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["peaks", "--measure", "--device", "cpu", "--seconds", seconds]) == 2
    assert capsys.readouterr().err.startswith("error: --seconds ")


def test_a_measurement_stands_beside_the_makers_figure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ceilings, "device_name", lambda device: H200)
    assert main(["peaks", "--measure", "--device", "cpu", "--seconds", "0.1", "--format", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["maker"]["flops_per_s"]["bfloat16"] == 989.4e12
    assert main(["peaks", "--measure", "--device", "cpu", "--seconds", "0.1"]) == 0
    output = capsys.readouterr().out
    assert fits(output)
    (row,) = (line for line in output.splitlines() if line.startswith("bfloat16 "))
    assert "989.4 TFLOP/s" in row
    assert " % " in row


def test_a_file_is_overwritten_only_with_force_and_refused_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "peaks.json"
    path.write_text("precious")
    command = ["peaks", "--measure", "--device", "cpu", "--seconds", "0.1", "-o", str(path)]
    assert main(command) == 1
    captured = capsys.readouterr()
    assert "--force" in captured.err
    assert "measuring" not in captured.err
    assert path.read_text() == "precious"
    assert main([*command, "--force"]) == 0
    assert json.loads(path.read_text())["flops"]


@pytest.mark.parametrize(
    "arguments",
    [["--seconds", "3"], ["--all", "--device", "cpu"], ["--device", "tpu"], ["--measure", "--seconds", "0"],
     ["--measure", "--seconds", "nan"]],
)  # fmt: skip
def test_wrong_use_is_2_and_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["peaks", *arguments]) == 2
    assert [line.partition(" ")[0] for line in capsys.readouterr().err.splitlines()][-1] == "error:"


def test_all_and_measure_exclude_each_other() -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["peaks", "--all", "--measure"])
    assert exit_.value.code == 2
