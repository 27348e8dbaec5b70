"""Match the layers of two results, whatever made their names, and list what makes the results hard to compare."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from profiler_wrapper.comparison.model import ComparedRow, Difference
from profiler_wrapper.place.names import PHASES, Phase
from profiler_wrapper.tables.model import Analysis, LayerRow
from profiler_wrapper.tables.statistics import Float, fill_numbers, split_number
from profiler_wrapper.trace.arrays import grouped

_FEWEST_VOTES = 2  # a prefix that puts fewer names together is chance, unless they are all there is
_ENOUGH = 0.5  # of the names of the smaller side: with fewer, classes are tried
_Parts = tuple[str, ...]  # of a name, between its dots
Key = TypeVar("Key")


def match_layers(a: Analysis, b: Analysis) -> dict[str, str]:
    """Return the layers of `a` with the same ones of `b`, by full name; what has no counterpart is left out.

    By name; then with a prefix exchanged for another, where most names agree then; last by the classes on the way from
    the root and the place among siblings of one class. No layer is matched twice.
    """
    layers_a, layers_b = ({row.layer: row for row in side.layers if row.layer} for side in (a, b))
    matched = _match(_from_root(layers_a), _from_root(layers_b))
    if len(matched) < _ENOUGH * min(len(layers_a), len(layers_b)):
        matched = max(matched, _match(_class_paths(layers_a), _class_paths(layers_b)), key=len)
    return matched


def match_names(a: Iterable[str], b: Iterable[str]) -> dict[str, str]:
    """Match as `match_layers`, where only names are known."""
    return _match(*({name: name for name in names if name} for names in (a, b)))


def like_name(layer: str, block: str | None) -> tuple[str, int | None]:
    """Return a name with the number of its block left open (outside of blocks its last number), and that number."""
    if block and (layer == block or layer.startswith(block + ".")):
        pattern, number = split_number(block)
        return pattern + layer[len(block) :], number
    return split_number(layer)


def folded_name(layers: Mapping[str, str | None]) -> str:
    """Return `model.layers.{0..23}.mlp` for sibling layers, the name for one; `layers`: with the block of each."""
    split = [like_name(layer, block) for layer, block in layers.items()]
    numbers = [number for _, number in split if number is not None]
    return fill_numbers(split[0][0], numbers) if len(numbers) > 1 else next(iter(layers))


def siblings_together(
    found: Iterable[tuple[str, Key]], blocks: Mapping[str, str | None]
) -> Iterator[tuple[str, tuple[str, ...], Key]]:
    """Yield siblings of which the same was found under one name: that name, the layers, and what was found."""
    groups: dict[tuple[str, Key], dict[str, str | None]] = defaultdict(dict)
    for layer, what in found:
        block = blocks.get(layer)
        groups[like_name(layer, block)[0], what][layer] = block
    for (_, what), layers in groups.items():
        yield folded_name(layers), tuple(layers), what


def _from_root(layers: Mapping[str, LayerRow]) -> dict[str, str]:
    """Return name -> layer, where "" is the root, if there is one."""
    roots = [layer for layer, named in layers.items() if named.parent not in layers]
    return {"" if [layer] == roots else layer: layer for layer in layers}


def _class_paths(layers: Mapping[str, LayerRow]) -> dict[str, str]:
    """Return `Qwen2DecoderLayer#7.Qwen2RMSNorm#1` -> layer: classes with the place among siblings of that class."""
    children: dict[str | None, list[LayerRow]] = defaultdict(list)
    for named in layers.values():
        children[named.parent if named.parent in layers else None].append(named)
    paths: dict[str, str] = {}
    only_root = len(children[None]) == 1
    pending: list[tuple[str | None, str]] = [(None, "")]
    while pending:
        above, path = pending.pop()
        places: Counter[str] = Counter()
        for named in sorted(children.get(above, ()), key=lambda child: child.order):
            name = named.class_name or named.layer.rpartition(".")[2]
            own = "" if above is None and only_root else f"{name.replace('.', '_')}#{places[name]}"
            places[name] += 1
            own_path = f"{path}.{own}" if path else own
            if own_path not in paths:
                paths[own_path] = named.layer
                pending.append((named.layer, own_path))
    return paths


def _match(a: Mapping[str, str], b: Mapping[str, str]) -> dict[str, str]:
    """Match layers of equal names, and of names that are equal with one prefix in the place of another."""
    parts_a, parts_b = (
        {tuple(name.split(".")) if name else (): layer for name, layer in side.items()} for side in (a, b)
    )
    matched: dict[str, str] = {}
    taken: set[str] = set()
    for prefix_a, prefix_b in _prefixes(parts_a, parts_b):
        for name, layer in parts_a.items():
            if name[: len(prefix_a)] == prefix_a and layer not in matched:
                other = parts_b.get(prefix_b + name[len(prefix_a) :])
                if other is not None and other not in taken:
                    matched[layer] = other
                    taken.add(other)
    return matched


def _prefixes(a: Collection[_Parts], b: Collection[_Parts]) -> list[tuple[_Parts, _Parts]]:
    """Return which prefix of `a` stands for which of `b`, that of most names first."""
    none: tuple[_Parts, _Parts] = ((), ())
    votes = Counter({none: 0})
    ends: tuple[dict[_Parts, list[_Parts]], ...] = (defaultdict(list), defaultdict(list))
    for side, names in zip(ends, (a, b), strict=True):
        for name in names:
            for first in range(len(name)):
                side[name[first:]].append(name)
    for name in a:
        if name in b:
            votes[none] += 1
            continue
        for first in range(len(name)):
            rest = name[first:]
            others = ends[1].get(rest, ())
            if len(ends[0][rest]) == 1 == len(others):
                votes[name[:first], others[0][: -len(rest)]] += 1
                break
    enough = min(_FEWEST_VOTES, len(a), len(b))
    return [pair for pair, count in votes.most_common() if count >= enough or pair == none]


# Two results side by side: steps, series per step, and the rows of both.


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """One result, with the number of steps that sums are divided by."""

    analysis: Analysis
    steps: int  # at least 1
    known_steps: bool  # times within each step are known, and there are several
    marked: bool  # it tells its steps; else all of it counts as one

    @property
    def total_ns(self) -> float:
        """Return the time of a step."""
        return self.analysis.time.total_ns / self.steps

    def series(self, rows: Sequence[LayerRow]) -> Float:
        """Return the time of `rows` together in each step, as far as steps are known; else all of it as one step."""
        if self.known_steps:
            known = [row.step_times_ns for row in rows if row.step_times_ns]
            return np.asarray(np.array(known, dtype=np.float64).reshape(-1, self.steps).sum(axis=0))
        return np.array([sum(row.time_ns for row in rows) / self.steps])

    def step_totals(self) -> Float:
        """Return the time of each step, or of one."""
        times = [row.time_ns for row in self.analysis.steps if row.step is not None]
        return np.array(times if self.known_steps else [self.total_ns], dtype=np.float64)


def side_of(analysis: Analysis) -> Side:
    """Return the side of one result. Its steps are known where every row of a layer with time has theirs."""
    steps = sum(row.step is not None for row in analysis.steps)
    each_row_known = all(len(row.step_times_ns) == steps for row in analysis.layers if row.time_ns)
    return Side(analysis, max(1, steps), steps > 1 and each_row_known and bool(analysis.layers), steps > 0)


def pair_rows(a: Analysis, b: Analysis) -> tuple[ComparedRow, ...]:
    """Return every row of both results, once: layers in the order of `b`, behind them those that only `a` has."""
    shown_of_a = shown_names(a, b)
    rows_a = {(shown_of_a[row.layer], row.phase): row for row in a.layers}
    rows_b = {(row.layer, row.phase): row for row in b.layers}
    backends_a, backends_b = backends_of(a), backends_of(b)
    order = {layer: place for place, layer in enumerate(dict.fromkeys(layer for layer, _ in (*rows_b, *rows_a)))}
    return tuple(
        ComparedRow(
            layer=key[0],
            phase=key[1],
            a=rows_a.get(key),
            b=rows_b.get(key),
            backends_a=backends_a.get((rows_a[key].layer, key[1]), ()) if key in rows_a else (),
            backends_b=backends_b.get(key, ()),
        )
        for key in sorted({*rows_a, *rows_b}, key=lambda key: (order[key[0]], PHASES.index(key[1])))
    )


def blocks_of(pairs: Iterable[ComparedRow]) -> dict[str, str | None]:
    """Return the block of each layer."""
    return {pair.layer: pair.row.block for pair in pairs}


def backends_of(analysis: Analysis) -> dict[tuple[str, Phase], tuple[str, ...]]:
    """Return the backends of each layer's own attention, the one with most time first."""
    found = grouped(((row.layer, row.phase), (-row.time_ns, row.backend)) for row in analysis.attention)
    return {key: tuple(backend for _, backend in sorted(backends)) for key, backends in found.items()}


def shown_names(a: Analysis, b: Analysis, mark: str = "a") -> dict[str, str]:
    """Return the layers of `a` by the names of `b`. What `b` does not have keeps its name, marked if `b` has it too."""
    of_a, of_b = ({row.layer: row.layer for row in side.layers} for side in (a, b))
    alone = {layer: f"{layer} ({mark})" if layer in of_b else layer for layer in of_a if layer}
    return {"": ""} | alone | match_layers(a, b)


# What makes two results hard to compare.

BASIS = "time basis"
SIZES = "sizes of linear layers' products"  # known by digests
_MOST_LISTED = 12
_SAME_COVERAGE = 0.02  # coverages that are nearer are as good as equal

# By the keys of a result's `comparable`, in the order in which they are said: words, and whether times alone differ.
_TRAITS: Mapping[str, tuple[str, bool]] = {
    "time_basis": (BASIS, True),
    "model": ("model", False),
    "layers": ("layers", False),
    "blocks": ("blocks", False),
    "parameters": ("parameters", False),
    "shapes": (SIZES, False),
    "attention_shape": ("attention shape", False),
    "dtypes": ("types of numbers", False),
    "phases": ("phases", False),
    "device": ("device", True),
    "device_count": ("devices", True),
    "cpu_name": ("CPU", True),
    "world_size": ("world size", False),
    "torch": ("torch", False),
    "python": ("Python", True),
}
# Then versions and settings, by the keys of a run.
_SETTINGS = (
    "versions", "environment", "optimizers", "wrappers", "attention_implementation", "attention_backends",
    "float32_matmul_precision", "tf32", "cudnn", "allocator_settings", "process_group_backend",
)  # fmt: skip
_RECORDING: Mapping[str, tuple[str, bool]] = {
    "steps": ("timed steps", True),
    "shapes_in_timed_steps": ("shapes in the timed steps", True),
    "memory_in_timed_steps": ("allocations in the timed steps", True),
    "complete": ("complete", False),
    "coverage": ("coverage", True),
}
HARMLESS = frozenset({"timed steps", "profiler_wrapper"})  # to be said, but no reason not to judge
OF_MACHINE = frozenset({"device", "devices", "CPU", "world size", "torch", "Python", BASIS})


def traits(analysis: Analysis) -> dict[str, Any]:
    """Return what makes a result comparable, as far as it is known."""
    settings = _settings(analysis.run)
    known = {**(analysis.summary.get("comparable") or {}), "time_basis": analysis.time_basis}
    # A baseline's results have them there, and know no more of the run.
    known |= {key: settings.pop(key, known.get(key)) for key in ("torch", "python")}
    known["settings"] = settings or known.get("settings")
    return {key: value for key, value in known.items() if value is not None}


def _settings(run: Mapping[str, Any]) -> dict[str, Any]:
    known = {"trainable parameters": (run.get("parameters") or {}).get("trainable_elements")}
    for key in _SETTINGS:
        value, words = run.get(key), key.replace("_", " ")
        if key == "optimizers" and value is not None:
            value = [str(one.get("class_name")) + " fused" * bool(one.get("fused")) for one in value] or None
        named = value if isinstance(value, Mapping) else {"": value}
        known |= {
            name if key in ("versions", "environment") else f"{words} {name}".strip(): named[name] for name in named
        }
    return {words: value for words, value in known.items() if value is not None}


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[Difference, ...]:
    """Return where two results' traits differ: work and machine, versions and settings, then how it was recorded.

    What is not known on a side is no difference.
    """
    found = []
    settings = {name: (name, False) for name in a.get("settings", ())}
    a, b = ({**side.get("settings", {}), **side} for side in (a, b))
    for key, (words, of_time_only) in {**_TRAITS, **settings, **_RECORDING}.items():
        one, other = a.get(key), b.get(key)
        if one is None or other is None or one == other or isinstance(one, str) != isinstance(other, str):
            continue  # a trace has CUDA's version as a number
        if key == "coverage" and abs(float(one) - float(other)) <= _SAME_COVERAGE:
            continue
        if key == "cpu_name" and a.get("time_basis") == b.get("time_basis") == "device":
            continue
        found.append(Difference(what=words, a=_words(key, one), b=_words(key, other), of_time_only=of_time_only))
    return tuple(found)


def changed(what: str, a: str, b: str) -> str:
    """Return `torch 2.12 -> 2.13`; of lists what one side has alone: `phases +recompute`."""
    if what == SIZES:
        return what
    before, after = a.split(", "), b.split(", ")
    if len(before) == len(after) == 1:
        return f"{what} {a} -> {b}"
    items = [f"-{item}" for item in before if item not in after] + [f"+{item}" for item in after if item not in before]
    return f"{what} {', '.join(items)}"


def what_differs(found: Sequence[tuple[str, str, str]]) -> list[str]:
    """Return a line for each difference (what, on both sides); of many for the first."""
    more = [f"{len(found) - _MOST_LISTED} more, which the JSON has"] if len(found) > _MOST_LISTED else []
    return [f"differs: {text}" for text in (*(changed(*one) for one in found[:_MOST_LISTED]), *more)]


def _words(key: str, value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if key == "coverage" and isinstance(value, (int, float)):
        return f"{100 * value:.1f} %"
    if isinstance(value, (list, tuple)):
        return (" x " if key == "attention_shape" else ", ").join(map(str, value)) or "none"
    return str(value) or "not set"
