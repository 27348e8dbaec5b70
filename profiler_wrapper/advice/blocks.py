"""A block that is slower than its like, an expert that gets more tokens, an optimizer that updates one by one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from profiler_wrapper.advice.facts import LONGEST_LAUNCH_NS, PEAK, Facts, count, duration
from profiler_wrapper.place.intervals import Union, uncovered
from profiler_wrapper.place.names import FORWARD_PHASES, Phase
from profiler_wrapper.tables.call_rows import ExpertLayerRow, ExpertRow
from profiler_wrapper.tables.model import Finding
from profiler_wrapper.tables.statistics import OUTLIER_SHARE, mad, outliers, split_number, sum_if_all_known
from profiler_wrapper.trace.arrays import at, grouped, marked, sum_by_key
from profiler_wrapper.trace.nesting import nearest, nearest_above
from profiler_wrapper.trace.recording import Bool, Category, Int64
from profiler_wrapper.units import file_size as size

_FEWEST_BLOCKS = 4  # among fewer it is hard to say which is an outlier
_MOST_OUTLIERS_SHARE = 0.25  # of the blocks; where more differ, that is how the model is made
_STEP_DEVIATIONS = 3.0  # of the noise between steps
_MORE_FLOPS = 1.1  # times those of the others: attention by another backend computes a little more or less
_PREFERRED = 2.0  # times the mean of all experts
_COUNT_DEVIATIONS = 4.0
_FEWEST_PARAMETERS = 8  # of an optimizer: with fewer there is little to gain
_BLOCK_ROWS = "layers.layer,layers.phase,layers.calls,layers.self_time_us,layers.retained_bytes"

# --- a block that takes longer, or keeps more, than the others ---------------------------------------


class _Block(NamedTuple):
    """One block with its phases together; times and FLOPs per step."""

    name: str
    by_phase_ns: dict[Phase, float]
    by_step_ns: tuple[int, ...]  # empty where not known
    flops: int | None
    retained_bytes: float | None
    backends: frozenset[str]
    compiled: bool

    @property
    def time_ns(self) -> float:
        return sum(self.by_phase_ns.values())


def odd_block(facts: Facts) -> Iterator[Finding]:
    """Find a block far above the median of its class in time, in every step, or in what it keeps for backward."""
    blocks_of_class = grouped(
        ((split_number(name)[0], facts.rows_of[name][0].class_name), _block(facts, name)) for name in facts.blocks
    )
    for blocks in blocks_of_class.values():
        if len(blocks) < _FEWEST_BLOCKS:
            continue
        slow = [block for block in _outliers(blocks, [one.time_ns for one in blocks]) if _in_every_step(block, blocks)]
        if len(slow) <= _MOST_OUTLIERS_SHARE * len(blocks):
            yield from (_slow(facts, block, blocks) for block in slow)
        kept = [block.retained_bytes for block in blocks if block.retained_bytes is not None]
        large = _outliers(blocks, kept) if len(kept) == len(blocks) else []
        if len(large) <= _MOST_OUTLIERS_SHARE * len(blocks):
            yield from (_large(facts, block, median(kept), len(blocks)) for block in large if block not in slow)


def _block(facts: Facts, name: str) -> _Block:
    rows = facts.rows_of[name]
    steps = [row.step_times_ns for row in rows if row.step_times_ns]
    known = len(steps) == len(rows) and len({len(times) for times in steps}) == 1
    kept = [row.retained_bytes for row in rows if row.phase in FORWARD_PHASES and row.retained_bytes is not None]
    return _Block(
        name=name,
        by_phase_ns={row.phase: facts.per_step_ns(row.time_ns) for row in rows},
        by_step_ns=tuple(map(sum, zip(*steps, strict=True))) if known else (),
        flops=sum_if_all_known(row.flops_per_step for row in rows),
        retained_bytes=max(kept, default=None),
        backends=frozenset(backend for row in rows for backend in row.attention_by_backend_ns),
        compiled=any(row.compiled for row in rows),
    )


def _outliers(blocks: Sequence[_Block], values: Sequence[float]) -> list[_Block]:
    """Return the blocks whose value is far above the median of all."""
    return [blocks[i] for i, excess in outliers(values).items() if excess > 0]


def _in_every_step(block: _Block, blocks: Sequence[_Block]) -> bool:
    """Return whether a block is slow in each step and beyond the noise between steps; true where not known."""
    if len(block.by_step_ns) < 2 or any(len(other.by_step_ns) != len(block.by_step_ns) for other in blocks):
        return True
    usual = [median(times) for times in zip(*(other.by_step_ns for other in blocks), strict=True)]
    above = [own - other for own, other in zip(block.by_step_ns, usual, strict=True)]
    noise = max(float(mad(other.by_step_ns)) for other in blocks if other is not block)
    return bool(min(above) > OUTLIER_SHARE / 2 * median(usual) and median(above) > _STEP_DEVIATIONS * noise)


def _slow(facts: Facts, block: _Block, blocks: Sequence[_Block]) -> Finding:
    middle = median(other.time_ns for other in blocks)
    by_phase = block.by_phase_ns
    phase = max(by_phase, key=lambda one: by_phase[one] - median(other.by_phase_ns.get(one, 0.0) for other in blocks))
    reason, fix = _difference(block, [other for other in blocks if other is not block])
    return facts.finding(
        "odd-block",
        f"{block.name} takes {block.time_ns / middle:.1f} times as long as the {len(blocks) - 1} blocks like it: "
        f"{duration(block.time_ns)} against {duration(middle)} a step",
        f"most of the difference is in {phase}",
        reason,
        phase=phase,
        share=facts.of_work(block.time_ns),
        saves_ns=block.time_ns - middle,
        confidence=facts.sure_of_times("high" if len(block.by_step_ns) > 1 else "medium"),
        fix=fix,
        layers=(block.name,),
        rows=(_BLOCK_ROWS, f"layer={block.name}"),
        details={"time_ns": block.time_ns, "median_ns": middle, "blocks": len(blocks)},
    )


def _difference(block: _Block, others: Sequence[_Block]) -> tuple[str, str]:
    """Say how a block differs from the others, and what to do."""
    backends = frozenset[str]().union(*(other.backends for other in others))
    if block.backends != backends:
        own, usual = (", ".join(sorted(names)) or "no attention kernel" for names in (block.backends, backends))
        return f"its attention runs by {own}, that of the others by {usual}", f"give it what the others get ({usual})"
    flops = [other.flops for other in others if other.flops is not None]
    ratio = block.flops / median(flops) if block.flops and len(flops) == len(others) and median(flops) else 1.0
    if ratio > _MORE_FLOPS:
        return f"it does {ratio:.2f} times the FLOPs of the others", "check its sizes: it is not built as they are"
    if block.compiled != any(other.compiled for other in others):
        what = "it is compiled, the others are not" if block.compiled else "it is not compiled, the others are"
        return what, "compile all blocks, or none"
    return (
        f"its attention backend is that of the others, its FLOPs are {ratio:.2f} times theirs",
        "compare its ops with those of the next block: a dtype, a device, a copy, a hook that the others have not",
    )


def _large(facts: Facts, block: _Block, middle: float, blocks: int) -> Finding:
    kept, peak = block.retained_bytes or 0.0, facts.peak_bytes
    return facts.finding(
        "odd-block",
        f"{block.name} keeps {size(kept)} for backward, the {blocks - 1} blocks like it {size(middle)}",
        f"{size(kept - middle)} above the median of {blocks} blocks",
        phase="forward",
        share=(min(1.0, kept / peak), PEAK) if peak else None,
        saves_bytes=round(kept - middle),
        fix="look at what it saves that the others do not: a mask, float32 copies, dropout, attention by math",
        layers=(block.name,),
        rows=(_BLOCK_ROWS, f"layer={block.name}"),
        details={"retained_bytes": round(kept), "median_bytes": round(middle), "blocks": blocks},
    )


# --- experts -----------------------------------------------------------------------------------------


def preferred_expert(facts: Facts) -> Iterator[Finding]:
    """Find the expert with far more tokens than the mean in every step with shapes; one finding for all layers.

    Saves at most the time that it takes above the mean: what experts on other ranks wait for, and what dropping tokens
    beyond its share saves. Where one kernel works for all experts, their time is shared out by tokens.
    """
    found: list[tuple[float, float, ExpertRow, ExpertLayerRow]] = []
    for layer in facts.analysis.expert_layers:
        experts = [row for row in facts.analysis.experts if row.layer == layer.layer]
        by_step = list(zip(*(row.step_tokens for row in experts), strict=True)) if layer.balance is not None else []
        busiest = max(range(len(experts)), key=lambda i: experts[i].share or 0) if by_step else 0
        if not by_step or any(not _is_preferred(tokens, busiest) for tokens in by_step if sum(tokens)):
            continue
        own, every = experts[busiest], sum_if_all_known(row.time_per_step_ns for row in experts)
        every_ns = facts.per_step_ns(layer.experts_time_ns) if every is None else every
        own_ns = (own.share or 0.0) * every_ns if own.time_per_step_ns is None else own.time_per_step_ns
        found.append((max(0.0, own_ns - every_ns / len(experts)), own_ns, own, layer))
    if not found:
        return
    saved_ns, own_ns, expert, layer = max(found, key=lambda one: one[0])
    more = f"; so it is in {count(len(found) - 1, 'more layer')}" if len(found) > 1 else ""
    by_tokens = "" if expert.time_per_step_ns is not None else " by its share of tokens"
    exchanged = layer.all_to_all_time_ns > 0
    yield facts.finding(
        "preferred-expert",
        f"expert {expert.expert} of {expert.layer} gets {100 * (expert.share or 0):.0f} % of the tokens, "
        f"{layer.balance:.1f} times the mean{more}",
        f"{expert.tokens_per_step:,.0f} of {layer.tokens_per_step:,.0f} tokens a step, {duration(own_ns)}{by_tokens}; "
        f"above the mean {duration(saved_ns)}",
        "the ranks of the others wait for it"
        if exchanged
        else "with experts on several ranks, all wait for it; on one device balance moves its work, and dropping "
        "tokens saves it",
        share=facts.of_work(sum(one[1] for one in found)),
        saves_ns=sum(one[0] for one in found),
        confidence="high" if exchanged else "low",
        fix="train with a loss or bias that balances the router (router_aux_loss_coef), or limit each expert's tokens",
        layers=[f"{one.layer}.{one.expert}" for _, _, one, _ in found],
        rows=("experts",),
        details={
            "expert": expert.expert,
            "tokens_per_step": expert.tokens_per_step,
            "balance": layer.balance,
            "time_ns": own_ns,
        },
    )


def _is_preferred(tokens: Sequence[int], expert: int) -> bool:
    """Return whether an expert has twice the mean, and more than chance gives: four standard deviations of a count."""
    mean = sum(tokens) / len(tokens)
    return tokens[expert] >= _PREFERRED * mean and tokens[expert] - mean > _COUNT_DEVIATIONS * mean**0.5


# --- an optimizer that updates its parameters one by one ---------------------------------------------

_STEP = re.compile(r"Optimizer\.step#(?P<class_name>.+)\.step$")
_OF_LISTS = ("aten::_foreach_", "aten::_fused_")
_WITH_FUSED = frozenset(("Adam", "AdamW", "SGD", "Adagrad"))  # those of torch 2.11 to 2.13, on a GPU as on a CPU
_WITH_FOREACH = _WITH_FUSED | {
    "Adadelta", "Adafactor", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop"
}  # fmt: skip


class _Steps(NamedTuple):
    """All steps of optimizers of one class."""

    class_name: str
    spans: Int64
    wall_ns: Int64  # of each, on the clock, from the end of its closure on; a wait between two ops is no work of it
    whole: Bool  # per span, of the steps and of what they do themselves: not the forward and backward of a closure
    ops: Counter[str]  # outermost ones, by name


def slow_optimizer(facts: Facts) -> Iterator[Finding]:
    """Find an optimizer that is neither fused nor foreach, and runs several small ops for each parameter.

    Saves at most all of the optimizer's step.
    """
    made = facts.analysis.run.get("optimizers") or ()
    for steps in _steps(facts):
        settings = [one for one in made if one["class_name"] == steps.class_name]  # as the run tells them
        calls = max(1, len(steps.spans))
        once = max(steps.ops.values(), default=0) / calls  # an op for each parameter
        parameters = sum(one.get("parameters", 0) for one in settings) or round(once)
        of_lists = any(name.startswith(_OF_LISTS) for name in steps.ops)
        if of_lists or parameters < _FEWEST_PARAMETERS or steps.ops.total() < parameters * calls:
            continue
        if any(one.get("differentiable") for one in settings):
            continue
        time_ns, wall_ns = facts.time_of_ns(steps.whole), facts.per_step_ns(steps.wall_ns)
        ops = steps.ops.total() / facts.steps
        yield facts.finding(
            "slow-optimizer",
            f"{steps.class_name} updates its parameters one by one: {ops:,.0f} small ops a step",
            f"{count(parameters, 'parameter')}; its ops, and Python between them, take {duration(wall_ns)} a step",
            *(f"fused={one.get('fused')}, foreach={one.get('foreach')} as it was made" for one in settings[:1]),
            phase="optimizer",
            share=facts.of_work(time_ns) if facts.on_device else facts.of_step(wall_ns),
            saves_ns=_saved_ns(facts, steps),
            confidence="high" if settings else "medium",
            fix=_fix(facts, steps.class_name, settings),
            rows=("operators", "phase=optimizer"),
            details={"ops_per_step": ops, "parameters": parameters, "cpu_ns": wall_ns, "time_ns": time_ns},
        )


def _steps(facts: Facts) -> Iterator[_Steps]:
    recording, parent, attribution = facts.found.recording, facts.found.nesting.parent, facts.found.attribution
    spans = recording.spans
    of_class = grouped(
        (match["class_name"], i) for i, name in enumerate(recording.names) if (match := _STEP.match(name))
    )
    is_annotation, is_op = spans.category == Category.ANNOTATION, spans.category == Category.CPU_OP
    any_step = np.isin(spans.name, [name for names in of_class.values() for name in names]) & is_annotation
    step_of = nearest(parent, any_step)  # an optimizer may step another: what that does is its own
    in_phase = attribution.in_phases("optimizer")[attribution.place_of]  # not the forward of a closure
    foreign = ((step_of >= 0) & ~in_phase) | attribution.is_node
    starts, ends = spans.start_ns[foreign], spans.end_ns[foreign]
    for class_name, names in of_class.items():
        is_step = any_step & np.isin(spans.name, names)
        itself = at(is_step, step_of, False) & in_phase
        named = recording.named(lambda name: name.startswith("aten::")) & is_op & itself
        outermost = np.flatnonzero(named & (nearest_above(parent, nearest(parent, named)) < 0))
        calls = np.flatnonzero(is_step)
        bounds = zip(spans.start_ns[calls].tolist(), spans.end_ns[calls].tolist(), strict=True)
        begin_ns = np.array([ends[(starts >= start) & (ends <= end)].max(initial=start) for start, end in bounds])
        left, right, _ = uncovered(facts.union_of(itself & is_op), begin_ns, spans.end_ns[calls])
        waits = Union(*(at_ns[right - left > LONGEST_LAUNCH_NS] for at_ns in (left, right)))
        wall_ns = spans.end_ns[calls] - begin_ns - waits.overlap(begin_ns, spans.end_ns[calls])
        yield _Steps(class_name, calls, wall_ns, itself, Counter(map(recording.name_of, outermost.tolist())))


def _saved_ns(facts: Facts, steps: _Steps) -> float:
    """Return what a step saves without the optimizer; what lies between its ops is time of the optimizer itself."""
    in_ops = facts.own_cpu_ns()
    in_ops[facts.found.recording.spans.category == Category.ANNOTATION] = 0
    step_of = nearest(facts.found.nesting.parent, marked(len(in_ops), steps.spans))
    own = np.flatnonzero(steps.whole & (step_of >= 0))
    of_step = sum_by_key(step_of[own], in_ops[own], len(in_ops))[steps.spans]
    in_ops[steps.spans] = np.maximum(0, steps.wall_ns - of_step)
    return facts.saved_at_most_ns(steps.whole, own_ns=in_ops)


def _fix(facts: Facts, class_name: str, settings: list[Mapping[str, Any]]) -> str:
    if all(one.get("can_fuse") for one in settings) if settings else class_name in _WITH_FUSED:
        return f"{class_name}(..., fused=True)"
    can_foreach = all(one.get("can_foreach") for one in settings) if settings else class_name in _WITH_FOREACH
    if can_foreach and facts.device is not None:
        return f"{class_name}(..., foreach=True)"
    return f"torch.compile around {class_name}'s step, or an optimizer that has fused=True: AdamW, Adam, SGD, Adagrad"


RULES = (odd_block, preferred_expert, slow_optimizer)
