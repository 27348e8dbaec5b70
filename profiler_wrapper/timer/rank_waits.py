"""Where this process waits for other ranks in torch's Python code, without a profiler.

Torch has no hook for it, so while somebody listens a few functions of torch's classes are wrapped, no object is:

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
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch

from profiler_wrapper.capture.recorder import is_compiling
from profiler_wrapper.capture.scopes import keep_dynamo_off
from profiler_wrapper.trace.spans import rank_list_text

# Names of torch's OpType, by number. FSDP's reduce-scatter has none with gloo.
_OPERATIONS = {
    0: "broadcast",
    1: "all_reduce",
    2: "all_reduce",
    3: "reduce",
    4: "all_gather",
    5: "all_gather",
    6: "all_gather",
    7: "gather",
    8: "scatter",
    9: "reduce_scatter",
    10: "all_to_all",
    11: "all_to_all",
    12: "send",
    13: "recv",
    14: "recv",
    15: "barrier",
    16: "reduce_scatter",
    18: "all_reduce",
    19: "reduce_scatter",
}
_OTHER = "wait"
_OF_A_PAIR = ("send", "recv")


class Told(NamedTuple):
    """What is known of a wait.

    Attributes:
        name: of the collective, as `all_gather`; `wait` where it is not known.
        group: the ranks that take part, as `"0-2,5"`; None: not known.
        bytes: that the whole of it is long, as the trace counts them; None: not known.
    """

    name: str = _OTHER
    group: str | None = None
    bytes: int | None = None


class Listener(Protocol):
    """Is told of waits, on the thread that waits. Its methods must not raise."""

    def open_wait(self) -> object | None:
        """A wait begins. What this returns is given to `close_wait`, unless it is None."""

    def close_wait(self, opened: Any, told: Told) -> None:
        """That one is over."""


class _Here(threading.local):
    inside = False  # a wait, or what is told as one
    described: Callable[[str], Told] | None = None  # what FSDP knows of the collective of that name


class _Patch(NamedTuple):
    module: str
    owner: str  # a class in it; "": itself
    name: str
    wrap: Callable[[Any], Any]


_here = _Here()
_listeners: tuple[Listener, ...] = ()
_in_place: dict[_Patch, tuple[Any, Any, Any]] = {}  # -> owner, what was there, ours
_lock = threading.RLock()


def listen(listener: Listener) -> None:
    """Tell `listener` of waits. To be called again when torch's modules may have been imported since; that is quick."""
    global _listeners
    if listener in _listeners and len(_in_place) == len(_PATCHES):
        return
    with _lock:
        if listener not in _listeners:
            _listeners = (*_listeners, listener)
        for patch in _PATCHES:
            if patch not in _in_place and patch.module in sys.modules:
                _put(patch)


def stop_listening(listener: Listener) -> None:
    """With the last one all is as it was; where somebody has wrapped ours since, it stays there and does nothing."""
    global _listeners
    with _lock:
        _listeners = tuple(one for one in _listeners if one is not listener)
        if _listeners:
            return
        for patch, (owner, original, ours) in list(_in_place.items()):
            if vars(owner).get(patch.name) is ours:
                setattr(owner, patch.name, original)
                del _in_place[patch]


def _put(patch: _Patch) -> None:
    module = sys.modules[patch.module]
    owner = getattr(module, patch.owner, None) if patch.owner else module
    original = None if owner is None else vars(owner).get(patch.name)
    if original is None:
        return
    ours = functools.wraps(original)(patch.wrap(getattr(owner, patch.name)))
    keep_dynamo_off(ours, and_below=False)
    setattr(owner, patch.name, ours)
    _in_place[patch] = owner, original, ours


# --- what takes the place of torch's functions ---


def _waiting(original: Any, call: tuple[Any, ...], options: Mapping[str, Any], told: Callable[[], Told]) -> Any:
    """The call, which is a wait."""
    opened = _open()
    _here.inside = True
    try:
        return original(*call, **options)
    finally:
        _here.inside = False
        _close(opened, told)


def _open() -> list[tuple[Listener, object | None]]:
    return [(one, one.open_wait()) for one in _listeners]


def _close(opened: list[tuple[Listener, object | None]], told: Callable[[], Told]) -> None:
    for listener, its in opened:
        if its is not None:
            listener.close_wait(its, told())


def _passes() -> bool:
    """Nobody is to be told of it."""
    return is_compiling() or not _listeners or _here.inside


def _work_wait(original: Any) -> Any:
    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _passes():
            return original(self, *args, **kwargs)
        return _waiting(original, (self, *args), kwargs, lambda: _told_of(self))

    return wait


def _tensor_wait(original: Any) -> Any:
    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "completed", False) or _passes():
            return original(self, *args, **kwargs)
        return _waiting(original, (self, *args), kwargs, lambda: Told(group=_only_group()))

    return wait


def _unshard(original: Any) -> Any:
    def unshard(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _passes():
            return original(self, *args, **kwargs)
        if not _blocks(getattr(self, "device", None)):
            return _hidden(original, (self, *args), kwargs)
        return _described(original, (self, *args), kwargs, lambda _: _gather_of(self))

    return unshard


def _wait_for_unshard(original: Any) -> Any:
    def wait_for_unshard(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not getattr(self, "_all_gather_result", None) or _passes():
            return original(self, *args, **kwargs)
        told = _gather_of(self)
        if told.group is None:  # a rank alone
            return original(self, *args, **kwargs)
        if _blocks(getattr(self, "device", None)):
            return _described(original, (self, *args), kwargs, lambda _: told)
        return _waiting(original, (self, *args), kwargs, lambda: told)

    return wait_for_unshard


def _reduction(original: Any) -> Any:
    names = _parameters_of(original)

    def foreach_reduce(*args: Any, **kwargs: Any) -> Any:
        if _passes():
            return original(*args, **kwargs)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if not _blocks(given.get("device")):
            return _hidden(original, args, kwargs)
        return _described(original, args, kwargs, lambda name: _reduction_of(given, name))

    return foreach_reduce


def _hidden(original: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """On a stream of its own, which others wait for later."""
    _here.inside = True
    try:
        return original(*args, **kwargs)
    finally:
        _here.inside = False


def _described(original: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], describe: Callable[[str], Told]) -> Any:
    before, _here.described = _here.described, describe
    try:
        return original(*args, **kwargs)
    finally:
        _here.described = before


# --- what is known of a wait ---


def _told_of(work: Any) -> Told:
    try:
        name = _OPERATIONS.get(int(work._get_op_type()), _OTHER)
        if _here.described is not None:
            return _here.described(name)
        return Told(name, None if name in _OF_A_PAIR else _only_group())
    except Exception:  # of a version that has it otherwise
        return Told()


def _gather_of(group: Any) -> Told:
    """Of FSDP's parameters that are gathered together."""
    try:
        taking_part = group._all_gather_process_group
        if taking_part.size() < 2:
            return Told("all_gather")
        size = _elements(group.fsdp_params) * group.mesh_info.shard_mesh_size
        return Told("all_gather", _ranks_of(taking_part), size * _type_of(group.fsdp_params[0]).itemsize)
    except Exception:  # one that is not sharded, or of a version that has it otherwise
        return Told("all_gather")


def _reduction_of(given: Mapping[str, Any], name: str) -> Told:
    """Of the gradients that FSDP reduces together: scattered, then, of replicas, summed."""
    try:
        parameters, scattered_in = given["fsdp_params"], given["reduce_scatter_group"]
        size = _elements(parameters) * (given["reduce_dtype"] or _type_of(parameters[0])).itemsize
        if name == "all_reduce":
            return Told(name, _ranks_of(given["all_reduce_group"]), size)
        return Told("reduce_scatter", _ranks_of(scattered_in), size * scattered_in.size())
    except Exception:  # of a version that has it otherwise
        return Told(name)


def _parameters_of(function: Any) -> tuple[str, ...]:
    """Their names, by which versions of torch agree; their places they do not."""
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return ()


def _elements(parameters: Any) -> int:
    """That a rank has of them, padding included."""
    return sum(parameter._sharded_param_data.numel() for parameter in parameters)


def _type_of(parameter: Any) -> torch.dtype:
    """In which it is gathered."""
    found: torch.dtype = parameter.param_dtype or parameter.orig_dtype
    return found


def _blocks(device: Any) -> bool:
    """Whether the process itself waits, and not a stream."""
    return getattr(device, "type", None) == "cpu"


def _ranks_of(group: Any) -> str:
    return _text_of(tuple(torch.distributed.get_process_group_ranks(group)))


def _only_group() -> str | None:
    """The group of a job that has one."""
    try:
        groups = torch.distributed.distributed_c10d._world.pg_names
        return _ranks_of(next(iter(groups))) if len(groups) == 1 else None
    except Exception:  # of a version that has it otherwise, or there is no group any more
        return None


@functools.lru_cache(maxsize=256)
def _text_of(ranks: tuple[int, ...]) -> str:
    return rank_list_text(ranks)


_FSDP = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
_PATCHES = (
    _Patch("torch._C._distributed_c10d", "Work", "wait", _work_wait),
    _Patch("torch.distributed._functional_collectives", "AsyncCollectiveTensor", "trigger_wait", _tensor_wait),
    _Patch("torch.distributed._functional_collectives", "AsyncCollectiveTensor", "wait", _tensor_wait),
    _Patch(_FSDP, "FSDPParamGroup", "unshard", _unshard),
    _Patch(_FSDP, "FSDPParamGroup", "wait_for_unshard", _wait_for_unshard),
    _Patch(_FSDP, "", "foreach_reduce", _reduction),
)

# Compiled code comes to a wait where it breaks: Dynamo would compile all of these, and the listeners.
for _around in (_waiting, _hidden, _described):
    keep_dynamo_off(_around, and_below=False)
for _beside in (_open, _close, _passes, _blocks, _gather_of):
    keep_dynamo_off(_beside, and_below=True)
