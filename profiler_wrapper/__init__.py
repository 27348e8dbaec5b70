"""Where the time, the memory and the FLOPs of every layer of a Transformer go: from one with-block, or from a trace.

from profiler_wrapper import ProfilerWrapper

with ProfilerWrapper(model) as prof:
    train(model)
print(prof.result)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# From here on compiled models can be split by layer. Imports neither torch nor its compiler.
from profiler_wrapper.capture import compiled as _compiled  # noqa: F401
from profiler_wrapper.errors import (
    BrokenTrace,
    EmptyRecording,
    ProfilerWrapperError,
    ProfilerWrapperWarning,
    UnknownLayer,
    WrongUse,
    shown,
)

if TYPE_CHECKING:
    from profiler_wrapper.comparison.compare import compare as compare
    from profiler_wrapper.comparison.guard import guard as guard
    from profiler_wrapper.config_flops.model_flops import model_flops as model_flops
    from profiler_wrapper.config_flops.model_flops import register_family as register_family
    from profiler_wrapper.marking import mark as mark
    from profiler_wrapper.marking import trace_handler as trace_handler
    from profiler_wrapper.monitor.config import MonitorConfig as MonitorConfig
    from profiler_wrapper.monitor.config import add_perf_monitor_arguments as add_perf_monitor_arguments
    from profiler_wrapper.monitor.monitor import TrainingMonitor as TrainingMonitor
    from profiler_wrapper.ranks.load import load_ranks as load_ranks
    from profiler_wrapper.ranks.report import RanksReport as RanksReport
    from profiler_wrapper.result import ProfileResult as ProfileResult
    from profiler_wrapper.result import load as load
    from profiler_wrapper.timer.layer_timer import LayerTimer as LayerTimer
    from profiler_wrapper.timer.timer import Timer as Timer
    from profiler_wrapper.timer.timer import global_timer as global_timer
    from profiler_wrapper.wrapper import ProfilerWrapper as ProfilerWrapper

# The other public names, by module. Imported when first asked for: reading a trace on a laptop should not wait for what
# capture needs.
_MODULES = {
    "comparison.compare": ("compare",),
    "comparison.guard": ("guard",),
    "config_flops.model_flops": ("model_flops", "register_family"),
    "marking": ("mark", "trace_handler"),
    "monitor.config": ("MonitorConfig", "add_perf_monitor_arguments"),
    "monitor.monitor": ("TrainingMonitor",),
    "ranks.load": ("load_ranks",),
    "ranks.report": ("RanksReport",),
    "result": ("ProfileResult", "load"),
    "timer.layer_timer": ("LayerTimer",),
    "timer.timer": ("Timer", "global_timer"),
    "wrapper": ("ProfilerWrapper",),
}
_HOMES = {name: f"{__name__}.{module}" for module, names in _MODULES.items() for name in names}

__version__ = "0.1.0"

__all__ = [
    "BrokenTrace",
    "EmptyRecording",
    "ProfilerWrapperError",
    "ProfilerWrapperWarning",
    "UnknownLayer",
    "WrongUse",
    *_HOMES,
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {shown(__name__)} has no attribute {shown(name)}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext profiler_wrapper`: the magic `%%profile_layers` of notebooks."""
    importlib.import_module(f"{__name__}.integrations.notebook").register(shell)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
