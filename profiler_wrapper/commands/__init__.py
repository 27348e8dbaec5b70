"""The commands of `python -m profiler_wrapper`, a file each.

A file has `add(commands)`, which makes its parser, and what that runs. All of them are imported by `--help`, so that
what takes time to import (torch, matplotlib, pandas) is imported where it is used.
"""

from __future__ import annotations

from profiler_wrapper.commands import analyze, compare, demo, guard, monitor, peaks, ranks, report, run, skill, snapshot

# In the order in which --help lists them.
COMMANDS = (demo, run, analyze, report, compare, guard, ranks, snapshot, monitor, peaks, skill)
