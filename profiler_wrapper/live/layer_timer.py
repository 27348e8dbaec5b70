"""`LayerTimer`: how long forward and backward of each block take, for loops that have no `TrainingMonitor`."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import nn

from profiler_wrapper.capture.optimizers import find_optimizers
from profiler_wrapper.capture.pipeline import find_stages
from profiler_wrapper.capture.switch import is_off
from profiler_wrapper.errors import WrongUse
from profiler_wrapper.live.device_events import Mark, StepClock, find_accelerator
from profiler_wrapper.live.layer_watch import LayerWatch
from profiler_wrapper.live.log import checked_place
from profiler_wrapper.notices import Notices


class LayerTimer:
    """Forward, backward and recompute of every block, and of what lies beside the blocks, in every step.

        with LayerTimer(model) as layers:
            for batch in batches:
                model(**batch).loss.backward(); optimizer.step(); optimizer.zero_grad()
                layers.step()

    Each is a span of `<run>/timers/timer_rank<k>.jsonl`, beside those of `Timer`: `layer` has the block's name in the
    plain model, `kind` is forward, backward or recompute, `parent` the part of the step that it lies in. The parts are
    spans, too: step, data, forward, backward, optimizer. Lines are written when the step has ended and the device has
    come there; nothing waits for it. The times are the CPU's, which are what counts without an accelerator, and with
    one those between events on the stream that the block was given to.

    No torch profiler is used, no module gets a hook, and gradients, random numbers and compiled code are what they are
    without this. A block's backward lasts from where the engine comes to what made its output to where it comes to
    what made its input. Where its inputs need no gradient it lasts until the graph ends. It is in two pieces, around
    the recompute, where its forward is computed again.

    What is not seen: modules in a model that is compiled as a whole, as no module is called there; a call of
    `model.forward()`; backward in compiled autograd.

    Waits for other ranks are spans of communication, and each span says how much of it they are (`waiting_ns`): where
    torch's Python code waits, as for FSDP's parameters and gradients, a tensor parallel sum or what another stage
    sends, and with DDP what is left of the backward behind the last block. The time on the device is without them.
    With an accelerator FSDP's wait for parameters is what is seen of it, not that for gradients. What waits in C++,
    such as collectives in compiled code, is part of the block that it lies in. See live/rank_waits.py.

    Where a span fails to be made there is one warning, and no more spans; `PROFILER_WRAPPER=off` turns this off.

    Args:
        model: as the loop calls it, wrappers included; of `torch.distributed.pipelining` the schedule or the stage.
        output_dir, run_name, prefix, rank, world_size, device_mesh, device: as `Timer` takes them.
        optimizer: only its steps are the optimizer's part of a step, where a loop has several.

    Raises:
        WrongUse: an argument has a value that means nothing.
    """

    def __init__(
        self,
        model: Any,
        output_dir: str | os.PathLike[str] = "outputs",
        *,
        optimizer: Any = None,
        run_name: str | None = None,
        prefix: str = "profile",
        rank: int | None = None,
        world_size: int | None = None,
        device_mesh: Any = None,
        device: Any = None,
    ) -> None:
        if not isinstance(model, nn.Module) and not find_stages(model):
            raise WrongUse(
                f"model is a {type(model).__name__}. Give a torch.nn.Module, or a pipeline's schedule or stage."
            )
        place = checked_place(
            output_dir=output_dir,
            run_name=run_name,
            prefix=prefix,
            rank=rank,
            world_size=world_size,
            device_mesh=device_mesh,
        )
        self._notices = Notices()
        self._pid = os.getpid()
        self._off = is_off()
        self._begun: tuple[int, Mark] | None = None
        self._next = 0
        if self._off:
            return
        accelerator = find_accelerator(device)
        self._clock = StepClock(accelerator)
        self._watch = LayerWatch(
            model,
            place,
            accelerator,
            self._notices,
            mark=self._clock.mark,
            on_failure=_weakly_failing(weakref.ref(self)),
            optimizers=find_optimizers(optimizer),
        )
        self._finish = weakref.finalize(self, _finish, self._watch, self._pid, self._notices)

    def start(self) -> None:
        """The first step begins. A step that was begun is none."""
        self._guarded("start()", lambda: self._begin(self._clock.mark()))

    def step(self, number: int | None = None) -> None:
        """A step ends, and the next one begins; without `start()` the first call only begins one.

        Args:
            number: of the step that ends; by default one more than the last, from 0.
        """
        self._guarded("step()", lambda: self._step(number))

    def dump(self) -> Path | None:
        """Write what the device has come to, and go on; the file with the lines of text, None: there is none yet."""
        path: Path | None = self._guarded("dump()", lambda: self._watch.flush())
        return path

    def close(self) -> None:
        """Write everything, and listen no more. A step that has not ended is left out."""
        if not self._off and os.getpid() == self._pid:
            self._off = True
            self._finish()

    def __enter__(self) -> LayerTimer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _begin(self, mark: Mark) -> None:
        self._watch.parts.start()
        self._watch.parts.begin_step(mark)
        self._watch.begin_step()
        self._begun = self._next, mark

    def _step(self, number: int | None) -> None:
        mark, begun = self._clock.mark(), self._begun
        if begun is not None:
            boundaries = self._watch.parts.end_step()
            found = self._watch.end_step()
            told = begun[0] if number is None else int(number)
            self._next = told + 1
            self._watch.add(told, begun[1], mark, boundaries, found)
        self._begin(mark)

    def _guarded(self, what: str, action: Any) -> Any:
        if self._off or os.getpid() != self._pid:
            return None
        try:
            return action()
        except Exception as error:
            self._failed(what, error)
            return None

    def _failed(self, what: str, error: Exception) -> None:
        if not self._off:
            self._notices.once(
                "failed",
                f"layers are timed no more, because {what} failed: {type(error).__name__}: {error}; training goes on",
            )
            self.close()


def _weakly_failing(timer: weakref.ref[LayerTimer]) -> Any:
    def fail(what: str, error: Exception) -> None:
        there = timer()
        if there is not None:
            there._failed(what, error)

    return fail


def _finish(watch: LayerWatch, pid: int, notices: Notices) -> None:
    if os.getpid() == pid:
        try:
            watch.close()
        except Exception as error:
            notices.once("closing", f"the times of layers could not be ended: {type(error).__name__}: {error}")
