"""All rules asked, and what they find as the summary of a result: verdict, findings, what makes results comparable."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from math import prod
from typing import Any

import numpy as np

from profiler_wrapper.advice import attention, blocks, communication, memory, products, waiting
from profiler_wrapper.advice.facts import NS_PER_US, Facts, Rule, cut, fold_names, rows_command, share, where
from profiler_wrapper.advice.time_parts import time_parts
from profiler_wrapper.errors import attempt, first_few
from profiler_wrapper.place.names import LAUNCHED_BEFORE
from profiler_wrapper.place.placed import Placed
from profiler_wrapper.tables.model import Analysis, Comparable, Finding, Headline, Summary
from profiler_wrapper.tables.statistics import split_number, sum_if_all_known, summed
from profiler_wrapper.trace.marks import ROOT_PATH

_SUBJECTS = (waiting, communication, attention, products, blocks, memory)
RULES: tuple[Rule, ...] = tuple(rule for subject in _SUBJECTS for rule in subject.RULES)
MOST_FINDINGS = 10
WORTH_IT = 0.01  # of the step's time, or of the peak: what saves less at most is left out
LONGEST = 6900  # characters of JSON that a summary may take, 2,300 tokens of three; `short_summary` takes far less
_MOST_TO_GAIN = 0.03  # what saves less at most is a finding, but nothing to begin with
_LONGEST_TEXT = 200
_LONGEST_LAYER = 120  # or folded layers
_LONGEST_NAME = 80
_MOST_EVIDENCE = 3
_MOST_LAYERS = 4  # folded names
_MOST_DTYPES = 4
# A share of the peak against one of the step: memory saved is not yet time saved, the less so where much is free.
_MEMORY_WEIGHT = 0.5
_FREE_MEMORY_WEIGHT = 0.2
_MEMORY_FREE = 0.7  # of the device, taken at the peak
_MUCH_WITHOUT_LAYER = 0.3  # of the time: said before all else
_TOO_LARGE = "allocation-too-large"  # it ended the run, so it comes before what would make it quicker
_IDLE = 0.5  # of a step with nothing running on the device: said before all else


def summary_of(analysis: Analysis, found: Placed, notes: list[str], *, rules: Sequence[Rule] = RULES) -> Summary:
    """Return verdict, findings and what makes results comparable; a rule that fails only adds to `notes`."""
    facts = Facts(analysis=analysis, found=found)
    findings = advise(facts, notes, rules)
    sentence = attempt("the verdict is", lambda: verdict(facts, findings), "", notes)
    said = attempt("the headline is", lambda: headline(facts), None, notes)
    comparison = attempt("what makes runs comparable is", lambda: comparable(facts), Comparable(), notes)
    plain = [_plain(finding) for finding in findings]
    sentence = cut(sentence, 3 * _LONGEST_TEXT)
    summary = Summary(verdict=sentence or None, headline=said, findings=plain, comparable=comparison)
    for finding in reversed(plain):  # the least important loses its details first, then goes
        if len(json.dumps(summary, default=str)) > LONGEST:
            finding["details"] = {}
    while plain and len(json.dumps(summary, default=str)) > LONGEST:
        plain.pop()
    return summary


def advise(facts: Facts, notes: list[str], rules: Sequence[Rule] = RULES) -> tuple[Finding, ...]:
    """Return at most ten findings, the largest saving first, like layers as one; a rule that fails adds to `notes`."""
    found: list[Finding] = []
    for rule in rules:
        name = getattr(rule, "__name__", str(rule)).replace("_", " ")
        asked = partial(lambda rule: list(rule(facts)), rule)
        found += attempt(f"the advice on {name} is", asked, list[Finding](), notes)
    worth = [finding for finding in _folded(found) if _worth_it(finding, facts)]
    return tuple(sorted(worth, key=lambda finding: _rank(finding, facts))[:MOST_FINDINGS])


def _folded(findings: Iterable[Finding]) -> list[Finding]:
    """Join findings of one rule, phase and fix whose layers differ only in a number of their names."""
    groups: dict[tuple[object, ...], list[Finding]] = defaultdict(list)
    for place, finding in enumerate(findings):
        named = finding.layer is not None and "{" not in finding.layer and len(finding.layers) <= 1
        pattern = split_number(finding.layer)[0] if named and finding.layer else place
        groups[finding.id, finding.phase, finding.fix, pattern].append(finding)
    return [_one(members) if len(members) > 1 else members[0] for members in groups.values()]


def _one(members: Sequence[Finding]) -> Finding:
    worst = max(members, key=lambda one: (one.saves_at_most_us or 0, one.saves_at_most_bytes or 0))
    layers = tuple(dict.fromkeys(one.layer for one in members if one.layer))
    size = sum_if_all_known(one.saves_at_most_bytes for one in members)
    shares = sum_if_all_known(one.share for one in members)
    return replace(
        worst,
        title=f"{worst.title}; {len(members) - 1} more like it",
        layer=where(layers),
        layers=layers,
        share=None if shares is None else min(1.0, shares),
        saves_at_most_us=sum_if_all_known(one.saves_at_most_us for one in members),
        saves_at_most_bytes=None if size is None else round(size),
    )


# --- order ---------------------------------------------------------------------------------------


def _saved(finding: Finding, facts: Facts) -> float | None:
    """Return what a finding saves at most as a share of the step, or part of its share of the peak if that is more."""
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


def _worth_it(finding: Finding, facts: Facts, least: float = WORTH_IT) -> bool:
    saved = _saved(finding, facts)
    return saved is None or saved >= least * (_memory_weight(facts) if finding.saves_at_most_us is None else 1)


def _rank(finding: Finding, facts: Facts) -> tuple[float, int, str, str]:
    """Sort by the largest saving; findings without a known saving come last, by the share that they are about."""
    saved = _saved(finding, facts) if finding.id != _TOO_LARGE else np.inf
    first = 1 - (finding.share or 0.0) if saved is None else -saved
    return first, ("high", "medium", "low").index(finding.confidence), finding.id, finding.layer or ""


# --- as plain data -------------------------------------------------------------------------------


def _plain(finding: Finding) -> dict[str, Any]:
    """Return a finding as plain data: numbers rounded, layers folded, long texts cut."""
    saves_us, source = finding.saves_at_most_us, finding.source
    return asdict(finding) | {
        "title": cut(finding.title, _LONGEST_TEXT),
        "layer": None if finding.layer is None else cut(finding.layer, _LONGEST_LAYER),
        "share": None if finding.share is None else round(finding.share, 4),
        "saves_at_most_us": None if saves_us is None else round(saves_us, 1),
        "evidence": [cut(line, _LONGEST_TEXT) for line in finding.evidence[:_MOST_EVIDENCE]],
        "fix": cut(finding.fix, _LONGEST_TEXT),
        "source": None if source is None else cut(source, _LONGEST_TEXT, end=True),
        "layers": [cut(name, _LONGEST_LAYER) for name in fold_names(finding.layers)[:_MOST_LAYERS]],
        "details": {str(key): _rounded(value) for key, value in finding.details.items()},
        "next": finding.next or rows_command("overview"),
    }


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    return cut(value, _LONGEST_LAYER) if isinstance(value, str) else value


# --- the verdict ---------------------------------------------------------------------------------


def verdict(facts: Facts, findings: Sequence[Finding]) -> str:
    """Say in a few short sentences where the time of a step goes and what to do first."""
    captured = facts.found.captured_kernels
    if captured > len(facts.found.charges):
        return f"This is the capture of a graph: its {captured} kernels did not run. Profile a replay for times."
    sentences = [] if facts.analysis.complete else ["The recording is incomplete."]
    sentences += [sentence for _, sentence in _where_it_goes(facts)]
    first = next((one for one in findings if one.id == _TOO_LARGE or _worth_it(one, facts, _MOST_TO_GAIN)), None)
    if first is None:
        return " ".join([*sentences, "Nothing stands out."])
    if first.id == _TOO_LARGE:
        sentences.append(f"{first.title[0].upper()}{first.title[1:]}.")
    elif first.id != "low-utilization":  # that the device is idle was said
        sentences.append(f"Most to gain: {first.title.rstrip('.')}.")
    return " ".join([*sentences, f"First fix: {first.fix.rstrip('.')}."])


def headline(facts: Facts) -> Headline:
    """Return the first statement of the verdict in at most 15 words, and the layers that its share is about."""
    if facts.found.captured_kernels > len(facts.found.charges):
        return Headline(text="This is the capture of a graph: its kernels did not run.", about="none", layers=[])
    first, _ = next(_where_it_goes(facts))
    return first


def _where_it_goes(facts: Facts) -> Iterator[tuple[Headline, str]]:
    """Yield each statement on where the time of a step goes: as a headline, and as a sentence with more detail."""
    analysis, step, total_ns = facts.analysis, facts.steps_text, facts.analysis.time.total_ns
    if not total_ns:
        said = f"No op of {step} took time of its own."
        yield Headline(text=said, about="none", layers=[]), said
        return
    takes = f"; {step.replace(' of ', ' takes ', 1)}."
    if facts.idle_ns is not None and facts.share_of_step(facts.idle_ns) > _IDLE:
        said, takes = f"The device is idle for {share(facts.share_of_step(facts.idle_ns))} of {step}", "."
        slowed = f", which {facts.slowed_by} made longer" if facts.slowed_by else ""
        yield Headline(text=f"{said}.", about="idle", layers=[]), f"{said}{slowed}."
    unknown = [row for row in analysis.unattributed if row.reason != LAUNCHED_BEFORE]
    if (unknown_share := sum(row.time_ns for row in unknown) / total_ns) >= _MUCH_WITHOUT_LAYER:
        said = f"No layer is known for {share(unknown_share)} of the {facts.time_name}"
        reasons = first_few([row.reason for row in unknown], 2)
        yield (
            Headline(text=f"{said}.", about="unknown", layers=[]),
            f"{said} ({reasons}); {_largest_class(analysis)}{takes}",
        )
        return
    part = time_parts(analysis)[0]
    said = f"{part.name} takes {share(part.time_ns / total_ns)} of the {facts.time_name}"
    layers = [cut(name, _LONGEST_LAYER) for name in fold_names(part.layers)[:_MOST_LAYERS]]
    yield Headline(text=f"{said}.", about=part.about, layers=layers), said + takes


def _largest_class(analysis: Analysis) -> str:
    """Name the class of work that takes most time, for a trace whose layers are not known."""
    time_ns = summed((row.class_name, row.time_ns) for row in analysis.classes)
    ((name, most),) = time_ns.most_common(1)
    named = {"gemm": "matrix products", "other": "work of no known kind"}.get(name, name)
    return f"{named} take{'' if named.endswith('s') else 's'} {share(most / time_ns.total())} of it in all"


# --- comparable ----------------------------------------------------------------------------------

_BATCHED = frozenset({"aten::bmm", "aten::baddbmm", "aten::baddbmm_"})


def comparable(facts: Facts) -> Comparable:
    """Return machine, model, sizes and settings as plain data; None for what is not known.

    `layers`: how many have a name, and `blocks` how many of them are blocks. `shapes`: see
    `input_shapes`. `attention_shape`: (batch, heads, tokens, head_dim) of the largest queries.
    """
    analysis, run = facts.analysis, facts.analysis.run
    versions = run.get("versions") or {}
    shapes, charges, spans = facts.found.shapes, facts.found.charges, facts.found.recording.spans
    queries = [call.query_shape for call in analysis.attention_calls]
    return {
        "device": run.get("device"),
        "device_count": len(np.unique(spans.device[charges.span])) if facts.on_device else None,
        "cpu_name": run.get("cpu_name"),
        "time_basis": analysis.time_basis,
        "torch": str(versions["torch"]) if "torch" in versions else None,
        "python": str(versions["python"]) if "python" in versions else None,
        "world_size": run.get("world_size"),
        "coordinates": run.get("coordinates") or {},
        "dtypes": _dtypes(facts),
        "model": _model(facts),
        "layers": sum(1 for layer in facts.rows_of if layer),
        "blocks": len(facts.blocks),
        "parameters": _parameters(facts),
        "shapes": input_shapes(analysis),
        "attention_shape": list(max(queries, key=lambda shape: (prod(shape), shape))) if queries else None,
        "flops_per_step": analysis.utilization.hardware_flops_per_step if analysis.utilization is not None else None,
        "phases": sorted({row.phase for row in analysis.layers if row.time_ns}),
        "steps": facts.steps if facts.has_steps else 0,
        "step_us": round(facts.step_ns / 1000, 1),
        "coverage": round(analysis.time.coverage, 4),
        "shapes_in_timed_steps": bool(shapes is not None and shapes.recorded),
        "memory_in_timed_steps": bool(len(facts.found.recording.memory)),
        "complete": analysis.complete,
    }


def _dtypes(facts: Facts) -> list[str]:
    """List the types of number with most FLOPs, the first has most."""
    flops = summed((row.dtype, row.flops_per_step) for row in facts.analysis.flops)
    return [dtype for dtype, _ in flops.most_common(_MOST_DTYPES) if dtype]


def _model(facts: Facts) -> str | None:
    """Return the classes of the root modules."""
    roots = [rows[0].class_name for layer, rows in facts.rows_of.items() if layer and rows[0].parent is None]
    return ", ".join(dict.fromkeys(roots))[:120] or None


def _parameters(facts: Facts) -> int | None:
    """Count the parameters of all root modules; None where the run does not tell."""
    roots = [layer for layer in facts.analysis.run.get("layers") or () if layer.get("path") == ROOT_PATH]
    return sum_if_all_known(layer.get("parameters") for layer in roots) if roots else None


def input_shapes(analysis: Analysis) -> str | None:
    """Return a short digest of the sizes of the matrix products of linear layers and convolutions.

    Of forward where there is one, without types. Batched products are left out unless there are no others: they
    are those of attention, which each of its backends does otherwise. None where no shapes were recorded.
    """
    known = [product for product in analysis.products if product.phase == "forward"] or analysis.products
    linear = [product for product in known if product.op not in _BATCHED] or known
    products = summed(((one.m, one.n, one.k, one.batch), round(1000 * one.calls_per_step)) for one in linear)
    if not products:
        return None
    return hashlib.sha256(repr(sorted(products.items())).encode()).hexdigest()[:12]
