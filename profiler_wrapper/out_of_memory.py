"""Answers an out-of-memory on stderr, from the exception and from what was recorded."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from profiler_wrapper.analysis.attributed import Attributed
from profiler_wrapper.analysis.attribution import NO_LAYER
from profiler_wrapper.analysis.failure import FailedOp, failed_op
from profiler_wrapper.analysis.memory_model import MemoryUse
from profiler_wrapper.capture.out_of_memory import OutOfMemory
from profiler_wrapper.notices import say
from profiler_wrapper.recording.reader import read_shapes
from profiler_wrapper.recording.shapes import OpShapes
from profiler_wrapper.reports.out_of_memory import ShapeOf, out_of_memory_text
from profiler_wrapper.result import ProfileResult

_MOST_INPUTS = 3


def answer(
    failure: OutOfMemory,
    result: ProfileResult | None,
    *,
    found: Attributed | None = None,
    trace: Path | None = None,
    directory: Path | None = None,
) -> None:
    """Say who holds the memory and what would help.

    Args:
        result: of the recording that the failure ended, or of an earlier one; None without one.
        found, trace: of the recording that the failure ended; `trace` if it has shapes.
        directory: where the files are.
    """
    failed_in = failed_op(found) if found is not None else None
    text = out_of_memory_text(
        device=failure.device,
        requested_bytes=failure.requested_bytes,
        allocated_bytes=failure.allocated_bytes,
        reserved_bytes=failure.reserved_bytes,
        free_bytes=_free_then(failure, result if found is not None else None),
        where=_where(failed_in),
        use=_use_of(failure.device, result),
        shape_of=_shapes(found, trace) if found is not None and trace is not None else lambda op, layer: "",
        failed_in_recording=found is not None,
        files=str(directory) if directory is not None else "",
    )
    say(f"{text}\n", on="stderr")


def _use_of(device: str, result: ProfileResult | None) -> MemoryUse | None:
    """What was recorded of the memory of this very device."""
    use = result.memory_use if result is not None else None
    if use is None or device in (use.device, use.device.partition(":")[0]):
        return use
    return use if device == "an accelerator" and use.device != "cpu" else None


def _free_then(failure: OutOfMemory, result: ProfileResult | None) -> int | None:
    """On a CPU what is free is known for now only: less what the exception let go of on its way."""
    use = result.memory_use if result is not None else None
    if failure.device != "cpu" or failure.free_bytes is None or use is None or use.device != "cpu":
        return failure.free_bytes
    let_go_bytes = use.last.total_bytes - int(use.timeline.total_bytes[-1])
    return max(0, failure.free_bytes - max(0, let_go_bytes))


def _where(failed_in: FailedOp | None) -> str:
    if failed_in is None:
        return ""
    step = "" if failed_in.step is None else f", step {failed_in.step}"
    return f"{failed_in.op} of {failed_in.layer or 'code outside of layers'} ({failed_in.phase}{step})"


def _shapes(found: Attributed, trace: Path) -> ShapeOf:
    """The inputs of the last call of an op in a layer, as text; "" where they were not recorded."""
    shapes = read_shapes(trace)
    spans, tree, attribution = found.recording.spans, found.tree, found.attribution
    numbers = {name: i for i, name in enumerate(found.recording.names)}
    layers = tree.by_name()

    def shape_of(op: str, layer: str) -> str:
        wanted = layers.get(layer, NO_LAYER)
        places = [i for i, place in enumerate(attribution.places) if place.layer == wanted]
        chosen = (spans.name == numbers.get(op, -1)) & np.isin(attribution.place_of, places)
        calls = [span for span in np.flatnonzero(chosen).tolist() if span in shapes]
        return _inputs(shapes[calls[-1]]) if calls else ""

    return shape_of


def _inputs(shapes: OpShapes) -> str:
    """`[4096, 512] x [512, 32000]`."""
    tensors = [dims for dims in shapes.dims if dims and all(isinstance(size, int) for size in dims)]
    return " x ".join(str(list(dims)) for dims in tensors[:_MOST_INPUTS])
