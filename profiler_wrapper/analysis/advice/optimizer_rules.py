"""An optimizer that updates its parameters one by one."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from profiler_wrapper.analysis.advice.bounds import own_cpu_ns, saved_at_most_ns, time_of_ns
from profiler_wrapper.analysis.advice.device import device_of
from profiler_wrapper.analysis.advice.facts import NS_PER_US, Facts, Rule
from profiler_wrapper.analysis.advice.wording import count, duration
from profiler_wrapper.analysis.view_model import Finding
from profiler_wrapper.recording.nesting import nearest, nearest_above
from profiler_wrapper.recording.recording import Bool, Category, Int64, Spans

ID = "slow-optimizer"
_STEP = re.compile(r"Optimizer\.step#(?P<class_name>.+)\.step$")
_OF_LISTS = ("aten::_foreach_", "aten::_fused_")
_WITH_FUSED = frozenset(("Adam", "AdamW", "SGD", "Adagrad"))  # those of torch 2.11 to 2.13, on a GPU as on a CPU
_WITH_FOREACH = _WITH_FUSED | {
    "Adadelta", "Adafactor", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop"
}  # fmt: skip
_FEWEST = 8  # parameters: with fewer there is little to gain


@dataclass(frozen=True)
class _Steps:
    """All steps of optimizers of one class."""

    class_name: str
    whole: Bool  # per span, of the steps and of what they do themselves: not the forward and backward of a closure
    spans: Int64  # the steps
    wall_ns: Int64  # what they take on the clock, without a closure
    singles: Counter[str]  # outermost ops that take one parameter, by name
    of_lists: int  # outermost ops that take all of them
    calls: int


def slow_optimizer(facts: Facts) -> Iterator[Finding]:
    """Steps of an optimizer that is neither fused nor foreach: several small ops for each parameter."""
    for steps in _steps(facts):
        settings = _settings(facts, steps.class_name)
        once = max(steps.singles.values(), default=0) / steps.calls  # an op for each parameter
        parameters = sum(one.get("parameters", 0) for one in settings) or round(once)
        ops = steps.singles.total()
        if steps.of_lists or parameters < _FEWEST or ops < parameters * steps.calls:
            continue
        if any(one.get("differentiable") for one in settings):
            continue
        fix = _fix(facts, steps.class_name, settings)
        time_ns = time_of_ns(facts, steps.whole)
        wall_ns = facts.per_step_ns(int(steps.wall_ns.sum()))
        yield Finding(
            id=ID,
            title=f"{steps.class_name} updates its parameters one by one: {ops / facts.steps:,.0f} small ops a step",
            layer=None,
            phase="optimizer",
            share=facts.share_of_step(wall_ns) if not facts.on_device else facts.share_of_work(time_ns),
            saves_at_most_us=facts.saves_us(_saved_ns(facts, steps)),
            saves_at_most_bytes=None,
            evidence=(
                f"{ops / facts.steps:,.0f} ops a step for {count(parameters, 'parameter')}, none of them _fused_ or "
                f"_foreach_; {_most(steps)}",
                f"its step takes {duration(wall_ns)} on the clock, {duration(time_ns)} of {facts.time_name} in its ops",
                *(f"fused={one.get('fused')}, foreach={one.get('foreach')} as it was made" for one in settings[:1]),
                "saves at most: as if the optimizer's step took no time at all",
            ),
            confidence="high" if settings else "medium",
            fix=fix,
            details={
                "ops_per_step": ops / facts.steps,
                "parameters": parameters,
                "cpu_us": wall_ns / NS_PER_US,
                "time_us": time_ns / NS_PER_US,
            },
        )


def _steps(facts: Facts) -> Iterator[_Steps]:
    recording, parent = facts.found.recording, facts.found.nesting.parent
    spans, names = recording.spans, recording.names
    matches = {i: match["class_name"] for i, name in enumerate(names) if (match := _STEP.match(name))}
    if not matches:
        return
    is_step = np.isin(spans.name, list(matches)) & (spans.category == Category.ANNOTATION)
    step_of = nearest(parent, is_step)
    attribution = facts.found.attribution
    optimizing = np.array([place.phase == "optimizer" for place in attribution.places], dtype=np.bool_)
    itself = (step_of >= 0) & optimizing[attribution.place_of]  # not the forward of a closure
    foreign = ((step_of >= 0) & ~itself) | attribution.is_node
    is_op = np.array([name.startswith("aten::") for name in names], dtype=np.bool_)[spans.name]
    is_op &= (spans.category == Category.CPU_OP) & itself
    outermost = np.flatnonzero(is_op & (nearest_above(parent, nearest(parent, is_op)) < 0))
    ops: dict[str, Counter[str]] = defaultdict(Counter)
    for span, step in zip(outermost.tolist(), step_of[outermost].tolist(), strict=True):
        ops[matches[int(spans.name[step])]][recording.name_of(span)] += 1
    by_class: dict[str, list[int]] = defaultdict(list)
    for name, class_name in matches.items():
        by_class[class_name].append(name)
    for class_name, members in by_class.items():
        of_class = is_step & np.isin(spans.name, members)
        lists = sum(number for name, number in ops[class_name].items() if name.startswith(_OF_LISTS))
        singles = Counter({name: n for name, n in ops[class_name].items() if not name.startswith(_OF_LISTS)})
        whole = itself & of_class[np.maximum(step_of, 0)]
        calls = np.flatnonzero(of_class)
        wall_ns = _own_wall_ns(spans, calls, is_op, foreign)
        yield _Steps(class_name, whole, calls, wall_ns, singles, lists, max(1, len(calls)))


def _own_wall_ns(spans: Spans, calls: Int64, is_op: Bool, foreign: Bool) -> Int64:
    """What each call of an optimizer takes on the clock, without each run of work that is not its own.

    A run lasts from its first event (of the first run: from the call) to the end of its last, be it on the engine's
    thread: the caller waits for it.
    """
    told = np.flatnonzero(is_op | foreign)
    told = told[np.argsort(spans.start_ns[told], kind="stable")]
    starts = spans.start_ns[told]
    wall_ns = spans.end_ns[calls] - spans.start_ns[calls]
    for i, (start, end) in enumerate(zip(spans.start_ns[calls].tolist(), spans.end_ns[calls].tolist(), strict=True)):
        inside = told[np.searchsorted(starts, start) : np.searchsorted(starts, end, side="right")]
        inside = inside[spans.end_ns[inside] <= end]
        others = inside[foreign[inside]]
        run = np.searchsorted(spans.start_ns[inside[is_op[inside]]], spans.start_ns[others])
        for number in np.unique(run).tolist():
            one = others[run == number]
            begin = int(spans.start_ns[one[0]]) if number else start
            wall_ns[i] -= int(spans.end_ns[one].max()) - begin
    return wall_ns


def _saved_ns(facts: Facts, steps: _Steps) -> float:
    """As if the optimizer's step took no time at all; what is between its ops is time of the step itself."""
    in_ops = np.where(facts.found.recording.spans.category == Category.ANNOTATION, 0, own_cpu_ns(facts))
    step_of = nearest(facts.found.nesting.parent, np.isin(np.arange(len(in_ops)), steps.spans))
    own = steps.whole & (step_of >= 0)
    of_step = np.zeros_like(in_ops)
    np.add.at(of_step, step_of[own], in_ops[own])
    in_ops[steps.spans] = np.maximum(0, steps.wall_ns - of_step[steps.spans])
    return saved_at_most_ns(facts, steps.whole, own_ns=in_ops)


def _settings(facts: Facts, class_name: str) -> list[Mapping[str, Any]]:
    """What the run says of optimizers of this class."""
    told = facts.analysis.run.get("optimizers")
    every = told if isinstance(told, list) else []
    return [one for one in every if isinstance(one, Mapping) and one.get("class_name") == class_name]


def _fix(facts: Facts, class_name: str, settings: list[Mapping[str, Any]]) -> str:
    can_fuse = all(one.get("can_fuse") for one in settings) if settings else class_name in _WITH_FUSED
    if can_fuse:
        return f"{class_name}(..., fused=True)"
    can_foreach = all(one.get("can_foreach") for one in settings) if settings else class_name in _WITH_FOREACH
    if can_foreach and device_of(facts) is not None:
        return f"{class_name}(..., foreach=True)"
    return f"torch.compile around {class_name}'s step, or an optimizer that has fused=True: AdamW, Adam, SGD, Adagrad"


def _most(steps: _Steps) -> str:
    """`aten::mul_ 21, aten::lerp_ 21`: the most frequent, a step of the optimizer."""
    return ", ".join(f"{name} {number / steps.calls:.0f}" for name, number in steps.singles.most_common(3))


RULES: tuple[Rule, ...] = (slow_optimizer,)
