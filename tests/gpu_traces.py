"""What the recorded traces of GPUs hold: each is read and analysed once in a process, however many tests ask."""

from __future__ import annotations

import gzip
import json
from decimal import Decimal
from functools import cache, lru_cache
from typing import Any

import pytest

from profiler_wrapper import ProfileResult, load
from profiler_wrapper.place.placed import Placed
from profiler_wrapper.result import attribute_trace
from profiler_wrapper.trace.recording import Recording
from shared_traces import TRACE_NAMES, TRACES

LARGEST = "ddp_training_with_memory.pt.trace.json.gz"


def names_of_traces(*, largest: pytest.MarkDecorator) -> list[object]:
    """To parametrise with; the largest, which takes a second, with a mark."""
    return [pytest.param(name, marks=largest) if name == LARGEST else name for name in TRACE_NAMES]


@cache
def attributed_trace(name: str) -> Placed:
    """The recording with its layers and phases, and its shapes if it has any."""
    return attribute_trace(TRACES / name)


def recording(name: str) -> Recording:
    """As the reader gives it."""
    return attributed_trace(name).recording


@cache
def result(name: str) -> ProfileResult:
    """As `load` gives it."""
    return load(TRACES / name)


@lru_cache(maxsize=3)  # they are large; the cases of a file that ask for the same stand together
def events(name: str) -> list[dict[str, Any]]:
    """All events by the plain `json` module; times are floats."""
    return _read(name)


@lru_cache(maxsize=1)
def exact_events(name: str) -> list[dict[str, Any]]:
    """All events by the plain `json` module; times are decimals."""
    return _read(name, parse_float=Decimal)


def _read(name: str, **how: Any) -> list[dict[str, Any]]:
    with gzip.open(TRACES / name) as file:
        found: list[dict[str, Any]] = json.load(file, **how)["traceEvents"]
    return found
