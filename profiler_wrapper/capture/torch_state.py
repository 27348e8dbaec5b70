"""What torch is doing in this process: other profilers, backward, captures, custom ops, optimizers, compiling, threads.

torch has one recorder, and whoever prepares it takes it. Measured on torch 2.13: a profiler that starts inside another
one ends it without a word, and the export of the one that lost crashes the process; of two on two threads the one that
stops last crashes it. So ours never starts on top of another, and ends properly just before another one starts.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial, wraps
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
import torch.autograd.profiler as autograd_profiler
from torch import nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.amp import GradScaler
from torch.autograd.function import Function
from torch.fx import _symbolic_trace as symbolic_trace
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.profiler import profiler as torch_profiler

# Where they take it.
_ENTRANCES = (
    ("profile", "_prepare_trace"),
    ("profile", "_start_trace"),
    ("emit_itt", "__enter__"),
    ("emit_nvtx", "__enter__"),
)


def profiler_is_on() -> bool:
    """Some torch profiler records this thread."""
    return bool(torch._C._autograd._profiler_enabled())


def profiler_is_on_somewhere() -> bool:
    """Some torch profiler records this thread or another one."""
    return profiler_is_on() or bool(getattr(autograd_profiler, "_is_profiler_enabled", False))


def profiler_is_waiting() -> bool:
    """Some torch profiler is in its warm-up: prepared, and about to record."""
    tracker = getattr(autograd_profiler, "KinetoStepTracker", None)
    known = getattr(tracker, "_step_dict", None)
    name = getattr(torch_profiler, "PROFILER_STEP_NAME", "ProfilerStep")
    if known is not None and name not in known:
        return False  # nobody has a torch.profiler.profile; saves the search below, some 50 ms
    known_profilers: Any = (thing for thing in gc.get_objects() if type(thing) is autograd_profiler.profile)
    return any(one.enabled and one.entered and one.kineto_results is None for one in known_profilers)


def recorder_is_taken() -> bool:
    """By a profiler that records this thread, by one in its warm-up, or by a session of ours on another thread."""
    return profiler_is_on() or profiler_is_waiting() or records_elsewhere()


def records_elsewhere() -> bool:
    """A session of ours records another thread of this process."""
    process, thread = _recorded
    return process == os.getpid() and thread != threading.get_ident() and is_alive(thread)


def records_here() -> bool:
    """A session of ours records this thread."""
    return _recorded == (os.getpid(), threading.get_ident())


def is_alive(thread: int) -> bool:
    """The thread of that `get_ident()` has not ended."""
    return thread in sys._current_frames()


def claim_recorder(give_way: Callable[[], None] | None = None) -> None:
    """A session of ours is about to record this thread; `give_way` ends it for a profile that the user asks for.

    Raises RuntimeError: one records another thread.
    """
    global _recorded, _give_way
    with _claim:
        if records_elsewhere():
            raise RuntimeError("another thread is being profiled, and torch has one profiler a process")
        _recorded, _give_way = (os.getpid(), threading.get_ident()), give_way


def free_recorder() -> bool:
    """Whether a profile that the user asked for can record here; a session of ours that gives way ends for it."""
    if records_here() and _give_way is not None:
        _give_way()
    return not recorder_is_taken()


def release_recorder() -> None:
    """It has ended."""
    global _recorded, _give_way
    _recorded, _give_way = (0, 0), None


_recorded = (0, 0)  # process and thread
_give_way: Callable[[], None] | None = None
_claim = threading.Lock()


class Patch(NamedTuple):
    """One function: `wrap` makes of torch's the one that takes its place."""

    module: str
    owner: str  # a class in it; "": the module itself
    name: str
    wrap: Callable[[Any], Any]


class Patches:
    """Functions that are ours from the first `listen` to the last `stop_listening`, however many listen.

    What a version of torch does not have is not wrapped.

    Attributes:
        listeners: those that there are now.
    """

    def __init__(self, patches: Sequence[Patch]) -> None:
        self.patches = tuple(patches)
        self.listeners: tuple[Any, ...] = ()
        self._in_place: dict[Patch, tuple[Any, Any, Any]] = {}  # -> owner, what was there, ours
        self._lock = threading.RLock()

    def listen(self, listener: object) -> None:
        """Tell `listener`. To be called again when torch's modules may have been imported since; that is quick."""
        if listener in self.listeners and len(self._in_place) == len(self.patches):
            return
        with self._lock:
            if listener not in self.listeners:
                self.listeners = (*self.listeners, listener)
            for patch in self.patches:
                module = sys.modules.get(patch.module)
                owner = getattr(module, patch.owner, None) if patch.owner else module
                original = None if owner is None else vars(owner).get(patch.name)
                # Ours is there, or somebody's above it; else somebody may have put the original back.
                if original is None or (patch in self._in_place and original is not self._in_place[patch][1]):
                    continue
                ours = wraps(original)(patch.wrap(getattr(owner, patch.name)))
                keep_dynamo_off(ours, and_below=False)
                setattr(owner, patch.name, ours)
                self._in_place[patch] = owner, original, ours

    def stop_listening(self, listener: object) -> None:
        """With the last one all is as it was; ours stays, and does nothing, where somebody has wrapped it since."""
        with self._lock:
            self.listeners = tuple(one for one in self.listeners if one is not listener)
            if self.listeners:
                return
            for patch, (owner, original, ours) in list(self._in_place.items()):
                if vars(owner).get(patch.name) is ours:
                    setattr(owner, patch.name, original)
                    del self._in_place[patch]


class Watch:
    """Calls `before_another` just before a torch profiler that is not ours takes the recorder.

    Holds while `install()`ed. `is_another` is asked about each `torch.autograd.profiler.profile`.
    """

    def __init__(self, *, is_another: Callable[[object], bool], before_another: Callable[[], None]) -> None:
        self._is_another, self._before_another = is_another, before_another
        self._patches = Patches([Patch(autograd_profiler.__name__, *place, self._watched) for place in _ENTRANCES])

    def install(self) -> None:
        """Begin to watch; a torch without these methods is not watched."""
        self._patches.listen(self)

    def remove(self) -> None:
        """End watching. Where somebody has replaced the method since, ours stays below it and does nothing."""
        self._patches.stop_listening(self)

    def _watched(self, original: Any) -> Any:
        def method(profiler: Any) -> Any:
            if self._patches.listeners and self._is_another(profiler):
                self._before_another()
            return original(profiler)

        return method


def forwards_around(call: CodeType) -> list[nn.Module]:
    """Modules whose `forward` runs between this frame of `call`, the call of a module, and the call around it.

    Outermost first, without the one that is called there.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not call:
        frame = frame.f_back
    frames, torch_file = list[FrameType](), nn.Module._call_impl.__code__.co_filename
    while frame is not None and (frame := frame.f_back) is not None and frame.f_code.co_filename != torch_file:
        if frame.f_code.co_name == "forward" and frame.f_code.co_argcount:
            frames.append(frame)
    if frame is not None and len(frames) < 2:
        return []
    owners = [_first_argument(one) for one in reversed(frames)]
    modules = [one for one in owners if isinstance(one, nn.Module)]
    return [one for one in modules if frame is None or one is not modules[0]]


_REFERENCES_OF_OURS = 3  # the frame's, the variable's, the argument's of the call that counts


def _first_argument(function: FrameType) -> object:
    values = function.f_locals
    found = values.get(function.f_code.co_varnames[0])
    # Before Python 3.13 a copy, which the frame keeps, with tensors, until it ends, and which `locals()` gives.
    if isinstance(values, dict) and sys.getrefcount(values) == _REFERENCES_OF_OURS:
        values.clear()
    return found


# --- What a call of a model is for, known from its arguments alone; no tensor is ever read ---

_CACHES = ("past_key_values", "cache_params", "inference_params", "inference_context", "kv_cache", "past")
_QUERIES = ("decoder_input_ids", "input_ids", "inputs_embeds")


def in_backward() -> bool:
    """Whether the autograd engine is running on this thread: a forward called now is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def capturing() -> bool:
    """Whether this thread captures a CUDA graph: a profiler that starts or stops waits for the device and breaks it."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


is_compiling = torch.compiler.is_compiling
_fx_state = vars(symbolic_trace)


def is_tracing() -> bool:
    """Whether code runs to be traced: by jit, fx, make_fx, export. Nothing of ours may be in what comes of it."""
    if is_compiling() or _fx_state.get("_is_fx_tracing_flag"):
        return True
    return torch._C._get_tracing_state() is not None


# Through these Python enters an op; the frame stays while the op runs, and calls Python back.
_ENTER_AN_OP = {OpOverload.__call__.__code__, OpOverloadPacket.__call__.__code__}
_APPLY = getattr(Function.apply, "__code__", None)  # from torch 2.15 on it is C++, and leaves no frame


def in_op() -> bool:
    """Whether an op that is written in Python is running on this thread: a custom one, an autograd function.

    Reentrant checkpointing is one. Walks the stack: some 20 us where it is 50 frames deep.
    """
    functions = with_subclasses(Function) if _APPLY is None else ()
    ops = {*_ENTER_AN_OP, _APPLY, *(getattr(function.forward, "__code__", None) for function in functions)}
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code in ops:
            return True
        frame = frame.f_back
    return False


def with_subclasses(cls: Any) -> Iterator[Any]:
    """A class, and all below it that there are."""
    waiting = [cls]
    while waiting:
        one = waiting.pop()
        yield one
        waiting += one.__subclasses__()


def generation_phase(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """ "prefill" or "decode" (one token of query) for a call with a cache and without gradients, else "forward"."""
    has_cache = kwargs.get("use_cache") is True or any(kwargs.get(name) is not None for name in _CACHES)
    if torch.is_grad_enabled() or not has_cache:
        return "forward"
    return "decode" if query_tokens(args, kwargs) == 1 else "prefill"


def query_tokens(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """How many tokens of each sequence a call of a model is asked about; None where it does not tell."""
    query = next((kwargs[name] for name in _QUERIES if kwargs.get(name) is not None), args[0] if args else None)
    shape: Sequence[int] = getattr(query, "shape", ())
    return shape[1] if len(shape) > 1 else None


# --- What shows the steps of a loop that says nothing: optimizers, and the compiler ---


def keep_dynamo_off(function: Any, *, and_below: bool) -> None:
    """Dynamo runs the frames of this function as they are, or these and all below them."""
    # In C, so that torch._dynamo, a second to import, need not be there yet.
    dynamo = torch._C._dynamo.eval_frame
    if hasattr(dynamo, "_FrameExecStrategy"):
        action = dynamo._FrameAction
        below = action.SKIP if and_below else action.DEFAULT
        dynamo.set_code_exec_strategy(function.__code__, dynamo._FrameExecStrategy(action.SKIP, below))


keep_dynamo_off(is_tracing, and_below=True)
_STEP: Any = Optimizer.profile_hook_step(lambda: None).__code__  # around each step, where the hooks are called


StepHook = Callable[[Callable[[], Any]], None]  # with a weak reference to an optimizer, which is hashable


class OptimizerSteps:
    """Calls a function just before and after each step of any optimizer, until `remove()`.

    `skipped`: called in the place of a step that a gradient scaler leaves out, for a gradient that is not finite.
    Steps that `torch.compile` has compiled are not seen: Dynamo finds nothing to trace here, and
    `FirstCall.updated` sees what they did.
    """

    def __init__(self, *, before: StepHook, after: StepHook, skipped: StepHook | None = None) -> None:
        self._active = True
        self._calling = self._stepped = False
        self._handles = (
            register_optimizer_step_pre_hook(self._calls(before)),
            register_optimizer_step_post_hook(self._calls(after)),
        )
        self._scaled = self._original = GradScaler.step
        if skipped is not None:
            GradScaler.step = self._scaled = self._watched(skipped)  # type: ignore[method-assign]

    def _watched(self, skipped: StepHook) -> Any:
        on_skip = self._calls(skipped)

        @wraps(self._original)
        def step(scaler: GradScaler, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            self._stepped = False
            result = self._original(scaler, optimizer, *args, **kwargs)
            if not self._stepped:
                on_skip(optimizer, args, kwargs)
            return result

        return step

    def _calls(self, hook: StepHook) -> Callable[[Any, Any, Any], None]:
        def on_step(optimizer: Any, args: Any, kwargs: Any) -> None:
            if is_tracing() or not self._active:
                return
            self._calling = self._stepped = True
            try:
                hook(weakref.ref(optimizer))
            finally:
                self._calling = False

        keep_dynamo_off(on_step, and_below=True)
        return on_step

    def remove(self) -> None:
        """Call nothing more. What cannot be removed within a step stays, silent, until the next call of this."""
        self._active = False
        if vars(GradScaler)["step"] is self._scaled:  # else somebody has replaced it since, and ours stays below it
            GradScaler.step = self._original  # type: ignore[method-assign]
        tops = sys._current_frames().values()  # of all threads
        in_step = any(frame.f_code is _STEP for top in tops for frame, _ in traceback.walk_stack(top))
        for handle in self._handles:
            hooks = handle.hooks_dict_ref() or {}
            # torch goes through these: a removal raises in the user's step, but that of the last one, by itself.
            if not in_step or (self._calling and next(reversed(hooks), None) == handle.id):
                handle.remove()


def compilations() -> int:
    """How much torch.compile has compiled so far; 0 where nobody has used it."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    if not counters:
        return 0
    return int(counters["stats"]["unique_graphs"]) + int(counters["frames"]["total"])


# --------------------------------------------------------------------------------------------------
# Which threads of Python may call a model: known before they start, from what they were given to run.
#
# torch's profiler records the thread that started it, and only that thread can stop it, so it has to be known before.
# `profile_all_threads` is of no use: on torch 2.13 it records no allocation, and a stop while any other thread is in
# an op, be it one that copies batches to pinned memory, is a write to freed memory (all processes crashed).

_GIVEN = ("_target", "_args", "_kwargs")  # what a thread runs, in its own attributes
_MOST_OBJECTS = 20_000  # looked at for one thread, some 10 ms; a manager holds its model within the first hundred
_NO_WAY = (type, ModuleType, torch.Tensor, threading.Thread)  # what these refer to is not the thread's


_MOST_WAIT_S = 1.0  # for a call or a step on another thread
_LOOK_EVERY_S = 0.01


def wait_until(done: Callable[[], bool]) -> None:
    """For a moment: another thread does it with its next call or step."""
    end_s = time.monotonic() + _MOST_WAIT_S
    while not done() and time.monotonic() < end_s:
        time.sleep(_LOOK_EVERY_S)


def may_call(thread: threading.Thread, models: Iterable[nn.Module]) -> bool:
    """Whether what the thread runs leads to one of these modules; of none, to any module.

    By arguments, attributes, closures and the globals that functions name.
    """
    wanted = {id(model) for model in models}
    given = vars(thread).copy()  # a running one may change it
    found: deque[Any] = deque(value for name, value in given.items() if name in _GIVEN or not name.startswith("_"))
    seen = set[int]()
    while found and len(seen) < _MOST_OBJECTS:
        thing = found.popleft()
        kind = type(thing)  # what isinstance() asks may be somebody's property
        if id(thing) in seen or issubclass(kind, _NO_WAY):
            continue
        seen.add(id(thing))
        if issubclass(kind, nn.Module) and (not wanted or id(thing) in wanted):
            return True
        if issubclass(kind, FunctionType):
            found.extend((thing.__closure__, thing.__defaults__, thing.__kwdefaults__, vars(thing)))
            found.extend(_globals_of(thing))
        elif gc.is_tracked(thing):
            found.extend(gc.get_referents(thing))
    return False


def _globals_of(function: FunctionType) -> Iterator[Any]:
    """The global things that a function names, and those defined in it."""
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        yield from (function.__globals__[name] for name in code.co_names if name in function.__globals__)
        codes.extend(one for one in code.co_consts if isinstance(one, CodeType))


class ThreadStarts:
    """Tells of the threads that start, until `remove()`, and of the ends of some.

    Args:
        before: called with each thread that is about to start, on the thread that starts it; whether to tell its end.
        at_end: called on a thread when what it ran has ended.

    Neither must raise.
    """

    def __init__(self, *, before: Callable[[threading.Thread], bool], at_end: Callable[[], None]) -> None:
        self._before, self._at_end = before, at_end
        self._patches = Patches([Patch("threading", "Thread", "start", self._start)])

    def install(self) -> None:
        """Begin to tell. Again: nothing more."""
        self._patches.listen(self)

    def remove(self) -> None:
        """Tell of no further thread. Where somebody has replaced the method since, ours stays below it, silent."""
        self._patches.stop_listening(self)

    def _start(self, original: Any) -> Any:
        def start(thread: threading.Thread) -> None:
            # A second start raises.
            if self._patches.listeners and thread.ident is None and self._before(thread):
                thread.run = partial(self._run, thread, thread.run)  # type: ignore[method-assign]
            original(thread)

        return start

    def _run(self, thread: threading.Thread, original: Callable[[], None]) -> None:
        vars(thread).pop("run", None)
        try:
            original()
        finally:
            self._at_end()
