"""What a step computes, measured, given or by a config's formula, and how long that takes at the peak.

Imports nothing of torch: a recorded step is counted in a process of its own, so that the training goes on meanwhile.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec

from profiler_wrapper.errors import EmptyRecording, Notices, ProfilerWrapperError, first_few, in_a_line
from profiler_wrapper.monitor.records import FLOPS, Convention, FlopsSource, StepRecord
from profiler_wrapper.place.placed import place_events
from profiler_wrapper.tables.work.flops import flops_of_recording
from profiler_wrapper.tables.work.formulas import has_formula
from profiler_wrapper.tables.work.peaks import Peaks
from profiler_wrapper.tables.work.roofline import RECOMPUTE_IS_HIDDEN, StepWork, hides_recompute, work_of_count
from profiler_wrapper.trace.reader import read_with_shapes

# --- Counts the FLOPs of a recorded step, in a process of its own ---

PROGRAM = f"from {__name__} import main; main(*sys.argv[1:])"
_POLITENESS = 10  # less important than the training


def count_step(trace: str | os.PathLike[str], run: Mapping[str, Any]) -> StepWork:
    """The work of the step that a trace with shapes holds; `run`: what is known of its layers and compiled code.

    Raises:
        ValueError: it holds none, is no trace, or does not tell what was computed again.
    """
    recording, shapes = read_with_shapes(trace, has_formula)
    found = place_events(recording, run=run, shapes=shapes)
    count = flops_of_recording(found)
    if isinstance(count, str):
        raise EmptyRecording(count)
    if hides_recompute(found, count):
        raise ValueError(RECOMPUTE_IS_HIDDEN)
    return work_of_count(count)


def main(trace: str, run: str) -> None:
    """Print the work of the step in `trace` as JSON, or the error and exit with 1; `run` is a file of JSON beside it.

    Removes their directory.
    """
    with contextlib.suppress(AttributeError, OSError):  # no such thing on this system
        os.nice(_POLITENESS)
    try:
        work = count_step(trace, json.loads(Path(run).read_text(encoding="utf-8")))
        ops = tuple(op[:200] for op in work.uncounted[:20])  # nobody reads before the end: a pipe is short
        print(msgspec.json.encode(replace(work, uncounted=ops)).decode())
    except Exception as error:
        print(error_text(error)[:1000])
        sys.exit(1)
    finally:
        shutil.rmtree(os.path.dirname(trace), ignore_errors=True)


def error_text(error: Exception) -> str:
    """The error in words; those that say what is wrong without their type."""
    return str(error) if isinstance(error, ValueError) else in_a_line(error)


class Measurement(NamedTuple):
    """What was counted of a step."""

    step: int
    work: StepWork


# --- The work of each step ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """How many ranks there are, and how many of them have data of their own."""

    world_size: int = 1  # ranks of the job
    # groups of ranks with a batch of their own; tensor, pipeline and context parallel ranks share one
    data_parallel: int = 1
    pipeline_parallel: int = 1  # stages
    warning: str | None = None  # what does not fit together, and what was taken instead


Formula = Callable[[int, "int | None"], float]
Shapes: TypeAlias = "tuple[tuple[int, int | None], ...]"  # of micro-batches: sequences, their length (None: images)
# Micro-batches that a measurement holds for: sequences, and what has to be the same for FLOPs in proportion to them.
BatchKey: TypeAlias = "tuple[tuple[int, Any], ...]"
_MOST_SHAPES = 4096  # whose FLOPs by formula are kept
_MOST_MEASURED = 64  # measurements of unlike batches that are kept
_LONG = 1 << 20  # tokens: more than any part of a sequence that a config tells


class Work(NamedTuple):
    """FLOPs of one step of the whole job, and the seconds that one device needs for its share: see `StepRecord`."""

    flops_source: FlopsSource
    model_flops: float
    hardware_flops: float | None = None
    model_time_at_peak_s: float | None = None
    hardware_time_at_peak_s: float | None = None
    flops_step: int | None = None

    def times(self, factor: float) -> Work:
        """That of so many times the sequences."""
        known = {name: value for name in FLOPS if (value := getattr(self, name)) is not None}
        return self._replace(**{name: value * factor for name, value in known.items()})


class Roof:
    """Times at the peak, each type of number at its own; none is known without `peaks`.

    `tf32`: products of float32 numbers run as TF32, so their peak is that of "tfloat32" where it is known.
    """

    def __init__(self, peaks: Peaks | None, notices: Notices, *, tf32: bool = False) -> None:
        self.peaks, self._notices, self._tf32 = peaks, notices, tf32

    def time_s(self, flops_by_dtype: Mapping[str, float]) -> float | None:
        """What one device needs; None where the peak of some of these types is not known, which is said once."""
        if self.peaks is None:
            return None
        seconds = 0.0
        for dtype, flops in flops_by_dtype.items():
            if not flops:
                continue
            fast = self.peaks.flops("tfloat32") if self._tf32 and dtype == "float32" else None
            peak = fast or self.peaks.flops(dtype)
            if peak is None:
                name = self.peaks.device or "the device"
                why = (
                    f"that of {dtype} is not known of {name}: give peaks={{'{dtype}': <TFLOP/s>}}"
                    if dtype
                    else f"the type of the numbers is not known, and the peak of {name} depends on it: give "
                    "dtype='bfloat16'"
                )
                self._notices.warn_once(f"peak {dtype}", f"no share of the peak: {why}")
                return None
            seconds += flops / peak
        return seconds


@dataclass(slots=True, kw_only=True)
class StepWorks:
    """The work of each step: measured, else as given, else by formula from the model's config."""

    roof: Roof
    sizes: Parallelism
    convention: Convention
    notices: Notices
    given: float | None = None  # FLOPs of this rank's batch by the user, or of the job's with `given_by_job`
    given_by_job: bool = False
    # (sequences, their length, None for images) -> FLOPs of a step on them; None: no config
    formula: Formula | None = None
    dtype: str = ""  # of the numbers that `given` and `formula` are about; "": not known
    formula_fails: bool = False  # the formula did not tell the work of some step
    _measured: dict[BatchKey, Work] = field(default_factory=dict)  # by their batches, the newest last

    def take(self, measurement: Measurement, key: BatchKey = ()) -> None:
        """Use a measurement from now on; one that does not know all of a step is only said.

        `key`: of the micro-batches of the step that was measured, on this rank; empty: not known.
        """
        work = measurement.work
        causal = self.convention == "causal"
        model = work.causal_model_flops_by_dtype if causal else work.model_flops_by_dtype
        hardware = work.causal_hardware_flops_by_dtype if causal else work.hardware_flops_by_dtype
        if work.uncounted or not sum(model.values()):
            self._measured.clear()
            self.notices.warn_once("uncounted", _why_unknown(measurement))
            return
        if self.sizes.pipeline_parallel > 1:
            self.notices.warn_once(
                "pipeline",
                f"FLOPs of the job are an estimate: those measured here times {self.sizes.world_size} ranks, though "
                "stages of a pipeline may be unlike",
            )
        world_size = self.sizes.world_size
        self._measured.pop(key, None)
        self._measured[key] = Work(
            model_flops=sum(model.values()) * world_size,
            hardware_flops=sum(hardware.values()) * world_size,
            model_time_at_peak_s=self.roof.time_s(model),
            hardware_time_at_peak_s=self.roof.time_s(hardware),
            flops_source="measured",
            flops_step=measurement.step,
        )
        if len(self._measured) > _MOST_MEASURED:
            del self._measured[next(iter(self._measured))]

    def of(self, shapes: Shapes, key: BatchKey = ()) -> Work | None:
        """The work of a step whose micro-batches on this rank have these shapes; empty: not known.

        `key`: what a measurement goes by, where it is more than they tell.
        """
        now = key or shapes
        for then, measured in reversed(self._measured.items()):
            factor = _times_as_many(now, then) if now and then else 1.0
            if factor is not None:
                return measured.times(factor)
        if self.given is not None:
            return self._work(self.given if self.given_by_job else self.given * self.sizes.data_parallel, "given")
        if self.formula is None:
            if self._measured:
                then, measured = list(self._measured.items())[-1]
                self.notices.warn_once(
                    "unlike batch",
                    f"FLOPs are not known of steps like one on {in_words(now)}, because they were measured in step "
                    f"{measured.flops_step} on {in_words(then)}, and attention is not in proportion to the length: "
                    "give model_config=, measure more often (flops_profile_freq=), or, where only the padding "
                    "differs, give shapes= with it",
                )
            return None
        if not shapes:
            self.formula_fails = True
            self.notices.warn_once(
                "shape of batch",
                "FLOPs by the model's config are not available, because nothing tells the batch: give batch_size= and "
                "seq_length=, an attention_mask, shapes=, or flops_profile_freq=500 to measure them",
            )
            return None
        flops = [self._evaluated(self.formula, *shape) for shape in shapes]
        known = [number for number in flops if number is not None]
        return self._work(sum(known) * self.sizes.data_parallel, "config") if len(known) == len(flops) else None

    def _evaluated(self, formula: Formula, sequences: int, length: int | None) -> float | None:
        try:
            return formula(sequences, length or None)
        except Exception as error:
            self.formula_fails = True
            self.notices.warn_once(
                "formula",
                f"FLOPs by the model's config are not available for a batch of {sequences}: "
                f"{error if isinstance(error, ProfilerWrapperError) else in_a_line(error)}",
            )
            return None

    def _work(self, flops_of_job: float, source: FlopsSource) -> Work:
        time_s = self.roof.time_s({self.dtype: flops_of_job / self.sizes.world_size})
        return Work(model_flops=flops_of_job, model_time_at_peak_s=time_s, flops_source=source)


def _times_as_many(shapes: BatchKey, then: BatchKey) -> float | None:
    """How many times the sequences of each length there were then, where that is the same for all lengths.

    Lengths that are not known, now or then, are taken to be alike.
    """
    some_unknown = any(length is None for _, length in (*shapes, *then))
    now, before = Counter[Any](), Counter[Any]()
    for counts, batch in ((now, shapes), (before, then)):
        for sequences, length in batch:
            counts[None if some_unknown else length] += sequences
    factors = {now[length] / before[length] if before[length] else None for length in (+now | +before)}
    return factors.pop() if len(factors) == 1 else None


def in_words(shapes: Sequence[tuple[int | None, Any]]) -> str:
    """The first few: `2 x 16 and 4 x 8`."""
    sizes = [str(sequences) if length is None else f"{sequences} x {length}" for sequences, length in shapes]
    return first_few(sizes, 2, between=" and ")


def formula_of(
    config: Any, *, family: str, convention: Convention, notices: Notices, asked_for: bool
) -> Formula | None:
    """FLOPs by a model's config; None where no formula fits it, which is said if it was `asked_for`."""
    from profiler_wrapper.config_flops.model_flops import model_flops

    @functools.lru_cache(maxsize=_MOST_SHAPES)
    def formula(sequences: int, length: int | None) -> float:
        return float(model_flops(config, sequences, length, convention=convention, family=family).total)

    for length in (8, None, _LONG):  # texts need a length; images none; videos one that is longer than their text
        try:
            formula(1, length)
            return formula
        except (ProfilerWrapperError, ValueError, TypeError, AttributeError, KeyError, ArithmeticError) as error:
            why = error
    if asked_for:
        notices.warn_once("formula", f"FLOPs by the model's config are not available: {why}")
    return None


def why_over_peak(record: StepRecord, works: StepWorks) -> str:
    """What is likely wrong where a step did more than its device can."""
    peaks = works.roof.peaks
    assert peaks is not None and record.mfu is not None
    return (
        f"MFU is {record.mfu:.2f} in step {record.step}, and more than 1 cannot be. FLOPs are {record.flops_source}: "
        "are they, or batch_size and seq_length, those of one step on this rank (counts='job' says otherwise), are the "
        "sizes of parallel groups known (tensor_parallel=), and does the step hold all of its work? "
        f"Or the peak is too low ({peaks.source}; where the model computes in another type than that of its parameters "
        "give dtype='bfloat16' or its like)"
    )


def _why_unknown(measurement: Measurement) -> str:
    ops = measurement.work.uncounted
    if not ops:
        return (
            f"FLOPs of step {measurement.step} could not be measured: no op with FLOPs ran on the thread that "
            "the step began on (begin and end steps on the thread that trains; a replayed CUDA graph shows none)"
        )
    return (
        f"FLOPs of step {measurement.step} could not be measured, because nothing tells those of {first_few(ops, 3)}: "
        "give flops_per_step= or model_config="
    )
