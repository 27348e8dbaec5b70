"""Advice on blocks that should be equal: one that takes longer, or keeps more, than its likes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from profiler_wrapper.analysis.advice.facts import Facts, Rule
from profiler_wrapper.analysis.advice.wording import duration, size
from profiler_wrapper.analysis.model import LayerRow
from profiler_wrapper.analysis.numbered_names import split_number
from profiler_wrapper.analysis.phase import FORWARD_PHASES, Phase
from profiler_wrapper.analysis.statistics import OUTLIER_DEVIATIONS, OUTLIER_SHARE, mad
from profiler_wrapper.analysis.view_model import Finding

_FEWEST = 4  # among fewer it is hard to say who is odd
_MOST_ODD = 0.25  # of them; where more differ, that is how the model is made
_STEP_DEVIATIONS = 3.0  # of the noise between steps
_SAME_WORK = 0.02  # difference of FLOPs that is none


@dataclass(frozen=True)
class _Block:
    """One block with its phases together; times and FLOPs per step."""

    name: str
    time_ns: float
    by_phase_ns: dict[Phase, float]
    by_step_ns: tuple[int, ...]  # empty where not known
    flops: int | None
    retained_bytes: float | None
    backends: frozenset[str]
    compiled: bool


def odd_block(facts: Facts) -> Iterator[Finding]:
    """A block far from the median of its likes in time, and in every step; or in what it keeps for backward."""
    likes: dict[tuple[str, str], list[_Block]] = defaultdict(list)
    for name in facts.blocks:
        rows = facts.rows_of[name]
        likes[split_number(name)[0], rows[0].class_name].append(_block(facts, name, rows))
    for blocks in likes.values():
        if len(blocks) < _FEWEST:
            continue
        slow = _odd(blocks, [block.time_ns for block in blocks])
        slow = [block for block in slow if _in_every_step(block, blocks)]
        if len(slow) <= _MOST_ODD * len(blocks):
            yield from (_slow(facts, block, blocks) for block in slow)
        kept = [block.retained_bytes for block in blocks]
        known = [one for one in kept if one is not None]
        large = _odd(blocks, known) if len(known) == len(kept) else []
        if len(large) <= _MOST_ODD * len(blocks):
            yield from (_large(facts, block, blocks) for block in large if block not in slow)


def _block(facts: Facts, name: str, rows: Sequence[LayerRow]) -> _Block:
    by_phase: dict[Phase, float] = {row.phase: facts.per_step_ns(row.time_ns) for row in rows}
    steps = [row.step_times_ns for row in rows if row.step_times_ns]
    known = len(steps) == len(rows) and len({len(times) for times in steps}) == 1
    flops = [row.flops_per_step for row in rows]
    kept = [row.retained_bytes for row in rows if row.phase in FORWARD_PHASES and row.retained_bytes is not None]
    return _Block(
        name=name,
        time_ns=sum(by_phase.values()),
        by_phase_ns=by_phase,
        by_step_ns=tuple(map(sum, zip(*steps, strict=True))) if known else (),
        flops=None if None in flops else sum(one or 0 for one in flops),
        retained_bytes=max(kept, default=None),
        backends=frozenset(
            row.backend for row in facts.analysis.attention if row.layer == name or row.layer.startswith(name + ".")
        ),
        compiled=any(row.compiled for row in rows),
    )


def _odd(blocks: Sequence[_Block], values: Sequence[float]) -> list[_Block]:
    """Those whose value is far above the median of all."""
    middle = median(values)
    far = max(OUTLIER_SHARE * middle, OUTLIER_DEVIATIONS * float(mad(values)))
    return [block for block, value in zip(blocks, values, strict=True) if middle > 0 and value - middle > far]


def _in_every_step(block: _Block, blocks: Sequence[_Block]) -> bool:
    """Whether it is above its likes by more than the noise between steps, and in each step; true where not known."""
    if len(block.by_step_ns) < 2 or any(len(other.by_step_ns) != len(block.by_step_ns) for other in blocks):
        return True
    likes = [median(times) for times in zip(*(other.by_step_ns for other in blocks), strict=True)]
    above = [own - like for own, like in zip(block.by_step_ns, likes, strict=True)]
    noise = max(float(mad(other.by_step_ns)) for other in blocks if other is not block)
    return bool(min(above) > OUTLIER_SHARE / 2 * median(likes) and median(above) > _STEP_DEVIATIONS * noise)


def _slow(facts: Facts, block: _Block, blocks: Sequence[_Block]) -> Finding:
    middle = median(other.time_ns for other in blocks)
    excess = block.time_ns - middle
    phase = max(
        block.by_phase_ns,
        key=lambda one: block.by_phase_ns[one] - median(other.by_phase_ns.get(one, 0.0) for other in blocks),
    )
    reason, fix = _difference(block, blocks)
    steps = f", in each of {len(block.by_step_ns)} steps" if len(block.by_step_ns) > 1 else ""
    return Finding(
        id="odd-block",
        title=f"{block.name} takes {block.time_ns / middle:.1f} times as long as the {len(blocks) - 1} blocks like it: "
        f"{duration(block.time_ns)} against {duration(middle)} a step",
        layer=block.name,
        phase=phase,
        share=facts.share_of_work(block.time_ns),
        saves_at_most_us=facts.saves_us(excess),
        saves_at_most_bytes=None,
        evidence=(
            f"the median of {len(blocks)} blocks is {duration(middle)} of {facts.time_name}, this one is "
            f"{duration(excess)} above{steps}; most in {phase}",
            reason,
            f"at most: as fast as the median ({facts.time_name})",
        ),
        confidence="high" if len(block.by_step_ns) > 1 else "medium",
        fix=fix,
        layers=(block.name,),
        details={"time_us": block.time_ns / 1000, "median_us": middle / 1000, "blocks": len(blocks)},
    )


def _difference(block: _Block, blocks: Sequence[_Block]) -> tuple[str, str]:
    """How it differs from the others, and what to do."""
    others = [other for other in blocks if other is not block]
    flops = [other.flops for other in others if other.flops is not None]
    if block.flops is not None and len(flops) == len(others) and median(flops) > 0:
        ratio = block.flops / median(flops)
        if abs(ratio - 1) > _SAME_WORK:
            return f"it does {ratio:.2f} times the FLOPs of the others", "check its sizes: it is not built as its likes"
    backends = frozenset[str]().union(*(other.backends for other in others))
    if block.backends != backends:
        own, usual = ", ".join(sorted(block.backends)) or "none", ", ".join(sorted(backends)) or "none"
        return f"its attention runs by {own}, that of the others by {usual}", f"give it what the others get ({usual})"
    if block.compiled != any(other.compiled for other in others):
        return (
            "it is compiled, the others are not" if block.compiled else "it is not compiled, the others are",
            "compile all blocks, or none",
        )
    known = "the same FLOPs" if block.flops is not None else "FLOPs are not known"
    return (
        f"{known}, the same attention backend: the same work takes longer",
        "compare its operators and kernels with those of the next block: a hook, a copy, another layout or dtype",
    )


def _large(facts: Facts, block: _Block, blocks: Sequence[_Block]) -> Finding:
    kept = block.retained_bytes or 0.0
    middle = median(other.retained_bytes or 0.0 for other in blocks)
    peak = facts.peak_bytes
    return Finding(
        id="odd-block",
        title=f"{block.name} keeps {size(kept)} for backward, the {len(blocks) - 1} blocks like it {size(middle)}",
        layer=block.name,
        phase="forward",
        share=min(1.0, kept / peak) if peak else None,
        saves_at_most_us=None,
        saves_at_most_bytes=round(kept - middle),
        evidence=(
            f"{size(kept - middle)} above the median of {len(blocks)} blocks, mean over calls",
            f"at most: as much as the median{f', of a peak of {size(peak)}' if peak else ''}",
        ),
        confidence="medium",
        fix="look at what it saves that the others do not: a mask, float32 copies, dropout, attention by math",
        layers=(block.name,),
        details={"retained_bytes": round(kept), "median_bytes": round(middle), "blocks": len(blocks)},
    )


RULES: tuple[Rule, ...] = (odd_block,)
