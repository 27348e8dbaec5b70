"""What is said of a snapshot: on the terminal, in files, as a picture, and by the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiler_wrapper.__main__ import main
from profiler_wrapper.snapshot.analyse import highest_states
from profiler_wrapper.snapshot.reports import console_text, draw_snapshot, full_text, to_dict
from snapshots import MAIN, MIB, MLP_STACK, FakeAllocator, frame, report_of, snapshot, training, write


def crowded() -> list[FakeAllocator]:
    """Many devices, pools, lines and layers, with names that are long or do harm."""
    gpus = []
    for device in range(7):
        gpu = FakeAllocator(device=device, total_bytes=200 * MIB)
        for i in range(40):
            name = ["\x1b[2J", "a" * 5000, "</script>", "$x^2$", "naïve\u202e", "\ud800", "x\ny"][i % 7]
            stack = [frame(f"/home/me/{name}/m{i}.py", i, "forward"), MAIN]
            gpu.malloc((i + 1 + device) * 100_000, stack, stream=i % 5, pool=(0, i % 3), text=name if i % 2 else "")
        gpus.append(gpu)
    gpus[0].malloc(500 * MIB, MLP_STACK)
    return gpus


def test_the_terminal_gets_a_screen_of_plain_text() -> None:
    for value in (snapshot(*crowded()), snapshot(training(total_mib=48)), {"segments": []}):
        lines = console_text(report_of(value)).split("\n")
        assert len(lines) <= 40
        assert max(map(len, lines)) <= 100
        assert all(line.isascii() and (line.isprintable() or not line) for line in lines)


def test_notes_are_never_what_is_cut() -> None:
    text = console_text(report_of(snapshot(*crowded(), max_entries=20)))
    assert "\nnote: " in text and text.endswith("\n(4 of 7 notes: -o FILE has them all)")


def test_the_device_that_ran_out_comes_before_fuller_ones() -> None:
    lines = console_text(report_of(snapshot(*crowded()))).split("\n")
    assert lines[1].startswith("cuda:0 ran out of memory: 500.0 MiB asked for")
    assert sum(line.startswith("also cuda:") for line in lines) == 4
    assert lines[-1] == "(2 more devices; -o FILE has them all)"


def test_an_out_of_memory_comes_first_with_its_owners_and_a_cure() -> None:
    lines = console_text(report_of(snapshot(training(total_mib=48)))).split("\n")
    assert lines[1].startswith(
        "cuda:0 ran out of memory: 4.0 MiB asked for, 31.1 MiB allocated, 46.0 MiB reserved, 2.0 MiB"
    )
    assert "expandable_segments:True" in " ".join(lines[2:6])
    at = next(i for i, line in enumerate(lines) if "in vain" in line)
    assert lines[at] == (
        "When run/model.py:31 forward asked for 4.0 MiB in vain: 31.1 MiB allocated (as asked for), by line"
    )
    assert " ".join(lines[at + 1].split()) == (
        "8.0 MiB 25.7 % 4x run/model.py:12 forward, in torch/nn/modules/linear.py:134 forward"
    )


def test_full_memory_is_not_called_fragmentation() -> None:
    gpu = FakeAllocator(total_bytes=20 * MIB)
    gpu.malloc(18 * MIB, MLP_STACK)
    gpu.malloc(4 * MIB, MLP_STACK)
    text = console_text(report_of(snapshot(gpu)))
    assert "Memory was full" in text
    assert "Fragmentation" not in text


def test_expandable_segments_are_not_advised_where_they_are_on() -> None:
    gpu = training(total_mib=48)
    value = snapshot(gpu)
    value["allocator_settings"]["expandable_segments"] = True
    text = " ".join(console_text(report_of(value)).split())
    assert "though expandable_segments is on" in text
    assert "Try" not in text


def test_the_file_has_every_row_and_the_whole_stacks() -> None:
    text = full_text(report_of(snapshot(*crowded())))
    for i in range(40):
        assert f"/m{i}.py:{i} forward" in text
    assert "/home/me/run/train.py:40 main" in text
    assert "setting expandable_segments: False" in text
    assert "\x1b" not in text


def test_json_has_the_documented_keys_and_the_same_numbers() -> None:
    report = report_of(snapshot(training(total_mib=48), max_entries=90))
    value = json.loads(json.dumps(to_dict(report)))
    assert set(value) == {"schema_version", "name", "file_bytes", "settings", "notes", "devices"}
    (one,) = value["devices"]
    assert one["allocated_bytes"] == report.devices[0].allocated_bytes == sum(o["size_bytes"] for o in one["owners"])
    assert one["owners"][0]["stack"][0]["line"] == 134
    history = one["history"]
    assert history["entries"] == 90
    assert history["failures"][0]["requested_bytes"] == 4 * MIB
    assert len({len(history["curve"][key]) for key in ("state", "time_us", "allocated_bytes", "reserved_bytes")}) == 1
    assert max(history["curve"]["allocated_bytes"]) == history["peak"]["allocated_bytes"]


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=300), st.integers(2, 50))
def test_a_thinned_curve_keeps_its_peak_and_its_end(values: list[int], points: int) -> None:
    course = np.array(values, np.int64)
    states = highest_states(course, points)
    assert len(states) <= max(points, min(len(values), points))
    assert (np.diff(states) > 0).all()
    assert course[states].max() == course.max()
    assert states[-1] == len(values) - 1


@pytest.mark.parametrize("which", ["crowded", "oom", "no history", "one entry", "nothing", "no times"])
def test_a_picture_is_drawn_of_anything(which: str, tmp_path: Path) -> None:
    value: Any = snapshot(*crowded()) if which == "crowded" else snapshot(training(total_mib=48))
    if which == "no history":
        value["device_traces"] = []
    if which == "one entry":
        value = snapshot(training(), max_entries=1)
    if which == "nothing":
        value = {"segments": [], "device_traces": []}
    if which == "no times":
        for entry in value["device_traces"][0]:
            del entry["time_us"]
    draw_snapshot(report_of(value), tmp_path / "a.png")
    from matplotlib.image import imread

    height, width = imread(tmp_path / "a.png").shape[:2]
    assert width > 900
    assert 100 < height < 4500


# -- the command ----------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(snapshot(training(total_mib=48)), tmp_path / "run_oom.pickle")


def test_the_command_prints_the_text(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["snapshot", str(file)]) == 0
    assert "cuda:0 ran out of memory" in capsys.readouterr().out


def test_the_command_prints_json(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["snapshot", str(file), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["schema_version"] == 1


def test_the_command_fills_a_directory(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out"
    assert main(["snapshot", str(file), "-o", f"{output}/"]) == 0
    names = ["run_oom_snapshot.json", "run_oom_snapshot.png", "run_oom_snapshot.txt"]
    assert sorted(path.name for path in output.iterdir()) == names
    assert sorted(capsys.readouterr().out.split()) == [str(output / name) for name in names]
    assert main(["snapshot", str(file), "-o", str(output)]) == 1
    assert "without --force" in capsys.readouterr().err
    assert main(["snapshot", str(file), "-o", str(output), "--force"]) == 0


@pytest.mark.parametrize(("form", "start"), [("text", "Memory snapshot"), ("json", "{")])
def test_the_command_writes_one_file(file: Path, tmp_path: Path, form: str, start: str) -> None:
    output = tmp_path / "new" / "out"
    assert main(["snapshot", str(file), "--format", form, "-o", str(output)]) == 0
    assert output.read_text().startswith(start)
    assert main(["snapshot", str(file), "-o", str(output)]) == 1


@pytest.mark.parametrize("content", [b"", b"no pickle", b"cos\nsystem\n.", b"\x80\x04}.", b"\x1f\x8b\x08"])
def test_what_is_no_snapshot_is_one_line_of_error(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.pickle"
    path.write_bytes(content)
    assert main(["snapshot", str(path), "-o", str(tmp_path / "out")]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert "bad.pickle" in captured.err
    assert not (tmp_path / "out").exists()


def test_a_missing_file_and_a_directory_are_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (tmp_path / "absent.pickle", tmp_path):
        assert main(["snapshot", str(path)]) == 1
        assert capsys.readouterr().err.startswith("error: ")
