"""Chrome trace -> Recording: any file that torch.profiler wrote, old or new, plain or gzipped."""

from __future__ import annotations

import os
from collections.abc import Callable

from profiler_wrapper.errors import BrokenTrace
from profiler_wrapper.recording.bytesource import Progress
from profiler_wrapper.recording.collector import Collector
from profiler_wrapper.recording.decoding import EventDecoder
from profiler_wrapper.recording.garbage import no_garbage_collection
from profiler_wrapper.recording.jsonstream import TraceWalker
from profiler_wrapper.recording.recording import Recording
from profiler_wrapper.recording.shapes import ShapeCollector, Shapes


def read(path: str | os.PathLike[str], *, progress: Progress | None = None) -> Recording:
    """Reads a trace in slices; a torn file up to the tear, with `complete=False` and a warning.

    `progress` is told how many bytes of the file have been read, of how many.

    Raises:
        BrokenTrace: the file is not a trace, or is malformed before its end; the message has the
            file, the byte offset and the cause.
        OSError: the file is missing, a directory or unreadable.
    """
    return _read(path, Collector(), EventDecoder(), None, progress)


def read_shapes(path: str | os.PathLike[str]) -> Shapes:
    """The input shapes of the ops of a trace, by a second pass over the file.

    Returns:
        A mapping from the index of a span in `read(path).spans` to its shapes. Spans without
        shapes are not in it.

    Raises:
        As `read`.
    """
    return read_with_shapes(path)[1]


def read_with_shapes(
    path: str | os.PathLike[str], wanted: Callable[[str], bool] | None = None, *, progress: Progress | None = None
) -> tuple[Recording, Shapes]:
    """What `read` gives and the shapes of its ops, in one pass; with `wanted`, of ops of these names.

    Raises:
        As `read`.
    """
    collector, shapes = Collector(), ShapeCollector(wanted)
    recording = _read(path, collector, EventDecoder(shapes=True), shapes, progress)
    return recording, shapes.shapes(collector.kept)


def _read(
    path: str | os.PathLike[str],
    collector: Collector,
    decoder: EventDecoder,
    shapes: ShapeCollector | None,
    progress: Progress | None,
) -> Recording:
    walker = TraceWalker(path, decoder, progress)
    decoder.metadata = walker.metadata
    with no_garbage_collection():
        for events in walker.batches():
            spans = collector.add(events)
            if collector.met_collectives:
                decoder.expect_collectives()
            if shapes is not None:
                shapes.add(spans)
            del events, spans  # before the next are decoded, so that those take their place
        if decoder.misfits and not collector.count:
            raise BrokenTrace(f"{path}: byte 0: none of its {decoder.misfits} entries is an event of a Chrome trace")
        warnings = list(walker.warnings)
        if decoder.misfits:
            warnings.append(f"{decoder.misfits} entries of traceEvents could not be understood and were left out")
        return collector.recording(
            path=os.fspath(path), metadata=walker.metadata, complete=walker.complete, warnings=warnings
        )
