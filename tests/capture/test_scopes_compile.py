"""Marks beside `torch.compile`: no graph, break or recompilation more or less than without us."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn

from profiler_wrapper.capture.scopes import LayerScopes
from profiler_wrapper.trace.marks import Mark, parse_mark
from programs import run_program

pytestmark = pytest.mark.full

PLAIN_CALL = nn.Module.__call__


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(4), Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


class Net(nn.Module):
    def __init__(self, *, breaks: bool = False, user_hook: bool = False) -> None:
        super().__init__()
        self.breaks = breaks
        self.layers = nn.ModuleList(Block() for _ in range(2))
        if user_hook:  # then Dynamo traces `__call__`, not just `forward`
            for layer in self.layers:
                layer.register_forward_hook(lambda module, args, out: out * 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.breaks:
                torch._dynamo.graph_break()
            x = layer(x)
        return x.sum()


class Graphs:
    """A backend that counts what it is given."""

    def __init__(self) -> None:
        self.code: list[str] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.code.append(graph.code)
        return graph.forward


def whole(model: nn.Module, backend: Any) -> Callable[..., Any]:
    return torch.compile(model, backend=backend)  # type: ignore[no-any-return]


def in_place(model: nn.Module, backend: Any) -> Callable[..., Any]:
    model.compile(backend=backend)
    return model


def each_block(model: nn.Module, backend: Any) -> Callable[..., Any]:
    for index, layer in enumerate(model.layers):
        model.layers[index] = torch.compile(layer, backend=backend)
    return model


def each_block_in_place(model: nn.Module, backend: Any) -> Callable[..., Any]:
    for layer in model.layers:
        layer.compile(backend=backend)
    return model


def function(model: nn.Module, backend: Any) -> Callable[..., Any]:
    return torch.compile(lambda x: model(x), backend=backend)  # type: ignore[no-any-return]


WAYS = (whole, in_place, each_block, each_block_in_place, function)
X = torch.ones(2, 4)


@pytest.fixture(autouse=True)
def _count_from_zero() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()
    assert nn.Module.__call__ is PLAIN_CALL
    assert torch._dynamo.utils.unpatched_nn_module_call is PLAIN_CALL
    assert torch._dynamo.variables.nn_module.unpatched_nn_module_call is PLAIN_CALL


def run(way: Callable[..., Any], *, before: bool, scopes_for: str, **net: bool) -> tuple[list[str], Any]:
    """Graphs and Dynamo's counters of a run with three phases: before, inside and after our block."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    model = Net(**net)
    backend = Graphs()
    call = way(model, backend) if before else None
    if call is not None:
        call(X).backward()
    scopes = None if scopes_for == "nobody" else LayerScopes(model if scopes_for == "model" else None, layers=2)
    if scopes:
        scopes.attach()
    call = way(model, backend) if call is None else call
    for _ in range(2):
        call(X).backward()
    if scopes:
        scopes.detach()
        assert not scopes.warnings
    with torch._dynamo.config.patch(error_on_recompile=True):
        call(X).backward()
    counters = {name: dict(counter) for name, counter in torch._dynamo.utils.counters.items()}
    return backend.code, counters


def marks(way: Callable[..., Any], *, before: bool = False, scopes_for: str = "model", **net: bool) -> list[Mark]:
    """The marks in the trace of such a run."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run(way, before=before, scopes_for=scopes_for, **net)
    with tempfile.TemporaryDirectory() as folder:
        profile.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    return [mark for event in events if (mark := parse_mark(event.get("name", "")))]


@pytest.mark.parametrize("net", [{}, {"breaks": True}, {"user_hook": True}], ids=["plain", "broken", "hooked"])
@pytest.mark.parametrize("before", [True, False], ids=["before", "inside"])
@pytest.mark.parametrize("way", WAYS)
def test_graphs_breaks_and_recompilations_are_those_without_us(
    way: Callable[..., Any], before: bool, net: dict[str, bool]
) -> None:
    without_us, with_model, without_model = (
        run(way, before=before, scopes_for=scopes_for, **net) for scopes_for in ("nobody", "model", "outermost")
    )
    assert without_us[0], "nothing was compiled"
    assert with_model == without_us
    assert without_model == without_us


COMPILED = ("compiled",)


@pytest.mark.parametrize("scopes_for", ["model", "outermost"])
@pytest.mark.parametrize("before", [True, False], ids=["before", "inside"])
@pytest.mark.parametrize(
    ("way", "expected"),
    [
        (whole, {(".", COMPILED): 2}),
        (in_place, {(".", COMPILED): 2}),
        (each_block, {(".", ()): 2} | {(f"layers.{k}", COMPILED): 2 for k in range(2)}),
        (each_block_in_place, {(".", ()): 2} | {(f"layers.{k}", COMPILED): 2 for k in range(2)}),
        (function, {}),
    ],
)
def test_compiled_regions_are_marked_as_such(
    way: Callable[..., Any], before: bool, scopes_for: str, expected: dict[Any, int]
) -> None:
    found = marks(way, before=before, scopes_for=scopes_for)
    assert Counter((mark.path, mark.flags) for mark in found) == expected
    assert {mark.root for mark in found} <= {"Net#0"}


def test_what_runs_eagerly_between_breaks_has_its_marks() -> None:
    paths = {mark.path for mark in marks(whole, breaks=True)}
    assert paths == {".", "layers.0", "layers.1"}


def test_autograd_backend_makes_no_root_of_its_graphs() -> None:
    scopes = LayerScopes(None)
    model = Net()
    step = torch.compile(lambda x: model(x) * 2, backend="aot_eager")
    scopes.attach()
    step(X).backward()
    scopes.detach()
    assert scopes.describe() == []


def test_guards_see_nothing_of_us() -> None:
    """What is compiled inside our block has the guards that it has without us."""

    def guards(*, attached: bool) -> list[str]:
        torch._dynamo.reset()
        found: list[str] = []

        def keep_all(guards: Any) -> list[bool]:
            found.extend(
                re.sub(r"(__builtins_dict___|_)\d+", "", f"{guard.guard_type} {guard.name}") for guard in guards
            )
            return [True] * len(guards)

        torch.manual_seed(0)
        model = Net()
        scopes = LayerScopes(model)
        if attached:
            scopes.attach()
        torch.compile(model, backend="eager", options={"guard_filter_fn": keep_all})(X)
        scopes.detach()
        return found

    assert guards(attached=True) == guards(attached=False) != []


def test_stack_tracer_still_knows_modules_afterwards(tmp_path: Path) -> None:
    """The tracer behind `with_stack` looks at `Module.__call__` once in a process."""
    script = """
        import json, sys, torch
        from torch import nn
        from profiler_wrapper.capture.scopes import LayerScopes

        model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())

        def modules_seen():
            with torch.profiler.profile(with_stack=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                model(torch.ones(1, 2))
            profile.export_chrome_trace(sys.argv[1])
            names = [event.get("name", "") for event in json.load(open(sys.argv[1]))["traceEvents"]]
            return [name for name in names if name.startswith("nn.Module: ")]

        scopes = LayerScopes(model)
        scopes.attach()
        inside = modules_seen()
        scopes.detach()
        assert inside == modules_seen() == ["nn.Module: Sequential_0", "nn.Module: Linear_0", "nn.Module: ReLU_0"]
        print("fine")
    """
    done = run_program("-c", textwrap.dedent(script), tmp_path / "trace.json", cwd=Path(__file__).parents[2])
    assert done.stdout.endswith("fine\n"), done.stderr


def test_dynamo_imported_inside_the_block() -> None:
    """Dynamo then finds our function in the place of the call that it takes for unpatched."""
    script = """
        import sys, torch
        from torch import nn
        from profiler_wrapper.capture.scopes import LayerScopes

        assert "torch._dynamo" not in sys.modules
        plain = nn.Module.__call__
        model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        scopes = LayerScopes(model)
        scopes.attach()
        graphs = []
        compiled = torch.compile(model, backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
        compiled(torch.ones(1, 2)).sum().backward()
        scopes.detach()
        torch._dynamo.config.error_on_recompile = True
        compiled(torch.ones(1, 2))
        assert len(graphs) == 1, graphs
        assert torch._dynamo.utils.unpatched_nn_module_call is plain
        assert torch._dynamo.variables.nn_module.unpatched_nn_module_call is plain
        assert torch.fx._symbolic_trace._orig_module_call is plain
        assert [row["compiled"] for row in scopes.describe() if row["path"] == "."] == [True]
        print("fine")
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]  # in the forks of `programs.py` it is imported
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.endswith("fine\n"), done.stderr
