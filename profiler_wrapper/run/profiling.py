"""One `ProfilerWrapper` at work: enters and leaves the block, records, finishes. Its failures are warnings."""

from __future__ import annotations

import atexit
from collections.abc import Callable

from torch import nn

from profiler_wrapper import __version__
from profiler_wrapper.capture.layers import find_stages
from profiler_wrapper.capture.owned_tensors import OwnedTensors, find_optimizers, may_come
from profiler_wrapper.capture.records import OutOfMemory, out_of_memory
from profiler_wrapper.capture.runinfo import is_in_pipeline, run_info, run_settings
from profiler_wrapper.capture.scopes import LayerScopes, is_part
from profiler_wrapper.capture.session import Annotation
from profiler_wrapper.capture.steps import OpenPlan, Plan, StepCounter, StepSource
from profiler_wrapper.capture.torch_state import (
    free_recorder,
    in_backward,
    profiler_is_on,
    records_elsewhere,
    records_here,
)
from profiler_wrapper.errors import Notices, in_a_line, warn
from profiler_wrapper.run.finishing import Finisher
from profiler_wrapper.run.options import Options
from profiler_wrapper.run.recorder import Recorder

_FEW_CALLS = 2  # of parts of a model in one turn of a loop over layers: a spatial and a temporal block


class Profiling:
    """What stands behind one `ProfilerWrapper`. Raises WrongUse: model, layers or optimizer mean nothing."""

    def __init__(self, model: object | None, options: Options, *, optimizer: object | None = None) -> None:
        self.finisher: Finisher | None = None
        self._model, self._options = model, options
        self._stages = find_stages(model)
        self._scopes = LayerScopes(
            model,
            layers=options.layers,
            in_pipeline=is_in_pipeline(model, options.device_mesh, options.coordinates),
        )
        for warning in self._scopes.warnings:
            warn(warning)
        self._owned_tensors = OwnedTensors(self._scopes.roots, find_optimizers(optimizer))
        self._recorder: Recorder | None = None
        self._only_marks = False
        self._notices = Notices()
        self._depth = 0
        self._entries = 0
        self._held = False  # the recording goes on though the block was left
        self._stopped = False  # not just left

    # -- the block --------------------------------------------------------------------------------

    def enter(self, called: nn.Module | None = None, *, anew: bool = False) -> None:
        """The block begins; within itself it changes nothing.

        Args:
            called: a module that is about to be called in it.
            anew: as if for the first time where an earlier recording has ended: by the same plan.
        """
        recorder = self._recorder
        if self._depth == 0 and recorder is not None:
            if recorder.is_ending:
                self.finish()
            if recorder.over and not self._held and (anew or self._stopped):
                self._recorder, self._entries = None, 0
        self._stopped = False
        if called is not None:
            self._safely("starting", lambda: self._scopes.expect(called))
        self._depth += 1
        if self._depth == 1:
            self._safely("starting", self._enter)

    def exit(self, error: BaseException | None) -> None:
        """The block ends, by `error` if there is one."""
        if self._depth == 0:
            return
        self._depth -= 1
        if self._depth == 0:
            self._safely("finishing", lambda: self._exit(error), in_the_way_of=error)
            if self._entries and not self._held:
                self._let_models_go()

    def stop(self) -> None:
        """The block ends for good: entered again, it begins anew."""
        self.exit(None)
        self.report()
        self._stopped = True

    def step(self) -> None:
        """The user says that a step has ended."""
        recorder = self._recorder
        if recorder is None:
            return
        state = recorder.state
        anew = state.over_as_planned and recorder.on_owner_thread and state.counter.source != "prof.step()"
        if anew and not in_backward():
            # What was recorded were steps of another kind.
            counter = self._counter(first=1, source="prof.step()")
            self._safely("starting", lambda: self._begin(self._options.plan(), counter))
        else:
            recorder.user_step()

    def enter_named(self, name: str) -> Annotation:
        """A named block begins."""
        block = Annotation(name, lambda name: self.finisher.follow(name) if self.finisher is not None else None)
        recorder = self._recorder
        if recorder is not None and recorder.on_owner_thread and not recorder.over:
            recorder.sessions.enter_named(block)
        elif profiler_is_on():
            block.begin()
        return block

    def leave_named(self, block: Annotation) -> None:
        """It has ended."""
        if self._recorder is not None:
            self._recorder.sessions.leave_named(block)
        block.end()  # which may be none of this recorder's

    @property
    def is_elsewhere(self) -> bool:
        """What is recorded, or will be, runs on another thread than this."""
        recorder = self._recorder
        return recorder is not None and not (recorder.over or recorder.on_owner_thread)

    def finish(self) -> None:
        """End recording and write the files."""
        self._safely("finishing", self._finish)

    def report(self) -> None:
        """Write what has been recorded; ends a recording that goes on outside of its block."""
        if self._held and self._depth == 0:
            self.finish()
        self._safely("writing the reports of", self._report)

    def _enter(self) -> None:
        recorder = self._recorder if self._held else None
        goes_on = recorder is not None and not recorder.over
        if in_backward() and not goes_on:
            return  # a recomputation; the engine would take away a session that began here
        entry = self._entries
        self._entries += 1
        if not self._takes_part():
            return
        if recorder is not None and goes_on:
            recorder.enter(entry)
        elif not free_recorder():
            self._mark_only()
        elif entry == 0:
            self._begin(self._options.plan(), self._counter())
        else:
            self._finish()
            first = self._recorder.state.counter.ended if self._recorder is not None else 0
            self._begin(OpenPlan(entered_again=True), self._counter(first=first))
            self._held = True

    def _exit(self, error: BaseException | None) -> None:
        if self._only_marks:
            self._only_marks = False
            self._scopes.detach()
        recorder = self._recorder
        if recorder is None:
            self._report()
            return
        recorder.sessions.end_scope("block")
        # The engine would bring back a session that ended in backward, so it goes on until it can end.
        inside, kind = in_backward(), type(error).__name__
        if error is not None and not (inside and kind == "_StopRecomputationError"):  # how checkpointing ends early
            recorder.note(f"the block was left by {kind}", incomplete=True)
        goes_on = self._held and not (recorder.over or recorder.is_ending)
        if inside or (error is None and (goes_on or self._may_be_entered_again(recorder))):
            if not self._held and not recorder.over:
                recorder.state.held_open()
                self._held = True
            return
        failure, while_recording = out_of_memory(error), not recorder.over
        try:
            self._finish(failure=failure if while_recording else None)
        finally:
            if failure is not None and self.finisher is not None:
                self.finisher.explain_oom(failure)

    def _takes_part(self) -> bool:
        ranks = self._options.ranks
        if self._options.off:
            return False
        if self.finisher is None:
            info = run_info(
                modules=[root.module for root in self._scopes.roots()],
                rank=self._options.rank,
                device_mesh=self._options.device_mesh,
                coordinates=self._options.coordinates,
                stages=self._stages,
                version=__version__,
            )
            self.finisher = Finisher(
                self._options.with_absolute_paths(),
                info,
                self._scopes.describe,
                self._scopes.describe_compiled,
                describe_settings=lambda: run_settings(
                    [root.module for root in self._scopes.roots()], self._owned_tensors.optimizers()
                ),
            )
            if ranks is not None and info.rank == 0 and min(ranks) >= info.world_size > 1:
                warn(f"nothing is recorded: none of the ranks asked for is among the {info.world_size} of this job")
        return ranks is None or self.finisher.info.rank in ranks

    def _counter(self, *, first: int = 0, source: StepSource = "nothing yet") -> StepCounter:
        known, parameters = self._owned_tensors.optimizers, self._scopes.parameters
        return StepCounter(first, source, optimizer_may_come=lambda: bool(known()) or may_come(parameters()))

    def _begin(self, plan: Plan, counter: StepCounter) -> None:
        assert self.finisher is not None
        recorder = Recorder(
            plan=plan,
            counter=counter,
            marks=self._scopes,
            held=self._owned_tensors,
            options=self._options,
            finisher=self.finisher,
            notices=self._notices,
        )
        self._recorder = recorder
        atexit.register(self._at_exit)
        self.finisher.begin_history()
        recorder.start()
        recorder.enter(self._entries - 1)

    def _mark_only(self) -> None:
        if self._options.from_outside and records_here():
            warn("the script has a ProfilerWrapper of its own, which records: the command run gives way, and has none")
            return
        self._only_marks = True
        self._scopes.attach()
        self._notices.warn_once(
            "another",
            "another thread is being profiled, and torch has one profiler a process: this ProfilerWrapper "
            "records nothing and has no result"
            if records_elsewhere()
            else "another torch profiler is on, and torch runs one at a time: this ProfilerWrapper records nothing "
            "of its own and has no result. The layers are marked in the other one's trace.",
        )

    def _may_be_entered_again(self, recorder: Recorder) -> bool:
        """The block called a part of a model and ended no step: perhaps one turn of a loop over layers."""
        state = recorder.state
        if self._entries != 1 or state.over or state.has_moved or state.counter.source != "nothing yet":
            return False
        module = recorder.first_call.module()
        if module is None or recorder.first_call.had_backward:
            return False
        known = self._scopes.is_part(module)
        if not (is_part(module) if known is None else known):
            return False
        return bool(state.trained) or state.root_calls <= _FEW_CALLS

    # -- afterwards -------------------------------------------------------------------------------

    def _finish(self, *, at_exit: bool = False, failure: OutOfMemory | None = None) -> None:
        recorder = self._recorder
        if recorder is not None and not at_exit and (why := recorder.ends_later()):
            self._held = True
            self._notices.warn_once("later", f"{why}: recording ends with that thread's next call of the model or step")
            return
        self._held = False
        atexit.unregister(self._at_exit)
        if recorder is not None:
            recorder.stop()
            self._report(failure)
            if self.finisher is not None and not self.finisher.reported:
                ended = recorder.state.counter.ended
                warn(f"nothing was recorded: the block ended after {ended} steps, before any that was asked for")
        if self._depth == 0:
            self._let_models_go()

    def _let_models_go(self) -> None:
        """Whoever keeps the results keeps no model."""
        self._model, self._stages = None, ()
        self._scopes.let_models_go()

    def _report(self, failure: OutOfMemory | None = None) -> None:
        if self._recorder is not None:
            self._recorder.hand_over(failure=failure)
        if self.finisher is not None:
            self.finisher.wait()

    def _at_exit(self) -> None:
        """The process ends, and would crash with torch's profiler on; a fork has nothing to end."""
        if self._recorder is not None and self._recorder.is_same_process:
            self._safely("finishing", lambda: self._finish(at_exit=True))

    def _safely(self, what: str, action: Callable[[], None], *, in_the_way_of: BaseException | None = None) -> None:
        """Run something of ours: what it raises becomes a warning, but for Ctrl-C and the like."""
        try:
            action()
        except Exception as error:
            self._abandon()
            self._notices.warn_once("failed", f"profiling ended, because {what} the profile failed: {in_a_line(error)}")
        except BaseException:
            self._abandon()
            if in_the_way_of is None:
                raise

    def _abandon(self) -> None:
        """Take everything away, whatever state it is in."""
        recorder, self._recorder, self._held = self._recorder, None, False
        atexit.unregister(self._at_exit)
        if recorder is not None:
            recorder.give_up()
        self._scopes.detach()
