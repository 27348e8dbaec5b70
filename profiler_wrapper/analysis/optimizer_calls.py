"""Where a recording says that an optimizer was called."""

from __future__ import annotations

from typing import Literal

import numpy as np

from profiler_wrapper.recording.columns import Category, Int64, Recording


def optimizer_calls(recording: Recording, method: Literal["step", "zero_grad"]) -> Int64:
    """The spans, on CPUs, of one method of any optimizer, in the order in which they begin."""
    spans = recording.spans
    names = [i for i, name in enumerate(recording.names) if name.startswith(f"Optimizer.{method}#")]
    calls = np.flatnonzero(np.isin(spans.name, names) & (spans.category <= Category.ANNOTATION))
    return calls[np.argsort(spans.start_ns[calls], kind="stable")]
