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
import re
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from profiler_wrapper.capture.steps import is_off
from profiler_wrapper.errors import in_a_line
from profiler_wrapper.trace.marks import ALL_GRAPHS

if TYPE_CHECKING:
    from torch import nn

# --------------------------------------------------------------------------------------------------
# Which modules a kernel of a compiled graph works for, from the FX nodes it was made from.
#
# What Dynamo and AOTAutograd leave on a node: `nn_module_stack` on one of the forward,
# `fwd_nn_module_stack` on one of the backward; neither on what the compiled module does itself. A
# node without `seq_nr` was made later by a pass of Inductor's.

_STEP = re.compile(r"""\[['"]?(\w+)['"]?\]|\.([^.\[\]@]+)""")  # [0], ['mlp'] or .mlp
_SOURCE = re.compile(rf"(L\['\w+'\])((?:{_STEP.pattern})*)(?:@\d+)?")  # @: a later call of the same module


class ForeignModule(ValueError):
    """A graph runs a module that does not belong to the module that was compiled."""


class Module(NamedTuple):
    """A module as Dynamo knows it."""

    path: str  # below the compiled module; "" for that one itself
    class_name: str
    root: str  # the compiled module in its own code: L['self']
    callers: tuple[tuple[str, str], ...] = ()  # path and class of each that called it, the innermost first


OWN = Module("", "", "")  # the compiled module


def split_source(source: str) -> tuple[str, str]:
    """`L['self'].layers.0._orig_mod.mlp` -> `L['self']`, `layers.0.mlp`. Raises ForeignModule: it is none below."""
    match = _SOURCE.fullmatch(source)
    if match is None:
        raise ForeignModule(source)
    steps = (one or other for one, other in _STEP.findall(match[2]))
    return match[1], ".".join(step for step in steps if step not in ("_orig_mod", "_modules"))


def module_of(node: Any) -> Module | None:
    """The innermost module a node belongs to; None where it names none."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return None
    entered = [(source, cls.__name__ if isinstance(cls, type) else str(cls).rpartition(".")[2])
               for source, cls, *_ in stack.values()]  # fmt: skip
    root, path = split_source(entered[-1][0])
    known = [(*split_source(source), name) for source, name in entered[-2::-1] if _SOURCE.fullmatch(source)]
    callers = tuple((above, name) for its_root, above, name in known if its_root == root and above)
    return Module(path, entered[-1][1], root, callers) if path else None


def modules_of(graph_module: Any) -> set[Module]:
    """Every module that some node belongs to, in graphs inside (checkpointed code) too; but for what is foreign."""
    found = set()
    graphs = [inside.graph for inside in graph_module.modules() if hasattr(inside, "graph")]
    for node in (node for graph in graphs for node in graph.nodes):
        try:
            module = module_of(node)
        except ForeignModule:
            continue
        if module is not None:
            found.add(module)
    return found


def called_operator(nodes: Iterable[Any]) -> str | None:
    """The operator that a higher-order one, such as `run_and_save_rng_state(op, ...)`, is there to call; None: no such.

    In `torch.ops.aten.addmm.default`'s manner, as Inductor names the calls of a library.
    """
    for node in nodes:
        if type(node.target).__module__.startswith("torch._prims.rng_prims"):
            operators = [argument for argument in node.args if hasattr(argument, "_schema")]
            return f"torch.ops.{operators[0]}" if operators else None
    return None


def kernel_nodes(made_from: Any) -> list[Any]:
    """The FX nodes that say whom a kernel works for: not those that only look at memory, if there are others.

    Args:
        made_from: what the scheduler fused into one kernel, a list; else a call of a library.
    """
    found: Iterable[Any]
    if isinstance(made_from, list):  # markers between the nodes have no `node`
        fused = (scheduled.node for scheduled in made_from if getattr(scheduled, "node", None) is not None)
        found = [origin for node in fused for origin in node.origins]
    elif getattr(made_from, "origin_node", None) is not None:
        found = [made_from.origin_node]
    else:
        operator = getattr(made_from, "op_overload", None)
        origins = list(made_from.origins)
        found = [node for node in origins if operator is not None and node.target == operator] or origins
    nodes = list(dict.fromkeys(found))
    views = [getattr(n.target, "is_view", False) or str(n.target).startswith("aten._unsafe_view") for n in nodes]
    return [node for node, is_view in zip(nodes, views, strict=True) if not is_view] or nodes


def owners(nodes: Iterable[Any]) -> list[Module]:
    """The modules that a kernel works for; `OWN` stands for the compiled one itself.

    The sum of two gradients of one tensor belongs to nobody. What a pass made belongs to whom its
    nearest inputs belong.
    """
    working = (node for node in nodes if not node.meta.get("is_gradient_acc"))
    return list(dict.fromkeys(one for node in working for one in _owners_of_node(node, set()))) or [OWN]


def _owners_of_node(node: Any, seen: set[Any]) -> list[Module]:
    module = module_of(node)
    if module is not None or "seq_nr" in node.meta:
        return [module or OWN]
    inferred: dict[Module, None] = {}
    for above in node.all_input_nodes:
        if above not in seen and above.op not in ("placeholder", "get_attr"):
            seen.add(above)
            if not above.meta.get("is_gradient_acc"):
                inferred.update(dict.fromkeys(_owners_of_node(above, seen)))
    return list(inferred) or [OWN]


def is_recomputed(nodes: Iterable[Any]) -> bool:
    """Whether all of a backward graph's kernel is forward run again; what a pass made says nothing of that."""
    traced = [node.meta for node in nodes if "seq_nr" in node.meta]
    return bool(traced) and all(meta.get("nn_module_stack") or meta.get("source_fn_stack") for meta in traced)


_ATTRIBUTE = "_profiler_wrapper_kernels"
_TRACING = "set_kernel_post_grad_provenance_tracing"
_VERSION = 3  # of what is pickled with a graph

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
    modules: tuple[Module, ...]


class _Here(threading.local):
    """What this thread is compiling."""

    def __init__(self) -> None:
        self.failure: str | None = None  # of a note since the last graph was finished
        self.fresh: int | None = None  # the id of the graph finished last, until it is registered


_here = _Here()
# These two are kept on Inductor's module too, where a second import of this package finds what the first one knows.
_graphs: dict[str, tuple[Kernel, ...] | str] = {}  # by cache key; or why nothing is known
# By cache key: the modules that ran when the graph was traced, those whose kernels are all gone included. None of a
# graph of the backward, and where it is not known.
_traced: dict[str, frozenset[Module]] = {}
_unavailable: str | None = None  # why nothing can be known with this version of torch


def install() -> None:
    """Begin to remember, from when Inductor is imported; done when this module is imported, be it once more."""
    if is_off():
        return
    after_import("torch._inductor.debug", _stand_before_tracing)
    after_import("torch._inductor.output_code", _stand_around_graphs)


# -- while Inductor generates code ------------------------------------------------------------------


def _stand_before_tracing(debug: ModuleType) -> None:
    if hasattr(debug, _ATTRIBUTE):
        return  # an earlier import of this package stands there
    original = getattr(debug, _TRACING)

    @functools.wraps(original)
    def tracing(*args: Any, **kwargs: Any) -> Any:
        _note_kernel(*args, **kwargs)
        return original(*args, **kwargs)

    holders = [m for name, m in sys.modules.items() if m is not None and name.startswith("torch._inductor")]
    for module in (debug, *holders):
        if vars(module).get(_TRACING) is original:
            setattr(module, _TRACING, tracing)
    setattr(debug, _ATTRIBUTE, True)


def _note_kernel(made_from: Any = None, name: Any = None, *_: Any, **__: Any) -> None:
    try:
        graph = sys.modules["torch._inductor.virtualized"].V.graph
        notes = vars(graph).setdefault(_ATTRIBUTE, [])
        if getattr(graph, "parent", None) is not None:
            raise RuntimeError("a graph within a graph")
        if getattr(graph, "cpp_wrapper", False):
            raise RuntimeError("C++ calls the kernels")
        nodes, is_extern = kernel_nodes(made_from), not isinstance(made_from, list)
        phase = "forward" if not graph.is_backward else "recompute" if is_recomputed(nodes) else "backward"
        called = called_operator(nodes) if is_extern else None
        notes.append(Kernel(called or str(name), is_extern, phase, tuple(owners(nodes))))
    except ForeignModule as error:
        _here.failure = f"they run a module that was not compiled with them ({error})"
    except Exception as error:
        _here.failure = f"their kernels could not be noted ({in_a_line(error)})"


# -- when a graph is compiled, or comes from a cache -------------------------------------------------


def _stand_around_graphs(output_code: ModuleType) -> None:
    global _graphs, _traced
    if hasattr(output_code, _ATTRIBUTE):
        _graphs, _traced = getattr(output_code, _ATTRIBUTE)
        return
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
    setattr(output_code, _ATTRIBUTE, (_graphs, _traced))


def _keep_notes(compiled: Any, graph: Any) -> None:
    failure, _here.failure = _here.failure, None
    try:
        notes = vars(graph).get(_ATTRIBUTE, ())
        roots = {module.root for kernel in notes for module in kernel.modules if module.root}
        if len(roots) > 1:
            failure = f"they run modules of several arguments ({', '.join(sorted(roots))})"
        plain = tuple((*kernel[:3], tuple(tuple(module) for module in kernel.modules)) for kernel in notes)
        vars(compiled)[_ATTRIBUTE] = (_VERSION, failure if failure is not None else plain)
        _here.fresh = id(compiled)
    except Exception as error:
        vars(compiled)[_ATTRIBUTE] = (_VERSION, f"their kernels could not be kept ({in_a_line(error)})")


def _register(compiled: Any, arguments: Iterable[Any]) -> None:
    is_fresh, _here.fresh = _here.fresh == id(compiled), None
    key = getattr(compiled, "_fx_graph_cache_key", None)
    if key is None:
        return
    try:
        known = _known(compiled, is_fresh, arguments)
        traced = frozenset[Module]()
        if not isinstance(known, str) and all(kernel.phase == "forward" for kernel in known):
            graph = _graph_of_dynamo()  # whom Dynamo saw at work in the forward that is being compiled
            traced = frozenset() if graph is None else frozenset(modules_of(graph))
        _traced[key] = _traced.get(key, traced) & traced
    except Exception as error:
        known = f"their kernels could not be read ({in_a_line(error)})"
    before = _graphs.get(key, known)
    _graphs[key] = before if before == known or isinstance(before, str) else OTHER_MODULES


def _known(compiled: Any, is_fresh: bool, arguments: Iterable[Any]) -> tuple[Kernel, ...] | str:
    version, notes = vars(compiled).get(_ATTRIBUTE, (0, ()))
    if version != _VERSION:
        return _unavailable or MADE_WITHOUT_US
    if isinstance(notes, str):
        return notes
    kernels = msgspec.convert(notes, tuple[Kernel, ...])
    if is_fresh:
        return kernels
    # The key of a cache does not hold the names of modules: the entry may have been made for others.
    graphs = [getattr(argument, "gm", None) for argument in arguments]  # Inductor's own, else what Dynamo gave it
    graph = next((graph for graph in graphs if graph is not None), None)
    graph = _graph_of_dynamo() if graph is None else graph
    if graph is None:
        return UNCHECKED
    named = {module for kernel in kernels for module in kernel.modules if module != OWN}
    return kernels if named <= modules_of(graph) else OTHER_MODULES


def _graph_of_dynamo() -> Any | None:
    for frame, _ in traceback.walk_stack(sys._getframe()):
        if frame.f_code.co_name == "compile_fx" and frame.f_globals.get("__name__") == "torch._inductor.compile_fx":
            return frame.f_locals.get("model_")
    return None


# --- Where torch.compile could not go on: the graph breaks of this process so far, as Dynamo counts them ---

_MOST = 20
_LONGEST = 200
_PLAINLY = (  # Dynamo's own words for what has a plain name
    ("generic_jump", "a branch on the value of a tensor"),
    ("call_function graph_break", "torch._dynamo.graph_break() was called"),
)


def graph_breaks() -> list[dict[str, Any]] | None:
    """`{reason, count, source}` per reason and place (`file:line`, None where not known), the most frequent first.

    A place counts once for each time it was compiled, recompilations among them. Empty where nothing was compiled:
    Dynamo is not imported for this. None where this torch does not tell.
    """
    utils = sys.modules.get("torch._dynamo.utils")
    reasons, counters = getattr(utils, "graph_break_reasons", None), getattr(utils, "counters", None)
    if reasons is None and counters is None:
        return [] if utils is None else None
    entries = [entry for entry in reasons or () if getattr(entry, "graph_break", True)]
    found = Counter((_reason(entry.reason), _source(getattr(entry, "user_stack", None))) for entry in entries)
    with_place = {reason for reason, _ in found}
    for text, count in dict((counters or {}).get("graph_break") or {}).items():
        if _reason(text) not in with_place:
            found[_reason(text), None] += int(count)
    return [
        {"reason": reason, "count": count, "source": source} for (reason, source), count in found.most_common(_MOST)
    ]


def _reason(text: object) -> str:
    """Its first line: what follows is an explanation of many."""
    first = next((line.strip() for line in str(text).splitlines() if line.strip()), "")
    plain = next((plain for begin, plain in _PLAINLY if first.startswith(begin)), None)
    return (f"{plain} ({first})" if plain else first)[:_LONGEST]


def _source(stack: Iterable[Any] | None) -> str | None:
    """`file:line` of the innermost frame."""
    innermost = [*(stack or (None,))][-1]
    name, line = getattr(innermost, "filename", None), getattr(innermost, "lineno", None)
    return f"{name}:{line}" if name and line else None


# --- For which modules of a model the compiled graphs were made: what run.json says of compiled code ---

NO_SUCH_MODULES = "they were compiled for modules that are not in this model"


class CompiledModule(NamedTuple):
    """A module that ran compiled code."""

    root: str  # as marks have them
    path: str
    module: nn.Module


def describe_compiled(modules: Iterable[CompiledModule], full_names: Mapping[str, Mapping[int, str]]) -> dict[str, Any]:
    """The compiled graphs that were made for `modules`, as `recording.owned` has them.

    A graph may run in a layer if all its modules are there, with their classes: caches know nothing of names.

    Args:
        full_names: of every module of a root, by its id.
    """
    if _unavailable is not None:
        return {ALL_GRAPHS: _unavailable}
    names = {one: _names_below(one, full_names.get(one.root, {})) for one in modules} if _graphs else {}
    return {
        key: kernels if isinstance(kernels, str) else _describe(kernels, _traced.get(key, frozenset()), names)
        for key, kernels in dict(_graphs).items()
    }


def _names_below(place: CompiledModule, full_names: Mapping[int, str]) -> dict[tuple[str, str], str]:
    """Full name of each module below, by the path and the class that Dynamo knows."""
    found = {OWN[:2]: place.path}
    for path, module in place.module.named_modules(remove_duplicate=False):
        relative = ".".join(step for step in path.split(".") if step != "_orig_mod")
        if relative and id(module) in full_names:
            found[relative, type(module).__name__] = full_names[id(module)]
    return found


def _describe(
    kernels: tuple[Kernel, ...], traced: frozenset[Module], names: dict[CompiledModule, dict[tuple[str, str], str]]
) -> dict[str, Any] | str:
    working = dict.fromkeys(one for k in kernels for m in k.modules for one in _with_callers(m))
    fitting = {place: below for place, below in names.items() if all(module[:2] in below for module in working)}
    if not fitting and working.keys() <= {OWN}:  # a function: its kernels belong where it is called
        return {"kernels": [[k.name, k.is_extern, k.phase, []] for k in kernels], "inside": []}
    if not fitting:
        return NO_SUCH_MODULES
    idle = sorted({one for m in traced for one in _with_callers(m)}.difference(working))
    idle = [m for m in idle if all(one[:2] in below for below in fitting.values() for one in _with_callers(m))]
    modules = {module: i for i, module in enumerate([*working, *idle])}
    inside = {place[:2]: [below[module[:2]] for module in modules] for place, below in fitting.items()}
    return {
        "kernels": [[k.name, k.is_extern, k.phase, [modules[_with_callers(m)[0]] for m in k.modules]] for k in kernels],
        "inside": [[*place, full_names] for place, full_names in inside.items()],
        "callers": [[modules[above] for above in _with_callers(module)[1:]] for module in modules],
    }


def _with_callers(module: Module) -> list[Module]:
    """It and what called it, the innermost first, whatever the compiled code calls the root."""
    chain = (module[:2], *module.callers)
    return [Module(*one, "", chain[i + 1 :]) for i, one in enumerate(chain)]


# --- Calls a function as soon as a module has been imported, without importing it ---

Patch = Callable[[ModuleType], None]


def after_import(name: str, patch: Patch) -> None:
    """Call `patch` with the module `name`: now if it is imported already, else once it is.

    What it raises is why nothing is known of compiled code: it runs within somebody's import statement.
    """
    if (module := sys.modules.get(name)) is not None:
        _apply(patch, module)
        return
    finders: list[Any] = [one for one in sys.meta_path if type(one).__module__ == __name__]  # of an earlier import
    if not finders:
        finders.append(_Finder())
        sys.meta_path.insert(0, finders[0])
    finders[0].waiting.setdefault(name, []).append(functools.partial(_apply, patch))


def _apply(patch: Patch, module: ModuleType) -> None:
    global _unavailable
    try:
        patch(module)
    except Exception as error:
        _unavailable = f"this version of torch is not known ({in_a_line(error)})"


class _Finder(MetaPathFinder):
    """Lets the others find a module that is waited for, and has its loader report when it is done."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Patch]] = {}
        self._asking: set[str] = set()  # the others, one of which may ask all in its turn

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.waiting or fullname in self._asking:
            return None
        self._asking.add(fullname)
        try:
            finders = [one for one in sys.meta_path if one is not self and hasattr(one, "find_spec")]
            specs = (one.find_spec(fullname, path, target) for one in finders)
            spec = next((one for one in specs if one is not None), None)
        finally:
            self._asking.discard(fullname)
        # A loader of this type is made for one module and for one import of it.
        if spec is None or type(spec.loader) is not SourceFileLoader:
            return spec
        loader = spec.loader

        def exec_module(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)  # the loader is as it was
            loader.exec_module(module)
            for patch in self.waiting.pop(fullname, ()):
                patch(module)
            if not self.waiting and self in sys.meta_path:
                sys.meta_path.remove(self)

        vars(loader)["exec_module"] = exec_module
        return spec


install()
