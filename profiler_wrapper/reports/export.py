"""The lists of a result as CSV, a row a line, names and units as in `result.json`.

A spreadsheet takes a text that begins with one of `= + - @` for a formula, which a module's name must never become:
such a text gets an apostrophe before it, as do those that begin with a tab or a line's end.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin, get_type_hints

from profiler_wrapper.analysis.model import Analysis
from profiler_wrapper.errors import MissingPackage, WrongUse
from profiler_wrapper.reports.result_json import LISTS, column_names, json_name, ranked, to_plain
from profiler_wrapper.trace.atomic import replacing

if TYPE_CHECKING:
    import pandas as pd


_BEGINS_A_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")


def csv_text(analysis: Analysis, rows: str = "layers", *, top: int | None = None) -> str:
    """One list of the result with its heading; what is not known is empty, and lists have `; ` between their items.

    `top`: at most so many rows, those with the highest self time first.

    Raises:
        WrongUse: a result has no such list.
    """
    names, table = rows_of(analysis, rows)
    if top is not None:
        table = ranked(table)[:top]
    return "".join(_line(cells) for cells in (names, *([csv_cell(row[name]) for name in names] for row in table)))


def _line(cells: Sequence[Any]) -> str:
    """What holds either of the two that may end a line is put in quotes, because both are written; one is kept."""
    line = io.StringIO(newline="")
    csv.writer(line, lineterminator="\r\n").writerow(cells)
    return line.getvalue().removesuffix("\r\n") + "\n"


def write_csv(analysis: Analysis, path: Path, rows: str = "layers") -> None:
    """One list into one file, in UTF-8."""
    path.write_text(csv_text(analysis, rows), encoding="utf-8", newline="")


def lists_with_rows(analysis: Analysis) -> tuple[str, ...]:
    """Names of the lists of this result that have any row."""
    return tuple(name for name in LISTS if getattr(analysis, name))


def write_csv_files(analysis: Analysis, directory: Path) -> tuple[Path, ...]:
    """Each list that has rows into a file of its own; the files.

    Raises:
        OSError: one of them cannot be written.
    """
    written = []
    for name in lists_with_rows(analysis):
        path = directory / f"{name}.csv"
        with replacing(path) as beside:
            write_csv(analysis, beside, name)
        written.append(path)
    return tuple(written)


def rows_of(analysis: Analysis, name: str) -> tuple[Sequence[str], list[dict[str, Any]]]:
    """The columns of a list, and its rows as `result.json` has them.

    Raises:
        WrongUse: a result has no such list.
    """
    if name not in LISTS:
        raise WrongUse(f"rows={name!r}: a result has no such list of rows. It has: {', '.join(LISTS)}.")
    return column_names(LISTS[name]), [to_plain(row) for row in getattr(analysis, name)]


def csv_cell(value: Any) -> Any:
    """A value as a cell: empty for what is not known, and no formula."""
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

# What a column holds, by the type of its field; others hold Python objects.
_DTYPES: dict[type, str] = {int: "int64", float: "float64", bool: "bool"}
_DTYPES_WITH_UNKNOWN: dict[type, str] = {int: "Int64", float: "float64", bool: "boolean"}


def data_frame(analysis: Analysis, rows: str = "layers") -> pd.DataFrame:
    """One list of the result, a row a row, columns and units as in `result.json`; what is not known is NA.

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
    dtypes = _dtypes(rows)
    return pd.DataFrame(
        {name: pd.Series([row[name] for row in table], dtype=dtypes.get(name, "object")) for name in names},
        columns=list(names),
    )


def _dtypes(rows: str) -> dict[str, Any]:
    """Of the columns that are fields of the rows."""
    row_type = LISTS[rows]
    hints = get_type_hints(row_type)
    return {json_name(row_type, field.name): _dtype(field.name, hints[field.name]) for field in fields(row_type)}


def _dtype(name: str, hint: Any) -> str:
    kinds = set(get_args(hint)) if get_origin(hint) in (Union, UnionType) else {hint}
    known = _DTYPES_WITH_UNKNOWN if NoneType in kinds else _DTYPES
    kind = next((kind for kind in kinds - {NoneType} if kind in known), None)
    if kind is int and name.endswith("_ns"):
        return "float64"  # microseconds with decimals; NaN where not known
    return "object" if kind is None else known[kind]
