"""Where the time, the memory and the FLOPs of every layer of a Transformer go: from one with-block, or from a trace.

from profiler_wrapper import ProfilerWrapper

with ProfilerWrapper(model) as prof:
    train(model)
print(prof.result)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from profiler_wrapper.capture import compiled as _compiled
from profiler_wrapper.errors import (
    BrokenTrace,
    EmptyRecording,
    ProfilerWrapperError,
    ProfilerWrapperWarning,
    UnknownLayer,
    WrongUse,
)

if TYPE_CHECKING:
    from profiler_wrapper.comparison.compare import compare
    from profiler_wrapper.comparison.guard import guard
    from profiler_wrapper.config_flops.model_flops import model_flops
    from profiler_wrapper.config_flops.registry import register_family
    from profiler_wrapper.marking import mark, trace_handler
    from profiler_wrapper.monitor.config import MonitorConfig, add_perf_monitor_arguments
    from profiler_wrapper.monitor.monitor import TrainingMonitor
    from profiler_wrapper.ranks.load import load_ranks
    from profiler_wrapper.ranks.model import RanksReport
    from profiler_wrapper.result import ProfileResult, load
    from profiler_wrapper.timer.layer_timer import LayerTimer
    from profiler_wrapper.timer.timer import Timer, global_timer
    from profiler_wrapper.wrapper import ProfilerWrapper


__version__ = "0.1.0"

__all__ = [
    "BrokenTrace",
    "EmptyRecording",
    "LayerTimer",
    "MonitorConfig",
    "ProfileResult",
    "ProfilerWrapper",
    "ProfilerWrapperError",
    "ProfilerWrapperWarning",
    "RanksReport",
    "Timer",
    "TrainingMonitor",
    "UnknownLayer",
    "WrongUse",
    "add_perf_monitor_arguments",
    "compare",
    "global_timer",
    "guard",
    "load",
    "load_ranks",
    "mark",
    "model_flops",
    "register_family",
    "trace_handler",
]

# Models that are compiled from now on can be told apart by layer. Imports neither torch nor its compiler.
_compiled.install()

# Imported when first asked for: reading a trace on a laptop should not wait for what capture needs.
_HOMES = {
    "LayerTimer": "profiler_wrapper.timer.layer_timer",
    "ProfilerWrapper": "profiler_wrapper.wrapper",
    "MonitorConfig": "profiler_wrapper.monitor.config",
    "RanksReport": "profiler_wrapper.ranks.model",
    "Timer": "profiler_wrapper.timer.timer",
    "TrainingMonitor": "profiler_wrapper.monitor.monitor",
    "add_perf_monitor_arguments": "profiler_wrapper.monitor.config",
    "compare": "profiler_wrapper.comparison.compare",
    "global_timer": "profiler_wrapper.timer.timer",
    "guard": "profiler_wrapper.comparison.guard",
    "load_ranks": "profiler_wrapper.ranks.load",
    "mark": "profiler_wrapper.marking",
    "model_flops": "profiler_wrapper.config_flops.model_flops",
    "register_family": "profiler_wrapper.config_flops.model_flops",
    "trace_handler": "profiler_wrapper.marking",
    "ProfileResult": "profiler_wrapper.result",
    "load": "profiler_wrapper.result",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
