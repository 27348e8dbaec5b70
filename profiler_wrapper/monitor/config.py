"""What a monitor is told to do: from code, a mapping, YAML or a command line, under FlagScale's names."""

from __future__ import annotations

import argparse
import difflib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from profiler_wrapper.errors import WrongUse

DEFAULT_LOG_DIR = "logs/perf_monitor"  # below the monitor's output directory
LOG_FORMATS = ("text", "json", "both")
MODEL_TYPES = ("auto", "gpt", "llama", "qwen", "mixtral", "aquila", "deepseek", "bert", "vit", "dit")
CONVENTIONS = ("full", "causal")

# Parts of a larger configuration that may hold ours: FlagScale's `train: system:`, others' `monitoring:`.
_SECTIONS = ("train", "system", "monitoring", "monitor", "perf_monitor")


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorConfig:
    """Options of a `TrainingMonitor`. The first nine are FlagScale's, by name and, but for the first, by default.

    Attributes:
        enable_perf_monitor: `False` makes the monitor do nothing. Who makes one in code wants it, so it is on
            here; on a command line it is off.
        perf_log_interval: every so many steps a row, with the means since the last one, goes to the text logs, the
            console, TensorBoard, W&B and the summary; the JSON lines and the JSON log have every step.
        perf_log_dir: where the logs go; `None`: `logs/perf_monitor` below the monitor's `output_dir`.
        perf_console_output: print a line for each row.
        perf_log_format: which logs are written there: "text", "json" (the lines and the summary) or "both".
        perf_memory_tracking: look at the memory at each step.
        perf_breakdown: measure data, forward, backward, optimizer and other of each step.
        perf_max_log_files: of each kind of file the newest so many are kept; 0: all.
        perf_model_type: the family of formulas for FLOPs from a model's config; "auto": by the config.
        flops_profile_freq: every so many steps, and in the first, the FLOPs of the real step are measured; 0: never;
            `None`: every 500 where nothing else tells the FLOPs.
        convention: of attention: "full", or "causal", which leaves out what a causal mask hides.
        peaks: the device's peak, as `find_peaks` takes it; `None`: the environment's, or that of the device's name.
        log_rank: the rank that writes the job's log; negative: counted from the last.
        tensorboard_dir: write TensorBoard events there.
        wandb: log to the run of W&B that is open, or to a new one.

    Raises:
        WrongUse: an option has a value that means nothing.
    """

    enable_perf_monitor: bool = True
    perf_log_interval: int = 10
    perf_log_dir: str | None = None
    perf_console_output: bool = False
    perf_log_format: str = "both"
    perf_memory_tracking: bool = True
    perf_breakdown: bool = False
    perf_max_log_files: int = 10
    perf_model_type: str = "auto"
    flops_profile_freq: int | None = None
    convention: str = "full"
    peaks: Any = None
    log_rank: int = 0
    tensorboard_dir: str | None = None
    wandb: bool = False

    def __post_init__(self) -> None:
        _whole(self, "perf_log_interval", least=1)
        _whole(self, "perf_max_log_files", least=0)
        if self.flops_profile_freq is not None:
            _whole(self, "flops_profile_freq", least=0)
        if isinstance(self.log_rank, bool) or not isinstance(self.log_rank, int):
            raise WrongUse(f"log_rank={self.log_rank!r}: give the number of a rank; -1 is the last.")
        if self.perf_log_dir is not None and not isinstance(self.perf_log_dir, (str, os.PathLike)):
            raise WrongUse(f"perf_log_dir={self.perf_log_dir!r}: give a path, or None.")
        if self.tensorboard_dir is not None and not isinstance(self.tensorboard_dir, (str, os.PathLike)):
            raise WrongUse(f"tensorboard_dir={self.tensorboard_dir!r}: give a path, or None.")
        _one_of(self, "perf_log_format", LOG_FORMATS)
        _one_of(self, "perf_model_type", MODEL_TYPES)
        _one_of(self, "convention", CONVENTIONS)
        for flag in ("enable_perf_monitor", "perf_console_output", "perf_memory_tracking", "perf_breakdown", "wandb"):
            if not isinstance(getattr(self, flag), bool):
                raise WrongUse(f"{flag}={getattr(self, flag)!r}: give True or False.")

    @classmethod
    def of(cls, config: Any) -> MonitorConfig:
        """What a user gave: nothing, one of these, a mapping, a path of a YAML file, parsed arguments.

        Raises:
            WrongUse: it is none of these, or an option in it is wrong.
            OSError: the file cannot be read.
        """
        if config is None:
            return cls()
        if isinstance(config, cls):
            return config
        if isinstance(config, (str, os.PathLike)):
            return cls.from_yaml(config)
        if isinstance(config, argparse.Namespace):
            return cls.from_args(config)
        if isinstance(config, Mapping) or hasattr(config, "items"):
            return cls.from_dict(config)
        raise WrongUse(
            f"config is a {type(config).__name__}. Give a MonitorConfig, a mapping, the path of a YAML file or "
            "the parsed arguments of a command line."
        )

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> MonitorConfig:
        """From a mapping with these names, alone or within a larger one (below `train`, `system`, `monitoring` ...).

        Other options in it are somebody else's and are ignored, but for unknown ones that begin with `perf_`.

        Raises:
            WrongUse: an option is unknown or has a wrong value.
        """
        known = {field.name for field in fields(cls)}
        found: dict[str, Any] = {}
        for name, value in _options(config, depth=0):
            if name in known:
                found[name] = value
            elif name.startswith("perf_"):
                near = difflib.get_close_matches(name, known, n=1)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise WrongUse(f"no option {name!r} of the monitor.{hint}")
        return cls(**found)

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str]) -> MonitorConfig:
        """From a YAML file, as `from_dict` takes its content.

        Raises:
            WrongUse: PyYAML is not installed, the file is no YAML of names and values, or an option is wrong.
            OSError: it cannot be read.
        """
        try:
            import yaml
        except ImportError as error:
            raise WrongUse("reading a YAML file needs PyYAML: pip install pyyaml") from error
        try:
            content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (yaml.YAMLError, ValueError) as error:  # ValueError: no UTF-8, or a path that can be none
            raise WrongUse(f"{os.fspath(path)!r} is no YAML: {error}") from error
        if content is None:
            return cls()
        if not isinstance(content, Mapping):
            raise WrongUse(f"{os.fspath(path)} holds a {type(content).__name__}, where names with values are wanted.")
        return cls.from_dict(content)

    @classmethod
    def from_args(cls, arguments: argparse.Namespace) -> MonitorConfig:
        """From parsed arguments that have the options of `add_perf_monitor_arguments`, among others.

        Raises:
            WrongUse: an option has a wrong value.
        """
        names = [field.name for field in fields(cls) if field.name.startswith(("perf_", "enable_perf_"))]
        return cls(**{name: getattr(arguments, name) for name in names if hasattr(arguments, name)})

    def with_options(self, **given: Any) -> MonitorConfig:
        """With other values, but for those that are `None`.

        Raises:
            WrongUse: there is no such option, or a value means nothing.
        """
        known = {field.name for field in fields(self)}
        for name in given.keys() - known:
            near = difflib.get_close_matches(name, known, n=1)
            raise WrongUse(f"A monitor has no option {name!r}." + (f" Did you mean {near[0]!r}?" if near else ""))
        return replace(self, **{name: value for name, value in given.items() if value is not None})


def add_perf_monitor_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add FlagScale's options of its performance monitor, with their defaults, and return the parser."""
    group = parser.add_argument_group(title="performance monitor")
    group.add_argument("--enable-perf-monitor", action="store_true", help="monitor the performance of the training")
    group.add_argument(
        "--perf-log-interval", type=int, default=10, metavar="N", help="steps between two lines of the log"
    )
    group.add_argument(
        "--perf-log-dir",
        type=str,
        metavar="PATH",
        help=f"where the logs go ({DEFAULT_LOG_DIR} below the output directory)",
    )
    group.add_argument("--perf-console-output", action="store_true", help="print a line for each line of the log too")
    group.add_argument(
        "--perf-log-format", choices=LOG_FORMATS, default="both", help="which logs are written (%(default)s)"
    )
    group.add_argument(
        "--perf-memory-tracking", action="store_true", default=True, help="look at the memory (the default)"
    )
    group.add_argument(
        "--no-perf-memory-tracking", action="store_false", dest="perf_memory_tracking", help="don't look at the memory"
    )
    group.add_argument(
        "--perf-breakdown", action="store_true", help="measure forward, backward, optimizer and data of each step"
    )
    group.add_argument(
        "--perf-max-log-files", type=int, default=10, metavar="N", help="log files to keep; 0: all (%(default)s)"
    )
    group.add_argument(
        "--perf-model-type", choices=MODEL_TYPES, default="auto", help="formulas for the FLOPs (%(default)s)"
    )
    return parser


def _options(config: Any, depth: int) -> Iterator[tuple[str, Any]]:
    """Names and values, those of sections among them."""
    for name, value in config.items():
        if depth < 3 and name in _SECTIONS and hasattr(value, "items"):
            yield from _options(value, depth + 1)
        else:
            yield str(name), value


def _whole(config: MonitorConfig, name: str, *, least: int) -> None:
    value = getattr(config, name)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise WrongUse(f"{name}={value!r}: give a whole number, {least} or more.")


def _one_of(config: MonitorConfig, name: str, choices: tuple[str, ...]) -> None:
    value = getattr(config, name)
    if not isinstance(value, str) or value not in choices:
        raise WrongUse(f"{name}={value!r}: give one of {', '.join(choices)}.")
