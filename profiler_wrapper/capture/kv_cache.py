"""The KV cache of a request: what it holds after the prefill and at the end, and what more tokens would take.

Shapes, types and sizes are read, never a value, so nothing waits for a device. Caches are held weakly.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from profiler_wrapper.capture.owned_tensors import dtype_name, plain_parts, tensors_in
from profiler_wrapper.errors import first_few
from profiler_wrapper.trace.run_file import KVCache

_CONTEXTS = (4096, 32768, 131072)  # tokens
_NAMES = ("past_key_values", "cache_params")  # of the argument, and in the output
# Where layers of Transformers' caches have their tensors; in the last, a few numbers that are not counted.
_KEYS = ("keys", "values", "indexer_keys", "indexer_position_ids", "_quantized_keys", "_quantized_values")
_STATES = ("conv_states", "recurrent_states")
_NUMBERS = ("cumulative_length", "indexer_cumulative_length", "_sliding_window_tensor", "_pending_beam_idx")


@dataclass(frozen=True, slots=True)
class _Held:
    """What a layer holds; of layers that are equal, one is read."""

    attention: str  # self, cross
    kind: str  # full, sliding, static, static sliding, quantized, state
    dtype: str
    sequences: int
    tokens: int | None  # so far; None where only a tensor has it
    places: int  # for tokens, of each sequence
    window: int | None
    size_bytes: int  # of the tensors
    held_bytes: int  # of their storages
    token_bytes: int | None  # of one token of one sequence

    def bytes_at(self, tokens: int, *, windows: bool) -> int | None:
        """With so many tokens in each sequence. `windows`: what is static and sliding holds its whole window."""
        if self.attention == "cross" or self.kind == "state":
            return self.size_bytes
        if self.kind == "static sliding":  # which may be cut to the capacity of the cache
            return self.size_bytes if windows or tokens <= self.places else None
        if self.token_bytes is None:
            return None
        if self.kind == "static":  # a longer context takes a larger one
            tokens = max(tokens, self.places)
        elif self.window is not None:
            tokens = min(tokens, self.window - 1)  # its last place is for the token that comes
        return self.size_bytes + self.token_bytes * self.sequences * (tokens - self.places)


@dataclass(slots=True)
class _Cache:
    """One cache, as the last call left it."""

    root: str
    name: str
    reference: Callable[[], object] | None  # None: a tuple, which each call makes anew
    queries: int | None = 0  # tokens that calls brought; None: it held some before them
    prefilling: bool = True
    groups: list[list[int]] = field(default_factory=list)  # of equal layers, by index
    before: dict[tuple[int, str], _Held] = field(default_factory=dict)  # after the prefill, by group and kind
    now: dict[tuple[int, str], _Held] = field(default_factory=dict)
    problem: str | None = None

    def read(self, cache: object) -> None:
        """Layers that were equal after the first call stay so, and one of them is read."""
        layers = _layers(cache)
        if len(layers) != sum(map(len, self.groups)):
            equal: dict[tuple[object, ...], list[int]] = {}
            for i, (attention, layer) in enumerate(layers):
                equal.setdefault(tuple(_read(layer, attention)), []).append(i)
            self.groups = list(equal.values())
        self.now = {
            (group, held.kind): held
            for group, members in enumerate(self.groups)
            for held in _read(layers[members[0]][1], layers[members[0]][0])
        }

    @property
    def size_bytes(self) -> int:
        return self._sum(self.now)

    def describe(self, beams: int) -> KVCache:
        """As run.json has it."""
        own = [held for held in self.now.values() if held.attention == "self"]
        tokens = max((held.tokens for held in own if held.tokens is not None), default=self.queries)
        wide = max((held.places for held in own if held.kind == "static"), default=0)
        narrow = max((held.places for held in own if held.kind == "static sliding"), default=0)
        total = partial(self._bytes_at, windows=narrow < max(wide, tokens or 0))
        now, more = (None, None) if tokens is None else (total(tokens), total(tokens + 1))
        return {
            "root": self.root,
            "cache": self.name,
            "requests": 1,
            "sequences": max((held.sequences for held in own), default=0) or None,
            "beams": beams,
            "tokens": tokens,
            "bytes_after_prefill": None if self.problem else self._sum(self.before),
            "bytes": None if self.problem else self.size_bytes,
            "bytes_per_token": None if now is None or more is None else more - now,
            "layers": [
                {
                    "attention": held.attention,
                    "kind": kind,
                    "count": len(self.groups[group]),
                    "dtype": held.dtype,
                    "window": held.window,
                    "capacity": held.places if kind.startswith("static") else None,
                    "bytes": held.size_bytes,
                    "held_bytes": held.held_bytes,
                    "bytes_per_token": held.token_bytes,
                }
                for (group, kind), held in self.now.items()
            ],
            "contexts": [{"tokens": many, "bytes": total(many)} for many in _CONTEXTS if many > (tokens or 0)],
            "problem": self.problem,
        }

    def _sum(self, reading: Mapping[tuple[int, str], _Held]) -> int:
        return sum(held.size_bytes * len(self.groups[group]) for (group, _), held in reading.items())

    def _bytes_at(self, tokens: int, *, windows: bool) -> int | None:
        sizes = [
            (held.bytes_at(tokens, windows=windows), len(self.groups[group])) for (group, _), held in self.now.items()
        ]
        known = [size * count for size, count in sizes if size is not None]
        return sum(known) if len(known) == len(sizes) and not self.problem else None


class RequestCaches:
    """What the calls of one request leave in the caches that they bring."""

    def __init__(self) -> None:
        self._caches: list[_Cache] = []

    def call(self, root: str, phase: str, kwargs: Mapping[str, Any], tokens: int | None) -> Callable[[object], None]:
        """An outermost call of `root` begins, about `tokens` of each sequence; what is returned takes its result."""
        given = next((kwargs[name] for name in _NAMES if kwargs.get(name) is not None), None)
        if given is not None and self._find(root, given) is None and _is_filled(given):
            self._add(root, given).queries = None
        return partial(self._read, root, phase, given, tokens)

    def _read(self, root: str, phase: str, given: object, tokens: int | None, result: object) -> None:
        cache = next((cache for name in _NAMES if (cache := getattr(result, name, None)) is not None), given)
        if cache is None:
            return
        found = self._find(root, cache) or self._add(root, cache)
        found.queries = None if found.queries is None or tokens is None else found.queries + tokens
        try:
            found.read(cache)
        except Exception as error:  # of a class that somebody wrote
            found.problem = f"{found.name} cannot be read ({error})"
        found.prefilling &= not found.before or phase == "prefill"  # in chunks, perhaps
        if found.prefilling:
            found.before = found.now

    def describe(self, beams: int) -> list[KVCache]:
        """Of each root the cache that was largest."""
        roots = {one.root: one for one in sorted(self._caches, key=lambda one: one.size_bytes)}
        return [one.describe(beams) for one in roots.values()]

    def _find(self, root: str, cache: object) -> _Cache | None:
        for one in self._caches:
            is_it = one.name == type(cache).__name__ if one.reference is None else one.reference() is cache
            if one.root == root and is_it:
                return one
        return None

    def _add(self, root: str, cache: object) -> _Cache:
        gone = [one for one in self._caches if one.root == root and one.reference and one.reference() is None]
        for one in sorted(gone, key=lambda one: one.size_bytes)[:-1]:  # only the largest is described
            self._caches.remove(one)
        reference = weakref.ref(cache) if getattr(type(cache), "__weakrefoffset__", 0) else None
        self._caches.append(_Cache(root, type(cache).__name__, reference))
        return self._caches[-1]


def keep_largest(known: list[KVCache], found: Sequence[KVCache]) -> None:
    """Add what another request has left: `known` has the largest of each root."""
    for one in found:
        other = next((cache for cache in known if cache["root"] == one["root"]), None)
        if other is None:
            known.append(one)
        else:
            larger = max(other, one, key=lambda cache: cache["bytes"] or 0)
            known[known.index(other)] = {**larger, "requests": other["requests"] + 1}


def _layers(cache: Any) -> list[tuple[str, Any]]:
    """The layers of a cache, each with what it is for: self-attention or cross-attention."""
    if isinstance(cache, (tuple, list)):  # of older models: (keys, values), or those of both
        pairs = [("self", *layer[:2]) for layer in cache] + [("cross", *layer[2:4]) for layer in cache if layer[2:4]]
        return [(attention, SimpleNamespace(keys=keys, values=values)) for attention, keys, values in pairs]
    if hasattr(cache, "cross_attention_cache"):
        both = ("self", cache.self_attention_cache), ("cross", cache.cross_attention_cache)
        return [(attention, layer) for attention, one in both for layer in one.layers]
    return [("self", layer) for layer in cache.layers]


def _is_filled(cache: Any) -> bool:
    layers = getattr(getattr(cache, "self_attention_cache", cache), "layers", ())
    return any(_has_tensors(getattr(layer, "keys", None)) for layer in layers)


def _read(layer: Any, attention: str) -> Iterator[_Held]:
    """Keys and values, then states that do not grow. Raises TypeError: it holds what is not known."""
    fields, name = vars(layer), type(layer).__name__
    strange = [key for key in fields if key not in (*_KEYS, *_STATES, *_NUMBERS) and _has_tensors(fields[key])]
    if strange or not {"keys", "conv_states"} & {*fields}:
        raise TypeError(f"what {name} holds is not known: {first_few(strange, 3) or 'neither keys nor states'}")
    keys, states = ([*_tensors([fields.get(key) for key in side])] for side in (_KEYS, _STATES))
    if keys:
        yield _keys(layer, attention, [one for one in keys if one.numel()])
    if states:
        yield _Held(attention, "state", dtype_name(states[0]), len(states[0]), None, 0, None, *_sizes(states), None)


def _keys(layer: Any, attention: str, tensors: list[torch.Tensor]) -> _Held:
    fields = vars(layer)
    is_quantized, window, room = "_quantized_keys" in fields, fields.get("sliding_window"), fields.get("max_cache_len")
    kind = "quantized" if is_quantized else "full" if window is None else "sliding"
    if room is not None:
        kind = "static sliding" if layer.is_sliding else "static"
    wide = [one for one in tensors if one.ndim == 4]  # (sequences, heads, tokens, head_dim)
    if not wide and not is_quantized:
        raise TypeError(f"{type(layer).__name__} holds no keys of four dimensions")
    sequences, places = (wide[0].shape[0], wide[0].shape[-2]) if wide else (0, 0)
    counted = [fields.get("cumulative_length_int"), fields.get("cumulative_length")]
    tokens = next((count for count in counted if isinstance(count, int)), None if room else places)
    # Numbers that are quantized in groups have scales of their own, and the last ones may not be quantized yet.
    is_even = all(one.ndim == 0 or (one.ndim > 2 and places in one.shape) for one in tensors)
    growing = sum(one.nbytes for one in tensors if one.ndim > 2)
    each = growing // (sequences * places) if is_even and (not is_quantized or places == tokens) else None
    return _Held(attention, kind, dtype_name(tensors[0]), sequences, tokens, places, window, *_sizes(tensors), each)


def _sizes(tensors: Sequence[torch.Tensor]) -> tuple[int, int]:
    """Bytes of the tensors, and of the storages that they keep."""
    storages = {(one := tensor.untyped_storage())._cdata: one.nbytes() for tensor in tensors}
    return sum(tensor.nbytes for tensor in tensors), sum(storages.values())


def _has_tensors(value: object) -> bool:
    return any(True for _ in _tensors(value))


def _tensors(value: object) -> Iterator[torch.Tensor]:
    """Those in it, a subclass's own ones in its place."""
    return (part for tensor, _ in tensors_in(value) for part in plain_parts(tensor))
