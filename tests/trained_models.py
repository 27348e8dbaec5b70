"""Training runs of real models that many tests read and none changes: each is recorded once in a process."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import profiler_wrapper as pw
from models import Case, build, optimizer_of, train_step
from profiling import directory_of, profiler, result_of


@dataclass(frozen=True)
class Trained:
    """The model after its run, and what came out."""

    case: Case
    result: pw.ProfileResult
    directory: Path
    optimizer_bytes: int  # what it keeps


def train_in_profiler(case: Case, directory: Path, **options: object) -> Trained:
    """Five steps on the same batch: two are with shapes and three timed."""
    optimizer = optimizer_of(case.model)
    with profiler(case, directory, **options) as prof:
        for _ in range(5):
            train_step(case, case.model, optimizer)
            prof.step()
    kept = sum(tensor.untyped_storage().nbytes() for one in optimizer.state.values() for tensor in one.values())
    return Trained(case, result_of(prof), directory_of(prof), kept)


@cache
def trained(name: str) -> Trained:
    """Five steps of the model of that name."""
    _DIRECTORIES.append(tempfile.TemporaryDirectory(prefix=f"trained_{name}_"))
    return train_in_profiler(build(name), Path(_DIRECTORIES[-1].name))


_DIRECTORIES: list[tempfile.TemporaryDirectory[str]] = []  # there till the process ends
