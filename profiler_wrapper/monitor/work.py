"""What a step is known to compute, and how long that takes at the peak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from profiler_wrapper.analysis.work.peaks import Peaks
from profiler_wrapper.errors import Notices, ProfilerWrapperError, WrongUse
from profiler_wrapper.monitor.flop_probe import Measurement
from profiler_wrapper.monitor.records import Convention, FlopsSource, StepRecord

# --------------------------------------------------------------------------------------------------
# How a job is divided among its ranks; found out without asking any other rank.

# By what the dimensions of a device mesh are called. The ranks that none of these divides work on other data.
_SHARE_A_BATCH = {
    "tp": "tensor",
    "tensor": "tensor",
    "tensor_parallel": "tensor",
    "model": "tensor",
    "pp": "pipeline",
    "pipeline": "pipeline",
    "pipeline_parallel": "pipeline",
    "pipe": "pipeline",
    "cp": "context",
    "context": "context",
    "context_parallel": "context",
    "sp": "context",
    "sequence": "context",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenSizes:
    """What the user says of the job; `None`: nothing.

    Raises:
        WrongUse: a size is no whole number above 0, or the sizes do not fit together.
    """

    world_size: int | None = None
    data_parallel: int | None = None
    tensor_parallel: int | None = None
    pipeline_parallel: int | None = None
    context_parallel: int | None = None

    def __post_init__(self) -> None:
        for name in ("world_size", "data_parallel", "tensor_parallel", "pipeline_parallel", "context_parallel"):
            size = getattr(self, name)
            if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
                raise WrongUse(f"{name}={size!r}: give a whole number above 0.")
        if self.world_size is not None and self.world_size % self.named:
            raise WrongUse(
                f"a world of {self.world_size} ranks does not divide by the {self.named} that data, tensor, pipeline "
                "and context parallel sizes make together."
            )

    @property
    def named(self) -> int:
        """The ranks that the given sizes make together."""
        return (
            (self.data_parallel or 1)
            * (self.tensor_parallel or 1)
            * (self.pipeline_parallel or 1)
            * (self.context_parallel or 1)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """How many ranks there are, and how many of them have data of their own.

    Attributes:
        world_size: ranks of the job.
        data_parallel: groups of ranks with a batch of their own; tensor, pipeline and context parallel ranks
            share one.
        pipeline_parallel: stages.
        warning: what does not fit together, and what was taken instead.
    """

    world_size: int = 1
    data_parallel: int = 1
    pipeline_parallel: int = 1
    warning: str | None = None


def parallelism(given: GivenSizes, *, world_size: int, device_mesh: Any = None) -> Parallelism:
    """What the user gave, then what the mesh says, then that every rank has data of its own.

    Args:
        given: sizes by the user.
        world_size: of the process group or the environment.
        device_mesh: a `DeviceMesh` with named dimensions.
    """
    message = {
        "tensor": given.tensor_parallel,
        "pipeline": given.pipeline_parallel,
        "context": given.context_parallel,
    }
    by_mesh = _sizes_of_mesh(device_mesh)
    sharing = {name: size or by_mesh.get(name, 1) for name, size in message.items()}
    share_a_batch = sharing["tensor"] * sharing["pipeline"] * sharing["context"]
    if given.world_size is not None:
        world_size = given.world_size
    elif given.named > world_size and world_size == 1:
        world_size = given.named  # ranks that neither a process group nor the environment tells of
    warning = None
    if given.data_parallel is not None:
        data_parallel = given.data_parallel
        if world_size % (data_parallel * share_a_batch):
            warning = (
                f"data_parallel={data_parallel} does not fit a world of {world_size} ranks of which {share_a_batch} "
                "share a batch; it is taken as given, so check the totals"
            )
    else:
        data_parallel = max(1, world_size // share_a_batch)
        if world_size % share_a_batch:
            warning = (
                f"a world of {world_size} ranks does not divide by the {share_a_batch} that share a batch; "
                f"{data_parallel} is taken for the data parallel size, so check the totals"
            )
    return Parallelism(
        world_size=world_size,
        data_parallel=data_parallel,
        pipeline_parallel=sharing["pipeline"],
        warning=warning,
    )


def _sizes_of_mesh(mesh: Any) -> Mapping[str, int]:
    names, shape = getattr(mesh, "mesh_dim_names", None), getattr(mesh, "shape", None)
    sizes: dict[str, int] = {}
    if not names or shape is None:
        return sizes
    for name, size in zip(names, shape, strict=False):
        known = _SHARE_A_BATCH.get(str(name).lower())
        if known is not None:
            sizes[known] = sizes.get(known, 1) * int(size)
    return sizes


Formula = Callable[[int, "int | None"], float]
Shapes: TypeAlias = "tuple[tuple[int, int | None], ...]"  # of micro-batches: sequences, their length (None: images)
_MOST_SHAPES = 4096  # that FLOPs are kept of
_LONG = 1 << 20  # tokens: more than any part of a sequence that a config tells


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """FLOPs of one step of the whole job, and the seconds that one device needs for its share at its peak."""

    model_flops: float
    hardware_flops: float | None = None
    model_time_at_peak_s: float | None = None
    hardware_time_at_peak_s: float | None = None
    source: FlopsSource
    step: int | None = None  # that was measured


class Roof:
    """Times at the peak, each type of number at its own.

    Args:
        peaks: None: not known, so neither is any time.
        tf32: products of float32 numbers run as TF32, so their peak is that of "tfloat32" where it is known.
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
            peak = self._peak(dtype)
            if peak is None:
                self._notices.warn_once(f"peak {dtype}", f"no share of the peak: {self._why_none(dtype)}")
                return None
            seconds += flops / peak
        return seconds

    def _peak(self, dtype: str) -> float | None:
        assert self.peaks is not None
        fast = self.peaks.flops("tfloat32") if self._tf32 and dtype == "float32" else None
        return fast or self.peaks.flops(dtype)

    def _why_none(self, dtype: str) -> str:
        assert self.peaks is not None
        name = self.peaks.device or "the device"
        if not dtype:
            return f"the type of the numbers is not known, and the peak of {name} depends on it: give dtype='bfloat16'"
        return f"that of {dtype} is not known of {name}: give peaks={{'{dtype}': <TFLOP/s>}}"


@dataclass(slots=True, kw_only=True)
class StepWorks:
    """The work of each step: measured, else as given, else by formula from the model's config.

    Attributes:
        given: FLOPs of this rank's batch by the user, or of the job's with `given_by_job`.
        formula_fails: the formula did not tell the work of some step.
        formula: (sequences, their length, None for images) -> FLOPs of a step on them; None: no config.
        dtype: of the numbers that `given` and `formula` are about; "": not known.
    """

    roof: Roof
    sizes: Parallelism
    convention: Convention
    notices: Notices
    given: float | None = None
    given_by_job: bool = False
    formula: Formula | None = None
    dtype: str = ""
    formula_fails: bool = False
    _measured: Work | None = None
    _measured_shapes: Shapes = ()
    _measured_of: dict[Shapes, Work] = field(default_factory=dict)  # the last measurement of each batch, newest last
    _given: Work | None = None
    _by_shape: dict[tuple[int, int | None], float | None] = field(default_factory=dict)

    def take(self, measurement: Measurement, shapes: Shapes = ()) -> None:
        """Use a measurement from now on; one that does not know all of a step is only said.

        `shapes`: of the micro-batches of the step that was measured, on this rank; empty: not known.
        """
        work = measurement.work
        causal = self.convention == "causal"
        model = work.causal_model_flops_by_dtype if causal else work.model_flops_by_dtype
        hardware = work.causal_hardware_flops_by_dtype if causal else work.hardware_flops_by_dtype
        if work.uncounted or not sum(model.values()):
            self._measured = None
            self._measured_of.clear()
            self.notices.warn_once("uncounted", _why_unknown(measurement))
            return
        if self.sizes.pipeline_parallel > 1:
            self.notices.warn_once(
                "pipeline",
                f"FLOPs of the job are an estimate: those measured here times {self.sizes.world_size} ranks, though "
                "stages of a pipeline may be unlike",
            )
        world_size = self.sizes.world_size
        self._measured = Work(
            model_flops=sum(model.values()) * world_size,
            hardware_flops=sum(hardware.values()) * world_size,
            model_time_at_peak_s=self.roof.time_s(model),
            hardware_time_at_peak_s=self.roof.time_s(hardware),
            source="measured",
            step=measurement.step,
        )
        self._measured_shapes = shapes
        self._measured_of.pop(shapes, None)
        self._measured_of[shapes] = self._measured
        if len(self._measured_of) > _MOST_SHAPES:
            self._measured_of.pop(next(iter(self._measured_of)))

    def of(self, shapes: Shapes) -> Work | None:
        """The work of a step whose micro-batches on this rank have these shapes; empty: not known."""
        measured = self._measured_for(shapes)
        if measured is not None:
            return measured
        if self.given is not None:
            if self._given is None:
                by_job = self.given if self.given_by_job else self.given * self.sizes.data_parallel
                self._given = self._work(by_job, "given")
            return self._given
        if self.formula is None:
            self._tell_unlike(shapes)
            return None
        if not shapes:
            self.formula_fails = True
            self.notices.warn_once(
                "shape of batch",
                "FLOPs by the model's config are not available, because nothing tells the batch: give batch_size= and "
                "seq_length=, an attention_mask, shapes=, or flops_profile_freq=500 to measure them",
            )
            return None
        flops = 0.0
        for shape in shapes:
            of_shape = self._by_formula(self.formula, shape)
            if of_shape is None:
                return None
            flops += of_shape
        return self._work(flops * self.sizes.data_parallel, "config")

    def _measured_for(self, shapes: Shapes) -> Work | None:
        """The measurement, in proportion to the sequences of each length; None where it does not hold."""
        work, then = self._measured, self._measured_shapes
        if work is None or not shapes or not then or shapes == then:
            return work
        if shapes in self._measured_of:
            return self._measured_of[shapes]
        factor = _times_as_many(shapes, then)
        if factor is None or factor == 1:
            return None if factor is None else work
        return replace(
            work,
            model_flops=work.model_flops * factor,
            hardware_flops=_times(work.hardware_flops, factor),
            model_time_at_peak_s=_times(work.model_time_at_peak_s, factor),
            hardware_time_at_peak_s=_times(work.hardware_time_at_peak_s, factor),
        )

    def _tell_unlike(self, shapes: Shapes) -> None:
        if self._measured is not None:
            self.notices.warn_once(
                "unlike batch",
                f"FLOPs are not known of steps like one on {in_words(shapes)}, because they were measured in step "
                f"{self._measured.step} on {in_words(self._measured_shapes)}, and attention is not in proportion to "
                "the length: give model_config=, measure more often (flops_profile_freq=), or, where only the padding "
                "differs, give shapes= with it",
            )

    def _by_formula(self, formula: Formula, shape: tuple[int, int | None]) -> float | None:
        if shape not in self._by_shape:
            if len(self._by_shape) >= _MOST_SHAPES:
                self._by_shape.clear()
            self._by_shape[shape] = self._evaluated(formula, *shape)
        return self._by_shape[shape]

    def _evaluated(self, formula: Formula, sequences: int, length: int | None) -> float | None:
        try:
            return formula(sequences, length or None)
        except Exception as error:
            self.formula_fails = True
            self.notices.warn_once(
                "formula",
                f"FLOPs by the model's config are not available for a batch of {sequences}: "
                f"{error if isinstance(error, ProfilerWrapperError) else repr(error)}",
            )
            return None

    def _work(self, flops_of_job: float, source: FlopsSource) -> Work:
        time_s = self.roof.time_s({self.dtype: flops_of_job / self.sizes.world_size})
        return Work(model_flops=flops_of_job, model_time_at_peak_s=time_s, source=source)


def _times_as_many(shapes: Shapes, then: Shapes) -> float | None:
    """How many times the sequences of each length there were then, where that is the same for all lengths.

    Lengths that are not known, now or then, are taken to be alike.
    """
    now, before = _sequences(shapes), _sequences(then)
    if None in now or None in before:
        now, before = {None: sum(now.values())}, {None: sum(before.values())}
    if now.keys() != before.keys():
        return None
    factors = {now[length] / before[length] for length in now}
    return factors.pop() if len(factors) == 1 else None


def _sequences(shapes: Shapes) -> dict[int | None, int]:
    """How many, by their length."""
    found = Counter[int | None]()
    for sequences, length in shapes:
        if sequences:
            found[length] += sequences
    return dict(found)


def _times(number: float | None, factor: float) -> float | None:
    return None if number is None else number * factor


def in_words(shapes: Sequence[tuple[int | None, int | None]]) -> str:
    """The first few: `2 x 16 and 4 x 8`."""
    sizes = [str(sequences) if length is None else f"{sequences} x {length}" for sequences, length in shapes]
    return " and ".join(sizes[:2] + ([f"{len(sizes) - 2} more"] if len(sizes) > 2 else []))


def formula_of(
    config: Any, *, family: str, convention: Convention, notices: Notices, asked_for: bool
) -> Formula | None:
    """FLOPs by a model's config; None where no formula fits it, which is said if it was `asked_for`."""
    from profiler_wrapper.config_flops.model_flops import model_flops

    def formula(sequences: int, length: int | None) -> float:
        return float(
            model_flops(
                config, sequences, length, convention=convention, family=None if family == "auto" else family
            ).total
        )

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
    head = f"MFU is {record.mfu:.2f} in step {record.step}, and more than 1 cannot be: "
    if record.flops_source != "measured" and works.dtype in ("float32", "float64"):
        lower = peaks.flops("bfloat16")
        assumed = peaks.flops(works.dtype)
        if lower is not None and assumed is not None and record.mfu * assumed <= lower:
            return (
                f"{head}likely the model computes in a lower precision than the {works.dtype} of its parameters, whose "
                "peak was taken: give dtype='bfloat16' or its like"
            )
    if record.flops_source == "given":
        return (
            f"{head}likely flops_per_step is more than the FLOPs of one step on this rank's batch (those of the whole "
            "job go with counts='job')"
        )
    if peaks.source.startswith(("given", "measured")) or not peaks.device:
        return f"{head}likely the peak is too low ({peaks.source})"
    if record.flops_source == "config":
        return (
            f"{head}likely batch_size and seq_length are not those of one step on this rank, or the sizes of parallel "
            "groups are not known (tensor_parallel=, pipeline_parallel=)"
        )
    return f"{head}likely the step was not timed whole: start_step() has to come before its work, and end_step() after"


def _why_unknown(measurement: Measurement) -> str:
    ops = measurement.work.uncounted
    if not ops:
        return (
            f"FLOPs of step {measurement.step} could not be measured: no op with FLOPs ran on the thread that "
            "the step began on (begin and end steps on the thread that trains; a replayed CUDA graph shows none)"
        )
    more = f" and {len(ops) - 3} more" if len(ops) > 3 else ""
    return (
        f"FLOPs of step {measurement.step} could not be measured, because nothing tells those of "
        f"{', '.join(ops[:3])}{more}: give flops_per_step= or model_config="
    )
