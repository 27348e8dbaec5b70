"""Remembers which modules every kernel of a compiled graph works for, as Inductor generates it.

Inductor calls `set_kernel_post_grad_provenance_tracing` once per kernel call it writes, in the order
of the calls, whatever its configuration. We stand before it and note the kernel's name and modules.
The notes, plain tuples, become an attribute of the `CompiledFxGraph`, are pickled with it and so come
back from Inductor's caches. Nothing else changes: no configuration, no cache key, no generated code.

Nothing here imports torch, and nothing here breaks a compilation: a graph whose notes fail has none.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterable
from types import FrameType, ModuleType
from typing import Any, NamedTuple

from profiler_wrapper.capture import compiled_nodes as nodes
from profiler_wrapper.capture.post_import import after_import
from profiler_wrapper.capture.switch import is_off

_ATTRIBUTE = "_profiler_wrapper_kernels"
_TRACING = "set_kernel_post_grad_provenance_tracing"
_VERSION = 2  # of what is pickled with a graph

MADE_WITHOUT_US = (
    "their code comes from Inductor's cache, where a process without profiler_wrapper had put it "
    "(TORCHINDUCTOR_CACHE_DIR set to a new directory has it made again)"
)
UNCHECKED = "their code comes from a cache, and for which modules cannot be checked"
OTHER_MODULES = "one piece of code, from Inductor's cache, serves several places of the model"


class Kernel(NamedTuple):
    """One call of a kernel."""

    name: str
    is_extern: bool  # a call of a library, not generated code
    phase: str  # forward, backward, recompute
    modules: tuple[nodes.Module, ...]


class _Here(threading.local):
    """What this thread is compiling."""

    def __init__(self) -> None:
        self.failure: str | None = None  # of a note since the last graph was finished
        self.fresh: int | None = None  # the id of the graph finished last, until it is registered


_here = _Here()
_graphs: dict[str, tuple[Kernel, ...] | str] = {}  # by cache key; or why nothing is known
_traced: dict[str, frozenset[nodes.Module]] = {}  # by cache key: whom Dynamo saw at work in it
_unavailable: str | None = None


def install() -> None:
    """Begin to remember, from when Inductor is imported; done when this package is imported."""
    if is_off():
        return
    after_import("torch._inductor.debug", _guarded(_stand_before_tracing))
    after_import("torch._inductor.output_code", _guarded(_stand_around_graphs))


def known_graphs() -> dict[str, tuple[Kernel, ...] | str]:
    """The kernel calls of each compiled graph by its cache key, or why they are not known."""
    return dict(_graphs)


def traced_modules(key: str) -> frozenset[nodes.Module]:
    """The modules that ran when the graph of this cache key was traced, those whose kernels are all gone included.

    Empty for a graph of the backward, and where it is not known.
    """
    return _traced.get(key, frozenset())


def why_unavailable() -> str | None:
    """Why nothing can be known with this version of torch."""
    return _unavailable


def _guarded(patch: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    def when_imported(module: ModuleType) -> None:
        global _unavailable
        try:
            patch(module)
        except Exception as error:
            _unavailable = f"this version of torch is not known ({type(error).__name__}: {error})"

    return when_imported


# -- while Inductor generates code ------------------------------------------------------------------


def _stand_before_tracing(debug: ModuleType) -> None:
    original = getattr(debug, _TRACING)

    @functools.wraps(original)
    def tracing(*args: Any, **kwargs: Any) -> Any:
        _note_kernel(*args, **kwargs)
        return original(*args, **kwargs)

    holders = [m for name, m in sys.modules.items() if m is not None and name.startswith("torch._inductor")]
    for module in (debug, *holders):
        if vars(module).get(_TRACING) is original:
            setattr(module, _TRACING, tracing)


def _note_kernel(made_from: Any = None, name: Any = None, *_: Any, **__: Any) -> None:
    try:
        graph = sys.modules["torch._inductor.virtualized"].V.graph
        notes = vars(graph).setdefault(_ATTRIBUTE, [])
        if getattr(graph, "parent", None) is not None:
            raise RuntimeError("a graph within a graph")
        if getattr(graph, "cpp_wrapper", False):
            raise RuntimeError("C++ calls the kernels")
        notes.append(_kernel(made_from, str(name), is_backward=bool(graph.is_backward)))
    except nodes.ForeignModule as error:
        _here.failure = f"they run a module that was not compiled with them ({error})"
    except Exception as error:
        _here.failure = f"their kernels could not be noted ({type(error).__name__}: {error})"


def _kernel(made_from: Any, name: str, *, is_backward: bool) -> Kernel:
    telling = nodes.kernel_nodes(made_from)
    phase = "forward"
    if is_backward:
        phase = "recompute" if nodes.is_recomputed(telling) else "backward"
    is_extern = not isinstance(made_from, list)
    name = (nodes.called_operator(telling) if is_extern else None) or name
    return Kernel(name, is_extern, phase, tuple(nodes.owners(telling)))


# -- when a graph is compiled, or comes from a cache -------------------------------------------------


def _stand_around_graphs(output_code: ModuleType) -> None:
    cls: Any = output_code.CompiledFxGraph
    make, post_compile = cls.__init__, cls.post_compile
    place = list(inspect.signature(make).parameters).index("graph")

    @functools.wraps(make)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        _keep_notes(self, kwargs["graph"] if "graph" in kwargs else args[place - 1])

    @functools.wraps(post_compile)
    def register(self: Any, *args: Any, **kwargs: Any) -> Any:
        done = post_compile(self, *args, **kwargs)
        _register(self, (*args, *kwargs.values()))
        return done

    cls.__init__, cls.post_compile = __init__, register


def _keep_notes(compiled: Any, graph: Any) -> None:
    failure, _here.failure = _here.failure, None
    try:
        notes = vars(graph).get(_ATTRIBUTE, ())
        roots = {module.root for kernel in notes for module in kernel.modules if module.root}
        if len(roots) > 1:
            failure = f"they run modules of several arguments ({', '.join(sorted(roots))})"
        kernels = tuple((*kernel[:3], tuple(tuple(module) for module in kernel.modules)) for kernel in notes)
        vars(compiled)[_ATTRIBUTE] = (_VERSION, failure if failure is not None else kernels)
        _here.fresh = id(compiled)
    except Exception as error:
        vars(compiled)[_ATTRIBUTE] = (_VERSION, f"their kernels could not be kept ({type(error).__name__}: {error})")


def _register(compiled: Any, arguments: Iterable[Any]) -> None:
    is_fresh, _here.fresh = _here.fresh == id(compiled), None
    key = getattr(compiled, "_fx_graph_cache_key", None)
    if key is None:
        return
    try:
        known = _known(compiled, is_fresh, arguments)
        traced = _modules_traced_for(known)
        _traced[key] = _traced.get(key, traced) & traced
    except Exception as error:
        known = f"their kernels could not be read ({type(error).__name__}: {error})"
    before = _graphs.get(key, known)
    _graphs[key] = before if before == known or isinstance(before, str) else OTHER_MODULES


def _known(compiled: Any, is_fresh: bool, arguments: Iterable[Any]) -> tuple[Kernel, ...] | str:
    version, notes = vars(compiled).get(_ATTRIBUTE, (0, ()))
    if version != _VERSION:
        return _unavailable or MADE_WITHOUT_US
    if isinstance(notes, str):
        return notes
    kernels = tuple(
        Kernel(name, is_extern, phase, tuple(nodes.Module(*module) for module in modules))
        for name, is_extern, phase, modules in notes
    )
    if is_fresh:
        return kernels
    # The key of a cache does not hold the names of modules: the entry may have been made for others.
    graph = _graph_being_compiled(arguments)
    if graph is None:
        return UNCHECKED
    here = nodes.modules_of(graph)
    named = {module for kernel in kernels for module in kernel.modules if module != nodes.OWN}
    return kernels if named <= here else OTHER_MODULES


def _modules_traced_for(known: tuple[Kernel, ...] | str) -> frozenset[nodes.Module]:
    """Whom Dynamo saw at work in the forward that is being compiled."""
    if isinstance(known, str) or any(kernel.phase != "forward" for kernel in known):
        return frozenset()
    graph = _graph_of_dynamo()
    return frozenset() if graph is None else frozenset(nodes.modules_of(graph))


def _graph_being_compiled(arguments: Iterable[Any]) -> Any | None:
    """The FX graph for which an entry was taken from a cache: Inductor's own, else what Dynamo gave it."""
    for argument in arguments:
        graph = getattr(argument, "gm", None)
        if graph is not None:
            return graph
    return _graph_of_dynamo()


def _graph_of_dynamo() -> Any | None:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "compile_fx" and frame.f_globals.get("__name__") == "torch._inductor.compile_fx":
            return frame.f_locals.get("model_")
        frame = frame.f_back
    return None
