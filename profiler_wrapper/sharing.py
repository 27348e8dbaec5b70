"""What of a result may be given to others: numbers, and the names of layers, ops, kernels and named blocks.

An allow-list: what is not named here is left out, so that a key that is added later stays private until it is allowed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from profiler_wrapper.place.names import PHASES
from profiler_wrapper.reports.result_json import from_dict, schema_text, to_dict
from profiler_wrapper.tables.model import Analysis
from profiler_wrapper.tables.timeline_columns import FAILED, Timeline

LEFT_OUT = (
    "Left out, so that it can be shared: paths, names of host, user and run, sources (stacks), environment, trace, "
    "warnings and evidence. Names of layers, classes, tensors, ops, kernels, process groups, named blocks and what is "
    "tracked are in it."
)
# Of the run; all else that is known of it stays private.
_RUN = frozenset({
    "rank", "world_size", "coordinates", "device", "device_type", "cpu_name", "device_count", "device_memory_bytes",
    "versions", "timed_steps", "full_steps", "complete", "parameters", "process_group_backend"
})  # fmt: skip
# Texts that stay, by the key under which they stand, in lists too. Of others an empty text is left.
_TEXTS = frozenset({
    "time_basis", "device", "device_type", "cpu_name", "compute_capability", "process_group_backend", "torch",
    "python", "model", "dtype", "dtypes", "layer", "layers", "raw_name", "class_name", "class", "kind", "block",
    "parent", "phase", "phases", "op", "ops", "name", "backend", "kernels", "reason", "bound", "shapes", "collective",
    "group", "category", "label", "text", "id", "confidence", "call_path", "about"
})  # fmt: skip
# Objects whose keys are names or numbers of the run, and no keys of the schema.
_NAMED_FREELY = frozenset({
    "versions", "coordinates", "series", "categories", "phases_us", "attention_by_backend_us", "flops_per_s",
    "parameters", "bytes_by_dtype"
})  # fmt: skip
_REPEATED = 40  # letters of a title by which it is known in a verdict, which may repeat it cut
_VERSIONS = "versions"  # texts, by the name of what they are of
# Rules whose title and cure are made of numbers, layers and ops; others may quote code, as the reason of a graph break.
_OWN_WORDS = frozenset({
    "dataloader-bound", "synchronisation", "unpinned-copies", "low-utilization", "launch-bound", "many-small-kernels",
    "unfused-elementwise", "communication-bound", "exposed-communication", "slow-backend", "data-parallel",
    "attention-fallback", "unaligned-dimensions", "tensor-cores-unused", "no-tf32", "odd-block", "slow-optimizer",
    "memory-nearly-full", "fragmentation", "memory-leak", "recompute-not-needed", "recompute-would-help",
    "allocation-too-large", "preferred-expert",
})  # fmt: skip
# A path or an address within a name, such as that of a block named by its file. A path may have spaces: all up to its
# last separator is cut out.
_PATH = re.compile(
    r"""\w+://\S+ | \S+@\S+
    | (?: (?<![^\s'"|(=:,]) (?: [A-Za-z]: | ~ | \.{1,2} )? [\\/] (?=\S) | [^\s\\/'"|]* [\\/] [^\s\\/'"|]+ [\\/] )
      (?: [^'"|]* [\\/] )? [^\s'"|]*""",
    re.VERBOSE,
)


def shareable(analysis: Analysis) -> Analysis:
    """The same result without what tells of a machine, a user or code; it has one warning, which says so."""
    data = to_dict(analysis)
    data["run"] = {key: value for key, value in data["run"].items() if key in _RUN}
    findings = data["summary"]["findings"]
    kept = _kept(data, "", frozenset(_keys(json.loads(schema_text()))))
    for finding, was in zip(kept["summary"]["findings"], findings, strict=True):
        own = was.get("id") in _OWN_WORDS
        finding |= {key: _name(was.get(key) or "") if own else was.get("id", "") for key in ("title", "fix")}
        finding |= {"evidence": [], "details": {}, "source": None, "next": None}
    verdict = data["summary"]["verdict"] or ""
    if all(was.get("id") in _OWN_WORDS or was["title"][:_REPEATED] not in verdict for was in findings):
        kept["summary"]["verdict"] = _name(verdict) or None
    return replace(from_dict(kept | {"warnings": [LEFT_OUT]}), timeline=_shareable_timeline(analysis.timeline))


def _shareable_timeline(timeline: Timeline | str) -> Timeline | str:
    """Its events without the names that a user gave to blocks and moments, and without the time of day."""
    if isinstance(timeline, str):
        return FAILED if timeline.startswith(FAILED) else timeline
    names = ("(named block)" if i in timeline.own_names else _name(name) for i, name in enumerate(timeline.names))
    return replace(timeline, names=tuple(names), layers=tuple(map(_name, timeline.layers)), origin_ns=0)


def _keys(schema: Any) -> Iterator[str]:
    """Every key that the schema describes."""
    if isinstance(schema, Mapping):
        yield from schema.get("properties", ())
    for part in schema.values() if isinstance(schema, Mapping) else schema if isinstance(schema, list) else ():
        yield from _keys(part)


def _kept(value: Any, key: str, known: frozenset[str]) -> Any:
    """What stays of a value that stands under `key`: numbers, texts of allowed keys, objects of known keys."""
    if isinstance(value, Mapping):
        free = key in _NAMED_FREELY
        rows: dict[str, Any] = {}
        for name in (name for name in value if free or name in known or name == "start_us"):
            said = _name(name) if free else name
            said = said if said not in rows else f"{said} {len(rows) + 1}"  # two names of which a path is all
            rows[said] = _kept(value[name], key if free else name, known)
        return rows
    if isinstance(value, list):
        kept = (_kept(one, key, known) for one in value)
        return [one for one, was in zip(kept, value, strict=True) if one != "" or was == ""]
    if isinstance(value, str):
        return _name(value) if key in _TEXTS or key == _VERSIONS or value in PHASES else ""
    return value


def _name(text: str) -> str:
    return _PATH.sub("(path)", text)
