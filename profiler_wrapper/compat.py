"""The names that users of other tools have in their code, as thin adapters."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

from profiler_wrapper.capture.others import profiler_is_on
from profiler_wrapper.capture.session import Annotation
from profiler_wrapper.errors import WrongUse
from profiler_wrapper.notices import tell
from profiler_wrapper.recording.atomic import replacing
from profiler_wrapper.recording.marks import MEMORY_POINT
from profiler_wrapper.reports.write import REPORTS
from profiler_wrapper.result import ProfileResult
from profiler_wrapper.wrapper import ProfilerWrapper


class SimpleMemoryProfiler:
    """InternLM's memory profiler by its own calls: who holds memory, at the points that the loop names.

        memory = SimpleMemoryProfiler(model, optimizer, "memory_trace/rank0_dp0_tp0", total_steps=5)
        for batch in batches:
            loss = model(**batch).loss
            memory.point("after forward")
            loss.backward(); optimizer.step(); optimizer.zero_grad()
            memory.step()

    Recording begins here and ends with step number `total_steps`, or when the process ends before. Then
    `log_folder` has `memory.log` (a state at each point, and after each forward, backward and step of the
    optimizer; the layout at the peak) and the five sunburst pages.

    Args:
        model: whose parameters, gradients and activations are counted.
        optimizer: whose state is counted.
        log_folder: a directory, made where there is none; existing files of the same names are replaced.
        total_steps: how many steps are recorded.

    Raises:
        WrongUse: `total_steps` is not positive, or `model` holds no module. From then on nothing is raised: a
            failure of ours is one `ProfilerWrapperWarning`.
    """

    def __init__(
        self, model: object, optimizer: object, log_folder: str | os.PathLike[str], total_steps: int = 5
    ) -> None:
        if total_steps < 1:
            raise WrongUse(f"total_steps={total_steps!r}: give at least 1.")
        self.log_folder = Path(log_folder)
        self.result: ProfileResult | None = None
        self._steps_left = total_steps
        self._process = os.getpid()
        self._scratch = tempfile.mkdtemp(prefix="profiler_wrapper_")
        self._profiler = ProfilerWrapper(
            model,
            steps=f"0-{total_steps - 1}" if total_steps > 1 else "0",
            record_shapes=False,
            optimizer=optimizer,
            output_dir=self._scratch,
            files=(),
            enable_print_summary=False,
        )
        self._profiler.__enter__()
        atexit.register(self._finish)

    def point(self, tag: str = "", with_options: str = "", create: bool = False) -> None:
        """A state named `tag` is wanted here in memory.log.

        `with_options` and `create` are accepted and change nothing: the layout of every category is
        always written, once.
        """
        if self._steps_left and profiler_is_on():
            Annotation(f"{MEMORY_POINT}{tag or 'point'}").end()

    def step(self) -> None:
        """A step has ended; the last one writes the files. Later calls do nothing."""
        if not self._steps_left:
            return
        self._profiler.step()
        self._steps_left -= 1
        if not self._steps_left:
            self._finish()

    def _finish(self) -> None:
        atexit.unregister(self._finish)
        if os.getpid() != self._process:
            return  # a forked worker ends
        self._steps_left = 0
        self._profiler.__exit__(None, None, None)
        self.result = self._profiler.result
        shutil.rmtree(self._scratch, ignore_errors=True)
        if self.result is None:
            return  # ProfilerWrapper has said why
        if self.result.memory_use is None:
            tell(f"no memory.log was written: {'; '.join(self.result.warnings)}")
            return
        try:
            _write(self.result, self.log_folder)
        except Exception as error:
            tell(f"the files in {self.log_folder} could not be written: {type(error).__name__}: {error}")


def _write(result: ProfileResult, folder: Path) -> None:
    for name in ("memory_log", "sunbursts"):
        for file in REPORTS[name].files:
            with replacing(folder / Path(file.name).name) as beside:
                file.write(result, beside)
