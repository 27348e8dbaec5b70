"""Mixtures of experts: tokens, time and FLOPs of each expert, and what runs beside them; adapters beside their base.

Which expert an op works for is told, where each is a module, by the layer; where a loop takes the weights of one after
the other out of a stacked tensor, by the index of the `aten::select` before it. The rows of the first product are its
tokens. Grouped and fused kernels work for all experts at once: there the tokens are those that the run says the router
chose, FLOPs follow from them, and nothing tells the time of one.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, count, pairwise
from statistics import fmean
from string import digits
from typing import NamedTuple

import numpy as np

from profiler_wrapper.place.names import FORWARD_PHASES, Phase
from profiler_wrapper.place.placed import Placed
from profiler_wrapper.tables.call_rows import AdapterRow, ExpertLayerRow, ExpertRow
from profiler_wrapper.tables.statistics import sum_if_all_known
from profiler_wrapper.tables.work.flops import FlopCount, FlopOps
from profiler_wrapper.tables.work.formulas import products_of
from profiler_wrapper.trace.arrays import at, marked, sum_by_key
from profiler_wrapper.trace.marks import expert_number, parse_mark
from profiler_wrapper.trace.nesting import nearest
from profiler_wrapper.trace.recording import Category, Int64, Shapes

CHOOSING = "aten::select"  # takes the weights of one expert out of those of all
_SHARED = re.compile(r"shared_experts?$")
_PHASES: tuple[Phase, ...] = (*FORWARD_PHASES, "recompute", "backward")
_ONE_KERNEL = "one kernel works for all experts, and nothing tells what the router chose"


# --- which expert ---------------------------------------------------------------------------------


class _Holders(NamedTuple):
    """By place: the module that holds the experts, and which of them this is; one that several layers call is several.

    A trace names what layers share as one of them has it. The others are taken to call it the same, but for a number
    that is free where they have something else of that name.
    """

    names: list[str]  # of the modules that hold experts, as their callers have them
    holder: Int64  # per place: index into names, -1 outside of experts
    number: Int64  # per place: which expert; -1 where one module holds all
    owner: Int64  # per place: the layer that is this expert, or that module
    stacked: list[int]  # per name: the layer that is that module; -1 where each expert is one
    callers: list[int]  # per name: the layer that calls it; -1 for none
    lists: list[str]  # per name: where the trace names its experts


def _holders(found: Placed) -> _Holders:
    layers, places, known = found.tree.layers, found.attribution.places, dict[tuple[int, int], str]()
    holder = np.full(len(places), -1, dtype=np.int64)
    number, of = holder.copy(), holder.copy()
    entries = {i for i, one in enumerate(layers) if one.kind == "expert" and expert_number(one.name) is not None}
    around = {above for i in entries for above in layers[i].ancestors[1:]}
    taken = {*found.tree.by_name(), *found.tree.not_entered}
    named = {name.rpartition(".")[0] for name in taken}
    names, stacked, callers, lists = list[str](), list[int](), list[int](), list[str]()
    for i, place in enumerate(places):
        experts = [above for above in place.chain if layers[above].kind == "expert" and above not in around]
        if not experts or _SHARED.search(layers[experts[-1]].name):
            continue
        owner = of[i] = experts[-1]
        own, is_entry = layers[owner], owner in entries
        listed = own.name.rpartition(".")[0]
        beyond = place.chain[place.chain.index(owner) + 1 :]
        caller = next((above for above in beyond if not is_entry or layers[above].name != listed), -1)
        if (owner, caller) not in known:
            known[owner, caller] = name = own.name
            if caller not in (-1, *own.ancestors):
                name = ".".join((layers[caller].name, *own.name.split(".")[-1 - is_entry :]))
                free = chain((name,), map(f"{name.rstrip(digits)}{{}}".format, count()))
                known[owner, caller] = next(one for one in free if one not in taken)
                taken.add(known[owner, caller])
        name = known[owner, caller]
        if is_entry:
            name, number[i] = name.rpartition(".")[0], expert_number(name)
        if name not in names:
            names.append(name)
            stacked.append(-1 if is_entry else owner)
            callers.append(caller)
            lists.append(name if name in named else listed)
        holder[i] = names.index(name)
    return _Holders(names, holder, number, of, stacked, callers, lists)


class _Work:
    """The events of a recording by holder, expert, and step."""

    def __init__(self, found: Placed, shapes: Shapes, ops: FlopOps) -> None:
        self.found, self.shapes = found, shapes
        self.held = _holders(found)
        attribution, calls = found.attribution, found.calls
        self.holder = at(self.held.holder, attribution.place_of, -1)
        self.holder[~attribution.in_phases(*_PHASES)[attribution.place_of]] = -1
        backward = attribution.in_phases("backward")[attribution.place_of]
        # Where in the forward: an op of backward where its node was made.
        made = at(attribution.forward_op, np.where(backward, attribution.node_of, -1), -1)
        self.origin = np.where(made >= 0, made, np.arange(len(made)))
        self.is_forward = attribution.in_phases(*FORWARD_PHASES)[attribution.place_of]
        stacked = np.isin(calls.layer, [i for i in self.held.stacked if i >= 0])
        self.call = at(nearest(calls.parent, stacked), calls.call_of_span, -1)
        self.experts: dict[int, int] = {}  # by holder that a loop goes over: how many there are
        counted = np.flatnonzero(ops.is_counted & (self.holder >= 0)).tolist()
        names, name = found.recording.names, found.recording.spans.name
        self.product = {span: products_of(names[name[span]], shapes[span]) for span in counted}
        self.number = np.where(self.holder >= 0, at(self.held.number, attribution.place_of, -1), -1)
        self._follow_loops()
        self.steps = max(1, len(found.steps))
        place = found.steps.place_of(found.recording.spans.start_ns)
        self.step = place if len(found.steps) else np.zeros_like(place)

    def _follow_loops(self) -> None:
        """Give the events of loops over stacked weights their expert."""
        recording, spans = self.found.recording, self.found.recording.spans
        sizes: dict[int, set[tuple[int, ...]]] = defaultdict(set)
        for span, products in self.product.items():
            sizes[int(self.holder[span])].update(tuple(sorted((one.n, one.k))) for one in products)
        is_choice = recording.named(CHOOSING.__eq__) & (self.holder >= 0) & (self.number < 0) & (self.call >= 0)
        is_choice &= self.origin == np.arange(len(self.origin))
        is_choice &= nearest(self.found.nesting.parent, recording.named(method_of_kernel)) < 0  # on a CPU it has a loop
        taken: dict[int, tuple[int, int, bool]] = {}  # span -> experts, which, whether it is of weights
        for span in np.flatnonzero(is_choice).tolist():
            if span in self.shapes and (choice := _choice(self.shapes[span].dims, self.shapes[span].concrete)):
                count, which, rest = choice
                taken[span] = count, which, tuple(sorted(rest)) in sizes[int(self.holder[span])]
        self.experts = {int(self.holder[span]): count for span, (count, _, of_weights) in taken.items() if of_weights}
        # A mask of tokens has one more, for those that go to other ranks.
        count_of = {span: self.experts.get(int(self.holder[span]), 0) for span in taken}
        chosen = [s for s, (n, which, _) in taken.items() if which < count_of[s] <= n <= count_of[s] + 1]
        members = np.flatnonzero((self.holder >= 0) & (self.number < 0) & (self.call[self.origin] >= 0))
        events = np.concatenate((np.array(chosen, dtype=np.int64), members))
        where = self.origin[events]
        later = np.arange(len(events)) >= len(chosen)
        order = np.lexsort((later, spans.start_ns[where], self.call[where]))
        last = np.maximum.accumulate(np.where(later[order], -1, np.arange(len(order))))
        last = np.where(last >= 0, order[last], -1)  # of each event the choice before it
        known = (last >= 0) & later[order]
        known &= self.call[where[order]] == at(self.call[where], last, -1)
        self.number[events[order[known]]] = [taken[chosen[i]][1] for i in last[known].tolist()]

    def by_expert(self, spans: Int64, values: Int64) -> Mapping[tuple[int, int], list[int]]:
        """Sum values of spans by (holder, expert; -1 for all) and step."""
        chosen = (spans >= 0) & (at(self.holder, spans, -1) >= 0) & (at(self.step, spans, -1) >= 0)
        spans, values = spans[chosen], values[chosen]
        most = int(self.number.max(initial=-1)) + 2
        key = (self.holder[spans] * most + self.number[spans] + 1) * self.steps + self.step[spans]
        sums = sum_by_key(key, values, len(self.held.names) * most * self.steps).reshape(-1, self.steps)
        keys = np.unique(key // self.steps).tolist()
        return {(one // most, one % most - 1): sums[one].tolist() for one in keys}


def _choice(dims: Sequence[object], concrete: Sequence[str]) -> tuple[int, int, list[int]] | None:
    """Read a `select` along the first of three dimensions: how many there are, which is taken, the other sizes."""
    tensor = dims[0] if dims else None
    if not isinstance(tensor, list) or len(tensor) != 3 or list(concrete[1:2]) != ["0"]:
        return None
    return (tensor[0], int(concrete[2]) % max(1, tensor[0]), tensor[1:]) if concrete[2:3] != [""] else None


# --- a row each -----------------------------------------------------------------------------------

_Tokens = Mapping[int, Sequence[int] | None]  # or nanoseconds


def expert_rows(found: Placed, shapes: Shapes, ops: FlopOps) -> tuple[ExpertRow, ...]:
    """Return a row for each expert of each layer, in the steps of an attributed recording with shapes."""
    if not any(layer.kind == "expert" for layer in found.tree.layers):
        return ()
    work = _Work(found, shapes, ops)
    charges = found.charges
    times = work.by_expert(charges.cpu_span, charges.time_ns)
    counted = np.array(list(work.product), dtype=np.int64)
    flops = work.by_expert(counted, np.array([ops.flops_of(s).flops for s in work.product], dtype=np.int64))
    tokens, called = _tokens_of_products(work)
    listed: dict[str, set[int]] = defaultdict(set)  # those of which nobody's call would be missed
    for one in {found.tree.layers[i].name for i in found.calls.layer.tolist()}.union(found.tree.not_entered):
        if (number := expert_number(one)) is not None:
            listed[one.rpartition(".")[0]].add(number)
    rows: list[ExpertRow] = []
    for holder, name in enumerate(work.held.names):
        if work.held.stacked[holder] >= 0 and holder not in work.experts:
            rows += _rows_of_kernel(work, holder, flops.get((holder, -1), ()))
            continue
        numbers = {number for of, number in (*times, *flops) if of == holder and number >= 0}
        numbers.update(range(work.experts.get(holder, 0)))
        numbers |= listed[work.held.lists[holder]]
        nothing = [0] * work.steps
        known = {n: tokens.get((holder, n), nothing if (holder, n) not in called else None) for n in sorted(numbers)}
        spent = {n: times.get((holder, n), nothing) for n in known}
        done = {n: sum(flops.get((holder, n), nothing)) for n, own in known.items() if own is not None}
        rows += _rows(name, known, spent, done, work.steps)
    return tuple(rows)


def _rows(name: str, tokens: _Tokens, times: _Tokens, flops: Mapping[int, int], steps: int) -> Iterator[ExpertRow]:
    """Yield a row per expert from `tokens`, `times` and `flops`, in each step or in all; None or absent: not known."""
    every = sum_if_all_known(None if one is None else sum(one) for one in tokens.values())
    for number, own in tokens.items():
        spent, done = times.get(number), flops.get(number)
        yield ExpertRow(
            layer=name,
            expert=number,
            tokens_per_step=None if own is None else sum(own) / steps,
            share=None if own is None or not every else sum(own) / every,
            time_per_step_ns=None if spent is None else round(sum(spent) / steps),
            flops_per_step=None if done is None else round(done / steps),
            step_tokens=tuple(own or ()),
            step_times_ns=tuple(spent or ()),
        )


def _tokens_of_products(work: _Work) -> tuple[dict[tuple[int, int], list[int]], set[tuple[int, int]]]:
    """Sum the rows of each expert's first product in each call, by step; and list the experts that were called."""
    start, calls = work.found.recording.spans.start_ns, work.found.calls
    tokens: dict[tuple[int, int], list[int]] = {}
    seen: set[tuple[int, int, int]] = set()
    place = work.found.attribution.place_of[calls.span]
    entries = calls.span[(work.held.owner[place] == calls.layer) & (work.held.number[place] >= 0)]
    called = set(zip(work.holder[entries].tolist(), work.number[entries].tolist(), strict=True))
    entry = nearest(work.found.nesting.parent, marked(len(start), entries))
    for span in sorted(work.product, key=start.__getitem__):
        key = (int(work.holder[span]), int(work.number[span]))
        step, call = int(work.step[span]), int(work.call[span]) if work.call[span] >= 0 else int(entry[span])
        if key[1] < 0 or step < 0 or not work.is_forward[span] or (*key, call) in seen:
            continue
        seen.add((*key, call))
        tokens.setdefault(key, [0] * work.steps)[step] += work.product[span][0].m
    return tokens, called


def _rows_of_kernel(work: _Work, holder: int, flops: Sequence[int]) -> Iterator[ExpertRow]:
    """Yield rows of experts whose weights one kernel multiplies, as far as the run says what the router chose."""
    layer, found = work.held.stacked[holder], work.found
    seen = found.tree.layers[layer].expert_tokens
    entries = found.calls.span[found.calls.layer == layer]
    entries = entries[work.is_forward[entries]]
    if not seen or len(seen) != len(entries):
        return
    by_step = np.zeros((work.steps, len(seen[0])), dtype=np.int64)
    for tokens, step, of in zip(seen, work.step[entries].tolist(), work.holder[entries].tolist(), strict=True):
        by_step[step] += tokens if step >= 0 and of == holder else 0
    every, done = int(by_step.sum()), sum(flops)
    known = dict(enumerate(by_step.T.tolist()))
    is_divisible = every and done and not done % every
    shared_out = {n: done // every * sum(own) for n, own in known.items()} if is_divisible else {}
    yield from _rows(work.held.names[holder], known, {}, shared_out, work.steps)


# --- all experts of a layer -----------------------------------------------------------------------

# Libraries and servers by names of their kernels and ops; the first that matches.
_METHODS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (method, re.compile(pattern))
    for method, pattern in (
        ("scattermoe", r"scatter2scatter|scattermoe|_groupXtY"),
        ("megablocks", r"megablocks|^_?(sdd|dsd|dds)_kernel|padded_(gather|scatter)"),
        ("sonicmoe", r"sonicmoe|sonic_moe"),
        ("deepgemm", r"deep_?gemm.*grouped|m_grouped\w*gemm|fp8_m_grouped"),
        ("fused_moe", r"fused_?(moe|experts)|[mM]oe\w*[gG]emm|moe_(align|sum|wna16|forward)|(ck|cutlass)_moe"),
        ("grouped_mm", r"grouped_?(mm|gemm)|[gG]roup(ed)?_?[gG]emm|GroupProblemShape"),
    )
)  # fmt: skip
_MOST_KERNELS = 5  # named
_BATCHED = "aten::bmm"  # of weights taken out for each token, in the module that holds the experts


def method_of_kernel(name: str) -> str | None:
    """Return what computes experts by grouped or fused kernels (or ops) of this name; None for any other."""
    if name.startswith("autograd::") or parse_mark(name) is not None:
        return None
    return next((method for method, pattern in _METHODS if pattern.search(name)), None)


def expert_layer_rows(
    found: Placed, experts: Sequence[ExpertRow], all_to_all_ns: Callable[[Placed], Int64]
) -> tuple[ExpertLayerRow, ...]:
    """Return a row for each module that holds experts, and for grouped and fused kernels elsewhere.

    `all_to_all_ns`: gives it per place; asked where there are experts.
    """
    held, layers, places, charges = _holders(found), found.tree.layers, found.attribution.places, found.charges
    kernels = _kernels(found, held)
    elsewhere = tuple(_elsewhere(layer, names) for layer, names in kernels.items() if layer not in held.names)
    if not held.names:
        return elsewhere
    parts, kinds, moved_ns = _parts(found, None), {one.name: one.kind for one in layers}, all_to_all_ns(found)
    time_ns = np.where(found.attribution.in_phases(*_PHASES)[charges.place], charges.time_ns, 0)
    rows = []
    for at_name, name in enumerate(held.names):
        is_stacked, own = held.stacked[at_name] >= 0, [row for row in experts if row.layer == name]
        is_held, caller = held.holder == at_name, held.callers[at_name]
        beside = parts[layers[caller].name] if caller >= 0 else {}
        routers = [one for one in beside if kinds.get(one) == "router" and "shared" not in one]
        shared = [one for one in beside if kinds.get(one) == "expert" and _SHARED.search(one)]
        around = [caller in one.chain for one in places] if caller >= 0 else is_held
        names = kernels.get(name, Counter())
        method = names.most_common(1)[0][0][0] if names else None
        if not is_stacked:
            method = "modules"
        elif any(row.time_per_step_ns is not None for row in own):
            method = "loop"
        by_step = list(zip(*(row.step_tokens for row in own), strict=False))
        balances = tuple(max(one) / fmean(one) for one in by_step if sum(one))
        why = layers[held.stacked[at_name]].tokens_unknown or _ONE_KERNEL if is_stacked else _NO_SHAPES
        rows.append(
            ExpertLayerRow(
                layer=name,
                router=routers[0] if routers else None,
                method=method or "other",
                kernels=_names(names) if method not in ("modules", "loop") else (),
                experts=len(own) or (len(np.unique(held.owner[is_held])) if not is_stacked else None),
                tokens_per_step=sum_if_all_known(row.tokens_per_step for row in own) if own else None,
                balance=fmean(balances) if balances else None,
                step_balance=balances,
                router_time_ns=sum(beside[one]["time"] for one in routers) if routers else None,
                experts_time_ns=int(time_ns[is_held[charges.place]].sum()),
                shared_time_ns=sum(beside[one]["time"] for one in shared) if shared else None,
                all_to_all_time_ns=int(moved_ns[around].sum()),
                tokens_unknown=None if balances else why,
            )
        )  # fmt: skip
    return (*rows, *elsewhere)


_NO_SHAPES = "the shapes of ops were not recorded (record_shapes=True)"


def _names(kernels: Counter[tuple[str, str]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for (_, name), _ in kernels.most_common()))[:_MOST_KERNELS]


def _elsewhere(layer: str | None, names: Counter[tuple[str, str]]) -> ExpertLayerRow:
    return ExpertLayerRow(
        layer=layer,
        router=None,
        method=names.most_common(1)[0][0][0],
        kernels=_names(names),
        experts=None,
        tokens_per_step=None,
        balance=None,
        step_balance=(),
        router_time_ns=None,
        experts_time_ns=names.total(),
        shared_time_ns=None,
        all_to_all_time_ns=0,
        tokens_unknown=_ONE_KERNEL,
    )


def _kernels(found: Placed, held: _Holders) -> dict[str | None, Counter[tuple[str, str]]]:
    """Sum the time of grouped and fused kernels (on a CPU, ops) by holder, else innermost layer, by method and name."""
    recording, charges, places = found.recording, found.charges, found.attribution.places
    in_holder = held.holder[charges.place]
    named = recording.named(method_of_kernel) & (recording.spans.category != Category.ANNOTATION)
    batched = recording.named(_BATCHED.__eq__)
    op = at(nearest(found.nesting.parent, named | batched), charges.cpu_span, -1)
    op[at(batched, op, False) & (in_holder < 0)] = -1
    on_device = charges.basis == "device"
    times: dict[str | None, Counter[tuple[str, str]]] = defaultdict(Counter)
    chosen = np.flatnonzero((op >= 0) | named[charges.span])
    columns = (charges.span, op, charges.place, in_holder, charges.time_ns)
    for span, caller, place, holder, time_ns in zip(*(one[chosen].tolist() for one in columns), strict=True):
        kernel = recording.name_of(span if on_device else caller)
        method = method_of_kernel(kernel) or method_of_kernel(recording.name_of(caller)) or "batched_mm"
        name = held.names[holder] if holder >= 0 else found.layer_name(places[place]) or None
        times[name][method, kernel] += time_ns
    return times


# --- adapters -------------------------------------------------------------------------------------


def _parts(found: Placed, flops: FlopCount | None) -> dict[str, dict[str, Counter[str]]]:
    """Sum per layer, for itself ("") and each layer it calls: `time`, `flops`, and ops with `unknown` FLOPs."""
    spent = sum_by_key(found.charges.place, found.charges.time_ns, len(found.attribution.places)).tolist()
    places = zip(found.attribution.places, spent, strict=True)
    amounts = [(found.names_of(place), place.phase, "time", time_ns) for place, time_ns in places]
    if flops is not None:
        amounts += [(names, phase, "flops", number) for (names, phase, _), (number, _) in flops.of_places.items()]
        amounts += [(names, phase, "unknown", 1) for names, phase, _ in flops.unknown_in]
    parts: dict[str, dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    for names, phase, what, number in amounts:
        for below, layer in pairwise(("", *names)) if phase in _PHASES else ():
            parts[layer][below][what] += number
    return parts


def adapter_rows(found: Placed, flops: FlopCount | None) -> tuple[AdapterRow, ...]:
    """Return a row for each layer with adapters (LoRA and others): its own calls of them and of their base."""
    kinds = {one.name: one.kind for one in found.tree.layers}
    if "adapter" not in kinds.values():
        return ()
    parts, rows = _parts(found, flops), []
    for layer, below in parts.items():
        own = [name for name in below if kinds.get(name) == "adapter"]
        if not own or kinds.get(layer, "adapter") == "adapter":
            continue
        base = [name for name in below if name.endswith(".base_layer")]
        # Where the base has no row of its own, it is all that is not in an adapter.
        whole, some = (sum((below[name] for name in names), Counter()) for names in (below, base or own))
        both = (some, whole - some) if base else (whole - some, some)
        base_flops, adapter_flops = (None if flops is None or one["unknown"] else one["flops"] for one in both)
        rows.append(
            AdapterRow(
                layer=layer,
                adapters=tuple(own),
                base_time_ns=both[0]["time"],
                adapter_time_ns=both[1]["time"],
                base_flops_per_step=base_flops,
                adapter_flops_per_step=adapter_flops,
            )
        )
    return tuple(rows)
