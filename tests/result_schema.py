"""The JSON Schema of `result.json`, made from the rows it is written from: `python tests/result_schema.py` writes it.

What a key means is said where its row is defined, in the comment beside the field; what many rows share is said here.
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

from profiler_wrapper.analysis.memory_model import CATEGORIES, Change, Leak, Slope
from profiler_wrapper.analysis.model import SCHEMA_VERSION, Analysis, TimeTotals, Utilization
from profiler_wrapper.analysis.peaks import Peaks
from profiler_wrapper.analysis.view_model import Finding, Overview, StepSplit
from profiler_wrapper.reports.result_json import LISTS, json_name

PATH = Path(__file__).parents[1] / "profiler_wrapper" / "reports" / "result_schema.json"
DRAFT = "https://json-schema.org/draft/2020-12/schema"

Schema = dict[str, Any]

# What a field means where its row does not say, by its name in the row.
WORDS = {
    "allocations": "How many allocations",
    "attention_flops": "FLOPs of attention",
    "attention_ns": "The part of the time that is attention",
    "attributed_ns": "Time whose layer is known, or that by nature has none",
    "backend": "Implementation of attention: flash, cudnn, mem_efficient, flex, math, external",
    "bandwidth_bytes_per_s": "Of its memory; null where not known",
    "batch": "Products of this size in one call",
    "blocks_per_sm": "Of the launch, over all multiprocessors",
    "bytes_moved_per_step": "Each input of an op read once, each output written once",
    "bytes_per_step": "What is added every step",
    "calls": "How often it was called, in all timed steps",
    "calls_per_step": "Calls, a step",
    "category": f"What the bytes are for: {', '.join(CATEGORIES)}",
    "causal": "Whether attention was causal; null where the trace does not tell",
    "causal_flops_per_step": "FLOPs without what a causal mask hides",
    "causal_hardware_flops_per_step": "Of a step, all that ran, without what a causal mask hides",
    "causal_hfu": "As hfu, without what a causal mask hides",
    "causal_mfu": "As mfu, without what a causal mask hides",
    "causal_model_flops_per_step": "Of a step's forward and backward, without what a causal mask hides",
    "causal_repeated_flops_per_step": "As repeated_flops_per_step, without what a causal mask hides",
    "class_name": "Class: of a layer, its Python class; of events gemm, attention, norm, softmax, elementwise, ...",
    "communication_ns": "Of it, collectives",
    "confidence": "How sure this is",
    "count": "How many events",
    "count_per_step": "How many are added every step",
    "cpu_ns": "The CPU in ops, with no device at work",
    "cpu_time_ns": "Time of the CPU in it, with what it calls",
    "dataloader_ns": "Loading data",
    "device": "Name of the device; null without one",
    "device_memory_bytes": "Memory of the device",
    "dropout": "Probability; null where the trace does not tell",
    "dtype": "Type of number by torch's name (bfloat16); empty where the trace does not tell",
    "entry_reserved_bytes": "Reserved when the layer is entered: mean over calls",
    "exposed_communication_ns": "Communication with no compute beside it; null without device events",
    "flops_per_s": "Dense, by type of number",
    "flops_per_step": "FLOPs of matrix products, convolutions and attention",
    "group_size": "Ranks in the group; null where the trace does not tell",
    "hardware_flops_per_step": "Of a step, all that ran",
    "hfu": "Share of the peak of what ran, 0 to 1",
    "id": "Of the rule",
    "idle_ns": "The device with nothing to do while the CPU was here; null where not known",
    "k": "Inner size of the product",
    "kernel_ns": "A kernel running",
    "key_shape": "Shape of the keys: batch, heads, tokens, head_dim",
    "kind": "What it is: of a layer block, attention, mlp, norm, ...; of a change what to do",
    "largest_bytes": "The largest one",
    "launches_per_s": "Launches within the steps, a second",
    "layer": 'Full name in the plain model; "" for what by nature has no module; null where not known',
    "layers": "All layers that it is about",
    "m": "Rows of the result",
    "mask_shape": "Shape of the mask; empty where none was given",
    "max_ns": "The longest one",
    "memcpy_ns": "A copy running, and no kernel",
    "memset_ns": "A set running, and neither kernel nor copy",
    "mfu": "Share of the peak that goes into the model, 0 to 1; null where not known",
    "min_ns": "The shortest one",
    "model_flops_per_step": "Of a step's forward and backward, without what was computed before",
    "multiprocessors": "Of the device",
    "n": "Columns of the result",
    "name": "Name as the trace has it",
    "occupancy": "Estimated, 0 to 1",
    "op": "Name of the op (aten::mm)",
    "other_ns": "Nothing of the others",
    "phase": "What the loop was doing",
    "query_shape": "Shape of the queries: batch, heads, tokens, head_dim",
    "reason": "Why the layer is not known",
    "registers_per_thread": "Of the launch",
    "reserved_bytes": "Reserved by the allocator: mean over calls; null on a CPU",
    "roof_time_per_step_ns": "At the roof: per op the longer of its bytes and its FLOPs",
    "runtime_ns": "The CPU in calls into the runtime or driver, with no device at work",
    "saves_bytes": "At the peak",
    "self_bytes_moved_per_step": "As bytes_moved_per_step, of its own ops only",
    "self_causal_flops_per_step": "As causal_flops_per_step, of its own ops only",
    "self_cpu_time_ns": "Time of the CPU in it, without what it calls",
    "self_flops_per_step": "FLOPs of its own ops only, without the layers below: these add up",
    "self_memory_roof_time_per_step_ns": "As memory_roof_time_per_step_us, of its own ops only",
    "self_retained_bytes": "As retained_bytes, without what the layers below retain",
    "self_roof_time_per_step_ns": "As roof_time_per_step_us, of its own ops only",
    "self_time_ns": "Time in it, but in no layer below: these add up to the total, with what is unattributed",
    "shared_memory_bytes": "Of the launch, a block",
    "size_bytes": "Size",
    "source": "Where this is known from",
    "span_ns": "Wall time",
    "step": "Number of the step; null for what belongs to no step",
    "steps": "One entry a step",
    "time_ns": "Time, with all that is inside",
    "time_per_step_ns": "Time, a step, in the steps with shapes",
    "total_ns": "Time of all events of the trace: device time, or CPU time where there is no device",
    "unattributed_ns": "Time that should have a layer, of which none is known",
    "value_shape": "Shape of the values: batch, heads, tokens, head_dim",
    "wait_ns": "CPU time in the call that waits",
}
# The same, of one row: where the name alone means something else there.
WORDS_OF_ROW = {
    "AttentionRow.time_ns": "Time of them all",
    "Change.layers": "Layers that it is about",
    "ClassRow.time_ns": "Time of them all",
    "CollectiveRow.time_ns": "Time of them all",
    "KernelRow.time_ns": "Time of them all",
    "LayerRow.class_name": "Its Python class",
    "Slope.steps": "Over which this was seen",
    "StepSplit.communication_ns": "A collective running, and neither kernel, copy nor set",
    "SynchronisationRow.kind": "What makes it wait",
    "UnattributedRow.time_ns": "Time of them all",
}
# What is no dataclass: keys that programs may rely on, and their meaning. Others may be beside them.
RUN = {
    "timed_steps": ("integer[]", "Numbers of the steps whose times are reported"),
    "full_steps": ("integer[]", "Numbers of the steps whose shapes were recorded"),
    "trace": ("string?", "File of the timed trace"),
    "full_trace": ("string?", "File of the trace with shapes"),
    "rank": ("integer", "Rank of the process"),
    "world_size": ("integer", "Number of ranks"),
    "coordinates": ("object", "Place in the device mesh, by dimension: dp, tp, pp ..."),
    "device": ("string?", "Name of the device; null without one"),
    "device_type": ("string", "cpu, cuda ..."),
    "cpu_name": ("string", "Name of the CPU, and the threads that ops use"),
    "versions": ("object", "Versions by name: torch, python, cuda ..."),
    "float32_matmul_precision": ("string?", "torch.get_float32_matmul_precision()"),
    "prefix": ("string", "Of the file names"),
    "complete": ("boolean", "False where recording was cut short"),
    "warnings": ("string[]", "What is not as asked for, or not known"),
    "layers": ("object[]", "What is known of each layer of the model, in its order"),
    "cpu_frees_unsure": ("boolean", "On a CPU, whether frees of what was there before may be missing"),
    "peaks": ("object", "What the device can do, as it was given"),
    "optimizers": ("object[]", "Class and settings of each optimizer"),
    "parameters": ("object", "How many there are, of which types"),
    "wrappers": ("string[]", "Classes that wrap the model: DistributedDataParallel ..."),
    "attention_implementation": ("string?", "As the model is configured: sdpa, eager, flash_attention_2 ..."),
    "attention_backends": ("object", "Backends of scaled-dot-product attention, and whether they are allowed"),
    "process_group_backend": ("string?", "nccl, gloo ...; null without a process group"),
    "device_count": ("integer?", "Devices that this process could use"),
    "device_memory_bytes": ("integer?", "Memory of the device, in bytes"),
    "compute_capability": ("integer[]?", "Of the device: 9, 0"),
    "tf32": ("object?", "Whether products and convolutions of float32 may use TF32"),
    "cudnn": ("object?", "Its settings: benchmark, deterministic"),
    "allocator_settings": ("string?", "Of the caching allocator, as the environment has them"),
    "graph_breaks": ("object[]?", "Where torch.compile broke its graph, and why"),
}
COMPARABLE = {
    "device": ("string?", "Name of the device; null without one"),
    "device_count": ("integer?", "Devices that ran something; null on a CPU"),
    "cpu_name": ("string?", "Name of the CPU"),
    "time_basis": ("string", "device or cpu"),
    "torch": ("string?", "Version"),
    "python": ("string?", "Version"),
    "world_size": ("integer?", "Number of ranks"),
    "coordinates": ("object", "Place in the device mesh"),
    "dtypes": ("string[]", "Types of number, those with most FLOPs first"),
    "model": ("string?", "Classes of the roots"),
    "layers": ("integer", "How many layers have a name"),
    "blocks": ("integer", "How many of them are blocks"),
    "parameters": ("integer?", "Of all roots"),
    "shapes": ("string?", "A digest that is equal for equal products and attention"),
    "attention_shape": ("integer[]?", "Of the queries that take most time: batch, heads, tokens, head_dim"),
    "flops_per_step": ("integer?", "FLOPs of a step, all that ran"),
    "phases": ("string[]", "Phases with any time"),
    "steps": ("integer", "Number of timed steps"),
    "step_us": ("number", "Wall time of a step: the median, in microseconds"),
    "coverage": ("number", "Attributed share of the time, 0 to 1"),
    "shapes_in_timed_steps": ("boolean", "Shapes were recorded in the timed steps, which costs time"),
    "memory_in_timed_steps": ("boolean", "Allocations were recorded in the timed steps, which costs time"),
    "complete": ("boolean", "False where recording was cut short"),
}
TOP = {
    "schema_version": "Version of this contract; later ones add keys and never change one",
    "summary": "What to know first: the verdict, what to do about it, and what makes two results comparable",
    "time_basis": "What times are: of device events, or of ops on the CPU where the trace has none",
    "complete": "False where the recording was cut short, or something could not be recorded",
    "warnings": "What is not known or was odd, and why",
    "run": "Where this was recorded, and what",
    "time": "Times of the whole timed trace",
    "unattributed": "Time that should have a layer, of which none is known, by reason",
    "layers": "One row per layer and phase. The self times and the unattributed ones add up to the total",
    "attention": "Attention, by layer, phase and backend",
    "classes": "Time by class of event and phase",
    "steps": "One row per step, and one with step null for the rest; their times add up to the total",
    "flops": "All FLOPs, by layer, phase, class and type of number",
    "uncounted": "Ops that have FLOPs, and nothing tells how many",
    "untold_bytes": "Ops that move bytes, and nothing tells how many",
    "operators": "One row per op and phase",
    "kernels": "One row per kernel and launch configuration",
    "collectives": "One row per kind of collective, process group, layer and phase",
    "synchronisations": "Waits of the CPU for the device",
    "products": "Matrix products and convolutions by their sizes, of the steps with shapes",
    "attention_calls": "Calls of attention by their sizes, of the steps with shapes",
    "allocations": "The largest allocations",
    "op_memory": "What each op allocated",
    "series": "What is followed by name, per step or entry: microseconds; of a function what it gave",
    "utilization": "How much of the machine a step uses; null where the FLOPs of a step are not known",
    "overview": "How busy the machine is within the steps",
    "memory": "What was allocated, by whom and why; all null where no allocation was recorded",
}  # fmt: skip


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
    moment = {
        "label": ("string", "Which moment it is: after forward, after backward, after optimizer ..."),
        "step": ("integer?", "Number of the step"),
        "time_ns": ("integer", "When, on the trace's clock, in nanoseconds"),
        "allocated_bytes": ("integer", "Allocated then, in bytes"),
        "reserved_bytes": ("integer?", "Reserved then, in bytes; null on a CPU"),
    }
    owner = {
        "category": ("string", f"What the bytes are for: {', '.join(CATEGORIES)}"),
        "layer": ("string", "Full name; empty for what has no layer"),
        "name": ("string", "Of the tensor; empty for what has none"),
        "op": ("string", "That allocated it"),
        "phase": ("string?", "In which it was allocated"),
        "bytes": ("integer", "Held, in bytes"),
        "count": ("integer", "Allocations"),
    }
    moments = _described(moment)
    moments["properties"]["categories"] = {**sizes, "description": "By what they are for, in bytes"}
    peak = _described(
        {
            "allocated_bytes": ("integer", "The highest allocated, in bytes"),
            "reserved_bytes": ("integer?", "The highest reserved, in bytes; null on a CPU"),
            "time_ns": ("integer", "When, on the trace's clock, in nanoseconds"),
            "step": ("integer?", "Number of the step"),
            "phase": ("string?", "What the loop was doing"),
        }
    )
    peak["properties"] |= {
        "owners": {"type": "array", "items": _described(owner), "description": "Who held it, the largest first"},
        "reserved": {**_or_null(moments), "description": "The moment of the highest reserved; null on a CPU"},
    }
    memory = _described(
        {
            "device": ("string?", "cpu, cuda:0 ..."),
            "known_owners": ("boolean", "Parameters and optimizers were seen; else grads and os_state are inferred"),
            "allocated_bytes": ("integer?", "At the end of the recording, in bytes"),
            "reserved_bytes": ("integer?", "At the end of the recording, in bytes; null on a CPU"),
        }
    )
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
    curve = _described(
        {
            "start_ns": ("integer", "The recording's begin, on the trace's clock, in nanoseconds"),
            "end_us": ("number", "The recording's end, in microseconds since its begin"),
            "events": ("integer", "Events of the allocator, of which these are some"),
            "time_us": ("number[]", "Times in microseconds since the begin"),
            "allocated_bytes": ("integer[]", "Allocated then, in bytes"),
            "reserved_bytes": ("integer[]?", "Reserved then, in bytes; null on a CPU"),
            "steps": ("object[]", "When steps begin and end"),
            "phases": ("object[]", "When phases begin"),
        }
    )
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
        properties[name] = {"description": text + _unit(name, schema), **schema}
        if _is_required(field):
            required.append(name)
    if kind is TimeTotals:
        properties["coverage"] = {"type": "number", "description": "Attributed share of the total, 0 to 1"}
    text = re.sub(r"\s+", " ", inspect.cleandoc(kind.__doc__ or "").partition("\n\n")[0])
    return {"type": "object", "description": text, "properties": properties, "required": required}


def _words(kind: type[Any], name: str, comments: Mapping[str, str]) -> str | None:
    return WORDS_OF_ROW.get(f"{kind.__name__}.{name}") or comments.get(name) or WORDS.get(name)


def _is_required(field: Any) -> bool:
    """What has a default came later: older results lack it."""
    return field.default is MISSING and field.default_factory is MISSING


def _sentence(kind: type[Any], name: str, text: str | None) -> str:
    if not text:
        raise ValueError(
            f"{kind.__name__}.{name} has no description. Say beside the field, in a comment, what it is, "
            f"or in WORDS of {Path(__file__).name}."
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
