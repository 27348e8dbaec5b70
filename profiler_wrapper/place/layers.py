"""The layers of a recording: from our marks, else `nn.Module:` events, else named blocks."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from profiler_wrapper.place.names import GENERATING_PHASES, Phase
from profiler_wrapper.trace.arrays import grouped, marked
from profiler_wrapper.trace.marks import (
    GARBAGE,
    MEMORY_POINT,
    REQUEST,
    ROOT_PATH,
    Mark,
    is_server_step,
    kind_of,
    looks_like_stage,
    parse_mark,
)
from profiler_wrapper.trace.nesting import nearest, nearest_above
from profiler_wrapper.trace.recording import MODULE_PREFIX, Bool, Category, Int32, Recording

Source = Literal["marks", "modules", "named blocks", "none"]

_ANONYMOUS = re.compile(r".+#\d+")  # a root named by its class, numbered
# Annotations that torch and its libraries make by themselves: they name no block of a model.
_NOT_A_BLOCK = re.compile(
    r"ProfilerStep|Optimizer\.|nccl:|gloo:|mpi:|ucc:|xccl:|c10d|FSDP::|FullyShardedDataParallel\.|(Distributed)?DataParallel\.|enumerate\(|"
    r"## Call|Torch-Compiled|TorchDynamo|torch/|torch\.|autograd|Pregraph|CompiledFunction|AOTDispatcher|Inductor|"
    r"\[pytorch|iteration#|PyTorch Profiler|Iteration Start|cudaGraph|record_param_comms|"
    + "|".join(map(re.escape, (MEMORY_POINT, REQUEST, GARBAGE)))
)


@dataclass(slots=True)
class Layer:
    """One layer as rows name it."""

    name: str
    raw_name: str
    class_name: str
    kind: str
    parent: int  # index, -1 at a root
    order: int
    compiled: bool = False
    shared: bool = False
    expert_tokens: Sequence[Sequence[int]] = ()  # by call with shapes, of each expert inside, as the run tells them
    tokens_unknown: str = ""  # or why it does not
    block: int = -1  # same: replaced before it is read
    depth: int = 0  # same: replaced before it is read
    ancestors: tuple[int, ...] = ()  # itself first, the root last


@dataclass(slots=True)
class LayerTree:
    """Layers and the spans that enter them."""

    source: Source
    layers: list[Layer] = field(default_factory=list)
    layer_of_span: dict[int, int] = field(default_factory=dict)  # span index -> layer index
    phase_of_span: dict[int, Phase] = field(default_factory=dict)  # of calls that generate
    layer_of_mark: dict[tuple[str, str], int] = field(default_factory=dict)  # (root, path) -> layer index
    not_entered: tuple[str, ...] = ()  # names of layers that the run describes and that were never called

    def by_name(self) -> dict[str, int]:
        """Layer index by name."""
        return {layer.name: i for i, layer in enumerate(self.layers)}

    def common_ancestor(self, indices: Iterable[int]) -> int:
        """The deepest layer that holds all of `indices`; -1 if they share none."""
        common: Sequence[int] | None = None
        for index in indices:
            chain = self.layers[index].ancestors
            common = chain if common is None else [a for a in common if a in chain]
        return common[0] if common else -1

    def block_of(self, chain: Sequence[int]) -> int:
        """The outermost block of a layer and what is around it; -1 for none."""
        return next((layer for layer in reversed(chain) if self.layers[layer].kind == "block"), -1)

    def path(self, chain: Sequence[int]) -> tuple[str, ...]:
        """The names down to a layer from below the root that called it, each as its caller has it; else in full."""
        labels: list[str] = []
        for layer, caller in pairwise(chain):
            name, above = self.layers[layer].name, self.layers[caller]
            inside = name if above.parent < 0 else name[len(above.name) + 1 :]
            labels[:0] = inside.split(".") if self.layers[layer].parent == caller else [name]
        return tuple(labels)

    def called_by(self, layer: int, callers: tuple[int, ...]) -> tuple[int, ...]:
        """A called layer, what its name tells to be around it up to its caller, and what called that; without a caller
        what its name tells, as for a root. Above a shared layer its name tells nothing.
        """
        own = self.layers[layer].ancestors
        if not callers or len(own) == 1:
            return own
        named: list[int] = []
        for above in own:
            if above == callers[0]:
                break
            named.append(above)
            if self.layers[above].shared:
                break
        else:
            named = [layer]
        return (*named, *(above for above in callers if above not in named))


def find_layers(
    recording: Recording, parent: Int32, described: Iterable[Mapping[str, Any]], unmarked: Iterable[Mark]
) -> LayerTree:
    """The layer tree of `recording`.

    `parent`: per span the span that encloses it, -1 for none. `described`: what the run's own
    description (run.json) says of its layers, which gives raw names and the order of registration.
    `unmarked`: layers beside those that are entered through marks.
    """
    spans = recording.spans
    marks = {i: mark for i, name in enumerate(recording.names) if (mark := parse_mark(name)) is not None}
    if marks:
        written_by_us = (spans.category == Category.CPU_OP) | (spans.category == Category.ANNOTATION)
        entries = _by_start(recording, written_by_us & marked(len(recording.names), marks)[spans.name])
        tree = _from_marks([(span, marks[int(spans.name[span])]) for span in entries], described, unmarked)
    elif modules := _by_start(recording, spans.category == Category.MODULE):
        tree = _from_modules(recording, modules, parent)
    else:
        tree = _from_named_blocks(recording, _by_start(recording, spans.category == Category.ANNOTATION), parent)
    _complete(tree)
    return tree


def _by_start(recording: Recording, chosen: Bool) -> list[int]:
    """The chosen spans in order of start, one that encloses another before it."""
    spans = recording.spans
    found = np.flatnonzero(chosen)
    ordered: list[int] = found[np.lexsort((-spans.duration_ns[found], spans.start_ns[found]))].tolist()
    return ordered


def is_named_block(name: str) -> bool:
    """Whether an annotation of this name is a block that somebody named, not one of torch's own."""
    return parse_mark(name) is None and _NOT_A_BLOCK.match(name) is None and not is_server_step(name)


def _from_marks(
    entries: Sequence[tuple[int, Mark]], described: Iterable[Mapping[str, Any]], unmarked: Iterable[Mark]
) -> LayerTree:
    places = {(str(d.get("root")), str(d.get("path"))): (place, d) for place, d in enumerate(described)}
    first_mark: dict[tuple[str, str], Mark] = {}
    compiled = set()  # sooner or later: a block may be compiled after its first call
    for mark in (*(mark for _, mark in entries), *unmarked):
        key = (mark.root, mark.path)
        first_mark.setdefault(key, mark)
        if "compiled" in mark.flags:
            compiled.add(key)
    distinct = list(first_mark)
    prefix = _root_prefixes(distinct)
    tree = LayerTree("marks")
    index: dict[tuple[str, str], int] = {}
    for place, key in enumerate(distinct):
        mark = first_mark[key]
        order, description = places.get(key, (place + len(places), {}))
        name = _layer_name(key, prefix)
        index[key] = len(tree.layers)
        tree.layers.append(
            Layer(
                name=name,
                raw_name=str(description.get("raw_name", name)) or name,
                class_name=mark.class_name,
                kind=mark.kind,
                parent=-1,
                order=order,
                compiled=key in compiled,
                shared="shared" in mark.flags,
                expert_tokens=description.get("expert_tokens", ()),
                tokens_unknown=description.get("tokens_unknown", ""),
            )
        )
    for root, path in distinct:
        holders = [] if path == ROOT_PATH else [(root, above) for above in paths_above(path)]
        tree.layers[index[root, path]].parent = next((index[key] for key in holders if key in index), -1)
    _repeated_roots_are_blocks(tree, index)
    tree.layer_of_mark = index
    tree.not_entered = tuple(_layer_name(key, prefix) for key in places if key not in index and key[0] in prefix)
    for span, mark in entries:
        tree.layer_of_span[span] = index[mark.root, mark.path]
        for phase in GENERATING_PHASES:
            if phase in mark.flags:
                tree.phase_of_span[span] = phase
    return tree


def _root_prefixes(distinct: Iterable[tuple[str, str]]) -> dict[str, tuple[str, str]]:
    """Per root: the root's own row name, and what its layers' names start with.

    A root that its user named is the start of its layers' paths already. One that is named by its
    class lends its name to its layers only where several such roots have layers.
    """
    with_layers: dict[str, bool] = {}
    for root, path in distinct:
        with_layers[root] = with_layers.get(root, False) or path != ROOT_PATH
    anonymous = [root for root in with_layers if _ANONYMOUS.fullmatch(root)]
    like = Counter(root.rpartition("#")[0] for root in anonymous)
    several = sum(with_layers[root] for root in anonymous) > 1
    prefixes = {root: (root, "") for root in with_layers}
    for root in anonymous:
        class_name, _, number = root.rpartition("#")
        name = class_name if like[class_name] == 1 else f"{class_name}_{number}"
        prefixes[root] = (name, f"{name}." if several else "")
    return prefixes


def _layer_name(key: tuple[str, str], prefixes: Mapping[str, tuple[str, str]]) -> str:
    root, path = key
    own, prefix = prefixes[root]
    return own if path == ROOT_PATH else prefix + path


def paths_above(path: str) -> list[str]:
    """The paths of what may hold a layer, the innermost first."""
    steps = path.split(".")
    return [*(".".join(steps[:n]) for n in range(len(steps) - 1, 0, -1)), ROOT_PATH]


def _repeated_roots_are_blocks(tree: LayerTree, index: Mapping[tuple[str, str], int]) -> None:
    """Blocks that a user calls one by one are roots; like ones are blocks all the same."""
    has_layers = {root for root, path in index if path != ROOT_PATH}
    roots = [root for root, path in index if path == ROOT_PATH]
    like = Counter(root.rpartition("#")[0] for root in roots if _ANONYMOUS.fullmatch(root))
    for root in roots:
        if root in has_layers and like[root.rpartition("#")[0]] > 1:
            tree.layers[index[root, ROOT_PATH]].kind = "block"


def _above(parent: Int32, entries: Sequence[int]) -> dict[int, int]:
    """Per entry: the innermost other entry around it, -1 for none."""
    above = nearest_above(parent, nearest(parent, marked(len(parent), entries)))
    return {entry: int(above[entry]) for entry in entries}


def _from_modules(recording: Recording, modules: Sequence[int], parent: Int32) -> LayerTree:
    """A module's name is its path from the root, by class, numbered among like siblings."""
    instance_of = {span: recording.name_of(span)[len(MODULE_PREFIX) :] for span in modules}
    around = _above(parent, modules)
    first_holder: dict[str, str] = {}
    for span, instance in instance_of.items():  # in order of start
        if instance not in first_holder:
            first_holder[instance] = instance_of[around[span]] if around[span] >= 0 else ""
    like = grouped(((holder, _module_class(instance)), instance) for instance, holder in first_holder.items())
    number = {instance: i for siblings in like.values() for i, instance in enumerate(siblings)}
    tree = LayerTree("modules")
    index: dict[str, int] = {}
    for instance, holder in first_holder.items():  # a holder is entered before what it holds
        class_name = _module_class(instance)
        own = class_name if len(like[holder, class_name]) == 1 else f"{class_name}_{number[instance]}"
        above = index[holder] if holder else -1
        name = f"{tree.layers[above].name}.{own}" if holder else own
        index[instance] = len(tree.layers)
        tree.layers.append(Layer(name, name, class_name, kind_of(class_name), above, len(tree.layers)))
    _find_blocks(tree)
    tree.layer_of_span = {span: index[instance] for span, instance in instance_of.items()}
    return tree


def _module_class(instance: str) -> str:
    """`Qwen2DecoderLayer_7` -> `Qwen2DecoderLayer`: the profiler numbers instances per class."""
    class_name, _, number = instance.rpartition("_")
    return class_name if class_name and number.isdigit() else instance


def _find_blocks(tree: LayerTree) -> None:
    """Like siblings with layers of their own are blocks, the outermost such."""
    has_children = {layer.parent for layer in tree.layers}
    like: dict[tuple[int, str], list[int]] = defaultdict(list)
    for i, layer in enumerate(tree.layers):
        if i in has_children and layer.parent >= 0:
            like[layer.parent, layer.class_name].append(i)
    repeated = {i for members in like.values() if len(members) > 1 for i in members}
    holds_repeated = {tree.layers[i].parent for i in repeated}
    # same (>= -> >): the first layer is a root, which is never repeated
    candidates = repeated - {i for i in holds_repeated if i >= 0 and looks_like_stage(tree.layers[i].class_name)}
    for i in candidates:
        above = tree.layers[i].parent
        while above >= 0 and above not in candidates:
            above = tree.layers[above].parent
        if above < 0:
            tree.layers[i].kind = "block"


def _from_named_blocks(recording: Recording, annotations: Sequence[int], parent: Int32) -> LayerTree:
    blocks = {i for i, name in enumerate(recording.names) if is_named_block(name)}
    entries = {span: recording.name_of(span) for span in annotations if int(recording.spans.name[span]) in blocks}
    tree = LayerTree("named blocks" if entries else "none")
    around = _above(parent, list(entries))
    index: dict[tuple[int, str], int] = {}
    for span, name in entries.items():
        above = around[span]
        above_layer = tree.layer_of_span[above] if above >= 0 else -1
        if above_layer >= 0 and tree.layers[above_layer].raw_name == name:
            tree.layer_of_span[span] = above_layer
            continue
        key = (above_layer, name)
        if key not in index:
            index[key] = len(tree.layers)
            full = f"{tree.layers[above_layer].name}.{name}" if above_layer >= 0 else name
            tree.layers.append(Layer(full, name, "", kind_of(name), above_layer, len(tree.layers)))
        tree.layer_of_span[span] = index[key]
    return tree


def _complete(tree: LayerTree) -> None:
    for i, layer in enumerate(tree.layers):
        chain = [i]
        while (above := tree.layers[chain[-1]].parent) >= 0:
            chain.append(above)
        layer.ancestors = tuple(chain)
        layer.depth = len(chain) - 1
        layer.block = tree.block_of(chain)
