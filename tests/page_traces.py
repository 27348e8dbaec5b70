"""Recorded traces as their pages have them, with single events; each is read once in a process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from profiler_wrapper.result import ProfileResult, load_for_page
from profiler_wrapper.tables.timeline_columns import Timeline
from shared_traces import TRACES

QWEN, RESNET, V100, B200, TIMESFORMER, DDP = (
    "h100_qwen1.5_0.5b_inference.json.gz",
    "mi300_resnet_checkpointing_training.json.gz",
    "v100_ddp_resnet.pt.trace.json.gz",
    "b200_vllm_eager_inference.json.gz",
    "h100_timesformer_inference.json.gz",
    "ddp_training_with_memory.pt.trace.json.gz",
)


@cache
def with_events(name: str) -> ProfileResult:
    return load_for_page(TRACES / name)


def events_of(name: str) -> Timeline:
    made = with_events(name).timeline
    assert isinstance(made, Timeline)
    return made


def within(layer: str) -> Callable[[dict[str, Any]], bool]:
    """Whether a row of the events, or of their sums, is of the layer or of one in it."""
    return lambda row: row["layer"] == layer or str(row["layer"]).startswith(f"{layer}.")
