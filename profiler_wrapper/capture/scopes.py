"""Marks layers in the trace: brackets each call of each selected module with a named range.

The ranges are `torch._C._profiler._RecordFunctionFast`, a tenth of the cost of `record_function`.
Modules are held weakly and nothing is written on them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn

from profiler_wrapper.capture import calls
from profiler_wrapper.capture.compiled_layers import MarkedModule, describe_compiled
from profiler_wrapper.capture.layers import Layer, Root, RootLabels, Selection, check_selection, find_roots, name_layers
from profiler_wrapper.capture.phases import generation_phase, in_backward
from profiler_wrapper.capture.wrappers import all_parameters, holders, is_compiled, is_part_of_a_model
from profiler_wrapper.errors import WrongUse
from profiler_wrapper.recording.marks import ROOT_PATH, format_mark

_Range = torch._C._profiler._RecordFunctionFast

# A call that is running: its layer (`_Target`), the module called, its range in the trace, its `RootCall` if it is one.
_OpenCall: TypeAlias = list[Any]
_ENDED = nullcontext()


@dataclass(frozen=True, slots=True)
class RootCall:
    """An outermost call of a root, outside of backward."""

    label: str  # the root's: "LlamaForCausalLM#0", or the name its user gave it
    phase: str  # forward, prefill, decode
    grad_enabled: bool


class LayerScopes:
    """Marks the layers of `model` while attached.

    Args:
        model: a module, several in a list or dict, a pipeline; None: each outermost module that is
            called is a root, found and named when it is first called.
        layers: which modules are layers, see `name_layers`.
        in_pipeline: `model` is a stage of a pipeline, whose layers may say which they are of the whole model.
        on_root_enter, on_root_exit: called before and after an outermost call of a root, outside of
            its mark, on the calling thread. Not called for what backward recomputes.

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
        on_root_exit: Callable[[RootCall], None] | None = None,
    ) -> None:
        check_selection(layers)
        self.warnings: list[str] = []
        self._select = layers
        self._on_root_enter = on_root_enter
        self._on_root_exit = on_root_exit
        self._labels = RootLabels()
        roots = self._roots_in(model) if model is not None else ()
        self._unnamed = tuple(replace(root, in_pipeline=True) for root in roots) if in_pipeline else roots
        self._given = bool(roots)
        self._finds_roots = not roots
        self._attached = False
        self._entrances: dict[int, _Entrance] = {}  # by id of the module called
        self._alive: dict[int, weakref.ref[nn.Module]] = {}
        self._roots: dict[str, tuple[weakref.ref[nn.Module], Root]] = {}  # by label; what else is known of it
        self._targets: dict[tuple[str, str], _Target] = {}  # by root and path, in model order
        self._plain: set[type] = set()  # classes that wrap nothing
        self._thread = _OpenCalls()

    def _roots_in(self, model: object) -> tuple[Root, ...]:
        try:
            return find_roots(model, self._labels)
        except WrongUse:
            raise
        except Exception as error:  # of the model's own code: a property of a pipeline, say
            self.warnings.append(
                f"the modules of {type(model).__name__} could not be listed ({type(error).__name__}: {error}); "
                "the outermost modules that are called are taken instead"
            )
            return ()

    def attach(self) -> None:
        """Start marking. Does nothing if already attached."""
        if self._attached:
            return
        unnamed, self._unnamed = self._unnamed, ()
        for root in unnamed:
            self._roots[root.label] = weakref.ref(root.module), _without_module(root)
            # What several roots share goes by its name in the first.
            self._add_layers(one for one in name_layers(root, self._select) if id(one.module) not in self._entrances)
        if unnamed and len(self._targets) <= len(unnamed) and self._select not in ("auto", 0):
            self.warnings.append(f"layers={self._select!r} selects no module below the root")
        self._attached = True
        calls.listen(self)

    def detach(self) -> None:
        """Stop marking and leave no trace in the process. Does nothing if not attached."""
        if self._attached:
            self._attached = False
            calls.stop_listening(self)
            self.end_marks()
            self._plain.clear()

    def let_models_go(self) -> None:
        """Hold no model any longer that was given and never attached to."""
        self._unnamed = ()

    def end_marks(self) -> None:
        """End the marks of the calls that are running on this thread; the calls go on."""
        for opened in reversed(self._thread.open):
            _close(opened)

    def describe(self) -> list[dict[str, Any]]:
        """What is known of each layer, in model order, as plain data."""
        return [target.description() for target in self._targets.values()]

    def roots(self) -> tuple[Root, ...]:
        """The models known so far, those that are still there."""
        alive = ((reference(), root) for reference, root in self._roots.values())
        return (*self._unnamed, *(replace(root, module=module) for module, root in alive if module is not None))

    def is_part(self, module: nn.Module) -> bool | None:
        """Whether `module` lies in a model that was given, and is none itself; None where that cannot be told."""
        entrance = self._entrances.get(id(module))
        if not self._given or entrance is None:
            return None
        mark = entrance.target.layer.mark
        return mark.path not in (ROOT_PATH, mark.root)

    def describe_compiled(self) -> dict[str, Any]:
        """What is known of the compiled code that ran in the layers, as plain data."""
        live = ((self._alive[key](), entrance.target) for key, entrance in self._entrances.items())
        return describe_compiled(
            MarkedModule(
                target.layer.mark.root,
                target.layer.mark.path,
                module,
                target.compiled,
                self._roots[target.layer.mark.root][1].in_pipeline,
            )
            for module, target in live
            if module is not None
        )

    def open_call(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], marked: set[str] | None = None
    ) -> _OpenCall | None:
        """A module is about to be called (see `calls.Listener`)."""
        try:
            open_here = self._thread.open
            entrance = self._entrances.get(id(module))
            if entrance is None:
                if type(module) in self._plain and (open_here or not self._finds_roots):
                    return None
                entrance = self._first_seen(module)
                if entrance is None:
                    return None
            target = entrance.target
            if open_here and open_here[-1][0] is target and open_here[-1][1] is not module:
                return None  # what wraps this module has the mark
            if target.is_root:
                return self._open_root(entrance, module, args, kwargs, marked)
            name = target.name
            if entrance.compiled or module._compiled_call_impl is not None:
                target.compiled, name = True, target.compiled_name
            mark = _begin_mark(name, marked)
            opened: _OpenCall = [target, module, mark, None]
            open_here.append(opened)
            return opened
        except Exception as error:
            self._give_up(error)
            return None

    def close_call(self, opened: _OpenCall) -> None:
        """That call has returned or raised."""
        try:
            open_here = self._thread.open
            if open_here and open_here[-1] is opened:
                open_here.pop()
                try:
                    opened[2].__exit__(None, None, None)
                except RuntimeError:  # see `_close`
                    opened[2] = _ENDED
            else:
                self._close_through(opened)
            if opened[3] is not None and self._on_root_exit is not None and self._attached:
                self._on_root_exit(opened[3])
        except Exception as error:
            self._give_up(error)

    def _open_root(
        self,
        entrance: _Entrance,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        marked: set[str] | None,
    ) -> _OpenCall | None:
        phase = generation_phase(args, kwargs)
        root_call = None
        if not self._thread.open and not in_backward():
            root_call = RootCall(entrance.target.layer.mark.root, phase, torch.is_grad_enabled())
            if self._on_root_enter is not None:
                self._on_root_enter(root_call)
                if not self._attached:
                    return None
        target = entrance.target
        compiled = is_compiled(module)
        target.compiled |= compiled
        mark = _begin_mark(target.root_names[phase, compiled], marked)
        self._thread.open.append([target, module, mark, root_call])
        return self._thread.open[-1]

    def _close_through(self, opened: _OpenCall) -> None:
        open_here = self._thread.open
        while any(one is opened for one in open_here):
            _close(open_here.pop())
        _close(opened)

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
        self._roots[root.label] = weakref.ref(module), _without_module(root)
        self._add_layers(name_layers(root, self._select))
        if not any(True for _ in all_parameters(module)):
            # A loss made anew for every step is one row, not a thousand.
            weakref.finalize(module, self._labels.give_back, root.label).atexit = False
        return self._entrances[id(module)]

    def _add_layers(self, layers: Iterable[Layer]) -> None:
        for layer in layers:
            target = _Target(layer)
            self._targets[layer.mark.root, layer.mark.path] = target
            for holder in layer.holders:
                self._add_entrance(holder, target)

    def _add_entrance(self, module: nn.Module, target: _Target) -> _Entrance:
        key = id(module)
        entrance = self._entrances[key] = _Entrance(target, is_compiled(module))
        self._alive[key] = weakref.ref(module, partial(self._forget, key))
        return entrance

    def _forget(self, key: int, reference: object) -> None:
        if self._alive.get(key) is reference:
            del self._alive[key], self._entrances[key]

    def _give_up(self, error: Exception) -> None:
        self._entrances.clear()
        self._alive.clear()
        self._finds_roots = False
        self.warnings.append(f"layers are no longer marked, since marking one failed: {type(error).__name__}: {error}")


class _Target:
    """A layer as its calls need it: the names of its marks, ready to be written."""

    __slots__ = ("compiled", "compiled_name", "is_root", "layer", "name", "root_names")

    def __init__(self, layer: Layer) -> None:
        self.layer = replace(layer, holders=())
        self.is_root = layer.mark.path == ROOT_PATH
        self.compiled = False
        self.name = self._name()
        self.compiled_name = self._name("compiled")
        self.root_names: dict[tuple[str, bool], str] = {}
        for phase in ("forward", "prefill", "decode") if self.is_root else ():
            flags = () if phase == "forward" else (phase,)
            self.root_names[phase, False] = self._name(*flags)
            self.root_names[phase, True] = self._name(*flags, "compiled")

    def _name(self, *flags: str) -> str:
        return format_mark(replace(self.layer.mark, flags=flags + self.layer.mark.flags))

    def description(self) -> dict[str, Any]:
        layer, mark = self.layer, self.layer.mark
        return {
            "root": mark.root,
            "path": mark.path,
            "raw_name": layer.raw_name,
            "class_name": mark.class_name,
            "kind": mark.kind,
            "own_parameters": layer.own_parameters,
            "parameters": layer.parameters,
            "compiled": self.compiled,
            "shared": "shared" in mark.flags,
        }


class _Entrance:
    """One module through which a layer is entered: the plain one or one of its wrappers."""

    __slots__ = ("compiled", "target")

    def __init__(self, target: _Target, compiled: bool) -> None:
        self.target = target
        self.compiled = compiled


_NOTHING = nn.Module()


def _without_module(root: Root) -> Root:
    """Modules are held weakly."""
    return replace(root, module=_NOTHING)


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
    with suppress(RuntimeError):  # of a range that began while no profiler was on, and is left while one is
        mark.__exit__(None, None, None)


class _OpenCalls(threading.local):
    """The calls that are running on this thread, outermost first."""

    def __init__(self) -> None:
        self.open: list[_OpenCall] = []
