"""Facts for rules of advice, from recordings made by hand, runs and traces."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from profiler_wrapper.analysis.advice.facts import Facts, Rule
from profiler_wrapper.analysis.analyse import tables
from profiler_wrapper.analysis.attributed import attributed
from profiler_wrapper.analysis.view_model import Finding
from profiler_wrapper.recording.columns import Recording
from profiler_wrapper.result import attribute_trace, trace_with_shapes, work_of_trace


def facts_of(recording: Recording, *, run: Mapping[str, Any] | None = None, **changes: Any) -> Facts:
    """What the rules see of a recording; `changes` replace fields of its analysis."""
    run = dict(run or {})
    found = attributed(recording, run=run)
    return Facts(analysis=replace(tables(found, run=run), **changes), found=found)


def facts_of_trace(path: Path, **changes: Any) -> Facts:
    """What the rules see of a trace file, with the run.json beside it if there is one."""
    beside = path.parent / "run.json"
    run = json.loads(beside.read_text()) if beside.is_file() else {}
    found = attribute_trace(path, run=run)
    full = trace_with_shapes(path, run)
    work = None if full is None else work_of_trace(full, run=run)
    return Facts(analysis=replace(tables(found, run=run, work=work), **changes), found=found)


def findings(rule: Rule, facts: Facts) -> list[Finding]:
    """What one rule says."""
    return list(rule(facts))


def the_finding(rule: Rule, facts: Facts) -> Finding:
    """The only one, which there has to be."""
    (finding,) = rule(facts)
    return finding
