"""What `run.json` says of a run: where and how it was recorded, which memory was held, the trace that it goes with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypedDict

import msgspec

from profiler_wrapper.errors import BrokenTrace
from profiler_wrapper.trace.run_directory import RUN_FILE

_MOST_DIGITS = 20  # and sign: what 64 bits hold


class KVCacheLayers(TypedDict):
    """Layers of a cache that hold the same; sizes are those of one of them."""

    attention: str  # self, cross
    kind: str  # full, sliding, static, static sliding, quantized, state (of a layer without keys: it does not grow)
    count: int  # how many layers
    dtype: str  # type of its numbers
    window: int | None  # tokens that a sliding window spans; the cache keeps one less
    capacity: int | None  # tokens that a static cache has room for
    bytes: int  # keys and values, of all sequences
    held_bytes: int  # the memory behind them: more, where they are a part of a larger tensor
    bytes_per_token: int | None  # of one token of one sequence; null where that is not even


class KVCache(TypedDict):
    """The KV cache of a model, as the last call of a request left it."""

    root: str  # the model's label
    cache: str  # class of the cache
    requests: int  # in how many it was seen; this is the largest
    sequences: int | None  # rows of the batch, with beams
    beams: int  # of each
    tokens: int | None  # of each sequence; null where only values tell
    bytes_after_prefill: int | None  # null where the cache cannot be read
    bytes: int | None  # at the end
    bytes_per_token: int | None  # what one more token of every sequence adds
    layers: Sequence[KVCacheLayers]  # those that hold the same in one
    contexts: Sequence[Mapping[str, int | None]]  # {tokens, bytes}: what longer ones would take
    problem: str | None  # why it cannot be read


class Run(TypedDict, total=False):
    """What `run.json` and the `run` of a result say: where it was recorded, and what. There may be other keys."""

    timed_steps: Sequence[int]  # numbers of the steps whose times are reported
    full_steps: Sequence[int]  # numbers of the steps whose shapes were recorded
    step_source: str | None  # what ended a step: prof.step(), optimizer, updates, requests, root calls; None: nothing
    left_out: Sequence[Mapping[str, Any]]  # {what, count, time_us} of what ran before, or between, the timed steps
    kv_cache: Sequence[KVCache]  # of each root, where requests were recorded: the largest that one of them had
    evaluated_steps: Sequence[int]  # recorded, and in no figure: a model that learns was evaluated in them
    trace: str | None  # file of the timed trace
    full_trace: str | None  # file of the trace with shapes
    rank: int  # rank of the process
    world_size: int  # number of ranks
    local_rank: int | None  # rank among those of its host; None where nobody tells
    host: str  # name of the machine
    process: int  # number of the process on its host
    attempt: int  # which start of an elastic or requeued job this is, from 0
    stages: Sequence[int]  # stages of the pipeline that this rank holds, where they are known
    recorded_ranks: Sequence[int] | None  # ranks that were asked for; None for all
    window_begin_ns: int | None  # when recording began, since 1970 by the clock of the host; None: not known
    window_end_ns: int | None  # when it ended
    coordinates: Mapping[str, int]  # place in the device mesh, by dimension: dp, tp, pp ...
    device: str | None  # name of the device; None without one
    device_type: str  # cpu, cuda ...
    cpu_name: str  # name of the CPU, and the threads that ops use
    versions: Mapping[str, str | int]  # versions by name: torch, python, cuda ...
    environment: Mapping[str, str]  # variables that change how fast it runs, as OMP_NUM_THREADS; empty: not set
    float32_matmul_precision: str | None  # torch.get_float32_matmul_precision()
    prefix: str  # of the file names
    complete: bool  # False where recording was cut short
    warnings: Sequence[str]  # what is not as asked for, or not known
    layers: Sequence[Mapping[str, Any]]  # what is known of each layer of the model, in its order
    compiled: Mapping[str, Any]  # layers of compiled code, by its graphs
    cpu_frees_unsure: bool  # on a CPU, whether frees of what was there before may be missing
    frees_unseen: bool  # whether threads that were not recorded may have freed memory
    overloaded: bool  # whether a thread waited for a CPU core so long that times of the CPU are those of the machine
    peaks: Mapping[str, Any]  # what the device can do, as it was given
    optimizers: Sequence[Mapping[str, Any]]  # class and settings of each optimizer
    parameters: Mapping[str, Any]  # how many there are, of which types
    wrappers: Sequence[str]  # classes that wrap the model: DistributedDataParallel ...
    attention_implementation: str | None  # as the model is configured: sdpa, eager, flash_attention_2 ...
    attention_backends: Mapping[str, bool]  # backends of scaled-dot-product attention, and whether they are allowed
    free_memory_bytes: int | None  # what the machine still had for this process at the end
    process_group_backend: str | None  # nccl, gloo ...; None without a process group
    device_count: int | None  # devices that this process could use
    device_memory_bytes: int | None  # memory of the device
    compute_capability: Sequence[int] | None  # of the device: 9, 0
    tf32: Mapping[str, Any] | None  # whether products and convolutions of float32 may use TF32
    cudnn: Mapping[str, Any] | None  # its settings: benchmark, deterministic
    allocator_settings: str | None  # of the caching allocator, as the environment has them
    graph_breaks: Sequence[Mapping[str, Any]] | None  # where torch.compile broke its graph, and why


def check_run(run: Mapping[str, Any]) -> None:
    """Raise ValueError or msgspec's ValidationError, with the key, where a run is not what was written."""
    msgspec.convert({key: value for key, value in run.items() if value is not None}, Run)


# `held`: the tensors that the model and its optimizers own.
#
#     [{"time_ns": unix time, "tensors": {device: [[address, bytes, category, name], ...]}}, ...]
#
# in order of time: one entry when the recording begins, one before each step of an optimizer (gradients) and
# one after it (state, if that is other than before), one when it ends. Storages that several tensors share are
# listed once. What is not listed at one moment may be held all the same: only the first and the last entry list
# everything, and the first knows no optimizer that has made no step yet. What the list does not know it leaves
# out; it is empty where nothing is known.

_Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class HeldTensor(NamedTuple):
    """A storage that the model or an optimizer holds."""

    address: _Number  # where it begins
    size_bytes: _Number
    category: str  # params, grads, os_params, os_state
    name: str  # full name of the parameter or buffer; "exp_avg of <name>" for state; "master of <name>"


@dataclass(frozen=True, slots=True)
class Holding:
    """What was held at one moment."""

    time_ns: _Number  # unix time
    tensors: Mapping[str, tuple[HeldTensor, ...]]  # by device: "cpu", "cuda:0"


def read_holdings(held: object) -> tuple[Holding, ...]:
    """Return the holdings in a run's `held`, if there are any. Raises ValueError: it is not what was written."""
    try:
        return msgspec.convert(() if held is None else held, tuple[Holding, ...])
    except (msgspec.ValidationError, OverflowError) as error:
        raise ValueError(f"held: {error}") from error


def file_named(directory: Path, name: object) -> Path | None:
    """Return the file that a run's description names, packed since or not; None: it names none, or it is gone."""
    stem = Path(name).name.removesuffix(".gz") if isinstance(name, str) else ""
    return next((path for path in (directory / stem, directory / f"{stem}.gz") if path.is_file()), None)


def trace_beside(directory: Path, run: Mapping[str, Any]) -> Path | None:
    """Return the timed trace that a run's description names; None where it names none, or it is gone."""
    return file_named(directory, run.get("trace"))


def trace_with_shapes(trace: Path, run: Mapping[str, Any]) -> Path | None:
    """Return the trace with shapes that goes with the timed one; None where the run names none, or it is gone."""
    return file_named(trace.parent, run.get("full_trace")) if _is_timed_trace(trace, run) else None


def run_beside(trace: Path) -> dict[str, Any] | None:
    """Return the run.json in a trace's directory, with `held` only for the trace that it names; None without one.

    Raises BrokenTrace: it is not what was written.
    """
    path = trace.parent / RUN_FILE
    if not path.is_file():
        return None
    run = read_json(path)
    try:
        check_run(run)
        read_holdings(run.get("held"))
    except (ValueError, msgspec.ValidationError) as error:
        raise BrokenTrace(f"{path}: not what was written: {error}. Delete it, and the trace is read alone.") from error
    if not _is_timed_trace(trace, run):
        run.pop("held", None)
    return run


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds a JSON object. Raises BrokenTrace: it holds none."""
    try:
        data = json.loads(path.read_bytes(), parse_int=_whole_number)
    except (ValueError, RecursionError) as error:
        raise BrokenTrace(f"{path}: not JSON: {error}") from error
    if not isinstance(data, dict):
        raise BrokenTrace(f"{path}: a {type(data).__name__} where an object was expected")
    return data


def _whole_number(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _is_timed_trace(trace: Path, run: Mapping[str, Any]) -> bool:
    """Return whether the trace is the one that the run names; either may have been packed since."""
    return str(run.get("trace")).removesuffix(".gz") == trace.name.removesuffix(".gz")
