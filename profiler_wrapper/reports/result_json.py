"""An analysis as the plain data of `result.json`, and back; its lists as CSV and as data frames.

Field names are those of `analysis.model`; a time `x_ns` is written as `x_us`, a number with three
decimals, so no nanosecond is lost. Calls are not written: they are in the trace.
"""

from __future__ import annotations

import csv
import io
import json
import math
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from functools import cache, partial
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

import msgspec

from profiler_wrapper.advice.facts import RUN, cut
from profiler_wrapper.errors import BrokenTrace, MissingPackage, WrongUse, shown
from profiler_wrapper.tables.model import (
    SCHEMA_VERSION,
    Analysis,
    LayerRow,
    Overview,
    StepSplit,
    Summary,
    TimeTotals,
    Utilization,
)
from profiler_wrapper.trace.atomic import replacing
from profiler_wrapper.trace.run_file import check_run

if TYPE_CHECKING:
    import pandas as pd

# The lists of rows of an analysis, in the order of the file.
LISTS: Mapping[str, type[Any]] = {
    name: get_args(hint)[0]
    for name, hint in get_type_hints(Analysis).items()
    if get_origin(hint) is tuple and is_dataclass(get_args(hint)[0]) and name != "calls"
}
# What is written of an analysis, in the order of the file.
WRITTEN = ("summary", "time_basis", "complete", "warnings", "run", "time", *LISTS, "series", "utilization", "overview",
           "memory")  # fmt: skip
# Of rows, the fields that hold rows.
_ROWS: Mapping[type[Any], Mapping[str, type[Any]]] = {
    Analysis: {**LISTS, "time": TimeTotals, "utilization": Utilization, "overview": Overview},
    Overview: {"steps": StepSplit},
}

# What rows are written with beside their fields, from which it follows.
FOLLOWS: Mapping[type[Any], tuple[str, ...]] = {LayerRow: ("bound",), TimeTotals: ("coverage",)}

NS_PER_US = 1000
# Without these a row says nothing; every other field has a value for "not known".
_REQUIRED = frozenset({
    "layer", "phase", "reason", "backend", "op", "time", "time_basis", "time_ns", "self_time_ns", "total_ns",
    "unattributed_ns",
})  # fmt: skip


def to_dict(analysis: Analysis) -> dict[str, Any]:
    """Return what `result.json` holds, schema version 1: JSON types only, no NaN, no infinity."""
    timed_steps = [row.step for row in analysis.steps if row.step is not None]
    data = {name: convert(getattr(analysis, field)) for field, name, convert in _conversions(Analysis)}
    data["summary"] = {"verdict": None, "findings": [], "comparable": {}} | data["summary"]
    data["run"] = {"timed_steps": timed_steps, "full_steps": []} | data["run"]
    return {"schema_version": SCHEMA_VERSION} | data


def from_dict(data: Mapping[str, Any]) -> Analysis:
    """Return the analysis that `to_dict` wrote, without its calls.

    Keys that are not known are ignored and those that may be missing get "not known", so results
    of older and newer versions can be read.

    Raises:
        BrokenTrace: this is not the content of a `result.json`, or a field has the wrong type.
    """
    version = data.get("schema_version") if isinstance(data, Mapping) else None
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise BrokenTrace(
            f"Not a result of profiler_wrapper: schema_version is {shown(version)}, not {SCHEMA_VERSION} or later. "
            "Give the result.json of a run, or its trace."
        )
    try:
        whole = _row_from_dict(Analysis, _without_nulls(data))
        if "attributed_us" not in data["time"]:
            whole["time"]["attributed_ns"] = whole["time"]["total_ns"] - whole["time"]["unattributed_ns"]
        # mappings that may have more keys than are known here
        mappings: dict[str, Any] = {name: data.get(name) or {} for name in ("run", "memory", "summary")}
        if not all(isinstance(one, Mapping) for one in mappings.values()):
            raise TypeError(f"{', '.join(mappings)} are objects")
        check_run(mappings["run"])
        summary = {key: _without_nulls(one) for key, one in mappings["summary"].items() if one is not None}
        msgspec.convert(summary, Summary)
        return replace(msgspec.convert(whole | {"run": {}, "memory": {}, "summary": {}}, Analysis), **mappings)
    except (msgspec.ValidationError, KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise BrokenTrace(f"Not a readable result of profiler_wrapper: {error}") from error


def _without_nulls(value: Any) -> Any:
    """Return `value`; if it is a mapping, without its keys whose value is null."""
    return {key: one for key, one in value.items() if one is not None} if isinstance(value, Mapping) else value


def json_name(row_type: type[Any], name: str) -> str:
    """Return what a field of a row is called in the file."""
    if name == "class_name" and row_type is not LayerRow:
        return "class"
    return name[:-3] + "_us" if name.endswith("_ns") else name


def _scaled(convert: Callable[[Any], Any], times: Any) -> Any:
    """Return a time converted, or each time of a list or mapping; None stays None."""
    if isinstance(times, Mapping):
        return {_text(name): _scaled(convert, value) for name, value in times.items()}
    if isinstance(times, (list, tuple)):
        return [_scaled(convert, value) for value in times]
    return None if times is None else convert(times)


microseconds = partial(_scaled, lambda time_ns: float(time_ns / NS_PER_US))
_nanoseconds = partial(_scaled, lambda time_us: round(time_us * NS_PER_US))


@cache
def _conversions(row_type: type[Any]) -> tuple[tuple[str, str, Callable[[Any], Any]], ...]:
    """Return for each written field of a row: its name, that in the file, and what makes its value one of JSON's."""
    names = WRITTEN if row_type is Analysis else [field.name for field in fields(row_type)]
    return tuple((name, json_name(row_type, name), microseconds if name.endswith("_ns") else plain) for name in names)


def to_plain(row: Any) -> dict[str, Any]:
    """Return a row (a dataclass) in JSON types: its fields, nanoseconds (`x_ns`) as microseconds (`x_us`)."""
    row_type: Any = type(row)
    values = {name: convert(getattr(row, field)) for field, name, convert in _conversions(row_type)}
    return values | {name: getattr(row, name) for name in FOLLOWS.get(row_type, ())}


@cache
def _unknown_values(row_type: type[Any]) -> dict[str, Any]:
    """Return what each optional field of a row type holds when the file does not say."""
    return {field.name: _unknown_value(field) for field in fields(row_type) if field.name not in _REQUIRED}


def _unknown_value(field: Field[Any]) -> Any:
    hint = str(field.type)
    if hint.endswith("| None"):
        return None
    if field.default is not MISSING:
        return field.default
    return {"str": "", "int": 0, "bool": False, "tuple": ()}.get(hint.partition("[")[0], {})


def _row_from_dict(row_type: Any, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a row, times in nanoseconds, as `msgspec.convert` takes them."""
    row, inner = dict(_unknown_values(row_type)), _ROWS.get(row_type, {})
    for field, name, _ in _conversions(row_type):
        if name in data:
            value = data[name]
            if field in inner and value is not None:
                make = partial(_row_from_dict, inner[field])
                value = [make(one) for one in value] if isinstance(value, list) else make(value)
            row[field] = _nanoseconds(value) if field.endswith("_ns") else value
    return row


def _text(value: Any) -> str:
    """Return text that UTF-8 can hold: a lone surrogate becomes its escape."""
    text = str(value)
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


def plain(value: Any) -> Any:
    """Return `value` in JSON types. What JSON has no word for becomes null (NaN, infinity) or its text."""
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {_text(name): plain(one) for name, one in value.items()}
    if is_dataclass(value):
        return to_plain(value)
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((plain(item) for item in value), key=str)
    item = getattr(value, "item", None)  # a numpy number
    if callable(item) and getattr(value, "shape", None) == ():
        return plain(item())
    return _text(value)


# --- The JSON Schema of `result.json`, which ships beside this file ---

SCHEMA_FILE = "result_schema.json"


def schema_text() -> str:
    """Return JSON Schema, draft 2020-12: every key with its unit and meaning. Later versions of results add keys."""
    return files(__package__).joinpath(SCHEMA_FILE).read_text(encoding="utf-8")


# --- Parts of what `result.json` holds, for programs that need little of it ---

# What rows are ranked by: the first of these that they have. Self times add up, so those at the top take most.
_RANKED_BY = ("self_time_us", "time_us", "time_per_step_us", "wait_us", "allocated_bytes", "size_bytes")
_CURVE = "memory.curve"  # a list for each of its columns, and rows of their own beside the points
_IN_TIME_ORDER = "step"  # rows that have it stay in their order


def selected(
    data: Mapping[str, Any], *, select: Iterable[str] = (), where: Sequence[str] = (), top: int | None = None
) -> dict[str, Any]:
    """Return `data` with the keys of `select` only (`summary`, `layers.time_us`), and at most `top` rows of each list.

    Of rows, those with the highest self time (else time, else bytes) come first; rows of steps stay in their order.
    `memory.curve` keeps as many of its points, the highest, in their order. `rows_left_out` then says how many rows of
    a list, or points, are missing. `where` (`phase=optimizer`, `layer=model.layers.3`): see `rows_where`.

    Raises:
        WrongUse: there is no such key, or `top` is none.
    """
    if top is not None and top < 1:
        raise WrongUse(f"top={top}: give the number of rows, from 1.")
    wanted: dict[str, list[str]] = {}
    for name in select:
        key, _, part = name.partition(".")
        if key not in data:
            raise WrongUse(f"select={shown(name)}: a result has no {shown(key)}. It has: {', '.join(data)}.")
        wanted.setdefault(key, []).append(part)  # "": all of it
    left_out: dict[str, int] = {}
    found: dict[str, Any] = {}
    for key, parts in (wanted or {key: [""] for key in data}).items():
        value = data[key]
        for condition in where if key in LISTS else ():
            value = rows_where(value, condition)
        value = value if top is None else _limited(value, key, top, left_out)
        found[key] = value if "" in parts else _parts(value, key, parts)
    return found | ({"rows_left_out": left_out} if left_out else {})


def _parts(value: Any, key: str, parts: Iterable[str]) -> Any:
    """Keep the keys `parts` of a mapping, or of every row of a list."""
    if value is None:
        return None
    if isinstance(value, list) and all(isinstance(row, Mapping) for row in value):
        return [_parts(row, key, parts) for row in value]
    if not isinstance(value, Mapping):
        raise WrongUse(f"select={key}.{next(iter(parts))}: {key} has no parts here. Select {key}.")
    for part in parts:
        if part not in value:
            raise WrongUse(f"select={key}.{part}: {key} has no {shown(part)}. It has: {', '.join(value)}.")
    return {part: value[part] for part in parts}


def rows_where(rows: Iterable[Mapping[str, Any]], condition: str) -> list[Any]:
    """Return the rows whose key is that value, by `KEY=VALUE`; a value that ends in `*` is what others may begin with.

    Of `layer` the layers below count too. Rows that name several, in a list, need one that fits; `layer` also looks
    into `layers`. Rows that have no such key are left out.

    Raises:
        WrongUse: it is no such condition.
    """
    key, equals, value = condition.partition("=")
    if not equals or not key:
        raise WrongUse(f"where={shown(condition)}: give KEY=VALUE, such as phase=optimizer or layer=model.layers.3")

    def fits(row: Mapping[str, Any]) -> bool:
        cell = row.get(key, row.get("layers") if key == "layer" else None)
        texts = [str(one) for one in (cell if isinstance(cell, list) else [cell]) if one is not None]
        begin = value[:-1] if value.endswith("*") else f"{value}." if key == "layer" and value else None
        return value in texts or (begin is not None and any(text.startswith(begin) for text in texts))

    return [row for row in rows if fits(row)]


def _limited(value: Any, place: str, top: int, left_out: dict[str, int], points: Sequence[int] | None = None) -> Any:
    """Keep at most `top` rows of each list in `value`; of columns of the curve its highest `points`, by their index."""
    if isinstance(value, Mapping):
        if place == _CURVE:
            held = value["allocated_bytes"]
            points = sorted(sorted(range(len(held)), key=lambda at: -held[at])[:top])
            if len(held) > top:
                left_out[_CURVE] = len(held) - top
        return {key: _limited(inner, f"{place}.{key}", top, left_out, points) for key, inner in value.items()}
    if not (isinstance(value, list) and value):
        return value
    if not all(isinstance(row, Mapping) for row in value):
        return value if points is None else [value[at] for at in points]
    if len(value) > top:
        left_out[place] = len(value) - top
    return ranked(value)[:top]


def ranked(rows: list[Any]) -> list[Any]:
    """Return the rows with most time (else bytes) first; as they are, where nothing ranks them."""
    by = next((name for name in _RANKED_BY if name in rows[0]), None) if rows else None
    if by is None or _IN_TIME_ORDER in rows[0]:
        return rows
    return sorted(rows, key=lambda row: -(row.get(by) or 0))


# --------------------------------------------------------------------------------------------------
# The summary in little, for agents: what each finding says, and the command that shows the rows behind it.

MOST_SHORT_BYTES = 2047  # with the end of the line
_LONGEST_PATH = 160  # of a command, in JSON; a longer one stays RUN
_OF_A_FINDING = ("id", "title", "layer", "saves_at_most_us", "saves_at_most_bytes", "fix", "next")
# Longest text of a finding, and of a verdict; whether what to do is said of all findings or of the first alone.
_SHORTENED = ((200, 400, True), (200, 200, False), (130, 120, False), (80, 120, False))


def with_path(command: str, path: str) -> str:
    """Put the path of the run in the place of RUN in a command."""
    quoted = shlex.quote(path)
    return command if len(json.dumps(quoted)) > _LONGEST_PATH else command.replace(f" {RUN}", f" {quoted}", 1)


def short_summary(data: Mapping[str, Any], path: str, *, top: int | None = None, ranks: str | None = None) -> Any:
    """Return verdict, findings and next commands of `to_dict`'s data, in less than 2 KiB of JSON without spaces.

    As many findings as fit, the first ones, at most `top`; `rest` is the command that prints all that is left out.
    The commands are about `path`, and `ranks`: the directory of the run, where several ranks wrote into it.
    """
    summary, analyze = data["summary"], f"profiler-wrapper analyze {RUN} --format json --select "
    also = {"rest": with_path(f"{analyze}summary.verdict,summary.findings,summary.comparable,warnings", path)}
    if data["memory"].get("changes"):
        also["memory"] = with_path(f"{analyze}memory.changes --top 3", path)
    if ranks is not None:
        also["ranks"] = with_path(f"profiler-wrapper ranks {RUN}", ranks)
    findings = [
        {key: finding[key] for key in _OF_A_FINDING if finding.get(key) is not None}
        | {"next": with_path(finding.get("next") or f"{analyze}summary.findings", path)}
        for finding in summary["findings"]
    ][:top]
    for kept, (longest, of_verdict, all_fixes) in product(range(len(findings), -1, -1), _SHORTENED):
        left = len(summary["findings"]) - kept
        found = {
            "verdict": summary["verdict"] and cut(summary["verdict"], of_verdict),
            "findings": [
                {
                    key: cut(value, longest) if key in ("title", "layer", "fix") else value
                    for key, value in one.items()
                    if all_fixes or key != "fix" or one is findings[0]
                }
                for one in findings[:kept]
            ],
            **({"findings_left_out": left} if left else {}),
            **also,
        }
        if len(json.dumps({"summary": found}, separators=(",", ":"))) < MOST_SHORT_BYTES:
            return found
    return {"verdict": None, "findings": [], "findings_left_out": len(summary["findings"]), **also}


# --- The lists of a result as CSV, a row a line, names and units as in `result.json` ---

# A spreadsheet takes a text with one of these before it for a formula: it gets an apostrophe.
_BEGINS_A_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")


def csv_text(analysis: Analysis, rows: str = "layers", *, where: Iterable[str] = (), top: int | None = None) -> str:
    """Return one list of the result with its heading; None is empty, and lists have `; ` between their items.

    `where`: see `rows_where`. `top`: at most so many rows, those with the highest self time first.

    Raises:
        WrongUse: a result has no such list.
    """
    names, table = rows_of(analysis, rows)
    for condition in where:
        table = rows_where(table, condition)
    if top is not None:
        table = ranked(table)[:top]
    return "".join(_line(cells) for cells in (names, *([csv_cell(row[name]) for name in names] for row in table)))


def _line(cells: Sequence[Any]) -> str:
    """Return a line of CSV: what holds CR or LF is quoted, as both are written; the LF is kept."""
    line = io.StringIO(newline="")
    csv.writer(line, lineterminator="\r\n").writerow(cells)
    return line.getvalue().removesuffix("\r\n") + "\n"


def write_csv(analysis: Analysis, path: Path, rows: str = "layers") -> None:
    """Write one list into one file, in UTF-8."""
    with replacing(path) as beside:
        beside.write_text(csv_text(analysis, rows), encoding="utf-8", newline="")


def write_csv_files(analysis: Analysis, directory: Path) -> tuple[Path, ...]:
    """Write each list that has rows into a file of its own; return the files.

    Raises:
        OSError: one of them cannot be written.
    """
    paths = {name: directory / f"{name}.csv" for name in LISTS if getattr(analysis, name)}
    for name, path in paths.items():
        write_csv(analysis, path, name)
    return tuple(paths.values())


def rows_of(analysis: Analysis, name: str) -> tuple[Sequence[str], list[dict[str, Any]]]:
    """Return the columns of a list, and its rows as `result.json` has them.

    Raises:
        WrongUse: a result has no such list.
    """
    if name not in LISTS:
        raise WrongUse(f"rows={shown(name)}: a result has no such list of rows. It has: {', '.join(LISTS)}.")
    row_type = LISTS[name]
    names = (*(json_name(row_type, field.name) for field in fields(row_type)), *FOLLOWS.get(row_type, ()))
    return names, [to_plain(row) for row in getattr(analysis, name)]


def csv_cell(value: Any) -> Any:
    """Return a value as a cell: empty for None, and never a formula."""
    if value is None:
        return ""
    if isinstance(value, Mapping):
        value = json.dumps(value)
    elif isinstance(value, (list, tuple)):
        value = "; ".join("" if item is None else str(item) for item in value)
    if isinstance(value, str) and value.startswith(_BEGINS_A_FORMULA):
        return f"'{value}"
    return value


# --------------------------------------------------------------------------------------------------
# The lists of a result as pandas data frames. pandas is imported here alone, and need not be installed.

# What a column holds, by the annotation of its field; others hold Python objects.
_DTYPES = {"int": "int64", "float": "float64", "bool": "bool"}
_DTYPES |= {"int | None": "Int64", "float | None": "float64", "bool | None": "boolean"}


def data_frame(analysis: Analysis, rows: str = "layers") -> pd.DataFrame:
    """Return one list of the result, a row a row, columns and units as in `result.json`; what is not known is NA.

    Raises:
        MissingPackage: pandas is not installed.
        WrongUse: a result has no such list.
    """
    names, table = rows_of(analysis, rows)
    try:
        import pandas as pd
    except ImportError as error:
        raise MissingPackage(
            f"to_pandas needs pandas, which cannot be imported ({error}): pip install pandas"
        ) from error
    dtypes = {
        json_name(LISTS[rows], field.name): "float64" if field.name.endswith("_ns") else _DTYPES[field.type]
        for field in fields(LISTS[rows])
        if field.type in _DTYPES
    }
    return pd.DataFrame(table, columns=list(names), dtype="object").astype(dtypes)
