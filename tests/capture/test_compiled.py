"""What is remembered of compiled graphs: from FX nodes to modules, over caches, and never in the way."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from profiler_wrapper.capture import compiled
from profiler_wrapper.capture.compiled import (
    OWN,
    CompiledModule,
    ForeignModule,
    Kernel,
    Module,
    describe_compiled,
    is_recomputed,
    owners,
    split_source,
)
from profiler_wrapper.capture.layers import find_roots, module_paths, name_layers

SELF = "L['self']"


@pytest.mark.parametrize(
    ("source", "path"),
    [
        ("L['self'].layers.0.mlp", "layers.0.mlp"),
        ("L['self']._modules['layers']._modules['0'].mlp", "layers.0.mlp"),
        ("L['self'].layers[0]['up']", "layers.0.up"),
        ("L['self']._orig_mod.layers.0._orig_mod.mlp@3", "layers.0.mlp"),
        ("L['self']", ""),
    ],
)
def test_paths_of_modules_as_dynamo_writes_them(source: str, path: str) -> None:
    assert split_source(source) == (SELF, path)


@pytest.mark.parametrize("source", ["G['net'].mlp", "L['self'].layers[0:1].mlp", "___stack0"])
def test_modules_from_elsewhere_are_foreign(source: str) -> None:
    with pytest.raises(ForeignModule):
        split_source(source)


def node(path: str | None = None, *inputs: Any, backward: bool = False, **meta: Any) -> Any:
    """An FX node of AOTAutograd's in the module of this path; without one, of the compiled module itself."""
    meta = {"seq_nr": 1, "fwd_source_fn_stack" if backward else "source_fn_stack": ["x"], **meta}
    if path is not None:
        stack = "fwd_nn_module_stack" if backward else "nn_module_stack"
        meta[stack] = {"outer": (SELF, nn.Module), "inner": (f"{SELF}.{path}", nn.Linear)}
    return SimpleNamespace(meta=meta, all_input_nodes=list(inputs), op="call_function", target="aten.mul")


def made_by_a_pass(*inputs: Any) -> Any:
    return SimpleNamespace(meta={}, all_input_nodes=list(inputs), op="call_function", target="aten.addmm")


def linear(path: str) -> Module:
    return Module(path, "Linear", SELF)


# SimpleNamespace has no hash, FX nodes have.
class Node(SimpleNamespace):
    __hash__ = object.__hash__  # type: ignore[assignment]


def hashable(one: Any) -> Any:
    return Node(**{**vars(one), "all_input_nodes": [hashable(above) for above in one.all_input_nodes]})


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([node("up"), node("down"), node("up")], [linear("up"), linear("down")]),
        ([node("up"), node()], [linear("up"), OWN]),
        ([node("up", backward=True), node(is_gradient_acc=True)], [linear("up")]),
        ([node(is_gradient_acc=True)], [OWN]),
        ([made_by_a_pass(node("up"), node("down"))], [linear("up"), linear("down")]),
        ([made_by_a_pass(made_by_a_pass(node("up")))], [linear("up")]),
        ([made_by_a_pass()], [OWN]),
    ],
)
def test_kernels_work_for_the_modules_of_their_nodes(nodes: list[Any], expected: list[Module]) -> None:
    assert owners(hashable(one) for one in nodes) == expected


def test_a_kernel_of_forward_nodes_alone_is_recomputation() -> None:
    assert is_recomputed([node("up"), node(), made_by_a_pass()])
    assert not is_recomputed([node("up"), node("up", backward=True)])
    assert not is_recomputed([made_by_a_pass()])


# -- over Inductor's caches ---------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _no_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(compiled, "_graphs", {})
    yield


class Graph:
    """Stands for a CompiledFxGraph."""

    def __init__(self, key: str | None = "key") -> None:
        self._fx_graph_cache_key = key


def finished(*kernels: Kernel, key: str | None = "key") -> Graph:
    """A graph that was compiled just now."""
    graph = Graph(key)
    compiled._keep_notes(graph, SimpleNamespace(**{compiled._ATTRIBUTE: list(kernels)}))
    return graph


def from_cache(graph: Graph) -> Graph:
    """The same as a cache brings it back."""
    loaded = Graph()
    vars(loaded).update(vars(graph))
    return loaded


def constants(*nodes: Any) -> Any:
    """What holds the FX graph for which a cache was asked."""
    inside = SimpleNamespace(graph=SimpleNamespace(nodes=nodes))
    return SimpleNamespace(gm=SimpleNamespace(modules=lambda: [inside]))


MM = Kernel("extern_kernels.mm", True, "forward", (linear("up"),))


def test_notes_are_plain_tuples_and_come_back_from_a_cache() -> None:
    graph = finished(MM)
    assert vars(graph)[compiled._ATTRIBUTE] == (
        compiled._VERSION,
        ((MM.name, True, "forward", (("up", "Linear", SELF, ()),)),),
    )
    assert type(vars(graph)[compiled._ATTRIBUTE][1][0][3][0]) is tuple
    compiled._register(graph, [])
    compiled._register(from_cache(graph), [constants(node("up"), node("down"))])
    assert compiled._graphs == {"key": (MM,)}


@pytest.mark.parametrize(
    ("graph", "arguments", "reason"),
    [
        (Graph(), [], compiled.MADE_WITHOUT_US),
        (from_cache(finished(MM)), [], compiled.UNCHECKED),
        (from_cache(finished(MM)), [constants(node("down"))], compiled.OTHER_MODULES),
    ],
)
def test_graphs_of_doubtful_origin_are_not_known(graph: Graph, arguments: list[Any], reason: str) -> None:
    compiled._register(graph, arguments)
    assert compiled._graphs == {"key": reason}


def test_one_key_for_two_places_is_not_known() -> None:
    first = finished(MM)
    compiled._register(first, [])
    compiled._register(from_cache(first), [constants(node("down"))])
    compiled._register(from_cache(first), [constants(node("up"))])
    assert compiled._graphs == {"key": compiled.OTHER_MODULES}


def test_graphs_without_a_key_are_not_kept() -> None:
    compiled._register(finished(MM, key=None), [])
    assert compiled._graphs == {}


def test_failed_note_drops_the_graph_and_the_next_one_is_whole() -> None:
    compiled._note_kernel(object(), "kernel")
    compiled._register(finished(MM, key="first"), [])
    compiled._register(finished(MM, key="second"), [])
    known = compiled._graphs
    assert "could not be noted" in known["first"]
    assert known["second"] == (MM,)


def test_unknown_torch_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_unavailable", None)
    monkeypatch.setattr(compiled, "_TRACING", "not there")
    compiled.after_import("sys", compiled._stand_before_tracing)
    assert "this version of torch is not known" in str(compiled._unavailable)
    assert set(describe_compiled([], {})) == {"*"}


# -- for which modules of the model -------------------------------------------------------------------


def two_blocks() -> nn.Module:
    block = lambda: nn.Sequential(nn.Linear(1, 1), nn.ReLU())  # noqa: E731
    return nn.Sequential(block(), block())


def described(model: nn.Module, *compiled_paths: str) -> dict[str, Any]:
    (root,) = find_roots(model)
    places = [
        CompiledModule(root.label, layer.mark.path, holder)
        for layer in name_layers(root)
        for holder in layer.holders
        if layer.mark.path in compiled_paths
    ]
    return describe_compiled(places, {root.label: module_paths(root)})


def test_one_graph_may_run_in_every_block_that_has_its_modules() -> None:
    compiled._graphs["key"] = (Kernel("mm", True, "forward", (Module("0", "Linear", SELF), OWN)),)
    found = described(two_blocks(), "0", "1")
    assert found == {
        "key": {
            "kernels": [["mm", True, "forward", [0, 1]]],
            "inside": [["Sequential#0", "0", ["0.0", "0"]], ["Sequential#0", "1", ["1.0", "1"]]],
            "callers": [[], []],
        }
    }


def test_a_module_is_known_by_what_called_it() -> None:
    stack = {
        "a": (SELF, nn.Sequential), "b": (f"{SELF}.1", nn.Sequential), "c": ("G['other']", nn.ReLU),
        "d": (f"{SELF}.0@1", nn.Sequential), "e": (f"{SELF}.0.0@1", nn.Linear),
    }  # fmt: skip
    module = compiled.module_of(SimpleNamespace(meta={"nn_module_stack": stack}))
    assert module == Module("0.0", "Linear", SELF, (("0", "Sequential"), ("1", "Sequential")))
    compiled._graphs["key"] = (Kernel("mm", True, "forward", (module, Module("0.0", "Linear", SELF))),)
    assert described(two_blocks(), ".")["key"] == {
        "kernels": [["mm", True, "forward", [0, 3]]],
        "inside": [["Sequential#0", ".", ["0.0", "0", "1", "0.0"]]],
        "callers": [[1, 2], [2], [], []],
    }


@pytest.mark.parametrize("module", [Module("0", "Conv2d", SELF), Module("7", "Linear", SELF)])
def test_modules_that_the_model_does_not_have(module: Module) -> None:
    compiled._graphs["key"] = (Kernel("mm", True, "forward", (module,)),)
    assert described(two_blocks(), "0") == {"key": compiled.NO_SUCH_MODULES}


def test_kernels_of_a_compiled_function_are_known_wherever_it_is_called() -> None:
    compiled._graphs["key"] = (Kernel("cpp_fused_0", False, "forward", (OWN,)),)
    expected = {"key": {"kernels": [["cpp_fused_0", False, "forward", []]], "inside": []}}
    assert described(two_blocks()) == expected


def test_graphs_run_only_in_what_was_compiled() -> None:
    compiled._graphs["key"] = (Kernel("mm", True, "forward", (Module("0", "Linear", SELF),)),)
    assert described(two_blocks()) == {"key": compiled.NO_SUCH_MODULES}


# -- standing in the way of nothing --------------------------------------------------------------------


@pytest.fixture
def module_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    tmp_path.joinpath("waited_for.py").write_text("def f():\n    return 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    others = [one for one in sys.meta_path if not isinstance(one, compiled._Finder)]  # ours may wait for Inductor
    monkeypatch.setattr(sys, "meta_path", others)
    yield "waited_for"
    sys.modules.pop("waited_for", None)


def test_function_is_called_once_the_module_is_imported(module_file: str) -> None:
    seen: list[Any] = []
    compiled.after_import(module_file, lambda module: seen.append(module.f()))
    assert importlib.util.find_spec(module_file) is not None and not seen
    module = importlib.import_module(module_file)
    assert seen == [1]
    assert not any(isinstance(one, compiled._Finder) for one in sys.meta_path)
    assert module.__spec__ is not None and "exec_module" not in vars(module.__spec__.loader)
    compiled.after_import(module_file, lambda module: seen.append(module.f() + 1))
    assert seen == [1, 2]


def test_import_hooks_of_others_find_the_module_as_without_us(
    module_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hook:
        @staticmethod
        def find_spec(name: str, *_: Any) -> Any:
            loader = SimpleNamespace(create_module=lambda _: None, exec_module=lambda module: setattr(module, "f", 2))
            return importlib.machinery.ModuleSpec(name, loader) if name == module_file else None

    monkeypatch.setattr(sys, "meta_path", [Hook, *sys.meta_path])
    compiled.after_import(module_file, lambda module: None)
    assert importlib.import_module(module_file).f == 2


def test_a_second_import_of_this_package_uses_the_finder_of_the_first(module_file: str) -> None:
    spec = compiled.__spec__
    assert spec is not None
    again = importlib.util.module_from_spec(spec)  # as after `del sys.modules[...]`: nothing of the first is known
    spec.loader.exec_module(again)  # type: ignore[union-attr]
    seen: list[str] = []
    compiled.after_import(module_file, lambda module: seen.append("first"))
    again.after_import(module_file, lambda module: seen.append("second"))
    finders = [one for one in sys.meta_path if type(one).__module__ == compiled.__name__]
    importlib.import_module(module_file)
    assert len(finders) == 1
    assert seen == ["first", "second"]


def test_finders_that_ask_all_others_do_not_ask_without_end(module_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class AsksAll:
        @staticmethod
        def find_spec(name: str, *_: Any) -> Any:
            others = (one for one in sys.meta_path if one is not AsksAll and hasattr(one, "find_spec"))
            return next((spec for one in others if (spec := one.find_spec(name, None))), None)

    monkeypatch.setattr(sys, "meta_path", [AsksAll, *sys.meta_path])
    seen: list[Any] = []
    compiled.after_import(module_file, lambda module: seen.append(module.f()))
    importlib.import_module(module_file)
    assert seen == [1]


def run_in_a_new_interpreter(script: str) -> None:
    """It asks what importing does, and prints "fine" at its end."""
    command = [sys.executable, "-c", textwrap.dedent(script) + 'print("fine")']
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert done.stdout == "fine\n", done.stderr


@pytest.mark.full
def test_importing_us_again_and_again_adds_nothing_and_forgets_no_compiled_code() -> None:
    script = """
        import importlib, inspect, sys

        def forget():
            for name in [name for name in sys.modules if name.split(".")[0] == "profiler_wrapper"]:
                del sys.modules[name]

        copies = []
        for _ in range(3):
            forget()
            import profiler_wrapper.capture.compiled
            copies.append(sys.modules["profiler_wrapper.capture.compiled"])
        from torch._inductor import debug, output_code
        forget()
        import profiler_wrapper.capture.compiled as last
        importlib.reload(importlib.reload(last))
        importlib.reload(sys.modules["profiler_wrapper"])
        for function in (debug.set_kernel_post_grad_provenance_tracing, output_code.CompiledFxGraph.post_compile):
            assert not hasattr(function.__wrapped__, "__wrapped__")
        assert all(one._graphs is last._graphs and one._traced is last._traced for one in copies)
    """
    run_in_a_new_interpreter(script)


@pytest.mark.full
def test_importing_us_imports_neither_torch_nor_its_compiler() -> None:
    script = """
        import sys
        import profiler_wrapper
        assert "torch" not in sys.modules
        import torch, inspect
        assert "torch._inductor.debug" not in sys.modules and "torch._dynamo" not in sys.modules
        from torch._inductor import debug, output_code
        from torch._inductor.codegen import cpp
        assert cpp.set_kernel_post_grad_provenance_tracing is debug.set_kernel_post_grad_provenance_tracing
        assert "profiler_wrapper" in inspect.getsourcefile(output_code.CompiledFxGraph.post_compile.__code__)
        assert "def post_compile" in inspect.getsource(output_code.CompiledFxGraph.post_compile)
        assert not [finder for finder in sys.meta_path if "profiler_wrapper" in type(finder).__module__]
    """
    run_in_a_new_interpreter(script)
