"""Options of the monitor: from code, mappings, YAML and command lines, under the names users know."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from profiler_wrapper.errors import WrongUse
from profiler_wrapper.monitor.config import MonitorConfig, add_perf_monitor_arguments
from profiler_wrapper.monitor.monitor import TrainingMonitor

# As the known page has them.
OPTIONS = {
    "enable_perf_monitor": False,
    "perf_log_interval": 10,
    "perf_log_dir": None,  # logs/perf_monitor below the output directory
    "perf_console_output": False,
    "perf_log_format": "both",
    "perf_memory_tracking": True,
    "perf_breakdown": False,
    "perf_max_log_files": 10,
    "perf_model_type": "auto",
}
FLAGSCALE = """
system:
  no_shared_fs: true
  enable_perf_monitor: True
  perf_log_interval: 5
  perf_log_dir: ./elsewhere/perf_monitor
  perf_console_output: False
  perf_memory_tracking: True
  perf_breakdown: False
  perf_max_log_files: 3
"""


def parser() -> argparse.ArgumentParser:
    return argparse.ArgumentParser()


def test_the_options_have_their_names_and_defaults() -> None:
    given = parser()
    assert add_perf_monitor_arguments(given) is given
    assert vars(given.parse_args([])) == OPTIONS
    config = MonitorConfig()
    assert {name: getattr(config, name) for name in OPTIONS} == {**OPTIONS, "enable_perf_monitor": True}


def test_every_option_is_read_from_a_command_line() -> None:
    line = (
        "--enable-perf-monitor --perf-log-interval 3 --perf-log-dir logs --perf-console-output --perf-log-format text "
        "--no-perf-memory-tracking --perf-breakdown --perf-max-log-files 0 --perf-model-type mixtral"
    )
    arguments = add_perf_monitor_arguments(parser()).parse_args(line.split())
    assert MonitorConfig.from_args(arguments) == MonitorConfig(
        enable_perf_monitor=True,
        perf_log_interval=3,
        perf_log_dir="logs",
        perf_console_output=True,
        perf_log_format="text",
        perf_memory_tracking=False,
        perf_breakdown=True,
        perf_max_log_files=0,
        perf_model_type="mixtral",
    )
    assert add_perf_monitor_arguments(parser()).parse_args(["--perf-memory-tracking"]).perf_memory_tracking


def test_a_command_line_that_does_not_enable_it_leaves_it_off(tmp_path: Path) -> None:
    arguments = add_perf_monitor_arguments(parser()).parse_args([])
    assert not TrainingMonitor(tmp_path, arguments).active


def test_the_yaml_of_both_pages_is_read(tmp_path: Path) -> None:
    flagscale, mfu = tmp_path / "train.yaml", tmp_path / "mfu.yaml"
    flagscale.write_text(FLAGSCALE)
    mfu.write_text("monitoring:\n  flops_profile_freq: 500\n")
    assert MonitorConfig.of(str(flagscale)) == MonitorConfig(
        perf_log_interval=5, perf_log_dir="./elsewhere/perf_monitor", perf_max_log_files=3
    )
    assert MonitorConfig.of(mfu) == MonitorConfig(flops_profile_freq=500)


def test_what_is_given_beside_the_config_comes_first(tmp_path: Path) -> None:
    config = {"monitoring": {"flops_profile_freq": 500, "perf_breakdown": True}, "seed": 3}
    monitor = TrainingMonitor(tmp_path, config, flops_profile_freq=7, convention="causal")
    assert monitor.config == MonitorConfig(flops_profile_freq=7, perf_breakdown=True, convention="causal")
    monitor.close()


@pytest.mark.parametrize(
    "wrong",
    [
        {"perf_log_interval": 0},
        {"perf_log_interval": True},
        {"perf_max_log_files": -1},
        {"perf_log_format": "xml"},
        {"perf_model_type": "rnn"},
        {"perf_breakdown": "yes"},
        {"flops_profile_freq": 0.5},
    ],
)
def test_a_wrong_value_is_named(wrong: dict[str, object]) -> None:
    with pytest.raises(WrongUse, match=next(iter(wrong))):
        MonitorConfig.from_dict(wrong)


def test_an_unknown_option_of_the_monitor_is_told_with_the_nearest() -> None:
    with pytest.raises(WrongUse, match="Did you mean 'perf_log_interval'"):
        MonitorConfig.from_dict({"system": {"perf_log_intervals": 3}})


def test_a_file_that_is_no_yaml_is_told(tmp_path: Path) -> None:
    for content in ("a: [", "- 1\n- 2\n"):
        (tmp_path / "wrong.yaml").write_text(content)
        with pytest.raises(WrongUse, match=r"wrong\.yaml"):
            MonitorConfig.from_yaml(tmp_path / "wrong.yaml")
    (tmp_path / "empty.yaml").write_text("")
    assert MonitorConfig.from_yaml(tmp_path / "empty.yaml") == MonitorConfig()


@pytest.mark.parametrize("there", ["logs/perf_monitor", "logs"])
def test_a_relative_directory_of_logs_is_where_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: str
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = add_perf_monitor_arguments(parser()).parse_args(["--enable-perf-monitor", "--perf-log-dir", there])
    with TrainingMonitor("out", arguments, log_file=None, peaks=1.0, flops_profile_freq=0) as monitor:
        monitor.log_step(0)
    assert list((tmp_path / there).glob("perf_steps_*.jsonl"))
    assert not (tmp_path / "out").exists()


def test_logs_lie_below_the_output_directory_unless_it_is_said_where(tmp_path: Path) -> None:
    TrainingMonitor(tmp_path / "out", log_file=None, peaks=1.0, flops_profile_freq=0).log_step(0)
    assert list((tmp_path / "out" / "logs" / "perf_monitor").glob("perf_steps_*.jsonl"))
    there = {"perf_log_dir": str(tmp_path / "there"), "perf_log_format": "json"}
    TrainingMonitor(tmp_path / "other", there, log_file=None, peaks=1.0, flops_profile_freq=0).log_step(0)
    assert list((tmp_path / "there").glob("perf_steps_*.jsonl"))
    assert not list((tmp_path / "there").glob("*.log"))
    assert not (tmp_path / "other").exists()
