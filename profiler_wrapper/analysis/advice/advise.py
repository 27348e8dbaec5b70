"""All rules asked, and what they find as the summary of a result."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from profiler_wrapper.analysis.advice import attention, blocks, communication, launches, memory, products
from profiler_wrapper.analysis.advice.facts import NS_PER_US, Facts, Rule, duration, fold_names, where
from profiler_wrapper.analysis.advice.verdict import comparable, verdict
from profiler_wrapper.analysis.model import Comparable, Finding, Summary
from profiler_wrapper.analysis.statistics import split_number, sum_if_all_known
from profiler_wrapper.errors import attempt

if TYPE_CHECKING:
    from profiler_wrapper.analysis.attributed import Attributed
    from profiler_wrapper.analysis.model import Analysis


RULES: tuple[Rule, ...] = (
    *launches.RULES,
    *communication.RULES,
    *attention.RULES,
    *products.RULES,
    *blocks.RULES,
    *memory.RULES,
)
MOST_FINDINGS = 10
WORTH_IT = 0.01  # of the step's time, or of the peak: what saves less at most is left out
LONGEST = 5400  # characters of JSON that a summary may take: 2,000 tokens of three, and some room for spaces
_MEMORY_WEIGHT = 0.5  # a share of the peak against one of the step: memory saved is not yet time saved
_FREE_MEMORY_WEIGHT = 0.2  # where much of the device is free anyway
_MEMORY_FREE = 0.7  # of the device, at the peak
_LONGEST_TEXT = 240
_SHORT_TEXT = 100
_MOST_EVIDENCE = 5
_LEAST_EVIDENCE = 2
_MOST_LAYERS = 4  # folded names


def summary_of(analysis: Analysis, found: Attributed, notes: list[str], *, rules: Sequence[Rule] = RULES) -> Summary:
    """Verdict, findings, comparable. A rule that fails adds to `notes`; it spoils nothing else."""
    facts = Facts(analysis=analysis, found=found)
    findings = advise(facts, notes, rules)
    sentence = attempt("the verdict is", lambda: verdict(facts, findings), "", notes)
    comparison = attempt("what makes runs comparable is", lambda: comparable(facts), Comparable(), notes)
    summary = Summary(verdict=_cut(sentence, 2 * _LONGEST_TEXT) or None, findings=[], comparable=comparison)
    return _fitted(summary, [_plain(finding) for finding in findings])


def advise(facts: Facts, notes: list[str], rules: Sequence[Rule] = RULES) -> tuple[Finding, ...]:
    """At most ten findings, the largest saving first, like layers as one; a rule that fails adds to `notes`."""
    found: list[Finding] = []
    for rule in rules:
        name = getattr(rule, "__name__", str(rule)).strip("_").replace("_", " ")
        nothing: list[Finding] = []
        found += attempt(f"the advice on {name} is", partial(_all_of, rule, facts), nothing, notes)
    worth = [finding for finding in _folded(found) if _worth_it(finding, facts)]
    return tuple(sorted(worth, key=lambda finding: _rank(finding, facts))[:MOST_FINDINGS])


def _all_of(rule: Rule, facts: Facts) -> list[Finding]:
    return list(rule(facts))


# --- like layers ---------------------------------------------------------------------------------


def _folded(findings: Iterable[Finding]) -> list[Finding]:
    """Findings of one rule, phase and cure, of layers whose names differ in a number, as one."""
    groups: dict[tuple[object, ...], list[Finding]] = defaultdict(list)
    for place, finding in enumerate(findings):
        named = finding.layer is not None and "{" not in finding.layer and len(finding.layers) <= 1
        pattern = split_number(finding.layer)[0] if named and finding.layer else place
        groups[finding.id, finding.phase, finding.fix, pattern].append(finding)
    return [_one(members) if len(members) > 1 else members[0] for members in groups.values()]


def _one(members: Sequence[Finding]) -> Finding:
    worst = max(members, key=lambda one: (one.saves_at_most_us or 0, one.saves_at_most_bytes or 0))
    layers = tuple(dict.fromkeys(one.layer for one in members if one.layer))
    micros = sum_if_all_known(one.saves_at_most_us for one in members)
    size = sum_if_all_known(one.saves_at_most_bytes for one in members)
    shares = sum_if_all_known(one.share for one in members)
    together = f" ({duration(micros * NS_PER_US)} a step in all)" if micros is not None else ""
    order = {"high": 2, "medium": 1, "low": 0}
    return replace(
        worst,
        title=f"{worst.title}; {len(members) - 1} more like it{together}",
        layer=where(layers),
        layers=layers,
        share=None if shares is None else min(1.0, shares),
        saves_at_most_us=micros,
        saves_at_most_bytes=None if size is None else round(size),
        confidence=min((one.confidence for one in members), key=order.__getitem__),
    )


# --- order ---------------------------------------------------------------------------------------


def _saved(finding: Finding, facts: Facts) -> float | None:
    """What a finding saves at most, as a share of the step; or a part of its share of the peak, if that is more."""
    shares = []
    if finding.saves_at_most_us is not None:
        shares.append(finding.saves_at_most_us * NS_PER_US / facts.step_ns)
    if finding.saves_at_most_bytes is not None and facts.peak_reserved_bytes:
        shares.append(_memory_weight(facts) * finding.saves_at_most_bytes / facts.peak_reserved_bytes)
    return max(shares, default=None)


def _memory_weight(facts: Facts) -> float:
    device, peak = facts.device_memory_bytes, facts.peak_reserved_bytes
    free = device is not None and peak is not None and peak < _MEMORY_FREE * device
    return _FREE_MEMORY_WEIGHT if free else _MEMORY_WEIGHT


def _worth_it(finding: Finding, facts: Facts) -> bool:
    saved = _saved(finding, facts)
    return saved is None or saved >= WORTH_IT * (_memory_weight(facts) if finding.saves_at_most_us is None else 1)


def _rank(finding: Finding, facts: Facts) -> tuple[float, int, str, str]:
    """Largest saving first; what saves nobody knows how much comes after, by the share it is about."""
    saved = _saved(finding, facts)
    sure = ("high", "medium", "low").index(finding.confidence)
    if saved is None:
        return (1 - (finding.share or 0.0), sure, finding.id, finding.layer or "")
    return (-saved, sure, finding.id, finding.layer or "")


# --- as plain data -------------------------------------------------------------------------------


def _plain(finding: Finding) -> dict[str, Any]:
    """A finding as plain data: numbers rounded, layers folded, nothing long."""
    data = asdict(finding)
    layers = fold_names(finding.layers)
    data |= {
        "title": _cut(finding.title, _LONGEST_TEXT),
        "layer": None if finding.layer is None else _cut(finding.layer, _LONGEST_TEXT // 2),
        "share": None if finding.share is None else round(finding.share, 4),
        "saves_at_most_us": None if finding.saves_at_most_us is None else round(finding.saves_at_most_us, 1),
        "evidence": [_cut(line, _LONGEST_TEXT) for line in finding.evidence[:_MOST_EVIDENCE]],
        "fix": _cut(finding.fix, _LONGEST_TEXT),
        "source": None if finding.source is None else _cut(finding.source, _LONGEST_TEXT, end=True),
        "layers": [_cut(name, _LONGEST_TEXT // 2) for name in layers[:_MOST_LAYERS]],
        "details": {str(key): _rounded(value) for key, value in finding.details.items()},
    }
    return data


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    return _cut(value, _LONGEST_TEXT // 2) if isinstance(value, str) else value


def _cut(text: str, longest: int, *, end: bool = False) -> str:
    """At most so many characters; of a path the end says more than the begin."""
    if len(text) <= longest:
        return text
    return "..." + text[3 - longest :] if end else text[: longest - 3] + "..."


def _fitted(summary: Summary, findings: list[dict[str, Any]]) -> Summary:
    """The summary with as much of its findings as fits: the least important loses its details first."""
    summary["findings"] = findings

    def too_long() -> bool:
        return len(json.dumps(summary, default=str)) > LONGEST

    for shorten in (_without_details, _in_short):
        for finding in reversed(findings):
            if not too_long():
                return summary
            shorten(finding)
    while findings and too_long():
        findings.pop()
    return summary


def _without_details(finding: dict[str, Any]) -> None:
    finding["details"] = {}


def _in_short(finding: dict[str, Any]) -> None:
    finding["layers"] = []
    for name in ("title", "layer", "fix"):
        finding[name] = _cut(finding[name], _SHORT_TEXT) if finding[name] else finding[name]
    finding["source"] = _cut(finding["source"], _SHORT_TEXT, end=True) if finding["source"] else None
    finding["evidence"] = [_cut(line, _SHORT_TEXT) for line in finding["evidence"][:_LEAST_EVIDENCE]]
