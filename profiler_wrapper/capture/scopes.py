"""Marks layers in the trace: brackets each call of each selected module with a named range.

The ranges are `torch._C._profiler._RecordFunctionFast`, a tenth of the cost of `record_function`.
Modules are held weakly and nothing is written on them.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.autograd.profiler as autograd_profiler
from torch import nn
from torch._C import _profiler
from torch.nn.parameter import UninitializedParameter

from profiler_wrapper.capture.compiled import CompiledModule, describe_compiled
from profiler_wrapper.capture.layers import (
    Layer,
    Root,
    RootLabels,
    Selection,
    all_parameters,
    class_name,
    find_roots,
    holders,
    is_compiled,
    is_part_of_a_model,
    module_paths,
    name_layers,
    selector,
    takes,
)
from profiler_wrapper.capture.requests import Requests
from profiler_wrapper.capture.routed_tokens import RoutedTokens, experts_in
from profiler_wrapper.capture.torch_state import (
    capturing,
    forwards_around,
    generation_phase,
    in_backward,
    is_tracing,
    keep_dynamo_off,
    query_tokens,
    recorder_is_taken,
)
from profiler_wrapper.errors import WrongUse, first_few, in_a_line, shown
from profiler_wrapper.trace.marks import ROOT_PATH, expert_number, format_mark

# --------------------------------------------------------------------------------------------------
# Listens where every call of every module passes: `torch.nn.Module.__call__`.
#
# While somebody listens, one function of ours stands in its place. Compared with hooks on the modules
# this leaves nothing on them, costs half, lies outside of their own hooks (an all-gather by FSDP2)
# and of a forward compiled in place, and closes whatever the exception.
#
# It also stays out of compiled code. Dynamo steps straight into `forward` if `Module.__call__` is the
# function that it knows, so ours is given to it; it skips our frames; and where it must trace
# `__call__` it finds an early return. Graphs, guards and cache keys are those without us, for what was
# compiled before, during or after.


class Listener:
    """Hears of calls of modules. Its methods must not raise, and are run outside of Dynamo."""

    def open_call(self, module: nn.Module, args: Any, kwargs: Any, marked: set[str] | None = None) -> object | None:
        """A module is about to be called. What this returns is given to the two below, unless it is None.

        `marked`: the names that listeners before this one gave that call in the trace; None: there are none.
        """
        return None

    def take_result(self, opened: Any, result: Any) -> None:
        """That call has returned this."""

    def close_call(self, opened: Any) -> None:
        """That call has returned or raised."""

    def end_marks(self) -> None:
        """A torch profiler is about to stop, whoever's it is: end what is open on this thread."""


# Code that Dynamo compiled may guard on this global, so it keeps its value when the last listener goes.
_plain_call: Any = nn.Module.__call__
_plain_stop: Any = autograd_profiler.profile.__exit__
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_listener: Listener | None = None  # the only one, or all of them behind one front
_listeners: tuple[Listener, ...] = ()
# same: the original is asked for beside it
_in_place = False  # whether ours is `Module.__call__`, or under somebody's who patched it later
_seen_by_tracer = False
_lock = threading.RLock()

# What Dynamo takes for the call of a module that nobody patched.
_KNOWN_TO_DYNAMO = (
    ("torch._dynamo.utils", "unpatched_nn_module_call"),
    ("torch._dynamo.variables.nn_module", "unpatched_nn_module_call"),
)
# Who else keeps the function it found when it was imported.
_KEPT = (*_KNOWN_TO_DYNAMO, ("torch.fx._symbolic_trace", "_orig_module_call"))


# The first parameter is `self` as in the original: torch's stack tracer reads it by name.
def _call(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    if _is_dynamo_compiling():
        return _plain_call(self, *args, **kwargs)
    listener = _listener
    if listener is None or is_tracing():
        return _plain_call(self, *args, **kwargs)
    opened = listener.open_call(self, args, kwargs)
    if opened is None:
        return _plain_call(self, *args, **kwargs)
    try:
        result = _plain_call(self, *args, **kwargs)
        listener.take_result(opened, result)
        return result
    finally:
        listener.close_call(opened)


class _All(Listener):
    """Several listeners as one: each inside the one before it."""

    def __init__(self, listeners: tuple[Listener, ...]) -> None:
        self._listeners = listeners

    def open_call(self, module: nn.Module, args: Any, kwargs: Any, marked: set[str] | None = None) -> object | None:
        names = set[str]() if marked is None else marked
        opened = [(one, one.open_call(module, args, kwargs, names)) for one in self._listeners]
        return [pair for pair in reversed(opened) if pair[1] is not None] or None

    def take_result(self, opened: list[tuple[Listener, object]], result: Any) -> None:
        for listener, its in opened:
            listener.take_result(its, result)

    def close_call(self, opened: list[tuple[Listener, object]]) -> None:
        for listener, its in opened:
            listener.close_call(its)


class BeforeFirstCall(_All):
    """Calls `action(module)`, which must not raise, before the first call of a module; who listens then hears of it.

    While it listens no profiler has been started: that initializes CUDA, and which devices may be chosen later.
    """

    def __init__(self, action: Callable[[nn.Module], None]) -> None:
        super().__init__(())
        self._action, self._once = action, threading.Lock()

    def open_call(self, module: nn.Module, args: Any, kwargs: Any, marked: set[str] | None = None) -> object | None:
        if in_backward() or capturing() or not self._once.acquire(blocking=False):
            return None
        stop_listening(self)
        before = _listeners
        self._action(module)
        self._listeners = tuple(one for one in _listeners if one not in before)
        return super().open_call(module, args, kwargs, marked)


def listen(listener: Listener) -> None:
    """Tell `listener` of every call of a module from now on, in all threads."""
    global _plain_call, _in_place
    with _lock:
        _keep_dynamo_out(type(listener))
        is_first = all(isinstance(one, BeforeFirstCall) for one in _listeners)
        if is_first and not isinstance(listener, BeforeFirstCall) and (waiting := _listeners):
            for one in waiting:  # the original is back for the moment
                stop_listening(one)
            listen(listener)
            _set_listeners((*_listeners, *waiting))
            return
        _set_listeners((*_listeners, listener))
        if not _in_place or vars(nn.Module)["__call__"] is _plain_call:  # or somebody has put the original back
            if not isinstance(listener, BeforeFirstCall):
                _let_stack_tracer_see_the_original()
            _plain_call = nn.Module.__call__
            _put(_call, instead_of=_plain_call, known_as=_KNOWN_TO_DYNAMO)
            _in_place = True
            _put_stop(_stop, instead_of=_plain_stop)


def stop_listening(listener: Listener) -> None:
    """Tell `listener` of no further call; with the last one, `Module.__call__` is as it was.

    Where somebody else has patched it over ours, ours stays under theirs and only passes calls on.
    """
    global _in_place
    with _lock:
        _set_listeners(tuple(one for one in _listeners if one is not listener))
        if not _listeners and vars(nn.Module)["__call__"] is _call:
            _put(_plain_call, instead_of=_call, known_as=_KEPT)
            _in_place = False
        if not _listeners:
            _put_stop(_plain_stop, instead_of=_stop)


# What is open when a recording ends, torch would end in memory that it has freed (see `session.OpenScopes`).
def _stop(profiler: Any, *error: Any) -> Any:
    if profiler.enabled:
        for listener in _listeners:
            listener.end_marks()
    return _plain_stop(profiler, *error)


def _let_stack_tracer_see_the_original() -> None:
    """Start and stop the tracer behind `with_stack` once, before ours takes the place of the original.

    It knows the call of a module by the code of `Module.__call__`, which it reads at its first start
    and never again: had that been ours, later profiles would have no `nn.Module:` events. About 1 ms.
    """
    global _seen_by_tracer
    if _seen_by_tracer or sys.getprofile() is not None or recorder_is_taken():
        return
    _seen_by_tracer = True  # same: only slower
    activities = {_profiler.ProfilerActivity.CPU}
    config = _profiler.ProfilerConfig(
        _profiler.ProfilerState.KINETO, False, False, True, False, False, _profiler._ExperimentalConfig()
    )
    torch._C._autograd._prepare_profiler(config, activities)
    torch._C._autograd._enable_profiler(config, activities)
    with suppress(RuntimeError):  # a name in sys.path that is no UTF-8; nobody has use for what was recorded here
        torch._C._autograd._disable_profiler()


def _set_listeners(listeners: tuple[Listener, ...]) -> None:
    global _listener, _listeners
    _listeners = listeners
    _listener = listeners[0] if len(listeners) == 1 else _All(listeners) if listeners else None


def _put(function: Any, *, instead_of: Any, known_as: tuple[tuple[str, str], ...]) -> None:
    nn.Module.__call__ = function  # type: ignore[method-assign]
    for module_name, attribute in known_as:
        module = sys.modules.get(module_name)
        if module is not None and getattr(module, attribute, None) is instead_of:
            setattr(module, attribute, function)


def _put_stop(function: Any, *, instead_of: Any) -> None:
    if vars(autograd_profiler.profile)["__exit__"] is instead_of:
        autograd_profiler.profile.__exit__ = function  # type: ignore[method-assign]


def _keep_dynamo_out(cls: type[Listener]) -> None:
    """Dynamo runs our frames as they are; below the listener's methods, everything."""
    keep_dynamo_off(_call, and_below=False)
    owners: tuple[type[Listener], ...] = (_All, cls)
    for owner in owners:
        for method in (owner.open_call, owner.take_result, owner.close_call):
            keep_dynamo_off(method, and_below=True)


_Range = torch._C._profiler._RecordFunctionFast

# A call that is running: its layer (`_Target`), the module called, its range in the trace, what takes its result.
_OpenCall: TypeAlias = list[Any]
_ENDED = nullcontext()
_PHASES = ("forward", "prefill", "decode", "verify")  # of a root's calls


@dataclass(frozen=True, slots=True)
class RootCall:
    """An outermost call of a root, outside of backward."""

    label: str  # the root's: "LlamaForCausalLM#0", or the name its user gave it
    phase: str  # forward, prefill, decode, verify
    grad_enabled: bool
    training: bool = False  # the module is in training mode
    in_request: bool = False
    samples: bool = False  # it takes a timestep: one of several calls that make an image


class LayerScopes(Listener):
    """Marks the layers of `model` while attached.

    Args:
        model: a module, several in a list or dict, a pipeline; None: each outermost module that is
            called is a root, found and named when it is first called.
        layers: which modules are layers, see `name_layers`.
        in_pipeline: `model` is a stage of a pipeline, whose layers may say which they are of the whole model.
        on_root_enter: called before an outermost call of a root, outside of its mark, on the calling thread. Not
            called for what backward recomputes.

    Raises:
        WrongUse: `model` holds no module, or `layers` is no selection.

    No method raises for a failure while marking: it is in `warnings`, and marking stops.
    """

    def __init__(
        self,
        model: object | None,
        *,
        layers: Selection = "auto",
        in_pipeline: bool = False,
        on_root_enter: Callable[[RootCall], None] | None = None,
    ) -> None:
        selector(layers)  # raises for what is none
        self.warnings: list[str] = []
        self._select = layers
        self.on_root_enter = on_root_enter
        self._labels = RootLabels()
        self._unnamed = self._roots_in(model, in_pipeline) if model is not None else ()
        self._finds_roots = not self._unnamed
        self._not_called: set[int] = set()  # ids of modules
        self._forward_called: dict[str, None] = {}  # names of layers, whose `forward` somebody called, not them
        self._attached = False
        self._entrances: dict[int, _Entrance] = {}  # by id of the module called
        self.calls = 0  # of layers, that were marked
        self._roots: dict[str, Callable[[], Root | None]] = {}  # by label; None: it is no more
        self._targets: dict[tuple[str, str], _Target] = {}  # by root and path, in model order
        self._plain: set[type] = set()  # classes that wrap nothing
        self._thread = _OpenCalls()
        self.requests = Requests(model, is_part=lambda module: id(module) in self._entrances)
        self._routed = RoutedTokens()

    def _roots_in(self, model: object, in_pipeline: bool) -> tuple[Root, ...]:
        try:
            return find_roots(model, self._labels, in_pipeline=in_pipeline)
        except WrongUse:
            raise
        except Exception as error:  # of the model's own code: a property of a pipeline, say
            self.warnings.append(
                f"the modules of {type(model).__name__} could not be listed ({in_a_line(error)}); "
                "the outermost modules that are called are taken instead"
            )
            return ()

    def attach(self) -> None:
        """Start marking. Does nothing if already attached."""
        if self._attached:
            return
        unnamed, self._unnamed = self._unnamed, ()
        for root in unnamed:
            self._roots[root.label] = _weakly(root)
            # What several roots share goes by its name in the first.
            new = [one for one in name_layers(root, self._select) if id(one.module) not in self._entrances]
            self._add_layers(root, new)
        if unnamed and len(self._targets) <= len(unnamed) and self._select not in ("auto", 0):
            self.warnings.append(f"layers={shown(self._select)} selects no module below the root")
        self._attached = True
        listen(self)
        self.requests.install()

    def detach(self) -> None:
        """Stop marking and leave no trace in the process. Does nothing if not attached."""
        if self._attached:
            self._attached = False
            self.requests.remove()
            stop_listening(self)
            self.end_marks()
            self._plain.clear()

    def let_models_go(self) -> None:
        """Hold no model any longer that was given and never attached to."""
        self._unnamed = ()

    @property
    def any_open(self) -> bool:
        """A mark of a running call is open on this thread, be it another one's, as of `mark`."""
        return any(isinstance(one, LayerScopes) and one._thread.open for one in _listeners)

    def end_marks(self) -> None:
        """End the marks of the calls that are running on this thread; the calls go on."""
        for opened in reversed(self._thread.open):
            _close(opened)

    def describe(self) -> list[dict[str, Any]]:
        """What is known of each layer, in model order, as plain data."""
        return [
            {
                "root": (mark := target.layer.mark).root,
                "path": mark.path,
                "raw_name": target.layer.raw_name,
                "class_name": mark.class_name,
                "kind": mark.kind,
                "own_parameters": target.layer.own_parameters,
                "parameters": target.layer.parameters,
                "compiled": target.compiled,
                "shared": "shared" in mark.flags,
                **self._routed.of(target),
            }
            for target in self._targets.values()
        ]

    def said(self) -> list[str]:
        """The warnings, and one of what was called so that it has no row."""
        names = first_few([*self._forward_called], 3)
        what = f"forward of {names} was called directly, which has no row: its time counts for the layer around it"
        return [*self.warnings, *([f"{what}. Call layer(x), not layer.forward(x)"] if names else [])]

    def roots(self) -> tuple[Root, ...]:
        """The models known so far, those that are still there."""
        named = (reference() for reference in self._roots.values())
        return (*self._unnamed, *(root for root in named if root is not None))

    def parameters(self) -> list[nn.Parameter]:
        """Those of these models."""
        return [parameter for root in self.roots() for parameter in all_parameters(root.module)]

    def expect(self, module: nn.Module) -> None:
        """`module` is about to be called: what is known of a root is known from now on, if it is one."""
        if id(module) not in self._entrances:
            self._first_seen(module)

    def is_part(self, module: nn.Module) -> bool | None:
        """Whether `module` lies in a model that was given, and is none itself; None where that is not known."""
        entrance = self._entrances.get(id(module))
        if self._finds_roots or entrance is None:
            return None
        mark = entrance.target.layer.mark
        return mark.path not in (ROOT_PATH, mark.root)

    def describe_compiled(self) -> dict[str, Any]:
        """What is known of the compiled code that ran in the layers, as plain data."""
        compiled = [
            CompiledModule(entrance.target.layer.mark.root, entrance.target.layer.mark.path, module)
            for entrance in self._entrances.values()
            if entrance.target.compiled and (module := entrance.module()) is not None
        ]
        return describe_compiled(compiled, {root.label: module_paths(root) for root in self.roots()})

    def open_call(self, module: nn.Module, args: Any, kwargs: Any, marked: set[str] | None = None) -> _OpenCall | None:
        try:
            open_here = self._thread.open
            if id(module) in self._not_called and not in_backward():  # where a checkpoint calls forward itself
                self._not_called.discard(id(module))
                self._look_for_forwards()
            entrance = self._entrances.get(id(module))
            if entrance is None:
                if type(module) in self._plain and (open_here or not self._finds_roots):
                    return None
                entrance = self._first_seen(module)
                if entrance is None:
                    return None
            target, take = entrance.target, None
            if open_here and open_here[-1][0] is target and open_here[-1][1] is not module:
                return None  # what wraps this module has the mark
            if target.is_root:
                label, phase = target.layer.mark.root, generation_phase(args, kwargs)
                outermost = not open_here and not in_backward()
                if outermost:
                    self.requests.look(label)
                request = self.requests.here.request
                if request is not None:
                    phase = request.phase(label, phase)
                if outermost and self.on_root_enter is not None:
                    grad_enabled, in_request = torch.is_grad_enabled(), request is not None
                    self.on_root_enter(
                        RootCall(label, phase, grad_enabled, module.training, in_request, target.samples)
                    )
                    if not self._attached:
                        return None
                if outermost and request is not None:
                    take = request.caches.call(label, phase, kwargs, query_tokens(args, kwargs))
                compiled = is_compiled(module)
                name = target.names[phase, compiled]
            else:
                compiled = entrance.compiled or module._compiled_call_impl is not None
                name = target.compiled_name if compiled else target.name
            if compiled:
                target.compiled = True
            if target.experts:
                self._routed.hold(target, target.experts, args, kwargs)
            opened: _OpenCall = [target, module, _begin_mark(name, marked), take]
            open_here.append(opened)
            self.calls += 1
            return opened
        except Exception as error:
            self._give_up(error)
            return None

    def take_result(self, opened: _OpenCall, result: Any) -> None:
        try:
            if opened[3] is not None:
                opened[3](result)
        except Exception as error:
            self._give_up(error)

    def close_call(self, opened: _OpenCall) -> None:
        opened[3] = None  # which may hold what the call was given
        try:
            open_here = self._thread.open
            if open_here and open_here[-1] is opened:
                open_here.pop()
            else:  # a generator or a greenlet left what it had called
                while any(one is opened for one in open_here):
                    _close(open_here.pop())
            _close(opened)
        except Exception as error:
            self._give_up(error)

    def _first_seen(self, module: nn.Module) -> _Entrance | None:
        """A module not known yet: a new wrapper of a known one, a new root, or none of ours."""
        inner = holders(module)[-1]
        if inner is module:
            self._plain.add(type(module))
        if inner is not module and (known := self._entrances.get(id(inner))) is not None:
            return self._add_entrance(module, known.target)
        if not self._finds_roots or self._thread.open or in_backward() or is_part_of_a_model(module):
            return None
        root = Root(self._labels.take(module), module)
        self._roots[root.label] = _weakly(root)
        self._add_layers(root, name_layers(root, self._select))
        self._look_for_forwards()
        if not any(True for _ in all_parameters(module)):
            # A loss made anew for every step is one row, not a thousand.
            weakref.finalize(module, self._labels.give_back, root.label).atexit = False
        return self._entrances[id(module)]

    def _look_for_forwards(self) -> None:
        running = [one[0] for one in self._thread.open]
        for module in forwards_around(_call.__code__):
            target = entrance.target if (entrance := self._entrances.get(id(module))) else None
            if target not in running if target else self._finds_roots and not running:
                path = target.layer.mark.path if target else ROOT_PATH
                self._forward_called[class_name(module) if path == ROOT_PATH else path] = None

    def _add_layers(self, root: Root, layers: Iterable[Layer]) -> None:
        self._not_called.update(module_paths(root))
        for layer in layers:
            target = _Target(layer)
            self._targets[layer.mark.root, layer.mark.path] = target
            for holder in layer.holders:
                self._add_entrance(holder, target)

    def _add_entrance(self, module: nn.Module, target: _Target) -> _Entrance:
        key = id(module)
        self._entrances[key] = _Entrance(target, is_compiled(module), weakref.ref(module, partial(self._forget, key)))
        return self._entrances[key]

    def _forget(self, key: int, reference: object) -> None:
        if key in self._entrances and self._entrances[key].module is reference:
            del self._entrances[key]

    def _give_up(self, error: Exception) -> None:
        self._entrances.clear()
        self._finds_roots = False
        self.warnings.append(f"layers are no longer marked, since marking one failed: {in_a_line(error)}")


class _Target:
    """A layer as its calls need it: the names of its marks, ready to be written."""

    __slots__ = ("compiled", "compiled_name", "experts", "is_root", "layer", "name", "names", "samples")

    def __init__(self, layer: Layer) -> None:
        is_of_all = layer.mark.kind == "expert" and expert_number(layer.mark.path) is None
        self.experts = experts_in(layer.module) if is_of_all else 0
        self.layer = replace(layer, holders=())
        self.is_root = layer.mark.path == ROOT_PATH
        self.compiled = False
        self.samples = self.is_root and "timestep" in takes(layer.module)
        phases = _PHASES if self.is_root else _PHASES[:1]
        self.names = {(phase, compiled): self._name(phase, compiled) for phase in phases for compiled in (False, True)}
        self.name, self.compiled_name = self.names["forward", False], self.names["forward", True]

    def _name(self, phase: str, compiled: bool) -> str:
        mark = self.layer.mark
        flags = ("" if phase == "forward" else phase, "compiled" if compiled else "", *mark.flags)
        return format_mark(replace(mark, flags=tuple(filter(None, flags))))


@dataclass(slots=True)
class _Entrance:
    """One module through which a layer is entered: the plain one or one of its wrappers."""

    target: _Target
    compiled: bool
    module: weakref.ref[nn.Module]


def _weakly(root: Root) -> Callable[[], Root | None]:
    module, rest = weakref.ref(root.module), partial(Root, root.label, named=root.named, in_pipeline=root.in_pipeline)
    return lambda: None if (alive := module()) is None else rest(alive)


def _begin_mark(name: str, marked: set[str] | None) -> Any:
    """Enter a range; none, if somebody else of us has marked this call with that name already."""
    if marked is not None:
        if name in marked:
            return nullcontext()
        marked.add(name)
    mark = _Range(name)  # anew for each call: one entered twice raises
    mark.__enter__()
    return mark


def _close(opened: _OpenCall) -> None:
    mark, opened[2] = opened[2], _ENDED
    try:
        mark.__exit__(None, None, None)
    except RuntimeError:  # of a range that began while no profiler was on, and is left while one is
        return


class _OpenCalls(threading.local):
    """The calls that are running on this thread, outermost first."""

    def __init__(self) -> None:
        self.open: list[_OpenCall] = []


# --------------------------------------------------------------------------------------------------
# What a loop calls first: is it a part of a model, was there backward after it, do its parameters change?


class FirstCall(Listener):
    """Remembers the first module called while it listens; then it listens no more."""

    def __init__(self) -> None:
        self.module: Callable[[], nn.Module | None] = lambda: None  # None: none was called, or it is no more
        self._gradient: object = None
        self._version: tuple[int, int] | None = None

    @property
    def had_backward(self) -> bool:
        """Its parameters' gradients have changed since it was called."""
        return _gradient_state(self.module()) != self._gradient

    def updated(self) -> bool:
        """Its parameters have changed since this was last asked: a step of an optimizer that called no hook.

        False where another one took the place of the first parameter.
        """
        parameter, before = _learning(self.module()), self._version
        now = self._version = None if parameter is None else (id(parameter), parameter._version)
        return before is not None and now is not None and before[0] == now[0] and before[1] < now[1]

    def open_call(self, module: nn.Module, args: Any, kwargs: Any, marked: set[str] | None = None) -> None:
        stop_listening(self)
        if self.module() is None:  # else another thread's call came first
            self.module, self._gradient = weakref.ref(module), _gradient_state(module)


def _learning(module: nn.Module | None) -> nn.Parameter | None:
    """The first parameter that learns, of those that can be asked.

    A call by `torch.func.functional_call` may bring tensors that are no leaves: torch warns of their gradients.
    """
    for parameter in all_parameters(module) if module is not None else ():
        if isinstance(parameter, UninitializedParameter) or not parameter.requires_grad:
            continue
        if parameter.is_leaf and not parameter.is_inference():
            return parameter
    return None


def _gradient_state(module: nn.Module | None) -> tuple[int, int] | None:
    """Differs after a backward: what that parameter has as its gradient, and which version of it."""
    parameter = _learning(module)
    gradient = None if parameter is None else parameter.grad
    return None if gradient is None or gradient.is_inference() else (id(gradient), gradient._version)


def is_part(module: nn.Module) -> bool:
    """Another module has it as a child, or a list holds it beside others of its class.

    Asks the garbage collector, so it takes some 50 ms in a process with 300,000 objects.
    """
    for holder in gc.get_referrers(module):
        if type(holder) is list and len(holder) > 1 and all(type(item) is type(module) for item in holder):
            return True
        if type(holder) is dict and _are_children(holder):
            return True
    return False


def _are_children(holder: dict[Any, Any]) -> bool:
    """Whether it is the `_modules` of a module: nothing but modules under names, and a module refers to it."""
    if not all(isinstance(key, str) and isinstance(one, (nn.Module, type(None))) for key, one in holder.items()):
        return False
    return any(
        # Python 3.11 and later keep attributes in the object itself.
        isinstance(owner, nn.Module) or (type(owner) is dict and owner.get("_modules") is holder)
        for owner in gc.get_referrers(holder)
    )
