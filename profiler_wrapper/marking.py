"""For those whose profiler is somebody else's: layer marks alone, and reports from their trace."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from profiler_wrapper import __version__
from profiler_wrapper.analysis.series import Track
from profiler_wrapper.capture.runinfo import run_info
from profiler_wrapper.capture.scopes import LayerScopes
from profiler_wrapper.capture.window import RecordedTrace, Window
from profiler_wrapper.finishing import Finisher
from profiler_wrapper.notices import tell
from profiler_wrapper.options import make_options

_marking: list[LayerMarking] = []  # attached, oldest first


class LayerMarking:
    """Layer marks on a model, until `remove()` or the end of its `with`."""

    def __init__(self, scopes: LayerScopes) -> None:
        self._scopes = scopes
        self._scopes.attach()
        for warning in self._scopes.warnings:
            tell(warning)
        _marking.append(self)

    def describe(self) -> Sequence[dict[str, Any]]:
        """The layers that were marked, as `run.json` lists them."""
        return self._scopes.describe()

    def describe_compiled(self) -> dict[str, Any]:
        """The compiled code that ran in them, as `run.json` has it."""
        return self._scopes.describe_compiled()

    def remove(self) -> None:
        """Take the marks away; a second call does nothing."""
        self._scopes.detach()
        if self in _marking:
            _marking.remove(self)

    def __enter__(self) -> LayerMarking:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
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
    return LayerMarking(LayerScopes(model, layers=layers))


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

    def on_trace_ready(profiler: Any) -> None:
        if options.off:
            return
        try:
            if not finisher:
                finisher.append(Finisher(options, run_info(version=__version__), _marked_layers, _compiled_code))
            _handle(profiler, finisher[0])
        except Exception as error:
            tell(f"the reports of this trace were not written: {type(error).__name__}: {error}")

    return on_trace_ready


def _marked_layers() -> list[dict[str, Any]]:
    return [layer for marking in _marking for layer in marking.describe()]


def _compiled_code() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for marking in _marking:
        for key, graph in marking.describe_compiled().items():
            if not isinstance(graph, str) or key not in found:
                found[key] = graph
    return found


def _handle(profiler: Any, finisher: Finisher) -> None:
    path = finisher.part_path(f"{finisher.windows}_theirs")
    profiler.export_chrome_trace(str(path))
    window = Window(timed=RecordedTrace(Path(path), None, bool(getattr(profiler, "record_shapes", False))))
    finisher.write(window)
