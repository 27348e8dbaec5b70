"""The lists of a result as pandas data frames. pandas is imported here alone, and need not be installed."""

from __future__ import annotations

from dataclasses import fields
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin, get_type_hints

from profiler_wrapper.analysis.model import Analysis
from profiler_wrapper.errors import MissingPackage
from profiler_wrapper.reports.csv_export import rows_of
from profiler_wrapper.reports.result_json import LISTS, json_name

if TYPE_CHECKING:
    import pandas as pd

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
