"""Counts the FLOPs of a recorded step. Run as a process of its own, so that the training goes on meanwhile.

Imports nothing of torch. The process prints one line of JSON and deletes what it has read.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from profiler_wrapper.analysis.attributed import attributed
from profiler_wrapper.analysis.work.flops import flops_of_recording
from profiler_wrapper.analysis.work.formulas import has_formula
from profiler_wrapper.analysis.work.utilization import RECOMPUTE_IS_HIDDEN, StepWork, hides_recompute, work_of_count
from profiler_wrapper.errors import EmptyRecording
from profiler_wrapper.trace.reader import read_with_shapes

PROGRAM = f"from {__name__} import main; main(*sys.argv[1:])"
_POLITENESS = 10  # less important than the training


def count_step(trace: str | os.PathLike[str], run: Mapping[str, Any]) -> StepWork:
    """The work of the step that a trace with shapes holds; `run`: what is known of its layers and compiled code.

    Raises:
        ValueError: it holds none, is no trace, or does not tell what was computed again.
    """
    recording, shapes = read_with_shapes(trace, has_formula)
    found = attributed(recording, run=run, shapes=shapes)
    count = flops_of_recording(found)
    if isinstance(count, str):
        raise EmptyRecording(count)
    if hides_recompute(found, count):
        raise ValueError(RECOMPUTE_IS_HIDDEN)
    return work_of_count(count)


def main(trace: str, run: str) -> None:
    """Print the work of the step in `trace`, or the error, as JSON; `run` is a file of JSON beside it.

    Removes their directory.
    """
    with contextlib.suppress(AttributeError, OSError):  # no such thing on this system
        os.nice(_POLITENESS)
    try:
        work = count_step(trace, json.loads(Path(run).read_text(encoding="utf-8")))
        ops = tuple(op[:200] for op in work.uncounted[:20])  # nobody reads before the end: a pipe is short
        answer = _Answer(work=replace(work, uncounted=ops))
    except Exception as error:
        answer = _Answer(error=error_text(error)[:1000])
    shutil.rmtree(os.path.dirname(trace), ignore_errors=True)
    print(msgspec.json.encode(answer).decode())


def error_text(error: Exception) -> str:
    """The error in words; those that say what is wrong without their type."""
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"


class _Answer(msgspec.Struct):
    work: StepWork | None = None
    error: str = ""


def read_answer(text: str) -> StepWork:
    """What `main` printed. Raises ValueError: it tells of an error, or is no answer."""
    try:
        answer = msgspec.json.decode(text, type=_Answer)
    except msgspec.MsgspecError as error:
        raise ValueError(f"the process that counts gave no answer: {text[:200]!r}") from error
    if answer.work is None:
        raise ValueError(answer.error)
    return answer.work
