"""Makes the JSON Schema of `result.json` from the rows that are written there: `python tests/make_result_schema.py`.

What a key means is said where its row is defined, in the comment beside the field.
"""

from __future__ import annotations

import ast
import inspect
import io
import json
import re
import tokenize
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

import checkout  # noqa: F401
from profiler_wrapper.advice.advise import MOST_FINDINGS
from profiler_wrapper.reports.result_json import LISTS, WRITTEN, json_name
from profiler_wrapper.tables.call_rows import AdapterRow, ExpertLayerRow
from profiler_wrapper.tables.model import (
    SCHEMA_VERSION,
    Analysis,
    AttentionRow,
    Bound,
    Change,
    ClassRow,
    CollectiveRow,
    Finding,
    KernelRow,
    LayerRow,
    Leak,
    MemoryMoment,
    OperatorRow,
    Overview,
    Owner,
    Slope,
    StepSplit,
    SynchronisationRow,
    TimeTotals,
    UnattributedRow,
    Utilization,
)
from profiler_wrapper.tables.work.peaks import Peaks

PATH = Path(__file__).parents[1] / "profiler_wrapper" / "reports" / "result_schema.json"
DRAFT = "https://json-schema.org/draft/2020-12/schema"

Schema = dict[str, Any]

# Rows that stand where they are used, as mappings, and what some of their fields are called there.
IN_PLACE = {Owner: {"size_bytes": "bytes"}, MemoryMoment: {"total_bytes": "allocated_bytes"}}

# Rows whose times and counts are sums over the timed trace, and what is then said of each such key.
SUMMED_ROWS = (
    AdapterRow, AttentionRow, ClassRow, CollectiveRow, ExpertLayerRow, KernelRow, LayerRow, OperatorRow,
    SynchronisationRow, TimeTotals, UnattributedRow,
)  # fmt: skip
SUMMED_COUNTS = ("calls", "count", "device_events", "self_events")
NOT_SUMMED = ("max_ns", "min_ns", "span_ns")  # nor is what holds several values, such as one of each step
SUMMED = "; summed over the timed steps: divide by len(run.timed_steps) for one step"


def build_schema() -> Schema:
    """Draft 2020-12; every key is described."""
    named = [*LISTS.values(), TimeTotals, Utilization, Overview, StepSplit, Finding, Peaks, Slope, Leak, Change]
    version = {"description": "Version of this contract; later ones add keys and never change one", "type": "integer"}
    properties: Schema = {"schema_version": version | {"minimum": SCHEMA_VERSION}}
    hints, comments = get_type_hints(Analysis), _comments(Analysis)
    for name in WRITTEN:
        text = _sentence(Analysis, name, comments.get(name))
        properties[name] = {"description": text, **_type(hints[name])}
    properties["summary"] |= {"required": ["verdict", "findings", "comparable"]}
    properties["summary"]["properties"]["findings"]["maxItems"] = MOST_FINDINGS
    optional = {field.name for field in fields(Analysis) if not _is_required(field)} - {"summary"}
    return {
        "$schema": DRAFT,
        "$id": f"profiler_wrapper/result_schema_{SCHEMA_VERSION}.json",
        "title": "result.json of profiler_wrapper",
        "description": "Times are microseconds with three decimals, sizes bytes. What is not known is null, never 0, "
        "and a warning says why. Later versions add keys: ignore those that are not known.",
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name not in optional],
        "$defs": {kind.__name__: _row(kind) for kind in dict.fromkeys(named)},
    }


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
        text = _sentence(kind, field.name, comments.get(field.name))
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


def _keys(kind: type[Any]) -> Schema:
    """What is no row but a mapping: keys that programs may rely on. Others may be beside them."""
    comments = _comments(kind)
    properties = {}
    for field, hint in get_type_hints(kind, include_extras=True).items():
        name, schema = IN_PLACE.get(kind, {}).get(field, field), _type(hint)
        text = _sentence(kind, field, comments.get(field))
        properties[name] = {"description": text + _unit(name, schema), **schema}
    return {"type": "object", "properties": properties}


def _is_summed(kind: type[Any], name: str) -> bool:
    """Whether it is a sum over the timed trace, and no value of a step."""
    several = kind.__annotations__[name].startswith("tuple")
    is_time = name.endswith("_ns") and not name.endswith("_per_step_ns") and name not in NOT_SUMMED and not several
    return kind in SUMMED_ROWS and (is_time or name in SUMMED_COUNTS)


def _is_required(field: Any) -> bool:
    """What has a default came later: older results lack it."""
    return field.default is MISSING and field.default_factory is MISSING


def _sentence(kind: type[Any], name: str, text: str | None) -> str:
    if not text:
        raise ValueError(f"{kind.__name__}.{name} has no description. Say beside the field, in a comment, what it is.")
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
    if origin is Annotated:  # a row as plain data
        return _keys(arguments[1]) if arguments[1] in IN_PLACE else _reference(arguments[1])
    if is_typeddict(hint):
        return _keys(hint)
    if origin in (Union, UnionType):
        known = [one for one in arguments if one is not NoneType]
        schema = _type(known[0], as_us=as_us)
        if len(known) > 1:
            schema["type"] = [_type(one)["type"] for one in known]
        if NoneType not in arguments:
            return schema
        return {"enum": [*schema["enum"], None]} if "enum" in schema else _or_null(schema)
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin is tuple or origin is Sequence:
        assert arguments[1:] in ((...,), ()), hint
        return {"type": "array", "items": _type(arguments[0], as_us=as_us)}
    if origin is not None and issubclass(origin, Mapping):
        if arguments[1] in (object, Any):
            return {"type": "object"}
        names = {"propertyNames": _type(arguments[0])} if get_origin(arguments[0]) is Literal else {}
        return {"type": "object", "additionalProperties": _type(arguments[1], as_us=as_us), **names}
    if is_dataclass(hint):
        assert isinstance(hint, type)
        return _reference(hint)
    kinds = {str: "string", bool: "boolean", int: "number" if as_us else "integer", float: "number"}
    return {"type": kinds[hint]}


def schema_json() -> str:
    """As the file has it."""
    return json.dumps(build_schema(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    PATH.write_text(schema_json(), encoding="utf-8")
    print(PATH)
