"""What was recorded, as files: one stretch of steps, and what has to be said of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from profiler_wrapper.recording.owned import Holding


@dataclass(frozen=True, slots=True)
class RecordedTrace:
    """One exported session."""

    path: Path
    steps: tuple[int, ...] | None  # those that were recorded from begin to end; None: the trace tells
    shapes: bool
    held: tuple[Holding, ...] = ()  # which memory the model and its optimizers held meanwhile
    # torch keeps the sizes of a CPU's blocks from one session to the next, and does not see what is freed in between:
    # a free of what this recording did not allocate may be of another block at the same address.
    cpu_frees_unsure: bool = False


@dataclass(slots=True)
class Window:
    """One stretch of recording: at most one trace in full and one timed."""

    full: RecordedTrace | None = None
    timed: RecordedTrace | None = None
    complete: bool = True
    begin_ns: int | None = None  # of the first session's recording, since 1970 by this machine's clock; None: unknown
    end_ns: int | None = None  # of the last one's
    warnings: list[str] = field(default_factory=list)
    why_full: str = "recording ended before a timed step did"  # where nothing was timed

    @property
    def empty(self) -> bool:
        """Nothing of it was recorded."""
        return self.full is None and self.timed is None

    def warn(self, message: str, *, incomplete: bool = False) -> None:
        """Keep a message for the result."""
        if message not in self.warnings:
            self.warnings.append(message)
        self.complete = self.complete and not incomplete
