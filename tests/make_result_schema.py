"""Makes the JSON Schema of `result.json` from the rows that are written there: `python tests/make_result_schema.py`.

What a key means is said where its row is defined, in the comment beside the field; what many rows share is said in
`result_words.py`.
"""

from __future__ import annotations

import ast
import inspect
import io
import json
import re
import tokenize
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from profiler_wrapper.analysis.model import (
    CATEGORIES,
    SCHEMA_VERSION,
    Analysis,
    Bound,
    Change,
    Finding,
    LayerRow,
    Leak,
    Overview,
    Slope,
    StepSplit,
    TimeTotals,
    Utilization,
)
from profiler_wrapper.analysis.work.peaks import Peaks
from profiler_wrapper.reports.result_json import LISTS, json_name
from result_words import (
    COMPARABLE,
    CURVE,
    MEMORY,
    MOMENT,
    NOT_SUMMED,
    OWNER,
    PEAK,
    RUN,
    SUMMED,
    SUMMED_COUNTS,
    SUMMED_ROWS,
    TOP,
    WORDS,
    WORDS_OF_ROW,
)

PATH = Path(__file__).parents[1] / "profiler_wrapper" / "reports" / "result_schema.json"
DRAFT = "https://json-schema.org/draft/2020-12/schema"

Schema = dict[str, Any]


def build_schema() -> Schema:
    """Draft 2020-12; every key is described."""
    named = [*LISTS.values(), TimeTotals, Utilization, Overview, StepSplit, Finding, Peaks, Slope, Leak, Change]
    properties: Schema = {name: {"type": "array", "items": _reference(kind)} for name, kind in LISTS.items()}
    properties |= {
        "schema_version": {"type": "integer", "minimum": SCHEMA_VERSION},
        "summary": _summary(),
        "time_basis": {"enum": ["device", "cpu"]},
        "complete": {"type": "boolean"},
        "warnings": _simple("string[]"),
        "run": _described(RUN),
        "time": _reference(TimeTotals),
        "series": {"type": "object", "additionalProperties": {"type": "array", "items": {"type": ["number", "null"]}}},
        "utilization": _or_null(_reference(Utilization)),
        "overview": _or_null(_reference(Overview)),
        "memory": _memory(),
    }
    optional = {field.name for field in fields(Analysis) if not _is_required(field)} - {"summary"}
    return {
        "$schema": DRAFT,
        "$id": f"profiler_wrapper/result_schema_{SCHEMA_VERSION}.json",
        "title": "result.json of profiler_wrapper",
        "description": "Times are microseconds with three decimals, sizes bytes. What is not known is null, never 0, "
        "and a warning says why. Later versions add keys: ignore those that are not known.",
        "type": "object",
        "properties": {name: {"description": text, **properties[name]} for name, text in TOP.items()},
        "required": [name for name in TOP if name not in optional],
        "$defs": {kind.__name__: _row(kind) for kind in dict.fromkeys(named)},
    }


def _summary() -> Schema:
    return {
        "type": "object",
        "properties": {
            "verdict": {
                "type": ["string", "null"],
                "description": "One sentence: where the time goes, what to do first",
            },
            "findings": {
                "type": "array",
                "maxItems": 10,
                "items": _reference(Finding),
                "description": "What could be better, the largest saving first",
            },
            "comparable": {
                **_described(COMPARABLE),
                "description": "What two results must have in common to be compared",
            },
        },
        "required": ["verdict", "findings", "comparable"],
    }


def _memory() -> Schema:
    sizes = {"type": "object", "additionalProperties": {"type": "integer"}, "propertyNames": {"enum": [*CATEGORIES]}}
    moments = _described(MOMENT)
    moments["properties"]["categories"] = {**sizes, "description": "By what they are for, in bytes"}
    peak = _described(PEAK)
    peak["properties"] |= {
        "owners": {"type": "array", "items": _described(OWNER), "description": "Who held it, the largest first"},
        "reserved": {**_or_null(moments), "description": "The moment of the highest reserved; null on a CPU"},
    }
    memory = _described(MEMORY)
    memory["properties"] |= {
        "categories": {**_or_null(sizes), "description": "At the peak, in bytes: they add up to what is allocated"},
        "peak": {**_or_null(peak), "description": "The highest allocated"},
        "moments": {"type": "array", "items": moments, "description": "Per step after forward, backward, optimizer"},
        "slope": {
            **_or_null(_reference(Slope)),
            "description": "How allocated memory grows; null for fewer than 2 steps",
        },
        "leaks": {"type": "array", "items": _reference(Leak), "description": "What stays, step after step"},
        "changes": {"type": "array", "items": _reference(Change), "description": "What would lower the peak"},
        "curve": {**_curve(), "description": "Memory over time: what is held from each time on, until the next"},
    }
    return memory


def _curve() -> Schema:
    curve = _described(CURVE)
    by_category = {"type": "object", "additionalProperties": _simple("integer[]")}
    curve["properties"]["categories"] = {**by_category, "description": "By what it is for, in bytes"}
    return curve


def _described(keys: Mapping[str, tuple[str, str]]) -> Schema:
    properties = {name: {"description": text, **_simple(kind)} for name, (kind, text) in keys.items()}
    return {"type": "object", "properties": properties}


def _simple(kind: str) -> Schema:
    """`"integer[]?"`: a list of integers, or null."""
    name = kind.removesuffix("?")
    if name.endswith("[]"):
        schema: Schema = {"type": "array", "items": _simple(name[:-2])}
    else:
        schema = {"type": name}
    return schema | ({"type": [schema["type"], "null"]} if kind.endswith("?") else {})


# --- rows -----------------------------------------------------------------------------------------


def _reference(kind: type[Any]) -> Schema:
    return {"$ref": f"#/$defs/{kind.__name__}"}


def _or_null(schema: Schema) -> Schema:
    if isinstance(schema.get("type"), str):
        return schema | {"type": [schema["type"], "null"]}
    return {"anyOf": [schema, {"type": "null"}]}


def _row(kind: type[Any]) -> Schema:
    renamed = kind in LISTS.values() or kind in (TimeTotals, Utilization, Overview, StepSplit)
    hints = get_type_hints(kind)
    comments = _comments(kind)
    properties: Schema = {}
    required = []
    for field in fields(kind):
        name = json_name(kind, field.name) if renamed else field.name
        schema = _type(hints[field.name], as_us=renamed and field.name.endswith("_ns"))
        text = _sentence(kind, field.name, _words(kind, field.name, comments))
        text += SUMMED if _is_summed(kind, field.name) else ""
        properties[name] = {"description": text + _unit(name, schema), **schema}
        if _is_required(field):
            required.append(name)
    if kind is TimeTotals:
        properties["coverage"] = {"type": "number", "description": "Attributed share of the total, 0 to 1"}
    if kind is LayerRow:
        properties["bound"] = {
            "enum": [*get_args(Bound), None],
            "description": "What holds it at the roof; null: unknown",
        }
    text = re.sub(r"\s+", " ", inspect.cleandoc(kind.__doc__ or "").partition("\n\n")[0])
    return {"type": "object", "description": text, "properties": properties, "required": required}


def _words(kind: type[Any], name: str, comments: Mapping[str, str]) -> str | None:
    return WORDS_OF_ROW.get(f"{kind.__name__}.{name}") or comments.get(name) or WORDS.get(name)


def _is_summed(kind: type[Any], name: str) -> bool:
    """Whether it is a sum over the timed trace, and no value of a step."""
    is_time = name.endswith("_ns") and not name.endswith("_per_step_ns") and name not in NOT_SUMMED
    return kind.__name__ in SUMMED_ROWS and (is_time or name in SUMMED_COUNTS)


def _is_required(field: Any) -> bool:
    """What has a default came later: older results lack it."""
    return field.default is MISSING and field.default_factory is MISSING


def _sentence(kind: type[Any], name: str, text: str | None) -> str:
    if not text:
        raise ValueError(
            f"{kind.__name__}.{name} has no description. Say beside the field, in a comment, what it is, "
            "or in WORDS of result_words.py."
        )
    text = re.sub(r"(\w)_ns\b", r"\1_us", text).replace("None", "null")
    return text[0].upper() + text[1:] if text.split()[0].isalpha() else text


def _unit(name: str, schema: Schema) -> str:
    if "enum" in schema or "string" in schema.get("type", ()):
        return ""
    units = {"_us": "microseconds", "_ns": "nanoseconds", "_bytes": "bytes", "bytes_per_s": "bytes a second"}
    units |= {
        "_bytes_per_step": "bytes",
        "_moved_per_step": "bytes",
        "flops_per_step": "FLOPs a step, 2 per multiply-add",
    }
    units |= {"flops_per_s": "FLOPs a second", "_us_per_step": "microseconds a step"}
    found = [unit for ending, unit in units.items() if name.endswith(ending)]
    return f" ({found[-1]})" if found else ""


def _comments(kind: type[Any]) -> dict[str, str]:
    """The comment in the lines of each field; where there is none, the lines of comment above it."""
    source = inspect.cleandoc("\n" + inspect.getsource(kind))
    comments: dict[int, str] = {}
    whole_lines = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments[token.start[0]] = token.string.lstrip("# ").rstrip()
            if not token.line[: token.start[1]].strip():
                whole_lines.add(token.start[0])
    tree = ast.parse(source).body[0]
    assert isinstance(tree, ast.ClassDef)
    found: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            lines = list(range(node.lineno, (node.end_lineno or node.lineno) + 1))
            if not comments.keys() & set(lines):
                above = node.lineno - 1
                while above in whole_lines:
                    lines.insert(0, above)
                    above -= 1
            found[node.target.id] = " ".join(comments[line] for line in lines if line in comments)
    return {name: text for name, text in found.items() if text}


def _type(hint: Any, *, as_us: bool = False) -> Schema:
    """A Python type in the words of JSON Schema; `as_us`: integers of nanoseconds, written as microseconds."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        known = [one for one in arguments if one is not NoneType]
        schema = _type(known[0], as_us=as_us)
        assert len(known) == 1, hint
        if "enum" in schema:
            return {"enum": [*schema["enum"], None]}
        return _or_null(schema)
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin is tuple:
        assert arguments[1:] == (...,), hint
        return {"type": "array", "items": _type(arguments[0], as_us=as_us)}
    if origin is not None and issubclass(origin, Mapping):
        if arguments[1] in (object, Any):
            return {"type": "object"}
        return {"type": "object", "additionalProperties": _type(arguments[1], as_us=as_us)}
    if is_dataclass(hint):
        assert isinstance(hint, type)
        return _reference(hint)
    names = {str: "string", bool: "boolean", int: "number" if as_us else "integer", float: "number"}
    return {"type": names[hint]}


def schema_json() -> str:
    """As the file has it."""
    return json.dumps(build_schema(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    PATH.write_text(schema_json(), encoding="utf-8")
    print(PATH)
