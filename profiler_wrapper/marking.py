"""For those whose profiler is somebody else's: layer marks alone, and reports from their trace."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from profiler_wrapper import __version__
from profiler_wrapper.capture.layers import find_stages
from profiler_wrapper.capture.owned_tensors import OwnedTensors
from profiler_wrapper.capture.records import RecordedTrace, RunInfo, Window
from profiler_wrapper.capture.runinfo import is_in_pipeline, run_info
from profiler_wrapper.capture.scopes import LayerScopes, RootCall
from profiler_wrapper.capture.torch_state import OptimizerSteps, profiler_is_on, records_here
from profiler_wrapper.errors import in_a_line, warn
from profiler_wrapper.run.finishing import Finisher
from profiler_wrapper.run.options import make_options
from profiler_wrapper.tables.time_rows import Track
from profiler_wrapper.trace.run_file import Holding

_marking: list[LayerMarking] = []  # attached, oldest first


class LayerMarking:
    """Layer marks on a model, until `remove()` or the end of its `with`."""

    def __init__(self, model: object | None, layers: Any) -> None:
        self.stages = find_stages(model)
        self.scopes = LayerScopes(
            model, layers=layers, in_pipeline=is_in_pipeline(model, None, None), on_root_enter=_held.root_enters
        )
        self.scopes.attach()
        for warning in self.scopes.warnings:
            warn(warning)
        _marking.append(self)

    def remove(self) -> None:
        """Take the marks away; a second call does nothing."""
        self.scopes.detach()
        if self in _marking:
            _marking.remove(self)
        if not _marking:
            _held.forget()

    def __enter__(self) -> LayerMarking:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def mark(model: object | None = None, *, layers: Any = "auto") -> LayerMarking:
    """Mark the layers of `model` in whatever torch profiler records.

        pw.mark(model)                  # from now on
        with pw.mark(model): ...        # in a block

    Args:
        model: a module, several in a list or dict, a pipeline; None: the outermost modules called.
        layers: which modules: `"auto"`, a depth, or name patterns.

    Raises:
        WrongUse: `model` holds no module, or `layers` selects nothing that can be.
    """
    return LayerMarking(model, layers)


class _Held:
    """What the marked models and their optimizers hold while somebody's profiler records, for a `trace_handler`.

    Nobody says when that profiler begins: the first call of a marked model that it records comes soon after.
    """

    def __init__(self) -> None:
        self.wanted = False  # there is a handler
        self._memory = OwnedTensors(lambda: [root for marking in _marking for root in marking.scopes.roots()])
        self._thread: int | None = None  # whose profiler records, since the first such call; None: none does
        self._steps: OptimizerSteps | None = None

    def root_enters(self, call: RootCall) -> None:
        """A marked model is about to be called."""
        if not self.wanted or self._thread not in (None, threading.get_ident()):
            return
        records = profiler_is_on() and not records_here()
        if records and self._thread is None:
            self._thread = threading.get_ident()
            self._memory.begin()
            self._steps = OptimizerSteps(before=self._memory.before_step, after=self._memory.after_step)
        elif not records:
            self.forget()  # it has ended, and no handler of ours was called

    def end(self) -> tuple[Holding, ...]:
        """What was held since the profiler began, which has just ended."""
        held = self._memory.end() if self._thread == threading.get_ident() else ()
        self.forget()
        return held

    def forget(self) -> None:
        """Nobody asks what was held."""
        self._thread = None
        self._memory.forget()
        if self._steps is not None:
            self._steps.remove()


_held = _Held()


def trace_handler(
    output_dir: str | os.PathLike[str] = "outputs",
    *,
    prefix: str | None = None,
    run_name: str | None = None,
    track: Track | Sequence[Track] = (),
    files: str | Iterable[str] = "auto",
    trace: Literal["json", "json.gz"] | bool | None = None,
    print_summary: bool = True,
) -> Callable[[Any], None]:
    """What `torch.profiler.profile(on_trace_ready=...)` takes in the place of `tensorboard_trace_handler`.

    Exports the trace of each cycle and writes our reports beside it. It never raises: an exception
    there would replace the user's own.

    Args:
        output_dir: where run directories are made.
        prefix: what file names begin with; None: `profile`.
        run_name: name of the run's directory; the same on all ranks.
        track: names, regular expressions or functions to follow as series, as of `ProfilerWrapper`.
        files: which files, as of `ProfilerWrapper`.
        trace: `"json"`, `"json.gz"` or False; None: plain, gzipped past 8 ranks.
        print_summary: print the layer table of each cycle.

    Raises:
        WrongUse: an argument means nothing here.
    """
    options = make_options(
        output_dir=output_dir,
        prefix=prefix,
        run_name=run_name,
        track=track,
        files=files,
        trace=trace,
        enable_print_summary=print_summary,
    ).with_absolute_paths()
    finisher: list[Finisher] = []
    steps = _RecordedSteps()
    _held.wanted = not options.off

    def on_trace_ready(profiler: Any) -> None:
        if options.off:
            return
        try:
            if not finisher:
                finisher.append(Finisher(options, _run_info(), _marked_layers, _compiled_code))
            _handle(profiler, finisher[0], steps)
        except Exception as error:
            warn(f"the reports of this trace were not written: {in_a_line(error)}")

    return on_trace_ready


def _run_info() -> RunInfo:
    """Of this process; the marked models tell its place in the device mesh and in a pipeline."""
    return run_info(
        modules=[root.module for marking in _marking for root in marking.scopes.roots()],
        stages=[stage for marking in _marking for stage in marking.stages],
        version=__version__,
    )


def _marked_layers() -> list[dict[str, Any]]:
    return [layer for marking in _marking for layer in marking.scopes.describe()]


def _compiled_code() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for marking in _marking:
        for key, graph in marking.scopes.describe_compiled().items():
            if not isinstance(graph, str) or key not in found:
                found[key] = graph
    return found


def _handle(profiler: Any, finisher: Finisher, steps: _RecordedSteps) -> None:
    held = _held.end()
    path = finisher.place.part_path(f"{finisher.windows}_theirs")
    profiler.export_chrome_trace(str(path))
    trace = RecordedTrace(
        path,
        steps.of(profiler),
        shapes=bool(getattr(profiler, "record_shapes", False)),
        held=held,
        cpu_frees_unsure=finisher.windows > 0,
    )
    # No rank waits for another's reports.
    finisher.write(Window(timed=trace), loop_goes_on=finisher.info.world_size > 1)


class _RecordedSteps:
    """Which steps a torch profiler has just recorded, by its schedule."""

    def __init__(self) -> None:
        self._profiler: Callable[[], object] = lambda: None
        self._end = 0  # of its last cycle: the step after it

    def of(self, profiler: Any) -> tuple[int, ...] | None:
        """None where it has no schedule, and so names no step."""
        if not getattr(profiler, "record_steps", False):
            return None

        def action(step: int) -> str:
            return str(getattr(profiler.schedule(step), "name", ""))

        if self._profiler() is not profiler:
            self._profiler, self._end = weakref.ref(profiler), 0
        end = int(profiler.step_num)
        if end <= self._end or action(end - 1) != "RECORD_AND_SAVE":
            end += 1  # it was stopped within a step
        begin = end - 1
        while begin > self._end and action(begin - 1) == "RECORD":
            begin -= 1
        self._end = end
        return tuple(range(begin, end))
