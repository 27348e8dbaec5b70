"""What a monitor is told to do: from code, a mapping, YAML or a command line, under FlagScale's names."""

from __future__ import annotations

import argparse
import difflib
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from profiler_wrapper.errors import WrongUse, in_a_line, shown
from profiler_wrapper.monitor.records import Convention

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
    convention: Convention = "full"
    peaks: Any = None
    log_rank: int = 0
    tensorboard_dir: str | None = None
    wandb: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            is_right, wanted = _CHECKS.get(field.name) or _CHECKS_BY_TYPE.get(str(field.type), _ANYTHING)
            value = getattr(self, field.name)
            if not is_right(value):
                raise WrongUse(f"{field.name}={shown(value)}: give {wanted}.")

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
                raise WrongUse(f"no option {shown(name)} of the monitor.{_nearest(name, known)}")
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
            raise WrongUse(f"{shown(os.fspath(path))} is no YAML: {in_a_line(error)}") from error
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
            raise WrongUse(f"A monitor has no option {shown(name)}.{_nearest(name, known)}")
        return replace(self, **{name: value for name, value in given.items() if value is not None})


def add_perf_monitor_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add FlagScale's options of its performance monitor, with their defaults, and return the parser."""
    group = parser.add_argument_group(title="performance monitor")
    defaults = MonitorConfig(enable_perf_monitor=False)
    for name, (text, options) in _ARGUMENTS.items():
        group.add_argument(f"--{name.replace('_', '-')}", default=getattr(defaults, name), help=text, **options)
    return parser


def _options(config: Any, depth: int) -> Iterator[tuple[str, Any]]:
    """Names and values, those of sections among them."""
    for name, value in config.items():
        if depth < 3 and name in _SECTIONS and hasattr(value, "items"):
            yield from _options(value, depth + 1)
        else:
            yield str(name), value


def _nearest(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {shown(near[0])}?" if near else ""


def _whole(*, least: int) -> _Check:
    return lambda value: _is_whole(value) and value >= least, f"a whole number, {least} or more"


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _one_of(choices: tuple[str, ...]) -> _Check:
    return lambda value: isinstance(value, str) and value in choices, f"one of {', '.join(choices)}"


_Check = tuple[Callable[[Any], bool], str]  # whether a value means something, and what to give
_ANYTHING: _Check = (lambda value: True, "")  # it is checked where it is used
_CHECKS_BY_TYPE: Mapping[str, _Check] = {
    "bool": (lambda value: isinstance(value, bool), "True or False"),
    "str | None": (lambda value: value is None or isinstance(value, (str, os.PathLike)), "a path, or None"),
}
_CHECKS: Mapping[str, _Check] = {
    "perf_log_interval": _whole(least=1),
    "perf_log_format": _one_of(LOG_FORMATS),
    "perf_max_log_files": _whole(least=0),
    "perf_model_type": _one_of(MODEL_TYPES),
    "flops_profile_freq": (lambda value: value is None or (_is_whole(value) and value >= 0), "a whole number, or None"),
    "convention": _one_of(CONVENTIONS),
    "log_rank": (_is_whole, "the number of a rank; -1 is the last"),
}
# FlagScale's options: what their help says, and what argparse is told besides name and default.
_ARGUMENTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "enable_perf_monitor": ("monitor the performance of the training", {"action": "store_true"}),
    "perf_log_interval": ("steps between two lines of the log", {"type": int, "metavar": "N"}),
    "perf_log_dir": (f"where the logs go ({DEFAULT_LOG_DIR} below the output directory)", {"metavar": "PATH"}),
    "perf_console_output": ("print a line for each line of the log too", {"action": "store_true"}),
    "perf_log_format": ("which logs are written (%(default)s)", {"choices": LOG_FORMATS}),
    "perf_memory_tracking": ("look at the memory (the default)", {"action": argparse.BooleanOptionalAction}),
    "perf_breakdown": ("measure forward, backward, optimizer and data of each step", {"action": "store_true"}),
    "perf_max_log_files": ("log files to keep; 0: all (%(default)s)", {"type": int, "metavar": "N"}),
    "perf_model_type": ("formulas for the FLOPs (%(default)s)", {"choices": MODEL_TYPES}),
}
