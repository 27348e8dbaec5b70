"""What run.json says of a recorded window, and which of its traces are reported."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from profiler_wrapper.capture.graph_breaks import graph_breaks
from profiler_wrapper.capture.rank import RunInfo
from profiler_wrapper.capture.window import RecordedTrace, Window
from profiler_wrapper.options import Options
from profiler_wrapper.recording.owned import holdings_to_list

Describe = Callable[[], Sequence[dict[str, Any]]]


class RunRecord:
    """Describes the windows of one process.

    Args:
        options, info: of the run.
        describe, describe_compiled, describe_settings: tell of the layers, of compiled code, of how the run is set up.
    """

    def __init__(
        self,
        options: Options,
        info: RunInfo,
        describe: Describe,
        describe_compiled: Callable[[], dict[str, Any]],
        describe_settings: Callable[[], dict[str, Any]],
    ) -> None:
        self._options, self._info, self._describe = options, info, describe
        self._describe_compiled, self._describe_settings = describe_compiled, describe_settings

    def begun(self, *, local_dir: str | None, begin_ns: int) -> dict[str, Any]:
        """While a window is recorded, and of one that never came to its end."""
        return {**self._of_ranks(begin_ns, None), "local_dir": local_dir, "prefix": self._options.prefix}

    def of_window(
        self, window: Window, main: RecordedTrace, full: RecordedTrace | None, notes: list[str]
    ) -> dict[str, Any]:
        """Of one that has ended; `notes` get what could not be found out."""
        steps = {} if main.steps is None else {"timed_steps": list(main.steps), "full_steps": _full_steps(main, full)}
        return {
            **self._of_ranks(window.begin_ns, window.end_ns),
            **_attempt("how the run is set up is not known", self._describe_settings, notes, {}),
            "prefix": self._options.prefix,
            **steps,
            "complete": window.complete,
            "warnings": notes,
            "layers": list(self._describe()),
            "compiled": _attempt("the layers inside compiled code have no rows", self._describe_compiled, notes, {}),
            "held": holdings_to_list(main.held),
            "graph_breaks": _attempt("graph breaks are not available", graph_breaks, notes, None),
            "cpu_frees_unsure": main.cpu_frees_unsure,
        }

    def _of_ranks(self, begin_ns: int | None, end_ns: int | None) -> dict[str, Any]:
        """What a reader of all ranks goes by."""
        ranks = self._options.ranks
        return {
            **self._info.to_dict(),
            "recorded_ranks": None if ranks is None else sorted(rank for rank in ranks if rank < self._info.world_size),
            "window_begin_ns": begin_ns,
            "window_end_ns": end_ns,
        }


def _attempt(otherwise: str, ask: Callable[[], Any], notes: list[str], nothing: Any) -> Any:
    try:
        return ask()
    except Exception as error:
        notes.append(f"{otherwise}, because {type(error).__name__}: {error}")
        return nothing


def choose(window: Window) -> tuple[RecordedTrace | None, RecordedTrace | None]:
    """The trace whose times are reported, and beside it the one in full, if that says more."""
    timed, full = window.timed, window.full
    if timed is None or (not timed.steps and full is not None and full.steps):
        return full, None
    return timed, full if full is not None and full.shapes and not timed.shapes else None


def _full_steps(main: RecordedTrace, full: RecordedTrace | None) -> list[int]:
    """Steps whose shapes were recorded."""
    if full is not None:
        return list(full.steps or ())
    return list(main.steps or ()) if main.shapes else []


def notes_of(window: Window, main: RecordedTrace) -> Iterator[str]:
    """What the result of a window has to say."""
    yield from window.warnings
    if main is window.full:
        cost = " with shapes (about +10 % where launch-bound)" if main.shapes else ""
        yield f"times are of warm-up steps{cost}: {window.why_full}"
    if main.steps == () and not window.warnings:
        yield "no step was recorded from its begin to its end"
