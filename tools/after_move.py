"""Changes by hand after `move_modules.py`, in the checkout given: the import test, the rooms of the mutants."""

# ruff: noqa: E501, E402

import sys
from pathlib import Path

R = Path(sys.argv[1])
p = R / "tests/unit/test_import_direction.py"
s = p.read_text()
a = s.index('"""')
b = s.index("from __future__")
s = (
    '"""Imports point one way: a room sees the rooms that ALLOWED names, the top level, `commands` and `integrations` all."""\n\n'
    + s[b:]
)
a = s.index("ALLOWED = {")
b = s.index("def imported")
s = (
    s[:a]
    + """ALLOWED = {
    "trace": set(),
    "capture": {"trace"},
    "analysis": {"trace"},
    "reports": {"analysis", "trace"},
    "comparison": {"analysis", "reports", "result", "trace"},
    "ranks": {"analysis", "reports", "trace"},
    "snapshot": {"reports", "trace"},
    "timer": {"capture", "trace"},
    "config_flops": set(),
    "monitor": {"analysis", "capture", "config_flops", "reports", "timer", "trace"},
    "run": {"__version__", "analysis", "capture", "reports", "result", "trace"},
}
SHARED = {"errors", "child", "units"}  # import nothing of the package but one another
SEES_ALL = {"commands", "integrations"}


"""
    + s[b:]
)
for x, y in (
    ("profiler_wrapper.recording.columns import Spans", "profiler_wrapper.trace.recording import Spans"),
    ("recording/a.py", "trace/a.py"),
    ('"profiler_wrapper.recording import store"', '"profiler_wrapper.trace import run_directory"'),
    ("from profiler_wrapper.recording import store", "from profiler_wrapper.trace import run_directory"),
    ("errors.py: imports recording", "errors.py: imports trace"),
    (
        '("notices.py", "from profiler_wrapper.errors import WrongUse", [])',
        '("units.py", "from profiler_wrapper.errors import WrongUse", [])',
    ),
):
    s = s.replace(x, y)
p.write_text(s)
(R / "profiler_wrapper/config_flops/__init__.py").write_text(
    '"""FLOPs of a model from its config: one function a family, registered under a name."""\n\nfrom profiler_wrapper.config_flops import families\n\n__all__ = ["families"]\n'
)
p = R / "tests/mutants.py"
s = p.read_text()
import re

for old, new in {
    '"analysis/attribution.py analysis/forward_ops.py analysis/fsdp_names.py analysis/layer_tree.py"\n        " analysis/optimizer_calls.py analysis/phase.py"': '"analysis/attribution.py analysis/layer_tree.py analysis/steps.py"',
    '"analysis/charges.py analysis/intervals.py analysis/idle.py analysis/classes.py"': '"analysis/charges.py analysis/classes.py"',
    '"analysis/memory_*.py analysis/layer_memory.py"': '"analysis/memory/*.py"',
    '"analysis/flops.py analysis/ran_ops.py analysis/formulas.py analysis/attention_*.py analysis/operands.py"\n        " analysis/op_bytes.py analysis/traffic.py analysis/roofline.py analysis/utilization.py analysis/sums.py"': '"analysis/work/*.py analysis/attention_ops.py"',
    '"capture/recorder.py capture/counting.py capture/signals.py capture/tape.py capture/window.py capture/steps.py"\n        " capture/scopes.py capture/calls.py capture/holdings.py capture/optimizers.py capture/parameters.py"\n        " capture/storages.py capture/layers.py capture/phases.py"': '"capture/recorder.py capture/steps.py capture/scopes.py capture/owned_tensors.py capture/layers.py"\n        " capture/torch_state.py"',
    '"live/span*.py live/open_spans.py live/garbage_spans.py live/timer.py live/timed_calls.py live/line_files.py"\n        " live/layer_*.py live/backward_runs.py live/engine_calls.py live/graph_tensors.py live/event_pool.py"': '"timer/*.py"',
    '"analysis/compare*.py analysis/guard*.py analysis/noise.py"': '"comparison/*.py"',
    '"analysis/ranks/*.py"': '"ranks/*.py"',
}.items():
    if old not in s:
        print("MUTANTS: not found", old[:60])
    s = s.replace(old, new)
s = re.sub(r'"live/monitor\*\.py(.|\n)*?analysis/monitor_run\.py"', '"monitor/*.py"', s)
p.write_text(s)
for f, old, new in (
    ("profiler_wrapper/timer/layer_timer.py", "See live/rank_waits.py", "See timer/rank_waits.py"),
    ("profiler_wrapper/timer/layer_spans.py", "See live/rank_waits.py", "See timer/rank_waits.py"),
    ("profiler_wrapper/ranks/times.py", "recording/span_table.py", "trace/spans.py"),
):
    p = R / f
    p.write_text(p.read_text().replace(old, new))
