"""What is seen of a step without a profiler: its parts, runs of the autograd engine, and waits for other ranks.

The parts are data, forward, backward, optimizer, other, each measured where it begins and ends. `data` is the time from
the step's begin to the first forward, `forward` that in calls of the model or, where the loop calls only modules in it,
of the outermost of these (where no model is known: of the outermost modules), `backward` that in the autograd engine,
`optimizer` that in optimizers' steps, `other` the rest, such as a loss between forward and backward. Several in a step
sum up. Where a part was not seen that must have been there, none is known.

Torch has no hook for runs of the engine or waits, so while somebody listens a few of its functions are wrapped, and no
object is. A run of the engine is what `backward` and `grad` of `torch.autograd` call. Waits are those in torch's Python
code:

- `Work.wait`: blocking collectives, sends and receives, also those of pipelines;
- `AsyncCollectiveTensor`'s waits: those of DTensor, thus of tensor parallel;
- FSDP2's `unshard`, `wait_for_unshard` and reduction of gradients, which know group and bytes of a wait within them.
  With an accelerator the process does not wait there: its stream does, in `wait_for_unshard`, which is the wait then.

What a version of torch does not have is not wrapped. Not seen: what waits in C++ (DDP's reducer, compiled functional
collectives), and, with an accelerator, a stream that waits for gradients to be reduced.
"""

from __future__ import annotations

import functools
import inspect
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from profiler_wrapper.capture import scopes
from profiler_wrapper.capture.layers import all_modules
from profiler_wrapper.capture.torch_state import (
    OptimizerSteps,
    Patch,
    Patches,
    in_backward,
    is_tracing,
    keep_dynamo_off,
)
from profiler_wrapper.errors import Notices
from profiler_wrapper.timer.device_events import Mark, seconds_between
from profiler_wrapper.trace.spans import rank_list_text

# --- runs of the autograd engine ---


# A listener has `open_run()`, called where the engine is about to run, on that thread. It returns whether `close_run()`
# is to be called when the run is over or has raised. Neither may raise.


def _around_run(original: Any) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        if is_tracing() or not ENGINE.listeners:
            return original(*args, **kwargs)
        opened = _open_runs()
        try:
            return original(*args, **kwargs)
        finally:
            _close_runs(opened)

    return run


def _open_runs() -> list[Any]:
    return [one for one in ENGINE.listeners if one.open_run()]


def _close_runs(opened: list[Any]) -> None:
    for listener in reversed(opened):
        listener.close_run()


for _ours in (_open_runs, _close_runs):  # a compiled function may call backward
    keep_dynamo_off(_ours, and_below=True)

# What `backward` and `grad` call, so that those who imported these earlier are seen too.
_NAMES = ("_engine_run_backward",) if hasattr(torch.autograd, "_engine_run_backward") else ("backward", "grad")
ENGINE = Patches([Patch("torch.autograd", "", name, _around_run) for name in _NAMES])

# --- waits for other ranks ---

# Numbers of torch's OpType by name. FSDP's reduce-scatter has none with gloo.
_NUMBERS = {
    "broadcast": (0,),
    "all_reduce": (1, 2, 18),
    "reduce": (3,),
    "all_gather": (4, 5, 6),
    "gather": (7,),
    "scatter": (8,),
    "reduce_scatter": (9, 16, 19),
    "all_to_all": (10, 11),
    "send": (12,),
    "recv": (13, 14),
    "barrier": (15,),
}
_OPERATIONS = {number: name for name, numbers in _NUMBERS.items() for number in numbers}
_OTHER = "wait"
_OF_A_PAIR = ("send", "recv")


class WaitInfo(NamedTuple):
    """What is known of a wait."""

    name: str = _OTHER  # of the collective, as `all_gather`; `wait` where it is not known
    group: str | None = None  # the ranks that take part, as `"0-2,5"`; None: not known
    bytes: int | None = None  # that the whole of it is long, as the trace counts them; None: not known


# A listener has `open_wait()`, called on the thread that begins to wait, and `close_wait(opened, info)`, which is given
# what that returned when the wait is over, unless it was None. Neither may raise.
class _Here(threading.local):
    inside = False  # a wait, or what counts as one
    described: Callable[[str], WaitInfo] | None = None  # what FSDP knows of the collective of that name


_here = _Here()


def _in_place(body: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> Callable[[Any], Any]:
    """`body(original, args, kwargs)` where somebody listens and this thread is in no wait; else the original."""
    keep_dynamo_off(body, and_below=False)

    def wrap(original: Any) -> Any:
        def ours(*args: Any, **kwargs: Any) -> Any:
            if is_tracing() or not WAITS.listeners or _here.inside:
                return original(*args, **kwargs)
            return body(original, args, kwargs)

        return ours

    return wrap


@_in_place
def _work_wait(original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _waiting(original, args, kwargs, lambda: _info_of(args[0]))


@_in_place
def _tensor_wait(original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if getattr(args[0], "completed", False):
        return original(*args, **kwargs)
    return _waiting(original, args, kwargs, lambda: WaitInfo(group=_only_group()))


@_in_place
def _unshard(original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not _blocks(getattr(args[0], "device", None)):
        return _waiting(original, args, kwargs, None)
    return _described(original, args, kwargs, lambda _: _gather_of(args[0]))


@_in_place
def _wait_for_unshard(original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    info = _gather_of(args[0]) if getattr(args[0], "_all_gather_result", None) else WaitInfo()
    if info.group is None:  # nothing to wait for, or a rank alone
        return original(*args, **kwargs)
    if _blocks(getattr(args[0], "device", None)):
        return _described(original, args, kwargs, lambda _: info)
    return _waiting(original, args, kwargs, lambda: info)


@_in_place
def _reduction(original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = {**dict(zip(_parameters_of(original), args, strict=False)), **kwargs}
    if not _blocks(given.get("device")):
        return _waiting(original, args, kwargs, None)
    return _described(original, args, kwargs, lambda name: _reduction_of(given, name))


def _waiting(
    original: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], info: Callable[[], WaitInfo] | None
) -> Any:
    """The call, which is a wait. Without `info` it is on a stream of its own, which others wait for later."""
    opened = [] if info is None else _open()
    _here.inside = True
    try:
        return original(*args, **kwargs)
    finally:
        _here.inside = False
        if info is not None:
            _close(opened, info)


def _open() -> list[tuple[Any, object | None]]:
    return [(one, one.open_wait()) for one in WAITS.listeners]


def _close(opened: list[tuple[Any, object | None]], info: Callable[[], WaitInfo]) -> None:
    for listener, its in opened:
        if its is not None:
            listener.close_wait(its, info())


def _described(
    original: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], describe: Callable[[str], WaitInfo]
) -> Any:
    before, _here.described = _here.described, describe
    try:
        return original(*args, **kwargs)
    finally:
        _here.described = before


# --- what is known of a wait ---


def _info_of(work: Any) -> WaitInfo:
    try:
        name = _OPERATIONS.get(int(work._get_op_type()), _OTHER)
        if _here.described is not None:
            return _here.described(name)
        return WaitInfo(name, None if name in _OF_A_PAIR else _only_group())
    except Exception:  # of a version that has it otherwise
        return WaitInfo()


def _gather_of(group: Any) -> WaitInfo:
    """Of FSDP's parameters that are gathered together."""
    try:
        ranks = group._all_gather_process_group
        if ranks.size() < 2:
            return WaitInfo("all_gather")
        size = _elements(group.fsdp_params) * group.mesh_info.shard_mesh_size
        return WaitInfo("all_gather", _ranks_of(ranks), size * _gather_dtype(group.fsdp_params[0]).itemsize)
    except Exception:  # one that is not sharded, or of a version that has it otherwise
        return WaitInfo("all_gather")


def _reduction_of(given: Mapping[str, Any], name: str) -> WaitInfo:
    """Of the gradients that FSDP reduces together: scattered, then, of replicas, summed."""
    try:
        parameters, scattered_in = given["fsdp_params"], given["reduce_scatter_group"]
        size = _elements(parameters) * (given["reduce_dtype"] or _gather_dtype(parameters[0])).itemsize
        if name == "all_reduce":
            return WaitInfo(name, _ranks_of(given["all_reduce_group"]), size)
        return WaitInfo("reduce_scatter", _ranks_of(scattered_in), size * scattered_in.size())
    except Exception:  # of a version that has it otherwise
        return WaitInfo(name)


@functools.lru_cache(maxsize=8)
def _parameters_of(function: Any) -> tuple[str, ...]:
    """Their names, by which versions of torch agree; their places they do not."""
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return ()


def _elements(parameters: Any) -> int:
    """That a rank has of them, padding included."""
    return sum(parameter._sharded_param_data.numel() for parameter in parameters)


def _gather_dtype(parameter: Any) -> torch.dtype:
    """In which it is gathered."""
    found: torch.dtype = parameter.param_dtype or parameter.orig_dtype
    return found


def _blocks(device: Any) -> bool:
    """Whether the process itself waits, and not a stream."""
    return getattr(device, "type", None) == "cpu"


_text_of = functools.lru_cache(maxsize=256)(rank_list_text)


def _ranks_of(group: Any) -> str:
    return _text_of(tuple(torch.distributed.get_process_group_ranks(group)))


def _only_group() -> str | None:
    """The group of a job that has one."""
    try:
        groups = torch.distributed.distributed_c10d._world.pg_names
        return _ranks_of(next(iter(groups))) if len(groups) == 1 else None
    except Exception:  # of a version that has it otherwise, or there is no group any more
        return None


_FSDP = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
WAITS = Patches(
    (
        Patch("torch._C._distributed_c10d", "Work", "wait", _work_wait),
        Patch("torch.distributed._functional_collectives", "AsyncCollectiveTensor", "trigger_wait", _tensor_wait),
        Patch("torch.distributed._functional_collectives", "AsyncCollectiveTensor", "wait", _tensor_wait),
        Patch(_FSDP, "FSDPParamGroup", "unshard", _unshard),
        Patch(_FSDP, "FSDPParamGroup", "wait_for_unshard", _wait_for_unshard),
        Patch(_FSDP, "", "foreach_reduce", _reduction),
    )
)

# Compiled code comes to a wait where it breaks: Dynamo would compile all of these, and the listeners.
for _around in (_waiting, _described):
    keep_dynamo_off(_around, and_below=False)
for _beside in (_open, _close, _blocks, _gather_of):
    keep_dynamo_off(_beside, and_below=True)

# --- the parts of a step ---

PARTS = ("data", "forward", "backward", "optimizer", "other")  # of a step's time

MOST_BOUNDARIES = 20_000  # of a step
_WRAPPED = ("_orig_mod", "module")  # where torch.compile and DDP keep the model

Boundaries = tuple[tuple[str, Mark], ...]  # each part with where it begins


def parts_of(boundaries: Sequence[tuple[str, Mark]], end: Mark, step_time_s: float) -> dict[str, float] | None:
    """Seconds by PARTS, which add up to `step_time_s`; None where no clock tells one of them."""
    seconds = dict.fromkeys(PARTS, 0.0)
    stops = [*(mark for _, mark in boundaries[1:]), end]
    for (part, begin), stop in zip(boundaries, stops, strict=True):
        duration = seconds_between(begin, stop)
        if duration is None:
            return None
        seconds[part] += duration
    rest_s = step_time_s - sum(duration for part, duration in seconds.items() if part != "other")
    seconds["other"] = max(0.0, rest_s)
    if rest_s < 0:  # the device's clock has steps of about a microsecond, so that parts may exceed the whole by some
        seconds[max(seconds, key=lambda part: seconds[part])] += rest_s
    return seconds


class Breakdown(scopes.Listener):
    """Listens to calls of modules, of the autograd engine and of optimizers, between `start()` and `stop()`.

    Nothing is left on the model, and what is compiled stays as it is. Its own failures go to `on_failure`.

    Args:
        model: whose calls, and those of modules in it, are forward; None: the outermost modules that are called.
        optimizers: whose steps count; empty: those of all.
        notices: say once why parts are not known.

    Attributes:
        entered: how often the step has come to each part.
        within: the parts that are being measured, outermost first.
    """

    def __init__(
        self,
        *,
        model: nn.Module | None,
        mark: Callable[[], Mark],
        on_failure: Callable[[str, Exception], None],
        optimizers: Sequence[Any],
        notices: Notices,
    ) -> None:
        self._mark, self._on_failure, self._notices = mark, on_failure, notices
        self._model = None if model is None else weakref.ref(model)
        self._inside: set[int] = set()  # the ids of the modules in the model
        self._outside: set[int] = set()  # those of others, such as a teacher
        self._looked_inside = False  # in this step
        self._optimizers = {id(optimizer) for optimizer in optimizers}
        self._steps: OptimizerSteps | None = None
        self._boundaries: list[tuple[str, Mark]] = []
        self._open = False  # a step is
        self.within: list[str] = []
        self.entered: dict[str, int] = {}
        self._pid = os.getpid()  # a forked worker of a data loader may call modules too

    def start(self) -> None:
        """Listen from now on."""
        if self._steps is not None:
            return
        scopes.listen(self)
        before, after = (functools.partial(self._at_optimizer, then) for then in (self._enter, self._leave))
        self._steps = OptimizerSteps(before=before, after=after)
        ENGINE.listen(self)

    def stop(self) -> None:
        """Listen no more; a second call does nothing."""
        steps, self._steps, self._open = self._steps, None, False
        if steps is None:
            return
        steps.remove()
        scopes.stop_listening(self)
        ENGINE.stop_listening(self)

    def begin_step(self, mark: Mark) -> None:
        """A step begins, at `mark`."""
        self._boundaries = [("data", mark)]
        self._open, self.entered, self.within, self._looked_inside = True, {}, [], False

    def end_step(self) -> Boundaries:
        """The step has ended: where its parts begin; nothing, where one of them has not been seen."""
        boundaries, self._boundaries, was_open, self._open = self._boundaries, [], self._open, False
        if not was_open or not self.entered:  # nothing was done in it
            return ()
        unseen = None
        if "forward" not in self.entered:
            whose = "" if self._model is None else " of the model that the monitor was given"
            unseen = f"no module{whose} was called in it (model.forward() is not seen)"
        elif "optimizer" in self.entered and "backward" not in self.entered:
            unseen = "an optimizer made a step in it and no backward was seen before"
        if unseen is not None:
            self._outside.clear()  # modules may have come into the model
            self._notices.warn_once("parts", f"the parts of a step are not known: {unseen}")
            return ()
        return tuple(boundaries)

    # -- what is listened to ----------------------------------------------------------------------

    def open_call(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], marked: set[str] | None = None
    ) -> object | None:
        """A module is called; see `scopes.Listener`."""
        if not self._may_enter() or not self._is_forward(module):
            return None
        return self if self._enter("forward") else None

    def close_call(self, opened: object) -> None:
        """That call has returned or raised."""
        self._leave("forward")

    def _is_forward(self, module: nn.Module) -> bool:
        if in_backward():
            return False
        model = self._model() if self._model is not None else None
        if model is None:
            return True
        if id(module) in self._outside:
            return False
        if self._is_of(model, module):
            return True
        if self._looked_inside:
            return False
        self._looked_inside = True  # once in a step: it takes milliseconds where there are thousands of modules
        try:
            self._inside = {id(one) for one in all_modules(model)}
            if self._is_of(model, module):
                return True
            self._outside.update(id(one) for one in all_modules(module) if id(one) not in self._inside)
        except Exception as error:
            self._open = False
            self._on_failure("measuring the parts of a step", error)
        return False

    def _is_of(self, model: nn.Module, module: nn.Module) -> bool:
        found: Any = module
        while found is not None:
            if found is model or id(found) in self._inside:
                return True
            children = found.__dict__.get("_modules") or {}
            found = next((children[name] for name in _WRAPPED if children.get(name) is not None), None)
        return False

    def open_run(self) -> bool:
        """The autograd engine is about to run."""
        return self._enter("backward")

    def close_run(self) -> None:
        """That run is over."""
        self._leave("backward")

    def _at_optimizer(self, then: Callable[[str], object], optimizer: Callable[[], Any]) -> None:
        if not self._optimizers or id(optimizer()) in self._optimizers:
            then("optimizer")

    def _may_enter(self) -> bool:
        """What lies within forward or backward is part of it; an optimizer may call both."""
        return self._open and self.within[-1:] in ([], ["optimizer"]) and os.getpid() == self._pid

    def _enter(self, part: str) -> bool:
        if not self._may_enter():
            return False
        if len(self._boundaries) >= MOST_BOUNDARIES:
            self._open, self._boundaries = False, []  # nothing of this step is kept
            self._notices.warn_once(
                "parts",
                f"the parts of a step are not known: it came to more than {MOST_BOUNDARIES // 2} of them "
                "(has the loop told where its steps end?)",
            )
            return False  # same: given up: leaving it does nothing
        self.within.append(part)
        self.entered[part] = self.entered.get(part, 0) + 1
        self._add(part)
        return True

    def _leave(self, part: str) -> None:
        if self._open and self.within[-1:] == [part]:
            self.within.pop()
            self._add(self.within[-1] if self.within else "other")

    def _add(self, part: str) -> None:
        try:
            mark = self._mark()
            if (mark.event is None) == (self._boundaries[0][1].event is None):  # else a graph is being captured
                self._boundaries.append((part, mark))
        except Exception as error:
            self._open = False
            self._on_failure("measuring the parts of a step", error)
