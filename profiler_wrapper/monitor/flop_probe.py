"""Measures the FLOPs of real steps with the profiler, now and then. Runs nothing of its own, and asks no other rank."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from profiler_wrapper.capture.growth import GrowthBound
from profiler_wrapper.capture.scopes import LayerScopes, RootCall
from profiler_wrapper.capture.session import Session, machine_activities
from profiler_wrapper.capture.steps import MOST_EVALUATIONS
from profiler_wrapper.capture.torch_state import Watch, compilations, in_backward, recorder_is_taken
from profiler_wrapper.child import start_child
from profiler_wrapper.errors import Notices
from profiler_wrapper.monitor.work import PROGRAM, Measurement, error_text
from profiler_wrapper.tables.work.roofline import StepWork


class Counting:
    """The counting of one trace in a process of its own; in the end the trace is deleted with its directory.

    `run`: what is known of its layers and compiled code, as plain data. Raises OSError: no process could be started.
    """

    def __init__(self, trace: Path, run: Mapping[str, Any]) -> None:
        self._directory = trace.parent
        known = trace.with_name("run.json")
        known.write_text(json.dumps(run), encoding="utf-8")
        self._process: subprocess.Popen[str] = start_child(
            PROGRAM,
            str(trace),
            str(known),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # Ctrl-C is for the training
        )

    def wait(self, most_s: float) -> bool:
        """Whether it is done within so long."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(most_s)
        return self._process.poll() is not None

    def result(self) -> StepWork | None:
        """The work of the step, once; None while it is not known. Raises ValueError: it could not be counted."""
        if self._process.poll() is None:
            return None
        answer = ""
        with contextlib.suppress(subprocess.TimeoutExpired):  # a process of its own may still hold the pipe
            answer, _ = self._process.communicate(timeout=_ANSWER_S)
        self.cancel()
        if self._process.returncode == 0:
            with contextlib.suppress(msgspec.MsgspecError):
                return msgspec.json.decode(answer, type=StepWork)
        raise ValueError(answer.strip() or "the process that counts gave no answer")

    def cancel(self) -> None:
        """Leave it; a second call does nothing."""
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        shutil.rmtree(self._directory, ignore_errors=True)


_ANSWER_S = 1.0  # that a process which has ended gives its answer in
DEFAULT_FREQUENCY = 500
FIRST_WAIT_S = 10.0  # for the first measurement, so that the FLOPs are known from the first step on
COUNTING_MOST_S = 600.0  # for one measurement: then the process that counts it is given up
_MOST_COMPILING_STEPS = 10


class FlopProbe:
    """Records a step of every `frequency` (0: none; None: 500 where nothing else tells the FLOPs) and has it counted.

    A recorded step costs what torch's profiler costs, and at its end the time to write the trace. It is counted in
    another process; only the first measurement is waited for, for a bounded time.
    """

    def __init__(self, frequency: int | None, notices: Notices) -> None:
        self._frequency, self._notices = frequency, notices
        self._session: Session | None = None
        self._step = 0
        self._watch: Watch | None = None
        self._scopes: LayerScopes | None = None
        self._counting: Counting | None = None
        self._counting_since_s = 0.0
        self._counted_step: int | None = None
        self._again = True  # the next step is to be measured
        self._left = False  # the recording's step has ended, and the recording not
        self._compilations = self._compiling_steps = self._evaluations = 0
        self._calls: dict[str, set[bool]] = {}  # of the step's roots: whether with gradients; False: evaluating
        self._pid = os.getpid()
        self._thread = 0  # same (0 -> 1): filled before it is read
        self._bound = GrowthBound()

    def wants(self, step: int, *, otherwise_known: bool) -> bool:
        """Whether that step is to be measured: the same on all ranks, as only its number counts and what is given.

        `otherwise_known`: something else tells the FLOPs.
        """
        if not self.measures(otherwise_known):
            return False
        return self._again or step % (self._frequency or DEFAULT_FREQUENCY) == 0

    def measures(self, otherwise_known: bool) -> bool:
        """Whether it measures any step."""
        return self._frequency != 0 and not (self._frequency is None and otherwise_known)

    def begin(self, step: int) -> bool:
        """Begin to record; False where that cannot be, which is said once."""
        self.cancel()
        if self._session is not None or self._counting is not None:
            return False  # the one before still runs on another thread, or is still counted
        if recorder_is_taken():
            self._notices.warn_once(
                "another profiler",
                "the FLOPs of a step were not measured, because another torch profiler is on and torch runs one at a "
                "time; the next ones are tried again",
            )
            return False
        self._again, self._left, self._step = False, False, step
        self._compilations, self._thread, self._calls = compilations(), threading.get_ident(), {}
        session = Session(
            activities=machine_activities(),
            record_shapes=True,
            profile_memory=False,  # same: recorded, and not counted
            give_way=self._give_way,
        )
        try:
            session.start()
            self._session = session
            atexit.register(self._at_exit)
            session.begin_step(step)
            self._bound.restart()
            self._scopes = LayerScopes(None, on_root_enter=self._root_enters)  # tells a forward from a recomputed one
            self._scopes.attach()
            self._watch = Watch(is_another=session.is_taken_by, before_another=self._give_way)
            self._watch.install()
        except Exception as error:
            self._failed(error)
            self.cancel()
        return self._session is not None

    def end(self) -> None:
        """The step has ended: write what was recorded, and have it counted."""
        self._end(self._have_counted)

    def cancel(self) -> None:
        """End a recording without counting it."""
        self._end(lambda session, scopes: None)

    def _end(self, then: Callable[[Session, LayerScopes | None], None]) -> None:
        if self._cannot_end_here():
            return
        session, self._session = self._session, None
        watch, self._watch = self._watch, None
        scopes, self._scopes = self._scopes, None
        if scopes is not None:
            scopes.detach()
        if watch is not None:
            watch.remove()
        if session is None:
            return
        try:
            session.stop()
            then(session, scopes)
        except Exception as error:
            self._failed(error)
        finally:
            atexit.unregister(self._at_exit)
            session.close()

    def _have_counted(self, session: Session, scopes: LayerScopes | None) -> None:
        # A step in which something was compiled is no usual one: the next is measured in its place.
        self._again = compilations() != self._compilations and self._compiling_steps < _MOST_COMPILING_STEPS
        self._compiling_steps += self._again
        # Nor is one in which a model that learns was evaluated, unless the loop does so in every step.
        trained, evaluated = ({root for root, modes in self._calls.items() if mode in modes} for mode in (True, False))
        self._evaluations = self._evaluations + 1 if evaluated & trained or (evaluated and not trained) else 0
        self._again |= 0 < self._evaluations <= MOST_EVALUATIONS
        if self._again:
            return
        if session.problem is not None:
            raise RuntimeError(session.problem)
        trace = Path(tempfile.mkdtemp(prefix="profiler_wrapper_step_")) / "trace.json"
        try:
            session.export(trace)
            # Compiled code says by its layers what it computes again.
            run = {} if scopes is None else {"layers": scopes.describe(), "compiled": scopes.describe_compiled()}
            self._counting, self._counting_since_s = Counting(trace, run), time.monotonic()
        except BaseException:
            shutil.rmtree(trace.parent, ignore_errors=True)
            raise
        first, self._counted_step = self._counted_step is None, self._step
        if first and not self._counting.wait(FIRST_WAIT_S):
            self._notices.warn_once(
                "counting",
                f"the FLOPs of step {self._step} were not counted within {FIRST_WAIT_S:g} s; steps have no "
                "measured FLOPs until they are",
            )

    def finished(self) -> Measurement | None:
        """The measurement, once, as soon as it is there."""
        counting, step = self._counting, self._counted_step
        if counting is None or step is None:
            return None
        try:
            work = counting.result()
            if work is not None:
                self._counting = None
                return Measurement(step, work)
            if time.monotonic() - self._counting_since_s > COUNTING_MOST_S:
                counting.cancel()
                raise TimeoutError(f"counting them took more than {COUNTING_MOST_S:g} s")
        except Exception as error:
            self._counting = None
            self._failed(error)
        return None

    def close(self) -> None:
        """Leave whatever is under way."""
        if os.getpid() != self._pid:
            return
        self.cancel()
        counting, self._counting = self._counting, None
        if counting is not None:
            counting.cancel()

    def _at_exit(self) -> None:
        """No recording may be on when the process ends: that crashes it."""
        if self._session is None or os.getpid() != self._pid:
            return
        if threading.get_ident() == self._thread:
            self.cancel()
            return
        with contextlib.suppress(Exception):  # nobody reads it any more
            torch.autograd._disable_profiler()  # type: ignore[attr-defined]

    def _cannot_end_here(self) -> bool:
        """On another thread, or inside of backward; it is ended as soon as a module is called where it began."""
        if self._session is None or (threading.get_ident() == self._thread and not in_backward()):
            return False
        self._left = True
        self._notices.warn_once(
            "thread",
            f"the FLOPs of step {self._step} were not measured, because it ended on another thread than it began on, "
            "or inside of backward",
        )
        return True

    def _give_way(self) -> None:
        self.cancel()
        self._again = True
        self._notices.warn_once(
            "gave way",
            "the FLOPs of a step were not measured, because another torch profiler began within it; the next ones are "
            "tried again",
        )

    def _root_enters(self, call: RootCall) -> None:
        """Ends a recording that grows too large, as that of a step without end."""
        if self._session is None or threading.get_ident() != self._thread or os.getpid() != self._pid:
            return
        if call.grad_enabled or not (call.training or call.in_request):
            self._calls.setdefault(call.label, set()).add(call.grad_enabled)
        too_much = self._bound.exceeded()
        if self._left:
            self.cancel()
        elif too_much is not None:
            self.cancel()
            self._notices.warn_once("growth", f"the FLOPs of step {self._step} were not measured, because {too_much}")

    def _failed(self, error: Exception) -> None:
        self._notices.warn_once("probe", f"the FLOPs of step {self._step} could not be measured: {error_text(error)}")
