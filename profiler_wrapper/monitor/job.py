"""What a monitor is told when it is made, and what it finds out about the job when the first step ends."""

from __future__ import annotations

import math
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

from torch import nn

from profiler_wrapper.analysis.work.peaks import Peaks, find_peaks, type_of
from profiler_wrapper.capture.layers import all_parameters
from profiler_wrapper.capture.records import RunInfo
from profiler_wrapper.capture.runinfo import float32_matmul_precision, mesh_of, run_info
from profiler_wrapper.errors import Notices, WrongUse
from profiler_wrapper.monitor.config import DEFAULT_LOG_DIR, MonitorConfig
from profiler_wrapper.monitor.logs import sinks_of
from profiler_wrapper.monitor.records import Convention, Session
from profiler_wrapper.monitor.sinks import Sink, Sinks
from profiler_wrapper.monitor.work import Formula, Parallelism, Roof, StepWorks, formula_of

# How the ranks share the work; found out without asking any other rank.
_PARALLEL = ("data_parallel", "tensor_parallel", "pipeline_parallel", "context_parallel")
# What the dimensions of a device mesh are called. The ranks that none of these divides work on other data.
_SHARE_A_BATCH = {
    "tensor": ("tp", "tensor", "tensor_parallel", "model"),
    "pipeline": ("pp", "pipeline", "pipeline_parallel", "pipe"),
    "context": ("cp", "context", "context_parallel", "sp", "sequence"),
}
_FROZEN_SHARE = 0.5  # of the parameters, from which on FLOPs by a config are said to be too high


@dataclass(frozen=True, kw_only=True)
class MonitorArgs:
    """What the user says, checked. Raises WrongUse: a value means nothing."""

    config: MonitorConfig
    output_dir: Path
    log_file: str | None
    model: nn.Module | None = None
    model_config: Any = None
    batch_size: int | None = None
    seq_length: int | None = None
    flops_per_step: float | None = None
    dtype: str = ""
    counts: Literal["rank", "job"] = "rank"
    world_size: int | None = None
    data_parallel: int | None = None
    tensor_parallel: int | None = None
    pipeline_parallel: int | None = None
    context_parallel: int | None = None
    rank: int | None = None
    on_cpu: bool = False  # though there may be an accelerator
    device_mesh: Any = None
    sinks: Sequence[Sink] | None = None
    optimizer: Any = None
    directory: Path = field(default_factory=Path.cwd)  # that relative paths start from

    def __post_init__(self) -> None:
        if self.model is not None and not isinstance(self.model, nn.Module):
            raise WrongUse(f"model is a {type(self.model).__name__}. Give a torch.nn.Module, or nothing.")
        if self.log_file is not None and not isinstance(self.log_file, (str, os.PathLike)):
            raise WrongUse(f"log_file={self.log_file!r}: give a path, or None.")
        for name in ("batch_size", "seq_length", "world_size", *_PARALLEL):
            size = getattr(self, name)
            if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
                raise WrongUse(f"{name}={size!r}: give a whole number above 0.")
        if self.world_size is not None and self.world_size % self.named_ranks:
            raise WrongUse(
                f"a world of {self.world_size} ranks does not divide by the {self.named_ranks} that data, tensor, "
                "pipeline and context parallel sizes make together."
            )
        try:
            is_number = self.flops_per_step is None or 0 < float(self.flops_per_step) < math.inf
        except (TypeError, ValueError, OverflowError):
            is_number = False
        if not is_number:
            raise WrongUse(f"flops_per_step={self.flops_per_step!r}: give the FLOPs of forward and backward of a step.")
        if self.dtype and type_of(self.dtype) is None:
            raise WrongUse(f"dtype={self.dtype!r} is no type of numbers that has a peak. Give 'bfloat16' or its like.")
        if not isinstance(self.counts, str) or self.counts not in ("rank", "job"):
            raise WrongUse(f"counts={self.counts!r}: give 'rank' or 'job'.")
        if self.config.peaks is not None:
            find_peaks(None, given=self.config.peaks)  # raises

    @property
    def named_ranks(self) -> int:
        """The ranks that the given parallel sizes make together."""
        return math.prod(getattr(self, name) or 1 for name in _PARALLEL)

    @property
    def convention(self) -> Convention:
        return cast(Convention, self.config.convention)

    @property
    def log_dir(self) -> Path:
        """Where it was said to be, seen from where the monitor was made; else below `output_dir`."""
        given = self.config.perf_log_dir
        return self.output_dir / DEFAULT_LOG_DIR if given is None else self.directory / given


class Job:
    """This process within its job: who it is, and what its steps compute. Asks no other rank."""

    def __init__(self, given: MonitorArgs, notices: Notices) -> None:
        self.given, self.notices = given, notices
        self.info = _info(given)
        mesh = mesh_of((given.model,)) if given.device_mesh is None and given.model is not None else given.device_mesh
        self.sizes = parallelism(given, world_size=self.info.world_size, device_mesh=mesh)
        ranks = self.sizes.world_size
        self.is_log_rank = ranks == 1 or self.info.rank == given.config.log_rank % ranks
        notices.quiet = not self.is_log_rank
        if self.sizes.warning is not None:
            notices.warn_once("sizes", self.sizes.warning)
        self.formula = None if given.flops_per_step is not None else _formula(given, notices)

    def works(self) -> StepWorks:
        """What its steps compute, measured against the peaks of its device."""
        given = self.given
        if self.info.device is None and self.info.device_type != "cpu":
            self.info = _info(given)  # the device has started since
        peaks = self._peaks()
        tf32 = self.info.device_type == "cuda" and float32_matmul_precision() in ("high", "medium")
        return StepWorks(
            roof=Roof(peaks, self.notices, tf32=tf32),
            sizes=self.sizes,
            convention=given.convention,
            notices=self.notices,
            given=None if given.flops_per_step is None else float(given.flops_per_step),
            given_by_job=given.counts == "job",
            formula=self.formula,
            dtype=given.dtype or _dtype_of(given.model),
        )

    def sinks(self, peaks: Peaks | None, start_time: float, memory_kind: str) -> Sinks:
        """Where the log goes: nowhere but on the rank that writes it."""
        given, config = self.given, self.given.config
        dtype = given.dtype or _dtype_of(given.model)
        unmeasured = f"; FLOPs that are not measured are taken for {dtype}" if dtype else ""
        session = Session(
            start_time=start_time,
            log_dir=given.log_dir,
            log_interval=config.perf_log_interval,
            rank=self.info.rank,
            world_size=self.sizes.world_size,
            device_name=self.info.device or self.info.cpu_name,
            peak_flops_per_s=None if peaks is None else peaks.flops_per_s,
            peak_source=None if peaks is None else f"{peaks.source}{unmeasured}",
            convention=given.convention,
            memory_kind=memory_kind,
            versions=self.info.versions,
        )
        if not self.is_log_rank:
            return Sinks((), session)
        log = None if given.log_file is None else given.output_dir / given.log_file
        return Sinks(sinks_of(config, training_log=log) if given.sinks is None else given.sinks, session)

    def _peaks(self) -> Peaks | None:
        try:
            peaks, warning = find_peaks(self.info.device, given=self.given.config.peaks)
        except WrongUse as error:  # of the environment: what the user gave was checked
            peaks, warning = None, f"no share of the peak: {error}"
        if warning is not None:
            self.notices.warn_once("peaks", warning)
        return peaks


def _info(given: MonitorArgs) -> RunInfo:
    modules = () if given.model is None else (given.model,)
    version = str(getattr(sys.modules.get("profiler_wrapper"), "__version__", ""))
    info = run_info(modules=modules, rank=given.rank, device_mesh=given.device_mesh, version=version)
    return replace(info, device=None, device_type="cpu") if given.on_cpu else info


def parallelism(given: MonitorArgs, *, world_size: int, device_mesh: Any = None) -> Parallelism:
    """What the user gave, then what the mesh says, then that every rank has data of its own.

    Args:
        world_size: of the process group or the environment.
        device_mesh: a `DeviceMesh` with named dimensions.
    """
    sharing = {
        kind: getattr(given, f"{kind}_parallel") or _size_of_mesh(device_mesh, names)
        for kind, names in _SHARE_A_BATCH.items()
    }
    share_a_batch = math.prod(sharing.values())
    # Without a process group and an environment, the given sizes say how many ranks there are.
    world_size = given.world_size or (given.named_ranks if world_size == 1 else world_size)
    data_parallel = given.data_parallel or max(1, world_size // share_a_batch)
    warning = None
    if world_size % (share_a_batch * (given.data_parallel or 1)):
        warning = (
            f"data_parallel={data_parallel} is taken, which does not fit a world of {world_size} ranks of which "
            f"{share_a_batch} share a batch: check the totals"
        )
    return Parallelism(
        world_size=world_size,
        data_parallel=data_parallel,
        pipeline_parallel=sharing["pipeline"],
        warning=warning,
    )


def _size_of_mesh(mesh: Any, names: Sequence[str]) -> int:
    """The product of the dimensions with these names."""
    dimensions = zip(getattr(mesh, "mesh_dim_names", None) or (), getattr(mesh, "shape", None) or (), strict=False)
    return math.prod(int(size) for name, size in dimensions if str(name).lower() in names)


def _formula(given: MonitorArgs, notices: Notices) -> Formula | None:
    config = given.model if given.model_config is None else given.model_config
    if config is None:
        return None
    formula = formula_of(
        config,
        family=given.config.perf_model_type,
        convention=given.convention,
        notices=notices,
        asked_for=given.model_config is not None or given.config.perf_model_type != "auto",
    )
    frozen = 0.0 if formula is None else _frozen_share(given.model)
    if frozen >= _FROZEN_SHARE:
        notices.warn_once(
            "frozen",
            f"{frozen:.0%} of the parameters are not trained, and FLOPs by the model's config count the backward of "
            "all: flops_profile_freq=500 measures them",
        )
    return formula


def _frozen_share(model: nn.Module | None) -> float:
    parameters = [] if model is None else list(all_parameters(model))
    total = sum(parameter.numel() for parameter in parameters)
    frozen = sum(parameter.numel() for parameter in parameters if not parameter.requires_grad)
    return frozen / total if total else 0.0


def _dtype_of(model: nn.Module | None) -> str:
    """The floating type that most of the model's parameters have; "" without any."""
    sizes = Counter[str]()
    for parameter in all_parameters(model) if model is not None else ():
        if parameter.is_floating_point():
            sizes[str(parameter.dtype).removeprefix("torch.")] += parameter.numel()
    return sizes.most_common(1)[0][0] if sizes else ""
