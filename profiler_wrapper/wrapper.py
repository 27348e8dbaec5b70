"""ProfilerWrapper: capture, then analyse, then report."""

from __future__ import annotations

import atexit
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar, overload

from profiler_wrapper.analysis.series import Track
from profiler_wrapper.capture.others import profiler_is_on, profiler_is_waiting
from profiler_wrapper.capture.parts import FirstCall, is_part
from profiler_wrapper.capture.recorder import Recorder
from profiler_wrapper.capture.runinfo import run_info
from profiler_wrapper.capture.scopes import LayerScopes
from profiler_wrapper.capture.session import Annotation, Session, machine_activities
from profiler_wrapper.capture.steps import Mode, OpenPlan, Plan
from profiler_wrapper.errors import WrongUse
from profiler_wrapper.finishing import Finisher
from profiler_wrapper.notices import tell
from profiler_wrapper.options import make_options
from profiler_wrapper.result import ProfileResult

T = TypeVar("T")

_inside: list[ProfilerWrapper] = []  # entered and not left, outermost first


class ProfilerWrapper:
    """Tells for every layer of a model where the time and the memory go.

        with ProfilerWrapper(model) as prof:
            for batch in batches:
                loss = model(**batch).loss
                loss.backward(); optimizer.step(); optimizer.zero_grad()
                prof.step()         # optional: without it the optimizer's steps are counted
        print(prof.result)

    Under defaults two steps are recorded in full as warm-up (more while `torch.compile` compiles), then
    three without shapes, whose times are reported; then every hook is gone and the loop runs on. The
    files are written when the block ends.

    The block may be entered again and again, as around each layer of a loop over layers. From the second
    entry on one session stays open until `leave()`, the growth bound or the exit, and what happens between
    the entries (the backward) is recorded too. So that the first layer's backward is in it as well, the
    session already stays open after the first exit if the block ended no step and called only a part of a
    model (a module that another one holds, or a list of its like); the files of such a block are written by
    `leave()`, by asking for `result`, or at exit, and recording ends with the next optimizer step if the
    block is not entered again.

    Args:
        model: whose layers become rows: a module, a list, a dict (its keys prefix the names), a diffusers
            pipeline. None: the outermost modules called, named by class. A bool here is `is_st`.
        is_st: file prefix: `opensora` if true, `cogvideo` if false.
        activities: of `torch.profiler`; None: all that the machine has.
        profile_memory: record allocations.
        record_shapes: `"auto"`: in warm-up steps only, so that the reported times are not disturbed; True:
            in all; False: in none. While shapes are recorded torch may hold on to tensors: nothing for
            Transformers' Llama, 2 GB under `torch.vmap`.
        with_stack: record Python stacks; costly.
        log_dir, mem_dir: where the tables and the memory snapshot go, if not into the run's directory.
        enabled_record_memory_pickle: record the CUDA allocator's history and dump it as a pickle.
        enabled_record_cuda_average_time: draw the time of every layer and step.
        enable_record_cuda_mm: draw and list the memory of every layer.
        enable_print_summary: print and save the tables.
        steps: `"auto"`, `"all"`, or numbers from 0 such as `"20-22,500"`.
        schedule: a `torch.profiler.schedule(...)` instead of `steps`.
        track: names or regular expressions of ops, kernels or named blocks to follow as series, or functions.
        layers: which modules become rows: `"auto"`, a depth, or name patterns.
        output_dir: where run directories are made.
        prefix: of file names, instead of what `is_st` stands for.
        run_name: name of the run's directory; the same on all ranks.
        files: `"auto"`, `"all"`, or some of `trace`, `full_trace`, `result`, `time_plot`, `memory_plot`,
            `memory_text`, `log`.
        trace: `"json"`, `"json.gz"` or False; None: plain, gzipped past 8 ranks.
        rank, device_mesh: where they cannot be found out.

    Raises:
        WrongUse: an argument means nothing here. Nothing else is ever raised: a failure of ours is one
            `ProfilerWrapperWarning`.
    """

    def __init__(
        self,
        model: object | None = None,
        is_st: bool | None = None,
        activities: Iterable[Any] | None = None,
        profile_memory: bool = True,
        record_shapes: bool | Literal["auto"] = "auto",
        log_dir: str | os.PathLike[str] | None = None,
        mem_dir: str | os.PathLike[str] | None = None,
        enabled_record_memory_pickle: bool = False,
        enabled_record_cuda_average_time: bool = True,
        enable_record_cuda_mm: bool = True,
        enable_print_summary: bool = True,
        *,
        steps: str | int | range = "auto",
        schedule: Callable[[int], Any] | None = None,
        with_stack: bool = False,
        track: Track | Sequence[Track] = (),
        layers: str | int | re.Pattern[str] | Sequence[str | re.Pattern[str]] = "auto",
        output_dir: str | os.PathLike[str] = "outputs",
        prefix: str | None = None,
        run_name: str | None = None,
        files: str | Iterable[str] = "auto",
        trace: Literal["json", "json.gz"] | bool | None = None,
        rank: int | None = None,
        device_mesh: object | None = None,
    ) -> None:
        if isinstance(model, bool):
            if is_st is not None:
                raise WrongUse(f"The first argument {model!r} is is_st, and is_st={is_st!r} was given too. Give one.")
            model, is_st = None, model
        self._options = make_options(
            prefix=prefix,
            is_st=is_st,
            output_dir=output_dir,
            log_dir=log_dir,
            mem_dir=mem_dir,
            files=files,
            track=track,
            activities=activities,
            record_shapes=record_shapes,
            trace=trace,
            steps=steps,
            schedule=schedule,
            profile_memory=profile_memory,
            with_stack=with_stack,
            layers=layers,
            run_name=run_name,
            rank=rank,
            device_mesh=device_mesh,
            enabled_record_memory_pickle=enabled_record_memory_pickle,
            enabled_record_cuda_average_time=enabled_record_cuda_average_time,
            enable_record_cuda_mm=enable_record_cuda_mm,
            enable_print_summary=enable_print_summary,
        )
        self._model = model
        self._scopes = LayerScopes(model, layers=layers, on_root_enter=self._root_enters)
        self._finisher: Finisher | None = None
        self._recorder: Recorder | None = None
        self._first_call: FirstCall | None = None
        self._only_marks = False
        self._depth = 0
        self._entries = 0
        self._root_calls = 0
        self._held = False  # the recording goes on though the block was left

    # -- the block --------------------------------------------------------------------------------

    def __enter__(self) -> ProfilerWrapper:
        self._depth += 1
        if self._depth == 1:
            self._safely("starting", self._enter)
            _inside.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth != 0:
            self._depth = max(self._depth, 0)
            return
        if self in _inside:
            _inside.remove(self)
        self._safely("finishing", lambda: self._exit(error), in_the_way_of=error)

    def _enter(self) -> None:
        iteration = self._entries
        self._entries += 1
        if not self._takes_part():
            return
        if self._held and self._recorder is not None and not self._recorder.over:
            self._recorder.enter_again(iteration)
        elif profiler_is_on() or profiler_is_waiting():
            self._mark_only()
        elif iteration == 0:
            self._begin(self._options.plan())
        else:
            self._finish()
            self._begin(OpenPlan(entered_again=True))
            self._hold()

    def _exit(self, error: BaseException | None) -> None:
        if self._only_marks:
            self._only_marks = False
            self._scopes.detach()
        recorder = self._recorder
        if recorder is None:
            return
        recorder.leave_again()
        if error is not None:
            recorder.note(f"the block was left by {type(error).__name__}", incomplete=True)
        elif self._held and not recorder.over:
            return
        elif self._may_be_entered_again(recorder):
            recorder.hold_open()
            self._hold()
            return
        self._finish()

    def _takes_part(self) -> bool:
        if self._options.off:
            return False
        if self._finisher is None:
            self._finisher = Finisher(self._options, run_info(rank=self._options.rank), self._scopes.describe)
        ranks = self._options.ranks
        return ranks is None or self._finisher.rank in ranks

    def _begin(self, plan: Plan) -> None:
        assert self._finisher is not None
        recorder = Recorder(
            plan=plan,
            new_session=self._new_session,
            part_path=self._finisher.part_path,
            on_failure=lambda what, error: tell(f"profiling ended, because {what} failed: {error}"),
            on_over=self._finisher.end_history,
        )
        recorder.marks = self._scopes
        self._recorder = recorder
        self._finisher.begin_history()
        if self._entries == 1 and self._model is None:
            self._first_call = FirstCall()
            self._first_call.listen()
        recorder.start()
        recorder.enter_again(self._entries - 1)

    def _new_session(self, mode: Mode) -> Session:
        options = self._options
        return Session(
            activities=options.activities or machine_activities(),
            record_shapes=options.shapes(warm_up=mode is Mode.FULL),
            profile_memory=options.profile_memory,
            with_stack=options.with_stack,
        )

    def _mark_only(self) -> None:
        outer = next((one for one in reversed(_inside) if one._model is None or one._model is self._model), None)
        if outer is None:
            self._only_marks = True
            self._scopes.attach()
        tell(
            "another torch profiler is on, and torch runs one at a time: this ProfilerWrapper records nothing of its "
            "own and has no result. " + ("Its layers are marked in the other trace." if outer is None else "")
        )

    def _may_be_entered_again(self, recorder: Recorder) -> bool:
        """The block called a part of a model, and ended no step: perhaps one turn of a loop over layers."""
        if self._entries != 1 or recorder.over or recorder.counter.source != "nothing yet":
            return False
        if self._model is not None:
            return self._root_calls == 0
        module = self._first_call.module if self._first_call is not None else None
        return module is not None and is_part(module)

    def _hold(self) -> None:
        self._held = True
        atexit.register(self._at_exit)

    def _root_enters(self, call: Any) -> None:
        self._root_calls += 1
        if self._recorder is not None:
            self._recorder.root_enters(call)

    # -- in the block -----------------------------------------------------------------------------

    def step(self) -> None:
        """A step has ended. Once it was called, only its calls count as steps."""
        if self._recorder is not None:
            self._recorder.user_step()

    @overload
    def record_function(self, name: str, fn: Callable[[], T]) -> T: ...

    @overload
    def record_function(self, name: str, fn: None = None) -> Any: ...

    def record_function(self, name: str, fn: Callable[[], T] | None = None) -> Any:
        """Run `fn` as a named block and return its result; without `fn`, the context manager of such a block.

        The name becomes a series of the result.
        """
        block = self._named_block(str(name))
        if fn is None:
            return block
        with block:
            return fn()

    @contextmanager
    def _named_block(self, name: str) -> Iterator[None]:
        annotation = None
        if not self._options.off and profiler_is_on():
            annotation = Annotation(name)
            if self._finisher is not None:
                self._finisher.follow(name)
        try:
            yield
        finally:
            if annotation is not None:
                annotation.end()

    # -- afterwards -------------------------------------------------------------------------------

    def leave(self) -> None:
        """End recording and write the files; needed only where the block was entered more than once."""
        self._safely("finishing", self._finish)

    @property
    def results(self) -> tuple[ProfileResult, ...]:
        """A result for each window recorded so far. Ends a recording that goes on outside of its block."""
        if self._held and self._depth == 0:
            self.leave()
        self._safely("writing the reports", self._report)
        return tuple(self._finisher.results) if self._finisher is not None else ()

    @property
    def result(self) -> ProfileResult | None:
        """The last window's result; None where nothing was recorded."""
        results = self.results
        return results[-1] if results else None

    @property
    def run_directory(self) -> Path | None:
        """Where this rank's files are; None before anything was recorded."""
        return self._finisher.directory if self._finisher is not None else None

    def _finish(self) -> None:
        recorder, self._held = self._recorder, False
        atexit.unregister(self._at_exit)
        self._stop_first_call()
        if recorder is None:
            return
        try:
            recorder.stop()
        finally:
            self._scopes.detach()
            self._report()
            self._recorder = None

    def _report(self) -> None:
        """Write what has been recorded and not yet been written."""
        if self._recorder is None or self._finisher is None:
            return
        while self._recorder.windows:
            window = self._recorder.windows.pop(0)
            window.warnings.extend(self._scopes.warnings)
            self._finisher.write(window)

    def _at_exit(self) -> None:
        if self._recorder is not None and self._recorder.at_home:
            self._safely("finishing at exit", self._finish)

    def _stop_first_call(self) -> None:
        if self._first_call is not None:
            self._first_call.stop()

    def _safely(self, what: str, action: Callable[[], None], *, in_the_way_of: BaseException | None = None) -> None:
        """Run something of ours: what it raises becomes a warning, but for Ctrl-C and the like."""
        try:
            action()
        except Exception as error:
            self._abandon()
            tell(f"{what} the profile failed: {type(error).__name__}: {error}")
        except BaseException:
            self._abandon()
            if in_the_way_of is None:
                raise

    def _abandon(self) -> None:
        """Take everything away, whatever state it is in."""
        recorder, self._recorder, self._held = self._recorder, None, False
        atexit.unregister(self._at_exit)
        self._stop_first_call()
        for action in (recorder.stop if recorder is not None else None, self._scopes.detach):
            try:
                if action is not None:
                    action()
            except Exception as error:
                tell(f"taking the profiler's hooks away failed: {error}")
        if self._finisher is not None:
            self._finisher.give_up()
