"""Steps and rows as JSON, under the names of FlagScale's performance monitor and, where it has none, of our own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime
from typing import Any, cast

import msgspec

from profiler_wrapper.live.records import FlopsSource, StepRecord
from profiler_wrapper.live.rows import Row
from profiler_wrapper.live.session import Session
from profiler_wrapper.recording.monitor_steps import StepLine

GB = 1 << 30


def _plain(value: Any) -> Any:
    """What JSON does not know, such as numpy's numbers, as what it does."""
    return value.item() if hasattr(value, "item") else str(value)


encode = msgspec.json.Encoder(enc_hook=_plain).encode  # writes numbers that are not finite as null


def session_line(session: Session) -> bytes:
    """The first line of `perf_steps_<time>.jsonl`."""
    return encode({"session": session.to_dict()}) + b"\n"


def step_line(record: StepRecord) -> bytes:
    """The line of one step."""
    return encode(step_entry(record)) + b"\n"


def row_line(row: Row) -> bytes:
    """The line of one entry of `iteration_logs`."""
    return encode(row_entry(row)) + b"\n"


def step_entry(record: StepRecord) -> dict[str, Any]:
    """A step as it was. What is not known is None.

    Numbers that are not finite, which JSON does not have, are null in a file; `not_finite` then tells which they were.
    """
    step_time_s = record.step_time_s
    entry: dict[str, Any] = {
        "iteration": record.step,
        "timestamp": local_time(record.timestamp),
        "TFLOPS_per_GPU": record.tflops_per_gpu,
        "TFLOPS_total": record.tflops_total,
        "samples_per_sec": record.samples_per_s,
        "tokens_per_sec": record.tokens_per_s,
        "step_time_ms": _ms(step_time_s),
        "memory_GB": _gb(record.memory_bytes),
        "peak_memory_GB": _gb(record.peak_memory_bytes),
        "mfu": record.mfu,
        "hfu": record.hfu,
        "tokens": record.tokens,
        "samples": record.samples,
        "model_flops": record.model_flops,
        "hardware_flops": record.hardware_flops,
        "flops_source": record.flops_source,
        "flops_step": record.flops_step,
        "convention": record.convention,
        "breakdown_ms": _breakdown_ms(record.breakdown_s),
        "profiled": record.profiled,
        "epoch": record.epoch,
        "loss": record.loss,
        "grad_norm": record.grad_norm,
        "learning_rate": record.learning_rate,
    }
    odd = {
        name: str(value)
        for name in ("loss", "grad_norm", "learning_rate", "step_time_ms")
        if (value := entry[name]) is not None and not math.isfinite(value)
    }
    if odd:
        entry["not_finite"] = odd
    return entry


def row_entry(row: Row) -> dict[str, Any]:
    """As `step_entry` of the row's last step, with the row's means in the place of its times, work and rates."""
    return {
        **step_entry(row.record),
        "TFLOPS_per_GPU": row.tflops_per_gpu,
        "TFLOPS_total": row.tflops_total,
        "samples_per_sec": row.samples_per_s,
        "tokens_per_sec": row.tokens_per_s,
        "step_time_ms": _ms(row.step_time_s),
        "mfu": row.mfu,
        "hfu": row.hfu,
        "tokens": _whole_if_it_is(row.tokens),
        "samples": _whole_if_it_is(row.samples),
        "model_flops": row.model_flops,
        "hardware_flops": row.hardware_flops,
        "breakdown_ms": _breakdown_ms(row.breakdown_s),
        "steps": row.steps,
    }


def record_of(line: StepLine, *, world_size: int) -> StepRecord:
    """The step that a line of the log tells of."""
    step_time_s = None if line.step_time_ms is None else line.step_time_ms / 1e3
    return StepRecord(
        step=int(line.iteration),
        timestamp=_timestamp(line.timestamp),
        step_time_s=step_time_s,
        samples=_whole(line.samples),
        tokens=_whole(line.tokens),
        model_flops=line.model_flops,
        hardware_flops=line.hardware_flops,
        model_time_at_peak_s=_product(line.mfu, step_time_s),
        hardware_time_at_peak_s=_product(line.hfu, step_time_s),
        flops_source=cast("FlopsSource | None", line.flops_source),
        flops_step=line.flops_step,
        convention="causal" if line.convention == "causal" else "full",
        world_size=world_size,
        memory_bytes=_bytes(line.memory_GB),
        peak_memory_bytes=_bytes(line.peak_memory_GB),
        breakdown_s=None if line.breakdown_ms is None else {k: v / 1e3 for k, v in line.breakdown_ms.items()},
        profiled=line.profiled,
        epoch=_whole(line.epoch),
        loss=line.loss,
        grad_norm=line.grad_norm,
        learning_rate=line.learning_rate,
    )


def local_time(timestamp: float) -> str:
    """`2024-01-29T10:30:15.250`, as the text log has it."""
    return datetime.fromtimestamp(timestamp).isoformat(timespec="milliseconds")


def _timestamp(time: str | float | None) -> float:
    return datetime.fromisoformat(time).timestamp() if isinstance(time, str) else time or 0.0


def _whole_if_it_is(value: float | None) -> float | None:
    return int(value) if value is not None and value.is_integer() else value


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _ms(time_s: float | None) -> float | None:
    return None if time_s is None else round(time_s * 1e3, 6)


def _gb(size_bytes: int | None) -> float | None:
    return None if size_bytes is None else size_bytes / GB


def _bytes(size_gb: float | None) -> int | None:
    return None if size_gb is None else round(size_gb * GB)


def _product(share: float | None, time_s: float | None) -> float | None:
    return None if share is None or time_s is None else share * time_s


def _breakdown_ms(breakdown_s: Mapping[str, float] | None) -> dict[str, float] | None:
    if breakdown_s is None:
        return None
    return {name: round(time_s * 1e3, 6) for name, time_s in breakdown_s.items()}
