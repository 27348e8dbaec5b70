"""Which modules a kernel of a compiled graph works for, from the FX nodes it was made from.

What Dynamo and AOTAutograd leave on a node: `nn_module_stack` on one of the forward,
`fwd_nn_module_stack` on one of the backward; neither on what the compiled module does itself. A
node without `seq_nr` was made later by a pass of Inductor's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

_ROOT = re.compile(r"L\['\w+'\]")
_STEPS = re.compile(r"""\._modules\[['"](\w+)['"]\]|\[['"](\w+)['"]\]|\[(\d+)\]|\.([^.\[\]@]+)""")
_MADE_BY_A_PASS = "made by a pass"


class ForeignModule(ValueError):
    """A graph runs a module that does not belong to the module that was compiled."""


class Module(NamedTuple):
    """A module as Dynamo knows it."""

    path: str  # below the compiled module; "" for that one itself
    class_name: str
    root: str  # the compiled module in its own code: L['self']


OWN = Module("", "", "")  # the compiled module


def split_source(source: str) -> tuple[str, str]:
    """`L['self'].layers.0._orig_mod.mlp` -> `L['self']`, `layers.0.mlp`.

    Raises:
        ForeignModule: it is no module below an argument of the compiled code.
    """
    plain = re.sub(r"@\d+$", "", source)  # a later call of the same module
    root = _ROOT.match(plain)
    if root is None:
        raise ForeignModule(source)
    rest = plain[root.end() :]
    steps, end = [], 0
    for match in _STEPS.finditer(rest):
        if match.start() != end:
            raise ForeignModule(source)
        end = match.end()
        steps.append(next(group for group in match.groups() if group is not None))
    if end != len(rest):
        raise ForeignModule(source)
    return root[0], ".".join(step for step in steps if step not in ("_orig_mod", "_modules"))


def module_of(node: Any) -> Module | None:
    """The innermost module a node belongs to; None where it names none."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return None
    source, cls = list(stack.values())[-1][:2]
    name = cls.__name__ if isinstance(cls, type) else str(cls).rpartition(".")[2]
    root, path = split_source(source)
    return Module(path, name, root) if path else None


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
    """The FX nodes that tell whom a kernel works for: not those that only look at memory, if there are others."""
    nodes = list(dict.fromkeys(_nodes_of_list(made_from) if isinstance(made_from, list) else _nodes_of_one(made_from)))
    working = [node for node in nodes if not _is_view(node)]
    return working or nodes


def _nodes_of_list(schedule: list[Any]) -> Iterator[Any]:
    """Of what the scheduler fused into one kernel; markers between the nodes have no `node`."""
    for scheduled in schedule:
        if getattr(scheduled, "node", None) is not None:
            yield from scheduled.node.origins


def _nodes_of_one(extern: Any) -> Iterable[Any]:
    """Of a call of a library: the very node if it is known, else the one that calls this operator."""
    if getattr(extern, "origin_node", None) is not None:
        return [extern.origin_node]
    nodes = list(extern.origins)
    operator = getattr(extern, "op_overload", None)
    return [node for node in nodes if operator is not None and node.target == operator] or nodes


def _is_view(node: Any) -> bool:
    target = node.target
    return bool(getattr(target, "is_view", False)) or str(target).startswith("aten._unsafe_view")


def owners(nodes: Iterable[Any]) -> list[Module]:
    """The modules that a kernel works for; `OWN` stands for the compiled one itself.

    The sum of two gradients of one tensor belongs to nobody. What a pass made belongs to whom its
    nearest inputs belong.
    """
    found: dict[Module, None] = {}
    for node in nodes:
        if not node.meta.get("is_gradient_acc"):
            found.update(dict.fromkeys(_owners_of_node(node, set())))
    return list(found) or [OWN]


def _owners_of_node(node: Any, seen: set[Any]) -> list[Module]:
    module = module_of(node)
    if module is not None:
        return [module]
    if "seq_nr" in node.meta:
        return [OWN]
    inferred: dict[Module, None] = {}
    for above in node.all_input_nodes:
        if above not in seen and above.op not in ("placeholder", "get_attr"):
            seen.add(above)
            if not above.meta.get("is_gradient_acc"):
                inferred.update(dict.fromkeys(_owners_of_node(above, seen)))
    return list(inferred) or [OWN]


def is_recomputed(nodes: Iterable[Any]) -> bool:
    """Whether all of a backward graph's kernel is forward run again."""
    kinds = {_kind(node) for node in nodes} - {_MADE_BY_A_PASS}
    return kinds == {"forward"}


def _kind(node: Any) -> str:
    meta = node.meta
    if "seq_nr" not in meta:
        return _MADE_BY_A_PASS
    if meta.get("nn_module_stack") or meta.get("source_fn_stack"):
        return "forward"
    return "backward"
