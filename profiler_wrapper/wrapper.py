"""ProfilerWrapper: capture, then analyse, then report."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

from profiler_wrapper.errors import WrongUse, shown, warn
from profiler_wrapper.result import ProfileResult
from profiler_wrapper.run.options import OPTIONS, make_options
from profiler_wrapper.run.profiling import Profiling
from profiler_wrapper.tables.time_rows import Track
from profiler_wrapper.tables.work.peaks import Given

T = TypeVar("T")


_OWN_SESSION = "the session is set up here. Use torch.profiler.profile, with profiler_wrapper.mark(model)"
# Arguments of torch.profiler.profile that are not taken, and what to do instead.
_OF_TORCH = {
    "on_trace_ready": "the traces are files in prof.directory, and prof.results has their numbers",
    "with_flops": "FLOPs are counted from the shapes of ops, without it",
    "with_modules": "every layer is a row, without it",
    "acc_events": "each recorded window has a result of its own, see prof.results",
    "use_cuda": "give activities=, or nothing for all that the machine has",
    "experimental_config": _OWN_SESSION,
    "execution_trace_observer": _OWN_SESSION,
    "post_processing_timeout_s": _OWN_SESSION,
    "custom_trace_id_callback": _OWN_SESSION,
}


class ProfilerWrapper:
    """Tells for every layer of a model where the time and the memory go.

        with ProfilerWrapper(model) as prof:
            for batch in batches:
                loss = model(**batch).loss
                loss.backward(); optimizer.step(); optimizer.zero_grad()
                prof.step()         # optional: without it the optimizer's steps are counted
        print(prof.result)

    Under defaults two steps are recorded in full as warm-up (more while `torch.compile` compiles), then
    three without shapes, whose times are reported; then the loop runs on without the profiler. A child process
    writes the files meanwhile, and the table is printed when the block ends. A block that ends earlier reports
    what it has.

    The block may be entered again and again, as around each layer of a loop over layers. From the second
    entry on one session stays open until `leave()`, the growth bound or the exit; each entry is one more
    iteration, and what happens between the entries (the backward) is recorded too. So that the first
    layer's backward is in it as well, the session already stays open after the first exit if the block
    ended no step, ran no backward, and called only a part of a model (a module inside another one, or in a
    list of them). The files of such a block are written by `leave()`, by asking for `result`, or at
    exit; if it is not entered again, recording ends with the next optimizer step.

    Args:
        model: whose layers become rows: a module, a list, a dict (its keys prefix the names), a diffusers
            pipeline, a stage or schedule of `torch.distributed.pipelining`. None: the outermost modules called,
            named by class. A bool here is `is_st`.
        steps: `"auto"`, `"all"`, or numbers from 0 such as `"20-22,500"`.
        output_dir: where run directories are made.
        run_name: name of the run's directory; the same on all ranks.
        ranks: which ranks record at all: `0`, `"0-3,8"` or a list; None: all. The others do nothing, and none
            waits for another.
        layers: which modules become rows: `"auto"`, a depth, or name patterns.
        track: names or regular expressions of ops, kernels or named blocks to follow as series, or functions.
        files: `"auto"`, `"all"`, or some of `trace`, `full_trace`, `result`, `report`, `time_plot`, `memory_plot`,
            `memory_text`, `log`, `roofline_plot`, `categories_plot`, `memory_log`, `sunbursts`.
        with_stack: record Python stacks; costly.

    Less often:
        schedule: a `torch.profiler.schedule(...)` instead of `steps`.
        activities: of `torch.profiler`; None: all that the machine has.
        profile_memory: record allocations.
        record_shapes: `"auto"`: in warm-up steps only, so that the reported times are not disturbed; True:
            in all; False: in none. While shapes are recorded torch may hold on to tensors: nothing for
            Transformers' Llama, 2 GB under `torch.vmap`.
        prefix: of file names, instead of what `is_st` stands for.
        trace: `"json"`, `"json.gz"` or False; None: plain, gzipped past 8 ranks.
        local_dir: a directory on the node's own disk to write to first; a copy goes to `output_dir` afterwards.
            PROFILER_WRAPPER_LOCAL_DIR in the environment does the same.
        background: while the loop goes on, a child process of low priority makes the reports. Leaving the block,
            `leave()`, asking for `result` and the end of the process wait for it; one that is not through after
            10 s (and a second for every 2 MB of trace) is ended, and the reports are made at once. Functions in `track`
            are applied then, too. False: the loop waits while the reports are made.
        peaks: what the device can do, where no table knows it or another roof is wanted: dense TFLOP/s, by type
            (`{"bfloat16": 989, "bandwidth": 3350}` with GB/s, or the same as text), or the file that
            `profiler-wrapper peaks --measure -o FILE` wrote. PROFILER_WRAPPER_PEAK_TFLOPS does the same.
        optimizer: whose state and copies of parameters count as such: one, or several in a list or dict. Those
            of torch are found by their steps, so it takes one only where the optimizer's state was there before
            the block, or where torch does not see the steps: anything with `param_groups` and `state`.
        rank: which rank this is, where it cannot be found out.
        device_mesh: the `DeviceMesh` of the job, where the model's parameters do not carry it.
        coordinates: the place of this rank in the mesh: `{"dp": 1, "tp": 0, "pp": 3}`.
        of_torch: other arguments of `torch.profiler.profile`: not used, and a warning says what to do instead.

    Of the tools that it replaces:
        is_st: file prefix: `opensora` if true, `cogvideo` if false.
        log_dir: where the tables go, if not into the run's directory.
        mem_dir: where the memory snapshot goes, if not into the run's directory.
        enabled_record_memory_pickle: record the CUDA allocator's history and dump it as a pickle.
        enabled_record_cuda_average_time: draw the time of every layer and step.
        enable_record_cuda_mm: draw and list the memory of every layer.
        enable_print_summary: print and save the tables.

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
        coordinates: Mapping[str, int] | None = None,
        ranks: str | int | Iterable[int] | None = None,
        local_dir: str | os.PathLike[str] | None = None,
        background: bool = True,
        optimizer: object | None = None,
        peaks: Given | None = None,
        **of_torch: Any,
    ) -> None:
        for name in of_torch:
            if name not in _OF_TORCH:
                raise TypeError(f"ProfilerWrapper() got an unexpected keyword argument {shown(name)}")
            if of_torch[name] is not None and of_torch[name] is not False:
                warn(f"{name}= of torch.profiler is ignored: {_OF_TORCH[name]}")
        if isinstance(model, bool):
            if is_st is not None:
                raise WrongUse(
                    f"The first argument {shown(model)} is is_st, and is_st={shown(is_st)} was given too. Give one."
                )
            model, is_st = None, model
        options = make_options(**{name: value for name, value in locals().items() if name in OPTIONS})
        self._off = options.off
        self._started = False
        self._profiling = Profiling(model, options, optimizer=optimizer)

    def __enter__(self) -> ProfilerWrapper:
        self._profiling.enter()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._profiling.exit(error)

    def start(self) -> ProfilerWrapper:
        """Begin to record, as entering the block does, where the end lies in another cell or call; and give itself.

        Recording ends with `stop()`, or with the process. After a `stop()` it begins anew, by the same `steps`. What
        was started already goes on.
        """
        if self._started:
            warn("start() changes nothing: this ProfilerWrapper was started already, and not stopped since")
        else:
            self._started = True
            self._profiling.enter(anew=True)
        return self

    def stop(self) -> None:
        """End what `start()` began, as leaving the block does: the files are written, and the table is printed."""
        if not self._started:
            warn("stop() changes nothing: this ProfilerWrapper was not started")
            return
        self._started = False
        self._profiling.stop()

    def step(self) -> None:
        """A step has ended. Once it was called, only its calls count as steps."""
        self._profiling.step()

    @overload
    def record_function(self, name: str, fn: Callable[[], T]) -> T: ...

    @overload
    def record_function(self, name: str, fn: None = None) -> AbstractContextManager[None]: ...

    def record_function(self, name: str, fn: Callable[[], T] | None = None) -> T | AbstractContextManager[None]:
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
        block = None if self._off else self._profiling.enter_named(name)
        try:
            yield
        finally:
            if block is not None:
                self._profiling.leave_named(block)

    def leave(self) -> None:
        """End recording and write the files; needed only where the block is entered more than once."""
        self._profiling.finish()

    @property
    def results(self) -> tuple[ProfileResult, ...]:
        """A result for each window recorded so far, once it is finished. Ends a recording that goes on outside."""
        self._profiling.report()
        finisher = self._profiling.finisher
        return () if finisher is None else finisher.results

    @property
    def result(self) -> ProfileResult | None:
        """The last window's result; None where nothing was recorded."""
        results = self.results
        return results[-1] if results else None

    @property
    def directory(self) -> Path | None:
        """Where this rank's files are; None before there are any."""
        finisher = self._profiling.finisher
        return finisher.directory if finisher is not None else None
