"""Makes the parts of the reference that follow from the code: `python docs/make_reference.py`.

A page has them between `<!-- made: NAME -->` and `<!-- end of NAME -->`; what stands around them is written by hand.
`tests/repository/test_reference.py` fails where a page is not up to date.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import checkout  # noqa: F401
from make_result_schema import _comments
from profiler_wrapper.__main__ import _parser
from profiler_wrapper.comparison.guard import GuardCheck, GuardFinding, GuardReport
from profiler_wrapper.comparison.model import ChangedLayer, ComparedTotal, WorkChange
from profiler_wrapper.comparison.text import Comparison
from profiler_wrapper.config_flops.model_flops import ModelFlops
from profiler_wrapper.ranks.model import Suspect, Verdict
from profiler_wrapper.ranks.report import RanksReport
from profiler_wrapper.reports.columns import COLUMNS, Column
from profiler_wrapper.reports.result_json import FOLLOWS, LISTS, json_name
from profiler_wrapper.run.options import OPTIONS
from profiler_wrapper.tables.model import LayerRow

DOCS = Path(__file__).parent
PACKAGE = DOCS.parent / "profiler_wrapper"
SCHEMA = PACKAGE / "reports" / "result_schema.json"

Table = Iterable[Sequence[object]]


def table(*heads: str, rows: Table) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(_cell(one) for one in line) + " |" for line in lines)


def _cell(value: object) -> str:
    return " ".join(str(value).split()).replace("|", "\\|")


def code(text: object) -> str:
    return f"`{text}`" if text not in (None, "") else ""


# --- the command line ---

_DEFAULT = re.compile(r" \(default: ([^()]*)\)$")


def commands() -> str:
    """Each command with its arguments, from its parser."""
    (action,) = (one for one in _parser()._actions if isinstance(one, argparse._SubParsersAction))
    return "\n\n".join(_command(name, parser) for name, parser in action.choices.items())


def _command(name: str, parser: argparse.ArgumentParser) -> str:
    actions = [one for one in parser._actions if not isinstance(one, argparse._HelpAction)]
    positional = [one for one in actions if not one.option_strings]
    usage = " ".join(["profiler-wrapper", name, *map(_argument, positional), "[OPTIONS]"])
    rows = [(code(_argument(one)), "", _sentence(one)) for one in positional]
    rows += [
        (
            ", ".join(code(f"{flag} {_metavar(one)}".strip()) for flag in one.option_strings),
            _default(one),
            _sentence(one),
        )
        for one in actions
        if one.option_strings
    ]
    examples, *more = str(parser.epilog).split("\n\n")
    lines = "\n".join(line.strip() for line in examples.splitlines()[1:])
    parts = [
        f"## {name}",
        str(parser.description),
        f"```text\n{usage}\n```",
        table("argument", "default", "meaning", rows=rows),
        f"```bash\n{lines}\n```",
        *(f"```text\n{part}\n```" for part in more),
    ]
    return "\n\n".join(parts)


def _metavar(action: argparse.Action) -> str:
    if action.nargs == 0:
        return ""
    return str(action.metavar or "{" + ",".join(map(str, action.choices or ())) + "}")


def _argument(action: argparse.Action) -> str:
    name = str(action.metavar or action.dest)
    return {"?": f"[{name}]", "+": f"{name} [{name} ...]"}.get(str(action.nargs), name)


def _default(action: argparse.Action) -> str:
    said = _DEFAULT.search(_help(action))
    value = said[1] if said else action.default
    return "" if value in (None, False) else code(value) if action.default == value else str(value)


def _sentence(action: argparse.Action) -> str:
    text = _DEFAULT.sub("", _help(action))
    return text[0].upper() + text[1:]


def _help(action: argparse.Action) -> str:
    return str(action.help) % vars(action)


# --- columns of the layer table ---

UNITS = {
    "time": "ms a step",
    "bytes": "MiB (2^20 bytes)",
    "flops": "GFLOP a step",
    "share": "%",
    "count": "a step",
    "number": "FLOP a byte",
    "text": "",
}


def layer_table() -> str:
    """The columns of the layer table: printed, in full, on the page, and their keys."""
    shown = [column for column in COLUMNS if column.console or column.full or column.page]
    rows = ((one.console, one.full, one.page, _unit_of(one), code(_key_of(one)), _meaning_of(one)) for one in shown)
    return table(
        "printed", "in full", "on the page", "unit", "key of `layers`", "meaning, measurement, limit", rows=rows
    )


def _key_of(column: Column) -> str:
    if column.field:
        return json_name(LayerRow, column.field)
    return column.key if column.key in FOLLOWS[LayerRow] else ""


def _meaning_of(column: Column) -> str:
    """What its field says, else the column."""
    if not column.field:
        return f"{column.help}."
    row = json.loads(SCHEMA.read_text(encoding="utf-8"))["$defs"][LayerRow.__name__]
    return f"{_key('', row['properties'][_key_of(column)])[3]}."


def _unit_of(column: Column) -> str:
    if column.kind == "rate":
        return "GB/s" if column.key == "byte_rate" else "GFLOP/s"
    return UNITS[column.kind]


# --- types of results ---

TYPES = (
    (Comparison, "What `compare` returns. `print` shows it, `to_dict()` gives plain data."),
    (ComparedTotal, "One total of both sides."),
    (ChangedLayer, "A layer whose time changed beside the rest."),
    (WorkChange, "A layer that does other work than before."),
    (GuardReport, "What `guard` returns. `regressed`, `judged` and `verdict` say it in short; `print` shows it."),
    (GuardCheck, "One kind of check."),
    (GuardFinding, "One thing that differs from the baseline."),
    (RanksReport, "What `load_ranks` returns. `(R,)`: one value per rank. `to_dict()` gives plain data."),
    (Verdict, "Who or what slows the job."),
    (Suspect, "Something that may have cost time."),
    (ModelFlops, "What `model_flops` returns; `forward`, `backward` and `total` are FLOPs."),
)


# Of fields without a comment, by name, or by type and name.
FIELD_WORDS = {
    "a": "of the first result",
    "b": "of the second",
    "arrivals": "who came late to collectives",
    "backward_parts": "those of backward, under the same names",
    "baseline": "what the baseline is called",
    "baseline_runs": "how many runs are in the baseline",
    "calls_a": "calls a step",
    "causes": "the verdict's, then what is slow without it, and so on",
    "cause": "the part of the step that is slow, or the kind of cause",
    "checks": "one of each kind",
    "classes": "by class of event and phase",
    "clocks": "how far the clocks of the ranks were apart",
    "communication": "each collective, send and receive, over all ranks",
    "confidence": "how sure this is",
    "convention": "of attention",
    "differences": "what makes the two unlike: device, torch, types, shapes ...",
    "error": "standard error of `change`",
    "evidence": "sentences with the numbers that it stands on",
    "family": "whose formula was used",
    "flops_a": "FLOPs a step",
    "group": "of the communication, where that is slow",
    "host": "the host, where it is one",
    "improvements": "what is better",
    "layer": "the layer, where it is one",
    "layers": "all that it stands for",
    "mfu_unknown": "why MFU is not known",
    "ms": "share of the lost time due to the last stage of the pipeline",
    "mw": "share of the lost time due to the slowest 3 % of ranks",
    "last_step": "the last one in which it shows",
    "name": "what it is called",
    "name_a": "what `a` is called",
    "named_ranks": "those that it names; empty: none, or all",
    "noise_known": "whether both have enough steps to tell noise",
    "notes": "what limits the comparison",
    "parts": "those of forward, by part of the model",
    "phase": "None: all phases",
    "rank": "the rank, where it is one",
    "regressions": "what is worse",
    "replay": "the step replayed by its dependencies, where these are known",
    "run": "what the run is called",
    "scores": "how quick each rank was",
    "sentence": "the verdict in words",
    "sequences": "of the step",
    "spans": "how many were read",
    "stage": "the stage of the pipeline, where it is one",
    "status": "what came of it",
    "tokens": "of the step",
    "totals": "time of a step, peak memory, FLOPs ...",
    "unattributed": "by reason",
    "unit": "of `a` and `b`",
    "verdict": "what it comes to",
    "world_size": "ranks of the job",
    "ChangedLayer.layers": "the layers that `layer` stands for",
    "Suspect.phase": "the kind of time that is longer, where it is one",
    "Verdict.phase": "the kind of time that is longer, where it is one",
    "ComparedTotal.change": "relative",
    "ComparedTotal.decision": "whether the change is beyond the noise",
    "GuardFinding.after": "the value of the run",
    "RanksReport.layers": "times of blocks, by rank",
    "WorkChange.layers": "the layers that `layer` stands for",
}


def types() -> str:
    """The fields of what the public functions return, with the comments beside them."""
    parts = []
    for kind, text in TYPES:
        hints, said = get_type_hints(kind), _comments(kind)
        rows = []
        for one in fields(kind):
            words = said.get(one.name) or FIELD_WORDS.get(f"{kind.__name__}.{one.name}") or _field_words(one.name)
            rows.append((code(one.name), _choices(hints[one.name]) or code(one.type), words.replace("None", "`None`")))
        parts += [f"### {kind.__name__}", text, table("field", "type", "meaning", rows=rows)]
    return "\n\n".join(parts)


def _field_words(name: str) -> str:
    if name.endswith("_b"):
        return "the same of `b`"
    return FIELD_WORDS[name]


def _choices(hint: Any) -> str:
    """`"high"` or `"low"`, of a Literal."""
    return " or ".join(code(json.dumps(one)) for one in get_args(hint)) if get_origin(hint) is Literal else ""


# --- keys of result.json ---


def result_json() -> str:
    """Each key of result.json, from its JSON Schema."""
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    defs, top = schema["$defs"], schema["properties"].items()
    parts = [
        "### At the top",
        table("key", "type", "meaning", rows=[(*_key(*one)[:2], one[1]["description"]) for one in top]),
    ]
    named: dict[str, list[str]] = {}
    for name in LISTS:
        named.setdefault(_kind(schema["properties"][name]["items"]), []).append(name)
    for kind, names in named.items():
        title = " and ".join(code(name) for name in names)
        parts += [f"### Rows of {title}", f"{defs[kind]['description']}".replace("None", "null"), _keys(defs[kind])]
    for name in ("summary", "run", "time", "utilization", "overview", "memory"):
        parts += [f"### {code(name)}", schema["properties"][name]["description"] + ".", _keys(_resolved(schema, name))]
    comparable = schema["properties"]["summary"]["properties"]["comparable"]
    parts += ["### `summary.comparable`", comparable["description"] + ".", _keys(comparable)]
    for kind in sorted(defs.keys() - named.keys() - {"TimeTotals", "Utilization", "Overview"}):
        parts += [f"### {kind}", defs[kind]["description"].replace("None", "null"), _keys(defs[kind])]
    return "\n\n".join(parts)


def _resolved(schema: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = schema["properties"][name]
    found = next((one for one in found.get("anyOf", ()) if "$ref" in one), found)
    resolved: Mapping[str, Any] = schema["$defs"][_kind(found)] if "$ref" in found else found
    return resolved


def _keys(schema: Mapping[str, Any]) -> str:
    return table("key", "type", "unit", "meaning", rows=[_key(name, one) for name, one in schema["properties"].items()])


def _key(name: str, schema: Mapping[str, Any]) -> tuple[str, str, str, str]:
    text, unit = _without_unit(schema["description"])
    text, summed, _ = text.partition("; summed over the timed steps")
    return code(name), _type(schema), f"{unit} (sum)".strip() if summed else unit, text


def _without_unit(text: str) -> tuple[str, str]:
    found = re.fullmatch(r"(.*) \((microseconds[^()]*|nanoseconds|bytes[^()]*|FLOPs a[^()]*)\)", text)
    return (found[1], found[2]) if found else (text, "")


def _kind(schema: Mapping[str, Any]) -> str:
    return str(schema["$ref"]).rpartition("/")[2]


def _type(schema: Mapping[str, Any]) -> str:
    """In few words: `number or null`, `list of Finding`."""
    if "$ref" in schema:
        return _link(_kind(schema))
    if "enum" in schema:
        return " or ".join("null" if one is None else code(one) for one in schema["enum"])
    if "anyOf" in schema:
        return " or ".join(_type(one) for one in schema["anyOf"])
    kinds = [schema["type"]] if isinstance(schema.get("type"), str) else schema.get("type", ["any"])
    inner = schema.get("items") or schema.get("additionalProperties")
    names = {"array": "list", "object": "object"}
    words = [names.get(kind, kind) for kind in kinds]
    if inner and words[0] in ("list", "object"):
        words[0] += f" of {_type(inner)}"
    return " or ".join(words)


def _link(kind: str) -> str:
    lists = {_kind_of.__name__: name for name, _kind_of in reversed(LISTS.items())}
    top = {"TimeTotals": "time", "Utilization": "utilization", "Overview": "overview"}
    if kind in lists:
        return f"rows of {code(lists[kind])}"
    return code(top[kind]) if kind in top else f"[{kind}](#{kind.lower()})"


# --- messages ---

CALLS = ("warn", "warn_once")
ERRORS = ("WrongUse", "BrokenTrace", "BrokenSnapshot", "EmptyRecording", "UnknownLayer", "MissingPackage")


@cache
def package() -> dict[str, list[ast.AST]]:
    """All nodes of each file of the package, by its path."""
    paths = sorted(PACKAGE.rglob("*.py"))
    return {str(path.relative_to(PACKAGE)): list(ast.walk(ast.parse(path.read_text("utf-8")))) for path in paths}


def messages(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """File and text of each call of these functions or classes that has a text; `…` stands for what is put in."""
    wanted = set(names)
    for path, nodes in package().items():
        for node in nodes:
            if isinstance(node, ast.Call) and _name(node.func) in wanted:
                for argument in reversed(node.args[:2]):
                    text = _text(argument)
                    if text and (_name(node.func) != "warn_once" or argument is node.args[1]):
                        yield path, text
                        break


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return " ".join(node.value.split()) if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        parts = ("…" if isinstance(one, ast.FormattedValue) else str(getattr(one, "value", "")) for one in node.values)
        return re.sub("…+", "…", " ".join("".join(parts).split()))
    return ""


SUBJECTS = {
    "Options of `ProfilerWrapper`": ("wrapper.py", "run/", "capture/layers", "capture/owned", "capture/records",
                                     "capture/steps"),
    "Peaks": ("tables/work", "capture/ceilings", "trace/measured_peaks"),
    "Commands": ("commands/",),
    "Results": ("reports/", "result.py"),
    "Baselines of `guard`": ("comparison/",),
    "`model_flops`": ("config_flops/",),
    "The monitor": ("monitor/",),
    "Timers": ("timer/",),
    "Many ranks": ("ranks/",),
    "`compat`": ("compat.py",),
    "Limits in pytest": ("integrations/limits.py",),
    "Files and paths": ("trace/",),
    "Others": (),
}  # fmt: skip


def wrong_use() -> str:
    """All messages of WrongUse by subject; each says what to give."""
    by_subject: dict[str, list[str]] = {subject: [] for subject in SUBJECTS}
    for file, text in messages(["WrongUse"]):
        subject = next((one for one, starts in SUBJECTS.items() if file.startswith(starts)), "Others")
        if len(text.replace("…", "").split()) > 1 and text not in by_subject[subject]:
            by_subject[subject].append(text)
    options = by_subject["Options of `ProfilerWrapper`"]
    options += [f"{name}=… {one.metadata['advice']}" for name, one in OPTIONS.items() if one.metadata.get("advice")]
    return "\n\n".join(
        f"### {subject}\n\n" + "\n".join(f"- {_quoted(text)}" for text in texts)
        for subject, texts in by_subject.items()
        if texts
    )


def _quoted(text: str) -> str:
    return f"`` {text} ``" if "`" in text else f"`{text}`"


# --- pages ---

PARTS: dict[str, Callable[[], str]] = {
    "types": types,
    "commands": commands,
    "layer-table": layer_table,
    "result-json": result_json,
    "wrong-use": wrong_use,
}
PAGES = {
    "reference/api.md": ("types",),
    "reference/command-line.md": ("commands",),
    "reference/columns.md": ("layer-table", "result-json"),
    "reference/warnings.md": ("wrong-use",),
}


def renewed(text: str, names: Iterable[str]) -> str:
    """A page with its parts made anew."""
    for name in names:
        begin, end = f"<!-- made: {name} -->", f"<!-- end of {name} -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"the page needs {begin} and {end}, once each")
        head, rest = text.split(begin)
        text = f"{head}{begin}\n\n{PARTS[name]()}\n\n{end}{rest.split(end)[1]}"
    return text


def main() -> None:
    for page, names in PAGES.items():
        path = DOCS / page
        path.write_text(renewed(path.read_text(encoding="utf-8"), names), encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
